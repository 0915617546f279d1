"""A process group of rank 0 of the trainer and all inference workers."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weightsync.errors import (
    DeadlineError,
    LifecycleError,
    PeerError,
    UnsupportedError,
    WeightsyncError,
)
from weightsync.transfer.init_info import TorchDistributedWeightSyncInitInfo

# Acknowledgements travel from receivers to rank 0 under this tag.
_TAG = 7
# Nothing is ever sent under this one.
_NEVER = 8
# How long other links are listened to after one has failed, to tell the cause from what follows.
_GRACE = 1.0


def open_store(address: str, timeout: float) -> dist.TCPStore:
    """A store on a free port of this address. The port is bound before anybody is told of it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, 0), family=family)
    port = listening.getsockname()[1]
    return dist.TCPStore(
        address, port, None, True, timedelta(seconds=timeout), wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )  # fmt: skip


def join_store(info: TorchDistributedWeightSyncInitInfo, timeout: float) -> dist.TCPStore:
    """The store of rank 0."""
    joined: Future[dist.TCPStore] = Future()

    def join() -> None:
        try:
            limit = timedelta(seconds=timeout)
            store = dist.TCPStore(info.master_addr, info.master_port, None, False, limit)
            # A store that is just being closed takes the connection, and fails at the first question.
            store.num_keys()
            joined.set_result(store)
        except BaseException as error:
            joined.set_exception(error)

    # torch waits for ever for a trainer that stands still: its kernel takes the connection.
    threading.Thread(target=join, daemon=True).start()
    try:
        return joined.result(timeout)
    except (RuntimeError, dist.DistError, TimeoutError) as error:
        raise PeerError(
            f"the trainer's store at {info.master_addr}:{info.master_port} cannot be reached: "
            f"{str(error) or f'no answer within {timeout} s'}",
            "retry",
        ) from error


