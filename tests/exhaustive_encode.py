"""Level 2: encode every float32 bit pattern in every element format, against an independent encoder.

    python -m tests.exhaustive_encode --device cuda --json benchmarks/results/exhaustive-encode.json

All 2^32 patterns (their magnitudes for e8m0, which has no sign); on finite ones the expected code comes from ml_dtypes
(from numpy's rint and frexp for int8 and e8m0) applied to the value clipped to the format's range. Inf must saturate;
NaN must raise where the format has none and give its NaN code where it has one. Prints the number of differing codes
per format; exit code 1 if there are any.
"""

import argparse
import json
import multiprocessing
import sys
import time

import ml_dtypes
import numpy as np
import torch

import mxref
from mxref.conformance.report import environment

CHUNK = 1 << 24
INF = 0x7F800000
MAGNITUDE = 0x7FFFFFFF
DTYPES = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
LARGEST = {"e2m1": 6.0, "e2m3": 7.5, "e3m2": 28.0, "e4m3": 448.0, "e5m2": 57344.0, "int8": 127 / 64, "e8m0": 2.0**127}
NAN_CODE = {"e4m3": 0x7F, "e5m2": 0x7F, "e8m0": 0xFF}


def patterns(start: int) -> np.ndarray:
    """The `CHUNK` float32 values whose bit patterns start at `start`."""
    return np.arange(start, start + CHUNK, dtype=np.int64).astype(np.uint32).view(np.float32)


def expected_codes(task: tuple[str, int]) -> np.ndarray:
    """Codes of one chunk by the independent encoder; NaN inputs are given code 0 for the formats without NaN."""
    name, start = task
    x = patterns(start)
    nan = np.isnan(x)
    clipped = np.clip(np.where(nan, np.float32(0), x), np.float32(-LARGEST[name]), np.float32(LARGEST[name]))
    if name == "e8m0":  # written out: ml_dtypes rounds ties of powers of two upwards, not to the even code
        fraction, exponent = np.frexp(np.maximum(np.abs(clipped), np.float32(2.0**-127)).astype(np.float64))
        below = exponent + 126  # fraction in [0.5, 1), so the power of two at or below is 2^(exponent - 1)
        codes = (below + ((fraction > 0.75) | ((fraction == 0.75) & (below % 2 == 1)))).clip(0, 254).astype(np.uint8)
    elif name == "int8":
        codes = np.rint(clipped.astype(np.float64) * 64).astype(np.int8).view(np.uint8)
    else:
        codes = clipped.astype(DTYPES[name]).view(np.uint8)
    return np.where(nan, np.uint8(NAN_CODE.get(name, 0)), codes)


def count_differences(name: str, device: str, pool) -> tuple[int, list[str]]:
    """Differing codes over all patterns, and the first few of them."""
    differing, shown = 0, []
    starts = range(0, 1 << 32, CHUNK)
    for start, expected in zip(starts, pool.imap(expected_codes, [(name, start) for start in starts])):
        bits = torch.arange(start, start + CHUNK, dtype=torch.int64, device=device)
        x = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)
        x = x if mxref.ELEMENT_FORMATS[name].signed else x.abs()
        if name not in NAN_CODE:
            x = x.masked_fill(x.isnan(), 0.0)
        actual = mxref.encode(x, name).cpu().numpy()
        wrong = np.flatnonzero(actual != expected)
        differing += len(wrong)
        for i in wrong[: 20 - len(shown)]:
            shown.append(f"0x{start + int(i):08X}: expected 0x{expected[i]:02X}, got 0x{actual[i]:02X}")
    return differing, shown


def nan_raises(name: str, device: str) -> bool:
    """Whether a NaN is refused."""
    try:
        mxref.encode(torch.tensor([float("nan")], device=device), name)
    except ValueError:
        return True
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="where mxref.encode runs (default: cpu)")
    parser.add_argument("--formats", nargs="+", choices=list(LARGEST), default=list(LARGEST))
    parser.add_argument("--json", help="write the record to this file")
    parser.add_argument("--commit", help="the commit to name in the record (default: ask git)")
    arguments = parser.parse_args()
    rows = []
    with multiprocessing.get_context("spawn").Pool() as pool:
        for name in arguments.formats:
            started = time.time()
            differing, shown = count_differences(name, arguments.device, pool)
            refused = nan_raises(name, arguments.device)
            ok = differing == 0 and refused == (name not in NAN_CODE)
            rows.append({"format": name, "patterns": 1 << 32, "differing": differing, "nan_raises": refused, "passed": ok})
            print(f"{name}: {differing} of {1 << 32} differ, NaN {'raises' if refused else 'has a code'}, "
                  f"{time.time() - started:.0f} s", flush=True)  # fmt: skip
            for line in shown:
                print("   ", line)
    record = {
        "what": "encode of all 2^32 float32 patterns against ml_dtypes (int8: numpy rint, e8m0: numpy frexp)",
        **environment(arguments.device, arguments.commit, "ml_dtypes"),
        "rows": rows,
    }
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(record, file, indent=1)
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
