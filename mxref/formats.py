"""The two tables: element formats and block formats. No other file knows a constant of a format.

A format is a frozen record of a few fields; every other property (its values, largest value,
midpoints, bits per element ...) is derived from those fields. A record of your own works wherever
a name does:

>>> E1M2 = ElementFormat("e1m2", exponent_bits=1, mantissa_bits=2, bias=1)
>>> E1M2.values[:8]
(0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75)
>>> BlockFormat("mine", element=E1M2, scale=ELEMENT_FORMATS["e8m0"], block_size=16).bits_per_element
4.5
"""

import math
import numbers
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

Record = TypeVar("Record")

FLOAT_BIAS, FLOAT_MANTISSA_BITS = 127, 23  # IEEE 754 binary32, in which all inputs are read
FLOAT_MAX, FLOAT_SMALLEST = float.fromhex("0x1.fffffep127"), float.fromhex("0x1p-149")


def by_name(*rows: Record) -> dict[str, Record]:
    """A table of records, each under its own name."""
    return {row.name: row for row in rows}


def look_up(argument: str, given: str | Record, table: dict[str, Record], record: type[Record]) -> Record:
    """The record that `given` names in `table`, or `given` itself."""
    if isinstance(given, record):
        return given
    if isinstance(given, str) and given in table:
        return table[given]
    raise ValueError(f"{argument}={given!r}: expected one of {', '.join(table)}, or a {record.__name__} record")


def check_type(argument: str, given: object, kind: type) -> None:
    """Raise TypeError unless `given` is a `kind`."""
    if not isinstance(given, kind):
        raise TypeError(f"{argument} has type {type(given).__name__}: expected {kind.__name__}")


def check_choice(argument: str, given: str | int, known: tuple[str, ...] | tuple[int, ...]) -> None:
    """Raise ValueError unless `given` is one of `known`."""
    if not isinstance(given, type(known[0])) or given not in known:
        raise ValueError(f"{argument}={given!r}: expected one of {', '.join(map(str, known))}")


def check_number(argument: str, given: float, low: float, high: float = math.inf, expected: str = "") -> None:
    """Raise TypeError unless `given` is a number (an int where `low` is one), ValueError unless it is in `low` to `high`."""
    kind, name = (int, "an int") if isinstance(low, int) else (numbers.Real, "a number")
    within = f">= {low}" if high == math.inf else f"from {low} to {high}"
    message = f"{argument}={given!r}: expected {expected or f'{name} {within}'}"
    if isinstance(given, bool) or not isinstance(given, kind):
        raise TypeError(message)
    if not low <= given <= high:
        raise ValueError(message)


