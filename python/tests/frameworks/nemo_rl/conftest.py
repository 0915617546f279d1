"""Worlds of processes that call the checkpoint engine as NeMo-RL does."""

import sys
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)
sys.path.insert(0, HERE)


@pytest.fixture
def start(monkeypatch):
    """Starts a world; settings are those of the user."""
    import os

    import nemo_world

    monkeypatch.setenv("PYTHONPATH", HERE, prepend=os.pathsep)
    made = []

    def start(**settings):
        made.append(nemo_world.World({"timeout": 20.0, "release_after_refit": False, **settings}))
        return made[-1]

    yield start
    for world in made:
        world.stop()
