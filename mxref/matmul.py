"""Block-scaled matrix products, defined so that their bits can be reproduced anywhere.

The dot product of two blocks is exact, so nobody can tell in which order it was computed; the order
that does matter, of the float32 additions across blocks, is fixed: ascending K, one addition a block.

Why a block dot is exact: every finite element is an integer multiple of its format's quantum, at
most `largest_multiple` times it. Any partial sum of n products is then an integer of at most
n * largest_multiple(a) * largest_multiple(b) quanta; if that fits in a significand's p bits, every
partial sum is representable and no addition rounds, in any order, fused or not.
"""

from collections.abc import Callable, Iterable, Iterator
from math import ceil, log2

import torch

from mxref.blocks import BlockTensor, dequantize
from mxref.elements import canonical, check_codes, check_dtype, check_float, decode_codes, ldexp, reciprocal
from mxref.faults import FAULTS
from mxref.formats import FLOAT_MAX, ElementFormat, check_choice, check_type, element_format
from mxref.registry import op

SEMANTICS = ("blockwise", "dequantized")

_FLOAT32_BITS, _FLOAT64_BITS = 24, 53
_PRODUCTS_AT_ONCE = 1 << 18  # outputs of a block row that stay in cache while the blocks go by


def dot_bits(a: ElementFormat, b: ElementFormat, length: int) -> int:
    """Significand bits that an exact dot product of `length` elements of `a` and `b` can need.

    >>> e2m1 = element_format("e2m1")
    >>> dot_bits(e2m1, e2m1, 32), dot_bits(element_format("e5m2"), element_format("e5m2"), 32)
    (13, 69)
    """
    return ceil(log2(length * a.largest_multiple * b.largest_multiple))


@op
def block_dot(
    a_codes: torch.Tensor, b_codes: torch.Tensor, a_element: str | ElementFormat, b_element: str | ElementFormat
) -> torch.Tensor:
    """Dot products of one block of each of M rows with one block of each of N rows.

    `a_codes`: uint8 `[M, n]`, `b_codes`: uint8 `[N, n]`, element codes. Returns float32 `[M, N]`: the exact sums
    of products, rounded once to nearest even (for FP4, FP6 and INT8 in any pairing nothing is left to
    round). NaN and Inf elements follow IEEE 754. Raises ValueError for codes or shapes that do not fit, or
    formats so wide that no exact path is known. Source: OCP MX v1.0, 6.1 (Dot).

    >>> codes = torch.tensor([[7, 7, 1]], dtype=torch.uint8)
    >>> block_dot(codes, codes, "e2m1", "e2m1").item()
    72.25
    """
    a_element, b_element = element_format(a_element, "a_element"), element_format(b_element, "b_element")
    check_codes("a_codes", a_codes, a_element)
    check_codes("b_codes", b_codes, b_element)
    if a_codes.ndim != 2 or b_codes.ndim != 2 or a_codes.shape[1] != b_codes.shape[1]:
        raise ValueError(f"a_codes {list(a_codes.shape)} and b_codes {list(b_codes.shape)}: expected [M, n] and [N, n]")
    dot = _exact_dot(a_element, b_element, max(a_codes.shape[1], 1), a_codes.device)
    return canonical(dot(decode_codes(a_codes, a_element), decode_codes(b_codes, b_element)) + 0.0)  # a zero sum is +0


