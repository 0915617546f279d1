"""Processes that are to become workers: a wait ends as soon as one of them has failed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from weightsync.errors import PeerError, WrongTypeError


class Watched:
    """Processes of :mod:`multiprocessing` or :mod:`subprocess`, checked during a wait."""

    def __init__(self, processes: Iterable[Any]) -> None:
        self._processes = list(processes)
        for process in self._processes:
            if not hasattr(process, "exitcode") and not hasattr(process, "poll"):
                raise WrongTypeError(
                    "processes: expected processes of multiprocessing or subprocess, got "
                    f"{process!r}"
                )

    def check(self) -> None:
        """Checks all processes.

        Raises:
            PeerError: if some have failed, naming them, or if all have ended.
        """
        ended = [(process, _code(process)) for process in self._processes]
        failed = [_named(process, code) for process, code in ended if code]
        if failed:
            raise PeerError(
                f"{', '.join(failed)}, so not all workers can join: see its output above, "
                "fix the cause, and start it again",
                "give up",
            )
        if ended and all(code is not None for _, code in ended):
            raise PeerError(
                f"all {len(ended)} processes have ended, in order, and not all workers have "
                "joined: do they call connect with this init info?",
                "give up",
            )


def _code(process: Any) -> int | None:
    """The exit code: 0 for an orderly end, below 0 for a signal; None while the process runs."""
    code: int | None = process.exitcode if hasattr(process, "exitcode") else process.poll()
    return code


def _named(process: Any, code: int) -> str:
    how = f"with exit code {code}" if code > 0 else f"by signal {-code}"
    name = getattr(process, "name", "a process")
    return f"{name} (pid {process.pid}) ended {how}"