class UpdateGroup:
    """The group that weights are broadcast in, apart from any default group.

    The constructor waits until all members are there. After any failure in it the group is
    closed: a new one takes a new init info.
    """

    def __init__(
        self,
        store: dist.TCPStore,
        info: TorchDistributedWeightSyncInitInfo,
        rank: int,
        timeout: float,
    ) -> None:
        self._timeout, self._rank, self.size = timeout, rank, info.world_size
        self._control: Any = None
        self._data: Any = None
        self._store: Any = dist.PrefixStore(info.group_name, store)
        self._names = [f"rank {other}" for other in range(self.size)]
        # It bounds collectives, too: longer than the deadline that rank 0 keeps itself.
        limit = self._limit(2)
        try:
            if self._store.check(["formed"]):
                raise UnsupportedError(
                    f"the group {info.group_name!r} has its {self.size} members, and they are fixed: "
                    "initialize the weight sync again, with all workers"
                )
            name = f"rank {rank} ({socket.gethostname()}, pid {os.getpid()})"
            self._store.set(f"name/{rank}", name)
            if rank == 0:
                self._wait_for_all(timeout)
                self._store.set("formed", "")
            self._control = self._gloo(info, rank, limit)
            self._data = self._made(info.backend, rank, limit)
        except BaseException as error:
            # The others may have formed theirs, and would wait for this member.
            self.close()
            if isinstance(error, (RuntimeError, dist.DistError)) and not isinstance(
                error, WeightsyncError
            ):
                raise PeerError(
                    f"the group {info.group_name!r} was not formed: {error}"
                ) from error
            raise

    def send(self, tensors: list[torch.Tensor], what: str, number: int) -> None:
        """Broadcasts from rank 0, and returns when all receivers have acknowledged it.

        Raises:
            PeerError: naming the receivers that died, or that failed.
        """
        control, deadline = self._open()._control, time.monotonic() + self._timeout
        results: queue.SimpleQueue[tuple[int, str | None]] = queue.SimpleQueue()
        acks = [torch.full((2,), -1, dtype=torch.int64) for _ in range(self.size)]

        def receive(rank: int) -> None:
            # Not before the deadline, so that what is late is not taken for dead.
            control.recv([acks[rank]], rank, _TAG).wait(self._limit(2))
            if acks[rank].tolist() != [number, 0]:
                raise _Refused

        calls: list[Callable[[], None]] = [lambda: self._broadcast(tensors, 2)]
        calls += [lambda rank=rank: receive(rank) for rank in range(1, self.size)]  # type: ignore[misc]
        threads = [
            threading.Thread(target=_run, args=(at, call, results), daemon=True)
            for at, call in enumerate(calls)
        ]
        for thread in threads:
            thread.start()
        failed: dict[int, str] = {}
        waiting = set(range(self.size))
        while waiting:
            with contextlib.suppress(queue.Empty):
                at, reason = results.get(timeout=max(0.0, deadline - time.monotonic()))
                waiting.discard(at)
                if reason is not None:
                    deadline = min(deadline, time.monotonic() + _GRACE) if not failed else deadline
                    failed[at] = reason
                continue
            break
        if not waiting and not failed:
            return
        self.close()
        raise self._failure(failed, waiting, what)

    def receive(self, tensors: list[torch.Tensor], number: int) -> None:
        """Receives from rank 0, and acknowledges it."""
        self._open()
        try:
            self._broadcast(tensors, 1.5)
            self._acknowledge(number, 0)
        except BaseException as error:
            # The others wait for this one, or for what comes through it.
            with contextlib.suppress(Exception):
                self._acknowledge(number, 1)
            self.close()
            if isinstance(error, (RuntimeError, dist.DistError)):
                raise PeerError(
                    f"the broadcast failed: {error}; the model keeps its weights. Create the "
                    "receiver from a new init info",
                    "reconnect",
                ) from error
            raise

    def close(self) -> None:
        """Closes all links, so that every member that waits in the group fails at once."""
        control, self._control = self._control, None
        data, self._data, self._store = self._data, None, None
        if data is not None and data is not control:
            data.abort()
        if control is not None:
            # gloo closes its links when a wait times out, and at no other call of ours.
            with contextlib.suppress(RuntimeError):
                other = 1 if self._rank == 0 else 0
                nothing = torch.zeros(1, dtype=torch.int64)
                control.recv([nothing], other, _NEVER).wait(timedelta(milliseconds=1))

    def _broadcast(self, tensors: list[torch.Tensor], times: float) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        for tensor in tensors:
            if tensor.numel():
                self._open()._data.broadcast([tensor], options).wait(self._limit(times))

    def _acknowledge(self, number: int, status: int) -> None:
        message = torch.tensor([number, status])
        self._open()._control.send([message], 0, _TAG).wait(self._limit())

    def _failure(self, failed: dict[int, str], waiting: set[int], what: str) -> Exception:
        def named(ranks: list[int]) -> str:
            return ", ".join(self._names[rank] for rank in ranks)

        lost = [at for at, reason in failed.items() if at and reason != _REFUSED]
        refused = [at for at, reason in failed.items() if at and reason == _REFUSED]
        then = "no receiver loads this sync; create sender and receivers from a new init info"
        if lost:
            return PeerError(f"receiver {named(lost)} died during {what}: {then}", "reconnect")
        if refused:
            return PeerError(f"receiver {named(refused)} failed during {what}: {then}", "reconnect")
        if failed:
            return PeerError(f"the broadcast of {what} failed: {failed[0]}; {then}", "reconnect")
        late = named(sorted(waiting - {0})) or "nobody"
        return DeadlineError(
            f"after {self._timeout} s {what} was not acknowledged by {late}: {then}", "reconnect"
        )

    def _open(self) -> UpdateGroup:
        if self._control is None:
            raise LifecycleError("the group is closed: create both ends from a new init info")
        return self

    def _limit(self, times: float = 1) -> timedelta:
        return timedelta(seconds=self._timeout * times)

    def _wait_for_all(self, timeout: float) -> None:
        keys = [f"name/{rank}" for rank in range(self.size)]
        try:
            self._store.wait(keys, timedelta(seconds=timeout))
        except (RuntimeError, dist.DistError) as error:
            missing = [str(at) for at, key in enumerate(keys) if not self._store.check([key])]
            raise DeadlineError(
                f"receivers of rank {', '.join(missing)} of {self.size - 1} have not joined within "
                f"{timeout} s",
                "retry",
            ) from error
        self._names = [self._store.get(key).decode(errors="replace") for key in keys]

    def _gloo(
        self, info: TorchDistributedWeightSyncInitInfo, rank: int, limit: timedelta
    ) -> dist.ProcessGroupGloo:
        store = dist.PrefixStore("control", self._store)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = limit
        # What is on loopback stays there; else the interface is gloo's choice.
        address = info.master_addr if _is_loopback(info.master_addr) else ""
        interface = "" if address else os.environ.get("GLOO_SOCKET_IFNAME", "")
        device = dist.ProcessGroupGloo.create_device(
            **({"interface": interface} if interface else {"hostname": address})
        )
        options._devices = [device]
        return dist.ProcessGroupGloo(store, rank, self.size, options)

    def _made(self, backend: str, rank: int, limit: timedelta) -> Any:
        if backend == "gloo":
            return self._control
        if backend == "nccl" and hasattr(dist, "ProcessGroupNCCL"):
            store = dist.PrefixStore("data", self._store)
            return dist.ProcessGroupNCCL(store, rank, self.size, limit)
        raise UnsupportedError(f"backend: expected gloo or nccl of this torch, got {backend!r}")


class _Refused(Exception):
    def __str__(self) -> str:
        return _REFUSED


_REFUSED = "it said that it failed"


def _run(
    at: int, call: Callable[[], None], results: queue.SimpleQueue[tuple[int, str | None]]
) -> None:
    try:
        call()
    except BaseException as error:
        results.put((at, str(error) or type(error).__name__))
    else:
        results.put((at, None))


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
