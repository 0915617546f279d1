"""What a trainer makes of an engine, with an engine whose loads are written down and no more."""

from __future__ import annotations

import json
import pickle
import signal
import threading
from types import SimpleNamespace

import pytest
import torch
from patience import patience

import weightsync
from weightsync.engines import EngineCallError, EngineDiedError, Trainer, _restart
from weightsync.engines._member import Member
from weightsync.engines._request import WorkerRequest
from weightsync.engines._worker import EngineWorker, Place, UpdateError
from weightsync.errors import DeadlineError, LifecycleError, OperatingSystemError, SettingError
from weightsync.vllm._engines import VllmEngine

#: In bytes.
SIZE = 4 * 1000


class FakePlace(Place):
    """Loads go into the fake."""

    rank = 0

    def __init__(self, engine):
        self._engine = engine

    def checkpoint(self):
        return SimpleNamespace(compare=lambda what, sent: False)

    def load(self, tensors, version=None):
        engine = self._engine
        engine.loaded = None
        if engine.failures:
            engine.failures -= 1
            raise RuntimeError("the load failed midway")
        engine.loaded = dict(tensors)["w"][0].item()

    def load_first(self):
        self.load([("w", torch.zeros(1))])
        self._engine.loaded = "its checkpoint"

    def group(self):
        return None


class Fake(VllmEngine):
    """One worker, and what vLLM's engine does around it."""

    def __init__(self, name="fake"):
        super().__init__(name)
        self.worker = EngineWorker(FakePlace(self))
        self.paused, self.workers = False, 1
        # What the model has, and how many loads fail.
        self.loaded, self.failures = "its checkpoint", 0
        self.asked: list[str] = []
        # Calls that are refused, once each.
        self.refused: list[str] = []
        self.loop = None

    def version(self, timeout):
        return "0.32.0"

    def ranks(self, timeout):
        return self.workers

    def pause(self, mode, clear, timeout):
        self.paused = True
        self.asked.append("pause")

    def resume(self, timeout):
        self.paused = False
        assert isinstance(self.loaded, (float, str)), "it generates with half loaded weights"

    def is_paused(self, timeout):
        return self.paused

    def reset_cache(self, timeout):
        pass

    def sleep(self, level, timeout):
        self.paused = True

    def wake(self, tags, timeout):
        pass

    def call(self, name, timeout, **arguments):
        if name in self.refused:
            self.refused.remove(name)
            raise EngineCallError(f"{name} is refused")
        try:
            if name == "init_weight_transfer_engine":
                request = WorkerRequest(**arguments["init_info"])
                self.asked.append(request.do)
                self.worker.do(request)
            elif name == "update_weights":
                self.worker.update(**arguments["update_info"])
            elif name == "start_weight_update":
                self.worker.start()
            elif name == "finish_weight_update":
                self.worker.finish()
        except Exception as error:
            raise EngineCallError(f"{type(error).__name__}: {error}") from error

    def check_thread(self):
        if self.loop is not None:
            raise LifecycleError("in the event loop of the engine")


@pytest.fixture
def engine():
    made = Fake()
    yield made
    made.worker.leave()


@pytest.fixture
def sender():
    with weightsync.Sender(weights(1)) as made:
        yield made


def weights(value):
    return {"w": torch.full((1000,), float(value))}


def test_engine_has_each_version(engine, sender):
    trainer = Trainer(sender, [engine])
    for step in (1, 2):
        report = trainer.sync(step, weights=weights(step))
        assert report.all_synced, report
        assert (engine.loaded, engine.paused) == (step, False)
    # Where the sender does not know yet that a version is loaded, the trainer asks for it.
    asked = [one for one in engine.asked if one != "loaded"]
    assert asked == ["join", "pause", "over"] * 2


@pytest.mark.parametrize("acknowledged", [True, False])
def test_trainer_asks_what_the_sender_does_not_know(engine, sender, acknowledged, monkeypatch):
    monkeypatch.setattr(Member, "_has", lambda *given: acknowledged)
    trainer = Trainer(sender, [engine])
    assert trainer.sync(1, weights=weights(1)).all_synced
    engine.asked.clear()
    assert trainer.sync(2, weights=weights(2)).all_synced
    asked = ["join", "pause", "over"] if acknowledged else ["join", "pause", "loaded", "over"]
    assert engine.asked == asked


def test_acknowledged_version_is_loaded_again_or_not_served(engine, sender):
    trainer = Trainer(sender, [engine])
    assert trainer.sync(1, weights=weights(1)).all_synced
    trainer.sleep(level=2)
    # The load, and the one that would bring its weights back.
    engine.failures = 2
    (line,) = trainer.wake().engines
    assert (line.outcome, engine.paused) == ("asleep", True), line
    assert trainer.wake().all_synced
    assert (engine.loaded, engine.paused) == (1, False)


