"""Strategy ``weightsync``: versions travel by the native engine, and requests name them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import weightsync
from weightsync import _dtypes
from weightsync._calls import in_thread
from weightsync._native import Layout
from weightsync._source import Streamed
from weightsync.errors import (
    LifecycleError,
    LoadError,
    SettingError,
    WeightsyncError,
    WrongTypeError,
)
from weightsync.transfer.chunk import WeightChunk, dtype_of
from weightsync.transfer.extractor import trainer_rank
from weightsync.transfer.init_info import WeightsyncInitInfo, WeightSyncInitInfo
from weightsync.transfer.requests import WeightsyncUpdateRequest, WeightUpdateRequest
from weightsync.transfer.strategy import (
    Draining,
    InferenceEngineClient,
    WeightLoader,
    WeightTransferReceiver,
    WeightTransferSender,
    WeightTransferStrategy,
    drained,
    load,
    within,
)

# How long lines of the report are waited for once the inference client has failed, in seconds.
_GRACE = 1.0

# Between two looks at an event loop that runs a loader, in seconds.
_LOOK = 0.1

# Name, dtype and shape of a tensor, as the native engine has them.
Spec = tuple[str, str, tuple[int, ...]]


@dataclass
class WeightsyncStrategy(WeightTransferStrategy):
    """Shared memory on a host; with ``scheme="distributed:…"`` relays and deltas between hosts.

    Args:
        scheme: as of :class:`weightsync.Sender`.
        options: further settings of :class:`weightsync.Sender`. With a ``mapping`` among them
            rank 0 keeps all chunks of a sync, because the mapping may need them in another order.
        timeout: how long each wait lasts at most, in seconds. Extraction does not count.
    """

    scheme: str = "shared-mem"
    options: dict[str, Any] = field(default_factory=dict)
    timeout: float = 60.0

    def __post_init__(self) -> None:
        self._opened: tuple[weightsync.Sender, list[Spec], int] | None = None
        if self.options.get("copy_threads", 0) > 1:
            got = self.options["copy_threads"]
            raise SettingError(
                f"copy_threads: expected 0 or 1, because chunks are written as they come, got {got}"
            )

    async def create_init_info(
        self, inference_world_size: int, metadata: Mapping[str, list[Any]] | None = None
    ) -> WeightsyncInitInfo:
        """Needs the metadata: the sender fixes names, dtypes and shapes."""
        if metadata is None:
            raise SettingError("metadata: expected names, dtype_names and shapes, got none")
        lists = (metadata["names"], metadata["dtype_names"], metadata["shapes"])
        specs = [
            (name, *_dtypes.of_tensor(name, torch.empty(shape, dtype=dtype_of(dtype), device="meta")))
            for name, dtype, shape in zip(*lists, strict=True)
        ]
        self.close()
        # A mapping looks at tensors, and nothing reads their memory, so it costs nothing.
        model = self._is_mapped() and {
            name: torch.empty(shape, dtype=dtype_of(dtype), device="cpu")
            for name, dtype, shape in zip(*lists, strict=True)
        }
        sender = weightsync.Sender(
            model or Streamed(specs), scheme=self.scheme, timeout=self.timeout,
            **{"async_send_limit": 1, **self.options},
        )  # fmt: skip
        self._opened = sender, [] if self._is_mapped() else specs, inference_world_size
        # A worker that is there still has the receiver of a trainer that was there before.
        return WeightsyncInitInfo(True, sender.init_info.to_json())

    async def create_sender(self, sync_info: WeightSyncInitInfo) -> WeightTransferSender:
        if trainer_rank() != 0:
            return Draining()
        if self._opened is None:
            raise LifecycleError("call create_init_info first, on this strategy and in this process")
        (sender, specs, workers), self._opened = self._opened, None
        return WeightsyncSender(sender, specs, workers, self.timeout)

    async def create_receiver(
        self, sync_info: WeightSyncInitInfo, rank_offset: int, rank: int = 0
    ) -> WeightTransferReceiver:
        """It joins the sender at the first request."""
        if not isinstance(sync_info, WeightsyncInitInfo):
            raise WrongTypeError(f"expected a WeightsyncInitInfo, got {type(sync_info).__name__}")
        return WeightsyncReceiver(sync_info, rank_offset + rank - 1, self.timeout)

    def get_request_type(self) -> type[WeightUpdateRequest]:
        return WeightsyncUpdateRequest

    def close(self) -> None:
        """Closes what ``create_init_info`` opened, if no sender has taken it."""
        if self._opened is not None:
            self._opened[0].shutdown()
            self._opened = None

    def _is_mapped(self) -> bool:
        return self.options.get("mapping") is not None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}


class WeightsyncSender(WeightTransferSender):
    """Writes each chunk into its place in the next version, before the next chunk is made.

    So extraction is the only pass over the weights, and rank 0 has one batch more than its model.
    A version whose extraction fails is never visible.

    ``report`` has a line for each worker that had joined before, from the second sync on.
    ``applied`` says that the worker's loader has loaded the version.
    """

    def __init__(
        self, sender: weightsync.Sender, specs: list[Spec], workers: int, timeout: float
    ) -> None:
        super().__init__()
        self._sender, self._specs, self._workers = sender, specs, workers
        self.timeout = timeout
        self.report: weightsync.Report | None = None

    async def send_chunks(
        self, chunks: Iterable[WeightChunk], inference_client: InferenceEngineClient
    ) -> None:
        """One sync. Workers that have it keep it where others failed.

        Raises:
            PeerError: naming the workers that failed, as :class:`ActorClient` has it. ``report``
                has a line for each.
            NotAppliedError: a worker has not loaded the version, and its actor did not say so.
        """
        with drained(chunks) as each:
            self._begin()
            arrival = self._publish(each)
        request = WeightsyncUpdateRequest(
            version=self.syncs, model=self._sender.models[0], last=True
        )
        call = inference_client.update_named_weights(request.to_dict())
        try:
            await within(call, self.timeout, self._what())
        except Exception:
            # The report says who has the version by now; the client says why others have not.
            with contextlib.suppress(WeightsyncError):
                await in_thread(lambda: arrival(_GRACE), leaves=True)
            raise
        await in_thread(lambda: arrival(self.timeout), leaves=True)
        self.version = self.syncs

    def create_request(self, chunk: WeightChunk) -> WeightUpdateRequest:
        """One for the sync: chunks travel as a whole version."""
        return WeightsyncUpdateRequest(version=max(self.syncs, 1), model=self._sender.models[0])

    def _publish(self, chunks: Iterator[WeightChunk]) -> Callable[[float], None]:
        """Publishes the chunks as one version, and returns what waits for the workers."""
        weights: Streamed | dict[str, torch.Tensor]
        if self._specs:
            weights = Streamed(self._specs, _groups(chunks))
        else:
            weights = {name: one for group in _groups(chunks) for name, one in group}
        try:
            if self._sender.is_connected:
                pending = self._sender.send_async(weights, version=self.syncs)
                return lambda timeout: self._settle(pending, timeout)
            # No worker is waited for yet: they join when they are asked to.
            self._sender.connect(0, weights=weights, timeout=self.timeout)
            if self._sender.version < self.syncs:
                # Syncs before this one failed, and the first version is always number 1.
                self._sender.send(self._sender.snapshot(), version=self.syncs, wait="sent")
            return lambda timeout: self._sender.wait_for(self._workers, timeout=timeout)
        except BaseException:
            if isinstance(weights, Streamed) and weights.failure is not None:
                raise weights.failure from None
            raise
        finally:
            if isinstance(weights, Streamed):
                weights.release()

    def _settle(self, pending: weightsync.PendingSend, timeout: float) -> None:
        self.report = pending.wait(timeout)
        version = pending.version
        # A worker that came back in this sync has it, and a line that it died before.
        has = {one.worker for one in self._sender.workers if one.version >= version}
        if not has or any(
            line.outcome != "applied" and line.worker not in has for line in self.report.workers
        ):
            self.report.ensure_applied()

    def shutdown(self) -> None:
        super().shutdown()
        self._sender.shutdown()


class WeightsyncReceiver(WeightTransferReceiver):
    """Reads the version in place, and hands the loader views of it.

    The sender is told what the loader said: that it has the version, or why not.
    """

    request_type = WeightsyncUpdateRequest

    def __init__(self, info: WeightsyncInitInfo, worker: int, timeout: float) -> None:
        super().__init__()
        self._target = _Target()
        self._receiver = weightsync.ModelReceiver(info.info, worker, model=self._target)
        self._connected, self._timeout = False, timeout
        # A request that was cancelled leaves its thread running.
        self._fetching = threading.Lock()

    async def receive_and_load_weights(
        self, request: WeightUpdateRequest, loader: WeightLoader
    ) -> None:
        self._expect(request)
        self._sync = None
        loop = asyncio.get_running_loop()

        def load_here(snapshot: weightsync.Snapshot) -> None:
            # The loader runs in the caller's loop while the receiver's thread waits for it.
            _run_in(loop, load(loader, dict(snapshot), request.version), self._timeout)

        await in_thread(lambda: self._fetch(request.version, load_here), leaves=True)
        self.version = request.version

    def _fetch(self, version: int, load_here: Callable[[weightsync.Snapshot], None]) -> None:
        if not self._fetching.acquire(timeout=self._timeout):
            raise weightsync.DeadlineError(
                f"an earlier request has not ended in {self._timeout:g} s", "retry"
            )
        try:
            self._fetch_alone(version, load_here)
        finally:
            self._fetching.release()

    def _fetch_alone(self, version: int, load_here: Callable[[weightsync.Snapshot], None]) -> None:
        self._target.load_here, self._target.wanted = load_here, version
        try:
            if not self._connected:
                self._receiver.connect(timeout=self._timeout)
                self._connected = True
            if self._receiver.version < version:
                self._receiver.pull(at_least=version, timeout=self._timeout)
        except LoadError as error:
            # As the loader said it.
            raise error.__cause__ if isinstance(error.__cause__, WeightsyncError) else error
        finally:
            self._target.load_here = None
        got = self._receiver.version
        if got != version:
            raise weightsync.DeadlineError(f"expected version {version}, got {got or 'none'}", "retry")

    def shutdown(self) -> None:
        super().shutdown()
        self._receiver.shutdown()


def _run_in(loop: asyncio.AbstractEventLoop, call: Coroutine[Any, Any, None], timeout: float) -> None:
    """Runs a call in the caller's loop, however long it takes.

    Raises:
        LifecycleError: if the loop has been closed, or has not run for so many seconds.
    """
    if loop.is_closed():
        call.close()
        raise weightsync.LifecycleError("the event loop was closed before the weights were loaded")
    future, idle = asyncio.run_coroutine_threadsafe(call, loop), 0.0
    while not future.done() and not loop.is_closed() and idle < timeout:
        concurrent.futures.wait([future], _LOOK)
        idle = 0.0 if loop.is_running() else idle + _LOOK
    if future.done():
        return future.result()
    if not loop.is_closed():
        future.cancel()
    raise weightsync.LifecycleError(
        "the event loop ended while the weights were loaded: await receive_and_load_weights before "
        "it is closed"
    )


class _Target:
    """What the native receiver loads into: the loader of the request that is being answered."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._loaded = 0
        self.wanted = 0
        self.load_here: Callable[[weightsync.Snapshot], None] | None = None

    def layout(self) -> Layout | None:
        return self._layout

    def shape(self, layout: Layout) -> bool:
        """Takes any: the loader compares."""
        self._layout = layout
        return True

    def load(self, snapshot: Any) -> None:
        # After a load that failed the receiver goes back; the loader has done that itself.
        if snapshot.version == self._loaded:
            return
        if self.load_here is None or snapshot.version != self.wanted:
            raise LifecycleError(f"version {snapshot.version} came, and no request asked for it")
        self.load_here(weightsync.Snapshot(snapshot))
        self._loaded = snapshot.version


def _groups(chunks: Iterator[WeightChunk]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Names and tensors, without holding a chunk while the next one is made."""
    for chunk in chunks:
        group = list(zip(chunk.names, chunk.tensors, strict=True))
        del chunk
        yield group
        del group
