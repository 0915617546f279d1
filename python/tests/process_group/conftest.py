"""The processes of these tests are those of the core's tests."""

import sys
from pathlib import Path

from patience import patience
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

from actors import actors
from group_ranks import Rank, free_port


@pytest.fixture
def ranks():
    """Makes as many ranks of one gloo group as asked for; all are ended with the test."""
    with actors() as make:

        def start(world, timeout=patience(30)):
            port = free_port()
            return [make(Rank, rank, world, port, timeout) for rank in range(world)]

        yield start
