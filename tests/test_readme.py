"""The README shows code that runs and numbers that a committed record holds."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import mxref

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results"


def test_the_python_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    result = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=True)
    assert "torch.Size([4, 8])" in result.stdout and "scale code 0x80 = 2" in result.stdout


def test_the_conversion_example_runs(tmp_path):
    (example,) = re.findall(r"^    mxref (convert .*)$", README, re.MULTILINE)
    source, out = ROOT / "tests" / "data" / "checkpoints" / "base-qwen3moe", tmp_path / "out"
    command = example.replace("path/to/model-mxfp4", str(out)).replace("path/to/model", str(source))
    subprocess.run([sys.executable, "-m", "mxref", *shlex.split(command)], check=True, capture_output=True)
    assert json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"] == "quark"


def evaluation_table(report: dict) -> str:
    """The rows of an evaluation as a Markdown table."""
    lines = ["| weights | activations | bits/byte | change | ± | bits/weight | SNR dB |", "|---|---|--:|--:|--:|--:|--:|"]
    for row in report["rows"]:
        change = ("", "") if row["change"] is None else (f"{row['change']:+.4f}", f"{row['change_error']:.4f}")
        snr = "" if row["snr_db"] is None else f"{row['snr_db']:.1f}"
        numbers = (f"{row['bits_per_byte']:.4f}", *change, f"{row['bits_per_weight']:.2f}", snr)
        lines.append(f"| {row['weights']} | {row['activations']} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def speed_table(record: dict) -> str:
    """Medians of a benchmark run as a Markdown table, fastest first, beside the copy of the same run."""
    medians: dict[str, dict[str, float]] = {}
    for benchmark in record["benchmarks"]:
        info = benchmark["extra_info"]
        medians.setdefault(info["contender"], {})[info["dtype"]] = 1e3 * benchmark["stats"]["median"]
    dtypes = ("float32", "bfloat16")
    lines = ["| QDQ of [4096, 4096], CPU | " + " | ".join(f"{dtype} ms | times a copy" for dtype in dtypes) + " |"]
    lines.append("|---|--:|--:|--:|--:|")
    for name, times in sorted(medians.items(), key=lambda item: item[1]["float32"]):
        cells = [(f"{times[d]:.0f}", f"{times[d] / medians['copy'][d]:.1f}") if d in times else ("", "") for d in dtypes]
        lines.append(f"| {name} | " + " | ".join(cell for pair in cells for cell in pair) + " |")
    return "\n".join(lines)


def model_sentence(report: dict) -> str:
    share = report["quantized_weights"] / report["parameters"]
    return f"{report['parameters'] / 1e6:.1f} million parameters, {100 * share:.0f} % of them in experts"


def machine_sentence(record: dict) -> str:
    machine = record["machine_info"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "torchao", "compressed-tensors", "amd-quark"))
    return f"Medians of one run on {machine['cores']} cores of an {machine['device']}, {versions}"


def gpu_table(record: dict) -> str:
    """Speed of the kernels over that of a copy of the same bytes, and other libraries' beside them."""
    ops = ("qdq", "quantize", "dequantize", "activate_quantize")
    rows = [r for r in record["rows"] if r["size"] == [8192, 8192] and r["op"] in ops and "failed" not in r]
    lines = ["| [8192, 8192] bfloat16 | " + " | ".join(f"`{op}`" for op in ops) + " |", "|---|--:|--:|--:|--:|"]
    for library, format in dict.fromkeys((row["library"], row["format"]) for row in rows):
        speeds = {r["op"]: f"{r['of_a_copy']:.2f}" for r in rows if (r["library"], r["format"]) == (library, format)}
        name = format if library == "mxref" else f"{format}, {library}"
        lines.append(f"| {name} | " + " | ".join(speeds.get(op, "") for op in ops) + " |")
    return "\n".join(lines)


def gpu_sentence(record: dict) -> str:
    return f"one {record['device']}, torch {record['torch']}, triton {record['triton']}"


def conformance_sentence(record: dict) -> str:
    counts = f"{record['passed']:,} cases passed, {record['failed']} failed, {record['refused']} refused"
    return f"On an {record['device']}, level {record['level']}: {counts}"


def dispatch_sentence(record: dict) -> str:
    medians = {b["extra_info"]["contender"]: 1e6 * b["stats"]["median"] for b in record["benchmarks"]}
    reference, kernel = (medians[f"{who}, dispatched"] - medians[f"{who}, bare"] for who in ("reference", "kernel"))
    return f"Dispatch costs {reference:.1f} µs a call for the reference and {kernel:.1f} µs for a kernel"


def test_the_tables_are_those_of_the_records():
    shown = {
        "elementwise-h200.json": (gpu_table, gpu_sentence),
        "conformance-h200.json": (conformance_sentence,),
        "dispatch-cpu.json": (dispatch_sentence,),
        "eval-embedded-cpu.json": (evaluation_table, model_sentence),
        "qdq-cpu.json": (speed_table, machine_sentence),
    }
    for file, pieces in shown.items():
        for piece in pieces:
            expected = piece(json.loads((RESULTS / file).read_text()))
            text = README if "\n" in expected else " ".join(README.split())  # a sentence may be wrapped
            assert expected in text, f"README should hold, from {file}:\n{expected}"


def test_formats_and_ops_are_all_there():
    for name in mxref.BLOCK_FORMATS:
        assert f"`{name}`" in README


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target
