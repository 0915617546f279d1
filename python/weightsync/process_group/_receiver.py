"""A worker's end."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch

from weightsync import _ends
from weightsync.errors import (
    CorruptError,
    LifecycleError,
    LoadError,
    OperatingSystemError,
    PeerError,
    WeightsyncError,
    WrongTypeError,
    WrongWeightsError,
)
from weightsync.process_group._group import (
    AGAIN,
    APPLIED,
    BROKE,
    ENTERED,
    KEPT,
    VERSION,
    Group,
    Message,
    meet,
    rank_in,
    seconds,
)
from weightsync.process_group._packing import AT_ONCE, PIECE, Layout, checksum
from weightsync.process_group._target import Target
from weightsync.transfer._group import GRACE
from weightsync.transfer.extractor import Memory

# After these the model is as it was, and the group goes on.
_REFUSALS = (WrongWeightsError, WrongTypeError, CorruptError, LoadError)


class Receiver:
    """A worker's end in a process group. It loads the versions that are broadcast.

    The constructor is collective: see :class:`Sender`.

    Args:
        model: where weights go: a torch module, a TensorDict, or a nested dict of tensors. An
            empty dict takes the sender's tensors, under dotted names.
        group, src, name: as of the :class:`Sender`.
        mode: ``"bind"``: a module's parameters of 64 KiB and more lie in the received buffer, at
            another address after each version; ``"copy"``: everything is copied.
        timeout: how long each wait for the other ranks lasts at most, in seconds; a wait for the
            next version has a timeout of its own.

    Raises:
        DeadlineError, SettingError, LifecycleError, UnsupportedError: as of the :class:`Sender`.
        WrongTypeError: for a model that cannot be loaded into.
    """

    def __init__(
        self,
        model: Any,
        group: Any = None,
        *,
        src: int = 0,
        name: str = "policy",
        mode: Literal["bind", "copy"] = "bind",
        timeout: float = 60.0,
    ) -> None:
        self._timeout = seconds(timeout)
        self._target = Target(model, mode)
        self._lock = threading.Lock()
        self._version = 0
        self._layout: Layout | None = None
        # What is entered while the model changes: its forwards may run in other threads.
        self._around_load: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
        # Two buffers: parameters lie in one, and the next version comes into the other.
        self._memory = Memory(2)
        members = meet(group, src, name, True, self._timeout)
        self._group = Group(members, rank_in(group), self._timeout)
        weakref.finalize(self, Group.close, self._group, _shut_down()).atexit = False
        _ends.opened(self)

    @property
    def version(self) -> int:
        """The version that the model has; 0 before the first."""
        return self._version

    def receive(self, timeout: float | None = None) -> int | None:
        """Waits for the sender's next version, takes part in its broadcast, and loads it.

        Args:
            timeout: how long to wait for a version, in seconds; None: until one comes, or the
                sender ends. A version that has begun to arrive is received to its end.

        Returns:
            The version's number; None at the timeout. The call can be made again then.

        Raises:
            SenderClosedError: the sender has shut down: the usual end of a loop.
            PeerError: the sender died, or the broadcast failed; the group is closed.
            WrongWeightsError: the version does not fit the model, which keeps its weights. Later
                versions can still be received.
            CorruptError: what came differs from what was sent; the model keeps its weights.
            WrongTypeError: a tensor of the model cannot be written, as one on the meta device.
            LoadError: torch refused a tensor. The model keeps its weights, unless the error says
                that it may have a part of the version; the group is closed then.
            OperatingSystemError: there is no memory for the version; the group is closed.
            LifecycleError: after :meth:`shutdown`, and in a forked child.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        self._group.check()
        if not self._lock.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            return None
        try:
            self._group.check()
            while True:
                left = None if deadline is None else deadline - time.monotonic()
                message = self._group.next(left)
                if message is None:
                    return None
                if message.source < 0:
                    # Of a broadcast that failed before.
                    continue
                if message.kind != VERSION:
                    raise self._end(message)
                return self._receive(message)
        finally:
            self._lock.release()

    def shutdown(self) -> None:
        """Leaves the group, which ends the sender's next send. Any number of times."""
        self._group.close(_shut_down())
        _ends.closed(self)

    def _end(self, message: Message) -> WeightsyncError:
        """Closes this end, as the sender's link has ended, and returns the error."""
        # Not if this end was shut down in another thread.
        self._group.check()
        error = self._group.ended_by(message)
        self._group.close(error)
        return error

    def _receive(self, message: Message) -> int:
        group, number = self._group, message.number
        try:
            if message.text:
                self._layout = Layout.from_text(message.text)
            layout = self._layout
            if layout is None or layout.size != message.size:
                raise PeerError("the sender's layout is missing, or has another size than it says")
            refusal: WeightsyncError | None = None
            try:
                self._target.fit(layout)
            except _REFUSALS as error:
                refusal = error
            # If the link has ended, what came over it last says why.
            with contextlib.suppress(RuntimeError):
                group.tell(0, ENTERED, number, within=self._timeout)
            arrival = _Arrival(group, layout, self._memory, refusal is None, self._timeout)
            arrival.run()
            try:
                if refusal is not None:
                    raise refusal
                tensors = arrival.checked(number)
                with self._around_load():
                    self._target.load(layout, tensors)
                    self._version = number
            except _REFUSALS as error:
                if not self._target.is_torn:
                    text = str(error).encode()
                    with contextlib.suppress(RuntimeError):
                        group.tell(0, KEPT, number, text, within=self._timeout)
                raise
            # If the link has ended, the next call says so.
            with contextlib.suppress(RuntimeError):
                group.tell(0, APPLIED, number, within=self._timeout)
            return number
        except BaseException as error:
            if isinstance(error, _REFUSALS) and not self._target.is_torn:
                raise
            # The others wait for this one, or for what comes through it.
            with contextlib.suppress(RuntimeError):
                group.tell(0, BROKE, number)
            ended = self._broken(error, number)
            group.close(ended)
            is_whole = isinstance(error, WeightsyncError) and not self._target.is_torn
            if is_whole or not isinstance(error, Exception):
                # Ctrl-C stays what it is.
                raise
            raise ended from error

    def _broken(self, error: BaseException, number: int) -> WeightsyncError:
        """The error after which the group is closed, as a version did not come to its end."""
        if isinstance(error, WeightsyncError) and not self._target.is_torn:
            # Without the traceback, whose frames keep the version's memory.
            return type(error)(str(error), error.remedy)
        if self._target.is_torn:
            has = f"the model may have a part of v{number}"
        elif self._version == number:
            has = f"the model has v{number}"
        else:
            has = "the model keeps its weights"
        kind: type[WeightsyncError] = PeerError
        if isinstance(error, WeightsyncError):
            kind = type(error)
        elif isinstance(error, (OSError, MemoryError)):
            kind = OperatingSystemError
        said = str(error) or type(error).__name__
        return kind(f"receiving v{number} was not finished: {said}; {has}, and {AGAIN}", "reconnect")

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __reduce__(self) -> Any:
        raise LifecycleError(
            "a receiver is a live end and cannot be pickled: make one in the process that receives"
        )

    def __repr__(self) -> str:
        return f"<Receiver of v{self._version}>"


