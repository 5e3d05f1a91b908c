"""Checkpoints: real tools' files decode to those tools' own values, and malformed files are refused in one line.

MXREF_CHECKPOINTS names a directory of whole checkpoints to run the first tests on besides the small ones.
"""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from bits import assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("safetensors")

from safetensors.torch import load_file, save_file

import mxref
from mxref.checkpoints import CheckpointError, QuantizedWeight, convert_checkpoint, inspect_checkpoint, load_checkpoint
from mxref.checkpoints.dialects import declared, header_says
from mxref.checkpoints.files import INDEX, Shards, open_shards

UNSAID = '"MXFP4": expected config_groups, to say whether inputs are quantized'
DATA = Path(__file__).parent / "data" / "checkpoints"
ROOTS = [DATA, *([Path(os.environ["MXREF_CHECKPOINTS"])] if os.environ.get("MXREF_CHECKPOINTS") else [])]
FOUND = [path.parent for root in ROOTS for path in sorted(root.glob("*/model.safetensors"))]
GOLDEN = [path for path in FOUND if (path / "golden_dequant.safetensors").exists()]
EXPERT = "model.layers.0.mlp.experts.0"
CT, MODELOPT, QUARK = (
    DATA / "llmcompressor-nvfp4-qwen3moe",
    DATA / "modelopt-nvfp4-qwen3moe",
    DATA / "quark-mxfp6_e2m3-qwen3moe",
)

# What each checkpoint is: dialect, scheme, recipe, direction of its input scales.
KINDS = {
    "base-gptoss": ("plain", "plain", None, None),
    "base-mixtral": ("plain", "plain", None, None),
    "base-qwen3moe": ("plain", "plain", None, None),
    "gptoss_layout-mxfp4-gptoss": ("gpt-oss", "w_mxfp4", "ocp", None),
    "llmcompressor-mxfp4-qwen3moe": ("compressed-tensors", "w_mxfp4_a_mxfp4", "compressed_tensors_mxfp4", None),
    "llmcompressor-mxfp8-qwen3moe": ("compressed-tensors", "w_mxfp8_e4m3_a_mxfp8_e4m3", "compressed_tensors_mxfp8", None),
    "llmcompressor-nvfp4-gptoss": ("compressed-tensors", "w_nvfp4_a_nvfp4", "compressed_tensors_nvfp4", "divide"),
    "llmcompressor-nvfp4-mixtral": ("compressed-tensors", "w_nvfp4_a_nvfp4", "compressed_tensors_nvfp4", "divide"),
    "llmcompressor-nvfp4-qwen3moe": ("compressed-tensors", "w_nvfp4_a_nvfp4", "compressed_tensors_nvfp4", "divide"),
    "llmcompressor-nvfp4a16-qwen3moe": ("compressed-tensors", "w_nvfp4", "compressed_tensors_nvfp4", None),
    "modelopt-mxfp4-qwen3moe": ("modelopt", "w_mxfp4", "modelopt_mxfp4", None),
    "modelopt-nvfp4-gptoss": ("modelopt", "w_nvfp4_a_nvfp4", "modelopt_nvfp4", "multiply"),
    "modelopt-nvfp4-qwen3moe": ("modelopt", "w_nvfp4_a_nvfp4", "modelopt_nvfp4", "multiply"),
    "quark-mxfp4-qwen3moe": ("quark", "w_mxfp4_a_mxfp4", "quark_even", None),
    "quark-mxfp4_mxfp6_e2m3-qwen3moe": ("quark", "w_mxfp4_a_mxfp6_e2m3", "quark_even", None),
    "quark-mxfp6_e2m3-qwen3moe": ("quark", "w_mxfp6_e2m3_a_mxfp6_e2m3", "quark_even", None),
    "quark-nvfp4ish-qwen3moe": ("quark", "w_nvfp4_a_nvfp4", "quark_nvfp4", "multiply"),
    "torchao-mxfp4-qwen3moe": ("torchao", "w_mxfp4_a_mxfp4", "torchao_rceil", None),
}


def label(path):
    return f"{path.name}-whole" if path.parent != DATA else path.name


def as_golden(tensor, golden):
    """`[E, out, in]` as the golden values lie, `[E, in, out]`; matrices as they are."""
    return tensor.transpose(1, 2).contiguous() if golden.ndim == 3 else tensor


# real files


@pytest.mark.parametrize("path", GOLDEN, ids=label)
def test_weights_decode_to_the_tools_own_values(path):
    checkpoint = load_checkpoint(path, weights_only=True)
    golden = load_file(path / "golden_dequant.safetensors")
    for name, expected in golden.items():
        weight = checkpoint[name]
        decoded = as_golden(mxref.dequantize(weight.tensor, expected.dtype), expected)
        assert_same_bits(decoded, expected, name)
    of_layer_0 = {name for name in checkpoint.quantized if ".layers.0." in name}
    assert set(golden) == of_layer_0


@pytest.mark.parametrize("path", FOUND, ids=label)
def test_what_a_checkpoint_is(path):
    dialect, scheme, recipe, direction = KINDS[path.name]
    checkpoint = load_checkpoint(path, weights_only=True)
    assert (checkpoint.dialect, checkpoint.scheme) == (dialect, scheme)
    for name in checkpoint.quantized:
        weight = checkpoint[name]
        assert (weight.tensor.recipe.name, weight.input_direction) == (recipe, direction)
        assert (weight.input_scale is None) == (direction is None)
        divides = path.name.startswith("llmcompressor-nvfp4")
        assert weight.tensor.recipe.tensor_scale_direction == ("divide" if divides else "multiply")
        assert weight.tensor.axis == -1


@pytest.mark.parametrize("path", FOUND, ids=label)
def test_every_tensor_is_read_once_and_kept_as_it_is(path, monkeypatch):
    stored = load_file(path / "model.safetensors")
    reads = []
    read = Shards.read
    monkeypatch.setattr(Shards, "read", lambda self, name: reads.append(name) or read(self, name))
    checkpoint = load_checkpoint(path, weights_only=True)
    assert reads == []
    for name, value in checkpoint.items():
        if not isinstance(value, QuantizedWeight):
            assert_same_bits(value, stored[name], name)
            continue
        assert value.name == name
        for part, kind in ((value.input_scale, "input"), (value.tensor.tensor_scale, "weight")):
            if part is not None:
                names = [
                    n for n in stored if n.startswith(name.removesuffix(".weight")) and kind in n and stored[n].numel() == 1
                ]
                assert_same_bits(part, stored[names[0]].reshape(()), name)
    assert sorted(reads) == sorted(stored)
    assert set(checkpoint.quantized) | set(checkpoint.plain) == set(checkpoint)


@pytest.mark.parametrize("path", [path for path in FOUND if path.name == "quark-nvfp4ish-qwen3moe" and path.parent == DATA])
def test_the_tensor_scale_without_a_decompressor_is_the_originals_amax_over_2688_and_multiplies(path):
    checkpoint = load_checkpoint(path)
    for name, amax in load_file(path / "golden_amax.safetensors").items():
        tensor = checkpoint[name].tensor
        assert_same_bits(tensor.tensor_scale, amax / torch.tensor(2688.0), name)
        assert tensor.recipe.tensor_scale_direction == "multiply"
        assert mxref.dequantize(tensor).abs().max() <= amax


@pytest.mark.parametrize("name", ["gptoss_layout-mxfp4-gptoss", "modelopt-nvfp4-gptoss"])
def test_interleaved_rows_become_gate_rows_then_up_rows(name):
    checkpoint = load_checkpoint(DATA / name)
    weight = checkpoint["model.layers.0.mlp.experts.gate_up_proj"]
    values = mxref.dequantize(weight.tensor)
    assert weight.rows == "interleaved" and weight.tensor.shape == (2, 8, 128)
    assert_same_bits(mxref.dequantize(weight.concatenated().tensor), torch.cat([values[:, 0::2], values[:, 1::2]], dim=1))
    assert weight.concatenated().rows == "concatenated"
    down = checkpoint["model.layers.0.mlp.experts.down_proj"]
    assert down.rows is None and down.concatenated() is down


def test_a_single_file_takes_the_config_beside_it():
    whole, file = load_checkpoint(CT), load_checkpoint(CT / "model.safetensors")
    assert file.dialect == whole.dialect and list(file) == list(whole)


@pytest.mark.parametrize("path", [path for path in FOUND if path.name.endswith("-qwen3moe")], ids=label)
def test_the_originals_quantized_by_a_checkpoints_recipe_are_its_codes_and_scales(path):
    originals, checkpoint = (
        load_file(path.parent / "base-qwen3moe" / "model.safetensors"),
        load_checkpoint(path, weights_only=True),
    )
    for name in checkpoint.quantized:
        stored = checkpoint[name].tensor
        original = originals[name][: stored.shape[0]]  # torchao's weights are kept whole, the originals' first rows
        again = mxref.quantize(original, stored.format, recipe=stored.recipe, tensor_scale=stored.tensor_scale)
        assert_same_bits(again.packed, stored.packed[: len(original)], name)
        assert_same_bits(again.scales, stored.scales[: len(original)], name)


def test_importing_the_package_imports_no_safetensors():
    script = "import sys, mxref.checkpoints\nprint('safetensors' in sys.modules, 'transformers' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]


# made files


def copy(source, destination, change=None, config=None):
    """A copy of a small checkpoint, its tensors changed by `change(tensors)` in place, its config updated."""
    shutil.copytree(source, destination, ignore=shutil.ignore_patterns("golden*", INDEX))
    if change is not None:
        tensors, metadata = (
            load_file(destination / "model.safetensors"),
            Shards([destination / "model.safetensors"]).metadata,
        )
        change(tensors)
        save_file(tensors, destination / "model.safetensors", metadata=metadata)
    if config is not None:
        changed = json.loads((destination / "config.json").read_text()) | config
        (destination / "config.json").write_text(json.dumps(changed))
    return destination


def shard(path, assignment):
    """Split model.safetensors into shards, by the number that `assignment(name)` gives, with an index."""
    tensors, metadata = load_file(path / "model.safetensors"), Shards([path / "model.safetensors"]).metadata
    (path / "model.safetensors").unlink()
    listed = {name: f"model-{assignment(name)}.safetensors" for name in tensors}
    for file in set(listed.values()):
        save_file({name: tensors[name] for name in tensors if listed[name] == file}, path / file, metadata=metadata)
    (path / INDEX).write_text(json.dumps({"weight_map": listed}))
    return listed


def quark_config(dtype, group_size, **others):
    spec = {"weight": {"dtype": dtype, "group_size": group_size}, "input_tensors": None}
    return {"quantization_config": {"quant_method": "quark", "global_quant_config": spec, **others}}


MADE = {
    "quark": ("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3"),
    "modelopt": ("mxfp4", "mxfp8_e4m3"),
    "compressed-tensors": ("mxfp4", "mxfp8_e4m3"),
    "torchao": ("mxfp4", "mxfp8_e4m3", "mxfp8_e5m2"),
}


