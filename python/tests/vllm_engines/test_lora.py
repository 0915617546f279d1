"""An adapter sent alone: vLLM's greedy tokens are those of transformers with it, for each version."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import tiny
import torch

import weightsync
from weightsync import lora

RANK, ALPHA = 8, 16
PARTS = ("q_proj", "v_proj", "gate_proj", "down_proj")


class Adapted:
    """A Llama with LoRA, as PEFT has it: the same names and the same configuration."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.peft_config = {"default": self}
        self.own: dict[str, torch.Tensor] = {}
        self.base: dict[str, torch.Tensor] = {}
        for name, tensor in model.state_dict().items():
            module, _, end = name.rpartition(".")
            if not module.endswith(PARTS):
                self.base[f"base_model.model.{name}"] = tensor
                continue
            module = f"base_model.model.{module}"
            self.base[f"{module}.base_layer.{end}"] = tensor
            for side, shape in (("A", (RANK, tensor.shape[1])), ("B", (tensor.shape[0], RANK))):
                self.own[f"{module}.lora_{side}.default.weight"] = torch.zeros(shape)

    def to_dict(self) -> dict[str, Any]:
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": RANK,
            "lora_alpha": ALPHA,
            "target_modules": set(PARTS),
            "bias": "none",
        }

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {**self.base, **self.own}

    def change(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.own.values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)

    def greedy(self) -> list[list[int]]:
        """What transformers generates with the adapter added to the weights."""
        model = tiny.llama()
        model.load_state_dict(lora.merged(self.state_dict(), alpha=ALPHA))
        return tiny.greedy(model)


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
        joining = threading.Thread(target=receiver.connect)
        joining.start()
        sender.connect(1, timeout=60)
        joining.join()
        for version in range(1, 4):
            request = adapters.load(receiver.latest())
            assert request.lora_name == lora.versioned_name("policy", version)
            expected = adapted.greedy()
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
    bad = {name.replace("q_proj", "x_proj"): one for name, one in tensors.items()}
    with (
        weightsync.Sender(tensors) as good_sender,
        weightsync.Sender(bad) as bad_sender,
        lora.VllmAdapters(llm, "other") as adapters,
    ):
        snapshots = []
        for sender in (good_sender, bad_sender):
            receiver = weightsync.Receiver(sender.init_info, 0)
            joining = threading.Thread(target=receiver.connect)
            joining.start()
            sender.connect(1, timeout=60)
            joining.join()
            snapshots.append(receiver.latest().copy())
            receiver.shutdown()
        request = adapters.load(snapshots[0])
        with pytest.raises(weightsync.LoadError, match="other-v1-.*x_proj"):
            adapters.load(snapshots[1])
        assert _ask(llm, request) == adapted.greedy()
