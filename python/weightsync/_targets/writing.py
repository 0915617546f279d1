"""What a load may write to: tensors that have memory of their own, and what happens where they share it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from weightsync import _dtypes
from weightsync._memory import address_of, has_address, is_dense, is_hollow, is_sound
from weightsync.errors import UnsupportedError, WrongTypeError, WrongWeightsError


def check_writable(name: str, tensor: Any) -> None:
    """Refuses a tensor or an array of a worker's model that values cannot be written to.

    A tensor on the meta device has no memory yet, and passes: see :func:`check_memory`.

    Args:
        tensor: dense, as :func:`_dtypes.of` has found.

    Raises:
        WrongTypeError: naming it.
    """
    if is_sound(tensor):
        return
    if _dtypes.is_array(tensor):
        if not tensor.flags.writeable:
            raise WrongTypeError(
                f"{name!r} is a read-only array, as of torch tensors or files, and cannot be loaded "
                "into: give the model a copy of it"
            )
        if not tensor.flags.c_contiguous:
            _check_apart(name, tensor.shape, tensor.strides, tensor.itemsize)
        return
    if not tensor.numel():
        return
    if _is_dtensor(tensor):
        raise WrongTypeError(
            f"{name!r} is a DTensor, and this process has a part of it: versions are loaded into whole "
            "tensors; load before the model is sharded, or receive a snapshot and distribute it"
        )
    if tensor.device.type != "meta" and not has_address(tensor):
        raise WrongTypeError(
            f"{name!r} is a {type(tensor).__name__}, which has no memory of its own, and cannot be "
            "loaded into: load into the tensors that it is made of, or before it is made"
        )
    _check_apart(name, tensor.shape, tensor.stride(), 1)
    if is_hollow(tensor):
        raise WrongTypeError(
            f"{name!r} has no memory: its storage was taken away, as FSDP1 does between forwards; "
            "load while the model has its memory"
        )


def check_is_somewhere(name: str, tensor: Any) -> None:
    """Refuses a tensor of a lazy module, or on the meta device: torch writes nothing there, and
    raises no error."""
    if not _dtypes.is_tensor(tensor):
        return
    if _dtypes.is_lazy(tensor) or tensor.device.type == "meta":
        raise WrongTypeError(
            f"{name!r} has no memory yet: give the model memory, or run it once, first"
        )


def check_memory(name: str, tensor: Any) -> None:
    """Refuses a tensor that no values can be copied into, also one that has no memory yet."""
    check_is_somewhere(name, tensor)
    if not is_dense(tensor):
        raise WrongTypeError(
            f"{name!r} is nested, sparse or quantised, and cannot be loaded into: give the model "
            "dense tensors"
        )
    check_writable(name, tensor)


def _check_apart(name: str, shape: Any, strides: Any, size: int) -> None:
    """Refuses a tensor that may have two elements in one place.

    Args:
        size: of an element, in the unit of the strides.
    """
    end = 0
    steps = zip(strides, shape, strict=True)
    for step, length in sorted((abs(step), length) for step, length in steps if length != 1):
        # Each dimension, from the smallest step on, leads beyond what those before it reach.
        if step < end + size:
            raise WrongTypeError(
                f"{name!r} has several elements in one place, as expand and unfold make them, and "
                "cannot be loaded into: give the model a clone of it"
            )
        end += (length - 1) * step


def check_kept(tensors: Iterable[tuple[str, Any]], again: Iterable[tuple[str, Any]]) -> None:
    """Refuses a model that makes its tensors at each look: what is written to them is lost.

    Args:
        tensors: the model's tensors by name, at one look.
        again: the same at another look.

    Raises:
        WrongTypeError: naming one.
    """
    for (name, one), (_, other) in zip(tensors, again, strict=True):
        if one is not other and one.nbytes and address_of(one) != address_of(other):
            raise WrongTypeError(
                f"{name!r} is made again whenever it is asked for, as by a LazyStackedTensorDict, so that "
                "nothing can be loaded into it: give a model that keeps its tensors, such as "
                "`lazy.contiguous()`"
            )


def _is_dtensor(tensor: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


class _Part(NamedTuple):
    """A tensor's place in memory: where its lowest byte is, and what is behind its highest."""

    start: int
    end: int
    #: Where its first element is: an array's strides may be negative.
    first: int
    #: In bytes, as `size`, of an element.
    strides: tuple[int, ...]
    shape: tuple[int, ...]
    size: int
    name: str
    #: The name by which it was sent.
    sent: Any
    #: The dtype of a view that computes its values, and whether it conjugates and negates them.
    lazy: tuple[Any, bool, bool] | None = None


