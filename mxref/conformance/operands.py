"""Operands of products and expert layers that need every bit: ties across a split, every pair of scales, extremes."""

from itertools import product

import torch

from mxref.blocks import BlockTensor
from mxref.elements import encode
from mxref.formats import BlockFormat
from mxref.recipes import RECIPES


def of_values(values: torch.Tensor, block: BlockFormat, scales: torch.Tensor | None = None) -> BlockTensor:
    """Codes of float32 values that the element format holds, under scale codes (None: of the scale 1)."""
    if scales is None:
        shape = *values.shape[:-1], -(-values.shape[-1] // block.block_size)
        scales = torch.full(shape, block.scale.positive.index(1.0), dtype=torch.uint8)
    return BlockTensor.from_codes(encode(values, block.element), scales, None, block, RECIPES[block.default_recipe])


def one_block_a_scale(block: BlockFormat, length: int, seed: int, near: bool = False) -> BlockTensor:
    """Rows of one block of random finite elements, the largest first, under every scale code, NaN too, then zeros up to
    `length`: a product of two such operands sees every pair of scales alone. `near`: under scales within 2^40 of 1, three
    rows each, no NaN."""
    codes = [code for code in range(256) if not code & block.scale.sign_mask]
    if near:
        codes = 3 * [code for code in codes if 2.0**-40 <= block.scale.values[code] <= 2.0**40]
    finite = torch.tensor([value for value in block.element.values if abs(value) <= block.element.max])
    generator = torch.Generator().manual_seed(seed)
    values = torch.zeros(len(codes), length)
    values[:, : block.block_size] = finite[torch.randint(len(finite), (len(codes), block.block_size), generator=generator)]
    values[:, 0] = block.element.max
    scales = torch.full((len(codes), length // block.block_size), block.scale.positive.index(1.0), dtype=torch.uint8)
    scales[:, 0] = torch.tensor(codes, dtype=torch.uint8)
    return of_values(values, block, scales)


def through_a_layer(values: torch.Tensor, w2: BlockTensor) -> tuple[torch.Tensor, BlockTensor, BlockTensor]:
    """(x, w13, w2) of one expert, with which the second product of a silu layer is that of 64 times the rows `values`
    `[T, I]` and of `w2` `[N, I]`, whose rows are repeated to as many as x has columns.

    Every row of w13 picks one element of x: a gate a 64, whose sigmoid is 1 in float32, an up its own.
    """
    tokens, width = values.shape
    place = -(-width // 32) * 32  # a block of its own
    columns = max(place + 32, len(w2.packed))
    x, w13 = torch.zeros(tokens, columns), torch.zeros(1, 2 * width, columns)
    x[:, :width], x[:, place], x[:, place + 1] = values, 64.0, 96.0  # every format holds 64 beside 96
    w13[0, :width, place] = 1.0
    w13[0, width:, :width] = torch.eye(width)
    w2 = w2[torch.arange(columns) % len(w2.packed)]
    w2 = BlockTensor.from_codes(w2.codes[None], w2.scales[None], None, w2.format, w2.recipe)
    return x, of_values(w13, w2.format), w2


def ties(a: BlockFormat, b: BlockFormat) -> tuple[BlockTensor, BlockTensor]:
    """Rows of one block; the exact dot of row i with row i lies at a tie between two float32 numbers, or beside it on the
    side that only the smallest products tell: of two smallest elements, or of a smallest and one from 1 on. A large sum
    of 11 products stands before them, so that a float64 sum would lose them. For elements that hold 1.75.

    With both elements split at 1, the first need the sum of low x low products, the others the mixed one.
    """
    (x_top, y_top), (x, y) = (2.0**a.element.emax, 2.0**b.element.emax), (a.element, b.element)
    large = [(1.75, 1.75)] * 8 + [(1.75, 1.5)] * 2 + [(1.5, 1.5)]  # 32
    large = [(p * x_top, q * y_top) for p, q in large]
    half = 2.0**4 * x_top * y_top * 2.0**-23  # of the last place of their sum in float32
    x_above, y_above = 1 + 2.0**-x.mantissa_bits, 1 + 2.0**-y.mantissa_bits
    smallest = (
        [(x.quantum, y.quantum)],
        [(x_above, y.quantum), (-1.0, y.quantum)],
        [(x.quantum, y_above), (x.quantum, -1.0)],
    )
    rows = []
    for terms, side, odd, sign in product(smallest, (1, 0, -1), (0, 1), (1, -1)):
        terms = [*large, (half, 1.0), (odd * 2 * half, 1.0), *[(p, side * q) for p, q in terms]]
        rows.append([(sign * p, q) for p, q in terms] + [(0.0, 0.0)] * (a.block_size - len(terms)))
    values = torch.tensor(rows)
    return of_values(values[..., 0], a), of_values(values[..., 1], b)
