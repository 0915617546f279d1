"""Policies of TorchRL's modules that Gymnasium's environments call without TensorDicts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    InteractionType,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)

from weightsync import rl
from weightsync._guard import Guard, Hold

torchrl = pytest.importorskip("torchrl")

from torchrl import collectors as theirs  # noqa: E402
from torchrl.envs import GymEnv, SerialEnv  # noqa: E402
from torchrl.modules import (  # noqa: E402
    OneHotCategorical,
    OneHotOrdinal,
    ProbabilisticActor,
    RandomPolicy,
    TanhNormal,
)

from weightsync.rl._direct import direct_call  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")



def cart_pole() -> Any:
    return GymEnv("CartPole-v1")


def three_cart_poles() -> Any:
    return SerialEnv(3, cart_pole)


def numbered_cart_pole() -> Any:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def pendulum() -> Any:
    return GymEnv("Pendulum-v1")


def layers(inputs: int, outputs: int, *more: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(inputs, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, outputs), *more
    )


def one_hot(**settings: Any) -> Any:
    return ProbabilisticTensorDictSequential(
        TensorDictModule(layers(4, 2), ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=OneHotCategorical, return_log_prob=True, **settings
        ),
    )


def numbered() -> Any:
    return ProbabilisticActor(
        TensorDictModule(layers(4, 2), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )


def ordinal() -> Any:
    net = TensorDictModule(layers(4, 2), ["observation"], ["scores"])
    return ProbabilisticActor(net, in_keys=["scores"], distribution_class=OneHotOrdinal)


def continuous(kind: Any = TanhNormal, **settings: Any) -> Any:
    body = TensorDictSequential(
        TensorDictModule(layers(3, 4), ["observation"], ["hidden"]),
        TensorDictModule(torch.nn.Linear(4, 2), ["hidden"], ["params"]),
        TensorDictModule(NormalParamExtractor(), ["params"], ["loc", "scale"]),
    )
    return ProbabilisticActor(body, in_keys=["loc", "scale"], distribution_class=kind, **settings)


def scored() -> Any:
    return continuous(return_log_prob=True, distribution_kwargs={"low": -2.0, "high": 2.0})


def normal() -> Any:
    return continuous(torch.distributions.Normal)


def chosen(observation: torch.Tensor, done: torch.Tensor) -> Any:
    """A function, of two things that the environment shows, whose answer is a dict."""
    left = observation[..., :1] + 0 * done > 0
    return {"action": torch.cat([left, ~left], -1).long(), "left": left.numpy()}


def rule() -> Any:
    return TensorDictModule(chosen, ["observation", "done"], ["action", "left"])


Make = Callable[[], Any]
USUAL = ["RANDOM", "MODE", "DETERMINISTIC"]
#: With the explorations that TorchRL has for the distribution.
KINDS: list[tuple[Make, Make, list[str]]] = [
    (cart_pole, one_hot, USUAL),
    (three_cart_poles, one_hot, USUAL),
    (numbered_cart_pole, numbered, USUAL),
    (cart_pole, ordinal, USUAL),
    (pendulum, scored, ["RANDOM", "DETERMINISTIC", "MEAN"]),
    (pendulum, normal, [*USUAL, "MEAN"]),
    (cart_pole, rule, ["RANDOM"]),
    (three_cart_poles, rule, ["RANDOM"]),
]


def made(policy: Make) -> Any:
    torch.manual_seed(2)
    return policy()


def batches_of(kind: Any, make: Make, policy: Any, exploration: str) -> list[TensorDictBase]:
    """Three batches that begin with a seed."""
    collector = kind(
        make,
        policy,
        frames_per_batch=45,
        total_frames=900,
        exploration_type=InteractionType[exploration],
    )
    try:
        collector.set_seed(5)
        collector.reset()
        torch.manual_seed(7)
        batches = iter(collector)
        return [next(batches).clone() for _ in range(3)]
    finally:
        collector.shutdown()


@pytest.mark.parametrize(
    ("make", "policy", "exploration"),
    [(make, policy, one) for make, policy, kinds in KINDS for one in kinds],
)
def test_frames_without_tensordicts_are_those_of_torchrl(
    make: Make, policy: Make, exploration: str
) -> None:
    assert direct_call(made(policy)) is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = batches_of(theirs.Collector, make, made(policy), exploration)
        got = batches_of(rl.Collector, make, made(policy), exploration)
    for ours, other in zip(got, expected, strict=True):
        assert set(ours.keys(True, True)) == set(other.keys(True, True))
        for key in set(ours.keys(True, True)) - {("collector", "traj_ids")}:
            mine, its = ours.get(key), other.get(key)
            assert (mine.dtype, mine.shape) == (its.dtype, its.shape), key
            # By bits: what is no number equals itself.
            assert mine.numpy().tobytes() == its.numpy().tobytes(), key


def test_actions_of_one_environment_are_read_by_each_of_a_batch() -> None:
    def policy() -> RandomPolicy:
        return RandomPolicy(cart_pole().action_spec)

    def make() -> Any:
        return SerialEnv(2, cart_pole)

    expected = batches_of(theirs.Collector, make, policy(), "RANDOM")
    got = batches_of(rl.Collector, make, policy(), "RANDOM")
    for ours, other in zip(got, expected, strict=True):
        for key in ("observation", "action", ("next", "reward"), ("next", "done")):
            assert torch.equal(ours.get(key), other.get(key)), key


class Louder(TensorDictModule):
    """Does more than TorchRL's module."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return super().forward(tensordict)


