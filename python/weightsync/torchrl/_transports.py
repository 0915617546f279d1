"""Transports by TorchRL's protocol, which pass the model as an argument.

A scheme returns its own transports. :class:`SharedMemTransport` and :class:`MPTransport`, and
those of ``_network_transports``, also work alone, with TorchRL's constructors. Through the
queues that they are given they send an init info, and no weights.
"""

from __future__ import annotations

import os
import queue
from typing import Any

from torchrl._utils import WEIGHT_SYNC_TIMEOUT
from torchrl.weight_update import WeightStrategy
from torchrl.weight_update._shared import _log_weight_sync

from weightsync import _ends
from weightsync._deadline import Deadline
from weightsync._native import InitInfo, Layout, PendingSend, Session
from weightsync._native import Snapshot as NativeSnapshot
from weightsync._targets import Target, target_of
from weightsync._view import weights_of
from weightsync.errors import DeadlineError, LifecycleError, SettingError
from weightsync.scheme import MultiProcess, Scheme, SharedMem
from weightsync.sender import Sender
from weightsync.torchrl._collector import compare
from weightsync.torchrl._formats import applies, formatted
from weightsync.torchrl._given import by_worker, unknown_worker
from weightsync.torchrl._updaters import _as_tensordict, _chosen

_MODEL = "policy"


class SchemeTransport:
    """A scheme's connection, by TorchRL's protocol: to one worker, or to all."""

    def __init__(self, scheme: Any, worker_idx: int | None = None) -> None:
        self._scheme = scheme
        self._worker_idx = worker_idx

    def send_weights(self, weights: Any, worker_ids: Any = None) -> Any:
        """Sends weights, waits until they are applied, and returns the report."""
        return self._scheme.send(weights, self._chosen(worker_ids))

    def send_weights_async(self, weights: Any, model_id: str | None = None) -> None:
        """Sends weights, and returns once they were read; :meth:`wait_ack` waits for the rest."""
        group = self._scheme._connected("send_weights_async")
        self._scheme._pending[self._worker_idx] = group.sender.send_async(
            self._scheme._extracted(weights),
            model=self._scheme.model_id,
            worker_ids=self._chosen(None),
        )

    def wait_ack(self, timeout: float | None = None) -> Any:
        """Waits until the last send is applied, and returns its report."""
        pending = self._scheme._pending.get(self._worker_idx)
        return None if pending is None else pending.wait(timeout)

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: Any = None,
        strategy: Any = None,
    ) -> Any:
        """The weights that were applied since the last call, or None."""
        received = self._scheme.receive(timeout)
        if received is not None and model is not None and model is not self._scheme.model:
            (strategy or self._scheme.strategy).apply_weights(model, received)
        return received

    def setup_connection_and_weights_on_sender(self) -> None:
        """Connects the sender."""
        if not self._scheme.synchronized_on_sender:
            self._scheme.connect()

    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        model: Any = None,
        strategy: Any = None,
        timeout: float | None = None,
    ) -> Any:
        """Connects a worker, and returns its initial weights.

        Args:
            timeout: how long it waits for the trainer at most, in seconds; None: TorchRL's limit.
        """
        if not self._scheme.synchronized_on_receiver:
            if self._scheme._group is not None:
                limit = WEIGHT_SYNC_TIMEOUT if timeout is None else timeout
                self._scheme._group.join_limit = limit
            self._scheme.connect(worker_idx=worker_idx)
        return self._scheme._formatted(self._scheme._worker_model.weights())

    def send_ack(self, message: str = "updated") -> None:
        """Does nothing: a worker reports automatically that it has applied weights."""

    def check_connection(self) -> bool:
        """Whether the other end is connected."""
        scheme = self._scheme
        if scheme.initialized_on_receiver:
            background = scheme._group.background
            return background is not None and background.state == "following"
        there = {one.worker for one in scheme.workers}
        return bool(there) if self._worker_idx is None else self._worker_idx in there

    def _chosen(self, worker_ids: Any) -> Any:
        return self._worker_idx if worker_ids is None else worker_ids


def opened(owner: Any, weights: Any, **how: Any) -> Sender:
    """A sender of one model, which the owner shuts down, before any worker has joined."""
    sender = Sender(weights, name=_MODEL, async_send_limit=8, **how)
    sender.connect(0)
    _ends.opened(owner)
    return sender


