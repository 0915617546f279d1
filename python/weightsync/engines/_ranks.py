"""The ranks of one engine agree on what became of a call: all of them fail, or none."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

from weightsync.errors import DeadlineError

#: What a rank's model holds: a run and a version of it.
Holds = tuple[Any, int] | None

# Bytes of a rank's words that the others see, and of what stands for what it holds.
_WORDS = 400
_MARK = 16
# How a rank is.
_WELL, _FAILED = 1, 2


class Group(Protocol):
    """An engine's group of its ranks, as vLLM and SGLang have it."""

    world_size: int
    rank_in_group: int
    #: A process group of torch.
    cpu_group: Any


class Ranks:
    """The workers of one engine, by the engine's own group of them.

    Args:
        group: returns that group; None if there is one rank.
        everywhere: whether a call that fails raises on each rank; else on the last alone.
    """

    def __init__(
        self, group: Callable[[], Group | None], *, everywhere: bool = False
    ) -> None:
        self._group = group
        self._everywhere = everywhere
        # Why they can agree on nothing any more.
        self._broken: str | None = None

    @property
    def count(self) -> int:
        """How many agree with each other."""
        group = self._group()
        return 1 if group is None else int(group.world_size)

    def agree(self, failed: str | None, timeout: float, holds: Holds = None) -> str | None:
        """What went wrong on any rank, in words; None if nothing did, and all hold the same.

        Every rank calls this, with what went wrong on it and what it holds. A rank that does not
        call it within ``timeout`` seconds is a failure of this call and all later ones.
        """
        group = self._group()
        if group is None:
            return failed
        import torch

        said = torch.zeros(group.world_size, 1 + _MARK + _WORDS, dtype=torch.uint8, device="cpu")
        said[group.rank_in_group] = _row(failed, holds)
        return self._largest(said, group, timeout) or _failures(said)

    def newest(self, version: int, timeout: float) -> int:
        """The newest of the versions that the ranks have. Every rank calls this.

        Raises:
            DeadlineError: if not all do within ``timeout`` seconds.
        """
        group = self._group()
        if group is None:
            return version
        import torch

        newest = torch.tensor([version], device="cpu")
        if broken := self._largest(newest, group, timeout):
            raise DeadlineError(broken)
        return int(newest[0])

    def fail(self, error: Exception) -> None:
        """Raises on the last rank alone, unless all are to.

        vLLM reads its workers' answers in order and stops at the first failure: an answer after
        that would be taken for that of the next call.
        """
        group = self._group()
        last = group is None or group.rank_in_group == group.world_size - 1
        if last or self._everywhere:
            raise error

    def _largest(self, said: Any, group: Any, timeout: float) -> str | None:
        """Makes each element the largest of all ranks'; why not, if that fails."""
        import torch.distributed as dist

        if self._broken is not None:
            return self._broken
        why = f"not all have answered in {timeout:g} s"
        try:
            work = dist.all_reduce(
                said, op=dist.ReduceOp.MAX, group=group.cpu_group, async_op=True
            )
            if work.wait(timedelta(seconds=timeout)) is not False:
                return None
        except RuntimeError as error:
            why = (str(error).splitlines() or [why])[0]
        self._broken = f"this engine's ranks cannot agree any more: {why}; restart the engine"
        return self._broken


def _row(failed: str | None, holds: Holds) -> Any:
    """What one rank says."""
    import torch

    words = failed or ("its first weights" if holds is None else f"version {holds[1]}")
    mark = hashlib.blake2s(repr(holds).encode(), digest_size=_MARK).digest()
    state = bytes([_WELL if failed is None else _FAILED])
    text = (state + mark + words.encode()[:_WORDS]).ljust(1 + _MARK + _WORDS, b"\0")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _failures(said: Any) -> str | None:
    """What all ranks together say: the failures, or who holds what if they differ."""
    rows = [bytes(row.tolist()) for row in said]
    words = [row[1 + _MARK :].rstrip(b"\0").decode(errors="replace") for row in rows]
    failed = [f"rank {rank}: {words[rank]}" for rank, row in enumerate(rows) if row[0] == _FAILED]
    if failed:
        return "; ".join(failed)
    if len({row[1 : 1 + _MARK] for row in rows}) > 1:
        held = ", ".join(f"rank {rank} {one}" for rank, one in enumerate(words))
        return f"the ranks do not hold the same: {held}"
    return None
