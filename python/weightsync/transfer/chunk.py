"""Tensors that travel together, and how they lie in one buffer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weightsync import _dtypes
from weightsync.errors import WrongTypeError, WrongWeightsError

#: In a packed buffer each tensor begins at a multiple of this many bytes, or of the size of its
#: elements where that is larger.
ALIGNMENT = 4

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _dtypes._by_torch()}


@dataclass
class WeightChunk:
    """A group of parameters: names, tensors, dtypes and shapes, in one order.

    ``dtypes`` may be given as names (``"bfloat16"``) and ``shapes`` as lists; they are kept as
    dtypes and tuples. ``total_size_bytes`` is computed where it is left out, and compared where
    it is given. ``packed`` says that the tensors are views of one buffer, laid out as by
    :func:`layout`. The memory belongs to the receiver of the chunk: an extractor may hand out
    views of live parameters, which must be read before training goes on, and never reuses a
    buffer.

    Raises:
        WrongWeightsError: naming the list or the tensor that does not fit the others.
    """

    names: list[str]
    tensors: list[torch.Tensor]
    dtypes: list[torch.dtype]
    shapes: list[tuple[int, ...]]
    module_name: str | None = None
    total_size_bytes: int | None = None
    packed: bool = False

    def __post_init__(self) -> None:
        lists = ("names", "tensors", "dtypes", "shapes")
        lengths = {name: len(getattr(self, name)) for name in lists}
        if len(set(lengths.values())) > 1:
            got = ", ".join(f"{name}: {length}" for name, length in lengths.items())
            raise WrongWeightsError(f"All lists must have the same length, got {got}")
        self.dtypes = [dtype_of(dtype) for dtype in self.dtypes]
        self.shapes = [tuple(shape) for shape in self.shapes]
        each = zip(self.names, self.tensors, self.dtypes, self.shapes, strict=True)
        for name, tensor, dtype, shape in each:
            if tensor.dtype != dtype or tuple(tensor.shape) != shape:
                raise WrongWeightsError(
                    f"{name}: expected {dtype} {list(shape)}, "
                    f"got {tensor.dtype} {list(tensor.shape)}"
                )
        size = sum(tensor.nbytes for tensor in self.tensors)
        if self.total_size_bytes not in (None, size):
            raise WrongWeightsError(
                f"total_size_bytes: the tensors have {size} bytes, got {self.total_size_bytes}"
            )
        self.total_size_bytes = size

    def __len__(self) -> int:
        return len(self.names)

    @property
    def total_numel(self) -> int:
        """The number of elements of all tensors."""
        return sum(tensor.numel() for tensor in self.tensors)

    def pack(self) -> torch.Tensor:
        """The tensors as one buffer of bytes: without a copy if they are packed already."""
        places, size = layout(self.dtypes, self.shapes)
        if self.packed and self.tensors:
            first = self.tensors[0]
            begin = first.storage_offset() * first.element_size()
            storage = first.untyped_storage()
            # The size includes padding, which a storage that ends with its last tensor lacks.
            if begin + size <= storage.nbytes() and all(
                tensor.untyped_storage().data_ptr() == storage.data_ptr()
                and tensor.is_contiguous()
                and not tensor.is_conj()
                and not tensor.is_neg()
                and tensor.storage_offset() * tensor.element_size() == begin + place
                for tensor, place in zip(self.tensors, places, strict=True)
            ):
                whole = torch.empty(0, dtype=torch.uint8, device=first.device)
                return whole.set_(storage, begin, (size,), (1,))
        device = self.tensors[0].device if self.tensors else None
        buffer, views = allocate(self.dtypes, self.shapes, device)
        for view, tensor in zip(views, self.tensors, strict=True):
            view.copy_(tensor)
        return buffer


def layout(
    dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]], alignment: int = ALIGNMENT
) -> tuple[list[int], int]:
    """Where each tensor begins in a packed buffer, and the size of the buffer, in bytes."""
    places, end = [], 0
    for dtype, shape in zip(dtypes, shapes, strict=True):
        step = max(alignment, dtype.itemsize)
        end = -(-end // step) * step
        places.append(end)
        end += math.prod(shape) * dtype.itemsize
    return places, -(-end // alignment) * alignment


def unpack(
    buffer: torch.Tensor,
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[Sequence[int]],
    alignment: int = ALIGNMENT,
) -> list[torch.Tensor]:
    """The tensors that lie in a packed buffer, as views of it."""
    places, size = layout(dtypes, shapes, alignment)
    if buffer.dtype != torch.uint8 or buffer.numel() != size:
        raise WrongWeightsError(
            f"a packed buffer of these tensors has {size} bytes, "
            f"got {buffer.numel()} elements of {buffer.dtype}"
        )
    return [
        buffer[place : place + math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))
        for place, dtype, shape in zip(places, dtypes, shapes, strict=True)
    ]


def allocate(
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[Sequence[int]],
    device: torch.device | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A packed buffer for such tensors, and the tensors as views of it."""
    size = layout(dtypes, shapes)[1]
    buffer = torch.empty(size, dtype=torch.uint8, device=device or "cpu")
    return buffer, unpack(buffer, dtypes, shapes)


def dtype_of(value: Any) -> torch.dtype:
    """A dtype as it is or by its name, with or without ``torch.``."""
    if isinstance(value, torch.dtype):
        return value
    found = _DTYPES.get(value.removeprefix("torch.")) if isinstance(value, str) else None
    if found is None:
        raise WrongTypeError(f"expected a dtype, such as 'bfloat16', got {value!r}")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype as requests have it: without ``torch.``."""
    return str(dtype).removeprefix("torch.")
