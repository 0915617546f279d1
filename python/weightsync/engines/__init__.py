"""Engines that take their weights from a weightsync sender: vLLM, SGLang, and others over HTTP.

The trainer's :class:`Trainer` brings each version to every engine: the version is fetched and
compared before the pause, and the pause covers the load alone.
"""

from __future__ import annotations

from weightsync.engines._base import EngineCallError, EngineDiedError
from weightsync.engines._remote import Remote
from weightsync.engines._report import EngineReport, SyncReport
from weightsync.engines._trainer import Trainer

__all__ = ["EngineCallError", "EngineDiedError", "EngineReport", "Remote", "SyncReport", "Trainer"]
