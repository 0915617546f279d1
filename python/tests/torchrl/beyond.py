"""What TorchRL's tests do not ask of schemes in collectors, and their users do."""

import gc
import os
import pickle
import signal
import threading
import time

import torch
import weightsync
from crew import SOON, Crew, Probe, Worker, hurry, line, standing
from scenarios import scheme_of
from tiny import Counting, One, acted, collecting, policy, weights_of
from torch import multiprocessing as mp
from torch import nn
from torchrl.collectors import Collector

CPU = torch.device("cpu")
PROMPT = 10.0


def forgotten(module, name):
    """A collector that is garbage, in a circle, ends its workers as TorchRL's own does."""
    processes = []

    def use():
        with collecting(module, {"policy": name}, policy=policy(1.0)) as (made, batches):
            assert acted(batches) == {1.0}
            processes.extend(made.procs)
            made.me = made
            # `collecting` ends it otherwise.
            made.__dict__["shutdown"] = lambda: made.__dict__.pop("shutdown") and None

    gc.disable()
    use()
    assert all(one.is_alive() for one in processes)
    gc.collect()
    for one in processes:
        one.join(SOON)
        assert not one.is_alive(), "a worker outlives its collector"


def shut_down_collector(module, name):
    """An update of a collector that was shut down says so."""
    with collecting(module, {"policy": name}, policy=policy(1.0)) as (made, batches):
        assert acted(batches) == {1.0}
        made.shutdown()
        try:
            made.update_policy_weights_(policy(2.0))
        except weightsync.LifecycleError as error:
            assert "collector has been shut down" in str(error), error
        else:
            raise AssertionError("there is no worker to update")


def initialised_first(module, name):
    """Schemes that were initialised before their collector: names are checked, both end together."""
    scheme = scheme_of(module, name)
    scheme.init_on_sender(model_id="policy", model=policy(1.0), devices=[CPU] * 2)
    with collecting(module, {"policy": scheme}, policy_factory=lambda: policy(0.0)) as (
        made,
        batches,
    ):
        assert acted(batches) == {1.0}
        try:
            made.update_policy_weights_(weights_dict={"policy": policy(2.0), "nope": policy(2.0)})
        except KeyError as error:
            assert "nope" in str(error)
        else:
            raise AssertionError("an unknown model raises nothing")
        assert acted(batches) == {1.0}, "nothing was to change"
    assert not scheme.initialized_on_sender, "it ends with its collector"


def initialised_with_failing_workers(module, name):
    """A worker that fails before it joins is raised in its own words, and not waited for."""
    from weightsync.torchrl import _group

    _group.WEIGHT_SYNC_TIMEOUT = 1e6
    trainer = os.getpid()

    def env():
        if os.getpid() != trainer:
            raise RuntimeError("there is no such world")
        return Counting()

    scheme = scheme_of(module, name)
    scheme.init_on_sender(model_id="policy", model=policy(1.0), devices=[CPU] * 2)
    how = {"env": env, "policy_factory": lambda: policy(0.0)}
    try:
        with collecting(module, {"policy": scheme}, **how):
            raise AssertionError("a collector without environments was made")
    except RuntimeError as error:
        assert "there is no such world" in str(error), error


class Large(nn.Module):
    """A policy whose parameter is large enough to be bound."""

    def __init__(self, fill):
        super().__init__()
        self.many = nn.Parameter(torch.full((100_000,), float(fill)))

    def forward(self, rows):
        low, high = self.many.detach().aminmax()
        return (low if low == high else torch.tensor(float("nan"))).expand(rows.shape).clone()


def large_policy(module, name):
    """A policy whose parameters lie in the version itself."""
    with collecting(module, {"policy": name}, policy=policy(module=Large(1.0))) as (made, batches):
        assert acted(batches) == {1.0}
        for value in range(2, 8):
            made.update_policy_weights_(policy(module=Large(value)))
            assert acted(batches) == {float(value)}


class Transient(One):
    """A policy with a buffer that a state dict leaves out."""

    def __init__(self, weight):
        super().__init__(weight)
        self.register_buffer("scale", torch.tensor([5.0]), persistent=False)

    def forward(self, rows):
        return super().forward(rows) * self.scale


