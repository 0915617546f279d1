"""The document's table of batch shapes, and what the frames of each cell are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from counting import Counting, zeros

import weightsync
from weightsync import rl

T, B, P = 6, 3, 2

#: Of a single environment, and of a batch of P.
ONE, BATCH = Counting, rl.SerialEnv(P, Counting)

CELLS = [
    ("sync", ONE, None, (T,)),
    ("sync", BATCH, None, (P, T)),
    ("multi-sync", ONE, "stack", (B, T)),
    ("multi-sync", ONE, 0, (B * T,)),
    ("multi-sync", ONE, -1, (B * T,)),
    ("multi-sync", BATCH, "stack", (B, P, T)),
    ("multi-sync", BATCH, 0, (B * P, T)),
    ("multi-sync", BATCH, -1, (P, T * B)),
    ("multi-async", ONE, None, (T,)),
    ("multi-async", BATCH, None, (P, T)),
    ("async", ONE, None, (T,)),
    ("async", BATCH, None, (P, T)),
]


def collector_of(kind: str, env: Any, cat_results: Any, **settings: Any) -> Any:
    rows = P if env is BATCH else 1
    if kind == "sync":
        return rl.Collector(env, zeros, frames_per_batch=rows * T, **settings)
    settings["workers"] = "threads"
    if kind == "multi-sync":
        return rl.MultiSyncCollector(
            [env] * B, zeros, frames_per_batch=B * rows * T, cat_results=cat_results, **settings
        )
    if kind == "multi-async":
        return rl.MultiAsyncCollector([env] * B, zeros, frames_per_batch=rows * T, **settings)
    return rl.AsyncCollector(env, zeros, frames_per_batch=rows * T, **settings)


@pytest.mark.parametrize(("kind", "env", "cat_results", "size"), CELLS)
def test_batch_has_the_shape_of_its_cell(kind: str, env: Any, cat_results: Any, size: Any) -> None:
    with collector_of(kind, env, cat_results, total_frames=-1) as collector:
        for number, batch in zip(range(3), collector, strict=False):
            assert batch.batch_size == size
            assert batch.numel() == collector.frames_per_batch
            assert batch["observation"].shape == (*size, 2)
            assert batch["next", "reward"].shape == size
            # Time is the last dimension, and goes on from batch to batch.
            steps = batch["observation"][..., 0].reshape(-1, T)
            if kind in ("sync", "multi-sync"):
                expected = [float((number * T + t) % 5) for t in range(T)]
                assert steps.tolist() == [expected] * len(steps)
            ids = batch["collector", "traj_ids"].reshape(-1, T)
            runs = [tuple(row.unique().tolist()) for row in ids]
            assert len({one for run in runs for one in run}) == sum(map(len, runs))


@pytest.mark.parametrize(("kind", "env", "cat_results", "size"), CELLS)
def test_splitting_gives_each_trajectory_a_row(
    kind: str, env: Any, cat_results: Any, size: Any
) -> None:
    with collector_of(kind, env, cat_results, split_trajs=True) as collector:
        batch = collector.next()
        mask = batch["collector", "mask"]
        assert batch.batch_size == tuple(mask.shape)
        assert int(mask.sum()) == collector.frames_per_batch
        for ids, row, inside in zip(
            batch["collector", "traj_ids"], batch["observation"], mask, strict=True
        ):
            assert len(ids[inside].unique()) == 1
            assert row[inside][:, 0].tolist() == list(range(int(inside.sum())))
            assert not row[~inside].any()


@pytest.mark.parametrize("of", [np.int32, np.uint8, np.float32, torch.int32, torch.int64])
def test_ids_of_any_type_split_a_batch(of: Any) -> None:
    ids = [[3, 3, 4], [5, 5, 5]]
    made = torch.tensor(ids, dtype=of) if isinstance(of, torch.dtype) else np.array(ids, of)
    batch = rl.Batch({"collector": {"traj_ids": made}}, (2, 3))
    split = rl.split_trajectories(batch)
    assert split["collector", "traj_ids"].tolist() == [[3, 3, 0], [4, 0, 0], [5, 5, 5]]
    assert type(split["collector", "mask"]) is type(made)


def test_uneven_batch_names_the_next_that_fits() -> None:
    with pytest.raises(weightsync.SettingError, match="multiple of 2, such as 8"):
        rl.Collector(BATCH, zeros, frames_per_batch=7)


def test_environments_must_be_of_one_kind() -> None:
    other = rl.SerialEnv(1, Counting)
    with pytest.raises(weightsync.SettingError, match="others have 2|others have 1"):
        rl.MultiSyncCollector([BATCH, other], zeros, frames_per_batch=8, workers="threads")
    with pytest.raises(weightsync.SettingError, match="one for each worker"):
        rl.MultiSyncCollector("CartPole-v1", zeros, frames_per_batch=8)


@pytest.mark.parametrize(
    "kind",
    [
        rl.MultiSyncCollector,
        pytest.param(rl.DistributedSyncDataCollector, marks=pytest.mark.soak),
    ],
)
def test_workers_may_name_columns_in_any_order(kind: Any) -> None:
    def policy(names: list[str]) -> Any:
        numbers = {"action": 2, "value": 7, "entropy": 3}
        return lambda seen: {
            name: torch.full((len(seen),), numbers[name], dtype=torch.int64) for name in names
        }

    orders = [["action", "value", "entropy"], ["entropy", "action", "value"]]
    factories = [lambda: policy(orders[0]), lambda: policy(orders[1])]
    with kind([Counting] * 2, policy_factory=factories, frames_per_batch=8) as collector:
        batch = collector.next()
    assert (batch["value"] == 7).all()
    assert (batch["entropy"] == 3).all()
