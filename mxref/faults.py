"""Faults: what is wrong in other projects' quantizers, as small named steps.

A float logarithm, a NaN that turns into a zero, a scale byte that does not say what was used: each is a step that
changes one intermediate result after the reference has computed it. Only the rows of `mxref.producers` have any.

A step that a producer runs in float arithmetic is written here with integers or correctly rounded operations, so it gives on
any device what the producer gave on an x86 CPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from mxref.elements import (
    HIDDEN_BIT,
    INF_BITS,
    MAGNITUDE_MASK,
    decode_codes,
    ldexp,
    reciprocal,
    round_to_codes,
    split,
    total_error,
)
from mxref.formats import FLOAT_BIAS, FLOAT_MANTISSA_BITS, FLOAT_MAX, BlockFormat, ElementFormat
from mxref.orders import TensorScale

QUIET_NAN = 0x7FC00000
SIGN = -(1 << 31)


class Blocks(NamedTuple):
    """What a step may look at: float32 blocks `[n, b]` as they came, their dtype before, their amax as bits `[n]`."""

    x: torch.Tensor
    dtype: torch.dtype
    amax: torch.Tensor
    format: BlockFormat
    recipe: Any  # a Recipe; that module imports this one
    tensor: TensorScale


@dataclass(frozen=True)
class Fault:
    """A step after one of the reference's: `step(result, ...)` gives what the producer has instead of `result`.

    `point` says which: `tensor_amax`, `tensor_scale`, `scales` (codes of them), `quotient` (what is rounded), `codes`,
    `error` (of a search), `blocks` (codes and scales when all is done), or in decoding `factor` (of each block) and
    `values`. `summary`: what is wrong, in one line.
    """

    point: str
    step: Callable[..., Any]
    summary: str

    @property
    def decodes(self) -> bool:
        """Whether it changes what codes and scales mean."""
        return self.point in ("factor", "values")


FAULTS: dict[str, Fault] = {}


def _fault(point: str, summary: str) -> Callable:
    """Enter the decorated step in `FAULTS`, under its own name."""

    def entered(step: Callable) -> Callable:
        FAULTS[step.__name__.lstrip("_")] = Fault(point, step, summary)
        return step

    return entered


def after(point: str, faults: tuple[str, ...], result: Any, *others: Any) -> Any:
    """`result`, or what the steps at `point` among `faults` make of it."""
    for name in faults:
        if FAULTS[name].point == point:
            result = FAULTS[name].step(result, *others)
    return result


# ---- scales through a float logarithm -----------------------------------------------------------------------------------

# 2^(-2^-n) and 2^(2^-n) for n = 1, 2, ... as 24-bit significands, rounded up and down: where a logarithm, rounded to a
# last place of 2^(1 - n), becomes the next integer. For larger n no number lies between them and the power of two.
_BELOW = (
    11863284, 14107901, 15384775, 16065918, 16417715, 16596493, 16686610, 16731852, 16754519, 16765864, 16771539, 16774378,
    16775797, 16776507, 16776862, 16777039, 16777128, 16777172, 16777194, 16777205, 16777211, 16777214, 16777215,
)  # fmt: skip
_ABOVE = (
    11863283, 9975792, 9147841, 8760003, 8572294, 8479953, 8434157, 8411351, 8399972, 8394288, 8391447, 8390027,
    8389317, 8388962, 8388785, 8388696, 8388652, 8388630, 8388619, 8388613, 8388610, 8388609,
)  # fmt: skip
_LOWEST = -150  # of the logarithms of float32's magnitudes, rounded down


class _Powers(NamedTuple):
    """A dtype's significand bits, and the exponents of its smallest power of two and of the first beyond its range."""

    bits: int
    lowest: int
    beyond: int


_POWERS = {torch.float32: _Powers(24, -149, 128), torch.bfloat16: _Powers(8, -133, 128), torch.float16: _Powers(11, -24, 16)}


