"""The ranks of a trainer, which gather its weights together, or not at all.

Gathering is collective: a rank that fails would keep the others waiting in a collective. So each rank
says in a store that it is there before it gathers, or why it fails.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch.distributed as dist

from weightsync._ends import reason_of
from weightsync.errors import DeadlineError, PeerError, WeightsyncError, WrongWeightsError
from weightsync.transfer._group import GRACE, LOOK, close_links, own_name, store_calls

# How often a rank that gathers asks whether another one has failed.
_LOOK_WHILE_GATHERING = 0.1

_CLOSED = "Ranks waited in a collective, whose process group is closed: make the process groups again"

# Less than any attempt of any rank.
_ANY = -(1 << 62)

# What ranks that decide on a late one agree on if none is.
_NOBODY = "nobody"

# What a rank is doing: it gathers, or is about to; it has gathered; or it has failed, with which error.
_IN, _OUT = "in", "out"
_ERRORS: dict[str, tuple[type[WeightsyncError], str]] = {
    "failed": (PeerError, "retry"),
    "broke": (PeerError, "reconnect"),
    "late": (DeadlineError, "retry"),
    "other": (WrongWeightsError, "give up"),
}


class _Word(NamedTuple):
    """What a rank says in the store."""

    #: How often it has extracted.
    attempt: int
    #: What it is doing.
    does: str
    #: What it gathers, in short; or why it does not.
    what: str
    name: str

    @property
    def has_failed(self) -> bool:
        return self.does in _ERRORS

    def error(self) -> WeightsyncError:
        kind, remedy = _ERRORS[self.does]
        return kind(self.what, remedy)


class Ranks:
    """The ranks that gather together, as one of them sees them.

    Args:
        store: of all of them.
        rank: this one.
        ranks: all of them.
    """

    def __init__(self, store: Any, rank: int, ranks: Iterable[int]) -> None:
        self.store, self.rank, self.all = store, rank, list(ranks)
        self._attempts = 0
        # By rank, how many attempts it is ahead of this one: any may have extracted alone.
        self._ahead: dict[int, int] = {}

    def next(self) -> Gathering:
        """The next attempt. All ranks make each, also if it fails."""
        self._attempts += 1
        return Gathering(self, self._attempts)

    def say(self, attempt: int, does: str, what: str = "") -> None:
        """Says what this rank is doing."""
        # Without line breaks but those between the parts.
        parts = (str(attempt), does, what.replace("\n", " "), own_name(self.rank))
        self.store.set(f"rank/{self.rank}", "\n".join(parts))

    def heard(self, attempt: int, ranks: list[int]) -> dict[int, _Word]:
        """What ranks say about this rank's attempt, those that have said anything."""
        keys = {rank: f"rank/{rank}" for rank in ranks}
        if not self.store.check(list(keys.values())):
            # Asked for, a key that is missing would be waited for.
            keys = {rank: key for rank, key in keys.items() if self.store.check([key])}
        words: dict[int, _Word] = {}
        values = self.store.multi_get(list(keys.values())) if keys else []
        for rank, value in zip(keys, values, strict=True):
            said, does, what, name = value.decode(errors="replace").split("\n")
            if int(said) - self._ahead.get(rank, 0) >= attempt:
                words[rank] = _Word(int(said), does, what, name)
        return words

    def matches(self, attempt: int, words: dict[int, _Word]) -> None:
        """Notes that these words are of this rank's attempt."""
        self._ahead.update({rank: word.attempt - attempt for rank, word in words.items()})


