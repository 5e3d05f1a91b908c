"""Expert layers in Triton: nothing but a token's own row, its experts and its weights decides its bits."""

import numpy as np
import pytest
import torch
from kernel_scripts import DEVICES, says_the_same
from oracles import ptx
from oracles.elements import ELEMENTS, decode

import mxref

INVARIANT = """
import torch, mxref
from accel.triton.moe_experts import Tiling, moe_experts, run_experts
from mxref.conformance import inputs
from mxref.recipes import resolve_recipe

format = mxref.BLOCK_FORMATS["nvfp4"]
w2 = mxref.quantize(inputs.spread_normal(4, 48, 32, seed=2), "nvfp4").to("{device}")
w13 = mxref.quantize(inputs.spread_normal(4, 64, 48, seed=1), "nvfp4").to("{device}")
ids, weights = mxref.route(inputs.spread_normal(40, 4, seed=3).to("{device}"), 2)
x = inputs.spread_normal(40, 48, seed=4, dtype=torch.bfloat16).to("{device}")
same = lambda a, b: torch.equal(a.view(torch.int16), b.view(torch.int16))
whole = moe_experts(x, w13, w2, ids, weights, act_format="nvfp4")  # more slots than programs look through
part = torch.tensor([7, 3, 31], device="{device}")
assert same(moe_experts(x[part], w13, w2, ids[part], weights[part], act_format="nvfp4"), whole[part])
for tiling in (Tiling(16, 8, 1, 1, 1), Tiling(32, 32, 4, 1, 1), Tiling(64, 16, 8, 1, 1)):
    scales = {"input": "per_row", "intermediate": "per_row"}
    recipe = resolve_recipe(None, format)
    out = run_experts(
        x[:9], w13, w2, ids[:9].contiguous(), weights[:9].contiguous(), format, recipe, scales, "silu", "concatenated", None,
        None, torch.bfloat16, False, torch.float32, torch.bfloat16, (tiling, tiling),
    )
    assert same(out, whole[:9]), tiling
maps = torch.tensor([[0, -1, 1, -1], [-1, 0, -1, 1]], device="{device}")
held = torch.tensor([[0, 2], [1, 3]], device="{device}")
options = {"act_format": "nvfp4", "combine": False}
terms = [
    moe_experts(x[:9], w13[experts], w2[experts], ids[:9], weights[:9], expert_map=where, **options)
    for experts, where in zip(held, maps)
]
assert same(mxref.combine(terms, out_dtype=torch.bfloat16), whole[:9])
print("the same")
"""


CHAINS = """
import torch, mxref
from accel.triton._chain_products import ChainTiling
from accel.triton.moe_experts import moe_experts, run_chains
from mxref.conformance import inputs

w2 = mxref.quantize(inputs.spread_normal(4, 48, 32, seed=2), "mxfp4").to("{device}")
w13 = mxref.quantize(inputs.spread_normal(4, 64, 48, seed=1), "nvfp4").to("{device}")
ids, weights = mxref.route(inputs.spread_normal(20, 4, seed=3).to("{device}"), 2)
x = inputs.spread_normal(20, 48, seed=4, dtype=torch.bfloat16).to("{device}")
same = lambda a, b: torch.equal(a.view(torch.int16), b.view(torch.int16))
whole = moe_experts(x, w13, w2, ids, weights)  # tiles of slots
part = torch.tensor([7, 3, 11], device="{device}")
assert same(moe_experts(x[part], w13, w2, ids[part], weights[part]), whole[part])  # slots alone
for tiling in (ChainTiling(64, 1, 4, 1), ChainTiling(16, 2, 2, 2), ChainTiling(32, 1, 1, 16)):
    out = run_chains(
        x[:9], w13, w2, ids[:9].contiguous(), weights[:9].contiguous(), None, None, {"input": None, "intermediate": None},
        "silu", "concatenated", None, None, torch.bfloat16, False, torch.float32, torch.bfloat16, tiling,
    )
    assert same(out, whole[:9]), tiling
maps = torch.tensor([[0, -1, 1, -1], [-1, 0, -1, 1]], device="{device}")
held = torch.tensor([[0, 2], [1, 3]], device="{device}")
terms = [
    moe_experts(x[:9], w13[experts], w2[experts], ids[:9], weights[:9], expert_map=where, combine=False)
    for experts, where in zip(held, maps)
]
assert same(mxref.combine(terms, out_dtype=torch.bfloat16), whole[:9])
print("the same")
"""

EVALUATED = """
from benchmarks.eval_gpu import evaluated, record
from benchmarks.records import read
from mxref.models.report import json_text

report, found = evaluated("triton", "{device}", others=False, tokens=4, window=2, formats=["mxfp4"])
settings = ("mxfp4 / bf16", "mxfp4 / mxfp4")
assert [(layer.setting, layer.layer, layer.calls, layer.tokens) for layer in found] == [
    (setting, number, 1, 4) for setting in settings for number in range(4)
]
assert all(layer.equal and layer.by == "triton" for layer in found), found
rows = read("eval-here.json", json_text(record(report, report, found, "a commit")))
assert [row.values.get("tokens_compared") for row in rows] == [None, 16, 16]
assert [row.values.get("equal") for row in rows] == [None, True, True]
print("the same")
"""


