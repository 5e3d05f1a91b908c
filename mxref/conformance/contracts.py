"""The three things a kernel can promise, each as a function that says what breaks it, with its proof.

The products of a matmul are a[m, k] b[n, k]: elements times block scales where products are blockwise, decoded values where
they are dequantized or the activation is a plain tensor. y = alpha * sum_k a b, alpha the float32 product of the tensor
scales (1 where decoding has applied them).
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from mxref.blocks import BlockTensor, dequantize
from mxref.comparison import difference
from mxref.conformance.cases import Case
from mxref.elements import decode_codes, reciprocal
from mxref.formats import FLOAT_MAX, FLOAT_SMALLEST

SHOWN = 20
U_ACCUMULATOR = 2.0**-23
EXACT_SUM = 2.0**24  # float32 holds every integer up to it
MARGIN = 1 + 2.0**-28
_NONE_SET = 1 << 20  # exponent of the lowest bit of a zero


def bitexact(actual: Any, expected: Any, case: Case) -> str | None:
    """Every bit of every output is the reference's.

    Nothing to prove: the reference is a finite sequence of exact or correctly rounded operations in a stated order.
    """
    return difference(actual, expected)


def certified(actual: torch.Tensor, expected: torch.Tensor, case: Case) -> str | None:
    """Every bit of an output for which no order of additions can round; `bounded` elsewhere.

    An output is certified if S = sum|a||b| <= 2^24 q, q the lowest set bit of its products, q >= 2^-149 and S at most
    float32's largest value. Proof that then all algorithms agree: each product is an integer multiple of q, hence so is
    any sum of any of them, of absolute value at most S, that is at most 2^24 multiples. Those are float32 numbers: the
    multiple fits 24 bits and the range is float32's. So every addition, in any order or tree, has a float32 number as its
    exact result, and returns it, rounding to nearest or truncating, fused with a product or not. A unit that aligns
    products to the largest and cuts F >= 24 bits below its leading bit cuts nothing either: that bit is at most S, so what
    is cut lies below q. What follows the sum (alpha, bias, rounding) is one fixed sequence on one input.

    S is a float64 sum of multiples of q: exact up to 2^53 q, and beyond that no smaller, so the comparison is exact.
    """
    found = _unlike(actual, expected)
    if found is not None:
        return found
    a, b, _ = _products(case)
    total = a.abs() @ b.abs().T
    lowest_b = _lowest_bit(b)
    lowest = torch.stack([(row + lowest_b).amin(-1) for row in _lowest_bit(a)]) if a.numel() else torch.zeros_like(total)
    q = (lowest.long().clamp(-1022, 1000) + 1023 << 52).view(torch.float64)  # 2^lowest, exactly
    certain = ((total <= EXACT_SUM * q) & (q >= FLOAT_SMALLEST) & (total <= FLOAT_MAX)).reshape(expected.shape)
    found = difference(torch.where(certain, actual.cpu(), expected), expected)
    if found is not None:
        return f"of {int(certain.sum())} certified outputs: {found}"
    return bounded(actual, expected, case)


def bounded(actual: torch.Tensor, expected: torch.Tensor, case: Case) -> str | None:
    """|y - exact| <= gamma_K(2^-23) S + u |exact| for every output, S = alpha sum|a||b|, gamma_K(e) = K e / (1 - K e).

    u is the output dtype's unit roundoff, K the number of products. Half the smallest subnormal of the output dtype comes on
    top, which rounding to it can cost; an Inf stands for the least magnitude that rounds to it. An output with a NaN or Inf
    among its products must be the reference's; where S is beyond float32's range nothing is promised.

    Proof that a float32 accumulator keeps this, with S0 = sum|a||b|:

    1. If each addition returns its exact result times (1 + d), |d| <= e, then a product passes through at most K - 1 of
       them, whatever their tree. The sum is sum a b (1 + t), every |t| <= gamma_{K-1}(e), and its error E at most
       gamma_{K-1}(e) S0. Truncation has e = 2^-23, nearest e = 2^-24; additions do not underflow; a start from +0 or a split
       of K changes no count. (A product of more than 24 bits rounds once: 2^-24 S0 more, which gamma_K still covers.)
    2. A tensor core that adds k >= 4 products and its accumulator at once, aligned to the largest exponent and cut F >= 24
       bits below it, and cuts their sum to float32, loses at most ((k + 1) 2^-F + 2^-23) S0 (1 + gamma_K) in each of K / k
       steps: E is at most (k + 3) / 2k <= 7/8 of gamma_K S0.
    3. Then alpha and the output dtype each round once, by 2^-24 and u. For a float32 output alpha's rounding is the
       output's: the error is at most (1 + 2^-24) gamma_{K-1} S + u |exact|, within the bound for K <= 2^24. For others it is
       at most (1 + u)(1 + 2^-24) E + (1 + u) 2^-24 S + u |exact|, with E <= 7/8 gamma_K S by 2, or 1/2 gamma_K S by 1 with
       nearest: what is left of gamma_K covers u E <= 2^-8 E and, from K = 16 on, alpha's 2^-24 S.

    Not proven: truncation after every single product, with K > 128 and a bfloat16 output. Not kept: F = 13, the FP8 products
    of Hopper.

    Proof that the check refuses no right result: a, b and their products are exact in float64, since a and b have at most
    24 bits. A float64 sum of K of them is off by at most gamma_K(2^-53) S0 <= 2^-30 gamma_K(2^-23) S0, and so is S; the few
    operations behind it add less. Together that is less than 2^-28 of the bound, by which it is widened (`MARGIN`).
    """
    found = _unlike(actual, expected)
    if found is not None:
        return found
    a, b, alpha = _products(case)
    out, dtype = actual.cpu().double().reshape(-1, len(b)), torch.finfo(actual.dtype)
    unit = dtype.eps / 2
    exact, sizes = alpha * (a @ b.T), a.abs() @ b.abs().T
    total = alpha.abs() * sizes
    steps = a.shape[1] * U_ACCUMULATOR
    bound = (steps / (1 - steps) * total + unit * exact.abs() + dtype.smallest_normal * unit) * MARGIN
    overflow = math.ldexp(1 - unit / 2, math.frexp(dtype.max)[1])  # the least magnitude that rounds to Inf
    error = (torch.where(out.isinf(), out.sign() * overflow, out) - exact).abs()
    error = torch.where(out.isinf() & (out.sign() == exact.sign()) & (exact.abs() >= overflow), 0.0, error)
    ordinary = total.isfinite()
    same = torch.where(ordinary.reshape(expected.shape), expected, actual.cpu())
    found = difference(same, expected)
    if found is not None:
        return found
    wrong = ordinary & (sizes <= FLOAT_MAX) & ~(error <= bound)  # a NaN is wrong
    if not wrong.any():
        return None
    places = wrong.nonzero().tolist()
    lines = [f"{len(places)} of {out.numel()} outputs are beyond the bound"]
    for m, n in places[:SHOWN]:
        values = f"got {float(out[m, n]).hex()}, exact {float(exact[m, n])!r}"
        lines.append(f"  [{m}, {n}]: {values}, error {float(error[m, n]):.3g}, bound {float(bound[m, n]):.3g}")
    return "\n".join([*lines, f"  ... and {len(places) - SHOWN} more"] if len(places) > SHOWN else lines)


CONTRACTS: dict[str, Callable[[Any, Any, Case], str | None]] = {
    "bitexact": bitexact,
    "certified": certified,
    "bounded": bounded,
}


def _unlike(actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    """How dtype or shape differ."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return difference(actual, expected)
    return None


