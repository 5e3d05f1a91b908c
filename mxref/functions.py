"""Activations as fixed lists of float32 operations.

Library exponentials differ between devices, vector widths and versions; these do not, because each
is a stated sequence of additions, multiplications and divisions, every one rounded to nearest even.
Accuracy against exact values: exp 0.99 ulp, sigmoid 2.4 ulp, silu 3.2 ulp for x >= -87
(below, sigmoid is subnormal); bfloat16(silu) is the correctly rounded value for every finite bfloat16.

All functions take float32, bfloat16 or float16 of any shape, compute in float32 and round once to
the input's dtype. NaN gives the canonical NaN. They raise TypeError for other dtypes.
"""

import numpy as np
import torch

from mxref.elements import canonical, check_float, ldexp
from mxref.formats import FLOAT_MAX, check_number
from mxref.registry import op


def _constant(bits: int) -> float:
    return float(np.uint32(bits).view(np.float32))


_LOG2_E = _constant(0x3FB8AA3B)
_LN2_HIGH = _constant(0x3F318000)  # 355/512: n * 355/512 is exact for every n that occurs
_LN2_LOW = _constant(0xB95E8083)
_POLYNOMIAL = tuple(_constant(bits) for bits in (0x3AB52914, 0x3C091CB6, 0x3D2AAC55, 0x3E2AAA49, 0x3EFFFFFE))
_EXP_LOWEST, _EXP_HIGHEST = -104.0, 89.0  # beyond these exp is 0 and Inf


def _exp(x: torch.Tensor) -> torch.Tensor:
    clamped = torch.where(x < _EXP_LOWEST, _EXP_LOWEST, x)
    clamped = torch.where(clamped > _EXP_HIGHEST, _EXP_HIGHEST, clamped)
    clamped = torch.where(x.isnan(), 0.0, clamped)
    n = (clamped * _LOG2_E + 0.5).floor()
    r = (clamped - n * _LN2_HIGH) - n * _LN2_LOW
    p = torch.full_like(r, _POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        p = p * r + coefficient
    y = ((r * r) * p + r) + 1.0
    return torch.where(x.isnan(), x, ldexp(y, n.int()))


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    e = _exp(torch.where(x < 0, x, -x))  # -|x|, with the derivative of -x at 0
    return torch.where(x < 0, e, 1.0) / (1.0 + e)


def check_alike(**arguments: torch.Tensor) -> None:
    """Raise unless all are float32, bfloat16 or float16 of one dtype and shape, on one device."""
    for name, x in arguments.items():
        check_float(name, x)
    kinds = {name: f"{x.dtype} {list(x.shape)} on {x.device}" for name, x in arguments.items()}
    first, *others = kinds
    for name in others:
        if kinds[name] != kinds[first]:
            raise ValueError(f"{name} is {kinds[name]}: expected {first}'s {kinds[first]}")


def _widen(**arguments: torch.Tensor) -> list[torch.Tensor]:
    check_alike(**arguments)
    return [x.float() for x in arguments.values()]


@op
def exp(x: torch.Tensor) -> torch.Tensor:
    """e^x: base-2 range reduction, a polynomial of degree 4 in the remainder, two exact power-of-two products.

    >>> exp(torch.tensor([0.0, 1.0, -200.0])).tolist()
    [1.0, 2.7182817459106445, 0.0]
    """
    (wide,) = _widen(x=x)
    return canonical(_exp(wide).to(x.dtype))


@op
def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + e^-x), as (x < 0 ? e : 1) / (1 + e) with e = exp(-|x|).

    >>> sigmoid(torch.tensor([0.0, -200.0])).tolist()
    [0.5, 0.0]
    """
    (wide,) = _widen(x=x)
    return canonical(_sigmoid(wide).to(x.dtype))


@op
def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x). silu(-Inf) is NaN.

    >>> silu(torch.tensor([0.0, 20.0])).tolist()
    [0.0, 20.0]
    """
    (wide,) = _widen(x=x)
    return canonical((wide * _sigmoid(wide)).to(x.dtype))


@op
def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """The tanh form of GELU, as x * sigmoid((x^3 * 0.044715 + x) * 1.5957691).

    >>> gelu_tanh(torch.tensor([0.0, 10.0])).tolist()
    [0.0, 10.0]
    """
    (wide,) = _widen(x=x)
    inner = ((wide * wide) * wide) * 0.044715 + wide
    return canonical((wide * _sigmoid(inner * 1.5957691)).to(x.dtype))


@op
def relu2(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0) squared.

    >>> relu2(torch.tensor([-1.0, 3.0])).tolist()
    [0.0, 9.0]
    """
    (wide,) = _widen(x=x)
    positive = torch.where(wide <= 0, 0.0, wide)
    return canonical((positive * positive).to(x.dtype))


@op
def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, in float32 with one rounding to the input's dtype. Shapes and dtypes must agree.

    >>> swiglu(torch.tensor([20.0]), torch.tensor([3.0])).tolist()
    [60.0]
    """
    wide_gate, wide_up = _widen(gate=gate, up=up)
    return canonical((wide_gate * _sigmoid(wide_gate) * wide_up).to(gate.dtype))


@op
def swiglu_oai(gate: torch.Tensor, up: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> torch.Tensor:
    """gpt-oss's gate: with g = min(gate, limit) and u = clamp(up, -limit, limit), (g * sigmoid(alpha * g)) * (u + 1).

    Only the upper side of the gate is clamped. Shapes and dtypes must agree. `alpha` is finite in float32; `limit` is not
    negative, and finite in float32 or Inf, which clamps nothing.

    >>> swiglu_oai(torch.tensor([8.0]), torch.tensor([9.0])).tolist()
    [55.99962615966797]
    """
    alpha, limit = check_swiglu_oai(gate, up, alpha, limit)
    g, u = gate.float(), up.float()
    g = torch.where(g > limit, limit, g)
    u = torch.where(u > limit, limit, u)
    u = torch.where(u < -limit, -limit, u)
    activated = g * _sigmoid(alpha * g)
    return canonical((activated * (u + 1.0)).to(gate.dtype))


def check_swiglu_oai(gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float) -> tuple[float, float]:
    """Check the arguments of `swiglu_oai` before anything is computed; `alpha` and `limit` as Python floats, -0 as 0."""
    check_alike(gate=gate, up=up)
    check_number("alpha", alpha, -FLOAT_MAX, FLOAT_MAX, "a number that is finite in float32")
    check_number("limit", limit, 0.0)
    if limit != torch.inf:
        check_number("limit", limit, 0.0, FLOAT_MAX, "a number >= 0 that is finite in float32, or Inf")
    return float(alpha), float(limit) + 0.0
