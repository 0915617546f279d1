"""Copies between GPUs and memory of the host. Nothing here needs a GPU unless a tensor is on one."""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Iterable
from typing import Any

from weightsync import _dtypes
from weightsync._memory import bytes_in_order, in_order

# A GPU copies to and from page-locked memory several times as fast as to other memory. Of the
# host's memory so much is page-locked for loads: two pieces take turns.
_PIECE = 16 << 20

_ALIGNMENT = 64


def settle(tensors: Iterable[Any]) -> None:
    """Waits until no kernel uses these tensors, if any is on a GPU.

    A kernel may run on when the call that started it has returned, and on another stream than
    that of a copy, which does not wait for it.
    """
    devices = {tensor.device for tensor in tensors if _dtypes.is_tensor(tensor) and tensor.is_cuda}
    for device in devices:
        sys.modules["torch"].cuda.synchronize(device)


class Staging:
    """Page-locked memory for the tensors of one sender that are on a GPU. It is kept for the next send."""

    def __init__(self) -> None:
        self._memory: Any = None

    def copy(self, tensors: list[Any]) -> dict[int, Any]:
        """Row-major copies in the host's memory of those tensors that are on a GPU, by their index.

        The next call writes into the same memory.
        """
        settle(tensors)
        places, end = [], 0
        for at, tensor in enumerate(tensors):
            if _dtypes.is_tensor(tensor) and tensor.is_cuda:
                places.append((at, end))
                end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if not places:
            # Arrays are sent without torch.
            return {}
        import torch

        if self._memory is None or self._memory.numel() < end:
            self._memory = None
            self._memory = _page_locked(end)
        copies = {}
        for at, offset in places:
            plain = in_order(tensors[at])
            room = self._memory[offset : offset + plain.nbytes]
            copies[at] = room.view(plain.dtype).view(plain.shape)
            with torch.no_grad():
                copies[at].copy_(plain, non_blocking=True)
        settle(tensors)
        return copies


class Pieces:
    """Two pieces of page-locked memory: the host fills one while the GPU reads the other.

    The caller settles the tensors before it uses the values.
    """

    def __init__(self, device: Any) -> None:
        import torch

        self._device, self._torch = device, torch
        self._memory = [_piece() for _ in range(2)]
        self._read: list[Any] = [None, None]
        self._at, self._used = 0, 0

    def copy(self, tensor: Any, source: Any) -> None:
        """Writes row-major values of the host's memory into a row-major tensor of the GPU."""
        torch = self._torch
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            to, values = bytes_in_order(tensor), bytes_in_order(source)
            for first in range(0, to.numel(), _PIECE):
                part = values[first : first + _PIECE]
                room = self._room(part.numel())
                room.copy_(part)
                to[first : first + _PIECE].copy_(room, non_blocking=True)

    def _room(self, size: int) -> Any:
        if self._used + size > _PIECE:
            stream = self._torch.cuda.current_stream(self._device)
            self._read[self._at] = stream.record_event()
            self._at, self._used = 1 - self._at, 0
            if self._read[self._at] is not None:
                self._read[self._at].synchronize()
        first = self._used
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return self._memory[self._at][first : first + size]


# Where the system allows no more page-locked memory, other memory is slower and does as well.


def _piece() -> Any:
    """Memory of a piece's size. torch keeps it for the next load where it is page-locked."""
    import torch

    try:
        return torch.empty(_PIECE, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError:
        return torch.empty(_PIECE, dtype=torch.uint8, device="cpu")


def _page_locked(size: int) -> Any:
    """Memory of exactly this size. torch's own page-locked memory is rounded up to a power of two."""
    import torch

    memory = torch.empty(size, dtype=torch.uint8, device="cpu")
    cuda = torch.cuda.cudart()
    address = memory.data_ptr()
    if int(cuda.cudaHostRegister(address, size, 0)) == 0:
        # The end of the process unlocks it too.
        weakref.finalize(memory, _unlock, cuda, address, os.getpid()).atexit = False
    else:
        # CUDA keeps the error for whichever kernel starts next in this thread: this one takes it.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")
    return memory


def _unlock(cuda: Any, address: int, pid: int) -> None:
    # A forked child has no GPU.
    if os.getpid() == pid:
        cuda.cudaHostUnregister(address)
