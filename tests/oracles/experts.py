"""A mixture of experts, one token and one slot at a time, from the contract's section 7."""

from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np

from oracles import activations, mx, nvfp4, products
from oracles.elements import ELEMENTS
from oracles.philox import random_word
from oracles.products import FORMATS, Operand, operand

F = np.float32
NARROW = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def to_dtype(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values rounded to `dtype`, held in float32."""
    with np.errstate(all="ignore"):
        return np.asarray(values, F).astype(NARROW[dtype]).astype(F)


@dataclass(frozen=True)
class Activation:
    """How rows are quantized between the products: a block format, a rule or order, and the tensor scales (a13, a2)."""

    format: str
    rule: str  # an MX scale rule, or an NVFP4 order
    scales: tuple | None = None  # None: dynamic per token; else two scalars or arrays [E]
    seed: int | None = None

    def quantize(self, row: np.ndarray, stage: int, expert: int, token: int) -> Operand:
        words = None
        if self.seed is not None:
            words = np.array([random_word(self.seed, token * len(row) + c) for c in range(len(row))], dtype=object)
        if self.format != "nvfp4":
            element = ELEMENTS[FORMATS[self.format][0]]
            rounding = {} if words is None else {"rounding": "stochastic"}
            codes, scales = mx.quantize_rows(row[None], element, rule=self.rule, words=words, **rounding)
            return operand(self.format, codes, scales)
        if words is not None:
            words = words.reshape(1, -1, 16)
        vllm = self.rule.startswith("vllm")
        policies = {"inf": "saturate"} if vllm else {}
        if self.scales is None:
            q = nvfp4.quantize(row[None], self.rule, amax=nvfp4.finite_amax(row), words=words, **policies)
        else:
            scale = np.broadcast_to(np.asarray(self.scales[stage], F), (max(expert + 1, np.size(self.scales[stage])),))[
                expert
            ]
            q = nvfp4.quantize(row[None], self.rule, tensor_scale=scale, words=words, **policies)
        return operand("nvfp4", q.codes, q.scales, q.tensor_scale, "divide" if vllm else "multiply")


@dataclass(frozen=True)
class Layer:
    """`w13` and `w2` hold one Operand an expert."""

    w13: list
    w2: list
    activation: str = "silu"
    act: Activation | None = None
    bias13: np.ndarray | None = None
    bias2: np.ndarray | None = None
    interleaved: bool = False
    dtype: str = "bfloat16"
    intermediate_dtype: str | None = None
    weight_on_input: bool = False
    round_per_slot: str | None = None
    semantics: str = "blockwise"
    points: tuple = field(default=(0, 1))  # which quantization points are live: to show that each one matters

    def product(self, row: np.ndarray, weight: Operand, bias, stage: int, expert: int, token: int, dtype: str) -> np.ndarray:
        if self.act is None or stage not in self.points:
            return products.dequantized(row[None], weight.decoded(dtype), weight.block, bias)[0]
        q = self.act.quantize(row, stage, expert, token)
        if self.semantics == "dequantized":
            return products.dequantized(q.decoded(dtype), weight.decoded(dtype), weight.block, bias)[0]
        return products.blockwise(q, weight, bias)[0]

    def activate(self, y: np.ndarray, dtype: str) -> np.ndarray:
        if self.activation == "relu2":
            return to_dtype(activations.relu2(y), dtype)
        half = len(y) // 2
        gate, up = (y[0::2], y[1::2]) if self.interleaved else (y[:half], y[half:])
        with np.errstate(all="ignore"):
            if self.activation == "silu":
                return to_dtype(activations.swiglu(gate, up), dtype)
            if self.activation == "silu_rounded_twice":
                return to_dtype(to_dtype(activations.silu(gate), dtype) * up, dtype)
            if self.activation == "gelu_tanh":
                return to_dtype(activations.gelu_tanh(gate) * up, dtype)
        assert self.activation == "swiglu_oai"
        return to_dtype(activations.swiglu_oai(gate, up), dtype)

    def slot(self, row: np.ndarray, expert: int, weight: np.float32, token: int) -> np.ndarray:
        """The float32 term of one slot."""
        inner = self.intermediate_dtype or self.dtype
        if self.weight_on_input:
            row, weight = to_dtype(row * weight, self.dtype), None
        y = self.product(
            row, self.w13[expert], None if self.bias13 is None else self.bias13[expert], 0, expert, token, self.dtype
        )
        hidden = self.activate(to_dtype(y, inner), inner)
        y = self.product(
            hidden, self.w2[expert], None if self.bias2 is None else self.bias2[expert], 1, expert, token, inner
        )
        with np.errstate(all="ignore"):
            y = y if weight is None else y * weight
        return y if self.round_per_slot is None else to_dtype(y, self.round_per_slot)

    def slot_terms(self, x: np.ndarray, ids: np.ndarray, weights: np.ndarray, expert_map=None) -> np.ndarray:
        """float32 [T, k, H]; slots of foreign experts are +0."""
        out = np.zeros((*ids.shape, self.w2[0].codes.shape[0]), F)
        for t, s in np.ndindex(*ids.shape):
            expert = int(ids[t, s]) if expert_map is None else int(expert_map[ids[t, s]])
            if expert >= 0:
                out[t, s] = self.slot(np.asarray(x[t], F), expert, F(weights[t, s]), t)
        return out


def combine(terms: np.ndarray) -> np.ndarray:
    """From +0, slots in ascending order, in float32."""
    total = np.zeros((terms.shape[0], terms.shape[2]), F)
    with np.errstate(all="ignore"):
        for s in range(terms.shape[1]):
            total = total + terms[:, s]
    return total


def with_points(layer: Layer, *points: int) -> Layer:
    """The layer with only these quantization points live, the way a careless refactor drops one."""
    return replace(layer, points=points)
