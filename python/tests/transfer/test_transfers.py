"""A trainer and inference workers in processes of their own, strategy by strategy."""

import asyncio
import dataclasses
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
from actors import Raised
from parties import Net, Rank, Worker, threaded, trainer
from torch import nn
from weightsync import transfer
from weightsync.errors import (
    DeadlineError,
    LifecycleError,
    LoadError,
    PeerError,
    SettingError,
    UnsupportedError,
    WeightsyncError,
    WrongWeightsError,
)
from weightsync.transfer import _group, native

LIVE = ["weightsync", "broadcast", "packed_broadcast"]


def config(word, timeout=30.0):
    return {"strategy": word, "strategy_settings": {"timeout": timeout}}


@pytest.mark.parametrize("word", LIVE)
def test_workers_have_each_sync_whole(actor, word):
    workers = [actor(Worker, config(word)) for _ in range(2)]
    model = Net(fill=1.0)
    training, client = trainer(model, workers)

    async def run():
        await training.initialize_weight_sync(None, config(word), client)
        for version in (1, 2, 3):
            model.fill(float(version))
            assert await training.sync_weights() == version
            assert [one.ask("state") for one in workers] == [(version, float(version))] * 2

    asyncio.run(run())
    for one in workers:
        one.ask("shutdown")
    training.shutdown()
    training.shutdown()
    with pytest.raises(LifecycleError, match="initialize_weight_sync"):
        asyncio.run(training.sync_weights())


@pytest.mark.parametrize("word", LIVE)
def test_load_that_fails_keeps_the_old_weights(actor, word):
    workers = [actor(Worker, config(word)), actor(Worker, config(word), "load")]
    model = Net(fill=1.0)
    training, client = trainer(model, workers)

    async def run():
        await training.initialize_weight_sync(None, config(word), client)
        with pytest.raises((LoadError, PeerError), match="out of order"):
            await training.sync_weights()
        assert workers[1].ask("state") == (0, -1.0)
        workers[1].ask("forgive")
        model.fill(2.0)
        assert await training.sync_weights() == 2

    asyncio.run(run())
    assert [one.ask("state") for one in workers] == [(2, 2.0)] * 2


@pytest.mark.parametrize("word", ["broadcast", "packed_broadcast"])
def test_receiver_killed_in_a_broadcast_is_named(actor, word):
    workers = [actor(Worker, config(word)) for _ in range(3)]
    workers.insert(1, actor(Worker, config(word), ("die", 2, 1)))
    pid = workers[1].pid
    model = Net(fill=1.0)
    training, client = trainer(model, workers)

    async def run():
        await training.initialize_weight_sync(None, config(word), client)
        await training.sync_weights()
        model.fill(2.0)
        with pytest.raises(PeerError, match=rf"rank 2 \(.*pid {pid}\) died during chunk 1"):
            await training.sync_weights()
        left = [workers[0], *workers[2:]]
        assert [one.ask("state") for one in left] == [(1, 1.0)] * 3
        # The survivors go on in a new group.
        again, client_ = trainer(model, left)
        await again.initialize_weight_sync(None, config(word), client_)
        assert await again.sync_weights() == 1
        assert [one.ask("state") for one in left] == [(1, 2.0)] * 3
        again.shutdown()

    asyncio.run(run())
    training.shutdown()


@pytest.mark.parametrize("word", ["weightsync", "packed_broadcast"])
def test_sharded_trainer_survives_a_failed_sync(actor, word):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = [actor(Rank, rank, 2, port) for rank in range(2)]

    def both(method, *args):
        for one in ranks:
            one.order(method, *args)
        return ranks[0], ranks[1]

    first, second = both("initialize", word)
    first.answer(), second.answer()
    # Rank 1 is not left alone in its collectives.
    first, second = both("sync", 1.0)
    with pytest.raises(Raised, match="out of order"):
        first.answer()
    second.answer()
    first.ask("forgive")
    first, second = both("sync", 2.0)
    assert first.answer() == 2
    second.answer()
    assert first.ask("states") == [(2, 2.0)] * 2
    first, second = both("end")
    first.answer(), second.answer()


def test_receiver_that_stands_still_is_named(actor):
    cfg = config("packed_broadcast", timeout=8.0)
    workers = [actor(Worker, cfg) for _ in range(2)]
    model = Net(fill=1.0)
    training, client = trainer(model, workers)

    async def run():
        await training.initialize_weight_sync(None, cfg, client)
        workers[1].signal(signal.SIGSTOP)
        with pytest.raises(DeadlineError, match="not acknowledged by rank 2|answer chunk 0"):
            await training.sync_weights()
        workers[1].kill()

    asyncio.run(run())
    training.shutdown()


@pytest.mark.parametrize("word", ["broadcast"])
def test_receivers_that_never_join_are_named(word):
    strategy = transfer.strategy_from_config(config(word, timeout=1.0))

    async def run():
        info = await strategy.create_init_info(2)
        with pytest.raises(DeadlineError, match="rank 1, 2 of 2 have not joined within 1.0 s"):
            await strategy.create_sender(info)
        with pytest.raises(LifecycleError, match="call create_init_info first"):
            await strategy.create_sender(info)
        with pytest.raises(PeerError, match="cannot be reached"):
            await strategy.create_receiver(info, 1)

    asyncio.run(run())


