"""Strategies ``cuda_ipc`` and ``packed_cuda_ipc``: memory of a GPU that both ends run on.

They ran on one GPU. The module is imported when one of the strategies is chosen, and at no other time.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from weightsync._memory import in_order
from weightsync.errors import PeerError, UnsupportedError, WrongTypeError
from weightsync.transfer.chunk import ALIGNMENT, WeightChunk, unpack
from weightsync.transfer.extractor import trainer_rank
from weightsync.transfer.init_info import EmptyWeightSyncInitInfo, WeightSyncInitInfo
from weightsync.transfer.requests import (
    CudaIpcHandle,
    CudaIpcWeightUpdateRequest,
    Handles,
    PackedCudaIpcWeightUpdateRequest,
    WeightUpdateRequest,
    described,
)
from weightsync.transfer.strategy import (
    InferenceEngineClient,
    WeightTransferReceiver,
    WeightTransferSender,
    WeightTransferStrategy,
    drained,
)


@dataclass
class CudaIpcStrategy(WeightTransferStrategy):
    """A handle for each tensor. The trainer's ranks and the workers share the GPUs of one host.

    Where there are several GPUs, chunks must come on all ranks: ``yield_on_all_ranks`` of the
    extractor's settings.
    """

    timeout: float = 60.0
    packed = False

    def __post_init__(self) -> None:
        if not torch.cuda.is_available():
            raise UnsupportedError(
                "CUDA IPC needs a GPU, and torch finds none: choose strategy weightsync or broadcast"
            )

    async def create_init_info(
        self, inference_world_size: int, metadata: Mapping[str, list[Any]] | None = None
    ) -> WeightSyncInitInfo:
        return EmptyWeightSyncInitInfo()

    async def create_sender(self, sync_info: WeightSyncInitInfo) -> WeightTransferSender:
        return CudaIpcSender(self.packed, self.timeout)

    async def create_receiver(
        self, sync_info: WeightSyncInitInfo, rank_offset: int, rank: int = 0
    ) -> WeightTransferReceiver:
        return CudaIpcReceiver(self.get_request_type(), torch.cuda.current_device())

    def get_request_type(self) -> type[WeightUpdateRequest]:
        return PackedCudaIpcWeightUpdateRequest if self.packed else CudaIpcWeightUpdateRequest


class PackedCudaIpcStrategy(CudaIpcStrategy):
    """One handle for each chunk, which is packed into one buffer."""

    packed = True


class CudaIpcSender(WeightTransferSender):
    """Each rank's end: it makes handles of its own GPU's memory, and rank 0 sends all of them."""

    def __init__(self, packed: bool, timeout: float) -> None:
        super().__init__()
        self._packed, self.timeout = packed, timeout

    async def send_chunks(
        self, chunks: Iterable[WeightChunk], inference_client: InferenceEngineClient
    ) -> None:
        alone = not dist.is_initialized() or not getattr(chunks, "on_all_ranks", True)
        failure: BaseException | None = None
        with drained(chunks) as each:
            self._begin()
            for chunk in each:
                # It must live until the workers have copied it.
                tensors = self._in_order(chunk)
                torch.cuda.synchronize()
                own = {"handles": [_exported(tensor) for tensor in tensors]}
                gathered = [own] if alone else _all_gather(own)
                if trainer_rank() == 0 and failure is None:
                    try:
                        handles = [one["handles"] for one in gathered]
                        request = self._request(chunk, handles)
                        await self._call(inference_client, request)
                    except BaseException as error:
                        failure = error
                if not alone:
                    failed = _all_gather({"failed": failure is not None})[0]["failed"]
                    if failed and failure is None:
                        failure = PeerError("rank 0 of the trainer failed to send; see its error")
                self._chunk += 1
                del chunk, tensors
                torch.cuda.ipc_collect()
                if failure is not None:
                    break
        if failure is not None:
            raise failure
        if trainer_rank() == 0:
            await self._finish(inference_client)
        self.version = self.syncs

    def create_request(self, chunk: WeightChunk) -> WeightUpdateRequest:
        """The request of a chunk on this rank's GPU alone."""
        return self._request(chunk, [[_exported(tensor) for tensor in self._in_order(chunk)]])

    def _in_order(self, chunk: WeightChunk) -> list[torch.Tensor]:
        """What handles are made of."""
        return [chunk.pack()] if self._packed else [in_order(one) for one in chunk.tensors]

    def _request(
        self, chunk: WeightChunk, gathered: list[list[dict[str, Any]]]
    ) -> WeightUpdateRequest:
        # By tensor, what each rank says of it.
        each: list[Handles] = [
            {uuid: CudaIpcHandle(**handle) for one in ranks for uuid, handle in one.items()}
            for ranks in zip(*gathered, strict=True)
        ]
        common = {**described(chunk), **self._numbers()}
        if not self._packed:
            return CudaIpcWeightUpdateRequest(**common, ipc_handles=each)
        sizes = [tensor.numel() for tensor in chunk.tensors]
        return PackedCudaIpcWeightUpdateRequest(
            **common, sizes=sizes, ipc_handles=each[0], alignment=ALIGNMENT
        )

    def _end(self) -> WeightUpdateRequest:
        kind = PackedCudaIpcWeightUpdateRequest if self._packed else CudaIpcWeightUpdateRequest
        return kind(**{**self._numbers(), "last": True})


