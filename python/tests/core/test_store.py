"""Versions that last: saved, loaded, named, kept by a sender, and sent through a store."""

import fcntl
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy
import pytest
import torch
import weightsync
from ends import LONG, MODES, Net, all_ended, meet, pass_on
from safetensors.torch import load_file


def _store(path, *values, **settings):
    """A store at this path, with a version of each value."""
    store = weightsync.Store(path, **settings)
    for value in values:
        store.save(Net(value))
    return store


def test_versions_load_as_they_were_saved(tmp_path):
    with _store(tmp_path, 1.0, 2.0, 3.0) as store:
        assert store.load().version == 3
        assert [one.version for one in store.versions()] == [1, 2, 3]
        for version in [1, 2, 3]:
            model = Net()
            assert store.load_into(model, version) == version
            assert model.value == float(version)
            snapshot = store.load(version)
            assert snapshot["small"].tolist() == [float(version)] * 3
            assert snapshot.digest() == snapshot.published_digest


def test_small_changes_are_saved_in_few_bytes(tmp_path):
    model = Net(1.0, numel=1 << 20).to(torch.bfloat16)
    with weightsync.Store(tmp_path) as store:
        first = store.save(model)
        with torch.no_grad():
            model.large[::100] += 0.0078125
        second = store.save(model)
    assert first.stored_bytes >= first.bytes
    assert second.stored_bytes < first.stored_bytes / 50
    assert 0.009 < second.changes < 0.011
    # Another process compares with what the store has.
    with weightsync.Store(tmp_path) as store, torch.no_grad():
        model.large[1] += 0.0078125
        assert store.save(model).stored_bytes < 1000
        loaded = Net(0.0, numel=1 << 20).to(torch.bfloat16)
        assert store.load_into(loaded) == 3
    assert torch.equal(loaded.large, model.large)


def test_full_versions_are_checkpoint_directories(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "net"}))
    with _store(tmp_path / "store", 4.0, files=[config]) as store:
        [version] = store.versions()
    [model] = version.models
    assert load_file(os.path.join(model.directory, "model.safetensors"))["small"].tolist() == [4.0] * 3
    with open(os.path.join(model.directory, "config.json")) as file:
        assert json.load(file) == {"model_type": "net"}
    with weightsync.Store(tmp_path / "parts", shard_bytes=1 << 16) as parts:
        parts.save(Net(5.0))
        directory = parts.versions()[0].models[0].directory
        with open(os.path.join(directory, "model.safetensors.index.json")) as file:
            index = json.load(file)
        assert set(index["weight_map"]) == {"large", "small", "mean"}
        assert parts.load()["mean"].tolist() == [5.0] * 5


def test_file_that_is_not_regular_is_refused(tmp_path):
    pipe = tmp_path / "config.json"
    os.mkfifo(pipe)
    for path in (pipe, "/dev/zero", tmp_path):
        with pytest.raises(OSError, match="not a regular file"):
            weightsync.Store(tmp_path / "store", files=[path])
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate((256 << 20) + 1)
    with pytest.raises(OSError, match="more than 268435456 bytes"):
        weightsync.Store(tmp_path / "store", files=[large])


