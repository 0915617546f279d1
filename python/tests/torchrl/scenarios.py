"""What TorchRL's own tests of its schemes cover, and more, with workers of the test's own.

Each scenario takes the module of the schemes and the name of one, and is run by `crew.bounded` in a
process of its own. Those with TorchRL's collectors are in `with_collectors`.
"""

import copy
import multiprocessing
import os
import pickle
import threading
import time

import torch
from crew import SOON, Crew, Probe, Worker, hurry, line, scheme_by, standing
from tiny import weights_of
from torch import multiprocessing as mp
from torch import nn

CPU = torch.device("cpu")
# A send to workers that are there: it takes milliseconds, also on a machine that is busy.
PROMPT = 10.0


def transport(module, name):
    """The transport of a scheme, called as TorchRL's protocol has it, without the scheme."""
    learner = Probe()
    scheme = scheme_of(module, name)
    with standing(scheme, learner, workers=1, worker=ByTransport) as crew:
        carrier = scheme.sender_transports[0]
        # TorchRL's carry in one way or the other.
        send = getattr(carrier, "send_weights_async", None) or carrier.send_weights
        send(weights_of(learner.filled(3.0)))
        crew.ask(0, "take")
        assert crew.ask(0, "read") == (3.0, 3.0)


class ByTransport(Worker):
    def take(self):
        scheme = self.scheme
        scheme.receiver_transport.receive_weights(
            timeout=SOON, weights=scheme.weights, model=self.model, strategy=scheme.strategy
        )


def not_waited_for(module, name):
    """With `sync=False` a send does not wait, and the workers get it all the same."""
    learner = Probe()
    scheme = scheme_of(module, name, sync=False)
    with standing(scheme, learner) as crew:
        with hurry("a send that does not wait", PROMPT):
            scheme.send(weights_of(learner.filled(3.0)))
        for index in range(2):
            becomes(crew, index, 3.0)


