"""What is asked of every backend, op by op. Level 1 takes seconds to minutes; level 2 adds what is large."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from math import inf, log2, nan
from typing import Any

import torch

import mxref
from mxref.blocks import BlockTensor
from mxref.comparison import tensors
from mxref.conformance import inputs, operands
from mxref.conformance.wrong import wrong_calls
from mxref.elements import ROUNDINGS
from mxref.formats import BlockFormat
from mxref.moe import ACTIVATIONS
from mxref.recipes import Hadamard, Recipe

LEVELS = (1, 2)
STATIC_SCALE = 0.0123
SEEDS = (0, 2**32 + 7, 2**64 - 1)  # of stochastic rounding: 0 is one, and most have more than 32 bits
TAILS = (1, 31, 33, 63, 64, 65, 96, 128, 129)  # lengths around one, two and four blocks
PATHS = (
    *[(format, format) for format in mxref.BLOCK_FORMATS],
    *[("mxfp4", "nvfp4"), ("mxfp8_e4m3", "nvfp4"), ("mxfp8_e4m3", "mxfp4"), ("mxfp8_e5m2", "mxfp4")],
)  # pairs of formats: every way in which a kernel may have to compute their products
REPEATS = 2**31 // inputs.TILE_ELEMENTS + 2  # of a tile: more elements than 32 bits count


@dataclass(frozen=True)
class Case:
    """One call of an op: `arguments` gives its positional and keyword arguments, on the CPU.

    `repeats`: the subject gets every tensor that many times along its first axis, repeated on its device; each copy of
    the result must be the result of one. The arguments must be such that it is. `repeat`: how arguments are repeated, where
    that is not so of every tensor.

    `calls`: how often the subject runs, where nothing is repeated; a third time shows results that share memory by turns.

    `raises`: the reference refuses the call with this error; so must who answers it.
    """

    op: str
    id: str
    format: str
    dtype: str
    arguments: Callable[[], tuple[tuple, dict]]
    level: int = 1
    repeats: int = 1
    repeat: Callable[[tuple, dict, int], tuple[tuple, dict]] | None = None
    raises: type[Exception] | None = None
    calls: int = 2


def cases(op: str, level: int = 1) -> Iterator[Case]:
    """The cases of an op up to `level`; none for an op without cases."""
    return (case for case in _all_cases(op) if case.level <= level)


@cache  # to make the operands of products takes seconds
def _all_cases(op: str) -> tuple[Case, ...]:
    found = (*_GENERATORS.get(op, lambda: ())(), *_refused(op))
    small = ("strided", "negated")
    return tuple(replace(case, calls=3) if case.id.endswith(small) else case for case in found)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _call(*args, **kwargs) -> Callable[[], tuple[tuple, dict]]:
    return lambda: (args, kwargs)


# ---- elements -------------------------------------------------------------------------------------------------------


def _encode() -> Iterator[Case]:
    for (name, element), rounding in product(mxref.ELEMENT_FORMATS.items(), ROUNDINGS):
        overflows = ("saturate",) if element.specials == "none" else ("saturate", "special")
        more = inputs.spread_normal(1024, seed=2, dtype=torch.bfloat16)  # than 16 bits count
        values = {
            "every_bfloat16": torch.cat([inputs.every_pattern(torch.bfloat16), more]),
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
    for name, element in mxref.ELEMENT_FORMATS.items():
        x, tile = inputs.spread_normal(33, 65, seed=2), inputs.tile(torch.bfloat16)
        x, tile = (x, tile) if element.signed else (x.abs(), tile.abs())
        for label, values in {"strided_in_poison": inputs.in_poison(x), **inputs.layouts(element.signed)}.items():
            yield Case("encode", f"{name}-{label}", name, _short(values.dtype), _call(values, element))
        for seed in SEEDS:
            arguments = _call(x, element, rounding="stochastic", seed=seed)
            yield Case("encode", f"{name}-stochastic-seed_{seed}", name, "float32", arguments)
        yield Case("encode", f"{name}-beyond_int32", name, "bfloat16", _call(tile, element), 2, REPEATS)


def _decode() -> Iterator[Case]:
    for name, element in mxref.ELEMENT_FORMATS.items():
        codes = torch.arange(element.code_count, dtype=torch.uint8)
        yield Case("decode", f"{name}-every_code", name, "uint8", _call(codes, element))
        strided = codes.repeat(3, 5)[:, ::3].T
        yield Case("decode", f"{name}-strided", name, "uint8", _call(strided, element))
        framed = inputs.in_poison(codes.repeat(3, 1)[:, :-1])
        yield Case("decode", f"{name}-strided_in_poison", name, "uint8", _call(framed, element))
        yield Case("decode", f"{name}-no_axes", name, "uint8", _call(codes[1], element))
        yield Case("decode", f"{name}-beyond_int32", name, "uint8", _call(_tile_codes(name), element), 2, REPEATS)


def _tile_codes(element: str) -> torch.Tensor:
    """Every code alike, in a tile."""
    codes = torch.arange(inputs.TILE_ELEMENTS, dtype=torch.int32) % mxref.ELEMENT_FORMATS[element].code_count
    return codes.to(torch.uint8).reshape(inputs.TILE)


# ---- blocks ---------------------------------------------------------------------------------------------------------


def recipes_of(format: str) -> list[Recipe]:
    """Every named recipe that fits, and one for each policy that no named recipe has; not those with a producer's faults,
    which are the reference's alone, nor those that raise for NaN, which inputs hold."""
    block = mxref.BLOCK_FORMATS[format]
    own = "ocp" if block.scale.is_power_of_two else "nvidia"
    base = mxref.RECIPES[own]
    fitting = [r for r in mxref.RECIPES.values() if r.fits(block) and not r.faults and r.nan != "raise"]
    roundings = [replace(base, name=f"{own}_{r}", rounding=r) for r in ROUNDINGS if r != "nearest_even"]
    policies = [
        replace(base, name=f"{own}_inf_saturates", inf="saturate"),
        replace(base, name=f"{own}_zero_block_one", zero_block="one"),
        replace(base, name=f"{own}_drop", negative_zero="drop"),
        replace(base, name=f"{own}_drop_quotient", negative_zero="drop_quotient"),
        replace(base, name=f"{own}_hadamard", transform=Hadamard(16, (1, -1, -1, 1) * 4)),
        replace(base, name=f"{own}_hadamard_64", transform=Hadamard(64, (1, 1, -1, -1) * 16)),
    ]
    if block.element.specials != "none":
        policies.append(replace(base, name=f"{own}_special", overflow="special"))
    return [*fitting, *roundings, *policies]


@dataclass(frozen=True)
class _Input:
    """What blocks are made of: at `level` by the format's default recipe, at level `others`, if any, by the others.

    `tensor_scales`: by a suffix of the case's id.
    """

    label: str
    x: torch.Tensor
    axis: int = -1
    level: int = 1
    others: int | None = 1
    tensor_scales: dict[str, Any] = field(default_factory=lambda: {"": None})
    repeats: int = 1


