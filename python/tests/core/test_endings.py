"""How workers end, what the trainer's reports say of it, and whom `connect` counts."""

import multiprocessing
import pickle
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import weightsync
from actors import Raised
from ends import LONG, PUSHING, Net, all_ended, beside, meet

# Each has another way of telling the sender.
SCHEMES = ["shared-mem", "distributed:share=none", "rpc", "rpc:initial=connect"]

WORKER = """
    import sys
    import weightsync

    def work():
        receiver = weightsync.Receiver(sys.stdin.read(), 1)
        receiver.connect(timeout=60)
        while receiver.receive(60).version < 2:
            pass
        {end}

    work()
"""

ENDS = {
    "an exception": ("raise RuntimeError('CUDA error')", "RuntimeError: CUDA error"),
    "an exception out of with": (
        "with receiver: raise ValueError('no room')",
        "ValueError: no room",
    ),
    "fail": ("receiver.fail('told to')", "told to"),
}


def worker(info, number=0):
    return weightsync.Receiver(info, number)


def received_up_to(version, receiver):
    """Takes versions until one is that version: the first may be it, or the one of `connect`."""
    while receiver.receive(LONG).version < version:
        pass


def received(receiver):
    """Takes versions as long as they come."""
    try:
        while True:
            receiver.receive()
    except weightsync.PeerError:
        pass


@pytest.mark.parametrize("scheme", SCHEMES)
def test_exception_in_with_is_a_report_line(scheme):
    with weightsync.Sender(Net(1.0), scheme=scheme) as sender:
        fine, fails = worker(sender.init_info, 0), worker(sender.init_info, 1)
        meet(sender, fine, fails)
        with beside(lambda: received(fine)):
            assert sender.send(wait="sent").all_reached
            # A worker that never had a version is refused in one report, and has no line later.
            received_up_to(1, fails)
            with pytest.raises(RuntimeError), fails:
                raise RuntimeError("CUDA error")
            # In each report, and not in the next alone.
            for _ in range(3):
                report = sender.send(timeout=LONG)
                assert not report.all_applied, report
                (line,) = report.failed
                assert (line.worker, line.outcome) == (1, "failed"), report
                assert line.reason == "RuntimeError: CUDA error"
            with pytest.raises(weightsync.NotAppliedError, match="CUDA error") as raised:
                report.ensure_applied()
            assert raised.value.report == report and raised.value.remedy == "retry"
            # Until another is there in its place.
            again = worker(sender.init_info, 1)
            again.connect(timeout=LONG)
            with beside(lambda: received(again)):
                report = sender.send(timeout=LONG)
                assert report.ensure_applied() is report
                sender.shutdown()


@pytest.mark.parametrize("end", [*ENDS, "multiprocessing"])
def test_a_program_that_ends_by_an_exception_is_a_line(end):
    with weightsync.Sender(Net(1.0)) as sender:
        info = sender.init_info
        if end == "multiprocessing":
            process = multiprocessing.get_context("spawn").Process(target=_raises, args=(info,))
            process.start()
            sender.connect(1, timeout=LONG)
            sender.send(wait="sent")
            process.join()
            words = "its receiver was dropped without shutdown()"
        else:
            code, words = ENDS[end]
            program = textwrap.dedent(WORKER).format(end=code)
            run = [sys.executable, "-c", program]
            with beside(lambda: subprocess.run(run, input=info.to_json(), text=True)):
                sender.connect(1, timeout=LONG)
                sender.send(wait="sent")
        for _ in range(2):
            report = sender.send(timeout=LONG)
            (line,) = report.failed
            assert (line.outcome, line.reason) == ("failed", words), report
        sender.forget(line.worker)
        assert sender.send(timeout=LONG).workers == []


def _raises(info):
    receiver = worker(info, 1)
    receiver.connect(timeout=LONG)
    while receiver.receive(LONG).version < 2:
        pass
    raise RuntimeError("CUDA error")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_with_nobody_there_not_all_have_applied(scheme):
    with weightsync.Sender(Net(1.0), scheme=scheme) as sender:
        sender.connect(0, timeout=LONG)
        report = sender.send(timeout=LONG)
        assert not report.all_applied and report.failed == []
        with pytest.raises(weightsync.NotAppliedError, match="there is no worker"):
            report.ensure_applied()
        # A worker that leaves in order is no failure, and nobody.
        leaves = worker(sender.init_info)
        leaves.connect(timeout=LONG)
        with leaves:
            pass
        report = sender.send(timeout=LONG)
        assert not report.all_applied and report.failed == [], report


