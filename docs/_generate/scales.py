"""Scale rules: their bytes, where they saturate, what they cost; E4M3 scales; the tensor scale."""

from dataclasses import replace
from functools import cache

import torch

import mxref
from docs._generate.drawing import Drawing, box, figure, line, path, text
from docs._generate.markdown import NO_BREAK, exact, hexadecimal, readable, short, table
from mxref.checkpoints.dialects import DIALECTS
from mxref.elements import reciprocal
from mxref.formats import BLOCK_FORMATS, ELEMENT_FORMATS
from mxref.producers import ROWS
from mxref.recipes import RECIPES
from mxref.scales import EXPONENT_RULES

AMAXES = (5.9, 6.1, 6.9, 7.0, 7.9)
SAMPLES = 1 << 17
SEED = 20


def _recipe(rule: str) -> mxref.Recipe:
    """The plainest recipe with that rule."""
    return replace(RECIPES["ocp"], name=rule, scale_rule=rule)


def rule_list() -> str:
    """Each rule with what it says and the recipes that have it."""
    rows = []
    for rule, function in EXPONENT_RULES.items():
        words, _, source = " ".join(function.__doc__.split()).partition(" Source: ")
        names = ", ".join(f"`{r.name}`" for r in RECIPES.values() if r.scale_rule == rule)
        rows.append((f"`{rule}`", words.rstrip("."), source.rstrip("."), names))
    return table(("rule", "exponent of the scale", "source", "recipes"), rows)


def rule_bytes(format: str = "mxfp4", amaxes: tuple[float, ...] = AMAXES) -> str:
    """The scale byte of each rule for blocks of a given maximum, and what the maximum becomes."""
    rows = []
    for rule in EXPONENT_RULES:
        cells = []
        for amax in amaxes:
            q = mxref.quantize(torch.tensor([amax, 1.0]), format, recipe=_recipe(rule))
            cells.append(f"`{hexadecimal(int(q.scales[0]))}`{NO_BREAK}→{NO_BREAK}{exact(float(mxref.dequantize(q)[0]))}")
        rows.append((f"`{rule}`", *cells))
    return table((f"{format}, amax", *map(str, amaxes)), rows)


def rule_thresholds() -> str:
    """For each element format, the significand of amax above which a rule takes the next power of two."""
    rows = []
    for block in BLOCK_FORMATS.values():
        if not block.scale.is_power_of_two:
            continue
        cells = [_threshold(rule, block.element) for rule in EXPONENT_RULES]
        rows.append((block.name, exact(block.element.max / 2.0**block.element.emax), *cells))
    return table(("format", "element max / 2^emax", *(f"`{rule}`" for rule in EXPONENT_RULES)), rows)


def _threshold(rule: str, element: mxref.ElementFormat) -> str:
    """What a rule adds to the exponent of amax minus emax, and from which significand on.

    Found by trying every significand of ten bits, and one ulp above each.
    """
    plain = torch.arange(1024, 2048) / 1024
    tried = torch.stack([plain, torch.nextafter(plain, torch.tensor(2.0))], dim=1).flatten()
    added = (EXPONENT_RULES[rule](tried.view(torch.int32), element) + element.emax).tolist()
    parts = [f"{added[0]:+d}" if added[0] else "0"]
    for i in range(1, len(added)):
        if added[i] != added[i - 1]:
            where = f"from {exact(float(tried[i]))}" if i % 2 == 0 else f"above {exact(float(tried[i - 1]))}"
            parts.append(f"{added[i]:+d} {where}" if added[i] else f"0 {where}")
    return ", ".join(parts)


def saturation(format: str = "mxfp4") -> str:
    """For each rule, where the maximum of a block lands among the element's values, over one binade of amax."""
    caption = f"{format}: amax over its scale (up) against amax's significand (across); above the dashed line it saturates"
    element = BLOCK_FORMATS[format].element
    return figure(caption, _saturation(element, 200, 150, 3), _saturation(element, 136, 110, 2))


