"""Setting up, connecting, ending: the order of calls, errors that say what to do, and text."""

import copy
import json
import logging
import os
import pickle
import re
import subprocess
import sys
import threading
import time

import pytest
import torch
import weightsync
from actors import STARTS
from ends import FAR, LONG, PUSHING, Net, all_ended, beside, meet, pair, pass_on
from torch import nn
from weightsync import errors

SCHEMES = [*PUSHING, "none"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_setting_up_opens_nothing(scheme):
    descriptors, threads = set(os.listdir("/proc/self/fd")), threading.active_count()
    sender = weightsync.Sender(Net(), scheme=scheme)
    receiver = weightsync.ModelReceiver(sender.init_info, 3, model=Net())
    opened = set(os.listdir("/proc/self/fd")) - descriptors
    # But for a port that the init info is to name.
    assert len(opened) <= scheme.startswith("distributed")
    assert threading.active_count() == threads
    assert (receiver.worker, sender.scheme, sender.models) == (3, scheme, ["policy"])
    del sender, receiver


def test_no_sync_scheme_takes_the_same_calls():
    trainer, worker = Net(1.0), Net()
    with pair(trainer, worker, setup={"scheme": "none"}) as (sender, receiver):
        report = sender.send()
        assert not report.all_applied and not report.failed
        assert receiver.receive(0) is None
        assert worker.value == 0.0
    # It waits for nobody.
    with weightsync.Sender(trainer, scheme="none") as sender:
        sender.connect(3, timeout=0.1)
        assert sender.send().workers == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_init_info_is_a_plain_value(scheme):
    sender = weightsync.Sender(Net(1.0), name="actor", scheme=scheme)
    info = sender.init_info
    for other in (
        pickle.loads(pickle.dumps(info)),
        weightsync.InitInfo.from_json(info.to_json()),
        weightsync.InitInfo.from_json(json.dumps(json.loads(info.to_json()))),
    ):
        assert other == info
        assert (other.models, other.scheme) == (["actor"], scheme)
    # Any of them does, also as text, and for several workers.
    one = weightsync.ModelReceiver(info.to_json(), 0, model=Net())
    two = weightsync.ModelReceiver(pickle.loads(pickle.dumps(info)), 1, model=Net())
    with all_ended(sender, one, two):
        meet(sender, one, two)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"scheme": 3}', "null", "x" * 1000])
def test_text_that_is_no_init_info_is_refused(text):
    with pytest.raises(weightsync.SettingError) as refused:
        weightsync.Receiver(text)
    assert refused.value.remedy == "give up"


def test_tampered_init_info_is_refused():
    sender = weightsync.Sender(Net(1.0))
    text = sender.init_info.to_json()
    secret = max(re.findall(r"[0-9a-f]{16,}", text), key=len, default=None)
    if secret is None:
        pytest.skip("the secret is not text of hexadecimal digits")
    wrong = text.replace(secret, secret[:-1] + ("0" if secret[-1] != "0" else "1"))
    right = weightsync.ModelReceiver(text, 0, model=Net())
    with all_ended(sender, right):
        meet(sender, right)
        with pytest.raises(weightsync.WeightsyncError):
            weightsync.Receiver(wrong, 1).connect(timeout=0.5)
        assert [status.worker for status in sender.workers] == [0]


def test_calls_in_the_wrong_order_say_what_to_do():
    sender = weightsync.Sender(Net(1.0))
    receiver = weightsync.ModelReceiver(sender.init_info, model=Net())
    reader = weightsync.Receiver(sender.init_info, 1)
    early = {
        "send": sender.send,
        "send_async": sender.send_async,
        "wait_for": lambda: sender.wait_for(1, timeout=1),
        "workers": lambda: sender.workers,
        "digest": sender.digest,
        "snapshot": sender.snapshot,
        "receive": lambda: receiver.receive(0),
        "pull": lambda: receiver.pull(timeout=0),
        "a reader's receive": lambda: reader.receive(0),
        "latest": reader.latest,
        "a reader's pull": lambda: reader.pull(timeout=0),
        "start_background": receiver.start_background,
    }
    _all_refused(early, "connect")
    with all_ended(sender, receiver, reader):
        meet(sender, receiver, reader)
        again = {"connect": sender.connect, "receiver's": receiver.connect, "reader's": reader.connect}
        _all_refused(again, "connect")
        pass_on(sender, receiver, reader)
    _all_refused(early | {"connect": sender.connect, "again": receiver.connect}, "shut|closed|new one|again")


