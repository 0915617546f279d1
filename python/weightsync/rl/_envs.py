"""Environments: how a collector steps one, or a batch of them.

Whatever an environment is made from, the rollout sees the same: a number of environments whose
observations lie in arrays shaped ``[P, *shape]``.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import os
import signal
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from weightsync.errors import SettingError, UnsupportedError, WrongTypeError
from weightsync.rl._columns import OBSERVATION, Column, Key
from weightsync.rl._lifeline import Lifeline
from weightsync.rl._terms import SettingRuntimeError, is_torchrl_env

if TYPE_CHECKING:
    from weightsync.rl._policy import Actor
    from weightsync.rl._rollout import Rules


class SerialEnv:
    """A batch of environments that one worker steps one after the other.

    Args:
        num_envs: how many, ``P``.
        env: a Gymnasium id or a function that makes one environment; or a list of them, one for
            each.
        kwargs: arguments of :func:`gymnasium.make` for ids.
    """

    def __init__(self, num_envs: int, env: Any, **kwargs: Any) -> None:
        if num_envs < 1:
            raise SettingError(f"num_envs: expected 1 or more, got {num_envs}")
        each = list(env) if isinstance(env, (list, tuple)) else [env] * num_envs
        if len(each) != num_envs:
            raise SettingError(f"expected {num_envs} environments or one, got {len(each)}")
        self.num_envs = num_envs
        self.makers = [_maker(one, kwargs) for one in each]
        given = [id(one) for one, make in zip(each, self.makers, strict=True) if is_made(make)]
        if len(set(given)) < len(given):
            raise SettingError(
                "the same environment would be stepped several times: give a function that makes one"
            )

    def __call__(self) -> SerialEnv:
        return self

    def __repr__(self) -> str:
        return f"SerialEnv({self.num_envs}, {self.makers[0]!r})"


class ParallelEnv(SerialEnv):
    """A batch of environments in processes of their own, which step at the same time.

    The processes are those of :class:`gymnasium.vector.AsyncVectorEnv`, and end with the worker.

    Args:
        num_envs: how many, ``P``.
        env: as for :class:`SerialEnv`, but no environment that was made already.
        context: how processes are started: ``"fork"``, ``"forkserver"`` or ``"spawn"``; None:
            as :mod:`multiprocessing` does.
        kwargs: arguments of :func:`gymnasium.make` for ids.
    """

    def __init__(self, num_envs: int, env: Any, *, context: str | None = None, **kwargs: Any) -> None:
        super().__init__(num_envs, env, **kwargs)
        if any(map(is_made, self.makers)):
            raise SettingError(
                "ParallelEnv makes environments in processes of their own: give functions that make "
                "them, and not environments"
            )
        self.context = context

    def start(self) -> Any:
        """The vector environment, with its processes."""
        from gymnasium.vector import AsyncVectorEnv, AutoresetMode

        lifeline = Lifeline()
        try:
            made = AsyncVectorEnv(
                [_Apart(one, lifeline) for one in self.makers],
                context=self.context,
                autoreset_mode=AutoresetMode.DISABLED,
            )
        except BaseException:
            lifeline.close()
            raise
        weakref.finalize(made, lifeline.close)
        return made

    def __repr__(self) -> str:
        return f"ParallelEnv({self.num_envs}, {self.makers[0]!r})"


class _Apart:
    """Makes an environment in a process that is to end with this one."""

    def __init__(self, make: Callable[[], Any], lifeline: Lifeline) -> None:
        self._make, self._lifeline = make, lifeline
        self._pid = os.getpid()

    def __call__(self) -> Any:
        if os.getpid() != self._pid:
            # Ctrl-C reaches every process of the terminal. The collector ends its environments.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            self._lifeline.end_with()
        made = self._make()
        _refuse_torchrl(made)
        return made


class _Make:
    """Makes an environment of a Gymnasium id, also where only the trainer registered it."""

    def __init__(self, name: str, kwargs: Mapping[str, Any]) -> None:
        import gymnasium

        try:
            self._spec = gymnasium.spec(name)
        except gymnasium.error.Error as error:
            raise SettingError(
                f"{name!r} is not an environment that Gymnasium knows: {error}"
            ) from error
        self._kwargs = dict(kwargs)

    def __call__(self) -> Any:
        import gymnasium

        return gymnasium.make(self._spec, **self._kwargs)

    def __repr__(self) -> str:
        return repr(self._spec.id)


def maker(env: Any, kwargs: Mapping[str, Any] | None = None) -> Callable[[], Any]:
    """What makes an environment in the worker: of an id, a factory, a batch, or what TorchRL has."""
    if isinstance(env, SerialEnv):
        if kwargs:
            raise SettingError(f"create_env_kwargs: {env!r} has arguments of its own")
        return env
    return _maker(env, kwargs or {})


def _maker(env: Any, kwargs: Mapping[str, Any]) -> Callable[[], Any]:
    if isinstance(env, str):
        return _Make(env, kwargs)
    if is_torchrl_env(env):
        if kwargs:
            if not hasattr(env, "update_kwargs"):
                raise SettingRuntimeError(
                    f"create_env_kwargs: the environment {env!r} has been made already, and takes none"
                )
            env.update_kwargs(dict(kwargs))
        return _Copied(env)
    if callable(env):
        make: Callable[[], Any] = functools.partial(env, **kwargs) if kwargs else env
        return make
    if hasattr(env, "step") and hasattr(env, "reset"):
        return _Given(env)
    raise WrongTypeError(
        f"an environment is a Gymnasium id, a function that makes one, or a SerialEnv; got {env!r}"
    )


def is_made(make: Callable[[], Any]) -> bool:
    """Whether the environment was made before, so that there is only this one."""
    return isinstance(make, _Given) and not isinstance(make, _Copied)


class _Given:
    """An environment that was made already: a collector in this process uses it as it is."""

    def __init__(self, env: Any) -> None:
        self._env = env

    def __call__(self) -> Any:
        return self._env

    def __repr__(self) -> str:
        return repr(self._env)


class _Copied(_Given):
    """An environment of TorchRL: workers have copies, as they have of its policies."""


class Envs(abc.ABC):
    """A number of environments, stepped together.

    Attributes:
        num_envs: how many, ``P``.
        is_batched: whether the batch has a dimension for them.
        action_space: of one environment.
        made: the environment, a list of them, or the vector environment.
        observations: what each environment shows now, by column, ``[P, *shape]``.
    """

    made: Any

    def __init__(self, num_envs: int, is_batched: bool, observation: Any, action: Any) -> None:
        from gymnasium.vector.utils import batch_space

        self.num_envs, self.is_batched = num_envs, is_batched
        if getattr(action, "shape", None) is None or getattr(action, "dtype", None) is None:
            raise UnsupportedError(
                f"the action space {action} has no fixed shape: wrap the environment so that an "
                "action is one array or number"
            )
        self.action_space = action
        self._action_spaces = batch_space(action, num_envs)
        self.columns = list(_columns_of((), observation))
        if not self.columns:
            raise UnsupportedError(f"the observation space {observation} has no quantity")
        self.observations = self._empty()
        self.following = self._empty()
        self.rewards = np.zeros(num_envs)
        self.terminated: np.ndarray = np.zeros(num_envs, bool)
        self.truncated: np.ndarray = np.zeros(num_envs, bool)

    @staticmethod
    def of(made: Any) -> Envs:
        """The environments that a factory has made."""
        if isinstance(made, Envs):
            return made
        if isinstance(made, ParallelEnv):
            return _Parallel(made)
        if isinstance(made, SerialEnv):
            return _Serial([one() for one in made.makers], is_batched=True)
        if hasattr(made, "num_envs") and hasattr(made, "single_action_space"):
            return _Vector(made)
        return _Serial([made], is_batched=False)

    @abc.abstractmethod
    def reset(self, which: np.ndarray, seeds: list[int] | None = None) -> None:
        """Starts new episodes in these environments, and shows their first observations."""

    @abc.abstractmethod
    def step(self, actions: Any, which: np.ndarray) -> None:
        """Takes one step in each of these, and puts what it led to into :attr:`following`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the environments."""

    def check_policy(self, policy: Any) -> None:
        """Refuses a policy whose sizes are known not to fit."""

    def runner(self, actor: Actor, rules: Rules, out: dict[Key, np.ndarray]) -> Runner | None:
        """What takes steps with this policy; None: the policy is asked for each step.

        Args:
            out: the columns of the part, ``[P, steps, *shape]``.
        """
        return None

    def sample(self) -> np.ndarray:
        """Random actions, ``[P, *shape]``."""
        drawn: np.ndarray = self._action_spaces.sample()
        return drawn

    def seed_actions(self, seed: int) -> None:
        """Seeds :meth:`sample`."""
        self._action_spaces.seed(seed)

    def _empty(self) -> dict[Key, np.ndarray]:
        return {
            one.key: np.zeros((self.num_envs, *one.shape), one.dtype) for one in self.columns
        }

    def _show(self, into: dict[Key, np.ndarray], index: int, observation: Any) -> None:
        """Writes one environment's observation. numpy would stretch one of another shape."""
        for column in self.columns:
            value = _at(observation, column.key)
            if np.shape(value) != column.shape:
                raise SettingError(
                    f"environment {index} returned {'.'.join(column.key)} of shape "
                    f"{list(np.shape(value))}; its space says {list(column.shape)}"
                )
            into[column.key][index] = value


