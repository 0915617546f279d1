"""Environments of which every frame is known before, and policies for them."""

from __future__ import annotations

import os
import time
from typing import Any

import gymnasium
import numpy as np
import torch


class Counting(gymnasium.Env[np.ndarray, int]):
    """Shows its step number; an episode has ``length`` steps. The reward is the step's number.

    Args:
        length: steps of an episode.
        fault: what happens in step ``at`` of all: "raise", "refuse", "nan", "inf", "shape", "hang",
            "kill", "exit".
        at: counted over all episodes.
    """

    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, length: int = 5, fault: str = "", at: int = 0) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 1e6, (2,), np.float32)
        self.length, self.fault, self.at = length, fault, at
        self.taken = self.step_of_episode = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.step_of_episode = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.taken += 1
        self.step_of_episode += 1
        observation = np.array([self.step_of_episode, action], np.float32)
        reward = float(self.step_of_episode)
        if self.taken == self.at:
            if self.fault == "raise":
                raise RuntimeError("the pole broke")
            if self.fault == "refuse":
                raise ConnectionRefusedError("the simulator is gone")
            if self.fault == "nan":
                observation[0] = np.nan
            if self.fault == "inf":
                reward = -np.inf
            if self.fault == "shape":
                observation = np.zeros(3, np.float32)
            if self.fault == "hang":
                time.sleep(10_000)
            if self.fault == "kill":
                os.kill(os.getpid(), 9)
            if self.fault == "exit":
                os._exit(3)
        return observation, reward, self.step_of_episode >= self.length, False, {}


class Pixels(gymnasium.Env[dict[str, Any], np.ndarray]):
    """Observations are a dict, and actions are two numbers."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Dict(
            pixels=gymnasium.spaces.Box(0, 255, (3, 4), np.uint8),
            state=gymnasium.spaces.Dict(speed=gymnasium.spaces.Box(-1, 1, (1,), np.float64)),
        )
        self.action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

    def _observation(self, value: float) -> dict[str, Any]:
        return {"pixels": np.full((3, 4), 7, np.uint8), "state": {"speed": np.array([value])}}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        return self._observation(0.0), {}

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        return self._observation(float(action.sum())), 1.0, False, False, {}


def zeros(observation: torch.Tensor) -> torch.Tensor:
    """The first action."""
    return torch.zeros(len(observation), dtype=torch.int64)


class Constant(torch.nn.Module):
    """Chooses the action that its only weight names."""

    def __init__(self, action: float = 0.0) -> None:
        super().__init__()
        self.action = torch.nn.Parameter(torch.tensor([float(action)]))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.action.detach().round().long().expand(len(observation))

    def choose(self, action: int) -> Constant:
        with torch.no_grad():
            self.action.fill_(action)
        return self


class Large(Counting):
    """Shows 4 MiB: every number is the step's."""

    def __init__(self, length: int = 5) -> None:
        super().__init__(length)
        self.observation_space = gymnasium.spaces.Box(0, 255, (4 << 20,), np.uint8)

    def _shown(self) -> np.ndarray:
        return np.full(4 << 20, self.step_of_episode, np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return self._shown(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        _, *rest = super().step(action)
        return (self._shown(), *rest)  # type: ignore[return-value]
