"""Versions over a process group: what arrives, what is refused, how ends open and close."""

from patience import patience
import pytest
import torch
from actors import Raised
from weightsync.process_group._packing import Layout
from weightsync.process_group._target import Target


def start(ranks, world=3, kind="net", fill=0.0, timeout=patience(30), **how):
    """Ranks with open ends: the sender has other values than the receivers."""
    made = ranks(world, timeout)
    for at, one in enumerate(made):
        one.order("open", kind, fill if at == 0 else -1.0, **how)
    for one in made:
        one.answer()
    return made


def send(made, *model):
    """One version to all; the report, and what each receiver got."""
    for one in made[1:]:
        one.order("receive")
    report = made[0].ask("send", *model)
    got = []
    for one in made[1:]:
        try:
            got.append(one.answer())
        except Raised as error:
            got.append((error.kind, error.said))
    return report, got


def raised(call):
    with pytest.raises(Raised) as info:
        call()
    return info.value.kind, info.value.said


def test_versions_count_from_one(ranks):
    made = start(ranks, world=4)
    assert [one.ask("version") for one in made] == [0, 0, 0, 0]
    for version in (1, 2, 3):
        made[0].ask("fill", float(version))
        report, got = send(made)
        assert (report["version"], got) == (version, [version] * 3)
        assert [line["outcome"] for line in report["ranks"]] == ["applied"] * 3
        assert [line["rank"] for line in report["ranks"]] == [1, 2, 3]
        assert report["text"].startswith(f"v{version}, ") and "to 3 ranks" in report["text"]
        assert f"pid {made[2].pid}" in report["text"]
        for one in made[1:]:
            assert one.ask("values") == [float(version)] and one.ask("version") == version
    assert all(one.ask("tied") for one in made[1:])


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("state dict", "net"),
        ("net", "empty"),
        ("dict", "tensordict"),
        ("tensordict", "dict"),
        ("5", "5"),
    ],
)
def test_values_arrive_from_each_kind_of_source(ranks, given, taken):
    sender, receiver = ranks(2)
    sender.order("open", given, 3.0)
    receiver.order("open", taken, -1.0)
    sender.answer(), receiver.answer()
    for _ in range(3):
        assert send([sender, receiver])[1][0] in (1, 2, 3)
    assert receiver.ask("values") == [3.0]


@pytest.mark.parametrize("mode", ["bind", "copy"])
def test_parameters_lie_where_the_mode_says(ranks, mode):
    sender, receiver = ranks(2)
    sender.order("open", "wide", 2.0)
    receiver.order("open", "wide", -1.0, mode=mode)
    sender.answer(), receiver.answer()
    for _ in range(3):
        before = receiver.ask("addresses")
        send([sender, receiver])
        after = receiver.ask("addresses")
        # Two of them have 64 KiB.
        moved = sum(one != other for one, other in zip(before, after, strict=True))
        assert moved == (2 if mode == "bind" else 0)
        assert receiver.ask("values") == [2.0]


def test_wrong_layout_is_refused_by_name(ranks):
    made = ranks(3)
    for at, (kind, fill) in enumerate([("net", 1.0), ("wide", -1.0), ("net", -1.0)]):
        made[at].order("open", kind, fill)
    for one in made:
        one.answer()
    for version in (1, 2):
        report, got = send(made)
        kind, said = got[0]
        assert kind == "WrongWeightsError" and "up.weight: expected torch.float32 [200, 96]" in said
        assert "got torch.float32 [200, 64]" in said and got[1] == version
        refused, applied = report["ranks"]
        assert (refused["outcome"], refused["reason"]) == ("refused", said)
        assert applied["outcome"] == "applied" and f"pid {made[1].pid}" in report["text"]
        assert made[1].ask("values") == [-1.0] and made[2].ask("values") == [1.0]
    # One that fits is taken again.
    report, got = send(made, ("wide", 4.0))
    assert got[0] == 3 and got[1][0] == "WrongWeightsError"
    assert made[1].ask("values") == [4.0] and made[2].ask("values") == [1.0]


