"""What is broken in TorchRL 0.14.1's schemes, each as a check that fails where it is.

A check takes the module of the schemes and the name of one, and is run by `crew.bounded` in a
process of its own. It raises an `AssertionError` if the fault is there; a fault that is a wait
without end is named by `hurry`. What a check wants is stated of the outcome alone, so that the
same check is fair to both: it may fail with TorchRL's schemes, and has to pass with ours.
"""

import copy
import gc
import signal

import torch
from crew import SOON, Probe, Worker, hurry, line, scheme_by, send_by, standing
from tiny import Counting, One, acted, collecting, policy, weights_of
from torch import multiprocessing as mp
from torchrl.collectors import Collector
from torchrl.weight_update import WeightStrategy

# What a send with nothing wrong stays under by far, and one that hangs does not.
PROMPT = 4.0


def step_without_send(module, name):
    """1. An optimiser's step in the learner reaches workers that nothing was sent to."""
    learner = Probe(1.0)
    with standing(scheme_of(module, name), learner, fill=1.0) as crew:
        optimiser = torch.optim.SGD(learner.parameters(), lr=1.0)
        sum(layer.sum() for layer in learner.parameters()).backward()
        optimiser.step()
        assert learner() == (0.0, 0.0)
        assert crew.values() == [(1.0, 1.0)] * 2, f"the workers see {crew.values()}"


def send_to_one(module, name):
    """2. A send to worker 0 changes worker 1, and the learner's own weights."""
    learner = Probe(1.0)
    scheme = scheme_of(module, name)
    with standing(scheme, learner, fill=1.0) as crew:
        scheme.send(weights_of(learner.filled(5.0)), worker_ids=[0])
        seen = *crew.values(), learner()
        assert seen == ((5.0, 5.0), (1.0, 1.0), (1.0, 1.0)), f"workers and learner see {seen}"


def torn_read(module, name):
    """3. A worker that reads while versions are sent sees two of them mixed."""
    learner = Probe(tensors=16, numel=1 << 18)
    source = copy.deepcopy(learner)
    scheme = scheme_of(module, name)
    with standing(scheme, learner, workers=1) as crew:
        last = 60
        crew.order(0, "watch", last, 10_000)
        for version in range(1, last + 1):
            scheme.send(weights_of(source.fill(version)))
            if crew.has_answered(0):
                break
        torn, whole = crew.answer(0)
        assert not torn, f"passes that saw a mix of versions: {torn}"
        # Else nothing was ever at stake.
        assert whole > 5, f"only {whole} versions were seen"


def killed_worker(module, name):
    """4. A send waits for a worker that was killed."""
    learner = Probe()
    scheme = scheme_of(module, name)
    with standing(scheme, learner) as crew:
        crew.signal(1, signal.SIGKILL)
        with hurry("a send with a killed worker", PROMPT):
            report = scheme.send(weights_of(learner.filled(3.0)))
        assert line(report, 0) and line(report, 0).startswith("applied"), report
        assert line(report, 1) and not line(report, 1).startswith("applied"), report
        assert crew.ask(0, "read") == (3.0, 3.0)


def wrong_shape(module, name):
    """4. A send of weights that no worker can load is waited for, or breaks the next one."""
    learner = Probe(1.0)
    scheme = scheme_of(module, name)
    with standing(scheme, learner, fill=1.0) as crew:
        with hurry("a send of a wrong shape", PROMPT):
            try:
                report = scheme.send(weights_of(Probe(2.0, numel=5)))
            except Exception:
                pass
            else:
                assert not (line(report, 0) or "").startswith("applied"), report
        assert crew.values() == [(1.0, 1.0)] * 2
        with hurry("a right send after a wrong one", PROMPT):
            scheme.send(weights_of(learner.filled(3.0)))
        assert crew.values() == [(3.0, 3.0)] * 2


class Refusing(Worker):
    """A worker that cannot hand on what it gets, but for even numbers."""

    class Context:
        def __init__(self, model):
            self.model = model

        def get_model(self, _):
            return self.model

        def update_policy_weights_(self, *_, **__):
            if self.model()[0] % 2:
                raise RuntimeError("no odd weights here")

    def prepare(self):
        if self.index == 1:
            self.context = self.Context(self.model)
            self.context.worker_idx = self.index


