"""Activations, bit for bit.

Expected values: `oracles.activations` (the contract's float32 steps in numpy, where every operation is one IEEE 754
operation); accuracy against float64 and, at chosen points, against 50-digit decimals.
"""

import decimal
import fractions
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from bits import as_torch, assert_same_bits
from kernel_scripts import DEVICES, says_the_same
from oracles import activations
from oracles.rationals import BF16, round_float64

import mxref

ONE_ARGUMENT = ["exp", "sigmoid", "silu", "gelu_tanh", "relu2"]
CANONICAL = {
    torch.float32: (0x7FC00000, torch.int32),
    torch.bfloat16: (0x7FC0, torch.int16),
    torch.float16: (0x7E00, torch.int16),
}


def rounded(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """float32 values rounded once to `dtype`, NaN canonical."""
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = (
            values
            if dtype == torch.float32
            else values.astype(ml_dtypes.bfloat16 if dtype == torch.bfloat16 else np.float16)
        )
    out = as_torch(narrow)
    bits, carrier = CANONICAL[dtype]
    return torch.where(out.isnan(), torch.tensor(bits, dtype=carrier).view(dtype), out)


def inputs(dtype: torch.dtype, rng) -> torch.Tensor:
    """Every pattern of a 16-bit dtype; for float32 every bfloat16, a million random patterns and ordinary values."""
    if dtype != torch.float32:
        return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    every_bf16 = np.arange(65536, dtype=np.uint32) << 16
    patterns = np.concatenate([every_bf16, rng.integers(0, 1 << 32, 700_000, dtype=np.uint32)]).view(np.float32)
    return torch.from_numpy(np.concatenate([patterns, np.float32(rng.uniform(-110, 95, 300_000))]))


def partner(x: torch.Tensor, rng) -> torch.Tensor:
    return x[torch.from_numpy(rng.permutation(len(x)))]


@pytest.mark.parametrize("dtype", list(CANONICAL), ids=str)
@pytest.mark.parametrize("name", ONE_ARGUMENT)
def test_one_argument_functions(name, dtype, rng):
    x = inputs(dtype, rng)
    expected = rounded(getattr(activations, name)(x.float().numpy()), dtype)
    assert_same_bits(getattr(mxref.functions, name)(x), expected, f"{name} {dtype}")


@pytest.mark.parametrize("dtype", list(CANONICAL), ids=str)
@pytest.mark.parametrize("name", ["swiglu", "swiglu_oai"])
def test_gated_functions(name, dtype, rng):
    gate = inputs(dtype, rng)
    up = partner(gate, rng)
    near = torch.from_numpy(np.float32(rng.standard_normal((2, 100_000)) * 4)).to(dtype)
    gate, up = torch.cat([gate, near[0]]), torch.cat([up, near[1]])
    expected = rounded(getattr(activations, name)(gate.float().numpy(), up.float().numpy()), dtype)
    assert_same_bits(getattr(mxref.functions, name)(gate, up), expected, f"{name} {dtype}")


ALPHAS = (1.5, 0, -2, 0.1, 1e-50, 1e38, np.float32(1.5), np.int64(3), fractions.Fraction(3, 2))
LIMITS = (3.0, 0.0, -0.0, 7, 0.1, 1e-50, 1e38, math.inf, np.float32(3), np.int64(3), fractions.Fraction(3, 2))


def parameters() -> list[tuple]:
    """Numbers that `swiglu_oai` takes for alpha and limit, of every kind."""
    return [*((alpha, 3.0) for alpha in ALPHAS), *((1.5, limit) for limit in LIMITS)]


def gates_and_ups(count: int) -> torch.Tensor:
    """Numbers of both signs, and zeros of both."""
    values = np.float32(np.random.default_rng(0).standard_normal((2, count)) * 8)
    values[:, [3, 8]] = 0.0, -0.0
    return torch.from_numpy(values)


@pytest.mark.parametrize("alpha, limit", parameters(), ids=repr)
def test_swiglu_oai_parameters(alpha, limit):
    """Negative zero as the limit is zero."""
    gate, up = gates_and_ups(5000)
    expected = activations.swiglu_oai(gate.numpy(), up.numpy(), float(alpha), abs(float(limit)))
    assert_same_bits(mxref.functions.swiglu_oai(gate, up, alpha, limit), expected)


PARAMETERS = f"""
import sys, torch, mxref
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_functions import gates_and_ups, parameters
few, many = gates_and_ups(64).to("{{device}}"), gates_and_ups(1 << 16).to("{{device}}")  # a table is made for many
with mxref.use("triton", strict=True, check=True):
    for alpha, limit in parameters():
        mxref.functions.swiglu_oai(*few, alpha, limit)
    for limit in (0.0, -0.0):
        mxref.functions.swiglu_oai(*many.bfloat16(), 1.5, limit)
print("the same")
"""


@pytest.mark.parametrize("device", DEVICES)
def test_swiglu_oai_parameters_in_triton(device):
    says_the_same(PARAMETERS, device)


DIVISIONS = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import divisions
assert divisions.differences("{{device}}") == 0
print("the same")
"""


@pytest.mark.parametrize("device", DEVICES)
def test_divisions_without_a_branch(device):
    says_the_same(DIVISIONS, device)


def test_ends_of_exp():
    points = np.float32([0.0, -0.0, -math.inf, math.inf, 88.7, 88.73, 89, -103.97, -103.98, -104, -200, -87.5, 3e38, 1e-45])
    around = np.concatenate([points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(1e9))])
    assert_same_bits(mxref.functions.exp(torch.from_numpy(around)), activations.exp(around))
    values = mxref.functions.exp(torch.tensor([0.0, -0.0, -math.inf, math.inf, 88.7, 89.0]))
    assert values[:2].tolist() == [1.0, 1.0] and values[2:4].tolist() == [0.0, math.inf]
    assert values[4].isfinite() and values[5] == math.inf


def test_specials():
    f = mxref.functions
    assert f.sigmoid(torch.tensor([math.inf, -math.inf, 0.0])).tolist() == [1.0, 0.0, 0.5]
    assert f.silu(torch.tensor(-math.inf)).isnan() and f.silu(torch.tensor(math.inf)) == math.inf
    assert f.relu2(torch.tensor([-3.0, -0.0, 3.0, -math.inf])).tolist() == [0.0, 0.0, 9.0, 0.0]
    nan = torch.tensor([0x7F800001, -1, 0x7FC12345], dtype=torch.int32).view(torch.float32)
    for name in ONE_ARGUMENT:
        assert (getattr(f, name)(nan).view(torch.int32) == 0x7FC00000).all(), name
        assert (getattr(f, name)(nan.bfloat16()).view(torch.int16) == 0x7FC0).all(), name
        assert (getattr(f, name)(nan.half()).view(torch.int16) == 0x7E00).all(), name
    for name in ("swiglu", "swiglu_oai"):
        for gate, up in ((nan, torch.ones(3)), (torch.ones(3), nan)):
            assert (getattr(f, name)(gate, up).view(torch.int32) == 0x7FC00000).all(), name


# ------------------------------------------------------------------------------------------ accuracy


def ulp_errors(ours: np.ndarray, true: np.ndarray) -> np.ndarray:
    """|ours - true| in units of float32's spacing at `true` (the subnormal spacing below 2**-126)."""
    spacing = np.ldexp(1.0, np.maximum(np.frexp(true)[1] - 24, -149))
    return np.abs(ours.astype(np.float64) - true) / spacing


def finite_bf16() -> np.ndarray:
    patterns = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)
    return patterns[np.isfinite(patterns)]


