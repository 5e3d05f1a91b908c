"""The records of `benchmarks/results`, and their committed versions, as one list of rows.

A record is known by its keys, not by its name. Each kind of record says which keys its rows have; a record of no kind, a row
of another kind and a quick run are refused with the name of the file. What was measured stays as the record has it: times
become milliseconds, and nothing is rounded. Every value is checked before it is read: `FACTS` says what a key may hold.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from mxref.formats import BLOCK_FORMATS

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SPEED, CONFORMANCE, OTHER = "speed", "conformance", "other"
OURS = "mxref triton"  # who answers in the records of a GPU
COPY = "torch copy"
WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}
BYTE_A_CODE = ", a byte a code"
NOT_RECORDED = "machine not recorded"
NO_VERSIONS = ("device", "cores", "threads", "system", "commit", "date")
LIBRARIES = (
    "mxref", "torch", "triton", "python", "numpy", "ml_dtypes", "transformers", "compressed-tensors", "torchao", "vllm",
)  # fmt: skip


class RecordError(ValueError):
    """A file that is no record, or none that is known here: which file, what is wrong, what is accepted."""


@dataclass(frozen=True)
class Run:
    """Where a record comes from; `machine` tells apart what may not be compared: device, cores and threads."""

    record: str
    machine: str = NOT_RECORDED
    versions: tuple[tuple[str, str], ...] = ()
    commit: str | None = None
    date: str | None = None


@dataclass(frozen=True)
class Row:
    """One measurement.

    `kind`: speed, conformance or other. `format`: block or element format, several joined by a blank, `-` for none.
    `library`: who. `detail`: what else tells rows apart. `note`: why there is no number, what it leaves out, or why cases
    were refused.
    `values` of a speed: `ms` and, where known, `moved_bytes`, `flops`, and `ceiling` with `ceiling_ms`, the time of what the
    row is held against in the same run; of conformance: `passed`, `failed`, `known`, `refused`; else what the record has.
    """

    run: Run
    kind: str
    op: str
    format: str
    dtype: str
    library: str
    recipe: str = ""
    size: tuple[int, ...] = ()
    detail: str = ""
    note: str = ""
    values: dict[str, float | int | str | bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Version:
    """One state of a record; `commit` is "" for a state that is not committed."""

    record: str
    commit: str
    committed: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class History:
    """Versions, oldest first; those that cannot be read, with the reason; and why there is no history, if there is none."""

    versions: tuple[Version, ...] = ()
    unread: tuple[str, ...] = ()
    missing: str = ""


def moved_bytes(op: str, format: str, count: int) -> int:
    """Bytes that an op of `elementwise_gpu.py` has to read and write for `count` bfloat16 values.

    >>> moved_bytes("dequantize", "mxfp4", 64)
    162
    """
    name, packed = op.removesuffix(BYTE_A_CODE), 0
    if format in BLOCK_FORMATS:
        block = BLOCK_FORMATS[format]
        packed = count * (block.element.bits if op == name else 8) // 8 + count // block.block_size
    moved = {
        "qdq": 4 * count,
        "qdq, scale computed": 6 * count,
        "quantize": 2 * count + packed,
        "dequantize": 2 * count + packed,
        "activate_quantize": 4 * count + packed,
        "silu": 4 * count,
        "swiglu": 6 * count,
    }
    if name not in moved:
        raise ValueError(f"op {op!r} names no moved_bytes, and they are known of {', '.join(moved)} alone")
    return moved[name]


# ---- what a value may be --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fact:
    """What the value of a key may be, in words and as a test."""

    expected: str
    fits: Callable[[object], bool]


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # not NaN


def _is_whole(value: object, least: int) -> bool:
    return type(value) is int and least <= value <= 2**53  # what a page's script can count


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value.strip() != ""


TEXT = Fact("text that is not empty", _is_text)
WORDS = Fact("text", lambda value: isinstance(value, str))
PERHAPS_TEXT = Fact("text, or null", lambda value: value is None or isinstance(value, str))
PERHAPS_NUMBER = Fact("a finite number, or null", lambda value: value is None or _is_number(value))
POSITIVE = Fact(  # rates and ratios of a few such numbers are finite and not zero
    "a number above zero, from 1e-50 to 1e50", lambda value: _is_number(value) and 1e-50 <= value <= 1e50
)
WHOLE = Fact("a whole number", lambda value: _is_whole(value, -(2**53)))
COUNT = Fact("a whole number, zero or more", lambda value: _is_whole(value, 0))
LENGTH = Fact("a whole number above zero", lambda value: _is_whole(value, 1))
NUMBER_OF = Fact(
    "a whole number above zero, or its digits",
    lambda value: _is_whole(value, 1) or (isinstance(value, str) and value.isdecimal() and value.strip("0") != ""),
)
FLAG = Fact("true or false", lambda value: isinstance(value, bool))
SIZE = Fact(
    "a list of whole numbers above zero",
    lambda value: isinstance(value, list) and len(value) > 0 and all(_is_whole(one, 1) for one in value),
)
TEXTS = Fact("a list of texts", lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value))
OBJECT = Fact("an object", lambda value: isinstance(value, dict))
VERSIONS = Fact(
    "an object of texts",
    lambda value: isinstance(value, dict) and all(PERHAPS_TEXT.fits(one) for one in value.values()),
)
SHAPES = Fact(
    "an object of names and shapes [N, K]",
    lambda value: isinstance(value, dict) and all(SIZE.fits(one) and len(one) == 2 for one in value.values()),
)
SCALAR = Fact(
    "a finite number, text, true, false or null",
    lambda value: value is None or _is_number(value) or isinstance(value, str | bool),
)

FACTS = {
    key: fact
    for fact, keys in (
        (TEXT, "op format dtype recipe library contender floor name kernel path wrong by model weights activations gate "
               "device processor backend what function checkpoint producer input loading not_counted"),
        (PERHAPS_TEXT, "commit date"),
        (WORDS, "reason"),
        (POSITIVE, "ms copy_ms of_a_copy times_a_bare_kernel tflops packed_tb_s decoding_ms of_cublas_bfloat16 "
                   "of_cublas_float64 median experts moved_bytes packed_bytes flops bits_per_byte perplexity "
                   "word_perplexity bits_per_weight cosine"),
        (PERHAPS_NUMBER, "change change_error snr_db"),
        (WHOLE, "peak_resident_bytes"),  # a difference: below zero where memory was given back
        (COUNT, "passed failed known refused peak_bytes patterns differing compared excepted level"),
        (LENGTH, "m n k tokens bytes bound_bytes"),
        (NUMBER_OF, "cores threads"),
        (FLAG, "right same_bits nan_raises losses_measured quick"),
        (SIZE, "size shape"),
        (TEXTS, "reasons known_reasons"),
        (OBJECT, "machine_info machine extra_info stats"),
        (VERSIONS, "versions"),
        (SHAPES, "layers"),
    )
    for key in keys.split()
}  # fmt: skip


def _check(where: str, values: dict, facts: dict[str, Fact]) -> None:
    """Refuse a value that is not what its key may be, in the objects within too that are known by name."""
    for key, value in values.items():
        if key in facts and not facts[key].fits(value):
            raise RecordError(f"{where}: {key} is {_shown(value)}; accepted: {facts[key].expected}")
        if facts.get(key) is OBJECT:
            _check(f"{where}, {key}", value, facts)


def _shown(value: object) -> str:
    """A value as JSON, cut where it is long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except ValueError:  # a number of more digits than Python writes
        text = "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


