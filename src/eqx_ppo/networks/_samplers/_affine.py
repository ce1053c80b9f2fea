"""Actions in the bounds of an environment."""

from collections.abc import Sequence
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Key, Shaped

from eqx_ppo._typing import BatchTree, Metrics, Tree
from eqx_ppo.networks._frozen import Constant
from eqx_ppo.networks._samplers._sampler import (
    ActionDistribution,
    ActionSampler,
    check_action_size,
)


@final
class Affine(ActionDistribution):
    """A distribution over one interval, stretched over another.

    The raw value is that of the distribution within. The ends of both intervals have the shape
    of one action.
    """

    inner: ActionDistribution
    start: Float[Array, "..."]
    stop: Float[Array, "..."]
    low: Float[Array, "..."]
    high: Float[Array, "..."]

    def draw(self, keys: Key[Array, " B"]) -> Shaped[Array, "B ..."]:
        return self.inner.draw(keys)

    def mode(self) -> Shaped[Array, "B ..."]:
        return self.inner.mode()

    def action(self, raw: Shaped[Array, "B ..."]) -> Float[Array, "B ..."]:
        """Clipped, because a product and a sum may round to beyond the bounds."""
        distance = self.inner.action(raw) - self.start[None]
        return jnp.clip(
            self.low[None] + distance * self._scale()[None], self.low[None], self.high[None]
        )

    def log_likelihood(self, raw: Shaped[Array, "B ..."]) -> Float[Array, " B"]:
        return self.inner.log_likelihood(raw) - jnp.sum(jnp.log(self._scale()))

    def entropy(self) -> Float[Array, " B"]:
        return self.inner.entropy() + jnp.sum(jnp.log(self._scale()))

    def metrics(self) -> Metrics:
        """Those of the distribution within."""
        return self.inner.metrics()

    def _scale(self) -> Float[Array, "..."]:
        return (self.high - self.low) / (self.stop - self.start)


@final
class AffineSampler(ActionSampler):
    """Stretches the actions of a bounded sampler over the bounds of an environment.

    ```python
    AffineSampler(NormalTanhSampler(entropy_weight=1e-2), low=-0.4, high=0.4)
    ```

    Takes the input of the sampler within, and hands out actions `[B, A]` in [low, high].
    Log-likelihood and entropy are those of the stretched action: the log of the scale,
    summed over the features, is subtracted from the one and added to the other. Being a
    constant, it changes neither likelihood ratios nor gradients. The bounds are not trained.
    Rollout extra and metrics (but for `entropy`) are those of the sampler within.
    """

    sampler: ActionSampler
    limits: Constant  # low and high, [A] or []
    inference: bool

    def __init__(
        self,
        sampler: ActionSampler,
        low: ArrayLike | Sequence[float],
        high: ArrayLike | Sequence[float],
    ):
        """**Arguments:**

        - `sampler`: a sampler that has `bounds`, such as `NormalTanhSampler` or
            `BetaSampler`. Its entropy weight and its `inference` are taken over.
        - `low`, `high`: the bounds of the actions, finite, `low < high`: numbers, or one for
            each of the A features.
        """
        _bounds_of(sampler)
        self.sampler = sampler
        self.limits = Constant(_limits(low, high))
        self.inference = sampler.inference

    @property
    def entropy_weight(self) -> float:
        """That of the sampler within."""
        return self.sampler.entropy_weight

    @property
    def bounds(self) -> tuple[Array, Array]:
        """`low` and `high`."""
        return self.limits.value

    def input_size(self, action_size: int) -> int:
        """As the sampler within."""
        low, _ = self.limits.value
        if low.ndim == 1:
            check_action_size(self, action_size, low.shape[0], "one pair of bounds for each")
        return self.sampler.input_size(action_size)

    def distribution(self, x: BatchTree) -> Affine:
        """The distribution within, stretched."""
        inner = self.sampler.distribution(x)
        features = jax.eval_shape(lambda: inner.action(inner.mode())).shape[1:]
        low, high = self.limits.value
        if low.ndim == 1 and low.shape != features:
            raise ValueError(
                f"`AffineSampler` has bounds for {low.shape[0]} features, but "
                f"`{type(self.sampler).__name__}` gave actions of shape {features}. Give one "
                "pair of bounds per feature, or one number for all."
            )
        ends = (*_bounds_of(self.sampler), low, high)
        return Affine(inner, *(jnp.broadcast_to(end, features) for end in ends))


def _bounds_of(sampler: ActionSampler) -> tuple[Array, Array]:
    """The bounds of a sampler that must have some."""
    if sampler.bounds is None:
        raise ValueError(
            "`AffineSampler` stretches a bounded interval, but the actions of "
            f"`{type(sampler).__name__}` have no bounds. Use a bounded sampler, such as "
            "`NormalTanhSampler` or `BetaSampler`."
        )
    low, high = sampler.bounds
    return jnp.asarray(low, jnp.float32), jnp.asarray(high, jnp.float32)


def _limits(low: ArrayLike | Sequence[float], high: ArrayLike | Sequence[float]) -> Tree:
    """Both bounds as float32 arrays of one shape, [A] or []."""
    try:
        limits = np.broadcast_arrays(np.asarray(low, np.float32), np.asarray(high, np.float32))
    except ValueError as error:
        raise ValueError(
            "`AffineSampler` needs bounds that are numbers, or one for each feature, but got "
            f"{low} and {high}."
        ) from error
    with np.errstate(all="ignore"):
        width = limits[1] - limits[0]
    if limits[0].ndim > 1 or not np.all(np.isfinite(width) & (width > 0)):
        raise ValueError(
            "`AffineSampler` needs finite bounds with low < high, numbers or one for each "
            f"feature, but got low={low} and high={high}. An environment without bounds takes an "
            "unbounded sampler, such as `NormalSampler`, or limits that you choose."
        )
    return tuple(jnp.asarray(limit) for limit in limits)
