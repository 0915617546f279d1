"""Trinity's synchronizer by its own method names: in one program, and as a Ray actor."""

import asyncio
import enum
import inspect
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import weightsync
from weightsync.trinity import RunningStatus, Synchronizer, settings_of

RUNNING, REQUIRE, STOPPED = RunningStatus.RUNNING, RunningStatus.REQUIRE_SYNC, RunningStatus.STOPPED
STEPS = 8


class Theirs(enum.Enum):
    """As Trinity's own enum."""

    RUNNING = "running"
    STOPPED = "stopped"


def config(folder, method="memory", timeout=60.0, namespace="", **others):
    return SimpleNamespace(
        mode="both",
        ray_namespace=namespace,
        checkpoint_job_dir=str(folder),
        synchronizer=SimpleNamespace(
            sync_method=method, sync_timeout=timeout, explorer_world_size=1, group_name="weights"
        ),
        trainer=SimpleNamespace(name="trainer", trainer_type=others.get("kind", "verl")),
        explorer=SimpleNamespace(name="explorer"),
    )


def state(value, size=64):
    module = torch.nn.Linear(size, size)
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, value)
    return module.state_dict()


def value_of(tensors):
    """The value of all elements, as a model that has loaded them has it."""
    module = torch.nn.Linear(64, 64)
    module.load_state_dict({name: tensor.clone() for name, tensor in dict(tensors).items()})
    values = {float(value) for one in module.parameters() for value in one.detach().aminmax()}
    assert len(values) == 1, values
    return values.pop()


def write_checkpoint(folder, step, full=False):
    """As Trinity's trainer: the weights, and then the pointer."""
    actor = Path(folder, f"global_step_{step}", "actor")
    actor.mkdir(parents=True)
    torch.save(state(float(step)), actor / "model.pt")
    if full:
        (actor.parent / ".full_checkpoint").touch()
    Path(folder, "latest_state_dict_iteration.txt").write_text(str(step))


def train(call, style, publish, sample):
    """Trinity's trainer: it waits for samples, makes a step, and publishes if that is due."""
    call("set_trainer_status", RUNNING)
    synced = 0
    for step in range(1, STEPS + 1):
        while not sample():
            synced = serve(call, style, publish, step - 1, synced)
        if style == "fixed" and step % 2 == 0:
            publish(step)
        else:
            synced = serve(call, style, publish, step, synced)
    call("set_trainer_status", STOPPED)


def serve(call, style, publish, step, synced):
    if style == "explorer_driven":
        if synced == step:
            call("notify_no_new_model_state_dict")
        elif call("explorer_requires_sync"):
            publish(step)
            return step
    return synced


def explore(call, load, made=lambda: None, pause=0.0):
    """Trinity's explorer: it asks for a version every second step. Returns labels, and what they are of."""
    own, loaded = -1, []
    call("set_explorer_status", RUNNING)
    for step in range(STEPS + 1):
        if step % 2 == 0:
            newest = call("wait_new_model_state_dict", own)
            # Version 0 is the model that the explorer began with.
            if newest > own and (own, newest) != (-1, 0):
                loaded.append((newest, load(newest)))
            own = max(own, newest)
        time.sleep(pause)
        made()
    call("set_explorer_status", STOPPED, RUNNING)
    return loaded


def check(loaded):
    labels = [label for label, _ in loaded]
    assert labels == sorted(set(labels))
    assert all(label == value for label, value in loaded), loaded


class Program:
    """A synchronizer in an event loop of its own, for threads."""

    def __init__(self, of):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.synchronizer = Synchronizer(of)

    def begin(self, name, *arguments):
        async def made():
            result = getattr(self.synchronizer, name)(*arguments)
            if inspect.isawaitable(result):
                return await result
            return dict(result) if name.endswith("iterator") else result

        return asyncio.run_coroutine_threadsafe(made(), self.loop)

    def __call__(self, name, *arguments):
        return self.begin(name, *arguments).result()

    def until(self, condition):
        """Returns when the synchronizer's own state is so."""
        while not condition(self.synchronizer):
            self("explorer_requires_sync")

    def end(self):
        self("shutdown")
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def program(tmp_path):
    """Makes programs, whose checkpoints lie in the test's directory."""
    made = []

    def make(*arguments, **settings):
        made.append(Program(config(tmp_path, *arguments, **settings)))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.mark.parametrize("style", ["fixed", "explorer_driven"])
