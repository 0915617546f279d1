"""What a worker's model can be loaded into, and what is refused before anything is written."""

import ast
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
import weightsync
from ends import LONG, MODES, all_ended, meet, pair, pass_on
from tensordict import LazyStackedTensorDict, TensorDict
from tensordict.nn import TensorDictParams
from torch import nn

LARGE = 32 * 1024


def refused(source, model, words, **how):
    with pytest.raises(weightsync.WeightsyncError, match=words), pair(source, model, **how):
        pass


def expanded():
    return nn.Parameter(torch.zeros(1, 8).expand(4, 8), requires_grad=False)


def hollow():
    tensor = torch.zeros(4, 8)
    tensor.untyped_storage().resize_(0)
    return nn.Parameter(tensor, requires_grad=False)


def read_only():
    array = np.zeros((4, 8), np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("make", "words"), [(expanded, "several elements in one place"), (hollow, "has no memory")]
)
def test_tensor_that_cannot_be_written_is_refused_at_connect(make, words, mode):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.weight = nn.Parameter(torch.zeros(3)), make()

    source = {"first": torch.ones(3), "weight": torch.ones(4, 8)}
    module = Net()
    refused(source, module, f"weight.*{words}", mode=mode)
    assert not module.first.any()
    tree = {"first": torch.zeros(3), "weight": make()}
    refused(source, tree, f"weight.*{words}")
    assert not tree["first"].any()
    with pair(source) as (_, receiver):
        for target in (Net(), tree):
            with pytest.raises(weightsync.LoadError, match=words):
                receiver.latest().load_into(target)
        assert not tree["first"].any()


def resized(size):
    def change(tree):
        tree["weight"].untyped_storage().resize_(size)

    return change


def replaced(tree):
    tree["weight"] = torch.zeros(1, 8).expand(4, 8)


def turned_read_only(tree):
    tree["array"].flags.writeable = False


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (resized(0), "'weight' has no memory"),
        (resized(64), "'weight' has no memory"),
        (replaced, "'weight' has several elements in one place"),
        (turned_read_only, "'array' is a read-only array"),
    ],
)
def test_tensor_that_can_be_written_no_longer_is_refused_at_the_load(change, words):
    tree = {
        "first": torch.zeros(3), "weight": torch.zeros(4, 8), "array": np.zeros(8, np.float32)
    }  # fmt: skip
    source = {name: torch.ones(tuple(one.shape)) for name, one in tree.items()}
    with pair(source, tree) as (sender, receiver):
        change(tree)
        source["first"].fill_(2)
        sender.send(wait="sent")
        with pytest.raises(weightsync.LoadError, match=words):
            receiver.receive(LONG)
        assert (tree["first"] == 1).all(), "half of it was written"


class Plain(nn.Module):
    """Of one class, or with a parameter of another, which the library looks at one by one."""

    def __init__(self, kind, fill=0.0):
        super().__init__()
        self.first = nn.Parameter(torch.full((3,), fill))
        self.weight = nn.Parameter(torch.full((4, 8), fill))
        if kind == "other":
            self.other = nn.Parameter(torch.full((3,), fill).as_subclass(Other))


class Other(torch.Tensor):
    pass


@pytest.mark.parametrize("kind", ["own", "other"])
@pytest.mark.parametrize("size", [0, 64])
def test_parameter_whose_storage_shrinks_is_refused_at_the_load(size, kind):
    trainer, worker = Plain(kind, 1.0), Plain(kind)
    with pair(trainer, worker, mode="copy") as (sender, receiver):
        pass_on(sender, receiver)
        with torch.no_grad():
            trainer.first.fill_(2)
        worker.weight.untyped_storage().resize_(size)
        sender.send(wait="sent")
        with pytest.raises(weightsync.LoadError, match="'weight' has no memory"):
            receiver.receive(LONG)
        assert (worker.first == 1).all(), "half of it was written"


@pytest.mark.parametrize("sends", [0, 3])
@pytest.mark.parametrize("size", [0, 64])
def test_source_whose_storage_shrinks_is_refused(size, sends):
    source = {"first": torch.ones(3), "weight": torch.ones(4, 8)}
    with pair(source) as (sender, receiver):
        for _ in range(sends):
            pass_on(sender, receiver)
        source["weight"].untyped_storage().resize_(size)
        with pytest.raises(weightsync.SendError, match="'weight' has no memory"):
            sender.send()
        assert receiver.latest()["weight"].sum() == 32


