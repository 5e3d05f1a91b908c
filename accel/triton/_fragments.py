"""Expert products of NVFP4 in Gluon: each thread decodes the weights that a tensor core takes from it, and no others.

The dot of a block is exact, so its elements may come in any order. A tensor core's instruction takes 16 elements of 16 rows
from a warp, four of a row from each thread: a thread's four are two bytes of the packed block as it is stored, and rows of x
lie so that their elements meet them. Packed bytes and rows of x are copied to shared memory some steps ahead.
"""

import triton.language as tl
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from accel.triton._experts import HALF_SHIFT, add_apart, expert_slots, finish_slots, units_of

_PAIRED_SCALES = """{
    prmt.b32 $0, $1, 0, 0x%d4%d4; shr.b32 $0, $0, 1; mul.rn.f16x2 $0, $0, $2;
}"""
PAIRED_SCALES = tl.constexpr((_PAIRED_SCALES % (1, 0), _PAIRED_SCALES % (3, 2)))
_DECODED = """{
    .reg .b16 low, high;
    .reg .b32 even, odd, signs, a, b, c, d, f, g;
    mov.b32 {low, high}, $9; mov.b32 f, {%s, %s}; mov.b32 {low, high}, $10; mov.b32 g, {%s, %s};
    shl.b32 even, $8, 1; and.b32 even, even, 0x0e0e0e0e; shl.b32 signs, $8, 4; and.b32 signs, signs, 0x80808080;
    or.b32 even, even, signs;
    shr.b32 odd, $8, 3; and.b32 odd, odd, 0x0e0e0e0e; and.b32 signs, $8, 0x80808080; or.b32 odd, odd, signs;
    prmt.b32 a, even, 0, 0x1404; prmt.b32 b, odd, 0, 0x1404; prmt.b32 c, even, 0, 0x3424; prmt.b32 d, odd, 0, 0x3424;
    mul.rn.f16x2 a, a, f; mul.rn.f16x2 b, b, f; mul.rn.f16x2 c, c, g; mul.rn.f16x2 d, d, g;
    mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; mov.b32 {$4, $5}, c; mov.b32 {$6, $7}, d;
}"""
DECODED = tl.constexpr((_DECODED % (("low",) * 4), _DECODED % (("high",) * 4)))


@constexpr_function
def weights_layout(warps: int, units: int):
    """Of `[16 * warps, 4, units]`: a thread has one of the four columns of rows `row` and `row + 8`, and all units."""
    registers = [[0, 0, 1 << i] for i in range(units.bit_length() - 1)] + [[8, 0, 0]]
    lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[16 << i, 0, 0] for i in range(warps.bit_length() - 1)], [], [16 * warps, 4, units]
    )


@constexpr_function
def codes_layout(warps: int, blocks: int):
    """Of `[16 * warps, 4 * blocks]`, four columns a block, as `weights_layout`."""
    registers = [[0, 4 << i] for i in range(blocks.bit_length() - 1)] + [[8, 0]]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[16 << i, 0] for i in range(warps.bit_length() - 1)], [], [16 * warps, 4 * blocks]
    )


@constexpr_function
def rows_layout(warps: int, slots: int, blocks: int):
    """Of rows of x `[slots, 16 * blocks]`: a thread has eight neighbours of each 32, four of either block."""
    registers = [[0, 1], [0, 2], [0, 4]] + [[0, 32 << i] for i in range(blocks.bit_length() - 2)]
    registers += [[8 << i, 0] for i in range(slots.bit_length() - 4)]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0]] * (warps.bit_length() - 1), [], [slots, 16 * blocks])


@gluon.jit
def paired_scales(codes, PAIR: gl.constexpr):
    """Two E4M3 codes of the four in int32 words, as float16 values times 2^7, from 2^-8 in place."""
    up = gl.full(codes.shape, 0x78007800, gl.int32, codes.type.layout)
    return gl.inline_asm_elementwise(PAIRED_SCALES[PAIR], "=r,r,r", [codes, up], is_pure=True, pack=1, dtype=gl.int32)


@gluon.jit
def decoded(words, low_scales, high_scales, SECOND: gl.constexpr):
    """Eight float16 tensors: FP4 codes 0, 2, 1, 3 of the lower halves of int32 words, in the upper byte of float16 and so
    times 2^-14, times one of two scales; then those of the upper halves."""
    return gl.inline_asm_elementwise(
        DECODED[SECOND], "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r", [words, low_scales, high_scales], is_pure=True, pack=1,
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
    )  # fmt: skip


@gluon.jit
def low_and_high(x, WARPS: gl.constexpr, UNITS: gl.constexpr):
    """Rows 0 to 7 and 8 to 15 of each 16 of `[16 * WARPS, 4, UNITS]`: two tensors `[8 * WARPS, 4, UNITS]`."""
    x = x.reshape([WARPS, 2, 8, 4 * UNITS]).permute((0, 2, 3, 1))
    low, high = gl.split(x)
    return low.reshape([8 * WARPS, 4, UNITS]), high.reshape([8 * WARPS, 4, UNITS])


