"""Trainers that die or start again, workers that come late or come back.

These scenarios of the conformance suite apply to a transfer, whichever strategy it has. Tests
without a file are of this one; `weightsync` itself runs the whole suite as the schemes below it.

| scenario | test |
|---|---|
| `lifecycle::setting_up_communicates_nothing` | `test_transfers.py::test_strategy_is_settings_and_no_handle` |
| `lifecycle::a_program_runs_unchanged_without_synchronisation` | does not apply, because a sync ends when every worker has loaded it: `test_scheme_that_sends_nothing_is_refused`; `broadcast` has no such setting |
| `lifecycle::connect_is_a_rendezvous_in_either_order` | `test_group_forms_in_either_order`; `weightsync` has no rendezvous before the first sync: `test_first_sync_waits_for_every_worker`, `test_request_waits_for_its_version` |
| `lifecycle::missing_workers_are_named` | `test_transfers.py::test_receivers_that_never_join_are_named` for `broadcast`; `weightsync` waits for none |
| `lifecycle::a_worker_that_joins_and_leaves_at_once_counts` | `test_worker_that_leaves_at_once_counts`; a member of a process group that leaves ends it: `test_member_that_leaves_is_named` |
| `lifecycle::a_worker_that_joined_and_died_is_named` | `test_worker_that_joined_and_died_is_named`; `broadcast` does not: its error names the ranks that never came, or says that no group was formed |
| `lifecycle::a_late_joiner_gets_the_newest_version`, `restart::a_worker_that_comes_back_has_the_newest` | `test_workers_come_back_and_join_late`; `broadcast` refuses: `test_members_of_a_process_group_are_fixed` |
| `lifecycle::connecting_to_nobody_ends_by_its_deadline` | `test_worker_whose_trainer_is_gone_says_so`, `test_transfers.py::test_receivers_that_never_join_are_named` |
| `lifecycle::a_worker_of_another_model_is_refused_by_name` | `test_worker_of_another_model_keeps_it` |
| `lifecycle::late_worker_of_another_model_delays_no_other` | `test_late_worker_of_another_model_delays_no_other`; `broadcast` refuses every late worker: `test_members_of_a_process_group_are_fixed` |
| `lifecycle::a_worker_that_leaves_is_no_failure` | `test_worker_that_leaves_is_no_failure`; it is one for `broadcast`, whose members are fixed: `test_member_that_leaves_is_named` |
| `lifecycle::shutdown_is_announced_and_happens_once`, `lifecycle::a_call_out_of_order_says_what_to_do` | `test_transfers.py::test_workers_have_each_sync_whole` |
| `lifecycle::init_info_crosses_text_and_bytes` | `test_requests.py::test_init_infos_come_back_equal` |
| `lifecycle::a_session_is_a_value_before_and_after_init` | `test_transfers.py::test_strategy_is_settings_and_no_handle` |
| `hostile::damaged_init_info_is_an_error` | `test_requests.py::test_init_info_refuses_what_cannot_be` |
| `send::unsent_changes_are_not_seen` | `test_unsent_changes_are_not_seen` |
| `send::wrong_weights_are_named_and_the_old_version_serves` | `test_memory.py::test_chunks_that_do_not_fit_are_named` |
| `send::a_source_that_fails_midway_changes_nothing` | `test_memory.py::test_failed_extraction_leaves_the_old_version`, `test_transfers.py::test_sharded_trainer_survives_a_failed_sync` |
| `death::a_worker_that_cannot_load_is_a_line` | `test_transfers.py::test_load_that_fails_keeps_the_old_weights`, `test_memory.py::test_report_says_what_the_loader_said` |
| `death::a_worker_killed_while_a_send_waits_is_a_line` | `test_transfers.py::test_receiver_killed_in_a_broadcast_is_named`; `test_worker_that_was_killed_is_named` |
| `death::stopped_worker_is_late_and_others_are_up_to_date` | `test_transfers.py::test_receiver_that_stands_still_is_named` |
| `death::a_sender_killed_at_any_stage_leaves_whole_versions`, `restart::workers_find_the_next_sender_automatically` | `test_killed_trainer_leaves_the_old_version`; workers are told of the next trainer, and do not look for it |
| `leaks` | `test_transfers.py::test_nothing_is_left_behind` |
"""

