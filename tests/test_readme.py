"""The README shows code that runs and numbers that a committed record holds.

python tests/test_readme.py         # after new records: write their tables and numbers into the README
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import mxref
from mxref.commands.bench import Timing, timings

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
    """Medians of QDQ as a Markdown table, fastest first, beside the copy of the same run."""
    rows = [t for t in timings(record) if t.op == "qdq" and t.format in ("-", "mxfp4", "nvfp4")]
    times: dict[str, dict[str, Timing]] = {}
    for t in rows:
        name = "a copy" if t.floor is None else f"{t.format} {t.contender.replace('mxref reference', 'mxref')}"
        times.setdefault(name, {})[t.dtype] = t
    dtypes = ("float32", "bfloat16")
    head = f"| QDQ of {list(rows[0].size)}, CPU | "
    lines = [head + " | ".join(f"{dtype} ms | times a copy" for dtype in dtypes) + " |", "|---|--:|--:|--:|--:|"]
    for name, found in sorted(times.items(), key=lambda item: item[1]["float32"].seconds):
        cells = [(f"{1e3 * found[d].seconds:.3g}", f"{found[d].ratio or 1:.1f}") for d in dtypes]
        lines.append(f"| {name} | " + " | ".join(cell for pair in cells for cell in pair) + " |")
    return "\n".join(lines)


def model_sentence(report: dict) -> str:
    share = report["quantized_weights"] / report["parameters"]
    return f"{report['parameters'] / 1e6:.1f} million parameters, {100 * share:.0f} % of them in experts"


def machine_sentence(record: dict) -> str:
    machine = record["machine_info"]
    libraries = [name for name in ("torch", "torchao", "compressed-tensors", "amd-quark") if name in machine]
    versions = ", ".join(f"{name} {machine[name]}" for name in libraries)
    threads = f"{machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
    return f"Medians of one run with {threads} on {machine['cores']} cores of an {machine['device']}, {versions}"


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


def small_sentence(record: dict) -> str:
    """Times of a bare kernel that kernels of one launch take of a small tensor."""
    ops = ("qdq", "quantize", "dequantize", "activate_quantize")
    times = [r["times_a_bare_kernel"] for r in record["rows"] if r["size"] == [16, 2048] and r["op"] in ops]
    return f"Of [16, 2048] one call takes {min(times):.2f} to {max(times):.2f} of the time of a Triton kernel that copies it"


def gpu_sentence(record: dict) -> str:
    return f"one {record['device']}, torch {record['torch']}, triton {record['triton']}"


def conformance_sentence(record: dict) -> str:
    counts = f"{record['passed']:,} cases passed, {record['failed']} failed, {record['refused']} refused"
    return f"On an {record['device']}, level {record['level']}: {counts}"


def experts_table(record: dict) -> str:
    """Milliseconds of a layer by tokens, beside every alternative for the first two kinds, beside decoding first else."""
    tokens = list(dict.fromkeys(row["tokens"] for row in record["rows"]))
    lines = ["| ms by tokens | " + " | ".join(map(str, tokens)) + " |", "|---|" + "--:|" * len(tokens)]
    keys = list(dict.fromkeys((r["model"], r["weights"], r["activations"], r["by"]) for r in record["rows"]))
    in_full = list(dict.fromkeys(key[:3] for key in keys))[:2]
    for key in keys:
        if key[:3] not in in_full and key[3] not in ("mxref", "dequantize + grouped"):
            continue
        rows = [r for r in record["rows"] if (r["model"], r["weights"], r["activations"], r["by"]) == key]
        ms = {r["tokens"]: f"{r['ms']:.3g}" for r in rows if "failed" not in r}
        model, weights, activations, by = key
        by += "".join(f", {what} not counted" for what in {r["not_counted"]: None for r in rows if "not_counted" in r})
        lines.append(f"| {model} {weights} {activations}: {by} | " + " | ".join(ms.get(t, "") for t in tokens) + " |")
    return "\n".join(lines)


def product_sentence(record: dict) -> str:
    rows = [r for r in record["rows"] if r.get("m") == 8192 and r["kernel"] == "chosen"]
    nvfp4, mxfp4 = (next(r for r in rows if r["format"] == format) for format in ("nvfp4", "mxfp4"))
    speed = f"{nvfp4['ms']:.2f} ms, {nvfp4['of_cublas_bfloat16']:.2f} of cuBLAS' speed in bfloat16"
    other = f"MXFP4, by float8 units, in {mxfp4['ms']:.2f} ms, {mxfp4['of_cublas_bfloat16']:.2f} of it"
    return f"NVFP4 [8192, 8192, 8192], decoding counted, in {speed}, {other}"


def op_sentence(record: dict) -> str:
    return f"{record['passed']} passed, {record['failed']} failed, {record['refused']} refused"


def dispatch_sentence(record: dict) -> str:
    medians = {t.contender: 1e6 * t.seconds for t in timings(record) if t.op == "relu2"}
    reference, kernel = (medians[f"{who}, dispatched"] - medians[f"{who}, bare"] for who in ("reference", "kernel"))
    return f"Dispatch costs {reference:.1f} µs a call for the reference and {kernel:.1f} µs for a kernel"


SHOWN = {
    "elementwise-h200.json": (gpu_table, gpu_sentence, small_sentence),
    "conformance-h200.json": (conformance_sentence,),
    "conformance-matmul-h200.json": (op_sentence,),
    "conformance-moe-h200.json": (op_sentence,),
    "matmul-h200.json": (product_sentence,),
    "moe-h200.json": (experts_table,),
    "eval-embedded-cpu.json": (evaluation_table, model_sentence),
    "bench-cpu.json": (speed_table, machine_sentence, dispatch_sentence),
}


def test_the_tables_are_those_of_the_records():
    for file, pieces in SHOWN.items():
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


def brought_up_to_date(text: str, piece: str) -> str:
    """`text` with the table of the same first column, or the sentence that differs in numbers alone, become `piece`."""
    if "\n" in piece:
        column = re.escape(re.sub(r"\[.*?\]", "[]", piece.split("|")[1])).replace(r"\[\]", r"\[.*?\]")
        pattern = rf"^\|{column}\|.*\n(?:\|.*\n)*"
        changed, count = re.subn(pattern, lambda found: piece + "\n", text, flags=re.MULTILINE)
    else:
        words = [r"[^\s()]*\d[^\s()]*" if re.search(r"\d", word) else re.escape(word) for word in piece.split()]

        def renewed(found: re.Match) -> str:
            spaces = [*re.findall(r"\s+", found[0]), ""]  # a sentence stays wrapped as it was
            return "".join(word + space for word, space in zip(piece.split(), spaces))

        changed, count = re.subn(r"\s+".join(words), renewed, text)
    return changed if count == 1 else text


def test_new_records_can_be_brought_in():
    table = "| QDQ of [8, 8], CPU | x |\n|---|--:|\n| a | 1 |"
    assert brought_up_to_date("before\n\n| QDQ of [4, 4], CPU | x |\n|---|--:|\n| b | 2 |\n\nafter\n", table) == (
        f"before\n\n{table}\n\nafter\n"
    )
    assert brought_up_to_date("It costs 1.0 µs\na call.", "costs 2.5 µs a call") == "It costs 2.5 µs\na call."
    assert brought_up_to_date("nothing of the kind\n", table) == "nothing of the kind\n"


def main() -> None:
    text = README
    for file, pieces in SHOWN.items():
        record = json.loads((RESULTS / file).read_text())
        for piece in pieces:
            text = brought_up_to_date(text, piece(record))
    (ROOT / "README.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
