"""The inner loop of every collector: ask the policy, step the environments, write the frames."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightsync.errors import CorruptError, SettingError
from weightsync.rl._columns import (
    ACTION,
    DONE,
    MASK,
    POLICY_VERSION,
    REWARD,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    Column,
    Key,
)
from weightsync.rl._envs import Envs, Runner
from weightsync.rl._policy import Actor


@dataclass(frozen=True)
class Rules:
    """How a rollout treats episodes.

    Attributes:
        max_frames_per_traj: an episode is truncated after so many frames; 0: never.
        reset_at_each_iter: whether each batch begins new episodes.
        reset_when_done: whether a new episode begins where one ends; without it the rest of the
            environment's row is empty, and the mask says so.
    """

    max_frames_per_traj: int = 0
    reset_at_each_iter: bool = False
    reset_when_done: bool = True


class Rollout:
    """Environments, a policy, and the episodes under way.

    Args:
        envs: the environments.
        actor: asks the policy.
        rules: how episodes are treated.
        version: returns the policy's version; called while the policy cannot change.
        frozen: a context in which the policy does not change.
        writing: a context in which a step is written; it raises if nobody wants the frames any more.
    """

    def __init__(
        self,
        envs: Envs,
        actor: Actor,
        rules: Rules,
        version: Callable[[], int],
        frozen: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        writing: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self._envs, self._actor, self._rules = envs, actor, rules
        self._version, self._frozen, self._writing = version, frozen, writing
        count = envs.num_envs
        self._lengths: np.ndarray = np.zeros(count, np.int64)
        self._ids: np.ndarray = np.zeros(count, np.int64)
        # TorchRL's collector has reset its environments once before the first of these batches.
        self._next_id = count if rules.reset_at_each_iter else 0
        self._active: np.ndarray = np.zeros(count, bool)
        self._begun = False
        self._seeds: list[int] | None = None

    def columns(self) -> list[Column]:
        """The columns of this rollout's frames."""
        envs = self._envs.columns
        columns = [*envs, *self._actor.columns]
        columns += [Column(("next", *one.key), one.dtype, one.shape) for one in envs]
        columns.append(Column(REWARD, "float32", ()))
        columns += [Column(key, "bool", ()) for key in (DONE, TERMINATED, TRUNCATED)]
        columns += [Column(key, "int64", ()) for key in (TRAJ_IDS, POLICY_VERSION)]
        if not self._rules.reset_when_done:
            columns.append(Column(MASK, "bool", ()))
        _check_names(columns)
        return columns

    def seed(self, seed: int) -> None:
        """The next reset of all environments takes these seeds, one after the other."""
        self._seeds = [seed + index for index in range(self._envs.num_envs)]
        self._actor.seed(seed)
        self._begun = False

    def reset(self) -> None:
        """The next batch begins new episodes."""
        self._begun = False

    @property
    def next_id(self) -> int:
        """The number of the next trajectory."""
        return self._next_id

    def go_on_from(self, next_id: int) -> None:
        """The next batch begins new episodes, whose trajectories have numbers from this one on."""
        self._next_id, self._begun = next_id, False

    def collect(self, out: dict[Key, np.ndarray], steps: int, random_steps: int) -> None:
        """Takes so many steps in each environment, the first of them with random actions.

        Args:
            out: arrays by column, ``[P, steps, *shape]``.

        Raises:
            CorruptError: naming a column that holds NaN, or an infinite action or reward.
        """
        envs, rules = self._envs, self._rules
        if rules.reset_at_each_iter or not self._begun:
            self._reset(np.ones(envs.num_envs, bool))
        elif not self._active.all():
            self._reset(~self._active)
        # Whatever ends this part midway, the next one begins new episodes.
        self._begun = False
        runner = envs.runner(self._actor, rules, out)
        t = 0
        while t < steps and self._active.any():
            is_random = t < random_steps
            taken = 0 if runner is None or is_random else self._run(runner, t, steps - t)
            if not taken:
                self._step(out, t, is_random)
                taken = 1
            t += taken
        if t < steps:
            with self._writing():
                self._leave_empty(out, t)
        with self._writing():
            if not rules.reset_when_done:
                self._blank(out)
            self._check_numbers(out)
        self._begun = True

    def _run(self, runner: Runner, t: int, steps: int) -> int:
        """Has a runner take some of these steps, and returns how many it took."""
        with self._frozen(), self._writing():
            version = self._version()
            taken, self._next_id = runner.run(
                version, t, steps, self._lengths, self._ids, self._next_id
            )
        return taken

    def _step(self, out: dict[Key, np.ndarray], t: int, is_random: bool) -> None:
        """Takes one step in each environment whose episode goes on."""
        envs, rules = self._envs, self._rules
        active = self._active.copy()
        if is_random:
            # Random actions are of no version.
            version = 0
            answer, action = self._actor.act_randomly()
        else:
            with self._frozen():
                version = self._version()
                answer, action = self._actor.act()
        envs.step(action, active)
        self._lengths += 1
        if rules.max_frames_per_traj:
            envs.truncated |= self._lengths >= rules.max_frames_per_traj
        done = envs.terminated | envs.truncated
        with self._writing():
            out[POLICY_VERSION][:, t] = version
            self._write(out, t, answer, done)
            if not rules.reset_when_done:
                out[MASK][:, t] = active
        for key, value in envs.following.items():
            np.copyto(envs.observations[key], value)
        if not rules.reset_when_done:
            self._active = active & ~done
        elif done.any():
            self._reset(done)

    def _write(
        self, out: dict[Key, np.ndarray], t: int, answer: dict[Key, Any], done: np.ndarray
    ) -> None:
        """Writes one step of all environments."""
        envs = self._envs
        for column in self._actor.columns:
            if column.key not in answer:
                # Random actions: what else the policy returns is zero.
                out[column.key][:, t] = 0
        for key, value in answer.items():
            self._check_shape(key, value, out[key])
            out[key][:, t] = value
        for key, value in envs.observations.items():
            out[key][:, t] = value
        for key, value in envs.following.items():
            out["next", *key][:, t] = value
        out[REWARD][:, t] = envs.rewards
        out[TERMINATED][:, t] = envs.terminated
        out[TRUNCATED][:, t] = envs.truncated
        out[DONE][:, t] = done
        out[TRAJ_IDS][:, t] = self._ids

    def _reset(self, which: np.ndarray) -> None:
        seeds, self._seeds = (self._seeds, None) if which.all() else (None, self._seeds)
        self._envs.reset(which, seeds)
        count = int(which.sum())
        self._ids[which] = np.arange(self._next_id, self._next_id + count)
        self._next_id += count
        self._lengths[which] = 0
        self._active = self._active | which

    def _leave_empty(self, out: dict[Key, np.ndarray], t: int) -> None:
        """Marks the steps from ``t`` on as empty. They belong to the trajectory before them."""
        out[MASK][:, t:] = False
        out[TRAJ_IDS][:, t:] = self._ids[:, None]
        out[POLICY_VERSION][:, t:] = out[POLICY_VERSION][:, t - 1 : t]

    def _blank(self, out: dict[Key, np.ndarray]) -> None:
        """Zeroes what frames that are none show."""
        empty = ~out[MASK]
        for key, array in out.items():
            if key not in (MASK, TRAJ_IDS, POLICY_VERSION):
                array[empty] = 0

    def _check_shape(self, key: Key, value: Any, into: np.ndarray) -> None:
        """Refuses an answer that numpy would stretch to the shape that it had before."""
        expected = (len(into), *into.shape[2:])
        if np.shape(value) != expected:
            raise CorruptError(
                f"the policy returned {'.'.join(key)} of shape {list(np.shape(value))}, and of "
                f"{list(expected)} before: give every step the same shape"
            )

    def _check_numbers(self, out: dict[Key, np.ndarray]) -> None:
        """Refuses NaN, and infinite actions and rewards: a policy that learns from them is lost.

        An observation may be infinite, as its space may be, and so may what else a policy returns.
        """
        # What a step led to before what the next one saw, which is the same NaN, and what the policy
        # saw before what it did.
        seen = {one.key for one in self._envs.columns}
        for key in sorted(out, key=lambda one: (one[0] != "next", one not in seen)):
            array = out[key]
            if array.dtype.kind not in "fc":
                continue
            wrong = ~np.isfinite(array) if key in (ACTION, REWARD) else np.isnan(array)
            if wrong.any():
                index = tuple(int(one) for one in np.argwhere(wrong)[0])
                what = "NaN" if np.isnan(array[index]) else str(array[index])
                raise CorruptError(
                    f"{'.'.join(key)} is {what} in environment {index[0]} at step {index[1]} of "
                    "the batch: check what the environment and the policy return"
                )


def _check_names(columns: list[Column]) -> None:
    """Refuses observations that would hide another column."""
    keys: set[Key] = set()
    for one in columns:
        for other in keys:
            shorter = min(len(one.key), len(other))
            if one.key[:shorter] == other[:shorter]:
                raise SettingError(
                    f"two columns would have one name: {'.'.join(other)} and {'.'.join(one.key)}; "
                    "rename the entry of the observation space, or what the policy returns"
                )
        keys.add(one.key)
