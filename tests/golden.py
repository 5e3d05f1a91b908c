"""Reads the compact golden archives of `tests/data`: outputs of other projects' quantizers, stored as raw bits.

    python tests/golden.py FOLDER

packs a folder of producers' recordings into `tests/data/golden_producers.npz.xz`: all of it but element anchors that the
archive holds already and the input of every bfloat16 pattern, which is its own description.
"""

import functools
import io
import lzma
import sys
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


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder of producers' recordings, by the keys of the archive."""
    from safetensors.torch import load_file

    out = {f"inputs/{name}": tensor for name, tensor in load_file(folder / "inputs.safetensors").items()}
    for path in (*sorted(folder.glob("mx_*.safetensors")), folder / "nvfp4.safetensors"):
        out |= {f"{path.stem.removeprefix('mx_')}/{name}": tensor for name, tensor in load_file(path).items()}
    return out


def store(name: str, tensors: dict[str, torch.Tensor]) -> None:
    """Write the archive that `load` reads."""
    names = {dtype: (given, bits) for given, (dtype, bits) in DTYPES.items()}
    arrays = {}
    for key, tensor in tensors.items():
        dtype, bits = names.get(tensor.dtype, ("uint8", np.uint8))
        integers = {2: torch.int16, 4: torch.int32}.get(tensor.element_size(), torch.uint8)
        arrays[f"{key}:{dtype}"] = tensor.contiguous().view(integers).numpy().astype(bits, copy=False)
    packed = io.BytesIO()
    np.savez(packed, **arrays)
    compressed = lzma.compress(packed.getvalue(), preset=9 | lzma.PRESET_EXTREME)
    (DATA / f"golden_{name}.npz.xz").write_bytes(compressed)


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, the first in the low nibble."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


if __name__ == "__main__":
    anchors = {key: tensor for key, tensor in load("producers").items() if key.startswith("elements/")}
    given = load_folder(Path(sys.argv[1]))
    del given["inputs/all_bf16"]
    store("producers", anchors | given)
