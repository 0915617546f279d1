"""Environments and policies of TorchRL: the frames are those that TorchRL's own collectors give."""

from __future__ import annotations

import importlib
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium
import pytest
import torch
from counting import Counting
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule

import weightsync
from weightsync import rl

torchrl = pytest.importorskip("torchrl")

from torchrl import collectors as theirs  # noqa: E402
from torchrl.data import LazyTensorStorage, ReplayBuffer  # noqa: E402
from torchrl.envs import (  # noqa: E402
    EnvCreator,
    GymEnv,
    InitTracker,
    SerialEnv,
    StepCounter,
    TrajCounter,
    TransformedEnv,
    VecNorm,
)
from torchrl.envs.utils import ExplorationType, exploration_type  # noqa: E402
from torchrl.modules import OneHotCategorical, ProbabilisticActor, RandomPolicy  # noqa: E402
from torchrl.testing.mocking_classes import (  # noqa: E402
    ContinuousActionVecMockEnv,
    CountingBatchedEnv,
    CountingEnv,
    HeterogeneousCountingEnv,
    NestedCountingEnv,
)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

Make = Callable[[], Any]


def cart_pole() -> Any:
    return GymEnv("CartPole-v1")


def three_cart_poles() -> Any:
    return SerialEnv(3, cart_pole)


def counted_cart_pole() -> Any:
    return TransformedEnv(cart_pole(), StepCounter())


def short() -> Any:
    return CountingEnv(max_steps=3)


def short_with_truncation() -> Any:
    return TransformedEnv(short(), StepCounter(100))


def batch_of_two() -> Any:
    return CountingBatchedEnv(batch_size=[2], max_steps=torch.tensor([3, 4]))


class Takes(torch.nn.Module):
    """A module of tensors, whose argument is named as what the environment shows."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 2)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.net(observation)
        return result


def linear(fill: float | None = None) -> TensorDictModule:
    torch.manual_seed(2)
    net = torch.nn.Linear(7, 7, bias=False)
    if fill is not None:
        torch.nn.init.constant_(net.weight, fill)
    return TensorDictModule(net, in_keys=["observation"], out_keys=["action"])


def actor() -> Any:
    torch.manual_seed(2)
    net = TensorDictModule(torch.nn.Linear(4, 2), in_keys=["observation"], out_keys=["logits"])
    return ProbabilisticActor(
        net, in_keys=["logits"], distribution_class=OneHotCategorical, return_log_prob=True
    )


def described(batch: TensorDictBase) -> dict[Any, Any]:
    """The keys of a batch, with all but the values."""
    found: dict[Any, Any] = {(): (batch.batch_size, batch.device, batch.names)}
    for key in batch.keys(True):
        value = batch.get(key)
        if isinstance(value, torch.Tensor):
            found[key] = (value.shape, value.dtype, value.device)
        else:
            found[key] = (value.batch_size, value.device)
    return found


def batches_of(kind: Any, make: Make, policy: Any, **settings: Any) -> list[TensorDictBase]:
    """Three batches that begin with a seed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collector = kind(make, policy, frames_per_batch=24, total_frames=2400, **settings)
    try:
        collector.set_seed(5)
        if make in (cart_pole, three_cart_poles, counted_cart_pole):
            # The first episode began before the seed.
            collector.reset()
        torch.manual_seed(7)
        batches = iter(collector)
        return [next(batches).clone() for _ in range(3)]
    finally:
        collector.shutdown()


@pytest.mark.parametrize(
    ("make", "policy", "settings"),
    [
        (cart_pole, actor, {}),
        (cart_pole, actor, {"exploration_type": ExplorationType.DETERMINISTIC}),
        (cart_pole, lambda: None, {"init_random_frames": 24}),
        (cart_pole, actor, {"max_frames_per_traj": 5}),
        (cart_pole, actor, {"reset_at_each_iter": True}),
        (cart_pole, actor, {"split_trajs": True}),
        (cart_pole, actor, {"set_truncated": True, "device": "cpu"}),
        (cart_pole, actor, {"track_policy_version": True}),
        (cart_pole, actor, {"compact_obs": True}),
        (cart_pole, actor, {"use_buffers": False}),
        (three_cart_poles, actor, {}),
        (three_cart_poles, actor, {"trajs_per_batch": 2, "traj_format": "cat"}),
        (counted_cart_pole, actor, {"trajs_per_batch": 2, "traj_format": "padded"}),
        (counted_cart_pole, actor, {"track_traj_ids": False, "storing_device": "cpu"}),
        (NestedCountingEnv, lambda: None, {}),
        (batch_of_two, lambda: None, {}),
    ],
)
def test_frames_are_those_of_torchrl(make: Make, policy: Make, settings: Any) -> None:
    expected = batches_of(theirs.Collector, make, policy(), **settings)
    got = batches_of(rl.Collector, make, policy(), **settings)
    for ours, other in zip(got, expected, strict=True):
        assert described(ours) == described(other)
        for key in ours.keys(True, True):
            assert torch.equal(ours.get(key), other.get(key)), key


