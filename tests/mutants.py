"""Planted faults: copies of the kernels and of the reference, each with one line made wrong, and does conformance see it.

    TRITON_INTERPRET=1 python -m tests.mutants [NAME ...]

Expected values are computed once, by the code as it is. Every fault then runs in a forked process that imports the faulty
copy; it ends at the first differing bit. Prints a line a fault: `caught`, `SURVIVED`, or `broken` where it does not run.
"""

import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

if importlib.util.find_spec("triton"):
    import triton  # noqa: F401  once, before the forks

ROOT = Path(__file__).parent.parent
BLOCKS, ELEMENTS = ("quantize", "qdq"), ("encode",)


@dataclass(frozen=True)
class Fault:
    """In `file`, `old` becomes `new`; the cases of `ops` whose ids hold `only` must see it."""

    name: str
    file: str
    old: str
    new: str
    ops: tuple[str, ...]
    only: str = ""


TILES, TRITON, ACTIVATIONS = "accel/triton/_tiles.py", "accel/triton/_blocks.py", "accel/triton/_activations.py"
EXPERTS, LAYERS = "accel/triton/_experts.py", ("moe_experts",)
PRODUCTS = "accel/triton/_products.py"
CHAINS, CHAIN_LAUNCHES = "accel/triton/_chains.py", "accel/triton/_chain_products.py"
PLACES, PACKING, LAYOUT = "accel/triton/_places.py", "accel/triton/_packing.py", "accel/triton/to_layout.py"
ELEMENTWISE = "accel/triton/_elementwise.py"
GEOMETRY, LAUNCH = "accel/triton/_geometry.py", "accel/triton/_launch.py"
KERNEL_FAULTS = (
    Fault(
        "ties to even by half up",
        TILES,
        "2 * remainder + (code & 1) > (1 << shift)",
        "2 * remainder >= (1 << shift)",
        ELEMENTS,
    ),
    Fault("ties away rounds ties down", TILES, "(2 * remainder >= (1 << shift))", "(2 * remainder > (1 << shift))", BLOCKS),
    Fault("subnormal step one binade off", TILES, "(LOWEST << 23) + shift))", "((LOWEST + 1) << 23) + shift))", ("qdq",)),
    Fault(
        "saturation bound lost",
        TILES,
        "    magnitude = tl.minimum(magnitude, MAX)\n",
        "    magnitude = tl.minimum(magnitude, 2 * MAX)\n",
        ("qdq",),
    ),
    Fault(
        "sticky bits lost",
        TILES,
        "remainder = significand - (kept << shift)",
        "remainder = (significand - (kept << shift)) & -256",
        ELEMENTS,
    ),
    Fault("stochastic drops the low bits late", TILES, "tl.maximum(32 - dropped, 0)", "tl.maximum(31 - dropped, 0)", BLOCKS),
    Fault(
        "sign of zero lost",
        TRITON,
        "value = float_of(bits_of(magnitude) | (sign << 31))",
        "value = float_of(bits_of(magnitude) | (tl.where(magnitude == 0.0, 0, sign) << 31))",
        ("qdq",),
    ),
    Fault(
        "sign of codes from the magnitude",
        TILES,
        "sign = (x.to(tl.uint32, bitcast=True) >> 31).to(tl.int32)",
        "sign = (tl.abs(x).to(tl.uint32, bitcast=True) >> 31).to(tl.int32)",
        BLOCKS,
    ),
    Fault(
        "scale byte 0 read as zero", TILES, "tl.where(code == 0, 0x400000, code << 23)", "code << 23", ("dequantize", "qdq")
    ),
    Fault(
        "scale byte 255 read as Inf",
        TILES,
        "tl.where(code == 255, NAN, bits)",
        "tl.where(code == 255, INF, bits)",
        ("decode",),
    ),
    Fault(
        "scale byte 254 has no reciprocal",
        TILES,
        "tl.where(code == 254, 0x400000, (254 - code) << 23)",
        "(254 - code) << 23",
        BLOCKS,
    ),
    Fault(
        "floor of amax one off at powers of two",
        TILES,
        '    if RULE == "even":\n        amax += 1 << (22 - MANTISSA)',
        '    amax = tl.maximum(amax - 1, 0)\n    if RULE == "even":\n        amax += 1 << (22 - MANTISSA)',
        BLOCKS,
    ),
    Fault("even adds half a unit too low", TILES, "1 << (22 - MANTISSA)", "1 << (21 - MANTISSA)", BLOCKS),
    Fault("ceil counts a power of two up", TILES, "(significand > 0x800000)", "(significand >= 0x800000)", BLOCKS),
    Fault("rceil ignores the significand", TILES, "(significand > largest)", "(significand > 0x800000)", BLOCKS),
    Fault(
        "amax of a subnormal not normalised",
        TILES,
        "(normalized >> 23) - 149",
        "(normalized >> 23) - 148",
        BLOCKS,
        "mxint8-ocp_ceil-binades",
    ),
    Fault(
        "reciprocal for a division",
        TRITON,
        "inverse_of(one, scale * stored, BRANCH)",
        "inverse_of(one, scale, BRANCH) * inverse_of(one, stored, BRANCH)",
        BLOCKS,
        "nvfp4-nvidia-binades",
    ),
    Fault(
        "order of the scale products",
        TRITON,
        "return amax * (forward * SIXTH)",
        "return (amax * forward) * SIXTH",
        BLOCKS,
        "nvfp4-nvidia-scale_turns-static",
    ),
    Fault(
        "zero scale divides",
        TRITON,
        "return tl.where(scale == 0.0, 0.0, inverse)",
        "return inverse",
        BLOCKS,
        "nvfp4-nvidia-binades",
    ),
    Fault(
        "NaN does not poison its block",
        TRITON,
        "poisoned = amax >= INF if INF_POISONS else amax > INF",
        "poisoned = amax > 0x7FFFFFFE",
        BLOCKS,
    ),
    Fault(
        "Inf poisons though it should saturate", TRITON, "amax >= INF if INF_POISONS else amax > INF", "amax >= INF", BLOCKS
    ),
    Fault(
        "a block crosses its row",
        PLACES,
        "k_start, row_start = k_block * (SIZE * STEP), row_block * ROWS",
        "k_start, row_start = k_block * (SIZE * STEP) + 1, row_block * ROWS",
        BLOCKS,
    ),
    Fault(
        "missing tail mask",
        PLACES,
        "(k_start[:, None] + k[None, :] < k_size)",
        "(k_start[:, None] + k[None, :] < k_size + SIZE)",
        BLOCKS,
    ),
    Fault(
        "random words by block, not by element",
        TRITON,
        "words, _, _, _ = tl.randint4x(seed, index)",
        "words, _, _, _ = tl.randint4x(seed, index // SIZE * SIZE)",
        BLOCKS,
    ),
    Fault(
        "output rounded by truncation",
        TILES,
        "(bits + 0x7FFF + ((bits >> 16) & 1)) >> 16",
        "bits >> 16",
        ("dequantize", "silu"),
    ),
    Fault("NaN keeps its payload", TILES, "return float_of(tl.where(x != x, NAN, bits_of(x)))", "return x", ("exp",)),
    Fault(
        "one multiply and add fused",
        ACTIVATIONS,
        "p = p * r + P0",
        "p = (p.to(tl.float64) * r + P0).to(tl.float32)",
        ("exp",),
    ),
    Fault(
        "clamp of the gate on both sides",
        ACTIVATIONS,
        "g = tl.where(gate > limit, limit, gate)",
        "g = tl.where(gate > limit, limit, tl.where(gate < -limit, -limit, gate))",
        ("swiglu_oai",),
    ),
    Fault(
        "second line of the codes too low", TILES, "8388608.0 + (1 << MANTISSA)", "8388608.0 + (1 << MANTISSA) - 1", BLOCKS
    ),
    Fault("codes beyond the largest", TILES, "0x4B000000 + MAX_CODE", "0x4B000000 + MAX_CODE + 1", ("quantize",)),
    Fault(
        "high nibble first",
        PACKING,
        "shift = BITS * tl.arange",
        "shift = BITS * (PER - 1) - BITS * tl.arange",
        ("quantize",),
    ),
    Fault(
        "a byte of three lost",
        PACKING,
        "low, middle, high = number, number >> 8, number >> 16",
        "low, middle, high = number, number >> 8, number >> 17",
        ("quantize",),
    ),
    Fault(
        "nibbles read in the other order",
        PACKING,
        "shift = 32 - BITS - BITS * tl",
        "shift = 32 - BITS * PER + BITS * tl",
        ("dequantize",),
    ),
    Fault(
        "an int32 offset",
        PLACES,
        "base = matrix.to(tl.int64) * stride_matrix",
        "base = (matrix * stride_matrix).to(tl.int8).to(tl.int64)",
        BLOCKS,
    ),
    Fault(
        "tensor scale of the first row for all",
        TRITON,
        "given = tl.load(tensor_ptr + line, mask=inside, other=1.0) if PER_ROW",
        "given = tl.load(tensor_ptr + line * 0, mask=inside, other=1.0) if PER_ROW",
        BLOCKS,
        "nvfp4-nvidia-tails-bfloat16-per_row",
    ),
    Fault(
        "amax of a row's first program alone",
        LAUNCH,
        "amax_kernel[geometry.programs](",
        "amax_kernel[(1,)](",
        BLOCKS,
        "longer_rows-per_row",
    ),
    Fault(
        "a reciprocal of a tensor scale is Inf",
        TRITON,
        "forward = tl.minimum(inverse_of(one, given, BRANCH), FLOAT_MAX) if",
        "forward = inverse_of(one, given, BRANCH) if",
        BLOCKS,
        "nvfp4-nvidia-specials-tiny",
    ),
    Fault(
        "a strided tensor scale read in a run",
        GEOMETRY,
        "scale.expand(self.line_shape).contiguous()",
        "scale.expand(self.line_shape)",
        BLOCKS,
        "per_row_static",
    ),
    Fault(
        "pairs from the word before",
        GEOMETRY,
        "even = x.storage_offset() % 2 == 0 and x.data_ptr() % 16 == 0 and",
        "x = x.as_strided(x.shape, x.stride(), x.storage_offset() // 2 * 2)\n        even =",
        BLOCKS,
        "odd_offset",
    ),
    Fault(
        "random words of 16 bits of the index",
        ELEMENTWISE,
        "tl.randint4x(seed, index)",
        "tl.randint4x(seed, index & 0xFFFF)",
        ELEMENTS,
        "every_bfloat16",
    ),
    Fault(
        "stored scale by way of the reciprocal",
        TRITON,
        "stored = tl.minimum(tl.div_rn(one, forward), FLOAT_MAX) if",
        "stored = tl.div_rn(given, largest) if",
        ("quantize",),
        "nvfp4-nvidia-binades",
    ),
    Fault(
        "exact thresholds rounded to float32",
        TILES,
        "threshold = midpoint.to(tl.float64) * denominator",
        "threshold = (midpoint.to(tl.float64) * denominator).to(tl.float32).to(tl.float64)",
        BLOCKS,
        "nvfp4-exact-binades",
    ),
    Fault(
        "exact ties to odd", TILES, "(candidate % 2 == 0)", "(candidate % 2 == 1)", BLOCKS, "nvfp4-exact-scale_turns-static"
    ),
    Fault("search keeps the last of equals", TRITON, "wins = error < best_error", "wins = error <= best_error", BLOCKS),
    Fault("errors summed without their squares", TRITON, "else difference * difference", "else tl.abs(difference)", BLOCKS),
    Fault(
        "signs before the inverse rotation",
        TRITON,
        "    if INVERSE:\n        x = x * sign\n",
        "    if INVERSE:\n        x = x * sign * sign\n",
        ("qdq", "dequantize"),
    ),
    Fault("rotation halved twice", TRITON, "(1 << (STEPS // 2))", "(1 << STEPS)", BLOCKS),
    Fault(
        "activation not rounded before it is quantized",
        ACTIVATIONS,
        "widen(narrow_or_nan(activate(x, pattern, up, table_ptr, alpha, limit, NAME, GATED, STORED), STORED))",
        "activate(x, pattern, up, table_ptr, alpha, limit, NAME, GATED, STORED)",
        ("activate_quantize",),
    ),
    Fault(
        "a reciprocal with a term too few",
        TILES,
        "return fused(y, error * error, y)",
        "return y",
        ("silu",),
    ),
    Fault(
        "a few rows all in place of the first",
        PLACES,
        "first + tl.program_id(1) * k_blocks",
        "first",
        ("activate_quantize",),
        "few_rows",
    ),
    Fault(
        "codes of poisoned blocks kept",
        PACKING,
        "tl.where(tl.max(flags, axis=2) != 0, 0, units)",
        "units",
        BLOCKS,
    ),
    Fault(
        "a gate looked up by its neighbour",
        TRITON,
        "activated(high, word >> 16, float_of(up & -65536)",
        "activated(high, word, float_of(up & -65536)",
        ("activate_quantize",),
    ),
    Fault(
        "a table rounded to another dtype",
        ELEMENTWISE,
        "gate_side(x, alpha, limit, FUNCTION, LIKE))",
        "gate_side(x, alpha, limit, FUNCTION, tl.float32))",
        ("activate_quantize",),
    ),
    Fault(
        "lines of a run end to end",
        PLACES,
        "line.to(tl.int64) * stride_matrix + (first - line * k_blocks) * SIZE",
        "first.to(tl.int64) * SIZE",
        (*BLOCKS, "dequantize"),
    ),
    Fault(
        "a line's programs all at its start",
        PLACES,
        "stride_matrix + (first - line * k_blocks) * SIZE",
        "stride_matrix",
        (*BLOCKS, "dequantize"),
    ),
    Fault("sign lost in a look-up", ACTIVATIONS, "pattern & 0xFFFF", "pattern & 0x7FFF", ("silu",)),
    Fault("six words out of order", PACKING, "tl.join(first_high, second_low)", "tl.join(second_low, first_high)", BLOCKS),
    Fault("tile rows in order", LAYOUT, "byte % 16 // 4 * 32 + byte // 16", "byte // 4", ("to_layout",)),
    Fault(
        "an fp8 cast for the block scale",
        TRITON,
        "factor = scale_sum - scale_anchor\n",
        'factor = tl.minimum(raw, SCALE_MAX).to(tl.float8e4nv, fp_downcast_rounding="rtne").to(tl.float32)\n',
        BLOCKS,
        "nvfp4-nvidia-",
    ),
    Fault(
        "experts: blocks in descending order",
        EXPERTS,
        "add_apart(acc, parts[i])",
        "add_apart(acc, parts[NB - 1 - i])",
        LAYERS,
        "every_addition",
    ),
    Fault(
        "experts: blocks added to each other first",
        EXPERTS,
        "    for i in tl.static_range(NB):\n        acc = add_apart(acc, parts[i])\n    return acc",
        "    return acc + tl.sum(dots, axis=0)",
        LAYERS,
        "every_addition",
    ),
    Fault(
        "experts: up scaled as gate",
        EXPERTS,
        "w_stored_ptr + e * stored_expert + row * stored_row",
        "w_stored_ptr + e * stored_expert",
        LAYERS,
        "gate_up_scales",
    ),
    Fault(
        "experts: intermediate not quantized",
        EXPERTS,
        "element = tl.where(quotient < 0.0, anchor - sum, sum - anchor)",
        'element = tl.where(quotient < 0.0, anchor - sum, sum - anchor) if ACTIVATION == "none" else quotient',
        LAYERS,
    ),
    Fault(
        "experts: slots in descending order",
        EXPERTS,
        "token * TOP_K + i",
        "token * TOP_K + (TOP_K - 1 - i)",
        LAYERS,
        "every_addition",
    ),
    Fault(
        "experts: slots in expert order",
        EXPERTS,
        """    for i in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + token * TOP_K + i)
        term = tl.load(terms_ptr + (token * TOP_K + i) * n_size + n, mask=n < n_size, other=0.0)
        total += tl.where((expert >= 0) & (expert < experts), term, 0.0)""",
        """    for j in range(experts * TOP_K):
        i = j % TOP_K
        expert = tl.load(ids_ptr + token * TOP_K + i)
        term = tl.load(terms_ptr + (token * TOP_K + i) * n_size + n, mask=n < n_size, other=0.0)
        total += tl.where(expert == j // TOP_K, term, 0.0)""",
        LAYERS,
        "every_addition",
    ),
    Fault(
        "experts: products added into the accumulator",  # as a dot that is given one does on a GPU
        EXPERTS,
        "        acc = add_apart(acc, tl.reshape(d, (BN, BM))) if NB == 1 else add_in_order(acc, d, BN, BM, NB)\n",
        """        if FOLD:
            for i in range(NB * G):
                at = (tl.arange(0, NB * G) == i)[None, :]
                w_at, x_at = tl.where(at, w.to(tl.float32), 0.0), tl.where(at, x.to(tl.float32), 0.0)
                acc += tl.sum(w_at, axis=1)[:, None] * tl.sum(x_at, axis=1)[None, :]
        else:
            acc = add_apart(acc, tl.reshape(d, (BN, BM))) if NB == 1 else add_in_order(acc, d, BN, BM, NB)
""",
        LAYERS,
    ),
    Fault(
        "experts: bias fused",
        EXPERTS,
        """    acc = alpha * (acc * UNIT)
    if HAS_BIAS:
        acc = acc + widen(tl.load(bias_ptr + e * bias_expert + row))[:, None]
""",
        """    acc = alpha.to(tl.float64) * (acc * UNIT)
    if HAS_BIAS:
        acc = acc + widen(tl.load(bias_ptr + e * bias_expert + row))[:, None]
    acc = acc.to(tl.float32)
""",
        LAYERS,
        "biases_terms",
    ),
    Fault("experts: a row read past its end", EXPERTS, "present = k < k_size\n", "present = k < k_size + SIZE\n", LAYERS),
    Fault("experts: padding with a NaN scale", EXPERTS, "other=127 if POWER_OF_TWO else 0", "other=127", LAYERS, "tails"),
    Fault(
        "experts: an int32 offset",
        EXPERTS,
        "row_ptr = w_ptr + e * w_expert",
        "row_ptr = w_ptr + (e * w_expert).to(tl.int8)",
        LAYERS,
    ),
    Fault(
        "experts: scales at the ends taken as safe", EXPERTS, "if safe == 0:", "if safe == 2:", LAYERS, "mxfp4-mxfp4-worst"
    ),
    Fault(
        "experts: rests of E4M3 lost", EXPERTS, "add_apart(d, dots(w, x_rest,", "add_apart(d, 0.0 * dots(w, x_rest,", LAYERS
    ),
)