class Runner(Protocol):
    """Takes steps with a policy, and writes them."""

    def run(
        self, version: int, at: int, steps: int, lengths: np.ndarray, ids: np.ndarray, next_id: int
    ) -> tuple[int, int]:
        """Takes some of these steps, with weights that do not change meanwhile.

        Args:
            version: of the weights.
            at: where in the part the first step is.
            steps: how many steps are left.
            lengths: of the episodes under way; they are replaced.
            ids: of the trajectories; they are replaced.
            next_id: of the trajectory that begins next.

        Returns:
            How many steps were taken, none if the policy is no longer of the kind, and the id of
            the trajectory that begins next.
        """


class _Serial(Envs):
    """Gymnasium environments, one after the other."""

    def __init__(self, envs: list[Any], is_batched: bool) -> None:
        for env in envs:
            _refuse_torchrl(env)
            if isinstance(env, Envs) or not hasattr(env, "step") or not hasattr(env, "reset"):
                raise WrongTypeError(f"expected a Gymnasium environment, the factory made {env!r}")
        self.envs = envs
        self.made = envs if is_batched else envs[0]
        first = envs[0]
        super().__init__(len(envs), is_batched, first.observation_space, first.action_space)
        for index, env in enumerate(envs):
            if (env.observation_space, env.action_space) != (
                first.observation_space,
                first.action_space,
            ):
                raise SettingError(
                    f"environment {index} has other spaces than environment 0: "
                    f"{env.observation_space} and {env.action_space}, not "
                    f"{first.observation_space} and {first.action_space}"
                )

    def reset(self, which: np.ndarray, seeds: list[int] | None = None) -> None:
        for index in map(int, np.flatnonzero(which)):
            seed = None if seeds is None else seeds[index]
            observation, _ = self.envs[index].reset(seed=seed)
            self._show(self.observations, index, observation)

    def step(self, actions: Any, which: np.ndarray) -> None:
        for index, env in enumerate(self.envs):
            if not which[index]:
                continue
            observation, reward, terminated, truncated, _ = env.step(actions[index])
            self._show(self.following, index, observation)
            self.rewards[index] = reward
            self.terminated[index] = terminated
            self.truncated[index] = truncated

    def close(self) -> None:
        for env in self.envs:
            env.close()


