"""The older updater for Ray: it waits for all actors, and names those that failed."""

import threading

import pytest
import ray
import weightsync
from crew import Probe
from tensordict import TensorDict
from weightsync.torchrl import RayWeightUpdater, _remote_updaters

# Ray waits a minute for a process that does not come up before it starts another.
pytestmark = [
    pytest.mark.timeout(300, func_only=True),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def actors(cluster):
    made = [ray.remote(num_cpus=0)(Place).remote() for _ in range(2)]
    yield made
    for actor in made:
        ray.kill(actor)


@pytest.fixture
def places(actors):
    ray.get([actor.reset.remote() for actor in actors])
    return actors


class Place:
    """An actor that is updated as TorchRL's collectors are."""

    def reset(self):
        self.value = 0.0

    def update_policy_weights_(self, policy_or_weights):
        (value,) = {one.unique().item() for one in policy_or_weights.values(True, True)}
        if value == 13.0:
            raise RuntimeError("not this one")
        self.value = value

    def read(self):
        return self.value


def weights(value):
    return TensorDict.from_module(Probe(value)).data.clone()


def values(actors):
    return ray.get([actor.read.remote() for actor in actors])


def test_ray_updater_pulls_maps_and_calls_hooks(places):
    class Doubled(RayWeightUpdater):
        def _maybe_map_weights(self, server_weights):
            return super()._maybe_map_weights(server_weights).apply(lambda value: value * 2)

    own, done = weights(1.0), []
    updater = Doubled(own, places)
    updater.register_post_hook(lambda: done.append(values(places)))
    updater.push_weights()
    own.apply_(lambda value: value.fill_(3.0))
    updater()
    updater(Probe(5.0))
    assert done == [[2.0, 2.0], [6.0, 6.0], [10.0, 10.0]]
    updater(weights(4.0), worker_ids=1)
    assert values(places) == [10.0, 8.0]


def test_ray_updater_pulls_from_a_getter(places):
    server = Probe(1.0)
    updater = RayWeightUpdater(weights(0.0), places, weight_getter=lambda: server)
    for value in (2.0, 3.0):
        server.fill(value)
        updater.push_weights()
        assert values(places) == [value, value]
    updater.push_weights(weights(4.0))
    assert values(places) == [4.0, 4.0], "weights that are given come first"


def test_ray_updater_skips_pushes_of_its_interval(places):
    updater = RayWeightUpdater(weights(0.0), places, max_interval=1)
    seen = []
    for value in (1.0, 2.0, 3.0, 4.0):
        updater.push_weights(weights(value))
        seen.append(values(places)[0])
    assert seen == [0.0, 2.0, 2.0, 4.0]


@pytest.mark.parametrize(
    "given, workers, said",
    [
        (lambda: weights(1.0), [0, 7], "no worker 7"),
        (lambda: weights(1.0).exclude(("layers", "1")), None, "missing"),
    ],
)
def test_ray_updater_checks_before_it_pushes(places, given, workers, said):
    updater = RayWeightUpdater(weights(0.0), places)
    with pytest.raises((weightsync.SettingError, weightsync.WrongWeightsError), match=said):
        updater.push_weights(given(), worker_ids=workers)
    assert values(places) == [0.0, 0.0]


def test_ray_updater_waits_once_for_all_actors(cluster, monkeypatch):
    class Stuck:
        def update_policy_weights_(self, policy_or_weights):
            threading.Event().wait()

    limits, get = [], ray.get

    def noted(answer, *, timeout):
        limits.append(timeout)
        return get(answer, timeout=timeout)

    stuck = [ray.remote(num_cpus=0)(Stuck).remote() for _ in range(2)]
    monkeypatch.setattr(_remote_updaters, "WEIGHT_SYNC_TIMEOUT", 1.0)
    monkeypatch.setattr(ray, "get", noted)
    with pytest.raises(weightsync.PeerError, match="2 of 2 .*worker 1: "):
        RayWeightUpdater(weights(0.0), stuck).push_weights(weights(1.0))
    # The second had the time of the first.
    assert len(limits) == 2 and limits[1] < limits[0]
    for actor in stuck:
        ray.kill(actor)


def test_ray_updater_names_actors_that_failed(places):
    updater = RayWeightUpdater(weights(0.0), places)
    with pytest.raises(weightsync.PeerError, match="2 of 2 .*worker 0: not this one"):
        updater.push_weights(weights(13.0))
    ray.kill(places[0])
    with pytest.raises(weightsync.PeerError, match="1 of 2 .*worker 0: The actor"):
        updater.push_weights(weights(2.0))
    assert values(places[1:]) == [2.0]
