"""Columns of a batch, and the shared memory in which workers write them.

A *column* is one quantity of every frame, such as the reward. All columns of a batch lie in one
memory file. Workers write their parts of it in place, and the trainer's arrays are views of it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightsync.errors import MissingTensorError, SettingError

#: The name of a column: its place in the nested dict.
Key = tuple[str, ...]

OBSERVATION: Key = ("observation",)
ACTION: Key = ("action",)
REWARD: Key = ("next", "reward")
TERMINATED: Key = ("next", "terminated")
TRUNCATED: Key = ("next", "truncated")
DONE: Key = ("next", "done")
TRAJ_IDS: Key = ("collector", "traj_ids")
POLICY_VERSION: Key = ("collector", "policy_version")
MASK: Key = ("collector", "mask")

_ALIGNMENT = 64


@dataclass(frozen=True)
class Column:
    """One quantity of every frame: its name, its dtype and its shape per frame."""

    key: Key
    dtype: str
    shape: tuple[int, ...]

    def to_json(self) -> list[Any]:
        return [list(self.key), self.dtype, list(self.shape)]

    @staticmethod
    def from_json(value: Sequence[Any]) -> Column:
        key, dtype, shape = value
        return Column(tuple(key), dtype, tuple(shape))

    def __str__(self) -> str:
        return f"{'.'.join(self.key)} ({self.dtype}, {list(self.shape)} per frame)"


def compare(first: Iterable[Column], other: Iterable[Column], worker: int) -> None:
    """Refuses a worker whose frames have other columns than those of the first worker."""
    expected, got = ({one.key: one for one in columns} for columns in (first, other))
    for key in [*expected, *got]:
        if expected.get(key) != got.get(key):
            raise SettingError(
                f"the frames of worker {worker} differ from those of worker 0: expected "
                f"{expected.get(key, 'nothing')}, got {got.get(key, 'nothing')} as "
                f"{'.'.join(key)}: give all workers environments and policies of one kind"
            )


class Layout:
    """Where each column of a batch lies in its memory.

    Args:
        columns: the columns, in any order. Workers may have them in different orders, and all find
            the same places.
        dims: the batch's dimensions in memory, time last.
    """

    def __init__(self, columns: Iterable[Column], dims: Sequence[int]) -> None:
        self.columns, self.dims = sorted(columns, key=lambda one: one.key), tuple(dims)
        self._offsets = []
        end = 0
        for column in self.columns:
            self._offsets.append(end)
            size = np.dtype(column.dtype).itemsize * int(np.prod((*self.dims, *column.shape)))
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.size = max(end, 1)

    def views(self, memory: Any) -> dict[Key, np.ndarray]:
        """The columns as arrays in this memory, shaped ``[*dims, *shape]``."""
        return {
            column.key: np.ndarray(
                (*self.dims, *column.shape), column.dtype, memory, offset
            )
            for column, offset in zip(self.columns, self._offsets, strict=True)
        }

    def rows(self, offset: int, axis: int, index: int) -> list[tuple[int, int, int, int]]:
        """Where one worker's part of each column lies in the file, if a slot begins at ``offset``.

        Args:
            axis: which of the two first dimensions is the workers': 0 or 1.
            index: the worker's place in it.

        Returns:
            Runs of bytes for each column: the offset of the first, the bytes of each, how many there
            are, and the bytes from the beginning of one to that of the next.
        """
        found = []
        for column, start in zip(self.columns, self._offsets, strict=True):
            frame = np.dtype(column.dtype).itemsize * int(np.prod(column.shape))
            run = frame * int(np.prod(self.dims[axis + 1 :]))
            count = int(np.prod(self.dims[:axis]))
            found.append((offset + start + index * run, run, count, run * self.dims[axis]))
        return found


class Slot:
    """Memory for one batch: a part of a memory file."""

    def __init__(self, number: int, fd: int, size: int) -> None:
        self.number, self.offset = number, number * size
        self.memory = mmap.mmap(fd, size, offset=self.offset)


class Slots:
    """The slots of one collector. A slot is used again once no array of its batch is left."""

    def __init__(self, size: int) -> None:
        self.size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = os.memfd_create("weightsync-frames", os.MFD_CLOEXEC)
        self._count = 0
        self._free: list[Slot] = []
        # Looked at in `take`: a finalizer would run in the middle of anything.
        self._lent: list[tuple[weakref.ref[Any], Slot]] = []

    def take(self) -> Slot:
        """A slot that no batch uses."""
        self._free += [slot for memory, slot in self._lent if memory() is None]
        self._lent = [(memory, slot) for memory, slot in self._lent if memory() is not None]
        if self._free:
            return self._free.pop()
        os.ftruncate(self.fd, (self._count + 1) * self.size)
        slot = Slot(self._count, self.fd, self.size)
        self._count += 1
        return slot

    def lend(self, slot: Slot) -> Any:
        """The slot's memory for arrays that may be kept; the slot is free once all are dropped."""
        memory = (ctypes.c_ubyte * self.size).from_buffer(slot.memory)
        self._lent.append((weakref.ref(memory), slot))
        return memory

    def put_back(self, slot: Slot) -> None:
        """Frees a slot whose batch was not handed out."""
        self._free.append(slot)

    def close(self) -> None:
        """Closes the file. Batches that were handed out stay valid."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Batch(dict[str, Any]):
    """Frames: a nested dict of arrays, each shaped ``[*batch_size, *shape of one frame]``.

    The last dimension of ``batch_size`` is time. ``batch["next", "reward"]`` is the same as
    ``batch["next"]["reward"]``. A batch stays as it is for as long as it is held.

    Attributes:
        batch_size: the dimensions that all columns share.
        failures: what happened to workers since the batch before, one :class:`Failure` each.
        dropped: frames that were dropped since the batch before because they were too old.
    """

    def __init__(self, values: Mapping[str, Any], batch_size: Iterable[int]) -> None:
        super().__init__(values)
        self.batch_size = tuple(batch_size)
        self.failures: list[Failure] = []
        self.dropped = 0

    @staticmethod
    def of(columns: Mapping[Key, Any], batch_size: Iterable[int]) -> Batch:
        """A batch of these columns."""
        batch = Batch({}, batch_size)
        for key, value in columns.items():
            batch[key] = value
        return batch

    def with_columns(self, columns: Mapping[Key, Any], batch_size: Iterable[int]) -> Batch:
        """Other columns in place of these, with what else this batch says."""
        batch = Batch.of(columns, batch_size)
        batch.failures, batch.dropped = self.failures, self.dropped
        return batch

    def columns(self) -> dict[Key, Any]:
        """All columns by their full names."""
        return dict(_walk((), self))

    def numel(self) -> int:
        """The number of frames."""
        return int(np.prod(self.batch_size))

    def __getitem__(self, key: str | Key) -> Any:
        inner: Any = self
        for name in parts_of(key):
            if not isinstance(inner, dict) or name not in dict.keys(inner):
                known = ", ".join(".".join(one) for one in self.columns())
                raise MissingTensorError(f"the batch has no column {key!r}; it has {known}")
            inner = dict.__getitem__(inner, name)
        return inner

    def __setitem__(self, key: str | Key, value: Any) -> None:
        *outer, last = parts_of(key)
        inner: dict[str, Any] = self
        for name in outer:
            inner = inner.setdefault(name, {})
        dict.__setitem__(inner, last, value)

    def __contains__(self, key: object) -> bool:
        try:
            self[key]  # type: ignore[index]
        except (MissingTensorError, TypeError):
            return False
        return True

    def get(self, key: str | Key, default: Any = None) -> Any:
        """The column, or the default where there is none."""
        return self[key] if key in self else default

    def to_tensordict(self) -> Any:
        """The same frames as a TensorDict on the same memory.

        As in TorchRL, the reward and the three flags have a last dimension of 1.
        """
        import torch
        from tensordict import TensorDict

        single = (REWARD, TERMINATED, TRUNCATED, DONE)
        result = TensorDict({}, batch_size=self.batch_size)
        for key, value in self.columns().items():
            tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            result.set(key, tensor.unsqueeze(-1) if key in single else tensor)
        return result

    def __repr__(self) -> str:
        columns = ", ".join(
            f"{'.'.join(key)}: {list(value.shape)}" for key, value in self.columns().items()
        )
        return f"Batch({list(self.batch_size)}: {columns})"


@dataclass(frozen=True)
class Failure:
    """A worker that failed.

    Attributes:
        worker: its number.
        reason: what happened, with the worker's last words.
        restarted: whether another process has taken its place.
        kind: the name of the class of the error that the worker raised, or of the nearest one above it
            that is Python's; empty if it raised none.
    """

    worker: int
    reason: str
    restarted: bool
    kind: str = ""

    def __str__(self) -> str:
        then = "another has taken its place" if self.restarted else "it was not restarted"
        return f"worker {self.worker}: {self.reason} ({then})"


def parts_of(key: str | Key) -> Key:
    """A key as a tuple of names."""
    return (key,) if isinstance(key, str) else tuple(key)


def _walk(prefix: Key, values: Mapping[str, Any]) -> Iterable[tuple[Key, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _walk((*prefix, name), value)
        else:
            yield (*prefix, name), value
