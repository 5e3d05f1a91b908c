"""A page for each element format and each block format, from its record alone."""

import math

import torch

import mxref
from docs._generate.drawing import PHONE, WIDE, Drawing, box, figure, line, path, text
from docs._generate.markdown import NO_BREAK, counted, exact, fold, hexadecimal, listing, readable, table
from mxref.elements import OVERFLOWS, ROUNDINGS
from mxref.formats import BLOCK_FORMATS, ELEMENT_FORMATS, FLOAT_MAX, BlockFormat, ElementFormat
from mxref.recipes import RECIPES, SEARCHES
from mxref.scales import EXPONENT_RULES

FEW_CODES = 64  # formats with more list their values folded
BFLOAT16_BITS = 8  # of significand
SAMPLE_BLOCK = (7.0, 2.5, -0.2, 0.0, -1.25, 0.75, 5.1, -3.4)  # a saturating maximum, ties and a small value


# ---- element formats ------------------------------------------------------------------------------------------------


def element_page(element: ElementFormat) -> str:
    """The page of an element format."""
    parts = [
        f"# {element.name.upper()}",
        _element_summary(element),
        "## Bits",
        bit_layout(element),
        _reading(element),
        "## At a glance",
        properties(element),
        "## On the number line",
        number_line(element),
        "## Every value",
        values(element),
    ]
    if not element.is_power_of_two:
        parts += ["## Midpoints and ties", _ties_text(element), midpoints(element)]
        parts += ["## Relative spacing", spacing(element), _spacing_text(element)]
    parts += ["## Special inputs and codes", special_inputs(element), special_codes(element)]
    if element.specials != "none" and not element.is_power_of_two:  # those are of scales alone
        parts.append(f"In a block: {stored_specials_text(element)}")
    parts += ["## Used by", _users(element)]
    return "\n\n".join(parts) + "\n"


def _element_summary(element: ElementFormat) -> str:
    if element.kind == "integer":
        what = f"A two's complement integer of {element.bits} bits, times 2^-{element.bias}."
    elif element.is_power_of_two:
        what = (
            f"A power of two in {element.bits} bits: an exponent without sign and without mantissa. The scale of MX formats."
        )
    else:
        fields = ", ".join(
            (
                counted(element.exponent_bits, "exponent bit"),
                counted(element.mantissa_bits, "mantissa bit"),
                f"bias {element.bias}",
            )
        )
        what = f"A float of {element.bits} bits: one sign bit, {fields}."
    return f"{what} Source: {element.source}."


def bit_layout(element: ElementFormat) -> str:
    """The fields of a code, with the number of each bit."""
    side, left, top = 44, 10, 28
    kinds = ["sign"] * element.signed
    kinds += ["exponent"] * element.exponent_bits
    kinds += [("element" if element.kind == "integer" else "mantissa")] * element.mantissa_bits
    shapes = []
    for i, kind in enumerate(kinds):
        letter = {"sign": "S", "exponent": "E", "mantissa": "M", "element": "I"}[kind]
        shapes.append(box(left + i * side, top, side, side, kind, letter))
        shapes.append(text(left + (i + 0.5) * side, top - 9, f"{element.bits - 1 - i}", kind="small"))
    names = {"sign": "sign", "exponent": "exponent", "mantissa": "mantissa", "element": "integer"}
    for kind in dict.fromkeys(kinds):
        first, count = kinds.index(kind), kinds.count(kind)
        name = names[kind] if count * side > 50 or count * side > 8 * len(names[kind]) else kind[:4]
        shapes.append(text(left + (first + count / 2) * side, top + side + 18, name, kind="small"))
    width = 2 * left + len(kinds) * side
    return figure(f"The bits of an {element.name.upper()} code, highest first", Drawing(width, top + side + 28, shapes))


def _reading(element: ElementFormat) -> str:
    """How a code is read."""
    if element.kind == "integer":
        return f"value = I × 2^-{element.bias}, I the code as a two's complement number."
    if element.is_power_of_two:
        return f"value = 2^(E - {element.bias}); E of all ones is NaN. There is no zero."
    lines = [
        f"* E ≥ 1: value = (-1)^S × 2^(E - {element.bias}) × 1.M",
        f"* E = 0: value = (-1)^S × 2^{1 - element.bias} × 0.M, the zeros and the subnormals",
    ]
    if element.specials == "nan":
        lines.append("* E and M of all ones: NaN; the other codes of the top exponent are ordinary values")
    if element.specials == "ieee":
        lines.append("* E of all ones: Inf where M is 0, NaN elsewhere")
    return "\n".join(lines)


