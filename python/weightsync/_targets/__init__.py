"""Targets: the models of a worker that versions are loaded into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from weightsync import _dtypes
from weightsync._checks import choice
from weightsync._targets.base import Target
from weightsync._targets.module import ModuleTarget
from weightsync._targets.together import together
from weightsync._targets.tree import TreeTarget
from weightsync.errors import WrongTypeError

__all__ = ["ModuleTarget", "Target", "TreeTarget", "target_of", "together"]


def target_of(model: Any, mode: str, *, stays: bool = False) -> Target:
    """The target of a model.

    Args:
        stays: whether a model in memory that other processes share stays there. A worker's does
            not: it would write into the learner's.
    """
    choice("mode", mode, "bind", "copy")
    if _dtypes.is_module(model):
        return ModuleTarget(model, mode, stays=stays)
    if isinstance(model, Mapping) or _dtypes.is_tensordict(model):
        return TreeTarget(model, stays=stays)
    if all(callable(getattr(model, name, None)) for name in ("layout", "shape", "load")):
        return cast("Target", model)
    raise WrongTypeError(
        "a worker's model is a torch module, a TensorDict, a dict of tensors or arrays, or has "
        f"methods layout, shape and load; not a {type(model).__name__}"
    )
