"""Compile-time constants of kernels, taken from mxref's records; no format constant is written here."""

import struct

from mxref.formats import BlockFormat, ElementFormat

FLOAT_BIAS, FLOAT_FRACTION_BITS = 127, 23


def float_bits(value: float) -> int:
    """Bits of a float that float32 represents exactly."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


def element_constants(element: ElementFormat) -> dict[str, int | float | bool]:
    """What `round_to_code` and `with_sign` need to know of an element."""
    integer = element.kind == "integer"
    lowest = FLOAT_BIAS - element.bias + element.mantissa_bits if integer else element.min_exponent + FLOAT_BIAS
    return {
        "MANTISSA": element.mantissa_bits,
        "LOWEST": lowest,
        "MAX_BITS": float_bits(element.max),
        "MAX_CODE": element.max_code,
        "SIGN_SHIFT": 32 - element.bits,
        "INTEGER": integer,
        "EMAX": element.emax,
        "UNBIAS": 2.0 ** (-element.bias if integer else FLOAT_BIAS - element.bias),
        "INF_CODE": -1 if element.inf_code is None else element.inf_code,
        "NAN_CODE": -1 if element.nan_code is None else element.nan_code,
    }


def scale_constants(format: BlockFormat) -> dict[str, int | float | bool]:
    """What the block kernels need to know of a scale format and of the element's largest value."""
    scale = format.scale
    constants = {"POWER_OF_TWO": scale.is_power_of_two, "SCALE_NAN": scale.nan_code, "SCALE_MAX_CODE": scale.max_code}
    if not scale.is_power_of_two:
        codec = element_constants(scale)
        constants |= {
            "SCALE_MANTISSA": codec["MANTISSA"],
            "SCALE_LOWEST": codec["LOWEST"],
            "SCALE_MAX_BITS": codec["MAX_BITS"],
            "SCALE_UNBIAS": codec["UNBIAS"],
            "SIXTH": struct.unpack("<f", struct.pack("<f", 1.0 / format.element.max))[0],
        }
    else:
        constants |= {"SCALE_MANTISSA": 0, "SCALE_LOWEST": 0, "SCALE_MAX_BITS": 0, "SCALE_UNBIAS": 1.0, "SIXTH": 1.0}
    return constants
