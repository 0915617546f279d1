"""The trainer's weights: read where they lie, or gathered from several ranks while they are sent."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from weightsync import _dtypes
from weightsync._gpu import settle
from weightsync._memory import flat_bytes
from weightsync._source import Places, _check_whole, _spec, check_readable, module_weights, tree
from weightsync._torch import without_threads
from weightsync.errors import PeerError, UnsupportedError, WrongTypeError
from weightsync.process_group._packing import PIECE, Layout
from weightsync.transfer._together import Gathering
from weightsync.transfer.extractor import identity, trainer_rank
from weightsync.transfer.extractors import FsdpExtractor


# Some 16 MiB are gathered at a time.
_EXTRACTOR = FsdpExtractor({"batch_size_threshold_gb": PIECE / (1 << 30)})


class Weights:
    """One send's tensors, in order, each once."""

    def __init__(self, source: Any, strategy: str) -> None:
        if _dtypes.is_module(source):
            found, extras = module_weights(source, strategy, Places())
        else:
            found, extras = tree(source)
        if extras:
            raise UnsupportedError(
                f"{next(iter(extras)) or 'the model'!r} has extra state, and a process group carries "
                "tensors only: use the native transport, weightsync.Sender(model, "
                "scheme=weightsync.Distributed(...))"
            )
        for name, tensor, _ in found:
            if not _dtypes.is_tensor(tensor):
                raise WrongTypeError(
                    f"{name!r} is a {type(tensor).__name__}: a process group carries torch tensors"
                )
            if isinstance(tensor, DTensor):
                _spec(name, tensor)
            else:
                check_readable(name, tensor)
        _check_whole(source, found, extras)
        tensors: dict[str, torch.Tensor] = {}
        ties: dict[str, str] = {}
        first: dict[Any, str] = {}
        for name, tensor, _ in found:
            known = first.setdefault(identity(tensor), name)
            if known == name:
                tensors[name] = tensor
            else:
                ties[name] = known
        each = list(tensors.values())
        shapes = [tuple(one.shape) for one in each]
        self.layout = Layout(list(tensors), [one.dtype for one in each], shapes, ties)
        self._tensors = each
        # The index of a tensor, and its bytes: a copy if it is not contiguous.
        self._flat_one: tuple[int, torch.Tensor] = (-1, torch.empty(0, device="cpu"))
        #: Whether the trainer's ranks gather the tensors together.
        self.is_sharded = any(isinstance(one, DTensor) for one in each)
        #: Seconds that were spent in gathering.
        self.gathered = 0.0
        self._plan: Any = None
        self._chunks: Any = None
        self._held: dict[int, torch.Tensor] = {}
        self._count = 0
        if self.is_sharded:
            self._plan = _EXTRACTOR._plan(tensors, None)
            _, self._groups = _EXTRACTOR._ranks(tensors)

    def meet(
        self,
        gathering: Gathering,
        timeout: float,
        check: Callable[[], None],
        late: Callable[[list[int]], str],
    ) -> None:
        """Waits until all ranks of the trainer are about to gather, if this one is.

        Raises:
            PeerError, DeadlineError, WrongWeightsError: naming a rank that is not.
        """
        if any(map(_EXTRACTOR._meets, self._tensors)):
            gathering.enter(self._plan.mark, timeout, groups=self._groups, check=check, late=late)
            self._plan.gathering = gathering
        else:
            gathering.enter("", timeout)
        if self.is_sharded:
            self._chunks = iter(self._plan)

    def check_source(self) -> None:
        """Refuses a sender that does not get the gathered tensors."""
        if self.is_sharded and trainer_rank() != 0:
            raise UnsupportedError(
                "sharded tensors are gathered to rank 0 of the default process group, and this "
                f"sender is rank {trainer_rank()} there: let rank 0 be src"
            )

    def fill(self, piece: int, buffer: torch.Tensor) -> None:
        """Writes the tensors of a piece into a buffer. Pieces are asked for in order."""
        parts = list(self.layout.parts(piece))
        if self.is_sharded:
            # One at a time, so that the memory of a batch is free for the next one.
            for at, first, last, place in parts:
                buffer[place : place + last - first].copy_(flat_bytes(self._gathered(at))[first:last])
            return
        for at, first, last, place in parts:
            flat = self._flat(at)
            if _is_readable(flat, last):
                # Not by torch, whose threads spin on cores that the ranks of this host share.
                ctypes.memmove(buffer.data_ptr() + place, flat.data_ptr() + first, last - first)
            else:
                buffer[place : place + last - first].copy_(flat[first:last])

    def drain(self) -> None:
        """Goes through what is left of gathering, which is collective.

        Raises:
            PeerError: if the ranks could not gather.
        """
        self._held.clear()
        while self._chunks is not None and self._next() is not None:
            pass

    def _flat(self, at: int) -> torch.Tensor:
        # The next piece goes on with the tensor that this one ended in.
        if self._flat_one[0] != at:
            settle([self._tensors[at]])
            with without_threads():
                self._flat_one = at, flat_bytes(self._tensors[at])
        return self._flat_one[1]

    def _next(self) -> Any:
        """What the ranks gather next; None at the end."""
        try:
            return next(self._chunks, None)
        except (RuntimeError, torch.distributed.DistError) as error:
            self._chunks = None
            raise PeerError(
                f"the trainer's ranks could not gather the weights: {error}", "reconnect"
            ) from error

    def _gathered(self, at: int) -> torch.Tensor:
        began = time.monotonic()
        while at not in self._held:
            self._held.clear()
            chunk = self._next()
            for tensor in chunk.tensors:
                self._held[self._count] = tensor
                self._count += 1
            del chunk, tensor
        self.gathered += time.monotonic() - began
        return self._held[at]


def _is_readable(flat: torch.Tensor, size: int) -> bool:
    """Whether a tensor has so many bytes in the host's memory, where its storage says."""
    # Another tensor class may have no memory of its own, and a storage may have been resized.
    if type(flat) is not torch.Tensor or flat.device.type != "cpu" or not flat.data_ptr():
        return False
    return flat.storage_offset() + size <= flat.untyped_storage().nbytes()
