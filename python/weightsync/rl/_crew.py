"""The trainer's side of a collector's workers: starting them, talking to them, and their ends."""

from __future__ import annotations

import abc
import contextlib
import copy
import io
import json
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
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from weightsync.errors import LifecycleError, WrongTypeError
from weightsync.rl._worker import LONGEST, Start, serve

#: How long ended workers may take to leave.
_LEAVE = 5.0


#: What a worker process runs. It has to find the modules that the trainer imported.
_PROGRAM = """
import json, os, sys
settings = open(int(sys.argv[3]), "rb")
sys.path[:] = json.loads(settings.readline())
from weightsync.rl._worker import main
code = main(int(sys.argv[1]), int(sys.argv[2]), settings)
sys.stdout.flush()
sys.stderr.flush()
# As a child of multiprocessing ends: to take down the interpreter may take seconds.
os._exit(code)
"""


class Crew:
    """Worker processes, or threads, and a link to each.

    Args:
        starts: what each worker is started with.
        threads: whether the workers are threads of this process.
    """

    def __init__(self, starts: Sequence[Start], threads: bool) -> None:
        self._pid = os.getpid()
        self._starts = list(starts)
        self._threads = threads
        self._poll = select.poll()
        self._members: list[_Member | None] = [None] * len(self._starts)
        self._finalizer = weakref.finalize(self, _close, self._members, os.getpid())
        for worker in range(len(self._starts)):
            self.start(worker)

    def __len__(self) -> int:
        return len(self._starts)

    def start(self, worker: int) -> None:
        """Starts a worker; the one before it, if there is any, has ended."""
        start = self._starts[worker]
        make = _Thread if self._threads else _Process
        member = make(start)
        self._members[worker] = member
        self._poll.register(member.link, select.POLLIN)

    def pid(self, worker: int) -> int | None:
        """The worker's process; None for a thread, or while there is none."""
        member = self._members[worker]
        return member.process.pid if isinstance(member, _Process) else None

    def tell(self, worker: int, order: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Gives a worker an order. The end of one that has ended is an event of its own."""
        self._check_process()
        member = self._members[worker]
        if member is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionError):
                socket.send_fds(member.link, [json.dumps(order).encode()], list(fds))

    def hear(self, timeout: float | None) -> list[tuple[int, dict[str, Any]]]:
        """What workers have said, at most one message of each; empty at the timeout.

        A worker that has ended says ``{"is": "error", "reason": …}``, once.
        """
        self._check_process()
        ready = self._poll.poll(None if timeout is None else max(0, timeout * 1000))
        heard = []
        for worker, member in enumerate(self._members):
            if member is not None and any(fd == member.link.fileno() for fd, _ in ready):
                heard.append((worker, self._read(worker, member)))
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

    def _read(self, worker: int, member: _Member) -> dict[str, Any]:
        try:
            message = member.link.recv(LONGEST)
        except ConnectionError:
            # It left orders unread. The error comes before what the worker has said, and once.
            message = member.link.recv(LONGEST)
        said = json.loads(message) if message else {"is": "error", "reason": ""}
        if said["is"] == "error":
            self._forget(worker, member)
            how = member.ended(_LEAVE)
            said["reason"] = said["reason"].strip() or how
        return dict(said)

    def _forget(self, worker: int, member: _Member) -> None:
        self._poll.unregister(member.link)
        self._members[worker] = None
        member.link.close()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise LifecycleError(
                "this collector belongs to the process that made it; a forked child needs its own"
            )
        if not self._finalizer.alive:
            raise LifecycleError("the collector was shut down: make another")


class _Member(abc.ABC):
    """A worker's link, and how it runs."""

    link: socket.socket

    @abc.abstractmethod
    def kill(self) -> str:
        """Ends the worker, whatever it does, and says how."""

    @abc.abstractmethod
    def ended(self, patience: float) -> str:
        """Waits for the end, and says how it was."""


class _Process(_Member):
    """A worker process: this interpreter, started again."""

    def __init__(self, start: Start) -> None:
        settings = _settings(start)
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        watched, self._lifeline = os.pipe()
        try:
            fds = (theirs.fileno(), watched, settings)
            command = [sys.executable, "-P", "-c", _PROGRAM, *map(str, fds)]
            self.process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL)
        except BaseException:
            os.close(self._lifeline)
            self.link.close()
            raise
        finally:
            theirs.close()
            os.close(watched)
            os.close(settings)

    def kill(self) -> str:
        self.process.kill()
        return f", so {self.ended(_LEAVE)}"

    def ended(self, patience: float) -> str:
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        code = self.process.returncode
        who = f"its process {self.process.pid}"
        if code < 0:
            return f"{who} was killed by {signal.Signals(-code).name}"
        return f"{who} ended with exit code {code}"


class _Thread(_Member):
    """A worker thread, with a policy and environments of its own."""

    def __init__(self, start: Start) -> None:
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The trainer's policy changes while it trains.
        start = replace(start, policy=copy.deepcopy(start.policy))
        name = f"weightsync-worker-{start.worker}"
        self.thread = threading.Thread(target=serve, args=(theirs, start), name=name, daemon=True)
        self.thread.start()

    def kill(self) -> str:
        return ", and its thread is left alone"

    def ended(self, patience: float) -> str:
        self.thread.join(patience)
        return "its thread has ended"


def _close(members: list[_Member | None], pid: int) -> None:
    if os.getpid() != pid:
        return
    living = [member for member in members if member is not None]
    members[:] = [None] * len(members)
    for member in living:
        member.link.close()
    until = time.monotonic() + _LEAVE
    for member in living:
        member.ended(max(0.0, until - time.monotonic()))


def _settings(start: Start) -> int:
    """A file with what a worker process is started with."""
    try:
        import cloudpickle

        data = cloudpickle.dumps(start)
    except ImportError:
        try:
            data = pickle.dumps(start)
        except Exception as error:
            raise WrongTypeError(
                f"the worker's environment or policy cannot be pickled ({error}): install "
                "cloudpickle, which takes functions and classes of any kind"
            ) from error
    except Exception as error:
        raise WrongTypeError(
            f"the worker's environment or policy cannot be pickled ({error}): give a function that "
            "makes it in the worker, as the environment or as policy_factory"
        ) from error
    fd = os.memfd_create("weightsync-worker", os.MFD_CLOEXEC)
    try:
        with io.FileIO(fd, "w", closefd=False) as file, io.BufferedWriter(file) as out:
            out.write(json.dumps([str(one) for one in sys.path]).encode() + b"\n")
            out.write(data)
        os.lseek(fd, 0, os.SEEK_SET)
    except BaseException:
        os.close(fd)
        raise
    return fd
