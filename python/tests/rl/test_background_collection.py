"""Replay buffers that collectors fill, also in the background."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

import pytest
from counting import Constant, Counting, zeros

import weightsync
from weightsync import rl


class Buffer:
    """Keeps all batches."""

    def __init__(self, enough: int) -> None:
        self.batches: list[Any] = []
        self.enough, self.is_full = enough, threading.Event()

    def extend(self, batch: Any) -> None:
        self.batches.append(batch)
        if len(self.batches) >= self.enough:
            self.is_full.set()


def collectors(buffer: Any) -> list[Any]:
    settings: dict[str, Any] = {"frames_per_batch": 8, "replay_buffer": buffer}
    return [
        lambda: rl.Collector(Counting, zeros, **settings),
        lambda: rl.MultiSyncCollector([Counting] * 2, zeros, workers="threads", **settings),
        lambda: rl.MultiAsyncCollector([Counting] * 2, Constant(), workers="threads", **settings),
    ]


@pytest.mark.parametrize("kind", range(3))
def test_started_collector_fills_the_buffer(kind: int) -> None:
    buffer = Buffer(5)
    collector = collectors(buffer)[kind]()
    collector.start()
    assert buffer.is_full.wait(100)
    assert collector.is_running()
    with pytest.raises(weightsync.LifecycleError, match="in the background"):
        iter(collector)
    # As in TorchRL, this has no effect.
    collector.start()
    if kind == 2:
        assert collector.update_policy_weights_(Constant(1)).all_applied
    collector.async_shutdown()
    assert not collector.is_running()
    assert all(batch.numel() == 8 for batch in buffer.batches)


@pytest.mark.parametrize("kind", range(4))
def test_started_collector_ends_once_it_is_dropped(kind: int) -> None:
    buffer = Buffer(3)
    settings: dict[str, Any] = {"frames_per_batch": 8, "replay_buffer": buffer}
    makers = [*collectors(buffer), lambda: rl.MultiSyncCollector([Counting], zeros, **settings)]
    before = set(threading.enumerate())
    collector = makers[kind]()
    process = collector.pid(0) if kind == 3 else None
    collector.start()
    assert buffer.is_full.wait(100)
    dropped = weakref.ref(collector)
    del collector
    while dropped() is not None or set(threading.enumerate()) - before:
        threading.Event().wait(0.01)
    assert process is None or not os.path.exists(f"/proc/{process}")


def test_iteration_fills_the_buffer_and_yields_none() -> None:
    buffer = Buffer(3)
    with rl.Collector(
        Counting, zeros, frames_per_batch=8, total_frames=24, replay_buffer=buffer
    ) as collector:
        assert list(collector) == [None] * 3
    assert len(buffer.batches) == 3


def test_failure_in_the_background_is_raised_at_the_end() -> None:
    buffer = Buffer(1)
    collector = rl.Collector(
        lambda: Counting(fault="raise", at=12), zeros, frames_per_batch=8, replay_buffer=buffer
    )
    collector.start()
    assert buffer.is_full.wait(100)
    while collector.is_running():
        threading.Event().wait(0.01)
    with pytest.raises(RuntimeError, match="the pole broke"):
        collector.async_shutdown()


def test_start_wants_a_buffer() -> None:
    with rl.Collector(Counting, zeros, frames_per_batch=8) as collector:
        with pytest.raises(weightsync.SettingError, match="replay_buffer="):
            collector.start()


def test_buffer_of_torchrl_takes_batches() -> None:
    from torchrl.data import LazyTensorStorage, ReplayBuffer

    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=5)
    with rl.Collector(
        Counting,
        zeros,
        frames_per_batch=8,
        total_frames=24,
        replay_buffer=buffer,
        return_type="tensordict",
    ) as collector:
        list(collector)
    assert len(buffer) == 24
    assert buffer.sample()["next", "reward"].shape == (5, 1)
