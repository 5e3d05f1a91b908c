"""What vLLM 0.33.0's emulation (and AMD Quark 0.13, which it calls for MXFP4 and MXFP6) made of the same inputs.

Expected values: recorded outputs of those projects on CPU (`data/golden_vllm.npz.xz`), compared bit for bit. Where a
recipe differs from the recording on purpose, the test names the places and says why.
"""

import math

import numpy as np
import pytest
import torch
from bits import assert_same_bits
from golden import load, nibbles

import mxref

GOLDEN = load("vllm")
NVFP4_SETS = sorted({key.split("/")[1].rsplit(".", 1)[0] for key in GOLDEN if key.startswith("nvfp4_qdq/")})
MX_SETS = sorted({tuple(key.rsplit(".", 1)[0].split("/")) for key in GOLDEN if key.startswith("mxfp")})


def with_canonical_nan(x: torch.Tensor) -> torch.Tensor:
    """The recording keeps whatever NaN the run produced; here every NaN is the canonical one."""
    bits, carrier = {
        torch.float32: (0x7FC00000, torch.int32),
        torch.bfloat16: (0x7FC0, torch.int16),
        torch.float16: (0x7E00, torch.int16),
    }[x.dtype]
    return torch.where(x.isnan(), torch.tensor(bits, dtype=carrier).view(x.dtype), x)


@pytest.mark.parametrize("recipe, result", [("vllm_torch", "qdq"), ("vllm_triton", "tri")])
@pytest.mark.parametrize("name", NVFP4_SETS)
def test_nvfp4_quantize_dequantize(name, recipe, result):
    x, gs = GOLDEN[f"nvfp4_qdq/{name}.x"], GOLDEN[f"nvfp4_qdq/{name}.gs"]
    q = mxref.quantize(x, "nvfp4", recipe=recipe, tensor_scale=gs.reshape(()))
    assert_same_bits(q.scales, GOLDEN[f"nvfp4_qdq/{name}.sf_e4m3"], name)
    if recipe == "vllm_torch":
        assert_same_bits(q.codes, GOLDEN[f"nvfp4_qdq/{name}.codes"], name)
    assert_same_bits(mxref.dequantize(q, x.dtype), with_canonical_nan(GOLDEN[f"nvfp4_qdq/{name}.{result}"]), name)
    assert_same_bits(mxref.qdq(x, "nvfp4", recipe=recipe, tensor_scale=gs.reshape(())), mxref.dequantize(q, x.dtype))


def test_nvfp4_sets_are_the_recorded_ones():
    assert len(NVFP4_SETS) == 12 and {"adv_f32_gs448", "nonfinite_f32_gs1", "rand_bf16_amax"} <= set(NVFP4_SETS)


def test_nvfp4_blocks_on_which_the_two_orders_disagree():
    x, gs = GOLDEN["nvfp4_order_disagree/x"], GOLDEN["nvfp4_order_disagree/gs"]
    values = torch.tensor(mxref.ELEMENT_FORMATS["e2m1"].values)
    answers = {}
    for recipe, key in (("vllm_torch", "q_torch"), ("vllm_triton", "q_triton_order")):
        q = mxref.quantize(x, "nvfp4", recipe=recipe, tensor_scale=gs[:, None])
        assert_same_bits(mxref.decode(q.scales, "e4m3")[:, 0], GOLDEN["nvfp4_order_disagree/sf"])
        answers[recipe] = values[q.codes.long()]
        assert_same_bits(answers[recipe], GOLDEN[f"nvfp4_order_disagree/{key}"], recipe)
    assert (answers["vllm_torch"] != answers["vllm_triton"]).any(-1).all(), (
        "every one of these blocks must tell the orders apart"
    )


@pytest.mark.parametrize("out", ["out_f32", "out_bf16", "out_f16"])
@pytest.mark.parametrize("name", ["allcodes", "w3d"])
def test_nvfp4_weight_dequantization(name, out):
    """`gs` here is a decode multiplier. Recorded: e2m1 * (sf * gs), both products in float32, then one cast."""
    key = f"nvfp4_dequant/{name}.{out}"
    if key not in GOLDEN:
        pytest.skip("not recorded")
    codes, scales = nibbles(GOLDEN[f"nvfp4_dequant/{name}.packed"]), GOLDEN[f"nvfp4_dequant/{name}.sf_u8"]
    gs = GOLDEN[f"nvfp4_dequant/{name}.gs"]
    expected = with_canonical_nan(GOLDEN[key])
    # vLLM reads scale bytes with the sign bit as negative scales; NVFP4 has none, so such rows are refused here
    negative = (scales >= 0x80).flatten(1 if scales.ndim == 2 else 2).any(-1)
    if negative.any():
        with pytest.raises(ValueError, match="sign"):
            block_tensor(codes, scales, gs)
    assert scales.ndim == 2 or not negative.any()
    if scales.ndim == 2:
        codes, scales, expected = codes[~negative], scales[~negative], expected[~negative]
    q = block_tensor(codes, scales, gs.reshape(()) if gs.numel() == 1 else gs[:, None, None])
    assert_same_bits(mxref.dequantize(q, expected.dtype), expected, name)


