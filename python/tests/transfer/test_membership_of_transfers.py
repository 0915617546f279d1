"""Trainers that die or start again, workers that come late or come back."""

import asyncio

import pytest
from actors import Raised
from parties import Net, Trainer, Worker, call, trainer
from weightsync import transfer
from weightsync.errors import UnsupportedError

LIVE = ["weightsync", "broadcast", "packed_broadcast"]


def config(word):
    return {"strategy": word, "strategy_settings": {"timeout": 20.0}}


@pytest.mark.parametrize("word", LIVE)
def test_killed_trainer_leaves_the_old_version(actor, tmp_path, word):
    workers = [actor(Worker, config(word)) for _ in range(2)]
    addresses = [str(tmp_path / str(at)) for at in range(2)]
    for one, address in zip(workers, addresses, strict=True):
        one.ask("serve", address)
    first = actor(Trainer, addresses)
    first.ask("initialize", config(word))
    assert first.ask("sync", 1.0) == 1
    assert [one.ask("state") for one in workers] == [(1, 1.0)] * 2
    # It is killed when a chunk of three has been written, or has been received.
    with pytest.raises(Raised, match="ended with -9"):
        first.ask("sync", 2.0, dies_at=1)
    assert [one.ask("state") for one in workers] == [(1, 1.0)] * 2
    second = actor(Trainer, addresses)
    second.ask("initialize", config(word))
    # A new trainer counts from 1, and its workers keep the weights until then.
    assert [one.ask("state") for one in workers] == [(0, 1.0)] * 2
    for version in (1, 2):
        assert second.ask("sync", 2.0 + version) == version
        assert [one.ask("state") for one in workers] == [(version, 2.0 + version)] * 2


def test_workers_come_back_and_join_late(actor):
    word = "weightsync"
    workers = [actor(Worker, config(word)) for _ in range(2)]
    model = Net(fill=1.0)
    training, client = trainer(model, workers)

    async def run():
        await training.initialize_weight_sync(None, config(word), client)
        assert await training.sync_weights() == 1
        workers[1].kill()
        workers[1] = actor(Worker, config(word))
        await client.join(workers[1], training.init_info, at=1)
        workers.append(actor(Worker, config(word)))
        await client.join(workers[2], training.init_info)
        for version in (2, 3):
            model.fill(float(version))
            assert await training.sync_weights() == version
            assert [one.ask("state") for one in workers] == [(version, float(version))] * 3
        assert [line.worker for line in training.sender.report.workers] == [0, 1, 2]

    asyncio.run(run())
    training.shutdown()


@pytest.mark.parametrize("word", ["broadcast", "packed_broadcast"])
def test_members_of_a_process_group_are_fixed(actor, word):
    assert transfer.strategy_from_config(config(word)).fixed_membership
    assert not transfer.strategy_from_config(config("weightsync")).fixed_membership
    workers = [actor(Worker, config(word)) for _ in range(2)]
    model = Net(fill=1.0)
    training, client = trainer(model, workers)
    late = Worker(config(word))

    async def run():
        await training.initialize_weight_sync(None, config(word), client)
        assert await training.sync_weights() == 1
        for at in (1, None):
            with pytest.raises(UnsupportedError, match="has its 3 members, and they are fixed"):
                await in_process(training, client).join(late, training.init_info, at=at)
        # The others go on.
        model.fill(2.0)
        assert await training.sync_weights() == 2
        assert [one.ask("state") for one in workers] == [(2, 2.0)] * 2

    asyncio.run(run())
    training.shutdown()


def in_process(training, client):
    async def call_here(actor, method, *args):
        return await asyncio.to_thread(getattr(actor, method), *args)

    return transfer.ActorClient(client._actors, call=call_here)


def test_worker_of_a_deployment_takes_a_place():
    from weightsync.errors import SettingError

    client = transfer.ActorClient([None] * 4, deployment=2, call=call)
    with pytest.raises(SettingError, match="at: expected a place from 0 to 3"):
        asyncio.run(client.join(None, transfer.EmptyWeightSyncInitInfo()))
