"""Running mean and variance, merged batch by batch without cancellation or overflow."""

from typing import final

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from eqx_ppo._checks import typed
from eqx_ppo.ops._counter import Counter, add_count, count_as_float, new_counter

_LARGEST = 1e18  # the square of a deviation must fit float32


@final
class Moments(eqx.Module):
    """The mean and population variance of `count` samples, per feature.

    The variance is kept instead of the sum of squared deviations M2 (`variance * count`):
    once `count` exceeds float32's resolution, M2 no longer grows while `count` does, and the
    variance would drift to 0.
    """

    mean: Float[Array, "*feat"]
    variance: Float[Array, "*feat"]
    count: Counter


def new_moments(shape: tuple[int, ...]) -> Moments:
    """The moments of no sample: mean 0, variance 0, count 0."""
    return Moments(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32), new_counter())


@typed
def merge_moments(moments: Moments, samples: Shaped[Array, "N *feat"]) -> Moments:
    """Merges a batch of samples into running moments.

    A sample with a feature that is not finite, or whose square would not be, is left out. The
    batch is centered on its own mean in two passes, and the two sets are merged with the
    weights `n_b / n` as fractions, so that nothing cancels and no product of counts is formed.

    **Arguments:**

    - `moments`: the moments so far.
    - `samples`: one row per sample; integers and booleans are taken as numbers.

    **Raises:** `ValueError` for samples of another feature shape than the moments.

    **Source:** Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for
    Computing Sample Variances" (1979), equations 2.1.
    """
    if samples.shape[1:] != moments.mean.shape:
        raise ValueError(
            f"`merge_moments` got samples of feature shape {samples.shape[1:]} for moments of "
            f"shape {moments.mean.shape}. Give one row of features per sample: [N, *feat]."
        )
    samples = samples.astype(jnp.float32)
    valid = (jnp.abs(samples) < _LARGEST).all(axis=tuple(range(1, samples.ndim)))
    n_batch = jnp.sum(valid)
    mean, variance = _batch_moments(samples, valid)
    count = add_count(moments.count, n_batch)
    weight = n_batch.astype(jnp.float32) / jnp.maximum(count_as_float(count), 1.0)
    delta = mean - moments.mean
    merged_variance = (
        moments.variance
        + weight * (variance - moments.variance)
        + jnp.square(delta) * weight * (1.0 - weight)
    )
    return Moments(
        mean=moments.mean + weight * delta,
        variance=jnp.maximum(merged_variance, 0.0),
        count=count,
    )


def _batch_moments(
    samples: Float[Array, "N *feat"], valid: Bool[Array, " N"]
) -> tuple[Float[Array, "*feat"], Float[Array, "*feat"]]:
    mask = valid.reshape(-1, *(1,) * (samples.ndim - 1))
    n = jnp.maximum(jnp.sum(valid), 1).astype(jnp.float32)

    def mean(values):
        return jnp.sum(jnp.where(mask, values, 0.0), axis=0) / n

    center = mean(samples)
    deviations = samples - center[None]
    correction = mean(deviations)  # what rounding left of the first mean
    variance = mean(jnp.square(deviations - correction[None]))
    return center + correction, variance