@pytest.mark.parametrize("method", ["memory", "checkpoint"])
def test_slow_and_fast_explorers_load_what_is_told(program, tmp_path, method, style):
    call, samples, results = program(method), threading.Semaphore(0), {}

    def publish(step):
        if method == "memory":
            call("set_model_state_dict", state(float(step)), step)
        else:
            write_checkpoint(tmp_path, step)

    def load(version):
        if method == "memory":
            return value_of(call("get_model_state_dict_iterator", version))
        return value_of(torch.load(tmp_path / f"global_step_{version}/actor/model.pt"))

    def run(name, pause):
        results[name] = explore(call, load, samples.release, pause)

    threads = [threading.Thread(target=run, args=one) for one in (("slow", 0.01), ("fast", 0.0))]
    threads.append(
        threading.Thread(target=train, args=(call, style, publish, lambda: samples.acquire(timeout=0.01)))
    )
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for loaded in results.values():
        check(loaded)
    assert len(results) == 2
    counts = call.synchronizer.explorer_status_counts
    assert (counts[RUNNING], counts[REQUIRE], counts[STOPPED]) == (0, 0, 2)


@pytest.mark.parametrize(
    ("own", "newest", "loads"), [(-1, 0, False), (-1, 3, True), (2, 4, True), (3, 3, False)]
)
def test_pull_latest_returns_the_newest_version(program, own, newest, loads):
    call = program(timeout=0.01)
    call("set_trainer_status", RUNNING)
    call("set_explorer_status", RUNNING)
    if newest:
        call("set_model_state_dict", state(float(newest)), newest)
    told = call("wait_new_model_state_dict", own)
    assert told == newest
    assert (told > own and (own != -1 or told > 0)) == loads
    assert call.synchronizer.explorer_status_counts[RUNNING] == 1


def test_waits_end_when_there_is_nothing_new(program):
    call = program()
    call("set_trainer_status", Theirs.RUNNING)
    call("set_explorer_status", Theirs.RUNNING)
    for end in (("notify_no_new_model_state_dict",), ("set_trainer_status", "stopped")):
        waiting = call.begin("wait_new_model_state_dict", 0)
        call.until(lambda one: one.explorer_requires_sync())
        call(*end)
        assert waiting.result() == 0
    assert call("trainer_requires_weight_sync") is None
    assert call("wait_new_model_state_dict", 0) == 0


def test_explorer_loads_what_it_was_told_of(program):
    call = program()
    call("set_trainer_status", RUNNING)
    call("set_explorer_status", RUNNING)
    call("set_model_state_dict", state(1.0), 1)
    assert call("wait_new_model_state_dict", 0) == 1
    for step in (2, 3, 4):
        call("set_model_state_dict", state(float(step)), step)
    assert value_of(call("get_model_state_dict_iterator")) == 1.0
    weights, version = call("get_model_state_dict")
    assert (value_of(weights), version) == (4.0, 4)
    with pytest.raises(weightsync.ModelError, match="v2 is not kept; the newest is v4"):
        call("get_model_state_dict", 2)
    assert call("wait_new_model_state_dict", 1) == 4
    assert value_of(call("get_model_state_dict_iterator")) == 4.0


def test_synchronizer_keeps_weights_of_its_own(program):
    call, weights = program(), state(1.0)
    assert call("get_model_state_dict") == (None, 0)
    assert call("get_model_state_dict_iterator") == {}
    call("set_model_state_dict", weights, 7)
    weights["weight"].fill_(9.0)
    assert value_of(call("get_model_state_dict")[0]) == 1.0
    assert call("get_state_dict_meta") == [("weight", "float32", (64, 64)), ("bias", "float32", (64,))]
    with pytest.raises(weightsync.UnsupportedError, match="head._extra_state"):
        call("set_model_state_dict", {"head._extra_state": {}}, 8)
    assert call("get_latest_model_version") == 7
    # A trainer that begins again at an earlier step, and with other shapes.
    call("set_model_state_dict", state(2.0, size=32), 3)
    assert call("get_state_dict_meta")[1] == ("bias", "float32", (32,))
    assert call("get_latest_model_version") == 3


