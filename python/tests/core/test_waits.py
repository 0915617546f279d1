"""Every wait: it ends by its timeout, by Ctrl-C, by shutdown; other threads run meanwhile."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import weightsync
from ends import LONG, MODES, PUSHING, Net, Shaped, all_ended, beside, meet, pair, pass_on

# Each is a call that would wait for ever, and one that shows that its end works on.
BLOCKING = {
    "receive": (
        "receiver.receive(None)",
        "trainer.fill(2.0); sender.send(wait='sent'); assert receiver.receive(30) == 2",
    ),
    "send": (
        "sender.send(timeout=None)",
        "assert receiver.receive(30) == 2; sender.send(wait='sent'); receiver.receive(30)",
    ),
    "pending": (
        "sender.send_async().wait(None)",
        "assert receiver.receive(30) == 2; sender.send(wait='sent'); receiver.receive(30)",
    ),
    "room": (
        "reader = weightsync.Receiver(sender.init_info, 2); reader.connect(timeout=30);"
        "held.append(reader.latest()); sender.send(wait='sent'); receiver.receive(30);"
        "held.append(reader.receive(30)); sender.send(timeout=None)",
        "held.clear(); model = None; sender.send(wait='sent'); receiver.receive(30)",
    ),
    "workers": (
        "sender.wait_for([8], timeout=None)",
        "sender.send(wait='sent'); assert receiver.receive(30) == 2",
    ),
    "connect of a sender": (
        "other.connect(1, timeout=None)",
        "other = weightsync.Sender(trainer); other.connect(0); other.send()",
    ),
    "connect of a receiver": (
        "alone.connect(timeout=None)",
        "alone = weightsync.Receiver(sender.init_info, 1); alone.connect(timeout=30)",
    ),
    "pull": (
        "receiver.pull(at_least=9)",
        "sender.send(wait='sent', version=9); assert receiver.pull(at_least=9) == 9",
    ),
    "background": (
        "background.append(receiver.start_background()); background[0].wait(9)",
        "sender.send(timeout=30, version=9); assert background[0].wait(9, timeout=30)",
    ),
    "forward of a cascade": (
        "cascades.append(weightsync.Cascade(sender.init_info, 3));"
        "below = weightsync.ModelReceiver(cascades[0].init_info, 0, model=Net());"
        "meet(cascades[0], below); below.start_background(); cascades[0].forward(None)",
        "sender.send(wait='sent'); assert cascades[0].forward(30).version == 2;"
        "below.shutdown(); cascades[0].shutdown()",
    ),
    "a lock in another thread": (
        "threading.Thread(target=sender.send, kwargs={'timeout': 5}).start();"
        "sender.wait_for([8], timeout=None)",
        "assert receiver.receive(30) == 2",
    ),
}

_PROGRAM = """
import faulthandler, os, signal, sys, threading, time
# A program that hangs ends, and its stacks say where.
faulthandler.dump_traceback_later({limit}, exit=True)
import torch, weightsync
from ends import Net, meet
from patience import patience
trainer, model, held, background, cascades = Net(1.0), Net(), [], [], []
sender = weightsync.Sender(trainer, slots=(2, 2))
receiver = weightsync.ModelReceiver(sender.init_info, 0, model=model)
other, nowhere = weightsync.Sender(Net(1.0)), weightsync.Sender(Net(1.0))
alone = weightsync.Receiver(nowhere.init_info, 1)
meet(sender, receiver)
main = threading.main_thread().ident
def interrupt():
    # Once the main thread sleeps in the call: it is in no Python code then.
    before = None
    while True:
        frame = sys._current_frames()[main]
        now = (frame.f_code.co_name, frame.f_lineno, state())
        if now == before and now[2] == "S":
            break
        before = now
        time.sleep(0.1)
    global sent
    sent = time.monotonic()
    os.kill(os.getpid(), signal.SIGINT)