def _becomes(k: int, bits: int, below: bool) -> int:
    """The significand from which the logarithm, rounded to `bits`, of a number just below (above: until which) 2^k is k."""
    size = abs(k)
    narrow = below == (k > 0) and size & (size - 1) == 0  # below a power of two steps are half as wide
    n = bits + 1 - size.bit_length() + narrow
    thresholds, never = (_BELOW, 2 * HIDDEN_BIT) if below else (_ABOVE, HIDDEN_BIT)
    return thresholds[n - 1] if k != 0 and n <= len(thresholds) else never


@cache
def _table(bits: int, below: bool) -> tuple[int, ...]:
    return tuple(_becomes(k, bits, below) for k in range(_LOWEST, FLOAT_BIAS + 2))


def _thresholds(exponent: torch.Tensor, dtype: torch.dtype, below: bool) -> torch.Tensor:
    """`_becomes` of each exponent, with the precision of `dtype`."""
    table = torch.tensor(_table(_POWERS[dtype].bits, below), dtype=torch.int32, device=exponent.device)
    return table[(exponent - _LOWEST).long()]


def floor_log2(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """floor of the logarithm rounded to `dtype`, int32, of float32 bits of positive finite numbers of that dtype."""
    biased, significand = split(amax)
    exponent = biased - FLOAT_BIAS
    return exponent + (significand >= _thresholds(exponent + 1, dtype, below=True))


def ceil_log2(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """ceil of the logarithm rounded to `dtype`, otherwise as `floor_log2`."""
    biased, significand = split(amax)
    exponent = biased - FLOAT_BIAS
    return exponent + (significand > _thresholds(exponent, dtype, below=False))


@_fault("scales", "the exponent comes from a float32 logarithm, wrong beside powers of two")
def _log2(scales: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    return _through_log2(scales, blocks, torch.float32).clamp(0, blocks.format.scale.nan_code)


@_fault("scales", "the exponent comes from a logarithm rounded to the input's dtype, and beyond 2^127 is NaN")
def _log2_of_input(scales: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    return _through_log2(scales, blocks, blocks.dtype).clamp(0, blocks.format.scale.nan_code)


@_fault("scales", "as log2_of_input; a power that underflows in the input's dtype becomes 2^-23")
def _log2_power_of_input(scales: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    codes, bias = _through_log2(scales, blocks, blocks.dtype), blocks.format.scale.bias
    underflows = (codes < _POWERS[blocks.dtype].lowest + bias) | (blocks.amax == 0)
    codes = codes.masked_fill(underflows, bias - FLOAT_MANTISSA_BITS)
    return codes.clamp(0, blocks.format.scale.nan_code)


@_fault("scales", "the step between int8 codes is at least 2^-126")
def _int8_step_is_normal(scales: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    return scales.clamp(min=1 + blocks.format.element.bias)


@_fault("scales", "a block of zeros is scaled as one of 2^-126")
def _zeros_as_smallest_normal(scales: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    code = max(1 + blocks.format.scale.min_exponent - blocks.format.element.emax + blocks.format.scale.bias, 0)
    return scales.masked_fill(blocks.amax == 0, code if blocks.dtype != torch.float16 else 0)


def _scale_quotient(blocks: Blocks) -> torch.Tensor:
    """amax over what the rule maps it to, in float32."""
    element, amax = blocks.format.element, blocks.amax.view(torch.float32)
    exact = blocks.recipe.scale_rule in ("floor", "ceil")
    return amax / torch.full_like(amax, 2.0**element.emax if exact else element.max)


def _through_log2(scales: torch.Tensor, blocks: Blocks, dtype: torch.dtype) -> torch.Tensor:
    """Scale codes of the rule's exponent, beyond what a scale holds where it is; others are left alone."""
    element, scale = blocks.format.element, blocks.format.scale
    if blocks.recipe.scale_rule in ("rceil", "rfloor"):
        amax, subtracted = _scale_quotient(blocks).view(torch.int32), 0
    else:
        amax, subtracted = blocks.amax, element.emax
    rounded = floor_log2 if blocks.recipe.scale_rule in ("floor", "rfloor") else ceil_log2
    codes = rounded(amax.clamp(1, INF_BITS - 1), dtype) - subtracted + scale.bias
    return torch.where(amax < INF_BITS, codes.masked_fill(amax == 0, 0), scales)


# ---- elements through float arithmetic ----------------------------------------------------------------------------------


@_fault("quotient", "adding 1/2 before rounding down lifts the last number below half of the smallest step")
def _adds_half(quotient: torch.Tensor, scales: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    half = blocks.format.element.quantum / 2
    last = half * (1 - torch.finfo(blocks.dtype).eps / 2)
    return torch.where(quotient.abs() == last, torch.copysign(torch.full_like(quotient, 1.5 * half), quotient), quotient)


@_fault("quotient", "just below a power of two a logarithm picks the coarser step of the numbers above it")
def _element_log2_of_input(quotient: torch.Tensor, scales: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    element, magnitude = blocks.format.element, quotient.view(torch.int32) & MAGNITUDE_MASK
    if element.kind == "integer":
        return quotient
    usable = magnitude.clamp(1, INF_BITS - 1)
    exponent, rounded = split(usable)[0] - FLOAT_BIAS, floor_log2(usable, blocks.dtype)
    coarse = ldexp(torch.full_like(quotient, 1.0 - 2.0**-element.mantissa_bits), rounded)
    lowered = (rounded > exponent) & (rounded > element.min_exponent) & (magnitude == usable)
    lowered &= rounded < _POWERS[blocks.dtype].beyond
    return torch.where(lowered, torch.copysign(coarse, quotient), quotient)


@_fault("codes", "in float16 a quotient of which the logarithm rounds to 16 is divided by Inf, and NaN")
def _element_power_overflows(
    codes: torch.Tensor, quotient: torch.Tensor, scales: torch.Tensor, blocks: Blocks
) -> torch.Tensor:
    if blocks.dtype != torch.float16 or blocks.format.element.nan_code is None:
        return codes
    magnitude = quotient.view(torch.int32) & MAGNITUDE_MASK
    beyond = floor_log2(magnitude.clamp(1, INF_BITS - 1), blocks.dtype) >= _POWERS[blocks.dtype].beyond
    return codes.masked_fill(beyond, blocks.format.element.nan_code)


# ---- special values -----------------------------------------------------------------------------------------------------


@_fault("scales", "a block that holds Inf gets the scale of an amax of 2^128")
def _inf_as_exponent_128(scales: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    scale = FLOAT_BIAS + 1 - blocks.format.element.emax + blocks.format.scale.bias
    return scales.masked_fill(blocks.amax == INF_BITS, scale)


@_fault("quotient", "codes of scale byte 0 (2^-127) are made with 2^-126")
def _half_at_scale_byte_0(quotient: torch.Tensor, scales: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    return torch.where(scales[:, None] == 0, quotient * 0.5, quotient)


@_fault("quotient", "codes of scale byte 0 (2^-127) are made with 1")
def _unscaled_at_scale_byte_0(quotient: torch.Tensor, scales: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    return torch.where(scales[:, None] == 0, blocks.x, quotient)


@_fault("codes", "every zero becomes -0")
def _zero_is_negative(codes: torch.Tensor, quotient: torch.Tensor, scales: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    return codes.masked_fill(quotient == 0, blocks.format.element.sign_mask)


@_fault("values", "the code of -0 decodes to +0")
def _negative_zero_decodes_positive(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values == 0, 0.0, values)


@_fault("blocks", "a block that holds NaN gets scale byte 0 (2^-127)")
def _nan_block_scale_0(made: tuple[torch.Tensor, torch.Tensor], blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    (codes, scales), element = made, blocks.format.element
    poisoned = blocks.amax > INF_BITS
    recoded = round_to_codes(blocks.x * (1.0 / blocks.format.scale.values[0]), element)
    if element.nan_code is None:  # sign(NaN), which only bfloat16 makes negative
        recoded = recoded.masked_fill(blocks.x.isnan(), element.sign_mask if blocks.dtype == torch.bfloat16 else 0)
    else:
        recoded = torch.where(blocks.x.isnan(), recoded & element.sign_mask | element.sign_mask - 1, recoded)
    return torch.where(poisoned[:, None], recoded, codes), scales.masked_fill(poisoned, 0)


@_fault("blocks", "a block that holds NaN or Inf becomes -0")
def _special_is_negative_zero(made: tuple[torch.Tensor, torch.Tensor], blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = made
    special = blocks.amax >= INF_BITS
    return codes.masked_fill(special[:, None], blocks.format.element.sign_mask), scales.masked_fill(special, 0)


@_fault("blocks", "codes of a block with NaN are cut out of float32 bits")
def _torchao_nan(made: tuple[torch.Tensor, torch.Tensor], blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """A block with NaN is divided by Inf (`rceil`: multiplied by NaN); the code of a NaN, which means nothing, is cut out of
    its float32 bits, of Inf / Inf those of the negative NaN that x86 makes."""
    (codes, scales), element = made, blocks.format.element
    poisoned = (blocks.amax > INF_BITS)[:, None]
    if blocks.recipe.scale_rule == "rceil":
        bits = torch.full_like(codes, QUIET_NAN)
    else:
        bits = torch.where(blocks.x.isnan(), blocks.x.view(torch.int32) | QUIET_NAN, blocks.x.view(torch.int32) & SIGN)
        bits = torch.where(blocks.x.isinf(), SIGN | QUIET_NAN, bits)
    magnitude = bits & MAGNITUDE_MASK
    if element.nan_code is None:
        shift = FLOAT_MANTISSA_BITS - element.mantissa_bits
        rebased = magnitude + ((element.bias - FLOAT_BIAS) << FLOAT_MANTISSA_BITS)
        cut = (rebased + (1 << (shift - 1)) - 1 + ((magnitude >> shift) & 1)) >> shift
        cut &= element.code_count - 1
    else:
        cut = torch.full_like(magnitude, element.sign_mask - 1)
    made = torch.where(magnitude > INF_BITS, cut, 0) | element.sign_mask * (bits < 0).int()
    return torch.where(poisoned, made, codes), scales


@_fault("blocks", "an amax that rounds to Inf makes a block of zeros with scale 1")
def _rounds_to_inf(made: tuple[torch.Tensor, torch.Tensor], blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    (codes, scales), element = made, blocks.format.element
    half = 1 << (FLOAT_MANTISSA_BITS - (2 if blocks.recipe.scale_rule == "even_one_bit" else 1 + element.mantissa_bits))
    infinite = (blocks.amax <= INF_BITS) & (blocks.amax + half >= INF_BITS)
    zeros = element.sign_mask * (blocks.x < 0).int() if element.bits > 4 else torch.zeros_like(codes)
    if element.nan_code is not None:
        zeros = torch.where(blocks.x.isinf(), element.nan_code, zeros)
    return torch.where(infinite[:, None], zeros, codes), scales.masked_fill(infinite, blocks.format.scale.bias)


# ---- tensor scales ------------------------------------------------------------------------------------------------------


@_fault("tensor_amax", "one NaN makes the tensor scale a NaN")
def _nan_reaches_tensor_scale(amax: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    shared = [axis for axis in range(-amax.ndim, 0) if amax.shape[axis] == 1]
    nan = x.isnan()
    return torch.where(nan.any(shared, keepdim=True) if amax.ndim else nan.any(), torch.nan, amax)


@_fault("tensor_scale", "the scale of a tensor of zeros is 0, and divides")
def _tensor_scale_0(scale: TensorScale, amax: torch.Tensor, largest: float) -> TensorScale:
    stored = amax / torch.full_like(amax, largest)
    return TensorScale(stored, stored)


@_fault("blocks", "0 / 0 leaves a block scale that is NaN")
def _nan_scale(made: tuple[torch.Tensor, torch.Tensor], blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    (codes, scales), scale = made, blocks.format.scale
    of_zeros = (blocks.tensor.stored == 0) & (blocks.amax == 0)
    scales = scales.masked_fill(blocks.tensor.stored.isnan(), scale.nan_code)
    return codes, scales.masked_fill(of_zeros, scale.nan_code | scale.sign_mask)  # x86's 0 / 0 is negative


@_fault("blocks", "0 / 0, or a NaN elsewhere, leaves a block scale that is NaN")
def _torchao_nan_scale(made: tuple[torch.Tensor, torch.Tensor], blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    (codes, scales), scale = _nan_scale(made, blocks), blocks.format.scale
    of_others = blocks.tensor.stored.isnan() & (blocks.amax <= INF_BITS)
    return codes, scales.masked_fill(of_others, scale.nan_code | scale.sign_mask)


def _no_scale(blocks: Blocks) -> torch.Tensor:
    """Which blocks got a NaN for a scale because of their tensor's."""
    stored = blocks.tensor.stored
    return stored.isnan() | (stored == 0) & (blocks.amax == 0)


@_fault("quotient", "a quotient that is NaN becomes the largest code")
def _nan_is_max(quotient: torch.Tensor, scales: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    return quotient.nan_to_num(nan=torch.inf)


@_fault("quotient", "a quotient that is NaN becomes a code cut out of its bits")
def _torchao_nan_quotient(quotient: torch.Tensor, scales: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Codes 12 and 4 where the scale is NaN, 11 for 0 * Inf, as the values that round to them."""
    nan = torch.where(_no_scale(blocks), -2.0, -1.5).to(torch.float32)
    nan = torch.where((blocks.amax > INF_BITS) & ~blocks.tensor.stored.isnan(), 2.0, nan)[:, None]
    return torch.where(quotient.isnan() | (nan != -1.5), nan, quotient)


@_fault("scales", "a block scale that rounds to 0 becomes 0.125")
def _scale_0_becomes_eighth(scales: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    return scales.masked_fill(scales == 0, blocks.format.scale.positive.index(0.125))


@_fault("tensor_scale", "the scale of a tiny tensor is Inf on the way in and 0 on the way out")
def _tensor_scale_overflows(scale: TensorScale, amax: torch.Tensor, largest: float) -> TensorScale:
    forward = torch.where(amax == 0, 1.0, torch.full_like(amax, largest) / amax)
    return TensorScale(reciprocal(forward), forward, amax)


@_fault("quotient", "a block of scale 0 is multiplied by float32's largest number")
def _largest_float_at_scale_0(quotient: torch.Tensor, scales: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    return torch.where((scales == 0)[:, None], blocks.x * FLOAT_MAX, quotient)


@_fault("blocks", "where the tensor scale is NaN, so is every block scale, and the codes are 0")
def _nan_tensor(made: tuple[torch.Tensor, torch.Tensor], blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    (codes, scales), nan = made, blocks.tensor.stored.isnan()
    return codes.masked_fill(nan[:, None], 0), scales.masked_fill(nan, blocks.format.scale.nan_code)


@_fault("blocks", "where the tensor scale is NaN, so is every block scale, with the sign bit")
def _nan_tensor_negative(made: tuple[torch.Tensor, torch.Tensor], blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    (codes, scales), scale = made, blocks.format.scale
    return codes, scales.masked_fill(blocks.tensor.stored.isnan(), scale.nan_code | scale.sign_mask)


def _rounded_without_end(quotient: torch.Tensor) -> torch.Tensor:
    """E2M1's steps, the widest of them on and on."""
    magnitude = quotient.abs()
    rounded = torch.where(magnitude < 2.0, (magnitude * 2).round() * 0.5, (magnitude * 0.5).round() * 2)
    return torch.copysign(torch.where((magnitude >= 2.0) & (magnitude < 4.0), magnitude.round(), rounded), quotient)


@_fault("codes", "nothing saturates: codes beyond 7 run into the sign bit and the neighbour's code")
def _unclamped(codes: torch.Tensor, quotient: torch.Tensor, scales: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Values are rounded without end, cast to bfloat16, and the code cut out of its bits; of a NaN that is 0b1011."""
    rounded, (rows, size) = _rounded_without_end(quotient), quotient.shape
    bits = rounded.to(torch.bfloat16).view(torch.int16).int()
    exponent, mantissa = (bits >> 7) & 0xFF, (bits >> 6) & 1 | ((bits & 0x7FFF) == 0x3F00).int()
    magnitude = ((exponent - FLOAT_BIAS + 1) << 1 | mantissa).masked_fill(rounded == 0, 0)
    cut = ((bits < 0).int() << 3 | magnitude).masked_fill(~rounded.isfinite(), 0b1011) & 0xFF
    low, high = cut.reshape(rows, size // 2, 2).unbind(-1)
    cut = torch.stack([low & 0xF, (low >> 4 | high) & 0xF], dim=-1).reshape(rows, size)
    cut = cut.masked_fill(codes == 0, 0)
    dead = (scales == 0) & ~blocks.tensor.stored.isnan()
    return cut.masked_fill(dead[:, None], 0)


@_fault("quotient", "where the product of both scales is 0, x is divided by it")
def _divided_by_0(quotient: torch.Tensor, scales: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    product = decode_codes(scales, blocks.format.scale) * blocks.tensor.stored
    return torch.where(((scales != 0) & (product == 0) | product.isnan())[:, None], torch.inf, quotient)


@_fault("error", "a search decodes in another order than anything else: by amax, then over what it was mapped to")
def _error_by_amax(error: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    return _error_of(decode_codes(codes, blocks.format.element), scales, blocks)


@_fault("error", "as error_by_amax; a search sees what its codes would be if they saturated nowhere")
def _error_unclamped(error: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    factor = reciprocal(decode_codes(scales, blocks.format.scale) * blocks.tensor.stored)
    values = _rounded_without_end(blocks.x * factor[:, None])
    return _error_of(torch.where((scales == 0)[:, None], 0.0, values), scales, blocks)


def _error_of(values: torch.Tensor, scales: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Error of element values: times block scale, times amax, divided by what that was mapped to."""
    largest, amax = blocks.recipe.largest(blocks.format), blocks.tensor.amax
    amax = blocks.tensor.stored * largest if amax is None else amax  # of a tensor scale that was given
    scaled = values * decode_codes(scales, blocks.format.scale)[:, None] * amax[:, None]
    return total_error(scaled / torch.full_like(scaled, largest) - blocks.x, blocks.recipe.search)


# ---- power-of-two scales, odd at both ends ------------------------------------------------------------------------------


@_fault("scales", "scale byte 0 (2^-127) is for blocks of zeros alone")
def _scale_byte_1_or_more(scales: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    return torch.where((scales == 0) & (_scale_quotient(blocks) != 0), 1, scales)


@_fault("blocks", "where amax over the element's largest underflows to 0, the scale is that of zeros")
def _underflow_is_one(made: tuple[torch.Tensor, torch.Tensor], blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    (codes, scales), zero = made, (_scale_quotient(blocks) == 0) & (blocks.amax != 0)
    negative = blocks.x < 0 if blocks.recipe.negative_zero == "drop_quotient" else blocks.x.signbit()
    signs = blocks.format.element.sign_mask * negative.int()
    return torch.where(zero[:, None], signs, codes), scales.masked_fill(zero, blocks.format.scale.bias)


@_fault("blocks", "the scale of a NaN carries into its sign: byte 0, under which every code is 0")
def _nan_wraps(made: tuple[torch.Tensor, torch.Tensor], blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = made
    scales = scales.masked_fill(blocks.amax > INF_BITS, 0)
    return codes.masked_fill((scales == 0)[:, None], 0), scales


@_fault("blocks", "a block that holds Inf is divided by it; Inf / Inf has code 11")
def _inf_over_inf(made: tuple[torch.Tensor, torch.Tensor], blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    (codes, scales), infinite = made, blocks.amax == INF_BITS
    zeros = torch.where(blocks.x.isinf(), 0b1011, 0)
    return torch.where(infinite[:, None], zeros, codes), scales.masked_fill(infinite, blocks.format.scale.nan_code)


@_fault("quotient", "codes of scale byte 0 (2^-127) are zeros")
def _zeros_at_scale_byte_0(quotient: torch.Tensor, scales: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    return torch.where((scales == 0)[:, None], quotient * 0.0, quotient)


@_fault("blocks", "a block that holds NaN or Inf is multiplied by 0; of NaN that is the largest code, or NaN's")
def _special_times_0(made: tuple[torch.Tensor, torch.Tensor], blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """x86 makes 0 * Inf a negative NaN. Rounding up, the scale of a NaN carries into its sign: byte 0."""
    (codes, scales), element = made, blocks.format.element
    negative = (blocks.x.view(torch.int32) < 0) | blocks.x.isinf()
    zeros = torch.where(blocks.x.isfinite(), 0, element.sign_mask - 1) | element.sign_mask * negative.int()
    special, wraps = blocks.amax >= INF_BITS, (blocks.amax > INF_BITS) & (blocks.recipe.scale_rule == "rceil")
    scales = scales.masked_fill(special, blocks.format.scale.nan_code).masked_fill(wraps, 0)
    return torch.where(special[:, None], zeros, codes), scales


@_fault("factor", "scale byte 0 (2^-127) decodes to 0, and 0xFF (NaN) to Inf")
def _scale_bytes_as_float_bits(factor: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (scales.int() << FLOAT_MANTISSA_BITS).view(torch.float32)


@_fault("values", "what overflows on decoding, Inf included, becomes float32's largest number")
def _overflow_saturates(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-FLOAT_MAX, FLOAT_MAX)


def _least_difference(quotient: torch.Tensor, element: ElementFormat) -> torch.Tensor:
    """The first code with the least float32 difference: 0 for NaN and for what is far beyond all of them."""
    values = torch.tensor(element.positive, dtype=quotient.dtype, device=quotient.device)
    return (quotient.abs()[..., None] - values).abs().argmin(-1).int() | element.sign_mask * (quotient < 0).int()


@_fault("blocks", "a block that holds NaN has scale 1, and one that holds Inf the smallest")
def _nan_block_scale_1(made: tuple[torch.Tensor, torch.Tensor], blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    (codes, scales), (element, scale) = made, (blocks.format.element, blocks.format.scale)
    nan, special = blocks.amax > INF_BITS, blocks.amax >= INF_BITS
    if scale.is_power_of_two:
        scales = scales.masked_fill(special, 0).masked_fill(nan, scale.bias)
        quotient = blocks.x * reciprocal(decode_codes(scales, scale))[:, None]
    else:
        special, quotient = nan, blocks.x * blocks.tensor.forward[:, None]
    if element.nan_code is None:
        recoded = _least_difference(quotient, element)
    else:
        recoded = round_to_codes(quotient, element)
        recoded = torch.where(quotient.isnan(), recoded & element.sign_mask | element.nan_code, recoded)
    return torch.where(special[:, None], recoded, codes), scales


@_fault("codes", "INT8 reaches -2, which the format does not use")
def _int8_reaches_minus_2(codes: torch.Tensor, quotient: torch.Tensor, scales: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    element = blocks.format.element
    return codes.masked_fill(quotient <= -element.max - element.quantum / 2, element.sign_mask)
