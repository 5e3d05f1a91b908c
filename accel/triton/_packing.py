"""Device functions: codes from and to their packed form, bytes or, where a block fills whole words, int32 words."""

import triton
import triton.language as tl

from accel.triton._places import exists, places


@triton.jit
def joined(code, sign, COUNT: tl.constexpr, PER: tl.constexpr, BITS: tl.constexpr):
    """Each `PER` of `COUNT` codes in a row as one int32, the first lowest: their magnitudes and their signs."""
    shape: tl.constexpr = (code.shape[0], COUNT // PER, PER)
    shift = BITS * tl.arange(0, PER)[None, None, :]
    codes = tl.sum(tl.reshape(code, shape) << shift, axis=2)
    return codes + tl.sum(tl.reshape(sign, shape) << (shift + (BITS - 1)), axis=2)  # two sums: fewer instructions


@triton.jit
def unless(poisoned, units, COUNT: tl.constexpr):
    """Integers that hold the `COUNT` codes of each block, 0 in poisoned blocks: a flag for each code becomes one for each
    integer, so that none moves to another thread."""
    shape: tl.constexpr = (units.shape[0], units.shape[1], COUNT // units.shape[1])
    flags = tl.reshape(tl.broadcast_to(poisoned.to(tl.int32)[:, None], (units.shape[0], COUNT)), shape)
    return tl.where(tl.max(flags, axis=2) != 0, 0, units)


@triton.jit
def spread(units, COUNT: tl.constexpr, PER: tl.constexpr, BITS: tl.constexpr):
    """`PER` codes out of each int32, the first lowest: `COUNT` in a row, each at the top of its own int32."""
    shift = 32 - BITS - BITS * tl.arange(0, PER)[None, None, :]
    return tl.reshape(units[:, :, None] << shift, (units.shape[0], COUNT))


@triton.jit
def store_units(
    pointer, units, poisoned, block, blocks, k_blocks, row_blocks, k_size, rows, stride_matrix, stride_k, stride_row,
    FIRST: tl.constexpr, STEP: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
    WHOLE: tl.constexpr, RUN: tl.constexpr, ROWS_FIRST: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """`PAIRS`: words are stored two by two, as many as a thread has in a row. `poisoned`: which blocks are to be zeros, or
    None."""
    if PAIRS and pointer.dtype.element_ty == tl.int32 and SIZE > 2:
        pairs: tl.constexpr = BLOCKS * SIZE // 2
        poisoned = tl.reshape(tl.broadcast_to(poisoned[:, None], (BLOCKS, SIZE // 2)), (pairs,))
        block = tl.reshape(tl.broadcast_to(block[:, None], (BLOCKS, SIZE // 2)), (pairs,))
        units = tl.reshape(units, (pairs, 2))
        offsets = (
            tl.program_id(0).to(tl.int64) * (BLOCKS * SIZE) + tl.arange(0, pairs)[:, None] * 2 + tl.arange(0, 2)[None, :]
        )
        present = exists(block, blocks)[:, None]
    else:
        offsets, present = places(
        block, blocks, k_blocks, row_blocks, k_size, rows, stride_matrix, stride_k, stride_row, FIRST, STEP,
        BLOCKS, ROWS, SIZE, WHOLE, RUN, ROWS_FIRST,
    )  # fmt: skip
    stored = units.to(pointer.dtype.element_ty)
    if poisoned is None:
        if STEP > 1:  # a compiler that sees no run of memory lays neighbouring threads along the first axis
            offsets, stored, present = tl.trans(offsets), tl.trans(stored), tl.trans(tl.broadcast_to(present, stored.shape))
        tl.store(pointer + offsets, stored, mask=present)
    elif pointer.dtype.element_ty == tl.int32:
        tl.store(pointer + offsets, tl.where(poisoned[:, None], 0, stored), mask=present)
    else:  # bytes are too many to look at each
        tl.store(pointer + offsets, stored, mask=present & (poisoned == 0)[:, None])
        tl.store(pointer + offsets, tl.zeros((), stored.dtype), mask=present & poisoned[:, None])


@triton.jit
def load_units(
    pointer, block, blocks, k_blocks, row_blocks, k_size, rows, stride_matrix, stride_k, stride_row,
    FIRST: tl.constexpr, STEP: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
    WHOLE: tl.constexpr, RUN: tl.constexpr, ROWS_FIRST: tl.constexpr,
):  # fmt: skip
    offsets, present = places(
        block, blocks, k_blocks, row_blocks, k_size, rows, stride_matrix, stride_k, stride_row, FIRST, STEP,
        BLOCKS, ROWS, SIZE, WHOLE, RUN, ROWS_FIRST,
    )  # fmt: skip
    return tl.load(pointer + offsets, mask=present, other=0).to(tl.int32)


@triton.jit
def store_sixes(pointer, low, middle, high, poisoned, block, blocks, BLOCKS: tl.constexpr, SIXES: tl.constexpr):
    """Store threes of words of blocks that are one run of memory: two threes together, pair by pair of words, so that
    neighbouring threads store neighbouring pairs."""
    shape: tl.constexpr = (BLOCKS, SIXES, 2)
    first_low, second_low = tl.split(tl.reshape(low, shape))
    first_middle, second_middle = tl.split(tl.reshape(middle, shape))
    first_high, second_high = tl.split(tl.reshape(high, shape))
    first, third = tl.join(first_low, first_middle), tl.join(second_middle, second_high)
    second = tl.join(first_high, second_low)
    pairs = tl.permute(tl.join(tl.join(first, third), tl.join(second, second)), (0, 1, 3, 4, 2))  # the last is no pair
    pair, word = tl.arange(0, 4)[None, None, :, None], tl.arange(0, 2)[None, None, None, :]
    six = tl.arange(0, BLOCKS)[:, None, None, None] * SIXES + tl.arange(0, SIXES)[None, :, None, None]
    start = tl.program_id(0).to(tl.int64) * (BLOCKS * SIXES * 6)
    present = exists(block, blocks)[:, None, None, None] & (pair < 3)
    pairs = tl.where(poisoned[:, None, None, None], 0, tl.reshape(pairs, (BLOCKS, SIXES, 4, 2)))
    tl.store(pointer + (start + six * 6 + pair * 2 + word), pairs, mask=present)


@triton.jit
def store_codes(
    pointer, code, sign, poisoned, block, blocks, k_blocks, row_blocks, k_size, rows, stride_matrix, stride_k, stride_row,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr, RUN: tl.constexpr,
    ROWS_FIRST: tl.constexpr, PER_THREAD: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Pack codes along K, first code lowest, and store them as bytes, or as the wider integers that `pointer` is to; zeros
    in poisoned blocks. `k_size`: bytes along K."""
    few: tl.constexpr = PER_THREAD < 16  # and their zeros are made before they are stored
    dead = None if few else poisoned
    words: tl.constexpr = pointer.dtype.element_ty == tl.int32
    if BITS == 6:
        number = joined(code, sign, ROWS * SIZE, 4, 6)  # 24 bits
        if few:
            number = unless(poisoned, number, ROWS * SIZE)
        if words:
            even, odd = tl.split(tl.reshape(number, (BLOCKS, ROWS * SIZE // 16, 2, 2)))
            first, third = tl.split(even)
            second, fourth = tl.split(odd)
            low = first | (second << 24)
            middle = (second >> 8) | (third << 16)
            high = (third >> 16) | (fourth << 8)
        else:
            low, middle, high = number, number >> 8, number >> 16
        size: tl.constexpr = SIZE // (16 if words else 4)
        if words and PER_THREAD > 16 and size > 1:
            store_sixes(pointer, low, middle, high, poisoned, block, blocks, BLOCKS, ROWS * size // 2)
        else:
            store_units(pointer, low, dead, block, blocks, k_blocks, row_blocks, k_size, rows, stride_matrix,
                        stride_k, stride_row, 0, 3, BLOCKS, ROWS, size, WHOLE, RUN, ROWS_FIRST, False)  # fmt: skip
            store_units(pointer, middle, dead, block, blocks, k_blocks, row_blocks, k_size, rows, stride_matrix,
                        stride_k, stride_row, 1, 3, BLOCKS, ROWS, size, WHOLE, RUN, ROWS_FIRST, False)  # fmt: skip
            store_units(pointer, high, dead, block, blocks, k_blocks, row_blocks, k_size, rows, stride_matrix,
                        stride_k, stride_row, 2, 3, BLOCKS, ROWS, size, WHOLE, RUN, ROWS_FIRST, False)  # fmt: skip
    else:
        per: tl.constexpr = pointer.dtype.element_ty.primitive_bitwidth // BITS
        units = joined(code, sign, ROWS * SIZE, per, BITS) if per > 1 else code + (sign << (BITS - 1))
        if few:
            units = unless(poisoned, units, ROWS * SIZE)
        store_units(pointer, units, dead, block, blocks, k_blocks, row_blocks, k_size, rows, stride_matrix, stride_k,
                    stride_row, 0, 1, BLOCKS, ROWS, SIZE // per, WHOLE, RUN, ROWS_FIRST, PER_THREAD >= 16)  # fmt: skip


@triton.jit
def load_codes(
    pointer, block, blocks, k_blocks, row_blocks, k_size, rows, stride_matrix, stride_k, stride_row,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr, RUN: tl.constexpr,
    ROWS_FIRST: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Codes `[BLOCKS, ROWS * SIZE]`, packed along K in bytes or in int32 words, in the top bits of int32 words. `k_size`:
    bytes along K."""
    words: tl.constexpr = pointer.dtype.element_ty == tl.int32
    if BITS == 6:
        size: tl.constexpr = SIZE // (16 if words else 4)
        low = load_units(pointer, block, blocks, k_blocks, row_blocks, k_size, rows, stride_matrix, stride_k, stride_row,
                         0, 3, BLOCKS, ROWS, size, WHOLE, RUN, ROWS_FIRST)  # fmt: skip
        middle = load_units(pointer, block, blocks, k_blocks, row_blocks, k_size, rows, stride_matrix, stride_k, stride_row,
                            1, 3, BLOCKS, ROWS, size, WHOLE, RUN, ROWS_FIRST)  # fmt: skip
        high = load_units(pointer, block, blocks, k_blocks, row_blocks, k_size, rows, stride_matrix, stride_k, stride_row,
                          2, 3, BLOCKS, ROWS, size, WHOLE, RUN, ROWS_FIRST)  # fmt: skip
        if words:
            second, third = ((low >> 24) & 0xFF) | (middle << 8), ((middle >> 16) & 0xFFFF) | (high << 16)
            numbers = tl.join(tl.join(low, third), tl.join(second, high >> 8))
            number = tl.reshape(numbers, (BLOCKS, ROWS * SIZE // 4))
        else:
            number = low | (middle << 8) | (high << 16)
        return spread(number, ROWS * SIZE, 4, 6)
    else:
        per: tl.constexpr = (32 if words else 8) // BITS
        units = load_units(pointer, block, blocks, k_blocks, row_blocks, k_size, rows, stride_matrix, stride_k, stride_row,
                           0, 1, BLOCKS, ROWS, SIZE // per, WHOLE, RUN, ROWS_FIRST)  # fmt: skip
        return spread(units, ROWS * SIZE, per, BITS)
