"""The dashboard: one page that shows every record of `benchmarks/results` and fetches nothing.

    python -m benchmarks.dashboard --out docs/_build/dashboard

Writes DIR/index.html, whole or not at all. Exit code 1 if a record cannot be read, if there is none, or if DIR cannot be
written; nothing is written then.
"""

import argparse
import json
import os
import re
import sys
import tempfile
from html import escape
from itertools import takewhile
from pathlib import Path

from benchmarks.dashboard.standing import Standing, standings
from benchmarks.records import CONFORMANCE, NOT_RECORDED, RESULTS, SPEED, History, RecordError, Row, Version, history, load

HERE = Path(__file__).parent
NOT_IN_A_SCRIPT = {ord(character): f"\\u{ord(character):04x}" for character in "<>&"}  # as JSON may write them too
SCRIPTS = ("rows.js", "words.js", "choices.js", "charts.js", "sections.js", "tables.js", "page.js")


def page(rows: tuple[Row, ...], past: History, book: str = "") -> str:
    """The page as text; `book`: where its link to the book leads, no link if empty."""
    text = (HERE / "page.html").read_text(encoding="utf-8")
    link = f'<a href="{escape(book)}">The book of the formats</a>' if book else ""
    parts = {"style": _file("page.css"), "script": "\n".join(map(_file, SCRIPTS)), "data": as_json(rows, past), "book": link}
    return re.sub(r"<!--(\w+)-->", lambda found: parts[found[1]], text)  # in one pass: what is put in is not looked at again


def as_json(rows: tuple[Row, ...], past: History) -> str:
    """What the page's script reads: rows as they are, and of older versions those that the history shows."""
    runs = list(dict.fromkeys(row.run for row in (*rows, *(row for version in past.versions for row in version.rows))))
    number = {run: i for i, run in enumerate(runs)}
    judged = standings(rows)
    data = {
        "runs": [{**vars(run), "versions": ", ".join(map(" ".join, run.versions))} for run in runs],
        "rows": [_plain(row, number, judged.get(i)) for i, row in enumerate(rows)],
        "versions": [
            {
                "record": version.record,
                "commit": version.commit,
                "committed": version.committed,
                "rows": [_plain(row, number, standing) for row, standing in judged_rows],
            }
            for version, judged_rows in zip(past.versions, _judged_then(past.versions, rows))
        ],
        "unread": past.unread,
        "missing": past.missing,
        "unknown": NOT_RECORDED,
    }
    return json.dumps(data, allow_nan=False, separators=(",", ":")).translate(NOT_IN_A_SCRIPT)


def _plain(row: Row, number: dict, standing: Standing | None) -> dict:
    plain = {name: value for name, value in vars(row).items() if value not in ("", ())} | {"run": number[row.run]}
    return plain | ({"standing": vars(standing)} if standing else {})


def _judged_then(versions: tuple[Version, ...], rows: tuple[Row, ...]) -> list[list[tuple[Row, Standing | None]]]:
    """The rows of each version that a history shows, judged by the conformance that stood until the next version of its
    record, or that stands now: `rows`."""
    judged = []
    for i, version in enumerate(versions):
        later = [other.commit for other in versions[i + 1 :] if other.record == version.record]
        known = _before(later[0], versions) if later else rows
        shown = [row for row in version.rows if row.kind in (SPEED, CONFORMANCE)]
        found = standings([*shown, *(row for row in known if row.kind == CONFORMANCE)], today=lambda *_: None)
        judged.append([(row, found.get(n)) for n, row in enumerate(shown)])
    return judged


def _before(commit: str, versions: tuple[Version, ...]) -> list[Row]:
    """The rows of all records as they stood before a commit."""
    records = {version.record: version.rows for version in takewhile(lambda version: version.commit != commit, versions)}
    return [row for rows in records.values() for row in rows]


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
    target = given.out / "index.html"
    try:
        given.out.mkdir(parents=True, exist_ok=True)
        write_whole(target, page(rows, past, given.book))
    except OSError as error:
        print(f"error: --out {given.out}: {error}", file=sys.stderr)
        return 1
    print(f"{target}: {len(rows)} rows, {len(past.versions)} versions of records")
    return 0


def write_whole(path: Path, text: str) -> None:
    """Write a file that is there whole or as it was before: beside its place first, and then moved into it."""
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(beside, 0o644)  # a page is for everyone
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise


if __name__ == "__main__":
    sys.exit(main())
