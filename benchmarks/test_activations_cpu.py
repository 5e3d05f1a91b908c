"""Activations: silu, swiglu, and an activation quantized in one op, beside torch's and a copy."""

from collections.abc import Iterator
from functools import partial

import torch
from oracles import activations

import mxref
from benchmarks.contenders import (
    BLOCK_FORMATS,
    COPY,
    ORACLE_ROWS,
    Contender,
    copying,
    normal,
    of_op,
    peer,
    quantized_corner,
    unlike_corner,
    values,
)
from mxref.comparison import difference


def contenders(quick: bool) -> Iterator[Contender]:
    size = (8, 64) if quick else (1024, 4096)
    count = size[0] * size[1]
    for op, inputs in (("silu", 1), ("swiglu", 2)):
        yield copying(op, "float32", size)
        row = Contender(op, "-", "float32", size, floor=COPY, moved_bytes=4 * count * (inputs + 1))
        yield from of_op(row, partial(_inputs, size, inputs), partial(_unlike_oracle, op, size, inputs))
        yield peer(row, "torch", partial(_by_torch, op, size), partial(_by_mxref, op, size, inputs))
    yield copying("activate_quantize", "bfloat16", size)
    for format in ("mxfp4", "nvfp4") if quick else BLOCK_FORMATS:
        block = mxref.BLOCK_FORMATS[format]
        moved = 4 * count + int(count * block.bits_per_element / 8)
        floor, recipe = COPY, block.default_recipe
        row = Contender("activate_quantize", format, "bfloat16", size, floor=floor, recipe=recipe, moved_bytes=moved)
        given = partial(_hidden, format, size)
        yield from of_op(row, given, partial(_unlike_quantized, format, size))


def _inputs(size: tuple[int, int], inputs: int) -> tuple[tuple, dict]:
    return tuple(normal(size, seed=seed) for seed in range(inputs)), {}


def _hidden(format: str, size: tuple[int, int]) -> tuple[tuple, dict]:
    """Gate and up, `[M, 2 I]` for a result `[M, I]`."""
    return (normal((size[0], 2 * size[1]), "bfloat16"), format), {}


def _by_torch(op: str, size: tuple[int, int]):
    silu, (x, *up) = torch.nn.functional.silu, _inputs(size, 1 + (op == "swiglu"))[0]
    return partial(silu, x) if op == "silu" else lambda: silu(x) * up[0]


def _by_mxref(op: str, size: tuple[int, int], inputs: int) -> torch.Tensor:
    return getattr(mxref.functions, op)(*_inputs(size, inputs)[0])


def _unlike_oracle(op: str, size: tuple[int, int], inputs: int, result: torch.Tensor) -> str | None:
    rows = [x[:ORACLE_ROWS].numpy() for x in _inputs(size, inputs)[0]]
    return difference(result[:ORACLE_ROWS], values(getattr(activations, op)(*rows), "float32"))


def _unlike_quantized(format: str, size: tuple[int, int], result) -> str | None:
    gate, up = _hidden(format, size)[0][0].float().chunk(2, -1)
    x = values(activations.swiglu(gate.numpy(), up.numpy()), "bfloat16")
    return unlike_corner(result, quantized_corner(x, format))


def test_activations(timed, contender):
    timed(contender)