class Other(TensorDictSequential):
    """Calls its modules in a way of its own."""

    def _run_module(self, module: Any, tensordict: TensorDictBase) -> TensorDictBase:
        return module(tensordict.copy())


def with_hook() -> Any:
    policy = one_hot()
    policy[0].register_forward_hook(lambda *given: None)
    return policy


def compiled() -> Any:
    policy = one_hot()
    policy[0].compile(backend="eager")
    return policy


def kept_from_changes_by_another() -> Any:
    policy = one_hot()
    policy.guard = Guard(Hold(lambda: None), policy)
    return policy


@pytest.mark.parametrize(
    "policy",
    [
        with_hook,
        compiled,
        kept_from_changes_by_another,
        lambda: one_hot(num_samples=3),
        lambda: one_hot(generator="seed"),
        lambda: TensorDictSequential(one_hot(), selected_out_keys=["action"]),
        lambda: TensorDictSequential(one_hot(), partial_tolerant=True),
        lambda: Other(one_hot()),
        lambda: Louder(layers(4, 2), ["observation"], ["action"]),
        lambda: TensorDictModule(layers(4, 2), ["observation"], ["action"], inplace=False),
        lambda: TensorDictModule(layers(4, 2), ["observation"], [("action", "left")]),
        lambda: print,
    ],
)
def test_policy_that_does_more_gets_a_tensordict(policy: Make) -> None:
    assert direct_call(policy()) is None


def test_guard_of_the_callers_own_hold_is_passed_by() -> None:
    policy, hold = one_hot(), Hold(lambda: None)
    guards = [Guard(hold, policy)]
    assert direct_call(policy, hold) is not None
    guards.append(Guard(Hold(lambda: None), policy))
    assert direct_call(policy, hold) is None
    guards[1].remove()
    assert direct_call(policy, hold) is not None


def test_hooks_and_modules_of_a_later_batch_count() -> None:
    policy = made(one_hot)
    seen: list[Any] = []
    with rl.Collector(cart_pole, policy, frames_per_batch=4) as collector:
        collector.next()
        hook = policy[0].register_forward_hook(lambda *given: seen.append(given))
        collector.next()
        assert len(seen) == 4
        hook.remove()
        policy[0].module = torch.nn.Linear(4, 2)
        torch.nn.init.zeros_(policy[0].module.weight)
        assert (collector.next()["logits"] == policy[0].module.bias).all()
    assert len(seen) == 4
