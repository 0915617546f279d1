"""Receiving in a thread of its own: safe points, forwards that stay whole, ends."""

import copy
import gc
import io
import os
import sys
import threading
import time

import pytest
import torch
import weightsync
from ends import LONG, MODES, PUSHING, Net, Shaped, all_ended, beside, meet, pair, pass_on
from torch import nn


def _applied(sender, value=None, **how):
    report = sender.send(timeout=LONG, **how)
    assert report.all_applied, report
    return report


@pytest.mark.parametrize("scheme", PUSHING)
@pytest.mark.parametrize("mode", MODES)
def test_an_idle_loop_gets_what_is_sent(mode, scheme):
    trainer, worker = Net(1.0), Net()
    with pair(trainer, worker, mode=mode, setup={"scheme": scheme}) as (sender, receiver):
        background = receiver.start_background()
        for value in (2.0, 3.0, 4.0):
            trainer.fill(value)
            _applied(sender)
            assert worker.value == value
            assert (background.version, background.versions) == (sender.version, sender.versions)
        assert background.state == "following"
        assert background.failure is None
        assert background.run == receiver_run(sender)
        assert "0x" not in repr(background) and "policy v4" in repr(background)
        background.shutdown()
        background.shutdown()
        # What it has is its own now.
        assert worker.value == 4.0
        with pytest.raises(weightsync.LifecycleError):
            background.wait(timeout=0)
        with pytest.raises(weightsync.LifecycleError):
            receiver.receive(0)


class Interval(dict):
    """A worker's model that notes the interpreter's switch interval when it is loaded into."""

    during = None
    sets = None

    def items(self):
        if (now := sys.getswitchinterval()) != 0.005:
            self.during = now
            if self.sets is not None:
                sys.setswitchinterval(self.sets)
        return super().items()


@pytest.mark.parametrize("sets", [None, 0.002])
def test_load_shortens_the_switch_interval_until_done(sets):
    trainer, worker = {"w": torch.ones(4)}, Interval(w=torch.zeros(4))
    assert sys.getswitchinterval() == 0.005
    try:
        with pair(trainer, worker) as (sender, receiver):
            worker.during, worker.sets = None, sets
            receiver.start_background()
            _applied(sender)
            assert worker.during is not None and worker.during < 0.001
        assert sys.getswitchinterval() == (0.005 if sets is None else sets)
    finally:
        sys.setswitchinterval(0.005)


def receiver_run(sender):
    snapshot = sender.snapshot()
    return snapshot.run


def test_waiting_loop_does_not_delay_a_send():
    trainer, worker = Net(1.0), Net()
    with pair(trainer, worker) as (sender, receiver):
        background = receiver.start_background()
        here, there = os.pipe()
        seen = []

        def loop():
            # A read that ends when the trainer says so, after the send.
            os.read(here, 1)
            seen.append(worker.value)

        with beside(loop):
            trainer.fill(2.0)
            _applied(sender)
            os.write(there, b"x")
        os.close(here)
        os.close(there)
        assert seen == [2.0]
        background.shutdown()


class Slow(Net):
    """A forward that stands still in the middle until it may go on."""

    def __init__(self, fill=0.0):
        super().__init__(fill)
        self.there, self.go = threading.Event(), threading.Event()

    def forward(self):
        first = self.large[0].item()
        self.there.set()
        assert self.go.wait(LONG)
        return first, self.large[-1].item(), self.small[0].item()


@pytest.mark.parametrize("mode", MODES)
def test_weights_stay_the_same_while_a_forward_runs(mode):
    trainer, worker = Net(1.0), Slow()
    with pair(trainer, worker, mode=mode) as (sender, receiver):
        background = receiver.start_background()
        seen = []
        with beside(lambda: seen.append(worker())):
            assert worker.there.wait(LONG)
            trainer.fill(2.0)
            # It has come, and waits for the forward.
            report = sender.send(wait="staged", timeout=LONG)
            assert report.all_reached and not report.all_applied
            assert worker.large[0] == 1.0
            worker.go.set()
        assert seen == [(1.0, 1.0, 1.0)]
        assert background.wait(2, timeout=LONG)
        assert worker() == (2.0, 2.0, 2.0)
        background.shutdown()