class Layered(nn.Module):
    """Nested, with buffers of two types."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self.head = nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            for tensor in self.state_dict().values():
                tensor.zero_()

    def filled(self, value):
        other = copy.deepcopy(self)
        with torch.no_grad():
            for tensor in other.state_dict().values():
                tensor.fill_(value)
        return other

    def forward(self, rows):
        return self.head(self.body(rows))


class Stateful(Worker):
    """A worker that tells its whole state."""

    def read(self):
        return {name: tensor.tolist() for name, tensor in self.model.state_dict().items()}


def state(module):
    return {name: tensor.tolist() for name, tensor in module.state_dict().items()}


PAYLOADS = {
    "module": lambda module: module,
    "state_dict": lambda module: module.state_dict(),
    "tensordict": weights_of,
    "flat-tensordict": lambda module: weights_of(module).flatten_keys("."),
    "nested-dict": lambda module: weights_of(module).to_dict(),
}


def payload(module, name, strategy, form):
    """Every form of weights, whichever the strategy extracts; parameters and buffers."""
    learner = Layered()
    scheme = scheme_of(module, name, strategy)
    with standing(scheme, learner, worker=Stateful) as crew:
        wanted = learner.filled(3.0)
        with hurry("a send", PROMPT):
            scheme.send(PAYLOADS[form](wanted))
        for index in range(2):
            assert crew.ask(index, "read") == state(wanted)


def nothing_given(module, name):
    """`send()` sends the registered model as it is now."""
    learner = Probe(1.0)
    scheme = scheme_of(module, name)
    with standing(scheme, learner) as crew:
        learner.fill(3.0)
        with hurry("a send", PROMPT):
            scheme.send()
        assert crew.values() == [(3.0, 3.0)] * 2


def started(module, name, start):
    """Workers of each start method; the first weights come with `connect`, others with `send`."""
    learner = Probe(2.0)
    scheme = scheme_of(module, name)
    with standing(scheme, learner, workers=1, start=start) as crew:
        assert crew.values() == [(2.0, 2.0)]
        scheme.send(weights_of(learner.filled(3.0)))
        assert crew.values() == [(3.0, 3.0)]


def no_sync(module, _):
    """`NoWeightSyncScheme`: each call is there, and nothing travels."""
    scheme = module.NoWeightSyncScheme()
    with standing(scheme, Probe(2.0), fill=1.0) as crew:
        scheme.send(weights_of(Probe(3.0)))
        assert crew.values() == [(1.0, 1.0)] * 2
        assert crew.ask(0, "receive", 0.0) is False


def receive(module, name):
    """A worker that calls `receive` and nothing else gets what was sent, and never an error."""
    learner = Probe()
    scheme = scheme_of(module, name, sync=False)
    with standing(scheme, learner, workers=1) as crew:
        for value in (1.0, 2.0, 3.0):
            scheme.send(weights_of(learner.filled(value)))
            end = time.monotonic() + SOON
            while crew.ask(0, "read") != (value, value):
                assert time.monotonic() < end
                crew.ask(0, "receive", 0.05)


def older_calls(module, name, strategy):
    """`create_sender` and `create_receiver`, each of a scheme of its own, with a pipe between."""
    source = Probe(3.0)
    scheme = older_scheme(module, name, strategy)
    sender = scheme.create_sender()
    pipes, workers = [], []
    for index in range(2):
        here, there = mp.Pipe()
        sender.register_worker(worker_idx=index, pipe_or_context=here)
        tell, told = mp.Pipe()
        args = there, tell, module, name, strategy
        workers.append(mp.Process(target=older_worker, args=args, daemon=True))
        workers[-1].start()
        pipes.append(told)
    for value in (3.0, 4.0):
        source.fill(value)
        weights = source.state_dict() if strategy == "state_dict" else weights_of(source)
        with hurry("an update in the older calls", PROMPT):
            sender.update_weights(weights)
        for told in pipes:
            assert told.poll(SOON) and told.recv() == (value, value)
    for worker in workers:
        worker.kill()


def older_scheme(module, name, strategy):
    how = {"auto_register": True} if name == "shared-mem" else {}
    return scheme_by(module, name, strategy, **how)


def older_worker(pipe, tell, module, name, strategy):
    model = Probe()
    receiver = older_scheme(module, name, strategy).create_receiver()
    receiver.register_model(model)
    receiver.register_worker_transport(pipe)
    seen = 0.0
    while True:
        receiver.receive(timeout=0.05)
        if model() != (seen, seen):
            tell.send(model())
            seen = model()[0]


def pickled_before(module, name):
    """A scheme that was pickled before anything was initialised is as good as new."""
    started_with(pickle.loads(pickle.dumps(scheme_of(module, name, strategy="tensordict"))))


def pickled_after(module, name):
    """A scheme pickled after `init_on_sender`, by hand, is all that a worker needs."""
    learner = Probe(2.0)
    scheme = scheme_of(module, name)
    scheme.init_on_sender(model_id="policy", model=learner, devices=[CPU])
    with Crew(pickle.dumps(scheme), [Probe()], Unpickling, sender=scheme) as crew:
        assert crew.values() == [(2.0, 2.0)]
        scheme.send(weights_of(learner.filled(3.0)))
        assert crew.values() == [(3.0, 3.0)]


class Unpickling(Worker):
    def prepare(self):
        self.scheme = pickle.loads(self.scheme)
        assert not self.scheme.initialized_on_sender


def initialised_again(module, name):
    """A pickled copy can be made a sender of its own, next to the first."""
    learner = Probe(2.0)
    scheme = scheme_of(module, name)
    with standing(scheme, learner) as crew:
        other = pickle.loads(pickle.dumps(scheme))
        assert not other.initialized_on_sender and not other.synchronized_on_sender
        started_with(other)
        scheme.send(weights_of(learner.filled(3.0)))
        assert crew.values() == [(3.0, 3.0)] * 2


def started_with(scheme):
    learner = Probe(5.0)
    with standing(scheme, learner) as crew:
        assert crew.values() == [(5.0, 5.0)] * 2
        scheme.send(weights_of(learner.filled(6.0)))
        assert crew.values() == [(6.0, 6.0)] * 2


def wrong_order(module, name):
    """Calls of the wrong half, too early or twice: an error that says so."""
    scheme = scheme_of(module, name)
    weights = weights_of(Probe())
    raises(lambda: scheme.send(weights))
    raises(lambda: scheme.receive())
    raises(lambda: scheme.connect())
    scheme.init_on_sender(model_id="policy", model=Probe(), devices=[CPU])
    raises(lambda: scheme.send(weights))
    raises(lambda: scheme.receive())
    with Crew(scheme, [Probe()]) as crew:
        raises(lambda: scheme.connect())
        raises(lambda: scheme.apply_weights(weights))
        assert crew.ask(0, "read") == (0.0, 0.0)


def initialised_by(module, name, how):
    """Each way to say what the workers are to have, and on which devices."""
    learner = Probe(2.0)
    weights = weights_of(learner)
    ways = {
        "model": {"model": learner, "devices": [CPU, CPU]},
        "weights": {"weights": weights, "devices": [CPU, CPU]},
        "device_map_fn": {"model": learner, "device_map_fn": mapped, "num_workers": 2},
    }
    scheme = scheme_of(module, name)
    with standing(scheme, learner, **ways[how]) as crew:
        assert crew.values() == [(2.0, 2.0)] * 2
        scheme.send(weights_of(learner.filled(3.0)))
        assert crew.values() == [(3.0, 3.0)] * 2


def mapped(_, weights):
    return weights.to(CPU)


def per_worker(module, name):
    """`params_map` with weights of each worker's own, and updates of some of them."""
    first = {0: weights_of(Probe(1.0)), 1: weights_of(Probe(2.0))}
    scheme = scheme_of(module, name, per_worker_weights=True)
    scheme.init_on_sender(params_map=first)
    scheme.model_id = "policy"
    with Crew(scheme, [Probe(), Probe()]) as crew:
        assert crew.values() == [(1.0, 1.0), (2.0, 2.0)]
        scheme.send({0: weights_of(Probe(3.0)), 1: weights_of(Probe(4.0))})
        assert crew.values() == [(3.0, 3.0), (4.0, 4.0)]
        scheme.send({1: weights_of(Probe(5.0))})
        assert crew.values() == [(3.0, 3.0), (5.0, 5.0)]


