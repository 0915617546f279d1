"""One worker of an engine: it joins the sender, and loads versions into the engine's model."""

from __future__ import annotations

import abc
import time
from collections.abc import Iterable, Iterator
from typing import Any

from weightsync import _ends, _extra
from weightsync._native import Background, InitInfo, Layout, Session
from weightsync._native import Snapshot as NativeSnapshot
from weightsync.errors import (
    DeadlineError,
    LoadError,
    PeerError,
    SettingError,
    WeightsyncError,
    WrongWeightsError,
)
from weightsync.engines._checkpoint import Checkpoint, Tensors
from weightsync.engines._ranks import Group, Holds, Ranks
from weightsync.engines._request import WorkerRequest
from weightsync._view import states_of
from weightsync.snapshot import Snapshot

# How long a version that the sender calls staged may take to reach this thread.
_HANDOVER = 0.05
# How long until a worker looks again whether a version is there.
_LOOK = 0.01


class Place(abc.ABC):
    """Where in an engine a worker is, and what it loads into: what each engine's adapter gives."""

    #: Its number among the engine's workers.
    rank: int
    #: Whether a call that fails raises on each rank; else on the last alone.
    raises_everywhere = False

    @abc.abstractmethod
    def checkpoint(self) -> Checkpoint:
        """The checkpoint that the engine's model has the names and shapes of."""

    @abc.abstractmethod
    def load(self, tensors: Iterable[tuple[str, Any]], version: int | None = None) -> None:
        """Loads every tensor of a checkpoint through the engine's own loader. If it raises, the
        model may be a mix, and the next load must work all the same.

        Args:
            tensors: names and tensors, in the checkpoint's form.
            version: of a sender; None: the checkpoint's own.
        """

    @abc.abstractmethod
    def load_first(self) -> None:
        """Loads what the engine started with once more."""

    @abc.abstractmethod
    def group(self) -> Group | None:
        """All ranks of the engine; None if there is one rank."""


class UpdateError(WeightsyncError):
    """A call that failed, and what the engine holds now.

    Its text crosses the engine's process borders, where types are lost: the trainer reads it.
    """

    def __init__(self, reason: str, weights: str) -> None:
        super().__init__(f"weightsync[{weights}]: {reason}")
        self.reason, self._weights = reason, weights

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.reason, self._weights)


