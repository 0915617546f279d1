"""The same frames as TorchRL's collectors, on environments of which each step is known."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from counting import Counting
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.envs import GymWrapper, SerialEnv

from weightsync import rl


def theirs(length: int = 5) -> Any:
    return GymWrapper(Counting(length), categorical_action_encoding=True)


def policy() -> Any:
    """The second action, for any batch."""
    return TensorDictModule(
        lambda seen: torch.ones(seen.shape[:-1], dtype=torch.int64), ["observation"], ["action"]
    )


KEYS = [
    "observation",
    "action",
    ("next", "observation"),
    ("next", "reward"),
    ("next", "done"),
    ("next", "terminated"),
    ("next", "truncated"),
    ("collector", "traj_ids"),
]


def compare(got: Any, expected: Any) -> None:
    for key in KEYS:
        mine, other = got[key], expected[key]
        assert mine.shape == other.shape, key
        assert torch.equal(mine.to(other.dtype), other), key


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_frames_per_traj": 3}, {"reset_at_each_iter": True}, {"split_trajs": True}],
    ids=str,
)
@pytest.mark.parametrize("count", [1, 3])
def test_single_collector_gives_their_frames(settings: dict[str, Any], count: int) -> None:
    frames = 8 * count
    lengths = [5, 3, 4][:count]
    if count == 1:
        env: Any = theirs()
        own: Any = Counting
    else:
        env = SerialEnv(count, [lambda length=length: theirs(length) for length in lengths])
        own = rl.SerialEnv(count, [lambda length=length: Counting(length) for length in lengths])
    other = Collector(env, policy(), frames_per_batch=frames, total_frames=4 * frames, **settings)
    with rl.Collector(
        own, policy(), frames_per_batch=frames, total_frames=4 * frames, **settings
    ) as mine:
        batches = 0
        for got, expected in zip(mine, other, strict=True):
            assert got.batch_size == expected.batch_size
            compare(got, expected)
            if "split_trajs" in settings:
                assert torch.equal(got["collector", "mask"], expected["collector", "mask"])
            batches += 1
        assert batches == 4
    other.shutdown()


@pytest.mark.parametrize(
    ("cat_results", "count"),
    [
        ("stack", 2),
        *(
            pytest.param(how, count, marks=pytest.mark.soak)
            for how, count in itertools.product(["stack", 0, -1], [1, 2])
            if (how, count) != ("stack", 2)
        ),
    ],
)
def test_multi_sync_gives_their_frames(cat_results: Any, count: int) -> None:
    frames = 2 * 8 * count
    env: Any = theirs if count == 1 else SerialEnv(count, theirs)
    own: Any = Counting if count == 1 else rl.SerialEnv(count, Counting)
    settings: dict[str, Any] = {
        "frames_per_batch": frames,
        "total_frames": 3 * frames,
        "cat_results": cat_results,
    }
    other = MultiSyncCollector([env] * 2, policy(), **settings)
    pairs: set[tuple[int, int]] = set()
    with rl.MultiSyncCollector([own] * 2, policy(), workers="threads", **settings) as mine:
        try:
            for got, expected in zip(mine, other, strict=True):
                assert got.batch_size == expected.batch_size
                # Their workers take trajectory ids from one counter in the order that they come, so
                # each of theirs is one of ours, in all batches.
                ids = expected["collector", "traj_ids"]
                own_ids = got["collector", "traj_ids"]
                assert own_ids.shape == ids.shape
                pairs.update(zip(own_ids.flatten().tolist(), ids.flatten().tolist(), strict=True))
                expected["collector", "traj_ids"] = own_ids
                compare(got, expected)
            own_numbers, numbers = ({pair[at] for pair in pairs} for at in (0, 1))
            assert len(pairs) == len(own_numbers) == len(numbers)
            assert own_numbers == numbers == set(range(len(pairs)))
        finally:
            other.shutdown()
