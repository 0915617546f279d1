"""A worker's end that loads versions into models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from weightsync import _ends, _paths
from weightsync._checks import choice
from weightsync._deadline import Deadline
from weightsync._native import InitInfo, MappedTarget, Session
from weightsync._receiving import Receiving, read
from weightsync._targets import Target, target_of, together
from weightsync.background import Background
from weightsync.errors import LifecycleError, ModelError
from weightsync.mapping import PerModel, by_model

#: Whether a module's larger parameters lie in the version itself, or are copied.
Mode = Literal["bind", "copy"]


class ModelReceiver(Receiving):
    """A worker's end that loads a sender's versions into models.

    The constructor communicates nothing; :meth:`connect` is the rendez-vous and loads the
    initial weights. Versions are loaded inside the calls of this class only, unless
    :meth:`start_background` hands that to a thread. :class:`Receiver` reads versions
    as snapshots instead.

    Args:
        info: the sender's init info, also as JSON text.
        worker: this worker's number.
        model: where weights go: a torch module, a TensorDict, or a dict of tensors or
            numpy arrays; or an object with methods ``layout``, ``shape`` and ``load``. A
            module without shapes (lazy, or on the meta device) takes the sender's.
        models: several models by name, in place of ``model``; or, with ``context``, their
            paths.
        context: where paths begin.
        mode: ``"bind"``: a module's parameters of 64 KiB and more lie in the version
            itself, without a copy; the worker's own writes to them last until the next
            version. ``"copy"``: everything is copied.
        mapping: rules from the sender's weights to this worker's. Mapped weights lie in
            memory of this process and are copied from there, whatever the mode. Several
            models take a dict of mappings by name.
        device: where this worker runs its models, for the sender's information.
    """

    def __init__(
        self,
        info: InitInfo | str,
        worker: int = 0,
        *,
        model: object = None,
        models: Mapping[str, Any] | Sequence[str] | None = None,
        context: object = None,
        mode: Mode = "bind",
        mapping: PerModel | None = None,
        device: object = "cpu",
    ) -> None:
        info = read(info)
        if mapping is not None and mode == "bind":
            # Mapped weights do not lie in the version, so parameters cannot be bound to it.
            mode = "copy"
        self._background: Background | None = None
        self._is_declared = False
        self._targets = _targets(info, model, models, context, mode)
        mappings = by_model(mapping, self._targets)
        # The library loads into these: the targets, some behind a mapping.
        self._loaders: list[tuple[str, Any]] = [
            (name, MappedTarget(mappings[name], name, target) if name in mappings else target)
            for name, target in together(self._targets, mappings).items()
        ]
        # The models must live as long as this receiver.
        self._kept = (model, models, context)
        super().__init__(info, worker, list(self._targets), device)

    def _join(self, timeout: float | None) -> None:
        self._own("connect").connect_receiver(self._loaders, timeout)

    def receive(self, timeout: float | None = None) -> int | None:
        """Loads a version that this worker has not had, and returns its number.

        Args:
            timeout: in seconds; 0 looks only; None waits for a version, the sender's
                death or its shutdown.

        Returns:
            None if the timeout comes first.

        Raises:
            SenderClosedError: the sender has shut down: the usual end of the loop.
            PeerError: the sender died. With a run directory the next call waits for a new one.
            LoadError: loading failed, and the model has the version before again.
            ModelError: this worker receives several models: see :meth:`receive_set`.
        """
        self._only("receive", "receive_set")
        return _one(self._own("receive").receive_into(self._loaders, timeout))

    def __iter__(self) -> Iterator[Any]:
        """The numbers of new versions, each loaded, until the sender shuts down; or sets by name::

            for version in receiver:
                evaluate(model)

        Raises:
            As :meth:`receive`.
        """
        several = len(self._models) > 1
        return self._new(self.receive_set if several else self.receive)

    def receive_set(self, timeout: float | None = None) -> dict[str, int] | None:
        """As :meth:`receive`, for any number of models: their versions by name."""
        return self._own("receive_set").receive_into(self._loaders, timeout)

    def pull(
        self,
        version: int | None = None,
        *,
        at_least: int | None = None,
        timeout: float | None = None,
    ) -> int | None:
        """Asks for the newest version, a given one, or one at least as new, and loads it.

        Returns:
            As :meth:`receive`.
        """
        self._only("pull", "pull_set")
        return _one(self._pulled("pull", version, at_least, None, timeout))

    def pull_set(
        self,
        version: int | None = None,
        *,
        at_least: int | None = None,
        model: str | None = None,
        timeout: float | None = None,
    ) -> dict[str, int] | None:
        """As :meth:`pull`, for any number of models: the versions of the set, by name.

        Args:
            model: the model that ``version`` or ``at_least`` is a version of; required for
                them if there are several models.
        """
        return self._pulled("pull_set", version, at_least, model, timeout)

    def start_background(self, safe_points: Literal["implied", "declared"] = "implied") -> Background:
        """Starts a thread that receives and loads from now on, in place of :meth:`receive`.

        A module changes whenever no forward of it, or of a part of it, is running
        (``"implied"``), or inside :meth:`Background.safe_point` and :meth:`Background.wait`
        only (``"declared"``): the choice for workers that train. Code that reads parameters
        outside any forward does so inside ``with receiver.frozen():``.
        """
        choice("safe_points", safe_points, "implied", "declared")
        session = self._own("start_background")
        self._is_declared = safe_points == "declared"
        native = session.start_background(self._loaders, self._is_declared)
        self._background = Background(native, self._targets)
        _ends.opened(self._background)
        return self._background

    def rejoin(self, info: InitInfo | str, *, timeout: float | None = 60.0) -> None:
        """Follows another sender from here on, such as a trainer that was restarted on another host.

        The thread that :meth:`start_background` started is exchanged for another while no forward
        runs, and the models get the sender's newest version. If this fails, the receiver still
        follows the sender before.

        Raises:
            As :meth:`connect`; a :class:`DeadlineError` also if other threads keep the models unchanged
            until then; a :class:`LifecycleError` if this thread does, or if there is no background receiver.
        """
        until, background = Deadline(timeout), self._background
        if background is None:
            raise LifecycleError(
                "rejoin was called before start_background: without a thread that receives, shut "
                "this receiver down, and make and connect another from the next sender's init info"
            )
        info = read(info)
        session = Session.prepare_receiver(info, self._worker, self._models, self._device)
        before = self._session
        try:
            session.join_receiver(until.left())
            background._move(self, session, info, until.left())
        finally:
            # Ctrl-C may come after the exchange.
            (before if self._session is session else session).shutdown(None)

    def frozen(self) -> contextlib.AbstractContextManager[Any]:
        """Keeps the models unchanged inside ``with receiver.frozen():``, in this thread.

        Code that reads weights outside any forward needs it. Without a background receiver
        the models change inside calls of this class only.
        """
        return contextlib.nullcontext() if self._background is None else self._background

    @property
    def versions(self) -> dict[str, int]:
        """The version of each model that this worker runs; 0 before ``connect``."""
        return super().versions if self._background is None else self._background.versions

    @property
    def run(self) -> tuple[int, str]:
        """The run of these versions: its epoch and id."""
        return super().run if self._background is None else self._background.run

    def _pulled(
        self,
        call: str,
        version: int | None,
        at_least: int | None,
        model: str | None,
        timeout: float | None,
    ) -> dict[str, int] | None:
        name = self._asked(model, version, at_least)
        return self._own(call).pull_into(self._loaders, name, version, at_least, timeout)

    def _own(self, call: str) -> Session:
        """The session, unless a background receiver has it."""
        if self._background is not None:
            raise LifecycleError(
                f"{call} cannot be called after start_background, whose thread receives now: call "
                "wait or safe_point of the Background that it returned, or shut this receiver "
                "down and make a new one from the init info"
            )
        return self._session

    def _end(self, reason: str | None) -> None:
        if self._background is not None:
            self._background._end(reason)
        super()._end(reason)
        for target in self._targets.values():
            if isinstance(target, Target):
                target.release()

    def __del__(self) -> None:
        # A background receiver goes on alone, and has its own shutdown.
        if getattr(self, "_background", None) is None:
            super().__del__()


def _one(versions: dict[str, int] | None) -> int | None:
    return next(iter((versions or {}).values()), None)


def _targets(
    info: InitInfo,
    model: Any,
    models: Mapping[str, Any] | Sequence[str] | None,
    context: Any,
    mode: str,
) -> dict[str, Target]:
    if (model is None) == (models is None):
        raise ModelError(
            "a ModelReceiver needs its model, or several as models={name: model}, and not both; "
            "without a model, use Receiver"
        )
    if models is None:
        if len(info.models) != 1:
            raise ModelError(
                f"the sender sends {', '.join(info.models)}: choose with models={{name: model}}"
            )
        return {info.models[0]: target_of(model, mode)}
    if isinstance(models, Mapping):
        return {name: target_of(one, mode) for name, one in models.items()}
    if context is None:
        raise ModelError(
            "paths of models need the context that they start at: context=…; to receive "
            "snapshots of these models, use Receiver"
        )
    return {path: target_of(_paths.resolve(context, path), mode) for path in models}
