"""Ops: the functions whose signature and docstring are a contract.

An op is a reference function. `@op` puts it into `OPS`, so that other implementations of the same
signature can be found, checked and swapped in later without any caller changing.
"""

import functools
import sys
from collections.abc import Callable

import torch

OPS: dict[str, Callable] = {}

_SUBNORMAL = sys.float_info.min / 2  # a variable, so that no compiler folds the product below


def op(reference: Callable) -> Callable:
    """Mark `reference` as an op: its name, signature and docstring are the contract."""

    @functools.wraps(reference)
    def call(*args, **kwargs):
        require_subnormals()
        if any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):  # it would cast products
                return reference(*args, **kwargs)
        return reference(*args, **kwargs)

    if reference.__name__ in OPS:
        raise ValueError(f"op {reference.__name__!r} is defined twice")
    OPS[reference.__name__] = call
    return call


def require_subnormals() -> None:
    """Raise RuntimeError if this thread flushes subnormal numbers to zero: no bit could be promised."""
    if _SUBNORMAL * 1.0 == 0.0:
        raise RuntimeError(
            "subnormal numbers are being flushed to zero on this thread; mxref's results are defined with IEEE 754 "
            "subnormals: call torch.set_flush_denormal(False)"
        )
