"""Products: block by block and of decoded operands, beside torch's in bfloat16 on the same values."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from oracles import products

import mxref
from benchmarks.contenders import BLOCK_FORMATS, Contender, as_operand, normal, of_op, peer, values
from mxref.comparison import difference

TORCH = "torch bfloat16"
CORNER = 4


def contenders(quick: bool) -> Iterator[Contender]:
    for size in ((8, 8, 64),) if quick else ((16, 2048, 2048), (512, 1024, 1024)):
        rows, columns, k = size
        row = Contender("matmul", "-", "bfloat16", size, floor=TORCH, flops=2 * rows * columns * k)
        yield replace(peer(row, TORCH, partial(_by_torch, size)), floor=None)
        for format in BLOCK_FORMATS:
            of_format = replace(row, format=format, recipe=mxref.BLOCK_FORMATS[format].default_recipe)
            for semantics in ("blockwise", "dequantized"):
                given = partial(_arguments, format, size, semantics)
                for contender in of_op(of_format, given, partial(_unlike_oracle, format, size, semantics)):
                    yield replace(contender, who=f"{contender.who}, {semantics}")


def _matrices(size: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns, k = size
    return normal((rows, k), "bfloat16"), normal((columns, k), "bfloat16", seed=1)


def _arguments(format: str, size: tuple[int, int, int], semantics: str) -> tuple[tuple, dict]:
    a, b = (mxref.quantize(x, format) for x in _matrices(size))
    return (a, b), {"semantics": semantics, "out_dtype": torch.bfloat16}


def _by_torch(size: tuple[int, int, int]):
    a, b = _matrices(size)
    return partial(torch.nn.functional.linear, a, b)


def _unlike_oracle(format: str, size: tuple[int, int, int], semantics: str, result: torch.Tensor) -> str | None:
    """Both ends of the diagonal."""
    (a, b), _ = _arguments(format, size, semantics)
    for part in (slice(0, CORNER), slice(-CORNER, None)):
        first, second = as_operand(a[part]), as_operand(b[part])
        if semantics == "blockwise":
            expected = products.blockwise(first, second)
        else:
            expected = products.dequantized(first.decoded("bfloat16"), second.decoded("bfloat16"), second.block)
        found = difference(result[part, part], values(expected, "bfloat16"))
        if found is not None:
            return found
    return None


def test_matmul(timed, contender):
    timed(contender)
