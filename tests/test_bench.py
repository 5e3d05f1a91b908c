"""The benchmarks: each runs at a tiny size through its gate, a red gate leaves no number, and what `mxref bench` refuses."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("pytest_benchmark")

from heeding import start
from planted import planted
from typer.testing import CliRunner

from mxref.cli import app
from mxref.commands import bench

ROOT = Path(__file__).parent.parent
NAMES = ("activations", "blocks", "checkpoints", "dispatch", "elements", "eval", "matmul", "moe")
FACTS = {"op", "format", "dtype", "contender", "device", "size"}


def command(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def outside() -> dict[str, str]:
    """The environment without what pytest's workers and the interpreter of kernels put into it."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_XDIST", "TRITON_INTERPRET"))}


def program(*arguments, modules: Path | None = None):
    path = os.pathsep.join(map(str, filter(None, [modules, ROOT, os.environ.get("PYTHONPATH")])))
    environment = outside() | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-m", "mxref", "bench", *map(str, arguments)]
    return subprocess.run(run, capture_output=True, text=True, env=environment, timeout=300)


def test_every_benchmark_runs_at_a_tiny_size(tmp_path):
    """In one process, which imports everything once."""
    run = [sys.executable, "-m", "pytest", "benchmarks", "--benchmark-only", "--quick", "-p", "no:cacheprovider"]
    environment = outside() | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run += [f"--benchmark-json={tmp_path / 'r.json'}"]
    result = subprocess.run(run, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stdout
    text = (tmp_path / "r.json").read_text()
    record = json.loads(text)
    assert {row["fullname"].split("/")[1].split("_")[1] for row in record["benchmarks"]} == set(NAMES)
    machine = record["machine_info"]
    assert {"device", "cores", "threads", "torch", "python", "commit", "date", "quick"} <= machine.keys()
    assert str(ROOT) not in text and str(Path.home()) + "/" not in text and os.uname().nodename not in text
    rows = [row["extra_info"] for row in record["benchmarks"]]
    for row in rows:
        assert row.keys() >= FACTS, row
        assert row.get("same_bits", True) or not row["contender"].startswith("mxref"), row
    floors = [row for row in rows if "floor" not in row]
    timed = bench.timings(record)
    assert len(timed) == len(rows) and {t.floor for t in timed if t.floor} <= {row["contender"] for row in floors}
    assert all(t.seconds > 0 and (t.ratio is None) == (t.floor is None) for t in timed)


def test_the_command_shows_and_writes_what_it_timed(tmp_path):
    result = program("dispatch", "--quick", "--json", tmp_path / "r.json")
    assert result.returncode == 0, result.stderr
    timed = bench.timings(json.loads((tmp_path / "r.json").read_text()))
    assert len(timed) == 4 and [t.floor for t in timed] == [None, None, "reference, bare", "kernel, bare"]
    for t in timed:
        assert t.contender in result.stdout and f"{1e3 * t.seconds:.4g}" in result.stdout


WRONG = """
import torch

import mxref
from mxref.registry import Kernel


def {op}(x{arguments}):
    with mxref.use():
        y = mxref.{call}
    y.flatten()[-1:] += {error}
    return y


KERNEL = Kernel("{op}", "faulty", {op}, "bitexact", ("cpu",), (torch.float32,), {formats})
"""
SILU = {"op": "silu", "arguments": "", "call": "functions.silu(x)", "formats": None}


@pytest.mark.parametrize("error", [0.0, 1.0])
def test_a_red_gate_leaves_no_number(error, tmp_path):
    planted(tmp_path, "faulty", WRONG.format(**SILU, error=error), ["silu"])
    record = tmp_path / "r.json"
    result = program("activations", "--quick", "--json", record, modules=tmp_path)
    if not error:
        assert result.returncode == 0, result.stderr
        contenders = [row["extra_info"]["contender"] for row in json.loads(record.read_text())["benchmarks"]]
        assert "mxref faulty" in contenders and "mxref faulty" in result.stdout
        return
    assert result.returncode == 1 and not record.exists() and result.stdout == ""
    assert "activations: FAILED, no number" in result.stderr and "silu---float32-8x64-mxref faulty: " in result.stderr
    assert "values differ in their bits" in result.stderr and "again: mxref verify faulty" in result.stderr
    assert result.stderr.endswith("error: activations failed: no JSON is written\n")


def test_a_wrong_reference_is_found_by_the_oracle(tmp_path):
    """The reference's rounding planted wrong, in a copy of it."""
    import shutil

    for name in ("mxref", "accel", "benchmarks", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", "data", "results", "embedded")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    functions = tmp_path / "mxref" / "functions.py"
    right, wrong = "return canonical((wide * _sigmoid(wide)).to(x.dtype))", "return wide / (1 + _exp(-wide))"
    assert functions.read_text().count(right) == 1 and "def _exp(" in functions.read_text()
    functions.write_text(functions.read_text().replace(right, wrong))
    run = [sys.executable, "-m", "pytest", "benchmarks/test_activations_cpu.py", "--benchmark-only", "--quick"]
    run += ["--benchmark-json=r.json", "-p", "no:cacheprovider"]
    environment = outside() | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert result.returncode == 1 and "values differ in their bits" in result.stdout
    assert not (tmp_path / "r.json").exists() and "Median" not in result.stdout
    assert (
        "FAILED benchmarks/test_activations_cpu.py::test_activations[silu---float32-8x64-mxref reference]" in result.stdout
    )


def test_the_benchmarks_are_listed():
    result = command("--list", "--json", "-")
    assert result.exit_code == 0 and tuple(row["name"] for row in json.loads(result.stdout)) == NAMES
    assert all(name in command("--list").stdout for name in NAMES)
    on_gpu = json.loads(command("--list", "--device", "cuda", "--json", "-").stdout)
    assert [row["name"] for row in on_gpu] == ["elementwise", "eval", "matmul", "moe"]
    assert all(row["summary"] for row in on_gpu)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("nothing",), f"NAME='nothing': expected one of {', '.join(NAMES)} on cpu"),
        (("blocks", "--device", "cuda"), "NAME='blocks': expected one of elementwise, eval, matmul, moe on cuda"),
        (("--device", "tpu"), "--device='tpu': expected one of cpu, cuda"),
        (("--json", "no/such/r.json"), "--json='no/such/r.json': its directory 'no/such' does not exist"),
    ],
)
def test_bad_usage_is_refused_in_one_line(arguments, message):
    result = command(*arguments)
    assert result.exit_code == 2 and result.stdout == "" and result.stderr == f"error: {message}\n"


