"""The calls of TorchRL before schemes had two phases: ``create_sender``, ``create_receiver``.

A worker is registered with a pipe, through which it gets the init info.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from torch import nn

from weightsync import _ends, _paths
from weightsync._deadline import Deadline
from weightsync._native import InitInfo, Report, Session
from weightsync.errors import DeadlineError, LifecycleError, SenderClosedError
from weightsync.sender import Sender
from weightsync.torchrl._transports import _MODEL, _Applied, opened

logger = logging.getLogger("weightsync")

# The second part of the pair that is sent through a pipe; the first has the init info.
_WORD = "weightsync"

# How long a call joins its sender, in seconds.
_SHORTEST_JOIN, _LONGEST_JOIN = 1.0, 60.0


class WeightSender:
    """Sends one model's weights to the workers that were registered.

    The model is registered by :meth:`register_model`, or by the first
    :meth:`update_weights` if ``auto_register`` is on.
    """

    def __init__(self, scheme: Any, auto_register: bool = True) -> None:
        self._scheme = scheme
        self._auto_register = auto_register
        self._model_id = _MODEL
        self._context: Any = None
        self._pipes: dict[int, Any] = {}
        self._invited: set[int] = set()
        self._joined: set[int] = set()
        self._sender: Sender | None = None
        self._pending: Any = None

    def set_context(self, context: Any, model_id: str = _MODEL) -> None:
        """Sets where ``update_weights(None)`` looks the model up."""
        self._context, self._model_id = context, model_id

    def register_model(self, weights: Any) -> None:
        """Registers the model; workers begin with these weights."""
        if self._sender is None:
            scheme = self._scheme
            self._sender = opened(
                self,
                weights,
                scheme=scheme._scheme,
                run_dir=scheme._run_dir,
                strategy=scheme.strategy_str,
            )
        self._invite()

    def register_worker(self, worker_idx: int, pipe_or_context: Any) -> None:
        """Adds a worker by the trainer's end of its pipe, or by a collector that has the pipes."""
        pipes = getattr(pipe_or_context, "pipes", None)
        pipe = pipe_or_context if pipes is None else pipes[worker_idx]
        if pipe is not self._pipes.get(worker_idx):
            # A new worker in the place of another must join.
            self._invited.discard(worker_idx)
            self._joined.discard(worker_idx)
        self._pipes[worker_idx] = pipe
        if self._sender is not None:
            self._invite()

    def update_weights(
        self, weights: Any = None, worker_ids: Any = None, timeout: float | None = 60.0
    ) -> Report | None:
        """Sends weights, and waits until the workers that have joined have applied them.

        A worker joins in ``receive``, and gets the newest weights there. :meth:`wait_async` waits for
        workers that have not joined yet, and so does a call for some workers.
        """
        weights = self._found(weights)
        first = self._sender is None
        if first:
            if not self._auto_register:
                raise LifecycleError("auto_register is off: register_model comes first")
            self.register_model(weights)
        self._invite()
        assert self._sender is not None
        if worker_ids is not None:
            self._wait_for_first(worker_ids, timeout)
        if first:
            return None
        report = self._sender.send(weights, worker_ids=worker_ids, timeout=timeout)
        self._joined.update(line.worker for line in report.workers)
        return report

    def update_weights_async(self, weights: Any = None, worker_ids: Any = None) -> None:
        """As :meth:`update_weights`, but returns once the weights were read."""
        weights = self._found(weights)
        if self._sender is None:
            self.register_model(weights)
            return
        self._invite()
        self._pending = self._sender.send_async(weights, worker_ids=worker_ids)

    def wait_async(self, timeout: float | None = 60.0) -> Report | None:
        """Waits for the last send, and returns its report."""
        if self._pending is None:
            if self._sender is not None:
                self._wait_for_first(None, timeout)
            return None
        return self._pending.wait(timeout)

    def shutdown(self) -> None:
        """Shuts it down. Any number of times."""
        if self._sender is not None:
            self._sender.shutdown()
        _ends.closed(self)

    def _found(self, weights: Any) -> Any:
        if weights is not None:
            return weights
        if self._context is None:
            raise LifecycleError("update_weights() without weights: call set_context first")
        return _paths.resolve(self._context, self._model_id)

    def _invite(self) -> None:
        """Sends the init info to each new worker; a departed worker is skipped."""
        assert self._sender is not None
        for worker in self._pipes.keys() - self._invited:
            self._invited.add(worker)
            try:
                self._pipes[worker].send(((worker, self._sender.init_info.to_json()), _WORD))
            except OSError as error:
                logger.warning("worker %d is gone: %s", worker, error)
                self._joined.add(worker)

    def _wait_for_first(self, worker_ids: Any, timeout: float | None) -> None:
        """Waits for workers that have never joined; a report has a line for those that died."""
        assert self._sender is not None
        wanted = list(self._pipes) if worker_ids is None else worker_ids
        wanted = [wanted] if isinstance(wanted, int) else list(wanted)
        new = [worker for worker in wanted if worker not in self._joined]
        if new:
            self._sender.wait_for(new, timeout=timeout)
            self._joined.update(new)


