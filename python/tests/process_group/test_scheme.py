"""TorchRL's scheme over a process group."""

import threading

from patience import patience
import pytest
from group_ranks import LONG
from test_process_group import raised
from weightsync.torchrl._model_lock import ModelLock


def connect(ranks, world=3, **how):
    made = ranks(world)
    for one in made:
        one.order("scheme", **how)
    for one in made:
        one.answer()
    return made


def test_scheme_runs_the_lifecycle(ranks):
    made = connect(ranks)
    # The first weights came with connect.
    assert [one.ask("scheme_values") for one in made] == [[3.0]] * 3
    made[0].ask("fill", 4.0)
    for one in made[1:]:
        one.order("scheme_receive")
    assert made[0].ask("scheme_send") == 2
    assert [one.answer() for one in made[1:]] == [True, True]
    assert [one.ask("scheme_values") for one in made[1:]] == [[4.0]] * 2
    assert made[1].ask("scheme_receive", 0.0) is False
    for one in made:
        one.ask("scheme_shutdown")


@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
def test_scheme_follows_in_a_thread(ranks, strategy):
    made = connect(ranks, sync=False, strategy=strategy)
    for version in (2, 3):
        made[0].ask("fill", float(version))
        assert made[0].ask("scheme_send") == version
        for one in made[1:]:
            assert one.ask("scheme_receive") and one.ask("scheme_values") == [float(version)]
    made[0].ask("scheme_shutdown")
    assert raised(lambda: made[1].ask("scheme_receive"))[0] == "SenderClosedError"
    for one in made[1:]:
        one.ask("scheme_shutdown")


def test_forward_without_an_end_refuses_a_version(ranks):
    made = connect(ranks, world=2, sync=False)
    made[1].ask("scheme_freeze")
    assert made[0].ask("scheme_send") == 2
    kind, said = raised(lambda: made[1].ask("scheme_receive"))
    assert kind == "LoadError" and "did not end in time" in said
    made[1].ask("scheme_thaw")
    assert made[1].ask("scheme_values") == [3.0]
    # The group goes on.
    made[0].ask("fill", 5.0)
    assert made[0].ask("scheme_send") == 3
    assert made[1].ask("scheme_receive") and made[1].ask("scheme_values") == [5.0]


def test_forward_goes_first_while_a_version_waits(ranks):
    made = connect(ranks, world=2, sync=False)
    made[1].ask("scheme_hold")
    made[0].order("scheme_send")
    assert made[1].ask("scheme_frozen_forward") is True
    assert made[0].answer() == 2
    assert made[1].ask("scheme_receive")


def test_receive_inside_frozen_is_refused(ranks):
    made = connect(ranks, world=2, sync=False)
    kind, said = raised(lambda: made[1].ask("scheme_frozen_receive"))
    assert kind == "LifecycleError" and "frozen()" in said


def test_dropped_scheme_ends_its_thread(ranks):
    made = connect(ranks, world=2, sync=False)
    assert made[1].ask("scheme_drop")
    kind, said = raised(lambda: made[0].ask("scheme_send"))
    assert kind == "PeerError" and f"pid {made[1].pid}) has left before v2" in said


def test_shutdown_inside_frozen_ends(ranks):
    made = connect(ranks, world=2, sync=False)
    made[1].ask("scheme_frozen_shutdown")


def test_connect_without_first_weights_names_the_rank(ranks):
    made = ranks(2, 3.0)
    made[0].order("open", "net", 1.0, timeout=patience(30))
    made[1].order("scheme")
    kind, said = raised(made[1].answer)
    assert kind == "DeadlineError" and "rank 0 has not sent the first weights" in said
    made[0].answer()
    assert "has left before v1" in raised(lambda: made[0].ask("send"))[1]


def test_connect_goes_on_after_a_failed_call(ranks):
    made = ranks(2)
    made[0].order("scheme_connect_again")
    made[1].order("scheme")
    assert made[0].answer() is True
    made[1].answer()
    assert made[1].ask("scheme_values") == [3.0]


def test_scheme_refuses_what_a_broadcast_cannot(ranks):
    made = connect(ranks)
    assert raised(lambda: made[0].ask("scheme_send", [0]))[0] == "UnsupportedError"
    assert raised(lambda: made[0].ask("scheme_pickle"))[0] == "LifecycleError"


def test_forwards_that_overlap_do_not_keep_a_version_out():
    lock, over = ModelLock(), threading.Event()
    running = [threading.Event(), threading.Event()]

    def forwards(me):
        while not over.is_set():
            lock.acquire()
            running[me].set()
            # Ends when the other one runs, or waits to run.
            running[1 - me].wait(0.05)
            running[me].clear()
            lock.release()

    threads = [threading.Thread(target=forwards, args=(me,)) for me in range(2)]
    for one in threads:
        one.start()
    assert lock.enter_alone(LONG)
    lock.leave_alone()
    over.set()
    for one in threads:
        one.join()
