"""Environments that Rust steps, and policies that it runs in them."""

from __future__ import annotations

import copy
import os
import signal
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

import weightsync
from weightsync import rl
from weightsync.rl._envs import Envs

KINDS = ["processes", "threads"]

#: The state that an observation shows.
STATES: dict[str, Any] = {
    "CartPole-v1": lambda seen: seen.astype(float),
    "MountainCar-v0": lambda seen: seen.astype(float),
    "Pendulum-v1": lambda seen: np.array([np.arctan2(seen[1], seen[0]), seen[2]], float),
    "Acrobot-v1": lambda seen: np.array(
        [np.arctan2(seen[1], seen[0]), np.arctan2(seen[3], seen[2]), *seen[4:]], float
    ),
}


def policy_for(name: str, hidden: tuple[int, ...] = (16, 16)) -> Any:
    """A policy that is not indifferent."""
    torch.manual_seed(5)
    if name == "Pendulum-v1":
        return rl.GaussianMLP(3, 1, hidden, log_std=-0.5)
    inputs, outputs = {"CartPole-v1": (4, 2), "MountainCar-v0": (2, 3), "Acrobot-v1": (6, 3)}[name]
    made = rl.MLP(inputs, outputs, hidden)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(2.0)
    return made


class Asked(torch.nn.Module):
    """The same policy as a module that Rust does not know."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, observation: torch.Tensor) -> Any:
        return self.inner(observation)


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("is_run", [True, False], ids=["run", "asked"])
def test_each_step_is_gymnasiums(name: str, is_run: bool) -> None:
    policy = policy_for(name) if is_run else Asked(policy_for(name))
    env = gymnasium.make(name)
    env.reset(seed=0)
    own = rl.BuiltinEnv(name)
    with rl.Collector(own, policy, frames_per_batch=1100, seed=3, return_type="numpy") as collector:
        batch = collector.next()
    seen, led_to = batch["observation"], batch["next", "observation"]
    assert seen.dtype == led_to.dtype == np.float32
    ends, length = 0, 0
    for t in range(1100):
        # A state of 32 bits is not quite that of 64, so the same place begins each step.
        env.unwrapped.state = STATES[name](seen[t])
        action = batch["action"][t]
        observation, reward, terminated, _, _ = env.unwrapped.step(action)
        np.testing.assert_allclose(led_to[t], observation, rtol=1e-5, atol=2e-6)
        np.testing.assert_allclose(batch["next", "reward"][t], reward, rtol=1e-5, atol=2e-6)
        assert batch["next", "terminated"][t] == terminated, t
        length += 1
        assert env.spec is not None
        assert batch["next", "truncated"][t] == (length == env.spec.max_episode_steps), t
        done = batch["next", "terminated"][t] or batch["next", "truncated"][t]
        assert batch["next", "done"][t] == done
        if done:
            ends, length = ends + 1, 0
            env.reset()
        elif t + 1 < 1100:
            np.testing.assert_array_equal(seen[t + 1], led_to[t])
    assert ends >= 2
    assert batch["collector", "traj_ids"].tolist() == np.cumsum(
        [0, *batch["next", "done"][:-1]]
    ).tolist()


@pytest.mark.parametrize("name", STATES)
def test_episodes_begin_as_gymnasiums_do(name: str) -> None:
    env = gymnasium.make(name)
    with rl.Collector(
        rl.BuiltinEnv(name, 400), policy_for(name), frames_per_batch=400, seed=1, return_type="numpy"
    ) as collector:
        mine = np.stack([STATES[name](one[0]) for one in collector.next()["observation"]])
    theirs = np.stack([STATES[name](env.reset(seed=seed)[0]) for seed in range(400)])
    # Both are even: the means of 400 differ by less than a quarter of the range.
    span = theirs.max(0) - theirs.min(0) + 1e-9
    assert (np.abs(mine.min(0) - theirs.min(0)) < span * 0.1 + 1e-6).all()
    assert (np.abs(mine.max(0) - theirs.max(0)) < span * 0.1 + 1e-6).all()
    assert (np.abs(mine.mean(0) - theirs.mean(0)) < span * 0.25 + 1e-6).all()


@pytest.mark.parametrize("name", STATES)
def test_spaces_are_gymnasiums(name: str) -> None:
    env, own = gymnasium.make(name), Envs.of(rl.BuiltinEnv(name, 2)())
    assert own.action_space == env.action_space
    (column,) = own.columns
    space = env.observation_space
    assert (column.shape, column.dtype) == (space.shape, str(space.dtype))


RULES: list[dict[str, Any]] = [
    {},
    {"max_frames_per_traj": 13},
    {"reset_at_each_iter": True},
    {"init_random_frames": 100},
    {"split_trajs": True},
    {"reset_when_done": False},
]


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("rules", RULES, ids=str)
def test_rust_collects_what_calls_collect(name: str, rules: dict[str, Any]) -> None:
    """Nothing is drawn, so that the frames of both are the same but for rounding."""
    settings = {"exploration_type": "deterministic", "seed": 7, "frames_per_batch": 300, **rules}
    policy = policy_for(name)
    with rl.Collector(rl.BuiltinEnv(name, 3), policy, **settings) as run:
        with rl.Collector(rl.BuiltinEnv(name, 3), Asked(policy), **settings) as asked:
            for _ in range(3):
                compare(run.next(), asked.next())


def compare(mine: Any, other: Any) -> None:
    """Frames until rounding has led to another action somewhere: none in these episodes."""
    assert mine.batch_size == other.batch_size
    assert list(mine.columns()) == list(other.columns())
    for key, value in mine.columns().items():
        assert value.dtype == other[key].dtype, key
        if value.is_floating_point():
            torch.testing.assert_close(value, other[key], rtol=1e-4, atol=1e-4, msg=str(key))
        else:
            assert torch.equal(value, other[key]), key


@pytest.mark.parametrize("explore", ["random", "mode", "mean", "deterministic"])
@pytest.mark.parametrize("name", STATES)
def test_log_probabilities_are_torchs(name: str, explore: Any) -> None:
    policy = policy_for(name)
    with rl.Collector(
        rl.BuiltinEnv(name, 4), policy, frames_per_batch=800, exploration_type=explore, seed=2
    ) as collector:
        batch = collector.next()
    answer = policy(batch["observation"])
    if name == "Pendulum-v1":
        expected, best = answer.log_prob(batch["action"]), answer.mean
        assert batch["action"].shape == (4, 200, 1)
    else:
        categorical = torch.distributions.Categorical(logits=answer)
        expected, best = categorical.log_prob(batch["action"]), answer.argmax(-1)
        assert batch["action"].dtype == torch.int64
    torch.testing.assert_close(batch["action_log_prob"], expected, rtol=1e-5, atol=1e-5)
    is_best = torch.isclose(batch["action"], best, rtol=1e-4, atol=1e-5).float().mean()
    assert is_best < 0.9 if explore == "random" else is_best == 1


def test_actions_are_drawn_as_probable_as_they_are() -> None:
    policy = rl.MLP(4, 2, hidden=())
    with torch.no_grad():
        policy[0].weight.zero_()
        policy[0].bias.copy_(torch.tensor([0.2, 0.8]).log())
    with rl.Collector(
        rl.BuiltinEnv("CartPole-v1", 4), policy, frames_per_batch=8000, seed=2
    ) as collector:
        action = collector.next()["action"].float()
    # Four deviations of 8000 draws.
    assert abs(action.mean().item() - 0.8) < 4 * (0.16 / 8000) ** 0.5


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_same_seed_gives_the_same_frames(name: str) -> None:
    def collected(seed: int, envs: int = 3) -> Any:
        with rl.Collector(
            rl.BuiltinEnv(name, envs), policy_for(name), frames_per_batch=100 * envs, seed=seed
        ) as collector:
            return [collector.next(), collector.next()]

    for first, second in zip(collected(11), collected(11), strict=True):
        for key, value in first.columns().items():
            assert torch.equal(value, second[key]), key
    assert not torch.equal(collected(11)[0]["observation"], collected(12)[0]["observation"])
    # An environment's frames do not depend on how many others there are.
    alone = collected(13, 1)[1]["observation"][0]
    assert torch.equal(collected(11)[1]["observation"][2], alone)


@pytest.mark.parametrize("workers", KINDS)
def test_frames_carry_the_version_of_their_weights(workers: Any) -> None:
    """Each version always takes the same action."""
    policy = rl.MLP(4, 2, hidden=(8,))
    envs = [rl.BuiltinEnv("CartPole-v1", 4)] * 2
    with rl.MultiSyncCollector(envs, policy, frames_per_batch=512, workers=workers) as collector:
        for version, action in [(1, 0), (2, 1), (3, 0)]:
            prefer(policy, action)
            if version > 1:
                assert collector.update_policy_weights_().all_applied
                batch = collector.next()
                assert set(batch["action"].flatten().tolist()) == {action}
            else:
                batch = collector.next()
            # Not sent: no worker sees it.
            prefer(policy, 1 - action)
            versions = batch["collector", "policy_version"]
            assert set(versions.flatten().tolist()) == {version}
            assert batch.batch_size == (2, 4, 64)
            assert len(batch["collector", "traj_ids"].unique()) > 8


def prefer(policy: Any, action: int) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
        policy[-1].bias[action] = 100.0


@pytest.mark.parametrize(
    ("workers", "hidden", "frames"),
    [
        pytest.param("processes", (8,), 20_000, id="processes-copied"),
        pytest.param("threads", (256, 256), 1000, id="threads-bound"),
        pytest.param("processes", (256, 256), 1000, id="processes-bound", marks=pytest.mark.soak),
        pytest.param("threads", (8,), 20_000, id="threads-copied", marks=pytest.mark.soak),
    ],
)
def test_weights_come_between_two_steps(workers: Any, hidden: Any, frames: int) -> None:
    """Every version chooses one action, and no frame mixes two of them."""
    policy = rl.MLP(4, 2, hidden)
    prefer(policy, 1)
    envs = [rl.BuiltinEnv("CartPole-v1", 2)] * 2
    with rl.MultiAsyncCollector(envs, policy, frames_per_batch=frames, workers=workers) as collector:
        version = has_mixed = 0
        # On a busy machine the updates may all come between two parts.
        while version < 30 or not has_mixed:
            for version in range(version + 1, version + 4):
                if version > 1:
                    prefer(policy, version % 2)
                    collector.update_policy_weights_()
            batch = collector.next()
            versions = batch["collector", "policy_version"]
            assert torch.equal(batch["action"], versions % 2)
            assert (versions.diff() >= 0).all()
            assert versions.max() <= version
            # All environments change in the same step.
            assert torch.equal(versions[0], versions[1])
            has_mixed |= int(versions.min() < versions.max())


def test_collector_reads_the_weights_of_its_policy() -> None:
    policy = rl.MLP(4, 2, hidden=(8,))
    with rl.Collector(rl.BuiltinEnv("CartPole-v1", 2), policy, frames_per_batch=20) as collector:
        for action in (0, 1, 0):
            prefer(policy, action)
            assert set(collector.next()["action"].flatten().tolist()) == {action}
        # New memory, as an optimizer that flattens its parameters makes.
        for parameter in policy.parameters():
            parameter.data = parameter.detach().clone()
        prefer(policy, 1)
        assert set(collector.next()["action"].flatten().tolist()) == {1}


@pytest.mark.parametrize("count", [None, 2])
@pytest.mark.parametrize("cat_results", ["stack", 0, -1])
def test_batches_have_the_shapes_of_others(cat_results: Any, count: int | None) -> None:
    rows = 2 * (count or 1)
    settings: dict[str, Any] = {
        "frames_per_batch": 30 * rows,
        "cat_results": cat_results,
        "exploration_type": "mode",
        "workers": "threads",
        "seed": 4,
    }
    own, policy = rl.BuiltinEnv("CartPole-v1", count), policy_for("CartPole-v1")
    with rl.MultiSyncCollector([own] * 2, policy, **settings) as mine:
        with rl.MultiSyncCollector([own] * 2, Asked(policy), **settings) as other:
            for _ in range(2):
                compare(mine.next(), other.next())
    other_env: Any = rl.SerialEnv(count, "CartPole-v1") if count else "CartPole-v1"
    with rl.MultiSyncCollector([other_env] * 2, policy, **settings) as theirs:
        assert mine._batch_size() == theirs.next().batch_size


@pytest.mark.parametrize("restart", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_killed_worker_is_replaced(restart: bool) -> None:
    policy = rl.MLP(4, 2)
    envs = [rl.BuiltinEnv("CartPole-v1", 4)] * 2
    with rl.MultiSyncCollector(envs, policy, frames_per_batch=800, restart=restart) as collector:
        collector.next()
        collector.update_policy_weights_()
        pid = collector.pid(1)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        if not restart:
            with pytest.raises(weightsync.PeerError, match="worker 1.*SIGKILL"):
                collector.next()
        batch = collector.next()
        assert batch.batch_size == (2, 4, 100)
        assert set(batch["collector", "policy_version"].flatten().tolist()) == {2}
        if restart:
            (failure,) = batch.failures
            assert (failure.worker, failure.restarted) == (1, True)


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_weights_that_are_nan_are_reported(name: str) -> None:
    policy = policy_for(name)
    with rl.MultiAsyncCollector(
        [rl.BuiltinEnv(name, 4)], policy, frames_per_batch=400, workers="threads"
    ) as collector:
        collector.next()
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.fill_(torch.nan)
        collector.update_policy_weights_()
        with pytest.raises(weightsync.PeerError, match="is NaN in environment 0 at step"):
            for _ in range(4):
                collector.next()


def hooked(policy: Any) -> Any:
    policy[0].register_forward_hook(lambda module, args, output: output + 1)
    return policy


def overridden(policy: Any) -> Any:
    policy.forward = lambda observation: torch.zeros(len(observation), 2)
    return policy


def nested(policy: Any) -> Any:
    return torch.nn.Sequential(policy, torch.nn.Tanh())


def relu(policy: Any) -> Any:
    policy[1] = torch.nn.ReLU()
    return policy


def parametrised(policy: Any) -> Any:
    return torch.nn.utils.parametrizations.weight_norm(policy[0]) and policy


CHANGES = [hooked, overridden, nested, relu, parametrised]


@pytest.mark.parametrize("change", CHANGES)
def test_other_policy_is_asked_for_each_step(change: Any) -> None:
    """What Rust does not know acts as it does in torch."""
    torch.manual_seed(3)
    policy = change(rl.MLP(4, 2, hidden=(8, 8)))
    with rl.Collector(
        rl.BuiltinEnv("CartPole-v1", 3), policy, frames_per_batch=90, exploration_type="mode"
    ) as collector:
        batch = collector.next()
    logits = policy(batch["observation"].flatten(0, 1))
    assert torch.equal(batch["action"].flatten(), logits.argmax(-1))
    expected = logits.log_softmax(-1).amax(-1)
    torch.testing.assert_close(batch["action_log_prob"].flatten(), expected)


def test_policy_changed_in_the_middle_is_followed() -> None:
    policy = rl.MLP(4, 2, hidden=(8,))
    prefer(policy, 0)
    with rl.Collector(rl.BuiltinEnv("CartPole-v1", 2), policy, frames_per_batch=20) as collector:
        assert set(collector.next()["action"].flatten().tolist()) == {0}
        handle = policy.register_forward_hook(lambda module, args, output: -output)
        assert set(collector.next()["action"].flatten().tolist()) == {1}
        handle.remove()
        assert set(collector.next()["action"].flatten().tolist()) == {0}


def test_means_alone_are_the_actions() -> None:
    policy = rl.MLP(3, 1, hidden=(8,))
    with rl.Collector(rl.BuiltinEnv("Pendulum-v1", 2), policy, frames_per_batch=100) as collector:
        batch = collector.next()
    assert "action_log_prob" not in batch
    torch.testing.assert_close(batch["action"], policy(batch["observation"]), rtol=1e-5, atol=1e-5)


def test_random_actions_need_no_policy() -> None:
    for name, count in [("Acrobot-v1", 3), ("Pendulum-v1", None)]:
        with rl.Collector(
            rl.BuiltinEnv(name, 2), None, frames_per_batch=600, return_type="numpy"
        ) as collector:
            action = collector.next()["action"]
        if count is None:
            assert np.abs(action).max() <= 2
            assert np.abs(action).max() > 1.9
        else:
            assert set(action.flatten().tolist()) == set(range(count))


def test_task_that_is_not_built_in_is_refused() -> None:
    with pytest.raises(
        weightsync.SettingError,
        match="no built-in task \"CartPole-v0\".*CartPole-v1, MountainCar-v0, Acrobot-v1, Pendulum-v1",
    ):
        rl.BuiltinEnv("CartPole-v0", 8)
    for count in (0, -1, 1.5, "8", 10**9):
        with pytest.raises(weightsync.SettingError, match="num_envs: expected a whole number from 1"):
            rl.BuiltinEnv("CartPole-v1", count)  # type: ignore[arg-type]
    with pytest.raises(weightsync.SettingError, match="id: expected the name of a task"):
        rl.BuiltinEnv(None, 8)  # type: ignore[arg-type]
    with pytest.raises(weightsync.WrongTypeError, match=r"made BuiltinEnv\('CartPole-v1', None\)"):
        rl.Collector([rl.BuiltinEnv("CartPole-v1")] * 2, None, frames_per_batch=4)


def test_policy_of_other_sizes_is_refused() -> None:
    env = rl.BuiltinEnv("Acrobot-v1", 2)
    for policy, words in [
        (rl.MLP(4, 3), r"takes observations of size 4, and Acrobot-v1 has 6.*MLP\(6, 3\)"),
        (rl.MLP(6, 2), "gives actions of size 2, and Acrobot-v1 has 3"),
    ]:
        with pytest.raises(weightsync.WrongTypeError, match=words):
            rl.Collector(env, policy, frames_per_batch=4)
        with pytest.raises(weightsync.PeerError, match=words):
            rl.MultiSyncCollector([env], policy, frames_per_batch=4, workers="threads")


def test_action_that_there_is_not_is_refused() -> None:
    def third(observation: torch.Tensor) -> torch.Tensor:
        return torch.full((len(observation),), -1)

    with rl.Collector(rl.BuiltinEnv("CartPole-v1", 2), third, frames_per_batch=4) as collector:
        with pytest.raises(weightsync.CorruptError, match="action -1 of a task whose actions are 0 to 1"):
            collector.next()


def test_models_are_modules_of_torch() -> None:
    policy = rl.MLP(4, 2, hidden=(64, 32))
    assert [type(one).__name__ for one in policy] == ["Linear", "Tanh", "Linear", "Tanh", "Linear"]
    assert [one.weight.shape for one in policy[::2]] == [(64, 4), (32, 64), (2, 32)]
    assert list(policy.state_dict())[:2] == ["0.weight", "0.bias"]
    assert type(policy[:2]) is torch.nn.Sequential
    gaussian = copy.deepcopy(rl.GaussianMLP(3, 2, log_std=-1.0))
    answer = gaussian(torch.zeros(5, 3))
    assert answer.sample().shape == (5, 2)
    assert torch.allclose(answer.stddev, torch.tensor(-1.0).exp())
    answer.log_prob(answer.mean).sum().backward()
    assert gaussian.log_std.grad is not None
