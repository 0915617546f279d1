"""The inner loop for environments of TorchRL: each step is a TensorDict.

A collector of this process has one of these rollouts, and so has each worker. Environments,
policies and their helpers are TorchRL's as they are.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from tensordict.nn import CudaGraphModule
from torch import nn
from torchrl.envs import EnvBase, StepCounter, TransformedEnv
from torchrl.envs.batched_envs import BatchedEnvBase
from torchrl.envs.llm.transforms import PolicyVersion
from torchrl.envs.utils import ExplorationType, _make_compatible_policy, set_exploration_type
from torchrl.modules import RandomPolicy, set_exploration_modules_spec_from_env
from torchrl.modules.utils.utils import (
    _compute_missing_env_transforms,
    _maybe_append_env_transforms_from_module,
)

from weightsync.errors import SettingError, WrongTypeError
from weightsync.rl._columns import POLICY_VERSION, TRAJ_IDS, Column, Key, parts_of
from weightsync.rl._direct import direct_call
from weightsync.rl._form import Form
from weightsync.rl._gym_steps import GymSteps
from weightsync.rl._policy import exploring, on_device, same_randomness
from weightsync.rl._terms import Named, SettingRuntimeError, Terms


class TensorDictRollout(Named):
    """An environment of TorchRL, a policy, and the episodes under way.

    Args:
        env: the environment.
        policy: what chooses actions; None: random actions.
        factory: makes the policy, in place of ``policy``.
        terms: how frames are collected.
        version: returns the policy's version; called while the policy cannot change.
        frozen: a context in which the policy does not change.
        writing: a context in which frames are written; it raises if nobody wants them any more.
        worker_idx: the worker's number.
        stopped: whether the rollout is to end after the step under way.
        is_stored: whether frames go into a replay buffer of this process.
        is_thread: whether the rollout is that of a worker thread, which shares the process with its
            trainer.
    """

    def __init__(
        self,
        env: EnvBase,
        policy: Any,
        factory: Callable[[], Any] | None,
        terms: Terms,
        version: Callable[[], int] = lambda: 0,
        frozen: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        writing: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        worker_idx: int | None = None,
        stopped: Callable[[], bool] | None = None,
        is_stored: bool = False,
        is_thread: bool = False,
    ) -> None:
        self._terms, self.worker_idx = terms, worker_idx
        self._current_version, self._frozen, self._writing = version, frozen, writing
        # Of the guards of a background receiver, once there is one.
        self._hold = lambda: getattr(frozen(), "_hold", None)
        self._stopped, self._is_thread = stopped, is_thread
        if is_thread:
            self._frozen = lambda: _both(frozen(), exploring(terms.exploration_type))
        self.pre_collect_hook, self.post_collect_hook = terms.pre_collect_hook, terms.post_collect_hook
        policy = self._chosen(env, policy, factory)
        self._set_devices(terms)
        env = self._with_version(env)
        self.env = self._with_transforms(env, policy)
        self.batch = tuple(self.env.batch_size)
        self.num_envs = self.env.batch_size.numel()
        self.steps = -(-terms.frames_per_batch // self.num_envs)
        for one in (policy, self.env):
            if hasattr(one, "register_collector"):
                one.register_collector(self)
        self._set_policy(policy)
        self._set_env()
        self._drop = _repeated(self.env) if terms.compact_obs else ()
        self.use_buffers = terms.use_buffers
        if self.use_buffers is None:
            self.use_buffers = not self.env._has_dynamic_specs and not is_stored
        self._truncated = _truncated_keys(self.env) if terms.set_truncated else []
        self._ids = np.zeros(self.num_envs, np.int64)
        self._next_id = 0
        #: Whether a batch has begun and not ended: its last step may be half done.
        self._is_midway = False
        with torch.no_grad():
            self._carrier = self.env.reset()
            self._begin()
            self._template = self._make_template()
        self._same: TensorDictBase | None = None
        self._gym = self._find_gym()
        self.frames, self.batches = 0, 0
        #: The version that :meth:`_note` has seen last.
        self._seen = 0

    # What it is made of.

    def _chosen(self, env: EnvBase, policy: Any, factory: Callable[[], Any] | None) -> Any:
        if policy is None:
            policy = RandomPolicy(env.full_action_spec) if factory is None else factory()
        if isinstance(policy, RandomPolicy) and policy.action_spec is None:
            policy.set_action_spec_from_env(env)
        trust = self._terms.trust_policy
        self._trusts = isinstance(policy, (RandomPolicy, CudaGraphModule)) if trust is None else trust
        return policy

    def _set_devices(self, terms: Terms) -> None:
        def device(*given: Any) -> torch.device | None:
            for one in given:
                if one is not None:
                    found = torch.device(one)
                    if found.type == "cuda" and found.index is None:
                        found = torch.device("cuda", torch.cuda.current_device())
                    return found
            return None

        self.policy_device = device(terms.policy_device, terms.device)
        self.env_device = device(terms.env_device, terms.device)
        self.storing_device = device(terms.storing_device, terms.device)
        if self.storing_device is None and self.policy_device == self.env_device:
            self.storing_device = self.env_device

    def _with_version(self, env: EnvBase) -> EnvBase:
        wanted = self._terms.track_policy_version
        self.policy_version_tracker: Any = None
        if wanted is True:
            if isinstance(env, BatchedEnvBase):
                raise SettingRuntimeError(
                    "track_policy_version: a batched environment gets no transform of its own: append "
                    "PolicyVersion to the environment, and give that transform"
                )
            wanted = PolicyVersion()
        if hasattr(wanted, "increment_version"):
            self.policy_version_tracker = wanted
            env = env.append_transform(wanted)
        return env

    def _with_transforms(self, env: EnvBase, policy: Any) -> EnvBase:
        wanted = self._terms.auto_register_policy_transforms
        if wanted:
            return _maybe_append_env_transforms_from_module(env, policy)
        if wanted is None and (missing := _compute_missing_env_transforms(env, policy)):
            import warnings

            names = ", ".join(type(one).__name__ for one in missing)
            warnings.warn(
                f"the environment has not the transforms that the policy needs ({names}): give "
                "auto_register_policy_transforms=True to append them, or False to leave it so",
                FutureWarning,
                stacklevel=2,
            )
        return env

    def _set_policy(self, policy: Any) -> None:
        """Puts the policy on its device, and has it take TensorDicts."""
        if isinstance(policy, nn.Module):
            policy = on_device(policy, self.policy_device)
        self.policy = policy
        if self._trusts:
            wrapped = policy
        else:
            spec = getattr(self.env, "observation_spec", None)
            try:
                wrapped = _make_compatible_policy(policy=policy, observation_spec=spec, env=self.env)
            except (TypeError, AttributeError, ValueError) as error:
                raise WrongTypeError(
                    f"the policy {policy!r} cannot be called with what the environment shows ({error}): "
                    "give a TensorDictModule, or trust_policy=True for one that takes TensorDicts"
                ) from error
        if isinstance(policy, nn.Module):
            set_exploration_modules_spec_from_env(policy, self.env)
        self._uncompiled = wrapped
        self._is_compiled = self._terms.compile_policy not in (None, False)
        self._is_graph = self._terms.cudagraph_policy not in (None, False)
        self._act_on = self._compiled(wrapped)

    def _compiled(self, policy: Any) -> Any:
        def settings(given: Any) -> dict[str, Any]:
            return dict(given) if isinstance(given, Mapping) else {}

        if self._is_compiled:
            from torchrl import compile_with_warmup

            policy = compile_with_warmup(policy, **settings(self._terms.compile_policy))
        if self._is_graph:
            policy = CudaGraphModule(
                policy,
                in_keys=[],
                out_keys=[],
                device=self.policy_device,
                **settings(self._terms.cudagraph_policy),
            )
        return policy

    def _set_env(self) -> None:
        if self.env_device is not None:
            self.env = self.env.to(self.env_device)
        elif self.env.device is not None:
            self.env_device = self.env.device
        given = self._terms
        policy_device, env_device = self.policy_device, self.env_device
        self._to_policy = policy_device is not None and policy_device != env_device
        self._to_env = self.env_device is not None and (
            policy_device != env_device or self.env.device != self.storing_device
        )
        self._has_no_device = policy_device != env_device or env_device is None
        longest = given.max_frames_per_traj
        if longest > 0:
            for key in self.env.output_spec.keys(True, True):
                if "step_count" in ((key,) if isinstance(key, str) else key):
                    raise SettingError(
                        "max_frames_per_traj: the environment counts its steps already, in "
                        f"{key!r}: leave out one of the two limits"
                    )
            self.env = TransformedEnv(self.env, StepCounter(max_steps=longest))
        self._done_keys = list(dict.fromkeys(_last(key, "done") for key in self.env.done_keys))

    def _make_template(self) -> TensorDictBase | None:
        """What a frame of each environment looks like, and which keys are the policy's."""
        template = None
        if self.use_buffers:
            template = self.env.fake_tensordict()
            if self._drop:
                template = template.exclude(*self._drop)
        self._policy_keys = self._find_policy_keys(template)
        if template is None:
            return None
        if self.storing_device is not None:
            template = template.to(self.storing_device)
        else:
            template.clear_device_()
        return template

    def _find_policy_keys(self, template: TensorDictBase | None) -> list[Any]:
        policy = self._act_on
        out_keys = list(getattr(self._uncompiled, "out_keys", None) or ())
        spec = getattr(self._uncompiled, "spec", None)
        known: list[Any] = []
        if template is None and out_keys:
            return out_keys
        if template is not None and spec is not None:
            if all(one is not None for one in spec.values(True, True)):
                if spec.ndim < template.ndim:
                    spec = spec.expand(template.shape)
                for key, one in spec.items(True, True):
                    known.append(key)
                    if key not in template.keys(True):
                        template.set(key, one.zero())
                if all(key in known for key in out_keys):
                    return known
        given = self._carrier.copy()
        if self.policy_device is not None:
            given = given.to(self.policy_device)
        before, copied = given.clone(), given.copy()
        with same_randomness(self.policy_device):
            answer = policy(given)
        found = [key for key in answer.keys(True, True) if _is_new(key, answer, copied, before)]
        if template is not None:
            template.update(self._carrier.exclude(*self._drop) if self._drop else self._carrier)
            template.update(answer.select(*found))
        return list(dict.fromkeys([*known, *found]))

    def _find_gym(self) -> GymSteps | None:
        """Plain environments of Gymnasium, where the policy needs nothing but what they show."""
        terms = self._terms
        in_keys = getattr(self._uncompiled, "in_keys", None)
        if isinstance(self._uncompiled, RandomPolicy):
            in_keys = []
        if self._template is None or terms.return_same_td or self._drop or in_keys is None:
            return None
        if self._to_policy or self._is_compiled or self._is_graph:
            return None
        if self.storing_device not in (None, torch.device("cpu")):
            return None
        gym = GymSteps.of(self.env)
        if gym is None or not set(in_keys) <= gym.shown or "action" not in self._policy_keys:
            return None
        outputs = {parts_of(key)[0] for key in self._policy_keys}
        return None if outputs & {"next", "collector", *gym.shown} else gym

    # Collecting.

    @torch.no_grad()
    def collect(self, is_random: Callable[[], bool] = lambda: False) -> Iterator[TensorDictBase]:
        """Takes the steps of a batch, and yields the TensorDict of each."""
        self._before()
        with self._exploring():
            for _ in range(self.steps):
                self._rows.append(self._ids.copy())
                yield self._step(is_random())
                if self._stopped is not None and self._stopped():
                    break
        self._is_midway = False

    def _exploring(self) -> contextlib.AbstractContextManager[Any]:
        """Also environments may ask how to explore. In a thread only the policy can."""
        if self._is_thread:
            return contextlib.nullcontext()
        explored: contextlib.AbstractContextManager[Any] = set_exploration_type(
            ExplorationType[self._terms.exploration_type.upper()]
        )
        return explored

    def _step(self, is_random: bool) -> TensorDictBase:
        """Takes a step in each environment, and begins other episodes where one ends."""
        carrier = self._carrier
        if is_random:
            self.env.rand_action(carrier)
            # Random actions are of no version.
            self._versions.append(0)
        else:
            self._act(carrier)
        given = carrier
        if self._to_env:
            given = carrier.to(self.env_device, non_blocking=self._non_blocking(self.env_device))
            self._sync(self.env_device)
        stepped, following = self.env.step_and_maybe_reset(given)
        led_to = stepped.get("next")
        if carrier is not stepped:
            if self._has_no_device:
                led_to.clear_device_()
            carrier.set("next", led_to)
        self.frames += self.num_envs
        if self._has_no_device:
            following.clear_device_()
        self._carrier = following
        self._number(led_to)
        kept = carrier.exclude(*self._drop) if self._drop else carrier
        if self.storing_device is not None:
            kept = kept.to(self.storing_device, non_blocking=self._non_blocking(self.storing_device))
            self._sync(self.storing_device)
        return kept

    def _act(self, carrier: TensorDictBase) -> None:
        given = carrier
        if self._to_policy:
            given = carrier.to(
                self.policy_device, non_blocking=self._non_blocking(self.policy_device)
            )
            self._sync(self.policy_device)
        with self._frozen():
            self._note(self._current_version())
            answer = self._act_on(given)
        if self._is_compiled or self._is_graph:
            # The next call writes into the same memory.
            answer = answer.select(*self._policy_keys, strict=False).clone()
        if answer is not carrier:
            carrier.update(answer, keys_to_update=self._policy_keys)

    def _note(self, version: int) -> None:
        self._versions.append(version)
        self._see(version)

    def _see(self, version: int) -> None:
        if version != self._seen:
            self.updated(version - self._seen)
            self._seen = version

    def updated(self, times: int = 1) -> None:
        """Takes note that the policy's weights were updated."""
        tracker = self.policy_version_tracker
        if tracker is None or times < 1:
            return
        if isinstance(tracker.version, int):
            tracker.version += times
        else:
            tracker.increment_version()

    def joined(self, version: int, updates: int) -> None:
        """Takes note of the first weights that came, after so many updates."""
        self._seen = version
        self.updated(updates)

    def _number(self, led_to: TensorDictBase) -> None:
        """Gives the trajectories that begin now their numbers."""
        ended: Any = None
        for key in self._done_keys:
            done = led_to.get(key)
            if done.ndim > len(self.batch):
                done = done.flatten(len(self.batch)).any(-1)
            ended = done if ended is None else ended | done
        if ended is not None and bool(ended.any()):
            self._renumber(ended.reshape(-1).cpu().numpy())

    def _begin(self) -> None:
        if self._has_no_device:
            self._carrier.clear_device_()
        self._renumber(np.ones(self.num_envs, bool))

    def _renumber(self, which: np.ndarray) -> None:
        count = int(which.sum())
        self._ids[which] = np.arange(self._next_id, self._next_id + count)
        self._next_id += count

    def _non_blocking(self, device: torch.device | None) -> bool:
        return not self._terms.no_cuda_sync or (device is not None and device.type == "cuda")

    def _sync(self, device: torch.device | None) -> None:
        if self._terms.no_cuda_sync or device is None or device.type == "cuda":
            return
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    @property
    def rows(self) -> np.ndarray:
        """The numbers of the trajectories of the steps that were taken last, ``[P, steps]``."""
        rows: np.ndarray = np.stack(self._rows, -1)
        return rows

    @torch.no_grad()
    def whole(self, is_random: Callable[[], bool] = lambda: False) -> tuple[TensorDictBase, int]:
        """A batch, in memory of its own, and how many steps it has; the rest of it is empty."""
        if self._gym is None:
            frames = list(self.collect(is_random))
            return self.batch_of(frames), len(frames)
        self._before()
        gym, device = self._gym, self._carrier.device
        gym.begin(self.steps, self._carrier)
        outputs: list[dict[Any, torch.Tensor]] = []
        with self._exploring():
            # Once a batch: hooks may come, and modules may be exchanged.
            call = direct_call(self._uncompiled, self._hold())
            for step in range(self.steps):
                self._rows.append(self._ids.copy())
                shown: Any = gym.shows(step)
                if is_random():
                    shown = TensorDict(shown, batch_size=self.batch, device=device)
                    answer: Any = self.env.rand_action(shown)
                    # Random actions are of no version.
                    self._versions.append(0)
                else:
                    if call is None:
                        shown = TensorDict(shown, batch_size=self.batch, device=device)
                    with self._frozen():
                        self._note(self._current_version())
                        answer = (call or self._act_on)(shown)
                outputs.append({key: answer.get(key, None) for key in self._policy_keys})
                ended = gym.step(step, outputs[-1]["action"])
                self.frames += self.num_envs
                if ended is not None:
                    self._renumber(ended)
                if self._stopped is not None and self._stopped():
                    break
        taken = len(outputs)
        for key, value in gym.shows(taken).items():
            self._carrier.set(key, value.clone())
        self._is_midway = False
        columns = gym.columns(taken)
        for key in self._policy_keys:
            values = [one[key] for one in outputs]
            known = next((one for one in values if one is not None), None)
            if known is not None:
                # Random actions: what else the policy returns is zero.
                values = [torch.zeros_like(known) if one is None else one for one in values]
                columns[key] = torch.stack(values, len(self.batch))
        result = self._room()
        part = result if taken == self.steps else result[..., :taken]
        for key, value in columns.items():
            if part is result:
                result.set(key, value)
            else:
                part.get(key).copy_(value)
        return self._finish(result, taken), taken

    def _before(self) -> None:
        """What comes before the first step of a batch."""
        if self.pre_collect_hook is not None:
            self.pre_collect_hook()
        if self._is_midway:
            self.reset()
        elif self._terms.reset_at_each_iter:
            self._carrier.update(self.env.reset())
            self._begin()
        self._is_midway = True
        self.batches += 1
        self._rows: list[np.ndarray] = []
        self._versions: list[int] = []

    @property
    def versions(self) -> np.ndarray:
        """The versions of the weights that chose the actions of the steps that were taken last."""
        return np.array(self._versions, np.int64)

    def numbered(self, frame: TensorDictBase) -> TensorDictBase:
        """The frame that was yielded last, with the numbers of its trajectories."""
        if self._terms.track_traj_ids:
            ids = torch.from_numpy(self._rows[-1].reshape(self.batch)).to(self.storing_device)
            frame.set(TRAJ_IDS, ids)
        return frame

    # What a batch is made into.

    def fake(self) -> TensorDictBase:
        """A batch of zeros."""
        if self._template is None:
            self.use_buffers, self._template = True, None
            self._template = self._make_template()
        room = torch.zeros_like(self._template.unsqueeze(-1).expand(*self.batch, self.steps))
        if self._terms.track_traj_ids:
            room.set(TRAJ_IDS, torch.zeros(room.shape, dtype=torch.int64, device=self.storing_device))
        room.refine_names(..., "time")
        return self._cut(room)

    def batch_of(self, frames: list[TensorDictBase], is_lazy: bool = False) -> TensorDictBase:
        """A batch of these steps, in memory of its own."""
        dim = len(self.batch)
        if is_lazy:
            result: Any = LazyStackedTensorDict.lazy_stack(frames, dim=-1)
        elif self.use_buffers:
            result = self._room()
            self._stack(frames, result)
        else:
            result = TensorDict.maybe_dense_stack(frames, dim=-1)
        return self._finish(result, len(frames), is_lazy)

    def _finish(self, result: TensorDictBase, taken: int, is_lazy: bool = False) -> TensorDictBase:
        """The batch with the numbers of its trajectories."""
        if self._terms.track_traj_ids:
            ids = torch.from_numpy(self.rows.reshape(*self.batch, taken)).to(self.storing_device)
            if taken < result.shape[-1]:
                rest = torch.full((*self.batch, result.shape[-1] - taken), -1, device=ids.device)
                ids = torch.cat([ids, rest], -1)
            result.set(TRAJ_IDS, ids)
        if not is_lazy:
            result.refine_names(..., "time")
        return self._cut(result)

    def _stack(self, frames: Sequence[TensorDictBase], into: TensorDictBase) -> None:
        """Puts these frames one after the other."""
        missing = [key for key in self._policy_keys if not _tensors(frames[0], key)]
        if missing:
            # Random actions: what else the policy returns is zero, and not what was there before.
            into.select(*missing, strict=False).zero_()
        # A part of it would be without texts.
        whole = len(frames) == self.steps
        torch.stack(frames, len(self.batch), out=into if whole else into[..., : len(frames)])

    def _room(self) -> TensorDictBase:
        """Where a batch is put together."""
        assert self._template is not None
        if self._same is not None:
            return self._same
        room = self._template.unsqueeze(-1).expand(*self.batch, self.steps)
        room = torch.zeros_like(room)
        if self._terms.return_same_td:
            self._same = room
        return room

    def _cut(self, result: TensorDictBase) -> TensorDictBase:
        """Marks the last step of a batch as truncated, where that is asked for."""
        last = (*[slice(None)] * len(self.batch), -1)
        for key in self._truncated:
            done_key = _last(key, "done")
            for one in (key, done_key):
                flags = result.get(("next", *parts_of(one)))
                flags[last] = True
                result.set(("next", *parts_of(one)), flags)
        return result

    def form(self) -> tuple[Form, list[Column]]:
        """The form of this rollout's frames in shared memory, and the columns."""
        template = self._template
        is_dynamic = template is None or _has_words(template)
        template = TensorDict(batch_size=self.batch) if template is None else template
        form = Form.of(template, self.batch, is_dynamic, self._terms.track_traj_ids)
        if any(device is not None for _, device in form[0].leaves.values()):
            # The trainer moves batches to their device. On the way they lie in this host's memory.
            self.storing_device = torch.device("cpu")
        return form

    @torch.no_grad()
    def write(self, form: Form, out: Mapping[Key, np.ndarray], is_random: bool) -> tuple[int, Any]:
        """Collects a batch into columns shaped ``[P, steps, *shape]``.

        Returns:
            How many steps were taken, and the TensorDict itself where its form is dynamic.
        """
        batch: Any = None
        frames: list[TensorDictBase] = []
        if self._gym is not None:
            batch, taken = self.whole(lambda: is_random)
        else:
            frames = list(self.collect(lambda: is_random))
            taken = len(frames)
        with self._writing():
            out[TRAJ_IDS][:, taken:] = -1
            out[TRAJ_IDS][:, :taken] = self.rows
            out[POLICY_VERSION][:, taken:] = self._versions[-1]
            out[POLICY_VERSION][:, :taken] = self._versions
            whole = form.on_host().tensordict(out, (*self.batch, self.steps))
            if form.is_dynamic:
                result = self.batch_of(frames)
                public = [key for key in result.keys() if not key.startswith("_")]
                result = result.select(*public)
            elif batch is not None:
                result = whole
                result.update_(batch.exclude(TRAJ_IDS))
            else:
                result = whole
                self._stack(frames, whole)
                if taken < self.steps:
                    whole.exclude("collector")[..., taken:].zero_()
                self._cut(result)
            if self.post_collect_hook is not None:
                self.post_collect_hook(result)
        return taken, result if form.is_dynamic else None

    # What a user may ask in between.

    @property
    def frames_per_batch(self) -> int:
        """The steps of a batch."""
        return self.steps

    @property
    def requested_frames_per_batch(self) -> int:
        return self.steps * self.num_envs

    @property
    def policy_version(self) -> int | str | None:
        """The version that ``track_policy_version`` counts; None without it."""
        if self.policy_version_tracker is not None:
            self._see(self._current_version())
        return getattr(self.policy_version_tracker, "version", None)

    @property
    def next_id(self) -> int:
        """The number of the next trajectory."""
        return self._next_id

    def go_on_from(self, next_id: int) -> None:
        """Gives the trajectories under way, and those after them, numbers from this one on."""
        self._next_id = next_id
        self._renumber(np.ones(self.num_envs, bool))

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seeds the environment; returns the seed of the next one."""
        following: int = self.env.set_seed(seed, static_seed=static_seed)
        return following

    def seed(self, seed: int, static_seed: bool) -> int:
        """Seeds the environment and the worker's own draws, and begins new episodes; returns the seed of
        the next worker.
        """
        following = self.set_seed(seed, static_seed)
        if not self._is_thread:
            torch.manual_seed(seed)
            np.random.seed(seed % 2**32)
        self.reset()
        return following

    @torch.no_grad()
    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Begins new episodes, in all environments or in these."""
        which = np.ones(self.num_envs, bool)
        if index is not None:
            if not self.batch:
                raise SettingError("reset: there is one environment, and it takes no index")
            chosen = torch.zeros(self.batch, dtype=torch.bool, device="cpu")
            chosen[index] = True
            which = chosen.reshape(-1).numpy()
            for key, dones in zip(self.env.reset_keys, self.env.done_keys_groups, strict=True):
                shape = self.env.full_done_spec[dones[0]].shape
                flags = torch.zeros(shape, dtype=torch.bool, device=self.env.device)
                flags[index] = True
                self._carrier.set(key, flags)
            fresh = self.env.reset(self._carrier, **kwargs)
        else:
            fresh = self.env.reset(**kwargs)
            self._is_midway = False
        self._carrier = fresh
        if self._has_no_device:
            self._carrier.clear_device_()
        self._renumber(which)

    def getattr_policy(self, attr: str) -> Any:
        """An attribute of the policy."""
        return getattr(self.policy, attr)

    def getattr_env(self, attr: str) -> Any:
        """An attribute of the environment."""
        return getattr(self.env, attr)

    def stats(self) -> dict[str, Any]:
        """How far this rollout is."""
        stats: dict[str, Any] = {
            "frames": self.frames,
            "batches": self.batches,
            "requested_frames_per_batch": self.requested_frames_per_batch,
        }
        if isinstance(self.policy_version, int):
            stats["policy_version"] = self.policy_version
        return stats

    def state_dict(self) -> OrderedDict[str, Any]:
        """The state of the policy and of the environment's transforms."""
        state: OrderedDict[str, Any] = OrderedDict()
        if isinstance(self.policy, nn.Module):
            state["policy_state_dict"] = self.policy.state_dict()
        if isinstance(self.env, TransformedEnv):
            state["env_state_dict"] = self.env.transform.state_dict()
        elif isinstance(self.env, BatchedEnvBase):
            state["env_state_dict"] = self.env.state_dict()
        else:
            state["env_state_dict"] = OrderedDict()
        state["frames"], state["iter"] = self.frames, self.batches - 1
        if self.policy_version_tracker is not None:
            state["policy_version"] = self.policy_version
        return state

    def load_state_dict(self, state: Mapping[str, Any], **kwargs: Any) -> None:
        """Goes on from a saved state."""
        strict = kwargs.get("strict", True)
        if strict or "env_state_dict" in state:
            self.env.load_state_dict(state["env_state_dict"], **kwargs)
        if isinstance(self.policy, nn.Module) and (strict or "policy_state_dict" in state):
            # TorchRL's has no such entry where its policy is no module.
            self.policy.load_state_dict(state.get("policy_state_dict", {}), **kwargs)
        self.frames, self.batches = state["frames"], state["iter"] + 1
        version = state.get("policy_version")
        if version is not None and self.policy_version is not None and self.policy_version_tracker is not None:
            self.policy_version_tracker.version = version

    def close(self, raise_if_closed: bool = False) -> None:
        """Closes the environment."""
        if not self.env.is_closed:
            self.env.close(raise_if_closed=raise_if_closed)


