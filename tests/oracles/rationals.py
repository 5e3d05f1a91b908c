"""Exact values and one correct rounding, with `fractions.Fraction`.

A number is a `Fraction`, or one of the floats `nan`, `inf`, `-inf`, `-0.0` where a Fraction cannot say it.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np


@dataclass(frozen=True)
class Binary:
    """A binary floating-point format: `precision` significant bits, exponents `emin` to `emax`."""

    name: str
    precision: int
    emin: int
    emax: int

    @property
    def max(self) -> Fraction:
        return (2 - Fraction(2) ** (1 - self.precision)) * Fraction(2) ** self.emax


FP32 = Binary("float32", 24, -126, 127)
BF16 = Binary("bfloat16", 8, -126, 127)
FP16 = Binary("float16", 11, -14, 15)
FP64 = Binary("float64", 53, -1022, 1023)
BINARIES = {b.name: b for b in (FP32, BF16, FP16, FP64)}


def floor_log2(value: Fraction) -> int:
    """The largest integer e with 2**e <= value (value > 0)."""
    e = value.numerator.bit_length() - value.denominator.bit_length()
    return e if Fraction(2) ** e <= value else e - 1


def ceil_log2(value: Fraction) -> int:
    """The smallest integer e with value <= 2**e (value > 0)."""
    e = floor_log2(value)
    return e if Fraction(2) ** e == value else e + 1


def nearest_integer_even(value: Fraction) -> int:
    """Round half to even (Python's own rule for Fraction)."""
    return round(value)


def round_fraction(value: Fraction, binary: Binary, negative: bool | None = None) -> float:
    """`value` correctly rounded (nearest, ties to even, overflow to infinity) as a Python float.

    `negative` gives the sign of a zero result; by default that of `value`.
    """
    negative = value < 0 if negative is None else negative
    if value == 0:
        return -0.0 if negative else 0.0
    magnitude = abs(value)
    ulp = Fraction(2) ** (max(floor_log2(magnitude), binary.emin) - binary.precision + 1)
    rounded = nearest_integer_even(magnitude / ulp) * ulp
    if rounded > binary.max:
        return -math.inf if negative else math.inf
    return -float(rounded) if negative else float(rounded)


def as_fraction(value) -> Fraction:
    """A finite float (or int) as the rational it is."""
    return Fraction(float(value))


def round_float64(values: np.ndarray, binary: Binary) -> np.ndarray:
    """The float64 `values` correctly rounded to `binary`, still as float64.

    Exact: scaling by a power of two and `rint` lose nothing here as long as the scaled numbers stay inside float64,
    which they do for |values| in 2**-900 ... 2**900 and for 0, inf, nan.
    """
    values = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(values)
    safe = np.where(finite, values, 1.0)
    _, exponent = np.frexp(safe)  # safe = m * 2**exponent with 0.5 <= |m| < 1
    shift = np.maximum(exponent - 1, binary.emin) - (binary.precision - 1)
    rounded = np.ldexp(np.rint(np.ldexp(safe, -shift)), shift)
    rounded = np.where(np.abs(rounded) > float(binary.max), np.copysign(np.inf, safe), rounded)
    return np.where(finite, rounded, values)


def float32_bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def float32_from_bits(bits) -> np.ndarray:
    return np.asarray(bits, dtype=np.uint32).view(np.float32)
