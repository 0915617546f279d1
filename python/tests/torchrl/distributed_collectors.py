"""The scenarios of TorchRL's collectors whose workers may be on other hosts; here they are not."""

import contextlib
import functools
import os
import signal
import socket

import torch
import weightsync
from crew import hurry, line
from tensordict import TensorDict
from tiny import Counting, acted, policy
from torchrl.collectors import RemoteModuleWeightUpdater
from torchrl.collectors.distributed import DistributedCollector, RPCCollector

# An update of workers that are there.
PROMPT = 10.0


@contextlib.contextmanager
def collecting(kind, workers=2, first=policy, **how):
    """A collector of worker processes on this host, and its batches.

    `first` makes the trainer's policy; it is None if only the workers' factory makes one.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    collector = kind(
        [Counting] * workers,
        first and first(1.0),
        frames_per_batch=4 * workers if how.get("sync") else 4,
        total_frames=100_000,
        launcher="mp",
        tcp_port=free_port(),
        collector_kwargs={"auto_register_policy_transforms": False},
        **how,
    )
    try:
        yield collector, iter(collector)
    finally:
        collector.shutdown()


def free_port():
    # TorchRL's distributed collectors take the next port too.
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def eventually(batches, weight):
    """What was collected before an update may come after it."""
    for _ in range(50):
        if acted(batches) == {weight}:
            return
    raise AssertionError(f"the workers never act with {weight}")


def updates(module, name, sync):
    """First weights, an update of all workers and of one, by one changed import."""
    kind, scheme = KINDS[name]
    schemes = {"policy": getattr(module, scheme)()}
    with collecting(kind, sync=sync, weight_sync_schemes=schemes) as (made, batches):
        assert acted(batches) == {1.0}
        with hurry("an update", PROMPT):
            report = made.update_policy_weights_(policy(2.0))
            assert report.all_applied and len(report.workers) == 2, report
        eventually(batches, 2.0)
        with hurry("an update of one worker", PROMPT):
            report = made.update_policy_weights_(policy(3.0), worker_ids=[1])
        assert line(report, 1) == "applied" and line(report, 0) != "applied", report
        if sync:
            assert [set(one.flatten().tolist()) for one in halves(batches)] == [{2.0}, {3.0}]
        made.policy.module.weight.data.fill_(4.0)
        with hurry("an update of the policy", PROMPT):
            made.update_policy_weights_()
        eventually(batches, 4.0)
        assert getattr(made, "prepared", 3) == 3, "an update of the scheme is one of the collector"


def nested(module, name):
    """Workers that are collectors with workers of their own pass each version on."""
    kind, scheme = KINDS[name]
    how = {"collector_class": "sync", "num_workers_per_collector": 2, "sync": True}
    schemes = {"policy": getattr(module, scheme)()}
    with collecting(kind, workers=1, weight_sync_schemes=schemes, **how) as (made, batches):
        assert acted(batches) == {1.0}
        for weight in (2.0, 3.0):
            with hurry("an update", PROMPT):
                assert made.update_policy_weights_(policy(weight)).all_applied
            eventually(batches, weight)


def factory(module, name):
    """A policy that only the workers make."""
    kind, scheme = KINDS[name]
    how = {"first": None, "policy_factory": functools.partial(policy, 1.0), "sync": True}
    schemes = {"policy": getattr(module, scheme)()}
    with collecting(kind, weight_sync_schemes=schemes, **how) as (made, batches):
        assert acted(batches) == {1.0}
        with hurry("an update", PROMPT):
            assert made.update_policy_weights_(policy(2.0)).all_applied
        eventually(batches, 2.0)


def halves(batches):
    """The actions of each worker, of four frames each, in the order of their actions."""
    return sorted(next(batches)["action"].reshape(2, 4), key=torch.Tensor.max)


def killed(module, name):
    """A worker that was killed is a line of the next update."""
    kind, scheme = KINDS[name]
    schemes = {"policy": getattr(module, scheme)()}
    made = kind(
        [Counting] * 2,
        policy(1.0),
        frames_per_batch=8,
        total_frames=100_000,
        sync=True,
        launcher="mp",
        tcp_port=free_port(),
        weight_sync_schemes=schemes,
    )
    os.kill(made.jobs[0].pid, signal.SIGKILL)
    made.jobs[0].join()
    with hurry("an update without a worker", PROMPT):
        report = made.update_policy_weights_(policy(2.0))
    assert line(report, 0) == "died" and line(report, 1) == "applied", report
    # TorchRL's own shutdown waits for the worker that was killed.
    schemes["policy"].shutdown()


class Preparing(DistributedCollector):
    """Does something of its own before an update, as RayCollector does."""

    prepared = 0

    def _weight_update_impl(self, *args, **how):
        self.prepared += 1
        super()._weight_update_impl(*args, **how)


KINDS = {
    "rpc": (RPCCollector, "RPCWeightSyncScheme"),
    "distributed": (Preparing, "DistributedWeightSyncScheme"),
}


def updater(module, name, sync):
    """The older updaters, which TorchRL's collectors take after they have started their workers."""
    kind = KINDS[name][0]
    with collecting(kind, sync=sync, weight_updater=RemoteModuleWeightUpdater) as (made, batches):
        assert acted(batches) == {1.0}
        own, done = UPDATERS[name](module, made), []
        own.register_post_hook(lambda: done.append(len(done)))
        made.weight_updater = own
        with hurry("a push of given weights", PROMPT):
            made.update_policy_weights_(policy(2.0))
        eventually(batches, 2.0)
        for wrong in ({"worker_ids": [1, 7]}, {"policy_or_weights": TensorDict()}):
            try:
                made.update_policy_weights_(**wrong)
            except (weightsync.SettingError, weightsync.WrongWeightsError):
                continue
            raise AssertionError(f"{wrong} was pushed")
        if sync:
            with hurry("a push to one worker", PROMPT):
                made.update_policy_weights_(policy(3.0), worker_ids=[1])
            assert [set(one.flatten().tolist()) for one in halves(batches)] == [{2.0}, {3.0}]
        made.policy.module.weight.data.fill_(4.0)
        with hurry("a push of the policy", PROMPT):
            made.update_policy_weights_()
        eventually(batches, 4.0)
        assert len(done) == 2 + sync, "the hooks run after each push that was made"
        made.weight_updater = UPDATERS[name](module, made, weight_getter=lambda: policy(5.0))
        with hurry("a push of a getter's weights", PROMPT):
            made.update_policy_weights_()
        eventually(batches, 5.0)