def test_float64_is_good_enough_to_measure_with():
    with decimal.localcontext() as context:
        context.prec = 50
        for x in (0.1, -0.3, 5.75, -17.125, 80.5, -86.0):
            exact = decimal.Decimal(x).exp()
            assert abs(decimal.Decimal(math.exp(x)) / exact - 1) < decimal.Decimal(2) ** -51


def test_accuracy_of_exp():
    x = finite_bf16()
    x = x[(x > -104) & (x < 88.7)]
    worst = ulp_errors(mxref.functions.exp(torch.from_numpy(x)).numpy(), np.exp(x.astype(np.float64))).max()
    assert 0.818 < worst <= 0.8186  # 0.8185 on all bfloat16
    rng = np.random.default_rng(0)
    x = np.float32(rng.uniform(-104, 88.7, 1_000_000))
    assert ulp_errors(mxref.functions.exp(torch.from_numpy(x)).numpy(), np.exp(x.astype(np.float64))).max() <= 0.9904


def test_accuracy_of_sigmoid_and_silu():
    rng = np.random.default_rng(1)
    positive = np.float32(np.concatenate([rng.uniform(0, 88, 400_000), np.exp2(rng.uniform(-30, 6, 400_000))]))
    for sign, sigmoid_bound, silu_bound in ((1, 1.4995, 2.2065), (-1, 2.4025, 3.1935)):
        x = sign * positive
        x = x[x >= -87]
        wide = x.astype(np.float64)
        true = 1 / (1 + np.exp(-wide))
        assert ulp_errors(mxref.functions.sigmoid(torch.from_numpy(x)).numpy(), true).max() <= sigmoid_bound
        assert ulp_errors(mxref.functions.silu(torch.from_numpy(x)).numpy(), wide * true).max() <= silu_bound


def test_silu_rounded_to_bfloat16_is_right_for_every_finite_bfloat16():
    x = finite_bf16()
    assert len(x) == 65280
    wide = x.astype(np.float64)
    with np.errstate(over="ignore"):
        true = round_float64(wide / (1 + np.exp(-wide)), BF16)
    ours = mxref.functions.silu(torch.from_numpy(x).bfloat16()).double().numpy()
    assert (ours != true).sum() == 0
    assert (np.signbit(ours) == np.signbit(wide)).all()


def test_exp_is_monotone_on_bfloat16():
    x = np.sort(finite_bf16())
    y = mxref.functions.exp(torch.from_numpy(x)).double().numpy()
    assert (y[1:] >= y[:-1]).all()


def test_shapes_strides_and_mismatches(rng):
    x = torch.from_numpy(np.float32(rng.standard_normal((6, 10))))
    for name in ONE_ARGUMENT:
        function = getattr(mxref.functions, name)
        assert_same_bits(function(x.T), function(x.T.contiguous()))
        assert function(torch.zeros(0, 3)).shape == (0, 3) and function(torch.tensor(1.0)).shape == ()
    assert_same_bits(mxref.functions.swiglu(x[::2], x[1::2]), mxref.functions.swiglu(x[::2].clone(), x[1::2].clone()))


@pytest.mark.parametrize("name", ONE_ARGUMENT)
def test_float64_is_refused(name):
    with pytest.raises(TypeError, match="float64"):
        getattr(mxref.functions, name)(torch.ones(2, dtype=torch.float64))
