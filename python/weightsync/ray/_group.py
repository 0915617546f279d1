"""A group: the ends that share one sender, and the actor that knows them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from weightsync.errors import DeadlineError, PeerError, SettingError
from weightsync.ray import _cluster
from weightsync.ray._presence import Presence
from weightsync.ray._relay import Relay

logger = logging.getLogger("weightsync")

# Of the actors here. Their names begin with the namespace of the job, which may be made up by Ray.
_NAMESPACE = "weightsync"

@dataclass(frozen=True)
class Member:
    """A worker of a group, as :attr:`weightsync.ray.Sender.actors` names it.

    Attributes:
        worker: its number, as in reports.
        actor: the actor's class or name, and its id; "" outside actors.
        address: its host.
        pid: its process.
    """

    worker: int
    actor: str
    address: str
    pid: int

    def __str__(self) -> str:
        return f"{self.actor or 'a process'} ({self.address}, pid {self.pid})"


@dataclass(frozen=True)
class Offer:
    """Where a sender is."""

    #: Its init info as JSON, which names the run.
    info: str
    address: str
    #: Whether it listens for other hosts.
    is_open: bool
    token: str | None
    #: Counts the senders of a group.
    number: int = 0


class Directory:
    """The actor of a group: it knows the sender and the workers, and starts a relay for each host.

    It ends when the last of them has gone. The relays are its own, so they end with it.
    """

    def __init__(self) -> None:
        self._presence = Presence(self._gone, self._end)
        self._has_ended = False
        self._offer: Offer | None = None
        self._sender = ""
        self._changed = asyncio.Event()
        self._numbers: dict[str, int] = {}
        self._members: dict[int, Member] = {}
        self._relays: dict[str, Any] = {}

    async def present(self, key: str) -> None:
        """Returns when this end has gone."""
        await self._presence.hold(key)

    async def watch(self, key: str, answer: list[Any]) -> None:
        """Watches an end by the answer of its call of :meth:`present`."""
        self._presence.watch(key, answer[0])

    async def leave(self, key: str) -> None:
        """Notes that an end leaves."""
        self._presence.leave(key)

    async def offer(self, key: str, offer: Offer) -> None:
        """Takes a sender, once the one before has gone."""
        if self._offer is None or self._offer.info != offer.info:
            while self._sender and self._sender != key:
                await self._changed.wait()
                if key not in self._presence:
                    # It has given up.
                    return
            number = 1 if self._offer is None else self._offer.number + 1
            self._offer = replace(offer, number=number)
            relays, self._relays = self._relays, {}
            for relay in relays.values():
                _cluster.ray().kill(relay)
        self._sender = key
        self._wake()

    async def join(self, who: str, member: Member) -> Member:
        """Gives a worker its number. An actor that was restarted has the number that it had."""
        if who not in self._numbers:
            # A directory that was started again knows no numbers, and workers bring theirs.
            taken = self._members.keys()
            number = member.worker
            if number < 0 or number in taken:
                number = next(one for one in itertools.count() if one not in taken)
            self._numbers[who] = number
        member = replace(member, worker=self._numbers[who])
        self._members[member.worker] = member
        return member

    async def after(self, number: int) -> Offer | None:
        """Waits for a sender that is newer than this one, and alive; None as the directory ends."""
        while not self._sender or self._offer is None or self._offer.number <= number:
            if self._has_ended:
                return None
            await self._changed.wait()
        return self._offer

    async def members(self) -> dict[int, Member]:
        """Every worker that has ever joined, by number."""
        return self._members

    async def relay(self, address: str, node: str) -> None:
        """Has a host get its relay, unless it is the sender's own, or has one."""
        offer = self._offer
        if offer is None or not offer.is_open or address == offer.address or address in self._relays:
            return
        ray = _cluster.ray()
        there = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        # Ray starts it again if it dies, and not if it ends.
        options = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": there}
        options |= {"namespace": _NAMESPACE}
        name = f"{ray.get_runtime_context().get_actor_name()}/relay/{address}/{offer.number}"
        made = ray.remote(Relay).options(name=name, **options)
        self._relays[address] = made.remote(offer.info, offer.token)

    def _gone(self, key: str) -> None:
        if key == self._sender:
            self._sender = ""
            self._wake()

    def _end(self) -> None:
        # Calls that are open would keep the actor alive.
        self._has_ended = True
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


# How many workers of each group this process has had.
_counts: dict[str, itertools.count[int]] = {}


