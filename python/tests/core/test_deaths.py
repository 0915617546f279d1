"""Who dies costs the others nothing; nobody ever reads half of a version."""

import os
import signal
import time

import pytest
import weightsync
from actors import Raised
from ends import LONG, MODES, NEWEST, PUSHING, Net, beside


class Worker:
    """A worker that loads into its own model."""

    def __init__(self, info, index, mode="bind", numel=32 * 1024, model=True):
        self.model = Net(0.0, numel) if model else None
        self.info, self.reader = info, None
        self.receiver = weightsync.ModelReceiver(info, index, model=self.model, mode=mode)

    def connect(self, timeout=LONG):
        self.receiver.connect(timeout=timeout)
        return self.receiver.version

    def receive(self, timeout=LONG):
        return self.receiver.receive(timeout), self.model.value

    def value(self):
        return self.model.value

    def hold(self):
        """Holds the newest version, as another receiver of this process has it."""
        if self.reader is None:
            self.reader = weightsync.Receiver(self.info, self.receiver.worker + 100)
            self.reader.connect(timeout=LONG)
        self.held = self.reader.latest()
        return self.held.version

    def held_values(self):
        return [float(tensor.min()) for tensor in self.held.values()]

    def follow(self, until):
        """Receives until the model has a value, and reads it all the time."""
        seen = []
        while True:
            try:
                self.receiver.receive(0)
            except weightsync.PeerError:
                break
            low, high = self.model()
            if low != high:
                return "torn", low, high
            if not seen or seen[-1] != low:
                seen.append(low)
            if low >= until:
                break
        return "whole", seen == sorted(seen), len(seen)

    def background(self):
        """A loop that never receives."""
        self.following = self.receiver.start_background()

    def watch(self, until):
        seen = set()
        while True:
            low, high = self.model()
            if low != high:
                return "torn", low, high
            seen.add(low)
            if low >= until:
                return "whole", True, len(seen)

    def state(self):
        return self.following.state


class Trainer:
    """A sender in a process of its own."""

    def __init__(self, scheme="shared-mem", run_dir=None, numel=32 * 1024, fill=1.0, **how):
        self.model = Net(fill, numel)
        self.sender = weightsync.Sender(self.model, scheme=scheme, run_dir=run_dir, **how)

    def info(self):
        return self.sender.init_info

    def connect(self, workers):
        self.sender.connect(workers, timeout=LONG)

    def send(self, value, wait="applied"):
        self.model.fill(value)
        return self.sender.send(wait=wait, timeout=LONG).all_applied

    def send_for_ever(self):
        value = self.model.value
        while True:
            value += 1.0
            self.model.fill(value)
            self.sender.send(wait="sent", timeout=LONG)

    def fork(self):
        """A child that lives on, with everything this process has."""
        pid = os.fork()
        if pid == 0:
            signal.pause()
        return pid


@pytest.mark.parametrize("start", ["server", "fork"])
@pytest.mark.parametrize("scheme", PUSHING)
def test_killed_worker_is_a_line_and_delays_no_other(actor, scheme, start):
    trainer = Net(1.0)
    with weightsync.Sender(trainer, scheme=scheme) as sender:
        workers = [actor(Worker, sender.init_info, at, start=start) for at in range(2)]
        for worker in workers:
            worker.order("connect")
        sender.connect(2, timeout=LONG)
        assert [worker.answer() for worker in workers] == [1, 1]
        trainer.fill(2.0)
        pending = sender.send_async()
        assert workers[1].ask("receive") == (2, 2.0)
        # It ends the wait, which had no end of its own.
        begun = time.monotonic()
        with beside(workers[0].kill):
            report = pending.wait(LONG)
        assert time.monotonic() - begun < LONG / 2
        lines = {line.worker: line for line in report.workers}
        assert (lines[0].outcome, lines[1].outcome) == ("died", "applied")
        assert lines[0].pid == workers[0].pid
        assert str(workers[0].pid) in str(report)
        # Its number is free.
        again = actor(Worker, sender.init_info, 0, start=start)
        again.order("connect")
        sender.wait_for([0, 1], timeout=LONG)
        assert again.answer() == 2
        assert again.ask("value") == 2.0


@pytest.mark.parametrize("mode", MODES)
def test_slots_of_a_killed_worker_are_free(actor, mode):
    trainer = Net(1.0)
    with weightsync.Sender(trainer, slots=(2, 2)) as sender:
        holder = actor(Worker, sender.init_info, 3, mode)
        holder.order("connect")
        sender.connect([3], timeout=LONG)
        holder.answer()
        assert holder.ask("hold") == 1
        sender.send(wait="sent")
        holder.ask("receive")
        holder.order("hold")
        holder.answer()
        holder.signal(signal.SIGSTOP)
        if mode == "bind":
            sender.send(wait="sent", timeout=LONG)
            with pytest.raises(weightsync.DeadlineError, match=str(holder.pid)):
                sender.send(wait="sent", timeout=0.05)
        with beside(holder.kill):
            for _ in range(5):
                sender.send(wait="sent", timeout=LONG)


