"""The public cases: small inputs from bug reports, with the right value and what faulty code gave for it.

Every right and every wrong value comes from `data/cases.json`, none from mxref. A case is a list of checks; each is
compared with the right value, and the same comparison must fail on the value that faulty code gave (`seen_wrong`).

Parts of cases that this library does not decide, and which are therefore not checked here:

* `nvfp4-zero-tensor-global`: "raise, naming the tensor" is about reading a checkpoint; here a zero scale is refused by name.
* `float4-x2-shape`: the shape in a safetensors header, and that an odd last axis is refused when raw packed bytes are
  exchanged, are about files; in memory a row of odd length ends in a spare nibble.
* `e8m0-cast-rounding`: ml_dtypes' NaN for 0; a scale of a block of zeros is code 0 here (case `zero-block`).
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from bits import assert_same_bits

import mxref

CASES = {case["id"]: case for case in json.loads((Path(__file__).parent / "data" / "cases.json").read_text())}
OCP = mxref.RECIPES["ocp"]
RULES = {"FLOOR": "ocp", "CEIL": "ocp_ceil", "RCEIL": "ocp_rceil", "EVEN": "ocp_even"}


@dataclass(frozen=True)
class Check:
    """`ours` equals `right`, by `compare`, and none of `wrong`."""

    ours: torch.Tensor
    right: torch.Tensor
    wrong: list[torch.Tensor] = field(default_factory=list)
    compare: Callable = assert_same_bits


def number(text) -> float:
    """A number of the file, which may be written `2**-10`, `1/3584`, `0x1F`, `nan` or `inf`."""
    if not isinstance(text, str):
        return text
    if power := re.fullmatch(r"2\*\*(-?\d+)", text):
        return 2.0 ** int(power[1])
    if text.startswith("0x"):
        return int(text, 16)
    return float(text) if text in ("nan", "inf") else float(Fraction(text))


def float32(values) -> torch.Tensor:
    return torch.from_numpy(np.asarray(np.vectorize(number, otypes=[float])(values), np.float32))


def float32_of_hex(texts) -> torch.Tensor:
    """float32 bit patterns; `nan` is the canonical one."""
    return torch.from_numpy(np.uint32([0x7FC00000 if t == "nan" else int(t, 16) for t in texts]).view(np.float32))


def byte(values) -> torch.Tensor:
    return torch.from_numpy(np.uint8(np.vectorize(number, otypes=[int])(values)))


def stored(codes, scales, tensor_scale=None, format="nvfp4", recipe="nvidia") -> mxref.BlockTensor:
    return mxref.BlockTensor.from_codes(byte(codes), byte(scales), tensor_scale, format, recipe)


def within(relative: float) -> Callable:
    """A comparison with a bound; each use says why the bound holds."""

    def compare(actual: torch.Tensor, expected: torch.Tensor) -> None:
        assert actual.dtype == expected.dtype and actual.shape == expected.shape
        error = (actual.double() - expected.double()).abs()
        assert (error <= relative * expected.double().abs()).all(), f"{actual.tolist()}, expected {expected.tolist()}"

    return compare


# ------------------------------------------------------------------------------------------ element-encode


def e2m1_ties(given, right, wrong) -> Iterator[Check]:
    x = float32(given["x"])
    half_away = byte(wrong["half-away codes"])
    yield Check(mxref.encode(x, "e2m1"), byte(right["codes"]), [half_away])
    yield Check(mxref.encode(x, "e2m1", rounding="ties_away"), half_away, [byte(right["codes"])])
    yield Check(mxref.decode(mxref.encode(x, "e2m1"), "e2m1"), float32(right["values"]))


def e2m1_sticky_above_tie(given, right, wrong) -> Iterator[Check]:
    codes = mxref.encode(float32_of_hex(given["x_f32_hex"]), "e2m1")
    yield Check(codes, byte(right["codes"]), [byte(wrong["sticky dropped"])])


def nvfp4_divide_not_reciprocal(given, right, wrong) -> Iterator[Check]:
    """Which recipe gives which value: a true quotient the one, a product with a reciprocal the other."""
    reciprocal = wrong["reciprocal multiply"]
    scale = mxref.decode(byte([given["scale_byte"]]), "e4m3")
    value = float32([given["v_f32"]])
    yield Check(mxref.encode(value / scale, "e2m1"), byte([right["code"]]), [byte([reciprocal["code"]])])
    block = torch.cat([6 * scale, value, torch.zeros(14)])  # its largest element is 6: the scale is the one given
    for recipe in ("exact", "nvidia", "vllm_torch", "vllm_triton"):
        mine, other = (right, reciprocal) if recipe == "exact" else (reciprocal, right)
        q = mxref.quantize(block, "nvfp4", recipe=recipe, tensor_scale="none")
        yield Check(q.scales, byte([given["scale_byte"]]))
        yield Check(q.codes[1:2], byte([mine["code"]]), [byte([other["code"]])])
        decoded = mxref.dequantize(q)[1:2]
        yield Check(decoded, float32([mine["value"]]) * scale, [float32([other["value"]]) * scale])


# ------------------------------------------------------------------------------------------ scale-mode


def mxfp8_957_floor_vs_rceil(given, right, wrong) -> Iterator[Check]:
    for rule, other in (("FLOOR", "RCEIL"), ("RCEIL", "FLOOR")):
        q = mxref.quantize(float32(given["x"]), given["format"], recipe=RULES[rule])
        yield Check(q.scales, byte([right[rule]["scale_byte"]]), [byte([right[other]["scale_byte"]])])
        yield Check(q.codes, byte([right[rule]["code"]] + [0] * 31))
        yield Check(mxref.dequantize(q), float32([right[rule]["dequant"]] + [0] * 31))


def scale_modes_amax7_e2m1(given, right, wrong) -> Iterator[Check]:
    for rule, codes in right.items():
        others = [byte(other)[:, None] for name, other in right.items() if name != rule]
        q = mxref.quantize(float32(given["amax"])[:, None], given["format"], recipe=RULES[rule])
        yield Check(q.scales, byte(codes)[:, None], others)


def mxfp4_divide_before_floor(given, right, wrong) -> Iterator[Check]:
    q = mxref.quantize(float32(given["amax"])[:, None], given["format"], recipe=RULES[given["scale_mode"]])
    yield Check(q.scales[:, 0], byte(right["scale_byte"]), [byte(wrong["scale_byte"])])
    ratios = [mxref.explain(float32([x]), given["format"]).elements[0].quotient for x in given["amax"]]
    yield Check(float32(ratios), float32(right["amax_over_scale"]))


# ------------------------------------------------------------------------------------------ scale-decode, scale-encode


def e8m0_decode_ends(given, right, wrong) -> Iterator[Check]:
    values = mxref.decode(byte(given["bytes"]), "e8m0")
    yield Check(values, float32_of_hex(right["f32_hex"]), [float32_of_hex(wrong["shift by 23"])])


def e4m3_subnormal_scale_decode(given, right, wrong) -> Iterator[Check]:
    values, faulty = float32(right["values"]), float32(right["values"])
    faulty[given["bytes"].index(1)] = wrong["normal formula, byte 1"]
    yield Check(mxref.decode(byte(given["bytes"]), "e4m3"), values, [faulty])
    ones = stored([[2]] * len(values), [[b] for b in given["bytes"]])  # code 2 is 1.0: the decoded value is the scale
    yield Check(mxref.dequantize(ones)[:, 0], values, [faulty])


def e8m0_cast_rounding(given, right, wrong) -> Iterator[Check]:
    """PyTorch's cast is `ties_away`, CUDA's is `away_from_zero`: the rounding is an argument."""
    x = float32(given["x"])
    nearest, up = right["nearest (PyTorch, ml_dtypes)"], right["up, saturating (CUDA)"]
    assert nearest[-1].startswith("PyTorch 0 ")
    nearest = byte([*nearest[:-1], 0])
    below = given["x"].index("2**-128")
    faulty = nearest.clone()
    faulty[below] = wrong["gfloat 0.5.2 on 2**-128"]
    yield Check(mxref.encode(x, "e8m0", rounding="ties_away"), nearest, [byte(up), faulty])
    yield Check(mxref.encode(x, "e8m0", rounding="away_from_zero"), byte(up), [nearest])
    # ties to the even code, the default, differs at 3.0 = 1.5 * 2 alone: there code 128 is the even one
    even = nearest.clone()
    even[given["x"].index(3.0)] -= 1
    yield Check(mxref.encode(x, "e8m0"), even, [nearest, byte(up)])


def nvfp4_block_scale_overflow(given, right, wrong) -> Iterator[Check]:
    x = float32(given["x"])
    saturating, special = byte(right["saturating"]), byte(right["non-saturating"])
    yield Check(mxref.encode(x, "e4m3"), saturating, [special])
    yield Check(mxref.encode(x, "e4m3", overflow="special"), special, [saturating])
    for recipe in ("nvidia", "exact", "vllm_torch", "vllm_triton"):
        q = mxref.quantize(6 * x[:, None], "nvfp4", recipe=recipe, tensor_scale="none")
        yield Check(q.scales[:, 0], saturating, [special])


def nvfp4_zero_tensor_global(given, right, wrong) -> Iterator[Check]:
    """Finite and positive is required, the value is a convention: 1.0 is the neutral choice."""
    assert right["zero tensor"] == "finite, positive global scale; decoded zeros"

    def both_usable(*scales):
        assert all(scale.isfinite().all() and (scale > 0).all() for scale in scales)

    zeros, infinite = torch.zeros(4, 32), float32(wrong["scale"])
    for recipe in ("nvidia", "exact", "vllm_torch", "vllm_triton"):
        for granularity in ("per_tensor", "per_row"):
            q = mxref.quantize(zeros, "nvfp4", recipe=recipe, tensor_scale=granularity)
            yield Check(q.tensor_scale, torch.ones(()), [infinite], both_usable)
            yield Check(mxref.dequantize(q), zeros)
    assert right["missing scale"] == "raise, naming the tensor"
    for bad in (torch.zeros(()), infinite):
        with pytest.raises(ValueError, match="tensor_scale"):
            mxref.quantize(zeros, "nvfp4", tensor_scale=bad)
        with pytest.raises(ValueError, match="tensor_scale"):
            stored([[0]], [[0]], bad)


# ------------------------------------------------------------------------------------------ block-encode, block-decode


def mxfp4_block_floor_packed(given, right, wrong) -> Iterator[Check]:
    q = mxref.quantize(float32(given["x"]), given["format"], recipe=RULES[given["scale_mode"]])
    yield Check(q.scales, byte([right["scale_byte"]]))
    yield Check(q.packed, byte(right["packed_low_nibble_first"]))


def zero_block(given, right, wrong) -> Iterator[Check]:
    assert (given["x"], right["element_codes"], right["dequant"]) == ("all +0.0", "all 0", "all +0.0, no NaN")
    zeros, nan = torch.zeros(32), torch.full((32,), number(wrong["0/0"]))
    for format in given["format"]:
        scale = right["nvfp4_block_scale" if format == "nvfp4" else "mx_scale_byte"]
        fitting = ["nvidia", "exact", "vllm_torch", "vllm_triton"] if format == "nvfp4" else RULES.values()
        for recipe in fitting:
            q = mxref.quantize(zeros, format, recipe=recipe)
            yield Check(q.codes, torch.zeros(32, dtype=torch.uint8))
            yield Check(q.scales, torch.full((32 // q.format.block_size,), scale, dtype=torch.uint8))
            yield Check(mxref.dequantize(q), zeros, [nan])
            yield Check(mxref.qdq(zeros, format, recipe=recipe), zeros, [nan])
    named = mxref.quantize(zeros, "mxfp4", recipe=replace(OCP, name="one", zero_block="one"))
    yield Check(mxref.dequantize(named), zeros, [nan])  # the byte is a convention, the zeros are not


def nan_inf_block(given, right, wrong) -> Iterator[Check]:
    """Inf is policy: `inf="nan"`, the default, propagates; `inf="saturate"` is CUDA's satfinite."""
    assert given["blocks"] == {"nan": "[nan,1,...]", "inf": "[+inf,-inf,1,0...]"}
    with_nan = torch.tensor([math.nan] + [1.0] * 31)
    with_inf = torch.tensor([math.inf, -math.inf, 1.0] + [0.0] * 29)
    saturate = replace(OCP, name="satfinite", inf="saturate")
    satfinite, propagate = right["inf_block"].values()
    for recipe in (OCP, saturate):
        q = mxref.quantize(with_nan, given["format"], recipe=recipe)
        yield Check(q.scales, byte([right["nan_block"]["scale_byte"]]))
        yield Check(mxref.dequantize(q), torch.full((32,), math.nan))
    q = mxref.quantize(with_inf, given["format"])
    yield Check(q.scales, byte([propagate["scale_byte"]]), [byte([satfinite["scale_byte"]])])
    q = mxref.quantize(with_inf, given["format"], recipe=saturate)
    yield Check(q.scales, byte([satfinite["scale_byte"]]), [byte([propagate["scale_byte"]])])
    yield Check(q.codes[:3], byte(satfinite["codes"]))
    yield Check(q.codes[:2], byte(satfinite["codes"][:2]), [byte(wrong["codes"])])
    assert right["decode_rule"].startswith("scale byte 255")
    poisoned = stored(np.arange(256).reshape(8, 32), np.full((8, 1), 255), None, given["format"], "ocp")
    yield Check(mxref.dequantize(poisoned), torch.full((8, 32), math.nan))


