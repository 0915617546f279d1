"""A line of live progress on a terminal."""

from __future__ import annotations

import sys
import time

import numpy as np

#: Seconds between two lines: a person reads no faster.
_PAUSE = 0.2


class Progress:
    """Frames, their rate, the version and how old frames are, on one line of standard error.

    Args:
        wanted: whether to show it; None: if standard error is a terminal.
        total: how many frames there will be; negative: without end.
    """

    def __init__(self, wanted: bool | None, total: int) -> None:
        if wanted is None:
            wanted = sys.stderr is not None and sys.stderr.isatty()
        self._wanted, self._total = wanted, total
        self._begun = self._shown = time.monotonic()
        self._first: int | None = None
        self._width = 0

    def show(self, frames: int, version: int, versions: np.ndarray) -> None:
        """Shows the line, unless the one before is still new."""
        now = time.monotonic()
        if self._first is None:
            # The time of the first batch is that of starting, too.
            self._first, self._begun = frames, now
        done = 0 <= self._total <= frames
        if not self._wanted or (now - self._shown < _PAUSE and not done):
            return
        self._shown = now
        rate = (frames - self._first) / max(now - self._begun, 1e-9)
        of = f" of {self._total:,}" if self._total >= 0 else ""
        line = f"{frames:,}{of} frames, {rate:,.0f} frames/s" if rate else f"{frames:,}{of} frames"
        line += f", v{version}" if version else ""
        if version and versions.size:
            line += f", frames are {version - float(versions.mean()):.1f} versions old"
        sys.stderr.write("\r" + line.ljust(self._width))
        sys.stderr.flush()
        self._width = len(line)

    def end(self) -> None:
        """Ends the line."""
        if self._width:
            sys.stderr.write("\n")
            sys.stderr.flush()
            self._width = 0