# ---- each kind of record --------------------------------------------------------------------------------------------


def _elementwise(data: dict, run: Run) -> Iterator[Row]:
    """`elementwise_gpu.py`: each row has a copy of as many bytes beside it."""
    for row in data["rows"]:
        op, format, size = row["op"], row["format"], tuple(row["size"])
        who = OURS if row["library"] == "mxref" else row["library"]
        moved = row["moved_bytes"] if "moved_bytes" in row else moved_bytes(op, format, prod(size))
        values = {"moved_bytes": moved}
        if "ms" in row:
            values |= {"ms": row["ms"], "ceiling": COPY, "ceiling_ms": row["copy_ms"]}
            values["times_a_bare_kernel"] = row.get("times_a_bare_kernel")
        note = _in_words(row.get("failed", ""))
        # records that name no recipe were made with the format's own
        recipe = row.get("recipe") or (
            BLOCK_FORMATS[format].default_recipe if who == OURS and format in BLOCK_FORMATS else ""
        )
        yield Row(run, SPEED, op, format, data["dtype"], who, recipe, size, note=note, values=_known(values))


def _named_elementwise(data: dict, run: Run) -> Iterator[Row]:
    """The oldest such records, whose rows name op and format in one."""
    rows = []
    for row in data["rows"]:
        name = row["name"].removesuffix(BYTE_A_CODE)
        op, _, format = name.partition(" ")
        op += row["name"][len(name) :]
        rows.append({**row, "op": op, "format": format or "-", "library": "mxref"})
    return _elementwise({**data, "rows": rows}, run)


