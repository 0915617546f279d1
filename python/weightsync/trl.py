"""TRL's trainers with vLLM engines that take their weights from a weightsync sender.

``AsyncGRPOTrainer`` is given a :class:`WeightTransfer`. For ``GRPOTrainer`` call :func:`install`
before it is built. ``docs/trl.md`` is the guide.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypedDict

from weightsync import _dtypes
from weightsync._checks import choice
from weightsync._source import Streamed
from weightsync._tested import check
from weightsync.engines._http import Server
from weightsync.errors import (
    DeadlineError,
    LifecycleError,
    NotAppliedError,
    SettingError,
    UnsupportedError,
    WeightsyncError,
    WrongWeightsError,
)
from weightsync.scheme import Scheme
from weightsync.sender import Sender
from weightsync.vllm import SyncReport, Trainer

if TYPE_CHECKING:
    from typing import Unpack

    import torch

__all__ = ["Settings", "WeightTransfer", "install", "uninstall"]

logger = logging.getLogger("weightsync")

# Between two looks at a server that does not serve yet, in seconds.
_LOOK = 1.0

# Name, dtype and shape of a tensor, as the native engine has them.
_Spec = tuple[str, str, tuple[int, ...]]


class Settings(TypedDict, total=False):
    """The settings of :class:`WeightTransfer`, and of :func:`install`."""

    scheme: Scheme | str
    pause: Literal["keep", "wait", "abort"]
    require: Literal["fresh", "any", "all"]
    timeout: float
    ready_timeout: float
    first_version: int | None
    info_files: Mapping[str, str | os.PathLike[str]] | None
    options: Mapping[str, Any] | None


class WeightTransfer:
    """Brings the weights of an ``AsyncGRPOTrainer`` to vLLM engines, as versions.

    Give it to the trainer as ``weight_transfer=``. No engine ever generates with a mix of two
    versions. When ``send_weights`` has returned, every engine whose line of :attr:`report` says
    ``updated`` generates with the new version, and every other engine has whole weights, or does
    not generate.

    TRL calls :meth:`pause`, :meth:`send_weights` and :meth:`resume`. An engine is paused inside of
    ``send_weights``, for its load alone, when it has fetched and verified the version. So it
    generates with the version before while TRL gathers the weights, and the other two calls do
    nothing.

    Making one opens nothing, so each rank of the trainer may make one. TRL uses that of rank 0.

    Args:
        engines: the URL of a vLLM server, an ``LLM`` or an ``AsyncLLM``; or several of these.
        scheme: as of :class:`weightsync.Sender`. Engines on other hosts need
            ``"distributed:…"``.
        pause: how requests under way fare while an engine loads, as of
            :class:`weightsync.vllm.Trainer`.
        require: when a sync raises. With ``"fresh"``, if no engine has the version, or one goes on
            without it: TRL takes all samples of now for samples of the version. With ``"any"``, if
            no engine has it; with ``"all"``, if one has not, as one that is dead.
        timeout: for a send, for each call to an engine, and for the fetch, in seconds. A send
            includes the gathering of the weights.
        ready_timeout: how long :meth:`init_weight_transfer` waits for servers, in seconds.
        first_version: the first version's number; 1 without it. A training that goes on from a
            checkpoint gives the next number, so that labels keep growing.
        info_files: by URL, the file that tells a server how to join when it restarts; see
            :meth:`weightsync.vllm.Trainer.add`.
        options: further settings of :class:`weightsync.Sender`, such as ``cast``. With a
            ``mapping`` among them each sync keeps a copy of all weights in the host's memory.

    Raises:
        UnsupportedError: if TRL is not there, or its version is not among those tested.
    """

    def __init__(
        self,
        engines: Any,
        *,
        scheme: Scheme | str = "shared-mem",
        pause: Literal["keep", "wait", "abort"] = "keep",
        require: Literal["fresh", "any", "all"] = "fresh",
        timeout: float = 300.0,
        ready_timeout: float = 240.0,
        first_version: int | None = None,
        info_files: Mapping[str, str | os.PathLike[str]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        check("trl")
        _unmerge_exactly()
        choice("pause", pause, "keep", "wait", "abort")
        choice("require", require, "fresh", "any", "all")
        self._engines = list(engines) if isinstance(engines, (list, tuple)) else [engines]
        if not self._engines:
            raise SettingError("engines: expected a server's URL, an LLM or several, got none")
        self._servers = [_checked(one) for one in self._engines if isinstance(one, str)]
        self._info_files = {url.rstrip("/"): file for url, file in (info_files or {}).items()}
        if unknown := sorted(set(self._info_files) - set(self._servers)):
            raise SettingError(f"info_files: {unknown[0]} is not among the engines")
        self._scheme, self._pause, self._require = scheme, pause, require
        self._timeout, self._ready_timeout = timeout, ready_timeout
        self._first = first_version
        # A version that is being loaded, the one before, and one for each engine that is behind.
        self._options = {"slots": (2, 3 + len(self._engines)), **(options or {})}
        self._opened: tuple[Sender, Trainer] | None = None
        self._specs: list[_Spec] = []
        self._version = 0
        #: What became of the last sync, engine by engine; None before the first.
        self.report: SyncReport | None = None

    @property
    def version(self) -> int:
        """The version that was sent last; 0 before the first.

        It is the label of every engine that has it: ``/weight_info`` of a server says so.
        """
        return self._version

    @property
    def trainer(self) -> Trainer | None:
        """What drives the engines; None before the first sync and after :meth:`destroy`."""
        return None if self._opened is None else self._opened[1]

    def init_weight_transfer(self) -> None:
        """Waits until every server serves. One that does not come is left to the first sync.

        Raises:
            DeadlineError: if all engines are servers, and none of them serves in time.
        """
        until = time.monotonic() + self._ready_timeout
        waiting = self._servers
        while waiting := [url for url in waiting if not _serves(url)]:
            if time.monotonic() >= until:
                break
            # Nothing announces that a server begins to serve.
            time.sleep(_LOOK)
        if not waiting:
            return
        text = f"{', '.join(waiting)}: no answer on /health in {self._ready_timeout:g} s"
        if len(waiting) == len(self._engines):
            raise DeadlineError(f"{text}; start vLLM there, or raise ready_timeout", "retry")
        logger.warning("%s; training begins without it", text)

    def pause(self) -> None:
        """Does nothing: :meth:`send_weights` pauses each engine for its load alone."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Sends a version, and brings it to every engine. The iterator is used up in any case.

        Names, dtypes and shapes are those of the first call. That one copies all weights to the
        host's memory; each later one holds one tensor at a time.

        Raises:
            NotAppliedError: if too few engines have the version, as ``require`` says.
                :attr:`report` says why. The engines have whole weights, or do not generate.
            WrongWeightsError: if the weights are not as in the first call. Nothing was sent.
        """
        self._send(iterator)

    def resume(self) -> None:
        """Does nothing: an engine that has loaded a version generates again."""

    def destroy(self) -> None:
        """Ends the sender. The engines keep the weights that they have.

        A later :meth:`send_weights` makes another sender, and version numbers go on.
        """
        if self._opened is not None:
            opened, self._opened = self._opened, None
            opened[0].shutdown()

    def _send(
        self, iterator: Iterable[tuple[str, torch.Tensor]], specs: list[_Spec] | None = None
    ) -> None:
        weights: Streamed | dict[str, torch.Tensor]
        with _used_up(iterator) as each:
            if self._opened is None:
                self._specs = specs or []
            if self._specs and self._options.get("mapping") is None:
                weights = Streamed(self._specs, _groups(each, [name for name, *_ in self._specs]))
            else:
                # The trainer may change or free a tensor when it is asked for the next one.
                weights = {name: _copy(tensor) for name, tensor in each}
                self._specs = _specs_of(weights)
            if not self._specs:
                raise WrongWeightsError("there are no weights to send: the iterator was empty")
            report = self._sync(weights)
        self.report, self._version = report, report.version
        self._judge(report)

    def _sync(self, weights: Streamed | dict[str, torch.Tensor]) -> SyncReport:
        if self._opened is None:
            self._opened = self._open(weights)
        sender, trainer = self._opened
        step = None
        if not sender.is_connected:
            step = self._version + 1 if self._version else self._first
        try:
            return trainer.sync(step, weights=weights)
        except Exception:
            if isinstance(weights, Streamed) and weights.failure is not None:
                raise weights.failure from None
            raise
        finally:
            if isinstance(weights, Streamed):
                weights.release()

    def _open(self, weights: Streamed | dict[str, torch.Tensor]) -> tuple[Sender, Trainer]:
        # A sender keeps its model: it gets the names, and not the weights of this sync.
        streams = isinstance(weights, Streamed) or self._options.get("mapping") is None
        sender = Sender(
            Streamed(self._specs) if streams else weights,
            scheme=self._scheme,
            timeout=self._timeout,
            **self._options,
        )
        try:
            trainer = Trainer(sender, pause=self._pause, timeout=self._timeout)
            for engine in self._engines:
                name = engine.rstrip("/") if isinstance(engine, str) else ""
                trainer.add(engine, info_file=self._info_files.get(name))
        except BaseException:
            sender.shutdown()
            raise
        return sender, trainer

    def _judge(self, report: SyncReport) -> None:
        """Logs a sync, and raises if too few engines have the version."""
        logger.log(logging.INFO if report.all_synced else logging.WARNING, "%s", report)
        synced = len(report.engines) - len(report.failed)
        missing = {
            "any": None if synced else "one at least",
            "all": None if report.all_synced else "all of them",
            "fresh": None if synced and not _goes_on(report) else "none that generates without it",
        }[self._require]
        if missing is not None:
            raise NotAppliedError(
                f"{report}\nexpected {missing}: see what the lines say", "retry"
            )

    def __repr__(self) -> str:
        names = [one if isinstance(one, str) else type(one).__name__ for one in self._engines]
        return f"<WeightTransfer to {', '.join(names)}: v{self._version}>"


def install(**settings: Unpack[Settings]) -> None:
    """Has TRL's trainers send weights to a vLLM server through weightsync.

    Call it before ``GRPOTrainer(use_vllm=True, vllm_mode="server")`` is built, on every rank. The
    server runs with ``--weight-transfer-config '{"backend": "weightsync"}'``. Any number of calls
    are one; the settings of the last one hold. It replaces the class ``VLLMClient`` that
    ``trl.generation.vllm_generation`` uses, and so covers every trainer that generates by it.

    Args:
        settings: as of :class:`WeightTransfer`.

    Raises:
        UnsupportedError: if TRL is not there, or its version is not among those tested.
    """
    check("trl")
    # Wrong settings are refused here, and not when the trainer is built.
    WeightTransfer(list(settings.get("info_files") or ["http://localhost"]), **settings)
    from trl.generation import vllm_generation

    uninstall()
    original = vllm_generation.VLLMClient
    parts = {"_original": original, "_settings": settings, "__doc__": _Client.__doc__}
    vllm_generation.VLLMClient = type("VLLMClient", (_Client, original), parts)


def uninstall() -> None:
    """Puts TRL's own client back. Trainers that were built before keep theirs."""
    from trl.generation import vllm_generation

    if issubclass(vllm_generation.VLLMClient, _Client):
        vllm_generation.VLLMClient = vllm_generation.VLLMClient._original


