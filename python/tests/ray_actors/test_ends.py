"""Plain Ray: a trainer and workers that are actors."""

import os
import pickle
import subprocess
import sys
import threading
import time

from patience import patience
import pytest
import torch
from ray_world import Trainer, Worker, kill, net

import weightsync
import weightsync.ray
from weightsync.ray import _cluster
from weightsync.ray._group import Directory, Group, Offer

# Ray waits a minute for a process that does not come up before it starts another.
pytestmark = pytest.mark.timeout(300, func_only=True)


def directory(ray, name):
    return ray.get_actor(f"{ray.get_runtime_context().namespace}/{name}", namespace="weightsync")


def test_actors_have_what_is_sent(cluster, start):
    ray = cluster.ray
    trainer = start(Trainer)
    info = cluster.get(trainer.info.remote())
    workers = [start(Worker, info) for _ in range(2)]
    # They have the first version before they answer.
    assert sorted(cluster.get([one.state.remote() for one in workers])) == [(0, 1, 1.0, 1.0), (1, 1, 1.0, 1.0)]
    assert cluster.get(trainer.send.remote(2.0)) == (2, [(0, "applied"), (1, "applied")])
    late = start(Worker, info)
    assert cluster.get(late.state.remote()) == (2, 2, 2.0, 2.0)
    names = cluster.get(trainer.actors.remote())
    assert list(names) == [0, 1, 2]
    assert "pid" in names[0]


def test_driver_sends_to_async_and_threaded_actors(cluster, start, name):
    ray = cluster.ray

    class Async(Worker):
        async def told(self):
            return self.receiver.version, self.value()

    model = net(1.0)
    with weightsync.ray.Sender(model, name=name) as sender:
        info = pickle.loads(pickle.dumps(sender.init_info))
        asynchronous = start(Async, info)
        threaded = start(Worker, info, options={"max_concurrency": 4})
        cluster.get([asynchronous.told.remote(), threaded.state.remote()])
        report = sender.send(net(3.0))
        assert report.all_applied and len(report.workers) == 2
        assert cluster.get(asynchronous.told.remote()) == (2, 3.0)
        states = cluster.get([threaded.state.remote() for _ in range(4)])
        assert [one[1:] for one in states] == [(2, 1.0, 3.0)] * 4


def test_placement_group_actors_have_what_is_sent(cluster, start):
    ray = cluster.ray
    group = ray.util.placement_group([{"node0": 1}, {"node1": 1}], strategy="STRICT_SPREAD")
    cluster.get(group.ready())
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    trainer = start(Trainer)
    workers = [
        start(Worker, options={"scheduling_strategy": strategy(group, placement_group_bundle_index=at)})
        for at in range(2)
    ]
    cluster.get([one.state.remote() for one in workers])
    assert cluster.get(trainer.send.remote(4.0)) == (2, [(0, "applied"), (1, "applied")])
    ray.util.remove_placement_group(group)


def test_restarted_worker_acts_with_the_newest(cluster, start):
    ray = cluster.ray
    trainer = start(Trainer)
    worker = start(Worker, options={"max_restarts": 1, "max_task_retries": -1})
    other = start(Worker)
    number, *_ = cluster.get(worker.state.remote())
    cluster.get([other.state.remote(), trainer.send.remote(5.0)])
    kill(cluster, worker)
    # It has its number again, and began with the newest.
    assert cluster.get(worker.state.remote()) == (number, 2, 5.0, 5.0)
    cluster.get(trainer.expect.remote([0, 1]))
    version, outcomes = cluster.get(trainer.send.remote(6.0))
    assert sorted(outcomes) == sorted([(number, "died"), (0, "applied"), (1, "applied")])


def test_restarted_trainer_finds_its_workers(cluster, start):
    ray = cluster.ray
    trainer = start(Trainer, options={"max_restarts": 1, "max_task_retries": -1})
    workers = [start(Worker) for _ in range(2)]
    cluster.get([one.state.remote() for one in workers])
    cluster.get(trainer.send.remote(7.0))
    waiting = [one.until.remote(8.0) for one in workers]
    kill(cluster, trainer)
    # The workers have moved to it: a send reaches both.
    cluster.get(trainer.expect.remote([0, 1]))
    assert cluster.get(trainer.send.remote(8.0)) == (2, [(0, "applied"), (1, "applied")])
    assert cluster.get(waiting) == [2, 2]


def test_trained_model_changes_in_safe_points_alone(cluster, start):
    ray = cluster.ray
    trainer = start(Trainer, options={"max_restarts": 1, "max_task_retries": -1})
    worker = start(Worker, safe_points="declared", mode="copy")
    cluster.get(worker.state.remote())
    trained = worker.train.remote(9.0)
    cluster.get(trainer.send.remote(9.0))
    assert cluster.get(trained) == 9.0
    kill(cluster, trainer)
    cluster.get(trainer.pid.remote())
    # It moves to the restarted trainer in a safe point.
    assert cluster.get(worker.train.remote(1.0)) == 1.0


