"""Mixture-of-experts layers in a fixed order of operations.

Every slot (token, k) is computed on its own and the slots of a token are added in ascending order, so
a token's output does not depend on the other tokens of the batch, nor on which rank holds which expert.

Where values are rounded to a block format is data, not code: `QUANTIZATION_POINTS`.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from einops import rearrange

from mxref.blocks import BlockTensor, check_scale, dequantize, quantize, quantize_rows
from mxref.elements import canonical, check_dtype, check_float, check_seed, check_tensor, sum_in_order
from mxref.formats import FLOAT_MAX, BlockFormat, block_format, check_choice, check_number
from mxref.functions import exp, gelu_tanh, relu2, sigmoid, silu, swiglu, swiglu_oai
from mxref.matmul import SEMANTICS, check_bias, check_operand, matmul
from mxref.recipes import Recipe, resolve_recipe
from mxref.registry import op, op_without_gradient

SCORINGS = ("softmax", "softmax_after_topk", "sigmoid")
GATE_UP_LAYOUTS = ("concatenated", "interleaved")

# The tensors that are rounded to `act_format`, in order; dropping one would go unnoticed in the output.
QUANTIZATION_POINTS = ("input", "intermediate")


@dataclass(frozen=True)
class Activation:
    """A float32 function of gate, up and the dtype it is rounded to. Not `gated`: `w13` holds no gate, and up is None."""

    apply: Callable[[torch.Tensor, torch.Tensor | None, torch.dtype], torch.Tensor]
    gated: bool = True


ACTIVATIONS: dict[str, Activation] = {
    "silu": Activation(lambda gate, up, dtype: swiglu(gate, up)),
    "silu_rounded_twice": Activation(lambda gate, up, dtype: silu(gate).to(dtype).float() * up),  # as vLLM
    "swiglu_oai": Activation(lambda gate, up, dtype: swiglu_oai(gate, up)),
    "gelu_tanh": Activation(lambda gate, up, dtype: gelu_tanh(gate) * up),
    "relu2": Activation(lambda x, up, dtype: relu2(x), gated=False),
}


@op
def route(
    logits: torch.Tensor,
    k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    correction_bias: torch.Tensor | None = None,
    scaling_factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose `k` experts a token and their weights.

    `logits`: `[T, E]`, float32, bfloat16 or float16, widened. Returns ids int64 `[T, k]`, by descending score,
    ties to the lower id, and weights float32 `[T, k]`. `scoring`: `softmax` over all experts, `softmax_after_topk`
    over the chosen ones (gpt-oss), `sigmoid` (DeepSeek-V3). `correction_bias`: `[E]`, added to the scores for
    choosing only. `renormalize`: divide by the sum of the chosen weights. Then times `scaling_factor`.
    exp is `mxref.functions.exp`; sums run in ascending order in float32. A logit of -Inf masks
    an expert; raises ValueError where a token's largest logit is not finite, and for `k` outside 1 to E.

    >>> ids, weights = route(torch.tensor([[0.0, 3.0, 3.0]]), 2)
    >>> ids.tolist(), weights.tolist()
    ([[1, 2]], [[0.5, 0.5]])
    """
    check_float("logits", logits)
    check_choice("scoring", scoring, SCORINGS)
    if logits.ndim != 2:
        raise ValueError(f"logits has shape {list(logits.shape)}: expected [T, E]")
    check_number("k", k, 1, logits.shape[1], f"an int, 1 <= k <= E, with logits {list(logits.shape)}")
    check_number("scaling_factor", scaling_factor, -FLOAT_MAX, FLOAT_MAX, "a finite number")
    if not logits.amax(-1).isfinite().all():
        raise ValueError("logits hold NaN or Inf, or -Inf for all experts: expected a finite largest logit for each token")
    if correction_bias is not None:
        check_float("correction_bias", correction_bias)
        if correction_bias.shape != logits.shape[1:] or correction_bias.isnan().any():
            raise ValueError(f"correction_bias {list(correction_bias.shape)}: expected {list(logits.shape[1:])} without NaN")
    logits = logits.float()

    def softmax(x):
        e = exp(x - x.amax(-1, keepdim=True))
        return e / sum_in_order(e, dim=-1)[:, None]

    scores = {"softmax": softmax, "softmax_after_topk": lambda x: x, "sigmoid": sigmoid}[scoring](logits)
    ranked = scores if correction_bias is None else scores + correction_bias.float()
    ids = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, ids)
    if scoring == "softmax_after_topk":
        weights = softmax(weights)
    elif renormalize:
        weights = weights / sum_in_order(weights, dim=-1)[:, None]
    if weights.isnan().any():
        raise ValueError("logits: the chosen scores of a token are all 0 or not numbers: they have no weights")
    return ids, weights * scaling_factor


