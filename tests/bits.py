"""The one comparison the tests use, `mxref.comparison`, as an assertion that also takes numpy arrays and lists."""

import numpy as np
import torch

from mxref.comparison import SHOWN, difference

__all__ = ["SHOWN", "as_torch", "assert_same_bits"]


def as_torch(data) -> torch.Tensor:
    """A numpy array or a nested list as a torch tensor with the same bits; tensors pass through."""
    if isinstance(data, torch.Tensor):
        return data
    array = np.asarray(data)
    if array.dtype.name == "bfloat16":  # ml_dtypes
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array, copy=True))


def assert_same_bits(actual, expected, context="") -> None:
    """Fail unless `actual` has the shape, dtype and bits of `expected`; names up to 20 differing places in hex."""
    found = difference(as_torch(actual), as_torch(expected))
    if found is not None:
        raise AssertionError(f"{context}: {found}" if context != "" else found)
