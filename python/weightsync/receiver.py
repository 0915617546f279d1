"""A worker's end."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast, overload

from weightsync import _ends, _paths
from weightsync._native import InitInfo, MappedTarget, Session, SetSnapshot
from weightsync._target import Target, target_of
from weightsync.background import Background
from weightsync.errors import LifecycleError, ModelError, SettingError
from weightsync.mapping import PerModel, by_model
from weightsync.snapshot import Snapshot

if TYPE_CHECKING:
    from typing import Self

#: Whether a module's larger parameters lie in the version itself, or are copied.
Mode = Literal["bind", "copy"]

#: What a version comes as: its number, where it is loaded into a model; else a snapshot.
T = TypeVar("T")


class Receiver(_ends.AsyncWith, Generic[T]):
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
        mapping: rules that make the worker's model of what is sent, in memory of this
            process; parameters are then copied, whatever the mode. A dict of them by
            name for several models. Without models, see :meth:`Snapshot.mapped`.
        device: where this worker runs its models, for the sender's information.
    """

    @overload
    def __init__(
        self: Receiver[int],
        info: InitInfo | str,
        worker: int = 0,
        *,
        model: object,
        mode: Mode = "bind",
        mapping: PerModel | None = None,
        device: object = "cpu",
    ) -> None: ...

    @overload
    def __init__(
        self: Receiver[Snapshot],
        info: InitInfo | str,
        worker: int = 0,
        *,
        device: object = "cpu",
    ) -> None: ...

    @overload
    def __init__(
        self: Receiver[Any],
        info: InitInfo | str,
        worker: int = 0,
        *,
        models: Mapping[str, Any] | Sequence[str],
        context: object = None,
        mode: Mode = "bind",
        mapping: PerModel | None = None,
        device: object = "cpu",
    ) -> None: ...

    def __init__(
        self,
        info: InitInfo | str,
        worker: int = 0,
        *,
        model: Any = None,
        models: Mapping[str, Any] | Sequence[str] | None = None,
        context: Any = None,
        mode: Mode = "bind",
        mapping: PerModel | None = None,
        device: Any = "cpu",
    ) -> None:
        info = InitInfo.from_json(info) if isinstance(info, str) else info
        self._pid = os.getpid()
        self._worker = worker
        if mapping is not None and mode == "bind":
            # What a mapping makes is this process's own: there is nothing to bind to.
            mode = "copy"
        self._targets = _targets(info, model, models, context, mode)
        if mapping is not None and self._targets is None:
            raise ModelError(
                "a mapping leads to a worker's model: give model=, or map what is received: "
                "receive().mapped(mapping)"
            )
        mappings = by_model(mapping, self._targets or {})
        # What the library loads into: the targets, some behind a mapping.
        self._loaders: list[tuple[str, Any]] = [
            (name, MappedTarget(mappings[name], name, target) if name in mappings else target)
            for name, target in (self._targets or {}).items()
        ]
        # What is loaded into must live as long as this.
        self._kept = (model, models, context)
        wanted = list(self._targets) if self._targets else None
        if self._targets is None and models is not None:
            wanted = list(models)
        self._session = Session.prepare_receiver(info, worker, wanted, str(device))
        self._background: Background | None = None
        self._connected = False
        # Until the sender says which there are.
        self._wanted = list(info.models) if wanted is None else wanted

    def connect(self, *, timeout: float | None = 60.0) -> None:
        """Joins the sender, waiting for it if need be, and takes the initial weights.

        Raises:
            DeadlineError: if the sender, or its first version, is not there in time.
            WrongWeightsError: naming each tensor that does not fit; the sender knows.
        """
        loaders = None if self._targets is None else self._loaders
        self._own("connect").connect_receiver(loaders, timeout)
        self._connected = True
        _ends.opened(self)

    def receive(self, timeout: float | None = None) -> T | None:
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
        session = self._own("receive")
        if self._targets is not None:
            return self._loaded(session.receive_into(self._loaders, timeout))
        return self._seen(session.receive(timeout))

    def pull(
        self,
        version: int | None = None,
        *,
        at_least: int | None = None,
        model: str | None = None,
        timeout: float | None = None,
    ) -> T | None:
        """Asks for the newest version, for exactly one, or for at least one.

        Returns:
            As :meth:`receive`.
        """
        session = self._own("pull")
        # A scheme that carries nothing has no models, and says so itself.
        name = model or next(iter(self.models), "")
        if self._targets is not None:
            versions = session.pull_into(self._loaders, name, version, at_least, timeout)
            return self._loaded(versions)
        return self._seen(session.pull(name, version, at_least, timeout))

    def latest(self) -> Any:
        """The newest at once, also if this worker has had it: a :class:`Snapshot`."""
        return self._seen(self._own("latest").latest())

    def start_background(self, safe_points: Literal["implied", "declared"] = "implied") -> Background:
        """Hands receiving to a thread of its own; the loop need not ask any more.

        A module changes whenever no forward of it, or of a part of it, is running
        (``"implied"``), or inside :meth:`Background.safe_point` and :meth:`Background.wait`
        only (``"declared"``): the choice for workers that train. What reads parameters
        outside any forward does so inside ``with receiver.frozen():``.
        """
        if self._targets is None:
            raise LifecycleError("a background receiver loads into models: give the receiver some")
        if safe_points not in ("implied", "declared"):
            raise SettingError(
                f'safe_points: expected "implied" or "declared", got {safe_points!r}'
            )
        session = self._own("start_background")
        native = session.start_background(self._loaders, safe_points == "declared")
        self._background = Background(native, self._targets, len(self._targets) == 1)
        _ends.opened(self._background)
        return self._background

    def frozen(self) -> contextlib.AbstractContextManager[Any]:
        """Keeps the models as they are inside ``with receiver.frozen():``, in this thread.

        For code that reads them outside any forward. Without a
        background receiver nothing changes outside the calls of this class anyway.
        """
        return contextlib.nullcontext() if self._background is None else self._background

    @property
    def models(self) -> list[str]:
        """The names of the models that are received."""
        if self._background is not None or not self._connected:
            return list(self._wanted)
        return [name for name, _ in self._session.models()]

    @property
    def version(self) -> int:
        """The version this worker runs, of its first model; 0 before ``connect``."""
        return self.versions.get(next(iter(self.models), ""), 0)

    @property
    def versions(self) -> dict[str, int]:
        """The version of each model that this worker runs; 0 before ``connect``."""
        if self._background is not None:
            return self._background.versions
        return self._session.versions() if self._connected else dict.fromkeys(self._wanted, 0)

    @property
    def run(self) -> tuple[int, str]:
        """The run of these versions: its epoch and id."""
        return self._session.run() if self._background is None else self._background.run

    @property
    def worker(self) -> int:
        """This worker's number."""
        return self._worker

    def shutdown(self) -> None:
        """Tells the sender that this worker leaves in order. Any number of times.

        Models keep what they have, in memory of their own. A worker that ends without it
        has failed, unless its program ends without an exception: the sender's reports say
        so until it is back, or forgotten.
        """
        self._end(_ends.why)

    def fail(self, reason: str) -> None:
        """As :meth:`shutdown`, of a worker that has failed: the sender's reports say why.

        ``with receiver: …`` does so automatically with an exception that leaves it.
        """
        self._end(reason)

    def _end(self, reason: str | None) -> None:
        if self._background is not None:
            self._background._end(reason)
        self._session.shutdown(reason)
        for target in (self._targets or {}).values():
            if isinstance(target, Target):
                target.release()
        _ends.closed(self)

    def __del__(self) -> None:
        # A background receiver goes on alone, and has its own shutdown.
        if getattr(self, "_background", self) is not None or sys.is_finalizing():
            return
        if os.getpid() == self._pid:
            self._end(_ends.DROPPED)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end(_ends.reason_of(error))

    def __repr__(self) -> str:
        return f"<Receiver {self._worker}: {self._session!r}>"

    def __getstate__(self) -> Any:
        raise LifecycleError(
            "a receiver is a live end and cannot be pickled: make one there from the init info"
        )

    def _own(self, call: str) -> Session:
        """The session, for a call that a background receiver makes."""
        if self._background is not None:
            raise LifecycleError(
                f"{call} cannot be called after start_background: its thread receives now; call "
                "wait or safe_point of what start_background returned, or shut this down and make "
                "a new receiver from the init info"
            )
        return self._session

    # What a version comes as is decided by what the constructor was given.

    def _loaded(self, versions: dict[str, int] | None) -> T | None:
        if versions is None:
            return None
        of_one = next(iter(versions.values())) if len(versions) == 1 else versions
        return cast("T", of_one)

    def _seen(self, native: SetSnapshot | None) -> T | None:
        if native is None:
            return None
        members = [Snapshot(snapshot) for snapshot, _ in native.members()]
        of_one = members[0] if len(members) == 1 else {one.model: one for one in members}
        return cast("T", of_one)


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
