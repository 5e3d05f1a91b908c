"""The committed records of measurements, as tables. Nothing here measures."""

import json
from collections import Counter

from benchmarks.dashboard.standing import FAILED, PASSED, standings
from benchmarks.records import RESULTS, Row, Run, operands, read, text_of
from docs._generate.drawing import PHONE, WIDE, Drawing, dot, figure, line, text
from docs._generate.markdown import NO_BREAK, counted, fold, short, table
from docs._generate.markdown import measured as _number
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
    parts = [made.machine, *(versions or ["versions not recorded"])]
    parts += [commit or "commit not recorded", made.date or "date not recorded"]
    return f"Record: `benchmarks/results/{name}.json`, " + ", ".join(parts) + "."


def records() -> str:
    """Every record with where and when it was made."""
    rows = []
    for path in sorted(RESULTS.glob("*.json")):
        made = run(path.stem)
        torch = dict(made.versions).get("torch", "not recorded")
        rows.append((f"`{path.name}`", made.machine, torch, made.commit or "not recorded", made.date or "not recorded"))
    return table(("record", "machine", "torch", "commit", "date"), rows)


def conformance_counts(name: str) -> str:
    """One sentence of counts."""
    data = record(name)
    return f"{data['passed']:,} cases passed, {data['failed']} failed, {data['refused']} refused"


def conformance(name: str) -> str:
    """Cases by op, and, folded, by op and format."""
    outcomes = ("passed", "failed", "refused")
    by_op: dict[str, Counter] = {}
    by_format: dict[tuple[str, str], Counter] = {}
    for row in record(name)["rows"]:
        counts = Counter({outcome: row[outcome] for outcome in outcomes})
        by_op.setdefault(row["op"], Counter()).update(counts)
        by_format.setdefault((row["op"], _formats_in_words(row["op"], row["format"])), Counter()).update(counts)
    rows = [(f"`{op}`", *(counts[outcome] for outcome in outcomes)) for op, counts in by_op.items()]
    parts = [(f"`{op}`", format, *(counts[outcome] for outcome in outcomes)) for (op, format), counts in by_format.items()]
    each = table(("op", "format", *outcomes), parts, "llrrr")
    return table(("op", *outcomes), rows, "lrrr") + "\n\n" + fold("By op and format", each)


def _formats_in_words(op: str, formats: str) -> str:
    """The formats of a case: of a product's operands, or of an expert's weights and of what they are multiplied with."""
    if formats in ("", "-"):
        return "no format"
    first, *others = formats.split()
    if op == "moe_experts":
        return f"{first}, inputs {operands(*others) or 'too'}"
    return " × ".join((first, *others))


def refusals(name: str) -> str:
    """Why cases were refused, and how often; where the record has several reasons for one count, they stand together."""
    counts: dict[tuple[str, ...], int] = {}
    for row in record(name)["rows"]:
        if row["refused"]:
            reasons = tuple(row["reasons"])
            counts[reasons] = counts.get(reasons, 0) + row["refused"]
    rows = [("one of: " * (len(reasons) > 1) + "; ".join(reasons), count) for reasons, count in counts.items()]
    return table(("refused because", "cases"), rows, "lr")


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
    """Medians of `ops` in a record of a CPU, each over that of its ceiling; what all rows share stands above."""
    rows = []
    for timing in timings(record(name)):
        if timing.op in ops:
            size = f"{NO_BREAK}×{NO_BREAK}".join(map(str, timing.size))
            who = timing.contender + (f" ({timing.note})" if timing.note else "")
            ratio = "" if timing.ratio is None else f"{timing.ratio:.1f}"
            ceiling = "the ceiling itself" if timing.floor is None else timing.floor
            times = _number(1e3 * timing.seconds), ratio
            rows.append((f"`{timing.op}`", timing.format, who, *times, ceiling, timing.dtype, size))
    header = ("op", "format", "who", "median ms", "times the ceiling's", "ceiling", "dtype", "size")
    kept, shared = [], []
    for i, what in enumerate(header):
        values = {row[i] for row in rows if row[i] not in ("the ceiling itself", "")}
        if what in ("op", "ceiling", "dtype", "size") and len(values) == 1:
            shared.append(f"{what} {values.pop()}")
        else:
            kept.append(i)
    above = f"All rows: {', '.join(shared)}.\n\n" if shared else ""
    cells = [tuple(row[i] for i in kept) for row in rows]
    align = "".join("lllrrlll"[i] for i in kept)
    return above + table([header[i] for i in kept], cells, align)


def speed_picture(size: tuple[int, ...] = (8192, 8192)) -> str:
    """Each op of the element-wise kernels, and other libraries' of the same run: a dot a format, over a copy's speed."""
    lanes: dict[tuple[str, str], list[float]] = {}
    for row in _gpu_rows():
        if tuple(row["size"]) == size:
            lanes.setdefault((row["op"], row["library"]), []).append(row["of_a_copy"])
    caption = f"Speed on an {run('elementwise-h200').machine} over a copy's, at {list(size)}: a dot a format"
    return figure(caption, *(_speed_picture(lanes, width) for width in (WIDE, PHONE)))


