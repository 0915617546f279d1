"""Open senders and receivers, which a program closes as it ends."""

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

#: The reason in a sender's reports for a receiver that was garbage-collected: an exception may
#: have unwound the frames that held it.
DROPPED = "its receiver was dropped without shutdown()"

#: The reason that open ends give their senders while the program ends by an exception.
why: str | None = None


def reason_of(error: BaseException | None) -> str | None:
    """The reason in a sender's reports for a worker that ends by this; None for an orderly end."""
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
    """The exception that ended this program; None at a prompt, which goes on after exceptions."""
    if hasattr(sys, "ps1"):
        return None
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def opened(end: Any) -> None:
    """Remembers an end that is connected."""
    _open.add(end)


def closed(end: Any) -> None:
    """Forgets an end that has shut down."""
    _open.discard(end)


class AsyncWith:
    """``async with`` for an end, which a thread closes while the event loop goes on."""

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
    # A forked child cannot use its parent's ends.
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