class Gathering:
    """One gathering of a trainer's weights, as one of its ranks sees it."""

    def __init__(self, ranks: Ranks, attempt: int) -> None:
        self._ranks, self._attempt = ranks, attempt
        self._others = [one for one in ranks.all if one != ranks.rank]
        self._late: list[int] = []
        # The process groups that it gathers in; None: any.
        self._groups: list[Any] | None = None
        # Whether this rank gathers, so that others may wait for it in a collective, and whether it is over.
        self._is_in = self._is_over = False
        self._looked = 0.0
        # What this rank has found before it gathered, and the others find too.
        self._found: tuple[str, str] | None = None

    def enter(
        self,
        plan: str,
        timeout: float,
        ranks: Iterable[int] | None = None,
        groups: Iterable[Any] | None = None,
        check: Callable[[], None] = lambda: None,
        late: Callable[[list[int]], str] | None = None,
    ) -> None:
        """Waits until all ranks are about to gather. Any number of times.

        Args:
            plan: what is gathered, in short; the same on all ranks. Empty: nothing, and none is waited for.
            timeout: in seconds.
            ranks: those that gather; all without it.
            groups: the process groups that they gather in; any without it.
            check: raises an error if this end is closed meanwhile.
            late: says in an error that ranks have not come in time; without it the others begin, and
                wait for these in a collective.

        Raises:
            PeerError: naming a rank that has failed; or the store has. No rank gathers.
            DeadlineError: naming the ranks that have not come.
            WrongWeightsError: naming a rank that has other weights.
        """
        if ranks is not None:
            self._others = [one for one in ranks if one != self._ranks.rank]
        if self._is_in or not self._others:
            return
        with store_calls():
            self._ranks.say(self._attempt, _IN, plan)
            if not plan:
                return
            self._is_in = True
            self._groups = None if groups is None else list(groups)
            until, pause = time.monotonic() + timeout, LOOK / 16
            while True:
                is_over = time.monotonic() > until
                words = self._ranks.heard(self._attempt, self._others)
                self._ranks.matches(self._attempt, words)
                self._refuse(plan, words)
                self._late = [one for one in self._others if one not in words]
                if not self._late or is_over:
                    break
                check()
                time.sleep(pause)
                # One store answers all ranks.
                pause = min(2 * pause, LOOK * (1 + len(self._others) // 8))
            if late is not None:
                self._decide(late)
        self._looked = time.monotonic()

    def look(self) -> None:
        """Looks, now and then, whether another rank has failed, before the next collective.

        Raises:
            PeerError: naming that rank.
        """
        now = time.monotonic()
        if self._is_in and now - self._looked > _LOOK_WHILE_GATHERING:
            self._looked = now
            with store_calls():
                self._refuse(None, self._ranks.heard(self._attempt, self._others))

    def leave(self) -> None:
        """All is gathered: this rank waits in no collective any more, and none waits for it."""
        if not self._is_in or self._is_over:
            return
        self._is_over = True
        # What is gathered is gathered.
        with contextlib.suppress(RuntimeError, dist.DistError):
            self._ranks.say(self._attempt, _OUT)
            if self._late:
                # They have come since, whatever they count.
                self._ranks.matches(self._attempt, self._ranks.heard(_ANY, self._late))

    def fail(self, error: BaseException) -> WeightsyncError | None:
        """Tells the other ranks that this one has failed, and ends their waits. This takes a second or
        two where one waits in a collective.

        Returns:
            The error of the rank that has failed first, if this one has failed because of that.
        """
        if self._is_over or not self._others:
            return None
        self._is_over = True
        ranks, attempt = self._ranks, self._attempt
        try:
            words = ranks.heard(attempt, self._others) if self._is_in else {}
            first = next((word for word in words.values() if word.has_failed), None)
            # A rank that counts its attempts in another way may hear of this one alone.
            does, what = self._words(error) if first is None else (first.does, first.what)
            ranks.say(attempt, does, what)
            is_cut = isinstance(error, RuntimeError) and not isinstance(error, WeightsyncError)
            until = time.monotonic() + (0.0 if is_cut and first is not None else GRACE)
            while self._is_waited_for():
                if time.monotonic() >= until:
                    # What ends the waits of the others is to tell them what else it ends.
                    ranks.say(attempt, "broke", what if _CLOSED in what else f"{what}. {_CLOSED}")
                    self._close()
                    break
                time.sleep(LOOK)
        except (RuntimeError, dist.DistError):
            # The store has ended with its process.
            self._close()
            return None
        return None if first is None else first.error()

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Tells the other ranks what the block raises, and raises what another one has told before."""
        try:
            yield
        except BaseException as error:
            cause = self.fail(error)
            if cause is None or str(cause) == str(error) or not isinstance(error, Exception):
                raise
            raise cause from error

    def _words(self, error: BaseException) -> tuple[str, str]:
        """What this rank says of an error of its own."""
        if self._found is not None:
            return self._found
        own, why = own_name(self._ranks.rank), reason_of(error) or "it stopped"
        when = "while the trainer's ranks gathered" if self._is_in else "before the trainer's ranks gathered"
        return "failed", f"{own} failed {when} the weights: {why}"

    def _refuse(self, plan: str | None, words: dict[int, _Word]) -> None:
        """Raises the error of a rank that has failed, or is about to gather something else."""
        for word in words.values():
            if word.has_failed:
                raise word.error()
            if plan is not None and word.does == _IN and word.what != plan:
                does = "gathers other tensors than" if word.what else "gathers nothing, other than"
                said = (
                    f"{word.name} {does} {own_name(self._ranks.rank)}: expected the same names, dtypes and "
                    "shapes, in the same order, on each rank of the trainer"
                )
                self._found = "other", said
                raise WrongWeightsError(said)

    def _decide(self, late: Callable[[list[int]], str]) -> None:
        """Agrees with the others on the ranks that are late: what the first of them says is true for all."""
        store, key = self._ranks.store, f"late/{self._attempt}"
        said = late(self._late) if self._late else _NOBODY
        said = store.compare_set(key, "", said).decode(errors="replace")
        if said != _NOBODY:
            self._found = "late", said
            raise DeadlineError(said, "retry")
        # All have left the one before.
        store.delete_key(f"late/{self._attempt - 1}")

    def _is_waited_for(self) -> bool:
        """Whether another rank may be in a collective."""
        words = self._ranks.heard(self._attempt, self._others)
        return any(word.does == _IN and word.what for word in words.values())

    def _close(self) -> None:
        groups = dist.distributed_c10d._world.pg_map if self._groups is None else self._groups
        for group in list(groups):
            close_links(group, dist.get_rank(group), dist.get_world_size(group))


def extracting() -> Gathering | None:
    """The next extraction of the ranks of the default process group; None where this process is alone."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if dist.get_backend() == "mpi":
        # It has no store.
        return None
    group = dist.group.WORLD
    if group not in _extracting:
        store = dist.PrefixStore("weightsync/extract", dist.distributed_c10d._get_default_store())
        _extracting[group] = Ranks(store, dist.get_rank(), range(dist.get_world_size()))
    return _extracting[group].next()


_extracting: weakref.WeakKeyDictionary[Any, Ranks] = weakref.WeakKeyDictionary()
