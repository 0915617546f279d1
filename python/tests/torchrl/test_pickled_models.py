"""A worker's model that came through torch.multiprocessing shares no memory with the learner's."""

import pickled_models as scenarios
import pytest
from crew import bounded


@pytest.mark.parametrize(
    ("size", "mode"),
    [
        ("large", "bind"),
        pytest.param("small", "bind", marks=pytest.mark.soak),
        pytest.param("small", "copy", marks=pytest.mark.soak),
        pytest.param("large", "copy", marks=pytest.mark.soak),
    ],
)
def test_load_leaves_learner_of_a_pickled_model(ours, size, mode):
    bounded(scenarios.standalone, ours, size, mode)


def test_load_leaves_learner_of_a_collector(ours):
    bounded(scenarios.collector, ours)
