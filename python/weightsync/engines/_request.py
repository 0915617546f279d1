"""What a trainer asks of an engine's workers: plain data, checked once where it arrives."""

from __future__ import annotations

from dataclasses import dataclass

from weightsync.errors import SettingError

#: What a worker can be asked for.
#:
#: "join": be joined to the sender, and have a version that fits. "update": load it. "loaded": say
#: whether the last update failed. "restore": bring the last whole version back where a load left a
#: mix, and say which version that is. "forget": the engine is about to discard the weights.
#: "over": the trainer has ended its update, and the engine generates. "leave": leave the sender.
CALLS = ("join", "update", "loaded", "restore", "forget", "over", "leave")


@dataclass
class WorkerRequest:
    """One request."""

    do: str
    #: The sender's init info, as JSON text.
    sender: str = ""
    #: The worker number of this engine's rank 0.
    first_worker: int = 0
    #: How many ranks the trainer takes the engine to have; 0 if it does not say.
    ranks: int = 0
    #: The sender's run; empty if it is not known.
    run: str = ""
    #: The version of that run to have, at least.
    version: int = 0
    #: Whether the engine is paused or asleep, and not by the trainer that asks.
    asleep: bool = False
    #: In seconds.
    timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.do not in CALLS:
            raise SettingError(f"do: expected one of {', '.join(CALLS)}, got {self.do!r}")
        if not isinstance(self.sender, str):
            raise SettingError(f"sender: expected JSON text, got {self.sender!r}")
        if not isinstance(self.run, str):
            raise SettingError(f"run: expected a text, got {self.run!r}")
        if not isinstance(self.asleep, bool):
            raise SettingError(f"asleep: expected true or false, got {self.asleep!r}")
        number("first_worker", self.first_worker, int)
        number("ranks", self.ranks, int)
        number("version", self.version, int)
        number("timeout", self.timeout, (int, float))


def number(name: str, value: object, kind: type | tuple[type, ...]) -> None:
    """Checks a number that came from outside.

    Raises:
        SettingError: if it is none, or less than zero.
    """
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    if not is_number or not value >= 0:  # type: ignore[operator]
        what = "a whole number" if kind is int else "a number"
        raise SettingError(f"{name}: expected {what} from 0 on, got {value!r}")
