"""TorchRL's scheme over a process group of torch.distributed that is there already."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

from torch import nn

from weightsync import _ends, _paths
from weightsync._guard import Guard, Hold, loading
from weightsync.errors import (
    DeadlineError,
    LifecycleError,
    LoadError,
    ModelError,
    PeerError,
    SettingError,
    UnsupportedError,
    WeightsyncError,
)
from weightsync.process_group import Receiver, Report, Sender
from weightsync.process_group._group import rank_in
from weightsync.torchrl import _collector, _given
from weightsync.torchrl._base import WeightSyncScheme
from weightsync.torchrl._formats import applies, extracts
from weightsync.torchrl._model_lock import ModelLock

logger = logging.getLogger("weightsync")


class ProcessGroupWeightSyncScheme(WeightSyncScheme):
    """Weights by broadcasts in a process group that the trainer and its workers are in.

    Each process makes a scheme of its own. ``connect`` is collective: it brings the first
    weights, and members are fixed from then on. A worker that dies ends the next send with an
    error. Where workers come and go use :class:`DistributedWeightSyncScheme`.

    Args:
        group: the process group; None for the default group.
        strategy: "tensordict" or "state_dict".
        sync: whether a worker's weights change in its calls of :meth:`receive`. With False a
            thread of the worker receives, and changes them while no forward of the model runs.
        timeout: how long each wait for the other ranks lasts at most, in seconds.
        src: the trainer's rank in the group.
        ranks: the workers' ranks, by worker; without it they are the other ranks in order, so
            that worker i is rank i + 1 of a trainer of rank 0.
        mode: "bind" or "copy", as of :class:`weightsync.process_group.Receiver`.
    """

    def __init__(
        self,
        group: Any = None,
        strategy: Literal["tensordict", "state_dict"] = "tensordict",
        sync: bool = True,
        timeout: float = 60.0,
        *,
        src: int = 0,
        ranks: Sequence[int] | None = None,
        mode: Literal["bind", "copy"] = "bind",
    ) -> None:
        super().__init__(strategy)
        self.sync, self.timeout = sync, timeout
        self._outer, self._src, self._mode = group, src, mode
        self._ranks = None if ranks is None else list(ranks)
        self._current: Callable[[], Any] | None = None
        self._sender: Sender | None = None
        self._receiver: Receiver | None = None
        self._following: _Following | None = None

    # The trainer's half.

    def _init_on_sender_impl(
        self,
        *,
        model_id: str | None = None,
        context: Any = None,
        weights: Any = None,
        model: nn.Module | None = None,
        num_workers: int | None = None,
        **kwargs: Any,
    ) -> None:
        odd = [name for name, value in kwargs.items() if value is not None]
        if odd:
            raise UnsupportedError(
                f"init_on_sender: {' and '.join(odd)} cannot be here: a broadcast brings the same "
                "weights to all workers. DistributedWeightSyncScheme can send each its own"
            )
        sources = {"context": context, "weights": weights, "model": model}
        given = [name for name, value in sources.items() if value is not None]
        if len(given) != 1:
            raise SettingError(
                f"init_on_sender: expected one of {', '.join(sources)}, got "
                f"{' and '.join(given) or 'none'}"
            )
        self._model_id = name = model_id or "policy"
        if context is None:
            source = sources[given[0]]
            self._current = lambda: source
            return
        self.context = context
        found = weakref.ref(context)

        def current() -> Any:
            here = found()
            return None if here is None else _given.model_of(here, name)

        self._current = current

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any = None
    ) -> None:
        # After a call that failed the workers may still wait for the first weights.
        if self._sender is None or not self._sender._is_open():
            name, form = self._model_id or "policy", self.strategy_str
            self._sender = Sender(
                None, self._outer, src=self._src, name=name, strategy=form, timeout=self.timeout
            )
            _ends.opened(self)
        self._send(weights)

    def send(
        self, weights: Any = None, worker_ids: int | Iterable[int] | None = None
    ) -> Report | None:
        """Broadcasts weights, and returns a report with a line for each worker.

        Args:
            weights: None for the registered model; a module, TensorDict, state dict or nested
                dict; or a path of a model in the context.
            worker_ids: None, or all workers: a broadcast reaches them all.

        Raises:
            PeerError, DeadlineError: naming the ranks that ended the send; see
                :meth:`weightsync.process_group.Sender.send`.
            UnsupportedError: for some of the workers only, or for weights by worker.
        """
        if not self.initialized_on_sender or not self.synchronized_on_sender:
            raise LifecycleError("send: call init_on_sender and connect first, in the trainer")
        return self._send(weights, worker_ids)

    def _send(
        self, weights: Any, worker_ids: int | Iterable[int] | None = None
    ) -> Report | None:
        assert self._sender is not None
        try:
            self._check_workers(worker_ids)
            weights = self._given(weights)
        except BaseException as error:
            self._sender._fail(error)
            raise
        report = self._sender.send(weights)
        for line in report.failed if report is not None else ():
            logger.warning("%s has not applied v%d: %s", line.name, report.version, line.reason)  # type: ignore[union-attr]
        return report

    def _check_workers(self, worker_ids: int | Iterable[int] | None) -> None:
        # A rank that only gathers has no workers.
        if worker_ids is None or self._sender is None or not self._sender.ranks:
            return
        wanted = {worker_ids} if isinstance(worker_ids, int) else set(worker_ids)
        every = set(range(len(self._sender.ranks)))
        if wanted != every:
            raise UnsupportedError(
                f"worker_ids: expected all of {sorted(every)}, got {sorted(wanted)}: a broadcast "
                "reaches all workers. DistributedWeightSyncScheme can send to some"
            )

    def _given(self, weights: Any) -> Any:
        """The weights of a send, as the sender takes them."""
        if _given.by_worker(weights):
            raise UnsupportedError("a broadcast brings the same weights to all workers: pass one")
        if isinstance(weights, str):
            weights = _paths.resolve(self.context, weights)
        if weights is None and self._current is not None:
            weights = self._current()
        if weights is None:
            raise ModelError(f"there are no weights of {self._model_id!r} here: pass them to send")
        return self._strategy.extract_weights(weights) if extracts(self._strategy) else weights

    # A worker's half.

    def _init_on_receiver_impl(
        self,
        *,
        model_id: str,
        context: Any = None,
        model: Any = None,
        worker_idx: int | None = None,
        **kwargs: Any,
    ) -> None:
        if applies(self._strategy):
            raise UnsupportedError(
                "a strategy with an apply_weights of its own cannot be here, since a version is "
                "loaded as a whole or not at all: use DistributedWeightSyncScheme"
            )
        if context is not None:
            worker_idx = getattr(context, "worker_idx", worker_idx)
            model = _given.model_of(context, model_id)
            self.context = context
        if model is None:
            raise ModelError(f"there is no model {model_id!r} here: pass model=…, or a context")
        self._model_id, self._worker_idx = model_id, worker_idx
        self.model = model

    def _setup_connection_and_weights_on_receiver_impl(
        self, *, worker_idx: int | None = None
    ) -> None:
        worker = self._worker_idx if worker_idx is None else worker_idx
        rank = rank_in(self._outer)
        if worker is not None:
            ranks = self._ranks
            expected = worker + (worker >= self._src) if ranks is None else dict(enumerate(ranks)).get(worker)
            if expected != rank:
                raise SettingError(
                    f"worker {worker} is rank {expected} of the group, and this process is rank "
                    f"{rank}: pass ranks=[…] if workers have other ranks"
                )
        self._worker_idx = worker
        self._receiver = Receiver(
            self.model,
            self._outer,
            src=self._src,
            name=self._model_id or "policy",
            mode=self._mode,
            timeout=self.timeout,
        )
        _ends.opened(self)
        # The trainer's ranks wait for each other first, as long as this at most.
        limit = 2 * self.timeout
        if self._receiver.receive(limit) is None:
            # The trainer's next send must not wait for this worker.
            self._receiver.shutdown()
            self._receiver = None
            _ends.closed(self)
            raise DeadlineError(
                f"rank {self._src} has not sent the first weights within {limit} s", "retry"
            )
        if not self.sync:
            self._following = _Following(self._receiver, self.model, self.timeout)

    def receive(self, timeout: float | None = None) -> Any:
        """Receives and applies a version; with ``sync=False`` waits until the thread has.

        Returns:
            The model's weights; None at the timeout.

        Raises:
            SenderClosedError: the trainer has shut down.
            WrongWeightsError: the weights do not fit the model, which keeps its own.
            LoadError: with ``sync=False``: a forward of the model did not end in time.
            LifecycleError: with ``sync=False``: in a forward, or inside :meth:`frozen`.

        With ``sync=False`` a call raises the latest refusal since the call before.
        """
        if not self.initialized_on_receiver or self._receiver is None:
            raise LifecycleError("receive: call init_on_receiver and connect first")
        version = (self._following or self._receiver).receive(timeout)
        if version is None:
            return None
        context, model = self.context, self.model
        if hasattr(context, "increment_version"):
            _collector.bump_at_next_forward(context, model, version)
        weights = self._strategy.extract_weights(model)
        if not hasattr(context, "increment_version") and hasattr(context, "update_policy_weights_"):
            context.update_policy_weights_(model_id=self._model_id, policy_or_weights=weights)
        return weights

    def frozen(self) -> contextlib.AbstractContextManager[Any]:
        """Keeps a worker's model unchanged inside ``with scheme.frozen():``, in this thread."""
        return contextlib.nullcontext() if self._following is None else self._following.frozen()

    # Both.

    @property
    def version(self) -> int:
        """The version sent last, or, on a worker, the version that its model has."""
        end = self._sender or self._receiver
        return 0 if end is None else end.version

    @property
    def weights(self) -> Any:
        """The weights that a send would send, or, on a worker, its model's; or None."""
        source = self._current() if self._current is not None else None
        if source is None and self._model_ref is not None:
            source = self._model_ref()
        return None if source is None else self._strategy.extract_weights(source)

    def create_transport(self, **kwargs: Any) -> Any:
        """Raises an :class:`UnsupportedError`: a broadcast has no transport for each worker."""
        raise UnsupportedError(
            "a broadcast reaches all workers at once, so there is no transport for each: call send "
            "and receive of the scheme"
        )

    def shutdown(self) -> None:
        """Shuts down this process's end. Any number of times."""
        for end in (getattr(self, "_sender", None), getattr(self, "_receiver", None)):
            if end is not None:
                end.shutdown()
        if getattr(self, "_following", None) is not None:
            self._following.end()  # type: ignore[union-attr]
        _ends.closed(self)
        self._sender = self._receiver = self._following = None
        super().shutdown()
        # The scheme can be initialised again.
        self._initialized_on_sender = self._initialized_on_receiver = False
        self._synchronized_on_sender = self._synchronized_on_receiver = False

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state["_sender"] = state["_receiver"] = state["_following"] = state["_current"] = None
        return state

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._sender is not None or self._receiver is not None or self._outer is not None:
            raise LifecycleError(
                "a scheme of a process group cannot be pickled: make one in each process of the group"
            )
        return super().__reduce_ex__(protocol)


