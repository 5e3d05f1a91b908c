"""Pictures as SVG: shapes that follow the theme, and one frame around them.

Coordinates are pixels at full width. A drawing shrinks by a tenth at most, so that its text stays readable; one that is
wider than a phone has a second drawing beside it for phones.
"""

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

WIDE, PHONE = 760, 340  # widths of a picture where there is room, and on a phone


class Drawing(NamedTuple):
    """Shapes on a canvas."""

    width: float
    height: float
    shapes: Iterable[str]


def figure(caption: str, *drawings: Drawing, grows: float = 1) -> str:
    """A picture with its caption; without blank lines, since one would end it in Markdown.

    `drawings`: one, or one where there is room and one for phones. `grows`: how much wider it may be where there is room.
    """
    kinds = ("roomy", "phone") if len(drawings) > 1 else ("",)
    body = "\n".join(_svg(caption, drawing, grows, kind) for drawing, kind in zip(drawings, kinds))
    return (
        f'<figure class="drawing">\n<div class="drawing-frame">\n{body}\n</div>\n'
        f"<figcaption>{escape(caption)}</figcaption>\n</figure>"
    )


def _svg(caption: str, drawing: Drawing, grows: float, kind: str) -> str:
    width, height, shapes = drawing
    style = f"max-width:{grows * width:.0f}px;min-width:{0.9 * width:.0f}px"
    body = "\n".join(shapes)
    return (
        f'<svg class="{kind}" viewBox="0 0 {width:.0f} {height:.0f}" style="{style}" role="img" '
        f'aria-label="{escape(caption)}">\n{body}\n</svg>'
    )


def box(x: float, y: float, width: float, height: float, kind: str, label: str = "", words: str = "label") -> str:
    """A rectangle of a kind (`sign`, `exponent`, `mantissa`, `scale`, `element`, `plain`) with a label in its middle.

    `words`: the kind of the label.
    """
    shape = f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'
    return shape + (text(x + width / 2, y + height / 2 + 4.5, label, kind=words) if label else "")


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
