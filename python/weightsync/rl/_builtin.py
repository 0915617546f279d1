"""Environments that Rust steps, and the policies that it runs in them without Python between steps."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from weightsync._native import BuiltinEnvs
from weightsync.errors import WrongTypeError
from weightsync.rl._columns import (
    ACTION,
    DONE,
    OBSERVATION,
    POLICY_VERSION,
    REWARD,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    Column,
    Key,
)
from weightsync.rl._envs import Envs, Runner
from weightsync.rl._policy import HAS_TORCH, LOG_PROB, Actor

if TYPE_CHECKING:
    from weightsync._native import _Part
    from weightsync.rl._mlp import Network
    from weightsync.rl._rollout import Rules

#: New weights wait for a run to end, so it takes about so many nanoseconds.
_RUN = 1e6

#: What a frame takes in addition to its policy's multiplications, and what one of these takes.
_FRAME, _MULTIPLICATION = 200.0, 0.25


class BuiltinEnv:
    """A task that Rust steps, with Gymnasium's spaces and dynamics.

    Any policy collects from it. Where the policy is :class:`MLP` or :class:`GaussianMLP`, or a
    ``torch.nn.Sequential`` of ``Linear`` and ``Tanh`` as they are, Rust runs the policy too.

    Args:
        id: ``"CartPole-v1"``, ``"MountainCar-v0"``, ``"Acrobot-v1"`` or ``"Pendulum-v1"``.
        num_envs: how many, ``P``; None: one, without a dimension of its own in batches.

    Raises:
        SettingError: if there is no such task.
    """

    def __init__(self, id: str, num_envs: int | None = None) -> None:
        self.id, self.num_envs = id, num_envs
        # Refuses what cannot be here, and not in a worker.
        self._made()

    def _made(self) -> BuiltinEnvs:
        count = 1 if self.num_envs is None else self.num_envs
        return BuiltinEnvs(self.id, count, int.from_bytes(os.urandom(8), "little"))

    def __call__(self) -> Envs:
        return _Builtin(self, self._made())

    def __repr__(self) -> str:
        return f"BuiltinEnv({self.id!r}, {self.num_envs})"


class _Builtin(Envs):
    """Environments of a built-in task."""

    def __init__(self, env: BuiltinEnv, native: BuiltinEnvs) -> None:
        from gymnasium.spaces import Box, Discrete

        self.made, self._native = env, native
        self._quantities, self._actions, bounds = native.sizes
        self._is_discrete = bounds is None
        seen = Box(-np.inf, np.inf, (self._quantities,), np.float32)
        if bounds is None:
            taken: Any = Discrete(self._actions)
        else:
            taken = Box(bounds[0], bounds[1], (self._actions,), np.float32)
        super().__init__(len(native), env.num_envs is not None, seen, taken)
        self._shown = _address(self.observations[OBSERVATION])
        self._room = (
            _address(self.following[OBSERVATION]),
            _address(self.rewards),
            _address(self.terminated),
            _address(self.truncated),
        )

    def reset(self, which: np.ndarray, seeds: list[int] | None = None) -> None:
        envs = [
            (index, None if seeds is None else seeds[index] % 2**64)
            for index in np.flatnonzero(which).tolist()
        ]
        self._native.reset(envs, self._shown)

    def step(self, actions: Any, which: np.ndarray) -> None:
        space = self.action_space
        given = np.ascontiguousarray(actions, space.dtype)
        if given.shape != (self.num_envs, *space.shape):
            raise WrongTypeError(
                f"{self.made!r} takes actions of shape {[self.num_envs, *space.shape]}, got "
                f"{list(given.shape)}"
            )
        self._native.step(which.tolist(), _address(given), self._room)

    def close(self) -> None:
        """There is nothing to close."""

    def __repr__(self) -> str:
        return repr(self.made)

    def check_policy(self, policy: Any) -> None:
        network = _network(policy)
        if network is None:
            return
        for what, got, expected in (
            ("takes observations", network.inputs, self._quantities),
            ("gives actions", network.outputs, self._actions),
        ):
            if got != expected:
                # A Sequential takes no sizes.
                kind = "GaussianMLP" if network.has_deviations else "MLP"
                raise WrongTypeError(
                    f"the policy {what} of size {got}, and {self.made.id} has {expected}: make it as "
                    f"rl.{kind}({self._quantities}, {self._actions})"
                )

    def runner(self, actor: Actor, rules: Rules, out: dict[Key, np.ndarray]) -> Runner | None:
        network = _network(actor.policy)
        if network is None or not rules.reset_when_done:
            return None
        # Where actions are quantities, those of a network without deviations are not drawn.
        is_drawn = network.has_deviations or self._is_discrete
        action = Column(ACTION, self.action_space.dtype.name, tuple(self.action_space.shape))
        drawn = [action, Column(LOG_PROB, "float32", ())] if is_drawn else [action]
        if actor.columns != drawn:
            return None
        part: _Part = {
            "is_greedy": actor.explore != "random" or not is_drawn,
            "longest": min(rules.max_frames_per_traj, 2**32 - 1),
            "columns": [_place(out.get(key)) for key in _ORDER],
            "observations": self._shown,
        }
        return _Run(self._native, network, part)


#: The columns in the order in which Rust writes them.
_ORDER: list[Key] = [
    OBSERVATION,
    ACTION,
    LOG_PROB,
    ("next", *OBSERVATION),
    REWARD,
    TERMINATED,
    TRUNCATED,
    DONE,
    TRAJ_IDS,
    POLICY_VERSION,
]


class _Run(Runner):
    """Has Rust collect one part of a batch, in short runs."""

    def __init__(self, native: BuiltinEnvs, network: Network, part: _Part) -> None:
        self._native, self._network, self._part = native, network, part
        frame = _FRAME + _MULTIPLICATION * network.multiplications()
        self._longest = max(1, int(_RUN / frame / len(native)))
        # Rust has no policy over quantities without deviations. These are not drawn from.
        self._zeros: np.ndarray = np.zeros(network.outputs, np.float32)
        zeros = ("actor.log_std", _address(self._zeros), len(self._zeros))
        self._more = [] if network.has_deviations else [zeros]

    def run(
        self, version: int, at: int, steps: int, lengths: np.ndarray, ids: np.ndarray, next_id: int
    ) -> tuple[int, int]:
        places = self._network.places()
        if places is None:
            return 0, next_id
        steps = min(steps, self._longest)
        episodes = (lengths.tolist(), ids.tolist(), next_id)
        lengths[:], ids[:], next_id = self._native.run(
            self._part, places + self._more, (at, steps), version, episodes
        )
        return steps, next_id


def _network(policy: Any) -> Network | None:
    if not HAS_TORCH:
        return None
    from weightsync.rl._mlp import Network

    return Network.of(policy)


def _place(array: np.ndarray | None) -> tuple[int, int] | None:
    """Where a column begins, and how many bytes further on the next environment's frames do."""
    return None if array is None else (_address(array), array.strides[0])


def _address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
