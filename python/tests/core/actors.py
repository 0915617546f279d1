"""Processes of a test: each has one object of the test's own, which does what it is asked."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import traceback

import torch
from patience import patience

# For a start or an answer.
SOON = patience(30)

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["torch", "tensordict", "weightsync"])

# How a worker's process can be made. The server has torch imported already and nothing else of
# the test's process, as a spawned process has, and costs milliseconds.
STARTS = {
    "server": _SERVER,
    "spawn": multiprocessing.get_context("spawn"),
    "fork": multiprocessing.get_context("fork"),
}


class Hung(AssertionError):
    """An answer did not come in time."""


class Raised(AssertionError):
    """What an actor was asked for raised; `kind` is the class, and `said` the message."""

    def __init__(self, kind, said, trace):
        super().__init__(trace)
        self.kind, self.said = kind, said


class Actor:
    """A process with one object; `ask` calls a method of it there."""

    def __init__(self, make, *args, start="server"):
        context = STARTS[start]
        self._pipe, there = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(there, self._pipe, make, args), daemon=True
        )
        self.process.start()
        there.close()
        self._starting = True

    @property
    def pid(self):
        return self.process.pid

    def order(self, name, *args, **how):
        self._pipe.send((name, args, how))

    def answer(self, within=SOON):
        if self._starting:
            self._starting = False
            self.answer()
        if not self._pipe.poll(within):
            raise Hung(f"process {self.pid} did not answer within {within} s")
        try:
            kind, *what = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            raise Raised("Died", "", f"it ended with {self.process.exitcode}") from None
        if kind == "raised":
            raise Raised(*what)
        return what[0]

    def ask(self, name, *args, **how):
        self.order(name, *args, **how)
        return self.answer()

    def has_answered(self):
        return self._pipe.poll()

    def kill(self):
        self.signal(signal.SIGKILL)
        self.process.join()

    def signal(self, number):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
        if number == signal.SIGSTOP:
            _wait_for_state(self.pid, "T")

    def close(self):
        self.kill()
        self.process.close()
        self._pipe.close()


@contextlib.contextmanager
def actors():
    """Makes actors, and ends them all."""
    made = []

    def make(*args, **how):
        made.append(Actor(*args, **how))
        return made[-1]

    try:
        yield make
    finally:
        for actor in made:
            actor.close()


def _serve(pipe, not_ours, make, args):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    # A forked child has the other end, too, and would not see its own go.
    not_ours.close()
    torch.set_num_threads(1)
    try:
        served = make(*args)
        pipe.send(("done", None))
        while True:
            name, args, how = pipe.recv()
            try:
                pipe.send(("done", getattr(served, name)(*args, **how)))
            except Exception as error:
                pipe.send(("raised", type(error).__name__, str(error), traceback.format_exc()))
    except (EOFError, KeyboardInterrupt):
        pass
    except Exception as error:
        pipe.send(("raised", type(error).__name__, str(error), traceback.format_exc()))


def _wait_for_state(pid, letter):
    # The process is the server's child, so that it cannot be waited for.
    while _state(pid) != letter:
        os.sched_yield()


def _state(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
