"""From a checked call to a launch: geometry, constants, outputs. What the op files share."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd

import torch
import triton
import triton.language as tl

from accel.triton._blocks import amax_kernel, decode_kernel, encode_kernel, rotate_kernel
from accel.triton._constants import element_constants, scale_constants
from accel.triton._elementwise import gate_table_kernel
from accel.triton._geometry import INTERPRETED, LARGE, SMALL, SMALL_ACTIVATED, SMALL_SIX_BITS, TILE_ELEMENTS, Geometry
from mxref.blocks import BlockTensor, QuantizeCall
from mxref.formats import ELEMENT_FORMATS, BlockFormat, ElementFormat
from mxref.grid import Grid
from mxref.recipes import Hadamard, Recipe

STORED = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.int16}
DTYPES = tuple(STORED)
DEVICES = ("cpu",) if INTERPRETED else ("cuda",)
LARGEST_EXPONENT = 63  # of an element: beyond, a step of its arithmetic leaves float32
BLOCK_ELEMENTS = 4096
EXACT = {} if INTERPRETED else {"enable_fp_fusion": False}  # no multiply and add may become one rounding
EARLY = {"launch_pdl": True}  # the launch may start before the one before has ended, and waits by itself
GROUPS = {4: 2, 6: 4, 8: 1}  # bits of a code to how many fill whole bytes


def missing() -> str | None:
    """Why no kernel can run on this machine, or None."""
    if INTERPRETED or torch.cuda.is_available():
        return None
    return "no CUDA or ROCm device is available"


@functools.cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """That of an NVIDIA GPU; (0, 0) of another maker's, and in the interpreter."""
    nvidia = not INTERPRETED and torch.version.cuda is not None
    return torch.cuda.get_device_capability(device) if nvidia else (0, 0)


def element_refusal(element: ElementFormat) -> str | None:
    """Why the kernels do not take an element format, or None."""
    if element.kind == "float" and element.mantissa_bits == 0:
        return f"{element.name} has no mantissa bits"
    if not 0 <= element.emax <= LARGEST_EXPONENT or not 0 <= element.bias <= LARGEST_EXPONENT:
        return f"{element.name} has bias {element.bias} and emax {element.emax}: 0 to {LARGEST_EXPONENT} are taken"
    return None


def format_refusal(format: BlockFormat, recipe: Recipe) -> str | None:
    """Why the kernels do not take a format and recipe, or None."""
    refusal = element_refusal(format.element)
    if refusal is not None:
        return refusal
    if format.block_size * recipe.block_rows > BLOCK_ELEMENTS:
        return f"blocks of {recipe.block_rows} x {format.block_size} elements: at most {BLOCK_ELEMENTS} are taken"
    if format.block_size & (format.block_size - 1):
        return f"block size {format.block_size} is no power of two"
    if format.scale.is_power_of_two and format.scale != ELEMENT_FORMATS["e8m0"]:
        return f"{format.scale.name} is another power-of-two scale than e8m0"
    if not format.scale.is_power_of_two and (format.scale.specials == "ieee" or not format.scale.zero):
        return f"{format.scale.name} scales have Inf or no zero"
    if recipe.block_rows & (recipe.block_rows - 1):
        return f"recipe {recipe.name!r} has blocks of {recipe.block_rows} rows: no power of two"
    return None


def packing_refusal(format: BlockFormat) -> str | None:
    """Why the kernels do not pack or unpack codes of a format, or None."""
    bits = format.element.bits
    if bits not in GROUPS:
        return f"codes of {bits} bits are packed by the reference alone"
    return None if format.block_size >= GROUPS[bits] else f"a block of {format.block_size} codes does not fill whole bytes"


