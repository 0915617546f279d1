"""Ray's object store: the trainer puts, each worker gets and copies into its model."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from typing import Any

import ray
import torch
from payload import Model, Payload

#: Bytes of the object store: some versions of what is sent.
STORE = 2 << 30
#: Seconds that a worker may take.
DEADLINE = 120.0


class Ray:
    """Actors that hold a model each. What is put is the tensors as numpy arrays, which Ray reads
    without a copy; of torch's tensors it makes copies more. Several ways share one cluster.

    Args:
        put: whether the weights are put into the store, and not passed with each call.
    """

    # The folder of the cluster, and how many ways use it.
    _folder = ""
    _users = 0

    def __init__(self, payload: Payload, workers: int, *, put: bool = True) -> None:
        self._put = put
        self.weights = payload.weights(1.0)
        self.began = time.perf_counter()
        if not ray.is_initialized():
            self._start()
        Ray._users += 1
        # Of the workers' processor time it only matters that they find some.
        actor = ray.remote(num_cpus=0)(self._actor())
        self._actors = [actor.remote(payload) for _ in range(workers)]
        self.crew = self
        self.spent()
        #: It is not asked how long Ray takes to start.
        self.starting = 0.0

    @staticmethod
    def _actor() -> type:
        return _Actor

    @staticmethod
    def _start() -> None:
        os.environ["RAY_memory_monitor_refresh_ms"] = "0"
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        # The paths of its sockets must be short.
        Ray._folder = tempfile.mkdtemp(prefix="ray")
        ray.init(
            num_cpus=4,
            object_store_memory=STORE,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            _temp_dir=Ray._folder,
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}},
        )

    def connect(self) -> None:
        """Waits until the actors run."""
        self.spent()

    def send(self) -> None:
        """Returns when every worker has copied the new weights."""
        if self._put:
            self._all("load", [ray.put(self.weights.arrays)])
        else:
            self._all("take", self.weights.arrays)

    def check(self, value: float) -> None:
        """Looks whether the values have arrived."""
        for wrong in self._all("difference", value):
            if wrong:
                raise RuntimeError(wrong)

    def read(self) -> None:
        """Has every worker read every byte of its model, and waits for them."""
        self._all("total")

    def spent(self) -> list[float]:
        """Seconds of processor time that each worker has taken so far."""
        return self._all("spent")

    def close(self) -> None:
        """Ends the actors, and with the last way all of Ray's processes."""
        for actor in self._actors:
            ray.kill(actor)
        Ray._users -= 1
        if Ray._users == 0:
            ray.shutdown()
            shutil.rmtree(Ray._folder, ignore_errors=True)

    def _all(self, call: str, *args: Any) -> list[Any]:
        asked = [getattr(actor, call).remote(*args) for actor in self._actors]
        return ray.get(asked, timeout=DEADLINE)


class _Actor:
    """A worker."""

    def __init__(self, payload: Payload) -> None:
        torch.set_num_threads(1)
        self._model: Model = payload.model()
        self._own = {
            name: tensor.view(torch.uint16).numpy()
            for name, tensor in self._model.state_dict().items()
        }

    def load(self, given: list[Any]) -> None:
        # In a list a reference comes as it is, so that the get is this worker's.
        self.take(ray.get(given[0]))

    def take(self, arrays: dict[str, Any]) -> None:
        for name, array in arrays.items():
            self._own[name][...] = array

    def difference(self, value: float) -> str | None:
        return self._model.difference(value)

    def total(self) -> None:
        self._model.total()

    def spent(self) -> float:
        return time.process_time()
