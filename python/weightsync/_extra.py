"""Extra state: what modules keep beside their tensors.

Plain data travels as it is; tensors inside it travel as tensors, and leave a mark
where they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightsync import _dtypes

# The last part of the names under which they travel.
NAME = "__extra_state__"
TENSORS = "__extra_tensors__"

# torch's own word in state dicts.
TORCH_NAME = "_extra_state"

_MARK = "__tensor__"


def joined(prefix: str, name: str) -> str:
    """A dotted name; the root module's prefix is empty."""
    return f"{prefix}.{name}" if prefix else name


def split(prefix: str, state: Any) -> tuple[Any, dict[str, Any]]:
    """The plain part of a state, and its tensors by the names they travel under."""
    tensors: dict[str, Any] = {}

    def walk(value: Any, path: str) -> Any:
        if _dtypes.is_tensor(value) or _dtypes.is_array(value):
            name = f"{joined(prefix, TENSORS)}.{len(tensors)}"
            tensors[name] = value
            kind = "array" if _dtypes.is_array(value) else "tensor"
            return {_MARK: [kind, name.rpartition(".")[2]]}
        if _dtypes.is_tensordict(value):
            return walk(value.to_dict(), path)
        if isinstance(value, Mapping):
            return {key: walk(item, f"{path}[{key!r}]") for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [walk(item, f"{path}[{at}]") for at, item in enumerate(value)]
        return value

    return walk(state, prefix), tensors


def join(prefix: str, state: Any, tensor_of: Any) -> Any:
    """The state again; ``tensor_of(name, kind)`` gives each tensor of its own."""

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            mark = value.get(_MARK)
            if isinstance(mark, list) and len(value) == 1:
                kind, at = mark
                return tensor_of(f"{joined(prefix, TENSORS)}.{at}", kind)
            return {key: walk(item) for key, item in value.items()}
        if isinstance(value, list):
            return [walk(item) for item in value]
        return value

    return walk(state)


def is_extra(name: str) -> bool:
    """Whether a tensor of that name is (part of) an extra state."""
    parts = name.split(".")
    return parts[-1] == NAME or TENSORS in parts[-2:-1]
