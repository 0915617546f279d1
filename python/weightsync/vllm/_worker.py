"""One worker of an engine: it joins the sender, and loads versions into vLLM's model."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from weightsync import _ends, _extra
from weightsync._native import Background, InitInfo, Layout, Session, Snapshot
from weightsync.errors import DeadlineError, PeerError, WeightsyncError, WrongWeightsError
from weightsync.vllm import _load
from weightsync.vllm._checkpoint import Checkpoint, Tensors
from weightsync.vllm._ranks import Ranks

# How long a version that the sender calls staged may take to reach this thread.
_HANDOVER = 0.05


@dataclass(frozen=True)
class Place:
    """Where in an engine a worker is, and what it loads into."""

    model: Any
    #: None where vLLM gives it to nobody (0.22 to 0.24, outside of a load).
    vllm_config: Any
    model_config: Any
    rank: int

    @staticmethod
    def of(config: Any, model: Any) -> Place:
        """From a ``VllmConfig``; or from a ``ParallelConfig``, as vLLM 0.22 to 0.24 give it."""
        if not hasattr(config, "parallel_config"):
            from vllm.config import get_current_vllm_config

            config = get_current_vllm_config()
        parallel = config.parallel_config
        index = getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)
        rank = index * parallel.world_size + parallel.rank
        return Place(model, config, config.model_config, rank)


class UpdateError(Exception):
    """An update of this engine that failed, and what the engine holds now.

    Its text crosses vLLM's process borders, where types are lost: the trainer reads it.
    """

    def __init__(self, reason: str, weights: str) -> None:
        super().__init__(f"weightsync[{weights}]: {reason}")


class EngineWorker:
    """Receives for one worker. vLLM calls it from one thread."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._ranks = Ranks()
        self._target = Target(place, self._ranks)
        self._session: Session | None = None
        self._background: Background | None = None
        self._joined: tuple[str, int] | None = None
        self._model = ""
        # Between vLLM's start and finish.
        self._started = False
        # Why the last update failed, if it did.
        self._failed: UpdateError | None = None

    def join(self, sender: str, first_worker: int, version: int, timeout: float) -> None:
        """Joins the sender unless this worker has, and compares its model with vLLM's.

        What is fetched here is verified and held; the model does not change.
        """
        if self._started:
            # All ranks are: vLLM would refuse another start, and not on one rank alone.
            self._ranks.fail(UpdateError("an update was begun and not finished", "open"))
            return
        failed = None
        try:
            self._join(sender, first_worker + self._place.rank, version, timeout)
        except Exception as error:
            failed = _said(error)
        if failures := self._ranks.agree(failed):
            self._ranks.fail(UpdateError(failures, "old"))

    def start(self) -> None:
        """An update begins. The load prepares what it needs."""
        self._started = True

    def finish(self) -> None:
        """It ends. The load has finished what it began."""
        self._started = False

    def update(self, version: int, timeout: float) -> None:
        """Loads a version: every rank of the engine has it afterwards, or none.

        It never raises, as vLLM would take the update for ended on some ranks alone;
        :meth:`loaded` says what became of it.
        """
        target, failed = self._target, None
        self._failed = None
        target.begin()
        try:
            self._load(version, timeout)
        except Exception as error:
            failed = target.failure or _said(error)
        # Ranks that loaded have agreed on that; to tell the sender comes after it.
        failures = target.agreed if target.agreed is not None else self._ranks.agree(failed)
        if not failures:
            return
        if self._session is not None and self._background is None:
            self.leave()
        whole = self._ranks.agree(None if target.whole else "its weights are half loaded")
        if whole:
            self._failed = UpdateError(f"{failures}; {whole}", "unknown")
        else:
            self._failed = UpdateError(failures, "old")

    def loaded(self) -> None:
        """Says why the last update failed, if it did."""
        if self._failed is not None:
            self._ranks.fail(self._failed)

    def restore(self) -> None:
        """Brings the last whole version back where a load has left a mix."""
        failed = None
        try:
            self._target.restore()
        except Exception as error:
            failed = _said(error)
        if failures := self._ranks.agree(failed):
            self._ranks.fail(UpdateError(failures, "unknown"))

    def leave(self) -> None:
        """Leaves the sender. The model keeps what it has. Any number of times."""
        background, session = self._background, self._session
        self._background = self._session = self._joined = None
        if background is not None:
            background.shutdown(_ends.why)
        if session is not None:
            session.shutdown(_ends.why)

    def _join(self, sender: str, worker: int, version: int, timeout: float) -> None:
        if self._joined != (sender, worker) or not self._follows():
            self.leave()
            info = InitInfo.from_json(sender)
            if len(info.models) != 1:
                raise WrongWeightsError(
                    f"an engine runs one model, and the sender has {', '.join(info.models)}: make "
                    "a sender for the engines' model alone"
                )
            self._model = info.models[0]
            self._session = Session.prepare_receiver(info, worker, None, "cpu")
            first = self._session.join_receiver(timeout)
            if first is None:
                raise WrongWeightsError(f"the scheme {info.scheme!r} carries no weights")
            self._joined = (sender, worker)
            (snapshot, _), = first.members()
            try:
                self._target.compare(snapshot)
            except WrongWeightsError:
                self.leave()
                raise
            if snapshot.version < version:
                raise DeadlineError(
                    f"version {version} is not here after {timeout:g} s; the newest is "
                    f"version {snapshot.version}"
                )

    def _follows(self) -> bool:
        """Whether the sender's versions still arrive here."""
        return self._background is not None and self._background.state()[0] == "following"

    def _load(self, version: int, timeout: float) -> None:
        if self._session is None:
            raise PeerError("this worker has not joined a sender, or has restarted since")
        models: list[tuple[str, Any]] = [(self._model, self._target)]
        if self._background is None:
            self._session.load_joined(models)
            self._background = self._session.start_background(models, True)
        until = time.monotonic() + timeout
        while True:
            self._background.safe_point()
            if (held := self._background.versions()[self._model]) >= version:
                break
            if self._target.failure is not None:
                raise RuntimeError(self._target.failure)
            if time.monotonic() > until or not self._follows():
                raise DeadlineError(f"version {version} is not here; the worker holds {held}")
            self._background.wait({self._model: version}, _HANDOVER)


