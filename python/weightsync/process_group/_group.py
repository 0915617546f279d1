"""The links between a sender and its receivers, made over the store of a process group."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from weightsync.errors import (
    DeadlineError,
    LifecycleError,
    PeerError,
    SenderClosedError,
    SettingError,
    UnsupportedError,
    WeightsyncError,
)
from weightsync.transfer._group import GRACE, LOOK, Links, own_name, store_calls

# The tags of messages to receivers, and of messages to the sender.
_HEAD, _TEXT, _ANSWER, _REASON = 11, 12, 13, 14

# Kinds of messages to receivers: a version follows; the sender is closed.
VERSION, OVER = 1, 2

# Kinds of answers: the model has the version; it is as it was; the transfer failed; this
# receiver has shut down; this receiver has begun to receive.
APPLIED, KEPT, BROKE, LEFT, ENTERED = 0, 1, 2, 3, 4

# The most bytes of a text that comes: a layout, or a reason.
_MOST_TEXT = 256 << 20

_FOREVER = timedelta(days=3650)

#: What to do once a group is closed.
AGAIN = (
    "the group is closed: its members are fixed. Make the ends of all ranks that are left again, "
    "in a new process group; or use the native transport, weightsync.Sender(model, "
    "scheme=weightsync.Distributed(...)), whose workers die and join at any time"
)


class Message(NamedTuple):
    """Something that has come: from a member, or of a broadcast of this process."""

    #: The member's rank among the links; of a broadcast its number, negative.
    source: int
    #: None if the member's link has ended, or the broadcast has failed.
    kind: int | None
    number: int = 0
    size: int = 0
    text: bytes = b""


class Members(NamedTuple):
    """The ranks of a process group that take part."""

    #: The store of this group of ends.
    store: Any
    #: The ranks of the process group: the sender, and then its receivers.
    ranks: list[int]
    #: What errors call them.
    names: list[str]
    #: The ranks that have made a sender, and what errors call them.
    trainers: dict[int, str]
    #: Says in the store that this group of ends is over, and why; empty for an orderly end.
    over: Callable[[str], None]


class _End(NamedTuple):
    """What a rank says in the store of the end that it has made."""

    role: str
    src: str
    name: str


def meet(group: Any, src: int, name: str, is_receiver: bool, timeout: float) -> Members:
    """Waits until every rank of a process group has made its end.

    Raises:
        DeadlineError: naming the ranks that have not.
        SettingError: if they do not agree on who sends.
    """
    outer, rank, size = _outer(group)
    if not isinstance(src, int) or not 0 <= src < size:
        raise SettingError(f"src: expected a rank of the group, 0 to {size - 1}, got {src!r}")
    if is_receiver and rank == src:
        raise SettingError(f"rank {rank} is src, which sends: make a Sender here, or choose another src")
    if dist.get_backend() == "mpi":
        raise UnsupportedError(
            "the default process group is one of MPI, which has no store by which ranks find each "
            "other. Make it with gloo and an init_method, or use the native transport, "
            "weightsync.Sender(model, scheme=weightsync.Distributed(...))"
        )
    shared = dist.distributed_c10d._get_process_group_store(outer)
    base = dist.PrefixStore(f"weightsync/{name}", shared)
    known = _met.setdefault(outer, {})
    number = known.get(name, 0) + 1
    # Another member may have given up at this number.
    with store_calls():
        while base.check([f"{number}/over"]):
            number += 1
    known[name] = number
    store = dist.PrefixStore(str(number), base)

    def over(why: str) -> None:
        # The store may have ended with its process.
        with contextlib.suppress(RuntimeError, dist.DistError):
            store.set("over", why)

    try:
        role = "receiver" if is_receiver else "sender"
        with store_calls():
            store.set(f"end/{rank}", f"{role} {src} {own_name(rank)}")
            ends = _wait_for_ends(store, size, name, timeout)
    except BaseException:
        over("its members were not there in time")
        raise
    if len({end.src for end in ends}) > 1:
        given = ", ".join(f"rank {at} has src={end.src}" for at, end in enumerate(ends))
        raise SettingError(f"src: expected the same rank on all ranks of the group, but {given}")
    if ends[src].role != "sender":
        raise SettingError(f"rank {src} is src, and has made a Receiver: expected a Sender there")
    receivers = [at for at, end in enumerate(ends) if end.role == "receiver"]
    if not receivers:
        raise SettingError(f"no rank of the group of {size} has made a Receiver: expected one or more")
    ranks = [src, *receivers]
    trainers = {at: end.name for at, end in enumerate(ends) if end.role == "sender"}
    return Members(store, ranks, [ends[at].name for at in ranks], trainers, over)


def rank_in(group: Any) -> int:
    """This process's rank in a process group."""
    return _outer(group)[1]


