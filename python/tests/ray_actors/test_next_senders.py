"""A worker whose sender is followed by another one, by a group without a cluster."""

import gc
import logging
import threading
import time
import weakref

import pytest
from ray_world import net

import weightsync
from weightsync.model_receiver import ModelReceiver
from weightsync.ray._group import Offer

ray = pytest.importorskip("ray")


def offer(sender):
    return Offer(sender.init_info.to_json(), "here", False, None)


@pytest.fixture
def sender():
    """Makes senders."""
    made = []

    def make(value, **options):
        made.append(weightsync.Sender(net(value, **options)))
        made[-1].connect(0)
        return made[-1]

    yield make
    for one in made:
        one.shutdown()


@pytest.fixture
def group(sender, monkeypatch):
    """The group of a worker of a first sender; it raises `errors` for later ones."""
    from weightsync.ray import Receiver, _ends

    class Group:
        first, errors, reached = offer(sender(1.0)), [], 0

        def __init__(self, models, again):
            pass

        def after(self, known, until):
            return self.first

        def join(self, until):
            return 0

        def reach(self, offer):
            if offer is not self.first:
                Group.reached += 1
                if self.errors:
                    raise self.errors.pop()("away")

        def follow(self, known, then, until=None):
            pass

        leave = relay = lambda self: None

    monkeypatch.setattr(_ends, "Group", Group)
    monkeypatch.setattr(_ends, "_AGAIN", 0.01)
    monkeypatch.setattr(_ends._cluster, "running", lambda: ray)
    Group.receiver = lambda **options: Receiver(model=net(0.0), **options)
    return Group


def test_error_of_ray_is_tried_again(group, sender):
    group.errors = [ray.exceptions.RaySystemError, weightsync.PeerError]
    with group.receiver() as receiver:
        first = receiver.run
        receiver._moved(offer(sender(2.0)))
        while receiver.run == first:
            time.sleep(0.01)
        assert group.reached == 3


def test_sender_that_does_not_fit_is_tried_once(group, sender):
    with group.receiver() as receiver:
        first, other = receiver.run, offer(sender(2.0, size=32))
        for _ in range(2):
            receiver._moved(other)
            while receiver._next is not None:
                time.sleep(0.01)
        assert group.reached == 1
        assert receiver.run == first
        # Another one that fits is joined.
        receiver._moved(offer(sender(3.0)))
        while receiver.run == first:
            time.sleep(0.01)


def test_dropped_worker_ends_a_pending_move(group, sender, caplog):
    # The log of a test keeps errors, and so their frames.
    caplog.set_level(logging.CRITICAL, "weightsync")
    group.errors = [weightsync.PeerError] * 10_000
    threads = set(threading.enumerate())
    receiver = group.receiver()
    receiver._moved(offer(sender(2.0)))
    while not group.reached:
        time.sleep(0.01)
    dropped = weakref.ref(receiver)
    del receiver
    while dropped() is not None or set(threading.enumerate()) - threads:
        gc.collect()
        time.sleep(0.01)


def test_worker_moves_once_where_ctrl_c_came_late(group, sender, monkeypatch):
    rejoin = ModelReceiver.rejoin

    def interrupted(self, info, **options):
        rejoin(self, info, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(ModelReceiver, "rejoin", interrupted)
    with group.receiver(safe_points="declared", mode="copy") as receiver:
        receiver._moved(offer(sender(2.0)))
        with pytest.raises(KeyboardInterrupt):
            receiver.safe_point()
        assert receiver.safe_point() is None
        assert receiver._next is None
        assert group.reached == 1


@pytest.mark.parametrize("safe_points", ["implied", "declared"])
def test_sender_that_came_back_is_followed_on(group, sender, caplog, safe_points):
    caplog.set_level(logging.CRITICAL, "weightsync")
    group.errors = [weightsync.PeerError] * 10_000
    with group.receiver(safe_points=safe_points) as receiver:
        threads = set(threading.enumerate())
        receiver._moved(offer(sender(2.0)))
        while not group.reached:
            receiver.safe_point()
        # The other sender has gone before it was joined.
        receiver._moved(group.first)
        assert receiver._next is None
        while set(threading.enumerate()) - threads:
            time.sleep(0.01)


def test_wait_leaves_the_move_to_its_thread(group, sender):
    with group.receiver() as receiver:
        # That thread has not begun.
        receiver._next = offer(sender(2.0))
        assert not receiver.wait(timeout=0.01)
        assert group.reached == 0


def test_move_lasts_no_longer_than_its_call(group, sender, monkeypatch):
    limits = []

    def away(self, info, *, timeout):
        limits.append(timeout)
        raise weightsync.PeerError("away")

    monkeypatch.setattr(ModelReceiver, "rejoin", away)
    with group.receiver(safe_points="declared") as receiver:
        receiver._moved(offer(sender(2.0)))
        for call in (
            receiver.safe_point,
            lambda: receiver.wait(timeout=0.01),
            lambda: receiver.wait(timeout=3.0),
        ):
            receiver._retry, seen = 0.0, len(limits)
            call()
            assert len(limits) > seen
            if len(limits) > 2:
                break
    assert limits[:2] == [5.0, 1.0] and 1.0 <= limits[2] <= 3.0
