"""Models of transformers, made from a configuration and weights in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weightsync.snapshot import Snapshot

GENERATION = "generation_config.json"


def made(cls: type[Any], files: Mapping[str, bytes], found: Snapshot, settings: Mapping[str, Any]) -> Any:
    """A model of this class with the weights of a snapshot."""
    import torch
    from transformers import AutoConfig, GenerationConfig

    with tempfile.TemporaryDirectory(prefix="weightsync-") as directory:
        for name, data in files.items():
            (Path(directory) / name).write_bytes(data)
        config = AutoConfig.from_pretrained(directory)
        if hasattr(cls, "from_config"):
            # One of the Auto classes, which take no weights from memory: they say which class it is.
            with torch.device("meta"):
                cls = type(cls.from_config(config))  # type: ignore[attr-defined]
        # The model's own memory: a snapshot is read-only.
        weights = {name: tensor.clone() for name, tensor in found.tensors().items()}
        model = cls.from_pretrained(None, config=config, state_dict=weights, **settings)
        if GENERATION in files and model.can_generate():
            model.generation_config = GenerationConfig.from_pretrained(directory)
    return model
