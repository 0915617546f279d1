"""What a trainer can send, and that a worker has the same, bit by bit."""

import gc
import weakref

from patience import patience
import numpy as np
import pytest
import torch
import weightsync
from ends import LONG, MODES, Net, all_ended, beside, bits, meet, pair, pass_on
from tensordict import TensorDict
from torch import nn
from weightsync._source import Streamed

ml_dtypes = pytest.importorskip("ml_dtypes")
# What torch says of kinds that are refused here.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse", "ignore:torch.quantize")


def _weights():
    return {
        "body": {"weight": torch.arange(24.0).reshape(4, 6), "bias": torch.arange(4)},
        "head": torch.tensor(2.5),
    }


# Elements of a tensor that takes several threads' time to copy.
LARGE = 32 * 1024

FLAT = {"body.weight", "body.bias", "head"}

TREES = {
    "nested dict": _weights,
    "dotted names": lambda: {
        "body.weight": _weights()["body"]["weight"],
        "body.bias": _weights()["body"]["bias"],
        "head": _weights()["head"],
    },
    "tuple keys": lambda: {
        ("body", "weight"): _weights()["body"]["weight"],
        ("body", "bias"): _weights()["body"]["bias"],
        "head": _weights()["head"],
    },
    "nested TensorDict": lambda: TensorDict(_weights()),
    "flat TensorDict": lambda: TensorDict(_weights()).flatten_keys("."),
    "numpy": lambda: {
        "body": {name: value.numpy() for name, value in _weights()["body"].items()},
        "head": _weights()["head"].numpy(),
    },
    "TensorDict in a dict": lambda: {
        "body": TensorDict(_weights()["body"]),
        "head": _weights()["head"],
    },
}


@pytest.mark.parametrize("strategy", ["state_dict", "tensordict"])
@pytest.mark.parametrize("source", TREES)
def test_every_kind_of_tree_arrives(source, strategy):
    with pair(TREES[source](), setup={"strategy": strategy}) as (_, receiver):
        got = receiver.latest()
        assert set(got) == FLAT
        for name in FLAT:
            part = _weights()
            for key in name.split("."):
                part = part[key]
            assert bits(got[name]) == bits(part)
            assert got[name].shape == part.shape
        del got


@pytest.mark.parametrize("target", TREES)
@pytest.mark.parametrize("source", TREES)
def test_any_tree_goes_into_any_other(source, target):
    into = TREES[target]()
    _zero(into)
    with pair(TREES[source](), into):
        pass
    got, _ = _flat(into), None
    wanted = _flat(_weights())
    assert {name: bits(value) for name, value in got.items()} == {
        name: bits(value) for name, value in wanted.items()
    }


def _flat(tree, prefix=""):
    found = {}
    for key, value in tree.items():
        key = ".".join(key) if isinstance(key, tuple) else key
        if hasattr(value, "items"):
            found.update(_flat(value, f"{prefix}{key}."))
        else:
            found[prefix + key] = value
    return found


def _zero(tree):
    for value in _flat(tree).values():
        value[...] = 0


def test_an_empty_dict_takes_what_comes():
    into = {}
    with pair(_weights(), into):
        assert {name: bits(value) for name, value in into.items()} == {
            name: bits(value) for name, value in _flat(_weights()).items()
        }


class Everything(nn.Module):
    """Nested modules, buffers of both kinds, tied weights, scalars and nothing at all."""

    def __init__(self, fill):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(200, 200), nn.BatchNorm1d(200))
        self.encode = nn.Embedding(300, 64)
        self.decode = nn.Linear(64, 300, bias=False)
        self.decode.weight = self.encode.weight
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.none = nn.Parameter(torch.empty(0, 7))
        self.register_parameter("absent", None)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("cache", torch.ones(4), persistent=False)
        with torch.no_grad():
            for tensor in (*self.parameters(), *self.buffers()):
                if tensor.is_floating_point():
                    tensor.fill_(fill)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strategy", ["state_dict", "tensordict"])
