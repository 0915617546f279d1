"""The scenarios of TorchRL's collectors, each of which has its schemes' workers."""

import copy
import functools
import threading
import time

import torch
from crew import SOON, hurry
from scenarios import left, raises, scheme_of
from tiny import Counting, One, acted, collecting, policy, weights_of
from torch import multiprocessing as mp
from torchrl.collectors import AsyncBatchedCollector, AsyncCollector, Collector, Evaluator
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import StepCounter, TransformedEnv

CPU = torch.device("cpu")
# An update of workers that are there: it takes milliseconds, also on a machine that is busy.
PROMPT = 10.0


def collector(module, name, kind):
    """Each collector of one machine: first weights, then newer ones."""
    if kind == "single":
        made = Collector(Counting, policy(1.0), weight_sync_schemes=schemes(module, name), **SMALL)
    elif kind == "async":
        made = AsyncCollector(
            Counting, policy(1.0), weight_sync_schemes=schemes(module, name), **SMALL
        )
    else:
        how = {"sync": kind == "multi-sync", "policy": policy(1.0)}
        with collecting(module, {"policy": name}, **how) as (made, batches):
            return updated(made, batches)
    try:
        updated(made, iter(made))
    finally:
        made.shutdown()


SMALL = {"frames_per_batch": 4, "total_frames": -1, "auto_register_policy_transforms": False}


def updated(made, batches):
    assert acted(batches) == {1.0}
    for weight in (2.0, 3.0):
        with hurry("an update", PROMPT):
            made.update_policy_weights_(policy(weight))
        eventually(batches, weight)


def eventually(batches, weight):
    """What was collected before an update may come after it; then it is the new weights."""
    for _ in range(50):
        if acted(batches) == {weight}:
            return
    raise AssertionError(f"the workers never act with {weight}")


FORMS = {
    "positional-module": lambda made: made.update_policy_weights_(policy(2.0)),
    "positional-tensordict": lambda made: made.update_policy_weights_(weights_of(policy(2.0))),
    "positional-state-dict": lambda made: made.update_policy_weights_(policy(2.0).state_dict()),
    "policy": lambda made: made.update_policy_weights_(policy=policy(2.0)),
    "weights": lambda made: made.update_policy_weights_(weights=weights_of(policy(2.0))),
    "model-id": lambda made: made.update_policy_weights_(policy(2.0), model_id="policy"),
    "weights-model-id": lambda made: made.update_policy_weights_(
        weights=weights_of(policy(2.0)), model_id="policy"
    ),
    "weights-dict": lambda made: made.update_policy_weights_(
        weights_dict={"policy": weights_of(policy(2.0))}
    ),
    "weights-dict-module": lambda made: made.update_policy_weights_(
        weights_dict={"policy": policy(2.0)}
    ),
    "all-workers": lambda made: made.update_policy_weights_(policy(2.0), worker_ids=[0, 1]),
    "nothing": lambda made: changed(made).update_policy_weights_(),
}


def changed(made):
    made.policy.module.weight.data.fill_(2.0)
    return made


def form(module, name, which):
    """`update_policy_weights_` as it can be called."""
    with collecting(module, {"policy": name}, policy=policy(1.0)) as (made, batches):
        assert acted(batches) == {1.0}
        with hurry("an update", PROMPT):
            FORMS[which](made)
        assert acted(batches) == {2.0}


def collector_worker_ids(module, name):
    """`worker_ids` of an update: only those workers change."""
    with collecting(module, {"policy": name}, policy=policy(1.0)) as (made, batches):
        with hurry("an update of one worker", PROMPT):
            made.update_policy_weights_(policy(2.0), worker_ids=[1])
        assert by_worker(batches) == [1.0, 2.0]
        with hurry("an update of one worker", PROMPT):
            made.update_policy_weights_(policy(3.0), worker_ids=0)
        assert by_worker(batches) == [3.0, 2.0]


def by_worker(batches, key="action"):
    """The weight each worker acts with, in their order; each acts with one."""
    seen = [set(of_one.flatten().tolist()) for of_one in next(batches)[key]]
    assert all(len(values) == 1 for values in seen), seen
    return [min(values) for values in seen]


