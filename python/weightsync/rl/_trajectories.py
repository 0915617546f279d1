"""Numbers of trajectories that no two of a collector share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weightsync.errors import PeerError

#: The trajectories that a worker is in: its own numbers, and those in batches.
Known = dict[int, int]


@dataclass(frozen=True)
class Ids:
    """The trajectories that a part has begun, in its worker's own numbers.

    Attributes:
        first: the first of them.
        following: the first that it has not begun.
    """

    first: int
    following: int


class Trajectories:
    """Gives the trajectories of all workers one growing number."""

    def __init__(self) -> None:
        self._next = 0

    def number(self, ids: Ids, known: Known, array: np.ndarray, ends: np.ndarray) -> None:
        """Numbers the frames of a part that is handed out.

        Args:
            ids: what the part has begun.
            known: the worker's trajectories before the part, and afterwards those after it.
            array: the worker's own numbers, ``[P, T]``; they are replaced.
            ends: whether the last step of each environment began another trajectory, ``[P]``.

        Raises:
            PeerError: for a trajectory that the worker has not begun. One of another host may say
                anything.
        """
        own, base = array.copy(), self._next - ids.first
        older = np.unique(own[own < ids.first]).tolist()
        if (own >= ids.following).any() or not known.keys() >= set(older):
            raise PeerError("a worker delivered frames of a trajectory that it has not begun")
        np.copyto(array, own + base, where=own >= ids.first)
        for one in older:
            array[own == one] = known[one]
        current, numbers = _current(ids, own, ends), array[:, -1].copy()
        numbers[ends] = current[ends] + base
        self._next += ids.following - ids.first
        _exchange(known, current, numbers)

    def skip(self, ids: Ids, known: Known, array: np.ndarray, ends: np.ndarray) -> None:
        """The same for a part that is not handed out.

        What goes on after it gets other numbers: its frames do not follow those before.
        """
        current = _current(ids, array, ends)
        _exchange(known, current, np.arange(self._next, self._next + len(current)))
        self._next += len(current)


def _current(ids: Ids, own: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The trajectory of each environment after the part, in the worker's own numbers."""
    current: np.ndarray = own[:, -1].copy()
    current[ends] = np.arange(ids.following - int(ends.sum()), ids.following)
    return current


def _exchange(known: Known, current: np.ndarray, numbers: np.ndarray) -> None:
    known.clear()
    known.update(zip(current.tolist(), numbers.tolist(), strict=True))
