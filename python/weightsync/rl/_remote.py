"""Workers of other hosts, as their trainer sees them: they join over a network."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from weightsync import _checks
from weightsync._native import TrainerPort, WorkerPlace
from weightsync.errors import CorruptError, OperatingSystemError, SettingError
from weightsync.rl._columns import (
    DONE,
    MASK,
    POLICY_VERSION,
    REWARD,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    Column,
    Key,
    Layout,
)
from weightsync.rl._crew import Member, given_to_worker, how_ended
from weightsync.rl._worker import Start, same_program

#: What a worker of this host runs. It has to find the modules that the trainer imported.
_PROGRAM = """
import json, os, sys
given = json.loads(sys.stdin.buffer.readline())
sys.path[:] = given.pop("path")
from weightsync.rl.worker import launched
code = launched(given)
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)
"""

#: Launchers of TorchRL, and what is meant by them here.
_OF_TORCHRL = {
    "mp": 'launcher="local"',
    "submitit": 'launcher="srun --ntasks=1 --nodelist={host} python3 -m weightsync.rl.worker"',
    "submitit_delayed": "launcher=None, with workers that join on their own",
}

#: Seconds that a launcher may take to end once its worker's link has ended. That of a dead host may
#: stay for minutes, and the trainer waits meanwhile.
_GRACE = 2.0

#: The most that makes sense, of bytes as of numbers.
_LARGEST = 1 << 40

#: The most names of a column, one in another.
_DEEPEST = 64

#: The most dimensions of one frame. numpy has 32 or more, and a batch adds three.
_MOST_DIMENSIONS = 28

_DTYPES = {np.dtype(one).name for one in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"}

#: The columns that the trainer reads, and those of them that TensorDicts have.
_OF_TENSORDICTS = dict.fromkeys((TRAJ_IDS, POLICY_VERSION), "int64")
_REQUIRED = {
    REWARD: "float32",
    **dict.fromkeys((DONE, TERMINATED, TRUNCATED), "bool"),
    **_OF_TENSORDICTS,
}


class Hosts:
    """Where workers run: a port at which they join, and a launcher that starts them.

    Args:
        launcher: ``"local"``, a command, or None, as the collectors say.
        hosts: the hosts, used in turn.
        listen: the address of the port.
        advertise: the address by which workers reach it.
        tls: where the certificates are, here and on the workers' hosts; None: where the environment
            says.
        insecure_plaintext_code: whether unencrypted connections to other machines are allowed.
        workers: how many there are.
    """

    def __init__(
        self,
        launcher: str | Sequence[str] | None,
        hosts: Sequence[str] | None,
        listen: str | None,
        advertise: str | None,
        tls: str | os.PathLike[str] | None,
        insecure_plaintext_code: bool,
        workers: int,
    ) -> None:
        self._template = _template(launcher, hosts)
        self._is_local = launcher == "local"
        self._hosts = list(hosts or [])
        self._plaintext = insecure_plaintext_code
        # A launcher may have another working directory. Empty: where the environment says.
        self._tls = "" if tls is None else _checks.absolute(tls)
        self._port = TrainerPort(listen, advertise, tls, insecure_plaintext_code, workers)
        if self._template is None and not self._port.has_token:
            self._port.close()
            raise SettingError(
                "launcher=None: workers that join on their own need a token: make one with "
                "`head -c 32 /dev/urandom | base64 > FILE; chmod 600 FILE`, and set "
                "WEIGHTSYNC_TOKEN_FILE=FILE here and there"
            )

    @property
    def address(self) -> str:
        """Where workers join."""
        return self._port.address

    def begin(self, start: Start) -> Remote:
        """Starts a worker, or waits for one to join."""
        header = json.dumps(same_program()).encode() + b"\n"
        settings = header + given_to_worker(start)
        if self._template is None:
            return Remote(self._port.open(start.worker, None, settings), None, "")
        ticket = secrets.randbits(63)
        place = self._port.open(start.worker, ticket, settings)
        given = {
            "address": self._port.address,
            "secret": self._port.secret,
            "tls": self._tls,
            "insecure_plaintext_code": self._plaintext,
            "worker": start.worker,
            "ticket": ticket,
        }
        if self._is_local:
            given["path"] = [str(one) for one in sys.path]
        command = self._command(start.worker)
        who = "its process" if self._is_local else f"its launcher `{shlex.join(command)}`"
        process = _launch(command, given)
        try:
            return Remote(place, process, f"{who} {process.pid}" if self._is_local else who)
        except BaseException:
            _kill_group(process)
            process.wait()
            raise

    def close(self) -> None:
        """Closes the port."""
        self._port.close()

    def _command(self, worker: int) -> list[str]:
        assert self._template is not None
        host = self._hosts[worker % len(self._hosts)] if self._hosts else ""
        return [
            one.replace("{host}", host).replace("{worker}", str(worker)) for one in self._template
        ]


class Remote(Member):
    """A worker that joins over a network.

    Args:
        place: its place at the port.
        process: what starts it; None if it is started by hand.
        who: what this is, for people.
    """

    def __init__(
        self, place: WorkerPlace, process: subprocess.Popen[bytes] | None, who: str
    ) -> None:
        self._place, self.process, self._who = place, process, who
        self._columns: list[Column] = []
        #: Where a slot's arrays lie: dimensions, axis, index, offset and file.
        self._slots: dict[int, tuple[Sequence[int], int, int, int, int]] = {}
        self._gone = ""
        self._launching = -1
        self._is_joining = False
        self._events = select.epoll()
        self._events.register(place.fileno(), select.EPOLLIN)
        if process is not None:
            self._launching = os.pidfd_open(process.pid)
            self._events.register(self._launching, select.EPOLLIN)
        self.fds = [self._events.fileno()]

    def tell(self, order: dict[str, Any], fds: Sequence[int]) -> None:
        if order["do"] == "slot":
            # What the worker sends is written there by this process.
            (fd,) = fds
            place = (order["dims"], order["axis"], order["index"], order["offset"], fd)
            self._slots[order["slot"]] = place
            return
        if order["do"] == "collect":
            dims, axis, index, offset, fd = self._slots[order["slot"]]
            rows = Layout(self._columns, dims).rows(offset, axis, index)
            self._place.expect(order["part"], fd, rows)
        if order["do"] == "join":
            self._is_joining = True
        self._place.order(json.dumps(order))

    def read(self) -> dict[str, Any] | None:
        heard = self._place.hear()
        if heard is None:
            if self._launching >= 0 and self.process is not None and self.process.poll() is not None:
                self._gone = ", before its worker had joined"
                return {"is": "error", "reason": ""}
            return None
        kind, text, part, at = heard
        if kind == "joined":
            # From now on the link tells of its end: a launcher may leave before its worker.
            self._stop_watching()
            return None
        if kind == "gone":
            self._gone = f"; {text}"
            return {"is": "error", "reason": ""}
        if kind == "part":
            return {"is": "part", "part": part, "at": at}
        try:
            return self._answer(_parse(text))
        except (CorruptError, RecursionError) as error:
            return {"is": "error", "reason": f"the worker sent what is no answer: {error}"}

    def leave(self) -> None:
        self._stop_watching()
        self._events.close()
        self._place.leave()

    def kill(self) -> str:
        self._place.cut()
        if self.process is not None:
            _kill_group(self.process)
        how = self.ended(0.0)
        return f", so {how}" if how else ", and the link to it was cut"

    def ended(self, patience: float) -> str:
        if self.process is None:
            if not self._place.wait(patience):
                self._place.cut()
            return self._gone.removeprefix("; ")
        if self._gone:
            patience = min(patience, _GRACE)
        try:
            how = how_ended(self.process, patience, self._who, _kill_group)
        finally:
            # Nothing that it sent is written any more.
            self._place.cut()
        return how + self._gone

    def _stop_watching(self) -> None:
        if self._launching >= 0:
            self._events.unregister(self._launching)
            os.close(self._launching)
            self._launching = -1

    def _answer(self, said: dict[str, Any]) -> dict[str, Any]:
        """An answer, checked: what a worker says decides how much memory is taken."""
        what = said.get("is")
        if what == "ready" and not self._columns:
            form = said.get("form")
            columns = _columns(said.get("columns"), _REQUIRED if form is None else _OF_TENSORDICTS)
            envs, is_batched = said.get("num_envs"), said.get("is_batched")
            if not _is_count(envs) or envs == 0 or not isinstance(is_batched, bool):
                raise CorruptError(f"{envs!r} environments")
            if envs * sum(map(_frame_bytes, columns)) > _LARGEST:
                raise CorruptError(f"frames of {envs} environments that no memory can hold")
            if form is not None:
                _check_form(form, columns, envs)
            self._columns = columns
            return said
        if what == "joined" and self._is_joining:
            self._is_joining = False
            return {"is": "joined"}
        if what == "error":
            return {"is": "error", "reason": str(said.get("reason", ""))}
        raise CorruptError(f"expected ready once, joined where asked, or error, got {what!r:.80}")


def _launch(command: list[str], given: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Starts a worker's launcher, in a session of its own: Ctrl-C in the terminal is for the trainer."""
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    except OSError as error:
        raise OperatingSystemError(
            f"the launcher `{shlex.join(command)}` cannot be started: {error}; give a command that "
            "this host has"
        ) from error
    assert process.stdin is not None
    # One line fits the pipe. A launcher that has ended is an event of its own.
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(json.dumps(given).encode() + b"\n")
    return process


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kills a launcher that has not ended, with what it has started on this host."""
    # Once it was waited for, another process may have its number.
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _template(
    launcher: str | Sequence[str] | None, hosts: Sequence[str] | None
) -> list[str] | None:
    """The command of a launcher; None where workers join on their own."""
    if launcher is None or launcher == "local":
        if hosts:
            raise SettingError(
                f"hosts: a launcher starts workers there, got {launcher!r}: give a command with "
                '{host}, such as launcher="ssh {host} python3 -m weightsync.rl.worker"'
            )
        return None if launcher is None else [sys.executable, "-P", "-c", _PROGRAM]
    if isinstance(launcher, str) and launcher in _OF_TORCHRL:
        raise SettingError(f"launcher={launcher!r} is TorchRL's: here it is {_OF_TORCHRL[launcher]}")
    command = shlex.split(launcher) if isinstance(launcher, str) else [str(one) for one in launcher]
    if not command:
        raise SettingError('launcher: expected "local", a command or None, got an empty one')
    if isinstance(hosts, str):
        raise SettingError(f"hosts: expected a list of names, got {hosts!r}")
    names_host = any("{host}" in one for one in command)
    if names_host and not hosts:
        raise SettingError("the launcher names {host}: give hosts=[…]")
    if hosts and not names_host:
        raise SettingError("hosts: the launcher has no {host} in it, so it would not use them")
    return command


def _parse(text: str) -> dict[str, Any]:
    try:
        said = json.loads(text)
    except ValueError as error:
        raise CorruptError(str(error)) from error
    if not isinstance(said, dict):
        raise CorruptError(f"expected an object, got {text[:80]}")
    return said


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST


def _check_form(said: Any, columns: list[Column], envs: int) -> None:
    from weightsync.rl._form import Form

    form = Form.from_json(said)
    form.check(columns, envs)
    if form.is_dynamic:
        raise CorruptError(
            "frames whose shapes change, or that hold texts: they do not travel from another host"
        )


def _columns(value: Any, required: Mapping[Key, str] = _REQUIRED) -> list[Column]:
    try:
        columns = [Column.from_json(one) for one in value]
        for one in columns:
            if not 1 <= len(one.key) <= _DEEPEST or not all(isinstance(name, str) for name in one.key):
                raise CorruptError(f"a column called {one.key!r:.80}")
            if (
                one.dtype not in _DTYPES
                or len(one.shape) > _MOST_DIMENSIONS
                or not all(map(_is_count, one.shape))
            ):
                raise CorruptError(f"the column {one!s:.80}")
        keys = {one.key for one in columns}
        if len(keys) != len(columns):
            # Each has its place in a slot, which has room for each name once.
            raise CorruptError("two columns of one name")
        for key in keys:
            if any(key[:end] in keys for end in range(1, len(key))):
                raise CorruptError(f"the column {'.'.join(key):.80}, and one that it lies in")
        known = {one.key: one for one in columns}
        for key, dtype in required.items():
            if known.get(key) != Column(key, dtype, ()):
                raise CorruptError(f"no column {Column(key, dtype, ())}")
        if MASK in known and known[MASK] != Column(MASK, "bool", ()):
            raise CorruptError(f"the column {known[MASK]!s:.80}")
        return columns
    except (TypeError, ValueError) as error:
        raise CorruptError(f"columns {value!r:.80}") from error


def _frame_bytes(column: Column) -> int:
    """The bytes of a frame, as if no dimension were empty: numpy multiplies them in 64 bits."""
    return math.prod((np.dtype(column.dtype).itemsize, *(max(one, 1) for one in column.shape)))
