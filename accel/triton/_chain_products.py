"""Launches of the kernels of `_chains.py`: what `matmul` and `moe_experts` share where weights are decoded."""

from dataclasses import dataclass
from functools import cache
from math import log2

import torch
import triton

from accel._recipes import unknown_to_decode
from accel.triton._chains import chain_product_kernel, chain_rows_kernel
from accel.triton._constants import FLOAT_BIAS, element_constants, scale_constants
from accel.triton._geometry import INTERPRETED
from accel.triton._launch import STORED, element_refusal, format_refusal, memory, packing_refusal
from mxref.blocks import BlockTensor
from mxref.formats import BlockFormat

SMALLEST_BLOCK, LARGEST_BLOCK = 4, 64  # whose codes fill whole bytes, and are few enough to be written out one by one
GROUP = 16  # blocks of rows that are stored together; a tile's blocks divide it


@dataclass(frozen=True)
class ChainTiling:
    """What a program takes: `repeats` times `rows` of weights with `slots` rows of x, `blocks` of K at a time. A thread has
    one block of a row: rows times blocks are the program's threads."""

    rows: int
    repeats: int
    slots: int
    blocks: int

    @property
    def warps(self) -> int:
        return self.rows * self.blocks // 32


def choose_chain_tiling(slots_a_weight: float) -> ChainTiling:
    """The tiling for an average number of rows of x that meet the same weights."""
    if INTERPRETED:
        return ChainTiling(256, 1, 8 if slots_a_weight > 2 else 1, 8)
    if slots_a_weight <= 2:
        return ChainTiling(16, 1, 1, 8)
    return ChainTiling(32, 2, 4, 4)


def chain_refusal(weight: BlockTensor) -> str | None:
    """Why the kernels do not multiply rows with a decoded weight, or None."""
    format, recipe = weight.format, weight.recipe
    if recipe.transform is not None:
        return f"weights are transformed by {recipe.transform}: decoding them one by one does not undo it"
    refusal = unknown_to_decode(recipe) or element_refusal(format.element) or format_refusal(format, recipe)
    if refusal is not None:
        return refusal
    if not SMALLEST_BLOCK <= format.block_size <= LARGEST_BLOCK:
        return f"blocks of {format.block_size} elements: {SMALLEST_BLOCK} to {LARGEST_BLOCK} are taken in chains"
    return packing_refusal(format)


@dataclass(frozen=True)
class ChainRows:
    """What `chain_rows_kernel` stores: float64 `[rows, groups, block size, blocks of a group]`, and the rows' dtype."""

    values: torch.Tensor
    dtype: torch.dtype


