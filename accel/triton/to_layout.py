"""`to_layout` for the scale tiles of tensor cores."""

import torch
import triton
import triton.language as tl

from accel.triton._launch import DEVICES, missing
from mxref.packing import check_layout
from mxref.registry import Kernel

TILES = 4  # a program's


@triton.jit
def tile_128x4_kernel(scales_ptr, out_ptr, tiles, row_tiles, column_tiles, rows, columns, TILES: tl.constexpr):
    """Tiles of 128 x 4 scales: byte (r % 32) * 16 + r % 128 // 32 * 4 + c of a tile is scale (r, c), 0 beyond the edges."""
    tile = (tl.program_id(0) * TILES + tl.arange(0, TILES))[:, None]
    byte = tl.arange(0, 512)[None, :]
    row = tile // column_tiles % row_tiles * 128 + byte % 16 // 4 * 32 + byte // 16
    column = tile % column_tiles * 4 + byte % 4
    matrix = (tile // column_tiles // row_tiles).to(tl.int64)
    inside = tile < tiles
    scale = tl.load(
        scales_ptr + (matrix * rows + row) * columns + column, mask=inside & (row < rows) & (column < columns), other=0
    )
    tl.store(out_ptr + tile.to(tl.int64) * 512 + byte, scale, mask=inside)


def to_layout(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """As `mxref.to_layout`."""
    check_layout("tensor", tensor, layout)
    *leading, rows, columns = tensor.shape
    row_tiles, column_tiles = -(-rows // 128), -(-columns // 4)
    out = torch.empty((*leading, row_tiles * column_tiles * 512), dtype=torch.uint8, device=tensor.device)
    tiles = out.numel() // 512
    if tiles:
        tile_128x4_kernel[(triton.cdiv(tiles, TILES),)](
            tensor.contiguous(), out, tiles, row_tiles, column_tiles, rows, columns, TILES=TILES
        )
    return out


def accepts(tensor, layout) -> str | None:
    """None, or why not."""
    return None if layout == "tile_128x4" else f"layout {layout!r} is one copy, which torch makes"


KERNEL = Kernel("to_layout", "triton", to_layout, "bitexact", DEVICES, (torch.uint8,), None, missing, accepts)
