"""What actions an environment takes, as data: the adapters say it, `make_sampler` reads it."""

import dataclasses
import math
from typing import TypeAlias, final

import numpy as np
from jaxtyping import ArrayLike

from eqx_ppo._typing import Tree


@final
@dataclasses.dataclass(frozen=True)
class ContinuousActions:
    """A vector of numbers, float32 `[A]`, each within its bounds.

    **Arguments:**

    - `low`, `high`: the bounds, one for each of the A features; infinite where there is none.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.low) != len(self.high):
            raise ValueError(
                "`ContinuousActions` needs as many lower as upper bounds, but got "
                f"{len(self.low)} and {len(self.high)}."
            )

    @property
    def size(self) -> int:
        """The number of features A."""
        return len(self.low)

    @property
    def is_bounded(self) -> bool:
        """Whether every feature has two finite bounds."""
        return all(map(math.isfinite, (*self.low, *self.high)))


@final
@dataclasses.dataclass(frozen=True)
class DiscreteActions:
    """One of `n` choices, an int32 scalar in [0, n)."""

    n: int

    @property
    def size(self) -> int:
        """1: one number."""
        return 1


@final
@dataclasses.dataclass(frozen=True)
class MultiDiscreteActions:
    """Several choices at once, int32 `[K]`; choice k is in [0, sizes[k])."""

    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of choices K."""
        return len(self.sizes)


Actions: TypeAlias = (
    ContinuousActions | DiscreteActions | MultiDiscreteActions | dict[str, "Actions"]
)
"""The actions of an environment: of one kind, or a dictionary by name."""


def action_size(actions: Actions) -> Tree:
    """How many numbers an action has; a dictionary for a dictionary of actions."""
    if isinstance(actions, dict):
        return {name: action_size(part) for name, part in actions.items()}
    return actions.size


def continuous_actions(
    low: ArrayLike, high: ArrayLike, shape: tuple[int, ...]
) -> ContinuousActions:
    """Actions within the bounds of a box, flattened; the bounds as float32 has them.

    A bound that float32 cannot represent is rounded to the inside.
    """

    def rounded(bound, inwards, is_outside):
        exact = np.broadcast_to(np.asarray(bound, np.float64), shape).reshape(-1)
        with np.errstate(over="ignore"):
            near = exact.astype(np.float32)
        near = np.where(is_outside(near, exact), np.nextafter(near, np.float32(inwards)), near)
        return tuple(map(float, near))

    return ContinuousActions(
        rounded(low, np.inf, np.less),
        rounded(high, -np.inf, np.greater),
    )
