"""What torchao 0.18.0, TransformerEngine's NVFP4 reference and fouroversix made of the same inputs, and element anchors.

Expected values: recorded outputs of those projects on CPU (`data/golden_producers.npz.xz`), bit for bit; every
difference is named by a rule that the test applies, and what the producer does instead is checked as well.
"""

import numpy as np
import pytest
import torch
from bits import assert_same_bits
from golden import load, nibbles
from oracles.elements import ELEMENTS, encode_float64

import mxref

GOLDEN = load("producers")
FORMATS = ["mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2"]
TORCHAO = sorted({tuple(key.split("/")[:3]) for key in GOLDEN if "/torchao_" in key and not key.startswith("elements/")})
NVFP4_INPUTS = sorted({key.split("/")[1] for key in GOLDEN if key.startswith("nvfp4/")})


def every_bfloat16() -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def input_named(name: str) -> torch.Tensor:
    return every_bfloat16().reshape(512, 128) if name == "all_bf16" else GOLDEN[f"inputs/{name}"]


@pytest.mark.parametrize("format, name, peer", TORCHAO)
def test_torchao(format, name, peer):
    """`ocp` is torchao FLOOR and `ocp_even` is torchao EVEN but for two things: a block that holds Inf (there scale
    0xFD and the like, here NaN; and the codes of a NaN block, which mean nothing), and scale byte 0, where torchao
    encodes with 2**-126 and labels the result 2**-127."""
    x = input_named(name)
    q = mxref.quantize(x, format, recipe={"torchao_floor": "ocp", "torchao_even": "ocp_even"}[peer])
    codes, scales = GOLDEN[f"{format}/{name}/{peer}/codes"], GOLDEN[f"{format}/{name}/{peer}/scale"]
    codes = nibbles(codes) if format == "mxfp4" else codes
    blocks = x.float().reshape(*scales.shape, 32)
    infinite, finite = blocks.isinf().any(-1) & ~blocks.isnan().any(-1), blocks.isfinite().all(-1)
    assert_same_bits(q.scales[~infinite], scales[~infinite])
    assert (q.scales[infinite] == 255).all()
    theirs, ours = codes.reshape(blocks.shape), q.codes.reshape(blocks.shape)
    halved = finite & (scales == 0)
    assert_same_bits(ours[finite & ~halved], theirs[finite & ~halved])
    element = ELEMENTS[mxref.BLOCK_FORMATS[format].element.name]
    doubled_scale = encode_float64(blocks[halved].double().numpy() * 2.0**126, element)
    assert_same_bits(theirs[halved], doubled_scale, "torchao with 2**-126 where the byte says 2**-127")
    exact_scale = encode_float64(blocks[halved].double().numpy() * 2.0**127, element)
    assert_same_bits(ours[halved], exact_scale)
    if name.startswith("rand") and name != "rand_m120":
        assert finite.all() and not halved.any()


def test_torchao_sets_are_the_recorded_ones():
    assert {f for f, _, _ in TORCHAO} == set(FORMATS) and {p for _, _, p in TORCHAO} == {"torchao_floor", "torchao_even"}
    assert len(TORCHAO) == 60


# ------------------------------------------------------------------------------------------ NVFP4


def own_tensor_rows(name: str) -> list[slice]:
    """`nv_adv` holds one tensor a row; the others are one tensor."""
    x = input_named(name)
    return [slice(r, r + 1) for r in range(len(x))] if name == "nv_adv" else [slice(None)]


def quantized(name: str, recipe) -> tuple[torch.Tensor, torch.Tensor]:
    x = input_named(name)
    parts = [mxref.quantize(x[rows], "nvfp4", recipe=recipe) for rows in own_tensor_rows(name)]
    return torch.cat([q.codes for q in parts]), torch.cat([q.scales for q in parts])


def compare_live_blocks(codes, scales, name: str, peer: str, nan_blocks) -> None:
    """Codes where the block scale is not 0, up to the sign of an input -0 (dropped by all three producers)."""
    theirs = nibbles(GOLDEN[f"nvfp4/{name}/{peer}/codes"])
    x = input_named(name)
    codes = torch.where((x == 0) & x.signbit(), 0, codes).to(torch.uint8)
    live = ((scales != 0) & ~nan_blocks).repeat_interleave(16, -1)
    assert_same_bits(codes[live], theirs[live], f"{name} {peer}")


@pytest.mark.parametrize("name", NVFP4_INPUTS)
def test_nvidia_is_transformer_engine(name):
    """Scales, and codes where the scale is not 0: there the reference stores magnitude 7, this library 0. A NaN block:
    here scale NaN; there the whole tensor's amax is NaN."""
    codes, scales = quantized(name, "nvidia")
    x = input_named(name).float()
    nan_blocks = x.isnan().reshape(*scales.shape, 16).any(-1)
    nan_tensor = nan_blocks.any(-1, keepdim=True).expand_as(nan_blocks)
    theirs = GOLDEN[f"nvfp4/{name}/te_ref/scale"]
    assert_same_bits(scales[~nan_tensor], theirs[~nan_tensor], name)
    compare_live_blocks(codes, scales, name, "te_ref", nan_tensor)
    dead = ((scales == 0) & ~nan_tensor).repeat_interleave(16, -1)
    their_codes = nibbles(GOLDEN[f"nvfp4/{name}/te_ref/codes"])[dead]
    values = input_named(name)[dead]
    assert (codes[dead] & 7 == 0).all() and (codes[dead] >> 3 == values.signbit()).all()
    assert ((their_codes & 7 == 7) | (values == 0) | (their_codes & 7 == 0)).all()