def write_mx(path, dialect, q, format):
    """One weight `m.q_proj.weight` as `dialect` stores it."""
    codes = q.packed.view({"mxfp8_e4m3": torch.float8_e4m3fn, "mxfp8_e5m2": torch.float8_e5m2}.get(format, torch.uint8))
    names = ("weight", "weight_scale")
    scales, metadata, config = q.scales, None, {"quantization_config": {"quant_method": dialect}}
    if dialect == "torchao":
        names = ("_weight_qdata", "_weight_scale")
        scales = mxref.to_layout(scales, "tile_128x4").reshape(-1, 16)
        dtype = str(codes.dtype).removeprefix("torch.") if codes.dtype != torch.uint8 else "float4_e2m1fn_x2"
        data = {"elem_dtype": {"_data": dtype}, "block_size": 32, "is_swizzled_scales": True}
        metadata = {"m.q_proj.weight": json.dumps({"_type": "MXTensor", "_data": data})}
    elif dialect == "quark":
        config = quark_config(format.removeprefix("mx"), 32)
    elif dialect == "compressed-tensors" and format == "mxfp4":
        names = ("weight_packed", "weight_scale")
    path.mkdir()
    tensors = {f"m.q_proj.{name}": part.contiguous() for name, part in zip(names, (codes, scales))}
    save_file(tensors, path / "model.safetensors", metadata=metadata)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("dialect,format", [(dialect, format) for dialect, formats in MADE.items() for format in formats])
def test_every_layout_gives_back_what_was_stored(dialect, format, tmp_path, rng):
    x = torch.from_numpy(rng.standard_normal((130, 96), dtype="float32"))
    q = mxref.quantize(x, format)
    path = write_mx(tmp_path / "made", dialect, q, format)
    tensor = load_checkpoint(path, weights_only=True)["m.q_proj.weight"].tensor
    assert tensor.format.name == format
    assert_same_bits(tensor.packed, q.packed)
    assert_same_bits(tensor.scales, q.scales)


def test_quark_layers_may_have_formats_of_their_own(tmp_path, rng):
    q = mxref.quantize(torch.from_numpy(rng.standard_normal((4, 64), dtype="float32")), "mxfp6_e3m2")
    path = write_mx(tmp_path / "made", "quark", q, "mxfp6_e3m2")
    layers = {"layer_quant_config": {"*.q_proj": {"weight": {"dtype": "fp6_e3m2", "group_size": 32}}}}
    (path / "config.json").write_text(json.dumps(quark_config("fp6_e2m3", 32, **layers)))
    assert load_checkpoint(path).formats == ("mxfp6_e3m2",)
    (path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "quark"}}))
    with pytest.raises(CheckpointError, match="fit all of mxfp6_e2m3, mxfp6_e3m2"):
        load_checkpoint(path)


def test_a_stack_of_experts_keeps_a_tensor_scale_for_each(tmp_path):
    name = "model.layers.0.mlp.experts.gate_up_proj"

    def change(tensors):
        tensors[f"{name}_weight_scale_2"] = torch.tensor([0.5, 2.0])
        tensors[f"{name}_input_scale"] = torch.tensor([0.25, 0.125])

    scaled = load_checkpoint(copy(DATA / "modelopt-nvfp4-gptoss", tmp_path / "c", change))[name]
    unscaled = mxref.BlockTensor(
        scaled.tensor.packed, 128, scaled.tensor.scales, None, scaled.tensor.format, scaled.tensor.recipe
    )
    expected = mxref.dequantize(unscaled) * torch.tensor([0.5, 2.0])[:, None, None]
    assert_same_bits(mxref.dequantize(scaled.tensor), expected)
    assert scaled.input_scale.tolist() == [0.25, 0.125]


def test_gate_and_up_of_a_stack_may_have_tensor_scales_of_their_own(tmp_path):
    name = "model.layers.0.mlp.experts.gate_up_proj"
    change = change_at(f"{name}_weight_scale_2", lambda t: torch.tensor([[0.5, 2.0], [1.0, 1.0]]))
    path = copy(DATA / "modelopt-nvfp4-gptoss", tmp_path / "c", change, config={"model_type": "llama4"})
    weight = load_checkpoint(path)[name]
    assert weight.rows == "concatenated"
    assert weight.tensor.tensor_scale.squeeze().tolist() == [[0.5] * 4 + [2.0] * 4, [1.0] * 8]
    found = [(f.what, f.name, f.detail) for f in inspect_checkpoint(path).findings]
    assert found == [("gate and up: tensor scale", f"{name}[0]", "gate's is 0.25 times up's")]
    path = copy(DATA / "modelopt-nvfp4-gptoss", tmp_path / "interleaved", change)  # whose rows are not gate, then up
    refused(lambda: load_checkpoint(path), r"weight_scale_2 has shape \[2, 2\]: expected one value, or one an expert")


def test_modelopt_names_the_algorithm_of_each_layer(tmp_path, rng):
    q = mxref.quantize(torch.from_numpy(rng.standard_normal((4, 64), dtype="float32")), "mxfp4")
    path = write_mx(tmp_path / "made", "modelopt", q, "mxfp4")
    layers = {"m.q_proj": {"quant_algo": "MXFP4"}, "m.gone_proj": {"quant_algo": "NVFP4"}}
    settings = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    (path / "config.json").write_text("{}")
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": settings}))
    inspection = inspect_checkpoint(path)
    assert (inspection.dialect, inspection.formats) == ("modelopt", ("mxfp4",))
    expected = [("fault", "config", "config.json")] * 2 + [("fault", "missing", "m.gone_proj")]
    assert [(f.severity, f.what, f.name) for f in inspection.findings] == expected
    both = "quantized_layers of MXFP4, NVFP4: expected one algorithm"
    assert load_checkpoint(path, weights_only=True).declared.unread == (f"quant_algo {UNSAID}", both)
    assert load_checkpoint(path, weights_only=True).formats == ("mxfp4",)
    layers["m.q_proj"]["quant_algo"] = "NVFP4"
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": settings}))
    refused(lambda: load_checkpoint(path), "the config says nvfp4")


@pytest.mark.parametrize("source", [CT, DATA / "torchao-mxfp4-qwen3moe"], ids=label)
def test_shards_give_what_one_file_gives(source, tmp_path):
    whole = load_checkpoint(source)
    path = copy(source, tmp_path / "c")
    shard(path, lambda name: len(name) % 3)  # codes and scales of a weight in different shards
    sharded = load_checkpoint(path)
    assert set(sharded) == set(whole)
    for name, value in sharded.items():
        if isinstance(value, QuantizedWeight):
            assert_same_bits(mxref.dequantize(value.tensor), mxref.dequantize(whole[name].tensor), name)
        else:
            assert_same_bits(value, whole[name], name)


PROMISES = [
    (
        "compressed-tensors",
        {"config_groups": {"g": {"targets": ["Linear"]}}, "ignore": ["lm_head", "re:.*gate$"]},
        {"lm_head": False, "a.gate": False, "a.gate_proj": True},
    ),
    (
        "compressed-tensors",
        {"config_groups": {"g": {"targets": ["re:.*experts.*"]}}},
        {"a.experts.0.w1": True, "a.q_proj": False},
    ),
    (
        "modelopt",
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.q_proj": {"quant_algo": "NVFP4"}}},
        {"a.q_proj": True, "a.k_proj": False},
    ),
    (
        "modelopt",
        {"quant_algo": "NVFP4", "exclude_modules": ["*mtp*", "a.b"]},
        {"x.mtp.q": False, "a.b.c": False, "a.bc": True},
    ),
    (
        "gpt-oss",
        {"modules_to_not_convert": ["model.layers.*.self_attn"]},
        {"model.layers.1.self_attn.q_proj": False, "m.experts.down_proj": True, "m.router": False},
    ),
]


@pytest.mark.parametrize("dialect,config,modules", PROMISES)
def test_which_modules_a_config_says_are_quantized(dialect, config, modules):
    says = declared(dialect, config)
    assert {module: says.leaves(module) is None for module in modules} == modules


# malformed files


def change_at(name, change):
    """A change of one tensor; None removes it."""

    def changed(tensors):
        tensors[name] = change(tensors[name])
        if tensors[name] is None:
            del tensors[name]

    return changed


PACKED, SCALE = f"{EXPERT}.gate_proj.weight_packed", f"{EXPERT}.gate_proj.weight_scale"
GLOBAL, INPUT = f"{EXPERT}.gate_proj.weight_global_scale", f"{EXPERT}.gate_proj.input_global_scale"
BROKEN = {
    "dtype of codes": (PACKED, lambda t: t.view(torch.int8), "gate_proj.weight_scale: codes I8"),
    "dtype of scales": (SCALE, lambda t: t.float().to(torch.float8_e5m2), "gate_proj.weight_scale: codes U8 .* F8_E5M2"),
    "fewer scales": (SCALE, lambda t: t[:, :-1].contiguous(), r"codes U8 \[8, 64\] .* \[8, 7\] do not fit nvfp4"),
    "more rows": (PACKED, lambda t: torch.cat([t, t]), "do not fit nvfp4"),
    "flat codes": (PACKED, lambda t: t.flatten(), "do not fit nvfp4"),
    "no codes": (PACKED, lambda t: None, "gate_proj.weight_scale: scales without codes: expected .*gate_proj.weight_packed"),
    "no scales": (SCALE, lambda t: None, "gate_proj.weight_packed: codes without scales: expected .*weight_scale"),
    "no tensor scale": (GLOBAL, lambda t: None, "gate_proj.weight_global_scale is missing"),
    "two tensor scales": (GLOBAL, lambda t: t.expand(2).contiguous(), r"weight_global_scale has shape \[2\]"),
    "dtype of the tensor scale": (GLOBAL, lambda t: t.double(), "weight_global_scale has dtype F64"),
    "dtype of the input scale": (INPUT, lambda t: t.half(), "input_global_scale has dtype F16"),
}
VALUES = {
    "zero tensor scale": (GLOBAL, lambda t: t * 0, "gate_proj.weight: tensor_scale holds 0.0"),
    "NaN tensor scale": (GLOBAL, lambda t: t * torch.nan, "gate_proj.weight: tensor_scale holds nan"),
    "negative scale": (SCALE, lambda t: (-t.float()).to(t.dtype), "gate_proj.weight: scales holds codes with the sign bit"),
}


def refused(call, match):
    """`call` raises a CheckpointError of one line that matches."""
    with pytest.raises(CheckpointError, match=match) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("fault", BROKEN)
def test_tensors_that_do_not_fit_are_refused_from_their_headers(fault, tmp_path):
    name, change, message = BROKEN[fault]
    path = copy(CT, tmp_path / "c", change_at(name, change))
    refused(lambda: load_checkpoint(path), message)


