"""The scheme over torch.distributed.rpc: the trainer's calls make its workers load."""

import pytest
import torch_rpc as scenarios
import weightsync
from crew import Probe, bounded
from tiny import weights_of
from torch.distributed import rpc
from weightsync.torchrl import RPCTransport, RPCWeightSyncScheme


@pytest.mark.parametrize("mode", ["bind", "copy"])
def test_worker_loads_inside_the_trainers_call(ours, mode):
    bounded(scenarios.calls_load, ours, mode)


def test_killed_worker_is_a_line_of_the_report(ours):
    bounded(scenarios.dead_worker, ours)


def test_worker_answers_at_once_if_it_refuses(ours):
    bounded(scenarios.refusal, ours)


def test_refused_weights_leave_no_call_open(ours):
    bounded(scenarios.wrong_weights, ours)


def test_send_ends_by_limit_without_an_answer(ours):
    bounded(scenarios.stopped_worker, ours)


def test_send_ends_if_a_call_fails_at_once(ours):
    bounded(scenarios.failed_call, ours)


@pytest.mark.parametrize("limit", [float("inf"), 1e10, 0])
def test_send_takes_any_limit(ours, limit):
    bounded(scenarios.any_limit, ours, limit)


def test_version_is_late_while_its_model_is_held(ours):
    bounded(scenarios.held_model, ours)


def test_wait_for_answer_ends_by_an_interrupt(ours):
    bounded(scenarios.interrupted, ours)


@pytest.mark.parametrize("mode", ["bind", "copy"])
def test_call_loads_while_no_forward_runs(ours, mode):
    bounded(scenarios.forwards, ours, mode)


def test_shutdown_leaves_no_file_or_thread(ours):
    bounded(scenarios.shut_down, ours)


@pytest.mark.parametrize("ends", ["trainer", "worker"])
def test_waiting_call_ends_by_a_shutdown(ours, ends):
    bounded(scenarios.waiting_call, ours, ends)


def test_joining_worker_shuts_down_at_once(ours):
    bounded(scenarios.joining_worker, ours)


def test_load_that_waits_for_a_forward_ends_by_a_shutdown(ours):
    bounded(scenarios.waiting_load, ours)


def test_own_waits_end_by_their_limits(ours):
    bounded(scenarios.own_waits, ours)


def test_connect_names_a_worker_that_is_not_there(ours):
    bounded(scenarios.missing_worker, ours)


def test_torch_without_rpc_names_the_http_scheme(monkeypatch):
    monkeypatch.setattr(rpc, "is_available", lambda: False)
    with pytest.raises(weightsync.UnsupportedError, match=r"no torch.distributed.rpc.*HTTP"):
        RPCWeightSyncScheme().init_on_sender(model_id="policy", model=Probe(), workers=["one"])
    scheme = RPCWeightSyncScheme()
    with pytest.raises(weightsync.LifecycleError, match="init_on_sender"):
        scheme.init_on_receiver(model_id="policy", model=Probe(), worker_idx=0)


def test_torch_rpc_is_wanted_before_the_scheme():
    with pytest.raises(weightsync.LifecycleError, match="init_rpc"):
        RPCWeightSyncScheme().init_on_sender(model_id="policy", model=Probe(), workers=["one"])


def test_transport_wants_torch_rpc():
    sending = RPCTransport(collector_info="one", worker_rank=1)
    for _ in range(2):
        with pytest.raises(weightsync.LifecycleError, match="init_rpc"):
            sending.send_weights(weights_of(Probe(1.0)))
    sending.shutdown()
