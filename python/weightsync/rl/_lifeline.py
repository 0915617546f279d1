"""Processes that end with another one, whatever they do meanwhile."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal

#: Not in the fcntl module: which signal the kernel sends when the file changes.
_F_SETSIG = 10


def die_with(lifeline: int) -> None:
    """Has the kernel kill this process once the other end of a pipe is closed.

    The process that this one ends with alone has that end, and writes nothing. A thread could not do
    this: an environment that hangs may hold the interpreter's lock.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, _F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        # It may have died before.
        if os.read(lifeline, 1) == b"":
            os._exit(1)


class Lifeline:
    """A pipe of this process, for the processes that it starts: they end with it."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._watched, self._held = os.pipe()
        self._inode = os.fstat(self._held).st_ino

    def end_with(self) -> None:
        """In such a process: has the kernel kill it once the one that started it is gone."""
        if os.getpid() == self._pid:
            return
        with contextlib.suppress(OSError):
            # A forked process has the end that is to close. In another the number may be of a file.
            if os.fstat(self._held).st_ino == self._inode:
                os.close(self._held)
        try:
            # Opened again: whom the kernel kills is a property of each opening.
            lifeline = os.open(f"/proc/{self._pid}/fd/{self._watched}", os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            # It has died before.
            os._exit(1)
        die_with(lifeline)

    def close(self) -> None:
        """Ends the processes that are left."""
        if os.getpid() == self._pid and self._held >= 0:
            os.close(self._watched)
            os.close(self._held)
            self._held = -1
