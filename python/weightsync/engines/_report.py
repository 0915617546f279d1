"""What became of a sync, engine by engine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class EngineReport:
    """One engine's line."""

    #: Its URL, or what kind of engine it is and its place in the list.
    engine: str
    #: "updated"; "kept old": it generates with the version it had; "not resumed": its weights
    #: are whole, and it may still be paused; "held": it stays paused, because nobody knows that
    #: its weights are whole; "dead"; "asleep": ``Trainer.wake`` wakes it with the newest version.
    outcome: str
    #: The version it has; None if that is not known, or if it has the weights it began with.
    version: int | None
    #: Bytes that brought this version to each host: what changed where the host had the
    #: version before, else all of it.
    bytes: int
    #: For how long it did not generate, in seconds; None if it was not paused.
    pause: float | None
    #: From the send to the end of this engine's update, in seconds.
    took: float
    #: What went wrong, if anything did.
    reason: str | None = None

    @property
    def synced(self) -> bool:
        """Whether the engine generates with the version of this sync."""
        return self.outcome == "updated"

    def __str__(self) -> str:
        has = "the weights it had" if self.version is None else f"v{self.version}"
        if self.synced:
            paused = "" if self.pause is None else f", paused for {_seconds(self.pause)}"
            text = f"{self.engine}: {has}, {_size(self.bytes)}{paused}"
        else:
            with_ = f" ({has})" if self.outcome in ("kept old", "not resumed") else ""
            text = f"{self.engine}: {self.outcome}{with_}"
        return text if self.reason is None else f"{text}: {self.reason}"


@dataclass(frozen=True)
class SyncReport:
    """What became of one version on every engine; printing it prints a line for each."""

    #: The version that was sent.
    version: int
    engines: list[EngineReport]

    @property
    def all_synced(self) -> bool:
        """Whether there is an engine, and all of them generate with this version."""
        return bool(self.engines) and not self.failed

    @property
    def failed(self) -> list[EngineReport]:
        """The lines of the engines that do not generate with this version."""
        return [one for one in self.engines if not one.synced]

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "text": str(self),
            "version": self.version,
            "all_synced": self.all_synced,
            "engines": [asdict(one) for one in self.engines],
        }

    def __str__(self) -> str:
        synced = len(self.engines) - len(self.failed)
        head = f"v{self.version} is on {synced} of {len(self.engines)} engines"
        return "\n".join([head, *(f"  {one}" for one in self.engines)])


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _size(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