def test_engine_of_a_restarted_sender_has_its_lower_version(engine, tmp_path):
    with weightsync.Sender(weights(1), run_dir=tmp_path) as before:
        assert Trainer(before, [engine]).sync(7, weights=weights(7)).all_synced
    with weightsync.Sender(weights(1), run_dir=tmp_path) as after:
        trainer = Trainer(after, [engine])
        for step in (3, 4):
            report = trainer.sync(step, weights=weights(step))
            assert report.all_synced, report
            assert (engine.loaded, report.engines[0].version) == (step, step)


def test_engine_is_added_once(engine, sender):
    trainer = Trainer(sender, [engine])
    with pytest.raises(SettingError, match="is among the engines already"):
        trainer.add(engine)
    trainer.add("http://127.0.0.1:9")
    with pytest.raises(SettingError, match="http://127.0.0.1:9 is among the engines already"):
        trainer.add("http://127.0.0.1:9/")


def test_update_error_is_the_same_after_pickling():
    error = pickle.loads(pickle.dumps(UpdateError("it failed", "old")))
    assert (str(error), error.reason) == ("weightsync[old]: it failed", "it failed")


def test_replicas_are_refused_before_the_pause(engine, sender):
    engine.workers = 2
    (line,) = Trainer(sender, [engine]).sync().engines
    assert (line.outcome, line.pause) == ("kept old", None)
    assert "2 ranks of it do not agree" in line.reason
    assert "an engine of its own" in line.reason
    assert engine.asked == ["join"]


@pytest.mark.parametrize("lost", ["added again", "trainer restarted", "thought dead"])
def test_half_loaded_engine_is_held_for_every_trainer(engine, sender, lost, monkeypatch):
    trainer = Trainer(sender, [engine])
    assert trainer.sync(1, weights=weights(1)).all_synced
    # The load, the way back, and the restore that is tried after it.
    engine.failures = 3
    (line,) = trainer.sync(2, weights=weights(2)).engines
    assert (line.outcome, engine.loaded, engine.paused) == ("held", None, True)
    if lost == "added again":
        trainer.remove("fake")
        trainer.add(engine)
    elif lost == "trainer restarted":
        trainer = Trainer(sender, [engine], first_worker=1)
    else:
        with monkeypatch.context() as patch:
            patch.setattr(engine, "call", _dies)
            assert [line.outcome for line in trainer.refresh().engines] == ["dead"]
    # It cannot just go on with what it has.
    engine.refused = ["start_weight_update"]
    (line,) = trainer.refresh().engines
    assert (line.outcome, engine.loaded, engine.paused) == ("held", None, True), line
    assert "start_weight_update is refused" in line.reason
    report = trainer.refresh()
    assert report.all_synced, report
    assert (engine.loaded, engine.paused) == (2, False)


def _dies(*given, **more):
    raise EngineDiedError("connection reset")


def test_engine_paused_after_a_late_fetch_is_left(engine, sender, monkeypatch):
    trainer = Trainer(sender, [engine])
    assert trainer.sync(1, weights=weights(1)).all_synced
    monkeypatch.setattr(trainer, "_sender", Reporting(sender, 0))
    (line,) = trainer.sync(2, weights=weights(2)).engines
    assert (line.outcome, line.reason) == (
        "kept old",
        "not paused: worker 0 did not fetch it in time",
    )
    engine.paused = True
    assert [line.outcome for line in trainer.refresh().engines] == ["asleep"]
    assert (engine.loaded, engine.paused) == (1, True)


class Reporting:
    """A sender whose reports say what they are told to."""

    def __init__(self, sender, *late, delta=None):
        self._sender, self._delta = sender, delta
        self._lines = [SimpleNamespace(worker=worker, outcome="late") for worker in late]

    def __getattr__(self, name):
        return getattr(self._sender, name)

    def send(self, *given, **more):
        report = self._sender.send(*given, **more)
        return SimpleNamespace(
            version=report.version, workers=self._lines, bytes=SIZE, delta_bytes=self._delta
        )


def test_unwritable_info_file_leaves_the_engine_alone(engine, sender, monkeypatch):
    def write(*given):
        raise OperatingSystemError("the disk is full")

    monkeypatch.setattr(_restart, "write", write)
    trainer = Trainer(sender)
    trainer.add(engine, info_file="engine.json")
    (line,) = trainer.sync().engines
    assert (line.outcome, engine.asked) == ("kept old", ["join", "over"]), line
    engine.paused = True
    assert [line.outcome for line in trainer.refresh().engines] == ["asleep"]


