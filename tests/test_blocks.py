"""Blocks: codes, scales and decoded values of every format and recipe, and what a block must not depend on.

Expected values: `oracles.mx` (rationals: exact quotient, nearest even; exact product rounded once), `oracles.nvfp4`
(numpy float32 steps, rationals for `exact`), float64 where every step is exact, Philox in Python integers.
"""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from bits import as_torch, assert_same_bits
from oracles import mx, nvfp4
from oracles.elements import ELEMENTS, decode_float64, encode_float64
from oracles.philox import random_word
from oracles.rationals import BINARIES, round_float64

import mxref

MX = {
    "mxfp4": "e2m1",
    "mxfp6_e2m3": "e2m3",
    "mxfp6_e3m2": "e3m2",
    "mxfp8_e4m3": "e4m3",
    "mxfp8_e5m2": "e5m2",
    "mxint8": "int8",
}
RECIPES = {"ocp": "floor", "ocp_even": "even", "ocp_ceil": "ceil", "ocp_rceil": "rceil"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ORDERS = ["nvidia", "exact", "vllm_torch", "vllm_triton"]


def as_dtype(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """float64 values that are numbers of `dtype`, NaN canonical."""
    out = torch.from_numpy(np.array(values, dtype=np.float64)).to(dtype)
    canonical = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}[dtype]
    carrier = torch.int32 if dtype == torch.float32 else torch.int16
    return torch.where(out.isnan(), torch.tensor(canonical, dtype=carrier).view(dtype), out)


def nasty_rows(element, rng, k: int = 32) -> np.ndarray:
    """float32 rows of `k`: ties of each scaled midpoint, their neighbours, wide ranges, both ends, signed zeros."""
    ladder = [float(m) for m in element.magnitudes] + [float(element.beyond)]
    middles = np.float64([(a + b) / 2 for a, b in zip(ladder, ladder[1:])])
    rows = []
    for exponent in (0, -20, 100, -127 - element.emax, -126, 127 - element.emax):
        picked = np.ldexp(rng.choice(middles, k), exponent)
        picked[0] = np.ldexp(float(element.max), exponent)
        with np.errstate(over="ignore"):
            ties = np.float32(picked)
        rows += [ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(9e9))]
    rows += [np.float32(rng.standard_normal(k)), np.float32(np.ldexp(rng.standard_normal(k), rng.integers(-40, 40, k)))]
    rows += [np.float32(np.ldexp(rng.standard_normal(k), rng.integers(-149, -120, k)))]
    rows += [np.float32(3e38 * rng.uniform(-1, 1, k)), np.full(k, 2.0**-149, np.float32), np.float32([0.0, -0.0] * (k // 2))]
    x = np.float32(rows) * np.where(rng.random((len(rows), k)) < 0.5, np.float32(-1), np.float32(1))
    x[~np.isfinite(x)] = np.finfo(np.float32).max
    return x


# ------------------------------------------------------------------------------------------ MX by rationals


@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("format", list(MX))
def test_mx_blocks_by_rationals(format, recipe, rng):
    element = ELEMENTS[MX[format]]
    x = nasty_rows(element, rng)
    codes, scales = mx.quantize_rows(x, element, rule=RECIPES[recipe])
    q = mxref.quantize(torch.from_numpy(x), format, recipe=recipe)
    assert_same_bits(q.scales, scales, format)
    assert_same_bits(q.codes, codes, format)
    assert q.tensor_scale is None and q.format.name == format and q.recipe.name == recipe and q.axis == -1
    for name, dtype in DTYPES.items():
        expected = as_dtype(mx.dequantize_rows(codes, scales, element, binary=BINARIES[name]), dtype)
        assert_same_bits(mxref.dequantize(q, dtype), expected, f"{format} {recipe} to {name}")


@pytest.mark.parametrize("format", list(MX))
def test_mx_every_bfloat16_in_shuffled_blocks(format, rng):
    element = ELEMENTS[MX[format]]
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    patterns = patterns[patterns.isfinite()]
    x = torch.cat([patterns, patterns[torch.from_numpy(rng.permutation(len(patterns)))]]).reshape(-1, 32)
    wide = x.double().numpy()
    amax = np.abs(wide).max(-1)
    live = amax > 0
    for recipe, rule in RECIPES.items():
        e = np.where(live, mx.exponents_float64(np.where(live, amax, 1.0), element, rule), -127)
        codes = encode_float64(wide / np.ldexp(1.0, e)[:, None], element)
        q = mxref.quantize(x, format, recipe=recipe)
        assert_same_bits(q.scales, np.uint8(e + 127)[:, None], recipe)
        assert_same_bits(q.codes, codes, recipe)
        exact = decode_float64(codes, element) * np.ldexp(1.0, e)[:, None]
        for name, dtype in DTYPES.items():
            assert_same_bits(
                mxref.dequantize(q, dtype), as_dtype(round_float64(exact, BINARIES[name]), dtype), f"{recipe} {name}"
            )
        assert_same_bits(
            mxref.qdq(x, format, recipe=recipe), as_dtype(round_float64(exact, BINARIES["bfloat16"]), torch.bfloat16)
        )


@pytest.mark.parametrize("format", list(MX))
def test_decode_every_code_with_every_scale(format):
    element = ELEMENTS[MX[format]]
    codes = np.arange(1 << element.bits, dtype=np.uint8)
    grid = np.broadcast_to(codes, (256, len(codes))).copy()
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], -(-len(codes) // 32), axis=1)
    q = mxref.BlockTensor.from_codes(
        torch.from_numpy(grid), torch.from_numpy(scales), None, mxref.BLOCK_FORMATS[format], mxref.RECIPES["ocp"]
    )
    exact = decode_float64(grid, element) * np.ldexp(1.0, np.arange(256) - 127)[:, None]
    exact[255] = np.nan
    for name, dtype in DTYPES.items():
        assert_same_bits(
            mxref.dequantize(q, dtype), as_dtype(round_float64(exact, BINARIES[name]), dtype), f"{format} to {name}"
        )


@pytest.mark.parametrize("format", ["mxfp8_e4m3", "mxfp8_e5m2"])
def test_overflow_special_in_a_block(format):
    element = ELEMENTS[MX[format]]
    recipe = replace(mxref.RECIPES["ocp"], name="special", overflow="special")
    x = np.float32([[float(element.max) * f, 1.0] for f in (1.0, 1.01, 1.05, 1.07, 1.12)])
    codes, scales = mx.quantize_rows(x, element, overflow="special")
    q = mxref.quantize(torch.from_numpy(x), format, recipe=recipe)
    assert_same_bits(q.codes, codes)
    assert_same_bits(q.scales, scales)
    assert_same_bits(mxref.dequantize(q), as_dtype(mx.dequantize_rows(codes, scales, element), torch.float32))
    assert not mxref.dequantize(q).isfinite().all()


@pytest.mark.parametrize("rounding", ["toward_zero", "ties_away", "away_from_zero"])
@pytest.mark.parametrize("format", list(MX))
def test_other_roundings_in_a_block(format, rounding, rng):
    element = ELEMENTS[MX[format]]
    x = nasty_rows(element, rng)[::2]
    codes, scales = mx.quantize_rows(x, element, rounding=rounding)
    q = mxref.quantize(torch.from_numpy(x), format, recipe=replace(mxref.RECIPES["ocp"], name=rounding, rounding=rounding))
    assert_same_bits(q.codes, codes)
    assert_same_bits(q.scales, scales)


@pytest.mark.parametrize("format, recipe", [("mxfp4", "ocp"), ("mxfp8_e5m2", "ocp"), ("nvfp4", "nvidia")])
def test_negative_zero_policies(format, recipe):
    x = torch.tensor([[6.0, -0.0, 0.0, -1e-20, 1e-20, -1.0]])
    sign = 1 << (mxref.BLOCK_FORMATS[format].element.bits - 1)
    expected = {"keep": [sign, 0, sign, 0], "drop_quotient": [0, 0, sign, 0], "drop": [0, 0, 0, 0]}
    for policy, codes in expected.items():
        q = mxref.quantize(x, format, recipe=replace(mxref.RECIPES[recipe], name=policy, negative_zero=policy))
        assert q.codes[0, 1:5].tolist() == codes, policy
        assert q.codes[0, 5] & sign


# ------------------------------------------------------------------------------------------ shapes and axes


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8_e4m3", "nvfp4"])
@pytest.mark.parametrize("k", [1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65])
def test_tails_are_short_blocks(format, k, rng):
    x = np.float32(np.ldexp(rng.standard_normal((3, k)), rng.integers(-6, 6, (3, k))))
    q = mxref.quantize(torch.from_numpy(x), format, tensor_scale="none" if format == "nvfp4" else None)
    size = mxref.BLOCK_FORMATS[format].block_size
    assert q.codes.shape == (3, k) and q.scales.shape == (3, -(-k // size))
    if format == "nvfp4":
        expected = nvfp4.quantize(x, "nvidia", tensor_scale=np.float32(1))
        codes, scales = expected.codes, expected.scales
    else:
        codes, scales = mx.quantize_rows(x, ELEMENTS[MX[format]])
    assert_same_bits(q.codes, codes)
    assert_same_bits(q.scales, scales)
    padded = np.zeros((3, -(-k // size) * size), np.float32)
    padded[:, :k] = x
    whole = mxref.quantize(torch.from_numpy(padded), format, tensor_scale="none" if format == "nvfp4" else None)
    assert_same_bits(whole.codes[:, :k], q.codes)
    assert_same_bits(whole.scales, q.scales)


@pytest.mark.parametrize("format", ["mxfp6_e3m2", "mxint8", "nvfp4"])
@pytest.mark.parametrize("shape", [(40,), (3, 40), (2, 3, 40), (2, 1, 3, 40)])
def test_axis_is_a_transpose(format, shape, rng):
    x = torch.from_numpy(np.float32(np.ldexp(rng.standard_normal(shape), rng.integers(-6, 6, shape))))
    along_last = mxref.quantize(x, format)
    for axis in range(-x.ndim, x.ndim):
        q = mxref.quantize(x.movedim(-1, axis), format, axis=axis)
        assert q.axis == (axis if axis < 0 else axis - x.ndim)
        assert q.shape == x.movedim(-1, axis).shape and q.scales.shape[axis] == -(-40 // q.format.block_size)
        assert_same_bits(q.codes.movedim(axis, -1), along_last.codes)
        assert_same_bits(q.scales.movedim(axis, -1), along_last.scales)
        assert_same_bits(mxref.dequantize(q).movedim(axis, -1), mxref.dequantize(along_last))
        assert_same_bits(q.packed, along_last.packed)


def test_axis_out_of_range():
    for axis in (2, -3):
        with pytest.raises((ValueError, IndexError), match="axis"):
            mxref.quantize(torch.ones(3, 4), "mxfp4", axis=axis)
    with pytest.raises((ValueError, IndexError)):
        mxref.quantize(torch.tensor(1.0), "mxfp4")


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_strides_do_not_matter_and_inputs_are_left_alone(format, rng):
    base = torch.from_numpy(np.float32(rng.standard_normal((12, 70))))
    before = base.clone()
    for view in (base.T, base[::3], base[:, 3:67], base.flip(1), base.T[5:69:2], base[2:3].expand(4, 70)):
        q, plain = mxref.quantize(view, format), mxref.quantize(view.clone(memory_format=torch.contiguous_format), format)
        assert_same_bits(q.codes, plain.codes)
        assert_same_bits(q.scales, plain.scales)
        assert_same_bits(mxref.qdq(view, format), mxref.dequantize(plain))
    assert_same_bits(base, before)


@pytest.mark.parametrize("format", ["mxfp4", "mxint8", "nvfp4"])
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 32), (2, 0, 48)])
def test_empty_tensors(format, shape):
    q = mxref.quantize(torch.zeros(shape), format)
    assert q.codes.shape == torch.Size(shape)
    assert q.scales.shape == torch.Size(shape[:-1] + (-(-shape[-1] // q.format.block_size),))
    assert mxref.dequantize(q).shape == torch.Size(shape)
    assert mxref.qdq(torch.zeros(shape, dtype=torch.bfloat16), format).dtype == torch.bfloat16


@pytest.mark.parametrize("format", [*MX, "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_widened_exactly(format, dtype, rng):
    x = torch.from_numpy(np.float32(np.ldexp(rng.standard_normal((7, 80)), rng.integers(-12, 12, (7, 80))))).to(dtype)
    q, wide = mxref.quantize(x, format), mxref.quantize(x.float(), format)
    assert_same_bits(q.codes, wide.codes)
    assert_same_bits(q.scales, wide.scales)
    assert_same_bits(mxref.qdq(x, format), mxref.dequantize(wide, dtype))


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8_e4m3", "nvfp4"])
def test_a_block_does_not_depend_on_its_neighbours(format, rng):
    x = torch.from_numpy(np.float32(rng.standard_normal((9, 96))))
    given = None if format != "nvfp4" else torch.tensor(2.0**-9)
    q = mxref.quantize(x, format, tensor_scale=given)
    size = q.format.block_size
    for row in range(9):
        for b in range(96 // size):
            alone = mxref.quantize(x[row, b * size : (b + 1) * size], format, tensor_scale=given)
            assert_same_bits(alone.codes, q.codes[row, b * size : (b + 1) * size])
            assert_same_bits(alone.scales, q.scales[row, b : b + 1])
    many = mxref.quantize(x.repeat(700, 1), format, tensor_scale=given)  # more than any internal chunk
    assert_same_bits(many.codes, q.codes.repeat(700, 1))
    assert_same_bits(many.scales, q.scales.repeat(700, 1))


# ------------------------------------------------------------------------------------------ 16 x 16 blocks


def _square(x: np.ndarray, rows: int, size: int) -> np.ndarray:
    """[R, C] -> [R / rows, C / size, rows * size], zero padded."""
    x = np.pad(x, ((0, -x.shape[0] % rows), (0, -x.shape[1] % size)))
    r, c = x.shape[0] // rows, x.shape[1] // size
    return x.reshape(r, rows, c, size).transpose(0, 2, 1, 3).reshape(r, c, rows * size)


@pytest.mark.parametrize("shape", [(16, 16), (32, 48), (20, 40), (1, 17), (3, 5)])
@pytest.mark.parametrize("format, rows", [("mxfp4", 32), ("mxfp8_e4m3", 4), ("nvfp4", 16)])
def test_square_blocks(format, rows, shape, rng):
    x = np.float32(np.ldexp(rng.standard_normal(shape), rng.integers(-4, 4, shape)))
    size = mxref.BLOCK_FORMATS[format].block_size
    recipe = replace(mxref.RECIPES["nvidia" if format == "nvfp4" else "ocp"], name="square", block_rows=rows)
    q = mxref.quantize(torch.from_numpy(x), format, recipe=recipe)
    assert q.scales.shape == (-(-shape[0] // rows), -(-shape[1] // size)) and q.codes.shape == shape
    tiles = _square(x, rows, size)
    if format == "nvfp4":
        s_enc, s_dec = nvfp4.nvidia_tensor_scale(nvfp4.finite_amax(x))
        assert_same_bits(q.tensor_scale.reshape(()), torch.tensor(s_dec))
        scales = encode_float64(
            np.minimum(np.abs(tiles).max(-1) * (s_enc * nvfp4.SIXTH), np.float32(448)).astype(np.float64), ELEMENTS["e4m3"]
        )
        s_block = nvfp4.e4m3_values(scales)
        with np.errstate(divide="ignore"):
            multiplier = np.where(s_block == 0, np.float32(0), np.minimum(np.float32(1) / (s_block * s_dec), nvfp4.FLT_MAX))
        codes = encode_float64((tiles * multiplier[..., None]).astype(np.float64), ELEMENTS["e2m1"])
        per_tile = (s_block * s_dec).astype(np.float64)
    else:
        codes, scales = mx.quantize_rows(tiles, ELEMENTS[MX[format]], block_size=rows * size)
        scales = scales[..., 0]
        per_tile = np.ldexp(1.0, scales.astype(int) - 127)
    assert_same_bits(q.scales, scales)
    assert_same_bits(_square(q.codes.numpy(), rows, size), codes)
    expected = round_float64(
        decode_float64(codes, ELEMENTS[MX.get(format, "e2m1")]) * per_tile[..., None], BINARIES["float32"]
    )
    assert_same_bits(as_torch(_square(mxref.dequantize(q).numpy(), rows, size)), expected.astype(np.float32))


def test_square_blocks_may_not_span_two_tensor_scales(rng):
    scales = torch.tensor([[1e-3, 2e-3], [3e-3, 1e-3]])  # of gate rows and of up rows
    x = torch.from_numpy(np.float32(rng.standard_normal((2, 64, 48))))
    got = mxref.qdq(x, "nvfp4", recipe="nvidia_16x16", tensor_scale=scales)
    for e, half in np.ndindex(2, 2):
        rows = slice(32 * half, 32 * half + 32)
        alone = mxref.qdq(x[e, rows], "nvfp4", recipe="nvidia_16x16", tensor_scale=scales[e, half])
        assert_same_bits(got[e, rows], alone, f"expert {e}, half {half}")
    with pytest.raises(ValueError, match="rows that share a block scale"):
        mxref.qdq(x[:, :40], "nvfp4", recipe="nvidia_16x16", tensor_scale=scales)  # 20 rows each


def test_square_blocks_commute_with_transpose(rng):
    x = torch.from_numpy(np.float32(rng.standard_normal((48, 64))))
    q, t = (mxref.quantize(v, "nvfp4", recipe="nvidia_16x16") for v in (x, x.T))
    assert_same_bits(q.scales.T.contiguous(), t.scales)
    assert_same_bits(mxref.dequantize(q).T.contiguous(), mxref.dequantize(t))


# ------------------------------------------------------------------------------------------ stochastic


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8_e4m3", "mxint8"])
def test_stochastic_mx_by_rationals(format, rng):
    element, seed = ELEMENTS[MX[format]], 0x123456789ABCDEF0
    x = np.float32(np.ldexp(rng.standard_normal((5, 40)), rng.integers(-8, 4, (5, 40))))
    words = np.array([random_word(seed, i) for i in range(x.size)], dtype=object).reshape(x.shape)
    codes, scales = mx.quantize_rows(x, element, words=words, rounding="stochastic")
    recipe = replace(mxref.RECIPES["ocp"], name="stochastic", rounding="stochastic")
    q = mxref.quantize(torch.from_numpy(x), format, recipe=recipe, seed=seed)
    assert_same_bits(q.scales, scales)
    assert_same_bits(q.codes, codes)
    nearest, _ = mx.quantize_rows(x, element)
    assert (codes != nearest).any()


@pytest.mark.parametrize("shape, axis", [((6, 40), 0), ((3, 4, 40), 1), ((3, 4, 40), 0), ((40, 5), -2)])
def test_stochastic_index_is_the_logical_one_whatever_the_axis(shape, axis, rng):
    element, seed = ELEMENTS["e2m1"], 5
    x = np.float32(rng.standard_normal(shape))
    words = np.array([random_word(seed, i) for i in range(x.size)], dtype=object).reshape(shape)
    codes, scales = mx.quantize_rows(
        np.moveaxis(x, axis, -1), element, words=np.moveaxis(words, axis, -1), rounding="stochastic"
    )
    recipe = replace(mxref.RECIPES["ocp"], name="stochastic", rounding="stochastic")
    q = mxref.quantize(torch.from_numpy(x), "mxfp4", recipe=recipe, axis=axis, seed=seed)
    assert_same_bits(q.codes, np.moveaxis(codes, -1, axis))
    assert_same_bits(q.scales, np.moveaxis(scales, -1, axis))


def test_stochastic_nvfp4(rng):
    seed = 77
    x = np.float32(rng.standard_normal((4, 48)))
    words = np.array([random_word(seed, i) for i in range(x.size)], dtype=np.uint64).reshape(4, 3, 16)
    expected = nvfp4.quantize(x, "nvidia", amax=nvfp4.finite_amax(x), words=words)
    recipe = replace(mxref.RECIPES["nvidia"], name="stochastic", rounding="stochastic")
    q = mxref.quantize(torch.from_numpy(x), "nvfp4", recipe=recipe, seed=seed)
    assert_same_bits(q.codes, expected.codes)
    assert_same_bits(q.scales, expected.scales)


def test_stochastic_square_blocks_use_the_logical_index(rng):
    seed = 3
    x = np.float32(rng.standard_normal((6, 40)))
    recipe = replace(mxref.RECIPES["ocp"], name="square", block_rows=4, rounding="stochastic")
    q = mxref.quantize(torch.from_numpy(x), "mxfp4", recipe=recipe, seed=seed)
    for r in range(6):
        for c in range(40):
            exponent = int(q.scales[r // 4, c // 32]) - 127
            expected = mx.element_codes(
                [float(x[r, c])], exponent, ELEMENTS["e2m1"], "stochastic", words=[random_word(seed, r * 40 + c)]
            )
            assert q.codes[r, c] == expected[0]


def test_stochastic_needs_a_seed():
    recipe = replace(mxref.RECIPES["ocp"], name="stochastic", rounding="stochastic")
    with pytest.raises((ValueError, TypeError), match="seed"):
        mxref.quantize(torch.ones(32), "mxfp4", recipe=recipe)


# ------------------------------------------------------------------------------------------ NVFP4


def nv_rows(rng) -> list[np.ndarray]:
    """Tensors [R, 48] for NVFP4: random, ties, blocks far below the largest, ends of float32, tails."""
    ties = np.float32([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -1.25, -5, 0.0, -0.0, 0.5, 3, 4])
    tensors = [np.float32(rng.standard_normal((6, 48))), np.float32(rng.standard_normal((3, 41)) * 2.0**-60)]
    tensors += [np.float32(np.outer([s], np.tile(ties, 3))) for s in (1, 3, 7, 100, 0.001, 1e-30, 1e30)]
    spread = np.float32(rng.standard_normal((24, 48)))
    spread[:, :16] *= np.float32(2.0) ** -np.arange(24, dtype=np.float32)[:, None]
    tensors += [spread, np.float32(np.ldexp(rng.standard_normal((8, 48)), rng.integers(-20, 3, (8, 48))))]
    tensors += [np.float32(rng.standard_normal((2, 48)) * s) for s in (1e-35, 1e-38, 1e-42, 1e37)]
    tensors += [np.zeros((2, 48), np.float32), -np.zeros((1, 16), np.float32), np.full((1, 32), np.finfo(np.float32).max)]
    tensors += [np.full((1, 3), 2.0**-149, np.float32)]
    zero_block = np.float32(rng.standard_normal((2, 48)))
    zero_block[:, 16:32] = -0.0
    return tensors + [zero_block]


@pytest.mark.parametrize("order", ["nvidia", "exact"])
def test_nvfp4_dynamic_tensor_scale(order, rng):
    for x in nv_rows(rng):
        amax = nvfp4.finite_amax(x)
        if order == "exact" and 0 < float(amax) / 2688 < 2.0**-149:
            continue  # amax / 2688 has no float32 value: its own test below
        expected = nvfp4.quantize(x, order, amax=amax)
        q = mxref.quantize(torch.from_numpy(x), "nvfp4", recipe=order)
        context = f"{order}, amax {amax!r}"
        assert_same_bits(q.tensor_scale.reshape(()), torch.tensor(expected.tensor_scale), context)
        assert_same_bits(q.scales, expected.scales, context)
        assert_same_bits(q.codes, expected.codes, context)
        for name, dtype in DTYPES.items():
            want = as_dtype(nvfp4.dequantize(expected, "multiply", BINARIES[name]), dtype)
            assert_same_bits(mxref.dequantize(q, dtype), want, f"{context} to {name}")


@pytest.mark.parametrize("order", ["vllm_torch", "vllm_triton"])
def test_nvfp4_vllm_orders_with_a_given_scale(order, rng):
    for x in nv_rows(rng):
        amax = float(nvfp4.finite_amax(x))
        for gs in (1.0, 448.0, 0.001, 2688 / amax if 1e-35 < amax < 1e37 else 1.0, 1234.567):
            gs = np.float32(gs)
            expected = nvfp4.quantize(x, order, tensor_scale=gs, inf="saturate")
            q = mxref.quantize(torch.from_numpy(x), "nvfp4", recipe=order, tensor_scale=torch.tensor(gs))
            context = f"{order}, amax {amax!r}, gs {gs!r}"
            assert_same_bits(q.scales, expected.scales, context)
            assert_same_bits(q.codes, expected.codes, context)
            assert_same_bits(mxref.dequantize(q), as_dtype(nvfp4.dequantize(expected, "divide"), torch.float32), context)


@pytest.mark.parametrize("order", ["nvidia", "exact"])
def test_nvfp4_given_multiplying_scale(order, rng):
    for x in nv_rows(rng):
        for scale in (1.0, 2.0**-11, 0.00037202382, 3.0e-5, 123.0):
            scale = np.float32(scale)
            expected = nvfp4.quantize(x, order, tensor_scale=scale)
            q = mxref.quantize(torch.from_numpy(x), "nvfp4", recipe=order, tensor_scale=torch.tensor(scale))
            assert_same_bits(q.scales, expected.scales, f"{order} {scale!r}")
            assert_same_bits(q.codes, expected.codes, f"{order} {scale!r}")
            assert_same_bits(mxref.dequantize(q), as_dtype(nvfp4.dequantize(expected), torch.float32))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("scale", [2.0**-149, 1e-40, 1e-38, 1e38, float(np.finfo(np.float32).max)])
def test_nvfp4_extreme_given_scales(order, scale, rng):
    scale = np.float32(scale)
    x = np.float32(np.ldexp(rng.standard_normal((4, 32)), rng.integers(-100, 100, (4, 1))))
    vllm = order.startswith("vllm")
    expected = nvfp4.quantize(x, order, tensor_scale=scale, inf="saturate" if vllm else "nan")
    q = mxref.quantize(torch.from_numpy(x), "nvfp4", recipe=order, tensor_scale=torch.tensor(scale))
    assert_same_bits(q.scales, expected.scales)
    assert_same_bits(q.codes, expected.codes)
    direction = "divide" if vllm else "multiply"
    assert_same_bits(mxref.dequantize(q), as_dtype(nvfp4.dequantize(expected, direction), torch.float32))


@pytest.mark.parametrize("order", ORDERS)
def test_nvfp4_without_a_tensor_scale(order, rng):
    x = np.float32(np.ldexp(rng.standard_normal((8, 48)), rng.integers(-14, 14, (8, 1))))
    vllm = order.startswith("vllm")
    expected = nvfp4.quantize(x, order, tensor_scale=np.float32(1), inf="saturate" if vllm else "nan")
    q = mxref.quantize(torch.from_numpy(x), "nvfp4", recipe=order, tensor_scale="none")
    assert q.tensor_scale is None
    assert_same_bits(q.scales, expected.scales)
    assert_same_bits(q.codes, expected.codes)
    assert_same_bits(mxref.dequantize(q), as_dtype(nvfp4.dequantize(expected), torch.float32))


@pytest.mark.parametrize("order", ["nvidia", "exact"])
def test_nvfp4_per_row_and_per_expert_scales(order, rng):
    x = np.float32(rng.standard_normal((3, 5, 48)) * np.exp(2 * rng.standard_normal((3, 5, 1))))
    rows = mxref.quantize(torch.from_numpy(x), "nvfp4", recipe=order, tensor_scale="per_row")
    experts = mxref.quantize(torch.from_numpy(x), "nvfp4", recipe=order, tensor_scale="per_expert")
    assert rows.tensor_scale.shape == (3, 5, 1) and experts.tensor_scale.shape == (3, 1, 1)
    for e in range(3):
        expected = nvfp4.quantize(x[e], order, amax=nvfp4.finite_amax(x[e]))
        assert_same_bits(experts.codes[e], expected.codes)
        assert_same_bits(experts.scales[e], expected.scales)
        assert_same_bits(experts.tensor_scale[e].reshape(()), torch.tensor(expected.tensor_scale))
        assert_same_bits(mxref.dequantize(experts)[e], as_dtype(nvfp4.dequantize(expected), torch.float32))
        for r in range(5):
            expected = nvfp4.quantize(x[e, r], order, amax=nvfp4.finite_amax(x[e, r]))
            assert_same_bits(rows.codes[e, r], expected.codes)
            assert_same_bits(rows.scales[e, r], expected.scales)
            assert_same_bits(rows.tensor_scale[e, r].reshape(()), torch.tensor(expected.tensor_scale))


def test_nvfp4_per_row_is_a_row_alone_along_any_axis(rng):
    x = torch.from_numpy(np.float32(rng.standard_normal((40, 6))))
    q = mxref.quantize(x, "nvfp4", tensor_scale="per_row", axis=0)
    for c in range(6):
        alone = mxref.quantize(x[:, c], "nvfp4")
        assert_same_bits(q.codes[:, c], alone.codes)
        assert_same_bits(q.scales[:, c], alone.scales)
        assert_same_bits(q.tensor_scale.expand(40, 6)[0, c], alone.tensor_scale.reshape(()))


def test_nvfp4_given_scales_broadcast(rng):
    x = np.float32(rng.standard_normal((3, 4, 32)))
    scales = np.float32(np.exp(rng.standard_normal((3, 4, 1))) * 1e-3)
    q = mxref.quantize(torch.from_numpy(x), "nvfp4", tensor_scale=torch.from_numpy(scales))
    per_projection = mxref.quantize(
        torch.from_numpy(x), "nvfp4", tensor_scale=torch.from_numpy(np.repeat(scales[:, ::2], 2, axis=1))
    )
    pairs = mxref.quantize(torch.from_numpy(x), "nvfp4", tensor_scale=torch.from_numpy(scales[:, ::2, 0].copy()))
    assert_same_bits(pairs.codes, per_projection.codes)
    assert_same_bits(mxref.dequantize(pairs), mxref.dequantize(per_projection))
    for e in range(3):
        for r in range(4):
            expected = nvfp4.quantize(x[e, r], "nvidia", tensor_scale=scales[e, r, 0])
            assert_same_bits(q.codes[e, r], expected.codes)
            assert_same_bits(q.scales[e, r], expected.scales)


@pytest.mark.parametrize("recipe", ["nvidia", "exact"])
def test_nvfp4_amax_is_over_finite_values_and_nan_stays_in_its_block(recipe, rng):
    x = rng.standard_normal((3, 48)).astype(np.float32)
    x[0, 3], x[1, 20], x[2, 47] = np.nan, np.inf, -np.inf
    expected = nvfp4.quantize(x, recipe, amax=nvfp4.finite_amax(x))
    q = mxref.quantize(torch.from_numpy(x), "nvfp4", recipe=recipe)
    assert_same_bits(q.codes, expected.codes)
    assert_same_bits(q.scales, expected.scales)
    assert (q.scales == 0x7F).sum() == 3
    decoded = mxref.dequantize(q)
    assert decoded.isnan().sum() == 48 and (decoded.view(torch.int32)[decoded.isnan()] == 0x7FC00000).all()
    all_nan = mxref.quantize(torch.full((2, 16), math.nan), "nvfp4", recipe=recipe)
    assert all_nan.tensor_scale.item() == 1.0 and mxref.dequantize(all_nan).isnan().all()


@pytest.mark.parametrize("recipe", ["nvidia", "exact"])
def test_nvfp4_saturating_inf(recipe, rng):
    x = rng.standard_normal((3, 48)).astype(np.float32)
    x[1, 20], x[2, 47], x[2, 40] = np.inf, -np.inf, np.nan
    expected = nvfp4.quantize(x, recipe, amax=nvfp4.finite_amax(x), inf="saturate")
    q = mxref.quantize(
        torch.from_numpy(x), "nvfp4", recipe=replace(mxref.RECIPES[recipe], name="saturating", inf="saturate")
    )
    assert q.scales[1, 1] == 0x7E and q.codes[1, 20] == 7 and q.scales[2, 2] == 0x7F
    assert_same_bits(q.scales, expected.scales)
    assert_same_bits(q.codes, expected.codes)


def test_nvfp4_zero_tensor_has_a_finite_scale():
    for order in ["nvidia", "exact", "nvidia_four_over_six", "nvidia_16x16"]:
        for form in ["per_tensor"] if order == "nvidia_16x16" else ["per_tensor", "per_row"]:
            q = mxref.quantize(torch.zeros(2, 48), "nvfp4", recipe=order, tensor_scale=form)
            assert (q.tensor_scale == 1.0).all() and (q.scales == 0).all() and (q.codes == 0).all()
            assert_same_bits(mxref.dequantize(q), torch.zeros(2, 48))


def test_nvfp4_exact_order_with_an_underflowing_amax():
    # amax / 2688 rounds to 0 in float32; a tensor scale must still be finite and > 0
    q = mxref.quantize(torch.full((1, 16), 2.0**-145), "nvfp4", recipe="exact")
    assert 0 < q.tensor_scale.item() < math.inf and mxref.dequantize(q).isfinite().all()


def test_nvfp4_decodes_to_bfloat16_through_the_float32_product():
    """Each NVFP4 step is a float32 operation and the cast comes last, as in every producer's code; a single rounding of
    the exact product would give the other neighbour on these scales."""
    found = 0
    for significand in range((1 << 23) + 1, 1 << 24, 2):
        product = 3 * significand  # 25 or 26 bits: float32 keeps 24, bfloat16 keeps 8
        width = product.bit_length()
        ulp32, ulp16 = 1 << (width - 24), 1 << (width - 8)
        if width == 26 and product % ulp32 == 1 and (product - 1) % ulp16 == ulp16 // 2:
            scale = np.float32(significand * 2.0**-30)
            stored = nvfp4.Quantized(np.uint8([[5]]), np.uint8([[0x38]]), scale)  # 3.0 * (1.0 * S)
            steps = nvfp4.dequantize(stored, "multiply", BINARIES["bfloat16"])
            given = mxref.BlockTensor.from_codes(
                torch.tensor([[5]], dtype=torch.uint8),
                torch.tensor([[0x38]], dtype=torch.uint8),
                torch.tensor(scale),
                "nvfp4",
                "nvidia",
            )
            assert_same_bits(mxref.dequantize(given, torch.bfloat16), as_dtype(steps, torch.bfloat16), f"S = {scale!r}")
            once = round_float64(np.float64([[3.0]]) * np.float64(scale), BINARIES["bfloat16"])
            found += int(float(once[0, 0]) != float(steps[0, 0]))
    assert found


@pytest.mark.parametrize(
    "search, scale_max", [("four_over_six_mse", 256.0), ("four_over_six_mae", 256.0), ("four_over_six_mse", None)]
)
def test_four_over_six(search, scale_max, rng):
    recipe = replace(mxref.RECIPES["nvidia_four_over_six"], name="candidate", search=search, scale_max=scale_max)
    chosen = set()
    for x in nv_rows(rng)[:-4]:
        amax = nvfp4.finite_amax(x)
        if not 1e-30 < amax < 1e30:
            continue
        expected, choice = nvfp4.four_over_six(x, amax, scale_max=scale_max or 448.0, error=search[-3:])
        q = mxref.quantize(torch.from_numpy(x), "nvfp4", recipe=recipe)
        assert_same_bits(q.tensor_scale.reshape(()), torch.tensor(expected.tensor_scale))
        assert_same_bits(q.scales, expected.scales)
        assert_same_bits(q.codes, expected.codes)
        chosen |= set(choice)
    assert chosen == {"six", "four"}


# ------------------------------------------------------------------------------------------ Hadamard


@pytest.mark.parametrize("size", [4, 16, 64])
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "mxfp8_e4m3"])
def test_hadamard_before_quantizing(format, size, rng):
    signs = tuple(int(s) for s in rng.choice([-1, 1], size))
    x = np.float32(rng.standard_normal((5, 128)))
    rotated = nvfp4.hadamard(x, size, signs)
    default = mxref.RECIPES[mxref.BLOCK_FORMATS[format].default_recipe]
    recipe = replace(default, name="rotated", transform=mxref.Hadamard(size, signs))
    q, plain = mxref.quantize(torch.from_numpy(x), format, recipe=recipe), mxref.quantize(torch.from_numpy(rotated), format)
    assert_same_bits(q.codes, plain.codes)
    assert_same_bits(q.scales, plain.scales)
    undone = nvfp4.hadamard(mxref.dequantize(plain).numpy(), size, [1] * size) * np.resize(np.float32(signs), 128)
    assert_same_bits(mxref.dequantize(q), undone.astype(np.float32))


# ------------------------------------------------------------------------------------------ qdq and gradients


@pytest.mark.parametrize("format", [*MX, "nvfp4"])
def test_qdq_is_dequantize_of_quantize(format, rng):
    x = np.float32(np.ldexp(rng.standard_normal((6, 70)), rng.integers(-8, 8, (6, 70))))
    x[2, 5], x[4, 60] = np.nan, np.inf
    for dtype in DTYPES.values():
        t = torch.from_numpy(x).to(dtype)
        for axis in (-1, 0):
            assert_same_bits(
                mxref.qdq(t, format, axis=axis), mxref.dequantize(mxref.quantize(t, format, axis=axis), dtype), str(dtype)
            )


@pytest.mark.parametrize("recipe", ["ocp", "ocp_rceil", "ocp_ceil"])
@pytest.mark.parametrize("format", ["mxfp4", "mxfp8_e4m3", "mxint8"])
def test_gradients(format, recipe, rng):
    element = ELEMENTS[MX[format]]
    x = np.float32(np.ldexp(rng.standard_normal((8, 40)), rng.integers(-3, 3, (8, 40))))
    x[3, 7] = np.nan
    upstream = torch.from_numpy(np.float32(rng.standard_normal((8, 40))))
    t = torch.from_numpy(x).requires_grad_()
    mxref.qdq(t, format, recipe=recipe).backward(upstream)
    assert_same_bits(t.grad, upstream)
    _, scales = mx.quantize_rows(x, element, rule=RECIPES[recipe])
    bound = float(element.max) * np.ldexp(1.0, scales.astype(int) - 127).repeat(32, -1)[:, :40]
    inside = (np.abs(x.astype(np.float64)) <= bound) & (scales.repeat(32, -1)[:, :40] != 255)
    t = torch.from_numpy(x).requires_grad_()
    out = mxref.qdq(t, format, recipe=recipe, gradient="clipped")
    out.backward(upstream)
    assert_same_bits(out.detach(), mxref.qdq(torch.from_numpy(x), format, recipe=recipe))
    got = t.grad.numpy()
    assert np.array_equal(got[inside], upstream.numpy()[inside]) and (got[~inside] == 0).all()
    assert recipe != "ocp" or not inside.all()


# ------------------------------------------------------------------------------------------ BlockTensor


def test_block_tensor_indexing(rng):
    x = torch.from_numpy(np.float32(rng.standard_normal((4, 6, 48))))
    for format, scale in [("mxfp4", None), ("nvfp4", "per_tensor"), ("nvfp4", "per_expert"), ("nvfp4", "per_row")]:
        q = mxref.quantize(x, format, tensor_scale=scale)
        decoded = mxref.dequantize(q)
        for index in (0, 3, -1, torch.tensor([2, 0, 2]), slice(1, 3)):
            assert_same_bits(mxref.dequantize(q[index]), decoded[index], f"{format} {scale} {index}")
        assert_same_bits(mxref.dequantize(q[1][2]), decoded[1, 2])
    assert mxref.quantize(x, "nvfp4", tensor_scale="per_expert")[2].shape == (6, 48)


def test_block_tensor_describes_itself(rng):
    x = torch.from_numpy(np.float32(rng.standard_normal((4, 64))))
    q = mxref.quantize(x, "mxfp6_e2m3", recipe="ocp_even")
    assert (q.shape, q.ndim, q.device.type, q.bits_per_element) == (torch.Size([4, 64]), 2, "cpu", 6.25)
    assert q.packed.shape == (4, 48) and q.packed.dtype == torch.uint8
    assert "ocp_even" in repr(q) and "mxfp6_e2m3" in repr(q) and "4, 64" in repr(q)
    with pytest.raises(AttributeError):
        q.codes = None


def test_recipes_print_themselves_and_travel():
    q = mxref.quantize(torch.ones(32), "mxfp4", recipe="ocp_ceil")
    assert q.recipe is mxref.RECIPES["ocp_ceil"] or q.recipe == mxref.RECIPES["ocp_ceil"]
    for name, recipe in mxref.RECIPES.items():
        assert recipe.name == name and name in str(recipe)
    with pytest.raises(AttributeError):
        mxref.RECIPES["ocp"].rounding = "stochastic"


def test_exact_quotient_needs_no_reciprocal(rng):
    """x / 2**e is exact, so no block of ties may depend on how the division is done."""
    for exponent in (-126, -1, 0, 1, 100, 120):
        values = [float(Fraction(m) * Fraction(2) ** exponent) for m in (6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5)]
        q = mxref.quantize(torch.tensor(values), "mxfp4")
        assert q.scales.item() == exponent + 127 and q.codes.tolist() == [7, 0, 2, 2, 4, 4, 6, 6]


@pytest.mark.parametrize("format, scale", [("mxfp4", None), ("mxint8", None), ("nvfp4", "per_row"), ("nvfp4", "none")])
def test_a_row_does_not_depend_on_its_batch(format, scale):
    x = torch.randn(7, 70) * torch.tensor([1.0, 1e3, 1.0, 0.0, torch.inf, 1e-30, 1.0])[:, None]
    whole = mxref.qdq(x, format, tensor_scale=scale)
    for index in ([0], [6, 2, 2], [3, 4, 5]):
        assert_same_bits(mxref.qdq(x[index], format, tensor_scale=scale), whole[index])


def test_a_row_depends_on_its_batch_where_a_tensor_scale_is_computed_from_it():
    x = torch.randn(2, 64) * torch.tensor([[1.0], [997.0]])
    assert (mxref.qdq(x, "nvfp4")[:1] != mxref.qdq(x[:1], "nvfp4")).any()