def _all_refused(calls, fix):
    for name, call in calls.items():
        with pytest.raises(weightsync.LifecycleError, match=fix) as refused:
            call()
        assert refused.value.remedy == "give up", name
        # These are a Rust session's names.
        for other in ("connect_", "receive_set", "init_on_", "load_joined"):
            assert other not in str(refused.value), name


def test_the_wrong_half_is_refused():
    sender = weightsync.Sender(Net(1.0))
    with pytest.raises(weightsync.LifecycleError, match="receiver|worker|sender"):
        sender._session.connect_receiver(None, 1.0)
    with pair(Net(1.0)) as (sender, receiver):
        with pytest.raises(weightsync.LifecycleError):
            sender._session.receive(0)
        with pytest.raises(weightsync.LifecycleError):
            weights = [(None, sender._sources["policy"]._native)]
            receiver._session.send(weights, (None, None, None, None, False, None, False))


def test_live_ends_cannot_be_pickled_or_copied():
    with pair(Net(1.0), Net()) as (sender, receiver):
        for end in (sender, receiver):
            for way in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(weightsync.LifecycleError, match="init.info"):
                    way(end)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_shutdown_any_number_of_times_and_by_with(scheme):
    worker = Net()
    with weightsync.Sender(Net(1.0), scheme=scheme) as sender:
        with weightsync.ModelReceiver(sender.init_info, model=worker) as receiver:
            meet(sender, receiver)
        receiver.shutdown()
        receiver.shutdown()
    sender.shutdown()
    sender.shutdown()
    assert worker.value == (0.0 if scheme == "none" else 1.0)


def test_ends_that_never_connected_shut_down():
    sender = weightsync.Sender(Net(1.0))
    weightsync.Receiver(sender.init_info).shutdown()
    sender.shutdown()


def test_worker_sees_the_end_and_joins_the_next():
    with pair(Net(1.0), Net()) as (sender, receiver):
        pass_on(sender, receiver)
        sender.shutdown()
        with pytest.raises(weightsync.SenderClosedError) as ended:
            receiver.receive(None)
        assert ended.value.remedy == "reconnect"
        assert isinstance(ended.value, (weightsync.PeerError, ConnectionError))


@pytest.mark.parametrize("scheme", PUSHING)
def test_receiver_gets_sent_versions_before_the_end(scheme):
    trainer, worker = Net(1.0), Net()
    with pair(trainer, worker, setup={"scheme": scheme}) as (sender, receiver):
        trainer.fill(2.0)
        sender.send(wait="sent")
        sender.shutdown()
        assert receiver.receive(LONG) == 2
        assert worker.value == 2.0
        with pytest.raises(weightsync.SenderClosedError):
            receiver.receive(LONG)


def test_workers_join_and_leave_at_any_time():
    trainer = Net(1.0)
    with weightsync.Sender(trainer) as sender:
        sender.connect(0)
        for value in (2.0, 3.0):
            worker = Net()
            trainer.fill(value)
            sender.send()
            with weightsync.ModelReceiver(sender.init_info, 5, model=worker) as receiver:
                with beside(lambda one=receiver: one.connect(timeout=LONG)):
                    sender.wait_for([5], timeout=LONG)
                assert worker.value == value
                assert [status.version for status in sender.workers] == [sender.version]
            # That it left is noticed soon, and said once.
            for _ in range(3):
                assert {line.outcome for line in sender.send().workers} <= {"left"}


