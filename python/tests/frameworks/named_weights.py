"""Weights of a small model, which the tests of several frameworks send and compare."""

import torch

#: Rows and columns of the large tensor.
SIZE = 1024


def weights(seed, changed=None, extra=()):
    """Tensors of two dtypes, one of them tied.

    Args:
        changed: how many elements of the large one differ from those of seed 0.
        extra: names of further tensors.
    """
    made = torch.Generator().manual_seed(0 if changed is not None else seed)
    large = torch.randn(SIZE, SIZE, generator=made).to(torch.bfloat16)
    bias = torch.randn(SIZE, generator=made)
    if changed is not None:
        spots = torch.randperm(large.numel(), generator=torch.Generator().manual_seed(seed))
        large.view(-1)[spots[:changed]] += 1
    tensors = {"embed": large, "norm.bias": bias, "scale": torch.tensor(float(seed)), "head": large}
    tensors |= {name: torch.ones(3) for name in extra}
    return tensors


def differing(got, expected):
    """The names whose dtypes, shapes or bytes differ."""
    if list(got) != list(expected):
        return sorted(set(got) ^ set(expected)) or ["the order of the names"]
    return [
        name
        for name, one in expected.items()
        if got[name].dtype != one.dtype or not torch.equal(got[name], one)
    ]
