"""GPU: block-scaled products, bit for bit the reference's, beside cuBLAS on the same operands, in one run.

    python -m benchmarks.matmul_gpu --json benchmarks/results/matmul-h200.json
    python -m benchmarks.matmul_gpu --quick            # a line for each variant of a kernel: is it right, how fast is it

A result's corners, rows of worst cases among them, are compared with the reference's before it is timed; a differing bit
prints no time. cuBLAS multiplies the decoded operands, in bfloat16 and, for MXFP8, whose dots need it, in float64; its bits
are not the reference's. Our time includes decoding both operands from packed codes. Medians of device time by CUDA-graph
replay; few rows meet weights that rotate, so that none of them is found in the cache.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import triton

import mxref
from accel.triton._launch import decode_blocks, quantize_blocks
from accel.triton.matmul import Folded, Fused, Warpgroups, _Operand, chosen, folded_dtype, folded_operands, fused, multiply
from mxref.blocks import BlockTensor, check_quantize
from mxref.comparison import difference
from mxref.conformance.report import environment

SQUARES = (8192, 4096)
LAYERS = {"Qwen3-8B gate and up": (24576, 4096), "Qwen3-8B down": (4096, 12288), "Llama-3-70B attention out": (8192, 8192)}
FEW_ROWS = (16, 128)
FORMATS = ("mxfp4", "nvfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxint8", "mxfp8_e4m3", "mxfp8_e5m2")
ALSO_SLOW = ("mxfp8_e5m2",)  # five float64 dots a block: not at the largest size
CORNER = 256
ROTATED_BYTES = 200 << 20  # more than a cache holds

# d2x64w3: two product tiles a warpgroup (s: one), 2 chunks of 64 columns, 3 warpgroups
WARPGROUPS = {
    "d2x64w3": Warpgroups(3, 2, 64, 1, 5, 2),
    "d2x64w3b2": Warpgroups(3, 2, 64, 2, 2, 2),
    "d3x64w2": Warpgroups(2, 3, 64, 1, 5, 2),
    "d3x64w2b2": Warpgroups(2, 3, 64, 2, 2, 2),
    "d4x64w2": Warpgroups(2, 4, 64, 1, 4, 2),
    "d4x64w2b2": Warpgroups(2, 4, 64, 2, 2, 2),
    "d1x128w2": Warpgroups(2, 1, 128, 1, 6, 2),
    "d1x128w2b2": Warpgroups(2, 1, 128, 2, 3, 2),
    "d1x64w4": Warpgroups(4, 1, 64, 1, 5, 2),
    "d1x64w3": Warpgroups(3, 1, 64, 1, 6, 2),
    "s2x64w4": Warpgroups(4, 2, 64, 1, 4, 1),
    "s2x64w4b2": Warpgroups(4, 2, 64, 2, 2, 1),
    "s3x64w3": Warpgroups(3, 3, 64, 1, 4, 1),
    "s1x128w3": Warpgroups(3, 1, 128, 1, 5, 1),
    "s2x128w2": Warpgroups(2, 2, 128, 1, 4, 1),
    "d2x64w3g16": Warpgroups(3, 2, 64, 1, 5, 2, group=16),
    "d2x64w3g4": Warpgroups(3, 2, 64, 1, 5, 2, group=4),
    "s2x64w4g16": Warpgroups(4, 2, 64, 1, 4, 1, group=16),
    "s2x64w4g4": Warpgroups(4, 2, 64, 1, 4, 1, group=4),
}
FOLDED = {f"f{m}x{n}w{w}s{s}": Folded(m, n, w, s) for m, n, w, s in ((128, 128, 8, 6), (64, 256, 8, 5), (128, 64, 4, 4))}
FOLDED_WIDE = {
    f"f{m}x{n}w{w}s{s}": Folded(m, n, w, s)
    for m, n, w, s in (
        (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (64, 64, 2, 3), (128, 64, 4, 3), (64, 128, 4, 3), (128, 64, 8, 3),
        (128, 128, 8, 2), (32, 64, 4, 3), (32, 128, 4, 3),
    )
}  # fmt: skip
FUSED_FEW = {
    f"c{m}x{n}w{w}s{s}": Fused(m, n, w, s)
    for m, n, w, s in (
        (16, 16, 1, 4), (16, 16, 2, 4), (16, 32, 2, 4), (16, 32, 4, 3), (16, 32, 4, 5), (16, 64, 4, 3), (16, 64, 4, 5),
        (16, 128, 8, 3),
    )
}  # fmt: skip
FUSED = {
    f"c{m}x{n}w{w}s{s}": Fused(m, n, w, s)
    for m, n, w, s in ((64, 32, 4, 3), (64, 64, 4, 3), (64, 64, 8, 3), (128, 32, 4, 3), (128, 64, 8, 3), (64, 128, 8, 3))
}  # fmt: skip
FOR_128_ROWS = {"d1x64w2": Warpgroups(2, 1, 64, 1, 8, 2), "s1x64w2": Warpgroups(2, 1, 64, 1, 8, 1)}


@dataclass(frozen=True)
class Sweep:
    """Variants to try on one product."""

    format: str
    rows: int
    columns: int
    k: int
    variants: dict[str, Fused | Folded | Warpgroups]


SWEEPS = {
    "nvfp4": Sweep("nvfp4", 8192, 8192, 8192, WARPGROUPS | FOLDED),
    "mxfp4": Sweep("mxfp4", 8192, 8192, 8192, WARPGROUPS | FOLDED),
    "mxfp8": Sweep("mxfp8_e4m3", 4096, 4096, 4096, FOLDED_WIDE),
    "portable": Sweep("mxfp4", 4096, 4096, 4096, FUSED),
    "few": Sweep("mxfp4", 16, 24576, 4096, FUSED_FEW),
    "few_nvfp4": Sweep("nvfp4", 16, 24576, 4096, FUSED_FEW),
    "128": Sweep("mxfp4", 128, 24576, 4096, FUSED | FOR_128_ROWS),
}


# ---- operands -------------------------------------------------------------------------------------------------------


def operand(rows: int, k: int, format: str, seed: int) -> BlockTensor:
    """Normal numbers, quantized, and above them rows of worst cases: all largest, alternating extremes, sums that cancel."""
    block = mxref.BLOCK_FORMATS[format]
    element, generator = block.element, torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(rows, k, generator=generator, device="cuda")
    sign = torch.where(torch.rand(k, generator=generator, device="cuda") < 0.5, -1.0, 1.0)
    largest, alternating = torch.full((k,), element.max, device="cuda"), torch.arange(k, device="cuda") % 2
    worst = [
        largest,
        torch.where(alternating == 0, largest, element.quantum),
        largest * sign,
        torch.where(alternating == 0, -largest, largest),
        torch.where(alternating == 0, -element.quantum, largest),
    ]
    if block.scale.is_power_of_two:
        worst.append(largest * sign * 2.0 ** (torch.arange(k, device="cuda") // block.block_size % 24 - 12))
    x[: len(worst)] = torch.stack(worst)
    scale = torch.ones((), device="cuda") if block.tensor_scale else None
    return quantize_blocks(check_quantize(x, format, None, scale, -1, None))


def wrong_bits(a: BlockTensor, b: BlockTensor, out: torch.Tensor) -> str | None:
    """What differs from the reference in the corners of C, or None."""
    for rows, columns in itertools.product((slice(0, CORNER), slice(-CORNER, None)), repeat=2):
        with mxref.use():
            expected = mxref.matmul(a[rows], b[columns], out_dtype=out.dtype)
        found = difference(out[rows, columns], expected)
        if found is not None:
            return f"rows {rows}, columns {columns}: {found}"
    return "NaN beyond the corners" if out.isnan().any() else None


def flagged_and_odd() -> Iterator[tuple[str, str | None]]:
    """Small products compared whole: scales that cannot be folded, a NaN block, odd sizes, a bias, tensor scales a row."""
    generator = torch.Generator(device="cuda").manual_seed(5)
    for a_format, b_format in (("mxfp4", "mxfp4"), ("nvfp4", "nvfp4"), ("mxint8", "nvfp4"), ("mxfp8_e4m3", "mxfp8_e4m3")):
        for label, spread in (("flagged", 40.0), ("odd", 1.0)):
            a, b = (torch.randn(n, 1003, generator=generator, device="cuda") for n in (387, 301))
            a, b = a * torch.exp(spread * torch.randn(387, 1, generator=generator, device="cuda")), b.clone()
            a[3, 700], b[9] = math.nan, 0.0
            a, b = (
                quantize_blocks(check_quantize(x, f, None, "per_row" if f == "nvfp4" else None, -1, None))
                for x, f in ((a, a_format), (b, b_format))
            )
            bias = torch.randn(301, generator=generator, device="cuda").bfloat16()
            with mxref.use():
                expected = mxref.matmul(a, b, bias=bias, out_dtype=torch.bfloat16)
            paths = {"fused": Fused(64, 64, 4)}
            if folded_dtype(a.format, b.format) == torch.float64:
                paths["folded"] = Folded(64, 64, 4, 3)
            elif folded_dtype(a.format, b.format) is not None:
                paths |= {"folded": Folded(128, 128, 8), "d2x64w3": WARPGROUPS["d2x64w3"], "s2x64w4": WARPGROUPS["s2x64w4"]}
            for name, path in paths.items():
                found = attempt(differs, expected, a, b, bias, path)
                yield f"{label} {a_format} {b_format} {name}", found


def differs(expected: torch.Tensor, a: BlockTensor, b: BlockTensor, bias: torch.Tensor, path) -> str | None:
    """What of the product by a path differs, or None."""
    return difference(multiply(a, b, bias, expected.dtype, path), expected)


def attempt(run: Callable[..., str | None], *arguments) -> str | None:
    """What `run` finds, or how it fails."""
    try:
        return run(*arguments)
    except Exception as failure:
        return f"{type(failure).__name__}: {str(failure).strip()[-300:]}"


# ---- times ----------------------------------------------------------------------------------------------------------


def device_ms(run: Callable[[], object], rep: int = 60) -> float:
    """Median milliseconds on the device."""
    with torch.cuda.stream(torch.cuda.Stream()):
        return triton.testing.do_bench_cudagraph(run, rep=rep, return_mode="median")


@dataclass(frozen=True)
class Product:
    """Operands of one size and format: A, and as many B as it takes to leave the cache."""

    a: BlockTensor
    bs: tuple[BlockTensor, ...]

    @classmethod
    def of(cls, format: str, rows: int, columns: int, k: int) -> "Product":
        """Random operands with worst cases."""
        bits = mxref.BLOCK_FORMATS[format].bits_per_element
        sets = 1 if rows > max(FEW_ROWS) else max(2, math.ceil(ROTATED_BYTES / (columns * k * bits / 8)))
        return cls(operand(rows, k, format, 1), tuple(operand(columns, k, format, 2 + i) for i in range(sets)))

    @property
    def flops(self) -> float:
        """Of one product, two for each multiply and add."""
        return 2.0 * self.a.shape[0] * self.bs[0].shape[0] * self.a.shape[1]

    def check(self, path: Fused | Folded | Warpgroups) -> str | None:
        """What is wrong with a path's bits, or None."""
        torch.full(
            (self.a.shape[0], self.bs[0].shape[0]), math.nan, dtype=torch.bfloat16, device="cuda"
        )  # for memory to reuse
        return wrong_bits(self.a, self.bs[0], multiply(self.a, self.bs[0], None, torch.bfloat16, path))

    def ms(self, path: Fused | Folded | Warpgroups) -> float:
        """Milliseconds of one product by a path."""
        return device_ms(lambda: [multiply(self.a, b, None, torch.bfloat16, path) for b in self.bs]) / len(self.bs)

    def decoding_ms(self, path: Folded | Warpgroups) -> float:
        """Milliseconds that decoding A and B takes of them."""
        operands = [_Operand.of(self.a), _Operand.of(self.bs[0])]
        flags = tuple(x.no_flags() for x in operands)
        return device_ms(lambda: folded_operands(*operands, path, flags))

    def cublas_ms(self, dtype: torch.dtype) -> float:
        """Milliseconds of cuBLAS on the decoded operands."""
        a, *bs = (decode_blocks(q, torch.float32).to(dtype) for q in (self.a, *self.bs))
        return device_ms(lambda: [a @ b.T for b in bs]) / len(bs)


