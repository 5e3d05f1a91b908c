"""What happens inside a block: from float32 values to codes and a scale, and back.

Everything here works on a matrix of blocks, one block a row; nothing knows the shape or axis they came from.
"""

from collections.abc import Iterator
from math import isqrt

import torch
from einops import rearrange

from mxref.elements import INF_BITS, decode_codes, round_to_codes
from mxref.formats import BlockFormat
from mxref.orders import DECODE_ORDERS, ENCODE_ORDERS, TensorScale, encode_quotient
from mxref.recipes import Hadamard, Recipe
from mxref.scales import amax_bits, scale_codes


def encode_blocks(
    x: torch.Tensor,
    format: BlockFormat,
    recipe: Recipe,
    tensor: TensorScale | None,
    random_words: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes `[n, b]` and scale codes `[n]`, both int32, of float32 blocks `[n, b]`; the recipe's transform is done already."""
    amax = amax_bits(x)
    poisoned = amax >= INF_BITS if recipe.inf == "nan" else amax > INF_BITS
    amax = amax.masked_fill(poisoned, 0)
    x = torch.where(poisoned[:, None], 0.0, x)

    candidates = list(_candidates(amax, format, recipe, tensor))
    best = None
    for scales in candidates:
        codes = _element_codes(x, scales, format, recipe, tensor, random_words)
        if len(candidates) > 1:
            decoded = decode_blocks(codes, scales, format, recipe, tensor and tensor.stored)
            error = _sequential_error(x, decoded, squared=recipe.search != "four_over_six_mae")
            if best is not None:
                wins = error < best[2]
                codes = torch.where(wins[:, None], codes, best[0])
                scales = torch.where(wins, scales, best[1])
                error = torch.where(wins, error, best[2])
            best = codes, scales, error

    if recipe.zero_block == "one":
        one = format.scale.positive.index(1.0)
        scales = torch.where(amax == 0, one, scales)
    return codes, scales.masked_fill(poisoned, format.scale.nan_code)


def decode_blocks(
    codes: torch.Tensor, scales: torch.Tensor, format: BlockFormat, recipe: Recipe, stored: torch.Tensor | None
) -> torch.Tensor:
    """Float32 values `[n, b]` of codes `[n, b]` and scale codes `[n]`: one float32 product an element."""
    factor = decode_codes(scales, format.scale)
    if stored is not None:
        factor = DECODE_ORDERS[recipe.decode_order](factor, stored)
    return decode_codes(codes, format.element) * factor[:, None]


def _candidates(
    amax: torch.Tensor, format: BlockFormat, recipe: Recipe, tensor: TensorScale | None
) -> Iterator[torch.Tensor]:
    """Scale codes `[n]` to try, in the order in which ties are decided."""
    if recipe.scale_rule == "amax":
        yield _mantissa_scale_codes(amax, format, recipe, tensor, stretch=1.0)
        if recipe.search.startswith("four_over_six"):
            yield _mantissa_scale_codes(amax, format, recipe, tensor, stretch=1.5)
        return
    scales = scale_codes(amax, format.element, format.scale, recipe.scale_rule)
    scales = scales.masked_fill(amax == INF_BITS, format.scale.max_code)
    yield scales
    if recipe.search == "mse":
        yield torch.where(amax == 0, scales, (scales + 1).clamp(max=format.scale.max_code))
        yield torch.where(amax == 0, scales, (scales - 1).clamp(min=0))


def _mantissa_scale_codes(
    amax: torch.Tensor, format: BlockFormat, recipe: Recipe, tensor: TensorScale | None, stretch: float
) -> torch.Tensor:
    """Codes of amax / element max, in the recipe's order, rounded to the scale format; `stretch` enlarges the scale."""
    order = ENCODE_ORDERS[recipe.encode_order]
    tensor = tensor or _no_tensor_scale(amax)
    amax = amax.view(torch.float32)
    if order.block_scale is None:
        return encode_quotient(amax, format.element.max / stretch * tensor.stored.double(), format.scale)
    raw = order.block_scale(amax, tensor, format.element.max) * stretch
    return round_to_codes(raw.clamp(max=format.scale.max), format.scale)


def _element_codes(
    x: torch.Tensor,
    scales: torch.Tensor,
    format: BlockFormat,
    recipe: Recipe,
    tensor: TensorScale | None,
    random_words: torch.Tensor | None,
) -> torch.Tensor:
    scale = decode_codes(scales, format.scale)
    if format.scale.is_power_of_two:
        # Exact, but for products below 2^-126, which are far below every midpoint of the element.
        multiplier = torch.ones_like(scale) / scale
    else:
        order = ENCODE_ORDERS[recipe.encode_order]
        tensor = tensor or _no_tensor_scale(scale)
        if order.multiplier is None:
            return encode_quotient(x, (scale.double() * tensor.stored.double())[:, None], format.element)
        multiplier = order.multiplier(scale, tensor)
    quotient = x * multiplier[:, None]
    codes = round_to_codes(quotient, format.element, recipe.rounding, recipe.overflow, random_words)
    if recipe.negative_zero == "drop_quotient":
        codes.masked_fill_(quotient == 0, 0)
    elif recipe.negative_zero == "drop" and format.element.kind == "float":
        codes.masked_fill_(codes & ~format.element.sign_mask == 0, 0)
    return codes


def _no_tensor_scale(like: torch.Tensor) -> TensorScale:
    one = torch.ones((), dtype=torch.float32, device=like.device)
    return TensorScale(one, one)


def _sequential_error(x: torch.Tensor, decoded: torch.Tensor, squared: bool) -> torch.Tensor:
    """Error of each block: a float32 sum over its elements in ascending order."""
    difference = x - decoded
    terms = difference * difference if squared else difference.abs()
    error = torch.zeros_like(terms[:, 0])
    for i in range(terms.shape[1]):
        error = error + terms[:, i]
    return error


def rotate(x: torch.Tensor, transform: Hadamard, inverse: bool = False) -> torch.Tensor:
    """Apply a Hadamard rotation, or its inverse, to float32 rows whose length is a multiple of its size."""
    signs = torch.tensor(transform.signs, dtype=torch.float32, device=x.device)
    groups = rearrange(x, "... (n size) -> ... n size", size=transform.size)
    groups = groups if inverse else groups * signs
    distance = 1
    while distance < transform.size:
        pairs = rearrange(groups, "... (m two d) -> ... m two d", two=2, d=distance)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        groups = torch.stack([a + b, a - b], dim=-2).reshape(groups.shape)
        distance *= 2
    groups = groups * (1.0 / isqrt(transform.size))
    groups = groups * signs if inverse else groups
    return groups.reshape(x.shape)


def rotate_axis(x: torch.Tensor, recipe: Recipe, axis: int, inverse: bool = False) -> torch.Tensor:
    """The recipe's transform along `axis`, in float32; `x` itself where the recipe has none."""
    if recipe.transform is None:
        return x
    return rotate(x.movedim(axis, -1).float(), recipe.transform, inverse).movedim(-1, axis)


def canonical(x: torch.Tensor) -> torch.Tensor:
    """`x` with every NaN replaced by the canonical one (0x7FC00000, 0x7FC0, 0x7E00)."""
    return torch.where(x.isnan(), torch.nan, x)
