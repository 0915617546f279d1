"""Transports by TorchRL's protocol to workers on other hosts, each to one worker.

The store or the call brings the worker an init info, and no weights.
"""

from __future__ import annotations

import queue
import threading
from datetime import timedelta
from typing import Any

from weightsync.errors import PeerError, SettingError
from weightsync.scheme import Distributed
from weightsync.torchrl import _torch_rpc
from weightsync.torchrl._remote_updaters import words
from weightsync.torchrl._transports import _QueueTransport

# The timeout of calls that have none, in seconds.
_TIMEOUT = 60.0


class _OneWorkerTransport(_QueueTransport):
    """A transport to one worker, named by its rank."""

    _scheme = Distributed()

    def _rank(self) -> int:
        return next(iter(self._queues))

    def setup_connection_and_weights_on_receiver(
        self, *, worker_idx: int | None = None, **kwargs: Any
    ) -> Any:
        """Joins, and takes the initial weights."""
        return super().setup_connection_and_weights_on_receiver(worker_idx=self._rank(), **kwargs)


class DistributedTransport(_OneWorkerTransport):
    """A transport to one worker, with TorchRL's constructor.

    Args:
        weights_buffer: accepted for TorchRL's sake.
        store: a store of :mod:`torch.distributed`, which brings the worker the init info.
        rank: the worker's rank.
        sync: accepted for TorchRL's sake; :meth:`send_weights_async` does not wait.

    Raises:
        SettingError: without a store or a rank.
    """

    def __init__(
        self,
        *,
        weights_buffer: Any = None,
        store: Any = None,
        rank: int | None = None,
        sync: bool = True,
    ) -> None:
        if store is None or rank is None:
            raise SettingError("DistributedTransport: expected a store and a rank")
        super().__init__({rank: _Entry(store, f"weightsync/{rank}")}, _TIMEOUT)


class RPCTransport(_OneWorkerTransport):
    """A transport to one worker that torch's RPC reaches, with TorchRL's constructor.

    A send calls ``_receive_weights_scheme`` of the collector, as TorchRL's does. Without
    a collector the worker calls :meth:`receive_weights`.

    Args:
        collector_info: the worker's name or ``WorkerInfo``; on the sender.
        collector_rref: a reference to its collector; on the sender.
        collector_class: accepted for TorchRL's sake.
        worker_rank: the worker's rank.

    Raises:
        SettingError: without a rank.
    """

    # Not pickled: the sender's.
    _collector: Any = None
    _call: Any = None

    def __init__(
        self,
        collector_info: Any = None,
        collector_rref: Any = None,
        collector_class: Any = None,
        worker_rank: int | None = None,
    ) -> None:
        if worker_rank is None:
            raise SettingError("RPCTransport: expected a worker_rank")
        super().__init__({worker_rank: _Box(collector_info, worker_rank)}, _TIMEOUT)
        self._collector = collector_rref

    def send_weights(self, weights: Any, worker_ids: Any = None) -> Any:
        """Sends weights, and waits until the worker has applied them."""
        self.send_weights_async(weights)
        return self.wait_ack()

    def send_weights_async(self, weights: Any, model_id: str = "policy") -> None:
        """Sends weights, and returns once they were read; :meth:`wait_ack` waits for the rest."""
        super().send_weights_async(weights, model_id)
        if self._collector is not None:
            call = self._collector.rpc_async(timeout=self.timeout)
            self._call = call._receive_weights_scheme()

    def wait_ack(self, timeout: float | None = None) -> Any:
        """Waits until the last send is applied, and returns its report; None for the first."""
        report = super().wait_ack(timeout)
        call, self._call = self._call, None
        if call is not None and (report is None or report.all_applied):
            try:
                call.wait()
            except Exception as error:
                raise _failed(self._rank(), error) from error
        return report


class _Entry:
    """An entry of a store, by the methods of a queue."""

    def __init__(self, store: Any, key: str) -> None:
        self._store, self._key = store, key

    def put(self, text: str) -> None:
        self._store.set(self._key, text)

    def get(self, block: bool = True, timeout: float | None = None) -> str:
        if block:
            limit = _TIMEOUT if timeout is None else timeout
            try:
                self._store.wait([self._key], timedelta(seconds=limit))
            except RuntimeError as error:
                raise queue.Empty from error
        elif not self._store.check([self._key]):
            raise queue.Empty
        text = self._store.get(self._key).decode()
        self._store.delete_key(self._key)
        return str(text)


class _Box:
    """A box in the worker's process, by the methods of a queue. Calls of torch's RPC fill it."""

    def __init__(self, callee: Any, rank: int) -> None:
        self._callee, self._rank = callee, rank

    def put(self, text: str) -> None:
        from torch.distributed import rpc

        _torch_rpc.require()
        try:
            rpc.rpc_sync(self._callee, _fill, args=(self._rank, text), timeout=_TIMEOUT)
        except RuntimeError as error:
            raise _failed(self._rank, error) from error

    def get(self, block: bool = True, timeout: float | None = None) -> str:
        return _box(self._rank).get(block, timeout)


def _failed(rank: int, error: Exception) -> PeerError:
    return PeerError(f"the call of worker {rank} failed: {words(error)}", "retry")


# The boxes of this process, by rank.
_boxes: dict[int, queue.Queue[str]] = {}
_lock = threading.Lock()


def _box(rank: int) -> queue.Queue[str]:
    with _lock:
        return _boxes.setdefault(rank, queue.Queue())


def _fill(rank: int, text: str) -> None:
    _box(rank).put(text)
