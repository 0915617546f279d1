"""Loads that fail, servers that die, and payloads that are none of a trainer's."""

from __future__ import annotations

import base64
import contextlib
import json
import pickle

import pytest
import sglang_server
import torch

import weightsync
from weightsync.sglang import Engine, EngineCallError, Trainer
from weightsync.sglang._names import LOADER, PREFIX


@pytest.fixture
def model():
    return sglang_server.llama(3)


@pytest.fixture
def trainer(server, model):
    with weightsync.Sender(model) as sender:
        made = Trainer(sender, [Engine(server.url)], timeout=30)
        yield made
        made.remove(server.url)


def test_failed_load_keeps_old_weights(server, model, trainer):
    assert trainer.sync(1).all_synced
    before = sglang_server.greedy(model)
    for step in (2, 3):
        sglang_server.change(model, step)
        server.fail("raise")
        (line,) = trainer.sync(step).engines
        assert (line.outcome, line.version) == ("kept old", 1)
        assert "RuntimeError: the load failed midway" in line.reason
        assert len(line.reason.splitlines()) == 1
        assert server.ask() == before
        assert server.get("model_info")["weight_version"] == "1"
    report = trainer.sync(4)
    assert report.all_synced, report
    assert server.ask() == sglang_server.greedy(model)


def test_server_is_held_until_its_weights_are_whole(server, model, trainer):
    assert trainer.sync(1).all_synced
    sglang_server.change(model, 5)
    # The load, the way back, and the restore that is tried after it.
    server.fail("raise", loads=3)
    (line,) = trainer.sync(2).engines
    assert (line.outcome, line.version) == ("held", None), line
    status, answer = server.post("weights_checker", {"action": PREFIX + '{"do": "state"}'})
    assert (status, answer["message"]) == (200, "paused")
    report = trainer.sync(3)
    assert report.all_synced, report
    assert server.ask() == sglang_server.greedy(model)


def test_refresh_repairs_a_failed_load(server, model, trainer):
    assert trainer.sync(1).all_synced
    sglang_server.change(model, 6)
    server.fail("raise")
    assert [line.outcome for line in trainer.sync(2).engines] == ["kept old"]
    report = trainer.refresh()
    assert report.all_synced, report
    assert report.engines[0].version == 2
    assert server.ask() == sglang_server.greedy(model)


def payloads():
    """Foreign payloads, by what they are."""
    from sglang.srt.utils import MultiprocessingSerializer

    weights = [("model.norm.weight", torch.zeros(128))]
    tensors = MultiprocessingSerializer.serialize(weights, output_str=True)
    noise = base64.b64encode(b"\x80\x04noise").decode()
    return [
        pytest.param(tensors, LOADER, "takes the versions of a weightsync sender", id="tensors"),
        pytest.param(noise, LOADER, "takes the versions of a weightsync sender", id="noise"),
        pytest.param(noise, None, "the tensors cannot be read: ", id="noise-of-sglang"),
    ]


@pytest.mark.parametrize(("payload", "load_format", "said"), payloads())
def test_foreign_payload_leaves_the_server_alive(server, payload, load_format, said):
    before = server.ask()
    assert server.post("begin_weight_update", {})[0] == 200
    body = {"serialized_named_tensors": [payload], "load_format": load_format}
    status, answer = server.post("update_weights_from_tensor", body)
    assert status == 400
    assert said in answer["message"]
    assert len(answer["message"].splitlines()) == 1
    assert server.post("end_weight_update", {})[0] == 200
    assert server.ask() == before


def test_foreign_handle_leaves_the_server_alive(server):
    from sglang.srt.utils import MultiprocessingSerializer

    before = server.ask()
    # A file descriptor of this process, which the server cannot have.
    handle = MultiprocessingSerializer.serialize(
        [("model.norm.weight", torch.zeros(128).share_memory_())], output_str=True
    )
    assert server.post("begin_weight_update", {})[0] == 200
    body = {"serialized_named_tensors": [handle]}
    status, answer = server.post("update_weights_from_tensor", body)
    assert status == 400
    assert "the tensors cannot be read: " in answer["message"]
    assert server.post("end_weight_update", {})[0] == 200
    assert server.ask() == before


@pytest.mark.parametrize(
    "text", ["{]", "[]", '{"do": "eat"}', '{"do": "join", "sender": "{}"}', '{"do": "update"}']
)
def test_foreign_request_leaves_the_server_alive(server, text):
    before = server.ask()
    server.post("weights_checker", {"action": PREFIX + text})
    assert server.ask() == before
    status, answer = server.post("weights_checker", {"action": "checksum"})
    assert (status, answer["success"]) == (200, True)