class _Vector(Envs):
    """A vector environment of Gymnasium."""

    def __init__(self, env: Any) -> None:
        self.env = self.made = env
        mode = str(getattr(env.metadata.get("autoreset_mode"), "value", "NextStep"))
        self._same_step = mode == "SameStep"
        if not self._same_step and mode != "Disabled":
            raise UnsupportedError(
                "this vector environment starts episodes in a step of their own, which are no "
                "frames: make it with autoreset_mode=gymnasium.vector.AutoresetMode.DISABLED or "
                "SAME_STEP, or use SerialEnv"
            )
        super().__init__(
            env.num_envs, True, env.single_observation_space, env.single_action_space
        )
        # What the environment shows after its last step, and which episodes it began in it.
        self._fresh: Any = None
        self._begun: np.ndarray = np.zeros(self.num_envs, bool)

    def reset(self, which: np.ndarray, seeds: list[int] | None = None) -> None:
        if seeds is None and (begun := which & self._begun).any():
            self._copy(self.observations, self._fresh, begun)
            which = which & ~begun
        if which.all():
            observation, _ = self.env.reset(seed=seeds)
            self._copy(self.observations, observation, which)
        elif which.any():
            options = {"reset_mask": np.array(which, bool)}
            observation, _ = self.env.reset(seed=seeds, options=options)
            self._copy(self.observations, observation, which)
        self._begun[:] = False

    def step(self, actions: Any, which: np.ndarray) -> None:
        if not which.all():
            raise UnsupportedError(
                "a vector environment steps all of its environments: use SerialEnv with "
                "reset_when_done=False"
            )
        observation, rewards, terminated, truncated, info = self.env.step(actions)
        self.rewards[:], self.terminated[:], self.truncated[:] = rewards, terminated, truncated
        self._copy(self.following, observation, which)
        if self._same_step:
            self._fresh, self._begun = observation, self.terminated | self.truncated
            for index in map(int, np.flatnonzero(self._begun)):
                self._show(self.following, index, info["final_obs"][index])

    def _copy(self, into: dict[Key, np.ndarray], observation: Any, which: np.ndarray) -> None:
        for column in self.columns:
            value = np.asarray(_at(observation, column.key))
            if value.shape != (self.num_envs, *column.shape):
                raise SettingError(
                    f"the environments returned {'.'.join(column.key)} of shape "
                    f"{list(value.shape)}; expected {[self.num_envs, *column.shape]}"
                )
            into[column.key][which] = value[which]

    def close(self) -> None:
        self.env.close()


