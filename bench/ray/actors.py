"""weightsync's ends in actors, compared with Ray's object store and with arguments of a call."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from measure import Turns, measure
from of_ray import Ray, _Actor
from payload import Payload
from rows import Row

import weightsync.ray

GIB = Payload(1 << 30, 64)
SMALL = Payload(16 << 10, 4)


class Ours(Ray):
    """Actors that follow a sender in this process, the driver."""

    _names = iter(range(1 << 30))

    def __init__(self, payload: Payload, workers: int) -> None:
        super().__init__(payload, workers)
        self._name = f"bench {next(self._names)}"
        self.began = time.perf_counter()
        self._sender = weightsync.ray.Sender(self.weights.model, name=self._name)

    @staticmethod
    def _actor() -> type:
        return _Following

    def connect(self) -> None:
        """The rendez-vous, which brings the first weights."""
        self._all("join", self._name)

    def send(self) -> None:
        """Returns when every actor runs the new version."""
        report = self._sender.send()
        if not report.all_applied:
            raise RuntimeError(str(report))

    def close(self) -> None:
        """Ends both ends."""
        self._sender.shutdown()
        super().close()


class _Following(_Actor):
    def join(self, name: str) -> None:
        self._receiver = weightsync.ray.Receiver(model=self._model, name=name)


@dataclass
class Large:
    """1 GiB from the driver to actors of its host."""

    workers: int
    target: float

    @property
    def name(self) -> str:
        return f"Ray 1 GiB, N = {self.workers}"

    def rows(self) -> Iterator[Row]:
        ways: list[tuple[Any, dict[str, Any]]] = [(Ours, {}), (Ray, {})]
        (ours, theirs), _ = measure(GIB, ways, self.workers, Turns(7))
        case = f"{self.name}, against ray.put, ray.get and a load"
        yield Row.over(case, ours.median, theirs.median, self.target)
        yield Row.over(f"{case}, the first send", ours.first, theirs.first, None)


@dataclass
class Small:
    """16 KiB: what a signal costs."""

    name: str = "Ray 16 KiB, N = 4"

    def rows(self) -> Iterator[Row]:
        ways: list[tuple[Any, dict[str, Any]]] = [(Ours, {}), (Ray, {"put": False})]
        (ours, theirs), _ = measure(SMALL, ways, 4, Turns(15, batch=20))
        case = f"{self.name}, against ray.get(actor.load.remote(weights))"
        yield Row.over(case, ours.median, theirs.median, 0.5, "µs")


CASES = [Large(1, 1 / 1.5), Large(4, 1 / 2), Small()]
