"""One call of an end at a time, whichever thread makes it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from weightsync._deadline import Deadline
from weightsync.errors import DeadlineError, LifecycleError


class Turns:
    """Gives each call of an end its turn. A call waits for it no longer than its timeout."""

    def __init__(self) -> None:
        # A signal's handler may come back to this in the same thread.
        self._lock = threading.RLock()
        # The call that has its turn, and its thread.
        self._holder: tuple[str, int] | None = None

    @contextlib.contextmanager
    def take(self, call: str, timeout: float | None) -> Iterator[float | None]:
        """Waits for the turn of a call, which has what is left of its timeout.

        Raises:
            DeadlineError: naming the call of another thread that has its turn until then.
            LifecycleError: if this thread is in a call already.
        """
        left, until = timeout, Deadline(timeout)
        if not self._lock.acquire(blocking=False):
            before = until.left()
            if not self._lock.acquire(timeout=-1 if before is None else before):
                raise busy(call, *(self._holder or ("a call", 0)), timeout or 0.0)
            left = until.left()
        try:
            if self._holder is not None:
                raise LifecycleError(
                    f"{call}: this thread is already in {self._holder[0]} of this end: let that call "
                    "return first"
                )
            try:
                self._holder = call, threading.get_ident()
                yield left
            finally:
                self._holder = None
        finally:
            self._lock.release()


def busy(call: str, other: str, thread: int, timeout: float) -> DeadlineError:
    """The error of a call whose turn did not come: another thread is in a call of the same end.

    Args:
        thread: that thread's number.
    """
    names = {one.ident: one.name for one in threading.enumerate()}
    return DeadlineError(
        f"{call}: for all of {timeout:g} s the thread {names.get(thread, thread)!r} was in {other} of this "
        "end, which makes one call at a time: call again when that has returned, or give a longer timeout",
        "retry",
    )
