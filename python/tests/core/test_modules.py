"""Modules without shapes, without memory, and with a state in addition to their tensors."""

import gc

import numpy as np
import pytest
import torch
import weightsync
from ends import LONG, MODES, Net, all_ended, meet, pair, pass_on
from torch import nn

ml_dtypes = pytest.importorskip("ml_dtypes")


def _filled(module, value):
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.fill_(value)
    return module


def _deep():
    return nn.Sequential(nn.Linear(300, 200), nn.BatchNorm1d(200), nn.Linear(200, 2))


def _lazy():
    return nn.Sequential(nn.LazyLinear(200), nn.LazyBatchNorm1d(), nn.LazyLinear(2))


def _meta():
    with torch.device("meta"):
        return _deep()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strategy", ["state_dict", "tensordict"])
@pytest.mark.parametrize("make", [_lazy, _meta])
def test_a_module_without_shapes_takes_the_senders(make, strategy, mode):
    trainer, worker = _filled(_deep(), 0.5), make()
    with pair(trainer, worker, mode=mode, setup={"strategy": strategy}) as (sender, receiver):
        for value in (0.5, 0.25):
            for one, other in zip(trainer.parameters(), worker.parameters(), strict=True):
                assert torch.equal(one, other)
            _filled(trainer, value / 2)
            pass_on(sender, receiver)
        trainer.eval(), worker.eval()
        given = torch.rand(3, 300)
        assert torch.equal(trainer(given), worker(given))


def test_a_meta_module_keeps_its_ties_and_its_buffers():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Parameter(torch.ones(100, 200), requires_grad=False)
            self.two = self.one
            self.register_buffer("cache", torch.zeros(3), persistent=False)

    with torch.device("meta"):
        worker = Tied()
    # A state dict has no such buffer: the worker's would be whatever memory holds.
    with pytest.raises(weightsync.WeightsyncError, match="cache"), pair(Tied(), worker):
        pass
    with torch.device("meta"):
        worker = Tied()
    with pair(Tied(), worker, setup={"strategy": "tensordict"}):
        assert worker.one is worker.two
        assert not worker.one.requires_grad
        assert worker.cache.shape == (3,)
        assert worker.cache.device.type == "cpu"
        assert worker.one.unique().tolist() == [1.0]


def test_a_meta_buffer_follows_its_other_name():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cache", torch.ones(3), persistent=False)
            self.register_buffer("table", self.cache)

    with torch.device("meta"):
        worker = Tied()
    # A state dict has only one of the names.
    with pair(Tied(), worker):
        assert worker.cache is worker.table
        assert worker.cache.tolist() == [1.0] * 3


class Stateful(nn.Module):
    """A module with a state of its own."""

    def __init__(self, state):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.state = state

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


STATES = {
    "plain": {"steps": 3, "rate": 0.5, "name": "adam", "on": True, "none": None, "list": [1, [2]]},
    "a number": 7,
    "numbers at the edge": [2**64 - 1, -(2**63), 5e-324, float("inf"), -0.0],
    "text": "zażółć \N{SNOWMAN} \0 end",
    "a tensor": torch.arange(5),
    "tensors, nested": {"m": [torch.ones(2), {"v": torch.zeros(2, 2).bfloat16()}], "step": 4},
    "arrays": {"mean": np.arange(4.0), "low": np.arange(3).astype(ml_dtypes.bfloat16)},
    "nothing": None,
    "empty": {},
}


def _same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and (one == other).all()
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other and type(one) is type(other)


@pytest.mark.parametrize("state", STATES)
def test_extra_state_travels(state):
    trainer = nn.ModuleDict({"inner": Stateful(STATES[state])})
    worker = nn.ModuleDict({"inner": Stateful("none yet")})
    with pair(trainer, worker) as (sender, receiver):
        assert _same(STATES[state], worker["inner"].state)
        worker["inner"].state = "overwritten"
        with torch.no_grad():
            trainer["inner"].weight.fill_(2.0)
        pass_on(sender, receiver)
        assert _same(STATES[state], worker["inner"].state)
        assert worker["inner"].weight.tolist() == [2.0] * 3