def _block_inputs(format: str) -> Iterator[_Input]:
    block = mxref.BLOCK_FORMATS[format]
    static, inverse = torch.tensor(STATIC_SCALE), torch.tensor(1 / STATIC_SCALE)
    many, rows, experts = {"": None}, {}, {"": None}
    if block.tensor_scale:
        many |= {"-none": "none", "-static": static, "-per_row": "per_row", "-per_expert": "per_expert"}
        each = (STATIC_SCALE * torch.arange(1.0, 21.0))[::2]
        rows = {"-per_row_static": each[:7]}
        experts |= {"-per_expert_static": each[:5], "-gate_up_static": each.reshape(5, 2)}
    for dtype in inputs.FLOAT_DTYPES:
        special, tails = inputs.special_blocks(block.block_size).to(dtype), inputs.spread_normal(7, 77, seed=4, dtype=dtype)
        yield _Input(f"binades-{_short(dtype)}", inputs.binades(block).to(dtype))
        yield _Input(f"specials-{_short(dtype)}", special, **({"tensor_scales": many} if dtype == torch.float32 else {}))
        yield _Input(f"tails-{_short(dtype)}", tails, **({"tensor_scales": many | rows} if dtype == torch.bfloat16 else {}))
    for dtype in (torch.bfloat16, torch.float16):
        shuffled = inputs.every_pattern(dtype)[torch.randperm(65536, generator=torch.Generator().manual_seed(3))]
        yield _Input(f"every_{_short(dtype)}", shuffled.reshape(-1, 256))
    if block.tensor_scale:
        both = {"-static": static, "-inverse": inverse}
        yield _Input("scale_turns", inputs.scale_turns(block, STATIC_SCALE), tensor_scales=both)
        tiny = {"-tiny": torch.tensor(2.0**-140)}  # its reciprocal is beyond float32
        yield _Input("specials", inputs.special_blocks(block.block_size), others=2, tensor_scales=tiny)
        yield _Input("every_scale-of_odd", inputs.every_scale(block, STATIC_SCALE), others=2, tensor_scales=both)
    one = {"": torch.ones(()) if block.tensor_scale else None}
    yield _Input("every_scale", inputs.every_scale(block), others=2, tensor_scales=one)
    yield _Input("random_patterns", inputs.random_patterns(64 * 160, 5).reshape(64, 160))
    yield _Input("one_axis", inputs.spread_normal(77, seed=4), others=None)
    few = {name: {kind: many[kind] for kind in ("", name) if kind in many} for name in ("-per_row", "-per_expert")}
    four_axes = inputs.spread_normal(2, 3, 5, 40, seed=4, dtype=torch.float16)
    yield _Input("four_axes", four_axes, others=None, tensor_scales=few["-per_expert"])
    for label, x in inputs.layouts().items():
        if x.ndim:
            yield _Input(label, x, others=None)
    yield _Input(
        "experts", inputs.spread_normal(5, 6, 40, seed=78), others=1 if block.tensor_scale else None, tensor_scales=experts
    )
    longer, longest = (inputs.spread_normal(2, n * inputs.LONG_ROW + 40, seed=79) for n in (2, 8))
    yield _Input("longer_rows", longer, others=None, tensor_scales=few["-per_row"])
    yield _Input("longest_rows", longest, level=2, others=None, tensor_scales=few["-per_row"])
    x = inputs.spread_normal(5, 48, 36, seed=6)
    yield _Input("axis_0", x, 0)
    yield _Input("axis_1", x, 1, tensor_scales=many)
    yield _Input("transposed", x.transpose(0, 2))
    yield _Input("strided", x[:, ::2, 3:])
    yield _Input("strided_column", inputs.spread_normal(64, 1, seed=30, dtype=torch.bfloat16), 0)
    yield _Input("strided_row", inputs.spread_normal(3, 65, seed=31, dtype=torch.bfloat16)[:1, :64])
    yield _Input("strided_in_poison", inputs.in_poison(inputs.spread_normal(7, 77, seed=4, dtype=torch.bfloat16)))
    long_rows = inputs.spread_normal(4, inputs.LONG_ROW, seed=50, dtype=torch.bfloat16)
    yield _Input("strided_long_rows", long_rows[::2], others=2)
    yield _Input("strided_long_rows_in_poison", inputs.in_poison(long_rows[:2].float()), others=2)
    yield _Input("strided_in_poison-axis_0", inputs.in_poison(inputs.spread_normal(77, 7, seed=4)), 0)
    yield _Input("one_element", torch.full((1, 1), -3.3))
    for empty in ((0, 64), (3, 0)):
        yield _Input(f"empty_{empty[0]}_{empty[1]}", torch.zeros(empty))
    yield _Input("large", inputs.spread_normal(1024, 4096, seed=8, dtype=torch.bfloat16), level=2, others=2)
    tile = inputs.tile(torch.bfloat16)
    alike = {name: scale for name, scale in many.items() if name != "-per_expert"}
    yield _Input("beyond_int32", tile, level=2, others=None, tensor_scales=alike, repeats=REPEATS)
    yield _Input("beyond_int32-axis_1", tile.reshape(16, -1, tile.shape[1]), 1, 2, None, repeats=REPEATS)


def _namesakes(block: BlockFormat) -> tuple[Recipe, BlockFormat]:
    """The default recipe, rounding stochastically, and a format of longer blocks, under the names that they have: what is
    looked up by its name is not what was given."""
    return replace(mxref.RECIPES[block.default_recipe], rounding="stochastic"), replace(
        block, block_size=2 * block.block_size
    )


