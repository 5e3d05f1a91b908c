"""Bytes: nibbles, FP6 streams, the tile of scales, logical and stored shapes, and the checkpoints of each tool."""

import re
from dataclasses import replace
from pathlib import Path

import torch

import mxref
from docs._generate.drawing import PHONE, Drawing, box, figure, text
from docs._generate.markdown import hexadecimal, table
from mxref.checkpoints.dialects import DIALECTS, Layout
from mxref.checkpoints.writers import ACTIVATIONS, MODELOPT
from mxref.formats import BLOCK_FORMATS
from mxref.packing import _TILE_COLUMNS, _TILE_ROWS, LAYOUTS

TILE_ROWS, TILE_COLUMNS = _TILE_ROWS, _TILE_COLUMNS
KINDS = ("element", "other", "third", "scale")  # of boxes, one after the other


def packing(bits: int, codes: tuple[int, ...]) -> str:
    """A few codes and the bytes they are packed into, bit by bit."""
    packed = mxref.pack(torch.tensor(codes, dtype=torch.uint8), bits).tolist()
    left, wide = 44, 288  # a phone shows all of it
    cell = min(26, wide / (8 * len(packed)))
    width = left + 8 * len(packed) * cell + 4
    shapes = []
    for k, code in enumerate(codes):
        x = left + 8 * len(packed) * cell - (k + 1) * bits * cell
        shapes.append(
            box(
                x,
                8,
                bits * cell,
                30,
                KINDS[k % 4],
                f"{k}: {hexadecimal(code, bits)}",
            )
        )
        for i in range(bits):
            digit = f"{code >> (bits - 1 - i) & 1}"
            shapes.append(box(x + i * cell, 44, cell, 28, KINDS[k % 4], digit))
    for i, byte in enumerate(packed):
        x = left + 8 * (len(packed) - 1 - i) * cell
        shapes.append(box(x, 80, 8 * cell, 30, "plain", f"byte {i}: {hexadecimal(byte)}"))
    shapes += [
        text(left - 8, 28, "codes", "end", "small"),
        text(left - 8, 64, "bits", "end", "small"),
        text(left - 8, 100, "bytes", "end", "small"),
    ]
    count = "1 byte" if len(packed) == 1 else f"{len(packed)} bytes"
    caption = f"{len(codes)} codes of {bits} bits in {count}; the highest bit is on the left, so read from right to left"
    return figure(caption, Drawing(width, 120, shapes), grows=1.4)


def packing_table() -> str:
    """Codes, bytes, for each element width."""
    rows = []
    for bits, codes in ((4, (2, 7, 9, 5)), (6, (1, 2, 3, 4)), (8, (0x38, 0x7E))):
        packed = mxref.pack(torch.tensor(codes, dtype=torch.uint8), bits).tolist()
        rows.append((bits, " ".join(hexadecimal(c, bits) for c in codes), " ".join(hexadecimal(b) for b in packed)))
    return table(("bits", "codes, element 0 first", "bytes, byte 0 first"), rows)


