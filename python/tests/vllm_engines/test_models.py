"""Models whose second load other systems corrupt."""

from __future__ import annotations

import pytest
import tiny

import weightsync
from weightsync.vllm import Trainer


@pytest.mark.parametrize("name", ["experts", "tied"])
def test_ten_loads_in_a_row_answer_as_transformers(made, monkeypatch, name):
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
