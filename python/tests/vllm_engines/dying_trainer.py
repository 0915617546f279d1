"""A trainer that is in the middle of an update of a server, and stays there until it is killed."""

from __future__ import annotations

import signal
import sys

import tiny

import weightsync
from weightsync.vllm import Trainer
from weightsync.vllm._engines import ServerEngine


class Stuck(ServerEngine):
    """Its server is paused and has begun, and nothing follows."""

    def update(self, version: int, timeout: float) -> None:
        print("begun", flush=True)
        signal.pause()


with weightsync.Sender(tiny.llama(8)) as sender:
    Trainer(sender, [Stuck(sys.argv[1])]).sync()
