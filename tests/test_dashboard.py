"""The dashboard: every record becomes rows with its own numbers, and the page shows them, never two machines in one chart.

The page is driven in Chromium, where one is installed.
"""

import csv
import io
import json
import math
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.dashboard.__main__ import main
from benchmarks.dashboard.standing import FAILED, refused_today, standings
from benchmarks.records import RESULTS, RecordError, history, load, moved_bytes, read

ROOT = Path(__file__).parent.parent
RECORDS = sorted(RESULTS.glob("*.json"))
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
GPU = {
    "device": "NVIDIA Test",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "python": "3.12.3",
    "commit": "abc1234",
    "date": "2026-12-03",
}

PRODUCT = {"format": "mxfp8_e4m3", "m": 16, "n": 512, "k": 256}
MATMUL = GPU | {
    "layers": {"a layer": [512, 256]},
    "rows": [
        {"gate": "flagged mxfp4", "right": True},
        {"gate": "odd mxfp4", "right": False, "wrong": "a bit differs"},
        PRODUCT | {"kernel": "cublas bfloat16", "ms": 0.5, "tflops": 2 * 16 * 512 * 256 / 0.5e9},
        PRODUCT | {"kernel": "cublas float64", "ms": 1.0, "tflops": 2 * 16 * 512 * 256 / 1e9},
        PRODUCT | {"kernel": "chosen", "path": "Fused()", "ms": 2.0, "tflops": 2 * 16 * 512 * 256 / 2e9}
        | {"of_cublas_bfloat16": 0.25, "of_cublas_float64": 0.5},
        PRODUCT | {"kernel": "portable", "path": "Fused()", "wrong": "rows 0: codes differ"},
        {"format": "mxfp4", "m": 512, "n": 512, "k": 256, "kernel": "cublas bfloat16", "ms": 0.25, "tflops": 0.5},
        {"format": "mxfp4", "m": 512, "n": 512, "k": 256, "kernel": "chosen", "path": "F", "ms": 0.5, "tflops": 0.25}
        | {"decoding_ms": 0.1, "of_cublas_bfloat16": 0.5},
    ],
}  # fmt: skip
LAYER = {"model": "a model", "weights": "mxfp4", "activations": "mxfp6_e3m2", "experts": 3.5, "packed_bytes": 1_000_000}
EXPERTS = GPU | {
    "dtype": "bfloat16",
    "rows": [
        LAYER | {"tokens": tokens, "by": by, "peak_bytes": 9, "ms": ms, "of_a_copy": 0.5, "packed_tb_s": 1, "tflops": 2.0}
        for tokens in (1, 16)
        for by, ms in (("mxref", 0.25), ("bfloat16 grouped", 0.5))
    ]
    + [LAYER | {"tokens": 1, "by": "bfloat16 vllm", "failed": "RuntimeError: </script> no memory"}],
}


def timed(seconds: float, **facts) -> dict:
    return {"name": "x", "extra_info": {"device": "cpu", **facts}, "stats": {"median": seconds, "rounds": 7}}


BENCH = {
    "machine_info": {
        "device": "A Processor",
        "cores": 2,
        "threads": 1,
        "system": "Linux",
        "python": "3.11.7",
        "torch": "2.13",
    }
    | {"commit": "abc1234", "date": "2026-12-03"},
    "benchmarks": [
        timed(0.25, op="quantize", format="-", dtype="bfloat16", contender="torch copy", size=[64, 64], moved_bytes=16384),
        timed(0.5, op="quantize", format="mxfp4", dtype="bfloat16", contender="mxref reference", size=[64, 64])
        | {"name": "y"},
        timed(0.01, op="quantize", format="mxfp4", dtype="bfloat16", contender="torchao", size=[64, 64], same_bits=True),
        # as a row of the GPU, on another machine
        timed(
            0.5, op="qdq", format="nvfp4", dtype="bfloat16", contender="mxref triton", size=[8192, 8192], moved_bytes=1 << 28
        ),
    ],
}
BENCH["benchmarks"][1]["extra_info"] |= {"floor": "torch copy", "recipe": "ocp", "moved_bytes": 10368}


# ---- the rows -------------------------------------------------------------------------------------------------------


def entries(path: Path) -> list[dict]:
    data = json.loads(path.read_text(encoding="utf-8"))
    return data["benchmarks"] if "benchmarks" in data else data["rows"]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_every_record_becomes_as_many_rows_as_it_has(path):
    rows = read(path.name, path.read_text(encoding="utf-8"))
    per_row = 2 if "checkpoint" in entries(path)[0] else 1  # as mxref loads it, and as transformers does
    assert len(rows) == per_row * len(entries(path))
    assert {row.run.record for row in rows} == {path.name} and len({row.run for row in rows}) == 1


def test_all_records_are_loaded():
    assert Counter(row.run.record for row in load()).keys() == {path.name for path in RECORDS}


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_every_number_is_the_records(path):
    """In the order of the record: times and counts as they are, medians in milliseconds."""
    rows, data = read(path.name, path.read_text(encoding="utf-8")), json.loads(path.read_text(encoding="utf-8"))
    info = data.get("machine_info", data)
    assert rows[0].run.commit == info.get("commit") and rows[0].run.date == info.get("date")
    if "checkpoint" in entries(path)[0]:
        listed = [entry[who] for entry in entries(path) for who in ("mxref", "transformers")]
    else:
        listed = entries(path)
    for row, entry in zip(rows, listed, strict=True):
        if "stats" in entry:
            assert row.values["ms"] == 1e3 * entry["stats"]["median"]
        elif "mb_per_s" in entry:
            assert row.values["moved_bytes"] / row.values["ms"] / 1e3 == pytest.approx(entry["median"], rel=1e-12)
        elif "copy_ms" in entry:
            assert (row.values["ms"], row.values["ceiling_ms"]) == (entry["ms"], entry["copy_ms"])
            assert row.values["ceiling_ms"] / row.values["ms"] == entry["of_a_copy"]
        else:
            numbers = {k: v for k, v in entry.items() if isinstance(v, int | float) and k in row.values}
            assert numbers == {k: row.values[k] for k in numbers} and (numbers or row.note)


def test_the_bytes_of_an_op_are_counted():
    """Bits an element, by hand: a block of 32 with a byte of scale, or of 16; two bytes for each bfloat16."""
    stored = {"mxfp4": 4.25, "nvfp4": 4.5, "mxfp6_e2m3": 6.25, "mxfp6_e3m2": 6.25, "mxfp8_e4m3": 8.25, "mxint8": 8.25}
    for format, bits in stored.items():
        assert moved_bytes("qdq", format, 4096) == 4096 * 4
        assert moved_bytes("quantize", format, 4096) == moved_bytes("dequantize", format, 4096) == 4096 * (2 + bits / 8)
        assert moved_bytes("activate_quantize", format, 4096) == 4096 * (4 + bits / 8)
    assert moved_bytes("quantize, a byte a code", "mxfp4", 4096) == 4096 * (2 + 8.25 / 8)
    assert moved_bytes("swiglu", "-", 4096) == moved_bytes("qdq, scale computed", "nvfp4", 4096) == 4096 * 6


def test_bytes_and_recipe_that_a_record_states_are_taken_from_it():
    row = {"size": [8, 64], "op": "qdq", "format": "mxfp4", "library": "mxref", "ms": 1.0, "copy_ms": 0.5}
    data = GPU | {"dtype": "bfloat16", "rows": [row, row | {"moved_bytes": 7, "recipe": "ocp_even"}]}
    derived, stated = read("elementwise-x.json", json.dumps(data))
    assert (derived.values["moved_bytes"], derived.recipe) == (4 * 8 * 64, "ocp")
    assert (stated.values["moved_bytes"], stated.recipe) == (7, "ocp_even")
    (new,) = read("elementwise-x.json", json.dumps(data | {"rows": [row | {"op": "turn", "moved_bytes": 7}]}))
    assert (new.op, new.values["moved_bytes"]) == ("turn", 7)


def test_products_are_held_against_cublas_of_the_dtype_that_their_dots_need():
    rows = read("matmul-x.json", json.dumps(MATMUL))
    assert len(rows) == len(MATMUL["rows"])
    chosen = rows[4]
    assert (chosen.library, chosen.size, chosen.detail) == ("mxref triton", (16, 512, 256), "a layer")
    assert chosen.values["flops"] / chosen.values["ms"] / 1e9 == MATMUL["rows"][4]["tflops"]
    assert (chosen.values["ceiling"], chosen.values["ceiling_ms"] / chosen.values["ms"]) == ("cublas float64", 0.5)
    assert rows[3].library == "cublas float64" and "ceiling" not in rows[3].values
    assert rows[5].note == "rows 0: codes differ" and "ms" not in rows[5].values
    assert rows[7].values["ceiling"] == "cublas bfloat16" and rows[7].detail == ""
    assert [(row.kind, row.note, row.values) for row in rows[:2]] == [
        ("other", "", {"right": True}),
        ("other", "a bit differs", {"right": False}),
    ]


def test_layers_of_experts_are_held_against_a_copy_of_the_weights_that_they_meet():
    rows = read("moe-x.json", json.dumps(EXPERTS))
    assert [row.library for row in rows] == ["mxref triton", "torch bfloat16, grouped"] * 2 + ["vllm bfloat16"]
    first = rows[0]
    assert (first.op, first.format, first.size, first.detail) == ("moe_experts", "mxfp4 mxfp6_e3m2", (1,), "a model")
    assert first.values["ceiling_ms"] == 0.125 and first.values["moved_bytes"] == 1_000_000
    assert first.values["flops"] == 2.0 * 0.25 * 1e9
    assert rows[4].note == "</script> no memory" and "ms" not in rows[4].values


def test_layers_of_weights_alone_are_named_as_their_conformance_is():
    speed = EXPERTS | {"rows": [EXPERTS["rows"][0] | {"activations": "bfloat16"}]}
    found = judged(speed, conformance(case("mxfp4 None", op="moe_experts", passed=3)))
    assert found == {("mxfp4 unquantized", "mxref triton"): ("passed", "3 passed")}


