"""Expert products of FP4 weights in Gluon: each thread decodes the weights that a tensor core takes from it, and no others.

The dot of a block is exact, so its elements may come in any order. A tensor core's instruction takes 16 elements of 16 rows
from a warp, four of a row from each thread: a thread's four are two bytes of the packed block as it is stored, and rows of x
lie so that their elements meet them. Packed bytes and rows of x are copied to shared memory some steps ahead.

NVFP4: a block is one instruction, of float16 elements times their scales. MXFP4, with rows in an MX format: two of bfloat16;
rows are stored times their scales, and a weight's enters with the addition, since a dot times a power of two is exact and
one fused multiply-add rounds as the addition alone. Where scales are so far from 1 that this would not do, a tile is
computed again as the reference does it, in two halves.
"""

import triton.language as tl
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from accel.triton._experts import HALF_SHIFT, add_apart, expert_slots, finish_slots, units_of
from accel.triton._tiles import float_of, halves_of, launch_next, wait_for_previous

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
DECODED_UNSCALED = tl.constexpr("""{
    .reg .b32 a, b, c, d, t;
    shl.b32 a, $8, 12; and.b32 a, a, 0x80008000; shl.b32 t, $8, 6; and.b32 t, t, 0x01c001c0; or.b32 a, a, t;
    shl.b32 b, $8, 8; and.b32 b, b, 0x80008000; shl.b32 t, $8, 2; and.b32 t, t, 0x01c001c0; or.b32 b, b, t;
    shl.b32 c, $8, 4; and.b32 c, c, 0x80008000; shr.b32 t, $8, 2; and.b32 t, t, 0x01c001c0; or.b32 c, c, t;
    and.b32 d, $8, 0x80008000; shr.b32 t, $8, 6; and.b32 t, t, 0x01c001c0; or.b32 d, d, t;
    mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; mov.b32 {$4, $5}, c; mov.b32 {$6, $7}, d;
}""")
UNSCALED_EXPONENT = tl.constexpr(62)  # such elements are 2^-126 too small, rows `SHIFT_UP` too large


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


@constexpr_function
def row_scales_layout(warps: int, units: int):
    """Of `[16 * warps, 1, units]`: a thread has rows as of `weights_layout`, and all units."""
    registers = [[0, 0, 1 << i] for i in range(units.bit_length() - 1)] + [[8, 0, 0]]
    lanes = [[0, 0, 0], [0, 0, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[16 << i, 0, 0] for i in range(warps.bit_length() - 1)], [], [16 * warps, 1, units]
    )


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
def decoded_unscaled(words):
    """Eight bfloat16 tensors: FP4 codes 0, 4, 1, 5, 2, 6, 3, 7 of int32 words, their bits in place and so times 2^-126."""
    return gl.inline_asm_elementwise(
        DECODED_UNSCALED, "=h,=h,=h,=h,=h,=h,=h,=h,r", [words], is_pure=True, pack=1,
        dtype=(
            gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
        ),
    )  # fmt: skip


@gluon.jit
def fragment(a0, a1, a2, a3, b0, b1, b2, b3, left: gl.constexpr, WARPS: gl.constexpr):
    """`[16 * WARPS, 16]`, as a tensor core takes it: two pairs of rows 0 to 7 of each 16, then of rows 8 to 15."""
    a = gl.join(gl.join(a0, a2), gl.join(a1, a3))
    b = gl.join(gl.join(b0, b2), gl.join(b1, b3))
    w = gl.join(a, b).reshape([WARPS, 8, 4, 2, 2, 2]).permute((0, 5, 1, 3, 2, 4)).reshape([16 * WARPS, 16])
    return gl.convert_layout(w, left, assert_trivial=True)


@gluon.jit
def low_and_high(x, WARPS: gl.constexpr, UNITS: gl.constexpr):
    """Rows 0 to 7 and 8 to 15 of each 16 of `[16 * WARPS, 4, UNITS]`: two tensors `[8 * WARPS, 4, UNITS]`."""
    x = x.reshape([WARPS, 2, 8, 4 * UNITS]).permute((0, 2, 3, 1))
    low, high = gl.split(x)
    return low.reshape([8 * WARPS, 4, UNITS]), high.reshape([8 * WARPS, 4, UNITS])