def unfolded():
    return torch.zeros(12).unfold(0, 4, 1)[:4]


def strided_array():
    return np.lib.stride_tricks.as_strided(np.zeros(12, np.float32), (4, 4), (4, 4))


@pytest.mark.parametrize("make", [unfolded, strided_array])
def test_tensor_that_overlaps_itself_is_refused_at_connect(make):
    tree = {"first": torch.zeros(3), "weight": make()}
    source = {"first": torch.ones(3), "weight": torch.ones(4, 4)}
    refused(source, tree, "'weight' has several elements")
    assert not tree["first"].any()


def test_view_with_gaps_is_loaded():
    """Of every second element, turned and backwards."""
    tensor, array = torch.zeros(8, 6)[::2, ::2].t(), np.zeros((8, 6), np.float32)[::-2, ::2].T
    with pair({"a": torch.ones(3, 4), "b": torch.ones(3, 4)}, {"a": tensor, "b": array}):
        assert tensor.all() and array.all()


def test_wrapper_without_memory_is_refused_at_connect():
    from torch.testing._internal.two_tensor import TwoTensor

    tree = {"first": torch.zeros(3), "weight": TwoTensor(torch.zeros(4, 8), torch.zeros(4, 8))}
    words = "'weight' is a TwoTensor, which has no memory of its own"
    refused({"first": torch.ones(3), "weight": torch.ones(4, 8)}, tree, words)
    assert not tree["first"].any()


def test_extra_state_that_is_refused_changes_nothing(tmp_path):
    locked = TensorDict({"first": torch.zeros(3)}).lock_()
    proxy = MappingProxyType({"first": torch.zeros(3)})
    trees = {"locked": locked, "proxy": proxy, "module": Stateful(refuses=True)}
    source = {"first": torch.ones(3), "_extra_state": {"count": 2}}
    store = weightsync.Store(tmp_path / "store")
    store.save(source)
    for model in trees.values():
        first = model.first if isinstance(model, nn.Module) else model["first"]
        words = "not this one" if isinstance(model, nn.Module) else "is extra state, and the"
        with pair(source) as (_, receiver), pytest.raises(weightsync.WeightsyncError, match=words):
            receiver.latest().load_into(model)
        with pytest.raises(weightsync.WeightsyncError, match=words):
            store.load_into(model)
        assert not first.any()
    assert trees["module"].state == {"count": 1}


class Stateful(nn.Module):
    """Its second part refuses what comes, where it is told to."""

    def __init__(self, refuses=False):
        super().__init__()
        self.first, self.state, self.refuses = nn.Parameter(torch.zeros(3)), {"count": 1}, refuses

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state
        if self.refuses and state != {"count": 1}:
            raise ValueError("not this one")


def test_empty_dict_takes_all_tensors_or_none(tmp_path):
    """torch has no tensor of the last one."""
    header = json.dumps({
        "first": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]},
        "odd": {"dtype": "F4", "shape": [2, 3], "data_offsets": [12, 15]},
    }).encode()  # fmt: skip
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    file = folder / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(15))
    url = str(tmp_path / "store")
    command = [sys.executable, "-P", "-m", "weightsync", "push", str(folder), "--to", url]
    subprocess.run(command, check=True, capture_output=True)
    tree = {}
    words = "tensor 'odd': torch has no tensor of F4 with"
    with pytest.raises(weightsync.WeightsyncError, match=words):
        weightsync.Store(url).load_into(tree)
    assert not tree



def test_read_only_array_is_refused_at_connect():
    tree = {"first": np.zeros(3, np.float32), "weight": read_only()}
    refused({"first": torch.ones(3), "weight": torch.ones(4, 8)}, tree, "'weight' is a read-only array")
    assert not tree["first"].any()


def test_part_of_a_sharded_tensor_is_refused_at_connect(tmp_path):
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        place = [torch.distributed.tensor.Shard(0)]
        own = torch.distributed.tensor.distribute_tensor(torch.zeros(4, 8), mesh, place)
        refused({"weight": torch.ones(4, 8)}, {"weight": own}, "'weight' is a DTensor")
    finally:
        torch.distributed.destroy_process_group()


