"""Device functions: the arithmetic of the reference on tiles of registers.

Every step is an int32 operation, or an IEEE 754 operation defined to the last bit: no fp8 cast, no approximate division, no
library exponential. Kernels are launched with fp fusion off. Formats and recipes arrive as compile-time constants that
`_constants.py` takes from mxref's records. The literals here are those of float32: 23 fraction bits (0x7FFFFF, hidden bit
0x800000), bias 127.
"""

import os

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INF = tl.constexpr(0x7F800000)
NAN = tl.constexpr(0x7FC00000)
FLOAT_MAX = tl.constexpr(float.fromhex("0x1.fffffep127"))
R2, R1, R0 = (tl.constexpr(float.fromhex(c)) for c in ("0x1.4afd66p-2", "-0x1.745d12p+0", "0x1.0f83dap+1"))


@triton.jit
def wait_for_previous():
    """Go on once the launch before has ended and what it wrote can be read, where this one may start before that."""
    if not INTERPRETED:
        gdc_wait()


@triton.jit
def launch_next():
    """Let the next launch start before this one has ended; it waits itself before it reads what this one writes."""
    if not INTERPRETED:
        gdc_launch_dependents()


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def negative(x):
    """-x of float32, which Triton would make 0 - x: an instruction of its own."""
    return x * -1.0


@triton.jit
def fused(x, y, z):
    """Float32 x * y + z, rounded once."""
    if INTERPRETED:  # whose fma rounds twice: a float64 sum rounded to odd, then to float32
        product = x.to(tl.float64) * y
        sum = product + z
        rest = sum - product
        lost = (product - (sum - rest)) + (z - rest)
        bits = sum.to(tl.int64, bitcast=True)
        nearer = tl.where((lost > 0.0) == (sum > 0.0), 1, -1)
        return (bits + tl.where((lost != 0.0) & (bits & 1 == 0), nearer, 0)).to(tl.float64, bitcast=True).to(tl.float32)
    else:
        return tl.fma(x, y, z)


@triton.jit
def nearer_reciprocal(x, y):
    """1 / x, at most one unit in the last place off, for float32 from 1 to 2, from `y` within 1.1 percent."""
    error = fused(negative(x), y, 1.0)
    y = fused(y, error, y)
    return fused(y, error * error, y)


@triton.jit
def reciprocal(x):
    """1 / x as `tl.div_rn` rounds it, for float32 from 0 to Inf: computed both ways of every one. It has no branch, so that
    it takes no time beside other work."""
    up = tl.where(x < 2.0**-126, 2.0**24, 1.0)
    bits = bits_of(x * up)
    exponent, significand = bits & INF, float_of(bits & 0x7FFFFF | 0x3F800000)
    near = nearer_reciprocal(significand, fused(significand, fused(significand, R2, R1), R0))
    # what is to be subnormal is rounded beside a number whose last place is its own
    low = exponent >= 253 << 23
    beside = float_of(tl.where(low, exponent - (126 << 23), 0))
    y = float_of(bits_of(near) & tl.where(low, -4, -1))
    error = fused(negative(significand), y, 1.0)
    y = fused(error, near, y + beside) - beside
    down = tl.where(exponent == INF, 0, tl.maximum((254 << 23) - exponent, 0x400000))
    return y * float_of(down) * up


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
    rounded = narrow_numbers(x, like)
    if like == tl.int16:
        return tl.where(x != x, 0x7FC0, rounded).to(tl.int16)
    elif like == tl.float16:
        return tl.where(x != x, 0x7E00, rounded.to(tl.int16, bitcast=True)).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        return float_of(tl.where(x != x, NAN, bits_of(x)))


@triton.jit
def narrow_numbers(x, like: tl.constexpr):
    """As `narrow`, of values among which is no NaN."""
    if like == tl.int16:
        if INTERPRETED:  # the interpreter's cast truncates
            bits = bits_of(x)
            return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
        else:
            return x.to(tl.bfloat16).to(tl.int16, bitcast=True)
    else:
        return x.to(like)


@triton.jit
def narrow_or_nan(x, like: tl.constexpr):
    """As `narrow`, with some NaN for every NaN."""
    if like == tl.int16 and INTERPRETED:  # integers, which could carry a NaN beyond the NaN
        return narrow(x, like)
    else:
        return narrow_numbers(x, like)


