"""Block-scaled tensors: `quantize`, `dequantize`, `qdq`.

Arguments are checked first and become a plan; then chunks of blocks that stay in cache are encoded,
decoded or both.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mxref.block_codec import canonical, decode_blocks, encode_blocks, rotate_axis
from mxref.elements import (
    FLOAT_DTYPES,
    INF_BITS,
    MAGNITUDE_MASK,
    check_choice,
    check_codes,
    check_float,
    check_seed,
    philox,
)
from mxref.formats import BlockFormat, block_format
from mxref.grid import Grid, scale_shape
from mxref.orders import ENCODE_ORDERS, TensorScale
from mxref.packing import pack
from mxref.recipes import Recipe, resolve_recipe
from mxref.registry import op

TENSOR_SCALES = ("none", "per_tensor", "per_row", "per_expert")
GRADIENTS = ("straight_through", "clipped")


@dataclass(frozen=True, eq=False)
class BlockTensor:
    """A block-scaled tensor: codes, scales and everything needed to read them.

    `codes`: uint8, one code a byte, the logical shape. `scales`: uint8 scale codes, the logical shape with
    the blocked axis divided by the block size, rounded up (with `recipe.block_rows` > 1 the other of the last
    two axes by that too). `tensor_scale`: float32 that broadcasts to the logical shape, kept as given, used
    in the recipe's direction, or None. `axis`: the blocked axis, negative.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    tensor_scale: torch.Tensor | None
    format: BlockFormat
    recipe: Recipe
    axis: int = -1

    def __post_init__(self):
        object.__setattr__(self, "format", block_format(self.format))
        object.__setattr__(self, "recipe", resolve_recipe(self.recipe, self.format))
        check_codes("codes", self.codes, self.format.element)
        check_codes("scales", self.scales, self.format.scale)
        object.__setattr__(self, "axis", _negative_axis(self.axis, self.codes))
        expected = scale_shape(self.shape, self.axis, self.format.block_size, self.recipe.block_rows)
        if tuple(self.scales.shape) != expected:
            raise ValueError(f"scales has shape {list(self.scales.shape)}: codes {list(self.shape)} need {list(expected)}")
        if self.format.scale.sign_mask and (self.scales & self.format.scale.sign_mask).any():
            raise ValueError(f"scales holds codes with the sign bit set: a {self.format.scale.name} scale is not negative")
        if self.tensor_scale is not None:
            scale = check_tensor_scale(self.tensor_scale, self.shape, self.axis, self.format)
            object.__setattr__(self, "tensor_scale", scale)

    @property
    def shape(self) -> torch.Size:
        """Logical shape."""
        return self.codes.shape

    @property
    def ndim(self) -> int:
        """Number of logical axes."""
        return self.codes.ndim

    @property
    def device(self) -> torch.device:
        """Device of codes and scales."""
        return self.codes.device

    @property
    def packed(self) -> torch.Tensor:
        """Codes bit-packed along the blocked axis, which comes last: uint8 `[..., ceil(K * bits / 8)]`."""
        return pack(self.codes.movedim(self.axis, -1), self.format.element.bits)

    @property
    def bits_per_element(self) -> float:
        """Stored bits per element of this tensor: element, block scales and tensor scales."""
        tensor_scale = 0 if self.tensor_scale is None else self.tensor_scale.numel() * 32
        return self.format.element.bits + (self.scales.numel() * 8 + tensor_scale) / max(self.codes.numel(), 1)

    def __getitem__(self, index: int | slice | torch.Tensor) -> "BlockTensor":
        """Part of the first axis, e.g. one expert of `[E, N, K]` or some rows of `[M, K]`."""
        if self.ndim + self.axis == 0 or (self.recipe.block_rows > 1 and self.ndim == 2):
            raise IndexError("the first axis is a blocked one: its blocks cannot be taken apart")
        scale = self.tensor_scale
        if scale is not None and scale.ndim == self.ndim:
            scale = scale[0] if scale.shape[0] == 1 and isinstance(index, int) else scale
            scale = scale[index] if scale.ndim == self.ndim and scale.shape[0] > 1 else scale
        return _trusted(self.codes[index], self.scales[index], scale, self.format, self.recipe, self.axis)

    def __repr__(self) -> str:
        scale = "none" if self.tensor_scale is None else list(self.tensor_scale.shape)
        return (
            f"BlockTensor({self.format.name}, shape={list(self.shape)}, axis={self.axis}, tensor_scale={scale}, "
            f"recipe={self.recipe}, device={self.device})"
        )