def test_weights_stay_out_of_what_ray_pickles(tmp_path):
    # As in the actor, which knows what asked for it.
    synchronizer = Synchronizer(config(tmp_path), module_ref="a process")
    weights = {"weight": torch.full((1024, 1024), 5.0)}
    try:
        asyncio.run(synchronizer.set_model_state_dict(weights, 5))
        answer = synchronizer.get_model_state_dict()
        (item,) = synchronizer.get_model_state_dict_iterator()
        texts = [pickle.dumps(answer), pickle.dumps(item)]
        assert max(map(len, texts)) < 4096
        (loaded, version), (name, tensor) = map(pickle.loads, texts)
        assert (version, name) == (5, "weight")
        assert torch.equal(loaded["weight"], weights["weight"])
        assert torch.equal(tensor, weights["weight"])
    finally:
        synchronizer.shutdown()


def test_nccl_trainer_meets_every_explorer(program):
    call = program("nccl")
    call("set_trainer_status", RUNNING)
    for _ in range(2):
        call("set_explorer_status", RUNNING)
    waiting = [call.begin("ready_to_nccl_sync", "trainer", 4)]
    call.until(lambda one: one.trainer_requires_weight_sync())
    waiting.append(call.begin("ready_to_nccl_sync", "explorer", 2))
    call.until(lambda one: one.explorer_requires_sync())
    assert not any(one.done() for one in waiting)
    waiting.append(call.begin("ready_to_nccl_sync", "explorer", 2))
    assert [one.result() for one in waiting] == [4, 4, 4]
    # It has not arrived yet: the explorer says so by coming again with it.
    assert call("get_latest_model_version") == 2
    waiting = [call.begin("ready_to_nccl_sync", "explorer", 4) for _ in range(2)]
    assert call("ready_to_nccl_sync", "trainer", 6) == 6
    assert [one.result() for one in waiting] == [6, 6]
    assert call("get_latest_model_version") == 4


def test_nccl_sync_fails_as_a_value_and_is_retried(program):
    call = program("nccl", timeout=0.05)
    assert call("ready_to_nccl_sync", "trainer", 1) is None
    call("set_trainer_status", RUNNING)
    call("set_explorer_status", RUNNING)
    assert call("ready_to_nccl_sync", "trainer", 1) is None
    assert call("ready_to_nccl_sync", "explorer", 0) is None
    assert call("trainer_requires_weight_sync") is False
    assert call.synchronizer.explorer_status_counts == {RUNNING: 1}
    call.synchronizer.config.synchronizer.sync_timeout = 60.0
    trainer = call.begin("ready_to_nccl_sync", "trainer", 2)
    assert (call("ready_to_nccl_sync", "explorer", 0), trainer.result()) == (2, 2)
    trainer = call.begin("ready_to_nccl_sync", "trainer", 3)
    call("set_explorer_status", STOPPED, RUNNING)
    assert trainer.result() is None


def test_bad_pointer_file_is_named(program, tmp_path, caplog):
    call, pointer = program("checkpoint"), tmp_path / "latest_state_dict_iteration.txt"
    call("set_trainer_status", RUNNING)
    call("set_explorer_status", RUNNING)
    for text, words in (("", ""), ("ten", "expected the number of a step, got 'ten'"), ("3", "names step 3")):
        pointer.write_text(text)
        assert call("get_latest_model_version") == 0
        assert words in caplog.text
        assert not words or str(pointer) in caplog.text
    named = len(caplog.records)
    assert call("get_latest_model_version") == 0
    assert len(caplog.records) == named
    waiting = call.begin("wait_new_model_state_dict", -1)
    assert waiting.result() == 0
    waiting = call.begin("wait_new_model_state_dict", 0)
    call.until(lambda one: one.explorer_requires_sync())
    write_checkpoint(tmp_path, 3)
    assert waiting.result() == 3


