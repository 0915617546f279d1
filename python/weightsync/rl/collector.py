"""A collector in the trainer's own thread."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from weightsync._source import tree
from weightsync.errors import WrongTypeError, WrongWeightsError
from weightsync.rl._base import BaseCollector, check_known, steps_of
from weightsync.rl._columns import Batch, Layout
from weightsync.rl._envs import Envs, SerialEnv, maker
from weightsync.rl._policy import Actor, make_policy, on_device
from weightsync.rl._rollout import Rollout


class Collector(BaseCollector):
    """Collects in the caller's thread, while the caller waits for the batch.

    A batch is shaped ``[T]``, or ``[P, T]`` with a batch of ``P`` environments; it has
    ``frames_per_batch`` frames.

    The policy is the caller's own: nothing has to be sent, and
    :meth:`update_policy_weights_` counts a version. Only where ``policy_device`` is another
    device than the policy's, the collector makes a copy, and the update writes into it.

    Args:
        create_env_fn: a Gymnasium id, a function that makes an environment, an environment, or a
            :class:`SerialEnv`.
        policy: what chooses actions; None: random actions. See :class:`Actor` for what it is
            called with and what it returns.
        frames_per_batch: frames in one batch.
        total_frames: where iteration ends; -1: never.
        policy_factory: makes the policy, in place of ``policy``.
        max_frames_per_traj: an episode is truncated after so many frames.
        init_random_frames: so many frames have random actions first, in whole batches.
        reset_at_each_iter: whether each batch begins new episodes.
        reset_when_done: whether a new episode begins where one ends. Without it the rest of the
            row is empty until the next batch, and ``("collector", "mask")`` says so.
        exploration_type: ``"random"``, ``"mode"``, ``"mean"`` or ``"deterministic"``.
        device: the policy's device, where ``policy_device`` is not given.
        storing_device: where batches are put.
        policy_device: the device of the policy and its input; None: where its weights are.
        split_trajs: whether batches are split by :func:`split_trajectories`.
        postproc: called with each batch; returns what is handed out.
        update_at_each_batch: whether each batch begins with :meth:`update_policy_weights_`.
        replay_buffer: an object with ``extend(batch)``; iteration then yields None.
        seed: of the first environment; the others follow.
        return_type: ``"torch"``, ``"numpy"`` or ``"tensordict"``; by default what the policy
            speaks, and tensors where torch is installed.
        progress: whether to show a line of progress; None: on a terminal.
    """

    def __init__(self, create_env_fn: Any, policy: Any = None, **settings: Any) -> None:
        if isinstance(create_env_fn, (list, tuple)):
            create_env_fn = SerialEnv(len(create_env_fn), create_env_fn)
        super().__init__(policy, **settings)
        self._envs = Envs.of(maker(create_env_fn))
        self._opened()
        factory = settings.get("policy_factory")
        acting = on_device(self.policy, self._policy_device)
        self._acting = make_policy(acting, factory, self._policy_device)
        self.policy = self._acting if policy is None else policy
        actor = Actor(
            self._acting, self._envs, self._explore, self._policy_device, own_process=False
        )
        # Apart from the collector, which nothing that it holds may hold: one that is dropped while
        # it runs in the background ends then.
        given = self._given = SimpleNamespace(version=0)
        self._rollout = Rollout(self._envs, actor, self._rules, lambda: given.version)
        self._steps = steps_of(self.frames_per_batch, self._envs.num_envs)
        if self._seed is not None:
            self._rollout.seed(self._seed)

    @property
    def version(self) -> int:
        """How often :meth:`update_policy_weights_` was called."""
        return int(self._given.version)

    def _collect(self) -> Batch:
        dims = (self._envs.num_envs, self._steps)
        layout = Layout(self._rollout.columns(), dims)
        columns = layout.views(np.empty(layout.size, np.uint8))
        random = self._random_steps(self._steps, self._frames)
        self._rollout.collect(columns, self._steps, random)
        if not self._envs.is_batched:
            return Batch.of({key: value[0] for key, value in columns.items()}, dims[1:])
        return Batch.of(columns, dims)

    def _update(self, weights: dict[str, Any], worker_ids: Any) -> None:
        check_known(weights, ["policy"])
        given = weights["policy"]
        if given is None:
            given = self.policy
        with self._alone():
            if given is not None and given is not self._acting:
                _copy_weights(given, self._acting)
            self._given.version += 1

    def set_seed(self, seed: int) -> int:
        with self._alone():
            self._rollout.seed(seed)
        return seed + self._envs.num_envs

    def reset(self) -> None:
        with self._alone():
            self._rollout.reset()

    @property
    def _next_trajectory(self) -> int:
        return self._rollout.next_id

    def _go_on_from(self, trajectory: int) -> None:
        self._rollout.go_on_from(trajectory)

    def _close(self) -> None:
        self._envs.close()


def _copy_weights(source: Any, target: Any) -> None:
    """Copies all weights into a policy, or none.

    Raises:
        WrongWeightsError: naming the tensors that do not fit.
    """
    if not hasattr(target, "state_dict"):
        raise WrongTypeError(
            f"the policy {target!r} has no weights to update: it is no torch module"
        )
    import torch

    own, came = (
        {name: value for name, value, _ in tree(_state(one))[0]} for one in (target, source)
    )
    wrong = [f"{name} is missing" for name in own if name not in came]
    wrong += [f"{name} is unknown" for name in came if name not in own]
    wrong += [
        f"{name} has shape {list(came[name].shape)}, expected {list(own[name].shape)}"
        for name in own
        if name in came and came[name].shape != own[name].shape
    ]
    if wrong:
        raise WrongWeightsError(f"these are not weights of the policy: {'; '.join(wrong[:5])}")
    with torch.no_grad():
        for name, value in came.items():
            own[name].copy_(torch.as_tensor(value))


def _state(weights: Any) -> Any:
    return weights.state_dict() if hasattr(weights, "state_dict") else weights