def test_two_workers_of_one_number():
    with pair(Net(1.0), Net()) as (sender, receiver):
        with weightsync.ModelReceiver(sender.init_info, 0, model=Net()) as other:
            with pytest.raises(weightsync.WeightsyncError) as refused:
                other.connect(timeout=0.5)
            assert "0" in str(refused.value)
        pass_on(sender, receiver)


def test_the_program_that_just_ends_leaves_nothing(tmp_path):
    program = """
import threading, torch, weightsync
from ends import Net, meet
sender = weightsync.Sender(Net(1.0))
receiver = weightsync.ModelReceiver(sender.init_info, model=Net())
reader = weightsync.Receiver(sender.init_info, 1)
meet(sender, receiver, reader)
held = reader.latest()["large"]
background = receiver.start_background()
print("ends", flush=True)
"""
    done = _run(program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")


def test_waiting_daemon_thread_lets_the_program_end():
    program = """
import threading, weightsync
from ends import Net, meet
sender = weightsync.Sender(Net(1.0)); receiver = weightsync.Receiver(sender.init_info)
meet(sender, receiver)
receiver.receive(5)
begun = threading.Event()
threading.Thread(target=lambda: (begun.set(), receiver.receive(None)), daemon=True).start()
begun.wait()
print("ends", flush=True)
"""
    done = _run(program)
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr


def _run(program):
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=os.path.dirname(__file__),
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )


def test_words_are_readable():
    with pair(Net(1.0)) as (sender, receiver):
        pending = sender.send_async(wait="sent")
        report = sender.send(wait="sent")
        # Nothing is the latest while its memory is on its way.
        until = time.monotonic() + LONG
        while receiver.latest() is None:
            assert time.monotonic() < until, "no version came"
            os.sched_yield()
        values = [
            sender, receiver, sender.init_info, sender.workers[0], report,
            receiver.latest(), sender.snapshot(), pending, sender._session,
        ]  # fmt: skip
        for value in values:
            text = repr(value)
            assert "0x" not in text and " object at " not in text, text
            assert text.startswith("<") and text.endswith(">") and len(text) < 300, text
        assert "policy" in repr(receiver.latest())
        assert "shared-mem" in repr(sender)
        # The secret is nobody's to read.
        for part in re.findall(r"[0-9a-f]{16,}", sender.init_info.to_json()):
            assert part not in repr(sender.init_info)
        del values, value, pending


def test_sends_are_logged_only_if_they_fail(caplog):
    with caplog.at_level(logging.INFO, "weightsync"):
        with pair(Net(1.0), Net()) as (sender, receiver):
            # Who joins is said; a send that goes right is not.
            caplog.clear()
            pass_on(sender, receiver)
            assert caplog.records == []
            report = sender.send(timeout=0.01)
            assert not report.all_reached
            assert [line.outcome for line in report.workers] == ["staged"] or report.failed
            assert [record.levelname for record in caplog.records] == ["WARNING"]
            assert "worker 0" in caplog.records[0].getMessage()


