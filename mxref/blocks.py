"""Block-scaled tensors: `quantize`, `dequantize`, `qdq`.

Every operation runs on a matrix of blocks, one block a row, in chunks that stay in cache:
`to_blocks` brings a tensor there from any shape and axis and `from_blocks` takes it back.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt, prod

import torch
import torch.nn.functional as F
from einops import rearrange

from mxref.elements import (
    FLOAT_DTYPES,
    INF_BITS,
    MAGNITUDE_MASK,
    check_choice,
    check_codes,
    check_float,
    check_seed,
    decode_codes,
    philox,
    round_to_codes,
)
from mxref.formats import BlockFormat, block_format
from mxref.orders import DECODE_ORDERS, ENCODE_ORDERS, TensorScale, encode_quotient
from mxref.packing import pack
from mxref.recipes import Hadamard, Recipe, resolve_recipe
from mxref.registry import op
from mxref.scales import amax_bits, scale_codes

TENSOR_SCALES = ("none", "per_tensor", "per_row", "per_expert")
GRADIENTS = ("straight_through", "clipped")

_CHUNK_ELEMENTS = 1 << 16  # about what one core's cache holds with its temporaries


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
        clipped = _rotate_axis(grad, recipe, axis) * ctx.passes
        return _rotate_axis(clipped, recipe, axis, inverse=True).to(grad.dtype), None, None


def _qdq_blocks(plan: "_Plan", dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(plan.blocks.shape, dtype=_decoded_dtype(plan.recipe, dtype), device=plan.blocks.device)
    for part, values, scale, words in plan.chunks():
        codes, scales = encode_blocks(values, plan.format, plan.recipe, scale, words)
        decoded = decode_blocks(codes, scales, plan.format, plan.recipe, scale and scale.stored)
        out[part] = canonical(decoded.to(out.dtype))
    return _finish(plan.grid.from_blocks(out), plan.recipe, plan.axis, dtype)


def _in_range(plan: "_Plan") -> torch.Tensor:
    """Where |x| is at most the element's largest value times its scale."""
    out = torch.empty(plan.blocks.shape, dtype=torch.bool, device=plan.blocks.device)
    top = torch.tensor([[plan.format.element.max_code]], dtype=torch.int32, device=plan.blocks.device)
    for part, values, scale, words in plan.chunks():
        _, scales = encode_blocks(values, plan.format, plan.recipe, scale, words)
        out[part] = values.abs() <= decode_blocks(top, scales, plan.format, plan.recipe, scale and scale.stored)
    return plan.grid.from_blocks(out)


# ---- blocks: one a row ----------------------------------------------------------------------------------------------


