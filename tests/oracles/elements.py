"""Element codecs by search over exact values: no bit field of an input is ever looked at."""

import bisect
import functools
import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np


@dataclass(frozen=True)
class Element:
    """One row of the table of element formats, written down a second time."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: str = "none"  # none | nan | ieee
    signed: bool = True
    zero: bool = True
    integer: bool = False

    @property
    def bits(self) -> int:
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    @property
    def sign_bit(self) -> int:
        return 1 << (self.bits - 1) if self.signed else 0

    def magnitude(self, code: int) -> Fraction:
        """Value of the magnitude code, continued above the largest one as if there were more exponents."""
        if self.integer:
            return Fraction(code, 1 << self.bias)
        exponent, mantissa = divmod(code, 1 << self.mantissa_bits)
        fraction = Fraction(mantissa, 1 << self.mantissa_bits)
        if exponent == 0 and self.zero:
            return fraction * Fraction(2) ** (1 - self.bias)
        return (1 + fraction) * Fraction(2) ** (exponent - self.bias)

    @functools.cached_property
    def magnitudes(self) -> list[Fraction]:
        """All finite magnitudes, ascending; the index is the code without its sign."""
        count = 1 << (self.exponent_bits + self.mantissa_bits)
        if self.specials == "nan":
            count -= 1
        elif self.specials == "ieee":
            count -= 1 << self.mantissa_bits
        return [self.magnitude(c) for c in range(count)]

    @property
    def max_code(self) -> int:
        return len(self.magnitudes) - 1

    @property
    def max(self) -> Fraction:
        return self.magnitudes[-1]

    @property
    def beyond(self) -> Fraction:
        """The first value above `max` that the next magnitude code would have."""
        return self.magnitude(self.max_code + 1)

    @property
    def emax(self) -> int:
        e = 0
        while Fraction(2) ** (e + 1) <= self.max:
            e += 1
        return e

    @property
    def nan_code(self) -> int:
        assert self.specials != "none"
        return (1 << (self.exponent_bits + self.mantissa_bits)) - 1

    def signed_code(self, magnitude_code: int, negative: bool) -> int:
        if not negative:
            return magnitude_code
        assert self.signed
        return -magnitude_code % (1 << self.bits) if self.integer else magnitude_code | self.sign_bit


ELEMENTS = {
    e.name: e
    for e in (
        Element("e2m1", 2, 1, 1),
        Element("e2m3", 2, 3, 1),
        Element("e3m2", 3, 2, 3),
        Element("e4m3", 4, 3, 7, specials="nan"),
        Element("e5m2", 5, 2, 15, specials="ieee"),
        Element("int8", 0, 7, 6, integer=True),
        Element("e8m0", 8, 0, 127, specials="nan", signed=False, zero=False),
    )
}
FLOAT_ELEMENTS = ["e2m1", "e2m3", "e3m2", "e4m3", "e5m2"]
ALL_ELEMENTS = list(ELEMENTS)
DETERMINISTIC_ROUNDINGS = ["nearest_even", "toward_zero", "ties_away", "ties_toward_zero", "away_from_zero"]


def decode(code: int, element: Element):
    """The exact value of a code: a Fraction, or nan, inf, -inf, -0.0 as floats."""
    if element.integer:
        half = 1 << (element.bits - 1)
        return Fraction(code - 2 * half if code >= half else code, 1 << element.bias)
    negative = bool(code & element.sign_bit)
    magnitude = code & ~element.sign_bit
    if magnitude > element.max_code:
        if element.specials == "ieee" and magnitude == element.max_code + 1:
            return -math.inf if negative else math.inf
        return math.nan
    if magnitude == 0 and negative:
        return -0.0
    value = element.magnitudes[magnitude]
    return -value if negative else value


def decode_float64(codes: np.ndarray, element: Element) -> np.ndarray:
    """`decode` on an array; every value is exact in float64, NaN is numpy's."""
    table = np.array([float(decode(c, element)) for c in range(1 << element.bits)])
    return table[np.asarray(codes)]