def _products(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The factors of a matmul's products, float64 `[M, K]` and `[N, K]`, and alpha, float64 that broadcasts to `[M, N]`."""
    (a, b), options = case.arguments()
    if options.get("bias") is not None:
        raise ValueError(f"case {case.id}: contracts other than bitexact are defined before a bias")
    if isinstance(a, BlockTensor) and options.get("semantics", "blockwise") == "blockwise":
        alpha = _tensor_factor(a).reshape(-1, 1) * _tensor_factor(b).reshape(1, -1)
        return _without_tensor_scale(a), _without_tensor_scale(b), alpha.double()
    values = dequantize(a, options.get("out_dtype", torch.float32)) if isinstance(a, BlockTensor) else a
    rows = values.double().flatten(0, -2)
    return rows, dequantize(b, values.dtype).double(), torch.ones(1, 1, dtype=torch.float64)


def _without_tensor_scale(q: BlockTensor) -> torch.Tensor:
    """Elements times block scales, float64 `[rows, K]`, exact."""
    scales = decode_codes(q.scales, q.format.scale).double()
    if q.recipe.block_rows > 1:
        scales = scales.repeat_interleave(q.recipe.block_rows, dim=-2)[..., : q.shape[-2], :]
    scales = scales.repeat_interleave(q.format.block_size, dim=-1)[..., : q.shape[-1]]
    return (decode_codes(q.codes, q.format.element).double() * scales).flatten(0, -2)


def _tensor_factor(q: BlockTensor) -> torch.Tensor:
    """What a product is multiplied by for the tensor scale of one operand, float32."""
    if q.tensor_scale is None:
        return torch.ones(())
    return reciprocal(q.tensor_scale) if q.recipe.tensor_scale_direction == "divide" else q.tensor_scale


def _lowest_bit(x: torch.Tensor) -> torch.Tensor:
    """Exponents, int32, of the lowest set bits of float64 values; huge for 0."""
    mantissa, exponent = torch.frexp(x)
    digits = (mantissa.nan_to_num(0.0, 0.0, 0.0) * 2.0**53).long()
    lowest = torch.frexp((digits & -digits).double())[1] - 1
    return torch.where(digits == 0, _NONE_SET, lowest - 53 + exponent)