def test_everything_that_a_sender_takes_can_be_saved(tmp_path):
    kinds = {
        "module": Net(7.0),
        "state_dict": Net(7.0).state_dict(),
        "nested": {"a": {"b": torch.ones(3)}, "c": torch.zeros(2, dtype=torch.int64)},
        "numpy": {"x": numpy.arange(6.0).reshape(2, 3)},
        "view": {"x": torch.arange(6.0).reshape(2, 3).T},
    }
    for name, weights in kinds.items():
        with weightsync.Store(tmp_path / name) as store:
            store.save(weights)
            assert len(store.load()) >= 1
    assert weightsync.Store(tmp_path / "view").load()["x"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert weightsync.Store(tmp_path / "nested").load()["a.b"].tolist() == [1, 1, 1]


def test_what_is_missing_is_said_to_be_so(tmp_path):
    empty = weightsync.Store(tmp_path / "none")
    with pytest.raises(weightsync.DeadlineError, match="did not have a first version"):
        empty.load()
    assert empty.versions() == []
    assert not (tmp_path / "none").exists()
    with _store(tmp_path, 1.0) as store:
        with pytest.raises(weightsync.ModelError, match="no v9; .*v1"):
            store.load(9)
        with pytest.raises(weightsync.DeadlineError, match="v9 or a later"):
            store.load(at_least=9, timeout=0.01)
        with pytest.raises(weightsync.ModelError, match='"critic"'):
            store.load(model="critic")
        with pytest.raises(weightsync.ModelError, match="named .best."):
            store.load(named="best")
        with pytest.raises(weightsync.SettingError, match="give version, at_least or named"):
            store.load(1, named="best")
        with pytest.raises(weightsync.SendError, match="versions of a store only grow"):
            store.save(Net(2.0), version=1)
        with pytest.raises(weightsync.WrongWeightsError, match="large"):
            store.load_into({"large": torch.zeros(2)})


@pytest.mark.parametrize("url", ["", "ftp://host/x", "a\0b"])
def test_addresses_that_are_none_are_refused(url):
    with pytest.raises(weightsync.SettingError, match="address of a store"):
        weightsync.Store(url)


@pytest.mark.parametrize(
    "settings", [{"keep": 0}, {"keep": "some"}, {"files": {"../x": b""}}, {"files": {"a.safetensors": b""}}]
)
def test_settings_that_cannot_be_are_refused(tmp_path, settings):
    with pytest.raises(weightsync.SettingError):
        weightsync.Store(tmp_path, **settings).save(Net())


def test_named_versions_stay(tmp_path):
    with _store(tmp_path, 1.0, 2.0, keep=1) as store:
        assert [one.version for one in store.versions()] == [2]
        store.name("best", 2)
        for value in [3.0, 4.0]:
            store.save(Net(value))
        assert [one.version for one in store.versions()] == [2, 4]
        assert store.names() == {"best": {"policy": 2}}
        assert store.load(named="best")["small"].tolist() == [2.0] * 3
        store.remove_name("best")
        store.save(Net(5.0))
        assert [one.version for one in store.versions()] == [5]
        with pytest.raises(weightsync.SettingError, match="cannot be named"):
            store.name("../best", 5)
        with pytest.raises(weightsync.ModelError):
            store.remove_name("best")


def test_readers_with_a_bound_reload_when_they_lag(tmp_path):
    with _store(tmp_path, 1.0, 2.0, 3.0) as store:
        assert store.load_unless_within(3, 0) is None
        assert store.load_unless_within(1, 2) is None
        assert store.load_unless_within(1, 1).version == 3


def test_damage_is_named_and_an_older_version_loads(tmp_path, caplog):
    with _store(tmp_path, 1.0, 2.0, deltas=False) as store:
        directory = store.versions()[1].models[0].directory
        path = os.path.join(directory, "model.safetensors")
        with open(path, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\xff")
        assert store.load().version == 1
        assert path in caplog.text and "damaged" in caplog.text
        with pytest.raises(weightsync.CorruptError, match="model.safetensors is damaged"):
            store.load(2)


def _spoil(path):
    with open(path, "r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"~")


def test_damage_of_several_versions_is_said_once(tmp_path, caplog):
    model = Net()
    with weightsync.Store(tmp_path) as store:
        for step in range(4):
            with torch.no_grad():
                model.small[0] = step
            store.save(model)
        (anchor,) = {version.models[0].directory for version in store.versions()}
        newest = Path(anchor).parents[1] / f"{1:020}-{4:020}"
        _spoil(newest / "policy" / "weights.delta")
        assert store.load().version == 3
        (said,) = [record.message for record in caplog.records]
        assert "weights.delta is damaged" in said and said.endswith("; an older version is loaded")
        # All versions need this file, and then none is loaded.
        _spoil(Path(anchor) / "model.safetensors")
        caplog.clear()
        for load in [store.load, store.load_all]:
            with pytest.raises(weightsync.CorruptError, match="has no version") as raised:
                load()
            assert str(raised.value).count("model.safetensors is damaged") == 1, raised.value
        assert not caplog.records
        manifests = list((tmp_path / "versions").iterdir())
        for manifest in manifests:
            _spoil(manifest)
        for asked in [{"version": 2}, {"at_least": 9}]:
            with pytest.raises((weightsync.CorruptError, weightsync.DeadlineError)):
                store.load(**asked)
            said = [sum(one.name in record.message for record in caplog.records) for one in manifests]
            assert said == [1] * 4, caplog.text
            caplog.clear()
        # The next writer says so once, too.
        _spoil(tmp_path / "head.json")
        with weightsync.Store(tmp_path) as writer:
            writer.save(model)
        assert sum("head.json is damaged" in record.message for record in caplog.records) == 1


def test_a_second_writer_fences_the_first_off(tmp_path):
    with _store(tmp_path, 1.0) as first, _store(tmp_path, 2.0) as second:
        with pytest.raises(weightsync.PeerError, match="was taken over"):
            first.save(Net(3.0))
        assert second.save(Net(4.0)).versions == {"policy": 3}
        assert second.load(2)["small"].tolist() == [2.0] * 3


def test_threads_save_and_load_at_once(tmp_path):
    failed = []

    def run(store, work):
        try:
            for turn in range(20):
                work(store, turn)
        except Exception as error:  # noqa: BLE001
            failed.append(error)

    def load(store, _):
        model = Net()
        store.load_into(model)
        assert model.value >= 1.0

    with _store(tmp_path, 1.0, keep=2) as store:
        save = lambda store, turn: store.save(Net(2.0 + turn))  # noqa: E731
        works = [save, load, load]
        threads = [threading.Thread(target=run, args=(store, work)) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed


def test_ctrl_c_ends_the_wait_for_a_version(tmp_path):
    program = (
        "import signal, sys, weightsync\n"
        # A shell's background jobs ignore it.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "print('waiting', flush=True)\n"
        "weightsync.Store(sys.argv[1]).load(at_least=5, timeout=None)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        assert process.stdout.readline() == b"waiting\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=LONG)
    assert b"KeyboardInterrupt" in errors


def test_forked_children_load(tmp_path):
    with _store(tmp_path, 6.0) as store:
        child = os.fork()
        if child == 0:
            model = Net()
            store.load_into(model)
            os._exit(0 if model.value == 6.0 else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_a_sender_keeps_its_versions(tmp_path):
    trainer, model = Net(1.0), Net()
    sender = weightsync.Sender(trainer, keep=tmp_path, every=2)
    receiver = weightsync.ModelReceiver(sender.init_info, 0, model=model)
    with all_ended(sender, receiver):
        meet(sender, receiver)
        for value in [2.0, 3.0, 4.0, 5.0]:
            assert sender.saves[-1].wait(LONG) == "durable"
            trainer.fill(value)
            pass_on(sender, receiver)
        assert [one.versions for one in sender.saves] == [{"policy": 1}, {"policy": 3}, {"policy": 5}]
    assert [one.outcome for one in sender.saves] == ["durable"] * 3
    store = weightsync.Store(tmp_path)
    assert [one.version for one in store.versions()] == [1, 3, 5]
    loaded = Net()
    store.load_into(loaded, 3)
    assert loaded.value == 3.0

    # The next trainer goes on from there.
    with weightsync.Sender(trainer, keep=store) as again:
        again.connect(0)
        assert again.version == 6


def test_saves_that_fail_say_why(tmp_path):
    trainer = Net(1.0)
    with weightsync.Sender(trainer, keep=tmp_path) as sender:
        sender.connect(0)
        assert sender.saves[-1].wait(LONG) == "durable"
        with _store(tmp_path, 9.0):
            sender.send()
            assert sender.saves[-1].wait(LONG) == "failed"
            assert "was taken over" in sender.saves[-1].reason
    with pytest.raises(weightsync.SettingError, match="every"):
        weightsync.Sender(trainer, every=3)
    with pytest.raises(weightsync.SettingError, match="every"):
        weightsync.Sender(trainer, keep=tmp_path, every=0)


def test_a_sender_of_several_models_keeps_what_changed(tmp_path):
    models = {"actor": Net(1.0), "critic": Net(2.0)}
    with weightsync.Sender(models=models, keep=tmp_path) as sender:
        sender.connect(0)
        assert sender.saves[-1].wait(LONG) == "durable"
        models["actor"].fill(3.0)
        sender.send(model="actor")
        assert sender.saves[-1].wait(LONG) == "durable"
        sender.send(model="critic")
        assert sender.saves[-1].wait(LONG) == "durable"
    found = weightsync.Store(tmp_path).load_all()
    assert {name: one.version for name, one in found.items()} == {"actor": 2, "critic": 2}
    assert found["actor"]["small"].tolist() == [3.0] * 3


def test_a_sender_by_rpc_keeps_what_it_sends(tmp_path):
    _store(tmp_path, 9.0, 9.0).close()
    with weightsync.Sender(Net(1.0), scheme="rpc", keep=tmp_path) as sender:
        sender.connect(0)
        sender.send()
        assert sender.version == 3
        assert sender.saves[-1].wait(LONG) == "durable"


def test_a_sender_that_fails_to_connect_keeps_its_numbers(tmp_path):
    _store(tmp_path, 9.0).close()
    with weightsync.Sender(Net(1.0), keep=tmp_path) as sender:
        with pytest.raises(weightsync.WrongWeightsError):
            sender.connect(0, weights={"other": torch.zeros(3)})
        sender.connect(0)
        assert sender.version == 2
        assert sender.saves[-1].wait(LONG) == "durable"


@pytest.mark.parametrize("scheme", ["none", "store:/tmp/somewhere"])
def test_schemes_without_versions_to_keep_are_refused(tmp_path, scheme):
    with pytest.raises(weightsync.SettingError, match="the scheme"):
        weightsync.Sender(Net(), scheme=scheme, keep=tmp_path)


def test_a_forked_child_saves_with_a_store_of_its_own(tmp_path):
    with _store(tmp_path, 1.0) as store:
        child = os.fork()
        if child == 0:
            try:
                store.save(Net(2.0))
            except weightsync.LifecycleError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        store.save(Net(3.0))
        assert store.load(2)["small"].tolist() == [3.0] * 3


@pytest.mark.parametrize("mode", MODES)
def test_weights_go_through_a_store(tmp_path, mode):
    trainer, models = Net(1.0), [Net(), Net()]
    sender = weightsync.Sender(trainer, scheme=weightsync.StoreScheme(str(tmp_path)))
    receivers = [
        weightsync.ModelReceiver(sender.init_info, at, model=model, mode=mode)
        for at, model in enumerate(models)
    ]
    with all_ended(sender, *receivers):
        meet(sender, *receivers)
        trainer.fill(2.0)
        pass_on(sender, *receivers)
        assert [model.value for model in models] == [2.0, 2.0]
    # The versions outlive both, and the next trainer continues their numbers.
    assert [one.version for one in weightsync.Store(tmp_path).versions()] == [1, 2]
    with weightsync.Sender(trainer, scheme=f"store:{tmp_path}") as again:
        again.connect(0)
        assert again.version == 3


def test_temporary_stores_leave_nothing(tmp_path):
    sender = weightsync.Sender(Net(1.0), scheme=f"store:{tmp_path},temporary")
    receiver = weightsync.ModelReceiver(sender.init_info, 0, model=Net())
    with all_ended(sender, receiver):
        meet(sender, receiver)
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []


def test_store_schemes_are_what_they_say():
    assert str(weightsync.StoreScheme("/srv/x", keep=4)) == "store:/srv/x,keep=4"
    assert str(weightsync.StoreScheme("/srv/x", temporary=True)) == "store:/srv/x,temporary"
    with pytest.raises(weightsync.SettingError, match="commas"):
        weightsync.StoreScheme("/srv/a,b")
    with pytest.raises(weightsync.SettingError):
        weightsync.StoreScheme("/srv/x", keep="some")


def test_files_of_one_name_are_refused(tmp_path):
    for name in ["a", "b"]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    files = [tmp_path / "a" / "config.json", tmp_path / "b" / "config.json"]
    with pytest.raises(weightsync.SettingError, match="two files named"):
        weightsync.Store(tmp_path / "store", files=files)
    for settings in [{"keep": "some"}, {"shard_bytes": -1}, {"files": {"x.safetensors": b""}}]:
        with pytest.raises(weightsync.SettingError):
            weightsync.Store(tmp_path / "store", **settings)


@pytest.mark.parametrize("url", ["~/store", "~", Path("s3://bucket/policy"), "gs:/bucket"])
def test_paths_that_mean_something_else_are_refused(url):
    with pytest.raises(weightsync.SettingError, match="as the system has it"):
        weightsync.Store(url)


def test_url_of_a_store_opens_it_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with _store("store", 1.0) as store:
        assert store.url == str(tmp_path / "store")
    monkeypatch.chdir("/")
    assert weightsync.Store(store.url).load().version == 1
    scheme = weightsync.StoreScheme(tmp_path / "other")
    with weightsync.Sender(Net(1.0), scheme=scheme) as sender:
        sender.connect(0)
    assert weightsync.Store(tmp_path / "other").load().version == 1


def test_one_model_of_several_needs_no_other(tmp_path):
    with weightsync.Store(tmp_path) as store:
        store.save({"w": torch.zeros(1000)}, name="critic")
        store.save({"w": torch.zeros(3)}, name="actor")
        store.save({"w": torch.ones(3)}, name="actor")
    critic = next(one for one in store.versions()[-1].models if one.model == "critic")
    weights = Path(critic.directory, "model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    store = weightsync.Store(tmp_path)
    assert store.load(model="actor").version == 2
    assert store.load(2, model="actor")["w"].tolist() == [1.0] * 3
    assert store.load_unless_within(1, 0, model="actor").version == 2
    with pytest.raises(weightsync.CorruptError, match="critic"):
        store.load(1, model="critic")
    with pytest.raises(weightsync.ModelError, match="several models"):
        store.load()


def test_snapshots_are_saved_as_they_are(tmp_path):
    class Counted(torch.nn.Linear):
        def get_extra_state(self):
            return {"steps": 7}

        def set_extra_state(self, state):
            self.steps = state["steps"]

    with weightsync.Store(tmp_path / "one") as one, weightsync.Store(tmp_path / "other") as other:
        one.save(Counted(2, 2))
        first = one.load()
        assert other.save(first, version=5).versions == {"policy": 5}
        loaded = Counted(2, 2)
        assert other.load_into(loaded) == 5
        assert loaded.steps == 7
        assert other.load().digest() == first.digest()


def test_signal_handlers_may_save(tmp_path):
    with _store(tmp_path, 1.0):
        pass
    store, outcomes = weightsync.Store(tmp_path), []

    def handler(*_):
        try:
            outcomes.append(store.save(Net(9.0)))
        except weightsync.LifecycleError as error:
            outcomes.append(error)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        native, sent = store._native, []

        class Interrupted:
            """The store in the middle of its claim, when a signal comes."""

            def writer(self, options):
                if not sent:
                    sent.append(True)
                    os.kill(os.getpid(), signal.SIGUSR1)
                return native.writer(options)

        store._native = Interrupted()
        saved = store.save(Net(2.0))
        store._native = native
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert saved.versions == {"policy": 2}
    assert isinstance(outcomes[0], weightsync.LifecycleError)
    assert outcomes[1].versions == {"policy": 3}
    store.close()


def test_a_store_that_a_sender_keeps_in_saves_nothing_else(tmp_path):
    store, trainer = _store(tmp_path, 1.0), Net(2.0)
    with weightsync.Sender(trainer, keep=store) as sender:
        sender.connect(0)
        assert sender.saves[-1].wait(LONG) == "durable"
        with pytest.raises(weightsync.LifecycleError, match="a sender keeps"):
            store.save(Net(3.0))
    # Afterwards it is a store like any other.
    assert store.save(Net(3.0)).versions == {"policy": 3}
    store.close()
    with weightsync.Sender(trainer, keep=store) as sender:
        with pytest.raises(weightsync.SendError, match="has v3 already"):
            sender.connect(0, version=2)


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_dropped_senders_finish_their_last_save(tmp_path, in_a_cycle):
    store = weightsync.Store(tmp_path)
    sender, cycle = weightsync.Sender(Net(1.0), keep=store), []
    sender.connect(0)
    assert sender.saves[-1].wait(LONG) == "durable"
    locked, drops, refused = threading.Event(), threading.Event(), []

    def hold():
        """Holds the store's lock until the sender is being dropped, so that its save has to wait."""
        with open(tmp_path / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            locked.set()
            drops.wait()
            # If dropping held the interpreter, this would not go on, and the save would give up.
            time.sleep(0.2)
            # This would take the store over, and the last save would fail.
            with pytest.raises(weightsync.LifecycleError, match="a sender keeps"):
                store.save(Net(3.0))
            refused.append(True)

    thread = threading.Thread(target=hold)
    thread.start()
    locked.wait()
    sender.send()
    if in_a_cycle:
        cycle += [sender, cycle]
    drops.set()
    del sender, cycle
    gc.collect()
    thread.join()
    assert refused
    assert store.load().version == 2
    assert store.save(Net(3.0)).versions == {"policy": 3}
    store.close()


@pytest.mark.parametrize("call", ["save", "load", "pull"])
def test_ctrl_c_ends_a_call_between_two_pieces(tmp_path, call):
    with weightsync.Store(tmp_path / "store", deltas=False) as store:
        weights = {"w": torch.arange(1 << 25, dtype=torch.float32)}
        store.save(weights)
    program = (
        "import signal, sys, torch, weightsync\n"
        "from pathlib import Path\n"
        "root = Path(sys.argv[1])\n"
        "store = weightsync.Store(root / 'store', deltas=False)\n"
        "weights = {'w': torch.zeros(1 << 25)}\n"
        "calls = {'save': lambda: store.save(weights), 'load': store.load,\n"
        "         'pull': lambda: store.pull(root / 'out')}\n"
        "signal.signal(signal.SIGALRM, signal.default_int_handler)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.02)\n"
        "while True:\n"
        "    calls[sys.argv[2]]()\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), call], stderr=subprocess.PIPE, timeout=LONG
    )
    assert b"KeyboardInterrupt" in ran.stderr, ran.stderr
    # What was not finished is not there.
    store = weightsync.Store(tmp_path / "store")
    assert store.damage() == []
    assert store.load()["w"][0] == 0
    assert not [path for path in tmp_path.iterdir() if "unfinished" in path.name]


class Tied(torch.nn.Module):
    """A model with one tensor under two names."""

    def __init__(self, value=0.0, device=None):
        super().__init__()
        # Large enough to be bound.
        self.embed = torch.nn.Linear(256, 256, bias=False, device=device)
        self.head = torch.nn.Linear(256, 256, bias=False, device=device)
        self.head.weight = self.embed.weight
        if device is None:
            torch.nn.init.constant_(self.embed.weight, value)


def _checkpoint(value):
    """As transformers writes one: the tensor under one of its names."""
    return {"embed.weight": torch.full((256, 256), value)}


def test_tied_names_that_are_not_sent_follow(tmp_path):
    with weightsync.Store(tmp_path) as store:
        store.save(_checkpoint(1.0))
        for model in [Tied(), Tied(device="meta")]:
            store.load_into(model)
            assert model.head.weight is model.embed.weight
            assert model.head.weight.unique().tolist() == [1.0]
        with pytest.raises(weightsync.WrongWeightsError, match=r"other\.weight"):
            store.load_into(torch.nn.ModuleDict({"other": torch.nn.Linear(3, 3, bias=False)}))


@pytest.mark.parametrize("mode", MODES)
def test_names_that_are_untied_are_noticed(mode):
    weights, model = _checkpoint(1.0), Tied()
    sender = weightsync.Sender(weights)
    receiver = weightsync.ModelReceiver(sender.init_info, 0, model=model, mode=mode)
    with all_ended(sender, receiver):
        meet(sender, receiver)
        assert model.head.weight.unique().tolist() == [1.0]
        weights["embed.weight"].fill_(2.0)
        pass_on(sender, receiver)
        assert model.head.weight.unique().tolist() == [2.0]
        model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())
        with pytest.raises(weightsync.WrongWeightsError, match=r"head\.weight"):
            pass_on(sender, receiver)


def test_worker_that_comes_after_the_end_is_told_so(tmp_path):
    sender = weightsync.Sender({"w": torch.ones(3)}, scheme=f"store:{tmp_path},temporary")
    # A temporary store is there until its last worker has left.
    receiver = weightsync.Receiver(sender.init_info)
    with all_ended(sender, receiver):
        meet(sender, receiver)
        sender.shutdown()
        late = weightsync.Receiver(sender.init_info, 1)
        with pytest.raises(weightsync.SenderClosedError):
            late.connect(timeout=LONG)
