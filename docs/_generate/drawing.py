"""Pictures as SVG: shapes that follow the theme, and one frame around them.

Coordinates are pixels at full width. A picture shrinks by a tenth at most, so that its text stays readable: on a narrow
screen it scrolls.
"""

from collections.abc import Iterable, Sequence
from html import escape


def figure(caption: str, width: float, height: float, shapes: Iterable[str], grows: float = 1) -> str:
    """A picture with its caption; without blank lines, since one would end it in Markdown.

    `grows`: how much wider it may be where there is room.
    """
    style = f"max-width:{grows * width:.0f}px;min-width:{0.9 * width:.0f}px"
    body = "\n".join(shapes)
    return (
        '<figure class="drawing">\n<div class="drawing-frame">\n'
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" style="{style}" role="img" aria-label="{escape(caption)}">\n'
        f"{body}\n</svg>\n</div>\n<figcaption>{escape(caption)}</figcaption>\n</figure>"
    )


def box(x: float, y: float, width: float, height: float, kind: str, label: str = "") -> str:
    """A rectangle of a kind (`sign`, `exponent`, `mantissa`, `scale`, `element`, `plain`) with a label in its middle."""
    shape = f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'
    return shape + (text(x + width / 2, y + height / 2 + 4.5, label) if label else "")


def text(x: float, y: float, words: str, anchor: str = "middle", kind: str = "label") -> str:
    """Words at a point."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str = "rule") -> str:
    """A straight line."""
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def path(points: Sequence[tuple[float, float]], kind: str) -> str:
    """Points joined by lines."""
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="{kind}" points="{joined}"/>'


def dot(x: float, y: float, kind: str = "dot") -> str:
    """A small disc."""
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3.2"/>'