def test_end_of_all_ends_the_directory(cluster, start, name):
    ray = cluster.ray
    trainer, worker = start(Trainer), start(Worker)
    cluster.get(worker.state.remote())
    assert directory(ray, name)
    cluster.get([worker.end.remote(), trainer.end.remote()])
    while True:
        try:
            directory(ray, name)
        except ValueError:
            return
        time.sleep(0.01)


def test_directory_ends_where_an_end_never_came(cluster):
    actor = cluster.ray.remote(Directory).options(max_concurrency=10, num_cpus=0).remote()
    # Of one end no more has arrived than that it has left.
    actor.leave.remote("lost")
    actor.present.remote("there")
    actor.leave.remote("there")
    with pytest.raises(cluster.ray.exceptions.RayActorError):
        while True:
            cluster.get(actor.has_sender.remote())


def test_end_joins_nothing_after_ray_has_shut_down(cluster):
    program = (
        "import ray, sys, threading, torch, weightsync.ray\n"
        "ray.init(address=sys.argv[1], namespace='shut', log_to_driver=False)\n"
        "sender = weightsync.ray.Sender(torch.nn.Linear(2, 2))\n"
        "def away(self, timeout): raise weightsync.PeerError('away')\n"
        "weightsync.ray.Sender._offer = away\n"
        "ray.kill(ray.get_actor('shut/policy', namespace='weightsync'))\n"
        "def joins(): return any('_renew' in one.name for one in threading.enumerate())\n"
        "while not joins(): pass\n"
        "ray.shutdown()\n"
        "while joins(): pass\n"
        "print('ended', flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, cluster.address], capture_output=True, text=True, timeout=patience(100)
    )
    assert done.stdout == "ended\n", done.stderr


def test_killed_directory_is_started_again(cluster, start, name):
    ray = cluster.ray
    trainer, worker = start(Trainer), start(Worker)
    cluster.get(worker.state.remote())
    ray.kill(directory(ray, name))
    # Sends need no directory, and workers that join later make one.
    assert cluster.get(trainer.send.remote(2.0)) == (2, [(0, "applied")])
    late = start(Worker)
    assert cluster.get(late.state.remote())[1:] == (2, 2.0, 2.0)
    assert cluster.get(trainer.send.remote(3.0)) == (3, [(0, "applied"), (1, "applied")])


def test_second_sender_of_a_name_is_refused(cluster, name):
    with weightsync.ray.Sender(net(1.0), name=name) as sender:
        with pytest.raises(weightsync.SettingError, match=f"{name}.*is alive"):
            weightsync.ray.Sender(net(1.0), name=name, timeout=1.0)
        # The first one is not disturbed, and another may come after it.
        sender.send()
    weightsync.ray.Sender(net(1.0), name=name).shutdown()


def test_sender_keeps_its_name_once_the_directory_dies(cluster, name, monkeypatch):
    ray, may_come, idle = cluster.ray, threading.Event(), threading.Event()
    offer_again = weightsync.ray.Sender._offer_again
    monkeypatch.setattr(
        weightsync.ray.Sender, "_offer_again", lambda sender: may_come.wait() and offer_again(sender)
    )
    with weightsync.ray.Sender(net(1.0), name=name):
        second, offer = Group([name], idle.is_set), Offer("second", "here", False, None)
        second.members()
        ray.kill(directory(ray, name))
        # This one starts the next directory, and is not taken before the one whose name it is.
        with pytest.raises(weightsync.DeadlineError, match="within 2 s"):
            second.offer(offer, 2.0)
        may_come.set()
        while not cluster.get(directory(ray, name).has_sender.remote()):
            time.sleep(0.01)
        with pytest.raises(weightsync.SettingError, match=f"{name}.*is alive"):
            second.offer(offer, 1.0)
        second.leave()


def test_worker_without_a_sender_gives_up(cluster):
    with pytest.raises(weightsync.DeadlineError, match="within 2 s: is there a sender of this name"):
        weightsync.ray.Receiver(model=net(0.0), name="nobody", timeout=2.0)


def test_other_model_is_refused(cluster):
    with weightsync.ray.Sender(net(1.0), name="narrow"):
        with pytest.raises(weightsync.WrongWeightsError, match="weight"):
            weightsync.ray.Receiver(model=net(0.0, size=32), name="narrow")


def test_token_file_may_have_any_bytes(tmp_path, monkeypatch):
    file, random = tmp_path / "token", bytes(range(33, 256))
    monkeypatch.setenv("WEIGHTSYNC_TOKEN_FILE", str(file))
    file.write_bytes(b" " + random + b"\n")
    assert os.fsencode(_cluster.token()) == random
    file.write_bytes(random + b"\0")
    with pytest.raises(weightsync.SettingError, match="zero byte"):
        _cluster.token()


def test_ends_outside_a_cluster_say_so(monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    for make in (weightsync.ray.Sender, weightsync.ray.Receiver):
        with pytest.raises(weightsync.LifecycleError, match="ray.init"):
            make(model=torch.nn.Linear(2, 2))
