"""TRL's trainers on the CPU, with a real server: short trainings, compared after every sync."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, chat_template_utils
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    packing,
)
from trl.generation import vllm_generation

import weightsync.trl
from weightsync.errors import SettingError, UnsupportedError, WrongWeightsError

PROMPTS = [f"w{at} w{at + 1} w{at + 2}" for at in range(10, 40)]
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "num_generations": 2,
    "max_completion_length": 6,
    "learning_rate": 1e-2,
    "max_steps": 3,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
    "report_to": [],
    "save_strategy": "no",
    "logging_steps": 1,
}


def even_words(completion_ids: Any, **_: Any) -> list[float]:
    """A reward that differs between completions: how many of the tokens are even."""
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def as_sent(model: Any) -> Any:
    """A model of transformers with the weights that a trainer's model has."""
    fresh = tiny.llama()
    fresh.load_state_dict(model.state_dict())
    return fresh


@pytest.fixture
def installed() -> Any:
    weightsync.trl.install(timeout=30.0)
    yield
    weightsync.trl.uninstall()


@pytest.fixture
def grpo(installed: Any, folder: Path, servers: Any, tmp_path: Path) -> Any:
    """Makes a ``GRPOTrainer`` that generates with the first server."""
    made = []

    def make(**more: Any) -> Any:
        arguments = GRPOConfig(
            str(tmp_path),
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=servers[0].url,
            **SETTINGS,
        )
        made.append(
            GRPOTrainer(
                AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
                even_words,
                args=arguments,
                train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
                processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
                **more,
            )
        )
        return made[-1]

    yield make
    for trainer in made:
        trainer.vllm_generation.vllm_client.close_communicator()


def test_grpo_trains_with_the_server(grpo: Any, servers: Any) -> None:
    trainer = grpo()
    generation, answers = trainer.vllm_generation, []
    sync = generation.sync_weights

    def compared() -> None:
        sync()
        answers.append(servers[0].ask())
        assert answers[-1] == tiny.greedy(as_sent(trainer.model))

    generation.sync_weights = compared
    trainer.train()
    transfer = generation.vllm_client.communicator
    assert len(answers) == transfer.version == 3
    assert answers[0] != answers[-1]
    assert transfer.report.all_synced
    assert servers[0].get("weight_info")["weight_version"] == "3"


def test_grpo_merges_its_adapter_for_a_sync(grpo: Any, servers: Any) -> None:
    from peft import LoraConfig

    adapter = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    trainer = grpo(peft_config=adapter)
    before = {name: one.clone() for name, one in trainer.model.state_dict().items()}
    for _ in range(2):
        trainer.vllm_generation.sync_weights()
        after = trainer.model.state_dict()
        # To merge and to take out again rounds.
        for name, one in before.items():
            torch.testing.assert_close(after[name], one, msg=name)
    trainer.model.merge_adapter()
    names = {name.removeprefix("base_model.model."): one for name, one in after.items()}
    merged = tiny.llama()
    merged.load_state_dict(
        {
            name.replace(".base_layer", ""): one
            for name, one in names.items()
            if "lora_" not in name
        }
    )
    assert servers[0].ask() == tiny.greedy(merged)


def test_client_sends_whole_versions_alone(installed: Any, servers: Any) -> None:
    client = vllm_generation.VLLMClient(base_url=servers[0].url)
    client.init_communicator("cpu")
    try:
        model = tiny.llama(20)
        client.update_model_params(model)
        expected = tiny.greedy(model)
        assert servers[0].ask() == expected
        name, tensor = next(tiny.llama(21).named_parameters())
        with pytest.raises(UnsupportedError, match="weight_update"):
            client.update_named_param(name, tensor)
        with pytest.raises(WrongWeightsError), client.weight_update():
            client.update_named_param(name, tensor)
        with pytest.raises(ZeroDivisionError), client.weight_update():
            client.update_model_params(tiny.llama(21))
            raise ZeroDivisionError
        assert (servers[0].ask(), client.communicator.version) == (expected, 1)
        with client.weight_update():
            for name, tensor in tiny.llama(21).named_parameters():
                client.update_named_param(name, tensor)
        assert servers[0].ask() == tiny.greedy(tiny.llama(21))
        client.reset_prefix_cache()
    finally:
        client.close_communicator()


def test_server_without_the_backend_is_refused(
    installed: Any, servers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = vllm_generation.VLLMClient(base_url=servers[0].url)
    for config in (None, {"backend": "nccl"}):
        found = {"weight_transfer_config": config}
        monkeypatch.setattr(client, "get_server_info", lambda found=found: found)
        with pytest.raises(SettingError, match="--weight-transfer-config"):
            client.init_communicator()


class Attention:
    """TRL's attention kernel runs on GPUs alone: this is the call of it that TRL makes."""

    @staticmethod
    def flash_attn_varlen_func(
        query: Any, key: Any, value: Any, starts_q: Any, starts_k: Any, *_: Any, **settings: Any
    ) -> Any:
        parts = []
        for at in range(len(starts_q) - 1):
            q = query[starts_q[at] : starts_q[at + 1]].transpose(0, 1)
            k = key[starts_k[at] : starts_k[at + 1]].transpose(0, 1)
            v = value[starts_k[at] : starts_k[at + 1]].transpose(0, 1)
            ahead = k.shape[1] - q.shape[1]
            seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(ahead)
            part = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, scale=settings["softmax_scale"], enable_gqa=True
            )
            parts.append(part.transpose(0, 1))
        return torch.cat(parts)


def test_async_grpo_trains_with_the_servers(
    folder: Path, servers: Any, transfers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_flash_attn", lambda: Attention)
    # It asks CUDA for the name of the device.
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)
    transfer = transfers([server.url for server in servers])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    # TRL chooses one by the chat template, for known models alone.
    tokenizer.response_template = chat_template_utils.qwen3_template
    arguments = AsyncGRPOConfig(
        str(tmp_path),
        vllm_server_base_url=servers[0].url,
        token_budget=256,
        weight_sync_steps=1,
        dtype="float32",
        max_inflight_tasks=4,
        queue_maxsize=16,
        **SETTINGS,
    )
    trainer = AsyncGRPOTrainer(
        str(folder),
        even_words,
        args=arguments,
        train_dataset=Dataset.from_dict(
            {"prompt": [[{"role": "user", "content": one}] for one in PROMPTS]}
        ),
        processing_class=tokenizer,
        weight_transfer=transfer,
    )
    answers = []
    sync = trainer._sync_weight

    def compared() -> None:
        sync()
        answers.append([server.ask() for server in servers])
        assert answers[-1] == [tiny.greedy(as_sent(trainer.model))] * 2
        assert trainer.model_version == transfer.version

    monkeypatch.setattr(trainer, "_sync_weight", compared)
    for callback in trainer.callback_handler.callbacks:
        if getattr(callback, "fn", None) == sync:
            callback.fn = compared
    trainer.train()
    # One before the training, and one after each step.
    assert len(answers) == transfer.version == 4
    assert answers[0] != answers[-1]
    # The trainer has destroyed it.
    assert transfer.trainer is None
