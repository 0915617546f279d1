"""Ends that are open, so that a program that ends leaves none."""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from typing import Any

logger = logging.getLogger("weightsync")

_open: weakref.WeakSet[Any] = weakref.WeakSet()
_pid = os.getpid()


def opened(end: Any) -> None:
    """Remembers an end that is connected."""
    _open.add(end)


def closed(end: Any) -> None:
    """Forgets it."""
    _open.discard(end)


@atexit.register
def _close_all() -> None:
    # A forked child has no ends of its parent's.
    if os.getpid() != _pid:
        return
    for end in list(_open):
        try:
            end.shutdown()
        except Exception:
            logger.exception("%r was not shut down", end)


def _in_child() -> None:
    global _pid
    _pid = os.getpid()
    _open.clear()


os.register_at_fork(after_in_child=_in_child)
