"""`quantize` with compiled blocks."""

import sys

import torch

from accel.inductor import _blocks
from accel.inductor._launch import DEVICES, DTYPES, encoding, missing, recipe_refusal, run
from mxref.blocks import BlockTensor, check_quantize
from mxref.formats import BlockFormat, block_format
from mxref.packing import pack_codes
from mxref.recipes import Recipe, resolve_recipe
from mxref.registry import Kernel

CHUNK = 1 << 16  # pairs of codes


def quantize(
    x: torch.Tensor,
    format: str | BlockFormat,
    *,
    recipe: str | Recipe | None = None,
    tensor_scale: str | torch.Tensor | None = None,
    axis: int = -1,
    seed: int | None = None,
) -> BlockTensor:
    """As `mxref.quantize`."""
    call = check_quantize(x, format, recipe, tensor_scale, axis, seed)
    grid, given = call.grid, encoding(call)
    codes, scales = run(_blocks.encode_blocks, given.blocks, *given.scales, format=call.format, recipe=call.recipe)
    packed = _packed(grid.from_blocks(codes).movedim(grid.axis, -1), call.format.element.bits)
    scales, length = grid.scales_from_blocks(scales), grid.shape[grid.axis]
    return BlockTensor.trusted(packed, length, scales, given.stored, call.format, call.recipe, grid.axis)


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """As `pack_codes`; four-bit codes two at a time, as words of 16 bits, in pieces that stay in cache."""
    fits = bits == 4 and codes.numel() and codes.shape[-1] % 2 == 0 and codes.is_contiguous()
    if not fits or sys.byteorder != "little":
        return pack_codes(codes, bits)
    pairs = codes.view(torch.int16).flatten()
    packed = torch.empty(pairs.shape, dtype=torch.uint8)
    for part, words in zip(packed.split(CHUNK), pairs.split(CHUNK)):
        part.copy_(words | words >> 4)  # the low byte of each
    return packed.view(*codes.shape[:-1], codes.shape[-1] // 2)


def accepts(x, format, *, recipe=None, **others) -> str | None:
    """None, or why not."""
    format = block_format(format)
    return recipe_refusal(resolve_recipe(recipe, format))


KERNEL = Kernel("quantize", "inductor", quantize, "bitexact", DEVICES, DTYPES, None, missing, accepts)
