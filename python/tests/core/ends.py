"""Models, senders and receivers as the tests of the plain package use them."""

import contextlib
import threading

import torch
import weightsync
from patience import patience
from torch import nn

# A message is a version that replaces the one before, or one of a queue.
# The last two by TCP, each with a link of its own.
FAR = ["distributed:share=none", "rpc:initial=connect"]
PUSHING = [
    "shared-mem",
    "multi-process",
    "multi-process:own-copy",
    "multi-process:every=4",
    *FAR,
]
# Where a version that was not taken is passed over.
NEWEST = ["shared-mem", "multi-process", "multi-process:own-copy", *FAR]
MODES = ["bind", "copy"]

LONG = patience(30)


class Shaped:
    """A target of the worker's own, but for its load: it takes the sender's layout."""

    def layout(self):
        return self.known

    def shape(self, layout):
        self.known = layout
        return True


class Net(nn.Module):
    """A model all of whose elements have one value: a pass over it sees a mix of versions.

    A parameter that is large enough to be bound, one that is not, and a buffer.
    """

    def __init__(self, fill=0.0, numel=32 * 1024):
        super().__init__()
        self.large = nn.Parameter(torch.full((numel,), float(fill)))
        self.small = nn.Parameter(torch.full((3,), float(fill)))
        self.register_buffer("mean", torch.full((5,), float(fill)))

    def forward(self):
        """The smallest and the largest value."""
        seen = [tensor.detach().aminmax() for tensor in (self.large, self.small, self.mean)]
        return min(low.item() for low, _ in seen), max(high.item() for _, high in seen)

    def fill(self, value):
        with torch.no_grad():
            for tensor in (self.large, self.small, self.mean):
                tensor.fill_(value)
        return self

    @property
    def value(self):
        """The one value that all elements have."""
        low, high = self()
        assert low == high, f"torn: from {low} to {high}"
        return low


@contextlib.contextmanager
def all_ended(*ends):
    """Shuts all of them down, the last one first."""
    try:
        yield ends
    finally:
        for end in reversed(ends):
            end.shutdown()


def meet(sender, *receivers, timeout=LONG, **how):
    """Connects both ends, each of which waits for the others."""
    with beside(*(lambda one=one: one.connect(timeout=timeout) for one in receivers)):
        sender.connect(len(receivers), timeout=timeout, **how)


@contextlib.contextmanager
def beside(*calls):
    """Makes calls in threads of their own next to the block; raises what they raise."""
    raised = []

    def run(call):
        try:
            call()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    try:
        yield
    except BaseException as error:
        raised.append(error)
    for thread in threads:
        thread.join()
    # The first is the cause of the others.
    if raised:
        raise raised[0]


@contextlib.contextmanager
def pair(source, model=None, *, setup=None, **how):
    """A sender of `source` and a receiver in this process, connected."""
    sender = weightsync.Sender(source, **(setup or {}))
    info = sender.init_info
    if model is None:
        receiver = weightsync.Receiver(info, 0, **how)
    else:
        receiver = weightsync.ModelReceiver(info, 0, model=model, **how)
    with all_ended(sender, receiver):
        meet(sender, receiver)
        yield sender, receiver


def pass_on(sender, *receivers, **how):
    """A send, and what each receiver got of it."""
    report = sender.send(wait="sent", **how)
    got = [receiver.receive(timeout=LONG) for receiver in receivers]
    assert None not in got
    return report if not receivers else got[0]


def bits(tensor):
    """The bytes of a tensor or an array, in row-major order."""
    if hasattr(tensor, "detach"):
        tensor = tensor.detach().contiguous()
        if tensor.numel() == 0:
            return b""
        return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return tensor.tobytes()
