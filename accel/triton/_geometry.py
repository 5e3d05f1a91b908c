"""How a tensor of any shape and strides becomes `[outer, K, inner]`, the form the kernels take."""

from math import prod

import torch


def split_strides(x: torch.Tensor, axis: int) -> tuple[int, int, int] | None:
    """Strides (outer, K, inner) if the axes before and after `axis` each collapse to one; else None."""
    outer, inner = _collapsed(x, 0, axis), _collapsed(x, axis + 1, x.ndim)
    return None if outer is None or inner is None else (outer, x.stride(axis), inner)


def _collapsed(x: torch.Tensor, first: int, last: int) -> int | None:
    """The stride of axes `first` to `last - 1` taken as one; None if they do not collapse."""
    axes = [(x.shape[i], x.stride(i)) for i in range(first, last) if x.shape[i] != 1]
    for (_, slow), (size, fast) in zip(axes, axes[1:], strict=False):
        if slow != size * fast:
            return None
    return axes[-1][1] if axes else 0


def three_sizes(shape: torch.Size, axis: int) -> tuple[int, int, int]:
    """(outer, K, inner) of a shape."""
    return prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :])
