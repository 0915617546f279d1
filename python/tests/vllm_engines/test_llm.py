"""An ``LLM`` in the trainer's process: greedy tokens are transformers' after every update."""

from __future__ import annotations

import pytest
import tiny

import weightsync
from weightsync.vllm import Trainer

#: Hosts of their own, on one: what changed travels.
DELTAS = "distributed:listen=127.0.0.1:0,share=none,deltas=always"


@pytest.fixture(scope="module")
def llm(made):
    return made(tiny.llama())


def test_llm_answers_as_transformers_after_each_of_ten_updates(llm):
    model = tiny.llama()
    assert tiny.ask(llm) == tiny.greedy(model)
    with weightsync.Sender(model) as sender:
        trainer = Trainer(sender, [llm])
        for step in range(1, 11):
            tiny.change(model, step)
            report = trainer.sync(step=step)
            assert report.all_synced, report
            assert tiny.ask(llm) == tiny.greedy(model), step
            assert llm.get_weight_version() == str(step)
        (line,) = report.engines
        assert (line.engine, line.version, line.reason) == ("LLM 0", 10, None)
        assert 0 < line.pause < line.took
        assert str(report).splitlines()[0] == "v10 is on 1 of 1 engines"
        assert report.to_dict()["engines"][0]["outcome"] == "updated"
        spans = tiny.requests(llm)[0].outputs[0].weight_versions
        assert [span.version for span in spans] == ["10"]


def test_deltas_are_a_small_part_of_the_bytes(llm):
    model = tiny.llama(3)
    with weightsync.Sender(model, scheme=DELTAS) as sender:
        trainer = Trainer(sender, [llm])
        whole = trainer.sync().engines[0].bytes
        for seed in range(3):
            tiny.change(model, seed, share=0.01)
            report = trainer.sync()
            assert report.all_synced, report
            assert tiny.ask(llm) == tiny.greedy(model)
        assert 0 < report.engines[0].bytes < whole / 20


def test_another_model_is_refused_before_the_pause(llm):
    model = tiny.llama(4)
    with weightsync.Sender(model) as sender:
        assert Trainer(sender, [llm]).sync().all_synced
    other = tiny.llama(5, intermediate_size=256, num_hidden_layers=3)
    with weightsync.Sender(other) as sender:
        trainer = Trainer(sender, [llm])
        for _ in range(2):
            (line,) = trainer.sync().engines
            assert (line.outcome, line.pause) == ("kept old", None)
            for part in (
                "not in the model: model.layers.2.",
                "model.layers.0.mlp.gate_proj.weight is [256, 128] and should be [128, 128]",
            ):
                assert part in line.reason, line.reason
    assert tiny.ask(llm) == tiny.greedy(model)


def test_an_engine_that_sleeps_wakes_with_the_newest_version(llm):
    model = tiny.llama(6)
    with weightsync.Sender(model) as sender:
        trainer = Trainer(sender, [llm])
        assert trainer.sync().all_synced
        trainer.sleep(level=0)
        for seed in range(2):
            tiny.change(model, seed)
            (line,) = trainer.sync().engines
            assert (line.outcome, line.version) == ("asleep", 1)
        (line,) = trainer.wake().engines
        assert (line.outcome, line.version) == ("updated", 3)
        assert tiny.ask(llm) == tiny.greedy(model)
        (line,) = trainer.refresh().engines
        assert (line.outcome, line.pause) == ("updated", None)


def test_an_engine_that_does_not_exist_is_one_line(llm):
    model = tiny.llama(7)
    with weightsync.Sender(model) as sender:
        trainer = Trainer(sender, ["http://127.0.0.1:9", llm], timeout=20)
        report = trainer.sync()
        assert [line.outcome for line in report.engines] == ["dead", "updated"]
        assert [line.engine for line in report.failed] == ["http://127.0.0.1:9"]
        assert tiny.ask(llm) == tiny.greedy(model)
        trainer.remove("http://127.0.0.1:9")
        assert trainer.sync().all_synced
