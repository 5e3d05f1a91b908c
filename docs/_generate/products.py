"""Matrix products: the bits that an exact block dot needs, and what the units of real hardware keep."""

from dataclasses import dataclass

import mxref
from docs._generate.markdown import NO_BREAK, exact, table
from mxref.conformance.contracts import CONTRACTS
from mxref.formats import BLOCK_FORMATS, ELEMENT_FORMATS
from mxref.matmul import dot_bits
from mxref.moe import ACTIVATIONS, QUANTIZATION_POINTS

ELEMENTS = [e for e in ELEMENT_FORMATS.values() if e.signed]
FLOAT32_BITS, FLOAT64_BITS = 24, 53


def pairs() -> list[tuple[mxref.ElementFormat, mxref.ElementFormat]]:
    """Every pair of element formats, once."""
    return [(a, b) for i, a in enumerate(ELEMENTS) for b in ELEMENTS[i:]]


def dot_table() -> str:
    """Bits of an exact dot for each pair, and in what it is exact."""
    rows = []
    for a, b in pairs():
        bits = [dot_bits(a, b, length) for length in (16, 32)]
        where = "float32" if bits[1] <= FLOAT32_BITS else "float64" if bits[1] <= FLOAT64_BITS else "float64, split at 1"
        longest = (1 << FLOAT32_BITS) // (a.largest_multiple * b.largest_multiple)
        rows.append((f"{a.name}{NO_BREAK}×{NO_BREAK}{b.name}", *bits, where, longest if longest > 1 else "none"))
    return table(("pair", "bits, 16 elements", "bits, 32 elements", "exact in", "longest exact in float32"), rows, "lrrlr")


def rounded_dots() -> str:
    """The pairs of elements whose block dot can need more bits than float32 has."""
    wide = {a.name for a, b in pairs() if a == b and dot_bits(a, b, 32) > FLOAT32_BITS}
    rounded = [(a.name, b.name) for a, b in pairs() if dot_bits(a, b, 32) > FLOAT32_BITS]
    assert rounded == [(a.name, b.name) for a, b in pairs() if {a.name, b.name} & wide]
    return f"every pair with {' or '.join(name.upper() for name in sorted(wide))}"


def rounded_scales() -> str:
    """The formats whose products with NVFP4 can need more bits than float32 has once its block scale is in."""
    nvfp4, rounded = BLOCK_FORMATS["nvfp4"], []
    for other in BLOCK_FORMATS.values():
        bits = dot_bits(nvfp4.element, other.element, min(nvfp4.block_size, other.block_size))
        bits += sum(f.scale.mantissa_bits + 1 for f in (nvfp4, other) if not f.scale.is_power_of_two)
        if bits > FLOAT32_BITS:
            rounded.append(other.name.upper())
    return " and ".join(rounded)


def counting(name_a: str, name_b: str, length: int) -> str:
    """The counting argument for one pair, in numbers."""
    a, b = ELEMENT_FORMATS[name_a], ELEMENT_FORMATS[name_b]
    product = a.largest_multiple * b.largest_multiple
    steps = [
        f"1. Every value of {name_a} is a whole number of steps of {exact(a.quantum)}, at most {a.largest_multiple}; "
        f"of {name_b}: steps of {exact(b.quantum)}, at most {b.largest_multiple}.",
        f"2. A product is then a whole number of steps of {exact(a.quantum * b.quantum)}, at most "
        f"{a.largest_multiple} × {b.largest_multiple} = {product}.",
        f"3. A sum of {length} of them, or of any part of them, is a whole number of at most {length} × {product} = "
        f"{length * product} steps.",
        f"4. {length * product} is at most 2^{dot_bits(a, b, length)}: {dot_bits(a, b, length)} bits hold it. "
        f"Float32's significand has {FLOAT32_BITS}.",
    ]
    return "\n".join(steps)


