"""Who stands still, is silent or has gone, and what a report says of it."""

import signal
import sys
import threading
import time

import pytest
import torch
import weightsync
from ends import FAR, LONG, Net, Shaped, beside
from test_deaths import Trainer, Worker


@pytest.mark.parametrize("scheme", ["shared-mem", "multi-process", "rpc:initial=connect"])
def test_a_stopped_worker_costs_one_send_its_deadline(actor, scheme):
    trainer = Net(1.0)
    with weightsync.Sender(trainer, scheme=scheme, slots=(2, 8)) as sender:
        worker = actor(Worker, sender.init_info, 0)
        worker.order("connect")
        sender.connect(1, timeout=LONG)
        assert worker.answer() == 1
        worker.signal(signal.SIGSTOP)
        report = sender.send(timeout=0.3)
        line = report.worker(0)
        assert (line.outcome, line.late, report.all_applied) == ("late", None, False)
        assert report.took >= 0.3
        # It would take all the time of this test.
        for _ in range(3):
            report = sender.send(timeout=2 * LONG)
            line = report.worker(0)
            assert line.outcome == "late" and line.late >= 0.3
            assert report.took < LONG and not report.all_applied
            assert report.failed[0].worker == 0
            assert "was not waited for; it goes on with v1" in str(report)
        pending = sender.send_async(timeout=2 * LONG)
        assert pending.is_settled and not pending.wait().all_applied
        report = sender.send(timeout=0.3, wait_late=True)
        assert report.worker(0).late is None and report.took >= 0.3
        worker.signal(signal.SIGCONT)
        version = 1
        while version < sender.version:
            version, _ = worker.ask("receive")
        # It has moved.
        worker.order("receive")
        assert sender.send(timeout=LONG).all_applied
        worker.answer()


@pytest.mark.parametrize("scheme", ["shared-mem", *FAR])
def test_background_receiver_sees_an_orderly_end(tmp_path, scheme):
    trainer, model = Net(1.0), Net()
    run_dir = tmp_path / "run"
    sender = weightsync.Sender(trainer, scheme=scheme, run_dir=run_dir)
    receiver = weightsync.ModelReceiver(sender.init_info, 0, model=model)
    with beside(lambda: receiver.connect(timeout=LONG)):
        sender.connect(1, timeout=LONG)
    with_thread = receiver.start_background()
    sender.shutdown()
    # Without a timeout, as a worker's main thread would.
    assert not with_thread.wait(2)
    assert with_thread.state == "closed"
    # One that comes back all the same is followed.
    with weightsync.Sender(trainer.fill(5.0), scheme=scheme, run_dir=run_dir) as again:
        again.connect(1, timeout=LONG)
        assert again.send().all_applied
        assert (with_thread.state, model.value) == ("following", 5.0)
    assert not with_thread.wait(3)
    with_thread.shutdown()


# As long as one took that was given up: by ten seconds of silence, and for `rpc` of as much
# again for another attempt.
@pytest.mark.parametrize(
    ("scheme", "seconds"), [(FAR[0], 14), pytest.param(FAR[1], 32, marks=pytest.mark.soak)]
)
def test_a_trainer_that_was_stopped_finds_its_workers(actor, scheme, seconds):
    trainer = actor(Trainer, scheme)
    info = trainer.ask("info")
    workers = [actor(Worker, info, index) for index in range(2)]
    trainer.order("connect", 2)
    for worker in workers:
        worker.order("connect")
    trainer.answer()
    assert [worker.answer() for worker in workers] == [1, 1]
    trainer.signal(signal.SIGSTOP)
    for worker in workers:
        worker.order("receive", seconds)
    assert [worker.answer(seconds + LONG) for worker in workers] == [(None, 1.0)] * 2
    trainer.signal(signal.SIGCONT)
    for worker in workers:
        worker.ask("background")
    # They may be lost for a moment, and are then back without a call.
    until = time.monotonic() + LONG
    trainer.ask("send", 2.0)
    while [worker.ask("value") for worker in workers] != [2.0, 2.0]:
        assert time.monotonic() < until
    while not trainer.ask("send", 3.0):
        assert time.monotonic() < until
    assert [worker.ask("value") for worker in workers] == [3.0, 3.0]


def test_receiver_moves_to_another_sender_for_good():
    first, second = (weightsync.Sender(Net(value)) for value in (1.0, 3.0))
    worker, done = Net(), threading.Event()
    for sender in (first, second):
        sender.connect(0)
    receiver = weightsync.ModelReceiver(first.init_info, 0, model=worker, mode="copy")
    receiver.connect(timeout=LONG)
    background = receiver.start_background()
    run = receiver.run

    def move():
        receiver.rejoin(second.init_info, timeout=LONG)
        done.set()

    with receiver.frozen():
        # A version of the first sender waits for the block to end, and so does the move.
        first.send(Net(2.0), wait="sent")
        moving = threading.Thread(target=move)
        moving.start()
        assert not done.wait(0.2)
        assert worker.value == 1.0
    moving.join(LONG)
    assert (worker.value, receiver.version) == (3.0, 1)
    assert receiver.run != run and receiver.info == second.init_info
    # Nothing of the first sender comes any more, and the guard is that of the second.
    first.send(Net(4.0), wait="sent")
    assert worker.value == 3.0
    with receiver.frozen():
        second.send(Net(5.0), wait="sent")
        assert worker.value == 3.0
    assert background.wait(2, timeout=LONG) and worker.value == 5.0
    receiver.shutdown()
    with pytest.raises(weightsync.LifecycleError):
        receiver.rejoin(first.init_info, timeout=LONG)
    # Without a thread there is nothing to exchange.
    receiver = weightsync.ModelReceiver(second.init_info, 0, model=worker)
    receiver.connect(timeout=LONG)
    with pytest.raises(weightsync.LifecycleError, match="before start_background"):
        receiver.rejoin(first.init_info, timeout=LONG)
    receiver.shutdown()
    for sender in (first, second):
        sender.shutdown()


