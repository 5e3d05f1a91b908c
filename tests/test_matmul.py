"""Block dots and matmuls, bit for bit.

Expected values: `oracles.products` (exact Python integers inside a block, one correct rounding, numpy float32 additions
across blocks; float64 chains for weight-only and dequantized products).
"""

import itertools
import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from bits import as_torch, assert_same_bits
from oracles import mx, nvfp4, products
from oracles.elements import ELEMENTS, decode_float64
from oracles.products import FORMATS, Operand, operand

import mxref

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CANONICAL = {
    torch.float32: (0x7FC00000, torch.int32),
    torch.bfloat16: (0x7FC0, torch.int16),
    torch.float16: (0x7E00, torch.int16),
}
ELEMENT_NAMES = ["e2m1", "e2m3", "e3m2", "e4m3", "e5m2", "int8"]
PAIRS = [pytest.param(a, b, id=f"{a}-{b}") for a, b in itertools.product(ELEMENT_NAMES, repeat=2)]
FORMAT_PAIRS = [pytest.param(a, b, id=f"{a}-{b}") for a, b in itertools.product(FORMATS, repeat=2)]
EXACT_IN_FLOAT32 = {
    ("e2m1", "e2m1"),
    ("e2m1", "e2m3"),
    ("e2m1", "e3m2"),
    ("e2m3", "e2m3"),
    ("e2m3", "e3m2"),
    ("e3m2", "e3m2"),
} | {(e, "int8") for e in ("e2m1", "e2m3", "e3m2", "int8")}


