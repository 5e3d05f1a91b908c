"""The committed records of measurements, as tables. Nothing here measures."""

import json

from benchmarks.dashboard.standing import FAILED, PASSED, standings
from benchmarks.records import RESULTS, Row, Run, read, text_of
from docs._generate.markdown import NO_BREAK, short, table
from mxref.commands.bench import timings


def record(name: str) -> dict:
    """A record by its file name without `.json`."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def read_record(name: str) -> tuple[Row, ...]:
    """The rows of a record by its file name without `.json`, in its order."""
    return read(f"{name}.json", text_of(RESULTS / f"{name}.json"))


def run(name: str) -> Run:
    """Where and when a record was made."""
    return read_record(name)[0].run


def source(name: str) -> str:
    """Where a table comes from: file, machine, versions, commit, date."""
    made = run(name)
    versions = [f"{library} {version}" for library, version in made.versions if library in ("torch", "triton")]
    commit = made.commit and f"commit {made.commit}"
    parts = [f"`benchmarks/results/{name}.json`", made.machine, *versions, commit, made.date]
    return "Record: " + ", ".join(part for part in parts if part) + "."


def records() -> str:
    """Every record with where and when it was made."""
    rows = []
    for path in sorted(RESULTS.glob("*.json")):
        made = run(path.stem)
        torch = dict(made.versions).get("torch", "-")
        rows.append((f"`{path.name}`", made.machine, torch, made.commit or "-", made.date or "-"))
    return table(("record", "machine", "torch", "commit", "date"), rows)


def conformance_counts(name: str) -> str:
    """One sentence of counts."""
    data = record(name)
    return f"{data['passed']:,} cases passed, {data['failed']} failed, {data['refused']} refused"


def conformance(name: str) -> str:
    """Passed cases by op and format; what failed or was refused beside them."""
    data = record(name)
    cells: dict[tuple[str, str], list[int]] = {}
    for row in data["rows"]:
        cell = cells.setdefault((row["op"], row["format"] or "-"), [0, 0, 0])
        for i, outcome in enumerate(("passed", "failed", "refused")):
            cell[i] += row[outcome]
    rows = []
    for op in dict.fromkeys(op for op, _ in cells):
        formats = {format: cell for (of, format), cell in cells.items() if of == op}
        listed = ", ".join(f"{format} {_counts(*cell)}" for format, cell in formats.items())
        rows.append(
            (
                f"`{op}`",
                sum(c[0] for c in formats.values()),
                sum(c[1] for c in formats.values()),
                sum(c[2] for c in formats.values()),
                listed,
            )
        )
    return table(("op", "passed", "failed", "refused", "by format"), rows, "lrrrl")


def _counts(passed: int, failed: int, refused: int) -> str:
    return f"{passed}" + (f" ({failed} failed)" if failed else "") + (f" ({refused} refused)" if refused else "")


def refusals(name: str) -> str:
    """Why cases were refused, and how often."""
    reasons: dict[str, int] = {}
    for row in record(name)["rows"]:
        for reason in row["reasons"]:
            reasons[reason] = reasons.get(reason, 0) + row["refused"]
    return (
        table(("reason", "cases at most"), [(reason, count) for reason, count in reasons.items()], "lr")
        if reasons
        else "None."
    )


def exhaustive() -> str:
    """All float32 patterns, format by format."""
    rows = [(row["format"], f"{row['patterns']:,}", row["differing"]) for row in record("exhaustive-encode-h200")["rows"]]
    return table(("element format", "patterns encoded", "differing"), rows, "lrr")


def function_accuracy() -> str:
    """Largest errors of the fixed-order functions."""
    data = record("function-accuracy")
    columns = [key for key in data["rows"][0] if key not in ("function",) and not key.endswith(", at")]
    rows = [(f"`{row['function']}`", *(_cell(row.get(column)) for column in columns)) for row in data["rows"]]
    return table(("function", *columns), rows, "l" + "r" * len(columns))


def _cell(value: object) -> str:
    return "" if value is None else short(value) if isinstance(value, float) else str(value)


def cpu_speed(name: str, *ops: str) -> str:
    """Medians of `ops` in a record of a CPU, each with how many times its floor's that is."""
    rows = []
    for timing in timings(record(name)):
        if timing.op in ops:
            ratio = "" if timing.ratio is None else f"{timing.ratio:.1f}"
            size = f"{NO_BREAK}×{NO_BREAK}".join(map(str, timing.size))
            what = f"`{timing.op}`", timing.format, timing.dtype, size, timing.contender
            rows.append((*what, short(1e3 * timing.seconds, 4), ratio, timing.floor or "", timing.note))
    header = ("op", "format", "dtype", "size", "who", "median ms", "times the floor", "floor", "bits")
    return table(header, rows, "lllllrrll")


def _gpu_rows() -> list[dict]:
    """Rows of element-wise kernels that have a speed: none where conformance failed."""
    judged = standings([*read_record("elementwise-h200"), *read_record("conformance-h200")])
    return [
        row
        for i, row in enumerate(record("elementwise-h200")["rows"])
        if "failed" not in row and not (i in judged and judged[i].outcome == FAILED)
    ]


def gpu_summary(size: tuple[int, ...] = (8192, 8192)) -> str:
    """One sentence: each op's slowest and fastest format over a copy, at one size, and other libraries beside it."""
    of_size = [row for row in _gpu_rows() if tuple(row["size"]) == size]
    told = []
    for op in ("qdq", "quantize", "dequantize", "activate_quantize"):
        speeds = [row["of_a_copy"] for row in of_size if row["op"] == op and row["library"] == "mxref"]
        others = {
            who: max(row["of_a_copy"] for row in of_size if row["op"] == op and row["library"] == who)
            for who in dict.fromkeys(row["library"] for row in of_size if row["op"] == op and row["library"] != "mxref")
        }
        beside = ", ".join(f"{who}'s fastest {speed:.2f}" for who, speed in others.items())
        told.append(f"`{op}` {min(speeds):.2f} to {max(speeds):.2f}" + (f" ({beside})" if beside else ""))
    return f"At {list(size)}, over all formats: " + "; ".join(told) + "."


