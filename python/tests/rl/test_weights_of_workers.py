"""Weights on their way to workers: every form of the call, and what frames say about them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from counting import Constant, Counting, Pixels, zeros

import weightsync
from weightsync import rl

KINDS = ["processes", "threads"]


@pytest.mark.parametrize("workers", KINDS)
def test_frames_are_of_the_weights_sent_last(workers: Any) -> None:
    policy = Constant()
    envs = [rl.SerialEnv(2, Counting)] * 2
    with rl.MultiSyncCollector(envs, policy, frames_per_batch=24, workers=workers) as collector:
        for version, action in [(1, 0), (2, 2), (3, 1)]:
            if version > 1:
                report = collector.update_policy_weights_(policy.choose(action))
                assert report.all_applied
            policy.choose(2 - action)  # Not sent: no worker sees it.
            batch = collector.next()
            assert set(batch["action"].flatten().tolist()) == {action}
            assert set(batch["collector", "policy_version"].flatten().tolist()) == {version}
            assert collector.version == version


FORMS: list[Any] = [
    lambda c, p: c.update_policy_weights_(),
    lambda c, p: c.update_policy_weights_(p),
    lambda c, p: c.update_policy_weights_(p.state_dict()),
    lambda c, p: c.update_policy_weights_(weights=p.state_dict()),
    lambda c, p: c.update_policy_weights_(policy=p),
    lambda c, p: c.update_policy_weights_(p, model_id="policy"),
    lambda c, p: c.update_policy_weights_(weights_dict={"policy": p}),
    lambda c, p: c.update_policy_weights_(p, worker_ids=[0, 1]),
    lambda c, p: c.update_policy_weights_({0: p, 1: p}),
]


@pytest.fixture(scope="module")
def shared() -> Any:
    policy = Constant()
    with rl.MultiSyncCollector(
        [Counting] * 2, policy, frames_per_batch=4, workers="threads"
    ) as collector:
        yield collector, policy


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_taken_in_every_form(shared: Any, form: Any) -> None:
    collector, policy = shared
    action = (FORMS.index(form) + 1) % 3
    form(collector, policy.choose(action))
    assert set(collector.next()["action"].flatten().tolist()) == {action}


def test_tensordict_of_weights_is_taken(shared: Any) -> None:
    from tensordict import TensorDict

    collector, policy = shared
    collector.update_policy_weights_(TensorDict.from_module(policy.choose(1)))
    assert set(collector.next()["action"].flatten().tolist()) == {1}


def test_one_worker_alone_is_updated(shared: Any) -> None:
    collector, policy = shared
    collector.update_policy_weights_(policy.choose(0))
    collector.update_policy_weights_(policy.choose(1), worker_ids=1)
    assert collector.next()["action"][:, 0].tolist() == [0, 1]
    collector.update_policy_weights_({0: Constant(2), 1: Constant(0)})
    assert collector.next()["action"][:, 0].tolist() == [2, 0]


def test_call_that_cannot_be_is_refused(shared: Any) -> None:
    collector, policy = shared
    with pytest.raises(weightsync.MissingModelError, match="'value'"):
        collector.update_policy_weights_(policy, model_id="value")
    with pytest.raises(weightsync.SettingError, match="once"):
        collector.update_policy_weights_(policy, policy=policy)
    with pytest.raises(weightsync.SettingError, match="not both"):
        collector.update_policy_weights_(policy, weights_dict={"policy": policy})
    with pytest.raises(weightsync.SettingError, match="from 0 to 1"):
        collector.update_policy_weights_(policy, worker_ids=2)
    with pytest.raises(weightsync.WrongWeightsError, match="action"):
        collector.update_policy_weights_({"action": torch.zeros(2)})


@pytest.mark.parametrize("is_list", [False, True])
def test_factories_make_policies_in_workers(is_list: bool) -> None:
    factory: Any = [lambda: Constant(1), lambda: Constant(2)] if is_list else lambda: Constant(1)
    with rl.MultiSyncCollector(
        [Counting] * 2, policy_factory=factory, frames_per_batch=4, workers="threads"
    ) as collector:
        assert collector.next()["action"][:, 0].tolist() == ([1, 2] if is_list else [1, 1])
        assert collector.version == 0
        with pytest.raises(weightsync.SettingError, match="no weights of 'policy' to send"):
            collector.update_policy_weights_()
        collector.update_policy_weights_(Constant(0))
        assert collector.next()["action"][:, 0].tolist() == [0, 0]
        collector.update_policy_weights_({1: Constant(2)})
        assert collector.next()["action"][:, 0].tolist() == [0, 2]


def test_each_batch_updates_where_asked() -> None:
    policy = Constant(0)
    with rl.MultiSyncCollector(
        [Counting], policy, frames_per_batch=4, workers="threads", update_at_each_batch=True
    ) as collector:
        for action in (1, 2, 0):
            policy.choose(action)
            assert set(collector.next()["action"].flatten().tolist()) == {action}


class Valued(Counting):
    """An environment with a model of its own, whose weights are its observation."""

    def __init__(self) -> None:
        super().__init__()
        self.value_net = Constant(0)

    def step(self, action: int) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        observation[1] = float(self.value_net.action.detach())
        return observation, reward, terminated, truncated, info


def test_models_flip_together_by_id() -> None:
    policy, value = Constant(0), Constant(5)
    with rl.MultiSyncCollector(
        [Valued] * 2,
        policy,
        frames_per_batch=4,
        workers="threads",
        weight_sync_schemes={"policy": "shared-mem", "env.value_net": "shared-mem"},
        models={"env.value_net": value},
    ) as collector:
        seen = collector.next()["next", "observation"][..., 1]
        assert set(seen.flatten().tolist()) == {5.0}
        collector.update_policy_weights_(
            weights_dict={"policy": policy.choose(2), "env.value_net": value.choose(7)}
        )
        batch = collector.next()
        assert set(batch["action"].flatten().tolist()) == {2}
        assert set(batch["next", "observation"][..., 1].flatten().tolist()) == {7.0}
    with pytest.raises(weightsync.SettingError, match="give models="):
        rl.MultiSyncCollector(
            [Valued], policy, frames_per_batch=4, weight_sync_schemes={"env.value_net": "none"}
        )


def test_single_collector_shares_the_policy() -> None:
    policy = Constant(1)
    with rl.Collector(Counting, policy, frames_per_batch=4) as collector:
        assert set(collector.next()["action"].tolist()) == {1}
        policy.choose(2)
        collector.update_policy_weights_()
        batch = collector.next()
        assert set(batch["action"].tolist()) == {2}
        assert set(batch["collector", "policy_version"].tolist()) == {1}
        with pytest.raises(weightsync.WrongWeightsError, match="shape"):
            collector.update_policy_weights_({"action": torch.zeros(2)})
        assert policy.action.tolist() == [2.0]


def test_policy_without_weights_gets_none() -> None:
    with rl.MultiSyncCollector(
        [Pixels], None, frames_per_batch=4, workers="threads"
    ) as collector:
        assert collector.next()["action"].shape == (1, 4, 2)
        with pytest.raises(weightsync.SettingError, match="no weights"):
            collector.update_policy_weights_()


def test_async_frames_say_their_versions() -> None:
    policy = Constant()
    with rl.MultiAsyncCollector(
        [Counting] * 2, policy, frames_per_batch=40, workers="threads"
    ) as collector:
        for version in range(2, 12):
            collector.update_policy_weights_(policy.choose(version % 3))
            batch = collector.next()
            versions = batch["collector", "policy_version"]
            assert torch.equal(batch["action"], versions % 3 * (versions > 1))
            assert (versions.diff() >= 0).all()
            assert versions.max() <= version


def test_stale_frames_are_dropped_where_asked() -> None:
    policy = Constant()
    with rl.AsyncCollector(
        Counting, policy, frames_per_batch=4, max_staleness=0, workers="threads"
    ) as collector:
        collector.next()
        for version in range(2, 8):
            collector.update_policy_weights_(policy.choose(version % 3))
            batch = collector.next()
            assert set(batch["collector", "policy_version"].tolist()) == {version}
            assert batch.dropped % 4 == 0


def test_first_weights_come_in_the_middle() -> None:
    with rl.MultiAsyncCollector(
        [lambda: Counting(10**6)] * 2,
        policy_factory=Constant,
        frames_per_batch=5,
        workers="threads",
    ) as collector:
        seen: dict[int, list[float]] = {}
        for number in range(12):
            if number == 3:
                collector.update_policy_weights_(Constant(1))
            batch = collector.next()
            steps = batch["observation"][:, 0].tolist()
            seen.setdefault(int(batch["collector", "traj_ids"][0]), []).extend(steps)
        for steps in seen.values():
            assert steps == [float(step) for step in range(len(steps))]


def test_first_weights_come_to_a_running_collector() -> None:
    got = threading.Event()

    class Buffer:
        def extend(self, batch: Any) -> None:
            if 1 in batch["action"]:
                got.set()

    collector = rl.MultiAsyncCollector(
        [Counting] * 2,
        policy_factory=Constant,
        frames_per_batch=5,
        workers="threads",
        replay_buffer=Buffer(),
    )
    collector.start()
    assert collector.update_policy_weights_(Constant(1)).all_applied
    assert got.wait(100)
    with pytest.raises(weightsync.LifecycleError, match="in the background"):
        collector.next()
    collector.async_shutdown()


def test_seed_repeats_a_policy_of_torch() -> None:
    class Drawing(torch.nn.Module):
        def forward(self, observation: torch.Tensor) -> Any:
            return torch.distributions.Categorical(logits=torch.zeros(len(observation), 3))

    def drawn() -> Any:
        with rl.MultiSyncCollector([Counting], Drawing(), frames_per_batch=30, seed=3) as collector:
            return collector.next()["action"]

    assert torch.equal(drawn(), drawn())


def test_policy_without_parameters_needs_no_update() -> None:
    class First(torch.nn.Module):
        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return zeros(observation)

    with rl.MultiSyncCollector(
        [Counting], First(), frames_per_batch=4, workers="threads", update_at_each_batch=True
    ) as collector:
        assert collector.next()["collector", "policy_version"].tolist() == [[0] * 4]


def test_plain_function_has_no_weights_to_compare() -> None:
    with rl.Collector(Counting, zeros, frames_per_batch=4) as collector:
        with pytest.raises(weightsync.WrongTypeError, match="no torch module"):
            collector.update_policy_weights_(Constant())