def test_checkpoint_stays_while_it_is_read(program, tmp_path):
    call = program("checkpoint")
    call("set_trainer_status", RUNNING)
    call("set_explorer_status", RUNNING)

    def there():
        return sorted(path.name for path in tmp_path.glob("global_step_*"))

    def settles(expected):
        while there() != expected:
            time.sleep(0.001)

    write_checkpoint(tmp_path, 2)
    assert call("wait_new_model_state_dict", 0) == 2
    write_checkpoint(tmp_path, 4)
    assert call("get_latest_model_version") == 4
    write_checkpoint(tmp_path, 6, full=True)
    assert call("get_latest_model_version") == 6
    # Nobody was told of step 4. The explorer is loading step 2.
    settles(["global_step_2", "global_step_6"])
    assert call("get_latest_model_path") == str(tmp_path / "global_step_2/actor")
    assert call("wait_new_model_state_dict", 2) == 6
    settles(["global_step_6"])
    assert call("get_latest_model_path", True) == str(tmp_path / "global_step_6/actor/huggingface")
    write_checkpoint(tmp_path, 8)
    assert call("wait_new_model_state_dict", 6) == 8
    # Step 6 is a full checkpoint, which the trainer goes on from.
    settles(["global_step_6", "global_step_8"])


def test_tinker_weights_are_a_path(program, tmp_path):
    call = program("checkpoint", kind="tinker")
    folder = tmp_path / "global_step_2"
    folder.mkdir()
    (folder / "remote_sampler_path.txt").write_text("tinker://weights/2\n")
    (tmp_path / "latest_state_dict_iteration.txt").write_text("2")
    assert call("get_latest_model_version") == 2
    assert call("get_model_state_dict") == ("tinker://weights/2", 2)
    with pytest.raises(weightsync.UnsupportedError, match="a path"):
        call("get_model_state_dict_iterator")


# With Ray.


class Party:
    """A process as those of Trinity's trainer and explorers."""

    def join(self, of):
        self.folder, self.namespace = of.checkpoint_job_dir, of.ray_namespace
        self.synchronizer = Synchronizer.get_actor(of)

    def call(self, name, *arguments):
        import ray

        return ray.get(getattr(self.synchronizer, name).remote(*arguments))

    def iterate(self):
        import ray

        # As Trinity's engines, which have its name alone.
        synchronizer = Synchronizer.get_actor(namespace=self.namespace)
        return dict(ray.get(item) for item in synchronizer.get_model_state_dict_iterator.remote())

    def pid(self):
        return os.getpid()

    def train(self, method, style):
        def publish(step):
            if method == "memory":
                self.call("set_model_state_dict", state(float(step)), step)
            else:
                write_checkpoint(self.folder, step)

        train(self.call, style, publish, lambda: True)

    def explore(self, method, pause):
        def load(version):
            if method == "memory":
                return value_of(self.iterate())
            return value_of(torch.load(Path(self.folder, f"global_step_{version}/actor/model.pt")))

        return explore(self.call, load, pause=pause)


class Member(Party):
    """A party that is in a process group, as Trinity's are with the method nccl; here it is gloo's."""

    def __init__(self, of, rank):
        self.rank = rank
        self.join(of)
        self.call(*((("set_trainer_status", RUNNING), ("set_explorer_status", RUNNING))[rank]))

    def get_weight_sync_info(self):
        return "an address", 7, "names"

    def setup_weight_sync_group(self, *arguments):
        assert arguments == ("an address", 7, 2, "weights", 60.0)
        where = f"file://{self.folder}/group"
        torch.distributed.init_process_group("gloo", init_method=where, rank=self.rank, world_size=2)

    def set_state_dict_meta(self, meta):
        assert meta == "names"

    def teardown_weight_sync_group(self):
        torch.distributed.destroy_process_group()

    def sync(self, step):
        version = self.call("ready_to_nccl_sync", ("trainer", "explorer")[self.rank], step)
        weights = state(float(step))
        for tensor in weights.values():
            torch.distributed.broadcast(tensor, 0)
        return version, value_of(weights)

    def train(self, style):
        synced = []
        for step in range(1, STEPS + 1):
            while style == "explorer_driven" and not self.call("explorer_requires_sync"):
                time.sleep(0.001)
            if style == "explorer_driven" or step % 2 == 0:
                synced.append(self.sync(step))
            if len(synced) == STEPS // 2:
                break
        return synced

    def explore(self):
        synced = [(0, 0.0)]
        for step in range(1, STEPS + 1):
            if step % 2 == 0:
                synced.append(self.sync(synced[-1][0]))
        return synced[1:]


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray")
    # Sockets lie below it, whose paths may not be long.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # Its processes import this file.
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        ray.init(
            num_cpus=2,
            object_store_memory=80 << 20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=folder,
        )
        yield ray
        ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def crew(cluster):
    """A trainer and two explorers, which join one synchronizer after the other."""
    made = [cluster.remote(Party).options(num_cpus=0).remote() for _ in range(3)]
    yield made
    for one in made:
        cluster.kill(one)