class EngineWorker:
    """Receives for one worker. Its engine calls it from one thread."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._ranks = Ranks(place.group, everywhere=place.raises_everywhere)
        self._target = Target(place, self._ranks)
        self._session: Session | None = None
        self._background: Background | None = None
        self._joined: tuple[str, int] | None = None
        self._model = ""
        # Of the sender that was joined last, and the version that it had then.
        self._run: Any = None
        self._first = 0
        # Between the engine's start and finish.
        self._started = False
        # A trainer has begun an update, and has not said that the engine generates again.
        self._under_way = False
        # Why the last update failed, if it did, and the version that was not loaded.
        self._failed: UpdateError | None = None
        self._missed = -1

    @property
    def holds(self) -> Holds:
        """The run and the version of what the model holds; None of what the engine started with."""
        return self._target.holds

    @property
    def ranks(self) -> int:
        """How many ranks the engine has."""
        return self._ranks.count

    @property
    def is_joined(self) -> bool:
        """Whether it has joined a sender, and not left it."""
        return self._joined is not None

    def do(self, request: WorkerRequest) -> None:
        """One call of the trainer."""
        match request.do:
            case "join":
                self.join(request)
            case "update":
                self.update(request.version, request.timeout)
            case "loaded":
                self.loaded()
            case "restore":
                self.restore(request.version, request.timeout)
            case "forget":
                self._target.forget()
            case "leave":
                self.leave()
            case _:
                self._under_way = False

    def begin(self, request: WorkerRequest) -> None:
        """Joins the sender and loads its newest version, before the engine has served anything.

        Raises:
            LoadError: if that fails, on every rank.
        """
        failed = None
        try:
            if request.ranks not in (0, self._ranks.count):
                # The numbers after its own are other engines'.
                raise SettingError(
                    f"the engine's number of ranks is {self._ranks.count}, and the file says {request.ranks}"
                )
            self._join(request)
        except Exception as error:
            failed = _said(error)
        failures = self._ranks.agree(failed, request.timeout)
        if not failures:
            newest = self._ranks.newest(self._first, request.timeout)
            self._update(newest, request.timeout)
            failures = self._failed.reason if self._failed else None
        if failures:
            self.leave()
            raise LoadError(failures)

    def join(self, request: WorkerRequest) -> None:
        """Joins the sender unless this worker has, and compares its model with the engine's.

        What is fetched here is verified and held; the model does not change. Once it has joined, it
        raises also where the weights that the engine has are not whole.
        """
        if request.ranks not in (0, self._ranks.count):
            # They would load one by one: some the new version, and others not.
            words = (
                f"{request.ranks} ranks of it do not agree on loads, but each {self._ranks.count} "
                "of them: run each data-parallel replica of a dense model as an engine of its own"
            )
            self._ranks.fail(UpdateError(words, "old"))
            return
        # All ranks are in the same state: the engine refuses a call, and not on one rank alone.
        if self._started:
            self._ranks.fail(UpdateError("an update was begun and not finished", "open"))
            return
        if request.asleep and not self._under_way:
            words = "it was put to sleep, or paused, by somebody else"
            self._ranks.fail(UpdateError(words, "asleep"))
            return
        failed = None
        try:
            self._join(request)
        except Exception as error:
            failed = _said(error)
        if failures := self._ranks.agree(failed, request.timeout):
            self._ranks.fail(UpdateError(failures, "old"))
            return
        self._under_way = True
        if mixed := self._mixed(request.timeout):
            self._ranks.fail(UpdateError(mixed, "unknown"))

    def start(self) -> None:
        """An update begins. The load prepares what it needs."""
        self._started = True

    def finish(self) -> None:
        """It ends. The load has finished what it began."""
        self._started = False

    def update(self, version: int, timeout: float) -> None:
        """Loads a version: every rank of the engine has it afterwards, or none.

        It never raises, as the engine would take the update for ended on some ranks alone;
        :meth:`loaded` says what became of it.
        """
        self._update(version, timeout)

    def loaded(self) -> None:
        """Says why the last update failed, if it did."""
        if self._failed is not None:
            self._ranks.fail(self._failed)

    def restore(self, version: int, timeout: float) -> None:
        """Brings the last whole version back where a load has left a mix.

        It raises also where that is the new version, which the trainer took for failed: its update
        was slow, and was done later.
        """
        target, failed = self._target, None
        try:
            target.restore()
        except Exception as error:
            failed = _said(error)
        holds = target.holds
        if failures := self._ranks.agree(failed, timeout, holds):
            self._ranks.fail(UpdateError(failures, "unknown"))
        elif holds is not None and holds[0] == self._run and holds[1] >= version:
            self._ranks.fail(UpdateError(f"version {holds[1]} was loaded meanwhile", "new"))

    def leave(self) -> None:
        """Leaves the sender. The model keeps what it has. Any number of times."""
        background, session = self._background, self._session
        self._background = self._session = self._joined = None
        if background is not None:
            background.shutdown(_ends.why)
        if session is not None:
            session.shutdown(_ends.why)

    def _join(self, request: WorkerRequest) -> None:
        worker = request.first_worker + self._place.rank
        known = self._joined == (request.sender, worker) and self._follows()
        if known and request.run:
            # The numbers of a sender that has started again may begin below those that are here.
            epoch, name = self._run
            known = request.run == f"{epoch} {name}"
        # A version whose load failed does not come once more to a worker that stays.
        if known and request.version > self._missed:
            self._wait_staged(request.version, request.timeout)
            return
        self.leave()
        info = InitInfo.from_json(request.sender)
        if len(info.models) != 1:
            raise WrongWeightsError(
                f"an engine runs one model, and the sender has {', '.join(info.models)}: make "
                "a sender for the engines' model alone"
            )
        self._model = info.models[0]
        self._session = Session.prepare_receiver(info, worker, None, "cpu")
        first = self._session.join_receiver(request.timeout)
        if first is None:
            raise WrongWeightsError(f"the scheme {info.scheme!r} carries no weights")
        self._joined = (request.sender, worker)
        (snapshot, _), = first.members()
        self._run, self._first = snapshot.run, snapshot.version
        try:
            self._target.compare(snapshot)
        except WrongWeightsError:
            self.leave()
            raise
        if snapshot.version < request.version:
            raise DeadlineError(
                f"version {request.version} is not here after {request.timeout:g} s; the newest is "
                f"version {snapshot.version}"
            )
        self._missed = -1

    def _wait_staged(self, version: int, timeout: float) -> None:
        """Until the version is here; the engine generates meanwhile."""
        assert self._background is not None
        until = time.monotonic() + timeout
        while self._here() < version:
            if time.monotonic() > until or not self._follows():
                raise DeadlineError(
                    f"version {version} is not here after {timeout:g} s; the newest is version "
                    f"{self._here()}"
                )
            time.sleep(_LOOK)

    def _here(self) -> int:
        """The newest version that was fetched, whether it is loaded or not."""
        assert self._background is not None
        staged = self._background.staged().get(self._model, 0)
        return max(staged, self._background.versions()[self._model])

    def _follows(self) -> bool:
        """Whether the sender's versions still arrive here."""
        return self._background is not None and self._background.state()[0] == "following"

    def _update(self, version: int, timeout: float) -> None:
        target, failed = self._target, None
        self._failed = None
        target.begin(timeout)
        try:
            self._load(version, timeout)
        except Exception as error:
            failed = target.failure or _said(error)
        # Ranks that loaded have agreed on that; to tell the sender comes after it.
        failures = target.agreed
        if failures is None:
            failures = self._ranks.agree(failed, timeout, target.holds)
            if not failures and not target.whole:
                # It has the version, and the engine has discarded it.
                failures = target.load_again()
        if not failures:
            return
        self._missed = version
        if self._session is not None and self._background is None:
            self.leave()
        if mixed := self._mixed(timeout):
            self._failed = UpdateError(f"{failures}; {mixed}", "unknown")
        else:
            self._failed = UpdateError(failures, "old")

    def _mixed(self, timeout: float) -> str | None:
        """Why the engine's weights are not those of one version; None if they are."""
        target = self._target
        failed = None if target.whole else "its weights are not whole"
        return self._ranks.agree(failed, timeout, target.holds)

    def _load(self, version: int, timeout: float) -> None:
        if self._session is None:
            raise PeerError("this worker has not joined a sender, or has restarted since")
        target = self._target
        models: list[tuple[str, Any]] = [(self._model, target)]
        if self._background is None:
            self._background = self._session.start_background(models, True)
        until = time.monotonic() + timeout
        while (held := self._background.versions()[self._model]) < version:
            if target.agreed:
                # Another rank failed.
                raise LoadError(target.agreed)
            if time.monotonic() > until or not self._follows():
                raise DeadlineError(f"version {version} is not here; the worker holds {held}")
            # What was loaded so far was not the version, and all ranks know.
            target.begin(timeout)
            if self._background.safe_point() is None:
                self._background.wait({self._model: version}, _HANDOVER)


