"""Replay buffers: frames kept for learning from them again."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightsync import _checks, _dtypes
from weightsync._memory import in_order
from weightsync._native import ReplayBuffer as Native
from weightsync.errors import LifecycleError, SettingError, WrongTypeError, WrongWeightsError
from weightsync.rl._columns import MASK as COLLECTOR_MASK
from weightsync.rl._columns import TRAJ_IDS, Batch, Key
from weightsync.rl._policy import HAS_TORCH

logger = logging.getLogger("weightsync.rl")

#: Between the parts of a column's name. Names of observations may have dots.
_SEPARATOR = "/"

INDEX: Key = ("index",)
WEIGHT: Key = ("priority_weight",)
MASK: Key = ("mask",)


@dataclass(frozen=True)
class SamplerWithoutReplacement:
    """Each frame once, in random order, and then all over again."""


@dataclass(frozen=True)
class PrioritizedSampler:
    """Frames with a probability in proportion to ``(priority + eps) ** alpha``.

    A sample has ``"priority_weight"``: ``(frames * probability) ** -beta``, over the largest of all
    frames in the buffer (Schaul et al., "Prioritized Experience Replay", 2016, section 3.4; TorchRL
    has the same). A new frame has the largest priority seen.
    """

    alpha: float = 0.7
    beta: float = 0.5
    eps: float = 1e-8


@dataclass(frozen=True)
class SliceSampler:
    """Runs of consecutive steps of one trajectory, also where they came in several batches.

    Trajectories of two collectors must have different numbers. Those in a directory that was
    opened again are not gone on with.

    Args:
        num_slices: slices of a sample; or
        slice_len: steps of a slice.
        trajectory_key: the column that numbers trajectories.
        strict_length: whether slices are as long as asked for; without it short trajectories are
            drawn too, and ``"mask"`` says which frames count.
    """

    num_slices: int | None = None
    slice_len: int | None = None
    trajectory_key: str | Key = TRAJ_IDS
    strict_length: bool = True


Sampler = SamplerWithoutReplacement | PrioritizedSampler | SliceSampler


class ReplayBuffer:
    """The newest frames, up to a capacity; a new frame takes the place of the oldest one.

    Any number of threads may extend and sample at the same time. A sample never has a part of a
    batch that is being written. The first batch fixes the columns.

    Args:
        capacity: how many frames fit.
        batch_size: frames of a sample, where :meth:`sample` does not say.
        sampler: how frames are drawn; uniformly, with replacement, by default.
        directory: where the frames are kept, so that they outlive the program. What a killed
            program had written is there, and damaged frames are found and cut off. Priorities are
            not kept; a warning says so when frames are found.
        seed: what the draws are derived from; a random one by default.
    """

    def __init__(
        self,
        capacity: int,
        *,
        batch_size: int | None = None,
        sampler: Sampler | None = None,
        directory: str | os.PathLike[str] | None = None,
        seed: int | None = None,
    ) -> None:
        if capacity < 1:
            raise SettingError(f"capacity: expected 1 or more, got {capacity}")
        self._capacity, self._batch_size = capacity, batch_size
        self._sampler = _settings(sampler)
        # It is made with the first batch, and the program may change to another directory until then.
        self._directory = None if directory is None else _checks.absolute(directory)
        self._seed = int.from_bytes(os.urandom(7), "little") if seed is None else seed
        self._native: Native | None = None
        self._columns: dict[Key, tuple[str, tuple[int, ...]]] = {}
        #: What a sample has besides them.
        self._drawn: dict[Key, tuple[str, tuple[int, ...]]] = {INDEX: ("I64", ())}
        if self._sampler.get("sampler") == "prioritised":
            self._drawn[WEIGHT] = ("F32", ())
        if self._sampler.get("strict_len") is False:
            self._drawn[MASK] = ("BOOL", ())
        self._is_torch = self._is_closed = False
        #: Whether the columns are those of a directory, and no batch has come yet.
        self._is_reopened = False
        self._opening = threading.Lock()
        found = None if self._directory is None else Native.describe(self._directory)
        if found is not None:
            self._make({tuple(name.split(_SEPARATOR)): (d, tuple(s)) for name, d, s in found[1]})
            if len(self) and WEIGHT in self._drawn:
                logger.warning(
                    "%d frames of %s are as they were, and their priorities are not: each has the priority "
                    "of a new frame, until update_priority gives it another",
                    len(self),
                    directory,
                )

    @property
    def capacity(self) -> int:
        """How many frames fit."""
        return self._capacity

    def __len__(self) -> int:
        return 0 if self._native is None else len(self._native)

    @property
    def write_count(self) -> int:
        """How many frames were written, those that are gone included."""
        return 0 if self._native is None else self._native.ids[1]

    def extend(self, batch: Any) -> np.ndarray:
        """Writes the frames of a batch.

        Args:
            batch: a :class:`Batch`, or a TensorDict, of any shape whose last dimension is time.

        Returns:
            The numbers of the frames, shaped like the batch; -1 where the batch's mask says that
            there is no frame, which is not written.

        Raises:
            WrongWeightsError: if its columns are not those of the first batch.
        """
        columns, size = _columns_of(batch)
        return self._write(columns, size)

    def add(self, frame: Mapping[str, Any]) -> int:
        """Writes one frame: a nested dict of numbers and arrays."""
        columns = {key: _one(value) for key, value in Batch(frame, ()).columns().items()}
        return int(self._write(columns, (1,))[0])

    def sample(self, batch_size: int | None = None) -> Batch:
        """Draws frames.

        Returns:
            A batch ``[batch_size]``, or ``[slices, steps]`` with a :class:`SliceSampler`, with
            ``"index"``, the frames' numbers for :meth:`update_priority`.

        Raises:
            SettingError: if there is nothing to draw from.
        """
        count = self._batch_size if batch_size is None else batch_size
        if count is None:
            raise SettingError("sample() wants to know how many frames: give it batch_size")
        native = self._native
        if native is None:
            self._check_open()
            raise SettingError("the replay buffer is empty: extend it before sampling")
        rooms = {**self._columns, **self._drawn}
        columns = {key: self._empty(count, *spec) for key, spec in rooms.items()}
        places = {key: _address(room) for key, room in columns.items()}
        # The native module writes 64-bit numbers without a sign, which never need the last bit.
        native.sample(
            count,
            [places[key] for key in self._columns],
            places[INDEX],
            places.get(WEIGHT),
            places.get(MASK),
        )
        if self._sampler.get("sampler") != "slices":
            return Batch.of(columns, (count,))
        steps = self._sampler.get("slice_len") or count // self._sampler["num_slices"]
        size = (count // steps, steps)
        return Batch.of({k: v.reshape(*size, *v.shape[1:]) for k, v in columns.items()}, size)

    def update_priority(self, index: Any, priority: Any) -> None:
        """Gives frames other priorities. Frames that are gone meanwhile are ignored.

        Args:
            index: their numbers, as ``extend`` returned them or a sample has them.
            priority: as many numbers of 0 or more, such as temporal-difference errors.
        """
        if self._native is not None:
            self._native.update_priorities(_listed(index), _listed(priority))

    def set_beta(self, beta: float) -> None:
        """Sets the ``beta`` of a :class:`PrioritizedSampler` from here on."""
        self._sampler = {**self._sampler, "beta": beta}
        if self._native is not None:
            self._native.set_beta(beta)

    def flush(self) -> None:
        """Waits until all frames are on the disk."""
        if self._native is not None:
            self._native.flush()

    def close(self) -> None:
        """Closes the directory, so that another program may open it."""
        self._native, self._is_closed = None, True

    def _write(self, columns: Mapping[Key, Any], size: tuple[int, ...]) -> np.ndarray:
        frames = math.prod(size)
        rows = {key: _rows(key, value, len(size), frames) for key, value in columns.items()}
        index: np.ndarray = np.full(frames, -1)
        there = rows.pop(COLLECTOR_MASK, None)
        kept = slice(None) if there is None else np.asarray(there, bool)
        if there is not None and not np.all(kept):
            rows = {key: _rows(key, value[kept], 1, int(np.sum(kept))) for key, value in rows.items()}
        native = self._opened(rows)
        self._check(rows)
        count = len(index[kept])
        begin, end = native.extend([count], [_address(rows[key]) for key in self._columns])
        index[kept] = np.arange(begin, end)
        return index.reshape(size)

    def _opened(self, rows: Mapping[Key, Any]) -> Native:
        """The buffer, which the first batch makes."""
        with self._opening:
            if self._native is None:
                self._check_open()
                return self._make({key: _spec(key, value) for key, value in rows.items()}, rows)
            if self._is_reopened:
                self._is_torch, self._is_reopened = _has_tensors(rows), False
            return self._native

    def _make(
        self, columns: dict[Key, tuple[str, tuple[int, ...]]], rows: Mapping[Key, Any] | None = None
    ) -> Native:
        for key in (INDEX, WEIGHT, MASK):
            if key in columns:
                raise SettingError(
                    f"the batch has a column {_name(key)!r}, a name that samples use: rename it"
                )
        native = Native(
            [(_name(key), dtype, list(shape)) for key, (dtype, shape) in columns.items()],
            self._capacity,
            sampler=self._sampler or None,  # type: ignore[arg-type]
            seed=self._seed,
            directory=self._directory,
        )
        self._is_reopened = rows is None
        self._is_torch = HAS_TORCH if rows is None else _has_tensors(rows)
        self._columns = columns
        # The last: a thread that samples sees the rest then.
        self._native = native
        return native

    def _check_open(self) -> None:
        if self._is_closed:
            raise LifecycleError("the replay buffer was closed: make another")

    def _check(self, rows: Mapping[Key, Any]) -> None:
        """Refuses columns that are not those of the first batch."""
        got = {key: _spec(key, value) for key, value in rows.items()}
        wrong = [
            f"{_name(key)}: expected {_words(self._columns.get(key))}, got {_words(got.get(key))}"
            for key in {**self._columns, **got}
            if self._columns.get(key) != got.get(key)
        ]
        if wrong:
            raise WrongWeightsError(
                "the batch has other columns than the first one had: " + "; ".join(wrong[:5])
            )

    def _empty(self, count: int, dtype: str, shape: tuple[int, ...]) -> Any:
        if self._is_torch:
            import torch

            return torch.empty((count, *shape), dtype=_dtypes.torch_dtype(dtype), device="cpu")
        return np.empty((count, *shape), _dtypes.numpy_dtype(dtype))


def _has_tensors(rows: Mapping[Key, Any]) -> bool:
    return any(_dtypes.is_tensor(one) for one in rows.values())


def _settings(sampler: Sampler | None) -> dict[str, Any]:
    """What the native module calls a sampler."""
    if sampler is None:
        return {}
    if isinstance(sampler, SamplerWithoutReplacement):
        return {"sampler": "without_replacement"}
    if isinstance(sampler, PrioritizedSampler):
        given = {"alpha": sampler.alpha, "beta": sampler.beta, "eps": sampler.eps}
        return {"sampler": "prioritised", **given}
    if isinstance(sampler, SliceSampler):
        key = sampler.trajectory_key
        column = _name((key,) if isinstance(key, str) else tuple(key))
        lengths = {"num_slices": sampler.num_slices, "slice_len": sampler.slice_len}
        return {
            "sampler": "slices",
            "column": column,
            "strict_len": sampler.strict_length,
            **{name: value for name, value in lengths.items() if value is not None},
        }
    raise WrongTypeError(
        "a sampler is a SamplerWithoutReplacement, a PrioritizedSampler or a SliceSampler, got "
        f"{sampler!r}"
    )


def _columns_of(batch: Any) -> tuple[dict[Key, Any], tuple[int, ...]]:
    if isinstance(batch, Batch):
        return batch.columns(), batch.batch_size
    if _dtypes.is_tensordict(batch):
        keys = batch.keys(include_nested=True, leaves_only=True)
        found = {(key,) if isinstance(key, str) else tuple(key): batch.get(key) for key in keys}
        return found, tuple(batch.batch_size)
    raise WrongTypeError(
        f"a replay buffer takes batches of a collector and TensorDicts, got a {type(batch).__name__}"
    )


def _rows(key: Key, value: Any, dims: int, frames: int) -> Any:
    """A column with one dimension for its frames, contiguous, in this process's memory."""
    if _dtypes.is_tensor(value):
        return in_order(value.cpu().reshape(frames, *value.shape[dims:]))
    if not isinstance(value, np.ndarray):
        raise WrongTypeError(f"column {_name(key)} is a {type(value).__name__}; expected an array")
    return np.ascontiguousarray(value).reshape(frames, *value.shape[dims:])


