"""Mappings on either side: one model in the trainer, another form of it in the worker."""

import copy
import pickle

from patience import patience
import numpy as np
import pytest
import torch
import weightsync
from ends import all_ended, beside, meet, pair, pass_on
from torch import nn
from weightsync import Mapping

PARTS = ["q", "k", "v"]


class Trainer(nn.Module):
    """Separate parts, in float32, with a matrix the other way round."""

    def __init__(self):
        super().__init__()
        layer = {part: nn.Linear(6, 4, bias=False) for part in PARTS}
        layer["down"] = nn.Linear(4, 6)
        self.layers = nn.ModuleList([nn.ModuleDict(copy.deepcopy(layer)) for _ in range(2)])
        self.gate_up = nn.Parameter(torch.randn(10, 3))
        self.steps = nn.Parameter(torch.tensor([3]), requires_grad=False)
        self.head = nn.Linear(3, 2)


class Worker(nn.Module):
    """One tensor for q, k and v; the gate alone; all of it in bfloat16."""

    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        layers = []
        for _ in range(2):
            layer = nn.Module()
            layer.qkv = nn.Linear(6, 12, bias=False, dtype=torch.bfloat16)
            layer.down_t = nn.Parameter(torch.zeros(4, 6, dtype=torch.bfloat16))
            layer.down_bias = nn.Parameter(torch.zeros(6, dtype=torch.bfloat16))
            layers.append(layer)
        self.model.layers = nn.ModuleList(layers)
        self.gate = nn.Parameter(torch.zeros(4, 3, dtype=torch.bfloat16))
        self.up = nn.Parameter(torch.zeros(6, 3, dtype=torch.bfloat16))
        self.steps = nn.Parameter(torch.tensor([0]), requires_grad=False)

    def is_of(self, trainer):
        """Asserts that every tensor is what the mapping makes of the trainer's."""
        expected = {
            "gate": trainer.gate_up[:4],
            "up": trainer.gate_up[4:],
            "steps": trainer.steps,
        }
        for at, layer in enumerate(trainer.layers):
            expected[f"model.layers.{at}.qkv.weight"] = torch.cat(
                [layer[part].weight for part in PARTS]
            )
            expected[f"model.layers.{at}.down_t"] = layer["down"].weight.T
            expected[f"model.layers.{at}.down_bias"] = layer["down"].bias
        own = self.state_dict()
        assert own.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(own[name], tensor.detach().to(own[name].dtype)), name


def _mapping():
    return (
        Mapping()
        .rename("layers.*", "model.layers.*")
        .fuse(
            [f"model.layers.*.{part}.weight" for part in PARTS],
            into="model.layers.*.qkv.weight",
        )
        .transpose("model.layers.*.down.weight")
        .rename("model.layers.*.down.weight", "model.layers.*.down_t")
        .rename("model.layers.*.down.bias", "model.layers.*.down_bias")
        .split("gate_up", {"gate": 4, "up": 6})
        .drop("head.*")
        .cast("*", torch.bfloat16)
    )


def _changed(trainer):
    with torch.no_grad():
        for tensor in trainer.parameters():
            tensor.add_(1)


def _both(side, **how):
    """A sender of a trainer's model and a receiver of a worker's, with the mapping at one."""
    trainer, worker = Trainer(), Worker()
    at = {"setup": how, "mapping": _mapping()} if side == "worker" else {
        "setup": {"mapping": _mapping(), **how}
    }
    return trainer, worker, pair(trainer, worker, **at)


@pytest.mark.parametrize("scheme", ["shared-mem", "multi-process:own-copy", "rpc:initial=connect"])
@pytest.mark.parametrize("side", ["trainer", "worker"])
def test_a_mapping_makes_the_workers_form(side, scheme):
    trainer, worker, ends = _both(side, scheme=scheme)
    with ends as (sender, receiver):
        worker.is_of(trainer)
        for _ in range(3):
            _changed(trainer)
            assert pass_on(sender, receiver) == receiver.version
            worker.is_of(trainer)


@pytest.mark.parametrize("side", ["trainer", "worker"])
def test_a_mapping_works_in_the_background(side):
    trainer, worker, ends = _both(side)
    with ends as (sender, receiver):
        with receiver.start_background() as background:
            worker.is_of(trainer)
        _changed(trainer)
        assert sender.send(timeout=patience(15)).all_applied
        with background:
            worker.is_of(trainer)


