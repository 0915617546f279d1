"""verl's manager, registry and workers, with the checkpoint engine of weightsync."""

import pytest
from named_weights import weights

pytestmark = pytest.mark.timeout(300)


def test_versions_grow_when_steps_do_not(world):
    for step, version in ((0, 1), (1, 2), (None, 3), (7, 7), (7, 8), (3, 9), (20, 20)):
        given = weights(version)
        assert world.update(given, step) == {"checkpoint_engine/version": version}
        # The memory is shared, so nothing has travelled.
        assert world.compare(given) == [([], version, None)] * 2
        # The rank that does not send takes part in the gathering.
        assert world.trainer.get_drained() == [len(given)] * 2


def test_weights_arrive_whole_in_any_order(world):
    given = weights(30)
    world.update(given, 30)
    turned = dict(reversed(weights(31).items()))
    world.update(turned, 31)
    expected = {name: turned[name] for name in given}
    assert world.compare(expected) == [([], 31, None)] * 2


def test_rollout_joins_while_training_goes_on(world):
    world.update(weights(40), 40)
    late = world.add()[0]
    given = weights(41)
    world.update(given, 41)
    assert world.compare(given) == [([], 41, None)] * 3
    world.remove(late)
    given = weights(42)
    world.update(given, 42)
    assert world.compare(given) == [([], 42, None)] * 2


def test_update_goes_on_after_another_layout(world):
    from weightsync.errors import PeerError, WrongWeightsError

    world.update(weights(50), 50)
    other = weights(51, extra=["lora"])
    sent, received = world.begin(other, 51)
    error = world.error(sent[0])
    assert isinstance(error, WrongWeightsError)
    assert "lora" in str(error)
    for answer in received:
        error = world.error(answer)
        assert isinstance(error, PeerError)
        assert "rank 0 of the trainer closed its end before version 51 was out" in str(error)
    # Both ranks gathered everything, and nobody waits.
    assert world.trainer.get_drained() == [len(other)] * 2
    assert world.update(other, 52) == {"checkpoint_engine/version": 52}
    assert world.compare(other) == [([], 52, None)] * 2
    # The manager gives the user the error that comes first, and the next update works.
    with pytest.raises((WrongWeightsError, PeerError)):
        world.update(weights(53), 53)
    world.update(weights(54), 54)
    assert world.compare(weights(54)) == [([], 54, None)] * 2


def test_workers_keep_nothing_when_updates_repeat(world):
    def open_files():
        asked = [one.get_open_files.remote() for one in world.rollouts]
        return world.ray.get(asked, timeout=60)

    for step in range(60, 63):
        world.update(weights(60), step)
    before = open_files()
    for step in range(63, 73):
        world.update(weights(60), step)
    assert open_files() == before
