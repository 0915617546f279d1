"""A version of a store in an engine: it loads the directory that ``pull`` writes, as it is."""

from __future__ import annotations

import tiny

import weightsync


def test_pulled_directory_answers_as_transformers(made, tmp_path):
    model = tiny.llama()
    config = {"config.json": model.config.to_json_string().encode()}
    with weightsync.Store(tmp_path / "store", files=config) as store:
        for step in range(3):
            tiny.change(model, step, share=0.01)
            store.save(model)
        assert [version.models[0].deltas for version in store.versions()] == [0, 1, 2]
        assert store.pull(tmp_path / "out") == 3
    assert tiny.ask(made(tmp_path / "out")) == tiny.greedy(model)