def failing_cascade(module, name):
    """4. A worker whose cascade raises is not told apart: no line says so, the send waits."""
    learner = Probe()
    scheme = scheme_of(module, name)
    with standing(scheme, learner, worker=Refusing) as crew:
        with hurry("a send that one worker refuses", PROMPT):
            report = scheme.send(weights_of(learner.filled(3.0)))
        assert (line(report, 0) or "").startswith("applied"), report
        assert line(report, 1) and not line(report, 1).startswith("applied"), report
        with hurry("a send after a refused one", PROMPT):
            report = scheme.send(weights_of(learner.filled(4.0)))
        assert (line(report, 1) or "").startswith("applied"), report
        assert crew.ask(0, "read") == (4.0, 4.0)


class Raising(Worker):
    """A worker whose strategy raises for odd weights, after connect."""

    class Strategy(WeightStrategy):
        def apply_weights(self, destination, weights, inplace=True):
            if next(iter(weights.values(True, True))).flatten()[0] % 2:
                raise RuntimeError("no odd weights here")
            super().apply_weights(destination, weights, inplace)

    def prepare(self):
        if self.index == 1:
            self.scheme.strategy = self.Strategy()


def failing_loader(module, name):
    """4. A worker whose strategy raises is not told apart either."""
    learner = Probe()
    scheme = scheme_of(module, name)
    with standing(scheme, learner, worker=Raising) as crew:
        with hurry("a send that one worker cannot load", PROMPT):
            report = scheme.send(weights_of(learner.filled(3.0)))
        assert (line(report, 0) or "").startswith("applied"), report
        assert line(report, 1) and not line(report, 1).startswith("applied"), report
        with hurry("a send after one that failed", PROMPT):
            scheme.send(weights_of(learner.filled(4.0)))
        assert crew.values() == [(4.0, 4.0)] * 2


def late_worker(module, name):
    """5. A deadline that passes is a warning in a log; the send has succeeded."""
    learner = Probe()
    scheme = scheme_of(module, name)
    with standing(scheme, learner) as crew:
        crew.signal(1, signal.SIGSTOP)
        try:
            with hurry("a send with a deadline", PROMPT):
                report = send_by(scheme, weights_of(learner.filled(3.0)), 0.5)
            assert line(report, 1) is not None, f"nothing says that worker 1 is late: {report!r}"
            assert not line(report, 1).startswith("applied"), report
        finally:
            crew.signal(1, signal.SIGCONT)


def old_answer(module, name):
    """5. What a worker has said to one send is taken for its answer to the next."""
    learner = Probe()
    scheme = scheme_of(module, name)
    with standing(scheme, learner) as crew:
        crew.signal(1, signal.SIGSTOP)
        with hurry("a send with a deadline", PROMPT):
            send_by(scheme, weights_of(learner.filled(3.0)), 0.5)
        crew.signal(1, signal.SIGCONT)
        while crew.ask(1, "read") != (3.0, 3.0):
            pass
        # TorchRL's answers come through a queue: the late one is to be there.
        answers = getattr(scheme, "_ack_queues", {}).get(1)
        assert answers is None or answers._reader.poll(SOON)
        crew.signal(1, signal.SIGSTOP)
        try:
            with hurry("a send to a stopped worker", PROMPT):
                weights = weights_of(learner.filled(4.0))
                if answers is None:
                    report = send_by(scheme, weights, 0.5)
                else:
                    report = scheme.send(weights)
            claimed = report is None or line(report, 1).startswith("applied")
            assert not claimed, "the send says that a stopped worker has the weights"
        finally:
            crew.signal(1, signal.SIGCONT)


def raised_timeout(module, name):
    """6. `receive(timeout)` raises when there is nothing, or gives what was not sent."""
    scheme = scheme_of(module, name)
    with standing(scheme, Probe(), workers=1) as crew:
        assert crew.ask(0, "receive", 0.1) is False, "something came though nothing was sent"


def unknown_second(module, name):
    """7. An update of two models of which one is unknown changes the other."""
    with collecting(module, {"policy": name}, policy=policy(1.0)) as (collector, batches):
        two = {"policy": policy(2.0), "nope": policy(2.0)}
        try:
            collector.update_policy_weights_(weights_dict=two)
        except KeyError:
            pass
        else:
            raise AssertionError("an unknown model raises nothing")
        seen = acted(batches)
        assert seen == {1.0}, f"nothing was to change, but the workers act with {seen}"