@pytest.mark.parametrize("state", STATES)
def test_extra_state_reaches_a_dict(state):
    into = {}
    with pair(nn.ModuleDict({"inner": Stateful(STATES[state])}), into):
        assert _same(STATES[state], into["inner._extra_state"])
    # And goes on from there.
    worker = nn.ModuleDict({"inner": Stateful("none yet")})
    with pair(into, worker):
        assert _same(STATES[state], worker["inner"].state)


def loaded(weights):
    """The state of a module that has loaded a state dict."""
    module = nn.ModuleDict({"inner": Stateful("none yet")})
    module.load_state_dict(weights)
    return module["inner"].state


@pytest.mark.parametrize("kind", ["empty", "its own state dict"])
def test_extra_state_survives_load_state_dict_of_a_dict(kind, tmp_path):
    """Whatever has loaded a version into a dict."""

    def made():
        return {} if kind == "empty" else nn.ModuleDict({"inner": Stateful("old")}).state_dict()

    trainer, into = nn.ModuleDict({"inner": Stateful(STATES["a tensor"])}), made()
    with pair(trainer, into) as (sender, receiver):
        assert _same(loaded(into), STATES["a tensor"])
        trainer["inner"].state = torch.arange(5) + 1
        pass_on(sender, receiver)
        assert _same(loaded(into), torch.arange(5) + 1)
        assert len(into) == 2
        others = [made(), made()]
        sender.snapshot().load_into(others[0])
    with weightsync.Store(tmp_path) as store:
        store.save(trainer)
        store.load_into(others[1])
    for other in others:
        assert _same(loaded(other), torch.arange(5) + 1) and len(other) == 2


@pytest.mark.parametrize("state", STATES)
def test_extra_state_survives_load_state_dict_of_a_snapshot(state):
    trainer = nn.ModuleDict({"inner": Stateful(STATES[state])})
    with pair(trainer) as (sender, receiver):
        snapshot = receiver.latest()
        assert list(snapshot) == ["inner.weight", "inner._extra_state"] and len(snapshot) == 2
        for weights in (snapshot, dict(snapshot), snapshot.tensors()):
            assert _same(loaded(weights), STATES[state])
        assert _same(snapshot.numpy()["inner._extra_state"], STATES[state])
        # Two that have loaded one snapshot share nothing.
        if isinstance(STATES[state], dict):
            assert loaded(snapshot) is not loaded(snapshot)
        with pytest.raises(weightsync.errors.MissingTensorError, match="inner.__extra_state__"):
            snapshot["inner.__extra_state__"]
        # It is a source as any state dict.
        sender.send(dict(snapshot), wait="sent")
        assert _same(loaded(receiver.receive(30)), STATES[state])


def test_extra_state_goes_where_the_dict_has_it():
    trainer = nn.ModuleDict({"inner": Stateful({"step": 3})})
    nested = {"inner": {"weight": torch.zeros(3), "__extra_state__": "old"}}
    without = {"inner": {"weight": torch.zeros(3)}}
    for into in (nested, without):
        with pair(trainer, into):
            pass
    assert nested["inner"]["__extra_state__"] == {"step": 3} and len(nested["inner"]) == 2
    assert without["inner"]["_extra_state"] == {"step": 3}


def test_extra_state_goes_into_a_tensordict():
    # The oldest torch is tested without TensorDict.
    tensordict = pytest.importorskip("tensordict")
    into = tensordict.TensorDict({"inner": {"weight": torch.zeros(3)}})
    with pair(nn.ModuleDict({"inner": Stateful({"step": 3})}), into):
        assert into["inner", "__extra_state__", "step"] == 3


