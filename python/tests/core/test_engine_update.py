"""The update of one engine: which call comes next, and how it ends."""

import pytest
from weightsync import LifecycleError, SettingError
from weightsync._native import EngineUpdate


def _until(*events, updates=1):
    """An update after those events, and the calls that it named."""
    update = EngineUpdate(updates)
    calls = [update.begin()]
    calls += [getattr(update, event)(*arguments) for event, *arguments in events]
    return update, calls


def _end(update):
    return update.outcome, update.weights, update.reason


def test_engine_runs_new_weights_after_each_chunk():
    update = EngineUpdate(updates=2)
    assert (update.state, *_end(update)) == ("running", None, "old", None)
    calls, states = [update.begin()], [update.state]
    while calls[-1] is not None:
        calls.append(update.done())
        states.append(update.state)
    assert calls == ["pause", "start", "update", "update", "finish", "resume", None]
    assert states == ["pausing", "paused", "started", "started", "updated", "finished", "resumed"]
    assert _end(update) == ("updated", "new", None)


def test_half_new_weights_are_restored_before_resume():
    half = [["done"], ["done"], ["done"], ["failed", "reset", "unknown"]]
    update, calls = _until(*half, ["done"], ["done"], updates=2)
    assert calls[3:] == ["update", "restore", "resume", None]
    assert _end(update) == ("kept old", "old", "update failed: reset")
    update, calls = _until(*half, ["failed", "no disk", "unknown"], updates=2)
    assert calls[4:] == ["restore", None]
    assert _end(update) == ("held", "unknown", "update failed: reset; restore failed: no disk")


def test_update_that_was_only_late_ends_as_updated():
    late = [["done"], ["done"], ["failed", "late", "unknown"], ["failed", "v2 is there", "new"]]
    update, calls = _until(*late, ["done"])
    assert calls[2:] == ["update", "restore", "resume", None]
    assert _end(update) == (
        "updated",
        "new",
        "update failed: late; restore failed: v2 is there",
    )


def test_failed_resume_says_what_the_engine_holds():
    update, calls = _until(["failed", "busy", "unknown"], ["failed", "gone", "unknown"])
    assert calls == ["pause", "resume", None]
    assert _end(update) == ("not resumed", "old", "pause failed: busy; resume failed: gone")


def test_dead_engine_gets_no_call():
    update, calls = _until(["done"], ["died", "killed"], ["died", "again"])
    assert calls == ["pause", "start", None, None]
    assert _end(update) == ("dead", "unknown", "the engine died: killed")
    assert repr(update) == "<EngineUpdate: dead, unknown weights, the engine died: killed>"


def test_wrong_order_says_what_to_do():
    update = EngineUpdate()
    with pytest.raises(LifecycleError, match="report begin first"):
        update.done()
    assert update.begin() == "pause"
    with pytest.raises(LifecycleError, match="make the pause call, then report done, failed"):
        update.begin()
    update.died("killed")
    with pytest.raises(LifecycleError, match="is over; make a new one"):
        update.done()


@pytest.mark.parametrize("updates", [0, -1, 1.5, "1", True, None, 2**32])
def test_number_of_updates_is_refused_by_name(updates):
    with pytest.raises(SettingError, match="updates: expected a whole number from 1 on, got"):
        EngineUpdate(updates)


@pytest.mark.parametrize("weights", ["half", "", None, 1])
def test_weights_that_cannot_be_are_refused_by_name(weights):
    update = EngineUpdate()
    update.begin()
    with pytest.raises(SettingError, match='weights: expected "old", "new" or "unknown", got'):
        update.failed("reset", weights)
    assert update.state == "pausing"
