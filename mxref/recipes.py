"""Recipes: every choice that a format leaves open, as one frozen record, and the named rows.

A standard fixes what codes mean; it leaves open how a quantizer picks them. A `Recipe` names each of
those choices, travels with the tensor it made, and prints itself. Make your own with
`dataclasses.replace`:

>>> from dataclasses import replace
>>> replace(RECIPES["ocp"], name="ocp_stochastic", rounding="stochastic").rounding
'stochastic'
"""

from dataclasses import dataclass, fields

from mxref.elements import OVERFLOWS, ROUNDINGS
from mxref.faults import FAULTS
from mxref.formats import FLOAT_MAX, FLOAT_SMALLEST, BlockFormat, by_name, check_choice, check_number, check_type, look_up
from mxref.orders import DECODE_ORDERS, ENCODE_ORDERS
from mxref.producers import ROWS
from mxref.scales import EXPONENT_RULES

SEARCHES = ("none", "mse", "four_over_six_mse", "four_over_six_mae", "four_over_six_max")
HADAMARD_SIZES = (4, 16, 64)


@dataclass(frozen=True)
class Hadamard:
    """A Hadamard rotation of each `size` neighbours along the blocked axis, after a sign flip by `signs` (+1 or -1).

    Float32 butterflies a + b, a - b at distance 1, 2, 4, ..., then times 1 / sqrt(size), which is a power
    of two. `dequantize` undoes it.
    """

    size: int
    signs: tuple[int, ...] = ()

    def __post_init__(self):
        check_choice("size", self.size, HADAMARD_SIZES)
        given = self.signs
        if not isinstance(given, (tuple, list)) or len(given) not in (0, self.size) or any(s not in (1, -1) for s in given):
            raise ValueError(f"signs={given!r}: expected {self.size} entries of +1 or -1")
        object.__setattr__(self, "signs", tuple(given) or (1,) * self.size)


@dataclass(frozen=True)
class Recipe:
    """How to choose scales and codes.

    `scale_rule`: one of `mxref.scales.EXPONENT_RULES` for power-of-two scales; `amax` (amax / element max, rounded
    to the scale format) for scales with a mantissa. For `amax` only: `encode_order`, `decode_order`; `scale_max`
    (largest block scale that a computed tensor scale aims at; None: the format's own); `scale_min` (smallest block scale;
    None: it may round to 0); `element_max` (what a block's maximum is mapped to; None: the element's own); `amax_dtype`
    (`float32`, or `input`: what is computed of amax alone is rounded to the input's dtype).
    `rounding`, `overflow`: of the elements, as in `encode`. `nan`: `poison` (the block decodes to NaN) or
    `raise`. `inf`: `nan` (as a NaN) or `saturate` (largest scale, largest element). `zero_block`: scale of an
    all-zero block, `zero_code` (code 0) or `one` (1.0). `negative_zero`: `keep`, `drop_quotient` (a zero
    quotient gives +0, a negative one that rounds to zero keeps its sign) or `drop`. `block_rows`: rows that share a scale,
    e.g. 16 for 16 x 16 blocks. `transform`: None or a `Hadamard`. `search`: `none`, `mse` (power-of-two
    scales: of the rule's exponent, one above, one below, the first with the least squared error),
    `four_over_six_mse`, `four_over_six_mae` or `four_over_six_max` (block maximum to the element's max or to 2/3 of it, by
    squared, absolute or largest error).
    `format`: the only block format it applies to, several of them, or None. `faults`: names in `mxref.producers.FAULTS`, of
    what is wrong in the producer that the recipe reproduces; only that producer's own row may have them.
    """

    name: str
    scale_rule: str
    summary: str = ""
    encode_order: str = "nvidia"
    decode_order: str = "block_times_tensor"
    scale_max: float | None = None
    scale_min: float | None = None
    element_max: float | None = None
    amax_dtype: str = "float32"
    rounding: str = "nearest_even"
    overflow: str = "saturate"
    nan: str = "poison"
    inf: str = "nan"
    zero_block: str = "zero_code"
    negative_zero: str = "keep"
    block_rows: int = 1
    transform: Hadamard | None = None
    search: str = "none"
    format: str | tuple[str, ...] | None = None
    faults: tuple[str, ...] = ()

    def __post_init__(self):
        check_choice("scale_rule", self.scale_rule, (*EXPONENT_RULES, "amax"))
        check_choice("encode_order", self.encode_order, tuple(ENCODE_ORDERS))
        check_choice("decode_order", self.decode_order, tuple(DECODE_ORDERS))
        check_choice("rounding", self.rounding, ROUNDINGS)
        check_choice("overflow", self.overflow, OVERFLOWS)
        check_choice("nan", self.nan, ("poison", "raise"))
        check_choice("inf", self.inf, ("nan", "saturate"))
        check_choice("zero_block", self.zero_block, ("zero_code", "one"))
        check_choice("negative_zero", self.negative_zero, ("keep", "drop_quotient", "drop"))
        check_choice("search", self.search, SEARCHES)
        check_number("block_rows", self.block_rows, 1)
        for name in ("scale_max", "scale_min", "element_max"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), FLOAT_SMALLEST, FLOAT_MAX, "None or a finite number > 0")
        check_choice("amax_dtype", self.amax_dtype, ("float32", "input"))
        if self.transform is not None:
            check_type("transform", self.transform, Hadamard)
        if self.search != "none" and (self.search == "mse") == (self.scale_rule == "amax"):
            raise ValueError(f"search={self.search!r} does not go with scale_rule={self.scale_rule!r}")
        choices = (self.rounding, self.overflow, self.negative_zero)
        if self.encode_order == "exact" and (choices != ("nearest_even", "saturate", "keep") or self.scale_min is not None):
            given = f"(rounding, overflow, negative_zero) = {choices}, scale_min={self.scale_min}"
            raise ValueError(f"encode_order='exact' with {given}: expected nearest_even, saturate, keep, no scale_min")
        if self.amax_dtype == "input" and (self.encode_order != "compressed_tensors" or self.transform is not None):
            raise ValueError("amax_dtype='input' goes with encode_order='compressed_tensors' and no transform alone")
        if self.inf == "saturate" and self.overflow == "special":
            raise ValueError("inf='saturate' and overflow='special': expected the same of an Inf as of what overflows")
        for fault in self.faults:
            check_choice("faults", fault, tuple(FAULTS))
        row = ROWS.get(self.name, {})
        if self.faults and any(getattr(self, f.name) != row.get(f.name, f.default) for f in fields(self)):
            given = f"faults={self.faults} of recipe {self.name!r}"
            raise ValueError(f"{given}: expected none; a producer's faults are in that producer's own row alone")

    def is_for(self, format: str) -> bool:
        """Whether `format` is one of the block formats that it applies to."""
        return self.format is None or format in ((self.format,) if isinstance(self.format, str) else self.format)

    def fits(self, format: BlockFormat) -> bool:
        """Whether it applies to `format`, and its scale rule to the format's scales."""
        return self.is_for(format.name) and (self.scale_rule == "amax") != format.scale.is_power_of_two

    def largest(self, format: BlockFormat) -> float:
        """What a computed tensor scale maps the largest magnitude to."""
        return (self.element_max or format.element.max) * (self.scale_max or format.scale.max)

    @property
    def tensor_scale_direction(self) -> str:
        """What decoding does with a stored tensor scale: `multiply` or `divide`."""
        return "divide" if self.decode_order == "block_over_tensor" else "multiply"

    def __str__(self) -> str:
        """The name and every field that differs from its default."""
        shown = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if f.name not in ("name", "summary") and getattr(self, f.name) != f.default
        ]
        return f"{self.name}({', '.join(shown)})"