class Group:
    """An end's side of its group. It joins again if the directory dies.

    Args:
        models: the names of the models, which name the group.
        again: called in a thread of its own when the directory was started again.
    """

    def __init__(self, models: Iterable[str], again: Callable[[], None]) -> None:
        namespace = _cluster.running().get_runtime_context().namespace
        self.name = f"{namespace}/{'+'.join(sorted(models))}"
        self._again = again
        self._key = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._directory: Any = None
        # The call that says that this process is there. It ends with the reference.
        self._present: Any = None
        self._is_left = False
        self._who = ""
        self.member: Member | None = None

    def offer(self, offer: Offer, timeout: float | None) -> None:
        """Publishes where this sender is, once the one before it has gone.

        Raises:
            SettingError: if another sender of the group is alive.
        """
        try:
            self._ask("offer", self._key, offer, timeout=timeout)
        except DeadlineError:
            raise SettingError(
                f"a sender of {self.name!r} is alive: shut it down, or give the "
                "model of this one another name"
            ) from None

    def join(self, timeout: float | None) -> int:
        """Joins as a worker, and returns its number."""
        context = _cluster.running().get_runtime_context()
        actor = context.get_actor_id()
        if not self._who:
            count = next(_counts.setdefault(self.name, itertools.count()))
            self._who = f"{actor or uuid.uuid4().hex}/{count}"
        named = (context.get_actor_name() or "actor") + f" {actor[:8]}" if actor else ""
        number = -1 if self.member is None else self.member.worker
        member = Member(number, named, _cluster.address(), os.getpid())
        self.member = self._ask("join", self._who, member, timeout=timeout)
        return self.member.worker

    def after(self, number: int, timeout: float | None) -> Offer:
        """Waits for a sender that is newer than this one.

        Raises:
            DeadlineError: if none comes in time.
            PeerError: if this host cannot reach it.
        """
        offer: Offer | None = None
        while offer is None:
            offer = self._ask("after", number, timeout=timeout)
        here = _cluster.address()
        if not offer.is_open and offer.address != here:
            raise PeerError(
                f"the sender of {self.name!r} is on {offer.address} and listens for that host alone, and "
                f"this is {here}: make the sender with insecure_plaintext=True, which has weights travel "
                "between hosts without encryption"
            )
        self._tell("relay", here, _cluster.node())
        return offer

    def follow(self, number: int, then: Callable[[Offer], None]) -> None:
        """Calls a function with each sender that comes after this one, in a thread of its own."""
        with self._lock:
            if not self._is_left:
                self._then("after", (number,), then)

    def members(self) -> dict[int, Member]:
        """Every worker that has joined, by number."""
        members: dict[int, Member] = self._ask("members", timeout=30.0)
        return members

    def leave(self) -> None:
        """Leaves the group. Any number of times."""
        with self._lock:
            self._is_left = True
            directory, self._directory, self._present = self._directory, None, None
        if directory is not None and _cluster.ray().is_initialized():
            with contextlib.suppress(Exception):
                directory.leave.remote(self._key)

    def _ask(self, call: str, *arguments: Any, timeout: float | None) -> Any:
        ray = _cluster.running()
        until = None if timeout is None else time.monotonic() + timeout
        for left_tries in reversed(range(5)):
            left = None if until is None else max(0.0, until - time.monotonic())
            directory = self._found()
            asked = getattr(directory, call).remote(*arguments)
            try:
                return ray.get(asked, timeout=left)
            except ray.exceptions.GetTimeoutError:
                ray.cancel(asked)
                raise DeadlineError(
                    f"the group {self.name!r} had no answer to {call!r} within "
                    f"{timeout:g} s: is there a sender of this name in the job, and is it alive?",
                    "retry",
                ) from None
            except ray.exceptions.RayActorError:
                # The directory ends with its last end, or dies with its node.
                self._lost(directory)
                if not left_tries:
                    raise
                time.sleep(0.05)
        raise AssertionError("the last try raises")

    def _tell(self, call: str, *arguments: Any) -> None:
        getattr(self._found(), call).remote(*arguments)

    def _found(self) -> Any:
        """The directory, which is made if there is none."""
        with self._lock:
            if self._directory is not None:
                return self._directory
            ray = _cluster.running()
            options = {"name": self.name, "namespace": _NAMESPACE, "get_if_exists": True}
            options |= {"lifetime": "detached", "num_cpus": 0}
            # Each end and each wait is a call that is open.
            directory = ray.remote(Directory).options(max_concurrency=10_000, **options).remote()
            self._directory, self._present = directory, directory.present.remote(self._key)
            directory.watch.remote(self._key, [self._present])

            def ended(_: Future[None]) -> None:
                # It answers when this end has left, and when it ends or has died.
                if not self._is_left and _cluster.ray().is_initialized():
                    threading.Thread(target=self._renew, args=(directory,), daemon=True).start()

            self._present.future().add_done_callback(ended)
            return directory

    def _renew(self, before: Any) -> None:
        self._lost(before)
        try:
            self._again()
        except Exception:
            logger.exception("the group %r was not joined again", self.name)

    def _lost(self, directory: Any) -> None:
        with self._lock:
            if self._directory is directory:
                self._directory = self._present = None

    def _then(self, call: str, arguments: tuple[Any, ...], then: Callable[[Any], None]) -> None:
        if self._directory is None:
            return

        def done(answer: Future[Any]) -> None:
            # Without a directory there is no answer, and `again` asks the next one.
            if not self._is_left and answer.exception() is None and answer.result() is not None:
                threading.Thread(target=then, args=(answer.result(),), daemon=True).start()

        getattr(self._directory, call).remote(*arguments).future().add_done_callback(done)
