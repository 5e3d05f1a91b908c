"""`mxref.models.load`: real checkpoints compute what their tools compute, and what does not fit is refused by name.

MXREF_CHECKPOINTS names a directory of whole checkpoints to run the first tests on besides the one that is kept here.
"""

import hashlib
import itertools
import json
import math
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from bits import assert_same_bits

pytest.importorskip("transformers")

import transformers
from safetensors.torch import load_file, save_file
from test_checkpoints import copy
from tiny_models import MOE_KINDS, tiny_model
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForCausalLM

import mxref
from docs._generate.storage import TRANSFORMERS
from mxref.checkpoints import CheckpointError, convert_checkpoint, inspect_checkpoint
from mxref.checkpoints.files import Shards
from mxref.models import MXExperts, MXLinear, evaluate, load
from mxref.models.layers import inputs_quantized, stored_scheme

DATA = Path(__file__).parent / "data" / "checkpoints"
KEPT = "llmcompressor-nvfp4-qwen3moe"
SHARED = Path(os.environ["MXREF_CHECKPOINTS"]) if os.environ.get("MXREF_CHECKPOINTS") else None
WHOLE = [None] + (sorted(path.parent for path in SHARED.glob("*/model.safetensors")) if SHARED else [])
TOOLS = [path for path in WHOLE if path is None or path.name.startswith(("llmcompressor", "quark", "gptoss"))]

# Of a model of stated weights, the logits' sha256 on a machine whose kernels give every golden logit.
PROBE = "8461c608973ef1ad"


def label(path):
    return f"{KEPT}-kept" if path is None else path.name


@pytest.fixture(scope="session")
def kept(tmp_path_factory):
    """The whole checkpoint of llm-compressor that is kept in the repository."""
    folder = tmp_path_factory.mktemp("whole")
    with tarfile.open(DATA / "whole.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / KEPT


@pytest.fixture
def whole(request, kept):
    """A path, the kept checkpoint for None."""
    return kept if request.param is None else request.param


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits.float()


def golden_logits(path):
    """Input ids, and the logits of the tool itself."""
    golden = load_file(next(path.glob("golden_logits*.safetensors")))
    ids = golden.pop("input_ids")
    (expected,) = golden.values()
    return ids, expected


@pytest.fixture(scope="session")
def same_kernels(kept):
    """Skips where torch's bfloat16 kernels sum in another order than those that made the golden logits."""
    config = AutoConfig.from_pretrained(kept)
    del config.quantization_config
    probe = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for index, parameter in enumerate(probe.parameters()):
        i = torch.arange(parameter.numel(), dtype=torch.int64) + 7919 * index
        values = ((i * i * 48271 + i * 69621) % 65521 - 32760).float() / 2**18
        values = values * 2.0 ** -(i * 40503 % 7).float() + (parameter.ndim == 1)
        parameter.data.copy_(values.view(parameter.shape))
    probe.set_experts_implementation("eager")
    found = logits(probe, torch.arange(512).view(8, 64) * 10 % 509)
    if hashlib.sha256(found.numpy().tobytes()).hexdigest()[:16] != PROBE:
        pytest.skip("this machine's bfloat16 kernels round otherwise than those that made the golden logits")


# real checkpoints


@pytest.mark.parametrize("whole", TOOLS, ids=label, indirect=True)
def test_logits_are_those_of_the_tool_that_wrote_the_checkpoint(whole, same_kernels):
    ids, expected = golden_logits(whole)
    assert_same_bits(logits(load(whole), ids), expected)


def before_export(model, originals):
    """`model` with every linear's weight as ModelOpt has it in its own forward pass, under a tensor scale of its own;
    and the names of those that differ. Its export quantizes q, k and v again, under the largest of their scales."""
    differing = []
    for name, module in model.named_modules():
        if isinstance(module, MXLinear) and f"{name}.weight" in originals:
            stored, own = module.weight, mxref.quantize(originals[f"{name}.weight"], "nvfp4", recipe="modelopt_nvfp4")
            again = mxref.quantize(
                originals[f"{name}.weight"], "nvfp4", recipe="modelopt_nvfp4", tensor_scale=stored.tensor_scale
            )
            assert_same_bits(stored.packed, again.packed, name)
            assert_same_bits(stored.scales, again.scales, name)
            differing += [name] if own.tensor_scale != stored.tensor_scale else []
            module.weight = own
    return model, differing


@pytest.mark.parametrize("name", ["kept", *(path.name for path in WHOLE if path and "modelopt-nvfp4" in path.name)])
def test_modelopts_logits_are_met_once_its_export_is_undone(name, kept, same_kernels):
    """The bound is 0 where q, k and v have the scales of the recorded pass; what the export does to them is all the rest."""
    if name == "kept":
        whole = kept.parent / "modelopt-nvfp4-qwen3moe"
        originals = whole / "original.safetensors"
    else:
        whole, originals = SHARED / name, SHARED / name.replace("modelopt-nvfp4", "base") / "model.safetensors"
    ids, expected = golden_logits(whole)
    model, differing = before_export(load(whole), load_file(originals))
    assert differing and all(each.endswith(("q_proj", "k_proj", "v_proj")) for each in differing)
    assert_same_bits(logits(model, ids), expected)
    assert not torch.equal(logits(load(whole), ids), expected)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def by_hand(path):
    """The checkpoint of llm-compressor in NVFP4 by transformers' own Qwen3-MoE: weights decoded and inputs quantized with
    torch, numpy and ml_dtypes alone."""
    stored = load_file(path / "model.safetensors")
    config = AutoConfig.from_pretrained(path)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()

    def weight(stem):
        packed, scales = stored[f"{stem}.weight_packed"], stored[f"{stem}.weight_scale"].float()
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1).long()
        values = E2M1[codes & 7] * (1 - 2 * (codes >> 3))
        factor = scales / stored[f"{stem}.weight_global_scale"]
        return (values.unflatten(1, (-1, 16)) * factor[..., None]).flatten(1).bfloat16()

    def fake_quantized(x, scale):
        blocks = x.unflatten(-1, (-1, 16))
        amax = (blocks.abs().amax(-1, keepdim=True) / 6).float()  # in bfloat16, as the input
        block_scale = (scale * amax).clamp(max=448).to(torch.float8_e4m3fn).float()
        factor = torch.where(block_scale == 0, 0.125, block_scale) / scale
        quotient = (blocks.float() / factor).clamp(-6, 6).numpy()
        rounded = torch.from_numpy(quotient.astype(ml_dtypes.float4_e2m1fn).astype(np.float32))
        return (rounded * factor).bfloat16().flatten(-2)

    class Expert:
        def __init__(self, stem):
            parts = ("gate_proj", "up_proj", "down_proj")
            self.weights = [weight(f"{stem}.{part}") for part in parts]
            self.scales = [stored[f"{stem}.{part}.input_global_scale"] for part in parts]

        def __call__(self, x):
            gate, up = (linear(fake_quantized(x, s), w) for w, s in zip(self.weights[:2], self.scales[:2]))
            hidden = torch.nn.functional.silu(gate) * up
            return linear(fake_quantized(hidden, self.scales[2]), self.weights[2])

    class Experts(torch.nn.Module):
        def __init__(self, name, count):
            super().__init__()
            self.each = [Expert(f"{name}.{index}") for index in range(count)]

        def forward(self, x, ids, weights):
            out = torch.zeros_like(x)
            for index, expert in enumerate(self.each):
                token, slot = (ids == index).nonzero(as_tuple=True)
                if len(token):
                    out[token] += expert(x[token]) * weights[token, slot, None]
            return out

    plain = {name: tensor for name, tensor in stored.items() if ".experts." not in name}
    left = model.load_state_dict(plain, strict=False)
    assert not left.unexpected_keys and all(".experts." in name for name in left.missing_keys)
    for index, layer in enumerate(model.model.layers):
        layer.mlp.experts = Experts(f"model.layers.{index}.mlp.experts", config.num_experts)
    return model


