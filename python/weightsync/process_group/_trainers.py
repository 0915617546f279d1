"""The ranks of a trainer, which gather its weights together, or not at all."""

from __future__ import annotations

import time
from collections.abc import Callable

from weightsync.errors import DeadlineError
from weightsync.process_group._group import LOOK, Members, store_calls

# What the ranks agree on if none of them is late.
_NOBODY = "nobody"


class Trainers:
    """One rank's view of the ranks that make senders."""

    def __init__(self, members: Members, rank: int) -> None:
        self._store, self._names, self._rank = members.store, members.trainers, rank
        # How often this rank has called send; the others do as often.
        self._calls = 0

    def call(self) -> None:
        """Counts a call of send."""
        self._calls += 1

    def meet(self, gathers: bool, timeout: float, check: Callable[[], None]) -> None:
        """Waits until all ranks have made this call, if this rank gathers in it.

        Args:
            check: raises an error if this end is closed meanwhile.

        Raises:
            DeadlineError: naming the ranks that have not, to all ranks: none of them gathers.
            PeerError: if the store fails.
        """
        if len(self._names) == 1:
            return
        store, number = self._store, self._calls
        keys = [f"call/{number}/{rank}" for rank in self._names]
        agreed, until = f"gather/{number}", time.monotonic() + timeout
        with store_calls():
            store.set(f"call/{number}/{self._rank}", "")
            store.delete_key(f"call/{number - 1}/{self._rank}")
            if not gathers:
                return
            while not store.check(keys) and not store.check([agreed]) and time.monotonic() < until:
                check()
                time.sleep(LOOK)
            each = zip(keys, self._names.values(), strict=True)
            late = ", ".join(name for key, name in each if not store.check([key]))
            # What the first of them says is true for all.
            late = store.compare_set(agreed, "", late or _NOBODY).decode(errors="replace")
            if late == _NOBODY:
                # All have left the call before.
                store.delete_key(f"gather/{number - 1}")
                return
        raise DeadlineError(
            f"the trainer's ranks gather the weights together, and {late} did not call send "
            f"within {timeout} s: nothing was sent, and the group goes on. Call send again on each of them",
            "retry",
        )