@dataclass(frozen=True)
class ElementFormat:
    """A number format of at most 8 bits: an element, or the scale of a block.

    `kind="float"`: code = sign | exponent field | mantissa field. `kind="integer"`: two's complement
    of `1 + mantissa_bits` bits times `2**-bias`. `specials` says which codes are not numbers:
    `"none"`, `"nan"` (all exponent and mantissa bits one is NaN), `"ieee"` (the top exponent field
    holds Inf and NaN). `zero=False`: exponent field 0 is an ordinary power of two, so the format has
    neither zero nor subnormals. `source` names the document and clause.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: str = "none"
    signed: bool = True
    zero: bool = True
    kind: str = "float"
    source: str = field(default="", compare=False)

    def __post_init__(self):
        check_choice("kind", self.kind, ("float", "integer"))
        check_choice("specials", self.specials, ("none", "nan", "ieee"))
        check_number("exponent_bits", self.exponent_bits, 0)
        check_number("mantissa_bits", self.mantissa_bits, 0)
        check_number("bias", self.bias, -2 * FLOAT_BIAS, 2 * FLOAT_BIAS, "an int with which float32 holds every value")
        if not 1 <= self.bits <= 8:
            raise ValueError(f"{self.name} has {self.bits} bits: expected 1 to 8 bits of sign, exponent and mantissa")
        if self.kind == "integer" and (self.exponent_bits or self.specials != "none" or not (self.signed and self.zero)):
            raise ValueError(f"{self.name}: an integer format is signed and has no exponent bits and no specials")
        if self.kind == "float" and self.exponent_bits == 0:
            raise ValueError(f"{self.name}: a float format needs exponent_bits >= 1; use kind='integer'")
        if self.specials == "ieee" and self.mantissa_bits == 0:
            raise ValueError(f"{self.name}: specials='ieee' needs mantissa bits to tell Inf from NaN")
        if self.max <= 0:
            raise ValueError(f"{self.name}: it has no value but zero")
        if self.kind == "float" and self.zero and self.min_exponent < 1 - FLOAT_BIAS:
            raise ValueError(f"{self.name}: its smallest normal value 2^{self.min_exponent} is a float32 subnormal")
        if not (FLOAT_SMALLEST <= self.quantum and self.emax <= FLOAT_BIAS):
            raise ValueError(f"{self.name}: float32 must hold every value ({self.max} and multiples of {self.quantum})")

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def code_count(self) -> int:
        """Number of codes, `2**bits`."""
        return 1 << self.bits

    @property
    def sign_mask(self) -> int:
        """The sign bit of a code; 0 where the format is unsigned."""
        return 1 << (self.bits - 1) if self.signed else 0

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value (float kind)."""
        return 1 - self.bias if self.zero else -self.bias

    @property
    def max_code(self) -> int:
        """Code of the largest finite value."""
        top = (1 << (self.exponent_bits + self.mantissa_bits)) - 1
        if self.specials == "nan":
            return top - 1
        if self.specials == "ieee":
            return top - (1 << self.mantissa_bits)
        return top

    @property
    def inf_code(self) -> int | None:
        """Code of +Inf, or None."""
        return self.max_code + 1 if self.specials == "ieee" else None

    @property
    def nan_code(self) -> int | None:
        """The NaN code that encoders emit (all exponent and mantissa bits one, sign 0), or None."""
        return None if self.specials == "none" else (1 << (self.exponent_bits + self.mantissa_bits)) - 1

    @cached_property
    def values(self) -> tuple[float, ...]:
        """Value of every code, in code order; NaN and Inf where the code says so."""
        return tuple(self._value(code) for code in range(self.code_count))

    def _value(self, code: int) -> float:
        if self.kind == "integer":
            return (code - (self.code_count if code & self.sign_mask else 0)) * 2.0**-self.bias
        sign = -1.0 if code & self.sign_mask else 1.0
        magnitude = code & ~self.sign_mask
        if magnitude > self.max_code:
            return sign * math.inf if magnitude == self.inf_code else math.nan
        exponent, mantissa = divmod(magnitude, 1 << self.mantissa_bits)
        if exponent == 0 and self.zero:
            return sign * math.ldexp(mantissa, 1 - self.bias - self.mantissa_bits)
        return sign * math.ldexp((1 << self.mantissa_bits) + mantissa, exponent - self.bias - self.mantissa_bits)

    @property
    def max(self) -> float:
        """Largest finite value."""
        return self.values[self.max_code]

    @property
    def emax(self) -> int:
        """Exponent of the largest finite value."""
        return math.frexp(self.max)[1] - 1

    @property
    def min_normal(self) -> float | None:
        """Smallest positive normal value; None for an integer format."""
        return None if self.kind == "integer" else math.ldexp(1.0, self.min_exponent)

    @property
    def min_subnormal(self) -> float | None:
        """Smallest positive value below `min_normal` (an integer's step); None where there is none."""
        return self.quantum if self.kind == "integer" or (self.zero and self.mantissa_bits) else None

    @property
    def positive(self) -> tuple[float, ...]:
        """The finite values of codes `0 ... max_code`, ascending."""
        return self.values[: self.max_code + 1]

    @cached_property
    def midpoints(self) -> tuple[float, ...]:
        """The value halfway between each of `positive` and its successor: where rounding ties."""
        return tuple((low + high) / 2 for low, high in zip(self.positive, self.positive[1:]))

    @property
    def quantum(self) -> float:
        """The power of two of which every finite value is an integer multiple."""
        return math.ldexp(1.0, -self.bias if self.kind == "integer" else self.min_exponent - self.mantissa_bits)

    @property
    def largest_multiple(self) -> int:
        """Largest |value| over `quantum`, the unused most negative integer code included."""
        return round(max(abs(v) for v in self.values if math.isfinite(v)) / self.quantum)

    @property
    def is_power_of_two(self) -> bool:
        """Whether every value is a power of two (an E8M0 kind of scale)."""
        return self.kind == "float" and self.mantissa_bits == 0 and not self.zero


