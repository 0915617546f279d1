"""Updates of an ``LLM``, compared with vLLM's own load."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models import LARGE, SMALL, Size, Steps
from rows import Row

import weightsync
from weightsync.vllm import Trainer

#: Rounds that are not counted, and rounds that are.
_WARM, _ROUNDS = 2, 9

os.environ.update(
    {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # One core each for the trainer and the engine. With more threads than cores, those that
        # spin after the trainer's last operation slow down the load, and not the baseline.
        "OMP_NUM_THREADS": "1",
        # The engine core imports the baseline.
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        ),
    }
)


@dataclass(frozen=True)
class Updates:
    """Pause and time to serving, for one model."""

    size: Size

    @property
    def name(self) -> str:
        return f"update of a {self.size.name}"

    def rows(self) -> Iterator[Row]:
        pauses, serving, loads = [], [], []
        with _engine(self.size, "shared-mem") as (llm, folder, trainer, steps):
            for number in range(_WARM + _ROUNDS):
                steps.step()
                report = trainer.sync()
                assert report.all_synced, report
                (load,) = llm.collective_rpc("load_again", args=(str(folder),))
                if number >= _WARM:
                    pauses.append(report.engines[0].pause)
                    serving.append(report.engines[0].took)
                    loads.append(load)
        load, what = statistics.median(loads), f"{self.size.name}, 1.1 % changed"
        yield Row.over(f"{what}: pause of an update", statistics.median(pauses), load, 1.2)
        yield Row.over(f"{what}: from sync to serving", statistics.median(serving), load, 1.3)


@dataclass(frozen=True)
class Travelled:
    """Bytes of an update that go to an engine's host, where that is another."""

    size: Size
    name: str = "bytes of an update"

    def rows(self) -> Iterator[Row]:
        travelled = []
        scheme = "distributed:listen=127.0.0.1:0,share=none"
        with _engine(self.size, scheme) as (_, _, trainer, steps):
            for number in range(_WARM + _ROUNDS):
                steps.step()
                report = trainer.sync()
                assert report.all_synced, report
                if number >= _WARM:
                    travelled.append(report.engines[0].bytes)
            dense = trainer._sender.snapshot()._native.layout.payload_bytes
        case = f"{self.size.name}, 1.1 % changed: bytes to the engine's host"
        value, ratio = statistics.median(travelled) / 1e6, statistics.median(travelled) / dense
        yield Row(case, value, "MB", dense / 1e6, ratio, 0.01, ratio <= 0.01)


@contextmanager
def _engine(size: Size, scheme: str) -> Iterator[tuple[Any, Path, Trainer, Steps]]:
    import torch
    from vllm import LLM

    # torch reads OMP_NUM_THREADS when `models` imports it, before this module sets it.
    torch.set_num_threads(1)
    model = size.make()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder)
        llm = LLM(
            model=name,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="bfloat16",
            max_model_len=128,
            max_num_seqs=2,
            weight_transfer_config={"backend": "weightsync"},
            worker_extension_cls="baseline.Baseline",
        )
        try:
            with weightsync.Sender(model, scheme=scheme) as sender:
                yield llm, folder, Trainer(sender, [llm]), Steps(model)
        finally:
            llm.llm_engine.engine_core.shutdown()


CASES = [Updates(SMALL), Updates(LARGE), Travelled(LARGE)]
