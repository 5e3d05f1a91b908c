"""Who differs: inputs on which recipes part, computed from whatever recipes there are."""

import math
from dataclasses import dataclass, fields

import torch

import mxref
from docs._generate.markdown import exact, fold, hexadecimal, listing, table
from mxref.formats import BLOCK_FORMATS, FLOAT_MAX, BlockFormat
from mxref.recipes import RECIPES, Recipe, resolve_recipe

Outcome = tuple[str, str, str]  # scale byte, codes, decoded values


@dataclass(frozen=True)
class Probe:
    """One block that asks one question of every recipe of a format."""

    question: str
    format: str
    values: tuple[float, ...]


_TIES = (6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_NAN, _INF = math.nan, math.inf
PROBES = (
    Probe("the maximum just above the largest element", "mxfp4", (6.5, 1.0)),
    Probe("the maximum at the threshold of `even`", "mxfp4", (7.0, 1.0)),
    Probe("the maximum just below the next power of two", "mxfp4", (7.9, 1.0)),
    Probe("the maximum is the largest element", "mxfp4", (6.0, 1.0)),
    Probe("the maximum is a power of two", "mxfp4", (4.0, 1.0)),
    Probe("values halfway between two codes", "mxfp4", _TIES),
    Probe("zeros and small values with a sign", "mxfp4", (6.0, 0.0, -0.0, -0.1, 0.1)),
    Probe("a NaN", "mxfp4", (_NAN, 1.0, -2.0)),
    Probe("an Inf", "mxfp4", (_INF, 1.0, -2.0)),
    Probe("a block of zeros", "mxfp4", (0.0, 0.0)),
    Probe("the smallest scales", "mxfp4", (2.0**-126, -(2.0**-127), 2.0**-128)),
    Probe("the largest float32", "mxfp4", (FLOAT_MAX, 1.0)),
    Probe("above the largest element by the least bit, far from 1", "mxfp4", (6.0 * 2.0**20 * (1 + 2.0**-22), 2.0**20)),
    Probe("the maximum just above the largest element", "mxfp8_e4m3", (450.0, 1.0)),
    Probe("the maximum at the threshold of FP4", "mxfp8_e4m3", (449.0, 256.0)),
    Probe("the maximum at the threshold of `even`", "mxfp8_e4m3", (496.0, 1.0)),
    Probe("the maximum just above the largest element", "mxfp6_e2m3", (7.6, 1.0)),
    Probe("the maximum just above the largest element", "mxfp6_e3m2", (29.0, 1.0)),
    Probe("negative full scale", "mxint8", (-1.9999, 1.0)),
    Probe("values halfway between two codes", "nvfp4", _TIES),
    Probe("zeros and small values with a sign", "nvfp4", (6.0, 0.0, -0.0, -0.1, 0.1)),
    Probe("a NaN", "nvfp4", (_NAN, 1.0, -2.0)),
    Probe("an Inf", "nvfp4", (_INF, 1.0, -2.0)),
    Probe("a tensor of zeros", "nvfp4", (0.0, 0.0)),
    Probe("a maximum that 4 fits better than 6", "nvfp4", (6.0, 5.0, 4.9, 3.6, 2.6, 1.0)),
    Probe("a tiny tensor", "nvfp4", (1e-38, 5e-39, 0.0)),
)


def fitting(format: BlockFormat) -> list[Recipe]:
    """The recipes that apply to a block of `format` on its own."""
    found = []
    for recipe in RECIPES.values():
        try:
            resolve_recipe(recipe, format)
        except ValueError:
            continue
        if recipe.block_rows == 1 and recipe.transform is None:
            found.append(recipe)
    return found


def outcome(probe: Probe, recipe: Recipe) -> Outcome:
    """Scale byte, codes and decoded values of a probe; what was raised where it is refused."""
    format = BLOCK_FORMATS[probe.format]
    try:
        seed = 0 if recipe.rounding == "stochastic" else None
        q = mxref.quantize(torch.tensor(probe.values), format, recipe=recipe, seed=seed)
    except ValueError:
        return "-", "-", "refused"
    codes = " ".join(hexadecimal(int(code), format.element.bits)[2:] for code in q.codes)
    return hexadecimal(int(q.scales[0])), codes, ", ".join(_number(value) for value in mxref.dequantize(q).tolist())


def _number(value: float) -> str:
    text = exact(value)
    return text if len(text) < 12 else f"{value:.4g}"


def disagreements(format: str) -> str:
    """Every probe of a format on which recipes part: the input, each outcome and who gives it."""
    rows, agreed = [], []
    for probe in (p for p in PROBES if p.format == format):
        groups: dict[Outcome, list[str]] = {}
        for recipe in fitting(BLOCK_FORMATS[format]):
            groups.setdefault(outcome(probe, recipe), []).append(recipe.name)
        shown = ", ".join(_number(v) for v in probe.values)
        if len(groups) == 1:
            agreed.append(f"{probe.question} ({shown})")
            continue
        for i, (result, names) in enumerate(groups.items()):
            first = (probe.question, f"`{shown}`") if i == 0 else ("", "")
            who = ", ".join(f"`{name}`" for name in names)
            rows.append((*first, f"`{result[0]}`", f"`{result[1]}`", result[2], who))
    parts = [table(("what is asked", "block", "scale", "codes", "decoded", "recipes"), rows)] if rows else []
    if agreed:
        parts.append("All recipes agree on: " + "; ".join(agreed) + ".")
    return "\n\n".join(parts) or "There is one recipe only."


def random_disagreement(format: str, count: int = 1 << 15) -> str:
    """How far each recipe is from the format's default one on Gaussian bfloat16 data, in percent."""
    x = torch.randn(count, generator=torch.Generator().manual_seed(3)).bfloat16().reshape(-1, 256)
    block = BLOCK_FORMATS[format]
    default = mxref.quantize(x, format)
    rows = []
    for recipe in fitting(block):
        if recipe.name == block.default_recipe or recipe.rounding == "stochastic":
            continue
        q = mxref.quantize(x, format, recipe=recipe)
        pairs = (q.scales, default.scales), (q.codes, default.codes), (mxref.dequantize(q), mxref.dequantize(default))
        rows.append((f"`{recipe.name}`", *(_percent(a != b) for a, b in pairs)))
    header = (f"{format}: % that differ from `{block.default_recipe}`", "scale bytes", "codes", "decoded values")
    return table(header, rows, "lrrr")


def _percent(different: torch.Tensor) -> str:
    share = 100 * float(different.double().mean())
    return f"{share:.2f}" if share >= 0.01 or not share else f"{share:.4f}"


def recipe_table() -> str:
    """Every named recipe, its summary and where it applies."""
    rows = []
    for recipe in RECIPES.values():
        formats = [name for name, format in BLOCK_FORMATS.items() if _fits(recipe, format)]
        scope = (
            "MX formats"
            if len(formats) == sum(f.scale.is_power_of_two for f in BLOCK_FORMATS.values())
            else ", ".join(formats)
        )
        rows.append((f"`{recipe.name}`", recipe.summary, scope))
    return table(("recipe", "what it does", "formats"), rows)


def _fits(recipe: Recipe, format: BlockFormat) -> bool:
    try:
        resolve_recipe(recipe, format)
    except ValueError:
        return False
    return True


def recipe_choices() -> str:
    """Every choice of every recipe: one row a field that any of them sets apart from its default."""
    names = [f.name for f in fields(Recipe) if f.name not in ("name", "summary")]
    shown = []
    for recipe in RECIPES.values():
        differing = [f.name for f in fields(Recipe) if f.name in names and getattr(recipe, f.name) != f.default]
        shown.append((f"`{recipe.name}`", "<br>".join(f"`{name}` = `{getattr(recipe, name)!r}`" for name in differing)))
    return table(("recipe", "choices that differ from the default"), shown)


def explained(values: tuple[float, ...], format: str, recipes: tuple[str, ...]) -> str:
    """One block under several recipes, step by step, each folded."""
    x = torch.tensor(values)
    return "\n\n".join(fold(name, listing(str(mxref.explain(x, format, recipe=name)))) for name in recipes)