@pytest.mark.parametrize(
    ("make", "batch"), [(short, ()), (batch_of_two, (2,))], ids=["one", "batch"]
)
@pytest.mark.parametrize("cat_results", ["stack", 0, -1])
def test_workers_parts_are_joined_in_the_shapes_of_the_table(
    make: Make, batch: tuple[int, ...], cat_results: Any
) -> None:
    steps = 12 // (2 if batch else 1)
    sizes: dict[Any, tuple[int, ...]] = {
        "stack": (2, *batch, steps),
        0: (2 * batch[0], steps) if batch else (2 * steps,),
        -1: (*batch, 2 * steps),
    }
    with rl.MultiSyncCollector(
        [make] * 2, frames_per_batch=24, total_frames=48, cat_results=cat_results, workers="threads"
    ) as collector:
        assert len(collector) == 2
        batches = list(collector)
    assert [tuple(one.batch_size) for one in batches] == [sizes[cat_results]] * 2
    assert all(one.names == [*[None] * (one.ndim - 1), "time"] for one in batches)
    ids = [one["collector", "traj_ids"] for one in batches]
    ends = [one["next", "done"].sum() for one in batches]
    rows = 2 * (batch[0] if batch else 1)
    # Every trajectory has a number of its own, and goes on in the next batch.
    assert torch.cat([one.reshape(-1) for one in ids]).unique().numel() == rows + sum(ends) - sum(
        int(one["next", "done"].reshape(rows, -1)[:, -1].sum()) for one in batches[1:]
    )


@pytest.mark.parametrize(("cat_results", "name"), [("stack", "time"), (0, None), (-1, "time")])
def test_split_batches_of_workers_have_the_names_of_torchrl(cat_results: Any, name: str | None) -> None:
    with rl.MultiSyncCollector(
        [short] * 2, frames_per_batch=24, split_trajs=True, cat_results=cat_results, workers="threads"
    ) as collector:
        assert collector.next().names == [None, name]


def of_several_shapes() -> Any:
    return HeterogeneousCountingEnv(max_steps=3)


def two_of_several_shapes() -> Any:
    return SerialEnv(2, of_several_shapes)


@pytest.mark.parametrize("make", [of_several_shapes, two_of_several_shapes])
@pytest.mark.parametrize("use_buffers", [None, False])
def test_frames_of_several_shapes_are_those_of_torchrl(make: Make, use_buffers: Any) -> None:
    """The observations of such an environment cannot be one tensor."""
    expected = batches_of(theirs.Collector, make, None, use_buffers=use_buffers)
    got = batches_of(rl.Collector, make, None, use_buffers=use_buffers)
    for ours, other in zip(got, expected, strict=True):
        assert (ours.batch_size, ours.names) == (other.batch_size, other.names)
        inner, known = ours["lazy"].unbind(-1), other["lazy"].unbind(-1)
        for one, two in zip(inner, known, strict=True):
            assert set(one.keys(True, True)) == set(two.keys(True, True))
            assert all(torch.equal(one.get(key), two.get(key)) for key in one.keys(True, True))


