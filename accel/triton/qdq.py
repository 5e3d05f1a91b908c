"""`qdq` in one pass, after one for a computed tensor scale: codes never leave the registers."""

import torch

from accel.triton._launch import DEVICES, DTYPES, encode_blocks, missing
from accel.triton.quantize import accepts
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
    return encode_blocks(check_quantize(x, format, recipe, tensor_scale, axis, seed), codes_out=False)[0]


KERNEL = Kernel("qdq", "triton", qdq, "bitexact", DEVICES, DTYPES, None, missing, accepts)
