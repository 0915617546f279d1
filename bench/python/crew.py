"""Worker processes: they take versions as they come, and say what they have when asked."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import torch
from payload import Model, Payload

#: Seconds that a worker may take for an answer.
DEADLINE = 120.0

# Workers begin as children of a process that has imported what takes seconds.
context = get_context("forkserver")
context.set_forkserver_preload(["torch", "torchrl.weight_update", "weightsync.torchrl"])

#: Makes a worker's end, from its number, its model and what the trainer handed over. The
#: end has ``connect`` and ``close``.
Join = Callable[[int, Model, Any], Any]


class Crew:
    """The workers of one way to send."""

    def __init__(self, join: Join, count: int, payload: Payload, handed: Any) -> None:
        began = time.perf_counter()
        self._workers = [_Worker(join, index, payload, handed) for index in range(count)]
        self._expect_from_all("ready")
        #: Seconds until the processes ran.
        self.starting = time.perf_counter() - began

    def connect(self, connect: Callable[[], None]) -> None:
        """The rendez-vous: the workers' half, and the trainer's."""
        self._send_to_all("connect")
        connect()
        self._expect_from_all("connected")

    def check(self, value: float) -> None:
        """Looks whether the values have arrived."""
        self._send_to_all(("check", value))
        self._expect_from_all(None)

    def read(self) -> None:
        """Has every worker read every byte of its model, and waits for them."""
        self._send_to_all("read")
        self._expect_from_all("read")

    def spent(self) -> list[float]:
        """Seconds of processor time that each worker has taken so far."""
        self._send_to_all("spent")
        return [worker.receive() for worker in self._workers]

    def leave(self) -> None:
        """Ends the processes, by force if they do not end themselves."""
        for worker in self._workers:
            worker.leave()

    def _send_to_all(self, message: Any) -> None:
        for worker in self._workers:
            worker.pipe.send(message)

    def _expect_from_all(self, expected: Any) -> None:
        for worker in self._workers:
            if (got := worker.receive()) != expected:
                raise RuntimeError(f"worker {worker.index}: expected {expected!r}, got {got!r}")


class _Worker:
    """A worker process, as the trainer sees it."""

    def __init__(self, join: Join, index: int, payload: Payload, handed: Any) -> None:
        self.index = index
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_work, args=(join, index, payload, handed, theirs), daemon=True
        )
        self.process.start()
        theirs.close()

    def receive(self) -> Any:
        if not self.pipe.poll(DEADLINE):
            raise TimeoutError(f"worker {self.index} says nothing for {DEADLINE:g} s")
        try:
            return self.pipe.recv()
        except EOFError:
            raise RuntimeError(f"worker {self.index} died") from None

    def leave(self) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send("leave")
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _work(join: Join, index: int, payload: Payload, handed: Any, pipe: Any) -> None:
    """What a worker process does: threads of its end receive, this one answers."""
    # Standard output belongs to the rows.
    os.dup2(2, 1)
    torch.set_num_threads(1)
    model = payload.model()
    end = join(index, model, handed)
    pipe.send("ready")
    try:
        while (message := pipe.recv()) != "leave":
            match message:
                case "connect":
                    end.connect()
                    pipe.send("connected")
                case ("check", value):
                    pipe.send(model.difference(value))
                case "read":
                    model.total()
                    pipe.send("read")
                case "spent":
                    pipe.send(time.process_time())
    except EOFError:
        # The trainer is gone without a word, and other packages' threads would wait for it.
        os._exit(1)
    end.close()
    # Nor do they always end on their own.
    os._exit(0)
