"""What `qdq` needs in memory beyond its input: at most four times the input, whatever the strides.

Measured in torch's own allocator: the profiler reports every block that the CPU allocator hands out and takes back, and
the peak is the largest running sum. That counts the output and every temporary, also those inside operators, is the same
number on every run, and does not depend on what the process had allocated before. The resident set says less: freed
pages that malloc keeps are used again unseen (a second call looks free), and `ru_maxrss` of a child starts at what its
parent had when it forked. One test compares the two in a fresh process, by the kernel's own high-water mark, so that
memory taken elsewhere than in torch's allocator would show.

Why the bound holds: the blocks are encoded in runs of a fixed number of elements, so the temporaries do not grow with the
tensor. What does grow is the output (1x) and, where the input's rows are not contiguous, one copy of it (1x). Temporaries
are float32, int32 and float64 whatever the input is: for a bfloat16 input, half the size, they count twice. Seen here:
1.12 and 2.12 times a float32 input, 1.25 and 2.25 times a bfloat16 input (contiguous, transposed), all three formats.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import mxref

SHAPE = (2048, 4096)
FORMATS = ("mxfp4", "mxint8", "nvfp4")
LIMIT = 4.0
TABLES = 4 << 10  # bytes: each format's values are tabulated once and kept
WORKING_SET = 8 << 20  # bytes of all temporaries of one run of blocks, at most: they do not grow with the tensor


@pytest.fixture(autouse=True)
def one_thread():
    """The allocations are the same with any number of threads; the time is not, on a machine that others use."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def peak_bytes(call, folder: Path) -> int:
    """The largest sum of live bytes that `call` allocates, its result included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = call()
    recorded.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    changes = [(e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]"]
    live = peak = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        live += change
        peak = max(peak, live)
    left = live - result.numel() * result.element_size()
    assert 0 <= left <= TABLES, f"{left} bytes beside the result outlive the call"
    return peak


def tensor(shape, dtype: torch.dtype, layout: str) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return x.T if layout == "transposed" else x


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("format", FORMATS)
def test_float32(format, layout, tmp_path):
    x = tensor(SHAPE, torch.float32, layout)
    peak = peak_bytes(lambda: mxref.qdq(x, format), tmp_path)
    size = x.numel() * 4
    assert peak <= LIMIT * size, f"{peak / size:.2f} times the input"
    grows = size * (1 + (layout == "transposed"))  # the output, and the one copy
    assert grows <= peak <= grows + WORKING_SET, f"{(peak - grows) / 2**20:.1f} MiB beside the output and a copy"


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_bfloat16(format, layout, tmp_path):
    """The same bound in bytes beside the output and a copy; as a ratio that is more, the input being half as large."""
    x = tensor(SHAPE, torch.bfloat16, layout)
    peak = peak_bytes(lambda: mxref.qdq(x, format), tmp_path)
    size = x.numel() * 2
    assert peak <= LIMIT * size, f"{peak / size:.2f} times the input"
    grows = size * (1 + (layout == "transposed"))
    assert grows <= peak <= grows + WORKING_SET, f"{(peak - grows) / 2**20:.1f} MiB beside the output and a copy"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the high-water mark is reset as Linux does it")
def test_the_resident_set_of_a_fresh_process_agrees():
    script = f"""
import torch, mxref
torch.set_num_threads(1)
def status(key):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(key))
x = torch.randn({SHAPE}).T
mxref.qdq(x[:, :64].contiguous(), "nvfp4")
open("/proc/self/clear_refs", "w").write("5")  # the high-water mark becomes what is resident now
before = status("VmRSS")
out = mxref.qdq(x, "nvfp4")
print((status("VmHWM") - before) / (x.numel() * 4))
"""
    environment = os.environ | {"PYTHONPATH": str(Path(mxref.__file__).parents[1])}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120)
    assert run.returncode == 0, run.stderr
    assert 1.5 <= float(run.stdout) <= LIMIT, f"{float(run.stdout):.2f} times the input"


def test_the_measure_sees_a_known_peak(tmp_path):
    x = torch.ones(1 << 20)  # 4 MiB
    for call, expected in (
        (lambda: x + 1, 4 << 20),
        (lambda: (x + 1) * (x + 2), 12 << 20),
        (lambda: (x.double() + 1)[:1].clone(), 16 << 20),
    ):
        assert 0 <= peak_bytes(call, tmp_path) - expected < 256  # a few scalars come on top