def _one(value: Any) -> Any:
    return value[None] if _dtypes.is_tensor(value) else np.asarray(value)[None]


def _spec(key: Key, rows: Any) -> tuple[str, tuple[int, ...]]:
    of = _dtypes.of_tensor if _dtypes.is_tensor(rows) else _dtypes.of_array
    dtype, shape = of(_name(key), rows)
    return dtype, tuple(shape[1:])


def _name(key: Key) -> str:
    if any(_SEPARATOR in part for part in key):
        raise SettingError(f"column {key!r} cannot be kept: its name has a {_SEPARATOR!r}")
    return _SEPARATOR.join(key)


def _words(spec: tuple[str, tuple[int, ...]] | None) -> str:
    return "nothing" if spec is None else f"{spec[0]} {list(spec[1])}"


def _address(rows: Any) -> int:
    if _dtypes.is_tensor(rows):
        return int(rows.data_ptr())
    # Quicker than `rows.ctypes.data`.
    return int(rows.__array_interface__["data"][0])


def _listed(value: Any) -> list[Any]:
    if _dtypes.is_tensor(value):
        # Not by way of numpy, which has no bfloat16.
        listed: list[Any] = value.detach().cpu().reshape(-1).tolist()
        return listed
    return list(np.asarray(value).reshape(-1).tolist())
