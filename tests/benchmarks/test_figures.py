import math

import pytest

from benchmarks._figures import Figure, fit_line, median_interval


def figure(*values: float, **changes) -> Figure:
    made = Figure("throughput", "here", "a", "speed", "steps/s", "higher", values)
    return made._replace(**changes)


def test_median_and_range_by_hand():
    odd, even = figure(3.0, 1.0, 7.0), figure(4.0, 1.0, 2.0, 8.0)
    assert (odd.median, odd.low, odd.high) == (3.0, 1.0, 7.0)
    assert (even.median, even.low, even.high) == (3.0, 1.0, 8.0)


def test_ratio_is_the_median_of_ratios_per_repeat():
    mine, theirs = figure(10.0, 2.0, 9.0), figure(5.0, 4.0, 3.0, subject="b")
    ratio = mine.over(theirs)
    assert ratio.values == (2.0, 0.5, 3.0)
    assert ratio.median == 2.0  # the ratio of the medians would be 9 / 4
    assert (ratio.subject, ratio.unit) == ("a / b", "x")


def test_ratio_of_unequal_repeats_is_refused():
    with pytest.raises(ValueError, match="3 of a and 2 of b"):
        figure(1.0, 2.0, 3.0).over(figure(1.0, 2.0, subject="b"))


def test_key_tells_points_of_a_curve_apart():
    assert figure(1.0, at=1.0).key != figure(1.0, at=2.0).key
    assert figure(1.0).key == figure(2.0).key
    assert (figure(1.0).label, figure(1.0, at=1280.0).label) == ("a", "a: 1,280")


def test_interval_of_a_median_from_tables_of_the_sign_test():
    # Ranks of the ends for 95 %: 1 and 6 of 6, 2 and 9 of 10, 6 and 15 of 20, 40 and 61 of 100.
    for n, low, high in ((6, 1, 6), (10, 2, 9), (20, 6, 15), (100, 40, 61)):
        values = tuple(float(value) for value in range(n, 0, -1))
        assert median_interval(values) == (low, high)


def test_interval_of_a_median_of_thousands_of_values():
    low, high = median_interval(tuple(map(float, range(1, 2001))))
    assert low + high == 2001.0
    assert abs(low - (1000 - 1.96 * 2000**0.5 / 2)) < 2.0  # the normal approximation


def test_interval_of_a_median_of_few_values_is_their_range():
    assert median_interval((3.0,)) == (3.0, 3.0)
    assert median_interval((3.0, 1.0, 2.0)) == (1.0, 3.0)


def test_line_through_points_on_a_line():
    line = fit_line((1.0, 4.0, 16.0), (5.0, 11.0, 35.0))
    assert math.isclose(line.intercept, 3.0)
    assert math.isclose(line.slope, 2.0)
    assert line.error < 1e-12


def test_error_of_a_line_by_hand():
    # Of the lines through (1, 1), (2, 2) and (3, 4) with weights 1, 1/4, 1/16: slope 8/7 and
    # intercept -1/5, from the normal equations.
    xs, ys = (1.0, 2.0, 3.0), (1.0, 2.0, 4.0)
    line = fit_line(xs, ys)
    weights = [1 / y**2 for y in ys]
    residuals = [line.intercept + line.slope * x - y for x, y in zip(xs, ys, strict=True)]
    # The residuals of a weighted fit are orthogonal to 1 and to x.
    assert abs(sum(w * r for w, r in zip(weights, residuals, strict=True))) < 1e-12
    moments = zip(weights, residuals, xs, strict=True)
    assert abs(sum(w * r * x for w, r, x in moments)) < 1e-12
    assert math.isclose(line.error, max(abs(r) / y for r, y in zip(residuals, ys, strict=True)))
    assert line.error > 0.05
