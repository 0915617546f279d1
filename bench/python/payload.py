"""What is sent: a model of layers with two bfloat16 tensors each."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import nn

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Payload:
    """So many bytes in so many tensors of equal size."""

    bytes: int
    tensors: int

    @property
    def elements(self) -> int:
        """Of one tensor."""
        return self.bytes // self.tensors // DTYPE.itemsize

    def model(self) -> Model:
        """A module with the tensors as its parameters, in memory that is not touched yet."""
        return Model(self.tensors // 2, self.elements)

    def weights(self, value: float) -> Weights:
        """The trainer's own: every page touched, and shared with nobody."""
        weights = Weights(self.model())
        weights.write(value)
        return weights


class Layer(nn.Module):
    """Two parameters."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(elements, dtype=DTYPE))
        self.bias = nn.Parameter(torch.empty(elements, dtype=DTYPE))


class Model(nn.Module):
    """Layers."""

    def __init__(self, layers: int, elements: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(elements) for _ in range(layers))

    @torch.no_grad()
    def difference(self, expected: float) -> str | None:
        """The first place looked at whose value is not the expected one, in words."""
        for name, weights in self.named_parameters():
            for at in (0, weights.numel() // 2, weights.numel() - 1):
                if (got := weights[at].item()) != expected:
                    return f"{name}[{at}] is {got}, expected {expected}"
        return None

    @torch.no_grad()
    def total(self) -> int:
        """Reads every byte."""
        return sum(int(weights.view(torch.int64).sum()) for weights in self.parameters())


class Weights:
    """The trainer's weights, in the forms that the ways to send take."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._all = [weights.data for weights in model.parameters()]
        self.state_dict = model.state_dict()
        self.tensordict = TensorDict.from_module(model).data
        # numpy has no bfloat16.
        self.arrays = {
            name: tensor.view(torch.uint16).numpy() for name, tensor in self.state_dict.items()
        }

    def write(self, value: float) -> None:
        """What a training step does: the memory stays, the values are new."""
        for tensor in self._all:
            tensor.fill_(value)


class Memcpy:
    """The baseline: glibc's memcpy of as many bytes, one thread, between two private buffers
    that are faulted in."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._to, self._of = (torch.full((size,), one, dtype=torch.uint8) for one in (1, 2))

    def seconds(self) -> float:
        """Of one copy."""
        to, of = self._to.data_ptr(), self._of.data_ptr()
        began = time.perf_counter()
        ctypes.memmove(to, of, self._size)
        return time.perf_counter() - began
