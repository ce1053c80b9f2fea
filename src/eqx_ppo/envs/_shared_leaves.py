"""Which leaf of a batched state should have been shared, but is not."""

import bisect
from collections.abc import Callable

import jax

from eqx_ppo._typing import Tree

Axes = list[int | None]
"""For each leaf of a batched state 0, or `None` for one that all environments share."""


def first_dependent(
    mapped: Callable[[Axes], Callable[..., Tree]], axes: Axes, args: tuple[Tree, ...]
) -> int | None:
    """The first leaf without an env axis that a mapped function makes depend on an environment.

    JAX counts the outputs of a mapped function, and names none. Which leaf it is comes out of
    tracing the function with ever fewer leaves that must stay shared.

    **Arguments:**

    - `mapped`: gives the mapped function for the axes of the leaves that it returns.
    - `axes`: of the leaves that it is given.
    - `args`: what it is called with.

    **Returns:** the index of the leaf, or `None` if something else is wrong.
    """
    shared = [index for index, axis in enumerate(axes) if axis is None]

    def is_refused(n_shared: int) -> bool:
        kept = shared[:n_shared]
        out_axes = [None if index in kept else 0 for index in range(len(axes))]
        try:
            jax.eval_shape(mapped(out_axes), *args)
        except ValueError:
            return True
        return False

    if not shared or is_refused(0):
        return None
    first = bisect.bisect_left(range(1, len(shared) + 1), True, key=is_refused)
    return shared[first] if first < len(shared) else None
