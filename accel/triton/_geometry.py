"""How a tensor of any shape and strides becomes the three axes of the block kernels."""

import os
from math import prod

import torch
import triton

from mxref.grid import Grid

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
TILE_ELEMENTS = 4096 if INTERPRETED else 1024
MANY_PROGRAMS = 2 if INTERPRETED else 4096
LARGE = (TILE_ELEMENTS, 1)  # elements and warps of a program, measured on an H200
SMALL = (TILE_ELEMENTS, 16 if INTERPRETED else 4)  # the same where `LARGE` would make few programs
SMALL_ACTIVATED = (TILE_ELEMENTS // 4, 8) if INTERPRETED else (512, 4)  # after an activation: four elements a thread
# the same for codes of six bits, to pack and to unpack: a thread that unpacks has the sixteen codes that fill words
SMALL_SIX_BITS = [(TILE_ELEMENTS, 8)] * 2 if INTERPRETED else [(TILE_ELEMENTS // 2, 4), (TILE_ELEMENTS // 2, 1)]
# by the bits of a thread; sixes fill words only by sixteens
WORDS = {bits: torch.int16 if bits == 16 else torch.uint8 for bits in (4, 6, 8, 12, 16, 24, 48)}


class Geometry:
    """A shape as `[matrices, K, rows]`, or `[matrices, rows, K]` where blocks span rows along the last axis but one.

    A program takes the elements, with the warps, of `large`, or of `small` where there would be few programs.
    """

    def __init__(self, grid: Grid, large: tuple[int, int] = LARGE, small: tuple[int, int] = SMALL):
        self.shape, self.axis = grid.shape, grid.axis
        self.rows_first = grid.block_rows > 1 and grid.axis == -1
        axis = len(self.shape) + self.axis
        before, after = prod(self.shape[:axis]), prod(self.shape[axis + 1 :])
        self.k, self.rows = self.shape[axis], self.shape[-2] if self.rows_first else after
        self.k_blocks, self.row_blocks = -(-self.k // grid.block_size), -(-self.rows // grid.block_rows)
        self.matrices = prod(self.shape[:-2]) if self.rows_first else before
        self.blocks = self.matrices * self.k_blocks * self.row_blocks
        self.whole = self.k % grid.block_size == 0 and self.rows % grid.block_rows == 0
        self.one_row = grid.block_rows == 1 and self.rows == 1
        self.few = self.blocks * grid.block_elements < MANY_PROGRAMS * TILE_ELEMENTS
        tile_elements, warps = small if self.few else large
        self.tile = max(1, tile_elements // grid.block_elements)
        self.per_thread = self.tile * grid.block_elements // (32 * warps)
        self.constants = {
            "BLOCKS": self.tile,
            "ROWS": grid.block_rows,
            "SIZE": grid.block_size,
            "WHOLE": self.whole,
            "ROWS_FIRST": self.rows_first,
        }
        self.options = {} if INTERPRETED else {"num_warps": warps, "enable_fp_fusion": False}

    @property
    def sizes(self) -> tuple[int | None, int, int, int, int]:
        """Blocks (None where every program is full), blocks along K and of rows, elements along K, rows."""
        return None if self.blocks % self.tile == 0 else self.blocks, self.k_blocks, self.row_blocks, self.k, self.rows

    @property
    def programs(self) -> tuple[int]:
        return (triton.cdiv(self.blocks, self.tile),)

    @property
    def row_programs(self) -> tuple[int, int]:
        """Programs of a run `row`."""
        return self.k_blocks // self.tile, self.matrices

    @property
    def line_shape(self) -> list[int]:
        """The shape with the blocked axis of size 1."""
        shape = list(self.shape)
        shape[self.axis] = 1
        return shape

    def lines(self, scale: torch.Tensor) -> torch.Tensor:
        """A tensor scale as the kernels read it: one number, or one for each line along the blocked axis."""
        return scale.reshape(1) if scale.numel() == 1 else scale.expand(self.line_shape).contiguous()

    def strided(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """`x`, and its strides (matrix, K, row); copied once where its axes do not collapse to three."""
        first, last = (x.ndim - 2, x.ndim - 1) if self.rows_first else (x.ndim + self.axis, x.ndim + self.axis + 1)
        matrix, row = _collapsed(x, 0, first), x.stride(-2) if self.rows_first else _collapsed(x, last, x.ndim)
        if matrix is None or row is None:
            return self.strided(x.contiguous())
        return x, (matrix, x.stride(self.axis), row)

    def run(self, x: torch.Tensor) -> str:
        """What of `x`, or of its packed codes, is one run of memory: `all` blocks, those of each `line`, or `none`."""
        if not self.whole or not self.one_row:
            return "none"
        if x.is_contiguous():
            return "all"
        return "line" if x.stride(self.axis) == 1 and self.k_blocks % self.tile == 0 else "none"

    def words(self, packed: torch.Tensor, bits: int, per_thread: int = 16) -> torch.Tensor:
        """Packed codes as int32, or as the integers that `per_thread` of them fill, where they are one run of memory and
        every block fills whole ones; else as they are."""
        dtype = WORDS.get(per_thread * bits, torch.int32)
        fills = bits < 8 and self.constants["SIZE"] * bits % (96 if bits == 6 else 8 * dtype.itemsize) == 0
        aligned = packed.data_ptr() % 16 == 0 and packed.storage_offset() % 4 == 0
        return packed.reshape(-1).view(dtype) if fills and aligned and self.run(packed) == "all" else packed

    def pairs(self, x: torch.Tensor) -> torch.Tensor | None:
        """bfloat16 as int32, two a word, along the blocked axis; None where they cannot be seen so."""
        if x.dtype != torch.bfloat16 or self.constants["SIZE"] == 1 or self.run(x) == "none" or self.axis != -1:
            return None
        even = x.storage_offset() % 2 == 0 and x.data_ptr() % 16 == 0 and all(s % 2 == 0 for s in x.stride()[:-1])
        return x.view(torch.int32) if even else None


def _collapsed(x: torch.Tensor, first: int, last: int) -> int | None:
    """The stride of axes `first` to `last - 1` taken as one; None if they do not collapse."""
    axes = [(x.shape[i], x.stride(i)) for i in range(first, last) if x.shape[i] != 1]
    for (_, slow), (size, fast) in zip(axes, axes[1:], strict=False):
        if slow != size * fast:
            return None
    return axes[-1][1] if axes else 0