SETTINGS = {
    "a scheme": ({"scheme": "shared-men"}, weightsync.SettingError, "shared-mem"),
    "a scheme's setting": ({"scheme": "multi-process:evry=3"}, weightsync.SettingError, "every"),
    "a bound": ({"scheme": "multi-process:every=0"}, weightsync.SettingError, "1 to 32"),
    "a strategy": ({"strategy": "dict"}, ValueError, "state_dict"),
    "a cast": ({"cast": "F99"}, (TypeError, weightsync.SettingError), "F99"),
    "a timeout": ({"timeout": -1.0}, ValueError, "seconds"),
    "slots": ({"slots": (1, 1)}, (ValueError, weightsync.WeightsyncError), "slots|2"),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_that_cannot_be_are_refused(setting):
    how, kind, said = SETTINGS[setting]
    with pytest.raises(kind, match=said):
        with weightsync.Sender(Net(1.0), **how) as sender:
            sender.connect(0, timeout=1)


def test_arguments_that_cannot_be_are_refused():
    with pair(Net(1.0), Net()) as (sender, receiver):
        with pytest.raises(ValueError, match='"applied".*aplied'):
            sender.send(wait="aplied")
        with pytest.raises(ValueError, match="seconds"):
            receiver.receive(-1)
        with pytest.raises(ValueError, match="seconds"):
            receiver.receive(float("nan"))
        with pytest.raises(ValueError, match="safe_points"):
            receiver.start_background("somewhere")
        with pytest.raises(weightsync.ModelError, match="no model 'critic'.*policy"):
            sender.send(model="critic")
        with pytest.raises(weightsync.ModelError, match="critic"):
            sender.send(weights_dict={"critic": Net()})
        with pytest.raises(weightsync.ModelError, match="not both"):
            sender.send(Net(), weights_dict={"policy": Net()})
        with pytest.raises(weightsync.SendError, match="v1.*v1|grow"):
            sender.send(version=1)
        with pytest.raises(ValueError, match="version or at_least"):
            receiver.pull(3, at_least=2)
    with pytest.raises(ValueError, match="mode"):
        weightsync.ModelReceiver(sender.init_info, model=Net(), mode="bnd")
    with pytest.raises(TypeError, match="list"):
        weightsync.ModelReceiver(sender.init_info, model=[1])
    with pytest.raises((OverflowError, ValueError)):
        weightsync.Receiver(sender.init_info, -1)


def test_receivers_name_each_other_in_errors():
    with weightsync.Sender(Net(1.0)) as sender:
        info = sender.init_info
        for how in ({"model": Net()}, {"mode": "copy"}, {"context": 1}, {"models": {"policy": Net()}}):
            (name,) = how
            with pytest.raises(weightsync.WrongTypeError, match=f"{name}: .*ModelReceiver"):
                weightsync.Receiver(info, 0, **how)
        with pytest.raises(weightsync.WrongTypeError, match="'modle'.*models and device"):
            weightsync.Receiver(info, 0, modle=Net())
        with pytest.raises(weightsync.WrongTypeError, match="models: expected a list of names"):
            weightsync.Receiver(info, 0, models="policy")
        for how in ({}, {"models": ["policy"]}):
            with pytest.raises(weightsync.ModelError, match="use Receiver"):
                weightsync.ModelReceiver(info, 0, **how)
        with pytest.raises(weightsync.ModelError, match="not both"):
            weightsync.ModelReceiver(info, 0, model=Net(), models={"policy": Net()})


def test_every_error_pickles_and_has_a_remedy():
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert issubclass(kind, weightsync.WeightsyncError)
        error = pickle.loads(pickle.dumps(kind("said", "retry")))
        assert (type(error), str(error), error.remedy) == (kind, "said", "retry")


def test_unsupported_calls_name_the_scheme():
    with pair(Net(1.0), setup={"scheme": "multi-process:every=4"}) as (_, receiver):
        with pytest.raises(weightsync.UnsupportedError, match="multi-process:every=4"):
            receiver.pull(timeout=0)
    with pair(Net(1.0), setup={"scheme": "none"}) as (sender, receiver):
        for call in (
            lambda: sender.hold([0]),
            sender.snapshot,
            sender.digest,
            lambda: receiver.pull(timeout=0),
            lambda: sender.send(worker_ids=[0]),
            lambda: sender.send_each({0: Net()}),
        ):
            with pytest.raises(weightsync.UnsupportedError, match="none") as refused:
                call()
            assert refused.value.remedy == "give up"
            assert isinstance(refused.value, NotImplementedError)


def test_a_file_that_cannot_be_written_is_an_os_error(tmp_path):
    with pair(Net(1.0)) as (sender, _):
        with pytest.raises((weightsync.OperatingSystemError, OSError), match="no/such"):
            sender.snapshot().save_safetensors(tmp_path / "no/such/file")
    with pytest.raises((weightsync.OperatingSystemError, OSError)):
        weightsync.Sender(Net(1.0), run_dir="/proc/no/such")


@pytest.mark.parametrize("start", STARTS)
def test_init_info_crosses_to_a_process_of_any_kind(actor, start):
    trainer = Net(1.0)
    with weightsync.Sender(trainer) as sender:
        worker = actor(Worker, sender.init_info, 4, start=start)
        worker.order("connect")
        sender.connect([4], timeout=LONG)
        worker.answer()
        trainer.fill(2.0)
        worker.order("receive")
        report = sender.send(timeout=LONG)
        assert (report.all_applied, worker.answer()) == (True, (2, 2.0))
        assert report.worker(4).pid == worker.pid
        worker.ask("shutdown")


class Worker:
    def __init__(self, info, index):
        self.model = Net()
        self.receiver = weightsync.ModelReceiver(info, index, model=self.model)

    def connect(self):
        self.receiver.connect(timeout=LONG)

    def receive(self):
        return self.receiver.receive(LONG), self.model.value

    def shutdown(self):
        self.receiver.shutdown()


@pytest.mark.parametrize("scheme", ["shared-mem", "multi-process:every=8", *FAR])
def test_loop_over_a_receiver_ends_with_its_sender(scheme):
    source = {"w": torch.zeros(3)}
    with pair(source, setup={"scheme": scheme}) as (sender, receiver):
        came = []

        def follow():
            for snapshot in receiver:
                came.append((snapshot.version, snapshot["w"][0].item()))

        def send():
            for value in (1, 2, 3):
                source["w"].fill_(value)
                sender.send().ensure_applied()
            sender.shutdown()

        with beside(follow):
            send()
    assert came[-1][1] == 3 and [version for version, _ in came] == sorted({one for one, _ in came})


def test_loop_over_a_model_receiver_loads_each_version():
    trainer, worker = nn.Linear(2, 2), nn.Linear(2, 2)
    with pair(trainer, worker, setup={"scheme": "multi-process:every=8"}) as (sender, receiver):
        for _ in range(3):
            sender.send(wait="sent")
        sender.shutdown()
        assert list(receiver) == [2, 3, 4]


ALONE = """
import sys, time, weightsync
sender = weightsync.Sender({"w": __import__("torch").ones(3)})
receiver = weightsync.Receiver(sender.init_info)
begun = time.monotonic()
try:
    eval(sys.argv[1])
except weightsync.LifecycleError as error:
    assert time.monotonic() - begun < 30
    print(error)
sender.connect(0)
receiver.connect()
sender.send(wait="sent")
assert receiver.receive(60).version == 2
"""


@pytest.mark.parametrize("first", ["sender.connect(1)", "receiver.connect()"])
def test_one_thread_with_both_ends_is_told_at_once(first):
    done = subprocess.run(
        [sys.executable, "-c", ALONE, first], capture_output=True, text=True, timeout=2 * LONG
    )
    assert done.returncode == 0, done.stderr
    assert "`sender.connect(0)`" in done.stdout and "`receiver.connect()`" in done.stdout


@pytest.mark.parametrize("method", ["checkpoint", "memory"])
def test_one_thread_resumes_from_a_synchronizer(tmp_path, method):
    program = """
import sys, torch
from weightsync.synchronizer import Synchronizer
own = {"store": sys.argv[1]} if sys.argv[2] == "checkpoint" else {}
with Synchronizer.local(method=sys.argv[2]) as sync:
    for version in (1, 3):
        model = torch.nn.Linear(2, 2)
        with sync.trainer(model, resume=True, **own) as trainer:
            assert trainer.version == version
            trainer.sync(5)
"""
    command = [sys.executable, "-c", program, tmp_path / "store", method]
    subprocess.run(command, check=True, timeout=2 * LONG)
