"""The block kernels: encode, decode, largest magnitude, Hadamard rotation. `_places.py` says what a program takes."""

import triton
import triton.language as tl

from accel.triton._activations import activated, pattern_of
from accel.triton._packing import load_codes, store_codes
from accel.triton._places import at, exists, find, first_block, places, run_start
from accel.triton._tiles import (
    FLOAT_MAX,
    INF,
    INTERPRETED,
    MAGNITUDE,
    bits_of,
    decode_magnitude,
    decode_power,
    decode_top,
    float_of,
    inverse_power,
    launch_next,
    nan_of,
    narrow,
    narrow_numbers,
    nearest_code,
    quotient_code,
    reciprocal,
    round_to_code,
    round_to_step,
    scale_code,
    sign_of,
    special_value,
    step_code,
    wait_for_previous,
    widen,
)


@triton.jit
def load_words(x_ptr, start, inside, BLOCKS: tl.constexpr, WORDS: tl.constexpr, EIGHT: tl.constexpr):
    """Int32 words `[BLOCKS, WORDS]` of blocks that are a run of memory; `EIGHT`: eight in a row for each thread."""
    if not EIGHT:
        place = tl.arange(0, BLOCKS)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
        return tl.load(at(x_ptr, start, place), mask=inside[:, None], other=0)
    unit = tl.arange(0, WORDS // 2)
    place = x_ptr + start + (tl.arange(0, BLOCKS)[:, None] * WORDS + (unit // 4 * 8 + unit % 4)[None, :])
    low, high = tl.load(place, mask=inside[:, None], other=0), tl.load(place + 4, mask=inside[:, None], other=0)
    both = tl.permute(tl.reshape(tl.join(low, high), (BLOCKS, WORDS // 8, 4, 2)), (0, 1, 3, 2))
    return tl.reshape(both, (BLOCKS, WORDS))


@triton.jit
def load_activated(x_ptr, up_ptr, start, inside, table_ptr, alpha, limit, BLOCKS: tl.constexpr, WORDS: tl.constexpr,
                   FOURS: tl.constexpr, NAME: tl.constexpr, GATED: tl.constexpr):  # fmt: skip
    """Activations `[BLOCKS, words, 2]` of the pairs of blocks that are a run of memory; `FOURS`: of every other four words.
    The first axis of what is loaded lies along memory: so a look-up stays with the threads that have its words."""
    unit = tl.arange(0, WORDS // 2 if FOURS else WORDS)
    place = (unit // 4 * 8 + unit % 4 if FOURS else unit)[:, None] + tl.arange(0, BLOCKS)[None, :] * WORDS
    word = tl.load(at(x_ptr, start, place), mask=inside[None, :], other=0)
    up = tl.load(at(up_ptr, start, place), mask=inside[None, :], other=0) if GATED else word
    low, high = float_of(word << 16), float_of(word & -65536)
    low = activated(low, word, float_of(up << 16), table_ptr, alpha, limit, NAME, GATED, tl.int16)
    high = activated(high, word >> 16, float_of(up & -65536), table_ptr, alpha, limit, NAME, GATED, tl.int16)
    return tl.join(tl.trans(low), tl.trans(high))


@triton.jit
def load_values(
    x_ptr, up_ptr, table_ptr, block, blocks, k_blocks, row_blocks, k_size, rows, stride_matrix, stride_k, stride_row,
    alpha, limit, BLOCKS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr, RUN: tl.constexpr,
    ROWS_FIRST: tl.constexpr, ACTIVATION: tl.constexpr, SIXTEEN: tl.constexpr,
):  # fmt: skip
    """Float32 values of the elements, 0 where there is none; with an activation, of it. A pointer to int32 is to pairs of
    bfloat16; `SIXTEEN`: as many of them in a row for each thread, if a block has as many."""
    plain: tl.constexpr = ACTIVATION == "none"
    gated: tl.constexpr = not plain and ACTIVATION != "relu2"
    if x_ptr.dtype.element_ty == tl.int32:
        words: tl.constexpr = SIZE // 2
        eight: tl.constexpr = SIXTEEN and words >= 8
        start, inside = run_start(k_blocks, stride_matrix, BLOCKS, words, RUN), exists(block, blocks)
        if plain:
            word = load_words(x_ptr, start, inside, BLOCKS, words, eight)
            values = tl.join(float_of(word << 16), float_of(word & -65536))
        else:
            values = load_activated(
                x_ptr, up_ptr, start, inside, table_ptr, alpha, limit, BLOCKS, words, eight, ACTIVATION, gated
            )
            if eight:
                others = load_activated(
                    x_ptr, up_ptr, start + 4, inside, table_ptr, alpha, limit, BLOCKS, words, True, ACTIVATION, gated,
                )  # fmt: skip
                fours: tl.constexpr = (BLOCKS, words // 8, 4, 2)
                values = tl.permute(tl.join(tl.reshape(values, fours), tl.reshape(others, fours)), (0, 1, 4, 2, 3))
        return tl.reshape(values, (BLOCKS, SIZE))
    else:
        offsets, present = places(
            block, blocks, k_blocks, row_blocks, k_size, rows, stride_matrix, stride_k, stride_row, 0, 1,
            BLOCKS, ROWS, SIZE, WHOLE, RUN, ROWS_FIRST,
        )  # fmt: skip
        x = tl.load(x_ptr + offsets, mask=present, other=0)
        if plain:
            return widen(x)
        up = tl.load(up_ptr + offsets, mask=present, other=0) if gated else x
        stored: tl.constexpr = x_ptr.dtype.element_ty
        return activated(widen(x), pattern_of(x), widen(up), table_ptr, alpha, limit, ACTIVATION, gated, stored)


@triton.jit
def inverse_of(one, x, BRANCH: tl.constexpr):
    """one / x, of 1.0 and float32 from 0 to Inf: fewer instructions with a branch, no time beside others without."""
    return tl.div_rn(one, x) if BRANCH else reciprocal(x)


@triton.jit
def scales_of(given, SOURCE: tl.constexpr, ORDER: tl.constexpr, LARGEST: tl.constexpr, BRANCH: tl.constexpr):
    """(stored, forward) tensor scales, of each block or one for all: given, or from the largest magnitude."""
    one, largest = given * 0.0 + 1.0, given * 0.0 + LARGEST
    if SOURCE == "given":
        stored = given
        forward = tl.minimum(inverse_of(one, given, BRANCH), FLOAT_MAX) if ORDER == "nvidia" else given
    elif ORDER == "exact":
        ratio = tl.div_rn(given, largest)
        smallest = float_of((given * 0.0).to(tl.int32) + 1)
        stored = tl.where(given == 0.0, 1.0, tl.where(ratio == 0.0, smallest, ratio))
        forward = stored
    else:
        forward = tl.where(given == 0.0, 1.0, tl.minimum(tl.div_rn(largest, given), FLOAT_MAX))
        stored = tl.minimum(tl.div_rn(one, forward), FLOAT_MAX) if ORDER == "nvidia" else forward
    return stored, forward


@triton.jit
def raw_scale(amax, forward, ORDER: tl.constexpr, SIXTH: tl.constexpr):
    """Block scales before they are rounded, from block maxima, in the recipe's order."""
    if ORDER == "nvidia":
        return amax * (forward * SIXTH)
    else:
        return forward * (amax * SIXTH)


@triton.jit
def multiplier(scale, stored, forward, ORDER: tl.constexpr, BRANCH: tl.constexpr):
    """What elements are multiplied by before their codes are taken, from the decoded block scale."""
    one = tl.full(scale.shape, 1.0, tl.float32)
    if ORDER == "nvidia":
        inverse = tl.minimum(inverse_of(one, scale * stored, BRANCH), FLOAT_MAX)
        return tl.where(scale == 0.0, 0.0, inverse)
    elif ORDER == "vllm_torch":
        product = scale * tl.div_rn(one, forward * one)
        return tl.div_rn(one, tl.where(product == 0.0, 1e8, product))
    else:
        return tl.where(scale == 0.0, 0.0, tl.div_rn(forward * one, tl.where(scale == 0.0, 1.0, scale)))


@triton.jit
def combined(scale, stored, DIVIDE: tl.constexpr):
    """What decoded elements are multiplied by: block scale and tensor scale."""
    return tl.div_rn(scale, stored + scale * 0.0) if DIVIDE else scale * stored


@triton.jit
def larger_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def sum_in_order(terms, COUNT: tl.constexpr):
    """Sums of rows `[BLOCKS, COUNT]` of numbers >= 0, from the first element to the last."""
    unit = tl.arange(0, COUNT)[None, :]
    total = tl.sum(tl.where(unit == 0, terms, 0.0), axis=1)
    for i in range(1, COUNT):
        total += tl.sum(tl.where(unit == i, terms, 0.0), axis=1)
    return total


@triton.jit
def store_values(pointer, offsets, present, poisoned, nan, value, may_be_nan, NAN: tl.constexpr, STORED: tl.constexpr):
    """Store decoded values, the canonical NaN in poisoned blocks and, where `NAN`, for the elements `nan`. `may_be_nan`:
    whether there are other NaN among the values."""
    good = present & (poisoned == 0)[:, None]
    if may_be_nan:
        tl.store(pointer + offsets, narrow(tl.where(nan, float("nan"), value) if NAN else value, STORED), mask=good)
    else:
        stored = narrow_numbers(value, STORED)
        tl.store(pointer + offsets, tl.where(nan, nan_of(STORED), stored) if NAN else stored, mask=good)
    tl.store(pointer + offsets, nan_of(STORED), mask=present & poisoned[:, None])


@triton.jit
def store_scales(pointer, first, scale, blocks, BLOCKS: tl.constexpr, SIZE: tl.constexpr, PER_THREAD: tl.constexpr):
    """Store each block's scale by the first thread that has part of it. Threads are laid out for what a compiler sees to be
    runs of memory: those of a block, as if each stored something, not the blocks, whose numbers `^` hides."""
    block = (first ^ tl.arange(0, BLOCKS))[:, None]  # `first` is a multiple of BLOCKS
    thread = tl.arange(0, SIZE // PER_THREAD if SIZE > PER_THREAD else 1)[None, :]
    tl.store(pointer + (block + thread), scale[:, None].to(tl.uint8), mask=exists(block, blocks) & (thread == 0))


@triton.jit
def encode_kernel(
    x_ptr, up_ptr, x_matrix, k_blocks, out_ptr, scales_ptr, tensor_ptr, table_ptr, stored_ptr, seed, alpha, limit,
    blocks, row_blocks, k_size, rows, x_k, x_row, out_size, out_matrix, out_k, out_row,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr, RUN: tl.constexpr,
    RUN_OUT: tl.constexpr, ROWS_FIRST: tl.constexpr, PER_THREAD: tl.constexpr,
    ACTIVATION: tl.constexpr, CODES_OUT: tl.constexpr, STORED: tl.constexpr, SOURCE: tl.constexpr, PER_ROW: tl.constexpr,
    LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr, SCALE_NAN: tl.constexpr, SCALE_MAX_CODE: tl.constexpr,
    SCALE_MANTISSA: tl.constexpr, SCALE_LOWEST: tl.constexpr, SCALE_MAX: tl.constexpr, SCALE_UNBIAS: tl.constexpr,
    SCALE_BITS: tl.constexpr, SIXTH: tl.constexpr,
    BITS: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, MAX: tl.constexpr, MAX_CODE: tl.constexpr,
    SIGN_SHIFT: tl.constexpr, INTEGER: tl.constexpr, EMAX: tl.constexpr, UNBIAS: tl.constexpr,
    INF_CODE: tl.constexpr, NAN_CODE: tl.constexpr,
    RULE: tl.constexpr, ORDER: tl.constexpr, DIVIDE: tl.constexpr, ROUNDING: tl.constexpr, SPECIAL: tl.constexpr,
    INF_POISONS: tl.constexpr, ZERO_SCALE: tl.constexpr, NEGATIVE_ZERO: tl.constexpr, SEARCH: tl.constexpr,
    FOLLOWS: tl.constexpr,
):  # fmt: skip
    """Quantize blocks: packed codes and scales out (`CODES_OUT`), or the values that they decode to. `PER_THREAD`:
    how many elements a thread has. `FOLLOWS`: it may start before the launch before it has ended. What is needed first is
    first in line: 48 bytes of arguments arrive together."""
    if FOLLOWS:
        launch_next()
        wait_for_previous()
    start = first_block(k_blocks, BLOCKS, RUN)
    block = start + tl.arange(0, BLOCKS)
    inside = exists(block, blocks)
    many: tl.constexpr = PER_THREAD >= 16
    x = load_values(
        x_ptr, up_ptr, table_ptr, block, blocks, k_blocks, row_blocks, k_size, rows, x_matrix, x_k, x_row, alpha, limit,
        BLOCKS, ROWS, SIZE, WHOLE, RUN, ROWS_FIRST, ACTIVATION, CODES_OUT and many,
    )  # fmt: skip

    if INTERPRETED:  # where reducing by one's own function is slow
        amax = tl.max(bits_of(x) & MAGNITUDE, axis=1)
    else:
        amax = bits_of(tl.reduce(tl.abs(x), 1, larger_or_nan))
    poisoned = amax >= INF if INF_POISONS else amax > INF
    exact: tl.constexpr = not POWER_OF_TWO and ORDER == "exact"
    plain: tl.constexpr = ROUNDING == "nearest_even" and not SPECIAL and not exact
    candidates: tl.constexpr = 1 if SEARCH == "none" else 3 if SEARCH == "mse" else 2
    if candidates > 1 or not plain or many:  # of many elements it is faster so
        amax = tl.where(poisoned, 0, amax)
    if candidates > 1 or not plain:
        x = tl.where(poisoned[:, None], 0.0, x)
    may_be_nan = SPECIAL
    stored, forward = 1.0, 1.0
    if SOURCE != "none":
        matrix, k_block, row_block = find(block, k_blocks, row_blocks, ROWS_FIRST)
        line = matrix.to(tl.int64) * rows + row_block * ROWS
        given = tl.load(tensor_ptr + line, mask=inside, other=1.0) if PER_ROW else tl.load(tensor_ptr)
        stored, forward = scales_of(given, SOURCE, ORDER, LARGEST, many)
        if not SPECIAL:
            may_be_nan = True if PER_ROW or DIVIDE else stored * SCALE_MAX > FLOAT_MAX  # then 0 times Inf
        if SOURCE == "amax" and CODES_OUT:
            first = (inside & (k_block == 0)) if PER_ROW else block == 0
            tl.store(stored_ptr + (line if PER_ROW else block), stored, mask=first)
    words = x
    if ROUNDING == "stochastic":
        index, _ = places(
            block, blocks, k_blocks, row_blocks, k_size, rows, (tl.zeros((), tl.int64) + k_size) * rows,
            1 if ROWS_FIRST else rows, k_size if ROWS_FIRST else 1, 0, 1, BLOCKS, ROWS, SIZE, WHOLE, "none", ROWS_FIRST,
        )  # fmt: skip
        words, _, _, _ = tl.randint4x(seed, index)

    for candidate in tl.static_range(candidates):
        if POWER_OF_TWO:
            scale = scale_code(amax, RULE, EMAX, MANTISSA, MAX)
            if not INF_POISONS:
                scale = tl.where(amax == INF, SCALE_MAX_CODE, scale)
            if candidate == 1:
                scale = tl.where(amax == 0, scale, tl.minimum(scale + 1, SCALE_MAX_CODE))
            elif candidate == 2:
                scale = tl.where(amax == 0, scale, tl.maximum(scale - 1, 0))
            factor = decode_power(scale)
            quotient = x * inverse_power(scale)[:, None]
            if ROUNDING == "away_from_zero" or NEGATIVE_ZERO == "drop_quotient":
                tiny = float_of((bits_of(x) & ~MAGNITUDE) | 0x800000)  # 2^-126: a product that underflows is not zero
                quotient = tl.where((x != 0.0) & (tl.abs(quotient) < 1.1754943508222875e-38), tiny, quotient)
        elif exact:
            wide = tl.zeros(amax.shape, tl.float64) + stored
            largest = wide * (MAX / 1.5 if candidate == 1 else MAX)
            scale = quotient_code(
                float_of(amax), largest, SCALE_BITS, SCALE_MANTISSA, SCALE_MAX_CODE, False, SCALE_UNBIAS
            )  # fmt: skip
            factor = decode_magnitude(scale, SCALE_MANTISSA, False, SCALE_UNBIAS)
            quotient = x
        else:
            raw = raw_scale(float_of(amax), forward, ORDER, SIXTH) * (1.5 if candidate == 1 else 1.0)
            scale_sum, scale_anchor = round_to_step(raw, SCALE_MANTISSA, SCALE_LOWEST, SCALE_MAX)
            factor = scale_sum - scale_anchor
            scale = step_code(scale_sum, scale_anchor, SCALE_MANTISSA, SCALE_LOWEST)
            quotient = x * multiplier(factor, stored, forward, ORDER, many)[:, None]
            if not INF_POISONS or ORDER != "nvidia":
                quotient = tl.where(quotient != quotient, x, quotient)  # 0 * Inf is the 0, Inf * 0 the Inf
        if plain:
            sum, anchor = round_to_step(tl.abs(quotient), MANTISSA, LOWEST, MAX)
            magnitude = sum - anchor
            code = nearest_code(tl.abs(quotient), MANTISSA, LOWEST, MAX, MAX_CODE, INTEGER, UNBIAS)
        elif exact:
            denominator = (wide * factor.to(tl.float64))[:, None]
            code = quotient_code(x, denominator, 31 - SIGN_SHIFT, MANTISSA, MAX_CODE, INTEGER, UNBIAS)
            magnitude = decode_magnitude(code, MANTISSA, INTEGER, UNBIAS)
        else:
            code = round_to_code(quotient, words, ROUNDING, SPECIAL, MANTISSA, LOWEST, MAX, MAX_CODE)
            magnitude = decode_magnitude(code, MANTISSA, INTEGER, UNBIAS)
            magnitude = special_value(magnitude, code, MAX_CODE, INF_CODE, MAX_CODE + 3 if SPECIAL else MAX_CODE + 1)
        if INTEGER:
            code = tl.where(quotient < 0.0, -code, code) & ((1 << BITS) - 1)
            sign = tl.zeros_like(code)
            value = tl.where(quotient < 0.0, -magnitude, magnitude) + 0.0  # no negative zero
        else:
            sign = sign_of(code, quotient, NEGATIVE_ZERO, SPECIAL, MAX_CODE, INF_CODE)
            value = float_of(bits_of(magnitude) | (sign << 31))
        if SOURCE != "none":
            factor = combined(factor, stored, DIVIDE)
        value = value * factor[:, None]
        if candidates > 1:
            difference = x - value
            terms = tl.abs(difference) if SEARCH == "four_over_six_mae" else difference * difference
            error = sum_in_order(terms, ROWS * SIZE)
            if candidate == 0:
                best_error, best_scale, best_code, best_sign, best_value = error, scale, code, sign, value
            else:
                wins = error < best_error
                best_error, best_scale = tl.where(wins, error, best_error), tl.where(wins, scale, best_scale)
                best_code, best_sign = tl.where(wins[:, None], code, best_code), tl.where(wins[:, None], sign, best_sign)
                best_value = tl.where(wins[:, None], value, best_value)
            scale, code, sign, value = best_scale, best_code, best_sign, best_value

    if CODES_OUT:
        if ZERO_SCALE > 0:
            scale = tl.where(amax == 0, ZERO_SCALE, scale)
        scale = tl.where(poisoned, SCALE_NAN, scale)
        if many:
            tl.store(scales_ptr + block, scale.to(tl.uint8), mask=inside)
        else:
            store_scales(scales_ptr, start, scale, blocks, BLOCKS, ROWS * SIZE, PER_THREAD)
        store_codes(
            out_ptr, code, sign, poisoned, block, blocks, k_blocks, row_blocks, out_size, rows, out_matrix, out_k, out_row,
            BLOCKS, ROWS, SIZE, WHOLE, RUN_OUT, ROWS_FIRST, PER_THREAD, BITS,
        )  # fmt: skip
    else:
        offsets, present = places(
            block, blocks, k_blocks, row_blocks, k_size, rows, out_matrix, out_k, out_row, 0, 1, BLOCKS, ROWS, SIZE, WHOLE,
            RUN_OUT, ROWS_FIRST,
        )  # fmt: skip
        store_values(out_ptr, offsets, present, poisoned, present, value, may_be_nan, False, STORED)


@triton.jit
def decode_kernel(
    codes_ptr, scales_ptr, tensor_ptr, out_ptr, blocks, k_blocks, row_blocks, k_size, rows,
    codes_size, codes_matrix, codes_k, codes_row, out_matrix, out_k, out_row,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr, RUN: tl.constexpr,
    RUN_OUT: tl.constexpr, ROWS_FIRST: tl.constexpr,
    STORED: tl.constexpr, TENSOR_SCALE: tl.constexpr, PER_ROW: tl.constexpr, DIVIDE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, SCALE_NAN: tl.constexpr, SCALE_MANTISSA: tl.constexpr, SCALE_MAX: tl.constexpr,
    SCALE_UNBIAS: tl.constexpr,
    BITS: tl.constexpr, MANTISSA: tl.constexpr, MAX: tl.constexpr, MAX_CODE: tl.constexpr, SIGN_SHIFT: tl.constexpr,
    INTEGER: tl.constexpr, UNBIAS: tl.constexpr, INF_CODE: tl.constexpr,
):  # fmt: skip
    """Decode blocks of packed codes and row-major scales."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    inside = exists(block, blocks)
    word = load_codes(
        codes_ptr, block, blocks, k_blocks, row_blocks, codes_size, rows, codes_matrix, codes_k, codes_row,
        BLOCKS, ROWS, SIZE, WHOLE, RUN, ROWS_FIRST, BITS,
    )  # fmt: skip
    scale = tl.load(scales_ptr + block, mask=inside, other=0).to(tl.int32)
    poisoned = scale == SCALE_NAN
    if POWER_OF_TWO:
        factor = decode_power(scale)
    else:
        factor = decode_magnitude(scale, SCALE_MANTISSA, False, SCALE_UNBIAS)
    may_be_nan = INF_CODE >= 0 and (TENSOR_SCALE or not POWER_OF_TWO)  # then Inf times 0
    if TENSOR_SCALE:
        matrix, _, row_block = find(block, k_blocks, row_blocks, ROWS_FIRST)
        line = matrix.to(tl.int64) * rows + row_block * ROWS
        stored = tl.load(tensor_ptr + line, mask=inside, other=1.0) if PER_ROW else tl.load(tensor_ptr)
        factor = combined(factor, stored, DIVIDE)
        if INF_CODE < 0:
            may_be_nan = True if PER_ROW or DIVIDE else stored * SCALE_MAX > FLOAT_MAX  # then 0 times Inf
    element, nan = decode_top(word, MANTISSA, MAX, MAX_CODE, SIGN_SHIFT, INTEGER, UNBIAS, INF_CODE)
    value = element * factor[:, None]
    has_nan: tl.constexpr = not INTEGER and MAX_CODE < (1 << (31 - SIGN_SHIFT)) - 1
    offsets, present = places(
        block, blocks, k_blocks, row_blocks, k_size, rows, out_matrix, out_k, out_row, 0, 1, BLOCKS, ROWS, SIZE, WHOLE,
        RUN_OUT, ROWS_FIRST,
    )  # fmt: skip
    store_values(out_ptr, offsets, present, poisoned, nan, value, may_be_nan, has_nan, STORED)


@triton.jit
def amax_kernel(
    x_ptr, up_ptr, table_ptr, amax_ptr, alpha, limit, blocks, k_blocks, row_blocks, k_size, rows, x_matrix, x_k, x_row,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr, RUN: tl.constexpr,
    ROWS_FIRST: tl.constexpr, ACTIVATION: tl.constexpr, PER_ROW: tl.constexpr, ONE_LINE: tl.constexpr,
):  # fmt: skip
    """Largest finite magnitude, as float32 bits, of the tensor or of each of its rows along K; over zeros. `ONE_LINE`: the
    blocks of a program lie in one row."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    x = load_values(
        x_ptr, up_ptr, table_ptr, block, blocks, k_blocks, row_blocks, k_size, rows, x_matrix, x_k, x_row, alpha, limit,
        BLOCKS, ROWS, SIZE, WHOLE, RUN, ROWS_FIRST, ACTIVATION, False,
    )  # fmt: skip
    magnitude = bits_of(x) & MAGNITUDE
    magnitude = tl.where(magnitude < INF, magnitude, 0)
    if PER_ROW and not ONE_LINE:
        matrix, _, row_block = find(block, k_blocks, row_blocks, ROWS_FIRST)
        line = matrix.to(tl.int64) * rows + row_block * ROWS
        tl.atomic_max(amax_ptr + line, tl.max(magnitude, axis=1), mask=exists(block, blocks))
    else:
        line = tl.program_id(0) * BLOCKS // k_blocks if ONE_LINE else 0
        tl.atomic_max(amax_ptr + line, tl.max(tl.max(magnitude, axis=1), axis=0))


@triton.jit
def rotate_kernel(
    x_ptr, out_ptr, blocks, k_blocks, row_blocks, k_size, rows, x_matrix, x_k, x_row, out_matrix, out_k, out_row,
    BLOCKS: tl.constexpr, SIZE: tl.constexpr, RUN: tl.constexpr, RUN_OUT: tl.constexpr, STORED: tl.constexpr,
    INVERSE: tl.constexpr, NEGATIVE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """A Hadamard rotation of each `SIZE` = 2^STEPS neighbours along K, or its inverse; bit i of `NEGATIVE`: sign i is -1."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    offsets, present = places(
        block, blocks, k_blocks, row_blocks, k_size, rows, x_matrix, x_k, x_row, 0, 1, BLOCKS, 1, SIZE, True, RUN, False
    )
    x = widen(tl.load(x_ptr + offsets, mask=present, other=0))
    sign = tl.where(((tl.full((1, SIZE), NEGATIVE, tl.int64) >> tl.arange(0, SIZE)[None, :]) & 1) == 1, -1.0, 1.0)
    if not INVERSE:
        x = x * sign
    for step in tl.static_range(STEPS):
        pairs = tl.reshape(x, (BLOCKS, SIZE >> (step + 1), 2, 1 << step))
        a, b = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (BLOCKS, SIZE))
    x = x * (1.0 / (1 << (STEPS // 2)))
    if INVERSE:
        x = x * sign
    offsets, present = places(
        block, blocks, k_blocks, row_blocks, k_size, rows, out_matrix, out_k, out_row, 0, 1, BLOCKS, 1, SIZE, True, RUN_OUT,
        False,
    )  # fmt: skip
    tl.store(out_ptr + offsets, narrow(x, STORED), mask=present)
