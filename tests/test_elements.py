"""Element codecs, every code and every place where a rounding turns.

Expected values: `oracles.elements` (search over exact values, no bit field read), ml_dtypes and gfloat directly,
and, for stochastic rounding, Philox4x32-10 in Python integers with the rational definition of the discarded fraction.
"""

import math
from fractions import Fraction

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
from bits import assert_same_bits
from oracles.elements import ALL_ELEMENTS, DETERMINISTIC_ROUNDINGS, ELEMENTS, Element, decode, encode, encode_float64
from oracles.philox import random_word
from test_oracles import GFLOAT, ML_DTYPES

import mxref

USER_DEFINED = {
    "e1m2": (
        mxref.formats.ElementFormat("e1m2", exponent_bits=1, mantissa_bits=2, bias=1),
        Element("e1m2", 1, 2, 1),
    ),
    "ue5m3": (
        mxref.formats.ElementFormat("ue5m3", exponent_bits=5, mantissa_bits=3, bias=15, specials="nan", signed=False),
        Element("ue5m3", 5, 3, 15, specials="nan", signed=False),
    ),
    "e3m4_ieee": (
        mxref.formats.ElementFormat("e3m4_ieee", exponent_bits=3, mantissa_bits=4, bias=3, specials="ieee"),
        Element("e3m4_ieee", 3, 4, 3, specials="ieee"),
    ),
    "int4": (
        mxref.formats.ElementFormat("int4", exponent_bits=0, mantissa_bits=3, bias=2, kind="integer"),
        Element("int4", 0, 3, 2, integer=True),
    ),
}
EVERY_FORMAT = [pytest.param(name, ELEMENTS[name], id=name) for name in ALL_ELEMENTS] + [
    pytest.param(record, oracle, id=name) for name, (record, oracle) in USER_DEFINED.items()
]
CANONICAL = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}


def every_pattern(dtype: torch.dtype) -> torch.Tensor:
    """All 65,536 values of a 16-bit float dtype, in pattern order."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)


def turning_points(element: Element) -> np.ndarray:
    """float32 values at, one ulp below and one ulp above: every value, midpoint, power of two, and the top."""
    ladder = [float(m) for m in element.magnitudes] + [float(element.beyond)]
    middles = [(a + b) / 2 for a, b in zip(ladder, ladder[1:])]
    powers = [2.0**e for e in range(-149, 128)]
    with np.errstate(over="ignore"):
        exact = np.float32([*ladder, *middles, *powers, 2.0**128 - 2.0**104, *(3 * 2.0**e for e in range(-148, 126))])
    exact = exact[np.isfinite(exact)]
    assert exact.dtype == np.float32 and np.array_equal(
        np.float64(exact[: len(element.magnitudes)]), ladder[: len(element.magnitudes)]
    )
    with np.errstate(over="ignore"):
        around = np.concatenate([exact, np.nextafter(exact, np.float32(0)), np.nextafter(exact, np.float32(np.inf)), [0.0]])
    around = np.unique(around[np.isfinite(around)].astype(np.float32))
    return np.concatenate([around, -around]) if element.signed else around


def allowed(values: np.ndarray, element: Element) -> np.ndarray:
    """Which values the element's encoder must accept: NaN only where it has one, no sign where it has none."""
    ok = np.ones(values.shape, dtype=bool) if element.specials != "none" else ~np.isnan(values)
    return ok if element.signed else ok & ~(np.signbit(values) & ~np.isnan(values))


def expected_codes(values: np.ndarray, element: Element, rounding: str, overflow: str) -> np.ndarray:
    nan = np.isnan(values)
    codes = encode_float64(np.where(nan, 1.0, values), element, rounding, overflow)
    return np.where(nan, element.nan_code, codes).astype(np.uint8) if nan.any() else codes


def overflow_modes(element: Element) -> list[str]:
    return ["saturate"] + ["special"] * (element.specials != "none")


# ---------------------------------------------------------------------------------------------- decode


