"""The largest error of every activation against float64, in units in the last place of float32.

    python -m tests.function_accuracy --json benchmarks/results/function-accuracy.json

Inputs: every finite bfloat16, and a million random float32 of each sign, log-uniform in magnitude, where the exact
result is a normal float32. Beside it, how many of the 65,280 finite bfloat16 inputs give another bfloat16 than the
exact result rounds to. float64 is good for about 2^-50 of the result, which is 2^-26 of the unit that is counted.
"""

import argparse
import json
from collections.abc import Callable

import numpy as np
import torch

from mxref import functions
from mxref.conformance.report import environment


def _sigmoid(x: np.ndarray) -> np.ndarray:
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e, 1.0) / (1.0 + e)


EXACT: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "exp": np.exp,
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "gelu_tanh": lambda x: x * _sigmoid(1.5957691 * (x + 0.044715 * x**3)),
    "relu2": lambda x: np.maximum(x, 0.0) ** 2,
}


def finite_bfloat16() -> np.ndarray:
    patterns = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)
    return patterns[np.isfinite(patterns)]


def largest_error(name: str, x: np.ndarray) -> tuple[float, float]:
    """(units in the last place, where), over the inputs whose exact result is a normal float32."""
    with np.errstate(all="ignore"):
        exact = EXACT[name](x.astype(np.float64))
        normal = (np.abs(exact) >= 2.0**-126) & (np.abs(exact) <= np.finfo(np.float32).max)
        x, exact = x[normal], exact[normal]
        ours = getattr(functions, name)(torch.from_numpy(x)).numpy().astype(np.float64)
        errors = np.abs(ours - exact) / np.ldexp(1.0, np.frexp(exact)[1] - 24)
    worst = int(errors.argmax())
    return float(errors[worst]), float(x[worst])


def wrong_bfloat16(name: str) -> int:
    """Finite bfloat16 inputs whose result is not the exact one rounded once to bfloat16."""
    x = finite_bfloat16()
    with np.errstate(all="ignore"):
        exact = torch.from_numpy(EXACT[name](x.astype(np.float64)))
    # float64 to bfloat16 in one rounding: to odd in float32 first
    narrow = exact.float()
    bits = narrow.view(torch.int32)
    inexact = (narrow.double() != exact) & narrow.isfinite()
    toward = torch.where(narrow.double().abs() > exact.abs(), bits - 1, bits)
    odd = torch.where(inexact, toward | 1, bits).view(torch.float32)
    ours = getattr(functions, name)(torch.from_numpy(x).bfloat16())
    return int((ours.view(torch.int16) != odd.bfloat16().view(torch.int16)).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the record to this file")
    parser.add_argument("--commit", help="the commit to name in the record (default: ask git)")
    arguments = parser.parse_args()
    magnitudes = np.float32(np.exp2(np.random.default_rng(0).uniform(-126, 128, 1_000_000)))
    rows = []
    for name in EXACT:
        row = {"function": name}
        for inputs, x in {
            "bfloat16": finite_bfloat16(),
            "positive float32": magnitudes,
            "negative float32": -magnitudes,
            "float32 in [-88, 88]": np.float32(np.random.default_rng(1).uniform(-88, 88, 1_000_000)),
        }.items():
            row[inputs], row[f"{inputs}, at"] = largest_error(name, x) if name != "relu2" or (x > 0).any() else (0.0, 0.0)
        row["wrong bfloat16"] = wrong_bfloat16(name)
        rows.append(row)
        shown = "  ".join(
            f"{key} {value:.4f}" for key, value in row.items() if isinstance(value, float) and ", at" not in key
        )
        print(f"{name:<10} {shown}  wrong bfloat16 {row['wrong bfloat16']}")
    if arguments.json:
        record = {"what": "largest error in ulp of float32 against float64", **environment("cpu", arguments.commit, "numpy")}
        with open(arguments.json, "w") as file:
            json.dump({**record, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
