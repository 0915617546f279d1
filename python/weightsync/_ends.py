"""Open senders and receivers, which a program closes as it ends."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

from weightsync._calls import in_thread
from weightsync.errors import LifecycleError, SenderClosedError

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


# Senders and receivers that were made and are not connected.
_unconnected: weakref.WeakSet[Any] = weakref.WeakSet()

_BOTH_HERE = (
    "both ends are in this process, which has one thread, so each would wait for the other: call "
    "`sender.connect(0)`, which waits for no worker, and then `receiver.connect()`; or start the worker "
    "in a process or a thread of its own"
)


def made(end: Any) -> None:
    """Remembers an end that has yet to be connected."""
    _unconnected.add(end)


def refuse_lone_sender(info: Any, workers: Any) -> None:
    """Refuses to wait for workers that only this thread could connect.

    Raises:
        LifecycleError: if they are as many as are wanted, and no other process or thread could be one.
    """
    if not isinstance(workers, int) or workers < 1:
        return
    here = [one for one in list(_unconnected) if getattr(one, "worker", None) is not None]
    if sum(one.info == info for one in here) != workers or not _is_alone():
        return
    if info.scheme.startswith(("shared-mem", "multi-process")):
        raise LifecycleError(f"connect: {_BOTH_HERE}")
    # Workers of other machines may come.
    logger.warning("connect: if these are the workers, %s", _BOTH_HERE)


def refuse_lone_receiver(info: Any) -> None:
    """Refuses to wait for a sender that only this thread could connect.

    Raises:
        LifecycleError: if that is so.
    """
    senders = [one for one in list(_unconnected) if getattr(one, "worker", None) is None]
    if any(one.init_info == info for one in senders) and _is_alone():
        raise LifecycleError(f"connect: {_BOTH_HERE}")


def _is_alone() -> bool:
    """Whether this thread is all that runs Python here, and the process has no children."""
    if threading.active_count() > 1:
        return False
    try:
        # It takes nothing from the child, if there is one.
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def opened(end: Any) -> None:
    """Remembers an end that is connected."""
    _open.add(end)
    _unconnected.discard(end)


def closed(end: Any) -> None:
    """Forgets an end that has shut down."""
    _open.discard(end)
    _unconnected.discard(end)


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
        await in_thread(lambda: leave(self, kind, error, traceback), leaves=True)


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
    _unconnected.clear()


os.register_at_fork(after_in_child=_in_child)
