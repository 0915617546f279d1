"""An environment and a policy whose frames say which weights they were made with."""

import contextlib

import torch
from crew import scheme_by
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import MultiCollector
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase


class One(nn.Module):
    """One weight; its forward answers it for every row, whatever the input."""

    def __init__(self, weight=0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([float(weight)]))

    def forward(self, rows):
        return self.weight.expand(rows.shape).clone()


class Counting(EnvBase):
    """Counts its steps, and never ends. The reward is what `value_net` says: its weight."""

    # The one of this process that was made last.
    last = None

    def __init__(self, value=0.0):
        super().__init__(batch_size=[])
        Counting.last = self
        self.value_net = One(value)
        self.observation_spec = Composite(observation=Unbounded((1,)))
        self.action_spec = Unbounded((1,))
        self.reward_spec = Unbounded((1,))

    def _reset(self, _=None, **__):
        return TensorDict({"observation": torch.zeros(1)}, [])

    def _step(self, now):
        count = now["observation"] + 1
        reward = self.value_net(now["action"]).detach()
        return TensorDict(
            {"observation": count, "reward": reward, "done": torch.zeros(1, dtype=torch.bool)}, []
        )

    def _set_seed(self, seed):
        pass


def policy(weight=0.0, module=None):
    """A policy whose action is its weight, or what `module` answers."""
    return TensorDictModule(module or One(weight), in_keys=["observation"], out_keys=["action"])


def weights_of(module):
    """A copy of a module's weights, as a TensorDict."""
    return TensorDict.from_module(module).data.clone()


@contextlib.contextmanager
def collecting(module, schemes, workers=2, sync=True, frames=4, env=Counting, **how):
    """A collector of so many workers, and its batches; `schemes` are schemes or their names."""
    made = {}
    for model, scheme in schemes.items():
        made[model] = scheme_by(module, scheme) if isinstance(scheme, str) else scheme
    collector = MultiCollector(
        env if isinstance(env, list) else [env] * workers,
        sync=sync,
        frames_per_batch=frames * workers if sync else frames,
        total_frames=-1,
        weight_sync_schemes=made,
        auto_register_policy_transforms=False,
        **how,
    )
    try:
        yield collector, iter(collector)
    finally:
        collector.shutdown()


def acted(batches, key="action"):
    """What the workers did in the next batch, which is the weights they did it with."""
    return set(next(batches)[key].flatten().tolist())
