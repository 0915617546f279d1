"""TorchRL's faults: not in our schemes, and the same checks fail with TorchRL's own."""

import faults
import pytest
from crew import SCHEMES, bounded

BOTH = tuple(SCHEMES)
# Each check, the schemes it is for, and what TorchRL's own say to it, by scheme where they differ.
CHECKS = [
    (faults.step_without_send, BOTH, "the workers see"),
    (faults.send_to_one, BOTH, "workers and learner see"),
    (faults.torn_read, BOTH, "saw a mix of versions"),
    (faults.killed_worker, BOTH, "a send with a killed worker was not through"),
    (faults.wrong_shape, ["multi-process"], "a send of a wrong shape was not through"),
    (faults.failing_cascade, BOTH, "a send that one worker refuses was not through"),
    (faults.failing_loader, BOTH, "a send that one worker cannot load was not through"),
    (faults.late_worker, BOTH, "nothing says that worker 1 is late"),
    (faults.old_answer, BOTH, "says that a stopped worker has the weights"),
    (faults.raised_timeout, ["shared-mem"], "though nothing was sent"),
    (faults.raised_timeout, ["multi-process"], "queue.Empty"),
    (faults.unknown_second, BOTH, "nothing was to change"),
    (faults.models_apart, BOTH, "an update of two models was not through"),
    (faults.applied_twice, BOTH, "written 1 . 1 times"),
    (faults.stale_model, BOTH, "and the send succeeded"),
    (faults.stale_copy, ["shared-mem"], "the update succeeded, and the workers act with"),
    (faults.factory_never_updated, BOTH, "raised nothing"),
    (faults.unknown_worker, ["shared-mem"], "nothing was to change"),
]
CASES = [
    pytest.param(check, name, said, id=f"{check.__name__}-{name}")
    for check, names, said in CHECKS
    for name in names
]


@pytest.mark.parametrize("check, scheme, _", CASES)
def test_ours_has_not_fault(ours, check, scheme, _):
    bounded(check, ours, scheme)


@pytest.mark.peers
@pytest.mark.parametrize("check, scheme, said", CASES)
def test_torchrl_has_fault(check, scheme, said):
    with pytest.raises(AssertionError, match=said):
        bounded(check, "theirs", scheme)


# What of a fault only the other scheme of TorchRL's has.
ABSENT = [
    (faults.wrong_shape, "shared-mem"),
    (faults.stale_copy, "multi-process"),
    (faults.unknown_worker, "multi-process"),
]


@pytest.mark.peers
@pytest.mark.parametrize("check, scheme", ABSENT)
def test_torchrl_has_not_fault(check, scheme):
    """So these checks can pass, with whichever schemes."""
    bounded(check, "theirs", scheme)


@pytest.mark.parametrize("check, scheme", ABSENT)
def test_ours_has_not_fault_either(ours, check, scheme):
    bounded(check, ours, scheme)
