"""NeMo-RL's checkpoint engine, called by processes in the order of its synchronizer.

NeMo-RL cannot be installed from PyPI. Its interface is here as names, from its repository at commit
7ea279ab (August 2026): ``nemo_rl/utils/checkpoint_engines/base.py``.
"""

import asyncio
import importlib
import inspect
import time

import pytest
from named_weights import SIZE

from weightsync.errors import (
    LifecycleError,
    PeerError,
    SettingError,
    UnsupportedError,
    WrongWeightsError,
)
from weightsync.nemo_rl import Transport

pytestmark = pytest.mark.timeout(180)

#: The methods, their parameters, and whether these are given by name.
GROUP = ["train_world_size", "rollout_world_size", "metadata"]
METHODS = {
    "prepare": ([], False),
    "init_policy_process_group": (["worker_rank", *GROUP], True),
    "init_rollout_process_group": (["rollout_rank", *GROUP], True),
    "finalize": ([], False),
    "send_weights": (["weights"], False),
    "receive_weight_batches": ([], False),
    "get_target_weight_layout": ([], False),
}


def test_methods_equal_those_that_were_read():
    module, name = "weightsync.nemo_rl:Transport".split(":")
    assert getattr(importlib.import_module(module), name) is Transport
    for name, (expected, by_name) in METHODS.items():
        _, *found = inspect.signature(getattr(Transport, name)).parameters.values()
        assert [one.name for one in found] == expected, name
        assert all((one.kind == one.KEYWORD_ONLY) == by_name for one in found), name
    assert inspect.iscoroutinefunction(Transport.send_weights)
    assert inspect.isasyncgenfunction(Transport.receive_weight_batches)
    assert Transport(bucket_size=1).shard_expert_weights is False


def test_refits_equal_the_policy_at_every_version(start):
    world = start()
    for seed in (1, 2, 3, 4):
        assert world.refit(seed) == [seed, seed]
        # The memory is shared, so nothing has travelled.
        assert world.compare(seed) == [([], None)] * 2


def test_changes_alone_travel_after_the_first_refit(start):
    world = start(scheme={"share": "none", "deltas": "always"})
    changed = SIZE**2 // 5000
    before = 0
    for seed in range(3):
        count = changed if seed else 0
        world.refit(seed, changed=count)
        found = world.compare(seed, changed=count)
        assert [differs for differs, _ in found] == [[], []]
        now = max(travelled for _, travelled in found)
        assert now - before < 40_000 if seed else now > 2_000_000, (seed, before, found)
        before = now


def test_others_refit_when_a_rollout_is_killed(start):
    world = start(scheme={"share": "none"})
    world.refit(1)
    victim, other = world.rollouts
    for one in world.policy:
        one.begin("send", 2, {})
    victim.begin("receive", dies=True)
    other.begin("receive")
    with pytest.raises(EOFError):
        victim.answer()
    assert [one.answer() for one in (*world.policy, other)] == [4, 4, 2]
    world.rollouts = [other]
    assert world.refit(3) == [3]
    assert world.compare(3)[0][0] == []


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_rollouts_end_when_the_policy_is_killed(start, first):
    world = start()
    if not first:
        world.refit(1)
    begun = time.monotonic()
    world.begin(2, dies_after=2)
    for one in world.rollouts:
        with pytest.raises(PeerError):
            one.answer()
    assert time.monotonic() - begun < 15


def test_refit_goes_on_after_another_layout(start):
    world = start()
    world.refit(1)
    world.begin(2, extra=["lora"])
    with pytest.raises(WrongWeightsError, match="lora"):
        world.policy[0].answer()
    # The other rank gathered everything, and nobody waits.
    assert world.policy[1].answer() == 5
    for one in world.rollouts:
        with pytest.raises(PeerError, match="closed its end before version 2 was out"):
            one.answer()
    world.begin(3)
    with pytest.raises(LifecycleError, match="was closed"):
        world.policy[0].answer()
    world.policy[1].answer()
    for one in world.rollouts:
        with pytest.raises(LifecycleError, match="form the group again"):
            one.answer()
    world.finalize()
    world.init()
    # The numbers go on.
    assert world.refit(4, extra=["lora"]) == [2, 2]
    assert world.compare(4, extra=["lora"]) == [([], None)] * 2


def test_ends_leave_nothing_when_released_after_refits(start):
    world = start(release_after_refit=True)

    def cycle(seed):
        world.refit(seed)
        world.finalize()
        return [one.call("open_files") for one in (*world.policy, *world.rollouts)]

    before = cycle(1)
    for seed in (2, 3, 4):
        world.init()
        after = cycle(seed)
    assert after == before


def test_settings_and_calls_are_refused_by_name():
    with pytest.raises(UnsupportedError, match="shard_expert_weights"):
        Transport(bucket_size=1, shard_expert_weights=True)
    topology = {"train_world_size": 1, "rollout_world_size": 1, "metadata": [None, None]}
    with pytest.raises(SettingError, match="rank 0 of the policy first"):
        Transport(bucket_size=1).init_rollout_process_group(rollout_rank=0, **topology)
    with pytest.raises(LifecycleError, match="before prepare"):
        asyncio.run(Transport(bucket_size=1).send_weights(iter(())))

    async def receive():
        async for _ in Transport(bucket_size=1).receive_weight_batches():
            pass

    with pytest.raises(LifecycleError, match="before init_rollout_process_group, or after"):
        asyncio.run(receive())
