"""Policies of TorchRL's modules, called without TensorDicts.

What TorchRL's modules read from and write to is a dict of tensors here: to make a TensorDict, and to
read and write it, takes longer than a small network. The distributions are made and asked by TorchRL's
own code. A policy whose modules do more is called as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn
from torchrl.envs.utils import ExplorationType, exploration_type
from torchrl.modules import SafeProbabilisticModule

from weightsync import _guard
from weightsync.rl._mlp import has_global_hooks, is_plain


class _Tensors(dict[str, Any]):
    """As much of a TensorDict as these modules ask for."""

    def set(self, key: str, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            value = TensorDict({key: value}).get(key)
        self[key] = value


def direct_call(policy: Any, hold: Any = None) -> Callable[[dict[str, Any]], Mapping[str, Any]] | None:
    """What a policy does with tensors by key; None: it is called with a TensorDict.

    Args:
        hold: what keeps the policy unchanged in such a call, next to the hooks of its guards.
    """
    parts = None if has_global_hooks() else _parts(policy, hold)
    if parts is None:
        return None
    calls = [(_forward(part), part) for part in parts]

    def call(given: dict[str, Any]) -> Mapping[str, Any]:
        values = _Tensors(given)
        for forward, part in calls:
            forward(part, values)
        return values

    return call


def _forward(part: nn.Module) -> Callable[..., Any]:
    """What a module's forward does, past what makes a TensorDict of its arguments."""
    if isinstance(part, TensorDictModule):
        return _call
    return _sample if isinstance(part, SafeProbabilisticModule) else _sample_plainly


_sample_plainly: Any = inspect.unwrap(ProbabilisticTensorDictModule.forward)
_sample_and_score: Any = inspect.unwrap(SafeProbabilisticModule.forward)


def _sample(part: SafeProbabilisticModule, values: _Tensors) -> None:
    """Its forward leaves all but one case to its base, by the call that makes TensorDicts."""
    is_own = part.return_log_prob and exploration_type() is ExplorationType.RANDOM
    (_sample_and_score if is_own else _sample_plainly)(part, values)


def _call(part: TensorDictModule, values: _Tensors) -> None:
    """The forward of a ``TensorDictModule``, but that it asks of no tensor what else it may be: TorchRL
    looks for pandas on the disk each time."""
    given = [values.get(key) for key in part.in_keys]
    if part._kwargs is None:
        answer = part._call_module(given)
    else:
        answer = part._call_module((), **dict(zip(part._kwargs, given, strict=True)))
    keys = part.out_keys
    if isinstance(answer, (dict, TensorDictBase)) and all(key in answer for key in keys):
        answer = tuple(answer.get(key) for key in keys)
    answers = () if answer is None else answer if isinstance(answer, tuple) else (answer,)
    if len(answers) == len(keys) and all(isinstance(one, torch.Tensor) for one in answers):
        values.update(zip(keys, answers, strict=True))
        values.pop("_", None)
    else:
        part._write_to_tensordict(values, answers)


def _parts(policy: Any, hold: Any) -> list[nn.Module] | None:
    """The modules that a policy calls one after the other; None where it does more than that."""
    if not isinstance(policy, nn.Module) or policy._compiled_call_impl is not None:
        return None
    if not is_plain(policy, partial(_guard.is_hook_of, hold=hold)):
        return None
    for kind, own in _SEQUENCES.items():
        if _acts_as(policy, kind, *own):
            return _parts_of_sequence(policy, hold)
    is_known = False
    if _acts_as(policy, TensorDictModule, "_call_module", "_write_to_tensordict"):
        is_known = policy.inplace is True and not policy._get_kwargs
    elif type(policy) in (ProbabilisticTensorDictModule, SafeProbabilisticModule):
        is_known = policy.num_samples is None and policy._generator_key is None
    keys_are_flat = is_known and all(isinstance(one, str) for one in (*policy.in_keys, *policy.out_keys))
    return [policy] if keys_are_flat else None


_SEQUENCES: dict[type, tuple[str, ...]] = {
    TensorDictSequential: ("_run_module", "_module_iter"),
    ProbabilisticTensorDictSequential: ("get_dist_params", "det_part", "_last_module"),
}


def _acts_as(policy: nn.Module, kind: type, *own: str) -> bool:
    """Whether a module is of this kind, and has these methods of it."""
    names = ("__call__", "forward", *own)
    return isinstance(policy, kind) and all(
        getattr(type(policy), name) is getattr(kind, name) for name in names
    )


def _parts_of_sequence(policy: Any, hold: Any) -> list[nn.Module] | None:
    if policy.partial_tolerant or policy.inplace is not None or policy._select_before_return:
        return None
    inner = list(policy._module_iter())
    if isinstance(policy, ProbabilisticTensorDictSequential):
        if policy.return_composite or not policy._requires_sample:
            return None
        inner = [policy.det_part, policy._last_module]
    found: list[nn.Module] = []
    for one in inner:
        parts = _parts(one, hold)
        if parts is None:
            return None
        found += parts
    return found