@pytest.mark.parametrize("scheme", PUSHING)
@pytest.mark.parametrize("mode", MODES)
def test_killed_sender_is_noticed_and_the_weights_stay(actor, mode, scheme):
    trainer = actor(Trainer, scheme)
    info = trainer.ask("info")
    worker = Net()
    with weightsync.ModelReceiver(info, model=worker, mode=mode) as receiver:
        reader = weightsync.Receiver(info, 1)
        trainer.order("connect", 2)
        receiver.connect(timeout=LONG)
        reader.connect(timeout=LONG)
        trainer.answer()
        trainer.ask("send", 2.0, "sent")
        assert receiver.receive(LONG) == 2
        while (held := reader.receive(LONG)).version < 2:
            pass
        with pytest.raises(weightsync.PeerError) as died, beside(trainer.kill):
            receiver.receive(None)
        assert died.value.remedy == "reconnect"
        assert not isinstance(died.value, weightsync.SenderClosedError)
        assert worker.value == 2.0
        assert held["large"].unique().tolist() == [2.0]
        with pytest.raises(weightsync.PeerError):
            receiver.receive(0)
        # Also what is made of it only now.
        seen = reader.latest()
        assert seen is None or seen["mean"].tolist() == [2.0] * 5
        reader.shutdown()
        del seen
    assert worker.value == 2.0
    assert held.numpy()["mean"].tolist() == [2.0] * 5
    del held


@pytest.mark.parametrize("scheme", NEWEST)
def test_sender_killed_in_a_write_leaves_whole_ones(actor, scheme):
    for _ in range(3):
        trainer = actor(Trainer, scheme, None, 1 << 20)
        info = trainer.ask("info")
        worker = Net(0.0, 1 << 20)
        with weightsync.ModelReceiver(info, model=worker) as receiver:
            trainer.order("connect", 1)
            receiver.connect(timeout=LONG)
            trainer.answer()
            trainer.order("send_for_ever")
            for _ in range(10):
                receiver.receive(LONG)
                assert worker.value >= 1.0
            trainer.kill()
            with pytest.raises(weightsync.PeerError):
                while True:
                    receiver.receive(LONG)
            assert worker.value >= 1.0


@pytest.mark.parametrize("with_child", [False, True])
@pytest.mark.parametrize("background", [False, True])
def test_killed_trainer_is_found_again_by_directory(actor, tmp_path, background, with_child):
    first = actor(Trainer, "shared-mem", tmp_path)
    info = first.ask("info")
    # One of before the workers came, which has the listener, too; one of after.
    children = [first.ask("fork")] if with_child else []
    try:
        worker = actor(Worker, info, 0)
        worker.order("connect")
        first.ask("connect", 1)
        worker.answer()
        if with_child:
            children.append(first.ask("fork"))
        if background:
            worker.ask("background")
        first.kill()
        second = actor(Trainer, "shared-mem", tmp_path, 32 * 1024, 5.0)
        second.order("connect", [0])
        if background:
            assert worker.ask("watch", 5.0)[0] == "whole"
        else:
            # The death is said once; what is waited for next is the successor's.
            with pytest.raises(Raised, match="died") as died:
                worker.ask("receive")
            assert died.value.kind == "PeerError"
            assert worker.ask("receive")[1] == 5.0
        # One that comes only now finds it by the old init info.
        late = actor(Worker, info, 1)
        late.ask("connect")
        assert late.ask("value") == 5.0
        second.answer()
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("scheme", PUSHING)
def test_a_sender_killed_while_it_connects(actor, scheme):
    trainer = actor(Trainer, scheme)
    with weightsync.ModelReceiver(trainer.ask("info"), model=Net()) as receiver:
        # It waits for one more than there is.
        trainer.order("connect", 2)
        receiver.connect(timeout=LONG)
        with pytest.raises(weightsync.PeerError), beside(trainer.kill):
            receiver.receive(None)
        assert receiver.version == 1
        with pytest.raises(weightsync.WeightsyncError):
            receiver.connect(timeout=0.1)


def test_second_trainer_of_a_directory_is_refused(tmp_path):
    with weightsync.Sender(Net(1.0), run_dir=tmp_path) as sender:
        sender.connect(0)
        with pytest.raises(weightsync.WeightsyncError) as refused:
            with weightsync.Sender(Net(1.0), run_dir=tmp_path) as second:
                second.connect(0, timeout=0.05)
        assert "another sender or another program uses it" in str(refused.value)
        # Nobody notices it.
        sender.send()
    with weightsync.Sender(Net(1.0), run_dir=tmp_path) as third:
        third.connect(0)


@pytest.mark.parametrize("moment", [0.0, 0.001, 0.01, 0.05])
def test_worker_killed_in_connect_can_join_again(actor, moment):
    with weightsync.Sender(Net(1.0)) as sender:
        unlucky = actor(Worker, sender.init_info, 0)
        unlucky.order("connect")

        def kill():
            deadline = time.monotonic() + moment
            while time.monotonic() < deadline:
                os.sched_yield()
            unlucky.kill()
            actor(Worker, sender.init_info, 0).order("connect")

        with beside(kill):
            sender.connect([0], timeout=LONG)
            report = sender.send(timeout=1.0)
        assert [line.worker for line in report.workers] in ([0], [0, 0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["follow", "watch"])
def test_no_torn_reads_at_full_speed(actor, way, mode):
    numel = 8 << 20
    trainer = Net(1.0, numel)
    with weightsync.Sender(trainer) as sender:
        workers = [actor(Worker, sender.init_info, at, mode, numel) for at in range(2)]
        for worker in workers:
            worker.order("connect")
        sender.connect(2, timeout=LONG)
        for worker in workers:
            worker.answer()
            if way == "watch":
                worker.ask("background")
        last = 1e6
        for worker in workers:
            worker.order(way, last)
        until, value = time.monotonic() + 3.0, 1.0
        while time.monotonic() < until:
            value += 1.0
            trainer.fill(value)
            sender.send(wait="sent", timeout=LONG)
            assert not any(worker.has_answered() for worker in workers)
        trainer.fill(last)
        sender.send(wait="sent", timeout=LONG)
        for worker in workers:
            how, in_order, versions = worker.answer()
            assert (how, in_order) == ("whole", True)
            assert versions > 3