class _Sends:
    """Messages on their way to members. A link that ends ends those to its member.

    gloo can forget a message that is sent just as it learns that the link has ended. The wait for it
    then lasts to its limit, and nothing that torch has for Python ends it. So another thread has that wait.
    """

    def __init__(self) -> None:
        # A signal's handler, or a finalizer, may come back to this in the same thread.
        self._lock = threading.RLock()
        self._ended: set[int] = set()
        self._waiting: set[tuple[int, queue.SimpleQueue[BaseException | None]]] = set()

    def send(self, member: int, send: Callable[[], None]) -> None:
        """Sends a message.

        Raises:
            RuntimeError: from gloo, or if the link has ended.
        """
        done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        one = (member, done)

        def run() -> None:
            try:
                send()
                done.put(None)
            except BaseException as error:
                done.put(error)

        with self._lock:
            if member in self._ended:
                raise RuntimeError("the link has ended")
            self._waiting.add(one)
        try:
            try:
                threading.Thread(target=run, daemon=True, name="weightsync-tell").start()
            except RuntimeError:
                run()  # Python starts no thread as it ends
            error = done.get()
        finally:
            with self._lock:
                self._waiting.discard(one)
        try:
            if error is not None:
                raise error
        finally:
            # Its traceback has this frame, which would keep the process group until a collection. In
            # a forked child that would wait for threads that are not there.
            del error

    def end(self, member: int) -> None:
        """The link to a member has ended."""
        with self._lock:
            self._ended.add(member)
            for to, done in list(self._waiting):
                if to == member:
                    done.put(RuntimeError("the link has ended"))


