"""Element codes: `encode`, `decode`, and the only place that rounds to a narrow format.

Encoding works on the bit fields of the float32 input, in integers: no cast, no logarithm, no
library rounding mode can change it. Random bits for stochastic rounding are Philox4x32-10 of a
seed and of the element's index, so they do not depend on layout, device or batch.
"""

import struct
from functools import lru_cache

import torch

from mxref.formats import FLOAT_BIAS, FLOAT_MANTISSA_BITS, ElementFormat, check_choice, check_number, element_format
from mxref.registry import op, op_without_gradient

ROUNDINGS = ("nearest_even", "toward_zero", "ties_away", "ties_toward_zero", "away_from_zero", "stochastic")
OVERFLOWS = ("saturate", "special")
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

MAGNITUDE_MASK = 0x7FFFFFFF
INF_BITS = 0x7F800000
HIDDEN_BIT = 1 << FLOAT_MANTISSA_BITS


@op_without_gradient
def encode(
    x: torch.Tensor,
    element: str | ElementFormat,
    *,
    rounding: str = "nearest_even",
    overflow: str = "saturate",
    seed: int | None = None,
) -> torch.Tensor:
    """Encode each value of `x` to the nearest code of an element format.

    `x`: any shape, float32, bfloat16 or float16 (widened exactly). Returns uint8 codes of the same
    shape. `rounding`: `nearest_even` (ties to the even code), `toward_zero`, `ties_away`, `ties_toward_zero`,
    `away_from_zero` or `stochastic` (needs `seed`; element i, row-major, rounds up iff word 0 of
    Philox4x32-10 with key `seed` and counter i is below floor(2^32 * discarded fraction)).
    `overflow`: `saturate` to the largest finite value, Inf included, or `special` (Inf, or NaN where
    the format has no Inf). The sign of zero is kept, the sign of NaN is dropped.

    Raises TypeError for another dtype; ValueError for an unknown name, a NaN where the format has
    none, a negative value where it has no sign, `special` where it has neither Inf nor NaN, or a
    seed that is missing or not used. Source: OCP MX v1.0, 5.3 (round to nearest, ties to even; saturate); OFP8 v1.0, 5.2.

    >>> encode(torch.tensor([0.25, 0.75, 5.0, -0.1, 1e9]), "e2m1").tolist()
    [0, 2, 6, 8, 7]
    """
    element = check_encode(x, element, rounding, overflow, seed)
    x = x.detach().resolve_neg().float()
    random_words = None
    if rounding == "stochastic":
        random_words = philox(seed, torch.arange(x.numel(), device=x.device).reshape(x.shape))
    codes = round_to_codes(x, element, rounding, overflow, random_words)
    if element.nan_code is not None:
        codes = torch.where(x.isnan(), element.nan_code, codes)
    return codes.to(torch.uint8)


def check_encode(x: torch.Tensor, element, rounding: str, overflow: str, seed: int | None) -> ElementFormat:
    """The element format, after the arguments of `encode` have been checked."""
    element = element_format(element)
    check_float("x", x)
    check_choice("rounding", rounding, ROUNDINGS)
    check_choice("overflow", overflow, OVERFLOWS)
    check_seed(seed, rounding)
    if overflow == "special" and element.specials == "none":
        raise ValueError(f"overflow='special': {element.name} has neither Inf nor NaN; expected 'saturate'")
    if element.nan_code is None and x.isnan().any():
        raise ValueError(f"x holds NaN, which {element.name} cannot represent")
    if not element.signed and (x < 0).any():
        raise ValueError(f"x holds negative values, which {element.name} cannot represent")
    return element


@op
def decode(codes: torch.Tensor, element: str | ElementFormat) -> torch.Tensor:
    """Decode element codes to their exact values.

    `codes`: uint8, any shape. Returns float32 of the same shape; NaN codes give the canonical NaN.
    Raises TypeError if `codes` is not uint8, ValueError for a code the format does not have.
    Source: OCP MX v1.0, 5.3 and 5.4; OFP8 v1.0, 5.

    >>> decode(torch.tensor([0, 1, 7, 8, 15], dtype=torch.uint8), "e2m1").tolist()
    [0.0, 0.5, 6.0, -0.0, -6.0]
    """
    element = element_format(element)
    check_codes("codes", codes, element)
    return decode_codes(codes, element)