def transient_buffer(module, name, strategy):
    """Such a buffer arrives, or its absence is said; it is never silently zero."""
    scheme = scheme_of(module, name, strategy)
    how = {"policy": policy(module=Transient(2.0))}
    try:
        with collecting(module, {"policy": scheme}, **how) as (_, batches):
            assert acted(batches) == {10.0}
    except Exception as error:
        assert strategy == "state_dict" and "scale" in str(error), error
    else:
        assert strategy == "tensordict"


def in_this_process(module, name):
    """A collector without workers takes all of an update or none."""
    policy_of_two = policy(module=nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
    made = Collector(
        lambda: __import__("tiny").Counting(),
        policy_of_two,
        frames_per_batch=4,
        total_frames=-1,
        auto_register_policy_transforms=False,
        weight_sync_schemes={"policy": scheme_of(module, name)},
    )
    try:
        before = weights_of(made.policy)
        for spoil in (
            lambda weights: weights.set(("module", "1", "weight"), torch.ones(2, 1)),
            lambda weights: weights.exclude(("module", "1", "bias")),
            lambda weights: weights.set(("module", "1", "other"), torch.ones(1)),
        ):
            wrong = spoil(weights_of(made.policy).apply(lambda one: one + 1))
            try:
                made.update_policy_weights_(wrong)
            except ValueError as error:
                assert "module.1." in str(error)
            else:
                raise AssertionError("weights that do not fit raise nothing")
            assert (weights_of(made.policy) == before).all()
    finally:
        made.shutdown()


class Middle(Worker):
    """A worker that feeds workers of its own, by a scheme of its own."""

    class Context:
        worker_idx = 0

        def __init__(self, model, schemes):
            self.model, self._weight_sync_schemes = model, schemes

        def get_model(self, _):
            return self.model

    def prepare(self):
        # A worker of these tests is a daemon, and may have processes all the same.
        mp.current_process()._config["daemon"] = False
        own = type(self.scheme)()
        own.init_on_sender(model_id="policy", model=self.model, num_workers=2)
        self.pipes, self.below = [], []
        for index in range(2):
            here, there = mp.Pipe()
            self.below.append(mp.Process(target=below, args=(own, index, there), daemon=True))
            self.below[-1].start()
            self.pipes.append(here)
        own.connect()
        self.own = own
        self.context = self.Context(self.model, {"policy": own})

    def read_below(self):
        return [self.ask(pipe) for pipe in self.pipes]

    def ask(self, pipe):
        pipe.send("read")
        return pipe.recv() if pipe.poll(SOON) else None

    def kill_one(self):
        os.kill(self.below[1].pid, signal.SIGKILL)
        self.below[1].join()


def below(scheme, index, pipe):
    model = Probe()
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=index)
    scheme.connect(worker_idx=index)
    for _ in iter(pipe.recv, None):
        pipe.send(model())


def real_cascade(module, name):
    """Sub-workers run what the trainer sends, from the first version on; a dead one is told of."""
    learner = Probe(2.0)
    scheme = scheme_of(module, name)
    with standing(scheme, learner, workers=1, worker=Middle) as crew:
        assert crew.ask(0, "read_below") == [(2.0, 2.0)] * 2
        report = scheme.send(weights_of(learner.filled(3.0)))
        assert line(report, 0) == "applied", report
        assert crew.ask(0, "read_below") == [(3.0, 3.0)] * 2
        crew.ask(0, "kill_one")
        with hurry("a send with a dead sub-worker", PROMPT):
            report = scheme.send(weights_of(learner.filled(4.0)))
        assert line(report, 0) == "refused", report
        assert "worker 1" in report.worker(0).reason, report.worker(0).reason