class _Client:
    """TRL's client of a vLLM server, with weightsync in place of its updates over NCCL.

    ``communicator`` is the :class:`WeightTransfer`, once ``init_communicator`` has returned.
    """

    _original: ClassVar[type]
    _settings: ClassVar[Settings]

    if TYPE_CHECKING:
        base_url: str

        def get_server_info(self) -> dict[str, Any]: ...

    #: What sends the weights; TRL's client has its NCCL group here.
    communicator: WeightTransfer | None = None
    # What has come inside of ``weight_update``.
    _gathered: dict[str, torch.Tensor] | None = None

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """Looks whether the server takes weights from weightsync. The device does not matter."""
        config = self.get_server_info()["weight_transfer_config"]
        backend = config.get("backend") if isinstance(config, dict) else config
        if backend != "weightsync":
            raise SettingError(
                f"the vLLM server at {self.base_url} takes weights by {backend or 'nothing'}, and "
                "expected was weightsync: start it with --weight-transfer-config "
                "'{\"backend\": \"weightsync\"}'"
            )
        self.close_communicator()
        self.communicator = WeightTransfer(self.base_url, **self._settings)
        atexit.register(self.close_communicator)

    def update_named_params(
        self,
        metadata: list[tuple[str, str, list[int]]],
        named_params: Iterator[tuple[str, torch.Tensor]],
    ) -> None:
        """Sends a version, as :meth:`WeightTransfer.send_weights` does."""
        import torch

        with _used_up(named_params) as each:
            transfer = self._transfer()
            if self._gathered is None:
                # As TRL describes them: without memory, and before the first one comes.
                described = {
                    name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
                    for name, dtype, shape in metadata
                }
                transfer._send(each, _specs_of(described))
            else:
                self._gathered.update((name, _copy(tensor)) for name, tensor in each)

    def update_named_param(self, name: str, weights: torch.Tensor) -> None:
        """Adds a tensor to the version that ``weight_update`` sends."""
        if self._gathered is None:
            raise UnsupportedError(
                f"{name} alone would be a mix of two versions: update every tensor inside of "
                "`with client.weight_update():`"
            )
        self._gathered[name] = _copy(weights)

    @contextlib.contextmanager
    def weight_update(self) -> Iterator[None]:
        """Sends what comes in the block as one version at its end; nothing, if the block raises."""
        transfer = self._transfer()
        self._gathered = {}
        try:
            yield
            gathered = self._gathered
        finally:
            self._gathered = None
        transfer._send(gathered.items(), _specs_of(gathered))

    def close_communicator(self) -> None:
        """Ends the sender. The server keeps the weights that it has."""
        if self.communicator is not None:
            self.communicator.destroy()
            self.communicator = None
            atexit.unregister(self.close_communicator)

    def _transfer(self) -> WeightTransfer:
        if self.communicator is None:
            raise LifecycleError("no weights can be sent yet: call init_communicator first")
        return self.communicator


