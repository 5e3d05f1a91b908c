"""What torchao 0.18.0, TransformerEngine's NVFP4 reference and fouroversix made of the same inputs, and element anchors.

Expected values: recorded outputs of those projects on CPU (`data/golden_producers.npz.xz`), bit for bit; every
difference is named by a rule that the test applies, and what the producer does instead is checked as well.
"""

import json
import os
from dataclasses import replace
from decimal import Decimal, localcontext
from functools import cache
from pathlib import Path

import numpy as np
import producer_table
import pytest
import torch
from bits import assert_same_bits
from golden import load, nibbles
from oracles.elements import ELEMENTS, encode_float64

import mxref
from mxref.faults import FAULTS, Fault, ceil_log2, floor_log2
from mxref.producers import ROWS

GOLDEN = load("producers")
FORMATS = ["mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2"]
TORCHAO = sorted({tuple(k.split("/")[:3]) for k in GOLDEN if "/torchao_floor/" in k or "/torchao_even/" in k})
NVFP4_INPUTS = sorted({key.split("/")[1] for key in GOLDEN if key.startswith("nvfp4/")})


RECORD = Path(__file__).parent.parent / "benchmarks" / "results" / "producers.json"
FOLDERS = [None, *([os.environ["MXREF_PRODUCERS"]] if os.environ.get("MXREF_PRODUCERS") else [])]
PRODUCERS = producer_table.producers(GOLDEN)
FLOATS = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}


# ------------------------------------------------------------------------------------------ every producer's own recipe


@cache
def table_rows(folder: str | None, format: str, producer: str) -> list[producer_table.Row]:
    return list(producer_table.rows(producer_table.recordings(folder), format, producer))


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("format, producer", PRODUCERS)
def test_a_producers_recipe_gives_its_bytes(format, producer, folder):
    """Codes, scales, tensor scales and decoded values; the exceptions are in the record, with their reason and number."""
    lines = table_rows(folder, format, producer)
    assert [line for line in lines if line.differing] == []
    assert all(line.compared or line.reason == producer_table.RAISES_FLOAT16 for line in lines) and len(lines) >= 6


def test_the_record_is_current():
    lines = [line for format, producer in PRODUCERS for line in table_rows(None, format, producer)]
    assert RECORD.read_text() == producer_table.as_text(lines)
    record = json.loads(RECORD.read_text())
    assert len(record["rows"]) == len(lines) and sum(row["differing"] for row in record["rows"]) == 0
    decision = (RECORD.parents[2] / "docs" / "decisions" / "19-producers.md").read_text()
    for reason in {line.reason for line in lines if line.excepted}:
        count = sum(line.excepted for line in lines if line.reason == reason)
        assert f"({count:,}" in decision, reason


def test_every_recipe_of_a_producer_is_in_the_table():
    """But vLLM's, which `test_golden_vllm.py` compares, and Quark's NVFP4: `test_checkpoints.py` compares its weights, and
    `test_load.py` the logits that its inputs lead to."""
    shown = {line.recipe for format, producer in PRODUCERS for line in table_rows(None, format, producer)}
    assert shown | {"vllm_torch", "vllm_triton", "quark_nvfp4", "quark_nvfp4_input"} == set(ROWS)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_needed_for_a_producers_bytes(fault, monkeypatch):
    monkeypatch.setitem(FAULTS, fault, Fault(FAULTS[fault].point, lambda result, *_: result, "left out"))
    with_fault = {name for name, row in ROWS.items() if fault in row.get("faults", ())}
    for format, producer in PRODUCERS:
        if producer_table.recipe_of(producer, format) in with_fault:
            if any(line.differing for line in producer_table.rows(GOLDEN, format, producer)):
                return
    pytest.fail(f"no recording tells {fault}")


