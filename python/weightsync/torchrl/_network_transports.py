"""Transports by TorchRL's protocol to workers on other hosts, each to one worker.

The store or the call brings the worker an init info, and no weights.
"""

from __future__ import annotations

import abc
import contextlib
import hashlib
import os
import queue
import threading
import weakref
from datetime import timedelta
from typing import Any

from weightsync.errors import PeerError, SettingError
from weightsync.scheme import Distributed
from weightsync.torchrl import _torch_rpc
from weightsync.torchrl._remote_updaters import words
from weightsync.torchrl._transports import _QueueTransport

# The timeout of calls that have none, in seconds.
TIMEOUT = 60.0


class OneWorkerTransport(_QueueTransport):
    """A transport to one worker, named by its rank."""

    _scheme = Distributed()
    # Says that the sender has ended; a sender that is dropped says so too.
    _release: Any = None

    def _rank(self) -> int:
        return next(iter(self._queues))

    def setup_connection_and_weights_on_receiver(
        self, *, worker_idx: int | None = None, **kwargs: Any
    ) -> Any:
        """Joins, and takes the initial weights."""
        return super().setup_connection_and_weights_on_receiver(worker_idx=self._rank(), **kwargs)

    def shutdown(self) -> None:
        """Shuts down the ends that this process has. Any number of times."""
        super().shutdown()
        if self._release is not None and self._pid == os.getpid():
            self._release()

    def _tell(self, info: str) -> None:
        self._release = weakref.finalize(self._sender, _end, info)
        try:
            super()._tell(info)
        except SettingError:
            # This sender never had the place.
            self._release.detach()
            raise


class DistributedTransport(OneWorkerTransport):
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
        super().__init__({rank: _Entry(store, rank)}, TIMEOUT)

    def send_initial_weights(self, weights: Any) -> None:
        """Publishes the worker's initial weights."""
        self.send_weights(weights)

    def receive_initial_weights(self) -> Any:
        """Joins, and returns the initial weights."""
        return self.setup_connection_and_weights_on_receiver()


class CalledTransport(OneWorkerTransport):
    """A transport to one worker, which a send calls to receive."""

    # The call of the last send.
    _call: Any = None

    @abc.abstractmethod
    def _begin_call(self) -> Any:
        """Has the worker receive, and returns the call; None if nothing is to be called."""

    @abc.abstractmethod
    def _end_call(self, call: Any) -> None:
        """Waits for a call, and raises its error."""

    def send_weights(self, weights: Any, worker_ids: Any = None) -> Any:
        """Sends weights, and waits until the worker has applied them."""
        self.send_weights_async(weights)
        return self.wait_ack()

    def send_weights_async(self, weights: Any, model_id: str = "policy") -> None:
        """Sends weights, and returns once they were read; :meth:`wait_ack` waits for the rest."""
        super().send_weights_async(weights, model_id)
        self._call = self._begin_call()

    def wait_ack(self, timeout: float | None = None) -> Any:
        """Waits until the last send is applied, and returns its report; None for the first."""
        report = super().wait_ack(timeout)
        call, self._call = self._call, None
        if call is not None and (report is None or report.all_applied):
            try:
                self._end_call(call)
            except Exception as error:
                raise _failed(self._rank(), error) from error
        return report


class RPCTransport(CalledTransport):
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

    def __init__(
        self,
        collector_info: Any = None,
        collector_rref: Any = None,
        collector_class: Any = None,
        worker_rank: int | None = None,
    ) -> None:
        if worker_rank is None:
            raise SettingError("RPCTransport: expected a worker_rank")
        super().__init__({worker_rank: _Box(collector_info, worker_rank)}, TIMEOUT)
        self._collector = collector_rref

    def _begin_call(self) -> Any:
        if self._collector is None:
            return None
        return self._collector.rpc_async(timeout=self.timeout)._receive_weights_scheme()

    def _end_call(self, call: Any) -> None:
        call.wait()


# Digests of the init infos of this process's senders that have ended.
_ended: set[bytes] = set()


def _end(info: str) -> None:
    """Notes that the sender of this init info has ended."""
    _ended.add(_digest(info))


def _digest(info: str) -> bytes:
    return hashlib.blake2b(info.encode(), digest_size=16).digest()


class _Place(abc.ABC):
    """Where a worker finds the init info of one sender, by the methods of a queue.

    A place belongs to the sender that puts its init info there first. Another sender may have it
    once that one has shut down, in the same process. With several senders at one place, a worker would follow
    one that sends another model.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank

    @abc.abstractmethod
    def _claim(self, owner: str, text: str) -> str:
        """Puts the text if this owner has the place, "" being none; returns the owner."""

    @abc.abstractmethod
    def get(self, block: bool = True, timeout: float | None = None) -> str:
        """Takes the init info."""

    def put(self, text: str) -> None:
        owner = self._claim("", text)
        ended = _digest(owner)
        if ended in _ended:
            owner = self._claim(owner, text)
            _ended.discard(ended)
        if owner != text:
            raise SettingError(
                f"rank {self._rank} has another transport, which this process has not shut down: "
                "shut it down first, or give the transports of each model a rank of their own, at "
                "both ends. If the process of that one has ended, take another rank or another store"
            )


class _Entry(_Place):
    """An entry of a store."""

    def __init__(self, store: Any, rank: int) -> None:
        super().__init__(rank)
        self._store, self._key = store, f"weightsync/{rank}"

    def _claim(self, owner: str, text: str) -> str:
        held = self._store.compare_set(f"{self._key}/owner", owner, text).decode()
        if held == text:
            self._store.set(self._key, text)
        return str(held)

    def get(self, block: bool = True, timeout: float | None = None) -> str:
        if block:
            limit = TIMEOUT if timeout is None else timeout
            try:
                self._store.wait([self._key], timedelta(seconds=limit))
            except RuntimeError as error:
                raise queue.Empty from error
        elif not self._store.check([self._key]):
            raise queue.Empty
        text = self._store.get(self._key).decode()
        self._store.delete_key(self._key)
        return str(text)


class _Box(_Place):
    """A box in the worker's process. Calls of torch's RPC fill it."""

    def __init__(self, callee: Any, rank: int) -> None:
        super().__init__(rank)
        self._callee = callee

    def _claim(self, owner: str, text: str) -> str:
        from torch.distributed import rpc

        _torch_rpc.require()
        args = self._rank, owner, text
        try:
            return str(rpc.rpc_sync(self._callee, _fill, args=args, timeout=TIMEOUT))
        except RuntimeError as error:
            raise _failed(self._rank, error) from error

    def get(self, block: bool = True, timeout: float | None = None) -> str:
        return _box(self._rank).get(block, timeout)


def _failed(rank: int, error: Exception) -> PeerError:
    return PeerError(f"the call of worker {rank} failed: {words(error)}", "retry")


# The boxes of this process and the senders that have them, by rank.
_boxes: dict[int, queue.Queue[str]] = {}
_owners: dict[int, str] = {}
_lock = threading.Lock()


def _box(rank: int) -> queue.Queue[str]:
    with _lock:
        return _boxes.setdefault(rank, queue.Queue())


def _fill(rank: int, owner: str, text: str) -> str:
    box = _box(rank)
    with _lock:
        held = _owners.get(rank, "")
        if held != owner:
            return held
        _owners[rank] = text
        # The sender that had the box has ended, perhaps before its worker looked.
        with contextlib.suppress(queue.Empty):
            box.get_nowait()
        box.put(text)
        return text
