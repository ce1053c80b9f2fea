"""Plain-text tables that fit a page."""

import enum
import itertools
import re
from collections.abc import Sequence
from typing import TypeAlias, final

_WIDTH = 100
_NARROWEST = 12
_GAP = "  "

Row: TypeAlias = Sequence[Sequence[str]]
"""For each column the lines of its cell."""


@final
class Column(enum.Enum):
    """What is in a column: text that may be broken, words that may not, or numbers."""

    TEXT = enum.auto()
    WORD = enum.auto()
    NUMBER = enum.auto()


def format_table(
    header: Sequence[str],
    rows: Sequence[Row],
    total: Sequence[str],
    columns: Sequence[Column],
) -> str:
    """Aligns a table and breaks long text, so that it takes at most 100 columns.

    It takes more if words and numbers alone are wider than that leaves room for.

    **Arguments:**

    - `header`: the titles of the columns.
    - `rows`: for each row and column the lines of the cell, at least one.
    - `total`: the last row.
    - `columns`: what is in each column.
    """
    table = [[[cell] for cell in header], *rows, [[cell] for cell in total]]
    widths = _fit(table, columns)
    text = [_row_lines(row, widths, columns) for row in table]
    rule = "-" * _total_width(widths)
    blocks = [text[0], [rule], *text[1:-1], [rule], text[-1]]
    return "\n".join(line for block in blocks for line in block)


def _fit(table: Sequence[Row], columns: Sequence[Column]) -> list[int]:
    """The widths of the columns: texts share what is left so that the table is short."""
    widest = [max(len(line) for row in table for line in row[n]) for n in range(len(columns))]
    if _total_width(widest) <= _WIDTH:
        return widest
    is_text = [column is Column.TEXT for column in columns]
    narrowest = [
        min(width, _NARROWEST) if text else width
        for width, text in zip(widest, is_text, strict=True)
    ]
    ranges = [range(low, high + 1) for low, high in zip(narrowest, widest, strict=True)]
    fitting = [
        list(widths) for widths in itertools.product(*ranges) if _total_width(widths) == _WIDTH
    ]
    return min(fitting, key=lambda widths: (_height(table, widths), max(widths)), default=narrowest)


def _height(table: Sequence[Row], widths: Sequence[int]) -> int:
    return sum(
        max(
            sum(len(_broken(line, width)) for line in cell)
            for cell, width in zip(row, widths, strict=True)
        )
        for row in table
    )


def _total_width(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _row_lines(row: Row, widths: Sequence[int], columns: Sequence[Column]) -> list[str]:
    cells = [
        [piece for line in cell for piece in _broken(line, width)]
        for cell, width in zip(row, widths, strict=True)
    ]
    lines = []
    for pieces in itertools.zip_longest(*cells, fillvalue=""):
        padded = [
            piece.rjust(width) if column is Column.NUMBER else piece.ljust(width)
            for piece, width, column in zip(pieces, widths, columns, strict=True)
        ]
        lines.append(_GAP.join(padded).rstrip())
    return lines


def _broken(line: str, width: int) -> list[str]:
    """A line in pieces of at most `width`, broken at dots, keys or spaces, then indented."""
    pieces, indent = [], ""
    while len(indent + line) > width:
        room = width - len(indent)
        breaks = [found.start() for found in re.finditer(r"\.|\['| ", line[: room + 1])]
        cut = max(breaks, default=0) or room
        pieces.append(indent + line[:cut])
        line, indent = line[cut:].lstrip(), "  "
    return [*pieces, indent + line]
