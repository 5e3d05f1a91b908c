"""What conformance says of a speed: whether its number may be shown, and with which note. Nothing of it is typed.

A red gate prints no number, here too: none is shown where cases of the op have failed that the format takes part in.
"""

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.records import CONFORMANCE, SPEED, Row, operands
from mxref import registry
from mxref.conformance import cases

FAILED, REFUSED, UNKNOWN, PARTLY, PASSED = "failed", "refused", "no record", "partly refused", "passed"


@dataclass(frozen=True)
class Standing:
    """`outcome`: one of the five above, the first that is true; `words`: counts and reasons; `reasons` of refusals alone."""

    outcome: str
    words: str
    reasons: tuple[str, ...] = ()


def backend_of(row: Row) -> str | None:
    """The backend that a row is a speed of; None for another library's, and for what is no op."""
    named = re.fullmatch(r"mxref (\w+)(, .*)?", row.library)
    return named[1] if named and row.kind == SPEED and base_op(row) in registry.OPS else None


def base_op(row: Row) -> str:
    """The op without what else its row says of it."""
    return row.op.split(",")[0]


def refused_today(op: str, backend: str, format: str) -> str | None:
    """Why the kernel of this very code takes no case of `op` in `format`; None if it takes one, or if there is none."""
    return _refusals(op, backend).get(format)


@functools.cache
def _refusals(op: str, backend: str) -> dict[str, str]:
    """By format, of an op's formats that are refused in every case."""
    try:
        kernel = registry.kernel(op, backend)
    except (ImportError, ValueError):  # what it needs is not installed here, or it is another project's
        return {}
    refused: dict[str, str] = {}
    taken = set()
    for case in cases(op) if kernel else ():
        format = operands(*case.format.split())
        if format in taken or case.raises is not None:
            continue
        args, kwargs = case.arguments()
        why = kernel.accepts(*args, **kwargs)
        if why is None:
            taken.add(format)
            refused.pop(format, None)
        else:
            refused.setdefault(format, why)
    return refused


def standings(rows: Iterable[Row], today: Callable[[str, str, str], str | None] = refused_today) -> dict[int, Standing]:
    """By the number of a row: of each speed of one of mxref's kernels, among the conformance of the same rows.

    The reference is what conformance is measured by, so that without a record of it there is nothing to say.
    """
    rows = list(rows)
    found: dict[tuple, list[Row]] = {}
    for row in rows:
        if row.kind == CONFORMANCE:
            found.setdefault((row.run.machine, row.library, row.op), []).append(row)
    judged = {}
    for i, row in enumerate(rows):
        backend = backend_of(row)
        if backend is not None:
            of_op = found.get((row.run.machine, f"mxref {backend}", base_op(row)), [])
            standing = _standing(row, of_op, today(base_op(row), backend, row.format))
            if standing.outcome != UNKNOWN or backend != "reference":
                judged[i] = standing
    return judged


def _standing(row: Row, of_op: list[Row], refusal: str | None) -> Standing:
    formats = set(row.format.split())
    red = [case for case in of_op if formats & set(case.format.split()) and case.values["failed"] + case.values["known"]]
    if red:
        listed = dict.fromkeys(case.format for case in red)
        count = sum(case.values["failed"] + case.values["known"] for case in red)
        return Standing(FAILED, f"{count} failed: {base_op(row)} of {', '.join(' × '.join(f.split()) for f in listed)}")
    own = [case for case in of_op if case.format == row.format]
    own = [case for case in own if case.dtype == row.dtype] or own
    passed, refused = (sum(case.values[name] for case in own) for name in ("passed", "refused"))
    reasons = tuple(dict.fromkeys(reason for case in own for reason in case.note.split("; ") if reason))
    listed = "; ".join(reasons)
    if refused and not passed:
        return Standing(REFUSED, f"{refused} refused, none passed: {listed}", reasons)
    if refusal is not None:
        return Standing(REFUSED, f"refused by the code that built this page: {refusal}", (refusal,))
    if not own:
        same = "; same bits as the reference in its own run" if row.values.get("same_bits") else ""
        return Standing(UNKNOWN, f"no conformance record on this device{same}")
    if refused:
        return Standing(PARTLY, f"{passed} passed, {refused} refused: {listed}", reasons)
    return Standing(PASSED, f"{passed} passed")
