"""An adapter sent alone: vLLM's greedy tokens are those of transformers with it, for each version."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
from adapted import RANK, Adapted, join, misnamed, version_of

import weightsync
from weightsync import lora


def _ask(llm: Any, request: Any) -> list[list[int]]:
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=tiny.LENGTH, detokenize=False, ignore_eos=True
    )
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in tiny.PROMPTS]
    answers = llm.generate(prompts, sampling, use_tqdm=False, lora_request=request)
    return [list(one.outputs[0].token_ids) for one in answers]


@pytest.fixture(scope="module")
def llm(made):
    return made(
        tiny.llama(), enable_lora=True, max_lora_rank=RANK, max_loras=2, max_model_len=512
    )


def test_llm_answers_with_each_adapter_version(llm):
    plain = tiny.greedy(tiny.llama())
    adapted = Adapted(tiny.llama())
    adapted.change(0)
    seen = [plain]
    with (
        weightsync.Sender(lora.adapter_of(adapted)) as sender,
        weightsync.Receiver(sender.init_info, 0) as receiver,
        lora.VllmAdapters(llm, "policy") as adapters,
    ):
        join(sender, receiver)
        for version in range(1, 4):
            request = adapters.load(receiver.latest())
            assert request.lora_name == lora.versioned_name("policy", version)
            expected = tiny.greedy(adapted.merged())
            # Each version has answers of its own, so an old one would be seen.
            assert expected not in seen
            seen.append(expected)
            assert _ask(llm, request) == expected
            assert set(llm.llm_engine.list_loras()) == {request.lora_int_id}
            assert _ask(llm, None) == plain
            adapted.change(version)
            sender.send(wait="sent")
            receiver.receive(timeout=60)
    assert not llm.llm_engine.list_loras()
    assert _ask(llm, None) == plain


def test_refused_adapter_leaves_the_old_one_live(llm):
    adapted = Adapted(tiny.llama())
    adapted.change(7)
    tensors = lora.adapter_of(adapted)
    with lora.VllmAdapters(llm, "other") as adapters:
        request = adapters.load(version_of(tensors))
        with pytest.raises(weightsync.LoadError, match="other-v1-.*x_proj"):
            adapters.load(version_of(misnamed(tensors)))
        assert _ask(llm, request) == tiny.greedy(adapted.merged())


@pytest.fixture(scope="module")
def lora_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tiny.Server]:
    folder = tmp_path_factory.mktemp("lora-server")
    tiny.llama().save_pretrained(folder)
    server = tiny.Server(
        folder,
        enable_lora=True,
        max_lora_rank=RANK,
        max_loras=2,
        max_model_len=512,
        api_key="secret",
    )
    try:
        server.wait()
        yield server
    finally:
        server.kill()


def _served(server: tiny.Server) -> set[str]:
    """The adapters that a server has."""
    cards = _get(server, "v1/models")["data"]
    return {one["id"] for one in cards} - {server.model}


def _get(server: tiny.Server, path: str) -> Any:
    request = urllib.request.Request(
        f"{server.url}/{path}", headers={"Authorization": "Bearer secret"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_server_answers_with_each_adapter_version(lora_server):
    plain = tiny.greedy(tiny.llama())
    adapted = Adapted(tiny.llama())
    adapted.change(0)
    seen = [plain]
    with (
        weightsync.Sender(lora.adapter_of(adapted)) as sender,
        weightsync.Receiver(sender.init_info, 0) as receiver,
        lora.ServerAdapters(lora_server.url, "policy", api_key="secret") as adapters,
    ):
        join(sender, receiver)
        for version in range(1, 4):
            name = adapters.load(receiver.latest())
            assert name == f"policy-v{version}-{receiver.latest().run[1]}"
            expected = tiny.greedy(adapted.merged())
            assert expected not in seen
            seen.append(expected)
            assert lora_server.ask(name) == expected
            assert _served(lora_server) == {name}
            assert lora_server.ask() == plain
            adapted.change(version)
            sender.send(wait="sent")
            receiver.receive(timeout=60)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            lora_server.ask(name.replace("v3", "v1"))
        last = adapters.load(receiver.latest())
        # A server that has started again has none.
        lora_server.post("v1/unload_lora_adapter", {"lora_name": last})
        assert adapters.load(receiver.latest()) == last
        assert lora_server.ask(last) == tiny.greedy(adapted.merged())
    assert not _served(lora_server)


def test_server_refuses_an_adapter_and_keeps_the_old(lora_server):
    adapted = Adapted(tiny.llama())
    adapted.change(7)
    tensors = lora.adapter_of(adapted)
    with lora.ServerAdapters(lora_server.url, "kept", api_key="secret") as adapters:
        name = adapters.load(version_of(tensors))
        with pytest.raises(weightsync.LoadError, match="kept-v1-.*x_proj"):
            adapters.load(version_of(misnamed(tensors)))
        assert _served(lora_server) == {name} and adapters.live.name == name
        assert lora_server.ask(name) == tiny.greedy(adapted.merged())


def test_server_loses_what_another_object_left(lora_server, tmp_path):
    adapted = Adapted(tiny.llama())
    adapted.change(1)
    old = version_of(lora.adapter_of(adapted))
    # Somebody's own, of a name that a version could have.
    lora.save_adapter(old, tmp_path / "left-v1")
    lora_server.post(
        "v1/load_lora_adapter", {"lora_name": "left-v1", "lora_path": str(tmp_path / "left-v1")}
    )
    # As if its process had been killed.
    left = lora.ServerAdapters(lora_server.url, "left", tmp_path, api_key="secret")
    left.load(old)
    adapted.change(2)
    new = version_of(lora.adapter_of(adapted))
    with lora.ServerAdapters(lora_server.url, "left", tmp_path, api_key="secret") as adapters:
        name = adapters.load(new)
        assert lora_server.ask(name) == tiny.greedy(adapted.merged())
        assert _served(lora_server) == {name, "left-v1"}
    lora_server.post("v1/unload_lora_adapter", {"lora_name": "left-v1"})


def test_server_that_loads_no_adapters_is_named(lora_server):
    snapshot = version_of(lora.adapter_of(Adapted(tiny.llama())))
    for url, how, words in [
        (lora_server.url, {}, "does not say what it has: Unauthorized"),
        (lora_server.url, {"api_key": "secret", "engine": "sglang"}, 'give engine="vllm"'),
        ("http://127.0.0.1:9", {}, "refused"),
    ]:
        with lora.ServerAdapters(url, "nowhere", **how) as adapters:
            with pytest.raises(weightsync.LoadError, match=words):
                adapters.load(snapshot)
            assert adapters.live is None
