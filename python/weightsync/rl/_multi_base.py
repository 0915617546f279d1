"""What collectors with workers share: places for workers, orders, parts, weights."""

from __future__ import annotations

import abc
import mmap
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from weightsync._checks import choice, numbers
from weightsync._native import Trajectories
from weightsync.errors import (
    CorruptError,
    LifecycleError,
    PeerError,
    SettingError,
    UnsupportedError,
    WorkerError,
)
from weightsync.rl._base import BaseCollector, check_known
from weightsync.rl._columns import (
    TRAJ_IDS,
    Batch,
    Column,
    Failure,
    Key,
    Layout,
    Slot,
    Slots,
    compare,
)
from weightsync.rl._crew import (
    Crew,
    Process,
    Thread,
    answered_error,
    memory_file,
    pickled,
    worker_error,
)
from weightsync.rl._envs import is_made, maker
from weightsync.rl._policy import device_of, on_device
from weightsync.rl._schemes import engine_scheme, given_models
from weightsync.rl._terms import SettingTypeError, each_of
from weightsync.rl._worker import Start
from weightsync.sender import Sender

if TYPE_CHECKING:
    from weightsync.rl._form import Form

#: After more failures in a row than this, without a part delivered, a worker is not started again.
_MOST_FAILURES = 3

#: Seconds that a worker may take to start: it imports torch, on a machine that may be busy.
_START = 600.0


@dataclass
class Order:
    """A part that a worker is asked for."""

    part: int
    slot: Slot
    axis: int
    index: int
    random: int
    steps: int
    is_told: bool = False
    #: Whether nobody wants it any more: the environments were seeded or reset after it was asked for.
    is_stale: bool = False


@dataclass
class Part:
    """A part that a worker has collected."""

    worker: int
    slot: Slot
    axis: int
    index: int
    is_random: bool
    #: Its place in what came from the worker.
    place: int
    #: When it was done, on the clock of the host.
    at: float
    #: How many steps it has. The rest of its place is empty.
    steps: int
    is_stale: bool = False
    #: The frames themselves, where they do not lie in the slot.
    frames: Any = None
    #: The environments whose first trajectory began in the part before, where trajectories are put
    #: together.
    goes_on: np.ndarray | None = None


@dataclass
class Seat:
    """A worker's place: it stays while processes come and go."""

    stage: Literal["starting", "joining", "working", "empty"] = "starting"
    orders: deque[Order] = field(default_factory=deque)
    #: The slots that the worker knows.
    slots: set[int] = field(default_factory=set)
    #: When it began with what it does now.
    since: float = field(default_factory=time.monotonic)
    #: In a row.
    failures: int = 0
    #: What it was asked, and has not answered yet.
    asked: int = 0
    #: Its own numbers of the trajectories at the end of its last part.
    last: np.ndarray | None = None


