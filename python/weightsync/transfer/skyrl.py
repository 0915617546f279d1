"""The names and calls of SkyRL 0.3.0's ``weight_sync``, over this package.

A trainer that was written for ``skyrl.backends.skyrl_train.weight_sync`` and its modules imports
this module in their place. An extractor has ``extract_weights(dtype)`` and keeps its model; a
strategy is called through its class; ``create_sender`` blocks; ``send_chunks`` takes the weights'
metadata.

The receiving end is this package's: the inference workers have a
:class:`weightsync.transfer.InferenceActor`, and the client calls those. SkyRL's own
``RemoteInferenceClient`` has vLLM's NCCL and IPC engines as its receivers, and these do not
understand what is sent here: for vLLM use :mod:`weightsync.vllm`.

The module imports no CUDA code; nothing of it has run on a GPU. Its attribute ``ray`` is Ray, which is
imported when it is asked for.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from weightsync import transfer
from weightsync.errors import LifecycleError, UnsupportedError, WrongWeightsError
from weightsync.transfer.broadcast import PackedBroadcastStrategy
from weightsync.transfer.extractor import setting, trainer_rank
from weightsync.transfer.init_info import (
    EmptyWeightSyncInitInfo,
    TorchDistributedWeightSyncInitInfo,
    WeightSyncInitInfo,
    rank_offsets,
)
from weightsync.transfer.requests import _END as _IPC_REQUEST_END_MARKER
from weightsync.transfer.requests import _text
from weightsync.transfer.strategy import strategy_from_config

__all__ = [
    "BroadcastInitInfo",
    "BroadcastTransferStrategy",
    "BroadcastWeightTransferSender",
    "BroadcastWeightUpdateRequest",
    "CudaIpcInitInfo",
    "CudaIpcTransferStrategy",
    "CudaIpcWeightTransferSender",
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


class WeightChunk(transfer.WeightChunk):
    """A chunk whose dtypes are names, such as ``"torch.bfloat16"``, and whose shapes are lists.

    The shapes are labels: a tensor gets the shape of its label when it is sent.
    """

    def __init__(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        tensors: list[torch.Tensor],
    ) -> None:
        own = [tuple(tensor.shape) for tensor in tensors]
        as_they_are: Any = own if len(own) == len(shapes) else shapes
        super().__init__(names, tensors, dtypes, as_they_are)  # type: ignore[arg-type]
        self.dtypes = [str(dtype) for dtype in dtypes]  # type: ignore[misc]
        self.shapes = [list(shape) for shape in shapes]  # type: ignore[misc]


class WeightExtractor(transfer.WeightExtractor):
    """Has its model, and yields chunks of a dtype."""

    @abstractmethod
    def extract_weights(self, dtype: torch.dtype) -> Iterator[WeightChunk]:  # type: ignore[override]
        """The chunks of one sync."""

    @abstractmethod
    def get_weight_metadata(self, dtype: torch.dtype) -> dict[str, list[Any]]:
        """``names``, ``dtype_names`` and ``shapes`` of all weights. Nothing is gathered for it."""

    async def _extract_raw_weights(
        self, model: Any, generator_dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        raise LifecycleError("this extractor makes its chunks itself: call extract_weights(dtype)")


class _Json:
    """Requests as dicts: ``kind`` and the numbers of a sync are added, and may be left out."""

    to_dict: Callable[[], dict[str, Any]]
    from_dict: Callable[[Any], Any]
    kind: ClassVar[str]

    def to_json_dict(self) -> dict[str, Any]:
        """Plain data, handles of memory included."""
        return self.to_dict()

    @classmethod
    def from_json_dict(cls, data: Mapping[str, Any]) -> Any:
        """What ``to_json_dict`` made, checked."""
        return cls.from_dict({**cls().to_dict(), **data})


class WeightUpdateRequest(_Json, transfer.WeightUpdateRequest):
    """What all requests have."""


class BroadcastWeightUpdateRequest(_Json, transfer.BroadcastWeightUpdateRequest):
    """``sizes``, in elements, says that the chunk comes as one packed buffer."""

    def __init__(
        self,
        names: list[str] | None = None,
        dtypes: list[str] | None = None,
        shapes: list[list[int]] | None = None,
        sizes: list[int] | None = None,
        **numbers: Any,
    ) -> None:
        super().__init__(_list(names), _list(dtypes), _list(shapes), sizes=sizes, **numbers)


class CudaIpcWeightUpdateRequest(_Json, transfer.PackedCudaIpcWeightUpdateRequest):
    """A chunk that is packed into one buffer, with a handle on each GPU. No handle is pickled.

    A text may stand for a handle. It is refused where handles are opened.
    """

    def __init__(
        self,
        names: list[str] | None = None,
        dtypes: list[str] | None = None,
        shapes: list[list[int]] | None = None,
        sizes: list[int] | None = None,
        ipc_handles: Any = None,
        **numbers: Any,
    ) -> None:
        super().__init__(
            _list(names), _list(dtypes), _list(shapes), sizes=_list(sizes),
            ipc_handles={} if ipc_handles is None else ipc_handles, **numbers,
        )  # fmt: skip

    def check_handles(self) -> None:
        held = self.ipc_handles
        if not isinstance(held, Mapping) or not all(isinstance(one, str) for one in held.values()):
            super().check_handles()
            return
        for uuid, placeholder in held.items():
            _text("ipc_handles: a GPU's UUID", uuid)
            _text(f"ipc_handles[{uuid!r}]", placeholder)


class LoraLoadRequest(_Json, transfer.LoraLoadRequest):
    """An adapter to be loaded from a path, under a name."""

    def __init__(
        self,
        names: list[str] | None = None,
        dtypes: list[str] | None = None,
        shapes: list[list[int]] | None = None,
        lora_path: str = "",
        lora_name: str = "",
        **numbers: Any,
    ) -> None:
        super().__init__(
            _list(names), _list(dtypes), _list(shapes), lora_path=lora_path, lora_name=lora_name,
            **numbers,
        )  # fmt: skip

    @classmethod
    def from_json_dict(cls, data: Mapping[str, Any]) -> Any:
        """What ``to_json_dict`` made, checked."""
        return cls.from_dict({**cls(lora_path="-").to_dict(), "lora_path": "", **data})


def _list(given: Any) -> Any:
    """What was given, to be checked; an empty list for nothing."""
    return [] if given is None else given


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


@dataclass
class CudaIpcInitInfo(EmptyWeightSyncInitInfo):
    """Handles need no rendez-vous: every server gets the same."""

    model_dtype_str: str = "bfloat16"
    kind: ClassVar[str] = "skyrl_cuda_ipc"

    def for_servers(
        self, world_size_per_server: int, num_servers: int, dp_size: int = 1
    ) -> list[CudaIpcInitInfo]:
        """One for each server."""
        return [replace(self) for _ in range(num_servers)]

    def to_api_payload(self) -> dict[str, Any]:
        """Nothing."""
        return {}


class WeightTransferSender(ABC):
    """The trainer's end. Every rank has one."""

    @abstractmethod
    async def send_chunks(
        self, chunks: Iterable[WeightChunk], weight_metadata: Mapping[str, list[Any]] | None = None
    ) -> None:
        """One sync; all ranks call it."""

    @abstractmethod
    def teardown(self) -> None:
        """Closes what the sender holds open."""


