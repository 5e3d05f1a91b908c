"""The block kernels: a program takes `BLOCKS` blocks of `SIZE` elements, one block a row of its tile.

A tensor is seen as `[outer, K, inner]`, blocked along K; block b lies at `outer = b / inner / row_blocks`,
`b / inner % row_blocks` along K, `b % inner`. With that numbering scales, and codes of contiguous tensors, are
row-major in b whatever the axis.
"""

import triton
import triton.language as tl

from accel.triton._tiles import (
    FLOAT_MAX,
    INF,
    MAGNITUDE,
    NAN,
    bits_of,
    decode_code,
    decode_magnitude,
    decode_power,
    float_of,
    inverse_power,
    narrow,
    round_to_code,
    scale_code,
    widen,
    with_sign,
)


@triton.jit
def places(pointer, block, k, row_blocks, inner, stride_outer, stride_k, stride_inner, BLOCKS: tl.constexpr,
           SIZE: tl.constexpr, FLAT: tl.constexpr):  # fmt: skip
    """Pointers `[BLOCKS, SIZE]` to the elements of blocks. `FLAT`: the blocks are one run of memory."""
    if FLAT:
        start = tl.program_id(0).to(tl.int64) * (BLOCKS * SIZE)
        return pointer + start + (tl.arange(0, BLOCKS)[:, None] * SIZE + k[None, :])
    else:
        along = block // inner
        base = (along // row_blocks).to(tl.int64) * stride_outer + (block % inner).to(tl.int64) * stride_inner
        return pointer + base[:, None] + positions(block, k, row_blocks, inner, SIZE).to(tl.int64) * stride_k


@triton.jit
def positions(block, k, row_blocks, inner, SIZE: tl.constexpr):
    """Where along K the elements of blocks lie."""
    return (block // inner % row_blocks)[:, None] * SIZE + k[None, :]


@triton.jit
def tensor_scales(pointer, block, row_blocks, inner, PER_ROW: tl.constexpr):
    """The tensor scale of each block: one for all, or one a row of `[outer, inner]`."""
    if PER_ROW:
        return tl.load(pointer + (block // inner // row_blocks * inner + block % inner))
    else:
        return tl.load(pointer + tl.zeros_like(block))


@triton.jit
def block_scale(amax, forward, ORDER: tl.constexpr, SIXTH: tl.constexpr, SCALE_MANTISSA: tl.constexpr,
                SCALE_LOWEST: tl.constexpr, SCALE_MAX_BITS: tl.constexpr, SCALE_MAX_CODE: tl.constexpr):  # fmt: skip
    """Codes of a scale with a mantissa, from finite block maxima (bits) in the recipe's order."""
    if ORDER == "nvidia":
        raw = float_of(amax) * (forward * SIXTH)
    else:
        raw = forward * (float_of(amax) * SIXTH)
    return round_to_code(raw, raw, "nearest_even", False, SCALE_MANTISSA, SCALE_LOWEST, SCALE_MAX_BITS, SCALE_MAX_CODE)


@triton.jit
def multiplier(scale, stored, forward, ORDER: tl.constexpr):
    """What elements are multiplied by before their codes are taken, from the decoded block scale."""
    one = tl.full(scale.shape, 1.0, tl.float32)
    if ORDER == "nvidia":
        inverse = tl.minimum(tl.div_rn(one, scale * stored), FLOAT_MAX)
        return tl.where(scale == 0.0, 0.0, inverse)
    elif ORDER == "vllm_torch":
        product = scale * tl.div_rn(one, forward)
        return tl.div_rn(one, tl.where(product == 0.0, 1e8, product))
    else:
        return tl.where(scale == 0.0, 0.0, tl.div_rn(forward, tl.where(scale == 0.0, 1.0, scale)))


@triton.jit
def encode_kernel(
    x_ptr, out_ptr, scales_ptr, stored_ptr, forward_ptr, seed, blocks, row_blocks, k_size, inner,
    x_outer, x_k, x_inner, out_outer, out_k, out_inner,
    BLOCKS: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr, FLAT: tl.constexpr,
    CODES_OUT: tl.constexpr, STORED: tl.constexpr, TENSOR_SCALE: tl.constexpr, PER_ROW: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, SCALE_NAN: tl.constexpr, SCALE_MAX_CODE: tl.constexpr, SCALE_MANTISSA: tl.constexpr,
    SCALE_LOWEST: tl.constexpr, SCALE_MAX_BITS: tl.constexpr, SCALE_UNBIAS: tl.constexpr, SIXTH: tl.constexpr,
    MANTISSA: tl.constexpr, LOWEST: tl.constexpr, MAX_BITS: tl.constexpr, MAX_CODE: tl.constexpr,
    SIGN_SHIFT: tl.constexpr, INTEGER: tl.constexpr, EMAX: tl.constexpr, UNBIAS: tl.constexpr,
    INF_CODE: tl.constexpr, NAN_CODE: tl.constexpr,
    RULE: tl.constexpr, ORDER: tl.constexpr, DIVIDE: tl.constexpr, ROUNDING: tl.constexpr, SPECIAL: tl.constexpr,
    INF_POISONS: tl.constexpr, ZERO_SCALE: tl.constexpr, NEGATIVE_ZERO: tl.constexpr,
):  # fmt: skip
    """Quantize blocks: codes and scales out (`CODES_OUT`), or the values that they decode to."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    k = tl.arange(0, SIZE)
    present = (block < blocks)[:, None]
    if not WHOLE:
        present = present & (positions(block, k, row_blocks, inner, SIZE) < k_size)
    x_places = places(x_ptr, block, k, row_blocks, inner, x_outer, x_k, x_inner, BLOCKS, SIZE, FLAT)
    x = widen(tl.load(x_places, mask=present, other=0))

    amax = tl.max(bits_of(x) & MAGNITUDE, axis=1)
    poisoned = amax >= INF if INF_POISONS else amax > INF
    amax = tl.where(poisoned, 0, amax)
    stored = tl.full(amax.shape, 1.0, tl.float32)
    forward = stored
    if TENSOR_SCALE:
        safe = tl.minimum(block, blocks - 1)
        stored = tensor_scales(stored_ptr, safe, row_blocks, inner, PER_ROW)
        forward = tensor_scales(forward_ptr, safe, row_blocks, inner, PER_ROW)

    if POWER_OF_TWO:
        scale = scale_code(amax, RULE, EMAX, MANTISSA, MAX_BITS)
        if not INF_POISONS:
            scale = tl.where(amax == INF, SCALE_MAX_CODE, scale)
        factor = decode_power(scale)
        quotient = x * inverse_power(scale)[:, None]
        if ROUNDING == "away_from_zero" or NEGATIVE_ZERO == "drop_quotient":
            tiny = float_of((bits_of(x) & ~MAGNITUDE) | 0x800000)  # 2^-126: a product that underflows is still not zero
            quotient = tl.where((x != 0.0) & (tl.abs(quotient) < 1.1754943508222875e-38), tiny, quotient)
    else:
        scale = block_scale(amax, forward, ORDER, SIXTH, SCALE_MANTISSA, SCALE_LOWEST, SCALE_MAX_BITS, SCALE_MAX_CODE)
        factor = decode_magnitude(scale, SCALE_MANTISSA, SCALE_UNBIAS, SCALE_MAX_CODE, -1, SCALE_MAX_CODE + 1)
        quotient = x * multiplier(factor, stored, forward, ORDER)[:, None]
        quotient = tl.where(quotient != quotient, x, quotient)  # 0 * Inf is the 0, Inf * 0 the Inf
    if ZERO_SCALE > 0:
        scale = tl.where(amax == 0, ZERO_SCALE, scale)
        if POWER_OF_TWO:
            factor = decode_power(scale)
        else:
            factor = decode_magnitude(scale, SCALE_MANTISSA, SCALE_UNBIAS, SCALE_MAX_CODE, -1, SCALE_MAX_CODE + 1)

    words = x
    if ROUNDING == "stochastic":
        lines = (block // inner // row_blocks).to(tl.int64) * k_size * inner + block % inner
        index = lines[:, None] + positions(block, k, row_blocks, inner, SIZE).to(tl.int64) * inner
        words, _, _, _ = tl.randint4x(seed, index)
    quotient = tl.where(poisoned[:, None], 0.0, quotient)
    code = round_to_code(quotient, words, ROUNDING, SPECIAL, MANTISSA, LOWEST, MAX_BITS, MAX_CODE)

    target = places(out_ptr, block, k, row_blocks, inner, out_outer, out_k, out_inner, BLOCKS, SIZE, FLAT)
    if CODES_OUT:
        code = with_sign(code, quotient, SIGN_SHIFT, INTEGER, SPECIAL, MAX_CODE, INF_CODE >= 0)
        code = without_zero_sign(code, quotient, NEGATIVE_ZERO, INTEGER, SIGN_SHIFT)
        tl.store(target, code.to(tl.uint8), mask=present)
        tl.store(scales_ptr + block, tl.where(poisoned, SCALE_NAN, scale).to(tl.uint8), mask=block < blocks)
    else:
        if TENSOR_SCALE:
            factor = tl.div_rn(factor, stored) if DIVIDE else factor * stored
        factor = tl.where(poisoned, float_of(tl.full(amax.shape, NAN, tl.int32)), factor)
        if INTEGER:
            signed = tl.where(bits_of(quotient) < 0, -code, code)
            value = signed.to(tl.float32) * UNBIAS
        else:
            limit: tl.constexpr = MAX_CODE + 3 if SPECIAL else MAX_CODE + 1
            value = decode_magnitude(code, MANTISSA, UNBIAS, MAX_CODE, INF_CODE, limit)
            sign = bits_of(quotient) & ~MAGNITUDE
            if NEGATIVE_ZERO == "drop":
                sign = tl.where(code == 0, 0, sign)
            elif NEGATIVE_ZERO == "drop_quotient":
                sign = tl.where(quotient == 0.0, 0, sign)
            value = float_of(bits_of(value) | sign)
        tl.store(target, narrow(value * factor[:, None], STORED), mask=present)


@triton.jit
def without_zero_sign(code, quotient, NEGATIVE_ZERO: tl.constexpr, INTEGER: tl.constexpr, SIGN_SHIFT: tl.constexpr):
    if NEGATIVE_ZERO == "drop_quotient":
        code = tl.where(quotient == 0.0, 0, code)
    elif NEGATIVE_ZERO == "drop" and not INTEGER:
        code = tl.where((code & ((1 << (31 - SIGN_SHIFT)) - 1)) == 0, 0, code)
    return code


@triton.jit
def decode_kernel(
    codes_ptr, scales_ptr, stored_ptr, out_ptr, blocks, row_blocks, k_size, inner,
    codes_outer, codes_k, codes_inner, out_outer, out_k, out_inner,
    BLOCKS: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr, FLAT: tl.constexpr, STORED: tl.constexpr,
    TENSOR_SCALE: tl.constexpr, PER_ROW: tl.constexpr, DIVIDE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, SCALE_MAX_CODE: tl.constexpr, SCALE_MANTISSA: tl.constexpr, SCALE_UNBIAS: tl.constexpr,
    MANTISSA: tl.constexpr, MAX_CODE: tl.constexpr, SIGN_SHIFT: tl.constexpr, INTEGER: tl.constexpr,
    UNBIAS: tl.constexpr, INF_CODE: tl.constexpr,
):  # fmt: skip
    """Decode blocks of codes (a byte each) and row-major scales."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    k = tl.arange(0, SIZE)
    inside = block < blocks
    present = inside[:, None]
    if not WHOLE:
        present = present & (positions(block, k, row_blocks, inner, SIZE) < k_size)
    code_places = places(codes_ptr, block, k, row_blocks, inner, codes_outer, codes_k, codes_inner, BLOCKS, SIZE, FLAT)
    code = tl.load(code_places, mask=present, other=0).to(tl.int32)
    scale = tl.load(scales_ptr + block, mask=inside, other=0).to(tl.int32)
    if POWER_OF_TWO:
        factor = decode_power(scale)
    else:
        factor = decode_magnitude(scale, SCALE_MANTISSA, SCALE_UNBIAS, SCALE_MAX_CODE, -1, 256)
    if TENSOR_SCALE:
        stored = tensor_scales(stored_ptr, tl.minimum(block, blocks - 1), row_blocks, inner, PER_ROW)
        factor = tl.div_rn(factor, stored) if DIVIDE else factor * stored
    value = decode_code(code, MANTISSA, MAX_CODE, SIGN_SHIFT, INTEGER, UNBIAS, INF_CODE)
    target = places(out_ptr, block, k, row_blocks, inner, out_outer, out_k, out_inner, BLOCKS, SIZE, FLAT)
    tl.store(target, narrow(value * factor[:, None], STORED), mask=present)


@triton.jit
def amax_kernel(
    x_ptr, amax_ptr, blocks, row_blocks, k_size, inner, x_outer, x_k, x_inner,
    BLOCKS: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr, FLAT: tl.constexpr, PER_ROW: tl.constexpr,
):  # fmt: skip
    """Largest finite magnitude, as float32 bits, of the tensor or of each row of `[outer, inner]`; over zeros."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    k = tl.arange(0, SIZE)
    inside = block < blocks
    present = inside[:, None]
    if not WHOLE:
        present = present & (positions(block, k, row_blocks, inner, SIZE) < k_size)
    x_places = places(x_ptr, block, k, row_blocks, inner, x_outer, x_k, x_inner, BLOCKS, SIZE, FLAT)
    magnitude = bits_of(widen(tl.load(x_places, mask=present, other=0))) & MAGNITUDE
    magnitude = tl.where(magnitude < INF, magnitude, 0)
    if PER_ROW:
        row = block // inner // row_blocks * inner + block % inner
        tl.atomic_max(amax_ptr + row, tl.max(magnitude, axis=1), mask=inside)
    else:
        tl.atomic_max(amax_ptr, tl.max(tl.max(magnitude, axis=1), axis=0))