@triton.jit
def nan_of(like: tl.constexpr):
    """The canonical NaN as `narrow` stores it."""
    if like == tl.int16:
        return tl.full((), 0x7FC0, tl.int16)
    else:
        return tl.full((), float("nan"), like)


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
def round_to_step(magnitude, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, MAX: tl.constexpr):
    """(sum, anchor) of float32 magnitudes, NaN excepted: sum - anchor is the nearest value of a format, ties to even,
    saturating at `MAX`, and `step_code` its code.

    `LOWEST`: the biased float32 exponent from which down the step between codes is constant; for an integer format it
    lies above all values. One float32 addition rounds: the last place of the anchor is the step between codes where the
    magnitude lies.
    """
    magnitude = tl.minimum(magnitude, MAX)
    shift: tl.constexpr = (23 - MANTISSA) << 23
    anchor = float_of(tl.maximum((bits_of(magnitude) & INF) + shift, (LOWEST << 23) + shift))
    return magnitude + anchor, anchor


@triton.jit
def step_code(sum, anchor, MANTISSA: tl.constexpr, LOWEST: tl.constexpr):
    """Int32 codes of what `round_to_step` gave: the steps above the anchor, and those of the binades below."""
    lowest: tl.constexpr = ((LOWEST << 23) + ((23 - MANTISSA) << 23)) >> (23 - MANTISSA)
    return bits_of(sum) - bits_of(anchor) + (bits_of(anchor) >> (23 - MANTISSA)) - lowest


@triton.jit
def nearest_code(magnitude, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, MAX: tl.constexpr, MAX_CODE: tl.constexpr,
                 INTEGER: tl.constexpr, UNBIAS: tl.constexpr):  # fmt: skip
    """Int32 codes nearest to float32 magnitudes, NaN excepted, ties to even, saturating.

    Within a binade codes are a line over the magnitudes; all binades together, the smallest of their lines. Each is
    rounded to an integer by one addition of 2^23, and rounding keeps the order.
    """
    binades: tl.constexpr = 1 if INTEGER else MAX_CODE >> MANTISSA
    if binades <= 3:
        slope: tl.constexpr = 1.0 / UNBIAS if INTEGER else 2.0 ** (MANTISSA + 127 - LOWEST)
        nearest = bits_of(tl.fma(magnitude, tl.full(magnitude.shape, slope, tl.float32), 8388608.0))
        if binades > 1:
            second = tl.fma(magnitude, tl.full(magnitude.shape, slope / 2, tl.float32), 8388608.0 + (1 << MANTISSA))
            nearest = tl.minimum(nearest, bits_of(second))
        if binades > 2:
            third = tl.fma(magnitude, tl.full(magnitude.shape, slope / 4, tl.float32), 8388608.0 + (2 << MANTISSA))
            nearest = tl.minimum(nearest, bits_of(third))
        return tl.minimum(nearest, 0x4B000000 + MAX_CODE) - 0x4B000000
    else:
        sum, anchor = round_to_step(magnitude, MANTISSA, LOWEST, MAX)
        return step_code(sum, anchor, MANTISSA, LOWEST)


@triton.jit
def round_to_code(x, words, ROUNDING: tl.constexpr, SPECIAL: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr,
                  MAX: tl.constexpr, MAX_CODE: tl.constexpr):  # fmt: skip
    """Int32 magnitude codes of float32 values; NaN is the caller's business. `SPECIAL`: values beyond the largest code give
    that code + 1 instead of saturating. `words`: random words, for stochastic rounding alone."""
    if ROUNDING == "nearest_even" and not SPECIAL:
        sum, anchor = round_to_step(tl.abs(x), MANTISSA, LOWEST, MAX)
        return step_code(sum, anchor, MANTISSA, LOWEST)
    else:
        magnitude = bits_of(x) & MAGNITUDE
        largest = bits_of(tl.full(x.shape, MAX, tl.float32))
        if not SPECIAL:
            magnitude = tl.minimum(magnitude, largest)
        elif ROUNDING == "toward_zero":
            magnitude = tl.where(magnitude < INF, tl.minimum(magnitude, largest), magnitude)
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
def quotient_code(numerator, denominator, BITS: tl.constexpr, MANTISSA: tl.constexpr, MAX_CODE: tl.constexpr,
                  INTEGER: tl.constexpr, UNBIAS: tl.constexpr):  # fmt: skip
    """Int32 magnitude codes nearest to the exact |numerator| / denominator, ties to even, saturating; 0 where the
    denominator, a float64, is 0. Bit by bit from the top: a code is reached if the numerator is not below the midpoint
    beneath it times the denominator, a product that float64 holds exactly."""
    magnitude = tl.abs(numerator).to(tl.float64)
    code = tl.zeros(magnitude.shape, tl.int32)
    for place in tl.static_range(BITS):
        candidate = code + (1 << (BITS - 1 - place))
        below = decode_magnitude(candidate - 1, MANTISSA, INTEGER, UNBIAS)
        midpoint = (below + decode_magnitude(candidate, MANTISSA, INTEGER, UNBIAS)) * 0.5
        threshold = midpoint.to(tl.float64) * denominator
        reached = (magnitude > threshold) | ((magnitude == threshold) & (candidate % 2 == 0))
        code = tl.where(reached & (candidate <= MAX_CODE), candidate, code)
    return tl.where(denominator == 0.0, 0, code)


