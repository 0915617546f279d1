"""A collector in the trainer's own thread."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from weightsync._source import tree
from weightsync.errors import SettingError, UnsupportedError, WrongTypeError, WrongWeightsError
from weightsync.rl._base import BaseCollector, Collected, check_known, steps_of
from weightsync.rl._columns import Batch, Layout
from weightsync.rl._envs import Envs, SerialEnv, maker
from weightsync.rl._policy import Actor, make_policy, on_device
from weightsync.rl._rollout import Rollout
from weightsync.rl._terms import SettingTypeError, is_torchrl_env

#: Other places where TorchRL's ``Collector`` runs, and what is meant by them here.
_ELSEWHERE = {
    "ray": "RayCollector of torchrl with weightsync.torchrl's schemes",
    "rpc": "RPCDataCollector",
    "distributed": "DistributedDataCollector",
    "submitit": "DistributedDataCollector with a launcher such as srun",
}


class Collector(BaseCollector):
    """Collects in the caller's thread, while the caller waits for the batch.

    A batch is shaped ``[T]``, or ``[P, T]`` with a batch of ``P`` environments; it has
    ``frames_per_batch`` frames.

    The policy is the caller's own: nothing has to be sent, and
    :meth:`update_policy_weights_` counts a version. Only where ``policy_device`` is another
    device than the policy's, the collector makes a copy, and the update writes into it.

    Args:
        create_env_fn: a Gymnasium id, a function that makes an environment, an environment, or a
            :class:`SerialEnv`. An environment of TorchRL, or a function that makes one, has
            TensorDicts as frames, as TorchRL's collector has.
        policy: what chooses actions; None: random actions. See :class:`Actor` for what it is
            called with and what it returns; with an environment of TorchRL it is what TorchRL takes.
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
        create_env_kwargs: arguments of the function that makes the environment.
        interruptor: ends a batch early where its ``collection_stopped()`` says so.
        backend, num_collectors, sync: as TorchRL's; ``"process"`` makes a
            :class:`MultiSyncCollector` or a :class:`MultiAsyncCollector`.
        settings: the other arguments of TorchRL's collector, for its environments; see
            ``docs/collectors.md``.
    """

    def __new__(cls, *arguments: Any, **settings: Any) -> Any:
        if cls is not Collector:
            return super().__new__(cls)
        return _elsewhere(*arguments, **settings) or super().__new__(cls)

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        create_env_kwargs: Mapping[str, Any] | None = None,
        interruptor: Any = None,
        weight_sync_schemes: Mapping[str, Any] | None = None,
        backend: str | None = None,
        backend_options: Mapping[str, Any] | None = None,
        num_collectors: int | None = None,
        sync: bool | None = None,
        **settings: Any,
    ) -> None:
        factory = settings.get("policy_factory")
        if policy is not None and factory is not None:
            raise SettingTypeError("give a policy or a policy_factory, not both")
        if settings.get("init_fn") is not None:
            raise WrongTypeError(
                "init_fn is for workers, and Collector has none: call it before the collector is made"
            )
        for name, scheme in (weight_sync_schemes or {}).items():
            if not hasattr(scheme, "init_on_sender"):
                raise UnsupportedError(
                    f"weight_sync_schemes: Collector has no workers, and the scheme of {name!r} "
                    f"({scheme!r}) is for workers: leave it out, or give one of TorchRL's kind"
                )
        super().__init__(policy, **settings)
        if isinstance(create_env_fn, (list, tuple)):
            create_env_fn = (
                create_env_fn[0]
                if len(create_env_fn) == 1
                else SerialEnv(len(create_env_fn), create_env_fn)
            )
        made = maker(create_env_fn, create_env_kwargs)()
        self._given_schemes = dict(weight_sync_schemes or {})
        self._rollout: Any
        self._is_tensordict = is_torchrl_env(made)
        self._check_form()
        if self._is_tensordict:
            self._begin_tensordicts(made, factory, interruptor)
        else:
            if interruptor is not None:
                raise UnsupportedError("interruptor: only batches of TorchRL's environments end early")
            if weight_sync_schemes:
                raise UnsupportedError(
                    "weight_sync_schemes: the policy of this collector is the caller's own, so nothing is sent"
                )
            self._begin_arrays(made, factory)

    def _begin_arrays(self, made: Any, factory: Callable[[], Any] | None) -> None:
        policy = self.policy
        self._envs = Envs.of(made)
        self._opened()
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

    def _begin_tensordicts(self, made: Any, factory: Any, interruptor: Any) -> None:
        from weightsync.rl._tensordicts import TensorDictRollout

        self._given = SimpleNamespace(version=0)
        terms = self._terms(
            frames_per_batch=self.frames_per_batch,
            device=self._device,
            storing_device=self._storing_device,
            policy_device=None if self._policy_device is self._device else self._policy_device,
        )
        stopped = None if interruptor is None else interruptor.collection_stopped
        self.interruptor = interruptor
        is_stored = self.replay_buffer is not None and not self._ignore_rb
        if is_stored and self._asked.use_buffers:
            raise WrongTypeError("use_buffers=True: what goes into a replay buffer is put together there")
        if is_stored and self._asked.return_same_td:
            raise WrongTypeError("return_same_td=True: with a replay buffer nothing is returned")
        self._original = self.policy
        self._rollout = TensorDictRollout(
            made,
            self.policy,
            factory,
            terms,
            worker_idx=self.worker_idx,
            stopped=stopped,
            is_stored=is_stored,
        )
        self._opened()
        self._acting = self._rollout.policy
        self.policy = self._acting
        self.frames_per_batch = self._rollout.steps
        self.requested_frames_per_batch = self._rollout.requested_frames_per_batch
        if self._seed is not None:
            self._rollout.set_seed(self._seed)
            self._rollout.reset()
        for name, scheme in self._given_schemes.items():
            if not scheme.initialized_on_sender:
                scheme.init_on_sender(model_id=name, context=self)
            if not scheme.synchronized_on_sender:
                scheme.connect()

    @property
    def env(self) -> Any:
        """The environment, or what makes several of them one."""
        return self._rollout.env if self._is_tensordict else self._envs.made

    @property
    def version(self) -> int:
        """How often :meth:`update_policy_weights_` was called."""
        return int(self._given.version)

    @property
    def policy_version(self) -> int | str | None:
        return self._rollout.policy_version if self._is_tensordict else None

    @property
    def policy_device(self) -> Any:
        """Where the policy acts; None: where it is."""
        return self._rollout.policy_device if self._is_tensordict else self._policy_device

    @property
    def storing_device(self) -> Any:
        """Where batches are put; None: where they come about."""
        return self._rollout.storing_device if self._is_tensordict else self._storing_device

    @property
    def env_device(self) -> Any:
        """Where an environment of TorchRL is; None for others."""
        return self._rollout.env_device if self._is_tensordict else None

    @property
    def _use_buffers(self) -> bool:
        return bool(self._is_tensordict and self._rollout.use_buffers)

    @property
    def _weight_sync_schemes(self) -> dict[str, Any] | None:
        return self._given_schemes or None

    @property
    def pre_collect_hook(self) -> Callable[[], None] | None:
        """Called before each batch."""
        return self._rollout.pre_collect_hook if self._is_tensordict else None

    @pre_collect_hook.setter
    def pre_collect_hook(self, hook: Callable[[], None] | None) -> None:
        self._tensordicts("pre_collect_hook").pre_collect_hook = hook

    @property
    def post_collect_hook(self) -> Callable[[Any], None] | None:
        """Called with each batch, as it is handed out."""
        return self._rollout.post_collect_hook if self._is_tensordict else None

    @post_collect_hook.setter
    def post_collect_hook(self, hook: Callable[[Any], None] | None) -> None:
        self._tensordicts("post_collect_hook").post_collect_hook = hook

    def set_post_collect_hook(self, hook: Callable[[Any], None] | None) -> None:
        """Sets :attr:`post_collect_hook`, for those who can only call."""
        self.post_collect_hook = hook

    def _tensordicts(self, what: str) -> Any:
        """The rollout, which has to be one of TensorDicts."""
        if not self._is_tensordict:
            raise UnsupportedError(f"{what} is for environments of TorchRL, and this is none")
        return self._rollout

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[tuple[Any, ...]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """Calls a method of the collector for each set of arguments."""
        if list_of_args is None:
            list_of_args = [()] * (1 if list_of_kwargs is None else len(list_of_kwargs))
        if list_of_kwargs is None:
            list_of_kwargs = [{}] * len(list_of_args)
        if len(list_of_args) != len(list_of_kwargs):
            raise SettingError(
                "list_of_args and list_of_kwargs must have the same length, got "
                f"{len(list_of_args)} and {len(list_of_kwargs)}"
            )
        return [
            self.cascade_execute(method_name, *arguments, **named)
            for arguments, named in zip(list_of_args, list_of_kwargs, strict=True)
        ]

    def getattr_policy(self, attr: str) -> Any:
        """An attribute of the policy."""
        return getattr(self._acting, attr)

    def getattr_env(self, attr: str) -> Any:
        """An attribute of the environment."""
        return getattr(self.env, attr)

    def get_model(self, model_id: str) -> Any:
        """The model of this name: the policy, or what lies at a path in the collector."""
        return self._acting if model_id == "policy" else self.get_distant_attr(model_id)

    def fake_tensordict(self) -> Any:
        """A batch of zeros that is shaped as the batches to come."""
        # As in TorchRL, post_collect_hook does not see it.
        return super()._finished_tensordict(self._tensordicts("fake_tensordict").fake())

    def increment_version(self) -> None:
        """Counts a version of the policy, where ``track_policy_version`` asks for it."""
        if self._is_tensordict:
            self._rollout.updated()

    #: The environments whose trajectories under way got other numbers.
    _cut: np.ndarray | None = None

    def _collect(self) -> Collected:
        if self._is_tensordict:
            return self._collect_tensordicts()
        dims = (self._envs.num_envs, self._steps)
        layout = Layout(self._rollout.columns(), dims)
        columns = layout.views(np.empty(layout.size, np.uint8))
        random = self._random_steps(self._steps, self._frames)
        self._rollout.collect(columns, self._steps, random)
        if not self._envs.is_batched:
            return Collected.of(Batch.of({key: value[0] for key, value in columns.items()}, dims[1:]))
        return Collected.of(Batch.of(columns, dims))

    def _collect_tensordicts(self) -> Collected:
        rollout, buffer = self._rollout, self.replay_buffer
        is_stored = buffer is not None and not self._ignore_rb

        def is_random() -> bool:
            written = self._frames if buffer is None else getattr(buffer, "write_count", self._frames)
            return bool(written < self._init_random)

        if is_stored and not self.extend_buffer and self._episodes is None:
            # Frames are in the buffer as soon as they are collected.
            count = 0
            for frame in rollout.collect(is_random):
                buffer.add(rollout.numbered(frame))
                count += frame.numel()
                if 0 <= self.total_frames <= self._frames + count:
                    break
            return Collected(None, count, rollout.versions)
        if is_stored and self._episodes is None:
            # A lazy stack is written into the buffer without a copy before it.
            frames = list(rollout.collect(is_random))
            batch, taken = rollout.batch_of(frames, is_lazy=True), len(frames)
        else:
            batch, taken = rollout.whole(is_random)
        if self._episodes is not None:
            self._episodes.follow(0, rollout.rows, self._cut)
            self._cut = None
        count = taken * rollout.num_envs
        return Collected(batch, count, rollout.versions, parts=[batch])

    def _finished_tensordict(self, batch: Any, splits: bool = True) -> Any:
        batch = super()._finished_tensordict(batch, splits)
        if self.post_collect_hook is not None:
            self.post_collect_hook(batch)
        return batch

    def _update(self, weights: dict[str, Any], worker_ids: Any) -> Any:
        if self._given_schemes:
            check_known(weights, list(self._given_schemes))
            for name, given in weights.items():
                self._given_schemes[name].send(weights=given, worker_ids=worker_ids)
            self.increment_version()
            return None
        check_known(weights, ["policy"])
        given = weights["policy"]
        if given is None:
            given = self._original if self._is_tensordict else self.policy
        with self._alone():
            if given is not None and given is not self._acting:
                _copy_weights(given, self._acting)
            self._given.version += 1
            self.increment_version()
        return None

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        with self._alone():
            if self._is_tensordict:
                following: int = self._rollout.set_seed(seed, static_seed)
                return following
            self._rollout.seed(seed)
        return seed if static_seed else seed + self._envs.num_envs

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        with self._alone():
            if self._is_tensordict:
                self._rollout.reset(index, **kwargs)
                if self._episodes is not None and index is None:
                    self._episodes.clear()
                return
            if index is not None or kwargs:
                raise UnsupportedError("reset: only an environment of TorchRL is reset in part")
            self._rollout.reset()

    def _state_of_tensordicts(self) -> OrderedDict[str, Any]:
        import torch

        state: OrderedDict[str, Any] = self._rollout.state_dict()
        state["frames"], state["iter"] = self._frames, self._iter
        if self._asked.track_traj_ids:
            state["traj_pool"] = {"traj_id": torch.tensor(self._rollout.next_id, device="cpu")}
        return state

    def _load_state_of_tensordicts(self, state: Mapping[str, Any], **kwargs: Any) -> None:
        if self._rollout.batches:
            self._cut = np.ones(self._rollout.num_envs, bool)
        self._rollout.load_state_dict(state)
        self._frames, self._iter = state["frames"], state["iter"]
        if (pool := state.get("traj_pool")) is not None:
            self._rollout.go_on_from(int(pool["traj_id"]))

    @property
    def _next_trajectory(self) -> int:
        return int(self._rollout.next_id)

    def _go_on_from(self, trajectory: int) -> None:
        self._rollout.go_on_from(trajectory)

    def _close(self, close_env: bool) -> None:
        if not close_env:
            return
        if self._is_tensordict:
            self._rollout.close()
        else:
            self._envs.close()


def _elsewhere(
    *arguments: Any,
    backend: str | None = None,
    backend_options: Mapping[str, Any] | None = None,
    num_collectors: int | None = None,
    sync: bool | None = None,
    **settings: Any,
) -> Any:
    """The collector of another backend that TorchRL's ``Collector`` would make; None: this one."""
    if backend in _ELSEWHERE:
        raise UnsupportedError(f"backend={backend!r}: use {_ELSEWHERE[backend]}")
    if backend not in (None, "direct", "process"):
        raise SettingError(f'backend: expected "direct" or "process", got {backend!r}')
    if num_collectors is not None and (
        isinstance(num_collectors, bool) or not isinstance(num_collectors, int)
    ):
        raise WrongTypeError(f"num_collectors: expected a whole number, got {num_collectors!r}")
    if num_collectors is not None and num_collectors < 1:
        raise SettingError(f"num_collectors: expected 1 or more, got {num_collectors}")
    if backend == "direct" or (backend is None and num_collectors is None):
        if num_collectors not in (None, 1) or sync is not None or backend_options:
            raise SettingError(
                "num_collectors, sync and backend_options are for workers: give backend=\"process\" too"
            )
        return None
    from weightsync.rl.multi import MultiAsyncCollector, MultiSyncCollector

    kind = MultiSyncCollector if sync else MultiAsyncCollector
    options = dict(backend_options or {})
    if twice := options.keys() & settings.keys():
        raise SettingError(f"backend_options repeat {', '.join(sorted(twice))}")
    envs = arguments[0] if arguments else settings.pop("create_env_fn")
    if isinstance(envs, (list, tuple)):
        if num_collectors not in (None, len(envs)):
            raise SettingError(f"num_collectors is {num_collectors}, and there are {len(envs)} environments")
    else:
        envs = [envs] * (num_collectors or 1)
    return kind(envs, *arguments[1:], **settings, **options)


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
            own[name].copy_(torch.as_tensor(value, device=own[name].device))


def _state(weights: Any) -> Any:
    return weights.state_dict() if hasattr(weights, "state_dict") else weights
