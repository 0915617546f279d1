"""When a trainer and its explorers synchronise."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from weightsync import _ends
from weightsync._native import InitInfo
from weightsync._native import Synchronizer as Native
from weightsync.errors import (
    CorruptError,
    DeadlineError,
    LifecycleError,
    ModelError,
    PeerError,
    SenderClosedError,
    SettingError,
)
from weightsync.mapping import PerModel, by_model
from weightsync.model_receiver import Mode, ModelReceiver
from weightsync.receiver import Receiver
from weightsync.scheme import Distributed, Scheme, StoreScheme
from weightsync.sender import Sender
from weightsync.snapshot import Snapshot
from weightsync.store import Store

if TYPE_CHECKING:
    from typing import Self

    from weightsync._native import SyncExplorer, SyncTrainer

#: How versions travel: ``"nccl"`` (also ``"online"``): from the trainer to explorers that wait for
#: it; ``"memory"``: through the synchronizer; ``"checkpoint"`` (also ``"offline"``): through a store.
Method = Literal["nccl", "memory", "checkpoint", "online", "offline"]

#: When a party synchronises.
Style = Literal[
    "fixed",
    "dynamic_by_explorer",
    "dynamic_by_trainer",
    "explorer_driven",
    "trainer_driven",
    "fully_async",
    "bounded",
]


@dataclass(frozen=True)
class Need:
    """Whether a party is to synchronise: true in ``if``."""

    #: ``"no"``; ``"yes"``: when it can; ``"must"``: before its next step.
    word: Literal["no", "yes", "must"]
    #: The explorers that ask for a version, for a trainer.
    asked_by: tuple[str, ...]
    #: The newest version that can be had; 0 if there is none.
    newest: int
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
    #: The trainer's step of which that version was made, if it is known.
    step: int | None
    #: How many versions are newer.
    versions_behind: int
    #: How many steps the trainer has made since.
    steps_behind: int
    #: Why it failed.
    reason: str | None
    #: Bytes of the weights that were loaded.
    bytes: int = 0
    #: Seconds from the call to the loaded version.
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return self.ended == "synced"

    def __str__(self) -> str:
        version = f"v{self.version}" if self.version else "no version"
        parts = [version if self else f"{self.ended}: still {version}"]
        if self and self.bytes:
            parts.append(_bytes(self.bytes))
        if self:
            parts.append(f"{1000 * self.seconds:.3g} ms")
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
    #: The step of which it was made.
    step: int
    #: The explorers to which it was sent; with other methods than ``"nccl"``, all that are there.
    explorers: tuple[ExplorerLine, ...] = field(repr=False)
    #: Why it failed.
    reason: str | None
    #: Seconds that the call took.
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return self.ended == "synced"

    def __str__(self) -> str:
        text = f"v{self.version} of step {self.step}: {self.ended}, {1000 * self.seconds:.3g} ms"
        if self.reason:
            text += f" ({self.reason})"
        for line in self.explorers:
            text += f"\n  {line.name}: v{line.version}, {line.state}"
            text += f" ({line.reason})" if line.reason else ""
        return text


class Synchronizer(_ends.AsyncWith):
    """Decides when a trainer and its explorers synchronise.

    Use :meth:`local` inside one program, and :meth:`connect` for one of another process, such as
    ``weightsync serve``.
    """

    def __init__(self, native: Native, *, remote: bool) -> None:
        self._native = native
        self._remote = remote
        _ends.opened(self)

    @classmethod
    def local(
        cls,
        *,
        method: Method | None = None,
        style: Style = "fixed",
        interval: int | None = None,
        offset: int | None = None,
        lag: int | None = None,
        history: int = 1,
        store: str | os.PathLike[str] | None = None,
        keep: int | str | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        listen: str | None = None,
    ) -> Self:
        """One inside this program, for its threads.

        Args:
            method: how versions travel; None: the trainer chooses.
            style: when parties synchronise that do not say so.
            interval: steps between two syncs; 1 without it.
            offset: for ``"fixed"``: by how many steps explorers are ahead.
            lag: for ``"bounded"``: how many versions an explorer may be behind; 1 without it.
            history: how many older versions are kept in memory.
            store: keeps the versions, a directory or an address such as ``s3://bucket/path``; the
                synchronizer begins with the newest one there.
            keep: which versions the store keeps, as for :class:`Store`; all without it.
            run_dir: a directory for what a restarted synchronizer has to know.
            listen: ``"host:port"``: other processes may join there, too. Port 0 is a port that the
                system chooses: see :attr:`address`.
        """
        lasting = (
            None if store is None else os.fspath(store),
            None if keep is None else str(keep),
            run_dir,
        )
        native = Native.start(method, (style, interval, offset, lag), history, lasting, listen)
        return cls(native, remote=listen is not None)

    @classmethod
    def connect(cls, address: str) -> Self:
        """One of another process, at ``"host:port"``. Nothing is sent before a party joins."""
        return cls(Native.connect(address), remote=True)

    @property
    def address(self) -> str | None:
        """Where other processes reach it."""
        return self._native.address

    def trainer(
        self,
        model: Any = None,
        *,
        name: str = "trainer",
        models: Mapping[str, Any] | None = None,
        method: Method | None = None,
        style: Style | None = None,
        interval: int | None = None,
        offset: int | None = None,
        lag: int | None = None,
        step: int = 0,
        store: str | os.PathLike[str] | None = None,
        scheme: Scheme | str | None = None,
        timeout: float | None = 60.0,
        **options: Any,
    ) -> Trainer:
        """Joins as the trainer, and publishes the first version: the weights that the model has now.

        A trainer that joins later takes the place of this one, whose calls then fail.

        Args:
            model: the weights, as for :class:`Sender`; it is read during :meth:`Trainer.sync`.
            models: several models by name, in place of ``model``.
            method: how versions travel; None: as the synchronizer was made, or ``"memory"``.
            style: when the trainer synchronises; None: as the synchronizer was made.
            interval, offset, lag: as for :meth:`local`.
            step: how many steps the model has been trained for.
            store: the store of the method ``"checkpoint"``: a directory, or an address such as
                ``s3://bucket/path``.
            scheme: how weights travel to the synchronizer, or with ``"nccl"`` to explorers; None:
                shared memory inside one program, and else :class:`Distributed`.
            timeout: how long a synchronizer that is not there yet is waited for, in seconds.
            options: further arguments of :class:`Sender`.
        """
        if store is not None and method is None:
            method = "checkpoint"
        if scheme is None:
            scheme = self._scheme(method, store)
        elif store is not None:
            raise SettingError("store= names the scheme already: give it without scheme=")
        sender = Sender(model, models=models, scheme=scheme, timeout=timeout, **options)
        party = (name, (style, interval, offset, lag), method, step)
        native = self._native.trainer(party, sender.init_info, timeout)
        trainer = Trainer(native, sender)
        try:
            native.first(timeout, trainer._first)
        except BaseException as error:
            trainer._end(_ends.reason_of(error))
            raise
        return trainer

    def explorer(
        self,
        name: str,
        model: Any = None,
        *,
        models: Mapping[str, Any] | None = None,
        mode: Mode = "bind",
        mapping: PerModel | None = None,
        style: Style | None = None,
        interval: int | None = None,
        offset: int | None = None,
        lag: int | None = None,
        step: int = 0,
        eval_interval: int | None = None,
        device: object = "cpu",
        timeout: float | None = 60.0,
    ) -> Explorer:
        """Joins as an explorer.

        Args:
            name: each explorer has a name of its own. One that joins with the name of another takes
                its place.
            model: where weights go, as for :class:`ModelReceiver`. Without a model
                :attr:`Explorer.snapshots` has the weights.
            models: several models by name, in place of ``model``.
            mode, mapping, device: as for :class:`ModelReceiver`.
            style: when the explorer synchronises; None: as the synchronizer was made.
            interval, offset, lag: as for :meth:`local`.
            step: how many steps it has made.
            eval_interval: after how many steps :meth:`Explorer.need_eval` is true.
            timeout: how long a synchronizer that is not there yet is waited for, in seconds.
        """
        if model is not None and models is not None:
            raise ModelError("an explorer has its model, or several as models={name: model}, not both")
        party = (name, (style, interval, offset, lag), None, step)
        native = self._native.explorer(party, timeout)
        loading = {"model": model, "models": models, "mode": mode, "mapping": mapping, "device": device}
        return Explorer(native, loading, eval_interval)

    def shutdown(self) -> None:
        """Ends a synchronizer of this program; its parties are told. Any number of times."""
        self._native.shutdown()
        _ends.closed(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.shutdown()

    def _scheme(self, method: str | None, store: str | os.PathLike[str] | None) -> Scheme | str:
        if store is not None:
            if method not in (None, "checkpoint", "offline"):
                raise SettingError(f'store= is for method="checkpoint", got method="{method}"')
            return StoreScheme(store)
        if method in ("checkpoint", "offline"):
            raise SettingError('method="checkpoint" needs its store: store="/shared/runs/policy"')
        return Distributed() if self._remote else "shared-mem"


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
        return self._wait(timeout, step, None)

    async def need_sync_async(self, step: int | None = None) -> Need:
        """As :meth:`need_sync`, while the event loop goes on."""
        return await asyncio.to_thread(self.need_sync, step)

    async def wait_need_sync_async(
        self, timeout: float | None = None, *, step: int | None = None
    ) -> Need:
        """As :meth:`wait_need_sync`, while the event loop goes on. Cancelling it ends the wait."""
        return await _in_thread(lambda watch: self._wait(timeout, step, watch))

    def _wait(self, timeout: float | None, step: int | None, watch: Any) -> Need:
        return _need(self._native.wait_need(step, timeout, watch))

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

    def __init__(self, native: SyncTrainer, sender: Sender) -> None:
        self._native = native
        self._sender = sender
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
            weights: the weights, in place of the model's own.
        """
        return self._sync(step, timeout, weights, None)

    async def sync_async(
        self, step: int, *, timeout: float | None = 60.0, weights: Any = None
    ) -> Trained:
        """As :meth:`sync`, while the event loop goes on. Cancelling it ends the wait."""
        return await _in_thread(lambda watch: self._sync(step, timeout, weights, watch))

    @property
    def sender(self) -> Sender:
        """The sender of the versions."""
        return self._sender

    @property
    def version(self) -> int:
        """The version that was published last."""
        return self._sender.version

    @property
    def epoch(self) -> int:
        """The epoch of this trainer: one with a higher epoch takes its place."""
        return self._native.epoch()

    def _first(self, version: int) -> None:
        self._sender.connect(0, version=version)

    def _sync(self, step: int, timeout: float | None, weights: Any, watch: Any) -> Trained:
        begun = time.perf_counter()

        def publish(version: int, left: float | None) -> None:
            self._sender.send(weights, version=version, wait="sent", timeout=left)

        ended, version, step, lines, reason = self._native.sync(step, timeout, publish, watch)
        seconds = time.perf_counter() - begun
        explorers = tuple(ExplorerLine(*line) for line in lines)
        return Trained(ended, version, step, explorers, reason, seconds)

    def _end(self, reason: str | None) -> None:
        if os.getpid() == self._pid:
            self._native.leave(reason)
            self._sender.shutdown()
            _ends.closed(self)


