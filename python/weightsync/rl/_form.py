"""How TensorDicts of frames lie in a batch's columns.

Workers that collect TensorDicts write the same shared memory as others: a column for each tensor.
The *form* says how the TensorDict is put together again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection

from weightsync.errors import CorruptError
from weightsync.rl._columns import POLICY_VERSION, TRAJ_IDS, Column, Key

#: What numpy has no dtype for lies in memory as these.
_AS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


@dataclass(frozen=True)
class Form:
    """The form of one frame of each environment.

    Attributes:
        batch: the shape of the environments, such as ``(8,)``; ``()`` for one.
        leaves: the dtype of each tensor, and the device where that is not the CPU.
        inner: the dimensions of inner TensorDicts after those of the frames.
        device: the device that batches name.
        is_dynamic: whether frames travel on their own: their shapes change, or not all are tensors.
        has_ids: whether frames have the numbers of their trajectories.
    """

    batch: tuple[int, ...]
    leaves: Mapping[Key, tuple[str, str | None]]
    inner: Mapping[Key, tuple[int, ...]]
    device: str | None
    is_dynamic: bool
    has_ids: bool

    @staticmethod
    def of(
        template: TensorDictBase, batch: Sequence[int], is_dynamic: bool, has_ids: bool
    ) -> tuple[Form, list[Column]]:
        """The form of frames like this one, and the columns."""
        dims = len(batch)
        leaves: dict[Key, tuple[str, str | None]] = {}
        inner: dict[Key, tuple[int, ...]] = {}
        columns = [Column(TRAJ_IDS, "int64", ()), Column(POLICY_VERSION, "int64", ())]
        for key, value in _walk((), {} if is_dynamic else template):
            if is_tensor_collection(value):
                inner[key] = tuple(value.batch_size[dims:])
            elif key != TRAJ_IDS:
                device = None if value.device.type == "cpu" else str(value.device)
                leaves[key] = (str(value.dtype).removeprefix("torch."), device)
                columns.append(Column(key, _in_memory(value.dtype), tuple(value.shape[dims:])))
        device = None if template.device is None else str(template.device)
        return Form(tuple(batch), leaves, inner, device, is_dynamic, has_ids), columns

    def to_json(self) -> dict[str, Any]:
        return {
            "batch": self.batch,
            "leaves": [[list(key), *kind] for key, kind in self.leaves.items()],
            "inner": [[list(key), list(size)] for key, size in self.inner.items()],
            "device": self.device,
            "is_dynamic": self.is_dynamic,
            "has_ids": self.has_ids,
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Form:
        try:
            form = Form(
                tuple(map(int, value["batch"])),
                {tuple(key): (str(dtype), device) for key, dtype, device in value["leaves"]},
                {tuple(key): tuple(map(int, size)) for key, size in value["inner"]},
                value["device"],
                bool(value["is_dynamic"]),
                bool(value["has_ids"]),
            )
            for dtype, device in form.leaves.values():
                _dtype(dtype)
                if device is not None:
                    torch.device(device)
            return form
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CorruptError(f"a worker sent what is no form of frames: {error}") from error

    def check(self, columns: Iterable[Column], num_envs: int) -> None:
        """Refuses a form that does not go with these columns.

        Raises:
            CorruptError: if a tensor has no column, or one of another size.
        """
        known = {one.key: np.dtype(one.dtype).itemsize for one in columns}
        for key, (dtype, _) in self.leaves.items():
            if known.get(key) != _dtype(dtype).itemsize:
                raise CorruptError(f"a form of frames with {key!r:.80}, which no column holds")
        if math.prod(self.batch) != num_envs or min(self.batch, default=1) < 1:
            raise CorruptError(f"a form of {self.batch!r:.80} environments, and there are {num_envs}")

    def on_host(self) -> Form:
        """The form of the same frames in this host's memory."""
        leaves = {key: (dtype, None) for key, (dtype, _) in self.leaves.items()}
        device = None if self.device is None else "cpu"
        return replace(self, leaves=leaves, device=device)

    def tensordict(self, views: Mapping[Key, np.ndarray], dims: Sequence[int]) -> TensorDict:
        """A TensorDict of these dimensions on this memory, with all that the frames show."""
        values: dict[Key, Any] = {}
        for key, (dtype, device) in self.leaves.items():
            view = views[key]
            tensor = torch.from_numpy(view).view(_dtype(dtype))
            # The dimensions of the frames in memory: workers, environments, time.
            tensor = tensor.reshape(*dims, *tensor.shape[self._dims_of(views) :])
            values[key] = tensor if device is None else tensor.to(device)
        if self.has_ids and TRAJ_IDS in views:
            values[TRAJ_IDS] = torch.from_numpy(views[TRAJ_IDS]).reshape(*dims)
        return self._nested(values, dims)

    @staticmethod
    def _dims_of(views: Mapping[Key, np.ndarray]) -> int:
        return views[POLICY_VERSION].ndim

    def _nested(self, values: Mapping[Key, Any], dims: Sequence[int]) -> TensorDict:
        tree: dict[str, Any] = {}
        for key in self.inner:
            _at(tree, key)
        for key, value in values.items():
            _at(tree, key[:-1])[key[-1]] = value
        return self._made((), tree, list(dims))

    def _made(self, key: Key, tree: Mapping[str, Any], dims: list[int]) -> TensorDict:
        values = {
            name: self._made((*key, name), one, dims) if isinstance(one, dict) else one
            for name, one in tree.items()
        }
        size = [*dims, *self.inner.get(key, ())]
        return TensorDict(values, batch_size=size, device=self.device)


def _at(tree: dict[str, Any], key: Iterable[str]) -> dict[str, Any]:
    for name in key:
        tree = tree.setdefault(name, {})
    return tree


def _walk(prefix: Key, values: Any) -> Iterable[tuple[Key, Any]]:
    for name, value in values.items():
        if name.startswith("_"):
            # As in TorchRL, names that begin so are private.
            continue
        yield (*prefix, name), value
        if is_tensor_collection(value):
            yield from _walk((*prefix, name), value)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no dtype {name!r:.40}")
    return found


def _in_memory(dtype: torch.dtype) -> str:
    """numpy's name of a dtype, or of one that takes as many bytes."""
    try:
        return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype.name
    except TypeError:
        return _AS[dtype.itemsize]
