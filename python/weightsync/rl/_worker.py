"""A worker of a collector: it collects what the trainer asks for, until the trainer ends it.

Messages are JSON over a socket that keeps them apart. Frames and the worker's settings travel in
memory files, whose descriptors come with a message. Nothing in a message is executed: what a
worker runs is the program that the trainer started it with.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import mmap
import os
import pickle
import platform
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import numpy as np

from weightsync import _paths
from weightsync._native import __version__
from weightsync.errors import LifecycleError, SettingError
from weightsync.model_receiver import ModelReceiver
from weightsync.rl._columns import Column, Key, Layout
from weightsync.rl._envs import Envs
from weightsync.rl._lifeline import die_with
from weightsync.rl._policy import Actor, Exploration, make_policy
from weightsync.rl._rollout import Rollout, Rules
from weightsync.rl._terms import Terms, is_torchrl_env

if TYPE_CHECKING:
    from weightsync.rl._form import Form

#: The longest message. Longer last words are cut.
LONGEST = 1 << 16

#: Seconds that a worker waits for its trainer's weights: as long as its trainer waits for it. It ends
#: with its trainer.
_JOIN = 600.0


@dataclass
class Start:
    """What a worker is started with."""

    worker: int
    #: A function. It travels after the others, with what it shares with the trainer.
    make_env: Any
    policy: Any
    policy_factory: Callable[[], Any] | None
    policy_device: Any
    rules: Rules
    explore: Exploration
    num_threads: int
    #: Models that the trainer sends, by their paths.
    models: list[str]
    #: How TensorDicts are collected, where the environment is one of TorchRL's.
    terms: Terms


def same_program() -> dict[str, str]:
    """What has to be the same at a trainer and its workers: functions travel as code."""
    return {"weightsync": __version__, "Python": ".".join(platform.python_version_tuple()[:2])}


# Of worker threads.
_making = threading.Lock()
# How long an environment that hangs while it is made keeps the others, in seconds.
_LONGEST_TURN = 5.0


@contextlib.contextmanager
def _in_turn() -> Iterator[None]:
    """Lets one thread make its environment: TorchRL's change their class while they are made."""
    is_alone = _making.acquire(timeout=_LONGEST_TURN)
    try:
        yield
    finally:
        if is_alone:
            _making.release()


