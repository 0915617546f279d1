"""A load that fails midway, on an engine of two ranks: all of them go back, or none goes on."""

from __future__ import annotations

from pathlib import Path

import faulty
import pytest
import tiny

import weightsync
from weightsync.vllm import Trainer


@pytest.fixture(scope="module")
def llm(made, tmp_path_factory):
    # A package of its own brings the backend to all of vLLM's processes.
    packages = tmp_path_factory.mktemp("packages")
    info = packages / "faulty-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nfaulty = faulty:register\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        # Spawned processes have this process's path.
        patch.syspath_prepend(packages)
        faulty.register()
        yield made(
            tiny.llama(),
            weight_transfer_config={"backend": faulty.NAME},
            tensor_parallel_size=2,
        )


@pytest.fixture(scope="module")
def told(llm):
    return faulty.told_in(Path(llm.llm_engine.model_config.model))


@pytest.fixture
def model():
    return tiny.llama(1)


@pytest.fixture
def trainer(llm, told, model):
    told.unlink(missing_ok=True)
    with weightsync.Sender(model) as sender:
        yield Trainer(sender, [llm])


def test_a_first_load_that_fails_brings_the_first_weights_back(llm, told, model, trainer):
    told.write_text("0 1")
    (line,) = trainer.sync().engines
    assert (line.outcome, line.version) == ("kept old", None)
    assert "the load failed midway" in line.reason
    assert tiny.ask(llm) == tiny.greedy(tiny.llama())
    assert llm.get_weight_version() == "default"
    assert trainer.sync().all_synced
    assert tiny.ask(llm) == tiny.greedy(model)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_that_fails_brings_the_old_weights_back(llm, told, model, trainer, rank):
    assert trainer.sync().all_synced
    before, label = tiny.greedy(model), llm.get_weight_version()
    for seed in range(2):
        tiny.change(model, seed)
        told.write_text(f"{rank} 1")
        (line,) = trainer.sync().engines
        assert (line.outcome, line.version) == ("kept old", 1)
        assert f"rank {rank}: RuntimeError: the load failed midway" in line.reason
        assert tiny.ask(llm) == before
        assert llm.get_weight_version() == label
        workers = trainer._sender.workers
        assert [worker.version for worker in workers] == [1, 1]
    report = trainer.sync()
    assert report.all_synced, report
    assert tiny.ask(llm) == tiny.greedy(model)


def test_an_engine_without_whole_weights_is_held_until_a_sync_succeeds(llm, told, model, trainer):
    assert trainer.sync().all_synced
    tiny.change(model, 3)
    # The load, the way back, and the restore that is tried after it.
    told.write_text("1 3")
    (line,) = trainer.sync().engines
    assert (line.outcome, line.version) == ("held", None), line
    assert llm.llm_engine.engine_core.call_utility("is_scheduler_paused")
    told.write_text("1 2")
    (line,) = trainer.sync().engines
    assert line.outcome == "kept old", line
    assert tiny.ask(llm) != tiny.greedy(model)
    report = trainer.sync()
    assert report.all_synced, report
    assert tiny.ask(llm) == tiny.greedy(model)
