"""SGLang servers that take their weights from a weightsync sender.

A server is started with ``--custom-weight-loader weightsync.sglang.load``, and the trainer speaks
to it through an :class:`Engine`. The :class:`Trainer` brings each version to every engine: the
version is fetched and compared before the pause, and the pause covers the load alone.
``docs/sglang.md`` is the guide.
"""

from __future__ import annotations

from weightsync.engines import (
    EngineCallError,
    EngineDiedError,
    EngineReport,
    SyncReport,
    Trainer,
)
from weightsync.sglang._engine import Engine
from weightsync.sglang._names import load

__all__ = [
    "Engine",
    "EngineCallError",
    "EngineDiedError",
    "EngineReport",
    "SyncReport",
    "Trainer",
    "load",
]