class _QueueTransport:
    """The base of transports without a scheme: workers get the init info through queues."""

    # The engine's scheme.
    _scheme: Scheme = SharedMem()

    def __init__(self, queues: dict[int, Any], timeout: float | None) -> None:
        self.timeout = timeout
        self._queues = queues
        self._sender: Sender | None = None
        self._pending: PendingSend | None = None
        self._session: Session | None = None
        self._pid = os.getpid()
        self._sent: Layout | None = None
        self._joined = False
        # A worker's number, and the init info that came through its queue.
        self._worker: int | None = None
        self._info: str | None = None

    # The sender's half.

    def _open(self, weights: Any) -> bool:
        """Makes the sender and sends every worker the init info; False if there is a sender."""
        if self._sender is not None:
            return False
        self._sender = opened(self, weights, scheme=self._scheme, strategy="tensordict")
        try:
            self._tell(self._sender.init_info.to_json())
        except BaseException:
            # No worker would come to this sender. The next send makes another.
            self.shutdown()
            self._sender = None
            raise
        return True

    def _tell(self, info: str) -> None:
        """Sends every worker the init info."""
        for waiting in self._queues.values():
            waiting.put(info)

    def send_weights(self, weights: Any, worker_ids: Any = None) -> Any:
        """Sends weights, and waits until the workers that have joined have applied them."""
        if self._open(weights):
            return None
        assert self._sender is not None
        return self._sender.send(weights, worker_ids=worker_ids, timeout=self.timeout)

    def send_weights_async(self, weights: Any, model_id: str = _MODEL) -> None:
        """Sends weights, and returns once they were read; :meth:`wait_ack` waits for the rest."""
        if not self._open(weights):
            assert self._sender is not None
            self._pending = self._sender.send_async(weights)

    def wait_ack(self, timeout: float | None = None) -> Any:
        """Waits until the last send is applied, and returns its report.

        Raises:
            DeadlineError: if, after the first send, the workers are not there in time.
        """
        limit = self.timeout if timeout is None else timeout
        if self._pending is not None:
            return self._pending.wait(limit)
        if self._sender is not None and not self._joined:
            self._sender.wait_for(list(self._queues), timeout=limit)
            self._joined = True
        return None

    def setup_connection_and_weights_on_sender(self) -> None:
        """Does nothing: the first send brings the initial weights."""

    # A worker's half.

    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        model: Any = None,
        strategy: Any = None,
        timeout: float | None = None,
    ) -> Any:
        """Joins, and takes the initial weights.

        Args:
            timeout: how long it waits at most, in seconds; None: the transport's.

        Raises:
            DeadlineError: if they are not there in time.
        """
        timeout = self.timeout if timeout is None else timeout
        worker = 0 if worker_idx is None else worker_idx
        if worker not in self._queues:
            raise unknown_worker(worker, self._queues)
        self._worker = worker
        received = self._join(worker, timeout, model, strategy)
        if received is None:
            raise DeadlineError(
                f"worker {worker} got no initial weights within {timeout} s: has the trainer "
                "sent any? The next call goes on waiting",
                "retry",
            )
        return received

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: Any = None,
        strategy: Any = None,
    ) -> Any:
        """Receives weights, and applies them to the model; None if there are none in time."""
        timeout = self.timeout if timeout is None else timeout
        if self._session is None or self._pid != os.getpid():
            return self._join(self._own_number(), timeout, model, strategy)
        target = self._target(model, strategy)
        versions = self._session.receive_into([(_MODEL, target)], timeout)
        return None if versions is None else target.received

    def send_ack(self, message: str = "updated") -> None:
        """Does nothing: a worker reports automatically that it has applied weights."""

    def _join(self, worker: int, timeout: float | None, model: Any, strategy: Any) -> Any:
        until = Deadline(timeout)
        try:
            # A newer init info in the queue is that of a new sender.
            known = self._info is not None
            self._info = self._queues[worker].get(not known, None if known else timeout)
        except queue.Empty:
            if self._info is None:
                return None
        self._pid = os.getpid()
        session = Session.prepare_receiver(InitInfo.from_json(self._info), worker, None, "cpu")
        target = self._target(model, strategy)
        try:
            session.connect_receiver([(_MODEL, target)], until.left())
        except DeadlineError:
            # The next call joins by the same init info.
            session.shutdown()
            return None
        self._session, self._sent = session, target.sent
        _ends.opened(self)
        return target.received

    def _own_number(self) -> int:
        """The number of this process's worker."""
        if self._worker is not None:
            return self._worker
        if len(self._queues) == 1:
            return next(iter(self._queues))
        raise LifecycleError(
            "there are several workers, and this process has no number: call "
            "setup_connection_and_weights_on_receiver(worker_idx=…) first"
        )

    def _target(self, model: Any, strategy: Any) -> _Applied:
        return _Applied(model, strategy, self._sent)

    def shutdown(self) -> None:
        """Shuts down the ends that this process has. Any number of times."""
        if self._pid == os.getpid():
            if self._sender is not None:
                self._sender.shutdown()
            if self._session is not None:
                self._session.shutdown(_ends.why)
        _ends.closed(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"queues": self._queues, "timeout": self.timeout}

    def __setstate__(self, state: dict[str, Any]) -> None:
        _QueueTransport.__init__(self, state["queues"], state["timeout"])


