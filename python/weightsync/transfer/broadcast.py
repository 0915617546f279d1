"""Strategies ``broadcast`` and ``packed_broadcast``: one collective of torch.distributed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from weightsync._calls import in_thread
from weightsync._memory import flat_bytes
from weightsync._source import check_readable
from weightsync.errors import LifecycleError, WrongTypeError
from weightsync.transfer._group import UpdateGroup, join_store, open_store
from weightsync.transfer.chunk import WeightChunk, allocate, dtype_of
from weightsync.transfer.extractor import trainer_rank
from weightsync.transfer.init_info import (
    TorchDistributedWeightSyncInitInfo,
    WeightSyncInitInfo,
)
from weightsync.transfer.requests import (
    BroadcastWeightUpdateRequest,
    WeightUpdateRequest,
    described,
)
from weightsync.transfer.strategy import (
    Draining,
    InferenceEngineClient,
    WeightTransferReceiver,
    WeightTransferSender,
    WeightTransferStrategy,
    within,
)

# How long the group may still say which receiver died, once the inference client has failed.
_GRACE = 2.0


@dataclass
class BroadcastStrategy(WeightTransferStrategy):
    """A broadcast for each tensor, from rank 0 of the trainer to all inference workers.

    The members of a process group are fixed. A worker that joins later is refused, and after a
    worker died both ends need a new init info.

    Args:
        backend: ``"gloo"``, or ``"nccl"``, which has not run between GPUs here.
        master_addr: this host's address as receivers reach it. torch's rendez-vous knows no
            secrets, so anything but loopback belongs in a network that is trusted.
        timeout: how long each wait lasts at most, in seconds.
        device: where receivers put the tensors; None: ``"cpu"``, or the current GPU with NCCL.
        group_name: the group's name, where there are several on one store.
        override_existing_receiver: whether an actor that has a receiver makes a new one.
    """

    backend: str = "gloo"
    master_addr: str = "127.0.0.1"
    timeout: float = 60.0
    device: str | None = None
    group_name: str = "weightsync"
    override_existing_receiver: bool = True
    packed = False
    fixed_membership = True

    def __post_init__(self) -> None:
        self._store: dist.TCPStore | None = None

    async def create_init_info(
        self, inference_world_size: int, metadata: Mapping[str, list[Any]] | None = None
    ) -> TorchDistributedWeightSyncInitInfo:
        return self.open(inference_world_size, 0 if metadata is None else _bytes_of(metadata))

    def open(
        self, inference_world_size: int, total_bytes: int = 0
    ) -> TorchDistributedWeightSyncInitInfo:
        """Opens the port that receivers will come to."""
        self._store = open_store(self.master_addr, self.timeout)
        return TorchDistributedWeightSyncInitInfo(
            override_existing_receiver=self.override_existing_receiver,
            master_addr=self.master_addr,
            master_port=self._store.port,
            world_size=inference_world_size + 1,
            group_name=self.group_name,
            backend=self.backend,
            total_bytes=total_bytes,
        )

    async def create_sender(self, sync_info: WeightSyncInitInfo) -> WeightTransferSender:
        """Returns when all receivers have joined.

        Raises:
            DeadlineError: naming those that have not.
        """
        if trainer_rank() != 0:
            return Draining()
        info = _checked(sync_info)
        store, self._store = self._store, None
        if store is None or store.port != info.master_port:
            raise LifecycleError("call create_init_info first, on this strategy and in this process")
        group = await in_thread(lambda: UpdateGroup(store, info, 0, self.timeout), leaves=True)
        return BroadcastSender(group, self.timeout, self.packed)

    async def create_receiver(
        self, sync_info: WeightSyncInitInfo, rank_offset: int, rank: int = 0
    ) -> WeightTransferReceiver:
        """Returns when all members of the group are there."""
        info = _checked(sync_info)
        store = await in_thread(lambda: join_store(info, self.timeout), leaves=True)
        member = rank_offset + rank
        group = await in_thread(lambda: UpdateGroup(store, info, member, self.timeout), leaves=True)
        device = self.device
        if device is None:
            device = "cpu" if info.backend == "gloo" else f"cuda:{torch.cuda.current_device()}"
        return BroadcastReceiver(group, torch.device(device), info.total_bytes)

    def get_request_type(self) -> type[WeightUpdateRequest]:
        return BroadcastWeightUpdateRequest

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_store": None}


class PackedBroadcastStrategy(BroadcastStrategy):
    """A broadcast for each chunk, as one buffer."""

    packed = True


class BroadcastSender(WeightTransferSender):
    """Rank 0's end. A receiver that dies is named by the error, and the group is closed.

    A sync that is cancelled closes the group, too: no receiver loads it.
    """

    def __init__(self, group: UpdateGroup, timeout: float, packed: bool) -> None:
        super().__init__()
        self._group, self.timeout, self._packed = group, timeout, packed

    def create_request(self, chunk: WeightChunk) -> BroadcastWeightUpdateRequest:
        sizes = [tensor.numel() for tensor in chunk.tensors] if self._packed else None
        return BroadcastWeightUpdateRequest(**described(chunk), **self._numbers(), sizes=sizes)

    def _end(self) -> BroadcastWeightUpdateRequest:
        return BroadcastWeightUpdateRequest(**{**self._numbers(), "last": True})

    async def _send_chunk(
        self, chunk: WeightChunk, request: WeightUpdateRequest, client: InferenceEngineClient
    ) -> None:
        if self._packed:
            tensors = [chunk.pack()]
        else:
            for name, one in zip(chunk.names, chunk.tensors, strict=True):
                check_readable(name, one)
            tensors = [flat_bytes(one) for one in chunk.tensors]
        what = self._what()
        call = asyncio.ensure_future(
            within(client.update_named_weights(request.to_dict()), self.timeout, what)
        )
        transfer = asyncio.ensure_future(
            in_thread(lambda: self._group.send(tensors, what, request.chunk), leaves=True)
        )
        both = {call, transfer}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
            if not transfer.done():
                # Receivers that were not asked will not come.
                await asyncio.wait({transfer}, timeout=_GRACE)
                self._group.close()
        except asyncio.CancelledError:
            # The thread of the transfer ends with the group.
            self._group.close()
            call.cancel()
            transfer.cancel()
            raise
        if not call.done():
            call.cancel()
        sent, called = await asyncio.gather(transfer, call, return_exceptions=True)
        for failed in (sent, called):
            if isinstance(failed, BaseException) and not isinstance(failed, asyncio.CancelledError):
                self._group.close()
                raise failed

    def shutdown(self) -> None:
        super().shutdown()
        self._group.close()


class BroadcastReceiver(WeightTransferReceiver):
    """An inference worker's end."""

    request_type = BroadcastWeightUpdateRequest

    def __init__(self, group: UpdateGroup, device: torch.device, total_bytes: int = 0) -> None:
        super().__init__()
        self._group, self._device, self.total_bytes = group, device, total_bytes

    def _receive(self, request: WeightUpdateRequest) -> list[torch.Tensor]:
        assert isinstance(request, BroadcastWeightUpdateRequest)
        buffer, views = allocate(request.torch_dtypes, request.shapes, self._device)
        packed = request.sizes is not None
        self._group.receive([buffer] if packed else [flat_bytes(one) for one in views], request.chunk)
        return views

    def shutdown(self) -> None:
        super().shutdown()
        self._group.close()


def _bytes_of(metadata: Mapping[str, list[Any]]) -> int:
    each = zip(metadata["dtype_names"], metadata["shapes"], strict=True)
    return sum(dtype_of(dtype).itemsize * math.prod(shape) for dtype, shape in each)


def _checked(info: WeightSyncInitInfo) -> TorchDistributedWeightSyncInitInfo:
    if not isinstance(info, TorchDistributedWeightSyncInitInfo):
        raise WrongTypeError(
            f"expected a TorchDistributedWeightSyncInitInfo, got {type(info).__name__}"
        )
    return info