def _quantize_like(op: str) -> Iterator[Case]:
    for format, block in mxref.BLOCK_FORMATS.items():
        for recipe, given in product(recipes_of(format), _block_inputs(format)):
            x, axis, level = given.x, given.axis, given.level if recipe.name == block.default_recipe else given.others
            if level is None or (recipe.block_rows > 1 and (x.ndim < 2 or axis % x.ndim < x.ndim - 2)):
                continue
            if recipe.transform is not None:
                x = x.narrow(axis, 0, x.shape[axis] // recipe.transform.size * recipe.transform.size)
            for kind, tensor_scale in given.tensor_scales.items():
                if recipe.block_rows > 1 and kind.startswith(("-per_row", "-per_expert", "-gate_up")):
                    continue
                seed = 11 if recipe.rounding == "stochastic" else None
                arguments = _call(x, format, recipe=recipe, tensor_scale=tensor_scale, axis=axis, seed=seed)
                id = f"{format}-{recipe.name}-{given.label}{kind}"
                yield Case(op, id, format, _short(x.dtype), arguments, level, given.repeats)
        tails = inputs.spread_normal(7, 77, seed=4)
        seeded, longer = _namesakes(block)
        yield Case(op, f"{format}-{block.default_recipe}-longer_blocks", format, "float32", _call(tails, longer))
        for seed in SEEDS:
            arguments = _call(tails, format, recipe=seeded, seed=seed)
            yield Case(op, f"{format}-stochastic-tails-seed_{seed}", format, "float32", arguments)


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
            q = BlockTensor.from_codes(codes, scales.contiguous(), tensor, block, mxref.RECIPES[recipe])
            yield Case("dequantize", f"{format}-{recipe}-{value}-{_short(dtype)}", format, _short(dtype), _call(q, dtype))
        x = inputs.spread_normal(5, 48, 36, seed=9)
        for axis, tensor_scale in product((0, 1, 2), (None, "per_row") if block.tensor_scale else (None,)):
            q = mxref.quantize(x, format, axis=axis, tensor_scale=tensor_scale)
            yield Case("dequantize", f"{format}-axis_{axis}-{tensor_scale}", format, "float32", _call(q))
        empty = mxref.quantize(torch.zeros(0, 32), format)
        yield Case("dequantize", f"{format}-empty", format, "float32", _call(empty))
        every_other_row = mxref.quantize(inputs.spread_normal(14, 77, seed=9), format)[::2]
        yield Case("dequantize", f"{format}-strided", format, "float32", _call(every_other_row))
        long_rows = mxref.quantize(inputs.spread_normal(4, inputs.LONG_ROW, seed=50), format)[::2]
        yield Case("dequantize", f"{format}-strided_long_rows", format, "float32", _call(long_rows))
        longest_rows = mxref.quantize(inputs.spread_normal(2, 8 * inputs.LONG_ROW + 40, seed=50), format)
        yield Case("dequantize", f"{format}-longest_rows", format, "float32", _call(longest_rows), 2)
        for label, q in _stored(block):
            for dtype in (torch.float32, torch.bfloat16) if label != "tails" else (torch.bfloat16, torch.float16):
                yield Case("dequantize", f"{format}-{label}-{_short(dtype)}", format, _short(dtype), _call(q, dtype))
        yield Case("dequantize", f"{format}-beyond_int32", format, "bfloat16", _quantized_tile(format), 2, REPEATS)


def _stored(block: BlockFormat) -> Iterator[tuple[str, BlockTensor]]:
    """(label, tensor) of every kind that is stored otherwise than whole blocks along rows under one tensor scale."""
    base = mxref.RECIPES[block.default_recipe]
    tails = inputs.spread_normal(7, 77, seed=9)
    yield "tails", mxref.quantize(tails, block)
    yield "one_axis", mxref.quantize(tails[0], block)
    yield "four_axes", mxref.quantize(inputs.spread_normal(2, 3, 5, 40, seed=9), block, axis=1)
    yield "longer_blocks", mxref.quantize(tails, _namesakes(block)[1])
    tiles = replace(base, block_rows=16)  # under the name of another, as what follows
    for axis in (-1, -2):
        yield f"tiles-axis_{axis}", mxref.quantize(inputs.spread_normal(2, 37, 77, seed=9), block, recipe=tiles, axis=axis)
    for size in (16, 64):
        rotated = replace(base, transform=Hadamard(size, (1, -1, -1, 1) * (size // 4)))
        yield f"hadamard_{size}", mxref.quantize(inputs.spread_normal(5, 192, seed=9), block, recipe=rotated)
    if block.tensor_scale:
        each = (STATIC_SCALE * torch.arange(1.0, 21.0))[::2]
        for recipe in ("nvidia", "vllm_torch"):
            rows = mxref.quantize(inputs.spread_normal(14, 77, seed=9), block, recipe=recipe, tensor_scale="per_row")
            yield f"{recipe}-per_row", rows[::2]
            experts = inputs.spread_normal(5, 6, 40, seed=9)
            yield f"{recipe}-gate_up", mxref.quantize(experts, block, recipe=recipe, tensor_scale=each.reshape(5, 2))


def _quantized_tile(format: str) -> Callable[[], tuple[tuple, dict]]:
    return lambda: ((mxref.quantize(inputs.tile(torch.bfloat16), format), torch.bfloat16), {})


# ---- functions, products, experts -----------------------------------------------------------------------------------


_ALPHAS_AND_LIMITS = ((1.0, 7.0), (-1.702, 7.0), (0.0, 0.5), (1e30, 1.0), (1.702, 0.0), (1.702, -0.0), (1.702, inf), (2, 3))
_ODD = (0.0, -0.0, inf, -inf, nan, 7.0, -7.0, 1e-40)


def _function(name: str, gated: bool) -> Iterator[Case]:
    values = {
        "every_bfloat16": inputs.every_pattern(torch.bfloat16),
        "every_float16": inputs.every_pattern(torch.float16),
        "random_patterns": inputs.random_patterns(1 << 20, 12),
        "exponent_range": torch.linspace(-110, 95, 1 << 16),
        "strided": inputs.in_poison(inputs.spread_normal(31, 33, seed=13)).T,
        "empty": torch.zeros(0, 3),
    }
    for label, x in (values | inputs.layouts()).items():
        arguments = (x, x.flip(0) if x.ndim else x) if gated else (x,)
        yield Case(name, label, "-", _short(x.dtype), _call(*arguments))
    for alpha, limit in _ALPHAS_AND_LIMITS if name == "swiglu_oai" else ():
        for dtype in inputs.FLOAT_DTYPES:
            gate, up = (inputs.spread_normal(64, 65, seed=seed).to(dtype) for seed in (80, 81))
            gate[0, :8], up[0, :8] = torch.tensor(_ODD), torch.tensor(_ODD).flip(0)
            label = f"alpha_{alpha}-limit_{limit}-{_short(dtype)}"
            yield Case(name, label, "-", _short(dtype), _call(gate, up, alpha, limit))
    x = inputs.tile(torch.bfloat16)
    yield Case(name, "beyond_int32", "-", "bfloat16", _call(*((x, x.flip(0)) if gated else (x,))), 2, REPEATS)


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
        formats = f"{a_format} {b_format}"
        a = mxref.quantize(inputs.spread_normal(37, 336, seed=16), a_format)
        b = mxref.quantize(inputs.spread_normal(29, 336, seed=17), b_format)
        for out_dtype in (torch.float32, torch.bfloat16):
            case = f"{a_format}-{b_format}-{_short(out_dtype)}"
            yield Case("matmul", case, formats, _short(out_dtype), _call(a, b, out_dtype=out_dtype))
        for label, rows, columns, level in (("few", 13, 11, 1), ("many", 259, 130, 2)):
            given = _extremes(a_format, rows, 125, 3), _extremes(b_format, columns, 125, 4)
            yield Case("matmul", f"{a_format}-{b_format}-extremes-{label}", formats, "float32", _call(*given), level)
        a_block, b_block = mxref.BLOCK_FORMATS[a_format], mxref.BLOCK_FORMATS[b_format]
        for label, near in (("every_scale_pair", False), ("near_scales-many_rows", True)):
            length = max(a_block.block_size, b_block.block_size)
            given = [operands.one_block_a_scale(block, length, 52 + i, near) for i, block in enumerate((a_block, b_block))]
            yield Case("matmul", f"{a_format}-{b_format}-{label}", formats, "float32", _call(*given))
        if {a_format, b_format} <= {"mxfp8_e4m3", "mxfp8_e5m2"}:
            x, y = operands.ties(a_block, b_block)
            for label, rows in (("ties", x), ("ties-many_rows", x[torch.arange(4 * len(x.packed)) // 4])):
                yield Case("matmul", f"{a_format}-{b_format}-{label}", formats, "float32", _call(rows, y))
        large = _spread(300, 1000, 33, a_format), _spread(200, 1000, 34, b_format)
        yield Case("matmul", f"{a_format}-{b_format}-large", formats, "float32", _call(*large), 2)
    for (a_format, b_format), k in product(PATHS, TAILS):
        case = f"{a_format}-{b_format}-k_{k}-many_rows"
        yield Case("matmul", case, f"{a_format} {b_format}", "float32", partial(_tails, a_format, b_format, k), 2)
    for (a_format, b_format), apart in product(PATHS, (2, 12)):
        arguments = partial(_whole_tiles, a_format, b_format, apart)
        case = f"{a_format}-{b_format}-whole_tiles-apart_{2 * apart}"
        yield Case("matmul", case, f"{a_format} {b_format}", "float32", arguments, 2)
    for format, k in (("mxfp4", 128), ("nvfp4", 16), ("mxfp8_e4m3", 32), ("mxfp8_e5m2", 32)):
        arguments, times = partial(_beyond_int32, format, k), 2**31 // (256 * 8192) + 2
        formats = f"{format} {format}"
        yield Case("matmul", f"{format}-beyond_int32", formats, "bfloat16", arguments, 2, times, _repeat_a)
    for format, block in mxref.BLOCK_FORMATS.items():
        b = mxref.quantize(inputs.spread_normal(29, 336, seed=17), format)
        x = inputs.spread_normal(37, 336, seed=18, dtype=torch.bfloat16)
        yield Case("matmul", f"bfloat16-{format}", f"bfloat16 {format}", "bfloat16", _call(x, b))
        strided = inputs.in_poison(x), mxref.quantize(inputs.spread_normal(58, 336, seed=17), format)[::2]
        yield Case("matmul", f"bfloat16-{format}-strided", f"bfloat16 {format}", "bfloat16", _call(*strided))
        for label, rows, weights in _plain_products(block):
            dtype = _short(rows.dtype)
            yield Case("matmul", f"{dtype}-{format}-{label}", f"{dtype} {format}", "float32", _call(rows, weights))
        for k, level in ((33, 1), (1, 2), (77, 2), (80, 2)):
            x = inputs.spread_normal(3, k, seed=76, dtype=torch.float16)
            x[0] = 1.0
            given = _call(inputs.in_poison(x), _ends_before_poison(block, 8, k, 77))
            yield Case("matmul", f"float16-{format}-tail-k_{k}", f"float16 {format}", "float32", given, level)
        for a_format in ("nvfp4", "mxfp8_e4m3"):
            a = mxref.quantize(inputs.spread_normal(5, 77, seed=68), a_format)
            b = mxref.quantize(inputs.spread_normal(9, 77, seed=69), format)
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                options = {"bias": inputs.spread_normal(9, seed=70), "out_dtype": dtype, "semantics": "dequantized"}
                case = f"{a_format}-{format}-dequantized-bias-{_short(dtype)}"
                yield Case("matmul", case, f"{a_format} {format}", _short(dtype), _call(a, b, **options))
        for label, (arguments, options) in _products(block).items():
            dtype = _short(options.get("out_dtype", torch.float32))
            yield Case("matmul", f"{format}-{label}", f"{format} {format}", dtype, _call(*arguments, **options))


def _products(block: BlockFormat) -> dict[str, tuple[tuple, dict]]:
    """Arguments of products of a format with itself, by what they try."""
    format, size = block.name, block.block_size
    bias = inputs.spread_normal(35, seed=35)
    a, b = _spread(150, 3 * size + 5, 36, format), _spread(35, 3 * size + 5, 37, format)
    many = mxref.quantize(inputs.spread_normal(2, 3, 5, 4 * size, seed=38), format)
    found = {
        "every_scale": ((_every_scale(block, 39), _every_scale(block, 40)), {}),
        "many_rows": ((a, b), {}),
        "many_rows-bias": ((a, b), {"bias": bias, "out_dtype": torch.bfloat16}),
        "few_rows-bias": ((a[:9], b), {"bias": bias.half().repeat_interleave(2)[::2], "out_dtype": torch.float16}),
        "few_rows-bias-float32": ((a[:30], b), {"bias": bias}),
        "many_rows-every_addition_rounds": ((_far_apart(140, 54, block), _far_apart(35, 55, block)), {}),
        "strided": ((a[3::4], b[::2]), {}),
        "batch": ((many, many[-1][-1]), {"out_dtype": torch.bfloat16}),
        "specials": ((_special(block, 140, 41), _special(block, 24, 42)), {}),
        "transformed": ((_rotated(format, 7, 43), _rotated(format, 9, 44)), {}),
        "empty_rows": ((a[:0], b), {}),
        "empty_columns": ((a[:5], b[:0]), {}),
        "empty_k": ((mxref.quantize(torch.zeros(3, 0), format), mxref.quantize(torch.zeros(4, 0), format)), {}),
    }
    for k in (1, size - 1, size + 1):
        found[f"k_{k}"] = ((_spread(5, k, 45, format), _spread(6, k, 46, format)), {})
        found[f"k_{k}-many_rows"] = ((_spread(130, k, 45, format), _spread(6, k, 46, format)), {})
    if block.tensor_scale:
        for label, recipe, scale in (
            ("per_row", "nvidia", "per_row"),
            ("divided", "vllm_torch", "per_row"),
            ("divided-static", "vllm_torch", torch.tensor(1 / STATIC_SCALE)),
            ("tiles", "nvidia_16x16", None),
        ):
            x, y = inputs.spread_normal(133, 80, seed=47), inputs.spread_normal(21, 80, seed=48)
            pair = tuple(mxref.quantize(values, format, recipe=recipe, tensor_scale=scale) for values in (x, y))
            found[label] = (pair, {"bias": bias[:21], "out_dtype": torch.float16})
            found[f"{label}-few_rows"] = ((pair[0][:16] if recipe != "nvidia_16x16" else pair[0], pair[1]), {})
        tiles = mxref.quantize(
            inputs.spread_normal(2, 19, 80, seed=49), format, recipe="nvidia_16x16", tensor_scale="per_expert"
        )
        found["tiles-batch"] = ((tiles, pair[1]), {})
    return found


def _plain_products(block: BlockFormat) -> Iterator[tuple[str, torch.Tensor, BlockTensor]]:
    """(label, rows, weights): weights of moderate size; small products beside large ones that cancel, so that additions of a
    block round, in any order otherwise; every scale, with rows that hold Inf and NaN; elements that are not numbers."""
    size = block.block_size
    x, weights = (inputs.spread_normal(n, 3 * size, seed=seed).clamp(-8, 8) for n, seed in ((5, 71), (7, 72)))
    weights = mxref.quantize(weights, block)
    yield "moderate", x.bfloat16(), weights
    codes = weights.codes.clone()
    codes[:, ::size] = codes[:, size // 2 :: size] = block.element.max_code
    x[:, ::size] = torch.ldexp(x[:, ::size], torch.tensor(46))
    x[:, size // 2 :: size] = -x[:, ::size]
    yield "cancelling", x, BlockTensor.from_codes(codes, weights.scales, weights.tensor_scale, block, weights.recipe)
    rows = torch.ones(4, 4 * size)
    rows[1], rows[2, 1], rows[3, 2] = -(2.0**-14), torch.inf, torch.nan
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield "every_scale", rows.to(dtype), _every_scale(block, 73)
    yield "specials", inputs.spread_normal(3, 3 * size, seed=74, dtype=torch.bfloat16), _special(block, 32, 75)


def _ends_before_poison(block: BlockFormat, rows: int, k: int, seed: int) -> BlockTensor:
    """Every other row ends with smallest numbers under a scale that makes the codes of the row behind it, largest ones or
    NaN, Inf in float16; if there are tensor scales, one row under one that is Inf."""
    codes = _codes(block.element.name, rows, k, seed)
    codes[::2, -(k % block.block_size or block.block_size) :] = 1
    codes[1::4], codes[3::4] = block.element.max_code, block.element.code_count // 2 - 1
    scales = torch.full((rows, -(-k // block.block_size)), block.scale.positive.index(1.0), dtype=torch.uint8)
    if block.tensor_scale:
        scales[::2, -1], scale = block.scale.max_code, torch.full((rows, 1), 64.0)
        codes[4], scale[4] = 1, 2.0**121
        return BlockTensor.from_codes(codes, scales, scale, block, block.default_recipe)
    scales[::2, -1] += 15 - int(log2(block.element.quantum))
    return BlockTensor.from_codes(codes, scales, None, block, block.default_recipe)


def _spread(rows: int, k: int, seed: int, format: str) -> BlockTensor:
    """Quantized numbers whose blocks differ by many binades, so that the order of the additions shows."""
    return mxref.quantize(inputs.spread_normal(rows, k, seed=seed), format)


def _far_apart(rows: int, seed: int, block: BlockFormat) -> BlockTensor:
    """Eight blocks a row, up to 2^15 apart, so that not even sums of a few bits are exact across them."""
    x = inputs.spread_normal(rows, 8, block.block_size, seed=seed)
    x = torch.ldexp(x, torch.arange(8)[:, None] * 7 % 16)
    return mxref.quantize(x.flatten(1), block)


def _beyond_int32(format: str, k: int) -> tuple[tuple, dict]:
    """Operands whose product, repeated along the rows of `a`, has more elements than 32 bits count."""
    return (_spread(256, k, 64, format), _spread(8192, k, 65, format)), {"out_dtype": torch.bfloat16}


def _repeat_a(args: tuple, options: dict, times: int) -> tuple[tuple, dict]:
    a, b = args
    return (a[torch.arange(len(a.packed), device=a.device).repeat(times)], b), options


def _tails(a: str, b: str, k: int) -> tuple[tuple, dict]:
    return (_spread(300, k, 58, a), _spread(150, k, 59, b)), {}


def _rotated(format: str, rows: int, seed: int) -> BlockTensor:
    block = mxref.BLOCK_FORMATS[format]
    recipe = replace(mxref.RECIPES[block.default_recipe], name="hadamard", transform=Hadamard(16, (1, -1, -1, 1) * 4))
    return mxref.quantize(inputs.spread_normal(rows, 96, seed=seed), format, recipe=recipe)


def _whole_tiles(a_format: str, b_format: str, apart: int) -> tuple[tuple, dict]:
    """Many rows and a K of whole tiles. Scales of a row are up to twice `apart` codes apart; one block of a is NaN, and one
    row of it has a scale far from the others."""
    a, b = _extremes(a_format, 459, 512, 79, apart), _extremes(b_format, 330, 512, 80, apart)
    scales = a.scales.clone()
    scales[7, 3], scales[200, 5] = a.format.scale.nan_code, a.format.scale.positive.index(1.0) - 52
    return (BlockTensor.from_codes(a.codes, scales, None, a.format, a.recipe), b), {}


def _extremes(format: str, rows: int, k: int, seed: int, apart: int = 20) -> BlockTensor:
    """Rows whose dots need all the bits that they can need: largest elements, with random signs, beside smallest ones,
    cancelling; most scales near one another, some `apart` from 1."""
    block = mxref.BLOCK_FORMATS[format]
    element, size = block.element, block.block_size
    generator = torch.Generator().manual_seed(seed)
    largest, smallest = element.max_code, next(code for code, value in enumerate(element.values) if value == element.quantum)
    minus = element.code_count - largest if element.kind == "integer" else largest | element.sign_mask
    choices = torch.tensor(
        [[largest] * 4, [largest, minus] * 2, [largest, smallest, minus, minus], [largest, minus, 0, smallest]]
    )
    codes = torch.empty(rows, k, dtype=torch.uint8)
    for row in range(rows):
        picked = torch.randint(4, (k,), generator=generator) if row % 8 else torch.zeros(k, dtype=torch.int64)
        codes[row] = choices[row % len(choices)][picked]
    one = block.scale.positive.index(1.0)
    scales = one + torch.randint(-2, 3, (rows, -(-k // size)), generator=generator)
    scales[1::3, 1:] += torch.randint(-apart, apart + 1, scales[1::3, 1:].shape, generator=generator)
    return BlockTensor.from_codes(codes, scales.to(torch.uint8), None, block, mxref.RECIPES[block.default_recipe])


def _every_scale(block: BlockFormat, seed: int) -> BlockTensor:
    """A row for every scale code, NaN too, of a block of random elements; every other row ends with a block of zeros."""
    scale_codes = [code for code in range(256) if not code & block.scale.sign_mask]
    codes = _codes(block.element.name, len(scale_codes), 4 * block.block_size, seed)
    codes[:, : block.block_size].clamp_(min=1)
    codes[::2, -block.block_size :] = 0
    one = block.scale.positive.index(1.0)
    scales = torch.full((len(scale_codes), 4), one, dtype=torch.uint8)
    scales[:, 1], scales[::2, -1] = torch.tensor(scale_codes, dtype=torch.uint8), 0
    return BlockTensor.from_codes(codes, scales, None, block, mxref.RECIPES[block.default_recipe])


def _special(block: BlockFormat, rows: int, seed: int) -> BlockTensor:
    """Elements that are NaN or Inf, and blocks that are."""
    codes = _codes(block.element.name, rows, 3 * block.block_size, seed)
    one = block.scale.positive.index(1.0)
    scales = torch.full((rows, 3), one, dtype=torch.uint8)
    scales[5::16, 1] = block.scale.nan_code
    codes[5::32, block.block_size : 2 * block.block_size] = 0
    return BlockTensor.from_codes(codes, scales, None, block, mxref.RECIPES[block.default_recipe])


def _route() -> Iterator[Case]:
    yield Case("route", "softmax", "-", "float32", _call(inputs.spread_normal(257, 64, seed=19), 8))


def _weights(format: str, rows: int, length: int, seed: int, recipe: str | None = None, tensor_scale=None) -> BlockTensor:
    """Six experts of normal numbers of mixed magnitudes."""
    x = inputs.spread_normal(6, rows, length, seed=seed)
    return mxref.quantize(x, format, recipe=recipe, tensor_scale=tensor_scale)


def _of_many_magnitudes(*shape: int, seed: int) -> torch.Tensor:
    """Normal numbers; each 16 along the last axis have another magnitude, up to 2^8 apart."""
    exponents = torch.arange(shape[-1] // 16) * 5 % 9
    scale = torch.ldexp(torch.ones(exponents.shape), exponents).repeat_interleave(16)
    return inputs.spread_normal(*shape, seed=seed) * scale


def _worst_weights(format: str, rows: int, length: int) -> BlockTensor:
    """An expert each: all largest; signs that alternate; blocks that cancel; zeros; scales at the format's ends, NaN among
    them, in one row each; scales that grow from block to block."""
    block = mxref.BLOCK_FORMATS[format]
    largest, sign = block.element.max_code, block.element.sign_mask or -2 * block.element.max_code
    codes = torch.full((6, rows, length), largest, dtype=torch.int32)
    codes[1, :, ::2] += sign
    codes[2, :, length // 2 :] += sign
    codes[3] = 0
    count = -(-length // block.block_size)
    scales = torch.full((6, rows, count), block.scale.positive.index(1.0), dtype=torch.uint8)
    scales[4, 0], scales[4, 1], scales[4, 2, -1] = 0, block.scale.max_code, block.scale.nan_code
    scales[4, 3, 0], scales[4, 4, ::2], scales[4, 5, 1::2] = 1, block.scale.max_code, 0
    scales[5] += torch.arange(count, dtype=torch.uint8)
    scale = torch.tensor([0.5, 1.0, 2.0, 1.0, 1.0, 0.25])[:, None, None] if block.tensor_scale else None
    codes = (codes & (block.element.code_count - 1)).to(torch.uint8)
    return BlockTensor.from_codes(codes, scales, scale, block, block.default_recipe)


def _worst_rows(length: int) -> torch.Tensor:
    """Rows of x: of one magnitude, alternating, cancelling, zero, huge, tiny, one hot, with a NaN, with an Inf."""
    x = torch.ones(9, length)
    x[1, ::2] = -1.0
    x[2, length // 2 :] = -1.0
    x[3] = 0.0
    x[4], x[5] = 2.0**120, 2.0**-120
    x[6, 1:] = 0.0
    x[7, 5], x[8, -1] = torch.nan, torch.inf
    return x.bfloat16()


def _second_operands(a: BlockFormat, b: BlockFormat) -> Iterator[tuple[str, torch.Tensor, BlockTensor]]:
    """(label, rows as values, one expert's weights) for the second product of a layer."""
    length = max(a.block_size, b.block_size)
    x, w2 = operands.one_block_a_scale(a, length, 56), operands.one_block_a_scale(b, length, 57)
    yield "every_scale_pair", mxref.dequantize(x).nan_to_num(1.0, 1.0, 1.0), w2
    yield "extremes", mxref.dequantize(_extremes(a.name, 13, 125, 3)), _extremes(b.name, 11, 125, 4)
    if {a.name, b.name} <= {"mxfp8_e4m3", "mxfp8_e5m2"}:
        x, w2 = operands.ties(a, b)
        yield "ties", mxref.dequantize(x), w2


def _many_experts(format: str) -> tuple[tuple, dict]:
    """A layer that is repeated until its weights have more bytes than 32 bits count; each copy of it has its own tokens."""
    x = inputs.spread_normal(4, 512, seed=66, dtype=torch.bfloat16)
    layer = _weights(format, 512, 512, 67), _weights(format, 512, 256, 68)
    return (x, *layer, *mxref.route(inputs.spread_normal(4, 6, seed=69), 2)), {"act_format": format}


def _repeat_experts(args: tuple, options: dict, times: int) -> tuple[tuple, dict]:
    x, w13, w2, ids, weights = args
    tokens, experts = (torch.arange(len(part), device=x.device) for part in (x, w13.packed))
    shift = torch.arange(times, device=x.device).repeat_interleave(len(tokens)) * len(experts)
    tokens, experts = tokens.repeat(times), experts.repeat(times)
    return (x[tokens], w13[experts], w2[experts], ids[tokens] + shift[:, None], weights[tokens]), options


def _tails_of_layers(format: str, act_format: str, k: int) -> tuple[tuple, dict]:
    x = inputs.spread_normal(200, k, seed=61, dtype=torch.bfloat16)
    layer = _weights(format, 2 * k, k, 62), _weights(format, k, k, 63)
    return (x, *layer, *mxref.route(inputs.spread_normal(200, 6, seed=60), 2)), {"act_format": act_format}


def _moe_experts() -> Iterator[Case]:
    ids, weights = mxref.route(inputs.spread_normal(33, 6, seed=20), 2)
    x = inputs.spread_normal(33, 96, seed=21, dtype=torch.bfloat16)

    def any_case(label: str, w13, w2, act_format, x=x, ids=ids, weights=weights, level=1, suffix="", **options) -> Case:
        formats = w13.format.name if act_format == w13.format.name else f"{w13.format.name} {act_format}"
        arguments = _call(x, w13, w2, ids, weights, act_format=act_format, **options)
        name = f"{w13.format.name}-{act_format}-{label}{suffix}"
        return Case("moe_experts", name, formats, _short(x.dtype), arguments, level)

    case = any_case

    for format in mxref.BLOCK_FORMATS:
        w13, w2 = _weights(format, 160, 96, 22), _weights(format, 96, 80, 23)
        for act_format, activation in ((format, "silu"), (None, "silu"), (format, "swiglu_oai")):
            yield case(activation, w13, w2, act_format, activation=activation)
    few, few_ids, few_weights = x[:6], ids[:6].clone(), weights[:6]
    few_ids[0] = few_ids[0, 0]  # an expert twice
    small = {"x": few, "ids": few_ids, "weights": few_weights}
    pairs = [("mxfp4", a) for a in ("mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxint8", "nvfp4")]
    for format, act_format in (*pairs, ("nvfp4", "mxfp4"), ("mxfp6_e3m2", "mxfp8_e4m3"), ("mxfp8_e4m3", "mxfp4")):
        yield case("silu", _weights(format, 160, 96, 22), _weights(format, 96, 80, 23), act_format, **small)
    rows_of = {96: few, 128: inputs.spread_normal(6, 128, seed=21, dtype=torch.bfloat16)}
    in_64s = partial(any_case, suffix="-whole", level=2)  # rows of whole runs of 64 elements
    layers = (
        ("nvfp4", "nvfp4", 128, 64, in_64s),
        *((f, a, 96, 80, any_case) for f in ("nvfp4", "mxfp4") for a in (f, None)),
    )
    for format, act_format, hidden, width, case in layers:
        few = rows_of[hidden]
        small = {"x": few, "ids": few_ids, "weights": few_weights}
        w13, w2 = _weights(format, 2 * width, hidden, 22), _weights(format, hidden, width, 23)
        biases = {
            "bias13": inputs.spread_normal(6, 2 * width, seed=32),
            "bias2": inputs.spread_normal(6, hidden, seed=33).bfloat16(),
        }
        oai = {"activation": "swiglu_oai", "gate_up": "interleaved"}
        yield case("interleaved_biases", w13, w2, act_format, **small, **biases, **oai)
        yield case("biases_terms", w13, w2, act_format, **small, **biases, combine=False)
        yield case("rounded_slots", w13, w2, act_format, **small, round_per_slot=torch.bfloat16, out_dtype=torch.float32)
        yield case("twice_rounded", w13, w2, act_format, **small, activation="silu_rounded_twice", combine=False)
        foreign = {"expert_map": torch.tensor([0, -1, 5, 2, -1, 1])}
        yield case("expert_map", w13, w2, act_format, **small, **foreign)
        yield case("expert_map_terms", w13, w2, act_format, **small, **foreign, combine=False)
        top_1 = {"x": few.half(), "ids": few_ids[:, :1], "weights": few_weights[:, :1]}
        on_input = {**top_1, "apply_router_weight_on_input": True}
        yield case("weight_on_input", w13, w2, act_format, **on_input)
        yield case("weight_on_input-rounded_slots", w13, w2, act_format, **on_input, round_per_slot=torch.bfloat16)
        scales = w13.scales.clone()
        scales[few_ids[1, 0], 3, 1] = w13.format.scale.nan_code
        yield case("nan_scale", replace(w13, scales=scales), w2, act_format, **small)
        if case is any_case:  # no tokens, or rows that are not whole: the others' way to take them
            nothing = {"x": few[:0], "ids": few_ids[:0], "weights": few_weights[:0]}
            yield case("empty", w13, w2, act_format, **nothing)
            tails = _weights(format, 90, 77, 34), _weights(format, 77, 45, 35)
            yield case("tails", *tails, act_format, few[:, :77], few_ids, few_weights)
        rounding = _of_many_magnitudes(6, 4 * width, hidden, seed=39), _of_many_magnitudes(6, hidden, 2 * width, seed=40)
        rounding = [mxref.quantize(weight, format) for weight in rounding]
        wide = {"x": _of_many_magnitudes(6, hidden, seed=41), "ids": (few_ids[:, :1] + torch.arange(4)) % 6}
        wide |= {"weights": few_weights[:, :1] * torch.tensor([0.3, 0.25, 7.0, 1.1])}
        yield case("every_addition_rounds", *rounding, act_format, **wide)
        wide = {name: given[:3] for name, given in wide.items()}
        yield case("every_addition_rounds-few", *rounding, act_format, **wide)
        relu = _weights(format, width, hidden, 36)
        for layout in ("concatenated", "interleaved"):  # of a single gate: no difference
            label, options = f"relu2-{layout}", {"activation": "relu2", "gate_up": layout}
            yield case(label, relu, w2, act_format, few.float(), few_ids, few_weights, **options)
        strided = w13[torch.arange(12) // 2][::2], w2, act_format, inputs.in_poison(few)
        yield case("strided", *strided, few_ids.int(), few_weights)
        worst_ids = torch.arange(9)[:, None] * torch.tensor([1, 5, 7]) % 6
        worst = {"x": _worst_rows(hidden), "ids": torch.cat([worst_ids, worst_ids + 1], 1) % 6, "weights": torch.ones(9, 6)}
        yield case(
            "worst", _worst_weights(format, 2 * width, hidden), _weights(format, hidden, width, 41), act_format, **worst
        )
        yield case("worst_second", w13, _worst_weights(format, hidden, width), act_format, **worst, combine=False)
        once = {name: given if name == "x" else given[:, :1] for name, given in worst.items()}
        yield case(
            "worst-few", _worst_weights(format, 2 * width, hidden), _weights(format, hidden, width, 41), act_format, **once
        )
    for format, act_format in product(mxref.BLOCK_FORMATS, mxref.BLOCK_FORMATS):
        if format != act_format or format not in ("mxfp4", "nvfp4"):
            yield case("worst", _worst_weights(format, 160, 96), _worst_weights(format, 96, 80), act_format, **worst)
        for label, rows, w2 in _second_operands(mxref.BLOCK_FORMATS[act_format], mxref.BLOCK_FORMATS[format]):
            x, w13, w2 = operands.through_a_layer(rows, w2)
            one = {"x": x, "ids": torch.zeros(len(x), 1, dtype=torch.int64), "weights": torch.ones(len(x), 1)}
            scales = (torch.tensor(1.0), torch.tensor(64.0)) if act_format == "nvfp4" else None
            yield case(label, w13, w2, act_format, **one, act_tensor_scales=scales, combine=False)
            if format == act_format == "nvfp4" and label == "every_scale_pair":
                w13, w2 = (w[torch.zeros(len(x), dtype=torch.int64)] for w in (w13, w2))
                one["ids"] = torch.arange(len(x))[:, None]
                yield case(f"{label}-few", w13, w2, act_format, **one, act_tensor_scales=scales, combine=False, level=2)
    each = torch.tensor([0.01, 0.02, 0.5, 1.0, 0.3, 0.07])
    for hidden, width, case in ((128, 64, in_64s), (96, 80, any_case)):
        few = rows_of[hidden]
        small = {"x": few, "ids": few_ids, "weights": few_weights}
        w13, w2 = (
            _weights("nvfp4", 2 * width, hidden, 22, None, torch.stack([each, each * 3], 1)),
            _weights("nvfp4", hidden, width, 23, None, each),
        )
        yield case("gate_up_scales", w13, w2, "nvfp4", **small, act_tensor_scales=(torch.tensor(0.02), torch.tensor(0.5)))
        yield case("scale_an_expert", w13, w2, "nvfp4", **small, act_tensor_scales=(each, each * 5))
    yield case("gate_up_scales", w13, w2, None, **small)
    strided = each[:, None].expand(6, 2)[:, 1], each[:1].expand(6)
    yield case("scale_an_expert-strided", w13, w2, "nvfp4", **small, act_tensor_scales=strided)
    w13, w2 = _weights("nvfp4", 160, 96, 22, "nvidia_16x16"), _weights("nvfp4", 96, 80, 23, "vllm_torch")
    yield case("vllm", w13, w2, "nvfp4", **small, act_recipe="vllm_triton")
    pairs = ("nvfp4", "nvfp4", None), ("nvfp4", "nvfp4", (each, each * 5)), ("mxfp4", "mxfp8_e4m3", None)
    for format, act_format, scales in (*pairs, ("mxint8", "nvfp4", None)):
        layer = _weights(format, 160, 96, 22), _weights(format, 96, 80, 23), act_format
        dequantized = {"semantics": "dequantized", "act_tensor_scales": scales}
        yield case("dequantized" if scales is None else "dequantized-scale_an_expert", *layer, **small, **dequantized)
    quark = _weights("mxfp4", 160, 96, 22, "quark_even"), _weights("mxfp4", 96, 80, 23, "quark_even")
    yield case("quark", *quark, "mxfp4", **small, act_recipe="quark_even")
    for (format, act_format), k in product(PATHS, TAILS):
        formats = format if format == act_format else f"{format} {act_format}"
        arguments = partial(_tails_of_layers, format, act_format, k)
        yield Case("moe_experts", f"{format}-{act_format}-k_{k}-200_tokens", formats, "bfloat16", arguments, 2)
    for format in ("mxfp4", "mxfp8_e4m3"):
        bits = mxref.BLOCK_FORMATS[format].element.bits
        arguments, times = partial(_many_experts, format), 2**31 * 8 // (6 * 512 * 512 * bits) + 2
        yield Case(
            "moe_experts", f"{format}-{format}-beyond_int32", format, "bfloat16", arguments, 2, times, _repeat_experts
        )
    for format, act_format in (("nvfp4", "nvfp4"), ("mxfp4", "mxfp4"), ("mxfp4", "mxfp6_e3m2"), ("mxfp4", "mxfp8_e4m3")):
        ids, weights = mxref.route(inputs.spread_normal(700, 6, seed=42), 4)
        x = inputs.spread_normal(700, 720, seed=43, dtype=torch.bfloat16)
        large = _weights(format, 608, 720, 44), _weights(format, 720, 304, 45)
        for tokens in (1, 20, 100, 700):
            yield case(f"{tokens}_tokens", *large, act_format, x[:tokens], ids[:tokens], weights[:tokens], level=2)


def _activate_quantize() -> Iterator[Case]:
    x = torch.cat([inputs.random_patterns(64 * 160, 24).reshape(64, 160), inputs.spread_normal(64, 160, seed=25)])
    hidden = {
        "every_bfloat16": inputs.every_pattern(torch.bfloat16).reshape(-1, 128),
        "random": x,
        "expanded_float16": inputs.spread_normal(7, 144, seed=26, dtype=torch.float16).expand(5, 7, 144),
        "strided": inputs.spread_normal(33, 250, seed=27)[:, ::2][:, 1:],
        "empty": torch.zeros(0, 64),
        "negated": torch._neg_view(inputs.spread_normal(7, 144, seed=26)),
        "long_rows": inputs.spread_normal(2, 2 * inputs.LONG_ROW + 80, seed=85),
        "few_rows": inputs.spread_normal(2, 4096, seed=86, dtype=torch.bfloat16),
    }
    each = (STATIC_SCALE * torch.arange(1.0, 67.0))[::2]
    for format, block in mxref.BLOCK_FORMATS.items():
        seeded, longer = _namesakes(block)
        more = [("negated", "negated", format, None), ("longer_blocks", "strided", longer, None)]
        more += [("few_rows", "few_rows", format, None)]
        if block.tensor_scale:
            more += [("long_rows-per_row", "long_rows", format, "per_row"), ("per_row_static", "strided", format, each)]
        for case, label, like, scale in more:
            arguments = _call(hidden[label], like, tensor_scale=scale)
            yield Case("activate_quantize", f"{format}-{case}", format, _short(hidden[label].dtype), arguments)
        for activation, (layout, seed) in product(ACTIVATIONS, (("concatenated", 28), ("interleaved", 0))):
            choices = [("random", None, None), ("every_bfloat16", None, None)]
            if activation in ("silu", "relu2"):
                choices += [(label, None, None) for label in ("expanded_float16", "strided", "empty")]
                choices += [("random", seeded, None)]
                scales = ("per_row", torch.tensor(STATIC_SCALE)) if block.tensor_scale else ()
                choices += [("random", None, scale) for scale in scales]
            for label, recipe, scale in choices:
                kind = "stochastic" if recipe else "default"
                case = f"{format}-{activation}-{layout}-{label}-{kind}-{scale if isinstance(scale, str) else scale is None}"
                arguments = dict(activation=activation, gate_up=layout, recipe=recipe, tensor_scale=scale)
                given = hidden[label]
                arguments = _call(given, format, seed=seed if recipe else None, **arguments)
                yield Case("activate_quantize", case, format, _short(given.dtype), arguments)
            for dtype in (torch.bfloat16, torch.float16):
                case = f"{format}-{activation}-{layout}-every_gate-{_short(dtype)}"
                arguments = _call(inputs.every_gate(dtype, layout), format, activation=activation, gate_up=layout)
                yield Case("activate_quantize", case, format, _short(dtype), arguments)


def _to_layout() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(29)
    for shape in ((1, 1), (128, 4), (129, 5), (3, 200, 9), (2, 2, 256, 64), (0, 4), (5, 0)):
        scales = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        name = "x".join(map(str, shape))
        yield Case("to_layout", f"tile_128x4-{name}", "-", "uint8", _call(scales, "tile_128x4"))
    transposed = torch.randint(0, 256, (70, 300), generator=generator, dtype=torch.uint8).T
    yield Case("to_layout", "tile_128x4-transposed", "-", "uint8", _call(transposed, "tile_128x4"))
    codes = torch.randint(0, 16, (6, 64), generator=generator, dtype=torch.uint8)
    for layout in ("linear", "ggml_mxfp4", "interleaved"):
        yield Case("to_layout", layout, "-", "uint8", _call(codes, layout))


def _refused(op: str) -> Iterator[Case]:
    for label, error, format, arguments in wrong_calls(op):
        (_, first), *others = arguments.items()
        dtype = _short(tensors(first)[0].dtype)
        yield Case(op, f"refused-{label}", format, dtype, _call(first, **dict(others)), raises=error)


_GENERATORS: dict[str, Callable[[], Iterator[Case]]] = {
    "encode": _encode,
    "decode": _decode,
    "quantize": lambda: _quantize_like("quantize"),
    "qdq": lambda: _quantize_like("qdq"),
    "dequantize": _dequantize,
    **{name: (lambda name=name: _function(name, False)) for name in ("exp", "sigmoid", "silu", "gelu_tanh", "relu2")},
    **{name: (lambda name=name: _function(name, True)) for name in ("swiglu", "swiglu_oai")},
    "activate_quantize": _activate_quantize,
    "to_layout": _to_layout,
    "block_dot": _block_dot,
    "matmul": _matmul,
    "route": _route,
    "moe_experts": _moe_experts,
}
OPS = tuple(_GENERATORS)
