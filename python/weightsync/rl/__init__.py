"""Collectors: frames of environments of Gymnasium and of TorchRL to the trainer, weights to the workers.

A collector is iterated over for batches of frames::

    import weightsync.rl as rl

    collector = rl.MultiSyncCollector(["CartPole-v1"] * 8, policy, frames_per_batch=4096)
    for batch in collector:
        loss(batch).backward()
        ...
        collector.update_policy_weights_()

Batches lie in memory that workers write in place: no frame is copied or pickled. Weights go
through :mod:`weightsync`, whole versions only, and every frame has the version that chose its
action.

With an environment of TorchRL, frames are TensorDicts, and the collectors take the arguments of TorchRL's,
under its names, the older ones too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightsync.errors import UnsupportedError
from weightsync.rl._base import BaseCollector
from weightsync.rl._builtin import BuiltinEnv
from weightsync.rl._columns import Batch, Failure
from weightsync.rl._envs import ParallelEnv, SerialEnv
from weightsync.rl._policy import HAS_TORCH
from weightsync.rl._split import split_trajectories
from weightsync.rl.collector import Collector
from weightsync.rl.distributed import (
    DistributedDataCollector,
    DistributedSyncDataCollector,
    RPCDataCollector,
)
from weightsync.rl.multi import AsyncCollector, MultiAsyncCollector, MultiSyncCollector
from weightsync.rl.replay import (
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
)

#: TorchRL's older names.
DataCollectorBase = BaseCollector
SyncDataCollector = Collector
MultiSyncDataCollector = MultiSyncCollector
MultiaSyncDataCollector = MultiAsyncCollector
aSyncDataCollector = AsyncCollector

__all__ = [
    "AsyncCollector",
    "BaseCollector",
    "Batch",
    "BuiltinEnv",
    "Collector",
    "DataCollectorBase",
    "DistributedDataCollector",
    "DistributedSyncDataCollector",
    "Failure",
    "MultiAsyncCollector",
    "MultiSyncCollector",
    "MultiSyncDataCollector",
    "MultiaSyncDataCollector",
    "ParallelEnv",
    "PrioritizedSampler",
    "RPCDataCollector",
    "ReplayBuffer",
    "SamplerWithoutReplacement",
    "SerialEnv",
    "SliceSampler",
    "SyncDataCollector",
    "aSyncDataCollector",
    "split_trajectories",
]

if TYPE_CHECKING or HAS_TORCH:
    from weightsync.rl._mlp import MLP, GaussianMLP

    __all__ += ["MLP", "GaussianMLP"]


def __getattr__(name: str) -> Any:
    if name in ("MLP", "GaussianMLP"):
        raise UnsupportedError(f"torch is not installed here, and {name} is a module of torch")
    if name == "RayCollector":
        # TorchRL's own, which takes the scheme of weightsync.torchrl.
        from torchrl.collectors.distributed import RayCollector

        return RayCollector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
