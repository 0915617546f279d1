"""The roles of a transfer, and the registry of strategies."""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from weightsync._calls import in_thread
from weightsync.errors import (
    DeadlineError,
    LifecycleError,
    LoadError,
    PeerError,
    SettingError,
    UnsupportedError,
    WeightsyncError,
)
from weightsync.transfer.chunk import WeightChunk
from weightsync.transfer.extractor import setting, trainer_rank
from weightsync.transfer.requests import RequestError, WeightUpdateRequest

if TYPE_CHECKING:
    from weightsync.transfer.init_info import WeightSyncInitInfo


class WeightLoader(ABC):
    """Puts a whole version into an engine's model."""

    @abstractmethod
    async def load_weights(self, named_tensors: dict[str, torch.Tensor]) -> None:
        """Loads all of them, or raises and leaves the model as it was.

        The tensors may be views of a version in shared memory. They stay as they are while they
        are held.
        """

    def most_bytes(self) -> int | None:
        """What a version of this engine's model has at most; None if the loader cannot know.

        A receiver refuses a request for more, before it allocates memory for it.
        """
        return None


class InferenceEngineClient(ABC):
    """How rank 0 of the trainer reaches the inference actors: Ray, HTTP, or in this process."""

    @abstractmethod
    async def get_world_size(self) -> tuple[int, int]:
        """The number of inference workers in all, and of each server."""

    @abstractmethod
    async def init_weight_update_communicator(self, init_info: WeightSyncInitInfo) -> Any:
        """Delivers the init info; every inference worker creates its receiver from it."""

    @abstractmethod
    async def update_named_weights(self, request: dict[str, Any]) -> Any:
        """Delivers a request, and returns once every inference worker has done what it says.

        Raises if one of them has not.
        """


class WeightTransferSender(ABC):
    """Sends one sync's chunks after another. Every rank of the trainer has one; rank 0 sends.

    Subclasses implement :meth:`create_request` and :meth:`_send_chunk`. ``version`` is the last
    sync that every inference worker has loaded, ``syncs`` counts those that were begun. A sync
    that failed keeps its number, so a number never means two versions.
    """

    timeout: float = 60.0

    def __init__(self) -> None:
        self.version = 0
        self.syncs = 0
        self._chunk = 0
        self._closed = False

    async def send_chunks(
        self, chunks: Iterable[WeightChunk], inference_client: InferenceEngineClient
    ) -> None:
        """One sync: each chunk, and then the word to load them all.

        If it fails, the rest of the chunks is still made, because the trainer's other ranks take
        part in that; then the error is raised. No receiver has loaded a part.
        """
        with drained(chunks) as each:
            self._begin()
            if trainer_rank() == 0:
                for chunk in each:
                    await self._send_chunk(chunk, self.create_request(chunk), inference_client)
                    self._chunk += 1
                    # Before the next one is made.
                    del chunk
                await self._finish(inference_client)
        self.version = self.syncs

    @abstractmethod
    def create_request(self, chunk: WeightChunk) -> WeightUpdateRequest:
        """What receivers are told of a chunk of the sync that goes on."""

    async def _send_chunk(
        self, chunk: WeightChunk, request: WeightUpdateRequest, client: InferenceEngineClient
    ) -> None:
        raise UnsupportedError(f"{type(self).__name__} must implement _send_chunk")

    def _end(self) -> WeightUpdateRequest:
        """The request that ends the sync."""
        raise UnsupportedError(f"{type(self).__name__} must implement _end")

    async def _finish(self, client: InferenceEngineClient) -> None:
        await self._call(client, self._end())

    async def _call(self, client: InferenceEngineClient, request: WeightUpdateRequest) -> None:
        await within(client.update_named_weights(request.to_dict()), self.timeout, self._what())

    def _begin(self) -> None:
        if self._closed:
            raise LifecycleError("this sender is shut down: create one from a new init info")
        self.syncs += 1
        self._chunk = 0

    def _what(self) -> str:
        return f"chunk {self._chunk} of sync {self.syncs}"

    def _numbers(self) -> dict[str, Any]:
        """The fields that every request of this sync has."""
        return {"version": max(self.syncs, 1), "chunk": self._chunk, "last": False}

    def shutdown(self) -> None:
        """Closes what the sender holds open. Any number of times."""
        self._closed = True


