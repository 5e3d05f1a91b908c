"""Converted checkpoints: what does not have to change keeps its bits, what changes is measured, and nothing is left half.

Values are compared with what the tools' own decompressors made of their files, files with those of the tools, and what
is written with what compressed-tensors and, where it is installed, ModelOpt read of it. MXREF_CHECKPOINTS: as in
test_checkpoints.py.
"""

import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from bits import assert_same_bits
from heeding import start

pytest.importorskip("safetensors")

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_checkpoints import DATA, FOUND, change_at, copy, label, shard

import mxref
from mxref.checkpoints import CheckpointError, convert_checkpoint, inspect_checkpoint, load_checkpoint
from mxref.checkpoints.files import INDEX, Shards
from mxref.checkpoints.recode import measure
from mxref.checkpoints.writers import ACTIVATIONS, FLOATS, Scheme, placed

QUANTIZED = [path for path in FOUND if not path.name.startswith("base")]
BASE, CT, GPT_OSS = DATA / "base-qwen3moe", DATA / "llmcompressor-nvfp4-qwen3moe", DATA / "gptoss_layout-mxfp4-gptoss"
MODELOPT, QUARK = DATA / "modelopt-nvfp4-qwen3moe", DATA / "quark-mxfp4-qwen3moe"
EXPERT = "model.layers.0.mlp.experts.0"


def tensors(path):
    """Every tensor of a checkpoint, read by safetensors, and by name the shard that holds it."""
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        if not file.name.startswith("golden"):
            found |= load_file(file)
    return found


def config(path):
    return json.loads((path / "config.json").read_text())


def opened(path):
    return load_checkpoint(path, weights_only=True)


def targets(path):
    """(dialect, format) of everything that a checkpoint is converted to, and those in which its weights keep their codes."""
    formats = opened(path).formats
    stacks = any(opened(path).stored[name].layout.stacked for name in opened(path).quantized)
    for to, known in ACTIVATIONS.items():
        for format in known:
            kept = (format,) == formats or (formats, format) == (("mxfp4",), "nvfp4")
            known_stack = to == "compressed-tensors" or (to, format) in (("gpt-oss", "mxfp4"), ("modelopt", "nvfp4"))
            if (not stacks or known_stack) and (to != "gpt-oss" or "gptoss" in path.name):
                yield to, format, kept


KEPT = [(path, to, format) for path in QUANTIZED for to, format, kept in targets(path) if kept]


def inputs(path, to, format):
    """What to ask of inputs: of a checkpoint that does not say how they are quantized something."""
    known = ACTIVATIONS[to][format]
    return dict(activations=None if None in known else known[0]) if opened(path).declared.unread else {}


def shown(value):
    return label(value) if isinstance(value, Path) else str(value)


@pytest.fixture
def convert():
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from mxref.cli import app

    return lambda *arguments: CliRunner().invoke(app, ["convert", *map(str, arguments)])


# what stays


def matrices(values):
    """Matrices `[out, in]` by module: stacks `[E, out, in]` of gpt-oss taken apart, Mixtral's w1 called a gate."""
    found, usual = {}, {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    for name, value in values.items():
        experts, kind = name.rpartition(".")[::2]
        for e in range(len(value)) if value.ndim == 3 else ():
            parts = {kind: value[e]} if kind == "down_proj" else {"gate_proj": value[e, 0::2], "up_proj": value[e, 1::2]}
            found |= {f"{experts}.{e}.{part}": matrix.contiguous() for part, matrix in parts.items()}
        if value.ndim == 2:
            found[re.sub(r"\bw[123]\b", lambda match: usual[match[0]], name.removesuffix(".weight"))] = value
    return found


def decoded(checkpoint, dtype=torch.float32):
    return matrices({name: mxref.dequantize(checkpoint[name].tensor, dtype) for name in checkpoint.quantized})


def zero_signs(*checkpoints) -> bool:
    """Whether the sign of a zero survives: ModelOpt reads NVFP4's -0 as +0."""
    recipes = {checkpoint[name].tensor.recipe.name for checkpoint in checkpoints for name in checkpoint.quantized}
    return "modelopt_nvfp4" not in recipes


@pytest.mark.parametrize("path,to,format", KEPT, ids=shown)
def test_weights_still_decode_to_the_tools_own_values(path, to, format, tmp_path):
    conversion = convert_checkpoint(path, tmp_path / "out", to=to, format=format, **inputs(path, to, format))
    source, out = opened(path), load_checkpoint(tmp_path / "out")
    before, after = decoded(source), decoded(out)
    assert set(before) == set(after) and inspect_checkpoint(tmp_path / "out").faults == ()
    if any(change.how == "turned" for change in conversion.changes):
        for name in before:
            assert ((after[name].double() / before[name].double()).nan_to_num(1.0) - 1).abs().max() <= 2.0**-22
        return
    zero = -0.0 if zero_signs(source, out) else 0.0  # x + -0.0 is x; x + 0.0 has no negative zero
    for name in before:
        assert_same_bits(after[name] + zero, before[name] + zero, name)
    if (path / "golden_dequant.safetensors").exists():
        golden = load_file(path / "golden_dequant.safetensors")
        golden = {name: value.transpose(1, 2) if value.ndim == 3 else value for name, value in golden.items()}
        dtype = next(iter(golden.values())).dtype
        found = decoded(out, dtype)
        for name, expected in matrices(golden).items():
            assert_same_bits(found[name] + zero, expected.contiguous() + zero, name)


SAID = [path for path in QUANTIZED if "torchao" not in path.name and not opened(path).declared.unread]


@pytest.mark.parametrize("path", SAID, ids=label)
def test_the_same_dialect_and_format_is_the_same_file(path, tmp_path):
    dialect = load_checkpoint(path).dialect
    conversion = convert_checkpoint(path, tmp_path / "out", to=dialect)
    assert conversion.lossless and {change.how for change in conversion.changes} == {"kept"} and not conversion.notes
    expected, found = load_file(path / "model.safetensors"), tensors(tmp_path / "out")
    assert set(found) == set(expected)
    for name in expected:
        assert_same_bits(found[name], expected[name], name)
    assert config(tmp_path / "out") == config(path)
    for file in path.glob("*.json"):
        if file.name != INDEX:
            assert json.loads((tmp_path / "out" / file.name).read_text()) == json.loads(file.read_text())


BACK = [(p, to, format) for p, to, format in KEPT if (format,) == opened(p).formats and "torchao" not in p.name]


@pytest.mark.parametrize("path,to,format", BACK, ids=shown)
def test_there_and_back_is_the_same_file_unless_a_tensor_scale_turned(path, to, format, tmp_path):
    there = convert_checkpoint(path, tmp_path / "there", to=to, format=format, **inputs(path, to, format))
    dialect = opened(path).dialect
    back = convert_checkpoint(tmp_path / "there", tmp_path / "back", to=dialect, activations=None)
    expected, found = load_file(path / "model.safetensors"), tensors(tmp_path / "back")
    turned = any(change.how == "turned" for change in there.changes)
    assert turned == (format == "nvfp4" and (to == "compressed-tensors") != path.name.startswith("llmcompressor"))
    of_scales = ("scale_2", "global_scale", "input_scale", "input_global_scale")
    for name, tensor in expected.items():
        if not name.endswith(of_scales):
            assert_same_bits(found[name], tensor, name)
        elif "input" not in name and not turned and "gptoss" not in path.name:
            assert_same_bits(found[name], tensor, name)
    assert turned or not any(change.loss.changed for change in (*there.changes, *back.changes))
    has_inputs = any(name.endswith(("input_scale", "input_scale_2", "input_global_scale")) for name in expected)
    assert all(change.input_dropped == has_inputs for change in back.changes)


def test_what_is_no_weight_goes_along_bit_for_bit(tmp_path):
    path = copy(BASE, tmp_path / "c")
    for file in ("tokenizer.json", "generation_config.json"):
        (path / file).write_text("{}")
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "training_args.bin").write_bytes(b"no")
    convert_checkpoint(path, tmp_path / "out", to="quark", format="mxfp4")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert {"tokenizer.json", "generation_config.json"} <= {file.name for file in (tmp_path / "out").iterdir()}
    assert not (tmp_path / "out" / "training_args.bin").exists()
    source, out = load_checkpoint(path), load_checkpoint(tmp_path / "out")
    for name in out.plain:
        assert_same_bits(out[name], source[name], name)
    without = {key: value for key, value in config(tmp_path / "out").items() if key != "quantization_config"}
    assert without == config(path)


# tensor scales that turn


def decode_nvfp4(codes, scales, tensor_scale, divides):
    """Float32 values of NVFP4 in numpy: the producers' own order, scale over or times tensor scale, then the element."""
    elements = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6] + [-v for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)], dtype=np.float32)
    block = scales.view(torch.float8_e4m3fn).float().numpy()
    factor = block / np.float32(tensor_scale) if divides else block * np.float32(tensor_scale)
    return elements[codes.numpy()] * factor.repeat(16, -1)[:, : codes.shape[1]]


@pytest.mark.parametrize("source,to", [(CT, "modelopt"), (MODELOPT, "compressed-tensors")], ids=["divide", "multiply"])
def test_a_tensor_scale_turns_with_the_least_loss_and_the_loss_is_exact(source, to, tmp_path):
    conversion = convert_checkpoint(source, tmp_path / "out", to=to)
    given, out = load_checkpoint(source), load_checkpoint(tmp_path / "out")
    losses = {change.name: change.loss for change in conversion.changes}
    divides = source == CT
    for name in given.quantized:
        q, r = given[name].tensor, out[name].tensor
        assert_same_bits(r.packed, q.packed)
        assert_same_bits(r.scales, q.scales)
        product = Fraction(q.tensor_scale.item()) * Fraction(r.tensor_scale.item())
        assert abs(product - 1) <= Fraction(3, 2**23)
        before = decode_nvfp4(q.codes, q.scales, q.tensor_scale.item(), divides)
        after = decode_nvfp4(r.codes, r.scales, r.tensor_scale.item(), not divides)
        assert losses[name].changed == (before != after).sum()
        assert losses[name].max_error == np.abs(before - after).max()
        assert losses[name].rms_error == pytest.approx(np.sqrt(np.mean((before - after).astype(np.float64) ** 2)), rel=1e-12)
    for gate in (name for name in out.quantized if "gate_proj" in name):
        up = gate.replace("gate_proj", "up_proj")
        shared = torch.equal(given[gate].tensor.tensor_scale, given[up].tensor.tensor_scale)
        assert torch.equal(out[gate].tensor.tensor_scale, out[up].tensor.tensor_scale) == shared


def test_no_other_reciprocal_changes_fewer_values(tmp_path):
    convert_checkpoint(CT, tmp_path / "out", to="modelopt")
    given, out = load_checkpoint(CT), load_checkpoint(tmp_path / "out")
    for name in (f"{EXPERT}.down_proj.weight", "model.layers.0.mlp.experts.1.down_proj.weight"):
        q, chosen = given[name].tensor, np.float32(out[name].tensor.tensor_scale.item())
        before = decode_nvfp4(q.codes, q.scales, q.tensor_scale.item(), True)
        counts, candidate = {}, np.float32(1) / np.float32(q.tensor_scale.item())
        for _ in range(4):
            candidate = np.nextafter(candidate, np.float32(0))
        for _ in range(9):
            after = decode_nvfp4(q.codes, q.scales, candidate, False)
            counts[candidate] = (after / 6 != before / 6).any(-1).sum(), (before != after).sum()
            candidate = np.nextafter(candidate, np.float32(np.inf))
        assert counts[chosen][1] <= min(count for _, count in counts.values()) + 16 * 8


def test_a_power_of_two_turns_without_loss(tmp_path):
    def change(found):
        for name in found:
            if "global_scale" in name:
                found[name] = torch.full((1,), 512.0)

    path = copy(CT, tmp_path / "c", change)
    conversion = convert_checkpoint(path, tmp_path / "out", to="modelopt")
    assert conversion.lossless
    scales = {
        tensor.item() for name, tensor in tensors(tmp_path / "out").items() if name.endswith(("scale_2", "input_scale"))
    }
    assert scales == {1 / 512}


