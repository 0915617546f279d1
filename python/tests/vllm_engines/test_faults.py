"""Loads that fail, and sleeps that discard, on an engine of two ranks: all go back, or none goes on."""

from __future__ import annotations

from pathlib import Path

import faulty
import pytest
import tiny

import weightsync
from weightsync.vllm import Trainer
from weightsync.engines import EngineCallError
from weightsync.vllm._engines import LLMEngine


@pytest.fixture(scope="module")
def llm(made, faults):
    settings = {"weight_transfer_config": {"backend": faults}, "tensor_parallel_size": 2}
    return made(tiny.llama(), **settings)


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


def test_failed_first_load_keeps_first_weights(llm, told, model, trainer):
    told.write_text("0 1")
    (line,) = trainer.sync().engines
    assert (line.outcome, line.version) == ("kept old", None)
    assert "the load failed midway" in line.reason
    assert tiny.ask(llm) == tiny.greedy(tiny.llama())
    assert llm.get_weight_version() == "default"
    assert trainer.sync().all_synced
    assert tiny.ask(llm) == tiny.greedy(model)


@pytest.mark.parametrize("rank", [0, 1])
def test_failed_load_keeps_old_weights(llm, told, model, trainer, rank):
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


def test_engine_is_held_until_its_weights_are_whole(llm, told, model, trainer):
    assert trainer.sync().all_synced
    tiny.change(model, 3)
    # The load, the way back, and the restore that is tried after it.
    told.write_text("1 3")
    (line,) = trainer.sync().engines
    assert (line.outcome, line.version) == ("held", None), line
    assert tiny.ask_core(llm, "is_scheduler_paused")
    told.write_text("1 2")
    (line,) = trainer.sync().engines
    assert line.outcome == "kept old", line
    assert tiny.ask(llm) != tiny.greedy(model)
    report = trainer.sync()
    assert report.all_synced, report
    assert tiny.ask(llm) == tiny.greedy(model)


def test_refresh_repairs_a_failed_load(llm, told, model, trainer):
    assert trainer.sync().all_synced
    tiny.change(model, 4)
    told.write_text("1 1")
    assert [line.outcome for line in trainer.sync().engines] == ["kept old"]
    report = trainer.refresh()
    assert report.all_synced, report
    assert report.engines[0].version == 2
    assert tiny.ask(llm) == tiny.greedy(model)


@pytest.mark.parametrize("level", [1, 2])
def test_engine_wakes_with_whole_weights(llm, model, trainer, level):
    assert trainer.sync().all_synced
    trainer.sleep(level=level)
    # Nothing was sent meanwhile: the version is the one that the engine had.
    report = trainer.wake()
    assert report.all_synced, report
    assert report.engines[0].version == 1
    assert tiny.ask(llm) == tiny.greedy(model)
    trainer.sleep(level=level)
    tiny.change(model, 5)
    assert [line.outcome for line in trainer.sync().engines] == ["asleep"]
    report = trainer.wake()
    assert (report.all_synced, report.engines[0].version) == (True, 2), report
    assert tiny.ask(llm) == tiny.greedy(model)


def test_first_weights_survive_a_sleep_that_discards(llm, told, model, trainer):
    told.write_text("0 1")
    assert [line.version for line in trainer.sync().engines] == [None]
    before = tiny.ask(llm)
    trainer.sleep(level=2)
    told.write_text("0 1")
    # The load of the newest version fails; its weights are gone, and it must not serve.
    (line,) = trainer.wake().engines
    assert line.outcome == "asleep", line
    assert "the load failed midway" in line.reason
    assert tiny.ask_core(llm, "is_scheduler_paused")
    report = trainer.wake()
    assert report.all_synced, report
    assert tiny.ask(llm) == tiny.greedy(model) != before


@pytest.mark.parametrize("call", ["start", "wake", "resume"])
def test_failed_wake_leaves_the_engine_asleep(llm, model, call):
    failures = []

    class Failing(LLMEngine):
        def _do(self, name, timeout, **arguments):
            of = {"start": "start_weight_update", "wake": "wake_up", "resume": "wake_up"}[call]
            tags = {"wake": ["kv_cache"], "resume": ["scheduling"]}.get(call)
            if failures and name == of and arguments.get("tags") == tags:
                raise EngineCallError(failures.pop())
            return super()._do(name, timeout, **arguments)

    with weightsync.Sender(model) as sender:
        trainer = Trainer(sender, [Failing("LLM", llm)])
        assert trainer.sync().all_synced
        trainer.sleep(level=2)
        tiny.change(model, 6)
        failures.append("it failed halfway")
        (line,) = trainer.wake().engines
        assert (line.outcome, failures) == ("asleep", []), line
        assert "it failed halfway" in line.reason
        assert [line.outcome for line in trainer.sync().engines] == ["asleep"]
        report = trainer.wake()
        assert report.all_synced, report
        assert tiny.ask(llm) == tiny.greedy(model)
