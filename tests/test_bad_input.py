"""Bad input is refused before anything is written, and the message names the argument, what was given and what is accepted.

One table. A row takes the valid call of an op, changes some arguments, and says which error must come and which words
its message must hold: TypeError for a value of the wrong type, ValueError for a wrong value and for a name that is not in
a table. After every refused call the inputs still have the bits they had.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from bits import assert_same_bits
from kernel_scripts import says_the_same

import mxref
from mxref import functions

ELEMENTS = ("e2m1", "e2m3", "e3m2", "e4m3", "e5m2", "int8", "e8m0")
FORMATS = ("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2", "mxint8", "nvfp4")
MX_RECIPES = ("ocp", "ocp_even", "ocp_ceil", "ocp_rceil", "ocp_mse", "quark_even")
NVFP4_RECIPES = ("nvidia", "exact", "nvidia_four_over_six", "nvidia_16x16", "vllm_torch", "vllm_triton")
RECIPES = MX_RECIPES + NVFP4_RECIPES
ROUNDINGS = ("nearest_even", "toward_zero", "ties_away", "ties_toward_zero", "away_from_zero", "stochastic")
OVERFLOWS = ("saturate", "special")
LAYOUTS = ("linear", "tile_128x4", "ggml_mxfp4", "interleaved")
TENSOR_SCALES = ("none", "per_tensor", "per_row", "per_expert")
GRADIENTS = ("straight_through", "clipped")
SEMANTICS = ("blockwise", "dequantized")
SCORINGS = ("softmax", "softmax_after_topk", "sigmoid")
ACTIVATIONS = ("silu", "silu_rounded_twice", "swiglu_oai", "gelu_tanh", "relu2")
GATE_UPS = ("concatenated", "interleaved")
FLOATS = ("float32", "bfloat16", "float16")


def ramp(*shape: int) -> torch.Tensor:
    """float32 values of both signs, none zero."""
    count = math.prod(shape)
    return ((torch.arange(count) - count / 2 + 0.25) / 8).reshape(shape)


def codes_of(*shape: int) -> torch.Tensor:
    return (torch.arange(math.prod(shape)) % 16).to(torch.uint8).reshape(shape)


def scale_codes(*shape: int, code: int = 0x38) -> torch.Tensor:
    return torch.full(shape, code, dtype=torch.uint8)


def named(recipe: str, **fields) -> mxref.Recipe:
    return replace(mxref.RECIPES[recipe], name="mine", **fields)


def mx(*shape: int, **arguments) -> mxref.BlockTensor:
    return mxref.quantize(ramp(*shape), "mxfp4", **arguments)


def layer() -> dict:
    ids, weights = torch.tensor([[0], [1]]), torch.ones(2, 1)
    return dict(x=ramp(2, 32), w13=mx(2, 64, 32), w2=mx(2, 32, 32), topk_ids=ids, topk_weights=weights)


# A valid call of every op and of every record that checks what it is made of.
VALID: dict[str, Callable[[], dict]] = {
    "encode": lambda: dict(x=ramp(2, 32), element="e2m1"),
    "decode": lambda: dict(codes=codes_of(2, 32), element="e2m1"),
    "pack": lambda: dict(codes=codes_of(2, 32), bits=4),
    "unpack": lambda: dict(packed=codes_of(2, 16), bits=4, count=32),
    "to_layout": lambda: dict(tensor=codes_of(2, 32), layout="tile_128x4"),
    "from_layout": lambda: dict(data=codes_of(2, 32), layout="linear", shape=(2, 32)),
    "from_codes": lambda: dict(
        codes=codes_of(2, 32), scales=scale_codes(2, 2), tensor_scale=torch.ones(2, 1), format="nvfp4", recipe="nvidia"
    ),
    "BlockTensor": lambda: dict(
        packed=codes_of(2, 16),
        length=32,
        scales=scale_codes(2, 2),
        tensor_scale=torch.ones(2, 1),
        format="nvfp4",
        recipe="nvidia",
    ),
    "quantize": lambda: dict(x=ramp(2, 32), format="nvfp4"),
    "dequantize": lambda: dict(q=mx(2, 32), dtype=torch.float32),
    "qdq": lambda: dict(x=ramp(2, 32), format="nvfp4"),
    "explain": lambda: dict(x=ramp(16), format="nvfp4"),
    "exp": lambda: dict(x=ramp(2, 8)),
    "sigmoid": lambda: dict(x=ramp(2, 8)),
    "silu": lambda: dict(x=ramp(2, 8)),
    "gelu_tanh": lambda: dict(x=ramp(2, 8)),
    "relu2": lambda: dict(x=ramp(2, 8)),
    "swiglu": lambda: dict(gate=ramp(2, 8), up=ramp(2, 8)),
    "swiglu_oai": lambda: dict(gate=ramp(2, 8), up=ramp(2, 8)),
    "block_dot": lambda: dict(a_codes=codes_of(3, 32), b_codes=codes_of(2, 32), a_element="e2m1", b_element="e2m1"),
    "matmul": lambda: dict(a=ramp(3, 64), b=mx(2, 64), bias=ramp(2)),
    "route": lambda: dict(logits=ramp(3, 8), k=2),
    "moe_experts": layer,
    "activate_quantize": lambda: dict(hidden=ramp(2, 64), format="nvfp4"),
    "combine": lambda: dict(slot_terms=ramp(2, 3, 8)),
    "ElementFormat": lambda: dict(name="mine", exponent_bits=2, mantissa_bits=1, bias=1),
    "BlockFormat": lambda: dict(
        name="mine", element=mxref.ELEMENT_FORMATS["e2m1"], scale=mxref.ELEMENT_FORMATS["e8m0"], block_size=32
    ),
    "Recipe": lambda: dict(name="mine", scale_rule="floor"),
    "Hadamard": lambda: dict(size=4, signs=(1, -1, 1, 1)),
}
RECORDS = ("from_codes", "BlockTensor", "ElementFormat", "BlockFormat", "Recipe", "Hadamard")
OPS = [name for name in VALID if name not in RECORDS]
ACTIVATION_FUNCTIONS = ("exp", "sigmoid", "silu", "gelu_tanh", "relu2", "swiglu", "swiglu_oai")


def function_of(op: str) -> Callable:
    if op == "from_codes":
        return mxref.BlockTensor.from_codes
    return getattr(functions if op in ACTIVATION_FUNCTIONS else mxref, op)


@dataclass(frozen=True)
class Bad:
    """A valid call of `op` with `changes`. A changed value that is a function without arguments is called for the value."""

    op: str
    changes: dict
    error: type[Exception]
    words: tuple[str, ...]
    id: str = ""

    def arguments(self) -> dict:
        return VALID[self.op]() | {k: v() if callable(v) and not isinstance(v, type) else v for k, v in self.changes.items()}


def bad(op: str, error: type[Exception], *words, id: str = "", **changes) -> Bad:
    flat = tuple(w for word in words for w in (word if isinstance(word, tuple) else (word,)))
    return Bad(op, changes, error, flat, id)


TABLE: list[Bad] = []

# ------------------------------------------------------------------------------------------ dtypes and types

FLOAT_ARGUMENTS = {op: ("x",) for op in ("encode", "quantize", "qdq", "explain", *ACTIVATION_FUNCTIONS[:5])}
FLOAT_ARGUMENTS |= {"swiglu": ("gate", "up"), "swiglu_oai": ("gate", "up"), "matmul": ("a", "bias"), "route": ("logits",)}
FLOAT_ARGUMENTS |= {"moe_experts": ("x",), "activate_quantize": ("hidden",)}
NOT_FLOATS = ("float64", "int32", "int64", "uint8", "bool", "complex64", "float8_e4m3fn", "float8_e5m2")
for op, names in FLOAT_ARGUMENTS.items():
    for name in names:
        for dtype in NOT_FLOATS:
            change = lambda op=op, name=name, dtype=dtype: VALID[op]()[name].to(getattr(torch, dtype))  # noqa: E731
            TABLE.append(bad(op, TypeError, name, dtype, FLOATS, id=dtype, **{name: change}))
        for kind, value in {"list": [1.0, 2.0], "ndarray": np.ones((2, 32), np.float32), "float": 1.0}.items():
            TABLE.append(bad(op, TypeError, name, kind, "torch.Tensor", id=kind, **{name: value}))

CODE_ARGUMENTS = {"decode": ("codes",), "pack": ("codes",), "unpack": ("packed",), "to_layout": ("tensor",)}
CODE_ARGUMENTS |= {
    "block_dot": ("a_codes", "b_codes"),
    "from_codes": ("codes", "scales"),
    "BlockTensor": ("packed", "scales"),
}
for op, names in CODE_ARGUMENTS.items():
    for name in names:
        for dtype in ("int8", "int32", "int64", "float32", "bool", "float8_e8m0fnu"):
            change = lambda op=op, name=name, dtype=dtype: VALID[op]()[name].to(getattr(torch, dtype))  # noqa: E731
            TABLE.append(bad(op, TypeError, name, dtype, "torch.uint8", id=dtype, **{name: change}))
        TABLE.append(bad(op, TypeError, name, "list", "torch.uint8", id="list", **{name: [1, 2]}))
        TABLE.append(bad(op, TypeError, name, "ndarray", "torch.uint8", id="ndarray", **{name: np.zeros(2, np.uint8)}))

DTYPE_ARGUMENTS = {"dequantize": ("dtype",), "matmul": ("out_dtype",), "combine": ("out_dtype",)}
DTYPE_ARGUMENTS |= {"moe_experts": ("out_dtype", "intermediate_dtype", "round_per_slot")}
for op, names in DTYPE_ARGUMENTS.items():
    for name in names:
        for value in (torch.float64, torch.int32, torch.float8_e4m3fn, "float32", np.float32, 0, False):
            TABLE.append(bad(op, TypeError, name, str(value).split("'")[-1], FLOATS, id=str(value), **{name: value}))

TABLE += [
    bad("dequantize", TypeError, "q", "Tensor", "BlockTensor", q=lambda: ramp(2, 32)),
    bad("dequantize", TypeError, "q", "list", "BlockTensor", q=[1.0]),
    bad("matmul", TypeError, "b", "Tensor", "BlockTensor", b=lambda: ramp(2, 64)),
    bad("moe_experts", TypeError, "w13", "Tensor", "BlockTensor", w13=lambda: ramp(2, 64, 32)),
    bad("moe_experts", TypeError, "w2", "NoneType", "BlockTensor", w2=None),
    bad("moe_experts", TypeError, "bias13", "list", "torch.Tensor", bias13=[1.0]),
    bad("moe_experts", TypeError, "bias2", "int64", FLOATS, bias2=lambda: torch.ones(2, 32, dtype=torch.int64)),
    bad("moe_experts", TypeError, "topk_ids", "float32", "int64", "int32", topk_ids=lambda: torch.zeros(2, 1)),
    bad("moe_experts", TypeError, "topk_ids", "bool", "int64", topk_ids=lambda: torch.zeros(2, 1, dtype=torch.bool)),
    bad("moe_experts", TypeError, "topk_weights", "bfloat16", "float32", topk_weights=lambda: torch.ones(2, 1).bfloat16()),
    bad("moe_experts", TypeError, "topk_weights", "float64", "float32", topk_weights=lambda: torch.ones(2, 1).double()),
    bad("combine", TypeError, "slot_terms", "float32", slot_terms=lambda: [ramp(2, 3, 8), [1.0]]),
    bad("encode", TypeError, "x", id="sparse", x=lambda: ramp(2, 32).to_sparse()),
    bad("quantize", TypeError, "x", id="sparse", x=lambda: ramp(2, 32).to_sparse()),
    bad("decode", TypeError, "codes", id="sparse", codes=lambda: codes_of(2, 32).to_sparse()),
    bad("to_layout", TypeError, "tensor", "list", layout="linear", tensor=[1]),
    bad("to_layout", TypeError, "tensor", "list", layout="interleaved", tensor=[1]),
    bad("from_layout", TypeError, "data", "list", data=[1, 2]),
    bad("from_layout", TypeError, "data", "float32", "uint8", id="tile float32", layout="tile_128x4", shape=(2, 4),
        data=lambda: torch.zeros(512)),
    bad("moe_experts", TypeError, "topk_ids", "list", topk_ids=[[0], [1]]),
    bad("moe_experts", TypeError, "topk_weights", "list", topk_weights=[[1.0], [1.0]]),
    bad("moe_experts", TypeError, "expert_map", "list", expert_map=[0, 1]),
    bad("moe_experts", TypeError, "expert_map", "int32", "int64", expert_map=lambda: torch.zeros(2, dtype=torch.int32)),
    bad("moe_experts", ValueError, "expert_map", "[1, 2]", "[E_global]", expert_map=lambda: torch.tensor([[0, 1]])),
    bad("combine", TypeError, "slot_terms", "bfloat16", "float32", slot_terms=lambda: torch.ones(2, 3, 8).bfloat16()),
    bad("combine", TypeError, "slot_terms", "int", slot_terms=5),
]  # fmt: skip

# ------------------------------------------------------------------------------------------ names

for name in ("e9m9", "E2M1", "mxfp4", None, 4, ["e2m1"], torch.float8_e4m3fn):
    for op in ("encode", "decode"):
        TABLE.append(bad(op, ValueError, "element", repr(name), ELEMENTS, element=name))
for name in ("fp4", "MXFP4", "e2m1", None, 32, ["mxfp4"]):
    for op in ("quantize", "qdq", "explain", "from_codes"):
        TABLE.append(bad(op, ValueError, "format", repr(name), FORMATS, format=name))
for name in ("OCP", "mx", 5, ["ocp"]):
    for op in ("quantize", "qdq", "explain", "from_codes"):
        TABLE.append(bad(op, ValueError, "recipe", repr(name), RECIPES, recipe=name))
CHOICES = [
    ("encode", "rounding", ROUNDINGS),
    ("encode", "overflow", OVERFLOWS),
    ("to_layout", "layout", LAYOUTS),
    ("from_layout", "layout", LAYOUTS),
    ("qdq", "gradient", GRADIENTS),
    ("matmul", "semantics", SEMANTICS),
    ("route", "scoring", SCORINGS),
    ("moe_experts", "activation", ACTIVATIONS),
    ("moe_experts", "gate_up", GATE_UPS),
    ("moe_experts", "semantics", SEMANTICS),
    ("Recipe", "scale_rule", ("floor", "even", "even_one_bit", "ceil", "rceil", "rfloor", "amax")),
    (
        "Recipe",
        "encode_order",
        ("nvidia", "exact", "vllm_torch", "vllm_triton", "compressed_tensors", "modelopt", "torchao"),
    ),
    ("Recipe", "amax_dtype", ("float32", "input")),
    ("Recipe", "decode_order", ("block_times_tensor", "block_over_tensor")),
    ("Recipe", "rounding", ROUNDINGS),
    ("Recipe", "overflow", OVERFLOWS),
    ("Recipe", "nan", ("poison", "raise")),
    ("Recipe", "inf", ("nan", "saturate")),
    ("Recipe", "zero_block", ("zero_code", "one")),
    ("Recipe", "negative_zero", ("keep", "drop_quotient", "drop")),
    ("Recipe", "search", ("none", "mse", "four_over_six_mse", "four_over_six_mae", "four_over_six_max")),
    ("ElementFormat", "kind", ("float", "integer")),
    ("ElementFormat", "specials", ("none", "nan", "ieee")),
]
for op, argument, known in CHOICES:
    for name in ("nearest", "", None, 1, ["floor"]):
        TABLE.append(bad(op, ValueError, argument, repr(name), known, **{argument: name}))
for op in ("quantize", "qdq", "explain"):
    TABLE.append(bad(op, ValueError, "tensor_scale", "'per_token'", TENSOR_SCALES, tensor_scale="per_token"))
    TABLE.append(
        bad(
            op,
            ValueError,
            "tensor_scale",
            "'per_token'",
            TENSOR_SCALES,
            tensor_scale="per_token",
            format="mxfp4",
            id="mxfp4",
        )
    )
TABLE += [
    bad("block_dot", ValueError, "a_element", "'e9m9'", ELEMENTS, a_element="e9m9"),
    bad("block_dot", ValueError, "b_element", "'e9m9'", ELEMENTS, b_element="e9m9"),
    bad("moe_experts", ValueError, "act_format", "'fp4'", FORMATS, act_format="fp4"),
    bad("moe_experts", ValueError, "act_recipe", "'mx'", RECIPES, act_format="mxfp4", act_recipe="mx"),
    bad("moe_experts", ValueError, "act_tensor_scales", "'per_row'", "per_tensor",
        act_format="nvfp4", act_tensor_scales="per_row"),
    bad("from_codes", TypeError, "tensor_scale", "str", "float32", tensor_scale="per_tensor"),
]  # fmt: skip

# ------------------------------------------------------------------------------------------ recipes that do not fit

for op in ("quantize", "qdq", "explain", "from_codes"):
    mine = {"tensor_scale": None}
    for recipe in MX_RECIPES:
        TABLE.append(bad(op, ValueError, f"'{recipe}'", "'nvfp4'", NVFP4_RECIPES, recipe=recipe, **mine))
    for recipe in NVFP4_RECIPES:
        TABLE.append(
            bad(op, ValueError, f"'{recipe}'", "'mxfp8_e4m3'", MX_RECIPES, recipe=recipe, format="mxfp8_e4m3", **mine)
        )
    TABLE += [
        bad(op, ValueError, "'mine'", "'mxfp4'", "mxfp8_e4m3", id="other format",
            recipe=lambda: named("ocp", format="mxfp8_e4m3"), format="mxfp4", **mine),
        bad(op, ValueError, "'mine'", "special", "e2m1", id="special",
            recipe=lambda: named("nvidia", overflow="special"), **mine),
        bad(op, ValueError, "'mine'", "special", "int8", id="special int8",
            recipe=lambda: named("ocp", overflow="special"), format="mxint8", **mine),
    ]  # fmt: skip
    TABLE.append(bad(op, ValueError, "scale_max", "448.5", "448", recipe=lambda: named("nvidia", scale_max=448.5)))
    TABLE.append(bad(op, ValueError, "scale_min", "449.0", "448", recipe=lambda: named("nvidia", scale_min=449.0)))
    TABLE.append(
        bad(op, ValueError, "'torchao_floor'", "'mxint8'", "mxfp4", recipe="torchao_floor", format="mxint8", **mine)
    )
for value in (0.0, -1.0, math.nan, math.inf):
    for name in ("scale_max", "scale_min", "element_max"):
        TABLE.append(bad("Recipe", ValueError, name, str(value), "> 0", scale_rule="amax", **{name: value}))

TABLE += [
    bad("moe_experts", ValueError, "'nvidia'", "'mxfp4'", MX_RECIPES, act_format="mxfp4", act_recipe="nvidia"),
    bad("quantize", ValueError, "'nvidia_16x16'", "16 rows", "axis", x=lambda: ramp(16), recipe="nvidia_16x16"),
    bad("quantize", ValueError, "'nvidia_16x16'", "16 rows", "axis", x=lambda: ramp(16, 2, 16), axis=0,
        recipe="nvidia_16x16"),
    bad("quantize", ValueError, "x", "32", "64", id="transform",
        recipe=lambda: named("nvidia", transform=mxref.Hadamard(64))),
    bad("explain", ValueError, "'nvidia_16x16'", "rows", recipe="nvidia_16x16"),
    bad("explain", ValueError, "'mine'", "transforms", id="transform",
        recipe=lambda: named("nvidia", transform=mxref.Hadamard(4))),
    bad("quantize", ValueError, "per_expert", "[32]", "[E, ...]", x=lambda: ramp(32), tensor_scale="per_expert"),
    bad("quantize", ValueError, "tensor_scale", "block_rows=16", x=lambda: ramp(32, 32), recipe="nvidia_16x16",
        tensor_scale="per_row"),
    bad("Recipe", ValueError, "search", "four_over_six_mse", "floor", search="four_over_six_mse"),
    bad("Recipe", ValueError, "search", "mse", "amax", search="mse", scale_rule="amax"),
    bad("Recipe", ValueError, "exact", "nearest_even", scale_rule="amax", encode_order="exact", rounding="stochastic"),
    bad("Recipe", ValueError, "block_rows", "0", "1", block_rows=0),
    bad("Recipe", ValueError, "block_rows", "-16", "1", block_rows=-16),
    bad("Recipe", TypeError, "block_rows", "16.0", "int", block_rows=16.0),
    bad("Recipe", TypeError, "block_rows", "True", "int", block_rows=True),
    bad("Recipe", TypeError, "transform", "str", transform="hadamard"),
    bad("Recipe", TypeError, "scale_max", "'256'", "number", scale_rule="amax", scale_max="256"),
    bad("Recipe", ValueError, "scale_min", "exact", scale_rule="amax", encode_order="exact", scale_min=0.5),
    bad("Recipe", ValueError, "amax_dtype", "compressed_tensors", scale_rule="amax", amax_dtype="input"),
    bad("Recipe", ValueError, "amax_dtype", "transform", scale_rule="amax", amax_dtype="input",
        encode_order="compressed_tensors", transform=lambda: mxref.Hadamard(4)),
    bad("Hadamard", ValueError, "size", "5", "4", "16", "64", size=5, signs=()),
    bad("Hadamard", ValueError, "size", "'4'", "4", "16", "64", size="4", signs=()),
    bad("Hadamard", ValueError, "size", "4.0", "4", "16", "64", size=4.0),
    bad("Hadamard", ValueError, "signs", "(1, 1)", "4", "+1 or -1", signs=(1, 1)),
    bad("Hadamard", ValueError, "signs", "(1, 1, 1, 0)", "4", "+1 or -1", signs=(1, 1, 1, 0)),
    bad("Hadamard", ValueError, "signs", "5", signs=5),
    bad("BlockFormat", ValueError, "block_size", "0", "1", block_size=0),
    bad("BlockFormat", ValueError, "block_size", "-32", "1", block_size=-32),
    bad("BlockFormat", TypeError, "block_size", "32.0", "int", block_size=32.0),
    bad("BlockFormat", TypeError, "block_size", "'32'", "int", block_size="32"),
    bad("BlockFormat", ValueError, "scale", "e2m1", "NaN", scale=lambda: mxref.ELEMENT_FORMATS["e2m1"]),
    bad("BlockFormat", ValueError, "scale", "int8", "powers of two", scale=lambda: mxref.ELEMENT_FORMATS["int8"]),
    bad("BlockFormat", ValueError, "element", "e8m0", "signed", element=lambda: mxref.ELEMENT_FORMATS["e8m0"]),
    bad("BlockFormat", ValueError, "tensor scale", "mantissa", tensor_scale=True),
    bad("BlockFormat", TypeError, "element", "str", "ElementFormat", element="e2m1"),
    bad("BlockFormat", TypeError, "scale", "str", "ElementFormat", scale="e8m0"),
    bad("ElementFormat", ValueError, "exponent_bits", ">= 0", exponent_bits=-1),
    bad("ElementFormat", ValueError, "mantissa_bits", ">= 0", mantissa_bits=-1),
    bad("ElementFormat", ValueError, "1 to 8 bits", exponent_bits=8),
    bad("ElementFormat", ValueError, "exponent_bits", "integer", exponent_bits=0),
    bad("ElementFormat", ValueError, "ieee", "mantissa", specials="ieee", mantissa_bits=0),
    bad("ElementFormat", ValueError, "integer", kind="integer", exponent_bits=2),
    bad("ElementFormat", ValueError, "float32", bias=1000),
    bad("ElementFormat", ValueError, "float32", bias=-1000),
    bad("ElementFormat", TypeError, "exponent_bits", "2.0", exponent_bits=2.0),
    bad("ElementFormat", TypeError, "bias", "0.5", bias=0.5),
]  # fmt: skip

# ------------------------------------------------------------------------------------------ tensor scales

BAD_VALUES = {"0": 0.0, "-0": -0.0, "negative": -1.0, "nan": math.nan, "inf": math.inf, "-inf": -math.inf}
for op, error_words in {
    op: ("tensor_scale", "finite", "> 0") for op in ("quantize", "qdq", "explain", "from_codes")
}.items():
    for label, value in BAD_VALUES.items():
        change = lambda value=value: torch.tensor(value)  # noqa: E731
        TABLE.append(bad(op, ValueError, error_words, id=label, tensor_scale=change))
    TABLE.append(bad(op, ValueError, "tensor_scale", "-1.0", tensor_scale=lambda: torch.tensor(-1.0)))
    for dtype in ("float64", "bfloat16", "float16", "int64", "bool"):
        change = lambda dtype=dtype: torch.ones((), dtype=getattr(torch, dtype))  # noqa: E731
        TABLE.append(bad(op, TypeError, "tensor_scale", dtype, "float32", id=dtype, tensor_scale=change))
    for label, value in {"float": 1.0, "list": [1.0], "ndarray": np.ones(1, np.float32)}.items():
        TABLE.append(bad(op, TypeError, "tensor_scale", label, "float32", id=label, tensor_scale=value))
for op in ("quantize", "qdq", "from_codes"):
    for shape in ((3,), (2, 32), (1, 32), (2, 2), (1, 1, 1), (0,), (0, 1)):
        change = lambda shape=shape: torch.ones(shape)  # noqa: E731
        TABLE.append(bad(op, ValueError, "tensor_scale", str(list(shape)), "[2, 32]", tensor_scale=change, id=str(shape)))
    one_bad = lambda: torch.tensor([[1.0], [math.nan]])  # noqa: E731
    TABLE.append(bad(op, ValueError, "tensor_scale", "finite", id="one of two", tensor_scale=one_bad))
for op in ("quantize", "qdq", "explain"):
    for given in ("per_tensor", "per_row", lambda: torch.ones(())):
        TABLE.append(bad(op, ValueError, "tensor_scale", "mxfp4", "no tensor scale", format="mxfp4", tensor_scale=given))
NVFP4_SCALES = dict(act_format="nvfp4")
TABLE += [
    bad("quantize", ValueError, "tensor_scale", "[4, 3]", "[E, 2]", x=lambda: ramp(4, 2, 32),
        tensor_scale=lambda: torch.ones(4, 3)),
    bad("from_codes", ValueError, "tensor_scale", "mxfp4", "no tensor scale", format="mxfp4", recipe="ocp",
        scales=lambda: scale_codes(2, 1)),
    bad("moe_experts", ValueError, "act_tensor_scales", "pair", **NVFP4_SCALES, act_tensor_scales=lambda: torch.ones(2)),
    bad("moe_experts", ValueError, "act_tensor_scales", "pair", **NVFP4_SCALES, id="three",
        act_tensor_scales=lambda: (torch.ones(()),) * 3),
    bad("moe_experts", TypeError, "act_tensor_scales", "float", "float32", **NVFP4_SCALES, act_tensor_scales=(1.0, 1.0)),
    bad("moe_experts", ValueError, "act_tensor_scales", "[3]", "[E]", "E=2", **NVFP4_SCALES, id="given shape",
        act_tensor_scales=lambda: (torch.ones(3), torch.ones(()))),
    bad("moe_experts", ValueError, "act_tensor_scales", "mxfp4", act_format="mxfp4", act_tensor_scales="per_tensor"),
    bad("moe_experts", ValueError, "act_tensor_scales", "act_format", act_tensor_scales="per_tensor"),
    bad("moe_experts", ValueError, "act_recipe", "act_format", act_recipe="ocp"),
    bad("moe_experts", ValueError, "act_tensor_scales", "finite", **NVFP4_SCALES, id="nan for the intermediate",
        act_tensor_scales=lambda: (torch.ones(()), torch.tensor([1.0, math.nan]))),
    bad("moe_experts", ValueError, "act_tensor_scales", "finite", **NVFP4_SCALES, id="zero for x",
        act_tensor_scales=lambda: (torch.zeros(()), torch.ones(()))),
    bad("moe_experts", TypeError, "act_tensor_scales", "float64", **NVFP4_SCALES, id="float64",
        act_tensor_scales=lambda: (torch.ones((), dtype=torch.float64), torch.ones(()))),
    bad("moe_experts", ValueError, "act_tensor_scales", "finite", **NVFP4_SCALES, id="zero for an expert without tokens",
        act_tensor_scales=lambda: (torch.tensor([1.0, 0.0]), torch.ones(())), topk_ids=lambda: torch.tensor([[0], [0]])),
]  # fmt: skip

# ------------------------------------------------------------------------------------------ values


def with_value(value: float, *shape: int) -> Callable[[], torch.Tensor]:
    def make():
        x = ramp(*shape)
        x.view(-1)[-1] = value
        return x

    return make


for element in ("e2m1", "e2m3", "e3m2", "int8"):
    TABLE.append(bad("encode", ValueError, "x", "NaN", element, x=with_value(math.nan, 2, 32), element=element))
    TABLE.append(bad("encode", ValueError, "overflow", "special", element, "saturate", overflow="special", element=element))
for op, shape in (("quantize", (2, 32)), ("qdq", (2, 32)), ("explain", (16,))):
    for recipe, format in (("nvidia", "nvfp4"), ("ocp", "mxfp8_e4m3")):
        change = lambda recipe=recipe: named(recipe, nan="raise")  # noqa: E731
        TABLE.append(
            bad(op, ValueError, "x", "NaN", "nan='raise'", x=with_value(math.nan, *shape), format=format, recipe=change)
        )
TABLE += [
    bad("encode", ValueError, "x", "negative", "e8m0", x=with_value(-1.0, 2, 32), element="e8m0"),
    bad("route", ValueError, "logits", "NaN", logits=with_value(math.nan, 3, 8)),
    bad("route", ValueError, "logits", "Inf", logits=with_value(math.inf, 3, 8)),
    bad("route", ValueError, "logits", "-Inf", id="all masked", logits=lambda: torch.full((3, 8), -math.inf)),
    bad("decode", ValueError, "codes", "16", "e2m1", "0 to 15", codes=lambda: scale_codes(2, code=16)),
    bad("decode", ValueError, "codes", "255", "e3m2", "0 to 63", codes=lambda: scale_codes(2, code=255), element="e3m2"),
    bad("block_dot", ValueError, "a_codes", "16", "0 to 15", a_codes=lambda: scale_codes(3, 32, code=16)),
    bad("block_dot", ValueError, "b_codes", "64", "e2m3", "0 to 63", b_codes=lambda: scale_codes(2, 32, code=64),
        b_element="e2m3"),
    bad("from_codes", ValueError, "codes", "16", "e2m1", "0 to 15", codes=lambda: scale_codes(2, 32, code=16)),
    bad("from_codes", ValueError, "scales", "sign bit", "e4m3", scales=lambda: scale_codes(2, 2, code=0x80)),
    bad("from_codes", ValueError, "scales", "sign bit", "e4m3", scales=lambda: scale_codes(2, 2, code=0xB8)),
    bad("from_codes", ValueError, "scales", "sign bit", "e4m3", scales=lambda: scale_codes(2, 2, code=0xFF)),
    bad("from_codes", ValueError, "scales", "64", "0 to 63", id="narrow scales", scales=lambda: scale_codes(2, 1, code=64),
        tensor_scale=None,
        format=lambda: mxref.BlockFormat("mine", mxref.ELEMENT_FORMATS["e2m1"],
                                         mxref.ElementFormat("ue4m2", 4, 2, 7, "nan", signed=False), 32)),
    bad("pack", ValueError, "codes", "8", "bits=3", codes=lambda: scale_codes(4, code=8), bits=3),
    bad("pack", ValueError, "codes", "255", "bits=7", codes=lambda: scale_codes(4, code=255), bits=7),
    bad("to_layout", ValueError, "tensor", "16", "4-bit", tensor=lambda: scale_codes(32, code=16), layout="ggml_mxfp4"),
    bad("unpack", ValueError, "packed", "spare bits", packed=lambda: scale_codes(2, 2, code=0xFF), count=3),
    bad("moe_experts", ValueError, "topk_ids", "5", "0 to 1", topk_ids=lambda: torch.tensor([[0], [5]])),
    bad("moe_experts", ValueError, "topk_ids", "-1", "0 to 1", topk_ids=lambda: torch.tensor([[0], [-1]])),
    bad("moe_experts", ValueError, "expert_map", "E=2", "-1", expert_map=lambda: torch.tensor([0, 2])),
    bad("moe_experts", ValueError, "expert_map", "E=2", "-1", expert_map=lambda: torch.tensor([0, -2])),
    bad("moe_experts", ValueError, "topk_ids", "1", "0 to 0", id="beyond expert_map", expert_map=lambda: torch.tensor([0])),
    bad("route", ValueError, "correction_bias", "NaN", correction_bias=lambda: torch.full((8,), math.nan)),
    bad("route", ValueError, "scaling_factor", "nan", scaling_factor=math.nan),
]  # fmt: skip
for value in (math.nan, math.inf, -math.inf, 1e39, -1e300, 1 << 200):
    TABLE.append(bad("swiglu_oai", ValueError, "alpha", repr(value), "finite in float32", alpha=value))
for value in (math.nan, -math.inf, -3, -1.0):
    TABLE.append(bad("swiglu_oai", ValueError, "limit", repr(value), ">= 0", limit=value))
for value in (1e39, 1e300, 1 << 200):
    TABLE.append(bad("swiglu_oai", ValueError, "limit", repr(value), ">= 0", "finite in float32, or Inf", limit=value))
for name in ("alpha", "limit"):
    for value in (True, None, "1", 1j, [1.0]):
        TABLE.append(bad("swiglu_oai", TypeError, name, repr(value), "number", **{name: value}))
    for shape in ((), (2,)):
        change = lambda shape=shape: torch.ones(shape)  # noqa: E731
        TABLE.append(bad("swiglu_oai", TypeError, name, "tensor", "number", id=f"tensor {shape}", **{name: change}))

# ------------------------------------------------------------------------------------------ shapes and axes

SHAPES = "[..., M, K] and [N, K]"
TABLE += [
    bad("block_dot", ValueError, "a_codes", "b_codes", "[3, 32]", "[2, 31]", "[N, n]", b_codes=lambda: codes_of(2, 31)),
    bad("block_dot", ValueError, "a_codes", "[32]", "[M, n]", a_codes=lambda: codes_of(32)),
    bad("block_dot", ValueError, "a_codes", "[1, 3, 32]", "[M, n]", a_codes=lambda: codes_of(1, 3, 32)),
    bad("block_dot", ValueError, "a_codes", "[]", "[M, n]", id="0-d", a_codes=lambda: scale_codes(code=1)),
    bad("block_dot", ValueError, "e8m0", "32 elements", "260 bits", id="e8m0", a_element="e8m0"),
    bad("matmul", ValueError, "[3, 63]", "[2, 64]", SHAPES, a=lambda: ramp(3, 63)),
    bad("matmul", ValueError, "[3, 96]", "[2, 64]", SHAPES, a=lambda: mx(3, 96)),
    bad("matmul", ValueError, "[64]", "[2, 64]", SHAPES, a=lambda: ramp(64)),
    bad("matmul", ValueError, "[]", "[2, 64]", SHAPES, id="0-d", a=lambda: ramp()),
    bad("matmul", ValueError, "[3, 64]", "[1, 2, 64]", SHAPES, b=lambda: mx(1, 2, 64)),
    bad("matmul", ValueError, "a", "axis -2", "last", a=lambda: mx(64, 64, axis=0)),
    bad("matmul", ValueError, "b", "axis -2", "last", b=lambda: mx(64, 64, axis=0), bias=None),
    bad("matmul", ValueError, "bias", "[3]", "[N] = [2]", bias=lambda: ramp(3)),
    bad("matmul", ValueError, "bias", "[2, 1]", "[N] = [2]", bias=lambda: ramp(2, 1)),
    bad("matmul", ValueError, "a", "Hadamard", "None",
        a=lambda: mx(3, 64, recipe=named("ocp", transform=mxref.Hadamard(4)))),
    bad("matmul", ValueError, "blocks of 24", "32", "divide", id="24 and 32",
        a=lambda: mxref.quantize(ramp(3, 64), replace(mxref.BLOCK_FORMATS["mxfp4"], name="mine", block_size=24))),
    bad("swiglu", ValueError, "up", "[8]", "[2, 8]", up=lambda: ramp(8)),
    bad("swiglu", ValueError, "up", "bfloat16", "float32", up=lambda: ramp(2, 8).bfloat16()),
    bad("swiglu", ValueError, "up", "meta", "cpu", up=lambda: ramp(2, 8).to("meta")),
    bad("swiglu_oai", ValueError, "up", "[2, 1]", "[2, 8]", up=lambda: ramp(2, 1)),
    bad("route", ValueError, "logits", "[8]", "[T, E]", logits=lambda: ramp(8)),
    bad("route", ValueError, "logits", "[]", "[T, E]", id="0-d", logits=lambda: ramp()),
    bad("route", ValueError, "k=0", "1 <= k <= E", k=0),
    bad("route", ValueError, "k=-1", "1 <= k <= E", k=-1),
    bad("route", ValueError, "k=9", "[3, 8]", "1 <= k <= E", k=9),
    bad("route", TypeError, "k=1.5", k=1.5),
    bad("route", TypeError, "k='2'", k="2"),
    bad("route", TypeError, "k=True", k=True),
    bad("route", TypeError, "correction_bias", "list", correction_bias=[0.0] * 8),
    bad("route", TypeError, "correction_bias", "float64", correction_bias=lambda: ramp(8).double()),
    bad("route", ValueError, "correction_bias", "[7]", correction_bias=lambda: ramp(7)),
    bad("route", ValueError, "correction_bias", "[1]", correction_bias=lambda: ramp(1)),
    bad("route", ValueError, "correction_bias", "[3, 8]", correction_bias=lambda: ramp(3, 8)),
    bad("route", TypeError, "scaling_factor", "'2'", scaling_factor="2"),
    bad("moe_experts", ValueError, "x [2, 31]", "[T, H]", x=lambda: ramp(2, 31)),
    bad("moe_experts", ValueError, "x [32]", "[T, H]", x=lambda: ramp(32)),
    bad("moe_experts", ValueError, "w13 [2, 32, 32]", "[E, 2I, H]", "'silu'", w13=lambda: mx(2, 32, 32)),
    bad("moe_experts", ValueError, "w13 [2, 64, 32]", "[E, I, H]", "'relu2'", activation="relu2"),
    bad("moe_experts", ValueError, "w13 [64, 32]", "[E, 2I, H]", w13=lambda: mx(64, 32)),
    bad("moe_experts", ValueError, "w2 [3, 32, 32]", "[E, H, I]", w2=lambda: mx(3, 32, 32)),
    bad("moe_experts", ValueError, "w2 [32, 32]", "[E, H, I]", w2=lambda: mx(32, 32)),
    bad("moe_experts", ValueError, "topk_ids [1, 1]", "[T, k]", topk_ids=lambda: torch.tensor([[0]])),
    bad("moe_experts", ValueError, "topk_ids [2]", "[T, k]", topk_ids=lambda: torch.tensor([0, 1])),
    bad("moe_experts", ValueError, "topk_ids [2, 0]", "[T, k]", topk_ids=lambda: torch.zeros(2, 0, dtype=torch.int64),
        topk_weights=lambda: torch.ones(2, 0)),
    bad("moe_experts", ValueError, "topk_weights [2, 2]", "[T, k]", topk_weights=lambda: torch.ones(2, 2)),
    bad("moe_experts", ValueError, "bias13", "[2, 63]", "[2, 64]", bias13=lambda: ramp(2, 63)),
    bad("moe_experts", ValueError, "bias2", "[32]", "[2, 32]", bias2=lambda: ramp(32)),
    bad("moe_experts", ValueError, "apply_router_weight_on_input", "k=2", "top-1", apply_router_weight_on_input=True,
        topk_ids=lambda: torch.zeros(2, 2, dtype=torch.int64), topk_weights=lambda: torch.ones(2, 2)),
    bad("moe_experts", ValueError, "w13", "axis -2", "last", w13=lambda: mx(2, 64, 32, axis=1)),
    bad("moe_experts", ValueError, "w2", "axis -2", w2=lambda: mx(2, 32, 32, axis=1)),
    bad("combine", ValueError, "slot_terms", "[2, 3, 8]", "[2, 1, 8]", slot_terms=lambda: [ramp(2, 3, 8), ramp(2, 1, 8)]),
    bad("combine", ValueError, "slot_terms", "empty", slot_terms=[]),
    bad("combine", ValueError, "slot_terms", "[2, 8]", "[T, k, H]", slot_terms=lambda: ramp(2, 8)),
    bad("explain", ValueError, "x", "[2, 16]", "1 to 16", x=lambda: ramp(2, 16)),
    bad("explain", ValueError, "x", "[17]", "1 to 16", x=lambda: ramp(17)),
    bad("explain", ValueError, "x", "[33]", "1 to 32", x=lambda: ramp(33), format="mxfp4"),
    bad("explain", ValueError, "x", "[0]", "1 to 16", x=lambda: ramp(0)),
    bad("explain", ValueError, "x", "[]", "1 to 16", id="0-d", x=lambda: ramp()),
    bad("activate_quantize", ValueError, "hidden", "[2, 63]", "2I", hidden=lambda: ramp(2, 63)),
    bad("activate_quantize", ValueError, "hidden", "[]", "2I", id="0-d", hidden=lambda: torch.tensor(1.0)),
    bad("activate_quantize", ValueError, "activation", "'relu'", "silu", activation="relu"),
    bad("activate_quantize", ValueError, "activation", "['silu']", "silu", activation=["silu"]),
    bad("activate_quantize", ValueError, "gate_up", "'rows'", "interleaved", gate_up="rows"),
    bad("activate_quantize", ValueError, "format", "'fp4'", "mxfp4", format="fp4"),
    bad("activate_quantize", ValueError, "recipe", "'ocp'", "nvfp4", recipe="ocp"),
    bad("activate_quantize", ValueError, "seed", "1", "nearest_even", seed=1),
    bad("BlockTensor", ValueError, "packed", "16 bytes", "33 codes of 4 bits take 17", length=33),
    bad("BlockTensor", ValueError, "packed", "spare bits", packed=lambda: codes_of(2, 16) | 0xF0, length=31),
    bad("BlockTensor", TypeError, "length", "32.0", length=32.0),
    bad("BlockTensor", ValueError, "length", "-1", length=-1),
    bad("BlockTensor", ValueError, "scales", "[2, 1]", "[2, 32]", "[2, 2]", scales=lambda: scale_codes(2, 1)),
    bad("from_codes", ValueError, "scales", "[2, 1]", "[2, 32]", "[2, 2]", scales=lambda: scale_codes(2, 1)),
    bad("from_codes", ValueError, "scales", "[4]", "[2, 2]", scales=lambda: scale_codes(4)),
    bad("from_codes", ValueError, "scales", "[2, 2]", "[1, 32]", axis=0, tensor_scale=None),
    bad("from_codes", ValueError, "scales", "[2, 2]", "[1, 2]", recipe="nvidia_16x16", tensor_scale=None),
    bad("from_codes", ValueError, "axis", "[]", id="0-d", codes=lambda: scale_codes(code=1), scales=lambda: scale_codes()),
    bad("from_codes", ValueError, "axis", "16 rows", codes=lambda: codes_of(32), scales=lambda: scale_codes(2),
        recipe="nvidia_16x16", tensor_scale=None),
    bad("from_codes", ValueError, "axis", "16 rows", codes=lambda: codes_of(32, 2, 16), scales=lambda: scale_codes(2, 2, 1),
        recipe="nvidia_16x16", tensor_scale=None, axis=0),
    bad("from_codes", ValueError, "32", "64", id="transform", recipe=lambda: named("nvidia", transform=mxref.Hadamard(64))),
    bad("pack", ValueError, "codes", "axes", id="0-d", codes=lambda: scale_codes(code=1)),
    bad("unpack", ValueError, "packed", "axes", id="0-d", packed=lambda: scale_codes(code=1)),
    bad("unpack", ValueError, "packed", "16", "33 codes", "17", count=33),
    bad("unpack", ValueError, "packed", "16", "30 codes", "15", count=30),
    bad("unpack", ValueError, "count", "-1", count=-1),
    bad("unpack", TypeError, "count", "32.0", count=32.0),
    bad("unpack", TypeError, "count", "'32'", count="32"),
    bad("to_layout", ValueError, "tensor", "axes", id="0-d", tensor=lambda: scale_codes()),
    bad("to_layout", ValueError, "tensor", "[32]", "[..., R, C]", tensor=lambda: codes_of(32)),
    bad("to_layout", ValueError, "tensor", "31", "multiple of 32", tensor=lambda: codes_of(2, 31), layout="ggml_mxfp4"),
    bad("to_layout", ValueError, "tensor", "[3, 32]", "[..., 2 I, K]", tensor=lambda: codes_of(3, 32), layout="interleaved"),
    bad("to_layout", ValueError, "tensor", "[32]", "[..., 2 I, K]", tensor=lambda: codes_of(32), layout="interleaved"),
    bad("from_layout", ValueError, "data", "64", "(2, 33)", "66", shape=(2, 33)),
    bad("from_layout", ValueError, "data", "64", "(2, 32)", "4096", layout="tile_128x4"),
    bad("from_layout", ValueError, "shape", "(64,)", "[..., R, C]", layout="tile_128x4", shape=(64,)),
    bad("from_layout", ValueError, "shape", "(2, 33)", "multiple of 32", layout="ggml_mxfp4", shape=(2, 33)),
    bad("from_layout", ValueError, "data", "64", "(2, 32)", "32", layout="ggml_mxfp4"),
    bad("from_layout", ValueError, "shape", "-2", shape=(-2, -32)),
    bad("from_layout", TypeError, "shape", "int", "Sequence", shape=64),
    bad("from_layout", TypeError, "shape", "2.0", shape=(2.0, 32.0)),
]  # fmt: skip
for op in ("quantize", "qdq", "from_codes"):
    for axis in (2, -3, 99):
        TABLE.append(bad(op, ValueError, "axis", repr(axis), "[2, 32]", axis=axis))
    for axis in (True, 1.0, None, "1", (0, 1)):
        TABLE.append(bad(op, TypeError, "axis", repr(axis), "[2, 32]", axis=axis))
for op in ("quantize", "qdq"):
    for format in FORMATS:
        TABLE.append(bad(op, ValueError, "axis", "[]", id="0-d", x=lambda: ramp(), format=format))
for op in ("pack", "unpack"):
    for bits in (0, -1, -4, 9):
        TABLE.append(bad(op, ValueError, "bits", repr(bits), "1 to 8", bits=bits))
    for bits in (True, 4.0, "4", None):
        TABLE.append(bad(op, TypeError, "bits", repr(bits), "1 to 8", bits=bits))

# ------------------------------------------------------------------------------------------ seeds

STOCHASTIC = dict(recipe=lambda: named("nvidia", rounding="stochastic"))
SEEDED = {"encode": dict(rounding="stochastic"), "quantize": STOCHASTIC, "qdq": STOCHASTIC, "explain": STOCHASTIC}
SEEDED |= {"moe_experts": dict(act_format="mxfp4", act_recipe=lambda: named("ocp", rounding="stochastic"))}
for op, changes in SEEDED.items():
    TABLE.append(bad(op, ValueError, "seed", "None", "int", id="missing", **changes))
    for seed in (-1, -(1 << 63), 1 << 64):
        TABLE.append(bad(op, ValueError, "seed", str(seed), "0 <= seed < 2**64", id=str(seed), seed=seed, **changes))
    for seed in (True, False, 1.0, "7", [7], np.int64(7)):
        TABLE.append(bad(op, TypeError, "seed", str(seed), "int", id=repr(seed), seed=seed, **changes))
    TABLE.append(bad(op, TypeError, "seed", "int", id="tensor", seed=lambda: torch.tensor(7), **changes))
for op in ("quantize", "qdq", "explain"):
    for seed in (0, 7, True):
        TABLE.append(bad(op, ValueError, "seed", str(seed), "nearest_even", id=f"unused {seed}", seed=seed))
TABLE += [
    bad("moe_experts", ValueError, "seed", "act_format", id="unused", seed=7),
    bad("moe_experts", ValueError, "seed", "7", "nearest_even", id="unused", act_format="mxfp4", seed=7),
    bad("encode", ValueError, "seed", "7", "nearest_even", id="unused", seed=7),
]  # fmt: skip


# ------------------------------------------------------------------------------------------ the tests


def tensors_in(value) -> list[torch.Tensor]:
    """Every tensor that a call could write to, as plain dense bits."""
    if isinstance(value, mxref.BlockTensor):
        return tensors_in([value.codes, value.scales, value.tensor_scale])
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    if isinstance(value, np.ndarray):
        return [torch.from_numpy(value)]
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return []
    value = value.to_dense() if value.is_sparse else value
    return [torch.view_as_real(value) if value.is_complex() else value]


def says(message: str, words: str) -> bool:
    """Whether a message holds some words, whole (`x` is not in `expected`); a shape may be a list or a tuple."""
    message, words = (text.replace("(", "[").replace(")", "]").replace(",]", "]") for text in (message, words))
    return (
        re.search(r"(?<!\w)" * words[0].isalnum() + re.escape(words) + r"(?!\w)" * words[-1].isalnum(), message) is not None
    )


def label(row: Bad) -> str:
    changed = ",".join(f"{k}={v!r}" for k, v in row.changes.items() if not (callable(v) or isinstance(v, np.ndarray)))
    text = f"{row.op}:{','.join(row.changes)}:{row.id or changed or ' '.join(row.words)}"
    return re.sub(r"[^\w.,:=\[\]()'<>*-]+", " ", text)


@pytest.mark.parametrize("row", TABLE, ids=label)
def test_refused_with_a_clear_message(row):
    arguments = row.arguments()
    before = [tensor.clone() for tensor in tensors_in(list(arguments.values()))]
    with pytest.raises((TypeError, ValueError)) as caught:
        function_of(row.op)(**arguments)
    assert type(caught.value) is row.error, f"{caught.value!r}: expected {row.error.__name__}"
    missing = [word for word in row.words if not says(str(caught.value), word)]
    assert not missing, f"{caught.value}: does not say {missing}"
    for tensor, expected in zip(tensors_in(list(arguments.values())), before, strict=True):
        assert_same_bits(tensor, expected)


REFUSED_ALIKE = f"""
import sys, mxref
from mxref.registry import kernel
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_bad_input import TABLE, function_of

