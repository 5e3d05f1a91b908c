"""E8M0 scale rules at every place where they turn, and what happens to zero, NaN and Inf.

Expected values: `oracles.mx` (rationals; on all bfloat16 amaxes the same comparisons in float64, where they are exact).
The amax tests use the table's elements in blocks of one element, so that N amaxes are N blocks.
"""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from bits import assert_same_bits
from oracles import mx
from oracles.elements import ELEMENTS, Element, encode

import mxref

FORMATS = {
    "mxfp4": "e2m1",
    "mxfp6_e2m3": "e2m3",
    "mxfp6_e3m2": "e3m2",
    "mxfp8_e4m3": "e4m3",
    "mxfp8_e5m2": "e5m2",
    "mxint8": "int8",
}
RECIPES = {"ocp": "floor", "ocp_even": "even", "ocp_ceil": "ceil", "ocp_rceil": "rceil"}
RULES = {name: (name, rule) for name, rule in RECIPES.items()}
RULES |= {
    rule: (mxref.Recipe(rule, rule), rule) for rule in ("even_one_bit", "rfloor")
}  # which no recipe has for every format


def scale_bytes(amaxes: np.ndarray, format, recipe) -> torch.Tensor:
    """The scale code of each amax, from blocks of one element."""
    element = mxref.ELEMENT_FORMATS[FORMATS[format]] if isinstance(format, str) else format.element
    single = mxref.BlockFormat("single", element=element, scale=mxref.ELEMENT_FORMATS["e8m0"], block_size=1)
    return mxref.quantize(torch.as_tensor(amaxes), single, recipe=recipe).scales


