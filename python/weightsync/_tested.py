"""The versions of other projects that this package was tested with, and a check for them.

``docs/frameworks.md`` has the same table for people, and a test compares the two.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from typing import NamedTuple

from weightsync.errors import UnsupportedError

#: Set to 1 to run with versions that were not tested.
VARIABLE = "WEIGHTSYNC_UNTESTED"


class Range(NamedTuple):
    """Versions of a project, from the oldest to the newest, both included."""

    #: The distribution, as pip knows it.
    distribution: str
    oldest: tuple[int, ...]
    newest: tuple[int, ...]
    #: Whether it was run, and not its interface read alone.
    was_run: bool

    def __str__(self) -> str:
        oldest, newest = (".".join(map(str, one)) for one in (self.oldest, self.newest))
        return oldest if oldest == newest else f"{oldest} to {newest}"


#: By the name of the adapter.
TESTED = {
    "trl": Range("trl", (1, 16), (1, 16), True),
    "verl": Range("verl", (0, 9), (0, 9), True),
    "sglang": Range("sglang", (0, 5, 23), (0, 5, 23), True),
}


def check(adapter: str) -> None:
    """Refuses a version of the adapter's project that is outside of what was tested.

    Raises:
        UnsupportedError: in one line, also if the project is not installed.
    """
    tested = TESTED[adapter]
    try:
        found = importlib.metadata.version(tested.distribution)
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedError(
            f"weightsync.{adapter} needs {tested.distribution}, which is not installed: install "
            f"{tested.distribution} {tested}"
        ) from None
    check_version(adapter, found)


def check_version(adapter: str, found: str, where: str = "is installed") -> None:
    """The same of a version that is known.

    Args:
        where: where it was found, as a line says it.
    """
    tested = TESTED[adapter]
    numbers = tuple(int(one) for one in re.findall(r"\d+", found)[: len(tested.oldest)])
    if tested.oldest <= numbers <= tested.newest or os.environ.get(VARIABLE) == "1":
        return
    raise UnsupportedError(
        f"weightsync.{adapter} was tested with {tested.distribution} {tested}, and {found} {where}: "
        f"install such a version, or set {VARIABLE}=1 to try this one"
    )