def rows_of(format: str, rows: int, columns: int, k: int) -> Iterator[dict]:
    """A row for cuBLAS and for each kind of kernel."""
    product = Product.of(format, rows, columns, k)
    header = {"format": format, "m": rows, "n": columns, "k": k}
    wide = mxref.BLOCK_FORMATS[format].element.bits == 8 and format != "mxint8"
    cublas = {}
    for dtype in (torch.bfloat16, torch.float64) if wide else (torch.bfloat16,):
        name = f"cublas {str(dtype).removeprefix('torch.')}"
        ms = cublas[name] = product.cublas_ms(dtype)
        yield {**header, "kernel": name, "ms": ms, "tflops": product.flops / ms * 1e-9}
    for name, path in contenders(product).items():
        row = {**header, "kernel": name, "path": str(path)}
        wrong = attempt(product.check, path)
        if wrong is not None:
            yield {**row, "wrong": wrong}
            continue
        ms = product.ms(path)
        row |= {"ms": ms, "tflops": product.flops / ms * 1e-9}
        if not isinstance(path, Fused):
            row["decoding_ms"] = product.decoding_ms(path)
        yield {**row, **{f"of_{name.replace(' ', '_')}": reference / ms for name, reference in cublas.items()}}


def contenders(product: Product) -> dict[str, Fused | Folded | Warpgroups]:
    """What users get, and the other kinds of kernel beside it."""
    dtype = folded_dtype(product.a.format, product.bs[0].format)
    found = {"chosen": chosen(product.a, product.bs[0])}
    if dtype == torch.bfloat16:
        found["folded"] = Folded(128, 128, 8, 6)
    if dtype is not None:
        found["portable"] = fused(product.a, product.bs[0])
    return {name: path for name, path in found.items() if name == "chosen" or path != found["chosen"]}


