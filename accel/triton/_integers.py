"""Expert products of few slots, in integers: FP4 codes and quantized activations as int8, four a word, a dot of four an
instruction.

A thread owns a row of weights: it reads packed codes once, makes int8 of them once, and adds the blocks of every slot in
ascending K itself. A block's dot is an exact integer; as float32 it is multiplied with both scales, whose product is exact.
"""

import triton
import triton.language as tl

from accel.triton._experts import expert_slots, finish_slots, halves
from accel.triton._tiles import INTERPRETED, decode_magnitude, float_of

ROUND_BITS, ROUND = tl.constexpr(0x4B400000), tl.constexpr(1.5 * 2.0**23)  # integers added to its bits are added to it

INT8_FOURS = tl.constexpr("""{
    .reg .b32 codes, up, sign, plus, minus;
    and.b32 codes, $2, 0x77777777; shl.b32 up, $2, 4;
    prmt.b32 sign, up, $2, 0xd9c8;
    prmt.b32 plus, 0x03020100, 0x0c080604, codes; prmt.b32 minus, 0xfdfeff00, 0xf4f8fafc, codes;
    lop3.b32 $0, plus, minus, sign, 0xd8;
    shr.b32 codes, codes, 16;
    prmt.b32 sign, up, $2, 0xfbea;
    prmt.b32 plus, 0x03020100, 0x0c080604, codes; prmt.b32 minus, 0xfdfeff00, 0xf4f8fafc, codes;
    lop3.b32 $1, plus, minus, sign, 0xd8;
}""")  # looked up among twice the values 0, 0.5, 1, 1.5, 2, 3, 4, 6, and those negated; then one of both by the sign


@triton.jit
def int8_fours(word):
    """Eight FP4 codes of int32 words as twice their values, int8, in two words."""
    if INTERPRETED:
        low, high = word * 0, word * 0
        for i in tl.static_range(4):
            low |= (twice_value(word >> (4 * i)) & 255) << (8 * i)
            high |= (twice_value(word >> (16 + 4 * i)) & 255) << (8 * i)
        return low, high
    else:
        return tl.inline_asm_elementwise(INT8_FOURS, "=r,=r,r", [word], is_pure=True, pack=1, dtype=(tl.int32, tl.int32))


