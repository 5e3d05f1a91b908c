"""`matmul` of block-scaled operands. What path a call takes depends on formats, shape and device; its bits do not.

* `Fused`: every pair of formats, straight from packed codes.
* `Folded`: operands are decoded first, block scales folded in. Within a block all products have the same two scales, so the
  dot of folded elements is the scaled dot, if nothing overflows, underflows or needs more bits than the operands' dtype has.
  The kernel that folds sees whether a scale is too large or small, and flags its rows; tiles of those are made by `Fused`.
* `Warpgroups`: the same on Hopper, with the tensor core and the additions at work at once. FP4 elements with E8M0 scales are
  folded to float8 there, at twice the tensor core's rate, each row by its own power of two.

Products of decoded values (a plain `a`, or `semantics="dequantized"`) are those of `_chains.py`.
"""

import functools
from dataclasses import dataclass
from math import ceil, log2

import torch
import triton
import triton.language as tl

from accel._recipes import unknown_to_decode
from accel.triton._chain_products import chain_refusal, chain_rows, choose_chain_tiling, multiply_chains
from accel.triton._constants import element_constants, scale_constants
from accel.triton._geometry import INTERPRETED, Geometry
from accel.triton._launch import (
    DEVICES,
    DTYPES,
    EXACT,
    STORED,
    compute_capability,
    decode_blocks,
    element_refusal,
    format_refusal,
    memory,
    missing,
    packing_refusal,
)
from accel.triton._products import FLAG_ROWS, fold_float8_kernel, fold_kernel, folded_product_kernel, product_kernel
from mxref.blocks import BlockTensor
from mxref.formats import ELEMENT_FORMATS, FLOAT_MAX, BlockFormat
from mxref.grid import Grid
from mxref.matmul import check_matmul, dot_bits, half_bits
from mxref.registry import Kernel

SMALLEST_BLOCK, LARGEST_BLOCK = 16, 128  # of a dot that tensor cores take at once
FOLDED_QUANTUM, FOLDED_PRODUCT = -63, 126  # exponents: of what folded elements are multiples, of the largest dot


@dataclass(frozen=True)
class Fused:
    """`product_kernel`: tiles of `m` x `n`."""

    m: int
    n: int
    warps: int
    stages: int = 3
    group: int = 8


@dataclass(frozen=True)
class Folded:
    """`fold_kernel` and `folded_product_kernel`: tiles of `m` x `n`."""

    m: int
    n: int
    warps: int
    stages: int = 4
    group: int = 8


@dataclass(frozen=True)
class Warpgroups:
    """A kernel that folds and that of `_warpgroups.py`: tiles of `64 * warpgroups` x `chunk * chunks`, stages of `boxes`
    times 128 bytes along K, `depth` product tiles."""

    warpgroups: int
    chunks: int
    chunk: int
    boxes: int
    stages: int
    depth: int
    group: int = 8

    @property
    def registers(self) -> int:
        """For each thread that adds; the thread that fetches leaves most of its own."""
        return {2: 240, 3: 160, 4: 112}[self.warpgroups]


def matmul(
    a: BlockTensor | torch.Tensor,
    b: BlockTensor,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    semantics: str = "blockwise",
) -> torch.Tensor:
    """As `mxref.matmul`."""
    check_matmul(a, b, bias, out_dtype, semantics)
    if isinstance(a, BlockTensor) and semantics == "blockwise":
        return multiply(a, b, bias, out_dtype, chosen(a, b))
    values = decode_blocks(a, out_dtype) if isinstance(a, BlockTensor) else a.detach().resolve_neg()
    return multiply_values(values, b, bias, out_dtype)


