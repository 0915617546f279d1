"""Every dtype, every bit of it, by every way to read."""

import numpy as np
import pytest
import torch
from ends import MODES, PUSHING, bits, pair, pass_on
from torch import nn

ml_dtypes = pytest.importorskip("ml_dtypes")

# From 64 KiB on a parameter is bound.
NUMEL = 72 * 1024

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]
# The oldest torch has neither.
DTYPES += [
    getattr(torch, name) for name in ("float8_e8m0fnu", "float4_e2m1fn_x2") if hasattr(torch, name)
]


def patterns(dtype, seed=0):
    """Random bits: NaNs with payloads, subnormals, infinities, both zeros are among them."""
    if dtype is torch.bool:
        return torch.arange(NUMEL) % 3 == seed
    raw = torch.randint(0, 256, (NUMEL * dtype.itemsize,), dtype=torch.uint8)
    flat = raw.view(dtype)
    if dtype in (torch.float32, torch.float64):
        words = flat.view({4: torch.int32, 8: torch.int64}[dtype.itemsize])
        signs, nans = {4: (-(2**31), 0x7F800001), 8: (-(2**63), 0x7FF0000000000123)}[dtype.itemsize]
        # -0.0, and a signalling NaN with a payload.
        words[0], words[1] = signs, nans
    return flat


class One(nn.Module):
    """A parameter and a buffer, also of dtypes that have no gradient."""

    def __init__(self, values):
        super().__init__()
        self.weight = nn.Parameter(values, requires_grad=False)
        self.register_buffer("seen", values[:7].clone())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_arrives_in_a_module(dtype, mode):
    trainer = One(patterns(dtype))
    worker = One(torch.zeros(NUMEL * dtype.itemsize, dtype=torch.uint8).view(dtype))
    own = worker.weight.data_ptr()
    with pair(trainer, worker, mode=mode) as (sender, receiver):
        for seed in (1, 2):
            trainer.weight.data.view(torch.uint8).copy_(patterns(dtype, seed).view(torch.uint8))
            pass_on(sender, receiver)
            assert bits(worker.weight) == bits(trainer.weight)
            assert bits(worker.seen) == bits(trainer.seen)
            assert worker.weight.dtype == dtype
            assert (worker.weight.data_ptr() == own) == (mode == "copy")


@pytest.mark.parametrize("scheme", PUSHING)
def test_every_bit_arrives_by_every_scheme(scheme):
    sent = {str(dtype): patterns(dtype) for dtype in DTYPES}
    with pair(sent, setup={"scheme": scheme}) as (sender, receiver):
        pass_on(sender, receiver)
        got = receiver.latest()
        assert {name: bits(value) for name, value in got.items()} == {
            name: bits(value) for name, value in sent.items()
        }
        copied = got.copy()
        assert {name: value.dtype for name, value in copied.items()} == {
            name: value.dtype for name, value in sent.items()
        }
        assert bits(copied["torch.float32"]) == bits(sent["torch.float32"])
        del got, copied


NUMPY = [
    np.bool_, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64,
    np.float16, np.float32, np.float64, np.complex64,
    ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz, ml_dtypes.float8_e8m0fnu,
]  # fmt: skip


@pytest.mark.parametrize("dtype", NUMPY, ids=lambda dtype: np.dtype(dtype).name)
def test_every_bit_arrives_in_numpy(dtype):
    size = np.dtype(dtype).itemsize
    raw = np.arange(1024 * size, dtype=np.uint32).astype(np.uint8)
    sent = (raw & 1 if dtype is np.bool_ else raw).view(dtype)
    into = {"it": np.zeros_like(sent)}
    with pair({"it": sent}, into):
        assert into["it"].tobytes() == sent.tobytes()
    with pair({"it": sent}) as (_, receiver):
        got = receiver.latest().numpy()["it"]
        assert got.dtype == np.dtype(dtype)
        assert got.tobytes() == sent.tobytes()
        del got


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="an older torch")
def test_packed_elements_count_as_torch_counts_them():
    sent = torch.arange(24, dtype=torch.uint8).reshape(2, 12).view(torch.float4_e2m1fn_x2)
    with pair({"it": sent}) as (_, receiver):
        got = receiver.latest()["it"]
        assert got.shape == sent.shape
        assert bits(got.view(torch.uint8)) == bits(sent.view(torch.uint8))
        del got


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="an older torch")
def test_packed_elements_are_sent_in_order_from_any_strides():
    whole = torch.arange(48, dtype=torch.uint8).reshape(4, 12)
    for part in (whole.t(), whole[:, ::2], whole[::2, 1:7]):
        with pair({"it": part.view(torch.float4_e2m1fn_x2)}) as (sender, receiver):
            # The third send looks at the tensors all at once.
            for _ in range(4):
                got = receiver.latest()["it"]
                assert bits(got.view(torch.uint8)) == bits(part.contiguous())
                del got
                whole.add_(1)
                pass_on(sender, receiver)
