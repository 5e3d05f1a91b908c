"""Known failures: a text file of one `op id reason` a line; blank lines and lines that begin with `#` say nothing."""

from pathlib import Path


def read_known_failures(path: str | Path) -> dict[tuple[str, str], str]:
    """Reasons by (op, case id). Raises ValueError for a line without a reason or for a case listed twice."""
    known: dict[tuple[str, str], str] = {}
    for number, line in enumerate(Path(path).read_text(encoding="utf-8-sig").splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        op, *rest = line.split(None, 2)
        if len(rest) < 2:
            raise ValueError(f"{path}, line {number}: {line.strip()!r}: expected the op, the id of a case and a reason")
        case, reason = rest
        if (op, case) in known:
            raise ValueError(f"{path}, line {number}: {op} {case} is listed twice")
        known[op, case] = reason.strip()
    return known