class Whole(nn.Module):
    """A module whose submodules are called directly."""

    def __init__(self, part):
        super().__init__()
        self.part = part
        self.plain = nn.Sequential(nn.ReLU(), nn.Linear(2, 2), nn.TransformerEncoderLayer(2, 1))

    def forward(self):
        return self.part()


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_submodule_forward_sees_one_version(mode, later):
    trainer, worker = Whole(Net(1.0)), Whole(Slow())
    with pair(trainer, worker, mode=mode) as (sender, receiver):
        background = receiver.start_background()
        if later:
            worker.part = Slow(1.0)
            _applied(sender)
            # The sender is told a moment before the status is.
            while background.version < sender.version:
                time.sleep(0.001)
        before = background.version
        seen = []
        with beside(lambda: seen.append(worker.part())):
            assert worker.part.there.wait(LONG)
            trainer.part.fill(2.0)
            report = sender.send(wait="staged", timeout=LONG)
            assert report.all_reached and not report.all_applied
            assert background.version == before
            worker.part.go.set()
        assert seen == [(1.0, 1.0, 1.0)]
        assert background.wait(before + 1, timeout=LONG)
        assert worker() == (2.0, 2.0, 2.0)
        background.shutdown()
        parts = list(worker.modules())
        assert not any(one._forward_hooks or one._forward_pre_hooks for one in parts)


def test_hooks_are_on_parts_that_read_weights_alone():
    trainer, worker = Whole(Net(1.0)), Whole(Net())
    with pair(trainer, worker) as (_, receiver):
        background = receiver.start_background()
        guarded = {name for name, one in worker.named_modules() if one._forward_hooks}
        # Without its fused path torch computes an encoder layer in another way.
        assert guarded == {"", "part", "plain", "plain.1"}
        background.shutdown()


class Interrupted(Net):
    """A forward that Ctrl-C ends, in a part of a part."""

    interrupts = False

    def forward(self):
        if self.interrupts:
            raise KeyboardInterrupt
        return super().forward()


@pytest.mark.parametrize("after", ["the whole", "the part", "frozen"])
def test_a_forward_that_ctrl_c_ends_holds_nothing(after):
    trainer, worker = Whole(Whole(Net(1.0))), Whole(Whole(Interrupted()))
    with pair(trainer, worker) as (sender, receiver):
        background = receiver.start_background()
        worker.part.part.interrupts = True
        with pytest.raises(KeyboardInterrupt):
            worker()
        worker.part.part.interrupts = False
        if after == "frozen":
            with receiver.frozen():
                pass
        else:
            (worker if after == "the whole" else worker.part.part)()
        trainer.part.part.fill(2.0)
        _applied(sender)
        assert worker() == (2.0, 2.0)
        background.shutdown()


def test_forward_that_raises_releases_the_guard():
    class Raising(Net):
        def forward(self):
            raise RuntimeError("of the model")

    trainer, worker = Net(1.0), Raising()
    with pair(trainer, worker) as (sender, receiver):
        background = receiver.start_background()
        for _ in range(3):
            with pytest.raises(RuntimeError, match="of the model"):
                worker()
            trainer.fill(trainer.value + 1)
            _applied(sender)
        background.shutdown()
        with pytest.raises(RuntimeError, match="of the model"):
            worker()


def test_forwards_nest_and_run_in_several_threads():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Net()

        def forward(self, depth=0):
            low, high = self.inner()
            return self(depth - 1) if depth else (low, high)

    trainer, worker = Outer(), Outer()
    trainer.inner.fill(1.0)
    with pair(trainer, worker) as (sender, receiver):
        background = receiver.start_background()
        background.guard(worker.inner)
        torn, stop = [], threading.Event()

        def run():
            while not stop.is_set():
                low, high = worker(3)
                if low != high:
                    torn.append((low, high))

        with beside(run, run):
            try:
                for value in range(2, 30):
                    trainer.inner.fill(float(value))
                    _applied(sender)
            finally:
                stop.set()
        assert torn == []
        background.shutdown()


def test_with_keeps_the_models_as_they_are():
    trainer, worker = Net(1.0), Net()
    with pair(trainer, worker) as (sender, receiver):
        background = receiver.start_background()
        with background:
            trainer.fill(2.0)
            sender.send(wait="staged", timeout=LONG)
            assert worker.value == 1.0
            with background:
                assert worker.value == 1.0
            assert worker.value == 1.0
        assert background.wait(2, timeout=LONG)
        assert worker.value == 2.0
        background.shutdown()


def test_frozen_keeps_parameters_outside_any_forward():
    trainer, worker = Net(1.0), Net()
    with pair(trainer, worker) as (sender, receiver):
        with receiver.frozen():
            assert worker.large[0] == 1.0
        background = receiver.start_background()
        with receiver.frozen():
            trainer.fill(2.0)
            sender.send(wait="staged", timeout=LONG)
            assert {one.detach().view(-1)[0].item() for one in worker.parameters()} == {1.0}
        assert background.wait(2, timeout=LONG)
        assert {one.detach().view(-1)[0].item() for one in worker.parameters()} == {2.0}
        background.shutdown()
        # Nothing changes any more.
        with receiver.frozen():
            assert worker.value == 2.0


