"""NVFP4 in its four orders: numpy float32 steps (`nvidia`, `vllm_*`) and rationals (`exact`).

Every function works on one row of tokens cut into blocks of 16: `x` float32 [..., K], tensor amax or scale given per
call as a numpy float32 scalar, so that any tensor-scale form is a loop over these.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from oracles.elements import ELEMENTS, decode, decode_float64, encode, encode_float64
from oracles.rationals import FP32, Binary, round_float64, round_fraction

F = np.float32
FLT_MAX = np.finfo(np.float32).max
SIXTH = F(1) / F(6)
E2M1, E4M3 = ELEMENTS["e2m1"], ELEMENTS["e4m3"]
BLOCK = 16


def quiet(function):
    """Overflow, division by zero and NaN are results here, not accidents."""

    def call(*args, **kwargs):
        with np.errstate(all="ignore"):
            return function(*args, **kwargs)

    return call


@dataclass(frozen=True)
class Quantized:
    codes: np.ndarray  # uint8 [..., K]
    scales: np.ndarray  # uint8 [..., ceil(K / 16)], e4m3 bytes
    tensor_scale: np.float32


def finite_amax(x: np.ndarray) -> np.float32:
    """The largest finite magnitude; 0 where there is none."""
    magnitude = np.abs(np.asarray(x, dtype=F))
    return magnitude[np.isfinite(magnitude)].max(initial=F(0))


def in_blocks(x: np.ndarray) -> np.ndarray:
    """[..., K] -> [..., blocks, 16], the tail filled with zeros (they change neither amax nor the others)."""
    pad = -x.shape[-1] % BLOCK
    x = np.concatenate([x, np.zeros(x.shape[:-1] + (pad,), F)], axis=-1)
    return x.reshape(x.shape[:-1] + (-1, BLOCK))


def e4m3_values(codes: np.ndarray) -> np.ndarray:
    return decode_float64(codes, E4M3).astype(F)


@quiet
def nvidia_tensor_scale(amax: np.float32, scale_max: float = 448.0) -> tuple[np.float32, np.float32]:
    """(S_enc, S_dec) of a dynamic tensor scale."""
    s_enc = F(1) if amax == 0 else min(F(6 * scale_max) / F(amax), FLT_MAX)
    return s_enc, F(1) / s_enc


@quiet
def static_encode_scale(s_dec: np.float32) -> np.float32:
    """S_enc of a given multiplying tensor scale."""
    return min(F(1) / F(s_dec), FLT_MAX)


def quantize(x, order: str, *, amax=None, tensor_scale=None, inf="nan", words=None) -> Quantized:
    """`order`: nvidia | exact | vllm_torch | vllm_triton. Exactly one of `amax` (dynamic) and `tensor_scale` (given)."""
    x = np.asarray(x, dtype=F)
    blocks = in_blocks(x)
    nan = np.isnan(blocks).any(-1)
    infinite = np.isinf(blocks).any(-1)
    poisoned = nan | infinite if inf == "nan" else nan
    saturated = infinite & ~nan if inf == "saturate" else np.zeros_like(nan)
    safe = np.where((poisoned | saturated)[..., None], np.where(np.isfinite(blocks), blocks, F(0)), blocks)
    block_amax = np.abs(safe).max(-1)
    step = {"nvidia": _nvidia, "exact": _exact, "vllm_torch": _vllm_torch, "vllm_triton": _vllm_triton}[order]
    scales, codes, stored = step(safe, block_amax, saturated, amax, tensor_scale, words)
    signs = np.where(np.signbit(blocks), np.uint8(8), np.uint8(0))
    codes = np.where(np.isinf(blocks) & saturated[..., None], 7 | signs, codes)
    codes = np.where(poisoned[..., None], 0, codes).astype(np.uint8)
    scales = np.where(poisoned, 0x7F, scales).astype(np.uint8)
    flat = codes.reshape(codes.shape[:-2] + (-1,))[..., : x.shape[-1]]
    return Quantized(flat, scales, stored)


def _e4m3_of(values: np.ndarray, saturated: np.ndarray) -> np.ndarray:
    codes = encode_float64(np.minimum(values, F(448)).astype(np.float64), E4M3)
    return np.where(saturated, np.uint8(0x7E), codes)


def _codes_of(products: np.ndarray, words) -> np.ndarray:
    if words is None:
        return encode_float64(products.astype(np.float64), E2M1)
    flat = [
        encode(Fraction(float(p)) if p != 0 and np.isfinite(p) else float(p), E2M1, "stochastic", "saturate", int(w))
        for p, w in zip(products.ravel(), words.ravel())
    ]
    return np.uint8(flat).reshape(products.shape)


@quiet
def _times(blocks: np.ndarray, multiplier: np.ndarray) -> np.ndarray:
    """x * multiplier; where that is 0 * Inf or Inf * 0, x."""
    products = blocks * multiplier[..., None]
    return np.where(np.isnan(products), blocks, products)


@quiet
def _nvidia(blocks, block_amax, saturated, amax, tensor_scale, words):
    s_enc, s_dec = (
        nvidia_tensor_scale(amax) if tensor_scale is None else (static_encode_scale(tensor_scale), F(tensor_scale))
    )
    scales = _e4m3_of(block_amax * (s_enc * SIXTH), saturated)
    s_block = e4m3_values(scales)
    multiplier = np.where(s_block == 0, F(0), np.minimum(F(1) / (s_block * s_dec), FLT_MAX)).astype(F)
    return scales, _codes_of(blocks * multiplier[..., None], words), F(s_dec)


@quiet
def _vllm_torch(blocks, block_amax, saturated, amax, tensor_scale, words):
    gs = F(1) if tensor_scale is None and amax == 0 else F(2688) / F(amax) if tensor_scale is None else F(tensor_scale)
    scales = _e4m3_of(gs * (block_amax * SIXTH), saturated)
    product = e4m3_values(scales) * (F(1) / gs)
    multiplier = np.where(product == 0, F(1) / F(1e8), F(1) / product).astype(F)
    return scales, _codes_of(_times(blocks, multiplier) + F(0), words), gs  # -0 + 0 = +0


@quiet
def _vllm_triton(blocks, block_amax, saturated, amax, tensor_scale, words):
    gs = F(1) if tensor_scale is None and amax == 0 else F(2688) / F(amax) if tensor_scale is None else F(tensor_scale)
    scales = _e4m3_of(gs * (block_amax * SIXTH), saturated)
    s_block = e4m3_values(scales)
    multiplier = np.where(s_block == 0, F(0), gs / s_block).astype(F)
    return scales, _codes_of(_times(blocks, multiplier) + F(0), words), gs  # -0 + 0 = +0


@quiet
def _exact(blocks, block_amax, saturated, amax, tensor_scale, words):
    s_dec = F(tensor_scale) if tensor_scale is not None else F(1) if amax == 0 else F(amax) / F(2688)
    exact_s_dec = Fraction(float(s_dec))
    scales, codes = np.zeros(block_amax.shape, np.uint8), np.zeros(blocks.shape, np.uint8)
    for place in np.ndindex(*block_amax.shape):
        largest = Fraction(float(block_amax[place]))
        scales[place] = 0x7E if saturated[place] else encode(largest / (6 * exact_s_dec), E4M3)
        s_block = decode(int(scales[place]), E4M3)
        for i, v in enumerate(blocks[place]):
            zero = v == 0 or s_block == 0
            exact = math.copysign(0.0, v) if zero else Fraction(float(v)) / (s_block * exact_s_dec)
            word = None if words is None else int(words[place + (i,)])
            codes[place + (i,)] = encode(exact, E2M1, "nearest_even" if words is None else "stochastic", "saturate", word)
    return scales, codes, s_dec


@quiet
def dequantize(q: Quantized, direction: str = "multiply", binary: Binary = FP32) -> np.ndarray:
    """e2m1 * (s_block * S) or e2m1 * (s_block / gs): each step rounded to float32, then once to `binary`."""
    s_block = e4m3_values(q.scales)
    s_block = s_block * q.tensor_scale if direction == "multiply" else s_block / q.tensor_scale
    per_element = np.repeat(s_block, BLOCK, axis=-1)[..., : q.codes.shape[-1]].astype(np.float64)
    return round_float64(round_float64(decode_float64(q.codes, E2M1) * per_element, FP32), binary)


def four_over_six(x, amax, *, scale_max=256.0, error="mse") -> tuple[Quantized, list[str]]:
    """The `nvidia` steps with each block's maximum sent to 6 or to 4; the first candidate with the smaller error wins."""
    x = np.asarray(x, dtype=F)
    s_enc, s_dec = nvidia_tensor_scale(F(amax), scale_max)
    blocks = in_blocks(x)
    out_codes, out_scales, choice = np.zeros(blocks.shape, np.uint8), np.zeros(blocks.shape[:-1], np.uint8), []
    with np.errstate(all="ignore"):
        for place in np.ndindex(*blocks.shape[:-1]):
            block, best = blocks[place], None
            size = min(BLOCK, x.shape[-1] - place[-1] * BLOCK)
            for name, factor in (("six", F(1)), ("four", F(1.5))):
                raw = (np.abs(block).max() * (s_enc * SIXTH)) * factor
                scale = int(encode_float64(np.float64(min(raw, F(448))), E4M3))
                s_block = F(float(decode(scale, E4M3)))
                multiplier = F(0) if s_block == 0 else min(F(1) / (s_block * s_dec), FLT_MAX)
                codes = encode_float64((block * multiplier).astype(np.float64), E2M1)
                values = decode_float64(codes, E2M1).astype(F) * (s_block * s_dec)
                total = F(0)
                for v, d in zip(block[:size], values[:size]):
                    difference = v - d
                    total = total + (difference * difference if error == "mse" else abs(difference))
                if best is None or total < best[0]:
                    best = total, scale, codes, name
            out_scales[place], out_codes[place] = best[1], best[2]
            choice.append(best[3])
    return Quantized(out_codes.reshape(out_codes.shape[:-2] + (-1,))[..., : x.shape[-1]], out_scales, s_dec), choice


def decode_exact_once(code: int, scale: int, tensor_scale: np.float32, binary: Binary = FP32) -> float:
    """The exact product of code, block scale and tensor scale rounded once (no float32 step in between)."""
    value = decode(code, E2M1)
    if isinstance(value, float):
        return value
    return round_fraction(value * decode(scale, E4M3) * Fraction(float(tensor_scale)), binary)


def hadamard(x: np.ndarray, size: int, signs) -> np.ndarray:
    """Signs, then butterflies a + b, a - b in float32 at distance 1, 2, 4, ..., then times 1 / sqrt(size)."""
    x = np.asarray(x, dtype=F)
    out = (x * np.resize(F(signs), x.shape[-1])).reshape(-1, size)
    distance = 1
    while distance < size:
        step = out.copy()
        for i in range(size):
            if i & distance == 0:
                step[:, i] = out[:, i] + out[:, i + distance]
                step[:, i + distance] = out[:, i] - out[:, i + distance]
        out, distance = step, 2 * distance
    return (out * {4: F(0.5), 16: F(0.25), 64: F(0.125)}[size]).reshape(x.shape)
