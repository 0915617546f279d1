"""For vLLM 0.17 to 0.24, which weightsync has no backend for: an extension of their workers.

``LLM(…, worker_extension_cls="weightsync.vllm.extension.WorkerExtension")``.
"""

from __future__ import annotations

import json
from typing import Any

from weightsync.engines._request import WorkerRequest
from weightsync.engines._worker import EngineWorker
from weightsync.vllm._load import VllmPlace


class WorkerExtension:
    """One method for vLLM's workers; ``Trainer`` calls it through ``collective_rpc``."""

    _weightsync: EngineWorker | None = None

    def weightsync(self, request: str) -> None:
        """Joins a sender, or loads a version; the request is JSON text."""
        asked = WorkerRequest(**json.loads(request))
        if self._weightsync is None:
            of: Any = self
            self._weightsync = EngineWorker(VllmPlace(of.vllm_config, of.model_runner.model))
        self._weightsync.do(asked)
