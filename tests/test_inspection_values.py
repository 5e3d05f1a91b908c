"""What `inspect_checkpoint` says of values, NaN and Inf, zero and negative scales, and of files that cannot be read."""

import json
import shutil
import struct

import pytest
import torch

pytest.importorskip("safetensors")

from safetensors.torch import load_file, save_file

import mxref
from mxref.checkpoints import CheckpointError, UnreadableError, convert_checkpoint, inspect_checkpoint, load_checkpoint
from mxref.checkpoints.files import Shards
from mxref.checkpoints.recode import dead_blocks, not_finite

NAME = "m.q_proj.weight"


@pytest.fixture
def command():
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from mxref.cli import app

    return lambda *arguments: CliRunner().invoke(app, [*map(str, arguments)])


def checkpoint(path, to="compressed-tensors", format="nvfp4", change=lambda tensors: None):
    """A quantized weight [8, 64] of random numbers whose stored bytes are then changed."""
    (path / "floats").mkdir(parents=True)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    save_file({NAME: x}, path / "floats" / "model.safetensors")
    convert_checkpoint(path / "floats", path / "c", to=to, format=format)
    file = path / "c" / "model.safetensors"
    tensors = load_file(file)
    change({name: tensor.view(torch.uint8) for name, tensor in tensors.items() if tensor.ndim == 2})
    header = json.loads(file.read_bytes()[8 : 8 + struct.unpack("<Q", file.read_bytes()[:8])[0]])
    save_file(tensors, file, metadata=header["__metadata__"])
    return path / "c"


def found(path):
    return [(finding.what, finding.name, finding.detail) for finding in inspect_checkpoint(path).faults]


MXFP8 = [
    ("compressed-tensors", "mxfp8_e4m3", NAME, (0x7F, 0xFF)),
    ("quark", "mxfp8_e4m3", NAME, (0x7F,)),
    ("modelopt", "mxfp8_e4m3", NAME, (0xFF,)),
    ("torchao", "mxfp8_e5m2", "m.q_proj._weight_qdata", (0x7C, 0xFC, 0x7D, 0xFF)),
]


@pytest.mark.parametrize("to, format, codes, odd", MXFP8)
def test_a_code_that_is_nan_is_a_fault_with_its_count(to, format, codes, odd, tmp_path):
    def change(tensors):
        tensors[codes].view(-1)[100 : 100 + len(odd)] = torch.tensor(odd, dtype=torch.uint8)

    assert found(checkpoint(tmp_path / "sound", to, format)) == []
    path = checkpoint(tmp_path / "odd", to, format, change)
    inf = [("implausible weights", NAME, "rms inf")] if 0x7C in odd else []
    assert found(path) == [("not finite", NAME, f"{len(odd)} of 512 are NaN or Inf"), *inf]


def test_nan_scales_and_nan_codes_are_counted_apart(tmp_path):
    def change(tensors):
        tensors[NAME][0, 0] = 0x7F
        tensors[NAME][3, 40] = 0xFF
        tensors[f"{NAME}_scale"][7] = 0xFF

    path = checkpoint(tmp_path, "compressed-tensors", "mxfp8_e4m3", change)
    expected = [("NaN block scales", NAME, "2 of 16"), ("not finite", NAME, "2 of 512 are NaN or Inf")]
    assert found(path) == expected