def block_tensor(codes, scales, tensor_scale) -> mxref.BlockTensor:
    return mxref.BlockTensor.from_codes(codes, scales, tensor_scale, mxref.BLOCK_FORMATS["nvfp4"], mxref.RECIPES["nvidia"])


def test_scale_swizzle():
    linear, swizzled = GOLDEN["nvfp4_dequant/swz128x4.linear"], GOLDEN["nvfp4_dequant/swz128x4.swizzled"]
    assert_same_bits(mxref.to_layout(linear, "tile_128x4").flatten(), swizzled.flatten())
    assert_same_bits(mxref.from_layout(swizzled, "tile_128x4", linear.shape), linear)


def carries_into_infinity(x: torch.Tensor, format: str) -> torch.Tensor:
    """Blocks whose amax, rounded half up to the element's mantissa, leaves float32: [..., K / 32]."""
    mantissa = mxref.BLOCK_FORMATS[format].element.mantissa_bits
    amax = x.float().reshape(*x.shape[:-1], -1, 32).abs().amax(-1)
    return amax.isfinite() & (amax.double() >= (2 - 2.0 ** -(mantissa + 1)) * 2.0**127)


@pytest.mark.parametrize("format, name", MX_SETS)
def test_mx_quantize_dequantize(format, name):
    """Recipe `quark_even`. One difference: an amax that carries past the top of float32 becomes Inf in Quark, whose
    exponent is then clamped to 127 (scale byte 254); the contract counts the carry as exponent 128 and subtracts emax.
    Both decode to Inf, so only bytes and codes differ."""
    x = GOLDEN[f"{format}/{name}.x"]
    q = mxref.quantize(x, format, recipe="quark_even")
    scales, codes = GOLDEN[f"{format}/{name}.scale"], GOLDEN.get(f"{format}/{name}.codes")
    carried = carries_into_infinity(x, format)
    assert_same_bits(q.scales[~carried], scales[~carried], f"{format} {name}")
    if codes is not None:
        kept = (~carried).repeat_interleave(32, -1)
        assert_same_bits(q.codes[kept], codes[kept], f"{format} {name}")
        if not carried.any():
            assert_same_bits(q.packed, GOLDEN[f"{format}/{name}.packed"], f"{format} {name}")
        recorded = GOLDEN[f"{format}/{name}.packed"]
        assert_same_bits(mxref.pack(codes, mxref.BLOCK_FORMATS[format].element.bits), recorded)
    assert_same_bits(mxref.dequantize(q, x.dtype), with_canonical_nan(GOLDEN[f"{format}/{name}.qdq"]), f"{format} {name}")


def test_the_one_difference_is_where_it_is_said_to_be():
    rows = {(f, n): carries_into_infinity(GOLDEN[f"{f}/{n}.x"], f) for f, n in MX_SETS}
    assert {k: int(v.sum()) for k, v in rows.items() if v.any()} == {("mxfp4", "adv_f32"): 4, ("mxfp4", "adv_bf16"): 4}
    for (format, name), carried in rows.items():
        if not carried.any():
            continue
        x = GOLDEN[f"{format}/{name}.x"]
        q = mxref.quantize(x, format, recipe="quark_even")
        assert (q.scales[carried] == 253).all() and (GOLDEN[f"{format}/{name}.scale"][carried] == 254).all()
        kept = carried.repeat_interleave(32, -1)
        assert (mxref.dequantize(q)[kept].abs() == math.inf).all()


def test_a_wrong_recipe_is_seen():
    """The recordings can tell recipes apart: floor is not even, and keeping -0 is not dropping it."""
    differing = 0
    for format, name in MX_SETS:
        if f"{format}/{name}.codes" in GOLDEN:
            x = GOLDEN[f"{format}/{name}.x"]
            differing += int((mxref.quantize(x, format, recipe="ocp").scales != GOLDEN[f"{format}/{name}.scale"]).sum())
            assert (mxref.quantize(x, format, recipe="ocp_even").codes & 0x80).sum() == 0
    assert differing > 100
    x, gs = GOLDEN["nvfp4_qdq/rand_bf16_amax.x"], GOLDEN["nvfp4_qdq/rand_bf16_amax.gs"]
    multiplied = mxref.quantize(x, "nvfp4", recipe="nvidia", tensor_scale=gs.reshape(()))
    assert np.asarray(multiplied.scales != GOLDEN["nvfp4_qdq/rand_bf16_amax.sf_e4m3"]).any()