class _Arrival:
    """One version on its way. What does not fit the model goes into one piece's memory."""

    def __init__(
        self, group: Group, layout: Layout, memory: Memory, keep: bool, timeout: float
    ) -> None:
        self._group, self._layout, self._keep = group, layout, keep
        # Longer than the sender's, which says who is late.
        self._timeout = 1.5 * timeout
        size = layout.size if keep else min(layout.size, PIECE + layout.size - layout.pieces[-1][1])
        self._whole = memory.take(size, torch.device("cpu"))
        self._sums: list[int] = []
        self._done: set[int] = set()

    def run(self) -> None:
        """Takes part in the broadcasts."""
        travelling: list[int] = []
        for piece, (begin, _) in enumerate(self._layout.pieces):
            start = begin if self._keep else 0
            buffer = self._whole[start : start + self._layout.end_of(piece) - begin]
            travelling.append(self._group.broadcast(buffer))
            if len(travelling) == (AT_ONCE if self._keep else 1):
                self._finish(travelling.pop(0))
        for one in travelling:
            self._finish(one)

    def checked(self, version: int) -> list[torch.Tensor]:
        """The tensors that have come.

        Raises:
            CorruptError: if they differ from those sent.
        """
        begin = self._layout.pieces[-1][0]
        expected = self._layout.sums(self._whole[begin:]).tolist()
        wrong = [at for at, one in enumerate(self._sums) if one != expected[at + 1]]
        differs = f"the checksums of pieces {wrong} of {len(self._sums)} differ" if wrong else None
        if expected[0] != version:
            differs = differs or f"its last piece says that it is v{expected[0]}"
        if differs:
            raise CorruptError(
                f"v{version} did not come as it was sent: {differs}; the model keeps its weights. "
                "Send again",
                "retry",
            )
        return self._layout.unpack(self._whole)

    def _finish(self, source: int) -> None:
        """Waits for a piece, and makes its checksum while the next one is on its way."""
        deadline = time.monotonic() + self._timeout
        while source not in self._done:
            message = self._group.next(deadline - time.monotonic())
            if message is None:
                raise PeerError(
                    f"a piece of the version has not come within {self._timeout} s; the model keeps "
                    f"its weights, and {AGAIN}",
                    "reconnect",
                )
            if message.kind is None and message.source < 0:
                # The sender may know why.
                reason = message.text.decode(errors="replace")
                message = self._group.next(GRACE)
                while message is not None and message.source < 0:
                    message = self._group.next(GRACE)
                if message is None:
                    raise PeerError(f"the broadcast failed: {reason}; {AGAIN}", "reconnect")
            if message.source == 0:
                self._group.check()
                raise self._group.ended_by(message)
            self._done.add(message.source)
        if self._keep:
            begin, end = self._layout.pieces[len(self._sums)]
            self._sums.append(checksum(self._whole[begin:end]))


def _shut_down() -> LifecycleError:
    return LifecycleError("this end was shut down: make the ends of all ranks again")
