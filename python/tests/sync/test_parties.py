"""What programs do around the calls of trainers and explorers."""

import asyncio
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

from patience import patience
import pytest
import torch

import weightsync
from weightsync import Mapping, Store, StoreScheme, Synchronizer

PARTIES = Path(__file__).with_name("parties.py")


def model(value, size=64):
    made = torch.nn.Linear(size, size)
    fill(made, value)
    return made


def fill(module, value):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)


def value_of(module):
    (value,) = {float(value) for one in module.parameters() for value in one.detach().aminmax()}
    return value


def in_child(call):
    """The exit code of a forked child that makes a call; None if it hangs."""
    child = multiprocessing.get_context("fork").Process(target=call)
    child.start()
    child.join(30)
    ended = child.exitcode
    if ended is None:
        child.kill()
        child.join()
    return ended


@pytest.mark.parametrize("served", [False, True])
def test_forked_child_is_told_that_it_cannot_join(served):
    with Synchronizer.local(listen="127.0.0.1:0" if served else None) as local:
        sync = Synchronizer.connect(local.address) if served else local
        with sync.explorer("e0", model(0.0)) as explorer:

            def join():
                for call in (lambda: sync.explorer("e1", model(0.0), timeout=1), explorer.need_sync):
                    try:
                        call()
                    except weightsync.WeightsyncError as error:
                        assert "forked child" in str(error), error
                    else:
                        sys.exit(1)
                sync.shutdown()
                explorer.shutdown()

            assert in_child(join) == 0
            assert explorer.need_sync(1).connected


def test_more_explorers_wait_than_asyncio_has_threads():
    async def run():
        with Synchronizer.local() as sync:
            trainer = await sync.trainer_async(model(0.0), style="explorer_driven")
            names = [f"e{index}" for index in range(2 * (os.cpu_count() or 1) + 40)]
            explorers = [
                await sync.explorer_async(name, model(1.0, 4), style="explorer_driven") for name in names
            ]
            waiting = [
                asyncio.create_task(explorer.wait_need_sync_async(timeout=patience(30))) for explorer in explorers
            ]
            # Nobody holds the trainer up.
            need = await asyncio.wait_for(trainer.need_sync_async(1), 30)
            assert need.connected
            for task in waiting:
                task.cancel()
            assert len(await asyncio.gather(*waiting, return_exceptions=True)) == len(names)
            async with explorers[0].evaluating():
                assert not await explorers[0].need_sync_async(1)
            for end in (*explorers, trainer):
                end.shutdown()

    asyncio.run(run())


def test_cancelled_task_ends_a_load():
    code = (
        "import sys, torch, weightsync\n"
        "sync = weightsync.Synchronizer.connect(sys.argv[1])\n"
        "trainer = sync.trainer({'w': torch.zeros(1000)}, method='nccl', style='fully_async')\n"
        "step = 0\n"
        "while True:\n"
        "    step += 1\n"
        "    trainer.sync(step)\n"
    )

    async def run(sync, trainer):
        explorer = await sync.explorer_async("e0", style="fully_async")
        begun, load = threading.Event(), explorer._load

        def stopped(*arguments):
            os.kill(trainer.pid, signal.SIGSTOP)
            # It stops a moment later.
            while Path(f"/proc/{trainer.pid}/stat").read_text().rpartition(") ")[2][0] != "T":
                pass
            begun.set()
            return load(*arguments)

        explorer._load = stopped
        task = asyncio.create_task(explorer.sync_async(1, timeout=None))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert explorer.version == 0
        assert (await explorer.need_sync_async(2)).connected
        await asyncio.to_thread(explorer.shutdown)

    with Synchronizer.local(listen="127.0.0.1:0", method="nccl") as sync:
        trainer = subprocess.Popen([sys.executable, "-c", code, sync.address])
        try:
            asyncio.run(run(sync, trainer))
        finally:
            trainer.kill()
            trainer.wait()


