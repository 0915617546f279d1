"""A Llama with an adapter, and versions of it."""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch

import weightsync
from weightsync import lora

RANK, ALPHA = 8, 16
PARTS = ("q_proj", "v_proj", "gate_proj", "down_proj")


class Adapted:
    """A Llama with LoRA, as PEFT has it: the same names and the same configuration."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.peft_config = {"default": self}
        # That of the caller keeps its weights.
        self.model = copy.deepcopy(model)
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

    def merged(self) -> Any:
        """The model with the adapter added to its weights."""
        self.model.load_state_dict(lora.merged(self.state_dict(), alpha=ALPHA))
        return self.model


def misnamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("q_proj", "x_proj"): one for name, one in tensors.items()}


def version_of(tensors: dict[str, torch.Tensor]) -> weightsync.Snapshot:
    """A version of a run of its own."""
    with (
        weightsync.Sender(tensors) as sender,
        weightsync.Receiver(sender.init_info, 0) as receiver,
    ):
        join(sender, receiver)
        return receiver.latest().copy()


def join(sender: weightsync.Sender, receiver: weightsync.Receiver) -> None:
    joining = threading.Thread(target=receiver.connect)
    joining.start()
    sender.connect(1, timeout=60)
    joining.join()