def test_an_input_scale_without_a_reciprocal_is_refused(tmp_path):
    path = copy(CT, tmp_path / "c", lambda t: t.update({f"{EXPERT}.up_proj.input_global_scale": torch.zeros(1)}))
    with pytest.raises(CheckpointError, match="input scale 0.0 has no reciprocal"):
        convert_checkpoint(path, tmp_path / "out", to="modelopt")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("backend", [None, "inductor"])
@pytest.mark.parametrize("odd, scale", [(None, 0), (torch.nan, 0), (torch.inf, 0), (-torch.inf, 0), (None, -80), (None, 80)])
def test_losses_are_those_of_numpy_in_float64_whatever_pieces_they_are_taken_in(odd, scale, backend):
    """137 * 1536 values are several pieces and a rest; special ones lie in the first. Squares of the last two scales are no
    float32 values."""
    if backend and mxref.registry.kernel("dequantize", backend).requires():
        pytest.skip(mxref.registry.kernel("dequantize", backend).requires())
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(137, 1536, generator=generator) * 2.0**scale).bfloat16()
    if odd is not None:
        x[1, 40] = odd
    x[0, :7] = torch.tensor([0.0, -0.0, 1.0, 1.5, 1e-30, 3.0, 6.0])
    q = mxref.quantize(x, "mxfp4", recipe="ocp_even")
    with mxref.use(*[backend] if backend else []):
        loss = measure(x, q)
    a, b = x.double().numpy(), mxref.dequantize(q).double().numpy()
    finite = np.isfinite(a) & np.isfinite(b)
    squared = ((a - b)[finite] ** 2).sum()
    assert loss.elements == a.size and loss.blocks == q.scales.numel()
    assert loss.changed == ((a != b) & ~(np.isnan(a) & np.isnan(b))).sum()
    appears = bool((np.isfinite(a) & ~np.isfinite(b)).any())
    assert loss.max_error == (np.inf if appears else np.abs((a - b)[finite]).max()) and appears == (odd is not None)
    bound = 2.0**-20 if backend and odd is None and not scale else 1e-11  # as `measure` proves; float64 sums
    assert loss.squared_error == pytest.approx(squared, rel=bound)
    assert loss.squared == pytest.approx((a[np.isfinite(a)] ** 2).sum(), rel=bound)


TINY = [(1.0, 1e-9), (1e-38, 1.0), (1e-43, 1.0)]  # of all, and of the first row besides


@pytest.mark.parametrize("to, recipe", [(to, r) for to in ("modelopt", "compressed-tensors") for r in (None, "nvidia")])
@pytest.mark.parametrize("scale, first", TINY)
def test_blocks_that_become_zeros_are_counted_whatever_their_scale(to, recipe, scale, first, tmp_path):
    """ModelOpt and compressed-tensors give no block the scale 0, and the latter no tensor a scale beyond float32."""
    name, generator = "m.q_proj.weight", torch.Generator().manual_seed(0)
    x = torch.randn(4, 64, generator=generator) * scale
    x[0] *= first
    x[1, 16:32] = 0.0
    (tmp_path / "in").mkdir()
    save_file({name: x}, tmp_path / "in" / "model.safetensors")
    try:
        conversion = convert_checkpoint(tmp_path / "in", tmp_path / "out", to=to, format="nvfp4", recipe=recipe)
    except CheckpointError as refusal:
        assert scale < 1 and re.search(
            f"{name}: (recipe 'modelopt_nvfp4' makes what cannot be read|tensor scale)", str(refusal)
        )
        return
    values = mxref.dequantize(load_checkpoint(tmp_path / "out")[name].tensor)
    blocks = [each.unflatten(-1, (4, 16)).abs().amax(-1).numpy() for each in (x, values)]
    assert conversion.changes[0].loss.outside == ((blocks[0] > 0) & (blocks[1] == 0)).sum()
    assert conversion.changes[0].loss.outside >= 4 or scale == 1e-38
    assert conversion.faults == (conversion.changes if conversion.changes[0].loss.outside else ())


@pytest.mark.parametrize("length", [64, 40])
@pytest.mark.parametrize("format", [name for name in mxref.formats.BLOCK_FORMATS])
def test_zeros_of_either_sign_are_found_among_packed_codes(format, length):
    block = mxref.formats.BLOCK_FORMATS[format]
    codes = torch.zeros(3, length, dtype=torch.uint8)
    if block.element.kind != "integer":  # whose sign bit alone is no zero
        codes[:, ::3] = block.element.sign_mask
    codes[1, 2] = codes[2, -1] = 1
    scales = torch.full((3, -(-length // block.block_size)), 100, dtype=torch.uint8)
    tensor_scale = torch.ones(()) if block.tensor_scale else None
    q = mxref.BlockTensor.from_codes(codes, scales, tensor_scale, format, block.default_recipe)
    x = torch.ones(3, length)
    x[0, : block.block_size] = 0.0
    assert measure(x, q).outside == 3 * scales.shape[1] - 3


def test_a_tensor_scale_beyond_the_reciprocals_of_float32_is_refused(tmp_path):
    (tmp_path / "in").mkdir()
    save_file({"m.q_proj.weight": torch.full((2, 32), 1e-40)}, tmp_path / "in" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"m.q_proj.weight: tensor scale .*e-4\d has no float32 reciprocal"):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", to="compressed-tensors", format="nvfp4", recipe="exact")
    assert leftovers(tmp_path) == ["in"]


# block scales of another kind


def mxfp4_checkpoint(path, scales, codes=None):
    """Quark MXFP4 of one weight `[rows, 32 n]` with the given scale bytes and codes."""
    path.mkdir()
    scales = torch.tensor(scales, dtype=torch.uint8)
    if codes is None:
        codes = torch.arange(scales.shape[0] * scales.shape[1] * 32).reshape(scales.shape[0], -1).to(torch.uint8) % 16
    found = {"m.q_proj.weight": mxref.pack(codes, 4), "m.q_proj.weight_scale": scales}
    save_file(found, path / "model.safetensors")
    spec = {"weight": {"dtype": "fp4", "group_size": 32}, "input_tensors": None}
    (path / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "quark", "global_quant_config": spec}})
    )
    return path


def test_mxfp4_becomes_nvfp4_with_its_codes_as_far_as_its_scales_reach(tmp_path):
    top = 140  # the window: E4M3 holds 2^-9 to 2^8, so 17 below the top are the last to fit
    path = mxfp4_checkpoint(tmp_path / "in", [[top, top - 17, top - 5], [top - 1, top - 9, top]])
    conversion = convert_checkpoint(path, tmp_path / "fits", to="modelopt", format="nvfp4")
    assert conversion.lossless and [change.how for change in conversion.changes] == ["codes kept"]
    q, r = (load_checkpoint(each)["m.q_proj.weight"].tensor for each in (path, tmp_path / "fits"))
    assert_same_bits(r.codes, q.codes)
    assert r.tensor_scale.item() == 2.0 ** (top - 127 - 8)

    path = mxfp4_checkpoint(tmp_path / "wide", [[top, top - 18, top - 30], [255, top - 20, top - 17]])
    conversion = convert_checkpoint(path, tmp_path / "out", to="compressed-tensors", format="nvfp4")
    (change,) = conversion.faults
    assert change.loss.outside == 3 and not conversion.lossless
    q, r = (load_checkpoint(each)["m.q_proj.weight"].tensor for each in (path, tmp_path / "out"))
    before, after = mxref.dequantize(q), mxref.dequantize(r)
    assert before[1, :32].isnan().all() and after[1, :32].isnan().all()  # NaN stays, and counts as no change
    finite = ~before.isnan()
    assert change.loss.changed == int(((before != after) & finite).sum())
    assert change.loss.max_error == (before - after)[finite].abs().max().item()
    smallest = Fraction(2) ** (top - 127 - 17)
    for x, y in zip(before[0, 32:].tolist(), after[0, 32:].tolist()):
        grid = [sign * Fraction(v) * smallest for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6) for sign in (1, -1)]
        assert abs(Fraction(y) - Fraction(x)) == min(abs(g - Fraction(x)) for g in grid)


def test_zero_blocks_neither_set_the_window_nor_lie_outside(tmp_path):
    codes = torch.zeros(1, 96, dtype=torch.uint8)
    codes[0, 32:64] = 3
    codes[0, 64:] = 8  # -0
    path = mxfp4_checkpoint(tmp_path / "in", [[254, 20, 0]], codes)
    conversion = convert_checkpoint(path, tmp_path / "out", to="modelopt", format="nvfp4")
    assert conversion.lossless and not conversion.faults
    q, r = (load_checkpoint(each)["m.q_proj.weight"].tensor for each in (path, tmp_path / "out"))
    assert_same_bits(mxref.dequantize(r), mxref.dequantize(q) + 0.0)  # ModelOpt reads -0 as +0


def test_a_recipe_quantizes_mxfp4_anew(tmp_path):
    conversion = convert_checkpoint(QUARK, tmp_path / "out", to="modelopt", format="nvfp4", recipe="exact")
    assert conversion.recipe == "exact" and {change.how for change in conversion.changes} == {"quantized"}
    source, out = load_checkpoint(QUARK), load_checkpoint(tmp_path / "out")
    for part in ("gate_proj", "down_proj"):
        rows = [
            mxref.dequantize(source[f"{EXPERT}.{p}.weight"].tensor)
            for p in ([part, "up_proj"] if part[0] == "g" else [part])
        ]
        expected = mxref.quantize(torch.cat(rows), "nvfp4", recipe="exact")
        found = out[f"{EXPERT}.{part}.weight"].tensor
        assert_same_bits(found.codes, expected.codes[: found.shape[0]])
        assert_same_bits(found.tensor_scale, expected.tensor_scale)


@pytest.mark.parametrize("format", FLOATS)
def test_floats_are_the_decoded_values(format, tmp_path):
    for path in (CT, GPT_OSS, DATA / "modelopt-nvfp4-gptoss", DATA / "quark-mxfp6_e2m3-qwen3moe"):
        conversion = convert_checkpoint(path, tmp_path / path.name, to="plain", format=format)
        source, out = load_checkpoint(path), load_checkpoint(tmp_path / path.name)
        golden = load_file(path / "golden_dequant.safetensors")
        assert out.scheme == "plain" and set(golden) <= set(out) and "quantization_config" not in out.config
        losses = {change.name: change.loss for change in conversion.changes}
        for name in golden:
            values = mxref.dequantize(source[name].tensor)
            expected = values.transpose(1, 2) if values.ndim == 3 else values
            assert_same_bits(out[name], expected.to(FLOATS[format]).contiguous(), name)
            assert losses[name].changed == int((expected.to(FLOATS[format]).float() != expected).sum())
            if out[name].dtype == golden[name].dtype:
                assert_same_bits(out[name], golden[name], name)
        assert any(loss.changed for loss in losses.values()) == (format != "f32" and "mxfp" not in path.name)
        assert conversion.lossless == ("mxfp" in path.name)  # NVFP4 has input scales, which floats have not
        assert out.config["dtype"] == {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}[format]


def test_values_beyond_float16_are_a_fault_that_names_their_tensors(convert, tmp_path):
    """65520 lies halfway between float16's largest and 65536, and rounds to Inf."""
    path, generator = tmp_path / "in", torch.Generator().manual_seed(0)
    path.mkdir()
    large, small = (torch.randn(4, 32, generator=generator) * scale for scale in (2.0**15, 1.0))
    norms = {"m.norm.weight": torch.tensor([65520.0, torch.inf]), "m.other.weight": torch.tensor([65519.0, -torch.inf])}
    save_file({"m.q_proj.weight": large, "m.k_proj.weight": small, **norms}, path / "model.safetensors")
    convert_checkpoint(path, tmp_path / "mx", to="quark", format="mxfp4")
    said = {}
    for format in FLOATS:
        conversion = convert_checkpoint(tmp_path / "mx", tmp_path / format, to="plain", format=format)
        said[format] = conversion.lossless, [change.name for change in conversion.faults], conversion.notes
    notes = (
        "beyond f16: finite values of m.q_proj.weight are Inf now",
        "beyond f16: finite values of m.norm.weight stay as they are, and are Inf to who reads them in f16",
    )
    assert said == {"f32": (True, [], ()), "bf16": (True, [], ()), "f16": (False, ["m.q_proj.weight"], notes)}
    result = convert(tmp_path / "mx", "--to", "plain", "--format", "f16", "--out", tmp_path / "again")
    assert result.exit_code == 1 and notes[0] in result.stdout