@pytest.mark.parametrize("fault", VALUES)
def test_values_that_no_weight_can_have_are_refused_on_look_up(fault, tmp_path):
    name, change, message = VALUES[fault]
    checkpoint = load_checkpoint(copy(CT, tmp_path / "c", change_at(name, change)))
    refused(lambda: checkpoint[f"{EXPERT}.gate_proj.weight"], f"model.safetensors: {message.replace('gate', '.*gate', 1)}")


def test_a_checkpoint_shows_itself_in_a_line_and_names_what_is_near_to_a_wrong_name():
    checkpoint = load_checkpoint(CT)
    raw = load_file(CT / "model.safetensors")
    size = sum(tensor.nbytes for tensor in raw.values())
    assert repr(checkpoint) == f"<Checkpoint compressed-tensors w_nvfp4_a_nvfp4: {len(raw)} tensors, {size:,} bytes>"
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    for asked in (name + "_packed", name.replace("mlp", "mpl"), name.removesuffix(".weight"), 3):
        with pytest.raises(KeyError) as refusal:
            checkpoint[asked]
        assert f"{asked!r} is not in the checkpoint: expected a name in it, such as" in str(refusal.value)
        assert (name + "," in str(refusal.value)) == (asked != 3)
        assert checkpoint.get(asked) is None and checkpoint.get(asked, 1) == 1
    assert checkpoint.get(name).name == name


def test_a_weight_stored_plain_and_packed_is_refused(tmp_path):
    def change(tensors):
        tensors[f"{EXPERT}.gate_proj.weight"] = torch.zeros(8, 128)

    refused(lambda: load_checkpoint(copy(CT, tmp_path / "c", change)), "gate_proj.weight is stored a second time")


@pytest.mark.parametrize("number", ["00", "01", "\u0660", "1\uff10"])
@pytest.mark.parametrize("source", [CT, DATA / "base-qwen3moe"], ids=label)
def test_a_second_way_to_write_an_experts_number_is_refused(source, number, tmp_path):
    """Read as a number, most of them are an expert that is there: one of the two would be lost."""

    def change(tensors):
        for name in [name for name in tensors if ".experts.0.up_proj" in name]:
            tensors[name.replace(".experts.0.", f".experts.{number}.")] = tensors[name].clone()

    path = copy(source, tmp_path / "c", change)
    message = rf"experts\.{number}\.up_proj.*'{number}' for an expert's number: expected 0, 1, 2"
    refused(lambda: load_checkpoint(path), message)
    refused(lambda: convert_checkpoint(path, tmp_path / "out", to="modelopt", format="nvfp4"), message)
    assert "layout" in {fault.what for fault in inspect_checkpoint(path).faults}


def test_a_config_that_names_another_format_is_refused():
    refused(lambda: load_checkpoint(CT, dialect="modelopt"), "scales without codes")
    config = json.loads((CT / "config.json").read_text())
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] == 16


def test_formats_of_the_config_and_of_the_tensors_must_agree(tmp_path):
    path = edited(
        CT, tmp_path / "c", MIXED | {WEIGHTS: {"num_bits": 4, "type": "float", "group_size": 32}, (*GROUP, "format"): None}
    )
    refused(lambda: load_checkpoint(path), "codes U8 .* F8_E4M3 .*: the config says mxfp4")


def raw(path, header, data=b""):
    """A safetensors file of any header."""
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def entry(dtype, shape, start, stop):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


HEADERS = {
    "empty": (b"", b""),
    "no JSON": (b"{", b""),
    "a list": (b"[]", b""),
    "deep": (b'{"a":' * 5000, b""),
    "shape larger than the bytes": ({"a": entry("U8", [2**40], 0, 4)}, b"1234"),
    "shape beyond 64 bits": ({"a": entry("U8", [2**40, 2**40], 0, 4)}, b"1234"),
    "bytes beyond the file": ({"a": entry("U8", [2**40], 0, 2**40)}, b"1234"),
    "overlap": ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)}, b"123456"),
    "hole": ({"a": entry("U8", [4], 2, 6)}, b"123456"),
    "unknown dtype": ({"a": entry("U9", [4], 0, 4)}, b"1234"),
    "negative": ({"a": entry("U8", [-4], 0, 4)}, b"1234"),
}


@pytest.mark.parametrize("fault", HEADERS)
def test_headers_that_lie_are_refused(fault, tmp_path):
    path = raw(tmp_path / "x.safetensors", *HEADERS[fault])
    refused(lambda: load_checkpoint(path, dialect="quark"), "x.safetensors: no safetensors file: ")


@pytest.mark.parametrize("length", [0, 7, 8, 500, -1])
def test_truncated_files_are_refused(length, tmp_path):
    path = copy(CT, tmp_path / "c")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    refused(lambda: load_checkpoint(path), "model.safetensors: no safetensors file: ")


@pytest.mark.parametrize("shapes", [([2**40, 0], [2**40, 0]), ([0, 2**40], [0, 2**36])])
def test_a_huge_shape_without_bytes_is_no_weight(shapes, tmp_path):
    names = ("m.q_proj.weight", "m.q_proj.weight_scale")
    huge = {name: entry("U8", shape, 0, 0) for name, shape in zip(names, shapes)}
    path = raw(tmp_path / "x.safetensors", huge)
    refused(lambda: load_checkpoint(path, dialect="quark"), "do not fit mxfp4")


INDEXES = {
    "outside": ("../model-0.safetensors", "names '../model-0.safetensors'"),
    "absolute": ("/model-0.safetensors", "names '/model-0.safetensors'"),
    "backslash": ("..\\model-0.safetensors", "expected a .safetensors file of this directory"),
    "other type": ("config.json", "names 'config.json'"),
    "missing": (
        "model-9.safetensors",
        rf"says that 1 of \d+ tensors is in model-9.safetensors \({PACKED}\), which does not exist$",
    ),
    "in another shard": ("model-1.safetensors", "is in model-1.safetensors, which does not hold it"),
    "no string": (3, "expected a weight_map"),
    "nothing": (None, "expected a weight_map .*, found an empty one"),
}


@pytest.mark.parametrize("fault", INDEXES)
def test_indexes_that_lie_are_refused(fault, tmp_path):
    file, message = INDEXES[fault]
    path = copy(CT, tmp_path / "c")
    listed = shard(path, lambda name: int(name != PACKED))
    shutil.copy(path / "model-0.safetensors", tmp_path)
    (path / INDEX).write_text(json.dumps({"weight_map": listed | {PACKED: file} if file else {}}))
    refused(lambda: load_checkpoint(path), message)
    (fault,) = inspect_checkpoint(path).faults
    assert re.search(message, fault.detail)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    path = copy(CT, tmp_path / "c")
    shard(path, lambda name: int(name != PACKED))
    both = load_file(path / "model-1.safetensors") | load_file(path / "model-0.safetensors")
    save_file(both, path / "model-1.safetensors")
    refused(lambda: load_checkpoint(path), f"{PACKED} is in model-[01].safetensors and model-[01].safetensors")


def test_an_index_counts_and_is_right_in_every_tensor_or_refused(tmp_path):
    path = copy(CT, tmp_path / "c")
    whole = load_file(path / "model.safetensors")
    listed = shard(path, lambda name: int(name != PACKED))
    save_file(whole, path / "model.safetensors")
    (note,) = load_checkpoint(path).notes
    assert note == f"model.safetensors is not read: {INDEX} counts, and does not name it"
    (finding,) = inspect_checkpoint(path).findings
    assert (finding.severity, finding.what, finding.detail) == ("warning", "files", note)
    assert load_checkpoint(path).shards.entries[PACKED].shard.name == "model-0.safetensors"

    (path / "model-0.safetensors").rename(tmp_path / "model-0.safetensors")
    message = (
        rf"{INDEX} says that 1 of \d+ tensors is in model-0.safetensors \({PACKED}\), which does not exist"
        ": give .*/model.safetensors to read"
    )
    refused(lambda: load_checkpoint(path), message)
    (finding,) = inspect_checkpoint(path).faults
    assert re.search(message, finding.detail)
    assert set(load_checkpoint(path / "model.safetensors").shards.entries) == set(whole)
    (path / "model-1.safetensors").unlink()  # now all are absent
    message = (
        r"says that 35 of 36 tensors are in .*, which does not exist \(2 of 2 files are absent\): give .*/model.safetensors"
    )
    refused(lambda: load_checkpoint(path), message)

    (path / INDEX).write_text(json.dumps({"weight_map": {n: "model.safetensors" for n in listed if n != PACKED}}))
    refused(lambda: load_checkpoint(path), f"model.safetensors holds {PACKED}, which {INDEX} does not list")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"quantization_config": 3}', "[" * 100_000, '{"a": ' + "1" * 5000 + "}"])
def test_configs_that_are_none_are_refused(text, tmp_path):
    path = copy(CT, tmp_path / "c")
    (path / "config.json").write_text(text)
    refused(lambda: load_checkpoint(path), "config.json: ")


@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json", INDEX])
def test_a_key_that_is_there_twice_is_refused(file, tmp_path):
    path = copy(MODELOPT, tmp_path / "c")
    (path / file).write_text('{"quantization_config": {}, "a": {"quant_algo": 1, "quant_algo": 2}}')
    refused(lambda: load_checkpoint(path), f"{file} has quant_algo twice: expected once")


def test_bad_use_is_refused(tmp_path):
    with pytest.raises(ValueError, match="device='nope': .*cpu"):
        load_checkpoint(tmp_path / "nowhere", device="nope")
    for path, dialect, message in [
        (tmp_path / "nowhere", None, "expected a checkpoint directory"),
        (tmp_path, None, "holds neither"),
        (CT, "gguf", "dialect='gguf': expected one of plain, compressed-tensors"),
    ]:
        with pytest.raises(ValueError, match=message) as caught:
            load_checkpoint(path, dialect=dialect)
        assert not isinstance(caught.value, CheckpointError)
    shutil.copy(CT / "model.safetensors", tmp_path / "alone.safetensors")
    with pytest.raises(ValueError, match="no config.json says how weights are stored: give dialect="):
        load_checkpoint(tmp_path / "alone.safetensors")
    assert load_checkpoint(tmp_path / "alone.safetensors", dialect="compressed-tensors").formats == ("nvfp4",)
    path = copy(CT, tmp_path / "c", config={"quantization_config": {"quant_method": "gptq"}})
    with pytest.raises(ValueError, match="quant_method='gptq' in the config"):
        load_checkpoint(path)


def loads_or_refuses(path):
    """Read everything, or be refused in a line; anything else is a crash."""
    try:
        for value in load_checkpoint(path).values():
            if isinstance(value, QuantizedWeight):
                mxref.dequantize(value.tensor)
        inspect_checkpoint(path)
    except ValueError as refusal:
        assert "\n" not in str(refusal)


SMALL = [CT, DATA / "torchao-mxfp4-qwen3moe", DATA / "gptoss_layout-mxfp4-gptoss", DATA / "modelopt-nvfp4-gptoss"]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_corruption_of_a_header_crashes(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "c"
    copy(data.draw(st.sampled_from(SMALL)), path)
    content = bytearray((path / "model.safetensors").read_bytes())
    length = struct.unpack("<Q", content[:8])[0] + 8
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, length - 1))] = data.draw(st.sampled_from(b'0123456789{}[],:"UF8_abx\xff\x00'))
    (path / "model.safetensors").write_bytes(content)
    loads_or_refuses(path)
    shutil.rmtree(path)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2**70)
    | st.floats()
    | st.sampled_from(["", "re:(", "fp4", "NVFP4", "float"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["weight", "dtype", "_data", "a.b"]), inner),
    max_leaves=5,
)