@pytest.mark.parametrize("version", [None, 7])
def test_background_waits_on_after_a_move(version):
    first, second = weightsync.Sender(Net(1.0)), weightsync.Sender(Net(3.0))
    first.connect(0)
    second.connect(0, version=7)
    receiver = weightsync.ModelReceiver(first.init_info, 0, model=Net(), mode="copy")
    receiver.connect(timeout=LONG)
    background, begins, said = receiver.start_background(), threading.Event(), []

    def wait():
        begins.set()
        said.append(background.wait(version, timeout=LONG))

    waiting = threading.Thread(target=wait)
    waiting.start()
    begins.wait(LONG)
    # It is most likely inside the wait by then.
    waiting.join(0.2)
    receiver.rejoin(second.init_info, timeout=LONG)
    while waiting.is_alive():
        # A wait that began after the move is one for another version.
        second.send(wait="sent")
        waiting.join(0.1)
    assert said == [True] and receiver.version >= 7
    receiver.shutdown()
    with pytest.raises(weightsync.LifecycleError):
        background.wait(version, timeout=LONG)
    for sender in (first, second):
        sender.shutdown()


def test_move_ends_by_its_deadline_if_held():
    first, second = weightsync.Sender(Net(1.0)), weightsync.Sender(Net(3.0))
    for sender in (first, second):
        sender.connect(0)
    worker = Net()
    receiver = weightsync.ModelReceiver(first.init_info, 0, model=worker, mode="copy")
    receiver.connect(timeout=LONG)
    receiver.start_background("declared")
    holds, may_end = threading.Event(), threading.Event()

    def hold():
        with receiver.frozen():
            holds.set()
            may_end.wait(LONG)

    holding = threading.Thread(target=hold)
    holding.start()
    holds.wait(LONG)
    with pytest.raises(weightsync.DeadlineError, match="rejoin|guard"):
        receiver.rejoin(second.init_info, timeout=0.3)
    assert receiver.info == first.init_info and worker.value == 1.0
    may_end.set()
    holding.join()
    receiver.rejoin(second.init_info, timeout=LONG)
    assert receiver.info == second.init_info and worker.value == 3.0
    receiver.shutdown()
    for sender in (first, second):
        sender.shutdown()


class Halves(Shaped):
    """A target of two halves, whose load of one value ends between them."""

    def __init__(self, refused):
        self.values, self.refused = [0.0, 0.0], refused

    def load(self, snapshot):
        value = float(weightsync.Snapshot(snapshot)["it"][0])
        self.values[0] = value
        if value == self.refused:
            raise ValueError(f"no {value}")
        self.values[1] = value


@pytest.mark.parametrize("safe_points", ["implied", "declared"])
def test_receiver_keeps_its_version_if_a_move_fails_midway(safe_points):
    weights = {"it": torch.ones(3)}
    first, second = weightsync.Sender(weights), weightsync.Sender({"it": torch.full((3,), 7.0)})
    for sender in (first, second):
        sender.connect(0)
    target = Halves(refused=7.0)
    receiver = weightsync.ModelReceiver(first.init_info, 0, model=target)
    receiver.connect(timeout=LONG)
    background = receiver.start_background(safe_points)
    for round in range(2):
        with pytest.raises(weightsync.LoadError, match="no 7"):
            receiver.rejoin(second.init_info, timeout=LONG)
        value = round + 1.0
        with receiver.frozen():
            assert target.values == [value, value]
        # It still follows the first sender.
        weights["it"].fill_(value + 1)
        first.send(wait="sent")
        assert background.wait(round + 2, timeout=LONG)
        assert target.values == [value + 1] * 2 and background.failure is None
    target.refused = None
    receiver.rejoin(second.init_info, timeout=LONG)
    assert target.values == [7.0, 7.0]
    receiver.shutdown()
    for sender in (first, second):
        sender.shutdown()


def test_receiver_is_of_one_sender_wherever_ctrl_c_comes():
    senders = [weightsync.Sender({"it": torch.full((3,), value)}) for value in (1.0, 2.0)]
    for sender in senders:
        sender.connect(0)
    target = Halves(refused=None)
    receiver = weightsync.ModelReceiver(senders[0].init_info, 0, model=target)
    receiver.connect(timeout=LONG)
    background = receiver.start_background()
    traced = [type(receiver).rejoin.__code__, type(background)._move.__code__]
    traced += [code for code in traced[1].co_consts if getattr(code, "co_name", "") == "exchange"]

    def interrupt_at(line):
        def trace(frame, event, _):
            nonlocal line
            if event == "line":
                line -= 1
                if line == 0:
                    raise KeyboardInterrupt
            return trace

        return lambda frame, event, _: trace if frame.f_code in traced else None

    lines, follows = 1, 0
    while True:
        sys.settrace(interrupt_at(lines))
        try:
            receiver.rejoin(senders[1 - follows].init_info, timeout=LONG)
            finished = True
        except KeyboardInterrupt:
            finished = False
        finally:
            sys.settrace(None)
        follows = [sender.init_info for sender in senders].index(receiver.info)
        assert target.values == [follows + 1.0] * 2
        # It gets what this sender sends, and nothing of the other.
        version = senders[follows].send(wait="sent").version
        assert background.wait(version, timeout=LONG) and background.failure is None
        assert senders[follows].workers
        if finished:
            break
        lines += 1
    assert lines > 10
    receiver.shutdown()
    for sender in senders:
        sender.shutdown()
