"""The kernels of an expert layer: rows to block values, products with packed weights, sum of the slots.

An operand row is stored as the values of its codes times their block scales, which bfloat16 holds exactly (float32 in the
interpreter), and weights become such values in registers. Within a block all products share one product of scales, so that
a tensor core's dot of a block is exact; the float32 additions across blocks run one by one in ascending K. Where E8M0 scales
are so far from 1 that a scaled value, product or sum could leave its type's range, a row or tile is marked not `safe`: codes
enter unscaled, and the power of two comes afterwards in two exact halves, as in the reference.
"""

import triton
import triton.language as tl

from accel.triton._activations import load_row
from accel.triton._blocks import multiplier, raw_scale, scales_of
from accel.triton._packing import spread
from accel.triton._tiles import (
    INF,
    INTERPRETED,
    MAGNITUDE,
    bits_of,
    decode_magnitude,
    decode_power,
    decode_top,
    float_of,
    halves_of,
    inverse_power,
    launch_next,
    narrow,
    round_to_step,
    scale_code,
    wait_for_previous,
    widen,
)

# E8M0 codes: with twice these exponents for weights, sums of 2^15 dots stay in float32
SAFE_LOW, SAFE_HIGH = tl.constexpr(127 - 32), tl.constexpr(127 + 32)
SHIFT_UP, PAIR_FACTOR = tl.constexpr(2.0**64), tl.constexpr(2.0 ** (126 - 64))  # bfloat16 pairs are 2^-64 too large
PAIRED_SIZE = tl.constexpr(32)  # the shortest dot of decoded pairs: one warp of Triton 3.6 counts shorter ones twice
HALF_SHIFT = tl.constexpr(2.0**7)  # float16 pairs are 2^-7 too large


@triton.jit
def safe_code(code):
    return (code >= SAFE_LOW) & (code <= SAFE_HIGH)


@triton.jit
def split_at_one(value):
    """(integer part, rest) of float32 values, both exact."""
    whole = tl.where(value < 0.0, -tl.floor(-value), tl.floor(value))
    return whole, value - whole