def _speed_picture(lanes: dict[tuple[str, str], list[float]], width: float) -> Drawing:
    left, right, top, lane_height = 10, width - 20, 10, 40
    bottom = top + lane_height * len(lanes)
    furthest = max(1.0, *(max(speeds) for speeds in lanes.values()))

    def across(speed: float) -> float:
        return left + speed / furthest * (right - left)

    shapes = [line(across(1), top, across(1), bottom, "limit"), line(left, bottom, right, bottom, "axis")]
    for i, ((op, library), speeds) in enumerate(lanes.items()):
        y = top + i * lane_height
        shapes += [text(left, y + 13, f"{op}, {library}", "start", "small"), line(left, y + 26, right, y + 26)]
        kind = "dot" if library == "mxref" else "dot beside"
        shapes += [dot(across(speed), y + 26, kind) for speed in speeds]
    for tenths in range(0, 11, 2):
        shapes.append(text(across(tenths / 10), bottom + 17, f"{tenths / 10:g}" if tenths < 10 else "copy", kind="small"))
    return Drawing(width, bottom + 26, shapes)


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
        tables.append(fold(f"At {list(size)}", table(header, rows, "ll" + "r" * len(ops))))
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
                numbers = [_number(row["ms"]), *("-" if share is None else _number(share, 2) for share in shares)]
                rows.append((size, row["format"], *numbers, judged[i].outcome))
    header = ("M x N x K", "format", "ms", "of cuBLAS bfloat16", "of cuBLAS float64", "conformance")
    listed = "\n".join(f"* {format}: {words}." for format, words in notes.items())
    return table(header, rows, "llrrrl") + (f"\n\n{listed}" if notes else "")


def gpu_experts() -> str:
    """Whole expert layers: milliseconds, and the share of a copy of the packed weights that are met; none where conformance
    failed."""
    judged = standings([*read_record("moe-h200"), *read_record("conformance-moe-h200")])
    rows, without = [], {}
    for i, row in enumerate(record("moe-h200")["rows"]):
        if i in judged and judged[i].outcome == FAILED:
            continue
        if "failed" in row:
            reason = row["failed"].partition(": ")[2] or row["failed"]  # the exception's name says nothing here
            without.setdefault((row["by"], row["weights"], reason), []).append(row)
            continue
        formats = f"{row['weights']}, {operands(row['activations'])}"
        share = f"{row['of_a_copy']:.2f}" if row["by"] == "mxref" else "-"
        peak = f"{row['peak_bytes'] / 1e6:.1f}"
        by = f"{row['by']}, {row['not_counted']} not counted" if "not_counted" in row else row["by"]
        rows.append((row["model"], formats, row["tokens"], by, _number(row["ms"]), share, peak))
    header = ("model", "weights, activations", "tokens", "by", "ms", "of a copy", "peak MB")
    notes = [
        f"* {by} with {format}: no number in {counted(len(refused), 'row')}, since {reason}."
        for (by, format, reason), refused in without.items()
    ]
    models = {model: [row[1:] for row in rows if row[0] == model] for model in dict.fromkeys(row[0] for row in rows)}
    folds = [fold(f"{model}: {counted(len(own), 'row')}", table(header[1:], own, "lrlrrr")) for model, own in models.items()]
    return "\n\n".join([*folds, "\n".join(notes)])


def evaluation() -> str:
    """What each format costs the embedded model."""
    rows = []
    for row in record("eval-embedded-cpu")["rows"]:
        snr = "" if row["snr_db"] is None else f"{row['snr_db']:.1f}"
        rows.append(
            (
                operands(row["weights"]),
                operands(row["activations"]),
                f"{row['bits_per_byte']:.4f}",
                _change(row),
                f"{row['bits_per_weight']:.2f}",
                snr,
                row["recipe"] or "",
            )
        )
    header = ("weights", "activations", "bits/byte", "change ± standard error", "bits/weight", "SNR dB", "recipe")
    return table(header, rows, "llrrrrl")


def _change(row: dict) -> str:
    """The change of a row of an evaluation with its standard error; nothing for the row that others are compared with."""
    return "" if row["change"] is None else f"{row['change']:+.4f} ± {row['change_error']:.4f}"


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
                operands(row["weights"]),
                operands(row["activations"]),
                f"{row['bits_per_byte']:.4f}",
                _change(row),
                f"{row['cpu_bits_per_byte']:.4f}",
                "" if row["cpu_change"] is None else f"{row['cpu_change']:+.4f}",
                {True: "yes", False: "no", None: ""}[row.get("equal")],
            )
            for row in data["rows"]
        ]
        changes = [row for row in data["rows"] if row["change"] is not None]
        noise = sum(abs(row["change"]) < 2 * row["change_error"] for row in changes)
        header = ("weights", "activations", "bits/byte", "change ± standard error")
        header += ("bits/byte on the CPU", "its change", "experts have the reference's bits")
        of = f"{len(data['expert_layers'])} calls of layers of experts, {data['scored_tokens']:,} tokens of the same text"
        why = (
            "Attention, norms and head are torch's on both and differ in their last bits, which quantization magnifies; "
            "what a layer of experts was given on the GPU, the reference on the CPU was given too."
        )
        few = (
            f"The text is short: {noise} of {len(changes)} changes are below two standard errors, so this table is about "
            "bits, not about what a format costs. Of the changes on the CPU the record holds no standard error."
        )
        parts.append(f"On {data['device']}, {of}. {why}\n\n{table(header, rows, 'llrrrrl')}\n\n{few}\n\n{source(path.stem)}")
    return "\n\n".join(parts)


def evaluated_model() -> str:
    """What was evaluated, in a sentence."""
    data = record("eval-embedded-cpu")
    share = 100 * data["quantized_weights"] / data["parameters"]
    model = f"{data['parameters'] / 1e6:.1f} million parameters, {share:.0f} % of them quantized"
    return f"{model}, on {data['scored_bytes']:,} bytes of text"
