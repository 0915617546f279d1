"""torch RPC: the trainer's calls make its workers load. The engine carries the weights.

A worker has no thread that loads. It loads inside the trainer's call, while no forward of its
model runs. The call brings the init info at first, and later the version to load.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torchrl._utils import WEIGHT_SYNC_TIMEOUT

from weightsync import _ends
from weightsync._native import InitInfo, Layout, PendingSend, Report, Session
from weightsync._native import Snapshot as NativeSnapshot
from weightsync._targets import Target
from weightsync.background import Background
from weightsync.errors import (
    DeadlineError,
    LifecycleError,
    PeerError,
    SenderClosedError,
    UnsupportedError,
    WeightsyncError,
)
from weightsync.scheme import Scheme
from weightsync.sender import Sender
from weightsync.torchrl._group import Group, WorkerModel
from weightsync.torchrl._model_lock import ModelLock

logger = logging.getLogger("weightsync")

# A worker's own wait looks for a version at this interval, in seconds. The trainer's call, which
# loads it, does not wait so.
_LOOK_INTERVAL = 0.005

# A send looks at this interval, in seconds, whether the call of a worker that it waits for failed.
_CALL_INTERVAL = 0.5

# The longest limit that a lock takes has room for the clock.
_LONGEST = threading.TIMEOUT_MAX / 2


def is_running() -> bool:
    """Whether this process has called ``torch.distributed.rpc.init_rpc``."""
    from torch.distributed import rpc

    return rpc.is_available() and bool(rpc._is_current_rpc_agent_set())


def require() -> None:
    """Checks that this process can call others by torch RPC.

    Raises:
        UnsupportedError: if the installed torch does not have it.
        LifecycleError: if it was not initialised.
    """
    from torch.distributed import rpc

    if not rpc.is_available():
        raise UnsupportedError(
            "the installed torch has no torch.distributed.rpc: leave out workers=…, and "
            "RPCWeightSyncScheme calls its workers over HTTP"
        )
    if not is_running():
        raise LifecycleError(
            "torch RPC is not initialised in this process: call torch.distributed.rpc.init_rpc "
            "first, or leave out workers=…, and RPCWeightSyncScheme calls its workers over HTTP"
        )


class CallGroup(Group):
    """A scheme's model and its workers, which the trainer reaches by torch RPC.

    Args:
        scheme: the engine's scheme, which carries the weights.
        mode: "bind" or "copy".
        key: what the workers know the scheme by.
        callees: the workers' names or ``WorkerInfo``, by number; on the sender.
    """

    def __init__(self, scheme: Scheme, mode: str, key: str, callees: Iterable[Any] = ()) -> None:
        super().__init__(scheme, mode)
        self._key = key
        self._callees = list(callees)

    # The trainer's half.

    def send(
        self,
        weights: dict[str, Any],
        worker_ids: list[int] | None,
        wait: str,
        timeout: float | None = None,
    ) -> Any:
        require()
        sender = self._own_sender()
        given = {
            name: self._weights[name]() if value is None else value
            for name, value in weights.items()
        }
        until = time.monotonic() + _limit(timeout)
        pending = sender.send_async(
            weights_dict=given,
            worker_ids=worker_ids,
            wait=wait,  # type: ignore[arg-type]
            timeout=timeout,
        )
        (version,) = pending.versions.values()
        calls = self._call_loads(worker_ids, version, timeout)
        report = _report(pending, calls, until)
        sender._log(report)
        return self._answered(report, calls, wait)

    def send_each(
        self, name: str, weights: dict[int, Any], wait: str, timeout: float | None = None
    ) -> Any:
        require()
        sender = self._own_sender()
        expected = sorted(sender._session.sent(name).layout.tensors())
        # Workers may share weights.
        distinct = {id(one): one for one in weights.values()}.values()
        placed = [sender._source(name).place(one) for one in distinct]
        calls = {}
        # The calls come first: the send publishes one version after the other, and may need the
        # room of one that its workers have not loaded. The send refuses weights that do not fit:
        # no worker is to wait for those.
        if all(sorted(one.layout.tensors()) == expected for one in placed):
            # The workers' versions differ, and all are newer than the one sent last.
            calls = self._call_loads(list(weights), sender.versions[name] + 1, timeout)
        report = super().send_each(name, weights, wait, timeout)
        return self._answered(report, calls, wait)

    def _call_loads(
        self, worker_ids: list[int] | None, version: int, timeout: float | None
    ) -> dict[int, Any]:
        limit = _limit(timeout)
        workers = self.worker_ids if worker_ids is None else worker_ids
        return {one: self._call(one, limit, _load, version, limit) for one in workers}

    def _call(
        self, worker: int, limit: float, function: Callable[..., str | None], *args: Any
    ) -> Any:
        """Begins a call of a worker; :func:`_failure` waits for what went wrong."""
        from torch.distributed import rpc

        callee, args = self._callees[worker], (self._key, worker, *args)
        # torch takes 0 for no limit.
        try:
            return rpc.rpc_async(callee, function, args=args, timeout=max(limit, 1e-3))
        except RuntimeError as error:
            return error

    def _answered(self, report: Any, calls: dict[int, Any], wait: str) -> Any:
        """The report, once the calls of the workers that have applied the version are answered.

        The calls of the other workers end by their limit. Why one failed is a warning, unless
        the worker's line says it.
        """
        for worker, call in calls.items() if wait == "applied" else ():
            line = report.worker(worker)
            if line is not None and line.outcome == "applied":
                _failure(call)
            elif (line is None or line.outcome == "late") and (refusal := _refusal(call)):
                logger.warning("the call of worker %d failed: %s", worker, refusal)
        return report

    def _wait_for_workers(self, sender: Sender, context: Any) -> None:
        """Calls each worker with the init info. A worker answers once it has the first weights."""
        require()
        state, limit = self.__getstate__(), _limit(None)
        calls = {one: self._call(one, limit, _join, state, limit) for one in self.worker_ids}
        missing = []
        for worker, call in calls.items():
            if failure := _failure(call):
                name = getattr(self._callees[worker], "name", self._callees[worker])
                missing.append(f"worker {worker} ({name}): {failure}")
        if missing:
            raise PeerError(
                f"{len(missing)} of {len(calls)} workers did not join: {'; '.join(missing)}",
                "retry",
            )

    # A worker's half.

    @property
    def can_join(self) -> bool:
        # The trainer's first call brings the init info.
        return True

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"key": self._key}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._key, self._callees = state["key"], []

    def join(self, name: str, worker: int, own: WorkerModel, declared: bool) -> None:
        """Guards the model. The trainer's first call does the rest."""
        with self._join_lock:
            if self._session is not None:
                raise LifecycleError(f"worker {worker} has joined: shut its scheme down first")
            self.models = {name: own}
            # A forward that runs as the first weights come is guarded too.
            self.background = Background(_Native(name, own), {})  # type: ignore[arg-type]
            own.follow(self.background)

    def join_by(self, state: dict[str, Any], worker: int, timeout: float) -> bool:
        """Joins by the trainer's init info, and loads the first weights; False if it has before."""
        until = time.monotonic() + timeout
        native = self._own_native()
        # Another call may be joining.
        if not native.receiving.acquire(timeout=timeout):
            raise DeadlineError(f"worker {worker} was joining for {timeout:.0f} s", "retry")
        try:
            with self._join_lock:
                if native is not self._own_native():
                    raise LifecycleError(f"worker {worker} has left, and connected again")
                if self._session is not None:
                    return False
                self._info, self._own_weights = state["info"], state["own_weights"]
                info = InitInfo.from_json(state["info"])
                session = Session.prepare_receiver(info, worker, state["names"], "cpu")
                native.session = self._session = session
                _ends.opened(self)
            # Not under the lock: a shutdown ends this.
            try:
                with native.loading_into(until) as models:
                    session.connect_receiver(models, _left(until))
                    self._receive_own(session, worker, models)
            except BaseException:
                # The trainer's next call joins again, unless this worker has left meanwhile.
                with self._join_lock:
                    if self._session is session:
                        native.session = self._session = None
                session.shutdown()
                raise
            return True
        finally:
            native.receiving.release()

    def load(self, version: int, timeout: float) -> None:
        """Loads this version, or a newer one, in this thread.

        Raises:
            DeadlineError: if the version is not here in time.
        """
        if not self._own_native().receive(version, timeout):
            raise DeadlineError(f"v{version} was not here within {timeout:.0f} s", "retry")

    def _own_native(self) -> _Native:
        background = self.background
        if background is None:
            raise LifecycleError("this worker has left: make its scheme again")
        native: Any = background._native
        return native  # type: ignore[no-any-return]


