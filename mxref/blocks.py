"""Block-scaled tensors: `quantize`, `dequantize`, `qdq`.

Arguments are checked first and become a plan; then chunks of blocks that stay in cache are encoded,
decoded or both.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from mxref.block_codec import decode_blocks, encode_blocks, rotate
from mxref.elements import canonical, check_codes, check_dtype, check_float, check_seed, check_tensor, philox
from mxref.faults import after
from mxref.formats import FLOAT_MAX, BlockFormat, block_format, check_choice, check_number, check_type
from mxref.grid import Grid
from mxref.orders import ENCODE_ORDERS, TensorScale
from mxref.packing import check_packed, pack_codes, unpack_codes
from mxref.recipes import Recipe, resolve_recipe
from mxref.registry import op, op_without_gradient

TENSOR_SCALES = ("none", "per_tensor", "per_row", "per_expert")
GRADIENTS = ("straight_through", "clipped")


@dataclass(frozen=True, eq=False)
class BlockTensor:
    """A block-scaled tensor: packed codes, scales and everything needed to read them.

    `packed`: uint8, codes bit-packed along the blocked axis, which comes last: `[..., ceil(length * bits / 8)]`.
    `length`: elements along the blocked axis. `scales`: uint8 scale codes, the logical shape with the blocked axis
    divided by the block size, rounded up (with `recipe.block_rows` > 1 the other of the last two axes by that too).
    `tensor_scale`: float32 that broadcasts to the logical shape, kept as given, used in the recipe's direction, or
    None. `axis`: the blocked axis, negative.
    """

    packed: torch.Tensor
    length: int
    scales: torch.Tensor
    tensor_scale: torch.Tensor | None
    format: BlockFormat
    recipe: Recipe
    axis: int = -1

    def __post_init__(self):
        object.__setattr__(self, "format", block_format(self.format))
        object.__setattr__(self, "recipe", resolve_recipe(self.recipe, self.format))
        check_packed("packed", self.packed, self.format.element.bits, self.length, "length")
        check_codes("scales", self.scales, self.format.scale)
        if any(isinstance(part, torch.Tensor) and part.device != self.device for part in (self.scales, self.tensor_scale)):
            raise ValueError(f"packed is on {self.device}, scales or tensor_scale elsewhere: expected one device")
        stored = [*self.packed.shape[:-1], self.length]
        object.__setattr__(self, "axis", _blocked_axis("codes", stored, self.axis, self.recipe, self.length))
        expected = self._grid.scale_shape
        if tuple(self.scales.shape) != expected:
            raise ValueError(f"scales has shape {list(self.scales.shape)}: codes {list(self.shape)} need {list(expected)}")
        if (sign := self.format.scale.sign_mask) and (count := int((self.scales & sign).count_nonzero())):
            raise ValueError(f"scales holds codes with the sign bit set ({count}): no {self.format.scale.name} scale has it")
        if self.tensor_scale is not None:
            scale = check_tensor_scale(self.tensor_scale, self._grid, self.format)
            object.__setattr__(self, "tensor_scale", scale)

    @classmethod
    def from_codes(cls, codes: torch.Tensor, scales, tensor_scale, format, recipe, axis: int = -1) -> "BlockTensor":
        """A BlockTensor of `codes`: uint8, one code a byte, the logical shape; the others as the fields."""
        element = block_format(format).element
        check_codes("codes", codes, element)
        check_number("axis", axis, -codes.ndim, codes.ndim - 1, f"an axis of codes {list(codes.shape)}, an int")
        packed = pack_codes(codes.movedim(axis, -1), element.bits)
        return cls(packed, codes.shape[axis], scales, tensor_scale, format, recipe, axis)

    @classmethod
    def trusted(cls, *values) -> "BlockTensor":
        """A BlockTensor whose fields are known to be right, without looking at every code again."""
        tensor = object.__new__(cls)
        tensor.__dict__.update(zip(cls.__dataclass_fields__, values))
        return tensor

    @property
    def shape(self) -> torch.Size:
        """Logical shape."""
        shape = list(self.packed.shape[:-1])
        shape.insert(self.ndim + self.axis, self.length)
        return torch.Size(shape)

    @property
    def ndim(self) -> int:
        """Number of logical axes."""
        return self.packed.ndim

    @property
    def device(self) -> torch.device:
        """Device of codes and scales."""
        return self.packed.device

    @property
    def codes(self) -> torch.Tensor:
        """uint8, one code a byte, the logical shape: unpacked anew each time."""
        return unpack_codes(self.packed, self.format.element.bits, self.length).movedim(-1, self.axis)

    @property
    def _grid(self) -> Grid:
        """How the logical shape falls into blocks."""
        return Grid(tuple(self.shape), self.axis, self.format.block_size, self.recipe.block_rows)

    @property
    def bits_per_element(self) -> float:
        """Stored bits per element of this tensor: element, block scales and tensor scales."""
        tensor_scale = 0 if self.tensor_scale is None else self.tensor_scale.numel() * 32
        return self.format.element.bits + (self.scales.numel() * 8 + tensor_scale) / max(self.shape.numel(), 1)

    def __getitem__(self, index: int | slice | torch.Tensor) -> "BlockTensor":
        """Part of the first axis, e.g. one expert of `[E, N, K]` or some rows of `[M, K]`."""
        if isinstance(index, bool) or not isinstance(index, (int, slice, torch.Tensor)):
            raise TypeError(f"index {index!r}: expected an int, a slice or a tensor of indices, for the first axis alone")
        if isinstance(index, torch.Tensor) and index.dtype == torch.bool and index.ndim != 1:
            raise IndexError(f"index is a mask of {index.ndim} axes: expected one, for the first axis alone")
        if self.ndim + self.axis == 0 or (self.recipe.block_rows > 1 and self.ndim == 2):
            raise IndexError("the first axis is a blocked one: its blocks cannot be taken apart")
        packed, scale = self.packed[index], self.tensor_scale
        if scale is not None and scale.ndim == self.ndim:
            if scale.shape[0] > 1:
                scale = scale[index]
            elif packed.ndim < self.ndim:
                scale = scale[0]
        return self._with(packed, self.scales[index], scale)

    def to(self, device: str | torch.device) -> "BlockTensor":
        """The same tensor on `device`."""
        if not isinstance(device, (str, int, torch.device)):
            raise TypeError(f"device has type {type(device).__name__}: expected a torch.device or its name")
        scale = None if self.tensor_scale is None else self.tensor_scale.to(device)
        return self._with(self.packed.to(device), self.scales.to(device), scale)

    def _with(self, packed: torch.Tensor, scales: torch.Tensor, tensor_scale: torch.Tensor | None) -> "BlockTensor":
        return BlockTensor.trusted(packed, self.length, scales, tensor_scale, self.format, self.recipe, self.axis)

    def __repr__(self) -> str:
        scale = "none" if self.tensor_scale is None else list(self.tensor_scale.shape)
        return (
            f"BlockTensor({self.format.name}, shape={list(self.shape)}, axis={self.axis}, tensor_scale={scale}, "
            f"recipe={self.recipe}, device={self.device})"
        )


@op_without_gradient
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
    tensor in the recipe's direction: a scalar, one that broadcasts to `x.shape` with size 1 along `axis`, one a
    row (`[N]` for `[N, K]`), `[E]` or `[E, 2]` for `[E, 2 I, K]` (gate rows, then up rows). `seed` is for
    stochastic rounding: the element at row-major index i of `x` uses random word i.

    A NaN makes its block decode to NaN and changes nothing else; so does an Inf unless the recipe saturates.
    Raises TypeError for another dtype; ValueError for unknown names, a recipe that does not fit the format, a
    tensor scale that is not finite and positive or has another shape, NaN where the recipe raises.
    Source: OCP MX v1.0, 6.3; NVFP4 as in Transformer Engine.

    >>> q = quantize(torch.tensor([7.0, 1.0, -0.2]), "mxfp4")
    >>> q.scales.tolist(), q.codes.tolist()
    ([127], [7, 2, 8])
    """
    return _quantize(_plan(check_quantize(x, format, recipe, tensor_scale, axis, seed)))