def lazy_stack():
    return LazyStackedTensorDict(
        *[TensorDict({"weight": torch.zeros(8)}, batch_size=[]) for _ in range(4)], stack_dim=0
    )


def test_model_that_makes_its_tensors_again_is_refused(tmp_path):
    source = {"weight": torch.ones(4, 8)}
    refused(source, lazy_stack(), "'weight' is made again")
    nested = TensorDict({"first": torch.zeros(4, 3), "in": lazy_stack()}, batch_size=[4])
    refused({"first": torch.ones(4, 3), "in.weight": torch.ones(4, 8)}, nested, "'in.weight' is made")
    with pair(source) as (_, receiver):
        with pytest.raises(weightsync.WeightsyncError, match="made again"):
            receiver.latest().load_into(lazy_stack())
    store = weightsync.Store(tmp_path / "store")
    store.save(source)
    with pytest.raises(weightsync.WeightsyncError, match="made again"):
        store.load_into(lazy_stack())
    own = lazy_stack().contiguous()
    with pair(source, own):
        assert (own["weight"] == 1).all()


@pytest.mark.parametrize("make", [dict, lambda tensors: TensorDict(tensors, batch_size=[])])
def test_tree_on_the_meta_device_is_refused_at_connect(make, tmp_path):
    source = {"first": torch.ones(3), "weight": torch.ones(4, 8)}
    target = make({"first": torch.zeros(3), "weight": torch.zeros(4, 8, device="meta")})
    refused(source, target, "'weight' has no memory yet")
    with pair(source) as (_, receiver):
        with pytest.raises(weightsync.LoadError, match="'weight' has no memory yet"):
            receiver.latest().load_into(target)
    store = weightsync.Store(tmp_path / "store")
    store.save(source)
    with pytest.raises(weightsync.LoadError, match="'weight' has no memory yet"):
        store.load_into(target)
    assert not target["first"].any()


@pytest.mark.parametrize("mode", MODES)
def test_module_that_was_moved_to_the_meta_device_is_refused_at_the_load(mode):
    trainer, worker = nn.Linear(300, 300), nn.Linear(300, 300)
    with pair(trainer, worker, mode=mode) as (sender, receiver):
        worker.to("meta")
        sender.send(wait="sent")
        with pytest.raises(weightsync.LoadError, match="has no memory yet"):
            receiver.receive(LONG)


class WithParams(nn.Module):
    """What it reads is in a TensorDict, of which torch's own dict of parameters is a copy."""

    def __init__(self):
        super().__init__()
        self.params = TensorDictParams(TensorDict({"weight": torch.zeros(4, 8)}, batch_size=[]))


def test_module_that_keeps_its_tensors_twice_is_refused_on_the_meta_device():
    with torch.device("meta"):
        absent = WithParams()
    refused(WithParams(), absent, "'params.weight' has no memory yet.* in a place of its own")
    assert all(one.is_meta for one in absent.parameters())
    trainer, here = WithParams(), WithParams()
    with torch.no_grad():
        trainer.params["weight"].fill_(3)
    with pair(trainer, here):
        assert (here.params["weight"] == 3).all()


@pytest.mark.parametrize("mode", MODES)
def test_parameter_that_becomes_a_negative_view_gets_the_values_that_were_sent(mode):
    trainer, worker = Places(), Places()
    with pair(trainer, worker, mode=mode) as (sender, receiver):
        for value in range(1, 7):
            with torch.no_grad():
                for one in trainer.parameters():
                    one.fill_(value)
            if value == 4:
                # The library looks at all tensors at once by now.
                for one in worker.parameters():
                    one.data = torch._neg_view(one.data)
            pass_on(sender, receiver)
            assert all((one == value).all() for one in worker.parameters()), value