class Worker:
    """Environments and a policy, and the trainer's orders for them."""

    def __init__(self, start: Start, guard: Guard | None = None) -> None:
        self._start = start
        self._guard = guard or Guard()
        self._background: Any = None
        self._slots: dict[int, dict[Key, np.ndarray]] = {}
        self._flag: mmap.mmap | None = None
        if start.terms.init_fn is not None:
            start.terms.init_fn()
        with _in_turn():
            made = start.make_env()
        if is_torchrl_env(made):
            self._begin_tensordicts(made, guard)
        else:
            self._begin_arrays(made, guard)

    def _begin_arrays(self, made: Any, guard: Guard | None) -> None:
        start = self._start
        self.policy = make_policy(start.policy, start.policy_factory, start.policy_device)
        envs = Envs.of(made)
        actor = Actor(self.policy, envs, start.explore, start.policy_device, own_process=guard is None)
        writing = contextlib.nullcontext if guard is None else guard.writing
        self._rollout: Any = Rollout(
            envs, actor, start.rules, self._policy_version, self._frozen, writing
        )
        self._made, self._close = envs.made, envs.close
        self._envs, self._is_batched = envs.num_envs, envs.is_batched
        self._form: Form | None = None
        self.columns: list[Column] = self._rollout.columns()

    def _begin_tensordicts(self, made: Any, guard: Guard | None) -> None:
        from weightsync.rl._tensordicts import TensorDictRollout

        start = self._start
        rollout = TensorDictRollout(
            made,
            start.policy,
            start.policy_factory,
            start.terms,
            self._policy_version,
            self._frozen,
            contextlib.nullcontext if guard is None else guard.writing,
            start.worker,
            self._is_stopped,
            is_thread=guard is not None,
        )
        self._rollout, self.policy = rollout, rollout.policy
        self._made, self._close = rollout.env, rollout.close
        self._envs, self._is_batched = rollout.num_envs, bool(rollout.batch)
        self._form, self.columns = rollout.form()

    def ready(self) -> dict[str, Any]:
        """What the trainer has to know before it asks for frames."""
        return {
            "is": "ready",
            "columns": [one.to_json() for one in self.columns],
            "num_envs": self._envs,
            "is_batched": self._is_batched,
            "form": None if self._form is None else self._form.to_json(),
        }

    def do(self, order: dict[str, Any], fds: list[int]) -> dict[str, Any] | None:
        """Does what an order says, and returns the answer."""
        what = order["do"]
        if what == "slot":
            self._add_slot(order, fds.pop())
        elif what == "flag":
            self._flag = _mapped(fds.pop(), mmap.PAGESIZE)
        elif what == "collect":
            return self._collect(order)
        elif what == "join":
            self._join(order["info"], order["updates"])
            return {"is": "joined"}
        elif what == "call":
            return self._call(order["number"], fds.pop())
        elif what == "seed":
            self._seed(order["seed"])
        else:
            self._rollout.reset()
        return None

    def _collect(self, order: dict[str, Any]) -> dict[str, Any]:
        out, steps = self._slots[order["slot"]], order["steps"]
        answer = {"is": "part", "part": order["part"]}
        if self._form is None:
            self._rollout.collect(out, steps, order["random"])
        else:
            answer["steps"], frames = self._rollout.write(self._form, out, order["random"] > 0)
            if frames is not None:
                from weightsync.rl import _values

                answer["fd"] = _values.write(frames)
        answer["at"] = time.monotonic()
        return answer

    def _call(self, number: int, fd: int) -> dict[str, Any]:
        """Calls a method of the rollout, as the trainer asks, and returns what it returns."""
        from weightsync.rl import _values

        with open(fd, "rb") as file:
            name, arguments, named = pickle.load(file)
        try:
            value = self._rollout.cascade_execute(name, *arguments, **named)
            return {"is": "answer", "number": number, "fd": _values.write(value)}
        except Exception as error:
            said = [kind_of(error), str(error)]
            return {"is": "answer", "number": number, "error": said}

    def _seed(self, seed: int) -> None:
        if self._form is None:
            self._rollout.seed(seed)
        else:
            self._rollout.seed(seed, False)

    def close(self) -> None:
        """Leaves the trainer, and closes the environments."""
        self._guard.leave()
        self._close()

    def _add_slot(self, order: dict[str, Any], fd: int) -> None:
        layout = Layout(self.columns, order["dims"])
        memory = _mapped(fd, layout.size, order["offset"])
        views = layout.views(memory)
        # Of the two first dimensions one is the worker's, the other its environments'.
        at: Any = order["index"] if order["axis"] == 0 else (slice(None), order["index"])
        self._slots[order["slot"]] = {key: view[at] for key, view in views.items()}

    def _is_stopped(self) -> bool:
        return self._flag is not None and self._flag[0] != 0

    def _join(self, info: str, updates: int) -> None:
        context = SimpleNamespace(policy=self.policy, env=self._made)
        models = {path: _paths.resolve(context, path) for path in self._start.models}
        receiver = ModelReceiver(info, self._start.worker, models=models)
        self._guard.follow(receiver)
        receiver.connect(timeout=_JOIN)
        self._background = receiver.start_background()
        if self._form is not None:
            self._rollout.joined(self._policy_version(), updates)

    def _policy_version(self) -> int:
        if self._background is None:
            return 0
        versions: dict[str, int] = self._background.versions
        return versions.get("policy", 0)

    def _frozen(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._background is None else self._background


def _mapped(fd: int, size: int, offset: int = 0) -> mmap.mmap:
    """Memory of the trainer's; closes the descriptor."""
    try:
        return mmap.mmap(fd, size, offset=offset)
    finally:
        os.close(fd)


class Guard:
    """Keeps a worker thread that was given up from writing, and from the place that it had at the
    sender of weights. It cannot be killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_given_up = False
        self._receiver: ModelReceiver | None = None

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        with self._lock:
            if self._is_given_up:
                raise LifecycleError("the trainer has given this worker up")
            yield

    def give_up(self) -> None:
        """Waits for a step that is being written. No other is written after it."""
        with self._lock:
            self._is_given_up = True

    def follow(self, receiver: ModelReceiver) -> None:
        """Notes what the worker receives weights with."""
        with self.writing():
            self._receiver = receiver

    def leave(self) -> None:
        """Leaves the sender of weights: another worker can have the place."""
        with self._lock:
            receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.shutdown()


class Hearing(Protocol):
    """A worker's end of the link to its trainer."""

    def hear(self) -> tuple[dict[str, Any], list[int]] | None:
        """The next order and its descriptors; None once the trainer has closed the link."""

    def say(self, message: str, fds: Sequence[int] = ()) -> None:
        """Says something to the trainer, with descriptors of memory."""

    def close(self) -> None:
        """Closes the link. What was said before still arrives."""


class Link:
    """The link to a trainer in this host: a socket."""

    def __init__(self, held: socket.socket) -> None:
        self._socket = held

    def hear(self) -> tuple[dict[str, Any], list[int]] | None:
        message, fds, _, _ = socket.recv_fds(self._socket, LONGEST, 1)
        return (json.loads(message), list(fds)) if message else None

    def say(self, message: str, fds: Sequence[int] = ()) -> None:
        socket.send_fds(self._socket, [message.encode()], list(fds))

    def close(self) -> None:
        self._socket.close()


def serve(link: Hearing, make: Callable[[], Worker]) -> bool:
    """Works for the trainer at the other end, until it closes the link.

    Returns:
        Whether the worker ended in order. What went wrong was said to the trainer.
    """
    worker = None
    try:
        worker = make()
        answer: dict[str, Any] | None = worker.ready()
        while True:
            heard = None
            # Only here: an environment may raise such an error too, and that is a failure.
            with contextlib.suppress(ConnectionError):
                if answer is not None:
                    _say(link, answer)
                heard = link.hear()
            if heard is None:
                return True
            answer = worker.do(*heard)
    except BaseException as error:
        try:
            say_last_words(link, "".join(traceback.format_exception(error)), kind_of(error))
        except OSError:
            # The trainer has closed the link, which the worker may have found out by this error.
            return isinstance(error, ConnectionError)
        return False
    finally:
        with contextlib.suppress(Exception):
            if worker is not None:
                worker.close()
        link.close()


def _say(link: Hearing, answer: dict[str, Any]) -> None:
    fds = [answer.pop("fd")] if "fd" in answer else []
    try:
        link.say(_message(answer), fds)
    finally:
        for fd in fds:
            os.close(fd)


def _message(answer: dict[str, Any]) -> str:
    message = json.dumps(answer)
    if len(message) > LONGEST:
        # Only this grows: with the columns and with the length of their names.
        columns = len(answer.get("columns", ()))
        raise SettingError(
            f"the names, dtypes and shapes of the frames' {columns} columns take {len(message)} bytes, "
            f"and a worker can say {LONGEST}: join columns of one dtype to fewer"
        )
    return message


def kind_of(error: BaseException) -> str:
    """The name of the nearest class of an error that is one of Python's: classes do not travel."""
    return next(one.__name__ for one in type(error).__mro__ if one.__module__ == "builtins")


def say_last_words(link: Hearing, words: str, kind: str = "") -> None:
    """Says why the worker ends: the end of the words, where they are too long for a message."""
    while len(message := json.dumps({"is": "error", "reason": words, "kind": kind})) > LONGEST:
        words = words[len(words) // 2 :]
    link.say(message)


def main(link_fd: int, lifeline: int, settings: BinaryIO) -> int:
    """The worker's process.

    Args:
        link_fd: the link to the trainer.
        lifeline: a pipe that the trainer's death closes.
        settings: what the worker is started with, pickled.
    """
    die_with(lifeline)
    # Ctrl-C reaches every process of the terminal. The trainer ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    with settings:
        return work(Link(socket.socket(fileno=link_fd)), settings, Worker)


def _register(pickled: list[bytes]) -> None:
    """Registers the trainer's environments with Gymnasium. Those that are known here stay."""
    if not pickled:
        return
    try:
        import gymnasium
    except ImportError:
        # An environment that needs it says so when it is made.
        return
    for one in pickled:
        # What cannot be read here is missed by its name, if it is made at all.
        with contextlib.suppress(Exception):
            spec = pickle.loads(one)
            gymnasium.registry.setdefault(spec.id, spec)
    # Packages that are imported here register theirs again, and Gymnasium warns of each.
    warnings.filterwarnings("ignore", r"(?s).*Overriding environment .* already in registry")


def work(link: Hearing, settings: BinaryIO, make: Callable[[Start], Worker]) -> int:
    """Reads what a worker process is started with, and works; returns the exit code."""
    try:
        # First: an environment may be made while it is read.
        reader = pickle.Unpickler(settings)
        _register(reader.load())
        start: Start = reader.load()
        start.make_env = reader.load()
    except BaseException:
        words = "cannot read its environment and policy:\n" + traceback.format_exc()
        say_last_words(link, words)
        link.close()
        return 1
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(start.num_threads)
    return 0 if serve(link, lambda: make(start)) else 1