def _saturation(element: mxref.ElementFormat, width: float, height: float, across: int) -> Drawing:
    """A panel a rule, of that size, so many beside each other."""
    left, gap = 34, 16
    top_value = 2 * element.max
    shapes = []
    for i, rule in enumerate(EXPONENT_RULES):
        x0, y0 = left + i % across * (width + gap), 34 + i // across * (height + 54)

        def place(significand: float, value: float, x0=x0, y0=y0) -> tuple[float, float]:
            return x0 + (significand - 1) * width, y0 + (1 - value / top_value) * height

        limit = place(1, element.max)[1]
        shapes += [box(x0, y0, width, limit - y0, "clipped"), line(x0, limit, x0 + width, limit, "limit")]
        shapes += [line(x0, y0 + height, x0 + width, y0 + height, "axis"), line(x0, y0, x0, y0 + height, "axis")]
        significands = 1 + torch.arange(512) / 512
        exponents = EXPONENT_RULES[rule](significands.view(torch.int32), element)
        landed = (significands.double() * 2.0 ** -exponents.double()).tolist()
        runs: list[list[tuple[float, float]]] = [[]]
        for significand, value, before in zip(significands.tolist(), landed, [landed[0], *landed]):
            if value < before / 1.5:
                runs.append([])
            runs[-1].append(place(significand, value))
        shapes += [path(run, "first") for run in runs]
        shapes.append(text(x0 + width / 2, y0 - 12, rule))
        if i % across == 0:
            labels = (limit + 4, exact(element.max)), (y0 + height, "0")
            shapes += [text(left - 6, y, label, "end", "small") for y, label in labels]
        shapes.append(text(x0, y0 + height + 16, "1", "start", "small"))
        shapes.append(text(x0 + width, y0 + height + 16, "2", "end", "small"))
    rows = -(-len(EXPONENT_RULES) // across)
    return Drawing(left + across * (width + gap), 6 + rows * (height + 54), shapes)


def _data() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    gaussian = torch.randn(SAMPLES, generator=generator)
    chi_square = torch.randn(3, SAMPLES, generator=generator).square().sum(0)
    return {
        "Gaussian": gaussian,
        "heavy tails": gaussian / (chi_square / 3).sqrt(),
    }  # Student's t of three degrees of freedom


@cache
def _rule_errors() -> dict[tuple[str, str], dict[str, str]]:
    """By data and format with power-of-two scales: what each of mxref's recipes for them costs."""
    recipes = [r for r in RECIPES.values() if r.name.startswith("ocp")]
    mx = [block.name for block in BLOCK_FORMATS.values() if block.scale.is_power_of_two]
    data = _data().items()
    return {(kind, name): {r.name: _error(x, name, r) for r in recipes} for kind, x in data for name in mx}


def rule_errors() -> str:
    """Signal-to-noise ratio of every rule in every format with power-of-two scales, and how many elements saturate."""
    rows = [(*key, *errors.values()) for key, errors in _rule_errors().items()]
    recipes = next(iter(_rule_errors().values()))
    return table(("data", "format", *(f"`{name}`" for name in recipes)), rows, "ll" + "r" * len(recipes))


def best_rules() -> str:
    """In words: in how many rows of `rule_errors` each recipe has the highest ratio, alone or beside others."""
    rows = [{name: float(error.split(" ")[0]) for name, error in errors.items()} for errors in _rule_errors().values()]
    plain = [name for name in rows[0] if RECIPES[name].search == "none"]
    searching = [name for name in rows[0] if name not in plain]
    wins = {name: sum(row[name] == max(row.values()) for row in rows) for name in searching}
    wins |= {name: sum(row[name] == max(row[other] for other in plain) for row in rows) for name in plain}
    assert [name for name in wins if wins[name] == len(rows)] == searching, wins
    others = ", ".join(f"`{name}` in {wins[name]}" for name in plain)
    return (
        f"`{'` and `'.join(searching)}` is best, or level with the best, in all {len(rows)} rows. The others compute the "
        "exponent from amax and try nothing. Among those alone no rule is always best; each is best, or level with it, "
        f"in this many rows: {others}."
    )


def nvfp4_errors() -> str:
    """The same for the recipes of NVFP4."""
    recipes = [r for r in RECIPES.values() if r.scale_rule == "amax" and r.block_rows == 1 and r.name not in ROWS]
    rows = [(f"`{r.name}`", *(_error(x, "nvfp4", r) for x in _data().values())) for r in recipes]
    return table(("recipe", *(f"{kind}, SNR dB (saturated)" for kind in _data())), rows, "lrr")


def _error(x: torch.Tensor, format: str, recipe: mxref.Recipe) -> str:
    q = mxref.quantize(x.reshape(-1, 256), format, recipe=recipe)
    y = mxref.dequantize(q).reshape(-1)
    noise = (y - x).double().square().sum()
    snr = 10 * torch.log10(x.double().square().sum() / noise)
    reach = q.format.element.max * _scales(q).repeat_interleave(q.format.block_size, dim=-1).reshape(-1)
    saturated = (x.abs().double() > reach).double().mean()
    return f"{snr:.2f} ({100 * saturated:.2f} %)"


def _scales(q: mxref.BlockTensor) -> torch.Tensor:
    scales = mxref.decode(q.scales, q.format.scale).double()
    if q.tensor_scale is None:
        return scales
    return (
        scales / q.tensor_scale.double() if q.recipe.tensor_scale_direction == "divide" else scales * q.tensor_scale.double()
    )


def e8m0_ends() -> str:
    """The codes of an E8M0 scale at both ends."""
    scale = ELEMENT_FORMATS["e8m0"]
    codes = (0, 1, 2, scale.bias, scale.bias + 1, scale.max_code, scale.nan_code)
    notes = {
        0: "the smallest scale; itself a float32 subnormal. It is not zero",
        scale.bias: "one",
        scale.max_code: "the largest scale; times most elements it is beyond float32",
        scale.nan_code: "NaN: the whole block is NaN. It is not 2^128 and not Inf",
    }
    rows = [(f"`{hexadecimal(c)}`", exact(scale.values[c]), notes.get(c, "")) for c in codes]
    return table(("scale byte", "value", ""), rows)


def e8m0_clamped(format: str = "mxfp4") -> str:
    """Blocks whose scale would leave E8M0, quantized by each rule."""
    rows = []
    inputs = {
        "0": 0.0,
        "2^-149": 2.0**-149,
        "2^-126": 2.0**-126,
        "2^-124": 2.0**-124,
        "largest float32": mxref.formats.FLOAT_MAX,
    }
    for name, amax in inputs.items():
        cells = []
        for rule in EXPONENT_RULES:
            q = mxref.quantize(torch.tensor([amax]), format, recipe=_recipe(rule))
            decoded = float(mxref.dequantize(q)[0])
            cells.append(f"`{hexadecimal(int(q.scales[0]))}`{NO_BREAK}→{NO_BREAK}{readable(decoded)}")
        rows.append((name, *cells))
    return table((f"{format}, amax", *(f"`{rule}`" for rule in EXPONENT_RULES)), rows)


def ue4m3_ends() -> str:
    """The codes of an E4M3 scale at both ends, and what a sign bit does."""
    scale = ELEMENT_FORMATS["e4m3"]
    first_normal = scale.positive.index(scale.min_normal)
    one = scale.positive.index(1.0)
    notes = {
        0: "zero: every element of the block decodes to zero",
        1: "the smallest positive scale, a subnormal",
        first_normal: "the smallest normal scale",
        one: "one",
        scale.max_code: "the largest scale",
        scale.nan_code: "NaN: the whole block is NaN",
    }
    rows = [(f"`{hexadecimal(c)}`", exact(scale.values[c]), note) for c, note in notes.items()]
    rows.append(
        (f"`{hexadecimal(scale.sign_mask)}` and above", "refused", "the sign bit is set: mxref rejects such a scale")
    )
    return table(("scale byte", "value", ""), rows)


def tensor_scale_effect() -> str:
    """What NVFP4 makes of tensors of several sizes with and without a tensor scale."""
    base = torch.tensor([1.0, 0.5, 0.25, -0.75])
    rows = []
    for exponent in (-20, -10, 0, 10, 20):
        x = base * 2.0**exponent
        cells = []
        for choice in ("none", "per_tensor"):
            q = mxref.quantize(x, "nvfp4", tensor_scale=choice)
            y = mxref.dequantize(q)
            cells.append(f"`{hexadecimal(int(q.scales[0]))}`, error {short(float((y - x).norm() / x.norm()))}")
        rows.append((f"2^{exponent}", *cells))
    return table(("largest magnitude", "no tensor scale: block scale, relative error", "per tensor"), rows)


def directions() -> str:
    """For each producer with tensor scales: its tensor, and what decoding does with it."""
    rows = []
    for dialect, layouts in DIALECTS.items():
        for layout in layouts:
            if layout.tensor_scale is not None:
                largest = exact(layout.block.element.max * layout.block.scale.max)
                stored = f"{largest} / amax" if layout.direction == "divide" else f"amax / {largest}"
                names = f"`…{layout.tensor_scale}`", f"`…{layout.input_scale}`"
                rows.append((dialect, *names, f"**{layout.direction}**", stored))
    vllm = [r for r in RECIPES.values() if r.name.startswith("vllm")]
    (direction,) = {r.tensor_scale_direction for r in vllm}
    listed = table(("dialect", "weight's tensor scale", "activation's", "decoding does", "typical value"), rows)
    names = ", ".join(f"`{r.name}`" for r in vllm)
    return (
        f"{listed}\n\nvLLM reads these files and writes none. Its own quantizers ({names}) are given a tensor scale whose "
        f"direction is **{direction}**."
    )


def recipe_directions() -> str:
    """The direction of each recipe's tensor scale."""
    rows = [
        (f"`{r.name}`", r.tensor_scale_direction, f"`{r.decode_order}`") for r in RECIPES.values() if r.scale_rule == "amax"
    ]
    return table(("recipe", "decoding does", "`decode_order`"), rows)


def inverse_is_lossy() -> str:
    """A number whose float32 reciprocal's reciprocal is another number, with the bits of both."""
    values = [torch.tensor(float(n)) for n in range(1, 2000)]
    odd = next(v for v in values if reciprocal(reciprocal(v)) != v)
    back = reciprocal(reciprocal(odd))
    return f"1 / (1 / {exact(float(odd))}) is {float(back):.9g} in float32, not {exact(float(odd))}"


def wrong_direction(amax: float = 3.0) -> str:
    """A block decoded with its tensor scale in the wrong direction: by how much it is off."""
    q = mxref.quantize(torch.tensor([amax, 1.0]), "nvfp4", recipe="vllm_torch")
    wrong = replace(q, recipe=RECIPES["nvidia"])
    right, off = float(mxref.dequantize(q)[0]), float(mxref.dequantize(wrong)[0])
    return (
        f"{short(float(q.tensor_scale), 6)} read as a multiplier gives {short(off, 6)} where the weight is {short(right, 6)}"
    )