class Explorer(_Party):
    """An explorer: it loads versions. :meth:`Synchronizer.explorer` makes it."""

    _native: SyncExplorer

    def __init__(
        self, native: SyncExplorer, loading: dict[str, Any], eval_interval: int | None
    ) -> None:
        if eval_interval is not None and eval_interval < 1:
            raise SettingError(f"eval_interval: expected 1 step or more, or None, got {eval_interval}")
        self._native = native
        self._loading = loading
        self._eval_interval = eval_interval
        self._receiver: Receiver | ModelReceiver | None = None
        self._joined: tuple[InitInfo, int] | None = None
        self._snapshots: dict[str, Snapshot] = {}
        self._version = 0
        self._bytes = 0
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
        return self._sync(step, timeout, None)

    async def sync_async(
        self, step: int | None = None, *, timeout: float | None = 60.0
    ) -> Synced:
        """As :meth:`sync`, while the event loop goes on. Cancelling it ends the wait."""
        return await _in_thread(lambda watch: self._sync(step, timeout, watch))

    def need_eval(self, step: int) -> bool:
        """Whether the explorer is to evaluate after this step: every ``eval_interval`` steps."""
        return bool(self._eval_interval) and step > 0 and step % (self._eval_interval or 1) == 0

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """``with explorer.evaluating():`` no sync is needed, and nobody waits for this explorer."""
        self._native.pause(True)
        try:
            yield
        finally:
            self._native.pause(False)

    @property
    def version(self) -> int:
        """The version that it has verified and loaded; 0 before the first."""
        return self._version

    @property
    def snapshots(self) -> Mapping[str, Snapshot]:
        """The weights that were loaded last, by model, for an explorer without a model."""
        return self._snapshots

    def _sync(self, step: int | None, timeout: float | None, watch: Any) -> Synced:
        begun = time.perf_counter()
        self._bytes = 0
        parts = self._native.sync(step, timeout, self._load, watch)
        return Synced(*parts, bytes=self._bytes, seconds=time.perf_counter() - begun)

    def _load(self, version: int, info: InitInfo, worker: int, left: float | None) -> int:
        try:
            try:
                self._version = self._receive(version, info, worker, left)
            except (DeadlineError, PeerError, SenderClosedError):
                # Versions in a store do not need the trainer, which may be gone.
                if not _is_stored(info):
                    raise
                self._version = self._read(version, info)
        except BaseException:
            # The next sync joins again, and finds out more.
            self._leave_sender(None)
            raise
        return self._version

    def _receive(self, version: int, info: InitInfo, worker: int, left: float | None) -> int:
        until = None if left is None else time.monotonic() + left
        if self._receiver is None or self._joined != (info, worker):
            self._leave_sender(None)
            self._receiver = self._join(info, worker, 0.0 if _is_stored(info) else left)
            self._joined = (info, worker)
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
        return receiver.versions[name]

    def _read(self, version: int, info: InitInfo) -> int:
        """Loads a version of a store whose trainer is gone."""
        self._leave_sender(None)
        # The scheme's text is `store:URL`, with settings after commas.
        store = Store(info.scheme.partition(":")[2].partition(",")[0])
        stored = store.load_all()
        newest = stored[info.models[0]].version
        if newest < version:
            raise CorruptError(f"the store has v{newest} whole, expected v{version}", "retry")
        of = self._loading
        mappings = by_model(of["mapping"], info.models)
        found = {
            name: snapshot.mapped(mappings[name]) if name in mappings else snapshot
            for name, snapshot in stored.items()
        }
        models = of["models"] or ({} if of["model"] is None else {info.models[0]: of["model"]})
        for name, model in models.items():
            found[name].load_into(model)
        self._snapshots = {} if models else found
        self._bytes = sum(one._native.layout.payload_bytes for one in found.values())
        return newest

    def _join(self, info: InitInfo, worker: int, left: float | None) -> Receiver | ModelReceiver:
        of = self._loading
        receiver: Receiver | ModelReceiver
        if of["model"] is None and of["models"] is None:
            receiver = Receiver(info, worker, device=of["device"])
        else:
            receiver = ModelReceiver(info, worker, **of)
        receiver.connect(timeout=left)
        return receiver

    def _leave_sender(self, reason: str | None) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver._end(reason)

    def _end(self, reason: str | None) -> None:
        if os.getpid() == self._pid:
            self._native.leave(reason)
            self._leave_sender(reason)
            _ends.closed(self)


def _is_stored(info: InitInfo) -> bool:
    return info.scheme.partition(":")[0] == "store"


def _need(parts: tuple[Any, ...]) -> Need:
    word, asked_by, newest, connected = parts
    return Need(word, tuple(asked_by), newest, connected)


class _Cancelled(Exception):
    """Ends a call whose task was cancelled."""


async def _in_thread(call: Callable[[Callable[[], None]], Any]) -> Any:
    """Makes a call in a thread. Cancelling the task ends the call's wait."""
    over = threading.Event()

    def watch() -> None:
        if over.is_set():
            raise _Cancelled

    made = asyncio.ensure_future(asyncio.to_thread(call, watch))
    try:
        return await asyncio.shield(made)
    except asyncio.CancelledError:
        over.set()
        with contextlib.suppress(_Cancelled):
            await made
        raise


def _bytes(count: int) -> str:
    for size, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
