"""What happens inside a block: from float32 values to codes and a scale, and back.

Everything here works on a matrix of blocks, one block a row; nothing knows the shape or axis they came from.
"""

from collections.abc import Iterator
from math import isqrt

import torch
from einops import rearrange

from mxref.elements import INF_BITS, MAGNITUDE_MASK, decode_codes, reciprocal, round_to_codes, total_error
from mxref.faults import Blocks, after
from mxref.formats import BlockFormat
from mxref.orders import DECODE_ORDERS, ENCODE_ORDERS, TensorScale, encode_quotient
from mxref.recipes import Hadamard, Recipe
from mxref.scales import scale_codes


def encode_blocks(
    x: torch.Tensor, format: BlockFormat, recipe: Recipe, tensor: TensorScale, random_words: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes `[n, b]` and scale codes `[n]`, both int32, of blocks `[n, b]` that the recipe's transform has been
    applied to. `tensor`: one tensor scale a block, 1 where there is none.
    """
    dtype, x = x.dtype, x.float()
    amax = (x.view(torch.int32) & MAGNITUDE_MASK).amax(-1)  # as bits: exact, and NaN is the largest of all
    blocks = Blocks(x, dtype, amax, format, recipe, tensor)
    poisoned = amax >= INF_BITS if recipe.inf == "nan" else amax > INF_BITS
    amax = amax.masked_fill(poisoned, 0)
    x = torch.where(poisoned[:, None], 0.0, x)

    best = None
    for _, scales in scale_candidates(amax, format, recipe, tensor, dtype):
        scales = after("scales", recipe.faults, scales, blocks)
        codes = _element_codes(x, scales, format, recipe, tensor, random_words, blocks)
        if recipe.search != "none":
            decoded = decode_blocks(codes, scales, format, recipe, tensor.stored)
            error = after("error", recipe.faults, total_error(x - decoded, recipe.search), codes, scales, blocks)
            if best is not None:
                wins = error < best[2]
                codes = torch.where(wins[:, None], codes, best[0])
                scales, error = torch.where(wins, scales, best[1]), torch.where(wins, error, best[2])
            best = codes, scales, error

    if recipe.zero_block == "one":
        scales = torch.where(amax == 0, format.scale.positive.index(1.0), scales)
    return after("blocks", recipe.faults, (codes, scales.masked_fill(poisoned, format.scale.nan_code)), blocks)


def decode_blocks(
    codes: torch.Tensor, scales: torch.Tensor, format: BlockFormat, recipe: Recipe, stored: torch.Tensor
) -> torch.Tensor:
    """Float32 values `[n, b]` of codes `[n, b]`, scale codes `[n]` and tensor scales `[n]`: one product an element."""
    factor = DECODE_ORDERS[recipe.decode_order](decode_codes(scales, format.scale), stored)
    factor = after("factor", recipe.faults, factor, scales)
    return after("values", recipe.faults, decode_codes(codes, format.element) * factor[:, None])


def scale_candidates(
    amax: torch.Tensor, format: BlockFormat, recipe: Recipe, tensor: TensorScale, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[float, torch.Tensor]]:
    """(what multiplies the scale, scale codes `[n]`) to try for amax bits `[n]`, in the order in which ties are decided.

    `dtype`: the input's.
    """
    if recipe.scale_rule == "amax":
        order, largest = ENCODE_ORDERS[recipe.encode_order], amax.view(torch.float32)
        element_max = recipe.element_max or format.element.max
        largest = largest.to(dtype) if recipe.amax_dtype == "input" else largest
        for stretch in (1.0, 1.5) if recipe.search.startswith("four_over_six") else (1.0,):
            if order.block_scale is None:
                yield stretch, encode_quotient(largest, element_max / stretch * tensor.stored.double(), format.scale)
            else:
                raw = order.block_scale(largest, tensor, element_max) * stretch
                yield stretch, round_to_codes(raw.clamp(min=recipe.scale_min, max=format.scale.max), format.scale)
        return
    scales = scale_codes(amax, format.element, format.scale, recipe.scale_rule)
    scales = scales.masked_fill(amax == INF_BITS, format.scale.max_code)
    yield 1.0, scales
    if recipe.search == "mse":
        yield 2.0, torch.where(amax == 0, scales, (scales + 1).clamp(max=format.scale.max_code))
        yield 0.5, torch.where(amax == 0, scales, (scales - 1).clamp(min=0))


def _element_codes(
    x: torch.Tensor, scales: torch.Tensor, format: BlockFormat, recipe: Recipe, tensor: TensorScale, random_words, blocks
) -> torch.Tensor:
    """Int32 codes `[n, b]` of blocks `[n, b]`, whose scale codes are chosen."""
    scale = decode_codes(scales, format.scale)
    order = ENCODE_ORDERS[recipe.encode_order]
    if format.scale.is_power_of_two:
        quotient = x * reciprocal(scale)[:, None]  # exact, but for products below 2^-126
    elif order.block_scale is None:
        return encode_quotient(x, (scale.double() * tensor.stored.double())[:, None], format.element)
    else:
        quotient = order.quotient(x, scale, tensor)
    quotient = after("quotient", recipe.faults, quotient, scales, blocks)
    if not format.scale.is_power_of_two:
        if recipe.inf == "saturate" or recipe.encode_order != "nvidia":  # else both factors are finite
            quotient = torch.where(quotient.isnan(), x, quotient)  # 0 * Inf is the 0, Inf * 0 the Inf
    elif recipe.rounding == "away_from_zero" or recipe.negative_zero == "drop_quotient":
        # A product that underflows is still not zero. Other choices cannot tell: every midpoint is far above.
        tiny = torch.copysign(torch.full_like(x, 2.0**-126), x)
        quotient = torch.where((x != 0) & (quotient.abs() < 2.0**-126), tiny, quotient)
    codes = round_to_codes(quotient, format.element, recipe.rounding, recipe.overflow, random_words)
    if recipe.negative_zero == "drop_quotient":
        codes.masked_fill_(quotient == 0, 0)
    elif recipe.negative_zero == "drop" and format.element.kind == "float":
        codes.masked_fill_(codes & ~format.element.sign_mask == 0, 0)
    return after("codes", recipe.faults, codes, quotient, scales, blocks)


def rotate(x: torch.Tensor, transform: Hadamard | None, axis: int, inverse: bool = False) -> torch.Tensor:
    """A Hadamard rotation along `axis`, or its inverse, in float32; `x` itself where `transform` is None."""
    if transform is None:
        return x
    signs = torch.tensor(transform.signs, dtype=torch.float32, device=x.device)
    rows = x.movedim(axis, -1).float()
    groups = rearrange(rows, "... (n size) -> ... n size", size=transform.size)
    groups = groups if inverse else groups * signs
    distance = 1
    while distance < transform.size:
        a, b = rearrange(groups, "... (m two d) -> two ... m d", two=2, d=distance)
        groups = torch.stack([a + b, a - b], dim=-2).flatten(-3)
        distance *= 2
    groups = groups * (1.0 / isqrt(transform.size))
    groups = groups * signs if inverse else groups
    return groups.reshape(rows.shape).movedim(-1, axis)
