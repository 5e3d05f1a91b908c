"""The command line: what it prints and writes, its exit codes, and its complaints."""

import contextlib
import csv
import io
import json
import math
import os
import pty
import re
import subprocess
import sys

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")

import torch
from tiny_models import TEXT, tiny_model, tiny_tokenizer
from typer.testing import CliRunner

import mxref
from mxref import registry
from mxref.cli import app

FORMATS = list(mxref.BLOCK_FORMATS)


def mxref_command(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refusal(result):
    """The one complaint on stderr of a call that was refused as bad usage."""
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    return result.stderr


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model directory `model`, with its tokenizer, and a text `text.txt`."""
    directory = tmp_path_factory.mktemp("cli")
    tiny_model("qwen3moe").save_pretrained(directory / "model")
    tiny_tokenizer().save_pretrained(directory / "model")
    (directory / "text.txt").write_text(TEXT)
    return directory


@pytest.fixture
def evaluate(directory):
    return lambda *options: mxref_command(
        "eval", directory / "model", "--text", directory / "text.txt", "--window", 16, "--tokens", 64, *options
    )


# eval


def test_eval_prints_every_format_twice_after_the_baseline(evaluate):
    result = evaluate()
    assert result.exit_code == 0, result.stderr
    rows = [re.split(r"\s*│\s*", line.strip("│ \n")) for line in result.stdout.splitlines() if line.startswith("│")]
    expected = [("bf16", "bf16")]
    for name in FORMATS:
        expected += [(name, "bf16"), (name, name)]
    assert [tuple(row[:2]) for row in rows] == expected
    assert rows[-1][-1] == "nvidia" and rows[1][-1] == "ocp"


def test_eval_writes_json_csv_and_plot(evaluate, tmp_path):
    files = [tmp_path / name for name in ("r.json", "r.csv", "r.svg")]
    result = evaluate("--formats", "mxfp4,nvfp4", "--json", files[0], "--csv", files[1], "--plot", files[2])
    assert result.exit_code == 0, result.stderr
    data = json.loads(files[0].read_text())
    rows = list(csv.DictReader(io.StringIO(files[1].read_text())))
    assert [float(row["bits_per_byte"]) for row in rows] == [row["bits_per_byte"] for row in data["rows"]]
    assert len(rows) == 5 and data["complete"] is True
    assert "<svg" in files[2].read_text()
    for row in data["rows"]:
        assert f"{row['bits_per_byte']:.4f}" in result.stdout


def test_eval_json_on_stdout_is_json_alone(evaluate):
    result = evaluate("--formats", "mxint8", "--weights-only", "--json", "-")
    assert result.exit_code == 0
    assert [(row["weights"], row["activations"]) for row in json.loads(result.stdout)["rows"]] == [
        ("bf16", "bf16"),
        ("mxint8", "bf16"),
    ]


def test_eval_passes_its_options_on(evaluate):
    options = ("--formats", "nvfp4", "--activations", "same,mxfp8_e5m2", "--recipe", "vllm_torch", "--layers", "all")
    result = evaluate(*options, "--semantics", "dequantized", "--json", "-")
    data = json.loads(result.stdout)
    assert [(row["activations"], row["recipe"], row["act_recipe"]) for row in data["rows"][1:]] == [
        ("nvfp4", "vllm_torch", "vllm_torch"),
        ("mxfp8_e5m2", "vllm_torch", "ocp"),
    ]
    assert (data["layers"], data["semantics"], data["window"], data["windows"]) == ("all", "dequantized", 16, 4)
    assert data["text"] == "text.txt"


def test_eval_says_whose_kernels_were_asked_and_ends_with_1_where_their_bits_differ(monkeypatch, directory):
    arguments = ["eval", str(directory / "model"), "--text", str(directory / "text.txt"), "--window", "16", "--tokens", "64"]
    arguments += ["--formats", "mxfp4", "--weights-only", "--backend", "other", "--check", "--json", "-"]
    wrong = False

    def dequantize(q, *others, **options):
        with mxref.use():
            values = mxref.dequantize(q, *others, **options)
            return values + 1 if wrong else values

    ours = registry.Kernel("dequantize", "other", dequantize, "bitexact", ("cpu",), (torch.uint8,))
    monkeypatch.setattr(registry, "_offers", lambda: {("dequantize", "other"): None})
    monkeypatch.setattr(registry, "kernel", lambda op, backend: ours if op == "dequantize" else None)
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, json.loads(result.stdout)["backends"]) == (0, ["other"])
    wrong = True
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1 and "dequantize.other differs" in result.stderr


def test_eval_says_who_answered_and_check_that_there_was_something_to_check(monkeypatch, evaluate):
    """A kernel that refuses all but float32; then one that refuses everything, where a green check would say nothing."""

    def dequantize(q, dtype=torch.float32):
        with mxref.use():
            return mxref.dequantize(q, dtype)

    lacks = None
    accepts = lambda q, dtype=torch.float32: None if dtype == torch.float32 else "only float32"  # noqa: E731
    ours = registry.Kernel(
        "dequantize", "other", dequantize, "bitexact", ("cpu",), (torch.uint8,), None, lambda: lacks, accepts
    )
    monkeypatch.setattr(registry, "_offers", lambda: {("dequantize", "other"): None})
    monkeypatch.setattr(registry, "kernel", lambda op, backend: ours if op == "dequantize" else None)
    options = ("--formats", "mxfp4", "--backend", "other")
    for asked in ((), ("--check",)):
        result = evaluate(*options, *asked, "--json", "-")
        calls = json.loads(result.stdout)["calls"]
        answered = calls["dequantize"]["answered"]
        assert result.exit_code == 0 and answered > 0 and calls["quantize"]["answered"] == 0
        assert calls["dequantize"]["compared"] == (answered if asked else 0) and calls["dequantize"]["refused"] > 0
        said = f"other answered: dequantize {answered}; "
        assert json.loads(result.stdout)["answers"].startswith(said)
    compared = f"of these compared, every bit the reference's: dequantize {answered}; refused: "
    assert f"\n{said}{compared}" in evaluate(*options, "--check").stdout

    lacks = "no such chip"
    registry._missing.cache_clear()
    nothing = "other answered no call, so that every number is the reference's; refused: dequantize"
    result = evaluate(*options)
    assert result.exit_code == 0 and nothing in result.stdout
    result = evaluate(*options, "--check", "--json", "-")
    assert result.exit_code == 1 and json.loads(result.stdout)["answers"].startswith(nothing)
    assert result.stderr.startswith(f"error: --check: nothing was compared with the reference: {nothing}")
    registry._missing.cache_clear()


@pytest.mark.parametrize(
    "options, message",
    [
        (("--backend", ""), "backend='': expected one of inductor, triton"),
        (("--against", ""), "against='': expected a directory"),
        (("--tokenizer", ""), "tokenizer='': expected a directory"),
        (("--formats", "mxfp4,mxfp5"), "error: --formats='mxfp5': expected one of " + ", ".join(FORMATS)),
        (("--formats", ","), "formats=[]: expected at least one of mxfp4"),
        (("--recipe", "nosuch"), "error: --recipe='nosuch': expected one that `mxref recipes` lists\n"),
        (("--formats", "nvfp4", "--recipe", "ocp"), "recipe 'ocp' (scale_rule='floor') does not fit format 'nvfp4'"),
        (("--activations", "int4"), "error: --activations='int4': expected one of mxfp4"),
        (("--weights-only", "--activations", "same"), "--weights-only and --activations contradict each other"),
        (("--weights-only", "--act-recipe", "ocp"), "--weights-only and --act-recipe contradict each other"),
        (("--layers", "none"), "layers='none': expected one of experts, all"),
        (("--semantics", "fast"), "semantics='fast': expected 'blockwise' or 'dequantized'"),
        (("--window", "1"), "window=1: expected 2 to 64"),
        (("--tokens", "8"), "8 tokens are too few; expected at least one window of 16"),
        (("--text", "no-such.txt"), "text='no-such.txt': cannot be read"),
        (("--tokenizer", "./no-such"), "tokenizer='./no-such': no such directory"),
        (("--device", "nosuch"), "device='nosuch'"),
        (("--backend", "nosuch"), "nosuch"),
        (("--check",), "--check: expected a --backend to compare with the reference"),
    ],
)
def test_eval_refuses_bad_usage_in_one_line(evaluate, options, message):
    assert message in refusal(evaluate(*options))


@pytest.mark.parametrize(
    "option, message",
    [
        (("--window", 0), "window=0: expected 2 to 64 tokens"),
        (("--window", -16), "window=-16: expected 2 to 64 tokens"),
        (("--window", 16, "--tokens", -32), "--ids='ids.json': 96 ids and --tokens=-32; expected at least one window of 16"),
    ],
)
def test_eval_of_ids_has_a_window(option, message, directory, tmp_path):
    (tmp_path / "ids.json").write_text(json.dumps([1, 2, 3] * 32))
    command = ("eval", directory / "model", "--ids", tmp_path / "ids.json", "--formats", "mxfp4", *option)
    assert message in refusal(mxref_command(*command))


def test_eval_of_a_model_without_a_tokenizer_speaks_of_its_options(directory, tmp_path):
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).symlink_to(directory / "model" / file)
    expected = "expected --tokenizer DIR, or instead of a text --ids FILE or --random-ids\n"
    assert refusal(mxref_command("eval", tmp_path)).endswith(f"its directory has no files of a tokenizer; {expected}")


@pytest.mark.parametrize(
    "where, what", [("config", "config.json says dtype float64"), ("weights", "its weights are float64")]
)
def test_eval_refuses_float64_before_it_begins(directory, tmp_path, where, what):
    from safetensors.torch import load_file, save_file

    config = json.loads((directory / "model" / "config.json").read_text()) | {"dtype": "float64"}
    if where == "weights":
        del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = load_file(directory / "model" / "model.safetensors")
    save_file({name: weight.double() for name, weight in weights.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    said = refusal(mxref_command("eval", tmp_path, "--random-ids"))
    assert said.startswith(f"error: MODEL={str(tmp_path)!r}: {what}: expected one of float32, bfloat16, float16")


def test_a_name_that_is_no_directory_is_read_in_both_ways(monkeypatch):
    import transformers

    def offline(*arguments, **options):
        raise OSError("We couldn't connect to the hub")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", offline)
    said = refusal(mxref_command("eval", "modles/Qwen3"))
    assert "MODEL='modles/Qwen3': no such directory; read as a name on the Hugging Face hub instead, it fails too: " in said
    assert "We couldn't connect to the hub (expected a directory" in said


def test_eval_refuses_what_is_no_model(tmp_path):
    assert "MODEL='': expected a directory with a transformers causal language model" in refusal(mxref_command("eval", ""))
    assert "MODEL='./no-such': no such directory" in refusal(mxref_command("eval", "./no-such"))
    assert f"MODEL='{tmp_path}': " in refusal(mxref_command("eval", tmp_path))


def test_eval_of_a_quantized_config_without_weights_says_what_is_missing(directory, tmp_path):
    config = json.loads((directory / "model" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "holds neither model.safetensors.index.json nor model.safetensors" in refusal(mxref_command("eval", tmp_path))


def test_eval_says_which_plots_it_can_write(evaluate, tmp_path):
    assert "ends in .png" in refusal(evaluate("--plot", tmp_path / "r.xyz"))


def test_eval_interrupted_keeps_the_finished_rows(evaluate, tmp_path, monkeypatch):
    module = sys.modules["mxref.models.evaluate"]
    original = module.quantize_weights

    def interrupted(model, block, **options):
        if block.name == "nvfp4":
            raise KeyboardInterrupt
        return original(model, block, **options)

    monkeypatch.setattr(module, "quantize_weights", interrupted)
    files = [tmp_path / "r.json", tmp_path / "r.csv"]
    result = evaluate("--formats", "mxfp4,nvfp4", "--json", files[0], "--csv", files[1])
    assert result.exit_code == 130 and "kept the 3 rows" in result.stderr
    assert "INTERRUPTED" in result.stdout
    data = json.loads(files[0].read_text())
    assert data["complete"] is False and [row["weights"] for row in data["rows"]] == ["bf16", "mxfp4", "mxfp4"]
    assert len(files[1].read_text().splitlines()) == 4

    result = evaluate("--formats", "nvfp4")
    assert result.exit_code == 130 and "kept the 1 rows" in result.stderr


def test_eval_interrupted_before_the_first_row_says_so(evaluate, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["mxref.models.evaluate"], "_window_losses", interrupted)
    result = evaluate()
    assert result.exit_code == 130 and result.stderr == "error: interrupted before the first row had finished\n"


def test_eval_of_a_model_without_a_finite_loss_is_a_negative_result(directory, tmp_path):
    model = tiny_model("llama")
    model.lm_head.weight.data[0, 0] = math.nan
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    text = directory / "text.txt"
    result = mxref_command(
        "eval", tmp_path, "--text", text, "--window", 16, "--tokens", 32, "--formats", "mxfp4", "--json", "-"
    )
    assert result.exit_code == 1 and "not a number" in result.stderr
    assert json.loads(result.stdout)["rows"][0]["bits_per_byte"] == "NaN"


def test_eval_shows_its_progress_on_a_terminals_stderr_only(directory):
    arguments = ["eval", directory / "model", "--text", directory / "text.txt", "--window", 16, "--tokens", 64]
    command = [sys.executable, "-m", "mxref", *map(str, arguments), "--formats", "mxint8", "--json", "-"]
    controller, terminal = pty.openpty()
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=terminal, env={**os.environ, "TERM": "xterm"})
    os.close(terminal)
    shown = b""
    while True:
        try:
            shown += os.read(controller, 65536)
        except OSError:  # everything has been read and nobody holds the terminal any more
            break
    os.close(controller)
    assert result.returncode == 0
    assert b"mxint8 / bf16" in shown and b"windows" in shown
    assert len(json.loads(result.stdout)["rows"]) == 3
    quiet = subprocess.run(command, capture_output=True, check=True)
    assert b"windows" not in quiet.stderr and len(json.loads(quiet.stdout)["rows"]) == 3


# formats, recipes, explain


def test_formats_lists_both_tables():
    result = mxref_command("formats")
    assert result.exit_code == 0
    for name in (*mxref.ELEMENT_FORMATS, *FORMATS):
        assert f"│ {name} " in result.stdout
    data = json.loads(mxref_command("formats", "--json", "-").stdout)
    assert [row["name"] for row in data["elements"]] == list(mxref.ELEMENT_FORMATS)
    assert [row["bits/element"] for row in data["blocks"]] == [f.bits_per_element for f in mxref.BLOCK_FORMATS.values()]


@pytest.mark.parametrize("name", mxref.ELEMENT_FORMATS)
def test_formats_of_an_element_shows_every_code_and_value(name):
    values = mxref.ELEMENT_FORMATS[name].values
    codes = json.loads(mxref_command("formats", name, "--json", "-").stdout)["codes"]
    assert [entry["code"] for entry in codes] == list(range(len(values)))
    for entry, value in zip(codes, values, strict=True):
        read = float(entry["value"])
        assert read == value or math.isnan(read) and math.isnan(value)
        assert math.copysign(1, read) == math.copysign(1, value) or math.isnan(value)
    shown = mxref_command("formats", name).stdout
    assert set(re.findall(r"0x[0-9A-F]{2}", shown)) == {f"0x{code:02X}" for code in range(len(values))}


def test_formats_of_a_block_format_shows_its_parameters():
    result = mxref_command("formats", "nvfp4")
    for part in ("e2m1", "e4m3", "16", "4.5", "nvidia"):
        assert part in result.stdout
    assert json.loads(mxref_command("formats", "mxfp8_e4m3", "--json", "-").stdout)["block"] == 32
    assert "NAME='fp3': expected one of e2m1" in refusal(mxref_command("formats", "fp3"))


def test_recipes_lists_all_and_shows_every_choice_of_one(tmp_path):
    result = mxref_command("recipes")
    assert result.exit_code == 0 and all(f"│ {name} " in result.stdout for name in mxref.RECIPES)
    mxref_command("recipes", "--json", tmp_path / "r.json")
    assert [row["name"] for row in json.loads((tmp_path / "r.json").read_text())] == list(mxref.RECIPES)
    one = json.loads(mxref_command("recipes", "nvidia", "--json", "-").stdout)
    assert set(one) == set(mxref.Recipe.__dataclass_fields__) and one["scale_rule"] == "amax"
    for near in ("nvida", "nvidia_16x61"):
        said = refusal(mxref_command("recipes", near))
        assert said.startswith(f"error: NAME={near!r}: expected one such as nvidia") and len(said) < 150
        assert said.endswith("; `mxref recipes` lists all\n")
    for given, near in (("NVIDIA", "nvidia"), ("rceil", "ocp_rceil"), ("16x16", "nvidia_16x16")):
        said = refusal(mxref_command("recipes", given))
        assert said.startswith(f"error: NAME={given!r}: expected one such as ") and near in said
    assert refusal(mxref_command("recipes", "foo")) == "error: NAME='foo': expected one that `mxref recipes` lists\n"


def test_explain_prints_what_the_library_explains():
    import torch

    result = mxref_command("explain", "mxfp4", "7", "-1.5", "0x1.8p-3", "-0", "--recipe", "ocp_even")
    x = torch.tensor([7.0, -1.5, 0.1875, -0.0])
    assert result.exit_code == 0
    assert result.stdout == f"{mxref.explain(x, 'mxfp4', recipe='ocp_even')}\n"
    data = json.loads(mxref_command("explain", "mxfp4", "nan", "1", "--json", "-").stdout)
    assert data["format"] == "mxfp4"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("mxfp5", "1"), "FORMAT='mxfp5': expected one of mxfp4"),
        (("e2m1", "1"), "FORMAT='e2m1': expected one of mxfp4"),
        (("mxfp4", "seven"), "VALUES: 'seven' is no number"),
        (("mxfp4", "1", "1e39"), "VALUES: '1e39' is inf in float32: expected 0, or 1.4e-45 to 3.40282347e+38 in magnitude"),
        (("mxfp4", "1", "-1e400"), "VALUES: '-1e400' is -inf in float32"),
        (("mxfp4", "1e-46", "0"), "VALUES: '1e-46' is 0 in float32"),
        (("mxfp4", "-0x1p-2000", "0"), "VALUES: '-0x1p-2000' is -0 in float32"),
        (("mxfp4", "0x1p2000"), "VALUES: '0x1p2000' is inf in float32"),
        (("mxfp4", "1", "--recpie"), "VALUES: '--recpie' is no number"),
        (("mxfp4", "1", "--recipe", "nvidia"), "does not fit format 'mxfp4'"),
        (("nvfp4", *["1"] * 17), "16"),
    ],
)
def test_explain_refuses_bad_usage_in_one_line(arguments, message):
    assert message in refusal(mxref_command("explain", *arguments))


def test_recipes_says_what_is_chosen_and_what_is_wrong():
    from mxref.faults import FAULTS

    shown = " ".join(re.sub("[│\\s]+", " ", mxref_command("recipes").stdout).split())
    assert "divides" in shown and "faults, of its producer" in shown
    listed = {row["name"]: row for row in json.loads(mxref_command("recipes", "--json", "-").stdout)}
    assert listed["ocp"]["faults"] == {}
    for name, row in listed.items():
        assert row["faults"] == {fault: FAULTS[fault].summary for fault in mxref.RECIPES[name].faults}
    one = mxref_command("recipes", "modelopt_mxfp4").stdout
    assert "zero_is_negative: every zero becomes -0" in one and "ties_toward_zero" in one


# compare


def test_compare_shows_where_recipes_differ():
    result = mxref_command("compare", "7", "1", "-0.2", "6.5", "--recipes", "ocp,modelopt_mxfp4")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0] == "mxfp4, [4], ocp against modelopt_mxfp4: 1 scale bytes, 3 codes and 0 decoded values differ"
    assert lines[1] == "block [0], scale code 0x7F = 1 against 0x80 = 2"
    assert lines[2].split() == ["ocp", "modelopt_mxfp4"]
    assert lines[3].split() == ["x", *["code", "value", "decoded"] * 2]
    assert lines[4].split() == ["7", "0x07", "6", "6", "0x05", "3", "6"]
    assert lines[-1] == "1 elements are the same" and len(lines) == 8


def test_compare_of_equal_recipes_exits_with_0():
    result = mxref_command("compare", "1", "2", "-3", "--recipes", "vllm_torch,nvidia", "--format", "nvfp4")
    assert result.exit_code == 0 and result.stdout == (
        "nvfp4, [3], vllm_torch against nvidia: every scale byte, code and decoded value is the same\n"
    )
    assert json.loads(mxref_command("compare", "1", "--recipes", "ocp,ocp", "--json", "-").stdout)["differing"] == 0


def test_compare_counts_every_difference_and_lists_blocks(tmp_path):
    import numpy as np
    import torch
    from safetensors.torch import save_file

    x = torch.randn(6, 100, generator=torch.Generator().manual_seed(5), dtype=torch.float32)
    x[2, 40], x[4, 99] = torch.nan, -torch.inf
    np.save(tmp_path / "x.npy", x.numpy())
    np.savez(tmp_path / "x.npz", x=x.numpy())
    np.savez(tmp_path / "xy.npz", x=x.numpy(), y=x.numpy())
    torch.save({"x": x, "y": x}, tmp_path / "x.pt")
    save_file({"x": x}, tmp_path / "x.safetensors")
    arguments = ("--recipes", "ocp,torchao_even", "--format", "mxfp8_e4m3", "--json", "-")
    results = [mxref_command("compare", tmp_path / name, *arguments) for name in ("x.npy", "x.npz", "x.safetensors")]
    results += [mxref_command("compare", tmp_path / name, "--tensor", "x", *arguments) for name in ("x.pt", "xy.npz")]
    assert all(result.exit_code == 1 and result.stdout == results[0].stdout for result in results)
    found = json.loads(results[0].stdout)
    a, b = (mxref.quantize(x, "mxfp8_e4m3", recipe=recipe) for recipe in ("ocp", "torchao_even"))
    assert found["scale_bytes"] == int((a.scales != b.scales).sum()) and found["codes"] == int((a.codes != b.codes).sum())
    where = {tuple(index) for index in (a.scales != b.scales).nonzero().tolist()}
    where |= {(row, column // 32) for row, column in (a.codes != b.codes).nonzero().tolist()}
    assert {tuple(block["index"]) for block in found["blocks"]} == where and found["differing"] == len(where)
    for block in found["blocks"]:
        row, column = block["index"]
        codes = [e["codes"] for e in block["elements"]]
        part = slice(32 * column, 32 * column + 32)
        assert codes == [list(pair) for pair in zip(a.codes[row, part].tolist(), b.codes[row, part].tolist())]


def test_compare_spans_rows():
    result = mxref_command("compare", "1", "2", "--recipes", "nvidia,nvidia_16x16")
    assert "16 rows" in refusal(result)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("7", "--recipes", "ocp"), "recipes=['ocp']: expected two"),
        (
            ("7", "--recipes", "ocp,nvida"),
            "error: --recipes='nvida': expected one such as nvidia; `mxref recipes` lists all",
        ),
        (("7", "--recipes", "ocp,ocp_even", "--format", "mxfp9"), "error: --format='mxfp9': expected one of mxfp4"),
        (("7", "1e39", "--recipes", "ocp,ocp_even"), "VALUES: '1e39' is inf in float32"),
        (("7", "--recipes", "ocp,nvidia"), "no block format fits both"),
        (("7", "--recipes", "ocp,ocp_even", "--format", "nvfp4"), "does not fit format 'nvfp4'"),
        (("7", "--recipes", "ocp,ocp_even", "--format", "fp4"), "format='fp4': expected one of mxfp4"),
        (("seven", "--recipes", "ocp,ocp_even"), "VALUES: 'seven' is no number"),
        (("no-such.npy", "--recipes", "ocp,ocp_even"), "No such file"),
        (("7", "--recipes", "ocp,ocp_even", "--tensor", "x"), "--tensor='x' needs a file"),
    ],
)
def test_compare_refuses_bad_usage_in_one_line(arguments, message):
    assert message in refusal(mxref_command("compare", *arguments))


def test_compare_refuses_files_that_hold_no_such_tensor(tmp_path):
    import numpy as np
    import torch

    np.save(tmp_path / "wide.npy", np.zeros(3))
    np.savez(tmp_path / "two.npz", a=np.ones(3), b=np.ones(3))
    torch.save({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path / "two.pt")
    for name in ("bad.pt", "bad.npy", "bad.npz", "bad.safetensors"):
        (tmp_path / name).write_text("garbage")
        assert f"is no {(tmp_path / name).suffix} file of tensors" in refusal(
            mxref_command("compare", tmp_path / name, "--recipes", "ocp,ocp_even")
        )
    compare = ("--recipes", "ocp,ocp_even")
    wide = refusal(mxref_command("compare", tmp_path / "wide.npy", *compare))
    assert "float64: expected a tensor of torch.float32, torch.bfloat16, torch.float16; round it to one of them" in wide
    for name in ("two.pt", "two.npz"):
        said = refusal(mxref_command("compare", tmp_path / name, *compare))
        assert "no tensor is named" in said and said.endswith(f"{name}' holds a, b; --tensor picks one by its name\n")
        assert "tensor='c'" in refusal(mxref_command("compare", tmp_path / name, "--tensor", "c", *compare))


def test_compare_refuses_tensors_without_values_or_not_dense_and_says_what_is_empty(tmp_path):
    import torch

    x = torch.ones(4, 64)
    kinds = {"is torch.sparse_coo": x.to_sparse(), "is torch.sparse_csr": x.to_sparse_csr()}
    kinds |= {"is on the device meta": x.to("meta"), "is nested": torch.nested.nested_tensor([x, x[:2]])}
    for kind, tensor in kinds.items():
        for held, arguments in ((tensor, ()), ({"x": tensor, "y": x}, ("--tensor", "x"))):
            torch.save(held, tmp_path / "x.pt")
            result = mxref_command("compare", tmp_path / "x.pt", "--recipes", "ocp,ocp_even", *arguments)
            assert f"holds a tensor that {kind}: expected a dense one, of values" in result.stderr and result.exit_code == 2
    torch.save(torch.ones(1).expand(10**10), tmp_path / "x.pt")
    result = mxref_command("compare", tmp_path / "x.pt", "--recipes", "ocp,ocp_even")
    assert "holds [10000000000], 10,000,000,000 elements, made of 1 that are stored" in refusal(result)
    for shape in ((0,), (0, 64), (4, 0)):
        torch.save(torch.ones(shape), tmp_path / "x.pt")
        result = mxref_command("compare", tmp_path / "x.pt", "--recipes", "ocp,ocp_even")
        assert result.exit_code == 0 and "nothing was compared, the tensor is empty" in result.stdout
        assert "same" not in result.stdout


# The program


COMMANDS_THAT_FAIL = {  # each with an argument that it complains about as soon as it begins
    "eval": ("./no-such",),
    "formats": ("no-such",),
    "recipes": ("no-such",),
    "explain": ("no-such", "1"),
    "compare": ("1", "--recipes", "no-such"),
    "kernels": (),
    "verify": ("no-such",),
    "bench": ("no-such",),
    "inspect": ("no-such",),
    "convert": ("no-such", "--to", "no-such", "--out", "no-such"),
}


def test_every_command_has_its_line_above():
    assert {c.name for c in app.registered_commands} == COMMANDS_THAT_FAIL.keys()


@pytest.mark.parametrize(
    "command, option",
    [*((command, "--json") for command in COMMANDS_THAT_FAIL), ("eval", "--csv"), ("eval", "--plot"), ("verify", "--html")],
)
def test_a_file_that_cannot_be_written_is_found_before_the_work(command, option, tmp_path):
    (tmp_path / "folder.png").mkdir()
    for name, problem in (
        ("folder.png", "expected a file, not a directory"),
        ("none/r.png", f"its directory {str(tmp_path / 'none')!r} does not exist"),
        (f"{'x' * 300}.png", "File name too long"),
    ):
        said = refusal(mxref_command(command, *COMMANDS_THAT_FAIL[command], option, tmp_path / name))
        assert said == f"error: {option}={str(tmp_path / name)!r}: {problem}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


def test_a_file_that_may_be_written_is_left_as_it_is_until_the_end(tmp_path):
    path = tmp_path / "r.json"
    path.write_text("before")
    mxref_command("formats", "no-such", "--json", path)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "command, read, option, file",
    [
        (("inspect", "model"), "model", "--json", "model/config.json"),
        (("inspect", "model"), "model", "--json", "link.json"),
        (("inspect", "model/model.safetensors"), "model", "--json", "model/config.json"),
        (("convert", "model", "--to", "quark", "--out", "out"), "model", "--json", "model/model.safetensors"),
        (("eval", "model"), "model", "--json", "model/config.json"),
        (("eval", "model"), "model", "--csv", "other/../model/model.safetensors"),
        (("eval", "model", "--against", "other"), "other", "--plot", "other/config.png"),
        (("eval", "model", "--text", "text.txt"), "text.txt", "--json", "text.txt"),
        (("eval", "model", "--ids", "ids.json"), "ids.json", "--csv", "ids.json"),
        (("eval", "model", "--tokenizer", "other"), "other", "--json", "other/config.png"),
        (("compare", "x.npy", "--recipes", "ocp,nvidia"), "x.npy", "--json", "x.npy"),
        (("verify", "reference", "--known-failures", "known"), "known", "--json", "known"),
        (("verify", "reference", "--known-failures", "known"), "known", "--html", "known"),
    ],
)
def test_what_is_read_is_never_written(command, read, option, file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ("model/config.json", "model/model.safetensors", "other/config.png", "text.txt", "ids.json", "x.npy", "known")
    for name in given:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("precious")
    (tmp_path / "link.json").symlink_to("model/config.json")
    said = refusal(mxref_command(*command, option, file))
    assert said == f"error: {option}={file!r} would replace a file of {read!r}, which is read\n"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == len(given) + 1 and all(path.read_text() == "precious" for path in files)


def test_a_file_in_the_place_of_one_that_is_not_whole_yet_is_left(tmp_path):
    (tmp_path / "r.json.part").write_text("precious")
    said = refusal(mxref_command("formats", "--json", tmp_path / "r.json"))
    assert "it is written as r.json.part until it is whole, and that exists already" in said
    assert [path.read_text() for path in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize(
    "command, first, second",
    [
        (("eval",), ("--json", "same"), ("--csv", "same")),
        (("eval",), ("--json", "r.svg"), ("--plot", "folder/../r.svg")),
        (("eval",), ("--csv", "r.svg.part"), ("--plot", "r.svg")),
        (("verify", "reference"), ("--json", "same"), ("--html", "link")),
        (("verify", "reference"), ("--json", "r"), ("--html", "r.part")),
    ],
)
def test_two_outputs_do_not_name_one_file(command, first, second, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("same")
    said = refusal(mxref_command(*command, *first, *second))
    assert said == "error: {}={!r} and {}={!r} are written to one file: expected two\n".format(*second, *first)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "link"]


@pytest.mark.parametrize("file", ["out", "out/r.json", "link", "folder/../out"])
def test_a_report_does_not_go_where_a_folder_is_made_anew(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("out")
    if file == "out/r.json":
        (tmp_path / "out").mkdir()
    command = ("convert", "no-such", "--to", "quark", "--out", "out", "--force")
    assert f"--json={file!r} is --out or lies in it, which is made anew" in refusal(mxref_command(*command, "--json", file))


def test_without_a_terminal_every_line_is_whole():
    """No cell, title or footer is cut or wrapped, whatever the width that the environment says."""
    for command in (("recipes",), ("formats",), ("formats", "nvfp4"), ("recipes", "nvidia"), ("kernels",)):
        table = mxref_command(*command).stdout
        rows = [line for line in table.splitlines() if line.startswith("│")]
        assert rows and not any("…" in line for line in rows)
    lines = mxref_command("recipes").stdout.splitlines()
    assert max(map(len, lines)) == 120  # sentences wrap, whole
    choices = " ".join(line.split("│")[3].strip() for line in lines if line.startswith("│"))
    assert all(recipe.summary in choices for recipe in mxref.RECIPES.values())
    from rich.table import Table

    from mxref.cli import _print

    table = Table("narrow", title="a title wider than its table", caption="a caption [wider] than its table\nand a line")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        _print(table)
    lines = printed.getvalue().splitlines()
    assert lines[0] == "a title wider than its table" and lines[-2:] == ["a caption [wider] than its table", "and a line"]


@pytest.mark.parametrize(
    "command", [(), ("eval",), ("formats",), ("recipes",), ("explain",), ("compare",), ("verify",), ("bench",)]
)
def test_every_command_has_help(command):
    result = mxref_command(*command, "--help")
    assert result.exit_code == 0 and "Usage:" in result.stdout
    assert not command or "--json" in result.stdout


def program(*arguments, code="from mxref.__main__ import main; main()"):
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)


def test_the_program_runs_as_a_module():
    command = [sys.executable, "-m", "mxref", "formats", "e2m1", "--json", "-"]
    assert json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["bits"] == 4


@pytest.mark.parametrize("arguments", [("evl",), ("eval", "--nosuch"), ("eval", "--window", "x"), ("explain", "mxfp4")])
def test_the_program_complains_about_its_usage_in_one_line(arguments):
    result = program(*arguments)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


UNWRITABLE = """
import os, sys
from mxref.cli import run
for place, *options in (("full",), ("full", "--json", "-"), ("unread",), ("closed",)):
    child = os.fork()
    if not child:
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(os.open("/dev/full", os.O_WRONLY) if place == "full" else writer, 1)
        sys.stdout = None if place == "closed" else open(1, "w", closefd=False)
        sys.argv = ["mxref", "formats", *options]
        run()
    print(place, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=sys.stderr, flush=True)
"""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a full disk is played as Linux does it")
def test_a_stdout_that_takes_nothing_ends_in_a_line_or_quietly_if_nobody_reads():
    said = program(code=UNWRITABLE).stderr.splitlines()
    full, closed = ["error: stdout: No space left on device", "full 2"], ["error: stdout is closed", "closed 2"]
    assert said == 2 * full + ["unread 141"] + closed


def test_the_program_says_its_version_and_without_arguments_its_help():
    assert program("--version").stdout == f"mxref {mxref.__version__}\n"
    assert "Usage:" in program().stdout


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_the_program_names_the_extra_it_needs(missing):
    result = program("formats", code=f"import sys; sys.modules['{missing}'] = None\nfrom mxref.__main__ import main; main()")
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "pip install 'mxref[cli]'" in result.stderr and missing in result.stderr


def test_eval_names_the_extra_it_needs():
    code = "import sys; sys.modules['transformers'] = None\nfrom mxref.__main__ import main; main()"
    result = program("eval", ".", code=code)
    assert result.returncode == 2 and "pip install 'mxref[models]'" in result.stderr and result.stderr.count("\n") == 1
