"""`quantize` in one pass, after one for a computed tensor scale."""

import torch

from accel._recipes import unknown_to_encode
from accel.triton._launch import DEVICES, DTYPES, format_refusal, missing, packing_refusal, quantize_blocks
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
    return quantize_blocks(check_quantize(x, format, recipe, tensor_scale, axis, seed))


def accepts(x, format, *, recipe=None, **others) -> str | None:
    """None, or why not."""
    format = block_format(format)
    recipe = resolve_recipe(recipe, format)
    return unknown_to_encode(recipe) or format_refusal(format, recipe) or packing_refusal(format)


KERNEL = Kernel("quantize", "triton", quantize, "bitexact", DEVICES, DTYPES, None, missing, accepts)
