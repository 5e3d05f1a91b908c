"""Level 2: the reference gives the same bits on another device as on the CPU.

    python -m tests.device_agreement --device cuda --json benchmarks/results/device-agreement.json

Every op, every format and recipe, on edges, random bits and matrix shapes. The expected value is the CPU's
result, which the other tests compare with independent sources.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

import mxref
from mxref import functions
from tests.environment import environment

Case = tuple[str, str, Callable[[str], list[torch.Tensor]]]


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp(torch.randn(shape, generator=generator) * 2)
    return (torch.randn(shape, generator=generator) * spread).to(dtype)


def _random_bits(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32).view(torch.float32)


def _random_codes(element: str, rows: int, length: int, seed: int) -> torch.Tensor:
    """Random codes `[rows, length]`; Inf and NaN in every eighth row only, since they would hide all else."""
    record = mxref.ELEMENT_FORMATS[element]
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, record.code_count, (rows, length), generator=generator, dtype=torch.uint8)
    special = ~torch.tensor(record.values).isfinite()[codes.int()]
    special[::8] = False
    return codes.masked_fill(special, 1)


def _all_bf16() -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def _parts(q: mxref.BlockTensor) -> list[torch.Tensor]:
    return [q.codes, q.scales, *([] if q.tensor_scale is None else [q.tensor_scale])]


def _recipes(format: str) -> list[mxref.Recipe]:
    nvidia = mxref.BLOCK_FORMATS[format].tensor_scale
    fitting = [r for r in mxref.RECIPES.values() if (r.scale_rule == "amax") == nvidia]
    base = mxref.RECIPES["nvidia" if nvidia else "ocp"]
    return [
        *fitting,
        replace(base, name="stochastic", rounding="stochastic"),
        replace(base, name="hadamard", transform=mxref.Hadamard(16)),
        replace(base, name="saturate_inf", inf="saturate"),
    ]


def cases() -> Iterator[Case]:
    """(op, case, function of a device that returns the tensors to compare)."""
    inputs = {
        "all_bf16": _all_bf16(),
        "random_bits": _random_bits(1 << 20),
        "fp16": torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16),
    }
    for name in ("exp", "sigmoid", "silu", "gelu_tanh", "relu2"):
        for label, x in inputs.items():
            yield name, label, lambda d, n=name, x=x: [getattr(functions, n)(x.to(d))]
    for name in ("swiglu", "swiglu_oai"):
        gate, up = _random_bits(1 << 20, 1), _random_bits(1 << 20, 2)
        yield name, "random_bits", lambda d, n=name, g=gate, u=up: [getattr(functions, n)(g.to(d), u.to(d))]

    for name, element in mxref.ELEMENT_FORMATS.items():
        codes = torch.arange(element.code_count, dtype=torch.uint8)
        yield "decode", name, lambda d, n=name, c=codes: [mxref.decode(c.to(d), n)]
        for label, x in inputs.items():
            x = x if element.nan_code is not None else torch.where(x.isnan(), 0.0, x)
            x = x if element.signed else x.abs()
            for rounding in ("nearest_even", "toward_zero", "ties_away", "away_from_zero", "stochastic"):
                seed = 5 if rounding == "stochastic" else None
                yield (
                    "encode",
                    f"{name} {label} {rounding}",
                    lambda d, x=x, n=name, r=rounding, s=seed: [mxref.encode(x.to(d), n, rounding=r, seed=s)],
                )

    matrices = {
        "bf16": _random(96, 200, dtype=torch.bfloat16),
        "fp32": _random(64, 333, seed=1),
        "random_bits": _random_bits(64 * 320, 3).reshape(64, 320),
        "transposed": _random(200, 96, seed=2).T,
    }
    for format in mxref.BLOCK_FORMATS:
        for recipe in _recipes(format):
            seed = 7 if recipe.rounding == "stochastic" else None
            for label, x in matrices.items():
                x = x[:, : x.shape[1] // 16 * 16] if recipe.transform else x
                kwargs = {"recipe": recipe, "seed": seed}
                case = f"{format} {recipe.name} {label}"
                yield "quantize", case, lambda d, x=x, f=format, k=kwargs: _parts(mxref.quantize(x.to(d), f, **k))
                yield "qdq", case, lambda d, x=x, f=format, k=kwargs: [mxref.qdq(x.to(d), f, **k)]
        q = mxref.quantize(matrices["random_bits"], format)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            yield "dequantize", f"{format} {dtype}", lambda d, q=q, t=dtype: [mxref.dequantize(_to(q, d), t)]

    elements = [name for name, element in mxref.ELEMENT_FORMATS.items() if element.signed]
    for a_element, b_element in itertools.product(elements, repeat=2):
        for length in (16, 32):
            a, b = _random_codes(a_element, 300, length, seed=12), _random_codes(b_element, 200, length, seed=13)
            yield (
                "block_dot",
                f"{a_element} {b_element} {length}",
                lambda d, a=a, b=b, n=a_element, m=b_element: [mxref.block_dot(a.to(d), b.to(d), n, m)],
            )
    for a_format in mxref.BLOCK_FORMATS:
        for b_format in mxref.BLOCK_FORMATS:
            a, b = mxref.quantize(_random(70, 336, seed=4), a_format), mxref.quantize(_random(40, 336, seed=5), b_format)
            yield (
                "matmul",
                f"{a_format} {b_format}",
                lambda d, a=a, b=b: [
                    mxref.matmul(_to(a, d), _to(b, d), out_dtype=t) for t in (torch.float32, torch.bfloat16)
                ],
            )
        x, b = _random(70, 336, seed=6, dtype=torch.bfloat16), mxref.quantize(_random(40, 336, seed=5), a_format)
        yield "matmul", f"bf16 {a_format}", lambda d, x=x, b=b: [mxref.matmul(x.to(d), _to(b, d))]

    ids, weights = mxref.route(_random(33, 6, seed=8), 2)
    yield "route", "softmax", lambda d: list(mxref.route(_random(257, 64, seed=8).to(d), 8))
    x = _random(33, 96, seed=9, dtype=torch.bfloat16)
    for format in mxref.BLOCK_FORMATS:
        w13, w2 = mxref.quantize(_random(6, 160, 96, seed=10), format), mxref.quantize(_random(6, 96, 80, seed=11), format)
        for act, activation in ((format, "silu"), (None, "silu"), (format, "swiglu_oai")):
            yield (
                "moe_experts",
                f"{format} activations {act} {activation}",
                lambda d, w13=w13, w2=w2, act=act, n=activation: [
                    mxref.moe_experts(
                        x.to(d), _to(w13, d), _to(w2, d), ids.to(d), weights.to(d), act_format=act, activation=n
                    )
                ],
            )


def _to(q: mxref.BlockTensor, device: str) -> mxref.BlockTensor:
    scale = None if q.tensor_scale is None else q.tensor_scale.to(device)
    return mxref.BlockTensor(q.codes.to(device), q.scales.to(device), scale, q.format, q.recipe, q.axis)


def differing_elements(case: Callable[[str], list[torch.Tensor]], device: str) -> int:
    """Number of elements whose bits differ between `device` and the CPU; -1 if shapes or dtypes do."""
    total = 0
    for expected, actual in zip(case("cpu"), case(device), strict=True):
        actual = actual.cpu()
        if expected.shape != actual.shape or expected.dtype != actual.dtype:
            return -1
        width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.element_size()]
        total += int((expected.contiguous().view(width) != actual.contiguous().view(width)).sum())
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="the device to compare with the CPU (default: cuda)")
    parser.add_argument("--json", help="write the record to this file")
    parser.add_argument("--commit", help="the commit to name in the record (default: ask git)")
    arguments = parser.parse_args()
    rows: dict[str, dict] = {}
    for op, label, case in cases():
        row = rows.setdefault(op, {"op": op, "cases": 0, "differing": 0, "failed": []})
        row["cases"] += 1
        try:
            differing = differing_elements(case, arguments.device)
        except Exception as error:
            differing = f"{type(error).__name__}: {error}"
        if differing:
            row["differing"] += 1
            row["failed"].append({"case": label, "differing": differing})
            print(f"{op} {label}: {differing}")
    for row in rows.values():
        print(f"{row['op']:<12} {row['cases']:>4} cases, {row['differing']} differ")
    record = {
        "what": f"reference on {arguments.device} against reference on cpu, as bits",
        **environment(arguments.device, arguments.commit),
        "rows": list(rows.values()),
    }
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(record, file, indent=1)
    return 1 if any(row["differing"] for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
