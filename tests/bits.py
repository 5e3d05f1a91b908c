"""The one comparison the tests use: shape, dtype and every bit.

No tolerance, and NaN is compared by its bits: a result that is not the promised pattern is a failure.
"""

import numpy as np
import torch

SHOWN = 20
_CARRIER = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def as_torch(data) -> torch.Tensor:
    """A numpy array or a nested list as a torch tensor with the same bits; tensors pass through."""
    if isinstance(data, torch.Tensor):
        return data
    array = np.asarray(data)
    if array.dtype.name == "bfloat16":  # ml_dtypes
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array, copy=True))


def bit_patterns(tensor: torch.Tensor) -> np.ndarray:
    """The bits of every value, as unsigned integers of the same width."""
    tensor = tensor.detach().cpu().contiguous()
    width = tensor.element_size()
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    plain = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor.view(carrier)
    return plain.numpy().view(_CARRIER[width])


def assert_same_bits(actual, expected, context="") -> None:
    """Fail unless `actual` has the shape, dtype and bits of `expected`; names up to 20 differing places in hex."""
    actual, expected = as_torch(actual), as_torch(expected)
    label = f"{context}: " if context != "" else ""
    if actual.dtype != expected.dtype:
        raise AssertionError(f"{label}dtype {actual.dtype}, expected {expected.dtype}")
    if actual.shape != expected.shape:
        raise AssertionError(f"{label}shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    got, want = bit_patterns(actual), bit_patterns(expected)
    places = np.argwhere(got != want)
    if len(places) == 0:
        return
    digits = 2 * actual.element_size()
    lines = [f"{label}{len(places)} of {got.size} values differ in their bits"]
    for place in places[:SHOWN]:
        index = tuple(int(i) for i in place)
        lines.append(
            f"  {list(index)}: got 0x{int(got[index]):0{digits}x} ({actual[index].item()}), "
            f"expected 0x{int(want[index]):0{digits}x} ({expected[index].item()})"
        )
    if len(places) > SHOWN:
        lines.append(f"  ... and {len(places) - SHOWN} more")
    raise AssertionError("\n".join(lines))