def test_restart_with_other_ranks_takes_no_numbers(engine, sender, tmp_path, monkeypatch):
    trainer, file = Trainer(sender), tmp_path / "engine.json"
    trainer.add(engine, info_file=file)
    assert trainer.sync().all_synced
    monkeypatch.setenv(_restart.VARIABLE, str(file))
    told = json.loads(file.read_text())
    # The number after its own is another engine's.
    file.write_text(json.dumps({**told, "ranks": 2}))
    with pytest.raises(weightsync.LoadError, match="number of ranks is 1, and the file says 2"):
        _restart.begin(EngineWorker(FakePlace(engine)))
    assert [one.worker for one in sender.workers] == [0]
    # What a restarted engine does.
    file.write_text(json.dumps(told))
    engine.worker.leave()
    engine.worker = EngineWorker(FakePlace(engine))
    _restart.begin(engine.worker)
    assert trainer.sync().all_synced
    trainer.remove(engine.name)


def test_removed_engine_leaves_the_sender(engine, sender):
    trainer = Trainer(sender, [engine])
    assert trainer.sync(1, weights=weights(1)).all_synced
    assert len(sender.workers) == 1
    trainer.remove("fake")
    assert sender.workers == []
    assert engine.loaded == 1
    trainer.sync(2, weights=weights(2))
    trainer.add(engine)
    assert trainer.refresh().all_synced
    assert engine.loaded == 2
    engine.loop = True
    with pytest.raises(LifecycleError):
        trainer.remove("fake")


def test_engine_that_does_not_answer_can_be_removed(engine, sender, monkeypatch):
    trainer = Trainer(sender, [engine])
    assert trainer.sync().all_synced
    monkeypatch.setattr(engine, "call", _dies)
    trainer.remove("fake")
    assert trainer.engines == []


def test_numbers_of_missing_ranks_are_forgotten(engine, sender, monkeypatch):
    trainer = Trainer(sender, [engine])
    assert trainer.sync(1, weights=weights(1)).all_synced
    engine.worker.leave()
    with monkeypatch.context() as patch:
        patch.setattr(engine, "call", _dies)
        trainer.sync(2, weights=weights(2))
    forgotten = []
    monkeypatch.setattr(sender, "forget", forgotten.extend)
    engine.workers = 2
    trainer.sync(3, weights=weights(3))
    assert forgotten == [0]


def test_report_counts_all_bytes_of_a_new_engine(engine, sender, monkeypatch):
    trainer = Trainer(sender, [engine])
    assert [line.bytes for line in trainer.sync(1, weights=weights(1)).engines] == [SIZE]
    other = Fake("other")
    trainer.add(other)
    monkeypatch.setattr(trainer, "_sender", Reporting(sender, delta=7))
    try:
        for sizes in ([7, SIZE], [7, 7]):
            report = trainer.sync(weights=weights(2))
            assert report.all_synced, report
            assert [line.bytes for line in report.engines] == sizes
    finally:
        other.worker.leave()


def test_late_fetch_is_waited_for_before_the_pause(engine, sender, monkeypatch):
    trainer = Trainer(sender, [engine], timeout=30)
    assert trainer.sync(1, weights=weights(1)).all_synced
    background = engine.worker._background

    class Slow:
        """Of its background; what was fetched is seen at the third look."""

        looks = 0

        def __getattr__(self, name):
            return getattr(background, name)

        def staged(self):
            assert not engine.paused
            self.looks += 1
            return background.staged() if self.looks > 2 else {}

    engine.worker._background = slow = Slow()
    monkeypatch.setattr(trainer, "_sender", Reporting(sender, 0))
    assert [line.outcome for line in trainer.sync(2, weights=weights(2)).engines] == ["kept old"]
    report = trainer.refresh()
    assert (report.all_synced, slow.looks, engine.loaded) == (True, 3, 2), report


def test_version_that_does_not_come_pauses_nothing(engine, sender, monkeypatch):
    trainer = Trainer(sender, [engine], timeout=0.5)
    assert trainer.sync(1, weights=weights(1)).all_synced
    sender.send(weights(2), wait="staged")
    monkeypatch.setattr(engine.worker, "_here", lambda: 1)
    (line,) = trainer.refresh().engines
    assert (line.outcome, line.pause, engine.loaded) == ("kept old", None, 1)
    assert "version 2 is not here after 0.5 s; the newest is version 1" in line.reason