def _trusted(*values) -> BlockTensor:
    """A BlockTensor whose fields are known to be right, without looking at every code again."""
    tensor = object.__new__(BlockTensor)
    tensor.__dict__.update(zip(BlockTensor.__dataclass_fields__, values))
    return tensor


@op
def quantize(
    x: torch.Tensor,
    format: str | BlockFormat,
    *,
    recipe: str | Recipe | None = None,
    tensor_scale: str | torch.Tensor | None = None,
    axis: int = -1,
    seed: int | None = None,
) -> BlockTensor:
    """Quantize a tensor to a block-scaled format, in blocks along `axis`.

    `x`: any shape with at least one axis, any strides, float32, bfloat16 or float16 (widened exactly).
    A short tail is a block with fewer elements; blocks never cross rows. `recipe` (default: `ocp` for
    power-of-two scales, `nvidia` for NVFP4) says how scales and codes are chosen; elements round to nearest
    even and saturate unless it says otherwise. `tensor_scale`, for formats that have one: `per_tensor`
    (default), `per_row` (one a line along `axis`), `per_expert` (one an index of axis 0), `none`, or a float32
    tensor in the recipe's direction: a scalar, one that broadcasts to `x.shape` with size 1 along `axis`, `[E]`
    or `[E, 2]` for `[E, 2 I, K]` (gate rows, then up rows). `seed` is for stochastic rounding: the element at
    row-major index i of `x` uses random word i.

    A NaN makes its block decode to NaN and changes nothing else; so does an Inf unless the recipe saturates.
    Raises TypeError for another dtype; ValueError for unknown names, a recipe that does not fit the format, a
    tensor scale that is not finite and positive or has another shape, NaN where the recipe raises.
    Source: OCP MX v1.0, 6.3; NVFP4 as in Transformer Engine.

    >>> q = quantize(torch.tensor([7.0, 1.0, -0.2]), "mxfp4")
    >>> q.scales.tolist(), q.codes.tolist()
    ([127], [7, 2, 8])
    """
    return _quantize(_plan(x, format, recipe, tensor_scale, axis, seed))


def quantize_rows(
    x: torch.Tensor,
    row_ids: torch.Tensor,
    format: str | BlockFormat,
    recipe: str | Recipe | None,
    tensor_scale: str | torch.Tensor | None,
    seed: int | None,
) -> BlockTensor:
    """`quantize` of rows `[M, K]` taken out of a larger tensor: row m draws the random words of row `row_ids[m]` there."""
    return _quantize(_plan(x, format, recipe, tensor_scale, -1, seed, row_ids))


def _quantize(plan: "_Plan") -> BlockTensor:
    grid = plan.grid
    device = plan.blocks.device
    codes = torch.empty((grid.block_count, grid.block_elements), dtype=torch.uint8, device=device)
    scales = torch.empty(grid.block_count, dtype=torch.uint8, device=device)
    for part, values, scale, words in plan.chunks():
        codes[part], scales[part] = encode_blocks(values, plan.format, plan.recipe, scale, words)
    codes, scales = grid.from_blocks(codes), grid.scales_from_blocks(scales)
    return _trusted(codes, scales, plan.stored_tensor_scale, plan.format, plan.recipe, plan.axis)


