"""Splitting batches into trajectories."""

from __future__ import annotations

from typing import Any

import numpy as np

from weightsync._native import runs
from weightsync.errors import MissingTensorError
from weightsync.rl._columns import MASK, TRAJ_IDS, Batch


def split_trajectories(batch: Batch) -> Batch:
    """Puts each trajectory of a batch into a row of its own.

    Args:
        batch: frames with ``("collector", "traj_ids")``. Consecutive frames of one row with
            the same id are one trajectory.

    Returns:
        A batch shaped ``[trajectories, longest]``, in the order of the rows and of time. Rows are
        padded with zeros, and ``("collector", "mask")`` is true where a frame is.

    Raises:
        MissingTensorError: if the frames have no trajectory ids.
    """
    columns = batch.columns()
    if TRAJ_IDS not in columns:
        raise MissingTensorError(
            "the batch has no column collector.traj_ids, by which its trajectories are told apart"
        )
    ids: np.ndarray = np.asarray(_on_host(columns[TRAJ_IDS]), np.int64)
    ids = ids.reshape(-1, batch.batch_size[-1])
    there = _on_host(columns[MASK]).reshape(ids.shape) if MASK in columns else ids == ids
    starts: np.ndarray = np.array(runs(ids)[0], np.int64)
    # Frames that are none are at the end of a row.
    lengths = np.add.reduceat(there.reshape(-1).astype(np.int64), starts)
    starts, lengths = starts[lengths > 0], lengths[lengths > 0]
    longest = int(lengths.max(initial=0))
    mask = np.arange(longest) < lengths[:, None]
    # Where each frame of the result lies; padding points at the first frame of its row.
    index = np.where(mask, starts[:, None] + np.arange(longest), starts[:, None])
    split = {
        key: _gathered(value, len(batch.batch_size), index, mask) for key, value in columns.items()
    }
    split[MASK] = _like(mask, columns[TRAJ_IDS])
    return batch.with_columns(split, index.shape)


def _gathered(value: Any, dims: int, index: np.ndarray, mask: np.ndarray) -> Any:
    rows = value.reshape(-1, *value.shape[dims:])
    if isinstance(value, np.ndarray):
        out = rows[index]
        out[~mask] = 0
        return out
    out = rows[_like(index, value)]
    out[_like(~mask, value)] = 0
    return out


def _on_host(value: Any) -> np.ndarray:
    array: np.ndarray = np.asarray(value.cpu() if hasattr(value, "cpu") else value)
    return array


def _like(array: np.ndarray, value: Any) -> Any:
    """The array as what the value is: numpy's, or a tensor on its device."""
    if isinstance(value, np.ndarray):
        return array
    import torch

    return torch.as_tensor(array, device=value.device)