def test_missing_and_unknown_tensors_are_named(ranks):
    made = start(ranks, world=2, kind="dict")
    _, ((kind, said),) = send(made, ("1", 0.0))
    assert kind == "WrongWeightsError"
    assert "part0 is unknown" in said and "a.w is missing" in said and "b is missing" in said


@pytest.mark.parametrize("piece", [0, 1])
def test_damage_is_found_before_the_model_changes(ranks, piece):
    made = start(ranks, kind="5", fill=2.0)
    made[1].ask("damage", piece)
    report, (bad, good) = send(made)
    assert bad[0] == "CorruptError" and f"checksums of pieces [{piece}]" in bad[1] and good == 1
    assert made[1].ask("values") == [-1.0] and made[2].ask("values") == [2.0]
    assert [line["outcome"] for line in report["ranks"]] == ["refused", "applied"]
    assert send(made)[1] == [2, 2] and made[1].ask("values") == [2.0]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("meta", "'narrow' has no memory yet"),
        ("lazy", "'up.weight' has no memory yet"),
        ("expanded", "'norm.running_mean' has several elements in one place"),
    ],
)
def test_tensor_that_cannot_be_written_is_refused(ranks, kind, why):
    made = ranks(2)
    made[0].order("open", "net", 1.0)
    made[1].order("open", kind, -1.0 if kind == "meta" else 0.0)
    for one in made:
        one.answer()
    report, ((refusal, said),) = send(made)
    assert refusal == "WrongTypeError" and why in said
    assert report["ranks"][0]["reason"] == said


def test_views_that_compute_their_values_are_sent_with_these(ranks):
    made = ranks(2)
    made[0].order("open", "views", 3.0)
    made[1].order("open", "empty")
    for one in made:
        one.answer()
    report, _ = send(made)
    assert report["ranks"][0]["outcome"] == "applied"
    assert made[1].ask("lists") == made[0].ask("lists")


@pytest.mark.parametrize("taken", ["single", "single module", "empty"])
def test_stride_of_a_single_element_does_not_matter(ranks, taken):
    made = ranks(2)
    made[0].order("open", "single", 3.0)
    made[1].order("open", taken, 0.0)
    for one in made:
        one.answer()
    for version in (1, 2):
        report, got = send(made)
        assert report["ranks"][0]["outcome"] == "applied" and got == [version]
        assert made[1].ask("values") == [3.0]


@pytest.mark.parametrize(
    ("given", "taken", "words"),
    [
        ("stack", "lazy stack", "'w' is made again whenever it is asked for"),
        ("apart", "overlapping", "share memory here, and were sent with values that differ"),
    ],
)
def test_model_that_would_not_have_what_was_sent_is_refused(ranks, given, taken, words):
    made = ranks(2)
    made[0].order("open", given, 1.0)
    made[1].order("open", taken, -1.0)
    for one in made:
        one.answer()
    report, ((refusal, said),) = send(made)
    assert refusal in ("WrongTypeError", "WrongWeightsError") and words in said
    assert report["ranks"][0]["reason"] == said


def test_default_device_of_torch_does_not_matter(ranks):
    made = start(ranks, world=2, fill=2.0)
    for one in made:
        one.ask("default_device", "meta")
    for value in (2.0, 3.0):
        made[0].ask("fill", value)
        report, _ = send(made)
        assert report["ranks"][0]["outcome"] == "applied", report
        for one in made:
            one.ask("default_device", "cpu")
        assert made[1].ask("values") == [value]
        for one in made:
            one.ask("default_device", "meta")


def test_empty_dict_gets_tensors_that_can_be_trained():
    model = {}
    with torch.inference_mode():
        Target(model, "copy").load(Layout(["w"], [torch.float32], [(3,)], {}), [torch.ones(3)])
    assert model["w"].all() and not model["w"].is_inference()


