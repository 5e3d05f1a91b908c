"""vLLM's Triton kernels for whole expert layers on one GPU, as it launches them.

`bfloat16 vllm`: the fused kernel, weights decoded already. `vllm decode first`, what vllm-project/vllm#35737 did, with the
kernels of #40033: all weights are decoded in each call, tokens and the middle are quantized and dequantized, then the fused
kernel. `vllm fused decode`, which #44667 put in its place: the kernel decodes what it meets. Tile sizes are looked up by
vLLM's own function in vLLM's own files; the decoding kernel is launched without the warps and stages in them, as vLLM does.
They are what vLLM has in Triton: asked for nothing, it tries compiled kernels first (Marlin's, of weights alone).

Beside the products vLLM runs compiled ops, which need its own torch. The alignment of slots by expert is computed before the
call, so that it is NOT counted (of few tokens the fused kernel needs none). The activation and the sum over experts are
small kernels of this file. The factors of the activations' quantization come from the first routing, before the call.
Each way's first result is held against another's, given the same factors, and not timed where their cosine is below `ALIKE`.

vLLM is imported as it is installed, or from what `benchmarks/vllm_site.py` writes.
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
import triton
import triton.language as tl

from mxref.blocks import BlockTensor

ALIKE = 0.99  # the same operands in another order of sums: 0.999 and more; experts, halves or scales mixed up: far less
LARGEST = 6.0 * 448.0  # a tensor's largest magnitude over its scale, E2M1 times E4M3
SORT = "sort by expert"


Routing = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # x [T, K], expert ids [T, k], router's weights [T, k]


@dataclass(frozen=True)
class Peer:
    """A way to compute a layer. `make`: its calls, one a routing. `near`: from its scales, what the first should be like."""

    name: str
    make: Callable[[], list["Call"]]
    near: Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Call:
    """One call, what of vLLM's work it does not do, and the factors of its activations' quantization, if any."""

    run: Callable[[], torch.Tensor]
    not_counted: str
    scales: tuple[torch.Tensor, ...] = ()


def is_there() -> bool:
    return importlib.util.find_spec("vllm") is not None


def installed(*packages: str) -> tuple[str, ...]:
    """Those whose version is known."""
    found = []
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(package)
            found.append(package)
    return tuple(found)


@functools.cache
def vllm() -> SimpleNamespace:
    """vLLM's functions; ImportError where one is not there."""
    from vllm.model_executor.layers.fused_moe.experts.nvfp4_emulation_moe import invoke_fused_moe_nvfp4_emulation_kernel
    from vllm.model_executor.layers.fused_moe.fused_moe import (
        _prepare_expert_assignment,
        invoke_fused_moe_triton_kernel,
        try_get_optimal_moe_config,
    )
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
    from vllm.model_executor.layers.quantization.utils import nvfp4_emulation_utils

    return SimpleNamespace(
        product=invoke_fused_moe_triton_kernel,
        decoding_product=invoke_fused_moe_nvfp4_emulation_kernel,
        assign=_prepare_expert_assignment,
        align=moe_align_block_size,
        sizes=try_get_optimal_moe_config,
        dequantize=nvfp4_emulation_utils.dequantize_to_dtype,
        qdq=nvfp4_emulation_utils.ref_nvfp4_quant_dequant,
    )


# ---- in place of compiled ops ---------------------------------------------------------------------------------------


@triton.jit
def activate_kernel(hidden_ptr, out_ptr, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr, TILE: tl.constexpr):
    """`[slots, 2 * WIDTH]` to `[slots, WIDTH]`: silu of the first half times the second, or gpt-oss's of even and odd."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    hidden_ptr += row * 2 * WIDTH
    if INTERLEAVED:
        both = tl.program_id(1) * 2 * TILE + tl.arange(0, 2 * TILE)
        hidden = tl.load(hidden_ptr + both, mask=both < 2 * WIDTH, other=0).to(tl.float32)
        gate, up = tl.split(tl.reshape(hidden, (TILE, 2)))
        gate, up = tl.minimum(gate, 7.0), tl.minimum(tl.maximum(up, -7.0), 7.0)
        made = gate * tl.sigmoid(1.702 * gate) * (up + 1)
    else:
        gate = tl.load(hidden_ptr + column, mask=column < WIDTH, other=0).to(tl.float32)
        up = tl.load(hidden_ptr + WIDTH + column, mask=column < WIDTH, other=0).to(tl.float32)
        made = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * WIDTH + column, made, mask=column < WIDTH)


@triton.jit
def sum_kernel(parts_ptr, out_ptr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, TILE: tl.constexpr):
    """`[tokens, TOP_K, WIDTH]` to `[tokens, WIDTH]`."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.float32)
    for k in tl.static_range(TOP_K):
        total += tl.load(parts_ptr + (row * TOP_K + k) * WIDTH + column, mask=column < WIDTH, other=0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + column, total, mask=column < WIDTH)


