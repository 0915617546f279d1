"""What collectors with workers share: places for workers, orders, parts, weights."""

from __future__ import annotations

import abc
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from weightsync._checks import choice, numbers
from weightsync._native import Trajectories
from weightsync.errors import PeerError, SettingError
from weightsync.rl._base import BaseCollector, check_known, has_weights
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
from weightsync.rl._crew import Crew, Process, Thread
from weightsync.rl._envs import is_made, maker
from weightsync.rl._policy import device_of, on_device
from weightsync.rl._worker import Start
from weightsync.scheme import Scheme
from weightsync.sender import Sender

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
    is_told: bool = False


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


class MultiCollector(BaseCollector):
    """What collectors with workers share."""

    def __init__(
        self,
        create_env_fn: Sequence[Any],
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None,
        workers: Literal["processes", "threads"] = "processes",
        weight_sync_schemes: Mapping[str, Scheme | str] | None = None,
        models: Mapping[str, Any] | None = None,
        restart: bool = False,
        timeout: float | None = 600.0,
        num_threads: int = 1,
        **settings: Any,
    ) -> None:
        choice("workers", workers, "processes", "threads")
        self._workers = workers
        if isinstance(create_env_fn, str) or not isinstance(create_env_fn, Sequence):
            raise SettingError(
                f"{type(self).__name__} takes a list of environments, one for each worker, got "
                f"{create_env_fn!r}; Collector takes one"
            )
        count = len(create_env_fn)
        if not count:
            raise SettingError("expected at least one environment, got an empty list")
        factories = _for_each(policy_factory, count)
        super().__init__(policy, policy_factory=factories[0], **settings)
        self._sent = _models(self.policy, models, weight_sync_schemes)
        self._restart, self._timeout = restart, timeout
        self._sender: Sender | None = None
        self._scheme = _scheme(weight_sync_schemes)
        self._failures: list[Failure] = []
        self._trajectories = Trajectories(count)
        #: Parts that were heard of, and are in no batch yet.
        self._done: list[Part] = []
        self._parts = 0
        self._columns: list[Column] = []
        makers = [maker(env) for env in create_env_fn]
        if any(map(is_made, makers)):
            raise SettingError(
                "workers need environments of their own: give functions that make them, and not "
                "environments"
            )
        # A copy on the CPU travels: a worker would open each GPU that a pickle names.
        device = self._policy_device or device_of(self.policy)
        travels = self.policy if device_of(self.policy) is None else on_device(self.policy, "cpu")
        starts = [
            Start(
                worker=worker,
                make_env=makers[worker],
                policy=travels,
                policy_factory=factories[worker],
                policy_device=device,
                rules=self._rules,
                explore=self._explore,
                num_threads=num_threads,
                models=list(self._sent) or ["policy"],
            )
            for worker in range(count)
        ]
        self._seats = [Seat() for _ in starts]
        self._slots: Slots | None = None
        self._crew = self._make_crew(starts)
        self._opened()
        try:
            self._open()
        except BaseException:
            self.shutdown()
            raise

    def _make_crew(self, starts: list[Start]) -> Crew:
        """Starts the workers."""
        return Crew(starts, Thread if self._workers == "threads" else Process)

    def _open(self) -> None:
        """Waits for the workers, and gives them their first weights.

        Raises:
            PeerError: if a worker cannot start, with its last words.
        """
        self._wait_for("working")
        self._steps = self._steps_of_a_part()
        self._slots = Slots(Layout(self._columns, self._dims()).size)
        if self._seed is not None:
            self.set_seed(self._seed)
        if self._sent:
            self._connect(self._sent)

    def _wait_for(self, stage: str) -> None:
        """Waits until all workers are at a stage; a failure meanwhile is an error."""
        while any(seat.stage not in (stage, "empty") for seat in self._seats):
            self._hear(None)
            ended = [one for one in self._failures if not one.restarted]
            if ended:
                self._failures = []
                raise PeerError("; ".join(map(str, ended)))

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
        self._crew.tell(worker, {"do": "join", "info": self._sender.init_info.to_json()})

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
        if each:
            self._numbers(list(each))
            return self._sender.send_each(each, timeout=self._timeout)
        return self._sender.send(
            weights_dict=weights, worker_ids=self._numbers(worker_ids), timeout=self._timeout
        )

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
    def _dims(self) -> tuple[int, ...]:
        """The dimensions of a slot: the workers of a batch, environments, time."""

    @abc.abstractmethod
    def _steps_of_a_part(self) -> int:
        ...

    def _order(
        self, worker: int, slot: Slot, before: int, axis: int = 0, index: int = 0
    ) -> None:
        """Asks a worker for a part, in its place of a slot.

        Args:
            before: how many frames come before it, as far as this worker is concerned.
        """
        self._parts += 1
        random = self._random_steps(self._steps, before)
        seat = self._seats[worker]
        if not seat.orders:
            seat.since = time.monotonic()
        seat.orders.append(Order(self._parts, slot, axis, index, random))
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
                place = {"do": "slot", "slot": number, "dims": self._dims()}
                place |= {"axis": order.axis, "index": order.index, "offset": order.slot.offset}
                self._crew.tell(worker, place, [self._slots.fd])
            ask = {"do": "collect", "part": order.part, "slot": number}
            self._crew.tell(worker, {**ask, "steps": self._steps, "random": order.random})

    def _hear(self, timeout: float | None) -> None:
        """Notes what workers have said within the timeout. Those that failed are started again if
        that was asked for."""
        for worker, said in self._crew.hear(self._until_overdue(timeout)):
            what = said["is"]
            if what == "part":
                self._done.append(self._delivered(worker, said))
            elif what == "ready":
                self._is_ready(worker, said)
            elif what == "joined":
                self._enter(worker, "working")
                self._tell(worker)
            else:
                self._failed(worker, said["reason"])
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
        return self._timeout if seat.stage == "working" and seat.orders else None

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
        if not self._columns:
            self._columns = columns
            self._envs, self._is_batched = said["num_envs"], said["is_batched"]
        try:
            compare(self._columns, columns, worker)
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
            self._seed_worker(worker)
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
        return Part(
            worker,
            order.slot,
            order.axis,
            order.index,
            order.random > 0,
            self._trajectories.arrived(worker),
            said["at"],
        )

    def _failed(self, worker: int, reason: str) -> None:
        """Notes a failure, and starts another worker in the place where that was asked for."""
        seat = self._seats[worker]
        seat.failures += 1
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
            self._failures.append(Failure(worker, reason, again))

    def _start_again(self, worker: int) -> None:
        """Starts another worker in an empty place; it gets the current weights, and the orders."""
        self._crew.start(worker)
        self._enter(worker, "starting")

    def _renumber(self, part: Part, views: Mapping[Key, np.ndarray]) -> None:
        """Gives the trajectories of a part that is handed out numbers that no others have."""
        at: Any = part.index if part.axis == 0 else (slice(None), part.index)
        self._trajectories.rename(part.worker, part.place, views[TRAJ_IDS][at])

    def _views(self, slot: Slot) -> dict[Key, np.ndarray]:
        """A slot's arrays. Its memory is used again once the last of them is dropped."""
        assert self._slots is not None
        return Layout(self._columns, self._dims()).views(self._slots.lend(slot))

    def _batch(self, views: Mapping[Key, np.ndarray], batch_size: Sequence[int]) -> Batch:
        columns = {
            one.key: views[one.key].reshape(*batch_size, *one.shape) for one in self._columns
        }
        batch = Batch.of(columns, batch_size)
        batch.failures, self._failures = self._failures, []
        return batch

    # What a user may ask in between.

    def set_seed(self, seed: int) -> int:
        with self._alone():
            self._seed = seed
            for worker in range(len(self._seats)):
                self._seed_worker(worker)
        return self._seed

    def _seed_worker(self, worker: int) -> None:
        """Gives a worker seeds that no other worker has had."""
        if self._seed is not None:
            self._crew.tell(worker, {"do": "seed", "seed": self._seed})
            self._seed += self._envs

    def reset(self) -> None:
        with self._alone():
            for worker in range(len(self._seats)):
                self._crew.tell(worker, {"do": "reset"})

    @property
    def _next_trajectory(self) -> int:
        return self._trajectories.next_id

    def _go_on_from(self, trajectory: int) -> None:
        self._trajectories.go_on_from(trajectory)

    def _close(self) -> None:
        try:
            if self._sender is not None:
                self._sender.shutdown()
        finally:
            self._crew.close()
            if self._slots is not None:
                self._slots.close()


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


def _models(policy: Any, models: Mapping[str, Any] | None, schemes: Any) -> dict[str, Any]:
    """The models that are sent, by id."""
    sent = {"policy": policy} if has_weights(policy) else {}
    sent |= models or {}
    for name in schemes or {}:
        if name not in sent and name != "policy":
            raise SettingError(
                f"weight_sync_schemes has {name!r}, and nothing says where its weights come from: "
                f"give models={{{name!r}: …}}"
            )
    return sent


def _scheme(schemes: Mapping[str, Scheme | str] | None) -> Scheme | str:
    """The scheme of all models: models that change together have one."""
    by_text = {str(one): one for one in (schemes or {}).values()}
    if len(by_text) > 1:
        raise SettingError(
            f"weight_sync_schemes: the models change together, so they have one scheme; got "
            f"{', '.join(by_text)}"
        )
    return next(iter(by_text.values()), "shared-mem")


def _by_worker(weights: Mapping[str, Any]) -> dict[int, Any]:
    """Weights that were given by worker, as ``{0: …, 1: …}``."""
    given = weights.get("policy")
    if not isinstance(given, Mapping) or not all(isinstance(one, int) for one in given.keys()):
        return {}
    return dict(given.items())
