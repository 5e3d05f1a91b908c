"""The comparison helper itself: what it must accept, and every kind of difference it must see."""

import numpy as np
import pytest
import torch
from bits import SHOWN, as_torch, assert_same_bits
from oracles.rationals import float32_from_bits

import mxref
from mxref.comparison import difference, tensors


def test_equal_bits_pass_for_every_dtype():
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int64):
        x = torch.arange(6).reshape(2, 3).to(dtype)
        assert_same_bits(x, x.clone())
    assert_same_bits(torch.tensor([True, False]), torch.tensor([True, False]))
    assert_same_bits(torch.zeros(0, 3), torch.zeros(0, 3))
    assert_same_bits(torch.tensor(1.5), torch.tensor(1.5))


def test_non_contiguous_tensors_compare_by_place():
    x = torch.arange(6.0).reshape(2, 3)
    assert_same_bits(x.T, x.T.contiguous())
    with pytest.raises(AssertionError, match="4 of 6"):
        assert_same_bits(x.T, x.reshape(3, 2))


def test_same_nan_passes_and_another_nan_fails():
    canonical, other = as_torch(float32_from_bits([0x7FC00000])), as_torch(float32_from_bits([0x7FC00001]))
    assert_same_bits(canonical, canonical.clone())
    with pytest.raises(AssertionError, match="0x7fc00001.*0x7fc00000"):
        assert_same_bits(other, canonical)


@pytest.mark.parametrize(
    "actual, expected, message",
    [
        (torch.tensor([0.0]), torch.tensor([-0.0]), "0x00000000.*0x80000000"),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.bfloat16), "dtype"),
        (torch.zeros(2, 1), torch.zeros(2), "shape"),
        (torch.zeros(()), torch.zeros(1), "shape"),
        (torch.tensor([[1, 2]], dtype=torch.uint8), torch.tensor([[1, 3]], dtype=torch.uint8), r"\[0, 1\]: got 0x02"),
        (torch.tensor(2.0), torch.tensor(3.0), r"\[\]: got 0x40000000"),
    ],
)
def test_differences_are_seen_and_named(actual, expected, message):
    with pytest.raises(AssertionError, match=message):
        assert_same_bits(actual, expected, "context")
    with pytest.raises(AssertionError, match="^context: "):
        assert_same_bits(actual, expected, "context")


def test_one_ulp_is_a_difference():
    x = torch.ones(100)
    y = x.clone()
    y[37] = torch.nextafter(y[37], torch.tensor(2.0))
    with pytest.raises(AssertionError, match=r"1 of 100.*\n  \[37\]"):
        assert_same_bits(x, y)


def test_the_list_is_capped():
    with pytest.raises(AssertionError) as raised:
        assert_same_bits(torch.zeros(100), torch.ones(100))
    lines = str(raised.value).splitlines()
    assert len(lines) == SHOWN + 2 and lines[-1].strip() == f"... and {100 - SHOWN} more"


def test_numpy_arrays_are_taken_with_their_dtype():
    import ml_dtypes

    assert_same_bits(torch.ones(2, dtype=torch.bfloat16), np.ones(2, dtype=ml_dtypes.bfloat16))
    assert_same_bits(torch.ones(2), np.ones(2, dtype=np.float32))
    with pytest.raises(AssertionError, match="dtype"):
        assert_same_bits(torch.ones(2), np.ones(2))


def test_lazily_negated_and_conjugated_tensors_are_compared_as_what_they_hold():
    x = torch.tensor([1 + 2j, 3 - 4j])
    assert difference(x.conj().imag, torch.tensor([-2.0, 4.0])) is None and x.conj().imag.is_neg()
    assert "1 of 2" in difference(x.conj().imag, torch.tensor([-2.0, -4.0]))
    assert difference(x.conj(), torch.tensor([1 - 2j, 3 + 4j])) is None and x.conj().is_conj()
    assert difference(torch._neg_view(torch.ones(2)), torch.ones(2)).startswith("2 of 2 values differ")


@pytest.mark.parametrize(
    "actual, message",
    [
        (None, "got a NoneType, expected a Tensor"),
        ([1.0, 1.0], "got a list, expected a Tensor"),
        (torch.ones(2, device="meta"), "device meta, which holds no values"),
        (torch.ones(2).to_sparse(), "layout torch.sparse_coo, expected torch.strided"),
        (torch.ones(2, requires_grad=True), "requires_grad is True, expected False"),
        (torch.nn.Parameter(torch.ones(2)), "requires_grad is True, expected False"),
    ],
)
def test_what_is_no_result_is_said_and_not_raised(actual, message):
    assert difference(actual, torch.ones(2)) == message
    assert difference((actual, actual), (torch.ones(2), torch.ones(2))) == f"0: {message}"
    assert difference(torch.ones(2), torch.ones(2, requires_grad=True)) is None
    q = mxref.quantize(torch.ones(2, 16), "nvfp4")
    assert difference(actual, q).startswith(f"got a {type(actual).__name__}, expected a BlockTensor")
    broken = mxref.BlockTensor.trusted(actual, q.length, q.scales, q.tensor_scale, q.format, q.recipe, q.axis)
    assert difference(broken, q) is not None


def test_the_tensors_of_arguments():
    q, x = mxref.quantize(torch.ones(2, 16), "nvfp4"), torch.ones(3)
    found = tensors(((x, q), {"scales": [x, None], "recipe": q.recipe, "name": "x"}))
    assert [id(part) for part in found] == [id(part) for part in (x, q.packed, q.scales, q.tensor_scale, x)]