class _Native:
    """What a :class:`weightsync.Background` asks of the engine, for a worker without a thread.

    Its calls load in their own thread.
    """

    def __init__(self, name: str, model: WorkerModel) -> None:
        self.session: Session | None = None
        # The thread that joins or loads has it.
        self.receiving = threading.Lock()
        self._name = name
        self._model = model
        self._lock = ModelLock()
        self._state = "following"
        self._failure: str | None = None

    def acquire_permit(self) -> ModelLock:
        return self._lock.acquire()

    def loading_into(self, until: float) -> _Loading:
        """The targets to load into; the model is unlocked at the end of the ``with`` block."""
        return _Loading(self._name, self._model, self._lock, until)

    def receive(self, version: int, timeout: float) -> bool:
        """Loads until the model has this version; False if the timeout came first."""
        until = time.monotonic() + timeout
        # Another call may be waiting for the version.
        if not self.receiving.acquire(timeout=timeout):
            return False
        try:
            while self._model.version < version:
                # A version that is here waits for forwards untaken, and the next call may load it.
                taken = self._take(until)
                if taken is None:
                    return False
                if taken:
                    continue
                with self.loading_into(until) as models:
                    if not self._receive_into(models, _left(until)):
                        return False
            return True
        finally:
            self.receiving.release()

    def _take(self, until: float) -> bool | None:
        """Loads a version if one is here; None if a forward does not end in time."""
        loading = self.loading_into(until)
        with loading as models:
            # Before the version is taken: one that cannot be loaded is refused.
            return self._receive_into(models, 0.0) if loading.enter_alone() else None

    def _receive_into(self, models: list[tuple[str, Target]], timeout: float) -> bool:
        if self.session is None:
            raise LifecycleError("this worker has not joined yet: the trainer's connect calls it")
        try:
            received = self.session.receive_into(models, timeout)
        except WeightsyncError as error:
            self._failure = str(error)
            if isinstance(error, PeerError):
                self._state = "closed" if isinstance(error, SenderClosedError) else "died"
            raise
        if received is not None:
            self._failure = None
        return received is not None

    def wait(
        self,
        versions: dict[str, int],
        timeout: float | None = None,
        run: tuple[int, str] | None = None,
    ) -> bool:
        wanted = versions.get(self._name, self._model.version + 1)
        until = None if timeout is None else time.monotonic() + timeout
        # Of another run than this one any version does.
        while not self._has(wanted, run) and self._state == "following":
            # Not a wait for the version, as in the trainer's call: a version that came while a
            # forward of another thread runs would be lost at the timeout.
            if self.safe_point() is not None:
                continue
            left = _LOOK_INTERVAL if until is None else _left(until)
            if left <= 0:
                break
            time.sleep(min(left, _LOOK_INTERVAL))
        return self._has(wanted, run)

    def _has(self, version: int, run: tuple[int, str] | None) -> bool:
        last = self._model._last
        is_of_another = run is not None and last is not None and last.run != run
        return is_of_another or self._model.version >= version

    def safe_point(self) -> dict[str, int] | None:
        self._lock.refuse_holder()
        # What another thread loads, or keeps from a load, is not waited for.
        if self.session is None or not self.receiving.acquire(blocking=False):
            return None
        try:
            return self.versions() if self._take(time.monotonic()) else None
        except PeerError:
            return None
        finally:
            self.receiving.release()

    def versions(self) -> dict[str, int]:
        return {self._name: self._model.version}

    def run(self) -> tuple[int, str]:
        # Not of the session, which a call of the trainer may be using.
        last = self._model._last
        if last is None:
            raise LifecycleError("this worker has not joined yet: the trainer's connect calls it")
        return last.run

    def state(self) -> tuple[str, str, str | None]:
        return self._state, self._state, self._failure

    def shutdown(self, reason: str | None = None) -> None:
        # These end the waits of other threads' calls.
        self._state = "closed"
        self._lock.close()
        session = self.session
        if session is not None:
            session.shutdown(reason)

    def __repr__(self) -> str:
        return f"<called by its trainer, {self._name} {self._model.version}: {self._state}>"