def test_where_there_is_no_gpu_it_says_so():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    result = command("--device", "cuda")
    assert result.exit_code == 2 and result.stderr.startswith("error: --device='cuda': ") and result.stderr.count("\n") == 1


def test_an_installed_mxref_has_no_benchmarks(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "DIRECTORY", tmp_path / "benchmarks")
    for arguments in ((), ("--list",), ("blocks",)):
        result = command(*arguments)
        assert result.exit_code == 2 and "not part of an installed mxref: run mxref bench from a checkout" in result.stderr


def test_a_missing_package_is_named(monkeypatch):
    import importlib.util

    there = importlib.util.find_spec
    missing = lambda name, *rest: None if name == "pytest_benchmark" else there(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", missing)
    result = command("matmul", "--quick")
    assert result.exit_code == 2 and "the benchmarks need pytest-benchmark: pip install" in result.stderr


def test_a_file_that_does_not_run_fails(monkeypatch, tmp_path):
    (tmp_path / "benchmarks").mkdir()
    for name in ("conftest.py", "contenders.py", "made_model.py"):
        (tmp_path / "benchmarks" / name).write_text((ROOT / "benchmarks" / name).read_text())
    (tmp_path / "benchmarks" / "test_dead_cpu.py").write_text('"""Dies."""\nimport os\n\nos._exit(5)\n')
    (tmp_path / "benchmarks" / "empty_gpu.py").write_text('"""Writes nothing."""\nraise SystemExit("no such kernel")\n')
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.setattr(bench, "DIRECTORY", tmp_path / "benchmarks")
    for device, reason in (("cpu", "exit code 5"), ("cuda", "no such kernel")):
        (found,) = bench.find_benchmarks(device)
        with pytest.raises(bench.BenchmarkFailed, match=reason):
            bench.run_benchmark(found, False, lambda *progress: None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_what_is_ended_leaves_no_folder(number, tmp_path):
    environment = outside() | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    run = [sys.executable, "-m", "mxref", "bench", "checkpoints"]
    process = start(run, env=environment, stderr=subprocess.PIPE, start_new_session=True)
    made = lambda: list(tmp_path.rglob("mxref-checkpoints-*"))  # noqa: E731
    while not made():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else 128 + number)
    assert not list(tmp_path.glob("mxref-*"))


def test_gpu_records_are_timings_too():
    record = json.loads((ROOT / "benchmarks" / "results" / "elementwise-h200.json").read_text())
    timed = bench.timings(record)
    assert len(timed) == len(record["rows"])
    for row, found in zip(record["rows"], timed):
        assert (found.op, found.format, found.contender, list(found.size)) == tuple(
            row[name] for name in ("op", "format", "library", "size")
        )
        if "failed" not in row:
            assert found.floor == "a copy" and found.ratio == pytest.approx(row["ms"] / row["copy_ms"])
    made = {"dtype": "bfloat16", "rows": [{"weights": "mxfp4", "activations": "mxfp4", "tokens": 4, "by": "us", "ms": 2.0}]}
    (found,) = bench.timings(made)
    assert (found.format, found.contender, found.size, found.seconds, found.ratio) == ("mxfp4", "us", (4,), 0.002, None)


def test_records_of_one_run_are_merged():
    two = [{"device": "x", "rows": [1]}, {"device": "x", "rows": [2, 3]}]
    assert bench.merged(two) == {"device": "x", "rows": [1, 2, 3]}


def test_a_record_without_its_floor_is_refused():
    info = {"op": "qdq", "format": "mxfp4", "dtype": "float32", "contender": "us", "size": [1], "floor": "torch copy"}
    with pytest.raises(ValueError, match="lacks the floor 'torch copy' of qdq"):
        bench.timings({"benchmarks": [{"extra_info": info, "stats": {"median": 1.0}}]})