def _unmerge_exactly() -> None:
    """Has PEFT's ``unmerge_adapter`` bring the weights back bit for bit.

    TRL merges a model's adapter for a sync, and takes it out again. PEFT adds and subtracts in place,
    and both round: in bfloat16 the trained weights drift a little with each sync. So the weights are
    kept in the host's memory while the adapter is merged, and put back. Any number of calls are one.
    """
    try:
        from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
    except ImportError:
        return
    merge, unmerge = BaseTuner.merge_adapter, BaseTuner.unmerge_adapter
    if getattr(merge, "is_exact", False):
        return
    # By the layer: the parameters of its base layer, and their values.
    kept: weakref.WeakKeyDictionary[Any, list[tuple[str, Any, Any]]] = weakref.WeakKeyDictionary()

    @functools.wraps(merge)
    def merge_adapter(self: Any, *given: Any, **named: Any) -> None:
        for layer in self.model.modules():
            if isinstance(layer, BaseTunerLayer) and not layer.merged:
                own = layer.get_base_layer().named_parameters(recurse=False)
                kept[layer] = [(name, one, _copy(one)) for name, one in own]
        merge(self, *given, **named)

    @functools.wraps(unmerge)
    def unmerge_adapter(self: Any, *given: Any, **named: Any) -> None:
        import torch

        unmerge(self, *given, **named)
        with torch.no_grad():
            for layer in self.model.modules():
                for name, own, values in kept.pop(layer, []):
                    base = layer.get_base_layer()
                    # PEFT replaces quantised ones, whose scales lie elsewhere.
                    if getattr(base, name) is own:
                        own.copy_(values)

    merge_adapter.is_exact = True  # type: ignore[attr-defined]
    BaseTuner.merge_adapter, BaseTuner.unmerge_adapter = merge_adapter, unmerge_adapter


