"""What a failure shows: the difference, the first block that differs in full, and the command that repeats it."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import mxref
from mxref.blocks import BlockTensor
from mxref.comparison import bit_patterns, parts
from mxref.conformance.cases import Case
from mxref.elements import decode_codes
from mxref.explain import _bit_fields
from mxref.formats import ElementFormat, element_format
from mxref.registry import told

SHOWN = 16  # values, where an op has no blocks


@dataclass(frozen=True)
class Failure:
    """What differed, the first block that does (or where a kernel raised), and the command that repeats it."""

    difference: str
    block: str
    repeat: str

    def __str__(self) -> str:
        return "\n".join(part for part in (self.difference, self.block, f"again: {self.repeat}") if part)


def first_block(case: Case, actual: Any, expected: Any) -> str:
    """The first block of a case that differs, or why it cannot be shown; it never raises."""
    try:
        with mxref.use():
            args, kwargs = case.arguments()
            return _SHOW.get(case.op, _show_values)(args, kwargs, actual, expected)
    except Exception as problem:  # what shows a failure must not hide it
        return f"no block to show: {told(problem)}"


# ---- ops with blocks ------------------------------------------------------------------------------------------------


def _show_quantize(args: tuple, kwargs: dict, actual: BlockTensor, expected: BlockTensor) -> str:
    x, axis, size = args[0], expected.axis, expected.format.block_size
    got, want = actual.codes.cpu(), expected.codes
    place = _first_difference(got, want)
    if place is None:
        place = _first_difference(actual.scales.cpu(), expected.scales)
        if place is None:
            return ""  # the tensor scale alone differs
        place = _first_element(place, expected)
    block = _block(place, axis, size)
    scale = _scale_place(place, expected)
    element = expected.format.element
    columns = {
        "x": _numbers(x[block]),
        "expected": _codes(want[block], element),
        "got": _codes(got[block], element),
    }
    scales = f"expected {_scale(expected.scales[scale], expected)}, got {_scale(actual.scales[scale].cpu(), expected)}"
    return "\n".join([_title(block, expected), f"scale: {scales}", _table(columns), _explanation(x[block], expected, place)])


def _show_qdq(args: tuple, kwargs: dict, actual: torch.Tensor, expected: torch.Tensor) -> str:
    x = args[0]
    q = mxref.quantize(*args, **{name: value for name, value in kwargs.items() if name != "gradient"})
    place = _first_difference(actual.cpu(), expected)
    block = _block(place, q.axis, q.format.block_size)
    columns = {
        "x": _numbers(x[block]),
        "code": _codes(q.codes[block], q.format.element),
        "expected": _numbers(expected[block]),
        "got": _numbers(actual[block].cpu()),
    }
    scale = _scale(q.scales[_scale_place(place, q)], q)
    return "\n".join([_title(block, q), f"scale: {scale}", _table(columns), _explanation(x[block], q, place)])


def _show_dequantize(args: tuple, kwargs: dict, actual: torch.Tensor, expected: torch.Tensor) -> str:
    q = args[0]
    place = _first_difference(actual.cpu(), expected)
    block = _block(place, q.axis, q.format.block_size)
    columns = {
        "code": _codes(q.codes[block], q.format.element),
        "expected": _numbers(expected[block]),
        "got": _numbers(actual[block].cpu()),
    }
    return "\n".join([_title(block, q), f"scale: {_scale(q.scales[_scale_place(place, q)], q)}", _table(columns)])


def _block(place: list[int], axis: int, size: int) -> tuple:
    """The index of the block, in the row of `place`, that holds it."""
    index: list = list(place)
    start = place[axis] // size * size
    index[axis] = slice(start, start + size)
    return tuple(index)


def _scale_place(place: list[int], q: BlockTensor) -> tuple[int, ...]:
    """Where the scale of the element at `place` lies."""
    index = list(place)
    index[q.axis] //= q.format.block_size
    if q.recipe.block_rows > 1:
        index[q._grid.row_axis] //= q.recipe.block_rows
    return tuple(index)


def _first_element(scale_place: list[int], q: BlockTensor) -> list[int]:
    """The first element of the block whose scale lies at `scale_place`."""
    index = list(scale_place)
    index[q.axis] *= q.format.block_size
    if q.recipe.block_rows > 1:
        index[q._grid.row_axis] *= q.recipe.block_rows
    return index


def _title(block: tuple, q: BlockTensor) -> str:
    where = ", ".join(f"{i.start}:{i.stop}" if isinstance(i, slice) else str(i) for i in block)
    return f"block [{where}], {q.format.name}, recipe {q.recipe}"


def _scale(code: torch.Tensor, q: BlockTensor) -> str:
    scale = q.format.scale
    return f"{_codes(code.reshape(1), scale)[0]} = {_hex(float(decode_codes(code, scale)))}"


def _explanation(x: torch.Tensor, q: BlockTensor, place: list[int]) -> str:
    if q.recipe.rounding == "stochastic":
        return "no explanation: the random words depend on where in x the block lies"
    scale = "none" if q.tensor_scale is None else q.tensor_scale.expand(q.shape)[tuple(place)]
    try:
        return f"the reference, step by step:\n{mxref.explain(x, q.format, recipe=q.recipe, tensor_scale=scale)}"
    except Exception as problem:
        return f"no explanation: {problem}"


# ---- other ops ------------------------------------------------------------------------------------------------------


def _show_block_dot(args: tuple, kwargs: dict, actual: torch.Tensor, expected: torch.Tensor) -> str:
    a_codes, b_codes, a_element, b_element = args
    m, n = _first_difference(actual.cpu(), expected)
    columns = {
        f"a_codes[{m}]": _codes(a_codes[m], element_format(a_element)),
        f"b_codes[{n}]": _codes(b_codes[n], element_format(b_element)),
    }
    outcome = f"[{m}, {n}]: expected {_hex(float(expected[m, n]))}, got {_hex(float(actual[m, n]))}"
    return f"{outcome}\n{_table(columns)}"


def _show_values(args: tuple, kwargs: dict, actual: Any, expected: Any, result: ElementFormat | None = None) -> str:
    """The first values of the first part that differs, beside the arguments of the same shape."""
    given, wanted = parts(actual), parts(expected)
    name = next(name for name in wanted if _first_difference(given[name].cpu(), wanted[name]) is not None)
    got, want = given[name].cpu(), wanted[name]
    places = (bit_patterns(got) != bit_patterns(want)).nonzero()[:SHOWN]
    index = tuple(places.T)
    columns = {"place": [str(place) for place in places.tolist()]}
    for i, x in enumerate(args):
        if isinstance(x, torch.Tensor) and x.shape == want.shape:
            columns[f"argument {i}"] = _cells(x[index], element_format(args[1]) if x.dtype == torch.uint8 else None)
    columns |= {"expected": _cells(want[index], result), "got": _cells(got[index], result)}
    return _table(columns)


def _show_encode(args: tuple, kwargs: dict, actual: torch.Tensor, expected: torch.Tensor) -> str:
    return _show_values(args, kwargs, actual, expected, element_format(args[1]))


_SHOW: dict[str, Callable[..., str]] = {
    "quantize": _show_quantize,
    "qdq": _show_qdq,
    "dequantize": _show_dequantize,
    "encode": _show_encode,
    "block_dot": _show_block_dot,
}


# ---- text -----------------------------------------------------------------------------------------------------------


def _first_difference(actual: torch.Tensor, expected: torch.Tensor) -> list[int] | None:
    places = (bit_patterns(actual) != bit_patterns(expected)).nonzero()
    return places[0].tolist() if len(places) else None


def _cells(values: torch.Tensor, element: ElementFormat | None) -> list[str]:
    return _numbers(values) if element is None else _codes(values, element)


def _numbers(values: torch.Tensor) -> list[str]:
    return [_hex(value) if isinstance(value, float) else str(value) for value in values.flatten().tolist()]


def _hex(value: float) -> str:
    """`float.hex` without the zeros at the end of its digits."""
    return re.sub(r"\.?0+p", "p", value.hex())


def _codes(codes: torch.Tensor, element: ElementFormat) -> list[str]:
    """Codes with their bits as sign|exponent|mantissa."""
    return [_code(code, element) for code in codes.flatten().tolist()]


def _code(code: int, element: ElementFormat) -> str:
    known = code < element.code_count
    return f"0x{code:02X} {_bit_fields(code, element).replace('.', '|')}" if known else f"0x{code:02X} (no code)"


def _table(columns: dict[str, list[str]]) -> str:
    """Columns side by side; rows whose `expected` is not what they `got` are marked."""
    rows = [list(columns), *map(list, zip(*columns.values()))]
    widths = [max(map(len, column)) for column in zip(*rows)]
    marks = [False, *(e != g for e, g in zip(columns.get("expected", ()), columns.get("got", ())))]
    marks += [False] * (len(rows) - len(marks))
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows)
    return "\n".join(f"  {line}{'  <' if mark else ''}" for line, mark in zip(lines, marks))
