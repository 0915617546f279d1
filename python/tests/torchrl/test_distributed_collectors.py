"""TorchRL's distributed collectors with the schemes here, by one changed import."""

import distributed_collectors as scenarios
import pytest
from crew import bounded


@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
@pytest.mark.parametrize("kind", ["rpc", "distributed"])
def test_collector_updates_its_workers(ours, kind, sync):
    bounded(scenarios.updates, ours, kind, sync)


@pytest.mark.parametrize("kind", ["rpc", "distributed"])
def test_collector_reports_a_worker_killed(ours, kind):
    bounded(scenarios.killed, ours, kind)