class Group(Links):
    """The links of one end. Threads listen to the others; all that comes is in one queue."""

    def __init__(self, members: Members, rank: int, timeout: float) -> None:
        at = members.ranks.index(rank)
        super().__init__(at, len(members.ranks), timeout)
        self.ranks, self._names = members.ranks, members.names
        self._over, self._store = members.over, members.store
        self._pid = os.getpid()
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._sends = _Sends()
        self._threads: list[threading.Thread] = []
        self._ended: WeightsyncError | None = None
        #: At the sender: the members whose links have ended, and why.
        self.gone: dict[int, str] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        # The broadcasts of this process that have not ended.
        self._running: set[int] = set()
        try:
            members.store.set(f"linking/{at}", "")
            self._form(members.store, "gloo", _device())
        except BaseException as error:
            missing = self._not_linking(members.store)
            self._over("its links were not made")
            self._close_links()
            if isinstance(error, (RuntimeError, dist.DistError)):
                named = f", since {', '.join(missing)} made none" if missing else ""
                raise PeerError(
                    f"the links to the other ranks were not made{named}: {error}", "retry"
                ) from error
            raise
        others = range(1, self.size) if at == 0 else [0]
        tags = (_ANSWER, _REASON) if at == 0 else (_HEAD, _TEXT)
        for other in others:
            arguments = (self._control, other, tags, self._messages, self._sends)
            thread = threading.Thread(
                target=_listen, args=arguments, daemon=True, name=f"weightsync-rank-{other}"
            )
            thread.start()
            self._threads.append(thread)
        _groups.add(self)

    def names(self) -> list[str]:
        """What errors call the members."""
        return self._names

    def _not_linking(self, store: Any) -> list[str]:
        """The members that have not begun to make their links."""
        try:
            return [name for at, name in enumerate(self._names) if not store.check([f"linking/{at}"])]
        except (RuntimeError, dist.DistError):
            # The store has ended with its process.
            return []

    def check(self) -> None:
        """Refuses a call at an end that is closed, or that another process has made.

        Raises:
            LifecycleError: if this end was shut down, or if this is a forked child.
            PeerError: as the group ended.
        """
        if os.getpid() != self._pid:
            raise LifecycleError(
                "this end was made by the parent of this process: a forked child is no rank of the "
                "process group. Use the end in the parent"
            )
        if self._ended is not None:
            raise type(self._ended)(str(self._ended), self._ended.remedy)

    def tell(
        self,
        member: int,
        kind: int,
        number: int,
        text: bytes = b"",
        size: int = 0,
        within: float = GRACE,
    ) -> None:
        """Sends a message to a member, which takes it within so many seconds.

        Raises:
            RuntimeError: if the link has ended, or the member takes nothing in time.
        """
        control, limit = self._control, timedelta(seconds=max(0.001, within))
        if control is None:
            return
        head, body = (_HEAD, _TEXT) if self._rank == 0 else (_ANSWER, _REASON)

        def send() -> None:
            control.send([torch.tensor([kind, number, size, len(text)], device="cpu")], member, head).wait(limit)
            if text:
                data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
                control.send([data], member, body).wait(limit)

        self._sends.send(member, send)

    def next(self, timeout: float | None) -> Message | None:
        """What comes next; None at the timeout."""
        try:
            return self._messages.get(timeout=None if timeout is None else max(0.0, timeout))
        except queue.Empty:
            return None

    def broadcast(self, tensor: torch.Tensor) -> int:
        """Begins a broadcast of bytes; a message says that it has ended.

        Returns:
            The message's source.
        """
        number, messages, running = -next(self._numbers), self._messages, self._running
        if self._data is None:
            messages.put(Message(number, None, text=b"the links are closed"))
            return number

        def done(future: Any) -> None:
            try:
                future.wait()
                messages.put(Message(number, APPLIED))
            except BaseException as error:
                messages.put(Message(number, None, text=str(error).encode()))
            finally:
                running.discard(number)

        running.add(number)
        try:
            self._start_broadcast(tensor).get_future().add_done_callback(done)
        except RuntimeError as error:
            running.discard(number)
            messages.put(Message(number, None, text=str(error).encode()))
        return number

    def close(self, ended: WeightsyncError) -> None:
        """Closes the links, once. Later calls of this end raise this error."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._ended is not None:
                return
            self._ended = ended
        is_orderly = isinstance(ended, LifecycleError)
        if self._rank == 0:
            self._over("" if is_orderly else str(ended))
        for member in range(1, self.size) if self._rank == 0 else [0]:
            # In an orderly end nothing that was sent before is in the way.
            with contextlib.suppress(RuntimeError):
                if is_orderly and member not in self.gone:
                    self.tell(member, OVER if self._rank == 0 else LEFT, 0)
        links = (self._control, self._data)
        self._close_links()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(self._timeout)
        self._threads = []
        _finish(links, self._running)
        # A call in another thread may wait.
        self._messages.put(Message(0, None))

    def ended_by(self, message: Message) -> WeightsyncError:
        """The error at a receiver whose sender has shut down, or whose link to it has ended."""
        why, name = "" if message.kind == OVER else None, self._names[0]
        with contextlib.suppress(RuntimeError, dist.DistError):
            # The store may have ended with the sender.
            if why is None and self._store.check(["over"]):
                why = self._store.get("over").decode(errors="replace")
        if why is None:
            return PeerError(
                f"the sender, {name}, died: the model keeps its weights, and {AGAIN}", "reconnect"
            )
        if why:
            return PeerError(f"the sender, {name}, has closed the group: {why}", "reconnect")
        return SenderClosedError("the sender has shut down: no version comes any more")


def seconds(timeout: float | None, name: str = "timeout") -> float:
    """A timeout of a group.

    Raises:
        SettingError: unless it is a number above 0.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < 1e7:
        raise SettingError(f"{name}: expected seconds above 0, got {timeout!r}")
    return float(timeout)


