"""Trainers and explorers, as a program of torch has them."""

import asyncio
import threading
import time

from patience import patience
import pytest
import torch

import weightsync
from weightsync import Synchronizer


def model(value):
    made = torch.nn.Linear(256, 256)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(value)
    return made


def value_of(module):
    values = {float(value) for one in module.parameters() for value in one.detach().aminmax()}
    assert len(values) == 1, values
    return values.pop()


@pytest.fixture(params=["local", "served"])
def sync(request):
    """A synchronizer of this program, or one that is reached over HTTP."""
    if request.param == "local":
        with Synchronizer.local() as made:
            yield made
        return
    with Synchronizer.local(listen="127.0.0.1:0") as served:
        with Synchronizer.connect(served.address) as made:
            yield made


@pytest.mark.parametrize("method", ["memory", "checkpoint"])
def test_fixed_style_syncs_at_fixed_steps(sync, method, tmp_path):
    trained, policy = model(0.0), model(-1.0)
    store = {"store": tmp_path / "store"} if method == "checkpoint" else {}
    with sync.trainer(trained, method=method, style="fixed", interval=4, **store) as trainer:
        with sync.explorer("e0", policy, style="fixed", interval=2, offset=1) as explorer:
            assert explorer.method == method
            # It has no version yet, and one can be had.
            assert explorer.need_sync(0).must
            first = explorer.sync(0)
            assert (first.version, first.step, value_of(policy)) == (1, 0, 0.0)
            assert first.bytes == 4 * (256 * 256 + 256)
            assert not trainer.need_sync(3)
            need = trainer.need_sync(4)
            assert need and not need.must
            with torch.no_grad():
                trained.weight.fill_(4.0)
                trained.bias.fill_(4.0)
            done = trainer.sync(4)
            assert done and done.version == 2, str(done)
            assert [line.name for line in done.explorers] == ["e0"]
            assert not explorer.need_sync(2)
            assert explorer.need_sync(3)
            synced = explorer.sync(3)
            assert (synced.version, synced.step, synced.steps_behind) == (2, 4, 0)
            assert value_of(policy) == 4.0
            assert explorer.version == 2
            text = str(synced)
            travelled = {"memory": "", "checkpoint": " of which 257 KiB travelled"}[method]
            assert text.startswith(f"v2, 257 KiB{travelled}, "), text


