"""`qdq` in one pass, after one for a computed tensor scale: codes never leave the registers."""

import torch

from accel._recipes import unknown_to_encode
from accel.triton._launch import DEVICES, DTYPES, format_refusal, missing, qdq_blocks
from mxref.blocks import check_quantize
from mxref.formats import BlockFormat, block_format
from mxref.recipes import Recipe, resolve_recipe
from mxref.registry import Kernel


def qdq(
    x: torch.Tensor,
    format: str | BlockFormat,
    *,
    recipe: str | Recipe | None = None,
    tensor_scale: str | torch.Tensor | None = None,
    axis: int = -1,
    seed: int | None = None,
    gradient: str = "straight_through",
) -> torch.Tensor:
    """As `mxref.qdq`; gradients are the reference's business, which calls this without autograd."""
    return qdq_blocks(check_quantize(x, format, recipe, tensor_scale, axis, seed, gradient))


def accepts(x, format, *, recipe=None, **others) -> str | None:
    """None, or why not."""
    format = block_format(format)
    recipe = resolve_recipe(recipe, format)
    if recipe.zero_block == "one" and recipe.tensor_scale_direction == "divide":
        return f"recipe {recipe.name!r} divides the scale of a block of zeros, which may give 0 times Inf"
    return unknown_to_encode(recipe) or format_refusal(format, recipe)


KERNEL = Kernel("qdq", "triton", qdq, "bitexact", DEVICES, DTYPES, None, missing, accepts)
