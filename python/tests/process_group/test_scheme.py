"""TorchRL's scheme over a process group."""

import pytest
from test_process_group import raised


def connect(ranks, world=3, **how):
    made = ranks(world)
    for one in made:
        one.order("scheme", **how)
    for one in made:
        one.answer()
    return made


def test_scheme_runs_the_lifecycle(ranks):
    made = connect(ranks)
    # The first weights came with connect.
    assert [one.ask("scheme_values") for one in made] == [[3.0]] * 3
    made[0].ask("fill", 4.0)
    for one in made[1:]:
        one.order("scheme_receive")
    assert made[0].ask("scheme_send") == 2
    assert [one.answer() for one in made[1:]] == [True, True]
    assert [one.ask("scheme_values") for one in made[1:]] == [[4.0]] * 2
    assert made[1].ask("scheme_receive", 0.0) is False
    for one in made:
        one.ask("scheme_shutdown")


@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
def test_scheme_follows_in_a_thread(ranks, strategy):
    made = connect(ranks, sync=False, strategy=strategy)
    for version in (2, 3):
        made[0].ask("fill", float(version))
        assert made[0].ask("scheme_send") == version
        for one in made[1:]:
            assert one.ask("scheme_receive") and one.ask("scheme_values") == [float(version)]
    made[0].ask("scheme_shutdown")
    assert raised(lambda: made[1].ask("scheme_receive"))[0] == "SenderClosedError"
    for one in made[1:]:
        one.ask("scheme_shutdown")


def test_scheme_refuses_what_a_broadcast_cannot(ranks):
    made = connect(ranks)
    assert raised(lambda: made[0].ask("scheme_send", [0]))[0] == "UnsupportedError"
    assert raised(lambda: made[0].ask("scheme_pickle"))[0] == "LifecycleError"