def properties(element: ElementFormat) -> str:
    """The derived properties of an element format."""
    none = "none"
    nan = [hexadecimal(code, element.bits) for code, value in enumerate(element.values) if math.isnan(value)]
    inf = [hexadecimal(code, element.bits) for code, value in enumerate(element.values) if math.isinf(value)]
    rows = [
        ("largest value", f"{exact(element.max)} (code {hexadecimal(element.max_code, element.bits)})"),
        ("its exponent, emax", element.emax),
        ("smallest positive normal", none if element.min_normal is None else exact(element.min_normal)),
        ("smallest positive value", exact(min(value for value in element.positive if value > 0))),
        ("every value is a multiple of", exact(element.quantum)),
        (
            "largest multiple",
            f"{element.largest_multiple:.10g}" if element.largest_multiple < 1 << 40 else exact(element.largest_multiple),
        ),
        ("codes", element.code_count),
        ("Inf", ", ".join(inf) or none),
        ("NaN", ", ".join(nan) or none),
        ("zero", "+0 and -0" if element.zero and element.kind == "float" else "one" if element.zero else none),
    ]
    return table(("property", "value"), rows)


def number_line(element: ElementFormat) -> str:
    """The positive values where they lie; midpoints between them where there is room."""
    signed = ", the negative ones mirror them" if element.signed else ""
    caption = f"The positive values of {element.name.upper()}{signed}"
    return figure(caption, *(_number_line(element, width) for width in (WIDE, PHONE)))


def _number_line(element: ElementFormat, width: float) -> Drawing:
    positive = [value for value in element.positive if value > 0]
    logarithmic = positive[-1] / positive[0] > 600
    left, right, y = 24, width - 24, 56

    def place(value: float) -> float:
        if logarithmic:
            low, high = math.log2(positive[0]), math.log2(positive[-1])
            return left + (math.log2(value) - low) / (high - low) * (right - left)
        return left + value / positive[-1] * (right - left)

    shapes = [line(left, y, right, y, "axis")]
    if not logarithmic and len(positive) < 40:
        shapes += [line(place(m), y - 9, place(m), y + 9, "midpoint") for m in element.midpoints]
    shapes += [line(place(value), y - 17, place(value), y + 17, "value") for value in positive]
    if not logarithmic:
        shapes.append(line(left, y - 17, left, y + 17, "value"))
    shown: list[tuple[float, int]] = []
    powers = [v for v in positive if math.frexp(v)[0] == 0.5]
    candidates = ([0.0] if not logarithmic else []) + (positive if len(positive) < 12 else [*powers, positive[-1]])
    for value in sorted(candidates, key=lambda v: (v != positive[-1], v)):  # the largest value always has its label
        x = place(value) if value or not logarithmic else left
        label = exact(value)
        if all(abs(x - other) > 5 * (len(label) + length) for other, length in shown):
            shown.append((x, len(label)))
            anchor = "start" if x - left < 10 else "end" if right - x < 10 else "middle"
            shapes.append(text(x, y + 36, label, anchor, "small"))
    shapes.append(
        text(
            left,
            22,
            "logarithmic" if logarithmic else "linear; dashed: midpoints" if len(positive) < 40 else "linear",
            "start",
            "small",
        )
    )
    return Drawing(width, 104, shapes)


def values(element: ElementFormat) -> str:
    """Every code with its value: a table of the positive ones, or, where they are many, a list in columns."""
    if element.code_count <= FEW_CODES:
        half = element.sign_mask or element.code_count
        rows = []
        for code in range(half):
            negative = hexadecimal(code | element.sign_mask, element.bits)
            rows.append(
                (
                    f"`{hexadecimal(code, element.bits)}`",
                    f"`{fields(code, element)}`",
                    exact(element.values[code]),
                    f"`{negative}`",
                )
            )
        return table(("code", "bits", "value", "code of the negative"), rows, "lcrl")
    codes = [
        f"<li><code>{hexadecimal(code, element.bits)}</code> {exact(value)}</li>"
        for code, value in enumerate(element.values)
    ]
    return fold(f"All {element.code_count} codes", '<ol class="codes">\n' + "\n".join(codes) + "\n</ol>")


