"""Collectors whose workers are processes or threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from weightsync.errors import PeerError, SettingError
from weightsync.rl._base import steps_of
from weightsync.rl._columns import POLICY_VERSION, Batch, Slot
from weightsync.rl._multi_base import MultiCollector, Part

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
        num_threads: torch's threads in each worker process.
        settings: those of :class:`Collector`.

    Raises:
        PeerError: if a worker fails, with its last words.
    """

    def __init__(
        self,
        create_env_fn: Sequence[Any],
        policy: Any = None,
        *,
        cat_results: CatResults = "stack",
        **settings: Any,
    ) -> None:
        if cat_results not in ("stack", 0, -1):
            raise SettingError(f'cat_results: expected "stack", 0 or -1, got {cat_results!r}')
        self._cat_results = cat_results
        #: Parts of batches that were given up are still written into these.
        self._given_up: list[Slot] = []
        super().__init__(create_env_fn, policy, **settings)

    def _steps_of_a_part(self) -> int:
        return steps_of(self.frames_per_batch, len(self._seats) * self._envs)

    def _dims(self) -> tuple[int, ...]:
        workers = len(self._seats)
        if self._cat_results == -1:
            return (self._envs, workers, self._steps)
        return (workers, self._envs, self._steps)

    def _batch_size(self) -> tuple[int, ...]:
        workers, envs, steps = len(self._seats), self._envs, self._steps
        if self._cat_results == "stack":
            return (workers, envs, steps) if self._is_batched else (workers, steps)
        if not self._is_batched:
            return (workers * steps,)
        return (workers * envs, steps) if self._cat_results == 0 else (envs, steps * workers)

    def _collect(self) -> Batch:
        with self._crew.uninterrupted():
            # Set here: Ctrl-C that came meanwhile raises at the end of this block.
            self._collected = self._gather()
        return self._collected

    def _gather(self) -> Batch:
        """Has all workers collect their parts of one batch."""
        assert self._slots is not None
        axis = 1 if self._cat_results == -1 else 0
        slot = self._slots.take()
        try:
            for worker, seat in enumerate(self._seats):
                if seat.stage == "empty":
                    seat.failures = 0
                    self._start_again(worker)
                self._order(worker, slot, self._frames, axis, worker)
            parts = self._parts_of(slot)
        except BaseException:
            self._give_up(slot)
            raise
        views = self._views(slot)
        for part in parts:
            self._renumber(part, views)
        return self._batch(views, self._batch_size())

    def _parts_of(self, slot: Slot) -> list[Part]:
        """Waits for every worker's part of a slot, and returns them in the order of the workers."""
        parts: dict[int, Part] = {}
        while True:
            self._done = [one for one in self._done if one.slot is slot]
            self._free_given_up()
            parts = {part.worker: part for part in self._done}
            if len(parts) == len(self._seats):
                self._done.clear()
                return [part for _, part in sorted(parts.items())]
            # A worker that failed after its part costs this batch nothing.
            ended = [one for one in self._failures if not one.restarted and one.worker not in parts]
            if ended:
                raise PeerError("; ".join(map(str, ended)))
            self._hear(None)

    def _give_up(self, slot: Slot) -> None:
        """Ends a batch that is not whole. Workers still write into its slot until they are done."""
        self._failures = []
        for seat in self._seats:
            if seat.stage == "empty":
                seat.orders.clear()
        self._given_up.append(slot)

    def _free_given_up(self) -> None:
        """Frees slots that no worker writes into any more."""
        assert self._slots is not None
        written = {id(order.slot) for seat in self._seats for order in seat.orders}
        written |= {id(part.slot) for part in self._done}
        for slot in [one for one in self._given_up if id(one) not in written]:
            self._given_up.remove(slot)
            self._slots.put_back(slot)


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
        PeerError: if no worker is left.
    """

    def __init__(
        self,
        create_env_fn: Sequence[Any],
        policy: Any = None,
        *,
        max_staleness: int | None = None,
        **settings: Any,
    ) -> None:
        if max_staleness is not None and max_staleness < 0:
            raise SettingError(f"max_staleness: expected 0 or more, got {max_staleness}")
        self._max_staleness = max_staleness
        #: Frames since the batch before.
        self._dropped = 0
        super().__init__(create_env_fn, policy, **settings)

    def _steps_of_a_part(self) -> int:
        return steps_of(self.frames_per_batch, self._envs)

    def _dims(self) -> tuple[int, ...]:
        return (1, self._envs, self._steps)

    def _collect(self) -> Batch:
        with self._crew.uninterrupted():
            # Set here: Ctrl-C that came meanwhile raises at the end of this block.
            self._collected = self._first_done()
        return self._collected

    def _first_done(self) -> Batch:
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
            views = self._views(part.slot)
            age = self.version - int(views[POLICY_VERSION].min())
            # Random actions are of no version.
            is_fresh = self._max_staleness is None or part.is_random or age <= self._max_staleness
            if not is_fresh:
                self._dropped += self.frames_per_batch
                continue
            self._renumber(part, views)
            size = (self._envs, self._steps) if self._is_batched else (self._steps,)
            batch = self._batch(views, size)
            batch.dropped, self._dropped = self._dropped, 0
            return batch

    def _keep_busy(self) -> None:
        """Asks each worker for the part that it does, and for the next one."""
        assert self._slots is not None
        for worker, seat in enumerate(self._seats):
            waiting = sum(part.worker == worker for part in self._done)
            while seat.stage != "empty" and (ahead := len(seat.orders) + waiting) < 2:
                frames = self._frames + ahead * self.frames_per_batch
                self._order(worker, self._slots.take(), frames)

    def _check_any_left(self) -> None:
        if all(seat.stage == "empty" for seat in self._seats):
            failures, self._failures = self._failures, []
            raise PeerError("no worker is left: " + "; ".join(map(str, failures)))

    def _failed(self, worker: int, reason: str) -> None:
        super()._failed(worker, reason)
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
        super().__init__([create_env_fn], policy, **settings)
