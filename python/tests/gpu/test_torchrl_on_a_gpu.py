"""TorchRL's collectors with policies on a GPU, and the schemes of this package."""

import pytest
import torch
import weightsync.torchrl
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import MultiSyncCollector
from torchrl.envs import GymEnv


class Policy(nn.Module):
    """Its action is its weight, so frames say which weights chose it."""

    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.zeros(1 << 16))

    def forward(self, observation):
        shape = (*observation.shape[:-1], 1)
        return torch.zeros(shape, device=observation.device) + self.value[:1]


def pendulum():
    return GymEnv("Pendulum-v1", device="cpu")


@pytest.mark.parametrize("scheme", ["SharedMemWeightSyncScheme", "MultiProcessWeightSyncScheme"])
@pytest.mark.parametrize("acts", ["cuda", "cpu"])
def test_torchrl_collector_acts_with_what_was_sent(scheme, acts):
    policy = TensorDictModule(Policy().cuda(), in_keys=["observation"], out_keys=["action"])
    made = getattr(weightsync.torchrl, scheme)()
    collector = MultiSyncCollector(
        [pendulum] * 2,
        policy,
        frames_per_batch=8,
        total_frames=80,
        policy_device=acts,
        env_device="cpu",
        storing_device="cpu",
        cat_results="stack",
        weight_sync_schemes={"policy": made},
    )
    try:
        for count, batch in enumerate(collector):
            assert batch["action"].unique().tolist() == pytest.approx([count / 16])
            with torch.no_grad():
                policy.module.value.fill_((count + 1) / 16)
            collector.update_policy_weights_()
    finally:
        collector.shutdown()