@pytest.mark.parametrize("word", LIVE)
def test_nothing_is_left_behind(word):
    def open_now():
        gc.collect()
        kinds = (os.readlink(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd") if one)
        sockets = set()
        for kind in _readable(kinds):
            if kind.startswith(("socket:", "/memfd")):
                sockets.add(kind)
        return sockets, set(os.listdir("/proc/self/task"))

    def once():
        workers = [Worker(config(word)), Worker(config(word))]
        training, _ = trainer(Net(fill=1.0), workers)
        client = transfer.ActorClient(workers, call=threaded)

        async def run():
            await training.initialize_weight_sync(None, config(word), client)
            await training.sync_weights()

        asyncio.run(run())
        assert [one.state() for one in workers] == [(1, 1.0)] * 2
        training.shutdown()
        for one in workers:
            one.shutdown()

    once()
    sockets, threads = open_now()
    once()
    while any(now - before for now, before in zip(open_now(), (sockets, threads), strict=True)):
        # Bounded by the test's own timeout: a thread that was joined is there for a moment.
        os.sched_yield()


def _readable(links):
    while True:
        try:
            yield next(links)
        except FileNotFoundError:
            return
        except StopIteration:
            return


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


class Silent(transfer.InferenceEngineClient):
    """A client that does not answer one of its calls."""

    def __init__(self, silent):
        self._silent = silent

    async def _answer(self, call, answer=None):
        if call == self._silent:
            await asyncio.Event().wait()
        return answer

    async def get_world_size(self):
        return await self._answer("get_world_size", (1, 1))

    async def init_weight_update_communicator(self, init_info):
        await self._answer("init_weight_update_communicator")

    async def update_named_weights(self, request):
        await self._answer("update_named_weights")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("get_world_size", "did not answer how many they are within 0.5 s"),
        ("init_weight_update_communicator", "did not answer the init info within 0.5 s"),
    ],
)
def test_client_that_does_not_answer_ends_the_wait(call, said):
    cfg = config("weightsync", timeout=0.5)
    training = transfer.TrainingActor(transfer.ModuleExtractor(), Net())
    with pytest.raises(DeadlineError, match=said):
        asyncio.run(
            asyncio.wait_for(training.initialize_weight_sync(None, cfg, Silent(call)), 30)
        )
    training.shutdown()


def test_cancelled_broadcast_closes_the_group(actor):
    cfg = config("broadcast")
    worker = actor(Worker, cfg)
    client = transfer.ActorClient([worker], call=ordered)
    training, _ = trainer(Net(fill=1.0), [worker])

    async def run():
        await training.initialize_weight_sync(None, cfg, client)
        worker.signal(signal.SIGSTOP)
        sync = asyncio.ensure_future(training.sync_weights())
        tasks = len(asyncio.all_tasks())
        # The call of the worker, which stands still, and the transfer.
        while len(asyncio.all_tasks()) < tasks + 2:
            await asyncio.sleep(0)
        sync.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sync
        left = [one for one in asyncio.all_tasks() if one is not asyncio.current_task()]
        await asyncio.wait_for(asyncio.gather(*left, return_exceptions=True), 5)
        with pytest.raises(LifecycleError, match="the group is closed"):
            await training.sync_weights()

    asyncio.run(run())
    training.shutdown()


def test_store_that_closes_during_a_join_is_named():
    strategy = transfer.strategy_from_config(config("broadcast"))
    info = strategy.open(1)
    store = _group.join_store(info, 20.0)
    strategy._store = None
    with pytest.raises(PeerError, match="was not formed"):
        _group.UpdateGroup(store, info, 1, 20.0)


def test_trainer_that_answers_nothing_is_named():
    strategy = transfer.strategy_from_config(config("broadcast", timeout=1.0))
    info = strategy.open(1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        info = dataclasses.replace(info, master_port=silent.getsockname()[1])
        with pytest.raises(PeerError, match="cannot be reached: no answer within 1.0 s"):
            asyncio.run(strategy.create_receiver(info, 1))


async def ordered(actor, method, *args):
    """Orders without taking a thread that waits for an answer, which does not come."""
    actor.order(method, *args)
    loop, there = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(actor._pipe.fileno(), there.set)
    try:
        await there.wait()
    finally:
        loop.remove_reader(actor._pipe.fileno())
    return actor.answer()


def test_member_that_fails_closes_the_half_it_has(monkeypatch):
    strategy = transfer.strategy_from_config(config("broadcast"))
    monkeypatch.setattr(_group.UpdateGroup, "_made", _made_by_rank_0_alone)

    async def run():
        info = await strategy.create_init_info(1)
        sender, failure = await asyncio.gather(
            strategy.create_sender(info), strategy.create_receiver(info, 1), return_exceptions=True
        )
        assert isinstance(failure, PeerError) and "no NCCL here" in str(failure)
        chunk = transfer.WeightChunk(["a"], [torch.zeros(1)], ["float32"], [(1,)])
        # The failure is held, and with it what failed: its links must be closed all the same.
        with pytest.raises(PeerError, match="rank 1 .* died during chunk 0"):
            await sender.send_chunks([chunk], Silent(None))

    asyncio.run(run())


def _made_by_rank_0_alone(group, backend, rank, limit):
    if rank:
        raise RuntimeError("no NCCL here")
    return group._control


def test_backend_that_torch_lacks_is_named():
    strategy = transfer.strategy_from_config(
        {"strategy": "broadcast", "strategy_settings": {"backend": "mpi", "timeout": 20.0}}
    )

    async def run():
        info = await strategy.create_init_info(1)
        return await asyncio.gather(
            strategy.create_sender(info), strategy.create_receiver(info, 1), return_exceptions=True
        )

    for failure in asyncio.run(run()):
        assert isinstance(failure, UnsupportedError) and "expected gloo or nccl" in str(failure)


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