class MPTransport(_QueueTransport):
    """A transport to one worker, with TorchRL's constructor.

    Args:
        weight_queue: a multiprocessing queue; the worker gets the init info from it.
        ack_queue: accepted for TorchRL's sake; workers report automatically.
        timeout: the timeout of calls that have none, in seconds.
    """

    _scheme = MultiProcess()

    def __init__(self, weight_queue: Any, ack_queue: Any = None, timeout: float = 10.0) -> None:
        super().__init__({0: weight_queue}, timeout)

    def setup_connection_and_weights_on_receiver(
        self, *, worker_idx: int | None = None, **kwargs: Any
    ) -> Any:
        """Joins, and takes the initial weights. The queue is this worker's own."""
        return super().setup_connection_and_weights_on_receiver(worker_idx=0, **kwargs)


class SharedMemTransport(_QueueTransport):
    """A transport to several workers through shared memory, with TorchRL's constructor.

    Without queues there are no workers to tell of anything: a send then writes into the weights that
    were registered, and receiving applies the weights that are passed.
    """

    def __init__(self) -> None:
        super().__init__({}, 60.0)
        self._params_map: dict[int, Any] = {}

    def register_weights(
        self, params_map: dict[int, Any], init_queues: dict[int, Any], per_worker: bool = False
    ) -> None:
        """Registers each worker's initial weights, and its queue for the init info.

        ``per_worker`` is accepted for TorchRL's sake: the map shows it already.
        """
        self._params_map, self._queues = params_map, dict(init_queues)

    @property
    def unique_weights(self) -> list[Any]:
        """The distinct initial weights."""
        return list({id(one): one for one in self._params_map.values()}.values())

    def setup_connection_and_weights_on_sender(self) -> None:
        """Publishes the initial weights, and sends every worker the init info."""
        self._check_registered()
        if not self._queues:
            return
        unique = self.unique_weights
        if len(unique) == 1:
            self._open(unique[0])
            return
        if self._sender is not None:
            return
        sender = opened(self, unique[0], scheme=self._scheme, strategy="tensordict")
        try:
            # Every worker finds its own weights from the beginning.
            sender.send_each(self._params_map, wait="sent")
            self._tell(sender.init_info.to_json())
        except BaseException:
            # The next call makes another sender.
            sender.shutdown()
            _ends.closed(self)
            raise
        self._sender = sender

    def send_weights(self, weights: Any, worker_ids: Any = None) -> Any:
        """Sends weights to all workers or some; a dict by worker number has each worker's own."""
        self._check_registered()
        if not self._queues:
            self._write(weights, worker_ids)
            return None
        if self._sender is None:
            self.setup_connection_and_weights_on_sender()
        assert self._sender is not None
        if by_worker(weights):
            unknown = [worker for worker in weights if worker not in self._queues]
            if unknown:
                raise unknown_worker(unknown[0], self._queues)
            return self._sender.send_each(weights, timeout=self.timeout)
        return self._sender.send(weights, worker_ids=worker_ids, timeout=self.timeout)

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: Any = None,
        strategy: Any = None,
    ) -> Any:
        """Receives weights, and applies them to the model; None if there are none in time."""
        if self._queues:
            return super().receive_weights(timeout, weights=weights, model=model, strategy=strategy)
        if weights is None or model is None:
            return None
        (strategy or WeightStrategy()).apply_weights(model, weights)
        return weights

    def _check_registered(self) -> None:
        if not self._params_map:
            raise LifecycleError("there are no weights: call register_weights first")

    def _write(self, weights: Any, worker_ids: Any) -> None:
        """Writes into the registered weights, once it is clear that the given ones fit."""
        own = self._params_map
        if not by_worker(weights):
            chosen = own if worker_ids is None else _chosen(worker_ids, list(own))
            weights = dict.fromkeys(chosen, weights)
        # Workers may share their weights, which are then written once.
        pairs: dict[int, tuple[int, Any, Any]] = {}
        for worker, given in weights.items():
            if worker not in own:
                raise unknown_worker(worker, own)
            place = _as_tensordict(own[worker])
            _, _, before = pairs.setdefault(id(own[worker]), (worker, place, given))
            if before is not given:
                raise SettingError(
                    f"worker {worker} shares its weights with another: register weights of its own"
                )
            compare(place, given, f"worker {worker}")
        for worker, place, given in pairs.values():
            source = _as_tensordict(given)
            place.data.update_(source.data)
            _log_weight_sync(model_id=None, worker_idx=worker, source=source, destination=place)


class _Applied(Target):
    """Applies weights by a strategy, and keeps them for the caller."""

    def __init__(self, model: Any, strategy: Any, sent: Layout | None) -> None:
        self._model, self._strategy = model, strategy
        self.sent = sent
        self.received: Any = None

    def layout(self) -> Layout:
        assert self.sent is not None
        return self.sent

    def shape(self, layout: Layout) -> bool:
        self.sent = layout
        return False

    def load(self, snapshot: NativeSnapshot) -> None:
        strategy = self._strategy
        form = getattr(strategy, "extract_as", "tensordict")
        self.received = formatted(weights_of(snapshot), form)
        if self._model is None:
            return
        if strategy is not None and applies(strategy):
            strategy.apply_weights(self._model, self.received)
        else:
            snapshot.load_into(target_of(self._model, "copy"))
