"""Transports without a scheme of this package's: see `transports`."""

import pytest
import torch_rpc
import transports
import weightsync
from crew import bounded
from weightsync.torchrl import DistributedTransport, RPCTransport


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.soak)])
@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "basic"])
def test_queue_transport(ours, start, asynchronous):
    bounded(transports.queue_transport, ours, start, asynchronous)


@pytest.mark.parametrize(
    "per_worker",
    [pytest.param(False, marks=pytest.mark.soak), True],
    ids=["one-for-all", "per-worker"],
)
def test_shared_transport(ours, per_worker):
    bounded(transports.shared_transport, ours, per_worker)


def test_shared_transport_begins_again_if_refused(ours):
    bounded(transports.shared_transport_after_a_refusal, ours)


@pytest.mark.parametrize("module", ["ours", "theirs"])
def test_shared_transport_without_queues_writes(module):
    bounded(transports.shared_transport_without_queues, module)


@pytest.mark.parametrize("module", ["ours", "theirs"])
def test_own_transport(module):
    bounded(transports.own_transport, module)


def test_store_transport_brings_weights(ours):
    bounded(transports.store_transport, ours)


def test_store_transports_of_two_models_stay_apart(ours):
    bounded(transports.store_transports_of_two_models, ours)


def test_rpc_transports_of_two_models_stay_apart(ours):
    bounded(torch_rpc.transports_of_two_models, ours)


@pytest.mark.parametrize("has_collector", [True, False], ids=["collector", "loop"])
def test_rpc_transport_brings_weights(ours, has_collector):
    bounded(torch_rpc.transport, ours, has_collector)


@pytest.mark.parametrize("kind", [DistributedTransport, RPCTransport])
def test_transport_wants_to_know_its_worker(kind):
    with pytest.raises(weightsync.SettingError, match="expected a .*rank"):
        kind()
