"""What differs between vLLM's versions. Nothing else in this package asks for a version.

| vLLM | how weights get in | what is left out |
|---|---|---|
| before 0.17 | not at all: its ``LLM`` cannot be paused | |
| 0.17-0.23 | ``collective_rpc`` and a worker extension | labels, restarts, sleep |
| 0.24 | the same | labels, restarts |
| 0.25-0.27 | the backend | labels |
| 0.28-0.33 | the backend | |

From 0.22 on vLLM takes backends of other packages, but up to 0.24 it tells them neither the
model's configuration nor the device. Up to 0.23 an engine that wakes generates as soon as its
weights have memory again, before anybody can load them.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from weightsync.errors import UnsupportedError

#: The oldest version whose ``LLM`` can be paused, and whose workers take an extension.
OLDEST = (0, 17)
#: From here an engine that wakes generates once all of it is awake.
SLEEP = (0, 24)
#: From here the worker's engine is given the whole configuration, and owns start and finish.
BACKEND = (0, 25)
#: From here an engine has a label for its weights, and requests carry it.
LABELS = (0, 28)
#: The newest version whose interface was read.
NEWEST = (0, 33)


class Interface(NamedTuple):
    """How one engine is spoken to."""

    #: Through the backend; else through the worker extension.
    backend: bool
    #: Whether it takes the version's label.
    labels: bool
    #: Whether it can be brought a version between its wake and its first answer.
    sleeps: bool


def interface(version: str) -> Interface:
    """The interface of a vLLM version.

    Raises:
        UnsupportedError: if it is too old.
    """
    number = parse(version)
    if number < OLDEST:
        raise UnsupportedError(_too_old(version))
    return Interface(number >= BACKEND, number >= LABELS, number >= SLEEP)


def parse(version: str) -> tuple[int, int]:
    """Major and minor version."""
    found = re.match(r"v?(\d+)\.(\d+)", version)
    if found is None:
        raise UnsupportedError(f"vLLM's version is {version!r}: expected one such as 0.32.0")
    return int(found[1]), int(found[2])


def concern(version: str) -> str | None:
    """Why this version may not work with a backend, in one line; None if it should."""
    number = parse(version)
    if number < OLDEST:
        return _too_old(version)
    if number < BACKEND:
        return (
            f"vLLM {version} tells a backend too little to load: upgrade it to "
            f"{_text(BACKEND)} or newer, or use "
            'worker_extension_cls="weightsync.vllm.extension.WorkerExtension"'
        )
    if number > NEWEST:
        return (
            f"vLLM {version} is newer than {_text(NEWEST)}, the newest that this weightsync "
            "knows: if updates fail, upgrade weightsync"
        )
    return None


def _too_old(version: str) -> str:
    return f"vLLM {version} is too old: weightsync needs {_text(OLDEST)} or newer"


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
