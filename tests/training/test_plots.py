"""Learning curves: what is averaged, where a band comes from, and what a picture holds."""

import re
import sys

import numpy as np
import pytest

from eqx_ppo.training import JSONLinesSink, LearningCurves, RunInfo, plot_learning_curves
from eqx_ppo.training._plots import Curve, _draw, _groups, _labeled, smoothed, summarize_curves

RETURN = "eval/episode_reward/mean"


def curve(x, y):
    return Curve(np.array(x, float), np.array(y, float))


def write_run(folder, points, name=RETURN):
    """A run folder whose metric has values at some steps; others have a loss alone."""
    sink = JSONLinesSink(folder / "metrics.jsonl")
    sink.start(RunInfo(total_steps=100))
    for steps, value in points:
        sink.write({name: value} if value is not None else {"loss": 1.0}, steps)
    sink.close()
    return folder


# --- Numbers --------------------------------------------------------------------------------


def test_interval_of_student():
    """By hand: 1, 2, 6 have mean 3 and deviation sqrt(7); t(0.975, 2) = 4.302653."""
    curves = [curve([0, 10], [value, 2 * value]) for value in (1.0, 2.0, 6.0)]
    summary = summarize_curves(curves, "confidence")
    half = 4.302653 * np.sqrt(7) / np.sqrt(3)
    np.testing.assert_array_equal(summary.x, [0, 10])
    np.testing.assert_allclose(summary.mean, [3, 6])
    np.testing.assert_allclose(summary.low, [3 - half, 6 - 2 * half], rtol=1e-6)
    np.testing.assert_allclose(summary.high, [3 + half, 6 + 2 * half], rtol=1e-6)


def test_range_and_none():
    curves = [curve([0, 10], [value, -value]) for value in (1.0, 2.0, 6.0)]
    summary = summarize_curves(curves, "range")
    np.testing.assert_array_equal(summary.low, [1, -6])
    np.testing.assert_array_equal(summary.high, [6, -1])
    for one in (summarize_curves(curves, "none"), summarize_curves(curves[:1], "confidence")):
        np.testing.assert_array_equal(one.low, one.mean)
        np.testing.assert_array_equal(one.high, one.mean)


def test_points_that_differ_are_interpolated_where_all_have_some():
    """Two straight lines of slopes 1 and 3 on [0, 8] and [2, 10]: mean slope 2 on [2, 8]."""
    curves = [curve([0, 5, 8], [0, 5, 8]), curve([2, 10], [6, 30])]
    summary = summarize_curves(curves, "range")
    assert (summary.x[0], summary.x[-1]) == (2, 8)
    np.testing.assert_allclose(summary.mean, 2 * summary.x)
    np.testing.assert_allclose(summary.low, summary.x)
    apart = summarize_curves([curve([0, 1], [1, 1]), curve([2, 3], [1, 1])], "confidence")
    assert len(apart.x) == 0


def test_smoothing_against_a_loop():
    y = np.array([3.0, 1.0, 4.0, 1.0, 5.0])
    expected = [np.mean(y[max(0, i - 2) : i + 1]) for i in range(5)]
    np.testing.assert_allclose(smoothed(curve(range(5), y), 3).y, expected)
    np.testing.assert_array_equal(smoothed(curve(range(5), y), 1).y, y)


# --- Runs and their names -------------------------------------------------------------------


def test_labels(tmp_path):
    a, b = tmp_path / "x" / "a", tmp_path / "x" / "b" / "metrics.jsonl"
    assert _labeled([a, b]) == {"a": a, "b": b}
    other = tmp_path / "y" / "a"
    assert _labeled([a, other]) == {"x/a": a, "y/a": other}
    assert _groups({"one": str(a), "two": [a, b]}) == {"one": [a], "two": [a, b]}
    with pytest.raises(ValueError, match="names a run twice"):
        _labeled([a, a])
    for nothing in ([], "runs/a", {}):
        with pytest.raises(ValueError, match="must be a sequence of run folders"):
            _groups(nothing)
    with pytest.raises(ValueError, match=r"`runs\['a'\]` holds no run"):
        _groups({"a": []})


