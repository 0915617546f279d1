"""A source is read again for each send: its present state is sent, or refused."""

import threading

import pytest
import torch
import weightsync
from ends import LONG, bits, pair, pass_on
from tensordict import TensorDict
from torch import nn


class Policy(nn.Module):
    """Parts of every kind: a part in a part, no bias, a scalar, a complex buffer."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("phase", torch.tensor([1 + 2j, 3 - 4j]))

    @property
    def first(self):
        return self.body[0].weight


def _in_place(policy):
    with torch.no_grad():
        policy.first.mul_(3.0).add_(1.0)


def _part(policy):
    policy.body[0] = nn.Linear(3, 4)


def _parts(policy):
    policy.body = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False))


def _parameter(policy):
    policy.body[0].weight = nn.Parameter(torch.randn(4, 3))


def _memory(policy):
    policy.first.data = torch.randn(4, 3)


def _order(policy):
    policy.first.data = torch.randn(3, 4).t()


def _every_second(policy):
    policy.first.data = torch.randn(4, 6)[:, ::2]


def _negative(policy):
    policy.scale.data = torch.tensor(1 + 5j).conj().imag
    policy.first.data = torch.randn(4, 3, dtype=torch.complex64).conj().imag


def _conjugate(policy):
    policy.phase.data = torch.tensor([5 + 6j, 7 - 8j]).conj()


def _buffer(policy):
    policy.phase = torch.tensor([5 + 6j, 7 - 8j])


CHANGES = [
    _in_place,
    _part,
    _parts,
    _parameter,
    _memory,
    _order,
    _every_second,
    _negative,
    _conjugate,
    _buffer,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__[1:])
def test_send_follows_changes_of_a_module(change):
    policy = Policy()
    with pair(policy) as (sender, receiver):
        # Before it, after it, and when nothing has changed again.
        for step in (_in_place, change, _in_place, _in_place):
            step(policy)
            pass_on(sender, receiver)
            got = receiver.latest()
            for name, tensor in policy.state_dict().items():
                assert bits(got[name]) == bits(tensor.resolve_neg().resolve_conj()), name


def _tree():
    return {"body": {"weight": torch.randn(4, 3), "bias": torch.randn(4)}, "head": torch.randn(2)}


def _entry(tree):
    tree["head"] = torch.randn(2)


def _nested_entry(tree):
    tree["body"]["bias"] = torch.randn(4)


def _nested(tree):
    tree["body"] = type(tree)({"weight": torch.randn(4, 3), "bias": torch.randn(4)})


def _written(tree):
    tree["body"]["weight"].add_(1.0)


def _moved(tree):
    tree["head"].data = torch.randn(4)[::2]


@pytest.mark.parametrize("make", [dict, TensorDict], ids=["dict", "TensorDict"])
@pytest.mark.parametrize(
    "change", [_entry, _nested_entry, _nested, _written, _moved], ids=lambda one: one.__name__[1:]
)
def test_send_follows_changes_of_a_tree(change, make):
    tree = make(_tree())
    with pair(tree) as (sender, receiver):
        for step in (_written, change, _written, _written):
            step(tree)
            pass_on(sender, receiver)
            got = receiver.latest()
            for name in ("body.weight", "body.bias", "head"):
                part = tree
                for key in name.split("."):
                    part = part[key]
                assert bits(got[name]) == bits(part), name


def test_entries_that_a_tensordict_renames_are_found():
    tree = TensorDict(a=torch.zeros(2), b=torch.ones(2))
    with pair(tree) as (sender, receiver):
        pass_on(sender, receiver)
        tree.rename_key_("a", "c").rename_key_("b", "a").rename_key_("c", "b")
        pass_on(sender, receiver)
        got = receiver.latest()
        assert got["a"].tolist() == [1.0, 1.0] and got["b"].tolist() == [0.0, 0.0]


def _added(policy):
    policy.more = nn.Parameter(torch.zeros(1))


def _was_none(policy):
    policy.body[1].bias = nn.Parameter(torch.zeros(2))


def _other_dtype(policy):
    policy.first.data = torch.zeros(4, 3, dtype=torch.float64)


def _other_shape(policy):
    policy.first.data = torch.zeros(3, 4)


def _gone(policy):
    del policy.scale


@pytest.mark.parametrize(
    "change, named",
    [
        (_added, "more"),
        (_was_none, "body.1.bias"),
        (_other_dtype, "body.0.weight"),
        (_other_shape, "body.0.weight"),
        (_gone, "scale"),
    ],
    ids=lambda one: getattr(one, "__name__", "")[1:],
)
def test_send_names_tensors_that_no_longer_fit(change, named):
    policy = Policy()
    with pair(policy) as (sender, receiver):
        pass_on(sender, receiver)
        change(policy)
        with pytest.raises(weightsync.WrongWeightsError, match=named):
            sender.send(wait="sent")


@pytest.mark.parametrize(
    "change",
    [_part, _parameter, _memory, _order, _negative, _conjugate],
    ids=lambda one: one.__name__[1:],
)
@pytest.mark.parametrize("mode", ["bind", "copy"])
def test_changed_worker_module_is_loaded_as_it_is(change, mode):
    trainer, worker = Policy(), Policy()
    with pair(trainer, worker, mode=mode) as (sender, receiver):
        for step in (lambda _: None, change, lambda _: None):
            step(worker)
            _in_place(trainer)
            pass_on(sender, receiver)
            for name, tensor in trainer.state_dict().items():
                own = worker.state_dict()[name]
                assert bits(own.resolve_neg().resolve_conj()) == bits(tensor), name


def _receive_up_to(receiver, version):
    """The first receive may give the version that came with connect."""
    while receiver.receive(timeout=LONG).version < version:
        pass


@pytest.mark.parametrize("scheme", ["distributed:share=none,deltas=always", "multi-process"])
def test_report_says_how_much_a_delta_carried(scheme):
    weights = {"weight": torch.randn(64, 1024).bfloat16()}
    with pair(weights, setup={"scheme": scheme}) as (sender, receiver):
        for version in (2, 3):
            weights["weight"][:, ::64] *= 1.5
            background = threading.Thread(target=_receive_up_to, args=(receiver, version))
            background.start()
            report = sender.send(wait="applied", timeout=LONG)
            background.join()
        assert bits(receiver.latest()["weight"]) == bits(weights["weight"])
    if scheme == "multi-process":
        assert report.changed is None
        assert report.delta_bytes is None
        return
    assert report.changed == pytest.approx(1 / 64, rel=0.01)
    assert 0 < report.delta_bytes < report.bytes / 20
    assert "% changed" in str(report)