def _matmul(data: dict, run: Run) -> Iterator[Row]:
    """`matmul_gpu.py`: cuBLAS in bfloat16, or in float64 where the dots need it, is what a product is held against."""
    layers = {tuple(shape): name for name, shape in data["layers"].items()}
    cublas: dict[tuple, tuple[str, float]] = {}
    for row in data["rows"]:
        if row.get("kernel", "").startswith("cublas"):
            cublas[_product(row)] = (row["kernel"], row["ms"])  # float64 comes last
    for i, row in enumerate(data["rows"]):
        if "gate" in row:
            note = row.get("wrong", "")
            yield Row(run, OTHER, "matmul", "-", "-", OURS, detail=row["gate"], note=note, values={"right": row["right"]})
            continue
        (_, m, n, k), ours = _product(row), not row["kernel"].startswith("cublas")
        detail = layers.get((n, k), "") if m < n else ""
        if any(key.startswith("of_cublas") for key in row) and _product(row) not in cublas:
            raise RecordError(f"{run.record}: row {i} is a share of cuBLAS, which has no row of this product")
        values = {"flops": 2 * m * n * k}
        if "ms" in row:
            values["ms"] = row["ms"]
            if ours:
                values |= dict(zip(("ceiling", "ceiling_ms"), cublas.get(_product(row), ())))
        values |= {name: row[name] for name in ("path", "decoding_ms") if name in row}
        who = row["kernel"] if not ours else OURS if row["kernel"] == "chosen" else f"{OURS}, {row['kernel']}"
        yield Row(
            run, SPEED, "matmul", row["format"], "bfloat16", who, size=(m, n, k), detail=detail, note=row.get("wrong", ""),
            values=values,
        )  # fmt: skip


def _product(row: dict) -> tuple[str, int, int, int]:
    return row["format"], row["m"], row["n"], row["k"]


LAYERS_BY = {
    "mxref": OURS,
    "dequantize + grouped": "mxref, decode first",
    "bfloat16 grouped": "torch bfloat16, grouped",
    "bfloat16 vllm": "vllm bfloat16",
    "vllm decode first": "vllm, decode first",
    "vllm fused decode": "vllm, fused decode",
}


def operands(*formats: str) -> str:
    """The formats of a product's operands, each once; one that is in none is called unquantized.

    >>> operands("mxfp4", "None"), operands("nvfp4", "nvfp4")
    ('mxfp4 unquantized', 'nvfp4')
    """
    return " ".join(dict.fromkeys("unquantized" if name in ("None", "bf16", "bfloat16") else name for name in formats))


def _in_words(failure: str) -> str:
    """What an exception says, without its name.

    >>> _in_words("ValueError: not alike"), _in_words("rows 0: codes differ"), _in_words("AssertionError: ")
    ('not alike', 'rows 0: codes differ', 'AssertionError: ')
    """
    return re.sub(r"^\w+(Error|Exception): (?=\S)", "", failure)


