"""`dequantize` with compiled blocks; four-bit codes are looked up, two at a time, which no compiler makes as fast."""

import functools

import torch

from accel.inductor import _blocks
from accel.inductor._launch import DEVICES, decode_refusal, missing, restored, run, scale_of_blocks
from mxref.blocks import BlockTensor
from mxref.elements import canonical, check_dtype, decode_codes
from mxref.formats import ElementFormat
from mxref.grid import Grid
from mxref.orders import DECODE_ORDERS
from mxref.registry import Kernel

CHUNK = 1 << 16  # elements that stay in cache


def dequantize(q: BlockTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """As `mxref.dequantize`."""
    check_dtype("dtype", dtype)
    grid, size = Grid(tuple(q.shape), q.axis, q.format.block_size, q.recipe.block_rows), q.format.block_size
    stored = scale_of_blocks(q.tensor_scale, grid)
    whole_blocks = q.axis == -1 and q.recipe.block_rows == 1 and q.length % size == 0
    if q.format.element.bits == 4 and whole_blocks and size % 2 == 0:
        return _looked_up(q, stored, dtype)
    parts = grid.to_blocks(q.codes), grid.scales_to_blocks(q.scales), stored
    values = run(_blocks.decode_blocks, *parts, format=q.format, recipe=q.recipe, dtype=dtype)
    return restored(grid, *values)


def _looked_up(q: BlockTensor, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values of `dtype` of whole blocks along the last axis, under tensor scales one a block `[n]` or `[]`."""
    size, table = q.format.block_size, _pairs(q.format.element)
    factor = DECODE_ORDERS[q.recipe.decode_order](decode_codes(q.scales.reshape(-1), q.format.scale), stored)
    values, step = torch.empty(len(factor), size), max(1, CHUNK // size)
    pairs, places = values.view(torch.int64), torch.empty(step * size // 2, dtype=torch.int32)
    packed = q.packed.reshape(len(factor), size // 2)
    for part, given, factors in zip(pairs.split(step), packed.split(step), factor.split(step)):
        torch.index_select(table, 0, places[: given.numel()].copy_(given.flatten()), out=part.view(-1))
        part.view(torch.float32).mul_(factors[:, None])
    nan_blocks = ~(factor.abs() < torch.inf)
    if nan_blocks.any():
        values[nan_blocks] = canonical(values[nan_blocks])
    values = values.to(dtype)
    if dtype != torch.float32 and nan_blocks.any():
        values[nan_blocks] = canonical(values[nan_blocks])
    return values.view(q.shape)


@functools.cache
def _pairs(element: ElementFormat) -> torch.Tensor:
    """Both float32 values of every byte of two codes, the low code first, as 256 int64."""
    byte = torch.arange(1 << 8)
    return decode_codes(torch.stack([byte & 15, byte >> 4], -1), element).view(torch.int64).flatten()


def accepts(q, dtype=torch.float32) -> str | None:
    """None, or why not."""
    return decode_refusal(q.recipe) if isinstance(q, BlockTensor) else f"q is a {type(q).__name__}"


KERNEL = Kernel("dequantize", "inductor", dequantize, "bitexact", DEVICES, (torch.uint8,), None, missing, accepts)
