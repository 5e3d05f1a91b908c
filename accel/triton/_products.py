"""The product kernels: exact block dots, scaled, added in float32 in ascending K; then alpha, bias and one rounding.

`product_kernel` takes every pair of formats, straight from packed codes. `fold_kernel` writes decoded operands, with block
scales folded in where no bit can be lost (`matmul.py` says when); `folded_product_kernel` multiplies those, on Hopper the
kernel of `_warpgroups.py`. A dot begins at zero, and what it gives is added outside: the compiler may not add inside of it.
"""

import triton
import triton.language as tl

from accel.triton._packing import load_codes
from accel.triton._places import exists, places
from accel.triton._tiles import NAN, decode_magnitude, decode_power, decode_top, float_of, halves_of, narrow, widen

# ---- what all products share ----------------------------------------------------------------------------------------


@triton.jit
def tile_of(program, row_tiles, column_tiles, GROUP: tl.constexpr):
    """(row, column) of the tile of a program: `GROUP` rows of tiles at a time, so that what they read stays in cache."""
    in_group = GROUP * column_tiles
    first = program // in_group * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    return first + program % in_group % height, program % in_group // height


@triton.jit
def tensor_factor(pointer, index, present, stride, SCALE: tl.constexpr):
    """What products are multiplied by for a tensor scale, one number an index or, with stride 0, for all. `SCALE`: "none",
    "multiply" or "divide"."""
    if SCALE == "none":
        return index.to(tl.float32) * 0.0 + 1.0
    else:
        scale = tl.load(pointer + index * stride, mask=present, other=1.0)
        return tl.div_rn(scale * 0.0 + 1.0, scale) if SCALE == "divide" else scale


