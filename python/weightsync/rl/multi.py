"""Collectors whose workers are processes or threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from weightsync.errors import SettingError, UnsupportedError
from weightsync.rl._base import Collected, steps_of
from weightsync.rl._columns import MASK, POLICY_VERSION, TRAJ_IDS, Batch, Slot
from weightsync.rl._crew import worker_error
from weightsync.rl._multi_base import MultiCollector, Part
from weightsync.rl._terms import SettingRuntimeError, is_torchrl_buffer

CatResults = Literal["stack", 0, -1]


class MultiSyncCollector(MultiCollector):
    """Workers that collect at the same time, each its part of every batch.

    A batch holds every worker's part whole, in the order of the workers. Between batches the
    workers wait, so all frames of a batch are of the version sent last. It is shaped, for ``B``
    workers with one environment, or with ``P``:

    ============= ============== ===============
    cat_results   one            a batch of them
    ============= ============== ===============
    ``"stack"``   ``[B, T]``     ``[B, P, T]``
    ``0``         ``[B * T]``    ``[B * P, T]``
    ``-1``        ``[B * T]``    ``[P, T * B]``
    ============= ============== ===============

    Args:
        create_env_fn: an environment for each worker, as :class:`Collector` takes one.
        policy: as for :class:`Collector`; each worker has a copy.
        cat_results: how the workers' parts are put together.
        policy_factory: makes the policy in each worker, or a list with one for each worker. Weights
            are sent from the first :meth:`update_policy_weights_` on.
        workers: ``"processes"`` or ``"threads"`` of this process.
        weight_sync_schemes: the scheme of each model by id; ``{"policy": "shared-mem"}`` by default.
            Ids are ``"policy"`` and paths in a worker, such as ``"env.value_net"``.
        models: where the weights of the other models come from, by id.
        restart: whether a worker that failed is replaced. Its part is collected again, with the
            current weights. Without it the failure is an error, and the next batch begins with
            another worker in its place.
        timeout: seconds that a worker may take for one part. It has ten minutes to start.
        num_sub_threads: torch's threads in each worker process.
        num_threads: torch's threads in this process; None: as they are.
        num_workers: how many workers, where one function makes the environment of each.
        preemptive_threshold: the share of workers that end a batch: the others end their parts after the
            step under way. Only with environments of TorchRL.
        settings: those of :class:`Collector`. ``frames_per_batch``, devices and ``create_env_kwargs`` may
            be lists, with one for each worker.

    Raises:
        WorkerError: if a worker fails, with its last words.
    """

    def __init__(
        self,
        create_env_fn: Sequence[Any],
        policy: Any = None,
        *,
        cat_results: CatResults | None = "stack",
        **settings: Any,
    ) -> None:
        cat_results = "stack" if cat_results is None else cat_results
        if cat_results != "stack" and (isinstance(cat_results, str) or cat_results not in (0, -1)):
            raise SettingError(f'cat_results: expected "stack", 0 or -1, got {cat_results!r}')
        self.cat_results = cat_results
        if is_torchrl_buffer(settings.get("replay_buffer")):
            # Each worker's part goes into the buffer on its own.
            self.cat_results = "stack"
        #: Parts of batches that were given up are still written into these.
        self._given_up: list[Slot] = []
        super().__init__(create_env_fn, policy, **settings)

    def frames_per_batch_worker(self, *, worker_idx: int | None = None) -> int:
        if self._each is not None and worker_idx is not None:
            return self._each[worker_idx]
        return -(-self.frames_per_batch // self.num_workers)

    @property
    def _names_rows(self) -> bool:
        return self.cat_results in ("stack", -1)

    def _array_steps(self) -> int:
        return steps_of(self.frames_per_batch, len(self._seats) * self._envs)

    @property
    def _is_even(self) -> bool:
        """Whether all parts of a batch lie side by side, so that the batch is their memory as it is."""
        if not self._is_tensordict:
            return True
        is_cut = self.interruptor is not None and self.cat_results != "stack"
        return len(set(self._steps)) == 1 and not is_cut

    def _dims(self, steps: int) -> tuple[int, ...]:
        if not self._is_even:
            return (1, self._envs, steps)
        workers = len(self._seats)
        if self.cat_results == -1:
            return (self._envs, workers, steps)
        return (workers, self._envs, steps)

    def _batch_size(self) -> tuple[int, ...]:
        workers, envs, steps = len(self._seats), self._envs, self._steps[0]
        if self.cat_results == "stack":
            return (workers, envs, steps) if self._is_batched else (workers, steps)
        if not self._is_batched:
            return (workers * steps,)
        return (workers * envs, steps) if self.cat_results == 0 else (envs, steps * workers)

    def _collect(self) -> Collected:
        with self._crew.uninterrupted():
            # Set here: Ctrl-C that came meanwhile raises at the end of this block.
            self._collected = self._gather()
        return self._collected

    def _gather(self) -> Collected:
        """Has all workers collect their parts of one batch."""
        assert self._slots is not None
        axis = 1 if self.cat_results == -1 and self._is_even else 0
        count = len(self._seats)
        slots = [self._slots.take()] * count if self._is_even else [self._slots.take() for _ in self._seats]
        if self.interruptor is not None:
            self.interruptor.start_collection()
        try:
            for worker, seat in enumerate(self._seats):
                if seat.stage == "empty":
                    seat.failures = 0
                    self._start_again(worker)
                index = worker if self._is_even else 0
                self._order(worker, slots[worker], self._counted, axis, index)
            parts = self._parts_of(slots)
        except BaseException:
            self._give_up(slots)
            raise
        if self._is_even:
            views = [self._views(slots[0], self._steps[0])] * count
        else:
            views = [self._views(slots[one], self._steps[one]) for one in range(count)]
        for part in parts:
            self._renumber(part, views[part.worker])
        if self._is_tensordict:
            return self._joined(parts, views)
        batch = self._batch(views[0], self._batch_size())
        is_split = is_torchrl_buffer(self.replay_buffer)
        return Collected.of(batch, _unstacked(batch) if is_split else ())

    def _joined(self, parts: list[Part], views: list[Any]) -> Collected:
        """A batch of TensorDicts."""
        assert self._form is not None
        versions = np.concatenate(
            [self._own(one, views[one.worker])[POLICY_VERSION][:, : one.steps].reshape(-1) for one in parts]
        )
        frames = sum(one.steps for one in parts) * self._envs
        each: list[Any] = []
        result = None
        if self.replay_buffer is not None and not self._ignore_rb:
            # What a part that ended early has in place of frames is not written.
            each = [self._tensordict(one, views[one.worker])[..., : one.steps] for one in parts]
        elif self._is_even and not self._form.is_dynamic:
            result = self._whole(views[0])
        else:
            result = self._put_together([self._tensordict(one, views[one.worker]) for one in parts], parts)
        return Collected(result, frames, versions, self._noted(), parts=each)

    def _whole(self, views: Any) -> Any:
        """The parts as they lie in memory."""
        assert self._form is not None
        workers, steps, batch = len(self._seats), self._steps[0], self._form.batch
        if self.cat_results == "stack":
            size: tuple[int, ...] = (workers, *batch, steps)
        elif not batch:
            size = (workers * steps,)
        elif self.cat_results == 0:
            size = (workers * batch[0], *batch[1:], steps)
        else:
            size = (*batch, workers * steps)
        result = self._form.tensordict(views, size)
        self._mark(result)
        result.names = [*[None] * (result.ndim - 1), "time"]
        return result

    def _put_together(self, frames: list[Any], parts: list[Part]) -> Any:
        import torch
        from tensordict import TensorDict

        if self.cat_results == "stack":
            for one in frames:
                self._mark(one)
            # Where parts are of several lengths, the result is a lazy stack.
            result: Any = TensorDict.maybe_dense_stack(frames, 0)
            if result.batch_size[-1:] != frames[0].batch_size[-1:]:
                return result
            result.names = [*[None] * (result.ndim - 1), "time"]
            return result
        assert self._form is not None
        if self.cat_results == 0 and self._form.batch and len({one.shape[-1] for one in frames}) > 1:
            raise SettingRuntimeError(
                "cat_results=0: the workers' parts are of several lengths: give cat_results=-1"
            )
        kept = [one[..., : part.steps] for one, part in zip(frames, parts, strict=True)]
        return torch.cat(kept, self.cat_results)

    def _mark(self, frames: Any) -> None:
        """Says which of these are frames, where parts may end early."""
        if self.interruptor is not None and self._asked.track_traj_ids:
            frames.set(MASK, frames.get(TRAJ_IDS) != -1)

    def _parts_of(self, slots: list[Slot]) -> list[Part]:
        """Waits for every worker's part, and returns them in the order of the workers."""
        parts: dict[int, Part] = {}
        enough = int(len(self._seats) * self.preemptive_threshold)
        while True:
            self._done = [one for one in self._done if any(one.slot is slot for slot in slots)]
            self._free_given_up()
            parts = {part.worker: part for part in self._done}
            if self.interruptor is not None and len(parts) >= enough:
                self.interruptor.stop_collection()
            if len(parts) == len(self._seats):
                self._done.clear()
                return [part for _, part in sorted(parts.items())]
            # A worker that failed after its part costs this batch nothing.
            ended = [one for one in self._failures if not one.restarted and one.worker not in parts]
            if ended:
                raise worker_error(ended[0].kind, "; ".join(map(str, ended)))
            self._hear(None)

    def _give_up(self, slots: list[Slot]) -> None:
        """Ends a batch that is not whole. Workers still write into its slots until they are done."""
        self._failures = []
        for seat in self._seats:
            if seat.stage == "empty":
                seat.orders.clear()
        for slot in slots:
            if slot not in self._given_up:
                self._given_up.append(slot)

    def _free_given_up(self) -> None:
        """Frees slots that no worker writes into any more."""
        assert self._slots is not None
        written = {id(order.slot) for seat in self._seats for order in seat.orders}
        written |= {id(part.slot) for part in self._done}
        for slot in [one for one in self._given_up if id(one) not in written]:
            self._given_up.remove(slot)
            self._slots.put_back(slot)