class Shows(torch.nn.Module):
    """Acts at random, and shows its weight as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn_like(observation), self.weight.expand(*observation.shape[:-1], 1)


def shows() -> TensorDictModule:
    return TensorDictModule(Shows(), in_keys=["observation"], out_keys=["action", "shown"])


def test_policy_that_shows_a_weight_acts_in_workers() -> None:
    with rl.MultiSyncCollector(
        [ContinuousActionVecMockEnv], shows(), frames_per_batch=4, total_frames=4, workers="threads"
    ) as collector:
        (batch,) = collector
    assert not batch["shown"].requires_grad and (batch["shown"] == 1).all()


@pytest.mark.parametrize("package", ["torchrl.weight_update", "weightsync.torchrl"])
def test_scheme_that_sends_nothing_sends_the_first_weights_alone(package: str) -> None:
    scheme = importlib.import_module(package).NoWeightSyncScheme()
    policy = shows()
    with rl.MultiSyncCollector(
        [ContinuousActionVecMockEnv] * 2,
        policy,
        frames_per_batch=4,
        weight_sync_schemes={"policy": scheme},
        workers="threads",
    ) as collector:
        collector.next()
        torch.nn.init.constant_(policy.module.weight, 5.0)
        collector.update_policy_weights_()
        assert (collector.next()["shown"] == 1).all()


def counted_episodes() -> Any:
    return TransformedEnv(short(), TrajCounter())


def normalised() -> Any:
    return TransformedEnv(cart_pole(), VecNorm(in_keys=["observation"]))


def test_worker_processes_share_what_an_environments_creator_shares() -> None:
    counts, sums = EnvCreator(counted_episodes), EnvCreator(normalised)
    with rl.MultiSyncCollector([counts] * 2, frames_per_batch=40, total_frames=40) as collector:
        (batch,) = collector
    first, second = (set(one["traj_count"].flatten().tolist()) for one in batch)
    # The first one is what both begin with, as in TorchRL.
    assert first != second and first & second <= {1}
    with rl.MultiSyncCollector([sums] * 2, frames_per_batch=40, total_frames=40) as collector:
        list(collector)
    assert sums.state_dict()["_extra_state"]["observation_count"] > 20


@pytest.mark.parametrize("how", ["module", "function", "factory"])
def test_worker_processes_do_not_see_a_shared_policy_change(how: str) -> None:
    policy = shows()
    policy.share_memory()
    given: dict[str, Any] = {
        "module": {"policy": policy},
        "function": {"policy": lambda frames: policy(frames), "trust_policy": True},
        "factory": {"policy_factory": lambda: policy},
    }[how]
    with rl.MultiSyncCollector([ContinuousActionVecMockEnv], frames_per_batch=4, **given) as collector:
        collector.next()
        torch.nn.init.constant_(policy.module.weight, 5.0)
        assert (collector.next()["shown"] == 1).all()


@pytest.mark.parametrize(
    "envs",
    [[cart_pole] * 2, [short] * 2, rl.SerialEnv(2, cart_pole), rl.ParallelEnv(2, cart_pole, context="fork")],
)
def test_batch_of_torchrl_environments_is_refused_by_name(envs: Any) -> None:
    with pytest.raises(weightsync.SettingError, match=r"torchrl\.envs\.SerialEnv"):
        rl.Collector(envs, frames_per_batch=4)


def test_numbers_and_words_of_torchrl_are_taken() -> None:
    given: Any = {"exploration_type": None, "max_frames_per_traj": 7.0, "init_random_frames": 8.0}
    with rl.Collector(cart_pole, actor(), frames_per_batch=8, total_frames=16.0, **given) as collector:
        assert len(collector) == 2 and collector.total_frames == 16
        assert (collector.max_frames_per_traj, collector.init_random_frames) == (7, 8)
        assert not collector.split_trajs and not collector.reset_at_each_iter
        assert next(collector.iterator()).batch_size == (8,)
    with rl.Collector(cart_pole, frames_per_batch=8, total_frames=float("inf")) as collector:
        assert "total_frames" not in collector.stats()
    with pytest.raises(weightsync.SettingError, match="max_frames_per_traj"):
        rl.Collector(cart_pole, frames_per_batch=8, max_frames_per_traj=7.5)


@pytest.mark.parametrize("kind", [rl.Collector, rl.MultiSyncCollector])
def test_path_that_leads_nowhere_is_an_attribute_error(kind: Any) -> None:
    several: Any = {} if kind is rl.Collector else {"workers": "threads"}
    with kind([short], frames_per_batch=4, **several) as collector:
        with pytest.raises(AttributeError, match="nothing"):
            collector.get_distant_attr("env.nothing")


def test_first_worker_done_gives_its_part() -> None:
    with rl.MultiAsyncCollector(
        [batch_of_two] * 2, frames_per_batch=24, total_frames=72, workers="threads"
    ) as collector:
        batches = list(collector)
    assert [(tuple(one.batch_size), one.names) for one in batches] == [((2, 12), [None, "time"])] * 3


def test_number_of_frames_is_rounded_up_to_whole_steps() -> None:
    envs = [SerialEnv(8, CountingEnv)] * 2
    with rl.MultiSyncCollector(envs, frames_per_batch=173, total_frames=300, workers="threads") as collector:
        assert [tuple(one.batch_size) for one in collector] == [(2, 8, 11)] * 2
        assert len(collector) == 2


def test_workers_may_have_batches_of_several_lengths() -> None:
    with rl.MultiSyncCollector(
        [short] * 2, frames_per_batch=[9, 3], total_frames=24, cat_results=-1, workers="threads"
    ) as collector:
        assert [tuple(one.batch_size) for one in collector] == [(12,)] * 2
    with pytest.raises(ValueError, match="exactly one value per worker"):
        rl.MultiSyncCollector([short] * 2, frames_per_batch=[9], workers="threads")


def test_batch_stays_as_it_is_while_it_is_held() -> None:
    with rl.MultiSyncCollector([short], frames_per_batch=8, total_frames=80, workers="threads") as collector:
        batches = iter(collector)
        first = next(batches)
        kept = first.clone()
        for _ in batches:
            pass
    assert (first == kept).all()


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_seed_begins_again_with_the_same_frames(workers: Any) -> None:
    """Also what a worker had collected ahead is of the seed that came before, and is not handed out."""
    # The generators of threads are the trainer's, so there nothing is drawn.
    policy = actor() if workers == "threads" else RandomPolicy(cart_pole().action_spec)
    with rl.AsyncCollector(
        cart_pole, policy, frames_per_batch=20, exploration_type="deterministic", workers=workers
    ) as collector:
        before = torch.get_rng_state()
        collector.set_seed(3)
        first = collector.next().clone()
        collector.next()
        following = collector.set_seed(3)
        again = collector.next().clone()
        other = collector.next().clone()
    assert following != 3
    assert torch.equal(first["observation"], again["observation"])
    assert not torch.equal(again["observation"], other["observation"])
    # As in TorchRL, whose own test compares the numbers too.
    assert torch.equal(again["collector", "traj_ids"], first["collector", "traj_ids"])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("policy", "make"),
    [
        (lambda: linear(0.0), ContinuousActionVecMockEnv),
        (lambda: Takes(), cart_pole),
        (lambda: lambda td: td.set("action", torch.zeros(7)), ContinuousActionVecMockEnv),
        (lambda: RandomPolicy(), ContinuousActionVecMockEnv),
    ],
    ids=["module of TensorDicts", "module of tensors", "function", "random"],
)
def test_policy_of_any_kind_acts(policy: Make, make: Make) -> None:
    with rl.Collector(make, policy(), frames_per_batch=4, total_frames=4) as collector:
        (batch,) = collector
    assert batch["action"].shape == (4, 2 if make is cart_pole else 7)


def test_policy_that_cannot_be_called_is_refused_at_once() -> None:
    class TwoInputs(torch.nn.Module):
        def forward(self, observation: Any, something: Any) -> Any:
            return observation

    with pytest.raises(TypeError, match="trust_policy"):
        rl.Collector(ContinuousActionVecMockEnv, TwoInputs(), frames_per_batch=4)


def test_environment_gets_its_arguments() -> None:
    with rl.Collector(
        CountingEnv, create_env_kwargs={"max_steps": 2}, frames_per_batch=6
    ) as collector:
        assert collector.env.max_steps == 2
    with rl.MultiSyncCollector(
        CountingEnv,
        num_workers=2,
        create_env_kwargs=[{"max_steps": 2}, {"max_steps": 3}],
        frames_per_batch=6,
        workers="threads",
    ) as collector:
        assert collector.get_distant_attr("env.max_steps") == [2, 3]


def test_argument_that_does_not_exist_is_named() -> None:
    with pytest.raises(TypeError, match="no argument frames"):
        rl.Collector(short, frames_per_batch=4, frames=3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("set_truncated", True),
        ("compact_obs", True),
        ("post_collect_hook", print),
        ("trajs_per_batch", 2),
        ("extend_buffer", False),
        ("interruptor", object()),
    ],
)
def test_argument_without_meaning_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(weightsync.WeightsyncError, match=name):
        rl.Collector(Counting, frames_per_batch=5, **{name: value})


def test_argument_that_asks_for_nothing_is_taken() -> None:
    given: Any = {"compile_policy": False, "use_buffers": False, "no_cuda_sync": False}
    with rl.Collector(Counting, frames_per_batch=5, total_frames=5, **given) as collector:
        assert len(list(collector)) == 1


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"policy": linear, "policy_factory": linear}, TypeError),
        ({"create_env_fn": CountingEnv(), "create_env_kwargs": {"a": 1}}, RuntimeError),
        ({"create_env_fn": short, "set_truncated": True}, RuntimeError),
        ({"create_env_fn": three_cart_poles, "track_policy_version": True}, RuntimeError),
        ({"init_fn": print}, TypeError),
    ],
)
def test_argument_is_refused_with_the_error_of_torchrl(settings: Any, kind: Any) -> None:
    settings = {"create_env_fn": ContinuousActionVecMockEnv, "frames_per_batch": 6, **settings}
    for collector in (theirs.Collector, rl.Collector):
        with pytest.raises(kind) as raised:
            collector(**settings)
    assert isinstance(raised.value, weightsync.WeightsyncError)


@pytest.mark.parametrize(
    "settings",
    [
        {"trajs_per_batch": 2, "track_traj_ids": False},
        {"weight_sync_schemes": {"policy": "shared-mem"}},
    ],
)
def test_argument_that_cannot_work_is_refused_by_name(settings: Any) -> None:
    with pytest.raises(weightsync.WeightsyncError, match=next(iter(settings))):
        rl.Collector(short, frames_per_batch=4, **settings)


def test_collector_that_is_refused_leaves_no_memory_open() -> None:
    def flags() -> int:
        names = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        # The directory itself is one of them, and closed by now.
        links = [os.readlink(name) for name in names if os.path.lexists(name)]
        return sum("weightsync-flag" in link for link in links)

    before = flags()
    with pytest.raises(TypeError, match="no argument"):
        rl.MultiSyncCollector([short], frames_per_batch=4, preemptive_threshold=0.5, other=1)
    assert flags() == before


@pytest.mark.parametrize(
    ("name", "value"), [("collector_class", object), ("weight_recv_schemes", {"policy": None})]
)
def test_argument_that_workers_cannot_take_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(weightsync.UnsupportedError, match=name):
        rl.MultiSyncCollector([short], frames_per_batch=5, workers="threads", **{name: value})


def test_two_limits_of_an_episode_are_refused() -> None:
    with pytest.raises(ValueError, match="step_count"):
        rl.Collector(short_with_truncation, frames_per_batch=4, max_frames_per_traj=2)


def test_last_step_is_marked_where_it_is_asked_for() -> None:
    with rl.MultiSyncCollector(
        [short_with_truncation] * 2,
        frames_per_batch=8,
        total_frames=8,
        set_truncated=True,
        workers="threads",
    ) as collector:
        (batch,) = collector
    assert batch[..., -1]["next", "truncated"].all() and batch[..., -1]["next", "done"].all()
    assert not batch[..., 1]["next", "truncated"].any()


class Stopped:
    """An interruptor that stops after some steps."""

    def __init__(self, after: int) -> None:
        self.left = after

    def collection_stopped(self) -> bool:
        self.left -= 1
        return self.left <= 0


@pytest.mark.parametrize("make", [short, cart_pole])
def test_batch_that_is_stopped_is_filled_up(make: Make) -> None:
    with rl.Collector(
        make, frames_per_batch=10, total_frames=20, interruptor=Stopped(3)
    ) as collector:
        batch = collector.next()
    ids = batch["collector", "traj_ids"]
    assert (ids[:3] != -1).all() and (ids[3:] == -1).all()
    assert not batch["next", "done"][3:].any()


class Slow(CountingEnv):
    """Waits before each step."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        import time

        time.sleep(0.05)
        return super()._step(tensordict)


