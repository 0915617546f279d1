"""Whole trajectories, put together from the batches of a collector of TensorDicts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase, pad
from tensordict.base import _is_leaf_nontensor

from weightsync.rl._columns import MASK, TRAJ_IDS


class Episodes:
    """Trajectories under way, and those that have ended and are not handed out yet."""

    def __init__(self) -> None:
        #: The pieces of each by its number; None: its begin is lost, and so it is not handed out.
        self._under_way: dict[int, list[TensorDictBase] | None] = {}
        self._ended: deque[TensorDictBase] = deque()
        #: The last trajectories of each worker's part before.
        self._last: dict[int, set[int]] = {}

    def __len__(self) -> int:
        return len(self._ended)

    def clear(self) -> None:
        """Drops all: the environments begin other episodes."""
        self._under_way.clear()
        self._ended.clear()
        self._last.clear()

    def follow(self, worker: int, ids: np.ndarray, goes_on: np.ndarray | None = None) -> None:
        """Takes note of a worker's part, before it is added.

        What the part before it has left open and this one does not go on with, can never end: its
        environment was reset, or its worker replaced.

        Args:
            ids: the numbers of the trajectories, ``[P, steps]``.
            goes_on: the environments whose first trajectory began in a part before.
        """
        before, first = self._last.get(worker, set()), ids[:, 0]
        for number in before.difference(first.tolist()):
            self._under_way.pop(number, None)
        if goes_on is not None:
            # Of parts that were not handed out.
            self._under_way.update(dict.fromkeys(set(first[goes_on].tolist()) - before))
        self._last[worker] = set(ids[:, -1].tolist())

    def add(self, batch: TensorDictBase) -> None:
        """Sorts the frames of a batch into their trajectories."""
        frames = batch.reshape(-1)
        ids = frames.get(TRAJ_IDS)
        order = torch.argsort(ids, stable=True)
        numbers, counts = ids[order].unique_consecutive(return_counts=True)
        pieces = frames[order].split(counts.tolist(), 0)
        for number, piece in zip(numbers.tolist(), pieces, strict=True):
            if number < 0:
                # What a batch that ended early has in place of frames.
                continue
            pieces_of = self._under_way.setdefault(number, [])
            if pieces_of is not None:
                pieces_of.append(piece)
            if _ends(piece):
                del self._under_way[number]
                if pieces_of is not None:
                    self._ended.append(torch.cat(pieces_of, 0) if len(pieces_of) > 1 else piece)

    def take(self, count: int, form: Literal["padded", "cat"]) -> TensorDictBase:
        """So many trajectories that have ended, the oldest first."""
        taken = [self._ended.popleft() for _ in range(count)]
        if form == "cat":
            return torch.cat(taken, 0) if count > 1 else taken[0]
        longest = max(len(one) for one in taken)
        return torch.stack([_padded(one, longest) for one in taken], 0)

    def drain(self, at_once: int | None) -> Iterator[TensorDictBase]:
        """All that have ended, one after the other, so many in each TensorDict."""
        while self._ended:
            yield self.take(min(at_once or len(self._ended), len(self._ended)), "cat")


def _ends(piece: TensorDictBase) -> bool:
    """Whether a trajectory ends with the last frame of this piece."""
    flags = (piece.get(("next", name), None) for name in ("done", "terminated", "truncated"))
    return any(one is not None and bool(one[-1].any()) for one in flags)


def _padded(frames: TensorDictBase, length: int) -> TensorDictBase:
    frames = frames.copy()
    frames.set(MASK, torch.ones(len(frames), dtype=torch.bool, device=frames.device))
    missing = length - len(frames)
    if not missing:
        return frames
    # tensordict leaves out what is no tensor.
    words = {
        key: value
        for key in frames.keys(True, True, is_leaf=_is_leaf_nontensor)
        if isinstance(value := frames.get(key), (NonTensorData, NonTensorStack))
    }
    result: Any = pad(frames.exclude(*words), [0, missing])
    for key, value in words.items():
        result.set(key, torch.cat([value, *[value[-1:]] * missing], 0))
    return result
