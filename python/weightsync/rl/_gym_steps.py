"""Plain environments of Gymnasium in TorchRL's ``GymEnv``, stepped without TorchRL between two steps.

The frames are TorchRL's to the bit: its specs read the actions, and Gymnasium's environments are
stepped and reset in its order. What differs from a ``GymEnv`` as it is, such as a transform, is stepped
by TorchRL.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torchrl.data import Bounded, Categorical, OneHot, Unbounded
from torchrl.envs import EnvBase, GymEnv, SerialEnv

try:
    import gymnasium
except ImportError:
    gymnasium = None

_FLAGS = ["done", "terminated", "truncated"]


class GymSteps:
    """The environments of a ``GymEnv``, or of a ``SerialEnv`` of them.

    Attributes:
        shown: the keys that these environments give a policy.
    """

    def __init__(self, envs: list[Any], env: EnvBase, spec_of_one: Any) -> None:
        self._envs, self._spec_of_one = envs, spec_of_one
        self._key = next(iter(env.observation_spec.keys()))
        self._spec = env.action_spec
        self._is_choice = isinstance(self._spec, (OneHot, Categorical))
        spec = env.observation_spec[self._key]
        self._is_batched = bool(env.batch_size)
        self._shape = tuple(spec.shape[len(env.batch_size) :])
        self._dtype = torch.empty(0, dtype=spec.dtype, device="cpu").numpy().dtype
        self._reward = torch.empty(0, dtype=env.reward_spec.dtype, device="cpu").numpy().dtype
        self.shown = {self._key, *_FLAGS}

    @staticmethod
    def of(env: EnvBase) -> GymSteps | None:
        """These environments; None where TorchRL has more to do than to step them."""
        if gymnasium is None:
            return None
        inner = [env]
        if type(env) is SerialEnv:
            inner = list(env._envs)
        first = inner[0]
        if not all(type(one) is GymEnv and _is_plain(one) for one in inner):
            return None
        if any(
            (one.action_spec, one.observation_spec) != (first.action_spec, first.observation_spec)
            for one in inner
        ):
            return None
        if env.device not in (None, torch.device("cpu")) or env._post_step_mdp_hooks is not None:
            return None
        return GymSteps([one._env for one in inner], env, first.action_spec)

    def begin(self, steps: int, carrier: Any) -> None:
        """Makes room for a batch that begins with what the environments show now."""
        count = len(self._envs)
        self._seen = np.empty((steps + 1, count, *self._shape), self._dtype)
        self._led_to = np.empty((steps, count, *self._shape), self._dtype)
        self._rewards = np.zeros((steps, count, 1), self._reward)
        self._terminated = np.zeros((steps, count, 1), bool)
        self._truncated = np.zeros((steps, count, 1), bool)
        self._seen[0] = carrier.get(self._key).reshape(count, *self._shape).numpy()
        self._no = torch.zeros((count, 1) if self._is_batched else (1,), dtype=torch.bool, device="cpu")

    def observation(self, step: int) -> torch.Tensor:
        """What the environments show before a step."""
        seen = torch.from_numpy(self._seen[step])
        return seen if self._is_batched else seen[0]

    def shows(self, step: int) -> dict[str, torch.Tensor]:
        """The same, with flags: no episode has ended."""
        return {self._key: self.observation(step), **dict.fromkeys(_FLAGS, self._no)}

    def step(self, at: int, action: torch.Tensor) -> np.ndarray | None:
        """Takes a step in each environment, and begins other episodes where one ends.

        Returns:
            Where one has ended; None: nowhere.
        """
        if not self._is_batched:
            actions = [self._spec.to_numpy(action, safe=False)]
        elif action.shape == self._spec.shape:
            actions = self._spec.to_numpy(action, safe=False)
        else:
            # A policy that knows one environment's actions alone: each environment reads its part.
            actions = [self._spec_of_one.to_numpy(one, safe=False) for one in action]
        ended = None
        led_to, seen, rewards = self._led_to[at], self._seen[at + 1], self._rewards[at]
        for index, env in enumerate(self._envs):
            chosen = actions[index]
            if self._is_choice:
                chosen = int(chosen)
            shown, rewards[index, 0], terminated, truncated, _ = env.step(chosen)
            led_to[index] = shown
            if terminated or truncated:
                self._terminated[at, index, 0], self._truncated[at, index, 0] = terminated, truncated
                shown, _ = env.reset()
                if ended is None:
                    ended = np.zeros(len(self._envs), bool)
                ended[index] = True
            seen[index] = shown
        return ended

    def columns(self, steps: int) -> dict[Any, torch.Tensor]:
        """What the environments have shown in so many steps, ``[*batch, steps, *shape]``."""
        no = np.zeros((steps, len(self._envs), 1), bool)
        terminated, truncated = self._terminated[:steps], self._truncated[:steps]
        found: dict[Any, np.ndarray] = {
            self._key: self._seen[:steps],
            **dict.fromkeys(_FLAGS, no),
            ("next", self._key): self._led_to[:steps],
            ("next", "reward"): self._rewards[:steps],
            ("next", "terminated"): terminated,
            ("next", "truncated"): truncated,
            ("next", "done"): terminated | truncated,
        }
        # Each is a tensor of its own, as those that TorchRL stacks.
        return {key: self._turned(torch.from_numpy(value)) for key, value in found.items()}

    def _turned(self, value: torch.Tensor) -> torch.Tensor:
        if not self._is_batched:
            return value[:, 0].clone()
        return value.transpose(0, 1).clone(memory_format=torch.contiguous_format)


def _is_plain(env: GymEnv) -> bool:
    """Whether TorchRL does no more than to step this environment and to read what it shows."""
    observations = list(env.observation_spec.keys(True, True))
    return (
        isinstance(env._env, gymnasium.Env)
        and not env.batch_size
        and not env._is_batched
        and not env.info_dict_reader
        and env.wrapper_frame_skip == 1
        and env._convert_actions_to_numpy
        and not env.run_type_checks
        and env.__dict__.get("_compiled_step_and_maybe_reset") is None
        and not env.__dict__.get("_torchrl_native_autoreset", False)
        and env._post_step_mdp_hooks is None
        and list(env.full_action_spec.keys(True, True)) == ["action"]
        and (type(env.action_spec) in (OneHot, Categorical) or isinstance(env.action_spec, Bounded))
        and not getattr(env.action_spec, "use_register", False)
        and not list(env.full_state_spec.keys(True, True))
        and len(observations) == 1
        and isinstance(observations[0], str)
        and isinstance(env.observation_spec[observations[0]], (Bounded, Unbounded))
        and type(env._env.observation_space).__name__ == "Box"
        and list(env.reward_keys) == ["reward"]
        and tuple(env.reward_spec.shape) == (1,)
        and sorted(env.done_keys) == _FLAGS
        and env.device in (None, torch.device("cpu"))
    )
