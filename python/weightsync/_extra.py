"""Extra state: data that modules keep in addition to their tensors.

Plain data travels as it is. Tensors in it travel as tensors, and a mark takes the place of
each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightsync import _dtypes

# The last part of an extra state's name, and the part before the number of each of its tensors.
NAME = "__extra_state__"
TENSORS = "__extra_tensors__"

# The last part of an extra state's name in torch's state dicts.
TORCH_NAME = "_extra_state"

_MARK = "__tensor__"


def joined(prefix: str, name: str) -> str:
    """A dotted name; the root module's prefix is empty."""
    return f"{prefix}.{name}" if prefix else name


def split(prefix: str, state: Any) -> tuple[Any, dict[str, Any]]:
    """The plain part of a state, and its tensors by the names under which they travel."""
    tensors: dict[str, Any] = {}
    return _plain(state, joined(prefix, TENSORS), tensors), tensors


# Not nested functions: a nested function that calls itself is a reference cycle, which would
# keep a version or a model's tensors until the garbage collector runs.


def _plain(value: Any, within: str, tensors: dict[str, Any]) -> Any:
    if _dtypes.is_tensor(value) or _dtypes.is_array(value):
        at = str(len(tensors))
        tensors[f"{within}.{at}"] = value
        return {_MARK: ["array" if _dtypes.is_array(value) else "tensor", at]}
    if _dtypes.is_tensordict(value):
        value = value.to_dict()
    if isinstance(value, Mapping):
        # A state that has travelled has its keys in order. Its tensors have the same numbers then.
        keys = sorted(value, key=str)
        return {key: _plain(value[key], within, tensors) for key in keys}
    if isinstance(value, (list, tuple)):
        return [_plain(item, within, tensors) for item in value]
    return value


def join(prefix: str, state: Any, tensor_of: Any) -> Any:
    """The whole state again; ``tensor_of(name, kind)`` returns each tensor in it."""
    return _whole(state, joined(prefix, TENSORS), tensor_of)


def _whole(value: Any, within: str, tensor_of: Any) -> Any:
    if isinstance(value, dict):
        mark = value.get(_MARK)
        if isinstance(mark, list) and len(value) == 1:
            kind, at = mark
            return tensor_of(f"{within}.{at}", kind)
        return {key: _whole(item, within, tensor_of) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item, within, tensor_of) for item in value]
    return value


def prefix_of(name: str) -> str:
    """The module whose extra state, or a part of it, has this name."""
    parts = name.split(".")
    return ".".join(parts[: -2 if parts[-2:-1] == [TENSORS] else -1])


def is_extra(name: str) -> bool:
    """Whether a tensor of that name is (part of) an extra state."""
    parts = name.split(".")
    return parts[-1] == NAME or TENSORS in parts[-2:-1]