def test_training_step_in_frozen_sees_one_version():
    trainer, worker = Net(1.0), Net()
    with pair(trainer, worker) as (sender, receiver):
        background = receiver.start_background()
        for value in range(2, 12):
            with background:
                loss = (worker.large * worker.large).sum() + (worker.small**2).sum()
                sender.send(trainer.fill(float(value)), wait="staged", timeout=LONG)
                loss.backward()
            assert background.wait(value, timeout=LONG)
            assert worker.large.grad[0] == 2.0 * (value - 1)
            worker.zero_grad()
        background.shutdown()


def test_declared_safe_points_alone_change_anything():
    trainer, worker = Net(1.0), Net()
    with pair(trainer, worker) as (sender, receiver):
        background = receiver.start_background("declared")
        assert background.safe_point() is None
        trainer.fill(2.0)
        report = sender.send(wait="staged", timeout=LONG)
        assert report.all_reached
        for _ in range(3):
            assert worker.value == 1.0
            worker()
        assert background.safe_point() == {"policy": 2}
        assert worker.value == 2.0
        assert background.safe_point() is None
        # A wait is one, too.
        trainer.fill(3.0)
        with beside(lambda: _applied(sender)):
            assert background.wait(3, timeout=LONG)
        assert worker.value == 3.0
        background.shutdown()


def test_wait_for_what_is_there_and_for_what_is_new():
    trainer, worker = Net(1.0), Net()
    with pair(trainer, worker) as (sender, receiver):
        background = receiver.start_background()
        assert background.wait(1, timeout=0)
        with beside(lambda: _applied(sender, version=7)):
            assert background.wait({"policy": 5}, timeout=LONG)
        assert background.version == 7
        sender.shutdown()
        # Nothing will arrive any more.
        assert background.wait(99) is False
        assert background.state == "closed"
        assert worker.value == 1.0
        background.shutdown()


def test_guarded_module_copies_and_pickles_are_plain():
    trainer, worker = Net(1.0), Net()
    with pair(trainer, worker) as (sender, receiver):
        background = receiver.start_background()
        file = io.BytesIO()
        torch.save(worker, file)
        file.seek(0)
        copies = [copy.deepcopy(worker), torch.load(file, weights_only=False)]
        trainer.fill(2.0)
        _applied(sender)
        assert worker.value == 2.0
        for one in copies:
            assert one() == (1.0, 1.0)
        # They hold nothing of the worker's up.
        with background:
            assert copies[0].value == 1.0
        background.shutdown()
        for one in (*copies, worker):
            assert one()[0] > 0.0
        assert not worker._forward_hooks and not worker._forward_pre_hooks


@pytest.mark.parametrize("mode", MODES)
def test_a_bound_module_can_be_copied_saved_and_moved(mode):
    trainer, worker = Net(1.0), Net()
    with pair(trainer, worker, mode=mode) as (sender, receiver):
        state = {name: value.clone() for name, value in worker.state_dict().items()}
        twin = copy.deepcopy(worker)
        for value in (2.0, 3.0, 4.0):
            trainer.fill(value)
            pass_on(sender, receiver)
        assert twin.value == 1.0
        assert state["large"].unique().tolist() == [1.0]
        twin.load_state_dict(worker.state_dict())
        assert twin.value == 4.0


def test_a_background_that_is_dropped_ends():
    worker = Net()
    with pair(Net(1.0), worker) as (sender, receiver):
        receiver.start_background()
        receiver._background.shutdown()
        gc.collect()
        assert worker() == (1.0, 1.0)


def test_shutdown_works_while_a_thread_waits_or_runs():
    trainer, worker = Net(1.0), Slow()
    with pair(trainer, worker) as (sender, receiver):
        background = receiver.start_background()
        ended = []

        def wait():
            try:
                ended.append(background.wait(99))
            except weightsync.LifecycleError as error:
                ended.append(error)

        begun = threading.Event()
        with beside(lambda: (begun.set(), wait())):
            begun.wait()
            background.shutdown()
        assert len(ended) == 1 and (ended[0] is False or isinstance(ended[0], Exception))
        assert (worker.large[0].item(), worker.small[0].item()) == (1.0, 1.0)


