"""What a conformance run found, as frozen records that print and that write JSON."""

import datetime
import importlib.metadata
import json
import platform
import subprocess
from dataclasses import asdict, dataclass
from functools import cached_property

import torch

SHOWN = 20


@dataclass(frozen=True)
class Failure:
    """What differed, and the command that repeats it."""

    difference: str
    repeat: str


@dataclass(frozen=True)
class Outcome:
    """One case: passed unless it was refused (with a reason) or failed."""

    op: str
    id: str
    format: str
    dtype: str
    refused: str | None = None
    failure: Failure | None = None


@dataclass(frozen=True)
class ConformanceRow:
    """Counts of one op, format and dtype; `reasons` are those of the refusals."""

    op: str
    format: str
    dtype: str
    passed: int
    failed: int
    refused: int
    reasons: tuple[str, ...]


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

    @property
    def passed(self) -> int:
        return len(self.outcomes) - self.failed - self.refused

    @property
    def failed(self) -> int:
        return sum(outcome.failure is not None for outcome in self.outcomes)

    @property
    def refused(self) -> int:
        return sum(outcome.refused is not None for outcome in self.outcomes)

    @cached_property
    def rows(self) -> tuple[ConformanceRow, ...]:
        """One row an op, format and dtype, in the order of the cases."""
        groups: dict[tuple[str, str, str], list[Outcome]] = {}
        for outcome in self.outcomes:
            groups.setdefault((outcome.op, outcome.format, outcome.dtype), []).append(outcome)
        return tuple(
            ConformanceRow(
                *key,
                passed=sum(o.refused is None and o.failure is None for o in group),
                failed=sum(o.failure is not None for o in group),
                refused=sum(o.refused is not None for o in group),
                reasons=tuple(sorted({o.refused for o in group if o.refused is not None})),
            )
            for key, group in groups.items()
        )

    def record(self) -> dict:
        """Where it ran, the counts, a row an op, format and dtype, and every failure, as plain dicts and lists."""
        record = {name: value for name, value in asdict(self).items() if name != "outcomes"}
        record |= {"passed": self.passed, "failed": self.failed, "refused": self.refused}
        record["rows"] = [asdict(row) for row in self.rows]
        record["failures"] = [{"op": o.op, "id": o.id, **asdict(o.failure)} for o in self.outcomes if o.failure]
        return record

    def to_json(self) -> str:
        """The record as JSON text."""
        return json.dumps(self.record(), indent=1) + "\n"

    def __str__(self) -> str:
        lines = [f"{self.backend} on {self.device}, torch {self.torch}, triton {self.triton}, level {self.level}"]
        ops = list(dict.fromkeys(row.op for row in self.rows))
        for op in ops:
            rows = [row for row in self.rows if row.op == op]
            passed, failed, refused = (sum(getattr(r, n) for r in rows) for n in ("passed", "failed", "refused"))
            lines.append(f"{op:<12} {passed:>5} passed {failed:>5} failed {refused:>5} refused")
        reasons = sorted({reason for row in self.rows for reason in row.reasons})
        lines += [f"refused: {reason}" for reason in reasons]
        failures = [o for o in self.outcomes if o.failure]
        for outcome in failures[:SHOWN]:
            lines += [f"FAILED {outcome.op} {outcome.id}", outcome.failure.difference, f"again: {outcome.failure.repeat}"]
        if len(failures) > SHOWN:
            lines.append(f"... and {len(failures) - SHOWN} more failures")
        lines.append(f"{self.passed} passed, {self.failed} failed, {self.refused} refused")
        return "\n".join(lines)


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