@pytest.mark.parametrize("recipe, rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("format", list(FORMATS))
def test_every_boundary_by_rationals(format, recipe, rule):
    element = ELEMENTS[FORMATS[format]]
    amaxes = mx.boundary_amaxes(element)
    expected = [mx.RULES[rule](Fraction(float(a)), element) + 127 for a in amaxes]
    assert_same_bits(scale_bytes(amaxes, format, recipe), np.uint8(expected), f"{format} {rule}")
    assert_same_bits(scale_bytes(-amaxes, format, recipe), np.uint8(expected), f"{format} {rule}, negative")


@pytest.mark.parametrize("recipe, rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("format", list(FORMATS))
def test_every_bfloat16_amax(format, recipe, rule):
    patterns = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16)
    expected = mx.exponents_float64(patterns.double().numpy(), ELEMENTS[FORMATS[format]], rule) + 127
    assert_same_bits(scale_bytes(patterns, format, recipe), np.uint8(expected), f"{format} {rule}")


@pytest.mark.parametrize("format", list(FORMATS))
def test_clamps_at_both_ends(format):
    element = ELEMENTS[FORMATS[format]]
    smallest, largest = 2.0**-149, float(np.finfo(np.float32).max)
    for recipe, rule in RECIPES.items():
        low, high = scale_bytes(np.float32([smallest, largest]), format, recipe).tolist()
        assert low == 0
        assert high == {"floor": 127 - element.emax, "even": 128 - element.emax, "ceil": 128 - element.emax}.get(
            rule, 128 - element.emax
        ) + 127 - (element.name == "int8" and rule != "floor")


@pytest.mark.parametrize("recipe", ["ocp_even", "ocp_ceil", "ocp_rceil"])
@pytest.mark.parametrize("format", [f for f in FORMATS if f != "mxint8"])
def test_float32_max_decodes_to_infinity_under_the_rules_that_round_up(format, recipe):
    q = mxref.quantize(torch.tensor([torch.finfo(torch.float32).max, 1.0]), format, recipe=recipe)
    assert mxref.dequantize(q)[0] == math.inf and mxref.dequantize(q)[1] == 0
    assert mxref.dequantize(mxref.quantize(torch.tensor([torch.finfo(torch.float32).max]), format)).isfinite().all()


@pytest.mark.parametrize("format", list(FORMATS))
def test_amax_does_not_depend_on_place_sign_or_order(format, rng):
    block = np.float32(rng.standard_normal(32) * 2.0**-3)
    block[0] = 100.0
    rolled = np.stack([np.roll(block, i) * (-1) ** i for i in range(32)])
    for recipe in RECIPES:
        assert len(set(mxref.quantize(torch.from_numpy(rolled), format, recipe=recipe).scales.reshape(-1).tolist())) == 1


@pytest.mark.parametrize("format", list(FORMATS))
def test_zero_block(format):
    x = torch.zeros(2, 64)
    x[0, 1::2] = -0.0
    x[1, 40] = 1.0
    for recipe in [*RECIPES, "ocp_mse"]:
        q = mxref.quantize(x, format, recipe=recipe)
        assert q.scales[:, 0].tolist() == [0, 0] and q.scales[0, 1] == 0 and q.scales[1, 1] != 0
        sign = 0 if format == "mxint8" else 1 << (ELEMENTS[FORMATS[format]].bits - 1)
        assert q.codes[0].tolist() == [0, sign] * 32
        decoded = mxref.dequantize(q)
        assert (decoded[0] == 0).all() and (format == "mxint8" or (decoded[0].signbit() == x[0].signbit()).all())
        one = mxref.quantize(x, format, recipe=replace(mxref.RECIPES[recipe], name="one", zero_block="one"))
        assert one.scales[:, 0].tolist() == [127, 127] and (mxref.dequantize(one)[0] == 0).all()
        assert one.scales[1, 1] == q.scales[1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", list(FORMATS))
def test_nan_and_inf_blocks(format, dtype):
    x = torch.ones(5, 64, dtype=dtype)
    x[1, 3] = math.nan
    x[2, 35] = -math.inf
    x[3, 0], x[3, 1] = math.inf, math.nan
    x[4, 63] = -torch.tensor(math.nan)
    poisoned = torch.tensor([[0, 0], [1, 0], [0, 1], [1, 0], [0, 1]], dtype=torch.bool)
    for recipe in [*RECIPES, "ocp_mse"]:
        clean = mxref.quantize(torch.ones(5, 64), format, recipe=recipe)
        q = mxref.quantize(x, format, recipe=recipe)
        assert_same_bits(q.scales, torch.where(poisoned, 255, clean.scales).to(torch.uint8), recipe)
        assert_same_bits(q.codes, torch.where(poisoned.repeat_interleave(32, 1), 0, clean.codes).to(torch.uint8), recipe)
        decoded = mxref.dequantize(q)
        assert (decoded.view(torch.int32)[decoded.isnan()] == 0x7FC00000).all()
        assert (decoded.isnan() == poisoned.repeat_interleave(32, 1)).all()


@pytest.mark.parametrize("format", list(FORMATS))
def test_saturating_inf(format):
    element = ELEMENTS[FORMATS[format]]
    block = [math.inf, -math.inf, 3.0e38, -(2.0**127), 2.0**120, 1.0, -0.0, 0.0]
    x = torch.tensor([block, [1.0] * 8, [math.nan, math.inf] + [1.0] * 6])
    for name in [*RECIPES, "ocp_mse"]:
        q = mxref.quantize(x, format, recipe=replace(mxref.RECIPES[name], name="saturating", inf="saturate"))
        assert q.scales.reshape(-1).tolist() == [254, mxref.quantize(x[1:2], format, recipe=name).scales.item(), 255]
        expected = [encode(v if math.isinf(v) or v == 0 else Fraction(v) / Fraction(2) ** 127, element) for v in block]
        assert q.codes[0].tolist() == expected
        assert q.codes[2].tolist() == [0] * 8


def test_nan_policy_raise():
    recipe = replace(mxref.RECIPES["ocp"], name="strict", nan="raise")
    with pytest.raises(ValueError, match="(?i)nan"):
        mxref.quantize(torch.tensor([1.0, math.nan]), "mxfp4", recipe=recipe)
    assert mxref.quantize(torch.ones(2), "mxfp4", recipe=recipe).scales.item() == 125


@pytest.mark.parametrize("format", list(FORMATS))
def test_mse_search_by_rationals(format, rng):
    element = ELEMENTS[FORMATS[format]]
    top = float(element.max)
    blocks = [rng.standard_normal(32) for _ in range(20)]
    blocks += [rng.standard_normal(32) * np.exp(3 * rng.standard_normal(32)) for _ in range(10)]
    blocks += [
        [top * f] + [float(element.magnitudes[min(i, element.max_code)]) for i in range(31)] for f in (1.0, 1.1, 1.34, 1.6)
    ]
    blocks += [
        np.ldexp(rng.standard_normal(32), -140),
        np.ldexp(rng.standard_normal(32), 120),
        np.ldexp(rng.standard_normal(32), -70),
    ]
    blocks += [[2.0**-127] * 32, [1.5] * 32, [1.0] + [0.0] * 31, [3.4e38] * 32, [2.0**-149] * 32]
    blocks += [[2.0 ** (element.emax + 1) * (1 - 2.0**-20)] + [0.0] * 31]  # saturates under floor, nearly exact one above
    x = np.float32(blocks)
    codes, scales = mx.quantize_rows(x, element, rule="mse")
    q = mxref.quantize(torch.from_numpy(x), format, recipe="ocp_mse")
    assert_same_bits(q.scales, scales, format)
    assert_same_bits(q.codes, codes, format)
    floor = mx.quantize_rows(x, element, rule="floor")[1]
    assert {int(d) for d in (scales.astype(int) - floor).ravel()} >= {0, 1}, "the search must have something to find"


def test_user_defined_formats():
    e1m2 = mxref.formats.ElementFormat("e1m2", exponent_bits=1, mantissa_bits=2, bias=1)
    mine = mxref.formats.BlockFormat("mine", element=e1m2, scale=mxref.ELEMENT_FORMATS["e8m0"], block_size=16)
    oracle = Element("e1m2", 1, 2, 1)
    amaxes = mx.boundary_amaxes(oracle)
    for recipe, rule in RECIPES.items():
        expected = [mx.RULES[rule](Fraction(float(a)), oracle) + 127 for a in amaxes]
        assert_same_bits(scale_bytes(amaxes, mine, recipe), np.uint8(expected), recipe)
    rng = np.random.default_rng(1)
    x = np.float32(rng.standard_normal((5, 40)))
    codes, scales = mx.quantize_rows(x, oracle, block_size=16)
    q = mxref.quantize(torch.from_numpy(x), mine)
    assert_same_bits(q.codes, codes)
    assert_same_bits(q.scales, scales)