def test_extra_state_may_change_and_grow_into_its_room():
    trainer, worker = Stateful({"step": 1}), Stateful(None)
    with pair(trainer, worker) as (sender, receiver):
        trainer.state = {"step": 2, "and": ["more"]}
        pass_on(sender, receiver)
        assert worker.state == {"step": 2, "and": ["more"]}


def test_outgrown_extra_state_is_named_and_not_sent():
    trainer, worker = nn.ModuleDict({"inner": Stateful({"step": 1})}), None
    with pair(trainer, worker) as (sender, receiver):
        assert receiver.receive(30).version == 1
        trainer["inner"].state = {"text": "x" * 100_000}
        with pytest.raises(weightsync.WrongWeightsError, match="inner.*its room has"):
            sender.send(wait="sent")
        assert receiver.receive(0) is None
        trainer["inner"].state = {"step": 2}
        assert pass_on(sender, receiver).version == 2


@pytest.mark.parametrize(
    "state", [{"f": print}, {"key": {3: 1}}, {1, 2}, b"bytes", 2**64, object()],
    ids=["function", "key", "set", "bytes", "large", "object"],
)
def test_extra_state_that_is_no_data_is_refused(state):
    with pytest.raises((TypeError, OverflowError, ValueError), match="extra.state"):
        weightsync.Sender(nn.ModuleDict({"inner": Stateful(state)}))


def test_extra_state_reaches_a_module_and_a_dict():
    trainer = nn.ModuleDict({"inner": Stateful({"step": 3, "at": torch.ones(2)})})
    worker, into = nn.ModuleDict({"inner": Stateful(None)}), {}
    sender = weightsync.Sender(trainer.state_dict())
    one = weightsync.ModelReceiver(sender.init_info, 0, model=worker)
    other = weightsync.ModelReceiver(sender.init_info, 1, model=into)
    with all_ended(sender, one, other):
        meet(sender, one, other)
        assert _same(worker["inner"].state, {"step": 3, "at": torch.ones(2)})
        assert _same(into["inner._extra_state"], {"step": 3, "at": torch.ones(2)})


def test_module_with_changed_parts_is_loaded_as_it_is():
    worker = Net()
    with pair(Net(1.0), worker) as (sender, receiver):
        worker.register_buffer("own", torch.zeros(2), persistent=False)
        pass_on(sender, receiver)
        assert worker.value == 1.0
        worker.more = nn.Parameter(torch.zeros(2))
        sender.send(wait="sent")
        with pytest.raises(weightsync.WeightsyncError, match="more"):
            receiver.receive(30)
        del worker.more
        pass_on(sender, receiver)
        assert worker.value == 1.0


def test_a_part_that_was_replaced_is_what_counts():
    trainer, worker = nn.ModuleDict({"net": Net(1.0)}), nn.ModuleDict({"net": Net()})
    with pair(trainer, worker) as (sender, receiver):
        pass_on(sender, receiver)
        trainer["net"] = Net(2.0)
        pass_on(sender, receiver)
        assert worker["net"].value == 2.0
        old, worker["net"] = worker["net"], Net()
        trainer["net"].fill(3.0)
        pass_on(sender, receiver)
        assert (worker["net"].value, old.value) == (3.0, 2.0)


def test_a_module_that_is_gone_is_said_to_be():
    sender = weightsync.Sender(Net(1.0))
    receiver = weightsync.ModelReceiver(sender.init_info, model=Net())
    with all_ended(sender, receiver):
        meet(sender, receiver)
        # It is kept as long as its receiver, so somebody has to take it away.
        receiver._kept = None
        gc.collect()
        sender.send(wait="sent")
        with pytest.raises(weightsync.LoadError, match="freed"):
            receiver.receive(30)


def _to_half(module):
    module.to(torch.float16)


def _to_strided_memory(module):
    module.large.data = torch.zeros(2 * module.large.numel())[::2]
    module.small.data = torch.zeros(9)[::3]


