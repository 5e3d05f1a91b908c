"""Block dots and matmuls: exact Python integers inside a block, numpy float32 additions across blocks."""

import math
from dataclasses import dataclass, field

import numpy as np

from oracles.elements import ELEMENTS, Element, decode, decode_float64, decode_integers, quantum
from oracles.rationals import BINARIES, FP32, round_float64, round_fraction

F = np.float32


@dataclass(frozen=True)
class Operand:
    """[R, K] codes in blocks of `block` along K; `tensor_scale` is None or broadcasts to [R, 1]."""

    codes: np.ndarray
    scales: np.ndarray
    element: Element
    scale_element: Element
    block: int
    tensor_scale: np.ndarray | None = field(default=None)
    direction: str = "multiply"

    @property
    def power_of_two_scales(self) -> bool:
        return self.scale_element.mantissa_bits == 0

    def row_scale(self) -> np.ndarray | None:
        """float32 [R], the multiplier of each row, or None."""
        if self.tensor_scale is None:
            return None
        scale = np.broadcast_to(np.asarray(self.tensor_scale, F).reshape(-1, 1), (len(self.codes), 1))[:, 0]
        with np.errstate(all="ignore"):
            return F(1) / scale if self.direction == "divide" else scale

    def decoded(self, dtype: str) -> np.ndarray:
        """The values, all scales included, as numbers of `dtype` held in float64."""
        scales = decode_float64(self.scales, self.scale_element)
        if self.tensor_scale is not None:
            given = np.broadcast_to(np.asarray(self.tensor_scale, F).reshape(-1, 1), scales.shape)
            with np.errstate(all="ignore"):
                scales = scales.astype(F) * given if self.direction == "multiply" else scales.astype(F) / given
        wide = np.repeat(scales.astype(np.float64), self.block, axis=-1)[:, : self.codes.shape[1]]
        with np.errstate(all="ignore"):
            return round_float64(decode_float64(self.codes, self.element) * wide, BINARIES[dtype])


def block_dot(a: np.ndarray, b: np.ndarray, a_element: Element, b_element: Element) -> np.ndarray:
    """[M, n] x [N, n] codes -> float32 [M, N]: the exact sum of products rounded once; IEEE rules for Inf and NaN."""
    unit = quantum(a_element) * quantum(b_element)
    sums = decode_integers(a, a_element) @ decode_integers(b, b_element).T if a.shape[1] else np.zeros((len(a), len(b)), int)
    out = np.empty((len(a), len(b)), F)
    finite = [[math.isfinite(decode(int(c), e)) for c in range(1 << e.bits)] for e in (a_element, b_element)]
    plain = np.array(finite[0])[a].all() and np.array(finite[1])[b].all()
    for m in range(len(a)):
        for n in range(len(b)):
            exceptional = None if plain else _exceptional(a[m], b[n], a_element, b_element)
            out[m, n] = round_fraction(int(sums[m, n]) * unit, FP32) if exceptional is None else exceptional
    return out


def _exceptional(a, b, a_element: Element, b_element: Element) -> float | None:
    """NaN or an infinity if the IEEE 754 sum of products is one, else None."""
    infinities = set()
    for x, y in zip(decode_float64(a, a_element), decode_float64(b, b_element)):
        if math.isnan(x) or math.isnan(y) or (math.isinf(x) and y == 0) or (math.isinf(y) and x == 0):
            return math.nan
        if math.isinf(x) or math.isinf(y):
            infinities.add(math.copysign(math.inf, x) * math.copysign(1, y))
    if len(infinities) == 2:
        return math.nan
    return infinities.pop() if infinities else None


def blockwise_accumulator(a: Operand, b: Operand) -> np.ndarray:
    """float32 [M, N]: from +0, for each of the smaller blocks ascending, one addition of the scaled dot."""
    step = min(a.block, b.block)
    acc = np.zeros((len(a.codes), len(b.codes)), F)
    k = a.codes.shape[1]
    with np.errstate(all="ignore"):
        for start in range(0, k, step):
            part = slice(start, min(start + step, k))
            term = block_dot(a.codes[:, part], b.codes[:, part], a.element, b.element)
            exponent = np.zeros(term.shape, dtype=int)
            nan = np.zeros(term.shape, dtype=bool)
            for operand, axis in ((a, 1), (b, 0)):
                codes = operand.scales[:, start // operand.block]
                values = decode_float64(codes, operand.scale_element)
                if operand.power_of_two_scales:
                    nan |= np.expand_dims(np.isnan(values), axis)
                    exponent = exponent + np.expand_dims(
                        np.where(np.isnan(values), 0, np.frexp(np.where(np.isnan(values), 1.0, values))[1] - 1), axis
                    )
                else:
                    term = term * np.expand_dims(values.astype(F), axis)
            half = exponent >> 1
            term = (term * np.ldexp(F(1), half).astype(F)) * np.ldexp(F(1), exponent - half).astype(F)
            acc = acc + np.where(nan, F(np.nan), term)
    return acc


def blockwise(a: Operand, b: Operand, bias: np.ndarray | None = None) -> np.ndarray:
    """float32 [M, N] before the last rounding: RN(alpha * acc), + bias."""
    y = blockwise_accumulator(a, b)
    ga, gb = a.row_scale(), b.row_scale()
    with np.errstate(all="ignore"):
        if ga is not None and gb is not None:
            y = (ga[:, None] * gb[None, :]) * y
        elif ga is not None or gb is not None:
            y = (ga[:, None] if ga is not None else gb[None, :]) * y
        return y if bias is None else y + np.asarray(bias, F)


def dequantized(a: np.ndarray, b: np.ndarray, block: int, bias: np.ndarray | None = None) -> np.ndarray:
    """float32 [M, N]: per block an ascending float64 chain of products, rounded to float32, added to the accumulator."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    acc = np.zeros((len(a), len(b)), F)
    with np.errstate(all="ignore"):
        for start in range(0, a.shape[1], block):
            chain = np.zeros(acc.shape, np.float64)
            for i in range(start, min(start + block, a.shape[1])):
                chain = chain + a[:, i, None] * b[None, :, i]
            acc = acc + chain.astype(F)
        return acc if bias is None else acc + np.asarray(bias, F)


FORMATS = {  # block format: element, scale, block
    "mxfp4": ("e2m1", "e8m0", 32),
    "mxfp6_e2m3": ("e2m3", "e8m0", 32),
    "mxfp6_e3m2": ("e3m2", "e8m0", 32),
    "mxfp8_e4m3": ("e4m3", "e8m0", 32),
    "mxfp8_e5m2": ("e5m2", "e8m0", 32),
    "mxint8": ("int8", "e8m0", 32),
    "nvfp4": ("e2m1", "e4m3", 16),
}


def operand(format: str, codes, scales, tensor_scale=None, direction: str = "multiply") -> Operand:
    element, scale, block = FORMATS[format]
    return Operand(codes, scales, ELEMENTS[element], ELEMENTS[scale], block, tensor_scale, direction)