def gpu_speed() -> str:
    """Element-wise kernels: speed over that of a copy, a table for each size."""
    data = _gpu_rows()
    tables = []
    for size in dict.fromkeys(tuple(row["size"]) for row in data):
        of_size = [row for row in data if tuple(row["size"]) == size]
        ops = list(dict.fromkeys(row["op"] for row in of_size))
        rows = []
        for who in dict.fromkeys((row["library"], row["format"]) for row in of_size):
            found = {row["op"]: f"{row['of_a_copy']:.2f}" for row in of_size if (row["library"], row["format"]) == who}
            rows.append((*who, *(found.get(op, "") for op in ops)))
        header = ("library", "format", *(f"`{op}`" for op in ops))
        tables.append(f"**{list(size)}**\n\n" + table(header, rows, "ll" + "r" * len(ops)))
    return "\n\n".join(tables)


def gpu_products() -> str:
    """Products by size and format: milliseconds, and speed over cuBLAS' of the same run; none where conformance failed."""
    speeds = read_record("matmul-h200")
    judged = standings([*speeds, *read_record("conformance-matmul-h200")])
    rows, notes = [], {}
    for i, row in enumerate(record("matmul-h200")["rows"]):
        if row.get("kernel") == "chosen" and "ms" in row:
            size = NO_BREAK.join((str(row["m"]), "x", str(row["n"]), "x", str(row["k"])))
            shares = [row.get(f"of_cublas_{dtype}") for dtype in ("bfloat16", "float64")]
            if judged[i].outcome != PASSED:
                notes[row["format"]] = judged[i].words
            if judged[i].outcome != FAILED:
                numbers = [short(row["ms"]), *("-" if share is None else short(share, 2) for share in shares)]
                rows.append((size, row["format"], *numbers, judged[i].outcome))
    header = ("M x N x K", "format", "ms", "of cuBLAS bfloat16", "of cuBLAS float64", "conformance")
    listed = "\n".join(f"* {format}: {words}." for format, words in notes.items())
    return table(header, rows, "llrrrl") + (f"\n\n{listed}" if notes else "")


def gpu_experts() -> str:
    """Whole expert layers: milliseconds, and the share of a copy of the packed weights that are met; none where conformance
    failed."""
    judged = standings([*read_record("moe-h200"), *read_record("conformance-moe-h200")])
    rows = []
    for i, row in enumerate(record("moe-h200")["rows"]):
        if "failed" in row or (i in judged and judged[i].outcome == FAILED):
            continue
        formats = f"{row['weights']}, {row['activations']}"
        share = f"{row['of_a_copy']:.2f}" if row["by"] == "mxref" else "-"
        peak = f"{row['peak_bytes'] / 1e6:.1f}"
        by = f"{row['by']}, {row['not_counted']} not counted" if "not_counted" in row else row["by"]
        rows.append((row["model"], formats, row["tokens"], by, short(row["ms"]), share, peak))
    header = ("model", "weights, activations", "tokens", "by", "ms", "of a copy", "peak MB")
    return table(header, rows, "llrlrrr")


def evaluation() -> str:
    """What each format costs the embedded model."""
    rows = []
    for row in record("eval-embedded-cpu")["rows"]:
        change = "" if row["change"] is None else f"{row['change']:+.4f} ± {row['change_error']:.4f}"
        snr = "" if row["snr_db"] is None else f"{row['snr_db']:.1f}"
        rows.append(
            (
                row["weights"],
                row["activations"],
                row["recipe"] or "",
                f"{row['bits_per_byte']:.4f}",
                change,
                f"{row['bits_per_weight']:.2f}",
                snr,
            )
        )
    header = ("weights", "activations", "recipe", "bits/byte", "change ± standard error", "bits/weight", "SNR dB")
    return table(header, rows, "lllrrrr")


def evaluation_on_gpus() -> str:
    """Records of `benchmarks.eval_gpu`, if there are any: the same rows on a GPU and on the CPU, and whether every layer of
    experts gave the reference's bits."""
    parts = []
    for path in sorted(RESULTS.glob("eval-*.json")):
        data = record(path.stem)
        if "expert_layers" not in data:
            continue
        rows = [
            (
                row["weights"],
                row["activations"],
                f"{row['bits_per_byte']:.4f}",
                f"{row['cpu_bits_per_byte']:.4f}",
                {True: "yes", False: "no", None: ""}[row.get("equal")],
            )
            for row in data["rows"]
        ]
        header = ("weights", "activations", "bits/byte", "on the CPU", "experts have the reference's bits")
        of = f"{len(data['expert_layers'])} calls of layers of experts, {data['scored_tokens']:,} tokens of the same text"
        why = (
            "Attention, norms and head are torch's on both and differ in their last bits, which quantization magnifies; "
            "what a layer of experts was given on the GPU, the reference on the CPU was given too."
        )
        parts.append(f"On {data['device']}, {of}. {why}\n\n{table(header, rows, 'llrrl')}\n\n{source(path.stem)}")
    return "\n\n".join(parts)


def evaluated_model() -> str:
    """What was evaluated, in a sentence."""
    data = record("eval-embedded-cpu")
    share = 100 * data["quantized_weights"] / data["parameters"]
    model = f"{data['parameters'] / 1e6:.1f} million parameters, {share:.0f} % of them quantized"
    return f"{model}, on {data['scored_bytes']:,} bytes of text"
