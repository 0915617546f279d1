"""vLLM engines that take their weights from a weightsync sender.

An engine is made with ``weight_transfer_config={"backend": "weightsync"}``. The trainer's
:class:`Trainer` brings each version to every engine: the version is fetched and compared before
the pause, and the pause covers the load alone. ``docs/vllm.md`` is the guide.
"""

from __future__ import annotations

from weightsync.engines import (
    EngineCallError,
    EngineDiedError,
    EngineReport,
    SyncReport,
    Trainer,
)

__all__ = ["EngineCallError", "EngineDiedError", "EngineReport", "SyncReport", "Trainer"]
