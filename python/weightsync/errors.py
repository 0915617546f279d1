"""The package's exceptions: one class for each kind of failure.

A message says what happened, what was expected, and what to do. ``remedy`` is the last in a
word: ``"retry"`` (the same call may succeed later), ``"reconnect"`` (open this end again from
the init info; weights already held stay valid) or ``"give up"`` (change something first).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightsync._native import Report

__all__ = [
    "CorruptError",
    "DeadlineError",
    "LifecycleError",
    "LoadError",
    "MissingModelError",
    "MissingTensorError",
    "ModelError",
    "NotAppliedError",
    "PeerError",
    "SendError",
    "SenderClosedError",
    "SettingError",
    "OperatingSystemError",
    "UnsupportedError",
    "WeightsyncError",
    "WorkerError",
    "WrongTypeError",
    "WrongWeightsError",
]


class WeightsyncError(Exception):
    """Any error of this package."""

    remedy: str

    def __init__(self, message: str, remedy: str = "give up") -> None:
        super().__init__(message)
        self.remedy = remedy

    def __str__(self) -> str:
        # KeyError would put the message in quotation marks.
        return Exception.__str__(self)

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (str(self), self.remedy)


class DeadlineError(WeightsyncError, TimeoutError):
    """A worker, the sender, a slot or a file was not ready by the deadline."""


class PeerError(WeightsyncError, ConnectionError):
    """The other end died, refuses this one, or does not follow the protocol."""


class WorkerError(PeerError, RuntimeError):
    """A collector's worker has failed, or none is left. It is also of the class of the worker's own error
    where that is one of Python's, or of the nearest class of Python's above it.
    """


class SenderClosedError(PeerError):
    """The sender has shut down in order: the usual end of a worker's loop."""


class WrongWeightsError(WeightsyncError, ValueError):
    """The weights do not fit the model; the message lists the tensors."""


class WrongTypeError(WeightsyncError, TypeError):
    """A value of a type that cannot be used here, such as a tensor that cannot be sent."""


class LoadError(WeightsyncError, RuntimeError):
    """A worker's model raised an error as a version was loaded; ``__cause__`` is that error."""


class ModelError(WeightsyncError, LookupError):
    """There is no such model or version, or the call does not say which model."""


class MissingModelError(ModelError, KeyError):
    """There is no model of that name."""

    @classmethod
    def among(cls, name: str, known: Iterable[str]) -> MissingModelError:
        """The error for a name that is not among the known ones."""
        return cls(f"there is no model {name!r}; there is {', '.join(known) or 'none'}")


class MissingTensorError(ModelError, KeyError):
    """A snapshot has no tensor of that name."""


class SendError(WeightsyncError, RuntimeError):
    """A send that cannot be made as requested. Nothing was sent."""


class NotAppliedError(WeightsyncError, RuntimeError):
    """Not every worker has applied the version, or no worker is there; ``report`` has the lines."""

    report: Report | None = None


class LifecycleError(WeightsyncError, RuntimeError):
    """A call that does not fit the state of its end, or is made by the wrong end."""


class UnsupportedError(WeightsyncError, NotImplementedError):
    """The scheme cannot do this."""


class SettingError(WeightsyncError, ValueError):
    """A setting, a scheme or an init info that is not valid."""


class CorruptError(WeightsyncError, RuntimeError):
    """Bytes that differ from those sent. The worker keeps the version before."""


class OperatingSystemError(WeightsyncError, OSError):
    """The operating system refused something: a file, memory, an address."""