@pytest.mark.parametrize("end", ["receiver.shutdown()", "del receiver", "os.fork() or os._exit(0)", ""])
def test_worker_ends_after_a_bound_parameter_has_lost_its_storage(end):
    script = f"""
        import gc, os, torch, weightsync
        sender = weightsync.Sender(torch.nn.Linear(300, 300))
        sender.connect(0)
        worker = torch.nn.Linear(300, 300)
        receiver = weightsync.ModelReceiver(sender.init_info, model=worker)
        receiver.connect()
        worker.weight.data = worker.weight.data.clone()
        worker.weight.untyped_storage().resize_(0)
        {end}
        gc.collect()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=LONG)
    assert done.returncode == 0


class Overlapping(nn.Module):
    """Views of one memory: in part, transposed, and of all of it."""

    def __init__(self, rows=64):
        super().__init__()
        memory = torch.zeros(rows, LARGE // 64)
        self.whole = nn.Parameter(memory)
        self.first_rows = nn.Parameter(memory[: rows // 2])
        self.turned = nn.Parameter(memory.t())
        self.again = nn.Parameter(memory.view_as(memory))


def of_overlapping(memory):
    half = memory[: len(memory) // 2]
    return {
        "whole": memory, "first_rows": half.clone(), "turned": memory.t().contiguous(), "again": memory.clone(),
    }  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [4, 64])
def test_tensors_that_share_memory_in_part_go_on_sharing_it(mode, rows):
    values = torch.randn(rows, LARGE // 64)
    model = Overlapping(rows)
    source = of_overlapping(values)
    with pair(source, model, mode=mode) as (sender, receiver):
        for _ in range(2):
            assert torch.equal(model.whole, values) and torch.equal(model.turned, values.t())
            with torch.no_grad():
                model.whole[0, 0] = 7
                assert model.first_rows[0, 0] == model.turned[0, 0] == model.again[0, 0] == 7
            values += 1
            for name, one in of_overlapping(values).items():
                source[name].copy_(one)
            pass_on(sender, receiver)


@pytest.mark.parametrize("kind", ["module", "tensors", "arrays"])
@pytest.mark.parametrize("name", ["first_rows", "turned", "again"])
def test_values_that_differ_for_one_place_are_refused(name, kind, tmp_path):
    source = of_overlapping(torch.randn(64, LARGE // 64))
    source[name].view(-1)[5] += 1
    target = Overlapping()
    if kind != "module":
        target = {key: one.detach() for key, one in target.named_parameters()}
    if kind == "arrays":
        target = {key: one.numpy() for key, one in target.items()}
    refused(source, target, "share memory here, and were sent with values that differ")
    values = target.values() if isinstance(target, dict) else target.parameters()
    assert not any(one.any() for one in values), "half of it was written"
    store = weightsync.Store(tmp_path / "store")
    store.save(source)
    with pytest.raises(weightsync.WeightsyncError, match="share memory here"):
        store.load_into(target)


@pytest.mark.parametrize("turn", [torch.conj, torch._neg_view])
def test_values_that_differ_for_a_view_that_computes_them_are_refused(turn):
    values = torch.randn(8, dtype=torch.complex64)
    memory = torch.zeros(8, dtype=torch.complex64)
    target = {"x": memory, "y": turn(memory)}
    words = "share memory here, and were sent with values that differ"
    refused({"x": values, "y": values.clone()}, target, words)
    assert not memory.any()
    with pair({"x": values, "y": turn(values).clone()}, target):
        assert torch.equal(memory, values) and torch.equal(target["y"], turn(values))


def test_views_that_touch_no_common_element_are_loaded():
    memory = torch.zeros(8, 8)
    target = {"left": memory[:, :4], "right": memory[:, 4:], "every": torch.zeros(3)}
    source = {"left": torch.ones(8, 4), "right": torch.full((8, 4), 2.0), "every": torch.ones(3)}
    with pair(source, target):
        assert (memory[:, :4] == 1).all() and (memory[:, 4:] == 2).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sends", [1, 3])
def test_stride_of_a_dimension_of_one_element_does_not_matter(mode, sends):
    def net(value):
        model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Conv2d(8, 300, 3), nn.Conv2d(1, 3000, 3))
        with torch.no_grad():
            for one in model.parameters():
                one.fill_(value)
        return model.to(memory_format=torch.channels_last)

    trainer, worker = net(1.0), net(0.0)
    with pair(trainer, worker, mode=mode) as (sender, receiver):
        for value in range(2, 2 + sends):
            with torch.no_grad():
                for one in trainer.parameters():
                    one.fill_(value)
            pass_on(sender, receiver)
            assert all((one == value).all() for one in worker.parameters())


class Places(nn.Module):
    """A buffer without values, a small parameter, and one that is bound."""

    def __init__(self):
        super().__init__()
        self.small, self.large = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(LARGE))
        self.register_buffer("counts", torch.zeros(3))


@pytest.mark.parametrize("mode", MODES)
def test_default_device_of_torch_changes_nothing(mode, tmp_path):
    trainer, own, empty = Places(), Places(), {}
    with torch.no_grad():
        for one in trainer.parameters():
            one.fill_(3)
    with torch.device("meta"):
        absent = Places()
        sender = weightsync.Sender(trainer, timeout=LONG)
        ends = [
            weightsync.ModelReceiver(sender.init_info, number, model=model, mode=mode)
            for number, model in enumerate((own, absent, empty))
        ]
        with all_ended(sender, *ends):
            meet(sender, *ends)
            for model in (own, absent):
                assert all(one.device.type == "cpu" for one in model.state_dict().values())
                assert (model.small == 3).all() and (model.large == 3).all()
            assert (empty["large"] == 3).all() and empty["large"].device.type == "cpu"
        store = weightsync.Store(tmp_path / "store")
        store.save(trainer)
        loaded = Places().to_empty(device="cpu")
        store.load_into(loaded)
        assert (loaded.large == 3).all()


# Of torch: they make tensors on the default device unless they are told another.
MAKERS = {
    "arange", "as_tensor", "asarray", "bartlett_window", "blackman_window", "empty",
    "empty_permuted", "empty_quantized", "empty_strided", "eye", "full", "hamming_window",
    "hann_window", "kaiser_window", "linspace", "logspace", "normal", "ones", "rand", "randint",
    "randn", "randperm", "range", "scalar_tensor", "sparse_bsc_tensor", "sparse_bsr_tensor",
    "sparse_compressed_tensor", "sparse_coo_tensor", "sparse_csc_tensor", "sparse_csr_tensor",
    "tensor", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip
# They take no device.
CLASSES = {"Tensor", "BFloat16Tensor", "BoolTensor", "ByteTensor", "DoubleTensor", "FloatTensor"}
CLASSES |= {"CharTensor", "HalfTensor", "IntTensor", "LongTensor", "ShortTensor"}


def lines_without_device(tree):
    """The calls that make a tensor and name no device. None is a name: of torch's default one."""
    imported = {
        alias.asname or alias.name: alias.name
        for one in ast.walk(tree)
        if isinstance(one, ast.ImportFrom) and one.module == "torch"
        for alias in one.names
    }
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        name = imported.get(call.func.id) if isinstance(call.func, ast.Name) else None
        if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "torch":
            name = call.func.attr
        is_named = any(one.arg == "device" for one in call.keywords)
        if name in CLASSES or (name in MAKERS and not is_named):
            yield call.lineno