def test_logits_are_those_of_a_forward_pass_written_by_hand(kept):
    ids, _ = golden_logits(kept)
    assert_same_bits(logits(load(kept), ids), logits(by_hand(kept), ids))


MISLOADED = ["llmcompressor-nvfp4-qwen3moe", "llmcompressor-nvfp4a16-qwen3moe", "llmcompressor-nvfp4-mixtral"]
MISLOADED += ["llmcompressor-nvfp4-gptoss"]


@pytest.mark.parametrize("whole", [None, *(SHARED / name for name in MISLOADED if SHARED)], ids=label, indirect=True)
def test_what_transformers_loads_wrongly_is_loaded_right(whole):
    """transformers 5.24 drops the tensor scale of the first two, and initializes the experts of the others anew."""
    pytest.importorskip("compressed_tensors")
    ids, golden = golden_logits(whole)
    theirs = logits(AutoModelForCausalLM.from_pretrained(whole, dtype="auto"), ids)
    ours = logits(load(whole), ids)
    assert (ours - golden).norm() < (theirs - golden).norm()


@pytest.mark.skipif(SHARED is None, reason="needs MXREF_CHECKPOINTS")
@pytest.mark.parametrize("name", MISLOADED)
def test_evaluated_it_is_nearer_to_its_original_than_what_transformers_loads(name):
    whole, base = SHARED / name, SHARED / f"base-{name.split('-')[-1]}"
    options = dict(against=base, tokens=1024, activations=["same"])
    report = evaluate(whole, SHARED / "base-tokenizer", **options)
    row = report.rows[1]
    loaded = AutoModelForCausalLM.from_pretrained(whole, dtype="auto")
    theirs = evaluate(loaded, SHARED / "base-tokenizer", **options, formats=["mxfp8_e4m3"]).rows[1]
    assert row.agreement > theirs.agreement
    assert row.divergence < theirs.divergence
    assert report.rows[0].label == "bf16 (against) / bf16"
    assert row.activations == ("bf16" if "a16" in name else "nvfp4")


@pytest.mark.skipif(not transformers.__version__.startswith("5.24"), reason="the book says it of transformers 5.24")
@pytest.mark.parametrize("dialect, format", TRANSFORMERS)
def test_transformers_makes_of_what_is_written_what_the_book_says(dialect, format, tmp_path):
    needed = {"torchao": "torchao", "compressed-tensors": "compressed_tensors", "gpt-oss": "accelerate"}
    pytest.importorskip(needed.get(dialect, "transformers"))
    kind, width = ("gptoss", "intermediate_size") if dialect == "gpt-oss" else ("qwen3moe", "moe_intermediate_size")
    tiny_model(kind, **{width: 64}).save_pretrained(tmp_path / "in")
    convert_checkpoint(tmp_path / "in", tmp_path / "out", to=dialect, format=format)
    ours = {name: t for name, t in load(tmp_path / "out", dequantized=True).state_dict().items() if "experts" in name}
    try:
        model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    except RuntimeError:
        found = "refused"
    else:
        theirs = model.state_dict()
        same = all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())
        found = "initialized anew" if set(ours) & set(info["missing_keys"]) else "bit for bit" if same else "other values"
    assert found == TRANSFORMERS[dialect, format]


# made checkpoints: the weights of a small model, quantized by mxref and stored as a tool names them

PARTS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
RECIPES = {"mxfp4": "compressed_tensors_mxfp4", "nvfp4": "compressed_tensors_nvfp4"}


def matrices(model):
    """Names and matrices of every expert and of the attention's output, as a checkpoint names them; biases too."""
    found = {}
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            first, down = module.gate_up_proj.data, module.down_proj.data
            first, down = (t.transpose(1, 2) if module.is_transposed else t for t in (first, down))
            half = first.shape[1] // 2
            gate, up = (first[:, :half], first[:, half:]) if module.is_concatenated else (first[:, 0::2], first[:, 1::2])
            for part, weights in (("gate", gate), ("up", up), ("down", down)):
                for expert, weight in enumerate(weights):
                    found[f"{name}.{expert}.{PARTS[part]}.weight"] = weight.contiguous()
            if module.has_bias:
                for part, biases in (
                    ("gate", module.gate_up_proj_bias.data[:, 0::2]),
                    ("up", module.gate_up_proj_bias.data[:, 1::2]),
                    ("down", module.down_proj_bias.data),
                ):
                    for expert, bias in enumerate(biases):
                        found[f"{name}.{expert}.{PARTS[part]}.bias"] = bias.contiguous()
        elif name.endswith("o_proj"):
            found[f"{name}.weight"] = module.weight.data
    return found


def make(folder, kind="qwen3moe", format="mxfp4", activations=True, change=None, config=None, **model_changes):
    """A checkpoint as llm-compressor stores one, and the model whose weights it holds."""
    model = tiny_model(kind, **model_changes)
    stored = {name: t.clone() for name, t in model.state_dict().items() if ".experts." not in name}
    args = {"num_bits": 4, "type": "float", "group_size": 32 if format == "mxfp4" else 16}
    for name, matrix in matrices(model).items():
        stem = name.removesuffix(".weight")
        if name.endswith("bias"):
            stored[name] = matrix
            continue
        stored.pop(name, None)
        q = mxref.quantize(matrix, format, recipe=RECIPES[format])
        stored[f"{stem}.weight_packed"] = q.packed
        stored[f"{stem}.weight_scale"] = q.scales if format == "mxfp4" else q.scales.view(torch.float8_e4m3fn)
        if format == "nvfp4":
            stored[f"{stem}.weight_global_scale"] = q.tensor_scale.reshape(1)
            stored[f"{stem}.input_global_scale"] = torch.tensor([100.0 + len(stored)])
    if kind == "mixtral":
        stored = {name.replace(".mlp.", ".block_sparse_moe."): tensor for name, tensor in stored.items()}
    if change is not None:
        change(stored)
    folder.mkdir()
    save_file({name: tensor.contiguous().clone() for name, tensor in stored.items()}, folder / "model.safetensors")
    group = {"targets": [r"re:.*\.experts\..*_proj", "re:.*o_proj"], "weights": args}
    dynamic = {"dynamic": "local" if format == "nvfp4" else True}  # of NVFP4 the tensor scale is stored
    group["input_activations"] = {**args, **dynamic} if activations else None
    quantization = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    written = {**model.config.to_dict(), "quantization_config": quantization, **(config or {})}
    (folder / "config.json").write_text(json.dumps(written))
    return folder, model


IDS = torch.tensor([[7, 3, 99, 40, 5, 5, 200, 1], [9, 8, 7, 6, 5, 4, 3, 2]])


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("kind", MOE_KINDS)
def test_every_weight_finds_its_place(kind, format, tmp_path):
    folder, model = make(tmp_path / "made", kind, format)
    decoded = {name: m for name, m in matrices(load(folder, dequantized=True)).items()}
    for name, matrix in matrices(model).items():
        if name.endswith("weight"):
            matrix = mxref.qdq(matrix, format, recipe=RECIPES[format])
        assert_same_bits(decoded[name], matrix, name)
    others = {name: t for name, t in model.state_dict().items() if ".experts." not in name and "o_proj.weight" not in name}
    loaded = load(folder).state_dict()
    for name, tensor in others.items():
        assert_same_bits(loaded[name].to(tensor.dtype), tensor, name)  # what the model keeps in float32 is widened
    plain = load(folder, dequantized=True)
    plain.set_experts_implementation("eager")
    if kind != "gptoss":  # whose experts llm-compressor stores as linears, with another order of roundings
        with inputs_quantized(whole := load(folder), False):
            assert_same_bits(logits(whole, IDS), logits(plain, IDS))


