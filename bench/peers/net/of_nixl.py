"""NIXL over UCX over tcp: nixl-cu12 1.5.1, with the UCX in its wheel.

A transfer for each worker, prepared once, with a write for each tensor, all under way at once,
from the source into the worker's tensors, which both have registered. The sender knows when they
are done and tells the workers, who answer. It asks every half millisecond: NIXL's own threads
never rest, and asking without end would take the cores from them. Set: `UCX_TLS=tcp`, as UCX would
take shared memory on one host, and `UCX_NET_DEVICES=lo`.
"""

from __future__ import annotations

import os
import time
from typing import Any

os.environ["UCX_TLS"] = "tcp"
os.environ["UCX_NET_DEVICES"] = "lo"

from common import Crew, Receiver
from nixl_cu12 import nixl_agent, nixl_agent_config


class Nixl(Crew):
    def meet(self) -> None:
        self.agent = agent("trainer")
        self.registered = self.agent.register_memory(self.payload.tensors)

    def greet(self, answers: list[Any]) -> None:
        ours = self.agent.get_xfer_descs(self.payload.tensors)
        self.transfers = []
        for metadata, theirs in answers:
            name = self.agent.add_remote_agent(metadata)
            remote = self.agent.deserialize_descs(theirs)
            self.transfers.append(self.agent.initialize_xfer("WRITE", ours, remote, name))

    def publish(self) -> None:
        under_way = self.transfers
        states = [self.agent.transfer(transfer) for transfer in under_way]
        while under_way:
            if "ERR" in states:
                raise RuntimeError("a transfer failed")
            under_way = [
                transfer
                for transfer, state in zip(under_way, states, strict=True)
                if state != "DONE"
            ]
            time.sleep(0.0005)
            states = [self.agent.check_xfer_state(transfer) for transfer in under_way]
        self.send_to_all("written")


class Receiver(Receiver):
    def connect(self) -> Any:
        self.agent = agent(f"worker {self.index}")
        self.registered = self.agent.register_memory(self.tensors)
        descriptors = self.agent.get_serialized_descs(self.registered.trim())
        return self.agent.get_agent_metadata(), descriptors

    def receive(self) -> None:
        if (got := self.pipe.recv()) != "written":
            raise RuntimeError(f"expected the end of the writes, got {got!r}")


def agent(name: str) -> nixl_agent:
    made = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    if "UCX" not in made.backends:
        raise RuntimeError(f"UCX is not among the backends: {made.plugin_list}")
    return made