def memory(x: torch.Tensor) -> torch.Tensor:
    """The tensor as kernels see it: bfloat16 as int16, so that no library rounds it."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


@dataclass(frozen=True)
class Activated:
    """What is applied to x before it is quantized: `name` as in `_activations.activate`, `up` strided like x."""

    name: str = "none"
    up: torch.Tensor | None = None
    alpha: float = 0.0
    limit: float = 0.0


NOTHING = Activated()
PATTERNS = 1 << 16  # values of a 16-bit type
FEW_ELEMENTS = 1 << 17  # programs of 128 of them are not many for a GPU
TABLES = 64
_tables: dict[tuple, torch.Tensor] = {}


def large_tile(block_elements: int, activated: Activated) -> tuple[int, int]:
    """Elements and warps of a program that packs codes of a large tensor, measured on an H200."""
    return (max(64 * block_elements, TILE_ELEMENTS), 1) if activated is NOTHING else LARGE


def small_tile(format: BlockFormat, packs: bool, activated: Activated = NOTHING) -> tuple[int, int]:
    """Elements and warps of a program that packs codes of a small tensor, or unpacks them."""
    if activated is not NOTHING:
        return SMALL_ACTIVATED
    return SMALL_SIX_BITS[0 if packs else 1] if format.element.bits == 6 else SMALL


def gate_table(name: str, x: torch.Tensor, alpha: float, limit: float, at_least: int = PATTERNS) -> torch.Tensor | None:
    """What `gate_side` makes of each value of x's 16-bit type, float32 `[65536]`; None where x is better computed, as it is
    of fewer values than `at_least`.

    A table is made once and kept, since a CUDA graph may refer to it; none is made while one is captured.
    """
    if x.element_size() != 2 or x.numel() < at_least or name in ("none", "relu2"):
        return None
    key = name, alpha, limit, x.dtype, x.device
    if key not in _tables and len(_tables) < TABLES and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        table = torch.empty(PATTERNS, dtype=torch.float32, device=x.device)
        constants = {"LIKE": STORED[x.dtype], "TILE": 1024, "FUNCTION": name, **EXACT}
        gate_table_kernel[(PATTERNS // 1024,)](table, alpha, limit, **constants)
        if x.is_cuda:
            torch.cuda.current_stream().synchronize()  # other streams will read it
        _tables[key] = table
    return _tables.get(key)


def given_to(
    geometry: Geometry, x: torch.Tensor, up: torch.Tensor | None, paired: bool = True
) -> tuple[torch.Tensor, torch.Tensor, str, tuple[int, int, int]]:
    """x and `up` (or x again) as block kernels read them, in pairs if `paired` and both can be, what is a run, strides."""
    x, strides = geometry.strided(x)
    up = x if up is None else geometry.strided(up)[0]
    run, pairs, up_pairs = geometry.run(x), geometry.pairs(x), geometry.pairs(up)
    if paired and pairs is not None and up_pairs is not None:
        return pairs, up_pairs, run, (strides[0] // 2, *strides[1:])
    return memory(x), memory(up), run, strides


def finite_amax(call: QuantizeCall, granularity: str, activated: Activated = NOTHING) -> torch.Tensor:
    """Largest finite magnitudes, float32, shaped to broadcast to x: one, or one a line or an expert."""
    per_tensor = granularity == "per_tensor"
    # large programs, since they meet at one number, and within one line where its length allows
    tile = 8192 if per_tensor else gcd(call.grid.shape[call.grid.axis], 8192)
    program = (max(tile, TILE_ELEMENTS), 8 if tile == 8192 else 4)
    geometry = Geometry(call.grid, program, program)
    one_line = not per_tensor and geometry.one_row and geometry.k % (geometry.tile * call.grid.block_size) == 0
    found = torch.zeros(() if per_tensor else geometry.line_shape, dtype=torch.int32, device=call.x.device)
    if geometry.blocks:
        x, up, run, strides = given_to(geometry, call.x, activated.up)
        table = gate_table(activated.name, call.x, activated.alpha, activated.limit)
        amax_kernel[geometry.programs](
            x, up, table, found, activated.alpha, activated.limit, *geometry.sizes, *strides, **geometry.constants,
            RUN=run, ACTIVATION=activated.name, PER_ROW=not per_tensor, ONE_LINE=one_line,
            **geometry.options,
        )  # fmt: skip
    amax = found.view(torch.float32)
    if granularity != "per_expert":
        return amax
    experts = (amax.shape[0], *[1] * (amax.ndim - 1))
    return amax.flatten(1).amax(1).reshape(experts) if amax.numel() else amax.new_zeros(experts)


def quantize_blocks(call: QuantizeCall, activated: Activated = NOTHING) -> BlockTensor:
    """The block-scaled tensor of a checked call."""
    shape, axis, bits = list(call.x.shape), call.grid.axis, call.format.element.bits
    length, shape[axis] = shape[axis], -(-shape[axis] * bits // 8)
    packed = torch.empty(shape, dtype=torch.uint8, device=call.x.device)
    scales = torch.empty(call.grid.scale_shape, dtype=torch.uint8, device=call.x.device)
    stored = _encode(call, packed, scales, activated)
    return BlockTensor.trusted(packed.movedim(axis, -1), length, scales, stored, call.format, call.recipe, axis)


def qdq_blocks(call: QuantizeCall) -> torch.Tensor:
    """What x becomes when stored."""
    x, transform = call.x, call.recipe.transform
    out = torch.empty(x.shape, dtype=torch.float32 if transform else x.dtype, device=x.device)
    _encode(call, out, None, NOTHING)
    return rotate(out, transform, call.grid.axis, inverse=True, dtype=x.dtype) if transform else out


def _encode(call: QuantizeCall, out: torch.Tensor, scales: torch.Tensor | None, activated: Activated) -> torch.Tensor | None:
    """Fill `out` with packed codes and `scales`, or with decoded values; returns the tensor scale to store."""
    format, recipe = call.format, call.recipe
    if recipe.transform is not None:
        call = replace(call, x=rotate(call.x, recipe.transform, call.grid.axis))
    geometry = Geometry(call.grid)
    if scales is not None:
        geometry = Geometry(call.grid, large_tile(call.grid.block_elements, activated), small_tile(format, True, activated))
    source, lines, stored = "none", out, call.given_tensor_scale
    if isinstance(stored, str):
        source, amax = "amax", finite_amax(call, stored, activated)
        stored = call.tensor_scale(lambda granularity: amax).stored if not geometry.blocks else torch.empty_like(amax)
        lines = geometry.lines(amax)
    elif stored is not None:
        source, lines = "given", geometry.lines(stored)
    if geometry.blocks:
        bytewise = scales is not None and format.element.bits == 8  # then in and out are laid out alike
        x, up, run, strides = given_to(geometry, call.x, activated.up, paired=not bytewise or activated is not NOTHING)
        _, out_strides = geometry.strided(out)
        table = gate_table(activated.name, call.x, activated.alpha, activated.limit)
        stored_lines = torch.empty_like(lines) if source == "amax" else lines
        blocks, k_blocks, *sizes = geometry.sizes
        run_out, programs = geometry.run(out), geometry.programs
        near = geometry.matrices * strides[0] + geometry.k < 1 << 31  # offsets are int32
        if run == "line" and run_out == "all" and geometry.per_thread < 16 and near:
            run, run_out, programs = "row", "rows", geometry.row_programs
        follows = geometry.few and compute_capability(call.x.device) >= (9, 0)
        filled = memory(out) if scales is None else geometry.words(out, format.element.bits, geometry.per_thread)
        encode_kernel[programs](
            x, up, strides[0], k_blocks, filled, out if scales is None else scales, lines, table, stored_lines,
            call.seed or 0, activated.alpha, activated.limit, blocks, *sizes, *strides[1:], out.shape[call.grid.axis],
            *out_strides,
            **geometry.constants, RUN=run, RUN_OUT=run_out, PER_THREAD=geometry.per_thread,
            ACTIVATION=activated.name,
            CODES_OUT=scales is not None, STORED=STORED.get(out.dtype), SOURCE=source, PER_ROW=lines.numel() > 1,
            LARGEST=recipe.largest(format), **element_constants(format.element), **scale_constants(format),
            **recipe_constants(format, recipe), FOLLOWS=follows, **geometry.options, **(EARLY if follows else {}),
        )  # fmt: skip
        if source == "amax":
            lines_of_one = lines.numel() // stored.numel()  # an expert's lines all have its scale
            stored = stored_lines.reshape(-1, lines_of_one)[:, 0].reshape(stored.shape)
    return stored


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
        "SEARCH": recipe.search,
    }


def decode_blocks(q: BlockTensor, dtype: torch.dtype) -> torch.Tensor:
    """Values of a block-scaled tensor."""
    format, transform = q.format, q.recipe.transform
    grid = Grid(tuple(q.shape), q.axis, format.block_size, q.recipe.block_rows)
    geometry = Geometry(grid, LARGE, small_tile(format, packs=False))
    out = torch.empty(q.shape, dtype=torch.float32 if transform else dtype, device=q.device)
    scale = q.tensor_scale
    if geometry.blocks:
        codes, strides = geometry.strided(q.packed.movedim(-1, q.axis))
        _, out_strides = geometry.strided(out)
        element, scales = element_constants(format.element), scale_constants(format)
        wanted = ("BITS", "MANTISSA", "MAX", "MAX_CODE", "SIGN_SHIFT", "INTEGER", "UNBIAS", "INF_CODE")
        wanted_scale = ("POWER_OF_TWO", "SCALE_NAN", "SCALE_MANTISSA", "SCALE_MAX", "SCALE_UNBIAS")
        stored = out if scale is None else geometry.lines(scale)
        decode_kernel[geometry.programs](
            geometry.words(codes, format.element.bits), q.scales.contiguous(), stored, memory(out), *geometry.sizes,
            codes.shape[q.axis], *strides, *out_strides, **geometry.constants, RUN=geometry.run(codes),
            RUN_OUT=geometry.run(out), STORED=STORED[out.dtype], TENSOR_SCALE=scale is not None,
            PER_ROW=scale is not None and scale.numel() > 1, DIVIDE=q.recipe.tensor_scale_direction == "divide",
            **{name: element[name] for name in wanted}, **{name: scales[name] for name in wanted_scale},
            **geometry.options,
        )  # fmt: skip
    return rotate(out, transform, q.axis, inverse=True, dtype=dtype) if transform else out


def rotate(
    x: torch.Tensor, transform: Hadamard, axis: int, inverse: bool = False, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """A Hadamard rotation along `axis`, or its inverse, in float32, rounded once to `dtype`."""
    geometry = Geometry(Grid(tuple(x.shape), axis, transform.size, 1))
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    negative = sum(1 << i for i, sign in enumerate(transform.signs) if sign < 0)
    if geometry.blocks:
        x, strides = geometry.strided(x)
        _, out_strides = geometry.strided(out)
        rotate_kernel[geometry.programs](
            memory(x), memory(out), *geometry.sizes, *strides, *out_strides, BLOCKS=geometry.tile, SIZE=transform.size,
            RUN=geometry.run(x), RUN_OUT=geometry.run(out), STORED=STORED[dtype], INVERSE=inverse,
            STEPS=transform.size.bit_length() - 1, NEGATIVE=negative - (1 << 64) if negative >> 63 else negative,
            **geometry.options,
        )  # fmt: skip
    return out


def run_flat(kernel: Callable, x: torch.Tensor, *arguments, **constants) -> None:
    """Launch an element-wise kernel over `x.numel()` elements: one a thread where they are few, measured on an H200."""
    count = x.numel()
    tile = 128 if count <= FEW_ELEMENTS and not INTERPRETED else TILE_ELEMENTS
    if count:
        kernel[(triton.cdiv(count, tile),)](*arguments, count, TILE=tile, **constants, **EXACT)