class _Sender(WeightTransferSender):
    """Sends to the client that it was created with."""

    def __init__(self, sender: transfer.WeightTransferSender, client: Any) -> None:
        self._sender, self._client = sender, client

    async def send_chunks(
        self, chunks: Iterable[WeightChunk], weight_metadata: Mapping[str, list[Any]] | None = None
    ) -> None:
        """One sync; all ranks call it. The metadata is not needed."""
        await self._sender.send_chunks(_plain(chunks), self._client)

    def teardown(self) -> None:
        """Any number of times."""
        self._sender.shutdown()


class BroadcastWeightTransferSender(_Sender):
    """Has the group that ``create_sender`` formed."""

    def __init__(
        self,
        init_info: BroadcastInitInfo,
        model_update_group: transfer.WeightTransferSender,
        inference_client: Any,
    ) -> None:
        super().__init__(model_update_group, inference_client)


class CudaIpcWeightTransferSender(_Sender):
    """Needs a GPU, and has not run on one."""

    def __init__(self, init_info: CudaIpcInitInfo, inference_client: Any) -> None:
        strategy = strategy_from_config("packed_cuda_ipc")
        super().__init__(asyncio.run(strategy.create_sender(init_info)), inference_client)


class WeightTransferStrategy(ABC):
    """A factory that is never made: its methods are called on the class."""

    @staticmethod
    @abstractmethod
    def create_init_info(
        ie_cfg: Any, inference_world_size: int | None = None
    ) -> WeightSyncInitInfo:
        """All ranks call it; the one of rank 0 is for the receivers."""

    @staticmethod
    @abstractmethod
    def get_vllm_transfer_engine() -> type:
        """The class of vLLM's that SkyRL pairs with the strategy."""

    @staticmethod
    @abstractmethod
    def create_sender(init_info: WeightSyncInitInfo, inference_client: Any) -> WeightTransferSender:
        """All ranks call it, in a thread; rank 0 waits there for the receivers."""


