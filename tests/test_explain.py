"""`explain`: every number it shows, against quantize and dequantize and against an independent derivation.

Expected quotients: rationals for power-of-two scales and for `exact`, numpy float32 steps for the other NVFP4 orders.
Expected neighbours, ties and saturation: a search in the oracle's list of exact magnitudes. For a negative quotient
`below` and `above` are mirrored: `below` is the neighbour towards zero.
"""

import bisect
import json
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from bits import assert_same_bits
from oracles import mx, nvfp4
from oracles.elements import ELEMENTS, Element, decode

import mxref

F = np.float32
MX = {
    "mxfp4": "e2m1",
    "mxfp6_e2m3": "e2m3",
    "mxfp6_e3m2": "e3m2",
    "mxfp8_e4m3": "e4m3",
    "mxfp8_e5m2": "e5m2",
    "mxint8": "int8",
}
MX_RECIPES = {
    "ocp": dict(rule="floor"),
    "ocp_even": dict(rule="even"),
    "ocp_ceil": dict(rule="ceil"),
    "ocp_rceil": dict(rule="rceil"),
    "ocp_mse": dict(rule="mse"),
    "quark_even": dict(rule="even", inf="saturate"),
}
ORDERS = ("nvidia", "exact", "vllm_torch", "vllm_triton")


