"""Groups of one sender and its receivers, over a store of torch.distributed."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weightsync.errors import (
    DeadlineError,
    LifecycleError,
    PeerError,
    SettingError,
    UnsupportedError,
    WeightsyncError,
)
from weightsync.transfer.init_info import TorchDistributedWeightSyncInitInfo

# Acknowledgements travel from receivers to rank 0 under this tag.
_TAG = 7
# Nothing is ever sent under this one.
_NEVER = 8
# How long other links are listened to after one has failed, to tell the cause from what follows.
GRACE = 1.0
#: How often a store is asked.
LOOK = 0.01


def open_store(address: str, timeout: float) -> dist.TCPStore:
    """A store on a free port of this address. The port is bound before anybody is told of it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listening = socket.create_server((address, 0), family=family)
    except OSError as error:
        raise SettingError(
            f"master_addr: expected an address of this host, got {address!r} ({error})"
        ) from error
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


class Links:
    """A fixed set of processes that weights are broadcast in: rank 0 sends, the others receive.

    gloo's links carry messages, and with the backend gloo the weights too. They are apart from
    any other group of these processes. A member that dies, or closes its links, is noticed by
    all that wait for it.
    """

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        self._timeout, self._rank, self.size = timeout, rank, size
        self._control: Any = None
        self._data: Any = None
        self._names = [f"rank {other}" for other in range(size)]

    def _form(self, store: Any, backend: str, device: Any) -> None:
        """Returns when all members are there."""
        # Before any link: the end of one would be all that the other members hear.
        if backend != "gloo" and not (backend == "nccl" and hasattr(dist, "ProcessGroupNCCL")):
            raise UnsupportedError(f"backend: expected gloo or nccl of this torch, got {backend!r}")
        # It bounds collectives, too: longer than the deadline that rank 0 keeps itself.
        limit = self._limit(2)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = limit
        options._devices = [device]
        control = dist.PrefixStore("control", store)
        self._control = dist.ProcessGroupGloo(control, self._rank, self.size, options)
        if backend == "gloo":
            self._data = self._control
        else:
            data = dist.PrefixStore("data", store)
            self._data = dist.ProcessGroupNCCL(data, self._rank, self.size, limit)

    def _start_broadcast(self, tensor: torch.Tensor) -> Any:
        """Begins a broadcast from rank 0, and returns its work."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        return self._data.broadcast([tensor], options)

    def _close_links(self) -> None:
        """Closes all links, so that every member that waits in the group fails at once."""
        control, self._control = self._control, None
        data, self._data = self._data, None
        if data is not None and data is not control:
            data.abort()
        if control is not None:
            close_links(control, self._rank, self.size)

    def _limit(self, times: float = 1) -> timedelta:
        return timedelta(seconds=self._timeout * times)

    def _failure(
        self, failed: dict[int, str], waiting: set[int], what: str, then: str
    ) -> WeightsyncError:
        """The error of a broadcast: by rank, why it failed, and the ranks that have not answered.

        Rank 0 stands for the broadcast itself.
        """

        def named(ranks: list[int]) -> str:
            return ", ".join(self._names[rank] for rank in ranks)

        lost = [at for at, reason in failed.items() if at and reason != REFUSED]
        refused = [at for at, reason in failed.items() if at and reason == REFUSED]
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


class UpdateGroup(Links):
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
        super().__init__(rank, info.world_size, timeout)
        self._store: Any = dist.PrefixStore(info.group_name, store)
        try:
            if self._store.check(["formed"]):
                raise UnsupportedError(
                    f"the group {info.group_name!r} has its {self.size} members, and they are fixed: "
                    "initialize the weight sync again, with all workers"
                )
            self._store.set(f"name/{rank}", own_name(rank))
            if rank == 0:
                self._wait_for_all(timeout)
                self._store.set("formed", "")
            self._form(self._store, info.backend, _device(info))
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
        acks = [torch.full((2,), -1, dtype=torch.int64, device="cpu") for _ in range(self.size)]

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
                    deadline = min(deadline, time.monotonic() + GRACE) if not failed else deadline
                    failed[at] = reason
                continue
            break
        if not waiting and not failed:
            return
        self.close()
        then = "no receiver loads this sync; create sender and receivers from a new init info"
        raise self._failure(failed, waiting, what, then)

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
        self._store = None
        self._close_links()

    def _broadcast(self, tensors: list[torch.Tensor], times: float) -> None:
        for tensor in tensors:
            if tensor.numel():
                self._open()._start_broadcast(tensor).wait(self._limit(times))

    def _acknowledge(self, number: int, status: int) -> None:
        message = torch.tensor([number, status], device="cpu")
        self._open()._control.send([message], 0, _TAG).wait(self._limit())

    def _open(self) -> UpdateGroup:
        if self._control is None:
            raise LifecycleError("the group is closed: create both ends from a new init info")
        return self

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


class _Refused(Exception):
    def __str__(self) -> str:
        return REFUSED


#: The reason of a receiver that said so, and did not die.
REFUSED = "it said that it failed"


def _run(
    at: int, call: Callable[[], None], results: queue.SimpleQueue[tuple[int, str | None]]
) -> None:
    try:
        call()
    except BaseException as error:
        results.put((at, str(error) or type(error).__name__))
    else:
        results.put((at, None))


def close_links(group: Any, rank: int, size: int) -> None:
    """Closes this rank's links of gloo, so that every member that waits for it fails at once. It is not
    possible to use the group again.
    """
    # gloo closes its links when a wait times out, and at no other call of ours.
    nothing = torch.zeros(1, dtype=torch.int64, device="cpu")
    for other in range(size):
        # The wait for a member that is dead fails at once, and closes nothing.
        with contextlib.suppress(RuntimeError):
            if other != rank:
                group.recv([nothing], other, _NEVER).wait(timedelta(milliseconds=1))


@contextlib.contextmanager
def store_calls() -> Iterator[None]:
    """Raises a :class:`PeerError` if the store fails."""
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        if isinstance(error, WeightsyncError):
            raise
        raise PeerError(f"the process group's store failed: {error}", "reconnect") from error


def own_name(rank: int) -> str:
    """How errors of the other members call this process."""
    return f"rank {rank} ({socket.gethostname()}, pid {os.getpid()})"


def _device(info: TorchDistributedWeightSyncInitInfo) -> Any:
    if interface := os.environ.get("GLOO_SOCKET_IFNAME", ""):
        if not _is_loopback(info.master_addr):
            return dist.ProcessGroupGloo.create_device(interface=interface)
    return dist.ProcessGroupGloo.create_device(hostname=_own_address(info.master_addr))


def _own_address(peer: str) -> str:
    """This machine's address on the way to another: what is on loopback stays there."""
    family, kind, _, _, address = socket.getaddrinfo(peer, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as unsent:
        # Nothing is sent: the system chooses the way.
        unsent.connect(address)
        return str(unsent.getsockname()[0])


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