# experts: stacks and matrices


def test_a_stack_is_taken_apart_and_put_together_again(tmp_path):
    convert_checkpoint(GPT_OSS, tmp_path / "apart", to="compressed-tensors")
    source, apart = tensors(GPT_OSS), tensors(tmp_path / "apart")
    bias = source["model.layers.0.mlp.experts.gate_up_proj_bias"]
    assert_same_bits(apart[f"{EXPERT}.gate_proj.bias"], bias[0, 0::2].contiguous())
    assert_same_bits(apart["model.layers.0.mlp.experts.1.up_proj.bias"], bias[1, 1::2].contiguous())
    blocks = source["model.layers.0.mlp.experts.gate_up_proj_blocks"]
    assert_same_bits(apart[f"{EXPERT}.up_proj.weight_packed"], blocks[0, 1::2].flatten(-2).contiguous())
    convert_checkpoint(tmp_path / "apart", tmp_path / "again", to="gpt-oss")
    again = tensors(tmp_path / "again")
    assert set(again) == set(source)
    for name in source:
        assert_same_bits(again[name], source[name], name)


@pytest.mark.parametrize(
    "model, names", [("qwen3_moe", ("gate_proj", "up_proj", "down_proj")), ("mixtral", ("w1", "w3", "w2"))]
)
def test_stacks_of_a_model_that_has_experts_one_by_one_become_those(model, names, tmp_path):
    path = copy(GPT_OSS, tmp_path / "c", config={"model_type": model})
    convert_checkpoint(path, tmp_path / "out", to="plain", format="bf16")
    golden, found = load_file(GPT_OSS / "golden_dequant.safetensors"), tensors(tmp_path / "out")
    both, down = (golden[f"model.layers.0.mlp.experts.{stack}"].bfloat16() for stack in ("gate_up_proj", "down_proj"))
    for e in range(2):
        for part, expected in zip(names, (both[e, :, 0::2], both[e, :, 1::2], down[e])):
            assert_same_bits(found.pop(f"model.layers.0.mlp.experts.{e}.{part}.weight"), expected.T.contiguous())
    assert not [name for name in found if ".experts." in name and not name.endswith(".bias")]


def test_stacks_go_into_no_stack_whose_reader_takes_their_rows_in_another_order(tmp_path):
    """Of gpt-oss rows of gate and up alternate in every dialect, of other models in gpt-oss' alone."""
    path = copy(GPT_OSS, tmp_path / "c", config={"model_type": "qwen3_moe"})
    with pytest.raises(ValueError, match=r"how modelopt stores those in nvfp4 is not known \(model_type 'qwen3_moe'\)"):
        convert_checkpoint(path, tmp_path / "out", to="modelopt", format="nvfp4")
    convert_checkpoint(path, tmp_path / "same", to="gpt-oss")
    path = copy(DATA / "modelopt-nvfp4-gptoss", tmp_path / "m", config={"model_type": "qwen3_moe"})
    with pytest.raises(ValueError, match="to='gpt-oss' is for models of type gpt_oss: this one is 'qwen3_moe'"):
        convert_checkpoint(path, tmp_path / "out", to="gpt-oss", format="mxfp4")
    convert_checkpoint(path, tmp_path / "kept", to="modelopt")
    for name, given in tensors(path).items():
        assert_same_bits(tensors(tmp_path / "kept")[name], given, name)


def test_floats_of_a_stacking_model_are_quantized_as_stacks_or_apart(tmp_path):
    convert_checkpoint(GPT_OSS, tmp_path / "floats", to="plain", format="bf16")
    for to, format in (("gpt-oss", "mxfp4"), ("compressed-tensors", "mxfp4")):
        conversion = convert_checkpoint(tmp_path / "floats", tmp_path / to, to=to, format=format, ignore=["*.self_attn"])
        assert conversion.lossless  # the values are MXFP4's, and both recipes find them again
        assert inspect_checkpoint(tmp_path / to).faults == ()
    stacked, apart = load_checkpoint(tmp_path / "gpt-oss"), load_checkpoint(tmp_path / "compressed-tensors")
    values = mxref.dequantize(stacked["model.layers.0.mlp.experts.gate_up_proj"].tensor)
    found = mxref.dequantize(apart[f"{EXPERT}.gate_proj.weight"].tensor)
    assert_same_bits(found + 0.0, values[0, 0::2] + 0.0)  # compressed-tensors writes no -0
    nv = convert_checkpoint(tmp_path / "floats", tmp_path / "nv", to="modelopt", format="nvfp4", ignore=["*.self_attn"])
    assert len(nv.changes) == 2
    assert tensors(tmp_path / "nv")["model.layers.0.mlp.experts.gate_up_proj_weight_scale_2"].shape == ()


def test_stacks_whose_dialect_or_order_is_not_known_are_refused(tmp_path):
    with pytest.raises(ValueError, match="how quark stores those in mxfp4 is not known"):
        convert_checkpoint(GPT_OSS, tmp_path / "out", to="quark")
    path = copy(DATA / "modelopt-nvfp4-gptoss", tmp_path / "c")
    changed = config(path)
    del changed["model_type"]
    (path / "config.json").write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="nothing says in which order its 8 rows are"):
        convert_checkpoint(path, tmp_path / "out", to="compressed-tensors")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    path = copy(BASE, tmp_path / "b", lambda t: t.update({name: torch.zeros(2, 128, 64)}))
    (path / "config.json").write_text(json.dumps(config(path) | {"num_hidden_layers": 2}))
    with pytest.raises(ValueError, match="a pattern of ignore= leaves it as it is"):
        convert_checkpoint(path, tmp_path / "out", to="quark", format="mxfp4")
    convert_checkpoint(path, tmp_path / "out", to="quark", format="mxfp4", ignore=[name])


def test_experts_that_lack_a_matrix_are_not_stacked(tmp_path):
    apart = tmp_path / "apart"
    convert_checkpoint(GPT_OSS, apart, to="compressed-tensors")

    def drop(found):
        for name in [name for name in found if name.startswith(f"{EXPERT}.up_proj.weight")]:
            del found[name]

    with pytest.raises(CheckpointError, match="some lack a matrix"):
        convert_checkpoint(copy(apart, tmp_path / "c", drop), tmp_path / "out", to="gpt-oss")


def test_mixtral_has_the_names_that_each_dialect_gives_it(tmp_path):
    path = DATA / "llmcompressor-nvfp4-mixtral"
    convert_checkpoint(path, tmp_path / "out", to="modelopt")
    experts = {re.sub(r"\d+", "N", name) for name in load_checkpoint(tmp_path / "out").quantized}
    assert experts == {"model.layers.N.block_sparse_moe.experts.N.wN.weight"}
    source, out = load_checkpoint(path), load_checkpoint(tmp_path / "out")
    for ours, theirs in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
        name = "model.layers.0.block_sparse_moe.experts.1."
        assert_same_bits(out[f"{name}{ours}.weight"].tensor.packed, source[f"{name}{theirs}.weight"].tensor.packed)
    convert_checkpoint(tmp_path / "out", tmp_path / "back", to="compressed-tensors")
    assert set(tensors(tmp_path / "back")) == set(tensors(path))


@pytest.mark.parametrize("part", ["text_config", "language_config"])
def test_a_language_model_within_a_model_is_converted_as_it_is_alone(part, tmp_path):
    for name, to in (("modelopt-nvfp4-gptoss", "compressed-tensors"), ("llmcompressor-nvfp4-mixtral", "modelopt")):
        path, alone = copy(DATA / name, tmp_path / name), tmp_path / f"{name}-alone"
        convert_checkpoint(path, alone, to=to)
        (path / "config.json").write_text(json.dumps({"model_type": "several", part: config(path)}))
        convert_checkpoint(path, tmp_path / f"{name}-within", to=to)
        expected, found = tensors(alone), tensors(tmp_path / f"{name}-within")
        assert set(found) == set(expected)
        for each in expected:
            assert_same_bits(found[each], expected[each], each)


def test_what_the_source_says_of_its_quantization_is_dropped_wherever_it_stands(tmp_path):
    path = copy(CT, tmp_path / "c")
    said = config(path)
    quantization = said.pop("quantization_config")
    said["language_config"] = {"deeper": {"quantization_config": quantization}, "kept": 1}
    (path / "config.json").write_text(json.dumps(said))
    convert_checkpoint(path, tmp_path / "out", to="modelopt")
    written = config(tmp_path / "out")
    assert written["quantization_config"]["quant_method"] == "modelopt"
    assert written["language_config"] == {"deeper": {}, "kept": 1}
    assert inspect_checkpoint(tmp_path / "out").faults == ()


@pytest.mark.parametrize("where", ["config.json", "hf_quant_config.json"])
def test_one_config_of_modelopts_two_is_enough_and_stays_alone(where, tmp_path):
    """What is excluded may be said in patterns; a second config with names would contradict it."""
    path = copy(MODELOPT, tmp_path / "c")
    said, beside = config(path), json.loads((path / "hf_quant_config.json").read_text())
    excluded = {"exclude_modules": ["*embed_tokens", "*.gate", "lm_head"]}
    quantization = {k: v for k, v in said["quantization_config"].items() if k != "ignore"} | excluded
    del said["quantization_config"]
    (path / "hf_quant_config.json").unlink()
    if where == "config.json":
        said["text_config"] = {"quantization_config": quantization}
    else:
        (path / where).write_text(json.dumps(beside | {"quantization": beside["quantization"] | excluded}))
    (path / "config.json").write_text(json.dumps(said))
    convert_checkpoint(path, tmp_path / "out", to="modelopt")
    assert load_checkpoint(tmp_path / "out").declared == load_checkpoint(path).declared
    assert {each.name for each in (tmp_path / "out").glob("*.json")} == {each.name for each in path.glob("*.json")} - {INDEX}
    convert_checkpoint(path, tmp_path / "mxfp8", to="modelopt", format="mxfp8_e4m3")
    assert load_checkpoint(tmp_path / "mxfp8").declared.formats == {"mxfp8_e4m3"}


def test_a_new_dtype_is_said_wherever_one_was(tmp_path):
    nested = {"text_config": {"dtype": "bfloat16", "deeper": {"torch_dtype": "bfloat16"}}, "torch_dtype": "bfloat16"}
    path = copy(CT, tmp_path / "c", config=nested)
    convert_checkpoint(path, tmp_path / "out", to="plain", format="f32")
    written = config(tmp_path / "out")
    assert written["text_config"] == {"dtype": "float32", "deeper": {"torch_dtype": "float32"}}
    assert written["dtype"] == written["torch_dtype"] == "float32"


# models in floats


@pytest.mark.parametrize(
    "produced,to,format",
    [
        ("quark-mxfp4-qwen3moe", "quark", "mxfp4"),
        ("quark-mxfp6_e2m3-qwen3moe", "quark", "mxfp6_e2m3"),
        ("llmcompressor-mxfp4-qwen3moe", "compressed-tensors", "mxfp4"),
    ],
)
def test_what_is_quantized_is_the_producers_own_file(produced, to, format, tmp_path):
    convert_checkpoint(BASE, tmp_path / "out", to=to, format=format, ignore=["*.self_attn"])
    expected, found = tensors(DATA / produced), tensors(tmp_path / "out")
    assert set(found) == set(expected)
    for name in expected:
        assert_same_bits(found[name], expected[name], name)
    ours, theirs = (load_checkpoint(path) for path in (tmp_path / "out", DATA / produced))
    assert (ours.scheme, ours.declared.formats) == (theirs.scheme, theirs.declared.formats)
    key = "exclude" if to == "quark" else "ignore"
    both = [set(each.config["quantization_config"][key]) for each in (ours, theirs)]
    assert {name for name in both[1] if ".layers.1." not in name} <= both[0]