@dataclass
class _Sync:
    """What one sync has brought so far.

    A chunk that comes late has the sync that it belongs to, and cannot land in the next one.
    """

    number: int
    #: How many chunks it has.
    chunks: int = 0
    #: Whether another one is on its way.
    is_busy: bool = False
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    nbytes: int = 0


class WeightTransferReceiver(ABC):
    """Receives chunks and keeps them until the sync ends; then it loads all of them at once.

    So the model holds a whole version at any time, whichever chunk fails and whatever the loader
    can undo, at the price of memory for one more version. ``version`` is the one that was loaded.

    What a sync may have is bounded before memory is allocated for it: by ``total_bytes`` (of the
    init info; 0 is unknown), and by :meth:`WeightLoader.most_bytes`.
    """

    request_type: type[WeightUpdateRequest]
    total_bytes: int = 0

    def __init__(self) -> None:
        self.version = 0
        self._sync: _Sync | None = None
        self._loading = asyncio.Lock()
        self._closed = False

    def parse_request(self, request_dict: dict[str, Any]) -> WeightUpdateRequest:
        """Checks everything; see :class:`RequestError`."""
        return self.request_type.from_dict(request_dict)

    async def receive_and_load_weights(
        self, request: WeightUpdateRequest, loader: WeightLoader
    ) -> None:
        """Receives one chunk, and loads the sync if it is the last.

        Raises:
            LoadError: if the loader raised; the model has the version before.
            PeerError: if the sync was given up while the chunk was on its way.
        """
        sync = self._expect(request)
        try:
            self._bound(sync, request, loader)
            sync.is_busy = True
            if request.names:
                tensors = await in_thread(lambda: self._receive(request), leaves=True)
                self._check_current(sync, request)
                sync.tensors.update(zip(request.names, tensors, strict=True))
                sync.nbytes += request.tensor_bytes
            sync.chunks, sync.is_busy = request.chunk + 1, False
            if request.last:
                # A load that outlasts its sync ends before the next one begins.
                async with self._loading:
                    self._check_current(sync, request)
                    await load(loader, sync.tensors, request.version)
                    self.version = request.version
        except BaseException:
            self._drop(sync)
            raise
        if request.last:
            self._drop(sync)

    def _drop(self, sync: _Sync) -> None:
        if self._sync is sync:
            self._sync = None

    def _check_current(self, sync: _Sync, request: WeightUpdateRequest) -> None:
        """Refuses to go on with a sync that has ended, or that another one has replaced."""
        if self._sync is not sync:
            raise PeerError(
                f"chunk {request.chunk} of sync {request.version} came too late: the sync had failed, "
                "or the next one had begun. Nothing of it was loaded",
                "retry",
            )

    def _bound(self, sync: _Sync, request: WeightUpdateRequest, loader: WeightLoader) -> None:
        """Refuses more than the model has."""
        total = sync.nbytes + request.tensor_bytes
        for most, whose in (
            (self.total_bytes or None, "the init info says"),
            (loader.most_bytes(), "this worker's model has"),
        ):
            if most is not None and total > most:
                raise RequestError(
                    f"shapes: expected at most {most} bytes in a sync, as {whose}, got {total}"
                )

    def _receive(self, request: WeightUpdateRequest) -> list[torch.Tensor]:
        """The tensors of a chunk, in memory of this process's own. Blocks, by a timeout."""
        raise UnsupportedError(f"{type(self).__name__} must implement _receive")

    def _expect(self, request: WeightUpdateRequest) -> _Sync:
        """The sync that a request belongs to; its first chunk begins it."""
        if self._closed:
            raise LifecycleError("this receiver is shut down: create one from a new init info")
        if not isinstance(request, self.request_type):
            raise RequestError(f"expected a {self.request_type.kind} request, got {request.kind!r}")
        if request.version <= self.version:
            raise RequestError(
                f"version: expected more than {self.version}, which is loaded, got {request.version}"
            )
        sync = self._sync
        if request.chunk == 0 and (sync is None or request.version != sync.number):
            # A sync that was given up is dropped.
            sync = self._sync = _Sync(request.version)
        if sync is None or (request.version, request.chunk) != (sync.number, sync.chunks):
            expected = "chunk 0 of sync any" if sync is None else f"chunk {sync.chunks} of sync {sync.number}"
            raise RequestError(
                f"expected {expected}, got chunk {request.chunk} of sync {request.version}"
            )
        if sync.is_busy:
            raise RequestError(f"chunk {request.chunk} of sync {request.version} is on its way already")
        twice = sorted(set(request.names) & set(sync.tensors))
        if twice:
            raise RequestError(f"names: {twice[0]!r} has come with an earlier chunk of this sync")
        return sync

    def shutdown(self) -> None:
        """Closes what the receiver holds open. Any number of times. The model keeps its weights."""
        self._closed, self._sync = True, None


