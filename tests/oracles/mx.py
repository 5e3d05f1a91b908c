"""E8M0 scale rules and MX blocks, by rationals, one block at a time.

A block is a list of Python floats (float32 values). Scale exponents are integers, not codes, until the end.
"""

import math
from fractions import Fraction

import numpy as np

from oracles.elements import Element, decode, encode
from oracles.rationals import FP32, Binary, ceil_log2, float32_bits, float32_from_bits, floor_log2, round_fraction

MANTISSA_BITS = {"int8": 7}  # OCP's MXINT8 counts its 7 bits below the sign


def clamp(exponent: int) -> int:
    return max(-127, min(127, exponent))


def mantissa_bits(element: Element) -> int:
    return MANTISSA_BITS.get(element.name, element.mantissa_bits)


def floor_exponent(amax: Fraction, element: Element) -> int:
    return clamp(floor_log2(amax) - element.emax)


def ceil_exponent(amax: Fraction, element: Element) -> int:
    return clamp(ceil_log2(amax) - element.emax)


def rceil_exponent(amax: Fraction, element: Element) -> int:
    """The smallest e with amax <= max * 2**e, found by trying."""
    e = floor_log2(amax) - element.emax - 3
    while amax > element.max * Fraction(2) ** e:
        e += 1
    return clamp(e)


def even_exponent(amax: Fraction, element: Element) -> int:
    """bits(amax) + half a unit of the element's mantissa, then floor; past the top counts as 128."""
    pattern = float32_bits(float(amax)) + (1 << (22 - mantissa_bits(element)))
    if pattern >= 0x7F800000:
        return clamp(128 - element.emax)
    return clamp(floor_log2(Fraction(float(float32_from_bits(pattern)))) - element.emax)


def even_one_bit_exponent(amax: Fraction, element: Element) -> int:
    """Rounded up from 1.75 times a power of two on; past the top counts as 128."""
    exponent = floor_log2(amax)
    threshold = Fraction(2) ** exponent * Fraction(7, 4) if exponent >= -126 else Fraction(2) ** -126 * Fraction(3, 4)
    if exponent < -126:  # bits of a subnormal carry into the exponent at 3/4 of the smallest normal number
        return clamp((-126 if amax >= threshold else exponent) - element.emax)
    return clamp(exponent + (amax >= threshold) - element.emax)


def rfloor_exponent(amax: Fraction, element: Element) -> int:
    """The largest e with max * 2**e <= amax, found by trying."""
    e = floor_log2(amax) - element.emax + 2
    while element.max * Fraction(2) ** e > amax:
        e -= 1
    return clamp(e)


RULES = {
    "floor": floor_exponent,
    "even": even_exponent,
    "even_one_bit": even_one_bit_exponent,
    "ceil": ceil_exponent,
    "rceil": rceil_exponent,
    "rfloor": rfloor_exponent,
}


def element_codes(
    block, exponent: int, element: Element, rounding="nearest_even", overflow="saturate", words=None
) -> list[int]:
    """Codes nearest to the exact quotients; `words` are the random words of the elements."""
    codes = []
    for i, x in enumerate(block):
        exact = float(x) if x == 0 or math.isinf(x) else Fraction(float(x)) / Fraction(2) ** exponent
        codes.append(encode(exact, element, rounding, overflow, words[i] if words is not None else None))
    return codes


def decoded(code: int, exponent: int | None, element: Element, binary: Binary = FP32) -> float:
    """The exact product rounded once; `exponent` None is the NaN scale."""
    value = decode(code, element)
    if exponent is None or (isinstance(value, float) and math.isnan(value)):
        return math.nan
    if isinstance(value, float):  # -0.0 and infinities
        return value
    return round_fraction(value * Fraction(2) ** exponent, binary)


def squared_error(block, codes, exponent: int, element: Element) -> np.float32:
    """Sequential float32 sum over i ascending of RN(d * d), d = RN(x - decoded)."""
    total = np.float32(0)
    with np.errstate(all="ignore"):
        for x, code in zip(block, codes):
            d = np.float32(x) - np.float32(decoded(code, exponent, element))
            total = total + d * d
    return total


