"""From one form of a matrix to another, and exactly what that changed.

A form is a `BlockTensor` or a tensor of floats. Nothing is rounded that need not be: codes and block scales of one
format move as they are, and a tensor scale that has to turn from a multiplier to a divisor is chosen so that the
fewest blocks decode differently.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import frexp

import torch

from mxref import registry
from mxref.blocks import BlockTensor, dequantize, quantize
from mxref.elements import decode, encode, ldexp, reciprocal
from mxref.formats import BlockFormat
from mxref.orders import DECODE_ORDERS
from mxref.packing import pack_codes
from mxref.recipes import Recipe

_DECODED, _CHUNK = 1 << 20, 1 << 16  # elements that are decoded, and compared, at a time; float32 counts the latter exactly
_PIECE = 1 << 18  # codes or floats that are searched for NaN and Inf at a time, which stay in cache
_TOGETHER, _WIDTH = 8, 2048  # squares that a compiled pass adds up in float32, and at how many places at a time
_NEIGHBOURS = 2  # float32 steps to either side of a reciprocal that are tried
_WIDEST_STEP = 2.0**-21  # of what a step is relative to the reciprocal of a float32: that of 2^128 is 2^-128, a step 2^-149

Matrix = BlockTensor | torch.Tensor


# What can become of a weight, in words.
HOW = {
    "kept": "codes and all scales are as they were, bit for bit",
    "turned": "codes and block scales are as they were, bit for bit; the tensor scale, by which one dialect multiplies "
    "and the other divides, became its reciprocal, which is exact for powers of two alone: with others values may differ in "
    "float32's last place",
    "codes kept": "codes are as they were; their powers of two became block scales of the target and one tensor scale",
    "quantized": "decoded, if it was not floats, and quantized anew",
    "decoded": "floats, what codes and scales stand for",
}


@dataclass(frozen=True)
class Loss:
    """How the values of a weight changed: counts, and errors of the decoded float32 values.

    `changed`: elements with another value (0 and -0 are one, and so are all NaN). `max_error`, `rms_error`: of the finite
    ones; infinite where a finite value became none, or one that was none finite. `rms`: of the source. `outside`: blocks
    that the target's scales cannot reach: they became zeros by whatever scale, saturated, or lost bits of their codes.
    `not_finite`: elements of the source that are NaN or Inf.
    """

    elements: int = 0
    changed: int = 0
    max_error: float = 0.0
    squared_error: float = 0.0
    squared: float = 0.0
    blocks: int = 0
    outside: int = 0
    not_finite: int = 0

    @property
    def rms_error(self) -> float:
        """Root of the mean squared error."""
        return (self.squared_error / max(self.elements, 1)) ** 0.5

    @property
    def rms(self) -> float:
        """Root mean square of the source."""
        return (self.squared / max(self.elements, 1)) ** 0.5

    @property
    def relative_error(self) -> float:
        """`rms_error` over `rms`; 0 without errors."""
        return (self.squared_error / self.squared) ** 0.5 if self.squared and self.squared_error else 0.0

    def __add__(self, other: "Loss") -> "Loss":
        return Loss(
            self.elements + other.elements,
            self.changed + other.changed,
            max(self.max_error, other.max_error),
            self.squared_error + other.squared_error,
            self.squared + other.squared,
            self.blocks + other.blocks,
            self.outside + other.outside,
            self.not_finite + other.not_finite,
        )


@dataclass(frozen=True)
class Change:
    """What became of one weight.

    `how`: a key of `HOW`. `loss`: None where it was not measured. `input_error`: relative error of its input scale where
    that was turned; `input_dropped`: whether it has one that is not written. `not_finite`: elements of the source that are
    NaN or Inf, which is known of what is not measured too.
    """

    name: str
    how: str
    loss: Loss | None
    input_error: float | None = None
    input_dropped: bool = False
    not_finite: int = 0

    def with_input(self, error: float | None, dropped: bool) -> "Change":
        """The same with what became of the input scale."""
        return replace(self, input_error=error, input_dropped=dropped)

    @classmethod
    def total(cls, name: str, changes: Sequence["Change"]) -> "Change":
        """Of a stack, from those of its matrices."""
        losses = [change.loss for change in changes]
        loss = None if None in losses else sum(losses[1:], losses[0])
        errors = [change.input_error for change in changes if change.input_error is not None]
        dropped, odd = any(change.input_dropped for change in changes), sum(change.not_finite for change in changes)
        return cls(name, changes[0].how, loss, max(errors, default=None), dropped, odd)

    def record(self) -> dict:
        """Everything, as JSON takes it."""
        facts = {"name": self.name, "how": self.how}
        facts |= {"input_error": self.input_error, "input_dropped": self.input_dropped, "not_finite": self.not_finite}
        if self.loss is not None:
            names = ("elements", "changed", "max_error", "rms_error", "rms", "blocks", "outside")
            facts |= {name: getattr(self.loss, name) for name in names}
        return facts


def unchanged(target: BlockTensor) -> Loss:
    """The loss of what was kept."""
    return Loss(elements=target.shape.numel(), blocks=target.scales.numel(), not_finite=not_finite(target))


def measure(source: Matrix, target: Matrix, outside: int | None = None) -> Loss:
    """What `target` lost of `source`, both `[N, K]`; `outside` if it is known already."""
    total = Loss(blocks=target.scales.numel() if isinstance(target, BlockTensor) else 0, outside=outside or 0)
    looks_outside = outside is None and isinstance(target, BlockTensor)
    rows, comparison = max(1, _DECODED // max(source.shape[-1], 1)), _Comparison()
    for start in range(0, source.shape[0], rows):
        part = slice(start, start + rows)
        a = dequantize(source[part]) if isinstance(source, BlockTensor) else source[part]
        b = _values(target[part])
        found = comparison(a.flatten(), b.flatten())
        total += found
        if looks_outside:
            total += Loss(outside=_outside(a, b, target[part], found.not_finite > 0))
    return total


def _values(matrix: Matrix) -> torch.Tensor:
    return dequantize(matrix) if isinstance(matrix, BlockTensor) else matrix.float()


class _Comparison:
    """The loss of many values, a piece after the other; all that it writes is memory of its own, which stays in cache."""

    def __init__(self):
        self._float32, self._float64 = torch.empty(2, _CHUNK), torch.empty(_CHUNK, dtype=torch.float64)
        self._whole = _TOGETHER * _WIDTH if _compiles() else None  # what a compiled pass takes multiples of

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> Loss:
        """Of float32 `b` where `a` was, in any dtype, both `[n]`; squares are summed in float64.

        With the backend `inductor` one compiled pass sums squares eight at a time in float32 first. None is negative and
        each takes part in eight roundings, of 2^-24 at most: the sums are right to 2^-20 of themselves. Where squares
        leave float32's range, or are below 2^-100 in the mean (what lies below 2^-126 is lost), they are summed anew.
        """
        compiled = len(a) // self._whole * self._whole if self._whole else 0
        if compiled and compiled > self._whole:  # a compiler takes size 1 for a constant
            both = [part[:compiled].view(-1, _TOGETHER, _WIDTH) for part in (a, b)]
            for part in both:
                torch._dynamo.mark_dynamic(part, 0)
            parts = _compiled()(*both)
            largest = parts[0].amax().item()
            changed, *squares = (part.double().sum().item() for part in parts[1:])  # faster than a sum that widens
            fits = [compiled * 2.0**-100 <= square < torch.inf for square in squares]
            if largest < torch.inf and (fits[0] or not changed) and fits[1]:
                return Loss(compiled, int(changed), largest, *squares) + self._by_pieces(a[compiled:], b[compiled:])
        return self._by_pieces(a, b)

    def _by_pieces(self, a: torch.Tensor, b: torch.Tensor) -> Loss:
        loss, elements, changed, largest, squares = Loss(), 0, 0.0, 0.0, [0.0, 0.0]
        for piece, decoded in zip(a.split(_CHUNK), b.split(_CHUNK)):
            x, difference = self._float32[:, : len(piece)]
            wide = self._float64[: len(piece)]
            torch.sub(x.copy_(piece), decoded, out=difference)
            found = [torch.dot(wide.copy_(part), wide).item() for part in (difference, x)]
            highest = difference.abs_().amax().item() if len(piece) else 0.0
            if not highest < torch.inf:
                loss += _compare_not_finite(x, decoded)
                continue
            difference.sign_()
            changed, largest = changed + torch.dot(difference, difference).item(), max(largest, highest)
            squares = [total + part for total, part in zip(squares, found)]
            elements += len(piece)
        return loss + Loss(elements, int(changed), largest, *squares)


def _compiles() -> bool:
    """Whether the backend that compiles for the CPU is chosen, and can."""
    return "inductor" in registry.selected() and registry.kernel("dequantize", "inductor").requires() is None


@functools.cache
def _compiled() -> Callable:
    """Of `[n, 8, w]`, the second in float32: largest differences, how many differ, squared differences, squares `[n, w]`."""

    def sums(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = a.float()
        difference = x - b
        parts = (difference != 0).float(), difference * difference, x * x
        return difference.abs().amax(1), *(part.sum(1) for part in parts)

    return torch.compile(sums, fullgraph=True)


def _compare_not_finite(a: torch.Tensor, b: torch.Tensor) -> Loss:
    """Where there is NaN or Inf: what stays is no change, what appears or goes is an infinite error."""
    finite, odd = a.isfinite() & b.isfinite(), ~a.isfinite()
    same = (a == b) | (a.isnan() & b.isnan())
    difference = (a - b).where(finite, 0.0).double()
    largest = torch.inf if (odd == b.isfinite()).any() else difference.abs().amax().item()
    squares = [part.square().sum().item() for part in (difference, a.masked_fill(odd, 0.0).double())]
    return Loss(a.numel(), int((~same).count_nonzero()), largest, *squares, not_finite=int(odd.count_nonzero()))


def not_finite(values: Matrix) -> int:
    """How many values of a tensor of any shape are NaN or Inf; a `BlockTensor` is decoded only if it can hold any."""
    if not isinstance(values, BlockTensor):
        pieces = values.flatten().split(_PIECE)
        return sum(int((~piece.isfinite()).sum()) for piece in pieces if not piece.float().sum().isfinite())
    return 0 if _is_finite(values) else sum(not_finite(_values(part)) for part in _slices(values))


def _is_finite(q: BlockTensor) -> bool:
    """Whether no code is NaN or Inf, nor what the largest scale makes of the largest code."""
    element, one = q.format.element, torch.ones(())
    if not q.scales.numel():
        return True
    factor = DECODE_ORDERS[q.recipe.decode_order](
        decode(q.scales.amax(), q.format.scale), one if q.tensor_scale is None else q.tensor_scale
    )
    if not (factor * (element.largest_multiple * element.quantum)).isfinite().all():
        return False
    if element.specials == "none":
        return True
    pieces = q.packed.flatten().split(_PIECE)  # with specials a code is a byte
    return all((piece & (element.sign_mask - 1)).amax() <= element.max_code for piece in pieces)


def _slices(q: BlockTensor) -> Iterator[BlockTensor]:
    """Parts of the first axis, of no more elements than are decoded at a time, or one index each."""
    rows = max(1, _DECODED * q.shape[0] // max(q.shape.numel(), 1))
    return (q[start : start + rows] for start in range(0, q.shape[0], rows))


def dead_blocks(q: BlockTensor) -> int:
    """Blocks whose scale is zero, and whose codes are not."""
    zero = q.scales == 0
    if not q.format.scale.zero or not zero.any():
        return 0
    masks = _masks(q.format).view(torch.uint8)
    packed = torch.nn.functional.pad(q.packed, (0, -q.packed.shape[-1] % len(masks)))
    return int((packed.unflatten(-1, (-1, len(masks)))[zero] & masks).any(-1).sum())


def _outside(a: torch.Tensor, b: torch.Tensor, q: BlockTensor, spoiled: bool) -> int:
    """Blocks of `a` that `q`, which decodes to `b`, cannot hold; those where that can be are looked at one by one.

    `spoiled`: whether `a` holds NaN or Inf. The others of such a block count if they became zeros, or were cut to less than
    half: no rule of scales is off by a power of two.
    """
    format, suspects = q.format, torch.ones_like(q.scales, dtype=torch.bool) if spoiled else _suspects(q)
    if suspects is None:
        return 0
    blocks = (torch.nn.functional.pad(x, (0, -x.shape[-1] % format.block_size)) for x in (a, b))
    a, b = (x.unflatten(-1, (-1, format.block_size))[suspects].double().abs() for x in blocks)
    odd = ~a.isfinite() if spoiled else torch.zeros_like(a, dtype=torch.bool)
    given, kept = (x.masked_fill(odd, 0.0).amax(-1) for x in (a, b))
    half_step = (format.element.max - format.element.positive[-2]) / 2
    saturated = given * format.element.max > kept * (format.element.max + half_step)
    lost = (kept == 0) | ((q.scales[suspects] == format.scale.max_code) & saturated) | (odd.any(-1) & (given > 2 * kept))
    return int(((given > 0) & lost).sum())


def _suspects(q: BlockTensor) -> torch.Tensor | None:
    """Which blocks may lie outside, None if none: those whose scale is at an end of its range or whose codes are all zeros,
    and every one where the least product of element, scale and tensor scale is no float32 value."""
    element, scale, given = q.format.element, q.format.scale, q.tensor_scale
    if given is not None:
        least = [min(filter(None, each.positive)) for each in (scale, element)]
        if (DECODE_ORDERS[q.recipe.decode_order](torch.tensor(least[0]), given) * least[1] == 0).any():
            return torch.ones_like(q.scales, dtype=torch.bool)
    masks, packed = _masks(q.format), q.packed
    if q.length % q.format.block_size:
        packed = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % (8 * len(masks))))
    words = packed.view(torch.int64) & masks.repeat(q.scales.shape[-1])
    least, largest = q.scales.aminmax()
    if least > 0 and largest < scale.max_code and words.count_nonzero() == words.numel():
        return None  # a block of zeros would have a word of them
    at_end = (q.scales == 0) | (q.scales == scale.max_code)
    return at_end | (words.unflatten(-1, (-1, len(masks))) == 0).all(-1)


@functools.cache
def _masks(format: BlockFormat) -> torch.Tensor:
    """The bits of a packed block that are no signs, as int64 `[bytes / 8]`."""
    magnitudes = torch.full((format.block_size,), format.element.sign_mask - 1, dtype=torch.uint8)
    return pack_codes(magnitudes, format.element.bits).view(torch.int64)


def turned(parts: Sequence[BlockTensor], recipe: Recipe) -> list[BlockTensor]:
    """Matrices as `recipe` decodes them: codes and block scales kept, tensor scales in its direction.

    A reciprocal seldom decodes to the same float32 values. Of its neighbours the one is taken with which the fewest
    blocks decode differently, for all `parts` that share a tensor scale; those are scalars where directions differ.
    """
    if recipe.tensor_scale_direction == parts[0].recipe.tensor_scale_direction:
        return [_as(q, recipe, q.tensor_scale) for q in parts]
    scales = {}
    for q in parts:
        scales.setdefault(q.tensor_scale.item(), []).append(q)
    turned_scales = {scale: _turn(sharing, recipe) for scale, sharing in scales.items()}
    return [_as(q, recipe, turned_scales[q.tensor_scale.item()]) for q in parts]


def _turn(parts: Sequence[BlockTensor], recipe: Recipe) -> torch.Tensor:
    format, given = parts[0].format, parts[0].tensor_scale
    counts = sum(torch.bincount(q.scales.flatten().long(), minlength=format.scale.code_count) for q in parts)
    counts[format.scale.nan_code] = 0
    present = counts.nonzero().flatten()
    counts, scales = counts[present], decode(present.to(torch.uint8), format.scale)
    expected = DECODE_ORDERS[parts[0].recipe.decode_order](scales, given)
    found = []
    for candidate in _neighbours(reciprocal(given)):
        if abs(candidate.double() * given.double() - 1) > (_NEIGHBOURS + 0.5) * _WIDEST_STEP:
            continue  # the nearest to a reciprocal beyond float32
        decoded = DECODE_ORDERS[recipe.decode_order](scales, candidate)
        error = (decoded.double() - expected.double()).abs().sum().item()
        found.append((int(counts[decoded != expected].sum()), error, candidate))
    if not found:
        raise ValueError(f"tensor scale {given.item()!r} has no float32 reciprocal")
    return min(found, key=lambda entry: entry[:2])[2]


def _neighbours(x: torch.Tensor) -> list[torch.Tensor]:
    """A positive float32 scalar and the values around it, nearest first; those that are finite and positive."""
    found, below, above = [x], x, x
    for _ in range(_NEIGHBOURS):
        below, above = torch.nextafter(below, torch.zeros(())), torch.nextafter(above, torch.full((), torch.inf))
        found += [below, above]
    return [value for value in found if 0 < value < torch.inf]


def _as(q: BlockTensor, recipe: Recipe, tensor_scale: torch.Tensor | None) -> BlockTensor:
    return BlockTensor.trusted(q.packed, q.length, q.scales, tensor_scale, q.format, recipe, q.axis)


def can_keep_codes(source: BlockFormat, target: BlockFormat) -> bool:
    """Whether `keep_codes` gets from one format to the other."""
    return (
        source.element == target.element
        and source.scale.is_power_of_two
        and target.tensor_scale
        and source.block_size % target.block_size == 0
    )


def keep_codes(parts: Sequence[BlockTensor], format: BlockFormat, recipe: Recipe) -> tuple[list[BlockTensor], list[int]]:
    """Power-of-two scales as scales of `format` times one power of two, which is the tensor scale of all `parts`.

    The largest scale in use goes to the largest power of two that a scale of `format` is, so that every code is kept in
    blocks up to its range below; those further below get its smallest scale, their codes rounded to it. Returns the
    matrices and how many blocks of each lie below. Blocks of zeros take the scale 0.
    """
    powers = [frexp(value)[1] - 1 for value in format.scale.positive if frexp(value)[0] == 0.5]
    lowest, highest = min(powers), max(powers)
    exponents, used = [], []
    for q in parts:
        blocks = torch.nn.functional.pad(q.codes & ~q.format.element.sign_mask, (0, -q.length % q.format.block_size))
        nonzero = blocks.unflatten(-1, (-1, q.format.block_size)).amax(-1) > 0
        exponents.append(q.scales.int() - q.format.scale.bias)
        used.append(nonzero & (q.scales != q.format.scale.nan_code))
    tops = [int(exponent[use].amax()) for exponent, use in zip(exponents, used) if use.any()]
    shift = max(max(tops, default=0) - highest, -(q.format.scale.bias - 1))
    multiplies = recipe.tensor_scale_direction == "multiply"
    tensor_scale = torch.tensor(2.0 ** (shift if multiplies else -shift), dtype=torch.float32)
    result, below = [], []
    for q, exponent, use in zip(parts, exponents, used):
        exponent = exponent - shift
        low = use & (exponent < lowest)
        scales = encode(ldexp(torch.ones(()), exponent.clamp(lowest, highest)), format.scale)
        scales = scales.where(use, 0).masked_fill(q.scales == q.format.scale.nan_code, format.scale.nan_code)
        repeats = q.format.block_size // format.block_size
        scales = scales.repeat_interleave(repeats, -1)[..., : -(-q.length // format.block_size)]
        codes = q.codes
        if low.any():
            factor = ldexp(torch.ones(()), (exponent - lowest).where(low, 0))
            factor = factor.repeat_interleave(q.format.block_size, -1)[..., : q.length]
            codes = encode(decode(codes, q.format.element) * factor, q.format.element)
        result.append(BlockTensor.from_codes(codes, scales.contiguous(), tensor_scale, format, recipe, q.axis))
        below.append(int(low.sum()))
    return result, below


def quantize_together(parts: Sequence[Matrix], format: BlockFormat, recipe: Recipe) -> list[BlockTensor]:
    """Matrices `[N_i, K]`, quantized anew; where `format` has a tensor scale they share one."""
    dense = [_values(part) if isinstance(part, BlockTensor) else part for part in parts]
    if not format.tensor_scale or len(dense) == 1:
        return [quantize(x, format, recipe=recipe) for x in dense]
    together, result, start = quantize(torch.cat(dense), format, recipe=recipe), [], 0
    for x in dense:
        result.append(together[start : start + x.shape[0]])
        start += x.shape[0]
    return result