@pytest.mark.parametrize(
    "call",
    [
        "torch.logspace(0, 1)", "torch.Tensor(3)", "from torch import zeros as made; made(3)",
        "torch.sparse_coo_tensor(a, b)",
    ],
)  # fmt: skip
def test_call_without_a_device_is_found(call):
    assert list(lines_without_device(ast.parse(call))) == [1]
    assert not list(lines_without_device(ast.parse("torch.zeros(3, device=other); torch.stack(a)")))


def test_package_names_the_device_of_each_tensor():
    package = Path(__file__).parents[2] / "weightsync"
    files = list(package.rglob("*.py"))
    assert len(files) > 50
    without = []
    for file in files:
        tree = ast.parse(file.read_text())
        without += [f"{file.relative_to(package)}:{line}" for line in lines_without_device(tree)]
    assert not without, "a tensor is made on torch's default device there"


def test_numbers_of_the_field_are_named_where_numpy_has_none():
    packed = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    with pair({"a": torch.ones(4), "b": packed}) as (_, receiver):
        snapshot = receiver.latest()
        with pytest.raises(weightsync.WrongTypeError, match="tensor 'b': numpy has no dtype for F4"):
            snapshot.numpy()
        assert list(snapshot.numpy("a")) == ["a"] and snapshot.numpy("a")["a"].sum() == 4
        with pytest.raises(weightsync.MissingTensorError, match="no tensor 'c'"):
            snapshot.numpy("c")
