"""Calls of two threads at one end: each waits for its turn no longer than its timeout."""

import contextlib
import os
import threading
import time

import pytest
import weightsync
from ends import LONG, Net, all_ended, beside, meet, pair
from patience import patience
from weightsync._turns import Turns

# What the second call waits for. Nothing but its end would make the first one return.
SHORT = 0.2


def during(call, end, *calls):
    """Makes calls while another thread is in one of the same end, which a shutdown ends."""

    def wait():
        # What is there already is no wait.
        with contextlib.suppress(weightsync.LifecycleError):
            while True:
                call()

    with beside(wait):
        try:
            for one in calls:
                # A call of this thread may have had the turn before.
                while "in a call" not in repr(end):
                    os.sched_yield()
                began = time.monotonic()
                one()
                assert time.monotonic() - began < patience(10)
        finally:
            end.shutdown()


def late(call, other):
    """Checks that a call ends, and names the call that was in its way, and that call's thread."""

    def check():
        with pytest.raises(weightsync.DeadlineError) as raised:
            call()
        said = str(raised.value)
        assert f"was in {other} of this end" in said and "'Thread-" in said, said
        assert raised.value.remedy == "retry" and f"all of {SHORT:g} s" in said

    return check


def nothing(call):
    def check():
        assert call() is None

    return check


def test_call_of_a_sender_ends_while_another_thread_waits_for_workers():
    trainer = Net(1.0)
    with pair(trainer, Net()) as (sender, _):
        before = sender.snapshot()
        calls = [
            lambda: sender.send(timeout=SHORT),
            lambda: sender.send(before, timeout=SHORT),
            lambda: sender.send_async(timeout=SHORT),
            lambda: sender.send_each({0: trainer}, timeout=SHORT),
            lambda: sender.wait_for([9], timeout=SHORT),
            lambda: sender.connect(9, timeout=SHORT),
        ]
        waits = lambda: sender.wait_for([8], timeout=None)  # noqa: E731
        during(waits, sender, *(late(call, "wait_for") for call in calls))


def test_send_takes_the_senders_own_timeout_while_another_thread_waits():
    with pair(Net(1.0), Net(), setup={"timeout": SHORT}) as (sender, _):
        during(lambda: sender.wait_for([8], timeout=None), sender, late(sender.send, "wait_for"))


def test_call_of_a_sender_ends_while_another_thread_connects():
    sender = weightsync.Sender(Net(1.0))
    calls = [lambda: sender.connect(8, timeout=SHORT), lambda: sender.send(timeout=SHORT)]
    during(lambda: sender.connect(9, timeout=None), sender, *(late(call, "connect") for call in calls))


def test_send_ends_while_another_thread_sends():
    # A worker that takes nothing keeps the first send for ever.
    with pair(Net(1.0), Net()) as (sender, _):
        during(lambda: sender.send(timeout=None), sender, late(lambda: sender.send(timeout=SHORT), "send"))


@pytest.mark.parametrize("kind", ["snapshots", "models"])
def test_call_of_a_receiver_ends_while_another_thread_receives(kind):
    with pair(Net(1.0), None if kind == "snapshots" else Net()) as (sender, receiver):
        calls = [
            nothing(lambda: receiver.receive(SHORT)),
            nothing(lambda: receiver.receive(0)),
            nothing(lambda: receiver.receive_set(SHORT)),
            nothing(lambda: receiver.pull(at_least=9, timeout=SHORT)),
            late(lambda: receiver.connect(timeout=SHORT), "receive"),
        ]
        # The first weights: from here on a call that waits for weights waits for ever.
        while receiver.receive(SHORT) is not None:
            pass
        during(lambda: receiver.receive(None), receiver, *calls)


@pytest.mark.parametrize("kind", ["snapshots", "models"])
def test_call_of_a_receiver_ends_while_another_thread_connects(kind):
    nowhere = weightsync.Sender(Net(1.0))
    if kind == "snapshots":
        receiver = weightsync.Receiver(nowhere.init_info, 0)
    else:
        receiver = weightsync.ModelReceiver(nowhere.init_info, 0, model=Net())
    calls = [late(lambda: receiver.connect(timeout=SHORT), "connect"), nothing(lambda: receiver.receive(SHORT))]
    during(lambda: receiver.connect(timeout=None), receiver, *calls)


def test_call_of_a_cascade_ends_while_another_thread_passes_on():
    sender = weightsync.Sender(Net(1.0))
    joined = []
    with beside(lambda: joined.append(weightsync.Cascade(sender.init_info, 0, timeout=LONG))):
        sender.connect(0, timeout=LONG)
    cascade = joined[0]
    below = weightsync.ModelReceiver(cascade.init_info, 0, model=Net())
    with all_ended(sender, cascade, below):
        meet(cascade, below)
        calls = [
            nothing(lambda: cascade.forward(SHORT)),
            late(lambda: cascade.connect(1, timeout=SHORT), "forward"),
        ]
        during(lambda: cascade.forward(None), cascade, *calls)


def test_turn_that_comes_leaves_the_rest_of_the_timeout():
    turns, taken, go_on = Turns(), threading.Event(), threading.Event()

    def hold():
        with turns.take("hold", None) as left:
            assert left is None
            taken.set()
            go_on.wait(LONG)

    with beside(hold):
        taken.wait(LONG)
        threading.Timer(0.1, go_on.set).start()
        with turns.take("wait", LONG) as left:
            assert left < LONG
    with turns.take("again", LONG) as left:
        assert left == LONG
        with pytest.raises(weightsync.LifecycleError, match="within: this thread is already in again"):
            with turns.take("within", LONG):
                pass
    with turns.take("then", 0) as left:
        assert left == 0
