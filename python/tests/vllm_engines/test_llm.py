"""An ``LLM`` in the trainer's process: greedy tokens are transformers' after every update."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import damage
import pytest
import tiny

import weightsync
from weightsync import staleness
from weightsync.vllm import EngineCallError, Trainer
from weightsync.vllm._engines import LLMEngine

#: Hosts of their own, on one: what changed travels.
DELTAS = "distributed:listen=127.0.0.1:0,share=none,deltas=always"


@pytest.fixture(scope="module")
def llm(made):
    return made(tiny.llama())


def test_llm_answers_as_transformers_ten_times(llm):
    model = tiny.llama()
    assert tiny.ask(llm) == tiny.greedy(model)
    with weightsync.Sender(model) as sender:
        trainer = Trainer(sender, [llm])
        for step in range(1, 11):
            tiny.change(model, step)
            report = trainer.sync(step=step)
            assert report.all_synced, report
            assert tiny.ask(llm) == tiny.greedy(model), step
            assert llm.get_weight_version() == str(step)
        (line,) = report.engines
        assert (line.engine, line.version, line.reason) == ("LLM 0", 10, None)
        assert 0 < line.pause < line.took
        assert str(report).splitlines()[0] == "v10 is on 1 of 1 engines"
        assert report.to_dict()["engines"][0]["outcome"] == "updated"
        request = tiny.requests(llm)[0]
        assert staleness.versions_of(request) == [10] * len(request.outputs[0].token_ids)


def test_deltas_are_a_small_part_of_the_bytes(llm):
    model = tiny.llama(3)
    with weightsync.Sender(model, scheme=DELTAS) as sender:
        trainer = Trainer(sender, [llm])
        whole = trainer.sync().engines[0].bytes
        for seed in range(3):
            tiny.change(model, seed, share=0.01)
            report = trainer.sync()
            assert report.all_synced, report
            assert tiny.ask(llm) == tiny.greedy(model)
        assert 0 < report.engines[0].bytes < whole / 20


def test_another_model_is_refused_before_the_pause(llm):
    model = tiny.llama(4)
    with weightsync.Sender(model) as sender:
        assert Trainer(sender, [llm]).sync().all_synced
    other = tiny.llama(5, intermediate_size=256, num_hidden_layers=3)
    with weightsync.Sender(other) as sender:
        trainer = Trainer(sender, [llm])
        for _ in range(2):
            (line,) = trainer.sync().engines
            assert (line.outcome, line.pause) == ("kept old", None)
            for part in (
                "not in the model: model.layers.2.",
                "model.layers.0.mlp.gate_proj.weight is [256, 128] and should be [128, 128]",
            ):
                assert part in line.reason, line.reason
    assert tiny.ask(llm) == tiny.greedy(model)


def test_sleeping_llm_wakes_with_the_newest_version(llm):
    model = tiny.llama(6)
    with weightsync.Sender(model) as sender:
        trainer = Trainer(sender, [llm])
        assert trainer.sync().all_synced
        trainer.sleep(level=0)
        for seed in range(2):
            tiny.change(model, seed)
            (line,) = trainer.sync().engines
            assert (line.outcome, line.version) == ("asleep", 1)
        (line,) = trainer.wake().engines
        assert (line.outcome, line.version) == ("updated", 3)
        assert tiny.ask(llm) == tiny.greedy(model)
        (line,) = trainer.refresh().engines
        assert (line.outcome, line.pause) == ("updated", None)


def test_absent_engine_is_one_line(llm):
    model = tiny.llama(7)
    with weightsync.Sender(model) as sender:
        trainer = Trainer(sender, ["http://127.0.0.1:9", llm], timeout=20)
        report = trainer.sync()
        assert [line.outcome for line in report.engines] == ["dead", "updated"]
        assert [line.engine for line in report.failed] == ["http://127.0.0.1:9"]
        assert tiny.ask(llm) == tiny.greedy(model)
        trainer.remove("http://127.0.0.1:9")
        assert trainer.sync().all_synced


def test_llm_that_its_user_put_to_sleep_is_left_alone(llm):
    model = tiny.llama(11)
    with weightsync.Sender(model) as sender:
        trainer = Trainer(sender, [llm])
        assert trainer.sync().all_synced
        for sleep in (lambda: llm.sleep(level=2), lambda: llm.sleep(level=0)):
            sleep()
            tiny.change(model, 1)
            for _ in range(2):
                (line,) = trainer.sync().engines
                assert (line.outcome, line.pause) == ("asleep", None), line
                assert "by somebody else" in line.reason
            report = trainer.wake()
            assert report.all_synced, report
            assert trainer.wake().engines == []
            assert tiny.ask(llm) == tiny.greedy(model)


def test_sleep_goes_on_where_one_engine_fails(llm):
    model = tiny.llama(12)
    with weightsync.Sender(model) as sender:
        trainer = Trainer(sender, ["http://127.0.0.1:9", llm], timeout=20)
        trainer.sync()
        with pytest.raises(EngineCallError, match="^http://127.0.0.1:9 does not sleep: "):
            trainer.sleep(level=2)
        lines = trainer.sync().engines
        assert [line.outcome for line in lines] == ["dead", "asleep"]
        lines = trainer.wake().engines
        assert [line.outcome for line in lines] == ["dead", "updated"]
        assert tiny.ask(llm) == tiny.greedy(model)


def test_first_sync_sends_once(llm, monkeypatch):
    model = tiny.llama(13)
    with weightsync.Sender(model) as sender:
        monkeypatch.setattr(sender, "send", lambda *_, **__: pytest.fail("it was sent twice"))
        report = Trainer(sender, [llm]).sync(step=7)
        assert report.all_synced, report
        assert (report.version, report.engines[0].version, sender.version) == (7, 7, 7)
        assert llm.get_weight_version() == "7"
        assert tiny.ask(llm) == tiny.greedy(model)


def test_llm_with_a_stale_cache_does_not_resume(llm, monkeypatch):
    model = tiny.llama(14)
    with weightsync.Sender(model) as sender:
        trainer = Trainer(sender, [llm])
        assert trainer.sync().all_synced
        before = tiny.greedy(model)
        assert tiny.ask(llm) == before
        tiny.change(model, 1)
        with monkeypatch.context() as patch:
            patch.setattr(llm, "reset_prefix_cache", lambda **_: False)
            (line,) = trainer.sync().engines
            assert line.outcome == "not resumed", line
            assert "its prefix cache could not be reset" in line.reason
            assert tiny.ask_core(llm, "is_scheduler_paused")
        report = trainer.refresh()
        assert report.all_synced, report
        assert tiny.ask(llm) == tiny.greedy(model) != before


def test_llm_that_was_not_paused_is_not_held(llm):
    class Odd(LLMEngine):
        def ranks(self, timeout):
            return given()

    def zero():
        return 0

    def surprise():
        raise KeyError("nobody expects this")

    model = tiny.llama(15)
    with weightsync.Sender(model) as sender:
        trainer = Trainer(sender, [Odd("LLM", llm)])
        for given, words in [(zero, "it says that it has 0 workers"), (surprise, "KeyError")]:
            (line,) = trainer.sync().engines
            assert (line.outcome, line.pause) == ("kept old", None), line
            assert words in line.reason
    assert not tiny.ask_core(llm, "is_scheduler_paused")


def test_fused_trainer_is_mapped_to_the_checkpoint(llm):
    model = tiny.llama(16)
    sizes = {"q": 128, "k": 64, "v": 64}
    layer = "model.layers.*"
    mapping = (
        weightsync.Mapping()
        .split(
            f"{layer}.self_attn.qkv_proj.weight",
            {f"{layer}.self_attn.{part}_proj.weight": size for part, size in sizes.items()},
        )
        .split(
            f"{layer}.mlp.gate_up_proj.weight",
            {f"{layer}.mlp.{part}_proj.weight": 128 for part in ("gate", "up")},
        )
    )
    with weightsync.Sender(fused(model), mapping=mapping) as sender:
        trainer = Trainer(sender, [llm])
        for step in range(1, 4):
            tiny.change(model, step)
            report = trainer.sync(step=step, weights=fused(model))
            assert report.all_synced, report
            assert tiny.ask(llm) == tiny.greedy(model), step


def fused(model):
    """The weights as a trainer has them that computes q, k and v, and gate and up, in one go."""
    import torch

    weights = {}
    for name, tensor in model.state_dict().items():
        found = re.fullmatch(r"(.*\.)(q|k|v|gate|up)_proj\.weight", name)
        into = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}
        fused_name = f"{found[1]}{into[found[2]]}_proj.weight" if found else name
        weights.setdefault(fused_name, []).append(tensor)
    return {name: torch.cat(parts) for name, parts in weights.items()}


@pytest.mark.parametrize("moment", ["join", "update"])
def test_relay_that_dies_midway_leaves_whole_weights(llm, tmp_path, moment):
    model = tiny.llama(17)
    with weightsync.Sender(model, scheme="distributed:share=relay,deltas=always") as sender:
        sender.connect(0)
        info = tmp_path / "info.json"
        info.write_text(sender.init_info.to_json())
        command = [sys.executable, "-P", "-m", "weightsync", "relay", "--info", info]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=tiny.surroundings()) as relay:
            assert b"joined" in relay.stdout.readline()

            class Killing(LLMEngine):
                def ask(self, timeout, **request):
                    if request["do"] == moment == "join" and sender.version == 3:
                        relay.kill()
                    super().ask(timeout, **request)

                def start(self, timeout):
                    super().start(timeout)
                    if moment == "update" and sender.version == 3:
                        relay.kill()

            trainer = Trainer(sender, [Killing("LLM", llm)], timeout=20)
            assert trainer.sync().all_synced
            check_whole(llm, model, trainer)
            check_whole(llm, model, trainer, may_fail=True)
            assert relay.wait(20) == -signal.SIGKILL
        check_whole(llm, model, trainer)


def check_whole(llm, model, trainer, *, may_fail=False):
    """Trains a step and syncs it: the answers are all of the old version, or all of the new."""
    old = tiny.greedy(model)
    tiny.change(model, trainer._sender.version)
    report = trainer.sync()
    assert report.all_synced or may_fail, report
    outcome = report.engines[0].outcome
    assert outcome in ("updated", "kept old"), report
    assert tiny.ask(llm) == (tiny.greedy(model) if outcome == "updated" else old), report


def test_damaged_chunk_leaves_whole_weights(llm):
    model = tiny.llama(18)
    with weightsync.Sender(model, scheme=DELTAS) as sender:
        with damage.Proxy(sender.init_info.to_json()) as proxy:

            class Behind(LLMEngine):
                def ask(self, timeout, **request):
                    if request["do"] == "join":
                        request["sender"] = proxy.info
                    super().ask(timeout, **request)

            trainer = Trainer(sender, [Behind("LLM", llm)], timeout=20)
            assert trainer.sync().all_synced
            check_whole(llm, model, trainer)
            proxy.armed = True
            check_whole(llm, model, trainer, may_fail=True)
            assert proxy.damaged == 1
            check_whole(llm, model, trainer)
