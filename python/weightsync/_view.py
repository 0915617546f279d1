"""A version's tensors: torch's or numpy's, over the memory of a snapshot."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from weightsync import _dtypes, _extra
from weightsync._native import Snapshot
from weightsync._torch import without_threads
from weightsync.errors import UnsupportedError, WrongTypeError


class View:
    """A snapshot's tensors one by one, so that a dtype matters only once it is asked for."""

    def __init__(self, snapshot: Snapshot, *, quiet: bool = False) -> None:
        self._snapshot = snapshot
        # Without `quiet` a warning names what this process has written when it is dropped.
        self._view = snapshot.view(quiet)
        self.places = {place[0]: place[1:] for place in snapshot.places()}
        self.ties = dict(snapshot.ties)

    def tensor(self, name: str) -> Any:
        import torch

        dtype, sizes, offset, length = self.places[self.ties.get(name, name)]
        with naming(name):
            own = _dtypes.torch_dtype(dtype)
            shape = _dtypes.torch_shape(dtype, tuple(sizes))
        if not length:
            return torch.empty(shape, dtype=own, device="cpu")
        count = length // own.itemsize
        return torch.frombuffer(self._view, dtype=own, count=count, offset=offset).view(shape)

    def array(self, name: str) -> Any:
        try:
            import numpy as np
        except ImportError:
            raise UnsupportedError(
                "neither torch nor numpy is installed here, so tensors cannot be looked at: "
                "install one of them, or save_safetensors"
            ) from None

        dtype, shape, offset, length = self.places[self.ties.get(name, name)]
        with naming(name):
            own = _dtypes.numpy_dtype(dtype)
        if not length:
            return np.empty(shape, dtype=own)
        count = length // own.itemsize
        view: Any = self._view
        return np.frombuffer(view, dtype=own, count=count, offset=offset).reshape(shape)

    def extra_state(self, prefix: str) -> Any:
        """The extra state of a module, with tensors of its own."""
        state = self._snapshot.extra_state(_extra.joined(prefix, _extra.NAME))
        return _extra.join(prefix, state, self._copy)

    def extra_states(self) -> Iterator[tuple[str, Any]]:
        """Each extra state by its module."""
        for name in self._snapshot.extra_states:
            prefix = _extra.prefix_of(name)
            yield prefix, self.extra_state(prefix)

    def all(
        self, one: Callable[[str], Any], wanted: Callable[[str], bool] = lambda _: True
    ) -> dict[str, Any]:
        """The wanted tensors by name; a tied tensor under each of its names."""
        found = {name: one(name) for name in self.places if wanted(name)}
        return found | {alias: found[of] for alias, of in self.ties.items() if wanted(alias)}

    def _copy(self, name: str, kind: str) -> Any:
        # Not by way of torch, whose bfloat16 and float8 cannot become arrays.
        is_array = kind == "array" or not _dtypes.has_torch()
        if is_array:
            return self.array(name).copy()
        with without_threads():
            return self.tensor(name).clone()


def states_of(snapshot: Snapshot) -> dict[str, str]:
    """The names of a snapshot's extra states in torch's state dicts, and their modules."""
    prefixes = [_extra.prefix_of(name) for name in snapshot.extra_states]
    return {_extra.joined(prefix, _extra.TORCH_NAME): prefix for prefix in prefixes}


def weights_of(snapshot: Snapshot) -> dict[str, Any]:
    """Torch tensors over a snapshot and its extra states, by name."""
    view = View(snapshot)
    found = view.all(view.tensor, lambda name: not _extra.is_extra(name))
    for prefix, state in view.extra_states():
        found[_extra.joined(prefix, _extra.NAME)] = state
    return found


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Names the tensor in an error."""
    try:
        yield
    except WrongTypeError as error:
        raise WrongTypeError(f"tensor {name!r}: {error}") from None