def conflicting(module, name):
    """Forms that contradict themselves raise, and change nothing."""
    two = {"policy": policy(2.0)}
    with collecting(module, {"policy": name}, policy=policy(1.0)) as (made, batches):
        update = made.update_policy_weights_
        raises(lambda: update(policy(2.0), weights=weights_of(policy(2.0))))
        raises(lambda: update(policy(2.0), policy=policy(2.0)))
        raises(lambda: update(policy(2.0), weights_dict=two))
        raises(lambda: update(model_id="policy", weights_dict=two))
        raises(lambda: update(policy(2.0), model_id="nope"))
        assert acted(batches) == {1.0}


def one_factory(module, name):
    """A policy factory, alone or next to a policy that only says the weights."""
    make = functools.partial(policy, 1.0)
    with collecting(module, {"policy": name}, policy_factory=make) as (made, batches):
        assert acted(batches) == {1.0}
        with hurry("an update", PROMPT):
            made.update_policy_weights_(policy(2.0))
        assert acted(batches) == {2.0}
    how = {"policy_factory": make, "policy": policy(5.0)}
    with collecting(module, {"policy": name}, **how) as (made, batches):
        assert acted(batches) == {5.0}
        made.policy.module.weight.data.fill_(6.0)
        with hurry("an update", PROMPT):
            made.update_policy_weights_()
        assert acted(batches) == {6.0}


def distinct_factories(module, name):
    """A factory for each worker: weights of their own, and updates of some or all."""
    makes = [functools.partial(policy, 1.0 + index) for index in range(3)]
    how = {"workers": 3, "policy_factory": makes}
    with collecting(module, {"policy": name}, **how) as (made, batches):
        assert by_worker(batches) == [1.0, 2.0, 3.0]
        with hurry("an update of each worker", PROMPT):
            made.update_policy_weights_({at: weights_of(policy(4.0 + at)) for at in range(3)})
        assert by_worker(batches) == [4.0, 5.0, 6.0]
        with hurry("an update of one worker", PROMPT):
            made.update_policy_weights_({1: weights_of(policy(9.0))})
        assert by_worker(batches) == [4.0, 9.0, 6.0]
        with hurry("an update of all workers alike", PROMPT):
            made.update_policy_weights_(weights_of(policy(7.0)))
        assert by_worker(batches) == [7.0] * 3


def initialised_before(module, name):
    """A scheme initialised with weights before the collector, which has a factory only."""
    scheme = scheme_of(module, name)
    scheme.init_on_sender(model_id="policy", weights=weights_of(policy(3.0)), devices=[CPU] * 2)
    how = {"policy_factory": functools.partial(policy, 1.0)}
    with collecting(module, {"policy": scheme}, **how) as (made, batches):
        assert acted(batches) == {3.0}
        with hurry("an update", PROMPT):
            made.update_policy_weights_(policy(4.0))
        assert acted(batches) == {4.0}


def two_models(module, name, strategy, start):
    """A policy and a model of the environment, each with its scheme; together and alone."""
    mp.set_start_method(start, force=True)
    both = {key: scheme_of(module, name, strategy) for key in ("policy", "env.value_net")}
    value = {"model_id": "env.value_net", "model": One(1.0)}
    both["env.value_net"].init_on_sender(devices=[CPU], ctx=mp.get_context(), **value)
    with collecting(module, both, workers=1, policy=policy(1.0)) as (made, batches):
        update = made.update_policy_weights_
        assert pairs(batches) == {(1.0, 1.0)}
        with hurry("an update of two models", PROMPT):
            update(weights_dict={"policy": policy(2.0), "env.value_net": weights_of(One(3.0))})
        assert pairs(batches) == {(2.0, 3.0)}
        with hurry("an update of the second model", PROMPT):
            update(One(4.0), model_id="env.value_net")
        assert pairs(batches) == {(2.0, 4.0)}
        with hurry("an update of the first model", PROMPT):
            update(policy(5.0))
        assert pairs(batches) == {(5.0, 4.0)}


def pairs(batches):
    batch = next(batches)
    rewards = batch["next", "reward"].flatten().tolist()
    return set(zip(batch["action"].flatten().tolist(), rewards, strict=True))


def collector_no_sync(module, _):
    """No sync: the workers keep what their factory made."""
    scheme = module.NoWeightSyncScheme()
    how = {"policy_factory": functools.partial(policy, 1.0)}
    with collecting(module, {"policy": scheme}, **how) as (made, batches):
        with hurry("an update that does nothing", PROMPT):
            made.update_policy_weights_(policy(2.0))
        assert acted(batches) == {1.0}