@pytest.mark.parametrize("format", list(mxref.formats.BLOCK_FORMATS))
@pytest.mark.parametrize("length", [64, 40])
def test_what_is_not_finite_is_counted_as_decoded(format, length):
    """Every code with the smallest, the largest and a NaN scale; the largest leaves float32 in some formats."""
    block = mxref.formats.BLOCK_FORMATS[format]
    codes = (torch.arange(9 * length) % block.element.code_count).to(torch.uint8).view(9, length)
    tensor_scale = torch.tensor(2.0**119) if block.tensor_scale else None
    for code in (0, block.scale.max_code, block.scale.nan_code):
        scales = torch.full((9, -(-length // block.block_size)), code, dtype=torch.uint8)
        q = mxref.BlockTensor.from_codes(codes, scales, tensor_scale, format, block.default_recipe)
        decoded = mxref.dequantize(q).numpy()
        assert not_finite(q) == decoded.size - sum(map(bool, (abs(decoded) < float("inf")).flat))
    assert not_finite(q) == decoded.size
    stack = mxref.BlockTensor.from_codes(codes[None], scales[None] * 0, tensor_scale, format, block.default_recipe)
    special = sum(not abs(block.element.values[code]) < float("inf") for code in codes.flatten().tolist())
    assert not_finite(stack) == special


@pytest.mark.parametrize("to", ["compressed-tensors", "modelopt", "quark"])
def test_a_zero_scale_over_codes_is_a_dead_block_and_over_zeros_is_none(to, tmp_path):
    codes = {"compressed-tensors": "m.q_proj.weight_packed"}.get(to, NAME)

    def change(tensors):
        tensors[f"{NAME}_scale"][0, 1] = tensors[f"{NAME}_scale"][5, 2] = 0
        tensors[codes][5, 16:24] = 0x80  # 0 and -0
        tensors[codes][0, 8:15] = 0
        tensors[codes][0, 15] = 0x10  # one code of the block, its last, is not zero

    assert found(checkpoint(tmp_path, to, "nvfp4", change)) == [
        ("zero block scales", NAME, "1 of 32 blocks have the scale 0 and codes that are not")
    ]


def test_a_dead_block_may_be_short_or_in_a_stack():
    codes = torch.zeros(2, 3, 40, dtype=torch.uint8)
    codes[0, 1, 39], codes[1, 2, 3], codes[1, 0, 20] = 1, 9, 8
    scales = torch.zeros(2, 3, 3, dtype=torch.uint8)
    q = mxref.BlockTensor.from_codes(codes, scales, torch.ones(()), "nvfp4", "nvidia")
    assert dead_blocks(q) == 2


def test_negative_scales_are_a_fault_with_their_count(tmp_path):
    def change(tensors):
        tensors[f"{NAME}_scale"].view(-1)[:3] |= 0x80

    ((what, name, detail),) = found(checkpoint(tmp_path, change=change))
    assert (what, name) == ("values", NAME) and "codes with the sign bit set (3)" in detail


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_weights_of_a_model_in_floats_are_looked_at(dtype, tmp_path):
    x = torch.ones(300, 1000).to(dtype)
    x[299, 999], x[0, 0], x[7, 7] = torch.nan, torch.inf, -torch.inf
    save_file({NAME: x, "m.k_proj.weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    dtypes = [("dtype", NAME, "F64: expected one of F32, F16, BF16")] if dtype == torch.float64 else []
    assert found(tmp_path) == [*dtypes, ("not finite", NAME, "3 of 300000 are NaN or Inf")]


@pytest.mark.parametrize("format", ["mxfp8_e4m3", "nvfp4"])
def test_inspect_reads_each_tensor_once_and_copies_what_it_looks_at_all_over(format, tmp_path, monkeypatch):
    """A file's memory that was looked at counts as the process's own: a copy is let go of, and memory holds one tensor."""
    path, reads, read = checkpoint(tmp_path, format=format), {}, Shards.read

    def recorded(self, name):
        assert name not in reads
        reads[name] = self.mapped
        return read(self, name)

    monkeypatch.setattr(Shards, "read", recorded)
    inspect_checkpoint(path)
    assert reads == dict.fromkeys(load_file(path / "model.safetensors"), format == "nvfp4")
    reads.clear()
    inspect_checkpoint(tmp_path / "floats", dialect="plain")
    assert reads == {NAME: False}


# the command and its exit code


def test_the_command_closes_with_one_line(command, tmp_path):
    result = command("inspect", checkpoint(tmp_path / "a"))
    assert result.exit_code == 0 and result.stdout.splitlines()[-1] == "nothing found: no faults, no warnings"

    def change(tensors):
        tensors[f"{NAME}_scale"][0] = 0

    result = command("inspect", checkpoint(tmp_path / "b", change=change))
    assert result.exit_code == 1 and result.stdout.splitlines()[-1] == "found: 1 fault, no warnings"


@pytest.mark.parametrize("length", [0, 7, 100, -1])
def test_a_file_that_is_cut_off_cannot_be_read_wherever_it_lies(length, command, tmp_path):
    path = checkpoint(tmp_path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(UnreadableError, match="model.safetensors: no safetensors file: "):
        inspect_checkpoint(path)
    dialect = ("--dialect", "compressed-tensors")
    for arguments in (
        ("inspect", path),
        ("inspect", file),
        ("inspect", file, *dialect),
        ("convert", path, "--to", "quark", "--out", tmp_path / "out"),
        ("convert", file, *dialect, "--to", "quark", "--out", tmp_path / "out"),
    ):
        result = command(*arguments)
        assert result.exit_code == 2 and result.stderr.startswith("error: model.safetensors: no safetensors file: "), (
            arguments
        )
        assert result.stderr.count("\n") == 1 and not (tmp_path / "out").exists()


def test_a_config_that_is_no_json_cannot_be_read(command, tmp_path):
    path = checkpoint(tmp_path)
    (path / "config.json").write_text("{")
    result = command("inspect", path)
    assert result.exit_code == 2 and result.stderr.startswith("error: config.json: no JSON: ")


def test_a_name_that_is_in_the_header_twice_is_refused(command, tmp_path):
    first, second = (json.dumps({"dtype": "F32", "shape": [1], "data_offsets": [i, i + 4]}) for i in (0, 4))
    header = f'{{"a": {first}, "b": {second}, "a": {first}}}'
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode() + b"12345678")
    assert len(load_file(tmp_path / "model.safetensors")) == 2  # safetensors says nothing
    with pytest.raises(CheckpointError, match="^model.safetensors: the header has a twice: expected once$"):
        load_checkpoint(tmp_path)
    assert found(tmp_path) == [("files", str(tmp_path), "model.safetensors: the header has a twice: expected once")]


# what a model that is loaded says too


def models(path, kind):
    """A tiny model as its own parameters lie, and as transformers writes it, experts one by one: two folders."""
    pytest.importorskip("transformers")
    from tiny_models import tiny_model

    model = tiny_model(kind)
    model.save_pretrained(path / "written")
    (path / "own").mkdir()
    shutil.copy(path / "written" / "config.json", path / "own")
    save_file({name: t.clone() for name, t in model.state_dict().items()}, path / "own" / "model.safetensors")
    return path / "own", path / "written"


@pytest.mark.parametrize("kind", ["qwen3moe", "qwen2moe", "mixtral", "deepseekv3", "gptoss"])
def test_stacks_of_floats_lie_as_their_model_has_them(kind, tmp_path):
    from mxref.models import load

    for path in models(tmp_path, kind):
        assert found(path) == []
        load(path)
    own = load_file(tmp_path / "own" / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    save_file(own | {name: own[name].transpose(1, 2).contiguous()}, tmp_path / "own" / "model.safetensors")
    given, expected = (list(shape) for shape in (own[name].transpose(1, 2).shape, own[name].shape))
    assert found(tmp_path / "own") == [("shape", name, f"{given}, and by the config {expected}")]
    with pytest.raises(CheckpointError, match=name):
        load(tmp_path / "own")


@pytest.mark.parametrize("kind", ["qwen3moe", "mixtral"])
def test_a_matrix_that_is_stored_twice_is_a_fault_and_not_converted(kind, tmp_path):
    from mxref.models import load

    own, written = models(tmp_path, kind)
    experts = {name: t for name, t in load_file(own / "model.safetensors").items() if ".experts." in name}
    convert_checkpoint(written, tmp_path / "nvfp4", to="quark", format="nvfp4")
    for path in (written, tmp_path / "nvfp4"):
        save_file(load_file(path / "model.safetensors") | experts, path / "model.safetensors")
    first = "block_sparse_moe.experts.0.w{}" if kind == "mixtral" else "mlp.experts.0.{}_proj"
    of_gate, of_down = (first.format(names[kind == "mixtral"]) for names in (("gate", 1), ("down", 2)))
    expected = [
        (
            "stored twice",
            f"model.layers.{i}.mlp.experts.{part}_proj",
            f"also as model.layers.{i}.{other}.weight and {n} others",
        )
        for i in range(2)
        for part, other, n in (("gate_up", of_gate, 7), ("down", of_down, 3))
    ]
    assert sorted(found(written)) == sorted(expected)
    with pytest.raises(CheckpointError, match="experts.* is stored a second time"):
        load(written)
    config = json.loads((tmp_path / "nvfp4" / "config.json").read_text())
    config["quantization_config"]["exclude"] += ["*.experts.gate_up_proj", "*.experts.down_proj"]
    (tmp_path / "nvfp4" / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match="experts.down_proj: stored twice, also as model.layers.0.*experts.0.*3 others"
    ):
        convert_checkpoint(tmp_path / "nvfp4", tmp_path / "out", to="plain")


def test_an_experts_matrix_under_two_names_of_its_own_is_a_fault(tmp_path):
    names = ("a.experts.0.gate_proj.weight", "a.experts.0.w1.weight", "a.experts.0.w1.bias")
    save_file({name: torch.ones(4, 4) for name in names}, tmp_path / "model.safetensors")
    assert found(tmp_path / "model.safetensors") == [("stored twice", names[1], f"also as {names[0]}")]


def test_numbers_of_experts_that_contradict_each_other_are_faults(tmp_path):
    _, written = models(tmp_path, "deepseekv3")
    config = json.loads((written / "config.json").read_text())
    for changes, detail in (
        ({"num_experts": 2}, "num_experts 2 and n_routed_experts 4: expected one number of experts"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok 5, which n_routed_experts 4 cannot give"),
        ({"num_experts_per_tok": 4, "num_experts": 4}, None),
    ):
        (written / "config.json").write_text(json.dumps(config | changes))
        faults = [fault for fault in found(written) if fault[0] == "config"]
        assert faults == ([("config", "config.json", detail)] if detail else [])
