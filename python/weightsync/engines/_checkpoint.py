"""Which tensors an engine's model has in its checkpoint, and whether what was sent fits."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterable
from typing import Any

from weightsync import _dtypes, _files
from weightsync.errors import WrongWeightsError

#: Names, and for each its dtype, as safetensors calls it, and shape.
Tensors = dict[str, tuple[str, tuple[int, ...]]]

# A header of safetensors may not be larger.
_LARGEST_HEADER = 100 * 1024 * 1024
# How many differences a message lists of each kind.
_LISTED = 5


class Checkpoint:
    """The checkpoint of an engine's model. Looking at it reads headers and configurations alone.

    A module of transformers may have its tensors in another form than its checkpoint: the experts
    of a layer are one tensor in memory and many in the file. Both forms fit; the engine is given
    the checkpoint's.

    Args:
        config: the model's configuration, of transformers.
        model: the checkpoint's folder, or its name in the Hugging Face cache.
        revision: of that name.
    """

    def __init__(self, config: Any, model: str, revision: str | None) -> None:
        self._config = config
        self._files = _of_folder(model, revision)
        self._module: Any = None
        self._looked = False

    def compare(self, what: str, sent: Tensors) -> bool:
        """Compares what was sent with the model, by name, shape and kind of number.

        True if it has the form that the model has in memory, and not the checkpoint's.

        Raises:
            WrongWeightsError: listing what differs.
        """
        wrong = None if self._files is None else _differences(sent, self._files, self._config)
        if wrong == []:
            return False
        if (module := self._transformers()) is not None:
            in_memory = {
                name: _dtypes.of_tensor(name, tensor)
                for name, tensor in module.state_dict().items()
            }
            others = _differences(sent, in_memory, self._config)
            if not others:
                return True
            wrong = others if wrong is None else wrong
        # Where neither says, the engine's own loader has the word.
        if wrong:
            raise WrongWeightsError(f"{what} is not this engine's model: " + "; ".join(wrong))
        return False

    def of_memory(self, tensors: Iterable[tuple[str, Any]]) -> Iterable[tuple[str, Any]]:
        """Tensors of the form in memory, in the checkpoint's form."""
        try:
            from transformers.core_model_loading import revert_weight_conversion
        except ImportError:
            # Before transformers 5 the two forms are one.
            return tensors
        given = dict(tensors)
        return revert_weight_conversion(self._transformers(), given).items()

    def _transformers(self) -> Any:
        """What transformers makes of the configuration, without memory; None if it cannot."""
        if not self._looked:
            self._looked = True
            try:
                import torch
                from transformers import AutoModelForCausalLM

                with torch.device("meta"):
                    self._module = AutoModelForCausalLM.from_config(self._config)
            except Exception:
                self._module = None
        return self._module


def _differences(sent: Tensors, expected: Tensors, config: Any) -> list[str]:
    """How what was sent differs from what is expected, in words."""
    tied = {"lm_head.weight"} if getattr(config, "tie_word_embeddings", False) else set()
    missing = [name for name in expected if name not in sent and name not in tied]
    unknown = [name for name in sent if name not in expected and name not in tied]
    both = [(name, sent[name], expected[name]) for name in sent if name in expected]
    shapes = [
        f"{name} is {list(got[1])} and should be {list(want[1])}"
        for name, got, want in both
        if got[1] != want[1]
    ]
    # Engines cast between floating-point dtypes.
    dtypes = [
        f"{name} is {got[0]} and should be {want[0]}"
        for name, got, want in both
        if _is_floating(got[0]) != _is_floating(want[0])
    ]
    kinds = (
        ("missing:", missing),
        ("not in the model:", unknown),
        ("another shape:", shapes),
        ("another dtype:", dtypes),
    )
    return [f"{what} {_some(names)}" for what, names in kinds if names]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _is_floating(dtype: str) -> bool:
    return dtype.startswith(("F", "BF"))


def _of_folder(folder: str, revision: str | None) -> Tensors | None:
    """What the checkpoint's files have; None if they are not there or not safetensors."""
    if not os.path.isdir(folder):
        folder = _cached(folder, revision) or folder
    files = sorted(glob.glob(os.path.join(glob.escape(folder), "*.safetensors")))
    index = os.path.join(folder, "model.safetensors.index.json")
    try:
        if os.path.isfile(index):
            listed = set(json.loads(_files.read(index, _LARGEST_HEADER))["weight_map"].values())
            files = [file for file in files if os.path.basename(file) in listed]
        found: Tensors = {}
        for file in files:
            found.update(_header(file))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # The engine has loaded the checkpoint in a way of its own.
        return None
    return found or None


def _header(file: str) -> Tensors:
    with _files.opened(file) as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > _LARGEST_HEADER:
            raise ValueError(f"{file}: its header has {length} bytes")
        header = json.loads(opened.read(length))
    return {
        name: (one["dtype"], tuple(one["shape"]))
        for name, one in header.items()
        if name != "__metadata__"
    }


def _cached(model: str, revision: str | None) -> str | None:
    """Where the Hugging Face cache has a model; nothing is downloaded."""
    try:
        from huggingface_hub import snapshot_download

        return str(snapshot_download(model, revision=revision, local_files_only=True))
    except Exception:
        return None
