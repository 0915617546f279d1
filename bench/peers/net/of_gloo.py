"""torch.distributed with its gloo backend: torch 2.15.0.

A call for each tensor, received in place, as a training loop would do it. The store of the
rendez-vous is torch's own, on 127.0.0.1. Set: `GLOO_SOCKET_IFNAME=lo`, as gloo takes the interface
that the host's name belongs to.
"""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch.distributed as dist
from common import Crew, Payload, Receiver

HERE = "127.0.0.1"


class _Gloo(Crew):
    def __init__(self, payload: Payload, workers: int, deadline: float) -> None:
        self.timeout = datetime.timedelta(seconds=deadline)
        self.world = 1 + workers
        self.store = dist.TCPStore(
            HERE, 0, is_master=True, wait_for_workers=False, timeout=self.timeout
        )
        super().__init__(payload, workers, deadline)

    def hand(self, index: int) -> Any:
        return self.store.port, self.world, self.timeout

    def meet(self) -> None:
        join(self.store, 0, self.world, self.timeout)


class Send(_Gloo):
    """`send` and `recv`; to several workers at once, `isend`."""

    receiver = "Received"

    def publish(self) -> None:
        for tensor in self.payload.tensors:
            under_way = [dist.isend(tensor, 1 + worker.index) for worker in self.workers]
            for sending in under_way:
                sending.wait()


class Broadcast(_Gloo):
    """`broadcast`."""

    receiver = "Broadcasted"

    def publish(self) -> None:
        for tensor in self.payload.tensors:
            dist.broadcast(tensor, 0)


class _End(Receiver):
    def connect(self) -> None:
        port, world, timeout = self.handed
        store = dist.TCPStore(HERE, port, is_master=False, timeout=timeout)
        join(store, 1 + self.index, world, timeout)


class Received(_End):
    def receive(self) -> None:
        for tensor in self.tensors:
            dist.recv(tensor, 0)


class Broadcasted(_End):
    def receive(self) -> None:
        for tensor in self.tensors:
            dist.broadcast(tensor, 0)


def join(store: Any, rank: int, world: int, timeout: datetime.timedelta) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
