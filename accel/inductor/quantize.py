"""`quantize` with compiled blocks."""

import torch

from accel.inductor import _blocks
from accel.inductor._launch import DEVICES, DTYPES, encoding, missing, recipe_refusal, run
from mxref.blocks import BlockTensor, check_quantize
from mxref.formats import BlockFormat, block_format
from mxref.packing import pack_codes
from mxref.recipes import Recipe, resolve_recipe
from mxref.registry import Kernel


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
    packed = pack_codes(grid.from_blocks(codes).movedim(grid.axis, -1), call.format.element.bits)
    scales, length = grid.scales_from_blocks(scales), grid.shape[grid.axis]
    return BlockTensor.trusted(packed, length, scales, given.stored, call.format, call.recipe, grid.axis)


def accepts(x, format, *, recipe=None, **others) -> str | None:
    """None, or why not."""
    format = block_format(format)
    return recipe_refusal(resolve_recipe(recipe, format))


KERNEL = Kernel("quantize", "inductor", quantize, "bitexact", DEVICES, DTYPES, None, missing, accepts)