def older_with_a_dead_one(module, name):
    """In the older calls a worker that died is a line, and the others go on."""
    scheme = scheme_of(module, name)
    sender = scheme.create_sender()
    workers, tells = [], []
    for index in range(2):
        here, there = mp.Pipe()
        tell, told = mp.Pipe()
        sender.register_worker(index, here)
        args = (module.__name__, name, there, tell)
        workers.append(mp.Process(target=older_worker, args=args, daemon=True))
        workers[-1].start()
        tells.append(told)
    learner = Probe()
    sender.update_weights(weights_of(learner.filled(1.0)))
    assert [told.poll(SOON) and told.recv() for told in tells] == [1.0, 1.0]
    workers[1].kill()
    workers[1].join()
    with hurry("an update with a dead worker", PROMPT):
        report = sender.update_weights(weights_of(learner.filled(2.0)))
    assert line(report, 0) == "applied", report
    assert tells[0].poll(SOON) and tells[0].recv() == 2.0
    with hurry("an update of a worker that has died", PROMPT):
        sender.update_weights(weights_of(learner.filled(3.0)), worker_ids=[1])
    sender.shutdown()


def older_worker(module, name, pipe, tell):
    import importlib

    model = Probe()
    receiver = scheme_of(importlib.import_module(module), name).create_receiver()
    receiver.register_model(model)
    receiver.register_worker_transport(pipe)
    while True:
        if receiver.receive(timeout=SOON):
            tell.send(model()[0])


def older_without_a_sender(module, name):
    """A sender that ended before it had said how to join sends nothing more."""
    here, there = mp.Pipe()
    receiver = scheme_of(module, name).create_receiver()
    receiver.register_model(Probe())
    receiver.register_worker_transport(there)
    assert receiver.receive(timeout=0.0) is False
    here.close()
    assert receiver.receive(timeout=SOON) is False


def own_weights_at_once(module, name):
    """Workers with weights of their own wait for these alone, whenever they come."""
    from weightsync.torchrl import _group

    # A wait for anything else has no end.
    _group.WEIGHT_SYNC_TIMEOUT = 1e6
    for worker in (Worker, Late):
        scheme = scheme_of(module, name)
        first = {0: weights_of(Probe(1.0)), 1: weights_of(Probe(2.0))}
        scheme.init_on_sender(params_map=first, model_id="policy")
        with Crew(scheme, [Probe(), Probe()], worker) as crew:
            assert crew.values() == [(1.0, 1.0), (2.0, 2.0)]
            scheme.send({1: weights_of(Probe(3.0))})
            assert crew.values() == [(1.0, 1.0), (3.0, 3.0)]
        scheme.shutdown()


class Late(Worker):
    def prepare(self):
        # The sender has long sent what each begins with.
        time.sleep(1.0)


def shut_down_while_connecting(module, name):
    """A shutdown ends a connect that waits."""
    scheme = scheme_of(module, name)
    scheme.init_on_sender(model_id="policy", model=Probe(), num_workers=1)
    raised = []

    def connect():
        try:
            scheme.connect()
        except Exception as error:
            raised.append(error)

    waiting = threading.Thread(target=connect)
    waiting.start()
    while not scheme.synchronized_on_sender:
        pass
    with hurry("a shutdown", PROMPT):
        scheme.shutdown()
        waiting.join()
    assert raised


def words_of_errors(module, name):
    """Calls out of order are errors of their own class that say what to do."""
    from weightsync import LifecycleError

    scheme = scheme_of(module, name)
    for call, said in (
        (lambda: scheme.send(weights_of(Probe())), "init_on_sender"),
        (lambda: scheme.receive(timeout=0.0), "init_on_receiver"),
        (
            lambda: scheme.init_on_receiver(model_id="policy", model=Probe(), worker_idx=0),
            "init_on_sender",
        ),
    ):
        try:
            call()
        except LifecycleError as error:
            assert said in str(error), error
        else:
            raise AssertionError(f"no error says {said}")
    scheme.init_on_sender(model_id="policy", model=Probe(), num_workers=1)
    try:
        scheme.send(weights_of(Probe()))
    except LifecycleError as error:
        assert "connect" in str(error)
    else:
        raise AssertionError("a send before connect is no error")
    assert pickle.loads(pickle.dumps(scheme)).model_id == "policy"
