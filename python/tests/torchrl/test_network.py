"""What TorchRL's schemes between hosts are asked for, and where they are found."""

import dataclasses
import json
import pickle
import socket
import threading

import pytest
import weightsync
from patience import patience
from tiny import One, policy
from weightsync import Distributed, Rpc
from weightsync import torchrl as ours
from weightsync.torchrl import DistributedWeightSyncScheme, RPCWeightSyncScheme, _group

LONG = patience(30)


@pytest.mark.parametrize("backend", ["nccl", "mpi", "ucc"])
def test_a_backend_that_is_not_here_is_named(backend):
    with pytest.raises(weightsync.UnsupportedError, match=f"'{backend}'.*'gloo'"):
        DistributedWeightSyncScheme(backend)


@pytest.mark.parametrize(
    "backend, kind",
    [
        ("none", "NoWeightSyncScheme"),
        ("direct", "NoWeightSyncScheme"),
        ("shared", "SharedMemWeightSyncScheme"),
        ("thread", "SharedMemWeightSyncScheme"),
        ("process", "MultiProcessWeightSyncScheme"),
        ("multiprocessing", "MultiProcessWeightSyncScheme"),
        ("distributed", "DistributedWeightSyncScheme"),
        ("rpc", "RPCWeightSyncScheme"),
    ],
)
def test_a_scheme_is_made_by_its_backend(backend, kind):
    scheme = ours.WeightSyncScheme.from_backend(backend, strategy="state_dict")
    assert type(scheme) is getattr(ours, kind)
    assert scheme.strategy_str == "state_dict"


def test_unknown_backend_error_lists_those_there():
    with pytest.raises(weightsync.SettingError, match="^Unsupported weight-sync backend 'nccl': there are .*distributed.*ray"):
        ours.WeightSyncScheme.from_backend("nccl")


def test_settings_reach_the_workers_with_weights():
    scheme = DistributedWeightSyncScheme(
        share="none", arity=3, connections=1, deltas="always", every=4, own_copy=True
    )
    scheme.init_on_sender(model_id="policy", model=policy(1.0), devices=["cpu"])
    text = json.loads(scheme.get_store_info()["init_info"])["scheme"]
    settings = ("share=none", "arity=3", "connections=1", "deltas=always", "every=4", "own-copy")
    for setting in settings:
        assert setting in text, text
    theirs, model = pickle.loads(pickle.dumps(scheme)), policy()
    theirs.init_on_receiver(model_id="policy", model=model, worker_idx=0)
    worker = threading.Thread(target=theirs.connect, kwargs={"worker_idx": 0})
    worker.start()
    try:
        scheme.connect()
        worker.join()
        assert scheme.send(policy(2.0)).all_applied
        assert {float(one.detach()) for one in model.parameters()} == {2.0}
    finally:
        worker.join()
        theirs.shutdown()
        scheme.shutdown()


@pytest.mark.parametrize(
    "kind, setting, words",
    [
        (DistributedWeightSyncScheme, {"share": "foo"}, "all, relay or none, got"),
        (DistributedWeightSyncScheme, {"deltas": "sometimes"}, "auto, always or never, got"),
        (DistributedWeightSyncScheme, {"arity": 65}, "1 to 64, got"),
        (DistributedWeightSyncScheme, {"connections": 9}, "1 to 8, got"),
        (DistributedWeightSyncScheme, {"every": 0}, "1 to 32, got"),
        (DistributedWeightSyncScheme, {"advertise": "trainer"}, "HOST:PORT"),
        (DistributedWeightSyncScheme, {"advertise": "[fd00::7]"}, "HOST:PORT"),
        (RPCWeightSyncScheme, {"initial": "soon"}, "connect or send, got"),
        (RPCWeightSyncScheme, {"listen": "trainer"}, "HOST:PORT"),
    ],
)
def test_scheme_refuses_a_setting_when_it_is_made(kind, setting, words):
    (name,) = setting
    with pytest.raises(weightsync.SettingError, match=f'"{name}": expected .*{words}'):
        kind(**setting)


def test_scheme_takes_the_value_that_a_sender_takes():
    value = weightsync.Distributed(arity=3, every=4)
    assert DistributedWeightSyncScheme(scheme=value)._scheme == value
    both = DistributedWeightSyncScheme(scheme=value, arity=2)
    assert both._scheme == weightsync.Distributed(arity=2, every=4)
    with pytest.raises(weightsync.UnsupportedError, match="pull"):
        DistributedWeightSyncScheme(pull=True)
    with pytest.raises(TypeError, match="shares"):
        DistributedWeightSyncScheme(shares="none")


@pytest.mark.parametrize("kind", [DistributedWeightSyncScheme, RPCWeightSyncScheme])
def test_run_directory_keeps_the_trainer_address(kind, tmp_path):
    infos = []
    for _ in range(2):
        scheme = kind(run_dir=tmp_path)
        scheme.init_on_sender(model_id="policy", model=policy(1.0), devices=["cpu"])
        infos.append(json.loads(scheme._group.info))
        scheme.shutdown()
    assert infos[0]["at"] == infos[1]["at"]


