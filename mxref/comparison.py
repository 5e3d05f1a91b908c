"""Comparing results as bits: shape, dtype and every bit, NaN included; the one helper for kernels, tests and conformance."""

from collections.abc import ValuesView
from dataclasses import fields, is_dataclass
from typing import Any

import torch

SHOWN = 20
_CARRIER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_patterns(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of every value as integers of the same width, contiguous.

    >>> bit_patterns(torch.tensor([-0.0])).tolist()
    [-2147483648]
    """
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor.view(_CARRIER[tensor.element_size()])


def tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor in arguments or in a result: in tuples, lists, dicts and records too."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in fields(value)]
    return [x for item in value for x in tensors(item)] if isinstance(value, (tuple, list, ValuesView)) else []


def parts(result: Any) -> dict[str, torch.Tensor]:
    """The named tensors of an op's result: of a tensor itself, of a tuple, or of a block-scaled tensor."""
    if isinstance(result, torch.Tensor):
        return {"": result}
    if isinstance(result, (tuple, list)):
        return {str(i): part for i, part in enumerate(result)}
    names = ("codes", "packed", "scales", "tensor_scale")
    return {name: getattr(result, name) for name in names if getattr(result, name) is not None}


def difference(actual: Any, expected: Any) -> str | None:
    """None if both results have the same tensors bit for bit; else what differs, up to 20 places in hex. Strides may differ;
    what requires a gradient, or holds no values of its own, differs from what does not.

    >>> difference(torch.tensor([1.0, -0.0]), torch.tensor([1.0, 0.0]))
    '1 of 2 values differ in their bits\\n  [1]: got 0x80000000 (-0.0), expected 0x00000000 (0.0)'
    """
    kind = next((kind for kind in (torch.Tensor, (tuple, list)) if isinstance(expected, kind)), None)
    if type(actual) is not type(expected) and (kind is None or not isinstance(actual, kind)):
        return f"got a {type(actual).__name__}, expected a {type(expected).__name__}"
    for field in fields(expected) if is_dataclass(expected) else ():
        values = getattr(actual, field.name), getattr(expected, field.name)
        if not any(isinstance(value, torch.Tensor) for value in values) and values[0] != values[1]:
            return f"{field.name} is {values[0]}, expected {values[1]}"
    try:
        given, wanted = parts(actual), parts(expected)
    except Exception as problem:  # of a record that was made without its checks
        return f"the parts of {type(actual).__name__} cannot be read: {type(problem).__name__}: {problem}"
    if given.keys() != wanted.keys():
        return f"got the parts {list(given)}, expected {list(wanted)}"
    for name in wanted:
        found = _tensor_difference(given[name], wanted[name])
        if found is not None:
            return f"{name}: {found}" if name else found
    return None


def _tensor_difference(actual: Any, expected: torch.Tensor) -> str | None:
    if not isinstance(actual, torch.Tensor):
        return f"got a {type(actual).__name__}, expected a Tensor"
    if actual.dtype != expected.dtype:
        return f"dtype {actual.dtype}, expected {expected.dtype}"
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if actual.layout != expected.layout:
        return f"layout {actual.layout}, expected {expected.layout}"
    if actual.is_meta and not expected.is_meta:
        return f"device {actual.device}, which holds no values"
    if actual.requires_grad and not expected.requires_grad:
        return "requires_grad is True, expected False"
    got, want = bit_patterns(actual), bit_patterns(expected).to(actual.device)
    if torch.equal(got, want):
        return None
    places = (got != want).nonzero().cpu()
    digits, mask = 2 * got.element_size(), (1 << 8 * got.element_size()) - 1
    lines = [f"{len(places)} of {got.numel()} values differ in their bits"]
    for place in places[:SHOWN].tolist():
        index = tuple(place)
        lines.append(
            f"  {place}: got 0x{int(got[index]) & mask:0{digits}x} ({actual[index].item()}), "
            f"expected 0x{int(want[index]) & mask:0{digits}x} ({expected[index].item()})"
        )
    if len(places) > SHOWN:
        lines.append(f"  ... and {len(places) - SHOWN} more")
    return "\n".join(lines)