def _outer(group: Any) -> tuple[Any, int, int]:
    """A process group, this process's rank in it, and its size."""
    if not dist.is_available() or not dist.is_initialized():
        raise LifecycleError(
            "this process has no process group: call torch.distributed.init_process_group first"
        )
    outer = dist.group.WORLD if group is None else group
    if not isinstance(outer, dist.ProcessGroup):
        raise SettingError(
            f"group: expected a process group that has this process, or None, got {outer!r}"
        )
    return outer, dist.get_rank(outer), dist.get_world_size(outer)


def _wait_for_ends(store: Any, size: int, name: str, timeout: float) -> list[_End]:
    keys, deadline = [f"end/{rank}" for rank in range(size)], time.monotonic() + timeout
    # Not `store.wait`: other threads could not use the store meanwhile, nor Ctrl-C end the wait.
    while not store.check(keys):
        if store.check(["over"]):
            raise PeerError(
                "another rank has given up its wait for all ends: make the ends again", "retry"
            )
        if time.monotonic() > deadline:
            missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
            raise DeadlineError(
                f"after {timeout} s rank {', '.join(missing)} of the group of {size} has made no "
                f"Sender or Receiver of {name!r}: each rank makes one, in the same order",
                "retry",
            )
        time.sleep(LOOK)
    return [_End(*store.get(key).decode(errors="replace").split(" ", 2)) for key in keys]


def _device() -> Any:
    """The interface that torch's own gloo groups take."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface)
    return dist.ProcessGroupGloo.create_default_device()


def _listen(
    control: Any,
    member: int,
    tags: tuple[int, int],
    messages: queue.SimpleQueue[Message],
    sends: _Sends,
) -> None:
    """Puts the messages of a member into the queue until its link ends."""
    head = torch.zeros(4, dtype=torch.int64, device="cpu")
    try:
        while True:
            control.recv([head], member, tags[0]).wait(_FOREVER)
            kind, number, size, length = head.tolist()
            text = b""
            if length:
                if not 0 < length <= _MOST_TEXT:
                    raise PeerError(f"a text of {length} bytes, expected {_MOST_TEXT} or fewer")
                body = torch.empty(length, dtype=torch.uint8, device="cpu")
                control.recv([body], member, tags[1]).wait(_FOREVER)
                text = ctypes.string_at(body.data_ptr(), length)
            messages.put(Message(member, kind, number, size, text))
            if kind == (OVER if member == 0 else LEFT):
                return
    except BaseException as error:
        messages.put(Message(member, None, text=str(error).encode()))
    finally:
        sends.end(member)


def _finish(links: tuple[Any, Any], running: set[int]) -> None:
    """Waits until broadcasts over closed links have ended, which gloo's threads are part of.

    One that has not keeps the links until later: to drop them would wait for it.
    """
    deadline = time.monotonic() + GRACE
    while running and time.monotonic() < deadline:
        time.sleep(LOOK)
    _unfinished[:] = [one for one in _unfinished if one[1]]
    if running:
        _unfinished.append((links, running))


# Closed links that a broadcast still uses, and the broadcasts.
_unfinished: list[tuple[tuple[Any, Any], set[int]]] = []

# How often a process has met the others, by group and name.
_met: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()

_groups: weakref.WeakSet[Group] = weakref.WeakSet()


def _in_child() -> None:
    # A forked child has none of gloo's threads. What would end them would wait for ever, so
    # the child keeps the objects until it ends.
    for group in list(_groups):
        for one in (group._control, group._data):
            if one is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


os.register_at_fork(after_in_child=_in_child)
