"""Models of transformers, made from a configuration and weights in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weightsync import _dtypes
from weightsync.errors import WrongWeightsError
from weightsync.snapshot import Snapshot

GENERATION = "generation_config.json"

#: Settings of a model that a configuration has, too.
_MODELS = ("dtype", "torch_dtype", "quantization_config")

#: As many names as a message has.
_SHOWN = 5


def made(
    cls: type[Any], files: Mapping[str, bytes], found: Snapshot, settings: Mapping[str, Any]
) -> Any:
    """A model of this class with the weights of a snapshot, whose tensors become the model's."""
    import torch
    from transformers import GenerationConfig

    left = dict(settings)
    trusted = left.get("trust_remote_code")
    informed = left.pop("output_loading_info", False)
    ignored = left.pop("ignore_mismatched_sizes", False)
    with tempfile.TemporaryDirectory(prefix="weightsync-") as directory:
        for name, data in files.items():
            (Path(directory) / name).write_bytes(data)
        config = left.pop("config", None)
        if config is None:
            config, left = _config(cls, directory, left)
        if hasattr(cls, "from_config"):
            # One of the Auto classes, which take no weights from memory: they say which class it is.
            code = {} if trusted is None else {"trust_remote_code": trusted}
            with torch.device("meta"):
                cls = type(cls.from_config(config, **code))  # type: ignore[attr-defined]
        # Without `ignore_mismatched_sizes` transformers raises an error that names no weight.
        model, info = cls.from_pretrained(
            None, config=config, state_dict=_weights(found), output_loading_info=True,
            ignore_mismatched_sizes=True, **left,
        )  # fmt: skip
        if GENERATION in files and model.can_generate():
            model.generation_config = GenerationConfig.from_pretrained(directory)
    wrong = list(info["missing_keys"])
    if not ignored:
        wrong += [one[0] for one in info["mismatched_keys"]]
    if wrong:
        named = ", ".join(sorted(wrong)[:_SHOWN]) + (", …" if len(wrong) > _SHOWN else "")
        unknown = ", ".join(sorted(info["unexpected_keys"])[:_SHOWN]) or "none"
        raise WrongWeightsError(
            f"v{found.version} of {found.model} does not fit {cls.__name__}: {len(wrong)} of its weights "
            f"are missing or have another shape ({named}). The version has others that the model has "
            f"not: {unknown}. Save the model itself, and not a wrapper of it"
        )
    return (model, info) if informed else model


def _config(cls: type[Any], directory: str, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The configuration, and the settings that are not of it."""
    from transformers import AutoConfig

    # These are for the model: a configuration would take them as they stand.
    own = {name: settings.pop(name) for name in _MODELS if name in settings}
    # A class of the user's own names the class of its configuration.
    of = getattr(cls, "config_class", None) or AutoConfig
    config, left = of.from_pretrained(directory, return_unused_kwargs=True, **settings)
    return config, {**left, **own}


def _weights(found: Snapshot) -> dict[str, Any]:
    """The tensors by name, each with memory of its own: a model may untie what was tied."""
    weights: dict[str, Any] = {}
    seen: set[int] = set()
    for name, tensor in found.tensors().items():
        # An extra state may be anything.
        is_seen = id(tensor) in seen and _dtypes.is_tensor(tensor)
        weights[name] = tensor.clone() if is_seen else tensor
        seen.add(id(tensor))
    return weights