@pytest.mark.parametrize("given, element", EVERY_FORMAT)
def test_decode_every_code(given, element):
    codes = torch.arange(1 << element.bits, dtype=torch.uint8)
    expected = np.float32([float(decode(c, element)) for c in range(1 << element.bits)])
    expected[np.isnan(expected)] = np.uint32(CANONICAL[torch.float32]).view(np.float32)
    assert_same_bits(mxref.decode(codes, given), expected, element.name)


@pytest.mark.parametrize("name", list(ML_DTYPES))
def test_decode_is_that_of_ml_dtypes(name):
    codes = np.arange(1 << ELEMENTS[name].bits, dtype=np.uint8)
    theirs = codes.view(ML_DTYPES[name]).astype(np.float32)
    ours = mxref.decode(torch.from_numpy(codes), name)
    assert np.array_equal(np.isnan(theirs), ours.isnan().numpy())
    assert_same_bits(
        ours.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf), np.where(np.isnan(theirs), np.float32(0), theirs)
    )


@pytest.mark.parametrize("name", ["e2m1", "e2m3", "e3m2"])
def test_decode_refuses_codes_outside_the_format(name):
    for code in (1 << ELEMENTS[name].bits, 255):
        with pytest.raises(ValueError, match=name):
            mxref.decode(torch.tensor([0, code], dtype=torch.uint8), name)


def test_encode_of_decode_is_the_identity_on_canonical_codes():
    for name, element in ELEMENTS.items():
        for code in range(1 << element.bits):
            value = decode(code, element)
            is_nan = isinstance(value, float) and math.isnan(value)
            if (name == "int8" and code == 0x80) or (is_nan and code != element.nan_code):
                continue
            overflow = "special" if isinstance(value, float) and (math.isinf(value) or is_nan) else "saturate"
            x = mxref.decode(torch.tensor([code], dtype=torch.uint8), name)
            assert mxref.encode(x, name, overflow=overflow).item() == code, f"{name} 0x{code:02x}"


# ---------------------------------------------------------------------------------------------- encode


