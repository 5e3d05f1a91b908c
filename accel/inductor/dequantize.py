"""`dequantize` with compiled blocks."""

import torch

from accel.inductor import _blocks
from accel.inductor._launch import DEVICES, decode_refusal, missing, restored, run, scale_of_blocks
from mxref.blocks import BlockTensor
from mxref.elements import check_dtype
from mxref.grid import Grid
from mxref.registry import Kernel


def dequantize(q: BlockTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """As `mxref.dequantize`."""
    check_dtype("dtype", dtype)
    grid = Grid(tuple(q.shape), q.axis, q.format.block_size, q.recipe.block_rows)
    parts = grid.to_blocks(q.codes), grid.scales_to_blocks(q.scales), scale_of_blocks(q.tensor_scale, grid)
    values = run(_blocks.decode_blocks, *parts, format=q.format, recipe=q.recipe, dtype=dtype)
    return restored(grid, *values)


def accepts(q, dtype=torch.float32) -> str | None:
    """None, or why not."""
    return decode_refusal(q.recipe) if isinstance(q, BlockTensor) else f"q is a {type(q).__name__}"


KERNEL = Kernel("dequantize", "inductor", dequantize, "bitexact", DEVICES, (torch.uint8,), None, missing, accepts)
