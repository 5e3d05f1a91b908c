"""Producers: the quantizers of other projects as rows of data, and their faults as small named steps.

What a producer chose is a field of its row like any other recipe's. What is wrong in it, a float logarithm, a NaN that turns
into a zero, a scale byte that does not say what was used, is a `Fault`: a step that changes one intermediate
result after the reference has computed it. A recipe names its faults, and only a row of this file may: nobody
should get them without asking for the producer by its name.

Every row was compared with the producer's own output, bit for bit; `benchmarks/results/producers.json` is the record.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import log2
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
    sum_in_order,
)
from mxref.formats import FLOAT_BIAS, FLOAT_MANTISSA_BITS, FLOAT_MAX, BlockFormat
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

    `point` says which: `tensor_amax`, `tensor_scale`, `scales` (codes of them), `quotient`, `codes`, `blocks` (codes and
    scales of finished blocks), `error` (of a search), or in decoding `factor` (of each block) and `values`. `summary`: what is wrong, in one line.
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


def search_error(difference: torch.Tensor, search: str) -> torch.Tensor:
    """What a recipe's search makes least, `[n]`, of differences `[n, b]`."""
    if search.endswith("max"):
        return difference.abs().amax(1)
    return sum_in_order(difference.abs() if search.endswith("mae") else difference * difference, dim=1)


def after(point: str, faults: tuple[str, ...], result: Any, *others: Any) -> Any:
    """`result`, or what the steps at `point` among `faults` make of it."""
    for name in faults:
        if FAULTS[name].point == point:
            result = FAULTS[name].step(result, *others)
    return result


# ---- scales through a float logarithm -----------------------------------------------------------------------------------

# 2^(-2^-n) and 2^(2^-n) for n = 1 ... 26 as 24-bit significands, rounded up and down: where a logarithm, rounded to a
# dtype whose last place there is 2^(1 - n), becomes the next integer.
_BELOW = (
    11863284, 14107901, 15384775, 16065918, 16417715, 16596493, 16686610, 16731852, 16754519, 16765864, 16771539, 16774378,
    16775797, 16776507, 16776862, 16777039, 16777128, 16777172, 16777194, 16777205, 16777211, 16777214, 16777215,
)  # fmt: skip
_ABOVE = (
    11863283, 9975792, 9147841, 8760003, 8572294, 8479953, 8434157, 8411351, 8399972, 8394288, 8391447, 8390027,
    8389317, 8388962, 8388785, 8388696, 8388652, 8388630, 8388619, 8388613, 8388610, 8388609,
)  # fmt: skip
_SIGNIFICAND_BITS = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}
_LOWEST = -150  # of the logarithms of float32's magnitudes, rounded down


def _becomes(k: int, bits: int, below: bool) -> int:
    """The significand from which the logarithm, rounded to `bits`, of a number just below (above: until which) 2^k is k."""
    size = abs(k)
    narrow = below == (k > 0) and size & (size - 1) == 0  # below a power of two steps are half as wide
    n = bits + 1 - size.bit_length() + narrow
    thresholds, never = (_BELOW, 2 * HIDDEN_BIT) if below else (_ABOVE, HIDDEN_BIT)
    return thresholds[n - 1] if k != 0 and n <= len(thresholds) else never


def _thresholds(amax: torch.Tensor, exponent: torch.Tensor, dtype: torch.dtype, below: bool) -> torch.Tensor:
    """`_becomes` of each exponent, with the precision of `dtype`."""
    table = [_becomes(k, _SIGNIFICAND_BITS[dtype], below) for k in range(_LOWEST, FLOAT_BIAS + 2)]
    return torch.tensor(table, dtype=torch.int32, device=amax.device)[(exponent - _LOWEST).long()]