def _pair_of_models():
    return {"actor": Net(1.0), "critic": Net(1.0)}


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_sets_flip_together(mode, background):
    trainer, worker = _pair_of_models(), {"actor": Net(), "critic": Net()}
    sender = weightsync.Sender(models=trainer)
    receiver = weightsync.ModelReceiver(sender.init_info, models=worker, mode=mode)
    with all_ended(sender, receiver):
        meet(sender, receiver)
        following = receiver.start_background() if background else None
        for value in (2.0, 3.0):
            for model in trainer.values():
                model.fill(value)
            if background:
                _applied(sender, weights_dict=trainer)
                with following:
                    assert worker["actor"].value == worker["critic"].value == value
            else:
                sender.send(weights_dict=trainer, wait="sent")
                assert receiver.receive_set(LONG) == sender.versions
                assert [one.value for one in worker.values()] == [value, value]
        # One alone is in addition to what the other was.
        trainer["critic"].fill(9.0)
        if background:
            _applied(sender, model="critic")
        else:
            sender.send(model="critic", wait="sent")
            receiver.receive_set(LONG)
        assert [worker["actor"].value, worker["critic"].value] == [3.0, 9.0]
        assert receiver_versions(receiver, following) == sender.versions
        if background:
            following.shutdown()


def receiver_versions(receiver, following):
    return (following or receiver).versions


class Refusing(Shaped):
    """A target of the worker's own that refuses a value."""

    def __init__(self, refused):
        self.value, self.refused = None, refused

    def load(self, snapshot):
        value = float(weightsync.Snapshot(snapshot)["it"][0])
        if value == self.refused:
            raise ValueError(f"no {value}")
        self.value = value


class Failing(Shaped):
    """A worker's model whose loads fail, with words that take the interpreter's lock to read."""

    def load(self, snapshot):
        if snapshot.version > 1:
            raise ValueError(f"no v{snapshot.version}")


def test_a_loop_that_polls_reads_on_while_loads_fail():
    trainer = {"w": torch.ones(3)}
    sender = weightsync.Sender(trainer)
    receiver = weightsync.ModelReceiver(sender.init_info, model=Failing())
    with all_ended(sender, receiver):
        meet(sender, receiver)
        background = receiver.start_background()
        over = False

        def poll():
            while not over:
                assert background.version == 1

        with beside(poll):
            try:
                for _ in range(20):
                    (line,) = sender.send(timeout=LONG).failed
                    assert line.outcome == "refused"
            finally:
                over = True


class FailingItself(Failing):
    """One that ends its receiver in the middle of a load."""

    def load(self, snapshot):
        if snapshot.version > 1:
            self.receiver.fail("engine gone")


def test_a_model_fails_its_receiver_from_within_a_load():
    sender = weightsync.Sender({"w": torch.ones(3)})
    model = FailingItself()
    model.receiver = receiver = weightsync.ModelReceiver(sender.init_info, model=model)
    with all_ended(sender, receiver):
        meet(sender, receiver)
        receiver.start_background()
        sender.send(timeout=LONG)
        while sender.workers:
            time.sleep(0.001)
        (line,) = sender.send(timeout=LONG).workers
        assert (line.outcome, line.reason) == ("failed", "engine gone")


@pytest.mark.parametrize("background", [False, True])
def test_a_refused_load_goes_back_and_says_why(background):
    trainer = {"a": {"it": torch.ones(3)}, "b": {"it": torch.ones(3)}}
    worker = {"a": {"it": torch.zeros(3)}, "b": Refusing(2.0)}
    sender = weightsync.Sender(models=trainer)
    receiver = weightsync.ModelReceiver(sender.init_info, models=worker)
    with all_ended(sender, receiver):
        meet(sender, receiver)
        following = receiver.start_background() if background else None
        for value, good in ((2.0, False), (3.0, True)):
            for model in trainer.values():
                model["it"].fill_(value)
            if background:
                report = sender.send(timeout=LONG)
            else:
                sender.send(wait="sent")
                if good:
                    assert receiver.receive_set(LONG) == sender.versions
                else:
                    with pytest.raises(weightsync.LoadError, match="no 2.0") as refused:
                        receiver.receive_set(LONG)
                    assert isinstance(refused.value.__cause__, ValueError)
                report = None
            got = [float(worker["a"]["it"][0]), worker["b"].value]
            assert got == ([3.0, 3.0] if good else [1.0, 1.0])
            if background:
                assert report.all_applied == good
                if not good:
                    (line,) = report.failed
                    assert line.outcome == "refused" and "no 2.0" in line.reason
                # The report may come before the background receiver has noted it.
                while (following.failure is None) != good:
                    time.sleep(0.001)
                assert good or "no 2.0" in following.failure
        if background:
            following.shutdown()