@pytest.mark.parametrize("name", [n for n in NVFP4_INPUTS if n != "nv_adv"])
def test_nvidia_16x16_is_transformer_engine_2d(name):
    """The recording repeats each tile's scale for its 16 rows."""
    codes, scales = quantized(name, "nvidia_16x16")
    theirs = GOLDEN[f"nvfp4/{name}/te_ref_2d/scale"]
    assert_same_bits(scales.repeat_interleave(16, 0), theirs, name)
    assert_same_bits(codes, nibbles(GOLDEN[f"nvfp4/{name}/te_ref_2d/codes"]), name)


@pytest.mark.parametrize("peer", ["te_ref_4over6_mse256", "fouroversix_mse"])
@pytest.mark.parametrize("name", [n for n in NVFP4_INPUTS if n not in ("nv_adv", "rand_m120")])
def test_four_over_six(name, peer):
    """Not `rand_m120`: below 2**-64 squared errors underflow in float32 and fouroversix saturates its own scale."""
    codes, scales = quantized(name, "nvidia_four_over_six")
    assert_same_bits(scales, GOLDEN[f"nvfp4/{name}/{peer}/scale"], name)
    compare_live_blocks(codes, scales, name, peer, torch.zeros_like(scales, dtype=torch.bool))


def test_four_over_six_of_tiny_tensors_is_transformer_engine():
    codes, scales = quantized("rand_m120", "nvidia_four_over_six")
    assert_same_bits(scales, GOLDEN["nvfp4/rand_m120/te_ref_4over6_mse256/scale"])
    compare_live_blocks(codes, scales, "rand_m120", "te_ref_4over6_mse256", torch.zeros_like(scales, dtype=torch.bool))


# ------------------------------------------------------------------------------------------ elements

ANCHORS = {"e2m1": "e2m1", "e2m3": "e2m3", "e3m2": "e3m2", "e4m3": "e4m3fn", "e5m2": "e5m2", "int8": "int8", "e8m0": "e8m0"}


def source(dtype: str) -> torch.Tensor:
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    return patterns.view(torch.bfloat16 if dtype == "bfloat16" else torch.float16)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["e2m1", "e2m3", "e3m2"])
def test_narrow_elements_are_those_of_ml_dtypes_gfloat_and_torchao(name, dtype):
    x = source(dtype)
    finite = x.isfinite()
    ours = mxref.encode(x[finite], name)
    for library in ("ml_dtypes", "gfloat_sat", "torchao"):
        assert_same_bits(ours, GOLDEN[f"elements/{dtype}/{ANCHORS[name]}/{library}"][finite], library)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_fp8_elements(name, dtype):
    """torch saturates e4m3 and overflows e5m2; ml_dtypes overflows both; gfloat has both. Their NaN codes differ in sign."""
    x = source(dtype)
    number = ~x.isnan()

    def recorded(library: str) -> torch.Tensor:
        codes = GOLDEN[f"elements/{dtype}/{ANCHORS[name]}/{library}"][number]
        return torch.where(codes & 0x7F == 0x7F, 0x7F, codes).to(torch.uint8)  # the sign of a NaN is dropped here

    x = x[number]
    finite = x.isfinite()
    saturated, special = mxref.encode(x, name), mxref.encode(x, name, overflow="special")
    assert_same_bits(special, recorded("ml_dtypes"))
    assert_same_bits(special, recorded("gfloat_nosat"))
    assert_same_bits(saturated[finite], recorded("gfloat_sat")[finite])
    assert_same_bits(saturated if name == "e4m3" else special, recorded("torch_from_f32"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_int8_elements_are_those_of_gfloat_but_for_minus_two(dtype):
    x = source(dtype)
    kept = x.isfinite()
    theirs = GOLDEN[f"elements/{dtype}/int8/gfloat_sat"][kept]
    assert (theirs == 0x80).any()
    assert_same_bits(mxref.encode(x[kept], "int8"), torch.where(theirs == 0x80, 0x81, theirs).to(torch.uint8))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_e8m0_cast_is_that_of_ml_dtypes_on_positive_numbers(dtype):
    """ties_away is ml_dtypes' nearest. torch's cast differs just above 2**-127 and gfloat's ties go to the even code."""
    x = source(dtype)
    kept = (x > 0) & x.isfinite()
    ties_away = mxref.encode(x[kept], "e8m0", rounding="ties_away", overflow="special")
    assert_same_bits(ties_away, GOLDEN[f"elements/{dtype}/e8m0/ml_dtypes"][kept])
    torch_cast = GOLDEN[f"elements/{dtype}/e8m0/torch_from_f32"][kept]
    differs = ties_away != torch_cast
    assert ((x[kept][differs].double() > 2.0**-127) & (x[kept][differs].double() < 1.5 * 2.0**-127)).all()
    normal = x[kept].double() >= 2.0**-126
    theirs = GOLDEN[f"elements/{dtype}/e8m0/gfloat_sat"][kept][normal]
    assert_same_bits(mxref.encode(x[kept][normal], "e8m0"), theirs)


def test_every_recorded_element_set_is_used():
    libraries = {key.rsplit("/", 1)[1] for key in GOLDEN if key.startswith("elements/")}
    assert libraries == {"ml_dtypes", "gfloat_sat", "gfloat_sat_valid", "gfloat_nosat", "torchao", "torch_from_f32"}
    valid = GOLDEN["elements/bfloat16/e2m1/gfloat_sat_valid"].bool()
    assert torch.equal(valid, ~source("bfloat16").isnan())
    assert np.asarray(GOLDEN["elements/float16/int8/gfloat_sat_valid"]).any()
