"""Extraction from the ranks of an FSDP2 trainer, compared with ``full_tensor()``."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models import LARGE, size_of
from rows import Row

#: GiB of a batch.
_THRESHOLD = 0.25
_RANKS = 2
_WARM, _ROUNDS = 1, 5


@dataclass(frozen=True)
class Extraction:
    """Time and memory of one extraction of 1 GB."""

    name: str = "extraction from 2 FSDP ranks"

    def rows(self) -> Iterator[Row]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        spawn = multiprocessing.get_context("spawn")
        ours, told = spawn.Pipe()
        ranks = [
            spawn.Process(target=_rank, args=(rank, port, told if rank == 0 else None))
            for rank in range(_RANKS)
        ]
        for rank in ranks:
            rank.start()
        told.close()
        try:
            extracted, full, peak = ours.recv()
        finally:
            for rank in ranks:
                rank.join(60)
                rank.kill()
        case = "Llama of 1 GB, 2 FSDP ranks"
        yield Row.over(f"{case}: extraction", extracted, full, 1.3)
        threshold = _THRESHOLD * (1 << 30)
        ratio = peak / threshold
        yield Row(
            f"{case}: memory beyond the model", peak / 1e6, "MB", threshold / 1e6, ratio, 1.05,
            ratio <= 1.05,
        )  # fmt: skip


def _rank(rank: int, port: int, told: Any) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from weightsync.transfer import FsdpExtractor

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=_RANKS
    )
    model = LARGE.make()
    mesh = init_device_mesh("cpu", (_RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    cfg = {"group_by_module": True, "batch_size_threshold_gb": _THRESHOLD}

    async def extract() -> int:
        extracted = 0
        for chunk in await FsdpExtractor(cfg).extract_weights(model, torch.bfloat16):
            extracted += chunk.total_size_bytes
            # Before the next one is made.
            del chunk
        return extracted

    def gather() -> None:
        for parameter in model.parameters():
            parameter.full_tensor()

    times: dict[str, list[float]] = {"extract": [], "gather": []}
    peaks = []
    for number in range(_WARM + _ROUNDS):
        dist.barrier()
        _forget_the_peak()
        before, began = _memory("VmRSS"), time.perf_counter()
        extracted = asyncio.run(extract())
        dist.barrier()
        took = time.perf_counter() - began
        peak = _memory("VmHWM") - before
        assert extracted == (size_of(model) if rank == 0 else 0)
        began = time.perf_counter()
        gather()
        dist.barrier()
        gathered = time.perf_counter() - began
        if number >= _WARM:
            times["extract"].append(took)
            times["gather"].append(gathered)
            peaks.append(peak)
    if told is not None:
        medians = [statistics.median(each) for each in times.values()]
        told.send((*medians, max(peaks)))
    dist.destroy_process_group()


def _forget_the_peak() -> None:
    """Sets the peak of this process's memory to what it has now."""
    Path("/proc/self/clear_refs").write_text("5")


def _memory(name: str) -> int:
    """Bytes, as ``/proc/self/status`` has them under a name."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


CASES = [Extraction()]
