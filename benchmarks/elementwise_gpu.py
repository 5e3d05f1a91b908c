"""GPU: element-wise kernels against a copy that moves the same bytes, device time by CUDA-graph replay, in one run.

    python -m benchmarks.elementwise_gpu --json benchmarks/results/elementwise-h200.json

Each kernel is checked against the reference on a part of the input before it is timed; a differing bit prints no number.
`of a copy`: the time of a device-to-device copy that reads and writes as many bytes in total, over the kernel's. For small
tensors `times a bare kernel`: the kernel's time over that of a Triton kernel that copies x; our kernels that quantize few
elements start while the launch before still runs, the bare one does not. Other libraries' kernels run where they are
installed; what they compute is not what ours do, bit for bit, but they move the same bytes.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

import mxref
from accel.triton._launch import Activated, decode_blocks, qdq_blocks, quantize_blocks
from accel.triton.functions import silu, swiglu
from benchmarks.records import moved_bytes
from benchmarks.vllm_peers import installed
from mxref.blocks import check_quantize
from mxref.conformance.report import environment
from mxref.registry import kernel

SIZES = ((8192, 8192), (16384, 16384), (16, 2048))
FORMATS = ("mxfp4", "nvfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2", "mxint8")


@dataclass(frozen=True)
class Contender:
    """What to time, and whose it is."""

    op: str
    format: str
    library: str
    run: Callable[[], object]


@triton.jit
def copy_kernel(x_ptr, out_ptr, count, TILE: tl.constexpr):
    index = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(out_ptr + index, tl.load(x_ptr + index, mask=index < count), mask=index < count)


def device_ms(run: Callable[[], object]) -> float:
    """Median milliseconds on the device."""
    with torch.cuda.stream(torch.cuda.Stream()):
        return triton.testing.do_bench_cudagraph(run, rep=40, return_mode="median")


def copy_ms(count: int) -> float:
    """Milliseconds of a copy that moves `count` bytes in all."""
    source = torch.empty(max(count // 2, 16), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return device_ms(lambda: target.copy_(source))


def bare_ms(x: torch.Tensor) -> float:
    """Milliseconds of a Triton kernel that copies x and does nothing else."""
    out = torch.empty_like(x)
    return device_ms(lambda: copy_kernel[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), TILE=1024))


def ours(x: torch.Tensor) -> Iterator[Contender]:
    """Our kernels, past the checks of their arguments; NVFP4 with a given tensor scale, and with a computed one."""
    hidden = torch.cat([x, x.flip(0)], dim=1)
    for name in FORMATS:
        block = mxref.BLOCK_FORMATS[name]
        scale = torch.tensor(0.01, device=x.device) if block.tensor_scale else None
        call = check_quantize(x, name, None, scale, -1, None)
        yield Contender("qdq", name, "mxref", partial(qdq_blocks, call))
        yield Contender("quantize", name, "mxref", partial(quantize_blocks, call))
        q = quantize_blocks(call)
        yield Contender("dequantize", name, "mxref", partial(decode_blocks, q, torch.bfloat16))
        gate, up = hidden[:, : x.shape[1]], hidden[:, x.shape[1] :]
        middle = check_quantize(gate, name, None, scale, -1, None)
        yield Contender("activate_quantize", name, "mxref", partial(quantize_blocks, middle, Activated("swiglu", up)))
        if block.tensor_scale:
            computed = check_quantize(x, name, None, "per_tensor", -1, None)
            yield Contender("qdq, scale computed", name, "mxref", partial(qdq_blocks, computed))
    yield Contender("silu", "-", "mxref", partial(silu, x))
    yield Contender("swiglu", "-", "mxref", partial(swiglu, x, x.flip(0)))


def peers(x: torch.Tensor) -> Iterator[Contender]:
    """The kernels of libraries that are installed."""
    with contextlib.suppress(ImportError):
        from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import (
            dequantize_to_dtype,
            ref_nvfp4_quant_dequant,
        )

        forward = torch.tensor(100.0, device=x.device)
        yield Contender("qdq", "nvfp4", "vllm", partial(ref_nvfp4_quant_dequant, x, forward, 16))
        q = mxref.quantize(x, "nvfp4")
        scales = q.scales.view(torch.float8_e4m3fn)
        run = partial(dequantize_to_dtype, q.packed, scales, forward, torch.bfloat16, 16, swizzle=False)
        yield Contender("dequantize", "nvfp4", "vllm", run)
    with contextlib.suppress(ImportError):
        from torchao.prototype.mx_formats import kernels as ao
        from torchao.prototype.mx_formats.mx_tensor import MXTensor
        from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

        if torch.cuda.get_device_capability() >= (10, 0):
            run = partial(ao.triton_to_mxfp8_dim0, x, 32, "floor")
        else:  # there torchao defines no such kernel, and says that it needs Triton
            run = partial(MXTensor.to_mx, x, torch.float8_e4m3fn, 32)
        yield Contender("quantize", "mxfp8_e4m3", "torchao", run)
        codes, scales = x.to(torch.float8_e4m3fn), torch.full((x.shape[0], x.shape[1] // 32), 127, device=x.device)
        scales = scales.to(torch.uint8).view(torch.float8_e8m0fnu)
        run = partial(ao.triton_mxfp8_dequant_dim0, codes, scales, torch.bfloat16)
        yield Contender("dequantize", "mxfp8_e4m3", "torchao", run)
        fp4 = torch.float4_e2m1fn_x2
        yield Contender("quantize", "mxfp4", "torchao", partial(MXTensor.to_mx, x, fp4, 32))
        yield Contender("dequantize", "mxfp4", "torchao", MXTensor.to_mx(x, fp4, 32).dequantize)
        scale = torch.tensor(0.01, device=x.device)
        yield Contender("quantize", "nvfp4", "torchao", partial(NVFP4Tensor.to_nvfp4, x, per_tensor_scale=scale))
        q = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale)
        yield Contender("dequantize", "nvfp4", "torchao", q.dequantize)


def gate(x: torch.Tensor) -> None:
    """Raise unless the kernels give the reference's bits on a part of `x`."""
    part = x[:64]
    with mxref.use("triton", strict=True, check=True):
        for name in FORMATS:
            mxref.qdq(part, name)
            mxref.dequantize(mxref.quantize(part, name), torch.bfloat16)
            mxref.activate_quantize(part, name)
        mxref.functions.swiglu(mxref.functions.silu(part), part)


