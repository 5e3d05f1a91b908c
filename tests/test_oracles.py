"""The oracles against published numbers and against each other: a wrong oracle would hide a wrong result.

Expected values: the known-answer vectors of the Random123 distribution for Philox; numpy's and ml_dtypes' correctly
rounded casts; the tables of ml_dtypes and gfloat.
"""

import math
from fractions import Fraction

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
from oracles import mx, nvfp4
from oracles.elements import ALL_ELEMENTS, DETERMINISTIC_ROUNDINGS, ELEMENTS, decode, encode, encode_float64
from oracles.philox import philox4x32
from oracles.rationals import BF16, FP16, FP32, Binary, float32_from_bits, floor_log2, round_float64, round_fraction

ML_DTYPES = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}
GFLOAT = {
    "e2m1": gfloat.formats.format_info_ocp_e2m1,
    "e2m3": gfloat.formats.format_info_ocp_e2m3,
    "e3m2": gfloat.formats.format_info_ocp_e3m2,
    "e4m3": gfloat.formats.format_info_ocp_e4m3,
    "e5m2": gfloat.formats.format_info_ocp_e5m2,
    "int8": gfloat.formats.format_info_ocp_int8,
    "e8m0": gfloat.formats.format_info_ocp_e8m0,
}


@pytest.mark.parametrize(
    "counter, key, words",
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, words):
    assert philox4x32(counter, key) == words


def _same_value(a, b):
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))


@pytest.mark.parametrize("name", list(ML_DTYPES))
def test_decode_table_is_that_of_ml_dtypes(name):
    element = ELEMENTS[name]
    codes = np.arange(1 << element.bits, dtype=np.uint8)
    theirs = codes.view(ML_DTYPES[name]).astype(np.float64)
    for code, value in zip(codes, theirs):
        assert _same_value(float(decode(int(code), element)), float(value)), f"{name} code 0x{code:02x}"


@pytest.mark.parametrize("name", list(GFLOAT))
def test_decode_table_is_that_of_gfloat(name):
    element = ELEMENTS[name]
    for code in range(1 << element.bits):
        assert _same_value(float(decode(code, element)), float(gfloat.decode_float(GFLOAT[name], code).fval)), (
            f"{name} code 0x{code:02x}"
        )


def test_round_fraction_agrees_with_hardware_casts(rng):
    bits = rng.integers(0, 1 << 64, 4000, dtype=np.uint64)
    doubles = bits.view(np.float64)
    near = np.ldexp(rng.standard_normal(4000), rng.integers(-160, 130, 4000))  # around fp32 and fp16 subnormals too
    halves = np.float32(rng.standard_normal(4000)).astype(np.float64) + np.ldexp(1.0, -30)
    for values in (doubles[np.isfinite(doubles)], near, halves):
        with np.errstate(over="ignore"):
            as32, as16 = values.astype(np.float32).astype(np.float64), values.astype(np.float16).astype(np.float64)
        for v, w32, w16 in zip(values, as32, as16):
            assert _same_value(round_fraction(Fraction(v), FP32, negative=bool(np.signbit(v))), w32)
            assert _same_value(round_fraction(Fraction(v), FP16, negative=bool(np.signbit(v))), w16)
    floats = rng.integers(0, 1 << 32, 4000, dtype=np.uint32).view(np.float32)
    floats = floats[np.isfinite(floats)]
    for v, w in zip(floats, floats.astype(ml_dtypes.bfloat16).astype(np.float64)):
        assert _same_value(round_fraction(Fraction(float(v)), BF16, negative=bool(np.signbit(v))), w)


def test_round_fraction_ties_and_ends():
    assert round_fraction(Fraction(1) + Fraction(1, 2**24), FP32) == 1.0
    assert round_fraction(Fraction(1) + Fraction(3, 2**24), FP32) == 1 + 2**-22
    assert round_fraction(Fraction(1) + Fraction(1, 2**24) + Fraction(1, 2**200), FP32) == 1 + 2**-23
    assert round_fraction(Fraction(2) ** -150, FP32) == 0.0
    assert round_fraction(Fraction(2) ** -150 + Fraction(2) ** -300, FP32) == 2**-149
    assert round_fraction((2 - Fraction(2) ** -24) * Fraction(2) ** 127, FP32) == math.inf
    assert round_fraction((2 - Fraction(2) ** -24) * Fraction(2) ** 127 - 1, FP32) == float(FP32.max)
    assert _same_value(round_fraction(Fraction(-1, 2**200), FP32), -0.0)
    assert floor_log2(Fraction(8)) == 3 and floor_log2(Fraction(7)) == 2 and floor_log2(Fraction(1, 3)) == -2