def test_gate_and_up_and_q_k_and_v_share_a_tensor_scale(tmp_path):
    convert_checkpoint(BASE, tmp_path / "out", to="modelopt", format="nvfp4", recipe="exact")
    source, out = load_checkpoint(BASE), load_checkpoint(tmp_path / "out")
    assert out.scheme == "w_nvfp4"
    attention = "model.layers.0.self_attn"
    groups = [[f"{attention}.{part}_proj" for part in "qkv"], [f"{attention}.o_proj"], [f"{EXPERT}.down_proj"]]
    groups += [[f"{EXPERT}.gate_proj", f"{EXPERT}.up_proj"]]
    for group in groups:
        largest = max(source[f"{name}.weight"].float().abs().max().item() for name in group)
        scale = np.float32(largest) / np.float32(2688)
        for name in group:
            found = out[f"{name}.weight"].tensor
            assert found.tensor_scale.item() == scale
            given = torch.tensor(scale)
            assert_same_bits(
                found.codes, mxref.quantize(source[f"{name}.weight"], "nvfp4", recipe="exact", tensor_scale=given).codes
            )


def test_routers_head_embeddings_norms_and_what_is_ignored_stay(tmp_path):
    out = tmp_path / "out"
    convert_checkpoint(BASE, out, to="compressed-tensors", format="mxfp4", ignore=["re:.*o_proj", "*.experts", "lm_head"])
    found = load_checkpoint(out)
    left = {name for name in found.plain if len(found[name].shape) == 2}
    experts = [f"model.layers.0.mlp.experts.{e}" for e in (0, 1)]
    ignored = {f"{expert}.{part}_proj.weight" for expert in experts for part in ("gate", "up", "down")}
    ignored |= {"model.layers.0.self_attn.o_proj.weight"}
    assert left == {"lm_head.weight", "model.embed_tokens.weight", "model.layers.0.mlp.gate.weight"} | ignored
    assert inspect_checkpoint(out).faults == ()
    convert_checkpoint(BASE, tmp_path / "more", to="compressed-tensors", format="mxfp4", include=["lm_head"])
    assert "lm_head.weight" in load_checkpoint(tmp_path / "more").quantized
    assert "lm_head" not in config(tmp_path / "more")["quantization_config"]["ignore"]


