"""Divisions without a branch against Triton's, which are IEEE 754's: of some numbers in the interpreter, of all on a GPU."""

import torch
import triton
import triton.language as tl

from accel.triton._activations import quotient_by_sum
from accel.triton._tiles import float_of, reciprocal

INF = 0x7F800000
TILE = 1 << 14


@triton.jit
def divide_kernel(patterns_ptr, first, out_ptr, TILE: tl.constexpr):
    """Count numbers whose 1 / x, or up to 2^32 also 1 / (1 + e) or e / (1 + e) of e = x * 2^-32, are not Triton's."""
    index = tl.program_id(0) * TILE + tl.arange(0, TILE)
    x = float_of(first + index if patterns_ptr is None else tl.load(patterns_ptr + index))
    one, scaled = tl.full(x.shape, 1.0, tl.float32), tl.minimum(x, 2.0**32)
    e = scaled * 2.0**-32
    differ = reciprocal(x).to(tl.int32, bitcast=True) != tl.div_rn(one, x).to(tl.int32, bitcast=True)
    differ |= quotient_by_sum(one, scaled).to(tl.int32, bitcast=True) != tl.div_rn(one, 1.0 + e).to(tl.int32, bitcast=True)
    differ |= quotient_by_sum(e, scaled).to(tl.int32, bitcast=True) != tl.div_rn(e, 1.0 + e).to(tl.int32, bitcast=True)
    tl.atomic_add(out_ptr, tl.sum(differ.to(tl.int32), axis=0))


def chosen() -> torch.Tensor:
    """Patterns of numbers from 0 to Inf: of each exponent the first and last significands, and some between."""
    ends = torch.arange(64)
    between = torch.randint(0, 1 << 23, (384,), generator=torch.Generator().manual_seed(0))
    significands = torch.cat([ends, (1 << 23) - 1 - ends, between])
    patterns = (torch.arange(255)[:, None] << 23) + significands[None, :]
    return torch.cat([patterns.reshape(-1), torch.full((TILE,), INF)]).to(torch.int32)


def differences(device: str) -> int:
    found = torch.zeros(1, dtype=torch.int32, device=device)
    if device == "cpu":
        patterns = chosen()
        patterns = patterns[: patterns.numel() // TILE * TILE]
        divide_kernel[(patterns.numel() // TILE,)](patterns, 0, found, TILE=TILE)
    else:
        for first in range(0, INF, 1 << 30):
            count = min(1 << 30, INF - first)
            divide_kernel[(count // 1024,)](None, first, found, TILE=1024, enable_fp_fusion=False)
    return int(found)