@triton.jit
def sign_of(code, x, NEGATIVE_ZERO: tl.constexpr, SPECIAL: tl.constexpr, MAX_CODE: tl.constexpr, INF_CODE: tl.constexpr):
    """1 where the code of a float format with magnitude `code`, rounded from x, has its sign bit set, else 0."""
    sign = (x.to(tl.uint32, bitcast=True) >> 31).to(tl.int32)
    if NEGATIVE_ZERO == "drop_quotient":
        sign = tl.where(x == 0.0, 0, sign)
    elif NEGATIVE_ZERO == "drop":
        sign = tl.where(code == 0, 0, sign)
    if SPECIAL and INF_CODE < 0:
        sign = tl.where(code > MAX_CODE, 0, sign)  # a NaN carries no sign
    return sign


@triton.jit
def decode_magnitude(code, MANTISSA: tl.constexpr, INTEGER: tl.constexpr, UNBIAS: tl.constexpr):
    """Float32 values of finite magnitude codes: their fields put into a float32's, whose bias `UNBIAS` makes up for."""
    if INTEGER:
        return code.to(tl.float32) * UNBIAS
    else:
        return float_of(code << (23 - MANTISSA)) * UNBIAS


@triton.jit
def special_value(value, magnitude, MAX_CODE: tl.constexpr, INF_CODE: tl.constexpr, CODES: tl.constexpr):
    """`value`, or Inf or NaN where the magnitude code, one of `CODES`, is beyond the largest."""
    if MAX_CODE < CODES - 1:
        return tl.where(magnitude > MAX_CODE, float_of(tl.where(magnitude == INF_CODE, INF, NAN)), value)
    else:
        return value


@triton.jit
def decode_top(word, MANTISSA: tl.constexpr, MAX: tl.constexpr, MAX_CODE: tl.constexpr, SIGN_SHIFT: tl.constexpr,
               INTEGER: tl.constexpr, UNBIAS: tl.constexpr, INF_CODE: tl.constexpr):  # fmt: skip
    """Float32 values of the codes, sign bit and all, in the top bits of int32 words, and which of them are NaN (their value
    means nothing). What lies below does not matter."""
    if INTEGER:
        value = (word >> SIGN_SHIFT).to(tl.float32) * UNBIAS
        return value, value != value
    elif MANTISSA == 2 and INF_CODE == 0x7C and UNBIAS == 2.0**112:  # the upper byte of float16
        value = ((word >> 16) & -256).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        return value, value != value
    else:
        magnitudes: tl.constexpr = (1 << (31 - SIGN_SHIFT)) - 1
        kept: tl.constexpr = -(1 << 31) | (magnitudes << (23 - MANTISSA))
        value = float_of((word >> (SIGN_SHIFT - 23 + MANTISSA)) & kept) * UNBIAS
        special = tl.abs(value) > MAX
        if INF_CODE >= 0:
            infinite = special & (((word >> SIGN_SHIFT) & magnitudes) == INF_CODE)
            value = tl.where(infinite, float_of((word & ~MAGNITUDE) | INF), value)
            special = special & (infinite == 0)
        return value, special


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
def halves_of(code):
    """Powers of two whose product is 2^(code - 127), exponents half of it rounded down and up; for codes 0 to 254.

    The codes go to their place first: of `(code - 127) >> 1` a compiler makes 16-bit additions, two an instruction, and
    ptxas of CUDA 12.8 has computed such an addition again with 0 for one of the two 127s."""
    place = code << 22
    low = ((place + 0x400000) & 0x7F800000) + (63 << 23)
    return float_of(low), float_of((place & 0x7F800000) + (64 << 23))


@triton.jit
def scale_code(amax, RULE: tl.constexpr, EMAX: tl.constexpr, MANTISSA: tl.constexpr, MAX: tl.constexpr):
    """E8M0 codes of finite block maxima (float32 bits): the named rule, clamped; 0 for a block of zeros."""
    if RULE == "even":
        amax += 1 << (22 - MANTISSA)
    if EMAX > 0 or RULE == "floor" or RULE == "even":  # then every subnormal amax gives code 0, normalised or not
        exponent, significand = amax >> 23, amax & 0x7FFFFF | 0x800000
    else:
        exponent, significand = exponent_and_significand(amax)
    if RULE == "ceil":
        exponent += (significand > 0x800000).to(tl.int32)
    elif RULE == "rceil":
        largest = bits_of(tl.full(amax.shape, MAX, tl.float32)) & 0x7FFFFF | 0x800000
        exponent += (significand > largest).to(tl.int32)
    return tl.minimum(tl.maximum(exponent - EMAX, 0), 254)