class WeightTransferStrategy(ABC):
    """Describes a transfer: cheap, and plain settings only, so it can be sent to any actor.

    ``create_init_info`` and ``create_sender`` are called on rank 0 of the trainer, on the same
    object; ``create_sender`` on the other ranks too. ``timeout`` is how long each wait lasts at
    most, in seconds.
    """

    timeout: float = 60.0

    #: Whether the workers are those that joined first. Where it is false, a worker may join later,
    #: and one that died may come back.
    fixed_membership: ClassVar[bool] = False

    @abstractmethod
    async def create_init_info(
        self, inference_world_size: int, metadata: Mapping[str, list[Any]] | None = None
    ) -> WeightSyncInitInfo:
        """What receivers must know. Communicates nothing.

        Args:
            inference_world_size: the number of inference workers.
            metadata: names, dtype names and shapes, as :attr:`ExtractionPlan.metadata` has them.
        """

    @abstractmethod
    async def create_sender(self, sync_info: WeightSyncInitInfo) -> WeightTransferSender:
        """The trainer's end. On rank 0 it may wait for receivers."""

    @abstractmethod
    async def create_receiver(
        self, sync_info: WeightSyncInitInfo, rank_offset: int, rank: int = 0
    ) -> WeightTransferReceiver:
        """An inference worker's end.

        Args:
            rank_offset: as :func:`rank_offsets` computes it for the worker's deployment.
            rank: the worker's rank in its deployment.
        """

    @abstractmethod
    def get_request_type(self) -> type[WeightUpdateRequest]:
        """The class of this strategy's requests."""


class Draining(WeightTransferSender):
    """The sender of the trainer's other ranks: it takes part in the extraction and sends nothing."""

    def create_request(self, chunk: WeightChunk) -> WeightUpdateRequest:
        raise LifecycleError("rank 0 of the trainer makes the requests")


_registry: dict[str, str] = {}

#: The group of entry points by which packages register strategies: ``word = "module:Class"``.
ENTRY_POINTS = "weightsync.transfer.strategies"


def register_strategy(name: str, target: str) -> None:
    """Makes a strategy known by a word: ``register_strategy("mine", "package.module:Class")``.

    A package may have an entry point in the group ``weightsync.transfer.strategies`` instead. The
    module is imported when the strategy is chosen.
    """
    module, _, attribute = target.partition(":")
    if not name or not module or not attribute:
        raise SettingError(f"expected a name and 'module:Class', got {name!r} and {target!r}")
    if _registry.setdefault(name, target) != target:
        raise SettingError(f"a strategy {name!r} is registered: {_registry[name]}")


def strategies() -> list[str]:
    """The words that are known."""
    return sorted(_known())


