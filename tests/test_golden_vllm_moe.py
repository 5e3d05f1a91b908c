"""Expert layers as vLLM 0.33.0's emulation runs them, on its recorded inputs (`data/golden_vllm_moe.npz.xz`).

Recorded on CPU: dequantized weights and quantized activations are vLLM's (and AMD Quark's) own functions; the loop over
experts, activations and sums restate vLLM's GPU code, products summed in float64. An order of float32 sums may differ from
that by a bfloat16 ulp; here no bit of any output does.
"""

import hashlib

import pytest
import torch
from bits import assert_same_bits
from golden import load

import mxref
from mxref.models.layers import gate_scale_for_both

G = load("vllm_moe")
X, IDS, WEIGHTS = G["shared.x"], G["shared.topk_ids"].long(), G["shared.topk_weights"]
RECIPES = {"nvfp4": "nvidia", "mxfp4": "quark_even"}
AS_VLLM = dict(activation="silu_rounded_twice", semantics="dequantized", round_per_slot=torch.bfloat16)


def weight(case, name, format):
    """One of the two stacks; w13's tensor scales are two an expert, gate's and up's."""
    packed, scales = G[f"{case}.{name}_weight"], G[f"{case}.{name}_weight_scale"]
    tensor_scale = None
    if format == "nvfp4":
        tensor_scale = G[f"{case}.{name}_weight_scale_2"]
        if tensor_scale.ndim == 2:
            tensor_scale = tensor_scale.repeat_interleave(packed.shape[1] // 2, dim=1)[..., None]
        else:
            tensor_scale = tensor_scale[:, None, None]
    return mxref.BlockTensor(packed, 2 * packed.shape[-1], scales, tensor_scale, format, RECIPES[format])


def assert_digest(q, key):
    bits = mxref.dequantize(q, torch.bfloat16).view(torch.int16).numpy().tobytes()
    assert list(hashlib.sha256(bits).digest()) == G[f"{key}.sha256"].tolist(), key


def nvfp4():
    scales = (G["nvfp4.a1_gscale"].reshape(()), G["nvfp4.a2_gscale"].reshape(()))
    options = dict(AS_VLLM, act_format="nvfp4", act_recipe="vllm_torch", act_tensor_scales=scales)
    return weight("nvfp4", "w13", "nvfp4"), weight("nvfp4", "w2", "nvfp4"), options


def test_weights_decode_and_inputs_are_quantized_as_vllm_does():
    w13, w2, options = nvfp4()
    assert_digest(w13, "nvfp4.w13_dq")
    assert_digest(w2, "nvfp4.w2_dq")
    scale = options["act_tensor_scales"][0]
    assert_same_bits(mxref.qdq(X, "nvfp4", recipe="vllm_torch", tensor_scale=scale), G["nvfp4.x_qdq"])
    for name in ("w13", "w2"):
        assert_digest(weight("mxfp4_weights", name, "mxfp4"), f"mxfp4_weights.{name}_dq")
    assert_digest(weight("gptoss", "w13", "mxfp4"), "gptoss.w13_dq")


def test_nvfp4_weights_and_activations():
    w13, w2, options = nvfp4()
    assert_same_bits(mxref.moe_experts(X, w13, w2, IDS, WEIGHTS, **options), G["nvfp4.out"])


@pytest.mark.parametrize("rank", ["nvfp4_ep", "nvfp4_ep_other"])
def test_experts_of_one_rank(rank):
    w13, w2, options = nvfp4()
    expert_map = G[f"{rank}.expert_map"].long()
    here = (expert_map >= 0).nonzero().flatten()
    here = here[expert_map[here].argsort()]
    out = mxref.moe_experts(X, w13[here], w2[here], IDS, WEIGHTS, expert_map=expert_map, **options)
    assert_same_bits(out, G[f"{rank}.out"])


def test_weights_only():
    w13, w2 = (weight("mxfp4_weights", name, "mxfp4") for name in ("w13", "w2"))
    assert_same_bits(mxref.moe_experts(X, w13, w2, IDS, WEIGHTS, **AS_VLLM), G["w_mxfp4.out"])
    biases = dict(bias13=G["gptoss.w13_bias"], bias2=G["gptoss.w2_bias"])
    options = dict(AS_VLLM, activation="swiglu_oai", gate_up="interleaved", **biases)
    w13 = weight("gptoss", "w13", "mxfp4")
    assert_same_bits(mxref.moe_experts(X, w13, w2, IDS, WEIGHTS, **options), G["gptoss.out"])
    w13, w2 = (
        mxref.BlockTensor(codes, codes.shape[-1], G[f"mxfp8.{name}_weight_scale"], None, "mxfp8_e4m3", "ocp")
        for name, codes in (("w13", G["mxfp8.w13_weight_u8"]), ("w2", G["mxfp8.w2_weight_u8"]))
    )
    assert_same_bits(mxref.moe_experts(X, w13, w2, IDS, WEIGHTS, **AS_VLLM), G["mxfp8.out"])


def test_where_gate_and_up_differ_both_scales_are_honoured_and_vllms_answer_is_there_by_name():
    """vLLM reads the gate's column alone, so its output is the recorded one whatever the other column says."""
    w13, w2, options = nvfp4()
    half = w13.shape[1] // 2
    doubled = w13.tensor_scale.clone()
    doubled[:, half:] *= 2
    differing = mxref.BlockTensor(w13.packed, w13.length, w13.scales, doubled, w13.format, w13.recipe)
    as_vllm = mxref.moe_experts(X, gate_scale_for_both(differing), w2, IDS, WEIGHTS, **options)
    assert_same_bits(as_vllm, G["nvfp4.out"])
    decoded = mxref.dequantize(w13)
    decoded[:, half:] *= 2  # exact
    assert_same_bits(mxref.dequantize(differing), decoded)
    honoured = mxref.moe_experts(X, differing, w2, IDS, WEIGHTS, **options)
    assert not torch.equal(honoured, G["nvfp4.out"])