@pytest.mark.parametrize("background", [False, True])
def test_a_receiver_that_is_collected_has_failed(background):
    model = Net()
    with weightsync.Sender(Net(1.0)) as sender:
        receiver = weightsync.ModelReceiver(sender.init_info, 0, model=model)
        meet(sender, receiver)
        if background:
            receiver.start_background()
        del receiver
        (line,) = sender.send(timeout=LONG).failed
        assert (line.outcome, "without shutdown()" in line.reason) == ("failed", True)


def test_leaving_in_order_is_no_failure():
    with weightsync.Sender(Net(1.0)) as sender:
        ways = (
            lambda one: one.shutdown(),
            lambda one: one.__exit__(None, None, None),
            lambda one: one.__exit__(SystemExit, SystemExit(0), None),
        )
        for version, leave in enumerate(ways, start=2):
            stays, leaves = worker(sender.init_info, 0), worker(sender.init_info, 1)
            if sender.is_connected:
                stays.connect(timeout=LONG)
                leaves.connect(timeout=LONG)
            else:
                meet(sender, stays, leaves)
            leave(leaves)
            with beside(lambda: received_up_to(version, stays)):
                assert sender.send(timeout=LONG, version=version).all_applied
            stays.shutdown()


@pytest.mark.parametrize("scheme", [*PUSHING, "rpc"])
def test_a_connect_that_fails_can_be_called_again(scheme):
    with weightsync.Sender(Net(1.0), scheme=scheme) as sender:
        first = worker(sender.init_info, 0)
        with beside(lambda: first.connect(timeout=LONG)):
            with pytest.raises(weightsync.DeadlineError, match=r"missing: worker 1\)") as raised:
                sender.connect([0, 1], timeout=1.0)
        assert raised.value.remedy == "retry" and not sender.is_connected
        with pytest.raises(weightsync.LifecycleError, match="call connect again"):
            sender.send()
        second = worker(sender.init_info, 1)
        with all_ended(first, second):
            meet(sender, second)
            assert {status.worker for status in sender.workers} == {0, 1}
            with beside(lambda: received(first), lambda: received(second)):
                assert sender.send(timeout=LONG).all_applied
                sender.shutdown()


@pytest.mark.parametrize("scheme", [*PUSHING, "rpc"])
def test_worker_that_leaves_after_connect_counts(scheme):
    def come_and_go(number):
        with worker(sender.init_info, number) as receiver:
            receiver.connect(timeout=LONG)

    for _ in range(5):
        with weightsync.Sender(Net(1.0), scheme=scheme) as sender:
            with beside(*(lambda number=number: come_and_go(number) for number in range(3))):
                sender.connect(3, timeout=LONG)


class Dies:
    def is_there(self):
        return True

    def join(self, info):
        self.receiver = worker(info, 1)
        self.receiver.connect(timeout=LONG)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_worker_that_joined_and_was_killed_is_named(actor, scheme):
    dies = actor(Dies)
    assert dies.ask("is_there")
    with weightsync.Sender(Net(1.0), scheme=scheme) as sender:
        raised = []

        def connect():
            until = time.monotonic() + LONG
            while time.monotonic() < until and "died" not in str(raised):
                # Worker 0 never comes.
                with pytest.raises(weightsync.DeadlineError) as error:
                    sender.connect([0, 1], timeout=1.0)
                raised[:] = [error.value]

        waits = threading.Thread(target=connect)
        waits.start()
        dies.ask("join", sender.init_info)
        dies.kill()
        waits.join()
        assert f"worker 1 (pid {dies.pid}) died" in str(raised[0]), raised[0]


def until_logged(caplog, words):
    """The lines with these words, once there are some: a thread of the engine logs them."""
    until = time.monotonic() + LONG
    while not (said := [one.message for one in caplog.records if words in one.message]):
        assert time.monotonic() < until, caplog.text
        time.sleep(0.01)
    return said