@triton.jit
def twice_value(code):
    """Twice the value of the FP4 code in the lowest four bits."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    magnitude = tl.where(exponent == 0, mantissa, (mantissa + 2) << tl.maximum(exponent - 1, 0))
    return tl.where(code & 8 != 0, -magnitude, magnitude)


@triton.jit
def add_dot(total, a, b):
    """total + the dot of four int8 in words `a` and `b`."""
    if INTERPRETED:
        for i in tl.static_range(4):
            total += ((a << (24 - 8 * i)) >> 24) * ((b << (24 - 8 * i)) >> 24)
        return total
    else:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $2, $3, $1;", "=r,r,r,r", [total, a, b], is_pure=True, pack=1, dtype=tl.int32
        )


@triton.jit
def four_words(pointer):
    """Four int32 from 16 aligned bytes."""
    if INTERPRETED:
        return tl.load(pointer), tl.load(pointer + 1), tl.load(pointer + 2), tl.load(pointer + 3)
    else:
        return tl.inline_asm_elementwise(
            "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", [pointer.to(tl.int64)], is_pure=True, pack=1,
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        )  # fmt: skip


@triton.jit
def columns(x, ROWS: tl.constexpr, COUNT: tl.constexpr):
    """The columns of `[ROWS, COUNT]`, a tuple of `[ROWS]`."""
    parts = (tl.reshape(x, (ROWS, 1, COUNT)),)
    for level in tl.static_range(8):
        if COUNT >> level > 1:
            parts = halves(parts, 1 << level, ROWS, 1, COUNT >> (level + 1))
    found = ()
    for i in tl.static_range(COUNT):
        found = found + (tl.reshape(parts[i], (ROWS,)),)
    return found


@triton.jit
def experts_integer_kernel(
    x_ptr, x_factors_ptr, x_stored_ptr, w_ptr, w_scales_ptr, w_stored_ptr, bias_ptr, out_ptr, ids_ptr, router_ptr,
    slots, experts, n_size, k_blocks, row_words, x_row, factors_row,
    w_expert, w_row, scales_expert, scales_row, stored_expert, stored_row, bias_expert,
    SLOTS: tl.constexpr, BY_SLOT: tl.constexpr, X_OF_SLOTS: tl.constexpr, SCALE_ROWS: tl.constexpr,
    X_STORED: tl.constexpr, W_STORED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ROUTER: tl.constexpr,
    ROUNDED: tl.constexpr, STORED: tl.constexpr, STAGES: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, NB: tl.constexpr,
    SIZE: tl.constexpr, SCALE_NAN: tl.constexpr, SCALE_MANTISSA: tl.constexpr, SCALE_UNBIAS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """`BN` rows of one expert's weights with rows of the slots that are its, `BM` at a time: out[slot, n]. As
    `experts_product_kernel` of few slots, from what `quantize_rows_kernel` stores of `INTEGERS`."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    expert, count, rank, slot_of = expert_slots(ids_ptr, tl.program_id(1), slots, experts, SLOTS, BY_SLOT)
    if count > 0:
        WORDS: tl.constexpr = SIZE // 8
        e = expert.to(tl.int64)
        row = tl.minimum(n, n_size - 1).to(tl.int64)
        row_ptr = w_ptr + e * w_expert + row * w_row
        scale_ptr = w_scales_ptr + e * scales_expert + row // SCALE_ROWS * scales_row
        for first in range(0, count, BM):
            acc, slot, x_place, factor_place = (), (), (), ()
            for i in tl.static_range(BM):
                found = tl.sum(tl.where(rank == first + i, slot_of, 0), axis=0)
                acc, slot = acc + (tl.zeros((BN,), tl.float32),), slot + (found,)
                x_place = x_place + (x_ptr + (found // X_OF_SLOTS).to(tl.int64) * x_row,)
                factor_place = factor_place + (x_factors_ptr + (found // X_OF_SLOTS).to(tl.int64) * factors_row,)
            for j in tl.range(0, k_blocks, NB, num_stages=STAGES):
                place = j * WORDS + tl.arange(0, NB * WORDS)[None, :]
                words = tl.load(row_ptr[:, None] + place, mask=(place < row_words) | EVEN, other=0)
                block = j + tl.arange(0, NB)[None, :]
                scales = tl.load(scale_ptr[:, None] + block, mask=(block < k_blocks) | EVEN, other=0)
                word, scale = columns(words, BN, NB * WORDS), columns(scales, BN, NB)
                for b in tl.static_range(NB):
                    code = scale[b].to(tl.int32)
                    factor = decode_magnitude(code, SCALE_MANTISSA, False, SCALE_UNBIAS)
                    factor = tl.where(code == SCALE_NAN, float("nan"), factor)
                    fours = ()
                    for w in tl.static_range(WORDS):
                        fours = fours + int8_fours(word[b * WORDS + w])
                    for i in tl.static_range(BM):
                        total = tl.full((BN,), ROUND_BITS, tl.int32)
                        for w in tl.static_range(WORDS // 2):
                            x = four_words(x_place[i] + (j + b) * (SIZE // 4) + 4 * w)
                            for four in tl.static_range(4):
                                total = add_dot(total, fours[4 * w + four], x[four])
                        dot = (float_of(total) - ROUND) * (factor * tl.load(factor_place[i] + j + b))
                        acc = acc[:i] + (acc[i] + dot,) + acc[i + 1 :]
            for i in tl.static_range(BM):
                finish_slots(
                    acc[i][:, None], tl.full((1,), 0, tl.int32) + slot[i], tl.full((1,), 0, tl.int32) + first + i < count,
                    e, row, n, n_size, X_OF_SLOTS, x_stored_ptr, w_stored_ptr, bias_ptr, router_ptr, out_ptr, stored_expert,
                    stored_row, bias_expert, 1.0, BN, 1, X_STORED, W_STORED, HAS_BIAS, HAS_ROUTER, ROUNDED, STORED,
                )  # fmt: skip