def refusal(row, *backends):
    arguments = row.arguments()
    try:
        with mxref.use(*backends):
            function_of(row.op)(**arguments)
    except Exception as error:
        return type(error).__name__, str(error)

for row in TABLE:
    for backend in ("triton", "inductor"):
        if row.op in mxref.registry.OPS and kernel(row.op, backend):
            assert refusal(row, backend) == refusal(row), (backend, row)
print("the same")
"""


def test_kernels_refuse_what_the_reference_refuses():
    """Every row, with the same words: by the kernels that answer the op of a valid call, and that their `accepts` sees."""
    says_the_same(REFUSED_ALIKE, "cpu")


@pytest.mark.parametrize("op", list(VALID))
def test_the_unchanged_call_is_valid(op):
    arguments = VALID[op]()
    before = [tensor.clone() for tensor in tensors_in(list(arguments.values()))]
    function_of(op)(**arguments)
    for tensor, expected in zip(tensors_in(list(arguments.values())), before, strict=True):
        assert_same_bits(tensor, expected)


def test_words_are_looked_for_whole():
    message = "x has shape (2, 3): expected torch.float32, axis=-1"
    assert all(says(message, words) for words in ("x", "[2, 3]", "(2, 3)", "float32", "axis", "-1", "expected"))
    assert not any(says(message, words) for words in ("e", "shap", "float", "[3]", "(2)", "is"))


def test_every_public_op_has_rows():
    public = {name for name in mxref.__all__ if callable(getattr(mxref, name))} - {
        "Explanation",
        "use",
        "explain_dispatch",
    }  # dispatch has tests of its own
    public |= {"from_codes", *(name for name in vars(functions) if name in ACTIVATION_FUNCTIONS)}
    assert public == set(VALID) and {row.op for row in TABLE} == set(VALID)


@pytest.mark.parametrize("op", OPS)
def test_flushed_subnormals_are_refused(op):
    """With subnormals flushed to zero no bit could be promised: every op raises, and works again afterwards."""
    arguments = VALID[op]()
    before = [tensor.clone() for tensor in tensors_in(list(arguments.values()))]
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        with pytest.raises(RuntimeError, match="subnormal"):
            function_of(op)(**arguments)
    finally:
        torch.set_flush_denormal(False)
    for tensor, expected in zip(tensors_in(list(arguments.values())), before, strict=True):
        assert_same_bits(tensor, expected)
    function_of(op)(**arguments)


def test_a_format_beyond_float32_needs_a_given_tensor_scale():
    """Element times scale can be more than float32 holds: then no computed scale maps a largest magnitude to it."""
    element = mxref.ElementFormat("large", exponent_bits=5, mantissa_bits=2, bias=-80)
    scale = mxref.ElementFormat("scale", exponent_bits=4, mantissa_bits=3, bias=-60, specials="nan")
    format = mxref.BlockFormat("own", element, scale, 16, tensor_scale=True)
    x = torch.full((2, 16), element.max)
    for how in (None, "per_tensor", "per_row", "per_expert"):
        for op in (mxref.quantize, mxref.qdq):
            with pytest.raises(ValueError, match="own holds more than float32, so a scale must be given"):
                op(x, format, tensor_scale=how)
    assert torch.equal(mxref.qdq(x, format, tensor_scale=torch.tensor(1 / scale.max)), x)