def _unstacked(batch: Batch) -> list[Batch]:
    """Each worker's part of a batch whose first dimension is the workers'."""
    columns = batch.columns()
    return [
        Batch.of({key: value[worker] for key, value in columns.items()}, batch.batch_size[1:])
        for worker in range(batch.batch_size[0])
    ]


class MultiAsyncCollector(MultiCollector):
    """Workers that collect all the time: batches come from whichever worker is done first.

    Each batch is one worker's, shaped ``[T]`` or ``[P, T]``, and has ``frames_per_batch`` frames.
    A worker goes on with the next batch at once, with one finished batch waiting at most. New
    weights reach it between two steps, so a batch may hold frames of several versions, and says
    which.

    A worker that failed is noted in ``batch.failures``, and the others go on.

    Args:
        max_staleness: frames that are more than so many versions old are not handed out. Batches
            with such frames are dropped, and counted in ``batch.dropped``.
        settings: those of :class:`MultiSyncCollector` but ``cat_results``.

    Raises:
        WorkerError: if no worker is left.
    """

    def __init__(
        self,
        create_env_fn: Sequence[Any],
        policy: Any = None,
        *,
        max_staleness: int | None = None,
        cat_results: str | None = None,
        **settings: Any,
    ) -> None:
        if cat_results not in (None, "stack"):
            raise SettingError(
                "cat_results can only be used with ``MultiSyncCollector``: a batch here is of one worker"
            )
        if max_staleness is not None and max_staleness < 0:
            raise SettingError(f"max_staleness: expected 0 or more, got {max_staleness}")
        self._max_staleness = max_staleness
        #: Frames since the batch before.
        self._dropped = 0
        super().__init__(create_env_fn, policy, **settings)

    def frames_per_batch_worker(self, *, worker_idx: int | None = None) -> int:
        return self.frames_per_batch

    def _array_steps(self) -> int:
        return steps_of(self.frames_per_batch, self._envs)

    def _dims(self, steps: int) -> tuple[int, ...]:
        return (1, self._envs, steps)

    def _collect(self) -> Collected:
        with self._crew.uninterrupted():
            # Set here: Ctrl-C that came meanwhile raises at the end of this block.
            self._collected = self._first_done()
        return self._collected

    def _first_done(self) -> Collected:
        """Waits for the worker that is done first."""
        while True:
            self._keep_busy()
            if not self._done:
                self._check_any_left()
            self._hear(0 if self._done else None)
            if not self._done:
                continue
            part = min(self._done, key=lambda one: one.at)
            self._done.remove(part)
            steps = self._steps[part.worker]
            views = self._views(part.slot, steps)
            age = self.version - int(views[POLICY_VERSION].min())
            # Random actions are of no version.
            is_fresh = self._max_staleness is None or part.is_random or age <= self._max_staleness
            if part.is_stale or not is_fresh:
                self._dropped += 0 if part.is_stale else self.frames_per_batch
                continue
            self._renumber(part, views)
            if self._is_tensordict:
                frames = self._tensordict(part, views)
                versions = views[POLICY_VERSION]
                collected = Collected(frames, frames.numel(), versions, self._noted(), parts=[frames])
            else:
                size = (self._envs, steps) if self._is_batched else (steps,)
                collected = Collected.of(self._batch(views, size))
            collected.dropped, self._dropped = self._dropped, 0
            return collected

    def _keep_busy(self) -> None:
        """Asks each worker for the part that it does, and for the next one."""
        assert self._slots is not None
        for worker, seat in enumerate(self._seats):
            waiting = sum(part.worker == worker for part in self._done)
            while seat.stage != "empty" and (ahead := len(seat.orders) + waiting) < 2:
                frames = self._counted + ahead * self.frames_per_batch
                self._order(worker, self._slots.take(), frames)

    def _check_any_left(self) -> None:
        if all(seat.stage == "empty" for seat in self._seats):
            failures, self._failures = self._failures, []
            kind = failures[-1].kind if failures else ""
            raise worker_error(kind, "no worker is left: " + "; ".join(map(str, failures)))

    def _failed(self, worker: int, reason: str, kind: str = "") -> None:
        super()._failed(worker, reason, kind)
        seat = self._seats[worker]
        if seat.stage == "empty":
            if self._slots is not None:
                for order in seat.orders:
                    self._slots.put_back(order.slot)
            seat.orders.clear()
            if self._sender is not None:
                self._sender.forget([worker])


class AsyncCollector(MultiAsyncCollector):
    """One worker that collects while the trainer trains.

    Args:
        create_env_fn: an environment, as for :class:`Collector`.
        policy: as for :class:`Collector`; the worker has a copy.
        settings: those of :class:`MultiAsyncCollector`.
    """

    def __init__(self, create_env_fn: Any, policy: Any = None, **settings: Any) -> None:
        if settings.get("preemptive_threshold") is not None:
            raise UnsupportedError("preemptive_threshold: there is one worker, and nothing to wait for")
        super().__init__([create_env_fn], policy, **settings)
