"""Servers: several at once, pauses, and deaths in the middle of an update."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

import weightsync
from weightsync.vllm import Trainer
from weightsync.vllm._engines import ServerEngine


def begun(server, tokens):
    """A request under way: its first tokens are there."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = {
        "model": server.model,
        "prompt": tiny.PROMPTS[0],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    return connection, answer, told(answer)


def told(answer):
    """The next tokens of a request, and why it ended; None after the last."""
    for line in answer:
        if line.startswith(b"data: {"):
            (choice,) = json.loads(line[6:])["choices"]
            return choice["token_ids"] or [], choice["finish_reason"]
    return None


def ended(connection, answer, first):
    """All tokens of a request, and why it ended."""
    tokens, reason = list(first[0]), first[1]
    while (more := told(answer)) is not None:
        tokens += more[0]
        reason = more[1] or reason
    connection.close()
    return tokens, reason


def test_servers_answer_as_transformers_ten_times(servers):
    model = tiny.llama()
    with weightsync.Sender(model) as sender:
        trainer = Trainer(sender, [server.url for server in servers])
        for step in range(1, 11):
            tiny.change(model, step)
            report = trainer.sync(step=step)
            assert report.all_synced, report
            expected = tiny.greedy(model)
            for server in servers:
                assert server.ask() == expected, step
                assert server.get("weight_info") == {"weight_version": str(step)}


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_requests_under_way_fare_as_the_pause_says(servers, mode):
    server, model, requests = servers[0], tiny.llama(2), []

    class Busy(ServerEngine):
        def pause(self, *how):
            # However slow the trainer is, the request does not end before the pause.
            requests.append(begun(server, tiny.LONG if mode == "abort" else 60))
            super().pause(*how)

    with weightsync.Sender(model) as sender:
        trainer = Trainer(sender, [server.url], pause=mode)
        assert trainer.sync().all_synced
        before = tiny.greedy(model, length=60)[0]
        tiny.change(model, 1)
        trainer.remove(server.url)
        trainer.add(Busy(server.url))
        report = trainer.sync()
        assert report.all_synced, report
        tokens, reason = ended(*requests[0])
        if mode == "abort":
            assert reason == "abort"
            assert len(tokens) < tiny.LONG
        else:
            assert (len(tokens), reason) == (60, "length")
        if mode == "wait":
            assert tokens == before
        assert server.ask() == tiny.greedy(model)
        assert server.get("is_paused") == {"is_paused": False}


def test_trainer_that_dies_midway_leaves_whole_weights(servers):
    server = servers[0]
    program = [sys.executable, "-P", str(Path(__file__).parent / "dying_trainer.py"), server.url]
    with subprocess.Popen(
        program, stdout=subprocess.PIPE, env=tiny.surroundings(Path(__file__).parent)
    ) as dying:
        assert dying.stdout is not None
        assert dying.stdout.readline() == b"begun\n"
        dying.kill()
    assert server.get("is_paused") == {"is_paused": True}
    model = tiny.llama(9)
    with weightsync.Sender(model) as sender:
        report = Trainer(sender, [server.url]).sync()
        assert report.all_synced, report
        assert server.ask() == tiny.greedy(model)


def test_server_that_dies_comes_back_with_the_newest(servers):
    staying, dying = servers
    model = tiny.llama(10)

    class Dying(ServerEngine):
        def start(self, timeout):
            super().start(timeout)
            dying.kill()

    with weightsync.Sender(model) as sender:
        trainer = Trainer(sender, [staying.url], timeout=30)
        trainer.add(Dying(dying.url), info_file=dying.info_file)
        report = trainer.sync(step=3)
        assert [line.outcome for line in report.engines] == ["updated", "dead"]
        assert report.failed[0].reason.startswith("the engine died: /update_weights: ")
        assert staying.ask() == tiny.greedy(model)
        assert dying.info_file.stat().st_mode & 0o777 == 0o600
        tiny.change(model, 1)
        assert [line.outcome for line in trainer.sync(step=4).engines] == ["updated", "dead"]

        dying.start()
        dying.wait()
        # Nobody has told the server anything since it came back.
        assert dying.ask() == staying.ask() == tiny.greedy(model)
        report = trainer.refresh()
        assert report.all_synced, report
        assert [(line.version, line.pause) for line in report.engines] == [(4, None)] * 2
        assert dying.get("weight_info") == {"weight_version": "4"}
        tiny.change(model, 2)
        trainer.remove(dying.url)
        trainer.add(dying.url)
        report = trainer.sync()
        assert report.all_synced, report
        assert dying.ask() == staying.ask() == tiny.greedy(model)
