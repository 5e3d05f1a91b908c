"""Device functions: the arithmetic of the reference on tiles of registers.

Every step is an int32 operation, or a float32 operation that IEEE 754 defines to the last bit: no narrow cast, no
approximate division, no library exponential. Kernels are launched with fp fusion off. Formats and recipes arrive as
compile-time constants that `_constants.py` takes from mxref's records. The literals here are those of float32: 23 fraction
bits (0x7FFFFF, hidden bit 0x800000), bias 127.
"""

import triton
import triton.language as tl

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INF = tl.constexpr(0x7F800000)
NAN = tl.constexpr(0x7FC00000)
FLOAT_MAX = tl.constexpr(float.fromhex("0x1.fffffep127"))


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def widen(loaded):
    """Float32 values of what was loaded: float32, float16, or bfloat16's bits as int16."""
    if loaded.dtype == tl.int16:
        return float_of(loaded.to(tl.int32) << 16)
    else:
        return loaded.to(tl.float32)


@triton.jit
def narrow(x, like: tl.constexpr):
    """Float32 values rounded once to what is stored (nearest even; bfloat16 as int16 bits), every NaN canonical."""
    bits = tl.where(x != x, NAN, bits_of(x))
    if like == tl.int16:
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    elif like == tl.float16:
        half = x.to(tl.float16).to(tl.int16, bitcast=True)
        return tl.where(x != x, 0x7E00, half).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        return float_of(bits)


@triton.jit
def exponent_and_significand(magnitude):
    """Biased exponent and 24-bit significand of float32 magnitude bits, subnormals normalised; meaningless for 0."""
    exponent = magnitude >> 23
    fraction = magnitude & 0x7FFFFF
    normalized = bits_of(fraction.to(tl.float32))  # exact; its exponent is the place of the leading bit
    subnormal = exponent == 0
    exponent = tl.where(subnormal, (normalized >> 23) - 149, exponent)
    return exponent, tl.where(subnormal, normalized & 0x7FFFFF, fraction) | 0x800000


@triton.jit
def round_to_code(x, words, ROUNDING: tl.constexpr, SPECIAL: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr,
                  MAX_BITS: tl.constexpr, MAX_CODE: tl.constexpr):  # fmt: skip
    """Int32 magnitude codes of float32 values; NaN is the caller's business.

    `LOWEST`: the biased float32 exponent from which down the step between codes is constant; for an integer format it
    lies above all values. `SPECIAL`: values beyond the largest code give that code + 1 instead of saturating.
    """
    magnitude = bits_of(x) & MAGNITUDE
    if not SPECIAL:
        magnitude = tl.minimum(magnitude, MAX_BITS)
    elif ROUNDING == "toward_zero":
        magnitude = tl.where(magnitude < INF, tl.minimum(magnitude, MAX_BITS), magnitude)
    if ROUNDING == "nearest_even" and not SPECIAL:
        # One float32 addition rounds: the last place of `anchor` is the step between codes where x lies.
        field = tl.maximum(magnitude & INF, LOWEST << 23)
        anchor = field + ((23 - MANTISSA) << 23)
        steps = bits_of(float_of(magnitude) + float_of(anchor)) - anchor
        return steps + ((field - (LOWEST << 23)) >> (23 - MANTISSA))
    else:
        field = tl.maximum(magnitude >> 23, 1)
        significand = magnitude - ((field - 1) << 23)
        dropped = tl.maximum(LOWEST - field, 0) + (23 - MANTISSA)
        shift = tl.minimum(dropped, 25)
        kept = significand >> shift
        remainder = significand - (kept << shift)
        code = kept + (tl.maximum(field - LOWEST, 0) << MANTISSA)
        if ROUNDING == "nearest_even":
            code += (2 * remainder + (code & 1) > (1 << shift)).to(tl.int32)
        elif ROUNDING == "ties_away":
            code += (2 * remainder >= (1 << shift)).to(tl.int32)
        elif ROUNDING == "away_from_zero":
            code += (remainder > 0).to(tl.int32)
        elif ROUNDING == "stochastic":
            widened = remainder.to(tl.int64) << tl.maximum(32 - dropped, 0).to(tl.int64)
            threshold = widened >> tl.minimum(tl.maximum(dropped - 32, 0), 63).to(tl.int64)
            code += (words.to(tl.int64) & 0xFFFFFFFF < threshold).to(tl.int32)
        return tl.minimum(code, MAX_CODE + 1 if SPECIAL else MAX_CODE)


