"""A group: the ends that share one sender, and the actor that knows them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from weightsync._deadline import Deadline
from weightsync.errors import (
    DeadlineError,
    LifecycleError,
    PeerError,
    SettingError,
    WeightsyncError,
)
from weightsync.ray import _cluster
from weightsync.ray._presence import Presence
from weightsync.ray._relay import Relay
from weightsync.scheme import Distributed

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
    token: str | None = field(repr=False)
    #: The numbers of workers that it has.
    taken: frozenset[int] = frozenset()
    #: Whether a directory has accepted it before.
    is_renewal: bool = False

    @classmethod
    def of(cls, info: str, scheme: Distributed, taken: Iterable[int] = ()) -> Offer:
        """Where the sender of this process is."""
        is_open = scheme.listen is not None
        token = _cluster.token() if is_open else None
        return cls(info, _cluster.address(), is_open, token, frozenset(taken))


# Seconds that a directory that was started again leaves for the sender of the one before.
_GRACE = 3.0

#: Seconds that an end waits for its place at a directory that was started again, before it says so.
PLACE = 30.0


class Directory:
    """The actor of a group: it knows the sender and the workers, and starts a relay for each host.

    It ends when the last of them has gone. The relays are its own, so they end with it.

    Args:
        is_again: whether the group has had a directory before. Its sender may be alive.
    """

    def __init__(self, is_again: bool = False) -> None:
        self._opens = time.monotonic() + (_GRACE if is_again else 0.0)
        self._presence = Presence(self._gone, self._end)
        self._has_ended = False
        self._offer: Offer | None = None
        self._sender = ""
        self._changed = asyncio.Event()
        self._numbers: dict[str, int] = {}
        self._members: dict[int, Member] = {}
        # By address: the node, and the actor.
        self._relays: dict[str, tuple[str, Any]] = {}

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
        early = self._opens - time.monotonic()
        if early > 0 and not offer.is_renewal:
            await asyncio.sleep(early)
            if key not in self._presence:
                # It has given up.
                return
        while self._sender and self._sender != key:
            await self._changed.wait()
            if key not in self._presence:
                return
        if self._offer is None or self._offer.info != offer.info:
            relays, self._relays = self._relays, {}
            for _, relay in relays.values():
                _cluster.ray().kill(relay)
        self._sender, self._offer = key, offer
        self._wake()

    async def has_sender(self) -> bool:
        """Whether a sender is here."""
        return bool(self._sender)

    async def join(self, who: str, member: Member) -> Member:
        """Gives a worker its number. An actor that was restarted has the number that it had.

        A directory that was started again knows no numbers: workers bring theirs, and the sender says
        which ones it has.
        """
        offer = await self.after("")
        number = self._numbers.get(who, member.worker)
        if number < 0:
            taken = self._members.keys() | (offer.taken if offer else frozenset())
            number = next(one for one in itertools.count() if one not in taken)
        self._numbers[who] = number
        self._members[number] = replace(member, worker=number)
        return self._members[number]

    async def after(self, known: str) -> Offer | None:
        """Waits for a living sender with another init info; None as the directory ends."""
        while not self._sender or self._offer is None or self._offer.info == known:
            if self._has_ended:
                return None
            await self._changed.wait()
        # Only relays need it.
        return replace(self._offer, token=None)

    async def members(self) -> dict[int, Member]:
        """Every worker that has ever joined, by number."""
        return self._members

    async def relay(self, address: str, node: str) -> None:
        """Starts the relay of a host that needs one."""
        offer, (of, before) = self._offer, self._relays.get(address, ("", None))
        if offer is None or not offer.is_open or address == offer.address or of == node:
            return
        ray = _cluster.ray()
        if before is not None:
            if of in {one["NodeID"] for one in ray.nodes() if one["Alive"]}:
                return
            # The host has left the cluster, and is back as another node.
            ray.kill(before)
        there = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        # Ray starts it again if it dies, and not if it ends.
        options = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": there}
        self._relays[address] = node, ray.remote(Relay).options(**options).remote(offer.info, offer.token)

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


# How often the directory may die before an end gives up.
_TRIES = 20

# How many workers of each group this process has had.
_counts: dict[str, itertools.count[int]] = {}


def check_reach(
    sender: str,
    address: str,
    is_open: bool,
    plain: str = "set WEIGHTSYNC_INSECURE_PLAINTEXT=1 in that process",
) -> None:
    """Checks that this host can reach a sender.

    Args:
        is_open: whether the sender listens for other hosts.
        plain: how to allow plain text.

    Raises:
        PeerError: if it does not, and is on another host.
    """
    here = _cluster.address()
    if not is_open and address != here:
        raise PeerError(
            f"{sender} is on {address} and listens for that host alone, and this is {here}: give "
            "that process and every host certificates (WEIGHTSYNC_TLS_DIR), or have weights travel "
            f"between hosts without encryption ({plain})"
        )


class Group:
    """An end's side of its group. It joins again if the directory dies.

    Args:
        models: the names of the models, which name the group.
        again: a method that is called in a thread of its own when the directory was started again.
        shown: what errors call the group; its name if there is none.
        made: what users make its sender with.
    """

    def __init__(
        self,
        models: Iterable[str],
        again: Callable[[], None],
        shown: str | None = None,
        made: str = "the sender",
    ) -> None:
        namespace = _cluster.running().get_runtime_context().namespace
        self.name = f"{namespace}/{'+'.join(sorted(models))}"
        self._shown = shown or repr(self.name)
        self._made = made
        # Ray keeps calls that are open, and these keep no end alive.
        self._again = weakref.WeakMethod(again)
        self._lock = threading.Lock()
        self._directory: Any = None
        # This end's key at the directory, and the call that says that it is there. The call ends with
        # the reference.
        self._key = ""
        self._present: Any = None
        self._joined: Any = None
        self._is_left = False
        # Whether a directory has accepted this sender.
        self._is_accepted = False
        # The directory and the init info after which the next sender is awaited.
        self._followed: tuple[Any, str] = None, ""
        self._who = ""
        self._number = -1

    def offer(self, offer: Offer, timeout: float | None) -> None:
        """Publishes where this sender is, once the one before it has gone.

        Raises:
            SettingError: if another sender of the group is alive.
            DeadlineError: if Ray does not start the directory in time.
        """
        own = replace(offer, is_renewal=self._is_accepted)
        try:
            self._ask(
                lambda directory, key: directory.offer.remote(key, own),
                Deadline(timeout),
                "its place",
                "Ray has not started the group's actor, or has started it again a moment ago: give a "
                "longer timeout, or try again",
            )
        except DeadlineError:
            asked = Deadline(10.0)
            if not self._ask(lambda directory, _: directory.has_sender.remote(), asked, "an answer"):
                raise
            raise SettingError(
                f"a sender of {self._shown} is alive: shut it down, or give the model of this one "
                "another name"
            ) from None
        self._is_accepted = True

    def join(self, until: Deadline) -> int:
        """Joins as a worker, once there is a sender, and returns this worker's number."""
        context = _cluster.running().get_runtime_context()
        actor = context.get_actor_id()
        if not self._who:
            count = next(_counts.setdefault(self.name, itertools.count()))
            self._who = f"{actor or uuid.uuid4().hex}/{count}"
        named = (context.get_actor_name() or "actor") + f" {actor[:8]}" if actor else ""
        own = Member(self._number, named, _cluster.address(), os.getpid())
        asked: list[Any] = []

        def ask(directory: Any, _: str) -> Any:
            asked.append(directory)
            return directory.join.remote(self._who, own)

        self._number = self._ask(ask, until, "a sender").worker
        self._joined = asked[-1]
        return self._number

    def after(self, known: str, until: Deadline) -> Offer:
        """Waits for a sender with another init info than this one.

        Raises:
            DeadlineError: if none comes in time.
        """
        while True:
            offer: Offer | None = self._ask(
                lambda directory, _: directory.after.remote(known), until, "a sender"
            )
            if offer is not None:
                return offer
            # That directory is ending.
            time.sleep(0.05)

    def reach(self, offer: Offer) -> None:
        """Asks for this host's relay.

        Raises:
            PeerError: if this host cannot reach the sender.
        """
        plain = f"make {self._made} with insecure_plaintext=True"
        check_reach(f"the sender of {self._shown}", offer.address, offer.is_open, plain)
        self.relay()

    def relay(self) -> None:
        """Asks for the relay of this host, if it needs one."""
        self._found()[0].relay.remote(_cluster.address(), _cluster.node())

    def follow(
        self, known: str, then: Callable[[Offer], None], until: Deadline | None = None
    ) -> None:
        """Calls a method with the next sender that has another init info, in a thread of its own.

        Args:
            until: bounds the wait for a directory that was started again.
        """
        directory, _ = self._found()
        if self._joined is not directory:
            # It was started again since.
            self.join(until or Deadline(PLACE))
            directory = self._joined
        if self._followed[0] is directory and self._followed[1] == known:
            return
        own, call = weakref.ref(self), weakref.WeakMethod(then)

        def done(answer: Future[Any]) -> None:
            # Without a directory there is no answer, and `again` asks the next one.
            group, method = own(), call()
            is_over = group is None or method is None or group._is_left
            if not is_over and answer.exception() is None and answer.result() is not None:
                threading.Thread(target=method, args=(answer.result(),), daemon=True).start()

        answer = directory.after.remote(known).future()
        # An answer that is there already follows the next sender at once.
        self._followed = directory, known
        answer.add_done_callback(done)

    def members(self) -> dict[int, Member]:
        """Every worker that has joined, by number."""
        members: dict[int, Member] = self._ask(
            lambda directory, _: directory.members.remote(), Deadline(30.0), "the members"
        )
        return members

    def leave(self) -> None:
        """Leaves the group. Any number of times."""
        with self._lock:
            self._is_left = True
            directory, self._directory, self._present = self._directory, None, None
        if directory is not None and _cluster.ray().is_initialized():
            with contextlib.suppress(Exception):
                directory.leave.remote(self._key)

    def __del__(self) -> None:
        if hasattr(self, "_number") and not sys.is_finalizing():
            self.leave()

    def _ask(
        self,
        call: Callable[[Any, str], Any],
        until: Deadline,
        what: str,
        why: str = "is there a sender of this name in the job, and is it alive?",
    ) -> Any:
        ray = _cluster.running()
        failures = 0
        while True:
            directory, key = self._found()
            asked = call(directory, key)
            try:
                return ray.get(asked, timeout=until.left())
            except ray.exceptions.GetTimeoutError:
                ray.cancel(asked)
                raise DeadlineError(
                    f"{self._shown} did not get {what} within {until.timeout:g} s: {why}",
                    "retry",
                ) from None
            except ray.exceptions.RayActorError as error:
                # The directory ends with its last end, or dies with its node.
                self._lost(directory)
                failures += 1
                if failures == _TRIES:
                    raise PeerError(
                        f"the actor of {self._shown} does not stay alive: is weightsync installed on "
                        f"each node? {error}",
                        "retry",
                    ) from error
                time.sleep(0.05 * failures)

    def _found(self) -> tuple[Any, str]:
        """The directory, which is made if there is none, and this end's key there."""
        with self._lock:
            if self._is_left:
                raise LifecycleError(f"this end has left {self._shown}: it was shut down")
            if self._directory is not None:
                return self._directory, self._key
            ray = _cluster.running()
            options = {"name": self.name, "namespace": _NAMESPACE, "get_if_exists": True}
            options |= {"lifetime": "detached", "num_cpus": 0}
            # On the head, which no cluster outlives: it is not to go with a node of workers.
            options |= {"resources": {"node:__internal_head__": 0.001}}
            # Each end and each wait is a call that is open.
            kind = ray.remote(Directory).options(max_concurrency=10_000, **options)
            # An end that has had a key has had a directory.
            directory = kind.remote(bool(self._key))
            self._key = key = uuid.uuid4().hex
            self._directory, self._present = directory, directory.present.remote(key)
            directory.watch.remote(key, [self._present])
            own = weakref.ref(self)

            def ended(_: Future[None]) -> None:
                # It answers when this end has left, and when it ends or has died.
                group = own()
                if group is not None and not group._is_left and _cluster.ray().is_initialized():
                    threading.Thread(target=group._renew, args=(directory,), daemon=True).start()

            self._present.future().add_done_callback(ended)
            return directory, key

    def _renew(self, before: Any) -> None:
        self._lost(before)
        pause = 0.1
        ray = _cluster.ray()
        # After `ray.shutdown()` there is nothing to join.
        while not self._is_left and ray.is_initialized() and (again := self._again()) is not None:
            try:
                again()
                return
            except (WeightsyncError, ray.exceptions.RayError) as error:
                # Ray may take a while to notice that a node has died.
                logger.warning("%s was not joined again: %s", self._shown, error)
            # An end that is dropped meanwhile is not kept.
            del again
            time.sleep(pause)
            pause = min(2 * pause, 5.0)

    def _lost(self, directory: Any) -> None:
        with self._lock:
            if self._directory is not directory:
                return
            key, self._directory, self._present = self._key, None, None
        # If it was only out of reach, this end is there again under another key.
        with contextlib.suppress(Exception):
            directory.leave.remote(key)
