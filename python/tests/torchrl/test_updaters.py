"""The older updaters on one host: push to chosen workers, pull, a mapping hook, post-update hooks."""

import pytest
import torch
from crew import Probe
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

import weightsync.torchrl as ours
from weightsync import SettingError, WrongWeightsError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def weights(value):
    return TensorDict.from_module(Probe(value)).data.clone()


def values(weights):
    return {value.unique().item() for value in weights.values(True, True)}


def test_vanilla_pulls_maps_pushes_and_calls_hooks():
    server = Probe(1.0)
    policy = Probe(0.0)
    done = []

    mapped = []

    class Doubled(ours.VanillaWeightUpdater):
        def _maybe_map_weights(self, server_weights):
            mapped.append(server_weights)
            return super()._maybe_map_weights(server_weights).apply(lambda value: value * 2)

    updater = Doubled(
        weight_getter=lambda: TensorDict.from_module(server).data,
        policy_weights=TensorDict.from_module(policy).data.lock_(),
    )
    updater.register_post_hook(lambda: done.append(policy()))
    updater.push_weights()
    assert policy() == (2.0, 2.0)
    server.fill(3.0)
    assert policy() == (2.0, 2.0), "the policy is its own"
    updater()
    updater(weights(5.0))
    assert done == [(2.0, 2.0), (6.0, 6.0), (10.0, 10.0)]
    assert len(mapped) == 3, "the hook is called once for each push"


def test_from_policy_updates_its_own_policy():
    policy = TensorDictModule(torch.nn.Linear(2, 1), in_keys=["a"], out_keys=["b"])
    updater = ours.VanillaWeightUpdater.from_policy(policy)
    other = TensorDictModule(torch.nn.Linear(2, 1), in_keys=["a"], out_keys=["b"])
    updater.push_weights(other)
    assert torch.equal(policy.module.weight, other.module.weight)


def test_multi_processed_updates_chosen_workers_alone():
    places = {0: weights(0.0), 1: weights(0.0)}
    updater = ours.MultiProcessedWeightUpdater(
        get_server_weights=lambda: weights(4.0), policy_weights=places
    )
    assert updater.all_worker_ids() == [0, 1]
    updater.push_weights(weights(1.0), worker_ids=1)
    assert (values(places[0]), values(places[1])) == ({0.0}, {1.0})
    updater.push_weights()
    assert (values(places[0]), values(places[1])) == ({4.0}, {4.0})


@pytest.mark.parametrize(
    "given, workers, said",
    [
        (lambda: weights(1.0), [0, 7], "no worker 7"),
        (lambda: weights(1.0).exclude(("layers", "1")), None, "missing"),
        (lambda: TensorDict.from_module(Probe(1.0, numel=5)).data, None, "expected"),
    ],
)
def test_updaters_check_all_weights_before_a_change(given, workers, said):
    places = {0: weights(0.0), 1: weights(0.0)}
    updater = ours.MultiProcessedWeightUpdater(get_server_weights=None, policy_weights=places)
    with pytest.raises((SettingError, WrongWeightsError), match=said):
        updater.push_weights(given(), worker_ids=workers)
    assert (values(places[0]), values(places[1])) == ({0.0}, {0.0})
