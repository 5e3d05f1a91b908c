"""Orders: the float32 steps between amax and codes where the block scale has a mantissa (NVFP4).

Algebra cannot tell these apart; float32 can. About one code in a thousand sits on a rounding tie
once its quotient is rounded, so which operation comes first, and whether it divides or multiplies
by a reciprocal, is part of a recipe's name. Every step is one float32 operation, rounded to nearest
even; `exact` avoids intermediate rounding and compares in float64, where its products are exact.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mxref.elements import reciprocal
from mxref.formats import FLOAT_MAX, FLOAT_SMALLEST, ElementFormat


class TensorScale(NamedTuple):
    """The scale of a whole tensor (or row, or expert): `stored` with the codes, `forward` multiplies on encode; its amax."""

    stored: torch.Tensor
    forward: torch.Tensor
    amax: torch.Tensor | None = None


@dataclass(frozen=True)
class EncodeOrder:
    """One order of operations. All tensors are float32 and broadcast against each other.

    `from_amax(amax, largest)`: the tensor scale that maps a tensor's amax to `largest` = element max x scale max.
    `given(stored)`: the same from a stored scale. `block_scale(amax, tensor, element_max)`: the block scale
    before it is rounded to the scale format. `multiplier(block_scale, tensor)`: what x is multiplied by
    before its code is taken, from the rounded block scale; `scaled(x, block_scale, tensor)`: what the code
    is taken of, where that is no such product. All are None for `exact`.
    """

    from_amax: Callable[[torch.Tensor, float], TensorScale]
    given: Callable[[torch.Tensor], TensorScale]
    block_scale: Callable[[torch.Tensor, TensorScale, float], torch.Tensor] | None
    multiplier: Callable[[torch.Tensor, TensorScale], torch.Tensor] | None
    scaled: Callable[[torch.Tensor, torch.Tensor, TensorScale], torch.Tensor] | None = None

    def quotient(self, x: torch.Tensor, block_scale: torch.Tensor, tensor: TensorScale) -> torch.Tensor:
        """What is rounded to codes, `[n, b]`, of blocks `[n, b]`, rounded block scales `[n]` and a tensor scale a block."""
        if self.scaled is None:
            return x * self.multiplier(block_scale, tensor)[:, None]
        scale = torch.where(block_scale == 0, 1.0, block_scale)  # which gives codes of 0, as x is that small
        return self.scaled(x, scale[:, None], TensorScale(tensor.stored[:, None], tensor.forward[:, None]))


def float32_ratio(a: float, b: float) -> float:
    return float(torch.tensor(a, dtype=torch.float32) / torch.tensor(b, dtype=torch.float32))


def _nvidia_from_amax(amax: torch.Tensor, largest: float) -> TensorScale:
    forward = torch.where(amax == 0, 1.0, (torch.full_like(amax, largest) / amax).clamp(max=FLOAT_MAX))
    return TensorScale(reciprocal(forward).clamp(max=FLOAT_MAX), forward)


def _nvidia_given(stored: torch.Tensor) -> TensorScale:
    return TensorScale(stored, reciprocal(stored).clamp(max=FLOAT_MAX))


def _nvidia_block_scale(amax: torch.Tensor, tensor: TensorScale, element_max: float) -> torch.Tensor:
    return amax * (tensor.forward * float32_ratio(1.0, element_max))


def _nvidia_multiplier(block_scale: torch.Tensor, tensor: TensorScale) -> torch.Tensor:
    return torch.where(block_scale == 0, 0.0, reciprocal(block_scale * tensor.stored).clamp(max=FLOAT_MAX))


def _vllm_from_amax(amax: torch.Tensor, largest: float) -> TensorScale:
    return _as_given(_nvidia_from_amax(amax, largest).forward)


def _as_given(stored: torch.Tensor) -> TensorScale:
    return TensorScale(stored, stored)


def _vllm_block_scale(amax: torch.Tensor, tensor: TensorScale, element_max: float) -> torch.Tensor:
    return tensor.forward * (amax * float32_ratio(1.0, element_max))


def _vllm_torch_multiplier(block_scale: torch.Tensor, tensor: TensorScale) -> torch.Tensor:
    product = block_scale * reciprocal(tensor.forward)
    return reciprocal(torch.where(product == 0, 1e8, product))  # vLLM's stand-in for the reciprocal of 0


def _vllm_triton_multiplier(block_scale: torch.Tensor, tensor: TensorScale) -> torch.Tensor:
    return torch.where(block_scale == 0, 0.0, tensor.forward / block_scale)


def _exact_from_amax(amax: torch.Tensor, largest: float) -> TensorScale:
    scale = (amax / torch.full_like(amax, largest)).clamp(min=FLOAT_SMALLEST)  # where it rounds to 0 it still must be > 0
    return _as_given(torch.where(amax == 0, 1.0, scale))


def _compressed_tensors_from_amax(amax: torch.Tensor, largest: float) -> TensorScale:
    forward = reciprocal(amax.clamp(min=torch.finfo(amax.dtype).tiny)) * largest
    return _as_given(forward.nan_to_num(nan=1.0, posinf=1.0).float())


def _four_over_six_from_amax(amax: torch.Tensor, largest: float) -> TensorScale:
    return TensorScale(*_nvidia_from_amax(amax, largest)[:2], amax)


def _ratio_times_forward(amax: torch.Tensor, tensor: TensorScale, element_max: float) -> torch.Tensor:
    return amax / torch.full_like(amax, element_max) * tensor.forward


def _ratio_over_stored(amax: torch.Tensor, tensor: TensorScale, element_max: float) -> torch.Tensor:
    return amax / torch.full_like(amax, element_max) / tensor.stored


def _over_product(amax: torch.Tensor, tensor: TensorScale, element_max: float) -> torch.Tensor:
    return amax / (tensor.stored * element_max)


ENCODE_ORDERS: dict[str, EncodeOrder] = {
    "nvidia": EncodeOrder(_nvidia_from_amax, _nvidia_given, _nvidia_block_scale, _nvidia_multiplier),
    "vllm_torch": EncodeOrder(_vllm_from_amax, _as_given, _vllm_block_scale, _vllm_torch_multiplier),
    "vllm_triton": EncodeOrder(_vllm_from_amax, _as_given, _vllm_block_scale, _vllm_triton_multiplier),
    "exact": EncodeOrder(_exact_from_amax, _as_given, None, None),
    "compressed_tensors": EncodeOrder(
        _compressed_tensors_from_amax, _as_given, _ratio_times_forward, None, lambda x, s, t: x / (s / t.forward)
    ),
    "modelopt": EncodeOrder(_exact_from_amax, _as_given, _over_product, None, lambda x, s, t: x / (s * t.stored)),
    "torchao": EncodeOrder(
        _exact_from_amax, _as_given, _ratio_over_stored, None, lambda x, s, t: x * (reciprocal(t.stored) / s)
    ),
    "four_over_six": EncodeOrder(_four_over_six_from_amax, _nvidia_given, _ratio_times_forward, _nvidia_multiplier),
    "flashinfer": EncodeOrder(_vllm_from_amax, _as_given, _ratio_times_forward, None, lambda x, s, t: x * t.forward / s),
}

# What a decoded element is multiplied by, from the block scale and the stored tensor scale.
DECODE_ORDERS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "block_times_tensor": lambda block_scale, stored: block_scale * stored,
    "block_over_tensor": lambda block_scale, stored: block_scale / stored,
}


def encode_quotient(numerator: torch.Tensor, denominator: torch.Tensor, format: ElementFormat) -> torch.Tensor:
    """Int32 codes nearest to the exact quotient numerator / denominator, ties to the even code, saturating.

    `denominator` is float64 and not negative, 0 gives magnitude 0. Exact: the code is the number of midpoints m
    with numerator > m * denominator, and m * denominator needs at most 5 + 31 bits of float64's 53.
    """
    magnitude = numerator.abs().double()
    shape = torch.broadcast_shapes(numerator.shape, denominator.shape)
    codes = torch.zeros(shape, dtype=torch.int32, device=numerator.device)
    for lower_code, midpoint in enumerate(format.midpoints):
        threshold = midpoint * denominator
        codes += (magnitude >= threshold) if lower_code % 2 else (magnitude > threshold)
    codes.masked_fill_(denominator == 0, 0)
    if format.kind == "integer":
        return torch.where(numerator < 0, -codes, codes) & (format.code_count - 1)
    return codes | numerator.signbit().int() * format.sign_mask
