"""Mixture-of-experts layers in a fixed order of operations.

Every slot (token, k) is computed on its own and the slots of a token are added in ascending order, so
a token's output does not depend on the other tokens of the batch, nor on which rank holds which expert.

Where values are rounded to a block format is data, not code: `QUANTIZATION_POINTS`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from mxref.block_codec import canonical
from mxref.blocks import BlockTensor, check_dtype, dequantize, quantize_rows
from mxref.elements import check_choice, check_float
from mxref.formats import BlockFormat, block_format
from mxref.functions import exp, gelu_tanh, relu2, sigmoid, silu, swiglu, swiglu_oai
from mxref.matmul import SEMANTICS, matmul
from mxref.recipes import Recipe
from mxref.registry import op

SCORINGS = ("softmax", "softmax_after_topk", "sigmoid")
GATE_UP_LAYOUTS = ("concatenated", "interleaved")

# The tensors that are rounded to `act_format`, in order; dropping one would go unnoticed in the output.
QUANTIZATION_POINTS = ("input", "intermediate")


@dataclass(frozen=True)
class Activation:
    """What happens between the two products. `gated`: `w13` holds gate and up rows; else `up` is None."""

    apply: Callable[[torch.Tensor, torch.Tensor | None, torch.dtype], torch.Tensor]
    gated: bool = True


def _gelu_gate(gate: torch.Tensor, up: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (gelu_tanh(gate.float()) * up.float()).to(dtype)


def _silu_rounded_twice(gate: torch.Tensor, up: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (silu(gate.float()).to(dtype).float() * up.float()).to(dtype)


ACTIVATIONS: dict[str, Activation] = {
    "silu": Activation(lambda gate, up, dtype: swiglu(gate.float(), up.float()).to(dtype)),
    "silu_rounded_twice": Activation(_silu_rounded_twice),  # as vLLM: after the activation and after the product
    "swiglu_oai": Activation(lambda gate, up, dtype: swiglu_oai(gate.float(), up.float()).to(dtype)),
    "gelu_tanh": Activation(_gelu_gate),
    "relu2": Activation(lambda x, up, dtype: relu2(x.float()).to(dtype), gated=False),
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
    exp is `mxref.functions.exp`; sums run in ascending order in float32. Raises ValueError for NaN logits or
    `k` outside 1 to E.

    >>> ids, weights = route(torch.tensor([[0.0, 3.0, 3.0]]), 2)
    >>> ids.tolist(), weights.tolist()
    ([[1, 2]], [[0.5, 0.5]])
    """
    check_float("logits", logits)
    check_choice("scoring", scoring, SCORINGS)
    if logits.ndim != 2 or not 1 <= k <= logits.shape[1]:
        raise ValueError(f"logits {list(logits.shape)}, k={k}: expected [T, E] and 1 <= k <= E")
    if logits.isnan().any():
        raise ValueError("logits hold NaN")
    logits = logits.float()

    def softmax(x):
        e = exp(x - x.amax(-1, keepdim=True))
        return e / _sum_in_order(e)

    scores = {"softmax": softmax, "softmax_after_topk": lambda x: x, "sigmoid": sigmoid}[scoring](logits)
    ranked = scores if correction_bias is None else scores + correction_bias.float()
    ids = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, ids)
    if scoring == "softmax_after_topk":
        weights = softmax(weights)
    elif renormalize:
        weights = weights / _sum_in_order(weights)
    return ids, weights * scaling_factor


