"""A matmul for Hopper in Gluon: one warp fetches tiles, warpgroups multiply them and add block by block, in order.

Operands are bfloat16 or float8 with their block scales folded in. A block's dot is exact, so the tensor core may add its
products as it likes; a dot of its own for every block and one float32 addition outside keep the order across blocks. A
warpgroup owns 64 rows of the tile of C and takes its columns in chunks: while the tensor core works on one chunk of one
block, what it found for the chunk before is added. Two product tiles (`DEPTH` 2) overlap both within a warpgroup, one
(`DEPTH` 1) across them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from accel.triton._products import finished, tile_of

BOX_BYTES = 128  # along K, of a box in shared memory: the widest swizzle


def box_layout(bits: int) -> gl.NVMMASharedLayout:
    """How boxes of elements of so many bits lie in shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=BOX_BYTES, element_bitwidth=bits, rank=2)


@gluon.jit
def fetch(a_desc, b_desc, tiles, row, column, WARPGROUPS: gl.constexpr,
          CHUNKS: gl.constexpr, CHUNK: gl.constexpr, BOXES: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The producer: tiles of A and B, `STAGES` ahead of those who use them."""
    a_boxes, b_boxes, full, empty, k_tiles = tiles
    BOX: gl.constexpr = a_desc.block_type.shape[1]
    bytes: gl.constexpr = BOXES * (WARPGROUPS * a_desc.block_type.nbytes + CHUNKS * b_desc.block_type.nbytes)
    for i in range(k_tiles):
        stage = i % STAGES
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), bytes)
        for box in gl.static_range(BOXES):
            k = (i * BOXES + box) * BOX
            for j in gl.static_range(WARPGROUPS):
                a_box = a_boxes.index((stage * BOXES + box) * WARPGROUPS + j)
                tma.async_copy_global_to_shared(a_desc, [row + j * 64, k], full.index(stage), a_box)
            for j in gl.static_range(CHUNKS):
                b_box = b_boxes.index((stage * BOXES + box) * CHUNKS + j)
                tma.async_copy_global_to_shared(b_desc, [column + j * CHUNK, k], full.index(stage), b_box)


@gluon.jit
def start_dot(a_boxes, b_boxes, stage, product, never, WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr,
              UNIT: gl.constexpr, CHUNKS: gl.constexpr, SIZE: gl.constexpr, BOXES: gl.constexpr):  # fmt: skip
    """Start the dots of one block with one chunk of columns, unit `UNIT` of a stage, in the registers of `product`.

    They start from zero. That `never` is false is not known when this is compiled: so the registers of `product` must be the
    same, and what is in them must have been added before.
    """
    BOX: gl.constexpr = a_boxes.type.shape[2]
    block: gl.constexpr = UNIT // CHUNKS
    box = stage * BOXES + block * SIZE // BOX
    k: gl.constexpr = block * SIZE % BOX
    a = a_boxes.index(box * WARPGROUPS + WARPGROUP).slice(k, SIZE, dim=1)
    b = b_boxes.index(box * CHUNKS + UNIT % CHUNKS).slice(k, SIZE, dim=1).permute((1, 0))
    return warpgroup_mma(a, b, product, use_acc=never, is_async=True)


@gluon.jit
def add_products(
    tiles, out, never, WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr, CHUNKS: gl.constexpr, CHUNK: gl.constexpr,
    SIZE: gl.constexpr, BOXES: gl.constexpr, STAGES: gl.constexpr, DEPTH: gl.constexpr,
    A_SCALE: gl.constexpr, B_SCALE: gl.constexpr, BIAS: gl.constexpr, STORED: gl.constexpr,
):  # fmt: skip
    """A consumer: 64 rows of the tile of C."""
    a_boxes, b_boxes, full, empty, k_tiles = tiles
    BOX: gl.constexpr = a_boxes.type.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, BOX // 4])
    units: gl.constexpr = BOXES * (BOX // SIZE) * CHUNKS
    zero = gl.zeros([64, CHUNK], gl.float32, layout)
    acc, done = (zero,) * CHUNKS, zero
    if DEPTH == 2:
        mbarrier.wait(full.index(0), 0)
        product = start_dot(a_boxes, b_boxes, 0, zero, never, WARPGROUP, WARPGROUPS, 0, CHUNKS, SIZE, BOXES)
        for i in range(k_tiles):
            stage, next_stage = i % STAGES, (i + 1) % STAGES
            for unit in gl.static_range(units):
                if unit + 1 < units:
                    following = start_dot(
                        a_boxes, b_boxes, stage, done, never, WARPGROUP, WARPGROUPS, unit + 1, CHUNKS, SIZE, BOXES
                    )
                else:  # behind the last tile: a dot of old tiles that nobody reads
                    mbarrier.wait(full.index(next_stage), ((i + 1) // STAGES) & 1, pred=i + 1 < k_tiles)
                    following = start_dot(
                        a_boxes, b_boxes, next_stage, done, never, WARPGROUP, WARPGROUPS, 0, CHUNKS, SIZE, BOXES
                    )
                # ptxas does not follow a dot in flight around a loop, and would wait for each: so the first waits for both
                done = warpgroup_mma_wait(1 if unit else 0, deps=(product,))
                acc = added(acc, done, unit % CHUNKS)
                product = following
            mbarrier.arrive(empty.index(stage), count=1)
        warpgroup_mma_wait(0, deps=(product,))
    else:
        for i in range(k_tiles):
            stage = i % STAGES
            mbarrier.wait(full.index(stage), (i // STAGES) & 1)
            for unit in gl.static_range(units):
                product = start_dot(a_boxes, b_boxes, stage, done, never, WARPGROUP, WARPGROUPS, unit, CHUNKS, SIZE, BOXES)
                done = warpgroup_mma_wait(0, deps=(product,))
                acc = added(acc, done, unit % CHUNKS)
            mbarrier.arrive(empty.index(stage), count=1)
    for chunk in gl.static_range(CHUNKS):
        store(acc[chunk], out, WARPGROUP * 64, chunk * CHUNK, CHUNK, layout, A_SCALE, B_SCALE, BIAS, STORED)


@gluon.jit
def added(acc, product, CHUNK: gl.constexpr):
    """`acc` with `product` added to its chunk `CHUNK`, before another dot starts: that is what the wait is for."""
    total = warpgroup_mma_wait(1, deps=(acc[CHUNK] + product,))
    return acc[:CHUNK] + (total,) + acc[CHUNK + 1 :]


@gluon.jit
def store(
    acc, out, ROW: gl.constexpr, COLUMN: gl.constexpr, CHUNK: gl.constexpr, layout: gl.constexpr,
    A_SCALE: gl.constexpr, B_SCALE: gl.constexpr, BIAS: gl.constexpr, STORED: gl.constexpr,
):  # fmt: skip
    """Finish and store a chunk of C."""
    (
        c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, a_power_ptr, b_power_ptr, row, column, rows, columns, a_scale_stride,
        b_scale_stride, bias_stride,
    ) = out  # fmt: skip
    m = row + ROW + gl.arange(0, 64, gl.SliceLayout(1, layout))
    n = column + COLUMN + gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
    if a_power_ptr is not None:
        acc = acc * gl.load(a_power_ptr + m, mask=m < rows, other=1.0)[:, None]
        acc = acc * gl.load(b_power_ptr + n, mask=n < columns, other=1.0)[None, :]
    value = finished(
        acc, m, n, rows, columns, a_scale_ptr, b_scale_ptr, bias_ptr, a_scale_stride, b_scale_stride, bias_stride,
        A_SCALE, B_SCALE, BIAS, STORED,
    )  # fmt: skip
    place = c_ptr + (m.to(gl.int64) * columns)[:, None] + n[None, :]
    gl.store(place, value, mask=(m < rows)[:, None] & (n < columns)[None, :])


@gluon.jit
def warpgroup_product_kernel(
    a_desc, b_desc, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, a_power_ptr, b_power_ptr, rows, columns, k_tiles,
    a_scale_stride, b_scale_stride, bias_stride,
    WARPGROUPS: gl.constexpr, CHUNKS: gl.constexpr, CHUNK: gl.constexpr, SIZE: gl.constexpr, BOXES: gl.constexpr,
    STAGES: gl.constexpr, DEPTH: gl.constexpr, GROUP: gl.constexpr, REGISTERS: gl.constexpr,
    A_SCALE: gl.constexpr, B_SCALE: gl.constexpr, BIAS: gl.constexpr, STORED: gl.constexpr,
):  # fmt: skip
    """A tile `[64 * WARPGROUPS, CHUNK * CHUNKS]` of C; of rows that were flagged when they were folded it means nothing.

    `a_power_ptr`, `b_power_ptr`: what the sums of each row and column are multiplied with, or None."""
    BOX: gl.constexpr = a_desc.block_type.shape[1]
    ROWS: gl.constexpr = 64 * WARPGROUPS
    COLUMNS: gl.constexpr = CHUNK * CHUNKS
    row_tile, column_tile = tile_of(gl.program_id(0), gl.cdiv(rows, ROWS), gl.cdiv(columns, COLUMNS), GROUP)
    row, column = row_tile * ROWS, column_tile * COLUMNS
    a_boxes = gl.allocate_shared_memory(a_desc.dtype, [STAGES * BOXES * WARPGROUPS, 64, BOX], a_desc.layout)
    b_boxes = gl.allocate_shared_memory(b_desc.dtype, [STAGES * BOXES * CHUNKS, CHUNK, BOX], b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=WARPGROUPS)
    tiles, never = (a_boxes, b_boxes, full, empty, k_tiles), rows < 0
    out = (
        c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, a_power_ptr, b_power_ptr, row, column, rows, columns, a_scale_stride,
        b_scale_stride, bias_stride,
    )  # fmt: skip
    # constants are written out, since a variable would not keep them
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (add_products, (tiles, out, never, 0, WARPGROUPS, CHUNKS, CHUNK, SIZE, BOXES, STAGES, DEPTH,
                                A_SCALE, B_SCALE, BIAS, STORED)),
                (add_products, (tiles, out, never, 1, WARPGROUPS, CHUNKS, CHUNK, SIZE, BOXES, STAGES, DEPTH,
                                A_SCALE, B_SCALE, BIAS, STORED)),
                (fetch, (a_desc, b_desc, tiles, row, column, WARPGROUPS, CHUNKS, CHUNK, BOXES, STAGES)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
    elif WARPGROUPS == 3:
        gl.warp_specialize(
            [
                (add_products, (tiles, out, never, 0, WARPGROUPS, CHUNKS, CHUNK, SIZE, BOXES, STAGES, DEPTH,
                                A_SCALE, B_SCALE, BIAS, STORED)),
                (add_products, (tiles, out, never, 1, WARPGROUPS, CHUNKS, CHUNK, SIZE, BOXES, STAGES, DEPTH,
                                A_SCALE, B_SCALE, BIAS, STORED)),
                (add_products, (tiles, out, never, 2, WARPGROUPS, CHUNKS, CHUNK, SIZE, BOXES, STAGES, DEPTH,
                                A_SCALE, B_SCALE, BIAS, STORED)),
                (fetch, (a_desc, b_desc, tiles, row, column, WARPGROUPS, CHUNKS, CHUNK, BOXES, STAGES)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (add_products, (tiles, out, never, 0, WARPGROUPS, CHUNKS, CHUNK, SIZE, BOXES, STAGES, DEPTH,
                                A_SCALE, B_SCALE, BIAS, STORED)),
                (add_products, (tiles, out, never, 1, WARPGROUPS, CHUNKS, CHUNK, SIZE, BOXES, STAGES, DEPTH,
                                A_SCALE, B_SCALE, BIAS, STORED)),
                (add_products, (tiles, out, never, 2, WARPGROUPS, CHUNKS, CHUNK, SIZE, BOXES, STAGES, DEPTH,
                                A_SCALE, B_SCALE, BIAS, STORED)),
                (add_products, (tiles, out, never, 3, WARPGROUPS, CHUNKS, CHUNK, SIZE, BOXES, STAGES, DEPTH,
                                A_SCALE, B_SCALE, BIAS, STORED)),
                (fetch, (a_desc, b_desc, tiles, row, column, WARPGROUPS, CHUNKS, CHUNK, BOXES, STAGES)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, 24],
        )  # fmt: skip