class _Parallel(_Vector):
    """Environments in processes of their own."""

    def __init__(self, parallel: ParallelEnv) -> None:
        self._parallel = parallel
        #: Whether answers of its processes may be under way that nobody has waited for.
        self._is_broken = False
        super().__init__(parallel.start())

    def reset(self, which: np.ndarray, seeds: list[int] | None = None) -> None:
        if self._is_broken:
            # Ctrl-C, or an environment that raised. A collector begins again with all of them.
            self.close()
            self.env = self.made = self._parallel.start()
        self._is_broken = True
        super().reset(which, seeds)
        self._is_broken = False

    def step(self, actions: Any, which: np.ndarray) -> None:
        self._is_broken = True
        super().step(actions, which)
        self._is_broken = False

    def close(self) -> None:
        if not self._is_broken:
            super().close()
            return
        for process in self.env.processes:
            process.kill()
        with contextlib.suppress(Exception):
            # It finds that they have ended.
            self.env.close(terminate=True)


def _refuse_torchrl(made: Any) -> None:
    """Refuses an environment of TorchRL inside a batch: that of Gymnasium below it shows another form.

    Raises:
        SettingError: naming the batches of TorchRL.
    """
    if is_torchrl_env(made):
        raise SettingError(
            f"a batch of weightsync.rl is of Gymnasium's environments, and one of them is TorchRL's, {made!r}: "
            "make the batch with torchrl.envs.SerialEnv or ParallelEnv"
        )


def _columns_of(prefix: Key, space: Any) -> Iterable[Column]:
    """The columns of an observation space: one, or one for each entry of a Dict."""
    spaces = getattr(space, "spaces", None)
    if isinstance(spaces, Mapping):
        for name, inner in spaces.items():
            yield from _columns_of((*prefix, str(name)), inner)
    elif getattr(space, "shape", None) is None or getattr(space, "dtype", None) is None:
        raise UnsupportedError(
            f"{space} has no fixed shape, so its values are no column: wrap the environment, for "
            "example with gymnasium.wrappers.FlattenObservation"
        )
    elif np.dtype(space.dtype).kind not in "biufc":
        raise UnsupportedError(f"{space} holds {space.dtype} values; expected numbers")
    else:
        yield Column(prefix or OBSERVATION, np.dtype(space.dtype).name, tuple(space.shape))


def _at(observation: Any, key: Key) -> Any:
    """The part of an observation that a column holds."""
    # An isinstance of Mapping would take as long as the write.
    if not hasattr(observation, "keys"):
        return observation
    for name in key:
        observation = observation[name]
    return observation
