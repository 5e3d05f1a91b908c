"""Who differs: inputs on which recipes part, computed from whatever recipes there are; recipes, faults and their record."""

import math
from dataclasses import dataclass, fields

import torch

import mxref
from docs._generate.markdown import fold, hexadecimal, listing, readable, table
from docs._generate.measured import record
from docs._generate.measured import source as record_source
from mxref.faults import FAULTS
from mxref.formats import BLOCK_FORMATS, FLOAT_MAX, BlockFormat
from mxref.producers import ROWS
from mxref.recipes import RECIPES, Recipe

Outcome = tuple[str, str, str]  # scale byte, codes, decoded values


@dataclass(frozen=True)
class Probe:
    """One block that asks one question of every recipe of a format.

    `beside`: the value of a second block, which sets the tensor scale.
    """

    question: str
    format: str
    values: tuple[float, ...]
    beside: float | None = None
    dtype: torch.dtype = torch.float32

    @property
    def tensor(self) -> torch.Tensor:
        """What is quantized: the block, and the other one after it."""
        if self.beside is None:
            return torch.tensor(self.values, dtype=self.dtype)
        size = BLOCK_FORMATS[self.format].block_size
        filled = [*self.values, *[0.0] * (size - len(self.values)), *[self.beside] * size]
        return torch.tensor(filled, dtype=self.dtype)

    @property
    def shown(self) -> str:
        """The block, for reading."""
        dtype = "" if self.dtype == torch.float32 else ", " + str(self.dtype).removeprefix("torch.")
        beside = "" if self.beside is None else f", then zeros; beside a block of {readable(self.beside)}"
        return f"`{', '.join(readable(v) for v in self.values)}`{beside}{dtype}"


