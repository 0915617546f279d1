"""Files that others name: read only if they are regular, and no more than is expected."""

from __future__ import annotations

import os
import shutil
import stat
import weakref
from pathlib import Path
from typing import Any, BinaryIO

from weightsync.errors import OperatingSystemError


def opened(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file. Anything else is refused, and not waited for: a pipe, a device.

    Raises:
        OSError: naming the file; an :class:`OperatingSystemError` if it is none.
    """
    found = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise OperatingSystemError(f"{os.fspath(path)} is not a regular file")
    return open(found, "rb")


def read(path: str | os.PathLike[str], most: int) -> bytes:
    """The bytes of a regular file.

    Raises:
        OSError: as :func:`opened`; an :class:`OperatingSystemError` if it has more bytes.
    """
    with opened(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OperatingSystemError(f"{os.fspath(path)} has more than {most} bytes")
    return data


def removed_with(owner: Any, folder: Path) -> weakref.finalize[..., Any]:
    """Has a folder removed with an object, or at the program's end, or by a call of what is returned.

    A process that was forked has the object, too, and not the folder.
    """
    return weakref.finalize(owner, remove, folder, os.getpid())


def remove(folder: Path, process: int) -> None:
    """Removes a folder that this process made, and leaves it where it was forked since."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
