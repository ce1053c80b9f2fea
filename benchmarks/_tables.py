"""Figures as a table that reads well on a terminal and is Markdown."""

from collections.abc import Iterable, Sequence

from benchmarks._figures import Figure


def figure_table(figures: Iterable[Figure]) -> str:
    """One row per figure: median, smallest and largest of the repeats."""
    rows = [
        (
            figure.setting,
            figure.label,
            figure.quantity,
            readable(figure.median, figure.unit),
            readable(figure.low, figure.unit),
            readable(figure.high, figure.unit),
        )
        for figure in figures
    ]
    return table(("setting", "subject", "quantity", "median", "min", "max"), rows)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with columns of equal width; all but words are aligned to the right."""
    widths = [max(len(row[index]) for row in (header, *rows)) for index in range(len(header))]
    numeric = [
        bool(rows) and all(row[index][:1].isdigit() or row[index][:1] == "-" for row in rows)
        for index in range(len(header))
    ]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        )
        return f"| {' | '.join(padded)} |"

    rule = (
        "-" * (width - 1) + ":" if right else "-" * width
        for width, right in zip(widths, numeric, strict=True)
    )
    return "\n".join([line(header), f"| {' | '.join(rule)} |", *map(line, rows)])


def readable(value: float, unit: str) -> str:
    """A number with its unit, to three digits or so."""
    if unit == "s" and abs(value) < 1.0:
        return f"{value * 1e3:.3g} ms"
    if unit == "bytes":
        return f"{value / 1e6:,.1f} MB"
    if unit == "x":
        return f"{value:.2f} x"
    digits = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{digits} {unit}".strip()
