"""Running cases: the reference on the CPU says what is right, the subject runs on its device."""

import contextlib
import multiprocessing
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import mxref
from mxref.blocks import BlockTensor
from mxref.comparison import difference
from mxref.conformance.cases import LEVELS, OPS, Case, cases
from mxref.conformance.report import ConformanceReport, Failure, Outcome, environment
from mxref.registry import OPS as REGISTERED
from mxref.registry import REFERENCE, kernels

POISON_BYTES = 64 << 20


def verify(
    backend: str = REFERENCE,
    *,
    ops: Sequence[str] | None = None,
    level: int = 1,
    device: str = "cpu",
    workers: int = 1,
    commit: str | None = None,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> ConformanceReport:
    """Run every case of `ops` (None: all that the backend offers) up to `level` on `device`, and compare all bits.

    Each case runs twice, its memory poisoned before, so that unwritten outputs and chance show. A call that a kernel refuses
    is counted as refused, with its reason; it neither passes nor fails. `workers` processes share the work, since most of it
    is compiling kernels. `commit` is what the record names (None: what git says). `on_progress(op, done, cases)` is called
    as work proceeds. Raises ValueError for unknown names.
    """
    if level not in LEVELS:
        raise ValueError(f"level={level!r}: expected one of {LEVELS}")
    offered = OPS if backend == REFERENCE else [k.op for k in kernels(backend)]
    chosen = list(offered if ops is None else ops)
    for op in chosen:
        if op not in OPS or op not in offered:
            raise ValueError(f"op={op!r}: expected one of {', '.join(op for op in OPS if op in offered)}")
    if workers < 1:
        raise ValueError(f"workers={workers!r}: expected an int >= 1")
    sizes = Counter((case.op, case.format) for op in chosen for case in cases(op, level))
    groups = list(sizes)
    totals = {op: sum(count for (other, _), count in sizes.items() if other == op) for op in chosen}
    run = partial(_run_group, level=level, backend=backend, device=device)
    done: Counter[str] = Counter()
    found = {}
    with contextlib.ExitStack() as stack:
        if workers == 1:
            results = map(run, groups)
        else:
            spawning = multiprocessing.get_context("spawn")
            results = stack.enter_context(spawning.Pool(workers, torch.set_num_threads, (1,))).imap_unordered(run, groups)
        for outcomes in results:
            op = outcomes[0].op
            found[op, outcomes[0].format] = outcomes
            done[op] += len(outcomes)
            if on_progress is not None:
                on_progress(op, done[op], totals[op])
    ordered = tuple(outcome for group in groups for outcome in found[group])
    return ConformanceReport(backend=backend, level=level, outcomes=ordered, **environment(device, commit))


def _run_group(group: tuple[str, str], level: int, backend: str, device: str) -> list[Outcome]:
    """The outcomes of the cases of one op and format."""
    op, format = group
    return [run_case(case, backend, device) for case in cases(op, level) if case.format == format]


def run_case(case: Case, backend: str, device: str) -> Outcome:
    """Run one case and compare."""
    args, kwargs = case.arguments()
    function = REGISTERED[case.op]
    with mxref.use():
        expected = function(*args, **kwargs)
    args, kwargs = to_device(args, device), to_device(kwargs, device)
    with mxref.use(*([] if backend == REFERENCE else [backend])):
        refused = "; ".join(reason for _, reason in mxref.explain_dispatch(case.op, *args, **kwargs).refusals)
        if refused:
            return Outcome(case.op, case.id, case.format, case.dtype, refused=refused)
        found = None
        for _ in range(2):
            poison(device)
            found = found or difference(function(*args, **kwargs), expected)
    failure = None if found is None else Failure(found, _repeat(case, backend, device))
    return Outcome(case.op, case.id, case.format, case.dtype, failure=failure)


def _repeat(case: Case, backend: str, device: str) -> str:
    return f"mxref verify {backend} --device {device} --op {case.op} --case {case.id}"


def to_device(value: Any, device: str) -> Any:
    """The same arguments with every tensor on `device`, strides kept."""
    if isinstance(value, torch.Tensor):
        if value.device == torch.device(device):
            return value
        moved = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return moved.copy_(value)
    if isinstance(value, BlockTensor):
        parts = {name: to_device(getattr(value, name), device) for name in ("codes", "scales", "tensor_scale")}
        return replace(value, **parts)
    if isinstance(value, dict):
        return {name: to_device(item, device) for name, item in value.items()}
    return tuple(to_device(item, device) for item in value) if isinstance(value, tuple) else value


def poison(device: str) -> None:
    """Leave memory of non-zero garbage behind for the next allocations."""
    if device != "cpu":
        torch.full((POISON_BYTES,), 0xAB, dtype=torch.uint8, device=device)
        for size in (1 << 8, 1 << 12, 1 << 16, 1 << 20):
            torch.full((size,), 0xAB, dtype=torch.uint8, device=device)


def find_case(op: str, id: str) -> Case:
    """The case of that id; ValueError if there is none."""
    for case in cases(op, max(LEVELS)):
        if case.id == id:
            return case
    raise ValueError(f"case={id!r}: {op} has no such case")