def decode_integers(codes: np.ndarray, element: Element) -> np.ndarray:
    """Finite codes as Python integers in units of the smallest magnitude step, `quantum(element)`."""
    step = quantum(element)
    table = np.array(
        [int(v / step) if math.isfinite(v := decode(c, element)) else 0 for c in range(1 << element.bits)], dtype=object
    )
    return table[np.asarray(codes)]


def quantum(element: Element) -> Fraction:
    """The power of two every finite value is a multiple of."""
    return element.magnitude(1) if element.zero else element.magnitude(0)


def encode(
    value, element: Element, rounding: str = "nearest_even", overflow: str = "saturate", random_word: int | None = None
) -> int:
    """The code of an exact `value` (Fraction, or a float for -0.0, inf, nan), by search."""
    if isinstance(value, float) and math.isnan(value):
        if element.specials == "none":
            raise ValueError("no NaN")
        return element.nan_code
    negative = value < 0 or (isinstance(value, float) and math.copysign(1, value) < 0)
    if isinstance(value, float) and math.isinf(value):
        return _overflowed(element, negative, overflow)
    magnitude = abs(Fraction(value))
    low_code = bisect.bisect_right(element.magnitudes, magnitude) - 1
    if low_code < 0:  # below the smallest value of a format without a zero
        return 0
    if magnitude >= element.beyond:
        return (
            element.signed_code(element.max_code, negative)
            if rounding == "toward_zero"
            else _overflowed(element, negative, overflow)
        )
    low, high = element.magnitudes[low_code], element.magnitude(low_code + 1)
    discarded = (magnitude - low) / (high - low)
    if _rounds_up(discarded, low_code, rounding, random_word):
        low_code += 1
    if low_code > element.max_code:
        return _overflowed(element, negative, overflow)
    return element.signed_code(low_code, negative)


def _rounds_up(discarded: Fraction, low_code: int, rounding: str, random_word: int | None) -> bool:
    half = Fraction(1, 2)
    if rounding == "nearest_even":
        return discarded > half or (discarded == half and low_code % 2 == 1)
    if rounding == "ties_away":
        return discarded >= half
    if rounding == "ties_toward_zero":
        return discarded > half
    if rounding == "toward_zero":
        return False
    if rounding == "away_from_zero":
        return discarded > 0
    assert rounding == "stochastic"
    return random_word < math.floor(discarded * 2**32)


def _overflowed(element: Element, negative: bool, overflow: str) -> int:
    if overflow == "saturate":
        return element.signed_code(element.max_code, negative)
    assert overflow == "special" and element.specials != "none"
    if element.specials == "ieee":
        return element.signed_code(element.max_code + 1, negative)
    return element.nan_code  # the sign of a NaN is dropped


def encode_float64(
    values: np.ndarray, element: Element, rounding: str = "nearest_even", overflow: str = "saturate"
) -> np.ndarray:
    """`encode` on an array of float64 without NaN: the same search, every comparison exact in float64."""
    values = np.asarray(values, dtype=np.float64)
    ladder = np.array([float(m) for m in element.magnitudes] + [float(element.beyond)])
    magnitude, negative = np.abs(values), np.signbit(values)
    low = np.clip(np.searchsorted(ladder, magnitude, side="right") - 1, 0, element.max_code)
    middle = (ladder[low] + ladder[low + 1]) / 2
    up = {
        "nearest_even": (magnitude > middle) | ((magnitude == middle) & (low % 2 == 1)),
        "ties_away": magnitude >= middle,
        "ties_toward_zero": magnitude > middle,
        "toward_zero": np.zeros(low.shape, dtype=bool),
        "away_from_zero": magnitude > ladder[low],
    }[rounding]
    code = low + up
    over = code > element.max_code
    if rounding == "toward_zero":
        over = np.isinf(magnitude)
    code = np.minimum(code, element.max_code)
    if overflow == "special":
        code = np.where(over, element.max_code + 1 if element.specials == "ieee" else element.nan_code, code)
    if element.integer:
        code = np.where(negative, -code % (1 << element.bits), code)
    else:
        keeps_sign = negative if element.specials != "nan" or overflow != "special" else negative & ~over
        code = np.where(keeps_sign, code | element.sign_bit, code)
    return code.astype(np.uint8)
