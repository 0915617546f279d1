"""Ranks that die, stand still, or never come: who is named, and what is left."""

import gc
import os
import signal
import threading
import time
import weakref

import pytest
from actors import Raised
from test_process_group import raised, send, start
from weightsync.process_group._group import _Sends

CLOSED = "the group is closed"


def test_death_of_a_receiver_is_named_before_a_send(ranks):
    made = start(ranks, world=4)
    assert send(made)[1] == [1, 1, 1]
    made[2].kill()
    for one in (made[1], made[3]):
        one.order("receive")
    kind, said = raised(lambda: made[0].ask("send"))
    assert kind == "PeerError" and f"pid {made[2].pid}) died" in said and "Distributed" in said, said
    # The others keep their weights, and are told why.
    for one in (made[1], made[3]):
        kind, why = raised(one.answer)
        assert kind == "PeerError" and f"pid {made[2].pid})" in why
        assert one.ask("values") == [0.0]
    # It says so from then on.
    kind, said = raised(lambda: made[0].ask("send"))
    assert kind == "PeerError" and CLOSED in said and f"pid {made[2].pid}" in said
    assert CLOSED in raised(lambda: made[1].ask("receive"))[1]


def test_message_that_gloo_forgets_ends_with_its_link():
    # gloo forgot 4 of some 850 on busy cores, where the member died just then.
    sends, sent, forgotten = _Sends(), threading.Event(), threading.Event()

    def send():
        sent.set()
        forgotten.wait()

    def end():
        sent.wait()
        sends.end(1)

    sends.send(2, lambda: None)
    ender = threading.Thread(target=end)
    ender.start()
    with pytest.raises(RuntimeError, match="has ended"):
        sends.send(1, send)
    ender.join()
    with pytest.raises(RuntimeError, match="has ended"):
        sends.send(1, lambda: None)
    sends.send(2, lambda: None)
    forgotten.set()


def test_failed_message_keeps_nothing():
    class Held:
        def fail(self):
            raise RuntimeError("cut")

    held = Held()
    gone = weakref.ref(held)
    gc.disable()
    try:
        with pytest.raises(RuntimeError, match="cut"):
            _Sends().send(1, held.fail)
        del held
        # The thread that had it ends a moment later.
        while threading.active_count() > 1 and gone() is not None:
            time.sleep(0.01)
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("victim", [1, 2, 3])
def test_death_of_a_receiver_during_a_send_is_named(ranks, victim):
    made = start(ranks, world=4, kind="20", fill=1.0)
    made[victim].ask("die_at", 1)
    for one in made[1:]:
        one.order("receive")
    kind, said = raised(lambda: made[0].ask("send"))
    assert kind == "PeerError" and f"pid {made[victim].pid}) died during v1" in said
    for at in {1, 2, 3} - {victim}:
        try:
            # It may have had all of it when another died.
            assert made[at].answer() == 1 and made[at].ask("values") == [1.0]
        except Raised as error:
            assert error.kind == "PeerError" and made[at].ask("values") == [-1.0]


def test_death_of_the_sender_while_receivers_wait(ranks):
    made = start(ranks)
    for one in made[1:]:
        one.order("receive", None)
    made[0].kill()
    for one in made[1:]:
        kind, said = raised(one.answer)
        assert kind == "PeerError" and f"pid {made[0].pid}), died" in said
        one.ask("shutdown")


def test_death_of_the_sender_during_a_send(ranks):
    made = start(ranks, world=4, kind="20", fill=1.0)
    made[0].ask("die_at", 3)
    for one in made[1:]:
        one.order("receive")
    made[0].order("send")
    for one in made[1:]:
        kind, said = raised(one.answer)
        assert kind == "PeerError" and one.ask("values") == [-1.0]


def test_receiver_that_never_comes_is_named_in_time(ranks):
    made = start(ranks)
    made[0].ask("wait_at_most", 2.0)
    made[2].order("receive")
    kind, said = raised(lambda: made[0].ask("send"))
    assert kind == "DeadlineError" and f"pid {made[1].pid}" in said
    assert f"pid {made[2].pid}" not in said and CLOSED in said
    try:
        assert made[2].answer() == 1
    except Raised as error:
        assert error.kind == "PeerError"
    # It comes too late.
    kind, said = raised(lambda: made[1].ask("receive"))
    assert kind == "PeerError" and made[1].ask("values") == [-1.0]


def test_receiver_that_stands_still_is_named_in_time(ranks):
    made = start(ranks, kind="20")
    made[0].ask("wait_at_most", 2.0)
    made[2].order("receive")
    made[1].signal(signal.SIGSTOP)
    kind, said = raised(lambda: made[0].ask("send"))
    assert kind == "DeadlineError" and f"pid {made[1].pid}" in said
    made[1].signal(signal.SIGCONT)


def test_slow_gathering_is_the_trainers_fault(ranks):
    made = start(ranks, kind="20")
    # Receivers are not told of the first piece before it is there.
    made[0].ask("gather_slowly", 0)
    assert send(made)[1] == [1, 1]
    made[0].ask("gather_slowly", 1)
    for one in made[1:]:
        one.order("receive")
    kind, said = raised(lambda: made[0].ask("send"))
    assert kind == "DeadlineError" and "a rank of the trainer is late" in said and CLOSED in said
    assert "receiver" not in said.partition(CLOSED)[0] and f"pid {made[1].pid}" not in said
    for one in made[1:]:
        assert raised(one.answer)[0] == "PeerError"


def test_late_receiver_takes_what_has_begun(ranks):
    made = start(ranks)
    made[0].order("send")
    assert made[1].ask("receive") == 1
    # The message is there, and nothing else has come of the version.
    assert made[2].ask("begun") and made[2].ask("version") == 0
    assert made[2].ask("receive") == 1
    assert [line["outcome"] for line in made[0].answer()["ranks"]] == ["applied"] * 2


def test_receiver_that_left_after_its_answer_counts(ranks):
    made = start(ranks)
    made[0].order("send")
    assert made[1].ask("receive") == 1
    made[1].ask("shutdown")
    assert made[2].ask("receive") == 1
    assert [line["outcome"] for line in made[0].answer()["ranks"]] == ["applied"] * 2
    kind, said = raised(lambda: made[0].ask("send"))
    assert kind == "PeerError" and f"pid {made[1].pid}) has left before v2" in said


def test_ranks_that_are_left_open_a_new_group(ranks):
    made = start(ranks)
    for one in made[1:]:
        one.order("receive")
    made[0].ask("send")
    for one in made[1:]:
        one.answer()
    made[2].ask("shutdown")
    assert raised(lambda: made[0].ask("send"))[0] == "PeerError"
    # All are alive here: they meet at the next attempt.
    for one in made[::-1]:
        one.order("open", "dict", 1.0)
    for one in made:
        one.answer()
    assert send(made)[1] == [1, 1]
