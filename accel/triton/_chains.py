"""The kernels of products with decoded weights: weight-only, and `semantics="dequantized"`.

What they must give: within a block of weights a chain of float64 products, added from +0 in ascending K, rounded once to
float32, and these added in float32 in ascending K. Weights are what `dequantize` gives in the rows' dtype.

**Why a fused multiply-add gives the chain's bits.** Weights and rows are float32 numbers, of 24 bits at most: a product
needs 48 of float64's 53 bits, and lies between 2^-298 and 2^256. So it is exact, and a fused multiply-add rounds where the
addition rounds, and only there.

**Rows** are stored times 2^896, in float64, `GROUP` blocks `[SIZE, GROUP]` at a time: the i-th elements of all lie side by
side, as threads read them that have a block each. The largest is below 2^1024.

**Weights** become float64 in one of three ways, times 2^-896 for the first two:

* `plain`: by a conversion, and a product with 2^-896, which is exact: the result is a multiple of 2^-1045.
* `shifted`: their float32 fields are put in float64's fields, three bits lower. The exponent of the same field is 896 lower
  there; subnormals become subnormals, which float64's arithmetic keeps. Inf and NaN would become numbers. What
  puts a code's exponent right is multiplied with its block's factor: the product is the same number, rounded the same.
* `powers`: where the scale is a power of two and no weight is rounded, the code's fields are put in float64's: the element
  times 2^(bias - 1023). The chain is then one of elements, and a power of two makes up for it at the end: it commutes with
  every rounding, because nothing comes near the ends of float64's range.

The latter two are right where all scales of a tile are in a known range. If not, the tile is computed again, plainly.
"""

import triton
import triton.language as tl

from accel.triton._activations import load_row
from accel.triton._blocks import combined
from accel.triton._tiles import (
    INF,
    MAGNITUDE,
    bits_of,
    decode_magnitude,
    decode_power,
    decode_top,
    narrow,
    narrow_or_nan,
    widen,
)

ROWS_SHIFT, WEIGHTS_SHIFT = tl.constexpr(2.0**896), tl.constexpr(2.0**-896)  # the difference of the formats' biases
FIELDS = tl.constexpr(-0x70000001)  # of a sign, and of what lies below float32's and float64's common exponent bits