def quantize_rows(x: torch.Tensor, row_ids: torch.Tensor, format, recipe, tensor_scale, seed) -> BlockTensor:
    """`quantize` of rows `[M, K]` taken out of a larger tensor: row m draws the random words of row `row_ids[m]` there."""
    return _quantize(_plan(check_quantize(x, format, recipe, tensor_scale, -1, seed), row_ids))


def quantize_with_scale(x: torch.Tensor, format, recipe, tensor_scale, seed) -> tuple[BlockTensor, TensorScale]:
    """`quantize` along the last axis, and the tensor scale that it used for each block."""
    plan = _plan(check_quantize(x, format, recipe, tensor_scale, -1, seed))
    return _quantize(plan), plan.tensor_scale


def _quantize(plan: "_Plan") -> BlockTensor:
    grid = plan.grid
    codes = torch.empty((grid.block_count, grid.block_elements), dtype=torch.uint8, device=plan.blocks.device)
    scales = torch.empty(grid.block_count, dtype=torch.uint8, device=plan.blocks.device)
    for part, chunk_codes, chunk_scales, _ in plan.encoded():
        codes[part], scales[part] = chunk_codes, chunk_scales
    packed = pack_codes(grid.from_blocks(codes).movedim(grid.axis, -1), plan.format.element.bits)
    scales, length = grid.scales_from_blocks(scales), grid.shape[grid.axis]
    return BlockTensor.trusted(packed, length, scales, plan.stored_tensor_scale, plan.format, plan.recipe, grid.axis)


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
    check_type("q", q, BlockTensor)
    check_dtype("dtype", dtype)
    return _dequantize(q, dtype)


