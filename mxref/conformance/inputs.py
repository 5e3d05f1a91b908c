"""The values that tell right from wrong: every pattern where there are few, turning points, binades, and shapes."""

import math
from functools import lru_cache

import torch

from mxref.formats import BlockFormat, ElementFormat

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TILE = (4096, 256)  # what is repeated on a device to more than 2^31 elements
TILE_ELEMENTS = math.prod(TILE)
LONG_ROW = 8192  # elements: several programs of a kernel
POISON_BYTE = 0xAB


def every_pattern(dtype: torch.dtype) -> torch.Tensor:
    """All 65,536 values of a 16-bit dtype."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)


@lru_cache(maxsize=4)
def every_gate(dtype: torch.dtype, gate_up: str) -> torch.Tensor:
    """Rows of gates, all 65,536 values of a 16-bit dtype in order, and ups that bring their products near 1: so every format
    tells one gate from the next. A row is long enough to be the work of several programs."""
    gate = every_pattern(dtype).reshape(-1, LONG_ROW)
    _, exponent = torch.frexp(gate.float().nan_to_num(1.0, 1.0, 1.0))
    limit = -math.frexp(torch.finfo(dtype).smallest_normal)[1]
    up = torch.ldexp(torch.ones_like(gate), -exponent.clamp(-limit, limit)).to(dtype)
    return torch.stack((gate, up), -1).flatten(-2) if gate_up == "interleaved" else torch.cat((gate, up), -1)


def random_patterns(count: int, seed: int) -> torch.Tensor:
    """Random float32 bit patterns: every exponent alike, NaN and Inf among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32).view(torch.float32)


@lru_cache(maxsize=64)
def spread_normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers of mixed magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * torch.exp(2 * torch.randn(shape, generator=generator))).to(dtype)


@lru_cache(maxsize=32)
def turning_points(element: ElementFormat) -> torch.Tensor:
    """Every value and midpoint of an element format, with its float32 neighbours, both signs, and the specials."""
    values = torch.tensor([*element.positive, *element.midpoints, 2 * element.max, math.inf, math.nan, 2.0**-149])
    near = torch.cat([values, values.nextafter(torch.tensor(0.0)), values.nextafter(torch.tensor(math.inf))])
    return torch.cat([near, -near])


@lru_cache(maxsize=32)
def binades(format: BlockFormat) -> torch.Tensor:
    """Float32 blocks, one a row: amax just below, at and above every power of two and every significand at which a scale
    rule turns; the other elements are turning points of the element, scaled along."""
    element, size = format.element, format.block_size
    starts = torch.tensor([1.0, element.max / 2.0**element.emax, 1.5, 2 - 2.0 ** -(element.mantissa_bits + 1)])
    starts = torch.cat([starts, starts.nextafter(torch.tensor(0.0)), starts.nextafter(torch.tensor(4.0))])
    points = turning_points(element)
    points = points[points.isfinite()]
    exponents = torch.arange(-149, 128)
    amax = torch.ldexp(starts.double(), exponents[:, None].double()).float().flatten()
    picks = torch.randint(len(points), (len(amax), size), generator=torch.Generator().manual_seed(size))
    unit = torch.ldexp(torch.ones((), dtype=torch.float64), exponents.double() - element.emax).repeat_interleave(len(starts))
    rows = (points[picks].double() * unit[:, None]).float()
    rows = torch.where(rows.abs() > amax[:, None], amax[:, None], rows)
    rows[torch.arange(len(amax)), torch.arange(len(amax)) % size] = amax
    return rows