@triton.jit
def with_sign(code, x, SIGN_SHIFT: tl.constexpr, INTEGER: tl.constexpr, SPECIAL: tl.constexpr, MAX_CODE: tl.constexpr,
              HAS_INF: tl.constexpr):  # fmt: skip
    """Codes with the sign of x. `SIGN_SHIFT`: from float32's sign bit down to the code's."""
    bits = bits_of(x)
    if INTEGER:
        return tl.where(bits < 0, -code, code) & ((1 << (32 - SIGN_SHIFT)) - 1)
    else:
        signed = code | ((bits >> SIGN_SHIFT) & (1 << (31 - SIGN_SHIFT)))
        if SPECIAL and not HAS_INF:
            return tl.where(code > MAX_CODE, code, signed)  # a NaN carries no sign
        else:
            return signed


@triton.jit
def decode_magnitude(magnitude, MANTISSA: tl.constexpr, UNBIAS: tl.constexpr, MAX_CODE: tl.constexpr,
                     INF_CODE: tl.constexpr, CODES: tl.constexpr):  # fmt: skip
    """Float32 values of unsigned float codes: their fields put into a float32's, whose bias `UNBIAS` makes up for."""
    value = float_of(magnitude << (23 - MANTISSA)) * UNBIAS
    if MAX_CODE < CODES - 1:
        value = tl.where(magnitude > MAX_CODE, float_of(tl.where(magnitude == INF_CODE, INF, NAN)), value)
    return value


@triton.jit
def decode_code(code, MANTISSA: tl.constexpr, MAX_CODE: tl.constexpr, SIGN_SHIFT: tl.constexpr, INTEGER: tl.constexpr,
                UNBIAS: tl.constexpr, INF_CODE: tl.constexpr):  # fmt: skip
    """Float32 values of codes with their sign bit."""
    if INTEGER:
        return ((code << SIGN_SHIFT) >> SIGN_SHIFT).to(tl.float32) * UNBIAS
    else:
        magnitude = code & ((1 << (31 - SIGN_SHIFT)) - 1)
        value = decode_magnitude(magnitude, MANTISSA, UNBIAS, MAX_CODE, INF_CODE, 1 << (31 - SIGN_SHIFT))
        return float_of(bits_of(value) | ((code << SIGN_SHIFT) & ~MAGNITUDE))


@triton.jit
def decode_power(code):
    """2^(code - 127), the canonical NaN for 0xFF."""
    bits = tl.where(code == 0, 0x400000, code << 23)
    return float_of(tl.where(code == 255, NAN, bits))


@triton.jit
def inverse_power(code):
    """2^(127 - code) for codes 0 to 254."""
    return float_of(tl.where(code == 254, 0x400000, (254 - code) << 23))


@triton.jit
def scale_code(amax, RULE: tl.constexpr, EMAX: tl.constexpr, MANTISSA: tl.constexpr, MAX_BITS: tl.constexpr):
    """E8M0 codes of block maxima (float32 bits): the named rule, clamped; 0 for a block of zeros."""
    finite = tl.minimum(amax, INF - 1)
    if RULE == "even":
        finite += 1 << (22 - MANTISSA)
    exponent, significand = exponent_and_significand(finite)
    if RULE == "ceil":
        exponent += (significand > 0x800000).to(tl.int32)
    elif RULE == "rceil":
        exponent += (significand > ((MAX_BITS & 0x7FFFFF) | 0x800000)).to(tl.int32)
    return tl.where(amax == 0, 0, tl.minimum(tl.maximum(exponent - EMAX, 0), 254))
