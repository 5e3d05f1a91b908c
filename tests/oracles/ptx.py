"""The few PTX instructions that kernels have inline, on numpy arrays of 32-bit registers, after the PTX ISA's own words."""

import re

import numpy as np

WORD = np.uint32(0xFFFFFFFF)


def run(text: str, outputs: int, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """What `text` leaves in $0 ... of `outputs`, given arrays uint32 in the operands behind them."""
    found = {f"${outputs + i}": np.asarray(x, np.uint32) for i, x in enumerate(inputs)}

    def value(name: str) -> np.ndarray:
        return found[name] if name in found else np.uint32(int(name, 0) & 0xFFFFFFFF)

    for line in re.sub(r"\s+", " ", text.strip().strip("{}")).split(";"):
        operation, _, rest = line.strip().partition(" ")
        operands = re.findall(r"\{[^}]*\}|[^\s,]+", rest)
        if operation in ("", ".reg"):
            continue
        target, *names = operands
        if operation == "mov.b32" and target.startswith("{"):  # a register into its halves
            low, high = re.findall(r"[^\s,{}]+", target)
            found[low], found[high] = value(names[0]) & np.uint32(0xFFFF), value(names[0]) >> np.uint32(16)
        elif operation == "mov.b32" and names[0].startswith("{"):  # halves into a register
            low, high = (value(name) for name in re.findall(r"[^\s,{}]+", names[0]))
            found[target] = low | high << np.uint32(16)
        elif operation == "mov.b32":
            found[target] = value(names[0])
        else:
            found[target] = OPERATIONS[operation](*(value(name) for name in names)) & WORD
    return [found[f"${i}"] for i in range(outputs)]


def _prmt(a, b, selector):
    """Bytes picked from a, then b, by four bits each, whose highest would replicate a sign: nobody here asks for that."""
    places = [int(selector) >> (4 * i) & 15 for i in range(4)]
    assert max(places) < 8
    both = np.asarray(a, np.uint64) | np.asarray(b, np.uint64) << np.uint64(32)
    chosen = [(both >> np.uint64(8 * place) & np.uint64(0xFF)) << np.uint64(8 * i) for i, place in enumerate(places)]
    return np.bitwise_or.reduce(chosen).astype(np.uint32)


def _halves(x, dtype):
    return [(x >> np.uint32(shift)).astype(np.uint16).view(dtype) for shift in (0, 16)]


def _multiplied_pairs(a, b):
    """Both float16 halves, each product rounded once to nearest even: float32 holds it exactly."""
    products = [
        (x.astype(np.float32) * y.astype(np.float32)).astype(np.float16).view(np.uint16).astype(np.uint32)
        for x, y in zip(_halves(np.atleast_1d(a), np.float16), _halves(np.atleast_1d(b), np.float16))
    ]
    return products[0] | products[1] << np.uint32(16)


OPERATIONS = {
    "shl.b32": lambda a, by: a << by,
    "shr.b32": lambda a, by: a >> by,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "prmt.b32": _prmt,
    "mul.rn.f16x2": _multiplied_pairs,
}
