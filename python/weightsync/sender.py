"""The trainer's end."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from weightsync import _dtypes, _ends, _paths
from weightsync._checks import choice, numbers, only_version, text
from weightsync._native import InitInfo, PendingSend, Report, Session, WorkerStatus
from weightsync._processes import Watched
from weightsync._source import Source, Streamed
from weightsync._turns import Turns
from weightsync.errors import LifecycleError, MissingModelError, ModelError, SendError, SettingError
from weightsync.mapping import PerModel, by_model
from weightsync.scheme import Scheme
from weightsync.snapshot import Snapshot
from weightsync.store import Saving, Store, keeper_of

if TYPE_CHECKING:
    from weightsync._native import _Setup

logger = logging.getLogger("weightsync")

# How workers end that are gone for good.
_GONE = ("died", "failed", "left")

#: How far a send waits; each level includes the one before.
WaitFor = Literal["sent", "staged", "applied"]

Strategy = Literal["state_dict", "tensordict"]


class Sender(_ends.AsyncWith):
    """The trainer's end of one model, or of several that can flip together.

    The constructor sends nothing. It fixes names, dtypes and shapes, and where workers will
    find the sender (:attr:`init_info`). :meth:`connect` waits for the workers.
    The model's memory is read during :meth:`connect` and :meth:`send`, and at no
    other time.

    Args:
        model: the weights: a torch module, a state dict, a nested dict of tensors or
            numpy arrays, or a TensorDict. The sender keeps it, and ``send()`` sends it.
        name: the model's name.
        models: several models by name, in place of ``model``; or, with ``context``,
            their paths, such as ``["policy", "env.value_net", "transforms[0]"]``.
        context: where paths begin. Each send looks them up again.
        scheme: how weights travel: a :class:`Scheme` such as ``SharedMem(pull=True)``,
            ``MultiProcess(every=4)``, ``Distributed(listen="host:port")``, ``Rpc()`` or
            ``NoSync()``; or its text, such as ``"multi-process:every=4"``.
        strategy: ``"state_dict"`` leaves out buffers that are not persistent,
            ``"tensordict"`` sends them too. Workers take either.
        run_dir: a directory of this user; with it, workers find a restarted trainer.
        mapping: rules from the trainer's weights to those that are sent; several models
            take a dict of mappings by name.
        cast: a dtype (``torch.bfloat16``, ``"bfloat16"``) for floating-point tensors.
        slots: the smallest and the largest number of versions that have room.
        history: how many older versions are kept.
        checksums: whether the copy pass makes checksums for workers to verify.
        digest: whether each version's digest is made after it was sent.
        copy_threads: how many threads copy; 0 chooses by the size and the cores.
        async_send_limit: how many asynchronous sends may be on their way; None refuses a second.
        timeout: how long a send waits at most, in seconds, unless it says otherwise.
        keep: a :class:`Store`, or its url: versions that are sent to all workers are saved there
            while training goes on. The numbers of versions then go on from the store's. Give
            ``Store(url, files=[…])`` for a model's ``config.json`` and tokenizer to be saved with it.
            :attr:`saves` says what became of each save, and :meth:`shutdown` waits for the last.
        every: with ``keep``, saves the first of every so many versions.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        name: str = "policy",
        models: Mapping[str, Any] | Sequence[str] | None = None,
        context: Any = None,
        scheme: Scheme | str = "shared-mem",
        strategy: Strategy = "state_dict",
        run_dir: str | os.PathLike[str] | None = None,
        mapping: PerModel | None = None,
        cast: Any = None,
        slots: tuple[int, int] | None = None,
        history: int = 0,
        checksums: bool = False,
        digest: bool = False,
        copy_threads: int = 0,
        async_send_limit: int | None = None,
        timeout: float | None = 60.0,
        keep: Store | str | os.PathLike[str] | None = None,
        every: int = 1,
    ) -> None:
        choice("strategy", strategy, "state_dict", "tensordict")
        self._context = context
        self._models = _named(model, name, models, context)
        for one in self._models:
            text("the name of a model", one)
        self._strategy = strategy
        self._mappings = by_model(mapping, self._models)
        if cast is not None and any(one.quantises for one in self._mappings.values()):
            raise SettingError(
                "cast: it would cast the scales of what the mapping quantises, too: give the mapping "
                'a rule .cast("*", dtype) in its place'
            )
        self._sources = {name: self._source(name) for name in self._models}
        self._sending = _Sending(list(self._sources.values()))
        self._connected = False
        # The workers that the last report has as gone, and how.
        self._gone: dict[int, str] = {}
        self._keeper = keeper_of(keep, every, self._models, str(scheme))
        # The number of the first version, where the store has earlier ones.
        self._first: int | None = None
        self._session = Session(text("scheme", str(scheme)))
        self._setup: _Setup = {
            "scheme": str(scheme),
            "run_dir": None if run_dir is None else os.fspath(run_dir),
            "cast": None if cast is None else _dtypes.name_of(cast),
            "slots": slots,
            "history": history,
            "checksums": checksums,
            "digest": digest,
            # Tensors that come one at a time come to the thread that sends.
            "copy_threads": 1 if _is_streamed(self._models) else copy_threads,
            "async_send_limit": async_send_limit,
            "deadline": timeout,
        }
        self._info = self._session.prepare_sender(
            [(name, self._place(name, None)) for name in self._models], self._setup
        )
        _ends.made(self)

    @property
    def init_info(self) -> InitInfo:
        """The init info by which workers join. It pickles, and ``to_json()`` makes text of it."""
        return self._info

    @property
    def is_connected(self) -> bool:
        """Whether ``connect`` has returned once, so that workers can join."""
        return self._connected

    @property
    def models(self) -> list[str]:
        """The names of the models."""
        return list(self._models)

    @property
    def scheme(self) -> str:
        """How weights travel: the scheme's text."""
        return self._info.scheme

    def connect(
        self,
        workers: int | Iterable[int] = 1,
        *,
        weights: Any = None,
        weights_dict: Mapping[str, Any] | None = None,
        processes: Iterable[Any] | None = None,
        version: int | None = None,
        timeout: float | None = 60.0,
    ) -> None:
        """Publishes the first version, and returns once the workers have loaded it.

        With :class:`Rpc` the first weights come with the first send, unless it has
        ``initial="connect"``: ``connect`` then compares the weights, sends none of them,
        and returns once the workers are there.

        Args:
            workers: how many, or which; others may join later. A worker that has loaded
                the first version and has left in order counts.
            weights: the model's first weights, in place of its own.
            weights_dict: the same for several models.
            processes: the workers' processes, of :mod:`multiprocessing` or
                :mod:`subprocess`: a process that fails before all have joined ends the
                wait.
            version: the first version's number, such as the step that training goes on
                from; 1 without it.
            timeout: in seconds.

        Raises:
            DeadlineError: naming the workers that were not there in time. Workers that have
                joined stay: ``connect`` can be called again, and goes on waiting. The
                first version remains the one that the first call published.
            PeerError: naming the processes that have failed.
            WrongWeightsError: if the weights do not fit a worker's model.
        """
        _ends.refuse_lone_sender(self._info, workers)
        with self._sending.take("connect", timeout) as left:
            given = self._given(weights, None, weights_dict, whole=True)
            watch = None if processes is None else Watched(processes).check
            if self._keeper is not None and not self._connected:
                newest = self._keeper.open()
                if version is None and newest:
                    self._first = version = newest + 1
                elif version is not None and version <= newest:
                    raise SendError(
                        f"version={version}: the store that keeps the versions has v{newest} already, so "
                        f"expected {newest + 1} or more, or none to go on from there"
                    )
            # Workers may have joined even if this call fails.
            _ends.opened(self)
            self._session.connect_sender(given, workers, left, watch, version)
            if not self._connected:
                self._connected = True
                self._sent_to(None)
        logger.info("connected: %r", self)

    def wait_for(self, workers: int | Iterable[int], *, timeout: float | None = 60.0) -> None:
        """Waits until these workers have joined and have loaded the version sent last.

        Raises:
            DeadlineError: naming the workers that were not there in time.
        """
        with self._sending.take("wait_for", timeout) as left:
            self._session.wait_for(workers, left)

    def send(
        self,
        weights: Any = None,
        *,
        model: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
        worker_ids: int | Iterable[int] | None = None,
        wait: WaitFor = "applied",
        timeout: float | None = None,
        partial: bool = False,
        version: int | None = None,
        wait_late: bool = False,
    ) -> Report:
        """Publishes the next version, and waits until every worker has its line.

        Args:
            weights: the weights to send, as for the constructor; the model's path; a
                :class:`Snapshot` to go back to; or None: the models themselves.
            model: which model the weights are of, where there are several.
            weights_dict: several models at once: on each worker all flip, or none.
            worker_ids: these workers alone; the others stay as they are.
            wait: how far the send waits: ``"sent"``, ``"staged"`` or ``"applied"``.
            timeout: in seconds; None: the sender's own.
            partial: whether the weights are some of the model's tensors only.
            version: the version's number, such as a training step; it must grow.
            wait_late: wait also for workers that were late for an earlier send and have
                not moved since; without it the send passes them over.

        Returns:
            A report with a line per worker. A worker that died, refused or was late is a
            line, and the others have the version. ``send().ensure_applied()`` raises unless
            at least one worker is there and every worker has the version. So does
            ``assert send().all_applied``, but ``python -O`` removes the assert and the send.

        Raises:
            WrongWeightsError: naming each tensor that differs from the setup.
            DeadlineError: naming the workers that hold every slot.
        """
        workers = None if worker_ids is None else numbers(worker_ids)
        with self._sending.take("send", self._limit(timeout)) as left:
            if isinstance(weights, Snapshot):
                if model not in (None, weights.model) or weights_dict is not None:
                    raise ModelError(f"the snapshot is of {weights.model!r} alone")
                if partial:
                    raise SendError("a snapshot is a whole version: send it without partial=True")
                again = (weights.model, workers, wait, left, False, version, wait_late)
                report = self._session.send_again(weights._native, again)
            else:
                given = self._given(weights, model, weights_dict, partial=partial)
                version = self._number(version)
                options = (model, workers, wait, left, partial, version, wait_late)
                report = self._session.send(given, options)
            self._sent_to(worker_ids)
        self._log(report)
        return report

    def send_async(
        self,
        weights: Any = None,
        *,
        model: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
        worker_ids: int | Iterable[int] | None = None,
        wait: WaitFor = "applied",
        timeout: float | None = None,
        partial: bool = False,
        version: int | None = None,
        wait_late: bool = False,
    ) -> PendingSend:
        """As :meth:`send`, but returns once the weights were read, so that they may change.

        ``wait()`` of the returned value waits for the report; so does ``await``.
        """
        with self._sending.take("send_async", self._limit(timeout)) as left:
            given = self._given(weights, model, weights_dict, partial=partial)
            workers = None if worker_ids is None else numbers(worker_ids)
            version = self._number(version)
            options = (model, workers, wait, left, partial, version, wait_late)
            pending = self._session.send_async(given, options)
            self._sent_to(worker_ids)
            return pending

    def send_each(
        self,
        weights: Mapping[int, Any],
        *,
        model: str | None = None,
        wait: WaitFor = "applied",
        timeout: float | None = None,
        wait_late: bool = False,
    ) -> Report:
        """Sends each worker weights of its own, and changes only these workers.

        Workers that are given the same object share one version.
        """
        report = self._send_each(weights, model, wait, timeout, wait_late)
        self._log(report)
        return report

    def _send_each(
        self,
        weights: Mapping[int, Any],
        model: str | None = None,
        wait: WaitFor = "applied",
        timeout: float | None = None,
        wait_late: bool = False,
    ) -> Report:
        with self._sending.take("send_each", self._limit(timeout)) as left:
            name = self._only(model)
            if not weights:
                raise SettingError("send_each: expected weights of at least one worker: {0: …}")
            sources: dict[int, Any] = {}
            kept = []
            for given in weights.values():
                if id(given) not in sources:
                    source = self._source(name)
                    kept.append((source, given))
                    sources[id(given)] = source.place(given)
            each = [(worker, sources[id(given)]) for worker, given in weights.items()]
            options = (name, None, wait, left, False, None, wait_late)
            return self._session.send_each(each, options)

    def hold(self, worker_ids: int | Iterable[int]) -> None:
        """Holds workers at the versions they have; sends pass them over."""
        self._session.hold(numbers(worker_ids), True)

    def release(self, worker_ids: int | Iterable[int]) -> None:
        """Lets held workers go on, with the newest version at once."""
        self._session.hold(numbers(worker_ids), False)

    def forget(self, worker_ids: int | Iterable[int]) -> None:
        """Removes workers that failed, died or were lost from the reports, for good.

        Until then, or until such a worker is back, each report has its line.
        """
        self._session.forget(numbers(worker_ids))

    @property
    def workers(self) -> list[WorkerStatus]:
        """Every connected worker with the versions it has loaded."""
        return self._session.workers()

    def status(self) -> dict[str, Any]:
        """What the sender knows of itself and its workers now, as ``weightsync status --json`` has it.

        It has ``models`` with their versions, ``last_send``, and for each of the ``workers`` its
        versions and the outcome of the last send (``last``). Workers that failed, died or were
        lost stay in it, with ``gone``, until they are back or forgotten (:meth:`forget`).
        """
        status: dict[str, Any] = json.loads(self._session.status())
        return status

    @property
    def versions(self) -> dict[str, int]:
        """The version of each model that was published last."""
        return self._session.sent_versions()

    @property
    def version(self) -> int:
        """The version published last.

        Raises:
            ModelError: if there are several models, whose versions :attr:`versions` has.
        """
        return only_version(self.versions)

    def snapshot(self, model: str | None = None, version: int | None = None) -> Snapshot:
        """The version sent to all workers last, or an older one that is still kept."""
        return Snapshot(self._session.sent(self._only(model), version))

    def digest(self, model: str | None = None) -> str:
        """The digest of the version last sent to all workers; workers compute the same."""
        return self._session.digest(self._only(model))

    @property
    def saves(self) -> list[Saving]:
        """The last saves, with ``keep``, oldest first."""
        return [] if self._keeper is None else list(self._keeper.saves)

    def shutdown(self) -> None:
        """Tells the workers that the sender ends, and frees everything. Any number of times.

        With ``keep`` it returns when the last save has ended, or its storage answers no more.
        """
        try:
            self._session.shutdown()
        finally:
            if self._keeper is not None:
                self._keeper.close()
        _ends.closed(self)

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        return f"<Sender of {', '.join(self._models)} by {self._info.scheme}: {self._session.summary()}>"

    def __getstate__(self) -> Any:
        raise LifecycleError(
            "a sender is a live end and cannot be pickled: pass its init_info to the worker"
        )

    def _given(
        self,
        weights: Any,
        model: str | None,
        weights_dict: Mapping[str, Any] | None,
        *,
        whole: bool = False,
        partial: bool = False,
    ) -> list[tuple[str | None, Any]]:
        """The weights to send by model, with the current addresses of their tensors."""
        if weights_dict is not None:
            if weights is not None or model is not None:
                raise ModelError("give weights (of a model) or weights_dict, not both")
            unknown = [name for name in weights_dict if name not in self._models]
            if unknown:
                raise MissingModelError.among(unknown[0], self._models)
            named = dict(weights_dict)
            if whole:
                named = {name: named.get(name) for name in self._models}
        elif weights is None and model is None:
            named = dict.fromkeys(self._models)
        else:
            named = {self._only(model): weights}
            if whole:
                named = {name: named.get(name) for name in self._models}
        return [(name, self._place(name, given, partial)) for name, given in named.items()]

    def _place(self, name: str, given: Any, partial: bool = False) -> Any:
        if isinstance(given, Snapshot):
            raise SendError("a snapshot is sent again alone: send(snapshot)")
        if given is None:
            given = self._models[name]
            if isinstance(given, _Path):
                given = _paths.resolve(self._context, given)
        elif isinstance(given, str):
            given = _paths.resolve(self._context, given)
        if isinstance(given, Streamed):
            if name in self._mappings:
                raise SettingError(
                    "mapping: it may need several tensors at once, and these come one at a time: "
                    "send a dict of them"
                )
            return given.native
        source = self._source(name) if partial else self._sources[name]
        native = source.place(given)
        if partial:
            self._sending.parts.append(source)
        return native

    def _log(self, report: Report) -> None:
        """Warns of a send that failed, and of a worker that is gone once alone."""
        before = self._gone
        failed = {line.worker: line.outcome for line in report.failed}
        self._gone = {worker: how for worker, how in failed.items() if how in _GONE}
        if failed:
            is_known = all(before.get(worker) == how for worker, how in failed.items())
            logger.log(logging.INFO if is_known else logging.WARNING, "%s", report)

    def _limit(self, timeout: float | None) -> float | None:
        """The timeout of a send."""
        return self._setup["deadline"] if timeout is None else timeout

    def _number(self, version: int | None) -> int | None:
        """The number of a send. The first one goes on from the store's, if ``connect`` sent nothing."""
        first, self._first = self._first, None
        if version is None and first is not None and not any(self.versions.values()):
            return first
        return version

    def _sent_to(self, worker_ids: int | Iterable[int] | None) -> None:
        # What only some workers have is not the trainer's version.
        if self._keeper is not None and worker_ids is None:
            self._keeper.sent(self._session)

    def _source(self, name: str) -> Source:
        return Source(self._strategy, self._mappings.get(name))

    def _only(self, model: str | None) -> str:
        if model is not None:
            if model not in self._models:
                raise MissingModelError.among(model, self._models)
            return model
        if len(self._models) != 1:
            raise ModelError(
                f"there are several models ({', '.join(self._models)}): say which, or send them all"
            )
        return next(iter(self._models))


class _Sending(Turns):
    """Allows one send at a time, and releases its slices and copies from a device after it."""

    def __init__(self, sources: list[Source]) -> None:
        super().__init__()
        self._sources = sources
        # Sources of a partial send.
        self.parts: list[Source] = []

    @contextlib.contextmanager
    def take(self, call: str, timeout: float | None) -> Iterator[float | None]:
        with super().take(call, timeout) as left:
            try:
                yield left
            finally:
                self.parts.clear()
                for source in self._sources:
                    source.release()


def _is_streamed(models: Mapping[str, Any]) -> bool:
    return any(isinstance(one, Streamed) for one in models.values())


class _Path(str):
    """A model that is looked up at each send."""


def _named(
    model: Any, name: str, models: Mapping[str, Any] | Sequence[str] | None, context: Any
) -> dict[str, Any]:
    if (model is None) == (models is None):
        raise ModelError("a sender needs its model, or several as models={name: model}")
    if models is None:
        return {name: model}
    if isinstance(models, Mapping):
        return dict(models)
    if context is None:
        raise ModelError("paths of models need the context that they start at: context=…")
    return {path: _Path(path) for path in models}
