"""What is asked of every backend, op by op. Level 1 takes seconds to minutes; level 2 adds what is large."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch

import mxref
from mxref.blocks import BlockTensor
from mxref.conformance import inputs
from mxref.elements import ROUNDINGS
from mxref.recipes import Hadamard, Recipe

LEVELS = (1, 2)
STATIC_SCALE = 0.0123


@dataclass(frozen=True)
class Case:
    """One call of an op: `arguments` gives its positional and keyword arguments, on the CPU."""

    op: str
    id: str
    format: str
    dtype: str
    arguments: Callable[[], tuple[tuple, dict]]
    level: int = 1


def cases(op: str, level: int = 1) -> Iterator[Case]:
    """The cases of an op up to `level`; none for an op without cases."""
    for case in _GENERATORS.get(op, lambda: iter(()))():
        if case.level <= level:
            yield case


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _call(*args, **kwargs) -> Callable[[], tuple[tuple, dict]]:
    return lambda: (args, kwargs)


# ---- elements -------------------------------------------------------------------------------------------------------


def _encode() -> Iterator[Case]:
    for (name, element), rounding in product(mxref.ELEMENT_FORMATS.items(), ROUNDINGS):
        overflows = ("saturate",) if element.specials == "none" else ("saturate", "special")
        values = {
            "every_bfloat16": inputs.every_pattern(torch.bfloat16),
            "every_float16": inputs.every_pattern(torch.float16),
            "turning_points": inputs.turning_points(element),
            "random_patterns": inputs.random_patterns(1 << 16, 1),
            "transposed": inputs.spread_normal(33, 65, seed=2).T,
            "empty": torch.zeros(0),
        }
        for (label, x), overflow in product(values.items(), overflows):
            x = x if element.nan_code is not None else torch.where(x.isnan(), 0.0, x)
            x = x if element.signed else x.abs()
            seed = 7 if rounding == "stochastic" else None
            arguments = _call(x, element, rounding=rounding, overflow=overflow, seed=seed)
            yield Case("encode", f"{name}-{rounding}-{overflow}-{label}", name, _short(x.dtype), arguments)


def _decode() -> Iterator[Case]:
    for name, element in mxref.ELEMENT_FORMATS.items():
        codes = torch.arange(element.code_count, dtype=torch.uint8)
        yield Case("decode", f"{name}-every_code", name, "uint8", _call(codes, element))
        strided = codes.repeat(3, 5)[:, ::3].T
        yield Case("decode", f"{name}-strided", name, "uint8", _call(strided, element))


# ---- blocks ---------------------------------------------------------------------------------------------------------


def recipes_of(format: str) -> list[Recipe]:
    """Every named recipe that fits, and one for each policy that no named recipe has."""
    block = mxref.BLOCK_FORMATS[format]
    own = "ocp" if block.scale.is_power_of_two else "nvidia"
    base = mxref.RECIPES[own]
    fitting = [r for r in mxref.RECIPES.values() if (r.scale_rule == "amax") != block.scale.is_power_of_two]
    roundings = [replace(base, name=f"{own}_{r}", rounding=r) for r in ROUNDINGS if r != "nearest_even"]
    policies = [
        replace(base, name=f"{own}_inf_saturates", inf="saturate"),
        replace(base, name=f"{own}_zero_block_one", zero_block="one"),
        replace(base, name=f"{own}_drop", negative_zero="drop"),
        replace(base, name=f"{own}_drop_quotient", negative_zero="drop_quotient"),
        replace(base, name=f"{own}_hadamard", transform=Hadamard(16)),
    ]
    if block.element.specials != "none":
        policies.append(replace(base, name=f"{own}_special", overflow="special"))
    return [*fitting, *roundings, *policies]


def _block_inputs(format: str) -> Iterator[tuple[str, torch.Tensor, int, int]]:
    """(label, x, axis, level)."""
    block = mxref.BLOCK_FORMATS[format]
    for dtype in inputs.FLOAT_DTYPES:
        yield f"binades-{_short(dtype)}", inputs.binades(block).to(dtype), -1, 1
        yield f"specials-{_short(dtype)}", inputs.special_blocks(block.block_size).to(dtype), -1, 1
        yield f"tails-{_short(dtype)}", inputs.spread_normal(7, 77, seed=4, dtype=dtype), -1, 1
    for dtype in (torch.bfloat16, torch.float16):
        shuffled = inputs.every_pattern(dtype)[torch.randperm(65536, generator=torch.Generator().manual_seed(3))]
        yield f"every_{_short(dtype)}", shuffled.reshape(-1, 256), -1, 1
    if block.tensor_scale:
        yield "scale_turns", inputs.scale_turns(block, STATIC_SCALE), -1, 1
    yield "random_patterns", inputs.random_patterns(64 * 160, 5).reshape(64, 160), -1, 1
    x = inputs.spread_normal(5, 48, 36, seed=6)
    for axis in (0, 1):
        yield f"axis_{axis}", x, axis, 1
    yield "transposed", x.transpose(0, 2), -1, 1
    yield "strided", x[:, ::2, 3:], -1, 1
    yield "one_element", torch.full((1, 1), -3.3), -1, 1
    for empty in ((0, 64), (3, 0)):
        yield f"empty_{empty[0]}_{empty[1]}", torch.zeros(empty), -1, 1
    yield "large", inputs.spread_normal(1024, 4096, seed=8, dtype=torch.bfloat16), -1, 2


def _quantize_like(op: str) -> Iterator[Case]:
    for format, block in mxref.BLOCK_FORMATS.items():
        for recipe, (label, x, axis, level) in product(recipes_of(format), _block_inputs(format)):
            if recipe.transform is not None:
                x = x.narrow(axis, 0, x.shape[axis] // recipe.transform.size * recipe.transform.size)
            if recipe.block_rows > 1 and (x.ndim < 2 or axis % x.ndim < x.ndim - 2):
                continue
            scales = {"": None}
            if label == "scale_turns":
                scales = {"-static": torch.tensor(STATIC_SCALE), "-inverse": torch.tensor(1 / STATIC_SCALE)}
            if block.tensor_scale and label in ("tails-bfloat16", "axis_1", "specials-float32"):
                scales |= {"-none": "none", "-static": torch.tensor(STATIC_SCALE)}
                scales |= {} if recipe.block_rows > 1 else {"-per_row": "per_row", "-per_expert": "per_expert"}
            for kind, tensor_scale in scales.items():
                seed = 11 if recipe.rounding == "stochastic" else None
                arguments = _call(x, format, recipe=recipe, tensor_scale=tensor_scale, axis=axis, seed=seed)
                yield Case(op, f"{format}-{recipe.name}-{label}{kind}", format, _short(x.dtype), arguments, level)


def _dequantize() -> Iterator[Case]:
    for format, block in mxref.BLOCK_FORMATS.items():
        element, scale = block.element, block.scale
        scale_bytes = [code for code in range(256) if not code & scale.sign_mask]
        codes = torch.arange(element.code_count, dtype=torch.uint8)
        codes = torch.nn.functional.pad(codes, (0, -len(codes) % block.block_size)).repeat(len(scale_bytes), 1)
        scales = torch.tensor(scale_bytes, dtype=torch.uint8)[:, None].expand(-1, codes.shape[1] // block.block_size)
        recipes = ["nvidia", "vllm_torch"] if block.tensor_scale else ["ocp"]
        tensor_scales = [None, *([0.0123, 2.0**-140, 3e38] if block.tensor_scale else [])]
        for recipe, value, dtype in product(recipes, tensor_scales, inputs.FLOAT_DTYPES):
            tensor = None if value is None else torch.tensor(value)
            q = BlockTensor(codes, scales.contiguous(), tensor, block, mxref.RECIPES[recipe])
            yield Case("dequantize", f"{format}-{recipe}-{value}-{_short(dtype)}", format, _short(dtype), _call(q, dtype))
        x = inputs.spread_normal(5, 48, 36, seed=9)
        for axis, tensor_scale in product((0, 1, 2), (None, "per_row") if block.tensor_scale else (None,)):
            q = mxref.quantize(x, format, axis=axis, tensor_scale=tensor_scale)
            yield Case("dequantize", f"{format}-axis_{axis}-{tensor_scale}", format, "float32", _call(q))
        empty = mxref.quantize(torch.zeros(0, 32), format)
        yield Case("dequantize", f"{format}-empty", format, "float32", _call(empty))


# ---- functions, products, experts -----------------------------------------------------------------------------------


def _function(name: str, gated: bool) -> Iterator[Case]:
    values = {
        "every_bfloat16": inputs.every_pattern(torch.bfloat16),
        "every_float16": inputs.every_pattern(torch.float16),
        "random_patterns": inputs.random_patterns(1 << 20, 12),
        "exponent_range": torch.linspace(-110, 95, 1 << 16),
        "strided": inputs.spread_normal(31, 65, seed=13)[:, ::2].T,
        "empty": torch.zeros(0, 3),
    }
    for label, x in values.items():
        arguments = (x, x.flip(0)) if gated else (x,)
        yield Case(name, label, "-", _short(x.dtype), _call(*arguments))


def _codes(element: str, rows: int, length: int, seed: int) -> torch.Tensor:
    """Random codes `[rows, length]`; Inf and NaN in every eighth row only, since they would hide all else."""
    record = mxref.ELEMENT_FORMATS[element]
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, record.code_count, (rows, length), generator=generator, dtype=torch.uint8)
    special = ~torch.tensor(record.values).isfinite()[codes.int()]
    special[::8] = False
    return codes.masked_fill(special, 1)


def _block_dot() -> Iterator[Case]:
    elements = [name for name, element in mxref.ELEMENT_FORMATS.items() if element.signed]
    for a, b, length in product(elements, elements, (1, 16, 32)):
        arguments = _call(_codes(a, 96, length, 14), _codes(b, 72, length, 15), a, b)
        yield Case("block_dot", f"{a}-{b}-{length}", f"{a} {b}", "uint8", arguments)


def _matmul() -> Iterator[Case]:
    for a_format, b_format in product(mxref.BLOCK_FORMATS, mxref.BLOCK_FORMATS):
        a = mxref.quantize(inputs.spread_normal(37, 336, seed=16), a_format)
        b = mxref.quantize(inputs.spread_normal(29, 336, seed=17), b_format)
        for out_dtype in (torch.float32, torch.bfloat16):
            case = f"{a_format}-{b_format}-{_short(out_dtype)}"
            yield Case("matmul", case, f"{a_format} {b_format}", _short(out_dtype), _call(a, b, out_dtype=out_dtype))
    for format in mxref.BLOCK_FORMATS:
        b = mxref.quantize(inputs.spread_normal(29, 336, seed=17), format)
        x = inputs.spread_normal(37, 336, seed=18, dtype=torch.bfloat16)
        yield Case("matmul", f"bfloat16-{format}", f"bfloat16 {format}", "bfloat16", _call(x, b))


def _route() -> Iterator[Case]:
    yield Case("route", "softmax", "-", "float32", _call(inputs.spread_normal(257, 64, seed=19), 8))


def _moe_experts() -> Iterator[Case]:
    ids, weights = mxref.route(inputs.spread_normal(33, 6, seed=20), 2)
    x = inputs.spread_normal(33, 96, seed=21, dtype=torch.bfloat16)
    for format in mxref.BLOCK_FORMATS:
        w13 = mxref.quantize(inputs.spread_normal(6, 160, 96, seed=22), format)
        w2 = mxref.quantize(inputs.spread_normal(6, 96, 80, seed=23), format)
        for act_format, activation in ((format, "silu"), (None, "silu"), (format, "swiglu_oai")):
            arguments = _call(x, w13, w2, ids, weights, act_format=act_format, activation=activation)
            yield Case("moe_experts", f"{format}-{act_format}-{activation}", format, "bfloat16", arguments)


_GENERATORS: dict[str, Callable[[], Iterator[Case]]] = {
    "encode": _encode,
    "decode": _decode,
    "quantize": lambda: _quantize_like("quantize"),
    "qdq": lambda: _quantize_like("qdq"),
    "dequantize": _dequantize,
    **{name: (lambda name=name: _function(name, False)) for name in ("exp", "sigmoid", "silu", "gelu_tanh", "relu2")},
    **{name: (lambda name=name: _function(name, True)) for name in ("swiglu", "swiglu_oai")},
    "block_dot": _block_dot,
    "matmul": _matmul,
    "route": _route,
    "moe_experts": _moe_experts,
}
OPS = tuple(_GENERATORS)