def in_stacks(folder, kind):
    """A checkpoint of experts as gpt-oss stores them, gate and up rows interleaved, and the model whose weights it holds."""
    width = "intermediate_size" if kind == "mixtral" else "moe_intermediate_size"
    model = tiny_model(kind, **{width: 32})  # 2 * 32 rows of 64: what is turned or out of order has the same shape
    stored = {name: t for name, t in model.state_dict().items() if ".experts." not in name}
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            gate, up = module.gate_up_proj.data.chunk(2, dim=1)
            for part, weights in (
                ("gate_up", torch.stack([gate, up], dim=2).flatten(1, 2)),
                ("down", module.down_proj.data),
            ):
                q = mxref.quantize(weights.contiguous(), "mxfp4")
                stored |= {
                    f"{name}.{part}_proj_blocks": q.packed.unflatten(-1, (-1, 16)),
                    f"{name}.{part}_proj_scales": q.scales,
                }
    folder.mkdir()
    save_file({name: tensor.contiguous().clone() for name, tensor in stored.items()}, folder / "model.safetensors")
    written = {**model.config.to_dict(), "quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(written))
    return folder, model


@pytest.mark.parametrize("kind", ["qwen3moe", "mixtral", "deepseekv3"])
def test_interleaved_rows_of_a_stack_are_decoded_to_the_models_own_order(kind, tmp_path):
    folder, model = in_stacks(tmp_path / "made", kind)
    decoded = load(folder, dequantized=True)
    found = matrices(decoded)
    for name, matrix in matrices(model).items():
        if ".experts." in name:
            assert_same_bits(found[name], mxref.qdq(matrix, "mxfp4"), name)
    decoded.set_experts_implementation("eager")
    assert_same_bits(logits(load(folder), IDS), logits(decoded, IDS))
    convert_checkpoint(folder, tmp_path / "plain", to="plain")
    plain = load(tmp_path / "plain")
    plain.set_experts_implementation("eager")
    assert_same_bits(logits(plain, IDS), logits(decoded, IDS))


@pytest.mark.parametrize("semantics", ["blockwise", "dequantized"])
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_other_semantics_are_moe_experts_and_matmul(format, semantics, tmp_path):
    def equal_scales(stored):
        for name in [name for name in stored if name.endswith("up_proj.input_global_scale")]:
            stored[name] = stored[name.replace("up_proj", "gate_proj")]

    folder, model = make(tmp_path / "made", "gptoss", format, change=equal_scales)
    stored = load_file(folder / "model.safetensors")
    loaded = load(folder, semantics=semantics)
    experts, o_proj = loaded.model.layers[1].mlp.experts, loaded.model.layers[1].self_attn.o_proj
    assert type(experts) is MXExperts and type(o_proj) is MXLinear
    torch.manual_seed(1)
    x = torch.randn(5, 64).bfloat16()
    ids, weights = torch.tensor([[0, 1], [3, 2], [1, 3], [2, 0], [1, 0]]), torch.rand(5, 2)
    parts = matrices(model)
    stem = "model.layers.1.mlp.experts"
    gate, up, down = (
        [mxref.quantize(parts[f"{stem}.{e}.{part}.weight"], format, recipe=RECIPES[format]) for e in range(4)]
        for part in PARTS.values()
    )
    bias13 = torch.stack([torch.cat([parts[f"{stem}.{e}.{p}.bias"] for p in ("gate_proj", "up_proj")]) for e in range(4)])
    bias2 = torch.stack([parts[f"{stem}.{e}.down_proj.bias"] for e in range(4)])

    def together(each):  # [E, N, K] of matrices, each row with the tensor scale of its own
        rows = [q.tensor_scale.reshape(1, 1).expand(len(q.codes), 1) if format == "nvfp4" else None for q in each]
        scale = torch.stack(rows) if format == "nvfp4" else None
        codes, scales = torch.stack([q.codes for q in each]), torch.stack([q.scales for q in each])
        return mxref.BlockTensor.from_codes(codes, scales, scale, each[0].format, each[0].recipe)

    def above(g, u):
        scale = None
        if format == "nvfp4":
            scale = torch.cat([q.tensor_scale.reshape(1, 1).expand(len(q.codes), 1) for q in (g, u)])
        return torch.cat([g.codes, u.codes]), torch.cat([g.scales, u.scales]), scale

    stacked = [above(g, u) for g, u in zip(gate, up)]
    w13 = mxref.BlockTensor.from_codes(
        torch.stack([codes for codes, _, _ in stacked]),
        torch.stack([scales for _, scales, _ in stacked]),
        torch.stack([scale for _, _, scale in stacked]) if format == "nvfp4" else None,
        format,
        RECIPES[format],
    )
    act_scales = None
    if format == "nvfp4":
        act_scales = tuple(
            torch.cat([stored[f"{stem}.{e}.{part}.input_global_scale"] for e in range(4)])
            for part in ("gate_proj", "down_proj")
        )
    expected = mxref.moe_experts(
        x, w13, together(down), ids, weights, activation="swiglu_oai", act_format=format, act_recipe=RECIPES[format],
        act_tensor_scales=act_scales, bias13=bias13, bias2=bias2, semantics=semantics,
    )  # fmt: skip
    assert_same_bits(experts(x, ids, weights), expected)
    name = "model.layers.1.self_attn.o_proj"
    scale = stored[f"{name}.input_global_scale"].reshape(()) if format == "nvfp4" else None
    a = mxref.quantize(x, format, recipe=RECIPES[format], tensor_scale=scale)
    w = mxref.quantize(parts[f"{name}.weight"], format, recipe=RECIPES[format])
    bias = model.model.layers[1].self_attn.o_proj.bias.data
    assert_same_bits(o_proj(x), mxref.matmul(a, w, bias=bias, out_dtype=torch.bfloat16, semantics=semantics))


def test_stacks_taken_apart_are_the_same_weights_and_torch_alone_rounds_them_in_another_order(tmp_path):
    tiny_model("gptoss", intermediate_size=64).save_pretrained(tmp_path / "in")
    stacks, linears = tmp_path / "stacks", tmp_path / "linears"
    convert_checkpoint(tmp_path / "in", stacks, to="gpt-oss")
    convert_checkpoint(stacks, linears, to="compressed-tensors")
    for semantics in ("blockwise", "dequantized"):
        assert_same_bits(logits(load(stacks, semantics=semantics), IDS), logits(load(linears, semantics=semantics), IDS))
    own, apart = load(stacks), load(linears)
    assert not torch.equal(logits(own, IDS), logits(apart, IDS))
    for layer in apart.modules():
        if isinstance(layer, MXExperts):
            layer.stored_as = "stacks"
    assert_same_bits(logits(own, IDS), logits(apart, IDS))


def test_scales_of_a_model_without_any_are_refused(tmp_path):
    tiny_model("qwen3moe").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="scales='vllm' is for stored scales, and .* has none: nothing in it is quantized"):
        load(tmp_path, scales="vllm")
    for given in (tmp_path, tiny_model("qwen3moe")):
        with pytest.raises(ValueError, match="scales='vllm' is for the path of a quantized checkpoint, which neither"):
            evaluate(given, scales="vllm", ids="random", formats=["mxfp4"])