@pytest.mark.parametrize("cat_results", ["stack", -1])
def test_slow_worker_ends_its_part_early(cat_results: Any) -> None:
    with rl.MultiSyncCollector(
        [lambda: CountingEnv(max_steps=1000), lambda: Slow(max_steps=1000)],
        frames_per_batch=400,
        total_frames=400,
        preemptive_threshold=0.5,
        cat_results=cat_results,
        workers="threads",
    ) as collector:
        batch = collector.next()
        assert collector.interruptor is not None
    ids = batch["collector", "traj_ids"]
    if cat_results == "stack":
        assert (ids[0] != -1).all() and (ids[1] == -1).any() and ids[1][0] != -1
        assert torch.equal(batch["collector", "mask"], ids != -1)
    else:
        assert 200 < batch.numel() < 400 and (ids != -1).all()


def test_parts_of_several_lengths_have_masks() -> None:
    with rl.MultiSyncCollector(
        [short] * 2,
        frames_per_batch=[4, 8],
        total_frames=12,
        preemptive_threshold=1.0 - 1e-9,
        workers="threads",
    ) as collector:
        parts = collector.next().unbind(0)
    for part, steps in zip(parts, (4, 8), strict=True):
        assert part.batch_size == (steps,)
        mask = part["collector", "mask"]
        assert mask[0] and torch.equal(mask, part["collector", "traj_ids"] != -1)


