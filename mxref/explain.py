"""One block, step by step: how a quantizer got from values to bytes."""

import math
from dataclasses import asdict, dataclass
from fractions import Fraction

import torch

from mxref.block_codec import scale_candidates
from mxref.blocks import BlockTensor, dequantize, quantize_with_scale
from mxref.elements import check_float, decode_codes
from mxref.formats import BlockFormat, ElementFormat, block_format
from mxref.orders import ENCODE_ORDERS, TensorScale
from mxref.recipes import Recipe, resolve_recipe
from mxref.registry import op

_ROW = "{:>14} {:>14} {:>9} {:>9}  {:<9} {:<14} {:>9} {:>14} {:>11}"


@dataclass(frozen=True)
class ElementStep:
    """One element: `quotient` is x over the scale, `below` and `above` the element values around it."""

    x: float
    quotient: float
    below: float
    above: float
    tie: bool
    saturated: bool
    code: int
    bits: str
    value: float
    decoded: float
    error: float


@dataclass(frozen=True)
class Explanation:
    """One block: `raw_scale` is the scale before it is rounded to the scale format, where the recipe has one."""

    format: str
    recipe: str
    amax: float
    tensor_scale: float | None
    raw_scale: float | None
    scale_code: int
    scale: float
    elements: tuple[ElementStep, ...]

    def to_dict(self) -> dict:
        """Plain dicts and lists, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        tensor = "" if self.tensor_scale is None else f", tensor scale {self.tensor_scale:.9g}"
        raw = "" if self.raw_scale is None else f"raw scale {self.raw_scale:.9g} -> "
        why = ": a NaN or Inf makes the whole block NaN" if math.isnan(self.scale) and not math.isfinite(self.amax) else ""
        lines = [
            f"{self.format}, recipe {self.recipe}",
            f"amax {self.amax:.9g}{tensor}, {raw}scale code 0x{self.scale_code:02X} = {self.scale:.9g}{why}",
            _ROW.format("x", "x / scale", "below", "above", "", "code", "value", "decoded", "error"),
        ]
        for e in self.elements:
            note = "tie" if e.tie else "saturated" if e.saturated else ""
            cells = f"{e.x:.8g}", f"{e.quotient:.8g}", f"{e.below:.5g}", f"{e.above:.5g}", note, f"0x{e.code:02X} {e.bits}"
            lines.append(_ROW.format(*cells, f"{e.value:.5g}", f"{e.decoded:.8g}", f"{e.error:.3g}"))
        return "\n".join(lines)


@op
def explain(
    x: torch.Tensor,
    format: str | BlockFormat,
    *,
    recipe: str | Recipe | None = None,
    tensor_scale: str | torch.Tensor | None = None,
    seed: int | None = None,
) -> Explanation:
    """Show how one block is quantized: amax, raw scale, scale code, and each element's quotient, neighbours and error.

    `x`: one block, `[n]` with n at most the format's block size, float32, bfloat16 or float16; it is also the
    tensor that a tensor scale is taken of. `quotient` is what the recipe's order rounds; `tie` says that it lies
    exactly halfway between its neighbours. Codes and decoded values are those of `quantize` and `dequantize`; of a recipe
    with a producer's faults the other steps are those before its faults.
    Raises as `quantize`, and ValueError if `x` is not one block or the recipe spans rows or transforms.

    >>> print(explain(torch.tensor([7.0, 1.25]), "mxfp4"))
    mxfp4, recipe ocp(scale_rule='floor')
    amax 7, scale code 0x7F = 1
                 x      x / scale     below     above            code               value        decoded       error
                 7              7         6         6  saturated 0x07 0.11.1            6              6          -1
              1.25           1.25         1       1.5  tie       0x02 0.01.0            1              1       -0.25
    """
    check_float("x", x)
    format = block_format(format)
    if x.ndim != 1 or not 1 <= x.numel() <= format.block_size:
        raise ValueError(f"x has shape {list(x.shape)}: expected one block, [1 to {format.block_size}]")
    recipe = resolve_recipe(recipe, format)
    if recipe.block_rows > 1 or recipe.transform is not None:
        raise ValueError(f"recipe {recipe.name!r} spans rows or transforms: there is no single block to explain")
    x = x.detach().cpu()
    q, tensor = quantize_with_scale(x, format, recipe, tensor_scale, seed)
    raw_scale, numerators, divisor = _steps(x, q, tensor)
    columns = x.tolist(), [_quotient(n, divisor) for n in numerators.tolist()], q.codes.tolist(), dequantize(q).tolist()
    return Explanation(
        format=format.name,
        recipe=str(q.recipe),
        amax=float(x.float().abs().max()),
        tensor_scale=None if q.tensor_scale is None else float(q.tensor_scale),
        raw_scale=raw_scale,
        scale_code=int(q.scales[0]),
        scale=format.scale.values[int(q.scales[0])],
        elements=tuple(_element_step(*row, format.element) for row in zip(*columns)),
    )


def _steps(x: torch.Tensor, q: BlockTensor, tensor: TensorScale) -> tuple[float | None, torch.Tensor, float]:
    """The scale before rounding (None for a power of two), and what is divided by what before it is rounded to codes."""
    scale, amax, x = decode_codes(q.scales, q.format.scale), x.abs().max(), x.float()
    if q.format.scale.is_power_of_two:
        return None, x, float(scale)
    order, largest = ENCODE_ORDERS[q.recipe.encode_order], q.recipe.element_max or q.format.element.max
    candidates = scale_candidates(amax.float().view(1).view(torch.int32), q.format, q.recipe, tensor, amax.dtype)
    amax = amax if q.recipe.amax_dtype == "input" else amax.float()
    stretch = next((stretch for stretch, code in candidates if code == q.scales), 1.0)  # no candidate is NaN
    if order.block_scale is None:
        return stretch * float(amax) / (largest * float(tensor.stored)), x, float(scale.double() * tensor.stored.double())
    return float(order.block_scale(amax, tensor, largest) * stretch), order.quotient(x[None], scale, tensor)[0], 1.0


def _quotient(numerator: float, divisor: float) -> Fraction | float:
    """Exact, or a float where it is not finite; 0 where the scale is 0, as are all codes then."""
    if divisor == 0:
        return math.copysign(0.0, numerator)
    if math.isfinite(numerator) and math.isfinite(divisor):
        return Fraction(numerator) / Fraction(divisor)
    return numerator / divisor


def _element_step(x: float, quotient: Fraction | float, code: int, decoded: float, element: ElementFormat) -> ElementStep:
    magnitude = abs(quotient)
    below = max((v for v in element.positive if v <= magnitude), default=math.nan)  # a NaN has no neighbours
    above = min((v for v in element.positive if v >= magnitude), default=min(magnitude, element.max))
    sign = -1.0 if quotient < 0 else 1.0
    return ElementStep(
        x=x,
        quotient=float(quotient),
        below=sign * below,
        above=sign * above,
        tie=below < above and 2 * magnitude == Fraction(below) + Fraction(above),
        saturated=magnitude > element.max,
        code=code,
        bits=_bit_fields(code, element),
        value=element.values[code],
        decoded=decoded,
        error=decoded - x,
    )


def _bit_fields(code: int, element: ElementFormat) -> str:
    """Sign, exponent and mantissa bits, separated by dots."""
    text = f"{code:0{element.bits}b}"
    if element.kind == "integer":
        return text
    exponent, mantissa = element.signed, element.signed + element.exponent_bits  # where these fields start
    return ".".join(part for part in (text[:exponent], text[exponent:mantissa], text[mantissa:]) if part)
