"""What the tests of the TorchRL face share; the processes they start are in `crew`."""

import importlib.util

import pytest


@pytest.fixture
def ours():
    """The name under which `crew.MODULES` has this project's schemes."""
    if importlib.util.find_spec("weightsync") is None:
        pytest.fail("weightsync is not installed")
    return "ours"