def chain_rows(
    x: torch.Tensor, count: int, length: int, size: int, activation: tuple[str, float, float] = ("none", 0.0, 0.0),
    gated: bool = False, interleaved: bool = False,
) -> ChainRows:  # fmt: skip
    """`count` rows of `length` elements in blocks of `size`, of rows of x or of the activation of their gates and ups."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    groups = -(-length // (size * GROUP))
    values = torch.empty(count, groups, size, GROUP, dtype=torch.float64, device=x.device)
    name, alpha, limit = activation
    if values.numel():
        chain_rows_kernel[(count, groups)](
            memory(x), values, alpha, limit, x.stride(0), values.stride(0), length, SIZE=size, GROUP=GROUP, ACTIVATION=name,
            GATED=gated, INTERLEAVED=interleaved, STORED=STORED[x.dtype], **_options(4),
        )  # fmt: skip
    return ChainRows(values, x.dtype)


def multiply_chains(
    rows: ChainRows, slots_a_row: int, weight: BlockTensor, bias: torch.Tensor | None, out: torch.Tensor,
    tiling: ChainTiling, ids: torch.Tensor | None = None, tiles: tuple[torch.Tensor, torch.Tensor] | None = None,
    router: torch.Tensor | None = None, slot_dtype: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    """out[slot] `[slots, N]` = the chains of its row with its expert's weights `[E, N, K]`, or with `[N, K]`, and the end.

    Without `ids` all slots have the same weights. `tiles`: of `tiling.slots` slots of one expert each, as `sort_slots` makes
    them; without them each slot is alone.
    """
    format, (n_size, length), element = weight.format, weight.shape[-2:], weight.format.element
    experts, slots = weight.shape[0] if weight.ndim == 3 else 1, len(out)
    if not out.numel():
        return
    packed, scales = _rows_of(weight.packed), _rows_of(weight.scales)
    stored = None
    if weight.tensor_scale is not None:
        stored = weight.tensor_scale.expand(*weight.shape[:-1], 1)
    bias = None if bias is None else memory(bias.detach().resolve_neg())[..., None]
    if ids is None:
        places, count, slots_of_place = "rows", triton.cdiv(slots, tiling.slots), tiling.slots
    elif tiles is None:
        places, count, slots_of_place = "slots", slots, 1
    else:
        places, count, slots_of_place = "tiles", len(tiles[1]), tiling.slots
    how, lowest, highest = _how(format, stored is not None, rows.dtype)
    order, tile_of = (rows.values, rows.values) if tiles is None else tiles
    wanted = ("BITS", "MANTISSA", "MAX", "MAX_CODE", "SIGN_SHIFT", "INTEGER", "UNBIAS", "INF_CODE")
    constants, scale_of = element_constants(element), scale_constants(format)
    packed = words(packed, element.bits, format.block_size)
    chain_product_kernel[(triton.cdiv(n_size, tiling.rows * tiling.repeats), count)](
        rows.values, packed, scales, rows.values if stored is None else stored, rows.values if bias is None else bias,
        memory(out), rows.values if ids is None else ids, rows.values if router is None else router, order, tile_of,
        slots, experts, n_size, triton.cdiv(length, format.block_size), rows.values.stride(0),
        *_strides(packed), *_strides(scales), *_strides(stored), *_strides(bias), 1,
        PLACES=places, X_OF_SLOTS=slots_a_row, SCALE_ROWS=weight.recipe.block_rows,
        W_STORED="none" if stored is None else weight.recipe.tensor_scale_direction, HAS_BIAS=bias is not None,
        HAS_ROUTER=router is not None, ROUNDED=STORED[slot_dtype], STORED=STORED[out.dtype], HOW=how, D=STORED[rows.dtype],
        ROUNDS=how != "powers", BN=tiling.rows, RN=tiling.repeats, BM=slots_of_place, NB=tiling.blocks,
        SIZE=format.block_size, GROUP=GROUP, LOWEST=lowest, HIGHEST=highest, BIAS=element.bias,
        **{name: scale_of[name] for name in ("POWER_OF_TWO", "SCALE_NAN", "SCALE_MANTISSA", "SCALE_UNBIAS")},
        **{name: constants[name] for name in wanted}, EVEN=length % (format.block_size * tiling.blocks) == 0,
        TAIL=length % format.block_size or format.block_size, **_options(tiling.warps),
    )  # fmt: skip


def _options(warps: int) -> dict[str, int | bool]:
    return {} if INTERPRETED else {"num_warps": warps, "enable_fp_fusion": False}


def _rows_of(x: torch.Tensor) -> torch.Tensor:
    """`x`, copied if its last axis is strided."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _strides(x: torch.Tensor | None) -> tuple[int, int]:
    """Strides of an expert and of a row; 0 where there is none."""
    if x is None:
        return 0, 0
    return x.stride(0) if x.ndim == 3 else 0, x.stride(-2)


def words(packed: torch.Tensor, bits: int, size: int) -> torch.Tensor:
    """Packed codes as int64 or int32 where rows and blocks are whole ones; else as they are."""
    for dtype in (torch.int64, torch.int32):
        width = dtype.itemsize
        fills = bits != 6 and size * bits % (8 * width) == 0 and packed.shape[-1] % width == 0
        aligned = packed.storage_offset() % width == 0 and packed.data_ptr() % width == 0
        if fills and aligned and all(stride % width == 0 for stride in packed.stride()[:-1]):
            return packed.view(dtype)
    return packed


@cache
def _how(format: BlockFormat, tensor_scale: bool, dtype: torch.dtype) -> tuple[str, int, int]:
    """How weights become float64 numbers, and from which to which scale code that is right, as `_chains.py` says."""
    element, info = format.element, torch.finfo(dtype)
    if element.specials != "none":
        return "plain", 0, 0
    smallest = info.smallest_normal * info.eps
    narrow_enough = element.largest_multiple < 2.0 / info.eps
    if element.kind == "integer" or not format.scale.is_power_of_two or tensor_scale or not narrow_enough:
        return "shifted", 0, 0
    lowest = FLOAT_BIAS + int(log2(smallest)) - int(log2(element.quantum))
    highest = max(code for code in range(FLOAT_BIAS * 2 + 1) if element.max * 2.0 ** (code - FLOAT_BIAS) <= info.max)
    return "powers", max(lowest, 0), highest