def test_a_mapping_takes_what_is_given_to_send():
    trainer, worker, ends = _both("trainer")
    with ends as (sender, receiver):
        _changed(trainer)
        # In another order, and as numpy arrays.
        given = {name: one.numpy() for name, one in reversed(trainer.state_dict().items())}
        pass_on(sender, receiver, weights=given)
        worker.is_of(trainer)
        with torch.no_grad():
            trainer.gate_up.fill_(7)
        assert pass_on(sender, receiver, weights={"gate_up": trainer.gate_up}, partial=True)
        worker.is_of(trainer)
        with pytest.raises(weightsync.WrongWeightsError, match=r"qkv\.weight.*lacks.*k\.weight"):
            sender.send({"layers.0.q.weight": trainer.layers[0]["q"].weight}, partial=True)
        for_each = sender.send_each({0: trainer}, wait="sent")
        assert for_each.version == receiver.receive(timeout=patience(15))


@pytest.mark.parametrize("side", ["trainer", "worker"])
def test_a_mapping_that_does_not_fit_names_it_all(side):
    trainer, worker = Trainer(), Worker()
    mapping = Mapping().rename("layers.*", "model.layers.*").transpose("gate_up", [2, 1, 0])
    if side == "trainer":
        with pytest.raises(weightsync.WrongWeightsError, match=r"rule 2.*gate_up.*\[10, 3\]"):
            weightsync.Sender(trainer, mapping=mapping)
        return
    sender = weightsync.Sender(trainer)
    receiver = weightsync.ModelReceiver(sender.init_info, 0, model=worker, mapping=mapping)
    with all_ended(sender, receiver), pytest.raises(weightsync.WrongWeightsError, match="rule 2"):
        meet(sender, receiver)


def test_a_mapping_that_leads_elsewhere_names_it_all():
    trainer, worker = Trainer(), Worker()
    mapping = Mapping().rename("layers.*", "model.layers.*")
    sender = weightsync.Sender(trainer)
    receiver = weightsync.ModelReceiver(sender.init_info, 0, model=worker, mapping=mapping)
    said = []

    def join():
        with pytest.raises(weightsync.WrongWeightsError) as raised:
            receiver.connect(timeout=patience(15))
        said.append(str(raised.value))

    with all_ended(sender, receiver):
        with beside(join), pytest.raises(weightsync.WrongWeightsError, match="worker 0"):
            sender.connect(timeout=patience(15))
    (words,) = said
    for name in ["head.weight", "model.layers.1.qkv.weight", "gate_up", '"up"']:
        assert name in words, words


def test_a_dry_run_lists_every_unmatched_name():
    trainer, worker = Trainer(), Worker()
    run = _mapping().dry_run(trainer, worker)
    assert run.is_complete, str(run)
    assert not run.unmatched and not run.missing
    by_name = {outcome.name: outcome for outcome in run.tensors}
    assert by_name["layers.1.k.weight"].becomes == ["model.layers.1.qkv.weight"]
    assert by_name["layers.1.k.weight"].rules == [1, 2, 8]
    assert by_name["gate_up"].becomes == ["gate", "up"]
    assert by_name["head.bias"].becomes == []

    wrong = Mapping().rename("layers.*", "model.layers.*").drop("nothing.*").cast("*", "F16")
    run = wrong.dry_run(trainer, worker)
    assert not run.is_complete
    assert set(run.unmatched) == {
        "gate_up",
        "head.weight",
        "head.bias",
        *(f"model.layers.{at}.{part}.weight" for at in range(2) for part in PARTS),
        *(f"model.layers.{at}.down.{kind}" for at in range(2) for kind in ["weight", "bias"]),
    }
    assert set(run.missing) == {name for name in worker.state_dict() if name != "steps"}
    assert run.unused == [(2, "drop nothing.*")]
    assert "no place" in str(run) and "not complete" in str(run)

    run = Mapping().cast("a", "F16").dry_run(
        {"a": torch.zeros(2, 3)}, {"a": torch.zeros(3, 2, dtype=torch.bfloat16)}
    )
    assert run.shapes == [("a", [3, 2], [2, 3])]
    assert run.dtypes == [("a", "BF16", "F16")]


def test_a_dry_run_takes_what_has_shapes():
    trainer, worker = Trainer(), Worker()
    sources = [trainer, trainer.state_dict(), {k: v.numpy() for k, v in trainer.state_dict().items()}]
    with torch.device("meta"):
        sources.append(Trainer())
    with pair(trainer) as (_, receiver):
        sources.append(receiver.latest())
        for source in sources:
            assert _mapping().dry_run(source, worker).is_complete


