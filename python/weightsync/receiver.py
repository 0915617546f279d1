"""A worker's end that reads versions as snapshots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from weightsync._native import InitInfo, SetSnapshot
from weightsync._receiving import Receiving, read
from weightsync.errors import WrongTypeError
from weightsync.snapshot import Snapshot

if TYPE_CHECKING:
    from typing import Never


class Receiver(Receiving):
    """A worker's end that receives a sender's versions as snapshots.

    The constructor communicates nothing; :meth:`connect` is the rendez-vous and brings the
    initial weights. :class:`ModelReceiver` loads versions into models instead.

    Args:
        info: the sender's init info, also as JSON text.
        worker: this worker's number.
        models: the names of the models that this worker receives, if not all.
        device: where this worker runs its models, for the sender's information.
    """

    def __init__(
        self,
        info: InitInfo | str,
        worker: int = 0,
        *,
        models: Sequence[str] | None = None,
        device: object = "cpu",
        **unknown: Never,
    ) -> None:
        _check(models, unknown)
        super().__init__(read(info), worker, models, device)

    def receive(self, timeout: float | None = None) -> Snapshot | None:
        """Waits for a version that this worker has not had; None if the timeout comes first.

        The version counts as loaded: the sender's report says that the worker runs it.

        Args:
            timeout: in seconds; 0 looks only; None waits for a version, the sender's
                death or its shutdown.

        Raises:
            SenderClosedError: the sender has shut down: the usual end of the loop.
            PeerError: the sender died. With a run directory the next call waits for a new one.
            ModelError: this worker receives several models: see :meth:`receive_set`.
        """
        self._only("receive", "receive_set")
        return _one(self._session.receive(timeout))

    def __iter__(self) -> Iterator[Any]:
        """New versions as they come, until the sender shuts down: snapshots, or sets by name.

        Raises:
            PeerError: the sender died. With a run directory another loop waits for a new one.
        """
        several = len(self._models) > 1
        return self._new(self.receive_set if several else self.receive)

    def receive_set(self, timeout: float | None = None) -> dict[str, Snapshot] | None:
        """As :meth:`receive`, for any number of models: their snapshots by name."""
        return _by_name(self._session.receive(timeout))

    def pull(
        self,
        version: int | None = None,
        *,
        at_least: int | None = None,
        timeout: float | None = None,
    ) -> Snapshot | None:
        """Asks for the newest version, a given one, or one at least as new.

        Returns:
            As :meth:`receive`.
        """
        self._only("pull", "pull_set")
        return _one(self._pulled(version, at_least, None, timeout))

    def pull_set(
        self,
        version: int | None = None,
        *,
        at_least: int | None = None,
        model: str | None = None,
        timeout: float | None = None,
    ) -> dict[str, Snapshot] | None:
        """As :meth:`pull`, for any number of models: the whole set, by name.

        Args:
            model: the model that ``version`` or ``at_least`` is a version of; required for
                them if there are several models.
        """
        return _by_name(self._pulled(version, at_least, model, timeout))

    def latest(self) -> Snapshot | None:
        """The newest version at once, also if this worker has had it.

        None before the first, or while the memory of the newest is still on its way to this process.
        """
        self._only("latest", "latest_set")
        return _one(self._session.latest())

    def latest_set(self) -> dict[str, Snapshot] | None:
        """As :meth:`latest`, for any number of models: their snapshots by name."""
        return _by_name(self._session.latest())

    def _pulled(
        self, version: int | None, at_least: int | None, model: str | None, timeout: float | None
    ) -> SetSnapshot | None:
        name = self._asked(model, version, at_least)
        return self._session.pull(name, version, at_least, timeout)


def _one(native: SetSnapshot | None) -> Snapshot | None:
    return next(iter((_by_name(native) or {}).values()), None)


def _by_name(native: SetSnapshot | None) -> dict[str, Snapshot] | None:
    if native is None:
        return None
    return {one.model: Snapshot(one) for one, _ in native.members()}


def _check(models: object, unknown: Iterable[str]) -> None:
    """Refuses arguments of a model receiver, and unknown arguments."""
    for name in unknown:
        if name in ("model", "context", "mode", "mapping"):
            raise WrongTypeError(
                f"{name}: a Receiver returns snapshots and loads no model; use "
                "ModelReceiver(info, worker, model=…), or receive().load_into(model)"
            )
        raise WrongTypeError(f"Receiver has no argument {name!r}; it has models and device")
    if isinstance(models, str) or hasattr(models, "keys"):
        raise WrongTypeError(
            f"models: expected a list of names, got a {type(models).__name__}; to load into "
            "models, use ModelReceiver(info, worker, models={name: model})"
        )
