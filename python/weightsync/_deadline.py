"""The end of a wait that takes several steps."""

from __future__ import annotations

import threading
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
        try:
            seconds = None if timeout is None else float(timeout)
        except (TypeError, ValueError):
            seconds = -1.0
        if isinstance(timeout, str) or (seconds is not None and not seconds >= 0):
            raise SettingError(f"timeout: expected seconds from 0 on, or None, got {timeout!r}")
        self.timeout = timeout
        # Python's locks take no longer timeout. The end of this one is no wait's either.
        is_endless = seconds is None or seconds > threading.TIMEOUT_MAX / 2
        self._until = None if is_endless else time.monotonic() + (seconds or 0.0)

    def left(self) -> float | None:
        """The seconds until then, at least 0."""
        return None if self._until is None else max(0.0, self._until - time.monotonic())
