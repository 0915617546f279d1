"""Nodes of a cluster that come and go, with what runs there."""

import subprocess
import sys
import time
from pathlib import Path

from patience import patience
import pytest
from ray_world import Trainer, Worker, kill

# Ray waits a minute for a process that does not come up before it starts another.
pytestmark = pytest.mark.timeout(400, func_only=True)

EXAMPLE = Path(__file__).parents[3] / "examples/ray_actors.py"


def test_ray_example_runs_in_a_cluster(cluster):
    command = [sys.executable, EXAMPLE, cluster.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(100))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "policy v3 was applied by 3 of 3 workers" in done.stdout
    assert done.stdout.endswith("3 actors act with version 3\n")


@pytest.fixture
def node(cluster):
    """Adds nodes, each with a resource of its own."""
    made = []

    def add(name):
        made.append(cluster.add_node(num_cpus=0, object_store_memory=80 << 20, resources={name: 9}))
        return made[-1]

    yield add
    for one in made:
        if one in cluster.worker_nodes:
            cluster.remove_node(one, allow_graceful=False)
    # Ray would start actors of other tests there until it has noticed.
    while len([one for one in cluster.ray.nodes() if one["Alive"]]) > 3:
        time.sleep(0.01)


def test_live_actors_end_on_the_newest(cluster, start, node):
    ray, gone = cluster.ray, node("gone")
    on = lambda name, **options: {"resources": {name: 1}, **options}  # noqa: E731
    trainer = start(Trainer, options=on("node0", max_restarts=1, max_task_retries=-1))
    workers = [start(Worker, options=on(name)) for name in ("node0", "node1", "gone") for _ in range(2)]
    numbers = [state[0] for state in cluster.get([one.state.remote() for one in workers])]
    version, outcomes = cluster.get(trainer.send.remote(2.0))
    assert sorted(outcomes) == [(number, "applied") for number in range(6)]

    # One actor is killed, a node with two of them is removed, and a node with another is added.
    ray.kill(workers[2])
    cluster.remove_node(gone, allow_graceful=False)
    node("added")
    late = start(Worker, options=on("added"))
    assert cluster.get(late.state.remote())[1:] == (2, 2.0, 2.0)
    dead, alive = {numbers[at] for at in (2, 4, 5)}, [workers[at] for at in (0, 1, 3)] + [late]
    seen = set()
    while not dead <= seen:
        # A report names who went, by number and by actor.
        version, outcomes = cluster.get(trainer.send.remote(3.0))
        seen |= {number for number, outcome in outcomes if outcome == "died"}
    assert seen == dead
    names = cluster.get(trainer.actors.remote())
    assert all("actor" in names[number] for number in dead)
    assert {state[1:2] + state[3:] for state in cluster.get([one.state.remote() for one in alive])} == {
        (version, 3.0)
    }

    # The trainer's actor is restarted, and begins again.
    kill(cluster, trainer)
    joined = [state[0] for state in cluster.get([one.state.remote() for one in alive])]
    cluster.get(trainer.expect.remote(joined))
    version, outcomes = cluster.get(trainer.send.remote(4.0))
    assert sorted(outcomes) == sorted((number, "applied") for number in joined)
    assert [state[3] for state in cluster.get([one.state.remote() for one in alive])] == [4.0] * 4


def test_actors_of_a_job_end_with_it(cluster):
    ray = cluster.ray
    program = (
        "import ray, sys, torch, weightsync.ray\n"
        "ray.init(address=sys.argv[1], namespace='ended', log_to_driver=False)\n"
        "sender = weightsync.ray.Sender(torch.nn.Linear(2, 2))\n"
        "print(sender.version, flush=True)\n"
        "import os; os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, cluster.address], capture_output=True, text=True, timeout=patience(100)
    )
    assert done.stdout == "1\n", done.stderr
    while True:
        try:
            ray.get_actor("ended/policy", namespace="weightsync")
        except ValueError:
            return
        time.sleep(0.01)