@triton.jit
def in_places(x, PLACES: tl.constexpr, COUNT: tl.constexpr):
    """Values of a row, `[COUNT]`. Of "pairs" each eight lie in the order 0, 4, 1, 5, 2, 6, 3, 7, in which packed pairs
    decode; of "fragments" each two blocks of 16 as `_fragments.rows_layout` says."""
    if PLACES == "pairs":
        x = tl.permute(tl.reshape(x, (COUNT // 8, 2, 4)), (0, 2, 1))
    elif PLACES == "fragments":
        x = tl.permute(tl.reshape(x, (COUNT // 32, 2, 4, 2, 2)), (0, 2, 1, 4, 3))
    return tl.reshape(x, (COUNT,))


@triton.jit
def quantize_rows_kernel(
    x_ptr, values_ptr, scales_ptr, stored_ptr, safe_ptr, given_ptr, ids_ptr, weights_ptr, table_ptr, alpha, limit, experts,
    x_row, k_size, values_row, part_stride,
    BLOCKS: tl.constexpr, SIZE: tl.constexpr, ROWS_A_SOURCE: tl.constexpr, WEIGHTED: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, STORED: tl.constexpr,
    PLACES: tl.constexpr, HALF: tl.constexpr, PARTS: tl.constexpr,
    SOURCE: tl.constexpr, PER_EXPERT: tl.constexpr, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    SCALE_MAX_CODE: tl.constexpr, SCALE_MANTISSA: tl.constexpr, SCALE_LOWEST: tl.constexpr, SCALE_MAX: tl.constexpr,
    SIXTH: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, MAX: tl.constexpr, EMAX: tl.constexpr,
    RULE: tl.constexpr, ORDER: tl.constexpr, INF_POISONS: tl.constexpr,
):  # fmt: skip
    """One row: activation, tensor scale, block scales, codes; stores what the codes are worth times their block scale.

    Row r of the operand comes from row r // `ROWS_A_SOURCE` of x. `PARTS` 2: integer parts and rests apart. `PLACES`: in
    which order, see `in_places`.
    """
    launch_next()
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCKS)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    present = k < k_size
    start = x_ptr + row // ROWS_A_SOURCE * x_row
    x = load_row(start, k, present, k_size, table_ptr, alpha, limit, ACTIVATION, GATED, INTERLEAVED, STORED)
    if WEIGHTED and ACTIVATION == "none":
        x = widen(narrow(x * tl.load(weights_ptr + row), STORED))

    magnitude = bits_of(x) & MAGNITUDE
    amax = tl.max(magnitude, axis=1)
    poisoned = amax >= INF if INF_POISONS else amax > INF
    stored = 1.0
    if SOURCE != "none":
        if SOURCE == "amax":
            given = float_of(tl.max(tl.max(tl.where(magnitude < INF, magnitude, 0), axis=1), axis=0))
        elif PER_EXPERT:
            expert = tl.load(ids_ptr + row)
            given = tl.load(given_ptr + tl.where((expert >= 0) & (expert < experts), expert, 0))
        else:
            given = tl.load(given_ptr)
        stored, forward = scales_of(given, SOURCE, ORDER, LARGEST, True)
    amax = tl.where(poisoned, 0, amax)
    x = tl.where(poisoned[:, None], 0.0, x)
    if POWER_OF_TWO:
        scale = scale_code(amax, RULE, EMAX, MANTISSA, MAX)
        if not INF_POISONS:
            scale = tl.where(amax == INF, SCALE_MAX_CODE, scale)
        quotient = x * inverse_power(scale)[:, None]
        safe = tl.min(tl.where((amax == 0) | safe_code(scale), 1, 0), axis=0)
        factor = tl.where(safe == 1, decode_power(scale), 1.0)
    else:
        raw = raw_scale(float_of(amax), forward, ORDER, SIXTH)
        scale_sum, scale_anchor = round_to_step(raw, SCALE_MANTISSA, SCALE_LOWEST, SCALE_MAX)
        factor = scale_sum - scale_anchor
        scale = tl.zeros(amax.shape, tl.int32)
        quotient = x * multiplier(factor, stored, forward, ORDER, True)[:, None]
        if not INF_POISONS or ORDER != "nvidia":
            quotient = tl.where(quotient != quotient, x, quotient)  # 0 * Inf is the 0, Inf * 0 the Inf
        safe = tl.full((), 1, tl.int32)
    sum, anchor = round_to_step(tl.abs(quotient), MANTISSA, LOWEST, MAX)
    element = tl.where(quotient < 0.0, anchor - sum, sum - anchor)
    block, place = tl.arange(0, BLOCKS), tl.arange(0, BLOCKS * SIZE)
    inside = place < values_row
    place = values_ptr + row * values_row + place
    factor = tl.where(poisoned, float("nan"), factor)[:, None] * (SHIFT_UP if PLACES != "plain" and not HALF else 1.0)
    stored_type = values_ptr.dtype.element_ty
    if PARTS == 2:
        whole, rest = split_at_one(element)
        tl.store(place, in_places((whole * factor).to(stored_type), PLACES, BLOCKS * SIZE), mask=inside)
        tl.store(place + part_stride, in_places((rest * factor).to(stored_type), PLACES, BLOCKS * SIZE), mask=inside)
    else:
        tl.store(place, in_places((element * factor).to(stored_type), PLACES, BLOCKS * SIZE), mask=inside)
    if POWER_OF_TWO:
        tl.store(scales_ptr + row * (values_row // SIZE) + block, scale.to(tl.uint8), mask=block * SIZE < values_row)
    tl.store(stored_ptr + row, stored)
    tl.store(safe_ptr + row, safe)


BFLOAT16_PAIRS = tl.constexpr("""{
    .reg .b32 a, b, c, d, t;
    shl.b32 a, $8, 12; shl.b32 t, $8, 6; and.b32 a, a, 0x80008000; and.b32 t, t, 0x01c001c0; or.b32 a, a, t;
    shl.b32 b, $8, 8; shl.b32 t, $8, 2; and.b32 b, b, 0x80008000; and.b32 t, t, 0x01c001c0; or.b32 b, b, t;
    shl.b32 c, $8, 4; shr.b32 t, $8, 2; and.b32 c, c, 0x80008000; and.b32 t, t, 0x01c001c0; or.b32 c, c, t;
    and.b32 d, $8, 0x80008000; shr.b32 t, $8, 6; and.b32 t, t, 0x01c001c0; or.b32 d, d, t;
    mul.rn.bf16x2 a, a, $9; mul.rn.bf16x2 b, b, $9; mul.rn.bf16x2 c, c, $9; mul.rn.bf16x2 d, d, $9;
    mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; mov.b32 {$4, $5}, c; mov.b32 {$6, $7}, d;
}""")  # a code's bits where bfloat16 has sign, lowest exponent bits and highest mantissa bit: its value times 2^-126
FLOAT16_PAIRS = tl.constexpr("""{
    .reg .b32 a, b, c, d, t, u, v;
    shl.b32 t, $8, 1; and.b32 t, t, 0x0e0e0e0e; shl.b32 v, $8, 4; and.b32 v, v, 0x80808080; or.b32 t, t, v;
    shr.b32 u, $8, 3; and.b32 u, u, 0x0e0e0e0e; and.b32 v, $8, 0x80808080; or.b32 u, u, v;
    prmt.b32 a, t, 0, 0x2404; prmt.b32 b, u, 0, 0x2404; prmt.b32 c, t, 0, 0x3414; prmt.b32 d, u, 0, 0x3414;
    mul.rn.f16x2 a, a, $9; mul.rn.f16x2 b, b, $9; mul.rn.f16x2 c, c, $9; mul.rn.f16x2 d, d, $9;
    mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; mov.b32 {$4, $5}, c; mov.b32 {$6, $7}, d;
}""")  # the same in the upper byte of float16: a code's value times 2^-14


@triton.jit
def decoded_pairs(word, factor, HALF: tl.constexpr):
    """Eight tensors: FP4 codes 0, 4, 1, 5, 2, 6, 3, 7 of int32 words, scaled as the constants say, times `factor`, twice the
    same bfloat16 or float16 in int32."""
    if HALF:
        return tl.inline_asm_elementwise(
            FLOAT16_PAIRS, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [word, factor], is_pure=True, pack=1,
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            BFLOAT16_PAIRS, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [word, factor], is_pure=True, pack=1,
            dtype=(
                tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
            ),
        )  # fmt: skip


@triton.jit
def half_factors(scale):
    """E4M3 codes as float16 values times 2^7, twice in int32: 8 exponents lower in place, then times 2^15."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 up; mov.b32 up, 0x78007800; mul.rn.f16x2 $0, $1, up; }", "=r,r", [scale * 0x00800080], is_pure=True,
        pack=1, dtype=tl.int32,
    )  # fmt: skip


@triton.jit
def spread_scales(scale, BN: tl.constexpr, NB: tl.constexpr, TIMES: tl.constexpr):
    """`[BN, NB * TIMES]`: each of a row's values `TIMES` times."""
    return tl.reshape(tl.broadcast_to(scale[:, :, None], (BN, NB, TIMES)), (BN, NB * TIMES))


@triton.jit
def weight_values(
    row_ptr, scale, byte, row_bytes, FOLD: tl.constexpr, SPLIT: tl.constexpr,
    BN: tl.constexpr, NB: tl.constexpr, G: tl.constexpr, PAIRED: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    SCALE_NAN: tl.constexpr, SCALE_MANTISSA: tl.constexpr, SCALE_UNBIAS: tl.constexpr,
    BITS: tl.constexpr, MANTISSA: tl.constexpr, MAX: tl.constexpr, MAX_CODE: tl.constexpr, SIGN_SHIFT: tl.constexpr,
    INTEGER: tl.constexpr, UNBIAS: tl.constexpr, EVEN: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Values `[BN, NB * G]` of weights, from byte `byte` of rows on, times block scales `[BN, NB]`, powers of two if `FOLD`.
    With `SPLIT` those of their integer parts and of their rests, else twice the same. `EVEN`: all lie within the rows."""
    if POWER_OF_TWO:
        factor = decode_power(scale if FOLD else tl.where(scale == SCALE_NAN, scale, 127))
    else:
        factor = tl.where(scale == SCALE_NAN, float("nan"), decode_magnitude(scale, SCALE_MANTISSA, False, SCALE_UNBIAS))
    if PAIRED:
        words: tl.constexpr = NB * G // 8
        place = byte // 4 + tl.arange(0, words)[None, :]
        word = tl.load(row_ptr[:, None] + place, mask=(place * 4 < row_bytes) | EVEN, other=0)
        if INTERPRETED:
            i = tl.arange(0, 8)[None, None, :]
            code = word[:, :, None] >> (4 * ((i >> 1) + 4 * (i & 1)))
            value, _ = decode_top(code << 28, MANTISSA, MAX, MAX_CODE, SIGN_SHIFT, INTEGER, UNBIAS, -1)
            factor = factor / HALF_SHIFT if HALF else factor / SHIFT_UP
            value = tl.reshape(value, (BN, NB * G)) * spread_scales(factor, BN, NB, G)
        else:
            if HALF:
                pair = tl.where(scale == SCALE_NAN, 0x7E007E00, half_factors(scale))
            elif POWER_OF_TWO and FOLD:
                pair = scale * 0x00800080 + (126 - 64) * 0x00800080  # of safe codes
            else:
                high = bits_of(factor * PAIR_FACTOR) & -65536  # a scale's mantissa is short: bfloat16 holds it
                pair = high | (high >> 16 & 65535)
            a, b, c, d, e, f, g, h = decoded_pairs(word, spread_scales(pair, BN, NB, G // 8), HALF)
            even = tl.join(tl.join(a, e), tl.join(c, g))
            odd = tl.join(tl.join(b, f), tl.join(d, h))
            value = tl.reshape(tl.join(even, odd), (BN, NB * G))
        return value, value
    else:
        if BITS == 6:
            place = byte + 3 * tl.arange(0, NB * G // 4)[None, :]
            pointer = row_ptr[:, None] + place
            low = tl.load(pointer, mask=(place < row_bytes) | EVEN, other=0).to(tl.int32)
            middle = tl.load(pointer + 1, mask=(place + 1 < row_bytes) | EVEN, other=0).to(tl.int32)
            high = tl.load(pointer + 2, mask=(place + 2 < row_bytes) | EVEN, other=0).to(tl.int32)
            unit = low | (middle << 8) | (high << 16)
        else:
            place = byte + tl.arange(0, NB * G * BITS // 8)[None, :]
            unit = tl.load(row_ptr[:, None] + place, mask=(place < row_bytes) | EVEN, other=0).to(tl.int32)
        code = spread(unit, NB * G, 4 if BITS == 6 else 8 // BITS, BITS)
        value, nan = decode_top(code, MANTISSA, MAX, MAX_CODE, SIGN_SHIFT, INTEGER, UNBIAS, -1)
        if not INTEGER and MAX_CODE < (1 << (31 - SIGN_SHIFT)) - 1:
            value = tl.where(nan, float("nan"), value)
        factor = spread_scales(factor, BN, NB, G)
        if SPLIT:
            whole, rest = split_at_one(value)
            return whole * factor, rest * factor
        else:
            return value * factor, value


@triton.jit
def add_apart(acc, dots):
    """acc + dots, in an instruction that no compiler takes into the dots, whose sums would then round otherwise."""
    if INTERPRETED:
        return acc + dots
    else:
        return tl.inline_asm_elementwise(
            "add.rn.f32 $0, $1, $2;", "=f,f,f", [acc, dots], is_pure=True, pack=1, dtype=tl.float32
        )


@triton.jit
def add_in_order(acc, dots, BN: tl.constexpr, BM: tl.constexpr, NB: tl.constexpr):
    """acc `[BN, BM]` + dots `[NB, BN, BM]`, one block after the other."""
    parts = units_of(tl.permute(dots, (1, 2, 0)), BN, BM, NB)
    for i in tl.static_range(NB):
        acc = add_apart(acc, parts[i])
    return acc


@triton.jit
def units_of(x, BN: tl.constexpr, BM: tl.constexpr, COUNT: tl.constexpr):
    """The `COUNT` tensors `[BN, BM]` of `[BN, BM, COUNT]`, in order."""
    parts = (tl.reshape(x, (BN, BM, COUNT)),)
    for level in tl.static_range(8):
        if COUNT >> level > 1:
            parts = halves(parts, 1 << level, BN, BM, COUNT >> (level + 1))
    found = ()
    for i in tl.static_range(COUNT):
        found = found + (tl.reshape(parts[i], (BN, BM)),)
    return found


@triton.jit
def halves(parts, COUNT: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, SIZE: tl.constexpr):
    """Each of `COUNT` tensors `[BN, BM, 2 * SIZE]` as its two halves along the last axis, in order."""
    out = ()
    for i in tl.static_range(COUNT):
        first, second = tl.split(tl.permute(tl.reshape(parts[i], (BN, BM, 2, SIZE)), (0, 1, 3, 2)))
        out = out + (first, second)
    return out


@triton.jit
def dots(w, x, OPERAND: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, NB: tl.constexpr, G: tl.constexpr):
    """Dots of blocks, `[NB, BN, BM]`, or `[BN, BM]` of one, from `[BN, NB * G]` and `[BM, NB * G]`."""
    w, x = w.to(OPERAND), x.to(OPERAND)
    if NB == 1:
        return tl.dot(w, tl.trans(x), input_precision="ieee")
    else:
        left = tl.permute(tl.reshape(w, (BN, NB, G)), (1, 0, 2))
        right = tl.permute(tl.reshape(x, (BM, NB, G)), (1, 2, 0))
        return tl.dot(left, right, input_precision="ieee")


@triton.jit
def only(x, mask):
    """`x` where the mask is -1, +0 where it is 0; 16-bit values as pairs."""
    if INTERPRETED:
        return tl.where(mask == 0, 0.0, x)
    else:
        mask = tl.broadcast_to(mask.to(tl.int16), x.shape)
        return tl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [x, mask], is_pure=True, pack=2, dtype=x.dtype)


@triton.jit
def dots_of_two(w, x, OPERAND: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, NB: tl.constexpr, G: tl.constexpr):
    """As `dots`, of `NB` blocks, two at a time, first with zeros for the second's x, then for the first's."""
    odd = (tl.arange(0, NB * G) // G & 1)[None, :]
    first, second = only(x.to(OPERAND), odd - 1), only(x.to(OPERAND), -odd)
    first, second = dots(w, first, OPERAND, BN, BM, NB // 2, 2 * G), dots(w, second, OPERAND, BN, BM, NB // 2, 2 * G)
    both = tl.reshape(tl.join(first, second), (NB // 2, BN, BM, 2))
    return tl.reshape(tl.permute(both, (0, 3, 1, 2)), (NB, BN, BM))


@triton.jit
def sums_of_blocks(
    row_ptr, scale_ptr, x_place, x_scale_place, x_safe, row_bytes, k_blocks, part_stride, FOLD: tl.constexpr,
    OPERAND: tl.constexpr, STAGES: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, NB: tl.constexpr, G: tl.constexpr,
    SIZE: tl.constexpr, X_SIZE: tl.constexpr, X_POWER_OF_TWO: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr,
    PAIRED: tl.constexpr, POWER_OF_TWO: tl.constexpr, SCALE_NAN: tl.constexpr, SCALE_MANTISSA: tl.constexpr,
    SCALE_UNBIAS: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr, MAX: tl.constexpr, MAX_CODE: tl.constexpr,
    SIGN_SHIFT: tl.constexpr, INTEGER: tl.constexpr, UNBIAS: tl.constexpr, EVEN: tl.constexpr, HALF: tl.constexpr,
    TWO: tl.constexpr,
):  # fmt: skip
    """Float32 `[BN, BM]`: from +0, the exact dot of each block of `G` elements with its scales, added in ascending K.
    And the lowest and highest E8M0 codes of the weights. `TWO`: blocks are multiplied two at a time."""
    acc = tl.zeros((BN, BM), tl.float32)
    x_place = x_place[:, None] + tl.arange(0, NB * G)[None, :]
    lowest, highest = tl.full((BN, NB), 127, tl.int32), tl.full((BN, NB), 127, tl.int32)
    for j in tl.range(0, k_blocks, NB, num_stages=STAGES):
        block = j + tl.arange(0, NB)[None, :]
        scale = tl.load(
            scale_ptr[:, None] + block * G // SIZE, mask=(block < k_blocks) | EVEN, other=127 if POWER_OF_TWO else 0
        ).to(tl.int32)
        if POWER_OF_TWO:
            lowest, highest = tl.minimum(lowest, scale), tl.maximum(highest, scale)
        w, w_rest = weight_values(
            row_ptr, scale, j * (G * BITS // 8), row_bytes, FOLD, SPLIT, BN, NB, G, PAIRED, POWER_OF_TWO, SCALE_NAN,
            SCALE_MANTISSA, SCALE_UNBIAS, BITS, MANTISSA, MAX, MAX_CODE, SIGN_SHIFT, INTEGER, UNBIAS, EVEN,
            HALF,
        )  # fmt: skip
        x = tl.load(x_place + j * G)
        x_rest = x
        if PARTS == 2:
            x_rest = tl.load(x_place + part_stride + j * G)
        if not FOLD and X_POWER_OF_TWO:
            x_scale = tl.load(x_scale_place[:, None] + block * G // X_SIZE).to(tl.int32)
            undo = spread_scales(tl.where(x_safe[:, None], inverse_power(x_scale), 1.0), BM, NB, G)
            x, x_rest = x.to(tl.float32) * undo, x_rest.to(tl.float32) * undo
        if TWO:
            d = dots_of_two(w, x, OPERAND, BN, BM, NB, G)
        else:
            d = dots(w, x, OPERAND, BN, BM, NB, G)
        if TWO and PARTS == 2:
            d = add_apart(d, dots_of_two(w, x_rest, OPERAND, BN, BM, NB, G))
        elif SPLIT and PARTS == 2:
            mixed = dots(w, x_rest, OPERAND, BN, BM, NB, G) + dots(w_rest, x, OPERAND, BN, BM, NB, G)  # exact
            rests = dots(w_rest, x_rest, OPERAND, BN, BM, NB, G)
            d = ((d.to(tl.float64) + mixed.to(tl.float64)) + rests.to(tl.float64)).to(tl.float32)
        elif SPLIT:
            d = add_apart(d, dots(w_rest, x, OPERAND, BN, BM, NB, G))  # the one rounding of the exact dot
        elif PARTS == 2:
            d = add_apart(d, dots(w, x_rest, OPERAND, BN, BM, NB, G))
        if not FOLD:
            first, second = 1.0, 1.0
            if POWER_OF_TWO:
                low, high = halves_of(tl.permute(tl.where(scale == SCALE_NAN, 127, scale), (1, 0))[:, :, None])
                first, second = first * low, second * high
            if X_POWER_OF_TWO:
                low, high = halves_of(tl.permute(x_scale, (1, 0))[:, None, :])
                first, second = first * high, second * low
            d = tl.reshape(d, (NB, BN, BM)) * first * second
        acc = add_apart(acc, tl.reshape(d, (BN, BM))) if NB == 1 else add_in_order(acc, d, BN, BM, NB)
    return acc, lowest, highest


@triton.jit
def expert_slots(ids_ptr, place, slots, experts, slot_of, SLOTS: tl.constexpr, BY_SLOT: tl.constexpr):
    """Of program `place` among few slots: its expert, how many slots are that expert's, the rank of each slot among them
    (or -1), all slots. `BY_SLOT`: programs count slots, and the first of an expert's has all of them, the others none."""
    ids = tl.load(ids_ptr + slot_of, mask=slot_of < slots, other=-1).to(tl.int32)
    expert = place
    if BY_SLOT:
        expert = tl.load(ids_ptr + place).to(tl.int32)
    mine = (ids == expert) & (expert >= 0) & (expert < experts)
    count = tl.sum(mine.to(tl.int32), axis=0)
    if BY_SLOT:
        first = tl.min(tl.where(mine, slot_of, SLOTS), axis=0)
        count = tl.where(first == place, count, 0)
    return expert, count, tl.where(mine, tl.cumsum(mine.to(tl.int32), axis=0) - 1, -1), slot_of


@triton.jit
def finish_slots(
    acc, slot, present, e, row, n, n_size, X_OF_SLOTS: tl.constexpr, x_stored_ptr, w_stored_ptr, bias_ptr, router_ptr,
    out_ptr, stored_expert, stored_row, bias_expert, UNIT: tl.constexpr, X_STORED: tl.constexpr,
    W_STORED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ROUTER: tl.constexpr, ROUNDED: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """Sums `[BN, BM]`, in units of `UNIT`, times tensor scales, with bias and router weight, stored as out[slot, n]."""
    alpha = 1.0
    if X_STORED != "none":
        x_stored = tl.load(x_stored_ptr + slot // X_OF_SLOTS, mask=present, other=1.0)
        alpha = (tl.div_rn(1.0, x_stored) if X_STORED == "divide" else x_stored)[None, :]
    if W_STORED != "none":
        w_stored = tl.load(w_stored_ptr + e * stored_expert + row * stored_row)
        alpha = alpha * (tl.div_rn(1.0, w_stored) if W_STORED == "divide" else w_stored)[:, None]
    acc = alpha * (acc * UNIT)
    if HAS_BIAS:
        acc = acc + widen(tl.load(bias_ptr + e * bias_expert + row))[:, None]
    if HAS_ROUTER:
        acc = widen(narrow(acc, tl.float32)) * tl.load(router_ptr + slot, mask=present, other=0.0)[None, :]
        acc = widen(narrow(acc, ROUNDED))
    inside = (n < n_size)[:, None] & present[None, :]
    tl.store(out_ptr + slot.to(tl.int64)[None, :] * n_size + n[:, None], narrow(acc, STORED), mask=inside)


@triton.jit
def experts_product_kernel(
    x_ptr, x_scales_ptr, x_stored_ptr, x_safe_ptr, w_ptr, w_scales_ptr, w_stored_ptr, bias_ptr, out_ptr, ids_ptr,
    router_ptr, order_ptr, tiles_ptr, slots, experts, n_size, k_blocks, row_bytes, x_row, part_stride,
    w_expert, w_row, scales_expert, scales_row, stored_expert, stored_row, bias_expert,
    SLOTS: tl.constexpr, BY_SLOT: tl.constexpr, X_OF_SLOTS: tl.constexpr, SCALE_ROWS: tl.constexpr,
    X_STORED: tl.constexpr, W_STORED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ROUTER: tl.constexpr,
    ROUNDED: tl.constexpr, STORED: tl.constexpr,
    OPERAND: tl.constexpr, STAGES: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, NB: tl.constexpr, G: tl.constexpr,
    SIZE: tl.constexpr, X_SIZE: tl.constexpr, X_POWER_OF_TWO: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr,
    PAIRED: tl.constexpr, POWER_OF_TWO: tl.constexpr, SCALE_NAN: tl.constexpr, SCALE_MANTISSA: tl.constexpr,
    SCALE_UNBIAS: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr, MAX: tl.constexpr, MAX_CODE: tl.constexpr,
    SIGN_SHIFT: tl.constexpr, INTEGER: tl.constexpr, UNBIAS: tl.constexpr, EVEN: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """`BN` rows of one expert's weights with rows of the slots that are its: out[slot, n].

    Few slots (`SLOTS` > 0, a power of two that holds them): a program finds its expert's slots among all of them, takes them
    `BM` at a time, and reads its weights from memory once; `BY_SLOT`: programs count slots, and the first of an expert's
    works. Many: a program has `BM` slots from `order_ptr`, as `tiles_ptr` says. Row slot // `X_OF_SLOTS` of x is the slot's.
    """
    launch_next()
    wait_for_previous()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    place = tl.program_id(1)
    unit = tl.arange(0, BM)
    if SLOTS > 0:
        expert, count, rank, slot_of = expert_slots(ids_ptr, place, slots, experts, tl.arange(0, SLOTS), SLOTS, BY_SLOT)
        start = 0
    else:
        expert = tl.load(tiles_ptr + 3 * place)
        start = tl.load(tiles_ptr + 3 * place + 1)
        count = tl.load(tiles_ptr + 3 * place + 2)
    TWO: tl.constexpr = PAIRED and G < PAIRED_SIZE and NB > 1
    if count > 0:
        e = expert.to(tl.int64)
        row = tl.minimum(n, n_size - 1).to(tl.int64)
        row_ptr = w_ptr + e * w_expert + row * w_row
        scale_ptr = w_scales_ptr + e * scales_expert + row // SCALE_ROWS * scales_row
        for first_rank in range(0, count, BM):
            present = first_rank + unit < count
            if SLOTS > 0:
                found = rank[None, :] == (first_rank + unit)[:, None]
                slot = tl.sum(tl.where(found, slot_of[None, :], 0), axis=1)
            else:
                slot = tl.load(order_ptr + start + first_rank + unit, mask=present, other=0)
            x_of = (slot // X_OF_SLOTS).to(tl.int64)
            x_place = x_ptr + x_of * x_row
            x_scale_place = x_scales_ptr + x_of * (x_row // X_SIZE)
            x_safe = tl.load(x_safe_ptr + x_of, mask=present, other=1)
            acc, lowest, highest = sums_of_blocks(
                row_ptr, scale_ptr, x_place, x_scale_place, x_safe == 1, row_bytes, k_blocks, part_stride, True, OPERAND,
                STAGES, BN, BM, NB, G, SIZE, X_SIZE, X_POWER_OF_TWO, PARTS, SPLIT, PAIRED, POWER_OF_TWO, SCALE_NAN,
                SCALE_MANTISSA, SCALE_UNBIAS, BITS, MANTISSA, MAX, MAX_CODE, SIGN_SHIFT, INTEGER, UNBIAS, EVEN, HALF,
                TWO,
            )  # fmt: skip
            if POWER_OF_TWO or X_POWER_OF_TWO:
                safe = tl.min(x_safe, axis=0) == 1
                if POWER_OF_TWO:
                    safe = safe & (tl.min(tl.min(lowest, axis=1), axis=0) >= SAFE_LOW)
                    safe = safe & (tl.max(tl.max(highest, axis=1), axis=0) <= SAFE_HIGH)
                if safe == 0:  # what was computed means nothing: again, unscaled
                    acc, _lowest, _highest = sums_of_blocks(
                        row_ptr, scale_ptr, x_place, x_scale_place, x_safe == 1, row_bytes, k_blocks, part_stride, False,
                        OPERAND, 1, BN, BM, 2 if TWO else 1, G, SIZE, X_SIZE, X_POWER_OF_TWO, PARTS, SPLIT, PAIRED,
                        POWER_OF_TWO, SCALE_NAN, SCALE_MANTISSA, SCALE_UNBIAS, BITS, MANTISSA, MAX, MAX_CODE, SIGN_SHIFT,
                        INTEGER, UNBIAS, EVEN, HALF, TWO,
                    )  # fmt: skip
            finish_slots(
                acc, slot, present, e, row, n, n_size, X_OF_SLOTS, x_stored_ptr, w_stored_ptr, bias_ptr, router_ptr, out_ptr,
                stored_expert, stored_row, bias_expert, HALF_SHIFT if HALF else 1.0, X_STORED, W_STORED, HAS_BIAS,
                HAS_ROUTER, ROUNDED, STORED,
            )  # fmt: skip


@triton.jit
def sort_slots_kernel(ids_ptr, order_ptr, tiles_ptr, slots, experts, TILE: tl.constexpr, BM: tl.constexpr):
    """Program e: where expert e's slots lie among all in ascending expert order, and its tiles of `BM` slots:
    (expert, first place, count), from number first place // BM + e on, count 0 in those that stay empty."""
    e = tl.program_id(0)
    unit = tl.arange(0, TILE)
    before = tl.zeros((), tl.int32)
    own = tl.zeros((), tl.int32)
    for s in range(0, slots, TILE):
        ids = tl.load(ids_ptr + s + unit, mask=s + unit < slots, other=-1).to(tl.int32)
        before += tl.sum(((ids >= 0) & (ids < e) & (ids < experts)).to(tl.int32), axis=0)
        own += tl.sum(((ids == e) & (e < experts)).to(tl.int32), axis=0)
    place = before
    for s in range(0, slots, TILE):
        ids = tl.load(ids_ptr + s + unit, mask=s + unit < slots, other=-1).to(tl.int32)
        mine = (ids == e) & (e < experts)
        rank = tl.cumsum(mine.to(tl.int32), axis=0)
        tl.store(order_ptr + place + rank - 1, s + unit, mask=mine)
        place += tl.sum(mine.to(tl.int32), axis=0)
    first_tile = before // BM + e
    end = tl.where(e < experts, (before + own) // BM + e + 1, slots // BM + experts)
    for tile in range(first_tile, end):
        start = before + (tile - first_tile) * BM
        tl.store(tiles_ptr + 3 * tile, e)
        tl.store(tiles_ptr + 3 * tile + 1, start)
        tl.store(tiles_ptr + 3 * tile + 2, tl.minimum(tl.maximum(before + own - start, 0), BM))


@triton.jit
def combine_kernel(
    terms_ptr, ids_ptr, out_ptr, experts, n_size, TOP_K: tl.constexpr, TILE: tl.constexpr, STORED: tl.constexpr
):
    """out[token] = from +0, the token's slot terms added in ascending order; +0 for slots of foreign experts."""
    wait_for_previous()
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.float32)
    for i in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + token * TOP_K + i)
        term = tl.load(terms_ptr + (token * TOP_K + i) * n_size + n, mask=n < n_size, other=0.0)
        total += tl.where((expert >= 0) & (expert < experts), term, 0.0)  # loaded at once with the expert, not after
    tl.store(out_ptr + token * n_size + n, narrow(total, STORED), mask=n < n_size)
