"""The dashboard: one page that shows every record of `benchmarks/results` and fetches nothing.

    python -m benchmarks.dashboard --out docs/_build/dashboard

Writes DIR/index.html. Exit code 1 if a record cannot be read; nothing is written then.
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks.records import CONFORMANCE, RESULTS, SPEED, History, RecordError, Row, history, load

HERE = Path(__file__).parent
SCRIPTS = ("rows.js", "choices.js", "charts.js", "sections.js", "tables.js", "page.js")


def page(rows: tuple[Row, ...], past: History, book: str = "") -> str:
    """The page as text; `book`: where its link to the book leads, no link if empty."""
    text = (HERE / "page.html").read_text(encoding="utf-8")
    link = f'<a href="{book}">The book of the formats</a>' if book else ""
    parts = {"style": _file("page.css"), "script": "\n".join(map(_file, SCRIPTS)), "data": as_json(rows, past), "book": link}
    for name, part in parts.items():
        text = text.replace(f"<!--{name}-->", part)
    return text


def as_json(rows: tuple[Row, ...], past: History) -> str:
    """What the page's script reads: rows as they are, and of older versions those that the history shows."""
    runs = list(dict.fromkeys(row.run for row in (*rows, *(row for version in past.versions for row in version.rows))))
    number = {run: i for i, run in enumerate(runs)}
    data = {
        "runs": [{**vars(run), "versions": ", ".join(map(" ".join, run.versions))} for run in runs],
        "rows": [_plain(row, number) for row in rows],
        "versions": [
            {
                "record": version.record,
                "commit": version.commit,
                "committed": version.committed,
                "rows": [_plain(row, number) for row in version.rows if row.kind in (SPEED, CONFORMANCE)],
            }
            for version in past.versions
        ],
        "unread": past.unread,
        "missing": past.missing,
    }
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")


def _plain(row: Row, number: dict) -> dict:
    return {name: value for name, value in vars(row).items() if value not in ("", ())} | {"run": number[row.run]}


def _file(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dashboard", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder for index.html")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="the records (default: %(default)s)")
    parser.add_argument("--book", default="", metavar="HREF", help="where a link to the book leads (default: no link)")
    given = parser.parse_args(arguments)
    if not given.results.is_dir():
        parser.error(f"--results {given.results}: expected a folder of records")
    try:
        rows = load(given.results)
        past = history(given.results)
    except RecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "index.html").write_text(page(rows, past, given.book), encoding="utf-8")
    print(f"{given.out / 'index.html'}: {len(rows)} rows, {len(past.versions)} versions of records")
    return 0


if __name__ == "__main__":
    sys.exit(main())
