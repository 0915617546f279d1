"""Quantised targets: bit by bit what the same operations make in torch."""

import math

import pytest
import torch
import weightsync
from ends import LONG, beside, pair, pass_on
from weightsync import Mapping

EPS = torch.finfo(torch.float32).eps
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
KINDS = [("fp8", (128, 128)), ("fp8", (3, 5)), ("fp8", None), ("int8", None)]
#: No multiples of a block, smaller than one, empty, and larger than a tile.
SHAPES = [(1, 1), (7, 9), (128, 128), (130, 257), (3, 1), (0, 5), (5, 0), (2, 140, 30), (70, 2000)]


def scale_of(values, divisor):
    amax = values.abs().amax() if values.numel() else torch.tensor(0.0)
    scale = amax / divisor
    return torch.where(scale == 0, EPS, scale)


def in_torch(weight, to, block=None):
    """Values and scales, by torch's own operations, block by block."""
    if weight.dim() == 3:
        made = [in_torch(one, to, block) for one in weight]
        values, scales = (torch.stack(part) for part in zip(*made, strict=True))
        return values, scales if to == "int8" or block else scales.squeeze(-1)
    weight = weight.float()
    rows, columns = weight.shape
    if to == "int8":
        scales = torch.stack([scale_of(row, 127.5) for row in weight]) if rows else torch.zeros(0)
        scales = scales.reshape(rows, 1)
        return (weight / scales).clamp(-128, 127).round().to(torch.int8), scales
    high, wide = block or (max(rows, 1), max(columns, 1))
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(math.ceil(rows / high), math.ceil(columns / wide))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = (slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide))
            scales[i, j] = scale_of(weight[at], 448.0)
            values[at] = (weight[at] / scales[i, j]).clamp(-448, 448).to(torch.float8_e4m3fn)
    if block is None:
        # An empty matrix has its scale too.
        scales = scales.reshape(1) if scales.numel() else torch.tensor([EPS])
    return values, scales


def made_of(weights, mapping):
    """What a worker gets of these tensors."""
    with pair(weights, setup={"mapping": mapping}) as (_, receiver):
        return {name: one.clone() for name, one in receiver.latest().items()}


def assert_same(got, expected, nan=False):
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    if nan:
        # torch leaves the sign and the payload of a NaN open.
        found = torch.isnan(expected.float())
        assert torch.equal(torch.isnan(got.float()), found)
        got, expected = got[~found], expected[~found]
    bits = {4: torch.int32, 1: torch.uint8}[got.element_size()]
    differ = got.contiguous().view(bits) != expected.contiguous().view(bits)
    assert differ.sum() == 0, (got[differ], expected[differ])


def check(weights, to, block=None, nan=False):
    end = "_scale_inv" if block else "_scale"
    got = made_of(weights, Mapping().quantise("*", to, block=block))
    assert list(got) == [name + end_ for name in weights for end_ in ("", end)]
    for name, weight in weights.items():
        values, scales = in_torch(weight, to, block)
        assert_same(got[name], values, nan)
        assert_same(got[name + end], scales, nan)


@pytest.mark.parametrize(("to", "block"), KINDS)
def test_quantised_values_are_those_of_torch(to, block):
    torch.manual_seed(0)
    weights = {}
    for shape in SHAPES:
        for dtype in FLOATS:
            magnitudes = 10.0 ** torch.randint(-9, 4, shape)
            weights[f"{dtype}{shape}"] = (torch.randn(shape) * magnitudes).to(dtype)
            weights[f"plain{dtype}{shape}"] = (torch.randn(shape) * 0.02).to(dtype)
    # As they lie in memory: transposed, and every other column.
    weights["turned"] = torch.randn(40, 33).T
    weights["apart"] = torch.randn(40, 66)[:, ::2]
    check(weights, to, block)