def fields(code: int, element: ElementFormat) -> str:
    """The bits of a code, its fields apart."""
    digits = f"{code:0{element.bits}b}"
    cuts = (0, int(element.signed), element.signed + element.exponent_bits, element.bits)
    parts = [digits[low:high] for low, high in zip(cuts, cuts[1:])]
    return digits if element.kind == "integer" else " ".join(part for part in parts if part)


def _encode(value: float, element: ElementFormat, **options) -> int:
    return int(mxref.encode(torch.tensor([value]), element, **options)[0])


def _ties_text(element: ElementFormat) -> str:
    return (
        "Halfway between two neighbours a value ties, and goes to the neighbour whose code is even (its last bit 0). "
        f"What is above {exact(element.max)} saturates to it"
        + ("" if element.specials == "none" else ' by default, and becomes Inf or NaN with `overflow="special"`')
        + "."
    )


def midpoints(element: ElementFormat) -> str:
    """Each midpoint with its neighbours, and where the reference's encoder sends it."""
    rows = []
    for low, high, middle in zip(element.positive, element.positive[1:], element.midpoints):
        code = _encode(middle, element)
        rows.append(
            (
                exact(low),
                f"**{exact(middle)}**",
                exact(high),
                exact(element.values[code]),
                f"`{hexadecimal(code, element.bits)}`",
            )
        )
    listed = table(("below", "midpoint", "above", "goes to", "code"), rows, "rrrrl")
    return listed if len(rows) < FEW_CODES else fold(f"All {len(rows)} midpoints of the positive values", listed)


def roundings() -> str:
    """What each rounding makes of values between those of E2M1."""
    inputs, e2m1 = (0.25, 1.25, 2.2, 2.5, 2.6, -2.5), ELEMENT_FORMATS["e2m1"]
    rows = []
    for name in ROUNDINGS:
        if name == "stochastic":  # has no one result
            continue
        codes = [_encode(value, e2m1, rounding=name) for value in inputs]
        rows.append((f"`{name}`", *(exact(e2m1.values[code]) for code in codes)))
    by_chance = "`stochastic` takes one of the two neighbours, by a random word and the value's distance from them."
    return table(("E2M1, rounding", *map(exact, inputs)), rows) + "\n\n" + by_chance


def special_inputs(element: ElementFormat) -> str:
    """What the encoder makes of inputs at the edges."""
    smallest = min(value for value in element.positive if value > 0)
    inputs = [("0", 0.0), ("-0", -0.0), ("-1", -1.0)]
    inputs += [(f"{exact(smallest / 2)}, half the smallest value", smallest / 2)]
    inputs += [
        (f"{exact(element.max)}, the largest value", element.max),
        (f"{exact(2 * element.max)}, beyond it", 2 * element.max),
    ]
    inputs += [("Inf", math.inf), ("NaN", math.nan)]
    overflows = ("saturate",) if element.specials == "none" else OVERFLOWS
    rows = [(name, *(_outcome(value, element, overflow=how) for how in overflows)) for name, value in inputs]
    return table(("input", *(f'`overflow="{how}"`' for how in overflows)), rows)


def _outcome(value: float, element: ElementFormat, **options) -> str:
    try:
        code = _encode(value, element, **options)
    except ValueError:
        return "refused"
    return f"`{hexadecimal(code, element.bits)}` = {exact(element.values[code])}"


def special_codes(element: ElementFormat) -> str:
    """What decoding makes of the codes that are not plain values."""
    odd = [code for code, value in enumerate(element.values) if not math.isfinite(value)]
    if element.kind == "integer":
        odd.append(element.sign_mask)
    if not odd:
        return "Every code is a finite value: there is no code for NaN or Inf, so a NaN can only live in the scale."
    rows = [(f"`{hexadecimal(code, element.bits)}`", exact(element.values[code])) for code in odd]
    note = "\n\nDecoders accept this code; the encoder never writes it." if element.kind == "integer" else ""
    return table(("code", "decodes to"), rows) + note


