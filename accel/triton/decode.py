"""`decode`, element by element."""

import torch

from accel.triton._constants import element_constants
from accel.triton._elementwise import decode_elements_kernel
from accel.triton._launch import DEVICES, element_refusal, missing, run_flat
from mxref.elements import check_codes
from mxref.formats import ELEMENT_FORMATS, ElementFormat, element_format
from mxref.registry import Kernel

CONSTANTS = ("MANTISSA", "MAX", "MAX_CODE", "SIGN_SHIFT", "INTEGER", "UNBIAS", "INF_CODE")


def decode(codes: torch.Tensor, element: str | ElementFormat) -> torch.Tensor:
    """As `mxref.decode`."""
    element = element_format(element)
    check_codes("codes", codes, element)
    codes = codes.contiguous()
    out = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    constants = {name: value for name, value in element_constants(element).items() if name in CONSTANTS}
    run_flat(decode_elements_kernel, codes, codes, out, POWER_OF_TWO=element.is_power_of_two, **constants)
    return out


def accepts(codes, element) -> str | None:
    """None, or why not."""
    element = element_format(element)
    if element.is_power_of_two:
        return None if element == ELEMENT_FORMATS["e8m0"] else f"{element.name} is another power of two than e8m0"
    return element_refusal(element) if element.signed and element.zero else f"{element.name} has no sign or no zero"


KERNEL = Kernel("decode", "triton", decode, "bitexact", DEVICES, (torch.uint8,), None, missing, accepts)
