r"""A positive number between two limits, from an unbounded one."""

import math

import jax
from jaxtyping import Array, Float

from eqx_ppo._checks import typed


@typed
def bounded_softplus(
    x: Float[Array, "*axes"], minimum: float, maximum: float = math.inf
) -> Float[Array, "*axes"]:
    r"""A softplus that starts at `minimum` and levels off at `maximum`, elementwise.

    $$y = y_\mathrm{min} + \frac{s}{1 + s / (y_\mathrm{max} - y_\mathrm{min})},
    \qquad s = \log(1 + e^x)$$

    With an infinite `maximum` this is `minimum + softplus(x)`. Unlike a clipped value it has
    a slope above 0 on the way to either limit, so that a parameter which has drifted there
    can return.
    """
    rise = jax.nn.softplus(x)
    return minimum + rise / (1.0 + rise / (maximum - minimum))


def inverse_bounded_softplus(y: float, minimum: float, maximum: float = math.inf) -> float:
    """The `x` at which `bounded_softplus(x, minimum, maximum)` is `y`, between the limits.

    **Raises:** `ValueError` for a `y` that is not strictly between them.
    """
    if not minimum < y < maximum:
        raise ValueError(f"Expected a number between {minimum} and {maximum}, but got {y}.")
    rise = (y - minimum) / (1.0 - (y - minimum) / (maximum - minimum))
    return rise + math.log(-math.expm1(-rise))
