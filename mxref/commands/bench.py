"""`mxref bench`: the benchmarks of the repository, each held against a floor of the same run.

A benchmark of the CPU is a file of pytest-benchmark, `benchmarks/test_NAME_cpu.py`, and runs in a process of its own; one of
the GPU is a script, `benchmarks/NAME_gpu.py`. Each checks what it times before it times it.
"""

import ast
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import mxref

DIRECTORY = Path(mxref.__file__).parent.parent / "benchmarks"
FILES = {"cpu": "test_{}_cpu.py", "cuda": "{}_gpu.py"}
FOLDER = "MXREF_BENCH_FOLDER"  # names to a benchmark where its files go, which are cleared away however it ends
FRAMES_SHOWN = 3  # lines of what a script that failed says last


@dataclass(frozen=True)
class Benchmark:
    """A file of the repository that times something."""

    name: str
    device: str
    path: Path
    summary: str


@dataclass(frozen=True)
class Timing:
    """One row of a record: medians in seconds, and how many times its floor's that is (None: it has none)."""

    op: str
    format: str
    dtype: str
    contender: str
    size: tuple[int, ...]
    seconds: float | None
    floor: str | None = None
    ratio: float | None = None
    note: str = ""


class BenchmarkFailed(Exception):
    """Something that was to be timed is wrong, or did not run: there is no number."""


def find_benchmarks(device: str, names: Sequence[str] = ()) -> list[Benchmark]:
    """The benchmarks of `device`, cpu or cuda, by name; those of `names`, in their order, if there are any.

    Raises ValueError for an unknown device or name, and where there are no benchmarks: an installed mxref has none.
    """
    if device not in FILES:
        raise ValueError(f"device={device!r}: expected one of {', '.join(FILES)}")
    if not (DIRECTORY / "conftest.py").is_file():
        raise ValueError(
            "the benchmarks are not part of an installed mxref: run mxref bench from a checkout of its repository"
        )
    before, after = FILES[device].split("{}")
    found = {}
    for path in sorted(DIRECTORY.glob(FILES[device].format("*"))):
        name = path.name.removeprefix(before).removesuffix(after)
        summary = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))).splitlines()[0]
        found[name] = Benchmark(name, device, path, summary)
    for name in names:
        if name not in found:
            raise ValueError(f"NAME={name!r}: expected one of {', '.join(found)} on {device}")
    return [found[name] for name in dict.fromkeys(names or found)]


def run_benchmark(benchmark: Benchmark, quick: bool, on_progress: Callable[[str, int, int], None]) -> dict:
    """The record of a run. Raises BenchmarkFailed, which says why, if anything is wrong: then there are no numbers."""
    with tempfile.TemporaryDirectory(prefix="mxref-bench-") as folder:
        record = Path(folder) / "record.json"
        if benchmark.device == "cpu":
            _run_pytest(benchmark, record, quick, on_progress)
        else:
            _run_script(benchmark, record, on_progress)
        return json.loads(record.read_text(encoding="utf-8"))


def merged(records: Sequence[dict]) -> dict:
    """Records of one run of one device as one: the first's facts, everyone's rows."""
    rows = "benchmarks" if "benchmarks" in records[0] else "rows"
    return {**records[0], rows: [row for record in records for row in record[rows]]}


def timings(record: dict) -> list[Timing]:
    """The rows of a record, of the CPU's or of the GPU's kind."""
    if "benchmarks" in record:
        medians = {_place(row["extra_info"]): row["stats"]["median"] for row in record["benchmarks"]}
        return [_timing_of_pytest(row, medians) for row in record["benchmarks"]]
    return [_timing_of_script(row, record.get("dtype", "-")) for row in record["rows"]]


def _place(info: dict, contender: str | None = None) -> tuple:
    return info["op"], info["dtype"], tuple(info["size"]), contender or info["contender"]


def _timing_of_pytest(row: dict, medians: dict[tuple, float]) -> Timing:
    info, seconds = row["extra_info"], row["stats"]["median"]
    floor = info.get("floor")
    ratio = None if floor is None else seconds / medians[_floor_place(info, medians)]
    note = "" if info.get("same_bits", True) else "other bits"
    size = tuple(info["size"])
    return Timing(info["op"], info["format"], info["dtype"], info["contender"], size, seconds, floor, ratio, note)