@pytest.mark.parametrize("device", DEVICES)
def test_layers_of_an_evaluation_have_the_bits_of_the_reference(device):
    """What reaches them in the embedded model, rather than what a test makes up."""
    pytest.importorskip("transformers")
    says_the_same(EVALUATED, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("script", [INVARIANT, CHAINS], ids=["blockwise", "weight-only"])
def test_batch_tiles_and_ranks_change_no_bit(script, device):
    says_the_same(script, device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("options", [{"act_format": "nvfp4"}, {}, {"act_format": "nvfp4", "semantics": "dequantized"}])
def test_a_graph_holds_the_layer(options):
    from accel.triton.moe_experts import moe_experts

    w13 = mxref.quantize(torch.randn(4, 64, 96, device="cuda"), "nvfp4")
    w2 = mxref.quantize(torch.randn(4, 96, 32, device="cuda"), "nvfp4")
    x = torch.randn(5, 96, device="cuda").bfloat16()
    ids, weights = mxref.route(torch.randn(5, 4, device="cuda"), 2)
    expected = moe_experts(x, w13, w2, ids, weights, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe_experts(x, w13, w2, ids, weights, **options)
    graph.replay()
    assert torch.equal(out, expected)
    x.copy_(x.flip(0).clone())
    graph.replay()
    assert torch.equal(out, moe_experts(x, w13, w2, ids, weights, **options))


def _as_float16(halves: list[np.ndarray]) -> np.ndarray:
    return np.stack([half.astype(np.uint16).view(np.float16) for half in halves], -1).astype(np.float64)


@pytest.mark.parametrize("byte", range(4))
def test_fragments_decode_every_pair_of_codes_with_every_scale(byte):
    """All bytes of two codes, in either half of a word, times all E4M3 scales that are numbers: exactly, signs too."""
    pytest.importorskip("triton")
    from accel.triton import _experts, _fragments

    codes = np.arange(256, dtype=np.uint32)
    words = codes | (codes ^ 0x5A) << 8 | (255 - codes) << 16 | (codes ^ 0xC3) << 24
    scales = np.arange(127, dtype=np.uint32)  # 127 is NaN, looked for apart
    words, scales = (part.ravel() for part in np.meshgrid(words.astype(np.uint32), scales))
    four = scales << np.uint32(8 * byte) | (scales ^ np.uint32(1)) << np.uint32(8 * (byte ^ 1))
    (pair,) = ptx.run(_fragments.PAIRED_SCALES.value[byte // 2], 1, [four, np.full_like(four, 0x78007800)])
    found = _as_float16(ptx.run(_fragments.DECODED.value[byte % 2], 8, [words, pair, pair]))
    places = [0, 2, 1, 3, 4, 6, 5, 7]  # of four bits of a word
    values = np.array([float(decode(code, ELEMENTS["e2m1"])) for code in range(16)])
    expected = values[words[:, None] >> (4 * np.array(places, np.uint32)) & 15]
    expected = expected * np.array([float(decode(s, ELEMENTS["e4m3"])) for s in range(127)])[scales][:, None]
    exact = found * float(_experts.HALF_SHIFT.value)
    assert np.array_equal(exact, expected) and np.array_equal(np.signbit(exact), np.signbit(expected))


def test_fragments_decode_every_pair_of_codes_unscaled():
    """All bytes of two codes, in every byte of a word: bfloat16 values times 2^-126, exactly, signs too."""
    pytest.importorskip("triton")
    from accel.triton import _experts, _fragments

    codes = np.arange(256, dtype=np.uint32)
    words = codes | (codes ^ 0x5A) << 8 | (255 - codes) << 16 | (codes ^ 0xC3) << 24
    halves = ptx.run(_fragments.DECODED_UNSCALED.value, 8, [words.astype(np.uint32)])
    found = np.stack([half.astype(np.uint32) << 16 for half in halves], -1).view(np.float32).astype(np.float64)
    values = np.array([float(decode(code, ELEMENTS["e2m1"])) for code in range(16)])
    expected = values[words[:, None] >> (4 * np.array([0, 4, 1, 5, 2, 6, 3, 7], np.uint32)) & 15]
    exact = found * 2.0**_fragments.UNSCALED_EXPONENT.value * float(_experts.SHIFT_UP.value)
    assert np.array_equal(exact, expected) and np.array_equal(np.signbit(exact), np.signbit(expected))


def test_rows_for_fragments_lie_where_their_weights_are_decoded():
    """NVFP4: element 4 t + q of block b of a pair lies at 8 t + 4 b + the place of q among 0, 2, 1, 3. MX formats: element q
    of eight at the place of q among 0, 4, 1, 5, 2, 6, 3, 7, and 2^64 times as large."""
    says_the_same(PLACES, "cpu")


PLACES = """
import torch, mxref
from accel.triton import moe_experts as kernels
from mxref.conformance import inputs
from mxref.recipes import resolve_recipe

x, ids = inputs.spread_normal(3, 256, seed=2), torch.zeros(3, 1, dtype=torch.int64)


def rows(name, weight, scale, places):
    format, weight = mxref.BLOCK_FORMATS[name], mxref.quantize(inputs.spread_normal(2, 16, 256, seed=1), weight)
    return kernels.quantize_rows(x, 3, 256, format, resolve_recipe(None, format), scale, weight, places, ids, 2, 1).values[0]


plain, found = (rows("nvfp4", "nvfp4", "per_row", places) for places in ("plain", "fragments"))
for k in range(256):
    pair, block, t, q = k // 32, k // 16 % 2, k // 4 % 4, k % 4
    assert torch.equal(found[:, 32 * pair + 8 * t + 4 * block + [0, 2, 1, 3].index(q)], plain[:, k]), k
for name in ("mxfp4", "mxfp6_e3m2", "mxint8"):
    plain, found = (rows(name, "mxfp4", None, places) for places in ("plain", "pairs"))
    for k in range(256):
        assert torch.equal(found[:, k // 8 * 8 + [0, 4, 1, 5, 2, 6, 3, 7].index(k % 8)], plain[:, k] * 2.0**64), (name, k)
print("the same")
"""
