"""A worker that ends, in one of many ways, while another of its threads runs its model.

Called with a module's name and a way to end. It reads the sender's init info from its standard input.
Each module reads its parameter where it lies, as some operators do.
"""

import atexit
import gc
import os
import sys
import threading

# Called after weightsync's own, which is registered later: torch ends a process whose threads compute
# until the interpreter is gone, with weightsync and without.
beside_the_end = []
atexit.register(lambda: [one.stop() for one in beside_the_end])

import torch  # noqa: E402
import weightsync  # noqa: E402
from ends import LONG  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

ROWS = 2048
# Versions of a worker that uses its parameters outside any forward.
LOADS = 8


class Direct(nn.Module):
    """As transformers' Conv1D, of which GPT-2 is made."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ROWS, ROWS))
        self.bias = nn.Parameter(torch.zeros(ROWS))

    def forward(self):
        return torch.addmm(self.bias, torch.ones(256, ROWS), self.weight)


class Batched(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, ROWS // 2, ROWS // 2))

    def forward(self):
        return torch.bmm(torch.ones(4, 256, ROWS // 2), self.weight)


class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ROWS, ROWS // 3, 3))

    def forward(self):
        return functional.conv1d(torch.ones(1, ROWS // 3, 64), self.weight)


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ROWS, ROWS))

    def forward(self):
        return functional.embedding(torch.arange(ROWS).repeat(8), self.weight)


class Summed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ROWS, ROWS))

    def forward(self):
        return torch.cumsum(self.weight, 1)


class Compiled(Direct):
    """One frame of Python for the whole forward."""

    def __init__(self):
        super().__init__()
        self.script = torch.jit.script(_products)

    def forward(self):
        return self.script(self.bias, self.weight)


def _products(bias: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = torch.ones(64, 2048)
    for _ in range(4):
        out = torch.addmm(bias, torch.ones(64, 2048), weight)
    return out


MODULES = {one.__name__: one for one in (Direct, Batched, Convolved, Embedded, Summed, Compiled)}


def filled(name, value):
    module = MODULES[name]()
    with torch.no_grad():
        for one in module.parameters():
            one.fill_(value)
    return module


class Reading:
    """A thread that runs the model until it is told to stop, and compares what it returns."""

    def __init__(self, module, *, daemon=False):
        self.module, self.over, self.runs = module, threading.Event(), threading.Event()
        self.wrong = 0
        with torch.no_grad():
            self.expected = module()
        self.thread = threading.Thread(target=self._run, daemon=daemon)
        self.thread.start()
        assert self.runs.wait(LONG)

    def _run(self):
        with torch.no_grad():
            while not self.over.is_set():
                self.runs.set()
                self.wrong += not torch.equal(self.module(), self.expected)

    def stop(self):
        # Some forwards more, with the memory that the module has now.
        for _ in range(3):
            self.runs.clear()
            assert self.runs.wait(LONG)
        self.over.set()
        self.thread.join()
        assert not self.wrong, "a forward has returned other values"


def shutdown(receiver, module):
    reading = Reading(module)
    receiver.shutdown()
    reading.stop()


def background_shutdown(receiver, module):
    background = receiver.start_background()
    reading = Reading(module)
    background.shutdown()
    reading.stop()


def background_dropped(receiver, module):
    background = receiver.start_background()
    reading = Reading(module)
    # The receiver knows its background, and this is the last name of both.
    receiver.__dict__.clear()
    del background
    gc.collect()
    reading.stop()


def left(receiver, module):
    with receiver:
        reading = Reading(module)
    reading.stop()


def failed(receiver, module):
    reading = Reading(module)
    receiver.fail("it does not matter")
    reading.stop()


def fork(receiver, module):
    reading = Reading(module)
    for _ in range(3):
        if (child := os.fork()) == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    reading.stop()


def loads_beside_uses(receiver, module):
    """Outside any forward: the values are of any version, and the process lives."""
    background, over = receiver.start_background(), threading.Event()

    def use():
        given = torch.ones(256, ROWS)
        with torch.no_grad():
            while not over.is_set():
                torch.addmm(module.bias, given, module.weight)

    thread = threading.Thread(target=use)
    thread.start()
    while background.version < LOADS and background.wait(timeout=LONG):
        pass
    over.set()
    thread.join()
    background.shutdown()


def exit_beside_daemon(receiver, module):
    receiver.start_background()
    beside_the_end.append(Reading(module, daemon=True))


def exception_beside_daemon(receiver, module):
    beside_the_end.append(Reading(module, daemon=True))
    raise SystemExit(3)


WAYS = {
    one.__name__: one
    for one in (
        shutdown,
        background_shutdown,
        background_dropped,
        left,
        failed,
        fork,
        loads_beside_uses,
        exit_beside_daemon,
        exception_beside_daemon,
    )
}

if __name__ == "__main__":
    _, name, way = sys.argv
    model = MODULES[name]()
    worker = weightsync.ModelReceiver(sys.stdin.read(), model=model)
    worker.connect(timeout=LONG)
    # At module level a name would keep the receiver from being dropped.
    held = [worker]
    del worker
    WAYS[way](held.pop(), model)