def _to_other_memory(module):
    module.large.data = torch.zeros_like(module.large)
    module.small.data = torch.zeros(3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", [_to_half, _to_strided_memory, _to_other_memory])
def test_replaced_module_memory_is_found_again(change, mode):
    trainer, worker = Net(1.0), Net()
    with pair(trainer, worker, mode=mode) as (sender, receiver):
        pass_on(sender, receiver)
        change(worker)
        trainer.fill(2.0)
        sender.send(wait="sent")
        if change is _to_half:
            # What a worker casts to is said at setup; here it does not fit any more.
            with pytest.raises(weightsync.WrongWeightsError, match="(?s)large.*F16"):
                receiver.receive(30)
            return
        receiver.receive(30)
        assert worker.value == 2.0


class Untied(nn.Module):
    """Two parameters, which a worker may have as one."""

    def __init__(self, one, other, numel=32 * 1024):
        super().__init__()
        self.one = nn.Parameter(torch.full((numel,), float(one)))
        self.other = nn.Parameter(torch.full((numel,), float(other)))

    def tied(self, how):
        if how == "one object":
            self.other = self.one
        else:
            self.other = nn.Parameter(self.one.detach())
        return self


@pytest.mark.parametrize("how", ["one object", "one memory"])
@pytest.mark.parametrize("numel", [3, 32 * 1024])
def test_equal_untied_weights_load_into_a_tied_worker(numel, how):
    trainer, worker = Untied(1, 1, numel), Untied(0, 0, numel).tied(how)
    with pair(trainer, worker, mode="copy") as (sender, receiver):
        assert worker.one[0] == worker.other[0] == 1.0
        with torch.no_grad():
            trainer.one.fill_(2.0)
        sender.send(wait="sent")
        with pytest.raises(weightsync.LoadError, match="'one' and 'other' are tied here|share memory here"):
            receiver.receive(30)
        assert worker.one[0] == worker.other[0] == 1.0
        with torch.no_grad():
            trainer.other.fill_(2.0)
        pass_on(sender, receiver)
        assert worker.one[-1] == worker.other[-1] == 2.0


def test_equal_untied_weights_bind_to_a_tied_worker():
    worker = Untied(0, 0).tied("one object")
    with pair(Untied(1, 1), worker):
        assert worker.one is worker.other and worker.one[0] == 1.0
    # The worker's own error, or the trainer's that names the worker: which one is first.
    with pytest.raises(weightsync.WeightsyncError, match="tie them in the trainer too"):
        with pair(Untied(1, 2), Untied(0, 0).tied("one object")):
            pass


def test_equal_untied_weights_load_into_a_tied_dict():
    into = Untied(0, 0).tied("one object").state_dict()
    with pair(Untied(1, 1), into) as (sender, receiver):
        assert into["other"][0] == 1.0
        sender.send(Untied(1, 2).state_dict(), wait="sent")
        with pytest.raises(weightsync.LoadError, match="tied here|share memory here"):
            receiver.receive(30)


def test_tied_weights_reach_an_untied_worker():
    worker = Untied(0, 0)
    with pair(Untied(1, 2).tied("one object"), worker):
        assert worker.one[0] == worker.other[0] == 1.0


class Added(nn.Module):
    """A tensor that the state dict has, and no parameter or buffer is."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.scale = torch.ones(2)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scale"] = self.scale


def _renaming(module, state, prefix, _):
    for name in [name for name in state if name.startswith(prefix + "inner.")]:
        state[prefix + "outer." + name.removeprefix(prefix + "inner.")] = state.pop(name)


@pytest.mark.parametrize("strategy", ["state_dict", "tensordict"])
def test_sender_refuses_unsent_state_dict_entries(strategy):
    with pytest.raises(weightsync.SendError, match=r"state dict of Added has 'scale'"):
        weightsync.Sender(Added(), strategy=strategy)
    with pytest.raises(weightsync.SendError, match=r"'0\.scale'"):
        weightsync.Sender(nn.Sequential(Added()), strategy=strategy)
    # Its state dict can be sent.
    into = {}
    with pair(Added().state_dict(), into):
        assert into["scale"].tolist() == [1.0, 1.0]


@pytest.mark.filterwarnings("ignore")
def test_a_quantised_module_is_refused_by_name():
    quantised = torch.ao.quantization.quantize_dynamic(_deep(), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(weightsync.SendError, match=r"'0\.scale', '0\.zero_point'"):
        weightsync.Sender(quantised)


def test_a_state_dict_with_names_of_its_own_is_no_loss():
    trainer, worker = Net(1.0), Net()
    for one in (trainer, worker):
        one.register_state_dict_post_hook(_renaming)
    trainer.inner, worker.inner = nn.Linear(2, 2), nn.Linear(2, 2)
    with pair(trainer, worker):
        assert "outer.weight" in trainer.state_dict()
        assert torch.equal(trainer.inner.weight, worker.inner.weight)


@pytest.mark.parametrize(
    "nothing", [nn.ReLU(), {}, {"a": torch.zeros(0)}], ids=["module", "dict", "tensor"]
)
def test_weights_of_no_bytes_are_refused(nothing):
    with pytest.raises(weightsync.SendError, match="nothing to send"):
        weightsync.Sender(nothing)


@pytest.mark.parametrize("mode", MODES)
def test_weights_received_in_inference_mode_train(mode):
    trainer, worker = Net(1.0), Net()
    sender = weightsync.Sender(trainer)
    receiver = weightsync.ModelReceiver(sender.init_info, model=worker, mode=mode)
    with all_ended(sender, receiver):
        with torch.inference_mode():
            meet(sender, receiver)
            sender.send(trainer.fill(2.0), wait="sent")
            assert receiver.receive(30) == 2
        assert not any(one.is_inference() for one in worker.parameters())
        (worker.large.sum() + 2 * worker.small.sum()).backward()
        assert worker.large.grad.unique().tolist() == [1.0]
        assert worker.small.grad.unique().tolist() == [2.0]
        worker.zero_grad()
        with torch.inference_mode():
            receiver.shutdown()
        worker.large.sum().backward()
        assert worker.large.grad.unique().tolist() == [1.0]


@pytest.mark.parametrize("make", [_lazy, _meta])
def test_lazy_module_shaped_in_inference_mode_trains(make):
    trainer, worker = _filled(_deep(), 0.5), make()
    sender = weightsync.Sender(trainer)
    receiver = weightsync.ModelReceiver(sender.init_info, model=worker)
    with all_ended(sender, receiver):
        with torch.inference_mode():
            meet(sender, receiver)
        worker(torch.rand(3, 300)).sum().backward()
        assert all(one.grad is not None for one in worker.parameters())


@pytest.mark.parametrize("mode", MODES)
def test_a_module_made_in_inference_mode_is_loaded(mode):
    with torch.inference_mode():
        worker = Net()
    trainer = Net(1.0)
    with pair(trainer, worker, mode=mode) as (sender, receiver):
        trainer.fill(2.0)
        pass_on(sender, receiver)
        assert worker.value == 2.0
        assert all(one.is_inference() for one in worker.parameters())


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_module_with_a_scripted_part_is_loaded():
    def model(value):
        net = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(value)
        return net

    trainer, worker = model(1.0), model(0.0)
    with pair(trainer, worker) as (sender, receiver):
        background = receiver.start_background()
        with torch.no_grad():
            trainer[1].weight.fill_(3.0)
        report = sender.send(timeout=LONG)
        assert report.all_applied, report
        assert background.version == 2
        assert [one.flatten()[0].item() for one in worker.parameters()] == [1.0, 1.0, 3.0, 1.0]
        assert worker(torch.ones(1, 4))[0, 0].item() == 61.0