import asyncio
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from actors import Raised
from parties import Net, Trainer, Worker, call, trainer
from weightsync import transfer
from weightsync.errors import DeadlineError, PeerError, UnsupportedError, WeightsyncError

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


def test_worker_that_was_killed_is_named(actor):
    word = "weightsync"
    workers = [actor(Worker, config(word)), actor(Worker, config(word), ("die", 2, 0))]
    model = Net(fill=1.0)
    training, client = trainer(model, workers)

    async def run():
        await training.initialize_weight_sync(None, config(word), client)
        assert await training.sync_weights() == 1
        model.fill(2.0)
        with pytest.raises(PeerError, match="worker 1: .*ended with -9"):
            await training.sync_weights()
        assert workers[0].ask("state") == (2, 2.0)

    asyncio.run(run())
    training.shutdown()


@pytest.mark.parametrize("word", LIVE)
def test_worker_of_another_model_keeps_it(word):
    workers = [Worker(config(word)), Worker(config(word), width=96)]
    model = Net(fill=1.0)
    training, client = trainer(model, workers)
    client = in_process(training, client)

    async def run():
        await training.initialize_weight_sync(None, config(word), client)
        with pytest.raises(WeightsyncError, match=r"layers\.0\.up\.weight: expected"):
            await training.sync_weights()

    asyncio.run(run())
    assert workers[1].state() == (0, -1.0)
    training.shutdown()
    for one in workers:
        one.shutdown()


@pytest.mark.parametrize("word", LIVE)
def test_unsent_changes_are_not_seen(word):
    worker = Worker(config(word))
    model = Net(fill=1.0)
    training, client = trainer(model, [worker])
    client = in_process(training, client)

    async def run():
        await training.initialize_weight_sync(None, config(word), client)
        assert await training.sync_weights() == 1

    asyncio.run(run())
    model.fill(2.0)
    assert worker.state() == (1, 1.0)
    training.shutdown()
    worker.shutdown()


def test_worker_whose_trainer_is_gone_says_so():
    cfg = {"strategy": "weightsync", "strategy_settings": {"timeout": 1.0}}
    strategy = transfer.strategy_from_config(cfg)
    metadata = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[2]]}

    async def run():
        info = await strategy.create_init_info(1, metadata)
        strategy.close()
        worker = transfer.strategy_from_config(cfg)
        receiver = await worker.create_receiver(info, 1)
        request = transfer.WeightsyncUpdateRequest(version=1, model="policy", last=True)
        await receiver.receive_and_load_weights(request, transfer.ModuleLoader(Net()))

    with pytest.raises(WeightsyncError, match="no sender|cannot be reached|gone"):
        asyncio.run(asyncio.wait_for(run(), 30))


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


def test_scheme_that_sends_nothing_is_refused(actor):
    cfg = {"strategy": "weightsync", "strategy_settings": {"scheme": "none", "timeout": 20.0}}
    worker = actor(Worker, cfg)
    training, client = trainer(Net(fill=1.0), [worker])

    async def run():
        await training.initialize_weight_sync(None, cfg, client)
        with pytest.raises(PeerError, match="(?s)worker 0: .*none cannot do this"):
            await training.sync_weights()

    asyncio.run(run())
    assert worker.ask("state") == (0, -1.0)
    training.shutdown()


# Ranks in the order in which they come; 0 is the trainer's.
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)])
def test_group_forms_in_either_order(actor, order):
    workers = [actor(Worker, config("broadcast")) for _ in range(2)]
    strategy = transfer.strategy_from_config(config("broadcast"))

    async def run():
        info = await strategy.create_init_info(2)
        coming = {}
        for rank in order:
            assert not any(one.done() for one in coming.values()), "one is missing"
            if rank:
                joining = call(workers[rank - 1], INITIALIZE, info.to_dict(), rank)
            else:
                joining = strategy.create_sender(info)
            coming[rank] = asyncio.ensure_future(joining)
            await asyncio.to_thread(wait_for_member, info.to_dict(), rank)
        sender, _, _ = await asyncio.gather(*(coming[rank] for rank in range(3)))
        await sender.send_chunks(await chunks_of(Net(fill=1.0)), client_of(workers))
        sender.shutdown()

    asyncio.run(run())
    assert [one.ask("state") for one in workers] == [(1, 1.0)] * 2