@pytest.mark.parametrize("rounding", DETERMINISTIC_ROUNDINGS)
@pytest.mark.parametrize("given, element", EVERY_FORMAT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_encode_every_16_bit_pattern(dtype, given, element, rounding):
    x = every_pattern(dtype)
    values = x.to(torch.float64).numpy()  # widening is exact
    keep = allowed(values, element)
    x, values = x[torch.from_numpy(keep)], values[keep]
    for overflow in overflow_modes(element):
        expected = expected_codes(values, element, rounding, overflow)
        assert_same_bits(
            mxref.encode(x, given, rounding=rounding, overflow=overflow), expected, f"{element.name} {rounding} {overflow}"
        )


@pytest.mark.parametrize("rounding", DETERMINISTIC_ROUNDINGS)
@pytest.mark.parametrize("given, element", EVERY_FORMAT)
def test_encode_turning_points(given, element, rounding):
    values = turning_points(element)
    for overflow in overflow_modes(element):
        expected = expected_codes(values.astype(np.float64), element, rounding, overflow)
        ours = mxref.encode(torch.from_numpy(values), given, rounding=rounding, overflow=overflow)
        assert_same_bits(ours, expected, f"{element.name} {rounding} {overflow}")


@pytest.mark.parametrize("given, element", EVERY_FORMAT)
def test_encode_random_float32_patterns(given, element, rng):
    values = rng.integers(0, 1 << 32, 200_000, dtype=np.uint32).view(np.float32)
    near = np.ldexp(rng.standard_normal(100_000), rng.integers(-20, 10, 100_000)).astype(np.float32)
    values = np.concatenate([values, near])
    values = values[allowed(values, element)]
    for rounding in DETERMINISTIC_ROUNDINGS:
        expected = expected_codes(
            np.float64(np.where(np.isnan(values), np.float32(np.nan), values)), element, rounding, "saturate"
        )
        assert_same_bits(
            mxref.encode(torch.from_numpy(values), given, rounding=rounding), expected, f"{element.name} {rounding}"
        )


@pytest.mark.parametrize("name", ["e2m1", "e2m3", "e3m2", "e4m3", "e5m2"])
def test_encode_is_the_cast_of_ml_dtypes(name):
    element = ELEMENTS[name]
    values = np.concatenate([turning_points(element), every_pattern(torch.bfloat16).to(torch.float32).numpy()])
    values = values[np.isfinite(values)]
    overflow = "saturate" if element.specials == "none" else "special"
    theirs = values.astype(ML_DTYPES[name]).view(np.uint8)
    if element.specials == "nan":  # ml_dtypes keeps the sign of the NaN it overflows to; here it is dropped
        theirs = np.where(theirs == 0xFF, 0x7F, theirs).astype(np.uint8)
    assert_same_bits(mxref.encode(torch.from_numpy(values), name, overflow=overflow), theirs, name)


@pytest.mark.parametrize("name", ["e2m1", "e2m3", "e3m2", "e4m3", "e5m2", "int8"])
def test_encode_is_the_rounding_of_gfloat(name):
    element, info = ELEMENTS[name], GFLOAT[name]
    values = turning_points(element).astype(np.float64)
    theirs = gfloat.round_ndarray(info, values, sat=True)
    ours = mxref.decode(mxref.encode(torch.from_numpy(values.astype(np.float32)), name), name).numpy().astype(np.float64)
    if name == "int8":  # gfloat keeps -2.0, the encoder here never emits it
        theirs = np.where(theirs == -2.0, -1.984375, theirs)
    assert np.array_equal(ours, theirs)


def test_float32_subnormals_are_exact():
    tiny = torch.tensor([1, 2, 3, 0x3FFFFF, 0x400000, 0x400001, 0x600000, 0x7FFFFF], dtype=torch.int32).view(torch.float32)
    # 2**-127 is the float32 subnormal 0x400000, and the smallest E8M0 value
    assert mxref.encode(tiny, "e8m0").tolist() == [0, 0, 0, 0, 0, 0, 0, 1]
    assert mxref.encode(tiny, "e8m0", rounding="ties_away").tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert mxref.encode(tiny, "e8m0", rounding="away_from_zero").tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    wide = mxref.formats.ElementFormat("e7m0", exponent_bits=7, mantissa_bits=0, bias=127, zero=False, signed=False)
    assert mxref.encode(tiny[4:5], wide).item() == 0


# ---------------------------------------------------------------------------------------------- specials


@pytest.mark.parametrize("name", ["e2m1", "e2m3", "e3m2", "int8"])
def test_nan_raises_where_the_format_has_none(name):
    with pytest.raises(ValueError, match="(?i)nan"):
        mxref.encode(torch.tensor([1.0, math.nan]), name)


@pytest.mark.parametrize("name, code", [("e4m3", 0x7F), ("e5m2", 0x7F), ("e8m0", 0xFF)])
def test_nan_code_drops_sign_and_payload(name, code):
    x = torch.tensor([0x7FC00000, -0x400000, 0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert x.isnan().all()
    for overflow in ("saturate", "special"):
        assert mxref.encode(x, name, overflow=overflow).tolist() == [code] * 5
    for dtype in (torch.bfloat16, torch.float16):
        assert mxref.encode(x.to(dtype), name).tolist() == [code] * 5


@pytest.mark.parametrize(
    "name, overflow, codes",
    [
        ("e2m1", "saturate", [0x07, 0x0F]),
        ("e2m3", "saturate", [0x1F, 0x3F]),
        ("e3m2", "saturate", [0x1F, 0x3F]),
        ("int8", "saturate", [0x7F, 0x81]),
        ("e4m3", "saturate", [0x7E, 0xFE]),
        ("e5m2", "saturate", [0x7B, 0xFB]),
        ("e4m3", "special", [0x7F, 0x7F]),
        ("e5m2", "special", [0x7C, 0xFC]),
    ],
)
def test_infinity_and_overflow(name, overflow, codes):
    for magnitude in (math.inf, 3.0e38, 70000.0):
        x = torch.tensor([magnitude, -magnitude])
        for rounding in ("nearest_even", "ties_away", "away_from_zero"):
            assert mxref.encode(x, name, rounding=rounding, overflow=overflow).tolist() == codes


@pytest.mark.parametrize("name", ["e2m1", "e2m3", "e3m2", "int8"])
def test_special_overflow_is_refused_without_specials(name):
    with pytest.raises(ValueError, match="special"):
        mxref.encode(torch.ones(2), name, overflow="special")


def test_zero_keeps_its_sign():
    x = torch.tensor([0.0, -0.0, 1e-30, -1e-30])
    for name, sign in [("e2m1", 8), ("e2m3", 32), ("e3m2", 32), ("e4m3", 128), ("e5m2", 128), ("int8", 0)]:
        assert mxref.encode(x, name).tolist() == [0, sign, 0, sign]


def test_unsigned_formats_refuse_negative_values():
    for given in ("e8m0", USER_DEFINED["ue5m3"][0]):
        with pytest.raises(ValueError, match="negative|unsigned|sign"):
            mxref.encode(torch.tensor([1.0, -1.0]), given)
        with pytest.raises(ValueError, match="negative|unsigned|sign"):
            mxref.encode(torch.tensor([-math.inf]), given)


# ---------------------------------------------------------------------------------------------- stochastic


def stochastic_inputs(element: Element, rng) -> np.ndarray:
    turning = turning_points(element)
    turning = turning[rng.permutation(len(turning))[:1500]]
    near = np.ldexp(rng.standard_normal(1000), rng.integers(-12, 6, 1000)).astype(np.float32)
    tiny = np.ldexp(rng.random(500), rng.integers(-45, -20, 500)).astype(np.float32)
    values = np.concatenate([turning, near, tiny, np.float32([0.0, math.inf, 3e38])])
    return values if element.signed else np.abs(values)


@pytest.mark.parametrize("given, element", [p for p in EVERY_FORMAT if p.id != "e8m0"])
@pytest.mark.parametrize("seed", [0, 0x9E3779B97F4A7C15])
def test_stochastic_rounding_by_the_rational_definition(given, element, seed, rng):
    values = stochastic_inputs(element, rng)
    for overflow in overflow_modes(element):
        expected = []
        for i, v in enumerate(values):
            exact = float(v) if v == 0 or math.isinf(v) else Fraction(float(v))
            expected.append(encode(exact, element, "stochastic", overflow, random_word(seed, i)))
        ours = mxref.encode(torch.from_numpy(values), given, rounding="stochastic", overflow=overflow, seed=seed)
        assert_same_bits(ours, np.uint8(expected), f"{element.name} {overflow}")


def test_stochastic_threshold_drops_bits_beyond_32(monkeypatch):
    # 2**-33 of a step can never round up; 2**-32 of a step does so iff r == 0
    step = Fraction(1, 2)
    for power, expected in [(33, []), (32, [0]), (31, [0, 1])]:
        ups = [
            r for r in range(4) if encode(step * Fraction(1, 2**power), ELEMENTS["e2m1"], "stochastic", random_word=r) == 1
        ]
        assert ups == expected
    x = torch.full((1 << 16,), 2.0**-34)
    assert mxref.encode(x, "e2m1", rounding="stochastic", seed=7).max() == 0


def test_stochastic_index_is_row_major_in_the_logical_shape(rng):
    x = torch.from_numpy(rng.standard_normal((6, 5, 4)).astype(np.float32))
    flat = mxref.encode(x.reshape(-1), "e2m1", rounding="stochastic", seed=3)
    assert_same_bits(mxref.encode(x, "e2m1", rounding="stochastic", seed=3), flat.reshape(6, 5, 4))
    strided = torch.empty(4, 6, 5).permute(1, 2, 0)
    strided.copy_(x)
    assert not strided.is_contiguous()
    assert_same_bits(mxref.encode(strided, "e2m1", rounding="stochastic", seed=3), flat.reshape(6, 5, 4))


def test_stochastic_rounding_is_unbiased():
    x = torch.full((1 << 18,), 2.3)
    mean = mxref.decode(mxref.encode(x, "e2m1", rounding="stochastic", seed=11), "e2m1").mean().item()
    assert abs(mean - 2.3) < 5 * math.sqrt(0.3 * 0.7 / 2**18)  # five standard deviations of a mean of 2**18 draws


def test_stochastic_needs_a_seed_and_only_then():
    with pytest.raises((ValueError, TypeError), match="seed"):
        mxref.encode(torch.ones(2), "e2m1", rounding="stochastic")


# ---------------------------------------------------------------------------------------------- shapes, inputs


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1, 1), (2, 3, 4)])
def test_shapes_are_kept(shape):
    codes = mxref.encode(torch.ones(shape), "e4m3")
    assert codes.shape == torch.Size(shape) and codes.dtype == torch.uint8
    assert_same_bits(mxref.decode(codes, "e4m3"), torch.ones(shape))


