"""The activations of `mxref.functions`, element by element."""

import torch

from accel.triton._elementwise import activation_kernel
from accel.triton._launch import DEVICES, DTYPES, STORED, gate_table, memory, missing, run_flat
from mxref.functions import check_alike, check_swiglu_oai
from mxref.registry import Kernel


def _run(name: str, x: torch.Tensor, up: torch.Tensor | None = None, alpha: float = 0.0, limit: float = 0.0) -> torch.Tensor:
    x = x.detach().resolve_neg().contiguous()
    gated = up is not None
    up = up.detach().resolve_neg().contiguous() if gated else x
    out = torch.empty_like(x)
    constants = {"STORED": STORED[x.dtype], "FUNCTION": name, "GATED": gated}
    table = gate_table(name, x, alpha, limit)
    run_flat(activation_kernel, x, memory(x), memory(up), table, memory(out), alpha, limit, **constants)
    return out


def exp(x: torch.Tensor) -> torch.Tensor:
    """As `mxref.functions.exp`."""
    check_alike(x=x)
    return _run("exp", x)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """As `mxref.functions.sigmoid`."""
    check_alike(x=x)
    return _run("sigmoid", x)


def silu(x: torch.Tensor) -> torch.Tensor:
    """As `mxref.functions.silu`."""
    check_alike(x=x)
    return _run("silu", x)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """As `mxref.functions.gelu_tanh`."""
    check_alike(x=x)
    return _run("gelu_tanh", x)


def relu2(x: torch.Tensor) -> torch.Tensor:
    """As `mxref.functions.relu2`."""
    check_alike(x=x)
    return _run("relu2", x)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """As `mxref.functions.swiglu`."""
    check_alike(gate=gate, up=up)
    return _run("swiglu", gate, up)


def swiglu_oai(gate: torch.Tensor, up: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> torch.Tensor:
    """As `mxref.functions.swiglu_oai`."""
    alpha, limit = check_swiglu_oai(gate, up, alpha, limit)
    return _run("swiglu_oai", gate, up, alpha, limit)


def _kernel(function) -> Kernel:
    return Kernel(function.__name__, "triton", function, "bitexact", DEVICES, DTYPES, None, missing)


EXP, SIGMOID, SILU, GELU_TANH, RELU2 = map(_kernel, (exp, sigmoid, silu, gelu_tanh, relu2))
SWIGLU, SWIGLU_OAI = map(_kernel, (swiglu, swiglu_oai))
