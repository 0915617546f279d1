"""Weights as a stream of names and tensors, for frameworks that pass words between both ends.

The ends meet before the first weights are there, and only these say the layout. So the trainer has
two senders: the *door*, whose only tensor is the text of the other's init info, and the sender of
the weights, which is made from the first of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypedDict

import torch

from weightsync import _dtypes
from weightsync._calls import in_thread
from weightsync._deadline import Deadline
from weightsync._ends import reason_of
from weightsync._source import Streamed
from weightsync.errors import (
    DeadlineError,
    LifecycleError,
    PeerError,
    SendError,
    SenderClosedError,
    SettingError,
    WrongWeightsError,
)
from weightsync.ray import _cluster
from weightsync.ray._group import check_reach
from weightsync.ray._relay import Relay
from weightsync.receiver import Receiver
from weightsync.scheme import Distributed
from weightsync.sender import Sender
from weightsync.snapshot import Snapshot

logger = logging.getLogger("weightsync")

#: How long each wait lasts at most unless it is set, in seconds. The workers' waits include the
#: trainer's extraction.
TIMEOUT = 600.0

# How long the trainer's answer to a worker that joins may take, in seconds.
_ANSWER = 60.0

# The bytes of the door's tensor: an init info has some 200.
_TEXT = 4096

Pair = tuple[str, torch.Tensor]


class Place(TypedDict):
    """Where the trainer is, as plain values."""

    info: str
    #: Its host; None outside of Ray.
    address: str | None
    #: Whether it listens for other hosts.
    is_open: bool
    #: What other hosts' relays need.
    token: str | None
    #: The version that was published last, or 0.
    version: int


class Outgoing:
    """The trainer's end. An error closes it, so that no worker waits for weights that do not come.

    Args:
        version: the version that an end before this one published last.
        timeout: how long a send waits for a free slot, in seconds.
        insecure_plaintext: whether weights may travel between hosts without encryption; None: if
            ``WEIGHTSYNC_INSECURE_PLAINTEXT`` is 1.
        scheme: settings of :class:`weightsync.Distributed`.
    """

    def __init__(
        self,
        version: int = 0,
        *,
        timeout: float = TIMEOUT,
        insecure_plaintext: bool | None = None,
        scheme: Mapping[str, Any] | None = None,
    ) -> None:
        #: The version that was published last, or 0.
        self.version = version
        self._timeout = timeout
        own = _own(scheme)
        self._is_in_cluster = _is_in_cluster()
        self._scheme = _cluster.listening(own, insecure_plaintext) if self._is_in_cluster else own
        self._sender: Sender | None = None
        self._specs: list[tuple[str, str, tuple[int, ...]]] = []
        plain = replace(self._scheme, share="all", deltas="auto")
        self._door: Sender | None = Sender({"text": _text("")}, name="door", scheme=plain)
        self._door.connect(0, timeout=timeout)

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, also by an error."""
        return self._door is None

    @property
    def place(self) -> Place:
        """What the workers' ends need."""
        return Place(
            info=self._opened().init_info.to_json(),
            address=_cluster.address() if self._is_in_cluster else None,
            is_open=self._scheme.listen is not None,
            token=_cluster.token() if self._scheme.listen is not None else None,
            version=self.version,
        )

    def send(self, weights: Iterable[Pair], version: int | None = None) -> int:
        """Publishes the weights, and returns the number of the version.

        The first weights are copied twice, and those after them once. The iterator is used up,
        however the send ends: gathering is collective, and other ranks wait for one that stops.

        Args:
            version: the number, if it is larger than the last version's.
        """
        each = iter(weights)
        try:
            door = self._opened()
            last = self.version
            number = last + 1 if version is None else max(version, last + 1)
            if self._sender is None:
                self._first(door, each, number)
            else:
                self._next(self._sender, each, number)
            self.version = number
            return number
        except BaseException as error:
            # A framework may show the workers' errors alone, which come of this one.
            logger.error("the trainer's end closes, because a send failed: %s", reason_of(error))
            self.close()
            if isinstance(error, Exception):
                # What the iterator raised has ended it.
                with contextlib.suppress(Exception):
                    drain(each)
            raise

    def _first(self, door: Sender, weights: Iterator[Pair], number: int) -> None:
        kept: dict[str, torch.Tensor] = {}
        for name, tensor in weights:
            if name in kept:
                raise WrongWeightsError(f"{name} has come twice: expected each tensor once")
            kept[name] = tensor.detach().to("cpu", copy=True)
        if not kept:
            raise SendError("there is nothing to send: expected names and tensors, got none")
        self._specs = [(name, *_dtypes.of_tensor(name, one)) for name, one in kept.items()]
        self._sender = Sender(Streamed(self._specs), scheme=self._scheme, timeout=self._timeout)
        first = Streamed(self._specs, [kept.items()])
        try:
            self._sender.connect(0, weights=first, version=number, timeout=self._timeout)
        finally:
            first.release()
        door.send({"text": _text(self._sender.init_info.to_json())}, wait="sent")

    def _next(self, sender: Sender, weights: Iterator[Pair], number: int) -> None:
        streamed = Streamed(self._specs, self._groups(weights))
        try:
            report = sender.send(streamed, version=number, wait="sent")
        except BaseException:
            if streamed.failure is not None:
                raise streamed.failure from None
            raise
        finally:
            streamed.release()
        if report.failed:
            # It was logged. A worker that comes back is counted again.
            sender.forget([line.worker for line in report.failed])

    def _groups(self, weights: Iterator[Pair]) -> Iterator[list[Pair]]:
        """Each tensor alone. It need not stay valid once the next one is asked for.

        The send keeps what comes before its turn, and asks for one after the last.
        """
        at, is_in_order = 0, True
        for name, tensor in weights:
            is_in_order = is_in_order and at < len(self._specs) and name == self._specs[at][0]
            at += 1
            if not is_in_order or at == len(self._specs):
                tensor = tensor.detach().to("cpu", copy=True)
            yield [(name, tensor)]
            # It is not to live while the next one is gathered.
            del tensor

    def _opened(self) -> Sender:
        if self._door is None:
            raise LifecycleError(
                "this end of the trainer was closed, by finalize or by an error in a send: call "
                "prepare, and have the workers join again"
            )
        return self._door

    def close(self) -> None:
        """Tells the workers that nothing more comes, and frees everything. Any number of times."""
        ends, self._sender, self._door = (self._sender, self._door), None, None
        for end in ends:
            if end is not None:
                end.shutdown()


