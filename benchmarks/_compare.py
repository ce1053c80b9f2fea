"""The regression mode: two files, figure by figure."""

from typing import Literal, NamedTuple

from benchmarks._figures import Figure
from benchmarks._report import Report
from benchmarks._tables import readable, table

Verdict = Literal["same", "better", "worse", "missing"]


class Comparison(NamedTuple):
    """One figure of the old file beside that of the new one.

    `ratio` is new over old, of the medians; `None` where the new file lacks the figure.
    """

    old: Figure
    new: Figure | None
    ratio: float | None
    verdict: Verdict


def compare(old: Report, new: Report, tolerance: float) -> list[Comparison]:
    """Compares every figure of the suites that both files have.

    Figures without a good direction are left out. A figure that the new file lacks counts
    against it.

    **Arguments:**

    - `tolerance`: the change for the worse, as a fraction, that is still taken for noise.

    **Raises:** `ValueError` if the files have no suite in common.
    """
    suites = {figure.suite for figure in old.figures} & {figure.suite for figure in new.figures}
    if not suites:
        raise ValueError("The two files have no suite in common; nothing can be compared.")
    found = {figure.key: figure for figure in new.figures}
    return [
        _compare_one(figure, found.get(figure.key), tolerance)
        for figure in old.figures
        if figure.suite in suites and figure.better != "neither"
    ]


def _compare_one(old: Figure, new: Figure | None, tolerance: float) -> Comparison:
    if new is None:
        return Comparison(old, None, None, "missing")
    if old.median == 0.0:
        ratio = 1.0 if new.median == 0.0 else float("inf")
    else:
        ratio = new.median / old.median
    gain = ratio if old.better == "higher" else 1.0 / max(ratio, 1e-300)
    if gain < 1.0 - tolerance:
        verdict = "worse"
    elif gain > 1.0 / (1.0 - tolerance):
        verdict = "better"
    else:
        verdict = "same"
    return Comparison(old, new, ratio, verdict)


def exit_status(comparisons: list[Comparison]) -> int:
    """1 if anything got worse or went missing."""
    return int(any(item.verdict in ("worse", "missing") for item in comparisons))


def comparison_table(comparisons: list[Comparison]) -> str:
    """The ratios, what got worse first."""
    order = ("worse", "missing", "better", "same")
    rows = [
        (
            item.verdict,
            "-" if item.ratio is None else f"{item.ratio:.2f}",
            readable(item.old.median, item.old.unit),
            "-" if item.new is None else readable(item.new.median, item.new.unit),
            f"{item.old.suite}: {item.old.setting}, {item.old.label}, {item.old.quantity}",
        )
        for item in sorted(comparisons, key=lambda item: order.index(item.verdict))
    ]
    return table(("verdict", "new / old", "old", "new", "figure"), rows)


def machines_differ(old: Report, new: Report) -> str | None:
    """A warning where absolute figures cannot be compared."""
    if old.machine == new.machine:
        return None
    return (
        "The two files come from different machines "
        f"({old.machine.cpu}, {old.machine.device}, and {new.machine.cpu}, {new.machine.device}); "
        "of their figures only the ratios can be compared."
    )
