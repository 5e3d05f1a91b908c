"""What a conformance run found, as frozen records that print and that write JSON."""

import datetime
import importlib.metadata
import json
import platform
import re
import subprocess
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cached_property

import torch

from mxref.conformance.failure import Failure

SHOWN = 3  # cases of a format that are named in a line
KINDS = ("passed", "failed", "known", "refused")


@dataclass(frozen=True)
class Outcome:
    """One case: passed unless it was refused (with a reason) or failed; `known` is the reason of a known failure.

    `left`: it passed since the kernel left a call that must be refused to the reference, which says nothing of the kernel.
    """

    op: str
    id: str
    format: str
    dtype: str
    refused: str | None = None
    failure: Failure | None = None
    known: str | None = None
    left: bool = False

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        if self.failure is not None:
            return "failed" if self.known is None else "known"
        return "passed" if self.refused is None else "refused"


@dataclass(frozen=True)
class ConformanceRow:
    """Counts of one op, format and dtype; `reasons` are those of the refusals, `known_reasons` of the known failures."""

    op: str
    format: str
    dtype: str
    passed: int
    failed: int
    known: int
    refused: int
    reasons: tuple[str, ...]
    known_reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class ConformanceReport:
    """All outcomes of a run, and where it ran."""

    backend: str
    level: int
    outcomes: tuple[Outcome, ...]
    device: str
    torch: str
    triton: str | None
    python: str
    commit: str | None
    date: str

    @cached_property
    def counts(self) -> Counter[str]:
        """How many outcomes there are of each of `KINDS`."""
        return Counter(outcome.kind for outcome in self.outcomes)

    @property
    def passed(self) -> int:
        return self.counts["passed"]

    @property
    def failed(self) -> int:
        return self.counts["failed"]

    @property
    def known(self) -> int:
        return self.counts["known"]

    @property
    def refused(self) -> int:
        return self.counts["refused"]

    @cached_property
    def rows(self) -> tuple[ConformanceRow, ...]:
        """One row an op, format and dtype, in the order of the cases."""
        groups: dict[tuple[str, str, str], list[Outcome]] = {}
        for outcome in self.outcomes:
            groups.setdefault((outcome.op, outcome.format, outcome.dtype), []).append(outcome)
        return tuple(
            ConformanceRow(
                *key,
                **{kind: sum(outcome.kind == kind for outcome in group) for kind in KINDS},
                reasons=tuple(sorted({o.refused for o in group if o.refused is not None})),
                known_reasons=tuple(sorted({o.known for o in group if o.known is not None})),
            )
            for key, group in groups.items()
        )

    def record(self) -> dict:
        """Where it ran, the counts, a row an op, format and dtype, every failure and every known one: dicts and lists."""
        record = {name: value for name, value in asdict(self).items() if name != "outcomes"}
        record |= {kind: self.counts[kind] for kind in KINDS}
        record["rows"] = [asdict(row) for row in self.rows]
        failures = [(o, {"op": o.op, "id": o.id, **asdict(o.failure)}) for o in self.outcomes if o.failure]
        record["failures"] = [facts for o, facts in failures if o.known is None]
        record["known_failures"] = [{**facts, "reason": o.known} for o, facts in failures if o.known is not None]
        return record

    def to_json(self) -> str:
        """The record as JSON text."""
        return json.dumps(self.record(), indent=1) + "\n"

    def __str__(self) -> str:
        lines = [f"{self.backend} on {self.device}, torch {self.torch}, triton {self.triton}, level {self.level}"]
        ops = list(dict.fromkeys(row.op for row in self.rows))
        for op in ops:
            counts = Counter(outcome.kind for outcome in self.outcomes if outcome.op == op)
            lines.append(f"{op:<12} " + " ".join(f"{counts[kind]:>5} {kind}" for kind in KINDS))
        lines += [f"refused: {reason}" for reason in sorted({o.refused for o in self.outcomes if o.refused})]
        lines += [f"known: {o.op} {o.id}: {o.known}" for o in self.outcomes if o.kind == "known"]
        for op in ops:
            lines += _failures(op, [o for o in self.outcomes if o.kind == "failed" and o.op == op])
        lines.append(", ".join(f"{self.counts[kind]} {kind}" for kind in KINDS))
        return "\n".join(lines)


def _failures(op: str, failed: list[Outcome]) -> list[str]:
    """Of an op the first failure in full, since others mostly have its cause; in a line each format and dtype how many,
    those that raised an error apart."""
    groups: dict[tuple[str, str, str], list[Outcome]] = {}
    for outcome in failed:
        raised = re.match(r"it raised \w+|", str(outcome.failure.difference)).group()
        groups.setdefault((outcome.format, outcome.dtype, raised), []).append(outcome)
    lines = [text for first in failed[:1] for text in (f"FAILED {op} {first.id}", str(first.failure))]
    for (format, dtype, _), group in groups.items() if failed[1:] else ():
        ids = ", ".join(outcome.id for outcome in group[:SHOWN]) + (", ..." if group[SHOWN:] else "")
        said = str(group[0].failure.difference).splitlines()[:1]
        count = f"{len(group)} case{'s' if group[1:] else ''}"
        lines.append(f"FAILED {op} {format} {dtype}: {count} ({ids}), the first: {''.join(said)}")
    return lines


def environment(device: str, commit: str | None, *packages: str) -> dict[str, str | None]:
    """Device name, versions, date and commit (`commit`, or what git says about the working tree)."""
    if commit is None:
        asked = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
        commit = asked.stdout.strip() or None
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    return {
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.processor() or device,
        "torch": torch.__version__,
        "triton": triton,
        **{package: importlib.metadata.version(package) for package in packages},
        "python": platform.python_version(),
        "commit": commit,
        "date": datetime.date.today().isoformat(),
    }