def test_what_is_in_no_block_format_has_one_name(visit, built):
    """The records say None, bf16 and bfloat16; the page says unquantized, in every filter too, and what it means."""
    stored = {
        name
        for path in RECORDS
        for row in entries(path)
        for facts in (row, row.get("extra_info", {}))
        for name in (facts.get("format") or "-", facts.get("weights", "-"), facts.get("activations", "-"))
    }
    assert {"mxfp4 None", "bf16", "bfloat16"} <= stored
    for row in load():
        formats = (row.format, row.values.get("weights", "-"), row.values.get("activations", "-"))
        assert not {"None", "bf16", "bfloat16"} & set(" ".join(formats).split()), row
    assert {row.format for row in load() if row.op == "eval"} >= {"unquantized", "mxfp4 unquantized", "mxfp4"}
    for show in ("speed", "conformance", "other"):
        page = visit(built, f"show={show}&all=throughput")
        listed = page.evaluate("[...document.querySelectorAll('#facet-format input')].map((e) => e.value)")
        assert "unquantized" in listed and not {"None", "bf16", "bfloat16", "not quantized"} & set(listed)
    words = "[...document.querySelectorAll('#words dt')].map((e) => e.textContent)"
    assert {"unquantized", "two formats"} <= set(visit(built).evaluate(words))
    assert "unquantized" not in visit(built, "op=qdq").evaluate(words)


def test_a_layer_of_vllm_says_what_it_leaves_out():
    fields = {"tokens": 16, "ms": 0.5, "of_a_copy": 0.5, "tflops": 2.0, "peak_bytes": 9, "cosine": 0.9999}
    ways = ("bfloat16 vllm", "vllm decode first", "vllm fused decode")
    rows = [LAYER | fields | {"by": by, "not_counted": "sort by expert"} for by in ways]
    found = read("moe-x.json", json.dumps(EXPERTS | {"vllm": "0.34.0", "rows": rows}))
    assert [row.library for row in found] == ["vllm bfloat16", "vllm, decode first", "vllm, fused decode"]
    assert {row.note for row in found} == {"sort by expert not counted"} and found[0].values["cosine"] == 0.9999
    assert ("vllm", "0.34.0") in found[0].run.versions
    with pytest.raises(RecordError, match="not_counted"):
        read("moe-x.json", json.dumps(EXPERTS | {"rows": [rows[0] | {"not_counted": ""}]}))


def test_rows_of_a_benchmark_are_held_against_their_floor():
    copy, ours, peer, _ = read("benchmarks-cpu.json", json.dumps(BENCH))
    assert copy.run.machine == "A Processor, 2 cores, 1 thread"
    assert ours.values == {"ms": 500.0, "moved_bytes": 10368, "ceiling": "torch copy", "ceiling_ms": 250.0}
    assert (ours.recipe, ours.size, peer.values["same_bits"]) == ("ocp", (64, 64), True)
    lost = json.loads(json.dumps(BENCH))
    lost["benchmarks"][0]["extra_info"]["size"] = [32, 32]
    with pytest.raises(RecordError, match="benchmarks-cpu.json: mxref reference has the floor 'torch copy'"):
        read("benchmarks-cpu.json", json.dumps(lost))


ELEMENTWISE = json.loads((RESULTS / "elementwise-h200.json").read_text(encoding="utf-8"))
CONFORMANCE = json.loads((RESULTS / "conformance-h200.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "x.json: not JSON"),
        ("[1]", "x.json: no known kind of record; it has: list"),
        ('{"speed": 3}', "x.json: no known kind of record; it has: speed; known: element-wise"),
        (json.dumps(GPU | {"dtype": "bfloat16", "rows": []}), "x.json: no rows"),
        (json.dumps(ELEMENTWISE | {"rows": ELEMENTWISE["rows"][:2] + [LAYER]}), "x.json: row 2 is none"),
        (json.dumps(MATMUL | {"rows": [*MATMUL["rows"], {"sweep": "nvfp4", "variant": "d2"}]}), "x.json: row 8 is none"),
        (
            json.dumps(MATMUL | {"rows": [{"gate": "x", "right": True, "speed": 2}]}),
            "x.json: row 0 is none",
        ),
        (json.dumps(CONFORMANCE | {"passed": 1}), "x.json: 1 passed in all, but"),
        (json.dumps(BENCH | {"machine_info": BENCH["machine_info"] | {"quick": True}}), "x.json: a quick run is no record"),
        (json.dumps(BENCH | {"benchmarks": [timed(1.0, op="qdq")]}), "x.json: a record of pytest-benchmark lacks"),
    ],
    ids=["text", "list", "unknown", "empty", "mixed", "sweep", "key", "counts", "quick", "unnamed"],
)
def test_what_is_no_record_is_refused_by_name(text, message):
    with pytest.raises(RecordError, match=re.escape(message)):
        read("x.json", text)


SPEED_ROW = {"size": [8, 64], "op": "qdq", "format": "mxfp4", "library": "mxref", "ms": 1.0, "copy_ms": 0.5}


def elementwise(changes: dict, **top) -> str:
    """A record of one element-wise row, as text; a change to None drops the key."""
    row = {key: value for key, value in (SPEED_ROW | changes).items() if value is not None}
    return json.dumps(GPU | {"dtype": "bfloat16", "rows": [row]} | top)


def product(changes: dict, *others: dict) -> str:
    return json.dumps(MATMUL | {"rows": [*others, MATMUL["rows"][4] | changes]})


def layer(changes: dict) -> str:
    return json.dumps(EXPERTS | {"rows": [EXPERTS["rows"][0] | changes]})


def entry(changes: dict, stats: dict | None = None, **info) -> str:
    """A record of pytest-benchmark of one entry."""
    one = timed(1.0, op="qdq", format="mxfp4", dtype="bfloat16", contender="torchao", size=[64, 64])
    one = one | {"extra_info": one["extra_info"] | changes, "stats": one["stats"] | (stats or {})}
    return json.dumps({"machine_info": BENCH["machine_info"] | info, "benchmarks": [one]})


def verified(**changes) -> str:
    row = {"op": "qdq", "format": "mxfp4", "dtype": "bfloat16", "passed": 1, "failed": 0, "refused": 0, "reasons": []}
    row |= changes
    top = {"backend": "triton", "level": 1, **{key: row[key] for key in ("passed", "failed", "refused")}}
    return json.dumps(GPU | top | {"rows": [row]})


SOUND = [elementwise({}), product({}, MATMUL["rows"][2], MATMUL["rows"][3]), layer({}), entry({}), verified()]
UNSOUND = {
    "NaN": (elementwise({"ms": float("nan")}), "x.json: not JSON: NaN is no number of JSON; accepted: finite numbers"),
    "Infinity": (elementwise({"ms": float("inf")}), "x.json: not JSON: Infinity is no number of JSON"),
    "beyond float64": (elementwise({"ms": 7.5}).replace("7.5", "1e999"), "x.json: row 0: ms is Infinity; accepted"),
    "thousands of digits": (elementwise({"ms": 7.5}).replace("7.5", "9" * 5000), "x.json: not JSON"),
    "nested without end": ("[" * 100_000, "x.json: not JSON"),
    "negative time": (elementwise({"ms": -1.0}), "x.json: row 0: ms is -1.0; accepted: a number above zero"),
    "no time": (elementwise({"ms": 0}), "x.json: row 0: ms is 0; accepted: a number above zero"),
    "smallest time": (elementwise({"ms": 5e-324}), "x.json: row 0: ms is 5e-324; accepted: a number above zero, from 1e-50"),
    "time beyond all": (elementwise({"ms": 1e51}), "x.json: row 0: ms is 1e+51; accepted: a number above zero, from 1e-50"),
    "time as text": (elementwise({"ms": "1.0"}), 'x.json: row 0: ms is "1.0"; accepted'),
    "time as truth": (elementwise({"ms": True}), "x.json: row 0: ms is true; accepted"),
    "floor of zero": (elementwise({"copy_ms": 0.0}), "x.json: row 0: copy_ms is 0.0; accepted"),
    "no floor": (elementwise({"copy_ms": None}), "x.json: row 0 is none of its kind; it has: format, library, ms"),
    "size of zero": (elementwise({"size": [0, 64]}), "x.json: row 0: size is [0, 64]; accepted: a list of whole numbers"),
    "negative size": (elementwise({"size": [-8, 64]}), "x.json: row 0: size is [-8, 64]; accepted"),
    "broken size": (elementwise({"size": [8.5, 64]}), "x.json: row 0: size is [8.5, 64]; accepted"),
    "size as text": (elementwise({"size": "8x64"}), 'x.json: row 0: size is "8x64"; accepted'),
    "no size": (elementwise({"size": []}), "x.json: row 0: size is []; accepted"),
    "library no text": (elementwise({"library": 7}), "x.json: row 0: library is 7; accepted: text"),
    "op no text": (elementwise({"op": ["qdq"]}), 'x.json: row 0: op is ["qdq"]; accepted: text'),
    "unknown op": (elementwise({"op": "turn"}), "x.json: a record of element-wise kernels: op 'turn' names no moved_bytes"),
    "no device": (elementwise({}, device=None), "x.json: device is null; accepted: text that is not empty"),
    "rows no list": (elementwise({}, rows={"a": SPEED_ROW}), 'x.json: rows is {"a": {"size"'),
    "row no object": (elementwise({}, rows=[3]), "x.json: rows is [3]; accepted: a list of objects"),
    "share of nothing": (product({}), "x.json: row 0 is a share of cuBLAS, which has no row of this product"),
    "m of zero": (product({"m": 0}, MATMUL["rows"][2]), "x.json: row 1: m is 0; accepted: a whole number above zero"),
    "layers no shapes": (json.dumps(MATMUL | {"layers": {"a": [1]}}), 'x.json: layers is {"a": [1]}; accepted: an object'),
    "tokens of a half": (layer({"tokens": 0.5}), "x.json: row 0: tokens is 0.5; accepted"),
    "negative share": (layer({"of_a_copy": -0.5}), "x.json: row 0: of_a_copy is -0.5; accepted"),
    "too much in all": (layer({"ms": 1e300}), "x.json: row 0: ms is 1e+300; accepted"),
    "median": (entry({}, {"median": 0.0}), "x.json: row 0, stats: median is 0.0; accepted"),
    "contender no text": (entry({"contender": {"a": 1}}), 'x.json: row 0, extra_info: contender is {"a": 1}; accepted'),
    "no format": (entry({"format": None}), "x.json: row 0, extra_info: format is null; accepted: text"),
    "a list in a table": (entry({"more": [1]}), "x.json: qdq of torchao: more is [1]; accepted: a finite number, text"),
    "extra_info no object": (
        json.dumps(BENCH | {"benchmarks": [{"extra_info": 3, "stats": {}}]}),
        "x.json: row 0: extra_info is 3; accepted: an object",
    ),
    "no processor": (entry({}, device=None), "x.json, machine_info: device is null; accepted: text"),
    "threads": (entry({}, threads=0), "x.json, machine_info: threads is 0; accepted: a whole number above zero"),
    "version": (entry({}, torch=2.13), "x.json: torch is 2.13; accepted: text"),
    "negative cases": (verified(failed=-1), "x.json: failed is -1; accepted: a whole number, zero or more"),
    "reasons as text": (verified(reasons="none"), 'x.json: row 0: reasons is "none"; accepted: a list of texts'),
    "known cases in rows alone": (verified(known=1), "x.json: 0 known in all, but 1 in its rows"),
    "a row twice": (
        elementwise({}, rows=[SPEED_ROW, SPEED_ROW | {"ms": 2.0}]),
        'x.json: two rows of one op, format, dtype, library, recipe, size and detail: "qdq", "mxfp4", "bfloat16", "mxref',
    ),
    "cases of no device": (verified().replace('"device"', '"devise"'), "x.json: no device; a record of conformance names"),
}  # fmt: skip


