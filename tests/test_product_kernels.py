"""Matmuls in Triton: nothing but a row of A, a row of B and their scales decides the bits of an output."""

from dataclasses import replace

import pytest
import torch
from kernel_scripts import DEVICES, says_the_same

import mxref
from mxref.recipes import Hadamard

INVARIANT = """
import torch, mxref
from accel.triton.matmul import Folded, Fused, folded_dtype, matmul, multiply
from mxref.comparison import difference
from mxref.conformance import inputs

PAIRS = [("mxfp4", "mxfp4"), ("nvfp4", "nvfp4"), ("mxfp8_e4m3", "mxfp6_e2m3")]
for a_format, b_format in PAIRS:
    a = mxref.quantize(inputs.spread_normal(131, 70, seed=1), a_format).to("{device}")
    b = mxref.quantize(inputs.spread_normal(37, 70, seed=2), b_format).to("{device}")
    whole = matmul(a, b)  # many rows
    rows = torch.tensor([130, 3, 3, 77], device="{device}")
    assert difference(matmul(a[rows], b), whole[rows]) is None, "rows among others"
    assert difference(matmul(a[5:6], b), whole[5:6]) is None, "a row alone"
    columns = torch.arange(36, -1, -2, device="{device}")
    assert difference(matmul(a[rows], b[columns]), whole[rows][:, columns]) is None, "columns among others"
    paths = [Fused(16, 16, 4), Fused(32, 64, 4), Fused(64, 32, 4, group=1)]
    if folded_dtype(a.format, b.format) is not None:
        paths += [Folded(64, 64, 4, 3), Folded(32, 128, 4, 3, group=3)]
    for path in paths:
        assert difference(multiply(a, b, None, torch.float32, path), whole) is None, path
print("the same")
"""


@pytest.mark.parametrize("device", DEVICES)
def test_batch_and_path_change_no_bit(device):
    says_the_same(INVARIANT, device)


def test_chains_say_which_weights_they_do_not_take(monkeypatch):
    kernels = pytest.importorskip("accel.triton.matmul", exc_type=ImportError)
    monkeypatch.setattr("accel.triton.matmul.INTERPRETED", True)
    x, plain = torch.ones(2, 64), mxref.quantize(torch.ones(2, 64), "mxfp4")
    assert kernels.accepts(x, plain) is None and kernels.accepts(plain, plain, semantics="dequantized") is None
    recipe = replace(mxref.RECIPES["ocp"], name="hadamard", transform=Hadamard(16, (1,) * 16))
    rotated = mxref.quantize(torch.ones(2, 64), "mxfp4", recipe=recipe)
    long = mxref.quantize(torch.ones(2, 128), replace(mxref.BLOCK_FORMATS["mxfp4"], name="long", block_size=128))
    assert "transformed" in kernels.accepts(x, rotated)
    assert "transformed" in kernels.accepts(rotated, rotated, semantics="dequantized")
    assert "blocks of 128 elements" in kernels.accepts(torch.ones(2, 128), long)
    assert kernels.accepts(x, x) == "b is a Tensor"
    assert kernels.accepts(x[:, :33], mxref.quantize(x[:, :33], "mxfp4")) is None


FLOAT8 = """
import torch, mxref
from accel.triton.matmul import _Operand
from mxref.blocks import BlockTensor

FORMAT, RECIPE = mxref.BLOCK_FORMATS["mxfp4"], mxref.RECIPES["ocp"]
VALUES = torch.tensor(FORMAT.element.values, dtype=torch.float64)
IN_ORDER = torch.tensor([*range(0, 32, 2), *range(1, 32, 2)])  # how a block's elements are stored


def folded(codes, scales):
    # (values times powers, float64; which rows have a flag), a row at a time: what rows share must not hide one
    q = BlockTensor.from_codes(codes.to(torch.uint8), scales.to(torch.uint8), None, FORMAT, RECIPE)
    operand = _Operand.of(q.to("{device}"))
    flags = operand.no_flags()
    found = operand.folded_to_float8(flags)
    return (found.values.double() * found.powers.double()[:, None]).cpu(), flags.cpu()


def expected(codes, scales):
    values = VALUES[codes.long()] * torch.exp2(scales.double() - 127).repeat_interleave(32, 1)
    values[scales.repeat_interleave(32, 1) == 255] = torch.nan
    return values.unflatten(1, (-1, 32))[..., IN_ORDER].flatten(1)


def same(x, y):
    return bool(((x == y) & (x.signbit() == y.signbit()) | x.isnan() & y.isnan()).all())


# every largest scale of a row that may be folded, with every scale that it may stand beside and NaN, of every code
largest = torch.arange(65 + 26, 127 + 42 + 1)[:, None]
scales = torch.cat([largest - torch.arange(27), torch.full_like(largest, 255)], 1)
codes = torch.arange(16).repeat(2).repeat(len(scales), scales.shape[1])
values, flags = folded(codes, scales)
assert not flags.any() and same(values, expected(codes, scales)), "what may be folded"

for scale in (64, 127 + 43, 127 - 26, 127 - 27, 0, 254):  # beside 127
    scales, codes = torch.tensor([[127, scale, 127]]), torch.zeros(1, 96, dtype=torch.int64)
    codes[0, :32], codes[0, 70] = 7, 15
    values, flags = folded(codes, scales)
    assert flags.any() == (scale > 127 + 26), "a block of zeros counts by its scale alone, where that is large"
    assert flags.any() or same(values, expected(codes, scales))
    for code in (1, 7, 9, 15):
        codes[0, 40] = code
        values, flags = folded(codes, scales)
        assert flags.any() == (scale != 127 - 26), "a scale that may not be folded"
        assert flags.any() or same(values, expected(codes, scales))
rows = torch.full((193, 1), 127)
rows[130] = 200
assert folded(torch.ones(193, 32), rows)[1].tolist() == [0, 0, 1, 0], "rows share a flag by 64"
print("the same")
"""


@pytest.mark.parametrize("device", DEVICES)
def test_fp4_with_powers_of_two_is_folded_to_float8_without_a_loss(device):
    says_the_same(FLOAT8, device)
