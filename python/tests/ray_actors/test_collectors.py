"""TorchRL's RayCollector and RayModuleTransform with the schemes here, by one changed import."""

import functools
import pickle
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import weightsync
from crew import line
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from tiny import Counting, One, acted, policy
from torchrl.collectors import Collector
from torchrl.collectors.distributed import RayCollector
from torchrl.envs import TransformedEnv
from torchrl.envs.transforms.module import ModuleTransform
from torchrl.weight_update import WeightStrategy
from weightsync._deadline import Deadline
from weightsync.ray._group import Group, Offer
from weightsync.torchrl import (
    RayActorTransport,
    RayModuleTransformReceiver,
    RayModuleTransformScheme,
    RayModuleTransformSender,
    RayTransport,
    RayWeightSyncScheme,
    _ray,
)

# Ray waits a minute for a process that does not come up before it starts another.
pytestmark = pytest.mark.timeout(300, func_only=True)


@pytest.fixture
def collecting(cluster):
    """Makes a collector of Ray actors; its workers have this host's two cores, or none."""
    made = []

    def collect(first=policy, workers=2, **how):
        scheme = RayWeightSyncScheme()
        collector = RayCollector(
            [Counting] * workers,
            first and first(1.0),
            frames_per_batch=4 * workers,
            total_frames=100_000,
            sync=True,
            remote_configs={"num_cpus": 0},
            collector_kwargs={"auto_register_policy_transforms": False},
            weight_sync_schemes={"policy": scheme},
            **how,
        )
        made.append(collector)
        return collector, scheme, iter(collector)

    yield collect
    for one in made:
        one.shutdown()


def test_ray_collector_updates_its_workers(collecting):
    collector, _, batches = collecting()
    assert acted(batches) == {1.0}
    report = collector.update_policy_weights_(policy(2.0))
    assert report.all_applied and len(report.workers) == 2
    assert acted(batches) == {2.0}
    report = collector.update_policy_weights_(policy(3.0), worker_ids=[1])
    assert line(report, 1) == "applied"
    assert acted(batches) == {2.0, 3.0}
    collector.policy.module.weight.data.fill_(4.0)
    collector.update_policy_weights_()
    assert acted(batches) == {4.0}


def test_ray_collector_updates_a_factorys_policy(collecting):
    collector, _, batches = collecting(first=None, policy_factory=functools.partial(policy, 1.0))
    assert acted(batches) == {1.0}
    collector.update_policy_weights_(policy(2.0))
    assert acted(batches) == {2.0}


def test_nested_ray_collector_passes_versions_on(collecting):
    how = {"collector_class": "sync", "num_workers_per_collector": 2}
    collector, _, batches = collecting(workers=1, **how)
    assert acted(batches) == {1.0}
    assert collector.update_policy_weights_(policy(2.0)).all_applied
    assert acted(batches) == {2.0}


def test_killed_collector_is_a_line_of_the_report(cluster, collecting):
    collector, scheme, _ = collecting()
    collector.update_policy_weights_()
    cluster.ray.kill(collector.remote_collectors[0])
    report = scheme.send(policy(2.0))
    assert line(report, 1) == "applied"
    while line(report, 0) != "died":
        report = scheme.send(policy(2.0))


def test_updates_go_on_after_a_first_that_failed(cluster, collecting):
    collector, _, _ = collecting()
    cluster.ray.kill(collector.remote_collectors[0])
    with pytest.raises(cluster.ray.exceptions.RayActorError):
        collector.update_policy_weights_()
    report = collector.update_policy_weights_(policy(2.0))
    while line(report, 1) != "applied":
        report = collector.update_policy_weights_(policy(2.0))
    assert line(report, 0) is None, "it has never joined"


def test_ray_scheme_is_named_where_it_fails(cluster):
    scheme = RayWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=policy(1.0), num_workers=1)
    group = scheme._joined()
    with pytest.raises(
        weightsync.PeerError,
        match="RayWeightSyncScheme of 'policy' is on elsewhere.*make RayWeightSyncScheme with insecure_p",
    ):
        group.reach(Offer("", "elsewhere", False, None))
    with pytest.raises(weightsync.DeadlineError, match="RayWeightSyncScheme of 'policy' did not get"):
        group.after("", Deadline(0.0))
    group.leave()
    scheme.shutdown()