def strategy_from_config(cfg: Any) -> WeightTransferStrategy:
    """The strategy that a configuration names.

    Args:
        cfg: its word, or a dict or an object with the word as ``strategy`` and, as
            ``strategy_settings``, a dict of settings for its constructor.
    """
    name = cfg if isinstance(cfg, str) else setting(cfg, "strategy", None)
    known = _registry if isinstance(name, str) and name in _registry else _known()
    if not isinstance(name, str) or name not in known:
        raise SettingError(f"strategy: expected one of {', '.join(sorted(known))}, got {name!r}")
    settings = {} if isinstance(cfg, str) else setting(cfg, "strategy_settings", None) or {}
    if not isinstance(settings, Mapping):
        raise SettingError(f"strategy_settings: expected a dict of settings, got {settings!r}")
    module, _, attribute = known[name].partition(":")
    try:
        kind = getattr(importlib.import_module(module), attribute)
        _check_settings(name, kind, settings)
        made = kind(**settings)
    except (ImportError, AttributeError, TypeError) as error:
        raise SettingError(f"strategy {name!r} ({known[name]}) cannot be made: {error}") from error
    if not isinstance(made, WeightTransferStrategy):
        raise SettingError(f"{known[name]} is no WeightTransferStrategy")
    return made


def _check_settings(strategy: str, kind: type, settings: Mapping[str, Any]) -> None:
    """Compares settings with the fields of a strategy that is a dataclass."""
    if not is_dataclass(kind):
        return
    known = {one.name: one.default for one in fields(kind) if one.init}
    # Of a class with an ``__init__`` of its own the fields say nothing about the settings.
    if list(known) != list(inspect.signature(kind).parameters):
        return
    for name, value in settings.items():
        if name not in known:
            names = ", ".join(known)
            raise SettingError(f"strategy {strategy!r}: expected settings among {names}, got {name!r}")
        if (name, type(known[name])) == ("timeout", float):
            seconds = value if type(value) in (int, float) else 0
            if not 0 < seconds < math.inf:
                expected = "expected a finite number of seconds above 0"
                raise SettingError(f"strategy {strategy!r}: timeout: {expected}, got {value!r}")
        # A text may be written as a value, such as a scheme, that its owner checks.
        if isinstance(known[name], str) and isinstance(value, (int, float, bytes)):
            raise SettingError(f"strategy {strategy!r}: {name}: expected a text, got {value!r}")


def _known() -> dict[str, str]:
    """Words and targets: those of installed packages, and before them those that are registered."""
    found = importlib.metadata.entry_points(group=ENTRY_POINTS)
    return {**{one.name: one.value for one in found}, **_registry}


@contextmanager
def drained(chunks: Iterable[WeightChunk]) -> Iterator[Iterator[WeightChunk]]:
    """An iterator of chunks that is used up at the end of the block, however it ends."""
    each = iter(chunks)
    try:
        yield each
    finally:
        # Gathering is collective: other ranks of the trainer wait for one that stops early.
        for _ in each:
            pass


async def load(loader: WeightLoader, tensors: dict[str, torch.Tensor], version: int) -> None:
    """Loads a version; an error of the loader's is a :class:`LoadError`."""
    try:
        await loader.load_weights(tensors)
    except Exception as error:
        if isinstance(error, WeightsyncError):
            raise
        raise LoadError(f"version {version} was not loaded: {error}", "retry") from error


async def within(call: Any, timeout: float, what: str) -> Any:
    """Awaits a call of the inference client until the timeout."""
    try:
        return await asyncio.wait_for(call, timeout)
    except TimeoutError as error:
        if isinstance(error, WeightsyncError):
            raise
        raise DeadlineError(
            f"the inference workers did not answer {what} within {timeout} s", "retry"
        ) from error
    except (EOFError, ConnectionError) as error:
        if isinstance(error, WeightsyncError):
            raise
        raise PeerError(f"an inference worker was lost during {what}: {error!r}") from error
