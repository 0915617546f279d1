"""Transports without a scheme of this package's: see `transports`."""

import pytest
import transports
from crew import bounded


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "basic"])
def test_queue_transport(ours, start, asynchronous):
    bounded(transports.queue_transport, ours, start, asynchronous)


@pytest.mark.parametrize("per_worker", [False, True], ids=["one-for-all", "per-worker"])
def test_shared_transport(ours, per_worker):
    bounded(transports.shared_transport, ours, per_worker)


@pytest.mark.parametrize("module", ["ours", "theirs"])
def test_own_transport(module):
    bounded(transports.own_transport, module)
