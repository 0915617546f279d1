"""Weights of a GPU in a worker of the same GPU, as `cargo xtask bench` cannot: it needs a GPU.

    PYTHONPATH=bench/common python bench/gpu [--json] [--only TEXT] [--mib N]

A send ends when the worker's model on the GPU has the weights. The baseline copies the same bytes
from the GPU to pinned memory of the host and back, as one tensor: what any way through the host's
memory costs at least. Ways and baseline take turns, and medians are shown.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import weightsync
from ends import infer, model, receive
from rows import Row, show_all
from torch import nn
from weightsync import transfer

_ROUNDS = 9


class Worker:
    """The other process. It answers each call once its model has the version."""

    def __init__(self, mib: int, serve: Callable[..., Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self.link, there = context.Pipe()
        self.process = context.Process(target=serve, args=(there, mib), daemon=True)
        self.process.start()

    def __call__(self, *message: Any) -> Any:
        self.link.send(message)
        return self.link.recv()

    def close(self) -> None:
        self.link.send(None)
        self.process.join()


class Case:
    """A way to send, against the copies."""

    def __init__(self, name: str, mib: int, way: Callable[[nn.Module], Iterator[Any]]) -> None:
        self.name, self._mib, self._way = name, mib, way

    def rows(self) -> Iterator[Row]:
        """Its row."""
        net = model(self._mib)
        numel = sum(one.numel() for one in net.parameters())
        flat = torch.empty(numel, dtype=torch.bfloat16, device="cuda")
        pinned = torch.empty(numel, dtype=torch.bfloat16, pin_memory=True)

        def copies() -> None:
            pinned.copy_(flat)
            flat.copy_(pinned)

        sends = self._way(net)
        next(sends)
        ours, theirs = [], []
        for at in range(_ROUNDS):
            with torch.no_grad():
                for one in net.parameters():
                    one.fill_(float(at))
            ours.append(_timed(lambda: next(sends)))
            theirs.append(_timed(copies))
        sends.close()
        yield Row.over(self.name, statistics.median(ours), statistics.median(theirs), None)


def _timed(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _by_scheme(scheme: str, mib: int) -> Callable[[nn.Module], Iterator[Any]]:
    def way(net: nn.Module) -> Iterator[Any]:
        worker = Worker(mib, receive)
        with weightsync.Sender(net, scheme=scheme) as sender:
            worker.link.send((sender.init_info.to_json(),))
            sender.connect(workers=1)
            worker.link.recv()
            try:
                while True:
                    worker("receive")
                    sender.send()
                    yield worker.link.recv()
            finally:
                worker.close()

    return way


def _by_transfer(word: str, mib: int) -> Callable[[nn.Module], Iterator[Any]]:
    def way(net: nn.Module) -> Iterator[Any]:
        worker = Worker(mib, infer)
        worker(word)

        async def call(actor: Worker, *message: Any) -> Any:
            return actor(*message)

        extractor = transfer.ModuleExtractor(
            {"group_by_module": True, "batch_size_threshold_gb": 0.25}
        )
        training = transfer.TrainingActor(extractor, net, torch.bfloat16)
        client = transfer.ActorClient([worker], call=call)
        asyncio.run(training.initialize_weight_sync(None, word, client))
        try:
            while True:
                yield asyncio.run(training.sync_weights())
        finally:
            worker.close()
            training.shutdown()

    return way


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures weights of a GPU")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--mib", type=int, default=1024, help="the model's size")
    args = parser.parse_args()
    mib = args.mib
    cases = [
        Case(f"GPU to GPU of one host, {mib} MiB, shared memory", mib, _by_scheme("shared-mem", mib)),
        Case(f"GPU to GPU of one host, {mib} MiB, TCP", mib, _by_scheme("distributed:share=none", mib)),
        *(
            Case(f"GPU to GPU of one host, {mib} MiB, {word}", mib, _by_transfer(word, mib))
            for word in ("cuda_ipc", "packed_cuda_ipc")
        ),
    ]
    show_all(cases, args.only, args.json)


if __name__ == "__main__":
    main()