# ---- sweeps ---------------------------------------------------------------------------------------------------------


def compile_variant(job: tuple[str, str]) -> str | None:
    """In another process: compile a variant of a sweep, by using it once on little, into the cache on disk."""
    sweep = SWEEPS[job[0]]
    a, b = operand(min(sweep.rows, 512), 256, sweep.format, 1), operand(512, 256, sweep.format, 2)

    def compile() -> None:
        multiply(a, b, None, torch.bfloat16, sweep.variants[job[1]])

    return attempt(compile)


def run_sweep(name: str) -> Iterator[dict]:
    """A row for each variant."""
    sweep = SWEEPS[name]
    product = Product.of(sweep.format, sweep.rows, sweep.columns, sweep.k)
    dtype = torch.float64 if folded_dtype(product.a.format, product.bs[0].format) == torch.float64 else torch.bfloat16
    cublas = product.cublas_ms(dtype)
    yield {"sweep": name, "variant": f"cublas {dtype}", "ms": cublas, "tflops": product.flops / cublas * 1e-9}
    decoding = None
    for variant, path in sweep.variants.items():
        wrong = attempt(product.check, path)
        row = {"sweep": name, "variant": variant, "right": wrong is None}
        if wrong is None:
            ms = product.ms(path)
            row |= {"ms": ms, "tflops": product.flops / ms * 1e-9, "of_cublas": cublas / ms}
            if not isinstance(path, Fused):
                decoding = decoding or product.decoding_ms(path)
                row |= {"decoding_ms": decoding, "of_cublas_decoded": cublas / (ms - decoding)}
        yield row | ({} if wrong is None else {"wrong": wrong})


