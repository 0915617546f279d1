"""The end of a wait that takes several steps."""

from __future__ import annotations

import time

from weightsync.errors import SettingError


class Deadline:
    """The end of a wait.

    Attributes:
        timeout: the seconds of the whole wait, as errors say them; None: it has no end.

    Raises:
        SettingError: unless that is a number from 0 on.
    """

    def __init__(self, timeout: float | None) -> None:
        if timeout is not None and (not isinstance(timeout, (int, float)) or not timeout >= 0):
            raise SettingError(f"timeout: expected seconds from 0 on, or None, got {timeout!r}")
        self.timeout = timeout
        self._until = None if timeout is None else time.monotonic() + timeout

    def left(self) -> float | None:
        """The seconds until then, at least 0."""
        return None if self._until is None else max(0.0, self._until - time.monotonic())