def test_ray_worker_asks_each_directory_for_a_relay(cluster, monkeypatch):
    asked, reach = [], Group.reach

    def noted(group, offer):
        reach(group, offer)
        asked.append(group)

    monkeypatch.setattr(Group, "reach", noted)
    scheme, model = RayWeightSyncScheme(), policy(0.0)
    scheme.init_on_sender(model_id="policy", model=policy(1.0), num_workers=1)
    worker = pickle.loads(pickle.dumps(scheme))
    worker.init_on_receiver(model_id="policy", model=model, worker_idx=0)
    connecting = threading.Thread(target=scheme.connect)
    connecting.start()
    worker.connect(worker_idx=0)
    connecting.join()
    group = worker._ray_group
    assert asked == [group]
    cluster.ray.kill(cluster.ray.get_actor(group.name, namespace="weightsync"))
    while asked != [group] * 2:
        time.sleep(0.01)
    worker.shutdown()
    scheme.shutdown()
    assert worker._ray_group is None


def test_ray_transform_without_a_place_is_named(cluster, monkeypatch):
    class Placed:
        def _getattr(self, name):
            return name

    actor = cluster.ray.remote(Placed).options(resources={"nowhere": 1}).remote()
    monkeypatch.setattr(_ray, "WEIGHT_SYNC_TIMEOUT", 0.5)
    with pytest.raises(weightsync.DeadlineError, match=r"Actor\(.*Placed, .* within 0.5 s"):
        RayModuleTransformScheme().init_on_sender(ray_transform=SimpleNamespace(_actor=actor))
    cluster.ray.kill(actor)


def test_ray_transform_gets_its_weights_from_the_sender(cluster):
    scheme = RayModuleTransformScheme()
    with pytest.raises(weightsync.LifecycleError, match="RayModuleTransform"):
        scheme.init_on_sender()
    module = TensorDictModule(One(1.0), in_keys=["observation"], out_keys=["observation"])
    transform = ModuleTransform(
        module=module, weight_sync_scheme=scheme, use_ray_service=True, num_cpus=0
    )
    rows = TensorDict({"observation": torch.zeros(2, 1)}, [2])
    assert transform(rows)["observation"].tolist() == [[1.0]] * 2
    other = TensorDictModule(One(2.0), in_keys=["observation"], out_keys=["observation"])
    assert scheme.send(other).all_applied
    assert transform(rows)["observation"].tolist() == [[2.0]] * 2
    with pytest.raises(weightsync.ModelError, match="transform's module, in its actor.*pass the"):
        scheme.send()
    # A collector in this process sends to it as it does to its policy.
    collector = Collector(
        TransformedEnv(Counting(), transform),
        policy(0.0),
        frames_per_batch=4,
        total_frames=-1,
        auto_register_policy_transforms=False,
        weight_sync_schemes={"transform_module": scheme},
    )
    batches = iter(collector)
    collector.update_policy_weights_(
        TensorDict.from_module(other).data * 0 + 3.0, model_id="transform_module"
    )
    assert acted(batches, ("next", "observation")) == {3.0}
    collector.shutdown()
    scheme.shutdown()


def weights_of(value):
    return TensorDict.from_module(policy(value)).data


class Receiving:
    """An actor of a program's own, with TorchRL's transport."""

    def __init__(self, transport):
        self.transport, self.policy = transport, policy(0.0)
        self.transport.set_model(self.policy)

    def _receive_weights_scheme(self):
        assert self.transport.receive_weights(timeout=60.0, strategy=WeightStrategy()) is not None

    def begin(self, worker):
        self.transport.setup_connection_and_weights_on_receiver(worker_idx=worker)
        return self.read()

    def read(self):
        return self.policy.module.weight.item()

    def end(self):
        self.transport.shutdown()


def test_ray_transports_bring_weights(cluster, name):
    transports, actors = [], []
    for worker in range(2):
        # The actor says itself which worker it is, where its transport does not.
        theirs = RayTransport(connection_info_name=name, worker_idx=worker or None)
        actors.append(cluster.ray.remote(num_cpus=0)(Receiving).remote(theirs))
        transports.append(
            RayTransport(remote_actor=actors[-1], connection_info_name=name, worker_idx=worker)
        )
    first, second = transports
    assert first.send_weights(weights_of(1.0)) is None, "it joined"
    assert first.send_weights(weights_of(2.0)).all_applied
    second.send_weights_async(weights_of(3.0))
    second.wait_ack()
    second.send_weights_async(weights_of(4.0))
    assert second.wait_ack(60.0).all_applied
    assert cluster.get([one.read.remote() for one in actors]) == [2.0, 4.0]
    for one in transports:
        one.shutdown()
    for actor in actors:
        cluster.ray.kill(actor)


