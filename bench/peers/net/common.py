"""What the ways to send have in common: the weights, the worker processes, what is asked and
answered, and how all ends. Those of TorchRL on one machine use it too.

Only the standard library is imported before a process has asked to die with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import Pipe, connection, get_context
from typing import Any, Protocol

context = get_context("spawn")


class Method(Protocol):
    """A way to send. Made with the payload, the number of workers and the deadline in seconds, it
    has started its workers."""

    def connect(self) -> None:
        """The rendez-vous with the workers."""

    def expect(self, count: int) -> None:
        """Returns when the workers wait for the first of so many sends."""

    def send(self) -> None:
        """Returns when every worker has said that it has the bytes."""

    def check(self, value: float) -> None:
        """Fails unless every worker has this value wherever it looks."""

    def close(self) -> None:
        """Ends the workers."""


class Payload:
    """The weights: bfloat16 tensors of equal size, with every page touched."""

    ITEM = 2

    def __init__(self, size: int, count: int) -> None:
        self.shape = (count, size // self.ITEM // count)
        self.tensors = tensors(self.shape)
        self._scratch = tensors(self.shape)

    def write(self, value: float) -> None:
        """Writes all of them again."""
        for tensor in self.tensors:
            tensor.fill_(value)

    def memcpy(self) -> float:
        """Seconds that one thread takes to copy all of them."""
        return memcpy(self._scratch, self.tensors)


def tensors(shape: tuple[int, int], value: float = 0.0) -> list[Any]:
    """So many tensors of so many elements each, with every page touched."""
    import torch

    count, elements = shape
    return [torch.full((elements,), value, dtype=torch.bfloat16) for _ in range(count)]


def memcpy(to: Iterable[Any], of: Iterable[Any]) -> float:
    """Seconds that one thread takes to copy all of these tensors."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    began = time.perf_counter()
    for target, source in zip(to, of, strict=True):
        target.copy_(source)
    took = time.perf_counter() - began
    torch.set_num_threads(threads)
    return took


