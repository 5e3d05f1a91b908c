"""Known failures: a text file of one `op id reason` a line; blank lines and lines that begin with `#` say nothing."""

from pathlib import Path


def read_known_failures(path: str | Path) -> dict[tuple[str, str], str]:
    """Reasons by (op, case id). Raises ValueError for a file that cannot be read, a line without a reason or a case listed
    twice."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as refusal:
        raise ValueError(f"known_failures={str(path)!r}: {refusal.strerror}") from refusal
    except UnicodeDecodeError as refusal:
        raise ValueError(
            f"known_failures={str(path)!r}: byte {refusal.start} is not UTF-8: expected a text file"
        ) from refusal
    known: dict[tuple[str, str], str] = {}
    for number, line in enumerate(text.splitlines(), 1):
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