def test_ray_transport_begins_where_its_worker_does(cluster, name):
    actor = cluster.ray.remote(num_cpus=0)(Receiving).remote(RayTransport(connection_info_name=name))
    begun = actor.begin.remote(3)
    sending = RayTransport(connection_info_name=name, worker_idx=3)
    sending.send_weights(weights_of(2.0))
    assert cluster.get(begun) == 2.0
    cluster.ray.kill(actor)
    sending.shutdown()


def test_ray_transport_that_nobody_reads_gives_up(cluster, name):
    sending = RayTransport(connection_info_name=name)
    sending.send_weights_async(weights_of(1.0))
    with pytest.raises(weightsync.DeadlineError, match="missing: worker 0"):
        sending.wait_ack(0.1)
    receiving = RayTransport(connection_info_name=f"{name} nowhere")
    with pytest.raises(weightsync.DeadlineError, match="worker 0 got no initial weights within 0.1 s"):
        receiving.setup_connection_and_weights_on_receiver(timeout=0.1)
    for one in (sending, receiving):
        one.shutdown()


@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
def test_older_ends_of_a_ray_transform_carry_weights(cluster, strategy):
    module = TensorDictModule(One(1.0), in_keys=["observation"], out_keys=["observation"])
    transform = ModuleTransform(module=module, use_ray_service=True, num_cpus=0)
    rows = TensorDict({"observation": torch.zeros(2, 1)}, [2])
    scheme = RayModuleTransformScheme(strategy)
    sender, receiver = scheme.create_sender(), scheme.create_receiver()
    assert isinstance(sender, RayModuleTransformSender)
    assert isinstance(receiver, RayModuleTransformReceiver)
    with pytest.raises(weightsync.LifecycleError, match="there is no actor to send to"):
        sender.update_weights(weights_of(2.0))
    sender.set_context(SimpleNamespace(transform=transform), "transform")
    for value in (2.0, 3.0):
        sender.update_weights(weights_of(value))
        assert transform(rows)["observation"].tolist() == [[value]] * 2
    transport = RayActorTransport(update_method=strategy)
    assert not transport.check_connection()
    transport.set_actor(transform._actor)
    transport.send_weights("policy", weights_of(4.0))
    assert transform(rows)["observation"].tolist() == [[4.0]] * 2
    with pytest.raises(weightsync.LifecycleError, match="nothing was sent"):
        transport.wait_ack()
    receiver.register_model(module)
    receiver.register_worker_transport(transform._actor)
    assert receiver.receive() is False
    receiver.apply_weights(weights_of(5.0))
    assert module(rows.clone())["observation"].tolist() == [[5.0]] * 2
    sender.shutdown()


def test_nccl_of_a_ray_scheme_says_what_it_does(cluster, caplog):
    scheme = RayWeightSyncScheme(backend="nccl")
    assert scheme.backend == "nccl"
    name = scheme.connection_info_name
    scheme.init_on_sender(model_id="policy", model=policy(1.0), num_workers=1)
    said = "there is no GPU here, so weights go by shared memory"
    assert (said in caplog.text) != torch.cuda.is_available()
    worker, model = pickle.loads(pickle.dumps(scheme)), policy(0.0)
    assert worker.connection_info_name == scheme.connection_info_name == name
    worker.init_on_receiver(model_id="policy", model=model, worker_idx=0)
    connecting = threading.Thread(target=scheme.connect)
    connecting.start()
    worker.connect(worker_idx=0)
    connecting.join()
    assert scheme.send(policy(2.0)).all_applied and model.module.weight.item() == 2.0
    assert worker._ray_group.name.endswith(name)
    worker.shutdown()
    scheme.shutdown()
    scheme.init_on_sender(model_id="policy", model=policy(1.0), num_workers=1)
    assert scheme.connection_info_name != name
    scheme.shutdown()
    with pytest.raises(weightsync.UnsupportedError, match="'mpi'"):
        RayWeightSyncScheme(backend="mpi")