@pytest.mark.parametrize(("to", "block"), KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_sixteen_bit_values_are_those_of_torch(dtype, to, block):
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    every = every[torch.isfinite(every)]
    # In the order of their bits, so that blocks have scales of their own; and shuffled.
    shuffled = every[torch.randperm(len(every), generator=torch.Generator().manual_seed(1))]
    rows = {"sorted": every.reshape(-1, 256), "mixed": shuffled.reshape(-1, 64)}
    check(rows, to, block)


@pytest.mark.parametrize(("to", "block"), KINDS)
def test_zeros_and_subnormals_are_those_of_torch(to, block):
    tiny = torch.full((6, 10), 2.0**-149)
    tiny[0, 0] = -(2.0**-140)
    weights = {
        "zero": torch.zeros(6, 10),
        "minus": torch.full((6, 10), -0.0),
        "tiny": tiny,
        "below": torch.full((6, 10), 2.0**-130, dtype=torch.bfloat16),
        "half": torch.full((6, 10), 2.0**-24, dtype=torch.float16),
        "huge": torch.full((6, 10), torch.finfo(torch.float32).max),
    }
    check(weights, to, block)
    got = made_of(weights, Mapping().quantise("*", to, block=block))
    scale = got["zero_scale_inv" if block else "zero_scale"]
    assert (scale == EPS).all() and (got["zero"].float() == 0).all()


@pytest.mark.parametrize(("to", "block"), KINDS)
def test_nan_and_infinity_spoil_what_torch_spoils(to, block):
    torch.manual_seed(2)
    weights = {}
    for name, value in [("nan", math.nan), ("inf", math.inf), ("minus", -math.inf)]:
        for dtype in FLOATS:
            weight = torch.randn(20, 40)
            weight[3, 7] = value
            weights[f"{name} {dtype}"] = weight.to(dtype)
    both = torch.randn(20, 40)
    both[3, 7], both[3, 8], both[9, 9] = math.nan, math.inf, -math.nan
    weights["both"] = both
    check(weights, to, block, nan=True)


def test_int8_is_that_of_compressed_tensors():
    """Its formulas, copied: ``calculate_qparams`` and ``round_to_quantized_type_args``."""
    weight = torch.randn(33, 65, generator=torch.Generator().manual_seed(3))
    weight[5] = 0
    low, high = weight.amin(1, keepdim=True).clamp(max=0), weight.amax(1, keepdim=True).clamp(min=0)
    scales = torch.maximum(low.abs(), high.abs()) / (255.0 / 2)
    scales = torch.where(scales == 0, torch.tensor(EPS), scales)
    values = torch.round(torch.clamp(weight / scales, -128, 127)).to(torch.int8)
    got = made_of({"w": weight}, Mapping().quantise("w", "int8"))
    assert_same(got["w"], values)
    assert_same(got["w_scale"], scales)


@pytest.mark.parametrize("side", ["trainer", "worker"])
def test_fused_parts_are_quantised_together(side):
    torch.manual_seed(4)
    parts = {f"l.0.{part}_proj.weight": torch.randn(6, 40) for part in "qkv"}
    trainer = {**parts, "l.0.norm.weight": torch.randn(40)}
    mapping = (
        Mapping()
        .fuse(list(parts), into="l.0.qkv_proj.weight")
        .cast("*", torch.bfloat16)
        .quantise("l.*.weight", "fp8", block=(16, 16), scale="{}.s")
        .rename("l.0.*", "layers.0.*")
    )
    worker = {
        "layers.0.qkv_proj.weight": torch.zeros(18, 40).to(torch.float8_e4m3fn),
        "layers.0.qkv_proj.weight.s": torch.zeros(2, 3),
        "layers.0.norm.weight": torch.zeros(40, dtype=torch.bfloat16),
    }
    run = mapping.dry_run(trainer, worker)
    assert run.is_complete, run
    assert run.tensors[0].becomes == ["layers.0.qkv_proj.weight", "layers.0.qkv_proj.weight.s"]
    at = {"setup": {"mapping": mapping}} if side == "trainer" else {"mapping": mapping}
    with pair(trainer, worker, **at) as (sender, receiver):
        for _ in range(3):
            values, scales = in_torch(torch.cat(list(parts.values())), "fp8", (16, 16))
            assert_same(worker["layers.0.qkv_proj.weight"], values)
            assert_same(worker["layers.0.qkv_proj.weight.s"], scales)
            norm = trainer["l.0.norm.weight"].to(torch.bfloat16)
            assert torch.equal(worker["layers.0.norm.weight"], norm)
            for tensor in trainer.values():
                tensor.mul_(1.37)
            pass_on(sender, receiver)


def test_wrong_quantisations_are_refused():
    weights = {"a": torch.ones(2, 3), "b": torch.ones(2, 3)}
    fp8 = Mapping().quantise("a", "fp8")
    for mapping, words in [
        (fp8.fuse(["a", "b"], into="c"), 'rule 2: "a" is made by the quantising rule 1.*put rule 2'),
        (fp8.transpose("a"), "quantising rule 1"),
        (fp8.quantise("a", "int8"), "quantising rule 1"),
        (Mapping().quantise("a", "fp8").rename("b", "a_scale"), 'named "a_scale"'),
    ]:
        with pytest.raises(weightsync.WrongWeightsError, match=words):
            weightsync.Sender(weights, mapping=mapping)
    with pytest.raises(weightsync.SettingError, match=r"would cast the scales"):
        weightsync.Sender(weights, mapping={"model": fp8}, name="model", cast=torch.bfloat16)
    with pytest.raises(weightsync.WrongWeightsError, match=r"I64 \[2\] and cannot be quantised"):
        weightsync.Sender({"a": torch.ones(2).long()}, mapping=fp8)
    for wrong, words in [
        (lambda: Mapping().quantise("a", "fp4"), 'cannot quantise to "fp4".*"int8"'),
        (lambda: Mapping().quantise("a", torch.int8), 'quantise to "torch.int8".*"int8"'),
        (lambda: Mapping().quantise("a", "int8", block=(1, 1)), "leave block out"),
        (lambda: Mapping().quantise("a", "fp8", block=(0, 1)), "at least one row"),
        (lambda: Mapping().quantise("a", "fp8", block=(1025, 1024)), "at most 1048576 values"),
        (lambda: Mapping().quantise("a", "fp8", scale="s"), "contains {} once"),
    ]:
        with pytest.raises(weightsync.SettingError, match=words):
            wrong()


def _receive_up_to(receiver, version):
    """The first receive may give the version that came with connect."""
    while receiver.receive(timeout=LONG).version < version:
        pass


def test_small_changes_are_small_deltas_of_fp8():
    torch.manual_seed(5)
    weights = {"w": torch.randn(512, 1024) * 0.02}
    # The largest of each block stays, and so do the scales.
    weights["w"][::128, ::128] = 1.0
    mapping = Mapping().quantise("w", "fp8", block=(128, 128))
    scheme = "distributed:share=none,deltas=always"
    with pair(weights, setup={"mapping": mapping, "scheme": scheme}) as (sender, receiver):
        for version in (2, 3, 4):
            at = torch.randint(0, weights["w"].numel(), (2000,))
            before = in_torch(weights["w"], "fp8", (128, 128))[0].view(torch.uint8)
            weights["w"].view(-1)[at] *= 1.02
            values, scales = in_torch(weights["w"], "fp8", (128, 128))
            changed = (values.view(torch.uint8) != before).sum()
            assert 0 < changed < 2000
            with beside(lambda version=version: _receive_up_to(receiver, version)):
                report = sender.send(timeout=LONG)
            got = receiver.latest()
            assert_same(got["w"], values)
            assert_same(got["w_scale_inv"], scales)
            del got
            assert 0 < report.delta_bytes < report.bytes / 20, report
