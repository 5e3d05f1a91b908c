"""From a checked call to a launch: geometry, constants, outputs. What the op files share."""

import os
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from accel.triton._blocks import amax_kernel, decode_kernel, encode_kernel
from accel.triton._constants import element_constants, scale_constants
from accel.triton._geometry import split_strides, three_sizes
from mxref.blocks import BlockTensor, QuantizeCall
from mxref.formats import ELEMENT_FORMATS, BlockFormat
from mxref.recipes import Recipe

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
EXACT = {} if INTERPRETED else {"enable_fp_fusion": False}  # no multiply and add may become one rounding
STORED = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.int16}
DTYPES = tuple(STORED)
DEVICES = ("cpu",) if INTERPRETED else ("cuda",)
TILE_ELEMENTS = 4096


def missing() -> str | None:
    """Why no kernel can run on this machine, or None."""
    if INTERPRETED or torch.cuda.is_available():
        return None
    return "no CUDA or ROCm device is available"


def format_refusal(format: BlockFormat, recipe: Recipe) -> str | None:
    """Why the kernels do not take a format and recipe, or None."""
    if format.block_size & (format.block_size - 1):
        return f"block size {format.block_size} is no power of two"
    if format.scale.is_power_of_two and format.scale != ELEMENT_FORMATS["e8m0"]:
        return f"{format.scale.name} is another power-of-two scale than e8m0"
    if not format.scale.is_power_of_two and (format.scale.specials == "ieee" or not format.scale.zero):
        return f"{format.scale.name} scales have Inf or no zero"
    if recipe.block_rows > 1:
        return f"recipe {recipe.name!r} has blocks of {recipe.block_rows} rows"
    if recipe.transform is not None:
        return f"recipe {recipe.name!r} transforms"
    return None


def recipe_refusal(format: BlockFormat, recipe: Recipe) -> str | None:
    """Why the encoding kernels do not take a format and recipe, or None."""
    if recipe.search != "none":
        return f"recipe {recipe.name!r} searches for scales"
    if recipe.scale_rule == "amax" and recipe.encode_order == "exact":
        return f"recipe {recipe.name!r} compares exact quotients"
    return format_refusal(format, recipe)


def memory(x: torch.Tensor) -> torch.Tensor:
    """The tensor as kernels see it: bfloat16 as int16, so that no library rounds it."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


class Geometry:
    """A tensor as `[outer, K, inner]`, and the grid of programs over its blocks."""

    def __init__(self, x: torch.Tensor, axis: int, block_size: int):
        axis %= x.ndim
        strides = split_strides(x, axis)
        if strides is None:  # axes that do not collapse to three: one pass to copy them
            x = x.contiguous()
            strides = split_strides(x, axis)
        self.x, self.strides, self.axis = x, strides, axis
        self.outer, self.k, self.inner = three_sizes(x.shape, axis)
        self.row_blocks = -(-self.k // block_size)
        self.blocks = self.outer * self.row_blocks * self.inner
        self.tile = max(1, TILE_ELEMENTS // block_size)
        whole = self.k % block_size == 0
        flat = whole and self.inner == 1 and x.is_contiguous()  # then all blocks are one run of memory
        self.constants = {"BLOCKS": self.tile, "SIZE": block_size, "WHOLE": whole, "FLAT": flat}

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.blocks, self.row_blocks, self.k, self.inner

    @property
    def programs(self) -> tuple[int]:
        return (triton.cdiv(self.blocks, self.tile),)

    @property
    def line_shape(self) -> list[int]:
        """The tensor's shape with the blocked axis of size 1."""
        return [1 if i == self.axis else n for i, n in enumerate(self.x.shape)]

    def lines(self, scale: torch.Tensor) -> torch.Tensor:
        """A tensor scale as the kernels read it: one number, or one for each line along the blocked axis."""
        return scale.reshape(1) if scale.numel() == 1 else scale.expand(self.line_shape).contiguous()

    def strides_of(self, other: torch.Tensor) -> tuple[int, int, int]:
        return split_strides(other, self.axis)


