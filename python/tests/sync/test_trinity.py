"""Trinity's synchronizer by its own method names, in one program."""

import asyncio
import enum
import inspect
import os
import pickle
import threading
import time
from pathlib import Path

import pytest
import torch
from trinity_world import (
    REQUIRE,
    RUNNING,
    STOPPED,
    check,
    config,
    explore,
    state,
    train,
    value_of,
    write_checkpoint,
)

import weightsync
from weightsync.trinity import Synchronizer
from weightsync.trinity._weights import Outlet


class Theirs(enum.Enum):
    """As Trinity's own enum."""

    RUNNING = "running"
    STOPPED = "stopped"


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

    trainer = threading.Thread(
        target=train, args=(call, style, publish, lambda: samples.acquire(timeout=0.01))
    )
    trainer.start()
    call.until(lambda one: one.trainer_requires_weight_sync() is not None)
    explorers = [threading.Thread(target=run, args=one) for one in (("slow", 0.01), ("fast", 0.0))]
    for thread in explorers:
        thread.start()
    for thread in (trainer, *explorers):
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


def test_states_compare_with_trinitys_own(program):
    call = program()
    assert call.synchronizer.trainer_status == Theirs.STOPPED
    call("set_trainer_status", Theirs.RUNNING)
    call("set_explorer_status", Theirs.RUNNING)
    assert call.synchronizer.trainer_status == Theirs.RUNNING == RUNNING != Theirs.STOPPED
    assert call.synchronizer.trainer_status in {Theirs.RUNNING}
    assert call.synchronizer.explorer_status_counts[Theirs.RUNNING] == 1


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
    for name, value in {"head._extra_state": {}, "steps": 3, "bias": None, "head": state(1.0)}.items():
        with pytest.raises(weightsync.UnsupportedError, match=f"^{name}, a .*: tensors alone"):
            call("set_model_state_dict", {**state(1.0), name: value}, 8)
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


def test_checkpoint_stays_where_somebody_added_to_it(program, tmp_path):
    call = program("checkpoint")
    write_checkpoint(tmp_path, 2)
    assert call("get_latest_model_version") == 2
    (tmp_path / "global_step_2/notes.txt").write_text("mine")
    write_checkpoint(tmp_path, 3)
    (tmp_path / "global_step_3/actor/optim_world_size_1_rank_0.pt").write_text("states")
    assert call("get_latest_model_version") == 3
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    (tmp_path / "global_step_4").symlink_to(outside)
    write_checkpoint(outside, 4)
    (outside / "global_step_4/actor").rename(outside / "actor")
    (tmp_path / "latest_state_dict_iteration.txt").write_text("4")
    assert call("get_latest_model_version") == 4
    for step in [6, 8]:
        write_checkpoint(tmp_path, step)
        assert call("get_latest_model_version") == step
    while (tmp_path / "global_step_6").exists():
        time.sleep(0.001)
    assert (tmp_path / "global_step_2/notes.txt").read_text() == "mine"
    assert (tmp_path / "global_step_2/actor/model.pt").is_file()
    assert (tmp_path / "global_step_3/actor/model.pt").is_file()
    assert (outside / "actor/model.pt").is_file()


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


@pytest.mark.parametrize("method", ["memory", "checkpoint"])
def test_trainer_that_goes_back_does_not_block(program, tmp_path, method):
    call = program(method)
    call("set_trainer_status", RUNNING)
    call("set_explorer_status", RUNNING)

    def publish(step):
        if method == "memory":
            call("set_model_state_dict", state(float(step)), step)
        else:
            write_checkpoint(tmp_path, step)

    publish(7)
    assert call("wait_new_model_state_dict", 0) == 7
    waiting = call.begin("wait_new_model_state_dict", 7)
    call.until(lambda one: one.explorer_requires_sync())
    # It was started again from an earlier checkpoint.
    publish(5)
    assert waiting.result() == 5
    publish(8)
    assert call("wait_new_model_state_dict", 7) == 8


@pytest.mark.parametrize("old", [RUNNING, REQUIRE])
def test_explorer_that_stops_while_it_waits_is_one(program, old):
    call = program()
    call("set_trainer_status", RUNNING)
    call("set_explorer_status", RUNNING)
    waiting = call.begin("wait_new_model_state_dict", 0)
    call.until(lambda one: one.explorer_requires_sync())
    call("set_explorer_status", STOPPED, old)
    call("set_trainer_status", STOPPED)
    waiting.result()
    assert +call.synchronizer.explorer_status_counts == {STOPPED: 1}


def test_kept_versions_take_the_memory_of_two(program):
    def segments():
        files = [os.stat(path) for path in Path("/proc/self/fd").iterdir() if _is_segment(path)]
        return {file.st_ino: file.st_blocks for file in files}

    # Those of other tests may not have been freed yet.
    others = segments()
    call, size = program(), 512
    for step in range(1, 11):
        call("set_model_state_dict", state(float(step), size), step)
    # The newest and the one before; the next has room.
    blocks = {file: count for file, count in segments().items() if file not in others}
    assert blocks
    assert 512 * sum(blocks.values()) < 5 * 4 * size * (size + 1)


def test_old_version_goes_out_again_once():
    outlet = Outlet(history=1)
    try:
        first, *_ = [outlet.send(state(float(step)), step) for step in (1, 2, 3)]
        again = outlet.place(first)
        assert again != first.place and again.version == 1
        assert outlet.place(first) == again
        for step in (4, 5):
            outlet.send(state(float(step)), step)
        assert outlet.place(first) not in (again, first.place)
    finally:
        outlet.close()


def _is_segment(path):
    try:
        return "memfd:weightsync" in os.readlink(path)
    except OSError:
        return False


def test_state_dict_without_names_is_refused(program):
    with pytest.raises(weightsync.WrongTypeError, match="by name"):
        program()("set_model_state_dict", {0: torch.zeros(2)}, 1)
