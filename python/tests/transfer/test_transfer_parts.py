"""The parts of weight transfers, each alone: receivers, loaders, strategies and their settings."""

import asyncio
import pickle
import subprocess
import sys
import threading
import time

import pytest
import torch
from parties import Net
from patience import patience
from test_transfers import LIVE, config
from torch import nn
from weightsync import transfer
from weightsync.errors import (
    DeadlineError,
    LifecycleError,
    PeerError,
    SendError,
    SettingError,
    UnsupportedError,
    WeightsyncError,
    WrongTypeError,
    WrongWeightsError,
)
from weightsync.transfer import native


def request(version, chunk, last=False, names=("a",)):
    names = list(names)
    return transfer.BroadcastWeightUpdateRequest(
        names=names, dtypes=["float32"] * len(names), shapes=[[2]] * len(names),
        version=version, chunk=chunk, last=last,
    )  # fmt: skip


class Ready(transfer.WeightTransferReceiver):
    """A receiver whose tensors are there."""

    request_type = transfer.BroadcastWeightUpdateRequest

    def _receive(self, request):
        if request.names == ["bad"]:
            raise PeerError("the link broke")
        return [torch.full((2,), float(request.version)) for _ in request.names]


class Keeping(transfer.WeightLoader):
    def __init__(self):
        self.loads = []

    async def load_weights(self, named_tensors):
        self.loads.append({name: one[0].item() for name, one in named_tensors.items()})


def test_chunks_are_staged_until_the_last():
    receiver, loader = Ready(), Keeping()

    def get(*args, **how):
        asyncio.run(receiver.receive_and_load_weights(request(*args, **how), loader))

    get(1, 0, names="ab")
    get(1, 1, names="c")
    assert loader.loads == [] and receiver.version == 0
    get(1, 2, last=True, names="")
    assert loader.loads == [{"a": 1.0, "b": 1.0, "c": 1.0}] and receiver.version == 1
    # A sync that breaks off is dropped, and the next one is whole.
    get(2, 0, names="a")
    with pytest.raises(PeerError, match="the link broke"):
        get(2, 1, names=["bad"])
    with pytest.raises(transfer.RequestError, match="expected chunk 0 of sync any|expected chunk"):
        get(2, 2, last=True, names="")
    get(3, 0, names="b")
    get(4, 0, last=True, names="a")
    assert loader.loads[1:] == [{"a": 4.0}] and receiver.version == 4
    for wrong, said in (
        (request(4, 0), "version: expected more than 4, which is loaded, got 4"),
        (request(5, 1), "got chunk 1 of sync 5"),
        (transfer.LoraLoadRequest(lora_path="x"), "expected a broadcast request, got 'lora'"),
    ):
        with pytest.raises(transfer.RequestError, match=said):
            asyncio.run(receiver.receive_and_load_weights(wrong, loader))
    get(5, 0, names="a")
    with pytest.raises(transfer.RequestError, match="'a' has come with an earlier chunk"):
        get(5, 1, names="a")
    receiver.shutdown()
    with pytest.raises(LifecycleError, match="shut down"):
        get(6, 0)


class Held(Ready):
    """A receiver whose chunks of the first sync come when the test lets them."""

    def __init__(self):
        super().__init__()
        self.may_come = threading.Event()

    def _receive(self, request):
        if request.version == 1:
            assert self.may_come.wait(patience(60))
        return super()._receive(request)


@pytest.mark.parametrize("ends_first", [False, True])
def test_late_chunk_of_a_failed_sync_is_not_loaded_with_the_next(ends_first):
    receiver, loader = Held(), Keeping()

    async def two_syncs():
        late = asyncio.ensure_future(
            receiver.receive_and_load_weights(request(1, 0, names="ab"), loader)
        )
        # Until the chunk of sync 1 is on its way. Its sender has given up meanwhile.
        while receiver._sync is None:
            await asyncio.sleep(0)
        await receiver.receive_and_load_weights(request(2, 0, names="a"), loader)
        if not ends_first:
            receiver.may_come.set()
            with pytest.raises(PeerError, match="chunk 0 of sync 1 came too late"):
                await late
        await receiver.receive_and_load_weights(request(2, 1, last=True, names="b"), loader)
        receiver.may_come.set()
        if ends_first:
            with pytest.raises(PeerError, match="chunk 0 of sync 1 came too late"):
                await late

    asyncio.run(two_syncs())
    assert loader.loads == [{"a": 2.0, "b": 2.0}] and receiver.version == 2


