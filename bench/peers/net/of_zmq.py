"""ZeroMQ over tcp: pyzmq 27.3.0, with the libzmq in its wheel.

A message with a part for each tensor. Neither side copies: the parts are sent from the source
(`copy=False`), and a worker keeps the parts that were received as its weights, where others would
still copy them into a model. One thread does the input and output, which is the default.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import zmq
from common import Crew, Payload, Receiver

HERE = "tcp://127.0.0.1"


class Push(Crew):
    """A socket for each worker: one PUSH would share messages out among them."""

    receiver = "Pulled"

    def __init__(self, payload: Payload, workers: int, deadline: float) -> None:
        self.context = zmq.Context()
        self.sockets = [self.context.socket(zmq.PUSH) for _ in range(workers)]
        self.ports = [socket.bind_to_random_port(HERE) for socket in self.sockets]
        super().__init__(payload, workers, deadline)

    def hand(self, index: int) -> Any:
        return self.ports[index]

    def publish(self) -> None:
        for socket in self.sockets:
            socket.send_multipart(parts(self.payload.tensors), copy=False)


class Publish(Crew):
    """One socket, which sends the same memory to every subscriber."""

    receiver = "Subscribed"

    def __init__(self, payload: Payload, workers: int, deadline: float) -> None:
        self.context = zmq.Context()
        # A PUB that can be asked who has subscribed: what comes earlier is lost.
        self.socket = self.context.socket(zmq.XPUB)
        self.socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self.port = self.socket.bind_to_random_port(HERE)
        super().__init__(payload, workers, deadline)

    def hand(self, index: int) -> Any:
        return self.port

    def meet(self) -> None:
        for _ in self.workers:
            self.socket.recv()

    def publish(self) -> None:
        self.socket.send_multipart(parts(self.payload.tensors), copy=False)


class _End(Receiver):
    kind: int

    def connect(self) -> None:
        self.socket = zmq.Context().socket(self.kind)
        if self.kind == zmq.SUB:
            self.socket.subscribe(b"")
        self.socket.connect(f"{HERE}:{self.handed}")

    def receive(self) -> None:
        self.parts = self.socket.recv_multipart(copy=False)
        # The buffers are read-only, which torch warns of.
        with warnings.catch_warnings(action="ignore"):
            self.tensors = [
                torch.frombuffer(part.buffer, dtype=torch.bfloat16) for part in self.parts
            ]


class Pulled(_End):
    kind = zmq.PULL


class Subscribed(_End):
    kind = zmq.SUB


def parts(tensors: list[Any]) -> list[memoryview]:
    return [memoryview(tensor.view(torch.uint8).numpy()) for tensor in tensors]
