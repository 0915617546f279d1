"""Where tensors and arrays lie, and whether there is memory for all of their elements."""

from __future__ import annotations

import sys
from operator import methodcaller
from typing import Any

from weightsync import _dtypes


def address_of(tensor: Any) -> int:
    """Where the first element of a tensor or an array lies."""
    if _dtypes.is_array(tensor):
        return int(tensor.__array_interface__["data"][0])
    return int(tensor.data_ptr())


def storage_of(tensor: Any) -> int:
    """Where a tensor's storage lies; 0 if it has none, as a subclass may."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (NotImplementedError, RuntimeError):
        return 0


#: Whether a torch tensor's memory has the negative of its values.
is_negative = methodcaller("is_neg")


def in_order(tensor: Any) -> Any:
    """The values of a dense torch tensor, row-major: the tensor's own memory where that has them so, and
    else a copy. The memory of a conjugate or negative view has other values."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def flat_bytes(tensor: Any) -> Any:
    """The values of a dense tensor as bytes: backends know few dtypes, and all know bytes."""
    return bytes_in_order(in_order(tensor))


def bytes_in_order(tensor: Any) -> Any:
    """The memory of a row-major tensor as a tensor of bytes."""
    flat = tensor.detach().view(-1)
    if flat.stride() != (1,):
        # The stride of a single element may be any, and torch looks at it.
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(sys.modules["torch"].uint8)


def has_address(tensor: Any) -> bool:
    """Whether a tensor with elements has memory of its own. One of another class may have none."""
    try:
        # An address of 0 is also that of a storage that was taken away.
        return is_hollow(tensor) or bool(tensor.data_ptr())
    except (NotImplementedError, RuntimeError):
        return False


def is_dense(tensor: Any) -> bool:
    """Whether a torch tensor is neither nested nor sparse nor quantised."""
    strided = sys.modules["torch"].strided
    return tensor.layout is strided and not tensor.is_nested and not tensor.is_quantized


def is_sound(tensor: Any) -> bool:
    """Whether a tensor is of torch's own class, row-major, and its storage has room for it.

    The usual case, which is to be quick with very many tensors.
    """
    if not _dtypes.is_of_torch_itself(tensor) or not tensor.is_contiguous():
        return False
    end = tensor.storage_offset() * tensor.itemsize + tensor.nbytes
    return bool(end <= tensor.untyped_storage().nbytes())


def is_hollow(tensor: Any) -> bool:
    """Whether a dense tensor's storage has no room for its elements. Subclasses may have none.

    torch does not compare the two: to read or write such a tensor ends the process, or reaches the
    memory of other objects.
    """
    if is_sound(tensor) or not _dtypes.is_tensor(tensor) or _dtypes.is_lazy(tensor):
        return False
    if not tensor.numel() or type(tensor.detach()) is not sys.modules["torch"].Tensor:
        return False
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    end = tensor.storage_offset() + 1 + sum((size - 1) * step for size, step in steps)
    return bool(end * tensor.itemsize > tensor.untyped_storage().nbytes())


class Rooms:
    """The storages of tensors: each load, or send, asks whether they still have room."""

    def __init__(self, tensors: list[Any]) -> None:
        self._tensors = tensors
        self._seen: tuple[list[int], list[int]] | None = None
        self._negative = self._are_negative()

    def hold(self) -> bool:
        """Whether no tensor is hollow, and each is still a negative view, or none, as it was.

        Of later changes it sees those of storages and offsets.
        """
        # It changes with `parameter.data = …`, and what holds the values stays where it is.
        if self._are_negative() != self._negative:
            return False
        seen = (
            [tensor.untyped_storage().nbytes() for tensor in self._tensors],
            [tensor.storage_offset() for tensor in self._tensors],
        )
        if seen != self._seen:
            if any(map(is_hollow, self._tensors)):
                return False
            self._seen = seen
        return True

    def _are_negative(self) -> list[bool]:
        # Mostly none is, and then this is one quick loop: each send and each load asks.
        if not any(map(is_negative, self._tensors)):
            return []
        return [is_negative(tensor) for tensor in self._tensors]
