"""A real server of SGLang: its answers are those of transformers with the newest weights."""

from __future__ import annotations

import pytest
import sglang_server

import weightsync
from weightsync import staleness
from weightsync.sglang import Engine, Trainer

#: Sends what changed.
DELTAS = "distributed:listen=127.0.0.1:0,share=none,deltas=always"


@pytest.fixture
def model():
    return sglang_server.llama(1)


@pytest.fixture
def sender(model):
    with weightsync.Sender(model) as made:
        yield made


def trained(sender, *servers, **settings):
    return Trainer(sender, [Engine(server.url) for server in servers], **settings)


def test_servers_answer_as_transformers_ten_times(servers, model, sender):
    trainer = trained(sender, *servers)
    for step in range(1, 11):
        sglang_server.change(model, step)
        report = trainer.sync(step=step)
        assert report.all_synced, report
        expected = sglang_server.greedy(model)
        for server in servers:
            answers = server.answers()
            assert [one["output_ids"] for one in answers] == expected, step
            for one in answers:
                assert one["meta_info"]["weight_version"] == str(step)
                assert staleness.versions_of(one) == [step] * sglang_server.LENGTH
            assert server.get("model_info")["weight_version"] == str(step)
    assert all(0 < line.pause < line.took for line in report.engines)
    for server in servers:
        trainer.remove(server.url)


@pytest.mark.parametrize(
    ("mode", "reset"), [("keep", True), ("keep", False), ("abort", True)]
)
def test_requests_fare_as_the_pause_says(server, model, sender, mode, reset):
    # Nothing of it is in a cache that is kept.
    length, prompt = (2000 if mode == "abort" else 300), [90, 91] if reset else [92, 93]
    requests = []

    class Busy(Engine):
        def pause(self, *how):
            # However slow the trainer is, the request does not end before the pause.
            requests.append(server.begin(prompt, length))
            super().pause(*how)

    trainer = trained(sender, server, pause=mode, reset_prefix_cache=reset)
    assert trainer.sync(1).all_synced
    before = sglang_server.continued(model, prompt, length)
    sglang_server.change(model, 1)
    trainer.remove(server.url)
    trainer.add(Busy(server.url))
    report = trainer.sync(2)
    assert report.all_synced, report
    answer = requests.pop().end()
    tokens, reason = answer["output_ids"], answer["meta_info"]["finish_reason"]["type"]
    if mode == "abort":
        assert reason == "abort"
        assert len(tokens) < length
        assert tokens == before[: len(tokens)]
    else:
        assert (len(tokens), reason) == (length, "length")
        versions = staleness.versions_of(answer)
        old = versions.count(1)
        assert 0 < old < length
        assert versions == [1] * old + [2] * (length - old)
        assert tokens[:old] == before[:old]
        if reset:
            # The new weights have computed all that was before.
            prompt += tokens[:old]
            assert tokens[old:] == sglang_server.continued(model, prompt, length - old)
    if reset:
        assert server.ask() == sglang_server.greedy(model)
    trainer.remove(server.url)


def test_update_waits_for_grammars_that_compile(server, model, sender):
    trainer = trained(sender, server)
    assert trainer.sync(1).all_synced
    sglang_server.change(model, 1)
    request = server.compiling([94, 95], sglang_server.LENGTH)
    report = trainer.sync(2)
    assert report.all_synced, report
    tokens = request.end()["output_ids"]
    assert tokens == sglang_server.continued(model, [94, 95])
    server.fail("raise", loads=0)
    trainer.remove(server.url)


def test_changes_alone_travel(server, model):
    with weightsync.Sender(model, scheme=DELTAS) as sender:
        trainer = trained(sender, server)
        whole = trainer.sync().engines[0].bytes
        for seed in range(3):
            sglang_server.change(model, seed, share=0.01)
            report = trainer.sync()
            assert report.all_synced, report
            assert server.ask() == sglang_server.greedy(model)
        assert 0 < report.engines[0].bytes < whole / 20
        trainer.remove(server.url)


def test_another_model_is_refused_before_the_pause(server):
    before = server.ask()
    with weightsync.Sender(sglang_server.llama(intermediate_size=64)) as sender:
        trainer = trained(sender, server)
        (line,) = trainer.sync().engines
        assert (line.outcome, line.version, line.pause) == ("kept old", None, None)
        assert "mlp.down_proj.weight is [128, 64] and should be [128, 128]" in line.reason
        assert server.ask() == before
        trainer.remove(server.url)


def test_pause_that_sglang_lacks_is_refused(server, sender):
    before = server.ask()
    trainer = trained(sender, server, pause="wait")
    (line,) = trainer.sync().engines
    assert line.outcome == "kept old"
    assert "SGLang has no pause that lets requests end first" in line.reason
    assert server.ask() == before
    trainer.remove(server.url)


def test_server_that_its_user_paused_is_left_alone(server, model, sender):
    trainer = trained(sender, server)
    assert trainer.sync(1).all_synced
    assert server.post("pause_generation", {"mode": "retract"})[0] == 200
    (line,) = trainer.sync(2).engines
    assert (line.outcome, line.version) == ("asleep", 1)
    assert "paused, by somebody else" in line.reason
    assert server.post("continue_generation", {})[0] == 200
    sglang_server.change(model, 2)
    assert trainer.sync(3).all_synced
    assert server.ask() == sglang_server.greedy(model)
    trainer.remove(server.url)


@pytest.mark.parametrize("tags", [None, ["kv_cache", "weights"]])
def test_refresh_reloads_weights_that_were_released(server, model, sender, tags):
    trainer = trained(sender, server)
    assert trainer.sync(1).all_synced
    assert server.post("release_memory_occupation", {"tags": tags})[0] == 200
    (line,) = trainer.refresh().engines
    assert (line.outcome, line.version) == ("asleep", 1), line
    assert server.post("resume_memory_occupation", {"tags": tags})[0] == 200
    # On the CPU they would come back as they were.
    assert server.post("weights_checker", {"action": "reset_tensors"})[0] == 200
    assert server.ask() != sglang_server.greedy(model)
    report = trainer.refresh()
    assert report.all_synced, report
    assert report.engines[0].pause is not None
    assert server.ask() == sglang_server.greedy(model)
    trainer.remove(server.url)


def test_two_trainers_follow_each_other(server, model, sender):
    first = trained(sender, server)
    assert first.sync(1).all_synced
    other = sglang_server.llama(2)
    with weightsync.Sender(other) as second:
        trainer = trained(second, server)
        assert trainer.sync(1).all_synced
        assert server.ask() == sglang_server.greedy(other)
        trainer.remove(server.url)
