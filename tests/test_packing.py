"""Bit streams and layouts.

Expected values: the packed row as one Python integer (code i shifted by i * bits), and the byte offset formulas of the
layouts evaluated place by place.
"""

import numpy as np
import pytest
import torch
from bits import assert_same_bits

import mxref


def packed_by_hand(row, bits: int) -> list[int]:
    """A row as one little-endian integer."""
    number = sum(int(code) << (i * bits) for i, code in enumerate(row))
    return list(number.to_bytes(-(-len(row) * bits // 8), "little"))


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("k", [0, 1, 2, 3, 4, 5, 7, 8, 31, 32, 33])
def test_pack_is_a_little_endian_bit_stream(bits, k, rng):
    codes = rng.integers(0, 1 << bits, (5, k)).astype(np.uint8)
    expected = np.uint8([packed_by_hand(row, bits) for row in codes]).reshape(5, -(-k * bits // 8))
    packed = mxref.pack(torch.from_numpy(codes), bits)
    assert_same_bits(packed, expected)
    assert_same_bits(mxref.unpack(packed, bits, k), codes)


def test_every_fp4_pair_and_every_fp6_code_at_every_place():
    pairs = torch.cartesian_prod(torch.arange(16), torch.arange(16)).to(torch.uint8)
    assert_same_bits(mxref.pack(pairs, 4)[:, 0], (pairs[:, 0] | pairs[:, 1] << 4))
    for place in range(4):
        codes = torch.zeros(64, 4, dtype=torch.uint8)
        codes[:, place] = torch.arange(64)
        expected = np.uint8([packed_by_hand(row, 6) for row in codes.tolist()])
        assert_same_bits(mxref.pack(codes, 6), expected)


@pytest.mark.parametrize("shape", [(7,), (2, 7), (2, 3, 7), (0, 7), (2, 0)])
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_pack_keeps_leading_dimensions_and_starts_each_row_on_a_byte(shape, bits, rng):
    codes = torch.from_numpy(rng.integers(0, 1 << bits, shape).astype(np.uint8))
    packed = mxref.pack(codes, bits)
    assert packed.shape == (*shape[:-1], -(-shape[-1] * bits // 8))
    assert_same_bits(mxref.unpack(packed, bits, shape[-1]), codes)
    assert_same_bits(mxref.pack(codes.flip(-1), bits), mxref.pack(codes.flip(-1).clone(), bits))


def test_spare_bits_are_zero_and_anything_else_is_refused():
    packed = mxref.pack(torch.tensor([15, 15, 15], dtype=torch.uint8), 4)
    assert packed.tolist() == [0xFF, 0x0F]
    with pytest.raises(ValueError, match="spare"):
        mxref.unpack(torch.tensor([0xFF, 0xFF], dtype=torch.uint8), 4, 3)


def test_pack_refuses():
    with pytest.raises(ValueError, match="16"):
        mxref.pack(torch.tensor([3, 16], dtype=torch.uint8), 4)
    with pytest.raises(TypeError, match="int64|uint8"):
        mxref.pack(torch.tensor([3, 1]), 4)
    for bits in (0, 9):
        with pytest.raises(ValueError, match="bits"):
            mxref.pack(torch.tensor([1], dtype=torch.uint8), bits)
    for count in (5, -1):
        with pytest.raises(ValueError, match="count|bytes"):
            mxref.unpack(torch.tensor([1, 2], dtype=torch.uint8), 4, count)
    with pytest.raises(TypeError, match="uint8"):
        mxref.unpack(torch.tensor([1, 2]), 4, 4)


# ------------------------------------------------------------------------------------------ layouts


def tile_offset(r: int, c: int, columns: int) -> int:
    tile = (r // 128) * -(-columns // 4) + c // 4
    return 512 * tile + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (127, 3), (129, 5), (200, 6), (256, 8), (300, 9)])
def test_tile_128x4(shape, rng):
    rows, columns = shape
    scales = rng.integers(1, 256, shape).astype(np.uint8)
    expected = np.zeros(-(-rows // 128) * -(-columns // 4) * 512, np.uint8)
    for r in range(rows):
        for c in range(columns):
            expected[tile_offset(r, c, columns)] = scales[r, c]
    stored = mxref.to_layout(torch.from_numpy(scales), "tile_128x4")
    assert_same_bits(stored.flatten(), expected)
    assert_same_bits(mxref.from_layout(stored, "tile_128x4", shape), scales)
    assert_same_bits(mxref.from_layout(stored.reshape(-1, 16), "tile_128x4", shape), scales)
    dirty = stored.flatten().clone()
    used = torch.zeros_like(dirty, dtype=torch.bool)
    used[[tile_offset(r, c, columns) for r in range(rows) for c in range(columns)]] = True
    dirty[~used] = 0xAB
    assert_same_bits(mxref.from_layout(dirty, "tile_128x4", shape), scales)


def test_tile_128x4_keeps_leading_dimensions(rng):
    scales = torch.from_numpy(rng.integers(0, 256, (3, 140, 6)).astype(np.uint8))
    stored = mxref.to_layout(scales, "tile_128x4")
    assert stored.shape[0] == 3
    for e in range(3):
        assert_same_bits(stored[e].flatten(), mxref.to_layout(scales[e], "tile_128x4").flatten())
    assert_same_bits(mxref.from_layout(stored, "tile_128x4", (3, 140, 6)), scales)


def test_linear_is_the_identity(rng):
    scales = torch.from_numpy(rng.integers(0, 256, (5, 6)).astype(np.uint8))
    assert_same_bits(mxref.to_layout(scales, "linear"), scales)
    assert_same_bits(mxref.from_layout(scales, "linear", (5, 6)), scales)


def test_ggml_mxfp4_split_order(rng):
    codes = rng.integers(0, 16, (3, 64)).astype(np.uint8)
    stored = mxref.to_layout(torch.from_numpy(codes), "ggml_mxfp4")
    blocks = codes.reshape(3, 2, 32)
    assert_same_bits(stored.reshape(3, 2, 16), blocks[..., :16] | blocks[..., 16:] << 4)
    assert_same_bits(mxref.from_layout(stored, "ggml_mxfp4", (3, 64)), codes)
    with pytest.raises(ValueError, match="32"):
        mxref.to_layout(torch.zeros(2, 48, dtype=torch.uint8), "ggml_mxfp4")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
def test_gate_up_rows_interleave(dtype, rng):
    rows = torch.from_numpy(rng.integers(0, 200, (2, 10, 3)).astype(np.uint8)).to(dtype)
    stored = mxref.to_layout(rows, "interleaved")
    for i in range(5):
        assert_same_bits(stored[:, 2 * i], rows[:, i])
        assert_same_bits(stored[:, 2 * i + 1], rows[:, 5 + i])
    assert_same_bits(mxref.from_layout(stored, "interleaved", (2, 10, 3)), rows)
    with pytest.raises(ValueError):
        mxref.to_layout(rows[:, :9], "interleaved")


def test_layouts_refuse_what_does_not_fit():
    scales = torch.zeros(4, 4, dtype=torch.uint8)
    with pytest.raises(ValueError, match="linear.*tile_128x4"):
        mxref.to_layout(scales, "swizzled")
    with pytest.raises(ValueError, match="linear.*tile_128x4"):
        mxref.from_layout(scales, "swizzled", (4, 4))
    with pytest.raises(ValueError):
        mxref.to_layout(scales[0], "tile_128x4")
    with pytest.raises(ValueError):
        mxref.from_layout(scales, "tile_128x4", (4, 4))


@pytest.mark.parametrize("format", list(mxref.BLOCK_FORMATS))
def test_packed_rows_of_a_block_tensor(format, rng):
    x = torch.from_numpy(np.float32(rng.standard_normal((3, 2, 70))))
    q = mxref.quantize(x, format)
    bits = q.format.element.bits
    expected = np.uint8([packed_by_hand(row, bits) for row in q.codes.reshape(6, 70).tolist()])
    assert_same_bits(q.packed.reshape(6, -1), expected)
    assert_same_bits(mxref.unpack(q.packed, bits, 70), q.codes)
