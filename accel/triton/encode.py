"""`encode`, element by element."""

import torch

from accel._recipes import unknown_rounding
from accel.triton._constants import element_constants
from accel.triton._elementwise import encode_elements_kernel
from accel.triton._launch import DEVICES, DTYPES, element_refusal, memory, missing, run_flat
from mxref.elements import check_encode
from mxref.formats import ElementFormat, element_format
from mxref.registry import Kernel

CONSTANTS = ("MANTISSA", "LOWEST", "MAX", "MAX_CODE", "SIGN_SHIFT", "INTEGER", "INF_CODE", "NAN_CODE")


def encode(
    x: torch.Tensor,
    element: str | ElementFormat,
    *,
    rounding: str = "nearest_even",
    overflow: str = "saturate",
    seed: int | None = None,
) -> torch.Tensor:
    """As `mxref.encode`."""
    element = check_encode(x, element, rounding, overflow, seed)
    x = x.detach().resolve_neg().contiguous()
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    constants = {name: value for name, value in element_constants(element).items() if name in CONSTANTS}
    run_flat(
        encode_elements_kernel, x, memory(x), codes, seed or 0, ROUNDING=rounding, SPECIAL=overflow == "special", **constants
    )
    return codes


def accepts(x, element, *, rounding="nearest_even", **others) -> str | None:
    """None, or why not."""
    element = element_format(element)
    if not (element.signed and element.zero):
        return f"{element.name} is a scale format"
    return element_refusal(element) or unknown_rounding(rounding)


KERNEL = Kernel("encode", "triton", encode, "bitexact", DEVICES, DTYPES, None, missing, accepts)
