"""Layers that compute with block-scaled weights: `MXLinear` and `MXExperts`.

`semantics` says what a product is. `"blockwise"` and `"dequantized"` are `mxref.matmul`'s and defined to the last bit.
`"torch"` is what the tools that write quantized checkpoints run themselves: weights decoded to the input's dtype, inputs
quantized and decoded again in that dtype, products by torch, experts one after the other as in transformers. Its bits
are those of torch's kernels on this machine.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from mxref.blocks import BlockTensor, dequantize, qdq, quantize
from mxref.formats import BlockFormat, block_format, check_choice
from mxref.matmul import SEMANTICS, matmul
from mxref.moe import moe_experts
from mxref.recipes import Recipe, resolve_recipe

LAYER_SEMANTICS = ("torch", *SEMANTICS)
STORED_AS = ("linears", "stacks")


@dataclass(frozen=True)
class ExpertsWeights:
    """Block-scaled weights of one experts layer in the form `moe_experts` takes: w13 [E, 2I, H] (gate rows, then up
    rows; [E, I, H] where there is no gate), w2 [E, H, I], biases [E, 2I] and [E, H] or None. `activation`: a name in
    `mxref.moe.ACTIVATIONS`, None where it is none of them."""

    w13: BlockTensor
    w2: BlockTensor
    bias13: Tensor | None
    bias2: Tensor | None
    activation: str | None

    def computed(
        self,
        hidden_states: Tensor,
        ids: Tensor,
        weights: Tensor,
        *,
        act_format: BlockFormat | None,
        act_recipe: str | Recipe | None,
        semantics: str,
        seed: int | None,
        act_tensor_scales: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """`moe_experts` of these weights: hidden states [T, H], ids [T, k], router weights [T, k] (any float dtype) ->
        [T, H]; without `act_format` inputs stay as they are."""
        quantizing = {}
        if act_format is not None:
            quantizing = dict(act_format=act_format, act_recipe=act_recipe, act_tensor_scales=act_tensor_scales, seed=seed)
        return moe_experts(
            hidden_states,
            self.w13,
            self.w2,
            ids,
            weights.float(),
            activation=self.activation,
            bias13=self.bias13,
            bias2=self.bias2,
            semantics=semantics,
            **quantizing,
        )


@dataclass(frozen=True)
class InputScales:
    """Stored tensor scales of the inputs of an experts layer, float32 [E] each, in the activation recipe's direction:
    of the gate and the up projection, which read the same input, and of the down projection."""

    gate: Tensor
    up: Tensor
    down: Tensor

    def of_all_experts(self, direction: str) -> "InputScales":
        """One scale for all experts, that of the largest amax: what vLLM 0.33 takes."""
        largest = torch.amax if direction == "multiply" else torch.amin
        first = largest(torch.cat([self.gate, self.up]), 0).expand_as(self.gate)
        return InputScales(first, first, largest(self.down, 0).expand_as(self.down))

    def to(self, device: torch.device) -> "InputScales":
        """The same scales on `device`."""
        return InputScales(self.gate.to(device), self.up.to(device), self.down.to(device))


class _Quantized(nn.Module):
    """What both layers share: how inputs are quantized, and that `.to(device)` moves block tensors, whose dtypes stay."""

    def __init__(
        self, act_format: str | BlockFormat | None, act_recipe: str | Recipe | None, semantics: str, seed: int | None
    ):
        super().__init__()
        check_choice("semantics", semantics, LAYER_SEMANTICS)
        self.act_format = None if act_format is None else block_format(act_format)
        self.act_recipe = None if act_format is None else resolve_recipe(act_recipe, self.act_format, "act_recipe")
        self.semantics, self.seed, self.quantizes_inputs = semantics, seed, True

    @property
    def block_tensors(self) -> tuple[BlockTensor, ...]:
        """The weights."""
        raise NotImplementedError

    @property
    def bits(self) -> float:
        """Codes and scales of the weights as they are stored, in bits."""
        return sum(tensor.bits_per_element * tensor.shape.numel() for tensor in self.block_tensors)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)
        self._move(fn(torch.empty(0, dtype=torch.uint8, device=self.device)).device)
        return self

    @property
    def _quantizes(self) -> bool:
        return self.act_format is not None and self.quantizes_inputs

    def _as_torch(self, rows: Tensor, tensor_scale: Tensor | None) -> Tensor:
        """Rows [M, K] as they come out of quantization, in their dtype."""
        if not self._quantizes:
            return rows
        scale = tensor_scale if tensor_scale is not None else _own_scale(self.act_format)
        return qdq(rows, self.act_format, recipe=self.act_recipe, tensor_scale=scale, seed=self.seed)


def _own_scale(act_format: BlockFormat) -> str | None:
    """Without a stored scale every row (token) takes its own, so that none depends on its neighbours."""
    return "per_row" if act_format.tensor_scale else None


class MXLinear(_Quantized):
    """`y = x W^T + b` with W a BlockTensor [N, K] and x [..., K], quantized on every call if `act_format` is given.

    The result has x's dtype and is defined by `mxref.matmul`, or by torch with `semantics="torch"`. `act_tensor_scale`: a
    stored float32 scalar in `act_recipe`'s direction; without one an activation whose format has a tensor scale gets one
    per row (token), so no row's output depends on another's. Raises what `quantize` and `matmul` raise.

    >>> weight = quantize(torch.eye(32), "mxfp8_e4m3")
    >>> MXLinear(weight, act_format="mxfp4")(torch.full((1, 32), 3.0))[0, :2]
    tensor([3., 3.])
    """

    def __init__(
        self,
        weight: BlockTensor,
        bias: Tensor | None = None,
        *,
        act_format: str | BlockFormat | None = None,
        act_recipe: str | Recipe | None = None,
        act_tensor_scale: Tensor | None = None,
        semantics: str = "blockwise",
        seed: int | None = None,
    ):
        super().__init__(act_format, act_recipe, semantics, seed)
        self.weight, self.bias, self.act_tensor_scale = weight, bias, act_tensor_scale
        self.out_features, self.in_features = weight.shape

    @property
    def block_tensors(self) -> tuple[BlockTensor, ...]:
        """The weight."""
        return (self.weight,)

    @property
    def device(self) -> torch.device:
        """Device of the weight."""
        return self.weight.device

    def _move(self, device: torch.device) -> None:
        self.weight = self.weight.to(device)
        self.bias = None if self.bias is None else self.bias.to(device)
        self.act_tensor_scale = None if self.act_tensor_scale is None else self.act_tensor_scale.to(device)

    def forward(self, x: Tensor) -> Tensor:
        if self.semantics == "torch":
            rows = self._as_torch(x, self.act_tensor_scale)
            return linear(rows, dequantize(self.weight, x.dtype), self.bias)
        a = x
        if self._quantizes:
            scale = _own_scale(self.act_format) if self.act_tensor_scale is None else self.act_tensor_scale
            a = quantize(x, self.act_format, recipe=self.act_recipe, tensor_scale=scale, seed=self.seed)
        return matmul(a, self.weight, bias=self.bias, out_dtype=x.dtype, semantics=self.semantics)

    def extra_repr(self) -> str:
        activations = self.act_format.name if self.act_format else "not quantized"
        return f"{self.in_features}, {self.out_features}, weights={self.weight.format.name}, activations={activations}"


class MXExperts(_Quantized):
    """The experts of a mixture-of-experts layer: hidden states [T, H], ids [T, k], weights [T, k] -> [T, H].

    Takes the place of a transformers experts layer `own`, whose activation it calls with `semantics="torch"`; otherwise
    the result is defined by `mxref.moe_experts`. `input_scales`: the stored ones; without them a format with a tensor
    scale takes one per token. `stored_as`, for `"torch"`: `"linears"` (gate, up and down are three `linear` calls with
    their biases inside, as in llm-compressor) or `"stacks"` (gate and up are one product, biases are added to what is
    rounded already, as transformers' gpt-oss does). Raises ValueError for an activation that has no fixed-order version,
    or gate and up with different input scales, unless `semantics="torch"`.
    """

    def __init__(
        self,
        own: nn.Module,
        weights: ExpertsWeights,
        *,
        act_format: str | BlockFormat | None = None,
        act_recipe: str | Recipe | None = None,
        input_scales: InputScales | None = None,
        semantics: str = "torch",
        stored_as: str = "stacks",
        seed: int | None = None,
    ):
        super().__init__(act_format, act_recipe, semantics, seed)
        check_choice("stored_as", stored_as, STORED_AS)
        self.own, self.weights, self.input_scales, self.stored_as = own, weights, input_scales, stored_as
        if semantics == "torch":
            return
        if weights.activation is None:
            raise ValueError(f"semantics={semantics!r}: the activation has no fixed-order version; expected 'torch'")
        if input_scales is not None and not torch.equal(input_scales.gate, input_scales.up):
            expert = int((input_scales.gate != input_scales.up).nonzero()[0])
            given = f"{input_scales.gate[expert].item():.6g} and {input_scales.up[expert].item():.6g}"
            raise ValueError(
                f"semantics={semantics!r}: gate and up of expert {expert} have input scales {given}, of one input; "
                "expected semantics='torch', which honours both, or scales='vllm', which takes the largest"
            )

    @property
    def block_tensors(self) -> tuple[BlockTensor, ...]:
        """Both weights."""
        return self.weights.w13, self.weights.w2

    @property
    def bits(self) -> float:
        """As for every layer; gate and up have a tensor scale each, though w13 repeats it for every row."""
        scale = self.weights.w13.tensor_scale
        repeated = 0 if scale is None or scale.ndim < 3 else max(0, scale.numel() - 2 * len(scale))
        return super().bits - 32 * repeated

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.weights.w2.device

    def _move(self, device: torch.device) -> None:
        w = self.weights
        biases = (None if bias is None else bias.to(device) for bias in (w.bias13, w.bias2))
        self.weights = ExpertsWeights(w.w13.to(device), w.w2.to(device), *biases, w.activation)
        self.input_scales = None if self.input_scales is None else self.input_scales.to(device)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if self.semantics == "torch":
            return self._by_torch(hidden_states, top_k_index, top_k_weights)
        return self.weights.computed(
            hidden_states,
            top_k_index,
            top_k_weights,
            act_format=self.act_format if self._quantizes else None,
            act_recipe=self.act_recipe,
            act_tensor_scales=None if self.input_scales is None else (self.input_scales.gate, self.input_scales.down),
            semantics=self.semantics,
            seed=self.seed,
        )

    def _by_torch(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Expert after expert in ascending order, each adding its weighted rows to the sum in x's dtype."""
        out = torch.zeros_like(x)
        for expert in ids.unique().tolist():
            slot, token = (ids.T == expert).nonzero(as_tuple=True)
            y = self._one_expert(x[token], expert) * weights[token, slot, None]
            out.index_add_(0, token, y.to(out.dtype))
        return out

    def _one_expert(self, rows: Tensor, expert: int) -> Tensor:
        w, scales = self.weights, self.input_scales
        gate_scale, up_scale, down_scale = (None,) * 3
        if scales is not None:
            gate_scale, up_scale, down_scale = scales.gate[expert], scales.up[expert], scales.down[expert]
        bias13, bias2 = (None if bias is None else bias[expert] for bias in (w.bias13, w.bias2))
        w13, w2 = dequantize(w.w13[expert], rows.dtype), dequantize(w.w2[expert], rows.dtype)
        gate_rows = self._as_torch(rows, gate_scale)
        up_rows = gate_rows if gate_scale is None or gate_scale == up_scale else self._as_torch(rows, up_scale)
        if not self.own.has_gate:
            hidden = self.own.act_fn(self._product(gate_rows, w13, bias13))
        else:
            if self.stored_as == "stacks" and up_rows is gate_rows:
                gate, up = self._product(gate_rows, w13, bias13).chunk(2, dim=-1)
            else:
                biases = (None, None) if bias13 is None else bias13.chunk(2)
                parts = zip((gate_rows, up_rows), w13.chunk(2), biases)
                gate, up = (self._product(*part) for part in parts)
            hidden = self._activated(gate, up)
        return self._product(self._as_torch(hidden, down_scale), w2, bias2)

    def _activated(self, gate: Tensor, up: Tensor) -> Tensor:
        """The layer's own activation, but for gpt-oss in linears: llm-compressor multiplies from left to right there."""
        own = self.own
        if own.is_concatenated:
            return own._apply_gate(torch.cat([gate, up], -1))
        if self.stored_as == "stacks":
            return own._apply_gate(torch.stack([gate, up], -1).flatten(-2))
        gate, up = gate.clamp(max=own.limit), up.clamp(min=-own.limit, max=own.limit)
        return (up + 1) * gate * torch.sigmoid(gate * own.alpha)

    def _product(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.stored_as == "linears" or bias is None:
            return linear(rows, weight, bias)
        return rows @ weight.T + bias

    def extra_repr(self) -> str:
        experts, hidden, width = self.weights.w2.shape
        activations = self.act_format.name if self.act_format else "not quantized"
        weights = self.weights.w2.format.name
        return f"{experts} experts, {hidden}, {width}, weights={weights}, activations={activations}"


@dataclass(frozen=True)
class StoredScheme:
    """What is quantized in a model: names of formats and recipes, elements and bits (scales included) of its weights."""

    formats: tuple[str, ...]
    recipes: tuple[str, ...]
    activations: str | None
    act_recipe: str | None
    elements: int
    bits: float


def stored_scheme(model: nn.Module) -> StoredScheme | None:
    """What the layers of a loaded model hold; None where none is quantized."""
    found = [module for module in model.modules() if isinstance(module, _Quantized)]
    if not found:
        return None
    tensors = [tensor for layer in found for tensor in layer.block_tensors]
    activations = [layer for layer in found if layer.act_format is not None]
    return StoredScheme(
        formats=tuple(sorted({tensor.format.name for tensor in tensors})),
        recipes=tuple(sorted({tensor.recipe.name for tensor in tensors})),
        activations=activations[0].act_format.name if activations else None,
        act_recipe=activations[0].act_recipe.name if activations else None,
        elements=sum(tensor.shape.numel() for tensor in tensors),
        bits=sum(layer.bits for layer in found),
    )


@contextlib.contextmanager
def inputs_quantized(model: nn.Module, quantized: bool) -> Iterator[None]:
    """Within the block, the quantized layers of `model` quantize their inputs, or leave them as they are."""
    layers = [module for module in model.modules() if isinstance(module, _Quantized)]
    before = [layer.quantizes_inputs for layer in layers]
    for layer in layers:
        layer.quantizes_inputs = quantized
    try:
        yield
    finally:
        for layer, value in zip(layers, before):
            layer.quantizes_inputs = value


def gate_scale_for_both(w13: BlockTensor) -> BlockTensor:
    """w13 [E, 2I, H] with the gate's tensor scale for the up projection too: what vLLM 0.33 decodes.

    Wrong by the ratio of the two where they differ; a w13 with one tensor scale an expert, or none, is returned as it is.

    >>> w = quantize(torch.full((1, 4, 16), 6.0), "nvfp4", tensor_scale=torch.tensor([[0.5, 1.0]]))
    >>> dequantize(w)[0, :, 0].tolist(), dequantize(gate_scale_for_both(w))[0, :, 0].tolist()
    ([6.0, 6.0, 6.0, 6.0], [6.0, 6.0, 3.0, 3.0])
    """
    scale = w13.tensor_scale
    if scale is None or scale.ndim != w13.ndim or scale.shape[1] == 1:
        return w13
    return replace(w13, tensor_scale=scale[:, :1].expand_as(scale).contiguous())