class MultiCollector(BaseCollector):
    """What collectors with workers share."""

    def __init__(
        self,
        create_env_fn: Sequence[Any],
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None,
        num_workers: int | None = None,
        create_env_kwargs: Any = None,
        workers: Literal["processes", "threads"] = "processes",
        weight_sync_schemes: Mapping[str, Any] | None = None,
        models: Mapping[str, Any] | None = None,
        restart: bool = False,
        timeout: float | None = 600.0,
        num_threads: int | None = None,
        num_sub_threads: int = 1,
        preemptive_threshold: float | None = None,
        collector_class: Any = None,
        frames_per_batch: int | Sequence[int],
        device: Any = None,
        storing_device: Any = None,
        policy_device: Any = None,
        env_device: Any = None,
        **settings: Any,
    ) -> None:
        choice("workers", workers, "processes", "threads")
        self._workers = workers
        if collector_class is not None:
            raise UnsupportedError(
                "collector_class: each worker has this package's own loop and no collector in it: give "
                "hooks, a policy or an environment of your own in its place"
            )
        create_env_fn = _environments(create_env_fn, num_workers, type(self).__name__)
        count = self.num_workers = len(create_env_fn)
        each = None
        if isinstance(frames_per_batch, Sequence):
            each = list(frames_per_batch)
            if len(each) != count:
                raise SettingError(
                    "If `frames_per_batch` is provided as a sequence, it should contain exactly one value per "
                    f"worker: expected {count} of them, got {len(each)}"
                )
            frames_per_batch = sum(each)
        self._each = each
        self._set_threshold(preemptive_threshold)
        factories = _for_each(policy_factory, count)
        devices = {
            "device": each_of(device, count, "device"),
            "storing_device": each_of(storing_device, count, "storing_device"),
            "policy_device": each_of(policy_device, count, "policy_device"),
            "env_device": each_of(env_device, count, "env_device"),
        }
        super().__init__(
            policy,
            policy_factory=factories[0],
            frames_per_batch=frames_per_batch,
            device=devices["device"][0],
            storing_device=devices["storing_device"][0],
            policy_device=devices["policy_device"][0],
            env_device=devices["env_device"][0],
            **settings,
        )
        if policy is not None and self._updates_are_foreign(weight_sync_schemes) and any(factories):
            raise SettingTypeError(
                "give a policy or a policy_factory, not both, with a weight_updater"
            )
        #: The form of frames that are TensorDicts.
        self._form: Form | None = None
        self._given_schemes = dict(weight_sync_schemes or {})
        self._sent = given_models(self.policy, models, self._given_schemes)
        self._restart, self._timeout = restart, timeout
        self._sender: Sender | None = None
        #: How often weights were sent after the first.
        self._updates = 0
        self._version_before = 0
        self._scheme, self._waits = engine_scheme(self._given_schemes)
        self._failures: list[Failure] = []
        self._trajectories = Trajectories(count)
        #: Parts that were heard of, and are in no batch yet.
        self._done: list[Part] = []
        self._parts = 0
        #: What workers have answered, by the number of the question.
        self._answers: dict[int, Any] = {}
        self._questions = 0
        self._columns: list[Column] = []
        named = each_of(create_env_kwargs, count, "create_env_kwargs")
        makers = [maker(env, kwargs) for env, kwargs in zip(create_env_fn, named, strict=True)]
        if any(map(is_made, makers)):
            raise SettingError(
                "workers need environments of their own: give functions that make them, and not "
                "environments"
            )
        if num_threads is not None:
            import torch

            torch.set_num_threads(num_threads)
        # A copy on the CPU travels: a worker would open each GPU that a pickle names.
        policy_device = self._policy_device or device_of(self.policy)
        travels = self.policy if device_of(self.policy) is None else on_device(self.policy, "cpu")
        hooks = self._asked
        self._hooks = {"pre_collect_hook": hooks.pre_collect_hook, "post_collect_hook": hooks.post_collect_hook}
        starts = [
            Start(
                worker=worker,
                make_env=makers[worker],
                # Where a factory makes the policy, the trainer's own is for its weights alone.
                policy=None if factories[worker] is not None else travels,
                policy_factory=factories[worker],
                policy_device=policy_device,
                rules=self._rules,
                explore=self._explore,
                num_threads=num_sub_threads,
                models=list(self._sent) or ["policy"],
                terms=self._terms(
                    frames_per_batch=self.frames_per_batch_worker(worker_idx=worker),
                    **{name: values[worker] for name, values in devices.items()},
                    use_buffers=self._asked.use_buffers,
                ),
            )
            for worker in range(count)
        ]
        self._seats = [Seat() for _ in starts]
        self._slots: Slots | None = None
        self._crew = self._make_crew(starts)
        if self.preemptive_threshold < 1.0:
            self.interruptor = Interruptor()
        self._opened()
        try:
            self._open()
        except BaseException:
            self.shutdown()
            raise

    #: Ends the parts of workers that are late, where the threshold is less than 1.
    interruptor: Interruptor | None = None

    #: As in TorchRL, whose workers write frames into the buffer, and do not split them.
    _splits_parts = False

    def _set_threshold(self, threshold: float | None) -> None:
        self.preemptive_threshold = 1.0 if threshold is None else float(threshold)
        if not 0.0 <= self.preemptive_threshold <= 1.0:
            raise SettingError(f"preemptive_threshold must be between 0.0 and 1.0, got {threshold}")

    def _updates_are_foreign(self, schemes: Any) -> bool:
        return self._weight_updater is not None and schemes is None

    def frames_per_batch_worker(self, *, worker_idx: int | None = None) -> int:
        """How many frames a worker collects for a batch."""
        raise NotImplementedError

    def _make_crew(self, starts: list[Start]) -> Crew:
        """Starts the workers."""
        return Crew(starts, Thread if self._workers == "threads" else Process)

    def _open(self) -> None:
        """Waits for the workers, and gives them their first weights.

        Raises:
            PeerError: if a worker cannot start, with its last words.
        """
        self._wait_for("working")
        self._is_tensordict = self._form is not None
        self._check_form()
        if not self._is_tensordict and (self.interruptor is not None or self._each is not None):
            raise UnsupportedError(
                "preemptive_threshold and frames_per_batch as a list are for environments of TorchRL"
            )
        self._steps = [self._steps_of_a_part(worker) for worker in range(len(self._seats))]
        if self._is_tensordict and not self._given_schemes and self._sent:
            from torchrl.weight_update import SharedMemWeightSyncScheme

            # TorchRL's name of what is done where nothing else is asked for.
            self._given_schemes = {"policy": SharedMemWeightSyncScheme()}
        sizes = [Layout(self._columns, self._dims(steps)).size for steps in self._steps]
        self._slots = Slots(max(sizes))
        if self.interruptor is not None and not self._crew.has_calls:
            raise UnsupportedError(
                "preemptive_threshold: workers of other hosts share no memory with the trainer"
            )
        if self.interruptor is not None:
            for worker in range(len(self._seats)):
                self._crew.tell(worker, {"do": "flag"}, [self.interruptor.fd])
        if self._sent:
            self._connect(self._first_weights())
        if self._seed is not None:
            self.set_seed(self._seed)

    def _wait_for(self, stage: str) -> None:
        """Waits until all workers are at a stage; a failure meanwhile is an error."""
        while any(seat.stage not in (stage, "empty") for seat in self._seats):
            self._hear(None)
            ended = [one for one in self._failures if not one.restarted]
            if ended:
                self._failures = []
                raise worker_error(ended[0].kind, "; ".join(map(str, ended)))

    @property
    def version(self) -> int:
        return 0 if self._sender is None else self._sender.versions.get("policy", 0)

    def pid(self, worker: int) -> int | None:
        """The process of a worker, or its launcher's; None for a thread, and while there is none."""
        return self._crew.pid(worker)

    # The weights.

    def _connect(self, models: Mapping[str, Any]) -> None:
        """Makes the sender, and has all workers follow it with its first weights."""
        sender = Sender(models=dict(models), scheme=self._scheme)
        sender.connect(workers=0)
        self._sender = sender
        for worker, seat in enumerate(self._seats):
            if seat.stage == "working":
                self._join(worker)
        self._wait_for("working")

    def _join(self, worker: int) -> None:
        assert self._sender is not None
        self._enter(worker, "joining")
        info = self._sender.init_info.to_json()
        self._crew.tell(worker, {"do": "join", "info": info, "updates": self._updates})

    def _first_weights(self) -> dict[str, Any]:
        """The weights that workers begin with."""
        return self._sent

    def _update(self, weights: dict[str, Any], worker_ids: Any) -> Any:
        check_known(weights, list(self._sent) or ["policy"])
        weights = {
            name: self._sent.get(name) if value is None else value
            for name, value in weights.items()
        }
        missing = [name for name, value in weights.items() if value is None]
        if missing:
            raise SettingError(
                f"there are no weights of {missing[0]!r} to send: the collector has no module with "
                "weights of that name, so give them"
            )
        each = _by_worker(weights)
        if each and len(weights) > 1:
            raise SettingError(
                "weights by worker are for one model alone: update the other models in a call of "
                "their own"
            )
        if self._sender is None:
            # The workers have policies of their own until the first weights come.
            with self._alone(), self._crew.uninterrupted():
                self._connect({"policy": next(iter(each.values())) if each else weights["policy"]})
        assert self._sender is not None
        before = self._sender.versions
        try:
            if each:
                self._numbers(list(each))
                return self._sender.send_each(each, timeout=self._timeout)
            return self._sender.send(
                weights_dict=weights,
                worker_ids=self._numbers(worker_ids),
                wait="applied" if self._waits else "sent",
                timeout=self._timeout,
            )
        finally:
            # An error may come before weights went out, or after it.
            self._updates += self._sender.versions != before

    @property
    def _weight_sync_schemes(self) -> dict[str, Any]:
        return self._given_schemes

    @property
    def policy_version(self) -> int | str | None:
        if not self._asked.track_policy_version:
            return None
        return self._version_before + self._updates

    def _numbers(self, worker_ids: Any) -> list[int] | None:
        if worker_ids is None:
            return None
        chosen = numbers(worker_ids)
        for worker in chosen:
            if not 0 <= worker < len(self._seats):
                raise SettingError(
                    f"worker_ids: expected numbers from 0 to {len(self._seats) - 1}, got {worker}"
                )
        return chosen

    # Orders and parts.

    @abc.abstractmethod
    def _dims(self, steps: int) -> tuple[int, ...]:
        """The dimensions of a slot: the workers of a batch, environments, time."""

    @abc.abstractmethod
    def _array_steps(self) -> int:
        """The steps of a part of arrays."""

    def _steps_of_a_part(self, worker: int) -> int:
        if not self._is_tensordict:
            return self._array_steps()
        # As in TorchRL, a batch may have more frames than asked for.
        return -(-self.frames_per_batch_worker(worker_idx=worker) // self._envs)

    @property
    def _counted(self) -> int:
        """How many frames there are, as far as random actions are concerned."""
        buffer = self.replay_buffer if self._is_tensordict else None
        return int(getattr(buffer, "write_count", self._frames))

    def _order(
        self, worker: int, slot: Slot, before: int, axis: int = 0, index: int = 0
    ) -> None:
        """Asks a worker for a part, in its place of a slot.

        Args:
            before: how many frames come before it, as far as this worker is concerned.
        """
        self._parts += 1
        steps = self._steps[worker]
        random = self._random_steps(steps, before)
        seat = self._seats[worker]
        if not seat.orders:
            seat.since = time.monotonic()
        seat.orders.append(Order(self._parts, slot, axis, index, random, steps))
        self._tell(worker)

    def _tell(self, worker: int) -> None:
        """Tells a worker the orders that it does not know."""
        seat = self._seats[worker]
        if seat.stage not in ("working", "joining"):
            return
        for order in seat.orders:
            if order.is_told:
                continue
            order.is_told = True
            number = order.slot.number
            if number not in seat.slots:
                seat.slots.add(number)
                assert self._slots is not None
                place = {"do": "slot", "slot": number, "dims": self._dims(order.steps)}
                place |= {"axis": order.axis, "index": order.index, "offset": order.slot.offset}
                self._crew.tell(worker, place, [self._slots.fd])
            ask = {"do": "collect", "part": order.part, "slot": number}
            self._crew.tell(worker, {**ask, "steps": order.steps, "random": order.random})

    def _hear(self, timeout: float | None) -> None:
        """Notes what workers have said within the timeout. Those that failed are started again if
        that was asked for."""
        for worker, said in self._crew.hear(self._until_overdue(timeout)):
            what = said["is"]
            if what == "part":
                self._done.append(self._delivered(worker, said))
            elif what == "answer":
                self._seats[worker].asked -= 1
                self._seats[worker].since = time.monotonic()
                self._answers[said["number"]] = _answered(said)
            elif what == "ready":
                self._is_ready(worker, said)
            elif what == "joined":
                self._enter(worker, "working")
                self._tell(worker)
            else:
                self._failed(worker, said["reason"], said.get("kind", ""))
        now = time.monotonic()
        for worker, seat in enumerate(self._seats):
            limit = self._limit(seat)
            if limit is not None and now - seat.since > limit:
                how = self._crew.end(worker)
                self._failed(worker, f"it was {_doing(seat)} for more than {limit:g} s{how}")

    def _limit(self, seat: Seat) -> float | None:
        """Seconds that a worker may take for what it does."""
        if seat.stage in ("starting", "joining"):
            return _START
        is_busy = seat.orders or seat.asked
        return self._timeout if seat.stage == "working" and is_busy else None

    def _until_overdue(self, timeout: float | None) -> float | None:
        """The timeout, or what is left of the first worker's."""
        now = time.monotonic()
        limits = [(seat.since, self._limit(seat)) for seat in self._seats]
        left = [max(0.0, since + limit - now) for since, limit in limits if limit is not None]
        return min(left + ([] if timeout is None else [timeout]), default=None)

    def _enter(self, worker: int, stage: Literal["starting", "joining", "working", "empty"]) -> None:
        seat = self._seats[worker]
        seat.stage, seat.since = stage, time.monotonic()

    def _is_ready(self, worker: int, said: Mapping[str, Any]) -> None:
        """A worker has its environments and its policy."""
        columns = [Column.from_json(one) for one in said["columns"]]
        form = _form(said.get("form"))
        if not self._columns:
            self._columns, self._form = columns, form
            self._envs, self._is_batched = said["num_envs"], said["is_batched"]
        try:
            compare(self._columns, columns, worker)
            if form != self._form:
                raise SettingError(
                    f"the frames of worker {worker} differ from those of worker 0: give all workers "
                    f"environments and policies of one kind (expected {self._form}, got {form})"
                )
            if said["num_envs"] != self._envs:
                raise SettingError(
                    f"worker {worker} has {said['num_envs']} environments, and others have "
                    f"{self._envs}: give all workers the same number"
                )
        except SettingError as error:
            if self._slots is None:
                raise
            self._crew.end(worker)
            self._failed(worker, str(error))
            return
        if self._slots is not None:
            # It has taken the place of another.
            self._seed_worker(worker)
            if self.interruptor is not None:
                self._crew.tell(worker, {"do": "flag"}, [self.interruptor.fd])
        if self._sender is not None:
            self._join(worker)
        else:
            self._enter(worker, "working")
        self._tell(worker)

    def _delivered(self, worker: int, said: Mapping[str, Any]) -> Part:
        seat = self._seats[worker]
        order = seat.orders.popleft()
        if said["part"] != order.part:
            raise PeerError(f"worker {worker} delivered part {said['part']}, not {order.part}")
        seat.failures, seat.since = 0, time.monotonic()
        delivered = Part(
            worker,
            order.slot,
            order.axis,
            order.index,
            order.random > 0,
            self._trajectories.arrived(worker),
            said["at"],
            min(int(said.get("steps", order.steps)), order.steps),
            order.is_stale,
            _read(said["fd"]) if "fd" in said else None,
        )
        if self._episodes is not None:
            # Also of a part that will not be handed out.
            views = Layout(self._columns, self._dims(order.steps)).views(order.slot.memory)
            ids = self._own(delivered, views)[TRAJ_IDS]
            if seat.last is not None:
                delivered.goes_on = ids[:, 0] == seat.last
            seat.last = ids[:, delivered.steps - 1].copy()
        return delivered

    def _failed(self, worker: int, reason: str, kind: str = "") -> None:
        """Notes a failure, and starts another worker in the place where that was asked for."""
        seat = self._seats[worker]
        seat.failures += 1
        seat.asked, seat.last = 0, None
        seat.slots.clear()
        self._trajectories.replaced(worker)
        for order in seat.orders:
            order.is_told = False
        again = False
        self._enter(worker, "empty")
        try:
            if self._restart and self._slots is not None and seat.failures <= _MOST_FAILURES:
                self._start_again(worker)
                again = True
        except (OSError, RuntimeError) as error:
            # Such as no memory, descriptor or thread. What other workers have said meanwhile is
            # still to be noted.
            reason = f"{reason}; another cannot be started: {error}"
        finally:
            self._failures.append(Failure(worker, reason, again, kind))

    def _start_again(self, worker: int) -> None:
        """Starts another worker in an empty place; it gets the current weights, and the orders."""
        self._crew.start(worker)
        self._enter(worker, "starting")

    def _renumber(self, part: Part, views: Mapping[Key, np.ndarray]) -> None:
        """Gives the trajectories of a part that is handed out numbers that no others have."""
        ids = self._own(part, views)[TRAJ_IDS][:, : part.steps]
        self._trajectories.rename(part.worker, part.place, ids)
        if self._episodes is not None:
            self._episodes.follow(part.worker, ids, part.goes_on)

    def _views(self, slot: Slot, steps: int) -> dict[Key, np.ndarray]:
        """A slot's arrays. Its memory is used again once the last of them is dropped."""
        assert self._slots is not None
        return Layout(self._columns, self._dims(steps)).views(self._slots.lend(slot))

    @staticmethod
    def _own(part: Part, views: Mapping[Key, np.ndarray]) -> dict[Key, np.ndarray]:
        """What a part's worker has written, ``[P, steps, *shape]``."""
        at: Any = part.index if part.axis == 0 else (slice(None), part.index)
        return {key: view[at] for key, view in views.items()}

    def _tensordict(self, part: Part, views: Mapping[Key, np.ndarray]) -> Any:
        """A part as a TensorDict."""
        assert self._form is not None
        own = self._own(part, views)
        steps = own[TRAJ_IDS].shape[-1]
        frames = part.frames
        if frames is None:
            frames = self._form.tensordict(own, (*self._form.batch, steps))
        elif self._form.has_ids:
            import torch

            ids = torch.from_numpy(own[TRAJ_IDS]).reshape(*self._form.batch, steps)
            frames.set(TRAJ_IDS, ids[..., : frames.shape[-1]])
        return _named(frames)

    def _noted(self) -> list[Failure]:
        """The failures since the batch before."""
        failures, self._failures = self._failures, []
        return failures

    def _batch(self, views: Mapping[Key, np.ndarray], batch_size: Sequence[int]) -> Batch:
        columns = {
            one.key: views[one.key].reshape(*batch_size, *one.shape) for one in self._columns
        }
        batch = Batch.of(columns, batch_size)
        batch.failures = self._noted()
        return batch

    # What a user may ask in between.

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        with self._alone():
            if self._is_tensordict and self._crew.has_calls:
                self._drop_parts(range(len(self._seats)))
                # With the same seed the same frames come again, with their numbers: as in TorchRL.
                self._go_on_from(0)
                for worker in range(len(self._seats)):
                    (seed,) = self._ask("seed", {worker: ((seed, static_seed), {})}).values()
                self._seed = seed
                return seed
            self._seed = seed
            for worker in range(len(self._seats)):
                self._seed_worker(worker)
                if static_seed:
                    self._seed = seed
        return self._seed

    def _seed_worker(self, worker: int) -> None:
        """Gives a worker seeds that no other worker has had."""
        if self._seed is not None:
            self._crew.tell(worker, {"do": "seed", "seed": self._seed})
            self._seed += self._envs

    def reset(self, reset_idx: Sequence[bool] | None = None) -> None:
        workers = range(len(self._seats))
        chosen = [worker for worker in workers if reset_idx is None or reset_idx[worker]]
        with self._alone():
            if self._is_tensordict:
                self._drop_parts(chosen)
            for worker in chosen:
                self._crew.tell(worker, {"do": "reset"})

    def _drop_parts(self, workers: Sequence[int]) -> None:
        """Has no part be handed out that these workers were asked for before this."""
        for part in self._done:
            part.is_stale |= part.worker in workers
        for worker in workers:
            for order in self._seats[worker].orders:
                order.is_stale = True
        if self._episodes is not None and len(workers) == len(self._seats):
            self._episodes.clear()

    # What workers are asked.

    def _ask(self, name: str, calls: Mapping[int, tuple[Any, Any]]) -> dict[int, Any]:
        """Calls a method in workers, each after what it was asked before, and returns what they return.

        Raises:
            WorkerError: if a worker fails meanwhile.
        """
        if not self._is_tensordict or not self._crew.has_calls:
            raise UnsupportedError(
                f"{name}: only workers of this host, with environments of TorchRL, answer questions"
            )
        numbers_of: dict[int, int] = {}
        with self._alone(), self._crew.uninterrupted():
            for worker, (arguments, named) in calls.items():
                if self._seats[worker].stage == "empty":
                    raise WorkerError(f"{name}: worker {worker} has ended")
                self._questions += 1
                numbers_of[worker] = self._questions
                seat = self._seats[worker]
                seat.asked += 1
                seat.since = time.monotonic()
                fd = memory_file(pickled((name, arguments, dict(named))))
                try:
                    self._crew.tell(worker, {"do": "call", "number": self._questions}, [fd])
                finally:
                    os.close(fd)
            while not all(number in self._answers for number in numbers_of.values()):
                before = len(self._failures)
                self._hear(None)
                ended = [one for one in self._failures[before:] if one.worker in numbers_of]
                if ended:
                    raise worker_error(ended[0].kind, "; ".join(map(str, ended)))
            answers = {worker: self._answers.pop(one) for worker, one in numbers_of.items()}
        for one in answers.values():
            if isinstance(one, Exception):
                raise one
        return answers

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[tuple[Any, ...]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """Calls a method in each worker, and returns what they return.

        The replay buffer is the trainer's: a path that begins with ``replay_buffer`` is its own, once
        for each worker.
        """
        count = len(self._seats)
        arguments = [()] * count if list_of_args is None else list(list_of_args)
        named: list[Any] = [{}] * count if list_of_kwargs is None else list(list_of_kwargs)
        for one in (arguments, named):
            if len(one) != count:
                raise SettingError(
                    f"Expected {count} argument entries, one for each worker, got {len(one)}"
                )
        if method_name.partition(".")[0] == "replay_buffer":
            pairs = zip(arguments, named, strict=True)
            return [self.cascade_execute(method_name, *one, **more) for one, more in pairs]
        calls = {worker: (arguments[worker], named[worker]) for worker in range(count)}
        return list(self._ask(method_name, calls).values())

    def get_distant_attr(self, attr: str) -> list[Any]:
        """What lies at a path in each worker."""
        if attr.partition(".")[0] == "replay_buffer":
            return [super().get_distant_attr(attr)] * len(self._seats)
        return self.map_fn("get_distant_attr", [(attr,)] * len(self._seats))

    def getattr_policy(self, attr: str) -> Any:
        """An attribute of the first worker's policy."""
        return self._first("getattr_policy", attr)

    def getattr_env(self, attr: str) -> Any:
        """An attribute of the first worker's environment."""
        return self._first("getattr_env", attr)

    def _first(self, name: str, attr: str) -> Any:
        return self._ask(name, {0: ((attr,), {})})[0]

    def get_model(self, model_id: str) -> Any:
        """The trainer's model of this name."""
        if model_id in self._sent:
            return self._sent[model_id]
        if model_id == "policy" and self.policy is not None:
            return self.policy
        return super().get_distant_attr(model_id)

    def stats(self, workers: Literal["aggregate", "per_worker", "both"] = "aggregate") -> dict[str, Any]:
        """How far the collector is.

        Args:
            workers: ``"aggregate"``: what the trainer knows, without asking any worker;
                ``"per_worker"``: what each worker says, as ``"worker_0/frames"``; ``"both"``.
        """
        if workers not in ("aggregate", "per_worker", "both"):
            raise SettingError(
                f"workers must be one of 'aggregate', 'per_worker' or 'both', got {workers!r}"
            )
        stats = {} if workers == "per_worker" else super().stats()
        stats["workers"] = len(self._seats)
        stats["workers_alive"] = sum(seat.stage != "empty" for seat in self._seats)
        if workers != "aggregate":
            for worker, one in enumerate(self.map_fn("stats")):
                stats.update({f"worker_{worker}/{name}": value for name, value in one.items()})
        return stats

    @property
    def pre_collect_hook(self) -> Callable[[], None] | None:
        """Called in each worker before it collects."""
        return self._hooks["pre_collect_hook"]

    @pre_collect_hook.setter
    def pre_collect_hook(self, hook: Callable[[], None] | None) -> None:
        self._set_hook("pre_collect_hook", hook)

    @property
    def post_collect_hook(self) -> Callable[[Any], None] | None:
        """Called in each worker with what it has collected."""
        return self._hooks["post_collect_hook"]

    @post_collect_hook.setter
    def post_collect_hook(self, hook: Callable[[Any], None] | None) -> None:
        self._set_hook("post_collect_hook", hook)

    def set_post_collect_hook(self, hook: Callable[[Any], None] | None) -> None:
        """Sets :attr:`post_collect_hook`, for those who can only call."""
        self.post_collect_hook = hook

    def _set_hook(self, name: str, hook: Any) -> None:
        workers = range(len(self._seats))
        self._ask("__setattr__", {worker: ((name, hook), {}) for worker in workers})
        self._hooks[name] = hook
        # Workers that take another's place have it too.
        self._crew.change(lambda start: replace(start, terms=replace(start.terms, **{name: hook})))

    @property
    def _use_buffers(self) -> bool:
        return self._form is not None and not self._form.is_dynamic

    @property
    def pipes(self) -> list[Pipe]:
        """For updaters of TorchRL's older kind: what they send weights of one worker by."""
        return [Pipe(self, worker) for worker in range(len(self._seats))]

    def _state_of_tensordicts(self) -> OrderedDict[str, Any]:
        import torch

        states = self.map_fn("state_dict")
        state: OrderedDict[str, Any] = OrderedDict(
            (f"worker{worker}", one) for worker, one in enumerate(states)
        )
        state["frames"], state["iter"] = self._frames, self._iter
        if self._asked.track_traj_ids:
            state["traj_pool"] = {"traj_id": torch.tensor(self._next_trajectory, device="cpu")}
        if self.policy_version is not None:
            state["policy_version"] = self.policy_version
        return state

    def _load_state_of_tensordicts(self, state: Mapping[str, Any]) -> None:
        workers = range(len(self._seats))
        self._drop_parts(workers)
        self.map_fn("load_state_dict", [(state[f"worker{worker}"],) for worker in workers])
        self._frames, self._iter = state["frames"], state["iter"]
        if (pool := state.get("traj_pool")) is not None:
            # Trajectories that were under way have numbers already, and are not gone on with.
            under_way = len(self._seats) * self._envs
            self._go_on_from(max(self._next_trajectory, int(pool["traj_id"]) + under_way))
        version = state.get("policy_version")
        if isinstance(version, int):
            self._version_before = version - self._updates

    @property
    def _next_trajectory(self) -> int:
        return self._trajectories.next_id

    def _go_on_from(self, trajectory: int) -> None:
        self._trajectories.go_on_from(trajectory)

    def _shut_down(self, close_env: bool) -> None:
        if not close_env:
            raise LifecycleError("close_env=False: the environments of workers end with them")
        super()._shut_down(close_env)

    def _close(self, close_env: bool) -> None:
        try:
            if self._sender is not None:
                self._sender.shutdown()
        finally:
            self._crew.close()
            if self._slots is not None:
                self._slots.close()
            if self.interruptor is not None:
                self.interruptor.close()


class Interruptor:
    """Ends the parts that workers collect, after the step under way.

    A byte of memory that this process alone writes.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("weightsync-flag", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, mmap.PAGESIZE)
        self._memory = mmap.mmap(self.fd, mmap.PAGESIZE)

    def start_collection(self) -> None:
        """Lets workers collect."""
        self._memory[0] = 0

    def stop_collection(self) -> None:
        """Has workers end their parts."""
        self._memory[0] = 1

    def collection_stopped(self) -> bool:
        """Whether workers are to end their parts."""
        return self._memory[0] != 0

    def close(self) -> None:
        """Closes the memory."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Pipe:
    """What an updater of TorchRL's older kind has for the pipe of a worker: it takes weights."""

    def __init__(self, collector: MultiCollector, worker: int) -> None:
        self._collector, self._worker = collector, worker

    def send(self, message: tuple[Any, str]) -> None:
        """Sends weights, and waits until the worker has them."""
        weights, what = message
        if what != "update":
            raise UnsupportedError(f"a worker takes weights this way, as (weights, 'update'), got {what!r}")
        self._collector._update({"policy": weights}, self._worker)

    def recv(self) -> tuple[int, str]:
        """What a worker of TorchRL's says then."""
        return self._worker, "updated"


def _doing(seat: Seat) -> str:
    return {"starting": "starting", "joining": "waiting for its first weights"}.get(
        seat.stage, "collecting one part"
    )


def _for_each(
    factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None, count: int
) -> list[Callable[[], Any] | None]:
    """The policy factory of each worker."""
    if not isinstance(factory, Sequence):
        return [factory] * count
    if len(factory) != count:
        raise SettingError(
            f"policy_factory: expected one function, or {count} of them, got {len(factory)}"
        )
    return list(factory)


def _environments(given: Any, num_workers: int | None, owner: str) -> list[Any]:
    """An environment for each worker."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        if num_workers is None:
            raise SettingError(
                f"{owner} takes a list of environments, one for each worker, got {given!r}: give a list, or "
                "num_workers; Collector takes one"
            )
        return [given] * num_workers
    if not given:
        raise SettingError("expected at least one environment, got an empty list")
    if num_workers not in (None, len(given)):
        raise SettingError(f"num_workers is {num_workers}, and there are {len(given)} environments")
    return list(given)


def _form(said: Any) -> Form | None:
    if said is None:
        return None
    from weightsync.rl._form import Form

    return Form.from_json(said)


def _read(fd: int) -> Any:
    from weightsync.rl import _values

    return _values.read(fd)


def _answered(said: Mapping[str, Any]) -> Any:
    """What a worker has answered: a value, or an error."""
    if "error" in said:
        return answered_error(*said["error"])
    try:
        return _read(said["fd"])
    except CorruptError as error:
        return error


def _named(frames: Any) -> Any:
    frames.names = [*[None] * (frames.ndim - 1), "time"]
    return frames


def _by_worker(weights: Mapping[str, Any]) -> dict[int, Any]:
    """Weights that were given by worker, as ``{0: …, 1: …}``."""
    given = weights.get("policy")
    if not isinstance(given, Mapping) or not all(isinstance(one, int) for one in given.keys()):
        return {}
    return dict(given.items())