def test_chunk_that_is_on_its_way_is_not_taken_twice():
    receiver, loader = Held(), Keeping()

    async def twice():
        first = asyncio.ensure_future(receiver.receive_and_load_weights(request(1, 0), loader))
        while receiver._sync is None:
            await asyncio.sleep(0)
        with pytest.raises(transfer.RequestError, match="chunk 0 of sync 1 is on its way already"):
            await receiver.receive_and_load_weights(request(1, 0), loader)
        receiver.may_come.set()
        await first
        await receiver.receive_and_load_weights(request(1, 1, last=True, names=""), loader)

    asyncio.run(twice())
    assert loader.loads == [{"a": 1.0}]


class Slow(transfer.WeightLoader):
    """A loader that loads a version when the test lets it, one at a time."""

    def __init__(self):
        self.may_load, self.is_loading, self.loads = asyncio.Event(), 0, []

    async def load_weights(self, named_tensors):
        self.is_loading += 1
        assert self.is_loading == 1
        await self.may_load.wait()
        self.loads.append(named_tensors["a"][0].item())
        self.is_loading -= 1


def test_load_that_outlasts_its_sync_ends_before_the_next_begins():
    async def two_syncs():
        receiver, loader = Ready(), Slow()
        each = [
            asyncio.ensure_future(
                receiver.receive_and_load_weights(request(version, 0, last=True), loader)
            )
            for version in (1, 2)
        ]
        while not loader.is_loading:
            await asyncio.sleep(0)
        loader.may_load.set()
        await asyncio.gather(*each, return_exceptions=True)
        assert receiver.version == loader.loads[-1] == 2

    asyncio.run(two_syncs())


def test_module_loader_writes_all_or_nothing():
    model = Net(fill=1.0)
    state = {name: torch.full_like(one, 2.0) for name, one in model.named_parameters()}

    def load(tensors, **how):
        asyncio.run(transfer.ModuleLoader(model, **how).load_weights(tensors))

    name = "layers.2.down.bias"
    for wrong, said in (
        ({**state, name: torch.zeros(3)}, rf"{name}: expected torch.float32 \[64\], got .* \[3\]"),
        ({**state, name: state[name].half()}, "got torch.float16"),
        ({**state, "more": torch.zeros(1)}, "more is unknown"),
        ({one: state[one] for one in state if one != name}, f"{name} is missing"),
    ):
        with pytest.raises(WrongWeightsError, match=said):
            load(wrong)
        assert model.value == 1.0
    load({**state, name: state[name].half()}, cast=True)
    assert model.value == 2.0


class Pair(nn.Module):
    """Two tensors, of which the second is what a test makes of it."""

    def __init__(self, second):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(4)), second


def hollow():
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(0)
    return nn.Parameter(tensor)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.Parameter(torch.zeros(4, device="meta")), "'second' has no memory yet"),
        (lambda: nn.Parameter(torch.zeros(1).expand(4)), "several elements in one place"),
        (hollow, "'second' has no memory"),
        (nn.UninitializedParameter, "'second' has no memory yet"),
    ],
)
def test_module_loader_refuses_what_it_cannot_write(make, words):
    model = Pair(make())
    tensors = {"first": torch.ones(4), "second": torch.ones(4)}
    with pytest.raises(WrongTypeError, match=words):
        asyncio.run(transfer.ModuleLoader(model).load_weights(tensors))
    assert not model.first.any()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.ones(4, device="meta"), "second came on the meta device"),
        (lambda: torch.ones(4).to_sparse(), "second came on the meta device, nested, sparse"),
        (lambda: hollow().detach(), "'second' has no memory"),
    ],
)
def test_module_loader_refuses_what_it_cannot_read(make, words):
    model = Pair(nn.Parameter(torch.zeros(4)))
    with pytest.raises(WeightsyncError, match=words):
        tensors = {"first": torch.ones(4), "second": make()}
        asyncio.run(transfer.ModuleLoader(model).load_weights(tensors))
    assert not model.first.any()


def test_module_loader_exchanges_tensors_of_its_module():
    model = Pair(nn.Parameter(torch.ones(4)))
    exchanged = {"first": model.second, "second": model.first}
    asyncio.run(transfer.ModuleLoader(model).load_weights(exchanged))
    assert model.first.all() and not model.second.any()