class _Loading(Target):
    """A model that is locked from just before its load on, until a ``with`` block ends."""

    def __init__(self, name: str, model: WorkerModel, lock: ModelLock, until: float) -> None:
        self._name, self._model, self._lock, self._until = name, model, lock, until
        self._is_alone = False

    def __enter__(self) -> list[tuple[str, Target]]:
        return [(self._name, self)]

    def __exit__(self, *_: object) -> None:
        if self._is_alone:
            self._lock.leave_alone()

    def layout(self) -> Layout:
        # The engine compares a model just before it loads it. A load that fails is half done,
        # and a comparison has changed nothing. A worker that joins is compared long before.
        if self._model.version:
            self._lock_in_time()
        return self._model.layout()

    def shape(self, layout: Layout) -> bool:
        return self._model.shape(layout)

    def load(self, snapshot: NativeSnapshot) -> None:
        self._lock_in_time()
        self._model.load(snapshot)

    def _lock_in_time(self) -> None:
        if not self.enter_alone():
            raise DeadlineError(
                "a forward, or a block of frozen(), did not end within the call's limit", "retry"
            )

    def enter_alone(self) -> bool:
        """Locks the model; False if a forward does not end in time."""
        if not self._is_alone:
            self._is_alone = self._lock.enter_alone(_left(self._until))
        return self._is_alone