def test_first_sync_waits_for_every_worker(actor):
    workers, strategy, info = workers_with_init_info(actor)

    async def run():
        sender = await strategy.create_sender(info)
        chunks = await chunks_of(Net(fill=1.0))
        # The client delivers nothing, so what waits is the sender.
        syncing = asyncio.ensure_future(sender.send_chunks(chunks, client_of(workers, deliver=False)))
        await call(workers[0], UPDATE, FIRST)
        assert workers[0].ask("state") == (1, 1.0)
        assert not syncing.done(), "one is missing"
        await call(workers[1], UPDATE, FIRST)
        await syncing
        sender.shutdown()

    asyncio.run(run())
    assert workers[1].ask("state") == (1, 1.0)


def test_request_waits_for_its_version(actor):
    workers, strategy, info = workers_with_init_info(actor)

    async def run():
        for one in workers:
            before = threads(one)
            one.order(UPDATE, FIRST)
            # It waits for the version in a thread.
            while threads(one) == before and not one.has_answered():
                os.sched_yield()
        assert not any(one.has_answered() for one in workers), "there is no version yet"
        sender = await strategy.create_sender(info)
        chunks = await chunks_of(Net(fill=1.0))
        await sender.send_chunks(chunks, client_of(workers, deliver=False))
        assert [one.answer() for one in workers] == [{"version": 1}] * 2
        sender.shutdown()

    asyncio.run(run())
    assert [one.ask("state") for one in workers] == [(1, 1.0)] * 2


def test_worker_that_leaves_at_once_counts(actor):
    word = "weightsync"
    workers = [actor(Worker, config(word)) for _ in range(2)]
    model = Net(fill=1.0)
    training, _ = trainer(model, workers)
    left = asyncio.Event()

    async def leaving(one, method, *args):
        if one is workers[0]:
            if method == UPDATE:
                await left.wait()
            return await call(one, method, *args)
        if not left.is_set():
            await call(one, method, *args)
        if method == UPDATE and not left.is_set():
            await call(one, "shutdown")
            left.set()

    async def run():
        client = transfer.ActorClient(workers, call=leaving)
        await training.initialize_weight_sync(None, config(word), client)
        for version in (1, 2):
            model.fill(float(version))
            assert await training.sync_weights() == version
            assert workers[0].ask("state") == (version, float(version))

    asyncio.run(run())
    assert workers[1].ask("state") == (0, 1.0)
    training.shutdown()


def test_worker_that_joined_and_died_is_named(actor):
    word = "weightsync"
    workers = [actor(Worker, config(word)) for _ in range(2)]
    training, _ = trainer(Net(fill=1.0), workers)

    async def dying(one, method, *args):
        if method == UPDATE and one is workers[0]:
            # It never joins.
            return
        await call(one, method, *args)
        if method == UPDATE:
            one.kill()
            # The client has all answers, and the sender need not wait for long.
            training.sender.timeout = 10.0

    async def run():
        client = transfer.ActorClient(workers, call=dying)
        await training.initialize_weight_sync(None, config(word), client)
        # The sender may have heard that it died before it heard that it had loaded version 1.
        said = rf"0 of 2 workers .*worker 1 \(pid {workers[1].pid}\).*( died; it| cannot be reached)"
        with pytest.raises(DeadlineError, match=said):
            await training.sync_weights()

    asyncio.run(run())
    training.shutdown()


def test_late_worker_of_another_model_delays_no_other(actor):
    word = "weightsync"
    first, other, second = (actor(Worker, config(word), None, width) for width in (64, 96, 64))
    model = Net(fill=1.0)
    training, client = trainer(model, [first])

    async def run():
        await training.initialize_weight_sync(None, config(word), client)
        assert await training.sync_weights() == 1
        await client.join(other, training.init_info)
        model.fill(2.0)
        with pytest.raises(PeerError, match=r"(?s)^1 of 2 .*layers\.0\.up\.weight: expected"):
            await training.sync_weights()
        assert [first.ask("state"), other.ask("state")] == [(2, 2.0), (0, -1.0)]
        await client.join(second, training.init_info, at=1)
        model.fill(3.0)
        assert await training.sync_weights() == 3
        assert [first.ask("state"), second.ask("state")] == [(3, 3.0)] * 2

    asyncio.run(run())
    training.shutdown()


