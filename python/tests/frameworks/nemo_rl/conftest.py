"""Worlds of processes that call the checkpoint engine as NeMo-RL does."""

import os
import sys
from pathlib import Path

import pytest

# Files that tests and their processes import.
PLACES = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
sys.path[:0] = PLACES


@pytest.fixture
def start(monkeypatch):
    """Starts a world; settings are those of the user."""
    import nemo_world

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(PLACES), prepend=os.pathsep)
    made = []

    def start(**settings):
        made.append(nemo_world.World({"timeout": 20.0, "release_after_refit": False, **settings}))
        return made[-1]

    yield start
    for world in made:
        world.stop()
