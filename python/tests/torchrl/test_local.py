"""What schemes on one host promise that needs no process of its own: a trainer's half and a worker's
in one process, as two copies of a scheme."""

import contextlib
import multiprocessing
import pickle
import queue
import threading
import time

import pytest
import torch
from crew import Probe
from patience import patience
from tensordict import TensorDict
from torch import nn
from torchrl import weight_update
from torchrl.weight_update import WeightStrategy

import weightsync.torchrl as ours
from weightsync import (
    DeadlineError,
    LifecycleError,
    ModelError,
    WeightsyncError,
    WrongWeightsError,
)
from weightsync.torchrl import _collector, _group
from weightsync.torchrl._native_scheme import NativeScheme

KINDS = [ours.SharedMemWeightSyncScheme, ours.MultiProcessWeightSyncScheme]
LONG = patience(30)


@contextlib.contextmanager
def ended(*ends):
    try:
        yield
    finally:
        for end in ends:
            end.shutdown()


def meet(sender, *receivers):
    """Both halves of `connect`, each in a thread of its own; what one raised is raised."""
    raised = []

    def run(call):
        try:
            call()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(one.connect,)) for one in (*receivers, sender)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def copied(scheme):
    return pickle.loads(pickle.dumps(scheme))


def weights(module):
    return TensorDict.from_module(module).data.clone()


@contextlib.contextmanager
def connected(kind, source, model, strategy="tensordict", of=None, **how):
    """A scheme in the trainer, and its copy in a worker."""
    sender = kind(strategy=strategy, **how)
    if of is not None:
        sender.strategy = of
    sender.init_on_sender(model_id="policy", model=source, num_workers=1)
    receiver = copied(sender)
    with ended(receiver, sender):
        receiver.init_on_receiver(model_id="policy", model=model, worker_idx=0)
        meet(sender, receiver)
        yield sender, receiver


class Stateful(nn.Module):
    """A module with extra state, in which there is another one with some."""

    def __init__(self, step=0, inner=True):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), float(step)))
        self.step = step
        self.inner = Stateful(step * 10, inner=False) if inner else None

    def get_extra_state(self):
        return {"step": self.step, "mean": torch.full((2,), float(self.step))}

    def set_extra_state(self, state):
        self.step = int(state["step"])
        assert state["mean"].tolist() == [float(self.step)] * 2


class Own(WeightStrategy):
    """A strategy of one's own, that only looks on."""

    applied = 0

    def apply_weights(self, destination, weights, inplace=True):
        Own.applied += 1
        super().apply_weights(destination, weights, inplace)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
def test_extra_state_travels(kind, strategy):
    source, model = Stateful(1), Stateful()
    with connected(kind, source, model, strategy) as (sender, receiver):
        assert (model.step, model.inner.step) == (1, 10)
        source.step, source.inner.step = 2, 20
        sender.send()
        assert (model.step, model.inner.step) == (2, 20)
        received = receiver.receive(0)
        if strategy == "state_dict":
            assert received["_extra_state"]["step"] == 2
            assert received["inner._extra_state"]["step"] == 20
        else:
            assert received["__extra_state__"]["step"] == 2


def test_custom_strategy_gets_extra_state_of_torchrl():
    source, model = Stateful(1, inner=False), Stateful(inner=False)
    Own.applied = 0
    with connected(KINDS[0], source, model, of=Own()) as (sender, _):
        source.step = 2
        sender.send()
        assert model.step == 2 and Own.applied >= 2


def test_extra_state_passes_transports_and_older_calls():
    waiting = queue.Queue()
    sender, receiver = ours.MPTransport(waiting), ours.MPTransport(waiting)
    source, model = Stateful(1), Stateful()
    with ended(receiver, sender):
        sender.send_weights(source)
        receiver.setup_connection_and_weights_on_receiver(model=model, strategy=WeightStrategy())
        assert (model.step, model.inner.step) == (1, 10)


