"""The grid of blocks over a tensor: from any shape and axis to one block a row, and back."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from einops import rearrange

_CHUNK_ELEMENTS = 1 << 16  # about what one core's cache holds with its temporaries


@dataclass(frozen=True)
class Grid:
    """How a tensor of `shape`, blocked along the last axis once `axis` has moved there, falls into blocks.

    A block is `block_rows` x `block_size` elements of one matrix, row-major; missing elements at the edges
    are zeros that change nothing and are dropped again.
    """

    shape: tuple[int, ...]
    axis: int
    block_size: int
    block_rows: int

    @property
    def matrices(self) -> tuple[int, int, int]:
        """(matrices, rows, columns): rows only count apart where blocks span several of them."""
        *leading, columns = _moved(self.shape, self.axis)
        if self.block_rows == 1:
            return 1, prod(leading), columns
        return prod(leading[:-1]), leading[-1], columns

    @property
    def counts(self) -> tuple[int, int, int]:
        """(matrices, blocks down, blocks across)."""
        matrices, rows, columns = self.matrices
        return matrices, -(-rows // self.block_rows), -(-columns // self.block_size)

    @property
    def row_axis(self) -> int:
        """The other of the last two axes: the one along which blocks span rows, if they do."""
        return -2 if self.axis == -1 else -1

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of `BlockTensor.scales`: the blocked axis divided by the block size, rounded up; rows likewise.

        >>> Grid((2, 48), -1, 32, 1).scale_shape
        (2, 2)
        """
        shape = list(self.shape)
        shape[self.axis] = self.counts[2]
        if self.block_rows > 1:
            shape[self.row_axis] = self.counts[1]
        return tuple(shape)

    @property
    def block_count(self) -> int:
        return prod(self.counts)

    @property
    def block_elements(self) -> int:
        return self.block_rows * self.block_size

    def chunks(self) -> Iterator[slice]:
        """Runs of blocks small enough to stay in cache."""
        step = max(1, _CHUNK_ELEMENTS // self.block_elements)
        for start in range(0, self.block_count, step):
            yield slice(start, min(start + step, self.block_count))

    def to_blocks(self, x: torch.Tensor) -> torch.Tensor:
        """`x` of the logical shape as `[blocks, elements]`, a view where possible."""
        matrices, rows, columns = self.matrices
        x = x.movedim(self.axis, -1).reshape(matrices, rows, columns)
        if columns % self.block_size or rows % self.block_rows:
            x = F.pad(x, (0, -columns % self.block_size, 0, -rows % self.block_rows))
        return rearrange(x, "m (i r) (j k) -> (m i j) (r k)", r=self.block_rows, k=self.block_size)

    def from_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """The inverse of `to_blocks`, contiguous."""
        matrices, rows, columns = self.matrices
        m, i, j = self.counts
        x = rearrange(blocks, "(m i j) (r k) -> m (i r) (j k)", m=m, i=i, j=j, r=self.block_rows, k=self.block_size)
        return x[:, :rows, :columns].reshape(_moved(self.shape, self.axis)).movedim(-1, self.axis).contiguous()

    def scales_from_blocks(self, scales: torch.Tensor) -> torch.Tensor:
        """One value a block `[blocks]` to `scale_shape`."""
        return scales.reshape(_moved(self.scale_shape, self.axis)).movedim(-1, self.axis).contiguous()

    def scales_to_blocks(self, scales: torch.Tensor) -> torch.Tensor:
        """The inverse of `scales_from_blocks`, for all that broadcasts to `scale_shape`, and for one value a row."""
        if self._has_rows(scales):
            scales = scales.unfold(self.row_axis, 1, self.block_rows)[..., 0]
        return scales.expand(self.scale_shape).movedim(self.axis, -1).reshape(-1)

    def first_row_of_block(self, scales: torch.Tensor) -> torch.Tensor:
        """One value a row, replaced by that of the first row in the same block; other shapes unchanged."""
        if not self._has_rows(scales):
            return scales
        rows = torch.arange(scales.shape[self.row_axis], device=scales.device)
        return scales.index_select(self.row_axis, rows // self.block_rows * self.block_rows)

    def _has_rows(self, scales: torch.Tensor) -> bool:
        """Whether blocks span several rows, each of which has a value."""
        return self.block_rows > 1 and scales.ndim > 1 and 1 < scales.shape[self.row_axis] == self.shape[self.row_axis]


def _moved(shape: tuple[int, ...], axis: int) -> list[int]:
    """`shape` with `axis` moved to the end."""
    sizes = list(shape)
    sizes.append(sizes.pop(axis))
    return sizes