PRODUCT_FAULTS = (
    Fault(
        "blocks added in descending order",
        PRODUCTS,
        "start = block * (",
        "start = (row_bytes * 8 // (SIZE * BITS) - 1 - block) * (",
        ("matmul",),
    ),
    Fault(
        "scales multiplied first",
        PRODUCTS,
        "product * (a_low[:, None] * b_high[None, :]) * (a_high[:, None] * b_low[None, :])",
        "product * ((a_low[:, None] * b_high[None, :]) * (a_high[:, None] * b_low[None, :]))",
        ("matmul",),
    ),
    Fault(
        "folded tails masked at the wrong block",
        PRODUCTS,
        "for block in range(blocks):\n        if WHOLE",
        "for block in range(blocks - 1, -1, -1):\n        if WHOLE",
        ("matmul",),
    ),
    Fault(
        "folded scales never looked at",
        PRODUCTS,
        "if tl.max(unfit.to(tl.int32), axis=0) > 0:\n            largest",
        "if tl.max(unfit.to(tl.int32), axis=0) > 1:\n            largest",
        ("matmul",),
    ),
    Fault(
        "a NaN scale is a number",
        PRODUCTS,
        "nan = (a_scale == A_NAN)[:, None] |",
        "nan = (a_scale == A_NAN + 1)[:, None] |",
        ("matmul",),
    ),
    Fault(
        "low x low sum lost",
        PRODUCTS,
        "    total = add_to_odd(total, tl.dot(x_low, y_low, out_dtype=tl.float64))\n",
        "",
        ("matmul",),
    ),
    Fault(
        "split sums rounded to nearest",
        PRODUCTS,
        "tl.where((error != 0) & (bits & 1 == 0), bits + step, bits)",
        "bits",
        ("matmul",),
    ),
    Fault(
        "mixed sum added without its rest",
        PRODUCTS,
        "total = add_to_odd(tl.dot(x_high, y_high, out_dtype=tl.float64), mixed)",
        "total = tl.dot(x_high, y_high, out_dtype=tl.float64) + mixed",
        ("matmul",),
    ),
    Fault(
        "products added into the accumulator",  # as a dot that is given one does on a GPU
        PRODUCTS,
        """            acc = tl.fma(tl.dot(x, y, input_precision="ieee"), one, acc)""",
        """            for i in range(SIZE):
                x_at, y_at = tl.where(k[None, :] == i, x, 0.0), tl.where(k[:, None] == i, y, 0.0)
                acc += tl.sum(x_at, axis=1)[:, None] * tl.sum(y_at, axis=0)[None, :]""",
        ("matmul",),
    ),
    Fault(
        "alpha and bias fused",
        PRODUCTS,
        """        value = (a_factor[:, None] * b_factor[None, :]) * value
    if BIAS:
        value = value + widen(tl.load(bias_ptr + n * bias_stride, mask=n < columns, other=0))[None, :]
""",
        """        value = (a_factor[:, None] * b_factor[None, :]).to(tl.float64) * value
    if BIAS:
        value = value + widen(tl.load(bias_ptr + n * bias_stride, mask=n < columns, other=0))[None, :]
    value = value.to(tl.float32)
""",
        ("matmul",),
    ),
    Fault(
        "a tail read past its end",
        PRODUCTS,
        "row, rows, 1, 1, row_bytes - start,",
        "row, rows, 1, 1, row_bytes,",
        ("matmul",),
    ),
    Fault(
        "an int32 offset of a product",
        PRODUCTS,
        "c_ptr + m.to(tl.int64)[:, None] * columns",
        "c_ptr + (m[:, None] * columns).to(tl.int8)",
        ("matmul",),
    ),
    Fault(
        "tensor scales one at a time",
        PRODUCTS,
        "(a_factor[:, None] * b_factor[None, :]) * value",
        "a_factor[:, None] * (b_factor[None, :] * value)",
        ("matmul",),
    ),
)

