"""The scenarios of TorchRL's collectors whose workers may be on other hosts; here they are not."""

import contextlib
import os
import signal
import socket

import torch
from crew import hurry, line
from tiny import Counting, acted, policy
from torchrl.collectors.distributed import DistributedCollector, RPCCollector

# An update of workers that are there.
PROMPT = 10.0


@contextlib.contextmanager
def collecting(kind, workers=2, **how):
    """A collector of worker processes on this host, and its batches."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    collector = kind(
        [Counting] * workers,
        policy(1.0),
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


KINDS = {
    "rpc": (RPCCollector, "RPCWeightSyncScheme"),
    "distributed": (DistributedCollector, "DistributedWeightSyncScheme"),
}
