"""`activate_quantize` in one pass, after one for a computed tensor scale: the activation never leaves the registers."""

import torch

from accel._recipes import unknown_to_encode
from accel.triton._launch import DEVICES, DTYPES, Activated, format_refusal, missing, packing_refusal, quantize_blocks
from mxref.blocks import BlockTensor, check_quantize
from mxref.formats import BlockFormat, block_format, check_choice
from mxref.moe import ACTIVATIONS, check_activate
from mxref.recipes import Recipe, resolve_recipe
from mxref.registry import Kernel

# mxref.moe's name to (name in _activations, alpha, limit)
NAMES = {
    "silu": ("swiglu", 0.0, 0.0),
    "silu_rounded_twice": ("silu_rounded_twice", 0.0, 0.0),
    "swiglu_oai": ("swiglu_oai", 1.702, 7.0),
    "gelu_tanh": ("gelu_tanh_gated", 0.0, 0.0),
    "relu2": ("relu2", 0.0, 0.0),
}


def activate_quantize(
    hidden: torch.Tensor,
    format: str | BlockFormat,
    *,
    activation: str = "silu",
    gate_up: str = "concatenated",
    recipe: str | Recipe | None = None,
    tensor_scale: str | torch.Tensor | None = None,
    seed: int | None = None,
) -> BlockTensor:
    """As `mxref.activate_quantize`."""
    check_activate(hidden, activation, gate_up)
    hidden = hidden.detach().resolve_neg().contiguous()
    gate, up = hidden, None
    if ACTIVATIONS[activation].gated:
        width = hidden.shape[-1] // 2
        interleaved = gate_up == "interleaved"
        gate, up = (hidden[..., ::2], hidden[..., 1::2]) if interleaved else (hidden[..., :width], hidden[..., width:])
    name, alpha, limit = NAMES[activation]
    return quantize_blocks(check_quantize(gate, format, recipe, tensor_scale, -1, seed), Activated(name, up, alpha, limit))


def accepts(hidden, format, *, activation="silu", recipe=None, **others) -> str | None:
    """None, or why not."""
    format = block_format(format)
    recipe = resolve_recipe(recipe, format)
    check_choice("activation", activation, tuple(ACTIVATIONS))
    if activation not in NAMES:
        return f"activation {activation!r} has no kernel"
    if recipe.transform is not None:
        return f"recipe {recipe.name!r} transforms what the activation gives"
    if recipe.nan == "raise":
        return f"recipe {recipe.name!r} looks for NaN in what the activation gives"
    return unknown_to_encode(recipe) or format_refusal(format, recipe) or packing_refusal(format)


KERNEL = Kernel("activate_quantize", "triton", activate_quantize, "bitexact", DEVICES, DTYPES, None, missing, accepts)
