"""Measured figures, and ratios of them."""

import math
import statistics
from typing import Literal, NamedTuple, Self, final


@final
class Figure(NamedTuple):
    """One measured quantity, with the raw value of every repeat.

    - `suite`, `setting`: where it was measured.
    - `subject`: a peer, a part of an iteration, or for a ratio `"A / B"`.
    - `quantity`: what it is, such as `"steps per second"`.
    - `unit`: `"x"` for ratios.
    - `better`: which direction is good; `"neither"` for what is only described (floors,
        sizes given by the workload).
    - `values`: one per repeat.
    - `at`: the abscissa, for figures that form a curve.
    """

    suite: str
    setting: str
    subject: str
    quantity: str
    unit: str
    better: Literal["higher", "lower", "neither"]
    values: tuple[float, ...]
    at: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    @property
    def label(self) -> str:
        """The subject, with the abscissa of a point of a curve."""
        return self.subject if self.at is None else f"{self.subject}: {self.at:,.0f}"

    @property
    def key(self) -> tuple[str, str, str, str, float | None]:
        """What makes two figures the same one in different runs."""
        return self.suite, self.setting, self.subject, self.quantity, self.at

    def over(self, other: Self) -> "Figure":
        """This figure over another, repeat by repeat; its median is the ratio to quote."""
        if len(self.values) != len(other.values):
            raise ValueError(
                "A ratio needs as many repeats of both figures, but got "
                f"{len(self.values)} of {self.subject} and {len(other.values)} of {other.subject}."
            )
        pairs = zip(self.values, other.values, strict=True)
        return self._replace(
            subject=f"{self.subject} / {other.subject}",
            unit="x",
            values=tuple(mine / theirs for mine, theirs in pairs),
        )


def median_interval(values: tuple[float, ...]) -> tuple[float, float]:
    """The ends of a 95 % confidence interval of the median of independent values.

    They are two of the values, as far from both ends as the binomial distribution allows,
    whatever the distribution of the values. Of fewer than six values they are the smallest and
    the largest, and cover less.
    """
    n, rank, outside = len(values), 0, 0
    while True:
        outside += math.comb(n, rank)  # how often at most `rank` values are below the median
        if 40 * outside > 2**n:  # more than 2.5 % on either side
            break
        rank += 1
    ordered, first = sorted(values), max(rank - 1, 0)
    return ordered[first], ordered[n - 1 - first]


@final
class Line(NamedTuple):
    """A least-squares line `intercept + slope * x` through some points.

    - `error`: the largest relative deviation of a point from it.
    """

    intercept: float
    slope: float
    error: float


def fit_line(xs: tuple[float, ...], ys: tuple[float, ...]) -> Line:
    """Fits a line with weights `1 / y^2`, so that small and large points count alike."""
    weights = [1.0 / y**2 for y in ys]
    total = sum(weights)
    x_mean = sum(w * x for w, x in zip(weights, xs, strict=True)) / total
    y_mean = sum(w * y for w, y in zip(weights, ys, strict=True)) / total
    spread = sum(w * (x - x_mean) ** 2 for w, x in zip(weights, xs, strict=True))
    slope = sum(
        w * (x - x_mean) * (y - y_mean) for w, x, y in zip(weights, xs, ys, strict=True)
    ) / max(spread, 1e-300)
    intercept = y_mean - slope * x_mean
    errors = (abs(intercept + slope * x - y) / y for x, y in zip(xs, ys, strict=True))
    return Line(intercept, slope, max(errors))
