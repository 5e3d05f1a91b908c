"""Activations as numpy float32 steps: each line below is one IEEE 754 operation an element, in the contract's order."""

import numpy as np

from oracles.rationals import float32_from_bits

F = np.float32
LOG2E, C1, C2, P0, P1, P2, P3, P4 = (
    F(v)
    for v in float32_from_bits(
        [0x3FB8AA3B, 0x3F318000, 0xB95E8083, 0x3EFFFFFE, 0x3E2AAA49, 0x3D2AAC55, 0x3C091CB6, 0x3AB52914]
    )
)


def _power_of_two(k: np.ndarray) -> np.ndarray:
    return np.ldexp(F(1), k).astype(F)


def quiet(function):
    def call(*args, **kwargs):
        with np.errstate(all="ignore"):
            return function(*args, **kwargs).astype(F)

    return call


@quiet
def exp(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, dtype=F)
    nan = np.isnan(x)
    z = np.where(x < F(-104), F(-104), np.where(x > F(89), F(89), x)).astype(F)
    z = np.where(nan, F(0), z)
    n = np.floor(z * LOG2E + F(0.5))
    r = (z - n * C1) - n * C2
    p = P4 * r
    for coefficient in (P3, P2, P1):
        p = (p + coefficient) * r
    p = p + P0
    y = ((r * r) * p + r) + F(1)
    k = n.astype(np.int32)
    k1 = k >> 1
    return np.where(nan, F(np.nan), (y * _power_of_two(k1)) * _power_of_two(k - k1))


@quiet
def sigmoid(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, dtype=F)
    e = exp(-np.abs(x))
    return np.where(x < 0, e, F(1)) / (F(1) + e)


@quiet
def silu(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, dtype=F) * sigmoid(x)


@quiet
def swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return silu(gate) * np.asarray(up, dtype=F)


@quiet
def swiglu_oai(gate: np.ndarray, up: np.ndarray, alpha: float = 1.702, limit: float = 7.0) -> np.ndarray:
    gate, up = np.asarray(gate, dtype=F), np.asarray(up, dtype=F)
    g = np.where(gate > F(limit), F(limit), gate)  # compares let NaN through
    u = np.where(up > F(limit), F(limit), np.where(up < F(-limit), F(-limit), up))
    return (g * sigmoid(g * F(alpha))) * (u + F(1))


@quiet
def gelu_tanh(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, dtype=F)
    return x * sigmoid((((x * x) * x) * F(0.044715) + x) * F(1.5957691))


@quiet
def relu2(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, dtype=F)
    r = np.where(x > 0, x, np.where(np.isnan(x), x, F(0)))
    return r * r