def _experts(data: dict, run: Run) -> Iterator[Row]:
    """`moe_gpu.py`: a layer is held against a copy of the packed weights that it meets; its size is its tokens."""
    for row in data["rows"]:
        values = {"experts_met": row["experts"], "moved_bytes": row["packed_bytes"]}
        values |= {"peak_bytes": row.get("peak_bytes"), "cosine": row.get("cosine")}
        left_out = f"{row['not_counted']} not counted" if "not_counted" in row else ""
        if "ms" in row:
            values |= {"ms": row["ms"], "ceiling": COPY, "ceiling_ms": row["of_a_copy"] * row["ms"]}
            values["flops"] = round(row["tflops"] * row["ms"] * 1e9)
        yield Row(
            run, SPEED, "moe_experts", operands(row["weights"], row["activations"]), data["dtype"],
            LAYERS_BY.get(row["by"], row["by"]), size=(row["tokens"],), detail=row["model"],
            note=_in_words(row.get("failed", left_out)), values=_known(values),
        )  # fmt: skip


def _pytest(data: dict, run: Run) -> Iterator[Row]:
    """pytest-benchmark: what a row is stands in `extra_info`; `floor` names the row of the same run it is held against."""
    facts = [_facts(entry) for entry in data["benchmarks"]]
    times = {_floor_key(row, row["contender"]): row["ms"] for row in facts}
    for row in facts:
        values = {name: value for name, value in row.items() if name not in _NAMES}
        if "floor" in row:
            key = _floor_key(row, row["floor"])
            if key not in times:
                raise RecordError(f"{run.record}: {row['contender']} has the floor {row['floor']!r}, which no row is")
            values |= {"ceiling": row["floor"], "ceiling_ms": times[key]}
        yield Row(
            run, SPEED, row["op"], operands(*row.get("format", "-").split()), row.get("dtype", "-"), row["contender"],
            row.get("recipe", ""), tuple(row.get("size", ())), values=values,
        )  # fmt: skip


DISPATCHED = {
    f"{who}, {how}": f"mxref {named}, {how}"
    for who, named in (("reference", "reference"), ("kernel", "idle kernel"))
    for how in ("bare", "dispatched")
}
_NAMES = ("op", "format", "dtype", "contender", "device", "size", "floor", "recipe")


def _floor_key(row: dict, contender: str) -> tuple:
    return row["op"], row.get("dtype"), tuple(row.get("size", ())), contender


def _facts(entry: dict) -> dict:
    """One entry with its median; the oldest ones name format, library and recipe in one, and their size `shape`."""
    row = {**entry["extra_info"], "ms": 1e3 * entry["stats"]["median"]}
    row |= {name: DISPATCHED.get(row[name], row[name]) for name in ("contender", "floor") if name in row}
    if "shape" not in row:
        return row
    size = row.pop("shape")
    row |= {"size": size, "moved_bytes": 2 * prod(size) * WIDTH[row["dtype"]]}
    if row["contender"] == "copy":
        return row | {"contender": COPY}
    format, who, *recipe = row["contender"].split()
    who = {"mxref": "mxref reference", "inductor": "mxref inductor", "quark": " ".join(["AMD Quark", *recipe])}.get(who, who)
    named = {"recipe": recipe[0]} if recipe and who.startswith("mxref") else {}
    return row | named | {"format": format, "contender": who, "floor": COPY}


def _conversions(data: dict, run: Run) -> Iterator[Row]:
    """`convert_cpu.py`: megabytes a second of a bfloat16 model."""
    size = data["model"]["bytes"]
    for row in data["rows"]:
        op, who = row["what"].split()[0], f"mxref {row.get('backend', 'reference')}"
        values = {"ms": size / row["median"] / 1e3, "moved_bytes": size, "peak_resident_bytes": row["peak_resident_bytes"]}
        detail = "bytes of the bfloat16 model" + (", losses measured" if row.get("losses_measured") else "")
        recipe = data["recipe"] if op == "convert" else ""
        yield Row(run, SPEED, op, "mxfp4", "bfloat16", who, recipe, detail=detail, values=_known(values))