def _left(until: float) -> float:
    """The seconds until then; 0 once it has passed."""
    return max(until - time.monotonic(), 0.0)


def _limit(timeout: float | None) -> float:
    """The limit of a call in seconds, which locks and torch can add to a time."""
    return min(WEIGHT_SYNC_TIMEOUT if timeout is None else timeout, _LONGEST)


def _report(pending: PendingSend, calls: dict[int, Any], until: float) -> Report:
    """Waits for the report; not for workers whose calls have failed."""
    while True:
        look = min(until, time.monotonic() + _CALL_INTERVAL)
        report = pending.wait(_left(look))
        late = [line.worker for line in report.workers if line.outcome == "late"]
        is_over = _left(look) > 0 or look == until
        if is_over or all(_refusal(calls.get(worker)) for worker in late):
            return report


def _refusal(call: Any) -> str | None:
    """The worker's words, if a call has failed by them, or could not begin."""
    if call is None or isinstance(call, Exception):
        return None if call is None else _failure(call)
    try:
        refusal: str | None = call.value() if call.done() else None
    except Exception:
        # The call's limit has come, or the worker's process has ended: the report knows.
        return None
    return refusal


def answer_of(call: Any) -> Any:
    """Waits for the answer of a call of torch RPC. Ctrl-C ends this wait, and not torch's own."""
    answered = threading.Event()
    call.add_done_callback(lambda _: answered.set())
    answered.wait()
    return call.wait()


def _failure(call: Any) -> str | None:
    """Waits for a call's answer, and returns why it failed, or None."""
    try:
        if isinstance(call, Exception):
            raise call
        failure: str | None = answer_of(call)
    except Exception as error:
        # torch adds the caller's traceback.
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return failure


# What the trainer calls in a worker's process. torch RPC finds these functions by their names.
# They return errors as text, because torch prints those that are raised, and adds tracebacks.

# The schemes of this process that wait for calls, by key and worker.
_here: weakref.WeakValueDictionary[tuple[str, int], Any] = weakref.WeakValueDictionary()


def wait_for_calls(scheme: Any, key: str, worker: int) -> None:
    """From here on the trainer's calls of this worker reach this scheme."""
    _here[key, worker] = scheme


def _join(key: str, worker: int, state: dict[str, Any], timeout: float) -> str | None:
    return _tried(lambda: _scheme(key, worker)._join_by(state, timeout))


def _load(key: str, worker: int, version: int, timeout: float) -> str | None:
    return _tried(lambda: _scheme(key, worker)._group.load(version, timeout))


def _tried(call: Callable[[], None]) -> str | None:
    try:
        call()
    except Exception as error:
        return _ends.reason_of(error) or str(error)
    return None


def _scheme(key: str, worker: int) -> Any:
    scheme = _here.get((key, worker))
    if scheme is None:
        raise LifecycleError(
            f"there is no worker {worker} of this scheme in the process that was called: call "
            "init_on_receiver and connect there first, and keep the scheme"
        )
    return scheme