@pytest.mark.parametrize("scheme", SCHEMES)
def test_second_worker_of_a_number_is_refused(scheme, caplog):
    # Its own: the same words are logged once a minute.
    number = SCHEMES.index(scheme)
    with weightsync.Sender(Net(1.0), scheme=scheme) as sender:
        lives = worker(sender.init_info, number)
        meet(sender, lives)
        for _ in range(3):
            with pytest.raises(weightsync.PeerError, match="already connected") as raised:
                worker(sender.init_info, number).connect(timeout=LONG)
            assert "another number" in str(raised.value)
        reason = str(raised.value).removeprefix("the sender refused this worker: ")
        assert until_logged(caplog, "refused") == [f"a worker was refused: {reason}"]
        with beside(lambda: received(lives)):
            assert sender.send(timeout=LONG).all_applied
            sender.shutdown()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_connects_return_before_a_shutdown_shows(scheme):
    for _ in range(10):
        with weightsync.Sender(Net(1.0), scheme=scheme) as sender:
            receiver = worker(sender.init_info, 0)
            with beside(lambda: receiver.connect(timeout=LONG)):
                sender.connect(1, timeout=LONG)
                sender.shutdown()
            with pytest.raises(weightsync.SenderClosedError):
                while True:
                    receiver.receive(LONG)


def test_a_report_is_a_value():
    with weightsync.Sender(Net(1.0)) as sender:
        fine, fails = worker(sender.init_info, 0), worker(sender.init_info, 1)
        meet(sender, fine, fails)
        fails.fail("no disk")
        with beside(lambda: received(fine)):
            report = sender.send(timeout=LONG)
            sender.shutdown()
    again = pickle.loads(pickle.dumps(report))
    assert again == report and str(again) == str(report)
    assert again.to_dict() == report.to_dict()
    plain = report.to_dict()
    assert plain["versions"] == {"policy": 2} and plain["all_applied"] is False
    lines = [(line["worker"], line["outcome"], line["reason"]) for line in plain["workers"]]
    assert lines == [(0, "applied", None), (1, "failed", "no disk")]
    assert pickle.loads(pickle.dumps(report.failed[0])) == report.failed[0]


def test_an_actor_can_hand_its_report_over(actor):
    trainer = actor(Reports)
    with pytest.raises(Raised, match="there is no worker"):
        trainer.ask("send_to_all")
    report = trainer.ask("send")
    assert isinstance(report, weightsync.Report) and report.version == 3


class Reports:
    """A trainer in a process of its own."""

    def __init__(self):
        self.sender = weightsync.Sender(Net(1.0))
        self.sender.connect(0)

    def send(self):
        return self.sender.send()

    def send_to_all(self):
        return self.sender.send().ensure_applied()


#: Runs that another trainer goes on with, by the same init info.
RESTARTS = {
    "store": lambda path: {"scheme": f"store:{path}"},
    "shared-mem": lambda path: {"scheme": "shared-mem", "run_dir": path},
    "multi-process": lambda path: {"scheme": "multi-process", "run_dir": path},
}


@pytest.mark.parametrize("scheme", RESTARTS)
def test_worker_that_comes_after_the_end_waits_and_says_so(scheme, tmp_path, caplog):
    how = RESTARTS[scheme](tmp_path / "run")
    with weightsync.Sender(Net(1.0), **how) as sender:
        info = sender.init_info
        # Nothing has ended yet.
        with pytest.raises(weightsync.DeadlineError) as raised:
            worker(info).connect(timeout=0.1)
        assert "has " not in str(raised.value).split("s: is")[0] and not caplog.records
        sender.connect(0)
    ended = r"last attempt: (its sender, process \d+ on .*, has shut down|.*that sender has ended)\)"
    with pytest.raises(weightsync.DeadlineError, match=ended):
        worker(info).connect(timeout=0)
    caplog.clear()
    late, again = worker(info), weightsync.Sender(Net(2.0), **how)
    with all_ended(again, late):
        with beside(lambda: late.connect(timeout=LONG)):
            (said,) = until_logged(caplog, "waits for a trainer that starts again")
            assert "has ended" in said or "has shut down" in said
            again.connect(1, timeout=LONG)
        assert late.version == again.version


def test_worker_is_told_of_a_sender_that_was_killed(tmp_path):
    script = """
        import os, signal, weightsync
        sender = weightsync.Sender({"a": __import__("numpy").ones(2)}, scheme=SCHEME)
        sender.connect(0)
        print(sender.init_info.to_json(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    for scheme in [f"store:{tmp_path}/store", f"store:{tmp_path},temporary"]:
        program = textwrap.dedent(script).replace("SCHEME", repr(scheme))
        killed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        info = weightsync.InitInfo.from_json(killed.stdout)
        if "temporary" in scheme:
            with pytest.raises(weightsync.PeerError, match="died"):
                worker(info).connect(timeout=LONG)
        else:
            with pytest.raises(weightsync.DeadlineError, match="its sender, process .* has died"):
                worker(info).connect(timeout=0.1)