class Stateful(Pair):
    def get_extra_state(self):
        return {"count": 1}

    def set_extra_state(self, state):
        raise AssertionError("nothing was sent")


def test_extra_state_is_refused_by_both_ends():
    model = Stateful(nn.Parameter(torch.zeros(4)))
    tensors = {"first": torch.ones(4), "second": torch.ones(4)}
    words = "'_extra_state' is extra state, a dict, and a transfer carries tensors only"
    with pytest.raises(UnsupportedError, match=words):
        asyncio.run(transfer.ModuleExtractor().extract_weights(model, torch.float32))
    with pytest.raises(UnsupportedError, match=words):
        asyncio.run(transfer.ModuleLoader(model).load_weights(tensors))
    assert not model.first.any()
    asyncio.run(transfer.ModuleLoader(model, strict=False).load_weights(tensors))
    assert model.first.all()


@pytest.mark.parametrize("size", [0, 8])
def test_extractor_refuses_a_tensor_without_memory(size):
    model = Pair(nn.Parameter(torch.zeros(4)))
    model.second.untyped_storage().resize_(size)
    with pytest.raises(SendError, match="'second' has no memory"):
        asyncio.run(transfer.ModuleExtractor().extract_weights(model, torch.float32))


def wrapper():
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(torch.zeros(4), torch.zeros(4))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.zeros(4).to_sparse(), "'second' is torch.sparse_coo"),
        (wrapper, "'second' is a TwoTensor, which has no memory"),
        (lambda: torch.zeros(4, device="meta"), "'second' is on the meta device"),
        (nn.UninitializedBuffer, "'second' has no shape yet"),
    ],
)
def test_extractor_refuses_what_cannot_be_read(make, words):
    model = Pair(nn.Parameter(torch.zeros(4)))
    del model.second
    model.register_buffer("second", make())
    with pytest.raises(WeightsyncError, match=words):
        asyncio.run(transfer.ModuleExtractor().extract_weights(model, torch.float32))


def test_packed_chunk_has_the_values_of_its_views():
    values = torch.tensor([1 + 2j, 3 - 4j])
    for view in (values.conj(), torch._neg_view(values)):
        chunk = transfer.WeightChunk(["a"], [view], [view.dtype], [(2,)], packed=True)
        assert torch.equal(chunk.pack().view(torch.complex64), view.resolve_conj().resolve_neg())


@pytest.mark.parametrize("word", LIVE)
def test_stride_of_a_single_element_does_not_matter(word):
    def single(value):
        return Pair(nn.Parameter(torch.full((50,), value).as_strided((1,), (5,))))

    model, own = single(3.0), single(0.0)
    worker = transfer.InferenceActor(
        transfer.strategy_from_config(config(word)), transfer.ModuleLoader(own)
    )
    training = transfer.TrainingActor(transfer.ModuleExtractor(), model, torch.float32)

    async def run():
        client = transfer.ActorClient([worker])
        await training.initialize_weight_sync(None, config(word), client)
        await training.sync_weights()

    asyncio.run(run())
    assert own.second.item() == 3
    training.shutdown()
    worker.shutdown()


def test_module_loader_writes_inference_tensors():
    with torch.inference_mode():
        second = torch.zeros(4)
    model = Pair(nn.Parameter(torch.zeros(4)))
    del model.second
    model.register_buffer("second", second)
    tensors = {"first": torch.ones(4), "second": torch.ones(4)}
    asyncio.run(transfer.ModuleLoader(model).load_weights(tensors))
    assert model.first.all() and model.second.all()


def test_module_loader_refuses_values_that_differ_for_one_place():
    memory = torch.zeros(8)
    model = Pair(nn.Parameter(memory[2:6]))
    model.first = nn.Parameter(memory)
    tied = Pair(None)
    tied.second = tied.first
    for one, whole in ((model, torch.ones(8)), (tied, torch.ones(4))):
        loader = transfer.ModuleLoader(one)
        with pytest.raises(WrongWeightsError, match="share memory here"):
            tensors = {"first": whole, "second": torch.full((4,), 2.0)}
            asyncio.run(loader.load_weights(tensors))
        assert not one.first.any()
        asyncio.run(loader.load_weights({"first": whole, "second": torch.ones(4)}))
        assert one.first.all()


