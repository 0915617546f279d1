"""Mooncake's transfer engine over tcp: mooncake-transfer-engine-non-cuda 0.3.13.post1.

A batch of writes for each worker, one per tensor, all under way at once, from the source into the
worker's tensors, which both have registered. The engines find each other without a metadata
server (`P2PHANDSHAKE`). The sender knows when the writes are done and tells the workers, who
answer. Needs libibverbs, also without hardware for it (Debian: apt install libibverbs1 libnuma1
libcurl4).
"""

from __future__ import annotations

from typing import Any

from common import Crew, Receiver
from mooncake.engine import TransferEngine

HERE = "127.0.0.1"


class Mooncake(Crew):
    def meet(self) -> None:
        self.engine = engine()
        self.source = register(self.engine, self.payload.tensors)

    def greet(self, answers: list[Any]) -> None:
        self.targets = answers

    def publish(self) -> None:
        addresses, sizes = self.source
        batches = [
            self.engine.batch_transfer_async_write(target, addresses, theirs, sizes)
            for target, theirs in self.targets
        ]
        if 0 in batches:
            raise RuntimeError(f"a batch of writes could not be begun: {batches}")
        if status := self.engine.get_batch_transfer_status(batches):
            raise RuntimeError(f"a batch of writes failed with {status}")
        self.send_to_all("written")


class Receiver(Receiver):
    def connect(self) -> Any:
        self.engine = engine()
        addresses, _ = register(self.engine, self.tensors)
        return f"{HERE}:{self.engine.get_rpc_port()}", addresses

    def receive(self) -> None:
        if (got := self.pipe.recv()) != "written":
            raise RuntimeError(f"expected the end of the writes, got {got!r}")


def engine() -> TransferEngine:
    made = TransferEngine()
    if status := made.initialize(HERE, "P2PHANDSHAKE", "tcp", ""):
        raise RuntimeError(f"the engine could not be started: {status}")
    return made


def register(own: TransferEngine, tensors: list[Any]) -> tuple[list[int], list[int]]:
    """The addresses and sizes of the tensors, which others may now write to."""
    addresses = [tensor.data_ptr() for tensor in tensors]
    sizes = [tensor.nbytes for tensor in tensors]
    if status := own.batch_register_memory(addresses, sizes):
        raise RuntimeError(f"the memory could not be registered: {status}")
    return addresses, sizes
