"""Planted faults: copies of the kernels and of the reference, each with one line made wrong, and does conformance see it.

    TRITON_INTERPRET=1 python -m tests.mutants [NAME ...]

Expected values are computed once, by the code as it is. Every fault then runs in a forked process that imports the faulty
copy; it ends at the first differing bit. Prints a line a fault: `caught`, `SURVIVED`, or `broken` where it does not run.
"""

import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
BLOCKS, ELEMENTS = ("quantize", "qdq"), ("encode",)


@dataclass(frozen=True)
class Fault:
    """In `file`, `old` becomes `new`; the cases of `ops` must see it."""

    name: str
    file: str
    old: str
    new: str
    ops: tuple[str, ...]


TILES, TRITON, ACTIVATIONS = "accel/triton/_tiles.py", "accel/triton/_blocks.py", "accel/triton/_activations.py"
KERNEL_FAULTS = (
    Fault(
        "ties to even by half up",
        TILES,
        "2 * remainder + (code & 1) > (1 << shift)",
        "2 * remainder >= (1 << shift)",
        ELEMENTS,
    ),
    Fault("ties away rounds ties down", TILES, "(2 * remainder >= (1 << shift))", "(2 * remainder > (1 << shift))", BLOCKS),
    Fault("subnormal step one binade off", TILES, "LOWEST << 23)\n", "(LOWEST + 1) << 23)\n", BLOCKS),
    Fault(
        "saturation bound lost",
        TILES,
        "magnitude = tl.minimum(magnitude, MAX_BITS)\n    elif",
        "magnitude = magnitude\n    elif",
        BLOCKS,
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
        "sign = bits_of(quotient) & ~MAGNITUDE",
        "sign = tl.where(code == 0, 0, bits_of(quotient) & ~MAGNITUDE)",
        ("qdq",),
    ),
    Fault(
        "sign of codes from the magnitude",
        TILES,
        "signed = code | ((bits >> SIGN_SHIFT)",
        "signed = code | (((bits & MAGNITUDE) >> SIGN_SHIFT)",
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
        ("dequantize",),
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
        "finite = tl.minimum(amax, INF - 1)",
        "finite = tl.maximum(tl.minimum(amax, INF - 1) - 1, 0)",
        BLOCKS,
    ),
    Fault("even adds half a unit too low", TILES, "1 << (22 - MANTISSA)", "1 << (21 - MANTISSA)", BLOCKS),
    Fault("ceil counts a power of two up", TILES, "(significand > 0x800000)", "(significand >= 0x800000)", BLOCKS),
    Fault("rceil ignores the significand", TILES, "((MAX_BITS & 0x7FFFFF) | 0x800000)", "0x800000", BLOCKS),
    Fault("amax of a subnormal not normalised", TILES, "(normalized >> 23) - 149", "(normalized >> 23) - 148", BLOCKS),
    Fault(
        "reciprocal for a division",
        TRITON,
        "tl.div_rn(one, scale * stored)",
        "tl.div_rn(one, scale) * tl.div_rn(one, stored)",
        BLOCKS,
    ),
    Fault(
        "order of the scale products",
        TRITON,
        "float_of(amax) * (forward * SIXTH)",
        "(float_of(amax) * forward) * SIXTH",
        BLOCKS,
    ),
    Fault("zero scale divides", TRITON, "return tl.where(scale == 0.0, 0.0, inverse)", "return inverse", BLOCKS),
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
        TRITON,
        "% row_blocks)[:, None] * SIZE + k[None, :]",
        "% row_blocks)[:, None] * SIZE + k[None, :] + 1",
        BLOCKS,
    ),
    Fault(
        "missing tail mask",
        TRITON,
        "present = present & (positions(block, k, row_blocks, inner, SIZE) < k_size)\n    x_places",
        "present = present\n    x_places",
        BLOCKS,
    ),
    Fault(
        "random words by block, not by element",
        TRITON,
        "index = lines[:, None] + positions",
        "index = lines[:, None] * 0 + positions",
        BLOCKS,
    ),
    Fault(
        "output rounded by truncation",
        TILES,
        "(bits + 0x7FFF + ((bits >> 16) & 1)) >> 16",
        "bits >> 16",
        ("dequantize", "silu"),
    ),
    Fault("NaN keeps its payload", TILES, "bits = tl.where(x != x, NAN, bits_of(x))", "bits = bits_of(x)", ("exp",)),
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
FAULTS = (*KERNEL_FAULTS, *CORE_FAULTS)


def selected(op: str, all_cases) -> list:
    """Few cases, with the edges in them: what an interpreter runs in seconds."""
    chosen = []
    for case in all_cases(op):
        if op in BLOCKS:
            _, recipe, label = case.id.split("-", 2)
            wanted = label in ("tails-bfloat16", "specials-float32") or (
                recipe in ("ocp", "nvidia", "ocp_even", "ocp_ceil", "ocp_rceil", "ocp_ties_away")
                and label.startswith(("binades-float32", "scale_turns"))
            )
            if wanted and (case.format in ("mxfp4", "mxfp8_e4m3", "nvfp4") or case.format == "mxint8" and recipe == "ocp"):
                chosen.append(case)
        elif (
            not any(words in case.id for words in ("every_b", "every_f", "random"))
            or op == "exp"
            and "random" not in case.id
        ):
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
        for name in [name for name in sys.modules if name.split(".")[0] in (package, "accel")]:
            del sys.modules[name]
        import mxref.registry
        from mxref.comparison import difference
        from mxref.conformance.cases import cases

        mxref.registry.kernel.cache_clear()
        subject = "triton" if package == "accel" else "reference"
        for op in fault.ops:
            for case in selected(op, cases):
                wanted = expected[op, case.id]
                actual = run(case, subject)
                if actual is not None and difference(actual, wanted) is not None:
                    return 1
    return 0


def main() -> int:
    from mxref.conformance.cases import cases

    torch.set_num_threads(1)
    faults = [fault for fault in FAULTS if fault.name in sys.argv[1:] or not sys.argv[1:]]
    ops = dict.fromkeys(op for fault in faults for op in fault.ops)
    expected = {(op, case.id): run(case, "reference") for op in ops for case in selected(op, cases)}
    survivors = 0
    for fault in faults:
        child = os.fork()
        if child == 0:
            try:
                code = attempt(fault, expected)
            except BaseException as failure:
                print(f"{type(failure).__name__}: {failure}", flush=True)
                code = 2
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        caught = code == 1 or code < 0  # a fault that writes out of bounds may end the process by a signal
        verdict = "caught" if caught else "broken" if code else "SURVIVED"
        survivors += verdict != "caught"
        print(f"{verdict:<9} {fault.name}", flush=True)
    return survivors


if __name__ == "__main__":
    sys.exit(main())