def floor_log2(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """floor of the logarithm rounded to `dtype`, int32, of float32 bits of positive finite numbers of that dtype."""
    biased, significand = split(amax)
    exponent = biased - FLOAT_BIAS
    return exponent + (significand >= _thresholds(amax, exponent + 1, dtype, below=True))


def ceil_log2(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """ceil of the logarithm rounded to `dtype`, otherwise as `floor_log2`."""
    biased, significand = split(amax)
    exponent = biased - FLOAT_BIAS
    return exponent + (significand > _thresholds(amax, exponent, dtype, below=False))


@_fault("scales", "the exponent comes from a float32 logarithm, wrong beside powers of two")
def _log2(scales: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    return _through_log2(scales, blocks, torch.float32).clamp(0, blocks.format.scale.nan_code)


@_fault("scales", "the exponent comes from a logarithm rounded to the input's dtype, and beyond 2^127 is NaN")
def _log2_of_input(scales: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    return _through_log2(scales, blocks, blocks.dtype).clamp(0, blocks.format.scale.nan_code)


@_fault("scales", "as log2_of_input; a power that underflows in the input's dtype becomes 2^-23")
def _log2_power_of_input(scales: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    codes, bias = _through_log2(scales, blocks, blocks.dtype), blocks.format.scale.bias
    underflows = codes < log2(torch.finfo(blocks.dtype).smallest_normal * torch.finfo(blocks.dtype).eps) + bias
    codes = codes.masked_fill(underflows | (blocks.amax == 0), bias - FLOAT_MANTISSA_BITS)
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
    lowered &= rounded < log2(torch.finfo(blocks.dtype).max)
    return torch.where(lowered, torch.copysign(coarse, quotient), quotient)


@_fault("codes", "in float16 a quotient of which the logarithm rounds to 16 is divided by Inf, and NaN")
def _element_power_overflows(
    codes: torch.Tensor, quotient: torch.Tensor, scales: torch.Tensor, blocks: Blocks
) -> torch.Tensor:
    if blocks.dtype != torch.float16 or blocks.format.element.nan_code is None:
        return codes
    magnitude = quotient.view(torch.int32) & MAGNITUDE_MASK
    beyond = floor_log2(magnitude.clamp(1, INF_BITS - 1), blocks.dtype) >= log2(torch.finfo(blocks.dtype).max)
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
    return torch.where(x.isnan().any(), torch.nan, amax)


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
    nan = torch.where(_no_scale(blocks), -2.0, -1.5)
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
    cut = cut.masked_fill(quotient == 0, 0)
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
    scaled = values * decode_codes(scales, blocks.format.scale)[:, None] * blocks.tensor.amax[:, None]
    mapped_to = torch.full_like(scaled, blocks.recipe.largest(blocks.format))
    return search_error(scaled / mapped_to - blocks.x, blocks.recipe.search)


# ---- power-of-two scales, odd at both ends ------------------------------------------------------------------------------


@_fault("scales", "scale byte 0 (2^-127) is for blocks of zeros alone")
def _scale_byte_1_or_more(scales: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    return torch.where((scales == 0) & (_scale_quotient(blocks) != 0), 1, scales)


@_fault("blocks", "where amax over the element's largest underflows to 0, the scale is 1")
def _underflow_is_one(made: tuple[torch.Tensor, torch.Tensor], blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    (codes, scales), zero = made, _scale_quotient(blocks) == 0
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


@_fault("codes", "the code is the first with the least float32 difference, of NaN and of what is far beyond all of them 0")
def _least_difference(codes: torch.Tensor, quotient: torch.Tensor, scales: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    element = blocks.format.element
    values = torch.tensor(element.positive, device=codes.device)
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
        recoded = _least_difference(codes, quotient, scales, blocks)
    else:
        recoded = round_to_codes(quotient, element)
        recoded = torch.where(quotient.isnan(), recoded & element.sign_mask | element.nan_code, recoded)
    return torch.where(special[:, None], recoded, codes), scales


@_fault("codes", "INT8 reaches -2, which the format does not use")
def _int8_reaches_minus_2(codes: torch.Tensor, quotient: torch.Tensor, scales: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    element = blocks.format.element
    return codes.masked_fill(quotient <= -element.max - element.quantum / 2, element.sign_mask)


# ---- rows ---------------------------------------------------------------------------------------------------------------

_VLLM = dict(scale_rule="amax", decode_order="block_over_tensor", inf="saturate", negative_zero="drop_quotient")
_TORCHAO = dict(inf="saturate", format=("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2"),
                faults=("inf_as_exponent_128", "half_at_scale_byte_0", "torchao_nan"))  # fmt: skip
_CT = dict(inf="saturate", faults=("rounds_to_inf", "nan_block_scale_0"))
_ZERO_TENSOR = ("nan_reaches_tensor_scale", "tensor_scale_0")

_QUARK = (
    ("", ("log2_power_of_input",), ", and no negative zeros",
     dict(negative_zero="drop", format=("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2"))),
    ("_mxfp8", ("log2_power_of_input",), "", dict(format=("mxfp8_e4m3", "mxfp8_e5m2"))),
    ("_mxint8", ("log2_power_of_input", "int8_step_is_normal"), "", dict(format="mxint8")),
)  # fmt: skip

_TE = dict(scale_rule="amax", negative_zero="drop_quotient", format="nvfp4",
           faults=("nan_reaches_tensor_scale", "largest_float_at_scale_0", "nan_tensor"))  # fmt: skip
_TE_SEARCH = dict(encode_order="four_over_six", faults=(*_TE["faults"], "error_by_amax"))
_FOUROVERSIX = dict(scale_rule="amax", encode_order="four_over_six", negative_zero="drop_quotient", format="nvfp4",
                    faults=("nan_reaches_tensor_scale", "tensor_scale_overflows", "divided_by_0", "unclamped",
                            "nan_tensor_negative"))  # fmt: skip
_46 = dict(scale_max=256.0, faults=(*_FOUROVERSIX["faults"], "error_unclamped"))
_TRITON = {
    "formats": ("mxfp4", "mxfp8_e4m3", "mxfp8_e5m2"),
    "up": ("scale_byte_1_or_more", "special_times_0", "scale_bytes_as_float_bits"),
    "down": ("zeros_at_scale_byte_0", "special_times_0", "scale_bytes_as_float_bits"),
}
_MICROXCALING = dict(scale_rule="floor", negative_zero="drop_quotient")
_MICROXCALING_LOG2 = ("log2_of_input", "zeros_as_smallest_normal", "element_power_overflows")

_ROWS = (
    dict(name="vllm_torch", encode_order="vllm_torch", **_VLLM,
         summary="vLLM's NVFP4 emulation, PyTorch path: reciprocal of a reciprocal; a quotient of -0 becomes +0"),
    dict(name="vllm_triton", encode_order="vllm_triton", **_VLLM,
         summary="vLLM's NVFP4 emulation, Triton path: gs / block scale; a quotient of -0 becomes +0"),
    dict(name="compressed_tensors_mxfp4", scale_rule="even", negative_zero="drop_quotient", format="mxfp4", **_CT,
         summary="as ocp_even; an input of -0 becomes +0"),
    dict(name="compressed_tensors_mxfp6", scale_rule="even", format="mxfp6_e2m3", **_CT, summary="as ocp_even"),
    dict(name="compressed_tensors_mxfp8", scale_rule="even_one_bit", format="mxfp8_e4m3", **_CT,
         summary="as ocp_even with the threshold of FP4, 1.75, instead of 1.9375"),
    dict(name="compressed_tensors_nvfp4", scale_rule="amax", encode_order="compressed_tensors", format="nvfp4",
         decode_order="block_over_tensor", amax_dtype="input", negative_zero="drop_quotient",
         faults=("nan_reaches_tensor_scale", "scale_0_becomes_eighth"),
         summary="divides by scale / (2688 / amax); in bfloat16 and float16 so are the tensor scale and amax / 6"),
    dict(name="microxcaling_nearest", rounding="ties_away", **_MICROXCALING, faults=(*_MICROXCALING_LOG2, "adds_half"),
         summary="as ocp, ties go away from zero; an input of -0 becomes +0"),
    dict(name="microxcaling_even", **_MICROXCALING, faults=(*_MICROXCALING_LOG2, "adds_half"),
         summary="as ocp; an input of -0 becomes +0"),
    dict(name="microxcaling_floor", rounding="toward_zero", **_MICROXCALING,
         faults=(*_MICROXCALING_LOG2, "element_log2_of_input"), summary="as ocp, elements rounded toward zero"),
    dict(name="modelopt_mxfp4", scale_rule="rceil", rounding="ties_toward_zero", format="mxfp4",
         faults=("log2", "zero_is_negative", "special_is_negative_zero"), summary="as ocp_rceil, ties go toward zero"),
    dict(name="modelopt_mxfp8", scale_rule="rceil", inf="saturate", format="mxfp8_e4m3",
         faults=("log2", "nan_block_scale_0"), summary="as ocp_rceil; an Inf becomes the largest element"),
    dict(name="modelopt_nvfp4", scale_rule="amax", encode_order="modelopt", scale_min=2.0**-9, zero_block="one",
         negative_zero="drop_quotient", format="nvfp4",
         faults=(*_ZERO_TENSOR, "nan_is_max", "nan_scale", "negative_zero_decodes_positive"),
         summary="divides by scale * (amax / 2688); no block scale is 0: at least 2^-9, and 1 for a block of zeros"),
    dict(name="quark_even", scale_rule="even", inf="saturate", negative_zero="drop",
         summary="AMD Quark, and vLLM's MXFP4 and MXFP6 emulation, which calls it: even, and no negative zeros"),
    dict(name="quark_even_mxfp8", scale_rule="even", inf="saturate", format=("mxfp8_e4m3", "mxfp8_e5m2"),
         summary="AMD Quark: as ocp_even; an Inf becomes the largest element"),
    dict(name="quark_even_mxint8", scale_rule="even", inf="saturate", format="mxint8", faults=("int8_step_is_normal",),
         summary="AMD Quark: as ocp_even; an Inf becomes the largest element"),
    *(dict(_TE | others, name=f"te_ref{suffix}", summary=f"TransformerEngine's reference: {like}; an input of -0 becomes +0")
      for suffix, like, others in (
          ("", "as nvidia", {}),
          ("_2d", "as nvidia_16x16", dict(block_rows=16)),
          ("_4over6_mae448", "to 6 or 4 by absolute error", dict(_TE_SEARCH, search="four_over_six_mae")),
          ("_4over6_mse256", "to 6 or 4 by squared error", dict(_TE_SEARCH, search="four_over_six_mse", scale_max=256.0)),
      )),
    dict(name="te_ref_pow2", scale_rule="rceil", inf="saturate", negative_zero="drop_quotient", format="mxfp4",
         faults=("log2",), summary="TransformerEngine's reference with power-of-two scales: as ocp_rceil; an Inf saturates"),
    *(dict(_FOUROVERSIX | others, name=f"fouroversix_{mode}", summary=f"fouroversix, NVFP4: {like}")
      for mode, like, others in (
          ("static6", "block maximum to 6", {}),
          ("static4", "block maximum to 4", dict(element_max=4.0)),
          ("static6_2d", "block maximum to 6, one scale for 16 x 16", dict(block_rows=16)),
          ("mse", "to 6 or 4 by squared error", dict(_46, search="four_over_six_mse")),
          ("mse_2d", "to 6 or 4 by squared error, one scale for 16 x 16", dict(_46, search="four_over_six_mse", block_rows=16)),
          ("mae", "to 6 or 4 by absolute error", dict(_46, search="four_over_six_mae")),
          ("absmax", "to 6 or 4 by largest error", dict(_46, search="four_over_six_max")),
      )),
    *(dict(name=f"fouroversix_mxfp4_{mode}", scale_rule=rule, negative_zero="drop_quotient", format="mxfp4",
           faults=("scale_byte_1_or_more", "nan_wraps", "inf_over_inf"), summary=f"fouroversix: as {like}")
      for mode, rule, like in (("static6", "rceil", "ocp_rceil"), ("static4", "ceil", "ocp_ceil"))),
    dict(name="flashinfer_mxfp4", scale_rule="rfloor", rounding="ties_toward_zero", negative_zero="drop_quotient",
         zero_block="one", format="mxfp4", faults=("log2", "least_difference", "underflow_is_one", "nan_block_scale_1"),
         summary="FlashInfer's reference: the largest scale with max * scale <= amax; ties go toward zero"),
    dict(name="flashinfer_mxfp8", scale_rule="rfloor", zero_block="one", format="mxfp8_e4m3",
         faults=("log2", "underflow_is_one", "nan_block_scale_1"),
         summary="FlashInfer's reference: the largest scale with max * scale <= amax"),
    dict(name="flashinfer_nvfp4", scale_rule="amax", encode_order="flashinfer", decode_order="block_over_tensor",
         rounding="ties_toward_zero", negative_zero="drop_quotient", format="nvfp4",
         faults=("least_difference", "nan_block_scale_1"),
         summary="FlashInfer's reference: multiplies by the tensor scale, divides by the block's; ties go toward zero"),
    dict(name="gfloat", scale_rule="floor", inf="saturate", nan="raise",
         format=("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2"),
         summary="as ocp; an Inf becomes the largest element, a NaN raises"),
    dict(name="gfloat_mxint8", scale_rule="floor", inf="saturate", nan="raise", format="mxint8",
         faults=("int8_reaches_minus_2",), summary="as ocp; an Inf becomes the largest element, a NaN raises"),
    *(dict(name=f"triton_kernels_{version}", scale_rule=rule, faults=(*_TRITON[mode], *decoded),
           summary=f"triton_kernels: {like}", **others)
      for version, mode, rule, decoded, like, others in (
          ("vllm_up", "up", "rceil", (), "as ocp_rceil, ties go away from zero", dict(rounding="ties_away", format="mxfp4")),
          ("vllm_up_mxfp8", "up", "rceil", (), "as ocp_rceil", dict(format=("mxfp8_e4m3", "mxfp8_e5m2"))),
          ("vllm_down", "down", "rfloor", (), "the largest scale with max * scale <= amax, ties go away from zero",
           dict(rounding="ties_away", format="mxfp4")),
          ("vllm_down_mxfp8", "down", "rfloor", (), "the largest scale with max * scale <= amax",
           dict(format=("mxfp8_e4m3", "mxfp8_e5m2"))),
          ("git_up", "up", "rceil", ("overflow_saturates",), "as ocp_rceil", dict(format=_TRITON["formats"])),
          ("git_down", "down", "floor", ("overflow_saturates",), "as ocp", dict(format=_TRITON["formats"])),
      )),
    *(dict(name=f"quark_{rule}{suffix}", scale_rule=rule, faults=faults, summary=f"AMD Quark: as ocp{like}{more}", **others)
      for rule, like in (("floor", ""), ("ceil", "_ceil")) for suffix, faults, more, others in _QUARK),
    dict(name="torchao_floor", scale_rule="floor", **_TORCHAO, summary="as ocp"),
    dict(name="torchao_ceil", scale_rule="ceil", **_TORCHAO, summary="as ocp_ceil"),
    dict(name="torchao_even", scale_rule="even", **_TORCHAO, summary="as ocp_even"),
    dict(_TORCHAO, name="torchao_rceil", scale_rule="rceil", faults=("log2", "unscaled_at_scale_byte_0", "torchao_nan"),
         summary="as ocp_rceil, eager; an Inf becomes the largest element"),
    dict(name="torchao_nvfp4", scale_rule="amax", encode_order="torchao", scale_min=2.0**-6, format="nvfp4",
         faults=(*_ZERO_TENSOR, "torchao_nan_quotient", "torchao_nan_scale"),
         summary="multiplies by (1 / (amax / 2688)) / scale; block scales from 2^-6 up; one level: tensor_scale='none'"),
)  # fmt: skip

ROWS: dict[str, dict[str, Any]] = {row["name"]: row for row in _ROWS}
