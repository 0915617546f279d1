"""Collectors whose policies run on a GPU, and whose frames go there."""

import pytest
import torch
import weightsync.rl as rl
from torch import nn


def policy(device="cpu"):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2)).to(device)


KINDS = {
    "sync": lambda *args, **how: rl.Collector("CartPole-v1", *args, **how),
    "multi-sync": lambda *args, **how: rl.MultiSyncCollector(["CartPole-v1"] * 2, *args, **how),
    "threads": lambda *args, **how: rl.MultiSyncCollector(
        ["CartPole-v1"] * 2, *args, workers="threads", **how
    ),
    "multi-async": lambda *args, **how: rl.MultiAsyncCollector(["CartPole-v1"] * 2, *args, **how),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("trained", "acts", "stores"),
    [("cuda", "cuda", "cuda"), ("cuda", "cpu", "cpu"), ("cpu", "cuda", None), ("cuda", None, None)],
)
def test_devices_are_those_asked_for(kind, trained, acts, stores):
    net = policy(trained)
    settings = {"frames_per_batch": 64, "total_frames": 256, "exploration_type": "mode"}
    with KINDS[kind](net, policy_device=acts, storing_device=stores, **settings) as collector:
        for count, batch in enumerate(collector, 1):
            assert batch["observation"].device.type == (stores or "cpu")
            # The same weights choose the same actions, on any device.
            with torch.no_grad():
                logits = net(batch["observation"].to(trained))
            gap = (logits[..., 0] - logits[..., 1]).abs()
            chosen = logits.argmax(-1).to(batch["action"].device)
            version = batch["collector", "policy_version"]
            newest = (version == version.max()) & (version.max() == collector.version)
            sure = (gap > 1e-4).to(newest.device) & newest
            assert torch.equal(batch["action"][sure], chosen[sure])
            with torch.no_grad():
                net[2].weight.normal_()
            report = collector.update_policy_weights_()
            assert report is None or count
        assert next(net.parameters()).device.type == trained