def test_a_cascade_passes_extra_state_on():
    class Context:
        pass

    context = Context()
    source, model, last = Stateful(1), Stateful(), Stateful()
    below = KINDS[0]()
    below.init_on_sender(model_id="policy", model=model, num_workers=1)
    under = copied(below)
    context.policy, context.worker_idx = model, 0
    context._weight_sync_schemes = {"policy": below}
    sender = KINDS[0]()
    sender.init_on_sender(model_id="policy", model=source, num_workers=1)
    receiver = copied(sender)
    with ended(receiver, under, sender, below):
        under.init_on_receiver(model_id="policy", model=last, worker_idx=0)
        meet(below, under)
        receiver.init_on_receiver(model_id="policy", context=context)
        meet(sender, receiver)
        source.step, source.inner.step = 2, 20
        assert sender.send().all_applied
        assert (last.step, last.inner.step) == (2, 20)


@pytest.mark.parametrize("kind", KINDS)
def test_the_scheme_says_which_version_who_has(kind):
    source, model = Probe(1.0), Probe()
    with connected(kind, source, model) as (sender, receiver):
        assert (sender.version, receiver.version) == (1, 1)
        sender.send()
        assert (sender.version, receiver.version) == (2, 2)
        assert [(one.worker, one.versions) for one in sender.workers] == [(0, [2])]


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_waits_for_a_version_by_its_number(kind):
    source = Probe(1.0)
    with connected(kind, source, Probe()) as (sender, receiver):
        sender.send()
        assert receiver.background.wait(2, timeout=LONG)
        assert not receiver.background.wait(9, timeout=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_keeps_a_workers_model_as_it_is(kind):
    model = Probe()
    with connected(kind, Probe(1.0), model) as (sender, receiver):
        with receiver.frozen():
            before = [one.clone() for one in model.state_dict().values()]
            report = sender._group.send({"policy": Probe(2.0)}, None, "staged", LONG)
            assert report.all_reached and not report.all_applied
            for one, other in zip(before, model.state_dict().values(), strict=True):
                assert torch.equal(one, other)
        assert receiver.background.wait(2, timeout=LONG)
        assert model() == (2.0, 2.0)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_change_only_at_declared_safe_points(kind):
    model = Probe()
    with connected(kind, Probe(1.0), model, safe_points="declared") as (sender, receiver):
        for value, at in ((2.0, receiver.receive), (3.0, receiver.background.safe_point)):
            report = sender._group.send({"policy": Probe(value)}, None, "staged", LONG)
            assert report.all_reached and not report.all_applied
            assert model() == (value - 1, value - 1)
            assert at() is not None
            assert model() == (value, value)
    with pytest.raises(ValueError, match="safe_points"):
        kind(safe_points="never")


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_policy_runs_what_is_sent(kind):
    model = nn.Linear(2, 2)
    source = nn.Linear(2, 2)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with connected(kind, source, model) as (sender, receiver):
        _collector.bump_at_next_forward(Counting(), model, 1)
        for _ in range(3):
            with torch.no_grad():
                source.weight.add_(1.0)
            assert sender.send().all_applied
            assert torch.equal(compiled(torch.ones(2)), source(torch.ones(2)))


class All:
    """The schemes of one end, connected one after the other."""

    def __init__(self, schemes):
        self.schemes = schemes

    def connect(self):
        for scheme in self.schemes.values():
            scheme.connect()


def failing(call, raised):
    """A call that a shutdown ends; what it raised is put into a list."""

    def run():
        try:
            call()
        except LifecycleError as error:
            raised.append(error)

    return run


def group_of_two():
    class Context:
        num_workers = 1

    context = Context()
    context.policy, context.critic = Probe(1.0), Probe(2.0)
    schemes = {name: KINDS[0]() for name in ("policy", "critic")}
    context._weight_sync_schemes = schemes
    for name, scheme in schemes.items():
        scheme.init_on_sender(model_id=name, context=context)
    return context, schemes


def test_a_receive_waits_for_its_own_model():
    context, schemes = group_of_two()
    other = pickle.loads(pickle.dumps(schemes))
    models = {name: Probe() for name in schemes}
    with ended(*other.values(), *schemes.values()):
        for name, scheme in other.items():
            scheme.init_on_receiver(model_id=name, model=models[name], worker_idx=0)
        meet(All(schemes), All(other))
        assert (models["policy"](), models["critic"]()) == ((1.0, 1.0), (2.0, 2.0))
        later = threading.Timer(0.2, lambda: schemes["critic"].send(weights(Probe(5.0))))
        schemes["policy"].send(weights(Probe(4.0)))
        assert other["policy"].receive(LONG) is not None
        later.start()
        # The policy's update alone would not end it.
        assert other["critic"].receive(LONG) is not None
        assert models["critic"]() == (5.0, 5.0)
        later.join()


def test_each_model_of_a_group_is_checked():
    _, schemes = group_of_two()
    other = pickle.loads(pickle.dumps(schemes))
    with ended(*other.values(), *schemes.values()):
        wrong = Probe(numel=5)
        other["policy"].init_on_receiver(model_id="policy", model=wrong, worker_idx=0)
        schemes["policy"].connect()
        raised = []
        waiting = threading.Thread(target=failing(schemes["critic"].connect, raised))
        waiting.start()
        with pytest.raises(WrongWeightsError, match="layers"):
            other["policy"].connect()
        assert wrong() == (0.0, 0.0)
    waiting.join()
    assert raised, "a connect without its worker returned"


def test_group_with_a_wrong_last_model_can_be_fixed():
    context, schemes = group_of_two()
    other = pickle.loads(pickle.dumps(schemes))
    models = {"policy": Probe(), "critic": Probe(numel=5)}
    with ended(*other.values(), *schemes.values()):
        for name, scheme in other.items():
            scheme.init_on_receiver(model_id=name, model=models[name], worker_idx=0)
        schemes["policy"].connect()

        def connect():
            # The trainer is told, too.
            with contextlib.suppress(WrongWeightsError):
                schemes["critic"].connect()
                return
            schemes["critic"].connect()

        waiting = threading.Thread(target=connect)
        waiting.start()
        other["policy"].connect()
        with pytest.raises(WrongWeightsError):
            other["critic"].connect()
        right = Probe()
        other["critic"].model = right
        other["critic"].connect()
        waiting.join(LONG)
        assert not waiting.is_alive()
        schemes["policy"].send(weights(Probe(4.0)))
        schemes["critic"].send(weights(Probe(5.0)))
        assert (models["policy"](), right()) == ((4.0, 4.0), (5.0, 5.0))
        assert [other[name].receive(0) is not None for name in other] == [True, True]


def test_a_worker_may_have_no_model_at_first():
    sender = KINDS[0]()
    sender.init_on_sender(model_id="policy", model=Probe(1.0), num_workers=1)
    receiver = copied(sender)
    with ended(receiver, sender):
        receiver.init_on_receiver(model_id="policy", worker_idx=0)
        meet(sender, receiver)
        sender.send(weights(Probe(2.0)))
        assert receiver.receive(LONG) is not None
        model = Probe()
        receiver.model = model
        assert model() == (2.0, 2.0)


class Shared(Stateful):
    """Extra state that has a tensor twice, and a parameter."""

    def get_extra_state(self):
        mean = torch.ones(2)
        return {"step": self.step, "both": [mean, mean], "own": self.weight.detach()}

    def set_extra_state(self, state):
        self.step = state["step"]


def test_extra_state_that_shares_its_tensors_travels():
    with connected(KINDS[0], Shared(1, inner=False), Shared(inner=False)) as (sender, receiver):
        sender.send()
        received = receiver.receive(LONG)
        assert received["__extra_state__"]["step"] == 1
        assert sorted(received.keys()) == ["__extra_state__", "weight"]


def test_another_model_in_a_workers_place_is_checked():
    with connected(KINDS[0], Probe(1.0), Probe()) as (sender, receiver):
        wrong = Probe(numel=5)
        with pytest.raises(WrongWeightsError):
            receiver.model = wrong
        right = Probe()
        receiver.model = right
        assert right() == (1.0, 1.0)
        sender.send(weights(Probe(2.0)))
        assert right() == (2.0, 2.0)


def test_kinds_are_not_mixed_in_a_group():
    class Context:
        num_workers = 1

    context = Context()
    context.policy, context.critic = Probe(1.0), Probe(2.0)
    schemes = {"policy": ours.NoWeightSyncScheme(), "critic": KINDS[0]()}
    context._weight_sync_schemes = schemes
    with ended(*schemes.values()):
        for name, scheme in schemes.items():
            scheme.init_on_sender(model_id=name, context=context)
        assert schemes["policy"]._group is not schemes["critic"]._group


@pytest.mark.parametrize("half", ["sender", "receiver"])
def test_a_rendezvous_that_was_late_is_made_up_for(half, monkeypatch):
    source, model = Probe(1.0), Probe()
    sender = KINDS[0]()
    sender.init_on_sender(model_id="policy", model=source, num_workers=1)
    receiver = copied(sender)
    with ended(receiver, sender):
        receiver.init_on_receiver(model_id="policy", model=model, worker_idx=0)
        monkeypatch.setattr(_group, "WEIGHT_SYNC_TIMEOUT", 0.3)
        with pytest.raises(DeadlineError):
            (sender if half == "sender" else receiver).connect()
        monkeypatch.setattr(_group, "WEIGHT_SYNC_TIMEOUT", LONG)
        meet(sender, receiver)
        assert model() == (1.0, 1.0)
        sender.send(weights(Probe(2.0)))
        assert model() == (2.0, 2.0)


def test_a_worker_that_has_left_can_join_again():
    source, model = Probe(1.0), Probe()
    with connected(KINDS[0], source, model) as (sender, receiver):
        receiver.shutdown()
        sender.send(weights(Probe(2.0)))
        assert model() == (1.0, 1.0)
        receiver.init_on_receiver(model_id="policy", model=model, worker_idx=0)
        receiver.connect()
        assert model() == (2.0, 2.0)
        sender.send(weights(Probe(3.0)))
        assert model() == (3.0, 3.0)


def test_a_shutdown_from_within_a_load_ends_after_it():
    class Context:
        """What is told of each version."""

    context = Context()
    context.policy, context.worker_idx = Probe(), 0
    sender = KINDS[0]()
    sender.init_on_sender(model_id="policy", model=Probe(1.0), num_workers=1)
    receiver = copied(sender)
    told = threading.Event()

    def update_policy_weights_(**_):
        receiver.shutdown()
        told.set()

    context.update_policy_weights_ = update_policy_weights_
    with ended(sender):
        receiver.init_on_receiver(model_id="policy", context=context)
        meet(sender, receiver)
        sender.send(weights(Probe(2.0)), timeout=LONG)
        assert told.wait(LONG)
        receiver.shutdown()


def test_no_worker_is_meant_by_an_empty_list():
    sender = KINDS[0]()
    sender.init_on_sender(
        model_id="policy",
        weights=weights(Probe(1.0)),
        device_map_fn=lambda worker, weights: weights,
        num_workers=1,
    )
    receiver = copied(sender)
    model = Probe()
    with ended(receiver, sender):
        receiver.init_on_receiver(model_id="policy", model=model, worker_idx=0)
        meet(sender, receiver)
        before = sender.version
        assert sender.send(weights(Probe(2.0)), worker_ids=[]) is None
        assert model() == (1.0, 1.0) and sender.version == before


@pytest.mark.parametrize("chosen", ["cpu", torch.device("cpu"), [torch.device("cpu")]])
def test_workers_are_named_by_their_device(chosen):
    sender = KINDS[0]()
    sender.init_on_sender(model_id="policy", model=Probe(1.0), devices=[torch.device("cpu")])
    receiver = copied(sender)
    model = Probe()
    with ended(receiver, sender):
        receiver.init_on_receiver(model_id="policy", model=model, worker_idx=0)
        meet(sender, receiver)
        sender.send(weights(Probe(2.0)), worker_ids=chosen)
        assert model() == (2.0, 2.0)
        with pytest.raises(ValueError, match="no worker is on cuda:1; they are on cpu"):
            sender.send(weights(Probe(3.0)), worker_ids="cuda:1")
        assert model() == (2.0, 2.0)


def test_transport_wait_covers_other_transports_sends():
    source, model = Probe(1.0), Probe()
    with connected(KINDS[1], source, model) as (sender, _):
        sender.sender_transports[0].send_weights_async(weights(Probe(2.0)))
        assert sender.sender_transports[0].wait_ack(LONG).all_applied
        assert model() == (2.0, 2.0)


def test_transport_deadline_is_an_error_and_it_goes_on():
    waiting = {0: queue.Queue(), 1: queue.Queue()}
    sender, receiver = ours.SharedMemTransport(), ours.SharedMemTransport()
    for one in (sender, receiver):
        one.register_weights({0: weights(Probe(1.0)), 1: weights(Probe(1.0))}, waiting)
    receiver.timeout = 0.1
    model = Probe()
    with ended(receiver, sender):
        with pytest.raises(LifecycleError, match="several workers"):
            receiver.receive_weights(0.0, model=model)
        with pytest.raises(DeadlineError, match="worker 1 got no initial weights within 0.1 s"):
            receiver.setup_connection_and_weights_on_receiver(worker_idx=1, model=model)
        with pytest.raises(DeadlineError, match="worker 1 got no initial weights within 0.2 s"):
            receiver.setup_connection_and_weights_on_receiver(worker_idx=1, timeout=0.2)
        sender.setup_connection_and_weights_on_sender()
        assert receiver.receive_weights(LONG, model=model) is not None
        assert model() == (1.0, 1.0)
        assert waiting[1].empty() and not waiting[0].empty()


@pytest.mark.parametrize("kind", KINDS)
def test_transport_of_a_scheme_waits_no_longer_than_it_is_told(kind):
    sender = kind()
    sender.init_on_sender(model_id="policy", model=Probe(1.0), num_workers=1)
    receiver = copied(sender)
    with ended(receiver, sender):
        receiver.init_on_receiver(model_id="policy", model=Probe(), worker_idx=0)
        # The trainer has not called `connect`.
        with pytest.raises(DeadlineError):
            receiver.receiver_transport.setup_connection_and_weights_on_receiver(
                worker_idx=0, timeout=0.1
            )


def test_shared_transport_without_queues_writes_all_or_nothing():
    transport = ours.SharedMemTransport()
    first, second = weights(Probe(1.0)), weights(Probe(1.0))
    transport.register_weights({0: first, 1: second}, {})
    wrong = TensorDict({"other": torch.ones(3)}, [])
    with pytest.raises(WrongWeightsError, match="other is unknown"):
        transport.send_weights({0: weights(Probe(2.0)), 1: wrong})
    with pytest.raises(WrongWeightsError, match="other is unknown"):
        transport.send_weights(wrong)
    assert all((one == 1.0).all() for one in first.values(True, True))
    shared = ours.SharedMemTransport()
    shared.register_weights({0: first, 1: first}, {})
    with pytest.raises(ValueError, match="worker 1 shares its weights with another"):
        shared.send_weights({0: weights(Probe(2.0)), 1: weights(Probe(3.0))})
    with pytest.raises(ValueError, match="no worker 5"):
        shared.send_weights(weights(Probe(2.0)), worker_ids=[5])


@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
@pytest.mark.parametrize("kind", KINDS)
def test_older_receiver_hands_weights_out_unapplied(kind, strategy):
    scheme = kind(strategy=strategy)
    sender, receiver = scheme.create_sender(), scheme.create_receiver()
    ours_, theirs = multiprocessing.Pipe()
    model = Probe()
    receiver.register_model(model)
    receiver.register_worker_transport(theirs)
    with ended(receiver, sender):
        assert receiver._transport.receive_weights(timeout=0.0) is None
        sender.register_worker(0, ours_)
        for value in (1.0, 2.0):
            updating = threading.Thread(target=sender.update_weights, args=(Probe(value),))
            updating.start()
            name, received = receiver._transport.receive_weights(timeout=LONG)
            updating.join()
            assert name == "policy" and isinstance(received, dict) == (strategy == "state_dict")
            assert model() != (value, value)
            receiver.apply_weights(received)
            assert model() == (value, value)
        assert receiver._transport.receive_weights(timeout=0.0) is None


@pytest.mark.parametrize("kind", KINDS)
def test_older_update_does_not_wait_for_a_worker_that_never_came(kind):
    sender, receiver = kind().create_sender(), kind().create_receiver()
    here, there = multiprocessing.Pipe()
    sender.register_worker(0, here)
    with ended(receiver, sender):
        # Each would otherwise wait for a minute, and fail.
        for value in (1.0, 2.0):
            report = sender.update_weights(weights(Probe(value)))
            assert report is None or not report.workers
        with pytest.raises(DeadlineError, match="missing: worker 0"):
            sender.update_weights(weights(Probe(2.0)), worker_ids=[0], timeout=0.1)
        with pytest.raises(DeadlineError, match="missing: worker 0"):
            sender.wait_async(timeout=0.1)
        model = Probe()
        receiver.register_model(model)
        receiver.register_worker_transport(there)
        assert receiver.receive(LONG)
        assert model() == (2.0, 2.0), "the newest"
        sender.wait_async(LONG)


def test_older_receive_for_a_moment_does_not_wait_for_its_sender_a_minute():
    sender = ours.SharedMemWeightSyncScheme().create_sender()
    receiver = ours.SharedMemWeightSyncScheme().create_receiver()
    here, there = multiprocessing.Pipe()
    sender.register_worker(0, here)
    receiver.register_model(Probe())
    receiver.register_worker_transport(there)
    with ended(receiver, sender):
        sender.update_weights(weights(Probe(1.0)))
        # From here on nobody answers.
        sender.shutdown()
        assert receiver.receive(0.001) is False


@pytest.mark.parametrize("name", ["SharedMem", "MultiProcess", "No", "Distributed", "RPC", "Ray"])
def test_scheme_of_torchrl_counts_as_the_one_of_its_name(name):
    name = f"{name}WeightSyncScheme"
    theirs, kind = getattr(weight_update, name)(), getattr(ours, name)
    assert isinstance(theirs, kind) and isinstance(theirs, ours.WeightSyncScheme)
    for other in weight_update.__all__:
        if other.endswith("WeightSyncScheme"):
            expected = isinstance(theirs, getattr(weight_update, other))
            assert isinstance(theirs, getattr(ours, other)) == expected
    assert not isinstance(theirs, NativeScheme)
    assert isinstance(kind(), kind) and not isinstance(Probe(), kind)


def test_the_older_calls_register_by_hand_and_again():
    import multiprocessing

    sender = ours.SharedMemWeightSyncScheme(auto_register=False).create_sender()
    scheme = ours.SharedMemWeightSyncScheme()
    with ended(sender):
        here, there = multiprocessing.Pipe()
        sender.register_worker(0, here)
        with pytest.raises(LifecycleError, match="register_model"):
            sender.update_weights(weights(Probe(1.0)))
        sender.register_model(weights(Probe(1.0)))
        for value in (2.0, 3.0):
            # The second is in the place of the first, which has left.
            model, receiver = Probe(), scheme.create_receiver()
            receiver.register_model(model)
            receiver.register_worker_transport(there)
            assert receiver.receive(LONG)
            sender.update_weights(weights(Probe(value)), timeout=0.1)
            assert receiver.receive(LONG)
            assert model() == (value, value)
            receiver.shutdown()
            here, there = multiprocessing.Pipe()
            sender.register_worker(0, here)


def test_collector_state_dict_has_no_transient_buffers():
    class Transient(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.weight = nn.Parameter(torch.full((3,), value))
            self.register_buffer("scale", torch.ones(1), persistent=False)

    class Context:
        policy = Transient(0.0)

    source = Transient(2.0)
    with pytest.warns(UserWarning):
        strategy = WeightStrategy(extract_as="state_dict")
    _collector.apply_here(Context, "policy", source.state_dict(), strategy)
    assert Context.policy.weight.tolist() == [2.0] * 3


class Counting:
    versions = 0

    def increment_version(self):
        self.versions += 1


def test_version_during_a_forward_is_on_its_frame():
    collector, module, waiting = Counting(), Probe(), []
    # The hook that keeps the weights as they are is there first, and waits for a load.
    module.register_forward_pre_hook(
        lambda *_: waiting and _collector.bump_at_next_forward(collector, module, waiting.pop()),
        prepend=True,
    )
    _collector.bump_at_next_forward(collector, module, 2)
    waiting.append(3)
    module()
    assert collector.versions == 2


def test_versions_are_counted_on_the_policy_there_is():
    collector, before, module = Counting(), Probe(), Probe()
    _collector.bump_at_next_forward(collector, before, 2)
    before()
    _collector.bump_at_next_forward(collector, module, 3)
    before()
    assert collector.versions == 1
    module()
    assert collector.versions == 2


def test_a_version_gone_back_to_counts_once():
    collector, module = Counting(), Probe()
    for version in (2, 3, 2):
        _collector.bump_at_next_forward(collector, module, version)
    module()
    assert collector.versions == 1


def test_factory_per_worker_has_nothing_to_send_again():
    class Context:
        policy_factory = [lambda: Probe(1.0), lambda: Probe(2.0)]
        policy = None
        num_workers = 2

    context = Context()
    sender = KINDS[0]()
    sender.init_on_sender(model_id="policy", context=context)
    models = [Probe(), Probe()]
    receivers = [copied(sender) for _ in models]
    with ended(*receivers, sender):
        for worker, (receiver, model) in enumerate(zip(receivers, models, strict=True)):
            receiver.init_on_receiver(model_id="policy", model=model, worker_idx=worker)
        meet(sender, *receivers)
        assert [model() for model in models] == [(1.0, 1.0), (2.0, 2.0)]
        sender.send({0: weights(Probe(3.0)), 1: weights(Probe(4.0))})
        with pytest.raises(ModelError, match="factory"):
            sender.send()
        assert [model() for model in models] == [(3.0, 3.0), (4.0, 4.0)]


def test_worker_that_was_refused_joins_when_it_fits():
    """By the pipes of TorchRL's older senders and receivers."""
    scheme = ours.MultiProcessWeightSyncScheme()
    sender, receiver = scheme.create_sender(), scheme.create_receiver()
    ours_, theirs = multiprocessing.Pipe()
    source, wrong = nn.Linear(3, 2), nn.Linear(4, 2)
    sender.register_model(source)
    sender.register_worker(0, ours_)
    receiver.register_worker_transport(theirs)
    receiver.register_model(wrong)
    sending = threading.Thread(target=lambda: sender.update_weights(weights(source)))
    sending.start()
    try:
        with pytest.raises(WeightsyncError):
            receiver.receive(timeout=LONG)
        own = nn.Linear(3, 2)
        receiver.register_model(own)
        assert receiver.receive(timeout=LONG)
        assert torch.equal(own.weight, source.weight)
    finally:
        receiver.shutdown()
        sending.join()
        sender.shutdown()


def test_older_receive_ends_while_another_thread_receives():
    scheme = ours.MultiProcessWeightSyncScheme()
    sender, receiver = scheme.create_sender(), scheme.create_receiver()
    here, there = multiprocessing.Pipe()
    source = nn.Linear(3, 2)
    sender.register_model(source)
    sender.register_worker(0, here)
    receiver.register_worker_transport(there)
    receiver.register_model(nn.Linear(3, 2))
    with ended(receiver, sender):
        assert receiver.receive(LONG)
        got = []
        waiting = threading.Thread(target=lambda: got.append(receiver.receive(None)))
        waiting.start()
        while "in a call" not in repr(receiver._session):
            time.sleep(0.001)
        assert receiver.receive(0.1) is False and receiver.receive(0) is False
        sender.update_weights(weights(source))
        waiting.join()
        assert got == [True]