NOT_CHOICES = ("name", "summary", "scale_rule", "format", "faults")
UNTOLD = {
    "vllm": mxref.Recipe.__dataclass_fields__,  # see test_golden_vllm.py
    "compressed_tensors_nvfp4": ("encode_order", "negative_zero"),  # the first goes with amax_dtype; NVFP4 inputs hold no -0
    "compressed_tensors_mxfp": ("inf",),  # where amax rounds to Inf a fault decides
    "modelopt_nvfp4": ("negative_zero",),
    "te_ref": ("negative_zero", "encode_order"),  # the second: 4 or 6 alone, with nvidia's the same bytes here
    "fouroversix_": ("negative_zero", "encode_order"),
    "flashinfer_nvfp4": ("negative_zero", "decode_order"),  # its decoder is not recorded
    "gfloat": ("nan",),  # see test_gfloat_raises_for_nan
    "quark_nvfp4": ("encode_order", "negative_zero"),  # no recording, but a checkpoint
}
CHOICES = [
    (name, field)
    for name, row in ROWS.items()
    for field in row
    if field not in NOT_CHOICES and not any(name.startswith(prefix) and field in untold for prefix, untold in UNTOLD.items())
]


@pytest.mark.parametrize("name, field", CHOICES)
def test_every_choice_is_needed_for_a_producers_bytes(name, field, monkeypatch):
    """A field of a row, set back to its default, is told by the recordings, but for `UNTOLD`."""
    row = mxref.RECIPES[name]
    altered = object.__new__(mxref.Recipe)
    altered.__dict__.update(row.__dict__ | {field: mxref.Recipe.__dataclass_fields__[field].default})
    monkeypatch.setitem(mxref.RECIPES, name, altered)
    for format, producer in PRODUCERS:
        if producer_table.recipe_of(producer, format) == name:
            if any(line.differing for line in producer_table.rows(GOLDEN, format, producer)):
                return
    pytest.fail(f"no recording tells {name}'s {field}")


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.get("faults")])
def test_faults_are_their_producers_alone(name):
    row = mxref.RECIPES[name]
    with pytest.raises(ValueError, match="faults=.* of recipe 'mine': expected none"):
        replace(row, name="mine")
    with pytest.raises(ValueError, match=f"faults=.* of recipe '{name}': expected none"):
        replace(row, block_rows=row.block_rows + 1)
    mine = replace(row, name="mine", faults=())
    assert mine.faults == () and mine.scale_rule == row.scale_rule


def test_an_unknown_fault_is_refused():
    with pytest.raises(ValueError, match="faults='nosuch': expected one of log2"):
        mxref.Recipe("mine", "floor", faults=("nosuch",))


@pytest.mark.parametrize("format", mxref.BLOCK_FORMATS)
@pytest.mark.parametrize("name", ROWS)
def test_a_producer_is_for_the_formats_it_was_recorded_in(name, format):
    """quark_even, microxcaling's and vLLM's fit whatever their scale rule does."""
    recorded = {f for f, producer in PRODUCERS if producer_table.recipe_of(producer, f) == name}
    recorded |= {"nvfp4"} if name.startswith("quark_nvfp4") else set()  # in a checkpoint
    if ROWS[name].get("format") is None:
        return
    block = mxref.BLOCK_FORMATS[format]
    if format in recorded:
        x = torch.ones(mxref.RECIPES[name].block_rows, block.block_size)
        assert mxref.quantize(x, format, recipe=name).recipe is mxref.RECIPES[name]
    else:
        with pytest.raises(ValueError, match=f"recipe '{name}' is for "):
            mxref.quantize(torch.ones(1, block.block_size), format, recipe=name)