def _spacing_text(element: ElementFormat) -> str:
    if element.kind == "integer":
        return "An integer's steps are equal, so its relative error falls as the value grows."
    worst = 2.0 ** -(element.mantissa_bits + 1)
    ratio = 2.0 ** (BFLOAT16_BITS - 1 - element.mantissa_bits)
    return (
        f"A normal value is rounded by at most {exact(worst)} of its size, {ratio:.0f} times as much as in bfloat16 "
        f"({exact(2.0**-BFLOAT16_BITS)}). Below {exact(element.min_normal)} steps are equal and the relative error grows."
    )


def spacing(element: ElementFormat) -> str:
    """The largest relative rounding error at each size, beside bfloat16's."""
    caption = f"Largest relative rounding error of {element.name.upper()} against size, beside bfloat16"
    return figure(caption, *(_spacing(element, width) for width in (WIDE, PHONE)))


def _spacing(element: ElementFormat, width: float) -> Drawing:
    smallest = min(value for value in element.positive if value > 0)
    octaves = min(max(12, math.ceil(math.log2(element.max / smallest)) + 1), 33)
    lowest, left, right, top, bottom = -11, 40, width - 62, 16, 236
    every = next(step for step in (2, 4, 8, 16) if step * (right - left) / octaves > 48)  # octaves from label to label

    def place(value: float, error: float) -> tuple[float, float]:
        across = right + math.log2(value / element.max) / octaves * (right - left)
        return across, top + min(max(-math.log2(error), 0), -lowest) / -lowest * (bottom - top)

    shapes = []
    for exponent in range(0, lowest - 1, -2):
        y = place(1, 2.0**exponent)[1]
        shapes += [line(left, y, right, y), text(left - 6, y + 4, f"2^{exponent}" if exponent else "1", "end", "small")]
    for k in range(0, octaves + 1, every):
        x = place(element.max / 2.0**k, 1)[0]
        shapes.append(text(x, bottom + 18, f"max/2^{k}" if k else "max", kind="small"))
    teeth = []
    for exponent in range(element.emax - octaves + 1, element.emax + 1):
        teeth.append(place(2.0**exponent, 2.0**-BFLOAT16_BITS))
        end = min(2.0 ** (exponent + 1), element.max)
        teeth.append(place(end * (1 - 1e-6), 2.0 ** (exponent - BFLOAT16_BITS) / end))
    own = []
    for low, high in zip(element.positive, element.positive[1:]):
        own += [place(v, min(1.0, (high - low) / 2 / v)) for v in (max(low, high / 2), high)]
    for kind, points, name in (("second", teeth, "bfloat16"), ("first", own, element.name.upper())):
        shapes += [path(points, kind), text(right + 8, points[-1][1] + 4, name, "start", "small")]
    return Drawing(width, bottom + 28, shapes)


def _users(element: ElementFormat) -> str:
    lines = []
    for block in BLOCK_FORMATS.values():
        for role, used in (("elements", block.element), ("scales", block.scale)):
            if used == element:
                lines.append(f"* [{block.name.upper()}](../formats/{block.name}.md): {role}")
    return "\n".join(lines)


# ---- block formats --------------------------------------------------------------------------------------------------


def block_page(block: BlockFormat) -> str:
    """The page of a block format."""
    element, scale = block.element, block.scale
    parts = [
        f"# {block.name.upper()}",
        f"{block.block_size} elements of [{element.name.upper()}](../elements/{element.name}.md) share one scale of "
        f"[{scale.name.upper()}](../elements/{scale.name}.md)"
        + (", and one float32 scales the whole tensor" if block.tensor_scale else "")
        + f": **{block.bits_per_element:g} bits a weight**. Source: {block.source}.",
        "## One block",
        block_layout(block),
        _value_of_an_element(block),
        "## Bits a weight",
        bits_a_weight(block),
        "## Values and range",
        block_range(block),
        number_line(element),
        spacing(element),
        "Midpoints, ties and every code: " + f"[{element.name.upper()}](../elements/{element.name}.md).",
        "## Fixed, and policy",
        "What the standard or the hardware fixes, what it leaves to whoever quantizes, and what mxref does by default. "
        "The names in the last column are fields of a [recipe](../producers/recipes.md).",
        fixed_and_policy(block),
        "## Special codes and blocks",
        special_blocks(block),
        stored_specials(block),
        "## One block, step by step",
        worked_block(block),
    ]
    return "\n\n".join(parts) + "\n"