def nvfp4_elements_use_rounded_scale(given, right, wrong) -> Iterator[Check]:
    x = torch.cat([float32([given["tensor_amax"]] + [0.0] * 15), float32(given["block1"])])
    faulty = byte(wrong["codes_first_two"])
    for recipe in ("exact", "nvidia", "vllm_torch", "vllm_triton"):
        q = mxref.quantize(x, "nvfp4", recipe=recipe)
        yield Check(q.scales[1:], byte([right["block_scale_byte"]]))
        yield Check(q.codes[16:18], byte(right["codes_first_two"]), [faulty])
        # three float32 roundings: of the tensor scale 1/448, of its product with the block scale, of the element's
        decoded = mxref.dequantize(q)[16:18]
        yield Check(decoded, float32(right["dequant_first_two"]), compare=within(4 * 2.0**-24))


def row_local_blocks(given, right, wrong) -> Iterator[Check]:
    assert given["rows"] == "row 0 all 1.0, row 1 all 64.0"
    x = torch.tensor([1.0, 64.0])[:, None].expand(given["shape"])
    flattened = byte(wrong["flattened"]["scale_bytes"])
    q = mxref.quantize(x, given["format"], recipe=RULES[given["scale_mode"]])
    yield Check(q.scales, byte(right["scale_bytes"]), [flattened])
    assert list(q.scales.shape) == right["scale_shape"] and right["dequant"] == "unchanged"
    straddling = mxref.quantize(x.flatten(), given["format"])
    yield Check(straddling.scales, flattened, [byte(right["scale_bytes"])])
    lost = x.clone()
    lost[0, 32:] = 0
    assert wrong["flattened"]["row 0 tail"] == "zeros"
    yield Check(mxref.dequantize(q), x, [lost, mxref.dequantize(straddling).reshape(x.shape)])


