"""Converting a checkpoint on one core: megabytes of bfloat16 a second, and what is resident at most.

    python -m benchmarks.convert_cpu --json benchmarks/results/convert-cpu.json

Writes a sharded model in bfloat16 to a temporary directory (--gigabytes, in shards of a quarter), then, each in a process
of its own with one thread: converts it to Quark's MXFP4 by the reference and by the kernels of `inductor`, with and
without measuring losses, and reads the result back weight by weight. Every run is timed; compiling is not. Resident
memory is what a process has at most beyond what it had when the run began, by the kernel's high-water mark, which Linux
alone can reset. Before anything is timed, the first rows of every kernel's checkpoint are compared with `mxref.quantize`.
"""

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

import mxref
from benchmarks.made_model import bytes_of, peak_resident, weights_of, write_model
from mxref.checkpoints import convert_checkpoint, load_checkpoint

layers_of = partial(weights_of, hidden=2048, intermediate=7168)
LAYER = layers_of(1)
RECIPE = "quark_even"
RUNS = [(backend, losses) for backend in ("inductor", "reference") for losses in (False, True)]


def measured(call) -> tuple[float, float, int | None]:
    """Seconds on the wall and of the processor, and resident bytes at most beyond those at the start."""
    with peak_resident() as peak:
        start, processor = time.perf_counter(), time.process_time()
        call()
        times = time.perf_counter() - start, time.process_time() - processor
    return *times, peak[0] if peak else None


def read_all(path: Path) -> None:
    """Every weight of a checkpoint, one after the other."""
    for _ in load_checkpoint(path).streamed().values():
        pass


def run_one(source: Path, out: Path, backend: str, losses: bool, rounds: int) -> dict:
    """Times of one kind of conversion, and of reading what it wrote; one warm-up on a small model compiles."""
    torch.set_num_threads(1)
    with mxref.use(*[] if backend == "reference" else [backend], strict=backend != "reference"):
        with tempfile.TemporaryDirectory(dir=out.parent) as small:
            (Path(small) / "in").mkdir()
            write_model(Path(small) / "in", LAYER)
            convert_checkpoint(Path(small) / "in", Path(small) / "out", to="quark", format="mxfp4", recipe=RECIPE)
            gate(Path(small) / "in", Path(small) / "out")
        converting = [
            measured(
                lambda: convert_checkpoint(
                    source, out, to="quark", format="mxfp4", recipe=RECIPE, measure_losses=losses, force=True
                )
            )
            for _ in range(rounds)
        ]
    loading = [measured(lambda: read_all(out)) for _ in range(rounds)]
    return {"convert": converting, "load": loading}


def gate(source: Path, out: Path) -> None:
    """Raise unless the converted weights are the reference's."""
    given, found = load_checkpoint(source), load_checkpoint(out)
    with mxref.use():
        for name in found.quantized:
            expected = mxref.quantize(given[name][:64], "mxfp4", recipe=RECIPE)
            q = found[name].tensor[:64]
            if not (torch.equal(q.packed, expected.packed) and torch.equal(q.scales, expected.scales)):
                raise AssertionError(f"{name} is not what the reference gives")


def processor() -> str:
    """The name of the processor."""
    info = Path("/proc/cpuinfo")
    names = (
        [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        if info.exists()
        else []
    )
    return names[0] if names else platform.processor()


def row(kind: str, runs: list, size: int, **facts) -> dict:
    """One line of the record."""
    wall, cpu, peaks = zip(*runs)
    return {
        "what": kind,
        **facts,
        "mb_per_s": [round(size / 1e6 / seconds, 1) for seconds in wall],
        "best": round(size / 1e6 / min(wall), 1),
        "median": round(size / 1e6 / statistics.median(wall), 1),
        "best_per_processor_second": round(size / 1e6 / min(cpu), 1),
        "peak_resident_bytes": None if None in peaks else max(peaks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=None, help="where the temporary directory is made")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)  # source, out, backend, losses: one run, in this process
    given = parser.parse_args()
    if given.one:
        source, out, backend, losses = given.one
        print(json.dumps(run_one(Path(source), Path(out), backend, losses == "True", given.rounds)))
        return
    rows = []
    with tempfile.TemporaryDirectory(prefix="mxref-convert-", dir=given.directory) as folder:
        source, out = Path(folder) / "in", Path(folder) / "out"
        source.mkdir()
        size = int(given.gigabytes * 1e9)
        if shutil.disk_usage(folder).free < 2 * size:
            raise SystemExit(f"{folder}: less than {2 * given.gigabytes} GB free")
        shards = [file.stat().st_size for file in write_model(source, layers_of(max(1, size // bytes_of(LAYER))))]
        model = {"bytes": sum(shards), "shards": len(shards), "largest_shard": max(shards), "layer": bytes_of(LAYER)}
        for backend, losses in RUNS:
            command = [sys.executable, "-m", "benchmarks.convert_cpu", "--rounds", str(given.rounds)]
            command += ["--one", str(source), str(out), backend, str(losses)]
            result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
            if result.returncode:
                raise SystemExit(result.stderr)
            found = json.loads(result.stdout)
            facts = {"backend": backend, "losses_measured": losses}
            rows.append(row("convert bfloat16 to mxfp4", found["convert"], model["bytes"], **facts))
            print(rows[-1], flush=True)
        rows.append(row("load mxfp4, of bfloat16", found["load"], model["bytes"]))
        print(rows[-1], flush=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    record = {
        "device": processor(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),  # beyond 1 others were at work: then processor seconds say more than the wall's
        "threads": 1,
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit,
        "date": datetime.date.today().isoformat(),
        "recipe": RECIPE,
        "model": model,
        "bound_bytes": 2 * model["largest_shard"] + model["layer"],
        "rows": rows,
    }
    if given.json:
        given.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
