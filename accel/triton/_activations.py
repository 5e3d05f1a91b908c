"""Device functions: the activations of `mxref.functions`, operation for operation.

The constants are float32 bit patterns; launched with fp fusion off, so that no multiply and add become one rounding.
"""

import struct

import triton
import triton.language as tl

from accel.triton._tiles import bits_of, float_of, fused, narrow, narrow_or_nan, nearer_reciprocal, negative, widen


def _float(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def _constant(bits: int) -> tl.constexpr:
    return tl.constexpr(_float(bits))


LOG2_E, MINUS_LN2_HIGH, LN2_LOW = _constant(0x3FB8AA3B), _constant(0xBF318000), _constant(0xB95E8083)
P4, P3, P2 = _constant(0x3AB52914), _constant(0x3C091CB6), _constant(0x3D2AAC55)
P1, P0 = _constant(0x3E2AAA49), _constant(0x3EFFFFFE)
BELOW_ONE = _constant(0x3F7FFFFF)
ROUNDER = tl.constexpr(12582912.0 + 32.0)  # among numbers as large no fraction is left; the last bits of its pattern are 32
E2, E1, E0 = tl.constexpr(_float(0x3EA57EB2) * 2.0**-64), tl.constexpr(_float(0xBF4EDE65) * 2.0**-32), _constant(0x3F7D6A02)


@triton.jit
def reduced(z, n):
    """y with exp(z) = y * 2^n, of n = floor(z * LOG2_E + 0.5)."""
    r = tl.fma(n, tl.full(n.shape, MINUS_LN2_HIGH, tl.float32), z) - n * LN2_LOW  # the product is exact
    p = r * P4 + P3
    p = p * r + P2
    p = p * r + P1
    p = p * r + P0
    return ((r * r) * p + r) + 1.0


@triton.jit
def exp(x):
    z = tl.where(x < -104.0, -104.0, x)
    z = tl.where(z > 89.0, 89.0, z)
    z = tl.where(x != x, 0.0, z)
    n = tl.floor(z * LOG2_E + 0.5)
    y, k = reduced(z, n), n.to(tl.int32)
    half = k >> 1
    y = y * float_of((half + 127) << 23) * float_of((k - half + 127) << 23)
    return tl.where(x != x, x, y)


@triton.jit
def quotient_by_sum(numerator, scaled):
    """numerator / (1 + e) as `tl.div_rn` rounds it, for e = `scaled` * 2^-32 from 0 to 1 and numerators 1 and e: computed
    both ways of every such e. It has no branch for what underflows: there the sum is 1."""
    sum = fused(scaled, 2.0**-32, 1.0)
    inverse = nearer_reciprocal(sum, fused(scaled, fused(scaled, E2, E1), E0))
    quotient = numerator * inverse
    return fused(fused(negative(sum), quotient, numerator), inverse, quotient)


@triton.jit
def sigmoid_of_number(x):
    """sigmoid, meaningless for NaN."""
    z = negative(tl.minimum(tl.abs(x), 104.0))
    # n = floor(z * LOG2_E + 0.5): halves go up, since a little is taken from the product, less than its last place
    rounded = fused(z * LOG2_E, BELOW_ONE, ROUNDER)
    y = reduced(z, rounded - ROUNDER)
    scaled = float_of(bits_of(y) + (bits_of(rounded) << 23))  # y is in [1/2, 2)
    e = scaled * 2.0**-32  # as in exp, one product rounds
    return quotient_by_sum(tl.where(x < 0.0, e, tl.full(x.shape, 1.0, tl.float32)), scaled)


@triton.jit
def sigmoid(x):
    return tl.where(x != x, x, sigmoid_of_number(x))


@triton.jit
def silu(x):
    return x * sigmoid_of_number(x)


@triton.jit
def gelu_tanh(x):
    inner = ((x * x) * x) * 0.044715 + x
    return x * sigmoid(inner * 1.5957691)


@triton.jit
def relu2(x):
    positive = tl.where(x <= 0.0, 0.0, x)
    return positive * positive


@triton.jit
def swiglu_oai_gate(gate, alpha, limit):
    g = tl.where(gate > limit, limit, gate)
    return g * sigmoid(alpha * g)


@triton.jit
def gate_side(x, alpha, limit, NAME: tl.constexpr, STORED: tl.constexpr):
    """Float32: all of a function, or what a gated activation makes of its gate; `silu_rounded_twice` rounds to `STORED`."""
    if NAME == "swiglu" or NAME == "silu":
        return silu(x)
    elif NAME == "silu_rounded_twice":
        return widen(narrow(silu(x), STORED))
    elif NAME == "gelu_tanh" or NAME == "gelu_tanh_gated":
        return gelu_tanh(x)
    elif NAME == "swiglu_oai":
        return swiglu_oai_gate(x, alpha, limit)
    elif NAME == "exp":
        return exp(x)
    elif NAME == "sigmoid":
        return sigmoid(x)
    else:
        return relu2(x)


@triton.jit
def with_up(side, up, limit, NAME: tl.constexpr):
    """A gated activation, of what its gate became."""
    if NAME == "swiglu_oai":
        u = tl.where(up > limit, limit, up)
        u = tl.where(u < -limit, -limit, u)
        return side * (u + 1.0)
    else:
        return side * up


@triton.jit
def pattern_of(loaded):
    """The bits of what was loaded of a 16-bit type, as int32; those of float32 are of no use."""
    if loaded.dtype == tl.float32:
        return loaded
    else:
        return loaded.to(tl.int16, bitcast=True).to(tl.int32)


@triton.jit
def activate(x, pattern, up, table_ptr, alpha, limit, NAME: tl.constexpr, GATED: tl.constexpr, STORED: tl.constexpr):
    """Float32: a function or a gated activation. `table_ptr`: what `gate_side` makes of each of the 65,536 values of a
    16-bit type, to be looked up by `pattern`, or None."""
    if table_ptr is None:
        side = gate_side(x, alpha, limit, NAME, STORED)
    else:
        side = tl.load(table_ptr + (pattern & 0xFFFF))
    return with_up(side, up, limit, NAME) if GATED else side


@triton.jit
def activated(x, pattern, up, table_ptr, alpha, limit, NAME: tl.constexpr, GATED: tl.constexpr, STORED: tl.constexpr):
    """`activate`, rounded as it would be stored."""
    return widen(narrow_or_nan(activate(x, pattern, up, table_ptr, alpha, limit, NAME, GATED, STORED), STORED))


@triton.jit
def load_row(
    start, k, present, k_size, table_ptr, alpha, limit, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """Float32: elements `k` of the row at `start`, of `k_size`, or of the activation of its gates and ups, as stored."""
    if ACTIVATION == "none":
        return widen(tl.load(start + k, mask=present, other=0))
    else:
        if INTERLEAVED:  # both at once
            side = tl.arange(0, 2)[None, None, :]
            gate, up = tl.split(tl.load(start + k[:, :, None] * 2 + side, mask=present[:, :, None], other=0))
        else:
            gate = tl.load(start + k, mask=present, other=0)
            up = tl.load(start + k + k_size, mask=present, other=0) if GATED else gate
        up = widen(up)
        return activated(widen(gate), pattern_of(gate), up, table_ptr, alpha, limit, ACTIVATION, GATED, STORED)
