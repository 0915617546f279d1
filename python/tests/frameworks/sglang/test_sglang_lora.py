"""An adapter sent alone: SGLang's greedy tokens are those of transformers, for each version."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import sglang_server
import torch
from adapted import PARTS, RANK, Adapted, join, version_of

import weightsync
from weightsync import lora
from weightsync.sglang import Engine, Trainer


@pytest.fixture(scope="module")
def lora_server(model_folder: Path, found: Path) -> Iterator[sglang_server.Server]:
    server = sglang_server.Server(
        model_folder,
        found,
        "--api-key=secret",
        "--enable-lora",
        "--lora-backend=torch_native",
        f"--max-lora-rank={RANK}",
        "--lora-target-modules",
        *PARTS,
    )
    try:
        server.wait()
        yield server
    finally:
        server.kill()


def _adapters(server: sglang_server.Server, name: str) -> lora.ServerAdapters:
    return lora.ServerAdapters(server.url, name, engine="sglang", api_key="secret")


def _served(server: sglang_server.Server) -> set[str]:
    """The adapters that a server has."""
    return {one["id"] for one in server.get("v1/models")["data"] if one["parent"]}


def test_sglang_answers_with_each_adapter_version(lora_server):
    model = sglang_server.llama()
    plain = sglang_server.greedy(model)
    adapted = Adapted(model)
    adapted.change(0)
    seen = [plain]
    with (
        weightsync.Sender(lora.adapter_of(adapted)) as sender,
        weightsync.Receiver(sender.init_info, 0) as receiver,
        _adapters(lora_server, "policy") as adapters,
    ):
        join(sender, receiver)
        for version in range(1, 4):
            name = adapters.load(receiver.latest())
            assert name == f"policy-v{version}-{receiver.latest().run[1]}"
            expected = sglang_server.greedy(adapted.merged())
            assert expected not in seen
            seen.append(expected)
            assert lora_server.ask(lora_path=name) == expected
            assert _served(lora_server) == {name}
            assert lora_server.ask() == plain
            adapted.change(version)
            sender.send(wait="sent")
            receiver.receive(timeout=60)
    assert not _served(lora_server)


def test_sglang_refuses_an_adapter_and_keeps_the_old(lora_server):
    adapted = Adapted(sglang_server.llama())
    adapted.change(7)
    tensors = lora.adapter_of(adapted)
    with _adapters(lora_server, "kept") as adapters:
        name = adapters.load(version_of(tensors))
        config = json.loads(bytes(tensors[lora.CONFIG].tolist()))
        text = json.dumps({**config, "r": 8 * RANK}).encode()
        wide = {**tensors, lora.CONFIG: torch.tensor(list(text), dtype=torch.uint8)}
        with pytest.raises(weightsync.LoadError, match="kept-v1-.*rank"):
            adapters.load(version_of(wide))
        assert _served(lora_server) == {name}
        assert lora_server.ask(lora_path=name) == sglang_server.greedy(adapted.merged())


def test_server_with_a_key_takes_versions(lora_server):
    model = sglang_server.llama(3)
    with weightsync.Sender(model) as sender:
        trainer = Trainer(sender, [Engine(lora_server.url)], timeout=20)
        (line,) = trainer.sync(step=1).engines
        assert not line.synced and "Unauthorized" in str(line)
        trainer.remove(lora_server.url)
        trainer.add(Engine(lora_server.url, api_key="secret"))
        for step in range(2, 4):
            sglang_server.change(model, step)
            report = trainer.sync(step=step)
            assert report.all_synced, report
            assert lora_server.ask() == sglang_server.greedy(model)
        # Other tests take it for the first one.
        model.load_state_dict(sglang_server.llama().state_dict())
        assert trainer.sync(step=4).all_synced
        trainer.remove(lora_server.url)


def test_sglang_without_lora_is_named(server):
    snapshot = version_of(lora.adapter_of(Adapted(sglang_server.llama())))
    with _adapters(server, "nowhere") as adapters:
        with pytest.raises(weightsync.LoadError, match="--enable-lora"):
            adapters.load(snapshot)
        assert adapters.live is None
