"""The two kinds of parties of a synchronizer."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from weightsync import _ends
from weightsync._answers import ExplorerLine, Need, Synced, Trained
from weightsync._calls import in_thread, watching
from weightsync._native import InitInfo, MappedTarget, SetSnapshot
from weightsync._targets import target_of, together
from weightsync.errors import DeadlineError, LifecycleError, PeerError, SettingError
from weightsync.mapping import by_model
from weightsync.model_receiver import ModelReceiver
from weightsync.receiver import Receiver
from weightsync.sender import Sender
from weightsync.snapshot import Snapshot
from weightsync.store import Store, StoredVersion

if TYPE_CHECKING:
    from typing import Self

    from weightsync._native import SyncExplorer, SyncTrainer, _Need, _Synced


class _Party(_ends.AsyncWith):
    """What trainers and explorers have in common."""

    _native: SyncTrainer | SyncExplorer
    _pid: int

    if TYPE_CHECKING:

        def _end(self, reason: str | None) -> None: ...

    def need_sync(self, step: int | None = None) -> Need:
        """Whether the party is to synchronise, after so many steps. It answers at once."""
        return _need(self._native.need(step))

    def wait_need_sync(self, timeout: float | None = None, *, step: int | None = None) -> Need:
        """Waits until the party is to synchronise, or for so many seconds."""
        return _need(self._native.wait_need(step, timeout, watching()))

    async def need_sync_async(self, step: int | None = None) -> Need:
        """As :meth:`need_sync`, while the event loop goes on."""
        return await in_thread(lambda: self.need_sync(step))

    async def wait_need_sync_async(
        self, timeout: float | None = None, *, step: int | None = None
    ) -> Need:
        """As :meth:`wait_need_sync`, while the event loop goes on. Cancelling it ends the wait."""
        return await in_thread(lambda: self.wait_need_sync(timeout, step=step))

    @property
    def method(self) -> str:
        """How versions travel: ``"nccl"``, ``"memory"`` or ``"checkpoint"``."""
        return self._native.method()

    def shutdown(self) -> None:
        """Leaves in order. Any number of times.

        A program that ends by an exception without this call is a party that died: a trainer is
        expected back then.
        """
        self._end(_ends.why)

    def fail(self, reason: str) -> None:
        """Leaves as a party that has failed."""
        self._end(reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end(_ends.reason_of(error))

    def __getstate__(self) -> Any:
        raise LifecycleError(
            "a party of a synchronizer is a live end and cannot be pickled: join there, by the "
            "synchronizer's address"
        )


class Trainer(_Party):
    """The trainer: it publishes versions. :meth:`Synchronizer.trainer` makes it."""

    _native: SyncTrainer

    def __init__(self, native: SyncTrainer, sender: Sender, step: int) -> None:
        self._native = native
        self._sender = sender
        self._step = step
        self._version = 0
        self._pid = os.getpid()
        _ends.opened(self)

    def sync(
        self, step: int, *, timeout: float | None = 60.0, weights: Any = None
    ) -> Trained:
        """Publishes the weights after a step, and waits until they can be had.

        With ``"nccl"`` it waits for explorers, sends them the weights, and waits until they have
        loaded them. A timeout is an answer: the trainer tries again after its next step.

        Args:
            step: how many steps the weights have been trained for.
            timeout: in seconds.
            weights: the weights, in place of the model's own; of several models a dict by their names.
        """
        several = weights is not None and len(self._sender.models) > 1
        given = {"weights_dict": weights} if several else {"weights": weights}

        def publish(version: int, left: float | None) -> None:
            self._sender.send(**given, version=version, wait="sent", timeout=left)
            self._version = version

        done = self._native.sync(step, timeout, publish, watching())
        ended, version, step, lines, reason, seconds = done
        self._step = step
        explorers = tuple(ExplorerLine(*line) for line in lines)
        return Trained(ended, version, step, explorers, reason, seconds)

    async def sync_async(
        self, step: int, *, timeout: float | None = 60.0, weights: Any = None
    ) -> Trained:
        """As :meth:`sync`, while the event loop goes on. Cancelling it ends the wait."""
        return await in_thread(lambda: self.sync(step, timeout=timeout, weights=weights))

    @property
    def sender(self) -> Sender:
        """The sender of the versions."""
        return self._sender

    @property
    def version(self) -> int:
        """The version that was published last."""
        return self._version

    @property
    def step(self) -> int:
        """The step of the last sync, or the one that the trainer joined with."""
        return self._step

    @property
    def epoch(self) -> int:
        """The epoch of this trainer: one with a higher epoch takes its place."""
        return self._native.epoch()

    def _first(self, version: int) -> None:
        self._sender.connect(0, version=version)
        self._version = version

    def _end(self, reason: str | None) -> None:
        if os.getpid() == self._pid:
            self._native.leave(reason)
            self._sender.shutdown()
            _ends.closed(self)

    def __repr__(self) -> str:
        return f"<Trainer: v{self._version} of step {self._step}, {self._sender!r}>"


class Explorer(_Party):
    """An explorer: it loads versions. :meth:`Synchronizer.explorer` makes it."""

    _native: SyncExplorer

    def __init__(self, native: SyncExplorer, loading: dict[str, Any]) -> None:
        self._native = native
        self._loading = loading
        self._receiver: Receiver | ModelReceiver | None = None
        self._joined: tuple[InitInfo, int] | None = None
        self._snapshots: dict[str, Snapshot] = {}
        self._version = 0
        self._is_loading = False
        self._bytes = 0
        self._travelled: int | None = None
        # What the receiver had moved when the sync before ended: versions come before they are asked for.
        self._counted = 0
        self._pid = os.getpid()
        _ends.opened(self)

    def sync(self, step: int | None = None, *, timeout: float | None = 60.0) -> Synced:
        """Waits for a version, verifies it and loads it.

        A timeout is an answer, and so is a version that could not be loaded now: the explorer keeps
        its version, and tries again after its next step.

        Args:
            step: how many steps the explorer has made.
            timeout: in seconds.

        Raises:
            WrongWeightsError: naming each tensor that does not fit the model.
            LoadError: loading failed, and the model has the version before again.
        """
        self._bytes, self._travelled = 0, None
        return self._synced(self._native.sync(step, timeout, self._load, watching()))

    async def sync_async(
        self, step: int | None = None, *, timeout: float | None = 60.0
    ) -> Synced:
        """As :meth:`sync`, while the event loop goes on. Cancelling it ends the wait."""
        return await in_thread(lambda: self.sync(step, timeout=timeout), self._stop_loading)

    def need_eval(self, step: int) -> bool:
        """Whether the explorer is to evaluate after this step: every ``eval_interval`` steps."""
        return self._native.need_eval(step)

    def evaluating(self) -> _Evaluating:
        """``with explorer.evaluating():`` no sync is needed, and nobody waits for this explorer.

        Also ``async with``.
        """
        return _Evaluating(self)

    def stored(self) -> list[StoredVersion]:
        """The versions that :meth:`load` can load, oldest first: those of the store.

        Raises:
            SettingError: no store keeps the versions.
        """
        return _opened(self._native.store()).versions()

    def load(
        self, version: int | None = None, *, model: str | None = None, named: str | None = None
    ) -> Synced:
        """Loads a version of the store, such as an older one to evaluate it.

        The synchronizer knows that the explorer runs it. The next sync loads the newest again.

        Args:
            version: its number; None: the newest.
            model: the model whose version it is, where the store has several.
            named: the version of this name.

        Raises:
            SettingError: no store keeps the versions.
            ModelError: if there is no such version or name.
            CorruptError: naming the damaged file.
            WrongWeightsError: naming each tensor that does not fit the model.
        """
        self._bytes, self._travelled = 0, None

        def load(store: str | None) -> int:
            return self._put(_opened(store)._load_set(version, model=model, named=named))

        return self._synced(self._native.load(load, watching()))

    async def load_async(
        self, version: int | None = None, *, model: str | None = None, named: str | None = None
    ) -> Synced:
        """As :meth:`load`, while the event loop goes on."""
        return await in_thread(lambda: self.load(version, model=model, named=named))

    @property
    def version(self) -> int:
        """The version that it has verified and loaded; 0 before the first."""
        return self._version

    @property
    def snapshots(self) -> Mapping[str, Snapshot]:
        """The weights that were loaded last, by model, for an explorer without a model."""
        return self._snapshots

    def _synced(self, parts: _Synced) -> Synced:
        return Synced(*parts, bytes=self._bytes, travelled=self._travelled)

    def _load(self, version: int, info: InitInfo, worker: int, left: float | None) -> int:
        self._is_loading = True
        try:
            try:
                self._version = self._receive(version, info, worker, left)
            except (DeadlineError, PeerError):
                # Versions in a store do not need the trainer, which may be gone.
                if info.store is None:
                    raise
                self._version = self._read(version, info, info.store)
        except BaseException:
            # The next sync joins again, and finds out more.
            self._leave_sender(None)
            raise
        finally:
            self._is_loading = False
        return self._version

    def _stop_loading(self) -> None:
        """Ends the load that another thread makes."""
        receiver = self._receiver
        if self._is_loading and receiver is not None:
            receiver._end(None)

    def _receive(self, version: int, info: InitInfo, worker: int, left: float | None) -> int:
        until = None if left is None else time.monotonic() + left
        if self._receiver is None or self._joined != (info, worker):
            self._leave_sender(None)
            self._counted = 0
            # From here on another thread can end what it waits for.
            self._receiver, self._joined = self._made(info, worker), (info, worker)
            self._receiver.connect(timeout=left if info.store is None else 0.0)
        name = info.models[0]
        left = None if until is None else max(0.0, until - time.monotonic())
        receiver = self._receiver
        if not isinstance(receiver, ModelReceiver):
            pulled = receiver.pull_set(at_least=version, model=name, timeout=left)
            if pulled is None:
                raise DeadlineError(f"v{version} did not come in time", "retry")
            self._snapshots = pulled
        elif receiver.versions[name] < version and not receiver.pull_set(
            at_least=version, model=name, timeout=left
        ):
            raise DeadlineError(f"v{version} did not come in time", "retry")
        self._bytes = sum(layout.payload_bytes for _, layout in receiver._session.models())
        travelled = receiver.travelled
        if travelled is not None:
            # The receiver may have joined a restarted sender, and counts from 0 again.
            before = self._counted if self._counted <= travelled else 0
            self._travelled, self._counted = travelled - before, travelled
        return receiver.versions[name]

    def _read(self, version: int, info: InitInfo, store: str) -> int:
        """Loads a version of a store whose trainer is gone."""
        return self._put(Store(store)._load_set(at_least=version, model=info.models[0]))

    def _put(self, found: SetSnapshot) -> int:
        """Loads all models of a set that was read of a store, or none."""
        of = self._loading
        members = {one.model: one for one, _ in found.members()}
        first = next(iter(members))
        models = of["models"] or ({} if of["model"] is None else {first: of["model"]})
        mappings = by_model(of["mapping"], models)
        targets = {name: target_of(one, "copy") for name, one in models.items()}
        # The sender thinks that the model has the version that it sent. The next sync joins it again.
        self._leave_sender(None)
        found.load_into(
            [
                (name, MappedTarget(mappings[name], name, target) if name in mappings else target)
                for name, target in together(targets, mappings).items()
            ]
        )
        self._snapshots = {} if models else {name: Snapshot(one) for name, one in members.items()}
        self._bytes = sum(one.layout.payload_bytes for one in members.values())
        self._version = members[first].version
        return self._version

    def _made(self, info: InitInfo, worker: int) -> Receiver | ModelReceiver:
        of = self._loading
        if of["model"] is None and of["models"] is None:
            return Receiver(info, worker, device=of["device"])
        return ModelReceiver(info, worker, **of)

    def _leave_sender(self, reason: str | None) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver._end(reason)

    def _end(self, reason: str | None) -> None:
        if os.getpid() == self._pid:
            self._stop_loading()
            self._native.leave(reason)
            self._leave_sender(reason)
            _ends.closed(self)

    def __repr__(self) -> str:
        return f"<Explorer: v{self._version}>" if self._version else "<Explorer: no version yet>"


class _Evaluating:
    """Pauses an explorer."""

    def __init__(self, explorer: Explorer) -> None:
        self._explorer = explorer

    def __enter__(self) -> None:
        self._explorer._native.pause(True)

    def __exit__(self, *_: object) -> None:
        self._explorer._native.pause(False)

    async def __aenter__(self) -> None:
        try:
            await in_thread(self.__enter__)
        except BaseException:
            # It may be paused, and nobody would end that.
            await in_thread(self.__exit__)
            raise

    async def __aexit__(self, *_: object) -> None:
        await in_thread(self.__exit__)


def _opened(store: str | None) -> Store:
    if store is None:
        raise SettingError(
            "no store keeps the versions: give the synchronizer one, store=\"/shared/runs/policy\", or "
            "the trainer method=\"checkpoint\""
        )
    return Store(store)


def _need(parts: _Need) -> Need:
    word, asked_by, newest, stopped, connected = parts
    return Need(word, tuple(asked_by), newest, stopped, connected)
