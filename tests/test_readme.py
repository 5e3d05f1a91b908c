"""The README shows code that runs and numbers that a committed record holds."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results"


def test_the_python_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    result = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=True)
    assert "torch.Size([4, 8])" in result.stdout and "0x07" in result.stdout


def evaluation_table(report: dict) -> str:
    """The rows of an evaluation as a Markdown table."""
    lines = ["| weights | activations | bits/byte | change | ± | bits/weight | SNR dB |", "|---|---|--:|--:|--:|--:|--:|"]
    for row in report["rows"]:
        change = ("", "") if row["change"] is None else (f"{row['change']:+.4f}", f"{row['change_error']:.4f}")
        snr = "" if row["snr_db"] is None else f"{row['snr_db']:.1f}"
        numbers = (f"{row['bits_per_byte']:.4f}", change[0], change[1], f"{row['bits_per_weight']:.2f}", snr)
        lines.append(f"| {row['weights']} | {row['activations']} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def test_the_evaluation_table_is_that_of_the_record():
    assert evaluation_table(json.loads((RESULTS / "eval-embedded-cpu.json").read_text())) in README


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target