@pytest.mark.parametrize("text", SOUND)
def test_what_the_unsound_records_are_made_from_is_sound(text):
    assert read("x.json", text)


@pytest.mark.parametrize("what", UNSOUND)
def test_a_value_that_nothing_can_be_is_refused_by_name(what):
    text, message = UNSOUND[what]
    with pytest.raises(RecordError, match=f"^{re.escape(message)}"):
        read("x.json", text)


def places(value, path=()):
    """The path to every value in a record."""
    for key, within in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield *path, key
        yield from places(within, (*path, key))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_whatever_stands_in_the_place_of_a_value_is_refused_or_read(path):
    """Never another error, and never a row that a page cannot show."""
    data = json.loads(path.read_text(encoding="utf-8"))
    listed = "benchmarks" if "benchmarks" in data else "rows"
    rows = list({(*sorted(row), row.get("kernel")): row for row in data[listed]}.values())[:4]  # one of each form
    totals = {
        count: sum(row.get(count, 0) for row in rows) for count in ("passed", "failed", "known", "refused") if count in data
    }
    small = data | totals | {listed: rows, "failures": []}
    for *within, key in list(places(small)):
        for value in (None, [], {}, [None], "", "x", -1, 0, 2**60, 1e308, True):
            changed = json.loads(json.dumps(small))
            place = changed
            for step in within:
                place = place[step]
            place[key] = value
            try:
                found = read(path.name, json.dumps(changed))
            except RecordError:
                continue
            for row in found:
                texts = row.op, row.format, row.dtype, row.library, row.recipe, row.detail, row.note
                assert all(isinstance(text, str) for text in texts), (within, key, value)
                assert all(isinstance(length, int) and length > 0 for length in row.size), (within, key, value)
                assert json.dumps(row.values, allow_nan=False) and row.values.get("ms", 1) > 0, (within, key, value)


def test_a_file_that_is_no_text_and_a_folder_without_records_are_refused(tmp_path):
    with pytest.raises(RecordError, match="no records; accepted: a folder with at least one .json file"):
        load(tmp_path)
    (tmp_path / "x.json").write_bytes(b"\xff\xfe")
    with pytest.raises(RecordError, match="x.json: cannot be read as text of UTF-8"):
        load(tmp_path)


# ---- what conformance says of a speed ---------------------------------------------------------------------------------


def case(format: str, op: str = "matmul", dtype: str = "bfloat16", **counts) -> dict:
    counts = {"passed": 0, "failed": 0, "refused": 0, "reasons": ["why"] if "refused" in counts else []} | counts
    return {"op": op, "format": format, "dtype": dtype} | counts


def conformance(*rows: dict, backend: str = "triton", **top) -> dict:
    totals = {name: sum(row.get(name, 0) for row in rows) for name in ("passed", "failed", "known", "refused")}
    return GPU | {"backend": backend, "level": 2, "rows": list(rows)} | totals | top


def judged(*records: dict, today=lambda *_: None) -> dict[tuple[str, str], tuple[str, str]]:
    """Outcome and words by format and library."""
    rows = [row for record in records for row in read("x.json", json.dumps(record))]
    return {
        (rows[i].format, rows[i].library): (standing.outcome, standing.words)
        for i, standing in standings(rows, today).items()
    }


MXFP8, MXFP4 = ("mxfp8_e4m3", "mxref triton"), ("mxfp4", "mxref triton")


def test_a_speed_is_red_where_any_case_of_its_op_with_its_format_failed():
    found = judged(
        MATMUL, conformance(case("mxfp4 mxfp4", passed=3), case("mxfp4 mxint8", passed=5, failed=1, dtype="float32"))
    )
    assert found[MXFP4] == ("failed", "1 failed: matmul of mxfp4 × mxint8")
    assert found[MXFP8][0] == "no record"
    found = judged(
        MATMUL, conformance(case("mxfp4 mxint8", known=2, known_reasons=["as known"]), case("mxfp4 mxfp4", passed=3))
    )
    assert found[MXFP4] == ("failed", "2 failed: matmul of mxfp4 × mxint8")
    assert judged(MATMUL, conformance(case("mxfp4 mxfp4", op="qdq", failed=1)))[MXFP4][0] == "no record"
    assert judged(MATMUL, conformance(case("mxfp4 mxfp4", failed=1), device="NVIDIA Other"))[MXFP4][0] == "no record"
    assert judged(MATMUL, conformance(case("mxfp4 mxfp4", failed=1), backend="other"))[MXFP4][0] == "no record"


def test_a_speed_is_refused_where_no_case_of_its_own_passed_or_today():
    cases = conformance(case("mxfp4 mxfp4", refused=2), case("mxfp8_e4m3 mxfp8_e4m3", passed=2, refused=1))
    found = judged(MATMUL, cases)
    assert found[MXFP4] == ("refused", "2 refused, none passed: why")
    assert found[MXFP8] == found["mxfp8_e4m3", "mxref triton, portable"] == ("partly refused", "2 passed, 1 refused: why")
    found = judged(MATMUL, cases, today=lambda op, backend, format: f"not {op} {format} {backend}")
    assert found[MXFP8] == ("refused", "refused by the code that built this page: not matmul mxfp8_e4m3 triton")
    passed = conformance(case("mxfp4 mxfp4", passed=2), case("mxfp4 mxfp4", dtype="float32", refused=7))
    assert judged(MATMUL, passed)[MXFP4] == ("passed", "2 passed")  # its own dtype


def test_other_libraries_and_the_reference_are_not_judged_without_cases():
    assert {library for _, library in judged(MATMUL)} == {"mxref triton", "mxref triton, portable"}
    assert judged(BENCH) == {("nvfp4", "mxref triton"): ("no record", "no conformance record on this device")}
    assert judged(EXPERTS).keys() == {("mxfp4 mxfp6_e3m2", "mxref triton")}


def test_the_code_is_asked_what_it_refuses():
    """What a kernel takes in one case it takes, though it refuses others, such as recipes."""
    assert refused_today("qdq", "inductor", "mxfp4") is refused_today("qdq", "nobody", "mxfp4") is None
    assert "scale format" in refused_today("encode", "triton", "e8m0")


def test_the_code_is_asked_by_the_name_that_the_records_have(monkeypatch):
    """A case of weights alone is "mxfp4 None" there."""
    nothing = SimpleNamespace(accepts=lambda *_, **__: "nothing at all")
    monkeypatch.setattr("benchmarks.dashboard.standing.registry.kernel", lambda op, backend: nothing)
    assert refused_today("moe_experts", "a backend", "mxfp4 unquantized") == "nothing at all"


# ---- history --------------------------------------------------------------------------------------------------------


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)


def commit(folder: Path, texts: dict[str, str | None], when: str) -> None:
    for name, text in texts.items():
        if text is None:
            (folder / name).unlink()
        else:
            (folder / name).write_text(text, encoding="utf-8")
    git(folder, "add", "-A")
    subprocess.run(
        ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@example.org", "commit", "-qm", when],
        check=True, env={"GIT_COMMITTER_DATE": when, "GIT_AUTHOR_DATE": when, "PATH": "/usr/bin:/bin:/usr/local/bin"},
    )  # fmt: skip