def test_a_tied_head_is_in_the_ignore_list_though_no_tensor_has_its_name(tmp_path):
    path = copy(BASE, tmp_path / "c", lambda t: t.pop("lm_head.weight"), {"tie_word_embeddings": True})
    convert_checkpoint(path, tmp_path / "out", to="compressed-tensors", format="mxfp4")
    assert "lm_head" in config(tmp_path / "out")["quantization_config"]["ignore"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_floats_are_quantized_as_they_are(dtype, tmp_path):
    name = f"{EXPERT}.down_proj.weight"
    path = copy(BASE, tmp_path / "c", lambda t: t.update({name: t[name].to(dtype) * 1.001}))
    convert_checkpoint(path, tmp_path / "out", to="quark", format="mxfp6_e3m2")
    expected = mxref.quantize(load_checkpoint(path)[name], "mxfp6_e3m2", recipe="quark_even")
    assert_same_bits(load_checkpoint(tmp_path / "out")[name].tensor.packed, expected.packed)


REFUSED = {
    "unknown dialect": (
        BASE,
        dict(to="awq"),
        "to='awq': expected one of plain, compressed-tensors, modelopt, quark, gpt-oss, torchao",
    ),
    "inputs as they are": (BASE, dict(to="torchao", format="mxfp4", activations=None), "can say mxfp4"),
    "no format": (BASE, dict(to="quark"), "the source holds floats: expected one of nvfp4, mxfp4"),
    "torchao's nvfp4, from nvfp4": (
        CT,
        dict(to="torchao"),
        "torchao's nvfp4 is not written: expected one of mxfp4, mxfp8_e4m3, mxfp8_e5m2, in which the weights are "
        "quantized anew",
    ),
    "torchao's nvfp4, from floats": (BASE, dict(to="torchao", format="nvfp4"), "torchao's nvfp4 is not written"),
    "format of another dialect": (
        BASE,
        dict(to="modelopt", format="mxfp6_e2m3"),
        "expected one of nvfp4, mxfp4, mxfp8_e4m3",
    ),
    "nothing to do": (BASE, dict(to="plain"), "nothing to convert"),
    "other model": (BASE, dict(to="gpt-oss"), "is for models of type gpt_oss: this one is 'qwen3_moe'"),
    "no input scales": (BASE, dict(to="modelopt", format="nvfp4", activations="nvfp4"), "calibrated input scale"),
    "input scales lost": (QUARK, dict(to="modelopt", format="nvfp4", activations="nvfp4"), "down_proj.weight lacks"),
    "activations": (BASE, dict(to="modelopt", format="mxfp4", activations="mxfp4"), "can say none"),
    "activations of floats": (CT, dict(to="plain", activations="nvfp4"), "says nothing of activations"),
    "recipe of another format": (BASE, dict(to="quark", format="mxfp4", recipe="nvidia"), "does not fit format 'mxfp4'"),
    "recipe without use": (CT, dict(to="modelopt", recipe="exact"), "nothing is quantized on the way"),
    "recipe of rows": (BASE, dict(to="modelopt", format="nvfp4", recipe="nvidia_16x16"), "blocks of several rows"),
    "ignore": (CT, dict(to="modelopt", ignore=["*"]), "quantized already"),
    "half of the experts": (
        BASE,
        dict(to="modelopt", format="mxfp4", ignore=[f"{EXPERT}.*"]),
        f"ignore='{EXPERT}.*': {EXPERT}.down_proj.weight stays as it is and model.layers.0.mlp.experts.1.down_proj.weight",
    ),
    "an embedding": (
        BASE,
        dict(to="quark", format="mxfp4", include=["*embed_tokens"]),
        "include='*embed_tokens' matches model.embed_tokens.weight, the weight of an embedding: expected linears",
    ),
    "a router": (
        BASE,
        dict(to="quark", format="mxfp4", include=["*.gate"]),
        "include='*.gate' matches model.layers.0.mlp.gate.weight, the weight of a router",
    ),
    "dialect of floats": (BASE, dict(to="quark", format="mxfp4", dialect="modelopt"), "no weight as modelopt stores one"),
    "all ignored": (BASE, dict(to="quark", format="mxfp4", ignore=["*"]), "nothing to quantize"),
    "shard size": (CT, dict(to="modelopt", shard_size=0), "shard_size"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_refused_before_anything_is_written(case, tmp_path):
    path, asked, message = REFUSED[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        convert_checkpoint(path, tmp_path / "out", **asked)
    assert list(tmp_path.iterdir()) == []


BROKEN = {
    "short blocks": (
        {f"{EXPERT}.up_proj.weight": torch.zeros(8, 40)},
        r"\[8, 40\] has 40 elements a row: compressed-tensors takes multiples of 32 in mxfp4",
    ),
    "float64": ({f"{EXPERT}.up_proj.weight": torch.zeros(8, 64, dtype=torch.float64)}, "is F64: expected F32, F16, BF16"),
    "codes of no weight": ({"x": torch.zeros(8, 64).to(torch.float8_e4m3fn)}, "x is F8_E4M3 and no block-scaled weight"),
    "two of one name": (
        {"a.experts.0.w1.weight": torch.zeros(8, 64), "a.experts.0.gate_proj.weight": torch.zeros(8, 64)},
        "would be written twice",
    ),
}


def test_what_would_contradict_itself_is_refused_before_the_first_weight(tmp_path, monkeypatch):
    import mxref.checkpoints.convert as convert

    write = convert.quantization_configs
    monkeypatch.setattr(convert, "quantization_configs", lambda scheme, skipped: write(scheme, []))
    monkeypatch.setattr(convert.ShardWriter, "write", lambda self, name, tensor: pytest.fail(name))
    with pytest.raises(CheckpointError, match="contradicts itself: model.layers.0.self_attn.q_proj.weight"):
        convert_checkpoint(BASE, tmp_path / "out", to="quark", format="mxfp4", ignore=["*.q_proj"])
    assert list(tmp_path.iterdir()) == []


def test_a_model_whose_matrices_are_transposed_is_refused(tmp_path):
    path = copy(BASE, tmp_path / "c", config={"model_type": "gpt2"})
    with pytest.raises(ValueError, match=r"'gpt2' stores its matrices as \[in, out\]"):
        convert_checkpoint(path, tmp_path / "out", to="quark", format="mxfp4")


@pytest.mark.parametrize("case", BROKEN)
def test_a_source_that_cannot_be_converted_is_refused_by_name(case, tmp_path):
    found, message = BROKEN[case]
    path = copy(BASE, tmp_path / "c", lambda t: t.update(found), {"model_type": "mixtral"})
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(path, tmp_path / "out", to="compressed-tensors", format="mxfp4")
    assert [file.name for file in tmp_path.iterdir()] == ["c"]


def test_short_blocks_that_are_there_already_are_taken_over(tmp_path, rng):
    q = mxref.quantize(torch.from_numpy(rng.standard_normal((4, 40), dtype="float32")), "mxfp4")
    path = mxfp4_checkpoint(tmp_path / "in", q.scales.tolist(), q.codes)
    convert_checkpoint(path, tmp_path / "out", to="modelopt")
    assert_same_bits(load_checkpoint(tmp_path / "out")["m.q_proj.weight"].tensor.packed, q.packed)
    with pytest.raises(ValueError, match="has 40 elements a row"):
        convert_checkpoint(path, tmp_path / "other", to="modelopt", format="mxfp8_e4m3")


def test_rotated_weights_and_a_kv_cache_are_not_passed_over(tmp_path):
    quantization = config(CT)["quantization_config"]
    rotated = {"quantization_config": quantization | {"transform_config": {"config_groups": {"R1": {}}}}}
    with pytest.raises(ValueError, match="stored rotated"):
        convert_checkpoint(copy(CT, tmp_path / "r", config=rotated), tmp_path / "out", to="modelopt")
    cached = {"quantization_config": quantization | {"kv_cache_scheme": {"num_bits": 8}}}
    conversion = convert_checkpoint(copy(CT, tmp_path / "k", config=cached), tmp_path / "out", to="modelopt")
    assert conversion.notes == ("what the config says of the KV cache is not carried over",)


def _in_floats(found):
    for part in ("gate", "up", "down"):
        for suffix in ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"):
            del found[f"{EXPERT}.{part}_proj.{suffix}"]
        found[f"{EXPERT}.{part}_proj.weight"] = torch.ones(96, 128, dtype=torch.bfloat16)


def _without_an_expert(found):
    for name in [name for name in found if name.startswith(EXPERT + ".")]:
        del found[name]


FAULTY = {
    "in floats": (_in_floats, r"experts.0.(gate|up|down)_proj.weight: BF16, which the config says is quantized"),
    "an expert lacks": (_without_an_expert, r"experts.0.(gate|up|down)_proj: .* not there"),
    "awq": (lambda t: t.update({f"{EXPERT}.gate_proj.awq_scale": torch.ones(128)}), "gate_proj.awq_scale lies beside"),
    "rotated": (lambda t: t.update({f"{EXPERT}.gate_proj.R1.weight": torch.eye(128)}), "gate_proj.R1.weight lies beside"),
}


@pytest.mark.parametrize("case", FAULTY)
def test_a_quantized_source_with_faults_is_not_passed_on(case, tmp_path):
    change, message = FAULTY[case]
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(copy(CT, tmp_path / "in", change), tmp_path / "out", to="modelopt")
    assert leftovers(tmp_path) == ["in"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -5.0, 0.0])
def test_an_input_scale_that_is_no_scale_is_said(value, tmp_path):
    scale = {f"{EXPERT}.gate_proj.input_global_scale": torch.tensor([value])}
    notes = convert_checkpoint(
        copy(CT, tmp_path / "in", lambda t: t.update(scale)), tmp_path / "out", to="compressed-tensors"
    ).notes
    assert notes == (f"the input scale of {EXPERT}.gate_proj.weight is no positive finite number in the source",)


def test_an_input_scale_that_is_missing_is_no_reason_to_drop_the_others(tmp_path):
    missing = f"{EXPERT}.up_proj.weight"
    for source, suffix in ((MODELOPT, ".input_scale"), (CT, ".input_global_scale")):
        path = copy(source, tmp_path / source.name, change_at(missing.removesuffix(".weight") + suffix, lambda t: None))
        for to in ("modelopt", "compressed-tensors", "quark"):
            with pytest.raises(ValueError, match=f"takes? a calibrated input scale for each weight, which {missing} lacks"):
                convert_checkpoint(path, tmp_path / "out", to=to)
    assert not (tmp_path / "out").exists()
    conversion = convert_checkpoint(path, tmp_path / "out", to="modelopt", activations=None)
    assert sum(change.input_dropped for change in conversion.changes) == 5 and not conversion.lossless


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8_e4m3"])
def test_torchao_gets_no_short_blocks_which_it_cannot_decode(format, tmp_path, rng):
    q = mxref.quantize(torch.from_numpy(rng.standard_normal((4, 40), dtype="float32")), format)
    codes = q.packed if format == "mxfp4" else q.packed.view(torch.float8_e4m3fn)
    (tmp_path / "in").mkdir()
    save_file({"m.q_proj.weight": codes, "m.q_proj.weight_scale": q.scales}, tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "config.json").write_text('{"quantization_config": {"quant_method": "modelopt"}}')
    with pytest.raises(ValueError, match=r"m.q_proj.weight \[4, 40\] has 40 elements a row: torchao takes multiples of 32"):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", to="torchao")
    assert leftovers(tmp_path) == ["in"]
    if importlib.util.find_spec("torchao") is not None:
        from torchao.prototype.mx_formats.mx_tensor import to_dtype

        kinds = {"mxfp4": torch.float4_e2m1fn_x2, "mxfp8_e4m3": torch.float8_e4m3fn}
        with pytest.raises(RuntimeError, match="must match"):
            to_dtype(codes, q.scales.view(torch.float8_e8m0fnu), kinds[format], 32, torch.float32)


# what other readers make of it


@pytest.mark.parametrize("to_format", ["nvfp4", "mxfp4", "mxfp8_e4m3"])
@pytest.mark.parametrize("source", [BASE, MODELOPT, QUARK, GPT_OSS], ids=shown)
def test_compressed_tensors_reads_what_is_written(source, to_format, tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    convert_checkpoint(source, tmp_path / "out", to="compressed-tensors", format=to_format)
    given = config(tmp_path / "out")["quantization_config"]
    read = QuantizationConfig.model_validate(given)
    (scheme,) = read.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(read.format)
    found, ours = tensors(tmp_path / "out"), load_checkpoint(tmp_path / "out")
    assert ours.quantized
    for name in ours.quantized:
        module = name.removesuffix(".weight")
        state = {key.rpartition(".")[2]: value for key, value in found.items() if key.rpartition(".")[0] == module}
        assert not read.ignore or module not in read.ignore
        values = compressor.decompress(state, scheme)["weight"]
        assert_same_bits(values, mxref.dequantize(ours[name].tensor, values.dtype), name)


@pytest.mark.skipif(importlib.util.find_spec("modelopt") is None, reason="nvidia-modelopt is not installed")
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8_e4m3"])
@pytest.mark.parametrize("source", [BASE, CT, QUARK], ids=shown)
def test_modelopt_reads_what_is_written(source, format, tmp_path):
    from modelopt.torch.quantization.qtensor import MXFP4QTensor, MXFP8QTensor, NVFP4QTensor

    kinds = {"nvfp4": NVFP4QTensor, "mxfp4": MXFP4QTensor, "mxfp8_e4m3": MXFP8QTensor}
    convert_checkpoint(source, tmp_path / "out", to="modelopt", format=format)
    found, ours = tensors(tmp_path / "out"), load_checkpoint(tmp_path / "out")
    for name in ours.quantized:
        q, module = ours[name].tensor, name.removesuffix(".weight")
        scales = {"scale": found[f"{module}.weight_scale"], "double_scale": found.get(f"{module}.weight_scale_2")}
        stored = kinds[format](torch.Size(q.shape), torch.float32, found[name])
        values = stored.dequantize(torch.float32, **scales, block_sizes={-1: q.format.block_size})
        assert_same_bits(values + 0.0, mxref.dequantize(q) + 0.0, name)  # it reads NVFP4's -0 as +0


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.parametrize("format", ["mxfp4", "mxfp8_e4m3", "mxfp8_e5m2"])
@pytest.mark.parametrize("source,size", [(BASE, 10**9), (CT, 10**9), (BASE, 3000)], ids=["floats", "nvfp4", "shards"])
def test_torchao_reads_what_is_written(source, size, format, tmp_path):
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict
    from torchao.prototype.safetensors.safetensors_utils import is_metadata_torchao

    convert_checkpoint(source, tmp_path / "out", to="torchao", format=format, shard_size=size)
    left, weights = {}, {}
    for file in sorted((tmp_path / "out").glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
        assert is_metadata_torchao(metadata)
        found, left = unflatten_tensor_state_dict(left | load_file(file), metadata)  # as transformers, file after file
        weights |= found
    ours = load_checkpoint(tmp_path / "out")
    assert set(weights) == set(ours) and not left and ours.scheme == f"w_{format}_a_{format}"
    for name in ours:
        if name in ours.quantized:
            theirs = weights[name]
            assert theirs.act_quant_kwargs.elem_dtype == theirs.elem_dtype and theirs.is_swizzled_scales
            assert_same_bits(theirs.dequantize(torch.float32), mxref.dequantize(ours[name].tensor), name)
        else:
            assert_same_bits(weights[name], ours[name], name)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_transformers_loads_what_is_written_for_torchao(tmp_path):
    transformers = pytest.importorskip("transformers")
    from tiny_models import tiny_model

    tiny_model("qwen3moe").save_pretrained(tmp_path / "in")
    convert_checkpoint(tmp_path / "in", tmp_path / "out", to="torchao", format="mxfp4", ignore=["*.mlp.experts"])
    model, loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not loaded["missing_keys"] and not loaded["unexpected_keys"]
    ours = load_checkpoint(tmp_path / "out")
    assert len(ours.quantized) == 8
    for name in ours.quantized:
        theirs = model.get_parameter(name)
        assert type(theirs).__name__ == "MXTensor"
        assert_same_bits(theirs.dequantize(torch.float32), mxref.dequantize(ours[name].tensor), name)


def test_torchaos_own_file_is_written_as_it_was(tmp_path):
    """But for names: its header lists experts that are one stack in memory, its file holds them apart."""
    source = DATA / "torchao-mxfp4-qwen3moe"
    convert_checkpoint(source, tmp_path / "out", to="torchao")
    expected, found = load_file(source / "model.safetensors"), tensors(tmp_path / "out")
    assert set(found) == set(expected)
    for name in expected:
        assert found[name].dtype == expected[name].dtype and found[name].shape == expected[name].shape
        assert_same_bits(found[name].view(torch.uint8), expected[name].view(torch.uint8), name)
    headers = []
    for path in (source, tmp_path / "out"):
        with safe_open(path / "model.safetensors", "pt") as opened:
            said = {name: json.loads(text) for name, text in opened.metadata().items() if name != "format"}
        assert set(said["tensor_names"]) == set(said) - {"tensor_names"}
        headers.append({name: said[name] for name in load_checkpoint(source).quantized})
    assert headers[0] == headers[1] and config(source) == config(tmp_path / "out")


# what is said


def test_an_input_scale_that_is_not_written_is_a_loss_of_its_weight(tmp_path):
    whole = convert_checkpoint(MODELOPT, tmp_path / "whole", to="modelopt")
    assert whole.lossless and not any(change.input_dropped for change in whole.changes) and whole.notes == ()
    dropping = convert_checkpoint(MODELOPT, tmp_path / "out", to="modelopt", activations=None)
    assert all(change.how == "kept" and change.input_dropped for change in dropping.changes) and not dropping.lossless
    assert all(row["input_dropped"] and not row["changed"] for row in dropping.record()["weights"])
    assert (
        any("input scale of" in note and f"{len(dropping.changes) - 1} others" in note for note in dropping.notes)
        and not dropping.faults
    )
    stack = DATA / "modelopt-nvfp4-gptoss"
    assert convert_checkpoint(stack, tmp_path / "s", to="modelopt", activations=None).changes[0].input_dropped


@pytest.mark.parametrize("to", ["modelopt", "compressed-tensors", "quark"])
def test_a_model_in_floats_becomes_nvfp4_weights_alone_and_that_is_said(to, convert, tmp_path):
    result = convert(BASE, "--to", to, "--format", "nvfp4", "--out", tmp_path / "out", "--json", tmp_path / "r.json")
    said = "weights alone: activations in nvfp4 take a calibrated input scale"
    assert result.exit_code == 0 and said in result.stdout
    assert any(said in note for note in json.loads((tmp_path / "r.json").read_text())["notes"])


def test_what_is_called_a_linear_and_is_none_stays_and_is_noted(tmp_path):
    odd = {"a.x_proj.weight": (64,), "a.y_proj.weight": (2, 8, 64), "a.z_proj.weight": (0, 64), "a.v_proj": (8, 64)}
    odd |= {"a.head.weight": (64,), "a.experts.down_proj": (2, 0, 64)}
    rest = {"a.x_proj.bias": (64,), "a.norm.weight": (64,), "a.head.bias": (8,), "a.conv.weight": (8, 4, 4)}
    path = copy(BASE, tmp_path / "c", lambda t: t.update({n: torch.ones(shape) for n, shape in {**odd, **rest}.items()}))
    conversion = convert_checkpoint(path, tmp_path / "out", to="quark", format="mxfp4", include=["a.head"])
    expected = {
        f"{name} {list(shape)} is no weight of a linear, [out, in], and stays as it is" for name, shape in odd.items()
    }
    assert set(conversion.notes) == expected and len(conversion.notes) == len(odd)
    out = load_checkpoint(tmp_path / "out")
    for name, shape in {**odd, **rest}.items():
        assert_same_bits(out[name], torch.ones(shape), name)
    left = convert_checkpoint(path, tmp_path / "left", to="quark", format="mxfp4", ignore=["a"])
    assert left.notes == ()


def test_a_recipe_that_makes_nothing_of_zeros_names_one_that_does(tmp_path):
    path = copy(BASE, tmp_path / "c", lambda t: t.update({f"{EXPERT}.down_proj.weight": torch.zeros(8, 96).bfloat16()}))
    with pytest.raises(
        CheckpointError,
        match=r"recipe 'modelopt_nvfp4' makes of zeros alone what cannot be read: .*recipe 'nvidia' makes what can be",
    ):
        convert_checkpoint(path, tmp_path / "out", to="modelopt", format="nvfp4")
    convert_checkpoint(path, tmp_path / "out", to="modelopt", format="nvfp4", recipe="nvidia")
    assert mxref.dequantize(load_checkpoint(tmp_path / "out")[f"{EXPERT}.down_proj.weight"].tensor).count_nonzero() == 0


def test_a_dialect_that_the_config_contradicts_is_said_and_never_copied(tmp_path):
    path = copy(QUARK, tmp_path / "c")
    said = config(path)
    said["quantization_config"]["quant_method"] = "compressed-tensors"
    (path / "config.json").write_text(json.dumps(said))
    conversion = convert_checkpoint(path, tmp_path / "out", to="quark", dialect="quark")
    assert conversion.notes[0] == "the config says 'compressed-tensors' and is not heeded: dialect='quark' is given"
    assert conversion.activations == "unknown before, not quantized now"
    written = config(tmp_path / "out")["quantization_config"]
    assert written["quant_method"] == "quark" and load_checkpoint(tmp_path / "out").scheme == "w_mxfp4"
    (finding,) = [each for each in inspect_checkpoint(path, dialect="quark").findings if each.what == "config"]
    assert finding.severity == "warning" and "not heeded" in finding.detail
    assert load_checkpoint(QUARK, dialect="quark").contradicted is None


# files


STRAY = {
    "a folder": lambda out: (out / "runs").mkdir(),
    "a text": lambda out: (out / "thesis.txt").write_text("dear"),
    "a program": lambda out: (out / "train.py").write_text("pass"),
    "a link": lambda out: (out / "generation_config.json").symlink_to(out.parent / "letter"),
    "a link for weights": lambda out: (out / "model.safetensors").symlink_to(out.parent / "letter"),
    "an adapter": lambda out: (out / "adapter_model.safetensors").write_bytes(b"trained"),
    "weights of no index": lambda out: (
        (out / INDEX).write_text('{"weight_map": {"x": "model.safetensors"}, "y": "z"}')
        and (out / "model-00002-of-00002.safetensors").write_bytes(b"trained")
    ),
    "no weights": lambda out: (out / "model.safetensors").rename(out / "config.json"),
    "no config": lambda out: (out / "config.json").unlink(),
}


@pytest.mark.parametrize("stray", STRAY)
def test_force_replaces_what_is_a_checkpoint_and_nothing_else(stray, tmp_path):
    source, out = copy(BASE, tmp_path / "in"), tmp_path / "out"
    for name in ("generation_config.json", "merges.txt"):
        (source / name).write_text("{}")
    (tmp_path / "letter").write_text("dear")
    convert_checkpoint(source, out, to="quark", format="mxfp4")
    convert_checkpoint(source, out, to="quark", format="mxfp6_e2m3", force=True)
    for name in ("generation_config.json", "model.safetensors") if "link" in stray else ():
        (out / name).unlink()
    STRAY[stray](out)
    before = {file.name: file.read_bytes() for file in out.iterdir() if file.is_file()}
    with pytest.raises(
        ValueError, match="force=True replaces a checkpoint and nothing else, and .*(in it is|holds not both)"
    ):
        convert_checkpoint(source, out, to="quark", format="mxfp4", force=True)
    assert {file.name: file.read_bytes() for file in out.iterdir() if file.is_file()} == before
    assert leftovers(tmp_path) == ["in", "letter", "out"]


def test_out_neither_lies_in_the_source_nor_holds_it(tmp_path):
    source = copy(BASE, tmp_path / "in")
    for out in (source, source / "out", tmp_path, source / ".." / "in" / "out"):
        with pytest.raises(ValueError, match="is the source, lies in it or holds it"):
            convert_checkpoint(source, out, to="quark", format="mxfp4", force=True)
    assert leftovers(source) == ["config.json", "model.safetensors"]


def test_a_link_beside_the_weights_is_copied_unless_it_leads_away(tmp_path):
    source = copy(BASE, tmp_path / "snapshots" / "revision")
    (source / "tokenizer.json").write_text("{}")
    (source / "vocab.json").symlink_to("tokenizer.json")
    (tmp_path / "blobs").mkdir()  # as the cache of a hub has it
    (tmp_path / "blobs" / "1").write_text("merges")
    (source / "merges.txt").symlink_to("../../blobs/1")
    convert_checkpoint(source, tmp_path / "out", to="quark", format="mxfp4")
    assert (tmp_path / "out" / "merges.txt").read_text() == "merges" and (
        tmp_path / "out" / "vocab.json"
    ).read_text() == "{}"
    assert not any(file.is_symlink() for file in (tmp_path / "out").iterdir())
    (tmp_path / "secret").write_text("key")
    (source / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match="notes.txt links to .*secret, outside of its folder: it is not copied"):
        convert_checkpoint(source, tmp_path / "other", to="quark", format="mxfp4")
    assert leftovers(tmp_path) == ["blobs", "out", "secret", "snapshots"]


def test_what_is_not_copied_is_said_and_a_link_to_nothing_refused(tmp_path):
    source = copy(BASE, tmp_path / "in")
    (source / "additional_chat_templates").mkdir()
    for name in ("recipe.yaml", "bpe.vocab", ".gitattributes", "merges.txt"):
        (source / name).write_text("")
    conversion = convert_checkpoint(source, tmp_path / "out", to="quark", format="mxfp4")
    assert "not copied: additional_chat_templates, bpe.vocab, recipe.yaml" in conversion.notes
    assert (tmp_path / "out" / "merges.txt").exists() and not (tmp_path / "out" / "recipe.yaml").exists()
    (source / "tokenizer.json").symlink_to("gone.json")
    with pytest.raises(ValueError, match="tokenizer.json links to .*gone.json, which is not there"):
        convert_checkpoint(source, tmp_path / "other", to="quark", format="mxfp4")
    assert leftovers(tmp_path) == ["in", "out"]


def test_force_replaces_nothing_that_the_source_links_to(tmp_path):
    out, source = tmp_path / "out", tmp_path / "source"
    convert_checkpoint(BASE, out, to="quark", format="mxfp4")
    source.mkdir()
    for file in out.iterdir():
        (source / file.name).symlink_to(file)
    with pytest.raises(ValueError, match="holds what .* of the source links to"):
        convert_checkpoint(source, out, to="compressed-tensors", force=True)
    assert load_checkpoint(source).formats == ("mxfp4",)


@pytest.mark.parametrize("indexed", [True, False])
def test_one_file_of_several_is_said_to_be_a_part(indexed, tmp_path):
    source = DATA / "llmcompressor-nvfp4-qwen3moe"
    path = copy(source, tmp_path / "c", config={"num_hidden_layers": 3})
    if indexed:
        listed = dict.fromkeys(load_file(path / "model.safetensors"), "model.safetensors") | {"another": "other.safetensors"}
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    notes = convert_checkpoint(path / "model.safetensors", tmp_path / "out", to="plain").notes
    why = r"it lacks 1 of the \d+ tensors in model.safetensors.index.json" if indexed else r"it lacks \*\.layers\.1"
    assert [note for note in notes if re.match(rf"model\.safetensors is a part of the model: {why}, and the config", note)]
    notes = convert_checkpoint(source / "model.safetensors", tmp_path / "whole", to="plain").notes
    assert not any("is a part of the model" in note for note in notes)


def test_shards_are_written_in_order_and_read_back_the_same(tmp_path):
    one = convert_checkpoint(BASE, tmp_path / "one", to="quark", format="mxfp4")
    many = convert_checkpoint(BASE, tmp_path / "many", to="quark", format="mxfp4", shard_size=3000)
    assert one.files == ("model.safetensors",) and len(many.files) > 3 and one.bytes == many.bytes
    whole, index = tensors(tmp_path / "one"), json.loads((tmp_path / "many" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * t.itemsize for t in whole.values()) == one.bytes
    assert set(index["weight_map"]) == set(whole) and set(index["weight_map"].values()) == set(many.files)
    for file in many.files:
        held = load_file(tmp_path / "many" / file)
        size = sum(t.numel() * t.itemsize for t in held.values())
        assert size <= 3000 or len(held) == 1
        with safe_open(tmp_path / "many" / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        for name, tensor in held.items():
            assert index["weight_map"][name] == file
            assert_same_bits(tensor, whole[name], name)


def test_every_tensor_is_read_once_wherever_it_lies(tmp_path, monkeypatch):
    path = copy(BASE, tmp_path / "c")
    shard(path, lambda name: 1 + (sum(name.encode()) % 3))  # gate and up, q and k and v, in different files
    reads, read = [], Shards.read
    monkeypatch.setattr(Shards, "read", lambda self, name: reads.append(name) or read(self, name))
    convert_checkpoint(path, tmp_path / "out", to="modelopt", format="nvfp4")
    assert sorted(reads) == sorted(load_file(BASE / "model.safetensors"))
    convert_checkpoint(BASE, tmp_path / "whole", to="modelopt", format="nvfp4")
    expected, found = tensors(tmp_path / "whole"), tensors(tmp_path / "out")
    for name in expected:
        assert_same_bits(found[name], expected[name], name)


def test_reading_a_copy_and_reading_what_is_mapped_give_the_same(tmp_path):
    every = {str(dtype): torch.ones(3, 2).to(dtype) for dtype in (torch.float16, torch.float8_e5m2, torch.int64, torch.bool)}
    every |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "u16": torch.ones(2, dtype=torch.uint16)}
    save_file(every, tmp_path / "model.safetensors")
    shards = Shards([tmp_path / "model.safetensors"])
    for name, expected in every.items():
        for tensor in (shards.read(name), shards.copying().read(name)):
            assert tensor.dtype == expected.dtype and tensor.shape == expected.shape
            assert torch.equal(
                tensor.view(torch.uint8) if tensor.numel() and tensor.ndim else tensor.float(),
                expected.view(torch.uint8) if tensor.numel() and tensor.ndim else expected.float(),
            )


def leftovers(folder):
    return sorted(file.name for file in folder.iterdir())


def test_what_fails_on_the_way_leaves_nothing(tmp_path):
    def fail(label, done, total):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(BASE, tmp_path / "out", to="quark", format="mxfp4", on_progress=fail)
    assert leftovers(tmp_path) == []
    convert_checkpoint(BASE, tmp_path / "out", to="quark", format="mxfp4")
    before = tensors(tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(BASE, tmp_path / "out", to="quark", format="mxfp6_e2m3", force=True, on_progress=fail)
    assert leftovers(tmp_path) == ["out"] and load_checkpoint(tmp_path / "out").formats == ("mxfp4",)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(tmp_path / "out").items())


def test_out_is_replaced_only_by_force_and_only_if_it_is_a_checkpoint(tmp_path):
    out = tmp_path / "out"
    convert_checkpoint(BASE, out, to="quark", format="mxfp4", shard_size=6000)
    with pytest.raises(ValueError, match="exists: force=True replaces it"):
        convert_checkpoint(BASE, out, to="quark", format="mxfp6_e2m3")
    convert_checkpoint(BASE, out, to="quark", format="mxfp6_e2m3", force=True)
    assert load_checkpoint(out).formats == ("mxfp6_e2m3",) and not (out / INDEX).exists()
    assert leftovers(tmp_path) == ["out"]
    convert_checkpoint(BASE, out, to="modelopt", format="mxfp4", force=True)
    assert (out / "hf_quant_config.json").exists()
    convert_checkpoint(BASE, out, to="quark", format="mxfp6_e2m3", force=True)
    assert not (out / "hf_quant_config.json").exists()
    (tmp_path / "empty").mkdir()
    convert_checkpoint(BASE, tmp_path / "empty", to="quark", format="mxfp4", force=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_text("dear")
    (tmp_path / "link").symlink_to(out)
    (tmp_path / "file").write_text("")
    for name in ("home", "link", "file"):
        with pytest.raises(ValueError, match="force=True replaces a checkpoint and nothing else"):
            convert_checkpoint(BASE, tmp_path / name, to="quark", format="mxfp4", force=True)
    for inside in (out, out / "model.safetensors"):
        with pytest.raises(ValueError, match="is the source, lies in it or holds it"):
            convert_checkpoint(inside, out, to="quark", format="mxfp6_e2m3", force=True)
    with pytest.raises(ValueError, match=f"its directory {str(tmp_path / 'no')!r} does not exist"):
        convert_checkpoint(BASE, tmp_path / "no" / "where", to="quark", format="mxfp4")


@pytest.mark.parametrize(
    "meanwhile",
    [
        lambda out: out.mkdir(),
        lambda out: out.write_text("dear"),
        lambda out: out.symlink_to("elsewhere"),
        lambda out: (
            convert_checkpoint(BASE, out.with_name("other"), to="quark", format="mxfp6_e2m3")
            and out.with_name("other").rename(out)
        ),
    ],
    ids=["folder", "file", "link", "checkpoint"],
)
@pytest.mark.parametrize("force", [False, True])
def test_what_comes_to_out_meanwhile_is_left_and_the_finished_checkpoint_kept(meanwhile, force, tmp_path):
    out, part = tmp_path / "out", tmp_path / ".out.part"

    def come(label, done, total):
        if done == 2:
            meanwhile(out)

    with pytest.raises(OSError, match="out=.* is not replaced; the finished checkpoint is .*out.part'$"):
        convert_checkpoint(BASE, out, to="quark", format="mxfp4", force=force, on_progress=come)
    assert leftovers(tmp_path) == [".out.part", "out"] and load_checkpoint(part).formats == ("mxfp4",)
    if out.is_dir():
        assert leftovers(out) in ([], ["config.json", "model.safetensors"])
        assert not leftovers(out) or load_checkpoint(out).formats == ("mxfp6_e2m3",)
    with pytest.raises(ValueError, match="another conversion writes there, or one that was killed left"):
        convert_checkpoint(BASE, out, to="quark", format="mxfp4", force=True)


CHANGES = {
    "a file more": lambda out: (out / "thesis.txt").write_text("dear"),
    "a file less": lambda out: (out / "model.safetensors").unlink(),
    "other words": lambda out: (out / "config.json").write_text("{}"),
    "another folder": lambda out: (out.rename(out.with_name("moved")), out.mkdir()),
    "a link": lambda out: out.symlink_to(out.rename(out.with_name("moved"))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_force_replaces_only_what_it_saw(change, tmp_path):
    out, after = tmp_path / "out", {}
    convert_checkpoint(BASE, out, to="quark", format="mxfp4")

    def alter(label, done, total):
        if done == 2:
            CHANGES[change](out)
            after.update({file.name: file.read_bytes() for file in out.iterdir()})

    with pytest.raises(OSError, match="is not replaced; the finished checkpoint is .*out.part'$"):
        convert_checkpoint(BASE, out, to="quark", format="mxfp6_e2m3", force=True, on_progress=alter)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == after
    assert load_checkpoint(tmp_path / ".out.part").formats == ("mxfp6_e2m3",) and not (tmp_path / ".out.old").exists()


def test_two_conversions_to_one_place_never_run_at_once(tmp_path):
    refused = []

    def again(label, done, total):
        for force in (False, True):
            with pytest.raises(ValueError) as refusal:
                convert_checkpoint(BASE, tmp_path / "out", to="quark", format="mxfp6_e2m3", force=force)
            refused.append(str(refusal.value))

    for force in (False, True):
        convert_checkpoint(BASE, tmp_path / "out", to="quark", format="mxfp4", force=force, on_progress=again)
        assert refused and all("another conversion writes there" in each for each in refused)
        assert leftovers(tmp_path) == ["out"] and load_checkpoint(tmp_path / "out").formats == ("mxfp4",)


def test_a_place_that_is_taken_after_the_look_is_taken(tmp_path, monkeypatch):
    from mxref.checkpoints import convert as module

    make_plan = module.make_plan
    monkeypatch.setattr(module, "make_plan", lambda *given: (tmp_path / ".out.part").mkdir() or make_plan(*given))
    with pytest.raises(ValueError, match="another conversion writes there"):
        convert_checkpoint(BASE, tmp_path / "out", to="quark", format="mxfp4")
    assert leftovers(tmp_path) == [".out.part"]


def test_what_a_killed_run_left_is_looked_at_by_people(tmp_path):
    for name in (".out.old", ".out.part"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        for force in (False, True):
            with pytest.raises(ValueError, match=f"left .*{name}'.*remove it"):
                convert_checkpoint(BASE, tmp_path / "out", to="quark", format="mxfp4", force=force)
        (tmp_path / name / "config.json").unlink()
        (tmp_path / name).rmdir()


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("out", [".", "", "..", "../here/..", "/", "../here"])
def test_out_is_not_the_working_directory_and_has_a_name(out, force, tmp_path, monkeypatch):
    here = tmp_path / "here"
    convert_checkpoint(BASE, here, to="quark", format="mxfp4")
    monkeypatch.chdir(here)
    with pytest.raises(ValueError, match="^out=.* is the working directory or has no name: expected a directory"):
        convert_checkpoint(BASE, out, to="quark", format="mxfp6_e2m3", force=force)
    assert load_checkpoint(here).formats == ("mxfp4",) and leftovers(tmp_path) == ["here"]


WAITING = """
import sys, time
import mxref.checkpoints
from mxref.cli import run
convert = mxref.checkpoints.convert_checkpoint
def wait(label, done, total):
    if done == 4:
        print("waiting", flush=True)
        time.sleep(60)
mxref.checkpoints.convert_checkpoint = lambda *given, on_progress, **others: convert(*given, on_progress=wait, **others)
run()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_killed_run_leaves_no_checkpoint(number, tmp_path):
    pytest.importorskip("typer")
    arguments = ["convert", str(BASE), "--to", "quark", "--format", "mxfp4", "--out", str(tmp_path / "out")]
    command = [sys.executable, "-c", WAITING, *arguments]
    process = start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "waiting\n"
        assert leftovers(tmp_path) == [".out.part"]
        with pytest.raises(ValueError, match="out=.*another conversion writes there, or one .* left .*out.part"):
            convert_checkpoint(BASE, tmp_path / "out", to="quark", format="mxfp4")
        process.send_signal(number)
        said = process.communicate(timeout=60)[1]
    finally:
        process.kill()
        process.communicate()
    assert leftovers(tmp_path) == ([".out.part"] if number == signal.SIGKILL else [])
    if number != signal.SIGKILL:
        assert said == f"error: interrupted: nothing was written at {tmp_path / 'out'}\n"
        assert process.returncode == (130 if number == signal.SIGINT else 128 + number)


def test_a_run_that_is_to_outlive_its_terminal_does(tmp_path):
    pytest.importorskip("typer")
    script = WAITING.replace("time.sleep(60)", "os.kill(os.getpid(), signal.SIGHUP)").replace("sys, time", "os, signal, sys")
    script = f"import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n{script}"  # as nohup does
    arguments = ["convert", str(BASE), "--to", "quark", "--format", "mxfp4", "--out", str(tmp_path / "out")]
    result = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True)
    assert result.returncode == 0 and leftovers(tmp_path) == ["out"], result.stderr


@pytest.mark.skipif(os.name != "posix", reason="file sizes are limited as POSIX does it")
def test_a_disk_that_takes_no_more_leaves_nothing(tmp_path):
    script = f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from mxref.checkpoints import convert_checkpoint
resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
try:
    convert_checkpoint({str(BASE)!r}, {str(tmp_path / "out")!r}, to="quark", format="mxfp4")
except OSError as refusal:
    print(refusal)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "File too large" in result.stdout and leftovers(tmp_path) == []


def test_a_source_that_ends_early_is_refused(tmp_path):
    path = copy(CT, tmp_path / "c")
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match="no safetensors file"):
        convert_checkpoint(path, tmp_path / "out", to="modelopt")
    (path / "model.safetensors").write_bytes(whole)

    def cut(label, done, total):
        os.truncate(path / "model.safetensors", len(whole) - 4000)

    with pytest.raises(CheckpointError, match="cannot be read: the file ends before its tensors do"):
        convert_checkpoint(path, tmp_path / "out", to="modelopt", on_progress=cut)
    assert leftovers(tmp_path) == ["c"]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the high-water mark is reset as Linux does it")
def test_memory_holds_a_weight_and_never_a_shard(tmp_path):
    """100 MB in two shards of 4 MB weights: what is resident grows by less than one shard, reading, quantizing, writing."""
    generator, listed, source = torch.Generator().manual_seed(0), {}, tmp_path / "in"
    source.mkdir()
    for part in range(2):
        named = {f"model.layers.{i}.mlp.up_proj.weight" for i in range(12 * part, 12 * part + 12)}
        found = {name: torch.randn(1024, 2048, generator=generator).bfloat16() for name in named}
        save_file(found, source / f"model-{part}.safetensors")
        listed |= dict.fromkeys(found, f"model-{part}.safetensors")
    (source / INDEX).write_text(json.dumps({"weight_map": listed}))
    script = f"""
import torch
torch.set_num_threads(1)
from mxref.checkpoints import convert_checkpoint, load_checkpoint
def status(key):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(key))
def peak(call):
    open("/proc/self/clear_refs", "w").write("5")  # the high-water mark becomes what is resident now
    before = status("VmRSS")
    call()
    return status("VmHWM") - before
def load(path):
    for weight in load_checkpoint(path).streamed().values():
        pass
convert_checkpoint({str(BASE)!r}, {str(tmp_path / "warm")!r}, to="quark", format="mxfp4")
print(peak(lambda: convert_checkpoint({str(source)!r}, {str(tmp_path / "out")!r}, to="quark", format="mxfp4")))
print(peak(lambda: load({str(tmp_path / "out")!r})))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    shard_bytes = 12 * 1024 * 2048 * 2
    convert, load = (int(line) for line in result.stdout.split())
    assert convert < shard_bytes and load < shard_bytes / 4, f"{convert / 2**20:.1f} and {load / 2**20:.1f} MiB"


# the command


def test_the_command_converts_and_says_what_changed(convert, tmp_path):
    result = convert(CT, "--to", "modelopt", "--out", tmp_path / "out", "--json", tmp_path / "r.json")
    assert result.exit_code == 0 and "turned" in result.stdout and f"{EXPERT}.down_proj.weight" in result.stdout
    assert "turned: codes and block scales are as they were, bit for bit; the tensor scale" in result.stdout
    assert "became its reciprocal, which is exact for powers of two alone" in result.stdout
    record = json.loads((tmp_path / "r.json").read_text())
    assert (record["source"], record["target"]) == ("compressed-tensors w_nvfp4_a_nvfp4", "modelopt w_nvfp4_a_nvfp4")
    assert record["lossless"] is False and len(record["weights"]) == 6
    assert {"name", "how", "changed", "max_error", "rms_error", "outside", "input_error"} <= set(record["weights"][0])
    assert "of rms: the rms error over the rms of the source; outside: blocks that the target's scales" in result.stdout
    kept = "kept: nvfp4 (rounded by modelopt_nvfp4 now, before by compressed_tensors_nvfp4)"
    assert f"\nactivations: {kept}\n" in result.stdout and record["activations"] == kept
    again = json.loads(convert(CT, "--to", "modelopt", "--out", tmp_path / "out", "--force", "--json", "-").stdout)
    assert again == record


MX6 = DATA / "quark-mxfp4_mxfp6_e2m3-qwen3moe"


@pytest.mark.parametrize(
    "path, asked, said",
    [
        (CT, dict(to="modelopt", activations=None), "dropped: nvfp4 before, not quantized now"),
        (CT, dict(to="plain"), "dropped: nvfp4 before, not quantized now"),
        (MX6, dict(to="compressed-tensors"), "changed: mxfp6_e2m3 before, mxfp4 now"),
        (BASE, dict(to="quark", format="mxfp4"), "added: not quantized before, mxfp4 now"),
        (BASE, dict(to="modelopt", format="mxfp4"), "not quantized, as before"),
        (QUARK, dict(to="quark"), "kept: mxfp4"),
    ],
    ids=shown,
)
def test_what_becomes_of_activations_is_said(path, asked, said, tmp_path):
    assert convert_checkpoint(path, tmp_path / "out", **asked).activations == said


def test_the_command_calls_options_as_they_are_typed(convert, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    cases = {
        ("--to", "awq", "--out", out): "--to='awq': expected one of plain",
        ("--to", "quark", "--out", tmp_path / "new"): "--format is not given and the source holds floats",
        ("--to", "quark", "--format", "mxfp4", "--out", out): f"--out={str(out)!r} exists: --force replaces it",
        ("--to", "quark", "--format", "mxfp4", "--dialect", "ocp", "--out", "n"): "--dialect='ocp': expected one of plain",
        (
            "--to",
            "quark",
            "--format",
            "nvfp4",
            "--activations",
            "nvfp4",
            "--out",
            "n",
        ): "or --activations none (weights alone)",
        ("--to", "quark", "--format", "mxfp4", "--ignore", f"{EXPERT}.*", "--out", "n"): f"error: --ignore='{EXPERT}.*': ",
    }
    for arguments, message in cases.items():
        result = convert(BASE, *arguments)
        assert result.exit_code == 2 and message in result.stderr, result.stderr


def test_the_command_ends_in_1_where_scales_do_not_reach(convert, tmp_path):
    path = mxfp4_checkpoint(tmp_path / "in", [[140, 100]])
    result = convert(path, "--to", "modelopt", "--format", "nvfp4", "--out", tmp_path / "out")
    assert result.exit_code == 1 and (tmp_path / "out").exists()


def test_the_command_ends_in_2_on_bad_use_and_writes_nothing(convert, tmp_path):
    out = tmp_path / "out"
    cases = [
        ("nowhere", "--to", "quark", "--out", out),
        (BASE, "--to", "awq", "--out", out),
        (BASE, "--to", "quark", "--format", "mxfp4", "--out", out, "--shard-size", "big"),
        (BASE, "--to", "quark", "--format", "mxfp4", "--out", out, "--backend", "none such"),
        (BASE, "--to", "quark", "--format", "mxfp4", "--out", tmp_path / "no" / "where"),
        (BASE, "--to", "quark", "--format", "mxfp4", "--out", out, "--json", tmp_path / "no" / "where.json"),
    ]
    for arguments in cases:
        result = convert(*arguments)
        assert result.exit_code == 2 and result.stderr.startswith("error: ") and leftovers(tmp_path) == [], arguments


@pytest.mark.parametrize("whole", [False, True])
def test_the_command_says_what_an_interrupt_came_too_late_for(whole, convert, tmp_path, monkeypatch):
    import mxref.checkpoints

    def interrupted(path, out, **others):
        if whole:
            out.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(mxref.checkpoints, "convert_checkpoint", interrupted)
    result = convert(BASE, "--to", "quark", "--out", tmp_path / "out")
    written = "the whole checkpoint was written already" if whole else "nothing was written"
    assert result.exit_code == 130 and result.stderr == f"error: interrupted: {written} at {tmp_path / 'out'}\n"


def test_the_command_shows_the_first_of_many_notes(convert, tmp_path):
    odd = [f"a.{i}.x_proj.weight" for i in range(10)]
    path = copy(BASE, tmp_path / "c", lambda tensors: tensors.update({name: torch.ones(64) for name in odd}))
    arguments = (path, "--to", "quark", "--format", "mxfp4", "--out", tmp_path / "out", "--json", tmp_path / "r.json")
    shown = convert(*arguments).stdout
    assert shown.count("is no weight of a linear") == 8 and "... and 2 more notes; --json has all" in shown
    assert all(any(note.startswith(name) for note in json.loads((tmp_path / "r.json").read_text())["notes"]) for name in odd)


def test_the_command_leaves_losses_unmeasured_if_asked(convert, tmp_path):
    arguments = (
        BASE,
        "--to",
        "quark",
        "--format",
        "mxfp4",
        "--out",
        tmp_path / "out",
        "--no-losses",
        "--activations",
        "none",
    )
    result = convert(*arguments)
    assert result.exit_code == 0 and "not measured" in result.stdout
    assert load_checkpoint(tmp_path / "out").scheme == "w_mxfp4"


@pytest.mark.parametrize("argument", ["ignore", "include"])
@pytest.mark.parametrize("patterns, error", [
    ("q_proj", TypeError), ([3], TypeError), (["re:("], ValueError), (["*.nothing"], ValueError),
])  # fmt: skip
def test_patterns_that_mean_nothing_are_refused(argument, patterns, error, tmp_path):
    with pytest.raises(error, match=argument):
        convert_checkpoint(DATA / "base-qwen3moe", tmp_path / "out", to="quark", format="mxfp4", **{argument: patterns})
    assert not (tmp_path / "out").exists()


def stored(module, length, format):
    """A matrix of 32 rows as ModelOpt stores one."""
    layout = Scheme("modelopt", format).layout(stacked=False)
    q = mxref.quantize(torch.randn(32, length), format, recipe=layout.recipe)
    return {module + suffix: part for suffix, part in placed(layout, q.packed, q.scales, q.tensor_scale, None).items()}


@pytest.mark.parametrize("formats", [("nvfp4", "mxfp4"), ("mxfp4", "nvfp4"), ("mxfp8_e4m3", "nvfp4")])
def test_experts_of_other_formats_become_one_stack_with_scales_of_their_own(formats, tmp_path):
    files, algorithms, experts = {}, {}, "model.layers.0.mlp.experts"
    for index, format in enumerate(formats):
        for part in ("gate_proj", "up_proj", "down_proj"):
            module = f"{experts}.{index}.{part}"
            files |= stored(module, 32, format)
            algorithms[module] = {"quant_algo": format.upper().removesuffix("_E4M3")}
        if format == "nvfp4":
            files[f"{experts}.{index}.up_proj.weight_scale_2"] = files[f"{experts}.{index}.gate_proj.weight_scale_2"]
    declared = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": algorithms}
    (tmp_path / "in").mkdir()
    save_file({name: tensor.clone() for name, tensor in files.items()}, tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "config.json").write_text(json.dumps({"model_type": "gpt_oss", "quantization_config": declared}))
    convert_checkpoint(tmp_path / "in", tmp_path / "out", to="modelopt", format="nvfp4", activations=None)
    before, after = load_checkpoint(tmp_path / "in", weights_only=True), load_checkpoint(tmp_path / "out")
    assert set(after.quantized) == {f"{experts}.gate_up_proj", f"{experts}.down_proj"}
    found = decoded(after)
    for name in before.quantized:
        q = before[name].tensor
        expected = mxref.dequantize(q)
        if q.format.name == "mxfp8_e4m3":  # gate and up share a scale, down has its own
            parts = ("gate_proj", "up_proj") if "down" not in name else ("down_proj",)
            rows = [
                mxref.dequantize(before[f"{name.rpartition('.')[0].rpartition('.')[0]}.{p}.weight"].tensor) for p in parts
            ]
            whole = mxref.qdq(torch.cat(rows), "nvfp4", recipe="modelopt_nvfp4")
            expected = whole[32:] if "up_proj" in name else whole[:32]
        assert_same_bits(found[name.removesuffix(".weight")] + 0.0, expected + 0.0, name)


def test_matrices_of_other_formats_or_lengths_share_no_scale(tmp_path):
    attention = "model.layers.0.self_attn."
    files = {**stored(attention + "q_proj", 32, "mxfp4"), **stored(attention + "k_proj", 64, "nvfp4")}
    algorithms = {attention + "q_proj": {"quant_algo": "MXFP4"}, attention + "k_proj": {"quant_algo": "NVFP4"}}
    declared = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": algorithms}
    (tmp_path / "in").mkdir()
    save_file(files, tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": declared}))
    conversion = convert_checkpoint(tmp_path / "in", tmp_path / "out", to="modelopt", format="nvfp4", activations=None)
    before, after = load_checkpoint(tmp_path / "in", weights_only=True), load_checkpoint(tmp_path / "out")
    for name in before.quantized:
        values = [mxref.dequantize(each[name].tensor) + 0.0 for each in (before, after)]
        assert torch.equal(*values) or not conversion.lossless


# what is NaN or Inf


def spoiled_floats(path, odd, others=1.0):
    """Writes a model in bfloat16 of one weight whose sixth value is `odd`; the other 31 of its block are random, times
    `others`. Returns the name of the weight."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0, :32] *= others
    x[0, 5] = odd
    path.mkdir()
    save_file({"m.q_proj.weight": x}, path / "model.safetensors")
    return "m.q_proj.weight"


DIALECTS_IN_FORMATS = [
    ("compressed-tensors", "mxfp4"),
    ("compressed-tensors", "mxfp8_e4m3"),
    ("compressed-tensors", "nvfp4"),
    ("modelopt", "mxfp4"),
    ("modelopt", "mxfp8_e4m3"),
    ("quark", "mxfp4"),
    ("quark", "mxfp6_e2m3"),
    ("quark", "mxfp8_e4m3"),
    ("quark", "nvfp4"),
    ("torchao", "mxfp4"),
    ("torchao", "mxfp8_e4m3"),
    ("torchao", "mxfp8_e5m2"),
]


@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
@pytest.mark.parametrize("to, format", DIALECTS_IN_FORMATS)
def test_what_is_not_finite_is_said_and_what_it_spoils_is_a_fault(to, format, odd, tmp_path):
    """Some producers make zeros of the block, some cut it to nothing, some make NaN of it: its other values are lost."""
    name = spoiled_floats(tmp_path / "in", odd)
    conversion = convert_checkpoint(tmp_path / "in", tmp_path / "out", to=to, format=format)
    before = load_file(tmp_path / "in" / "model.safetensors")[name].float()
    after = mxref.dequantize(load_checkpoint(tmp_path / "out")[name].tensor)
    block = 16 if format == "nvfp4" else 32
    finite = torch.arange(block) != 5
    assert not after[0, :block][finite].isfinite().all() or (2 * after.abs() < before.abs())[0, :block][finite].all()
    assert conversion.faults == conversion.changes and conversion.changes[0].not_finite == 1
    assert conversion.record()["weights"][0]["not_finite"] == 1
    assert f"NaN or Inf in the source: 1 in {name}" in conversion.notes


@pytest.mark.parametrize("to, format", DIALECTS_IN_FORMATS)
def test_a_nan_among_zeros_is_lost_if_it_becomes_a_number(to, format, tmp_path):
    name = spoiled_floats(tmp_path / "in", torch.nan, others=0.0)
    conversion = convert_checkpoint(tmp_path / "in", tmp_path / "out", to=to, format=format)
    after = mxref.dequantize(load_checkpoint(tmp_path / "out")[name].tensor)
    finite = (torch.arange(after.numel()) != 5).view(after.shape)
    lost = not after[0, 5].isnan() or not after[finite].isfinite().all()
    assert bool(conversion.faults) == bool(lost)


def test_the_command_ends_in_1_where_a_nan_spoils_a_block_whether_losses_are_measured_or_not(convert, tmp_path):
    name = spoiled_floats(tmp_path / "in", torch.nan)
    for losses in ("--losses", "--no-losses"):
        result = convert(
            tmp_path / "in",
            "--to",
            "modelopt",
            "--format",
            "mxfp4",
            "--out",
            tmp_path / "out",
            "--force",
            losses,
            "--json",
            "-",
        )
        record = json.loads(result.stdout)
        assert result.exit_code == 1 and [each["not_finite"] for each in record["weights"]] == [1]
        result = convert(
            tmp_path / "in", "--to", "modelopt", "--format", "mxfp4", "--out", tmp_path / "out", "--force", losses
        )
        assert result.exit_code == 1 and f"NaN or Inf in the source: 1 in {name}" in result.stdout


@pytest.mark.parametrize("format, odd", [("mxfp8_e4m3", (0x7F, 0xFF)), ("mxfp8_e5m2", (0x7C, 0xFC, 0x7D, 0xFF))])
def test_codes_that_are_not_finite_are_kept_and_counted(format, odd, tmp_path):
    codes = (torch.arange(4 * 64) % 0x7C).to(torch.uint8).view(4, 64)
    codes.view(-1)[[64 * 3 + i for i in range(len(odd))]] = torch.tensor(odd, dtype=torch.uint8)
    q = mxref.BlockTensor.from_codes(codes, torch.full((4, 2), 127, dtype=torch.uint8), None, format, "ocp")
    plain = {"m.q_proj.weight": torch.ones(4, 64).bfloat16()}
    (tmp_path / "plain").mkdir()
    save_file(plain, tmp_path / "plain" / "model.safetensors")
    convert_checkpoint(tmp_path / "plain", tmp_path / "in", to="torchao", format=format)
    file, spoiled = tmp_path / "in" / "model.safetensors", bytearray((tmp_path / "in" / "model.safetensors").read_bytes())
    kept = load_checkpoint(tmp_path / "in")["m.q_proj.weight"].tensor.packed.numpy().tobytes()
    place = spoiled.index(kept)
    spoiled[place : place + len(kept)] = q.packed.numpy().tobytes()
    file.write_bytes(spoiled)
    conversion = convert_checkpoint(tmp_path / "in", tmp_path / "out", to="torchao")
    assert conversion.changes[0].how == "kept" and conversion.lossless and not conversion.faults
    assert conversion.changes[0].not_finite == len(odd)
    assert conversion.notes == (f"NaN or Inf in the source: {len(odd)} in m.q_proj.weight",)