CHAIN_FAULTS = (
    Fault(
        "chains: added in descending order",
        CHAINS,
        """            for c in tl.static_range(UNIT // BITS):
                xs, longer = (), ()
""",
        """            for d in tl.static_range(UNIT // BITS):
                c = UNIT // BITS - 1 - d
                xs, longer = (), ()
""",
        ("matmul",),
        "float32-nvfp4-cancelling",
    ),
    Fault(
        "chains: accumulated in float32",
        CHAINS,
        "                chains = longer\n",
        """                rounded = ()
                for i in tl.static_range(RN * BM):
                    rounded = rounded + (longer[i].to(tl.float32).to(tl.float64),)
                chains = rounded
""",
        ("matmul",),
        "cancelling",
    ),
    Fault(
        "chains: blocks added in descending order",
        CHAINS,
        "(tl.arange(0, NB) == b)[None, :]",
        "(tl.arange(0, NB) == NB - 1 - b)[None, :]",
        ("matmul",),
        "bfloat16-nvfp4",
    ),
    Fault(
        "chains: scales at the ends taken as known",
        CHAINS,
        "if tl.min(fits.to(tl.int32), axis=0) == 0:",
        "if tl.min(fits.to(tl.int32), axis=0) == 2:",
        ("matmul",),
        "every_scale",
    ),
    Fault(
        "chains: weights not rounded",
        CHAIN_LAUNCHES,
        'ROUNDS=how != "powers"',
        "ROUNDS=False",
        ("matmul",),
        "bfloat16-nvfp4-moderate",
    ),
    Fault(
        "chains: gate's scale for up",
        CHAINS,
        "tl.load(w_stored_ptr + e * stored_expert + row * stored_row)",
        "tl.load(w_stored_ptr + e * stored_expert + row * 0)",
        ("moe_experts",),
        "None-gate_up_scales",
    ),
    Fault(
        "chains: tail read past its end",
        CHAIN_LAUNCHES,
        "TAIL=length % format.block_size or format.block_size",
        "TAIL=format.block_size",
        ("matmul",),
        "tail-k_33",
    ),
    Fault(
        "chains: tail's codes zero, under a scale that is Inf",
        CHAINS,
        "weight = tl.where(full, weight, 0.0)",
        "weight = weight + 0.0",
        ("matmul",),
        "tail-k_33",
    ),
)

