"""By how much the numbers of a state change, where an episode ends and where it goes on."""

from collections.abc import Sequence
from typing import NamedTuple, final

import numpy as np

_KEPT = 100  # ends; physics states are large
_OFTEN = 0.1  # of the ends
_BEYOND = 0.1  # of the usual range
_ROUNDING = 1e-3  # of the usual change


@final
class Changes(NamedTuple):
    """What the steps of a batch add to each number of a state.

    - `usual`: `[2, numbers]`, the least and the most in steps after which the episode went on;
        `None` if there were none.
    - `at_end`: `[N, numbers]`, in steps that ended an episode (some of them).
    - `leaf`: `[numbers]`, the leaf to which each number belongs.
    """

    usual: np.ndarray | None
    at_end: np.ndarray
    leaf: np.ndarray

    def jump(self, leaves: np.ndarray) -> bool:
        """Whether any number of the chosen leaves (`[leaves]`, bool) leaps where episodes end."""
        chosen = leaves[self.leaf]
        if self.usual is None or not self.at_end.size or not np.any(chosen):
            return bool(self.at_end.size and np.any(chosen))
        (low, high), at_end = self.usual[:, chosen], self.at_end[:, chosen]
        with np.errstate(invalid="ignore"):
            margin = _BEYOND * (high - low) + _ROUNDING * np.maximum(np.abs(low), np.abs(high))
            leaps = (at_end < low - margin) | (at_end > high + margin)
        return bool(np.max(np.mean(leaps, axis=0)) > _OFTEN)


@final
class ChangeRecorder:
    """Collects `Changes` step by step."""

    def __init__(self, start: Sequence[np.ndarray]):
        """`start` are the leaves `[B, ...]` of a batch of states."""
        sizes = [leaf[0].size for leaf in start]
        self._leaf = np.repeat(np.arange(len(sizes)), sizes)
        self._usual: np.ndarray | None = None
        self._at_end: list[np.ndarray] = []

    def add(
        self, before: Sequence[np.ndarray], after: Sequence[np.ndarray], ended: np.ndarray
    ) -> None:
        """One step of the batch, which ended the episodes of `ended`, `[B]`."""
        with np.errstate(invalid="ignore", over="ignore"):
            change = _numbers(after) - _numbers(before)
        missing = _KEPT - len(self._at_end)
        self._at_end += list(change[ended][:missing])
        if np.all(ended):
            return
        going_on = change[~ended]
        ends = np.stack([np.fmin.reduce(going_on), np.fmax.reduce(going_on)])
        if self._usual is not None:
            least, most = np.fmin(ends[0], self._usual[0]), np.fmax(ends[1], self._usual[1])
            ends = np.stack([least, most])
        self._usual = ends

    def changes(self) -> Changes:
        """What was collected."""
        at_end = np.array(self._at_end, np.float64).reshape(-1, len(self._leaf))
        return Changes(self._usual, at_end, self._leaf)


def _numbers(leaves: Sequence[np.ndarray]) -> np.ndarray:
    """All numbers of a batch of states, `[B, numbers]`."""
    rows = [np.real(leaf).astype(np.float64).reshape(len(leaf), -1) for leaf in leaves]
    return np.concatenate(rows, axis=1)
