"""The settings of collectors."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from counting import Constant, Counting, Pixels, zeros
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import weightsync
from weightsync import rl


def test_iteration_ends_with_total_frames() -> None:
    with rl.Collector(Counting, zeros, frames_per_batch=4, total_frames=10) as collector:
        assert [batch.numel() for batch in collector] == [4, 4, 4]
        assert collector.frames == 12
        assert collector.next() is None


def test_column_of_another_name_is_refused() -> None:
    class Hiding(Pixels):
        def __init__(self) -> None:
            super().__init__()
            self.observation_space = gymnasium.spaces.Dict(
                action=gymnasium.spaces.Box(0, 1, (1,)), state=gymnasium.spaces.Box(0, 1, (1,))
            )

        def _observation(self, value: float) -> Any:
            return {"action": np.zeros(1, np.float32), "state": np.zeros(1, np.float32)}

    with pytest.raises(weightsync.SettingError, match="one name: action"):
        rl.Collector(Hiding, None, frames_per_batch=4).next()


def test_one_environment_is_not_stepped_twice() -> None:
    env = Counting()
    with pytest.raises(weightsync.SettingError, match="several times"):
        rl.SerialEnv(2, env)
    with pytest.raises(weightsync.SettingError, match="of their own"):
        rl.MultiSyncCollector([env] * 2, zeros, frames_per_batch=4, workers="threads")
    with rl.Collector(env, zeros, frames_per_batch=4) as collector:
        assert collector.next().numel() == 4


def test_choices_may_start_anywhere() -> None:
    class Shifted(Counting):
        action_space = gymnasium.spaces.Discrete(3, start=5)

    policy = torch.nn.Linear(2, 3)
    with rl.Collector(Shifted, policy, frames_per_batch=90, init_random_frames=90) as collector:
        for _ in range(2):
            assert set(collector.next()["action"].tolist()) <= {5, 6, 7}


def test_batch_takes_full_names_everywhere() -> None:
    with rl.Collector(Counting, zeros, frames_per_batch=4) as collector:
        batch = collector.next()
    batch["next", "value"] = batch["next", "reward"] + 1
    assert ("next", "value") in batch
    assert ("next", "no") not in batch
    assert batch.get(("next", "no")) is None
    assert batch["next"]["value"].tolist() == [2.0, 3.0, 4.0, 5.0]
    assert "next.value" in repr(batch)


def test_interrupted_episode_is_not_gone_on_with() -> None:
    class Once(Counting):
        def step(self, action: int) -> Any:
            if self.taken == 3:
                self.taken += 1
                raise KeyboardInterrupt
            return super().step(action)

    with rl.Collector(Once, zeros, frames_per_batch=8) as collector:
        with pytest.raises(KeyboardInterrupt):
            collector.next()
        batch = collector.next()
        assert batch["observation"][:, 0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
        assert batch["collector", "traj_ids"].tolist() == [1] * 5 + [2] * 3
    with pytest.raises(weightsync.LifecycleError, match="shut down"):
        collector.next()


def test_long_episodes_are_truncated() -> None:
    with rl.Collector(Counting, zeros, frames_per_batch=9, max_frames_per_traj=3) as collector:
        batch = collector.next()
        assert batch["next", "truncated"].tolist() == [False, False, True] * 3
        assert not batch["next", "terminated"].any()
        assert batch["collector", "traj_ids"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        assert batch["next", "observation"][2, 0] == 3, "before the reset"


def test_each_batch_begins_new_episodes_if_asked() -> None:
    with rl.Collector(Counting, zeros, frames_per_batch=3, reset_at_each_iter=True) as collector:
        for number in range(3):
            batch = collector.next()
            assert batch["observation"][:, 0].tolist() == [0, 1, 2]
            assert batch["collector", "traj_ids"].tolist() == [number + 1] * 3


def test_rows_stay_empty_without_reset_when_done() -> None:
    envs = rl.SerialEnv(2, [lambda: Counting(2), lambda: Counting(4)])
    with rl.Collector(envs, zeros, frames_per_batch=12, reset_when_done=False) as collector:
        for number in range(2):
            batch = collector.next()
            mask = batch["collector", "mask"]
            assert mask.tolist() == [[True] * 2 + [False] * 4, [True] * 4 + [False] * 2]
            assert not batch["observation"][~mask].any()
            assert batch["collector", "traj_ids"][:, 0].tolist() == [2 * number, 2 * number + 1]
            assert batch["next", "terminated"][mask].sum() == 2


def test_first_frames_are_random_in_whole_batches() -> None:
    policy = Constant(2)
    with rl.Collector(Counting, policy, frames_per_batch=50, init_random_frames=60, seed=3) as one:
        first, second, third = one.next(), one.next(), one.next()
    assert set(first["action"].tolist()) == set(second["action"].tolist()) == {0, 1, 2}
    assert set(third["action"].tolist()) == {2}


def test_workers_begin_with_random_frames() -> None:
    settings: dict[str, Any] = {"init_random_frames": 10, "workers": "threads"}
    with rl.MultiSyncCollector(
        [Counting] * 2, Constant(), frames_per_batch=40, **settings
    ) as collector:
        first, second = collector.next(), collector.next()
        assert not first["collector", "policy_version"].any(), "random frames are of no version"
        assert set(second["collector", "policy_version"].flatten().tolist()) == {1}
    with rl.MultiAsyncCollector(
        [Counting] * 2, Constant(), frames_per_batch=20, max_staleness=0, **settings
    ) as collector:
        assert not collector.next()["collector", "policy_version"].any()


def test_seed_repeats_all_frames() -> None:
    def collected(seed: int) -> Any:
        policy = torch.nn.Linear(4, 2)
        torch.nn.init.zeros_(policy.weight)
        torch.nn.init.zeros_(policy.bias)
        with rl.Collector("CartPole-v1", policy, frames_per_batch=60, seed=seed) as collector:
            first = collector.next()["observation"]
            assert not torch.equal(first, collector.next()["observation"])
            collector.set_seed(seed)
            assert torch.equal(first, collector.next()["observation"])
            return first

    assert torch.equal(collected(1), collected(1))
    assert not torch.equal(collected(1), collected(2))


@pytest.mark.parametrize("explore", ["mode", "deterministic"])
def test_logits_are_explored_as_asked(explore: str) -> None:
    policy = torch.nn.Linear(2, 3)
    torch.nn.init.zeros_(policy.weight)
    policy.bias.data = torch.tensor([0.0, 1.0, 0.5])
    with rl.Collector(Counting, policy, frames_per_batch=400, exploration_type="random") as one:
        batch = one.next()
        shares = torch.bincount(batch["action"], minlength=3) / 400
        assert (shares - policy.bias.softmax(0)).abs().max() < 0.1
        expected = policy.bias.log_softmax(0)[batch["action"]]
        assert torch.allclose(batch["action_log_prob"], expected, atol=1e-5)
    with rl.Collector(Counting, policy, frames_per_batch=20, exploration_type=explore) as one:
        assert set(one.next()["action"].tolist()) == {1}


def test_distribution_gives_actions_and_log_probs() -> None:
    class Gaussian(torch.nn.Module):
        def forward(self, observation: dict[str, Any]) -> dict[str, Any]:
            mean = observation["state"]["speed"].float().expand(-1, 2)
            normal = torch.distributions.Normal(mean, 0.1)
            independent = torch.distributions.Independent(normal, 1)
            return {"action": independent, "value": mean[:, 0]}

    with rl.Collector(rl.SerialEnv(3, Pixels), Gaussian(), frames_per_batch=12) as collector:
        batch = collector.next()
    assert batch["action"].shape == (3, 4, 2)
    assert batch["action_log_prob"].shape == batch["value"].shape == (3, 4)
    assert batch["pixels"].dtype == torch.uint8
    speed = batch["next", "state", "speed"]
    assert torch.allclose(speed[..., 0], batch["action"].sum(-1).double(), atol=1e-6)


@pytest.mark.parametrize("mode", [AutoresetMode.DISABLED, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("longest", [None, 3])
def test_vector_environment_gives_the_same_frames(mode: Any, longest: int | None) -> None:
    settings: dict[str, Any] = {"frames_per_batch": 24, "max_frames_per_traj": longest}

    def vector() -> Any:
        return SyncVectorEnv([lambda: Counting(5), lambda: Counting(7)], autoreset_mode=mode)

    ours = rl.SerialEnv(2, [lambda: Counting(5), lambda: Counting(7)])
    with rl.Collector(vector, zeros, **settings) as one, rl.Collector(ours, zeros, **settings) as two:
        for _ in range(3):
            got, expected = one.next(), two.next()
            for key, value in expected.columns().items():
                assert torch.equal(got[key], value), key


def test_vector_environment_of_another_mode_is_refused() -> None:
    def vector() -> Any:
        return SyncVectorEnv([Counting])

    with pytest.raises(weightsync.UnsupportedError, match="autoreset_mode"):
        rl.Collector(vector, zeros, frames_per_batch=4)


def test_random_actions_need_no_policy() -> None:
    with rl.Collector("MountainCarContinuous-v0", None, frames_per_batch=20, seed=1) as collector:
        assert collector.next()["action"].shape == (20, 1)


def test_return_type_is_what_was_asked_for() -> None:
    with rl.Collector(Counting, zeros, frames_per_batch=4, return_type="numpy") as collector:
        batch = collector.next()
        assert isinstance(batch["observation"], np.ndarray)
        with pytest.raises(weightsync.MissingTensorError, match="observation"):
            batch["obs"]
    with rl.Collector(Counting, zeros, frames_per_batch=4, return_type="tensordict") as collector:
        frames = collector.next()
        assert frames.batch_size == (4,)
        assert frames["next", "reward"].shape == (4, 1)
    with rl.Collector(Counting, zeros, frames_per_batch=4, postproc=repr) as collector:
        assert "next.reward: [4]" in collector.next()


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (lambda o: torch.zeros(len(o), 2), "integers"),
        (lambda o: torch.zeros(len(o) + 1, dtype=torch.int64), "in the first dimension"),
        (lambda o: {"value": torch.zeros(len(o))}, "no 'action'"),
        (lambda o: "left", "the policy returned action"),
        (7, "a function or a torch module"),
    ],
)
def test_answer_that_is_no_action_is_refused(policy: Any, message: str) -> None:
    with pytest.raises(weightsync.WrongTypeError, match=message):
        rl.Collector(Counting, policy, frames_per_batch=4)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ("NoSuchEnv-v0", "not an environment that Gymnasium knows"),
        (7, "Gymnasium id, a function"),
        (lambda: 7, "the factory made 7"),
    ],
)
def test_environment_that_is_none_is_refused(env: Any, message: str) -> None:
    with pytest.raises(weightsync.WeightsyncError, match=message):
        rl.Collector(env, zeros, frames_per_batch=4)


def test_observation_without_a_shape_is_refused() -> None:
    class Text(Counting):
        def __init__(self) -> None:
            super().__init__()
            self.observation_space = gymnasium.spaces.Text(5)  # type: ignore[assignment]

    with pytest.raises(weightsync.UnsupportedError, match="wrap the environment"):
        rl.Collector(Text, zeros, frames_per_batch=4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"frames_per_batch": 0}, "frames_per_batch"),
        ({"frames_per_batch": 1.5}, "frames_per_batch"),
        ({"exploration_type": "greedy"}, "exploration_type"),
        ({"return_type": "list"}, "return_type"),
        ({"policy_factory": Constant}, "not both"),
    ],
)
def test_setting_that_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(weightsync.SettingError, match=message):
        rl.Collector(Counting, zeros, **{"frames_per_batch": 4, **settings})


def test_policy_is_not_changed_by_the_first_look() -> None:
    drawn = []

    def policy(observation: torch.Tensor) -> torch.Tensor:
        action = torch.randint(0, 3, (len(observation),))
        drawn.append(int(action[0]))
        return action

    torch.manual_seed(5)
    with rl.Collector(Counting, policy, frames_per_batch=10) as collector:
        batch = collector.next()
    torch.manual_seed(5)
    assert batch["action"].tolist() == [int(torch.randint(0, 3, (1,))) for _ in range(10)]


@pytest.mark.parametrize("kind", range(3))
def test_loaded_state_goes_on_with_its_numbers(kind: int) -> None:
    def collector() -> Any:
        settings: dict[str, Any] = {"frames_per_batch": 24, "total_frames": 96}
        if kind == 0:
            return rl.Collector(rl.SerialEnv(2, Counting), zeros, **settings)
        if kind == 1:
            return rl.MultiSyncCollector([Counting] * 2, zeros, workers="threads", **settings)
        return rl.AsyncCollector(Counting, zeros, workers="threads", **settings)

    with collector() as first:
        seen = {int(one) for _ in range(2) for one in first.next()["collector", "traj_ids"].flatten()}
        state = first.state_dict()
    assert state["frames"] == 48 and state["next_trajectory"] > max(seen)
    with collector() as other:
        # Also where trajectories are under way already.
        other.next()
        other.load_state_dict(state)
        batches = list(other)
        ids = [int(one) for batch in batches for one in batch["collector", "traj_ids"].flatten()]
        assert len(batches) == 2
        assert min(ids) == state["next_trajectory"]
        assert seen.isdisjoint(ids)
        # A state of an older version has no such number.
        other.load_state_dict({"frames": 72})
        assert min(other.next()["collector", "traj_ids"].flatten()) > max(ids)