class Overlaps:
    """Tensors of a model that share a part of their memory, under names that are sent one by one.

    The values of all of them have to be those that were sent, so a version that gives one place two
    values is refused, before anything is written.
    """

    def __init__(self, tensors: Iterable[tuple[str, Any, Any]]) -> None:
        parts = [part for one in tensors if (part := _part(*one)) is not None]
        self._groups: list[list[_Part]] = []
        # Where one begins before another ends, they are of one group.
        end: tuple[str, int] = ("", 0)
        for device, part in sorted(parts):
            if self._groups and end[0] == device and part.start < end[1]:
                self._groups[-1].append(part)
                end = device, max(end[1], part.end)
            else:
                self._groups.append([part])
                end = device, part.end
        self._groups = [group for group in self._groups if len(group) > 1]
        #: The names of all of them.
        self.names = {part.name for group in self._groups for part in group}

    def keep(self, wanted: Callable[[list[_Part]], bool]) -> None:
        """Drops the groups that are not wanted."""
        self._groups = [group for group in self._groups if wanted(group)]

    def check(self, read: Callable[[Any], bytes]) -> None:
        """Refuses a version that gives one place two values.

        Args:
            read: the bytes of a tensor, row-major, by the name by which it was sent.

        Raises:
            WrongWeightsError: naming two tensors.
        """
        for group in self._groups:
            if wrong := _differing(group, read):
                one, other = wrong
                raise WrongWeightsError(
                    f"{one.name!r} and {other.name!r} share memory here, and were sent with values that "
                    "differ there: tie them in the trainer too, or give each memory of its own here"
                )


def _differing(group: list[_Part], read: Callable[[Any], bytes]) -> tuple[_Part, _Part] | None:
    """Two parts of one memory that were sent with different values for it."""
    first = group[0]
    if all((part.first, part.strides, part.shape) == first[2:5] for part in group):
        came = _stored(first, read)
        return next(((part, first) for part in group if _stored(part, read) != came), None)
    try:
        import numpy as np
    except ImportError:
        raise UnsupportedError(
            f"{first.name!r} and {group[1].name!r} share memory here, and to compare them takes numpy: "
            "install it, or give each tensor memory of its own"
        ) from None
    # As the load would leave the memory: the last one wins.
    room = np.zeros(max(part.end for part in group) - first.start, np.uint8)
    pairs = []
    for part in group:
        shape = (*part.shape, part.size)
        came = np.frombuffer(_stored(part, read), np.uint8).reshape(shape)
        there = np.ndarray(shape, np.uint8, room, part.first - first.start, (*part.strides, 1))
        there[...] = came
        pairs.append((part, came, there))
    for part, came, there in pairs:
        if not np.array_equal(came, there):
            return part, next(one for one in reversed(group) if one is not part)
    return None


def _stored(part: _Part, read: Callable[[Any], bytes]) -> bytes:
    """What a load leaves in a tensor's memory, row-major."""
    came = read(part.sent)
    if part.lazy is None:
        return came
    import torch

    dtype, is_conjugate, is_negative = part.lazy
    values = torch.frombuffer(bytearray(came), dtype=dtype)
    values = values.conj() if is_conjugate else values
    values = (-values if is_negative else values).resolve_conj()
    return ctypes.string_at(values.data_ptr(), values.nbytes)


def _part(name: str, sent: str, tensor: Any) -> tuple[str, _Part] | None:
    """A tensor's device and place; None if it has no memory."""
    if not tensor.nbytes or not address_of(tensor):
        # One of another class may have no memory of its own.
        return None
    size, device, lazy = tensor.itemsize, "cpu", None
    if _dtypes.is_array(tensor):
        strides = tensor.strides
    else:
        device, strides = str(tensor.device), tuple(step * size for step in tensor.stride())
        if tensor.is_conj() or tensor.is_neg():
            lazy = tensor.dtype, tensor.is_conj(), tensor.is_neg()
    first = address_of(tensor)
    reach = [(length - 1) * step for length, step in zip(tensor.shape, strides, strict=True)]
    start = first + sum(one for one in reach if one < 0)
    end = first + sum(one for one in reach if one > 0) + size
    return device, _Part(start, end, first, strides, tuple(tensor.shape), size, name, sent, lazy)
