"""A Ray cluster, and trainers and rollout workers that verl's own manager coordinates."""

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

# verl has an environment of its own: requirements-verl.txt.
collect_ignore_glob = [] if importlib.util.find_spec("verl") else ["test_*.py"]

# Files that tests and their processes import.
PLACES = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
sys.path[:0] = PLACES


@pytest.fixture(scope="module")
def cluster():
    import ray

    # Sockets lie below it, whose paths may not be long.
    folder = tempfile.mkdtemp(prefix="r-", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("PYTHONPATH", os.pathsep.join(PLACES), prepend=os.pathsep)
        # The CPUs are verl's count of its actors, and no machine's.
        ray.init(
            num_cpus=64, object_store_memory=200 << 20, include_dashboard=False,
            log_to_driver=False, logging_level="ERROR", _temp_dir=folder,
        )  # fmt: skip
        yield ray
        ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def world(cluster, request):
    """A trainer of two ranks and two rollout workers, for all tests of a module."""
    made = World(cluster, getattr(request.module, "SETTINGS", {}))
    yield made
    made.stop()


class World:
    """A trainer, its rollout workers, and verl's manager."""

    def __init__(self, ray, settings):
        import verl_world
        from verl.checkpoint_engine import CheckpointEngineManager

        self.ray, self.config = ray, verl_world.config(**settings)
        self.rollouts, self.replicas, self._pools = [], [], []
        self.trainer = self._group("Trainer", 2)
        self.manager = CheckpointEngineManager(self.config, self.trainer, self.replicas)
        self.add(2)

    def restart_trainer(self):
        """The trainer's processes end, and others take their place."""
        for worker in self.trainer.workers:
            self.ray.kill(worker)
        self.trainer = self.manager.actor_wg = self._group("Trainer", 2)

    def add(self, count=1):
        """Adds replicas of one worker each."""
        import verl_world

        made = [self._group("Rollout", 1).workers for _ in range(count)]
        self.replicas += (replicas := [verl_world.Replica(one) for one in made])
        self.rollouts += (rollouts := [one for workers in made for one in workers])
        if self.manager.replicas is not self.replicas:
            self.manager.add_replicas(replicas)
        return rollouts

    def remove(self, rollout):
        """Removes a replica, whose process may have ended."""
        at = self.rollouts.index(rollout)
        self.manager.remove_replicas([self.replicas.pop(at)])
        self.ray.kill(self.rollouts.pop(at))

    def _group(self, kind, size):
        import verl_world
        from verl.single_controller.ray import (
            RayClassWithInitArgs,
            RayResourcePool,
            RayWorkerGroup,
        )

        made = RayClassWithInitArgs(self.ray.remote(getattr(verl_world, kind)), self.config)
        pool = RayResourcePool([size], use_gpu=False, max_colocate_count=1)
        self._pools.append(pool)
        return RayWorkerGroup(pool, made, device_name="cpu")

    def update(self, tensors, step=None, **options):
        self.trainer.set_weights(tensors, **options)
        return self.manager.update_weights(global_steps=step)

    def begin(self, tensors, step=None, **options):
        """Starts an update as the manager does, and returns the answers of both sides."""
        from verl.checkpoint_engine.base import _worker_cls
        from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup

        self.trainer.set_weights(tensors, **options)
        made = RayClassWithInitArgs(cls=_worker_cls)
        rollout = RayWorkerGroup(worker_handles=list(self.rollouts), ray_cls_with_init=made)
        self.manager.build_process_group(rollout)
        return (
            self.trainer.update_weights(global_steps=step, mode="weightsync"),
            rollout.update_weights(global_steps=step),
        )

    def error(self, answer, seconds=30):
        """The error of an answer."""
        with pytest.raises(Exception) as caught:
            self.ray.get(answer, timeout=seconds)
        return caught.value

    def compare(self, expected):
        asked = [one.compare.remote(expected) for one in self.rollouts]
        return self.ray.get(asked, timeout=60)

    def stop(self):
        for worker in [*self.trainer.workers, *self.rollouts]:
            self.ray.kill(worker)
        for pool in self._pools:
            # verl's groups of actors are no Ray job's.
            for group in pool.pgs or ():
                self.ray.util.remove_placement_group(group)
