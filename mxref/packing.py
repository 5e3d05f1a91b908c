"""Storage: codes as bit streams, scales and rows in named layouts.

A layout is always named by the caller and never guessed from a shape. What users see elsewhere is
the logical shape with one code a byte; only what this file returns has a stored shape.
"""

from collections.abc import Sequence
from math import ceil, gcd, prod

import torch
import torch.nn.functional as F
from einops import rearrange

from mxref.elements import check_tensor
from mxref.formats import check_choice, check_number, check_type
from mxref.registry import op

_TILE_ROWS, _TILE_COLUMNS = 128, 4
_GGML_BLOCK = 32

# Every layout, and the logical shapes it stores.
LAYOUTS = {
    "linear": ("any", lambda shape: True),
    "tile_128x4": ("[..., R, C]", lambda shape: len(shape) >= 2),
    "ggml_mxfp4": (f"[..., K] with K a multiple of {_GGML_BLOCK}", lambda shape: shape and shape[-1] % _GGML_BLOCK == 0),
    "interleaved": ("[..., 2 I, K]", lambda shape: len(shape) >= 2 and shape[-2] % 2 == 0),
}


@op
def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes into bytes along the last axis, first code in the lowest bits.

    `codes`: uint8 `[..., K]`, each below `2**bits`. Returns uint8 `[..., ceil(K * bits / 8)]`: a
    little-endian bit stream that starts anew on a byte in each row; spare bits are 0. Element 0 of an
    FP4 row is the low nibble of byte 0; four FP6 codes fill three bytes.

    Raises TypeError if `codes` is not uint8, ValueError for `bits` outside 1 to 8, a 0-d tensor or a
    code that needs more bits.

    >>> [hex(byte) for byte in pack(torch.tensor([2, 7, 9, 5], dtype=torch.uint8), 4)]
    ['0x72', '0x59']
    """
    _check_bytes("codes", codes, bits)
    if codes.numel() and int(codes.max()) >> bits:
        raise ValueError(f"codes holds {int(codes.max())}, which needs more than bits={bits}")
    return pack_codes(codes, bits)


@op
def unpack(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Unpack `count` codes a row: the inverse of `pack`.

    `packed`: uint8 `[..., ceil(count * bits / 8)]`. Returns uint8 `[..., count]`. Raises ValueError if
    the last axis has another length or a spare bit is set, since something else was stored then.

    >>> unpack(torch.tensor([0x72, 0x59], dtype=torch.uint8), 4, 4).tolist()
    [2, 7, 9, 5]
    """
    check_packed("packed", packed, bits, count, "count")
    return unpack_codes(packed, bits, count)


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """`pack` of codes that are known to be right; of 8 bits, the codes themselves."""
    if bits == 8:
        return codes
    group, word_dtype = _words(bits)
    length = -(-codes.shape[-1] * bits // 8)
    codes = rearrange(F.pad(codes, (0, -codes.shape[-1] % group)), "... (n group) -> group ... n", group=group)
    word = codes[0].to(word_dtype)
    for i in range(1, group):
        word = word | codes[i].to(word_dtype) << (i * bits)
    packed = torch.stack([(word >> shift).to(torch.uint8) for shift in range(0, group * bits, 8)], dim=-1)
    return packed.flatten(-2)[..., :length]


def unpack_codes(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """`unpack` of bytes that are known to be right; of 8 bits, the bytes themselves."""
    if bits == 8:
        return packed
    group, word_dtype = _words(bits)
    size = group * bits // 8
    data = rearrange(F.pad(packed, (0, -packed.shape[-1] % size)), "... (n size) -> size ... n", size=size)
    word = data[0].to(word_dtype)
    for i in range(1, size):
        word = word | data[i].to(word_dtype) << (8 * i)
    codes = torch.stack([(word >> (i * bits) & ((1 << bits) - 1)).to(torch.uint8) for i in range(group)], dim=-1)
    return codes.flatten(-2)[..., :count]


def _words(bits: int) -> tuple[int, torch.dtype]:
    """How many codes fill whole bytes, and an integer that holds them."""
    group = 8 // gcd(8, bits)
    return group, torch.uint8 if group * bits == 8 else torch.int32 if group * bits < 32 else torch.int64


@op
def to_layout(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Store a tensor in a named layout.

    * `linear`: row-major, unchanged.
    * `tile_128x4`: scales uint8 `[..., R, C]` -> `[..., bytes]` in tiles of 128 rows and 4 columns, tiles
      row-major, padding 0; scale (r, c) lies at `512 * tile + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4`
      with `tile = r // 128 * ceil(C / 4) + c // 4`.
    * `ggml_mxfp4`: FP4 codes uint8 `[..., K]` -> `[..., K / 32, 16]`; byte i of a block holds elements i
      (low nibble) and i + 16 (high nibble).
    * `interleaved`: gate and up rows, any dtype, `[..., 2 I, K]` from all gate rows then all up rows to
      gate 0, up 0, gate 1, up 1, ...

    Raises ValueError for an unknown layout or a shape it does not fit. Sources: cuBLAS, block scaling
    factor layout (`tile_128x4`); ggml's MXFP4 block; gpt-oss (`interleaved`).

    >>> to_layout(torch.ones(1, 1, dtype=torch.uint8), "tile_128x4").sum().item()
    1
    """
    check_layout("tensor", tensor, layout)
    if layout == "tile_128x4":
        padded = F.pad(tensor, (0, -tensor.shape[-1] % _TILE_COLUMNS, 0, -tensor.shape[-2] % _TILE_ROWS))
        return rearrange(padded, "... (tr q r) (tc c) -> ... (tr tc r q c)", q=4, r=32, c=_TILE_COLUMNS)
    if layout == "ggml_mxfp4":
        if tensor.numel() and int(tensor.max()) > 15:
            raise ValueError(f"tensor holds {int(tensor.max())}: ggml_mxfp4 stores 4-bit codes")
        low, high = rearrange(tensor, "... (n half i) -> half ... n i", half=2, i=_GGML_BLOCK // 2)
        return low | high << 4
    if layout == "interleaved":
        return rearrange(tensor, "... (part i) k -> ... (i part) k", part=2)
    return tensor


@op
def from_layout(data: torch.Tensor, layout: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Read a tensor of logical `shape` out of a named layout: the inverse of `to_layout`.

    What lies in the padding of `tile_128x4` is ignored. Raises TypeError for scales or codes that are not uint8,
    ValueError for an unknown layout, a shape it does not store, or `data` of another size.

    >>> scales = torch.arange(12, dtype=torch.uint8).reshape(3, 4)
    >>> torch.equal(from_layout(to_layout(scales, "tile_128x4"), "tile_128x4", (3, 4)), scales)
    True
    """
    check_type("shape", shape, Sequence)
    shape = tuple(shape)
    for size in shape:
        check_number("shape", size, 0, expected=f"ints >= 0 in {shape}")
    check_layout("data", data, layout, shape)
    stored_shape = shape
    if layout == "tile_128x4":
        stored_shape = (*shape[:-2], ceil(shape[-2] / _TILE_ROWS), ceil(shape[-1] / _TILE_COLUMNS), 32, 4, _TILE_COLUMNS)
    elif layout == "ggml_mxfp4":
        stored_shape = (*shape[:-1], shape[-1] // _GGML_BLOCK, _GGML_BLOCK // 2)
    if data.numel() != prod(stored_shape):
        raise ValueError(f"data has {data.numel()} entries: shape={shape} in {layout} takes {prod(stored_shape)}")
    data = data.reshape(stored_shape)
    if layout == "tile_128x4":
        scales = rearrange(data, "... tr tc r q c -> ... (tr q r) (tc c)")
        return scales[..., : shape[-2], : shape[-1]].contiguous()
    if layout == "ggml_mxfp4":
        return torch.cat([data & 15, data >> 4], dim=-1).reshape(shape)
    if layout == "interleaved":
        return rearrange(data, "... (i part) k -> ... (part i) k", part=2)
    return data


def _check_bytes(argument: str, tensor: torch.Tensor, bits: int) -> None:
    check_tensor(argument, tensor, torch.uint8)
    if tensor.ndim == 0:
        raise ValueError(f"{argument} has no axes: expected at least one")
    check_number("bits", bits, 1, 8)


def check_packed(argument: str, packed: torch.Tensor, bits: int, count: int, count_argument: str) -> None:
    """Raise unless `packed` holds rows of `count` codes and nothing else."""
    _check_bytes(argument, packed, bits)
    check_number(count_argument, count, 0)
    length = -(-count * bits // 8)
    if packed.shape[-1] != length:
        raise ValueError(f"{argument} has {packed.shape[-1]} bytes a row: {count} codes of {bits} bits take {length}")
    spare = length * 8 - count * bits
    if spare and packed.numel() and int(packed[..., -1].max()) >> (8 - spare):
        raise ValueError(f"{argument}: the {spare} spare bits at the end of a row must be 0")


def check_layout(argument: str, tensor: torch.Tensor, layout: str, shape: tuple[int, ...] | None = None) -> None:
    """Raise unless `layout` stores tensors of `tensor`'s dtype and of logical `shape` (default: its own)."""
    check_choice("layout", layout, tuple(LAYOUTS))
    check_tensor(argument, tensor, *((torch.uint8,) if layout in ("tile_128x4", "ggml_mxfp4") else ()))
    given = f"{argument} has shape {list(tensor.shape)}" if shape is None else f"shape={shape}"
    stored, fits = LAYOUTS[layout]
    if not fits(tensor.shape if shape is None else shape):
        raise ValueError(f"{given}: {layout} stores axes {stored}")
