"""Strategy ``weightsync``: versions travel by the native engine, and requests name them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import weightsync
from weightsync.errors import LifecycleError, SettingError, WrongTypeError
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


@dataclass
class WeightsyncStrategy(WeightTransferStrategy):
    """Shared memory on a host; with ``scheme="distributed:…"`` relays and deltas between hosts.

    Args:
        scheme: as of :class:`weightsync.Sender`.
        options: further settings of :class:`weightsync.Sender`.
        timeout: how long each wait lasts at most, in seconds.
    """

    scheme: str = "shared-mem"
    options: dict[str, Any] = field(default_factory=dict)
    timeout: float = 60.0

    def __post_init__(self) -> None:
        self._opened: tuple[weightsync.Sender, int] | None = None

    async def create_init_info(
        self, inference_world_size: int, metadata: Mapping[str, list[Any]] | None = None
    ) -> WeightsyncInitInfo:
        """Needs the metadata: the sender fixes names, dtypes and shapes."""
        if metadata is None:
            raise SettingError("metadata: expected names, dtype_names and shapes, got none")
        lists = (metadata["names"], metadata["dtype_names"], metadata["shapes"])
        # Nothing reads their memory, so it costs nothing.
        model = {
            name: torch.empty(shape, dtype=dtype_of(dtype))
            for name, dtype, shape in zip(*lists, strict=True)
        }
        self.close()
        sender = weightsync.Sender(model, scheme=self.scheme, timeout=self.timeout, **self.options)
        self._opened = sender, inference_world_size
        return WeightsyncInitInfo(info=sender.init_info.to_json())

    async def create_sender(self, sync_info: WeightSyncInitInfo) -> WeightTransferSender:
        if trainer_rank() != 0:
            return Draining()
        if self._opened is None:
            raise LifecycleError("call create_init_info first, on this strategy and in this process")
        (sender, workers), self._opened = self._opened, None
        return WeightsyncSender(sender, workers, self.timeout)

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

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}


class WeightsyncSender(WeightTransferSender):
    """Assembles the chunks and sends the whole version, in one pass over the tensors.

    ``report`` has a line for each worker, from the second sync on.
    """

    def __init__(self, sender: weightsync.Sender, workers: int, timeout: float) -> None:
        super().__init__()
        self._sender, self._workers, self.timeout = sender, workers, timeout
        self.report: weightsync.Report | None = None

    async def send_chunks(
        self, chunks: Iterable[WeightChunk], inference_client: InferenceEngineClient
    ) -> None:
        """One sync. Workers that have it keep it where others failed.

        Raises:
            NotAppliedError: ``report`` says who has the version.
        """
        self._begin()
        weights: dict[str, torch.Tensor] = {}
        with drained(chunks) as each:
            for chunk in each:
                weights.update(zip(chunk.names, chunk.tensors, strict=True))
                del chunk
        request = WeightsyncUpdateRequest(
            version=self.syncs, model=self._sender.models[0], last=True
        )
        call = within(
            inference_client.update_named_weights(request.to_dict()), self.timeout, self._what()
        )
        # Each waits for the other: workers for the version, the sender for the workers.
        sent, called = await asyncio.gather(
            asyncio.to_thread(self._publish, weights), call, return_exceptions=True
        )
        for failed in (sent, called):
            if isinstance(failed, BaseException):
                raise failed
        self.version = self.syncs

    def create_request(self, chunk: WeightChunk) -> WeightUpdateRequest:
        """One for the sync: chunks travel as a whole version."""
        return WeightsyncUpdateRequest(version=max(self.syncs, 1), model=self._sender.models[0])

    def _publish(self, weights: dict[str, torch.Tensor]) -> None:
        first = not self._sender.is_connected
        if first:
            self._sender.connect(self._workers, weights=weights, timeout=self.timeout)
        # A connect that is called again brings the weights of its first call.
        if not first or self.syncs > 1:
            self.report = self._sender.send(weights, version=self.syncs)
            self.report.ensure_applied()

    def shutdown(self) -> None:
        super().shutdown()
        self._sender.shutdown()


class WeightsyncReceiver(WeightTransferReceiver):
    """Reads the version in place, and hands the loader views of it."""

    request_type = WeightsyncUpdateRequest

    def __init__(self, info: WeightsyncInitInfo, worker: int, timeout: float) -> None:
        super().__init__()
        self._receiver = weightsync.Receiver(info.info, worker)
        self._connected, self._timeout = False, timeout

    async def receive_and_load_weights(
        self, request: WeightUpdateRequest, loader: WeightLoader
    ) -> None:
        self._expect(request)
        self._sync = 0
        snapshot = await asyncio.to_thread(self._fetch, request.version)
        await load(loader, dict(snapshot), request.version)
        self.version = request.version

    def _fetch(self, version: int) -> weightsync.Snapshot:
        if not self._connected:
            self._receiver.connect(timeout=self._timeout)
            self._connected = True
        found = self._receiver.latest()
        if found is None or found.version < version:
            found = self._receiver.pull(at_least=version, timeout=self._timeout)
        if found is None or found.version != version:
            got = "none" if found is None else found.version
            raise weightsync.DeadlineError(f"expected version {version}, got {got}", "retry")
        return found

    def shutdown(self) -> None:
        super().shutdown()
        self._receiver.shutdown()