@op
def moe_experts(
    x: torch.Tensor,
    w13: BlockTensor,
    w2: BlockTensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    activation: str = "silu",
    act_format: str | BlockFormat | None = None,
    act_tensor_scales: str | tuple[torch.Tensor, torch.Tensor] | None = None,
    act_recipe: str | Recipe | None = None,
    bias13: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
    gate_up: str = "concatenated",
    intermediate_dtype: torch.dtype | None = None,
    apply_router_weight_on_input: bool = False,
    round_per_slot: torch.dtype | None = None,
    expert_map: torch.Tensor | None = None,
    combine: bool = True,
    seed: int | None = None,
    semantics: str = "blockwise",
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The experts of a mixture-of-experts layer, from routed tokens to their sum.

    `x`: `[T, H]` float32, bfloat16 or float16. `w13`: BlockTensor `[E, 2 I, H]`, gate rows then up rows or
    `gate_up="interleaved"` (`[E, I, H]` for an activation without a gate); `w2`: BlockTensor `[E, H, I]`; gate
    and up may have their own tensor scales (one a row of `w13`). `topk_ids`: integers `[T, k]`;
    `topk_weights`: float32 `[T, k]`. `bias13`: `[E, 2 I]`; `bias2`: `[E, H]`. `activation`: a name in `ACTIVATIONS`.

    `act_format`: the format that x and the intermediate are quantized to; None leaves them as they are
    (weight-only). `act_tensor_scales`: None (one a token, from its own amax), `"per_tensor"` (a token then
    depends on its neighbours), or a pair for x and the intermediate, each a float32 scalar or `[E]`, in
    `act_recipe`'s direction. `intermediate_dtype` (default `x`'s): what GEMM 1 and the activation round to.
    `apply_router_weight_on_input`: top-1 only; x times weight, rounded to `x`'s dtype, and no weight at the end.
    `round_per_slot`: dtype that each weighted slot term is rounded to. `expert_map`: int64 `[E_global]`, the
    local index of an expert or -1; slots of foreign experts are +0. `seed`: for a recipe with stochastic
    rounding; element (token, column) uses random word token * width + column, with token a row of `x`.
    `semantics`: as in `matmul`; with `dequantized`, operands are decoded to the dtype of the rows: `x`'s, then the
    intermediate's.

    Order: quantize x -> product, alpha, bias13 -> round -> activation, round -> quantize -> product, alpha,
    bias2 -> times router weight in float32 -> from +0 add slots 0 ... k-1 in float32 -> round to `out_dtype`
    (default `x`'s). With `combine=False` returns the float32 slot terms `[T, k, H]`, for `mxref.combine`.

    Raises TypeError or ValueError, naming the argument, for dtypes, names and shapes that do not fit.

    >>> w13, w2 = quantize(torch.ones(1, 64, 32), "mxfp4"), quantize(torch.ones(1, 32, 32), "mxfp4")
    >>> moe_experts(torch.ones(1, 32), w13, w2, torch.tensor([[0]]), torch.tensor([[1.0]])).shape
    torch.Size([1, 32])
    """
    scales = check_experts(
        x, w13, w2, topk_ids, topk_weights, activation, act_format, act_tensor_scales, act_recipe, bias13, bias2, gate_up,
        intermediate_dtype, apply_router_weight_on_input, round_per_slot, expert_map, seed, semantics, out_dtype,
    )  # fmt: skip
    intermediate_dtype, out_dtype = intermediate_dtype or x.dtype, out_dtype or x.dtype

    def as_operand(rows: torch.Tensor, token_ids: torch.Tensor, scale) -> BlockTensor | torch.Tensor:
        if act_format is None:
            return rows
        q = quantize_rows(rows, token_ids, act_format, act_recipe, scale, seed)
        return dequantize(q, rows.dtype) if semantics == "dequantized" else q

    ids = topk_ids.long() if expert_map is None else expert_map[topk_ids.long()]
    if apply_router_weight_on_input:
        x, topk_weights = (x.float() * topk_weights).to(x.dtype), torch.ones_like(topk_weights)
    products = _products(x[:, None], ids, w13, bias13, intermediate_dtype, as_operand, scales["input"])
    hidden = _activate(products, activation, gate_up)
    products = _products(hidden, ids, w2, bias2, torch.float32, as_operand, scales["intermediate"])
    terms = torch.where(ids[..., None] < 0, 0.0, products * topk_weights[..., None])
    if round_per_slot is not None:
        terms = terms.to(round_per_slot).float()
    terms = canonical(terms)
    return canonical(sum_in_order(terms, dim=1).to(out_dtype)) if combine else terms


def _products(values: torch.Tensor, ids: torch.Tensor, weight: BlockTensor, bias, dtype, as_operand, scale) -> torch.Tensor:
    """Products `[T, k, N]` of each slot's values `[T, k, K]`, or its token's `[T, 1, K]`, with its expert's weights.

    0 where the expert is foreign. `as_operand(rows, token ids, scale)` is called once for every row, or for every
    expert's rows where there is a scale for each.
    """
    rows = values.flatten(0, 1)
    row_ids = torch.arange(len(rows), device=rows.device)
    row_of_slot, token_ids = row_ids.reshape(values.shape[:2]).expand(ids.shape), row_ids // values.shape[1]
    per_expert = isinstance(scale, torch.Tensor) and scale.numel() > 1
    every_row = None if per_expert else as_operand(rows, token_ids, scale)
    products = rows.new_zeros(*ids.shape, weight.shape[1], dtype=dtype)
    for expert in ids[ids >= 0].unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        row = row_of_slot[token, slot]
        operand = as_operand(rows[row], token_ids[row], scale[expert]) if per_expert else every_row[row]
        expert_bias = None if bias is None else bias[expert]
        products[token, slot] = matmul(operand, weight[expert], bias=expert_bias, out_dtype=dtype)
    return products


def _activate(products: torch.Tensor, activation: str, gate_up: str) -> torch.Tensor:
    how, values = ACTIVATIONS[activation], products.float()
    rows = "(i part)" if gate_up == "interleaved" else "(part i)"
    gate, up = rearrange(values, f"... {rows} -> part ... i", part=2) if how.gated else (values, None)
    return canonical(how.apply(gate, up, products.dtype).to(products.dtype))


@op_without_gradient
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
    """The middle of an expert in one op: the activation of gate and up, and its quantization along the last axis.

    `hidden`: `[..., 2 I]` float32, bfloat16 or float16, gate then up or `gate_up="interleaved"`; `[..., I]` for an
    activation without a gate. `activation`: a name in `ACTIVATIONS`. Returns the BlockTensor `[..., I]` that `quantize`
    makes of the activation, computed in float32 and rounded to `hidden`'s dtype; `format`, `recipe`, `tensor_scale` and
    `seed` as there. Raises as `quantize`, and ValueError for unknown names or an odd last axis.

    >>> activate_quantize(torch.ones(1, 64), "mxfp4").codes[0, :3].tolist()
    [7, 7, 7]
    """
    check_activate(hidden, activation, gate_up)
    rows = _activate(hidden.detach(), activation, gate_up)
    return quantize(rows, format, recipe=recipe, tensor_scale=tensor_scale, seed=seed)


def check_activate(hidden: torch.Tensor, activation: str, gate_up: str) -> None:
    """Check what `activate_quantize` is given beside `quantize`'s arguments."""
    check_float("hidden", hidden)
    check_choice("activation", activation, tuple(ACTIVATIONS))
    check_choice("gate_up", gate_up, GATE_UP_LAYOUTS)
    if hidden.ndim < 1 or (ACTIVATIONS[activation].gated and hidden.shape[-1] % 2):
        raise ValueError(f"hidden {list(hidden.shape)}: expected [..., 2I], gate and up, with activation={activation!r}")


def check_experts(
    x, w13, w2, topk_ids, topk_weights, activation, act_format, act_tensor_scales, act_recipe, bias13, bias2, gate_up,
    intermediate_dtype, apply_router_weight_on_input, round_per_slot, expert_map, seed, semantics, out_dtype, values=True,
) -> dict[str, str | torch.Tensor | None]:  # fmt: skip
    """Check the arguments of `moe_experts`, by `values` or not what tensors hold; the scale of each quantization point."""
    check_choice("activation", activation, tuple(ACTIVATIONS))
    check_choice("gate_up", gate_up, GATE_UP_LAYOUTS)
    check_choice("semantics", semantics, SEMANTICS)
    _check_layer(x, w13, w2, bias13, bias2, activation)
    _check_routing(topk_ids, topk_weights, expert_map, len(x), w2.shape[0], values)
    scales = _activation_scales(act_format, act_tensor_scales, act_recipe, seed, w2.shape[0], values)
    check_dtype("intermediate_dtype", x.dtype if intermediate_dtype is None else intermediate_dtype)
    check_dtype("round_per_slot", x.dtype if round_per_slot is None else round_per_slot)
    check_dtype("out_dtype", x.dtype if out_dtype is None else out_dtype)
    if apply_router_weight_on_input and topk_ids.shape[1] != 1:
        raise ValueError(f"apply_router_weight_on_input with k={topk_ids.shape[1]}: expected top-1 routing")
    return scales


def _check_layer(x, w13, w2, bias13, bias2, activation: str) -> None:
    check_float("x", x)
    check_operand("w13", w13)
    check_operand("w2", w2)
    parts = 2 if ACTIVATIONS[activation].gated else 1
    experts, hidden, width = w2.shape if w2.ndim == 3 else (0, 0, 0)
    if x.ndim != 2 or x.shape[1] != hidden or w13.shape != (experts, parts * width, hidden):
        raise ValueError(
            f"x {list(x.shape)}, w13 {list(w13.shape)}, w2 {list(w2.shape)}: expected x [T, H], "
            f"w13 [E, {'2I' if parts == 2 else 'I'}, H], w2 [E, H, I] with activation={activation!r}"
        )
    check_bias("bias13", bias13, w13)
    check_bias("bias2", bias2, w2)


def _check_routing(ids, weights, expert_map, tokens: int, experts: int, values: bool) -> None:
    check_tensor("topk_ids", ids, torch.int64, torch.int32)
    check_tensor("topk_weights", weights, torch.float32)
    if ids.ndim != 2 or ids.shape != weights.shape or len(ids) != tokens or ids.shape[1] < 1:
        raise ValueError(f"topk_ids {list(ids.shape)}, topk_weights {list(weights.shape)}: expected [T, k], T={tokens}")
    if expert_map is not None:
        check_tensor("expert_map", expert_map, torch.int64)
        if expert_map.ndim != 1:
            raise ValueError(f"expert_map has shape {list(expert_map.shape)}: expected [E_global]")
    count = experts if expert_map is None else len(expert_map)
    if values and expert_map is not None:
        _check_range("expert_map", expert_map, -1, experts, f"local indices below E={experts}, or -1")
    if values:
        _check_range("topk_ids", ids, 0, count, f"0 to {count - 1}")


def _check_range(argument: str, ids: torch.Tensor, lowest: int, end: int, expected: str) -> None:
    if ids.numel() and not lowest <= int(ids.min()) <= int(ids.max()) < end:
        raise ValueError(f"{argument} holds {int(ids.min())} to {int(ids.max())}: expected {expected}")


def _activation_scales(format, scales, recipe, seed, experts: int, values: bool) -> dict[str, str | torch.Tensor | None]:
    """What `quantize_rows` takes as the tensor scale at each quantization point."""
    if format is None:
        if not (scales is None and recipe is None and seed is None):
            raise ValueError("act_tensor_scales, act_recipe and seed need act_format: without it nothing is quantized")
        return dict.fromkeys(QUANTIZATION_POINTS)
    format = block_format(format, "act_format")
    recipe = resolve_recipe(recipe, format, "act_recipe")
    check_seed(seed, recipe.rounding)
    if recipe.block_rows > 1:
        raise ValueError(f"act_recipe {recipe.name!r} has blocks of {recipe.block_rows} rows: tokens may not share scales")
    if scales is None:
        return dict.fromkeys(QUANTIZATION_POINTS, "per_row" if format.tensor_scale else None)
    if not format.tensor_scale:
        raise ValueError(f"act_tensor_scales is given: {format.name} has no tensor scale")
    if isinstance(scales, str):
        check_choice("act_tensor_scales", scales, ("per_tensor",))
        return dict.fromkeys(QUANTIZATION_POINTS, scales)
    if not isinstance(scales, (tuple, list)) or len(scales) != len(QUANTIZATION_POINTS):
        raise ValueError(f"act_tensor_scales is a {type(scales).__name__}: expected 'per_tensor' or a pair of tensors")
    for scale in scales:
        check_scale("act_tensor_scales", scale) if values else check_tensor("act_tensor_scales", scale, torch.float32)
        if tuple(scale.shape) not in ((), (1,), (experts,)):
            raise ValueError(f"act_tensor_scales has shape {list(scale.shape)}: expected a scalar or [E] with E={experts}")
    return dict(zip(QUANTIZATION_POINTS, scales))


@op
def combine(slot_terms: torch.Tensor | Sequence[torch.Tensor], *, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Add slot terms: from +0, slots 0 ... k-1 in float32, then one rounding to `out_dtype`.

    `slot_terms`: float32 `[T, k, H]` from `moe_experts(combine=False)`, or a sequence of them, one a rank,
    in which a slot is +0 on every rank but the one that holds its expert. Returns `[T, H]`, the same bits however
    experts are spread. Raises TypeError or ValueError for other dtypes or shapes.

    >>> combine(torch.tensor([[[1.0], [2.0]]])).tolist()
    [[3.0]]
    """
    ranks = list(slot_terms) if isinstance(slot_terms, Sequence) else [slot_terms]
    check_dtype("out_dtype", out_dtype)
    for terms in ranks:
        check_tensor("slot_terms", terms, torch.float32, others=", or a sequence of them")
        if terms.ndim != 3 or terms.shape != ranks[0].shape:
            raise ValueError(f"slot_terms has shape {list(terms.shape)}: expected [T, k, H] like {list(ranks[0].shape)}")
    if not ranks:
        raise ValueError("slot_terms is empty: expected at least one rank's terms")
    merged = functools.reduce(torch.add, ranks)  # exact: at most one of them is not zero
    return canonical(sum_in_order(merged, dim=1).to(out_dtype))
