"""A trainer whose worker is forked after torch has used its threads, which the worker does not have.

Called with what torch did before, how the worker ends, and what its model is.
"""

import gc
import os
import sys
import tempfile

import torch
import weightsync
from ends import LONG
from torch import nn

torch.set_num_threads(4)


def products():
    torch.ones(1024, 1024) @ torch.ones(1024, 1024)


def backward():
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1))
    model(torch.ones(512, 1024)).sum().backward()
    torch.optim.Adam(model.parameters()).step()


def convolutions():
    nn.functional.conv2d(torch.ones(4, 16, 64, 64), torch.ones(16, 16, 3, 3))


def elements():
    (torch.ones(4_000_000) * 2).cumsum(0).sort()


def copies():
    torch.ones(1 << 22).clone().to(torch.float64)


WORK = {one.__name__: one for one in (products, backward, convolutions, elements, copies)}


def net(value):
    """Bound, copied by the library, and copied by torch."""
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(4, 4), nn.Conv2d(32, 64, 5))
    model[2].to(memory_format=torch.channels_last)
    with torch.no_grad():
        for one in model.parameters():
            one.fill_(value)
    return model


def by_with(info, model):
    with weightsync.ModelReceiver(info, model=model) as receiver:
        receiver.connect(timeout=LONG)
        receiver.receive(LONG)


def by_shutdown(info, model):
    receiver = weightsync.ModelReceiver(info, model=model)
    receiver.connect(timeout=LONG)
    receiver.receive(LONG)
    receiver.shutdown()


def by_del(info, model):
    receiver = weightsync.ModelReceiver(info, model=model)
    receiver.connect(timeout=LONG)
    receiver.receive(LONG)
    del receiver
    gc.collect()


def in_background(info, model):
    receiver = weightsync.ModelReceiver(info, model=model)
    receiver.connect(timeout=LONG)
    background = receiver.start_background()
    assert background.wait(2, timeout=LONG)
    background.shutdown()


def by_the_end(info, model):
    receiver = weightsync.ModelReceiver(info, model=model)
    receiver.connect(timeout=LONG)
    receiver.receive(LONG)
    # Closed as the program ends.
    model.receiver = receiver


def by_moving(info, model):
    """What lies in the version is not row-major any more."""
    receiver = weightsync.ModelReceiver(info, model=model)
    receiver.connect(timeout=LONG)
    receiver.receive(LONG)
    model[0].weight.data = model[0].weight.data.t()
    receiver.shutdown()


def by_passing_on(info, model):
    """It sends what it has got, and saves it."""
    with weightsync.ModelReceiver(info, model=model) as receiver:
        receiver.connect(timeout=LONG)
        receiver.receive(LONG)
        with weightsync.Sender(model) as sender:
            sender.connect(0)
        with tempfile.TemporaryDirectory() as folder:
            weightsync.Store(folder).save(model)


ENDS = {
    one.__name__: one
    for one in (by_with, by_shutdown, by_del, in_background, by_the_end, by_moving, by_passing_on)
}


class Stateful(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), value))
        self.state = torch.full((1 << 20,), value)

    def get_extra_state(self):
        return {"it": self.state}

    def set_extra_state(self, state):
        self.state = state["it"]


def views(value):
    memory = torch.full((1 << 20,), value, dtype=torch.complex64).share_memory_()
    return {"x": memory.conj()}


# Of the trainer, and of its worker, which may have the same memory.
KINDS = {
    "net": lambda: (net(1.0), net(0.0).share_memory()),
    "empty": lambda: (net(1.0), {}),
    "absent": lambda: (net(1.0), net(0.0).to("meta")),
    "stateful": lambda: (Stateful(1.0), Stateful(0.0)),
    "views": lambda: (views(1.0), views(0.0)),
}


def tensors(model):
    found = model.values() if isinstance(model, dict) else model.parameters()
    return [*found, *([model.state] if isinstance(model, Stateful) else [])]

if __name__ == "__main__":
    _, work, end, kind = sys.argv
    WORK[work]()
    trainer, own = KINDS[kind]()
    sender = weightsync.Sender(trainer, timeout=LONG)
    if os.fork() == 0:
        ENDS[end](sender.init_info, own)
        # The comparison would wait for the threads, too.
        torch.set_num_threads(1)
        assert all((one == 2).all() for one in tensors(own))
        sys.exit(7)
    sender.connect(1, timeout=LONG)
    with torch.no_grad():
        for one in tensors(trainer):
            one.fill_(2.0)
    sender.send().ensure_applied()
    _, status = os.wait()
    sender.shutdown()
    sys.exit(0 if os.waitstatus_to_exitcode(status) == 7 else 1)
