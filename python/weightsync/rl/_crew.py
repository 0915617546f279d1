"""The trainer's side of a collector's workers: starting them, talking to them, and their ends."""

from __future__ import annotations

import abc
import array
import builtins
import contextlib
import copy
import io
import json
import multiprocessing
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.context import get_spawning_popen, set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any

from weightsync.errors import LifecycleError, WorkerError, WrongTypeError
from weightsync.rl._terms import is_env_creator
from weightsync.rl._worker import LONGEST, Guard, Link, Start, Worker, serve

#: How long ended workers may take to leave.
_LEAVE = 5.0


#: What a worker process runs. It has to find the modules that the trainer imported.
#: Processes that one parent has started know each other by the key: with it what travels can use a manager
#: of multiprocessing. Workers of other hosts get none.
_PROGRAM = """
import json, multiprocessing, os, sys
settings = open(int(sys.argv[3]), "rb")
given = json.loads(settings.readline())
sys.path[:] = given["path"]
multiprocessing.current_process().authkey = bytes.fromhex(given["authkey"])
from weightsync.rl._worker import main
code = main(int(sys.argv[1]), int(sys.argv[2]), settings)
sys.stdout.flush()
sys.stderr.flush()
# As a child of multiprocessing ends: to take down the interpreter may take seconds.
os._exit(code)
"""