@op
def matmul(
    a: BlockTensor | torch.Tensor,
    b: BlockTensor,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    semantics: str = "blockwise",
) -> torch.Tensor:
    """C = A B^T of block-scaled operands, both blocked along K.

    `a`: BlockTensor `[..., M, K]`, or a float32, bfloat16 or float16 tensor (weight-only). `b`: BlockTensor
    `[N, K]`. `bias`: `[N]`, widened to float32. Returns `[..., M, N]` in `out_dtype`.

    `semantics="blockwise"`: from acc = +0, for each block j ascending, acc += dot_j * scale_a * scale_b, where
    dot_j is the exact block dot rounded once to float32 and scales with a mantissa multiply before powers
    of two; then alpha * acc with alpha the float32 product of the tensor scales (reciprocals of those stored to
    divide), then + bias, then one rounding to `out_dtype`. With different block sizes j runs over the
    smaller blocks.
    `"dequantized"` (and always for a plain `a`): both operands are decoded to `a`'s dtype (`out_dtype` where `a`
    is a BlockTensor), scales included; each block of `b` is a float64 chain of products in ascending order,
    rounded once to float32 and added to the float32 accumulator; then + bias and one rounding.
    All roundings are to nearest even; NaN comes out canonical.

    Raises TypeError for other types or dtypes; ValueError for shapes that do not fit, an axis other than the
    last, block sizes of which neither divides the other, or transforms that differ.
    Source: OCP MX v1.0, 6.1 and 6.2; order across blocks as in Transformer Engine's NVFP4 reference.

    >>> from mxref.blocks import quantize
    >>> a = quantize(torch.ones(1, 64), "mxfp4")
    >>> matmul(a, a).item()
    64.0
    """
    check_matmul(a, b, bias, out_dtype, semantics)
    if isinstance(a, BlockTensor) and semantics == "blockwise":
        acc = _blockwise(a, b)
    else:
        values = dequantize(a, out_dtype) if isinstance(a, BlockTensor) else a
        acc = _dequantized(values, dequantize(b, values.dtype), b.format.block_size)
    if bias is not None:
        acc = acc + bias.float()
    return canonical(acc.to(out_dtype))


def check_matmul(a, b, bias, out_dtype: torch.dtype, semantics: str) -> None:
    """Check the arguments of `matmul` before anything is computed."""
    check_choice("semantics", semantics, SEMANTICS)
    check_dtype("out_dtype", out_dtype)
    check_operand("b", b)
    if isinstance(a, BlockTensor):
        check_operand("a", a)
    else:
        check_float("a", a)
    if b.ndim != 2 or a.ndim < 2 or a.shape[-1] != b.shape[-1]:
        raise ValueError(f"a {list(a.shape)} and b {list(b.shape)}: expected [..., M, K] and [N, K] with the same K")
    if isinstance(a, BlockTensor):
        sizes = sorted((a.format.block_size, b.format.block_size))
        if sizes[1] % sizes[0]:
            raise ValueError(f"a has blocks of {a.format.block_size}, b of {b.format.block_size}: one must divide the other")
        if a.recipe.transform != b.recipe.transform:
            raise ValueError(f"a is transformed by {a.recipe.transform}, b by {b.recipe.transform}: they must be the same")
    if a.device != b.device:
        raise ValueError(f"a is on {a.device}, b on {b.device}: expected one device")
    check_bias("bias", bias, b)


def check_operand(argument: str, operand: BlockTensor) -> None:
    """Raise unless `operand` is a BlockTensor blocked along its last axis."""
    check_type(argument, operand, BlockTensor)
    if operand.axis != -1:
        raise ValueError(f"{argument} is blocked along axis {operand.axis}: expected the last, along which the product sums")
    if any(FAULTS[name].point == "factor" for name in operand.recipe.faults):
        raise ValueError(f"{argument} has recipe {operand.recipe.name!r}, whose scales do not mean what their format says")


def check_bias(argument: str, bias: torch.Tensor | None, weight: BlockTensor) -> None:
    """Raise unless `bias` is None or has one value for each row of `weight`."""
    if bias is not None:
        check_float(argument, bias)
        if bias.shape != weight.shape[:-1]:
            expected = f"{'[E, N]' if weight.ndim == 3 else '[N]'} = {list(weight.shape[:-1])}"
            raise ValueError(f"{argument} has shape {list(bias.shape)}: expected {expected}")


# ---- blockwise ------------------------------------------------------------------------------------------------------


