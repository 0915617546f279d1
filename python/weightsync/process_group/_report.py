"""What became of a send, for each rank."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from weightsync._answers import _bytes, _duration
from weightsync.errors import NotAppliedError


@dataclass(frozen=True)
class RankReport:
    """One receiver's line of a report."""

    #: In the process group.
    rank: int
    #: The rank, its host and its pid.
    name: str
    #: ``"applied"``: its model has the version; ``"refused"``: its model is as it was.
    outcome: Literal["applied", "refused"]
    #: Why it refused.
    reason: str | None
    #: Seconds from the start of the send to its answer.
    after: float

    def __str__(self) -> str:
        text = f"{self.name}: {self.outcome} after {_duration(self.after)}"
        return text + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class Report:
    """How a send has ended, with a line for each receiver."""

    version: int
    #: The bytes of the weights.
    bytes: int
    #: Seconds that the send took.
    took: float
    ranks: tuple[RankReport, ...] = field(repr=False)

    @property
    def all_applied(self) -> bool:
        """Whether every receiver's model has the version."""
        return not self.failed

    @property
    def failed(self) -> list[RankReport]:
        """The lines of the receivers that refused the version."""
        return [line for line in self.ranks if line.outcome != "applied"]

    def ensure_applied(self) -> Report:
        """Returns this report.

        Raises:
            NotAppliedError: if a receiver has refused the version; its ``report`` is this one.
        """
        if self.all_applied:
            return self
        refused = "; ".join(map(str, self.failed))
        error = NotAppliedError(f"v{self.version} was not applied by all ranks: {refused}")
        error.report = self  # type: ignore[assignment]
        raise error

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        count = f"{len(self.ranks)} rank{'' if len(self.ranks) == 1 else 's'}"
        head = f"v{self.version}, {_bytes(self.bytes)} to {count}, {_duration(self.took)}"
        return "\n  ".join([head, *map(str, self.ranks)])
