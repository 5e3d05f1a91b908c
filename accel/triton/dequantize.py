"""`dequantize` in one pass."""

import torch

from accel._recipes import unknown_to_decode
from accel.triton._launch import DEVICES, decode_blocks, format_refusal, missing, packing_refusal
from mxref.blocks import BlockTensor
from mxref.elements import check_dtype
from mxref.registry import Kernel


def dequantize(q: BlockTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """As `mxref.dequantize`."""
    check_dtype("dtype", dtype)
    return decode_blocks(q, dtype)


def accepts(q, dtype=torch.float32) -> str | None:
    """None, or why not."""
    if not isinstance(q, BlockTensor):
        return f"q is a {type(q).__name__}"
    return unknown_to_decode(q.recipe) or format_refusal(q.format, q.recipe) or packing_refusal(q.format)


KERNEL = Kernel("dequantize", "triton", dequantize, "bitexact", DEVICES, (torch.uint8,), None, missing, accepts)
