"""Rounds in which several ways to send take turns, compared with a memcpy of the same bytes."""

from __future__ import annotations

import faulthandler
import json
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from payload import Memcpy, Payload

#: Turns that are not counted: what is lazy is faulted in, and caches are warm.
WARM = 2
#: Seconds after which a measurement is given up, with the stacks of all threads.
LIMIT = 900


@dataclass
class Figures:
    """What came of one way to send."""

    #: Seconds until the workers had a version that was sent: set-up, rendez-vous and one send,
    #: without the start of their processes.
    first: float = 0.0
    #: Seconds of each send, until the version was live on every worker.
    sends: list[float] = field(default_factory=list)
    #: Seconds of processor time for each send, in the trainer and in its slowest worker.
    trainer: list[float] = field(default_factory=list)
    worker: float = 0.0

    @property
    def median(self) -> float:
        """Of the sends."""
        return statistics.median(self.sends)


@dataclass(frozen=True)
class Turns:
    """How often each way sends: so many times in a row at each turn."""

    turns: int
    batch: int = 1
    #: Whether a send ends only when every worker has read all of it.
    read: bool = False


def measure(
    payload: Payload, ways: Sequence[tuple[Any, dict[str, Any]]], workers: int, turns: Turns
) -> tuple[list[Figures], float]:
    """The figures of each way, and the median of the memcpys between."""
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    memcpy = Memcpy(payload.bytes)
    with _started(payload, ways, workers) as running:
        for _ in range(WARM):
            for way in running:
                way.turn(turns)
            memcpy.seconds()
        for way in running:
            way.begin()
        memcpys = []
        for _ in range(turns.turns):
            for way in running:
                way.turn(turns)
            memcpys.extend(memcpy.seconds() for _ in range(turns.batch))
        figures = [way.end() for way in running]
    faulthandler.cancel_dump_traceback_later()
    return figures, statistics.median(memcpys)


def rust(program: Path, payload: Payload, workers: int, rounds: int) -> float:
    """Seconds that the same send takes in Rust, by the command line's own measurement."""
    command = [program, "bench", "shared-mem", "--json", "--size", f"{payload.bytes}B"]
    counts = {"--tensors": payload.tensors, "--readers": workers, "--rounds": rounds}
    command += [str(word) for pair in counts.items() for word in pair]
    done = subprocess.run(command, check=True, capture_output=True, timeout=LIMIT)
    return json.loads(done.stdout)["applied_us"] / 1e6


@contextmanager
def _started(
    payload: Payload, ways: Sequence[tuple[Any, dict[str, Any]]], workers: int
) -> Iterator[list[_Running]]:
    running: list[_Running] = []
    try:
        for way, settings in ways:
            running.append(_Running(payload, way, settings, workers))
        yield running
    finally:
        for one in running:
            one.way.close()


class _Running:
    """A way to send, connected."""

    def __init__(self, payload: Payload, way: Any, settings: dict[str, Any], workers: int) -> None:
        self.way = way(payload, workers, **settings)
        self.way.connect()
        self._value = 1.0
        self._got = Figures()
        self._seconds(False)
        self._first = time.perf_counter() - self.way.began - self.way.crew.starting

    def turn(self, turns: Turns) -> None:
        """Some sends in a row. The source is written before each, outside the timed part."""
        for _ in range(turns.batch):
            # Whole numbers up to 256 are exact in bfloat16, and neighbours differ.
            self._value = self._value % 250 + 1
            self.way.weights.write(self._value)
            self._got.sends.append(self._seconds(turns.read))
        if not self._got.first:
            self.way.crew.check(self._value)

    def begin(self) -> None:
        """Leaves out what was measured so far."""
        self._got = Figures(first=self._first)
        self._spent = self.way.crew.spent()

    def end(self) -> Figures:
        """What was measured."""
        spent = zip(self.way.crew.spent(), self._spent, strict=True)
        self._got.worker = max(after - before for after, before in spent) / len(self._got.sends)
        self.way.crew.check(self._value)
        return self._got

    def _seconds(self, read: bool) -> float:
        spent, began = time.process_time(), time.perf_counter()
        self.way.send()
        if read:
            self.way.crew.read()
        took = time.perf_counter() - began
        self._got.trainer.append(time.process_time() - spent)
        return took