def test_a_module_arrives_with_its_buffers(strategy, mode):
    trainer, worker = Everything(1.0), Everything(0.0)
    worker.mask.logical_not_()
    with pair(trainer, worker, mode=mode, setup={"strategy": strategy}) as (sender, receiver):
        for value in (1.0, 2.0):
            with torch.no_grad():
                for tensor in trainer.parameters():
                    tensor.fill_(value)
                trainer.cache.fill_(value)
            trainer.body[1].num_batches_tracked += 1
            assert pass_on(sender, receiver) == sender.version
            theirs, ours = trainer.state_dict(), worker.state_dict()
            assert {name: bits(one) for name, one in ours.items()} == {
                name: bits(one) for name, one in theirs.items()
            }
            # A state dict leaves out the buffer that is not persistent.
            cached = value if strategy == "tensordict" else 0.0
            assert worker.cache.tolist() == [cached] * 4
            assert worker.decode.weight is worker.encode.weight


@pytest.mark.parametrize("strategy", ["state_dict", "tensordict"])
@pytest.mark.parametrize(
    "view", [nn.Module.state_dict, TensorDict.from_module, lambda module: dict(_places(module))]
)
def test_state_dict_and_tensordict_load_into_a_module(view, strategy):
    trainer, worker = Net(3.0), Net()
    with pair(view(trainer), worker, setup={"strategy": strategy}) as (sender, receiver):
        assert worker.value == 3.0
        trainer.fill(4.0)
        sender.send(view(trainer), wait="sent")
        receiver.receive(30)
        assert worker.value == 4.0
        # And the module itself, in place of them.
        trainer.fill(5.0)
        sender.send(trainer, wait="sent")
        receiver.receive(30)
        assert worker.value == 5.0


def _places(module):
    yield from module.named_parameters()
    yield from module.named_buffers()


def test_a_replaced_parameter_is_what_is_sent():
    trainer, worker = Net(1.0), Net()
    with pair(trainer, worker) as (sender, receiver):
        trainer.large = nn.Parameter(torch.full_like(trainer.large, 7.0))
        trainer.small.data = torch.full((3,), 7.0)
        trainer.mean = torch.full((5,), 7.0)
        pass_on(sender, receiver)
        assert worker.value == 7.0
        # And at the worker: what was replaced there is what is loaded into.
        worker.large = nn.Parameter(torch.zeros_like(worker.large))
        trainer.fill(8.0)
        pass_on(sender, receiver)
        assert worker.value == 8.0


def test_tied_weights_travel_once():
    module = nn.Module()
    module.one = nn.Parameter(torch.arange(1000.0))
    module.two = module.one
    with pair(module) as (sender, receiver):
        got = receiver.latest()
        assert set(got) == {"one", "two"}
        assert got["one"].data_ptr() == got["two"].data_ptr()
        assert sender.send(wait="sent").bytes == 4000
        del got


SHAPES = {
    "contiguous": torch.arange(24).reshape(4, 6),
    "transposed": torch.arange(24).reshape(4, 6).T,
    "permuted": torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
    "every second": torch.arange(24)[::2],
    "a window": torch.arange(24).reshape(4, 6)[1:3, 2:5],
    "expanded": torch.tensor([[1], [2]]).expand(2, 5),
    "one element everywhere": torch.tensor(7).expand(3, 4),
    "channels last": torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last),
    "0-d": torch.tensor(5),
    "empty": torch.empty(0, 3),
    "empty in the middle": torch.empty(2, 0, 3),
    "flags": torch.tensor([True, False, True]),
    "conjugated": torch.arange(4).to(torch.complex64).mul(1 + 2j).conj(),
    "negated": torch.arange(4).to(torch.complex64).mul(1 + 2j).conj().imag,
    "wants a gradient": torch.arange(6.0, requires_grad=True),
    "an array backwards": np.arange(12, dtype=np.int32)[::-1],
    "an array transposed": np.arange(12, dtype=np.float64).reshape(3, 4).T,
    "an array backwards and across": np.arange(24, dtype=np.int16).reshape(4, 6)[::-2, ::-3],
    "an array broadcast": np.broadcast_to(np.arange(3.0), (4, 3)),
    "an array of one": np.array(3, dtype=np.uint64),
    "a field of records": np.array([(1, 2.0), (3, 4.0)], dtype="i4,f8")["f1"],
    "a field off the grid": np.array([(1, 2.0), (3, 4.0)], dtype="i1,f8")["f1"],
    "read-only": np.frombuffer(b"\1\2\3\4", dtype=np.uint8),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_memory_layout_arrives_row_major(shape):
    value = SHAPES[shape]
    plain = np.ascontiguousarray(value).reshape(value.shape) if isinstance(value, np.ndarray) else (
        value.detach().resolve_conj().resolve_neg().contiguous()
    )
    # Together with another, since a model of no bytes is refused.
    with pair({"it": value, "other": np.ones(1)}) as (sender, receiver):
        for _ in range(2):
            got = receiver.latest()["it"]
            assert tuple(got.shape) == tuple(value.shape)
            assert got.is_contiguous()
            assert bits(got) == bits(plain)
            pass_on(sender, receiver)
            del got


