"""Models whose second load other systems corrupt."""

from __future__ import annotations

import pytest
import tiny

import weightsync
from weightsync.vllm import Trainer
from weightsync.vllm._load import VllmPlace


@pytest.mark.parametrize("name", ["experts", "tied"])
def test_ten_loads_answer_as_transformers(made, monkeypatch, name):
    # The engine's core runs in this process, too.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    model = tiny.mixtral() if name == "experts" else tiny.llama(tied=True)
    llm = made(model)
    with weightsync.Sender(model) as sender:
        trainer = Trainer(sender, [llm])
        for step in range(1, 11):
            tiny.change(model, step)
            report = trainer.sync(step=step)
            assert report.all_synced, report
            assert tiny.ask(llm) == tiny.greedy(model), step
        if name == "experts":
            check_the_way_back(llm, model, monkeypatch)


def check_the_way_back(llm, model, monkeypatch):
    """What was sent in the form of memory comes back, after one in the checkpoint's form failed."""
    from safetensors.torch import load_file

    folder = llm.llm_engine.model_config.model
    load = VllmPlace.load
    failures = [RuntimeError("the load failed")]

    def failing(place, tensors, version):
        for failure in [failures.pop()] if failures else []:
            raise failure
        load(place, tensors, version)

    monkeypatch.setattr(VllmPlace, "load", failing)
    checkpoint = load_file(f"{folder}/model.safetensors")
    with weightsync.Sender(checkpoint) as sender:
        trainer = Trainer(sender, [llm])
        (line,) = trainer.sync().engines
        assert line.outcome == "kept old", line
        assert tiny.ask(llm) == tiny.greedy(model)
        assert trainer.sync().all_synced
        assert tiny.ask(llm) == tiny.greedy(tiny.mixtral())