def quantize_block(
    block,
    element: Element,
    rule: str = "floor",
    *,
    rounding="nearest_even",
    overflow="saturate",
    inf="nan",
    zero_block=0,
    words=None,
) -> tuple[int, list[int]]:
    """(scale code, element codes) of one block."""
    if any(math.isnan(x) for x in block) or (inf == "nan" and any(math.isinf(x) for x in block)):
        return 0xFF, [0] * len(block)
    if any(math.isinf(x) for x in block):
        return 254, element_codes(block, 127, element, rounding, "saturate", words)
    amax = max((abs(Fraction(float(x))) for x in block), default=Fraction(0))
    if amax == 0:
        return zero_block, element_codes(block, 0, element)
    if rule != "mse":
        exponent = RULES[rule](amax, element)
        return exponent + 127, element_codes(block, exponent, element, rounding, overflow, words)
    start, best = floor_exponent(amax, element), None
    for exponent in (start, clamp(start + 1), clamp(start - 1)):
        codes = element_codes(block, exponent, element, rounding, overflow, words)
        error = squared_error(block, codes, exponent, element)
        if best is None or error < best[0]:
            best = error, exponent, codes
    return best[1] + 127, best[2]


def quantize_rows(x: np.ndarray, element: Element, block_size: int = 32, rule: str = "floor", words=None, **policies):
    """Blocks of `block_size` along the last axis of a float32 array, the tail a shorter block."""
    x = np.asarray(x, dtype=np.float32)
    rows = x.reshape(-1, x.shape[-1])
    blocks = -(-x.shape[-1] // block_size)
    codes, scales = np.zeros(rows.shape, np.uint8), np.zeros((len(rows), blocks), np.uint8)
    words = None if words is None else np.asarray(words).reshape(rows.shape)
    for r, row in enumerate(rows):
        for b in range(blocks):
            part = slice(b * block_size, (b + 1) * block_size)
            own = None if words is None else [int(w) for w in words[r, part]]
            scales[r, b], codes[r, part] = quantize_block(
                [float(v) for v in row[part]], element, rule, words=own, **policies
            )
    return codes.reshape(x.shape), scales.reshape(x.shape[:-1] + (blocks,))


def dequantize_rows(
    codes: np.ndarray, scales: np.ndarray, element: Element, block_size: int = 32, binary: Binary = FP32
) -> np.ndarray:
    """The decoded values as float64 (each exactly a `binary` number)."""
    out = np.empty(codes.shape, np.float64)
    for index in np.ndindex(*codes.shape):
        byte = int(scales[index[:-1] + (index[-1] // block_size,)])
        out[index] = decoded(int(codes[index]), None if byte == 255 else byte - 127, element, binary)
    return out


def exponents_float64(amax: np.ndarray, element: Element, rule: str) -> np.ndarray:
    """The rules on an array of positive float32 values: `frexp` and comparisons, exact in float64."""
    amax = np.asarray(amax, dtype=np.float64)
    fraction, exponent = np.frexp(amax)  # 0.5 <= fraction < 1
    if rule == "floor":
        e = exponent - 1
    elif rule == "ceil":
        e = np.where(fraction == 0.5, exponent - 1, exponent)
    elif rule == "even":
        pattern = amax.astype(np.float32).view(np.uint32) + np.uint32(1 << (22 - mantissa_bits(element)))
        with np.errstate(all="ignore"):
            bumped = pattern.view(np.float32).astype(np.float64)
        e = np.where(pattern >= 0x7F800000, 128, np.frexp(np.where(np.isfinite(bumped), bumped, 1.0))[1] - 1)
    elif rule == "even_one_bit":
        normal = exponent - 1 >= -126
        e = np.where(normal, exponent - 1 + (fraction >= 0.875), np.where(amax >= 0.75 * 2.0**-126, -126, exponent - 1))
    elif rule == "rfloor":
        low = exponent - 1 - element.emax - 1
        e = low + sum((np.ldexp(float(element.max), low + 1 + i) <= amax).astype(int) for i in range(2)) + element.emax
    else:
        assert rule == "rceil"
        low = exponent - 1 - element.emax - 1
        e = low + sum((amax > np.ldexp(float(element.max), low + i)).astype(int) for i in range(3)) + element.emax
    return np.clip(e - element.emax, -127, 127)


def boundary_amaxes(element: Element) -> np.ndarray:
    """float32 amaxes at, one ulp below and one ulp above every binade and every place where a rule turns."""
    binades = np.arange(-149, 128, dtype=np.float64)
    factors = [1.0, float(element.max) / 2.0**element.emax, 2 - 2.0 ** -(mantissa_bits(element) + 1), 1.75, 1.5, 1.25]
    exact = np.unique(np.concatenate([np.ldexp(f, binades.astype(int)) for f in factors]))
    exact = exact.astype(np.float32)[exact.astype(np.float32) == exact]
    top = np.finfo(np.float32).max
    with np.errstate(over="ignore"):
        around = np.concatenate([exact, np.nextafter(exact, np.float32(0)), np.nextafter(exact, np.float32(np.inf)), [top]])
    around = np.unique(around.astype(np.float32))
    return around[(around > 0) & np.isfinite(around)]
