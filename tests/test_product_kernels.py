"""Matmuls in Triton: nothing but a row of A, a row of B and their scales decides the bits of an output."""

import pytest
from kernel_scripts import DEVICES, says_the_same

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
