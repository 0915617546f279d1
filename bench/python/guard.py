"""What the guard of a background receiver adds to a forward."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import weightsync
from rows import Row
from torch import nn

#: Forwards in a row, and how often they take turns with those of the other model.
BATCH, TURNS = 100, 41
LIMIT = 60.0


@dataclass
class Guarded:
    """A forward of a guarded module, against the same without a guard, in turns.

    Each layer is a part with weights, and so has hooks of its own.
    """

    layers: int
    width: int

    @property
    def name(self) -> str:
        return f"guard, forward of {self.layers} layers of {self.width}"

    def rows(self) -> Iterator[Row]:
        torch.set_num_threads(1)
        plain, guarded = self._model(), self._model()
        sender = weightsync.Sender(self._model())
        receiver = weightsync.ModelReceiver(sender.init_info, model=guarded)
        joining = threading.Thread(target=receiver.connect)
        joining.start()
        sender.connect(1, timeout=LIMIT)
        joining.join()
        background = receiver.start_background()
        try:
            given = torch.ones(1, self.width)
            times: tuple[list[float], list[float]] = ([], [])
            with torch.inference_mode():
                for _ in range(TURNS):
                    for model, own in zip((plain, guarded), times, strict=True):
                        own.append(_seconds(model, given))
        finally:
            background.shutdown()
            receiver.shutdown()
            sender.shutdown()
        without, guard = (statistics.median(own) for own in times)
        yield Row.over(self.name, guard, without, None, "µs")
        per_part = (guard - without) / (self.layers + 1)
        yield Row.over(f"{self.name}, more for each part", per_part, without, None, "µs")

    def _model(self) -> Any:
        return nn.Sequential(*(nn.Linear(self.width, self.width) for _ in range(self.layers)))


def _seconds(model: Any, given: torch.Tensor) -> float:
    """Of one forward."""
    before = time.perf_counter()
    for _ in range(BATCH):
        model(given)
    return (time.perf_counter() - before) / BATCH
