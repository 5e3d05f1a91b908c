"""Checkpoints: a sharded model in bfloat16 converted to Quark's MXFP4, and read, beside safetensors and a copy of its files.

`peak_resident_bytes`: what the process has at most in memory, files that are mapped included, beyond what it had when the
first run began, by the kernel's high-water mark, which Linux alone can reset.
"""

import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import mxref
from benchmarks.contenders import REFERENCE, Contender, backends_of
from mxref.commands.bench import FOLDER
from mxref.comparison import difference

pytest.importorskip("safetensors")

from safetensors.torch import load_file

from benchmarks.made_model import weights_of, write_model
from mxref.checkpoints import convert_checkpoint, load_checkpoint

LAYERS, HIDDEN, INTERMEDIATE = 6, 1024, 3584  # 160 MB
FORMAT, RECIPE = "mxfp4", "quark_even"
FILES, SAFETENSORS = "copy of the files", "safetensors, copied"
ROWS_COMPARED = 64


def contenders(quick: bool) -> Iterator[Contender]:
    layers = 0 if quick else LAYERS
    elements = sum(rows * columns for rows, columns in _weights(layers).values())
    packed = int(elements * mxref.BLOCK_FORMATS[FORMAT].bits_per_element / 8)

    row = partial(Contender, format=FORMAT, dtype="bfloat16", size=(elements,))
    convert = partial(row, "convert", counts_memory=True, floor=FILES, recipe=RECIPE, moved_bytes=2 * elements + packed)
    yield Contender("convert", "-", "bfloat16", (elements,), FILES, partial(_copying, layers), moved_bytes=4 * elements)
    for backend in (None, *backends_of("quantize")):
        who = REFERENCE if backend is None else f"mxref {backend}"
        for losses in (False, True):
            name = f"{who}, losses measured" if losses else who
            prepare, wrong = partial(_converting, layers, backend, losses), partial(_unlike, layers, backend)
            yield convert(who=name, prepare=prepare, wrong=wrong)
    load = partial(row, "load_checkpoint", counts_memory=True, floor=SAFETENSORS, moved_bytes=packed)
    yield load(who=SAFETENSORS, prepare=partial(_loading, layers), floor=None, ours=False)
    yield load(
        who="mxref reference, as stored", prepare=partial(_reading, layers, False), wrong=partial(_unlike_read, layers)
    )
    yield load(who="mxref reference, decoded", prepare=partial(_reading, layers, True), wrong=partial(_unlike_read, layers))


def _weights(layers: int) -> dict[str, tuple[int, int]]:
    """Shapes of a model's matrices by name."""
    if layers == 0:  # one small matrix
        return {"model.layers.0.self_attn.q_proj.weight": (32, 64)}
    return weights_of(layers, HIDDEN, INTERMEDIATE)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="mxref-checkpoints-", dir=os.environ.get(FOLDER))


@functools.cache
def _source(layers: int) -> Path:
    """The model that is converted."""
    folder = Path(_folder().name) / f"source-{layers}"
    folder.mkdir()
    write_model(folder, _weights(layers))
    return folder


@functools.cache
def _converted(layers: int) -> Path:
    """What the reference makes of it."""
    out = Path(_folder().name) / f"converted-{layers}"
    _converting(layers, None, False, out)()
    return out


def _copying(layers: int) -> Callable[[], Any]:
    source, out = _source(layers), Path(_folder().name) / "copy"
    return lambda: shutil.copytree(source, out, dirs_exist_ok=True)


def _converting(layers: int, backend: str | None, losses: bool, out: Path | None = None) -> Callable[[], Any]:
    source, out = _source(layers), out or Path(_folder().name) / f"by-{backend}"

    def run() -> None:
        with mxref.use(*[backend] if backend else [], strict=backend is not None):
            convert_checkpoint(source, out, to="quark", format=FORMAT, recipe=RECIPE, measure_losses=losses, force=True)

    return run


def _unlike(layers: int, backend: str | None, result: None) -> str | None:
    """What differs from `quantize` in the first rows of each converted weight."""
    given, found = load_checkpoint(_source(layers)), load_checkpoint(Path(_folder().name) / f"by-{backend}")
    if sorted(found.quantized) != sorted(_weights(layers)):
        return f"{len(found.quantized)} weights are quantized: expected {len(_weights(layers))}"
    for name in found.quantized:
        with mxref.use():
            expected = mxref.quantize(given[name][:ROWS_COMPARED], FORMAT, recipe=RECIPE)
        tensor = found[name].tensor[:ROWS_COMPARED]
        for part in ("packed", "scales"):
            problem = difference(getattr(tensor, part), getattr(expected, part))
            if problem is not None:
                return f"{name}, {part}: {problem}"
    return None


def _loading(layers: int) -> Callable[[], Any]:
    files = sorted(_converted(layers).glob("*.safetensors"))
    return lambda: [tensor.clone() for file in files for tensor in load_file(file).values()]  # else it is only mapped


def _reading(layers: int, decoded: bool) -> Callable[[], Any]:
    path = _converted(layers)

    def run() -> dict[str, Any]:
        weights = load_checkpoint(path).streamed()
        return {name: mxref.dequantize(w.tensor, torch.bfloat16) if decoded else w.tensor for name, w in weights.items()}

    return run


def _unlike_read(layers: int, result: dict[str, Any]) -> str | None:
    """What differs from QDQ of the first rows of each weight."""
    source = load_checkpoint(_source(layers))
    for name in _weights(layers):
        found = result[name][:ROWS_COMPARED]
        found = found if isinstance(found, torch.Tensor) else mxref.dequantize(found, torch.bfloat16)
        problem = difference(found, mxref.qdq(source[name][:ROWS_COMPARED], FORMAT, recipe=RECIPE))
        if problem is not None:
            return f"{name}: {problem}"
    return None


def test_checkpoints(timed, contender):
    timed(contender)
