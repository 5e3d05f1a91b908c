"""Conformance cases by a backend's kernels with nothing compared, to be run under a checker of memory.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \\
        python -m tests.memcheck triton matmul,moe_experts,quantize,dequantize,qdq --seconds 600

Cases of all ops take turns, in a random order that is the same each time, until the time is over. Prints how many ran.
"""

import argparse
import random
import sys
import time
from collections import Counter

import torch
from rich.progress import track

import mxref
from mxref import registry
from mxref.conformance.cases import Case, cases
from mxref.conformance.runner import to_device


def in_turns(ops: list[str]) -> list[Case]:
    """Cases of level 1 that give results, spread evenly by op."""
    placed = []
    for op in ops:
        chosen = [case for case in cases(op, 1) if case.repeats == 1 and case.raises is None]
        random.Random(1).shuffle(chosen)
        placed += [(i / len(chosen), case) for i, case in enumerate(chosen)]
    return [case for _, case in sorted(placed, key=lambda pair: pair[0])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend")
    parser.add_argument("ops", help="joined by commas")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=600, help="begin no case later than this")
    arguments = parser.parse_args()
    chosen, ran = in_turns(arguments.ops.split(",")), Counter()
    end = time.monotonic() + arguments.seconds
    for case in track(chosen, description="cases", disable=not sys.stderr.isatty()):
        if time.monotonic() > end:
            break
        args, kwargs = to_device(case.arguments(), arguments.device)
        with mxref.use(arguments.backend):
            if mxref.explain_dispatch(case.op, *args, **kwargs).refusals:
                ran["refused"] += 1
                continue
            registry.OPS[case.op](*args, **kwargs)
        if arguments.device.startswith("cuda"):
            torch.cuda.synchronize()
        ran[case.op] += 1
    print(f"{sum(ran.values())} of {len(chosen)} cases:", ", ".join(f"{op} {count}" for op, count in ran.items()))


if __name__ == "__main__":
    main()
