"""Reads the compact golden archives of `tests/data`: outputs of other projects' quantizers, stored as raw bits."""

import functools
import io
import lzma
from pathlib import Path

import numpy as np
import torch

DATA = Path(__file__).parent / "data"
DTYPES = {"float32": (torch.float32, np.int32), "bfloat16": (torch.bfloat16, np.int16), "float16": (torch.float16, np.int16)}


@functools.cache
def load(name: str) -> dict[str, torch.Tensor]:
    """Every tensor of `golden_<name>.npz.xz` by key."""
    archive = np.load(io.BytesIO(lzma.decompress((DATA / f"golden_{name}.npz.xz").read_bytes())))
    out = {}
    for stored in archive.files:
        key, dtype = stored.rsplit(":", 1)
        bits = archive[stored]
        out[key] = (
            torch.from_numpy(bits)
            if dtype == "uint8"
            else torch.from_numpy(bits.view(DTYPES[dtype][1])).view(DTYPES[dtype][0])
        )
    return out


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, the first in the low nibble."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