def _dequantize(q: BlockTensor, dtype: torch.dtype) -> torch.Tensor:
    grid = q._grid
    codes, scales = grid.to_blocks(q.codes), grid.scales_to_blocks(q.scales)
    stored = grid.scales_to_blocks(q.scales.new_ones((), dtype=torch.float32) if q.tensor_scale is None else q.tensor_scale)
    decoded = ((part, decode_blocks(codes[part], scales[part], q.format, q.recipe, stored[part])) for part in grid.chunks())
    return _gather(decoded, grid, q.recipe, dtype, q.device)


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
    `quantize`. Returns `x`'s shape, dtype and device. Differentiable, backward and forward: `gradient="straight_through"`
    passes the gradient on unchanged, `"clipped"` sets it to zero where the element saturated or the block is NaN.

    >>> qdq(torch.tensor([7.0, 1.0, -0.2]), "mxfp4", recipe="ocp_even").tolist()
    [8.0, 1.0, -0.0]
    """
    call = check_quantize(x, format, recipe, tensor_scale, axis, seed, gradient)
    if (x.requires_grad and torch.is_grad_enabled()) or torch.autograd.forward_ad.unpack_dual(x).tangent is not None:
        return _StraightThrough.apply(x, call, gradient)
    return _qdq(_plan(call), x.dtype)


class _StraightThrough(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, call, gradient):
        scale, axis = "none" if call.given_tensor_scale is None else call.given_tensor_scale, call.grid.axis
        # the op again, on what autograd does not watch, so that a kernel may answer
        return qdq(x.detach(), call.format, recipe=call.recipe, tensor_scale=scale, axis=axis, seed=call.seed)

    @staticmethod
    def setup_context(ctx, inputs, output):  # apart from forward: so torch.func can take the gradient too
        x, call, gradient = inputs
        ctx.transform, ctx.axis, ctx.passes = call.recipe.transform, call.grid.axis, None
        if gradient == "clipped":
            ctx.passes = _unsaturated(replace(call, x=x.detach()))

    @staticmethod
    def backward(ctx, grad):
        return _StraightThrough.jvp(ctx, grad), None, None

    @staticmethod
    def jvp(ctx, change, *_):  # and backward, since the rotation is orthogonal
        if ctx.passes is None:
            return change
        clipped = rotate(change, ctx.transform, ctx.axis) * ctx.passes
        return rotate(clipped, ctx.transform, ctx.axis, inverse=True).to(change.dtype)


def _qdq(plan: "_Plan", dtype: torch.dtype) -> torch.Tensor:
    decoded = ((part, decode_blocks(*coded, plan.format, plan.recipe, stored)) for part, *coded, stored in plan.encoded())
    return _gather(decoded, plan.grid, plan.recipe, dtype, plan.blocks.device)


def _unsaturated(call: "QuantizeCall") -> torch.Tensor:
    """Which elements, before a transform is undone, are at most what the largest code decodes to: none of a NaN block."""
    q, recipe = _quantize(_plan(call)), replace(call.recipe, transform=None)
    codes = torch.full_like(q.codes, q.format.element.max_code)
    packed = pack_codes(codes.movedim(q.axis, -1), q.format.element.bits)
    largest = BlockTensor.trusted(packed, q.length, q.scales, q.tensor_scale, q.format, recipe, q.axis)
    return rotate(call.x.float(), call.recipe.transform, q.axis).abs() <= _dequantize(largest, torch.float32)


def _gather(
    decoded: Iterable[tuple[slice, torch.Tensor]], grid: Grid, recipe: Recipe, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor of `dtype` from float32 values of runs of blocks; a transform is undone in float32 before the rounding."""
    blocks_dtype = dtype if recipe.transform is None else torch.float32
    out = torch.empty((grid.block_count, grid.block_elements), dtype=blocks_dtype, device=device)
    for part, values in decoded:
        out[part] = canonical(values.to(blocks_dtype))
    out = grid.from_blocks(out)
    if recipe.transform is None:
        return out
    return canonical(rotate(out, recipe.transform, grid.axis, inverse=True).to(dtype)).contiguous()


