"""`quantize` in one pass, after one for a computed tensor scale."""

import torch

from accel.triton._launch import DEVICES, DTYPES, encode_blocks, missing, recipe_refusal
from mxref.blocks import BlockTensor, check_quantize
from mxref.formats import BlockFormat, block_format
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
    codes, scales, stored = encode_blocks(call, codes_out=True)
    return BlockTensor.trusted(codes, scales, stored, call.format, call.recipe, call.grid.axis)


def accepts(x, format, *, recipe=None, **others) -> str | None:
    """None, or why not."""
    format = block_format(format)
    return recipe_refusal(format, resolve_recipe(recipe, format))


KERNEL = Kernel("quantize", "triton", quantize, "bitexact", DEVICES, DTYPES, None, missing, accepts)