def test_where_workers_find_the_trainer():
    scheme = DistributedWeightSyncScheme()
    with pytest.raises(weightsync.LifecycleError, match="init_on_sender"):
        scheme.get_store_info()
    scheme.init_on_sender(model_id="policy", model=policy(1.0), devices=["cpu"])
    info = scheme.get_store_info()
    assert info["host"] == "127.0.0.1" and info["port"] > 0
    assert "distributed" in info["init_info"]
    scheme.shutdown()


@pytest.mark.parametrize(
    "advertise, host, port",
    [
        ("trainer:7070", "trainer", 7070),
        ("[::1]:7070", "::1", 7070),
    ],
)
def test_store_info_has_the_advertised_host_and_port(advertise, host, port):
    scheme = DistributedWeightSyncScheme(advertise=advertise)
    scheme.init_on_sender(model_id="policy", model=policy(1.0), devices=["cpu"])
    info = scheme.get_store_info()
    assert (info["host"], info["port"]) == (host, port)
    scheme.shutdown()


def test_off_loopback_a_token_is_wanted(monkeypatch):
    for name in ("WEIGHTSYNC_TOKEN", "WEIGHTSYNC_TOKEN_FILE", "WEIGHTSYNC_INSECURE_PLAINTEXT"):
        monkeypatch.delenv(name, raising=False)
    scheme = DistributedWeightSyncScheme(listen="0.0.0.0:0")
    with pytest.raises(weightsync.WeightsyncError, match="token"):
        scheme.init_on_sender(model_id="policy", model=policy(1.0), devices=["cpu"])


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.parametrize(
    "scheme",
    [Distributed(share="none"), Rpc(initial="connect"), Rpc()],
    ids=str,
)
@pytest.mark.parametrize("chosen", [True, False])
def test_two_models_are_one_group_at_one_port(scheme, chosen):
    """The caller that adds the second prepares again where the first was prepared."""
    names = ("policy", "critic")
    if chosen:
        scheme = dataclasses.replace(scheme, listen=f"127.0.0.1:{free_port()}")
    group = _group.Group(scheme, "copy")
    for name in names:
        group.add(name, "tensordict", [0], lambda: One(1.0))
    theirs = pickle.loads(pickle.dumps(group))
    models = {name: One() for name in names}

    def join():
        for name in names:
            own = _group.WorkerModel(name, "copy")
            own.replace(models[name])
            theirs.join(name, 0, own, declared=False)

    worker = threading.Thread(target=join)
    worker.start()
    try:
        for name in names:
            group.connect(name, None, None)
        worker.join()
        assert theirs.background is not None
        first = 0.0 if getattr(scheme, "initial", "") == "send" else 1.0
        assert {float(one.weight.detach()) for one in models.values()} == {first}
        report = group.send({"policy": One(2.0), "critic": One(3.0)}, None, "applied", 60.0)
        assert report.all_applied, report
        assert [float(models[name].weight.detach()) for name in names] == [2.0, 3.0]
    finally:
        theirs.shutdown()
        group.shutdown()
        worker.join()


def test_sender_closed_before_connect_frees_its_port():
    scheme = f"distributed:listen=127.0.0.1:{free_port()}"
    senders = [weightsync.Sender(One(), scheme=scheme)]
    senders[0].shutdown()
    senders.append(weightsync.Sender(One(), scheme=scheme))
    senders[1].shutdown()


def test_joined_worker_is_not_missing_before_a_send(monkeypatch):
    monkeypatch.setattr(_group, "WEIGHT_SYNC_TIMEOUT", 3.0)
    group = _group.Group(Rpc(), "copy")
    group.add("policy", "tensordict", [0, 1, 2], lambda: One(1.0))
    info = weightsync.InitInfo.from_json(group.info)
    there = [weightsync.Receiver(info, number) for number in (0, 2)]
    joining = [threading.Thread(target=one.connect) for one in there]
    for thread in joining:
        thread.start()
    try:
        with pytest.raises(weightsync.DeadlineError, match=r"only 2 of 3 .*\(missing: 1\)"):
            group.connect("policy", None, None)
    finally:
        for thread in joining:
            thread.join()
        for one in there:
            one.shutdown()
        group.shutdown()


def test_receive_returns_the_version_of_a_trainer_that_started_again(tmp_path):
    def trainer(value):
        made = DistributedWeightSyncScheme(run_dir=tmp_path)
        made.init_on_sender(model_id="policy", model=policy(value), num_workers=1)
        return made

    before = trainer(1.0)
    worker = pickle.loads(pickle.dumps(before))
    model = policy(0.0)
    worker.init_on_receiver(model_id="policy", model=model, worker_idx=0)
    joining = threading.Thread(target=worker.connect)
    joining.start()
    before.connect()
    joining.join()
    for value in (2.0, 3.0, 4.0):
        before.send(policy(value))
        assert worker.receive(timeout=LONG) is not None
    before.shutdown()
    came = []
    waiting = threading.Thread(target=lambda: came.append(worker.receive(timeout=10 * LONG)))
    waiting.start()
    after = trainer(9.0)
    try:
        after.connect()
        # Its versions are numbered from 1 again.
        waiting.join(LONG)
        assert not waiting.is_alive(), "it waits for a number of the run before"
        assert came[0] is not None
        assert all((one == 9).all() for one in model.parameters())
    finally:
        worker.shutdown()
        after.shutdown()
        waiting.join(LONG)
