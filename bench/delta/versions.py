"""The files that come of it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

INDEX = "pairs.json"


@dataclass(frozen=True)
class Pair:
    """Two consecutive versions, by the names of their files."""

    case: str
    old: str
    new: str


class Versions:
    """A folder of them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / INDEX).exists():
            raise SystemExit(f"{folder} has versions already")
        self._folder = folder
        self._pairs: list[Pair] = []

    def write(self, name: str, weights: nn.Module, dtype: torch.dtype) -> None:
        """Writes one: the parameters, each once where it is used twice."""
        named = weights.named_parameters()
        version = {of: tensor.detach().to(dtype).contiguous() for of, tensor in named}
        save_file(version, self._folder / name)

    def pair(self, case: str, old: str, new: str) -> None:
        """Says which two of them are one after the other."""
        self._pairs.append(Pair(case, old, new))

    def finish(self) -> None:
        """Says which there are."""
        pairs = [asdict(pair) for pair in self._pairs]
        (self._folder / INDEX).write_text(json.dumps(pairs, indent=1) + "\n")


class Run:
    """A run of training, of which some steps are published: the versions before and after each of
    ``steps``, in ``dtype``."""

    def __init__(
        self, versions: Versions, model: str, lr: float, dtype: torch.dtype, steps: Iterable[int]
    ) -> None:
        word = {torch.bfloat16: "bf16", torch.float32: "f32"}[dtype]
        self._versions = versions
        self._case = f"{model} {word}, lr {lr:.0e}"
        self._file = f"{model}-{word}-{lr:.0e}"
        self._dtype = dtype
        self._steps = set(steps)

    def publish(self, done: int, weights: nn.Module) -> None:
        """Writes the version after so many steps, if it is one of a pair."""
        ends = done in self._steps
        if ends or done + 1 in self._steps:
            self._versions.write(self._name(done), weights, self._dtype)
        if ends:
            case = f"{self._case}, step {done - 1} to {done}"
            self._versions.pair(case, self._name(done - 1), self._name(done))

    def _name(self, done: int) -> str:
        return f"{self._file}-{done}.safetensors"