def test_gate_and_up_keep_their_scales_or_take_what_vllm_takes(tmp_path):
    folder, model = make(tmp_path / "made", "qwen3moe", "nvfp4")
    stored = load_file(folder / "model.safetensors")
    stem = "model.layers.0.mlp.experts"

    def of(part, kind):
        return torch.cat([stored[f"{stem}.{e}.{part}_proj.{kind}_global_scale"] for e in range(4)])

    experts = load(folder).model.layers[0].mlp.experts
    assert_same_bits(experts.weights.w13.tensor_scale[:, 0, 0], of("gate", "weight"))
    assert_same_bits(experts.weights.w13.tensor_scale[:, -1, 0], of("up", "weight"))
    for part in ("gate", "up", "down"):
        assert_same_bits(getattr(experts.input_scales, part), of(part, "input"))

    vllm = load(folder, scales="vllm").model.layers[0].mlp.experts
    assert set(of("gate", "weight").tolist()) == set(vllm.weights.w13.tensor_scale.flatten().tolist())
    half = vllm.weights.w13.shape[1] // 2
    decoded = mxref.dequantize(experts.weights.w13)[:, half:]
    other = mxref.dequantize(vllm.weights.w13)[:, half:]
    ratio = (of("up", "weight") / of("gate", "weight"))[:, None, None]
    assert torch.allclose(other, decoded * ratio, rtol=2.0**-20)  # three float32 roundings
    first = min(of("gate", "input").min(), of("up", "input").min())  # dividing scales: the smallest is of the largest amax
    assert set(vllm.input_scales.gate.tolist()) == set(vllm.input_scales.up.tolist()) == {first.item()}
    assert set(vllm.input_scales.down.tolist()) == {of("down", "input").min().item()}
    with pytest.raises(ValueError, match="gate and up of expert 0 have input scales .*semantics='torch'.*scales='vllm'"):
        load(folder, semantics="blockwise")
    with pytest.raises(ValueError, match="scales='vllm' is for stored scales, and dequantized=True leaves none"):
        load(folder, scales="vllm", dequantized=True)
    assert load(folder, semantics="blockwise", scales="vllm").model.layers[0].mlp.experts.semantics == "blockwise"


@pytest.mark.parametrize("ratio", [4.0, 0.25])
@pytest.mark.parametrize("kind", ["weight", "input"])
def test_a_mismatch_of_gate_and_up_is_honoured_both_ways_and_vllms_reading_goes_by_name(kind, ratio, tmp_path):
    """The scale of up is `ratio` times the gate's: each weight decodes, and each input is quantized, by its own; with
    scales="vllm" up's weight is wrong by just that factor, and both inputs take the scale of the larger amax."""

    def change(stored):
        for name in [name for name in stored if name.endswith(f"up_proj.{kind}_global_scale")]:
            stored[name] = stored[name.replace("up_proj", "gate_proj")] * ratio

    folder, _ = make(tmp_path / "made", "qwen3moe", "nvfp4", change=change)
    stored = load_file(folder / "model.safetensors")
    stem = "model.layers.0.mlp.experts.1"

    def values(part, scale_of):
        packed, scales = stored[f"{stem}.{part}.weight_packed"], stored[f"{stem}.{part}.weight_scale"].float()
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1).long()
        factor = scales / stored[f"{stem}.{scale_of}.weight_global_scale"]
        elements = E2M1[codes & 7] * (1 - 2 * (codes >> 3))
        return (elements.unflatten(1, (-1, 16)) * factor[..., None]).flatten(1)

    own, vllm = (load(folder, scales=scales).model.layers[0].mlp.experts for scales in ("stored", "vllm"))
    for layer, up_takes in ((own, "up_proj"), (vllm, "gate_proj")):
        gate, up = mxref.dequantize(layer.weights.w13[1]).chunk(2)
        assert torch.equal(gate, values("gate_proj", "gate_proj"))
        assert torch.equal(up, values("up_proj", up_takes))
    if kind == "weight":  # a power of two: the factor is exact
        assert torch.equal(
            mxref.dequantize(vllm.weights.w13[1]).chunk(2)[1], mxref.dequantize(own.weights.w13[1]).chunk(2)[1] * ratio
        )
    gates, ups = own.input_scales.gate, own.input_scales.up
    assert kind == "weight" or torch.equal(ups, gates * ratio)
    assert torch.equal(vllm.input_scales.gate, vllm.input_scales.up)
    assert torch.equal(vllm.input_scales.gate, torch.minimum(gates, ups).min().expand(4))  # it divides: largest amax
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids, weights = torch.full((3, 1), 1), torch.ones(3, 1)
    decoded = [
        mxref.dequantize(own.weights.w13[1], torch.bfloat16).chunk(2),
        mxref.dequantize(own.weights.w2[1], torch.bfloat16),
    ]

    def fake_quantized(rows, scale):
        return mxref.qdq(rows, "nvfp4", recipe=RECIPES["nvfp4"], tensor_scale=scale)

    gate = linear(fake_quantized(x, gates[1]), decoded[0][0])
    up = linear(fake_quantized(x, ups[1]), decoded[0][1])
    hidden = fake_quantized(torch.nn.functional.silu(gate) * up, own.input_scales.down[1])
    assert_same_bits(own(x, ids, weights), linear(hidden, decoded[1]))


def test_moving_a_loaded_model_leaves_codes_and_scales_as_they_are(kept):
    model = load(kept)
    before = model.model.layers[0].mlp.experts
    w13, scales = before.weights.w13, before.input_scales
    moved = model.to(torch.float32).model.layers[0].mlp.experts
    assert_same_bits(moved.weights.w13.packed, w13.packed)
    assert_same_bits(moved.weights.w13.tensor_scale, w13.tensor_scale)
    assert_same_bits(moved.input_scales.down, scales.down)
    assert next(model.parameters()).dtype == torch.float32
    ids, expected = golden_logits(kept)
    assert (logits(model, ids) - expected).norm() < (logits(load(kept, dtype=torch.float16), ids) * 0 - expected).norm()


def test_bits_per_weight_are_those_of_the_files(kept):
    scheme = stored_scheme(load(kept))
    assert scheme.bits / scheme.elements == inspect_checkpoint(kept).bits_per_weight
    assert (scheme.formats, scheme.activations) == (("nvfp4",), "nvfp4")


def test_each_tensor_is_read_once_and_none_before_its_place_is_known(kept, monkeypatch):
    reads = []
    read = Shards.read
    monkeypatch.setattr(Shards, "read", lambda self, name: reads.append(name) or read(self, name))
    load(kept)
    assert sorted(reads) == sorted(load_file(kept / "model.safetensors"))


CHOICES = [("ignore", pattern) for pattern in ("*.experts*", "*.experts.0.*", "*gate_up_proj", "*.down_proj", "*layers.0*")]
CHOICES += [("include", pattern) for pattern in ("*embed_tokens", "*.gate", "*.router", "lm_head", "*norm", "*")]