@pytest.mark.parametrize("threshold", [-0.1, 1.5])
def test_threshold_out_of_range_is_refused(threshold: float) -> None:
    with pytest.raises(ValueError, match="preemptive_threshold"):
        rl.MultiSyncCollector([short], frames_per_batch=4, preemptive_threshold=threshold)


class Words(torchrl.envs.Transform):
    """Adds a text to what an environment shows."""

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return next_tensordict.set("words", f"step {int(next_tensordict['observation'])}")

    def _reset(self, tensordict: Any, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return self._call(tensordict_reset)

    def transform_observation_spec(self, observation_spec: Any) -> Any:
        observation_spec["words"] = torchrl.data.NonTensor(shape=())
        return observation_spec


def test_texts_travel_with_the_frames() -> None:
    make = lambda: TransformedEnv(short(), Words())  # noqa: E731
    with rl.MultiSyncCollector(
        [make] * 2, frames_per_batch=8, total_frames=16, workers="threads"
    ) as collector:
        batches = list(collector)
    for batch in batches:
        for frame in batch.reshape(-1).unbind(0):
            assert frame["next", "words"] == f"step {int(frame['next', 'observation'])}"


@pytest.mark.parametrize("kind", [rl.MultiSyncCollector, rl.MultiAsyncCollector])
@pytest.mark.parametrize("extend_buffer", [True, False])
def test_replay_buffer_has_frames_and_no_rows(kind: Any, extend_buffer: bool) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(64), batch_size=5)
    with kind(
        [short] * 2,
        frames_per_batch=16,
        total_frames=32,
        replay_buffer=buffer,
        extend_buffer=extend_buffer,
        workers="threads",
    ) as collector:
        assert list(collector) == [None, None]
    assert len(buffer) == 32
    assert buffer.sample()["observation"].shape == (5, 1)


@pytest.mark.parametrize("kind", [rl.MultiSyncCollector, rl.MultiAsyncCollector])
def test_replay_buffer_of_torchrl_has_frames_of_gymnasium(kind: Any) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(64), batch_size=5)
    with kind(
        [Counting] * 2, frames_per_batch=16, total_frames=32, replay_buffer=buffer, workers="threads"
    ) as collector:
        assert list(collector) == [None, None]
    assert len(buffer) == 32
    assert buffer.sample()["observation"].shape == (5, 2)
    # The frames of each worker follow one another.
    steps = buffer[:]["observation"][:8, 0].tolist()
    assert steps == [0.0, 1.0, 2.0, 3.0, 4.0, 0.0, 1.0, 2.0]


@pytest.mark.parametrize("kind", [rl.MultiSyncCollector, rl.MultiAsyncCollector])
def test_replay_buffer_gets_frames_of_workers_that_are_not_split(kind: Any) -> None:
    """As TorchRL's workers write them: rows of another length would not fit into the storage."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(256), batch_size=5)
    with kind(
        [cart_pole] * 2, frames_per_batch=32, total_frames=96, replay_buffer=buffer, split_trajs=True, workers="threads"
    ) as collector:
        for _ in collector:
            pass
    assert len(buffer) == 96 and buffer.sample().batch_size == (5,)


def test_replay_buffer_gets_whole_trajectories_where_asked() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(64), batch_size=5)
    with rl.MultiSyncCollector(
        [short] * 2,
        frames_per_batch=20,
        total_frames=40,
        replay_buffer=buffer,
        trajs_per_batch=2,
        workers="threads",
    ) as collector:
        list(collector)
    ids, done = buffer[:]["collector", "traj_ids"], buffer[:]["next", "done"][:, 0]
    # Each trajectory lies in one piece, and its last frame is its end.
    numbers, counts = ids.unique_consecutive(return_counts=True)
    assert numbers.numel() == numbers.unique().numel()
    assert done[counts.cumsum(0) - 1].all() and done.sum() == numbers.numel()


class Fails(Takes):
    """Raises once so many calls are over."""

    left = 1000

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            raise ArithmeticError("no answer")
        return super().forward(observation)


@pytest.mark.parametrize("make", [cart_pole, counted_cart_pole, three_cart_poles])
def test_batch_after_a_failed_one_begins_new_episodes(make: Make) -> None:
    policy = TensorDictModule(Fails(), in_keys=["observation"], out_keys=["action"])
    with rl.Collector(make, policy, frames_per_batch=12) as collector:
        first = collector.next()
        policy.module.left = 3
        with pytest.raises(ArithmeticError):
            collector.next()
        again = collector.next()
    assert again["collector", "traj_ids"].min() > first["collector", "traj_ids"].max()
    # What CartPole shows after a reset lies between these.
    assert (again["observation"][..., 0, :].abs() <= 0.05).all()


def test_policy_is_called_as_it_is_when_a_batch_begins() -> None:
    class Right(torch.nn.Module):
        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return torch.tensor([0, 1])

    calls: list[int] = []
    policy = TensorDictModule(Takes(), in_keys=["observation"], out_keys=["action"])
    with rl.Collector(cart_pole, policy, frames_per_batch=4) as collector:
        collector.next()
        policy.module = Right()
        assert torch.equal(collector.next()["action"], torch.tensor([[0.0, 1.0]] * 4))
        policy.register_forward_hook(lambda *_: calls.append(1))
        collector.next()
    assert len(calls) == 4


def counting() -> Any:
    return torchrl.envs.GymWrapper(Counting())


def two_counting() -> Any:
    return SerialEnv(2, counting)


def assert_whole(trajectories: TensorDictBase) -> None:
    """Whether these begin with the first step of an episode, and have all of its five."""
    steps = trajectories["observation"][:, 0].reshape(-1, 5)
    assert (steps == torch.arange(5)).all()


def test_reset_of_some_environments_cuts_no_other_trajectory() -> None:
    with rl.Collector(
        two_counting, frames_per_batch=4, trajs_per_batch=1, traj_format="cat"
    ) as collector:
        for _ in range(4):
            assert_whole(collector.next())
            collector.reset(0)


def test_reset_of_some_workers_cuts_no_other_trajectory() -> None:
    frames: dict[int, list[float]] = {}
    with rl.MultiAsyncCollector([counting] * 2, frames_per_batch=3, workers="threads") as collector:
        for _ in range(8):
            for _ in range(2):
                batch = collector.next()
                ids = batch["collector", "traj_ids"].tolist()
                for number, step in zip(ids, batch["observation"][:, 0].tolist(), strict=True):
                    frames.setdefault(number, []).append(step)
            collector.reset([True, False])
    for steps in frames.values():
        assert steps == [float(step) for step in range(len(steps))]


class Weighted(torch.nn.Module):
    """Has a weight that changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.tensor([1.0, 0.0, 0.0])