# ---- arguments ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Plan:
    """A checked call: the blocks of `x`, and what they need to be encoded. `tensor_scale`: one a block."""

    blocks: torch.Tensor
    grid: Grid
    format: BlockFormat
    recipe: Recipe
    stored_tensor_scale: torch.Tensor | None
    tensor_scale: TensorScale
    random_index: torch.Tensor | None
    seed: int | None

    def encoded(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(which blocks, their codes, scale codes, stored tensor scales), at a time what stays in cache."""
        for part in self.grid.chunks():
            tensor = TensorScale(*(scale[part] for scale in self.tensor_scale if scale is not None))
            words = None if self.random_index is None else philox(self.seed, self.random_index[part])
            codes, scales = encode_blocks(self.blocks[part], self.format, self.recipe, tensor, words)
            yield part, codes, scales, tensor.stored


@dataclass(frozen=True, eq=False)
class QuantizeCall:
    """Checked arguments of `quantize` and `qdq`, for the reference and for kernels.

    `given_tensor_scale`: float32 that broadcasts to `x`, one of `TENSOR_SCALES`, or None where there is none.
    """

    x: torch.Tensor
    grid: Grid
    format: BlockFormat
    recipe: Recipe
    given_tensor_scale: str | torch.Tensor | None
    seed: int | None

    def tensor_scale(self, finite_amax: Callable[[str], torch.Tensor]) -> TensorScale | None:
        """The tensor scale, shaped to broadcast to `x`; `finite_amax` of "per_tensor" ... gives the largest magnitudes."""
        order, given = ENCODE_ORDERS[self.recipe.encode_order], self.given_tensor_scale
        if not isinstance(given, str):
            return None if given is None else order.given(given)
        faults, largest, amax = self.recipe.faults, self.recipe.largest(self.format), finite_amax(given)
        amax = after("tensor_amax", faults, amax.to(self.x.dtype) if self.recipe.amax_dtype == "input" else amax, self.x)
        return after("tensor_scale", faults, order.from_amax(amax, largest), amax, largest)


def check_quantize(x, format, recipe, tensor_scale, axis, seed, gradient=GRADIENTS[0]) -> QuantizeCall:
    """Check the arguments of `quantize`, or of `qdq`, before anything is computed."""
    check_choice("gradient", gradient, GRADIENTS)
    check_float("x", x)
    format = block_format(format)
    recipe = resolve_recipe(recipe, format)
    axis = _blocked_axis("x", x.shape, axis, recipe)
    check_seed(seed, recipe.rounding)
    if recipe.nan == "raise" and x.isnan().any():
        raise ValueError(f"x holds NaN and recipe {recipe.name!r} has nan='raise'")
    grid = Grid(tuple(x.shape), axis, format.block_size, recipe.block_rows)
    if isinstance(tensor_scale, str):
        check_choice("tensor_scale", tensor_scale, TENSOR_SCALES)
        if tensor_scale != "none" and not format.tensor_scale:
            raise ValueError(f"tensor_scale={tensor_scale!r}: {format.name} has no tensor scale")
        if tensor_scale == "per_row" and grid.block_rows > 1:
            raise ValueError(f"tensor_scale='per_row': blocks of block_rows={grid.block_rows} rows must share it")
        if tensor_scale == "per_expert" and (x.ndim < 2 + (grid.block_rows > 1) or axis == -x.ndim):
            raise ValueError(f"tensor_scale='per_expert': x {list(x.shape)} is not [E, ...] blocked along another axis")
        tensor_scale = None if tensor_scale == "none" else tensor_scale
    elif tensor_scale is not None:
        tensor_scale = check_tensor_scale(tensor_scale, grid, format).to(x.device)
    elif format.tensor_scale:
        tensor_scale = "per_tensor"
    if isinstance(tensor_scale, str) and recipe.largest(format) > FLOAT_MAX:
        raise ValueError(f"tensor_scale={tensor_scale!r}: {format.name} holds more than float32, so a scale must be given")
    return QuantizeCall(x.detach().resolve_neg(), grid, format, recipe, tensor_scale, seed)


def _plan(call: QuantizeCall, row_ids: torch.Tensor | None = None) -> _Plan:
    """A checked call, with what each block needs. `row_ids`: see `quantize_rows`."""
    x, grid, recipe = call.x, call.grid, call.recipe
    blocks = grid.to_blocks(rotate(x, recipe.transform, grid.axis))
    scale = call.tensor_scale(lambda granularity: amax_of_scales(_amax_of_blocks(blocks, grid), granularity, grid))
    one = torch.ones((), dtype=torch.float32, device=x.device)
    scale_of_each_block = TensorScale(*(grid.scales_to_blocks(s) for s in scale or (one, one) if s is not None))
    index = None
    if recipe.rounding == "stochastic":
        index = torch.arange(x.numel(), device=x.device).reshape(x.shape)
        index = grid.to_blocks(index if row_ids is None else row_ids[:, None] * x.shape[1] + index[:1])
    return _Plan(blocks, grid, call.format, recipe, scale and scale.stored, scale_of_each_block, index, call.seed)


def _amax_of_blocks(blocks: torch.Tensor, grid: Grid) -> torch.Tensor:
    largest = torch.zeros(grid.block_count, dtype=torch.float32, device=blocks.device)
    for part in grid.chunks():
        largest[part] = blocks[part].float().abs().nan_to_num_(nan=0.0, posinf=0.0).amax(-1)
    return largest


def amax_of_scales(largest: torch.Tensor, granularity: str, grid: Grid) -> torch.Tensor:
    """Largest finite magnitude for each tensor scale, from those of blocks, shaped to broadcast to `grid.shape`; or 0."""
    amax, ndim = grid.scales_from_blocks(largest), len(grid.shape)
    reduced = {"per_tensor": range(ndim), "per_row": (grid.axis + ndim,)}.get(granularity, range(1, ndim))
    reduce = amax.amax if amax.numel() else amax.sum  # which is 0
    return reduce(tuple(reduced), keepdim=granularity != "per_tensor")


def check_tensor_scale(given: torch.Tensor, grid: Grid, format: BlockFormat) -> torch.Tensor:
    """A given tensor scale, shaped to broadcast to `grid.shape`; raises unless it is float32, finite, positive and fits."""
    if not format.tensor_scale:
        raise ValueError(f"tensor_scale is given: {format.name} has no tensor scale")
    check_scale("tensor_scale", given, f" or one of {', '.join(TENSOR_SCALES)}")
    shaped = fit_tensor_scale(given.detach().resolve_neg(), grid)
    if not torch.equal(grid.first_row_of_block(shaped), shaped):
        raise ValueError(f"tensor_scale: rows that share a block scale (block_rows={grid.block_rows}) must share it too")
    return shaped


def fit_tensor_scale(given: torch.Tensor, grid: Grid) -> torch.Tensor:
    """A given tensor scale, shaped to broadcast to `grid.shape`; raises unless its shape fits. Looks at no value."""
    if given.numel() == 1 and given.ndim <= 1:
        return given.reshape(())
    sizes, axes, axis = grid.shape, len(grid.shape), grid.axis
    if axes == 3 and axis == -1 and given.shape == (sizes[0], 2) and sizes[1] % 2 == 0:
        given = given.repeat_interleave(sizes[1] // 2, dim=1)  # gate rows, then up rows
    if axes in (2, 3) and axis == -1 and given.shape == sizes[:-1]:
        given = given[..., None]
    if axes >= 3 and axis != -axes and given.shape == sizes[:1]:
        return given.reshape(-1, *[1] * (axes - 1))
    if given.ndim == axes and given.shape[axis] == 1 and all(a in (1, n) for a, n in zip(given.shape, sizes)):
        return given
    raise ValueError(
        f"tensor_scale has shape {list(given.shape)}: expected a scalar, or one that broadcasts to {list(sizes)} "
        f"with size 1 along axis {axis}, or one a row, or [E] or [E, 2] for [E, rows, K]"
    )


def check_scale(argument: str, given: torch.Tensor, others: str = "") -> None:
    """Raise unless `given` is a float32 tensor of finite values > 0."""
    check_tensor(argument, given, torch.float32, others=others)
    valid = given.isfinite() & (given > 0)
    if not valid.all():
        raise ValueError(f"{argument} holds {given[~valid][0].item()}: expected finite values > 0")


def _blocked_axis(argument: str, shape: Sequence[int], axis: int, recipe: Recipe, length: int | None = None) -> int:
    """`axis`, negative; raises unless `shape` has it and `recipe` can block its `length` (None: shape[axis]) elements."""
    shape, axes = list(shape), len(shape)
    check_number("axis", axis, -axes, axes - 1, f"an axis of {argument} {shape}, an int")
    axis = axis if axis < 0 else axis - axes
    if recipe.block_rows > 1 and (axes < 2 or axis not in (-1, -2)):
        expected = f"one of the last two axes: recipe {recipe.name!r} has blocks of {recipe.block_rows} rows"
        raise ValueError(f"axis={axis} of {argument} {shape}: expected {expected}")
    if recipe.transform is not None and (shape[axis] if length is None else length) % recipe.transform.size:
        raise ValueError(f"{argument} {shape}: the transform needs a multiple of {recipe.transform.size} along axis {axis}")
    return axis
