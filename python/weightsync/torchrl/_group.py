"""Groups: the schemes that share one sender.

TorchRL has a scheme for each model. The schemes of one collector with the same settings are
one group: one sender, one connection for each worker, and sets of models that flip together.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from torch import nn
from torchrl._utils import WEIGHT_SYNC_TIMEOUT

from weightsync import _ends
from weightsync._guard import loading
from weightsync._native import InitInfo, Layout, Session
from weightsync._native import Snapshot as NativeSnapshot
from weightsync._targets import Target, target_of
from weightsync._torch import as_worker
from weightsync._view import weights_of
from weightsync.background import Background
from weightsync.errors import DeadlineError, LifecycleError, MissingModelError
from weightsync.ray import _cluster
from weightsync.scheme import Scheme
from weightsync.sender import Sender

logger = logging.getLogger("weightsync")

# The seconds that a sender waits for its workers before it checks that they are still alive.
_CHECK_INTERVAL = 0.2

# The version that `connect` publishes, for all workers alike.
_FIRST = 1

# The seconds that workers which are alive may take to start.
_START_LIMIT = 300.0


class Group:
    """One end's models. A group is pickled for workers as an init info."""

    def __init__(self, scheme: Scheme, mode: str, run_dir: str | None = None) -> None:
        self.scheme = scheme
        self.mode = mode
        self._run_dir = run_dir
        self._pid = os.getpid()
        # Two locks, because in one process the sender may wait while the worker joins.
        self._lock = threading.RLock()
        self._join_lock = threading.RLock()
        # The trainer's half: each model's source, in order.
        self._weights: dict[str, Callable[[], Any]] = {}
        self._strategies: dict[str, str] = {}
        self._each: dict[str, Callable[[], dict[int, Any]]] = {}
        self._unconnected: set[str] = set()
        # A model's weights when it was added, and the first weights passed to `connect`.
        self._initial: dict[str, Any] = {}
        self._firsts: dict[str, Any] = {}
        self._left_sender: set[str] = set()
        self.worker_ids: list[int] = []
        self._connected = False
        self._published = False
        self.sender: Sender | None = None
        # Pickled for the worker.
        self._info: str | None = None
        self._names: list[str] = []
        # By model, the workers that have weights of their own.
        self._own_weights: dict[str, list[int]] = {}
        # A worker's half.
        self._session: Session | None = None
        self._first_set: Any = None
        # The seconds that it waits for the trainer at most.
        self.join_limit = WEIGHT_SYNC_TIMEOUT
        self._declared = False
        self._left_worker: set[str] = set()
        self.models: dict[str, WorkerModel] = {}
        self.background: Background | None = None

    def kind(self) -> tuple[Scheme, str, str | None]:
        """The settings that the schemes of a group share."""
        return self.scheme, self.mode, self._run_dir

    # The trainer's half.

    def add(
        self,
        name: str,
        strategy: str,
        worker_ids: list[int],
        weights: Callable[[], Any],
        each: Callable[[], dict[int, Any]] | None = None,
    ) -> None:
        """Adds a model, with functions that return its weights, or each worker's own."""
        with self._lock:
            if self._connected:
                raise LifecycleError(
                    f"{name!r} cannot be added: the models of {', '.join(self._weights)} have "
                    "their workers already; set all schemes up before the first connects"
                )
            self._weights[name] = weights
            self._strategies[name] = strategy
            self._unconnected.add(name)
            if each is None:
                self._each.pop(name, None)
                self._own_weights.pop(name, None)
                self._initial[name] = weights()
            else:
                own = each()
                self._each[name], self._own_weights[name] = each, list(own)
                self._initial[name] = next(iter(own.values()))
            self.worker_ids = sorted({*self.worker_ids, *worker_ids})
            self._prepare()

    def _prepare(self) -> None:
        """Makes a sender, and its init info, for the models added so far.

        Too late would be when the scheme is pickled: a collector's policy has no values then.
        """
        strategies = set(self._strategies.values())
        if self.sender is not None:
            self.sender.shutdown()
        first = dict(self._initial)
        self.sender = Sender(
            models=first,
            scheme=self.scheme,
            run_dir=self._run_dir,
            strategy="tensordict" if "tensordict" in strategies else "state_dict",
            async_send_limit=8,
            timeout=WEIGHT_SYNC_TIMEOUT,
        )
        # The weights are looked up at each send.
        self.sender._models = dict.fromkeys(first)
        self._info = self.sender.init_info.to_json()
        self._names = list(first)

    @property
    def info(self) -> str | None:
        """The init info as text; None before the trainer is set up."""
        return self._info

    def connect(self, name: str, weights: Any, context: Any) -> None:
        """The rendez-vous. The call for the last model waits until every worker has all models."""
        with self._lock:
            sender = self.sender
            assert sender is not None
            self._connected = True
            self._unconnected.discard(name)
            if weights is not None:
                self._firsts[name] = weights
            if self._unconnected:
                return
        # Not under the lock: a shutdown ends this.
        if not self._published:
            self._publish(sender)
        self._wait_for_workers(sender, context)

    def _publish(self, sender: Sender) -> None:
        """Publishes the first version, and then the weights that are each worker's own."""
        each = {one: make() for one, make in self._each.items()}
        first = {
            one: self._firsts[one]
            if one in self._firsts
            else next(iter(each[one].values()))
            if one in each
            else self._weights[one]()
            for one in self._weights
        }
        if not sender.is_connected:
            sender.connect(0, weights_dict=first, timeout=WEIGHT_SYNC_TIMEOUT)
        for one, own in each.items():
            # A worker that joins from here on gets its own.
            # No warning: that nobody is there yet is no failure.
            sender._send_each(own, model=one, wait="sent")
        self._published = True
        self._firsts, self._initial = {}, {}
        for current in (*self._weights.values(), *self._each.values()):
            # The initial weights were sent, and a factory has no others.
            getattr(current, "spent", lambda: None)()

    def send(
        self,
        weights: dict[str, Any],
        worker_ids: list[int] | None,
        wait: str,
        timeout: float | None = None,
    ) -> Any:
        """Sends the weights of some models to workers."""
        sender = self._own_sender()
        given = {
            name: self._weights[name]() if value is None else value
            for name, value in weights.items()
        }
        return sender.send(
            weights_dict=given, worker_ids=worker_ids, wait=wait, timeout=timeout
        )

    def send_each(
        self, name: str, weights: dict[int, Any], wait: str, timeout: float | None = None
    ) -> Any:
        """Sends one model's weights, which differ by worker."""
        return self._own_sender().send_each(weights, model=name, wait=wait, timeout=timeout)

    def _own_sender(self) -> Sender:
        if self.sender is None or self._pid != os.getpid():
            raise LifecycleError("there is no sender here: connect first, in the trainer's process")
        return self.sender

    def _wait_for_workers(self, sender: Sender, context: Any) -> None:
        """Waits for the workers, but not for workers whose processes have ended."""
        since = time.monotonic()
        # A collector's processes are watched, so the longer limit is for living workers only.
        watched = bool(getattr(context, "procs", None) or getattr(context, "_sync_futures", None))
        limit = max(_START_LIMIT, WEIGHT_SYNC_TIMEOUT) if watched else WEIGHT_SYNC_TIMEOUT
        workers = self.worker_ids
        while True:
            try:
                sender.wait_for(workers, timeout=_CHECK_INTERVAL)
                return
            except DeadlineError:
                there = _joined_workers(sender)
            if time.monotonic() - since >= limit:
                missing = ", ".join(str(one) for one in workers if one not in there)
                raise DeadlineError(
                    f"only {len(there)} of {len(workers)} workers joined within {limit:.0f} s "
                    f"(missing: {missing}): do they call init_on_receiver and connect?",
                    "retry",
                )
            ended = _ended_workers(context, there)
            # A worker that has joined meanwhile writes to its collector's pipe, too.
            if ended and not _joined_workers(sender).issuperset(workers):
                # The collector gets the worker's exception, and raises it.
                logger.warning("%s ended before it had its weights", ended)
                return

    # What is pickled for workers.

    @property
    def is_connected(self) -> bool:
        """Whether a model has connected, so that no other can be added."""
        return self._connected

    @property
    def can_join(self) -> bool:
        """Whether a worker's ``connect`` knows enough."""
        return self._info is not None

    def in_this_process(self) -> Group:
        """This group, without its parent's ends in a forked child."""
        if self._pid != os.getpid():
            self.__setstate__(self.__getstate__())
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {
            "scheme": self.scheme,
            "mode": self.mode,
            "info": self._info,
            "names": self._names,
            "own_weights": self._own_weights,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        Group.__init__(self, state["scheme"], state["mode"])
        self._info, self._names = state["info"], state["names"]
        self._own_weights = state["own_weights"]

    # A worker's half.

    def join(self, name: str, worker: int, own: WorkerModel, declared: bool) -> None:
        """The rendez-vous of one of a worker's models, which loads its initial weights.

        If one model asks for declared safe points, all models have them.
        """
        with self._join_lock:
            self._declared = self._declared or declared
            # `init_on_receiver` has checked that there is an init info.
            assert self._info is not None
            if name not in self._names:
                raise MissingModelError.among(name, self._names)
            session, is_first = self._session, self._session is None
            if session is None:
                info = InitInfo.from_json(self._info)
                session = Session.prepare_receiver(info, worker, self._names, "cpu")
                self._session = session
                _ends.opened(self)
        # Not under the lock: a shutdown ends this.
        try:
            if is_first:
                self._first_set = session.join_receiver(self.join_limit)
            self._load_first(session, name, worker, own)
        except BaseException:
            # The next call joins again, with the models that were added before this one.
            with self._join_lock:
                others = {one: self.models[one] for one in self.models if one != name}
                self._leave_sender()
                self.models = others
            raise

    def _load_first(self, session: Session, name: str, worker: int, own: WorkerModel) -> None:
        self.models[name] = own
        if len(self.models) < len(self._names):
            # The worker uses this model before it adds the others. A scheme whose first weights
            # come with the first send has none yet.
            members = [] if self._first_set is None else self._first_set.members()
            for snapshot, _ in members:
                if snapshot.model == name:
                    snapshot.load_into(own)
            return
        self._first_set = None
        models = [(one, self.models[one]) for one in self._names]
        session.load_joined(models)
        self._receive_own(session, worker, models)
        native = session.start_background(models, self._declared)
        self.background = Background(native, {})
        for one in self.models.values():
            one.follow(self.background)

    def _receive_own(self, session: Session, worker: int, models: list[Any]) -> None:
        """Receives the weights that are this worker's own, if it has any.

        The first version is the same for all workers; the own weights follow, and have
        arrived already if the worker joins late.
        """
        until = time.monotonic() + self.join_limit
        own = [name for name, workers in self._own_weights.items() if worker in workers]
        while missing := [name for name in own if session.versions()[name] <= _FIRST]:
            left = until - time.monotonic()
            if left <= 0 or session.receive_into(models, left) is None:
                raise DeadlineError(
                    f"worker {worker} did not get its own weights of {', '.join(missing)} within "
                    f"{self.join_limit:g} s",
                    "retry",
                )

    def leave(self, name: str, *, sender: bool) -> None:
        """Notes that one model's scheme shuts down; the last one ends the sender, or the worker."""
        if self._pid != os.getpid():
            return
        if sender:
            with self._lock:
                self._left_sender.add(name)
                if self._left_sender >= set(self._weights) and self.sender is not None:
                    self.sender.shutdown()
            return
        with self._join_lock:
            self._left_worker.add(name)
            if self._left_worker >= set(self.models):
                self._leave_sender()

    def shutdown(self) -> None:
        """Ends the ends that this process has. Any number of times."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if self.sender is not None:
                self.sender.shutdown()
        with self._join_lock:
            self._leave_sender()
        _ends.closed(self)

    def _leave_sender(self) -> None:
        """Ends the worker's half."""
        if self.background is not None:
            self.background._end(_ends.why)
        if self._session is not None:
            self._session.shutdown(_ends.why)
        for own in self.models.values():
            own.release()
        # It can be joined again.
        self._session = self.background = self._first_set = None
        self._declared = False
        self.models, self._left_worker = {}, set()


class WorkerModel(Target):
    """A worker's model, which may be replaced by another."""

    def __init__(self, name: str, mode: str) -> None:
        self.name = name
        self._mode = mode
        self._target: Target | None = None
        self._sent: Layout | None = None
        self._last: NativeSnapshot | None = None
        self._background: Background | None = None
        # Called after each load, such as to pass the weights on.
        self.loaded: Callable[[NativeSnapshot], None] | None = None
        # Called in place of a load; it returns False to leave the load to the target.
        self.apply: Callable[[NativeSnapshot], bool] | None = None
        self.count = 0

    def replace(self, model: Any) -> None:
        """Replaces the model; the new one gets the weights of the old one."""
        if not isinstance(model, nn.Module):
            return
        background = self._background
        if background is None:
            self._exchange(model)
        else:
            with background:
                self._exchange(model)
            background.guard(model)

    def _exchange(self, model: nn.Module) -> None:
        before, self._target = self._target, target_of(model, self._mode)
        try:
            if self._last is not None:
                self._last.load_into(self)
            elif self._sent is not None:
                self._target.shape(self._sent)
        except BaseException:
            self._target = before
            raise
        if before is not None:
            before.release()

    def follow(self, background: Background) -> None:
        """From here on the background receiver changes the model, while no forward runs."""
        self._background = background
        module = getattr(self._target, "_module", lambda: None)()
        if module is not None:
            background.guard(module)

    def layout(self) -> Layout:
        if self._target is None:
            assert self._sent is not None
            return self._sent
        return self._target.layout()

    def shape(self, layout: Layout) -> bool:
        self._sent = layout
        return self._target is not None and self._target.shape(layout)

    def load(self, snapshot: NativeSnapshot) -> None:
        with loading, as_worker():
            self._load_and_notify(snapshot)

    def _load_and_notify(self, snapshot: NativeSnapshot) -> None:
        self._load(snapshot)
        last = self._last
        same_run = last is not None and last.run == snapshot.run
        is_new = not same_run or last.version != snapshot.version
        if is_new:
            # Before the version: a thread that has seen the version has seen the count, too.
            self.count += 1
        self._last = snapshot
        if not is_new or self.loaded is None:
            return
        try:
            self.loaded(snapshot)
        except Exception:
            if not same_run or last.version < snapshot.version:
                raise
            # The model goes back to this version, because passing on the next one failed.
            logger.warning("v%d of %s could not be passed on again", snapshot.version, self.name)

    def _load(self, snapshot: NativeSnapshot) -> None:
        if self._target is None or (self.apply is not None and self.apply(snapshot)):
            return
        self._target.load(snapshot)

    def release(self) -> None:
        self._last = None
        self.count = 0
        if self._target is not None:
            self._target.release()

    @property
    def version(self) -> int:
        """The version that was loaded last; 0 before the first."""
        last = self._last
        return 0 if last is None else last.version

    def weights(self) -> dict[str, Any] | None:
        """The weights that were loaded last, by dotted names, unaffected by later loads."""
        last = self._last
        return None if last is None else weights_of(last)


def _joined_workers(sender: Sender) -> set[int]:
    """The workers that have loaded a version; or all that have joined, before the first send."""
    is_sent = any(sender.versions.values())
    return {one.worker for one in sender.workers if any(one.versions) or not is_sent}


def _failed(ray: Any, call: Any) -> bool:
    try:
        ray.get(call)
    except Exception:
        return True
    return False


def _ended_workers(context: Any, there: set[int]) -> str:
    """The first worker of a collector that ended, or failed, before it connected."""
    # Of Ray: the calls in which the workers join, for each worker one for each model.
    calls = getattr(context, "_sync_futures", None) or []
    if calls:
        ray = _cluster.ray()
        for at, call in enumerate(calls):
            if ray.wait([call], timeout=0)[0] and _failed(ray, call):
                models = len(getattr(context, "_weight_sync_schemes", None) or [None])
                return f"worker {at // models}"
        return ""
    processes = getattr(context, "procs", None) or []
    pipes = getattr(context, "pipes", None) or []
    for worker, process in enumerate(processes):
        if worker in there:
            continue
        if not process.is_alive():
            return f"worker {worker} (exit code {process.exitcode})"
        if worker < len(pipes) and pipes[worker].poll(0):
            return f"worker {worker}"
    return ""
