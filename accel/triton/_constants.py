"""Compile-time constants of kernels, taken from mxref's records; no format constant is written here."""

from mxref.formats import BlockFormat, ElementFormat
from mxref.orders import float32_ratio

FLOAT_BIAS = 127


def element_constants(element: ElementFormat) -> dict[str, int | float | bool]:
    """What `_tiles.py` needs to know of an element."""
    integer = element.kind == "integer"
    lowest = FLOAT_BIAS - element.bias + element.mantissa_bits if integer else element.min_exponent + FLOAT_BIAS
    return {
        "BITS": element.bits,
        "MANTISSA": element.mantissa_bits,
        "LOWEST": lowest,
        "MAX": element.max,
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
    power_of_two = scale.is_power_of_two
    codec = element_constants(scale)
    return {
        "POWER_OF_TWO": power_of_two,
        "SCALE_NAN": scale.nan_code,
        "SCALE_MAX_CODE": scale.max_code,
        "SCALE_MANTISSA": codec["MANTISSA"],
        "SCALE_LOWEST": codec["LOWEST"],
        "SCALE_MAX": codec["MAX"],
        "SCALE_UNBIAS": 1.0 if power_of_two else codec["UNBIAS"],
        "SCALE_BITS": scale.max_code.bit_length(),
        "SIXTH": float32_ratio(1.0, format.element.max),
    }