class Both(torch.nn.Module):
    """A policy that acts with the weights of both models, as one pass sees them."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, rows):
        mine = self.weight.detach().clone()
        for _ in range(100):
            value = Counting.last.value_net.weight.detach().clone()
        return (mine - value).expand(rows.shape)


def models_apart(module, name):
    """7. The models of one update do not change together, if they change at all."""
    cpu = torch.device("cpu")
    # Pickled, since TorchRL's schemes for a second model do not start in a forked process.
    mp.set_start_method("spawn", force=True)
    value = One()
    schemes = {model: scheme_of(module, name) for model in ("policy", "env.value_net")}
    schemes["env.value_net"].init_on_sender(model_id="env.value_net", model=value, devices=[cpu])
    actor = policy(module=Both())
    with collecting(module, schemes, workers=1, sync=False, policy=actor) as (collector, batches):
        differences = set()
        for weight in range(1, 61):
            two = {"policy": policy(module=Both()), "env.value_net": One(weight)}
            two["policy"].module.weight.data.fill_(weight)
            with hurry("an update of two models", PROMPT):
                collector.update_policy_weights_(weights_dict=two)
            differences |= acted(batches)
            if len(differences) > 1:
                break
        assert differences == {0.0}, f"models of two updates at a time: apart by {differences}"


def applied_twice(module, name):
    """8. What a collector's worker gets is written into its policy twice."""
    done = mp.get_context().Array("i", 3)

    def counted(of, method, place):
        theirs = getattr(of, method)

        def counting(*args, **kwargs):
            done[place] += 1
            return theirs(*args, **kwargs)

        setattr(of, method, counting)

    # In this process, so that the workers, forked, have it.
    counted(WeightStrategy, "apply_weights", 0)
    counted(Collector, "_maybe_fallback_update", 1)
    counted(Collector, "increment_version", 2)
    with collecting(module, {"policy": name}, workers=1, policy=policy(1.0)) as (
        collector,
        batches,
    ):
        acted(batches)
        done[:] = [0, 0, 0]
        collector.update_policy_weights_(policy(2.0))
        assert acted(batches) == {2.0}
        by_scheme, by_cascade, bumps = done[:]
        assert by_scheme + by_cascade <= 1, f"written {by_scheme} + {by_cascade} times"
        assert bumps == 1, f"one update counts as {bumps}"


class Replacing(Worker):
    """A worker that goes on with a copy of the model it has registered."""

    def replace(self):
        self.model = copy.deepcopy(self.model)
        gc.collect()


def stale_model(module, name):
    """9. A worker whose model is gone says that it has the weights."""
    learner = Probe()
    scheme = scheme_of(module, name)
    with standing(scheme, learner, workers=1, worker=Replacing) as crew:
        crew.ask(0, "replace")
        with hurry("a send", PROMPT):
            report = scheme.send(weights_of(learner.filled(3.0)))
        seen = crew.ask(0, "read")
        claimed = report is None or line(report, 0).startswith("applied")
        assert seen == (3.0, 3.0) or not claimed, f"the worker has {seen}, and the send succeeded"


def stale_copy(module, name):
    """9. A worker whose collector has copied its policy runs the first weights for ever."""
    # The same device as `cpu` under another name, which is enough for a copy.
    how = {"policy": policy(1.0), "policy_device": "cpu:0"}
    with collecting(module, {"policy": name}, **how) as (collector, batches):
        assert acted(batches) == {1.0}
        with hurry("an update", PROMPT):
            collector.update_policy_weights_(policy(2.0))
        seen = acted(batches)
        assert seen == {2.0}, f"the update succeeded, and the workers act with {seen}"


def factory_never_updated(module, name):
    """9. With a policy factory and no policy, an update of nothing at all succeeds."""
    factory = {"policy_factory": lambda: policy(1.0)}
    with collecting(module, {"policy": name}, **factory) as (collector, batches):
        assert acted(batches) == {1.0}
        with hurry("an update without weights", PROMPT):
            try:
                collector.update_policy_weights_()
            except Exception:
                return
        raise AssertionError("an update that had nothing to send raised nothing")


def unknown_worker(module, name):
    """9. A send to a worker there is not (one too many) changes others, or is not told."""
    learner = Probe(1.0)
    scheme = scheme_of(module, name)
    with standing(scheme, learner, fill=1.0) as crew:
        with hurry("a send to an unknown worker", PROMPT):
            try:
                report = scheme.send(weights_of(learner.filled(3.0)), worker_ids=[2])
            except Exception:
                pass
            else:
                assert line(report, 2) and not line(report, 2).startswith("applied"), report
        seen = *crew.values(), learner()
        assert seen == ((1.0, 1.0),) * 3, f"nothing was to change; workers and learner see {seen}"


def scheme_of(module, name, **how):
    return scheme_by(module, name, **how)
