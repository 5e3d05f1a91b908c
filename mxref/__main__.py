"""`python -m mxref`, and what the `mxref` command runs."""

import sys


def main() -> None:
    """Run the command line, or say which extra it needs."""
    try:
        from mxref.cli import run
    except ModuleNotFoundError as missing:
        package = (missing.name or "").split(".")[0]
        if package not in ("typer", "rich"):
            raise
        print(f"error: the mxref command needs {package}: pip install 'mxref[cli]'", file=sys.stderr)
        raise SystemExit(2) from None
    run()


if __name__ == "__main__":
    main()
