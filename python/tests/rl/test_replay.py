"""The replay buffer: what is written, what is drawn, and what outlives the program."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from counting import Counting, zeros
from tensordict import TensorDict

import weightsync
from weightsync import rl
from weightsync.rl import _values


def batch_of(first: int, size: tuple[int, ...], ids: Any = 0) -> rl.Batch:
    """Frames numbered from ``first`` on."""
    count = int(np.prod(size))
    number = torch.arange(first, first + count).reshape(size)
    trajectories = torch.as_tensor(ids).expand(size).clone()
    return rl.Batch(
        {
            "observation": torch.stack([number, -number], -1).float(),
            "next": {"reward": number.double()},
            "collector": {"traj_ids": trajectories},
        },
        size,
    )


@pytest.mark.parametrize("size", [(6,), (2, 3), (2, 1, 3)])
def test_frames_come_back_whole(size: tuple[int, ...]) -> None:
    buffer = rl.ReplayBuffer(100, batch_size=50, seed=1)
    assert buffer.extend(batch_of(0, size)).shape == size
    sample = buffer.sample()
    assert sample.batch_size == (50,)
    assert torch.equal(sample["observation"][:, 0].double(), sample["next", "reward"])
    assert torch.equal(sample["index"].double(), sample["next", "reward"])
    assert set(sample["index"].tolist()) == set(range(6))


def test_oldest_frames_give_way() -> None:
    buffer = rl.ReplayBuffer(10, batch_size=200)
    for first in range(0, 24, 8):
        buffer.extend(batch_of(first, (8,)))
    assert (len(buffer), buffer.write_count, buffer.capacity) == (10, 24, 10)
    assert set(buffer.sample()["index"].tolist()) == set(range(14, 24))


def test_frames_that_are_views_come_back_with_their_values() -> None:
    values = torch.tensor([1 + 2j, 3 - 4j, 5 + 6j])
    views = {"conjugate": values.conj(), "negative": torch._neg_view(values.real.contiguous())}
    buffer = rl.ReplayBuffer(10)
    buffer.extend(TensorDict(views, batch_size=[3]))
    sample = buffer.sample(50)
    for name, view in views.items():
        assert torch.equal(sample[name], view[sample["index"]].resolve_conj().resolve_neg()), name


def test_priorities_may_be_of_any_dtype_of_torch() -> None:
    buffer = rl.ReplayBuffer(10, sampler=rl.PrioritizedSampler(alpha=1.0))
    index = buffer.extend(batch_of(0, (4,)))
    priorities = torch.tensor([0.0, 0.0, 0.0, 1.0])
    for priority in (priorities.bfloat16(), torch._neg_view(-priorities)):
        buffer.update_priority(index, priority)
        assert set(buffer.sample(50)["index"].tolist()) == {3}


def test_values_that_are_views_reach_the_trainer() -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    sent = {"conjugate": values.conj(), "single": values[:1].as_strided((1,), (2,))}
    read = _values.read(_values.write(sent))
    for name, value in sent.items():
        assert torch.equal(read[name], value.resolve_conj()), name


def test_frames_of_numpy_come_back_as_arrays() -> None:
    buffer = rl.ReplayBuffer(10)
    buffer.extend(rl.Batch({"pixels": np.full((4, 2, 3), 7, np.uint8)}, (4,)))
    sample = buffer.sample(3)
    assert isinstance(sample["pixels"], np.ndarray)
    assert sample["pixels"].shape == (3, 2, 3)


def test_frames_that_are_none_are_not_kept() -> None:
    buffer = rl.ReplayBuffer(100, batch_size=200)
    with rl.Collector(
        lambda: Counting(3), zeros, frames_per_batch=8, split_trajs=True, replay_buffer=buffer
    ) as collector:
        collector.next()
    assert len(buffer) == 8
    sample = buffer.sample()
    assert set(sample["next", "reward"].tolist()) == {1.0, 2.0, 3.0}
    other = rl.ReplayBuffer(100)
    with rl.Collector(
        lambda: Counting(3), zeros, frames_per_batch=8, reset_when_done=False
    ) as collector:
        index = other.extend(collector.next())
    assert index.tolist() == [0, 1, 2, -1, -1, -1, -1, -1]


def test_name_that_samples_use_is_refused() -> None:
    with pytest.raises(weightsync.SettingError, match="'index'"):
        rl.ReplayBuffer(10).extend(rl.Batch({"index": torch.zeros(3)}, (3,)))


def test_memory_that_is_not_there_is_an_error() -> None:
    with pytest.raises(weightsync.WeightsyncError, match="no memory for"):
        # More than the address space, on a machine of any size.
        rl.ReplayBuffer(2**44).extend(batch_of(0, (3,)))


def test_one_frame_is_added() -> None:
    buffer = rl.ReplayBuffer(10)
    assert buffer.add({"observation": np.ones(3, np.float32), "reward": 1.5}) == 0
    assert buffer.add({"observation": np.ones(3, np.float32), "reward": 2.5}) == 1
    assert set(buffer.sample(20)["reward"].tolist()) == {1.5, 2.5}


def test_each_frame_comes_once_without_replacement() -> None:
    buffer = rl.ReplayBuffer(20, sampler=rl.SamplerWithoutReplacement(), batch_size=5)
    buffer.extend(batch_of(0, (20,)))
    for _ in range(2):
        drawn = [one for _ in range(4) for one in buffer.sample()["index"].tolist()]
        assert sorted(drawn) == list(range(20))


def test_weights_of_priorities_are_torchrls() -> None:
    """Relative to the least priority in the buffer, which a small sample may not have."""
    from torchrl.data.replay_buffers import LazyTensorStorage, PrioritizedSampler, ReplayBuffer

    alpha, beta, eps, capacity = 0.7, 0.5, 1e-3, 50
    priorities = torch.rand(capacity, generator=torch.Generator().manual_seed(3)) * 5
    sampler = PrioritizedSampler(capacity, alpha, beta, eps)
    theirs = ReplayBuffer(storage=LazyTensorStorage(capacity), sampler=sampler, batch_size=2000)
    theirs.extend(torch.arange(capacity))
    theirs.update_priority(torch.arange(capacity), priorities)
    _, told = theirs.sample(return_info=True)
    expected = dict(zip(told["index"].tolist(), told["priority_weight"].tolist(), strict=True))

    buffer = rl.ReplayBuffer(capacity, sampler=rl.PrioritizedSampler(alpha, beta, eps), seed=1)
    # The first frames are gone, and their priorities with them.
    buffer.extend(batch_of(0, (capacity,)))
    buffer.update_priority(range(capacity), [0.0] * capacity)
    index = buffer.extend(batch_of(capacity, (capacity,)))
    buffer.update_priority(index, priorities)
    compared = set()
    for _ in range(500):
        sample = buffer.sample(4)
        frames = (sample["index"] - capacity).tolist()
        for frame, weight in zip(frames, sample["priority_weight"].tolist(), strict=True):
            if frame in expected:
                assert weight == pytest.approx(expected[frame], rel=1e-5)
                compared.add(frame)
    assert len(compared) > capacity / 2


def test_priorities_decide_what_is_drawn() -> None:
    sampler = rl.PrioritizedSampler(alpha=1.0, beta=1.0, eps=0.0)
    buffer = rl.ReplayBuffer(8, sampler=sampler, seed=1)
    index = buffer.extend(batch_of(0, (4,)))
    buffer.update_priority(index, torch.tensor([1.0, 1.0, 2.0, 4.0]))
    sample = buffer.sample(8000)
    counts = Counter(sample["index"].tolist())
    for frame, share in enumerate([1 / 8, 1 / 8, 2 / 8, 4 / 8]):
        assert abs(counts[frame] / 8000 - share) < 0.03
    # Weights are in inverse proportion, and the largest is 1.
    by_frame = dict(zip(sample["index"].tolist(), sample["priority_weight"].tolist(), strict=True))
    assert by_frame == pytest.approx({0: 1.0, 1: 1.0, 2: 0.5, 3: 0.25})
    buffer.set_beta(0.0)
    assert set(buffer.sample(50)["priority_weight"].tolist()) == {1.0}


def test_slices_stay_within_a_trajectory() -> None:
    buffer = rl.ReplayBuffer(1000, sampler=rl.SliceSampler(slice_len=4), seed=2)
    # Two workers take turns, and their trajectories go on across batches.
    for number in range(20):
        worker = number % 2
        first = 100 * worker + 3 * (number // 2)
        buffer.extend(batch_of(first, (3,), ids=worker))
    seen = set()
    for _ in range(50):
        sample = buffer.sample(24)
        assert sample.batch_size == (6, 4)
        steps = sample["observation"][..., 0]
        assert (steps.diff() == 1).all()
        assert (sample["collector", "traj_ids"].diff() == 0).all()
        seen |= {int(one) for one in steps[:, 0]}
    assert seen > {0, 1, 2, 3, 100, 101, 102, 103}


def test_short_trajectories_are_masked_where_allowed() -> None:
    sampler = rl.SliceSampler(num_slices=2, strict_length=False)
    buffer = rl.ReplayBuffer(100, sampler=sampler)
    buffer.extend(batch_of(0, (3,)))
    sample = buffer.sample(10)
    assert sample["mask"].sum(-1).tolist() == [3, 3]


@pytest.mark.parametrize("count", [1, 2])
def test_collector_fills_the_buffer_in_the_background(count: int) -> None:
    buffer = rl.ReplayBuffer(500, batch_size=32, sampler=rl.SliceSampler(slice_len=4))
    collector = rl.MultiAsyncCollector(
        [Counting] * count, zeros, frames_per_batch=20, replay_buffer=buffer, workers="threads"
    )
    collector.start()
    while buffer.write_count < 700:
        assert collector.is_running()
        threading.Event().wait(0.01)
    steps = buffer.sample()["observation"][..., 0]
    assert (steps.diff() == 1).all()
    collector.async_shutdown()
    assert len(buffer) == 500


def test_threads_share_the_buffer() -> None:
    buffer = rl.ReplayBuffer(64, batch_size=16)
    buffer.extend(batch_of(0, (8,)))
    failures: list[str] = []

    def write(worker: int) -> None:
        for number in range(100):
            buffer.extend(batch_of(1000 * worker + 8 * number, (8,)))

    def read() -> None:
        for _ in range(100):
            sample = buffer.sample()
            if not torch.equal(sample["observation"][:, 0], -sample["observation"][:, 1]):
                failures.append("torn")

    threads = [threading.Thread(target=write, args=(one,)) for one in range(2)]
    threads += [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert buffer.write_count == 8 + 2 * 800


WRITER = """
import sys
sys.path.insert(0, {here!r})
from test_replay import batch_of
from weightsync import rl
buffer = rl.ReplayBuffer(100, directory={directory!r})
for number in range(10**6):
    buffer.extend(batch_of(8 * number, (8,)))
    print(number, flush=True)