@pytest.mark.parametrize(
    "kind, to, format, refused",
    [
        ("qwen3moe", "modelopt", "nvfp4", {"*.experts.0.*", "*.down_proj", "*embed_tokens", "*.gate", "*"}),
        ("mixtral", "quark", "mxfp4", {"*.experts.0.*", "*embed_tokens", "*.gate", "*"}),
        ("gptoss", "compressed-tensors", "nvfp4", {"*gate_up_proj", "*.down_proj", "*embed_tokens", "*.router", "*"}),
        ("gptoss", "gpt-oss", "mxfp4", {"*gate_up_proj", "*.down_proj", "*embed_tokens", "*.router", "lm_head", "*"}),
    ],
)
def test_whatever_is_converted_is_a_model_again_or_refused_by_the_option(kind, to, format, refused, tmp_path):
    tiny_model(kind, **{"moe_intermediate_size" if kind == "qwen3moe" else "intermediate_size": 64}).save_pretrained(
        tmp_path
    )
    names, found = set(load_file(tmp_path / "model.safetensors")), set()
    for i, (option, pattern) in enumerate(CHOICES):
        out = tmp_path.parent / f"{tmp_path.name}-{i}"
        try:
            convert_checkpoint(tmp_path, out, to=to, format=format, measure_losses=False, **{option: [pattern]})
        except ValueError as refusal:
            if "matches no module" not in str(refusal) and "nothing to quantize" not in str(refusal):
                assert str(refusal).startswith(f"{option}={pattern!r}") and any(name in str(refusal) for name in names)
                found.add(pattern)
            assert not out.exists()
        else:
            load(out)
    assert found == refused


# what does not fit

Q, EXPERT = "model.layers.1.self_attn.o_proj", "model.layers.1.mlp.experts.2"


def drop(*names):
    return lambda stored: [stored.pop(name) for name in names]


def put(name, change):
    return lambda stored: stored.update({name: change(stored.get(name))})


REFUSED = [
    (drop("model.norm.weight"), {}, r"missing: model\.norm\.weight$"),
    (drop(f"{EXPERT}.up_proj.weight_packed"), {}, r"up_proj\.weight_scale: scales without codes"),
    (drop(f"{EXPERT}.up_proj.weight_packed", f"{EXPERT}.up_proj.weight_scale", f"{EXPERT}.up_proj.weight_global_scale",
          f"{EXPERT}.up_proj.input_global_scale"), {}, r"missing: model\.layers\.1\.mlp\.experts\.2\.up_proj: 1 of 4"),
    (drop(f"{Q}.weight_packed", f"{Q}.weight_scale", f"{Q}.weight_global_scale", f"{Q}.input_global_scale"), {},
     r"missing: model\.layers\.1\.self_attn\.o_proj\.weight$"),
    (drop(f"{Q}.input_global_scale"), {}, r"o_proj\.weight: no input scale, which the config says"),
    (drop(f"{EXPERT}.down_proj.input_global_scale"), {}, r"experts\.2\.down_proj\.weight: no input scale"),
    (put(f"{Q}.input_global_scale", lambda s: s * 0), {}, r"o_proj\.weight: an input scale is 0\.0.*never seen"),
    (put(f"{EXPERT}.down_proj.input_global_scale", lambda s: s * 0), {}, r"experts \(down\): an input scale is 0\.0"),
    (put(f"{EXPERT}.up_proj.input_global_scale", lambda s: s * torch.nan), {}, r"experts \(up\): an input scale is nan"),
    (put("model.extra.weight", lambda _: torch.ones(2)), {},
     r"no place in Qwen3MoeForCausalLM: model\.extra\.weight; ignore= leaves tensors out$"),
    (put("model.layers.0.mlp.experts.9.up_proj.weight", lambda _: torch.ones(48, 64)), {},
     r"which the config says is quantized|no place in"),
    (put("model.norm.weight", lambda t: t[:5]), {}, r"shape: model\.norm\.weight: \[5\], and by the config \[64\]"),
    (put("model.norm.weight", lambda t: t.to(torch.int32)), {}, r"dtype torch\.int32: the model expects float"),
    (put("model.norm.weight", lambda t: t.to(torch.float8_e4m3fn)), {}, r"norm\.weight has dtype torch\.float8_e4m3fn"),
    (put(f"{EXPERT}.up_proj.weight", lambda _: torch.ones(48, 64)), {}, r"up_proj\.weight.* a second time"),
    (None, {"num_hidden_layers": 3}, r"missing: \*\.layers\.2: 1 of 3 layers are not there$"),
    (None, {"num_hidden_layers": 10**5}, r"missing: \*\.layers\.2: 99998 of 100000 layers are not there$"),
    (None, {"num_local_experts": 10**8}, r"missing: .*\.experts\.4\.down_proj: 99999996 of 100000000 experts are not"),
    (None, {"head_dim": 10**10}, r"shape: .*k_norm\.weight: \[32\], and by the config \[10000000000\]$"),
    (None, {"head_dim": -1}, r"config: config\.json: head_dim -1: expected a whole number of at least 1$"),
    (None, {"num_hidden_layers": 1}, r"no place in Qwen3MoeForCausalLM: model\.layers\.1\."),
    (None, {"num_experts": 5, "num_local_experts": 5}, r"missing: .*\.experts\.4\.down_proj: 1 of 5 experts"),
    (None, {"num_experts": 8}, r"num_experts 8 and num_local_experts 4: expected one number of experts$"),
    (None, {"num_experts_per_tok": 5}, r"num_experts_per_tok 5, which num_local_experts 4 cannot give$"),
    (None, {"num_experts_per_tok": 0}, r"num_experts_per_tok 0, which num_local_experts 4 cannot give$"),
    (None, {"hidden_size": 128}, r"shape: lm_head\.weight: \[256, 64\], and by the config \[256, 128\]$"),
    (None, {"model_type": "no_such_model"}, "config.json describes no causal language model.*no_such_model"),
    (None, {"text_config": [1]}, r"config.json gives list \[1\] as the config of the language model: expected an object"),
    (None, {"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method='bitsandbytes'"),
]  # fmt: skip


@pytest.mark.parametrize("change, config, message", REFUSED, ids=range(len(REFUSED)))
def test_what_does_not_fit_is_refused_by_name(change, config, message, tmp_path):
    folder, _ = make(tmp_path / "made", "qwen3moe", "nvfp4", change=change, config=config)
    with pytest.raises(ValueError, match=message) as refusal:
        load(folder)
    assert "\n" not in str(refusal.value)


def test_a_default_that_takes_more_experts_than_there_are_is_refused(tmp_path):
    folder, _ = make(tmp_path / "made")
    config = json.loads((folder / "config.json").read_text())
    del config["num_experts_per_tok"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"num_experts_per_tok 8: expected 1 to 4, the experts of model\.layers\.0\.mlp"
    ):
        load(folder)


NORM, SCALES = "model.norm.weight", "weight_scale"


@pytest.mark.parametrize(
    "name, change, value",
    [
        (NORM, lambda t: t.float() * 0 + 65520, "65520"),  # half a unit beyond the largest, 65504, rounds to Inf
        (f"{Q}.{SCALES}", lambda t: t * 0 + 127 + 17, r"-?\d+"),  # 2^17 is beyond it, and an element at least 0.5
        (f"{EXPERT}.down_proj.{SCALES}", lambda t: t * 0 + 127 + 17, r"-?\d+"),
    ],
)
def test_values_beyond_the_range_of_float16_are_refused_by_name(name, change, value, tmp_path):
    folder, _ = make(tmp_path / "made", change=put(name, change))
    message = rf"{name.removesuffix('_scale')} holds {value}, beyond the range of torch\.float16: expected a wider dtype="
    for dequantized in (False, True):
        with pytest.raises(CheckpointError, match=message):
            load(folder, dtype=torch.float16, dequantized=dequantized)
        for dtype in (torch.bfloat16, torch.float32):
            load(folder, dtype=dtype, dequantized=dequantized)
    folder, _ = make(tmp_path / "within", change=put(NORM, lambda t: torch.full_like(t, 65519, dtype=torch.float32)))
    assert load(folder, dtype=torch.float16).model.norm.weight[0] == 65504
    folder, _ = make(tmp_path / "infinite", change=put(NORM, lambda t: t * torch.inf))
    assert load(folder, dtype=torch.float16).model.norm.weight.isinf().all()


def test_a_stack_beside_one_experts_matrices_is_stored_twice(tmp_path):
    biases = put("model.layers.1.mlp.experts.gate_up_proj_bias", lambda _: torch.full((4, 96), 9.0))
    folder, _ = make(tmp_path / "biases", "gptoss", "nvfp4", change=biases)
    with pytest.raises(CheckpointError, match=r"_proj.*bias is stored a second time, as .*bias"):
        load(folder)

    def floats(stored):
        for name in [name for name in stored if name.endswith(("_packed", "_scale"))]:
            del stored[name]
        for expert, part in itertools.product(range(4), ("gate_proj", "up_proj", "w1")):
            stored[f"model.layers.1.mlp.experts.{expert}.{part}.weight"] = torch.ones(48, 64)

    folder, _ = make(tmp_path / "w1", change=floats, config={"quantization_config": None})
    with pytest.raises(CheckpointError, match=r"experts\.0\.w1\.weight is stored a second time, as .*gate_proj"):
        load(folder)


def args(**others):
    return {"num_bits": 4, "type": "float", "group_size": 32, **others}


FLOATS = ["lm_head", "re:.*[qkv]_proj$"]  # what `make` does not quantize
UNREAD = [
    (
        {"config_groups": {"g": {"weights": args(), "input_activations": args(num_bits=8, group_size=None)}}},
        "input_activations",
    ),
    ({"config_groups": {"g": {"weights": args(), "output_activations": args()}}}, "output_activations"),
    ({"config_groups": {"a": {"weights": args(), "input_activations": args()}, "b": {"weights": args()}}}, "differ between"),
]


@pytest.mark.parametrize("says, message", UNREAD, ids=range(len(UNREAD)))
def test_a_scheme_that_cannot_be_run_is_refused_and_can_be_decoded(says, message, tmp_path):
    quantization = {"quant_method": "compressed-tensors", "ignore": FLOATS, **says}
    folder, _ = make(tmp_path / "made", config={"quantization_config": quantization})
    with pytest.raises(CheckpointError, match=f"the config says .*{message}.*; dequantized=True takes the weights alone"):
        load(folder)
    decoded = load(folder, dequantized=True)
    assert not stored_scheme(decoded)
    for argument, model in (("model", folder), ("against", decoded)):
        given = {"model": model, argument: folder}
        with pytest.raises(
            CheckpointError, match=f"^{argument}=.*: the config says .*{message}.*; what `mxref convert --to plain`"
        ):
            evaluate(**given, ids="random")
    convert_checkpoint(folder, tmp_path / "plain", to="plain")
    plain = load(tmp_path / "plain")
    assert_same_bits(logits(plain, IDS), logits(decoded, IDS))


def test_a_transform_is_refused_decoded_too(tmp_path):
    says = {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}
    folder, _ = make(tmp_path / "made", config={"text_config": {"quantization_config": says}, "quantization_config": {}})
    for dequantized in (False, True):
        with pytest.raises(CheckpointError, match="the config says transform_config .*hadamard.*stored rotated"):
            load(folder, dequantized=dequantized)


def test_a_quantized_kv_cache_is_a_warning_and_changes_nothing(tmp_path):
    folder, _ = make(tmp_path / "made")
    expected = logits(load(folder), IDS)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match='the config says kv_cache_scheme .*"num_bits": 8.*: the KV cache is left as it is'):
        assert_same_bits(logits(load(folder), IDS), expected)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"semantics": "exact"}, "semantics='exact': expected one of torch, blockwise, dequantized"),
        ({"scales": "largest"}, "scales='largest': expected one of stored, vllm"),
        ({"device": "nosuch"}, "device='nosuch'"),
        ({"device": "meta"}, "device='meta': expected a device that holds values"),
        ({"dtype": torch.float64}, "dtype.*float64"),
        ({"dialect": "gguf"}, "dialect='gguf': expected one of plain"),
        ({"ignore": "*.x"}, r"ignore='\*\.x': expected a sequence of str"),
        ({"ignore": None}, "ignore=None: expected a sequence of str"),
    ],
)
def test_bad_arguments_are_refused_by_name(options, message, kept):
    with pytest.raises((ValueError, TypeError), match=message):
        load(kept, **options)