def measure(contender: Contender, count: int, bare: float) -> dict:
    """One row; with the reason instead of times where a library's kernel does not run here."""
    moved = moved_bytes(contender.op, contender.format, count)
    row = {"op": contender.op, "format": contender.format, "library": contender.library, "moved_bytes": moved}
    if contender.library == "mxref" and contender.format in FORMATS:
        row["recipe"] = mxref.BLOCK_FORMATS[contender.format].default_recipe
    try:
        ms = device_ms(contender.run)
    except Exception as failure:
        return {**row, "failed": f"{type(failure).__name__}: {failure}".splitlines()[0]}
    copied = copy_ms(moved)
    return {**row, "ms": ms, "copy_ms": copied, "of_a_copy": copied / ms, "times_a_bare_kernel": ms / bare}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the record to this file")
    parser.add_argument("--commit", help="the commit to name in the record (default: ask git)")
    arguments = parser.parse_args()
    kernel("qdq", "triton")
    rows = []
    for size in SIZES:
        x = torch.randn(size, device="cuda", dtype=torch.bfloat16)
        gate(x)
        bare = bare_ms(x)
        small = x.numel() < 1 << 20
        for contender in (*ours(x), *(() if small else peers(x))):
            rows.append({"size": list(size), **measure(contender, x.numel(), bare)})
            print({name: round(v, 4) if isinstance(v, float) else v for name, v in rows[-1].items()}, flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            where = environment("cuda", arguments.commit, *installed("vllm", "torchao"))
            json.dump({**where, "dtype": "bfloat16", "rows": rows}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