def quantization_axis(given, right, wrong) -> Iterator[Check]:
    assert given["x"] == "ones, x[0,0]=64"
    x = torch.ones(given["shape"])
    x[0, 0] = 64
    for axis, other in (("axis=-1", "axis=0"), ("axis=0", "axis=-1")):
        decoded = mxref.qdq(x, given["format"], recipe=RULES[given["scale_mode"]], axis=int(axis.removeprefix("axis=")))
        mine, transposed = (float32([right[name]["[0,1]"], right[name]["[1,0]"]]) for name in (axis, other))
        yield Check(torch.stack([decoded[0, 1], decoded[1, 0]]), mine, [transposed])


def mxint8(given, right, wrong) -> Iterator[Check]:
    """Of -2.0's two ways out, ours is the symmetric one: code 0x80 is decoded and never made."""
    symmetric, full_range = (int(text, 16) for text in re.findall("0x[0-9A-Fa-f]+", right["codes"][2]))
    codes = byte([*right["codes"][:2], symmetric, *right["codes"][3:]])
    whole = codes.clone()
    whole[2] = full_range
    q = mxref.quantize(float32(given["x"]), given["format"], recipe=RULES[given["scale_mode"]])
    yield Check(q.scales, byte([right["scale_byte"]]))
    yield Check(q.codes, codes, [whole])
    values = float32(list(right["decode"].values()))
    assert wrong == {"sign-magnitude or no 2^-6": "values off by 64 or wrong sign pattern"}
    bytes_of_values = byte(list(right["decode"]))
    sign_magnitude = torch.where(bytes_of_values < 128, 1.0, -1.0) * (bytes_of_values & 127) / 64
    yield Check(mxref.decode(bytes_of_values, "int8"), values, [values * 64, sign_magnitude])
    decoded = mxref.dequantize(stored(bytes_of_values, [right["scale_byte"]], None, given["format"], "ocp"))
    yield Check(decoded, values, [values * 64, sign_magnitude])


