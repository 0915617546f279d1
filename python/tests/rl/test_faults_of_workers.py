"""Workers that fail, and trainers that die: nothing is lost, hangs or is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from counting import Constant, Counting, zeros

import weightsync
from weightsync import rl

WORDS = {
    "raise": "the pole broke",
    "nan": "next.observation is NaN in environment 0 at step 1",
    "shape": r"returned observation of shape \[3\]",
    "kill": "killed by SIGKILL",
    "exit": "ended with exit code 3",
    "hang": "collecting one part for more than",
}


def where(fault: str) -> Any:
    """Threads where they can show the fault: they start at once."""
    return "threads" if fault in ("raise", "nan", "shape") else "processes"


def faulty(fault: str) -> list[Any]:
    """A worker without fault, and one that fails in its second part."""
    return [Counting, lambda: Counting(fault=fault, at=12)]


@pytest.mark.parametrize("fault", WORDS)
def test_failed_worker_is_replaced_where_asked(fault: str) -> None:
    settings: dict[str, Any] = {"timeout": 20.0 if fault == "hang" else 100.0}
    policy = Constant(1)
    with rl.MultiSyncCollector(
        faulty(fault), policy, frames_per_batch=20, restart=True, workers=where(fault), **settings
    ) as collector:
        collector.next()
        collector.update_policy_weights_(policy.choose(2))
        batch = collector.next()
        (failure,) = batch.failures
        assert (failure.worker, failure.restarted) == (1, True)
        assert re.search(WORDS[fault], failure.reason)
        # The part is whole, of the current weights, and of new trajectories.
        assert set(batch["action"].flatten().tolist()) == {2}
        assert set(batch["collector", "policy_version"].flatten().tolist()) == {2}
        assert batch["observation"][..., 0].tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0] * 2] * 2
        assert len(batch["collector", "traj_ids"].unique()) == 4
        assert collector.update_policy_weights_().all_applied


@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_failure_is_an_error_of_a_sync_collector(fault: str) -> None:
    with rl.MultiSyncCollector(
        faulty(fault), zeros, frames_per_batch=20, workers=where(fault)
    ) as collector:
        collector.next()
        with pytest.raises(weightsync.PeerError, match=f"worker 1: (?s:.*){WORDS[fault]}"):
            collector.next()
        # The next batch has another worker in its place.
        assert collector.next().batch_size == (2, 10)


@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_others_go_on_where_one_failed(fault: str) -> None:
    with rl.MultiAsyncCollector(
        faulty(fault), zeros, frames_per_batch=10, workers=where(fault)
    ) as collector:
        failures: list[Any] = []
        while not failures:
            failures += collector.next().failures
        assert failures[0].worker == 1
        assert not failures[0].restarted
        for _ in range(5):
            assert collector.next().numel() == 10


def test_collector_ends_where_no_worker_is_left() -> None:
    with rl.AsyncCollector(
        lambda: Counting(fault="raise", at=12), zeros, frames_per_batch=10, workers="threads"
    ) as collector:
        collector.next()
        with pytest.raises(weightsync.PeerError, match="no worker is left(?s:.*)the pole broke"):
            collector.next()


def test_worker_that_keeps_failing_is_given_up() -> None:
    with rl.MultiSyncCollector(
        [lambda: Counting(fault="raise", at=1)],
        zeros,
        frames_per_batch=4,
        workers="threads",
        restart=True,
    ) as collector:
        with pytest.raises(weightsync.PeerError, match="the pole broke"):
            collector.next()


@pytest.mark.parametrize("workers", ["processes", "threads"])
def test_worker_that_cannot_start_is_named(workers: Any) -> None:
    def broken() -> Any:
        raise RuntimeError("no display")

    with pytest.raises(weightsync.PeerError, match="worker 1: (?s:.*)no display"):
        rl.MultiSyncCollector([Counting, broken], zeros, frames_per_batch=4, workers=workers)


def test_policy_that_cannot_be_pickled_is_named() -> None:
    class Locked(Constant):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    with pytest.raises(weightsync.WrongTypeError, match="policy_factory"):
        rl.MultiSyncCollector([Counting], Locked(), frames_per_batch=4)


def test_batches_stay_while_they_are_held() -> None:
    with rl.MultiSyncCollector(
        [Counting] * 2, zeros, frames_per_batch=8, workers="threads"
    ) as collector:
        kept = [collector.next() for _ in range(5)]
        copies = [batch["observation"].clone() for batch in kept]
        addresses = {batch["observation"].data_ptr() for batch in kept}
        assert len(addresses) == 5
        part = kept[0]["next", "reward"][0]
        kept = kept[1:]
        for _ in range(5):
            collector.next()
        assert all(
            torch.equal(batch["observation"], copy) for batch, copy in zip(kept, copies[1:], strict=True)
        )
        assert part.tolist() == [1.0, 2.0, 3.0, 4.0], "a view of a batch holds it"
        # The memory of dropped batches is used again.
        del part
        gc.collect()
        known = addresses | {collector.next()["observation"].data_ptr() for _ in range(8)}
        assert len(known) <= 7
    assert torch.equal(kept[0]["observation"], copies[1]), "batches outlive their collector"


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_nothing_is_left_after_many_collectors() -> None:
    def one() -> None:
        policy = Constant()
        collector = rl.MultiSyncCollector(
            [Counting] * 2, policy, frames_per_batch=8, workers="threads"
        )
        collector.next()
        collector.update_policy_weights_()
        collector.shutdown()
        collector.shutdown()

    one()
    gc.collect()
    before = descriptors(), threading.active_count()
    for _ in range(5):
        one()
    gc.collect()
    assert (descriptors(), threading.active_count()) <= before


def test_dropped_collector_ends_its_workers() -> None:
    collector = rl.MultiSyncCollector([Counting], zeros, frames_per_batch=8)
    pid = collector.pid(0)
    assert pid is not None
    assert iter(collector) is not None
    del collector
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_call_after_shutdown_is_refused() -> None:
    collector = rl.MultiSyncCollector([Counting], zeros, frames_per_batch=8, workers="threads")
    collector.shutdown()
    with pytest.raises(weightsync.LifecycleError, match="shut down"):
        collector.next()


TRAINER = """
import sys, time
sys.path.insert(0, {here!r})
from counting import Counting, zeros
from weightsync import rl
collector = rl.MultiAsyncCollector([Counting, lambda: Counting(fault="hang", at=12)], zeros, frames_per_batch=10)
print(*[collector.pid(worker) for worker in (0, 1)], flush=True)
for batch in collector:
    pass
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_worker_outlives_its_trainer(how: signal.Signals) -> None:
    program = TRAINER.format(here=str(Path(__file__).parent))
    trainer = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert trainer.stdout is not None
    pids = [int(one) for one in trainer.stdout.readline().split()]
    assert len(pids) == 2
    # Ctrl-C reaches all processes of a terminal.
    (os.killpg if how == signal.SIGINT else os.kill)(trainer.pid, how)
    trainer.wait()
    until = time.monotonic() + 60
    while pids and time.monotonic() < until:
        for pid in list(pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 0)
                continue
            pids.remove(pid)
    assert not pids