CORE_FAULTS = (
    Fault(
        "reference: ties away",
        "mxref/elements.py",
        "2 * remainder + (codes & 1) > 1 << shift",
        "2 * remainder >= 1 << shift",
        BLOCKS,
    ),
    Fault(
        "reference: step of subnormals",
        "mxref/elements.py",
        "lowest = element.min_exponent + FLOAT_BIAS",
        "lowest = element.min_exponent + FLOAT_BIAS + 1",
        ELEMENTS,
    ),
    Fault(
        "reference: even without its half unit",
        "mxref/scales.py",
        "FLOAT_MANTISSA_BITS - 1 - element.mantissa_bits",
        "FLOAT_MANTISSA_BITS - 2 - element.mantissa_bits",
        BLOCKS,
    ),
    Fault(
        "reference: rceil at the boundary",
        "mxref/scales.py",
        "significand > max_significand",
        "significand >= max_significand",
        BLOCKS,
    ),
    Fault(
        "reference: a NaN goes unseen",
        "mxref/block_codec.py",
        "amax >= INF_BITS if recipe.inf",
        "amax > 0x7FFFFFFE if recipe.inf",
        BLOCKS,
    ),
    Fault(
        "reference: product of scales first",
        "mxref/orders.py",
        "return amax * (tensor.forward *",
        "return (amax * tensor.forward) * (",
        BLOCKS,
    ),
    Fault(
        "reference: scale 255 is a number",
        "mxref/formats.py",
        "if magnitude > self.max_code:",
        "if magnitude > self.max_code and self.mantissa_bits:",
        ("decode",),
    ),
    Fault(
        "reference: sum in descending order",
        "mxref/matmul.py",
        "for j in range(blocks):",
        "for j in reversed(range(blocks)):",
        ("matmul",),
    ),
)
FAULTS = (*KERNEL_FAULTS, *PRODUCT_FAULTS, *CHAIN_FAULTS, *CORE_FAULTS)


