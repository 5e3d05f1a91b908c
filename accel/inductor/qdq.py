"""`qdq` in one pass, after one for a computed tensor scale."""

import torch

from accel.inductor import _blocks
from accel.inductor._launch import DEVICES, DTYPES, encoding, missing, restored, run
from accel.inductor.quantize import accepts
from mxref.blocks import check_quantize
from mxref.formats import BlockFormat
from mxref.recipes import Recipe
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
    call = check_quantize(x, format, recipe, tensor_scale, axis, seed, gradient)
    given = encoding(call)
    values = run(_blocks.qdq_blocks, given.blocks, *given.scales, format=call.format, recipe=call.recipe)
    return restored(call.grid, *values)


KERNEL = Kernel("qdq", "inductor", qdq, "bitexact", DEVICES, DTYPES, None, missing, accepts)
