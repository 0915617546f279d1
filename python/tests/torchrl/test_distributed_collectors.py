"""TorchRL's distributed collectors with the schemes here, by one changed import."""

import distributed_collectors as scenarios
import pytest
from crew import bounded


@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
@pytest.mark.parametrize("kind", ["rpc", "distributed"])
def test_collector_updates_its_workers(ours, kind, sync):
    bounded(scenarios.updates, ours, kind, sync)


@pytest.mark.parametrize("kind", ["rpc", "distributed"])
def test_nested_collector_passes_versions_on(ours, kind):
    bounded(scenarios.nested, ours, kind)


@pytest.mark.parametrize("kind", ["rpc", "distributed"])
def test_collector_updates_policies_of_a_factory(ours, kind):
    bounded(scenarios.factory, ours, kind)


@pytest.mark.parametrize("kind", ["rpc", "distributed"])
def test_collector_reports_a_worker_killed(ours, kind):
    bounded(scenarios.killed, ours, kind)


@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
@pytest.mark.parametrize("kind", ["rpc", "distributed"])
def test_updater_pushes_to_its_collectors_workers(ours, kind, sync):
    bounded(scenarios.updater, ours, kind, sync)


def test_updater_pushes_without_waiting(ours):
    bounded(scenarios.pushed_in_the_background, ours)


@pytest.mark.parametrize("kind", ["rpc", "distributed"])
def test_updater_names_a_worker_killed(ours, kind):
    bounded(scenarios.updater_and_killed_worker, ours, kind)


def test_sync_collector_sends_before_each_batch(ours):
    bounded(scenarios.sync_collector, ours)
