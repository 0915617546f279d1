"""Which version made which token, and what is too old to learn from."""

from types import SimpleNamespace

import pytest
from weightsync import staleness
from weightsync.errors import SettingError, WrongTypeError
from weightsync.staleness import Filter, Span


def sample(*spans):
    """As vLLM's ``CompletionOutput`` is."""
    names = ("version", "start", "end")
    return SimpleNamespace(
        weight_versions=[SimpleNamespace(**dict(zip(names, one, strict=True))) for one in spans]
    )


TWO = [("3", 0, 2), ("5", 2, 3)]


@pytest.mark.parametrize(
    "output",
    [
        sample(*TWO),
        SimpleNamespace(outputs=[sample(*TWO)]),
        {"weight_versions": [{"version": "3", "start": 0, "end": 2}, ["5", 2, 3]]},
        {"text": "", "meta_info": {"weight_version": "5", "weight_versions": TWO}},
    ],
)
def test_spans_are_read_from_each_engines_outputs(output):
    assert staleness.spans_of(output) == [Span(3, 0, 2), Span(5, 2, 3)]
    assert staleness.versions_of(output) == [3, 3, 5]
    assert staleness.age_of(output, 6) == 3


def test_label_of_a_whole_answer_is_its_version():
    answer = {"meta_info": {"weight_version": "7", "completion_tokens": 2}}
    assert staleness.versions_of(answer) == [7, 7]


@pytest.mark.parametrize(
    "output",
    [
        SimpleNamespace(weight_versions=None),
        {"meta_info": {}},
        {"meta_info": {"weight_version": "7"}},
        {"weight_versions": [("7", 3, 2)]},
        {"weight_versions": [7]},
        SimpleNamespace(outputs=[sample(), sample()]),
        None,
    ],
)
def test_output_without_versions_is_refused(output):
    with pytest.raises(WrongTypeError):
        staleness.spans_of(output)


def test_filter_keeps_what_is_new_enough():
    fresh = Filter(at_most=1)
    old, new, both = sample(("3", 0, 5)), sample(("5", 0, 5)), sample(("3", 0, 1), ("5", 1, 5))
    assert fresh([old, new, both, new], current=5) == [new, new]
    assert fresh([new], current=6) == [new]
    assert (fresh.kept, fresh.dropped) == (3, 2)
    assert dict(fresh.ages) == {2: 2, 0: 2, 1: 1}
    said = "3 samples of 5 are at most 1 versions old; 2 of age 0, 1 of age 1, 2 of age 2"
    assert repr(fresh) == said


@pytest.mark.parametrize("label", ["default", "v3", "9", "-1", "None"])
def test_filter_drops_what_has_no_known_version(label):
    # Version 9 is of a run whose numbers were higher.
    unknown = sample((label, 0, 1))
    assert Filter(100)([unknown], current=5) == []
    kept = Filter(0, unknown="keep")
    assert kept([unknown], current=5) == [unknown]
    assert kept.ages == {None: 1}


def test_tokens_that_are_not_there_have_no_age():
    # A request that ended before its first token under the old label.
    assert staleness.age_of(sample(("default", 0, 0), ("5", 0, 4)), 5) == 0
    assert Filter(0)([sample()], current=5) == [sample()]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"at_most": -1}, "at_most: expected"),
        ({"at_most": 1.5}, "at_most: expected"),
        ({"at_most": 1, "unknown": "ask"}, "unknown: expected"),
    ],
)
def test_wrong_limits_are_refused(settings, words):
    with pytest.raises(SettingError, match=words):
        Filter(**settings)
