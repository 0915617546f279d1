"""Which processes are present at an actor, which ends when the last one has gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from weightsync.ray import _cluster


class Presence:
    """The processes that are present at an async actor.

    Each one makes a call that :meth:`hold` answers when it has gone, and passes the reference of the
    answer to :meth:`watch`. The actor waits for that answer too: Ray ends this wait when the process,
    which owns the answer, has died.

    Args:
        gone: called with the key of a process that has gone.
        ended: called when the last one has gone, before the actor ends.
    """

    def __init__(self, gone: Callable[[str], None], ended: Callable[[], None]) -> None:
        self._gone, self._ended = gone, ended
        self._here: dict[str, asyncio.Event] = {}
        self._left: set[str] = set()
        self._has_ended = False
        # The event loop keeps no task alive.
        self._tasks: set[asyncio.Task[None]] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._here and key not in self._left

    async def hold(self, key: str) -> None:
        """Returns when the process has gone. The actor ends with the last one."""
        if self._has_ended:
            # The actor would wait for this call before it ends.
            return
        if key not in self._left:
            await self._here.setdefault(key, asyncio.Event()).wait()
            del self._here[key]
        if not self._here:
            self._has_ended = True
            for task in self._tasks:
                task.cancel()
            self._ended()
            _cluster.ray().actor.exit_actor()

    def watch(self, key: str, answer: Any) -> None:
        """Watches a process by the answer that :meth:`hold` owes to it."""

        async def until_gone() -> None:
            with contextlib.suppress(Exception):
                await answer
            self.leave(key)

        task = asyncio.get_running_loop().create_task(until_gone())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def leave(self, key: str) -> None:
        """Notes that a process has gone. Again for the same one it does nothing."""
        if key in self._left:
            return
        self._left.add(key)
        self._gone(key)
        # Its call of `hold` may never come.
        if (here := self._here.get(key)) is not None:
            here.set()
