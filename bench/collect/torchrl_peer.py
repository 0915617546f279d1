"""TorchRL's collector and replay buffer, as its users would write them.

It is a module of its own, since TorchRL's workers import what they run.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torchrl.collectors import MultiSyncCollector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import GymEnv, SerialEnv
from torchrl.modules import OneHotCategorical


def cartpole() -> Any:
    """One environment."""
    return GymEnv("CartPole-v1")


def collector(
    net: torch.nn.Module, workers: int, envs: int | None, frames: int, kind: Any = MultiSyncCollector
) -> Any:
    """Workers with a batch of environments each, or with one: TorchRL's, or what takes the same."""
    policy = ProbabilisticTensorDictSequential(
        TensorDictModule(net, ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=OneHotCategorical, return_log_prob=True
        ),
    )
    env = cartpole if envs is None else SerialEnv(envs, cartpole)
    return kind(
        [env] * workers,
        policy,
        frames_per_batch=frames,
        total_frames=-1,
        cat_results="stack",
    )


def buffer(capacity: int, batch_size: int) -> Any:
    """A buffer in memory with uniform samples."""
    return ReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=batch_size)
