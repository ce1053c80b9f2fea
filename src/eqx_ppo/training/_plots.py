"""Learning curves of one or several runs, with bands over seeds."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, final

import numpy as np
from jaxtyping import Float

from eqx_ppo._typing import Tree
from eqx_ppo.training._sinks import read_metrics

RunPath: TypeAlias = str | os.PathLike[str]
"""The folder of a run, or the file of metrics in it."""

Band: TypeAlias = Literal["confidence", "range", "none"]
"""What the shaded band over seeds shows; see `LearningCurves`."""

_N_GRID = 400  # points of a curve over seeds whose own points differ
_SUFFIXES = (".png", ".svg", ".pdf")
_LABELS = {
    "total_steps": "environment steps",
    "seconds": "seconds",
    "eval/episode_reward/mean": "return",
    "eval/lifespan/mean": "episode length",
}


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class LearningCurves:
    """How `plot_learning_curves` draws.

    **Arguments:**

    - `metrics`: names of metrics, one panel each.
    - `against`: `"total_steps"` or `"seconds"` on the horizontal axis.
    - `band`: around the mean over the seeds of one label, `"confidence"`: the 95 % interval
        of the mean by Student's t distribution, which takes the values of the seeds at one
        point for normal; `"range"`: from the least to the greatest seed; or `"none"`.
    - `window`: averages over this many successive points of each run, in every panel; for
        metrics that jump from iteration to iteration.
    - `title`: above all panels.

    **Raises:** `ValueError` for anything else.
    """

    metrics: Sequence[str] = ("eval/episode_reward/mean",)
    against: Literal["total_steps", "seconds"] = "total_steps"
    band: Band = "confidence"
    window: int = 1
    title: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.metrics, str):
            object.__setattr__(self, "metrics", (self.metrics,))
        choices = {"against": ("total_steps", "seconds"), "band": ("confidence", "range", "none")}
        for name, allowed in choices.items():
            if vars(self)[name] not in allowed:
                raise ValueError(
                    f"`LearningCurves.{name}` must be one of {allowed}, but got "
                    f"{vars(self)[name]!r}."
                )
        if self.window < 1 or not self.metrics:
            raise ValueError(
                "`LearningCurves` needs a `window` of at least 1 and a name in `metrics`, but "
                f"got window={self.window!r} and metrics={self.metrics!r}."
            )


def plot_learning_curves(
    runs: Sequence[RunPath] | Mapping[str, RunPath | Sequence[RunPath]],
    path: RunPath,
    options: LearningCurves | None = None,
) -> Path:
    """Draws how metrics develop; needs the extra `plots`.

    ```python
    runs = {"PPO": ["runs/a", "runs/b", "runs/c"], "large batch": ["runs/d", "runs/e"]}
    plot_learning_curves(runs, "curves.png", LearningCurves(against="seconds"))
    ```

    A label with several runs (seeds) is drawn as their mean, with a band and the runs
    themselves as thin lines. Where their points differ, each is interpolated linearly. The
    mean goes as far as all of them do: from the latest first point to the earliest last one.

    **Arguments:**

    - `runs`: by label; or a sequence, in which every run is a curve of its own, named after
        its folder.
    - `path`: of the picture, which ends in `.png`, `.svg` or `.pdf`; missing folders are made.
    - `options`: what to draw and how.

    **Returns:** the path of the picture.

    **Raises:** `ValueError` for a run without such a metric, or another kind of picture;
    what `read_metrics` raises; `ImportError` without matplotlib.
    """
    options = LearningCurves() if options is None else options
    path = Path(path)
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"`path` must end in one of {_SUFFIXES}, but got `{path}`.")
    groups = _groups(runs)
    curves = {label: [_read(run, options) for run in members] for label, members in groups.items()}
    return _save(_draw(curves, options), path)


class Curve(NamedTuple):
    """Points of a curve in rising order."""

    x: Float[np.ndarray, " points"]
    y: Float[np.ndarray, " points"]


class Summary(NamedTuple):
    """The mean of several curves at common points, and its band."""

    x: Float[np.ndarray, " points"]
    mean: Float[np.ndarray, " points"]
    low: Float[np.ndarray, " points"]
    high: Float[np.ndarray, " points"]


def summarize_curves(curves: Sequence[Curve], band: Band) -> Summary:
    """The mean of curves and the band around it, where all of them have a value."""
    first = max(curve.x[0] for curve in curves)
    last = min(curve.x[-1] for curve in curves)
    if all(np.array_equal(curve.x, curves[0].x) for curve in curves):
        x = curves[0].x
    elif last < first:
        x = np.zeros(0)
    else:
        x = np.linspace(first, last, _N_GRID)
    values = np.stack([np.interp(x, curve.x, curve.y) for curve in curves])
    mean = values.mean(axis=0)
    if band == "range":
        return Summary(x, mean, values.min(axis=0), values.max(axis=0))
    if band == "none" or len(curves) == 1:
        return Summary(x, mean, mean, mean)
    from scipy.stats import t

    n = len(curves)
    half = t.ppf(0.975, n - 1) * values.std(axis=0, ddof=1) / np.sqrt(n)
    return Summary(x, mean, mean - half, mean + half)


def smoothed(curve: Curve, window: int) -> Curve:
    """Means over `window` successive points, placed at the last of them; fewer at the start."""
    if window == 1:
        return curve
    sums = np.concatenate([[0.0], np.cumsum(curve.y)])
    ends = np.arange(1, len(curve.y) + 1)
    starts = np.maximum(ends - window, 0)
    return Curve(curve.x, (sums[ends] - sums[starts]) / (ends - starts))


def _groups(
    runs: Sequence[RunPath] | Mapping[str, RunPath | Sequence[RunPath]],
) -> dict[str, list[Path]]:
    """The runs of every label."""
    if isinstance(runs, str | os.PathLike) or not runs:
        raise ValueError(
            "`runs` must be a sequence of run folders, or a mapping from labels to them, but got "
            f"`{runs!r}`."
        )
    if not isinstance(runs, Mapping):
        return {label: [run] for label, run in _labeled([Path(run) for run in runs]).items()}
    groups = {}
    for label, members in runs.items():
        alone = isinstance(members, str | os.PathLike)
        groups[label] = [Path(run) for run in ([members] if alone else members)]
        if not groups[label]:
            raise ValueError(f"`runs[{label!r}]` holds no run.")
    return groups


def _labeled(paths: list[Path]) -> dict[str, Path]:
    """Runs by the shortest end of their paths that tells all of them apart."""
    folders = [path.parent if path.suffix == ".jsonl" else path for path in paths]
    parts = [folder.absolute().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        labels = ["/".join(part[-length:]) for part in parts]
        if len(set(labels)) == len(labels):
            return dict(zip(labels, paths, strict=True))
    raise ValueError(f"`runs` names a run twice: {[str(path) for path in paths]}.")


def _read(run: Path, options: LearningCurves) -> dict[str, Curve]:
    """The curves of one run, by metric."""
    columns = read_metrics(run)
    curves = {}
    for metric in options.metrics:
        for name in (metric, options.against):
            if name not in columns or np.isnan(columns[name]).all():
                there = [name for name, values in columns.items() if not np.isnan(values).all()]
                raise ValueError(
                    f"`{run}` has no metric `{name}`. It has {', '.join(sorted(there)) or 'none'}."
                )
        x, y = columns[options.against].astype(np.float64), columns[metric]
        known = ~np.isnan(x) & ~np.isnan(y)
        curves[metric] = smoothed(Curve(x[known], y[known]), options.window)
    return curves


def _draw(curves: dict[str, list[dict[str, Curve]]], options: LearningCurves) -> Tree:
    """A figure with one panel per metric."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            '`plot_learning_curves` needs matplotlib: `pip install "eqx-ppo[plots]"`.'
        ) from error
    n_panels = len(options.metrics)
    n_columns = 2 if n_panels == 4 else min(n_panels, 3)
    n_rows = -(-n_panels // n_columns)
    figure = Figure(figsize=(1.0 + 4.6 * n_columns, 3.6 * n_rows), layout="constrained")
    panels = figure.subplots(n_rows, n_columns, squeeze=False).ravel()
    for panel in panels[n_panels:]:
        panel.remove()
    for panel, metric in zip(panels, options.metrics, strict=False):
        for index, (label, runs) in enumerate(curves.items()):
            _draw_curve(panel, [run[metric] for run in runs], label, f"C{index % 10}", options)
        _dress(panel, metric, options)
    if len(curves) > 1 or len(next(iter(curves.values()))) > 1:
        handles, labels = panels[0].get_legend_handles_labels()
        n_beside = min(len(labels), 2 * n_columns)
        where = "outside lower center"
        figure.legend(handles, labels, loc=where, ncols=n_beside, frameon=False, fontsize=9)
    if options.title is not None:
        figure.suptitle(options.title)
    return figure


def _draw_curve(
    panel: Tree, curves: list[Curve], label: str, color: str, options: LearningCurves
) -> None:
    summary = summarize_curves(curves, options.band)
    few = len(curves[0].x) <= 30
    if len(curves) == 1:
        panel.plot(*curves[0], color=color, label=label, marker="." if few else None)
        return
    for curve in curves:
        panel.plot(*curve, color=color, linewidth=0.7, alpha=0.4)
    panel.fill_between(summary.x, summary.low, summary.high, color=color, alpha=0.2, linewidth=0)
    panel.plot(summary.x, summary.mean, color=color, label=f"{label} ({len(curves)} runs)")


def _dress(panel: Tree, metric: str, options: LearningCurves) -> None:
    """Labels, grid and readable numbers."""
    from matplotlib.ticker import EngFormatter

    panel.set_xlabel(_LABELS[options.against])
    panel.set_ylabel(_LABELS.get(metric, metric))
    if options.against == "total_steps":
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
    panel.margins(x=0.01)
    panel.grid(visible=True, alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)


def _save(figure: Tree, path: Path) -> Path:
    """Writes the picture; the same curves give the same file, whenever they are drawn."""
    import matplotlib as mpl

    path.parent.mkdir(parents=True, exist_ok=True)
    undated = {"Date": None} if path.suffix == ".svg" else None
    with mpl.rc_context({"svg.hashsalt": "eqx-ppo"}):
        figure.savefig(path, dpi=150, metadata=undated)
    return path
