"""The ways to send: each with its trainer's end, and a worker's end for every worker."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
import torchrl.weight_update as theirs
from crew import Crew, context
from payload import Model, Payload, Weights

import weightsync
import weightsync.torchrl as ours

MODEL = "policy"


class Plain:
    """weightsync's own sender and receivers."""

    def __init__(
        self,
        payload: Payload,
        workers: int,
        *,
        scheme: str,
        mode: str = "bind",
        of: str = "model",
        threads: int = 1,
    ) -> None:
        self.weights = payload.weights(1.0)
        self.began = time.perf_counter()
        self._sent = getattr(self.weights, of)
        self._workers = workers
        self.sender = weightsync.Sender(
            self._sent, name=MODEL, scheme=scheme, copy_threads=threads
        )
        self.crew = Crew(_Following, workers, payload, (self.sender.init_info, mode))

    def connect(self) -> None:
        """The rendez-vous, which brings the first weights."""
        self.crew.connect(lambda: self.sender.connect(self._workers))

    def send(self) -> None:
        """Returns when every worker runs the new version."""
        report = self.sender.send(self._sent)
        if not report.all_applied:
            raise RuntimeError(str(report))

    def close(self) -> None:
        """Ends both ends."""
        self.sender.shutdown()
        self.crew.leave()


class _Following:
    """A worker that receives in a thread, and does nothing else with it."""

    def __init__(self, index: int, model: Model, handed: Any) -> None:
        info, mode = handed
        self._receiver = weightsync.ModelReceiver(info, index, model=model, mode=mode)
        self._thread = threading.Thread(target=self._follow)

    def connect(self) -> None:
        self._receiver.connect()
        self._thread.start()

    def close(self) -> None:
        self._thread.join()
        self._receiver.shutdown()

    def _follow(self) -> None:
        try:
            while True:
                self._receiver.receive()
        except weightsync.SenderClosedError:
            pass


class Scheme:
    """A scheme of TorchRL's, or one of ours in its place. Its sender copies with as many threads
    as torch takes."""

    def __init__(self, payload: Payload, workers: int, *, of: Any) -> None:
        # TorchRL moves what it sends through queues to shared memory.
        self.weights, initial = payload.weights(1.0), payload.weights(0.0)
        self.began = time.perf_counter()
        self._scheme = of()
        self._scheme.init_on_sender(
            model_id=MODEL,
            weights=initial.tensordict,
            devices=[torch.device("cpu")] * workers,
            num_workers=workers,
            ctx=context,
        )
        self.crew = Crew(_OfScheme, workers, payload, self._scheme)

    def connect(self) -> None:
        """The rendez-vous, which brings the first weights."""
        self.crew.connect(self._scheme.connect)

    def send(self) -> None:
        """Returns when every worker has said that it has updated its model."""
        self._scheme.send(weights=self.weights.tensordict)

    def close(self) -> None:
        """Ends both ends."""
        self._scheme.shutdown()
        self.crew.leave()


class _OfScheme:
    """A worker whose scheme receives in a thread of its own."""

    def __init__(self, index: int, model: Model, scheme: Any) -> None:
        self._index, self._scheme = index, scheme
        scheme.init_on_receiver(model_id=MODEL, model=model, worker_idx=index)

    def connect(self) -> None:
        self._scheme.connect(worker_idx=self._index)

    def close(self) -> None:
        """TorchRL's threads end with the process."""


#: Every way there is here, by its name in the rows.
WAYS = {
    "bind": (Plain, {"scheme": "shared-mem"}),
    "bind, 2 copying threads": (Plain, {"scheme": "shared-mem", "threads": 2}),
    "copy": (Plain, {"scheme": "shared-mem", "mode": "copy"}),
    "from a state dict": (Plain, {"scheme": "shared-mem", "of": "state_dict"}),
    "multi-process": (Plain, {"scheme": "multi-process"}),
    "our SharedMemWeightSyncScheme": (Scheme, {"of": ours.SharedMemWeightSyncScheme}),
    "our MultiProcessWeightSyncScheme": (Scheme, {"of": ours.MultiProcessWeightSyncScheme}),
    "TorchRL's SharedMemWeightSyncScheme": (Scheme, {"of": theirs.SharedMemWeightSyncScheme}),
    "TorchRL's MultiProcessWeightSyncScheme": (Scheme, {"of": theirs.MultiProcessWeightSyncScheme}),
}
