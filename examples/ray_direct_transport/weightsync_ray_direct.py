"""Strategy ``ray_direct``: each chunk is a Ray object that travels by one of Ray's transports.

An outline of a strategy in a package of its own. It was run on the CPU, with the transport that
``weightsync.ray.register()`` adds. Ray's own one-sided transports, ``"nixl"`` and ``"cuda_ipc"``, are
chosen by their words and have not been run here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import ray
import torch

import weightsync.ray
from weightsync import transfer
from weightsync.transfer.chunk import WeightChunk, unpack
from weightsync.transfer.requests import RequestError, described
from weightsync.transfer.strategy import Draining


@dataclass
class RayDirectStrategy(transfer.WeightTransferStrategy):
    """Rank 0 of the trainer puts each chunk into Ray, and the workers get it from there.

    Args:
        transport: a one-sided transport of Ray's.
        timeout: how long each wait lasts at most, in seconds.
    """

    transport: str = "weightsync"
    timeout: float = 60.0

    def __post_init__(self) -> None:
        # Every process that sends or receives makes the strategy, and so knows the transport.
        weightsync.ray.register()

    async def create_init_info(
        self, inference_world_size: int, metadata: Mapping[str, list[Any]] | None = None
    ) -> transfer.WeightSyncInitInfo:
        return transfer.EmptyWeightSyncInitInfo(override_existing_receiver=True)

    async def create_sender(
        self, sync_info: transfer.WeightSyncInitInfo
    ) -> transfer.WeightTransferSender:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return RayDirectSender(self) if rank == 0 else Draining()

    async def create_receiver(
        self, sync_info: transfer.WeightSyncInitInfo, rank_offset: int, rank: int = 0
    ) -> transfer.WeightTransferReceiver:
        return RayDirectReceiver(self.timeout)

    def get_request_type(self) -> type[transfer.WeightUpdateRequest]:
        return RayDirectRequest


@dataclass
class RayDirectRequest(transfer.WeightUpdateRequest):
    """Plain data, and a reference that Ray's calls carry."""

    ref: Any = None
    kind: ClassVar[str] = "ray_direct"

    def check(self) -> None:
        super().check()
        # The end of a sync has no tensors.
        if self.ref is not None and not isinstance(self.ref, ray.ObjectRef):
            raise RequestError(f"ref: expected a reference of Ray's, got {type(self.ref).__name__}")

    def to_dict(self) -> dict[str, Any]:
        # `asdict` would copy the reference.
        return {"kind": self.kind, **{one.name: getattr(self, one.name) for one in fields(self)}}


class RayDirectSender(transfer.WeightTransferSender):
    def __init__(self, strategy: RayDirectStrategy) -> None:
        super().__init__()
        self._transport, self.timeout = strategy.transport, strategy.timeout

    def create_request(self, chunk: WeightChunk) -> RayDirectRequest:
        return RayDirectRequest(**described(chunk), **self._numbers())

    async def _send_chunk(self, chunk: WeightChunk, request: Any, client: Any) -> None:
        # Ray keeps the buffer for as long as the reference lives: until all workers have it.
        request.ref = ray.put([chunk.pack()], _tensor_transport=self._transport)
        await self._call(client, request)

    def _end(self) -> RayDirectRequest:
        return RayDirectRequest(**{**self._numbers(), "last": True})


class RayDirectReceiver(transfer.WeightTransferReceiver):
    request_type = RayDirectRequest

    def __init__(self, timeout: float) -> None:
        super().__init__()
        self._timeout = timeout

    def _receive(self, request: Any) -> list[torch.Tensor]:
        if request.ref is None:
            raise RequestError("ref: a chunk needs a reference, got none")
        (buffer,) = ray.get(request.ref, timeout=self._timeout)
        return unpack(buffer, request.torch_dtypes, request.shapes)