PRODUCTS_TRIED = (
    "mxfp4-k_33", "mxfp4-many_rows", "nvfp4-divided-few_rows", "nvfp4-many_rows-bias", "mxfp8_e5m2-mxfp8_e5m2-extremes-few",
    "mxint8-specials", "nvfp4-specials", "mxfp4-every_scale", "mxfp8_e5m2-mxfp8_e5m2-ties", "nvfp4-nvfp4-every_scale_pair",
    "nvfp4-few_rows-bias-float32", "mxfp4-many_rows-every_addition_rounds", "bfloat16-nvfp4", "float32-nvfp4-cancelling",
    "bfloat16-nvfp4-moderate", "bfloat16-nvfp4-every_scale", "float16-mxfp4-every_scale",
    "float16-mxfp6_e2m3-tail-k_33", "float16-nvfp4-tail-k_33",
)  # fmt: skip


LAYER_LABELS = (
    "mxfp4-mxfp4-worst", "nvfp4-tails", "gate_up_scales", "mxfp4-mxfp8_e4m3-silu", "nvfp4-every_addition",
    "nvfp4-biases_terms", "nvfp4-nan_scale",
)  # fmt: skip


def selected(op: str, all_cases) -> list:
    """Few cases, with the edges in them: what an interpreter runs in seconds."""
    chosen = []
    for case in (case for case in all_cases(op) if case.raises is None):
        if op in BLOCKS:
            _, recipe, label = case.id.split("-", 2)
            wanted = label in ("tails-bfloat16", "tails-bfloat16-per_row", "specials-float32", "strided_long_rows") or (
                recipe in ("ocp", "nvidia", "exact", "ocp_even", "ocp_ceil", "ocp_rceil", "ocp_ties_away")
                and label.startswith(("binades-float32", "scale_turns", "odd_offset"))
                or label in ("longer_rows-per_row", "tails-bfloat16-per_row_static", "specials-tiny")
            )
            if wanted and (
                case.format in ("mxfp4", "mxfp8_e4m3", "nvfp4")
                or (case.format, recipe) in (("mxint8", "ocp"), ("mxint8", "ocp_ceil"), ("mxfp6_e2m3", "ocp"))
            ):
                chosen.append(case)
        elif op == "moe_experts":
            if case.level == 1 and any(label in case.id for label in LAYER_LABELS):
                chosen.append(case)
        elif op == "matmul":
            if case.id in PRODUCTS_TRIED:
                chosen.append(case)
        elif "every_gate" in case.id:
            if case.format == "mxint8" and case.id.endswith("concatenated-every_gate-bfloat16"):
                chosen.append(case)
        elif case.id == "e2m1-stochastic-saturate-every_bfloat16":
            chosen.append(case)
        elif op in ("exp", "silu") or not any(words in case.id for words in ("every_b", "every_f", "random")):
            chosen.append(case)
    return chosen


