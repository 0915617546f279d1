"""The extract-chunk-send-load interface: weights from any training backend to any engine.

A trainer has a :class:`WeightExtractor` and a :class:`WeightTransferSender`, an inference worker
a :class:`WeightTransferReceiver` and a :class:`WeightLoader`; a :class:`WeightTransferStrategy`,
chosen by a word, makes the matching ends. :class:`TrainingActor` and :class:`InferenceActor` run
the flow. ``weightsync.transfer.skyrl`` has the names and calls of SkyRL 0.3.0.
"""

from __future__ import annotations

from weightsync.transfer.chunk import WeightChunk
from weightsync.transfer.extractor import ExtractionPlan, WeightExtractor
from weightsync.transfer.extractors import (
    FsdpExtractor,
    MegatronExtractor,
    ModuleExtractor,
    ZeroExtractor,
)
from weightsync.transfer.flow import ActorClient, InferenceActor, TrainingActor
from weightsync.transfer.init_info import (
    EmptyWeightSyncInitInfo,
    TorchDistributedWeightSyncInitInfo,
    WeightsyncInitInfo,
    WeightSyncInitInfo,
    init_info_from_dict,
    rank_in_deployment,
    rank_offsets,
)
from weightsync.transfer.loaders import EngineLoader, ModuleLoader, VllmLoader
from weightsync.transfer.requests import (
    BroadcastWeightUpdateRequest,
    CudaIpcHandle,
    CudaIpcWeightUpdateRequest,
    LoraLoadRequest,
    PackedCudaIpcWeightUpdateRequest,
    RequestError,
    WeightsyncUpdateRequest,
    WeightUpdateRequest,
)
from weightsync.transfer.strategy import (
    InferenceEngineClient,
    WeightLoader,
    WeightTransferReceiver,
    WeightTransferSender,
    WeightTransferStrategy,
    register_strategy,
    strategies,
    strategy_from_config,
)

__all__ = [
    "ActorClient",
    "BroadcastWeightUpdateRequest",
    "CudaIpcHandle",
    "CudaIpcWeightUpdateRequest",
    "EmptyWeightSyncInitInfo",
    "EngineLoader",
    "ExtractionPlan",
    "FsdpExtractor",
    "InferenceActor",
    "InferenceEngineClient",
    "LoraLoadRequest",
    "MegatronExtractor",
    "ModuleExtractor",
    "ModuleLoader",
    "PackedCudaIpcWeightUpdateRequest",
    "RequestError",
    "TorchDistributedWeightSyncInitInfo",
    "TrainingActor",
    "VllmLoader",
    "WeightChunk",
    "WeightExtractor",
    "WeightLoader",
    "WeightSyncInitInfo",
    "WeightTransferReceiver",
    "WeightTransferSender",
    "WeightTransferStrategy",
    "WeightUpdateRequest",
    "WeightsyncInitInfo",
    "WeightsyncUpdateRequest",
    "ZeroExtractor",
    "init_info_from_dict",
    "rank_in_deployment",
    "rank_offsets",
    "register_strategy",
    "strategies",
    "strategy_from_config",
]

register_strategy("weightsync", "weightsync.transfer.native:WeightsyncStrategy")
register_strategy("broadcast", "weightsync.transfer.broadcast:BroadcastStrategy")
register_strategy("packed_broadcast", "weightsync.transfer.broadcast:PackedBroadcastStrategy")
register_strategy("cuda_ipc", "weightsync.transfer.cuda_ipc:CudaIpcStrategy")
register_strategy("packed_cuda_ipc", "weightsync.transfer.cuda_ipc:PackedCudaIpcStrategy")
