"""TorchRL's strategies, and the forms in which they have weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict import TensorDict
from torchrl.weight_update import WeightStrategy

from weightsync import _extra

_EXTRACT, _APPLY = WeightStrategy.extract_weights, WeightStrategy.apply_weights


def extracts(strategy: Any) -> bool:
    """Whether a strategy overrides how weights are extracted."""
    return type(strategy).extract_weights is not _EXTRACT


def applies(strategy: Any) -> bool:
    """Whether a strategy overrides how weights are applied."""
    return type(strategy).apply_weights is not _APPLY


def formatted(weights: dict[str, Any], strategy: str) -> Any:
    """Weights by dotted names in the form that a strategy of TorchRL would have extracted.

    A state dict has extra states under torch's names. A TensorDict has the extra state of the
    model itself alone.
    """
    tensors, states = {}, {}
    for name, value in weights.items():
        prefix, _, last = name.rpartition(".")
        if last == _extra.NAME:
            states[prefix] = value
        else:
            tensors[name] = value
    if strategy == "state_dict":
        named = {_extra.joined(prefix, _extra.TORCH_NAME): one for prefix, one in states.items()}
        return tensors | named
    found = TensorDict(tensors, batch_size=[]).unflatten_keys(".")
    if isinstance(states.get(""), Mapping):
        found[_extra.NAME] = TensorDict(states[""])
    return found
