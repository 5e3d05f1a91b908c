"""A conformance report as one page that needs nothing else: no script, nothing fetched, light or dark as wanted."""

from collections import Counter
from html import escape

from mxref.conformance.report import KINDS, ConformanceReport, ConformanceRow

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --line: #d0d7de; --quiet: #57606a;
  --passed: #dafbe1; --failed: #ffcecb; --known: #fff8c5; --refused: #eaeef2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --line: #30363d; --quiet: #8d96a0;
  --passed: #12361f; --failed: #67060c; --known: #4b3a00; --refused: #21262d; } }
body { font: 1rem/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto; padding: 1rem;
  max-width: 70rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; } dt { color: var(--quiet); } dd { margin: 0; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
th, td { border: 1px solid var(--line); padding: .2rem .5rem; text-align: left; vertical-align: top; white-space: nowrap; }
.passed { background: var(--passed); } .failed { background: var(--failed); font-weight: 600; }
.known { background: var(--known); } .refused { background: var(--refused); }
pre { overflow-x: auto; font-size: .8rem; border: 1px solid var(--line); padding: .5rem; }
summary { cursor: pointer; overflow-wrap: anywhere; }
"""
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
<p>{counts}</p>
<dl>{facts}</dl>
{sections}
</body>
</html>
"""
_WORST_FIRST = ("failed", "known", "refused", "passed")


def html_page(report: ConformanceReport) -> str:
    """The page: where it ran, counts by op, format and dtype, failures with their blocks, refusals with their reasons."""
    facts = {name: getattr(report, name) for name in ("device", "torch", "triton", "python", "commit", "date", "level")}
    sections = [_section("Op, format and dtype", _matrix(report.rows))]
    for kind, heading in (("failed", "Failures"), ("known", "Known failures")):
        found = [o for o in report.outcomes if o.kind == kind]
        sections += [_section(heading, "\n".join(map(_failure, found)))] if found else []
    refused = Counter((o.refused, o.op) for o in report.outcomes if o.kind == "refused")
    if refused:
        rows = [
            f"<tr><td>{escape(op)}</td><td>{n}</td><td>{escape(why)}</td></tr>" for (why, op), n in sorted(refused.items())
        ]
        sections.append(_section("Refusals", _table(["op", "cases", "reason"], rows)))
    return _PAGE.format(
        title=escape(f"{report.backend}: conformance on {report.device}"),
        style=_STYLE,
        counts=", ".join(f"{report.counts[kind]} {kind}" for kind in KINDS),
        facts="".join(f"<dt>{name}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items()),
        sections="\n".join(sections),
    )


def _section(heading: str, body: str) -> str:
    return f"<section><h2>{heading}</h2>\n{body}\n</section>"


def _table(headings: list[str], rows: list[str]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    return f'<div class="wide"><table><tr>{head}</tr>\n{chr(10).join(rows)}\n</table></div>'


def _matrix(rows: tuple[ConformanceRow, ...]) -> str:
    """A line an op and format, a column a dtype."""
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    cells = {(row.op, row.format, row.dtype): _cell(row) for row in rows}
    lines = [
        f"<tr><td>{escape(op)}</td><td>{escape(format)}</td>"
        + "".join(cells.get((op, format, dtype), "<td></td>") for dtype in dtypes)
        + "</tr>"
        for op, format in dict.fromkeys((row.op, row.format) for row in rows)
    ]
    return _table(["op", "format", *dtypes], lines)


def _cell(row: ConformanceRow) -> str:
    """The counts that are not 0, in the colour of the worst."""
    counts = {kind: getattr(row, kind) for kind in _WORST_FIRST if getattr(row, kind)}
    return f'<td class="{next(iter(counts))}">{"<br>".join(f"{count} {kind}" for kind, count in counts.items())}</td>'


def _failure(outcome) -> str:
    reason = "" if outcome.known is None else f": {outcome.known}"
    summary = escape(f"{outcome.op} {outcome.id}{reason}")
    return f"<details><summary>{summary}</summary><pre>{escape(str(outcome.failure))}</pre></details>"
