"""The older updater for process groups: its answers, and the weights that it needs."""

from datetime import timedelta

import pytest
from crew import Probe
from tensordict import TensorDict
from torch.distributed import HashStore

from weightsync import PeerError, SettingError
from weightsync.torchrl import DistributedWeightUpdater

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def weights():
    return TensorDict.from_module(Probe(1.0)).data.clone()


@pytest.fixture
def store():
    made = HashStore()
    made.set_timeout(timedelta(seconds=0.05))
    return made


class Worker:
    """A process group and a worker behind it, which answers or is late."""

    def __init__(self, store):
        self.store, self.is_late, self.sends = store, True, 0

    def send(self, rank):
        self.sends += 1
        if not self.is_late:
            self.answer()

    def answer(self):
        self.store.set("NODE_1_out", b"updated")


def updater_of(worker):
    class Here(DistributedWeightUpdater):
        def _shared(self, weights):
            return worker

    return Here(worker.store, weights(), num_workers=1, sync=True)


def test_late_answer_is_not_taken_for_the_next_push(store):
    worker = Worker(store)
    updater = updater_of(worker)
    for _ in range(2):
        with pytest.raises(PeerError, match="worker 0: no answer came"):
            updater.push_weights()
        assert worker.sends == 1, "the worker has not taken the first push yet"
    worker.answer()
    with pytest.raises(PeerError, match="worker 0: no answer came"):
        updater.push_weights()
    assert worker.sends == 2, "the answer was the first push's"
    # An updater that is made after the failure knows of it too.
    updater = updater_of(worker)
    with pytest.raises(PeerError, match="worker 0: no answer came"):
        updater.push_weights()
    assert worker.sends == 2
    worker.answer()
    worker.is_late = False
    updater.push_weights()
    assert worker.sends == 3


def test_answer_that_no_push_asked_for_is_dropped(store):
    worker = Worker(store)
    worker.answer()
    with pytest.raises(PeerError, match="worker 0: no answer came"):
        updater_of(worker).push_weights()


@pytest.mark.parametrize("policy_weights", [None, TensorDict()], ids=["none", "empty"])
def test_distributed_updater_wants_policy_weights(store, policy_weights):
    updater = DistributedWeightUpdater(store, policy_weights, num_workers=1, sync=True)
    with pytest.raises(SettingError, match="in the order of the policy's weights"):
        updater.push_weights(weights())
    assert not store.check(["NODE_1_in"]), "the worker has no instruction"
