"""A worker's end."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from weightsync import _ends, _paths
from weightsync._native import InitInfo, Session
from weightsync._target import Target, target_of
from weightsync.background import Background
from weightsync.errors import LifecycleError, ModelError
from weightsync.snapshot import Snapshot

#: Whether a module's larger parameters lie in the version itself, or are copied.
Mode = Literal["bind", "copy"]


class Receiver:
    """A worker's end: receives what the sender of an init info sends.

    Making it communicates nothing; :meth:`connect` is the rendez-vous and delivers
    the initial weights. With a model, versions are loaded into it, inside the calls
    of this class only; without one they come as :class:`Snapshot`.

    Args:
        info: the sender's init info, also as JSON text.
        worker: this worker's number.
        model: where weights go: a torch module, a TensorDict, or a dict of tensors or
            numpy arrays. A module without shapes (lazy, or on the meta device) takes
            the sender's.
        models: several by name, or, with ``context``, their paths.
        context: where paths begin.
        mode: ``"bind"``: a module's parameters from 64 KiB on lie in the version
            itself, without a copy; what the worker writes into them is its own and is
            gone with the next version. ``"copy"``: everything is copied.
        device: where this worker runs its models, for the sender's information.
    """

    def __init__(
        self,
        info: InitInfo | str,
        worker: int = 0,
        *,
        model: Any = None,
        models: Mapping[str, Any] | Sequence[str] | None = None,
        context: Any = None,
        mode: Mode = "bind",
        device: Any = "cpu",
    ) -> None:
        info = InitInfo.from_json(info) if isinstance(info, str) else info
        self._pid = os.getpid()
        self._worker = worker
        self._targets = _targets(info, model, models, context, mode)
        # What is loaded into must live as long as this.
        self._kept = (model, models, context)
        wanted = list(self._targets) if self._targets else None
        if self._targets is None and models is not None:
            wanted = list(models)
        self._session = Session.prepare_receiver(info, worker, wanted, str(device))
        self._background: Background | None = None

    def connect(self, *, timeout: float | None = 60.0) -> None:
        """Joins the sender, waiting for it if need be, and takes the initial weights.

        Raises:
            DeadlineError: if the sender, or its first version, is not there in time.
            WrongWeightsError: naming each tensor that does not fit; the sender knows.
        """
        pairs = None if self._targets is None else self._pairs()
        self._session.connect_receiver(pairs, timeout)
        _ends.opened(self)

    def receive(self, timeout: float | None = None) -> Any:
        """Waits for a version this worker has not had; None if the timeout comes first.

        Args:
            timeout: in seconds; 0 looks only; None waits for a version, the sender's
                death or its shutdown.

        Returns:
            With models of one's own, their versions (an int for one, a dict by name for
            several); else a :class:`Snapshot`, or a dict of them.

        Raises:
            SenderClosedError: the sender has shut down: the usual end of the loop.
            PeerError: it died. With a run directory the next call waits for its successor.
            LoadError: the model could not take it, and has the version it had.
        """
        if self._targets is not None:
            return self._versions(self._session.receive_into(self._pairs(), timeout))
        return self._snapshots(self._session.receive(timeout))

    def pull(
        self,
        version: int | None = None,
        *,
        at_least: int | None = None,
        model: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Asks for the newest version, for exactly one, or for at least one.

        Returns:
            As :meth:`receive`.
        """
        # A scheme that carries nothing has no models, and says so itself.
        name = model or next(iter(self.models), "")
        if self._targets is not None:
            versions = self._session.pull_into(self._pairs(), name, version, at_least, timeout)
            return self._versions(versions)
        return self._snapshots(self._session.pull(name, version, at_least, timeout))

    def latest(self) -> Any:
        """The newest at once, also if this worker has had it: a :class:`Snapshot`."""
        return self._snapshots(self._session.latest())

    def start_background(self, safe_points: Literal["implied", "declared"] = "implied") -> Background:
        """Hands receiving to a thread of its own; the loop need not ask any more.

        A module changes whenever its forward is not running (``"implied"``), or inside
        :meth:`Background.safe_point` and :meth:`Background.wait` only (``"declared"``).
        """
        if self._targets is None:
            raise LifecycleError("a background receiver loads into models: give the receiver some")
        if safe_points not in ("implied", "declared"):
            raise ValueError(f'safe_points wants "implied" or "declared", and got {safe_points!r}')
        native = self._session.start_background(self._pairs(), safe_points == "declared")
        self._background = Background(native, self._targets, len(self._targets) == 1)
        _ends.opened(self._background)
        return self._background

    @property
    def models(self) -> list[str]:
        """The names of the models that are received."""
        return [name for name, _ in self._session.models()]

    @property
    def version(self) -> int:
        """The version this worker runs, of its first model; 0 before the first."""
        return self.versions.get(next(iter(self.models), ""), 0)

    @property
    def versions(self) -> dict[str, int]:
        """The version of each model that this worker runs."""
        return self._session.versions()

    @property
    def run(self) -> tuple[int, str]:
        """The run of these versions: its epoch and id."""
        return self._session.run()

    @property
    def worker(self) -> int:
        """This worker's number."""
        return self._worker

    def shutdown(self) -> None:
        """Tells the sender that this worker leaves. Any number of times.

        Models keep what they have, in memory of their own.
        """
        if self._background is not None:
            self._background.shutdown()
        self._session.shutdown()
        for target in (self._targets or {}).values():
            if isinstance(target, Target):
                target.release()
        _ends.closed(self)

    def __del__(self) -> None:
        # A background receiver goes on by itself, and is its own to end.
        if getattr(self, "_background", self) is not None or sys.is_finalizing():
            return
        if os.getpid() == self._pid:
            self.shutdown()

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        return f"<Receiver {self._worker}: {self._session!r}>"

    def __getstate__(self) -> Any:
        raise LifecycleError(
            "a receiver is a live end and cannot be pickled: make one from the init info there"
        )

    def _pairs(self) -> list[tuple[str, Any]]:
        assert self._targets is not None
        return list(self._targets.items())

    def _versions(self, versions: dict[str, int] | None) -> Any:
        if versions is None:
            return None
        return next(iter(versions.values())) if len(versions) == 1 else versions

    def _snapshots(self, native: Any) -> Any:
        if native is None:
            return None
        members = [Snapshot(snapshot) for snapshot, _ in native.members()]
        return members[0] if len(members) == 1 else {one.model: one for one in members}


def _targets(
    info: InitInfo,
    model: Any,
    models: Mapping[str, Any] | Sequence[str] | None,
    context: Any,
    mode: str,
) -> dict[str, Target] | None:
    if model is not None and models is not None:
        raise ModelError("give one model, or several as models={name: model}, not both")
    if model is not None:
        if len(info.models) != 1:
            raise ModelError(
                f"the sender feeds {', '.join(info.models)}: say which with models={{name: model}}"
            )
        return {info.models[0]: target_of(model, mode)}
    if models is None:
        return None
    if isinstance(models, Mapping):
        return {name: target_of(one, mode) for name, one in models.items()}
    if context is None:
        return None
    return {path: target_of(_paths.resolve(context, path), mode) for path in models}