@dataclass(frozen=True)
class BlockFormat:
    """A block-scaled format: `block_size` elements share one scale; `tensor_scale` says whether float32 scales the whole.

    Sources: OCP MX v1.0 section 5 for the MX rows; NVIDIA's definition of NVFP4.
    """

    name: str
    element: ElementFormat
    scale: ElementFormat
    block_size: int
    tensor_scale: bool = False
    source: str = field(default="", compare=False)

    def __post_init__(self):
        check_type("element", self.element, ElementFormat)
        check_type("scale", self.scale, ElementFormat)
        check_number("block_size", self.block_size, 1)
        if not self.scale.is_power_of_two and not (self.scale.kind == "float" and self.scale.mantissa_bits):
            raise ValueError(f"scale={self.scale.name!r}: expected powers of two without a zero, or a float format")
        if self.scale.nan_code is None:
            raise ValueError(f"scale={self.scale.name!r}: a scale needs a NaN code, for blocks that hold a NaN")
        if self.scale.is_power_of_two and self.scale.min_exponent < -FLOAT_BIAS:
            raise ValueError(f"scale={self.scale.name!r}: below 2^-{FLOAT_BIAS} a scale has no float32 reciprocal")
        if self.tensor_scale and self.scale.is_power_of_two:
            raise ValueError(f"{self.name}: a tensor scale goes with a scale that has mantissa bits")
        if self.element.kind == "float" and not (self.element.signed and self.element.zero):
            raise ValueError(f"element={self.element.name!r}: an element format is signed and has a zero")

    @property
    def bits_per_element(self) -> float:
        """Stored bits per element of a long row, scales included."""
        return self.element.bits + 8 / self.block_size

    @property
    def default_recipe(self) -> str:
        """Name of the recipe used when none is given."""
        return "ocp" if self.scale.is_power_of_two else "nvidia"


#                  name  exponent mantissa bias
ELEMENT_FORMATS = by_name(
    ElementFormat("e2m1", 2, 1, 1, source="OCP MX v1.0, 5.3.3 (FP4)"),
    ElementFormat("e2m3", 2, 3, 1, source="OCP MX v1.0, 5.3.2 (FP6)"),
    ElementFormat("e3m2", 3, 2, 3, source="OCP MX v1.0, 5.3.2 (FP6)"),
    ElementFormat("e4m3", 4, 3, 7, specials="nan", source="OCP OFP8 v1.0, 5 (E4M3)"),
    ElementFormat("e5m2", 5, 2, 15, specials="ieee", source="OCP OFP8 v1.0, 5 (E5M2)"),
    ElementFormat("int8", 0, 7, 6, kind="integer", source="OCP MX v1.0, 5.3.4 (INT8)"),
    ElementFormat("e8m0", 8, 0, 127, specials="nan", signed=False, zero=False, source="OCP MX v1.0, 5.4.1 (E8M0)"),
)


def _block(name: str, element: str, scale: str, block_size: int, **others) -> BlockFormat:
    return BlockFormat(name, ELEMENT_FORMATS[element], ELEMENT_FORMATS[scale], block_size, **others)


BLOCK_FORMATS = by_name(
    _block("mxfp4", "e2m1", "e8m0", 32, source="OCP MX v1.0, 5.2 (MXFP4)"),
    _block("mxfp6_e2m3", "e2m3", "e8m0", 32, source="OCP MX v1.0, 5.2 (MXFP6)"),
    _block("mxfp6_e3m2", "e3m2", "e8m0", 32, source="OCP MX v1.0, 5.2 (MXFP6)"),
    _block("mxfp8_e4m3", "e4m3", "e8m0", 32, source="OCP MX v1.0, 5.2 (MXFP8)"),
    _block("mxfp8_e5m2", "e5m2", "e8m0", 32, source="OCP MX v1.0, 5.2 (MXFP8)"),
    _block("mxint8", "int8", "e8m0", 32, source="OCP MX v1.0, 5.2 (MXINT8)"),
    _block("nvfp4", "e2m1", "e4m3", 16, tensor_scale=True, source="NVIDIA Transformer Engine, NVFP4"),
)


def element_format(element: str | ElementFormat, argument: str = "element") -> ElementFormat:
    """The record that `element` names, or `element` itself; ValueError lists the known names."""
    return look_up(argument, element, ELEMENT_FORMATS, ElementFormat)


def block_format(format: str | BlockFormat, argument: str = "format") -> BlockFormat:
    """The record that `format` names, or `format` itself; ValueError lists the known names."""
    return look_up(argument, format, BLOCK_FORMATS, BlockFormat)