def test_history_is_every_committed_version_and_what_is_not_committed(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    git(tmp_path, "init", "-q")
    slower = json.loads(json.dumps(EXPERTS))
    slower["rows"][0]["ms"] = 0.75
    commit(folder, {"moe.json": json.dumps(slower), "old.json": '{"cases": 1}'}, "2026-12-01T00:00:00+00:00")
    commit(folder, {"moe.json": json.dumps(EXPERTS), "old.json": None}, "2026-12-02T00:00:00+00:00")
    (folder / "bench.json").write_text(json.dumps(BENCH))
    found = history(folder)
    assert [(v.record, v.committed[:10], bool(v.commit)) for v in found.versions] == [
        ("moe.json", "2026-12-01", True),
        ("moe.json", "2026-12-02", True),
        ("bench.json", "", False),
    ]
    assert [version.rows[0].values["ms"] for version in found.versions] == [0.75, 0.25, 250.0]
    assert len(found.unread) == 1 and "old.json: no known kind" in found.unread[0] and not found.missing


def test_a_version_is_judged_by_what_is_known_until_the_next_of_its_record(tmp_path):
    folder, out = tmp_path / "results", tmp_path / "out"
    folder.mkdir()
    git(tmp_path, "init", "-q")
    fine, red = (conformance(case("mxfp4 mxfp4", **{outcome: 1})) for outcome in ("passed", "failed"))
    slower = json.loads(json.dumps(MATMUL))
    slower["rows"][-1]["ms"] = 0.75
    commit(folder, {"matmul.json": json.dumps(slower)}, "2026-12-01T00:00:00+00:00")
    commit(folder, {"cases.json": json.dumps(red)}, "2026-12-02T00:00:00+00:00")
    commit(folder, {"cases.json": json.dumps(fine), "matmul.json": json.dumps(MATMUL)}, "2026-12-03T00:00:00+00:00")
    assert main(["--out", str(out), "--results", str(folder)]) == 0
    versions = [v for v in held(out / "index.html")["versions"] if v["record"] == "matmul.json"]
    assert [v["rows"][-1]["standing"]["outcome"] for v in versions] == ["failed", "passed"]
    (folder / "cases.json").write_text(json.dumps(red))  # not committed: the newest is red again
    assert main(["--out", str(out), "--results", str(folder)]) == 0
    versions = [v for v in held(out / "index.html")["versions"] if v["record"] == "matmul.json"]
    assert [v["rows"][-1]["standing"]["outcome"] for v in versions] == ["failed", "failed"]


def test_the_history_says_when_conformance_had_failed(visit, tmp_path):
    """One product's is red between two versions: its line has no number there, and the note names that commit."""
    folder, out = tmp_path / "results", tmp_path / "out"
    folder.mkdir()
    git(tmp_path, "init", "-q")
    fine, red = (conformance(case("mxfp4 mxfp4", **{outcome: 1})) for outcome in ("passed", "failed"))
    for day, cases in enumerate((fine, red, fine), start=1):
        data = json.loads(json.dumps(MATMUL))
        data["rows"][-1]["ms"] = 0.25 + day
        texts = {"cases.json": json.dumps(cases), "matmul.json": json.dumps(data)}
        commit(folder, texts, f"2026-12-0{day}T00:00:00+00:00")
    assert main(["--out", str(out), "--results", str(folder)]) == 0
    page = visit(out / "index.html", "format=mxfp4")
    (chart,) = charts(page, "history")
    ours = re.search(r"mxref triton: ([^;]*)", chart["description"])[1]
    assert (
        re.sub(r"[0-9a-f]{7,} ", "", ours) == "12-01 107 GFLOP/s, 12-03 41.3 GFLOP/s"
    )  # 2 · 512 · 512 · 256 in 1.25 and 3.25 ms
    notes = page.locator("#history figure p").all_text_contents()
    assert [re.sub(r"[0-9a-f]{7,} ", "", note) for note in notes] == [
        "✗ failed conformance, so there is no number at 12-02: mxfp4: 1 failed: matmul of mxfp4"
    ]


def test_without_git_there_is_no_history_and_a_reason(tmp_path):
    (tmp_path / "moe.json").write_text(json.dumps(EXPERTS))
    assert history(tmp_path).missing == "no git history where this was built" and not history(tmp_path).versions


def test_the_newest_version_of_each_record_is_the_one_that_is_shown():
    found = history()
    if found.missing:
        pytest.skip(found.missing)
    newest = {version.record: version.rows for version in found.versions}
    assert {path.name: newest[path.name] for path in RECORDS} == {
        path.name: read(path.name, path.read_text(encoding="utf-8")) for path in RECORDS
    }


# ---- the page as a file ---------------------------------------------------------------------------------------------


def sample_folder(folder: Path) -> Path:
    """All records, and one of each kind that is not there."""
    shutil.copytree(RESULTS, folder, dirs_exist_ok=True)
    for name, data in (("matmul-test.json", MATMUL), ("moe-test.json", EXPERTS), ("benchmarks-test.json", BENCH)):
        (folder / name).write_text(json.dumps(data), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The page of the repository's records, with their history."""
    out = tmp_path_factory.mktemp("built")
    assert main(["--out", str(out)]) == 0
    return out / "index.html"


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> tuple[Path, Path]:
    """A page of more records and without a history, and their folder."""
    folder, out = tmp_path_factory.mktemp("results"), tmp_path_factory.mktemp("sample")
    assert main(["--out", str(out), "--results", str(sample_folder(folder))]) == 0
    return out / "index.html", folder


def held(page: Path) -> dict:
    """The data in a page."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)[1])


def test_the_page_holds_every_row(sample):
    page, folder = sample
    data, rows = held(page), load(folder)
    assert len(data["rows"]) == len(rows)
    for shown, row in zip(data["rows"], rows):
        run = data["runs"][shown["run"]]
        assert (run["record"], run["machine"], run["commit"], run["date"]) == (
            row.run.record,
            row.run.machine,
            row.run.commit,
            row.run.date,
        )
        assert run["versions"] == ", ".join(f"{name} {version}" for name, version in row.run.versions)
        assert shown.get("values", {}) == row.values and shown["op"] == row.op and shown.get("note", "") == row.note


def test_the_page_fetches_nothing(built, sample):
    for page in (built, sample[0]):
        text = page.read_text(encoding="utf-8")
        assert set(re.findall(r"https?://[^\s\"'<)]+", text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
        assert not re.search(r"\ssrc=|@import|url\(|fetch\(|XMLHttpRequest|import\(", text)
        assert re.findall(r'<link[^>]*href="([^"]*)"', text) == ["data:,"]
        assert text.count("</script") == 2 and "<!--" not in text
        assert list(page.parent.iterdir()) == [page]


def test_the_program_says_what_is_wrong(tmp_path, capsys):
    folder, out = tmp_path / "results", tmp_path / "out"
    folder.mkdir()
    (folder / "odd.json").write_text('{"speed": 3}')
    assert main(["--out", str(out), "--results", str(folder)]) == 1
    assert "odd.json" in capsys.readouterr().err and not out.exists()
    (folder / "odd.json").unlink()
    assert main(["--out", str(out), "--results", str(folder)]) == 1
    assert f"{folder}: no records" in capsys.readouterr().err and not out.exists()
    (tmp_path / "file").write_text("")
    assert main(["--out", str(tmp_path / "file")]) == 1 and "--out" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["--out", str(out), "--results", str(tmp_path / "nowhere")])
    assert stopped.value.code == 2
    shown = subprocess.run(
        [sys.executable, "-m", "benchmarks.dashboard", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert shown.returncode == 0 and "--out DIR" in shown.stdout


def test_the_page_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    (tmp_path / "index.html").write_text("as it was")
    monkeypatch.setattr("benchmarks.dashboard.__main__.os.replace", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    assert main(["--out", str(tmp_path)]) == 1
    assert (tmp_path / "index.html").read_text() == "as it was" and len(list(tmp_path.iterdir())) == 1


# what would end the script element, open a comment in it, stand for a part of the page, or is no text of UTF-8
HOSTILE = '<!--<script></script>--> <!--book--> <!--data--> </title>& \u2028\u2029 "\\ \ud800 \\1 \\g<0>'


def hostile(folder: Path) -> Path:
    """Records whose every text that may be free is hostile."""
    rows = [row | {"model": HOSTILE, "by": HOSTILE + row["by"]} for row in EXPERTS["rows"]]
    (folder / "moe.json").write_text(json.dumps(EXPERTS | {"rows": rows}))
    (folder / "bench.json").write_text(entry({"op": HOSTILE, "contender": HOSTILE, HOSTILE: HOSTILE}, device=HOSTILE))
    return folder


def test_no_text_of_a_record_or_of_an_option_is_markup(tmp_path):
    out, folder = tmp_path / "out", tmp_path / "results"
    folder.mkdir()
    assert main(["--out", str(out), "--results", str(hostile(folder)), "--book", '"><img src=x onerror=alert(1)>']) == 0
    text = (out / "index.html").read_text(encoding="utf-8")
    assert text.count("<script") == text.count("</script") == 2 and "<!--" not in text and "<img" not in text
    assert held(out / "index.html")["rows"][0]["op"] == HOSTILE
    assert 'href="&quot;&gt;&lt;img src=x onerror=alert(1)&gt;"' in text


# ---- the page in a browser ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium():
    """A headless Chromium that has no network; what it would ask for is refused, and so seen."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright, which drives the browser, is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium or Chrome on the PATH: the page was not driven")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium):
    """A function that opens a page with a hash, at a width; an error in the page, or a request, fails the test."""
    problems, contexts = [], []

    def visit(path: Path, state: str = "", width: int = 1280, **options):
        contexts.append(chromium.new_context(viewport={"width": width, "height": 900}, accept_downloads=True, **options))
        page = contexts[-1].new_page()
        page.set_default_timeout(5000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("request", lambda r: problems.append(r.url) if r.url.split(":")[0] not in ("file", "data", "blob") else None)
        page.goto(f"file://{path}#{state}")
        return page

    yield visit
    for context in contexts:
        context.close()
    assert problems == []


def table(page) -> list[dict[str, str]]:
    """The rows of the first table, by the names of its columns."""
    names, *rows = page.evaluate(
        "[...document.querySelector('#rows table').rows].map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    return [dict(zip((re.sub(" [▲▼]$", "", name) for name in names), row, strict=True)) for row in rows]


def charts(page, section: str) -> list[dict]:
    """Caption, machines and bars or points of each chart of a section."""
    return page.evaluate(
        """(id) => [...document.querySelectorAll(`#${id} figure`)].map((figure) => ({
             caption: figure.querySelector("figcaption").textContent,
             description: figure.querySelector("desc").textContent,
             machines: [...new Set([...figure.querySelectorAll("[data-machine]"), figure].map((e) => e.dataset.machine))],
             bars: figure.querySelectorAll(".bar").length,
             series: [...figure.querySelectorAll(".series")].map((line) => line.querySelectorAll("path").length),
           }))""",
        section,
    )


def downloaded(page) -> list[dict[str, str]]:
    with page.expect_download() as started:
        page.get_by_role("button", name="Download CSV").first.click()
    return list(csv.DictReader(io.StringIO(started.value.path().read_text(encoding="utf-8"))))


def pick(page, facet: str, *values: str) -> None:
    """Open a filter, tick values, close it."""
    page.locator(f"#facet-{facet} summary").click()
    for value in values:
        page.locator(f"#facet-{facet} label", has=page.locator(f"input[value='{value}']")).click()
    page.keyboard.press("Escape")


def size_of(row) -> str:
    return f"[{', '.join(map(str, row.size))}]" if row.size else ""


def test_hostile_texts_are_shown_as_they_are(visit, tmp_path):
    assert main(["--out", str(tmp_path / "out"), "--results", str(hostile(tmp_path))]) == 0
    page = visit(tmp_path / "out" / "index.html")
    shown = HOSTILE.replace("\ud800", "\ufffd")  # a browser's text has no lone surrogates
    assert shown in [row["library"].replace("\ud800", "\ufffd") for row in table(page)]
    assert page.locator("img, #rows script").count() == 0


def test_filters_choose_rows_and_charts_and_stand_in_the_address(visit, built):
    page = visit(built)
    speeds = [row for row in load() if row.kind == "speed"]
    assert len(table(page)) == len(speeds)
    pick(page, "op", "quantize", "dequantize")
    pick(page, "library", "torchao")
    pick(page, "size", "[8192, 8192]")
    wanted = [
        r for r in speeds if r.op in ("quantize", "dequantize") and r.library == "torchao" and size_of(r) == "[8192, 8192]"
    ]
    assert wanted and Counter((r["op"], r["format"]) for r in table(page)) == Counter((r.op, r.format) for r in wanted)
    shown = charts(page, "throughput")
    assert {chart["caption"].split(",")[0] for chart in shown} == {"quantize", "dequantize"}
    (run,) = {row.run for row in wanted}
    assert all(chart["caption"].endswith(f"{run.record} · commit {run.commit}, {run.date}") for chart in shown)
    assert sum(chart["bars"] for chart in shown) == len(wanted)
    assert page.locator("#status").text_content() == f"{len(wanted)} of {len(speeds)} rows, 1 device"
    assert {row["size"] for row in table(visit(built, "size=[16, 2048]"))} == {"[16, 2048]"}
    again = visit(built, page.evaluate("location.hash.slice(1)"))
    assert table(again) == table(page) and charts(again, "throughput") == shown
    again.get_by_role("button", name="Clear filters").click()
    assert len(table(again)) == len(speeds)


def test_a_filter_counts_what_the_others_leave(visit, built):
    page = visit(built, "op=qdq")
    counted = "[...document.querySelectorAll('#facet-{} label')].map((e) => [e.firstChild.value, e.lastChild.textContent])"
    speeds = [row for row in load() if row.kind == "speed"]
    assert dict(page.evaluate(counted.format("op"))) == {k: str(n) for k, n in Counter(row.op for row in speeds).items()}
    left = Counter(format for row in speeds if row.op == "qdq" for format in row.format.split())
    shown = dict(page.evaluate(counted.format("format")))
    assert shown == {format: str(left[format]) for row in speeds for format in row.format.split()} and shown["e2m1"] == "0"
    pick(page, "format", "nvfp4")
    assert page.locator("#status").text_content().startswith(f"{left['nvfp4']} of {len(speeds)} rows")
    ops = Counter(row.op for row in speeds if "nvfp4" in row.format.split())
    assert dict(page.evaluate(counted.format("op"))) == {row.op: str(ops[row.op]) for row in speeds}


def test_a_bar_says_throughput_and_share_of_the_ceiling(visit, built):
    page = visit(built, "op=quantize&format=nvfp4&library=mxref triton&size=[8192, 8192]")
    (entry,) = [
        e
        for e in entries(RESULTS / "elementwise-h200.json")
        if (e["op"], e["format"], e["library"], e["size"]) == ("quantize", "nvfp4", "mxref", [8192, 8192])
    ]
    rate = 8192 * 8192 * (2 + 4.5 / 8) / entry["ms"] / 1e9
    (chart,) = charts(page, "throughput")
    assert chart["description"] == (
        f"throughput, share of the ceiling; nvfp4 · mxref triton · nvidia °: {rate:#.3g} TB/s, {entry['of_a_copy']:.2f}; "
        "ceiling: torch copy"
    )
    bar, mark = page.evaluate(
        "[document.querySelector('.bar rect').width.baseVal.value,"
        " document.querySelector('.bar line').x1.baseVal.value - document.querySelector('.bar rect').x.baseVal.value]"
    )
    assert bar / mark == pytest.approx(entry["of_a_copy"], rel=1e-4)
    page.get_by_role("combobox", name=re.compile("^Measure")).select_option("time")
    assert f"{1e3 * entry['ms']:#.3g} µs" in charts(page, "throughput")[0]["description"]
    page.get_by_role("combobox", name=re.compile("^Measure")).select_option("share")
    assert f": {entry['of_a_copy']:#.3g}" in charts(page, "throughput")[0]["description"]


def test_products_show_operations_against_cublas(visit, sample):
    page = visit(sample[0], "op=matmul&format=mxfp8_e4m3&machine=NVIDIA Test")
    (chart,) = charts(page, "throughput")
    assert re.search(r"mxfp8_e4m3 · mxref triton – [a-z ]+: 2.10 GFLOP/s, 0.50", chart["description"])
    assert "rows 0: codes differ" in chart["description"]
    page = visit(sample[0], "op=moe_experts&library=mxref triton&size=[1]&machine=NVIDIA Test")
    assert (
        "mxref triton – no record: 4.00 GB/s, 0.50" in charts(page, "throughput")[0]["description"]
    )  # a megabyte in a quarter of a ms
    page.get_by_role("combobox", name=re.compile("^Measure")).select_option("operations")
    assert "mxref triton – no record: 2.00 TFLOP/s, 0.50" in charts(page, "throughput")[0]["description"]
    assert charts(visit(sample[0], "op=moe_experts&machine=NVIDIA Test"), "sweep")[0]["series"] == [2, 2]


def test_a_share_of_another_ceiling_says_of_which(visit, tmp_path):
    """Each product by a kernel beside cuBLAS in bfloat16, and one in float64 too, which its dots need."""
    product = {"m": 512, "n": 512, "k": 256, "tflops": 1.0}
    ms = {"mxfp4": 2.0, "nvfp4": 4.0, "mxfp8_e4m3": 5.0}
    rows = [product | {"format": format, "kernel": "cublas bfloat16", "ms": 1.0} for format in ms]
    rows.append(product | {"format": "mxfp8_e4m3", "kernel": "cublas float64", "ms": 4.0})
    rows += [product | {"format": format, "kernel": "chosen", "path": "Fused()", "ms": ms[format]} for format in ms]
    (tmp_path / "matmul.json").write_text(json.dumps(MATMUL | {"rows": rows}))
    assert main(["--out", str(tmp_path / "out"), "--results", str(tmp_path)]) == 0
    page = visit(tmp_path / "out" / "index.html")
    texts = "[...document.querySelectorAll('#throughput g.bar > text:last-child')].map((e) => e.textContent)"
    shares = [text.split(", ", 1)[1] for text in page.evaluate(texts)]
    assert sorted(shares) == ["0.25", "0.50", "0.80 of cublas float64"]
    assert "ceiling: cublas bfloat16, or what a number names" in page.locator("#throughput figure").text_content()
    page.get_by_role("combobox", name=re.compile("^Measure")).select_option("share")
    assert sorted(page.evaluate(texts)) == ["0.250", "0.500", "0.800 of cublas float64"]


def test_what_has_no_number_says_so_and_why_in_words(visit, built, sample):
    failures = [row for row in entries(RESULTS / "moe-h200.json") if "failed" in row]
    assert failures and all(re.match(r"\w+Error: ", row["failed"]) for row in failures)
    for width in (390, 1280):
        page = visit(built, "op=moe_experts&format=mxfp8_e4m3&library=vllm bfloat16&all=throughput", width=width)
        figures = page.locator("#throughput figure")
        assert figures.count() == len({(row["model"], row["tokens"]) for row in failures})
        assert "Error" not in page.locator("main").text_content()
        for i in range(figures.count()):
            assert figures.nth(i).locator("g.bar > text:last-child").text_content() == "no number"
            why = failures[0]["failed"].split(": ", 1)[1]
            assert f"no number for mxfp8_e4m3 · vllm bfloat16: {why}" in figures.nth(i).locator("p").all_text_contents()
            assert why in charts(page, "throughput")[i]["description"]
    rows = table(page)
    assert {(row["ms"], row["note"]) for row in rows} == {("no number", why)}
    page = visit(sample[0], "op=moe_experts&size=[1]&machine=NVIDIA Test")
    assert (
        "no number for mxfp4 mxfp6_e3m2 · vllm bfloat16: </script> no memory" in page.locator("#throughput").text_content()
    )


def test_each_chart_names_its_ceiling_and_the_page_says_once_what_one_is(visit, built):
    page = visit(built, "all=throughput&all=sweep&all=history")
    ceilings = {row.values["ceiling"] for row in load() if "ceiling" in row.values}
    unnamed = page.evaluate(
        """(names) => [...document.querySelectorAll("#throughput figure, #sweep figure, #history figure")]
             .filter((figure) => figure.querySelector("line.ceiling, .dashed"))
             .filter((figure) => !names.some((name) => figure.textContent.includes(`ceiling: ${name}`))).length""",
        sorted(ceilings),
    )
    assert unnamed == 0 and page.locator("#throughput line.ceiling").count() > 100
    said = page.evaluate("[...document.querySelectorAll('#words dt')].filter((e) => e.textContent.startsWith('ceiling'))"
                         ".map((e) => e.nextSibling.textContent)")  # fmt: skip
    assert len(said) == 1 and "timed in the same run" in said[0]
    texts = page.evaluate("[...document.querySelectorAll('p, dt, dd, figure, summary')].map((e) => e.innerText)")
    assert not [text for text in texts if "floor" in text]


@pytest.fixture(scope="module")
def red(tmp_path_factory) -> Path:
    """A page on which one product failed, one is refused and one is not verified."""
    folder, out = tmp_path_factory.mktemp("red"), tmp_path_factory.mktemp("red_page")
    cases = conformance(
        case("mxfp4 mxint8", failed=1), case("mxfp4 mxfp4", passed=3), case("mxfp8_e4m3 mxfp8_e4m3", refused=2)
    )
    for name, data in (("matmul", MATMUL), ("moe", EXPERTS), ("conformance", cases)):
        (folder / f"{name}.json").write_text(json.dumps(data))
    assert main(["--out", str(out), "--results", str(folder)]) == 0
    return out / "index.html"


def test_a_red_gate_shows_no_number(visit, red):
    page = visit(red, "op=matmul&format=mxfp4&all=throughput&all=sweep&all=ratios&all=variants")
    (chart,) = charts(page, "throughput")
    assert chart["description"] == "throughput; mxfp4 · mxref triton ✗: failed conformance"
    assert (
        "✗ failed conformance, so there is no number: mxfp4: 1 failed: matmul of mxfp4 × mxint8"
        in page.locator("#throughput figure").text_content()
    )
    assert page.locator("#throughput rect").count() == page.locator("#whose rect").count()
    assert charts(page, "ratios") == charts(page, "variants") == charts(page, "sweep") == []
    (row,) = [row for row in table(page) if row["library"] == "mxref triton"]
    assert row["ms"] == "failed conformance" and row["TFLOP/s"] == "" and "of the ceiling" not in row
    assert row["conformance"] == "1 failed: matmul of mxfp4 × mxint8"
    assert [r["ms"] for r in downloaded(page) if r["library"] == "mxref triton"] == ["failed conformance"]
    page = visit(red, "show=conformance")
    assert "no speed is shown: 1 failed: matmul of mxfp4 × mxint8" in page.locator("#matrix").text_content()


def test_a_refused_or_unverified_kernel_has_a_dashed_bar_and_a_note(visit, red):
    page = visit(red, "op=matmul&format=mxfp8_e4m3")
    figure = page.locator("#throughput figure").first
    assert figure.locator("rect.hollow").count() == 1  # its portable variant has no number
    assert "– refused: answered by the reference: mxfp8_e4m3: 2 refused, none passed: why" in figure.text_content()
    label = "[...document.querySelectorAll('#throughput tspan')].map((e) => [e.textContent, getComputedStyle(e).fill])"
    marks = page.evaluate(label)
    assert [text for text, _ in marks] == [" – refused", " – refused"]
    plain = page.evaluate("getComputedStyle(document.querySelector('#throughput svg text')).fill")
    assert all(colour != plain for _, colour in marks)
    page = visit(red, "op=moe_experts&size=[16]")
    assert page.locator("#throughput rect.hollow").count() == 1
    assert (
        "– no record: mxfp4 mxfp6_e3m2: no conformance record on this device" in page.locator("#throughput").text_content()
    )


def test_words_are_said_where_they_are_met(visit, built, red):
    words = "[...document.querySelectorAll('#words dt')].map((e) => e.textContent)"
    assert {"folded", "portable", "decode first"} <= set(visit(built).evaluate(words))
    page = visit(red, "op=matmul")
    assert "portable" in page.evaluate(words) and "folded" not in page.evaluate(words)
    assert page.evaluate("[...document.querySelectorAll('#words dt')].every((e) => e.nextSibling.textContent.length > 20)")
    titles = page.evaluate("[...document.querySelectorAll('g.bar title')].map((e) => e.textContent)")
    assert any("portable: nothing that only" in title for title in titles)


def test_words_of_labels_are_folded_and_what_a_ceiling_is_stands(visit, built):
    page = visit(built)
    label = page.locator("#words dt", has_text="in brackets")
    assert page.locator("#words dt", has_text="ceiling, the upright mark").is_visible() and not label.is_visible()
    page.locator("#words summary").focus()
    page.keyboard.press("Enter")
    assert label.is_visible() and page.locator("#words dt", has_text="bytes of moe_experts").count() == 1
    pick(page, "op", "qdq")  # drawn anew, and not folded back
    assert label.is_visible() and page.locator("#words dt", has_text="bytes of moe_experts").count() == 0


def test_own_variants_are_told_from_other_libraries(visit, built):
    page = visit(built, "all=ratios&all=variants")
    for section, ours in (("ratios", False), ("variants", True)):
        shown = charts(page, section)
        assert shown
        for chart in shown:
            bars = [text for text in chart["description"].split("; ") if text.endswith("×")]
            assert bars and all(("mxref" in text) == ours for text in bars), (section, bars)
    page.locator("#facet-library summary").click()
    listed = page.evaluate(
        "[...document.querySelectorAll('#facet-library b, #facet-library input')].map((e) => e.value || e.textContent)"
    )
    middle = listed.index("other libraries")
    assert listed[0] == "mxref's own" and all(name.startswith("mxref") for name in listed[1:middle])
    assert listed[middle + 1 :] and not any(name.startswith("mxref") for name in listed[middle + 1 :])


def test_other_libraries_are_compared_within_a_run(visit, built):
    state = "op=dequantize&format=mxfp8_e4m3&size=[8192, 8192]"
    page = visit(built, state)
    ms = {
        e["library"]: e["ms"]
        for e in entries(RESULTS / "elementwise-h200.json")
        if (e["op"], e["format"], e["size"]) == ("dequantize", "mxfp8_e4m3", [8192, 8192])
    }
    (chart,) = charts(page, "ratios")
    assert f"mxfp8_e4m3 · torchao: {ms['mxref'] / ms['torchao']:#.3g} ×" in chart["description"]
    page.get_by_label("Compare with").select_option("torchao")
    (chart,) = charts(page, "ratios")
    assert charts(page, "variants") == []
    assert f"mxfp8_e4m3 · mxref triton · ocp: {ms['torchao'] / ms['mxref']:#.3g} ×" in chart["description"]


def test_the_csv_is_the_rows_that_are_shown_with_every_digit(visit, built):
    def key(op, format, dtype, library, recipe, size, detail, record, **_):
        return op, format, dtype, library, recipe, size, detail, record

    page = visit(built)
    page.get_by_role("button", name="library", exact=True).click()
    page.get_by_role("button", name=re.compile("^library")).click()
    libraries = [row["library"] for row in table(page)]
    assert libraries == sorted(libraries, reverse=True) and len(set(libraries)) > 3
    page.get_by_role("button", name="ms", exact=True).click()
    shown, exact = table(page), downloaded(page)
    timed = [row["ms"] not in ("no number", "failed conformance") for row in exact]
    times = [float(row["ms"]) for row, is_timed in zip(exact, timed) if is_timed]
    assert times == sorted(times) and timed == [True] * len(times) + [False] * (len(exact) - len(times))
    assert len(shown) == len(exact) and list(shown[0]) == list(exact[0])
    rows = load()
    red = {i for i, standing in standings(rows).items() if standing.outcome == FAILED}
    records = {
        key(r.op, r.format, r.dtype, r.library, r.recipe, size_of(r), r.detail, r.run.record): (r, i in red)
        for i, r in enumerate(rows)
        if r.kind == "speed"
    }
    for row, cells in zip(exact, shown, strict=True):
        record, is_red = records.pop(key(**row))
        if is_red or "ms" not in record.values:
            assert row["ms"] == ("failed conformance" if is_red else "no number")
        else:
            assert float(row["ms"]) == record.values["ms"]
        assert row["ceiling_ms"] == "" or float(row["ceiling_ms"]) == record.values["ceiling_ms"]
        assert (row["commit"], row["date"], row["machine"]) == (record.run.commit, record.run.date, record.run.machine)
        for name, text in cells.items():
            number = name in ("ms", "GB/s", "TFLOP/s", "ceiling_ms", "of the ceiling") and text[:1].isdigit()
            text = text.replace(",", "") if number else text
            assert float(text) == pytest.approx(float(row[name]), rel=5e-4) if number else text == row[name], name
    assert not records
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    page.get_by_role("button", name="Copy as CSV").click()
    assert list(csv.DictReader(io.StringIO(page.evaluate("window.copied")))) == exact
    assert page.locator("#status").text_content() == f"{len(exact)} rows copied as CSV"


def test_two_devices_are_never_in_one_chart(visit, sample):
    page = visit(sample[0], "all=throughput&all=ratios&all=sweep&all=history")
    machines = {row.run.machine for row in load(sample[1]) if row.kind == "speed"}
    assert page.locator("#machines").is_visible()
    assert len(machines) > 3 and all(machine in page.locator("#machines").text_content() for machine in machines)
    shown = [chart for section in ("throughput", "ratios", "sweep") for chart in charts(page, section)]
    assert all(len(chart["machines"]) == 1 and chart["machines"][0] in chart["caption"] for chart in shown)
    assert {chart["machines"][0] for chart in shown} == machines
    count = page.locator("figure").count()
    refused = page.evaluate(
        """() => {
          const two = ["NVIDIA H200", "NVIDIA Test"].map((machine) => ROWS.find((row) => row.machine === machine));
          const said = (draw) => { try { draw(); } catch (error) { return error.message; } };
          const points = two.map((row, place) => ({ row, place, value: 1, ceiling: null }));
          return [
            said(() => barChart(document.body, "x", two.map((row) => ({ row, value: 1, text: "" })))),
            said(() => lineChart(document.body, "x", ["a", "b"], [{ label: "one line", points }], "")),
            said(() => lineChart(document.body, "x", ["a", "b"], points.map((p) => ({ label: "two", points: [p] })), "")),
          ];
        }"""
    )
    assert refused == ["refused: one chart of 2 machines: NVIDIA H200; NVIDIA Test"] * 3
    assert page.locator("figure").count() == count
    page = visit(sample[0], "machine=NVIDIA H200&all=throughput")
    assert {chart["machines"][0] for chart in charts(page, "throughput")} == {"NVIDIA H200"}
    assert page.locator("#machines").is_hidden()


def test_history_is_drawn_from_commits(visit, built, sample):
    found = history()
    if not found.missing:
        versions = [v for v in found.versions if v.record == "elementwise-h200.json"]
        page = visit(built, "op=qdq&machine=NVIDIA H200&size=[8192, 8192]&library=mxref triton&format=nvfp4")
        assert [chart["series"] for chart in charts(page, "history")] == ([[len(versions)]] if len(versions) > 1 else [])
    page = visit(sample[0])
    assert charts(page, "history") == []
    assert "no git history where this was built" in page.locator("#history-note").text_content()


def test_no_line_of_the_history_joins_two_records(visit, tmp_path):
    """Of one backend on one machine: each record has a chart of its own, of its own counts alone."""
    folder = tmp_path / "results"
    folder.mkdir()
    git(tmp_path, "init", "-q")
    for day in (1, 2, 3):
        products = conformance(case("mxfp4 mxfp4", passed=day, known=day - 1))
        layers = conformance(case("mxfp4 mxfp4", op="moe_experts", passed=100 * day))
        for hour, (name, data) in enumerate((("products", products), ("layers", layers))):
            commit(folder, {f"{name}.json": json.dumps(data)}, f"2026-12-0{day}T0{hour}:00:00+00:00")
    assert main(["--out", str(tmp_path / "out"), "--results", str(folder)]) == 0
    page = visit(tmp_path / "out" / "index.html", "show=conformance")
    shown = {chart["caption"]: chart for chart in charts(page, "history")}
    assert shown.keys() == {
        "mxref triton: cases of matmulNVIDIA Test · products.json",
        "mxref triton: cases of moe_expertsNVIDIA Test · layers.json",
    }
    told = [re.sub(r"[0-9a-f]{7,} ", "", chart["description"]) for chart in shown.values()]
    assert "passed, level 2: 12-01 1, 12-02 2, 12-03 3; failed, level 2: 12-01 0, 12-02 0, 12-03 0; known" in told[0]
    assert "known, level 2: 12-01 0, 12-02 1, 12-03 2" in told[0]
    assert "passed, level 2: 12-01 100, 12-02 200, 12-03 300" in told[1] and "known" not in told[1]
    assert "no number" not in page.locator("#history").text_content()


def test_conformance_stands_beside_the_speed(visit, built):
    page = visit(built, "show=conformance")
    cells = page.evaluate("[...document.querySelectorAll('#matrix td.cell span')].map((e) => e.textContent)")
    totals = Counter()
    for cell in cells:
        if found := re.fullmatch(r". (\d+) (passed|failed|known|refused)", cell):
            totals[found[2]] += int(found[1])
    records = [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("conformance-*.json")]
    for outcome in ("passed", "failed", "known", "refused"):
        assert totals[outcome] == sum(record[outcome] for record in records), outcome
    reasons = {reason for record in records for row in record["rows"] for reason in row["reasons"]}
    shown = page.locator("#matrix").text_content()
    assert all(reason in shown for reason in reasons)
    (share,) = [
        e["of_a_copy"]
        for e in entries(RESULTS / "elementwise-h200.json")
        if (e["op"], e["format"], e["library"], e["size"]) == ("quantize", "mxfp4", "mxref", [8192, 8192])
    ]
    assert table(visit(built, "show=conformance&size=[16, 2048]")) == table(page)  # cases have no size
    row = page.locator("#matrix tr", has=page.get_by_role("cell", name="quantize", exact=True))
    row = row.filter(has=page.get_by_role("cell", name="mxfp4", exact=True)).first
    assert f"bfloat16 [8192, 8192]: {share:.2f} of torch copy" in row.text_content()
    words = table(visit(built, "op=quantize&format=mxfp4&library=mxref triton"))[0]["conformance"]
    counts = re.findall(r"\d+ (?:passed|refused)", words)
    assert counts and all(count in row.text_content() for count in counts)


def test_everything_else_has_a_table_for_each_record(visit, built):
    page = visit(built, "show=other")
    counts = Counter(row.run.record for row in load() if row.kind == "other")
    shown = page.evaluate(
        "[...document.querySelectorAll('#rows table')].map((t) => [t.caption.textContent, t.tBodies[0].rows.length])"
    )
    assert dict(shown) == counts


def test_numbers_of_a_column_are_written_alike(visit, tmp_path):
    """Four digits each, groups of three, no 1e3; whole numbers as they are where all of a column are."""
    values = [0.00012344, -91, 18.6566, 0, 12543.2, 0.5, 1.08421e-19]
    texts = ["0.0001234", "-91.00", "18.66", "0", "12,543", "0.5000", "1.084\xa0×\xa010^-19"]
    counts = [0, 7, 999, 1000, 4294967296, 12, 5]
    listed = ["0", "7", "999", "1,000", "4,294,967,296", "12", "5"]
    rows = [{"function": f"f{i}", "worst": value, "count": count} for i, (value, count) in enumerate(zip(values, counts))]
    (tmp_path / "functions.json").write_text(json.dumps(GPU | {"what": "accuracy", "rows": rows}))
    ratios = [1234567.0, 0.000123456, 2.0]  # times as fast
    speeds = [SPEED_ROW | {"library": f"other {i}", "ms": 1 / ratio, "copy_ms": 0.03} for i, ratio in enumerate(ratios)]
    (tmp_path / "speed.json").write_text(elementwise({}, rows=[SPEED_ROW, *speeds]))
    assert main(["--out", str(tmp_path / "out"), "--results", str(tmp_path)]) == 0
    page = visit(tmp_path / "out" / "index.html", "show=other")
    assert [row["worst"] for row in table(page)] == texts and [row["count"] for row in table(page)] == listed
    assert [float(row["worst"]) for row in downloaded(page)] == values
    page = visit(tmp_path / "out" / "index.html")
    bars = "[...document.querySelectorAll('{} g.bar > text:last-child')].map((e) => e.textContent)"
    assert page.evaluate(bars.format("#ratios")) == ["1,234,567 ×", "2.00 ×", "0.000123 ×"]
    shares = [text.split(", ", 1)[1] for text in page.evaluate(bars.format("#throughput"))]
    assert shares == ["37,037", "0.060", "0.50", "0.0000037"]


def test_where_a_row_comes_from_is_said_even_where_it_is_not_recorded(visit, built, tmp_path):
    page = visit(built, "show=other&record=producers.json")
    assert json.loads((RESULTS / "producers.json").read_text(encoding="utf-8")).get("commit") is None
    for rows in (table(page), downloaded(page)):
        assert {(row["commit"], row["date"]) for row in rows} == {("not recorded", "not recorded")}
    assert page.get_by_text("-dirty").count() == 0
    rows = [{"function": "exp", "worst": 1.0}]
    dirty = GPU | {"what": "accuracy", "rows": rows, "commit": "abc1234-dirty"}
    (tmp_path / "functions.json").write_text(json.dumps(dirty))
    assert main(["--out", str(tmp_path / "out"), "--results", str(tmp_path)]) == 0
    page = visit(tmp_path / "out" / "index.html", "show=other")
    assert [row["commit"] for row in table(page)] == ["abc1234-dirty"]
    assert "-dirty: measured with changes to that commit that were not committed" in page.locator("#rows").text_content()


def test_a_long_table_lists_its_first_rows_until_all_are_asked_for(visit, tmp_path):
    rows = [SPEED_ROW | {"size": [8 * i, 64], "ms": float(i)} for i in range(1, 1202)]
    (tmp_path / "x.json").write_text(elementwise({}, rows=rows))
    assert main(["--out", str(tmp_path / "out"), "--results", str(tmp_path)]) == 0
    page = visit(tmp_path / "out" / "index.html", "sort=-ms")
    times = lambda: [float(row["ms"].replace(",", "")) for row in table(page)]  # noqa: E731
    assert times() == list(range(1201, 201, -1))
    assert len(downloaded(page)) == 1201
    page.get_by_role("button", name="Show all 1201 rows").click()
    assert times() == list(range(1201, 0, -1))
    assert page.evaluate("document.activeElement.textContent") == "Show the first 1000 rows"


def test_the_keyboard_alone_is_enough(visit, built):
    page = visit(built)
    focused = "document.activeElement.closest('details')?.id || document.activeElement.id || document.activeElement.name"
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate(focused) == "facet-op":
            break
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    first = page.evaluate("document.activeElement.value")
    page.keyboard.press("Space")
    assert page.evaluate("document.activeElement.value") == first and {row["op"] for row in table(page)} == {first}
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.textContent") == f"Op: {first}"
    assert not page.evaluate("document.querySelector('#facet-op').open")
    page.locator("#show input[value=speed]").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#matrix").is_visible() and page.evaluate("document.activeElement.value") == "conformance"
    page.locator("#skip").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "h-rows"
    page.locator("#clear").focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="passed", exact=True).focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.closest('th').ariaSort") == "ascending"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.closest('th').ariaSort") == "descending"