@dataclass(frozen=True)
class Unit:
    """How one matrix unit adds: `terms` products at once, aligned to the largest exponent and cut `kept` bits below it.

    `source`: the file of a public model that says so, and the name in it.
    """

    hardware: str
    operands: str
    terms: str
    kept: int | None
    result: str
    source: str


MMA_SIM = "[MMA-Sim](https://arxiv.org/abs/2511.10909)"
MODELS = "https://github.com/microsoft/MMA-Sim/blob/16a01880fa6e121d52bd7e7e295923ba05d2af2e/mmasim/simulator"
FEW_BITS = f"MMA-Sim, [nv.py]({MODELS}/nv.py): `arch_accum_fractional_bits`, "
WGMMA = f"MMA-Sim, [nv.py]({MODELS}/nv.py): `WGMMASim`"
TCGEN05 = f"MMA-Sim, [nv.py]({MODELS}/nv.py): `TCGen05MMASim`"
FP64 = f"MMA-Sim, [nv.py]({MODELS}/nv.py): `MMASim`, fp64"
MFMA = f"MMA-Sim, [amd.py]({MODELS}/amd.py): `MFMASim`, CDNA3"
UNITS = (
    Unit("V100", "fp16", "4", 23, "cut to float32", FEW_BITS + "Volta"),
    Unit("A100, Ada", "fp16, bf16", "8", 24, "cut to float32", FEW_BITS + "Ampere, Ada Lovelace; `is_split_k`"),
    Unit("H100, H200", "fp16, bf16", "16", 25, "cut to float32", WGMMA),
    Unit("H100, H200 (Ada: 16 terms)", "fp8", "32", 13, "cut to 13 mantissa bits", WGMMA + ", `MMASim`"),
    Unit("B200", "fp16, bf16", "16", 25, "cut to float32", TCGEN05),
    Unit("B200", "fp8, and MX formats with their scales", "32", 25, "cut to float32", TCGEN05),
    Unit("B200", "mxf4, mxf4nvf4", "4 exact dots of 16", 35, "cut to float32", TCGEN05),
    Unit("NVIDIA, fp64", "fp64", "1, fused, K ascending", None, "nearest even", FP64),
    Unit("MI300 (CDNA3)", "fp16, bf16", "8", 24, "nearest even", MFMA),
    Unit("MI350 (CDNA4)", "MX formats", "not published", None, "not published", "no public bit-accurate model found"),
)


def units() -> str:
    """The alignment of each unit, and which pairs of formats still have exact block dots on it."""
    rows = []
    for unit in UNITS:
        if unit.kept is None:
            exact_pairs = "all of one chain" if unit.operands == "fp64" else "unknown"
        else:
            bits = min(unit.kept + 1, FLOAT32_BITS)
            fitting = [f"{a.name} × {b.name}" for a, b in pairs() if dot_bits(a, b, 32) <= bits]
            exact_pairs = (
                ", ".join(fitting)
                if len(fitting) < 4
                else f"{len(fitting)} of {len(pairs())}: FP4, FP6 and INT8 in any pairing"
            )
        rows.append(
            (
                unit.hardware,
                unit.operands,
                unit.terms,
                "-" if unit.kept is None else unit.kept,
                unit.result,
                exact_pairs,
                unit.source,
            )
        )
    header = (
        "hardware",
        "operands",
        "products at once",
        "bits kept below the largest exponent",
        "result",
        "pairs with an exact dot of 32",
        "source",
    )
    return table(header, rows)


def contracts() -> str:
    """The promises that a kernel can make."""
    return table(
        ("contract", "promise"), [(f"`{name}`", check.__doc__.splitlines()[0]) for name, check in CONTRACTS.items()]
    )


def quantization_points() -> str:
    """The places in an expert where values are quantized."""
    return ", ".join(f"`{point}`" for point in QUANTIZATION_POINTS)


def activations() -> str:
    """The names of the activations."""
    return ", ".join(f"`{name}`" for name in ACTIVATIONS)
