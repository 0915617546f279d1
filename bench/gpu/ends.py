"""The other process, which the benchmark starts."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
import weightsync
from torch import nn
from weightsync import transfer


def model(mib: int) -> nn.Module:
    """Layers of 16 MiB of bfloat16."""
    layers = [nn.Linear(4096, 2048, bias=False, dtype=torch.bfloat16) for _ in range(mib // 16)]
    return nn.Sequential(*layers).cuda()


def receive(link: Any, mib: int) -> None:
    (info,) = link.recv()
    own = model(mib)
    receiver = weightsync.ModelReceiver(info, 0, model=own)
    receiver.connect()
    link.send(True)
    while link.recv() is not None:
        link.send(True)
        receiver.receive()
        torch.cuda.synchronize()
        link.send(True)
    receiver.shutdown()


def infer(link: Any, mib: int) -> None:
    torch.cuda.set_device(0)
    (word,) = link.recv()
    actor = transfer.InferenceActor(
        transfer.strategy_from_config(word), transfer.ModuleLoader(model(mib))
    )
    link.send(True)
    while (message := link.recv()) is not None:
        name, *args = message
        link.send(asyncio.run(getattr(actor, name)(*args)))
    actor.shutdown()
