"""verl's checkpoint engine over TCP: what travels, and what a death leaves."""

import time

import pytest
from named_weights import SIZE, weights

#: No worker shares memory with the trainer, and all come to its node's address, as on other hosts.
SETTINGS = {
    "scheme": {"share": "none", "deltas": "always"},
    "insecure_plaintext": True,
    "timeout": 20.0,
}

pytestmark = pytest.mark.timeout(300)


def arrived(world, expected, seconds=20):
    """Waits until every rollout worker has these weights; what differs if they do not come."""
    until = time.monotonic() + seconds
    while True:
        found = [differs for differs, _, _ in world.compare(expected)]
        if not any(found) or time.monotonic() > until:
            return found
        time.sleep(0.2)


def travelled(world, expected):
    assert [differs for differs, _, _ in world.compare(expected)] == [[]] * len(world.rollouts)
    return max(count for _, _, count in world.compare(expected))


def test_changes_alone_travel_after_the_first(world):
    whole = sum(one.nbytes for one in weights(0).values())
    changed = SIZE * SIZE // 5000
    before = 0
    for seed in range(3):
        given = weights(seed, changed=changed if seed else 0)
        world.update(given, 10 + seed)
        now = travelled(world, given)
        if seed == 0:
            assert now >= whole / 2
        else:
            assert now - before < whole / 200
        before = now


def test_others_arrive_when_a_rollout_is_killed(world):
    from ray.exceptions import RayActorError

    world.update(weights(20), 20)
    victim = world.add()[0]
    world.update(weights(21), 21)
    world.ray.get(victim.set_fault.remote(dies=True), timeout=30)
    given = weights(22)
    sent, received = world.begin(given, 22)
    assert isinstance(world.error(received[-1]), RayActorError)
    assert world.ray.get(sent, timeout=30)[0] == {"checkpoint_engine/version": 22.0}
    world.ray.get(received[:-1], timeout=30)
    world.remove(victim)
    assert arrived(world, given) == [[]] * 2
    given = weights(23)
    world.update(given, 23)
    assert arrived(world, given) == [[]] * 2


def test_others_arrive_when_a_rollout_refuses(world):
    world.update(weights(30), 30)
    world.ray.get(world.rollouts[1].set_fault.remote(refuses=True), timeout=30)
    given = weights(31)
    sent, received = world.begin(given, 31)
    assert "this rollout refuses" in str(world.error(received[1]))
    world.ray.get([*sent, received[0]], timeout=30)
    world.ray.get(world.rollouts[1].set_fault.remote(refuses=False), timeout=30)
    given = weights(32)
    world.update(given, 32)
    assert world.compare(given)[1][:2] == ([], 32)


def test_rollouts_end_when_the_trainer_is_killed(world):
    from weightsync.errors import PeerError

    old = weights(40)
    world.update(old, 40)
    sent, received = world.begin(weights(41), 41, dies_after=2)
    begun = time.monotonic()
    for answer in received:
        error = world.error(answer)
        assert isinstance(error, PeerError), error
    assert time.monotonic() - begun < SETTINGS["timeout"]
    # Nothing of the half that was sent was given to a rollout.
    assert [found[:2] for found in world.compare(old)] == [([], 40)] * 2
    world.restart_trainer()
    given = weights(42)
    # A trainer that goes on from an older checkpoint.
    assert world.update(given, 35) == {"checkpoint_engine/version": 35.0}
    assert world.compare(given)[0][:2] == ([], 35)


def test_rollouts_end_when_a_first_send_dies(world):
    from weightsync.errors import PeerError

    world.restart_trainer()
    sent, received = world.begin(weights(50), 50, dies_after=2)
    for answer in received:
        assert isinstance(world.error(answer), PeerError)
    world.restart_trainer()
    given = weights(51)
    world.update(given, 51)
    assert world.compare(given)[1][:2] == ([], 51)


def test_wait_ends_in_time_when_nothing_is_sent(world):
    from weightsync.errors import DeadlineError

    world.update(weights(60), 60)
    answer = world.rollouts[0].update_weights.remote(global_steps=61)
    error = world.error(answer, 40)
    assert isinstance(error, DeadlineError)
    assert "no weights came within 20 s: expected version 61" in str(error)
    given = weights(62)
    world.update(given, 62)
    assert world.compare(given)[0][:2] == ([], 62)