@pytest.mark.parametrize("binary", [FP32, BF16, FP16])
def test_round_float64_is_round_fraction(binary: Binary, rng):
    values = np.ldexp(rng.standard_normal(3000), rng.integers(-200, 140, 3000))
    ties = np.ldexp(rng.integers(1, 1 << 25, 3000).astype(np.float64), rng.integers(-160, 10, 3000))
    values = np.concatenate([values, ties, -ties, [0.0, -0.0, np.inf, -np.inf]])
    for v, w in zip(values, round_float64(values, binary)):
        expected = v if math.isinf(v) else round_fraction(Fraction(v), binary, negative=bool(np.signbit(v)))
        assert _same_value(float(w), expected), (binary.name, v)


@pytest.mark.parametrize("name", ALL_ELEMENTS)
def test_the_two_element_searches_agree(name, rng):
    element = ELEMENTS[name]
    values = [float(m) for m in element.magnitudes[:40] + element.magnitudes[-20:]] + [float(element.beyond)]
    values += [(a + b) / 2 for a, b in zip(values, values[1:])]
    values += [v * (1 + s * 2.0**-20) for v in values for s in (1, -1)] + [0.0, 2.0**-149, 2.0**127.5]
    values += list(np.ldexp(rng.standard_normal(200), rng.integers(-20, 20, 200)))
    values = np.abs(values) if not element.signed else np.array(values + [-v for v in values])
    overflows = ["saturate"] + ["special"] * (element.specials != "none")
    for rounding in DETERMINISTIC_ROUNDINGS:
        for overflow in overflows:
            slow = [encode(float(v) if v == 0 else Fraction(float(v)), element, rounding, overflow) for v in values]
            assert list(encode_float64(values, element, rounding, overflow)) == slow, (rounding, overflow)


def test_patterns_become_floats():
    assert float32_from_bits(0x3F800000) == np.float32(1.0)


@pytest.mark.parametrize("name", ["e2m1", "e2m3", "e3m2", "e4m3", "e5m2", "int8"])
@pytest.mark.parametrize("rule", list(mx.RULES))
def test_the_two_scale_oracles_agree(name, rule):
    element = ELEMENTS[name]
    amaxes = mx.boundary_amaxes(element)[::3]
    slow = [mx.RULES[rule](Fraction(float(a)), element) for a in amaxes]
    assert list(mx.exponents_float64(amaxes, element, rule)) == slow


def test_scale_rules_by_hand():
    e2m1, e4m3, int8 = ELEMENTS["e2m1"], ELEMENTS["e4m3"], ELEMENTS["int8"]
    rows = [  # amax, element, floor, even, ceil, rceil
        (7, e2m1, 0, 1, 1, 1),
        (Fraction(69, 10), e2m1, 0, 0, 1, 1),
        (6, e2m1, 0, 0, 1, 0),
        (4, e2m1, 0, 0, 0, 0),
        (448, e4m3, 0, 0, 1, 0),
        (449, e4m3, 0, 0, 1, 1),
        (480, e4m3, 0, 0, 1, 1),
        (496, e4m3, 0, 1, 1, 1),
        (Fraction(127, 64), int8, 0, 0, 1, 0),
        (Fraction(511, 256), int8, 0, 1, 1, 1),
    ]
    for amax, element, *expected in rows:
        assert [mx.RULES[r](Fraction(amax), element) for r in ("floor", "even", "ceil", "rceil")] == expected, amax


def test_nvfp4_by_hand():
    # SPEC's public case: tensor amax 6, block [0.01, 0.00584167]: raw scale 0.74667 -> 0.75, codes 6 and 3
    row = np.zeros(32, np.float32)
    row[0], row[16:18] = 6.0, (0.01, 0.00584167)
    for order in ("nvidia", "exact"):
        q = nvfp4.quantize(row, order, amax=np.float32(6))
        assert q.scales.tolist() == [0x7E, 0x34] and q.codes[16:18].tolist() == [7, 5]
        assert q.tensor_scale == np.float32(1 / 448)


def test_hadamard_by_the_matrix():
    matrix = np.array([[1.0]])
    while len(matrix) < 64:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
        size = len(matrix)
        if size in (4, 16, 64):
            signs = [1 if i % 3 else -1 for i in range(size)]
            x = np.arange(2 * size, dtype=np.float32) - 5  # small integers: every step is exact
            expected = (x.reshape(2, size) * signs) @ matrix / math.sqrt(size)
            assert np.array_equal(nvfp4.hadamard(x, size, signs).reshape(2, size), expected)
