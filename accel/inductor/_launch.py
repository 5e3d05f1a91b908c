"""From a checked call to compiled functions of its blocks, and back. What the op files share."""

import functools
import os
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch._inductor import config
from torch.fx.experimental.proxy_tensor import make_fx

from accel._recipes import unknown_to_decode, unknown_to_encode
from accel.inductor import _blocks
from mxref.blocks import QuantizeCall, amax_of_scales
from mxref.elements import canonical
from mxref.grid import Grid
from mxref.recipes import Recipe

DEVICES = ("cpu",)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPTIONS = {
    "cpp.enable_floating_point_contract_flag": "off",  # no multiply and add may become one rounding
    "cpp.enable_unsafe_math_opt_flag": False,
    "cpp.dynamic_threads": True,
}


def missing() -> str | None:
    """Why nothing can be compiled on this machine, or None."""
    named = config.cpp.cxx  # what inductor tries: $CXX, else g++ (clang++ on macOS)
    compilers = [name for name in ([named] if isinstance(named, str) else named) if name]
    if not any(map(shutil.which, compilers)):
        return f"no C++ compiler: {' or '.join(compilers)} is not installed; the environment variable CXX names another"
    headers = sysconfig.get_path("include")
    return None if os.path.exists(os.path.join(headers, "Python.h")) else f"no Python.h in {headers}: compiling needs it"


def decode_refusal(recipe: Recipe) -> str | None:
    """Why blocks of a recipe are not decoded, or None."""
    if recipe.transform is not None:
        return f"recipe {recipe.name!r} transforms"
    return unknown_to_decode(recipe)


def recipe_refusal(recipe: Recipe) -> str | None:
    """Why blocks of a recipe are not encoded, or None."""
    if recipe.search != "none":
        return f"recipe {recipe.name!r} searches for scales"
    if recipe.rounding == "stochastic":
        return f"recipe {recipe.name!r} draws random words"
    if recipe.scale_rule == "amax" and recipe.encode_order == "exact":
        return f"recipe {recipe.name!r} compares exact quotients"
    return unknown_to_encode(recipe) or decode_refusal(recipe)


@dataclass(frozen=True)
class Encoding:
    """Blocks of a checked call, its tensor scale as stored, and both of its scales as compiled functions take them."""

    blocks: torch.Tensor
    stored: torch.Tensor | None
    scales: tuple[torch.Tensor, torch.Tensor]


def encoding(call: QuantizeCall) -> Encoding:
    """What encoding a checked call needs."""
    blocks = call.grid.to_blocks(call.x)
    scale = call.tensor_scale(lambda granularity: _finite_amax(blocks, call, granularity))
    parts = (None, None) if scale is None else (scale.stored, scale.forward)
    of_blocks = [scale_of_blocks(part, call.grid) for part in parts]
    return Encoding(blocks, scale and scale.stored, tuple(of_blocks))


def scale_of_blocks(scale: torch.Tensor | None, grid: Grid) -> torch.Tensor:
    """A tensor scale as compiled functions take it: `[]`, or one a block."""
    if scale is None:
        return torch.ones(())
    return scale.reshape(()) if scale.numel() == 1 else grid.scales_to_blocks(scale)


def _finite_amax(blocks: torch.Tensor, call: QuantizeCall, granularity: str) -> torch.Tensor:
    """Largest finite magnitudes, float32, shaped to broadcast to x; 0 where empty."""
    if granularity == "per_tensor" and len(blocks):
        return run(_blocks.finite_amax, blocks, dims=(0, 1)).reshape(())
    return amax_of_scales(run(_blocks.finite_amax, blocks, dims=(1,)).reshape(-1), granularity, call.grid)


def restored(grid: Grid, values: torch.Tensor, nan_blocks: torch.Tensor | None = None) -> torch.Tensor:
    """A tensor from blocks of values, every NaN canonical."""
    if nan_blocks is not None and nan_blocks.any():
        values[nan_blocks] = canonical(values[nan_blocks])
    return grid.from_blocks(values)


@torch.no_grad()
def run(function: Callable, *tensors: torch.Tensor, **constants) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """`function(*tensors, **constants)`, compiled. `tensors`: `[]`, or with one row for each block."""
    count = len(tensors[0])
    if count < 2:  # a compiler takes sizes 0 and 1 for constants
        tensors = [F.pad(t, [0, 0] * (t.ndim - 1) + [0, 2 - count]) if t.ndim else t for t in tensors]
    rows = [_from_its_start(t.contiguous().detach()) for t in tensors]
    for t in rows:
        if t.ndim:
            torch._dynamo.mark_dynamic(t, 0)
    signature = tuple((t.dtype, tuple(t.shape[1:]) if t.ndim else None) for t in rows)
    result = _compiled(function, signature, **constants)(*rows)
    return _rows(result, count) if isinstance(result, torch.Tensor) else tuple(_rows(part, count) for part in result)


def _rows(t: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` rows; of more as a tensor of their own, since derivatives forward know no part of another."""
    return t if len(t) == count else t[:count].clone()


def _from_its_start(t: torch.Tensor) -> torch.Tensor:
    """`t` as memory that begins with it: a compiler makes another program of a tensor that begins within its memory."""
    return torch.from_dlpack(t) if t.storage_offset() else t


@functools.cache
def _compiled(function: Callable, signature: tuple, **constants) -> Callable:
    """`function` traced, which leaves only tensor operations, and compiled for any number of blocks."""
    count = 2 + max([size for _, rest in signature for size in rest or ()])  # unlike every other size
    examples = [torch.ones(() if rest is None else (count, *rest), dtype=dtype) for dtype, rest in signature]
    traced = make_fx(functools.partial(function, **constants), tracing_mode="symbolic")
    return torch.compile(traced(*examples), fullgraph=True, options=OPTIONS)
