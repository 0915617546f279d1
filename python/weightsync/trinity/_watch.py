"""Hears of files that are written to a folder."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from collections.abc import Callable
from pathlib import Path

# File systems of one host.
_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay"}


class Watch:
    """Calls a function when a file of a folder has been written."""

    _CLOSE_WRITE_OR_MOVED_TO = 0x8 | 0x80

    def __init__(self, folder: Path, look: Callable[[], None]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        libc = ctypes.CDLL(None)
        self._look = look
        self.loop = asyncio.get_running_loop()
        self._descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        watch = -1
        if self._descriptor >= 0:
            watch = libc.inotify_add_watch(
                self._descriptor, os.fsencode(folder), self._CLOSE_WRITE_OR_MOVED_TO
            )
            self.loop.add_reader(self._descriptor, self._written)
        # Otherwise somebody has to look: the system may have no more of these, and does not say what
        # another host writes to a network file system.
        self.sees_all = watch >= 0 and _is_local(folder)

    def _written(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._descriptor, 65536)
        self._look()

    def close(self) -> None:
        if self._descriptor >= 0:
            if not self.loop.is_closed():
                self.loop.remove_reader(self._descriptor)
            os.close(self._descriptor)


def _is_local(folder: Path) -> bool:
    """Whether only this host writes to the file system of a folder."""
    found = ("", "")
    # Device, mount point and kind; a space of a mount point is \\040.
    for line in Path("/proc/mounts").read_text().splitlines():
        point, kind = line.split(" ")[1:3]
        point = point.replace("\\040", " ")
        if folder.resolve().is_relative_to(point) and len(point) >= len(found[0]):
            found = (point, kind)
    return found[1] in _LOCAL