@pytest.mark.parametrize("opened", [load, lambda path: evaluate(path, formats=["mxfp4"], ids=[1, 2] * 64, window=2)])
def test_a_dtype_that_nothing_runs_in_is_refused_at_once(opened, tmp_path):
    folder, _ = make(tmp_path / "made", config={"dtype": "float64"})
    with pytest.raises(ValueError, match="says dtype float64: expected one of float32, bfloat16, float16"):
        opened(folder)
    plain = tmp_path / "plain"
    tiny_model("qwen3moe").double().save_pretrained(plain)
    with pytest.raises(ValueError, match="says dtype float64: expected one of float32, bfloat16, float16"):
        opened(plain)
    with pytest.raises(ValueError, match="^model: its parameters are float64: expected one of float32"):
        evaluate(tiny_model("qwen3moe").double(), formats=["mxfp4"], ids=[1, 2] * 64, window=2)


def evaluated(path):
    return [row.bits_per_token for row in evaluate(path, formats=["mxfp4"], ids=[1, 2] * 16, window=16).rows]


def test_an_evaluation_finds_what_the_config_says_of_quantization_wherever_it_stands(tmp_path):
    tiny_model("qwen3moe", moe_intermediate_size=64).save_pretrained(tmp_path / "in")
    path = tmp_path / "out"
    convert_checkpoint(tmp_path / "in", path, to="compressed-tensors", format="mxfp8_e4m3")
    expected, config = evaluated(path), json.loads((path / "config.json").read_text())
    config["language_config"] = {"quantization_config": config.pop("quantization_config")}
    (path / "config.json").write_text(json.dumps(config))
    assert evaluated(path) == expected
    del config["language_config"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"\d+ tensors have no place in Qwen3MoeForCausalLM, .*weight_scale among them"):
        evaluated(path)


@pytest.mark.parametrize(
    "name,dtype",
    [
        ("model.layers.0.self_attn.q_proj.weight", torch.float8_e4m3fn),
        ("model.layers.0.mlp.experts.1.up_proj.weight", torch.float8_e4m3fn),
        ("model.norm.weight", torch.int32),
    ],
)
def test_an_evaluation_takes_no_codes_for_values(name, dtype, tmp_path):
    tiny_model("qwen3moe").save_pretrained(tmp_path / "in")
    path = copy(tmp_path / "in", tmp_path / "out", lambda found: found.update({name: found[name].to(dtype)}))
    with pytest.raises(ValueError, match=f"{name} is .*, and nothing says how it is quantized"):
        evaluated(path)


def test_a_dialect_that_the_config_contradicts_is_not_run(tmp_path):
    folder, _ = make(tmp_path / "made", config={"quantization_config": {"quant_method": "quark"}})
    with pytest.raises(CheckpointError, match="says 'quark' and is not heeded.*how inputs are quantized"):
        load(folder, dialect="compressed-tensors")
    assert logits(load(folder, dialect="compressed-tensors", dequantized=True), IDS).isfinite().all()


def test_a_path_of_one_slash_is_said_to_be_no_directory_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "models").mkdir()
    with pytest.raises(ValueError, match=r"^model='models/qwen': no such directory; expected a directory"):
        evaluate("models/qwen")
    with pytest.raises(ValueError, match=r"^model='nowhere/qwen': no such directory; read as a name on the"):
        evaluate("nowhere/qwen")