def _conformance(data: dict, run: Run) -> Iterator[Row]:
    """`mxref verify --json`: counts of cases."""
    counts = ("passed", "failed", "known", "refused")
    for count in counts:
        total = sum(row.get(count, 0) for row in data["rows"])
        if total != data.get(count, 0):
            raise RecordError(f"{run.record}: {data.get(count, 0)} {count} in all, but {total} in its rows")
    for row in data["rows"]:
        format = operands(*(row["format"] or "-").split())
        yield Row(
            run, CONFORMANCE, row["op"], format, row["dtype"], f"mxref {data['backend']}",
            detail=f"level {data['level']}", note="; ".join([*row["reasons"], *row.get("known_reasons", ())]),
            values={count: row.get(count, 0) for count in counts},
        )  # fmt: skip


def _exhaustive(data: dict, run: Run) -> Iterator[Row]:
    for row in data["rows"]:
        values = {name: value for name, value in row.items() if name != "format"}
        yield Row(run, OTHER, "encode", row["format"], "float32", "mxref reference", detail="every pattern", values=values)


def _functions(data: dict, run: Run) -> Iterator[Row]:
    for row in data["rows"]:
        values = {name: value for name, value in row.items() if name != "function"}
        detail = data["what"]
        yield Row(run, OTHER, row["function"], "-", "-", "mxref reference", detail=detail, values=_known(values))


def _evaluation(data: dict, run: Run) -> Iterator[Row]:
    who = f"mxref {(data.get('backends') or ['reference'])[0]}"
    for row in data["rows"]:
        formats = {name: operands(row[name]) for name in ("weights", "activations")}
        values = {name: value for name, value in row.items() if name != "recipe"} | formats
        yield Row(
            run, OTHER, "eval", operands(*formats.values()), "-", who, row["recipe"] or "", detail=f"model {data['model']}",
            values=_known(values),
        )  # fmt: skip


def _misloads(data: dict, run: Run) -> Iterator[Row]:
    """Two rows a checkpoint: as mxref loads it, and as transformers does."""
    for row in data["rows"]:
        for who in ("mxref", "transformers"):
            values = {name: value for name, value in row[who].items() if name != "loading"}
            note = row[who].get("loading", "")
            yield Row(run, OTHER, "load", "-", "-", who, detail=row["checkpoint"], note=note, values=_known(values))


def _producers(data: dict, run: Run) -> Iterator[Row]:
    for row in data["rows"]:
        values = {name: row[name] for name in ("compared", "differing", "excepted")}
        yield Row(
            run, OTHER, "quantize", row["format"], "-", row["producer"], row["recipe"], detail=row["input"],
            note=row["reason"], values=values,
        )  # fmt: skip


def _known(values: dict) -> dict:
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Keys:
    """Those that a row must have, and those that it may have besides; None: any."""

    required: frozenset[str]
    optional: frozenset[str] | None = frozenset()

    def fit(self, row: dict) -> bool:
        extra = row.keys() - self.required
        return self.required <= row.keys() and (self.optional is None or extra <= self.optional)


def _keys(required: str, optional: str | None = "") -> Keys:
    return Keys(frozenset(required.split()), None if optional is None else frozenset(optional.split()))


@dataclass(frozen=True)
class Kind:
    """A kind of record: keys of the whole, the keys that a row can have, and how it becomes rows; `facts`: its own words."""

    name: str
    top: frozenset[str]
    rows: tuple[Keys, ...]
    read: Callable[[dict, Run], Iterator[Row]]
    listed: str = "rows"
    facts: dict[str, Fact] = field(default_factory=dict)


def _kind(name: str, top: str, read: Callable, *rows: Keys, listed: str = "rows", **facts: Fact) -> Kind:
    return Kind(name, frozenset(top.split()) | {listed}, rows, read, listed, facts)


LAYER = "model weights activations tokens by experts packed_bytes"  # keys of a row of `moe_gpu.py`

