"""Random Llamas in bfloat16, and what a step of training changes in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

#: The share of elements that a step changes.
CHANGED = 0.011
#: The share of these that moves by one ULP.
_BY_ONE = 0.86


@dataclass(frozen=True)
class Size:
    """A model's name and its configuration."""

    name: str
    settings: dict[str, Any]

    def make(self) -> LlamaForCausalLM:
        """The model, with random weights; every page is touched."""
        torch.manual_seed(0)
        config = LlamaConfig(
            max_position_embeddings=256, bos_token_id=1, eos_token_id=2, **self.settings
        )
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            return LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(before)


SMALL = Size(
    "small Llama",
    {
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
)
LARGE = Size(
    "Llama of 1 GB",
    {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 9,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
)


def size_of(model: torch.nn.Module) -> int:
    """Bytes of all parameters."""
    return sum(one.numel() * one.element_size() for one in model.parameters())


class Steps:
    """Steps of training, made cheaply: the same places move by other amounts at each step."""

    def __init__(self, model: torch.nn.Module, share: float = CHANGED) -> None:
        generator = torch.Generator().manual_seed(1)
        self._changes = []
        for parameter in model.parameters():
            bits = parameter.data.view(torch.int16).view(-1)
            count = max(1, round(bits.numel() * share))
            places = torch.randint(bits.numel(), (count,), generator=generator).unique()
            if share == 1:
                places = torch.arange(bits.numel())
            by_one = torch.rand(len(places), generator=generator) < _BY_ONE
            amounts = torch.where(by_one, 1, 2).to(torch.int16)
            signs = torch.randint(0, 2, (len(places),), generator=generator).to(torch.int16) * 2 - 1
            self._changes.append((bits, places, amounts * signs))
        self._sign = 1

    def step(self) -> None:
        """Moves every chosen element; the next step moves it back."""
        for bits, places, amounts in self._changes:
            bits[places] += amounts * self._sign
        self._sign = -self._sign
