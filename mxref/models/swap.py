"""Swapping the experts and linears of a transformers model for mxref's, and back.

transformers (5.x) sends every mixture-of-experts layer through one registry of expert functions; `"mxref"` is
one more entry in it. No class is patched: `quantized` puts block-scaled weights beside a layer's own, selects the
entry, and takes both away again when its `with` block ends. A dense layer is an `nn.Linear`, and the `with` block
puts an `MXLinear` in its place. Routers, embeddings and the output head stay the model's own.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mxref.blocks import BlockTensor, dequantize, quantize
from mxref.formats import BlockFormat, block_format
from mxref.models.layers import ExpertsWeights, MXLinear
from mxref.moe import ACTIVATIONS
from mxref.recipes import Recipe, resolve_recipe

IMPLEMENTATION = "mxref"  # the name under which transformers finds `experts_forward`
LAYERS = ("experts", "all")
_ATTRIBUTE = "_mxref_swapped"  # where `experts_forward` finds a layer's quantized weights


@dataclass(frozen=True)
class QuantizedWeights:
    """The quantized weights of a model by module name, and what quantizing them did.

    `bits_per_weight` counts codes, block scales and tensor scales over the quantized tensors; `snr_db` is the mean over
    weight matrices (each expert's gate, up and down on its own) of 10 log10(sum w^2 / sum (w - dequantized w)^2).
    """

    format: BlockFormat
    recipe: Recipe
    experts: Mapping[str, ExpertsWeights]
    linears: Mapping[str, BlockTensor]
    elements: int
    bits_per_weight: float
    snr_db: float


@dataclass(frozen=True)
class _Swapped:
    """What `experts_forward` needs of one layer."""

    weights: ExpertsWeights
    act_format: BlockFormat | None
    act_recipe: Recipe | str | None
    semantics: str
    seed: int | None


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of `model` that go through transformers' experts interface, by name."""
    marks = ("is_transposed", "is_concatenated", "has_bias", "has_gate", "down_proj")
    found = {name: module for name, module in model.named_modules() if all(hasattr(module, mark) for mark in marks)}
    return {name: module for name, module in found.items() if isinstance(module.down_proj, Tensor)}


def find_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The `nn.Linear` modules of `model` by name, without the output head and the routers."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    modules = dict(model.named_modules(remove_duplicate=False))

    def belongs_to_router(name: str) -> bool:
        parts = name.split(".")
        ancestors = (modules[".".join(parts[:depth])] for depth in range(1, len(parts) + 1))
        return parts[-1] in ("gate", "router", "shared_expert_gate") or any(
            type(ancestor).__name__.endswith(("Router", "Gate")) for ancestor in ancestors
        )

    return {
        name: module
        for name, module in modules.items()
        if type(module) is nn.Linear and module is not head and not belongs_to_router(name)
    }


def _layers_to_quantize(model: nn.Module, layers: str | None) -> tuple[dict[str, nn.Module], dict[str, nn.Linear]]:
    if layers not in (None, *LAYERS):
        raise ValueError(f"layers={layers!r}: expected one of {', '.join(LAYERS)}, or None for experts where there are any")
    experts = find_experts(model)
    if layers == "experts" and not experts:
        raise ValueError(
            f"layers='experts': {type(model).__name__} has no experts that go through transformers' experts interface; "
            "expected a mixture-of-experts model, or layers='all' for its linears"
        )
    linears = {} if experts and layers != "all" else find_linears(model)
    if not experts and not linears:
        raise ValueError(f"{type(model).__name__} has nothing to quantize: no experts and no nn.Linear besides its head")
    return experts, linears


def activation_name(name: str, experts: nn.Module, device: torch.device) -> str:
    """Which activation a layer computes, found by calling its own on values that tell the known ones apart.

    The values reach +-2^16, so that a clamp shows. The two sides are a few fp32 roundings apart (relative to the
    result, or to |gate * up| where the formula cancels), different activations at least 1e-4 of |gate * up|.
    """
    magnitudes = torch.exp2(torch.linspace(-6, 16, 45))
    gate = torch.cat([magnitudes, -magnitudes])
    up = gate.roll(37)
    if experts.has_gate:
        size = (gate * up).abs()
        both = torch.cat([gate, up]) if experts.is_concatenated else torch.stack([gate, up], dim=-1).flatten()
        computed = experts._apply_gate(both.to(device)[None])
    else:
        size = gate.abs()
        computed = experts.act_fn(gate.to(device)[None])
    computed = computed.detach()[0].float().cpu()
    known = {activation: how for activation, how in ACTIVATIONS.items() if how.gated == experts.has_gate}
    for activation, how in known.items():
        expected = how.apply(gate, up, torch.float32)
        if bool(((computed - expected).abs() <= 1e-5 * expected.abs() + 1e-6 * size).all()):
            return activation
    own = type(getattr(experts, "act_fn", experts)).__name__
    kind = "gated" if experts.has_gate else "not gated"
    raise ValueError(
        f"{name} ({type(experts).__name__}): its {kind} activation ({own}) is none that mxref has a fixed-order version "
        f"of; expected one of {', '.join(known)} (swiglu_oai with alpha 1.702 and limit 7)"
    )


def refuse_unsupported(name: str, experts: nn.Module) -> None:
    reasons = {
        "has_post_expert_norm": "it normalizes each expert's output",
        "_is_expert_parallel": "its experts are spread over ranks",
    }
    for attribute, reason in reasons.items():
        if getattr(experts, attribute, False):
            raise ValueError(f"{name} ({type(experts).__name__}) cannot be quantized: {reason}")


def split_gate_up(stacked: Tensor, is_concatenated: bool) -> list[Tensor]:
    """Gate and up of a weight [E, 2I, H] or bias [E, 2I]."""
    return list(stacked.chunk(2, dim=1)) if is_concatenated else [stacked[:, 0::2], stacked[:, 1::2]]


class _Tally:
    """Quantizes weight matrices one at a time (memory stays at one matrix's) and adds up bits and errors."""

    def __init__(self, format: BlockFormat, recipe: str | Recipe | None, seed: int | None):
        self.format, self.recipe, self.seed = format, resolve_recipe(recipe, format), seed
        self.elements, self.bits, self.snr = 0, 0.0, []

    def quantize(self, weight: Tensor) -> BlockTensor:
        """A matrix [N, K] with a tensor scale of its own."""
        weight = weight.detach().contiguous()
        tensor_scale = "per_tensor" if self.format.tensor_scale else None
        q = quantize(weight, self.format, recipe=self.recipe, tensor_scale=tensor_scale, seed=self.seed)
        wide = weight.double()
        signal = wide.square().sum().item()
        noise = (wide - dequantize(q).double()).square().sum().item()
        if signal:
            self.snr.append(10 * math.log10(signal / noise) if noise else math.inf)
        self.elements += weight.numel()
        self.bits += q.bits_per_element * weight.numel()
        return q

    def quantize_experts(self, weight: Tensor) -> BlockTensor:
        """Matrices [E, N, K], each with its own tensor scale."""
        return stack_matrices([self.quantize(matrix) for matrix in weight])


def stack_matrices(parts: Sequence[BlockTensor]) -> BlockTensor:
    """Matrices [N, K] as one [E, N, K], each with its own tensor scale."""
    scales = [part.tensor_scale for part in parts]
    return BlockTensor(
        packed=torch.stack([part.packed for part in parts]),
        length=parts[0].length,
        scales=torch.stack([part.scales for part in parts]),
        tensor_scale=None if scales[0] is None else torch.stack([scale.reshape(1, 1) for scale in scales]),
        format=parts[0].format,
        recipe=parts[0].recipe,
        axis=parts[0].axis,
    )


def stack_rows(gate: BlockTensor, up: BlockTensor) -> BlockTensor:
    """Gate rows above up rows [E, 2I, H]; each row keeps the tensor scale of its projection."""
    tensor_scale = None
    if gate.tensor_scale is not None:
        rows = gate.shape[1]
        tensor_scale = torch.cat([gate.tensor_scale.expand(-1, rows, 1), up.tensor_scale.expand(-1, rows, 1)], dim=1)
    return BlockTensor(
        packed=torch.cat([gate.packed, up.packed], dim=1),
        length=gate.length,
        scales=torch.cat([gate.scales, up.scales], dim=1),
        tensor_scale=tensor_scale,
        format=gate.format,
        recipe=gate.recipe,
        axis=gate.axis,
    )


def _quantize_experts(name: str, experts: nn.Module, tally: _Tally) -> ExpertsWeights:
    refuse_unsupported(name, experts)
    activation = activation_name(name, experts, experts.down_proj.device)
    first = experts.gate_up_proj if experts.has_gate else experts.up_proj
    second = experts.down_proj
    bias13 = bias2 = None
    if experts.has_bias:
        bias13 = (experts.gate_up_proj_bias if experts.has_gate else experts.up_proj_bias).detach()
        bias2 = experts.down_proj_bias.detach()
    if experts.is_transposed:
        first, second = first.transpose(1, 2), second.transpose(1, 2)
    if not experts.has_gate:
        w13 = tally.quantize_experts(first)
    else:
        gate, up = split_gate_up(first, experts.is_concatenated)
        w13 = stack_rows(tally.quantize_experts(gate), tally.quantize_experts(up))
        if bias13 is not None:
            bias13 = torch.cat(split_gate_up(bias13, experts.is_concatenated), dim=1)
    return ExpertsWeights(w13, tally.quantize_experts(second), bias13, bias2, activation)


def quantize_weights(
    model: nn.Module,
    format: str | BlockFormat,
    *,
    recipe: str | Recipe | None = None,
    layers: str | None = None,
    seed: int | None = None,
) -> QuantizedWeights:
    """Quantize the weights of `model` to `format` and leave the model as it is.

    `layers`: `"experts"`, `"all"` (experts and linears), or None (experts; the linears of a model without experts).
    Blocks run along the input dimension of every matrix. Where the format has a tensor scale, every matrix gets its
    own: per expert and projection, gate and up apart. `seed` goes to a stochastic recipe. Raises ValueError for an
    unknown format, recipe or `layers`, a model with nothing to quantize, and an experts layer that mxref cannot
    compute (an unknown activation, a norm after each expert, experts spread over ranks).

    >>> quantize_weights(nn.Sequential(nn.Linear(64, 8)), "mxfp4").bits_per_weight
    4.25
    """
    experts, linears = _layers_to_quantize(model, layers)
    tally = _Tally(block_format(format), recipe, seed)
    quantized_experts = {name: _quantize_experts(name, module, tally) for name, module in experts.items()}
    once = {id(module): tally.quantize(module.weight) for module in {id(m): m for m in linears.values()}.values()}
    return QuantizedWeights(
        format=tally.format,
        recipe=tally.recipe,
        experts=quantized_experts,
        linears={name: once[id(module)] for name, module in linears.items()},
        elements=tally.elements,
        bits_per_weight=tally.bits / tally.elements,
        snr_db=sum(tally.snr) / len(tally.snr) if tally.snr else math.nan,
    )


def experts_forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The `"mxref"` entry of transformers' experts functions: [T, H], ids [T, k], weights [T, k] -> [T, H].

    Defined by `mxref.moe_experts`: hidden states quantized once per token (an NVFP4 tensor scale per token), router
    weights applied in float32, slots added in order, one rounding to the dtype of `hidden_states`.
    """
    swapped: _Swapped | None = getattr(module, _ATTRIBUTE, None)
    if swapped is None:
        raise RuntimeError(
            f"{type(module).__name__} has no mxref weights: experts_implementation='mxref' works inside "
            "`with mxref.models.quantized(model, ...)`"
        )
    return swapped.weights.computed(
        hidden_states,
        top_k_index,
        top_k_weights,
        act_format=swapped.act_format,
        act_recipe=swapped.act_recipe,
        semantics=swapped.semantics,
        seed=swapped.seed,
    )


@contextlib.contextmanager
def experts_implementation(model: nn.Module, name: str) -> Iterator[None]:
    """Within the block, the experts of `model`, if it has any, run transformers' implementation `name`."""
    experts = find_experts(model)
    if not experts:
        yield
        return
    before = model.get_experts_implementation()
    model.set_experts_implementation(name)
    try:
        deaf = [layer for layer, module in experts.items() if module.config._experts_implementation != name]
        if deaf:
            raise ValueError(f"{type(model).__name__} does not let its experts implementation be set ({deaf[0]})")
        yield
    finally:
        model.set_experts_implementation(before)


@contextlib.contextmanager
def quantized(
    model: nn.Module,
    weights: QuantizedWeights | str | BlockFormat,
    *,
    act_format: str | BlockFormat | None = None,
    act_recipe: str | Recipe | None = None,
    semantics: str = "blockwise",
    seed: int | None = None,
) -> Iterator[nn.Module]:
    """Within the block, `model` computes its experts and linears with mxref; after it the model is as it was.

    `weights`: what `quantize_weights` returned for this model, or a format name. `act_format` None leaves activations
    as they are (weights only); any block format quantizes them on every call (`act_recipe`: its recipe). `semantics`:
    `"blockwise"` or `"dequantized"`, as in `mxref.matmul`. `seed` goes to a stochastic `act_recipe`. Raises ValueError
    for unknown names and for weights of another model, RuntimeError inside another such block.

    >>> model = nn.Sequential(nn.Linear(32, 2))
    >>> with quantized(model, "mxfp4", act_format="mxfp8_e4m3"):
    ...     print(type(model[0]).__name__)
    MXLinear
    >>> type(model[0]).__name__
    'Linear'
    """
    if not isinstance(weights, QuantizedWeights):
        weights = quantize_weights(model, weights)
    act_format = None if act_format is None else block_format(act_format)
    modules = dict(model.named_modules(remove_duplicate=False))
    foreign = [name for name in (*weights.experts, *weights.linears) if name not in modules]
    if foreign:
        raise ValueError(f"weights are of another model: {type(model).__name__} has no module {foreign[0]!r}")

    with contextlib.ExitStack() as restore:
        if weights.experts:
            from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

            ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
            for name, layer in weights.experts.items():
                experts = modules[name]
                if hasattr(experts, _ATTRIBUTE):
                    raise RuntimeError(f"{name} is already quantized: end that `with mxref.models.quantized` block first")
                setattr(experts, _ATTRIBUTE, _Swapped(layer, act_format, act_recipe, semantics, seed))
                restore.callback(delattr, experts, _ATTRIBUTE)
            restore.enter_context(experts_implementation(model, IMPLEMENTATION))
        for name, weight in weights.linears.items():
            linear = modules[name]
            restore.callback(model.set_submodule, name, linear)
            bias = None if linear.bias is None else linear.bias.detach()
            swapped = MXLinear(weight, bias, act_format=act_format, act_recipe=act_recipe, semantics=semantics, seed=seed)
            model.set_submodule(name, swapped)
        yield model