def rounded(values: np.ndarray, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """float32 values rounded once to `dtype`, NaN canonical."""
    with np.errstate(all="ignore"):
        narrow = (
            values
            if dtype == torch.float32
            else values.astype(ml_dtypes.bfloat16 if dtype == torch.bfloat16 else np.float16)
        )
    out = as_torch(narrow)
    bits, carrier = CANONICAL[dtype]
    return torch.where(out.isnan(), torch.tensor(bits, dtype=carrier).view(dtype), out)


def finite_codes(name: str) -> np.ndarray:
    element = ELEMENTS[name]
    codes = np.arange(1 << element.bits, dtype=np.uint8)
    return codes[np.isfinite(decode_float64(codes, element))]


def adversarial_rows(name: str, n: int, rng) -> np.ndarray:
    """Rows of codes that need the most bits: all largest, signs alternating, largest beside smallest, one-sided, random."""
    element = ELEMENTS[name]
    top, low = element.max_code, 1
    minus = [element.signed_code(top, True), element.signed_code(low, True)]
    most_negative = 0x80 if element.integer else minus[0]
    rows = [
        [top] * n,
        [minus[0]] * n,
        [most_negative] * n,
        [top, minus[0]] * n,
        [top] * (n - 1) + [low],
        [low] + [top] * (n - 1),
    ]
    rows += [
        [top] * (n - 1) + [minus[1]],
        [low] * n,
        [0] * n,
        [element.signed_code(0, True)] * n,
        [top, low] * n,
        [minus[0], low, low] * n,
    ]
    rows = [row[:n] for row in rows]
    codes = finite_codes(name)
    small = codes[np.abs(decode_float64(codes, element)) <= 1]
    rows += [rng.choice(codes, n) for _ in range(8)] + [rng.choice(small, n) for _ in range(3)]
    mixed = rng.choice(small, n)
    mixed[:2] = (top, minus[0])[: len(mixed[:2])]
    return np.uint8([*rows, mixed])


@pytest.mark.parametrize("a, b", PAIRS)
@pytest.mark.parametrize("n", [1, 7, 16, 32])
def test_block_dot_of_every_pair(a, b, n, rng):
    x, y = adversarial_rows(a, n, rng), adversarial_rows(b, n, rng)
    expected = products.block_dot(x, y, ELEMENTS[a], ELEMENTS[b])
    assert_same_bits(mxref.block_dot(torch.from_numpy(x), torch.from_numpy(y), a, b), rounded(expected), f"{a} {b} n={n}")


@pytest.mark.parametrize("a, b", PAIRS)
def test_block_dot_cancellation(a, b, rng):
    """x . y - x . y + a little: everything large must cancel exactly and the little must survive."""
    codes_a, codes_b = finite_codes(a), finite_codes(b)
    half_a, half_b = rng.choice(codes_a, (12, 15)), rng.choice(codes_b, (12, 15))
    negated = {int(c): i for i, c in enumerate(codes_a)}
    values = decode_float64(codes_a, ELEMENTS[a])
    flip = {
        int(c): int(codes_a[np.flatnonzero(values == -values[negated[int(c)]])[0]])
        for c in codes_a
        if (values == -values[negated[int(c)]]).any()
    }
    flip.setdefault(0x80, 0x7F)
    opposite = np.vectorize(lambda c: flip[int(c)], otypes=[np.uint8])(half_a)
    x = np.concatenate([half_a, opposite, np.ones((12, 2), np.uint8)], axis=1)
    y = np.concatenate([half_b, half_b, np.ones((12, 2), np.uint8)], axis=1)
    order = rng.permutation(32)
    expected = products.block_dot(x, y, ELEMENTS[a], ELEMENTS[b])
    ours = mxref.block_dot(torch.from_numpy(x), torch.from_numpy(y), a, b)
    assert_same_bits(ours, rounded(expected))
    assert_same_bits(mxref.block_dot(torch.from_numpy(x[:, order]), torch.from_numpy(y[:, order]), a, b), ours)


@pytest.mark.parametrize("pair", sorted(EXACT_IN_FLOAT32))
def test_pairs_called_exact_leave_nothing_to_round(pair, rng):
    a, b = pair
    x, y = adversarial_rows(a, 32, rng), adversarial_rows(b, 32, rng)
    exact = decode_float64(x, ELEMENTS[a]) @ decode_float64(y, ELEMENTS[b]).T  # far below 2**53 quanta: exact
    assert np.array_equal(mxref.block_dot(torch.from_numpy(x), torch.from_numpy(y), a, b).double().numpy(), exact)


@pytest.mark.parametrize(
    "a, b, row_a, row_b, value",
    [  # the float32 witnesses: a sequential float32 sum loses the last product
        ("e2m1", "e4m3", [7] * 7 + [1], [0x7E] * 7 + [1], 18816.0009765625),
        ("e4m3", "int8", [0x7E, 1], [0x7F, 1], 448 * 127 / 64 + 2.0**-15),
        ("e4m3", "e4m3", [0x7E, 1], [0x7E, 1], 200704.0 + 2.0**-18),
        ("e5m2", "e5m2", [0x7B, 1], [0x7B, 1], 57344.0**2 + 2.0**-32),
    ],
)
def test_witnesses(a, b, row_a, row_b, value):
    got = mxref.block_dot(torch.tensor([row_a], dtype=torch.uint8), torch.tensor([row_b], dtype=torch.uint8), a, b)
    assert got.item() == np.float32(value)


def test_e5m2_dots_that_round_twice_in_float64(rng):
    """Sums of more than 53 bits whose float64 value is a float32 tie: only an exact dot rounds them right."""
    top, tiny = 0x7B, 0x01
    rows = []
    for tie_code in range(1, 0x3C):
        rows.append([top, tie_code, tiny] + [0] * 5)
        rows.append([top, tie_code, 0x80 | tiny] + [0] * 5)
    x = np.uint8(rows)
    y = np.uint8([[top, c, tiny] + [0] * 5 for c in range(1, 0x7C)])
    expected = products.block_dot(x, y, ELEMENTS["e5m2"], ELEMENTS["e5m2"])
    assert_same_bits(mxref.block_dot(torch.from_numpy(x), torch.from_numpy(y), "e5m2", "e5m2"), expected)
    a, b = decode_float64(x, ELEMENTS["e5m2"]), decode_float64(y, ELEMENTS["e5m2"])
    assert (np.float32(a @ b.T) != expected).any(), "a float64 dot must get some of these wrong, or the test tests nothing"


@pytest.mark.parametrize("b", ELEMENT_NAMES)
@pytest.mark.parametrize("a, specials", [("e5m2", [0x7C, 0xFC, 0x7D, 0xFF]), ("e4m3", [0x7F, 0xFF])])
def test_infinite_and_nan_elements(a, b, specials, rng):
    codes_b = np.arange(1 << ELEMENTS[b].bits, dtype=np.uint8)
    for n in (1, 3, 32):
        x = rng.choice(finite_codes(a), (12, n))
        x[:, 0] = np.resize(specials, 12)
        x[6:, -1] = rng.choice(specials, 6)
        y = rng.choice(codes_b, (25, n))
        y[:5, 0] = 0
        y[5:10] = rng.choice(finite_codes(b), (5, n))
        expected = products.block_dot(x, y, ELEMENTS[a], ELEMENTS[b])
        assert_same_bits(mxref.block_dot(torch.from_numpy(x), torch.from_numpy(y), a, b), rounded(expected))
        assert_same_bits(mxref.block_dot(torch.from_numpy(y), torch.from_numpy(x), b, a), rounded(expected.T.copy()))


@pytest.mark.parametrize("a, b", PAIRS)
def test_order_inside_a_block_does_not_matter(a, b, rng):
    x, y = adversarial_rows(a, 32, rng), adversarial_rows(b, 32, rng)
    base = mxref.block_dot(torch.from_numpy(x), torch.from_numpy(y), a, b)
    for _ in range(3):
        order = rng.permutation(32)
        assert_same_bits(mxref.block_dot(torch.from_numpy(x[:, order]), torch.from_numpy(y[:, order]), a, b), base)


# ------------------------------------------------------------------------------------------ matmul


def random_operand(
    format: str, rows: int, k: int, rng, *, spread: int = 12, tensor_scale=None, direction="multiply"
) -> Operand:
    """Random finite codes with random block scales, `spread` binades wide."""
    element, scale, block = FORMATS[format]
    codes = rng.choice(finite_codes(element), (rows, k))
    blocks = -(-k // block)
    if scale == "e8m0":
        scales = (127 + rng.integers(-spread, spread + 1, (rows, blocks))).astype(np.uint8)
    else:
        scales = rng.integers(0, 0x7F, (rows, blocks)).astype(np.uint8)
    return operand(format, codes, scales, tensor_scale, direction)


def block_tensor(x: Operand, format: str) -> mxref.BlockTensor:
    recipe = "ocp" if FORMATS[format][1] == "e8m0" else "vllm_torch" if x.direction == "divide" else "nvidia"
    scale = None if x.tensor_scale is None else torch.from_numpy(np.array(x.tensor_scale, dtype=np.float32))
    return mxref.BlockTensor.from_codes(
        torch.from_numpy(x.codes), torch.from_numpy(x.scales), scale, mxref.BLOCK_FORMATS[format], mxref.RECIPES[recipe]
    )


@pytest.mark.parametrize("a, b", FORMAT_PAIRS)
@pytest.mark.parametrize("k", [5, 32, 88])
def test_matmul_of_every_pair_of_formats(a, b, k, rng):
    x, y = random_operand(a, 5, k, rng), random_operand(b, 6, k, rng)
    expected = products.blockwise(x, y)
    got = mxref.matmul(block_tensor(x, a), block_tensor(y, b))
    assert_same_bits(got, rounded(expected), f"{a} {b} K={k}")
    for name, dtype in DTYPES.items():
        assert_same_bits(
            mxref.matmul(block_tensor(x, a), block_tensor(y, b), out_dtype=dtype), rounded(expected, dtype), name
        )


@pytest.mark.parametrize(
    "a, b",
    [("mxfp4", "mxfp4"), ("mxfp8_e4m3", "mxfp8_e4m3"), ("nvfp4", "nvfp4"), ("mxfp4", "nvfp4"), ("nvfp4", "mxfp8_e5m2")],
)
def test_order_across_blocks_is_ascending(a, b, rng):
    """Terms 2**12 apart: any other order of the float32 additions changes bits, and the test checks that it would."""
    x, y = random_operand(a, 6, 512, rng, spread=6), random_operand(b, 7, 512, rng, spread=6)
    expected = products.blockwise(x, y)
    step = min(x.block, y.block)
    size = max(x.block, y.block)

    def reverse(o: Operand) -> Operand:
        blocks = o.codes.reshape(len(o.codes), -1, size)[:, ::-1].reshape(len(o.codes), -1)
        return replace(
            o, codes=blocks, scales=o.scales.reshape(len(o.scales), -1, size // o.block)[:, ::-1].reshape(o.scales.shape)
        )

    assert (products.blockwise(reverse(x), reverse(y)) != expected).any() and step <= size
    assert_same_bits(mxref.matmul(block_tensor(x, a), block_tensor(y, b)), rounded(expected))


@pytest.mark.parametrize("a", ["mxfp4", "mxfp8_e5m2", "mxint8", "nvfp4"])
def test_e8m0_scales_at_both_ends(a, rng):
    ends = np.uint8([0, 1, 2, 63, 64, 127, 128, 190, 253, 254, 255])
    x, y = random_operand(a, 11, 32, rng), random_operand("mxfp4", 11, 32, rng)
    if a != "nvfp4":
        x = replace(x, scales=ends[:, None])
    y = replace(y, scales=ends[:, None])
    assert_same_bits(mxref.matmul(block_tensor(x, a), block_tensor(y, "mxfp4")), rounded(products.blockwise(x, y)))


def test_e8m0_products_need_no_intermediate_scale(rng):
    """2**127 * 2**-127 and the like: the two scales must never be multiplied in float32."""
    for s in range(0, 255):
        x = operand("mxfp4", np.uint8([[2] * 32]), np.uint8([[s]]))
        y = operand("mxfp4", np.uint8([[1] * 32]), np.uint8([[254 - s]]))
        assert mxref.matmul(block_tensor(x, "mxfp4"), block_tensor(y, "mxfp4")).item() == 16.0


def test_overflow_to_infinity_and_infinity_minus_infinity():
    big = np.uint8([[7] * 32 + [15] * 32])
    y = operand("mxfp4", np.uint8([[7] * 64]), np.uint8([[254, 254]]))
    x = operand("mxfp4", big, np.uint8([[254, 254]]))
    assert_same_bits(mxref.matmul(block_tensor(x, "mxfp4"), block_tensor(y, "mxfp4")), rounded(np.float32([[np.nan]])))
    x = replace(x, scales=np.uint8([[254, 0]]))
    assert mxref.matmul(block_tensor(x, "mxfp4"), block_tensor(y, "mxfp4")).item() == math.inf


def test_every_pair_of_e4m3_scales(rng):
    scales = np.arange(0x80, dtype=np.uint8)[:, None]
    for _ in range(3):
        x = operand("nvfp4", np.broadcast_to(rng.integers(0, 16, 16).astype(np.uint8), (128, 16)).copy(), scales)
        y = operand("nvfp4", np.broadcast_to(rng.integers(0, 16, 16).astype(np.uint8), (128, 16)).copy(), scales)
        e2m1, e4m3 = ELEMENTS["e2m1"], ELEMENTS["e4m3"]
        s = decode_float64(scales, e4m3)
        dot = (decode_float64(x.codes[0], e2m1) * decode_float64(y.codes[0], e2m1)).sum()
        exact = dot * s * s.T  # at most 19 significant bits
        expected = rounded(exact.astype(np.float32) + np.float32(0))
        assert np.array_equal(exact.astype(np.float32)[:127, :127], exact[:127, :127])
        assert_same_bits(mxref.matmul(block_tensor(x, "nvfp4"), block_tensor(y, "nvfp4")), expected)


@pytest.mark.parametrize("name", ["mxfp8_e5m2", "mxfp8_e4m3"])
def test_special_elements_and_nan_scales_reach_only_their_rows(name, rng):
    x, y = random_operand(name, 6, 80, rng), random_operand("mxfp4", 5, 80, rng)
    codes, scales = x.codes.copy(), x.scales.copy()
    specials = [0x7C, 0xFC, 0x7D] if name == "mxfp8_e5m2" else [0x7F, 0xFF, 0x7F]
    for row, code in enumerate(specials):
        codes[row, 7 + 20 * row] = code
    codes[3, 3], codes[3, 70] = specials[0], specials[1]
    scales[4, 1] = 255
    broken = replace(x, codes=codes, scales=scales)
    expected = products.blockwise(broken, y)
    got = mxref.matmul(block_tensor(broken, name), block_tensor(y, "mxfp4"))
    assert_same_bits(got, rounded(expected))
    assert_same_bits(got[5:], mxref.matmul(block_tensor(x, name), block_tensor(y, "mxfp4"))[5:])


SCALE_FORMS = {
    "none": lambda rows, rng: None,
    "scalar": lambda rows, rng: np.float32(rng.uniform(1e-4, 1e-2)),
    "per_row": lambda rows, rng: np.float32(rng.uniform(1e-4, 1e-2, (rows, 1))),
    "two_projections": lambda rows, rng: np.repeat(np.float32(rng.uniform(1e-4, 1e-2, 2)), [rows // 2, rows - rows // 2])[
        :, None
    ],
}


@pytest.mark.parametrize("direction_a, direction_b", list(itertools.product(["multiply", "divide"], repeat=2)))
@pytest.mark.parametrize("form_a, form_b", list(itertools.product(SCALE_FORMS, repeat=2)))
def test_alpha(form_a, form_b, direction_a, direction_b, rng):
    x = random_operand("nvfp4", 4, 48, rng, tensor_scale=SCALE_FORMS[form_a](4, rng), direction=direction_a)
    y = random_operand("nvfp4", 6, 48, rng, tensor_scale=SCALE_FORMS[form_b](6, rng), direction=direction_b)
    bias = np.float32(rng.standard_normal(6))
    for b in (None, bias):
        expected = products.blockwise(x, y, b)
        for dtype in DTYPES.values():
            given = None if b is None else torch.from_numpy(b)
            got = mxref.matmul(block_tensor(x, "nvfp4"), block_tensor(y, "nvfp4"), bias=given, out_dtype=dtype)
            assert_same_bits(got, rounded(expected, dtype), f"{form_a} {form_b} {dtype}")


def test_alpha_of_one_operand_only(rng):
    x = random_operand("mxfp8_e4m3", 4, 64, rng)
    y = random_operand("nvfp4", 6, 64, rng, tensor_scale=np.float32(rng.uniform(1e-4, 1e-2, (6, 1))), direction="divide")
    assert_same_bits(
        mxref.matmul(block_tensor(x, "mxfp8_e4m3"), block_tensor(y, "nvfp4")), rounded(products.blockwise(x, y))
    )
    assert_same_bits(
        mxref.matmul(block_tensor(y, "nvfp4"), block_tensor(x, "mxfp8_e4m3")), rounded(products.blockwise(y, x))
    )


@pytest.mark.parametrize("scale_a, scale_b", [(1e-30, 1e-30), (2.0**-120, 3e-10), (1e30, 1e30), (1e-20, 1e20)])
def test_extreme_alphas(scale_a, scale_b, rng):
    x = random_operand("nvfp4", 4, 48, rng, tensor_scale=np.float32(scale_a))
    y = random_operand("nvfp4", 6, 48, rng, tensor_scale=np.float32(scale_b))
    bias = np.float32(rng.standard_normal(6) * 1e-38)
    got = mxref.matmul(block_tensor(x, "nvfp4"), block_tensor(y, "nvfp4"), bias=torch.from_numpy(bias))
    assert_same_bits(got, rounded(products.blockwise(x, y, bias)))


@pytest.mark.parametrize("bias_dtype", list(DTYPES))
def test_bias_is_widened_and_added_in_float32(bias_dtype, rng):
    x, y = random_operand("mxfp4", 3, 64, rng), random_operand("mxfp4", 5, 64, rng)
    bias = torch.from_numpy(np.float32(rng.standard_normal(5) * 100)).to(DTYPES[bias_dtype])
    expected = products.blockwise(x, y, bias.float().numpy())
    for dtype in DTYPES.values():
        got = mxref.matmul(block_tensor(x, "mxfp4"), block_tensor(y, "mxfp4"), bias=bias, out_dtype=dtype)
        assert_same_bits(got, rounded(expected, dtype))


# ------------------------------------------------------------------------------------------ weight-only, dequantized


def activations_of(dtype: torch.dtype, shape, rng, spread: int = 0) -> torch.Tensor:
    values = np.ldexp(rng.standard_normal(shape), rng.integers(-spread, spread + 1, shape))
    return torch.from_numpy(np.float32(values)).to(dtype)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("format", list(FORMATS))
@pytest.mark.parametrize("k", [5, 80])
def test_weight_only(format, dtype, k, rng):
    x = activations_of(DTYPES[dtype], (5, k), rng)
    y = random_operand(format, 6, k, rng, spread=4, tensor_scale=np.float32(0.0371) if format == "nvfp4" else None)
    bias = np.float32(rng.standard_normal(6))
    for b in (None, bias):
        expected = products.dequantized(x.double().numpy(), y.decoded(dtype), y.block, b)
        for out in DTYPES.values():
            given = None if b is None else torch.from_numpy(b)
            assert_same_bits(
                mxref.matmul(x, block_tensor(y, format), bias=given, out_dtype=out), rounded(expected, out), f"{dtype} {out}"
            )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weight_only_chains_ascend(dtype, rng):
    """big, small, -big, small: the float64 chain depends on its order, and the test checks that it does."""
    x = activations_of(DTYPES[dtype], (8, 64), rng)
    x[:, 0::4] *= 2.0**55
    x[:, 2::4] = -x[:, 0::4]
    y = random_operand("mxfp8_e4m3", 9, 64, rng, spread=2)
    y = replace(y, codes=np.repeat(y.codes[:, ::4], 4, axis=1))  # equal weights, so the large products cancel
    decoded = y.decoded(dtype)
    expected = products.dequantized(x.double().numpy(), decoded, 32)
    backwards = products.dequantized(x.double().numpy()[:, ::-1], decoded[:, ::-1], 32)
    assert (expected != backwards).any()
    permuted = np.concatenate([np.arange(31, -1, -1), np.arange(63, 31, -1)])  # reversed inside each block only
    inside = products.dequantized(x.double().numpy()[:, permuted], decoded[:, permuted], 32)
    assert (expected != inside).any()
    assert_same_bits(mxref.matmul(x, block_tensor(y, "mxfp8_e4m3")), rounded(expected))


def test_weight_only_takes_non_finite_activations(rng):
    x = activations_of(torch.bfloat16, (5, 64), rng)
    x[0, 3], x[1, 40], x[2, 3], x[2, 50] = math.inf, math.nan, math.inf, -math.inf
    y = random_operand("mxfp4", 6, 64, rng)
    expected = products.dequantized(x.double().numpy(), y.decoded("bfloat16"), 32)
    assert_same_bits(mxref.matmul(x, block_tensor(y, "mxfp4")), rounded(expected))


@pytest.mark.parametrize("out", list(DTYPES))
@pytest.mark.parametrize(
    "a, b", [("mxfp4", "mxfp4"), ("nvfp4", "nvfp4"), ("mxfp8_e4m3", "mxfp4"), ("nvfp4", "mxfp8_e5m2"), ("mxint8", "nvfp4")]
)
def test_dequantized_semantics(a, b, out, rng):
    scale = {"nvfp4": np.float32(0.0371)}
    x, y = random_operand(a, 5, 80, rng, tensor_scale=scale.get(a)), random_operand(b, 6, 80, rng, tensor_scale=scale.get(b))
    bias = np.float32(rng.standard_normal(6))
    expected = products.dequantized(x.decoded(out), y.decoded(out), y.block, bias)
    got = mxref.matmul(
        block_tensor(x, a), block_tensor(y, b), bias=torch.from_numpy(bias), out_dtype=DTYPES[out], semantics="dequantized"
    )
    assert_same_bits(got, rounded(expected, DTYPES[out]))


def test_plain_activation_means_the_same_under_both_semantics(rng):
    x, y = activations_of(torch.bfloat16, (3, 64), rng), random_operand("mxfp4", 4, 64, rng)
    assert_same_bits(
        mxref.matmul(x, block_tensor(y, "mxfp4"), semantics="dequantized"), mxref.matmul(x, block_tensor(y, "mxfp4"))
    )


# ------------------------------------------------------------------------------------------ what must not matter


@pytest.mark.parametrize(
    "a, b", [("mxfp4", "mxfp4"), ("nvfp4", "nvfp4"), ("mxfp8_e4m3", "mxfp8_e5m2"), (None, "mxfp4"), (None, "nvfp4")]
)
def test_batch_composition_and_threads(a, b, rng):
    y = random_operand(b, 33, 160, rng)
    w = block_tensor(y, b)
    if a is None:
        x = activations_of(torch.bfloat16, (37, 160), rng)
        rows = lambda index: x[index]  # noqa: E731
    else:
        q = block_tensor(random_operand(a, 37, 160, rng), a)
        rows = lambda index: q[index]  # noqa: E731
    whole = mxref.matmul(rows(slice(0, 37)), w)
    for index in (slice(0, 1), slice(36, 37), slice(5, 20), torch.tensor([30, 2, 2, 17])):
        assert_same_bits(mxref.matmul(rows(index), w), whole[index], str(index))
    assert_same_bits(mxref.matmul(rows(slice(0, 37)), w[torch.tensor([32, 0, 5])]), whole[:, [32, 0, 5]].contiguous())
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            assert_same_bits(mxref.matmul(rows(slice(0, 37)), w), whole, f"{count} threads")
    finally:
        torch.set_num_threads(threads)


def test_many_rows_are_the_same_as_few(rng):
    x, y = random_operand("mxfp8_e4m3", 3, 96, rng), random_operand("mxfp4", 5, 96, rng)
    few = mxref.matmul(block_tensor(x, "mxfp8_e4m3"), block_tensor(y, "mxfp4"))
    tall = replace(x, codes=np.tile(x.codes, (300, 1)), scales=np.tile(x.scales, (300, 1)))
    wide = replace(y, codes=np.tile(y.codes, (120, 1)), scales=np.tile(y.scales, (120, 1)))
    many = mxref.matmul(block_tensor(tall, "mxfp8_e4m3"), block_tensor(wide, "mxfp4"))
    assert_same_bits(many, few.repeat(300, 120))


def test_leading_dimensions_and_empty_sides(rng):
    y = random_operand("nvfp4", 4, 48, rng, tensor_scale=np.float32(0.02))
    w = block_tensor(y, "nvfp4")
    x = torch.from_numpy(np.float32(rng.standard_normal((2, 3, 5, 48))))
    for scale in ("per_row", "per_tensor", "none"):
        q = mxref.quantize(x, "nvfp4", tensor_scale=scale)
        got = mxref.matmul(q, w)
        assert got.shape == (2, 3, 5, 4)
        for i, j in itertools.product(range(2), range(3)):
            assert_same_bits(got[i, j], mxref.matmul(q[i][j], w), scale)
    assert_same_bits(mxref.matmul(x.bfloat16(), w)[1, 2], mxref.matmul(x[1, 2].bfloat16(), w))
    assert mxref.matmul(torch.zeros(0, 48), w).shape == (0, 4)
    assert mxref.matmul(mxref.quantize(torch.zeros(0, 48), "nvfp4"), w).shape == (0, 4)
    empty = mxref.quantize(torch.zeros(3, 0), "mxfp4")
    assert_same_bits(mxref.matmul(empty, empty, bias=torch.tensor([1.0, 2.0, 3.0])), torch.tensor([[1.0, 2.0, 3.0]] * 3))


def test_quantized_end_to_end(rng):
    """From float to float: quantize and matmul together against the oracles' own quantizer."""
    x, w = np.float32(rng.standard_normal((4, 80))), np.float32(rng.standard_normal((5, 80)))
    for format in ("mxfp4", "mxfp8_e4m3"):
        element = ELEMENTS[FORMATS[format][0]]
        a, b = (operand(format, *mx.quantize_rows(v, element)) for v in (x, w))
        got = mxref.matmul(mxref.quantize(torch.from_numpy(x), format), mxref.quantize(torch.from_numpy(w), format))
        assert_same_bits(got, rounded(products.blockwise(a, b)))
    qa, qb = (nvfp4.quantize(v, "nvidia", amax=nvfp4.finite_amax(v)) for v in (x, w))
    a, b = (operand("nvfp4", q.codes, q.scales, q.tensor_scale) for q in (qa, qb))
    got = mxref.matmul(mxref.quantize(torch.from_numpy(x), "nvfp4"), mxref.quantize(torch.from_numpy(w), "nvfp4"))
    assert_same_bits(got, rounded(products.blockwise(a, b)))


def test_scales_that_mean_something_else_are_refused():
    """triton_kernels decodes scale byte 0 to 0; a product would take it for 2**-127."""
    q = mxref.quantize(torch.ones(2, 32), "mxfp4", recipe="triton_kernels_git_up")
    with pytest.raises(ValueError, match="b has recipe 'triton_kernels_git_up', whose scales do not mean"):
        mxref.matmul(torch.ones(2, 32), q)
    q = mxref.quantize(torch.ones(2, 32), "nvfp4", recipe="modelopt_nvfp4")
    assert (mxref.matmul(q, q) == 32).all()
