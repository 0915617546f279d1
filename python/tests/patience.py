"""How long a test waits for what must happen, and for the end of what it started.

A limit is not a verdict: only what hangs reaches it. So each is generous, and grows with the number
of programs that want the processors.
"""

import os

# What a quiet machine needs is written down; a limit is this many times as long at least. Load that
# comes after a limit was set is covered by it too.
_GENEROUS = 4.0


def slowness() -> float:
    """How many programs want each processor now, or wanted it in the last minute; at least 1."""
    with open("/proc/loadavg") as file:
        average, _, _, running, _ = file.read().split()
    wanted = max(float(average), float(running.partition("/")[0]))
    return max(1.0, wanted / len(os.sched_getaffinity(0)))


def patience(seconds: float) -> float:
    """The limit for what takes at most `seconds` on a quiet machine."""
    return seconds * _GENEROUS * slowness()