RECORDS = (
    _kind(
        "element-wise kernels",
        "device dtype",
        _elementwise,
        _keys("size op format library ms copy_ms", "of_a_copy times_a_bare_kernel moved_bytes recipe"),
        _keys("size op format library failed", "moved_bytes recipe"),
        failed=TEXT,
    ),
    _kind("element-wise kernels, named", "device dtype", _named_elementwise, _keys("name size ms copy_ms of_a_copy")),
    _kind(
        "products",
        "device layers",
        _matmul,
        _keys("gate right", "wrong"),
        _keys("format m n k kernel ms tflops", "path decoding_ms of_cublas_bfloat16 of_cublas_float64"),
        _keys("format m n k kernel path wrong"),
    ),
    _kind(
        "layers of experts",
        "device dtype",
        _experts,
        _keys(f"{LAYER} ms of_a_copy tflops", "peak_bytes packed_tb_s kernels_us not_counted cosine"),
        _keys(f"{LAYER} failed", "peak_bytes ms of_a_copy packed_tb_s tflops not_counted cosine"),
        failed=TEXT,
    ),
    _kind("pytest-benchmark", "machine_info", _pytest, _keys("extra_info stats", None), listed="benchmarks"),
    _kind(
        "conversions",
        "device model recipe bound_bytes",
        _conversions,
        _keys("what median peak_resident_bytes", None),
        model=OBJECT,
    ),
    _kind(
        "conformance",
        "backend level passed failed refused",
        _conformance,
        _keys("op format dtype passed failed refused reasons", "known known_reasons"),
        format=PERHAPS_TEXT,
    ),
    _kind(
        "every float32 pattern",
        "what device",
        _exhaustive,
        _keys("format patterns differing", "nan_raises passed"),
        passed=FLAG,
    ),
    _kind("accuracy of functions", "what device", _functions, _keys("function", None)),
    _kind(
        "evaluation of a model",
        "model semantics scored_bytes",
        _evaluation,
        _keys("weights activations recipe", None),
        layers=TEXT,
        recipe=PERHAPS_TEXT,
        act_recipe=PERHAPS_TEXT,
    ),
    _kind(
        "loaded checkpoints",
        "about tokens",
        _misloads,
        _keys("checkpoint mxref transformers"),
        mxref=OBJECT,
        transformers=OBJECT,
    ),
    _kind(
        "producers",
        "recordings",
        _producers,
        _keys("producer format input recipe compared differing excepted reason"),
    ),
)


# ---- files ----------------------------------------------------------------------------------------------------------


def read(name: str, text: str) -> tuple[Row, ...]:
    """The rows of the record `name` (its file's name), whose text is given; RecordError for what is none."""
    try:
        data = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{name}: not JSON: {error}") from error
    kinds = [kind for kind in RECORDS if isinstance(data, dict) and kind.top <= data.keys()]
    if not kinds:
        keys = ", ".join(sorted(data)) if isinstance(data, dict) else type(data).__name__
        raise RecordError(f"{name}: no known kind of record; it has: {keys}; known: {', '.join(k.name for k in RECORDS)}")
    kind, listed = _kind_of(name, data, kinds)
    facts = FACTS | kind.facts
    _check(name, {key: value for key, value in data.items() if key != kind.listed}, facts)
    for i, row in enumerate(listed):
        if not any(keys.fit(row) for keys in kind.rows):
            raise RecordError(_no_row(name, i, row, [kind]))
        _check(f"{name}: row {i}", row, facts)
    run = _run(name, data)
    try:
        rows = tuple(kind.read(data, run))
    except RecordError:
        raise
    except (KeyError, TypeError, AttributeError) as error:
        raise RecordError(f"{name}: a record of {kind.name} lacks or misnames {error}") from error
    except (ValueError, ArithmeticError) as error:
        raise RecordError(f"{name}: a record of {kind.name}: {error}") from error
    known = set()
    for row in rows:
        key = row.op, row.format, row.dtype, row.library, row.recipe, row.size, row.detail
        if key in known:
            told = _shown(key).strip("[]")
            raise RecordError(f"{name}: two rows of one op, format, dtype, library, recipe, size and detail: {told}")
        known.add(key)
        if row.kind in (SPEED, CONFORMANCE) and run.machine == NOT_RECORDED:
            raise RecordError(f"{name}: no device; a record of {kind.name} names what it ran on")
        _check(f"{name}: {row.op} of {row.library}", row.values, dict.fromkeys(row.values, SCALAR))
    return rows


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON; accepted: finite numbers, or null")


