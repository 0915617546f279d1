"""A small language model, trained from its initialisation for a minute or two, and then on with a new
optimizer at each learning rate.

It runs with weights in bf16, and these are published; AdamW keeps its own in f32, as is usual.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import torch
from text import Vocabulary, sources
from torch import nn
from torch.nn import functional as F
from versions import Run, Versions

NAME = "transformer"

VOCABULARY = 4096
WIDTH = 512
HEADS = 8
LAYERS = 4
#: Tokens of one piece of text, and pieces of one step.
CONTEXT = 128
BATCH = 4

#: The training before: steps, of which some at a rising rate, then at a falling one.
BEFORE, RISING, PEAK = 250, 25, 1e-3
#: The steps at each rate, and those around which versions are published.
STEPS, PUBLISHED = 50, (2, 11, 50)
RATES = (1e-6, 1e-5, 1e-4)


def make(versions: Versions) -> None:
    """Trains, and writes the pairs."""
    torch.manual_seed(1)
    text = "".join(sources().values())
    tokens = Vocabulary(text, VOCABULARY).tokens(text)
    batches = _batches(tokens)
    trained = Trainer(Model())
    _train(trained, PEAK, BEFORE, batches)
    following = [next(batches) for _ in range(STEPS)]
    for rate in RATES:
        run = Run(versions, NAME, rate, torch.bfloat16, PUBLISHED)
        trainer = copy.deepcopy(trained)
        trainer.begin(rate)
        run.publish(0, trainer.model)
        losses = []
        for done, batch in enumerate(following, 1):
            losses.append(trainer.step(batch))
            run.publish(done, trainer.model)
        _say(f"lr {rate:.0e}", losses)


def _train(trainer: Trainer, peak: float, steps: int, batches: Iterator[torch.Tensor]) -> None:
    trainer.begin(peak)
    losses = []
    for done in range(steps):
        falling = 0.5 * (1 + math.cos(math.pi * done / steps))
        trainer.rate(peak * min((done + 1) / RISING, falling))
        losses.append(trainer.step(next(batches)))
    _say(f"{steps} steps before", losses)


def _batches(tokens: torch.Tensor) -> Iterator[torch.Tensor]:
    """Pieces of the text from anywhere, without end."""
    within = torch.arange(CONTEXT + 1)
    while True:
        starts = torch.randint(len(tokens) - CONTEXT, (BATCH, 1))
        yield tokens[starts + within]


def _say(what: str, losses: list[float]) -> None:
    some = min(10, len(losses))
    first, last = sum(losses[:some]) / some, sum(losses[-some:]) / some
    print(f"{NAME}, {what}: loss {first:.2f} to {last:.2f}", flush=True)


class Trainer:
    """A model in bf16, and AdamW over its weights in f32."""

    def __init__(self, model: Model) -> None:
        self._weights = [nn.Parameter(own.detach().clone()) for own in model.parameters()]
        # Where the processor does not multiply bf16, torch takes twenty times as long for it as for
        # f32: there the same weights are held in f32, and what is between them is finer.
        self.model = model.bfloat16() if torch.ops.mkldnn._is_mkldnn_bf16_supported() else model
        self._round()
        self._optimizer: torch.optim.AdamW

    def begin(self, rate: float) -> None:
        """Starts an optimizer that has seen nothing yet."""
        self._optimizer = torch.optim.AdamW(self._weights, lr=rate)

    def rate(self, rate: float) -> None:
        """Changes the learning rate."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    def step(self, batch: torch.Tensor) -> float:
        """One step; returns the loss before it."""
        states = self.model(batch[:, :-1]).float()
        loss = F.cross_entropy(states.flatten(0, 1), batch[:, 1:].flatten())
        self.model.zero_grad()
        loss.backward()
        for weight, mine in zip(self._weights, self.model.parameters(), strict=True):
            weight.grad = mine.grad.float()
        nn.utils.clip_grad_norm_(self._weights, 1.0)
        self._optimizer.step()
        self._round()
        return loss.item()

    @torch.no_grad()
    def _round(self) -> None:
        """Has the model run with the weights as they are now, in bf16."""
        for weight, mine in zip(self._weights, self.model.parameters(), strict=True):
            mine.copy_(weight.bfloat16())


class Model(nn.Module):
    """A decoder whose output weights are its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        for name, weights in self.named_parameters():
            if weights.dim() == 2:
                # What is added to the stream grows with the layers otherwise.
                fewer = math.sqrt(2 * LAYERS) if name.endswith("out.weight") else 1.0
                nn.init.normal_(weights, std=0.02 / fewer)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The scores of each next token."""
        states = self.embedding(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            states = layer(states)
        return self.norm(states) @ self.embedding.weight.T


class Layer(nn.Module):
    """Attention and two linear layers, each added to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.first_norm = nn.LayerNorm(WIDTH)
        self.attention_in = nn.Linear(WIDTH, 3 * WIDTH)
        self.attention_out = nn.Linear(WIDTH, WIDTH)
        self.second_norm = nn.LayerNorm(WIDTH)
        self.wide_in = nn.Linear(WIDTH, 4 * WIDTH)
        self.wide_out = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        states = states + self.attention_out(self._attention(self.first_norm(states)))
        return states + self.wide_out(F.gelu(self.wide_in(self.second_norm(states))))

    def _attention(self, states: torch.Tensor) -> torch.Tensor:
        split = self.attention_in(states).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return seen.transpose(1, 2).flatten(2)