def test_cancelled_task_ends_a_join():
    async def run():
        with Synchronizer.connect("127.0.0.1:9") as nobody:
            for join in (nobody.explorer_async("e0", timeout=None), nobody.trainer_async(model(0.0), timeout=None)):
                task = asyncio.create_task(join)
                await asyncio.sleep(0.1)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asyncio.wait_for(task, 30)

    asyncio.run(run())


def test_cancelled_evaluation_pauses_nobody():
    async def run():
        with Synchronizer.local(style="trainer_driven") as sync:
            trainer = await sync.trainer_async(model(0.0))
            explorer = await sync.explorer_async("e0", model(1.0))
            task = asyncio.create_task(explorer.evaluating().__aenter__())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await explorer.need_sync_async(0)).must
            for end in (explorer, trainer):
                end.shutdown()

    asyncio.run(run())


def test_trainer_killed_during_a_load_leaves_the_version():
    with Synchronizer.local(listen="127.0.0.1:0", method="nccl") as sync:
        policy = model(-1.0)

        def start(step):
            made = subprocess.Popen(
                [sys.executable, PARTIES, "trainer", sync.address, "nccl", "-", str(step)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert made.stdout.readline().startswith("joined")
            return made

        def tell(trainer, step):
            trainer.stdin.write(f"{step}\n")
            trainer.stdin.flush()

        trainer = start(0)
        with sync.explorer("e0", policy, style="fully_async") as explorer:
            tell(trainer, 1)
            assert explorer.sync(1, timeout=patience(30))
            before, load = explorer.version, explorer._load

            def killed(*arguments):
                trainer.kill()
                trainer.wait()
                return load(*arguments)

            explorer._load = killed
            tell(trainer, 2)
            synced = explorer.sync(2, timeout=patience(30))
            # It may have the version already, or not; in either case the label is what it has.
            if synced:
                assert (explorer.version, value_of(policy)) == (before + 1, 2.0)
            else:
                assert synced.reason
                assert (explorer.version, value_of(policy)) == (before, 1.0)
            explorer._load = load
            for stream in (trainer.stdin, trainer.stdout):
                stream.close()
            again = start(2)
            tell(again, 3)
            assert explorer.sync(3, timeout=patience(30))
            assert value_of(policy) == 3.0
            again.stdin.close()
            assert again.wait(60) == 0
            again.stdout.close()


@pytest.mark.parametrize("mode", ["bind", "copy"])
def test_nccl_explorers_that_come_one_by_one_all_load(mode):
    with Synchronizer.local() as sync:
        trained = model(0.0)
        trainer = sync.trainer(trained, method="nccl", style="explorer_driven")
        policies = [model(-1.0) for _ in range(6)]
        explorers = [
            sync.explorer(f"e{index}", policy, style="explorer_driven", mode=mode)
            for index, policy in enumerate(policies)
        ]
        step = 0
        for _ in range(2):
            for explorer, policy in zip(explorers, policies, strict=True):
                step += 1
                fill(trained, float(step))
                ended = []
                asking = threading.Thread(
                    target=lambda explorer=explorer, step=step, ended=ended: ended.append(
                        explorer.sync(step, timeout=patience(30))
                    )
                )
                asking.start()
                assert trainer.wait_need_sync(timeout=patience(30))
                assert trainer.sync(step, timeout=patience(30))
                asking.join()
                assert ended[0]
                assert value_of(policy) == float(step)
        for end in (*explorers, trainer):
            end.shutdown()


def test_waiting_trainer_serves_an_explorer_before_it_is_due():
    with Synchronizer.local() as sync:
        policy, trained = model(-1.0), model(0.0)
        with (
            sync.trainer(trained, style="fixed", interval=4) as trainer,
            sync.explorer("e0", policy, style="explorer_driven") as explorer,
        ):
            assert explorer.sync(0)
            asking = threading.Thread(target=lambda: explorer.sync(1, timeout=patience(30)))
            asking.start()
            # It waits for samples, and the explorer waits for weights.
            need = trainer.wait_need_sync(timeout=patience(30), step=2)
            assert need.asked_by == ("e0",)
            # While it makes steps, its style counts.
            assert not trainer.need_sync(3)
            fill(trained, 2.0)
            assert trainer.sync(3)
            asking.join()
            assert value_of(policy) == 2.0


def test_stopped_trainer_ends_the_wait_for_a_need():
    with Synchronizer.local(style="trainer_driven") as sync:
        trainer = sync.trainer(model(0.0))
        with sync.explorer("e0", model(1.0)) as explorer:
            assert explorer.sync(0)
            needs = []
            waiting = threading.Thread(target=lambda: needs.append(explorer.wait_need_sync()))
            waiting.start()
            trainer.shutdown()
            waiting.join()
            assert (needs[0].word, needs[0].trainer_stopped) == ("no", True)
            assert explorer.need_sync(1).trainer_stopped


def test_checkpoint_program_continues_its_store(tmp_path):
    store = tmp_path / "store"
    for run in range(3):
        with Synchronizer.local(method="checkpoint") as sync, model_trainer(sync, store, run) as trainer:
            assert trainer.version == 1 + 5 * run
            for step in range(1, 5):
                assert trainer.sync(step)
    # All are kept, for those who evaluate them.
    assert [one.version for one in Store(store).versions()] == list(range(1, 16))


def model_trainer(sync, store, value):
    return sync.trainer(model(float(value)), method="checkpoint", store=store)


@pytest.mark.parametrize("method", ["memory", "checkpoint"])
def test_restarted_trainer_resumes_from_the_newest(tmp_path, method):
    own = {"store": tmp_path / "store"} if method == "checkpoint" else {}
    with Synchronizer.local(method=method) as sync:
        trained = model(0.0)
        with sync.trainer(trained, resume=True, **own) as trainer:
            # There is nothing to resume from.
            assert (trainer.version, trainer.step, value_of(trained)) == (1, 0, 0.0)
            fill(trained, 5.0)
            assert trainer.sync(5)
        fresh = model(-1.0)
        with sync.trainer(fresh, resume=True, **own) as trainer:
            assert (trainer.version, trainer.step, value_of(fresh)) == (3, 5, 5.0)
            with sync.explorer("e0", policy := model(0.0)) as explorer:
                assert explorer.sync(0).step == 5
                assert value_of(policy) == 5.0
    if method == "checkpoint":
        # A synchronizer that knows nothing of the store, nor of steps.
        with Synchronizer.local(method=method) as sync:
            fresh = model(-1.0)
            with sync.trainer(fresh, resume=True, step=5, **own) as trainer:
                assert (trainer.version, trainer.step, value_of(fresh)) == (4, 5, 5.0)


def test_trainer_resumes_from_the_store_of_its_scheme(tmp_path):
    scheme = StoreScheme(tmp_path / "store", keep=3)
    for run in range(2):
        fresh = model(-1.0)
        with (
            Synchronizer.local(method="checkpoint", store=tmp_path / "other") as sync,
            sync.trainer(fresh, scheme=scheme, resume=True) as trainer,
            sync.explorer("e0", policy := model(0.0)) as explorer,
        ):
            assert value_of(fresh) == (-1.0 if run == 0 else 4.0)
            for step in range(1, 5):
                fill(fresh, float(step))
                assert trainer.sync(step)
            # The versions are the trainer's, and not those of the other store.
            assert [one.version for one in explorer.stored()] == [5 * run + 3, 5 * run + 4, 5 * run + 5]
            assert explorer.load().version == trainer.version
            assert value_of(policy) == 4.0


def test_wrong_argument_replaces_no_explorer():
    with Synchronizer.local() as sync, sync.explorer("e0", model(0.0)) as explorer:
        for arguments in (
            {"model": object()},
            {"model": model(0.0), "eval_interval": 0},
            {"model": model(0.0), "step": -1},
            {"mapping": Mapping().rename("a", "b")},
        ):
            with pytest.raises(weightsync.WeightsyncError):
                sync.explorer("e0", **arguments)
        assert explorer.need_sync(1).connected
        for step in (-1, 1.5, "x", 2**70):
            with pytest.raises(weightsync.WeightsyncError, match="step"):
                explorer.need_sync(step)
    with pytest.raises(weightsync.SettingError, match="history"):
        Synchronizer.local(history=300)
    with pytest.raises(weightsync.SettingError, match="keep"):
        Synchronizer.local(keep=4)


def test_trainer_of_several_models_has_one_version():
    actor, critic = model(1.0), model(2.0)
    with Synchronizer.local() as sync, sync.trainer(models={"actor": actor, "critic": critic}) as trainer:
        assert trainer.version == 1
        with sync.explorer("e0", models={"actor": (a := model(0.0)), "critic": (c := model(0.0))}) as explorer:
            assert explorer.sync(0)
            assert (value_of(a), value_of(c)) == (1.0, 2.0)
            given = {"actor": model(3.0).state_dict(), "critic": model(4.0).state_dict()}
            assert trainer.sync(1, weights=given).version == trainer.version == 2
            assert explorer.sync(1)
            assert (value_of(a), value_of(c)) == (3.0, 4.0)


def test_set_that_does_not_fit_changes_no_model(tmp_path):
    store = tmp_path / "store"
    with Synchronizer.local(method="checkpoint") as sync:
        with sync.trainer(models={"a": model(1.0), "b": model(2.0)}, store=store):
            pass
        # The trainer is gone: the explorer reads the store.
        fits = model(-1.0)
        with sync.explorer("e0", models={"a": fits, "b": model(-1.0, 8)}) as explorer:
            with pytest.raises(weightsync.WrongWeightsError):
                explorer.sync(0)
            assert (explorer.version, value_of(fits)) == (0, -1.0)


def test_mapped_explorer_reads_a_store_without_its_trainer(tmp_path):
    class Inner(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model(0.0)

    policy = Inner()
    mapping = Mapping().rename("*", "inner.*")
    with Synchronizer.local(method="checkpoint") as sync:
        trainer = sync.trainer(model(1.0), store=tmp_path / "store")
        with sync.explorer("e0", policy, mapping=mapping) as explorer:
            assert explorer.sync(0)
            assert value_of(policy) == 1.0
            assert trainer.sync(1, weights=model(2.0).state_dict())
            trainer.shutdown()
            assert explorer.sync(1)
            assert value_of(policy) == 2.0


def test_trainer_sync_out_of_time_is_a_value():
    with Synchronizer.local() as sync:
        with sync.trainer(model(0.0), method="nccl", style="fully_async") as trainer:
            done = trainer.sync(1, timeout=0.05)
            assert not done
            assert done.ended == "timed out"
            assert "no explorer came" in done.reason


def test_ends_say_what_they_are():
    with Synchronizer.local(listen="127.0.0.1:0") as sync:
        assert sync.address in repr(sync)
        with pytest.raises(weightsync.LifecycleError, match="its address"):
            pickle.dumps(sync)
        with sync.trainer(model(0.0), step=3) as trainer, sync.explorer("e0", model(1.0)) as explorer:
            assert repr(trainer).startswith("<Trainer: v1 of step 3")
            assert repr(explorer) == "<Explorer: no version yet>"
            assert explorer.sync(0)
            assert repr(explorer) == "<Explorer: v1>"
    # Nobody is there any more.
    with Synchronizer.connect(sync.address) as gone:
        with pytest.raises(weightsync.PeerError, match="away"):
            gone.explorer("e0", model(0.0), timeout=0.1)


def test_writes_to_loaded_weights_spoil_no_later_version(tmp_path):
    with Synchronizer.local(method="checkpoint") as sync:
        trained = model(1.0)
        with sync.trainer(trained, store=tmp_path / "store") as trainer, sync.explorer("e0") as explorer:
            assert explorer.sync(0)
            # Only what changed is read of the next version, and the rest is taken from here.
            explorer.snapshots["policy"]["weight"].fill_(9.0)
            with torch.no_grad():
                trained.bias[0] = 5.0
            assert trainer.sync(1)
            assert explorer.sync(1)
            loaded = explorer.snapshots["policy"]
            assert torch.equal(loaded["weight"], trained.weight.detach())
            assert torch.equal(loaded["bias"], trained.bias.detach())
