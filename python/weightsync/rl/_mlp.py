"""Multi-layer perceptrons of torch, of the kind that Rust runs in built-in tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weightsync import _guard
from weightsync._targets.base import is_plain as has_plain_memory


class MLP(nn.Sequential):  # type: ignore[misc]
    """Linear layers with tanh between them: a plain ``torch.nn.Sequential``.

    Where the actions are choices, its outputs are their logits. Where they are quantities, its
    outputs are the actions; :class:`GaussianMLP` draws them.

    Args:
        inputs: quantities of an observation.
        outputs: the number of actions, or of quantities in one.
        hidden: widths of the layers between.
    """

    def __init__(self, inputs: int, outputs: int, hidden: Sequence[int] = (64, 64)) -> None:
        widths = [inputs, *hidden, outputs]
        layers: list[nn.Module] = []
        for before, after in zip(widths, widths[1:], strict=False):
            layers += [nn.Linear(before, after), nn.Tanh()]
        super().__init__(*layers[:-1])

    def __getitem__(self, index: Any) -> Any:
        # torch makes a slice with the class of the whole.
        chosen = list(self)[index]
        return nn.Sequential(*chosen) if isinstance(index, slice) else chosen


class GaussianMLP(nn.Module):  # type: ignore[misc]
    """A normal distribution over actions: an :class:`MLP` gives the means.

    Args:
        inputs: quantities of an observation.
        outputs: quantities of an action.
        hidden: widths of the layers between.
        log_std: natural logarithm of the first deviation. Deviations are learned, and are the same
            for every observation.
    """

    def __init__(
        self, inputs: int, outputs: int, hidden: Sequence[int] = (64, 64), log_std: float = 0.0
    ) -> None:
        super().__init__()
        self.mean = MLP(inputs, outputs, hidden)
        self.log_std = nn.Parameter(torch.full((outputs,), float(log_std), device=None))

    def forward(self, observation: torch.Tensor) -> torch.distributions.Distribution:
        normal = torch.distributions.Normal(self.mean(observation), self.log_std.exp())
        return torch.distributions.Independent(normal, 1)


@dataclass
class Network:
    """The tensors of a policy that Rust can run, by the names that Rust has for them.

    Attributes:
        inputs: quantities of an observation.
        outputs: what the last layer has.
        has_deviations: whether actions are drawn from a normal distribution.
    """

    inputs: int
    outputs: int
    has_deviations: bool
    tensors: list[tuple[str, Any, tuple[int, ...]]]

    @staticmethod
    def of(policy: Any) -> Network | None:
        """The network that a policy is; None if a call of the policy may do anything else."""
        if torch.is_autocast_enabled("cpu") or has_global_hooks():
            return None
        if type(policy) is not GaussianMLP:
            return _of_layers(policy)
        network = _of_layers(policy.mean)
        deviations = policy._parameters.get("log_std")
        if network is None or not is_plain(policy) or type(deviations) is not nn.Parameter:
            return None
        network.has_deviations = True
        network.tensors.append(("actor.log_std", deviations, (network.outputs,)))
        return network

    def places(self) -> list[tuple[str, int, int]] | None:
        """Name, address and count of each tensor now; None if one is of another kind."""
        places = []
        for name, tensor, shape in self.tensors:
            if tensor.dtype != torch.float32 or tensor.shape != shape or not has_plain_memory(tensor):
                return None
            places.append((name, tensor.data_ptr(), tensor.numel()))
        return places

    def multiplications(self) -> int:
        """About how many one observation takes."""
        return sum(tensor.numel() for _, tensor, _ in self.tensors)


def _of_layers(policy: Any) -> Network | None:
    if type(policy) not in (MLP, nn.Sequential) or not is_plain(policy):
        return None
    layers = list(policy)
    linears = layers[::2]
    if not linears or len(layers) % 2 == 0:
        return None
    kinds = [nn.Linear, nn.Tanh] * len(linears)
    for layer, kind in zip(layers, kinds, strict=False):
        if type(layer) is not kind or not is_plain(layer):
            return None
    tensors: list[tuple[str, Any, tuple[int, ...]]] = []
    width = linears[0].in_features
    for index, layer in enumerate(linears):
        shape = (layer.out_features, width)
        for name, expected in (("weight", shape), ("bias", shape[:1])):
            tensor = layer._parameters.get(name)
            if type(tensor) is not nn.Parameter or tensor.shape != expected:
                return None
            tensors.append((f"actor.{index}.{name}", tensor, expected))
        width = layer.out_features
    return Network(linears[0].in_features, width, False, tensors)


def is_plain(module: nn.Module, is_free: Callable[[Any], bool] = _guard.is_hook) -> bool:
    """Whether a call of the module is its class's forward: its hooks are such that change nothing, as a
    guard's."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return "forward" not in vars(module) and all(is_free(hook) for hook in hooks)


def has_global_hooks() -> bool:
    """Whether there are hooks of all modules."""
    of_all = nn.modules.module
    return bool(of_all._global_forward_pre_hooks or of_all._global_forward_hooks)
