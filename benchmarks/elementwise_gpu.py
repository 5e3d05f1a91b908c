"""GPU: element-wise kernels against a copy that moves the same bytes, device time by CUDA-graph replay, in one run.

    python -m benchmarks.elementwise_gpu --json benchmarks/results/elementwise-h200.json

Each kernel is checked against the reference on a part of the input before it is timed; a differing bit prints no number.
`of a copy`: the time of a device-to-device copy that reads and writes as many bytes in total, over the kernel's.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial

import torch
import triton

import mxref
from mxref.conformance.report import environment
from mxref.registry import kernel

SIZES = ((8192, 8192), (32768, 8192), (16, 2048))
FORMATS = ("mxfp4", "mxfp6_e2m3", "mxfp8_e4m3", "nvfp4")


def device_ms(run: Callable[[], object]) -> float:
    """Median milliseconds on the device."""
    with torch.cuda.stream(torch.cuda.Stream()):
        return triton.testing.do_bench_cudagraph(run, rep=60, return_mode="median")


def copy_ms(count: int) -> float:
    """Milliseconds of a copy that moves `count` bytes in all."""
    source = torch.empty(max(count // 2, 16), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return device_ms(lambda: target.copy_(source))


def contenders(x: torch.Tensor) -> dict[str, tuple[Callable[[], object], int]]:
    """Name to (what to time, bytes that it moves)."""
    from accel.triton._launch import decode_blocks, encode_blocks
    from accel.triton.functions import silu, swiglu
    from mxref.blocks import check_quantize

    count = x.numel()
    found = {}
    for name in FORMATS:
        block = mxref.BLOCK_FORMATS[name]
        scale = torch.tensor(0.01, device=x.device) if block.tensor_scale else None
        call = check_quantize(x, name, None, scale, -1, None)
        scales = count // block.block_size
        found[f"qdq {name}"] = partial(encode_blocks, call, False), 4 * count
        found[f"quantize {name}, a byte a code"] = partial(encode_blocks, call, True), 3 * count + scales
        q = kernel("quantize", "triton").function(x, name, tensor_scale=scale)
        found[f"dequantize {name}, a byte a code"] = partial(decode_blocks, q, torch.bfloat16), 3 * count + scales
    found["silu"] = partial(silu, x), 4 * count
    found["swiglu"] = partial(swiglu, x, x.flip(0)), 6 * count
    return found


def gate(x: torch.Tensor) -> None:
    """Raise unless the kernels give the reference's bits on a part of `x`."""
    part = x[:64]
    with mxref.use("triton", strict=True, check=True):
        for name in FORMATS:
            mxref.qdq(part, name)
            mxref.dequantize(mxref.quantize(part, name), torch.bfloat16)
        mxref.functions.swiglu(mxref.functions.silu(part), part)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the record to this file")
    parser.add_argument("--commit", help="the commit to name in the record (default: ask git)")
    arguments = parser.parse_args()
    rows = []
    for size in SIZES:
        x = torch.randn(size, device="cuda", dtype=torch.bfloat16)
        gate(x)
        for name, (run, moved) in contenders(x).items():
            ms, copied = device_ms(run), copy_ms(moved)
            rows.append({"name": name, "size": list(size), "ms": ms, "copy_ms": copied, "of_a_copy": copied / ms})
            print(
                f"{str(size):<16} {name:<40} {1e3 * ms:9.1f} us  {moved / ms / 1e9:5.2f} TB/s  {copied / ms:.2f} of a copy"
            )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({**environment("cuda", arguments.commit), "dtype": "bfloat16", "rows": rows}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
