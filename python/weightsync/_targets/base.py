"""The interface of a target, and the functions that its two kinds share."""

from __future__ import annotations

import abc
from typing import Any

from weightsync import _dtypes
from weightsync._gpu import Pieces, settle
from weightsync._native import Layout, Snapshot
from weightsync._torch import without_threads
from weightsync.errors import WrongWeightsError


class Target(abc.ABC):
    """A model that versions are loaded into.

    The native module calls ``layout``, ``shape`` and ``load``. It calls ``load`` at safe
    points only, and again with the version before if another model of a set fails to load.
    """

    @abc.abstractmethod
    def layout(self) -> Layout:
        """The names, dtypes and shapes that the model has room for."""

    @abc.abstractmethod
    def shape(self, layout: Layout) -> bool:
        """Learns the sender's names, dtypes and shapes; returns whether the model took them."""

    @abc.abstractmethod
    def load(self, snapshot: Snapshot) -> None:
        """Loads a whole version."""

    def release(self) -> None:
        """Releases the sender's memory; the model keeps the weights that it has."""


class Tied:
    """Tensors of the model that have several names, and that the sender may send as several."""

    def __init__(self, places: list[tuple[str, str, list[int], int, int]]) -> None:
        # The places of a snapshot.
        self._places = places
        self._first: dict[Any, tuple[str, str]] = {}
        self._differ: list[tuple[str, str, str, str]] = []

    def add(self, identity: Any, name: str, sent: str) -> bool:
        """Notes a tensor: its identity, its name here, and the name it was sent by.

        Returns:
            Whether this is the first tensor of that identity.
        """
        first = self._first.setdefault(identity, (name, sent))
        if first[0] == name:
            return True
        if first[1] != sent:
            self._differ.append((*first, name, sent))
        return False

    def check(self, snapshot: Snapshot) -> None:
        """Refuses different values for tensors that are one tensor here.

        Raises:
            WrongWeightsError: naming the two tensors.
        """
        if not self._differ:
            return
        places = {name: (offset, length) for name, _, _, offset, length in self._places}
        for one, sent, other, also in self._differ:
            (start, length), (begin, size) = places[sent], places[also]
            # Released before the raise: an exception that a program keeps would keep the version.
            with memoryview(snapshot.view()) as view:
                same = length == size and _same(
                    view[start : start + length], view[begin : begin + size]
                )
            if not same:
                raise WrongWeightsError(
                    f"{one!r} and {other!r} are tied here: one tensor has both names. They were "
                    f"sent as {sent!r} and {also!r}, with different values: tie them in the "
                    "trainer too, or untie them here"
                )


def bytes_of(snapshot: Snapshot, name: str) -> bytes:
    """A copy of a tensor's bytes."""
    offset, length = next((at, size) for one, _, _, at, size in snapshot.places() if one == name)
    with memoryview(snapshot.view()) as view:
        return bytes(view[offset : offset + length])


def _same(one: memoryview, other: memoryview) -> bool:
    """Whether two views of one length are equal. Parts become bytes, which compare quickly."""
    part = 1 << 20
    return all(
        bytes(one[at : at + part]) == bytes(other[at : at + part])
        for at in range(0, len(one), part)
    )


def copy_values(tensor: Any, source: Any) -> None:
    """Copies values as torch does, whatever the memory of either tensor is."""
    import torch

    with torch.inference_mode(tensor.is_inference()), torch.no_grad(), without_threads():
        tensor.copy_(source)


def copy_all(pairs: list[tuple[Any, Any]]) -> None:
    """Copies row-major values in the host's memory into tensors of any device and strides."""
    tensors = [tensor for tensor, _ in pairs]
    settle(tensors)
    # Memory is taken before a value is written: a load that fails for want of it changes nothing.
    gpus = {
        device: Pieces(device)
        for device in {one.device for one in tensors if one.is_cuda and _is_row_major(one)}
    }
    for tensor, source in pairs:
        if tensor.is_cuda and _is_row_major(tensor):
            gpus[tensor.device].copy(tensor, source)
        else:
            copy_values(tensor, source)
    settle(tensors)


def is_plain(tensor: Any) -> bool:
    """Whether a tensor's values lie row-major in the host's memory, as a version has them."""
    return bool(tensor.is_cpu and _is_row_major(tensor))


def _is_row_major(tensor: Any) -> bool:
    return bool(tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg())
