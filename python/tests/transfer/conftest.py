"""The processes of these tests are those of the core's tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

from actors import actors


@pytest.fixture
def actor():
    """Makes an `actors.Actor`; all are ended with the test."""
    with actors() as make:
        yield make