def test_every_control_and_chart_has_a_name(visit, built):
    page = visit(built)
    assert page.evaluate("[...document.querySelectorAll('input, select')].filter((e) => !e.labels.length).length") == 0
    assert page.evaluate("[...document.querySelectorAll('fieldset')].filter((e) => !e.querySelector('legend')).length") == 0
    assert page.evaluate(
        """[...document.querySelectorAll("svg[role=img]")].every((svg) =>
             ["aria-labelledby", "aria-describedby"].every((by) =>
               document.getElementById(svg.getAttribute(by)).textContent))"""
    )
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids))
    assert page.evaluate("document.querySelectorAll('.scroll:not([tabindex][role=region][aria-label])').length") == 0


def test_names_of_charts_are_their_own_in_every_view(visit, built):
    page = visit(built)
    for show in ("conformance", "other", "speed"):
        page.locator(f"#show input[value={show}]").check()
        names = page.evaluate(
            """[...document.querySelectorAll("figure > svg")].map((svg) => [
                 document.getElementById(svg.getAttribute("aria-labelledby")).textContent,
                 svg.parentElement.querySelector("figcaption").firstChild.textContent])"""
        )
        assert all(name.startswith(title) for name, title in names) and bool(names) == (show != "other")
        ids = page.evaluate("[...document.querySelectorAll('[id]')].map((e) => e.id)")
        assert len(ids) == len(set(ids)), show