@pytest.mark.parametrize(
    "into",
    [
        torch.zeros(6, 4).T,
        torch.zeros(8, 12)[::2, ::2],
        torch.zeros(4, 6, dtype=torch.bfloat16).T.contiguous().T,
        torch.zeros(4, 6, dtype=torch.complex64).conj(),
    ],
    ids=str,
)
def test_a_target_may_be_a_strided_tensor(into):
    sent = torch.arange(24).reshape(4, 6).to(into.dtype)
    sent = sent * (1 + 2j) if sent.is_complex() else sent
    with pair({"it": sent}, {"it": into.zero_()}):
        assert torch.equal(into, sent)


@pytest.mark.parametrize(
    "into",
    [
        np.zeros((6, 4), dtype=np.float32).T,
        np.zeros((4, 6), dtype=np.float32)[::-1, ::-1],
        np.zeros((6, 4), dtype=ml_dtypes.bfloat16).T,
    ],
    ids=str,
)
def test_a_target_may_be_a_strided_array(into):
    sent = np.arange(24).reshape(4, 6).astype(into.dtype)
    into[...] = 0
    with pair({"it": sent}, {"it": into}):
        assert bits(into) == bits(sent)


def test_a_strided_parameter_of_a_module_is_loaded():
    worker = nn.Module()
    worker.it = nn.Parameter(torch.zeros(200, 300).T)
    sent = torch.rand(300, 200)
    with pair({"it": sent}, worker):
        assert torch.equal(worker.it, sent)


CASTS = [
    (torch.bfloat16, torch.bfloat16),
    ("F16", torch.float16),
    ("F64", torch.float64),
]


@pytest.mark.parametrize(("cast", "dtype"), CASTS)
def test_a_cast_is_torchs_own_and_leaves_integers(cast, dtype):
    values = torch.cat([torch.randn(5000), torch.tensor([0.0, -0.0, 1e-7, 400.0])])
    source = {"f": values, "d": values.double(), "i": torch.arange(5), "b": torch.tensor([True])}
    with pair(source, setup={"cast": cast}) as (_, receiver):
        got = receiver.latest()
        assert bits(got["f"]) == bits(values.to(dtype))
        assert bits(got["d"]) == bits(values.double().to(dtype))
        assert bits(got["i"]) == bits(source["i"])
        assert bits(got["b"]) == bits(source["b"])
        del got


@pytest.mark.parametrize("cast", ["F8_E4M3", torch.int32, "F31", "float"])
def test_a_cast_that_cannot_be_is_refused(cast):
    with pytest.raises((weightsync.WeightsyncError, TypeError), match="F8_E4M3|I32|F31|float"):
        weightsync.Sender({"f": torch.ones(2)}, cast=cast)


def test_a_cast_goes_into_a_module_of_that_dtype():
    trainer, worker = Net(1.5), Net().to(torch.bfloat16)
    with pair(trainer, worker, setup={"cast": torch.bfloat16}) as (sender, receiver):
        trainer.fill(2.5)
        pass_on(sender, receiver)
        assert worker.value == 2.5


@pytest.mark.parametrize("mode", MODES)
def test_a_partial_update_changes_what_it_names(mode):
    trainer, worker = Net(1.0), Net()
    with pair(trainer, worker, mode=mode) as (sender, receiver):
        report = sender.send({"small": torch.full((3,), 9.0)}, partial=True, wait="sent")
        assert (report.partial, report.bytes) == (["small"], 12)
        assert receiver.receive(30) == 2
        assert worker.small.tolist() == [9.0] * 3
        assert worker.large.unique().tolist() == [1.0]
        # The next whole send has the trainer's own.
        pass_on(sender, receiver)
        assert worker.value == 1.0


