"""The older updaters of several processes: their arguments, and the answers to their pushes."""

import pickle
import threading
from concurrent import futures
from datetime import timedelta

import pytest
from crew import Probe
from tensordict import TensorDict
from torch.distributed import HashStore

import weightsync.torchrl as ours
from weightsync import LifecycleError, PeerError, SettingError
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


class Answering(Worker):
    """Takes each push, and notes what two pushes do at a time."""

    def __init__(self, store):
        super().__init__(store)
        self.is_late, self.at_once, self.most = False, 0, 0

    def send(self, rank):
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        super().send(rank)

    def answer(self):
        self.at_once -= 1
        super().answer()


def test_push_of_a_thread_waits_for_anothers(store):
    store.set_timeout(timedelta(seconds=60))
    worker = Answering(store)
    updater = updater_of(worker)
    with futures.ThreadPoolExecutor(4) as threads:
        for push in [threads.submit(updater.push_weights) for _ in range(40)]:
            push.result()
    assert (worker.sends, worker.most) == (40, 1)


class Dead(Worker):
    def send(self, rank):
        self.sends += 1
        raise RuntimeError("Connection closed by peer")


def test_push_to_a_dead_worker_fails_each_time(store):
    updater = updater_of(worker := Dead(store))
    for sends in (1, 2):
        with pytest.raises(PeerError, match="worker 0: Connection closed by peer"):
            updater.push_weights()
        assert worker.sends == sends


def rpc_updater(rrefs=(None, None), **how):
    return ours.RPCWeightUpdater(
        None, None, list(rrefs), **{"policy_weights": weights(), "num_workers": 2, **how}
    )


def ray_updater(**how):
    return ours.RayWeightUpdater(
        remote_collectors=[None, None], **{"policy_weights": weights(), **how}
    )


def distributed_updater(**how):
    return DistributedWeightUpdater(
        HashStore(), sync=True, **{"policy_weights": weights(), "num_workers": 2, **how}
    )


ALL = [rpc_updater, ray_updater, distributed_updater]


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize(
    "nothing",
    [{"policy_weights": None}, {"weight_getter": lambda: None}, {"policy_weights": TensorDict()}],
)
def test_push_of_nothing_is_refused(make, nothing):
    updater, done = make(**nothing), []
    updater.register_post_hook(lambda: done.append(1))
    with pytest.raises(SettingError, match="no weights to push"):
        updater.push_weights()
    assert not done, "no hook runs"
    updater.push_weights(worker_ids=[])


@pytest.mark.parametrize(
    "make, wrong, said",
    [
        *[(make, {"policy_weights": Probe()}, "expected a TensorDict, got Probe") for make in ALL],
        *[(make, {"policy_weights": {}}, "expected a TensorDict, got dict") for make in ALL],
        *[(make, {"weight_getter": 3}, "weight_getter: expected a function") for make in ALL],
        (rpc_updater, {"num_workers": 5}, "num_workers: expected 2.*got 5"),
        (distributed_updater, {"num_workers": "2"}, "num_workers: expected a whole number"),
        (ray_updater, {"max_interval": "3"}, "max_interval: expected a whole number"),
    ],
)
def test_updater_checks_its_arguments(make, wrong, said):
    with pytest.raises(SettingError, match=said):
        make(**wrong)


@pytest.mark.parametrize(
    "chosen, pushed",
    [({1}, [1]), (range(2), [0, 1]), ([0, 0], [0]), (True, [1]), ((one for one in (1, 0)), [1, 0])],
)
def test_worker_ids_are_any_iterable(chosen, pushed):
    class Here(ours.RPCWeightUpdater):
        def _begin(self, worker, weights):
            begun.append(worker)

        def _finish(self, worker, done):
            pass

    begun = []
    Here(None, None, [None] * 2, weights(), 2).push_weights(worker_ids=chosen)
    assert begun == pushed


@pytest.mark.parametrize("make", [rpc_updater, ray_updater])
@pytest.mark.parametrize("wrong, said", [("1", "'1'"), (1.0, "1.0"), ([2], "2"), (["0"], "'0'")])
def test_worker_ids_that_are_no_numbers_are_named(make, wrong, said):
    with pytest.raises(SettingError, match=f"no worker {said}; there is 0, 1"):
        make().push_weights(worker_ids=wrong)


def test_updater_pickles_without_its_lock():
    copied = pickle.loads(pickle.dumps(ray_updater()))
    assert isinstance(copied._pushing, type(threading.RLock()))


def test_ray_updater_starts_no_ray():
    ray = pytest.importorskip("ray")
    if ray.is_initialized():
        pytest.skip("another file of this process has a cluster")
    with pytest.raises(LifecycleError, match="in no Ray cluster"):
        ray_updater().push_weights()
    assert not ray.is_initialized()