class Target:
    """vLLM's model as weightsync loads into it: full tensors, in the checkpoint's form."""

    def __init__(self, place: Place, ranks: Ranks) -> None:
        self._place = place
        self._ranks = ranks
        self._layout: Layout | None = None
        self._checkpoint: Checkpoint | None = None
        # What the model holds whole. It stays pinned: the way back needs it.
        self._held: Snapshot | None = None
        self.whole = True
        #: Why the load of this update failed on this rank.
        self.failure: str | None = None
        #: What all ranks said of this update's load; None before.
        self.agreed: str | None = None

    def begin(self) -> None:
        """An update begins."""
        self.failure, self.agreed = None, None

    def compare(self, snapshot: Snapshot) -> None:
        """Compares a version with vLLM's model.

        Raises:
            WrongWeightsError: listing what differs.
        """
        if self._checkpoint is None:
            self._checkpoint = Checkpoint(self._place.model_config)
        what = f"{snapshot.model} v{snapshot.version}"
        self._checkpoint.compare(what, _tensors_of(snapshot))

    def layout(self) -> Layout:
        assert self._layout is not None
        return self._layout

    def shape(self, layout: Layout) -> bool:
        self._layout = layout
        return True

    def load(self, snapshot: Snapshot) -> None:
        """Loads a version, or says why not; the version before comes back by the same call."""
        if self.whole and self._held is not None and _same(snapshot, self._held):
            return
        if self.agreed is not None:
            # The way back: every rank goes it.
            self._restore(snapshot)
            return
        before = self._held
        self.whole = False
        try:
            self._take(snapshot)
        except Exception as error:
            self.failure = _said(error)
        self.agreed = self._ranks.agree(self.failure) or ""
        if not self.agreed:
            self._held, self.whole = snapshot, True
            return
        if before is None:
            # The library has nothing to go back to: these were the weights vLLM started with.
            self._restore(None)
        raise RuntimeError(self.agreed)

    def restore(self) -> None:
        """Loads what was held last, unless the model is whole."""
        if not self.whole:
            self._restore(self._held)

    def _restore(self, snapshot: Snapshot | None) -> None:
        self.whole = False
        if snapshot is None:
            _load.load_first(self._place)
        else:
            self._take(snapshot)
        self._held, self.whole = snapshot, True

    def _take(self, snapshot: Snapshot) -> None:
        assert self._checkpoint is not None
        _load.load(self._place, self._checkpoint.of(_load.tensors_of(snapshot)))


def _same(one: Snapshot, other: Snapshot) -> bool:
    return (one.run, one.version) == (other.run, other.version)


def _tensors_of(snapshot: Snapshot) -> Tensors:
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
