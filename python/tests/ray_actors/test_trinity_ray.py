"""Trinity's synchronizer as a Ray actor."""

import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch
from trinity_world import (
    RUNNING,
    STEPS,
    check,
    config,
    explore,
    state,
    train,
    value_of,
    write_checkpoint,
)

from weightsync.trinity import Synchronizer

# Ray waits a minute for a process that does not come up before it starts another.
pytestmark = pytest.mark.timeout(300)


class Party:
    """A process as those of Trinity's trainer and explorers."""

    def join(self, of):
        self.folder, self.namespace = of.checkpoint_job_dir, of.ray_namespace
        self.synchronizer = Synchronizer.get_actor(of)

    def call(self, name, *arguments):
        import ray

        return ray.get(getattr(self.synchronizer, name).remote(*arguments))

    def iterate(self):
        import ray

        # As Trinity's engines, which have its name alone.
        synchronizer = Synchronizer.get_actor(namespace=self.namespace)
        return dict(ray.get(item) for item in synchronizer.get_model_state_dict_iterator.remote())

    def ask(self):
        return list(self.synchronizer.get_model_state_dict_iterator.remote())

    def read(self, items):
        import ray

        return value_of(ray.get(items))

    def pid(self):
        return os.getpid()

    def train(self, method, style):
        def publish(step):
            if method == "memory":
                self.call("set_model_state_dict", state(float(step)), step)
            else:
                write_checkpoint(self.folder, step)

        published = []

        def published_too(step):
            publish(step)
            published.append(step)

        # One step comes without an explorer. After it, one has to have asked if the style is theirs.
        first = iter([True])
        train(
            self.call,
            style,
            published_too,
            lambda: style == "fixed" or next(first, False) or bool(published),
        )

    def explore(self, method, pause):
        def load(version):
            if method == "memory":
                return value_of(self.iterate())
            return value_of(torch.load(Path(self.folder, f"global_step_{version}/actor/model.pt")))

        return explore(self.call, load, pause=pause)


class Member(Party):
    """A party that is in a process group, as Trinity's are with the method nccl; here it is gloo's."""

    def __init__(self, of, rank):
        self.rank = rank
        self.join(of)
        self.call(*((("set_trainer_status", RUNNING), ("set_explorer_status", RUNNING))[rank]))

    def get_weight_sync_info(self):
        return "an address", 7, "names"

    def setup_weight_sync_group(self, *arguments):
        assert arguments == ("an address", 7, 2, "weights", 60.0)
        where = f"file://{self.folder}/group"
        torch.distributed.init_process_group("gloo", init_method=where, rank=self.rank, world_size=2)

    def set_state_dict_meta(self, meta):
        assert meta == "names"

    def teardown_weight_sync_group(self):
        torch.distributed.destroy_process_group()

    def sync(self, step):
        version = self.call("ready_to_nccl_sync", ("trainer", "explorer")[self.rank], step)
        weights = state(float(step))
        for tensor in weights.values():
            torch.distributed.broadcast(tensor, 0)
        return version, value_of(weights)

    def train(self, style):
        synced = []
        for step in range(1, STEPS + 1):
            while style == "explorer_driven" and not self.call("explorer_requires_sync"):
                time.sleep(0.001)
            if style == "explorer_driven" or step % 2 == 0:
                synced.append(self.sync(step))
            if len(synced) == STEPS // 2:
                break
        return synced

    def explore(self):
        synced = [(0, 0.0)]
        for step in range(1, STEPS + 1):
            if step % 2 == 0:
                synced.append(self.sync(synced[-1][0]))
        return synced[1:]


@pytest.fixture(scope="module")
def cluster(alone, importable):
    ray = pytest.importorskip("ray")
    # Sockets lie below it, whose paths may not be long.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    ray.init(
        num_cpus=2,
        object_store_memory=80 << 20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _temp_dir=folder,
    )
    yield ray
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def crew(cluster):
    """A trainer and two explorers, which join one synchronizer after the other."""
    made = [cluster.remote(Party).options(num_cpus=0).remote() for _ in range(3)]
    yield made
    for one in made:
        cluster.kill(one)


@pytest.fixture
def started(cluster):
    """Starts a process of its own for a party."""
    made = []

    def start(of, kind=Party, *arguments, **options):
        one = cluster.remote(kind).options(num_cpus=0, **options).remote(*arguments)
        made.append(one)
        if kind is Party:
            cluster.get(one.join.remote(of))
        return one

    yield start
    for one in made:
        cluster.kill(one)


def ended(ray, namespace):
    try:
        ray.get_actor("synchronizer", namespace=namespace)
    except ValueError:
        return True
    return False


def kill(ray, party):
    """Ends a process as the system does where memory is short."""
    os.kill(ray.get(party.pid.remote()), signal.SIGKILL)


