"""The names and calls of SkyRL 0.3.0's ``weight_sync``, over this package.

A trainer that was written for ``skyrl.backends.skyrl_train.weight_sync`` imports this module in
its place. An extractor has ``extract_weights(dtype)`` and keeps its model; a strategy is called
through its class; ``create_sender`` blocks; ``send_chunks`` takes the weights' metadata.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from weightsync import transfer
from weightsync.errors import LifecycleError
from weightsync.transfer.broadcast import PackedBroadcastStrategy
from weightsync.transfer.chunk import WeightChunk
from weightsync.transfer.extractor import setting, trainer_rank
from weightsync.transfer.init_info import (
    EmptyWeightSyncInitInfo,
    TorchDistributedWeightSyncInitInfo,
    WeightSyncInitInfo,
    rank_offsets,
)
from weightsync.transfer.requests import (
    BroadcastWeightUpdateRequest,
    CudaIpcWeightUpdateRequest,
    LoraLoadRequest,
    WeightUpdateRequest,
)
from weightsync.transfer.strategy import strategy_from_config

__all__ = [
    "BroadcastInitInfo",
    "BroadcastTransferStrategy",
    "BroadcastWeightTransferSender",
    "BroadcastWeightUpdateRequest",
    "CudaIpcTransferStrategy",
    "CudaIpcWeightUpdateRequest",
    "LoraLoadRequest",
    "WeightChunk",
    "WeightExtractor",
    "WeightSyncInitInfo",
    "WeightTransferSender",
    "WeightTransferStrategy",
    "WeightUpdateRequest",
    "get_transfer_strategy",
    "get_transfer_strategy_cls",
    "yield_module_grouped_chunks",
]


class WeightExtractor(transfer.WeightExtractor):
    """Has its model, and yields chunks of a dtype."""

    @abstractmethod
    def extract_weights(self, dtype: torch.dtype) -> Iterator[WeightChunk]:  # type: ignore[override]
        """The chunks of one sync."""

    async def _extract_raw_weights(
        self, model: Any, generator_dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        raise LifecycleError("this extractor makes its chunks itself: call extract_weights(dtype)")


class BroadcastInitInfo(TorchDistributedWeightSyncInitInfo):
    """Made for each server by ``for_servers``."""

    def for_servers(
        self, world_size_per_server: int, num_servers: int, dp_size: int = 1
    ) -> list[BroadcastInitInfo]:
        """One for each server, with its rank offset."""
        offsets = rank_offsets(num_servers, world_size_per_server, dp_size, self.rank_offset)
        return [replace(self, rank_offset=offset) for offset in offsets]

    def to_api_payload(self) -> dict[str, Any]:
        """What a server's endpoint is given."""
        return {
            "master_address": self.master_addr,
            "master_port": self.master_port,
            "rank_offset": self.rank_offset,
            "world_size": self.world_size,
        }


class WeightTransferSender:
    """Sends to the client that it was created with."""

    def __init__(self, sender: transfer.WeightTransferSender, client: Any) -> None:
        self._sender, self._client = sender, client

    async def send_chunks(
        self, chunks: Iterable[WeightChunk], weight_metadata: Mapping[str, list[Any]] | None = None
    ) -> None:
        """One sync; all ranks call it. The metadata is not needed."""
        await self._sender.send_chunks(chunks, self._client)

    def teardown(self) -> None:
        """Any number of times."""
        self._sender.shutdown()


BroadcastWeightTransferSender = WeightTransferSender


class WeightTransferStrategy:
    """A factory that is never made: its methods are called on the class."""

    _opened: ClassVar[dict[int, transfer.WeightTransferStrategy]] = {}

    @classmethod
    def create_init_info(
        cls, ie_cfg: Any, inference_world_size: int | None = None
    ) -> WeightSyncInitInfo:
        """All ranks call it; the one of rank 0 is for the receivers."""
        raise NotImplementedError

    @classmethod
    def create_sender(
        cls, init_info: WeightSyncInitInfo, inference_client: Any
    ) -> WeightTransferSender:
        """All ranks call it, in a thread; rank 0 waits there for the receivers."""
        strategy = cls._strategy(init_info)
        return WeightTransferSender(
            asyncio.run(strategy.create_sender(init_info)), inference_client
        )

    @classmethod
    def _strategy(cls, init_info: WeightSyncInitInfo) -> transfer.WeightTransferStrategy:
        raise NotImplementedError


