"""How the tensors of a version lie in few large buffers, and the checksums of these."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from weightsync._native import checksum as native_checksum
from weightsync.errors import PeerError
from weightsync.transfer.chunk import dtype_name, dtype_of, layout, unpack

#: The bytes of a broadcast, the checksums of the last one apart.
PIECE = 16 << 20

#: The pieces that travel at once.
AT_ONCE = 2

#: Tensors begin at multiples of this, so that parameters can lie in a received buffer.
_ALIGNMENT = 64


class Layout:
    """The tensors of a version: names, dtypes and shapes, each tensor once, and other names.

    Args:
        names: of the tensors, in order.
        dtypes: theirs.
        shapes: theirs.
        ties: the other names of tied tensors, with the name by which each is sent.
    """

    def __init__(
        self,
        names: Sequence[str],
        dtypes: Sequence[torch.dtype],
        shapes: Sequence[tuple[int, ...]],
        ties: dict[str, str],
    ) -> None:
        self.names, self.dtypes, self.shapes = list(names), list(dtypes), list(shapes)
        self.ties = ties
        self.places, self._data = layout(self.dtypes, self.shapes, _ALIGNMENT)
        #: The bytes of the tensors.
        self.bytes = sum(map(self.size_of, range(len(self.names))))
        count = max(1, -(-self._data // PIECE))
        #: The bytes of all buffers: the tensors, the version's number, a checksum of each piece.
        self.size = self._data + 8 * (1 + count)
        ends = [min(self._data, PIECE * (at + 1)) for at in range(count)]
        #: Begin and end of each piece, without the checksums.
        self.pieces = list(zip([0, *ends[:-1]], ends, strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and (
            (self.names, self.dtypes, self.shapes, self.ties)
            == (other.names, other.dtypes, other.shapes, other.ties)
        )

    __hash__ = None  # type: ignore[assignment]

    def size_of(self, at: int) -> int:
        """The bytes of a tensor."""
        return int(math.prod(self.shapes[at]) * self.dtypes[at].itemsize)

    def end_of(self, piece: int) -> int:
        """The end of what travels with a piece: the checksums come with the last one."""
        return self.size if piece == len(self.pieces) - 1 else self.pieces[piece][1]

    def parts(self, piece: int) -> Iterator[tuple[int, int, int, int]]:
        """The parts of tensors in a piece: the tensor's index, its bytes from and to, the place."""
        begin, end = self.pieces[piece]
        for at, place in enumerate(self.places):
            first, last = max(place, begin), min(place + self.size_of(at), end)
            if first < last:
                yield at, first - place, last - place, first - begin

    def unpack(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in a buffer that has all pieces, as views of it."""
        return unpack(whole[: self._data], self.dtypes, self.shapes, _ALIGNMENT)

    def sums(self, last: torch.Tensor) -> torch.Tensor:
        """The version's number and the checksums, in a buffer that begins with the last piece."""
        begin = self.pieces[-1][0]
        return last[self._data - begin : self.size - begin].view(torch.int64)

    def to_text(self) -> bytes:
        """The layout as it travels."""
        dtypes = [dtype_name(one) for one in self.dtypes]
        each = list(zip(self.names, dtypes, self.shapes, strict=True))
        return json.dumps({"tensors": each, "ties": self.ties}).encode()

    @classmethod
    def from_text(cls, text: bytes) -> Layout:
        """The layout that a sender has sent.

        Raises:
            PeerError: if the text is no layout.
        """
        try:
            read: dict[str, Any] = json.loads(text)
            names, dtypes, shapes = [], [], []
            for name, dtype, shape in read["tensors"]:
                names.append(str(name))
                dtypes.append(dtype_of(dtype))
                shapes.append(tuple(int(one) for one in shape))
            ties = {str(name): str(of) for name, of in read["ties"].items()}
            if len({*names, *ties}) != len(names) + len(ties) or min(map(min, filter(None, shapes)), default=0) < 0:  # fmt: skip
                raise PeerError("the sender's layout has a name twice, or a negative size")
            unknown = sorted({*ties.values()} - {*names})
            if unknown:
                raise PeerError(f"the sender's layout ties a tensor to {unknown[0]!r}, which it lacks")
            return cls(names, dtypes, shapes, ties)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise PeerError(f"the sender's layout cannot be read: {error}") from error


def checksum(piece: torch.Tensor) -> int:
    """A checksum of bytes in the host's memory, of 64 bits."""
    return native_checksum(piece.data_ptr(), piece.numel())