def blocks(size: int, element: Element, rng) -> list[np.ndarray]:
    """float32 blocks of at most `size`: random, wide, ties, ends of float32, signed zeros, NaN, Inf, one element."""
    ladder = [float(m) for m in element.magnitudes]
    ties = F([ladder[-1]] + [(a + b) / 2 for a, b in zip(ladder, ladder[1:])][-(size - 1) :])
    out = [F(rng.standard_normal(size)), F(np.ldexp(rng.standard_normal(size), rng.integers(-30, 30, size)))]
    out += [ties * F(s) for s in (1.0, -1.0, 2.0**-40, 2.0**100 / ladder[-1])]
    out += [F(3e38 * rng.uniform(-1, 1, size)), F([2.0**-149, -(2.0**-149), 2.0**-130]), F([1e-40] * size)]
    out += [F([0.0, -0.0] * (size // 2)), F([1.0, -0.0, 0.0, -1e-20, 1e-20, -1e-30])]
    out += [F([v]) for v in (1.0, -7.0, 0.0, -0.0, 1e38, 2.0**-149, math.nan, math.inf, -math.inf)]
    out += [F([1.0, math.nan, -2.0]), F([math.inf, -math.inf, 1.0, -0.0, 0.0]), F([math.nan, math.inf, 3.0])]
    return out


def same(a: float | None, b: float | None) -> bool:
    """Equal, NaN with NaN; zeros of either sign are equal."""
    return a == b or (a is not None and b is not None and math.isnan(a) and math.isnan(b))


def check_elements(explanation: mxref.Explanation, x: np.ndarray, quotients: list, codes, element: Element) -> None:
    """Every field of every element, from its exact quotient and its code."""
    assert len(explanation.elements) == len(x)
    ladder, fields = element.magnitudes, [1, element.exponent_bits, element.mantissa_bits]
    for e, value, quotient, code in zip(explanation.elements, x.tolist(), quotients, np.asarray(codes).tolist()):
        where = f"{explanation.format} {explanation.recipe}: {e}"
        assert same(e.x, value) and same(e.quotient, float(quotient)), f"{where}: quotient {float(quotient)!r}"
        assert e.code == code and same(e.value, float(decode(code, element))), where
        assert int(e.bits.replace(".", ""), 2) == code and len(e.bits.replace(".", "")) == element.bits, where
        assert element.integer or [len(part) for part in e.bits.split(".")] == fields, where
        assert same(e.error, e.decoded - value), where
        if isinstance(quotient, float) and math.isnan(quotient):
            assert not e.tie and not e.saturated and math.isnan(e.below) and math.isnan(e.above), where
            continue
        magnitude = abs(quotient)
        assert e.saturated is bool(magnitude > element.max), where
        low = bisect.bisect_right(ladder, magnitude) - 1
        high = low if ladder[low] == magnitude or low + 1 == len(ladder) else low + 1
        sign = -1 if quotient < 0 else 1
        assert (e.below, e.above) == (sign * float(ladder[low]), sign * float(ladder[high])), where
        assert e.tie is bool(high > low and 2 * magnitude == ladder[low] + ladder[high]), where


def check_against_quantize(explanation: mxref.Explanation, x: np.ndarray, format: str, **arguments) -> None:
    q = mxref.quantize(torch.from_numpy(x), format, **arguments)
    assert explanation.format == q.format.name and explanation.recipe == str(q.recipe)
    assert_same_bits(np.uint8([e.code for e in explanation.elements]), q.codes)
    assert [explanation.scale_code] == q.scales.tolist()
    assert_same_bits(F([e.decoded for e in explanation.elements]), mxref.dequantize(q))
    assert same(explanation.amax, float(np.abs(x).max()))
    if q.tensor_scale is None:
        assert explanation.tensor_scale is None
    else:
        assert explanation.tensor_scale == q.tensor_scale.item()


def check_it_can_be_shown(explanation: mxref.Explanation) -> None:
    """Printing works, one line an element; the dict goes through JSON, strict JSON where every number is finite."""
    lines = str(explanation).splitlines()
    assert len(lines) == 3 + len(explanation.elements)
    assert explanation.format in lines[0] and explanation.recipe in lines[0]
    assert f"0x{explanation.scale_code:02X}" in lines[1]
    for line, e in zip(lines[3:], explanation.elements):
        assert ("tie" in line) == e.tie and ("saturated" in line) == e.saturated and e.bits in line
        assert f"0x{e.code:02X}" in line
    plain = explanation.to_dict()
    text = json.dumps(plain)
    assert json.dumps(json.loads(text)) == text
    assert set(plain) == {"format", "recipe", "amax", "tensor_scale", "raw_scale", "scale_code", "scale", "elements"}
    numbers = [v for e in plain["elements"] for v in e.values() if isinstance(v, float)]
    if all(map(math.isfinite, [*numbers, plain["amax"], plain["scale"], plain["raw_scale"] or 0.0])):
        json.dumps(plain, allow_nan=False)


# ------------------------------------------------------------------------------------------ power-of-two scales


@pytest.mark.parametrize("recipe", list(MX_RECIPES))
@pytest.mark.parametrize("format", list(MX))
def test_mx_blocks_by_rationals(format, recipe, rng):
    element = ELEMENTS[MX[format]]
    for x in blocks(32, element, rng):
        scale, codes = mx.quantize_block([float(v) for v in x], element, **MX_RECIPES[recipe])
        if recipe == "quark_even" and not element.integer:
            codes = [0 if code == element.sign_bit else code for code in codes]
        explanation = mxref.explain(torch.from_numpy(x), format, recipe=recipe)
        assert explanation.raw_scale is None and explanation.tensor_scale is None
        assert explanation.scale_code == scale
        assert same(explanation.scale, math.nan if scale == 255 else 2.0 ** (scale - 127))
        exponent = None if scale == 255 else scale - 127
        quotients = [
            math.nan if exponent is None else v if math.isinf(v) else Fraction(v) / Fraction(2) ** exponent
            for v in x.tolist()
        ]
        check_elements(explanation, x, quotients, codes, element)
        for e in explanation.elements:
            assert same(e.decoded, mx.decoded(e.code, exponent, element)), e
        check_against_quantize(explanation, x, format, recipe=recipe)
        check_it_can_be_shown(explanation)


@pytest.mark.parametrize("exponent", [0, -127])
@pytest.mark.parametrize("format", list(MX))
def test_ties_are_marked_at_midpoints_and_nowhere_else(format, exponent):
    """Each midpoint of the element, and the float32 numbers on both sides of it, both signs."""
    element = ELEMENTS[MX[format]]
    ladder = [float(m) for m in element.magnitudes]
    top = F(np.ldexp(ladder[-1], exponent))  # sets the scale to 2^exponent
    ties = np.float64([np.ldexp((a + b) / 2, exponent) for a, b in zip(ladder, ladder[1:])])
    exact = F(ties)
    assert (exact == ties).all()
    for start in range(0, len(exact), 10):
        some = exact[start : start + 10]
        for sign in (F(1), F(-1)):
            around = [some, np.nextafter(some, F(0)), np.nextafter(some, F(np.inf))]
            x = np.concatenate([[top], *around]) * sign
            explanation = mxref.explain(torch.from_numpy(x), format)
            assert explanation.scale_code == exponent + 127
            marked = [e.tie for e in explanation.elements]
            assert marked == [False] + [True] * len(some) + [False] * (2 * len(some))
            assert not any(e.saturated for e in explanation.elements)
            for e in explanation.elements[1 : 1 + len(some)]:
                assert abs(e.value) in (abs(e.below), abs(e.above)) and e.code % 2 == 0


@pytest.mark.parametrize("format", list(MX))
def test_saturation_begins_above_the_largest_element(format):
    element = ELEMENTS[MX[format]]
    largest = F(float(element.max))
    for value, saturates in ((largest, False), (np.nextafter(largest, F(9e9)), True), (np.nextafter(largest, F(0)), False)):
        for sign in (1, -1):
            (e,) = mxref.explain(torch.tensor([sign * float(value)]), format).elements
            assert (e.saturated, e.tie, e.value) == (saturates, False, sign * float(largest)), e
            (e,) = mxref.explain(torch.tensor([sign * float(value)]), format, recipe="ocp_rceil").elements
            assert not e.saturated


# ------------------------------------------------------------------------------------------ NVFP4


def multiplied(x: np.ndarray, order: str, scale: int, tensor_scale: np.float32) -> list:
    """What is rounded to codes, from the rounded block scale: float32 steps, or exact rationals."""
    s_block = nvfp4.e4m3_values(np.uint8(scale))
    if order == "exact":
        if not np.isfinite(s_block):
            return [math.nan] * len(x)
        s = Fraction(float(s_block)) * Fraction(float(tensor_scale))
        return [Fraction(0) if s == 0 else v if math.isinf(v) else Fraction(v) / s for v in x.tolist()]
    with np.errstate(all="ignore"):
        if order == "vllm_torch":
            product = s_block * (F(1) / tensor_scale)
            multiplier = F(1) / F(1e8) if product == 0 else F(1) / product
        elif order == "vllm_triton":
            multiplier = F(0) if s_block == 0 else tensor_scale / s_block
        else:
            multiplier = F(0) if s_block == 0 else np.minimum(F(1) / (s_block * tensor_scale), nvfp4.FLT_MAX)
        return (x * F(multiplier)).tolist()


def as_rationals(products: list) -> list:
    return [Fraction(p) if isinstance(p, float) and math.isfinite(p) else p for p in products]


@pytest.mark.parametrize("scale", ["none", 1.0, 2.0**-11, 0.00037202382, 123.0, "dynamic"])
@pytest.mark.parametrize("order", ORDERS)
def test_nvfp4_blocks_by_float32_steps(order, scale, rng):
    element, vllm = ELEMENTS["e2m1"], order.startswith("vllm")
    for x in blocks(16, element, rng):
        if scale == "dynamic":
            amax = nvfp4.finite_amax(x)
            if order == "exact" and 0 < float(amax) / 2688 < 2.0**-149:
                continue  # amax / 2688 has no float32 value
            given, sources = None, dict(tensor_scale=nvfp4.nvidia_tensor_scale(amax)[0]) if vllm else dict(amax=amax)
        else:
            given = scale if scale == "none" else torch.tensor(scale)
            sources = dict(tensor_scale=F(1 if scale == "none" else scale))
        expected = nvfp4.quantize(x, order, inf="saturate" if vllm else "nan", **sources)
        explanation = mxref.explain(torch.from_numpy(x), "nvfp4", recipe=order, tensor_scale=given)
        assert explanation.scale_code == expected.scales[0]
        assert same(explanation.scale, float(nvfp4.e4m3_values(expected.scales)[0]))
        assert explanation.tensor_scale == (None if scale == "none" else float(expected.tensor_scale))
        if order != "exact" or expected.scales[0]:  # a scale of 0 in that order: its own test below
            quotients = as_rationals(multiplied(x, order, int(expected.scales[0]), expected.tensor_scale))
            check_elements(explanation, x, quotients, expected.codes, element)
        decoded = nvfp4.dequantize(expected, "divide" if vllm else "multiply")
        assert all(same(e.decoded, v) for e, v in zip(explanation.elements, decoded.tolist()))
        check_against_quantize(explanation, x, "nvfp4", recipe=order, tensor_scale=given)
        check_it_can_be_shown(explanation)


@pytest.mark.parametrize("order", ORDERS)
def test_nvfp4_ties_are_marked_at_midpoints_and_nowhere_else(order):
    """With a block maximum of 6 and no tensor scale every multiplier is 1: the quotient is the element itself."""
    ties = F([0.25, 0.75, 1.25, 1.75, 2.5])
    for sign in (F(1), F(-1)):
        x = np.concatenate([[F(6)], ties, np.nextafter(ties, F(0)), np.nextafter(ties, F(9))]) * sign
        explanation = mxref.explain(torch.from_numpy(x), "nvfp4", recipe=order, tensor_scale="none")
        assert explanation.scale == 1.0 and [e.quotient for e in explanation.elements] == x.tolist()
        assert [e.tie for e in explanation.elements] == [False] + [True] * 5 + [False] * 10
        assert [e.code % 2 for e in explanation.elements[1:6]] == [0] * 5


def test_the_order_decides_what_is_a_tie():
    """The public case `nvfp4-divide-not-reciprocal`: just below a tie as a quotient, on it as a product."""
    x = torch.tensor([6 * 7 * 2.0**-9, 0.02392577938735485])
    for recipe, tie, code in (("exact", False, 3), ("nvidia", True, 4), ("vllm_torch", True, 4), ("vllm_triton", True, 4)):
        e = mxref.explain(x, "nvfp4", recipe=recipe, tensor_scale="none").elements[1]
        assert (e.tie, e.code, e.below, e.above) == (tie, code, 1.5, 2.0), recipe


def raw_of(x: np.ndarray, order: str, tensor_scale: np.float32, forward: np.float32) -> float:
    amax = np.abs(x).max()
    if order == "exact":
        return float(Fraction(float(amax)) / (6 * Fraction(float(tensor_scale))))
    return float(forward * (amax * nvfp4.SIXTH) if order.startswith("vllm") else amax * (forward * nvfp4.SIXTH))


@pytest.mark.parametrize("order", ORDERS)
def test_raw_scale_with_a_given_tensor_scale(order, rng):
    for scale in (F(1), F(2.0**-11), F(0.00037202382), F(123)):
        for _ in range(20):
            x = F(rng.standard_normal(16) * np.exp(3 * rng.standard_normal()))
            forward = nvfp4.static_encode_scale(scale) if order == "nvidia" else scale
            explanation = mxref.explain(torch.from_numpy(x), "nvfp4", recipe=order, tensor_scale=torch.tensor(scale))
            assert explanation.raw_scale == raw_of(x, order, scale, forward)


@pytest.mark.parametrize("order", ORDERS)
def test_raw_scale_with_a_dynamic_tensor_scale(order, rng):
    for _ in range(50):
        x = F(rng.standard_normal(16) * np.exp(3 * rng.standard_normal()))
        amax = nvfp4.finite_amax(x)
        stored = nvfp4.quantize(x, order, amax=amax).tensor_scale
        forward = nvfp4.nvidia_tensor_scale(amax)[0] if order == "nvidia" else stored
        explanation = mxref.explain(torch.from_numpy(x), "nvfp4", recipe=order)
        assert explanation.raw_scale == raw_of(x, order, stored, forward)


def test_four_over_six(rng):
    chosen = set()
    for _ in range(30):
        x = F(rng.standard_normal(16))
        expected, choice = nvfp4.four_over_six(x, nvfp4.finite_amax(x))
        explanation = mxref.explain(torch.from_numpy(x), "nvfp4", recipe="nvidia_four_over_six")
        assert explanation.tensor_scale == float(expected.tensor_scale) and explanation.scale_code == expected.scales[0]
        quotients = as_rationals(multiplied(x, "nvidia", int(expected.scales[0]), expected.tensor_scale))
        check_elements(explanation, x, quotients, expected.codes, ELEMENTS["e2m1"])
        check_against_quantize(explanation, x, "nvfp4", recipe="nvidia_four_over_six")
        check_it_can_be_shown(explanation)
        chosen |= set(choice)
    assert chosen == {"six", "four"}


def test_four_over_six_raw_scale(rng):
    """Within a unit of e4m3 (an eighth) of the scale that it was rounded to, whichever candidate won."""
    for _ in range(30):
        x = F(rng.standard_normal(16))
        explanation = mxref.explain(torch.from_numpy(x), "nvfp4", recipe="nvidia_four_over_six")
        assert abs(explanation.raw_scale / explanation.scale - 1) <= 1 / 16


UNDERFLOWING = [[1e-6, -2e-6, 0.0, -0.0], [0.0, -0.0]]  # next to a tensor scale of 1 the block scale is 0


@pytest.mark.parametrize("order", ["nvidia", "vllm_torch", "vllm_triton"])
def test_a_block_scale_of_zero(order):
    for values in UNDERFLOWING:
        explanation = mxref.explain(torch.tensor(values), "nvfp4", recipe=order, tensor_scale=torch.tensor(1.0))
        assert explanation.scale_code == 0 and explanation.scale == 0
        for e in explanation.elements:
            assert (e.value, e.decoded, e.tie, e.saturated) == (0, 0, False, False) and math.isfinite(e.quotient)
        check_it_can_be_shown(explanation)


@pytest.mark.parametrize("values", UNDERFLOWING)
def test_a_block_scale_of_zero_in_the_exact_order(values):
    explanation = mxref.explain(torch.tensor(values), "nvfp4", recipe="exact", tensor_scale=torch.tensor(1.0))
    assert explanation.scale_code == 0 and not any(e.value for e in explanation.elements)
    assert not any(e.saturated or math.isnan(e.quotient) for e in explanation.elements)


# ------------------------------------------------------------------------------------------ poison, sizes, dtypes, refusals


@pytest.mark.parametrize("format", [*MX, "nvfp4"])
def test_nan_inf_and_zero_blocks(format):
    nan_code = 0x7F if format == "nvfp4" else 0xFF
    for values in ([math.nan], [1.0, math.nan, 0.0], [math.inf], [-math.inf, 2.0]):
        explanation = mxref.explain(torch.tensor(values), format)
        assert explanation.scale_code == nan_code and math.isnan(explanation.scale)
        assert all(e.code == 0 and math.isnan(e.decoded) and math.isnan(e.error) for e in explanation.elements)
        assert not any(e.tie or e.saturated for e in explanation.elements)
        check_it_can_be_shown(explanation)
    for values in ([0.0], [-0.0], [0.0, -0.0]):
        explanation = mxref.explain(torch.tensor(values), format)
        assert (explanation.scale_code, explanation.amax) == (0, 0.0)
        for e, value in zip(explanation.elements, values):
            keeps = math.copysign(1, value) if format != "mxint8" else 1.0
            assert (e.value, e.decoded, e.error, e.tie, e.saturated) == (0, 0, 0, False, False)
            assert math.copysign(1, e.decoded) == math.copysign(1, e.value) == keeps
        check_it_can_be_shown(explanation)


@pytest.mark.parametrize("format, recipe", [("mxfp4", "quark_even"), ("nvfp4", "vllm_torch"), ("nvfp4", "vllm_triton")])
def test_saturating_inf(format, recipe):
    x = torch.tensor([math.inf, -math.inf, 1.0])
    scale = None if format == "mxfp4" else torch.tensor(1.0)
    explanation = mxref.explain(x, format, recipe=recipe, tensor_scale=scale)
    assert explanation.scale_code == (254 if format == "mxfp4" else 0x7E) and explanation.amax == math.inf
    assert [e.value for e in explanation.elements[:2]] == [6.0, -6.0]
    assert [e.saturated for e in explanation.elements] == [True, True, False]
    assert [e.quotient for e in explanation.elements[:2]] == [math.inf, -math.inf]
    check_it_can_be_shown(explanation)


@pytest.mark.parametrize("format", [*MX, "nvfp4"])
def test_short_blocks(format, rng):
    size = 16 if format == "nvfp4" else 32
    x = torch.from_numpy(F(rng.standard_normal(size)))
    for n in (1, 2, 3, size // 2, size - 1, size):
        explanation = mxref.explain(x[:n], format)
        check_against_quantize(explanation, x[:n].numpy(), format)
    for n in (0, size + 1):
        with pytest.raises(ValueError, match=rf"\[{n}\].*1 to {size}"):
            mxref.explain(torch.ones(n), format)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", ["mxfp4", "mxint8", "nvfp4"])
def test_narrow_inputs_and_strides(format, dtype, rng):
    x = torch.from_numpy(F(rng.standard_normal(32))).to(dtype)[::2]
    assert str(mxref.explain(x, format)) == str(mxref.explain(x.float().contiguous(), format))
    assert not x.requires_grad and mxref.explain(x.clone().requires_grad_(), format) == mxref.explain(x, format)


def test_stochastic_codes_are_those_of_the_seed(rng):
    recipe = replace(mxref.RECIPES["ocp"], name="stochastic", rounding="stochastic")
    x = F(rng.standard_normal(32))
    shown = [mxref.explain(torch.from_numpy(x), "mxfp4", recipe=recipe, seed=seed) for seed in (1, 2)]
    for seed, explanation in zip((1, 2), shown):
        check_against_quantize(explanation, x, "mxfp4", recipe=recipe, seed=seed)
        check_it_can_be_shown(explanation)
    assert [e.code for e in shown[0].elements] != [e.code for e in shown[1].elements]
    assert [e.quotient for e in shown[0].elements] == [e.quotient for e in shown[1].elements]


def test_a_format_of_your_own():
    e1m2 = mxref.ElementFormat("e1m2", exponent_bits=1, mantissa_bits=2, bias=1)
    mine = mxref.BlockFormat("mine", e1m2, mxref.ELEMENT_FORMATS["e8m0"], 4)
    explanation = mxref.explain(torch.tensor([1.75, 0.625, -0.1, 2.0]), mine)
    assert explanation.format == "mine" and explanation.scale_code == 128
    assert [e.quotient for e in explanation.elements] == [0.875, 0.3125, -0.05000000074505806, 1.0]
    assert [(e.below, e.above) for e in explanation.elements] == [(0.75, 1.0), (0.25, 0.5), (0, -0.25), (1.0, 1.0)]
    assert [e.tie for e in explanation.elements] == [True, False, False, False]
    assert [e.code for e in explanation.elements] == [4, 1, 8, 4]
    check_it_can_be_shown(explanation)


@pytest.mark.parametrize("recipe", list(mxref.RECIPES))
@pytest.mark.parametrize("format", [*MX, "nvfp4"])
def test_every_recipe_is_explained_or_refused(format, recipe):
    x = torch.tensor([3.0, -1.25, 0.1])
    row = mxref.RECIPES[recipe]
    formats = (row.format,) if isinstance(row.format, str) else row.format or (format,)
    fits = (row.scale_rule == "amax") == (format == "nvfp4") and format in formats
    if fits and row.block_rows == 1 and row.transform is None:
        explanation = mxref.explain(x, format, recipe=recipe)
        check_against_quantize(explanation, x.numpy(), format, recipe=recipe)
        check_it_can_be_shown(explanation)
    else:
        with pytest.raises(ValueError, match=f"'{recipe}'"):
            mxref.explain(x, format, recipe=recipe)


@pytest.mark.parametrize("format, recipe", [("mxfp4", "ocp"), ("nvfp4", "nvidia")])
def test_a_recipe_that_transforms_is_refused(format, recipe):
    rotated = replace(mxref.RECIPES[recipe], name="rotated", transform=mxref.Hadamard(4))
    square = replace(mxref.RECIPES[recipe], name="square", block_rows=4)
    for mine in (rotated, square):
        with pytest.raises(ValueError, match=f"'{mine.name}'"):
            mxref.explain(torch.ones(8), format, recipe=mine)


def test_explaining_leaves_the_input_alone():
    x = torch.tensor([3.0, math.nan, -0.0])
    before = x.clone()
    mxref.explain(x, "nvfp4")
    assert_same_bits(x, before)


@pytest.mark.parametrize("format, code", [("mxfp4", "0xFF"), ("nvfp4", "0x7F"), ("mxfp8_e5m2", "0xFF"), ("mxint8", "0xFF")])
def test_a_block_that_is_nan_says_why(format, code):
    why = f"scale code {code} = nan: a NaN or Inf makes the whole block NaN"
    for odd in (math.nan, math.inf, -math.inf):
        assert why in str(mxref.explain(torch.tensor([1.0, odd]), format)).splitlines()[1]
    assert "makes the whole block" not in str(mxref.explain(torch.tensor([1.0, 2.0]), format))
    if format != "nvfp4":  # whose scale stays finite by this recipe, as do the values that are
        assert "makes the whole block" not in str(mxref.explain(torch.tensor([1.0, math.inf]), format, recipe="quark_even"))
