"""What differs between vLLM's versions. Nothing else in this package asks for a version.

| vLLM | how weights get in | the worker's engine is made with | start asks for a format | label |
|---|---|---|---|---|
| before 0.16 | not at all | | | |
| 0.16-0.21 | ``collective_rpc`` and a worker extension | | | no |
| 0.22-0.24 | the backend | ``config, parallel_config, model`` | yes | no |
| 0.25-0.27 | the backend | ``config, vllm_config, device, model`` | no | no |
| 0.28-0.33 | the backend | the same | no | yes |
"""

from __future__ import annotations

import re
from typing import NamedTuple

from weightsync.errors import UnsupportedError

#: The oldest version that an extension of its workers can load into.
OLDEST = (0, 16)
#: The oldest version that takes a backend of another package.
BACKEND = (0, 22)
#: From here the worker's engine is given the whole configuration, and owns start and finish.
OWNS_UPDATE = (0, 25)
#: From here an engine has a label for its weights, and requests carry it.
LABELS = (0, 28)
#: The newest version whose interface was read.
NEWEST = (0, 33)


class Interface(NamedTuple):
    """How one engine is spoken to."""

    #: Through the backend; else through the worker extension.
    backend: bool
    #: Whether start must be told that vLLM is to prepare nothing.
    start_takes_format: bool
    #: Whether finish takes the version's label.
    labels: bool


def interface(version: str) -> Interface:
    """The interface of a vLLM version.

    Raises:
        UnsupportedError: if it is too old.
    """
    number = parse(version)
    if number < OLDEST:
        raise UnsupportedError(
            f"vLLM {version} is too old: weightsync needs {_text(OLDEST)} or newer"
        )
    return Interface(
        backend=number >= BACKEND,
        start_takes_format=BACKEND <= number < OWNS_UPDATE,
        labels=number >= LABELS,
    )


def parse(version: str) -> tuple[int, int]:
    """Major and minor version."""
    found = re.match(r"v?(\d+)\.(\d+)", version)
    if found is None:
        raise UnsupportedError(f"vLLM's version is {version!r}: expected one such as 0.32.0")
    return int(found[1]), int(found[2])


def concern(version: str) -> str | None:
    """Why this version may not work with a backend, in one line; None if it should."""
    number = parse(version)
    if number < BACKEND:
        return (
            f"vLLM {version} takes no backend of another package: upgrade it to "
            f"{_text(BACKEND)} or newer, or use "
            'worker_extension_cls="weightsync.vllm.extension.WorkerExtension"'
        )
    if number > NEWEST:
        return (
            f"vLLM {version} is newer than {_text(NEWEST)}, the newest that this weightsync "
            "knows: if updates fail, upgrade weightsync"
        )
    return None


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
