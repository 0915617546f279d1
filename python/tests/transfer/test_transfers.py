"""A trainer and inference workers in processes of their own, strategy by strategy."""

import asyncio
import concurrent.futures
import dataclasses
import gc
import os
import signal
import socket
import threading

import pytest
import torch
from actors import Raised
from parties import Net, Rank, Worker, threaded, trainer
from weightsync import transfer
from weightsync.errors import (
    DeadlineError,
    LifecycleError,
    LoadError,
    PeerError,
    UnsupportedError,
)
from weightsync.transfer import _group

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
        # The store lives until the last frame of the error above is gone, and may close in between.
        with pytest.raises(PeerError, match="cannot be reached|was not formed"):
            await strategy.create_receiver(info, 1)

    asyncio.run(run())


@pytest.mark.parametrize("word", LIVE)
def test_waits_take_no_thread_of_the_loops_pool(word):
    model, nets = Net(fill=1.0), [Net() for _ in range(3)]

    async def run():
        # A pool as small as that of a machine with few cores is next to many workers.
        pool = concurrent.futures.ThreadPoolExecutor(1)
        asyncio.get_running_loop().set_default_executor(pool)
        taken = threading.Event()
        busy = pool.submit(taken.wait)
        strategy = transfer.strategy_from_config(config(word))
        actors = [transfer.InferenceActor(strategy, transfer.ModuleLoader(net)) for net in nets]
        training, _ = trainer(model, actors)
        try:
            await training.initialize_weight_sync(strategy, None, transfer.ActorClient(actors))
            assert await training.sync_weights() == 1
        finally:
            for end in (training, *actors):
                end.shutdown()
            taken.set()
            busy.result()

    asyncio.run(run())
    assert [net.value for net in nets] == [1.0] * 3


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
    form = _group.Links._form

    def formed_by_rank_0_alone(group, *arguments):
        form(group, *arguments)
        if group._rank:
            raise RuntimeError("no NCCL here")

    monkeypatch.setattr(_group.Links, "_form", formed_by_rank_0_alone)

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