def state():
    with open("/proc/self/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
# What runs in the background of a shell is begun with it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    threading.Thread(target=interrupt).start()
    {call}
except KeyboardInterrupt:
    print("interrupted", time.monotonic() - sent < patience(2), flush=True)
{after}
sender.shutdown(); receiver.shutdown()
print("works on", flush=True)
"""


@pytest.mark.parametrize("what", BLOCKING)
def test_ctrl_c_ends_a_wait_and_the_end_works_on(what):
    call, after = BLOCKING[what]
    program = _PROGRAM.replace("{call}", call).replace("{after}", after)
    done = subprocess.run(
        [sys.executable, "-c", program.replace("{limit}", str(LONG))],
        cwd=os.path.dirname(__file__),
        capture_output=True,
        text=True,
        timeout=LONG + 30,
        check=False,
    )
    assert done.stdout == "interrupted True\nworks on\n", done.stdout + done.stderr
    assert done.returncode == 0


def test_a_timeout_is_nothing_and_no_error():
    with pair(Net(1.0), Net()) as (sender, receiver):
        for timeout in (0, 0.0, 0.01):
            assert receiver.receive(timeout) is None
        assert receiver.pull(at_least=9, timeout=0.01) is None
        background = receiver.start_background()
        assert background.wait(9, timeout=0.01) is False
        assert background.wait(timeout=0) is False
        background.shutdown()


def test_deadlines_name_who_is_missing():
    with weightsync.Sender(Net(1.0)) as sender:
        with pytest.raises(weightsync.DeadlineError) as late:
            sender.connect([3, 4], timeout=0.05)
        assert "3" in str(late.value) and "4" in str(late.value)
        assert (late.value.remedy, isinstance(late.value, TimeoutError)) == ("retry", True)
    with weightsync.Sender(Net(1.0)) as sender:
        sender.connect(0)
        with pytest.raises(weightsync.DeadlineError, match="0 of 2"):
            sender.wait_for(2, timeout=0.05)
        with pytest.raises(weightsync.DeadlineError, match="worker 9|9"):
            sender.wait_for([9], timeout=0.05)
    nowhere = weightsync.Sender(Net(1.0))
    with pytest.raises(weightsync.DeadlineError, match="no sender answered"):
        weightsync.Receiver(nowhere.init_info).connect(timeout=0.05)


@pytest.mark.parametrize("scheme", PUSHING)
def test_a_late_worker_is_a_line_and_no_error(scheme):
    trainer, workers = Net(1.0), [Net(), Net()]
    sender = weightsync.Sender(trainer, scheme=scheme)
    receivers = [
        weightsync.ModelReceiver(sender.init_info, at, model=one)
        for at, one in enumerate(workers)
    ]
    with all_ended(sender, *receivers):
        meet(sender, *receivers)
        with beside(lambda: receivers[1].receive(LONG)):
            report = sender.send(timeout=0.5)
        lines = {line.worker: line.outcome for line in report.workers}
        assert lines[1] == "applied"
        assert lines[0] in ("late", "staged")
        assert not report.all_applied
        # It is told what it missed.
        assert receivers[0].receive(LONG) == 2


WAITS = {
    "receive": lambda sender, receiver: receiver.receive(None),
    "send": lambda sender, receiver: sender.send(timeout=None),
    "wait_for": lambda sender, receiver: sender.wait_for([7], timeout=None),
    "pull": lambda sender, receiver: receiver.pull(at_least=9),
}


@pytest.mark.parametrize("wait", WAITS)
def test_wait_lets_threads_run_and_ends_by_shutdown(wait):
    ended = []
    with pair(Net(1.0), Net()) as (sender, receiver):
        begun = threading.Event()

        def block():
            begun.set()
            try:
                WAITS[wait](sender, receiver)
            except weightsync.WeightsyncError as error:
                ended.append(error)

        thread = threading.Thread(target=block)
        thread.start()
        begun.wait()
        # With the interpreter's lock held this would not be reached.
        counted = sum(range(100_000))
        assert counted and thread.is_alive()
        (sender if wait in ("send", "wait_for") else receiver).shutdown()
        thread.join(LONG)
        assert not thread.is_alive()
    # A call that had not begun yet, or one that had.
    if wait != "send":
        assert ended and isinstance(ended[0], weightsync.LifecycleError), ended


@pytest.mark.parametrize("mode", MODES)
def test_copying_lets_other_threads_run(mode):
    turns, stop = 0, threading.Event()

    def turn():
        nonlocal turns
        with open("/dev/zero", "rb", buffering=0) as zeros:
            while not stop.is_set():
                turns += 1
                # Gives the interpreter's lock away for a moment, and does not sleep.
                zeros.read(1)

    def turns_of(ends):
        """How many turns the other thread has while one version is sent and received."""
        before = turns
        pass_on(*ends)
        return turns - before

    few = many = 0
    interval = sys.getswitchinterval()
    small, large = (
        pair(Net(1.0, numel=numel), Net(0.0, numel=numel), mode=mode) for numel in (16, 8 << 20)
    )
    with small as small, large as large, beside(turn):
        # The other thread has the lock only while this thread is in no Python code.
        sys.setswitchinterval(100.0)
        try:
            # The small model shows the turns without copies: a call releases the lock briefly.
            # Sums over many rounds, because a busy machine decides when a thread runs.
            for rounds in range(1, 1000):
                few, many = few + turns_of(small), many + turns_of(large)
                if rounds >= 10 and many > 10 * max(few, 10 * rounds):
                    break
        finally:
            sys.setswitchinterval(interval)
            stop.set()
    assert many > 10 * max(few, 10 * rounds)


def test_several_threads_may_use_one_end():
    trainer, worker = Net(1.0), Net()
    with pair(trainer, worker, mode="copy") as (sender, receiver):
        got = []
        with beside(*[lambda: got.append(sender.send(wait="sent").version)] * 8):
            pass
        assert sorted(got) == list(range(2, 10))
        assert receiver.receive(LONG) is not None


def test_signals_with_a_handler_do_not_end_a_wait():
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(time.monotonic()))
    try:
        with pair(Net(1.0), Net()) as (sender, receiver):
            main = threading.get_native_id()

            def poke():
                # In the wait, or just before it.
                for _ in range(20):
                    os.kill(os.getpid(), signal.SIGUSR1)
                    os.sched_yield()
                sender.send(wait="sent")

            with beside(poke):
                assert receiver.receive(LONG) == 2
            assert seen and main
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("wait", ["receive", "background"])
def test_a_signals_handler_may_shut_down_what_waits(wait):
    with pair(Net(1.0), Net()) as (sender, receiver):
        background = receiver.start_background() if wait == "background" else None
        end = background or receiver
        before = signal.signal(signal.SIGUSR1, lambda *_: end.shutdown())
        try:
            with beside(lambda: signal.raise_signal(signal.SIGUSR1)):
                with pytest.raises(weightsync.LifecycleError):
                    receiver.receive(LONG) if background is None else _wait(background)
        finally:
            signal.signal(signal.SIGUSR1, before)
        end.shutdown()
        with pytest.raises(weightsync.LifecycleError):
            receiver.receive(0)


def _wait(background):
    background.wait(99, timeout=LONG)


def test_reentrant_call_of_an_end_is_refused():
    class Curious(Shaped):
        def load(self, snapshot):
            self.said = repr(self.receiver)
            self.receiver.receive(0)

    curious = Curious()
    sender = weightsync.Sender(Net(1.0))
    curious.receiver = weightsync.ModelReceiver(sender.init_info, model=curious)
    with all_ended(sender, curious.receiver):
        failed = []

        def connect():
            with pytest.raises(weightsync.LoadError, match="already in a call") as refused:
                curious.receiver.connect(timeout=LONG)
            failed.append(refused.value.__cause__)

        with beside(connect), pytest.raises(weightsync.WeightsyncError, match="already in a call"):
            sender.connect(1, timeout=LONG)
        assert isinstance(failed[0], weightsync.LifecycleError)
        assert "in a call" in curious.said
    del curious.receiver


def test_words_do_not_wait():
    with pair(Net(1.0), Net()) as (sender, receiver):
        begun = threading.Event()

        def wait():
            begun.set()
            with pytest.raises(weightsync.LifecycleError):
                receiver.receive(None)

        with beside(wait):
            begun.wait()
            while "in a call" not in repr(receiver):
                os.sched_yield()
            receiver.shutdown()


def test_background_can_be_shut_down_inside_frozen():
    with pair(Net(1.0), Net()) as (sender, receiver):
        background = receiver.start_background()
        with background:
            background.shutdown()
        background.shutdown()