"""


def test_frames_outlive_a_killed_program(tmp_path: Path) -> None:
    directory = str(tmp_path / "frames")
    program = WRITER.format(here=str(Path(__file__).parent), directory=directory)
    writer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    for _ in range(40):
        written = 8 * (int(writer.stdout.readline()) + 1)
    writer.kill()
    writer.wait()
    writer.stdout.close()
    buffer = rl.ReplayBuffer(100, directory=directory, batch_size=300)
    assert buffer.write_count >= written
    assert 84 <= len(buffer) <= 100
    sample = buffer.sample()
    assert torch.equal(sample["observation"][:, 0], -sample["observation"][:, 1])
    assert torch.equal(sample["index"].double(), sample["next", "reward"])
    buffer.extend(batch_of(0, (3,)))
    buffer.flush()


def test_directory_has_one_buffer_at_a_time(tmp_path: Path) -> None:
    buffer = rl.ReplayBuffer(10, directory=tmp_path)
    buffer.extend(batch_of(0, (3,)))
    with pytest.raises(weightsync.WeightsyncError, match="open"):
        rl.ReplayBuffer(10, directory=tmp_path)
    buffer.close()
    with pytest.raises(weightsync.WeightsyncError, match="room for 20 frames"):
        rl.ReplayBuffer(20, directory=tmp_path)
    assert len(rl.ReplayBuffer(10, directory=tmp_path)) == 3
    with pytest.raises(weightsync.LifecycleError, match="closed"):
        buffer.extend(batch_of(0, (3,)))


def test_priorities_that_are_not_kept_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        buffer = rl.ReplayBuffer(10, directory=tmp_path, sampler=rl.PrioritizedSampler())
        index = buffer.extend(batch_of(0, (3,)))
        buffer.update_priority(index, [1.0, 2.0, 3.0])
        buffer.close()
    assert [one.message for one in caplog.records] == [
        f"3 frames of {tmp_path} are as they were, and their priorities are not: each has the priority of a "
        "new frame, until update_priority gives it another"
    ]
    caplog.clear()
    assert len(rl.ReplayBuffer(10, directory=tmp_path)) == 6
    assert not caplog.records


def test_batch_with_other_columns_is_refused() -> None:
    buffer = rl.ReplayBuffer(10)
    with pytest.raises(weightsync.SettingError, match="empty"):
        buffer.sample(1)
    buffer.extend(batch_of(0, (3,)))
    other = batch_of(0, (3,))
    del other["next"]
    other["observation"] = other["observation"].double()
    with pytest.raises(weightsync.WrongWeightsError) as raised:
        buffer.extend(other)
    assert "next/reward: expected F64 [], got nothing" in str(raised.value)
    assert "observation: expected F32 [2], got F64 [2]" in str(raised.value)
    with pytest.raises(weightsync.WrongTypeError, match="batches of a collector"):
        buffer.extend([1, 2])
    with pytest.raises(weightsync.SettingError, match="batch_size"):
        buffer.sample()


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (rl.SliceSampler(num_slices=2, trajectory_key="episode"), "episode"),
        (rl.SliceSampler(), "num_slices"),
        (rl.PrioritizedSampler(alpha=-1.0), "alpha"),
        ("uniform", "a sampler is a"),
    ],
)
def test_sampler_that_cannot_be_is_refused(sampler: Any, message: str) -> None:
    with pytest.raises(weightsync.WeightsyncError, match=message):
        rl.ReplayBuffer(10, sampler=sampler).extend(batch_of(0, (3,)))


def test_forked_child_is_refused() -> None:
    buffer = rl.ReplayBuffer(10)
    buffer.extend(batch_of(0, (3,)))
    pid = os.fork()
    if pid == 0:
        try:
            buffer.sample(1)
        except weightsync.LifecycleError:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
