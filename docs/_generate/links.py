"""Whether every link of the built site leads somewhere: pages, files and anchors, without a network.

python -m docs._generate.links docs/_build/html
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse


class Page(HTMLParser):
    """The links and the anchors of one page."""

    def __init__(self, path: Path):
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src") and value and not (tag == "link" and value.startswith("#")):
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


def broken_links(site: Path) -> list[str]:
    """Each link of the site whose page, file or anchor is not there, and each external one that is not https."""
    pages = {path: Page(path) for path in sorted(site.rglob("*.html")) if "_static" not in path.parts}
    broken = []
    for path, page in pages.items():
        for link in page.links:
            target, anchor = urldefrag(link)
            parts = urlparse(target)
            if parts.scheme or parts.netloc:
                ok = parts.scheme in ("https", "data") and bool(parts.netloc or parts.scheme == "data")
            else:
                file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
                ok = file.exists() and (not anchor or file not in pages or unquote(anchor) in pages[file].anchors)
            if not ok:
                broken.append(f"{path.relative_to(site)}: {link}")
    return broken


def main() -> int:
    """Print what is broken; 1 if anything is."""
    site = Path(sys.argv[1]).resolve()
    broken = broken_links(site)
    print("\n".join(broken) or f"links of {len(list(site.rglob('*.html')))} pages: all lead somewhere")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