class Incoming:
    """A worker's end, which joins the trainer at once. An error closes it.

    Args:
        place: where the trainer is.
        timeout: how long a :meth:`receive` waits at most, in seconds.

    Raises:
        DeadlineError: if the trainer does not answer.
        PeerError: if the trainer is on another host and listens for its own alone.
    """

    def __init__(self, place: Place, timeout: float = TIMEOUT) -> None:
        self._place, address = place, place["address"]
        if address is not None and _is_in_cluster():
            check_reach("rank 0 of the trainer", address, place["is_open"])
        # The actor, which ends with the last reference of the worker that made it.
        self._relay: Any = None
        self.info = place["info"]
        self._timeout = timeout
        # No two workers have the same number, and nobody deals numbers out.
        self._worker = int.from_bytes(os.urandom(4))
        self._receiver: Receiver | None = None
        #: Whether it was closed, also by an error.
        self.is_closed = False
        # A worker that has joined learns of the trainer's death at once.
        self._door: Receiver | None = Receiver(self.info, self._worker)
        try:
            self._door.connect(timeout=min(timeout, _ANSWER))
        except BaseException:
            self.close()
            raise

    async def receive(self, after: int) -> Snapshot:
        """Waits for a version that is newer than this one.

        Raises:
            DeadlineError: if none comes in time.
            PeerError: if the trainer died, or closed its end.
        """
        try:
            return await in_thread(lambda: self._receive(after), leaves=True)
        except SenderClosedError as error:
            self.close()
            raise PeerError(
                f"rank 0 of the trainer closed its end before version {after + 1} was out: its own "
                "error, which is in its log, says why",
                "reconnect",
            ) from error
        except BaseException:
            self.close()
            raise

    def _receive(self, after: int) -> Snapshot:
        until = Deadline(self._timeout)
        if self._door is not None:
            info = self._through(self._door, until)
            receiver = self._receiver = Receiver(info, self._worker)
            if self.is_closed:
                # The caller was cancelled meanwhile, and this thread was not.
                receiver.shutdown()
                raise LifecycleError("this end was closed while it waited")
            self._relay = _relay_of_this_host(self._place, info)
            receiver.connect(timeout=until.left())
            newest = receiver.latest()
            if newest is not None and newest.version > after:
                return newest
        if self._receiver is None:
            raise LifecycleError("this end was closed: make another from the trainer's place")
        snapshot = self._receiver.pull(at_least=after + 1, timeout=until.left())
        if snapshot is None:
            raise self._late(after)
        return snapshot

    def _through(self, door: Receiver, until: Deadline) -> str:
        """The init info of the sender of the weights, which the door is left for."""
        snapshot = door.latest()
        while snapshot is not None:
            text = bytes(snapshot["text"].tolist()).decode().strip()
            if text:
                self._door = None
                door.shutdown()
                return text
            snapshot = door.receive(until.left())
        raise self._late(0)

    def _late(self, after: int) -> DeadlineError:
        return DeadlineError(
            f"no weights came within {self._timeout:g} s: expected version {after + 1}, or a newer "
            "one, of rank 0 of the trainer; if it extracts its weights for longer, set a longer "
            "timeout",
            "retry",
        )

    def close(self) -> None:
        """Leaves the trainer. Any number of times; tensors that were received stay valid."""
        self.is_closed = True
        ends, self._receiver, self._door = (self._receiver, self._door), None, None
        self._relay = None
        for end in ends:
            if end is not None:
                end.shutdown()


