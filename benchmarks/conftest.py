"""Benchmarks: every record says what it ran on and against which floor; nothing is timed before it is checked.

    mxref bench                 # or: python -m pytest benchmarks --benchmark-only

A benchmark of the CPU is a file `test_NAME_cpu.py` with a generator `contenders(quick)`, one of the GPU a script
`NAME_gpu.py`. If anything is wrong, no number of the run is shown or written.
"""

import contextlib
import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # the oracles

import mxref  # noqa: E402
from benchmarks.made_model import peak_resident  # noqa: E402

LIBRARIES = ("torchao", "compressed-tensors", "amd-quark", "transformers", "safetensors")
ROUNDS, LONG_ROUNDS, LONG = 5, 3, 1.0  # as many of what takes more than LONG seconds
ROUND = 0.005  # seconds that a round takes at least, by repeating


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="tiny sizes and one round: does everything still run?")


def pytest_configure(config):
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise pytest.UsageError("TRITON_INTERPRET=1: an interpreter's time says nothing; unset it")


def pytest_generate_tests(metafunc):
    if "contender" in metafunc.fixturenames:
        contenders = list(metafunc.module.contenders(metafunc.config.getoption("quick")))
        metafunc.parametrize("contender", contenders, ids=str)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session):
    if session.testsfailed:  # a red gate: no number at all
        session.config._benchmarksession.benchmarks.clear()
    return (yield)


def pytest_benchmark_update_machine_info(config, machine_info):
    """Processor, versions, commit and date, and nothing else."""
    cpu = machine_info["cpu"]
    machine_info.clear()
    machine_info.update(
        device=cpu.get("brand_raw", platform.machine()),
        cores=cpu.get("count"),
        threads=torch.get_num_threads(),
        system=platform.system(),
        python=platform.python_version(),
        mxref=mxref.__version__,
        torch=torch.__version__,
        **{name: version for name in LIBRARIES if (version := _version(name))},
        commit=_commit(),
        date=datetime.date.today().isoformat(),
        **({"quick": True} if config.getoption("quick") else {}),
    )


def pytest_benchmark_update_json(config, benchmarks, output_json):
    output_json["commit_info"] = {}  # machine_info has the commit
    for row in output_json["benchmarks"]:
        for name in ("group", "param", "params", "options"):
            del row[name]
        del row["stats"]["data"]


def _commit() -> str | None:
    """The commit, marked if the code is not quite that."""

    def git(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)

    changed = git("diff", "--quiet", "HEAD", "--", "mxref", "accel", "benchmarks/*.py").returncode
    commit = git("rev-parse", "--short", "HEAD").stdout.strip()
    return f"{commit}-dirty" if commit and changed else commit or None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@pytest.fixture
def timed(benchmark, request):
    """A function that times a contender, if its first result is right."""

    def timed(contender):
        run = contender.prepare()
        with peak_resident() if contender.counts_memory else contextlib.nullcontext() as peak:
            run()  # compiles
        if peak:
            benchmark.extra_info["peak_resident_bytes"] = peak[0]
        start = time.perf_counter()
        result = run()
        seconds = time.perf_counter() - start
        problem = None if contender.wrong is None else contender.wrong(result)
        if problem is not None and contender.ours:
            pytest.fail(f"{contender}: {problem}", pytrace=False)
        benchmark.extra_info.update(contender.facts())
        if contender.wrong is not None:
            benchmark.extra_info["same_bits"] = problem is None
        rounds = ROUNDS if seconds < LONG else LONG_ROUNDS
        rounds, iterations = (1, 1) if request.config.getoption("quick") else (rounds, 1 + int(ROUND / seconds))
        benchmark.pedantic(run, rounds=rounds, iterations=iterations)

    return timed
