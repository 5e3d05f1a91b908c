"""Device functions: where the elements of a program's blocks lie in memory.

A tensor is seen as `[matrices, K, rows]`, or as `[matrices, rows, K]` where `ROWS_FIRST`; a block is `SIZE` elements
along K of `ROWS` rows. Blocks are numbered row-major in that view, so that scales, and all of a contiguous tensor if blocks
lie in one row, are row-major in the block's number whatever the axis. A program takes `BLOCKS` blocks, one block a row of
its tile of `BLOCKS` x `ROWS * SIZE` elements.
"""

import triton
import triton.language as tl


@triton.jit
def exists(block, blocks):
    """Whether there are blocks of these numbers. `blocks`: how many there are; None: as many as programs have room for."""
    if blocks is None:
        return tl.full(block.shape, True, tl.int1)
    else:
        return block < blocks


@triton.jit
def find(block, k_blocks, row_blocks, ROWS_FIRST: tl.constexpr):
    """(matrix, block along K, block of rows) of block numbers."""
    if ROWS_FIRST:
        rest = block // k_blocks
        return rest // row_blocks, block % k_blocks, rest % row_blocks
    else:
        rest = block // row_blocks
        return rest // k_blocks, rest % k_blocks, block % row_blocks


@triton.jit
def first_block(k_blocks, BLOCKS: tl.constexpr, RUN: tl.constexpr):
    """The number of a program's first block. Programs have one number; or two, place along K and line: `row` and `rows`."""
    first = tl.program_id(0) * BLOCKS
    return first + tl.program_id(1) * k_blocks if RUN == "row" or RUN == "rows" else first


@triton.jit
def run_start(k_blocks, stride_matrix, BLOCKS: tl.constexpr, SIZE: tl.constexpr, RUN: tl.constexpr):
    """Where a program's run of memory starts, int64, or int32 where that is known to do. `SIZE`: what is stored of a
    block."""
    first = tl.program_id(0) * BLOCKS
    if RUN == "row":
        return tl.program_id(1) * stride_matrix + first * SIZE
    elif RUN == "rows":
        return first_block(k_blocks, BLOCKS, RUN) * SIZE
    elif RUN == "line":
        line = first // k_blocks
        return line.to(tl.int64) * stride_matrix + (first - line * k_blocks) * SIZE
    else:
        return first.to(tl.int64) * SIZE


@triton.jit
def at(pointer, start, place):
    """pointer + start + place."""
    return pointer + (start + place) if start.dtype == tl.int32 else pointer + start + place


@triton.jit
def places(block, blocks, k_blocks, row_blocks, k_size, rows, stride_matrix, stride_k, stride_row, FIRST: tl.constexpr,
           STEP: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr,
           RUN: tl.constexpr, ROWS_FIRST: tl.constexpr):  # fmt: skip
    """Offsets `[BLOCKS, ROWS * SIZE]` of what is stored of each block, and whether it is there: along K, `SIZE` of every
    `STEP`-th, from `FIRST`, of `k_size` in all. `WHOLE`: every block is there. `RUN`: what is one run of memory: `all`
    blocks, those of each `line` along K, of which a program's are part of one, or `none`. Of programs with two numbers:
    `row` for `line`, `rows` for `all`."""
    unit = tl.arange(0, ROWS * SIZE)
    present = exists(block, blocks)[:, None]
    if RUN != "none":
        start = run_start(k_blocks, stride_matrix, BLOCKS, SIZE * STEP, RUN)
        return start + ((tl.arange(0, BLOCKS)[:, None] * SIZE + unit[None, :]) * STEP + FIRST), present
    else:
        matrix, k_block, row_block = find(block, k_blocks, row_blocks, ROWS_FIRST)
        k, row = unit % SIZE * STEP + FIRST, unit // SIZE
        k_start, row_start = k_block * (SIZE * STEP), row_block * ROWS
        if not WHOLE:
            present = present & (k_start[:, None] + k[None, :] < k_size) & (row_start[:, None] + row[None, :] < rows)
        base = matrix.to(tl.int64) * stride_matrix + k_start.to(tl.int64) * stride_k + row_start.to(tl.int64) * stride_row
        return base[:, None] + (k.to(tl.int64) * stride_k + row.to(tl.int64) * stride_row)[None, :], present
