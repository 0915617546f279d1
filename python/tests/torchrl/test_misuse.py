"""Calls that a scheme refuses before anything changes, and what they say."""

import logging

import pytest
import torch
from crew import Probe
from test_local import KINDS, copied, ended, meet, weights

import weightsync.torchrl as ours
from weightsync import LifecycleError, ModelError, SettingError


@pytest.fixture(params=KINDS)
def connected(request):
    """A sender's scheme, and its worker's model."""
    sender, model = request.param(), Probe()
    sender.init_on_sender(model_id="policy", model=Probe(1.0), devices=[torch.device("cpu")])
    receiver = copied(sender)
    with ended(receiver, sender):
        receiver.init_on_receiver(model_id="policy", model=model, worker_idx=0)
        meet(sender, receiver)
        yield sender, model


def test_scheme_goes_on_after_a_second_init(connected):
    sender, model = connected
    with pytest.raises(LifecycleError, match="has its workers: call shutdown"):
        sender.init_on_sender(model_id="policy", model=Probe(9.0), num_workers=1)
    assert sender.send(Probe(2.0)).all_applied
    assert model() == (2.0, 2.0)
    sender.shutdown()
    sender.init_on_sender(model_id="policy", model=Probe(9.0), num_workers=1)


@pytest.mark.parametrize("wrong", ["worker0", ["worker0"], [1.0]])
def test_worker_ids_are_numbers_or_devices(connected, wrong):
    sender, model = connected
    with pytest.raises(SettingError, match="expected numbers of workers, or their devices"):
        sender.send(Probe(2.0), worker_ids=wrong)
    assert model() == (1.0, 1.0)


@pytest.mark.parametrize("wrong", ["worker0", 2, [], {"worker0"}])
def test_workers_of_torch_rpc_are_a_list(wrong):
    with pytest.raises(SettingError, match="expected a list of the workers' names"):
        ours.RPCWeightSyncScheme().init_on_sender(
            model_id="policy", model=Probe(), workers=wrong, num_workers=2
        )


def test_workers_of_torch_rpc_fit_their_number():
    with pytest.raises(SettingError, match="expected 2, as many as workers, got 5"):
        ours.RPCWeightSyncScheme().init_on_sender(
            model_id="policy", model=Probe(), workers=["one", "two"], num_workers=5
        )


def test_ray_collector_names_its_scheme():
    class Context:
        """What a scheme sees of a RayCollector."""

        remote_collectors = ()

    with pytest.raises(SettingError, match="RayCollector takes RayWeightSyncScheme, not Shared"):
        ours.SharedMemWeightSyncScheme().init_on_sender(
            model_id="policy", context=Context(), model=Probe(), remote_collectors=()
        )


def test_model_of_workers_alone_names_the_way():
    class Context:
        """What a scheme sees of a collector whose environments are in its workers."""

        num_workers = 2

    with pytest.raises(ModelError, match="'env.value_net'.*Context may have its environments in"):
        ours.DistributedWeightSyncScheme().init_on_sender(
            model_id="env.value_net", context=Context(), num_workers=2
        )


def test_own_weights_start_without_a_warning(caplog):
    sender, models = ours.SharedMemWeightSyncScheme(), [Probe(), Probe()]
    sender.init_on_sender(
        model_id="policy", params_map={0: weights(Probe(1.0)), 1: weights(Probe(2.0))}
    )
    receivers = [copied(sender) for _ in models]
    with ended(*receivers, sender), caplog.at_level(logging.WARNING, "weightsync"):
        for number, (receiver, model) in enumerate(zip(receivers, models, strict=True)):
            receiver.init_on_receiver(model_id="policy", model=model, worker_idx=number)
        meet(sender, *receivers)
        assert [model() for model in models] == [(1.0, 1.0), (2.0, 2.0)]
    assert not caplog.records


def test_model_of_one_worker_says_where_it_is():
    current = ours._given.initial_only(Probe(), "module", "is the transform's module, in its actor")
    current.spent()
    with pytest.raises(ModelError, match="'module' is the transform's module.*pass the weights"):
        current()