def difference(got: list[Any], expected: float) -> str | None:
    """The first place looked at whose value is not the expected one, in words."""
    for index, tensor in enumerate(got):
        for at in (0, tensor.numel() // 2, tensor.numel() - 1):
            if (value := tensor[at].item()) != expected:
                return f"tensor {index}[{at}] is {value}, expected {expected}"
    return None


def value_of(send: int) -> float:
    """What the weights are in a send: whole numbers up to 256 are exact in bfloat16, and
    neighbours differ."""
    return float(1 + send % 250)


class Receiver:
    """A worker's end, in its process. The name of the module of another, and of a class in it
    derived from this, is what a `Crew` is made from."""

    def __init__(self, index: int, shape: tuple[int, int], handed: Any, pipe: Any) -> None:
        self.index = index
        self.handed = handed
        self.pipe = pipe
        #: Where the bytes end up.
        self.tensors = tensors(shape)

    def connect(self) -> Any:
        """Its half of the rendez-vous. What it returns is for the sender."""

    def receive(self) -> None:
        """Returns when it has the bytes of a send in memory of its own."""
        raise NotImplementedError


class Crew:
    """Worker processes, and the half of a way to send that they have in common."""

    #: The class of a worker's end, in the module of the way.
    receiver = "Receiver"

    def __init__(self, payload: Payload, workers: int, deadline: float) -> None:
        self.payload = payload
        self.deadline = deadline
        end = (type(self).__module__, self.receiver)
        self.workers = [
            Worker(index, work, (*end, index, payload.shape, self.hand(index)))
            for index in range(workers)
        ]
        Guard.now.watch_over(worker.process for worker in self.workers)
        self.expect_from_all("ready")

    def hand(self, index: int) -> Any:
        """What a worker's end is given at its start."""

    def meet(self) -> None:
        """The sender's half of the rendez-vous, while the workers are at theirs."""

    def greet(self, answers: list[Any]) -> None:
        """What is left of it, with what the workers' halves have returned."""

    def publish(self) -> None:
        """A send. It need not wait for anybody."""
        raise NotImplementedError

    def connect(self) -> None:
        self.send_to_all("connect")
        self.meet()
        self.greet([worker.receive() for worker in self.workers])

    def expect(self, count: int) -> None:
        self.send_to_all(("expect", count))
        self.expect_from_all("waiting")

    def send(self) -> None:
        self.publish()
        self.expect_from_all("have")

    def check(self, value: float) -> None:
        self.send_to_all(("check", value))
        self.expect_from_all(None)

    def close(self) -> None:
        Guard.now.watch_over([])
        for worker in self.workers:
            worker.leave(self.deadline)

    def send_to_all(self, message: Any) -> None:
        for worker in self.workers:
            worker.pipe.send(message)

    def expect_from_all(self, expected: Any) -> None:
        for worker in self.workers:
            worker.expect(expected)


class Worker:
    """A worker process, as the sender sees it: it runs `target` with its end of a pipe as the last
    argument."""

    def __init__(
        self,
        index: int,
        target: Callable[..., None],
        args: tuple[Any, ...],
        context: Any = context,
    ) -> None:
        self.index = index
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(*args, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def receive(self) -> Any:
        """What it says next; the guard sees to it that there is an end to that."""
        return self.pipe.recv()

    def expect(self, expected: Any) -> None:
        """Fails unless that is what it says next."""
        if (got := self.receive()) != expected:
            raise RuntimeError(f"worker {self.index}: expected {expected!r}, got {got!r}")

    def leave(self, deadline: float) -> None:
        """Ends the process, by force if it does not end itself."""
        with contextlib.suppress(OSError):
            self.pipe.send("leave")
        self.process.join(deadline)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
            raise RuntimeError(f"worker {self.index} did not end")


def work(
    module: str, name: str, index: int, shape: tuple[int, int], handed: Any, pipe: Any
) -> None:
    """What a worker process does."""
    die_with_parent()
    # Standard output belongs to the sender's answers.
    os.dup2(2, 1)
    end = getattr(importlib.import_module(module), name)(index, shape, handed, pipe)
    pipe.send("ready")
    with contextlib.suppress(EOFError):
        while (message := pipe.recv()) != "leave":
            match message:
                case "connect":
                    pipe.send(end.connect())
                case ("expect", count):
                    pipe.send("waiting")
                    for _ in range(count):
                        end.receive()
                        pipe.send("have")
                case ("check", value):
                    pipe.send(difference(end.tensors, value))
    # Threads of other packages do not all end on their own.
    os._exit(0)


def die_with_parent() -> None:
    """Asks the kernel to. It is the parent's thread that counts: the first one of each of these."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Answers:
    """Standard output, which packages may not write to from here on: theirs goes to stderr."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def say(self, answer: dict[str, Any]) -> None:
        """A line."""
        print(json.dumps(answer), file=self._out, flush=True)


class Guard:
    """Ends all processes when a worker dies or an armed deadline passes: the packages may wait
    on. There is one in the sender."""

    now: Guard

    def __init__(self, deadline: float) -> None:
        Guard.now = self
        self.deadline = deadline
        self.processes: list[Any] = []
        self.orders, self.inbox = Pipe()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Guard:
        self.thread.start()
        self.arm()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is not None and not isinstance(error, SystemExit):
            # What has failed leaves workers behind that may never end on their own.
            sys.excepthook(kind, error, trace)
            self._end("the sender failed")
        self.orders.close()
        self.thread.join()

    def watch_over(self, processes: Iterable[Any]) -> None:
        """From now on their death is the end of it all, and that of no others."""
        self.processes = list(processes)
        self.arm()

    def arm(self) -> None:
        """The deadline counts from now."""
        self.orders.send(True)

    def rest(self) -> None:
        """It does not."""
        self.orders.send(False)

    def _watch(self) -> None:
        until = None
        while True:
            ends = {process.sentinel: index for index, process in enumerate(self.processes)}
            left = None if until is None else max(0.0, until - time.monotonic())
            ready = connection.wait([self.inbox, *ends], timeout=left)
            if self.inbox in ready:
                try:
                    armed = self.inbox.recv()
                except EOFError:
                    return
                until = time.monotonic() + self.deadline if armed else None
            elif ready:
                # Those that are to end are watched over no more.
                if self.processes:
                    self._end(f"worker {ends[ready[0]]} died")
            else:
                self._end(f"nothing came back within {self.deadline:g} s")

    def _end(self, why: str) -> None:
        print(f"{why}; killing the workers", file=sys.stderr, flush=True)
        for process in self.processes:
            process.kill()
        os._exit(3)


def requests(guard: Guard) -> Iterator[int]:
    """How many sends each request asks for."""
    while True:
        guard.rest()
        request = sys.stdin.readline().split()
        guard.arm()
        if not request or request == ["quit"]:
            return
        if request[0] != "round" or len(request) > 2:
            raise ValueError(f"{request}: expected `round`, `round N` or `quit`")
        yield int(request[1]) if len(request) == 2 else 1
