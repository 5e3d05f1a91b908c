"""The README shows code that runs and numbers that a committed record holds."""

import json
import re
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
    medians = {b["extra_info"]["contender"]: 1e3 * b["stats"]["median"] for b in record["benchmarks"]}
    lines = ["| QDQ of [4096, 4096] float32, CPU | median ms | times a copy |", "|---|--:|--:|"]
    for name, median in sorted(medians.items(), key=lambda item: item[1]):
        lines.append(f"| {name} | {median:.0f} | {median / medians['copy']:.1f} |")
    return "\n".join(lines)


def model_sentence(report: dict) -> str:
    share = report["quantized_weights"] / report["parameters"]
    return f"{report['parameters'] / 1e6:.1f} million parameters, {100 * share:.0f} % of them in experts"


def machine_sentence(record: dict) -> str:
    machine = record["machine_info"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "torchao", "compressed-tensors"))
    return f"Medians of one run on {machine['cores']} cores of an {machine['device']}, {versions}"


def test_the_tables_are_those_of_the_records():
    shown = {
        "eval-embedded-cpu.json": (evaluation_table, model_sentence),
        "qdq-cpu.json": (speed_table, machine_sentence),
    }
    for file, pieces in shown.items():
        for piece in pieces:
            expected = piece(json.loads((RESULTS / file).read_text()))
            assert expected in README, f"README should hold, from {file}:\n{expected}"


def test_formats_and_ops_are_all_there():
    for name in mxref.BLOCK_FORMATS:
        assert f"`{name}`" in README


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target
