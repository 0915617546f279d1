"""Process groups of torch.distributed: gloo's own calls, and weightsync over a group."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from crew import Crew
from measure import Turns, measure
from payload import Model, Payload
from rows import Row
from ways import Plain

import weightsync.process_group

GIB = Payload(1 << 30, 64)
QUARTER = Payload(256 << 20, 64)


class Group:
    """A process group of the trainer and the workers; each worker's end follows in a thread."""

    def __init__(self, payload: Payload, workers: int, *, of: type[_Member]) -> None:
        self.weights = payload.weights(1.0)
        self.began = time.perf_counter()
        self._folder = tempfile.TemporaryDirectory()
        place = str(Path(self._folder.name, "store")), workers + 1
        self.crew = Crew(of, workers, payload, place)
        self._end = lambda: of(-1, self._weights.model, place)
        self._own: Any = None
        self._weights = self.weights
        self.weights = self

    def write(self, value: float) -> None:
        """As of the weights that are sent."""
        self._weights.write(value)
        if self._own is not None:
            self._own.flat.fill_(int(value))

    def connect(self) -> None:
        """Forms the group."""

        def join() -> None:
            self._own = self._end()
            self._own.connect()

        self.crew.connect(join)

    def send(self) -> None:
        """Returns when every worker has received."""
        self._own.send()

    def close(self) -> None:
        """Ends both ends."""
        self._own.close()
        self.crew.leave()
        self._folder.cleanup()


class _Member:
    """A member of a group, which has only gloo's calls. Rank 0 is the trainer."""

    def __init__(self, index: int, model: Model, place: Any) -> None:
        (path, size), self.rank = place, index + 1
        self._model = model
        self.flat = torch.ones(sum(one.nbytes for one in model.parameters()), dtype=torch.uint8)
        self._store = dist.FileStore(path, size)
        self._size = size

    def connect(self) -> None:
        self.group = dist.ProcessGroupGloo(self._store, self.rank, self._size)
        if self.rank:
            threading.Thread(target=self._follow, daemon=True).start()

    def send(self) -> None:
        """One tensor of all bytes, and an answer."""
        if self._size == 2:
            self.group.send([self.flat], 1, 0).wait()
        else:
            self.group.broadcast([self.flat], dist.BroadcastOptions()).wait()
        self.group.barrier().wait()

    def close(self) -> None:
        """The threads end with the process."""

    def _follow(self) -> None:
        # The trainer's end of the group ends it.
        with contextlib.suppress(RuntimeError):
            while True:
                self._take()

    def _take(self) -> None:
        if self._size == 2:
            self.group.recv([self.flat], 0, 0).wait()
        else:
            self.group.broadcast([self.flat], dist.BroadcastOptions()).wait()
        # What `check` looks at: it takes microseconds.
        value = float(self.flat[-1])
        for one in self._model.parameters():
            one.data.view(-1)[[0, one.numel() // 2, -1]] = value
        self.group.barrier().wait()


class _Scheme(_Member):
    """weightsync over the group."""

    def connect(self) -> None:
        dist.init_process_group("gloo", store=self._store, rank=self.rank, world_size=self._size)
        if self.rank:
            self.end = weightsync.process_group.Receiver(self._model)
            threading.Thread(target=self._follow, daemon=True).start()
        else:
            self.end = weightsync.process_group.Sender(self._model)

    def send(self) -> None:
        report = self.end.send()
        if not report.all_applied:
            raise RuntimeError(str(report))

    def close(self) -> None:
        self.end.shutdown()

    def _follow(self) -> None:
        try:
            while True:
                self.end.receive()
        except weightsync.SenderClosedError:
            pass


@dataclass
class Gloo:
    """Our own transport against gloo's calls."""

    workers: int
    target: float

    @property
    def name(self) -> str:
        what = "send and recv" if self.workers == 1 else "broadcast"
        return f"1 GiB, N = {self.workers}, against gloo's {what}"

    def rows(self) -> Iterator[Row]:
        ways: list[tuple[Any, dict[str, Any]]] = [
            (Plain, {"scheme": "distributed"}),
            (Group, {"of": _Member}),
        ]
        (ours, theirs), _ = measure(GIB, ways, self.workers, Turns(7))
        yield Row.over(self.name, ours.median, theirs.median, self.target)


@dataclass
class Scheme:
    """The scheme over a process group against one broadcast of as many bytes."""

    name: str = "process group 256 MiB, N = 3"

    def rows(self) -> Iterator[Row]:
        ways: list[tuple[Any, dict[str, Any]]] = [(Group, {"of": _Scheme}), (Group, {"of": _Member})]
        (ours, theirs), _ = measure(QUARTER, ways, 3, Turns(11))
        yield Row.over(f"{self.name}, against one broadcast", ours.median, theirs.median, 1.1)


CASES = [Gloo(1, 1 / 1.3), Gloo(4, 1 / 4), Scheme()]