def test_loop_that_is_closed_by_hand_leaves_no_thread_that_waits():
    """In a process of its own, which would never end."""
    program = """
import asyncio, threading, weightsync
from weightsync.transfer.native import _run_in

async def load():
    await asyncio.sleep(3600)

loop = asyncio.new_event_loop()
running = threading.Thread(target=loop.run_forever)
running.start()
said = []

def wait():
    try:
        _run_in(loop, load(), 60.0)
    except weightsync.LifecycleError as error:
        said.append(str(error))

waiting = threading.Thread(target=wait)
waiting.start()
loop.call_soon_threadsafe(lambda: loop.call_later(0.3, loop.stop))
running.join()
loop.close()
waiting.join()
assert "the event loop" in said[0], said
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=patience(60))


def test_engine_loader_restores_what_was_before():
    engine = {"a": 1}

    def half(pairs):
        for name, one in pairs:
            engine[name] = one
            raise RuntimeError("no room")

    loader = transfer.EngineLoader(half, lambda: engine.update(a=1))
    with pytest.raises(RuntimeError, match="no room"):
        asyncio.run(loader.load_weights({"a": torch.zeros(1)}))
    assert engine == {"a": 1}


def test_strategies_are_chosen_by_a_word():
    assert transfer.strategies()[:5] == [
        "broadcast", "cuda_ipc", "packed_broadcast", "packed_cuda_ipc", "weightsync",
    ]  # fmt: skip
    for wrong in ("other", {}, {"strategy": 3}, None):
        with pytest.raises(SettingError, match="strategy: expected one of broadcast, "):
            transfer.strategy_from_config(wrong)
    for settings, match in (
        ({"speed": "high"}, "expected settings among backend, .*, got 'speed'"),
        ({"backend": 3}, "backend: expected a text, got 3"),
        ({"timeout": "long"}, "timeout: expected a finite number of seconds above 0, got 'long'"),
        ({"timeout": 0}, "timeout: expected a finite number of seconds above 0, got 0"),
        ({"timeout": float("inf")}, "timeout: expected a finite number of seconds above 0, got inf"),
        ("fast", "strategy_settings: expected a dict of settings, got 'fast'"),
    ):
        with pytest.raises(SettingError, match=match):
            transfer.strategy_from_config({"strategy": "broadcast", "strategy_settings": settings})
    with pytest.raises(SettingError, match="a strategy 'broadcast' is registered"):
        transfer.register_strategy("broadcast", "other:Class")
    with pytest.raises(SettingError, match="expected a name and 'module:Class'"):
        transfer.register_strategy("other", "module.Class")
    transfer.register_strategy("tests-only", "collections:OrderedDict")
    with pytest.raises(SettingError, match="no WeightTransferStrategy"):
        transfer.strategy_from_config("tests-only")


class Colored(type(transfer.strategy_from_config("broadcast"))):
    def __init__(self, color, timeout="soon"):
        super().__init__(timeout=20.0)
        self.color = (color, timeout)


def test_strategy_with_its_own_constructor_checks_its_settings():
    transfer.register_strategy("colored", f"{__name__}:Colored")
    settings = {"color": "red", "timeout": "late"}
    cfg = {"strategy": "colored", "strategy_settings": settings}
    assert transfer.strategy_from_config(cfg).color == ("red", "late")
    with pytest.raises(SettingError, match="cannot be made: .*'speed'"):
        transfer.strategy_from_config({**cfg, "strategy_settings": {"speed": 1}})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("word", ["cuda_ipc", "packed_cuda_ipc"])
def test_cuda_strategies_ask_for_a_gpu(word):
    with pytest.raises(UnsupportedError, match="CUDA IPC needs a GPU"):
        transfer.strategy_from_config(word)


@pytest.mark.parametrize("word", LIVE)
def test_strategy_is_settings_and_no_handle(word):
    strategy = transfer.strategy_from_config(config(word))
    metadata = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[2]]}
    info = asyncio.run(strategy.create_init_info(1, metadata))
    assert transfer.init_info_from_dict(info.to_dict()) == info
    copy = pickle.loads(pickle.dumps(strategy))
    assert copy == strategy
    with pytest.raises(WeightsyncError, match="call create_init_info first"):
        asyncio.run(copy.create_sender(info))
    if word == "weightsync":
        strategy.close()


def test_request_beyond_the_model_is_refused():
    def refused(receiver, loader, size, said):
        asked = transfer.BroadcastWeightUpdateRequest(
            names=["a"], dtypes=["float32"], shapes=[[size]], last=False
        )
        with pytest.raises(transfer.RequestError, match=said):
            asyncio.run(receiver.receive_and_load_weights(asked, loader))

    huge = 1 << 43
    refused(Allocating(), transfer.ModuleLoader(nn.Linear(3, 2)), huge, "at most 32 bytes in a sync")
    known = Allocating()
    known.total_bytes = 24
    refused(known, Keeping(), 7, "at most 24 bytes in a sync, as the init info says, got 28")
    # Chunks count together.
    loader = transfer.ModuleLoader(nn.Linear(3, 2))
    receiver = Allocating()
    for chunk, names in enumerate("ab"):
        asked = transfer.BroadcastWeightUpdateRequest(
            names=[names], dtypes=["float32"], shapes=[[4]], chunk=chunk, last=False
        )
        asyncio.run(receiver.receive_and_load_weights(asked, loader))
    asked = transfer.BroadcastWeightUpdateRequest(
        names=["c"], dtypes=["float32"], shapes=[[1]], chunk=2, last=False
    )
    with pytest.raises(transfer.RequestError, match="got 36"):
        asyncio.run(receiver.receive_and_load_weights(asked, loader))


class Allocating(transfer.WeightTransferReceiver):
    request_type = transfer.BroadcastWeightUpdateRequest

    def _receive(self, request):
        return [torch.empty(tuple(shape)) for shape in request.shapes]


def test_init_info_bounds_a_sync():
    strategy = transfer.strategy_from_config("broadcast")
    metadata = {"names": ["a", "b"], "dtype_names": ["float32", "bfloat16"], "shapes": [[2, 3], [5]]}
    info = asyncio.run(strategy.create_init_info(1, metadata))
    assert info.total_bytes == 34


def test_strategy_that_lacks_a_part_says_which():
    receiver = type("Receiver", (transfer.WeightTransferReceiver,), {"request_type": type(request(1, 0))})
    with pytest.raises(UnsupportedError, match="Receiver must implement _receive"):
        asyncio.run(receiver().receive_and_load_weights(request(1, 0), Keeping()))


def test_cuda_code_is_imported_only_where_it_is_chosen():
    program = (
        "import sys, weightsync.transfer as t, weightsync.transfer.skyrl\n"
        "for word in ('weightsync', 'broadcast', 'packed_broadcast'):\n"
        "    t.strategy_from_config(word)\n"
        "assert 'weightsync.transfer.cuda_ipc' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True)


def test_cancelled_request_leaves_the_loader():
    loaded = []

    class Loader(transfer.WeightLoader):
        def __init__(self, name):
            self.name = name

        async def load_weights(self, named_tensors):
            loaded.append(self.name)

    class Snapshot(dict):
        version = 2

    class Native:
        """As the engine's receiver: version 1 does not come, and version 2 does."""

        version = 0
        at_it, go_on = threading.Event(), threading.Event()

        def connect(self, timeout):
            pass

        def pull(self, at_least, timeout):
            if at_least == 1:
                self.at_it.set()
                assert self.go_on.wait(30)
                raise DeadlineError("version 1 is not here")
            # Time for the first one's thread to end, if it is still there.
            self.go_on.set()
            time.sleep(0.1)
            target.load_here(Snapshot())
            self.version = at_least

    receiver = native.WeightsyncReceiver.__new__(native.WeightsyncReceiver)
    transfer.WeightTransferReceiver.__init__(receiver)
    receiver._receiver, receiver._target = Native(), native._Target()
    receiver._connected, receiver._timeout, receiver._fetching = True, 30.0, threading.Lock()
    target = receiver._target

    def ask(version):
        request = transfer.WeightsyncUpdateRequest(version=version, model="policy", last=True)
        return receiver.receive_and_load_weights(request, Loader(version))

    async def run():
        first = asyncio.ensure_future(ask(1))
        assert await asyncio.to_thread(Native.at_it.wait, 30)
        first.cancel()
        second = asyncio.ensure_future(ask(2))
        # Time for a thread that does not wait for the first one's.
        await asyncio.wait({second}, timeout=0.2)
        Native.go_on.set()
        await second

    asyncio.run(run())
    assert (loaded, receiver.version) == ([2], 2)