RECIPES = by_name(
    Recipe("ocp", "floor", "OCP MX v1.0, 6.3: floor(log2 amax) - emax; the block maximum may saturate"),
    Recipe("ocp_even", "even", "as ocp, amax first rounded half up to the element's mantissa"),
    Recipe("ocp_ceil", "ceil", "as ocp, exponent rounded up to a power of two at or above amax"),
    Recipe("ocp_rceil", "rceil", "the smallest scale at which nothing saturates (cuBLAS and Transformer Engine MXFP8)"),
    Recipe("ocp_mse", "floor", "of floor's exponent, one above and one below, the least squared error", search="mse"),
    Recipe("nvidia", "amax", "NVFP4 as Transformer Engine orders it"),
    Recipe("exact", "amax", "NVFP4 without intermediate rounding", encode_order="exact"),
    Recipe(
        "nvidia_four_over_six",
        "amax",
        "as nvidia; each block's maximum goes to 6 or to 4, whichever has the least squared error",
        scale_max=256.0,
        search="four_over_six_mse",
    ),
    Recipe("nvidia_16x16", "amax", "as nvidia with one scale for 16 x 16 elements", block_rows=16),
    *(Recipe(**row) for row in ROWS.values()),
)


def resolve_recipe(recipe: str | Recipe | None, format: BlockFormat, argument: str = "recipe") -> Recipe:
    """The recipe that `recipe` names (None: the format's default), checked against `format`.

    Raises ValueError for an unknown name (listing the known ones) or a recipe that conflicts with the format.
    """
    recipe = look_up(argument, format.default_recipe if recipe is None else recipe, RECIPES, Recipe)
    if not recipe.is_for(format.name):
        raise ValueError(f"{argument} {recipe.name!r} is for {recipe.format}, not for format {format.name!r}")
    if (recipe.scale_rule == "amax") == format.scale.is_power_of_two:
        fitting = [r.name for r in RECIPES.values() if r.fits(format)]
        raise ValueError(
            f"{argument} {recipe.name!r} (scale_rule={recipe.scale_rule!r}) does not fit format {format.name!r} with "
            f"{format.scale.name} scales; recipes that do: {', '.join(fitting)}"
        )
    if recipe.overflow == "special" and format.element.specials == "none":
        raise ValueError(f"{argument} {recipe.name!r} has overflow='special': {format.element.name} has neither Inf nor NaN")
    if recipe.zero_block == "one" and 1.0 not in format.scale.positive:
        raise ValueError(f"{argument} {recipe.name!r} has zero_block='one': {format.scale.name} has no value 1.0")
    for name in ("scale_max", "scale_min"):
        if getattr(recipe, name) is not None and getattr(recipe, name) > format.scale.max:
            given = f"{name}={getattr(recipe, name)}"
            raise ValueError(f"{argument} {recipe.name!r} has {given}: expected <= {format.scale.max}")
    return recipe
