"""The answers of a synchronizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Need:
    """Whether a party is to synchronise: true in ``if``."""

    #: ``"no"``; ``"yes"``: when it can; ``"must"``: before its next step.
    word: Literal["no", "yes", "must"]
    #: The explorers that ask for a version, for a trainer.
    asked_by: tuple[str, ...]
    #: The newest version that can be had; 0 if there is none.
    newest: int
    #: Whether the trainer has stopped in order: nothing newer comes.
    trainer_stopped: bool
    #: Whether the synchronizer has answered. Without an answer the word is ``"no"``.
    connected: bool

    def __bool__(self) -> bool:
        return self.word != "no"

    @property
    def must(self) -> bool:
        """Whether the party synchronises before its next step, or stops."""
        return self.word == "must"


@dataclass(frozen=True)
class Synced:
    """How an explorer's sync has ended: true in ``if`` when it runs a new version."""

    #: ``"synced"``, ``"nothing newer"``, ``"out of reach"``, ``"failed"``, ``"timed out"``,
    #: ``"cancelled"``, ``"left"`` or ``"the trainer left"``.
    ended: str
    #: The version that the explorer runs: the one that it has verified and loaded; 0 before the first.
    version: int
    #: The trainer's step that made that version, if it is known.
    step: int | None
    #: How many versions are newer.
    versions_behind: int
    #: How many steps the trainer has made since.
    steps_behind: int
    #: Why it failed.
    reason: str | None
    #: Seconds from the call to the loaded version.
    seconds: float
    #: Bytes of the weights that were loaded.
    bytes: int = 0
    #: How many bytes this process has moved since its sync before, over a network or out of a store, as
    #: they were encoded. None if the weights came through memory of this host; after
    #: :meth:`Explorer.load`, and if the trainer of a store is gone, since those read the store itself;
    #: and if nothing was loaded.
    travelled: int | None = None

    def __bool__(self) -> bool:
        return self.ended == "synced"

    def __str__(self) -> str:
        version = f"v{self.version}" if self.version else "no version"
        parts = [version if self else f"{self.ended}: still {version}"]
        if self and self.bytes:
            travelled = self.travelled
            of_it = "" if travelled is None else f" of which {_bytes(travelled)} travelled"
            parts.append(_bytes(self.bytes) + of_it)
        if self:
            parts.append(_duration(self.seconds))
        if self.steps_behind:
            parts.append(f"{self.steps_behind} step{'s' * (self.steps_behind > 1)} stale")
        return ", ".join(parts) + (f" ({self.reason})" if self.reason else "")


@dataclass(frozen=True)
class ExplorerLine:
    """An explorer, as the trainer sees it."""

    name: str
    #: ``"STOPPED"``, ``"RUNNING"``, ``"REQUIRE_SYNC"`` or ``"WAITING_SYNC"``.
    state: str
    #: How many steps it has made.
    step: int
    #: The version that it has verified and loaded.
    version: int
    #: How its last sync ended; None before the first.
    ended: str | None
    #: Why that failed.
    reason: str | None


@dataclass(frozen=True)
class Trained:
    """How a trainer's sync has ended: true in ``if`` when the version can be had."""

    #: As :attr:`Synced.ended`.
    ended: str
    #: The version that was published or sent.
    version: int
    #: The step that made it.
    step: int
    #: The explorers to which it was sent; with other methods than ``"nccl"``, all that are there.
    explorers: tuple[ExplorerLine, ...] = field(repr=False)
    #: Why it failed.
    reason: str | None
    #: Seconds that the call took.
    seconds: float

    def __bool__(self) -> bool:
        return self.ended == "synced"

    def __str__(self) -> str:
        text = f"v{self.version} of step {self.step}: {self.ended}, {_duration(self.seconds)}"
        if self.reason:
            text += f" ({self.reason})"
        for line in self.explorers:
            text += f"\n  {line.name}: v{line.version}, {line.state}"
            text += f" ({line.reason})" if line.reason else ""
        return text


def _bytes(count: int) -> str:
    for size, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= size:
            return f"{_short(count / size)} {unit}"
    return f"{count} B"


def _duration(seconds: float) -> str:
    return f"{_short(seconds)} s" if seconds >= 1 else f"{_short(1000 * seconds)} ms"


def _short(number: float) -> str:
    # Three digits of 999.5 and more would have an exponent.
    return f"{number:.3g}" if number < 999.5 else f"{number:.0f}"
