"""For vLLM 0.16 to 0.21, which take no backend: an extension of their workers.

``LLM(…, worker_extension_cls="weightsync.vllm.extension.WorkerExtension")``.
"""

from __future__ import annotations

import json
from typing import Any

from weightsync.vllm._worker import EngineWorker, Place


class WorkerExtension:
    """One method for vLLM's workers; ``Trainer`` calls it through ``collective_rpc``."""

    _weightsync: EngineWorker | None = None

    def weightsync(self, request: str) -> None:
        """Joins a sender, or loads a version; the request is JSON text."""
        told = json.loads(request)
        worker = self._weightsync
        if worker is None:
            of: Any = self
            worker = EngineWorker(Place.of(of.vllm_config, of.model_runner.model))
            self._weightsync = worker
        match told.pop("do", None):
            case "join":
                worker.join(
                    told["sender"], told["first_worker"], told["version"], told["timeout"]
                )
            case "update":
                worker.update(told["version"], told["timeout"])
            case "loaded":
                worker.loaded()
            case "restore":
                worker.restore()
            case other:
                raise ValueError(f"do: expected join, update, loaded or restore, got {other!r}")
