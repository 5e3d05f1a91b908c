"""Tables on a phone: one that is too wide for it becomes a list of cards there, one a row, each value below its header.

Sphinx writes the header into every cell, and how many thirds of a card's width it takes; the style sheet does the rest.
"""

import math
from collections.abc import Sequence

PHONE = 340  # pixels of text on a phone that is 390 wide
PADDING, GAP, LETTER = 17, 13, 7.1  # pixels beside a cell's text; between the values of a card; of a letter
LINES, LINES_OF_TWO = 3, 6  # that a cell may take in a table, and in one of two columns
THIRDS = 3  # of a card's width


def letters(cells: Sequence[str], lines: int) -> int:
    """The width that a column needs so that each cell fits into so many lines, and no word is broken."""
    words = max((len(word) for cell in cells for word in cell.replace("-", "- ").split(" ")), default=0)
    return max(words, *(math.ceil(len(cell) / lines) for cell in cells))


def thirds(columns: Sequence[Sequence[str]]) -> list[int] | None:
    """Of each column, its header first: how many thirds of a card it takes. None: the table fits a phone as it is."""
    lines = LINES if len(columns) > 2 else LINES_OF_TWO
    if sum(PADDING + LETTER * letters(column, lines) for column in columns) <= PHONE:
        return None
    taken = [GAP + LETTER * max(map(len, column[1:])) for column in columns]
    return [min(THIRDS, math.ceil(THIRDS * width / PHONE)) for width in taken]


def translator(base: type) -> type:
    """A writer of HTML that marks tables which become cards."""
    from docutils import nodes

    class Cards(base):
        def visit_table(self, node):
            rows = list(node.findall(nodes.row))
            columns = [[cell.astext() for cell in column] for column in zip(*(row.children for row in rows))]
            self.cards = thirds(columns) if columns and all(len(row) == len(columns) for row in rows) else None
            self.headers = [column[0] for column in columns]
            super().visit_table(node)
            if self.cards:
                self.body[-1] = self.body[-1].replace('class="', 'class="cards ', 1)

        def visit_entry(self, node):
            column = node.parent.column
            super().visit_entry(node)
            if self.cards and isinstance(node.parent.parent, nodes.tbody):
                width = self.cards[column] if node.astext() else 0  # an empty cell is left out
                mark = f'<td data-label="{self.attval(self.headers[column])}" data-thirds="{width}"'
                self.body[-1] = self.body[-1].replace("<td", mark, 1)

    return Cards