def pushed_in_the_background(module):
    """`wait=False` of the updater for torch's RPC."""
    how = {"sync": False, "weight_updater": RemoteModuleWeightUpdater}
    with collecting(RPCCollector, **how) as (made, batches):
        made.weight_updater = UPDATERS["rpc"](module, made)
        with hurry("pushes", PROMPT):
            made.update_policy_weights_(policy(2.0), worker_ids=[0, 1], wait=False)
            made.update_policy_weights_(policy(3.0))
        eventually(batches, 3.0)


def updater_and_killed_worker(module, name):
    """A push names the worker that was killed; the other has the weights."""
    made = KINDS[name][0](
        [Counting] * 2,
        policy(1.0),
        frames_per_batch=8,
        total_frames=100_000,
        sync=True,
        launcher="mp",
        tcp_port=free_port(),
        weight_updater=RemoteModuleWeightUpdater,
    )
    made.weight_updater = UPDATERS[name](module, made)
    os.kill(made.jobs[0].pid, signal.SIGKILL)
    made.jobs[0].join()
    with hurry("a push without a worker", 30.0):
        try:
            made.update_policy_weights_(policy(2.0))
        except weightsync.PeerError as error:
            assert "1 of 2" in str(error) and "worker 0: " in str(error), error
        else:
            raise AssertionError("worker 0 is dead")


UPDATERS = {
    "rpc": lambda module, made, **how: module.RPCWeightUpdater(
        collector_infos=made.collector_infos,
        collector_class=made.collector_class,
        collector_rrefs=made.collector_rrefs,
        policy_weights=made.policy_weights,
        num_workers=2,
        **how,
    ),
    "distributed": lambda module, made, **how: module.DistributedWeightUpdater(
        store=made._store,
        policy_weights=made.policy_weights,
        num_workers=2,
        sync=made._sync,
        **how,
    ),
}


def sync_collector(module):
    """DistributedSyncCollector sends the policy before each batch, by one changed import."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    collector = module.DistributedSyncCollector(
        [Counting] * 2,
        policy(1.0),
        frames_per_batch=8,
        total_frames=400,
        launcher="mp",
        tcp_port=free_port(),
        collector_kwargs={"auto_register_policy_transforms": False},
    )
    try:
        batches = iter(collector)
        assert acted(batches) == {1.0}
        collector.policy.module.weight.data.fill_(2.0)
        eventually(batches, 2.0)
        assert collector._weight_sync_schemes["policy"].workers
        # The workers end when all frames were collected.
        assert sum(one.numel() for one in batches) > 0
    finally:
        collector.shutdown()