@pytest.mark.parametrize("style", ["fixed", "explorer_driven"])
@pytest.mark.parametrize("method", ["memory", "checkpoint"])
def test_ray_explorers_load_what_they_are_told(cluster, crew, tmp_path, method, style):
    of = config(tmp_path, method, namespace=f"{method} {style}")
    cluster.get([party.join.remote(of) for party in crew])
    trainer, *explorers = crew
    training = trainer.train.remote(method, style)
    # Explorers that begin before the trainer are told at once that there is nothing.
    synchronizer = Synchronizer.get_actor(namespace=of.ray_namespace)

    def has_begun():
        if style == "fixed":
            return cluster.get(synchronizer.get_latest_model_version.remote()) > 0
        return cluster.get(synchronizer.trainer_requires_weight_sync.remote()) is not None

    while not has_begun():
        time.sleep(0.01)
    exploring = [
        party.explore.remote(method, pause) for party, pause in zip(explorers, (0.02, 0.0), strict=True)
    ]
    for loaded in cluster.get(exploring):
        check(loaded)
    cluster.get(training)


@pytest.mark.parametrize("style", ["fixed", "explorer_driven"])
def test_ray_trainer_and_explorer_meet_for_nccl(cluster, started, tmp_path, style):
    of = config(tmp_path, "nccl", namespace=f"nccl {style}")
    both = [
        started(of, Member, of, rank, name=name, namespace=of.ray_namespace)
        for rank, name in enumerate(("trainer", "explorer"))
    ]
    synchronizer = cluster.get(both[0].pid.remote()) and Synchronizer.get_actor(
        namespace=of.ray_namespace
    )
    cluster.get(both[1].pid.remote())
    cluster.get(synchronizer.coordinate_weight_sync_setup.remote())
    trained, explored = cluster.get([both[0].train.remote(style), both[1].explore.remote()])
    assert trained == explored
    assert len(explored) == STEPS // 2
    check(explored)
    cluster.get(synchronizer.coordinate_weight_sync_teardown.remote())


@pytest.mark.parametrize(("method", "expected"), [("memory", True), ("checkpoint", False)])
def test_synchronizer_has_torch_before_the_first_sync(cluster, started, tmp_path, method, expected):
    def has_torch(_):
        import sys

        return "torch" in sys.modules

    of = config(tmp_path, method, namespace=f"torch {method}")
    trainer = started(of)
    cluster.get(trainer.call.remote("set_trainer_status", RUNNING))
    synchronizer = Synchronizer.get_actor(namespace=of.ray_namespace)
    assert cluster.get(synchronizer.__ray_call__.remote(has_torch)) == expected


def test_old_answer_still_brings_its_weights(cluster, started, tmp_path):
    of = config(tmp_path, namespace="old answer")
    trainer, explorer = started(of), started(of)

    def publish(*steps):
        for step in steps:
            cluster.get(trainer.call.remote("set_model_state_dict", state(float(step)), step))

    publish(1)
    assert cluster.get(explorer.call.remote("wait_new_model_state_dict", 0)) == 1
    items = cluster.get(explorer.ask.remote())
    publish(2)
    newest = Synchronizer.get_actor(namespace=of.ray_namespace).get_model_state_dict.remote()
    cluster.wait([newest])
    publish(3, 4, 5)
    assert cluster.get(explorer.read.remote(items)) == 1.0
    # No explorer was told of v2, so it is gone.
    weights, version = cluster.get(newest)
    assert (value_of(weights), version) == (5.0, 5)


def test_synchronizer_outlives_the_trainer(cluster, started, tmp_path):
    of = config(tmp_path, namespace="outlives")
    trainer, first, second = (started(of) for _ in range(3))
    cluster.get(trainer.train.remote("memory", "fixed"))
    kill(cluster, trainer)
    # Its weights are still there.
    assert cluster.get(first.explore.remote("memory", 0.0)) == [(8, 8.0)]
    kill(cluster, first)
    assert cluster.get(second.explore.remote("memory", 0.0)) == [(8, 8.0)]
    assert not ended(cluster, "outlives")
    kill(cluster, second)
    while not ended(cluster, "outlives"):
        time.sleep(0.01)


def test_killed_explorer_does_not_block_the_trainer(cluster, started, tmp_path):
    of = config(tmp_path, "nccl", timeout=3600.0, namespace="killed explorer")
    trainer, explorer, killed = (started(of) for _ in range(3))
    cluster.get(trainer.call.remote("set_trainer_status", RUNNING))
    for one in (explorer, killed):
        cluster.get(one.call.remote("set_explorer_status", RUNNING))
    meeting = [
        trainer.call.remote("ready_to_nccl_sync", "trainer", 2),
        explorer.call.remote("ready_to_nccl_sync", "explorer", 0),
    ]
    kill(cluster, killed)
    assert cluster.get(meeting) == [2, 2]
    # Without any explorer it does not wait at all, and none requires anything.
    waiting = trainer.call.remote("ready_to_nccl_sync", "trainer", 4)
    kill(cluster, explorer)
    assert cluster.get(waiting) is None
    assert not cluster.get(trainer.call.remote("explorer_requires_sync"))


def test_killed_trainer_does_not_block_explorers(cluster, started, tmp_path):
    of = config(tmp_path, timeout=3600.0, namespace="killed trainer")
    trainer, explorer = started(of), started(of)
    cluster.get(trainer.call.remote("set_trainer_status", RUNNING))
    cluster.get(explorer.call.remote("set_explorer_status", RUNNING))
    waiting = explorer.call.remote("wait_new_model_state_dict", 0)
    kill(cluster, trainer)
    assert cluster.get(waiting) == 0