def finite_amax(call: QuantizeCall, granularity: str) -> torch.Tensor:
    """Largest finite magnitudes, float32, shaped to broadcast to x: one, or one a line or an expert."""
    geometry = Geometry(call.x, call.grid.axis, call.format.block_size)
    per_tensor = granularity == "per_tensor"
    found = torch.zeros(() if per_tensor else geometry.line_shape, dtype=torch.int32, device=call.x.device)
    if geometry.blocks:
        amax_kernel[geometry.programs](
            memory(geometry.x), found, *geometry.sizes, *geometry.strides, **geometry.constants, PER_ROW=not per_tensor
        )
    amax = found.view(torch.float32)
    if granularity != "per_expert":
        return amax
    experts = (amax.shape[0], *[1] * (amax.ndim - 1))
    return amax.flatten(1).amax(1).reshape(experts) if amax.numel() else amax.new_zeros(experts)


def encode_blocks(call: QuantizeCall, codes_out: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(codes or decoded values, scale codes, stored tensor scale) of a checked call."""
    x, format, recipe, scale = (
        call.x,
        call.format,
        call.recipe,
        call.tensor_scale(lambda granularity: finite_amax(call, granularity)),
    )
    geometry = Geometry(x, call.grid.axis, format.block_size)
    out = torch.empty(x.shape, dtype=torch.uint8 if codes_out else x.dtype, device=x.device)
    scales = torch.empty(call.grid.scale_shape if codes_out else 0, dtype=torch.uint8, device=x.device)
    stored_and_forward = (out, out) if scale is None else [geometry.lines(part) for part in scale]
    if geometry.blocks:
        encode_kernel[geometry.programs](
            memory(geometry.x), memory(out), scales, *stored_and_forward, call.seed or 0, *geometry.sizes, *geometry.strides,
            *geometry.strides_of(out), **geometry.constants, CODES_OUT=codes_out, STORED=STORED.get(out.dtype),
            TENSOR_SCALE=scale is not None, PER_ROW=scale is not None and scale.stored.numel() > 1,
            **element_constants(format.element), **scale_constants(format), **recipe_constants(format, recipe), **EXACT,
        )  # fmt: skip
    return out, scales, scale and scale.stored


def recipe_constants(format: BlockFormat, recipe: Recipe) -> dict[str, str | bool | int]:
    """What the encoding kernel needs to know of a recipe."""
    return {
        "RULE": recipe.scale_rule,
        "ORDER": recipe.encode_order,
        "DIVIDE": recipe.tensor_scale_direction == "divide",
        "ROUNDING": recipe.rounding,
        "SPECIAL": recipe.overflow == "special",
        "INF_POISONS": recipe.inf == "nan",
        "ZERO_SCALE": format.scale.positive.index(1.0) if recipe.zero_block == "one" else 0,
        "NEGATIVE_ZERO": recipe.negative_zero,
    }


def decode_blocks(q: BlockTensor, dtype: torch.dtype) -> torch.Tensor:
    """Values of a block-scaled tensor."""
    format = q.format
    geometry = Geometry(q.codes, q.axis, format.block_size)
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    scale = q.tensor_scale
    if geometry.blocks:
        element, scales = element_constants(format.element), scale_constants(format)
        wanted = ("MANTISSA", "MAX_CODE", "SIGN_SHIFT", "INTEGER", "UNBIAS", "INF_CODE")
        wanted_scale = ("POWER_OF_TWO", "SCALE_MAX_CODE", "SCALE_MANTISSA", "SCALE_UNBIAS")
        stored = out if scale is None else geometry.lines(scale)
        decode_kernel[geometry.programs](
            geometry.x, q.scales.contiguous(), stored, memory(out), *geometry.sizes, *geometry.strides,
            *geometry.strides_of(out), **geometry.constants, STORED=STORED[dtype], TENSOR_SCALE=scale is not None,
            PER_ROW=scale is not None and scale.numel() > 1, DIVIDE=q.recipe.tensor_scale_direction == "divide",
            **{name: element[name] for name in wanted}, **{name: scales[name] for name in wanted_scale}, **EXACT,
        )  # fmt: skip
    return out


def run_flat(kernel: Callable, x: torch.Tensor, *arguments, **constants) -> None:
    """Launch an element-wise kernel over `x.numel()` elements."""
    count = x.numel()
    if count:
        kernel[(triton.cdiv(count, 1024),)](*arguments, count, TILE=1024, **constants, **EXACT)