def multiply_values(a: torch.Tensor, b: BlockTensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """The product of plain `a` and decoded `b`, of checked arguments."""
    out = torch.empty((*a.shape[:-1], b.shape[0]), dtype=out_dtype, device=a.device)
    if out.numel():
        rows = a.flatten(0, -2)
        stored = chain_rows(rows, len(rows), rows.shape[1], b.format.block_size)
        multiply_chains(stored, 1, b, bias, out.view(len(rows), -1), choose_chain_tiling(len(rows)))
    return out


def multiply(
    a: BlockTensor, b: BlockTensor, bias: torch.Tensor | None, out_dtype: torch.dtype, path: Fused | Folded | Warpgroups
) -> torch.Tensor:
    """The product of checked operands by the kernels of `path`."""
    x, y = _Operand.of(a), _Operand.of(b)
    out = torch.empty((*a.shape[:-1], y.rows), dtype=out_dtype, device=a.device)
    if not out.numel():
        return out
    size = min(a.format.block_size, b.format.block_size)
    end = _End.of(x, y, bias, out)
    if isinstance(path, Fused):
        _multiply_codes(x, y, end, out, size, path, None)
        return out
    flags = (x.no_flags(), y.no_flags())
    folded = folded_operands(x, y, path, flags)
    if isinstance(path, Folded):
        _multiply_folded(*folded, end, out, x.length, size, path)
    else:
        _multiply_by_warpgroups(*folded, end, out, x.length, size, path)
    if a.format.scale.is_power_of_two or b.format.scale.is_power_of_two:
        _multiply_codes(x, y, end, out, size, fused(a, b), flags)
    return out


def folded_operands(
    a: "_Operand", b: "_Operand", path: Folded | Warpgroups, flags: tuple[torch.Tensor, torch.Tensor]
) -> tuple["_Folded", "_Folded"]:
    """Both operands as a path takes them; rows that lose bits are flagged."""
    if isinstance(path, Warpgroups) and in_float8(a.format, b.format) and a.length % 32 == 0:
        return a.folded_to_float8(flags[0]), b.folded_to_float8(flags[1])
    dtype, size = folded_dtype(a.format, b.format), min(a.format.block_size, b.format.block_size)
    return a.folded(dtype, size, flags[0]), b.folded(dtype, size, flags[1])


# ---- what a call takes ----------------------------------------------------------------------------------------------


def accepts(a, b, *, semantics="blockwise", **others) -> str | None:
    """None, or why not."""
    if not isinstance(b, BlockTensor):
        return f"b is a {type(b).__name__}"
    if not isinstance(a, BlockTensor):
        return chain_refusal(b)
    if semantics == "dequantized":
        refusal = unknown_to_decode(a.recipe) or format_refusal(a.format, a.recipe) or packing_refusal(a.format)
        return refusal or chain_refusal(b)
    for q in (a, b):
        refusal = (
            unknown_to_decode(q.recipe)
            or element_refusal(q.format.element)
            or format_refusal(q.format, q.recipe)
            or packing_refusal(q.format)
        )
        if refusal is not None:
            return refusal
    size = min(a.format.block_size, b.format.block_size)
    if not SMALLEST_BLOCK <= size <= LARGEST_BLOCK:
        return f"blocks of {size} elements: {SMALLEST_BLOCK} to {LARGEST_BLOCK} are taken"
    if method(a.format, b.format) is None:
        return f"no exact {a.format.element.name} x {b.format.element.name} product is known"
    return None


@functools.cache
def method(a: BlockFormat, b: BlockFormat) -> str | None:
    """How `exact_dot` computes a block's dot; None where none is known to be exact."""
    x, y, size = a.element, b.element, min(a.block_size, b.block_size)
    in_half = all(e.quantum >= 2.0**-24 and e.max <= 65504 and e.mantissa_bits <= 10 for e in (x, y))
    if dot_bits(x, y, size) <= 24 and in_half:
        return "float16"
    in_single = x.quantum * y.quantum >= 2.0**-149 and size * x.max * y.max <= FLOAT_MAX
    if dot_bits(x, y, size) <= 53 and in_single:
        return "float64"
    return "split" if max(half_bits(x, y, size)) <= 53 and in_single else None


@functools.cache
def folded_dtype(a: BlockFormat, b: BlockFormat) -> torch.dtype | None:
    """What holds elements of both formats times their block scales, with dots that are exact, or are rounded once and only
    then scaled by powers of two; None where nothing does."""
    size, how = min(a.block_size, b.block_size), method(a, b)
    scales = [f.scale for f in (a, b) if not f.scale.is_power_of_two]
    if how == "split" or (how == "float64" and scales) or not all(_fits_unflagged(f, size) for f in (a, b)):
        return None
    if how == "float64":
        return torch.float64
    bits = dot_bits(a.element, b.element, size) + sum(scale.mantissa_bits + 1 for scale in scales)
    return torch.bfloat16 if bits <= 24 and all(_significand(f) <= 8 for f in (a, b)) else None


def in_float8(a: BlockFormat, b: BlockFormat) -> bool:
    """Whether Hopper's float8 dots are exact: it aligns products to 13 bits behind the largest, and FP4 needs no more in
    blocks of 32 (SPEC 5.1). Scales must be powers of two, so that what is folded keeps FP4's significand."""
    return all(f.element == ELEMENT_FORMATS["e2m1"] and f.scale.is_power_of_two and f.block_size == 32 for f in (a, b))


FLOAT8_HIGHEST = 2.0**42  # scales may be this large: the sum of 2^26 dots of such blocks stays below 2^123


def _significand(format: BlockFormat) -> int:
    """Bits of an element times its block scale."""
    return format.element.mantissa_bits + 1 + (0 if format.scale.is_power_of_two else format.scale.mantissa_bits + 1)


def _fits_unflagged(format: BlockFormat, size: int) -> bool:
    """Whether every scale that is no power of two may be folded; the others are looked at when they are."""
    lowest, highest = scale_range(format, size)
    return format.scale.is_power_of_two or (format.scale.quantum >= lowest and format.scale.max <= highest)


@functools.cache
def scale_range(format: BlockFormat, size: int) -> tuple[float, float]:
    """The scales that may be folded: elements stay multiples of 2^-63, so that products are multiples of 2^-126, which are
    float32 numbers; and dots stay below 2^126."""
    element = format.element
    highest = (FOLDED_PRODUCT - ceil(log2(size))) // 2
    return 2.0**FOLDED_QUANTUM / element.quantum, 2.0**highest / (element.largest_multiple * element.quantum)


# ---- which path -----------------------------------------------------------------------------------------------------

FEW_ROWS = 64  # up to this many, decoding the weights first costs more than it saves


def chosen(a: BlockTensor, b: BlockTensor) -> Fused | Folded | Warpgroups:
    """The path of a call."""
    dtype = folded_dtype(a.format, b.format)
    if dtype is None or a.shape[:-1].numel() <= FEW_ROWS:
        return fused(a, b)
    if dtype == torch.float64:
        return Folded(64, 64, 4, 3)
    hopper = compute_capability(a.device)[0] == 9
    if hopper and a.shape[-1] % 64 == 0 and a.shape[-1] > 128:  # one tile of K alone loses a block
        if in_float8(a.format, b.format):
            return Warpgroups(4, 2, 64, 1, 4, 1)
        small = min(a.format.block_size, b.format.block_size) < 32
        return Warpgroups(2, 3 if small else 4, 64, 2, 2, 2)
    return Folded(128, 128, 8)


def fused(a: BlockTensor, b: BlockTensor) -> Fused:
    """The tiles of `product_kernel` for a call."""
    if method(a.format, b.format) != "float16":
        return Fused(32, 32, 4)
    return Fused(16, 32, 4) if a.shape[:-1].numel() <= 16 else Fused(64, 64, 4)


# ---- launches -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Folded:
    """Elements times block scales `[rows, K]`; times `powers` `[rows]` where there are such."""

    values: torch.Tensor
    powers: torch.Tensor | None = None


@dataclass(frozen=True)
class _Operand:
    """An operand as kernels read it: rows of packed codes, a scale for each block of each row, tensor scales."""

    codes: torch.Tensor
    scales: torch.Tensor
    tensor_scale: torch.Tensor | None
    direction: str
    length: int
    format: BlockFormat

    @classmethod
    def of(cls, q: BlockTensor) -> "_Operand":
        codes, scales, scale = q.packed.flatten(0, -2), q.scales, q.tensor_scale
        if q.recipe.block_rows > 1:
            scales = scales.repeat_interleave(q.recipe.block_rows, dim=-2)[..., : q.shape[-2], :]
        if scale is not None:
            scale = scale.reshape(1) if scale.numel() == 1 else scale.expand(*q.shape[:-1], 1).reshape(-1)
        codes = codes if codes.stride(-1) == 1 or codes.shape[-1] < 2 else codes.contiguous()
        direction = "none" if scale is None else q.recipe.tensor_scale_direction
        return cls(codes, scales.flatten(0, -2).contiguous(), scale, direction, q.length, q.format)

    @property
    def rows(self) -> int:
        return self.codes.shape[0]

    def no_flags(self) -> torch.Tensor:
        """Zeros: one for every so many rows."""
        return torch.zeros(triton.cdiv(self.rows, FLAG_ROWS.value), dtype=torch.int32, device=self.codes.device)

    def constants(self, prefix: str) -> dict:
        """What `product_kernel` needs to know of the format."""
        element, scale = element_constants(self.format.element), scale_constants(self.format)
        wanted = ("BITS", "MANTISSA", "MAX", "MAX_CODE", "SIGN_SHIFT", "INTEGER", "UNBIAS", "INF_CODE")
        constants = {
            "SIZE": self.format.block_size,
            "POWER": scale["POWER_OF_TWO"],
            "SCALE_MANTISSA": scale["SCALE_MANTISSA"],
            "SCALE_UNBIAS": scale["SCALE_UNBIAS"],
            "NAN": scale["SCALE_NAN"],
            **{name: element[name] for name in wanted},
        }
        return {f"{prefix}_{name}": value for name, value in constants.items()}

    def folded(self, dtype: torch.dtype, size: int, flags: torch.Tensor) -> _Folded:
        """In a dtype that holds elements times block scales, rows on 16 bytes; rows whose scales it does not are flagged."""
        if INTERPRETED and dtype == torch.bfloat16:
            dtype = torch.float32  # the interpreter's dots take no bfloat16
        geometry = Geometry(Grid((self.rows, self.length), -1, self.format.block_size, 1))
        out = torch.empty((self.rows, -(-self.length // 8) * 8), dtype=dtype, device=self.codes.device)[:, : self.length]
        codes, strides = geometry.strided(self.codes)
        _, out_strides = geometry.strided(out)
        element, scale = element_constants(self.format.element), scale_constants(self.format)
        lowest, highest = scale_range(self.format, size)
        wanted = ("BITS", "MANTISSA", "MAX", "MAX_CODE", "SIGN_SHIFT", "INTEGER", "UNBIAS", "INF_CODE")
        if geometry.blocks:
            fold_kernel[geometry.programs](
                geometry.words(codes, self.format.element.bits), self.scales, memory(out), flags, *geometry.sizes,
                codes.shape[-1], *strides, *out_strides, **geometry.constants, RUN=geometry.run(codes),
                RUN_OUT=geometry.run(out), STORED=tl.float64 if dtype == torch.float64 else STORED[dtype],
                POWER=scale["POWER_OF_TWO"], SCALE_NAN=scale["SCALE_NAN"], SCALE_MANTISSA=scale["SCALE_MANTISSA"],
                SCALE_UNBIAS=scale["SCALE_UNBIAS"], LOWEST_SCALE=ceil(log2(lowest)) + 127,
                HIGHEST_SCALE=int(log2(highest)) + 127, **{name: element[name] for name in wanted}, **geometry.options,
            )  # fmt: skip
        return _Folded(out)

    def folded_to_float8(self, flags: torch.Tensor) -> _Folded:
        """In float8 e5m2, by a power of two a row; rows whose scales lie too far apart for that are flagged. Blocks are
        whole."""
        out = torch.empty((self.rows, self.length), dtype=torch.float8_e5m2, device=self.codes.device)
        powers = torch.empty(self.rows, dtype=torch.float32, device=self.codes.device)
        aligned = self.codes.data_ptr() % 16 == 0 and self.codes.stride(0) % 4 == 0
        codes = (self.codes if aligned else self.codes.clone(memory_format=torch.contiguous_format)).view(torch.int32)
        lowest, _ = scale_range(self.format, 32)
        k_blocks = self.length // 32
        fold_float8_kernel[(self.rows,)](
            codes, self.scales, out.view(torch.int32), powers, flags, k_blocks, codes.stride(0), self.scales.stride(0),
            BLOCKS=min(256, triton.next_power_of_2(k_blocks)), LOWEST_SCALE=ceil(log2(lowest)) + 127,
            HIGHEST_SCALE=int(log2(FLOAT8_HIGHEST)) + 127, SCALE_NAN=scale_constants(self.format)["SCALE_NAN"],
            **EXACT,
        )  # fmt: skip
        return _Folded(out, powers)


@dataclass(frozen=True)
class _End:
    """What follows the sum: tensor scales, bias, output dtype."""

    pointers: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    strides: tuple[int, int, int]
    constants: dict

    @classmethod
    def of(cls, a: _Operand, b: _Operand, bias: torch.Tensor | None, out: torch.Tensor) -> "_End":
        bias = None if bias is None else bias.detach().resolve_neg()
        given = [None if bias is None else memory(bias), a.tensor_scale, b.tensor_scale]
        strides = [0 if x is None or x.numel() == 1 else x.stride(0) for x in given]
        constants = {"A_SCALE": a.direction, "B_SCALE": b.direction, "BIAS": bias is not None, "STORED": STORED[out.dtype]}
        pointers = [memory(out) if x is None else x for x in given]
        return cls(tuple(pointers), (strides[1], strides[2], strides[0]), constants)


def _programs(out: torch.Tensor, m: int, n: int) -> tuple[int]:
    return (triton.cdiv(out.numel() // out.shape[-1], m) * triton.cdiv(out.shape[-1], n),)


def _options(path: Fused | Folded) -> dict:
    return {} if INTERPRETED else {"num_warps": path.warps, "num_stages": path.stages, "enable_fp_fusion": False}


def _multiply_codes(
    x: _Operand, y: _Operand, end: _End, out, size: int, path: Fused, flags: tuple[torch.Tensor, torch.Tensor] | None
) -> None:
    product_kernel[_programs(out, path.m, path.n)](
        x.codes, x.scales, y.codes, y.scales, memory(out), *end.pointers, *(flags or (out, out)),
        x.rows, y.rows, -(-x.length // size), x.codes.shape[1], y.codes.shape[1], x.codes.stride(0), y.codes.stride(0),
        x.scales.shape[1], y.scales.shape[1], 1.0, *end.strides,
        M=path.m, N=path.n, SIZE=size, GROUP=path.group, WHOLE=x.length % size == 0, IF_FLAGGED=flags is not None,
        METHOD=method(x.format, y.format), **end.constants, **x.constants("A"), **y.constants("B"), **_options(path),
    )  # fmt: skip


def _multiply_folded(a: _Folded, b: _Folded, end: _End, out: torch.Tensor, k: int, size: int, path: Folded) -> None:
    rows, columns, stride = a.values.shape[0], b.values.shape[0], a.values.stride(0)
    folded_product_kernel[_programs(out, path.m, path.n)](
        a.values, b.values, memory(out), *end.pointers, rows, columns, k, -(-k // size), stride, 1.0, *end.strides,
        M=path.m, N=path.n, SIZE=size, GROUP=path.group, WHOLE=k % size == 0, **end.constants, **_options(path),
    )  # fmt: skip


def _multiply_by_warpgroups(
    a: _Folded, b: _Folded, end: _End, out: torch.Tensor, k: int, size: int, path: Warpgroups
) -> None:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from accel.triton._warpgroups import BOX_BYTES, box_layout, warpgroup_product_kernel

    layout, box = box_layout(8 * a.values.itemsize), BOX_BYTES // a.values.itemsize
    a_boxes = TensorDescriptor.from_tensor(a.values, [64, box], layout)
    b_boxes = TensorDescriptor.from_tensor(b.values, [path.chunk, box], layout)
    warpgroup_product_kernel[_programs(out, 64 * path.warpgroups, path.chunk * path.chunks)](
        a_boxes, b_boxes, memory(out), *end.pointers, a.powers, b.powers, a.values.shape[0], b.values.shape[0],
        triton.cdiv(k, box * path.boxes),
        *end.strides, WARPGROUPS=path.warpgroups, CHUNKS=path.chunks, CHUNK=path.chunk, SIZE=size,
        BOXES=path.boxes, STAGES=path.stages, DEPTH=path.depth, GROUP=path.group, REGISTERS=path.registers, **end.constants,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


KERNEL = Kernel("matmul", "triton", matmul, "bitexact", DEVICES, (torch.uint8, *DTYPES), None, missing, accepts)
