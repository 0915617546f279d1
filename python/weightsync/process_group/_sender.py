"""The trainer's end."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Iterator
from typing import Any, Literal

import torch

from weightsync import _ends
from weightsync._checks import choice
from weightsync._turns import Turns
from weightsync.errors import (
    DeadlineError,
    LifecycleError,
    OperatingSystemError,
    PeerError,
    SendError,
    WeightsyncError,
)
from weightsync.process_group._group import (
    AGAIN,
    APPLIED,
    BROKE,
    ENTERED,
    LEFT,
    VERSION,
    Group,
    Message,
    meet,
    rank_in,
    seconds,
)
from weightsync.process_group._packing import AT_ONCE, Layout, checksum
from weightsync.process_group._report import RankReport, Report
from weightsync.process_group._weights import Weights
from weightsync.transfer._group import GRACE, REFUSED, store_calls
from weightsync.transfer._together import Gathering, Ranks


# Why the link of a receiver has ended that has shut down.
_LEFT = "it has left"


class Sender:
    """The trainer's end in a process group. It broadcasts versions to the receivers.

    The constructor is collective, as :func:`torch.distributed.new_group` is: every rank of the
    group makes a :class:`Sender` or a :class:`Receiver`, in the same order, and the constructors
    return once all are there. Members are fixed from then on.

    A trainer of several ranks, whose weights are ``DTensor``s (FSDP2, tensor parallelism), makes
    a sender on each of them, and each calls :meth:`send`. Rank ``src`` broadcasts.

    Args:
        model: the weights: a torch module, a state dict, a nested dict of tensors, or a
            TensorDict. They are read during :meth:`send` and at no other time.
        group: the process group, of any backend; None for the default group. This end has gloo
            links of its own, so the group's own collectives go on meanwhile.
        src: the rank in the group that sends.
        name: the model's name; the ends of one model have the same one.
        strategy: ``"state_dict"`` leaves out buffers that are not persistent, ``"tensordict"``
            sends them too.
        timeout: how long each wait lasts at most, in seconds: for the other ranks of the trainer,
            for a piece to travel, and for the answers after the last piece.

    Raises:
        DeadlineError: naming the ranks that have made no end.
        SettingError: if no rank receives, if ``src`` does, or if ranks have different ``src``.
        LifecycleError: if this process has no process group.
        UnsupportedError: if the default process group is one of MPI, which has no store.
    """

    def __init__(
        self,
        model: Any,
        group: Any = None,
        *,
        src: int = 0,
        name: str = "policy",
        strategy: Literal["state_dict", "tensordict"] = "state_dict",
        timeout: float = 60.0,
    ) -> None:
        choice("strategy", strategy, "state_dict", "tensordict")
        self._timeout = seconds(timeout)
        self._model, self._strategy = model, strategy
        self._turns, self._pid = Turns(), os.getpid()
        self._version = 0
        self._layout: Layout | None = None
        self._buffers: list[torch.Tensor] = []
        self._group: Group | None = None
        self._is_closed = False
        members = meet(group, src, name, False, self._timeout)
        self._store, rank = members.store, rank_in(group)
        # The ranks of the trainer, which call send equally often.
        self._names = members.trainers
        self._trainers = Ranks(members.store, rank, members.trainers)
        if rank == src:
            self._group = Group(members, rank, self._timeout)
            weakref.finalize(self, Group.close, self._group, _shut_down()).atexit = False
        _ends.opened(self)

    @property
    def version(self) -> int:
        """The version that was sent last; 0 before the first."""
        return self._version

    @property
    def ranks(self) -> list[int]:
        """The receivers' ranks in the process group; empty where this rank only gathers."""
        return [] if self._group is None else self._group.ranks[1:]

    def send(self, model: Any = None) -> Report | None:
        """Broadcasts the weights, and returns once every receiver has answered.

        A receiver that refuses the weights is a line of the report: the others have the version.

        Args:
            model: other weights than those of the constructor.

        Returns:
            None on a rank of the trainer that only gathers.

        Raises:
            PeerError: naming the receivers that died or have left, or that broke the transfer.
                The group is closed then, and no receiver has a part of the version.
            DeadlineError: naming the receivers that did not answer in time; the group is closed.
                Each has the version as a whole, or the one before. Or naming the trainer's ranks
                that did not call send in time, to gather the weights: nothing was sent, and the
                group goes on. Or naming another thread's send that did not end in time.
            PeerError: naming a rank of the trainer that failed, and why. If it failed before the weights
                were gathered, nothing was sent, and the group goes on.
            WrongTypeError, WrongWeightsError, SendError: for weights that cannot be sent. Nothing
                was sent.
            SendError, OperatingSystemError: torch could not read the weights, or there is no
                memory; the error says that the group is closed.
            LifecycleError: after :meth:`shutdown`.
        """
        with self._turn() as gathering:
            with gathering.failing():
                self._check()
                weights = Weights(self._model if model is None else model, self._strategy)
                weights.meet(gathering, self._timeout, self._check, self._late)
            try:
                report = self._send(weights)
            except Exception:
                # The other ranks of the trainer gather, whatever became of this send.
                with contextlib.suppress(PeerError):
                    weights.drain()
                raise
            except BaseException as error:
                # Ctrl-C ends them all.
                gathering.fail(error)
                raise
            weights.drain()
            return report

    def shutdown(self) -> None:
        """Closes this end, and tells the receivers. Any number of times."""
        self._is_closed = True
        if self._group is not None:
            self._group.close(_shut_down())
        _ends.closed(self)

    def _send(self, weights: Weights) -> Report | None:
        if self._group is None:
            self._version += 1
            return None
        weights.check_source()
        return self._broadcast(self._group, weights)

    def _broadcast(self, group: Group, weights: Weights) -> Report:
        try:
            return _Send(group, weights, self._version + 1, self._timeout).run(self)
        except BaseException as error:
            # The receivers wait for the rest.
            group.close(_closed(error))
            if isinstance(error, (OSError, MemoryError)) and not isinstance(error, WeightsyncError):
                raise OperatingSystemError(f"the weights were not sent: {error}; {AGAIN}") from error
            if isinstance(error, RuntimeError) and not isinstance(error, WeightsyncError):
                raise SendError(f"the weights were not sent: {error}; {AGAIN}") from error
            raise

    def _fail(self, error: BaseException) -> None:
        """Counts a call that has failed before its send, and tells the trainer's other ranks."""
        # Its own error is the one to raise.
        with contextlib.suppress(WeightsyncError), self._turn() as gathering:
            gathering.fail(error)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[Gathering]:
        """The turn of a call. The trainer's ranks count all calls, also those that fail."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._turns.take("send", self._timeout))
            except BaseException as error:
                self._trainers.next().fail(error)
                raise
            yield self._trainers.next()

    def _late(self, ranks: list[int]) -> str:
        """The error of all ranks of the trainer if some have not called send in time."""
        late = ", ".join(self._names[rank] for rank in ranks)
        return (
            f"the trainer's ranks gather the weights together, and {late} did not call send within "
            f"{self._timeout} s: nothing was sent, and the group goes on. Call send again on each of them"
        )

    def _is_open(self) -> bool:
        try:
            self._check()
        except WeightsyncError:
            return False
        return True

    def _check(self) -> None:
        if self._is_closed and self._pid == os.getpid():
            raise _shut_down()
        if self._group is not None:
            self._group.check()
            return
        if self._pid != os.getpid():
            raise LifecycleError("this end was made by the parent of this process: use it there")
        # Rank src does not gather any more: this rank would wait for it.
        with store_calls():
            is_over = self._store.check(["over"])
            why = self._store.get("over").decode(errors="replace") if is_over else ""
        if is_over:
            raise PeerError(why or f"the sender of rank src has shut down: {AGAIN}", "reconnect")

    def _staging(self, layout: Layout) -> list[torch.Tensor]:
        """One buffer for each of the pieces that travel at once. They are used again."""
        ends = [layout.end_of(at) - begin for at, (begin, _) in enumerate(layout.pieces)]
        count, size = min(AT_ONCE, len(ends)), max(ends)
        if len(self._buffers) < count or self._buffers[0].numel() < size:
            self._buffers = []
            self._buffers = [torch.zeros(size, dtype=torch.uint8, device="cpu") for _ in range(count)]
        return self._buffers

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __reduce__(self) -> Any:
        raise LifecycleError(
            "a sender is a live end and cannot be pickled: make one in the process that sends"
        )

    def __repr__(self) -> str:
        return f"<Sender of v{self._version} to ranks {self.ranks}>"


class _Send:
    """One version on its way."""

    def __init__(self, group: Group, weights: Weights, version: int, timeout: float) -> None:
        self._group, self._weights, self._version = group, weights, version
        self._began = time.monotonic()
        self._timeout, self._deadline = timeout, self._began + timeout
        self._what = f"v{version}"
        self._lines: dict[int, RankReport] = {}
        # By rank among the links, why its link has ended; 0 stands for the broadcast.
        self._failed: dict[int, str] = dict(group.gone)
        self._entered: set[int] = set()
        self._travelling: set[int] = set()

    def run(self, sender: Sender) -> Report:
        group, weights, layout = self._group, self._weights, self._weights.layout
        while (message := group.next(0)) is not None:
            self._take(message)
        if self._failed:
            self._fail()
        buffers, sums = sender._staging(layout), [self._version]
        works: list[int] = []
        for piece, (begin, end) in enumerate(layout.pieces):
            # Not any of those that travel: a later one may have ended first.
            mine = works[-len(buffers)] if len(works) >= len(buffers) else 0
            self._wait(lambda mine=mine: mine not in self._travelling)
            buffer = buffers[piece % len(buffers)][: layout.end_of(piece) - begin]
            self._fill(piece, buffer)
            if piece == 0:
                # Receivers wait in a broadcast from here on.
                self._tell(layout, b"" if layout == sender._layout else layout.to_text())
                sender._layout = layout
            sums.append(checksum(buffer[: end - begin]))
            if piece == len(layout.pieces) - 1:
                layout.sums(buffer).copy_(torch.tensor(sums, device="cpu"))
            works.append(group.broadcast(buffer))
            self._travelling.add(works[-1])
        self._wait(lambda: not self._travelling and len(self._lines) == group.size - 1)
        sender._version = self._version
        lines = tuple(self._lines[member] for member in sorted(self._lines))
        return Report(self._version, layout.bytes, time.monotonic() - self._began, lines)

    def _fill(self, piece: int, buffer: torch.Tensor) -> None:
        before = self._weights.gathered
        self._weights.fill(piece, buffer)
        took = self._weights.gathered - before
        if piece and took > self._timeout:
            raise DeadlineError(
                f"the trainer's ranks took {took:.1f} s to gather a piece of {self._what}, and the "
                f"timeout is {self._timeout} s: a rank of the trainer is late; {AGAIN}",
                "reconnect",
            )
        self._deadline += took

    def _tell(self, layout: Layout, text: bytes) -> None:
        """Tells the receivers that a version follows."""
        for member in range(1, self._group.size):
            left = self._deadline - time.monotonic()
            try:
                self._group.tell(member, VERSION, self._version, text, layout.size, left)
            except RuntimeError as error:
                if time.monotonic() >= self._deadline:
                    # It stands still: gloo sends to a member that takes it.
                    raise self._group._failure({}, {member}, self._what, AGAIN) from error
                # What the member has said last tells more.
                while (message := self._group.next(0)) is not None:
                    self._take(message)
                self._failed.setdefault(member, str(error))
        if self._failed:
            self._fail()

    def _wait(self, until: Any) -> None:
        """Takes what comes until this is true."""
        while not until() or self._failed:
            if self._failed:
                self._fail()
            message = self._group.next(self._deadline - time.monotonic())
            if message is None:
                self._fail()
            else:
                self._take(message)

    def _take(self, message: Message) -> None:
        at = message.source
        if at < 0:
            if at in self._travelling:
                self._travelling.remove(at)
                if message.kind is not None:
                    # The timeout is that of each wait, and not that of all pieces.
                    self._deadline = time.monotonic() + self._timeout
                else:
                    self._failed.setdefault(0, message.text.decode(errors="replace"))
            return
        if at == 0:
            # This end was shut down in another thread.
            self._group.check()
        text = message.text.decode(errors="replace")
        if message.kind in (None, LEFT):
            self._group.gone[at] = _LEFT if message.kind == LEFT else text or "its link has ended"
            # One that has answered ends the next send, and not this one.
            if at not in self._lines:
                self._failed.setdefault(at, self._group.gone[at])
        elif message.kind == BROKE:
            self._failed.setdefault(at, REFUSED)
        elif message.number == self._version and message.kind == ENTERED:
            self._entered.add(at)
        elif message.number == self._version:
            outcome: Literal["applied", "refused"]
            outcome = "applied" if message.kind == APPLIED else "refused"
            name, after = self._group.names()[at], time.monotonic() - self._began
            rank = self._group.ranks[at]
            self._lines[at] = RankReport(rank, name, outcome, text or None, after)

    def _fail(self) -> None:
        """Raises the error of this send. Others are heard, to tell the cause from what follows."""
        # This end may have been shut down in another thread: then no receiver is the cause.
        self._group.check()
        group, until = self._group, time.monotonic() + GRACE
        while self._failed:
            left = min(until, max(self._deadline, time.monotonic())) - time.monotonic()
            heard = len(self._lines.keys() | (self._failed.keys() - {0}))
            message = None if heard == group.size - 1 else group.next(left)
            if message is None:
                break
            self._take(message)
        gone = [at for at, reason in self._failed.items() if reason == _LEFT]
        if gone:
            named = ", ".join(group.names()[at] for at in gone)
            raise PeerError(f"receiver {named} has left before {self._what}: {AGAIN}", "reconnect")
        waiting = set(range(1, group.size)) - self._lines.keys() - self._failed.keys()
        # A receiver that takes part may wait for one that does not.
        waiting = waiting - self._entered or waiting
        raise group._failure(self._failed, waiting, self._what, AGAIN)


def _closed(error: BaseException) -> WeightsyncError:
    """The error of later calls after one that has closed the group."""
    text = str(error) or type(error).__name__
    text = text if AGAIN in text else f"{text}; {AGAIN}"
    if isinstance(error, WeightsyncError) and not isinstance(error, LifecycleError):
        return type(error)(text, "reconnect")
    return PeerError(text, "reconnect")


def _shut_down() -> LifecycleError:
    return LifecycleError("this end was shut down: make the ends of all ranks again")