def named_workers(module, name):
    """One worker, some, all: only those change."""
    learner = Probe()
    scheme = scheme_of(module, name)
    with standing(scheme, learner, workers=3) as crew:
        scheme.send(weights_of(learner.filled(1.0)), worker_ids=1)
        assert crew.values() == [(0.0, 0.0), (1.0, 1.0), (0.0, 0.0)]
        scheme.send(weights_of(learner.filled(2.0)), worker_ids=[0, 2])
        assert crew.values() == [(2.0, 2.0), (1.0, 1.0), (2.0, 2.0)]
        scheme.send(weights_of(learner.filled(3.0)))
        assert crew.values() == [(3.0, 3.0)] * 3


def mismatch(module, name, kind):
    """Weights of another shape, with a name too few or too many: refused, nothing changes."""
    right = weights_of(Probe(2.0))
    wrong = {
        "shape": weights_of(Probe(2.0, numel=5)),
        "missing": right.exclude(("layers", "1")),
        "unknown": right.clone().set(("layers", "9"), torch.ones(4)),
    }[kind]
    learner = Probe(1.0)
    scheme = scheme_of(module, name)
    with standing(scheme, learner, fill=1.0) as crew:
        with hurry(f"a send with a mismatch ({kind})", PROMPT):
            try:
                report = scheme.send(wrong)
            except Exception:
                pass
            else:
                for index in range(2):
                    said = line(report, index)
                    assert said and not said.startswith("applied"), f"not refused: {report!r}"
        assert crew.values() == [(1.0, 1.0)] * 2
        scheme.send(right)
        assert crew.values() == [(2.0, 2.0)] * 2


def on_meta(module, name):
    """A worker whose model has no memory yet gets shapes and weights at connect."""
    learner = Probe(2.0)
    scheme = scheme_of(module, name)
    with standing(scheme, learner, worker=OnMeta) as crew:
        assert crew.values() == [(2.0, 2.0)] * 2
        scheme.send(weights_of(learner.filled(3.0)))
        assert crew.values() == [(3.0, 3.0)] * 2


class OnMeta(Worker):
    def prepare(self):
        self.model.to("meta")


def cascade(module, name):
    """A worker's context is told of each update, once, after it has the weights."""
    learner = Probe()
    scheme = scheme_of(module, name)
    with standing(scheme, learner, workers=1, worker=Cascading) as crew:
        for value in (3.0, 4.0):
            scheme.send(weights_of(learner.filled(value)))
            assert crew.ask(0, "told") == [("policy", (value, value))]


class Cascading(Worker):
    class Context:
        worker_idx = 0

        def __init__(self, model):
            self.model, self.told = model, []

        def get_model(self, _):
            return self.model

        def update_policy_weights_(self, policy_or_weights=None, *, model_id=None, **_):
            assert policy_or_weights is not None
            self.told.append((model_id, self.model()))

    def prepare(self):
        self.context = self.Context(self.model)

    def told(self):
        told, self.context.told = self.context.told, []
        return told


def shut_down(module, name):
    """`shutdown` can be called again, and no thread, file or process of the scheme is left."""
    start(module, name).shutdown()
    before = left()
    for _ in range(3):
        scheme = start(module, name)
        scheme.shutdown()
        scheme.shutdown()
        del scheme
    assert left() == before, f"left behind: {left()}, before {before}"


def start(module, name):
    learner = Probe()
    scheme = scheme_of(module, name)
    with standing(scheme, learner) as crew:
        scheme.send(weights_of(learner.filled(1.0)))
        assert crew.values() == [(1.0, 1.0)] * 2
    return scheme


def left():
    """Threads, files and child processes of this process."""
    files = len(os.listdir("/proc/self/fd"))
    return threading.active_count(), files, len(multiprocessing.active_children())


def becomes(crew, index, value):
    """Waits until a worker reads that value."""
    end = time.monotonic() + SOON
    while crew.ask(index, "read") != (value, value):
        assert time.monotonic() < end, f"worker {index} never reads {value}"


def raises(call):
    try:
        call()
    except Exception:
        return
    raise AssertionError("that was to raise an error")


def scheme_of(module, name, strategy="tensordict", **how):
    return scheme_by(module, name, strategy, **how)