def activated(hidden: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """`[tokens, k, 2 * width]` to `[tokens * k, width]`."""
    width = hidden.shape[-1] // 2
    out = hidden.new_empty(hidden.shape[0] * hidden.shape[1], width)
    activate_kernel[(len(out), triton.cdiv(width, 512))](hidden, out, width, interleaved, TILE=512)
    return out


def summed(parts: torch.Tensor) -> torch.Tensor:
    tokens, top_k, width = parts.shape
    out = parts.new_empty(tokens, width)
    sum_kernel[(tokens, triton.cdiv(width, 512))](parts, out, width, top_k, TILE=512)
    return out


# ---- the three ways -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights:
    """NVFP4 weights of all experts as vLLM takes them: `[E, N, K / 2]`, `[E, N, K / 16]` and `[E]`."""

    packed: torch.Tensor
    scales: torch.Tensor
    tensor_scale: torch.Tensor

    @classmethod
    def of(cls, q: BlockTensor) -> "Weights":
        scale = q.tensor_scale.broadcast_to(len(q.packed), 1, 1).flatten().contiguous()
        return cls(q.packed, q.scales.view(torch.float8_e4m3fn), scale)

    def decoded(self, dtype: torch.dtype) -> torch.Tensor:
        return vllm().dequantize(self.packed, self.scales, self.tensor_scale, dtype, 16, swizzle=False)


@dataclass(frozen=True)
class Prepared:
    """One routing with everything that is known before the call: sizes of tiles, aligned slots."""

    x: torch.Tensor
    weights: torch.Tensor
    config: dict
    aligned: tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]

    @property
    def type(self) -> tl.dtype:
        return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[self.x.dtype]

    @property
    def not_counted(self) -> str:
        return "" if self.aligned[0] is None else SORT


def prepared(routing: Routing, shapes: tuple[torch.Size, torch.Size], decodes: bool) -> Prepared:
    """`shapes`: of w13 and w2 as the kernel takes them; vLLM looks sizes up by them. `decodes`: for the kernel that does."""
    x, ids, weights = routing
    (tokens, top_k), experts = ids.shape, shapes[0][0]
    config = vllm().sizes(*shapes, top_k, None, tokens)
    ids = ids.int().contiguous()
    if decodes:
        aligned = vllm().align(ids, config["BLOCK_SIZE_M"], experts, None)
    else:
        aligned = vllm().assign(ids, config, tokens, top_k, experts, None)
    return Prepared(x.contiguous(), weights.float().contiguous(), config, aligned)


def product(given: Prepared, x: torch.Tensor, w: torch.Tensor, weights: torch.Tensor | None, top_k: int) -> torch.Tensor:
    """`[tokens, k, N]` of x `[tokens, K]`, or of `[tokens * k, K]` where `top_k` is 1, and weights `[E, N, K]`."""
    out = x.new_empty(*given.weights.shape, w.shape[1])
    vllm().product(
        x, w, out, None, None, weights, *given.aligned, weights is not None, top_k, given.config, given.type,
        use_fp8_w8a8=False, use_int8_w8a8=False, use_int8_w8a16=False, use_int4_w4a16=False, per_channel_quant=False,
    )  # fmt: skip
    return out