def block_layout(block: BlockFormat) -> str:
    """The scale and the elements of a block to scale, in bits; on a phone in several lines."""
    bits = block.scale.bits + block.block_size * block.element.bits
    a_line = 1 << (64 // block.element.bits).bit_length() - 1
    drawings = _block_layout(block, WIDE, block.block_size), _block_layout(block, PHONE, a_line)
    stored = f"together {bits} bits, {bits / 8:g} bytes; scales and elements are stored apart"
    return figure(f"One block of {block.name.upper()}, to scale: {stored}", *drawings)


def _block_layout(block: BlockFormat, width: float, a_line: int) -> Drawing:
    left, top, height = 10, 30, 46 if a_line == block.block_size else 34
    unit = (width - 2 * left) / (block.scale.bits + a_line * block.element.bits)
    first = left + unit * block.scale.bits
    shapes = [
        box(left, top, unit * block.scale.bits, height, "scale"),
        text(left, top - 10, f"scale: {block.scale.bits} bits", "start", "small"),
    ]
    for i in range(block.block_size):
        x, y = first + i % a_line * unit * block.element.bits, top + i // a_line * (height + 4)
        shapes.append(box(x, y, unit * block.element.bits, height, "element", f"{i}"))
    count = f"{block.block_size} elements of {block.element.bits} bits"
    shapes.append(text(width - left, top - 10, count, "end", "small"))
    return Drawing(width, top + block.block_size // a_line * (height + 4), shapes)


def _value_of_an_element(block: BlockFormat) -> str:
    if block.tensor_scale:
        direction = "[direction](../scales/tensor-scale.md)"
        return f"value of an element = element × block scale × tensor scale (or over it: the {direction})."
    return "value of an element = element × scale, exact wherever float32 can hold it, since the scale is a power of two."


def bits_a_weight(block: BlockFormat) -> str:
    """The sum, and what a short tail adds."""
    rows = []
    for length in (block.block_size, block.block_size + 1, 4096):
        q = mxref.quantize(torch.ones(1, length), block)
        stored = 8 * (q.packed.numel() + q.scales.numel())
        rows.append((f"[1,{NO_BREAK}{length}]", q.packed.numel(), q.scales.numel(), f"{stored / length:.4g}"))
    formula = f"{block.element.bits} + {block.scale.bits} / {block.block_size} = {block.bits_per_element:g} bits in a row."
    if block.tensor_scale:
        formula += " The float32 tensor scale comes on top: one for a tensor, a row or an expert."
    return f"{formula}\n\n" + table(("shape", "bytes of codes", "bytes of scales", "bits a weight"), rows, "lrrr")


def block_range(block: BlockFormat) -> str:
    """The largest and smallest magnitudes that a block can hold."""
    smallest_scale = min(v for v in block.scale.positive if v > 0)
    smallest = min(v for v in block.element.positive if v > 0)
    largest = block.element.max * block.scale.max
    before = " before a tensor scale" if block.tensor_scale else ""
    rows = [
        ("largest element", exact(block.element.max)),
        ("largest scale", f"{exact(block.scale.max)} (code `{hexadecimal(block.scale.max_code)}`)"),
        (
            f"largest magnitude{before}",
            "beyond float32: decodes to Inf" if largest > FLOAT_MAX else exact(largest),
        ),
        ("smallest scale", f"{exact(smallest_scale)} (code `{hexadecimal(block.scale.positive.index(smallest_scale))}`)"),
        (f"smallest magnitude{before}", exact(smallest * smallest_scale)),
        ("within one block, largest over smallest", f"{block.element.max / smallest:.10g}"),
    ]
    return table(("property", "value"), rows)


def fixed_and_policy(block: BlockFormat, top: str = "../") -> str:
    """Two columns: what is fixed, with its clause, and what is policy, with mxref's default and the other choices.

    `top`: the way from the page to docs/.
    """
    recipe = RECIPES[block.default_recipe]
    rules = ", ".join(f"`{rule}`" for rule in EXPONENT_RULES)
    saturates = block.element.specials == "none"
    roundings = ", ".join(f"`{name}`" for name in ROUNDINGS)
    overflows = f"**`{recipe.overflow}`**" + ("" if saturates else " of " + ", ".join(f"`{name}`" for name in OVERFLOWS))
    searches = ", ".join(f"`{s}`" for s in SEARCHES if (s == "mse") != block.tensor_scale or s == "none")
    mx = not block.tensor_scale
    if block.element.specials != "none":
        must_round, must_clip = "as OFP8 says", "saturating and not saturating are both offered (OFP8)"
    elif mx:
        must_round, must_clip = "to nearest even must be offered (5.3)", "saturates (5.3)"
    else:
        must_round, must_clip = "open; PTX's `cvt.rn` rounds to nearest even", "open; PTX's `cvt` saturates"
    dash = "open"
    rows = [
        ("what an element's code means", block.element.source, "-"),
        ("what a scale's code means", block.scale.source + ("; the sign bit must be 0" if block.tensor_scale else ""), "-"),
        (
            "block size",
            f"{block.block_size} ({block.source})",
            f"`block_rows`: **1**; 16 gives blocks of 16 x {block.block_size}",
        ),
        ("a NaN scale", "the whole block is NaN" + (" (5.1)" if mx else ""), "-"),
        (
            "how the scale is chosen",
            "recommended, not required: 6.3" if mx else dash,
            f"`scale_rule`: **`{recipe.scale_rule}`**"
            + (f" of {rules}" if mx else f"; `encode_order`: **`{recipe.encode_order}`** of several"),
        ),
        ("rounding of elements", must_round, f"`rounding`: **`{recipe.rounding}`** of {roundings}"),
        ("elements too large", must_clip, f"`overflow`: {overflows}"),
        ("a block of zeros", dash, f"`zero_block`: **`{recipe.zero_block}`** of `zero_code`, `one`"),
        ("NaN in the input", dash, f"`nan`: **`{recipe.nan}`** of `poison`, `raise`"),
        ("Inf in the input", dash, f"`inf`: **`{recipe.inf}`** of `nan`, `saturate`"),
        ("sign of zero", dash, f"`negative_zero`: **`{recipe.negative_zero}`** of `keep`, `drop_quotient`, `drop`"),
        ("search for a better scale", dash, f"`search`: **`{recipe.search}`** of {searches}"),
        ("bytes in memory", dash + (" (5.1)" if mx else "; cuBLAS wants its tile"), f"[storage]({top}storage/index.md)"),
        ("axis, and a short tail", dash, "`axis=` of `quantize`; a tail is a block with fewer elements"),
        (
            "order and precision of a dot product",
            "implementation-defined (6.1, 6.2)" if mx else dash,
            f"[exact in a block, then ascending]({top}matmul/index.md)",
        ),
    ]
    if block.tensor_scale:
        choices = "**`per_tensor`**, `per_row`, `per_expert`, `none`, or a tensor"
        direction = f"[direction]({top}scales/tensor-scale.md)"
        rows.insert(4, ("the tensor scale", dash, f"`tensor_scale=`: {choices}; {direction}"))
    return table(("", "fixed", "policy: mxref's default in bold"), rows)


def special_blocks(block: BlockFormat) -> str:
    """What quantizing blocks at the edges gives."""
    cases = {"all zeros": [0.0, 0.0], "a NaN": [math.nan, 1.0], "an Inf": [math.inf, 1.0], "-0": [1.0, -0.0]}
    cases |= {"the largest float32": [FLOAT_MAX, 1.0], "2^-149, the smallest float32": [2.0**-149, 0.0]}
    rows = []
    for name, values_ in cases.items():
        options = {"tensor_scale": "none"} if block.tensor_scale else {}
        q = mxref.quantize(torch.tensor(values_), block, **options)
        codes = " ".join(hexadecimal(int(c), block.element.bits) for c in q.codes)
        decoded = ", ".join(readable(v) for v in mxref.dequantize(q).tolist())
        rows.append(
            (
                name,
                ", ".join(readable(v) for v in values_),
                f"`{hexadecimal(int(q.scales[0]))}`",
                f"`{codes}`",
                decoded,
            )
        )
    note = "With the default recipe" + (' and `tensor_scale="none"`' if block.tensor_scale else "") + ":"
    return note + "\n\n" + table(("block", "input", "scale", "codes", "decodes to"), rows)


def stored_specials_text(element: ElementFormat) -> str:
    """What decoding makes of an element that is itself NaN or Inf."""
    if element.specials == "none":
        return f"{element.name.upper()} has no code for NaN or Inf, so only a NaN scale decodes to NaN."
    inf = " An Inf code decodes to Inf of its sign, whatever the scale." if element.specials == "ieee" else ""
    return (
        "an element whose code is NaN decodes to NaN, whatever its sign bit and its scale; its neighbours keep their "
        f"values.{inf} Only a NaN *scale* makes the whole block NaN. In a product every output that a NaN element takes "
        f"part in is NaN. The NaN that comes out is always the canonical one, `0x{_canonical_nan(element):08X}` in float32. "
        "With the default recipe `quantize` writes no such code: a NaN in its input becomes a NaN scale."
    )


def _canonical_nan(element: ElementFormat) -> int:
    """The float32 bits that every NaN code of an element decodes to."""
    codes = [code for code, value in enumerate(element.values) if math.isnan(value)]
    bits = mxref.decode(torch.tensor(codes, dtype=torch.uint8), element).view(torch.int32).unique()
    return int(bits.item())


def stored_specials(block: BlockFormat) -> str:
    """What stored blocks with a NaN or Inf code decode to, each beside an element of 1."""
    element = block.element
    if element.specials == "none":
        return f"Of stored blocks: {stored_specials_text(element)}"
    one = element.positive.index(1.0)
    odd = [code for code, value in enumerate(element.values) if not math.isfinite(value)]
    scales = [block.scale.positive.index(value) for value in (1.0, 2.0)] + [block.scale.nan_code]
    rows = []
    for code in odd:
        cells = []
        for scale in scales:
            codes = torch.tensor([code, one], dtype=torch.uint8)
            stored = mxref.BlockTensor.from_codes(
                codes, torch.tensor([scale], dtype=torch.uint8), None, block, RECIPES[block.default_recipe]
            )
            cells.append(", ".join(readable(value) for value in mxref.dequantize(stored).tolist()))
        shown = f"`{hexadecimal(code, element.bits)}` `{hexadecimal(one, element.bits)}`"
        rows.append((shown, exact(element.values[code]), *cells))
    header = ("stored codes", "the first is", *(f"decoded with scale `{hexadecimal(scale)}`" for scale in scales))
    return f"Of stored blocks: {stored_specials_text(element)}\n\n" + table(header, rows)


def worked_block(block: BlockFormat) -> str:
    """`mxref.explain` of one block, and the bytes that are stored."""
    x = torch.tensor(SAMPLE_BLOCK)
    q = mxref.quantize(x, block)
    shown = listing(str(mxref.explain(x, block)))
    packed = " ".join(f"{byte:02X}" for byte in q.packed.tolist())
    tail = f"Its {len(q.packed)} bytes of codes are `{packed}`, its scale byte is `{int(q.scales[0]):02X}`."
    call = listing(f'print(mxref.explain(torch.tensor({list(SAMPLE_BLOCK)}), "{block.name}"))', "{code-block} python")
    return f"{call}\n\n{shown}\n\n{tail}"


def overview() -> str:
    """All block formats in one table."""
    rows = []
    for block in BLOCK_FORMATS.values():
        scale = block.scale.name.upper() + (" and float32" if block.tensor_scale else "")
        rows.append(
            (
                f"[{block.name.upper()}](formats/{block.name}.md)",
                f"{block.bits_per_element:g}",
                f"[{block.element.name.upper()}](elements/{block.element.name}.md)",
                block.block_size,
                scale,
                exact(block.element.max),
                f"`{block.default_recipe}`",
            )
        )
    return table(
        ("format", "bits a weight", "element", "block", "scale", "largest element", "default recipe"), rows, "lrlrlrl"
    )


def elements_overview() -> str:
    """All element formats in one table."""
    rows = []
    for e in ELEMENT_FORMATS.values():
        smallest = min(v for v in e.positive if v > 0)
        special = {"none": "neither", "nan": "NaN", "ieee": "Inf and NaN"}[e.specials]
        shape = f"{int(e.signed)}/{e.exponent_bits}/{e.mantissa_bits}"
        rows.append(
            (f"[{e.name.upper()}](elements/{e.name}.md)", shape, e.bias, e.emax, exact(e.max), exact(smallest), special)
        )
    return table(
        ("format", "sign, exponent, mantissa bits", "bias", "emax", "max", "smallest > 0", "Inf, NaN"), rows, "lcrrrrl"
    )