def fp8_fallback_is_not_nvfp4(given, right, wrong) -> Iterator[Check]:
    q = stored([given["e2m1_code"]], [given["block_scale_byte"]])
    exact, through_fp8 = float32([right["exact"]]), float32([right["via_e4m3"]])
    yield Check(mxref.dequantize(q), exact, [through_fp8])
    yield Check(mxref.dequantize(q, torch.bfloat16), exact.bfloat16(), [through_fp8.bfloat16()])
    yield Check(mxref.decode(mxref.encode(mxref.dequantize(q), "e4m3"), "e4m3"), through_fp8, [exact])


def nvfp4_global_scale_direction(given, right, wrong) -> Iterator[Check]:
    code, scale = [given["e2m1_code"]], [given["block_scale_byte"]]
    value, other = float32([right["value"]]), float32([wrong["value"]])
    multiplier = float32(given["modelopt"]["weight_scale_2"])
    divisor = float32(given["compressed_tensors"]["weight_global_scale"])
    yield Check(mxref.dequantize(stored(code, scale, multiplier)), value, [other])
    for recipe in ("vllm_torch", "vllm_triton"):
        yield Check(mxref.dequantize(stored(code, scale, divisor, recipe=recipe)), value, [other])
    yield Check(mxref.dequantize(stored(code, scale, divisor)), other, [value])  # the fault itself
    one = stored([[2]], [[0x38]])  # 1.0 * 1.0
    for recipe, tensor_scale in (("nvidia", multiplier), ("vllm_torch", divisor)):
        weight = stored([code], [scale], tensor_scale, recipe=recipe)
        yield Check(mxref.matmul(one, weight)[0], value, [other])


