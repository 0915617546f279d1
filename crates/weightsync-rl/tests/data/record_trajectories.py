"""Records the trajectory ids that TorchRL's collector gives to three environments.

    pip install torchrl && python record_trajectories.py

writes `trajectories.json` next to this file: for each case the ids and the ends of
every frame, batch by batch, `[P, T]`; and how the batch is split, `[N, T_max]`: the
ids, which are 0 in the padding, and the mask.
"""

import json
import pathlib

import torch
import torchrl
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.collectors.utils import split_trajectories
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase, SerialEnv

ENVIRONMENTS = ([3, 2], [4, 1, 2], [2, 2])


class Counter(EnvBase):
    """Its episodes have the lengths it was given, in turn."""

    def __init__(self, lengths):
        super().__init__(device="cpu")
        self.lengths, self.episode, self.step_number = lengths, -1, 0
        self.observation_spec = Composite(observation=Unbounded((1,)))
        self.action_spec = Unbounded((1,))
        self.reward_spec = Unbounded((1,))

    def _reset(self, _tensordict=None, **_options):
        self.episode += 1
        self.step_number = 0
        return TensorDict({"observation": torch.zeros(1)}, [])

    def _step(self, _tensordict):
        self.step_number += 1
        done = torch.tensor([self.step_number >= self.lengths[self.episode % len(self.lengths)]])
        seen = torch.full((1,), float(self.step_number))
        return TensorDict({"observation": seen, "reward": torch.ones(1), "done": done, "terminated": done}, [])

    def _set_seed(self, _seed):
        pass


def recorded(batch):
    split = split_trajectories(batch)
    return {
        "traj_ids": batch["collector", "traj_ids"].tolist(),
        "done": batch["next", "done"].squeeze(-1).tolist(),
        "split": split["collector", "traj_ids"].tolist(),
        "mask": split["collector", "mask"].tolist(),
    }


def record(reset_at_each_iter):
    collector = Collector(
        SerialEnv(3, [lambda lengths=lengths: Counter(lengths) for lengths in ENVIRONMENTS]),
        lambda tensordict: tensordict.set("action", torch.zeros(3, 1)),
        frames_per_batch=15,
        total_frames=45,
        reset_at_each_iter=reset_at_each_iter,
    )
    batches = [recorded(batch) for batch in collector]
    collector.shutdown()
    return {"reset_at_each_iter": reset_at_each_iter, "batches": batches}


golden = {"source": f"torchrl {torchrl.__version__}", "cases": [record(False), record(True)]}
path = pathlib.Path(__file__).parent / "trajectories.json"
path.write_text(json.dumps(golden, separators=(",", ":")) + "\n")