@pytest.fixture
def started(cluster):
    """Starts a process of its own for a party."""
    made = []

    def start(of, kind=Party, *arguments, **options):
        one = cluster.remote(kind).options(num_cpus=0, **options).remote(*arguments)
        made.append(one)
        if kind is Party:
            cluster.get(one.join.remote(of))
        return one

    yield start
    for one in made:
        cluster.kill(one)


def ended(ray, namespace):
    try:
        ray.get_actor("synchronizer", namespace=namespace)
    except ValueError:
        return True
    return False


def kill(ray, party):
    """Ends a process as the system does where memory is short."""
    os.kill(ray.get(party.pid.remote()), signal.SIGKILL)


@pytest.mark.parametrize("style", ["fixed", "explorer_driven"])
@pytest.mark.parametrize("method", ["memory", "checkpoint"])
def test_ray_explorers_load_what_they_are_told(cluster, crew, tmp_path, method, style):
    of = config(tmp_path, method, namespace=f"{method} {style}")
    cluster.get([party.join.remote(of) for party in crew])
    trainer, *explorers = crew
    training = trainer.train.remote(method, style)
    exploring = [
        party.explore.remote(method, pause) for party, pause in zip(explorers, (0.02, 0.0), strict=True)
    ]
    for loaded in cluster.get(exploring):
        check(loaded)
    cluster.get(training)


@pytest.mark.parametrize("style", ["fixed", "explorer_driven"])
def test_ray_trainer_and_explorer_meet_for_nccl(cluster, started, tmp_path, style):
    of = config(tmp_path, "nccl", namespace=f"nccl {style}")
    both = [
        started(of, Member, of, rank, name=name, namespace=of.ray_namespace)
        for rank, name in enumerate(("trainer", "explorer"))
    ]
    synchronizer = cluster.get(both[0].pid.remote()) and Synchronizer.get_actor(
        namespace=of.ray_namespace
    )
    cluster.get(both[1].pid.remote())
    cluster.get(synchronizer.coordinate_weight_sync_setup.remote())
    trained, explored = cluster.get([both[0].train.remote(style), both[1].explore.remote()])
    assert trained == explored
    assert len(explored) == STEPS // 2
    check(explored)
    cluster.get(synchronizer.coordinate_weight_sync_teardown.remote())


def test_synchronizer_outlives_the_trainer(cluster, started, tmp_path):
    of = config(tmp_path, namespace="outlives")
    trainer, first, second = (started(of) for _ in range(3))
    cluster.get(trainer.train.remote("memory", "fixed"))
    kill(cluster, trainer)
    # Its weights are still there.
    assert cluster.get(first.explore.remote("memory", 0.0)) == [(8, 8.0)]
    kill(cluster, first)
    assert cluster.get(second.explore.remote("memory", 0.0)) == [(8, 8.0)]
    assert not ended(cluster, "outlives")
    kill(cluster, second)
    while not ended(cluster, "outlives"):
        time.sleep(0.01)