def encode_blocks(
    x: torch.Tensor,
    format: BlockFormat,
    recipe: Recipe,
    tensor: TensorScale | None,
    random_words: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes `[n, b]` and scale codes `[n]`, both int32, of float32 blocks `[n, b]`; the recipe's transform is done already."""
    amax = amax_bits(x)
    poisoned = amax >= INF_BITS if recipe.inf == "nan" else amax > INF_BITS
    amax = amax.masked_fill(poisoned, 0)
    x = torch.where(poisoned[:, None], 0.0, x)

    candidates = list(_candidates(amax, format, recipe, tensor))
    best = None
    for scales in candidates:
        codes = _element_codes(x, scales, format, recipe, tensor, random_words)
        if len(candidates) > 1:
            decoded = decode_blocks(codes, scales, format, recipe, tensor and tensor.stored)
            error = _sequential_error(x, decoded, squared=recipe.search != "four_over_six_mae")
            if best is not None:
                wins = error < best[2]
                codes = torch.where(wins[:, None], codes, best[0])
                scales = torch.where(wins, scales, best[1])
                error = torch.where(wins, error, best[2])
            best = codes, scales, error

    if recipe.zero_block == "one":
        one = format.scale.positive.index(1.0)
        scales = torch.where(amax == 0, one, scales)
    if recipe.negative_zero != "keep" and format.element.kind == "float":
        is_zero = (x == 0) if recipe.negative_zero == "drop_input" else (codes & ~format.element.sign_mask) == 0
        codes = codes.masked_fill(is_zero, 0)
    return codes, scales.masked_fill(poisoned, format.scale.nan_code)


def decode_blocks(
    codes: torch.Tensor, scales: torch.Tensor, format: BlockFormat, recipe: Recipe, stored: torch.Tensor | None
) -> torch.Tensor:
    """Float32 values `[n, b]` of codes `[n, b]` and scale codes `[n]`: one float32 product an element."""
    factor = decode_codes(scales, format.scale)
    if stored is not None:
        factor = DECODE_ORDERS[recipe.decode_order](factor, stored)
    return decode_codes(codes, format.element) * factor[:, None]


def _candidates(
    amax: torch.Tensor, format: BlockFormat, recipe: Recipe, tensor: TensorScale | None
) -> Iterator[torch.Tensor]:
    """Scale codes `[n]` to try, in the order in which ties are decided."""
    if recipe.scale_rule == "amax":
        yield _mantissa_scale_codes(amax, format, recipe, tensor, stretch=1.0)
        if recipe.search.startswith("four_over_six"):
            yield _mantissa_scale_codes(amax, format, recipe, tensor, stretch=1.5)
        return
    scales = scale_codes(amax, format.element, format.scale, recipe.scale_rule)
    scales = scales.masked_fill(amax == INF_BITS, format.scale.max_code)
    yield scales
    if recipe.search == "mse":
        yield torch.where(amax == 0, scales, (scales + 1).clamp(max=format.scale.max_code))
        yield torch.where(amax == 0, scales, (scales - 1).clamp(min=0))


def _mantissa_scale_codes(
    amax: torch.Tensor, format: BlockFormat, recipe: Recipe, tensor: TensorScale | None, stretch: float
) -> torch.Tensor:
    """Codes of amax / element max, in the recipe's order, rounded to the scale format; `stretch` enlarges the scale."""
    order = ENCODE_ORDERS[recipe.encode_order]
    tensor = tensor or _no_tensor_scale(amax)
    amax = amax.view(torch.float32)
    if order.block_scale is None:
        return encode_quotient(amax, format.element.max / stretch * tensor.stored.double(), format.scale)
    raw = order.block_scale(amax, tensor, format.element.max) * stretch
    return round_to_codes(raw.clamp(max=format.scale.max), format.scale)


def _element_codes(
    x: torch.Tensor,
    scales: torch.Tensor,
    format: BlockFormat,
    recipe: Recipe,
    tensor: TensorScale | None,
    random_words: torch.Tensor | None,
) -> torch.Tensor:
    scale = decode_codes(scales, format.scale)
    if format.scale.is_power_of_two:
        # Exact, but for products below 2^-126, which are far below every midpoint of the element.
        multiplier = torch.ones_like(scale) / scale
    else:
        order = ENCODE_ORDERS[recipe.encode_order]
        tensor = tensor or _no_tensor_scale(scale)
        if order.multiplier is None:
            return encode_quotient(x, (scale.double() * tensor.stored.double())[:, None], format.element)
        multiplier = order.multiplier(scale, tensor)
    return round_to_codes(x * multiplier[:, None], format.element, recipe.rounding, recipe.overflow, random_words)


def _no_tensor_scale(like: torch.Tensor) -> TensorScale:
    one = torch.ones((), dtype=torch.float32, device=like.device)
    return TensorScale(one, one)


def _sequential_error(x: torch.Tensor, decoded: torch.Tensor, squared: bool) -> torch.Tensor:
    """Error of each block: a float32 sum over its elements in ascending order."""
    difference = x - decoded
    terms = difference * difference if squared else difference.abs()
    error = torch.zeros_like(terms[:, 0])
    for i in range(terms.shape[1]):
        error = error + terms[:, i]
    return error


def rotate(x: torch.Tensor, transform: Hadamard, inverse: bool = False) -> torch.Tensor:
    """Apply a Hadamard rotation, or its inverse, to float32 rows whose length is a multiple of its size."""
    signs = torch.tensor(transform.signs, dtype=torch.float32, device=x.device)
    groups = rearrange(x, "... (n size) -> ... n size", size=transform.size)
    groups = groups if inverse else groups * signs
    distance = 1
    while distance < transform.size:
        pairs = rearrange(groups, "... (m two d) -> ... m two d", two=2, d=distance)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        groups = torch.stack([a + b, a - b], dim=-2).reshape(groups.shape)
        distance *= 2
    groups = groups * (1.0 / isqrt(transform.size))
    groups = groups * signs if inverse else groups
    return groups.reshape(x.shape)


def _rotate_axis(x: torch.Tensor, recipe: Recipe, axis: int, inverse: bool = False) -> torch.Tensor:
    """The recipe's transform along `axis`, in float32; `x` itself where the recipe has none."""
    if recipe.transform is None:
        return x
    return rotate(x.movedim(axis, -1).float(), recipe.transform, inverse).movedim(-1, axis)


def _decoded_dtype(recipe: Recipe, dtype: torch.dtype) -> torch.dtype:
    """Decoded values stay float32 until the transform is undone."""
    return dtype if recipe.transform is None else torch.float32


def _finish(decoded: torch.Tensor, recipe: Recipe, axis: int, dtype: torch.dtype) -> torch.Tensor:
    if recipe.transform is None:
        return decoded
    return canonical(_rotate_axis(decoded, recipe, axis, inverse=True).to(dtype)).contiguous()


def canonical(x: torch.Tensor) -> torch.Tensor:
    """`x` with every NaN replaced by the canonical one (0x7FC00000, 0x7FC0, 0x7E00)."""
    return torch.where(x.isnan(), torch.nan, x)


# ---- geometry -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grid:
    """How a tensor of `shape`, blocked along the last axis once `axis` has moved there, falls into blocks.

    A block is `block_rows` x `block_size` elements of one matrix, row-major; missing elements at the edges
    are zeros that change nothing and are dropped again.
    """

    shape: tuple[int, ...]
    axis: int
    block_size: int
    block_rows: int

    @property
    def moved(self) -> tuple[int, ...]:
        """Shape with the blocked axis last."""
        shape = list(self.shape)
        shape.append(shape.pop(self.axis))
        return tuple(shape)

    @property
    def matrices(self) -> tuple[int, int, int]:
        """(matrices, rows, columns): rows only count apart where blocks span several of them."""
        *leading, columns = self.moved
        if self.block_rows == 1:
            return 1, prod(leading), columns
        return prod(leading[:-1]), leading[-1], columns

    @property
    def counts(self) -> tuple[int, int, int]:
        """(matrices, blocks down, blocks across)."""
        matrices, rows, columns = self.matrices
        return matrices, -(-rows // self.block_rows), -(-columns // self.block_size)

    @property
    def block_count(self) -> int:
        return prod(self.counts)

    @property
    def block_elements(self) -> int:
        return self.block_rows * self.block_size

    def chunks(self) -> Iterator[slice]:
        """Runs of blocks small enough to stay in cache."""
        step = max(1, _CHUNK_ELEMENTS // self.block_elements)
        for start in range(0, self.block_count, step):
            yield slice(start, min(start + step, self.block_count))

    def to_blocks(self, x: torch.Tensor) -> torch.Tensor:
        """`x` of the logical shape as `[blocks, elements]`, a view where possible."""
        matrices, rows, columns = self.matrices
        x = x.movedim(self.axis, -1).reshape(matrices, rows, columns)
        if columns % self.block_size or rows % self.block_rows:
            x = F.pad(x, (0, -columns % self.block_size, 0, -rows % self.block_rows))
        return rearrange(x, "m (i r) (j k) -> (m i j) (r k)", r=self.block_rows, k=self.block_size)

    def from_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """The inverse of `to_blocks`, contiguous."""
        matrices, rows, columns = self.matrices
        m, i, j = self.counts
        x = rearrange(blocks, "(m i j) (r k) -> m (i r) (j k)", m=m, i=i, j=j, r=self.block_rows, k=self.block_size)
        return x[:, :rows, :columns].reshape(self.moved).movedim(-1, self.axis).contiguous()

    def scales_from_blocks(self, scales: torch.Tensor) -> torch.Tensor:
        """One scale a block `[blocks]` to the shape of `BlockTensor.scales`."""
        leading = self.moved[:-1] if self.block_rows == 1 else (*self.moved[:-2], self.counts[1])
        return scales.reshape(*leading, self.counts[2]).movedim(-1, self.axis).contiguous()

    def scales_to_blocks(self, scales: torch.Tensor) -> torch.Tensor:
        """The inverse of `scales_from_blocks`."""
        return scales.movedim(self.axis, -1).reshape(-1)


def scale_shape(shape: tuple[int, ...], axis: int, block_size: int, block_rows: int = 1) -> tuple[int, ...]:
    """Shape of the scales of a tensor: the blocked axis divided by the block size, rounded up.

    >>> scale_shape((2, 48), -1, 32)
    (2, 2)
    """
    counts = list(shape)
    counts[axis] = -(-counts[axis] // block_size)
    if block_rows > 1:
        other = -2 if axis == -1 else -1
        counts[other] = -(-counts[other] // block_rows)
    return tuple(counts)


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
        raise ValueError(f"x has {x.shape[axis]} along axis {axis}: the transform needs a multiple of {recipe.transform.size}")
    if recipe.rounding == "stochastic":
        check_seed(seed)
    elif seed is not None:
        raise ValueError(f"seed={seed}: recipe {recipe.name!r} rounds {recipe.rounding}, which uses no seed")
    if recipe.nan == "raise" and x.isnan().any():
        raise ValueError(f"x holds NaN and recipe {recipe.name!r} has nan='raise'")

    grid = Grid(tuple(x.shape), axis, format.block_size, recipe.block_rows)
    blocks = grid.to_blocks(_rotate_axis(x.detach(), recipe, axis))
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
        raise ValueError(f"tensor_scale='per_expert': expected x [E, ...] blocked along another axis, got {list(grid.shape)}")
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