def test_engine_is_driven_by_one_thread_after_an_interrupted_sync(engine, sender, monkeypatch):
    trainer = Trainer(sender, [engine], timeout=patience(30))
    assert trainer.sync(1, weights=weights(1)).all_synced
    inside, goes_on, over = threading.Event(), threading.Event(), []
    plain, at_once = engine.call, []

    def call(name, timeout, **arguments):
        at_once.append(name)
        assert len(at_once) == 1, "two calls of one engine at once"
        if name == "update_weights" and not inside.is_set():
            inside.set()
            assert goes_on.wait(patience(60))
        plain(name, timeout, **arguments)
        at_once.remove(name)
        over.append((name, arguments.get("update_info", {}).get("version")))

    monkeypatch.setattr(engine, "call", call)

    def interrupt():
        assert inside.wait(patience(30))
        # A real one: it ends a wait for a lock.
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    other = threading.Thread(target=interrupt)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        trainer.sync(2, weights=weights(2))
    other.join()
    # A call that does not wait long says why.
    monkeypatch.setattr(trainer, "_rules", type(trainer._rules)("keep", True, 0.1))
    (line,) = trainer.sync(3, weights=weights(3)).engines
    assert line.outcome != "updated"
    assert "a call that was interrupted has driven it for 0.1 s" in line.reason
    with pytest.raises(EngineCallError, match="fake does not sleep: a call that was interrupted"):
        trainer.sleep()
    monkeypatch.setattr(trainer, "_rules", type(trainer._rules)("keep", True, patience(30)))
    threading.Timer(0.2, goes_on.set).start()
    report = trainer.sync(4, weights=weights(4))
    assert (report.all_synced, engine.loaded, engine.paused) == (True, 4, False), report
    assert [version for name, version in over if name == "update_weights"] == [2, 4]


def test_dead_engine_is_forgotten_though_an_interrupted_call_drives_it(engine, sender, monkeypatch):
    trainer = Trainer(sender, [engine])
    assert trainer.sync(1, weights=weights(1)).all_synced
    engine.worker._background.shutdown("it has failed")
    assert [line.outcome for line in sender.send(weights(2)).workers] == ["failed"]
    monkeypatch.setattr(trainer, "_rules", type(trainer._rules)("keep", True, 0.1))
    with trainer._members[0].alone(patience(30)):
        trainer.remove("fake")
    assert sender.send(weights(3)).workers == []


@pytest.mark.parametrize("error", [KeyError("over"), EngineCallError("it does not answer")])
def test_error_after_an_update_leaves_its_line(engine, sender, error, monkeypatch, caplog):
    trainer, plain = Trainer(sender, [engine]), engine.ask

    def ask(timeout, **request):
        if request["do"] == "over":
            raise error
        plain(timeout, **request)

    monkeypatch.setattr(engine, "ask", ask)
    (line,) = trainer.sync(1, weights=weights(1)).engines
    assert (line.outcome, engine.loaded) == ("updated", 1), line
    assert f"fake was not told that its update is over: {error}" in caplog.text


@pytest.mark.parametrize("error", [KeyError("tags"), SystemExit(3)])
def test_error_of_an_engine_that_wakes_is_its_line(engine, sender, error, monkeypatch):
    other = Fake("other")
    try:
        trainer = Trainer(sender, [engine, other])
        assert trainer.sync(1, weights=weights(1)).all_synced
        trainer.sleep()

        def wake(tags, timeout):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(engine, "wake", wake)
            lines = trainer.wake().engines
        assert [line.outcome for line in lines] == ["asleep", "updated"]
        assert lines[0].reason == f"{type(error).__name__}: {error}"
        assert trainer.wake().all_synced
    finally:
        other.worker.leave()


def test_call_of_a_trainer_ends_while_another_thread_syncs(engine, sender, monkeypatch):
    trainer = Trainer(sender, [engine])
    paused, goes_on = threading.Event(), threading.Event()

    def pause(mode, clear, timeout):
        paused.set()
        assert goes_on.wait(patience(30))
        engine.paused = True

    monkeypatch.setattr(engine, "pause", pause)
    reports = []
    other = threading.Thread(target=lambda: reports.append(trainer.sync(1, weights=weights(1))), name="other")
    other.start()
    assert paused.wait(patience(30))
    monkeypatch.setattr(trainer, "_rules", type(trainer._rules)("keep", True, 0.1))
    calls = (trainer.sync, trainer.refresh, trainer.sleep, trainer.wake, lambda: trainer.remove("fake"))
    for call in calls:
        with pytest.raises(DeadlineError, match=r"for all of 0\.1 s the thread 'other' was in sync"):
            call()
    goes_on.set()
    other.join()
    assert reports[0].all_synced, reports[0]
