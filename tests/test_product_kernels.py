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