class Target:
    """An engine's model as weightsync loads into it: full tensors, in the checkpoint's form."""

    def __init__(self, place: Place, ranks: Ranks) -> None:
        self._place = place
        self._ranks = ranks
        self._timeout = 0.0
        self._layout: Layout | None = None
        self._checkpoint: Checkpoint | None = None
        # Whether versions of a layout have the form that the model has in memory.
        self._in_memory: dict[Any, bool] = {}
        # What the model holds whole. It stays pinned: the way back needs it.
        self._held: NativeSnapshot | None = None
        self.whole = True
        #: Why the load of this update failed on this rank.
        self.failure: str | None = None
        #: What all ranks said of this update's load; None before.
        self.agreed: str | None = None

    @property
    def holds(self) -> Holds:
        """The run and the version of what the model holds; None of what the engine started with."""
        return None if self._held is None else (self._held.run, self._held.version)

    def begin(self, timeout: float) -> None:
        """An update begins. Ranks that are later than the timeout have failed."""
        self._timeout = timeout
        self.failure, self.agreed = None, None

    def compare(self, snapshot: NativeSnapshot) -> None:
        """Compares a version with the engine's model.

        Raises:
            WrongWeightsError: listing what differs.
        """
        self._has_form_of_memory(snapshot)

    def layout(self) -> Layout:
        assert self._layout is not None
        return self._layout

    def shape(self, layout: Layout) -> bool:
        self._layout = layout
        return True

    def load(self, snapshot: NativeSnapshot) -> None:
        """Loads a version on every rank, or says why not, and goes back to the version before."""
        if self.whole and self._held is not None and _same(snapshot, self._held):
            return
        if self.agreed:
            # The library goes back, where this could not.
            raise LoadError(self.agreed)
        before = self._held
        self.whole = False
        try:
            self._take(snapshot)
        except Exception as error:
            self.failure = _said(error)
        self.agreed = self._ranks.agree(self.failure, self._timeout, _of(snapshot)) or ""
        if not self.agreed:
            self._held, self.whole = snapshot, True
            return
        self._restore(before)
        raise LoadError(self.agreed)

    def load_again(self) -> str | None:
        """Loads what the model held before it was discarded; what went wrong on any rank."""
        try:
            self._restore(self._held)
        except Exception as error:
            self.failure = _said(error)
        return self._ranks.agree(self.failure, self._timeout, self.holds)

    def restore(self) -> None:
        """Loads what was held last, unless the model is whole."""
        if not self.whole:
            self._restore(self._held)

    def forget(self) -> None:
        """The engine discards the model's weights: they are whole again after the next load."""
        self.whole = False

    def _restore(self, snapshot: NativeSnapshot | None) -> None:
        self.whole = False
        if snapshot is None:
            self._place.load_first()
        else:
            self._take(snapshot)
        self._held, self.whole = snapshot, True

    def _take(self, snapshot: NativeSnapshot) -> None:
        tensors: Iterable[tuple[str, Any]] = tensors_of(snapshot)
        if self._has_form_of_memory(snapshot):
            assert self._checkpoint is not None
            tensors = self._checkpoint.of_memory(tensors)
        self._place.load(tensors, snapshot.version)

    def _has_form_of_memory(self, snapshot: NativeSnapshot) -> bool:
        layout = (snapshot.layout.id, tuple(snapshot.ties))
        if layout not in self._in_memory:
            if self._checkpoint is None:
                self._checkpoint = self._place.checkpoint()
            what = f"{snapshot.model} v{snapshot.version}"
            self._in_memory[layout] = self._checkpoint.compare(what, _tensors_of(snapshot))
        return self._in_memory[layout]


def tensors_of(snapshot: NativeSnapshot) -> Iterator[tuple[str, Any]]:
    """The tensors of a version, read in place; tied ones under each of their names."""
    tensors, states = Snapshot(snapshot), states_of(snapshot)
    return ((name, tensors[name]) for name in tensors if name not in states)


def _of(snapshot: NativeSnapshot) -> Holds:
    return snapshot.run, snapshot.version


def _same(one: NativeSnapshot, other: NativeSnapshot) -> bool:
    return _of(one) == _of(other)


def _tensors_of(snapshot: NativeSnapshot) -> Tensors:
    found = {
        name: (dtype, tuple(shape))
        for name, dtype, shape in snapshot.layout.tensors()
        if not _extra.is_extra(name)
    }
    found.update((alias, found[name]) for alias, name in snapshot.ties if name in found)
    return found


def _said(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text if isinstance(error, WeightsyncError) else f"{type(error).__name__}: {text}"
