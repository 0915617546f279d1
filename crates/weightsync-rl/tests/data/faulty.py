"""Environments that fail, for tests of tasks of Gymnasium."""

import gymnasium
import numpy as np


class Faulty(gymnasium.Env):
    """The observation of its fifteenth step is another one."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, fault):
        self.fault = fault
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action):
        self.steps += 1
        seen = self.fault if self.steps == 15 else [0] * 4
        return np.array(seen, np.float32), 1.0, False, False, {}


for name, fault in {"Short-v0": [0] * 3}.items():
    gymnasium.register(
        name, lambda fault=fault: Faulty(fault), disable_env_checker=True, order_enforce=False
    )
