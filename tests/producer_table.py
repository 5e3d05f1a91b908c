"""Every producer's recorded output against the recipe that reproduces it, as one table.

    python -m tests.producer_table --json benchmarks/results/producers.json [--golden FOLDER]

A row is a producer, a format and an input: how many codes, scales, tensor scales and decoded values differ from what the
producer gave, and how many differ for a stated reason. FOLDER: a whole set of recordings (`mx_<format>.safetensors`,
`nvfp4.safetensors`, `inputs.safetensors`) instead of the one in `tests/data`. Exit code 1 if anything differs without a
reason.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

if __package__:  # as a program; pytest puts this directory on the path instead
    sys.path.insert(0, str(Path(__file__).parent))

from golden import load, load_folder, nibbles

import mxref
from mxref.producers import ROWS

MX = tuple(name for name, block in mxref.BLOCK_FORMATS.items() if block.scale.is_power_of_two)

# Recorded name to recipe, where it is not the recorded name itself or that with `_mxfp8` or `_mxint8`.
OTHER_NAMES = {
    "flashinfer_trace": {"mxfp4": "flashinfer_mxfp4", "mxfp8_e4m3": "flashinfer_mxfp8", "nvfp4": "flashinfer_nvfp4"},
    "compressed_tensors": {
        "mxfp4": "compressed_tensors_mxfp4",
        "mxfp6_e2m3": "compressed_tensors_mxfp6",
        "mxfp8_e4m3": "compressed_tensors_mxfp8",
        "nvfp4": "compressed_tensors_nvfp4",
    },
    "modelopt": {"mxfp4": "modelopt_mxfp4", "mxfp8_e4m3": "modelopt_mxfp8", "nvfp4": "modelopt_nvfp4"},
    "torchao_two_level": {"nvfp4": "torchao_nvfp4"},
    "torchao_one_level": {"nvfp4": "torchao_nvfp4"},
    "fouroversix_static6": {"mxfp4": "fouroversix_mxfp4_static6"},
    "fouroversix_static4": {"mxfp4": "fouroversix_mxfp4_static4"},
    "gfloat": {"mxint8": "gfloat_mxint8"},
}

# Where a recording cannot be what a quantizer that stores bytes gives, or there is none.
BEYOND_E8M0 = "the producer's float scale is a power of two below 2^-127, which no scale byte holds"
NO_NEGATIVE_ZERO = "the producer's float output is -0, which INT8 does not have"
NAN_OUTSIDE = "the producer's float output is NaN, from a float scale of Inf or a NaN element, which its bytes do not hold"
RAISES = "the producer raises for a block that holds NaN"
RAISES_FLOAT16 = "the producer raises for float16"
COMPOSED = ("te_ref", "fouroversix", "flashinfer")  # have no decoder of their own for NVFP4: values are not compared


class Row(NamedTuple):
    """One line of the table; `compared`, `differing` and `excepted` count numbers."""

    producer: str
    format: str
    input: str
    recipe: str
    compared: int
    differing: int
    excepted: int
    reason: str


@cache
def recordings(folder: str | None) -> dict[str, torch.Tensor]:
    return load("producers") if folder is None else load_folder(Path(folder))


def recipe_of(producer: str, format: str) -> str:
    """The recipe that reproduces what was recorded under a producer's name."""
    name = OTHER_NAMES.get(producer, {}).get(format) or producer.replace("_round_", "_")
    suffixed = f"{name}_{'mxint8' if format == 'mxint8' else format[:5]}"
    return suffixed if suffixed in ROWS else name


def producers(golden: dict[str, torch.Tensor]) -> list[tuple[str, str]]:
    """(format, producer) of everything recorded."""
    keys = (key.split("/") for key in golden)
    return sorted({(key[0], key[2]) for key in keys if key[0] in mxref.BLOCK_FORMATS})