def _sum_in_order(x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(x[:, :1])
    for i in range(x.shape[1]):
        total = total + x[:, i : i + 1]
    return total


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
    rounding; element (token, column) uses random word token * width + column. `semantics`: as in `matmul`;
    with `dequantized`, operands are decoded to `x`'s dtype.

    Order: quantize x -> product, alpha, bias13 -> round -> activation, round -> quantize -> product, alpha,
    bias2 -> times router weight in float32 -> from +0 add slots 0 ... k-1 in float32 -> round to `out_dtype`
    (default `x`'s). With `combine=False` returns the float32 slot terms `[T, k, H]`, for `mxref.combine`.

    Raises TypeError or ValueError, naming the argument, for dtypes, names and shapes that do not fit.

    >>> from mxref.blocks import quantize
    >>> w13, w2 = quantize(torch.ones(1, 64, 32), "mxfp4"), quantize(torch.ones(1, 32, 32), "mxfp4")
    >>> moe_experts(torch.ones(1, 32), w13, w2, torch.tensor([[0]]), torch.tensor([[1.0]])).shape
    torch.Size([1, 32])
    """
    layer = _Layer(
        x, w13, w2, topk_ids, topk_weights, activation, act_format, act_tensor_scales, act_recipe, bias13, bias2, gate_up,
        intermediate_dtype or x.dtype, apply_router_weight_on_input, round_per_slot, expert_map, seed, semantics,
    )  # fmt: skip
    check_dtype("out_dtype", out_dtype or x.dtype)
    terms = layer.slot_terms()
    return _add_slots(terms, out_dtype or x.dtype) if combine else terms


@op
def combine(slot_terms: torch.Tensor | Sequence[torch.Tensor], *, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Add slot terms: from +0, slots 0 ... k-1 in float32, then one rounding to `out_dtype`.

    `slot_terms`: float32 `[T, k, H]` from `moe_experts(combine=False)`, or a sequence of them, one a rank,
    in which a slot is +0 on every rank but the one that holds its expert. Returns `[T, H]`, the same bits however
    experts are spread. Raises TypeError or ValueError for other dtypes or shapes.

    >>> combine(torch.tensor([[[1.0], [2.0]]])).tolist()
    [[3.0]]
    """
    ranks = [slot_terms] if isinstance(slot_terms, torch.Tensor) else list(slot_terms)
    check_dtype("out_dtype", out_dtype)
    for terms in ranks:
        if not isinstance(terms, torch.Tensor) or terms.dtype != torch.float32 or terms.ndim != 3:
            raise TypeError("slot_terms: expected float32 tensors [T, k, H]")
        if terms.shape != ranks[0].shape:
            raise ValueError(f"slot_terms have shapes {list(ranks[0].shape)} and {list(terms.shape)}: expected the same")
    if not ranks:
        raise ValueError("slot_terms is empty: expected at least one rank's terms")
    merged = ranks[0]
    for terms in ranks[1:]:
        merged = merged + terms  # exact: at most one of them is not zero
    return _add_slots(merged, out_dtype)


def _add_slots(terms: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    total = torch.zeros_like(terms[:, 0])
    for slot in range(terms.shape[1]):
        total = total + terms[:, slot]
    return canonical(total.to(dtype))


@dataclass(frozen=True)
class _Layer:
    """The checked arguments of one call."""

    x: torch.Tensor
    w13: BlockTensor
    w2: BlockTensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    activation: str
    act_format: str | BlockFormat | None
    act_tensor_scales: str | tuple[torch.Tensor, torch.Tensor] | None
    act_recipe: str | Recipe | None
    bias13: torch.Tensor | None
    bias2: torch.Tensor | None
    gate_up: str
    intermediate_dtype: torch.dtype
    weight_on_input: bool
    round_per_slot: torch.dtype | None
    expert_map: torch.Tensor | None
    seed: int | None
    semantics: str

    def __post_init__(self):
        check_float("x", self.x)
        for name, known in (("activation", ACTIVATIONS), ("gate_up", GATE_UP_LAYOUTS), ("semantics", SEMANTICS)):
            check_choice(name, getattr(self, name), tuple(known))
        check_dtype("intermediate_dtype", self.intermediate_dtype)
        if self.round_per_slot is not None:
            check_dtype("round_per_slot", self.round_per_slot)
        for name in ("w13", "w2"):
            if not isinstance(getattr(self, name), BlockTensor):
                raise TypeError(f"{name} is a {type(getattr(self, name)).__name__}: expected a BlockTensor")
        parts = 2 if ACTIVATIONS[self.activation].gated else 1
        experts, hidden, width = self.w2.shape if self.w2.ndim == 3 else (0, 0, 0)
        expected = f"x [T, H], w13 [E, {parts if parts > 1 else ''}I, H], w2 [E, H, I] with activation={self.activation!r}"
        given = f"x {list(self.x.shape)}, w13 {list(self.w13.shape)}, w2 {list(self.w2.shape)}"
        if self.x.ndim != 2 or tuple(self.w13.shape) != (experts, parts * width, hidden) or self.x.shape[1] != hidden:
            raise ValueError(f"{given}: expected {expected}")
        ids, weights = self.topk_ids, self.topk_weights
        if ids.dtype not in (torch.int64, torch.int32) or weights.dtype != torch.float32:
            raise TypeError(f"topk_ids {ids.dtype}, topk_weights {weights.dtype}: expected int64 or int32, and float32")
        if ids.ndim != 2 or ids.shape != weights.shape or ids.shape[0] != self.x.shape[0] or ids.shape[1] < 1:
            raise ValueError(
                f"topk_ids {list(ids.shape)}, topk_weights {list(weights.shape)}: expected [T, k], T={len(self.x)}"
            )
        for name, bias, shape in (("bias13", self.bias13, self.w13.shape[:2]), ("bias2", self.bias2, self.w2.shape[:2])):
            if bias is not None:
                check_float(name, bias)
                if bias.shape != shape:
                    raise ValueError(f"{name} has shape {list(bias.shape)}: expected {list(shape)}")
        if self.weight_on_input and ids.shape[1] != 1:
            raise ValueError(f"apply_router_weight_on_input with k={ids.shape[1]}: expected top-1 routing")
        self._check_ids(experts)
        self._check_activation_arguments(experts)

    def _check_ids(self, experts: int) -> None:
        count = experts
        if self.expert_map is not None:
            if self.expert_map.dtype != torch.int64 or self.expert_map.ndim != 1:
                raise TypeError("expert_map: expected int64 [E_global]")
            if self.expert_map.numel() and not -1 <= int(self.expert_map.min()) <= int(self.expert_map.max()) < experts:
                raise ValueError(f"expert_map: expected local indices below E={experts}, or -1")
            count = len(self.expert_map)
        if self.topk_ids.numel() and not 0 <= int(self.topk_ids.min()) <= int(self.topk_ids.max()) < count:
            raise ValueError(
                f"topk_ids holds {int(self.topk_ids.min())} to {int(self.topk_ids.max())}: expected 0 to {count - 1}"
            )

    def _check_activation_arguments(self, experts: int) -> None:
        scales = self.act_tensor_scales
        if self.act_format is None:
            if scales is not None or self.act_recipe is not None or self.seed is not None:
                raise ValueError("act_tensor_scales, act_recipe and seed need act_format: without it nothing is quantized")
            return
        if not block_format(self.act_format).tensor_scale:
            if scales is not None:
                raise ValueError(f"act_tensor_scales: {block_format(self.act_format).name} has no tensor scale")
        elif isinstance(scales, str):
            check_choice("act_tensor_scales", scales, ("per_tensor",))
        elif scales is not None:
            if not isinstance(scales, (tuple, list)) or len(scales) != 2:
                raise ValueError("act_tensor_scales: expected None, 'per_tensor' or a pair (for x, for the intermediate)")
            for scale in scales:
                if not isinstance(scale, torch.Tensor) or tuple(scale.shape) not in ((), (1,), (experts,)):
                    raise ValueError(
                        f"act_tensor_scales: expected two float32 tensors, each a scalar or [E] with E={experts}"
                    )

    def slot_terms(self) -> torch.Tensor:
        """Weighted float32 outputs `[T, k, H]` of every slot; +0 where the expert is foreign."""
        (tokens, slots), width = self.topk_ids.shape, self.w2.shape[2]
        ids = self.topk_ids.long() if self.expert_map is None else self.expert_map[self.topk_ids.long()]
        x, weights = self.x, self.topk_weights[:, :, None]
        if self.weight_on_input:
            x, weights = (x.float() * self.topk_weights).to(x.dtype), torch.ones_like(weights)

        token_ids = torch.arange(tokens, device=x.device)
        hidden = x.new_zeros(tokens, slots, width, dtype=self.intermediate_dtype)
        rows_of = self._quantized_rows(x, token_ids, "input")
        for expert, token, slot in _slots_by_expert(ids):
            product = self._product(rows_of(token, expert), self.w13, self.bias13, expert, self.intermediate_dtype)
            hidden[token, slot] = self._activate(product)

        terms = x.new_zeros(tokens, slots, self.x.shape[1], dtype=torch.float32)
        rows_of = self._quantized_rows(hidden.flatten(0, 1), token_ids.repeat_interleave(slots), "intermediate")
        for expert, token, slot in _slots_by_expert(ids):
            product = self._product(rows_of(token * slots + slot, expert), self.w2, self.bias2, expert, torch.float32)
            terms[token, slot] = product * weights[token, slot]
        if self.round_per_slot is not None:
            terms = terms.to(self.round_per_slot).float()
        return canonical(terms)

    def _quantized_rows(
        self, x: torch.Tensor, token_ids: torch.Tensor, point: str
    ) -> Callable[[torch.Tensor, int], BlockTensor | torch.Tensor]:
        """A function of (row indices, expert) that gives those rows of `x` as the expert's product takes them."""
        if self.act_format is None:
            return lambda rows, expert: x[rows]
        scale = self.act_tensor_scales
        if block_format(self.act_format).tensor_scale and not isinstance(scale, str):
            scale = "per_row" if scale is None else scale[QUANTIZATION_POINTS.index(point)]

        def quantized(rows: torch.Tensor, scale: str | torch.Tensor | None) -> BlockTensor:
            return quantize_rows(x[rows], token_ids[rows], self.act_format, self.act_recipe, scale, self.seed)

        def as_operand(q: BlockTensor) -> BlockTensor | torch.Tensor:
            return dequantize(q, x.dtype) if self.semantics == "dequantized" else q

        if isinstance(scale, torch.Tensor) and scale.numel() > 1:
            return lambda rows, expert: as_operand(quantized(rows, scale[expert]))
        every_row = quantized(torch.arange(len(x), device=x.device), scale)
        return lambda rows, expert: as_operand(every_row[rows])

    def _product(
        self,
        rows: BlockTensor | torch.Tensor,
        weight: BlockTensor,
        bias: torch.Tensor | None,
        expert: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        bias = None if bias is None else bias[expert]
        return matmul(rows, weight[expert], bias=bias, out_dtype=dtype)

    def _activate(self, product: torch.Tensor) -> torch.Tensor:
        activation = ACTIVATIONS[self.activation]
        if not activation.gated:
            return activation.apply(product, None, self.intermediate_dtype)
        if self.gate_up == "interleaved":
            gate, up = product[:, 0::2], product[:, 1::2]
        else:
            gate, up = product.chunk(2, dim=1)
        return activation.apply(gate, up, self.intermediate_dtype)


def _slots_by_expert(ids: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """(expert, its token indices, their slots) for every local expert that a token was routed to."""
    for expert in ids.unique().tolist():
        if expert >= 0:
            token, slot = (ids == expert).nonzero(as_tuple=True)
            yield expert, token, slot
