"""The base model's weights with a LoRA added."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from weightsync.errors import SettingError, UnsupportedError, WrongTypeError, WrongWeightsError
from weightsync.lora._adapters import PLAIN_VARIANTS

_PREFIX = "base_model.model."


def merged(
    weights: Any,
    *,
    alpha: float | None = None,
    r: int | None = None,
    adapter: str = "default",
    fan_in_fan_out: bool | None = None,
) -> dict[str, Any]:
    """The base model's weights with a LoRA added: ``W + (alpha / r) * B @ A``.

    Give it to ``Sender(…)`` and to each ``send(weights=…)``. The names are the base model's.
    Weights without LoRA are the model's own tensors; the others are new ones, of the same
    dtype, computed in float32 (float64 for float64) and rounded once.

    Args:
        weights: a PEFT model, or its state dict. A state dict does not say whether it is merged
            already, nor what its configuration is: give a model if you have one.
        alpha: LoRA's alpha. A PEFT model's own scaling is used without it; a state dict
            needs it.
        r: the rank, if it is not that of the ``lora_A``.
        adapter: the adapter's name in the model.
        fan_in_fan_out: whether the adapted weights lie transposed, as GPT-2's ``Conv1D`` has
            them. A model says it of each layer; a state dict does not, so ``False`` is taken.

    Raises:
        UnsupportedError: for what has another result than the sum: DoRA and other variants,
            aLoRA, LoRA on embeddings and convolutions, LoRA with a bias, trained tokens, base
            weights that are quantised, and layers that are merged already.
    """
    import torch

    modules: dict[str, Any] = {}
    tensors = weights
    if not isinstance(weights, Mapping):
        if not hasattr(weights, "named_modules"):
            raise WrongTypeError(
                f"expected a PEFT model or its state dict, got {type(weights).__name__}"
            )
        modules = dict(weights.named_modules())
        tensors = weights.state_dict()
        _check_mergeable(weights, modules, adapter)
    made: dict[str, Any] = {}
    originals: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        if ".trainable_tokens_" in name:
            raise UnsupportedError(f"{name} cannot be merged: train without trainable_token_indices")
        if lora := re.fullmatch(rf"(.*)\.(lora_[A-Za-z_]+)\.{re.escape(adapter)}(?:\.(.+))?", name):
            of, kind, end = lora.groups()
            if kind not in ("lora_A", "lora_B") or end != "weight" or tensor.ndim != 2:
                raise UnsupportedError(f"{name} cannot be merged: LoRA of linear layers can")
            parts.setdefault(of, {})[kind] = tensor
        elif ".lora_" in name:
            continue
        elif ".original_module." in name:
            own = name.removeprefix(_PREFIX).replace(".original_module.", ".")
            originals[own] = tensor
        elif (own := _base_name(name, adapter)) is not None:
            made[own] = tensor
    if not parts:
        raise WrongWeightsError(f"there are no tensors of the adapter {adapter!r}")
    # What only another adapter has trained whole.
    for name, tensor in originals.items():
        made.setdefault(name, tensor)
    for of, pair in parts.items():
        base = _base_name(f"{of}.weight", adapter) or of
        if missing := {"lora_A", "lora_B"} - pair.keys():
            raise WrongWeightsError(f"{of} lacks {missing.pop()}.{adapter}.weight")
        if base not in made:
            raise WrongWeightsError(f"{of} lacks base_layer.weight")
        module = modules.get(of)
        scaling = _scaling(of, pair["lora_A"], module, alpha, r, adapter)
        weight = made[base].detach()
        if weight.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            raise UnsupportedError(
                f"{base} is {weight.dtype} and cannot be merged: expected float64, float32, "
                "float16 or bfloat16, so load the base model without quantisation"
            )
        exact = torch.float64 if weight.dtype == torch.float64 else torch.float32
        change = pair["lora_B"].detach().to(exact) @ pair["lora_A"].detach().to(exact)
        transposed = fan_in_fan_out
        if transposed is None:
            transposed = getattr(module, "fan_in_fan_out", False)
        if transposed:
            change = change.T
        if change.shape != weight.shape:
            raise WrongWeightsError(
                f"{base} is {list(weight.shape)} and B @ A is {list(change.shape)}"
            )
        made[base] = (weight.to(exact) + scaling * change).to(weight.dtype)
    return made


def _check_mergeable(model: Any, modules: Mapping[str, Any], adapter: str) -> None:
    """What a PEFT model says of itself, and its tensors do not."""
    config = (getattr(model, "peft_config", None) or {}).get(adapter)
    if getattr(config, "alora_invocation_tokens", None):
        raise UnsupportedError(
            f"the adapter {adapter!r} is an aLoRA, which acts on some tokens alone and cannot be "
            "merged: send it alone, with adapter_of"
        )
    if getattr(config, "trainable_token_indices", None):
        raise UnsupportedError(
            f"the adapter {adapter!r} has trainable_token_indices and cannot be merged: "
            "train without"
        )
    if getattr(config, "target_parameters", None):
        raise UnsupportedError(
            f"the adapter {adapter!r} has target_parameters, which cannot be merged: send it "
            "alone, with adapter_of"
        )
    for name, module in modules.items():
        if not hasattr(module, "lora_A"):
            continue
        if getattr(module, "merged", False):
            raise UnsupportedError(
                f"{name} is merged already, and would get its LoRA twice: call the model's "
                "unmerge_adapter() before"
            )
        variant = getattr(module, "lora_variant", {}).get(adapter)
        if variant is not None and type(variant).__name__ not in PLAIN_VARIANTS:
            raise UnsupportedError(
                f"{name} has a LoRA of the kind {type(variant).__name__}, which cannot be merged: "
                "expected plain LoRA or rsLoRA"
            )


def _scaling(
    of: str, low: Any, module: Any, alpha: float | None, r: int | None, adapter: str
) -> float:
    if alpha is not None:
        return float(alpha / (r or low.shape[0]))
    known = getattr(module, "scaling", None)
    if not isinstance(known, Mapping) or adapter not in known:
        raise SettingError(f"alpha is missing: nothing says how {of} is scaled")
    return float(known[adapter])


def _base_name(name: str, adapter: str) -> str | None:
    """The base model's name of a tensor, or None for one that it does not have."""
    name = name.removeprefix(_PREFIX)
    if saved := re.fullmatch(r"(.*)\.modules_to_save\.([^.]+)\.(.*)", name):
        return f"{saved[1]}.{saved[3]}" if saved[2] == adapter else None
    return name.replace(".base_layer.", ".")
