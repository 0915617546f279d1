"""What needs a GPU. Run by name, where there is one: ``cargo xtask pytest python/tests/gpu``."""

import sys
from pathlib import Path

import pytest
import torch

for folder in ("core", "transfer", "process_group"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))

from actors import actors


@pytest.fixture(autouse=True, scope="session")
def gpu():
    """Fails without a GPU: these tests are never skipped."""
    if not torch.cuda.is_available():
        pytest.fail(
            "these tests need a GPU, and torch finds none: run them where nvidia-smi lists one, "
            "with a torch that is built for CUDA"
        )


@pytest.fixture
def actor():
    """Makes an `actors.Actor`; all are ended with the test."""
    with actors() as make:
        yield make