# ------------------------------------------------------------------------------------------ pack, layout, shape


def nibble_order(given, right, wrong) -> Iterator[Check]:
    low_first, high_first = byte(right["bytes_low_first"]), byte(wrong["high first"])
    codes = mxref.encode(float32(given["x"]), "e2m1")
    yield Check(mxref.pack(codes, 4), low_first, [high_first])
    yield Check(mxref.unpack(low_first, 4, len(codes)), codes, [mxref.unpack(high_first, 4, len(codes))])
    yield Check(mxref.quantize(float32(given["x"]), "mxfp4").packed, low_first, [high_first])


def scale_swizzle_128x4(given, right, wrong) -> Iterator[Check]:
    shape, (rows, columns) = given["scale_shape"], right["padded_shape"]
    assert rows * columns == right["bytes"]
    offsets = []
    for r, c in given["positions"]:
        scales = torch.zeros(shape, dtype=torch.uint8)
        scales[r, c] = 1
        tiled = mxref.to_layout(scales, "tile_128x4")
        offsets.append(tiled.nonzero().tolist())
        yield Check(mxref.from_layout(tiled, "tile_128x4", tuple(shape)), scales)
    swapped = torch.tensor(right["offsets"])
    swapped[given["positions"].index([1, 0])] = wrong["split (32,4) not (4,32): position (1,0)"]
    yield Check(torch.tensor(offsets)[:, 0, 0], torch.tensor(right["offsets"]), [swapped])
    full = mxref.to_layout(torch.ones(shape, dtype=torch.uint8), "tile_128x4")
    yield Check(torch.tensor(full.shape), torch.tensor([right["bytes"]]))
    yield Check(full.sum(), torch.tensor(math.prod(shape)))  # the padding is 0
    padded = torch.zeros(rows, columns, dtype=torch.uint8)
    padded[: shape[0], : shape[1]] = 1
    yield Check(mxref.to_layout(padded, "tile_128x4"), full)