def test_load_that_fails_halfway_is_undone(ranks):
    made = start(ranks, kind="wide", fill=2.0)
    made[1].ask("interrupt_load", "error")
    report, (bad, good) = send(made)
    assert bad == ("LoadError", "the model refused a tensor: the load was interrupted")
    assert good == 1 and report["ranks"][0]["reason"] == bad[1]
    assert made[1].ask("values") == [-1.0] and made[2].ask("values") == [2.0]
    assert send(made)[1] == [2, 2] and made[1].ask("values") == [2.0]


def test_load_that_is_interrupted_is_undone(ranks):
    made = start(ranks, world=2, kind="wide", fill=2.0)
    made[1].ask("interrupt_load", "Ctrl-C")
    made[1].order("receive_interrupted")
    assert raised(lambda: made[0].ask("send"))[0] == "PeerError"
    assert made[1].answer() == "KeyboardInterrupt"
    assert made[1].ask("values") == [-1.0]
    assert "the model keeps its weights" in raised(lambda: made[1].ask("receive"))[1]


def test_load_that_cannot_be_undone_says_so(ranks):
    made = start(ranks, world=2, kind="5", fill=2.0)
    made[1].ask("interrupt_load", "error")
    made[1].order("receive")
    assert raised(lambda: made[0].ask("send"))[0] == "PeerError"
    kind, said = raised(made[1].answer)
    assert kind == "LoadError" and "the model may have a part of v1" in said
    assert "a part of v1" in raised(lambda: made[1].ask("receive"))[1]


def test_receive_returns_none_at_the_timeout(ranks):
    made = start(ranks)
    for one in made[1:]:
        assert [one.ask("receive", timeout) for timeout in (0, 0.05, 0)] == [None] * 3
    assert send(made)[1] == [1, 1]


def test_send_reads_nothing_that_cannot_be_sent(ranks):
    made = start(ranks, kind="dict", fill=1.0)
    kind, said = raised(lambda: made[0].ask("send", ("empty", 0.0)))
    assert kind == "SendError" and "nothing to send" in said
    kind, said = raised(lambda: made[0].ask("send", ("hollow", 0.0)))
    assert kind == "SendError" and "'up.weight' has no memory" in said
    kind, said = raised(lambda: made[0].ask("send", ("sparse", 0.0)))
    assert kind == "WrongTypeError" and "'w' is torch.sparse_coo" in said
    kind, said = raised(lambda: made[0].ask("send", ("wrapper", 0.0)))
    assert kind == "WrongWeightsError" and "'w' is a TwoTensor, which has no memory" in said
    assert send(made)[1] == [1, 1]


@pytest.mark.parametrize("backend", ["gloo", "foreign"])
def test_group_of_its_own_has_other_ranks(ranks, backend):
    made = ranks(4)
    for one in made:
        one.order("subgroup", [1, 2, 3], backend)
    for one in made:
        one.answer()
    # Rank 3 of the default group is rank 2 of this one.
    for one in made[1:]:
        one.order("open", "dict", 1.0, src=2, receives=one is not made[3])
    for one in made[1:]:
        one.answer()
    report, got = send([made[3], made[1], made[2]])
    assert got == [1, 1] and [line["rank"] for line in report["ranks"]] == [0, 1]


def test_two_models_keep_their_own_versions(ranks):
    made = ranks(2)
    for name in ("actor", "critic"):
        for one in made:
            one.order("open", "dict", 1.0, model=name)
        for one in made:
            one.answer()
    assert send(made)[1] == [1] and send(made)[1] == [2]


def test_own_collectives_go_on_meanwhile(ranks):
    made = start(ranks, kind="dict")
    for one in made:
        one.order("own_collectives_and_versions", 40)
    assert [one.answer() for one in made] == [(3 * sum(range(40)), 40)] * 3


def test_threads_send_one_version_at_a_time(ranks):
    made = start(ranks, world=2)
    made[0].order("send_in_threads", 4)
    assert [made[1].ask("receive") for _ in range(4)] == [1, 2, 3, 4]
    assert made[0].answer() == [1, 2, 3, 4]


