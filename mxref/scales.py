"""Scale rules: from the largest magnitude of a block to the exponent of its power-of-two scale.

A rule sees the bits of amax as float32 and uses integers alone; `floor(log2(amax))` in floating
point is wrong just below nearly every power of two. All rules subtract the exponent of the
element's largest value and are clamped to what the scale can hold.
"""

import torch

from mxref.elements import HIDDEN_BIT, INF_BITS, float_bits, split
from mxref.formats import FLOAT_BIAS, FLOAT_MANTISSA_BITS, ElementFormat


def floor(amax: torch.Tensor, element: ElementFormat) -> torch.Tensor:
    """floor(log2 amax) - emax. Source: OCP MX v1.0, 6.3."""
    return split(amax)[0] - FLOAT_BIAS - element.emax


def even(amax: torch.Tensor, element: ElementFormat) -> torch.Tensor:
    """`floor` of amax plus half of the element's last mantissa bit. Source: AMD Quark, torchao EVEN, compressed-tensors."""
    return floor(amax + (1 << (FLOAT_MANTISSA_BITS - 1 - element.mantissa_bits)), element)


def even_one_bit(amax: torch.Tensor, element: ElementFormat) -> torch.Tensor:
    """`even` as if the element had one mantissa bit. Source: compressed-tensors, MXFP8."""
    return floor(amax + (1 << (FLOAT_MANTISSA_BITS - 2)), element)


def ceil(amax: torch.Tensor, element: ElementFormat) -> torch.Tensor:
    """ceil(log2 amax) - emax. Source: torchao CEIL."""
    exponent, significand = split(amax)
    return exponent + (significand > HIDDEN_BIT) - FLOAT_BIAS - element.emax


def rceil(amax: torch.Tensor, element: ElementFormat) -> torch.Tensor:
    """The smallest e with amax <= max * 2^e. Source: cuBLAS and Transformer Engine, MXFP8."""
    exponent, significand = split(amax)
    max_significand = float_bits(element.max) & (HIDDEN_BIT - 1) | HIDDEN_BIT
    return exponent + (significand > max_significand) - FLOAT_BIAS - element.emax


def rfloor(amax: torch.Tensor, element: ElementFormat) -> torch.Tensor:
    """The largest e with max * 2^e <= amax: the block maximum gets the largest code always. Source: triton_kernels."""
    exponent, significand = split(amax)
    max_significand = float_bits(element.max) & (HIDDEN_BIT - 1) | HIDDEN_BIT
    return exponent - (significand < max_significand).int() - FLOAT_BIAS - element.emax


EXPONENT_RULES = dict(floor=floor, even=even, even_one_bit=even_one_bit, ceil=ceil, rceil=rceil, rfloor=rfloor)


def scale_codes(amax: torch.Tensor, element: ElementFormat, scale: ElementFormat, rule: str) -> torch.Tensor:
    """Scale codes (int32) of a power-of-two scale, clamped to its finite codes.

    `amax`: int32 bits of each block's largest magnitude; NaN and Inf are the caller's business, 0 gives
    code 0 (no power of two fits a block of zeros; every choice decodes to zeros).
    """
    exponent = EXPONENT_RULES[rule](amax.clamp(max=INF_BITS - 1), element)
    return (exponent + scale.bias).clamp_(0, scale.max_code).masked_fill_(amax == 0, 0)