class Crew:
    """Workers, and a link to each.

    Args:
        starts: what each worker is started with.
        begin: starts a worker: :class:`Process`, :class:`Thread`, or what starts it elsewhere.
    """

    def __init__(self, starts: Sequence[Start], begin: Callable[[Start], Member]) -> None:
        self._pid = os.getpid()
        self._starts = list(starts)
        self._begin = begin
        self._poll = select.poll()
        #: Whether Ctrl-C may raise: nothing is half done.
        self._is_waiting = False
        self._members: list[Member | None] = [None] * len(self._starts)
        self._finalizer = weakref.finalize(self, _close, self._members, os.getpid())
        for worker in range(len(self._starts)):
            self.start(worker)

    def __len__(self) -> int:
        return len(self._starts)

    def start(self, worker: int) -> None:
        """Starts a worker; the one before it, if there is any, has ended."""
        member = self._begin(self._starts[worker])
        self._members[worker] = member
        for fd in member.fds:
            self._poll.register(fd, select.POLLIN)

    def pid(self, worker: int) -> int | None:
        """The worker's process, or its launcher's; None for a thread, or while there is none."""
        member = self._members[worker]
        return None if member is None or member.process is None else member.process.pid

    @property
    def has_calls(self) -> bool:
        """Whether workers answer questions: those of this host do."""
        return all(member is None or isinstance(member, _Local) for member in self._members)

    def change(self, how: Callable[[Start], Start]) -> None:
        """Changes what workers are started with from here on."""
        self._starts = [how(start) for start in self._starts]

    def tell(self, worker: int, order: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Gives a worker an order. The end of one that has ended is an event of its own."""
        self._check_process()
        member = self._members[worker]
        if member is not None:
            member.tell(order, fds)

    @contextlib.contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Lets Ctrl-C raise where the trainer waits for workers, and after this, nowhere else.

        What a worker has said would be lost if Ctrl-C came between reading and noting it.
        """
        before = signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or not callable(before) or self._is_uninterrupted:
            yield
            return
        came: list[Any] = []

        def later(number: int, frame: Any) -> None:
            if self._is_waiting:
                before(number, frame)
            else:
                came.append(frame)

        self._is_uninterrupted = True
        signal.signal(signal.SIGINT, later)
        try:
            yield
        finally:
            self._is_uninterrupted = False
            signal.signal(signal.SIGINT, before)
            if came:
                before(signal.SIGINT, came[0])

    _is_uninterrupted = False

    def hear(self, timeout: float | None) -> list[tuple[int, dict[str, Any]]]:
        """What workers have said, at most one message of each; empty at the timeout.

        A worker that has ended says ``{"is": "error", "reason": …}``, once.
        """
        self._check_process()
        longest = None if timeout is None else min(max(0.0, timeout * 1000), 1e9)
        self._is_waiting = True
        try:
            ready = {fd for fd, _ in self._poll.poll(longest)}
        finally:
            self._is_waiting = False
        heard = []
        for worker, member in enumerate(self._members):
            if member is not None and not ready.isdisjoint(member.fds):
                said = self._read(worker, member)
                if said is not None:
                    heard.append((worker, said))
        return heard

    def end(self, worker: int) -> str:
        """Kills a worker, and says how. A thread cannot be killed: it ends once its step does."""
        member = self._members[worker]
        if member is None:
            return ""
        self._forget(worker, member)
        return member.kill()

    def close(self) -> None:
        """Ends all workers and waits until their processes have left."""
        if os.getpid() == self._pid:
            self._finalizer()

    def _read(self, worker: int, member: Member) -> dict[str, Any] | None:
        said = member.read()
        if said is not None and said["is"] == "error":
            self._forget(worker, member)
            how = member.ended(_LEAVE)
            said["reason"] = said["reason"].strip() or how
        return said

    def _forget(self, worker: int, member: Member) -> None:
        for fd in member.fds:
            self._poll.unregister(fd)
        self._members[worker] = None
        member.leave()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise LifecycleError(
                "this collector belongs to the process that made it; a forked child needs its own"
            )
        if not self._finalizer.alive:
            raise LifecycleError("the collector was shut down: make another")


def worker_error(kind: str, text: str) -> WorkerError:
    """A worker's error in this process: also of Python's class of that name."""
    found = _builtin(kind)
    if found is not None and not issubclass(WorkerError, found):
        with contextlib.suppress(TypeError):
            # Not all classes take one text, or go together with this one.
            error: WorkerError = type("WorkerError", (WorkerError, found), {})(text)
            return error
    return WorkerError(text)


def answered_error(kind: str, text: str) -> Exception:
    """What a call in a worker raised: of Python's class of that name."""
    error, found = worker_error(kind, text), _builtin(kind)
    if found is not None and not isinstance(error, found):
        # Such as AttributeError, which is of no other class too.
        with contextlib.suppress(TypeError):
            return found(text)
    return error


def _builtin(kind: str) -> type[Exception] | None:
    found = getattr(builtins, kind, None)
    return found if isinstance(found, type) and issubclass(found, Exception) else None


class Member(abc.ABC):
    """A worker: how it is talked to, and how it ends.

    Attributes:
        fds: what is readable once the worker has said something, or has ended.
        process: the worker's process, or what started it on another host.
    """

    fds: list[int]
    process: subprocess.Popen[bytes] | None = None

    @abc.abstractmethod
    def tell(self, order: dict[str, Any], fds: Sequence[int]) -> None:
        """Gives the worker an order; nothing happens if it has ended."""

    @abc.abstractmethod
    def read(self) -> dict[str, Any] | None:
        """What the worker has said, which is an error once it has ended; None: nothing."""

    @abc.abstractmethod
    def leave(self) -> None:
        """Closes the link, also where a forked child has it too."""

    @abc.abstractmethod
    def kill(self) -> str:
        """Ends the worker, whatever it does, and says how. It writes no frames after that."""

    @abc.abstractmethod
    def ended(self, patience: float) -> str:
        """Waits for the end, and says how it was."""


class _Local(Member):
    """A worker of this host, with a socket."""

    def __init__(self) -> None:
        self.link, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.fds = [self.link.fileno()]

    def tell(self, order: dict[str, Any], fds: Sequence[int]) -> None:
        with contextlib.suppress(ConnectionError):
            socket.send_fds(self.link, [json.dumps(order).encode()], list(fds))

    def read(self) -> dict[str, Any] | None:
        message, fds = _receive(self.link)
        said = dict(json.loads(message)) if message else {"is": "error", "reason": ""}
        if fds:
            said["fd"] = fds[0]
        return said

    def leave(self) -> None:
        with contextlib.suppress(OSError):
            self.link.shutdown(socket.SHUT_RDWR)
        self.link.close()


class Process(_Local):
    """A worker process: this interpreter, started again."""

    process: subprocess.Popen[bytes]

    def __init__(self, start: Start) -> None:
        with _Handed() as handed:
            settings = memory_file(_surroundings() + given_to_worker(start, handed))
            handed.fds.append(settings)
            super().__init__()
            watched, self._lifeline = os.pipe()
            try:
                own = (self.theirs.fileno(), watched)
                command = [sys.executable, "-P", "-c", _PROGRAM, *map(str, (*own, settings))]
                self.process = subprocess.Popen(
                    command, pass_fds=(*own, *handed.fds), stdin=subprocess.DEVNULL
                )
            except BaseException:
                os.close(self._lifeline)
                self.link.close()
                raise
            finally:
                self.theirs.close()
                os.close(watched)
        try:
            self._pidfd = os.pidfd_open(self.process.pid)
        except BaseException:
            # Nobody would notice its end.
            os.close(self._lifeline)
            self.link.close()
            self.process.kill()
            self.process.wait()
            raise
        self.fds.append(self._pidfd)
        _processes.add(self)

    def leave(self) -> None:
        super().leave()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def kill(self) -> str:
        self.process.kill()
        return f", so {self.ended(_LEAVE)}"

    def ended(self, patience: float) -> str:
        try:
            return how_ended(self.process, patience, f"its process {self.process.pid}")
        finally:
            self.cut()

    def cut(self) -> None:
        """Closes the lifeline."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def forget_in_child(self) -> None:
        """In a forked child: the workers are to end with the trainer, and not with the child."""
        self.cut()
        self.link.close()


def how_ended(
    process: subprocess.Popen[bytes],
    patience: float,
    who: str,
    kill: Callable[[subprocess.Popen[bytes]], None] = subprocess.Popen.kill,
) -> str:
    """Waits for the end of a process, kills it after that, and says how it ended."""
    try:
        process.wait(patience)
    except BaseException as error:
        kill(process)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
    code = process.returncode
    return f"{who} was killed by {_signal(-code)}" if code < 0 else f"{who} ended with exit code {code}"


#: All worker processes of this process.
_processes: weakref.WeakSet[Process] = weakref.WeakSet()


def _forget_workers() -> None:
    for process in list(_processes):
        process.forget_in_child()
    _processes.clear()


os.register_at_fork(after_in_child=_forget_workers)


class Thread(_Local):
    """A worker thread, with a policy and environments of its own."""

    def __init__(self, start: Start) -> None:
        super().__init__()
        # The trainer's policy changes while it trains, and an environment may be that of several workers.
        policy, make_env = copy.deepcopy(start.policy), copy.deepcopy(start.make_env)
        start = replace(start, policy=policy, make_env=make_env)
        self._guard = Guard()
        self.thread = threading.Thread(
            target=serve,
            args=(Link(self.theirs), lambda: Worker(start, self._guard)),
            name=f"weightsync-worker-{start.worker}",
            daemon=True,
        )
        self.thread.start()

    def kill(self) -> str:
        self._guard.give_up()
        # A load of the worker's model may hang too.
        leaving = threading.Thread(target=self._guard.leave, daemon=True)
        leaving.start()
        leaving.join(_LEAVE)
        return ", and its thread is left alone"

    def ended(self, patience: float) -> str:
        self._guard.give_up()
        self.thread.join(patience)
        return "its thread goes on" if self.thread.is_alive() else "its thread has ended"


def _receive(link: socket.socket) -> tuple[bytes, list[int]]:
    """A worker's message and its descriptors; empty if it has ended."""
    for _ in range(2):
        try:
            # Python's recv_fds leaves its flags out.
            flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            fds = array.array("i")
            message, ancillary, _, _ = link.recvmsg(LONGEST, socket.CMSG_SPACE(fds.itemsize), flags)
            for level, kind, data in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
            return message, fds.tolist()
        except ConnectionError:
            # It left orders unread. The error comes before what the worker has said, and once.
            continue
        except BlockingIOError:
            # Its process has ended, and a child of it holds the link.
            break
    return b"", []


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        # One of the real-time signals.
        return f"signal {number}"


def _close(members: list[Member | None], pid: int) -> None:
    if os.getpid() != pid:
        return
    living = [member for member in members if member is not None]
    for member in living:
        member.leave()
    until = time.monotonic() + _LEAVE
    try:
        for member in living:
            member.ended(max(0.0, until - time.monotonic()))
    except BaseException:
        # Ctrl-C: none of them gets more time.
        for member in living:
            member.kill()
        raise
    finally:
        members[:] = [None] * len(members)


class _Handed:
    """What the trainer hands to a worker process of this host, as :mod:`multiprocessing` does when it
    spawns one: its locks, values and queues, and tensors in shared memory, such as those by which an
    ``EnvCreator`` of TorchRL has all environments share their statistics.

    Attributes:
        fds: descriptors that the process takes over, by the same numbers. They are closed here.
    """

    def __init__(self) -> None:
        self.fds: list[int] = []

    def __enter__(self) -> _Handed:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self.fds:
            os.close(fd)

    # What multiprocessing asks of the process that is being started.

    def duplicate_for_child(self, fd: int) -> int:
        # A copy, which the worker closes once it has read it.
        self.fds.append(os.dup(fd))
        return self.fds[-1]

    @staticmethod
    def DupFd(fd: int) -> _Taken:  # noqa: N802
        return _Taken(fd)


class _Taken:
    """A descriptor that a process has taken over."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def detach(self) -> int:
        return self._fd


def pickled(*values: Any, handed: _Handed | None = None) -> bytes:
    """What a worker is started with, or is asked to call: one pickle after the other.

    What several values have in common stays one object, if one unpickler reads them.

    Args:
        handed: what a process that starts now is handed over with the last value; all else is copied.
    """
    try:
        from cloudpickle import Pickler
    except ImportError:
        Pickler = None  # noqa: N806
    out = io.BytesIO()
    try:
        pickler = _pickler(Pickler or pickle.Pickler)(out)
        for value in values[:-1]:
            pickler.dump(value)
        with _spawning(handed):
            pickler.hands_over = handed is not None
            pickler.dump(values[-1])
        return out.getvalue()
    except Exception as error:
        advice = (
            "give a function that makes it in the worker, as the environment or as policy_factory"
            if Pickler is not None
            else "install cloudpickle, which takes functions and classes of any kind"
        )
        raise WrongTypeError(
            f"the worker's environment or policy cannot be pickled ({error}): {advice}"
        ) from error


def given_to_worker(start: Start, handed: _Handed | None = None) -> bytes:
    """What a worker reads first: the environments that this program registered, its start, and what makes
    its environment. Only what makes the environment shares memory with the trainer: a policy sees no
    change that was not sent."""
    return pickled(_registered(), replace(start, make_env=None), start.make_env, handed=handed)


# By id: a specification of Gymnasium and its pickle, which is empty where it has none.
_known_specs: dict[str, tuple[Any, bytes]] = {}


def _registered() -> list[bytes]:
    """What this program, or a package that it imports, has registered with Gymnasium, one by one.

    A worker does not run the main module, where programs do so.
    """
    gymnasium = sys.modules.get("gymnasium")
    found = []
    for spec in [] if gymnasium is None else list(gymnasium.registry.values()):
        creator = spec.entry_point
        module = creator if isinstance(creator, str) else getattr(creator, "__module__", None) or ""
        if module.startswith("gymnasium."):
            # Its own.
            continue
        known = _known_specs.get(spec.id)
        if known is None or known[0] is not spec:
            known = _known_specs[spec.id] = spec, _spec_pickled(spec)
        found.append(known[1])
    return [one for one in found if one]


def _spec_pickled(spec: Any) -> bytes:
    """One that cannot be pickled is missed where its environment is made, by its name."""
    for name in ("entry_point", "vector_entry_point"):
        creator = getattr(spec, name)
        if isinstance(creator, str) and creator.startswith("__main__:"):
            # No module of a worker has this name: the class itself travels.
            spec = copy.copy(spec)
            setattr(spec, name, getattr(sys.modules["__main__"], creator.partition(":")[2], creator))
    try:
        return pickled(spec)
    except WrongTypeError:
        return b""


def _share(state: Any) -> None:
    """Puts the tensors of a state into memory that processes share, as multiprocessing does."""
    if hasattr(state, "share_memory_"):
        state.share_memory_()
    elif isinstance(state, Mapping):
        for one in state.values():
            _share(one)


@contextlib.contextmanager
def _spawning(handed: _Handed | None) -> Iterator[None]:
    """Lets this thread pickle what multiprocessing shares with a process that it starts."""
    if handed is None:
        yield
        return
    before = get_spawning_popen()
    set_spawning_popen(handed)
    try:
        yield
    finally:
        set_spawning_popen(before)


def _pickler(base: Any) -> Any:
    """The class that pickles: what is handed over as multiprocessing does, and all else by copies."""
    torch = sys.modules.get("torch")

    def is_shared(value: Any) -> bool:
        memory = None
        if torch is not None:
            if isinstance(value, torch.Tensor):
                memory = value.untyped_storage()
            elif isinstance(value, torch.storage.TypedStorage):
                memory = value._untyped_storage
            elif isinstance(value, torch.UntypedStorage):
                memory = value
        return memory is None or (memory.device.type == "cpu" and memory.is_shared())

    class Sharing(base):  # type: ignore[misc]
        hands_over = False

        def reducer_override(self, value: Any) -> Any:
            if self.hands_over:
                kind = type(value)
                if is_env_creator(value):
                    _share(value.state_dict())
                reduce = ForkingPickler._extra_reducers.get(kind)
                # Functions are for the base, and TensorDicts are made of tensors.
                is_other = kind.__module__ in ("builtins", "functools") or hasattr(kind, "batch_size")
                if reduce is not None and not is_other and is_shared(value):
                    return reduce(value)
            inherited = getattr(super(), "reducer_override", None)
            return NotImplemented if inherited is None else inherited(value)

    return Sharing


def _surroundings() -> bytes:
    """A line with what a worker process has in common with this one."""
    key = bytes(multiprocessing.current_process().authkey)
    given = {"path": [str(one) for one in sys.path], "authkey": key.hex()}
    return json.dumps(given).encode() + b"\n"


def memory_file(data: bytes) -> int:
    """A file of memory that a worker process reads."""
    fd = os.memfd_create("weightsync-worker", os.MFD_CLOEXEC)
    try:
        with io.FileIO(fd, "w", closefd=False) as file, io.BufferedWriter(file) as out:
            out.write(data)
        os.lseek(fd, 0, os.SEEK_SET)
    except BaseException:
        os.close(fd)
        raise
    return fd
