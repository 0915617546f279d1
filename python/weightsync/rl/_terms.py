"""How TensorDicts are collected, as plain values: nothing of TorchRL is imported here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from weightsync import _paths
from weightsync.errors import ModelError, SettingError, WrongTypeError


class SettingTypeError(SettingError, WrongTypeError):
    """A setting that TorchRL refuses with a ``TypeError``."""


class SettingRuntimeError(SettingError, RuntimeError):
    """A setting that TorchRL refuses with a ``RuntimeError``."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Arguments of TorchRL's collectors that only its environments have a meaning for."""

    env_device: Any = None
    trust_policy: bool | None = None
    compile_policy: Any = None
    cudagraph_policy: Any = None
    no_cuda_sync: bool = False
    use_buffers: bool | None = None
    set_truncated: bool = False
    track_traj_ids: bool = True
    track_policy_version: Any = False
    compact_obs: bool = False
    return_same_td: bool = False
    auto_register_policy_transforms: bool | None = None
    pre_collect_hook: Callable[[], None] | None = None
    post_collect_hook: Callable[[Any], None] | None = None
    init_fn: Callable[[], None] | None = None

    @staticmethod
    def of(given: Mapping[str, Any], owner: str) -> Asked:
        """These arguments.

        Raises:
            WrongTypeError: naming those that do not exist.
        """
        known = {one.name for one in fields(Asked)}
        if unknown := [name for name in given if name not in known]:
            raise WrongTypeError(f"{owner} has no argument {', '.join(unknown)}")
        return Asked(**given)

    def refuse(self) -> None:
        """Refuses what has no meaning for another environment.

        Raises:
            SettingError: naming the argument.
        """
        for one in fields(self):
            value = getattr(self, one.name)
            # False asks for no more than None does.
            is_off = one.default in (None, False) and (value is None or value is False)
            if value is not one.default and not is_off:
                refuse_for_arrays(one.name, value)


@dataclass(frozen=True, kw_only=True)
class Terms(Asked):
    """How one rollout collects TensorDicts.

    Attributes:
        frames_per_batch: of this rollout, all environments together.
    """

    frames_per_batch: int
    device: Any = None
    storing_device: Any = None
    policy_device: Any = None
    max_frames_per_traj: int = 0
    reset_at_each_iter: bool = False
    exploration_type: str = "random"


def refuse_for_arrays(name: str, value: Any) -> None:
    """Refuses an argument for an environment that is none of TorchRL's."""
    raise SettingError(
        f"{name}={value!r} is for environments of TorchRL, whose frames are TensorDicts, and this is "
        "none: give one, such as torchrl.envs.GymEnv, or leave the argument out"
    )


class MissingAttributeError(AttributeError, ModelError):
    """A path that leads nowhere, which TorchRL tells with an ``AttributeError``."""


def _found(root: Any, path: str) -> Any:
    try:
        return _paths.resolve(root, path)
    except ModelError as error:
        raise MissingAttributeError(str(error)) from error


class Named:
    """What can be asked by the path of its name, also from another process."""

    def get_distant_attr(self, attr: str) -> Any:
        """What lies at a path from here on, such as ``"env.batch_size"``.

        Raises:
            AttributeError: naming the part that does not exist.
        """
        return _found(self, attr)

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Calls what lies at a path; returns it where it cannot be called."""
        found = _found(self, attr_path)
        if callable(found):
            return found(*args, **kwargs)
        if args or kwargs:
            raise SettingError(f"{attr_path!r} is a {type(found).__name__}, and takes no arguments")
        return found


def each_of(values: Any, count: int, name: str) -> list[Any]:
    """The value of each worker: one for all, or a list with one for each."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        return [values] * count
    if len(values) != count:
        raise SettingError(f"{name}: expected one, or {count} of them, got {len(values)}")
    return list(values)


def is_torchrl_env(made: Any) -> bool:
    """Whether this is an environment of TorchRL. One that exists has imported TorchRL."""
    return _is(made, "torchrl.envs", "EnvBase")


def is_env_creator(value: Any) -> bool:
    """Whether this is what TorchRL makes environments with that share a state."""
    return _is(value, "torchrl.envs", "EnvCreator")


def is_torchrl_buffer(buffer: Any) -> bool:
    """Whether this is a replay buffer of TorchRL."""
    return _is(buffer, "torchrl.data", "ReplayBuffer")


def _is(value: Any, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)