class BroadcastTransferStrategy(WeightTransferStrategy):
    """A packed broadcast. ``ie_cfg`` may have ``weight_sync_backend`` and ``master_addr``.

    Without ``master_addr`` receivers come to this node's address, which Ray says, and to loopback in a
    program without Ray. torch's rendez-vous knows no secrets: a cluster needs a network that is
    trusted, as Ray itself does.
    """

    _opened: ClassVar[dict[int, PackedBroadcastStrategy]] = {}

    @staticmethod
    def create_init_info(
        ie_cfg: Any, inference_world_size: int | None = None
    ) -> BroadcastInitInfo:
        strategy = PackedBroadcastStrategy(
            backend=setting(ie_cfg, "weight_sync_backend", "gloo"),
            master_addr=setting(ie_cfg, "master_addr", None) or _node_address(),
            override_existing_receiver=not setting(ie_cfg, "run_engines_locally", False),
        )
        if trainer_rank() != 0:
            return BroadcastInitInfo(backend=strategy.backend)
        info = BroadcastInitInfo(**vars(strategy.open(inference_world_size or 1)))
        BroadcastTransferStrategy._opened[info.master_port] = strategy
        return info

    @staticmethod
    def create_sender(
        init_info: WeightSyncInitInfo, inference_client: Any
    ) -> BroadcastWeightTransferSender:
        port = getattr(init_info, "master_port", 0)
        strategy = BroadcastTransferStrategy._opened.pop(port, None) or PackedBroadcastStrategy()
        group = asyncio.run(strategy.create_sender(init_info))
        return BroadcastWeightTransferSender(init_info, group, inference_client)  # type: ignore[arg-type]

    @staticmethod
    def get_vllm_transfer_engine() -> type:
        """vLLM's NCCL engine, which does not receive what this strategy sends."""
        return _of_vllm("nccl_engine", "NCCLWeightTransferEngine")


class CudaIpcTransferStrategy(WeightTransferStrategy):
    """One handle for each chunk. It needs a GPU, and has not run on one."""

    @staticmethod
    def create_init_info(
        ie_cfg: Any, inference_world_size: int | None = None
    ) -> CudaIpcInitInfo:
        local = setting(ie_cfg, "run_engines_locally", False)
        return CudaIpcInitInfo(not local, setting(ie_cfg, "model_dtype", "bfloat16"))

    @staticmethod
    def create_sender(
        init_info: WeightSyncInitInfo, inference_client: Any
    ) -> CudaIpcWeightTransferSender:
        return CudaIpcWeightTransferSender(init_info, inference_client)  # type: ignore[arg-type]

    @staticmethod
    def get_vllm_transfer_engine() -> type:
        """vLLM's IPC engine, which does not receive what this strategy sends."""
        return _of_vllm("ipc_engine", "IPCWeightTransferEngine")


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
    it is gathered. :class:`weightsync.transfer.MegatronExtractor` asks for shapes first. What
    ``get_shape_fn`` returns is a label of the tensor: see :class:`WeightChunk`.
    """
    grouping = _Grouping()
    batch: list[transfer.WeightChunk] = []
    for names in grouping._group_by_module(params).values():
        tensors, shapes = [], []
        for name in names:
            tensor = gather_tensor_fn(params[name]).to(dtype).detach().contiguous()
            tensors.append(tensor)
            shapes.append(list(get_shape_fn(name, params[name], tensor)))
        chunk = WeightChunk(list(names), [str(dtype)] * len(names), shapes, tensors)
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


def _merged(chunks: list[transfer.WeightChunk]) -> WeightChunk:
    return WeightChunk(
        names=[name for chunk in chunks for name in chunk.names],
        dtypes=[str(dtype) for chunk in chunks for dtype in chunk.dtypes],
        shapes=[list(shape) for chunk in chunks for shape in chunk.shapes],
        tensors=[tensor for chunk in chunks for tensor in chunk.tensors],
    )


def _plain(chunks: Iterable[transfer.WeightChunk]) -> Iterator[transfer.WeightChunk]:
    """The chunks as the package's senders have them."""
    for chunk in chunks:
        each = zip(chunk.names, chunk.tensors, chunk.shapes, strict=True)
        tensors = [_shaped(name, tensor, tuple(shape)) for name, tensor, shape in each]
        plain = transfer.WeightChunk(chunk.names, tensors, chunk.dtypes, chunk.shapes)
        del chunk, tensors, each
        yield plain
        del plain


def _shaped(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor in the shape of its label."""
    if math.prod(shape) != tensor.numel():
        raise WrongWeightsError(
            f"{name}: expected the shape of {tensor.numel()} elements, as the tensor of "
            f"{list(tensor.shape)} has, got {list(shape)}"
        )
    return tensor.reshape(shape)


def _of_vllm(module: str, name: str) -> type:
    try:
        found = importlib.import_module(f"vllm.distributed.weight_transfer.{module}")
        return getattr(found, name)  # type: ignore[no-any-return]
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(f"this needs a vLLM that has {name}: {error}") from error


def _node_address() -> str:
    """Where this node is reached, in a program that has imported Ray; else loopback."""
    if "ray" not in sys.modules:
        return "127.0.0.1"
    return str(sys.modules["ray"].util.get_node_ip_address())


def __getattr__(name: str) -> Any:
    if name == "ray":
        return importlib.import_module("ray")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