class _Following:
    """A worker's thread that receives, and changes the model while no forward of it runs."""

    def __init__(self, receiver: Receiver, model: Any, timeout: float) -> None:
        self._receiver, self._seen = receiver, receiver.version
        # Shorter than the sender's wait for the answer, which ends the group.
        self._timeout = timeout / 2
        self._changed = threading.Condition()
        # Why the thread has ended; and why the latest version was not applied.
        self._failure: BaseException | None = None
        self._refusal: WeightsyncError | None = None
        self._lock = ModelLock()
        self._hold = Hold(self._lock.acquire)
        self._guard = Guard(self._hold, model) if isinstance(model, nn.Module) else None
        receiver._around_load = self._alone
        self._thread = threading.Thread(target=self._follow, daemon=True, name="weightsync-receive")
        self._thread.start()

    def receive(self, timeout: float | None) -> int | None:
        """Waits for a version that this was not called for yet."""
        self._lock.refuse_holder()
        with self._changed:
            self._changed.wait_for(self._has_news, timeout)
            refusal, self._refusal = self._refusal, None
            if refusal is not None:
                raise refusal
            if self._receiver.version > self._seen:
                self._seen = self._receiver.version
                return self._seen
            failure = self._failure
            if isinstance(failure, WeightsyncError):
                raise type(failure)(str(failure), failure.remedy)
            if failure is not None:
                said = str(failure) or type(failure).__name__
                raise PeerError(f"the thread that receives has ended: {said}", "reconnect") from failure
            return None

    def _has_news(self) -> bool:
        is_new = self._receiver.version > self._seen
        return is_new or self._refusal is not None or self._failure is not None

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        self._hold.enter()
        try:
            yield
        finally:
            self._hold.leave()

    def end(self) -> None:
        """Waits for the end of the thread, once the receiver has shut down."""
        # This thread may hold the model: the other thread then does not wait to change it.
        self._lock.close()
        self._thread.join()
        self._hold.end()
        if self._guard is not None:
            self._guard.remove()

    def _follow(self) -> None:
        while True:
            try:
                self._receiver.receive()
            except BaseException as error:
                refusal: WeightsyncError | None = None
                if isinstance(error, WeightsyncError):
                    # Without the traceback, whose frames keep the version's memory.
                    error = type(error)(str(error), error.remedy)
                    refusal = error if self._goes_on() else None
                with self._changed:
                    self._refusal = refusal or self._refusal
                    self._failure = error if refusal is None else None
                    self._changed.notify_all()
                if refusal is None:
                    return
                # The next version may fit.
                logger.warning("a version was not applied: %s", error)
                continue
            with self._changed:
                self._changed.notify_all()

    def _goes_on(self) -> bool:
        try:
            self._receiver._group.check()
        except WeightsyncError:
            return False
        return True

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._lock.enter_alone(self._timeout):
            raise LoadError(
                "a forward of the model did not end in time: the version was not loaded", "retry"
            )
        try:
            with loading:
                yield
        finally:
            self._lock.leave_alone()
