"""Ray's object store: ray 2.60.0, one node.

The trainer puts the tensors as numpy arrays, which Ray reads without a copy, and each worker, an
actor, gets them, which is a view of shared memory, and copies them into its own tensors. So no
byte goes over TCP here: on one node that is Ray's way. Set: as many CPUs as workers, no dashboard,
no usage report, and no watch over the machine's memory.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Any

import ray
import torch
from common import Payload, difference, tensors


class Ray:
    def __init__(self, payload: Payload, workers: int, deadline: float) -> None:
        self.payload = payload
        self.deadline = deadline
        os.environ["RAY_memory_monitor_refresh_ms"] = "0"
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        # The paths of its sockets must be short.
        self.folder = tempfile.mkdtemp(prefix="ray")
        ray.init(
            num_cpus=workers,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            _temp_dir=self.folder,
            runtime_env={"env_vars": {"PYTHONPATH": os.path.dirname(os.path.abspath(__file__))}},
        )
        actor = ray.remote(num_cpus=1)(_Actor)
        self.actors = [actor.remote(payload.shape) for _ in range(workers)]
        self.all("runs")

    def connect(self) -> None:
        self.all("runs")

    def expect(self, count: int) -> None:
        pass

    def send(self) -> None:
        arrays = [tensor.view(torch.uint16).numpy() for tensor in self.payload.tensors]
        # In a list a reference comes as it is, so that the get is the worker's own.
        self.all("load", [ray.put(arrays)])

    def check(self, value: float) -> None:
        for wrong in self.all("difference", value):
            if wrong:
                raise RuntimeError(wrong)

    def close(self) -> None:
        ray.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)

    def all(self, call: str, *args: Any) -> list[Any]:
        asked = [getattr(actor, call).remote(*args) for actor in self.actors]
        return ray.get(asked, timeout=self.deadline)


class _Actor:
    def __init__(self, shape: tuple[int, int]) -> None:
        self.tensors = tensors(shape)

    def runs(self) -> None:
        pass

    def load(self, given: list[Any]) -> None:
        for own, array in zip(self.tensors, ray.get(given[0]), strict=True):
            own.view(torch.uint16).numpy()[...] = array

    def difference(self, value: float) -> str | None:
        return difference(self.tensors, value)