def _goes_on(report: SyncReport) -> bool:
    """Whether an engine generates with weights that it had before."""
    return any(one.outcome in ("kept old", "not resumed") for one in report.engines)


def _checked(url: str) -> str:
    try:
        return Server(url, "").url
    except SettingError as error:
        raise SettingError(f"engines: {error}") from error


def _serves(url: str) -> bool:
    try:
        # As its updates go: not by a proxy, which may answer in its place.
        Server(url, "").get("health", 5.0)
    except WeightsyncError:
        return False
    return True


def _specs_of(weights: Mapping[str, torch.Tensor]) -> list[_Spec]:
    return [(name, *_dtypes.of_tensor(name, tensor)) for name, tensor in weights.items()]


@contextlib.contextmanager
def _used_up(
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """An iterator that has come to its end when the block ends.

    Gathering is collective, so the other ranks wait for one that stops early; and a model whose
    adapter was merged for the send is as before only then.
    """
    each = iter(tensors)
    try:
        yield each
    finally:
        for _ in each:
            pass


def _groups(
    tensors: Iterator[tuple[str, torch.Tensor]], names: list[str]
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Groups of one tensor each, which is in its place before the trainer is asked for the next.

    Copied are those that come out of turn, and the last: its place is filled when the iterator
    has ended.
    """
    for at, (name, tensor) in enumerate(tensors):
        in_turn = at < len(names) - 1 and name == names[at]
        yield [(name, tensor if in_turn else _copy(tensor))]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)