def test_ends_say_what_they_are_not(ranks):
    made = ranks(2)
    kind, said = raised(lambda: made[1].ask("open", src=1, receives=True))
    assert kind == "SettingError" and "rank 1 is src" in said
    assert raised(lambda: made[0].ask("open", src=5))[0] == "SettingError"
    assert raised(lambda: made[0].ask("open", timeout=0))[0] == "SettingError"
    for one in made:
        one.order("open", receives=False)
    assert {raised(one.answer)[0] for one in made} == {"SettingError"}
    # The failed ends do not disturb the next ones.
    for one in made:
        one.order("open", "dict", 1.0)
    for one in made:
        one.answer()
    assert send(made)[1] == [1]


def test_ranks_with_different_src_are_named(ranks):
    made = ranks(3)
    for one, src in zip(made, (0, 1, 0), strict=True):
        one.order("open", src=src)
    for one in made:
        kind, said = raised(one.answer)
        assert kind == "SettingError"
        assert "rank 0 has src=0, rank 1 has src=1, rank 2 has src=0" in said


def test_receivers_are_told_once_a_piece_is_there(ranks):
    made = start(ranks, world=2, kind="5")
    made[0].ask("note_sends")
    assert send(made)[1] == [1]
    assert made[0].ask("notes") == [0, "tell", 1]


def test_rank_that_makes_no_end_is_named(ranks):
    made = ranks(3, 1.0)
    for one in made[:2]:
        one.order("open")
    for one in made[:2]:
        kind, said = raised(one.answer)
        assert kind in ("DeadlineError", "PeerError")
        assert "rank 2" in said or "has given up" in said
    # It comes late, and meets the others at their next attempt.
    for one in made:
        one.order("open", "dict", 1.0, timeout=40.0)
    for one in made:
        one.answer()
    assert send(made)[1] == [1, 1]


def test_ends_cannot_be_pickled(ranks):
    for one in start(ranks, world=2):
        kind, said = raised(lambda one=one: one.ask("pickle"))
        assert kind == "LifecycleError" and "cannot be pickled" in said


def test_forked_child_is_refused_and_harmless(ranks):
    made = start(ranks)
    assert send(made)[1] == [1, 1]
    for one in made:
        said, status = one.ask("fork")
        assert "forked child" in said and status == 0
    assert send(made)[1] == [2, 2]


def test_shutdown_of_the_sender_ends_the_loops(ranks):
    made = start(ranks)
    made[1].order("receive", None)
    made[0].ask("shutdown")
    assert raised(made[1].answer)[0] == "SenderClosedError"
    for _ in range(2):
        assert raised(lambda: made[2].ask("receive"))[0] == "SenderClosedError"
    made[2].ask("shutdown")
    assert raised(lambda: made[2].ask("receive"))[0] in ("SenderClosedError", "LifecycleError")
    assert raised(lambda: made[0].ask("send"))[0] == "LifecycleError"


def test_shutdown_ends_a_receive_that_waits(ranks):
    made = start(ranks)
    assert made[1].ask("shutdown_while_receiving") == ["LifecycleError"]
    kind, said = raised(lambda: made[0].ask("send"))
    assert kind == "PeerError" and f"pid {made[1].pid}) has left" in said


def test_shutdown_ends_a_send_and_blames_nobody(ranks):
    made = start(ranks)
    assert made[0].ask("shutdown_while_sending") == ["LifecycleError"]


def test_send_ends_while_another_thread_sends(ranks):
    made = start(ranks)
    kind, said, other = made[0].ask("shutdown_while_sending", 0.2)
    assert (kind, other) == ("DeadlineError", "LifecycleError")
    assert "for all of 0.2 s the thread 'other' was in send of this end" in said


@pytest.mark.parametrize(
    "order", [["end", "model", "group"], ["group", "end"], ["model", "group", "end"]]
)
def test_objects_are_dropped_in_any_order(ranks, order):
    made = start(ranks)
    assert send(made)[1] == [1, 1]
    for one in made[::-1]:
        one.ask("drop", order)


def test_nothing_is_left_after_many_ends(ranks):
    made = ranks(3)
    for one in made:
        one.order("cycles", 6, 3)
    for one in made:
        first, last = one.answer()
        assert last[0] <= first[0] and last[1] <= first[1]