def spots(found, path=()):
    """Every place in a JSON value."""
    yield path
    inner = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    for key, value in inner:
        yield from spots(value, (*path, key))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_corruption_of_a_config_crashes(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "c"
    copy(data.draw(st.sampled_from([*SMALL, MODELOPT, QUARK])), path)
    config = json.loads((path / "config.json").read_text())
    *place, last = data.draw(st.sampled_from([spot for spot in spots(config) if spot]))
    at = config
    for key in place:
        at = at[key]
    at[last] = data.draw(JSON)
    (path / "config.json").write_text(json.dumps(config))
    loads_or_refuses(path)
    shutil.rmtree(path)


# configs that say what is not followed

TORCHAO, CT_MX, QUARK_MX = (DATA / f"{name}-qwen3moe" for name in ("torchao-mxfp4", "llmcompressor-mxfp4", "quark-mxfp4"))
QUARK_NV = DATA / "quark-nvfp4ish-qwen3moe"
GROUP = ("quantization_config", "config_groups", "group_0")
WEIGHTS, INPUTS = (*GROUP, "weights"), (*GROUP, "input_activations")
QUARK_ALL = ("quantization_config", "global_quant_config")
FP8 = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def edited(source, destination, changes, file="config.json"):
    """A copy of a checkpoint, with values of a config changed by place; a callable makes the value of what is there."""
    path = copy(source, destination)
    config = json.loads((path / file).read_text())
    for (*place, last), value in changes.items():
        at = config
        for key in place:
            at = at.setdefault(key, {})
        at[last] = value(at.get(last)) if callable(value) else value
    (path / file).write_text(json.dumps(config))
    return path


def second_group(**others):
    """A group of down projections beside the one that is there, which it is but for `others`."""
    return {GROUP[:-1]: lambda groups: groups | {"group_1": groups["group_0"] | {"targets": ["re:.*down_proj"]} | others}}


def torchao_by_module(**choices):
    """`FqnToConfig`: the config that is there by default, by name a change of it or None."""

    def change(default):
        changed = {fqn: new and {**default, "_data": default["_data"] | new} for fqn, new in choices.items()}
        return {"_type": "FqnToConfig", "_version": 1, "_data": {"fqn_to_config": {"_default": default} | changed}}

    return {("quantization_config", "quant_type", "default"): change}


def said(**config):
    return {("quantization_config", key): value for key, value in config.items()}


def activation_dtype(name):
    return {"activation_dtype": {"_type": "torch.dtype", "_data": name}}


LEFT_OUT = ("quantization_config", "ignore")
NOT_FOLLOWED = {  # what makes the weights other than they are read
    "AWQ": (MODELOPT, said(quant_algo="NVFP4_AWQ"), r'quant_algo "NVFP4_AWQ": expected one of NVFP4, '),
    "other weights": (MODELOPT, said(quant_algo="MXFP8"), "quant_algo .*MXFP8.*hf_quant_config.json .*NVFP4"),
    "size of groups": (MODELOPT, said(group_size=32), "group_size 32 and hf_quant_config.json group_size 16"),
    "modules left out": (MODELOPT, said(ignore=["lm_head"]), "ignore .*lm_head.* and hf_quant_config.json exclude_modules"),
    "a type of layers": (
        QUARK,
        said(layer_type_quant_config={"nn.Linear": {"weight": {"dtype": "fp6_e3m2", "group_size": 32}}}),
        "layer_type_quant_config.nn.Linear .*: expected none",
    ),
    "a rotation": (QUARK, said(algo_config=[{"name": "rotation", "r4": True}]), "algo_config .*rotation.*: expected null"),
    "a transform": (CT, said(transform_config={"config_groups": {"R1": {}}}), "transform_config .*R1"),
    "a nested transform": (CT, {("text_config", "transform_config", "config_groups"): {"R4": {}}}, "transform_config .*R4"),
    "two configs": (
        CT,
        {("text_config", "quantization_config"): {"quant_method": "quark"}},
        "quantization_config and text_config.quantization_config say different things",
    ),
    "a sparse weight": (CT, said(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config .*: expected none"),
    "bits": (CT, {(*WEIGHTS, "num_bits"): 8}, "group_0.weights .*not what format 'nvfp4-pack-quantized' stores"),
    "type": (CT, {(*WEIGHTS, "type"): "int"}, "group_0.weights .*not what format 'nvfp4-pack-quantized' stores"),
    "strategy": (CT, {(*WEIGHTS, "strategy"): "channel"}, 'weights.strategy "channel": expected "tensor_group"'),
    "symmetry": (CT_MX, {(*WEIGHTS, "symmetric"): False}, "weights.symmetric false: expected true"),
    "container": (CT, {(*GROUP, "format"): "pack-quantized"}, "group_0.weights .*not what format 'pack-quantized' stores"),
    "a container of all": (CT_MX, said(format="nvfp4-pack-quantized"), "group_0.format .*: expected 'nvfp4-pack-quantized'"),
    "bits, ModelOpt": (MODELOPT, {(*WEIGHTS, "num_bits"): 8}, "weights .*: not what quant_algo NVFP4 stores"),
    "SVD, ModelOpt": (MODELOPT, said(quant_algo="NVFP4_SVD"), 'quant_algo "NVFP4_SVD": expected one of NVFP4, '),
    "weights, Quark": (QUARK_MX, {(*QUARK_ALL, "weight", "dtype"): "int4"}, "global_quant_config.weight .*: expected"),
    "scales, Quark": (
        QUARK_MX,
        {(*QUARK_ALL, "weight", "scale_format"): "float32"},
        'scale_format "float32": expected "e8m0"',
    ),
    "no inputs, ModelOpt": (MODELOPT, {INPUTS: None}, 'quant_algo "NVFP4": config_groups say input_activations null'),
    "scales of inputs, ModelOpt": (MODELOPT, said(pre_quant_scale=True), "pre_quant_scale true: expected false"),
    "zero points, ModelOpt": (MODELOPT, said(has_zero_point=True), "has_zero_point true: expected false"),
    "order of codes, Quark": (
        QUARK_MX,
        {("quantization_config", "export", "pack_method"): "order"},
        'export.pack_method "order": expected "reorder"',
    ),
    "one level, Quark": (QUARK_NV, {(*QUARK_ALL, "weight"): lambda specs: specs[:1]}, "weight .*: expected a second spec"),
    "weights quantized on the fly": (CT, {(*WEIGHTS, "dynamic"): True}, "weights.dynamic true: expected false"),
    "weights quantized on the fly, Quark": (
        QUARK_MX,
        {(*QUARK_ALL, "weight", "is_dynamic"): True},
        "is_dynamic true: expected f",
    ),
    "calibration unfinished": (CT, said(quantization_status="calibration"), 'status "calibration": expected compressed or'),
    "all linears left out": (
        CT,
        {LEFT_OUT: lambda names: [*names, "Linear"]},
        'ignore "Linear": a class that all linears are',
    ),
    "weights decoded already, Quark": (
        QUARK_MX,
        {("quantization_config", "export", "weight_format"): "fake_quantized"},
        'export.weight_format "fake_quantized": expected "real_quantized"',
    ),
    "two groups": (CT, second_group(targets=["Linear"], input_activations=None), "'Linear' and 'Linear' say different"),
}

NOT_RUN = {  # what a forward pass would have to do
    "FP8 inputs": (CT_MX, {INPUTS: FP8}, r"group_0.input_activations .*: expected blocks of nvfp4, "),
    "static inputs": (CT_MX, {(*INPUTS, "dynamic"): False}, "input_activations.dynamic false: expected true"),
    "tensor scales of each input": (CT, {(*INPUTS, "dynamic"): True}, 'input_activations.dynamic true: expected "local"'),
    "block scales of all inputs": (CT, {(*INPUTS, "dynamic"): False}, 'input_activations.dynamic false: expected "local"'),
    "a group without inputs": (CT_MX, second_group(input_activations=None), "differ between config_groups, mxfp4, None"),
    "outputs": (CT_MX, {(*GROUP, "output_activations"): FP8}, "output_activations .*: expected null"),
    "softmax": (QUARK_MX, said(softmax_quant_spec={"dtype": "fp8_e4m3"}), "softmax_quant_spec .*: expected null"),
    "rule of scales": (
        QUARK_MX,
        {(*QUARK_ALL, "input_tensors", "scale_calculation_mode"): "floor"},
        'input_tensors.scale_calculation_mode "floor": expected "even"',
    ),
    "FP8 inputs, ModelOpt": (DATA / "modelopt-mxfp4-qwen3moe", said(quant_algo="W4A8_MXFP4_FP8"), "W4A8_MXFP4_FP8"),
    "inputs unsaid, ModelOpt": (DATA / "modelopt-mxfp4-qwen3moe", {}, f"quant_algo {UNSAID}"),
    "a choice by module": (
        TORCHAO,
        torchao_by_module(**{"model.layers.0.mlp.gate": activation_dtype("float8_e4m3fn")}),
        'quant_type "FqnToConfig": its modules differ',
    ),
    "another config": (
        TORCHAO,
        {("quantization_config", "quant_type", "default", "_type"): "Int4WeightOnlyConfig"},
        'quant_type "Int4WeightOnlyConfig": expected MXDynamic',
    ),
    "dynamic inputs, ModelOpt": (MODELOPT, {(*INPUTS, "dynamic"): True}, "input_activations.dynamic true: expected false"),
    "rule of scales, torchao": (
        TORCHAO,
        {("quantization_config", "quant_type", "default", "_data", "scaling_mode", "_data"): "FLOOR"},
        'scaling_mode "FLOOR": expected "RCEIL"',
    ),
    "more than one choice": (TORCHAO, {("quantization_config", "quant_type", "lm_head"): {}}, "quant_type.lm_head .*alone"),
    "size of blocks, torchao": (
        TORCHAO,
        {("quantization_config", "quant_type", "default", "_data", "block_size"): 16},
        "block_size 16: expected 32",
    ),
    "a layer of another algorithm": (
        MODELOPT,
        said(quantized_layers={f"{EXPERT}.gate_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16}}),
        'gate_proj.quant_algo "W4A16_NVFP4": expected NVFP4, as quant_algo says of all',
    ),
    "no groups": (CT, said(config_groups={}), "config_groups {}: expected a group"),
    "no config of all, Quark": (QUARK_MX, said(global_quant_config={}), "global_quant_config {}: expected an object"),
    "symmetry, Quark": (
        QUARK_MX,
        {(*QUARK_ALL, "input_tensors", "symmetric"): False},
        "input_tensors.symmetric false: expected true",
    ),
    "blocks, Quark": (
        QUARK_MX,
        {(*QUARK_ALL, "input_tensors", "block_size"): [32]},
        r"input_tensors.block_size \[32\]: expected null",
    ),
    "dynamic scales, Quark": (
        QUARK_NV,
        {(*QUARK_ALL, "input_tensors"): lambda specs: [specs[0], specs[1] | {"is_dynamic": True}]},
        "input_tensors.1.is_dynamic true: expected false",
    ),
    "inputs unsaid": (
        TORCHAO,
        {("quantization_config", "quant_type", "default", "_data", "activation_dtype"): None},
        "expected an activation_dtype",
    ),
}


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
FP8_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel"}
MIXED = {("quantization_config", "format"): "mixed-precision"}
QUARK_INPUT = {"dtype": "fp4", "group_size": 32}


def quark_layer(pattern, **weight):
    """Of modules another weight than all others have, with their inputs."""
    return said(layer_quant_config={pattern: {"weight": weight, "input_tensors": QUARK_INPUT}})


OTHERS = [  # weights in no blocks that are read, of some modules
    (CT, lambda target: MIXED | second_group(targets=[target], weights=INT4, format="pack-quantized"), "group_1", "int4"),
    (CT, lambda target: MIXED | second_group(targets=[target], weights=FP8_WEIGHTS, format=None), "group_1", "float8"),
    (QUARK_MX, lambda target: quark_layer(target.replace("re:.", ""), dtype="int4", group_size=32), "layer_quant", "int4"),
    (QUARK_MX, lambda target: quark_layer(target.replace("re:.", ""), dtype="fp4", group_size=64), "layer_quant", "fp4"),
    (QUARK_MX, lambda target: quark_layer(target.replace("re:.", ""), dtype="fp8_e4m3"), "layer_quant", "fp8_e4m3"),
]


@pytest.mark.parametrize("source, config, key, given", OTHERS)
def test_weights_that_a_config_has_in_other_blocks_are_refused_stored_in_these_and_named_in_any_case(
    source, config, key, given, tmp_path
):
    path = edited(source, tmp_path / "c", config("re:.*down_proj"))
    refused(lambda: load_checkpoint(path, weights_only=True), rf"down_proj.weight_scale: .* says {given} in other blocks")
    path = edited(source, tmp_path / "d", config("re:.*elsewhere"))
    refused(lambda: load_checkpoint(path), f"{key}.*weight.* {{.*: expected .*weights_only=True takes the weights alone")
    assert load_checkpoint(path, weights_only=True).formats == load_checkpoint(source).formats


def test_inputs_quantized_before_a_weight_that_is_not_are_refused(tmp_path):
    layers = {"*.lm_head": {"weight": None, "input_tensors": QUARK_INPUT}}
    path = edited(QUARK_MX, tmp_path / "c", said(layer_quant_config=layers))
    refused(
        lambda: load_checkpoint(path), r"layer_quant_config.\*.lm_head.input_tensors {.*: expected null, as its weight is"
    )


SKIPPED = [
    (
        CT,
        {("quantization_config", "ignore"): lambda names: [*names, f"{EXPERT}.gate_proj"]},
        "the config leaves it as it is",
    ),
    (
        QUARK_MX,
        said(layer_quant_config={f"{EXPERT}.gate_proj": {"weight": None, "input_tensors": None}}),
        "the config leaves it as it is",
    ),
    (CT, {(*GROUP, "targets"): []}, "no target of the config means it"),
    (CT, {(*GROUP, "targets"): ["Conv2d", "re:.*up_proj"]}, "no target of the config means it"),
]


def not_followed(case, tmp_path):
    source, changes, message = case
    path = edited(source, tmp_path / "c", changes)
    if "hf_quant_config.json" not in message:
        (path / "hf_quant_config.json").unlink(missing_ok=True)  # which would say other things
    return path, message


@pytest.mark.parametrize("case", NOT_FOLLOWED)
def test_a_config_that_says_what_the_weights_are_not_is_refused_by_its_key(case, tmp_path):
    path, message = not_followed(NOT_FOLLOWED[case], tmp_path)
    refused(lambda: load_checkpoint(path, weights_only=True), message)
    refused(lambda: convert_checkpoint(path, tmp_path / "out", to="plain"), message)
    faults = inspect_checkpoint(path).faults
    assert any(re.search(message, fault.detail) for fault in faults), faults


@pytest.mark.parametrize("case", NOT_RUN)
def test_a_config_that_says_what_no_layer_runs_is_refused_unless_weights_alone_are_asked_for(case, tmp_path):
    source = NOT_RUN[case][0]
    path, message = not_followed(NOT_RUN[case], tmp_path)
    refused(lambda: load_checkpoint(path), f"{message}.*weights_only=True takes the weights alone")
    (fault,) = inspect_checkpoint(path).faults
    assert fault.what == "config" and re.search(message, fault.detail)
    same = load_checkpoint(source, weights_only=True).dialect
    with pytest.raises(ValueError, match=f"{message}.*activations=None"):
        convert_checkpoint(path, tmp_path / "out", to=same)
    assert not (tmp_path / "out").exists()
    conversion = convert_checkpoint(path, tmp_path / "out", to="plain", format="f32")
    assert re.search(f"not carried over: .*{message}", conversion.notes[0])
    name = conversion.changes[0].name
    expected = mxref.dequantize(load_checkpoint(source, weights_only=True)[name].tensor)
    assert_same_bits(load_checkpoint(tmp_path / "out")[name], expected)


def test_what_is_left_out_of_a_conversion_is_not_in_its_config(tmp_path):
    path = edited(CT_MX, tmp_path / "c", {INPUTS: FP8})
    convert_checkpoint(path, tmp_path / "out", to="compressed-tensors", activations=None)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["quantization_config"]["config_groups"]["group_0"]["input_activations"] is None
    assert load_checkpoint(tmp_path / "out").scheme == "w_mxfp4"


def test_a_scale_of_the_inputs_beside_a_weight_is_refused(tmp_path):
    name = f"{EXPERT}.down_proj.pre_quant_scale"
    path = copy(MODELOPT, tmp_path / "c", lambda tensors: tensors.update({name: torch.ones(128)}))
    refused(lambda: load_checkpoint(path), f"{name}: not applied")
    assert [(fault.what, fault.name) for fault in inspect_checkpoint(path).faults] == [("layout", name)]


def test_torchaos_choice_by_module_is_followed_where_all_that_is_quantized_is_quantized_alike(tmp_path):
    path = edited(TORCHAO, tmp_path / "c", torchao_by_module(**{"model.layers.0.mlp.gate": None}))
    assert load_checkpoint(path).scheme == "w_mxfp4_a_mxfp4" and inspect_checkpoint(path).faults == ()
    settings = ("quantization_config", "quant_type", "default", "_data")
    for key, where in (("weight_dtype", "weights"), ("activation_dtype", "inputs")):
        edited(TORCHAO, tmp_path / key, {(*settings, key, "_data"): "float8_e4m3fn"})
        message = f"the header says {where} in mxfp4, and the config mxfp8_e4m3"
        refused(lambda key=key: load_checkpoint(tmp_path / key), message)


@pytest.mark.parametrize(
    "key, value", [("block_size", 16), ("scaling_mode", {"_type": "ScaleCalculationMode", "_data": "FLOOR"})]
)
def test_inputs_that_torchaos_header_quantizes_otherwise_are_refused(key, value):
    metadata = open_shards(TORCHAO)[0].metadata
    name = next(name for name, text in metadata.items() if "act_quant_kwargs" in text)
    described = json.loads(metadata[name])
    says = declared("torchao", json.loads((TORCHAO / "config.json").read_text())["quantization_config"])
    assert header_says("torchao", metadata, name, says)[0] == "mxfp4"
    described["_data"]["act_quant_kwargs"]["_data"][key] = value
    refused(
        lambda: header_says("torchao", {name: json.dumps(described)}, name, says),
        f"{name}: the header says act_quant_kwargs.{key} .*: expected ",
    )


def test_headers_of_torchaos_shards_that_contradict_each_other_are_refused(tmp_path):
    path = copy(TORCHAO, tmp_path / "c")
    shard(path, lambda name: int("k_proj" in name))  # both headers describe all
    assert len(load_checkpoint(path).quantized) == len(load_checkpoint(TORCHAO).quantized)
    name, file = "model.layers.0.self_attn.k_proj.weight", path / "model-1.safetensors"
    metadata = Shards([file]).metadata
    spaced = {key: text.replace(":", " : ") for key, text in metadata.items() if key != "format"}
    save_file(load_file(file), file, metadata=metadata | spaced | {"tensor_names": "[]", "tool": "another"})
    assert len(load_checkpoint(path).quantized) == len(load_checkpoint(TORCHAO).quantized)
    linear = {
        name: metadata[name].replace('"is_swizzled_scales": true}, "_tensor', '"is_swizzled_scales": false}, "_tensor')
    }
    save_file(load_file(file), file, metadata=metadata | linear)
    message = r"the headers of model-0.safetensors and model-1.safetensors say _data.is_swizzled_scales True and False"
    refused(lambda: load_checkpoint(path), f"{name}: {message}")


@pytest.mark.parametrize("source, config, why", SKIPPED)
def test_a_quantized_weight_that_the_config_leaves_as_it_is_is_refused(source, config, why, tmp_path):
    path = edited(source, tmp_path / "c", config)
    message = f"stored quantized, and {why}"
    refused(lambda: load_checkpoint(path, weights_only=True), f"proj.* {message}")
    faults = [fault for fault in inspect_checkpoint(path).faults if re.search(message, fault.detail)]
    assert f"{EXPERT}.gate_proj" in {fault.name.rpartition(".")[0] for fault in faults}


EXPRESSIONS = [
    (CT, said(ignore=["lm_head", "re:("]), "ignore"),
    (CT, {(*GROUP, "targets"): ["re:("]}, "config_groups.group_0.targets"),
    (QUARK_MX, said(layer_quant_config={"re:(": {}}), "layer_quant_config"),
    (QUARK_MX, said(exclude=["re:("]), "exclude"),
]


@pytest.mark.parametrize("source, config, key", EXPRESSIONS, ids=[key for *_, key in EXPRESSIONS])
def test_a_broken_expression_in_a_config_is_refused_by_its_key(source, config, key, tmp_path):
    path = edited(source, tmp_path / "c", config)
    refused(
        lambda: load_checkpoint(path, weights_only=True), rf"the config's {key}: 're:\(' is no regular expression: missing"
    )


@pytest.mark.parametrize("pattern", ["{}", "*{}", "re:.*{}$"])
def test_many_patterns_are_made_ready_once(pattern, monkeypatch):
    compiled = []
    monkeypatch.setattr(re, "compile", lambda text, compile=re.compile: compiled.append(text) or compile(text))
    names = [f"model.layers.{i}.mlp.up_proj" for i in range(50)]
    says = declared("compressed-tensors", {"ignore": [pattern.format(name) for name in names]})
    assert all(says.leaves(name) for name in names) and says.leaves("model.layers.50.mlp.up_proj") is None
    assert len(compiled) <= len(names)


def test_groups_of_other_formats_are_those_of_their_modules_a_name_before_an_expression_before_a_class(tmp_path):
    mxfp4 = {"num_bits": 4, "type": "float", "group_size": 32}
    path = edited(CT, tmp_path / "c", MIXED | second_group(weights=mxfp4, format="mxfp4-pack-quantized"))
    refused(lambda: load_checkpoint(path), "down_proj.weight_scale: .* the config says mxfp4")
    both = {"targets": ["re:.*experts.*"], "weights": mxfp4}
    groups = {"a": {"targets": ["re:.*down_proj"]}, "b": both, "c": {"targets": ["Linear"]}}
    says = declared("compressed-tensors", {"config_groups": groups})
    assert says.clash("m.experts.0.down_proj") == ("re:.*down_proj", "re:.*experts.*")
    assert says.clash("m.experts.0.up_proj") is None and says.clash("m.q_proj") is None
    named = groups | {"d": {"targets": ["m.experts.0.down_proj"]}}
    assert declared("compressed-tensors", {"config_groups": named}).clash("m.experts.0.down_proj") is None


def test_modelopts_mxfp8_has_inputs_in_it_and_its_mxfp4_what_groups_say():
    said = [{"quant_algo": "MXFP8"}, {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"m": {"quant_algo": "MXFP8"}}}]
    for config in said:
        says = declared("modelopt", config)
        assert (says.activations, says.static, says.unread, says.refused) == ("mxfp8_e4m3", False, (), ())
    arguments = {"num_bits": 4, "type": "float", "group_size": 32}
    for inputs, expected in ((None, None), (arguments | {"dynamic": True}, "mxfp4")):
        groups = {"g": {"targets": ["Linear"], "weights": arguments, "input_activations": inputs}}
        says = declared("modelopt", {"quant_algo": "mxfp4", "config_groups": groups})
        assert (says.activations, says.unread, says.refused) == (expected, (), ())


def test_modelopts_two_configs_are_read_as_one(tmp_path):
    path = edited(MODELOPT, tmp_path / "c", {("quantization_config",): {"quant_method": "modelopt"}})
    assert load_checkpoint(path).scheme == "w_nvfp4_a_nvfp4"
    assert load_checkpoint(path).declared.skips == load_checkpoint(MODELOPT).declared.skips
    path = edited(MODELOPT, tmp_path / "d", {("quantization", "quant_algo"): "MXFP8"}, "hf_quant_config.json")
    refused(
        lambda: load_checkpoint(path), 'quant_algo "NVFP4" and hf_quant_config.json quant_algo "MXFP8": expected the same'
    )
    shutil.copy(MODELOPT / "hf_quant_config.json", copy(QUARK, tmp_path / "e"))
    refused(lambda: load_checkpoint(tmp_path / "e"), "says quant_method 'quark', and hf_quant_config.json .* of modelopt")
    assert load_checkpoint(tmp_path / "e", dialect="quark").formats == ("mxfp6_e2m3",)


CACHES = [
    (CT, said(kv_cache_scheme=FP8), {}, "kv_cache_scheme"),
    (QUARK, said(kv_cache_quant_config={"*k_proj": {"output_tensors": {"dtype": "fp8_e4m3"}}}), {}, "kv_cache_quant_config"),
    (MODELOPT, {}, {("quantization", "kv_cache_quant_algo"): "FP8"}, "kv_cache_quant_algo"),
]


@pytest.mark.parametrize("source, changes, beside, key", CACHES, ids=lambda each: each if isinstance(each, str) else "")
def test_a_quantized_kv_cache_is_said_everywhere_and_no_matter_of_weights(source, changes, beside, key, tmp_path):
    path = edited(source, tmp_path / "b", beside, "hf_quant_config.json") if beside else source
    path = edited(path, tmp_path / "c", changes)
    (cache,) = load_checkpoint(path).declared.cache
    assert re.fullmatch(f"{key} .*: the KV cache is left as it is", cache)
    assert load_checkpoint(path).scheme == load_checkpoint(source).scheme
    inspection = inspect_checkpoint(path)
    assert inspection.faults == () and [f.detail for f in inspection.findings if f.what == "KV cache"] == [cache]
    conversion = convert_checkpoint(path, tmp_path / "out", to="plain")
    assert conversion.notes[0] == "what the config says of the KV cache is not carried over"


# inspect


@pytest.mark.parametrize("path", FOUND, ids=label)
def test_real_checkpoints_have_no_fault(path):
    inspection = inspect_checkpoint(path)
    unsaid = [("config", f"quant_algo {UNSAID}")] if path.name.startswith("modelopt-mxfp4") else []
    assert [(fault.what, fault.detail) for fault in inspection.faults] == unsaid
    expected = {"config"} if unsaid else {"gate and up: tensor scale"} if "nvfp4ish" in path.name else set()
    assert {finding.what for finding in inspection.findings} == expected
    assert (inspection.dialect, inspection.scheme) == KINDS[path.name][:2]
    whole = path.parent != DATA
    assert (inspection.layers, inspection.experts) == (1 + whole, 8 if whole else 2)


WEIGHT = f"{EXPERT}.gate_proj.weight"
PLANTED = {
    "NaN block scales": (CT, SCALE, lambda t: set_bytes(t, 0x7F), "fault", WEIGHT, "3 of 64"),
    "input scale": (CT, INPUT, lambda t: t * 0, "fault", WEIGHT, "0.0: an input never seen"),
    "input scale, infinite": (CT, INPUT, lambda t: t * torch.inf, "fault", WEIGHT, "inf"),
    "input scale, NaN": (CT, INPUT, lambda t: t * torch.nan, "fault", WEIGHT, "nan"),
    "input scale, negative": (CT, INPUT, lambda t: -t, "fault", WEIGHT, "^-"),
    "input scale, huge": (CT, INPUT, lambda t: t * 0 + 1e30, "fault", WEIGHT, r"1e\+30: of inputs up to 2.69e-27, expected"),
    "input scale, huge, ModelOpt": (
        MODELOPT,
        f"{EXPERT}.gate_proj.input_scale",
        lambda t: t * 0 + 1e30,
        "fault",
        WEIGHT,
        r"1e\+30: of inputs up to 2.69e\+33, expected",
    ),
    "input scale, missing": (CT, INPUT, lambda t: None, "fault", WEIGHT, "missing"),
    "implausible weights": (CT, GLOBAL, lambda t: 1 / t, "fault", WEIGHT, r"divides, 0\.\d+ the other way"),
    "implausible weights, ModelOpt": (
        MODELOPT,
        f"{EXPERT}.gate_proj.weight_scale_2",
        lambda t: 1 / t,
        "fault",
        WEIGHT,
        r"multiplies, 0\.\d+ the other way",
    ),
    "gate and up: tensor scale": (CT, GLOBAL, lambda t: t * 2, "warning", WEIGHT, "gate's is 2 times up's"),
    "gate and up: input scale": (CT, INPUT, lambda t: t * 4, "warning", WEIGHT, "gate's is 4 times up's"),
    "all zero": (CT, PACKED, lambda t: t * 0, "warning", WEIGHT, ""),
    "layout": (CT, SCALE, lambda t: t[:, 1:].contiguous(), "fault", SCALE, "do not fit"),
    "values": (CT, GLOBAL, lambda t: -t, "fault", WEIGHT, "tensor_scale holds -"),
}


def set_bytes(scales, code):
    """The first three scales with a byte of the caller's."""
    scales.view(torch.uint8).view(-1)[:3] = code
    return scales


@pytest.mark.parametrize("fault", PLANTED)
def test_inspect_finds_a_planted_fault(fault, tmp_path):
    source, name, change, severity, where, detail = PLANTED[fault]
    inspection = inspect_checkpoint(copy(source, tmp_path / "c", change_at(name, change)))
    found = [f for f in inspection.findings if f.what == fault.split(",")[0] and f.name == where]
    assert len(found) == 1 and found[0].severity == severity, inspection.findings
    assert re.search(detail, found[0].detail)
    others = [f for f in inspection.faults if f is not found[0]]
    assert others == []


def test_inspect_finds_what_load_refuses(tmp_path):
    up, down = (f"{EXPERT}.{part}_proj" for part in ("up", "down"))

    def beyond(found):
        more = {name.replace(".experts.1.", ".experts.2."): t.clone() for name, t in found.items() if ".experts.1." in name}
        found.update(more)

    def later(found):
        found["model.layers.1.input_layernorm.weight"] = torch.ones(128)

    def mixed(found):
        for suffix in ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"):
            del found[f"{up}.{suffix}"]
        found |= {f"{up}.weight_packed": torch.full((8, 64), 0x22, dtype=torch.uint8)}
        found |= {f"{up}.weight_scale": torch.full((8, 4), 120, dtype=torch.uint8)}

    def in_part(found):
        mixed(found)
        del found[f"{up}.weight_packed"], found[f"{up}.weight_scale"]
        found[f"{up}.weight"] = torch.ones(8, 128)

    both = second_group(
        targets=[up], weights={"num_bits": 4, "type": "float", "group_size": 32}, format="mxfp4-pack-quantized"
    )
    layer = EXPERT.removesuffix(".0")
    for change, config, expected in [
        (beyond, {}, ("too many", f"{layer}.2.gate_proj", "the config counts 2 experts, the first is 0")),
        (later, {}, ("too many", "*.layers.1", "the config counts 1 layers, the first is 0")),
        (
            change_at("model.norm.weight", torch.Tensor.double),
            {},
            ("dtype", "model.norm.weight", "F64: expected one of F32"),
        ),
        (
            lambda found: found.update({f"{down}.awq_scale": torch.ones(8)}),
            {},
            ("unknown tensor", f"{down}.awq_scale", "beside a quantized weight: expected bias"),
        ),
        (mixed, both, ("formats", layer, r"nvfp4 \(.*\), mxfp4 \(.*\): expected one for all experts")),
        (in_part, said(ignore=[up, "lm_head"]), ("quantized in part", layer, f"{up}.weight is not: expected all")),
        (dict.clear, {}, ("files", str(tmp_path / "d"), "there is no tensor in them")),
    ]:
        path = edited(copy(CT, tmp_path / "c", change), tmp_path / "d", config)
        found = [f for f in inspect_checkpoint(path).findings if (f.what, f.name) == expected[:2]]
        assert len(found) == 1 and re.search(expected[2], found[0].detail), (expected, inspect_checkpoint(path))
        assert found[0].severity == ("warning" if change is in_part else "fault")
        shutil.rmtree(tmp_path / "c"), shutil.rmtree(tmp_path / "d")
    predicting = copy(CT, tmp_path / "c", later, config={"num_nextn_predict_layers": 1})
    assert "too many" not in {fault.what for fault in inspect_checkpoint(predicting).faults}


NO_PLACE = [
    ("model.layers.0.extra.weight", "fault"),
    ("model.layers.0.self_attn.q_proj.bias", "fault"),
    ("model.layers.0.mlp.gate.bias", "fault"),
    ("model.layers.0.mlp.experts.down_proj_bias", "fault"),
    ("model.layers.0.self_attn.rotary_emb.inv_freq", "warning"),
    ("model.layers.0.self_attn.k_scale", "warning"),
    ("model.extra.weight", "warning"),
    ("score.weight", "warning"),
]


@pytest.mark.parametrize("name, severity", NO_PLACE)
def test_inspect_finds_tensors_that_have_no_place(name, severity, tmp_path):
    (finding,) = inspect_checkpoint(copy(CT, tmp_path / "c", lambda found: found.update({name: torch.ones(2)}))).findings
    assert (finding.severity, finding.what, finding.name) == (severity, "no place", name)
    assert finding.detail == "a model of type qwen3_moe has none for it"


@pytest.mark.parametrize("part", ["model.layers.{}.x.weight", "model.layers.0.mlp.experts.{}.up_proj.bias"])
def test_inspect_takes_no_number_of_thousands_of_digits(part, tmp_path):
    name = part.format("9" * 5000)
    inspection = inspect_checkpoint(copy(CT, tmp_path / "c", lambda found: found.update({name: torch.ones(2)})))
    assert [(finding.what, finding.name) for finding in inspection.findings] == [("no place", name)]


def test_what_a_model_of_another_kind_predicts_or_caches_has_a_place(tmp_path):
    def more(tensors):
        tensors |= {f"model.layers.0.self_attn.{part}_proj.{part}_scale": torch.ones(()) for part in "kv"}
        tensors["model.layers.1.eh_proj.weight"] = torch.ones(2, 4)

    predicting = copy(MODELOPT, tmp_path / "c", more, config={"num_nextn_predict_layers": 1})
    path = edited(predicting, tmp_path / "d", {("quantization", "kv_cache_quant_algo"): "FP8"}, "hf_quant_config.json")
    found = {(finding.severity, finding.what) for finding in inspect_checkpoint(path).findings}
    assert ("warning", "KV cache") in found and not {what for _, what in found} & {"no place", "unknown tensor", "too many"}
    config = {"model_type": "of which nothing is known"}
    path = copy(CT, tmp_path / "e", lambda found: found.update({"model.layers.0.extra": torch.ones(2)}), config=config)
    assert inspect_checkpoint(path).findings == ()


def test_inspect_finds_what_is_missing_and_what_is_unknown(tmp_path):
    def change(tensors):
        for name in [name for name in tensors if ".experts.1.up_proj" in name]:
            del tensors[name]
        tensors["model.layers.0.mlp.experts.0.up_proj.g_idx"] = torch.zeros(3, dtype=torch.uint8)
        tensors["model.layers.0.mlp.shared.weight_scale_2"] = torch.ones(())
        tensors["model.layers.0.self_attn.q_proj.weight"] = torch.ones(8, 128)
        tensors["model.layers.0.mlp.extra_proj.weight"] = torch.ones(8, 128)

    path = copy(CT, tmp_path / "c", change, config={"num_hidden_layers": 10**12, "num_local_experts": 10**12})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["ignore"].remove("model.layers.0.self_attn.k_proj")
    (path / "config.json").write_text(json.dumps(config))
    faults = {(f.what, f.name): f.detail for f in inspect_checkpoint(path).faults}
    assert faults.pop(("missing", "*.layers.1")) == "999999999999 of 1000000000000 layers are not there"
    missing = {name: detail for (what, name), detail in faults.items() if what == "missing"}
    experts = "model.layers.0.mlp.experts"
    assert missing == {
        f"{experts}.2.down_proj": "999999999998 of 1000000000000 experts are not there",
        f"{experts}.2.gate_proj": "999999999998 of 1000000000000 experts are not there",
        f"{experts}.1.up_proj": "999999999999 of 1000000000000 experts are not there",
    }
    kinds = {(what, name) for what, name in faults if what != "missing"}
    assert kinds == {
        ("unknown tensor", "model.layers.0.mlp.experts.0.up_proj.g_idx"),
        ("unknown tensor", "model.layers.0.mlp.shared.weight_scale_2"),
        ("not quantized", "model.layers.0.self_attn.k_proj.weight"),
        ("not quantized", "model.layers.0.mlp.extra_proj.weight"),
        ("shape", "model.layers.0.mlp.gate.weight"),
    }


EVERY_LAYER = ["input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.q_norm.weight", "mlp.gate.weight"]


@pytest.mark.parametrize(
    "name", [*(f"model.layers.0.{part}" for part in EVERY_LAYER), "model.norm.weight", "lm_head.weight"]
)
def test_inspect_misses_what_every_model_of_its_type_has(name, tmp_path):
    path = copy(CT, tmp_path / "c", lambda tensors: tensors.pop(name))
    (fault,) = inspect_checkpoint(path).faults
    assert (fault.what, fault.name) == ("missing", name)
    assert fault.detail == ("1 of 1 layers lack it" if ".layers." in name else "every model of this type has it")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "of which nothing is known"}))
    assert inspect_checkpoint(path).faults == ()


def test_inspect_misses_a_quantized_projection_and_a_router_of_another_name(tmp_path):
    def change(tensors):
        for name in [name for name in tensors if "self_attn.q_proj" in name or "router.bias" in name]:
            del tensors[name]

    faults = inspect_checkpoint(copy(DATA / "modelopt-nvfp4-gptoss", tmp_path / "c", change)).faults
    expected = {f"model.layers.0.{part}" for part in ("self_attn.q_proj.weight", "self_attn.q_proj.bias", "mlp.router.bias")}
    assert {fault.name for fault in faults} == expected and {fault.what for fault in faults} == {"missing"}


STACKS, APART = DATA / "gptoss_layout-mxfp4-gptoss", DATA / "llmcompressor-nvfp4-gptoss"
BIASES = [
    (STACKS, "self_attn.q_proj.bias", "self_attn.q_proj.bias"),
    (STACKS, "mlp.experts.gate_up_proj_bias", "mlp.experts.gate_up_proj_bias"),
    (STACKS, "mlp.experts.down_proj_bias", "mlp.experts.down_proj_bias"),
    (APART, "mlp.experts.1.gate_proj.bias", "mlp.experts.1.gate_proj.bias"),
    (APART, r"mlp.experts.\d.up_proj.bias", "mlp.experts.gate_up_proj_bias"),
    (APART, r"mlp.experts.\d.down_proj.bias", "mlp.experts.down_proj_bias"),
]


@pytest.mark.parametrize("source, gone, name", BIASES)
def test_inspect_misses_biases_and_compares_their_shapes(source, gone, name, tmp_path):
    def without(tensors):
        for each in [each for each in tensors if re.fullmatch(f"model.layers.0.{gone}", each)]:
            del tensors[each]

    (fault,) = inspect_checkpoint(copy(source, tmp_path / "less", without)).faults
    assert (fault.what, fault.name) == ("missing", f"model.layers.0.{name}")
    config = {"hidden_size": 9, "intermediate_size": 9, "num_attention_heads": 5}
    faults = inspect_checkpoint(copy(source, tmp_path / "other", config=config)).faults
    assert any(fault.what == "shape" and re.fullmatch(f"model.layers.0.{gone}", fault.name) for fault in faults)


def test_inspect_misses_what_a_later_layer_of_a_dense_model_lacks(tmp_path):
    parts = ["input_layernorm", "post_attention_layernorm", *(f"self_attn.{p}_proj" for p in "qkvo")]
    parts += [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    shapes = {part: (2,) if "norm" in part else (2, 2) for part in parts}
    found = {f"model.layers.{i}.{part}.weight": torch.ones(shapes[part]) for i in range(12) for part in parts}
    del found["model.layers.2.mlp.up_proj.weight"], found["model.layers.10.mlp.up_proj.weight"]
    found |= {"model.embed_tokens.weight": torch.ones(2, 2), "model.norm.weight": torch.ones(2)}
    save_file(found, tmp_path / "model.safetensors")
    config = {"model_type": "llama", "num_hidden_layers": 12, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (fault,) = inspect_checkpoint(tmp_path).faults
    assert (fault.name, fault.detail) == ("model.layers.2.mlp.up_proj.weight", "2 of 12 layers lack it")


PLAIN = "model.layers.0.input_layernorm.weight", "model.norm.weight", "model.layers.0.mlp.gate.weight", "lm_head.weight"


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_inspect_sees_what_is_not_finite_in_a_norm_or_a_router(name, odd, tmp_path):
    def spoil(tensor):
        tensor.view(-1)[[3, -1]] = odd
        return tensor

    (fault,) = inspect_checkpoint(copy(CT, tmp_path / "c", change_at(name, spoil))).findings
    assert (fault.severity, fault.what, fault.name) == ("fault", "not finite", name)
    assert fault.detail == f"2 of {load_file(CT / 'model.safetensors')[name].numel()} are NaN or Inf"


@pytest.mark.parametrize("name", PLAIN[:3])
@pytest.mark.parametrize("dtype, said", [(torch.int64, "I64"), (torch.int16, "I16"), (torch.bool, "BOOL")])
def test_inspect_sees_a_norm_or_a_router_of_integers(name, dtype, said, tmp_path):
    (fault,) = inspect_checkpoint(copy(CT, tmp_path / "c", change_at(name, lambda t: t.to(dtype)))).findings
    assert (fault.severity, fault.what, fault.name) == ("fault", "dtype", name) and fault.detail.startswith(f"{said}: ")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """llm-compressor's and ModelOpt's checkpoints as they were written, with every row, by dialect."""
    folder = tmp_path_factory.mktemp("whole")
    with tarfile.open(DATA / "whole.tar.xz") as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return {"compressed-tensors": folder / CT.name, "modelopt": folder / MODELOPT.name}


LAYER = "model.layers.1."
ROWS = {  # by the config: hidden size 128, 4 heads and 2 of keys, 32 each, experts 96 wide, 8 of them, 512 tokens
    "input_layernorm.weight": "[128]",
    "self_attn.q_norm.weight": "[32]",
    "self_attn.q_proj.weight": "[128, 128]",
    "self_attn.v_proj.weight": "[64, 128]",
    "mlp.gate.weight": "[8, 128]",
    "mlp.experts.5.up_proj.weight": "[96, 128]",
    "mlp.experts.7.down_proj.weight": "[128, 96]",
    "": "[512, 128]",
}


@pytest.mark.parametrize("part", ROWS)
@pytest.mark.parametrize("dialect", ["compressed-tensors", "modelopt"])
def test_inspect_compares_rows_with_the_config(dialect, part, whole, tmp_path):
    """Also where codes and scales lack the same row."""
    assert inspect_checkpoint(whole[dialect]).faults == ()
    name = LAYER + part if part else "model.embed_tokens.weight"
    module = name.removesuffix("weight")

    def cut(tensors):
        for each in [each for each in tensors if each.startswith(module)]:
            if tensors[each].ndim and tensors[each].numel() > 1:
                tensors[each] = tensors[each][:-1].contiguous()

    (fault,) = inspect_checkpoint(copy(whole[dialect], tmp_path / "c", cut)).faults
    assert (fault.what, fault.name) == ("shape", name) and fault.detail.endswith(f", and by the config {ROWS[part]}")


def test_inspect_knows_the_shapes_of_the_models_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    from tiny_models import MOE_KINDS, tiny_model

    for kind in [*MOE_KINDS, "qwen2moe", "llama"]:
        tiny_model(kind).save_pretrained(tmp_path / kind)
        assert inspect_checkpoint(tmp_path / kind).findings == (), kind
        config = json.loads((tmp_path / kind / "config.json").read_text())
        changed = config | {"hidden_size": 96, "num_attention_heads": 3, "vocab_size": 255, "moe_intermediate_size": 40}
        (tmp_path / kind / "config.json").write_text(json.dumps(changed | {"intermediate_size": 40}))
        found = {re.sub(r"\.\d+", "", fault.name) for fault in inspect_checkpoint(tmp_path / kind).faults}
        expected = {"lm_head.weight", "model.norm.weight", "model.layers.self_attn.o_proj.weight"}
        experts = [name for name in load_checkpoint(tmp_path / kind) if ".experts." in name]
        assert expected | {re.sub(r"\.\d+", "", name) for name in experts} <= found, kind


LLAMA = {
    **{f"{part}_layernorm.weight": (32,) for part in ("input", "post_attention")},
    **{f"self_attn.{part}_proj.weight": (32, 32) for part in "qkvo"},
    **{f"mlp.{part}_proj.weight": (32, 64)[:: 1 if part == "down" else -1] for part in ("gate", "up", "down")},
}


def write_seeing(path, prefix, head, kind="llama", lacking="no tensor"):
    """A model that sees: a language model of two layers below `prefix`, a vision tower of three and other shapes."""
    shapes = {f"{prefix}layers.{i}.{part}": shape for i in range(2) for part, shape in LLAMA.items()}
    shapes |= {f"{prefix}embed_tokens.weight": (16, 32), f"{prefix}norm.weight": (32,), head: (16, 32)}
    tower = [f"vision_tower.encoder.layers.{i}." for i in range(3)]
    shapes |= {f"{each}self_attn.{part}_proj.weight": (4, 4) for each in tower for part in "qk"}
    path.mkdir()
    found = {name: torch.ones(shape) for name, shape in shapes.items() if lacking not in name}
    save_file(found, path / "model.safetensors")
    text = {"model_type": kind, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 16, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 2, "tie_word_embeddings": False}
    config = {"model_type": "llava", "text_config": text, "vision_config": {"num_hidden_layers": 3, "hidden_size": 4}}
    (path / "config.json").write_text(json.dumps(config))
    return path


SEEING = [("language_model.model.", "language_model.lm_head.weight"), ("model.language_model.", "lm_head.weight")]


@pytest.mark.parametrize("prefix, head", SEEING)
@pytest.mark.parametrize("kind", ["llama", "mistral", "of which nothing is known"])
def test_a_vision_tower_has_layers_and_shapes_of_its_own(prefix, head, kind, tmp_path):
    path = write_seeing(tmp_path / "whole", prefix, head, kind)
    inspection = inspect_checkpoint(path)
    assert (inspection.findings, inspection.layers) == ((), 2)
    options = dict(to="compressed-tensors", format="mxfp4", ignore=["re:.*vision.*"])
    convert_checkpoint(path, tmp_path / "out", **options)
    assert inspect_checkpoint(tmp_path / "out").faults == ()
    path = write_seeing(tmp_path / "less", prefix, head, kind, lacking=f"{prefix}layers.1.")
    (fault,) = inspect_checkpoint(path).faults
    assert (fault.what, fault.name, fault.detail) == ("missing", "*.layers.1", "1 of 2 layers are not there")
    with pytest.raises(CheckpointError, match=r"\*\.layers\.1: 1 of 2 layers are not there$"):
        convert_checkpoint(path, tmp_path / "none", **options)


@pytest.mark.parametrize("prefix, head", SEEING)
def test_what_the_language_model_of_a_model_that_sees_lacks_is_missed(prefix, head, tmp_path):
    lacking = [f"{prefix}layers.1.mlp.up_proj.weight", f"{prefix}embed_tokens.weight", f"{prefix}norm.weight", head]
    for number, name in enumerate(lacking):
        (fault,) = inspect_checkpoint(write_seeing(tmp_path / str(number), prefix, head, lacking=name)).faults
        assert (fault.what, fault.name) == ("missing", "lm_head.weight" if name == head else name)


TYPES = [
    (CT, "config_groups", "x", "an object or a list"),
    (CT, "config_groups", {"group_0": "x"}, "an object"),
    (CT, "ignore", "lm_head", "a list"),
    (MODELOPT, "quantized_layers", ["x"], "an object"),
    (MODELOPT, "config_groups", 3, "an object or a list"),
    (QUARK, "global_quant_config", "x", "an object"),
    (QUARK, "layer_quant_config", [1], "an object"),
    (DATA / "gptoss_layout-mxfp4-gptoss", "modules_to_not_convert", {}, "a list"),
]


@pytest.mark.parametrize("source, key, value, expected", TYPES)
def test_a_config_of_another_type_is_refused_by_its_key(source, key, value, expected, tmp_path):
    quantization = json.loads((source / "config.json").read_text())["quantization_config"] | {key: value}
    path = copy(source, tmp_path / "c", config={"quantization_config": quantization})
    message = refused(lambda: load_checkpoint(path), f"the config's {key} is .*: expected {expected}$")
    assert [fault.detail for fault in inspect_checkpoint(path).faults] == [message]


NUMBERS = [
    ("hidden_size", float("nan"), "NaN: expected a whole number of at least 1"),
    ("hidden_size", -64, "-64: expected a whole number of at least 1"),
    ("num_hidden_layers", float("inf"), "Infinity: expected a whole number of at least 1"),
    ("num_hidden_layers", 2.0, "2.0: expected a whole number of at least 1"),
    ("num_hidden_layers", True, "true: expected a whole number of at least 1"),
    ("num_attention_heads", 0, "0: expected a whole number of at least 1"),
    ("num_local_experts", "2", '"2": expected a whole number of at least 0'),
    ("num_experts_per_tok", -1, "-1: expected a whole number of at least 0"),
    ("num_experts_per_tok", 0, "0, which num_local_experts 2 cannot give"),
    ("rms_norm_eps", float("nan"), "NaN: expected a finite number of at least 0"),
    ("rms_norm_eps", "x", '"x": expected a finite number of at least 0'),
    ("rope_theta", float("inf"), "Infinity: expected a finite number of at least 0"),
]


@pytest.mark.parametrize("key, value, said", NUMBERS)
def test_inspect_finds_numbers_that_no_model_can_have(key, value, said, tmp_path):
    faults = inspect_checkpoint(copy(CT, tmp_path / "c", config={key: value})).faults
    assert [(fault.name, fault.detail) for fault in faults if fault.what == "config"] == [("config.json", f"{key} {said}")]


def test_numbers_that_are_no_experts_or_one_a_layer_are_sound(tmp_path):
    config = {"num_experts": 0, "num_experts_per_tok": 0, "head_dim": None, "intermediate_size": [4, 8], "rms_norm_eps": 0}
    path = copy(CT, tmp_path / "c", config=config | {"num_local_experts": None})
    assert inspect_checkpoint(path).findings == ()


def test_experts_that_are_stacks_of_floats_are_counted(tmp_path):
    save_file({"model.layers.0.mlp.experts.gate_up_proj": torch.ones(5, 4, 6)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "made"}))
    assert inspect_checkpoint(tmp_path).experts == 5


def test_inspect_says_what_short_blocks_and_scaled_float8_are(tmp_path, rng):
    q = mxref.quantize(torch.from_numpy(rng.standard_normal((4, 40), dtype="float32")), "mxfp4")
    path = write_mx(tmp_path / "made", "modelopt", q, "mxfp4")
    tensors = load_file(path / "model.safetensors")
    tensors |= {"m.o_proj.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "m.o_proj.weight_scale": torch.ones(())}
    save_file(tensors, path / "model.safetensors")
    inspection = inspect_checkpoint(path)
    assert inspection.faults == ()
    assert [(f.what, f.name) for f in inspection.findings] == [
        ("short blocks", "m.q_proj.weight"),
        ("not in blocks", "m.o_proj.weight"),
    ]


def test_inspect_misses_what_the_header_describes(tmp_path):
    def change(tensors):
        for name in [name for name in tensors if "k_proj._weight" in name]:
            del tensors[name]

    faults = inspect_checkpoint(copy(DATA / "torchao-mxfp4-qwen3moe", tmp_path / "c", change)).faults
    assert [(f.what, f.name) for f in faults] == [("missing", "model.layers.0.self_attn.k_proj.weight")]


# command


@pytest.fixture
def inspect():
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from mxref.cli import app

    return lambda *arguments: CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def test_the_command_says_what_a_clean_checkpoint_is(inspect, tmp_path):
    result = inspect(CT, "--json", tmp_path / "r.json")
    assert result.exit_code == 0, result.stderr
    assert "w_nvfp4_a_nvfp4" in result.stdout and "compressed_tensors_nvfp4" in result.stdout
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["quantized"] == 6 and record["plain"] == 12 and record["findings"] == []
    assert json.loads(inspect(CT, "--json", "-").stdout) == record


def test_the_command_ends_in_1_with_a_fault_and_in_0_with_a_warning(inspect, tmp_path):
    result = inspect(copy(CT, tmp_path / "fault", change_at(INPUT, lambda t: t * 0)))
    assert result.exit_code == 1 and "input scale" in result.stdout
    result = inspect(DATA / "quark-nvfp4ish-qwen3moe")
    assert result.exit_code == 0 and "gate and up" in result.stdout


def test_the_command_ends_in_2_on_bad_use(inspect, tmp_path):
    for arguments in ([tmp_path / "nowhere"], [tmp_path], [CT, "--dialect", "gguf"]):
        result = inspect(*arguments)
        assert result.exit_code == 2 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


def test_the_command_shows_some_of_many_findings_and_keeps_brackets(inspect, tmp_path):
    def change(tensors):
        for index in range(20):
            tensors[f"x.[bold]{index}"] = torch.zeros(1, dtype=torch.uint8)

    result = inspect(copy(CT, tmp_path / "c", change))
    assert result.exit_code == 1 and "... and 12 more" in result.stdout and "x.[bold]0" in result.stdout