class BroadcastTransferStrategy(WeightTransferStrategy):
    """A packed broadcast. ``ie_cfg`` may have ``weight_sync_backend`` and ``master_addr``."""

    @classmethod
    def create_init_info(
        cls, ie_cfg: Any, inference_world_size: int | None = None
    ) -> BroadcastInitInfo:
        strategy = PackedBroadcastStrategy(
            backend=setting(ie_cfg, "weight_sync_backend", "gloo"),
            master_addr=setting(ie_cfg, "master_addr", "127.0.0.1"),
            override_existing_receiver=not setting(ie_cfg, "run_engines_locally", False),
        )
        if trainer_rank() != 0:
            return BroadcastInitInfo(backend=strategy.backend)
        info = BroadcastInitInfo(**vars(strategy.open(inference_world_size or 1)))
        cls._opened[info.master_port] = strategy
        return info

    @classmethod
    def _strategy(cls, init_info: WeightSyncInitInfo) -> transfer.WeightTransferStrategy:
        port = getattr(init_info, "master_port", 0)
        return cls._opened.pop(port, None) or PackedBroadcastStrategy()


class CudaIpcTransferStrategy(WeightTransferStrategy):
    """One handle for each chunk."""

    @classmethod
    def create_init_info(
        cls, ie_cfg: Any, inference_world_size: int | None = None
    ) -> EmptyWeightSyncInitInfo:
        local = setting(ie_cfg, "run_engines_locally", False)
        return EmptyWeightSyncInitInfo(override_existing_receiver=not local)

    @classmethod
    def _strategy(cls, init_info: WeightSyncInitInfo) -> transfer.WeightTransferStrategy:
        return strategy_from_config("packed_cuda_ipc")


def get_transfer_strategy(weight_sync_backend: str, colocate_all: bool) -> str:
    """``"ipc"`` where trainer and engines share GPUs under NCCL, else ``"nccl"``."""
    return "ipc" if weight_sync_backend == "nccl" and colocate_all else "nccl"


def get_transfer_strategy_cls(
    weight_sync_backend: str, colocate_all: bool
) -> type[WeightTransferStrategy]:
    """The class of :func:`get_transfer_strategy`."""
    ipc = get_transfer_strategy(weight_sync_backend, colocate_all) == "ipc"
    return CudaIpcTransferStrategy if ipc else BroadcastTransferStrategy


def yield_module_grouped_chunks(
    params: dict[str, Any],
    dtype: torch.dtype,
    gather_tensor_fn: Callable[[Any], torch.Tensor],
    get_shape_fn: Callable[[str, Any, torch.Tensor], list[int]],
    batch_size_threshold_gb: float = 0.0,
) -> Iterator[WeightChunk]:
    """Chunks of whole modules, batched up to the threshold; a threshold of 0 batches none.

    Shapes are known here once a tensor was gathered, so a batch is held while the module after
    it is gathered. :class:`weightsync.transfer.MegatronExtractor` asks for shapes first.
    """
    grouping = _Grouping()
    batch: list[WeightChunk] = []
    for module, names in grouping._group_by_module(params).items():
        tensors = []
        for name in names:
            tensor = gather_tensor_fn(params[name]).to(dtype).detach().contiguous()
            tensors.append(tensor.view(tuple(get_shape_fn(name, params[name], tensor))))
        shapes = [tuple(tensor.shape) for tensor in tensors]
        chunk = WeightChunk(list(names), tensors, [dtype] * len(names), shapes, module)
        # The rule says whether the one before is whole without this one.
        batches = list(grouping._batch_by_threshold(iter([*batch, chunk]), batch_size_threshold_gb))
        for done in batches[:-1]:
            yield _merged(done)
        batch = batches[-1]
    if batch:
        yield _merged(batch)


class _Grouping(transfer.WeightExtractor):
    async def _extract_raw_weights(
        self, model: Any, generator_dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        return dict(model)


def _merged(chunks: list[WeightChunk]) -> WeightChunk:
    return WeightChunk(
        names=[name for chunk in chunks for name in chunk.names],
        tensors=[tensor for chunk in chunks for tensor in chunk.tensors],
        dtypes=[dtype for chunk in chunks for dtype in chunk.dtypes],
        shapes=[shape for chunk in chunks for shape in chunk.shapes],
        module_name=chunks[0].module_name if len(chunks) == 1 else None,
    )