def test_nccl_trainer_meets_explorers(sync):
    trained, policies = model(1.0), [model(0.0), model(0.0)]
    trainer = sync.trainer(trained, method="nccl", style="fixed")
    explorers = [
        sync.explorer(f"e{index}", policy, style="fixed", mode="copy")
        for index, policy in enumerate(policies)
    ]
    results = [None, None]

    def explore(index):
        results[index] = explorers[index].sync(1, timeout=patience(30))

    threads = [threading.Thread(target=explore, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    # It begins when both have come.
    done = trainer.sync(1, timeout=patience(30))
    for thread in threads:
        thread.join()
    assert done, str(done)
    assert {line.name: line.version for line in done.explorers} == {"e0": done.version, "e1": done.version}
    assert all(results)
    assert [value_of(policy) for policy in policies] == [1.0, 1.0]
    for end in (*explorers, trainer):
        end.shutdown()


def test_timed_out_sync_is_a_value_and_is_retried(sync):
    policy = model(0.0)
    with sync.explorer("e0", policy, style="explorer_driven") as explorer:
        synced = explorer.sync(1, timeout=0.05)
        assert not synced
        assert synced.ended == "timed out"
        assert "still no version" in str(synced)
        assert value_of(policy) == 0.0
        with sync.trainer(model(5.0), style="explorer_driven") as trainer:
            assert explorer.need_sync(2)
            assert explorer.sync(2)
            assert value_of(policy) == 5.0
            assert not trainer.need_sync(1)


def test_trainer_is_woken_by_an_explorer_that_asks(sync):
    trained, policy = model(0.0), model(-1.0)
    with sync.trainer(trained, style="explorer_driven") as trainer:
        with sync.explorer("e0", policy, style="explorer_driven", interval=1) as explorer:
            assert explorer.sync(0)
            asked = threading.Thread(target=lambda: explorer.sync(1, timeout=patience(30)))
            woken = []

            def wait():
                woken.append(trainer.wait_need_sync(timeout=patience(30)))

            waiting = threading.Thread(target=wait)
            waiting.start()
            asked.start()
            waiting.join()
            assert woken[0].asked_by == ("e0",)
            with torch.no_grad():
                trained.weight.fill_(7.0)
                trained.bias.fill_(7.0)
            assert trainer.sync(3)
            asked.join()
            assert value_of(policy) == 7.0


def test_model_that_does_not_fit_raises_and_is_told(sync):
    with sync.trainer(model(1.0)) as trainer:
        wrong = torch.nn.Linear(3, 2)
        with sync.explorer("e0", wrong) as explorer:
            with pytest.raises(weightsync.WrongWeightsError, match="weight"):
                explorer.sync(1, timeout=patience(30))
            done = trainer.sync(1)
            assert done.explorers[0].ended == "failed"
            assert "weight" in done.explorers[0].reason
            assert explorer.version == 0


def test_explorer_without_a_model_has_snapshots(sync):
    with sync.trainer(models={"actor": model(1.0), "critic": model(2.0)}):
        with sync.explorer("e0") as explorer:
            assert explorer.sync(0)
            values = {name: float(one["weight"].max()) for name, one in explorer.snapshots.items()}
            assert values == {"actor": 1.0, "critic": 2.0}


def test_newer_trainer_fences_the_older_one(sync):
    first = sync.trainer(model(1.0))
    second = sync.trainer(model(2.0))
    assert second.epoch > first.epoch
    with pytest.raises(weightsync.WeightsyncError, match="fenced off"):
        first.sync(1)
    policy = model(0.0)
    with sync.explorer("e0", policy) as explorer:
        assert explorer.sync(0).version == 2
        assert value_of(policy) == 2.0
    first.shutdown()
    second.shutdown()


def test_explorer_of_the_same_name_takes_the_place(sync):
    with sync.trainer(model(1.0)):
        first = sync.explorer("e0", model(0.0))
        with sync.explorer("e0", model(0.0)) as second:
            assert second.sync(0)
            with pytest.raises(weightsync.WeightsyncError, match="a name of its own"):
                first.need_sync(1)
        first.shutdown()


def test_evaluating_explorer_needs_nothing(sync):
    trained = model(1.0)
    with sync.trainer(trained, style="trainer_driven") as trainer:
        with sync.explorer("e0", model(0.0), style="trainer_driven", eval_interval=5) as explorer:
            assert explorer.sync(0)
            assert [step for step in range(12) if explorer.need_eval(step)] == [5, 10]
            assert trainer.sync(1)
            with explorer.evaluating():
                assert not explorer.need_sync(1)
            assert explorer.need_sync(1)


@pytest.mark.parametrize("mode", ["bind", "copy"])
@pytest.mark.parametrize("method", ["memory", "checkpoint"])
def test_explorer_evaluates_every_stored_version(tmp_path, method, mode):
    store = tmp_path / "store"
    kept = {"store": store} if method == "memory" else {}
    trained, policy = model(1.0), model(0.0)
    with Synchronizer.local(method=method, listen="127.0.0.1:0", **kept) as served:
        own = {} if method == "memory" else {"store": store}
        sync = Synchronizer.connect(served.address)
        with sync.trainer(trained, style="trainer_driven", **own) as trainer:
            with sync.explorer("eval", policy, style="trainer_driven", mode=mode) as explorer:
                assert explorer.sync(0).version == 1
                saved = weightsync.Store(store)
                for step in (1, 2):
                    with torch.no_grad():
                        for parameter in trained.parameters():
                            parameter.fill_(1.0 + step)
                    assert trainer.sync(step)
                    # The synchronizer saves while training goes on, and passes over what is not the
                    # newest any more.
                    saved.load(at_least=1 + step, timeout=patience(30))
                assert explorer.sync(2).version == 3
                seen = []
                with explorer.evaluating():
                    for stored in explorer.stored():
                        loaded = explorer.load(stored.version)
                        assert loaded and loaded.version == explorer.version == stored.version
                        assert loaded.versions_behind == 3 - stored.version
                        seen.append(value_of(policy))
                # Each was the only one, and the trainer knows which one is loaded.
                assert seen == [1.0, 2.0, 3.0]
                explorer.load(2)
                assert "1 step stale" in str(explorer.load(2))
                line = trainer.sync(3).explorers[0]
                assert (line.name, line.version) == ("eval", 2)
                # The next sync has the newest again, with all of its weights.
                assert explorer.need_sync(3)
                assert explorer.sync(3).version == 4
                assert value_of(policy) == value_of(trained) == 3.0
                with pytest.raises(weightsync.ModelError, match="9"):
                    explorer.load(9)
                with pytest.raises(weightsync.ModelError, match="best"):
                    explorer.load(named="best")
                assert (explorer.version, value_of(policy)) == (4, 3.0)


def test_load_without_a_store_names_the_setting(sync):
    with sync.explorer("e0", model(0.0)) as explorer:
        for call in (explorer.load, explorer.stored):
            with pytest.raises(weightsync.SettingError, match="store="):
                call()


def test_sync_says_how_many_bytes_travelled(tmp_path):
    with Synchronizer.local() as sync:
        trained, policy = model(1.0), model(0.0)
        with sync.trainer(trained, store=tmp_path / "store") as trainer:
            with sync.explorer("e0", policy) as explorer:
                first = explorer.sync(0)
                assert first.travelled >= first.bytes
                with torch.no_grad():
                    trained.bias[0] = 2.0
                assert trainer.sync(1)
                second = explorer.sync(1)
                # Only what changed is read.
                assert second.bytes == first.bytes
                assert 0 < second.travelled < second.bytes / 10
                assert " KiB of which " in str(second)
                assert " travelled, " in str(second)
                assert policy.bias[0] == 2.0
    with Synchronizer.local() as sync:
        with sync.trainer(model(1.0)), sync.explorer("e0", model(0.0)) as explorer:
            # It reads the memory that the synchronizer has filled.
            synced = explorer.sync(0)
            assert synced.travelled is None
            assert "travelled" not in str(synced)


def test_bounded_explorer_must_sync_when_it_lags(sync):
    trained, policy = model(0.0), model(-1.0)
    with sync.trainer(trained, style="bounded") as trainer:
        with sync.explorer("e0", policy, style="bounded", lag=2) as explorer:
            assert explorer.sync(0)
            needs = []
            for step in (1, 2, 3):
                assert trainer.sync(step)
                needs.append(explorer.need_sync(step).word)
            assert needs == ["no", "no", "must"]
            synced = explorer.sync(3)
            assert (synced.versions_behind, synced.step) == (0, 3)


def test_stopped_trainer_leaves_nothing_newer(sync):
    policy = model(0.0)
    trainer = sync.trainer(model(1.0))
    trainer.shutdown()
    trainer.shutdown()
    with sync.explorer("e0", policy) as explorer:
        # The synchronizer has its version, though its memory is gone.
        assert explorer.sync(0)
        assert value_of(policy) == 1.0
        assert explorer.sync(1).ended == "nothing newer"


def test_async_calls_leave_the_loop_running(sync):
    async def run():
        trained, policy = model(3.0), model(0.0)
        async with sync.trainer(trained, style="explorer_driven") as trainer:
            async with sync.explorer("e0", policy, style="explorer_driven") as explorer:
                assert await explorer.sync_async(0)
                ticks = 0

                async def tick():
                    nonlocal ticks
                    while True:
                        ticks += 1
                        await asyncio.sleep(0.001)

                ticking = asyncio.create_task(tick())
                asked = asyncio.create_task(explorer.sync_async(1, timeout=patience(30)))
                need = await trainer.wait_need_sync_async(timeout=patience(30))
                assert need.asked_by == ("e0",)
                assert await trainer.sync_async(1)
                assert await asked
                ticking.cancel()
                assert ticks > 0

    asyncio.run(run())


def test_cancelled_task_ends_its_wait(sync):
    async def run():
        with sync.explorer("e0", model(0.0)) as explorer:
            waiting = asyncio.create_task(explorer.sync_async(1, timeout=None))
            await asyncio.sleep(0.05)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            # The explorer goes on.
            assert (await explorer.need_sync_async(1)).connected

    asyncio.run(run())


def test_party_ends_with_its_synchronizer():
    sync = Synchronizer.local()
    explorer = sync.explorer("e0", model(0.0))
    ended = []

    def wait():
        try:
            explorer.sync(1, timeout=patience(30))
        except weightsync.WeightsyncError as error:
            ended.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.05)
    sync.shutdown()
    waiting.join()
    assert "shut down" in ended[0]
    explorer.shutdown()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"method": "ncl"}, "nccl, memory, checkpoint"),
        ({"style": "fixd"}, "dynamic_by_explorer"),
        ({"style": "fixed", "lag": 1}, "belongs to the style bounded"),
        ({"interval": 0}, "1 step or more"),
        ({"method": "checkpoint"}, "store="),
        ({"method": "memory", "store": "/tmp/x"}, "checkpoint"),
    ],
)
def test_wrong_setting_is_named(arguments, words):
    with Synchronizer.local() as sync:
        with pytest.raises(weightsync.SettingError, match=words):
            sync.trainer(model(0.0), **arguments)


