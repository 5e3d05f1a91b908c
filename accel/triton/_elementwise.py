"""Kernels that take a flat run of elements: element codecs and activations."""

import triton
import triton.language as tl

from accel.triton._activations import activate, gate_side, pattern_of
from accel.triton._tiles import decode_power, decode_top, narrow, round_to_code, sign_of, widen


@triton.jit
def encode_elements_kernel(
    x_ptr, codes_ptr, seed, count, TILE: tl.constexpr, ROUNDING: tl.constexpr, SPECIAL: tl.constexpr,
    MANTISSA: tl.constexpr, LOWEST: tl.constexpr, MAX: tl.constexpr, MAX_CODE: tl.constexpr,
    SIGN_SHIFT: tl.constexpr, INTEGER: tl.constexpr, INF_CODE: tl.constexpr, NAN_CODE: tl.constexpr,
):  # fmt: skip
    """Codes of `count` contiguous values."""
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    present = index < count
    x = widen(tl.load(x_ptr + index, mask=present, other=0))
    words = x
    if ROUNDING == "stochastic":
        words, _, _, _ = tl.randint4x(seed, index)
    code = round_to_code(x, words, ROUNDING, SPECIAL, MANTISSA, LOWEST, MAX, MAX_CODE)
    if INTEGER:
        code = tl.where(x < 0.0, -code, code)
    else:
        code += sign_of(code, x, "keep", SPECIAL, MAX_CODE, INF_CODE) << (31 - SIGN_SHIFT)
    if NAN_CODE >= 0:
        code = tl.where(x != x, NAN_CODE, code)
    tl.store(codes_ptr + index, (code & ((1 << (32 - SIGN_SHIFT)) - 1)).to(tl.uint8), mask=present)


@triton.jit
def decode_elements_kernel(
    codes_ptr, out_ptr, count, TILE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    MANTISSA: tl.constexpr, MAX: tl.constexpr, MAX_CODE: tl.constexpr, SIGN_SHIFT: tl.constexpr, INTEGER: tl.constexpr,
    UNBIAS: tl.constexpr, INF_CODE: tl.constexpr,
):  # fmt: skip
    """Float32 values of `count` contiguous codes."""
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    present = index < count
    code = tl.load(codes_ptr + index, mask=present, other=0).to(tl.int32)
    if POWER_OF_TWO:
        value = decode_power(code)
    else:
        value, nan = decode_top(code << SIGN_SHIFT, MANTISSA, MAX, MAX_CODE, SIGN_SHIFT, INTEGER, UNBIAS, INF_CODE)
        value = tl.where(nan, float("nan"), value)
    tl.store(out_ptr + index, narrow(value, tl.float32), mask=present)


@triton.jit
def activation_kernel(
    x_ptr, up_ptr, table_ptr, out_ptr, alpha, limit, count, TILE: tl.constexpr, STORED: tl.constexpr,
    FUNCTION: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """One activation of `count` contiguous values; `up_ptr` is read where `GATED`."""
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    present = index < count
    x = tl.load(x_ptr + index, mask=present, other=0)
    up = widen(tl.load(up_ptr + index, mask=present, other=0)) if GATED else x
    y = activate(widen(x), pattern_of(x), up, table_ptr, alpha, limit, FUNCTION, GATED, STORED)
    tl.store(out_ptr + index, narrow(y, STORED), mask=present)


@triton.jit
def gate_table_kernel(table_ptr, alpha, limit, LIKE: tl.constexpr, TILE: tl.constexpr, FUNCTION: tl.constexpr):
    """`gate_side` of every value of a 16-bit type."""
    pattern = tl.program_id(0) * TILE + tl.arange(0, TILE)
    x = widen(pattern.to(tl.int16).to(LIKE, bitcast=True))
    tl.store(table_ptr + pattern, gate_side(x, alpha, limit, FUNCTION, LIKE))