@op
def dequantize(q: BlockTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Decode a block-scaled tensor.

    Returns `q.shape` in float32, bfloat16 or float16: element x scale as a float32 product, exact in
    range (with a tensor scale: times the float32 combination of both scales that the recipe's decode order
    names), then one rounding to `dtype`, to nearest even. Beyond the range of `dtype` it is Inf. Scale code NaN gives
    canonical NaN for the whole block. A recipe's transform is undone in float32 before the last rounding.
    Raises TypeError for another dtype. Source: OCP MX v1.0, 5.1; NVFP4 as in Transformer Engine.

    >>> dequantize(quantize(torch.tensor([7.0, 1.0, -0.2]), "mxfp4")).tolist()
    [6.0, 1.0, -0.0]
    """
    if not isinstance(q, BlockTensor):
        raise TypeError(f"q is a {type(q).__name__}: expected a BlockTensor")
    check_dtype("dtype", dtype)
    grid = Grid(tuple(q.shape), q.axis, q.format.block_size, q.recipe.block_rows)
    codes, scales = grid.to_blocks(q.codes), grid.scales_to_blocks(q.scales)
    stored = _per_block(q.tensor_scale, q.axis, grid)
    out = torch.empty(codes.shape, dtype=_decoded_dtype(q.recipe, dtype), device=q.device)
    for part in grid.chunks():
        values = decode_blocks(codes[part], scales[part], q.format, q.recipe, _chunk_of(stored, part))
        out[part] = canonical(values.to(out.dtype))
    return _finish(grid.from_blocks(out), q.recipe, q.axis, dtype)


@op
def qdq(
    x: torch.Tensor,
    format: str | BlockFormat,
    *,
    recipe: str | Recipe | None = None,
    tensor_scale: str | torch.Tensor | None = None,
    axis: int = -1,
    seed: int | None = None,
    gradient: str = "straight_through",
) -> torch.Tensor:
    """Quantize and dequantize: what `x` becomes when stored in `format`.

    Equal to `dequantize(quantize(x, ...), x.dtype)` bit for bit; same arguments, shapes, rounding and errors as
    `quantize`. Returns `x`'s shape, dtype and device. Differentiable: `gradient="straight_through"` passes the
    gradient on unchanged, `"clipped"` sets it to zero where the element saturated or the block is NaN.

    >>> qdq(torch.tensor([7.0, 1.0, -0.2]), "mxfp4", recipe="ocp_even").tolist()
    [8.0, 1.0, -0.0]
    """
    check_choice("gradient", gradient, GRADIENTS)
    plan = _plan(x, format, recipe, tensor_scale, axis, seed)
    if not (x.requires_grad and torch.is_grad_enabled()):
        return _qdq_blocks(plan, x.dtype)
    return _StraightThrough.apply(x, plan, gradient)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, plan, gradient):
        ctx.plan, ctx.passes = plan, _in_range(plan) if gradient == "clipped" else None
        return _qdq_blocks(plan, x.dtype)

    @staticmethod
    def backward(ctx, grad):
        if ctx.passes is None:
            return grad, None, None
        recipe, axis = ctx.plan.recipe, ctx.plan.axis
        clipped = rotate_axis(grad, recipe, axis) * ctx.passes
        return rotate_axis(clipped, recipe, axis, inverse=True).to(grad.dtype), None, None


def _qdq_blocks(plan: "_Plan", dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(plan.blocks.shape, dtype=_decoded_dtype(plan.recipe, dtype), device=plan.blocks.device)
    for part, values, scale, words in plan.chunks():
        codes, scales = encode_blocks(values, plan.format, plan.recipe, scale, words)
        decoded = decode_blocks(codes, scales, plan.format, plan.recipe, scale and scale.stored)
        out[part] = canonical(decoded.to(out.dtype))
    return _finish(plan.grid.from_blocks(out), plan.recipe, plan.axis, dtype)


def _decoded_dtype(recipe: Recipe, dtype: torch.dtype) -> torch.dtype:
    """Decoded values stay float32 until the transform is undone."""
    return dtype if recipe.transform is None else torch.float32


def _finish(decoded: torch.Tensor, recipe: Recipe, axis: int, dtype: torch.dtype) -> torch.Tensor:
    if recipe.transform is None:
        return decoded
    return canonical(rotate_axis(decoded, recipe, axis, inverse=True).to(dtype)).contiguous()


def _in_range(plan: "_Plan") -> torch.Tensor:
    """Where |x| is at most the element's largest value times its scale."""
    out = torch.empty(plan.blocks.shape, dtype=torch.bool, device=plan.blocks.device)
    top = torch.tensor([[plan.format.element.max_code]], dtype=torch.int32, device=plan.blocks.device)
    for part, values, scale, words in plan.chunks():
        _, scales = encode_blocks(values, plan.format, plan.recipe, scale, words)
        out[part] = values.abs() <= decode_blocks(top, scales, plan.format, plan.recipe, scale and scale.stored)
    return plan.grid.from_blocks(out)


# ---- arguments ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Plan:
    """A checked call: the blocks of `x`, and what each chunk needs to be encoded."""

    blocks: torch.Tensor
    grid: Grid
    format: BlockFormat
    recipe: Recipe
    axis: int
    stored_tensor_scale: torch.Tensor | None
    tensor_scale: TensorScale | None
    random_index: torch.Tensor | None
    seed: int | None

    def chunks(self) -> Iterator[tuple[slice, torch.Tensor, TensorScale | None, torch.Tensor | None]]:
        """(which blocks, their float32 values, their tensor scale, their random words)."""
        for part in self.grid.chunks():
            values = self.blocks[part].float()
            scale = self.tensor_scale and TensorScale(*(_chunk_of(s, part) for s in self.tensor_scale))
            words = None if self.random_index is None else philox(self.seed, self.random_index[part])
            yield part, values, scale, words


def _plan(x, format, recipe, tensor_scale, axis, seed, row_ids=None) -> _Plan:
    """Check the arguments of `quantize` before anything is computed. `row_ids`: see `quantize_rows`."""
    check_float("x", x)
    format = block_format(format)
    recipe = resolve_recipe(recipe, format)
    axis = _negative_axis(axis, x)
    if recipe.block_rows > 1 and (x.ndim < 2 or axis not in (-1, -2)):
        raise ValueError(f"recipe {recipe.name!r} has blocks of {recipe.block_rows} rows: expected axis -1 or -2 of >= 2")
    if recipe.transform is not None and x.shape[axis] % recipe.transform.size:
        raise ValueError(
            f"x has {x.shape[axis]} along axis {axis}: the transform needs a multiple of {recipe.transform.size}"
        )
    if recipe.rounding == "stochastic":
        check_seed(seed)
    elif seed is not None:
        raise ValueError(f"seed={seed}: recipe {recipe.name!r} rounds {recipe.rounding}, which uses no seed")
    if recipe.nan == "raise" and x.isnan().any():
        raise ValueError(f"x holds NaN and recipe {recipe.name!r} has nan='raise'")

    grid = Grid(tuple(x.shape), axis, format.block_size, recipe.block_rows)
    blocks = grid.to_blocks(rotate_axis(x.detach(), recipe, axis))
    stored, scale = _tensor_scale(blocks, format, recipe, tensor_scale, axis, grid)
    index = None
    if recipe.rounding == "stochastic":
        index = torch.arange(x.numel(), device=x.device).reshape(x.shape)
        if row_ids is not None:
            index = row_ids[:, None] * x.shape[1] + index[:1]
        index = grid.to_blocks(index)
    return _Plan(blocks, grid, format, recipe, axis, stored, scale, index, seed)


def _tensor_scale(
    blocks: torch.Tensor, format: BlockFormat, recipe: Recipe, given: str | torch.Tensor | None, axis: int, grid: Grid
) -> tuple[torch.Tensor | None, TensorScale | None]:
    """The tensor scale to store, in the logical shape, and as the blocks see it."""
    if isinstance(given, str):
        check_choice("tensor_scale", given, TENSOR_SCALES)
        if given == "none":
            return None, None
    if not format.tensor_scale:
        if given is not None:
            raise ValueError(f"tensor_scale={given!r}: {format.name} has no tensor scale")
        return None, None
    order = ENCODE_ORDERS[recipe.encode_order]
    if given is None or isinstance(given, str):
        largest = format.element.max * (recipe.scale_max or format.scale.max)
        scale = order.from_amax(_finite_amax(blocks, given or "per_tensor", axis, grid), largest)
    else:
        scale = order.given(check_tensor_scale(given, grid.shape, axis, format).to(blocks.device))
    other = -2 if axis == -1 else -1
    if recipe.block_rows > 1 and scale.stored.ndim and scale.stored.shape[other] > 1:
        raise ValueError(f"tensor_scale: rows that share a block scale (block_rows={recipe.block_rows}) must share it too")
    return scale.stored, TensorScale(*(_per_block(s, axis, grid) for s in scale))


def _finite_amax(blocks: torch.Tensor, granularity: str, axis: int, grid: Grid) -> torch.Tensor:
    """Largest finite magnitude for each tensor scale, float32, shaped to broadcast to the logical shape; 0 where empty."""
    ndim = len(grid.shape)
    if granularity == "per_expert" and (ndim < 2 or axis == -ndim):
        raise ValueError(
            f"tensor_scale='per_expert': expected x [E, ...] blocked along another axis, got {list(grid.shape)}"
        )
    largest = torch.zeros(grid.block_count, dtype=torch.int32, device=blocks.device)
    for part in grid.chunks():
        bits = blocks[part].float().view(torch.int32) & MAGNITUDE_MASK
        largest[part] = bits.masked_fill_(bits >= INF_BITS, 0).amax(-1)
    amax = grid.scales_from_blocks(largest.view(torch.float32))
    dims = {"per_tensor": tuple(range(ndim)), "per_row": (axis,), "per_expert": tuple(range(1, ndim))}[granularity]
    if amax.numel() == 0:
        amax = amax.new_zeros([max(n, 1) for n in amax.shape])
    amax = amax.amax(dims, keepdim=True)
    return amax.reshape(()) if granularity == "per_tensor" else amax


def check_tensor_scale(given: torch.Tensor, shape: torch.Size, axis: int, format: BlockFormat) -> torch.Tensor:
    """A given tensor scale, shaped to broadcast to `shape`; raises unless it is float32, finite, positive and fits."""
    if not format.tensor_scale:
        raise ValueError(f"tensor_scale is given: {format.name} has no tensor scale")
    if not isinstance(given, torch.Tensor) or given.dtype != torch.float32:
        kind = given.dtype if isinstance(given, torch.Tensor) else type(given).__name__
        raise TypeError(f"tensor_scale is {kind}: expected a torch.float32 tensor or one of {', '.join(TENSOR_SCALES)}")
    if not bool((given.isfinite() & (given > 0)).all()):
        raise ValueError("tensor_scale holds a value that is not finite and > 0")
    if given.numel() == 1 and given.ndim <= 1:
        return given.reshape(())
    full, sizes = tuple(given.shape), tuple(shape)
    if len(sizes) >= 3 and full == sizes[:1]:
        return given.reshape(-1, *[1] * (len(sizes) - 1))
    if len(sizes) == 3 and axis == -1 and full[:1] == sizes[:1] and len(full) == 2:
        if full[1] == sizes[1]:
            return given[:, :, None]
        if full[1] == 2 and sizes[1] % 2 == 0:
            return given.repeat_interleave(sizes[1] // 2, dim=1)[:, :, None]
    if len(sizes) == 2 and axis == -1 and full == sizes[:1]:
        return given[:, None]
    if len(full) == len(sizes) and full[axis] == 1 and all(a in (1, n) for a, n in zip(full, sizes)):
        return given
    raise ValueError(
        f"tensor_scale has shape {list(full)}: expected a scalar, or one that broadcasts to {list(sizes)} "
        f"with size 1 along axis {axis}, or [E] or [E, 2] for [E, rows, K]"
    )


def _per_block(scale: torch.Tensor | None, axis: int, grid: Grid) -> torch.Tensor | None:
    """A tensor scale as the blocks see it: 0-d, or `[blocks]`."""
    if scale is None or scale.ndim == 0:
        return scale
    shape = list(grid.shape)
    shape[axis] = grid.counts[2]
    if grid.block_rows > 1:
        other = -2 if axis == -1 else -1
        shape[other] = grid.counts[1]
    return grid.scales_to_blocks(scale.expand(shape))


def _chunk_of(scale: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    return scale if scale is None or scale.ndim == 0 else scale[part]


def _negative_axis(axis: int, x: torch.Tensor) -> int:
    if not isinstance(axis, int) or not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis={axis!r}: expected an axis of shape {list(x.shape)}")
    return axis if axis < 0 else axis - x.ndim


def check_dtype(argument: str, dtype: torch.dtype) -> None:
    """Raise TypeError unless `dtype` is float32, bfloat16 or float16."""
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"{argument}={dtype}: expected torch.float32, torch.bfloat16 or torch.float16")
