"""What programs of expert products take at a time: a measured table a GPU, in `tilings.json`. No bit depends on it."""

import functools
import json
from dataclasses import dataclass
from importlib import resources

import torch

from accel.triton._geometry import INTERPRETED

DEFAULT = "NVIDIA H200"  # for GPUs that nobody has measured


@dataclass(frozen=True)
class Tiling:
    """What a program of a product takes: `rows` of weights, `slots` at a time, `blocks` of K at a time.

    A warp group's tiles, of four warps and 64 rows or more, take one block at a time; smaller ones take more than one where
    pairs in blocks of 16 are decoded.
    """

    rows: int
    slots: int
    blocks: int
    warps: int
    stages: int


@dataclass(frozen=True)
class FragmentTiling:
    """What a program of a product in fragments takes: 16 rows of weights for each of `warps`, `slots` at a time, `blocks` of
    16 elements a step, `stages` of them at once in shared memory. `registers`: of a thread; None: as the compiler likes."""

    warps: int
    slots: int
    blocks: int
    stages: int
    registers: int | None = None


@functools.cache
def measured(device: torch.device) -> dict:
    """The table of a device: for each kind of product rows in ascending `up_to`, an average number of slots an expert."""
    tables = json.loads(resources.files("accel.triton").joinpath("tilings.json").read_text())
    return tables.get(torch.cuda.get_device_name(device), tables[DEFAULT])


def _row(rows: list[dict], slots_an_expert: float) -> dict:
    found = next(row for row in rows if row["up_to"] is None or slots_an_expert <= row["up_to"])
    return {name: value for name, value in found.items() if name != "up_to"}


def choose_tiling(device: torch.device, slots_an_expert: float, block_size: int) -> Tiling:
    """The tiling for an average number of slots, and rows in blocks of `block_size`."""
    if INTERPRETED:
        return Tiling(64, 16, 2, 1, 1)
    row = _row(measured(device)["products"]["16" if block_size < 32 else "32"], slots_an_expert)
    return Tiling(blocks=max(1, row.pop("elements") // block_size), **row)


def choose_fragment_tiling(device: torch.device, slots_an_expert: float, format: str) -> FragmentTiling:
    """The tiling where products with weights of a format are taken in fragments."""
    return FragmentTiling(**_row(measured(device)["fragments"][format], slots_an_expert))