@gluon.jit
def fetch(tiles, places, columns, step, row_chunks, NB: gl.constexpr, STAGES: gl.constexpr):
    """Start to copy step `step` of packed weights and of rows of x; behind the rows' end, zeros."""
    w_tiles, x_tiles = tiles
    w_place, x_place, present = places
    w_column, x_column = columns
    first = step * (NB // 2)
    inside = first + w_column // 8 < row_chunks
    async_copy.async_copy_global_to_shared(w_tiles.index(step % STAGES), w_place + step * (4 * NB), mask=inside)
    inside = first + x_column // 32 < row_chunks
    async_copy.async_copy_global_to_shared(x_tiles.index(step % STAGES), x_place + step * (16 * NB), mask=present & inside)
    async_copy.commit_group()


@gluon.jit
def sums_of_fragments(
    tiles, places, columns, scale_place, unit, row_chunks, WARPS: gl.constexpr, BM: gl.constexpr, NB: gl.constexpr,
    STAGES: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Float32 `[16 * WARPS, BM]`: from +0, dots of blocks, added in ascending K, in units of `HALF_SHIFT`; and int32, not 0
    in rows that met a NaN among their scales."""
    w_tiles, x_tiles = tiles
    ROWS: gl.constexpr = 16 * WARPS
    HALF_ROWS: gl.constexpr = 8 * WARPS
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    acc = gl.zeros([ROWS, BM], gl.float32, mma)
    bad = gl.zeros([ROWS, 4, NB // 4], gl.int32, weights_layout(WARPS, NB // 4))
    for step in gl.static_range(STAGES - 1):
        fetch(tiles, places, columns, step, row_chunks, NB, STAGES)
    next_scales = gl.load(scale_place, mask=unit * 2 < row_chunks, other=0)
    for step in range(gl.cdiv(row_chunks, NB // 2)):
        scales = next_scales
        async_copy.wait_group(STAGES - 2)
        place = (step + 1) * (NB // 4)
        next_scales = gl.load(scale_place + place, mask=(place + unit) * 2 < row_chunks, other=0)
        fetch(tiles, places, columns, step + STAGES - 1, row_chunks, NB, STAGES)
        bad = bad | ((scales & 0x7F7F7F7F) + 0x01010101)
        low, high = low_and_high(scales, WARPS, NB // 4)
        low_scales, high_scales = units_of(low, HALF_ROWS, 4, NB // 4), units_of(high, HALF_ROWS, 4, NB // 4)
        codes = w_tiles.index(step % STAGES).load(codes_layout(WARPS, NB)).to(gl.int32) & 0xFFFF
        low, high = low_and_high(codes.reshape([ROWS, NB, 4]).permute((0, 2, 1)), WARPS, NB)
        words = units_of(low | (high << 16), HALF_ROWS, 4, NB)
        x = x_tiles.index(step % STAGES).load(rows_layout(WARPS, BM, NB))
        x = x.reshape([BM, NB // 2, 4, 2, 2, 2]).permute((0, 4, 2, 5, 1, 3)).reshape([BM, 16, NB])
        x = units_of(x, BM, 16, NB)
        for pair in gl.static_range(NB // 2):
            low = paired_scales(low_scales[pair // 2], pair % 2)
            high = paired_scales(high_scales[pair // 2], pair % 2)
            for second in gl.static_range(2):
                a0, a1, a2, a3, b0, b1, b2, b3 = decoded(words[2 * pair + second], low, high, second)
                a = gl.join(gl.join(a0, a2), gl.join(a1, a3))
                b = gl.join(gl.join(b0, b2), gl.join(b1, b3))
                w = gl.join(a, b).reshape([WARPS, 8, 4, 2, 2, 2]).permute((0, 5, 1, 3, 2, 4)).reshape([ROWS, 16])
                w = gl.convert_layout(w, left, assert_trivial=True)
                y = gl.convert_layout(x[2 * pair + second].permute((1, 0)), right, assert_trivial=True)
                acc = add_apart(acc, mma_v2(w, y, gl.zeros([ROWS, BM], gl.float32, mma)))
    async_copy.wait_group(0)
    bad = gl.max(gl.max(gl.where((bad & -0x7F7F7F80) != 0, 1, 0), 2), 1)
    return acc, gl.convert_layout(bad, gl.SliceLayout(1, mma))


@gluon.jit
def experts_fragment_kernel(
    x_ptr, x_stored_ptr, w_ptr, w_scales_ptr, w_stored_ptr, bias_ptr, out_ptr, ids_ptr, router_ptr, order_ptr, tiles_ptr,
    slots, experts, n_size, row_chunks, x_row, w_expert, w_row, scales_expert, scales_row, stored_expert, stored_row,
    bias_expert,
    SLOTS: gl.constexpr, BY_SLOT: gl.constexpr, X_OF_SLOTS: gl.constexpr, X_STORED: gl.constexpr, W_STORED: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_ROUTER: gl.constexpr, ROUNDED: gl.constexpr, STORED: gl.constexpr, WARPS: gl.constexpr,
    BM: gl.constexpr, NB: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """16 rows a warp of one expert's weights with rows of the slots that are its, `BM` at a time: out[slot, n]. As
    `experts_product_kernel`, `NB` blocks a step, from what `quantize_rows_kernel` stores of `FRAGMENTS`.

    `row_chunks`: of 16 bytes, in a row of weights. Scales are int32 words of four."""
    ROWS: gl.constexpr = 16 * WARPS
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    w_copy: gl.constexpr = gl.BlockedLayout([1, 8], [64 // NB, NB // 2], [WARPS, 1], [1, 0])
    x_copy: gl.constexpr = gl.BlockedLayout([1, 8], [16 // NB, 2 * NB], [WARPS, 1], [1, 0])
    found_layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    scales: gl.constexpr = weights_layout(WARPS, NB // 4)
    place = gl.program_id(1)
    if SLOTS > 0:
        slot_of = gl.arange(0, SLOTS, gl.BlockedLayout([1], [32], [WARPS], [0]))
        expert, count, rank, slot_of = expert_slots(ids_ptr, place, slots, experts, slot_of, SLOTS, BY_SLOT)
        rank = gl.convert_layout(rank, gl.SliceLayout(0, found_layout))
        slot_of = gl.convert_layout(slot_of, gl.SliceLayout(0, found_layout))
        start = 0
    else:
        expert = gl.load(tiles_ptr + 3 * place)
        start = gl.load(tiles_ptr + 3 * place + 1)
        count = gl.load(tiles_ptr + 3 * place + 2)
    if count > 0:
        e = expert.to(gl.int64)
        n = gl.program_id(0) * ROWS
        row = gl.minimum(n + gl.arange(0, ROWS, gl.SliceLayout(1, w_copy)), n_size - 1)
        w_column = gl.arange(0, 4 * NB, gl.SliceLayout(0, w_copy))[None, :]
        w_place = (w_ptr + e * w_expert) + row.to(gl.int64)[:, None] * w_row + w_column
        row = gl.minimum(n + gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(2, scales))), n_size - 1)
        lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, scales)))[None, :, None]
        scale_column = lane * 0 + gl.arange(0, NB // 4, gl.SliceLayout(0, gl.SliceLayout(1, scales)))[None, None, :]
        scale_place = (w_scales_ptr + e * scales_expert) + row.to(gl.int64)[:, None, None] * scales_row + scale_column
        x_column = gl.arange(0, 16 * NB, gl.SliceLayout(0, x_copy))[None, :]
        w_tiles = gl.allocate_shared_memory(
            w_ptr.dtype.element_ty, [STAGES, ROWS, 4 * NB], gl.SwizzledSharedLayout(8, 16 // NB, NB // 2, [1, 0])
        )
        x_tiles = gl.allocate_shared_memory(
            x_ptr.dtype.element_ty, [STAGES, BM, 16 * NB], gl.SwizzledSharedLayout(32, 1, 2, [1, 0])
        )
        for first_rank in range(0, count, BM):
            unit = first_rank + gl.arange(0, BM, gl.SliceLayout(1, found_layout))
            if SLOTS > 0:
                found = rank[None, :] == unit[:, None]
                slot = gl.sum(gl.where(found, slot_of[None, :], 0), 1)
            else:
                slot = gl.load(order_ptr + start + unit, mask=unit < count, other=0)
            copied = gl.convert_layout(slot, gl.SliceLayout(1, x_copy))
            x_place = x_ptr + (copied // X_OF_SLOTS).to(gl.int64)[:, None] * x_row + x_column
            present = (first_rank + gl.arange(0, BM, gl.SliceLayout(1, x_copy)) < count)[:, None]
            acc, bad = sums_of_fragments(
                (w_tiles, x_tiles), (w_place, x_place, present), (w_column, x_column), scale_place, scale_column,
                row_chunks, WARPS, BM, NB, STAGES, mma,
            )  # fmt: skip
            acc = gl.where(bad[:, None] != 0, float("nan"), acc)
            slot = gl.convert_layout(slot, gl.SliceLayout(0, mma))
            present = first_rank + gl.arange(0, BM, gl.SliceLayout(0, mma)) < count
            rows = n + gl.arange(0, ROWS, gl.SliceLayout(1, mma))
            finish_slots(
                acc, slot, present, e, gl.minimum(rows, n_size - 1).to(gl.int64), rows, n_size, X_OF_SLOTS, x_stored_ptr,
                w_stored_ptr, bias_ptr, router_ptr, out_ptr, stored_expert, stored_row, bias_expert, HALF_SHIFT,
                X_STORED, W_STORED, HAS_BIAS, HAS_ROUTER, ROUNDED, STORED,
            )  # fmt: skip
