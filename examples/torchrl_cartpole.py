"""PPO on CartPole with TorchRL, its four workers fed by weightsync.

    python examples/torchrl_cartpole.py --scheme shared-mem --seed 0
    python examples/torchrl_cartpole.py --scheme multi-process --theirs --seed 0

Wants torch, torchrl and gymnasium. The one line that a program of yours changes is the import of
the scheme (`scheme_of`); `--theirs` takes TorchRL's own scheme of the same name, to compare. A run
ends when the last 100 episodes that the workers have played return 400 on average, or when the
frames are used up, after a minute or two on two cores. The exit status is 0 in the first case.
"""

import argparse
import collections
import importlib
import time

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.collectors import MultiCollector
from torchrl.envs import GymEnv, RewardSum, TransformedEnv
from torchrl.modules import ProbabilisticActor
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

WORKERS = 4
FRAMES = 150_000
# As short as the workers' hand-over allows, since each batch is from a newer policy.
BATCH = 1024
EPOCHS = 10
MINIBATCH = 256
EPISODES = 100
GOAL = 400.0
SCHEMES = {
    "shared-mem": "SharedMemWeightSyncScheme",
    "multi-process": "MultiProcessWeightSyncScheme",
}


def main():
    asked = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(asked.seed)
    actor, critic = networks()
    collector = MultiCollector(
        [environment] * WORKERS,
        sync=True,
        policy=actor,
        frames_per_batch=BATCH,
        total_frames=asked.frames,
        weight_sync_schemes={"policy": scheme_of(asked)},
    )
    began = time.monotonic()
    try:
        collector.set_seed(asked.seed)
        mean, frames = train(collector, actor, critic, asked.frames)
    finally:
        collector.shutdown()
    took = time.monotonic() - began
    whose = "theirs" if asked.theirs else "ours"
    print(
        f"{asked.scheme} ({whose}), seed {asked.seed}: mean return {mean:.1f} "
        f"over {EPISODES} episodes after {frames} frames, {took:.0f} s"
    )
    return 0 if mean >= GOAL else 1


def scheme_of(asked):
    """The scheme: from weightsync, or, to compare, from TorchRL."""
    module = "torchrl.weight_update" if asked.theirs else "weightsync.torchrl"
    return getattr(importlib.import_module(module), SCHEMES[asked.scheme])()


def train(collector, actor, critic, total):
    """Until the episodes are good, or the frames are used up: the mean, and the frames."""
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=True)
    loss = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=0.005, critic_coeff=0.5)
    optimiser = torch.optim.Adam(loss.parameters(), lr=1e-3, eps=1e-5)
    returns = collections.deque(maxlen=EPISODES)
    mean, frames = 0.0, 0
    for batch in collector:
        frames += batch.numel()
        ended = batch["next", "done"].squeeze(-1)
        returns.extend(batch["next", "episode_reward"].squeeze(-1)[ended].tolist())
        if len(returns) == EPISODES:
            mean = sum(returns) / EPISODES
            if mean >= GOAL:
                break
        for group in optimiser.param_groups:
            group["lr"] = 1e-3 * (1.0 - 0.9 * frames / total)
        learn(batch, advantage, loss, optimiser)
        collector.update_policy_weights_()
    return mean, frames


def learn(batch, advantage, loss, optimiser):
    """A few passes over one batch, in minibatches."""
    with torch.no_grad():
        advantage(batch)
    flat = batch.reshape(-1)
    for _ in range(EPOCHS):
        for some in torch.randperm(len(flat)).split(MINIBATCH):
            terms = loss(flat[some])
            total = terms["loss_objective"] + terms["loss_critic"] + terms["loss_entropy"]
            optimiser.zero_grad()
            total.backward()
            nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
            optimiser.step()


def networks():
    """The actor, which the workers run, and the critic, which stays here."""

    def layers(outputs, gain):
        stack = nn.Sequential(
            nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
        )
        for layer in stack[::2]:
            nn.init.orthogonal_(layer.weight, 2**0.5)
            nn.init.zeros_(layer.bias)
        nn.init.orthogonal_(stack[-1].weight, gain)
        return stack

    actor = ProbabilisticActor(
        TensorDictModule(layers(2, 0.01), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
    )
    critic = TensorDictModule(layers(1, 1.0), in_keys=["observation"], out_keys=["state_value"])
    return actor, critic


def environment():
    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    return TransformedEnv(env, RewardSum())


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scheme", choices=SCHEMES, default="shared-mem")
    parser.add_argument("--theirs", action="store_true", help="TorchRL's own scheme, to compare")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--frames", type=int, default=FRAMES, help="at most so many")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