def round_to_codes(
    x: torch.Tensor, element: ElementFormat, rounding: str = "nearest_even", overflow: str = "saturate", random_words=None
) -> torch.Tensor:
    """Round float32 values to int32 codes; NaN is the caller's business."""
    bits = x.view(torch.int32)
    magnitude = bits & MAGNITUDE_MASK
    if overflow == "saturate":
        magnitude.clamp_(max=float_bits(element.max))
    elif rounding == "toward_zero":  # no finite value overflows: it would have to move away from zero
        magnitude = torch.where(magnitude < INF_BITS, magnitude.clamp(max=float_bits(element.max)), magnitude)

    # |x| = significand * 2^(exponent - 127 - 23). A format with a zero has the fixed step 2^(lowest - ...) from
    # `lowest` down, so float32 subnormals need no normalising: they just keep their missing hidden bit. One without
    # a zero rounds what is below its smallest value up to that.
    if element.zero:
        exponent = (magnitude >> FLOAT_MANTISSA_BITS).clamp_(min=1)
        significand = magnitude - ((exponent - 1) << FLOAT_MANTISSA_BITS)
    else:
        exponent, significand = split(magnitude.clamp(min=float_bits(element.min_normal)))

    if element.kind == "integer":
        dropped = FLOAT_MANTISSA_BITS + FLOAT_BIAS - element.bias - exponent
        code_base = 0
    else:
        lowest = element.min_exponent + FLOAT_BIAS
        dropped = (lowest - exponent).clamp_(min=0) + (FLOAT_MANTISSA_BITS - element.mantissa_bits)
        code_base = (exponent - lowest).clamp_(min=0) << element.mantissa_bits
        if not element.zero:
            code_base -= 1 << element.mantissa_bits  # exponent field 0 is a normal number: its hidden bit has no code

    # 25 dropped bits already leave a kept part of 0 and a remainder below one half.
    shift = dropped.clamp(max=FLOAT_MANTISSA_BITS + 2)
    kept = significand >> shift
    remainder = significand - (kept << shift)
    codes = kept.add_(code_base)
    if rounding == "nearest_even":
        codes += 2 * remainder + (codes & 1) > 1 << shift
    elif rounding == "ties_away":
        codes += 2 * remainder >= 1 << shift
    elif rounding == "ties_toward_zero":
        codes += 2 * remainder > 1 << shift
    elif rounding == "away_from_zero":
        codes += remainder > 0
    elif rounding == "stochastic":
        # floor(2^32 * remainder / 2^dropped): what lies beyond 32 bits is dropped first
        widened = remainder.long() << (32 - dropped).clamp(min=0)
        codes += random_words < widened >> (dropped - 32).clamp(min=0, max=63)

    codes.clamp_(max=element.max_code if overflow == "saturate" else element.max_code + 1)
    if element.kind == "integer":
        return torch.where(bits < 0, -codes, codes) & (element.code_count - 1)
    if not element.signed:
        return codes
    signed = codes | ((bits >> (32 - element.bits)) & element.sign_mask)
    if overflow == "special" and element.inf_code is None:
        return torch.where(codes > element.max_code, codes, signed)  # a NaN carries no sign
    return signed


def decode_codes(codes: torch.Tensor, element: ElementFormat) -> torch.Tensor:
    """Float32 values of codes known to be in range."""
    return value_table(element, codes.device).index_select(0, codes.int().flatten()).view(codes.shape)


def value_table(element: ElementFormat, device: torch.device) -> torch.Tensor:
    """Values of all codes, float32 `[2**bits]`."""
    if type(torch.empty(0)) is not torch.Tensor:  # a tracer's fake tensor must not outlive its trace
        return _new_value_table(element, device)
    return _kept_value_table(element, device)


