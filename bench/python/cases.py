"""The cases with their targets."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from guard import Guarded
from measure import Figures, Turns, measure, rust
from payload import Payload
from rows import Row
from ways import WAYS

LARGE = Payload(512 << 20, 64)
SMALL = Payload(16 << 10, 4)
MANY = Payload(64 * 2 * 10_000, 10_000)

#: How much longer than with one worker a send to four may take, each by its memcpy.
FLAT = 1.1


class Case(Protocol):
    """Something that is measured alone."""

    name: str

    def rows(self) -> Iterator[Row]:
        """Measures, and says what came of it."""


def cases(program: Path) -> Iterator[Case]:
    """Every case; ``program`` measures the Rust figures."""
    ways = ["bind", "bind, 2 copying threads", "copy"]
    shared = Large("shared-mem", ways, "SharedMemWeightSyncScheme", 0.9)
    queued = Large("multi-process", ["multi-process"], "MultiProcessWeightSyncScheme", 1.5)
    for kind in (shared, queued):
        for workers in (1, 2, 4):
            yield LargeCase(kind, workers)
    yield Read(4)
    for workers in (1, 2, 4):
        yield AgainstRay(workers)
    yield Small(program)
    yield Many(program)
    yield Guarded(3, 64)
    yield Guarded(24, 1024)


class Large:
    """512 MiB by one transport, whatever the number of workers."""

    def __init__(self, word: str, own: list[str], scheme: str, target: float) -> None:
        self.word, self.target = word, target
        self.own = [*own, f"our {scheme}"]
        self.theirs = f"TorchRL's {scheme}"
        # Of one worker, by way: multiples of memcpy.
        self.one: dict[str, float] = {}


@dataclass
class LargeCase:
    """Against memcpy, and against TorchRL's."""

    kind: Large
    workers: int

    @property
    def name(self) -> str:
        return f"{self.kind.word} 512 MiB, N = {self.workers}"

    def rows(self) -> Iterator[Row]:
        kind = self.kind
        names = [*kind.own, kind.theirs]
        got, memcpy = measure(LARGE, _ways(names), self.workers, Turns(9))
        theirs = got[-1]
        for way, figures in zip(names, got, strict=True):
            # The plain receiver that binds, and the scheme.
            bound = way in (kind.own[0], kind.own[-1])
            target = kind.target if bound else None
            yield Row.over(f"{self.name}, {way}", figures.median, memcpy, target)
            if way != kind.theirs:
                case = f"{self.name}, {way}, against TorchRL's"
                yield Row.over(case, figures.median, theirs.median, None)
            ratio = figures.median / memcpy
            if self.workers == 1:
                kind.one[way] = ratio
            elif self.workers == 4 and way in kind.one and bound:
                case = f"{kind.word} 512 MiB, {way}, N = 4 over N = 1, by memcpy"
                yield Row.compared(case, ratio, kind.one[way], FLAT)
        for way, figures in zip(kind.own, got, strict=False):
            case = f"{self.name}, {way}, first send, against TorchRL's"
            yield Row.over(case, figures.first, theirs.first, None)


@dataclass
class Read:
    """Where every worker reads all of each version."""

    workers: int

    @property
    def name(self) -> str:
        return f"shared-mem 512 MiB, N = {self.workers}, read by all"

    def rows(self) -> Iterator[Row]:
        names = ["bind", "copy", "TorchRL's SharedMemWeightSyncScheme"]
        got, memcpy = measure(LARGE, _ways(names), self.workers, Turns(7, read=True))
        for way, figures in zip(names, got, strict=True):
            yield Row.over(f"{self.name}, {way}", figures.median, memcpy, None)


@dataclass
class AgainstRay:
    """Against Ray's object store: put by the trainer, get and a copy by each worker."""

    workers: int

    @property
    def name(self) -> str:
        return f"against Ray 512 MiB, N = {self.workers}"

    def rows(self) -> Iterator[Row]:
        # Its import takes seconds, and its processes some of the machine.
        from of_ray import Ray

        names = ["bind", "copy"]
        got, _ = measure(LARGE, [*_ways(names), (Ray, {})], self.workers, Turns(9))
        ray = got[-1].median
        for way, figures in zip(names, got, strict=False):
            target = 0.5 if way == "bind" else None
            yield Row.over(f"{self.name}, {way}", figures.median, ray, target)


@dataclass
class Small:
    """What Python adds to a send of 16 KiB."""

    program: Path
    name: str = "16 KiB, N = 1"

    def rows(self) -> Iterator[Row]:
        # Rust's is measured with nothing next to it: ours takes turns with it without TorchRL's
        # processes, and with TorchRL's in a run of their own.
        names = ["bind", "from a state dict", "our SharedMemWeightSyncScheme"]
        blocks, rusts = [], []
        for _ in range(3):
            blocks.append(measure(SMALL, _ways(names), 1, Turns(15, batch=50))[0])
            rusts.append(rust(self.program, SMALL, 1, 20_000))
        in_rust = statistics.median(rusts)
        for way, figures in zip(names, zip(*blocks, strict=True), strict=True):
            seconds = statistics.median(one.median for one in figures)
            case = f"{self.name}, {way}, more than in Rust"
            value, own = (seconds - in_rust) * 1e6, in_rust * 1e6
            yield Row(case, value, "µs", own, seconds / in_rust, 30.0, value <= 30.0)
        beside = [*names, "TorchRL's SharedMemWeightSyncScheme"]
        *ours, theirs = measure(SMALL, _ways(beside), 1, Turns(15, batch=50))[0]
        for way, figures in zip(names, ours, strict=True):
            case = f"{self.name}, {way}, against TorchRL's"
            yield Row.over(case, figures.median, theirs.median, 0.2, "µs")


@dataclass
class Many:
    """What 10,000 tensors of 64 elements cost, in processor time of both ends.

    What Rust does of it, and the yields of the two waits, are in it. The baseline is a whole send
    in Rust.
    """

    program: Path
    name: str = "10,000 tensors, N = 1"

    def rows(self) -> Iterator[Row]:
        # TorchRL's takes a descriptor for each tensor, more than a process may be started with.
        names = ["bind", "from a state dict", "our SharedMemWeightSyncScheme"]
        got, memcpy = measure(MANY, _ways(names), 1, Turns(25, batch=2))
        in_rust = rust(self.program, MANY, 1, 500)
        for way, figures in zip(names, got, strict=True):
            trainer, worker = statistics.median(figures.trainer), figures.worker
            case = f"{self.name}, {way}"
            both = trainer + worker
            yield Row.within(f"{case}, processor time of both ends", both, in_rust, 10.0)
            yield Row.within(f"{case}, of that the trainer's", trainer, in_rust, None)
            yield Row.within(f"{case}, of that the worker's", worker, in_rust, None)
            yield Row.over(f"{case}, send to live", figures.median, in_rust, None)
            yield Row.over(f"{case}, first send", figures.first, memcpy, None)


def _ways(names: list[str]) -> list[tuple[Any, dict[str, Any]]]:
    return [WAYS[name] for name in names]
