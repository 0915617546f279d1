"""An engine that restarts joins its trainer before it serves: it never serves its checkpoint.

The trainer writes a file for each engine, which holds what the engine needs to join. The variable
``WEIGHTSYNC_ENGINE_INFO`` of the engine's environment names that file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from typing import TYPE_CHECKING

from weightsync import _files
from weightsync.errors import LoadError, OperatingSystemError, SettingError
from weightsync.engines._request import WorkerRequest

if TYPE_CHECKING:
    from weightsync.engines._worker import EngineWorker

logger = logging.getLogger("weightsync")

#: Names the file.
VARIABLE = "WEIGHTSYNC_ENGINE_INFO"
# No file is longer.
_LONGEST = 1 << 20
_FIELDS = {"sender", "first_worker", "ranks", "timeout"}


def write(path: str, sender: str, first_worker: int, ranks: int, timeout: float) -> None:
    """Writes the file, whole or not at all. The mode lets its owner alone read it: it holds the
    sender's secret.

    Raises:
        OperatingSystemError: if it cannot be written.
        SettingError: if what is there is no such file: it stays.
    """
    info = {"sender": sender, "first_worker": first_worker, "ranks": ranks, "timeout": timeout}
    try:
        with contextlib.suppress(FileNotFoundError):
            # What a trainer has written is replaced, and an empty file, but nothing else.
            if there := _files.read(path, _LONGEST):
                _parsed(path, there)
        # Made with the mode 0600.
        opened, new = tempfile.mkstemp(dir=os.path.dirname(path) or ".", prefix=".weightsync-")
        try:
            with open(opened, "w", encoding="utf-8") as file:
                json.dump(info, file)
            os.replace(new, path)
        except BaseException:
            # It has the secret.
            os.unlink(new)
            raise
    except OSError as error:
        raise OperatingSystemError(f"the engine's info file cannot be written: {error}") from error


def begin(worker: EngineWorker) -> None:
    """Loads the newest version, if the engine was told of a trainer.

    Raises:
        LoadError: in one line, if it was, and has no version of it: the engine then does not start.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return
    try:
        request = _read(path)
        if request is None:
            logger.warning(
                "%s is not there yet (%s): the engine begins with its checkpoint", path, VARIABLE
            )
            return
        worker.begin(request)
    except Exception as error:
        said = " ".join(str(error).split())
        raise LoadError(
            f"the engine does not start without its trainer's newest version: {said} "
            f"({VARIABLE}={path}; remove this file to start with the checkpoint)"
        ) from None


def _read(path: str) -> WorkerRequest | None:
    try:
        return _parsed(path, _files.read(path, _LONGEST))
    except FileNotFoundError:
        return None


def _parsed(path: str, text: bytes) -> WorkerRequest:
    try:
        info = json.loads(text)
    except ValueError:
        info = None
    if not isinstance(info, dict) or info.keys() != _FIELDS:
        fields = ", ".join(sorted(_FIELDS))
        raise SettingError(f"{path} is no info file of an engine, an object with {fields}")
    return WorkerRequest("join", **info)