_TIES = (6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_SIGNS = (6.0, 0.0, -0.0, -0.1, 0.1)
_SPECIALS = ("a NaN", (math.nan, 1.0, -2.0)), ("an Inf", (math.inf, 1.0, -2.0))
_ONE_ULP = (
    1 + 2.0**-22
)  # above a value whose significand is 1.5 or more, the least step up is 2^-22 of its power of two or less
PROBES = (
    Probe("The maximum just above the largest element", "mxfp4", (6.5, 1.0)),
    Probe("The maximum at the threshold of `even`", "mxfp4", (7.0, 1.0)),
    Probe("The maximum just below the next power of two", "mxfp4", (7.9, 1.0)),
    Probe("The maximum is the largest element", "mxfp4", (6.0, 1.0)),
    Probe("The maximum just below the largest element", "mxfp4", (5.9, 1.0)),
    Probe("The maximum is a power of two", "mxfp4", (4.0, 1.0)),
    Probe("Values halfway between two codes", "mxfp4", _TIES),
    Probe("Zeros and small values with a sign", "mxfp4", _SIGNS),
    *(Probe(f"{name[0].upper()}{name[1:]}", "mxfp4", values) for name, values in _SPECIALS),
    Probe("A block of zeros", "mxfp4", (0.0, 0.0)),
    Probe("The smallest scales", "mxfp4", (2.0**-126, -(2.0**-127), 2.0**-128)),
    Probe("The largest float32", "mxfp4", (FLOAT_MAX, 1.0)),
    Probe(
        "The least above the largest element, far from 1 (a float logarithm misses it)",
        "mxfp4",
        (6 * 2.0**20 + 0.5, 2.0**20),
    ),
    Probe(
        "Just below a power of two (a logarithm in bfloat16 misses it)", "mxfp4", (255.0, 64.0, 10.0), None, torch.bfloat16
    ),
    Probe("The maximum just above the largest element", "mxfp8_e4m3", (450.0, 1.0)),
    Probe("The maximum at the threshold of `even`", "mxfp8_e4m3", (496.0, 1.0)),
    Probe("The maximum is a power of two", "mxfp8_e4m3", (256.0, 1.0)),
    *(Probe(f"{name[0].upper()}{name[1:]}", "mxfp8_e4m3", values) for name, values in _SPECIALS),
    Probe("The maximum just above the largest element", "mxfp6_e2m3", (7.6, 1.0)),
    Probe("The maximum just above the largest element", "mxfp6_e3m2", (29.0, 1.0)),
    Probe("Negative full scale", "mxint8", (-1.9999, 1.0)),
    Probe("A value halfway between two codes", "mxint8", (1.0, 2.0**-7)),
    Probe("Values halfway between two codes", "nvfp4", _TIES),
    Probe("Zeros and small values with a sign", "nvfp4", _SIGNS),
    *(Probe(f"{name[0].upper()}{name[1:]}", "nvfp4", values) for name, values in _SPECIALS),
    Probe("A block of zeros", "nvfp4", (0.0, 0.0), 1.0),
    Probe("A tensor of zeros", "nvfp4", (0.0, 0.0)),
    Probe("A block so small that its scale is subnormal", "nvfp4", (1.49 * 2.0**-9 * 6 / 2688,), 1.0),
    Probe("A block so small that its scale rounds to zero", "nvfp4", (2.0**-21, 2.0**-22), 1.0),
    Probe("A maximum that 4 fits better than 6", "nvfp4", (6.0, 5.0, 4.9, 3.6, 2.6, 1.0)),
    Probe("A tensor in bfloat16", "nvfp4", (2.9375, 1.0, 0.6), None, torch.bfloat16),
    Probe("A tiny tensor", "nvfp4", (1e-38, 5e-39, 0.0)),
)


def fitting(format: BlockFormat) -> list[Recipe]:
    """The recipes that apply to a block of `format` on its own."""
    return [r for r in RECIPES.values() if r.fits(format) and r.block_rows == 1 and r.transform is None]


def outcome(probe: Probe, recipe: Recipe) -> Outcome:
    """Scale byte, codes and decoded values of a probe; what was raised where it is refused."""
    format, count = BLOCK_FORMATS[probe.format], len(probe.values)
    try:
        q = mxref.quantize(probe.tensor, format, recipe=recipe)
    except ValueError:
        return "-", "-", "refused"
    codes = " ".join(hexadecimal(int(code), format.element.bits)[2:] for code in q.codes[:count])
    return hexadecimal(int(q.scales[0])), codes, ", ".join(readable(value) for value in mxref.dequantize(q)[:count].tolist())


def disagreements(format: str) -> str:
    """Every probe of a format on which recipes part: the input, each outcome and who gives it."""
    parts, agreed = [], []
    for probe in (p for p in PROBES if p.format == format):
        groups: dict[Outcome, list[str]] = {}
        for recipe in fitting(BLOCK_FORMATS[format]):
            groups.setdefault(outcome(probe, recipe), []).append(recipe.name)
        if len(groups) == 1:
            agreed.append(f"{probe.question}: {probe.shown}")
            continue
        rows = []
        for (scale, codes, decoded), names in groups.items():
            rows.append((f"`{scale}`", f"`{codes}`", decoded, ", ".join(f"`{name}`" for name in names)))
        parts += [f"**{probe.question}:** {probe.shown}", table(("scale", "codes", "decoded", "recipes"), rows)]
    if agreed:
        parts.append("All recipes agree on: " + "; ".join(agreed) + ".")
    return "\n\n".join(parts)


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


def recipe_table(of_producers: bool) -> str:
    """The named recipes, mxref's own or the producers' rows: summary and formats."""
    rows = []
    for recipe in RECIPES.values():
        if (recipe.name in ROWS) == of_producers:
            formats = [name for name, format in BLOCK_FORMATS.items() if recipe.fits(format)]
            every_mx = len(formats) == sum(format.scale.is_power_of_two for format in BLOCK_FORMATS.values())
            rows.append((f"`{recipe.name}`", recipe.summary, "all MX" if every_mx else ", ".join(formats)))
    return table(("recipe", "what it does", "formats"), rows)


def recipe_choices() -> str:
    """Every choice of every recipe that is not the default."""
    rows = []
    for recipe in RECIPES.values():
        chosen = [f for f in fields(Recipe) if f.name not in ("name", "summary") and getattr(recipe, f.name) != f.default]
        rows.append((f"`{recipe.name}`", "\n".join(f"`{f.name}` = `{getattr(recipe, f.name)!r}`" for f in chosen)))
    return table(("recipe", "choices that differ from the default"), rows)


def faults() -> str:
    """What is wrong in producers, as the named steps that reproduce it."""
    rows = []
    for name, fault in FAULTS.items():
        users = ", ".join(f"`{r.name}`" for r in RECIPES.values() if name in r.faults)
        rows.append((f"`{name}`", fault.summary, users))
    return table(("fault", "what is wrong", "recipes"), rows)


def recorded() -> str:
    """For each producer's row: what of its recorded outputs was compared, and what differs."""
    rows: dict[str, list] = {}
    for row in record("producers")["rows"]:
        total = rows.setdefault(row["recipe"], [set(), set(), 0, 0, 0])
        total[0].add(row["producer"])
        total[1].add(row["format"])
        for i, count in enumerate(("compared", "differing", "excepted")):
            total[i + 2] += row[count]
    cells = [
        (
            f"`{recipe}`",
            ", ".join(sorted(producers)),
            ", ".join(sorted(formats)),
            f"{compared:,}",
            f"{differing:,}",
            f"{excepted:,}",
        )
        for recipe, (producers, formats, compared, differing, excepted) in rows.items()
    ]
    return table(("recipe", "recordings of", "formats", "compared", "differing", "excepted"), cells, "lllrrr")


def source() -> str:
    """Where the comparison comes from, as far as its record says."""
    return f"{record_source('producers')} The outputs: `{record('producers')['recordings']}`."


def exceptions() -> str:
    """Why outputs are left out of the comparison."""
    reasons: dict[str, set[str]] = {}
    for row in record("producers")["rows"]:
        if row["excepted"]:
            reasons.setdefault(row["reason"], set()).add(row["producer"])
    return table(("left out because", "producers"), [(why, ", ".join(sorted(who))) for why, who in reasons.items()])


def explained(values: tuple[float, ...], format: str, recipes: tuple[str, ...]) -> str:
    """One block under several recipes, step by step, each folded."""
    x = torch.tensor(values)
    return "\n\n".join(fold(name, listing(str(mxref.explain(x, format, recipe=name)))) for name in recipes)