def test_tensors_can_be_left_out_by_name(tmp_path):
    folder, _ = make(tmp_path / "made", change=put("model.layers.0.self_attn.k_scale", lambda _: torch.ones(1)))
    with pytest.raises(CheckpointError, match=r"no place in .*: model\.layers\.0\.self_attn\.k_scale"):
        load(folder)
    expected = logits(load(folder, ignore=["*.k_scale"]), IDS)
    assert expected.isfinite().all()
    assert_same_bits(logits(load(folder, ignore=[r"re:.*\.self_attn\.[kv]_scale$"]), IDS), expected)
    with pytest.raises(CheckpointError, match=r"missing: model\.norm\.weight$"):
        load(folder, ignore=["*.k_scale", "model.norm"])


def test_scales_of_a_kv_cache_that_the_config_announces_are_left_out(tmp_path):
    added = {f"model.layers.{i}.self_attn.{part}_proj.{part}_scale": torch.ones(()) for i in range(2) for part in "kv"}
    folder, _ = make(tmp_path / "made", change=lambda stored: stored.update(added))
    expected = logits(load(folder, ignore=["*.k_scale", "*.v_scale"]), IDS)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning) as warned:
        assert_same_bits(logits(load(folder), IDS), expected)
    assert ["the KV cache is left as it is" in str(each.message) for each in warned if each.category is UserWarning] == [
        True
    ]
    with pytest.warns(UserWarning, match="the KV cache is left as it is"):
        assert len(evaluate(folder, ids="random", tokens=128, window=64).rows) == 2


@pytest.mark.parametrize("format", [None, "nvfp4"])
def test_layers_of_multi_token_prediction_that_the_config_announces_are_left_out(format, tmp_path):
    tiny_model("deepseekv3").save_pretrained(tmp_path / "c")
    stored = load_file(tmp_path / "c" / "model.safetensors")
    more = {name.replace(".layers.1.", ".layers.2."): t.clone() for name, t in stored.items() if ".layers.1." in name}
    more["model.layers.2.eh_proj.weight"] = torch.ones(64, 128, dtype=torch.bfloat16)
    copy(tmp_path / "c", tmp_path / "d", lambda stored: stored.update(more), config={"num_nextn_predict_layers": 1})
    without, folder = tmp_path / "c", tmp_path / "d"
    if format is not None:
        without, folder = tmp_path / "e", tmp_path / "f"
        convert_checkpoint(tmp_path / "c", without, to="compressed-tensors", format=format)
        convert_checkpoint(tmp_path / "d", folder, to="compressed-tensors", format=format)
    said = "the config says num_nextn_predict_layers 1: layers of multi-token prediction are left out"
    with pytest.warns(UserWarning, match=said):
        assert_same_bits(logits(load(folder), IDS), logits(load(without), IDS))
    with pytest.warns(UserWarning, match=said):
        evaluate(folder, ids="random", tokens=128, window=64, formats=["nvfp4"], activations=["none"])
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"no place in DeepseekV3ForCausalLM: model\.layers\.2\..*; ignore= leaves"):
        load(folder)


LEFT_OUT = {  # of a config, since it is its class's default
    "num_key_value_heads": ("mixtral", {"num_key_value_heads": 8, "num_attention_heads": 16, "head_dim": 8}),
    "moe_intermediate_size": ("qwen3moe", {"moe_intermediate_size": 768}),
}


@pytest.mark.parametrize("key", LEFT_OUT)
def test_a_default_that_the_config_leaves_out_is_no_fault(key, tmp_path):
    kind, sizes = LEFT_OUT[key]
    tiny_model(kind, num_hidden_layers=1, **sizes).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert inspect_checkpoint(tmp_path).findings == ()
    assert_same_bits(logits(load(tmp_path), IDS), logits(AutoModelForCausalLM.from_pretrained(tmp_path), IDS))