def float4_x2_shape(given, right, wrong) -> Iterator[Check]:
    x = torch.ones(given["logical_shape"])
    mx, nv = mxref.quantize(x, "mxfp4"), mxref.quantize(x, "nvfp4")
    for q, scales in ((mx, right["mx scale shape (block 32)"]), (nv, right["nvfp4 scale shape"])):
        yield Check(torch.tensor(q.shape), torch.tensor(given["logical_shape"]))
        yield Check(torch.tensor(q.codes.shape), torch.tensor(given["logical_shape"]))
        yield Check(torch.tensor(q.packed.shape), torch.tensor(right["torch float4_e2m1fn_x2 / uint8 shape"]))
        yield Check(torch.tensor(q.scales.shape), torch.tensor(scales))


# ------------------------------------------------------------------------------------------ moe


def moe_gate_up_global_scales(given, right, wrong) -> Iterator[Check]:
    """Gate and up rows of one stored w13 keep their own tensor scales, through a product and through the layer."""
    k = given["K"]
    assert given["x"] == f"{k} x 1.0 (unquantized)"
    scales = []
    for name in ("w1 (gate)", "w3 (up)"):
        text, scale = given[name].rsplit(" scale_2 ", 1)
        assert text == f"{k} x code 2, block scale 1.0,"
        scales.append(number(scale))
    x = torch.ones(1, k)
    identity = stored(torch.full((1, k, 1), 2), torch.full((1, k, 1), 0x38))  # code 2 and scale 0x38 are 1.0

    def layer(tensor_scales):
        weight = stored(torch.full((1, 2, k), 2), torch.full((1, 2, 1), 0x38), float32([tensor_scales]))
        hidden = mxref.moe_experts(x, weight, identity, torch.tensor([[0]]), torch.ones(1, 1))
        return mxref.matmul(x, weight[0]), hidden

    both, hidden = layer(scales)
    expected = float32([[right["gate"], right["up"]]])
    yield Check(both, expected, [expected[:, :1].expand(1, 2), expected[:, 1:].expand(1, 2)])
    # silu is within 3.2 units in the last place (a unit is at most 2^-23 of the value); up, a power of two, is exact
    close = within(3.2 * 2.0**-23)
    result, faulty = (float32([[v] * k]) for v in (right["silu(gate)*up"], wrong["gate scale for both"]))
    yield Check(hidden, result, [faulty], close)
    yield Check(layer(scales[:1] * 2)[1], faulty, [result], close)  # the fault itself