@pytest.mark.parametrize("name", ROWS)
def test_a_producers_recipe_takes_any_shape(name):
    """Tails, strides, another axis and empty tensors, of special values too, mean what contiguous rows do."""
    row = mxref.RECIPES[name]
    format = next(f for f, block in mxref.BLOCK_FORMATS.items() if row.fits(block))
    size = mxref.BLOCK_FORMATS[format].block_size
    x = torch.randn(32, 2 * size, generator=torch.Generator().manual_seed(3)) * 3
    x[0, :3] = torch.tensor([0.0, -0.0, 2.0**-140])
    if row.nan != "raise" and format != "nvfp4":
        x[1, 0], x[2, size] = torch.nan, -torch.inf
    whole = mxref.quantize(x, format, recipe=name)
    along = mxref.quantize(x.T, format, recipe=name, axis=0)
    assert_same_bits(along.codes.T, whole.codes)
    assert_same_bits(along.scales.T, whole.scales)
    strided = torch.stack([x, x + 1], dim=-1)[..., 0]
    assert_same_bits(mxref.qdq(strided, format, recipe=name), mxref.dequantize(whole))
    padded = x.clone()
    padded[:, size + 5 :] = 0.0
    short, long = (mxref.quantize(v, format, recipe=name) for v in (padded[:, : size + 5], padded))
    assert_same_bits(short.codes, long.codes[:, : size + 5])
    assert_same_bits(short.scales, long.scales)
    for shape in ((0, size), (32, 0)):
        empty = torch.zeros(shape)
        assert mxref.dequantize(mxref.quantize(empty, format, recipe=name)).shape == shape


def test_gfloat_raises_for_nan():
    with pytest.raises(ValueError, match="recipe 'gfloat' has nan='raise'"):
        mxref.quantize(torch.tensor([1.0, torch.nan]), "mxfp4", recipe="gfloat")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sign", [-1, 1])
def test_rounded_logarithms(dtype, sign):
    """Beside 2^k: floor and ceil of log2, rounded to the dtype's precision, from logarithms with 40 digits."""
    smallest = {torch.float32: -149, torch.bfloat16: -133, torch.float16: -24}[dtype]
    largest = 15 if dtype == torch.float16 else 127
    for k in {
        smallest + 1,
        -126,
        -125,
        -65,
        -64,
        -63,
        -33,
        -9,
        -8,
        -2,
        -1,
        0,
        1,
        2,
        3,
        4,
        10,
        15,
        31,
        32,
        33,
        64,
        65,
        100,
        127,
    }:
        if not smallest < k <= largest:
            continue
        x = torch.full((60,), 2.0**k, dtype=dtype)
        view = torch.int32 if dtype == torch.float32 else torch.int16
        x = (x.view(view) + sign * torch.arange(60, dtype=view)).view(dtype)
        x = x[(x > 0) & x.isfinite()]
        bits = x.float().view(torch.int32)
        logarithms = [_rounded_log2(value, FLOATS[dtype]) for value in x.tolist()]
        assert floor_log2(bits, dtype).tolist() == [int(v.to_integral_value("ROUND_FLOOR")) for v in logarithms]
        assert ceil_log2(bits, dtype).tolist() == [int(v.to_integral_value("ROUND_CEILING")) for v in logarithms]


def _rounded_log2(value: float, bits: int) -> Decimal:
    """log2, rounded to nearest in `bits` significand bits; no tie is possible but at powers of two, which are exact."""
    with localcontext() as context:
        context.prec = 40
        exact = Decimal(value).ln() / Decimal(2).ln()
        nearest = exact.to_integral_value()
        if abs(exact - nearest) < Decimal(10) ** -30:
            return nearest
        step = Decimal(2) ** (int(abs(exact)).bit_length() - bits)
        if abs(exact) < 1:
            step = Decimal(2) ** (1 + int((abs(exact).ln() / Decimal(2).ln()).to_integral_value("ROUND_FLOOR")) - bits)
        return (exact / step).to_integral_value("ROUND_HALF_EVEN") * step


# ------------------------------------------------------------------------------------------ torchao and ocp


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


@pytest.mark.parametrize("recipe", ["modelopt_nvfp4", "te_ref", "fouroversix_mse"])
def test_clipped_gradients_take_what_the_recipe_takes(recipe):
    x = torch.zeros(2, 32, requires_grad=True)
    mxref.qdq(x, "nvfp4", recipe=recipe, gradient="clipped").sum().backward()
    assert x.grad is not None