class _Unapplied:
    """The transport of a receiver: it hands weights to the caller and applies none."""

    def __init__(self, receiver: WeightReceiver) -> None:
        self._receiver = receiver

    def receive_weights(self, timeout: float | None = None) -> tuple[str, Any] | None:
        """The model's name and its new weights; None if none came in time."""
        return self._receiver._received(timeout, applied=False)


class WeightReceiver:
    """Receives one model's weights; it gets the init info through a pipe."""

    def __init__(self, scheme: Any) -> None:
        self._scheme = scheme
        self._model: Any = None
        self._context: Any = None
        self._path: str | None = None
        self._pipe: Any = None
        self._session: Session | None = None
        self._sent: Any = None
        # The worker's number and the init info.
        self._invitation: tuple[int, str] | None = None
        # How long a call joins, at least: a loop may ask for a moment at a time.
        self._limit = _SHORTEST_JOIN
        self._lock = threading.RLock()

    def set_context(self, context: Any) -> None:
        """Where a model that is registered by path is looked up."""
        self._context = context

    def register_model(self, model_ref: Any) -> None:
        """Registers the worker's model, or its path in the context."""
        if isinstance(model_ref, str):
            self._path = model_ref
        else:
            self._model = model_ref

    def register_worker_transport(self, pipe: Any) -> None:
        """Registers the worker's end of the pipe."""
        self._pipe = pipe

    def receive(self, timeout: float | None = 0.001) -> bool:
        """Receives weights and applies them; False if none came in time."""
        return self._received(timeout, applied=True) is not None

    @property
    def _transport(self) -> _Unapplied:
        return _Unapplied(self)

    def _received(self, timeout: float | None, *, applied: bool) -> tuple[str, Any] | None:
        """The model's name and its new weights; None if none came in time."""
        if self._pipe is None:
            raise LifecycleError("call register_worker_transport before receive")
        until = Deadline(timeout)
        left = until.left()
        # Another thread may be waiting in it.
        if not self._lock.acquire(timeout=-1 if left is None else left):
            return None
        try:
            if self._session is None:
                return self._join(until.left(), applied)
            target = self._target(applied)
            try:
                if self._session.receive_into([(_MODEL, target)], until.left()) is None:
                    return None
            except SenderClosedError:
                return None
            return _MODEL, target.received
        finally:
            self._lock.release()

    def _target(self, applied: bool) -> _Applied:
        return _Applied(self._the_model() if applied else None, self._scheme.strategy, self._sent)

    def apply_weights(self, weights: Any) -> None:
        """Applies weights to the model."""
        self._scheme.strategy.apply_weights(self._the_model(), weights)

    def shutdown(self) -> None:
        """Shuts it down. Any number of times."""
        if self._session is not None:
            self._session.shutdown()
        _ends.closed(self)

    def _join(self, timeout: float | None, applied: bool) -> tuple[str, Any] | None:
        if self._invitation is None:
            try:
                if not self._pipe.poll(timeout):
                    return None
                message, word = self._pipe.recv()
            except (EOFError, ConnectionError):
                # The sender is gone: the same as a sender that has closed.
                return None
            if word != _WORD:
                raise LifecycleError(
                    f"expected an init info from the pipe, got {word!r}: use the pipe for nothing "
                    "else until the worker has joined"
                )
            # It comes once, and the next call joins by it if this one is refused.
            self._invitation = message
        worker, text = self._invitation
        session = Session.prepare_receiver(InitInfo.from_json(text), worker, None, "cpu")
        target = self._target(applied)
        limit = _LONGEST_JOIN if timeout is None else max(timeout, self._limit)
        try:
            session.connect_receiver([(_MODEL, target)], limit)
        except BaseException as error:
            session.shutdown()
            if timeout is not None and isinstance(error, DeadlineError):
                # The next call tries again, for longer: weights may be large.
                self._limit = min(2 * self._limit, _LONGEST_JOIN)
                return None
            raise
        self._session, self._sent = session, target.sent
        _ends.opened(self)
        return _MODEL, target.received

    def _the_model(self) -> Any:
        if self._model is None and self._path is not None:
            return _paths.resolve(self._context, self._path)
        if self._model is None:
            raise LifecycleError("call register_model before receive")
        if not isinstance(self._model, nn.Module) and not hasattr(self._model, "items"):
            raise LifecycleError(f"a {type(self._model).__name__} cannot take weights")
        return self._model