def contrast(page, selector: str) -> float:
    """Of the text of an element with the page's paper, as WCAG counts it."""
    style = "getComputedStyle(document.querySelector(name))"
    colours = (
        page.evaluate(f"(name) => {style}.color", selector),
        page.evaluate(f"(name) => {style}.backgroundColor", "body"),
    )

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted(map(luminance, colours))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme, other", [("light", "dark"), ("dark", "light")])
def test_light_and_dark(visit, built, scheme, other):
    page = visit(built, color_scheme=scheme)
    paper = "getComputedStyle(document.body).backgroundColor"
    first = page.evaluate(paper)
    for selector in ("body", "section > p", "#status", "figcaption small", "#words dd", ".below.refused"):
        assert contrast(page, selector) >= 4.5, selector  # WCAG AA
    page.get_by_label("Theme").select_option(other)
    assert page.evaluate(paper) != first and contrast(page, "section > p") >= 4.5
    page.reload()
    assert page.evaluate(paper) != first
    page.get_by_label("Theme").select_option("auto")
    assert page.evaluate(paper) == first


@pytest.mark.parametrize("show", ["speed", "conformance", "other"])
@pytest.mark.parametrize("width", [320, 660, 900])
def test_an_open_filter_stays_on_the_screen(visit, built, show, width):
    page = visit(built, f"show={show}", width=width)
    for facet in page.locator(".facet").all():
        facet.locator("summary").click()
        box = facet.locator("fieldset").bounding_box()
        assert 0 <= box["x"] and box["x"] + box["width"] <= width, facet.get_attribute("id")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        page.keyboard.press("Escape")


