"""What is compiled: functions of blocks `[n, b]` and of tensor scales, one a block `[n]` or one for all `[]`.

Decoding is the reference's own code. The others round values instead of codes where a recipe allows it, with float32
operations alone: inductor turns every bit cast of an element into a loop through memory.
"""

import torch

from mxref.block_codec import decode_blocks as reference_decode
from mxref.block_codec import encode_blocks as reference_encode
from mxref.block_codec import scale_candidates
from mxref.elements import INF_BITS, MAGNITUDE_MASK, decode_codes, reciprocal
from mxref.formats import FLOAT_BIAS, FLOAT_MANTISSA_BITS, BlockFormat, ElementFormat
from mxref.orders import DECODE_ORDERS, ENCODE_ORDERS, TensorScale
from mxref.recipes import Recipe

MANY_BINADES = 16  # of an element: with more, codes come sooner from bits


def finite_amax(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Largest finite magnitude, float32: of each block `[n, 1]` with `dims` (1,), of all `[1, 1]` with (0, 1)."""
    magnitude = x.float().abs()
    return torch.where(magnitude < torch.inf, magnitude, 0.0).amax(dims, keepdim=True)


def encode_blocks(
    x: torch.Tensor, stored: torch.Tensor, forward: torch.Tensor, format: BlockFormat, recipe: Recipe
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes `[n, b]` and scale codes `[n]`, both uint8."""
    tensor = TensorScale(stored, forward)
    if rounds_values(format, recipe) and format.element.emax - format.element.min_exponent < MANY_BINADES:
        quotients, scales, poisoned = quotients_of_blocks(x.float(), tensor, format, recipe)
        codes = codes_of_values(round_values(quotients, format.element), format.element)
        if recipe.negative_zero == "drop" and format.element.kind == "float":
            codes = torch.where(codes == format.element.sign_mask, 0, codes)
        scales = scales.masked_fill(poisoned, format.scale.nan_code)
    else:
        codes, scales = reference_encode(x.float(), format, recipe, tensor, None)
    return codes.to(torch.uint8), scales.to(torch.uint8)


def decode_blocks(
    codes: torch.Tensor, scales: torch.Tensor, stored: torch.Tensor, format: BlockFormat, recipe: Recipe, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Values of `dtype`, as `narrowed` gives them."""
    return narrowed(reference_decode(codes, scales, format, recipe, stored), dtype)


def qdq_blocks(
    x: torch.Tensor, stored: torch.Tensor, forward: torch.Tensor, format: BlockFormat, recipe: Recipe
) -> tuple[torch.Tensor, ...]:
    """Values of `x`'s dtype, as `narrowed` gives them."""
    tensor = TensorScale(stored, forward)
    if not rounds_values(format, recipe):
        codes, scales = reference_encode(x.float(), format, recipe, tensor, None)
        return narrowed(reference_decode(codes, scales, format, recipe, stored), x.dtype)
    quotients, scales, poisoned = quotients_of_blocks(x.float(), tensor, format, recipe)
    values = round_values(quotients, format.element)
    if recipe.negative_zero == "drop":
        values = torch.where(values == 0, 0.0, values)
    scale = decode_codes(scales.masked_fill(poisoned, format.scale.nan_code), format.scale)
    factor = DECODE_ORDERS[recipe.decode_order](scale, stored)
    return narrowed(values * factor[:, None], x.dtype, nan_blocks=~(factor.abs() < torch.inf))


def quotients_of_blocks(
    x: torch.Tensor, tensor: TensorScale, format: BlockFormat, recipe: Recipe
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Float32 `[n, b]` that elements are rounded from, scale codes `[n]`, and which blocks are to become NaN."""
    amax = x.abs().amax(-1).view(torch.int32) & MAGNITUDE_MASK  # a NaN is the largest of all
    poisoned = amax >= INF_BITS if recipe.inf == "nan" else amax > INF_BITS
    amax = amax.masked_fill(poisoned, 0)
    ((_, scales),) = scale_candidates(amax, format, recipe, tensor)
    scale = decode_codes(scales, format.scale)
    power_of_two = format.scale.is_power_of_two
    multiplier = reciprocal(scale) if power_of_two else ENCODE_ORDERS[recipe.encode_order].multiplier(scale, tensor)
    return torch.where(poisoned[:, None], 0.0, x) * multiplier[:, None], scales, poisoned


def rounds_values(format: BlockFormat, recipe: Recipe) -> bool:
    """Whether values are rounded: to nearest even, saturating, where neither a factor nor a quotient can be NaN."""
    element = format.element
    highest = FLOAT_MANTISSA_BITS + (element.emax if element.kind == "float" else -element.bias)  # of an anchor
    choices = (recipe.rounding, recipe.overflow, recipe.search)
    simple = (
        choices == ("nearest_even", "saturate", "none")
        and element.mantissa_bits > 0
        and recipe.zero_block == "zero_code"
        and recipe.negative_zero != "drop_quotient"
        and highest <= FLOAT_BIAS
    )
    return simple and (format.scale.is_power_of_two or (recipe.encode_order, recipe.inf) == ("nvidia", "nan"))


def round_values(x: torch.Tensor, element: ElementFormat) -> torch.Tensor:
    """What the code nearest to each value decodes to; NaN is the caller's business.

    One float32 addition rounds: the last place of `anchor` is the step between codes where x lies.
    """
    if element.kind == "integer":
        anchor = 1.5 * 2.0**FLOAT_MANTISSA_BITS * element.quantum
        return (x.clamp(-element.max, element.max) + anchor) - anchor
    magnitude = x.abs().clamp(max=element.max)
    anchor = torch.full_like(x, 2.0**FLOAT_MANTISSA_BITS * element.quantum)
    for exponent in range(element.min_exponent + 1, element.emax + 1):
        step = 2.0 ** (exponent - element.mantissa_bits)
        anchor = torch.where(magnitude >= 2.0**exponent, 2.0**FLOAT_MANTISSA_BITS * step, anchor)
    return torch.copysign((magnitude + anchor) - anchor, x)


def codes_of_values(values: torch.Tensor, element: ElementFormat) -> torch.Tensor:
    """Int32 codes of values that `element` holds: the place among its codes, by exact float32 products and sums."""
    if element.kind == "integer":
        return (values * (1 / element.quantum)).to(torch.int32) & (element.code_count - 1)
    magnitude = values.abs()
    place = magnitude * (1 / element.quantum)
    for exponent in range(element.min_exponent + 1, element.emax + 1):
        below = (exponent - element.min_exponent) * 2.0**element.mantissa_bits
        place = torch.where(magnitude >= 2.0**exponent, magnitude * 2.0 ** (element.mantissa_bits - exponent) + below, place)
    negative = torch.copysign(torch.ones_like(values), values) < 0
    return torch.where(negative, place + element.sign_mask, place).to(torch.int32)


def narrowed(x: torch.Tensor, dtype: torch.dtype, nan_blocks: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """(Values of `dtype`, NaN canonical); for bfloat16 also which blocks may hold NaN: ATen's vectors store another one."""
    values = torch.where(x != x, torch.nan, x).to(dtype)
    if dtype != torch.bfloat16:
        return (values,)
    return values, (x != x).any(-1) if nan_blocks is None else nan_blocks