def _blockwise(a: BlockTensor, b: BlockTensor) -> torch.Tensor:
    block = min(a.format.block_size, b.format.block_size)
    blocks = ceil(a.shape[-1] / block)
    dot = _exact_dot(a.format.element, b.format.element, block, a.device)
    a_codes, b_values = a.codes.flatten(0, -2), decode_codes(b.codes, b.format.element)
    a_scales = _scale_of_each_block(a, block, blocks).flatten(0, -2)
    b_scales = _scale_of_each_block(b, block, blocks)

    def terms(rows: slice) -> Iterator[torch.Tensor]:
        a_values = decode_codes(a_codes[rows], a.format.element)
        for j in range(blocks):
            k = slice(j * block, (j + 1) * block)
            yield _apply_scales(dot(a_values[:, k], b_values[:, k]), a, b, a_scales[rows, j], b_scales[:, j])

    acc = _add_blocks(terms, a_codes, b_values).reshape(*a.shape[:-1], b.shape[0])
    return _tensor_factor(a) * _tensor_factor(b).flatten() * acc


def _add_blocks(terms: Callable[[slice], Iterable[torch.Tensor]], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Float32 `[M, N]`: from +0, the terms of each run of rows of `a`, one a block, added in ascending order."""
    acc = torch.zeros(len(a), len(b), dtype=torch.float32, device=a.device)
    step = max(1, _PRODUCTS_AT_ONCE // max(1, len(b)))
    for start in range(0, len(a), step):
        part = slice(start, start + step)
        for term in terms(part):
            acc[part] += term
    return acc


def _scale_of_each_block(q: BlockTensor, block: int, blocks: int) -> torch.Tensor:
    """Scale codes `[..., M, blocks]`, one for each row and each run of `block` elements."""
    scales = q.scales
    if q.recipe.block_rows > 1:
        scales = scales.repeat_interleave(q.recipe.block_rows, dim=-2)[..., : q.shape[-2], :]
    return scales.repeat_interleave(q.format.block_size // block, dim=-1)[..., :blocks]


def _apply_scales(
    product: torch.Tensor, a: BlockTensor, b: BlockTensor, a_scale: torch.Tensor, b_scale: torch.Tensor
) -> torch.Tensor:
    """product `[M, N]` times both scales: those with a mantissa first, then the power of two, in two exact halves."""
    exponents = []
    for codes, format in ((a_scale[:, None], a.format.scale), (b_scale, b.format.scale)):
        if not format.is_power_of_two:
            product = product * decode_codes(codes, format)
            continue
        exponents.append(codes.int() - format.bias)
        nan = codes == format.nan_code
        if nan.any():
            product = product.masked_fill(nan, torch.nan)
    return ldexp(product, sum(exponents)) if exponents else product


def _tensor_factor(q: BlockTensor) -> torch.Tensor:
    """What a decoded tensor is multiplied by, float32, 0-d or `[..., M, 1]`; 1 where it has no tensor scale."""
    if q.tensor_scale is None:
        return torch.ones((), dtype=torch.float32, device=q.device)
    return reciprocal(q.tensor_scale) if q.recipe.tensor_scale_direction == "divide" else q.tensor_scale


def _exact_dot(a: ElementFormat, b: ElementFormat, length: int, device: torch.device):
    """The function of decoded values `[M, n]`, `[N, n]` that gives their exact dots, rounded once to float32."""
    bits = dot_bits(a, b, length)
    in_range = a.quantum * b.quantum >= 2.0**-149 and length * a.max * b.max <= FLOAT_MAX  # of float32's exponents
    if bits <= _FLOAT32_BITS and in_range:
        return lambda x, y: x @ y.T
    if device.type == "mps":
        raise ValueError(f"device 'mps' has no float64, which an exact {a.name} x {b.name} product needs: use 'cpu'")
    if bits <= _FLOAT64_BITS:
        return lambda x, y: (x.double() @ y.double().T).float()
    bits = max(half_bits(a, b, length))
    if bits > _FLOAT64_BITS:
        raise ValueError(f"{a.name} x {b.name}: an exact dot of {length} elements needs {bits} bits even when split at 1")
    return _split_dot


def half_bits(a: ElementFormat, b: ElementFormat, length: int) -> tuple[int, int, int]:
    """Bits of the high x high, mixed and low x low sums when both formats are split at |x| = 1."""
    a_high, b_high = 2.0**-a.mantissa_bits, 2.0**-b.mantissa_bits  # quanta of the values from 1 on
    sums = (
        (a.max * b.max, a_high * b_high),
        (a.max + b.max, min(a_high * b.quantum, a.quantum * b_high)),
        (1.0, a.quantum * b.quantum),
    )
    return tuple(ceil(log2(length * largest / quantum)) for largest, quantum in sums)


def _split_dot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Exact dots of formats whose range exceeds float64's significand, rounded once to float32.

    Split at |x| = 1, the high x high, mixed and low x low sums are each exact in float64. They are added with
    round-to-odd, which keeps the information that the last rounding, to float32, needs.
    """
    x, y = x.double(), y.double()
    whole = x @ y.T  # rounded, but it knows NaN and Inf
    x, y = x.masked_fill(~x.isfinite(), 0.0), y.masked_fill(~y.isfinite(), 0.0)
    x_high, y_high = x.masked_fill(x.abs() < 1, 0.0), y.masked_fill(y.abs() < 1, 0.0)
    x_low, y_low = x - x_high, y - y_high
    mixed = x_high @ y_low.T + x_low @ y_high.T
    total = _add_to_odd(_add_to_odd(x_high @ y_high.T, mixed), x_low @ y_low.T)
    return torch.where(whole.isfinite(), total, whole).float()


def _add_to_odd(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a + b in float64, rounded to odd: an inexact sum becomes the neighbour whose last bit is 1."""
    total = a + b
    b_part = total - a
    error = (a - (total - b_part)) + (b - b_part)
    bits = total.view(torch.int64)
    # towards the exact sum by one where the rounded one is even and not exact
    step = torch.where((error > 0) == (total > 0), 1, -1)
    odd = torch.where((error != 0) & (bits & 1 == 0), bits + step, bits)
    return odd.view(torch.float64)


# ---- dequantized ----------------------------------------------------------------------------------------------------


def _dequantized(a: torch.Tensor, b: torch.Tensor, block: int) -> torch.Tensor:
    if a.device.type == "mps":
        raise ValueError("device 'mps' has no float64, which the dequantized product is defined in: use 'cpu'")
    rows, b = a.flatten(0, -2), b.double()

    def terms(part: slice) -> Iterator[torch.Tensor]:
        values = rows[part].double()
        for k in range(0, rows.shape[1], block):
            yield _chain_dot(values[:, k : k + block], b[:, k : k + block]).float()

    return _add_blocks(terms, rows, b).reshape(*a.shape[:-1], b.shape[0])


def _chain_dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Float64 `[M, N]`: from +0, the products a[:, i] b[:, i] added in ascending i.

    Where no order can round, as nearly always, a matrix product computes it.
    """
    if _spread(a) + _spread(b) + ceil(log2(max(a.shape[1], 1))) <= _FLOAT64_BITS:
        return a @ b.T
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64, device=a.device)
    for i in range(a.shape[1]):
        total = total + a[:, i : i + 1] * b[:, i]
    return total


def _spread(x: torch.Tensor) -> int:
    """Bits such that every entry of a row of `x` is an integer of that many bits times one power of two.

    Infinitely many where an entry is not finite. The entries are float32 numbers, of at most 24 bits.
    """
    if not x.numel():
        return 0
    if not x.isfinite().all():
        return 1 << 30
    mantissa, exponent = torch.frexp(x.abs())
    lowest_bit = (mantissa * 2.0**_FLOAT32_BITS).long()
    lowest_bit = torch.frexp((lowest_bit & -lowest_bit).double())[1] - 1 - _FLOAT32_BITS + exponent
    nonzero = x != 0
    top = torch.where(nonzero, exponent, -(1 << 20)).amax(-1)
    bottom = torch.where(nonzero, lowest_bit, 1 << 20).amin(-1)
    return max(int((top - bottom).max()), 0)