def _kind_of(name: str, data: dict, kinds: list[Kind]) -> tuple[Kind, list[dict]]:
    """The kind of a record, of those that its own keys leave, and its rows; the first row decides."""
    for kind in kinds:
        rows = data[kind.listed]
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise RecordError(f"{name}: {kind.listed} is {_shown(rows)}; accepted: a list of objects")
        if not rows:
            raise RecordError(f"{name}: no rows")
        if any(keys.fit(rows[0]) for keys in kind.rows):
            return kind, rows
    raise RecordError(_no_row(name, 0, rows[0], kinds))


def _no_row(name: str, i: int, row: dict, kinds: list[Kind]) -> str:
    accepted = [f"{kind.name}: {' '.join(sorted(keys.required))}" for kind in kinds for keys in kind.rows]
    return f"{name}: row {i} is none of its kind; it has: {', '.join(sorted(row))}; accepted: {'; '.join(accepted)}"


def _run(name: str, data: dict) -> Run:
    info = data.get("machine_info") or data.get("machine") or data
    if info.get("quick"):
        raise RecordError(f"{name}: a quick run is no record")
    versions = data.get("versions") or {k: info[k] for k in (info if "machine_info" in data else LIBRARIES) if k in info}
    versions = {k: v for k, v in versions.items() if k not in NO_VERSIONS and v is not None}
    _check(name, versions, dict.fromkeys(versions, TEXT))
    device = info.get("device")
    device = info.get("processor", device) if device == "cpu" else device
    counts = [f"{info[key]} {key if str(info[key]) != '1' else key[:-1]}" for key in ("cores", "threads") if info.get(key)]
    machine = ", ".join([device, *counts]) if device else NOT_RECORDED
    return Run(name, machine, tuple(versions.items()), info.get("commit"), info.get("date", data.get("date")))


def load(folder: Path = RESULTS) -> tuple[Row, ...]:
    """The rows of every record in a folder; RecordError where there is none."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise RecordError(f"{folder}: no records; accepted: a folder with at least one .json file of a known kind")
    return tuple(row for path in paths for row in read(path.name, text_of(path)))


def text_of(path: Path) -> str:
    """The text of a record's file."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path.name}: cannot be read as text of UTF-8: {error}") from error


def history(folder: Path = RESULTS) -> History:
    """Every committed version of every record that stands or stood in a folder, and what is not committed yet."""
    try:
        listed = _git(folder, "log", "--reverse", "--format=%x01%h %cI", "--name-status", "--no-renames", "--", ".")
        top = Path(_git(folder, "rev-parse", "--show-toplevel").strip())
    except (OSError, subprocess.CalledProcessError):
        return History(missing="no git history where this was built")
    if not listed.strip():
        return History(missing="no committed records where this was built")
    versions, unread, newest = [], [], {}
    for entry in listed.split("\x01")[1:]:
        header, *changes = [line for line in entry.splitlines() if line]
        commit, committed = header.split()
        for status, path in (change.split("\t") for change in changes if change.endswith(".json")):
            if status == "D":
                continue
            name = Path(path).name
            try:
                newest[name] = _git(top, "show", f"{commit}:{path}")
                versions.append(Version(name, commit, committed, read(name, newest[name])))
            except UnicodeDecodeError:
                unread.append(f"{commit} {name}: no text of UTF-8")
            except RecordError as error:
                unread.append(f"{commit} {error}")
    for path in sorted(folder.glob("*.json")):
        text = text_of(path)
        if text != newest.get(path.name):
            versions.append(Version(path.name, "", "", read(path.name, text)))
    return History(tuple(versions), tuple(unread))


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True, encoding="utf-8").stdout