def test_trajectory_of_which_frames_were_too_old_is_not_handed_out() -> None:
    policy = TensorDictModule(Weighted(), in_keys=["observation"], out_keys=["action"])
    with rl.MultiAsyncCollector(
        [counting] * 2,
        policy,
        frames_per_batch=3,
        max_staleness=0,
        trajs_per_batch=1,
        traj_format="cat",
        workers="threads",
    ) as collector:
        for _ in range(8):
            assert_whole(collector.next())
            collector.update_policy_weights_()


def test_trajectory_of_which_a_batch_was_given_up_is_not_handed_out() -> None:
    left = [4]

    class BreaksOnce(Counting):
        def step(self, action: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise ArithmeticError("the world ended")
            return super().step(action)

    breaks = lambda: torchrl.envs.GymWrapper(BreaksOnce())  # noqa: E731
    with rl.MultiSyncCollector(
        [counting, breaks],
        frames_per_batch=6,
        trajs_per_batch=1,
        traj_format="cat",
        workers="threads",
    ) as collector:
        with pytest.raises(ArithmeticError):
            collector.next()
        for _ in range(6):
            assert_whole(collector.next())


def test_trajectory_that_cannot_end_is_not_kept() -> None:
    with rl.Collector(
        counting, frames_per_batch=8, trajs_per_batch=1, reset_at_each_iter=True
    ) as collector:
        for _ in range(5):
            collector.next()
        assert collector._episodes is not None
        assert len(collector._episodes._under_way) == 1


def test_random_frames_have_zeros_in_place_of_what_the_policy_returns() -> None:
    """Also in memory that had frames of the policy."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(64), batch_size=5)
    with rl.MultiSyncCollector(
        [counted_cart_pole],
        actor(),
        frames_per_batch=8,
        init_random_frames=8,
        replay_buffer=buffer,
        workers="threads",
    ) as collector:
        collector.next()
        collector.next()
        assert (buffer[8:]["logits"] != 0).any()
        buffer.empty()
        # TorchRL's frames show what the policy returned last, until a reset.
        collector.reset()
        collector.next()
    assert len(buffer) == 8 and (buffer[:]["logits"] == 0).all()


def test_threads_explore_each_as_it_was_asked() -> None:
    """tensordict has one interaction type for all threads, of which one ends before the other."""
    begun, ended = threading.Barrier(2), threading.Event()
    seen: list[Any] = []

    class Meets(Counting):
        def step(self, action: Any) -> Any:
            if self.taken == 0:
                begun.wait(60)
            if self.taken == 4:
                assert ended.wait(60)
            return super().step(action)

    def policy(td: TensorDictBase) -> TensorDictBase:
        seen.append(exploration_type())
        return td.set("action", torch.tensor([1.0, 0.0, 0.0]))

    before = exploration_type()
    with rl.MultiSyncCollector(
        [lambda: torchrl.envs.GymWrapper(Meets())] * 2,
        policy,
        frames_per_batch=[4, 8],
        total_frames=12,
        exploration_type="mean",
        post_collect_hook=lambda _: ended.set(),
        workers="threads",
    ) as collector:
        seen.clear()
        collector.next()
    assert seen == [ExplorationType.MEAN] * 12
    assert exploration_type() == before


def test_second_start_has_no_effect() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(64), batch_size=5)
    with rl.Collector(short, frames_per_batch=4) as collector:
        with pytest.raises(RuntimeError, match="replay_buffer"):
            collector.start()
    with rl.Collector(short, frames_per_batch=4, replay_buffer=buffer) as collector:
        collector.start()
        collector.start()
        assert collector.is_running()


def test_background_collection_pauses() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(64), batch_size=5)
    collector = rl.MultiAsyncCollector(
        [short] * 2, frames_per_batch=16, replay_buffer=buffer, workers="threads"
    )
    with pytest.raises(RuntimeError, match="background"), collector.pause():
        pass
    collector.start()
    try:
        assert collector.is_running()
        for _ in range(2):
            with collector.pause():
                count = buffer.write_count
                assert collector.map_fn("replay_buffer.__len__") == [len(buffer)] * 2
                assert collector.get_distant_attr("replay_buffer.write_count") == [count] * 2
                assert collector.get_distant_attr("worker_idx") == [0, 1]
                assert buffer.write_count == count
    finally:
        collector.async_shutdown()


@pytest.mark.parametrize("kind", [rl.Collector, rl.MultiSyncCollector, rl.MultiAsyncCollector])
def test_state_is_gone_on_with(kind: Any) -> None:
    def made() -> Any:
        make: Any = ContinuousActionVecMockEnv
        make = make if kind is rl.Collector else [make] * 2
        more = {} if kind is rl.Collector else {"workers": "threads"}
        return kind(make, linear(), frames_per_batch=8, total_frames=24, track_policy_version=True, **more)

    with made() as collector:
        list(collector)
        collector.update_policy_weights_()
        state = collector.state_dict()
    with made() as collector:
        collector.load_state_dict(state)
        again = collector.state_dict()
        assert list(collector) == []
    assert (state["frames"], state["iter"]) == (24, 2) == (again["frames"], again["iter"])
    assert again["traj_pool"]["traj_id"] > state["traj_pool"]["traj_id"]
    inner = state if kind is rl.Collector else state["worker1"]
    assert inner["policy_version"] == 1
    assert {"policy_state_dict", "env_state_dict", "frames", "iter"} <= set(inner)


def test_state_goes_into_the_collector_of_torchrl() -> None:
    with rl.Collector(ContinuousActionVecMockEnv, linear(), frames_per_batch=8, total_frames=8) as collector:
        list(collector)
        state = collector.state_dict()
    policy = linear(0.0)
    other = theirs.Collector(ContinuousActionVecMockEnv, policy, frames_per_batch=8, total_frames=8)
    other.load_state_dict(state)
    assert torch.equal(policy.module.weight, linear().module.weight)
    assert list(other) == []
    state = other.state_dict()
    other.shutdown()
    with rl.Collector(ContinuousActionVecMockEnv, linear(), frames_per_batch=8, total_frames=16) as collector:
        collector.load_state_dict(state)
        assert collector.stats()["frames"] == 8


@pytest.mark.parametrize("kind", [rl.MultiSyncCollector, rl.MultiAsyncCollector])
@pytest.mark.parametrize("scheme", [None, "SharedMemWeightSyncScheme", "MultiProcessWeightSyncScheme"])
def test_versions_of_frames_follow_the_updates(kind: Any, scheme: str | None) -> None:
    policy = linear(1.0)
    schemes = None if scheme is None else {"policy": getattr(torchrl.weight_update, scheme)()}
    with kind(
        [ContinuousActionVecMockEnv] * 2,
        policy,
        frames_per_batch=16,
        track_policy_version=True,
        weight_sync_schemes=schemes,
        workers="threads",
    ) as collector:
        batch = collector.next()
        assert (batch["next", "policy_version"] == 0).all() and (batch["action"] != 0).any()
        torch.nn.init.zeros_(policy.module.weight)
        with pytest.raises(weightsync.WrongWeightsError):
            collector.update_policy_weights_({"wrong": torch.zeros(1)})
        # Nothing went out.
        assert collector.policy_version == 0
        collector.update_policy_weights_()
        assert collector.policy_version == 1
        for _ in range(8):
            batch = collector.next()
            is_new = batch["next", "policy_version"].reshape(-1) == 1
            assert (batch["action"].reshape(-1, 7)[is_new] == 0).all()
        assert is_new.all()


def test_updater_of_the_older_kind_sends_the_weights() -> None:
    class Updater(theirs.WeightUpdaterBase):
        def _sync_weights_with_worker(self, worker_id: Any = None, server_weights: Any = None) -> None:
            self.collector.pipes[worker_id].send((server_weights, "update"))
            assert self.collector.pipes[worker_id].recv()[1] == "updated"

        def all_worker_ids(self) -> list[int]:
            return [0, 1]

    with rl.MultiSyncCollector(
        [ContinuousActionVecMockEnv] * 2,
        policy_factory=lambda: linear(1.0),
        frames_per_batch=8,
        weight_updater=Updater(),
        workers="threads",
    ) as collector:
        assert (collector.next()["action"] != 0).any()
        collector.update_policy_weights_(TensorDict.from_module(linear(0.0)))
        assert (collector.next()["action"] == 0).all()


def test_policy_that_does_not_travel_is_made_by_a_factory_and_gives_its_weights() -> None:
    class Stays(torch.nn.Linear):
        def __reduce__(self) -> Any:
            raise TypeError("it stays here")

    net = Stays(7, 7, bias=False)
    policy = TensorDictModule(net, in_keys=["observation"], out_keys=["action"])
    with rl.MultiSyncCollector(
        [ContinuousActionVecMockEnv],
        policy,
        policy_factory=lambda: linear(0.0),
        frames_per_batch=4,
        workers="threads",
    ) as collector:
        assert (collector.next()["action"] != 0).any()
        torch.nn.init.zeros_(net.weight)
        collector.update_policy_weights_()
        assert (collector.next()["action"] == 0).all()


def test_hooks_see_each_batch() -> None:
    seen: list[Any] = []
    with rl.Collector(
        short,
        frames_per_batch=4,
        total_frames=8,
        pre_collect_hook=lambda: seen.append("before"),
        post_collect_hook=seen.append,
    ) as collector:
        collector.fake_tensordict()
        assert seen == []
        batches = list(collector)
    assert seen[0] == seen[2] == "before"
    assert seen[1] is batches[0] and seen[3] is batches[1]


def test_methods_are_called_by_name() -> None:
    with rl.Collector(short, frames_per_batch=16, total_frames=16, worker_idx=5) as collector:
        assert collector.get_distant_attr("worker_idx") == 5
        named = [("worker_idx",), ("frames_per_batch",)]
        assert collector.map_fn("get_distant_attr", list_of_args=named) == [5, 16]
        with pytest.raises(ValueError, match="same length"):
            collector.map_fn("stats", [()], [{}, {}])


def test_older_names_are_the_same_classes() -> None:
    assert rl.SyncDataCollector is rl.Collector
    assert rl.MultiSyncDataCollector is rl.MultiSyncCollector
    assert rl.MultiaSyncDataCollector is rl.MultiAsyncCollector
    assert rl.aSyncDataCollector is rl.AsyncCollector
    assert issubclass(rl.Collector, rl.DataCollectorBase)


def test_backend_makes_the_collector_that_is_meant() -> None:
    with rl.Collector(short, frames_per_batch=4, num_collectors=2, sync=True, backend_options={"workers": "threads"}) as collector:
        assert isinstance(collector, rl.MultiSyncCollector) and collector.num_workers == 2
    with pytest.raises(weightsync.UnsupportedError, match="DistributedDataCollector"):
        rl.Collector(short, frames_per_batch=4, backend="submitit")


class Breaks(CountingEnv):
    """Fails after some steps."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.taken = getattr(self, "taken", 0) + 1
        if self.taken > 5:
            raise ZeroDivisionError("the world ended")
        return super()._step(tensordict)


class NoWorld(LookupError):
    """An error of the user's own."""


def no_world() -> Any:
    raise NoWorld("there is none")


def test_error_of_a_users_class_is_of_the_class_of_python_below_it() -> None:
    with pytest.raises(LookupError, match="there is none") as raised:
        rl.MultiSyncCollector([no_world], frames_per_batch=4, workers="threads")
    assert isinstance(raised.value, weightsync.PeerError)


@pytest.mark.parametrize("kind", [rl.MultiSyncCollector, rl.MultiAsyncCollector])
def test_error_of_an_environment_is_of_its_own_class_too(kind: Any) -> None:
    with kind([Breaks], frames_per_batch=20, workers="threads") as collector:
        with pytest.raises(RuntimeError, match="the world ended") as raised:
            collector.next()
    assert isinstance(raised.value, ZeroDivisionError)
    assert isinstance(raised.value, weightsync.PeerError)


def no_step() -> Any:
    raise ValueError("no such world")


def test_worker_process_collects_answers_and_follows_hooks(tmp_path: Any) -> None:
    """The same with processes: what travels is pickled on the way there, and is data on the way back."""
    path = str(tmp_path / "seen")

    def hook(batch: TensorDictBase) -> None:
        with open(path, "a") as file:
            file.write(f"{os.getpid()} {batch.numel()}\n")

    policy = linear(1.0)
    with rl.MultiSyncCollector(
        [EnvCreator(ContinuousActionVecMockEnv)] * 2,
        policy,
        frames_per_batch=8,
        total_frames=16,
        postproc=lambda batch: batch.set("marked", torch.ones(batch.batch_size)),
    ) as collector:
        collector.post_collect_hook = hook
        assert len(list(collector)) == 2
        stats = collector.stats("both")
        assert (stats["frames"], stats["worker_1/frames"], stats["workers_alive"]) == (16, 8, 2)
        assert collector.getattr_env("batch_size") == torch.Size([])
        state = collector.state_dict()["worker0"]["policy_state_dict"]
        assert torch.equal(state["module.weight"], policy.module.weight)
        with pytest.raises(weightsync.WeightsyncError, match="does not travel"):
            collector.getattr_policy("module")
        with pytest.raises(AttributeError):
            collector.getattr_policy("nothing")
    with open(path) as file:
        lines = [line.split() for line in file]
    assert len({pid for pid, _ in lines}) == 2 and {count for _, count in lines} == {"4"}
    assert str(os.getpid()) not in {pid for pid, _ in lines}
    with pytest.raises(ValueError, match="no such world"):
        rl.MultiSyncCollector([no_step], frames_per_batch=8)


def test_workers_of_other_hosts_have_the_same_frames() -> None:
    with rl.DistributedSyncDataCollector(
        [ContinuousActionVecMockEnv] * 2, linear(0.0), frames_per_batch=8, total_frames=16
    ) as collector:
        assert collector.set_seed(3) > 3
        batches = list(collector)
        assert collector.update_policy_weights_().version == 2
        with pytest.raises(weightsync.UnsupportedError, match="workers of this host"):
            collector.map_fn("stats")
    assert [tuple(one.batch_size) for one in batches] == [(2, 4)] * 2
    assert (batches[0]["action"] == 0).all()
    assert batches[0]["collector", "traj_ids"].unique().numel() >= 2


def test_environment_of_gymnasium_still_has_arrays() -> None:
    with rl.Collector(gymnasium.make("CartPole-v1"), frames_per_batch=4, total_frames=4) as collector:
        (batch,) = collector
    assert isinstance(batch, rl.Batch) and batch["action"].shape == (4,)


def test_recurrent_state_is_carried_over() -> None:
    make = lambda: TransformedEnv(ContinuousActionVecMockEnv(), InitTracker())  # noqa: E731
    module = torchrl.modules.GRUModule(
        input_size=7, hidden_size=7, in_keys=["observation", "state", "is_init"], out_keys=["action", ("next", "state")]
    )
    with rl.Collector(
        make, module, frames_per_batch=8, total_frames=16, auto_register_policy_transforms=True
    ) as collector:
        for batch in collector:
            goes_on = ~batch["next", "done"][:-1, 0]
            assert torch.equal(batch["state"][1:][goes_on], batch["next", "state"][:-1][goes_on])
            assert (batch["next", "state"] != 0).any()