@contextlib.contextmanager
def _both(outer: contextlib.AbstractContextManager[Any], inner: Any) -> Iterator[None]:
    with outer, inner:
        yield


def _last(key: Any, name: str) -> Any:
    """The key of another name in the same place."""
    return name if isinstance(key, str) else (*key[:-1], name)


def _truncated_keys(env: EnvBase) -> list[Any]:
    keys = [key for key in env.done_keys if parts_of(key)[-1] == "truncated"]
    if not keys:
        raise SettingRuntimeError(
            "set_truncated: the environment has no key 'truncated': call env.add_truncated_keys() first"
        )
    return keys


def _repeated(env: EnvBase) -> tuple[Key, ...]:
    """What a step led to that the next step shows again."""
    keys = [*env._observation_keys_step_mdp, *env._state_keys_step_mdp]
    return tuple(("next", *parts_of(key)) for key in keys)


def _is_new(key: Any, answer: Any, given: Any, before: Any) -> bool:
    """Whether the policy has written this key."""
    was, earlier = _tensors(given, key), _tensors(before, key)
    values = _tensors(answer, key)
    if len(values) != len(was):
        return True
    return any(
        value is not one or value.shape != old.shape or not torch.equal(value, old)
        for value, one, old in zip(values, was, earlier, strict=True)
    )


def _tensors(values: Any, key: Any) -> list[Any]:
    """What is under a key: one value, or those of a stack whose shapes differ; none if there is no key."""
    try:
        value = values.get(key, None)
    except RuntimeError:
        value = values.get(key, None, as_list=True)
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _has_words(template: TensorDictBase) -> bool:
    """Whether a TensorDict has values that are no tensors, or tensors of several shapes."""
    if isinstance(template, LazyStackedTensorDict):
        return True
    return any(
        not isinstance(value, torch.Tensor)
        and (not isinstance(value, TensorDictBase) or _has_words(value))
        for value in template.values()
    )