@pytest.mark.parametrize("show", ["speed", "conformance", "other"])
def test_a_phone_scrolls_down_only(visit, sample, show):
    page = visit(sample[0], f"show={show}&all=throughput&all=sweep&all=ratios", width=375)
    assert page.evaluate("document.documentElement.scrollWidth") == 375
    page.locator("#facet-library summary").click()
    assert page.evaluate("document.documentElement.scrollWidth") == 375
    sizes = page.evaluate("[...document.querySelectorAll('svg text')].map((e) => parseFloat(getComputedStyle(e).fontSize))")
    assert min(sizes, default=11) >= 11
    wide = page.evaluate(
        "[...document.querySelectorAll('figure > svg')].filter((e) => e.viewBox.baseVal.width > e.clientWidth + 1).length"
    )
    assert wide == 0  # drawn at the width that it has: its text is not shrunk


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize(
    "show, column", [("speed", "of the ceiling"), ("conformance", "failed"), ("other", "bits_per_byte")]
)
def test_a_table_shows_numbers_before_it_is_scrolled(visit, built, show, column, width):
    page = visit(built, f"show={show}", width=width)
    right = f"document.querySelector('#rows th button[data-column=\"{column}\"]').getBoundingClientRect().right"
    assert page.evaluate(right) < width - 20


