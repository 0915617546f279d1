"""Values that travel from a worker to its trainer: numbers, texts, tensors, and containers of these.

A value is a description in JSON, followed by the bytes of its tensors. Reading one executes
nothing: what has no place in such a description is refused where it is written.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from weightsync._memory import flat_bytes
from weightsync.errors import CorruptError, WrongTypeError
from weightsync.rl._crew import answered_error
from weightsync.rl._worker import kind_of

_ALIGNMENT = 64

#: The bytes of the length that comes first.
_LENGTH = 8

_DTYPES = {str(one).removeprefix("torch."): one for one in vars(torch).values() if isinstance(one, torch.dtype)}


def write(value: Any) -> int:
    """A memory file that holds the value; returns its descriptor.

    Raises:
        WrongTypeError: naming the type that does not travel, and where it is.
    """
    buffers: list[np.ndarray] = []
    end = 0

    def place(tensor: torch.Tensor) -> list[Any]:
        nonlocal end
        whole = flat_bytes(tensor.cpu())
        at, size = end, whole.numel()
        buffers.append(whole.numpy())
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), at]

    head = json.dumps(_describe(value, place, "the value")).encode()
    begin = -(-(_LENGTH + len(head)) // _ALIGNMENT) * _ALIGNMENT
    fd = os.memfd_create("weightsync-value", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, begin + end)
        with mmap.mmap(fd, begin + end) as memory:
            memory[:_LENGTH] = len(head).to_bytes(_LENGTH, "little")
            memory[_LENGTH : _LENGTH + len(head)] = head
            at = begin
            for one in buffers:
                memory[at : at + one.nbytes] = one.tobytes()
                at += -(-one.nbytes // _ALIGNMENT) * _ALIGNMENT
    except BaseException:
        os.close(fd)
        raise
    return fd


def read(fd: int) -> Any:
    """The value that a memory file holds; its tensors lie there. Closes the descriptor.

    Raises:
        CorruptError: if the file holds no value.
    """
    try:
        memory = mmap.mmap(fd, os.fstat(fd).st_size, flags=mmap.MAP_PRIVATE)
    except (OSError, ValueError) as error:
        raise CorruptError(f"a worker sent a value that cannot be read: {error}") from error
    finally:
        os.close(fd)
    try:
        length = int.from_bytes(memory[:_LENGTH], "little")
        tree = json.loads(memory[_LENGTH : _LENGTH + length])
        begin = -(-(_LENGTH + length) // _ALIGNMENT) * _ALIGNMENT

        def find(dtype: str, shape: list[int], at: int) -> torch.Tensor:
            kind, count = _DTYPES[dtype], math.prod(shape)
            if not count:
                return torch.empty(shape, dtype=kind, device="cpu")
            if at < 0 or min(shape, default=0) < 0:
                raise ValueError(f"a tensor at {at} with the shape {shape}")
            return torch.frombuffer(memory, dtype=kind, count=count, offset=begin + at).reshape(shape)

        return _restore(tree, find)
    except (ValueError, TypeError, LookupError, RecursionError, RuntimeError) as error:
        raise CorruptError(f"a worker sent what is no value: {error}") from error


def _describe(value: Any, place: Callable[[torch.Tensor], list[Any]], where: str) -> list[Any]:
    def inner(one: Any, name: Any) -> list[Any]:
        return _describe(one, place, f"{where}[{name!r}]")

    if value is None or isinstance(value, (bool, int, float, str)):
        return ["value", value]
    if isinstance(value, torch.Tensor):
        return ["tensor", *place(value)]
    if isinstance(value, np.ndarray):
        return ["array", *place(torch.from_numpy(value))]
    if isinstance(value, np.generic):
        return ["value", value.item()]
    if isinstance(value, NonTensorStack):
        parts = [inner(one, at) for at, one in enumerate(value.tensordicts)]
        return ["words", value.stack_dim, parts]
    if isinstance(value, NonTensorData):
        return ["word", list(value.batch_size), inner(value.data, "data")]
    if isinstance(value, LazyStackedTensorDict):
        parts = [inner(one, at) for at, one in enumerate(value.tensordicts)]
        return ["lazy", value.stack_dim, parts]
    if isinstance(value, TensorDictBase):
        items = [[key, inner(value.get(key), key)] for key in value.keys()]
        device = None if value.device is None else str(value.device)
        return ["tensordict", list(value.batch_size), device, items]
    if isinstance(value, Mapping):
        items = [[inner(key, key), inner(one, key)] for key, one in value.items()]
        return ["ordered" if isinstance(value, OrderedDict) else "dict", items]
    if isinstance(value, torch.Size):
        return ["size", list(value)]
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [inner(one, at) for at, one in enumerate(value)]]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    if isinstance(value, BaseException):
        return ["error", kind_of(value), str(value)]
    raise WrongTypeError(
        f"{where} is a {type(value).__name__}, which does not travel from a worker: expected "
        "numbers, texts, tensors, TensorDicts, or containers of these"
    )


def _restore(node: list[Any], find: Callable[..., torch.Tensor]) -> Any:
    kind, *rest = node
    if kind == "value":
        return rest[0]
    if kind == "tensor":
        return find(*rest)
    if kind == "array":
        return find(*rest).numpy()
    if kind == "words":
        return NonTensorStack(*(_restore(one, find) for one in rest[1]), stack_dim=rest[0])
    if kind == "word":
        return NonTensorData(_restore(rest[1], find), batch_size=rest[0])
    if kind == "lazy":
        parts = [_restore(one, find) for one in rest[1]]
        return LazyStackedTensorDict(*parts, stack_dim=rest[0])
    if kind == "tensordict":
        size, device, items = rest
        values = {key: _restore(one, find) for key, one in items}
        return TensorDict(values, batch_size=size, device=device)
    if kind in ("dict", "ordered"):
        pairs = [(_restore(key, find), _restore(one, find)) for key, one in rest[0]]
        return OrderedDict(pairs) if kind == "ordered" else dict(pairs)
    if kind == "size":
        return torch.Size(rest[0])
    if kind in ("list", "tuple"):
        parts = [_restore(one, find) for one in rest[0]]
        return parts if kind == "list" else tuple(parts)
    if kind == "device":
        return torch.device(rest[0])
    if kind == "dtype":
        return _DTYPES[rest[0]]
    if kind == "error":
        return answered_error(*rest)
    raise ValueError(f"no kind {kind!r:.40}")