def run(case, subject: str):
    """The result of a case by `triton`, or by the reference where `subject` is "reference"."""
    import mxref
    from mxref.registry import OPS

    args, kwargs = case.arguments()
    with mxref.use(*([] if subject == "reference" else [subject])):
        if subject != "reference" and mxref.explain_dispatch(case.op, *args, **kwargs).refusals:
            return None
        return OPS[case.op](*args, **kwargs)


def attempt(fault: Fault, expected: dict) -> int:
    """In a child process: 1 if a case differs, 0 if none does."""
    package = fault.file.split("/")[0]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(
            ROOT / package, Path(folder) / package, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors")
        )
        path = Path(folder) / fault.file
        text = path.read_text()
        if fault.old not in text:
            print(f"{fault.name}: {fault.old!r} is not in {fault.file}", flush=True)
            return 2
        path.write_text(text.replace(fault.old, fault.new))
        sys.path.insert(0, folder)
        from mxref.comparison import difference, parts
        from mxref.conformance.cases import cases

        subject = "triton" if package == "accel" else "reference"
        for op in fault.ops:
            for case in (case for case in selected(op, cases) if fault.only in case.id):
                wanted, actual = expected[op, case.id], run(case, subject)
                if actual is None:
                    continue
                given = parts(actual)
                if given.keys() != wanted.keys() or any(difference(given[name], wanted[name]) for name in wanted):
                    return 1
    return 0


