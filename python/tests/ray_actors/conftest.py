"""A Ray cluster: a head and two nodes, on this host."""

import fcntl
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

# Folders of the files that tests and their actors import.
HERE = Path(__file__).parent
PLACES = [str(HERE), str(HERE.parent / "torchrl"), str(HERE.parent / "sync")]
sys.path += PLACES[1:]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One file at a time has a cluster: each takes a core to start. Timeouts leave this wait out."""
    with open(tmp_path_factory.getbasetemp().parent / "ray", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="module")
def importable():
    """Ray's processes find what they import."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join(PLACES), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def cluster(alone, importable):
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    # Sockets lie below it, whose paths may not be long.
    folder = tempfile.mkdtemp(prefix="r-", dir="/tmp")
    Path(folder, "ray").mkdir()
    node = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        made = Cluster(initialize_head=True, head_node_args=node)
        del node["include_dashboard"]
        made.nodes = [made.add_node(**node, resources={f"node{at}": 9}) for at in range(2)]
        ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
        made.ray = ray
        # A test's own timeout ends no wait of Ray's.
        made.get = lambda answers, seconds=120: ray.get(answers, timeout=seconds)
        yield made
        ray.shutdown()
        made.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def name(request):
    """The name of the test's model, and so of its group."""
    return request.node.name


@pytest.fixture
def start(cluster, name):
    """Starts an actor of a class."""
    made = []

    def start(kind, *arguments, options=None, **named):
        actor = cluster.ray.remote(kind).options(num_cpus=0, **(options or {}))
        made.append(actor.remote(*arguments, **{"name": name, **named}))
        return made[-1]

    yield start
    for one in made:
        cluster.ray.kill(one)
