"""Markdown: tables, folds, and how a number is written."""

import math
from collections.abc import Iterable, Sequence

NO_BREAK = "\N{NO-BREAK SPACE}"
LONGEST = 8  # characters of a value written out; longer ones are written as a significand and a power of two


def table(header: Sequence[str], rows: Iterable[Sequence[object]], align: str = "") -> str:
    """A Markdown table; `align` has a letter a column, `l`, `r` or `c` (default: all left)."""
    rules = {"l": ":--", "r": "--:", "c": ":-:"}
    lines = ["| " + " | ".join(header) + " |"]
    lines.append("|" + "|".join(rules[letter] for letter in align or "l" * len(header)) + "|")
    lines += ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _cell(cell: object) -> str:
    return str(cell).replace("|", "\\|").replace("\n", "<br>")


def fold(summary: str, content: str) -> str:
    """Content that a reader unfolds."""
    return f"<details>\n<summary>{summary}</summary>\n\n{content}\n\n</details>"


def listing(text: str, language: str = "text") -> str:
    """A block of text as it is."""
    return f"```{language}\n{text.rstrip()}\n```"


def hexadecimal(code: int, bits: int = 8) -> str:
    """A code as `0x7F`, with the digits that its bits need."""
    return f"0x{code:0{-(-bits // 4)}X}"


def exact(value: float) -> str:
    """A value exactly: `1.5`, or `1.25 × 2^-14` where that is longer than a table's cell."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Inf" if value > 0 else "-Inf"
    if value == 0:
        return "-0" if math.copysign(1, value) < 0 else "0"
    plain = repr(int(value)) if value == int(value) and abs(value) < 1e6 else repr(float(value))
    if "e" not in plain and (len(plain) <= LONGEST or 1 <= abs(value) < 2):
        return plain
    mantissa, exponent = math.frexp(abs(value))
    sign, significand = "-" if value < 0 else "", 2 * mantissa
    power = f"2^{exponent - 1}"
    return sign + (power if significand == 1 else f"{significand:.10g} × {power}")


def counted(count: int, what: str) -> str:
    """`1 bit`, `2 bits`."""
    return f"{count} {what}" + ("" if count == 1 else "s")


def short(value: float, digits: int = 3) -> str:
    """A measured value, rounded for reading: never in computer notation, so `3.4 × 10^38` and not `3.4e+38`."""
    significand, _, power = f"{value:.{digits}g}".partition("e")
    return f"{significand} × 10^{int(power)}" if power else significand


def measured(value: float, digits: int = 3) -> str:
    """A measured time or share with so many digits, zeros at its end too: `12.0`, `0.350`, `1234`."""
    decimals = digits - 1 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:.{max(0, decimals)}f}"


def readable(value: float) -> str:
    """A value exactly where that is short, and rounded where it is not."""
    text = exact(value)
    return text if len(text) < 12 else short(value, 4)
