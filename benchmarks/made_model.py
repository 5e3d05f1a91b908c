"""For what times checkpoints: a model in bfloat16 that is made up, and what a process has in memory at most."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from mxref.checkpoints.files import Output, ShardWriter


def weights_of(layers: int, hidden: int, intermediate: int) -> dict[str, tuple[int, int]]:
    """Shapes of the matrices of a dense model, by name."""
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    return {f"model.layers.{i}.{part}.weight": shape for i in range(layers) for part, shape in shapes.items()}


def bytes_of(weights: Mapping[str, tuple[int, int]]) -> int:
    """Bytes of bfloat16."""
    return sum(2 * rows * columns for rows, columns in weights.values())


def write_model(folder: Path, weights: Mapping[str, tuple[int, int]]) -> list[Path]:
    """Write weights into `folder`, in shards of a quarter, which are returned; matrices of one shape are the same."""
    generator = torch.Generator().manual_seed(0)
    matrices = {shape: (0.02 * torch.randn(shape, generator=generator)).bfloat16() for shape in set(weights.values())}
    outputs = [Output.like(name, matrices[shape]) for name, shape in weights.items()]
    writer = ShardWriter(folder, outputs, max(1, bytes_of(weights) // 4))
    for name, shape in weights.items():
        writer.write(name, matrices[shape])
    (folder / "config.json").write_text(json.dumps({"model_type": "made", "dtype": "bfloat16"}))
    return [folder / file for file in writer.files]


@contextlib.contextmanager
def peak_resident() -> Iterator[list[int]]:
    """A list that gets the bytes which are resident at most within, beyond those at its start, where Linux counts them."""
    high_water, found = Path("/proc/self/clear_refs"), []
    if not high_water.exists():
        yield found
        return
    high_water.write_text("5")
    before = _resident("VmRSS")
    yield found
    found.append(_resident("VmHWM") - before)


def _resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))