def test_a_phone_says_what_a_row_is_in_one_cell(visit, built):
    """Op, format, library, dtype and size together, each a button that sorts; what all rows share stands in the caption."""
    page = visit(built, "op=qdq&format=mxfp4&library=mxref triton&dtype=bfloat16", width=390)
    ours = ("speed", "qdq", "mxfp4", "mxref triton")
    wanted = [row for row in load() if (row.kind, row.op, row.format, row.library) == ours]
    cells = page.evaluate("[...document.querySelectorAll('#rows td.stacked')].map((e) => e.textContent)")
    assert sorted(cell.replace("\xa0", " ") for cell in cells) == sorted(f"qdq · {size_of(row)}" for row in wanted) != []
    caption = page.locator("#rows caption").text_content()
    assert caption == "Every row of speed that passes the filters · mxfp4 · mxref triton · bfloat16 · ocp"
    page.get_by_role("button", name="size", exact=True).click()
    assert page.evaluate("[document.activeElement.textContent, document.activeElement.closest('th').ariaSort]") == [
        "size ▲",
        "ascending",
    ]
    assert {name: row[name] for row in downloaded(page) for name in ("op", "format", "dtype")} == {
        "op": "qdq",
        "format": "mxfp4",
        "dtype": "bfloat16",
    }


def test_a_phone_keeps_what_a_row_is_while_its_columns_are_scrolled(visit, built):
    page = visit(built, width=390)
    page.get_by_role("button", name="record", exact=True).focus()  # the last column
    cell, last, region = page.evaluate(
        """["#rows td.stacked", "#rows th:last-child button", "#rows .scroll"].map((name) => {
             const { left, right } = document.querySelector(name).getBoundingClientRect();
             return [left, right];
           })"""
    )
    assert page.evaluate("document.querySelector('#rows .scroll').scrollLeft") > 500
    assert cell[0] == region[0] + 1 and last[0] >= cell[1] and last[1] <= region[1]


@pytest.mark.parametrize("show", ["speed", "conformance", "other"])
@pytest.mark.parametrize("width", [390, 1280])
def test_a_row_is_as_tall_as_what_is_seen_of_it(visit, built, show, width):
    """No text far to the right makes a row tall whose seen part is empty: a line more than what is seen, at most."""
    page = visit(built, f"show={show}", width=width)
    tall = page.evaluate(
        """[...document.querySelectorAll("#rows tbody tr")].filter((tr) => {
             const { right } = tr.closest(".scroll").getBoundingClientRect();
             const seen = [...tr.cells].filter((cell) => cell.getBoundingClientRect().left < right && cell.firstChild);
             const heights = seen.map((cell) => {
               const range = document.createRange();
               range.selectNodeContents(cell);
               return range.getBoundingClientRect().height;
             });
             return tr.getBoundingClientRect().height > Math.max(...heights) + 2 * 20;
           }).map((tr) => tr.textContent.slice(0, 60))"""
    )
    assert tall == []


@pytest.mark.parametrize("show", ["speed", "conformance", "other"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_edge_of_a_table_fades_where_there_is_more_of_it(visit, built, show, width):
    page = visit(built, f"show={show}", width=width)
    fades = """() => [...document.querySelectorAll("section:not([hidden]) .scroll")].map((region) => [
      region.scrollHeight - region.clientHeight - region.scrollTop > 1,
      region.scrollWidth - region.clientWidth - region.scrollLeft > 1,
      getComputedStyle(region.parentElement, "::after").opacity === "1",
      getComputedStyle(region.parentElement, "::before").opacity === "1",
    ])"""
    page.wait_for_function(f"({fades})().some((one) => one[2])")
    found = page.evaluate(fades)
    assert any(below for below, *_ in found) and all(one[:2] == one[2:] for one in found)
    page.evaluate("document.querySelectorAll('.scroll').forEach((e) => e.scrollTo(e.scrollWidth, e.scrollHeight))")
    page.wait_for_function(f"({fades})().every((one) => !one[2] && !one[3])")


@pytest.mark.parametrize("width", [375, 390, 1280])
def test_the_matrix_is_not_wider_than_the_screen(visit, built, width):
    page = visit(built, "show=conformance", width=width)
    assert page.evaluate("[...document.querySelectorAll('#matrix .scroll')].every((e) => e.scrollWidth <= e.clientWidth)")


def test_lines_of_one_chart_look_different(visit, built):
    """At most eight of them, each in its own colour; of more than one format, or there is a chart for each."""
    page = visit(built, "all=sweep&all=history")
    page.evaluate(
        """() => {
          const row = ROWS.find((row) => row.kind === "speed");
          const point = { row, place: 0, value: 1, ceiling: null };
          const series = Array.from({ length: 30 }, (_, i) => ({ label: `${i}`, points: [point] }));
          lineChart($("sweep").querySelector(".charts"), "many", ["there"], series, "");
        }"""
    )
    looks = page.evaluate(
        """[...document.querySelectorAll("#sweep figure, #history figure")].map((figure) =>
             [...figure.querySelectorAll(".series polyline")].map((line) =>
               [line.getAttribute("class"), line.getAttribute("stroke-dasharray")].join()))"""
    )
    counts = sorted(map(len, looks))
    assert counts[-1] == 30 and counts[-2] <= 8 and all(len(set(lines)) == len(lines) for lines in looks)
    shown = [chart["caption"] for chart in charts(page, "sweep")]
    timed = {(row.op, row.format) for row in load() if row.op == "matmul" and row.run.machine == "NVIDIA H200"}
    for format in ("mxfp4", "nvfp4", "mxint8"):
        assert ("matmul", format) in timed
        title = f"matmul, bfloat16, {format}NVIDIA H200 · matmul-h200.json"
        assert [caption for caption in shown if caption.startswith(title)]


@pytest.mark.parametrize("show", ["speed", "conformance", "other"])
def test_devices_are_counted_once(visit, built, show):
    """Those of the rows; those of the history alone are named, and a device that is not recorded is none."""
    page = visit(built, f"show={show}&all=history")
    rows = [row for row in load() if row.kind == show]
    unknown = [row for row in rows if row.run.machine == "machine not recorded"]
    known = {row.run.machine for row in rows} - {"machine not recorded"}
    said = f"{len(rows)} of {len(rows)} rows, {len(known)} device{'s' * (len(known) > 1)}"
    said += f", {len(unknown)} rows do not record theirs" if unknown else ""
    assert page.locator("#status").text_content() == said and bool(unknown) == (show == "other")
    assert not re.search(r"\d+ devices", page.locator("#machines").text_content())
    shown = {machine for chart in charts(page, "history") for machine in chart["machines"]} if show != "other" else set()
    assert all(machine in page.locator("#machines").text_content() for machine in shown) or len(shown | known) == 1


@pytest.mark.parametrize("width", [375, 1280])
def test_no_text_of_a_bar_lies_on_another_or_outside(visit, built, width):
    page = visit(built, "all=throughput&all=ratios&all=variants", width=width)
    crossing = page.evaluate(
        """[...document.querySelectorAll("g.bar")].filter((bar) => {
             const [label, number] = [...bar.querySelectorAll("text")].map((text) => text.getBoundingClientRect());
             const drawn = [...bar.querySelectorAll("rect, line")].map((shape) => shape.getBoundingClientRect().right);
             const figure = bar.closest("svg").getBoundingClientRect();
             const beside = label.right <= number.left || label.top + 3 >= number.bottom || number.top + 3 >= label.bottom;
             const left = Math.min(label.left, number.left);
             const over = drawn.some((right) => right > number.left);
             return !beside || over || label.right > figure.right + 1 || left < figure.left - 1;
           }).map((bar) => bar.textContent)"""
    )
    assert page.locator("g.bar").count() > 300 and crossing == []
    broken = (
        "[...document.querySelectorAll('figcaption .whole')].filter((e) => e.getBoundingClientRect().height > 24).length"
    )
    assert page.locator("figcaption .whole").count() > 50 and page.evaluate(broken) == 0  # a date is on one line
    halo = "[...document.querySelectorAll('g.bar text')].every((e) => getComputedStyle(e).paintOrder.startsWith('stroke'))"
    assert page.evaluate(halo)  # a line of the chart behind it does not cross it


@pytest.mark.parametrize("width", [375, 390, 1280])
def test_names_below_a_line_chart_do_not_collide(visit, built, width):
    """Of all charts, and of one of more commits than a phone has room for; the newest is named."""
    page = visit(built, "all=sweep&all=history", width=width)
    page.evaluate(
        """() => {
          const row = ROWS.find((row) => row.kind === "speed");
          const places = Array.from({ length: 40 }, (_, i) => `abcdef0 12-${10 + i}`);
          const points = places.map((_, place) => ({ row, place, value: place, ceiling: null }));
          lineChart($("sweep").querySelector(".charts"), "many", places, [{ label: "a line", points }], "");
        }"""
    )
    names = page.evaluate(
        """[...document.querySelectorAll("figure > svg")].filter((svg) => svg.querySelector(".series")).map((svg) =>
             [...svg.querySelectorAll(":scope > text")].map((text) => {
               const box = text.getBoundingClientRect();
               const turn = text.transform.baseVal;
               const outer = svg.getBoundingClientRect();
               if (box.left < outer.left - 1 || box.right > outer.right + 1) throw new Error(`outside: ${text.textContent}`);
               return [text.textContent, turn.length ? turn[0].angle : 0, text.x.baseVal[0].value,
                       box.left, box.right, box.top, box.bottom];
             }))"""
    )
    assert len(names) > 20 and any(chart[-1][0] == "abcdef0 12-49" for chart in names)
    for chart in names:
        level = [name for name in chart if name[1] == 0]
        for i, (text, _, _, left, right, top, bottom) in enumerate(level):
            for other in level[:i]:
                apart = left >= other[4] or right <= other[3] or top + 2 >= other[6] or bottom <= other[5] + 2
                assert apart, (text, other[0])
        turned = [name for name in chart if name[1] != 0]
        for before, after in zip(turned, turned[1:]):  # parallel lines: their distance, not less than the font's height
            distance = (after[2] - before[2]) * math.sin(math.radians(abs(after[1])))
            assert distance >= 11, (before[0], after[0])