@triton.jit
def finished(
    acc, m, n, rows, columns, a_scale_ptr, b_scale_ptr, bias_ptr, a_scale_stride, b_scale_stride, bias_stride,
    A_SCALE: tl.constexpr, B_SCALE: tl.constexpr, BIAS: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """alpha * acc + bias of rows `m` and columns `n` of C, rounded once to what is stored, every NaN canonical."""
    value = acc
    if A_SCALE != "none" or B_SCALE != "none":
        a_factor = tensor_factor(a_scale_ptr, m, m < rows, a_scale_stride, A_SCALE)
        b_factor = tensor_factor(b_scale_ptr, n, n < columns, b_scale_stride, B_SCALE)
        value = (a_factor[:, None] * b_factor[None, :]) * value
    if BIAS:
        value = value + widen(tl.load(bias_ptr + n * bias_stride, mask=n < columns, other=0))[None, :]
    return narrow(value, STORED)


# ---- from packed codes ----------------------------------------------------------------------------------------------


@triton.jit
def load_elements(
    codes_ptr, row, rows, block, row_bytes, stride, ROWS: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr,
    BITS: tl.constexpr, MANTISSA: tl.constexpr, MAX: tl.constexpr, MAX_CODE: tl.constexpr, SIGN_SHIFT: tl.constexpr,
    INTEGER: tl.constexpr, UNBIAS: tl.constexpr, INF_CODE: tl.constexpr,
):  # fmt: skip
    """Float32 elements `[ROWS, SIZE]` of one block of each row, zeros where there is none."""
    start = block * (SIZE * BITS // 8)
    word = load_codes(
        codes_ptr + start, row, rows, 1, 1, row_bytes - start, 1, stride, 1, 0, ROWS, 1, SIZE, WHOLE, "none", False, BITS
    )
    value, nan = decode_top(word, MANTISSA, MAX, MAX_CODE, SIGN_SHIFT, INTEGER, UNBIAS, INF_CODE)
    return value if INTEGER or BITS < 8 else tl.where(nan, float_of(tl.full((), NAN, tl.int32)), value)


@triton.jit
def apply_scales(
    product, a_scale, b_scale, A_POWER: tl.constexpr, A_MANTISSA: tl.constexpr, A_UNBIAS: tl.constexpr, A_NAN: tl.constexpr,
    B_POWER: tl.constexpr, B_MANTISSA: tl.constexpr, B_UNBIAS: tl.constexpr, B_NAN: tl.constexpr,
):  # fmt: skip
    """Products `[M, N]` times both block scales: those with a mantissa first, then the power of two, in two exact halves,
    each the smaller half of one scale times the larger of the other, 2^-127 to 2^127."""
    if not A_POWER:
        product = product * decode_magnitude(a_scale, A_MANTISSA, False, A_UNBIAS)[:, None]
    if not B_POWER:
        product = product * decode_magnitude(b_scale, B_MANTISSA, False, B_UNBIAS)[None, :]
    if A_POWER and B_POWER:
        a_low, a_high = halves_of(a_scale)
        b_low, b_high = halves_of(b_scale)
        product = product * (a_low[:, None] * b_high[None, :]) * (a_high[:, None] * b_low[None, :])
    elif A_POWER:
        low, high = halves_of(a_scale)
        product = product * low[:, None] * high[:, None]
    elif B_POWER:
        low, high = halves_of(b_scale)
        product = product * low[None, :] * high[None, :]
    nan = (a_scale == A_NAN)[:, None] | (b_scale == B_NAN)[None, :]
    return tl.where(nan, float_of(tl.full((), NAN, tl.int32)), product)


@triton.jit
def add_to_odd(a, b):
    """a + b in float64, rounded to odd: an inexact sum becomes the neighbour whose last bit is 1."""
    total = a + b
    b_part = total - a
    error = (a - (total - b_part)) + (b - b_part)
    bits = total.to(tl.int64, bitcast=True)
    step = tl.where((error > 0) == (total > 0), 1, -1)
    return tl.where((error != 0) & (bits & 1 == 0), bits + step, bits).to(tl.float64, bitcast=True)


@triton.jit
def split_dot(x, y):
    """Dots of float64 `[M, K]` and `[K, N]` whose range exceeds float64's significand, correctly rounded to float32: split
    at |x| = 1, the high, mixed and low sums are each exact."""
    whole = tl.dot(x, y, out_dtype=tl.float64)  # rounded, but it knows NaN and Inf
    x, y = tl.where(tl.abs(x) < float("inf"), x, 0.0), tl.where(tl.abs(y) < float("inf"), y, 0.0)
    x_high, y_high = tl.where(tl.abs(x) < 1.0, 0.0, x), tl.where(tl.abs(y) < 1.0, 0.0, y)
    x_low, y_low = x - x_high, y - y_high
    mixed = tl.dot(x_high, y_low, out_dtype=tl.float64) + tl.dot(x_low, y_high, out_dtype=tl.float64)
    total = add_to_odd(tl.dot(x_high, y_high, out_dtype=tl.float64), mixed)
    total = add_to_odd(total, tl.dot(x_low, y_low, out_dtype=tl.float64))
    return tl.where(tl.abs(whole) < float("inf"), total, whole).to(tl.float32)


@triton.jit
def as_float64(x):
    """Float64 values; by way of a sum of single elements, since the compiler fails where it sees that they were bytes."""
    return tl.sum(tl.reshape(x, (x.shape[0], x.shape[1], 1)), axis=2).to(tl.float64)


@triton.jit
def exact_dot(x, y, METHOD: tl.constexpr):
    """Dots of float32 elements `[M, K]` and `[N, K]`, rounded once to float32; of "float16" nothing is left to round."""
    if METHOD == "float16":
        return tl.dot(x.to(tl.float16), tl.trans(y.to(tl.float16)))
    elif METHOD == "float64":
        return tl.dot(as_float64(x), tl.trans(as_float64(y)), out_dtype=tl.float64).to(tl.float32)
    else:
        return split_dot(as_float64(x), tl.trans(as_float64(y)))


@triton.jit
def product_kernel(
    a_ptr, a_scales_ptr, b_ptr, b_scales_ptr, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, a_flags_ptr, b_flags_ptr,
    rows, columns, blocks, a_bytes, b_bytes, a_stride, b_stride, a_blocks, b_blocks, one,
    a_scale_stride, b_scale_stride, bias_stride,
    M: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, WHOLE: tl.constexpr, IF_FLAGGED: tl.constexpr,
    METHOD: tl.constexpr, A_SCALE: tl.constexpr, B_SCALE: tl.constexpr, BIAS: tl.constexpr, STORED: tl.constexpr,
    A_SIZE: tl.constexpr, A_POWER: tl.constexpr, A_SCALE_MANTISSA: tl.constexpr, A_SCALE_UNBIAS: tl.constexpr,
    A_NAN: tl.constexpr, A_BITS: tl.constexpr, A_MANTISSA: tl.constexpr, A_MAX: tl.constexpr, A_MAX_CODE: tl.constexpr,
    A_SIGN_SHIFT: tl.constexpr, A_INTEGER: tl.constexpr, A_UNBIAS: tl.constexpr, A_INF_CODE: tl.constexpr,
    B_SIZE: tl.constexpr, B_POWER: tl.constexpr, B_SCALE_MANTISSA: tl.constexpr, B_SCALE_UNBIAS: tl.constexpr,
    B_NAN: tl.constexpr, B_BITS: tl.constexpr, B_MANTISSA: tl.constexpr, B_MAX: tl.constexpr, B_MAX_CODE: tl.constexpr,
    B_SIGN_SHIFT: tl.constexpr, B_INTEGER: tl.constexpr, B_UNBIAS: tl.constexpr, B_INF_CODE: tl.constexpr,
):  # fmt: skip
    """A tile `[M, N]` of C from packed codes; with `IF_FLAGGED`, only if its rows or its columns have a flag."""
    row_tile, column_tile = tile_of(tl.program_id(0), tl.cdiv(rows, M), tl.cdiv(columns, N), GROUP)
    if IF_FLAGGED:
        a_flag = tl.load(a_flags_ptr + row_tile * M // FLAG_ROWS)
        if a_flag + tl.load(b_flags_ptr + column_tile * N // FLAG_ROWS) == 0:
            return
    m, n = row_tile * M + tl.arange(0, M), column_tile * N + tl.arange(0, N)
    acc = tl.zeros((M, N), tl.float32)
    for block in range(blocks):
        x = load_elements(
            a_ptr, m, rows, block, a_bytes, a_stride, M, SIZE, WHOLE, A_BITS, A_MANTISSA, A_MAX, A_MAX_CODE, A_SIGN_SHIFT,
            A_INTEGER, A_UNBIAS, A_INF_CODE,
        )  # fmt: skip
        y = load_elements(
            b_ptr, n, columns, block, b_bytes, b_stride, N, SIZE, WHOLE, B_BITS, B_MANTISSA, B_MAX, B_MAX_CODE, B_SIGN_SHIFT,
            B_INTEGER, B_UNBIAS, B_INF_CODE,
        )  # fmt: skip
        a_place = a_scales_ptr + m.to(tl.int64) * a_blocks + block // (A_SIZE // SIZE)
        b_place = b_scales_ptr + n.to(tl.int64) * b_blocks + block // (B_SIZE // SIZE)
        a_scale = tl.load(a_place, mask=m < rows, other=0).to(tl.int32)
        b_scale = tl.load(b_place, mask=n < columns, other=0).to(tl.int32)
        dot = exact_dot(x, y, METHOD) * one
        acc += apply_scales(
            dot, a_scale, b_scale, A_POWER, A_SCALE_MANTISSA, A_SCALE_UNBIAS, A_NAN,
            B_POWER, B_SCALE_MANTISSA, B_SCALE_UNBIAS, B_NAN,
        )  # fmt: skip
    value = finished(
        acc, m, n, rows, columns, a_scale_ptr, b_scale_ptr, bias_ptr, a_scale_stride, b_scale_stride, bias_stride,
        A_SCALE, B_SCALE, BIAS, STORED,
    )  # fmt: skip
    place = c_ptr + m.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(place, value, mask=(m < rows)[:, None] & (n < columns)[None, :])


FLAG_ROWS = tl.constexpr(64)  # of an operand that share a flag: no fewer than a tile of `product_kernel` has

# ---- from folded operands -------------------------------------------------------------------------------------------


@triton.jit
def fold_kernel(
    codes_ptr, scales_ptr, out_ptr, flags_ptr, blocks, k_blocks, row_blocks, k_size, rows,
    codes_size, codes_matrix, codes_k, codes_row, out_matrix, out_k, out_row,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr, RUN: tl.constexpr,
    RUN_OUT: tl.constexpr, ROWS_FIRST: tl.constexpr, STORED: tl.constexpr,
    POWER: tl.constexpr, SCALE_NAN: tl.constexpr, SCALE_MANTISSA: tl.constexpr, SCALE_UNBIAS: tl.constexpr,
    LOWEST_SCALE: tl.constexpr, HIGHEST_SCALE: tl.constexpr,
    BITS: tl.constexpr, MANTISSA: tl.constexpr, MAX: tl.constexpr, MAX_CODE: tl.constexpr, SIGN_SHIFT: tl.constexpr,
    INTEGER: tl.constexpr, UNBIAS: tl.constexpr, INF_CODE: tl.constexpr,
):  # fmt: skip
    """Elements times their block scales. Rows are flagged that have a block, not zero, whose scale may not be folded."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    inside = exists(block, blocks)
    word = load_codes(
        codes_ptr, block, blocks, k_blocks, row_blocks, codes_size, rows, codes_matrix, codes_k, codes_row,
        BLOCKS, ROWS, SIZE, WHOLE, RUN, ROWS_FIRST, BITS,
    )  # fmt: skip
    scale = tl.load(scales_ptr + block, mask=inside, other=127).to(tl.int32)
    factor = decode_power(scale) if POWER else decode_magnitude(scale, SCALE_MANTISSA, False, SCALE_UNBIAS)
    factor = tl.where(scale == SCALE_NAN, float_of(tl.full((), NAN, tl.int32)), factor)
    element, nan = decode_top(word, MANTISSA, MAX, MAX_CODE, SIGN_SHIFT, INTEGER, UNBIAS, INF_CODE)
    if POWER:
        unfit = inside & ((scale < LOWEST_SCALE) | (scale > HIGHEST_SCALE)) & (scale != SCALE_NAN)
        if tl.max(unfit.to(tl.int32), axis=0) > 0:
            largest = tl.max(tl.abs(element), axis=1)
            tl.store(flags_ptr + block // k_blocks // FLAG_ROWS, 1, mask=unfit & (largest > 0.0))
    value = element * factor[:, None]
    if not INTEGER and BITS == 8:
        value = tl.where(nan, float_of(tl.full((), NAN, tl.int32)), value)
    offsets, present = places(
        block, blocks, k_blocks, row_blocks, k_size, rows, out_matrix, out_k, out_row, 0, 1, BLOCKS, ROWS, SIZE, WHOLE,
        RUN_OUT, ROWS_FIRST,
    )  # fmt: skip
    tl.store(out_ptr + offsets, value.to(tl.float64) if STORED == tl.float64 else narrow(value, STORED), mask=present)


FLOAT8_EXPONENTS = tl.constexpr(27)  # of FP4 elements times a power of two that float8 e5m2 holds as normal numbers


@triton.jit
def fold_float8_kernel(
    codes_ptr, scales_ptr, out_ptr, powers_ptr, flags_ptr, k_blocks, codes_row, scales_row,
    BLOCKS: tl.constexpr, LOWEST_SCALE: tl.constexpr, HIGHEST_SCALE: tl.constexpr, SCALE_NAN: tl.constexpr,
):  # fmt: skip
    """A row of FP4 elements times E8M0 scales, as float8 e5m2, and the power of two with which the row is yet to be
    multiplied, that of its largest scale. Flags the row if a block that is not zero has a scale that may not be folded.

    Of a block's 32 elements those of even number come first, then the others: their dot is the same in any order. Codes are
    words of eight, and written are words of four."""
    row = tl.program_id(0).to(tl.int64)
    block, part = tl.arange(0, BLOCKS), tl.arange(0, 4)
    scales_ptr += row * scales_row
    codes_ptr += row * codes_row
    out_ptr += row * k_blocks * 8
    largest = tl.full((BLOCKS,), LOWEST_SCALE, tl.int32)
    for first in range(0, k_blocks, BLOCKS):
        scale = tl.load(scales_ptr + first + block, mask=first + block < k_blocks, other=0).to(tl.int32)
        largest = tl.maximum(largest, tl.where(scale == SCALE_NAN, 0, scale))
    largest = tl.minimum(tl.max(largest, axis=0), HIGHEST_SCALE)
    tl.store(powers_ptr + row, float_of((largest - 13) << 23))
    for first in range(0, k_blocks, BLOCKS):
        inside = first + block < k_blocks
        scale = tl.load(scales_ptr + first + block, mask=inside, other=127).to(tl.int32)
        place = (first + block)[:, None] * 4 + part[None, :]
        words = tl.load(codes_ptr + place, mask=inside[:, None], other=0)
        nan = scale == SCALE_NAN
        exponent = scale - largest + FLOAT8_EXPONENTS
        unfit = (exponent < 1) | (scale < LOWEST_SCALE) | (scale > HIGHEST_SCALE)
        unfit = inside & unfit & ~nan
        if tl.max(unfit.to(tl.int32), axis=0) > 0:
            filled = tl.max(((words & 0x77777777) != 0).to(tl.int32), axis=1)
            tl.store(flags_ptr + row // FLAG_ROWS, 1, mask=tl.max(unfit.to(tl.int32) * filled, axis=0) > 0)
        exponent = tl.where(unfit, 0, exponent)
        place = (first + block)[:, None] * 8 + part[None, :]
        even = float8_of(words & 0x0F0F0F0F, exponent, nan)
        odd = float8_of((words >> 4) & 0x0F0F0F0F, exponent, nan)
        tl.store(out_ptr + place, even, mask=inside[:, None])
        tl.store(out_ptr + place + 4, odd, mask=inside[:, None])


@triton.jit
def float8_of(codes, exponent, nan):
    """Four FP4 codes, in the bytes of words `[BLOCKS, N]`, as float8 e5m2: 0.5 gets a block's `exponent` as its field."""
    below_one, from_one = codes & 0x01010101, ((codes >> 1) | (codes >> 2)) & 0x01010101
    fields = ((codes & 0x07070707) << 1) - ((below_one & ~from_one) << 1)  # of 0.5 and 1 the lowest: no bit of a mantissa
    value = fields + (below_one | from_one) * (exponent[:, None] << 2)
    return tl.where(nan[:, None], 0x7F7F7F7F, ((codes & 0x08080808) << 4) | value)


@triton.jit
def folded_product_kernel(
    a_ptr, b_ptr, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, rows, columns, k_size, blocks, stride, one,
    a_scale_stride, b_scale_stride, bias_stride,
    M: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, WHOLE: tl.constexpr,
    A_SCALE: tl.constexpr, B_SCALE: tl.constexpr, BIAS: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """A tile `[M, N]` of C from folded operands; of rows that were flagged it means nothing."""
    row_tile, column_tile = tile_of(tl.program_id(0), tl.cdiv(rows, M), tl.cdiv(columns, N), GROUP)
    m, n, k = row_tile * M + tl.arange(0, M), column_tile * N + tl.arange(0, N), tl.arange(0, SIZE)
    a_places = a_ptr + tl.where(m < rows, m, 0).to(tl.int64)[:, None] * stride + k[None, :]
    b_places = b_ptr + tl.where(n < columns, n, 0).to(tl.int64)[None, :] * stride + k[:, None]
    acc = tl.zeros((M, N), tl.float32)
    for block in range(blocks):
        if WHOLE:
            x, y = tl.load(a_places), tl.load(b_places)
        else:
            left = k_size - block * SIZE
            x = tl.load(a_places, mask=k[None, :] < left, other=0.0)
            y = tl.load(b_places, mask=k[:, None] < left, other=0.0)
        if x.dtype == tl.float64:
            acc += tl.dot(x, y, out_dtype=tl.float64).to(tl.float32)
        else:
            acc = tl.fma(tl.dot(x, y, input_precision="ieee"), one, acc)  # one: so that the sum stays outside the dot
        a_places += SIZE
        b_places += SIZE
    value = finished(
        acc, m, n, rows, columns, a_scale_ptr, b_scale_ptr, bias_ptr, a_scale_stride, b_scale_stride, bias_stride,
        A_SCALE, B_SCALE, BIAS, STORED,
    )  # fmt: skip
    place = c_ptr + m.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(place, value, mask=(m < rows)[:, None] & (n < columns)[None, :])