def compute_expected(ops: list[str], path: str) -> int:
    """In a child process: write what the code as it is gives for every selected case."""
    from mxref.comparison import parts
    from mxref.conformance.cases import cases

    torch.save({(op, case.id): parts(run(case, "reference")) for op in ops for case in selected(op, cases)}, path)
    return 0


def in_child(work: Callable[..., int], *arguments) -> int:
    """The exit status of `work` in a forked process, which is the first to import mxref."""
    child = os.fork()
    if child == 0:
        try:
            code = work(*arguments)
        except BaseException as failure:
            print(f"{type(failure).__name__}: {failure}", flush=True)
            code = 2
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> int:
    torch.set_num_threads(1)
    faults = [fault for fault in FAULTS if fault.name in sys.argv[1:] or not sys.argv[1:]]
    ops = list(dict.fromkeys(op for fault in faults for op in fault.ops))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "expected")
        if in_child(compute_expected, ops, path):
            return len(faults)
        expected = torch.load(path, weights_only=True)
    survivors = 0
    for fault in faults:
        code = in_child(attempt, fault, expected)
        caught = code == 1 or code < 0  # a fault that writes out of bounds may end the process by a signal
        verdict = "caught" if caught else "broken" if code else "SURVIVED"
        survivors += verdict != "caught"
        print(f"{verdict:<9} {fault.name}", flush=True)
    return survivors


if __name__ == "__main__":
    sys.exit(main())