def test_killed_explorer_does_not_block_the_trainer(cluster, started, tmp_path):
    of = config(tmp_path, "nccl", timeout=3600.0, namespace="killed explorer")
    trainer, explorer, killed = (started(of) for _ in range(3))
    cluster.get(trainer.call.remote("set_trainer_status", RUNNING))
    for one in (explorer, killed):
        cluster.get(one.call.remote("set_explorer_status", RUNNING))
    meeting = [
        trainer.call.remote("ready_to_nccl_sync", "trainer", 2),
        explorer.call.remote("ready_to_nccl_sync", "explorer", 0),
    ]
    kill(cluster, killed)
    assert cluster.get(meeting) == [2, 2]
    # Without any explorer it does not wait at all, and none requires anything.
    waiting = trainer.call.remote("ready_to_nccl_sync", "trainer", 4)
    kill(cluster, explorer)
    assert cluster.get(waiting) is None
    assert not cluster.get(trainer.call.remote("explorer_requires_sync"))


def test_killed_trainer_does_not_block_explorers(cluster, started, tmp_path):
    of = config(tmp_path, timeout=3600.0, namespace="killed trainer")
    trainer, explorer = started(of), started(of)
    cluster.get(trainer.call.remote("set_trainer_status", RUNNING))
    cluster.get(explorer.call.remote("set_explorer_status", RUNNING))
    waiting = explorer.call.remote("wait_new_model_state_dict", 0)
    kill(cluster, trainer)
    assert cluster.get(waiting) == 0


# Settings.


def test_settings_of_trinity_become_arguments(tmp_path):
    read = settings_of(
        {
            "sync_method": "MEMORY",
            "sync_style": "Fixed",
            "sync_interval": 10,
            "sync_offset": 5,
            "trainer_sync_interval": 4,
            "explorer_sync_interval": None,
            "sync_timeout": 1200,
            "group_name": "weights",
        }
    )
    assert read.timeout == 1200.0
    with weightsync.Synchronizer.local(**read.local) as sync:
        with sync.trainer(torch.nn.Linear(2, 2), **read.trainer) as trainer:
            assert trainer.method == "memory"
            assert [bool(trainer.need_sync(step)) for step in (3, 4)] == [False, True]
            with sync.explorer("e0", torch.nn.Linear(2, 2), **read.explorer) as explorer:
                assert explorer.sync(0)
                assert trainer.sync(4)
                assert [bool(explorer.need_sync(step)) for step in (14, 15)] == [False, True]


@pytest.mark.parametrize(
    ("block", "method", "style"),
    [
        ({}, "nccl", "fixed"),
        ({"sync_method": "online", "sync_style": "dynamic_by_explorer"}, "nccl", "explorer_driven"),
        ({"sync_method": "OFFLINE", "sync_style": "DYNAMIC_BY_TRAINER"}, "checkpoint", "trainer_driven"),
        ({"sync_method": "memory", "sync_style": "fully_async"}, "memory", "fully_async"),
    ],
)
def test_aliases_of_trinity_are_known(block, method, style):
    read = settings_of({"synchronizer": block})
    assert (read.local["method"], read.local["style"], read.timeout) == (method, style, 3600.0)
    weightsync.Synchronizer.local(**read.local).shutdown()


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"sync_intervall": 1}, "sync_intervall is no setting; did you mean sync_interval?"),
        ({"sync_method": "ncc"}, "'ncc' is unknown; did you mean nccl?"),
        ({"sync_style": "x"}, "there are fixed, explorer_driven"),
        ({"sync_interval": 0}, "sync_interval: expected 1 or more, got 0"),
        ({"sync_offset": "2"}, "sync_offset: expected 0 or more, got '2'"),
        ({"synchronizer": 3}, "expected keys and values, got 3"),
    ],
)
def test_wrong_setting_of_trinity_is_named(block, words):
    with pytest.raises(weightsync.SettingError) as raised:
        settings_of(block)
    assert words in str(raised.value)


def test_yaml_file_of_trinity_is_read(tmp_path, monkeypatch):
    pytest.importorskip("yaml")
    path = tmp_path / "run.yaml"
    path.write_text("project: x\nsynchronizer:\n  sync_method: 'memory'\n  sync_interval: 3\n")
    assert settings_of(path).trainer == {"method": "memory", "style": "fixed", "offset": 0, "interval": 3}
    path.write_text("synchronizer: [")
    with pytest.raises(weightsync.SettingError, match=r"run\.yaml: (.|\n)*line 1"):
        settings_of(path)
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(weightsync.UnsupportedError, match="pip install pyyaml"):
        settings_of(str(path))
