"""Kernels that take a flat run of elements: element codecs and activations."""

import triton
import triton.language as tl

from accel.triton._activations import exp, gelu_tanh, relu2, sigmoid, silu, swiglu, swiglu_oai
from accel.triton._tiles import decode_code, decode_power, narrow, round_to_code, widen, with_sign


@triton.jit
def encode_elements_kernel(
    x_ptr, codes_ptr, seed, count, TILE: tl.constexpr, ROUNDING: tl.constexpr, SPECIAL: tl.constexpr,
    MANTISSA: tl.constexpr, LOWEST: tl.constexpr, MAX_BITS: tl.constexpr, MAX_CODE: tl.constexpr,
    SIGN_SHIFT: tl.constexpr, INTEGER: tl.constexpr, INF_CODE: tl.constexpr, NAN_CODE: tl.constexpr,
):  # fmt: skip
    """Codes of `count` contiguous values."""
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    present = index < count
    x = widen(tl.load(x_ptr + index, mask=present, other=0))
    words = x
    if ROUNDING == "stochastic":
        words, _, _, _ = tl.randint4x(seed, index)
    code = round_to_code(x, words, ROUNDING, SPECIAL, MANTISSA, LOWEST, MAX_BITS, MAX_CODE)
    code = with_sign(code, x, SIGN_SHIFT, INTEGER, SPECIAL, MAX_CODE, INF_CODE >= 0)
    if NAN_CODE >= 0:
        code = tl.where(x != x, NAN_CODE, code)
    tl.store(codes_ptr + index, code.to(tl.uint8), mask=present)


@triton.jit
def decode_elements_kernel(
    codes_ptr, out_ptr, count, TILE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    MANTISSA: tl.constexpr, MAX_CODE: tl.constexpr, SIGN_SHIFT: tl.constexpr, INTEGER: tl.constexpr,
    UNBIAS: tl.constexpr, INF_CODE: tl.constexpr,
):  # fmt: skip
    """Float32 values of `count` contiguous codes."""
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    present = index < count
    code = tl.load(codes_ptr + index, mask=present, other=0).to(tl.int32)
    if POWER_OF_TWO:
        value = decode_power(code)
    else:
        value = decode_code(code, MANTISSA, MAX_CODE, SIGN_SHIFT, INTEGER, UNBIAS, INF_CODE)
    tl.store(out_ptr + index, narrow(value, tl.float32), mask=present)


@triton.jit
def activation_kernel(
    x_ptr, up_ptr, out_ptr, alpha, limit, count, TILE: tl.constexpr, STORED: tl.constexpr, FUNCTION: tl.constexpr
):
    """One activation of `count` contiguous values; `up_ptr` is read by the gated ones."""
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    present = index < count
    x = widen(tl.load(x_ptr + index, mask=present, other=0))
    if FUNCTION == "swiglu" or FUNCTION == "swiglu_oai":
        up = widen(tl.load(up_ptr + index, mask=present, other=0))
        y = swiglu(x, up) if FUNCTION == "swiglu" else swiglu_oai(x, up, alpha, limit)
    elif FUNCTION == "exp":
        y = exp(x)
    elif FUNCTION == "sigmoid":
        y = sigmoid(x)
    elif FUNCTION == "silu":
        y = silu(x)
    elif FUNCTION == "gelu_tanh":
        y = gelu_tanh(x)
    else:
        y = relu2(x)
    tl.store(out_ptr + index, narrow(y, STORED), mask=present)