@lru_cache(maxsize=32)
def every_scale(format: BlockFormat, tensor_scale: float = 1.0) -> torch.Tensor:
    """Float32 blocks, one a row: every turning point of the element under every scale s that the default recipe can choose.

    They are every value and midpoint times s * `tensor_scale`, the float32 neighbours and both signs; with power-of-two
    scales, where it leaves s as it is, the midpoint beyond the largest value too. The last element of a block, the largest
    value times s * `tensor_scale`, makes the recipe choose s.
    """
    element, scale = format.element, format.scale
    scales = torch.tensor([s for s in scale.positive if 0 < s], dtype=torch.float64) * tensor_scale
    scales = scales[scales * element.max <= torch.finfo(torch.float32).max]
    points = [*element.positive, *element.midpoints]
    if scale.is_power_of_two:
        points.append(element.max + (element.max - element.positive[-2]) / 2)
    middle = (scales[:, None] * torch.tensor(points, dtype=torch.float64)).float()
    near = torch.cat([middle, middle.nextafter(torch.tensor(0.0)), middle.nextafter(torch.tensor(math.inf))], dim=1)
    near = torch.cat([near, -near], dim=1)
    near = torch.nn.functional.pad(near, (0, -near.shape[1] % (format.block_size - 1)))
    near = near.reshape(len(scales), -1, format.block_size - 1)
    largest = (scales * element.max).float()[:, None, None].expand(-1, near.shape[1], 1)
    return torch.cat([near, largest], dim=2).flatten(0, 1)


@lru_cache(maxsize=32)
def scale_turns(format: BlockFormat, tensor_scale: float) -> torch.Tensor:
    """Float32 blocks, one a row, whose amax over the element's largest value and `tensor_scale` lies at, and up to four
    float32 steps beside, every midpoint of a scale format with a mantissa: where orders of operations part."""
    middle = torch.tensor(format.scale.midpoints, dtype=torch.float64) * format.element.max * tensor_scale
    steps = torch.arange(-4, 5, dtype=torch.int32)
    amax = (middle.float().view(torch.int32)[:, None] + steps).flatten().view(torch.float32)
    rows = amax[:, None] * torch.linspace(-1, 1, format.block_size)
    rows[:, -1] = amax
    return rows


def layouts(signed: bool = True) -> dict[str, torch.Tensor]:
    """Numbers that lie as few do: without axes, or along five; at one place many times; in a run that begins between words;
    negated as they are read."""
    x = spread_normal(2, 3, 1, 5, 40, seed=84)
    x = x if signed else x.abs()
    return {
        "no_axes": x[0, 0, 0, 0, 0],
        "five_axes": x,
        "expanded": x.flatten()[:77].expand(5, 77),
        "odd_offset": x.flatten().bfloat16()[1:321].reshape(5, 64),
        "negated": torch._neg_view(-x.flatten()[:273].reshape(7, 39)),
    }


def special_blocks(size: int) -> torch.Tensor:
    """Float32 blocks, one a row: zeros of both signs, one-hot, subnormals, NaN and Inf, alone and together."""
    rows = torch.zeros(12, size)
    rows[1] = -0.0
    rows[2, size // 2] = 3.0
    rows[3] = 2.0**-149
    rows[4] = -(2.0**-130)
    rows[5, 0] = math.nan
    rows[6, -1] = math.inf
    rows[7, 0], rows[7, -1] = -math.inf, math.nan
    rows[8] = math.inf
    rows[9] = 1.0
    rows[9, 1::2] = -0.0
    rows[10] = torch.finfo(torch.float32).max
    rows[11, 0] = 1e-30
    return rows


@lru_cache(maxsize=4)
def tile(dtype: torch.dtype) -> torch.Tensor:
    """Whole rows that are repeated."""
    return spread_normal(*TILE, seed=24, dtype=dtype)


def poison(count: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Values that no kernel should read: NaN, or bytes of `POISON_BYTE`."""
    if dtype.is_floating_point:
        return torch.full((count,), math.nan, dtype=dtype, device=device)
    return torch.full((count * dtype.itemsize,), POISON_BYTE, dtype=torch.uint8, device=device).view(dtype)


def in_poison(x: torch.Tensor) -> torch.Tensor:
    """The same matrix as a view of a larger one that holds poison: whole rows between its own, columns on both sides."""
    rows, columns = x.shape
    larger = poison((2 * rows + 1) * (columns + 9), x.dtype).reshape(2 * rows + 1, columns + 9)
    return larger[1::2, 3 : 3 + columns].copy_(x)