def show(row: dict) -> None:
    """Print a row."""
    print({name: round(v, 4) if isinstance(v, float) else v for name, v in row.items()}, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the record to this file")
    parser.add_argument("--commit", help="the commit to name in the record (default: ask git)")
    parser.add_argument("--quick", action="store_true", help="sweep over variants instead")
    parser.add_argument("--sweeps", default=",".join(SWEEPS), help=f"which sweeps, of {', '.join(SWEEPS)}")
    parser.add_argument("--formats", default=",".join(FORMATS), help="which formats")
    parser.add_argument("--processes", type=int, default=12, help="how many compile variants at once")
    arguments = parser.parse_args()
    found, formats = [], arguments.formats.split(",")

    def add(row: dict) -> None:
        show(row)
        found.append(row)

    if arguments.quick:
        sweeps = arguments.sweeps.split(",")
        jobs = [(name, variant) for name in sweeps for variant in SWEEPS[name].variants]
        with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
            for job, problem in zip(jobs, pool.imap(compile_variant, jobs)):
                if problem:
                    print(*job, problem, flush=True)
    for name, wrong in flagged_and_odd():
        add({"gate": name, "right": wrong is None} | ({} if wrong is None else {"wrong": wrong}))
    sizes = [(format, n, n, n) for n in SQUARES for format in formats if n < max(SQUARES) or format not in ALSO_SLOW]
    sizes += [
        (f, rows, *layer) for rows in FEW_ROWS for layer in LAYERS.values() for f in formats if f in ("mxfp4", "nvfp4")
    ]
    work = map(run_sweep, sweeps) if arguments.quick else (rows_of(*size) for size in sizes)
    for rows in work:
        try:
            for row in rows:
                add(row)
        except Exception:
            traceback.print_exc()
        torch.cuda.empty_cache()
        if arguments.json:
            with open(arguments.json, "w") as file:
                json.dump({**environment("cuda", arguments.commit), "layers": LAYERS, "rows": found}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
