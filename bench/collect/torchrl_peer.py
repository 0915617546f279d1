"""TorchRL's collector, with the policy that its users would write.

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
from torchrl.envs import GymEnv, SerialEnv
from torchrl.modules import OneHotCategorical


def cartpole() -> Any:
    """One environment."""
    return GymEnv("CartPole-v1")


def collector(net: torch.nn.Module, workers: int, envs: int, frames: int) -> Any:
    """Workers with a batch of environments each."""
    policy = ProbabilisticTensorDictSequential(
        TensorDictModule(net, ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=OneHotCategorical, return_log_prob=True
        ),
    )
    return MultiSyncCollector(
        [SerialEnv(envs, cartpole)] * workers,
        policy,
        frames_per_batch=frames,
        total_frames=-1,
        cat_results="stack",
    )