def test_a_weight_that_is_left_out_need_not_be_quantized(kept, tmp_path):
    folder = copy(kept, tmp_path / "c")
    tensors = load_file(folder / "model.safetensors")
    save_file(
        tensors | {"model.layers.1.eh_proj.weight": torch.ones(128, 128)}, folder / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(CheckpointError, match=r"not quantized: model\.layers\.1\.eh_proj\.weight"):
        load(folder)
    assert_same_bits(logits(load(folder, ignore=["*.eh_proj"]), IDS), logits(load(kept), IDS))


def test_an_evaluation_can_leave_tensors_out(tmp_path):
    from typer.testing import CliRunner

    from mxref.cli import app

    folder, _ = make(tmp_path / "made", change=put("model.layers.0.self_attn.k_scale", lambda _: torch.ones(1)))
    arguments = ["eval", str(folder), "--random-ids", "--tokens", "128", "--window", "64"]
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 2 and "self_attn.k_scale; --ignore leaves tensors out" in " ".join(refused.stderr.split())
    done = CliRunner().invoke(app, [*arguments, "--ignore", "*.k_scale", "--formats", "mxfp4", "--activations", "none"])
    assert done.exit_code == 0, done.stderr
    with pytest.raises(ValueError, match="ignore=.* is for the path of a checkpoint, which neither"):
        evaluate(tiny_model("qwen3moe"), ids="random", tokens=128, window=64, ignore=["x"])


def test_a_dead_expert_is_harmless_where_one_scale_serves_all(tmp_path):
    folder, _ = make(
        tmp_path / "made", "qwen3moe", "nvfp4", change=put(f"{EXPERT}.down_proj.input_global_scale", lambda s: s * 1e9)
    )
    down = load(folder, scales="vllm").model.layers[1].mlp.experts.input_scales.down
    assert len(set(down.tolist())) == 1 and down[0] < 1e6


def test_experts_quantized_in_part_are_refused(tmp_path):
    def plain(stored):
        drop(*(f"{EXPERT}.up_proj.{name}" for name in ("weight_packed", "weight_scale")))(stored)
        stored[f"{EXPERT}.up_proj.weight"] = torch.ones(48, 64)

    ignore = [*FLOATS, f"{EXPERT}.up_proj"]
    says = {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": args()}}, "ignore": ignore}
    folder, _ = make(tmp_path / "made", change=plain, config={"quantization_config": says})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts: its weights are quantized in part"):
        load(folder)
    assert logits(load(folder, dequantized=True), IDS).isfinite().all()


def test_gates_and_ups_in_two_formats_are_refused(tmp_path):
    def change(stored):
        q = mxref.quantize(torch.ones(48, 64), "nvfp4", recipe=RECIPES["nvfp4"])
        scales, tensor_scale = q.scales.view(torch.float8_e4m3fn), q.tensor_scale.reshape(1)
        for name in [name.removesuffix("_packed") for name in stored if name.endswith("up_proj.weight_packed")]:
            stored.update({f"{name}_packed": q.packed, f"{name}_scale": scales, f"{name}_global_scale": tensor_scale})

    groups = {
        "a": {"targets": ["re:.*up_proj"], "weights": args(group_size=16)},
        "b": {"targets": ["re:.*(gate|down|o)_proj"], "weights": args()},
    }
    says = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}
    folder, _ = make(tmp_path / "made", change=change, config={"quantization_config": says})
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.experts: its experts have the formats mxfp4, nvfp4"):
        load(folder)
    assert {fault.what for fault in inspect_checkpoint(folder).faults} == {"formats"}


def test_tied_embeddings_need_no_head(tmp_path):
    folder, model = make(tmp_path / "made", tie_word_embeddings=True, change=drop("lm_head.weight"))
    loaded = load(folder)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_same_bits(loaded.lm_head.weight.data, model.model.embed_tokens.weight.data)


# evaluation


def test_a_checkpoint_is_evaluated_as_it_is_stored(kept):
    report = evaluate(kept, ids="random", tokens=512, window=64)
    assert [(row.weights, row.activations) for row in report.rows] == [("nvfp4", "bf16"), ("nvfp4", "nvfp4")]
    assert (report.text, report.layers, report.semantics, report.scored_bytes) == ("drawn ids", "as stored", "torch", None)
    assert report.unit == "token" and report.rows[0].bits_per_byte is None and "bits/token" in str(report)
    model = load(kept)
    windows = torch.randint(512, (8, 64), generator=torch.Generator().manual_seed(0))
    for row, quantizes in zip(report.rows, (False, True)):
        with inputs_quantized(model, quantizes):
            scores = logits(model, windows)[:, :-1].double().log_softmax(-1)
        loss = -scores.gather(-1, windows[:, 1:, None]).mean().item()
        assert row.perplexity == pytest.approx(math.exp(loss), rel=1e-5)  # float32 sums against float64
    assert model.model.layers[0].mlp.experts.quantizes_inputs
    alone = evaluate(kept / "model.safetensors", ids="random", tokens=512, window=64)  # with the config beside it
    assert [row.perplexity for row in alone.rows] == [row.perplexity for row in report.rows]


def test_given_ids_and_another_model(kept, tmp_path):
    ids, _ = golden_logits(kept)
    save_file({"input_ids": ids}, tmp_path / "ids.safetensors")
    (tmp_path / "ids.json").write_text(json.dumps(ids.flatten().tolist()))
    decoded = load(kept, dequantized=True)
    report = evaluate(kept, ids=tmp_path / "ids.safetensors", against=decoded, activations=["none", "same"])
    first, weights_only, own = report.rows
    assert first.label.endswith("(against) / bf16") or first.weights == "bf16 (against)"
    assert (weights_only.divergence, weights_only.agreement) == (0.0, 1.0) and weights_only.change == 0.0
    assert first.divergence is None and own.divergence > 0 and 0 < own.agreement <= 1
    with inputs_quantized(model := load(kept), True):
        log_q = logits(model, ids)[:, :-1].double().log_softmax(-1)
    decoded.set_experts_implementation("eager")
    log_p = logits(decoded, ids)[:, :-1].double().log_softmax(-1)
    expected = ((log_p.exp() * (log_p - log_q)).sum(-1) / math.log(2)).mean().item()
    assert own.divergence == pytest.approx(expected, rel=1e-4)  # float32 against float64
    assert own.agreement == (log_p.argmax(-1) == log_q.argmax(-1)).double().mean().item()
    again = evaluate(kept, ids=tmp_path / "ids.json", window=48, activations=["same"]).rows
    assert [row.perplexity for row in again] == [own.perplexity]


def test_a_checkpoint_can_be_quantized_anew(kept):
    report = evaluate(kept, ids="random", formats=["nvfp4", "mxfp8_e4m3"], activations=["none"], tokens=128, window=64)
    assert [row.weights for row in report.rows] == ["nvfp4", "nvfp4", "mxfp8_e4m3"]
    assert report.semantics == "torch, blockwise"
    assert report.rows[1].snr_db > report.rows[2].snr_db  # what NVFP4 has decoded is nearly itself in NVFP4


@pytest.mark.parametrize(
    "options, message",
    [
        ({"formats": ["mxfp4"], "semantics": "torch"}, "semantics='torch' is for what is stored"),
        ({"scales": "some"}, "scales='some': expected one of stored, vllm"),
        ({"text": "a", "ids": [1, 2]}, "text and ids are both given"),
        ({"text": "a"}, "tokenizer=None"),
        ({}, "tokenizer=None: the model's directory has none.*ids='random', drawn from the vocabulary"),
        ({"ids": "some"}, "ids='some': expected one of random"),
        ({"ids": [1.5, 2.5]}, "ids=.*expected integers"),
        ({"ids": [[1, 512]]}, "ids='ids' holds 512: expected ids from 0 to 511"),
        ({"ids": [[1, -3, 512]]}, "ids='ids' holds -3: expected ids from 0 to 511"),
        ({"ids": [1, 2, 3]}, "ids='ids': 3 ids and tokens=24576; expected at least one window of 128"),
        ({"ids": Path("no-such.json")}, "ids='no-such.json'"),
        ({"against": "./no-such"}, "against='./no-such': no such directory"),
        ({"ids": "random", "window": 1}, "window=1: expected 2 to 256"),
    ],
)
def test_evaluations_refuse_bad_arguments_by_name(options, message, kept):
    with pytest.raises(ValueError, match=message):
        evaluate(kept, **options)


def test_the_command_evaluates_a_checkpoint(kept, tmp_path):
    from typer.testing import CliRunner

    from mxref.cli import app

    arguments = [
        "eval",
        kept,
        "--random-ids",
        "--tokens",
        128,
        "--window",
        64,
        "--semantics",
        "dequantized",
        "--scales",
        "vllm",
        "--json",
        "-",
    ]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert [row["activations"] for row in report["rows"]] == ["bf16", "nvfp4"] and report["semantics"] == "dequantized"
    assert report["text"] == "drawn ids"
    refused = CliRunner().invoke(app, ["eval", str(kept), "--tokens", "128"])
    assert refused.exit_code == 2 and "ids" in refused.stderr
    both = CliRunner().invoke(app, ["eval", str(kept), "--random-ids", "--ids", "x.json"])
    assert both.exit_code == 2 and "--random-ids goes without --ids" in both.stderr


# memory

MEASURE = """
import sys, threading, time
from mxref.models import load

def resident():
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1]) << 10

def poll():
    while running:
        seen.append(resident())
        time.sleep(0.0005)

load(sys.argv[1])
seen, running, before = [], True, resident()
thread = threading.Thread(target=poll, daemon=True)
thread.start()
model = load(sys.argv[2])
running = False
thread.join()
print(max(seen) - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux' count of anonymous pages")
def test_loading_holds_the_files_once(tmp_path):
    """Anonymous memory, at its highest: the files' size, a layer more while its experts are put together, and slack."""
    experts, width, hidden = 16, 512, 512

    def grow(stored):
        for name in [name for name in stored if ".experts." in name]:
            del stored[name]
        random = torch.Generator().manual_seed(0)
        for layer in range(6):
            for name in [name for name in stored if ".layers.0." in name]:
                stored[name.replace(".layers.0.", f".layers.{layer}.")] = stored[name]
            for expert in range(experts):
                for part in PARTS.values():
                    stem = f"model.layers.{layer}.mlp.experts.{expert}.{part}"
                    codes = torch.randint(256, (width, hidden // 2), dtype=torch.uint8, generator=random)
                    stored |= {f"{stem}.weight_packed": codes, f"{stem}.weight_scale": codes[:, : hidden // 32] | 64 & 127}

    sizes = {"moe_intermediate_size": width, "num_hidden_layers": 6}
    small, _ = make(tmp_path / "small")
    large, _ = make(tmp_path / "large", change=grow, config=sizes, hidden_size=hidden, num_experts=experts)
    result = subprocess.run([sys.executable, "-c", MEASURE, small, large], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    size = (large / "model.safetensors").stat().st_size
    assert size > 32 << 20
    assert int(result.stdout) < size + size / 6 + (4 << 20)


def test_a_head_that_is_stored_is_kept_whatever_the_config_says_of_tying(tmp_path):
    model = tiny_model("qwen3moe")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn(tensors["model.embed_tokens.weight"].shape).bfloat16()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert_same_bits(load(tmp_path).lm_head.weight.float(), tensors["lm_head.weight"].float())