def test_other_updates_are_refused_of_a_trainer(server, model, trainer):
    assert trainer.sync(1).all_synced
    tensors = {"serialized_named_tensors": [""]}
    distributed = {"names": [], "dtypes": [], "shapes": []}
    assert server.post("begin_weight_update", {})[0] == 200
    for path, body in (
        ("update_weights_from_disk", {"model_path": str(server.model)}),
        ("update_weights_from_tensor", tensors),
        ("update_weights_from_distributed", distributed),
    ):
        status, answer = server.post(path, body)
        assert status == 400, (path, answer)
        assert "this engine has the versions of a weightsync sender" in answer["message"]
    assert server.post("end_weight_update", {})[0] == 200
    assert server.ask() == sglang_server.greedy(model)
    trainer.remove(server.url)
    trainer.add(Engine(server.url))
    status, answer = server.post("update_weights_from_disk", {"model_path": str(server.model)})
    assert status == 200, answer
    assert server.ask() == sglang_server.greedy(sglang_server.llama())
    assert trainer.sync(2).all_synced
    assert server.ask() == sglang_server.greedy(model)


def test_other_updates_are_refused_after_a_late_join(server, model):
    with weightsync.Sender(model) as sender:
        sender.connect(0)
        engine = Engine(server.url)
        info = sender.init_info.to_json()
        with pytest.raises(EngineCallError, match="version 99 is not here"):
            engine.ask(30, do="join", sender=info, version=99)
        # The worker follows the sender, all the same.
        disk = {"model_path": str(server.model)}
        status, answer = server.post("update_weights_from_disk", disk)
        assert (status, "weightsync sender" in answer["message"]) == (400, True)
        engine.ask(30, do="leave")
        assert server.post("update_weights_from_disk", disk)[0] == 200


def test_server_killed_midway_comes_back_whole(servers, server, model, trainer):
    dying = servers[1]
    trainer.add(Engine(dying.url), info_file=dying.info_file)
    dying.fail("die")
    report = trainer.sync(3)
    assert [line.outcome for line in report.engines] == ["updated", "dead"], report
    assert report.failed[0].reason.startswith("the engine died: /weights_checker: ")
    assert server.ask() == sglang_server.greedy(model)
    assert dying.info_file.stat().st_mode & 0o777 == 0o600
    sglang_server.change(model, 1)
    assert [line.outcome for line in trainer.sync(4).engines] == ["updated", "dead"]

    dying.kill()
    dying.start()
    dying.wait()
    # Nobody has told the server anything since it came back.
    assert dying.ask() == server.ask() == sglang_server.greedy(model)
    status, _ = dying.post("update_weights_from_disk", {"model_path": str(dying.model)})
    assert status == 400
    report = trainer.refresh()
    assert report.all_synced, report
    assert [(line.version, line.pause) for line in report.engines] == [(4, None)] * 2
    assert dying.get("model_info")["weight_version"] == "4"
    sglang_server.change(model, 2)
    report = trainer.sync()
    assert report.all_synced, report
    assert dying.ask() == sglang_server.greedy(model)
    trainer.remove(dying.url)


def test_tensors_that_fail_midway_end_the_server(servers):
    dying = servers[1]
    # The first is written, and the second is not of the model's shape.
    mixed = [("model.norm.weight", torch.zeros(128)), ("lm_head.weight", torch.zeros(3, 3))]
    payload = base64.b64encode(pickle.dumps(mixed)).decode()
    assert dying.post("begin_weight_update", {})[0] == 200
    with contextlib.suppress(OSError):
        dying.post("update_weights_from_tensor", {"serialized_named_tensors": [payload]}, 20)
    assert dying.ended(60)
    dying.kill()
    dying.info_file.unlink(missing_ok=True)
    dying.start()
    dying.wait()
    assert dying.ask() == sglang_server.greedy(sglang_server.llama())


def test_first_weights_survive_a_failed_first_load(servers, model):
    dying = servers[1]
    dying.kill()
    dying.info_file.write_text(json.dumps({"sender": "{}", "first_worker": 0, "timeout": 1}))
    dying.start()
    assert dying.ended(400)
    said = "the engine does not start without its trainer's newest version"
    assert said in dying.said()
    dying.info_file.unlink()
    dying.start()
    dying.wait()
    first = sglang_server.greedy(sglang_server.llama())
    assert dying.ask() == first
    dying.fail("raise")
    with weightsync.Sender(model) as sender:
        trainer = Trainer(sender, [Engine(dying.url)])
        (line,) = trainer.sync().engines
        assert (line.outcome, line.version) == ("kept old", None)
        assert "the load failed midway" in line.reason
        assert dying.ask() == first
        assert dying.get("model_info")["weight_version"] == "default"
        assert trainer.sync().all_synced
        assert dying.ask() == sglang_server.greedy(model)
        trainer.remove(dying.url)
