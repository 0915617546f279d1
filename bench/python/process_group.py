"""The process-group scheme against one broadcast of the same bytes in one tensor.

Run it with torch and weightsync installed::

    torchrun --nproc-per-node 4 bench/python/process_group.py [--mib 256] [--rounds 15]

Both ways alternate in each round, in the same processes. A line has the case, the median time,
and the median of the rounds' ratios. The time ends when every rank has the weights: a barrier is
part of both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist
import weightsync.process_group
from torch import nn


def model_of(mib: int) -> nn.Module:
    """Layers of about 4 MiB and a few small tensors, as much as asked for."""
    layers = max(1, mib // 4)
    width = 1024 if mib >= 4 else 64
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def timed(call) -> float:
    dist.barrier()
    began = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - began


def measure(mib: int, rounds: int, mode: str) -> None:
    model, rank = model_of(mib), dist.get_rank()
    size = sum(one.nbytes for one in model.state_dict().values())
    flat = torch.ones(size, dtype=torch.uint8)
    name = f"{mib} MiB {mode}"
    if rank == 0:
        end = weightsync.process_group.Sender(model, name=name)
        ways = {"broadcast": lambda: dist.broadcast(flat, 0), "scheme": end.send}
    else:
        end = weightsync.process_group.Receiver(model, name=name, mode=mode)
        ways = {"broadcast": lambda: dist.broadcast(flat, 0), "scheme": end.receive}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for at in range(rounds + 3):
        order = list(ways) if at % 2 else list(ways)[::-1]
        for way in order:
            took = timed(ways[way])
            if at >= 3:
                times[way].append(took)
    end.shutdown()
    if rank == 0:
        ratio = statistics.median(
            ours / theirs for ours, theirs in zip(times["scheme"], times["broadcast"], strict=True)
        )
        row = {
            "case": f"process group, {name}, {dist.get_world_size()} ranks",
            "value": round(1000 * statistics.median(times["scheme"]), 2),
            "unit": "ms",
            "baseline": round(1000 * statistics.median(times["broadcast"]), 2),
            "ratio": round(ratio, 3),
            "target": 1.1,
            "met": ratio <= 1.1,
        }
        print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mode", nargs="+", default=["bind", "copy"])
    given = parser.parse_args()
    dist.init_process_group("gloo")
    for mib in given.mib:
        for mode in given.mode:
            measure(mib, given.rounds, mode)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