def _new_value_table(element: ElementFormat, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(element.values, dtype=torch.float32, device=device)


_kept_value_table = lru_cache(maxsize=64)(_new_value_table)


def float_bits(value: float) -> int:
    """Bits of a Python float that float32 represents exactly."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


def split(magnitude: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Biased exponent and 24-bit significand of float32 magnitude bits, subnormals normalised (int32, int32).

    |x| = significand * 2^(exponent - 127 - 23) with 2^23 <= significand < 2^24, for any x but 0,
    for which both are meaningless.
    """
    exponent = magnitude >> FLOAT_MANTISSA_BITS
    mantissa = magnitude & (HIDDEN_BIT - 1)
    normalized = mantissa.float().view(torch.int32)  # exact, and its exponent is the position of the leading bit
    subnormal = exponent == 0
    leading = (normalized >> FLOAT_MANTISSA_BITS) - FLOAT_BIAS
    exponent = torch.where(subnormal, leading - FLOAT_MANTISSA_BITS + 1, exponent)
    significand = torch.where(subnormal, normalized & (HIDDEN_BIT - 1), mantissa) | HIDDEN_BIT
    return exponent, significand


def canonical(x: torch.Tensor) -> torch.Tensor:
    """`x` with every NaN replaced by the canonical one (0x7FC00000, 0x7FC0, 0x7E00)."""
    return torch.where(x.isnan(), torch.nan, x)


def reciprocal(x: torch.Tensor) -> torch.Tensor:
    """1 / x, rounded to nearest even. Never divide a Python number by a tensor: torch may call something else."""
    return torch.ones_like(x) / x


def ldexp(x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """x * 2^exponent for int32 exponents from -254 to 255, as two float32 products."""
    half = exponent >> 1
    return x * _power_of_two(half) * _power_of_two(exponent - half)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent from its bits; 2^-127, one subnormal, has the highest bit of the mantissa."""
    return ((exponent + FLOAT_BIAS) << FLOAT_MANTISSA_BITS).clamp_(min=HIDDEN_BIT >> 1).view(torch.float32)


def sum_in_order(x: torch.Tensor, dim: int) -> torch.Tensor:
    """From +0, the entries of `x` along `dim` added in ascending order."""
    total = torch.zeros_like(x.select(dim, 0))
    for entry in x.unbind(dim):
        total = total + entry
    return total


def total_error(difference: torch.Tensor, search: str) -> torch.Tensor:
    """What a recipe's search makes least, `[n]`, of differences `[n, b]`."""
    if search.endswith("max"):
        return difference.abs().amax(1)
    return sum_in_order(difference.abs() if search.endswith("mae") else difference * difference, dim=1)


_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def philox(seed: int, index: torch.Tensor) -> torch.Tensor:
    """Word 0 of Philox4x32-10 with key (seed lo, seed hi) and counter (index lo, index hi, 0, 0), as int64 in [0, 2^32).

    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011); equals Triton's `randint4x`.

    >>> philox(0, torch.tensor([0])).item() == 0x6627e8d5
    True
    """
    counter = [index & _WORD, (index >> 32) & _WORD, torch.zeros_like(index), torch.zeros_like(index)]
    key = [seed & _WORD, (seed >> 32) & _WORD]
    for _ in range(10):
        low0, high0 = _multiply_words(counter[0], _PHILOX_MULTIPLIERS[0])
        low1, high1 = _multiply_words(counter[2], _PHILOX_MULTIPLIERS[1])
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(k + step) & _WORD for k, step in zip(key, _PHILOX_KEY_STEPS)]
    return counter[0]


def _multiply_words(a: torch.Tensor, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Low and high 32 bits of the 64-bit product of two 32-bit words, in int64 without overflow."""
    low = (a & 0xFFFF) * b  # below 2^48
    high = (a >> 16) * b + (low >> 16)  # below 2^49
    return ((high & 0xFFFF) << 16) | (low & 0xFFFF), high >> 16


def check_tensor(argument: str, given: torch.Tensor, *dtypes: torch.dtype, others: str = "") -> None:
    """Raise TypeError unless `given` is a dense tensor of one of `dtypes`, or of any where none is named."""
    if not isinstance(given, torch.Tensor):
        found = f"type {type(given).__name__}"
    elif given.layout != torch.strided:
        found = f"layout {given.layout}"
    elif dtypes and given.dtype not in dtypes:
        found = f"dtype {given.dtype}"
    else:
        return
    wanted = f" of {' or '.join(map(str, dtypes))}" if dtypes else ""
    raise TypeError(f"{argument} has {found}: expected a dense torch.Tensor{wanted}{others}")


def check_float(argument: str, x: torch.Tensor) -> None:
    """Raise TypeError unless `x` is a dense float32, bfloat16 or float16 tensor."""
    wide = isinstance(x, torch.Tensor) and x.dtype == torch.float64
    check_tensor(argument, x, *FLOAT_DTYPES, others=" (rounding float64 to float32 first would round twice)" * wide)


def check_dtype(argument: str, dtype: torch.dtype) -> None:
    """Raise TypeError unless `dtype` is float32, bfloat16 or float16."""
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"{argument}={dtype}: expected torch.float32, torch.bfloat16 or torch.float16")


def check_codes(argument: str, codes: torch.Tensor, element: ElementFormat) -> None:
    """Raise unless `codes` is a uint8 tensor of codes of `element`."""
    check_tensor(argument, codes, torch.uint8)
    if element.bits < 8 and codes.numel() and int(codes.max()) >= element.code_count:
        raise ValueError(f"{argument} holds {int(codes.max())}: {element.name} has codes 0 to {element.code_count - 1}")


def check_seed(seed: int | None, rounding: str) -> None:
    """Raise unless `seed` is an int of at most 64 bits where `rounding` is stochastic, and None where it is not."""
    if (seed is None) == (rounding == "stochastic"):
        raise ValueError(f"seed={seed!r}: rounding={rounding!r} {'needs an int' if seed is None else 'uses no seed'}")
    if seed is not None:
        check_number("seed", seed, 0, (1 << 64) - 1, "an int with 0 <= seed < 2**64")