def tile_offset(row: int, column: int, columns: int) -> int:
    """Where `to_layout` puts the scale at (row, column): found by storing a marker there."""
    rows = 128 * (row // 128 + 1)
    scales = torch.zeros(rows, columns, dtype=torch.uint8)
    scales[row, column] = 1
    return int(mxref.to_layout(scales, "tile_128x4").nonzero())


def tile_offsets(columns: int = 8) -> str:
    """Worked offsets in the tile, each with the sum that gives it."""
    rows = []
    for r, c in ((0, 0), (0, 1), (1, 0), (31, 3), (32, 0), (33, 5), (127, 3), (0, 4), (128, 0), (200, 5)):
        tiles = -(-columns // 4)
        tile = r // 128 * tiles + c // 4
        parts = 512 * tile, r % 32 * 16, r % 128 // 32 * 4, c % 4
        offset = tile_offset(r, c, columns)
        assert sum(parts) == offset
        rows.append((r, c, tile, " + ".join(map(str, parts)), f"**{offset}**"))
    header = ("row r", "column c", "tile", "512 tile + 16 (r mod 32) + 4 (r mod 128 div 32) + c mod 4", "byte")
    return table(header, rows, "rrrlr")


def tile_picture() -> str:
    """A 128 x 4 tile of scales, and its 32 lines of 16 bytes: beside it, or on a phone below it."""
    caption = "The 128 x 4 tile: logical scales first, then the byte offset of each"
    return figure(caption, _tile(860, 250, 0, 29), _tile(PHONE, 6, 318, 20.5))


def _tile(width: float, start: float, below: float, wide: float) -> Drawing:
    """`start`, `below`: where the bytes are, right of the tile and below it; `wide`: of a byte."""
    top, height, left, cell = 40, 256, 60, 20
    shapes = []
    for group, kind in enumerate(KINDS):
        y = top + group * height / 4
        shapes.append(box(left, y, 4 * cell, height / 4, kind))
        shapes.append(text(left - 6, y + 13, f"{32 * group}", "end", "small"))
        shapes.append(text(left + 2 * cell, y + height / 8 + 4, f"rows {32 * group}-{32 * group + 31}", kind="small"))
    shapes.append(text(left + 2 * cell, top - 10, "columns 0-3", kind="small"))
    line_height, apart = 22, 44 if below else 28  # on a phone a line's label is above it
    words = "bytes: 32 lines of 16, each with one scale row of every group"
    shapes.append(text(start, top + below - 10 - (12 if below else 0), words, "start", "small"))
    for line_number in (0, 1, 2, 31):
        y = top + below + min(line_number, 4 if below else 5) * apart
        for group, kind in enumerate(KINDS):
            for c in range(4):
                offset = tile_offset(32 * group + line_number, c, 4)
                assert offset == 16 * line_number + 4 * group + c
                x = start + (4 * group + c) * wide
                shapes.append(box(x, y, wide, line_height, kind, f"{offset}", "small" if below else "label"))
        label = "r = " + ", ".join(f"{32 * group + line_number}" for group in range(4))
        shapes.append(text(*((start, y - 5) if below else (start + 16 * wide + 8, y + 15)), label, "start", "small"))
    shapes.append(text(start + 8 * wide, top + below + (3.3 if below else 4) * apart + 4, "⋮"))
    bottom = top + below + 4 * apart + line_height if below else top + height
    return Drawing(width, bottom + 16, shapes)


def layouts() -> str:
    """The named layouts and what they store."""
    documented = mxref.to_layout.__doc__ or ""
    rows = []
    for name, (stored, _) in LAYOUTS.items():
        words = re.search(rf"\* `{name}`: (.*?)(?=\n    \* |\n\n)", documented, re.DOTALL)[1]
        words = " ".join(words.split())
        rows.append((f"`{name}`", stored, words))
    return table(("layout", "logical shapes", "bytes"), rows)


def shapes(rows: int = 3, length: int = 80) -> str:
    """Logical and stored shapes of one tensor in every format."""
    lines = []
    x = torch.ones(rows, length)
    for name in BLOCK_FORMATS:
        q = mxref.quantize(x, name)
        tile = mxref.to_layout(q.scales, "tile_128x4").numel()
        lines.append((name, _shape(q.shape), _shape(q.packed.shape), _shape(q.scales.shape), tile))
    header = (
        "format",
        "`q.shape`, `q.codes.shape`",
        "`q.packed.shape`, bytes",
        "`q.scales.shape`, bytes",
        "bytes of scales in the tile",
    )
    return table(header, lines, "llllr")


def _shape(size) -> str:
    return "[" + ", ".join(map(str, size)) + "]"


def float4_shape() -> str:
    """The shape that torch's packed FP4 dtype shows for a row of eight elements."""
    q = mxref.quantize(torch.ones(2, 32), "mxfp4")
    view = q.packed.view(torch.float4_e2m1fn_x2)
    return f"logical {_shape(q.shape)}, `float4_e2m1fn_x2` {_shape(view.shape)}"


def dialects() -> str:
    """Every layout of a weight that the checkpoint reader knows."""
    scale_layouts: dict[tuple[str, Layout], list[str]] = {}  # of layouts that differ in nothing else
    for dialect, known in DIALECTS.items():
        for layout in known:
            scale_layouts.setdefault((dialect, replace(layout, scale_layout="linear")), []).append(layout.scale_layout)
    rows = []
    for (dialect, layout), stored in scale_layouts.items():
        scales = [f"`…{layout.tensor_scale}`: **{layout.direction}**"] if layout.tensor_scale else []
        scales += [f"`…{layout.input_scale}`, of activations"] if layout.input_scale else []
        rows.append(
            (
                dialect,
                layout.format,
                f"`…{layout.codes}`\n{layout.codes_dtype}, {_order(layout)}",
                f"`…{layout.scales}`\n{' or '.join(layout.scales_dtype)}, {' or '.join(f'`{name}`' for name in stored)}",
                "\n".join(scales) or "-",
                f"`{layout.recipe}`",
            )
        )
    header = ("dialect", "format", "codes", "block scales", "tensor scales: direction", "read as recipe")
    return table(header, rows)


def _pinned(library: str) -> str:
    """The version of a library that the tests run."""
    pins = (Path(__file__).parents[2] / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return next(pin for pin in pins if pin.startswith(f"{library}==")).split("==")[1].split(";")[0].strip()


# What readers make of each dialect and format that is written: the tool's own library, transformers, vLLM.
_LIBRARIES = {
    "compressed-tensors": f"compressed-tensors {_pinned('compressed-tensors')}: bit for bit",
    "modelopt": f"ModelOpt {MODELOPT['version']}: bit for bit",
    "quark": "not run",
    "gpt-oss": "transformers is its reader",
    "torchao": f"torchao {_pinned('torchao')}: bit for bit",
}
_OWN_FILES = {("quark", "mxfp4"), ("quark", "mxfp6_e2m3"), ("compressed-tensors", "mxfp4")}
# Experts of a small model, as transformers 5.24 has them once it has loaded what was written (`test_load.py`).
TRANSFORMERS = {
    ("compressed-tensors", "nvfp4"): "other values",
    ("compressed-tensors", "mxfp4"): "bit for bit",
    ("compressed-tensors", "mxfp8_e4m3"): "refused",
    ("modelopt", "nvfp4"): "refused",
    ("modelopt", "mxfp4"): "refused",
    ("modelopt", "mxfp8_e4m3"): "other values",
    ("gpt-oss", "mxfp4"): "bit for bit",
    ("torchao", "mxfp4"): "initialized anew",
    ("torchao", "mxfp8_e4m3"): "initialized anew",
    ("torchao", "mxfp8_e5m2"): "initialized anew",
}
_VLLM = {("modelopt", "mxfp4"): "not in its list"} | {("torchao", name): "not known" for name in ACTIVATIONS["torchao"]}


def readers() -> str:
    """Each dialect and format that `mxref convert` writes, and who reads it."""
    rows = []
    for dialect, formats in ACTIVATIONS.items():
        for format in formats:
            own = "; own file" if (dialect, format) in _OWN_FILES else ""
            theirs = TRANSFORMERS.get((dialect, format), "not tried"), _VLLM.get((dialect, format), "accepted")
            rows.append((dialect, format, "yes", _LIBRARIES[dialect] + own, *theirs))
    return table(("written", "format", "mxref", "the tool's library", "experts in transformers 5.24", "vLLM 0.33"), rows)


def _order(layout: Layout) -> str:
    if layout.code_blocks:
        return "[..., blocks, bytes]"
    return "packed along axis -2" if layout.axis == -2 else "rows"