def test_options():
    assert LearningCurves(metrics="loss").metrics == ("loss",)
    with pytest.raises(ValueError, match=r"`LearningCurves\.band` must be one of .* got 'std'"):
        LearningCurves(band="std")
    with pytest.raises(ValueError, match=r"`LearningCurves\.against` must be one of"):
        LearningCurves(against="time")
    for options in ({"window": 0}, {"metrics": ()}):
        with pytest.raises(ValueError, match="needs a `window` of at least 1 and a name"):
            LearningCurves(**options)


# --- Pictures -------------------------------------------------------------------------------

POINTS = [(0, 1.0), (50, None), (100, 3.0)]


def test_only_points_with_the_metric_are_drawn(tmp_path):
    """And not zeros or gaps where an iteration logged other things."""
    pytest.importorskip("matplotlib")
    drawn = _draw({"a": [{RETURN: curve([0, 100], [1, 3])}]}, LearningCurves())
    (line,) = drawn.axes[0].lines
    np.testing.assert_array_equal(line.get_xydata(), [[0, 1], [100, 3]])
    assert drawn.axes[0].get_xlabel() == "environment steps"
    assert drawn.axes[0].get_ylabel() == "return"


def test_seeds_share_a_band(tmp_path):
    """Three seeds: three thin lines and their mean, with the range around it."""
    pytest.importorskip("matplotlib")
    runs = [{RETURN: curve([0, 10], [value, value])} for value in (1.0, 2.0, 6.0)]
    alone = [{RETURN: curve([0, 10], [0.0, 0.0])}]
    drawn = _draw({"PPO": runs, "other": alone}, LearningCurves(band="range"))
    panel = drawn.axes[0]
    heights = [line.get_ydata()[0] for line in panel.lines]
    assert heights == [1.0, 2.0, 6.0, 3.0, 0.0]
    band = panel.collections[0].get_datalim(panel.transData)
    assert (band.y0, band.y1) == (1.0, 6.0)
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["PPO (3 runs)", "other"]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture(tmp_path, suffix):
    """A whole one from files; drawn twice, it is the same file."""
    pytest.importorskip("matplotlib")
    runs = {"PPO": [write_run(tmp_path / name, POINTS) for name in "ab"]}
    options = LearningCurves(metrics=(RETURN, "loss"), against="seconds", title="A title")
    paths = [
        plot_learning_curves(runs, tmp_path / folder / f"curves.{suffix}", options)
        for folder in ("one", "two")
    ]
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    assert first.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


def test_what_cannot_be_drawn(tmp_path):
    run = write_run(tmp_path / "a", POINTS)
    with pytest.raises(ValueError, match=re.escape(f"no metric `no`. It has {RETURN}, loss, sec")):
        plot_learning_curves([run], tmp_path / "a.png", LearningCurves(metrics="no"))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "metrics.jsonl").write_text(f'{{"total_steps": 1, "{RETURN}": 2.0}}\n')
    with pytest.raises(ValueError, match=r"no metric `seconds`\. It has eval/"):
        plot_learning_curves(
            [tmp_path / "b"], tmp_path / "a.png", LearningCurves(against="seconds")
        )
    with pytest.raises(ValueError, match=r"must end in one of \('\.png', '\.svg', '\.pdf'\)"):
        plot_learning_curves([run], tmp_path / "a.txt")
    with pytest.raises(FileNotFoundError, match="Give the folder of a run"):
        plot_learning_curves([tmp_path / "c"], tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_without_matplotlib(tmp_path, monkeypatch):
    run = write_run(tmp_path / "a", POINTS)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"needs matplotlib: `pip install \"eqx-ppo\[plots\]\"`"):
        plot_learning_curves([run], tmp_path / "a.png")
