"""Pictures of a report, one file per suite that has something to draw."""

from collections.abc import Callable
from pathlib import Path

from benchmarks._figures import Figure, fit_line
from benchmarks._report import Report
from benchmarks.suites import (
    breakdown,
    compile as compile_suite,
    learning,
    memory,
    scaling,
    throughput as throughput_suite,
)


def draw(report: Report, folder: Path, suffix: str = "svg") -> list[Path]:
    """Writes the pictures into `folder` and returns their paths.

    **Raises:** `ImportError` if matplotlib is not installed.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    drawings: dict[str, Callable] = {
        throughput_suite.SUITE: _throughput,
        breakdown.SUITE: _breakdown,
        compile_suite.SUITE: _compile,
        memory.SUITE: _memory,
        scaling.SUITE: _scaling,
        learning.SUITE: _learning,
    }
    paths = []
    for suite, drawing in drawings.items():
        figures = [figure for figure in report.figures if figure.suite == suite]
        picture = drawing(figures) if figures else None
        if picture is not None:
            paths.append(_save(picture, folder / f"{suite}.{suffix}"))
    return paths


def _save(picture, path: Path) -> Path:
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, bbox_inches="tight", dpi=150, metadata=_no_date(path))
    plt.close(picture)
    return path


def _no_date(path: Path) -> dict[str, None] | None:
    """The same figures give the same SVG, whenever it is drawn."""
    return {"Date": None} if path.suffix == ".svg" else None


def _throughput(figures: list[Figure]):
    bars = [figure for figure in figures if figure.unit == "steps/s"]
    return _bars_per_setting(bars, "environment steps per second")


def _compile(figures: list[Figure]):
    chosen = [f for f in figures if f.quantity == compile_suite.FIRST and f.unit == "s"]
    return _bars_per_setting(chosen, compile_suite.FIRST)


def _memory(figures: list[Figure]):
    chosen = [f for f in figures if f.unit == "bytes" and f.quantity == memory.PEAK]
    scaled = [f._replace(values=tuple(value / 1e6 for value in f.values)) for f in chosen]
    return _bars_per_setting(scaled, f"{memory.PEAK} (MB)")


def _bars_per_setting(figures: list[Figure], label: str):
    """One panel per setting, one bar per peer, with the range of the repeats; or `None`."""
    import matplotlib.pyplot as plt

    settings = list(dict.fromkeys(figure.setting for figure in figures))
    if not settings:
        return None  # no peer ran
    picture, panels = plt.subplots(
        1, len(settings), figsize=(3.2 * len(settings), 3.2), squeeze=False
    )
    for panel, setting in zip(panels[0], settings, strict=True):
        mine = [figure for figure in figures if figure.setting == setting]
        medians = [figure.median for figure in mine]
        ranges = [
            [figure.median - figure.low for figure in mine],
            [figure.high - figure.median for figure in mine],
        ]
        colors = [f"C{index}" for index in range(len(mine))]
        panel.bar([f.subject for f in mine], medians, yerr=ranges, capsize=4, color=colors)
        panel.set_title(setting, fontsize=9)
    panels[0][0].set_ylabel(label)
    return picture


def _breakdown(figures: list[Figure]):
    """Per setting: the parts on top of each other, beside the floor and the whole.

    The rollout contains the environment, the policy and the bootstrap.
    """
    import matplotlib.pyplot as plt

    columns = {
        "training": ("training",),
        "parts": ("rollout", "advantages", "update", "statistics"),
        "floor": ("env", "products: rollout", "products: bootstrap", "products: update"),
    }
    timed = {(f.setting, f.subject): f for f in figures if f.quantity == breakdown.SECONDS}
    settings = list(dict.fromkeys(figure.setting for figure in figures))
    picture, panels = plt.subplots(
        1, len(settings), figsize=(3.4 * len(settings), 3.6), squeeze=False
    )
    colors: dict[str, str] = {}
    for panel, setting in zip(panels[0], settings, strict=True):
        for column, parts in columns.items():
            bottom = 0.0
            for part in parts:
                color = colors.setdefault(part, f"C{len(colors)}")
                height = 1e3 * timed[setting, part].median
                panel.bar(column, height, bottom=bottom, color=color, label=part)
                bottom += height
        panel.set_title(setting, fontsize=9)
    panels[0][0].set_ylabel("ms per iteration")
    panels[0][-1].legend(*_unique_labels(panels[0][-1]), fontsize=7, bbox_to_anchor=(1.02, 1))
    return picture


def _unique_labels(panel) -> tuple[list, list[str]]:
    handles, labels = panel.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    return list(unique.values()), list(unique)


def _scaling(figures: list[Figure]):
    """Time and memory against size on logarithmic axes, with the fitted straight line."""
    import matplotlib.pyplot as plt

    axes = list(dict.fromkeys((figure.setting, figure.subject) for figure in figures))
    quantities = {scaling.SECONDS: 1.0, scaling.TEMPORARIES: 1e6}
    picture, panels = plt.subplots(
        len(quantities), len(axes), figsize=(3 * len(axes), 5.6), squeeze=False
    )
    for row, (quantity, unit) in zip(panels, quantities.items(), strict=True):
        for panel, (setting, subject) in zip(row, axes, strict=True):
            chosen = [
                f
                for f in figures
                if (f.setting, f.subject, f.quantity) == (setting, subject, quantity)
            ]
            sizes = [f.at for f in chosen if f.at is not None]
            values = [f.median / unit for f in chosen]
            line = fit_line(tuple(sizes), tuple(values))
            panel.loglog(sizes, values, "o")
            curve = [min(sizes) * (max(sizes) / min(sizes)) ** (step / 50) for step in range(51)]
            panel.loglog(curve, [line.intercept + line.slope * x for x in curve], color="gray")
            panel.set_xticks(sizes, [f"{size:g}" for size in sizes])
            panel.minorticks_off()
            panel.set_title(f"within {line.error:.0%} of a line", fontsize=9)
            panel.set_xlabel(subject)
        row[0].set_ylabel(quantity if unit == 1.0 else f"{quantity} (MB)")
    picture.tight_layout()
    return picture


def _learning(figures: list[Figure]):
    """Median return and the range over seeds, against steps and against median seconds."""
    import matplotlib.pyplot as plt

    settings = list(dict.fromkeys(figure.setting for figure in figures))
    picture, panels = plt.subplots(
        2, len(settings), figsize=(4 * len(settings), 6.4), squeeze=False
    )
    for column, setting in enumerate(settings):
        mine = [figure for figure in figures if figure.setting == setting]
        for name in dict.fromkeys(figure.subject for figure in mine):
            returns = [f for f in mine if (f.subject, f.quantity) == (name, learning.RETURN)]
            seconds = [f for f in mine if (f.subject, f.quantity) == (name, learning.SECONDS)]
            for panel, xs in (
                (panels[0][column], [figure.at for figure in returns]),
                (panels[1][column], [figure.median for figure in seconds]),
            ):
                panel.plot(xs, [figure.median for figure in returns], label=name)
                lows, highs = [f.low for f in returns], [f.high for f in returns]
                panel.fill_between(xs, lows, highs, alpha=0.2)
        panels[0][column].set_title(setting, fontsize=9)
        panels[0][column].set_xlabel("environment steps")
        panels[1][column].set_xlabel("seconds, everything included")
    panels[0][0].set_ylabel("return")
    panels[1][0].set_ylabel("return")
    panels[0][0].legend()
    picture.tight_layout()
    return picture
