"""A server of two ranks: both load a version, or both go back to the one before."""

from __future__ import annotations

import pytest
import sglang_server

import weightsync
from weightsync.sglang import Engine, Trainer


@pytest.fixture
def model():
    return sglang_server.llama(7)


@pytest.fixture
def trainer(wide, model):
    with weightsync.Sender(model) as sender:
        made = Trainer(sender, [Engine(wide.url)])
        yield made
        made.remove(wide.url)


def test_ranks_answer_as_transformers_five_times(wide, model, trainer):
    for step in range(1, 6):
        sglang_server.change(model, step)
        report = trainer.sync(step)
        assert report.all_synced, report
        assert wide.ask() == sglang_server.greedy(model), step
        assert [worker.version for worker in trainer._sender.workers] == [step, step]


@pytest.mark.parametrize("rank", [0, 1])
def test_failed_load_keeps_old_weights_of_all_ranks(wide, model, trainer, rank):
    assert trainer.sync(1).all_synced
    before = sglang_server.greedy(model)
    sglang_server.change(model, 1)
    wide.fail("raise", rank=rank)
    (line,) = trainer.sync(2).engines
    assert (line.outcome, line.version) == ("kept old", 1), line
    assert f"rank {rank}: RuntimeError: the load failed midway" in line.reason
    assert wide.ask() == before
    assert [worker.version for worker in trainer._sender.workers] == [1, 1]
    report = trainer.sync(3)
    assert report.all_synced, report
    assert wide.ask() == sglang_server.greedy(model)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_are_held_until_all_are_whole(wide, model, trainer, rank):
    assert trainer.sync(1).all_synced
    sglang_server.change(model, 2)
    # The load, the way back, and the restore that is tried after it.
    wide.fail("raise", loads=3, rank=rank)
    (line,) = trainer.sync(2).engines
    assert (line.outcome, line.version) == ("held", None), line
    report = trainer.sync(3)
    assert report.all_synced, report
    assert wide.ask() == sglang_server.greedy(model)


def test_another_model_is_refused_by_all_ranks(wide):
    before = wide.ask()
    with weightsync.Sender(sglang_server.llama(intermediate_size=64)) as sender:
        trainer = Trainer(sender, [Engine(wide.url)])
        (line,) = trainer.sync().engines
        assert (line.outcome, line.pause) == ("kept old", None)
        for rank in (0, 1):
            assert f"rank {rank}: " in line.reason, line
        assert "is not this engine's model: another shape: " in line.reason
        assert wide.ask() == before
        trainer.remove(wide.url)