def test_inputs_are_left_alone_and_strides_do_not_matter(rng):
    x = torch.from_numpy(rng.standard_normal((8, 6)).astype(np.float32))
    before = x.clone()
    assert_same_bits(mxref.encode(x.T, "e3m2"), mxref.encode(x.T.contiguous(), "e3m2"))
    assert_same_bits(mxref.encode(x[::2, 1::3], "e3m2"), mxref.encode(x, "e3m2")[::2, 1::3])
    assert_same_bits(x, before)


def test_derived_properties_of_the_table():
    rows = {  # name: emax, max, min normal, min subnormal (OCP MX v1.0 section 5.3, OCP OFP8)
        "e2m1": (2, 6.0, 1.0, 0.5),
        "e2m3": (2, 7.5, 1.0, 2**-3),
        "e3m2": (4, 28.0, 2**-2, 2**-4),
        "e4m3": (8, 448.0, 2**-6, 2**-9),
        "e5m2": (15, 57344.0, 2**-14, 2**-16),
        "int8": (0, 1.984375, None, 2**-6),
    }
    for name, (emax, largest, normal, subnormal) in rows.items():
        record = mxref.ELEMENT_FORMATS[name]
        assert (record.emax, record.max, record.min_normal, record.min_subnormal) == (emax, largest, normal, subnormal), name
    e8m0 = mxref.ELEMENT_FORMATS["e8m0"]
    assert (e8m0.max, e8m0.values[0]) == (2.0**127, 2.0**-127)
    assert list(mxref.ELEMENT_FORMATS) == ALL_ELEMENTS
    for name, record in mxref.ELEMENT_FORMATS.items():
        assert record.bits == ELEMENTS[name].bits and record.source
        positive = [float(m) for m in ELEMENTS[name].magnitudes]
        assert list(record.midpoints) == [(a + b) / 2 for a, b in zip(positive, positive[1:])]
    bits = {
        "mxfp4": 4.25,
        "mxfp6_e2m3": 6.25,
        "mxfp6_e3m2": 6.25,
        "mxfp8_e4m3": 8.25,
        "mxfp8_e5m2": 8.25,
        "mxint8": 8.25,
        "nvfp4": 4.5,
    }
    assert {name: record.bits_per_element for name, record in mxref.BLOCK_FORMATS.items()} == bits


def test_frozen_records():
    with pytest.raises(AttributeError):
        mxref.ELEMENT_FORMATS["e2m1"].bias = 2


def test_ml_dtypes_scale_cast_agrees_away_from_its_own_policies():
    x = every_pattern(torch.bfloat16).to(torch.float32)
    x = x[(x > 0) & x.isfinite()]
    theirs = x.numpy().astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
    ours = mxref.encode(x, "e8m0", rounding="ties_away", overflow="special")
    assert_same_bits(ours, theirs)
