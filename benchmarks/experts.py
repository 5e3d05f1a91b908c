"""Layers of experts: how they are held to the oracle, and how torch computes them."""

from collections.abc import Callable

import torch
from oracles import experts

import mxref
from benchmarks.contenders import as_operand, values
from mxref.blocks import BlockTensor
from mxref.comparison import difference

ORACLE_TOKENS = 1
RULES = {"mxfp4": "floor", "mxfp8_e4m3": "floor", "nvfp4": "nvidia"}


def unlike_oracle(x, w13: BlockTensor, w2: BlockTensor, ids, weights, act_format: str | None, result) -> str | None:
    """What differs in the layer's output for the first tokens: x bfloat16 [T, H], silu, gate and up concatenated."""
    act = None if act_format is None else experts.Activation(act_format, RULES[act_format])
    layer = experts.Layer(*([as_operand(w[e]) for e in range(w.shape[0])] for w in (w13, w2)), act=act)
    part = slice(0, ORACLE_TOKENS)
    terms = layer.slot_terms(x[part].float().numpy(), ids[part].numpy(), weights[part].numpy())
    return difference(result[part], values(experts.combine(terms), "bfloat16"))


def looped(x, w13: torch.Tensor, w2: torch.Tensor, ids, weights) -> Callable[[], torch.Tensor]:
    """One expert after the other in bfloat16, as transformers does it without a kernel: w13 [E, 2I, H], w2 [E, H, I]."""
    linear, silu = torch.nn.functional.linear, torch.nn.functional.silu

    def run() -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in range(len(w13)):
            tokens, slots = (ids == expert).nonzero(as_tuple=True)
            gate, up = linear(x[tokens], w13[expert]).chunk(2, -1)
            y = linear(silu(gate) * up, w2[expert]) * weights[tokens, slots, None].to(x.dtype)
            out.index_add_(0, tokens, y)
        return out

    return run


def grouped(x, w13: torch.Tensor, w2: torch.Tensor, ids, weights) -> Callable[[], torch.Tensor]:
    """All experts by torch's grouped product, on tokens sorted by expert."""
    product, silu = torch.nn.functional.grouped_mm, torch.nn.functional.silu

    def run() -> torch.Tensor:
        order = ids.flatten().argsort(stable=True)
        tokens = order // ids.shape[1]
        ends = torch.bincount(ids.flatten(), minlength=len(w13)).cumsum(0).int()
        gate, up = product(x[tokens], w13.transpose(1, 2), offs=ends).chunk(2, -1)
        y = product(silu(gate) * up, w2.transpose(1, 2), offs=ends) * weights.flatten()[order, None].to(x.dtype)
        return torch.zeros_like(x).index_add_(0, tokens, y)

    return run


def quantized_layer(w13: torch.Tensor, w2: torch.Tensor, format: str) -> tuple[BlockTensor, BlockTensor]:
    """Weights of experts, each with a tensor scale of its own where the format has one."""
    scale = "per_expert" if mxref.BLOCK_FORMATS[format].tensor_scale else None
    return tuple(mxref.quantize(weight, format, tensor_scale=scale) for weight in (w13, w2))