def _relay_of_this_host(place: Place, info: str) -> Any:
    """The relay by which the workers of another host share what comes, if Ray can start it."""
    if place["address"] is None or not _is_in_cluster() or place["address"] == _cluster.address():
        return None
    ray = _cluster.running()
    strategies = ray.util.scheduling_strategies
    there = strategies.NodeAffinitySchedulingStrategy(_cluster.node(), soft=False)
    # The first worker makes it, and the others find it by this name. It has no secret in it.
    name = f"relay/{hashlib.sha256(info.encode()).hexdigest()[:16]}/{_cluster.address()}"
    options = {"name": name, "namespace": "weightsync", "get_if_exists": True, "num_cpus": 0}
    made = ray.remote(Relay).options(**options, scheduling_strategy=there)
    return made.remote(info, place["token"])


def drain(weights: Iterable[Pair]) -> None:
    """Uses up an iterator that gathers its weights together with other ranks."""
    for _ in weights:
        pass


def _text(info: str) -> torch.Tensor:
    """Padded with spaces, since a sender's layout stays as it is."""
    return torch.frombuffer(bytearray(info.encode().ljust(_TEXT)), dtype=torch.uint8)


def _own(settings: Mapping[str, Any] | None) -> Distributed:
    settings = dict(settings or {})
    for name in ("listen", "advertise", "every", "pull"):
        if name in settings:
            raise SettingError(
                f"scheme: {name} cannot be set here, because the trainer has two ends that choose "
                "their ports, and a worker takes the newest version; leave it out"
            )
    try:
        return Distributed(**settings)
    except TypeError as error:
        raise SettingError(
            f"scheme: expected settings of weightsync.Distributed: {error}"
        ) from error


def _is_in_cluster() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())