@triton.jit
def chain_rows_kernel(
    x_ptr, out_ptr, alpha, limit, x_row, out_row, k_size, SIZE: tl.constexpr, GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """`GROUP` blocks of a row, or of the activation of its gates and ups, as the products read them."""
    row = tl.program_id(0).to(tl.int64)
    block, unit = tl.arange(0, GROUP), tl.arange(0, SIZE)
    k = (tl.program_id(1) * GROUP + block)[None, :] * SIZE + unit[:, None]
    present = k < k_size
    start = x_ptr + row * x_row
    x = load_row(start, k, present, k_size, None, alpha, limit, ACTIVATION, GATED, INTERLEAVED, STORED)
    if ACTIVATION != "none":
        x = tl.where(present, x, 0.0)
    start = out_ptr + row * out_row + tl.program_id(1) * (SIZE * GROUP)
    tl.store(start + unit[:, None] * GROUP + block[None, :], x.to(tl.float64) * ROWS_SHIFT)


@triton.jit
def load_unit(pointer, unit: tl.constexpr, inside, full, BITS: tl.constexpr, TAIL: tl.constexpr):
    """The `unit`-th codes of each block, as many as `pointer` is to; of six bits four, in three bytes. `inside`: which
    blocks there are; `full`: which have more than `TAIL` codes."""
    if BITS == 6:
        end: tl.constexpr = (TAIL * BITS + 7) // 8
        low = tl.load(pointer + 3 * unit, mask=inside if 3 * unit < end else full, other=0).to(tl.int32)
        middle = tl.load(pointer + 3 * unit + 1, mask=inside if 3 * unit + 1 < end else full, other=0).to(tl.int32)
        high = tl.load(pointer + 3 * unit + 2, mask=inside if 3 * unit + 2 < end else full, other=0).to(tl.int32)
        return low | (middle << 8) | (high << 16)
    else:
        codes: tl.constexpr = pointer.dtype.element_ty.primitive_bitwidth // BITS
        return tl.load(pointer + unit, mask=inside if unit * codes < TAIL else full, other=0)


@triton.jit
def code_at_top(unit, code: tl.constexpr, BITS: tl.constexpr):
    """Code number `code` of a unit, in the top bits of int32 words; what lies below means nothing."""
    first: tl.constexpr = BITS * code
    word = (unit >> (first & 32)).to(tl.int32)
    return word << (32 - BITS - (first & 31))


@triton.jit
def from_fields(bits, WHOLE: tl.constexpr):
    """Float64 numbers with the fields of float32 bits: times 2^-896. `WHOLE`: with the last bits, of no 16-bit number."""
    wide = ((bits >> 3) & FIELDS).to(tl.int64) << 32
    if WHOLE:
        wide = wide | ((bits.to(tl.int64) << 29) & 0xFFFFFFFF)
    return wide.to(tl.float64, bitcast=True)


@triton.jit
def chain_weight(
    word, factor, HOW: tl.constexpr, D: tl.constexpr, ROUNDS: tl.constexpr, MANTISSA: tl.constexpr, MAX: tl.constexpr,
    MAX_CODE: tl.constexpr, SIGN_SHIFT: tl.constexpr, INTEGER: tl.constexpr, UNBIAS: tl.constexpr, INF_CODE: tl.constexpr,
):  # fmt: skip
    """Float64 weights of codes at the top of int32 words, scaled as `HOW` says. `D`: what they are rounded to."""
    if HOW == "powers":
        kept: tl.constexpr = -(1 << 31) | (((1 << (31 - SIGN_SHIFT)) - 1) << (20 - MANTISSA))
        fields = (word >> (SIGN_SHIFT - 20 + MANTISSA)) & kept
        return (fields.to(tl.int64) << 32).to(tl.float64, bitcast=True)
    else:
        UNIT: tl.constexpr = 1.0 if HOW == "shifted" and not INTEGER else UNBIAS
        value, nan = decode_top(word, MANTISSA, MAX / UNBIAS * UNIT, MAX_CODE, SIGN_SHIFT, INTEGER, UNIT, INF_CODE)
        value = value * factor
        if not INTEGER and MAX_CODE < (1 << (31 - SIGN_SHIFT)) - 1:
            value = tl.where(nan, float("nan"), value)
        if ROUNDS:
            value = widen(narrow_or_nan(value, D))
        if HOW == "shifted":
            return from_fields(bits_of(value), D == tl.float32)
        else:
            return value.to(tl.float64) * WEIGHTS_SHIFT


@triton.jit
def chain_sums(
    row_ptrs, scale_ptrs, stored, x_ptr, x_places, block_of, k_blocks,
    HOW: tl.constexpr, D: tl.constexpr, ROUNDS: tl.constexpr, BN: tl.constexpr, RN: tl.constexpr, BM: tl.constexpr,
    NB: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, W_STORED: tl.constexpr, LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr, BIAS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, SCALE_NAN: tl.constexpr, SCALE_MANTISSA: tl.constexpr, SCALE_UNBIAS: tl.constexpr,
    BITS: tl.constexpr, MANTISSA: tl.constexpr, MAX: tl.constexpr, MAX_CODE: tl.constexpr, SIGN_SHIFT: tl.constexpr,
    INTEGER: tl.constexpr, UNBIAS: tl.constexpr, INF_CODE: tl.constexpr, EVEN: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """`RN` times `BM` float32 tensors `[BN]`: from +0, the chains of all blocks of rows of weights with one of x, rounded to
    float32 and added in ascending K. And int1 `[BN * NB]`: whether `HOW` was right for the scales that were met.

    `TAIL`: elements of a row's last block. Behind them rows are 0, and so are weights, whatever their block's scale."""
    UNIT: tl.constexpr = 24 if BITS == 6 else row_ptrs[0].dtype.element_ty.primitive_bitwidth
    STEP: tl.constexpr = 3 if BITS == 6 else 1  # bytes to a unit of six-bit codes
    sums = ()
    for _ in tl.static_range(RN * BM):
        sums = sums + (tl.zeros((BN,), tl.float32),)
    fits = tl.full((BN * NB,), True, tl.int1)
    for first in range(0, k_blocks, NB):
        block = first + block_of
        inside = (block < k_blocks) | EVEN
        full = inside & (block < k_blocks - 1) if TAIL < SIZE else inside
        x_place = x_ptr + (first // GROUP * (SIZE * GROUP) + first % GROUP) + block_of
        scales, factors, units = (), (), ()
        for r in tl.static_range(RN):
            scale = tl.load(scale_ptrs[r] + block, mask=inside, other=127 if POWER_OF_TWO else 0).to(tl.int32)
            if POWER_OF_TWO:
                factor = decode_power(scale)
            else:
                factor = decode_magnitude(scale, SCALE_MANTISSA, False, SCALE_UNBIAS)
                factor = tl.where(scale == SCALE_NAN, float("nan"), factor)
            if W_STORED != "none":
                factor = combined(factor, stored[r], W_STORED == "divide")
            if HOW == "powers":
                fits = fits & (scale >= LOWEST) & (scale <= HIGHEST)
            elif HOW == "shifted":
                if INTEGER:
                    largest = factor * (2 * MAX)  # more than any weight
                else:
                    factor = factor * UNBIAS  # Inf where weights would be numbers: these are computed again
                    largest = factor * (2 * MAX / UNBIAS)
                largest = widen(narrow_or_nan(largest, D))
                fits = fits & ((bits_of(largest) & MAGNITUDE) < INF)
            scales, factors = scales + (scale,), factors + (factor,)
            units = units + (row_ptrs[r] + block.to(tl.int64) * (SIZE * BITS // UNIT * STEP),)
        chains = ()
        for _ in tl.static_range(RN * BM):
            chains = chains + (tl.zeros((BN * NB,), tl.float64),)
        for u in tl.static_range(SIZE * BITS // UNIT):
            loaded = ()
            for r in tl.static_range(RN):
                loaded = loaded + (load_unit(units[r], u, inside, full, BITS, TAIL),)
            for c in tl.static_range(UNIT // BITS):
                xs, longer = (), ()
                for m in tl.static_range(BM):
                    xs = xs + (tl.load(x_place + x_places[m] + (u * (UNIT // BITS) + c) * GROUP),)
                for r in tl.static_range(RN):
                    weight = chain_weight(
                        code_at_top(loaded[r], c, BITS), factors[r], HOW, D, ROUNDS, MANTISSA, MAX, MAX_CODE, SIGN_SHIFT,
                        INTEGER, UNBIAS, INF_CODE,
                    )  # fmt: skip
                    if u * (UNIT // BITS) + c >= TAIL:
                        weight = tl.where(full, weight, 0.0)
                    for m in tl.static_range(BM):
                        longer = longer + (tl.fma(weight, xs[m], chains[r * BM + m]),)
                chains = longer
        added = ()
        for r in tl.static_range(RN):
            for m in tl.static_range(BM):
                chain = chains[r * BM + m]
                if HOW == "powers":
                    chain = chain * ((scales[r] + (1023 - BIAS)).to(tl.int64) << 52).to(tl.float64, bitcast=True)
                added = added + (add_blocks(sums[r * BM + m], chain.to(tl.float32), BN, NB),)
        sums = added
    return sums, fits


@triton.jit
def add_blocks(total, dots, BN: tl.constexpr, NB: tl.constexpr):
    """total `[BN]` + dots `[BN * NB]`, a row's blocks one after the other: each sum is of one number and zeros."""
    dots = tl.reshape(dots, (BN, NB))
    for b in tl.static_range(NB):
        total += tl.sum(tl.where((tl.arange(0, NB) == b)[None, :], dots, 0.0), axis=1)
    return total


@triton.jit(do_not_specialize=["one"])
def chain_product_kernel(
    x_ptr, w_ptr, w_scales_ptr, w_stored_ptr, bias_ptr, out_ptr, ids_ptr, router_ptr, order_ptr, tiles_ptr,
    slots, experts, n_size, k_blocks, x_row, w_expert, w_row, scales_expert, scales_row, stored_expert,
    stored_row, bias_expert, bias_row, one,
    PLACES: tl.constexpr, X_OF_SLOTS: tl.constexpr, SCALE_ROWS: tl.constexpr, W_STORED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ROUTER: tl.constexpr, ROUNDED: tl.constexpr, STORED: tl.constexpr,
    HOW: tl.constexpr, D: tl.constexpr, ROUNDS: tl.constexpr, BN: tl.constexpr, RN: tl.constexpr, BM: tl.constexpr,
    NB: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr,
    BIAS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, SCALE_NAN: tl.constexpr, SCALE_MANTISSA: tl.constexpr, SCALE_UNBIAS: tl.constexpr,
    BITS: tl.constexpr, MANTISSA: tl.constexpr, MAX: tl.constexpr, MAX_CODE: tl.constexpr, SIGN_SHIFT: tl.constexpr,
    INTEGER: tl.constexpr, UNBIAS: tl.constexpr, INF_CODE: tl.constexpr, EVEN: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """`RN` times `BN` rows of one expert's weights, `NB` of their blocks at a time, with rows of `BM` of its slots:
    out[slot, n].

    `PLACES`: what the programs along the second axis count. "rows": `BM` rows of x, all with the same weights. "slots":
    slots, each alone. "tiles": tiles of slots, as `tiles_ptr` and `order_ptr` say. A slot has row slot // `X_OF_SLOTS` of x.
    `one`: 1, so that the compiler does not see which blocks lie side by side: then each thread has one at a time.
    """
    first_n = tl.program_id(0) * (RN * BN)
    place = tl.program_id(1)
    start, count, expert = place * BM, tl.minimum(slots - place * BM, BM), 0
    if PLACES == "slots":
        expert = tl.load(ids_ptr + place).to(tl.int32)
        count = ((expert >= 0) & (expert < experts)).to(tl.int32)
    elif PLACES == "tiles":
        expert = tl.load(tiles_ptr + 3 * place)
        start = tl.load(tiles_ptr + 3 * place + 1)
        count = tl.load(tiles_ptr + 3 * place + 2)
    if count > 0:
        slot_of, x_places = (), ()
        for m in tl.static_range(BM):
            slot = start + tl.minimum(m, count - 1)  # beyond the last, the last again
            if PLACES == "tiles":
                slot = tl.load(order_ptr + slot)
            slot_of = slot_of + (slot,)
            x_places = x_places + ((slot // X_OF_SLOTS).to(tl.int64) * x_row,)
        e = tl.zeros((), tl.int64) + expert
        item = tl.arange(0, BN * NB)
        block_of = item % NB * one
        row_ptrs, scale_ptrs, stored = (), (), ()
        for r in tl.static_range(RN):
            row = tl.minimum(first_n + r * BN + item // NB, n_size - 1).to(tl.int64)
            row_ptrs = row_ptrs + (w_ptr + (e * w_expert + row * w_row),)
            scale_ptrs = scale_ptrs + (w_scales_ptr + (e * scales_expert + row // SCALE_ROWS * scales_row),)
            stored = stored + (tl.load(w_stored_ptr + e * stored_expert + row * stored_row) if W_STORED != "none" else 1.0,)
        sums, fits = chain_sums(
            row_ptrs, scale_ptrs, stored, x_ptr, x_places, block_of, k_blocks, HOW, D, ROUNDS, BN, RN, BM, NB, SIZE, GROUP,
            W_STORED, LOWEST, HIGHEST, BIAS, POWER_OF_TWO, SCALE_NAN, SCALE_MANTISSA, SCALE_UNBIAS, BITS, MANTISSA, MAX,
            MAX_CODE, SIGN_SHIFT, INTEGER, UNBIAS, INF_CODE, EVEN, TAIL,
        )  # fmt: skip
        if HOW != "plain":
            if tl.min(fits.to(tl.int32), axis=0) == 0:
                sums, fits = chain_sums(
                    row_ptrs, scale_ptrs, stored, x_ptr, x_places, block_of, k_blocks, "plain", D, True, BN, RN, BM, NB,
                    SIZE, GROUP, W_STORED, LOWEST, HIGHEST, BIAS, POWER_OF_TWO, SCALE_NAN, SCALE_MANTISSA, SCALE_UNBIAS,
                    BITS, MANTISSA, MAX, MAX_CODE, SIGN_SHIFT, INTEGER, UNBIAS, INF_CODE, EVEN, TAIL,
                )  # fmt: skip
        for r in tl.static_range(RN):
            n = first_n + r * BN + tl.arange(0, BN)
            for m in tl.static_range(BM):
                value = sums[r * BM + m]
                if HAS_BIAS:
                    bias = tl.load(bias_ptr + e * bias_expert + n.to(tl.int64) * bias_row, mask=n < n_size, other=0)
                    value = value + widen(bias)
                if HAS_ROUTER:
                    value = widen(narrow(value, tl.float32)) * tl.load(router_ptr + slot_of[m])
                    value = widen(narrow(value, ROUNDED))
                out = out_ptr + slot_of[m].to(tl.int64) * n_size + n
                tl.store(out, narrow(value, STORED), mask=(n < n_size) & (m < count))