def test_parties_that_wait_for_each_other_are_refused(sync):
    with sync.trainer(model(0.0), style="explorer_driven"):
        with pytest.raises(weightsync.WeightsyncError, match="wait for the other"):
            sync.explorer("e0", model(0.0), style="trainer_driven")


def test_call_of_a_party_ends_while_another_thread_waits(sync):
    """Both parties wait for what never comes."""
    with sync.trainer(model(1.0), style="explorer_driven") as trainer:
        with sync.explorer("e0", model(0.0)) as explorer:
            assert explorer.sync(0)
            waits = {
                "sync": (explorer, lambda: explorer.sync(1, timeout=None)),
                "wait_need_sync": (trainer, lambda: trainer.wait_need_sync(timeout=None)),
            }
            calls = {
                "sync": [lambda: explorer.sync(1, timeout=0.2), lambda: explorer.wait_need_sync(timeout=0.2)],
                "wait_need_sync": [lambda: trainer.sync(1, timeout=0.2)],
            }
            for word, (party, wait) in waits.items():
                other = threading.Thread(target=ends, args=(wait,), name="other")
                other.start()
                for call in calls[word]:
                    assert_late(party, call, word)
                party.shutdown()
                other.join()


def ends(call):
    with pytest.raises(weightsync.errors.LifecycleError):
        call()


def assert_late(party, call, word):
    """Until the other thread is in its call this one has its turn, and ends otherwise."""
    until = time.monotonic() + patience(30)
    while time.monotonic() < until:
        try:
            call()
        except weightsync.DeadlineError as error:
            assert f"all of 0.2 s the thread 'other' was in {word} of this end" in str(error)
            return
    raise AssertionError(f"another thread was never in {word}")