def decoding_product(
    given: Prepared, x: torch.Tensor, scale: torch.Tensor, w: Weights, weights: torch.Tensor | None, top_k: int
) -> torch.Tensor:
    """As `product`, of packed weights; `scale`: of the activations, which vLLM passes and does not read."""
    out = x.new_empty(*given.weights.shape, w.packed.shape[1])
    vllm().decoding_product(
        x, w.packed, out, w.scales, scale, w.tensor_scale, weights, *given.aligned, weights is not None, top_k, given.config,
        compute_type=given.type,
    )  # fmt: skip
    return out


def bfloat16(given: Prepared, w13: torch.Tensor, w2: torch.Tensor, interleaved: bool) -> torch.Tensor:
    hidden = activated(product(given, given.x, w13, None, given.weights.shape[1]), interleaved)
    return summed(product(given, hidden, w2, given.weights, 1))


def decode_first(given: Prepared, w13: Weights, w2: Weights, scales: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    plain13, plain2 = w13.decoded(given.x.dtype), w2.decoded(given.x.dtype)
    x = vllm().qdq(given.x, scales[0], 16)
    hidden = activated(product(given, x, plain13, None, given.weights.shape[1]), False)
    return summed(product(given, vllm().qdq(hidden, scales[1], 16), plain2, given.weights, 1))


def fused_decode(given: Prepared, w13: Weights, w2: Weights, scales: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x = vllm().qdq(given.x, scales[0], 16)
    hidden = activated(decoding_product(given, x, scales[0], w13, None, given.weights.shape[1]), False)
    hidden = vllm().qdq(hidden, scales[1], 16)
    return summed(decoding_product(given, hidden, scales[1], w2, given.weights, 1))


def activation_scales(given: Prepared, w13: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What vLLM multiplies tokens and the middle by before it quantizes: 448 * 6 over the largest magnitude."""
    hidden = activated(product(given, given.x, w13, None, given.weights.shape[1]), False)
    return tuple((LARGEST / part.abs().max().float()).reshape(1) for part in (given.x, hidden))


# ---- for a benchmark ------------------------------------------------------------------------------------------------


def plain_peer(plain: list[tuple], routings: list[Routing], interleaved: bool, near: Callable[[], torch.Tensor]) -> Peer:
    """`plain`: sets of decoded weights `[E, N, K]`, used in turn."""

    def make() -> list[Call]:
        calls = []
        for i, routing in enumerate(routings):
            w13, w2 = plain[i % len(plain)]
            given = prepared(routing, (w13.shape, w2.shape), decodes=False)
            calls.append(Call(partial(bfloat16, given, w13, w2, interleaved), given.not_counted))
        return calls

    return Peer("bfloat16 vllm", make, near)


def packed_peers(
    layers: list[tuple[BlockTensor, BlockTensor]], routings: list[Routing], near: Callable[..., torch.Tensor]
) -> Iterator[Peer]:
    """`layers`: sets of NVFP4 weights, silu's gate and up halves one after the other, used in turn."""
    plain = tuple(w.shape for w in layers[0])

    def make(way: Callable, decodes: bool, count: int | None) -> list[Call]:
        packed = [(Weights.of(w13), Weights.of(w2)) for w13, w2 in layers]
        decoded = packed[0][0].decoded(routings[0][0].dtype)
        scales = activation_scales(prepared(routings[0], plain, decodes=False), decoded)
        del decoded
        calls = []
        for i, routing in enumerate(routings[:count]):
            w13, w2 = packed[i % len(packed)]
            given = prepared(routing, (w13.packed.shape, w2.packed.shape) if decodes else plain, decodes)
            calls.append(Call(partial(way, given, w13, w2, scales), given.not_counted, scales))
        return calls

    yield Peer("vllm decode first", partial(make, decode_first, False, 4), near)  # one call outweighs a cache
    yield Peer("vllm fused decode", partial(make, fused_decode, True, None), near)


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """0 where either is not finite."""
    a, b = a.double().flatten(), b.double().flatten()
    found = (a @ b / (a.norm() * b.norm())).item()
    return found if found == found else 0.0


def checked(peer: Peer) -> tuple[list[Call], float]:
    """Its calls, and the cosine of the first; ValueError where its result is another layer's."""
    calls = peer.make()
    found = cosine(calls[0].run(), peer.near(*calls[0].scales))
    if found < ALIKE:
        raise ValueError(f"its result has a cosine of {found:.4f} with the layer's, not {ALIKE} and more")
    return calls, found