def test_worker_that_leaves_is_no_failure(actor):
    word = "weightsync"
    workers = [actor(Worker, config(word)) for _ in range(2)]
    model = Net(fill=1.0)
    training, _ = trainer(model, workers)
    left = set()

    async def leaving(one, method, *args):
        if method == UPDATE and one is workers[1] and args[0]["version"] == 4:
            # It leaves while the sender waits for it.
            await call(one, "shutdown")
        elif one not in left:
            await call(one, method, *args)

    async def run():
        client = transfer.ActorClient(workers, call=leaving)
        await training.initialize_weight_sync(None, config(word), client)

        async def sync(version, states):
            model.fill(float(version))
            assert await training.sync_weights() == version
            assert [one.ask("state") for one in workers] == states

        await sync(1, [(1, 1.0)] * 2)
        workers[1].ask("shutdown")
        left.add(workers[1])
        await sync(2, [(2, 2.0), (0, 1.0)])
        left.clear()
        await client.join(workers[1], training.init_info, at=1)
        await sync(3, [(3, 3.0)] * 2)
        await sync(4, [(4, 4.0), (0, 3.0)])
        report = training.sender.report
        assert [line.outcome for line in report.workers] == ["applied", "left"]
        assert report.all_applied

    asyncio.run(run())
    training.shutdown()


@pytest.mark.parametrize("word", ["broadcast", "packed_broadcast"])
def test_member_that_leaves_is_named(actor, word):
    workers = [actor(Worker, config(word)) for _ in range(2)]
    model = Net(fill=1.0)
    training, client = trainer(model, workers)

    async def run():
        await training.initialize_weight_sync(None, config(word), client)
        assert await training.sync_weights() == 1
        workers[1].ask("shutdown")
        model.fill(2.0)
        with pytest.raises(PeerError, match=rf"rank 2 \(.*pid {workers[1].pid}\) died|worker 1: "):
            await training.sync_weights()
        assert [one.ask("state") for one in workers] == [(1, 1.0), (0, 1.0)]
        # It comes back in a new group.
        await training.initialize_weight_sync(None, config(word), client)
        assert await training.sync_weights() == 1
        assert [one.ask("state") for one in workers] == [(1, 2.0)] * 2

    asyncio.run(run())
    training.shutdown()


INITIALIZE, UPDATE = "init_weight_update_communicator", "update_named_weights"
FIRST = transfer.WeightsyncUpdateRequest(version=1, model="policy", last=True).to_dict()


def workers_with_init_info(actor):
    """Two workers that have the init info, and the trainer's strategy, which has no sender yet."""
    workers = [actor(Worker, config("weightsync")) for _ in range(2)]
    strategy = transfer.strategy_from_config(config("weightsync"))

    async def tell():
        plan = await chunks_of(Net())
        info = await strategy.create_init_info(2, plan.metadata)
        await client_of(workers).init_weight_update_communicator(info)
        return info

    return workers, strategy, asyncio.run(tell())


def client_of(workers, deliver=True):
    """A client that calls the workers, or that says it has and has not."""

    async def ignore(*_):
        pass

    return transfer.ActorClient(workers, call=call if deliver else ignore)


async def chunks_of(model):
    extractor = transfer.ModuleExtractor({"group_by_module": True})
    return await extractor.extract_weights(model, torch.float32)


def wait_for_member(info, rank):
    """Until a member of the process group has come to the trainer's store."""
    limit = timedelta(seconds=20)
    store = dist.TCPStore(info["master_addr"], info["master_port"], None, False, limit)
    dist.PrefixStore(info["group_name"], store).wait([f"name/{rank}"])


def threads(one):
    return len(os.listdir(f"/proc/{one.pid}/task"))


def in_process(training, client):
    async def call_here(actor, method, *args):
        return await asyncio.to_thread(getattr(actor, method), *args)

    return transfer.ActorClient(client._actors, call=call_here)


def test_worker_of_a_deployment_takes_a_place():
    from weightsync.errors import SettingError

    client = transfer.ActorClient([None] * 4, deployment=2, call=call)
    with pytest.raises(SettingError, match="at: expected a place from 0 to 3"):
        asyncio.run(client.join(None, transfer.EmptyWeightSyncInitInfo()))
