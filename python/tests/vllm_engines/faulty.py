"""The backend with faults: its worker's model fails in the middle of a load, or is slow, when told
to; and a sleep at level 2 discards the weights, as on a GPU.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from weightsync.vllm._transfer import WeightsyncEngine

#: Of vLLM's factory.
NAME = "weightsync-faulty"
# Tensors that are loaded before the fault.
_MIDWAY = 9


class FaultyEngine(WeightsyncEngine):
    """Loads as the backend does, and fails on the rank that the file says, as often as it says.

    The file is in the folder of the model, and has a rank and a number of failures.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        from vllm.v1.worker.cpu_worker import CPUWorker

        # The CPU's own sleep does nothing.
        CPUWorker.sleep = _sleep
        model = self.model
        told = told_in(Path(self.model_config.model))
        load_weights = model.load_weights

        def load(tensors: Any) -> Any:
            slow = slow_in(told.parent)
            if self.parallel_config.rank == 0 and slow.exists():
                seconds = float(slow.read_text())
                slow.unlink()
                time.sleep(seconds)
            rank, left = map(int, told.read_text().split()) if told.exists() else (-1, 0)
            if rank != self.parallel_config.rank or not left:
                return load_weights(tensors)
            # Written whole: another rank may be reading.
            new = told.with_suffix(".new")
            new.write_text(f"{rank} {left - 1}")
            os.replace(new, told)
            return load_weights(_until_midway(tensors))

        model.load_weights = load


def register() -> None:
    """The entry point."""
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, FaultyEngine)


def told_in(folder: Path) -> Path:
    """The file that says on which rank loads fail, and how many."""
    return folder / "fail"


def slow_in(folder: Path) -> Path:
    """The file that says how many seconds the next load takes longer."""
    return folder / "slow"


def _sleep(worker: Any, level: int = 1) -> None:
    """A sleep that discards the weights at level 2."""
    if level == 2:
        for parameter in worker.model_runner.get_model().parameters():
            parameter.data.zero_()


def _until_midway(tensors: Any) -> Any:
    for place, pair in enumerate(tensors):
        if place == _MIDWAY:
            raise RuntimeError("the load failed midway")
        yield pair
