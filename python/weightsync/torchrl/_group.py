"""The models that one sender feeds, as TorchRL's schemes share it.

TorchRL has a scheme for each model. The schemes of one collector that travel alike
are one group here: one sender, one connection for each worker, and sets of models
that flip together.
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
from weightsync._target import Target, not_inferring, target_of, weights_of
from weightsync.background import Background
from weightsync.errors import DeadlineError, LifecycleError, MissingModelError
from weightsync.scheme import Scheme
from weightsync.sender import Sender

logger = logging.getLogger("weightsync")

# How long a sender waits for its workers before it looks whether they are still alive.
_LOOK = 0.2

# The version that `connect` publishes, for all workers alike.
_FIRST = 1

# How long workers that are alive may take to start, in seconds.
_ALIVE = 300.0


class Group:
    """One end's models. It crosses to workers as an init info and nothing else."""

    def __init__(self, scheme: Scheme, mode: str, run_dir: str | None = None) -> None:
        self.scheme = scheme
        self.mode = mode
        self._run_dir = run_dir
        self._pid = os.getpid()
        # Each half has its own: in one process the sender waits while the worker joins.
        self._lock = threading.RLock()
        self._join_lock = threading.RLock()
        # The trainer's half: each model's source, in order.
        self._weights: dict[str, Callable[[], Any]] = {}
        self._strategies: dict[str, str] = {}
        self._each: dict[str, Callable[[], dict[int, Any]]] = {}
        self._unconnected: set[str] = set()
        # What a model had when it was added, and what it is to begin with.
        self._initial: dict[str, Any] = {}
        self._firsts: dict[str, Any] = {}
        self._left_sender: set[str] = set()
        self.worker_ids: list[int] = []
        self._connected = False
        self._published = False
        self.sender: Sender | None = None
        # What crosses.
        self._info: str | None = None
        self._names: list[str] = []
        # The workers with weights of their own of a model.
        self._own_weights: dict[str, list[int]] = {}
        # A worker's half.
        self._session: Session | None = None
        self._first_set: Any = None
        self._declared = False
        self._left_worker: set[str] = set()
        self.models: dict[str, WorkerModel] = {}
        self.background: Background | None = None

    def kind(self) -> tuple[Scheme, str, str | None]:
        """What schemes have in common that share a group."""
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
        """One more model: how to get its weights, and those of each worker's own."""
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
        """Sets a sender up for the models there are by now, and says how to join it.

        Not when the scheme is pickled: a collector's policy has no values then.
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
            pending=8,
            timeout=WEIGHT_SYNC_TIMEOUT,
        )
        # The weights are looked up at each send.
        self.sender._models = dict.fromkeys(first)
        self._info = self.sender.init_info.to_json()
        self._names = list(first)

    @property
    def info(self) -> str | None:
        """What a worker needs to join, as text; nothing before the trainer is set up."""
        return self._info

    def connect(self, name: str, weights: Any, context: Any) -> None:
        """The rendez-vous: the last model's waits until every worker has them all."""
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
        """The first version, and what each worker begins with instead, if it has its own."""
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
            sender.send_each(own, model=one, wait="sent")
        self._published = True
        self._firsts, self._initial = {}, {}
        for current in (*self._weights.values(), *self._each.values()):
            # What workers begin with was sent: a factory has nothing to send again.
            getattr(current, "spent", lambda: None)()

    def send(
        self,
        weights: dict[str, Any],
        worker_ids: list[int] | None,
        wait: str,
        timeout: float | None = None,
    ) -> Any:
        """Sends the weights of some models, or of one for each worker."""
        if self.sender is None or self._pid != os.getpid():
            raise LifecycleError("there is no sender here: connect first, in the trainer's process")
        given = {
            name: self._weights[name]() if value is None else value
            for name, value in weights.items()
        }
        return self.sender.send(
            weights_dict=given, worker_ids=worker_ids, wait=wait, timeout=timeout
        )

    def send_each(
        self, name: str, weights: dict[int, Any], wait: str, timeout: float | None = None
    ) -> Any:
        """Sends one model's weights, other ones to each worker."""
        if self.sender is None or self._pid != os.getpid():
            raise LifecycleError("there is no sender here: connect first, in the trainer's process")
        return self.sender.send_each(weights, model=name, wait=wait, timeout=timeout)

    def _wait_for_workers(self, sender: Sender, context: Any) -> None:
        """Waits in parts, so that workers that have ended are not waited for."""
        since = time.monotonic()
        # The processes of a collector are watched: only one that is alive and silent is
        # waited for so long.
        watched = bool(getattr(context, "procs", None))
        limit = max(_ALIVE, WEIGHT_SYNC_TIMEOUT) if watched else WEIGHT_SYNC_TIMEOUT
        workers = self.worker_ids
        while True:
            try:
                sender.wait_for(workers, timeout=_LOOK)
                return
            except DeadlineError:
                there = _there(sender)
            if time.monotonic() - since >= limit:
                missing = ", ".join(str(one) for one in workers if one not in there)
                raise DeadlineError(
                    f"only {len(there)} of {len(workers)} workers joined within {limit:.0f} s "
                    f"(missing: {missing}): do they call init_on_receiver and connect?",
                    "retry",
                )
            ended = _ended_workers(context, there)
            # One that has joined meanwhile tells its collector so, too.
            if ended and not _there(sender).issuperset(workers):
                # The collector knows the worker's own words, and raises them.
                logger.warning("%s ended before it had its weights", ended)
                return

    # What crosses.

    @property
    def is_connected(self) -> bool:
        """Whether it is too late for another model."""
        return self._connected

    @property
    def knows_sender(self) -> bool:
        """Whether a worker could join."""
        return self._info is not None

    def here(self) -> Group:
        """This group, fit for this process: a forked child has no ends of its parent's."""
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
        """The rendez-vous of one model of a worker's: its initial weights are loaded.

        Models change at declared safe points only if one of them asks for that.
        """
        with self._join_lock:
            self._declared = self._declared or declared
            if self._info is None:
                raise LifecycleError(
                    f"{name!r} knows no sender: call init_on_sender in the trainer, and hand the "
                    "scheme to the worker after that"
                )
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
                self._first_set = session.join_receiver(WEIGHT_SYNC_TIMEOUT)
            self._load_first(session, name, worker, own)
        except BaseException:
            # The next call joins again; models that were here before it still are.
            with self._join_lock:
                others = {one: self.models[one] for one in self.models if one != name}
                self._leave_sender()
                self.models = others
            raise

    def _load_first(self, session: Session, name: str, worker: int, own: WorkerModel) -> None:
        self.models[name] = own
        if len(self.models) < len(self._names):
            # The worker goes on with these while its other models are made.
            # There are none where the first weights come with the first send.
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
        """The first version is the same for all: a worker's own comes next, if it has any.

        It is there already for a worker that joins after it was sent.
        """
        until = time.monotonic() + WEIGHT_SYNC_TIMEOUT
        own = [name for name, workers in self._own_weights.items() if worker in workers]
        while missing := [name for name in own if session.versions()[name] <= _FIRST]:
            left = until - time.monotonic()
            if left <= 0 or session.receive_into(models, left) is None:
                raise DeadlineError(
                    f"worker {worker} did not get its own weights of {', '.join(missing)} within "
                    f"{WEIGHT_SYNC_TIMEOUT:.0f} s",
                    "retry",
                )

    def leave(self, name: str, *, sender: bool) -> None:
        """One model's scheme shuts down; the last of a half ends that half."""
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
        """Ends whatever this process has of it. Any number of times."""
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
    """A worker's model, which may be exchanged for another."""

    def __init__(self, name: str, mode: str) -> None:
        self.name = name
        self._mode = mode
        self._target: Target | None = None
        self._sent: Layout | None = None
        self._last: NativeSnapshot | None = None
        self._background: Background | None = None
        # What else happens when weights were loaded: a cascade, say.
        self.loaded: Callable[[NativeSnapshot], None] | None = None
        # Another way to load: True if it took the snapshot.
        self.apply: Callable[[NativeSnapshot], bool] | None = None
        self.count = 0

    def put(self, model: Any) -> None:
        """Takes another model: it gets what the one before had."""
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
        """The models change in the background from here on, while no forward runs."""
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
        with loading, not_inferring():
            self._load_and_tell(snapshot)

    def _load_and_tell(self, snapshot: NativeSnapshot) -> None:
        self._load(snapshot)
        last = self._last
        same_run = last is not None and last.run == snapshot.run
        is_new = not same_run or last.version != snapshot.version
        if is_new:
            # Before the version: a thread that has seen that has seen this.
            self.count += 1
        self._last = snapshot
        if not is_new or self.loaded is None:
            return
        try:
            self.loaded(snapshot)
        except Exception:
            if not same_run or last.version < snapshot.version:
                raise
            # The model goes back to the version before, because this failed with the next.
            logger.warning("passing v%d of %s on again failed", snapshot.version, self.name)

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
        """The weights that were loaded last, by dotted names; they do not change."""
        last = self._last
        return None if last is None else weights_of(last)


def _there(sender: Sender) -> set[int]:
    """The workers that have loaded something; those that are there, before anything is sent."""
    is_sent = any(sender.versions.values())
    return {one.worker for one in sender.workers if any(one.versions) or not is_sent}


def _ended_workers(context: Any, there: set[int]) -> str:
    """A worker of a collector that has ended, or has failed, before it connected."""
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
