"""Engines that load a folder when a route of their server says so."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from patience import patience
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import weightsync
from weightsync.engines import Remote, Trainer
from weightsync.errors import SettingError
from weightsync.sglang import Engine as SglangEngine

ROUTES: dict[str, Any] = {
    "update": ("/load", {"path": "{directory}", "label": "{version}"}),
    "pause": "/stop",
    "resume": "/go",
}


def llama(seed: int, *, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32}
    config = LlamaConfig(
        **sizes,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def mixture(of: str, seed: int) -> PreTrainedModel:
    """A mixture of experts. transformers 5 has a layer's experts in one tensor, and its checkpoint
    each expert in three."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if of == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4)).eval()
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, head_dim=16)).eval()


class Server:
    def __init__(self, folder: Path, port: str = "0") -> None:
        program = str(Path(__file__).parent / "small_engine.py")
        self.process = subprocess.Popen(
            [sys.executable, program, str(folder), port], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"

    def ask(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(self.url + path, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=patience(30)) as answer:
            return json.loads(answer.read())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("checkpoint")
    llama(0).save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    made = Server(checkpoint)
    yield made
    made.kill()


@pytest.fixture
def fresh(checkpoint: Path) -> Iterator[Server]:
    """A server that has had no version."""
    made = Server(checkpoint)
    yield made
    made.kill()


def tokens(model: PreTrainedModel) -> list[int]:
    ids = torch.tensor([[1, 5, 9]])
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8
        )
    found: list[int] = out[0, 3:].tolist()
    return found


def generated(server: Server) -> tuple[list[int], str]:
    said = server.ask("/generate", ids=[1, 5, 9])
    return said["ids"], said["version"]


def change(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for one in model.parameters():
            one += torch.randn(one.shape, generator=generator) * 0.1


def test_remote_engine_has_each_version(server: Server, checkpoint: Path, tmp_path: Path) -> None:
    folders = tmp_path / "folders"
    folders.mkdir()
    model = llama(1)
    remote = Remote(server.url, routes=ROUTES, like=checkpoint, directory=folders)
    with weightsync.Sender(model) as sender:
        trainer = Trainer(sender, [remote])
        for step in (3, 4, 9):
            change(model, step)
            report = trainer.sync(step)
            assert report.all_synced, report
            assert generated(server) == (tokens(model), str(step))
            # One folder at a time.
            assert len(list(folders.glob("*/*"))) == 1
        trainer.remove(server.url)
    assert list(folders.glob("*/*")) == []
    del trainer, remote
    gc.collect()
    assert list(folders.iterdir()) == []


@pytest.mark.parametrize("end", ["drop", "exit", "restart", "load"])
def test_forked_process_keeps_the_engines_folders(tmp_path: Path, end: str) -> None:
    program = f"""
import gc, os, sys
from weightsync.engines import Remote

remote = Remote("http://127.0.0.1:1", routes={ROUTES!r}, directory={str(tmp_path)!r})
kept = remote._folders.new("v1")
remote._folders.keep(kept)
if (child := os.fork()) == 0:
    if {end!r} == "restart":
        remote.is_gone()
    elif {end!r} == "drop":
        del remote
        gc.collect()
    elif {end!r} == "load":
        # Its versions lie in a folder of its own, and each goes with the next one.
        for name in ("v2", "v3"):
            own = remote._folders.new(name)
            remote._folders.keep(own)
        assert own.parent != kept.parent and list(own.parent.iterdir()) == [own]
        sys.exit()
    else:
        sys.exit()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(kept.exists())
"""
    said = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    assert said.stdout == "True\n"
    # The parent's end removes them.
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("of", ["mixtral", "qwen3-moe"])
def test_remote_engine_gets_experts_in_the_form_of_its_checkpoint(of: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    mixture(of, 0).save_pretrained(checkpoint)
    model = mixture(of, 1)
    server = Server(checkpoint)
    try:
        with weightsync.Sender(model) as sender:
            trainer = Trainer(sender, [Remote(server.url, routes=ROUTES, like=checkpoint)])
            for step in (2, 3):
                change(model, step)
                report = trainer.sync(step)
                assert report.all_synced, report
                assert generated(server) == (tokens(model), str(step))
            trainer.remove(server.url)
    finally:
        server.kill()


@pytest.mark.parametrize("before", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_refused_load_brings_the_old_weights_back(
    request: pytest.FixtureRequest, checkpoint: Path, before: int
) -> None:
    server: Server = request.getfixturevalue("server" if before else "fresh")
    model = llama(1)
    with weightsync.Sender(model) as sender:
        trainer = Trainer(sender, [Remote(server.url, routes=ROUTES, like=checkpoint)])
        if before:
            trainer.sync(1)
        told = generated(server)
        server.ask("/refuse", times=1)
        change(model, 2)
        report = trainer.sync(2)
        assert [one.outcome for one in report.engines] == ["kept old"], report
        assert "model.layers.0.self_attn.v_proj.weight was refused" in str(report)
        assert generated(server) == told
        assert trainer.refresh().all_synced
        assert generated(server) == (tokens(model), "2")
        trainer.remove(server.url)


def test_engine_that_refuses_all_loads_is_held(server: Server, checkpoint: Path) -> None:
    model = llama(1)
    with weightsync.Sender(model) as sender:
        trainer = Trainer(sender, [Remote(server.url, routes=ROUTES, like=checkpoint)])
        trainer.sync(1)
        server.ask("/refuse", times=100)
        change(model, 2)
        assert [one.outcome for one in trainer.sync(2).engines] == ["held"]
        server.ask("/refuse", times=0)
        assert trainer.refresh().all_synced
        assert generated(server) == (tokens(model), "2")
        trainer.remove(server.url)


def test_dead_remote_engine_is_one_line(server: Server, checkpoint: Path) -> None:
    model, dies = llama(1), Server(checkpoint)
    with weightsync.Sender(model) as sender:
        engines = [Remote(one.url, routes=ROUTES, like=checkpoint) for one in (dies, server)]
        trainer = Trainer(sender, engines)
        trainer.sync(1)
        dies.kill()
        change(model, 2)
        report = trainer.sync()
        assert report.engines[0].outcome == "dead", report
        assert report.engines[1].synced, report
        assert generated(server)[0] == tokens(model)
        for one in engines:
            trainer.remove(one.name)


def test_restarted_engine_has_the_version_after_a_refresh(checkpoint: Path) -> None:
    first = Server(checkpoint)
    model = llama(1)
    with weightsync.Sender(model) as sender:
        trainer = Trainer(sender, [Remote(first.url, routes=ROUTES, like=checkpoint)])
        trainer.sync(1)
        port = first.url.rpartition(":")[2]
        first.kill()
        (line,) = trainer.refresh().engines
        assert line.outcome == "dead", line
        second = Server(checkpoint, port)
        assert generated(second)[0] == tokens(llama(0))
        assert trainer.refresh().all_synced
        assert generated(second) == (tokens(model), "1")
        trainer.remove(first.url)
        second.kill()


def test_late_load_leaves_the_engine_held(server: Server, checkpoint: Path) -> None:
    model = llama(1)
    with weightsync.Sender(model) as sender:
        trainer = Trainer(sender, [Remote(server.url, routes=ROUTES, like=checkpoint)], timeout=8)
        trainer.sync(1)
        server.ask("/slow", seconds=12)
        change(model, 2)
        (line,) = trainer.sync(2).engines
        assert line.outcome == "held", line
        assert "did not answer in 8 s" in str(line)
        # The late load ends, and the next update is whole.
        server.ask("/calls")
        assert trainer.refresh().all_synced
        assert generated(server) == (tokens(model), "2")
        trainer.remove(server.url)


def test_redirect_is_no_success(server: Server, checkpoint: Path) -> None:
    routes = {**ROUTES, "update": "/moved"}
    with weightsync.Sender(llama(1)) as sender:
        trainer = Trainer(sender, [Remote(server.url, routes=routes)])
        (line,) = trainer.sync(1).engines
        assert not line.synced
        assert "/moved answered 307 and leads to /load/" in str(line)
        trainer.remove(server.url)


@pytest.mark.parametrize(
    ("path", "outcome", "words"),
    [
        ("/cut", "dead", "IncompleteRead"),
        ("/no-json", "held", "answered with text that is not JSON"),
        ("/long", "held", "answered with more than 1,048,576 bytes"),
    ],
)
def test_broken_answer_is_no_success(
    server: Server, checkpoint: Path, path: str, outcome: str, words: str
) -> None:
    with weightsync.Sender(llama(1)) as sender:
        trainer = Trainer(sender, [Remote(server.url, routes={**ROUTES, "update": path})])
        (line,) = trainer.sync(1).engines
        assert line.outcome == outcome and words in str(line), line
        trainer.remove(server.url)
        # An answer of any kind may be to a pause.
        trainer.add(Remote(server.url, routes={**ROUTES, "resume": "/no-json"}, like=checkpoint))
        assert "not JSON" in str(trainer.sync(2).engines[0])
        trainer.remove(server.url)


def test_server_with_a_key_is_given_it(server: Server, checkpoint: Path) -> None:
    routes = {"update": "/locked"}
    with weightsync.Sender(llama(1)) as sender:
        trainer = Trainer(sender, [Remote(server.url, routes=routes)])
        assert "no key" in str(trainer.sync(1).engines[0])
        trainer.remove(server.url)
        trainer.add(Remote(server.url, routes=routes, api_key="secret"))
        assert trainer.sync(2).all_synced
        trainer.remove(server.url)
    for key in ("", "secret\n", "clé"):
        with pytest.raises(SettingError, match="api_key: expected") as raised:
            Remote(server.url, routes=routes, api_key=key)
        assert not key or key not in str(raised.value)


def test_model_of_another_shape_is_refused(server: Server, checkpoint: Path) -> None:
    model = llama(1)
    model.model.layers = model.model.layers[:1]
    before = server.ask("/calls")["calls"].count("/stop")
    with weightsync.Sender(model) as sender:
        trainer = Trainer(sender, [Remote(server.url, routes=ROUTES, like=checkpoint)])
        (line,) = trainer.sync(1).engines
        assert line.outcome == "kept old"
        assert "missing: model.layers.1" in str(line)
        assert server.ask("/calls")["calls"].count("/stop") == before
        trainer.remove(server.url)


def test_tied_weights_reach_a_remote_engine(tmp_path: Path) -> None:
    model = llama(1, tied=True)
    llama(0, tied=True).save_pretrained(tmp_path)
    server = Server(tmp_path)
    try:
        with weightsync.Sender(model) as sender:
            trainer = Trainer(sender, [Remote(server.url, routes=ROUTES, like=tmp_path)])
            assert trainer.sync(1).all_synced
            assert generated(server) == (tokens(model), "1")
            trainer.remove(server.url)
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("routes", "words"),
    [
        ({}, 'expected one for "update"'),
        ({"update": "/load", "freeze": "/stop"}, "got 'freeze'"),
        ({"update": "/load", "pause": "/stop"}, 'both of "pause" and "resume"'),
        ({"update": 7}, "expected a path"),
        ({"update": ("/load", "body")}, "expected a path, or a path and an object"),
    ],
)
def test_wrong_routes_are_refused(routes: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        Remote("http://127.0.0.1:9", routes=routes)


def test_secret_goes_to_no_engine_in_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    other, here = "http://10.255.255.1:8000", "http://127.0.0.1:8000"
    engines = [other, SglangEngine(other)]
    with weightsync.Sender(llama(0)) as sender:
        for engine in engines:
            with pytest.raises(SettingError, match="in plain text.*https://.*insecure_plaintext"):
                Trainer(sender).add(engine)
        for allowed in (here, "http://localhost:1", "http://0.0.0.0:1", "http://[::1]:1"):
            Trainer(sender).add(allowed)
        Trainer(sender).add(other.replace("http:", "https:"))
        # This process asks by a route that is told the folder alone.
        Trainer(sender).add(Remote(other, routes={"update": "/load"}))
        monkeypatch.setenv("WEIGHTSYNC_INSECURE_PLAINTEXT", "1")
        for engine in engines:
            Trainer(sender).add(engine)


@pytest.mark.parametrize("scheme", ["distributed:insecure-plaintext", "store"])
def test_plain_text_to_engines_is_allowed_by_scheme(
    scheme: str, tmp_path: Path
) -> None:
    chosen = f"store:{tmp_path}" if scheme == "store" else scheme
    with weightsync.Sender(llama(0), scheme=chosen) as sender:
        assert Trainer(sender).add("http://10.255.255.1:8000") == "http://10.255.255.1:8000"