def input_named(golden: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    if name == "all_bf16":
        return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(512, 128)
    return golden[f"inputs/{name}"]


def rows(golden: dict[str, torch.Tensor], format: str, producer: str) -> Iterator[Row]:
    """The lines of one producer and format."""
    prefix = [key.split("/") for key in golden if key.startswith(f"{format}/")]
    names = sorted({name for _, name, peer, _ in prefix if peer == producer})
    for name in names:
        yield _row(golden, format, producer, name)
    if producer.startswith("torchao"):
        yield Row(producer, format, "rand_p0_f16", recipe_of(producer, format), 0, 0, 0, RAISES_FLOAT16)


def _row(golden: dict[str, torch.Tensor], format: str, producer: str, name: str) -> Row:
    recorded = {
        what: golden.get(f"{format}/{name}/{producer}/{what}") for what in ("codes", "elem", "scale", "gscale", "dq")
    }
    x, recipe, block = input_named(golden, name), recipe_of(producer, format), mxref.BLOCK_FORMATS[format]
    blocks = x.float().reshape(-1, block.block_size)
    excused, reason = _excused(producer, format, x.reshape(blocks.shape), recorded["dq"])
    if reason == RAISES:
        x = torch.where(excused, 0.0, x.reshape(blocks.shape)).to(x.dtype).reshape(x.shape)
    parts = _quantized(x, format, recipe, producer, name, recorded["gscale"])
    decoded_dtype = _decoded_dtype(producer, x.dtype)
    pairs = []
    if recorded["codes"] is not None:
        theirs = nibbles(recorded["codes"]) if block.element.bits == 4 else recorded["codes"]
        pairs.append((torch.cat([q.codes for q in parts]), theirs, block.block_size))
    if recorded["elem"] is not None:
        ours = mxref.decode(torch.cat([q.codes for q in parts]).contiguous(), block.element)
        pairs.append((ours, recorded["elem"].float(), block.block_size))
    if recorded["scale"] is not None:
        ours = torch.cat([q.scales for q in parts]).repeat_interleave(parts[0].recipe.block_rows, 0)
        pairs.append((ours, recorded["scale"], 1))
    if recorded["gscale"] is not None and parts[0].tensor_scale is not None and not producer.startswith(COMPOSED):
        pairs.append((torch.stack([q.tensor_scale for q in parts]).flatten(), recorded["gscale"].flatten(), 0))
    if recorded["dq"] is not None and not (format == "nvfp4" and producer.startswith(COMPOSED)):
        ours = torch.cat([mxref.dequantize(q, decoded_dtype) for q in parts])
        pairs.append((ours.float(), recorded["dq"].float(), block.block_size))
    compared = differing = excepted = 0
    for ours, theirs, width in pairs:
        differs = _bits(ours) != _bits(theirs)
        mask = torch.zeros_like(differs)
        if width == 1:
            mask = excused.all(1).reshape(differs.shape)
        elif width:
            mask = excused.reshape(differs.shape)
        compared += differs.numel()
        differing += int((differs & ~mask).sum())
        excepted += int((differs & mask).sum())
    return Row(producer, format, name, recipe, compared, differing, excepted, reason if excepted else "")


def _quantized(x, format, recipe, producer, name, tensor_scale) -> list[mxref.BlockTensor]:
    """`nv_adv` holds one tensor a row; FlashInfer is given its tensor scale, torchao's one level has none."""
    options = {"tensor_scale": "none"} if producer == "torchao_one_level" else {}
    parts = x.split(1) if name == "nv_adv" else [x]
    out = []
    for part, given in zip(parts, [None] * len(parts) if tensor_scale is None else tensor_scale.flatten()):
        if producer == "flashinfer_trace" and format == "nvfp4":
            options = {"tensor_scale": given.clone()}
        out.append(mxref.quantize(part, format, recipe=recipe, **options))
    return out


def _decoded_dtype(producer: str, dtype: torch.dtype) -> torch.dtype:
    """These decode to float32 whatever came in."""
    decodes_to_float32 = (
        "modelopt",
        "torchao_one_level",
        "torchao_two_level",
        "te_ref",
        "fouroversix",
        "flashinfer",
        "gfloat",
    )
    return torch.float32 if producer.startswith((*decodes_to_float32, "triton_kernels")) else dtype


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Bits of bytes or float32 values, NaN alike."""
    if not values.is_floating_point():
        return values
    return torch.where(values.isnan(), torch.nan, values).view(torch.int32)


def _excused(producer: str, format: str, blocks: torch.Tensor, dq: torch.Tensor | None) -> tuple[torch.Tensor, str]:
    """Which elements `[n, b]` cannot be compared, by what the input or the recorded output alone says, and why."""
    element = mxref.BLOCK_FORMATS[format].element
    none = torch.zeros(blocks.shape, dtype=torch.bool)
    if producer == "gfloat":
        return blocks.isnan().any(1, keepdim=True).expand_as(none), RAISES
    if producer in ("quark_floor", "quark_ceil"):
        rounding = torch.floor if producer == "quark_floor" else torch.ceil
        power = torch.pow(2, rounding(torch.log2(blocks.abs().amax(1, keepdim=True))) - element.emax)
        return ((power > 0) & (power.double() < 2.0**-127)).expand_as(none), BEYOND_E8M0
    if dq is None:
        return none, ""
    dq = dq.float().reshape(blocks.shape)
    if producer.startswith("microxcaling") and element.kind == "integer":
        return (dq == 0) & dq.signbit(), NO_NEGATIVE_ZERO
    if producer == "compressed_tensors" and format != "nvfp4":
        half = 2.0 - 2.0 ** -(element.mantissa_bits + 1 if format == "mxfp6_e2m3" else 2)
        carries = blocks.abs().amax(1, keepdim=True).double() >= half * 2.0**127
        return dq.isnan() & (carries | ~blocks.isfinite()), NAN_OUTSIDE
    return none, ""


def table(golden: dict[str, torch.Tensor]) -> list[Row]:
    """Every line, in a fixed order."""
    return [row for format, producer in producers(golden) for row in rows(golden, format, producer)]


def as_text(lines: list[Row]) -> str:
    """JSON with a line a row."""
    shown = ",\n".join("  " + json.dumps(row._asdict()) for row in lines)
    return f'{{"recordings": "tests/data/golden_producers.npz.xz", "rows": [\n{shown}\n]}}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the table")
    parser.add_argument("--golden", metavar="FOLDER", help="a whole set of recordings")
    arguments = parser.parse_args()
    lines = table(recordings(arguments.golden))
    if arguments.json:
        Path(arguments.json).write_text(as_text(lines), encoding="utf-8")
    for row in lines:
        if row.differing or row.excepted:
            print(row)
    differing = sum(row.differing for row in lines)
    counts = len(lines), sum(row.compared for row in lines), differing, sum(row.excepted for row in lines)
    print("{} rows, {} numbers compared, {} differ, {} differ for a stated reason".format(*counts))
    raise SystemExit(differing > 0)


if __name__ == "__main__":
    main()