def test_snapshot_is_mapped_alone():
    trainer, worker = Trainer(), Worker()
    with pair(trainer) as (_, receiver):
        snapshot = receiver.latest()
        made = snapshot.mapped(_mapping())
        assert made.version == snapshot.version
        assert made["gate"].dtype == torch.bfloat16
        made.load_into(worker)
        worker.is_of(trainer)
        with pytest.raises(weightsync.WrongWeightsError, match="rule 1"):
            snapshot.mapped(Mapping().split("gate_up", {"gate": 4, "up": 7}))


def test_ties_and_extra_state_go_through_a_mapping():
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(300, 200, bias=False)
            self.two = nn.Linear(300, 200, bias=False)
            self.two.weight = self.one.weight
            self.state = {"steps": 0}

        def get_extra_state(self):
            return self.state

        def set_extra_state(self, state):
            self.state = state

    trainer, mapping = nn.ModuleDict({"actor": Part()}), Mapping().rename("actor.*", "policy.*")
    trainer["actor"].state = {"steps": 3, "mean": torch.ones(4)}
    for side in ["trainer", "worker"]:
        worker = nn.ModuleDict({"policy": Part()})
        at = {"setup": {"mapping": mapping}} if side == "trainer" else {"mapping": mapping}
        with pair(trainer, worker, **at) as (sender, receiver):
            for _ in range(2):
                assert torch.equal(worker["policy"].two.weight, trainer["actor"].one.weight)
                assert worker["policy"].state["steps"] == 3
                assert torch.equal(worker["policy"].state["mean"], torch.ones(4))
                pass_on(sender, receiver)


def test_a_mapping_is_of_one_model_of_several():
    models = {"actor": nn.Linear(3, 2), "critic": nn.Linear(3, 1)}
    own = {"actor": {"w": torch.zeros(2, 3), "bias": torch.zeros(2)}, "critic": nn.Linear(3, 1)}
    mapping = {"actor": Mapping().rename("weight", "w")}
    for at in ["trainer", "worker"]:
        sides = ({"mapping": mapping}, {}) if at == "trainer" else ({}, {"mapping": mapping})
        sender = weightsync.Sender(models=models, **sides[0])
        receiver = weightsync.ModelReceiver(sender.init_info, 0, models=own, **sides[1])
        with all_ended(sender, receiver):
            meet(sender, receiver)
            assert torch.equal(own["actor"]["w"], models["actor"].weight)
            assert torch.equal(own["critic"].weight, models["critic"].weight)


def test_mapping_of_another_type_is_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(weightsync.WrongTypeError, match="weightsync.Mapping.*'weight'"):
        weightsync.Sender(model, mapping={"weight": "w"})
    with pytest.raises(weightsync.ModelError, match="'critic'.*policy"):
        weightsync.Sender(model, mapping={"critic": Mapping()})
    for wrong, words in [
        (lambda: Mapping().rename("a.*.*", "b"), r"a\.\*\.\*.*more than one star"),
        (lambda: Mapping().rename("a", "b.*"), "nothing to stand for"),
        (lambda: Mapping().cast("*", torch.int8), "F64, F32, F16 or BF16"),
        (lambda: Mapping().cast("*", "bfloat61"), "bfloat61.*\"bfloat16\""),
        (lambda: Mapping().transpose("a", [0, 0]), "each dimension once"),
        (lambda: Mapping().fuse([], into="a"), "no parts"),
    ]:
        with pytest.raises(weightsync.WeightsyncError, match=words):
            wrong()
    with pair(model) as (sender, _):
        info = sender.init_info
        with pytest.raises(weightsync.WrongTypeError, match="mapping: .*ModelReceiver"):
            weightsync.Receiver(info, 1, mapping=Mapping())


def test_a_mapping_is_a_value():
    mapping = _mapping()
    assert pickle.loads(pickle.dumps(mapping)) == mapping
    assert copy.deepcopy(mapping) == mapping
    assert mapping != mapping.drop("more")
    assert hash(mapping) == hash(_mapping())
    assert mapping.rules[0] == "rename layers.* to model.layers.*"
    assert "rename layers.*" in repr(mapping)
    assert Mapping().cast("*", np.float16) == Mapping().cast("*", "F16")
    assert Mapping().cast("*", "bfloat16") == Mapping().cast("*", torch.bfloat16)
