"""Layers of experts: of the embedded model's shape and of a larger one, beside torch's in bfloat16."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

import mxref
from benchmarks.contenders import Contender, normal, of_op, peer
from benchmarks.experts import grouped, looped, quantized_layer, unlike_oracle

LOOP = "torch bfloat16, expert by expert"
FORMATS = (("mxfp4", "mxfp4"), ("nvfp4", "nvfp4"), ("mxfp8_e4m3", "mxfp8_e4m3"), ("mxfp4", None))


@dataclass(frozen=True)
class Shape:
    """Of a layer, and how many tokens it meets."""

    tokens: int
    experts: int
    hidden: int
    width: int
    top_k: int

    @property
    def size(self) -> tuple[int, ...]:
        return self.tokens, self.experts, self.hidden, self.width, self.top_k


EMBEDDED = Shape(tokens=512, experts=8, hidden=192, width=128, top_k=2)
LARGER = Shape(tokens=64, experts=16, hidden=1024, width=768, top_k=4)


def contenders(quick: bool) -> Iterator[Contender]:
    for shape in (Shape(4, 4, 64, 32, 2),) if quick else (EMBEDDED, LARGER):
        flops = 6 * shape.tokens * shape.top_k * shape.hidden * shape.width
        row = Contender("moe_experts", "-", "bfloat16", shape.size, floor=LOOP, flops=flops)
        yield replace(peer(row, LOOP, partial(_by_torch, looped, shape)), floor=None)
        if hasattr(torch.nn.functional, "grouped_mm"):
            yield peer(row, "torch bfloat16, grouped", partial(_by_torch, grouped, shape))
        for format, act_format in FORMATS:
            formats = f"{format} {act_format}" if act_format != format else format
            of_format = replace(row, format=formats, recipe=mxref.BLOCK_FORMATS[format].default_recipe)
            given = partial(_arguments, shape, format, act_format)
            yield from of_op(of_format, given, partial(_unlike_oracle, given))


@functools.lru_cache(maxsize=2)
def _layer(shape: Shape) -> tuple[torch.Tensor, ...]:
    """x, w13, w2, ids, weights."""
    w13 = normal((shape.experts, 2 * shape.width, shape.hidden), "bfloat16", seed=1)
    w2 = normal((shape.experts, shape.hidden, shape.width), "bfloat16", seed=2)
    routing = mxref.route(normal((shape.tokens, shape.experts), seed=3), shape.top_k)
    return normal((shape.tokens, shape.hidden), "bfloat16"), 0.05 * w13, 0.05 * w2, *routing


def _by_torch(how, shape: Shape):
    return how(*_layer(shape))


def _arguments(shape: Shape, format: str, act_format: str | None) -> tuple[tuple, dict]:
    x, w13, w2, *routing = _layer(shape)
    return (x, *quantized_layer(w13, w2, format), *routing), {"act_format": act_format}


def _unlike_oracle(given, result: torch.Tensor) -> str | None:
    args, kwargs = given()
    return unlike_oracle(*args, kwargs["act_format"], result)


def test_moe(timed, contender):
    timed(contender)