class CudaIpcReceiver(WeightTransferReceiver):
    """A worker's end: it copies what the handle of its GPU leads to."""

    def __init__(self, request_type: type[WeightUpdateRequest], device: int) -> None:
        super().__init__()
        self.request_type, self._device = request_type, device

    def _receive(self, request: WeightUpdateRequest) -> list[torch.Tensor]:
        if isinstance(request, PackedCudaIpcWeightUpdateRequest):
            # SkyRL's class leaves this to the end that opens them.
            PackedCudaIpcWeightUpdateRequest.check_handles(request)
            buffer = self._opened(request.ipc_handles)
            views = unpack(buffer, request.torch_dtypes, request.shapes, request.alignment)
        else:
            assert isinstance(request, CudaIpcWeightUpdateRequest)
            each = zip(request.ipc_handles, request.torch_dtypes, request.shapes, strict=True)
            views = [
                self._opened(handles, math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
                for handles, dtype, shape in each
            ]
        # The sender reuses its memory once this call has returned.
        copies = [view.clone() for view in views]
        torch.cuda.synchronize(self._device)
        return copies

    def _opened(self, handles: Handles, size: int | None = None) -> torch.Tensor:
        uuid = _uuid(self._device)
        if uuid not in handles:
            raise PeerError(
                f"the request has no handle of this worker's GPU {uuid}, but of "
                f"{', '.join(sorted(handles))}: the trainer must run on the same GPUs and extract "
                "with yield_on_all_ranks"
            )
        handle = handles[uuid]
        storage = torch.UntypedStorage._new_shared_cuda(
            self._device,
            handle.bytes_of("handle"),
            handle.storage_bytes,
            handle.storage_offset,
            handle.bytes_of("ref_counter"),
            handle.ref_counter_offset,
            handle.bytes_of("event"),
            handle.event_sync,
        )
        whole = torch.empty(0, dtype=torch.uint8, device=f"cuda:{self._device}")
        size = handle.storage_bytes - handle.begin if size is None else size
        return whole.set_(storage, handle.begin, (size,), (1,))


def _exported(tensor: torch.Tensor) -> dict[str, Any]:
    """The handle of a tensor's memory by its GPU's UUID, as plain data."""
    if not tensor.is_cuda:
        raise WrongTypeError(f"CUDA IPC sends tensors of a GPU, got one on {tensor.device}")
    (_, handle, size, offset, counter, counter_offset, event, event_sync) = (
        tensor.untyped_storage()._share_cuda_()
    )
    made = CudaIpcHandle(
        handle=base64.b64encode(handle).decode(),
        storage_bytes=size,
        storage_offset=offset,
        ref_counter=base64.b64encode(counter).decode(),
        ref_counter_offset=counter_offset,
        event=base64.b64encode(event).decode(),
        event_sync=event_sync,
        begin=tensor.storage_offset() * tensor.element_size(),
    )
    return {_uuid(tensor.device.index): asdict(made)}


def _uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _all_gather(value: dict[str, Any]) -> list[Any]:
    """Plain data of all ranks of the trainer, as JSON: what torch offers for objects is pickle."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    world = dist.get_world_size()
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([text.numel()], device=device))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: text.numel()] = text
    all_ = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(all_, padded)
    return [
        json.loads(bytes(one[: int(size)].cpu().numpy())) for one, size in zip(all_, sizes, strict=True)
    ]
