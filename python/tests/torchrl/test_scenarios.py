"""TorchRL's scenarios and more, with our schemes; with TorchRL's own where those pass.

TorchRL's own schemes run them too, so a scenario asks for nothing that they cannot do. Where they
fail, the scenario says what they do.
"""

import itertools

import pytest
import scenarios
import with_collectors
from crew import NETWORK, SCHEMES, bounded

SHARED, QUEUED = BOTH = tuple(SCHEMES)
STRATEGIES = ("tensordict", "state_dict")
CASES = []


def case(scenario, *args, names=BOTH, theirs=BOTH):
    """A scenario with these schemes; `theirs`: those of TorchRL's that pass."""
    for name in names:
        said = "-".join((scenario.__name__, *args, name))
        CASES.append((said, scenario, (name, *args), name in theirs))


case(scenarios.transport)
case(scenarios.not_waited_for)
# Theirs in shared memory takes no dict, neither a flat TensorDict: an error, or an endless wait.
TAKEN = {"module": BOTH, "state_dict": [QUEUED], "tensordict": BOTH, "nested-dict": [QUEUED]}
for form in scenarios.PAYLOADS:
    case(scenarios.payload, "tensordict", form, theirs=TAKEN.get(form, ()))
TAKEN["module"] = [QUEUED]
for form in scenarios.PAYLOADS:
    case(scenarios.payload, "state_dict", form, theirs=TAKEN.get(form, ()))
case(scenarios.nothing_given)
for how in ("fork", "spawn"):
    case(scenarios.started, how)
case(scenarios.no_sync, names=[SHARED])
# Raises `queue.Empty`.
case(scenarios.receive, theirs=[SHARED])
for strategy in STRATEGIES:
    # Of an older release.
    case(scenarios.older_calls, strategy, theirs=())
case(scenarios.pickled_before)
# Has queues in it, which do not pickle.
case(scenarios.pickled_after, theirs=())
case(scenarios.initialised_again, theirs=())
case(scenarios.wrong_order)
for how in ("model", "weights", "device_map_fn"):
    case(scenarios.initialised_by, how)
# Is for shared memory only.
case(scenarios.per_worker, names=[SHARED])
# Changes all workers.
case(scenarios.named_workers, theirs=())
# Hangs for a shape, and takes what is there of the names.
case(scenarios.mismatch, "shape", theirs=[SHARED])
case(scenarios.mismatch, "missing", theirs=())
case(scenarios.mismatch, "unknown", theirs=())
case(scenarios.on_meta)
case(scenarios.cascade)
case(scenarios.shut_down)
for kind in ("multi-sync", "multi-async", "async"):
    case(with_collectors.collector, kind)
# Wants a list of devices, which this collector does not have.
case(with_collectors.collector, "single", theirs=())
for form in with_collectors.FORMS:
    # A state dict: an error, or an endless wait.
    case(with_collectors.form, form, theirs=() if form == "positional-state-dict" else BOTH)
# Changes all workers.
case(with_collectors.collector_worker_ids, theirs=())
case(with_collectors.conflicting)
case(with_collectors.one_factory)
# Hangs.
case(with_collectors.distinct_factories, theirs=[SHARED])
case(with_collectors.initialised_before)
for strategy, start in itertools.product(STRATEGIES, ("fork", "spawn")):
    # Hangs, or does not start (forked).
    case(with_collectors.two_models, strategy, start, theirs=())
case(with_collectors.collector_no_sync, names=[SHARED])
case(with_collectors.policy_version)
case(with_collectors.devices, "cpu")
# Goes on with the first weights.
case(with_collectors.devices, "cpu:0", theirs=[QUEUED])
case(with_collectors.transformed)
case(with_collectors.collector_shut_down)
case(with_collectors.running_free)
case(with_collectors.inference_server)
case(with_collectors.evaluator)

# Between hosts.
for run in (
    scenarios.transport,
    scenarios.nothing_given,
    scenarios.wrong_order,
    scenarios.receive,
    scenarios.named_workers,
    scenarios.shut_down,
    with_collectors.collector_worker_ids,
    with_collectors.distinct_factories,
    with_collectors.policy_version,
    with_collectors.collector_shut_down,
    with_collectors.running_free,
):
    case(run, names=NETWORK, theirs=())
for form in ("module", "state_dict", "tensordict"):
    case(scenarios.payload, "tensordict", form, names=NETWORK, theirs=())
for how in ("fork", "spawn"):
    case(scenarios.started, how, names=NETWORK, theirs=())
    case(with_collectors.two_models, "tensordict", how, names=NETWORK, theirs=())
for kind in ("multi-sync", "multi-async", "async"):
    case(with_collectors.collector, kind, names=NETWORK, theirs=())


def cases(of_all):
    return [
        pytest.param(run, args, id=said, marks=[pytest.mark.soak] * is_for_soaks(*args))
        for said, run, args, both in CASES
        if both or of_all
    ]


def is_for_soaks(name, *args):
    """A spawned process imports TorchRL, which takes seconds: one scheme does."""
    return "spawn" in args and name != SHARED


@pytest.mark.parametrize("scenario, args", cases(of_all=True))
def test_ours(ours, scenario, args):
    bounded(scenario, ours, *args)


@pytest.mark.peers
@pytest.mark.parametrize("scenario, args", cases(of_all=False))
def test_theirs(scenario, args):
    bounded(scenario, "theirs", *args)