def _floor_place(info: dict, medians: dict[tuple, float]) -> tuple:
    place = _place(info, info["floor"])
    if place not in medians:
        raise ValueError(f"the record lacks the floor {info['floor']!r} of {info['op']}, {info['dtype']}, {info['size']}")
    return place


def _timing_of_script(row: dict, dtype: str) -> Timing:
    """Scripts name things by what they time; `of_X`: the time of X over that of the row."""
    who = next((str(row[name]) for name in ("library", "by", "kernel") if name in row), "mxref")
    formats = [str(row[name]) for name in ("format", "weights", "activations") if row.get(name)]
    size = row.get("size") or [row[name] for name in ("m", "n", "k", "tokens") if name in row]
    held = next(((name, value) for name, value in row.items() if name.startswith("of_") and value), None)
    floor, ratio = (None, None) if held is None else (held[0].removeprefix("of_").replace("_", " "), 1 / held[1])
    seconds = None if row.get("ms") is None else row["ms"] / 1e3
    note = next((str(row[name]) for name in ("failed", "wrong") if name in row), "")
    op, format = row.get("op", "-"), " ".join(dict.fromkeys(formats)) or "-"
    return Timing(op, format, dtype, who, tuple(size), seconds, floor, ratio, note)


# ---- the CPU --------------------------------------------------------------------------------------------------------


def _run_pytest(benchmark: Benchmark, record: Path, quick: bool, on_progress: Callable[[str, int, int], None]) -> None:
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe(duplex=False)
    arguments = [str(benchmark.path), "--benchmark-only", f"--benchmark-json={record}", *(["--quick"] if quick else [])]
    process = spawning.Process(target=_pytest, args=(theirs, arguments, str(record.with_name("output.txt"))))
    process.start()
    theirs.close()
    done, total, failures = 0, 0, []
    try:
        while True:
            kind, value = ours.recv()
            if kind == "collected":
                total = value
            else:
                done += 1
                failures += [value] if kind == "failed" else []
            on_progress(benchmark.name, done, total)
    except EOFError:  # the process has ended
        process.join()
    finally:
        process.kill()
        process.join()
    if failures:
        raise BenchmarkFailed("\n".join(failures))
    if process.exitcode:
        said = record.with_name("output.txt").read_text(encoding="utf-8").strip().splitlines()
        raise BenchmarkFailed("\n".join([f"pytest ended with exit code {process.exitcode}", *said[-FRAMES_SHOWN:]]))


def _pytest(connection: Connection, arguments: list[str], output: str) -> None:
    """In a process of its own: pytest, which tells `connection` what it has done and writes its text to a file."""
    import pytest

    os.environ.pop("PYTEST_XDIST_WORKER", None)  # of a caller's own tests: nothing is timed beside it
    os.environ[FOLDER] = str(Path(output).parent)
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(DIRECTORY.parent)

    class Tells:
        def pytest_collection_finish(self, session):
            connection.send(("collected", len(session.items)))

        def pytest_runtest_logreport(self, report):
            if report.failed:
                connection.send(("failed", str(report.longrepr).strip()))
            elif report.when == "call" or report.skipped:
                connection.send(("done", report.nodeid))

    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "-c", str(DIRECTORY.parent / "pyproject.toml")]
    sys.exit(pytest.main([*options, *arguments], plugins=[Tells()]))


# ---- the GPU --------------------------------------------------------------------------------------------------------


def _run_script(benchmark: Benchmark, record: Path, on_progress: Callable[[str, int, int], None]) -> None:
    on_progress(benchmark.name, 0, 1)
    command = [sys.executable, "-m", f"benchmarks.{benchmark.path.stem}", "--json", str(record)]
    environment = os.environ | {FOLDER: str(record.parent)}
    result = subprocess.run(command, cwd=DIRECTORY.parent, capture_output=True, text=True, env=environment)
    if result.returncode or not record.exists():
        said = (result.stderr or result.stdout).strip().splitlines()
        raise BenchmarkFailed("\n".join([f"exit code {result.returncode}", *said[-FRAMES_SHOWN:]]))
    on_progress(benchmark.name, 1, 1)
