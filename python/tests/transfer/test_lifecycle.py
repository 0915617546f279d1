"""A trainer and inference workers in processes of their own, strategy by strategy."""

import asyncio
import os

import pytest
import torch
from actors import Raised
from crew import Net, Worker, trainer
from weightsync import transfer
from weightsync.errors import LifecycleError, LoadError, PeerError

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