def policy_version(module, name):
    """Frames say which version made them; one update counts once; a version can be set again."""
    how = {"policy": policy(1.0), "track_policy_version": True}
    with collecting(module, {"policy": name}, **how) as (made, batches):
        assert acted(batches, "policy_version") == {0}
        for version in (1, 2):
            with hurry("an update", PROMPT):
                made.update_policy_weights_(policy(2.0))
            # The first frame was stamped at the end of the batch before.
            assert newest(batches) == version
        made.map_fn("_set_received_policy_version", [(7,)] * 2)
        assert newest(batches) == 7
        made.update_policy_weights_(policy(3.0))
        assert newest(batches) == 8


def newest(batches):
    versions = next(batches)["policy_version"].flatten()
    return max(versions.tolist())


def devices(module, name, device):
    """Workers that share a device; `cpu:0` is the same one, but has a worker copy its policy."""
    how = {"policy": policy(1.0), "policy_device": device, "workers": 3}
    with collecting(module, {"policy": name}, **how) as (made, batches):
        updated(made, batches)


def transformed(module, name):
    """An environment with a transform around it, as most are."""
    how = {"policy": policy(1.0), "env": Wrapped}
    with collecting(module, {"policy": name}, **how) as (made, batches):
        updated(made, batches)


class Wrapped(TransformedEnv):
    def __init__(self):
        super().__init__(Counting(), StepCounter())


def collector_shut_down(module, name):
    """A collector's `shutdown` ends its workers, and leaves no thread or file of the scheme."""
    collector(module, name, "multi-sync")
    before = left()
    for _ in range(2):
        collector(module, name, "multi-sync")
    assert left() == before, f"left behind: {left()}, before {before}"


def running_free(module, name):
    """A collector that fills a buffer in the background is updated while it does."""
    acts = mp.Array("d", 2)
    makes = [functools.partial(Telling, acts, index) for index in range(2)]
    buffer = ReplayBuffer(storage=LazyTensorStorage(5000), shared=True)
    how = {"policy": policy(1.0), "sync": False, "replay_buffer": buffer, "env": makes}
    with collecting(module, {"policy": name}, **how) as (made, _):
        made.start()
        end = time.monotonic() + SOON
        for weight in (1.0, 2.0, 3.0):
            with hurry("an update", PROMPT):
                made.update_policy_weights_(policy(weight))
            while acts[:] != [weight] * 2:
                assert time.monotonic() < end, f"the workers act with {acts[:]}, not {weight}"


class Telling(Counting):
    """Tells another process what it was told to do."""

    def __init__(self, acts, index):
        super().__init__()
        self.acts, self.index = acts, index

    def _step(self, now):
        self.acts[self.index] = now["action"].item()
        return super()._step(now)


def inference_server(module, name):
    """A collector that asks a server for its actions, whose model is the one that is synced."""
    scheme = scheme_of(module, name)
    scheme.init_on_sender(model_id="policy", model=policy(1.0), devices=[CPU])
    receiver = in_process(scheme)
    connected = threading.Thread(target=scheme.connect)
    connected.start()
    made = AsyncBatchedCollector(
        create_env_fn=[Counting] * 2,
        policy=policy(1.0),
        frames_per_batch=4,
        total_frames=-1,
        weight_sync=receiver,
        env_backend="threading",
    )
    try:
        batches = iter(made)
        assert acted(batches) == {1.0}
        connected.join(SOON)
        for weight in (2.0, 3.0):
            with hurry("an update", PROMPT):
                scheme.send(weights_of(policy(weight)))
            eventually(batches, weight)
    finally:
        made.shutdown()


def in_process(scheme):
    """The other half of a scheme, for a receiver in the sender's own process."""
    other = copy.copy(scheme)
    other.__setstate__(scheme.__getstate__())
    return other


def evaluator(module, name):
    """An evaluator in a process of its own gets the weights it is to judge."""
    with hurry("an evaluation", SOON):
        judge = Evaluator(
            Ending,
            policy_factory=lambda _env=None: policy(1.0),
            num_trajectories=1,
            max_steps=5,
            backend="process",
            weight_sync_schemes=schemes(module, name),
        )
        try:
            for weight in (2.0, 3.0):
                result = judge.evaluate(weights=weights_of(policy(weight)))
                assert result["eval/reward"] == 5 * weight, result
        finally:
            judge.shutdown()


class Ending(Counting):
    """Pays the action, five times."""

    def _step(self, now):
        after = super()._step(now)
        after["reward"] = now["action"]
        return after


def schemes(module, name):
    return {"policy": scheme_of(module, name)}