def gpt_oss_swiglu(given, right, wrong) -> Iterator[Check]:
    values = float32(given["interleaved"])
    gate, up = values[0::2], values[1::2]
    clamped = float32(right["gate_after_clamp"]), float32(right["up_after_clamp"])
    out = float32(right["out"])
    symmetric = out.clone()
    symmetric[1] = wrong["symmetric gate clamp, 2nd"]
    # |1.702 g| <= 17.1 carries two roundings into an exponential, sigmoid has 2.4 units in the last place, two products
    # follow: (2 * 17.1 + 2 * 2.4 + 2) * 2^-24 < 2.5e-6; the case itself asks for 1e-5
    close = within(1e-5)
    ours = mxref.functions.swiglu_oai(gate, up, given["alpha"], given["limit"])
    yield Check(ours, out, [symmetric], close)
    yield Check(mxref.functions.swiglu_oai(gate, up), out, [symmetric], close)
    yield Check(mxref.functions.swiglu_oai(*clamped, given["alpha"], given["limit"]), ours)

    # through the layer: x picks column 0 of w13, whose rows hold the pairs as they are stored; w2 is the identity
    w13, w2 = torch.zeros(1, 4, 32), torch.zeros(1, 32, 2)
    w13[0, :, 0], w2[0, 0, 0], w2[0, 1, 1] = values, 1.0, 1.0
    x = torch.zeros(1, 32)
    x[0, 0] = 1.0
    layer = [mxref.quantize(w, "mxfp8_e4m3") for w in (w13, w2)]
    hidden = mxref.moe_experts(
        x, *layer, torch.tensor([[0]]), torch.ones(1, 1), activation="swiglu_oai", gate_up="interleaved"
    )
    contiguous = mxref.functions.swiglu_oai(values[:2], values[2:])
    yield Check(hidden[0, :2], out, [symmetric, contiguous], close)


# ------------------------------------------------------------------------------------------ one test a kind

CHECKS = {name.replace("_", "-"): function for name, function in list(globals().items()) if name.replace("_", "-") in CASES}
CONSUMED: set[str] = set()


def of_kind(*kinds: str):
    """Parametrize a test with the cases of some kinds."""
    chosen = [case for case in CASES.values() if case["kind"] in kinds]
    assert {case["kind"] for case in chosen} == set(kinds)
    CONSUMED.update(case["id"] for case in chosen)
    return pytest.mark.parametrize("case", chosen, ids=[case["id"] for case in chosen])


def run(case: dict) -> None:
    """Compare every check of a case with its right value, and see the comparison fail on its wrong ones."""
    refused = 0
    checks = list(CHECKS[case["id"]](case["input"], case["expected"], case.get("seen_wrong")))
    for check in checks:
        check.compare(check.ours, check.right)
        for wrong in check.wrong:
            refused += 1
            with pytest.raises(AssertionError):
                check.compare(check.ours, wrong)
            with pytest.raises(AssertionError):
                check.compare(wrong, check.right)
    assert checks and (refused or "seen_wrong" not in case)


@of_kind("element-encode")
def test_element_codes(case):
    run(case)


@of_kind("scale-mode")
def test_scale_rules(case):
    run(case)


@of_kind("scale-decode")
def test_scale_decoding(case):
    run(case)


@of_kind("scale-encode")
def test_scale_encoding(case):
    run(case)


@of_kind("block-encode", "block-decode")
def test_blocks(case):
    run(case)


@of_kind("checkpoint-decode")
def test_decoding_of_stored_scales(case):
    run(case)


@of_kind("pack", "layout", "shape")
def test_storage(case):
    run(case)


@of_kind("moe")
def test_experts(case):
    run(case)


def test_every_case_is_consumed():
    assert CONSUMED == set(CASES) == set(CHECKS)


def test_a_comparison_with_a_bound_sees_a_planted_error():
    close, one = within(2.0**-23), torch.ones(1)
    close(one + 2.0**-23, one)
    for wrong in (one + 2.0**-22, one.double(), torch.ones(2), one * math.nan):
        with pytest.raises(AssertionError):
            close(wrong, one)