REFUSED = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse"),
    "sparse rows": (lambda: torch.eye(3).to_sparse_csr(), "sparse"),
    "quantised": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantised",
    ),
    "complex128": (lambda: torch.ones(3, dtype=torch.complex128), "complex128"),
    "numpy complex128": (lambda: np.ones(3, dtype=np.complex128), "complex128"),
    "numpy float128": (lambda: np.ones(3, dtype=np.longdouble), "float128"),
    "the other byte order": (lambda: np.ones(3, dtype=">f4"), ">f4"),
    "objects": (lambda: np.array([object()]), "object"),
    "text": (lambda: np.array(["a"]), "<U1"),
    "meta": (lambda: torch.ones(3, device="meta"), "meta"),
    "a number": (lambda: 3.0, "float"),
    "a list": (lambda: [torch.ones(3)], "list"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_sender_refuses_unsupported_values_by_name(what):
    make, said = REFUSED[what]
    with pytest.raises((TypeError, ValueError), match="'body.odd'") as refused:
        weightsync.Sender({"body": {"odd": make(), "fine": torch.ones(2)}})
    assert said in str(refused.value)


@pytest.mark.parametrize("what", [3, "text", None, [torch.ones(2)], torch.ones(2)])
def test_sender_refuses_values_that_are_no_model(what):
    with pytest.raises((TypeError, weightsync.ModelError, weightsync.WeightsyncError)):
        weightsync.Sender(what)


def test_keys_are_text():
    with pytest.raises(TypeError, match="key 3"):
        weightsync.Sender({"body": {3: torch.ones(2)}})


WRONG = {
    "a shape": ({"a": torch.ones(4), "b": torch.ones(2)}, ["a", "[3]", "[4]"]),
    "a dtype": ({"a": torch.ones(3).double(), "b": torch.ones(2)}, ["a", "F32", "F64"]),
    "one more": ({"a": torch.ones(3), "b": torch.ones(2), "c": torch.ones(1)}, ["c"]),
    "one less": ({"a": torch.ones(3)}, ["b"]),
    "another name": ({"a": torch.ones(3), "B": torch.ones(2)}, ["b", "B"]),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_trainer_tensor_is_named_and_not_sent(wrong):
    weights, named = WRONG[wrong]
    with pair({"a": torch.ones(3), "b": torch.ones(2)}) as (sender, receiver):
        assert receiver.receive(30).version == 1
        with pytest.raises(weightsync.WrongWeightsError) as refused:
            sender.send(weights)
        for word in named:
            assert word in str(refused.value)
        assert refused.value.remedy == "give up"
        assert receiver.receive(0) is None
        assert sender.version == 1
        # What is right goes through.
        assert sender.send(wait="sent").version == 2


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_worker_tensor_is_named_at_both_ends(wrong):
    weights, named = WRONG[wrong]
    sender = weightsync.Sender({"a": torch.ones(3), "b": torch.ones(2)})
    receiver = weightsync.ModelReceiver(sender.init_info, 7, model=weights)
    seen = []

    def connect():
        with pytest.raises(weightsync.WrongWeightsError) as refused:
            receiver.connect(timeout=patience(15))
        seen.append(str(refused.value))

    with all_ended(sender, receiver):
        with beside(connect), pytest.raises(weightsync.WrongWeightsError) as refused:
            sender.connect([7], timeout=patience(15))
        for said in (seen[0], str(refused.value)):
            for word in named:
                assert word in said
        assert "7" in str(refused.value)


def test_models_by_path():
    class Env:
        def __init__(self, fill):
            self.value_net = Net(fill)
            self.transforms = [Net(fill), Net(fill + 1)]
            self.heads = {"left": Net(fill + 2)}

    paths = ["value_net", "transforms[1]", "heads['left']"]
    trainer, worker = Env(1.0), Env(0.0)
    sender = weightsync.Sender(models=paths, context=trainer)
    receiver = weightsync.ModelReceiver(sender.init_info, models=paths, context=worker)
    with all_ended(sender, receiver):
        meet(sender, receiver)
        assert worker.value_net.value == 1.0
        assert worker.transforms[1].value == 2.0
        assert worker.heads["left"].value == 3.0
        # Looked up again at each send.
        trainer.value_net = Net(5.0)
        sender.send(wait="sent")
        assert receiver.receive_set(30) == {path: 2 for path in paths}
        assert worker.value_net.value == 5.0
    wrong = {"value_nets": "value_net", "transforms[4]": "2 items", ".x": "not a path"}
    for path, word in wrong.items():
        with pytest.raises(weightsync.ModelError, match=word):
            weightsync.Sender(models=[path], context=trainer)


def test_sender_keeps_no_weights_after_a_send():
    with pair({"a": torch.zeros(1 << 20)}) as (sender, _):
        for failing in (False, True):
            kept = torch.full((1 << 20,), 1.0)
            held = weakref.ref(kept)
            gc.disable()
            try:
                sender.send({"a": kept}, wait="sent")
                if failing:
                    with pytest.raises(weightsync.ModelError):
                        sender.send(weights_dict={"policy": {"a": kept}, "other": {}})
                    with pytest.raises(weightsync.WrongWeightsError):
                        sender.send({"a": kept, "more": kept[:1]})
                    # What was raised has been where the weights were.
                    gc.collect()
                del kept
                assert held() is None
            finally:
                gc.enable()


class Negative(nn.Module):
    """Views whose memory has other values than they have."""

    def __init__(self):
        super().__init__()
        self.plain = torch.arange(8.0)
        self.pairs = torch.complex(torch.arange(8.0), -torch.arange(8.0))
        self.negative = nn.Parameter(torch._neg_view(self.plain), requires_grad=False)
        self.imaginary = nn.Parameter(self.pairs.conj().imag, requires_grad=False)
        self.conjugate = nn.Parameter(self.pairs.conj(), requires_grad=False)
        self.again = nn.Parameter(self.plain, requires_grad=False)
        self.same = nn.Parameter(self.pairs, requires_grad=False)

    def change(self):
        self.plain.add_(1)
        self.pairs.add_(1 + 1j)


@pytest.mark.parametrize("kind", ["module", "dict"])
def test_views_that_compute_their_values_are_sent_with_these_each_time(kind):
    model = Negative()
    source = model if kind == "module" else dict(model.named_parameters())
    with pair(source) as (sender, receiver):
        # The third send looks at the tensors all at once.
        for _ in range(4):
            got = receiver.latest()
            for name, one in model.named_parameters():
                assert torch.equal(got[name], one.detach().resolve_conj().resolve_neg()), name
            model.change()
            pass_on(sender, receiver)


def test_parameter_that_becomes_a_negative_view_is_sent_with_its_values():
    model = nn.Linear(3, 4)
    with pair(model) as (sender, receiver):
        for value in range(1, 7):
            if value == 4:
                # The library looks at all tensors at once by now.
                model.weight.data = torch._neg_view(model.weight.data)
            with torch.no_grad():
                model.weight.fill_(value)
            pass_on(sender, receiver)
            assert (receiver.latest()["weight"] == value).all(), value


def test_tensors_can_be_swapped_between_sends():
    model = nn.Linear(3, 4)
    with pair(model) as (sender, receiver):
        for value in range(4):
            other = nn.Parameter(torch.full((4, 3), float(value)))
            torch.utils.swap_tensors(model.weight, other)
            pass_on(sender, receiver)
            assert (receiver.latest()["weight"] == value).all()


def test_weights_that_come_one_at_a_time_need_no_setting_of_threads():
    specs = [(f"w{at}", "F32", (LARGE,)) for at in range(8)]

    def groups(value):
        for name, _, shape in specs:
            yield [(name, torch.full(shape, float(value)))]

    with all_ended(weightsync.Sender(Streamed(specs), copy_threads=4)) as (sender,):
        receiver = weightsync.Receiver(sender.init_info)
        with all_ended(receiver):
            sender.connect(0, weights=Streamed(specs, groups(1)))
            receiver.connect(timeout=LONG)
            sender.send(Streamed(specs, groups(2)), wait="sent")
            assert all((one == 2).all() for one in receiver.receive(LONG).values())


def test_mapping_of_weights_that_come_one_at_a_time_is_refused():
    specs = [("w", "F32", (3,))]
    mapping = weightsync.Mapping().rename("w", "v")
    with pytest.raises(weightsync.SettingError, match="mapping: it may need several tensors at once"):
        weightsync.Sender(Streamed(specs), mapping=mapping)
