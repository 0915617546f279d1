"""See `beyond`."""

import beyond
import pytest
from crew import SCHEMES, bounded

PLAIN = [
    beyond.forgotten,
    beyond.initialised_first,
    beyond.initialised_with_failing_workers,
    beyond.large_policy,
    beyond.in_this_process,
    beyond.real_cascade,
    beyond.older_with_a_dead_one,
    beyond.older_without_a_sender,
    beyond.own_weights_at_once,
    beyond.shut_down_collector,
    beyond.shut_down_while_connecting,
    beyond.words_of_errors,
]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("scenario", PLAIN, ids=lambda one: one.__name__)
def test_beyond(ours, scenario, scheme):
    bounded(scenario, ours, scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
def test_transient_buffer(ours, scheme, strategy):
    bounded(beyond.transient_buffer, ours, scheme, strategy)
