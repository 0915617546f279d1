"""Ends that are open, so that a program that ends leaves none."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

from weightsync.errors import SenderClosedError

logger = logging.getLogger("weightsync")

_open: weakref.WeakSet[Any] = weakref.WeakSet()
_pid = os.getpid()

#: What a sender is told of a receiver that is collected: an exception may have unwound the
#: frames that had it.
DROPPED = "its receiver was dropped without shutdown()"

#: Why the program ends, while it does so by an exception: what its ends tell their senders.
why: str | None = None


def reason_of(error: BaseException | None) -> str | None:
    """What a sender is told of a worker that ends by this; None if it leaves in order."""
    if error is None or isinstance(error, (SenderClosedError, GeneratorExit)):
        return None
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return None
    try:
        text = str(error)
    except Exception:
        text = ""
    name = type(error).__name__
    return f"{name}: {text}" if text else name


def _uncaught() -> BaseException | None:
    """The exception that ended this program. A prompt notes the last one too, and goes on."""
    if hasattr(sys, "ps1"):
        return None
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def opened(end: Any) -> None:
    """Remembers an end that is connected."""
    _open.add(end)


def closed(end: Any) -> None:
    """Forgets it."""
    _open.discard(end)


class AsyncWith:
    """An end as ``async with``: leaving it is what leaving ``with`` is, on a thread of its own."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        leave = type(self).__exit__  # type: ignore[attr-defined]
        await asyncio.to_thread(leave, self, kind, error, traceback)


@atexit.register
def _close_all() -> None:
    # A forked child has no ends of its parent's.
    if os.getpid() != _pid:
        return
    global why
    why = reason_of(_uncaught())
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
