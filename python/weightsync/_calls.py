"""Calls that wait, in threads of their own, for code that runs in an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


class _Cancelled(Exception):
    """Ends a call whose task was cancelled."""


class _Watching(threading.local):
    """What a call of this thread looks at while it waits."""

    watch: Callable[[], None] | None = None


_watching = _Watching()


def watching() -> Callable[[], None] | None:
    """What ends the waits of this thread's calls, for a task that was cancelled."""
    return _watching.watch


async def in_thread(
    call: Callable[[], _T],
    stop: Callable[[], None] | None = None,
    *,
    leaves: bool = False,
    unwanted: Callable[[_T], None] | None = None,
) -> _T:
    """Makes a call in a thread of its own. Cancelling the task ends what the call waits for.

    The threads of :func:`asyncio.to_thread` are few: calls that wait would take them all.

    Args:
        stop: ends waits of the call that do not look whether the task was cancelled.
        leaves: whether a cancelled task leaves the call alone, which then ends by its own timeout.
        unwanted: what becomes of the result of a call whose task was cancelled.
    """
    over = threading.Event()

    def watch() -> None:
        if over.is_set():
            raise _Cancelled

    loop = asyncio.get_running_loop()
    made: asyncio.Future[_T] = loop.create_future()
    context = contextvars.copy_context()

    def say(tell: Callable[[Any], None], what: Any) -> None:
        def told() -> None:
            if not made.done():
                tell(what)

        # The loop may have been closed.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(told)

    def run() -> None:
        _watching.watch = watch
        try:
            done = context.run(call)
        except BaseException as error:
            say(made.set_exception, error)
        else:
            say(made.set_result, done)

    threading.Thread(target=run, name="weightsync-call", daemon=True).start()
    try:
        return await asyncio.shield(made)
    except asyncio.CancelledError:
        over.set()
        if not leaves:
            await _ended(made, stop, unwanted)
        raise


async def _ended(
    made: asyncio.Future[_T],
    stop: Callable[[], None] | None,
    unwanted: Callable[[_T], None] | None,
) -> None:
    """Waits for the end of a call whose result nobody takes."""
    stopping: threading.Thread | None = None
    while not made.done():
        # The call may be about to begin what this ends.
        if stop is not None and not (stopping and stopping.is_alive()):
            stopping = threading.Thread(target=stop, name="weightsync-stop", daemon=True)
            stopping.start()
        await asyncio.wait([made], timeout=None if stop is None else 0.1)
    # Looked at, an exception is not reported.
    if not made.cancelled() and made.exception() is None and unwanted is not None:
        threading.Thread(target=unwanted, args=(made.result(),), name="weightsync-stop").start()