@gluon.jit
def fetch_weights(w_tiles, w_place, w_chunk, step, row_chunks, NB: gl.constexpr, STAGES: gl.constexpr):
    """Start to copy step `step` of packed weights; behind the rows' end, zeros."""
    WORDS: gl.constexpr = w_tiles.shape[2]
    inside = step * (NB // 2) + w_chunk < row_chunks
    async_copy.async_copy_global_to_shared(w_tiles.index(step % STAGES), w_place + step * WORDS, mask=inside)


@gluon.jit
def fetch_rows(x_tiles, x_place, x_chunk, present, step, row_chunks, NB: gl.constexpr, STAGES: gl.constexpr):
    """Start to copy step `step` of rows of x, and end what is waited for at once."""
    inside = step * (NB // 2) + x_chunk < row_chunks
    tile = x_tiles.index(step % STAGES).slice(0, x_place.shape[0], 0)
    async_copy.async_copy_global_to_shared(tile, x_place + step * (16 * NB), mask=present & inside)
    async_copy.commit_group()


@gluon.jit
def scales_of_step(place, unit, step, row_chunks, UNITS: gl.constexpr, NO_SCALE: gl.constexpr):
    """Words of scales for 64 elements each, `UNITS` a step."""
    return gl.load(place + step * UNITS, mask=(step * UNITS + unit) * 2 < row_chunks, other=NO_SCALE)


@gluon.jit
def scaled_and_added(acc, dot, words, x_scale_place, x_safe, SECOND: gl.constexpr, SAFE: gl.constexpr, mma: gl.constexpr):
    """acc + dot times the power of two of a block of weights, the first or second in `words`. Unless `SAFE`, times that of
    x too, where it is not in the dot, and NaN where the weights' code is."""
    words = gl.convert_layout(words.reshape([dot.shape[0]]), gl.SliceLayout(1, mma), assert_trivial=True)[:, None]
    if SAFE:
        power = float_of(((words << 15 if SECOND else words << 23) & 0x7F800000) + (UNSCALED_EXPONENT << 23))
        return gl.fma(dot, power, acc)
    else:
        code = (words >> 8 if SECOND else words) & 255
        low, high = halves_of(gl.where(code == 255, 127, code))
        x_code = gl.load(x_scale_place).to(gl.int32)
        x_low, x_high = halves_of(gl.where(x_safe == 1, 127, x_code)[None, :])
        dot = dot * 2.0**UNSCALED_EXPONENT * (low * x_high) * (high * x_low)
        return add_apart(acc, gl.where(code == 255, float("nan"), dot))


@gluon.jit
def sums_of_fragments(
    tiles, places, chunks, scale_place, unit, x_scales, row_chunks, POWER_OF_TWO: gl.constexpr, SAFE: gl.constexpr,
    WARPS: gl.constexpr, BM: gl.constexpr, NB: gl.constexpr, STAGES: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Float32 `[16 * WARPS, BM]`: from +0, dots of blocks, added in ascending K; NaN in rows with a NaN among their scales.
    And of powers of two whether any of the weights' is not to be folded as `SAFE` folds them: int32, not 0."""
    w_tiles, x_tiles = tiles
    w_place, rows_place, present = places
    w_chunk, x_chunk = chunks
    x_scale_place, x_safe = x_scales
    ROWS: gl.constexpr = 16 * WARPS
    HALF_ROWS: gl.constexpr = 8 * WARPS
    UNITS: gl.constexpr = NB // 2 if POWER_OF_TWO else NB
    NO_SCALE: gl.constexpr = 0x7F7F if POWER_OF_TWO else 0
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    zero = gl.zeros([ROWS, BM], gl.float32, mma)
    acc = zero
    for step in gl.static_range(STAGES - 1):
        fetch_weights(w_tiles, w_place, w_chunk, step, row_chunks, NB, STAGES)
    next_scales = scales_of_step(scale_place, unit, 0, row_chunks, NB // 4, NO_SCALE)
    wait_for_previous()
    for step in gl.static_range(STAGES - 1):
        fetch_rows(x_tiles, rows_place, x_chunk, present, step, row_chunks, NB, STAGES)
    seen = (next_scales & 0).to(gl.int32)
    for step in range(gl.cdiv(row_chunks, NB // 2)):
        scales = next_scales.to(gl.int32)
        async_copy.wait_group(STAGES - 2)
        next_scales = scales_of_step(scale_place, unit, step + 1, row_chunks, NB // 4, NO_SCALE)
        fetch_weights(w_tiles, w_place, w_chunk, step + STAGES - 1, row_chunks, NB, STAGES)
        fetch_rows(x_tiles, rows_place, x_chunk, present, step + STAGES - 1, row_chunks, NB, STAGES)
        codes = w_tiles.index(step % STAGES).load(codes_layout(WARPS, UNITS))
        low, high = low_and_high(codes.reshape([ROWS, UNITS, 4]).permute((0, 2, 1)), WARPS, UNITS)
        x = x_tiles.index(step % STAGES).slice(0, BM, 0).load(rows_layout(WARPS, BM, NB))
        x = x.reshape([BM, NB // 2, 4, 2, 2, 2]).permute((0, 4, 2, 5, 1, 3)).reshape([BM, 16, NB])
        x = units_of(x, BM, 16, NB)
        if POWER_OF_TWO:
            seen = seen | ~(scales ^ (scales << 1))
            scale_words = units_of(scales, ROWS, 1, NB // 4)
            low, high = units_of(low, HALF_ROWS, 4, UNITS), units_of(high, HALF_ROWS, 4, UNITS)
            for block in gl.static_range(UNITS):
                a0, a1, a2, a3, a4, a5, a6, a7 = decoded_unscaled(low[block])
                b0, b1, b2, b3, b4, b5, b6, b7 = decoded_unscaled(high[block])
                w = fragment(a0, a1, a2, a3, b0, b1, b2, b3, left, WARPS)
                dot = mma_v2(w, gl.convert_layout(x[2 * block].permute((1, 0)), right, assert_trivial=True), zero)
                w = fragment(a4, a5, a6, a7, b4, b5, b6, b7, left, WARPS)
                dot = mma_v2(w, gl.convert_layout(x[2 * block + 1].permute((1, 0)), right, assert_trivial=True), dot)
                x_place = x_scale_place + step * (NB // 2) + block
                acc = scaled_and_added(acc, dot, scale_words[block // 2], x_place, x_safe, block % 2, SAFE, mma)
        else:
            seen = seen | ((scales & 0x7F7F7F7F) + 0x01010101)
            words = units_of(low.to(gl.int32) & 0xFFFF | (high.to(gl.int32) << 16), HALF_ROWS, 4, NB)
            low, high = low_and_high(scales, WARPS, NB // 4)
            low, high = units_of(low, HALF_ROWS, 4, NB // 4), units_of(high, HALF_ROWS, 4, NB // 4)
            for pair in gl.static_range(NB // 2):
                low_scales = paired_scales(low[pair // 2], pair % 2)
                high_scales = paired_scales(high[pair // 2], pair % 2)
                for second in gl.static_range(2):
                    a0, a1, a2, a3, b0, b1, b2, b3 = decoded(words[2 * pair + second], low_scales, high_scales, second)
                    w = fragment(a0, a1, a2, a3, b0, b1, b2, b3, left, WARPS)
                    y = gl.convert_layout(x[2 * pair + second].permute((1, 0)), right, assert_trivial=True)
                    acc = add_apart(acc, mma_v2(w, y, zero))
    async_copy.wait_group(0)
    if POWER_OF_TWO:
        return acc, gl.max(gl.max(gl.max(seen & 0x8080, 2), 1), 0)
    else:
        seen = gl.max(gl.max(gl.where((seen & -0x7F7F7F80) != 0, 1, 0), 2), 1)
        seen = gl.convert_layout(seen, gl.SliceLayout(1, mma))
        return gl.where(seen[:, None] != 0, float("nan"), acc * HALF_SHIFT), 0


@gluon.jit
def multiply_slots(
    pointers, strides, weights, tiles, places, first, count, e, n, n_size, row_chunks, SLOTS: gl.constexpr,
    X_OF_SLOTS: gl.constexpr, X_STORED: gl.constexpr, W_STORED: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_ROUTER: gl.constexpr, ROUNDED: gl.constexpr, STORED: gl.constexpr, POWER_OF_TWO: gl.constexpr,
    WARPS: gl.constexpr, BM: gl.constexpr, NB: gl.constexpr, STAGES: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """`BM` slots from the `first` of an expert's `count` on, with its rows: out[slot, n]."""
    x_ptr, x_scales_ptr, x_stored_ptr, x_safe_ptr, w_stored_ptr, bias_ptr, router_ptr, out_ptr = pointers
    x_row, stored_expert, stored_row, bias_expert = strides
    w_place, w_chunk, w_scale_place, w_unit = weights
    rank, slot_of, order_ptr, start = places
    ROWS: gl.constexpr = 16 * WARPS
    unit = first + gl.arange(0, BM, gl.SliceLayout(1, rank.type.layout.parent))
    if SLOTS > 0:
        found = rank[None, :] == unit[:, None]
        slot = gl.sum(gl.where(found, slot_of[None, :], 0), 1)
    else:
        slot = gl.load(order_ptr + start + unit, mask=unit < count, other=0)
    x_copy: gl.constexpr = gl.BlockedLayout([1, 8], [16 // NB, 2 * NB], [WARPS, 1], [1, 0])
    x_column = gl.arange(0, 16 * NB, gl.SliceLayout(0, x_copy))[None, :]
    copied = gl.convert_layout(slot, gl.SliceLayout(1, x_copy))
    x_place = x_ptr + (copied // X_OF_SLOTS).to(gl.int64)[:, None] * x_row + x_column
    present = (first + gl.arange(0, BM, gl.SliceLayout(1, x_copy)) < count)[:, None]
    places, chunks = (w_place, x_place, present), (w_chunk, x_column // 32)
    slot = gl.convert_layout(slot, gl.SliceLayout(0, mma))
    present = first + gl.arange(0, BM, gl.SliceLayout(0, mma)) < count
    acc, unsafe = sums_of_fragments(
        tiles, places, chunks, w_scale_place, w_unit, (0, 0), row_chunks, POWER_OF_TWO, True, WARPS, BM, NB, STAGES, mma
    )
    if POWER_OF_TWO:
        x_safe = gl.load(x_safe_ptr + slot // X_OF_SLOTS, mask=present, other=1)
        if (unsafe != 0) | (gl.min(x_safe, 0) == 0):  # what was computed means nothing
            x_scale_place = x_scales_ptr + (slot // X_OF_SLOTS).to(gl.int64) * (x_row // 32)
            acc, _unsafe = sums_of_fragments(
                tiles, places, chunks, w_scale_place, w_unit, (x_scale_place, x_safe), row_chunks, POWER_OF_TWO, False,
                WARPS, BM, NB, STAGES, mma,
            )  # fmt: skip
    rows = n + gl.arange(0, ROWS, gl.SliceLayout(1, mma))
    finish_slots(
        acc, slot, present, e, gl.minimum(rows, n_size - 1).to(gl.int64), rows, n_size, X_OF_SLOTS, x_stored_ptr,
        w_stored_ptr, bias_ptr, router_ptr, out_ptr, stored_expert, stored_row, bias_expert, 1.0,
        X_STORED, W_STORED, HAS_BIAS, HAS_ROUTER, ROUNDED, STORED,
    )  # fmt: skip


@gluon.jit
def experts_fragment_kernel(
    x_ptr, x_scales_ptr, x_stored_ptr, x_safe_ptr, w_ptr, w_scales_ptr, w_stored_ptr, bias_ptr, out_ptr, ids_ptr,
    router_ptr, order_ptr, tiles_ptr, slots, experts, n_size, row_chunks, x_row, w_expert, w_row, scales_expert, scales_row,
    stored_expert, stored_row, bias_expert,
    SLOTS: gl.constexpr, BY_SLOT: gl.constexpr, X_OF_SLOTS: gl.constexpr, X_STORED: gl.constexpr, W_STORED: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_ROUTER: gl.constexpr, ROUNDED: gl.constexpr, STORED: gl.constexpr,
    POWER_OF_TWO: gl.constexpr, WARPS: gl.constexpr, BM: gl.constexpr, NB: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """16 rows a warp of one expert's weights with rows of its slots, `BM` at a time or half of that: out[slot, n].
    As `experts_product_kernel`, `NB` groups of 16 elements a step, from what `quantize_rows_kernel` stores as "fragments",
    for MXFP4 as "pairs".

    Weights are words of a thread's part of a block, `row_chunks` times 16 bytes in a row; their scales are words for 64
    elements. Weights, ids and sorted slots are older than the launch before: they are read before that has ended."""
    launch_next()
    ROWS: gl.constexpr = 16 * WARPS
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    CHUNK: gl.constexpr = 4 if POWER_OF_TWO else 8
    w_copy: gl.constexpr = gl.BlockedLayout([1, CHUNK], [64 // NB, NB // 2], [WARPS, 1], [1, 0])
    found_layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    scales: gl.constexpr = row_scales_layout(WARPS, NB // 4) if POWER_OF_TWO else weights_layout(WARPS, NB // 4)
    place = gl.program_id(1)
    if SLOTS > 0:
        slot_of = gl.arange(0, SLOTS, gl.BlockedLayout([1], [32], [WARPS], [0]))
        expert, count, rank, slot_of = expert_slots(ids_ptr, place, slots, experts, slot_of, SLOTS, BY_SLOT)
        start = 0
        rank = gl.convert_layout(rank, gl.SliceLayout(0, found_layout))
        slot_of = gl.convert_layout(slot_of, gl.SliceLayout(0, found_layout))
    else:
        rank = gl.zeros([1], gl.int32, gl.SliceLayout(0, found_layout))
        slot_of = rank
        expert = gl.load(tiles_ptr + 3 * place)
        start = gl.load(tiles_ptr + 3 * place + 1)
        count = gl.load(tiles_ptr + 3 * place + 2)
    if count > 0:
        e = expert.to(gl.int64)
        n = gl.program_id(0) * ROWS
        row = gl.minimum(n + gl.arange(0, ROWS, gl.SliceLayout(1, w_copy)), n_size - 1)
        w_column = gl.arange(0, NB // 2 * CHUNK, gl.SliceLayout(0, w_copy))[None, :]
        w_place = (w_ptr + e * w_expert) + row.to(gl.int64)[:, None] * w_row + w_column
        row = gl.minimum(n + gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(2, scales))), n_size - 1)
        lane = gl.arange(0, 1 if POWER_OF_TWO else 4, gl.SliceLayout(0, gl.SliceLayout(2, scales)))[None, :, None]
        w_unit = lane * 0 + gl.arange(0, NB // 4, gl.SliceLayout(0, gl.SliceLayout(1, scales)))[None, None, :]
        w_scale_place = (w_scales_ptr + e * scales_expert) + row.to(gl.int64)[:, None, None] * scales_row + w_unit
        w_tiles = gl.allocate_shared_memory(
            w_ptr.dtype.element_ty,
            [STAGES, ROWS, NB // 2 * CHUNK],
            gl.SwizzledSharedLayout(CHUNK, 16 // NB, NB // 2, [1, 0]),
        )
        x_tiles = gl.allocate_shared_memory(
            x_ptr.dtype.element_ty, [STAGES, BM, 16 * NB], gl.SwizzledSharedLayout(32, 1, 2, [1, 0])
        )
        pointers = (x_ptr, x_scales_ptr, x_stored_ptr, x_safe_ptr, w_stored_ptr, bias_ptr, router_ptr, out_ptr)
        tiles, places = (w_tiles, x_tiles), (rank, slot_of, order_ptr, start)
        strides = (x_row, stored_expert, stored_row, bias_expert)
        weights = (w_place, w_column // CHUNK, w_scale_place, w_unit)
        for first in range(0, count, BM):
            if BM > 8 and count - first <= BM // 2:
                multiply_slots(
                    pointers, strides, weights, tiles, places, first, count, e, n, n_size, row_chunks, SLOTS, X_OF_SLOTS,
                    X_STORED, W_STORED, HAS_BIAS, HAS_ROUTER, ROUNDED, STORED, POWER_OF_TWO, WARPS, BM // 2, NB, STAGES, mma,
                )  # fmt: skip
            else:
                multiply_slots(
                    pointers, strides, weights, tiles, places, first, count, e, n, n_size, row_chunks, SLOTS, X_OF_SLOTS,
                    X_STORED, W_STORED, HAS_BIAS, HAS_ROUTER, ROUNDED, STORED, POWER_OF_TWO, WARPS, BM, NB, STAGES, mma,
                )  # fmt: skip
