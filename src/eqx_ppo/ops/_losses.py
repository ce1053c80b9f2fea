"""The terms of the PPO loss, as functions on arrays."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, ScalarLike

from eqx_ppo._checks import typed

LOG_RATIO_LIMIT = 20.0
"""The log-likelihood difference is clamped here, so that its exponential stays finite."""

_RELATIVE_NOISE = 1e-6  # a float32 spread below this share of the mean is rounding error
_ABSOLUTE_NOISE = 1e-8


@typed
def masked_mean(
    values: Float[Array, "*axes"], valid: Bool[Array, "*axes"] | None = None
) -> Float[Array, ""]:
    """The mean over the elements that are `valid` (all if `None`); 0 if there are none."""
    if valid is None:
        return jnp.mean(values)
    count = jnp.maximum(jnp.sum(valid), 1).astype(values.dtype)
    return jnp.sum(jnp.where(valid, values, 0.0)) / count


@typed
def normalize_advantages(
    advantages: Float[Array, "*axes"], valid: Bool[Array, "*axes"] | None = None
) -> Float[Array, "*axes"]:
    """Shifts and scales advantages to mean 0 and standard deviation 1.

    The deviations are centered twice, so that constant advantages of any size give 0 rather
    than the quotient of two rounding errors; a spread below 1e-6 of the mean counts as
    rounding error. One sample gives 0.

    **Arguments:**

    - `advantages`: any shape.
    - `valid`: elements that count; the others are normalized with the same numbers.
    """
    mean = masked_mean(advantages, valid)
    deviations = advantages - mean
    deviations = deviations - masked_mean(deviations, valid)
    spread = jnp.sqrt(masked_mean(jnp.square(deviations), valid))
    return deviations / (jnp.maximum(spread, _RELATIVE_NOISE * jnp.abs(mean)) + _ABSOLUTE_NOISE)


@typed
def likelihood_ratio(
    log_likelihoods: Float[Array, "*axes"], old_log_likelihoods: Float[Array, "*axes"]
) -> Float[Array, "*axes"]:
    r"""$\pi(a \mid s) / \pi_\mathrm{old}(a \mid s)$ from log-likelihoods.

    The difference is clamped at $\pm 20$, so that the ratio and its gradient stay finite.
    """
    log_ratios = log_likelihoods - old_log_likelihoods
    return jnp.exp(jnp.clip(log_ratios, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


@typed
def clipped_surrogate(
    ratios: Float[Array, "*axes"], advantages: Float[Array, "*axes"], clip_range: ScalarLike
) -> Float[Array, "*axes"]:
    r"""The clipped surrogate objective, elementwise: to be maximized.

    $$\min\bigl(\rho A,\; \mathrm{clip}(\rho, 1 - \epsilon, 1 + \epsilon) A\bigr)$$

    **Source:** Schulman et al., "Proximal Policy Optimization Algorithms" (2017), equation 7.
    """
    clipped = jnp.clip(ratios, 1.0 - clip_range, 1.0 + clip_range)
    return jnp.minimum(ratios * advantages, clipped * advantages)


@typed
def squared_value_error(
    values: Float[Array, "*axes"],
    targets: Float[Array, "*axes"],
    old_values: Float[Array, "*axes"],
    clip_range: ScalarLike | None = None,
) -> Float[Array, "*axes"]:
    r"""Half the squared value error, elementwise, with optional value clipping.

    With a `clip_range` the larger of the plain error and that of
    $V_\mathrm{old} + \mathrm{clip}(V - V_\mathrm{old}, -\epsilon, \epsilon)$ counts.

    **Source:** Schulman et al. (2016), as implemented in OpenAI's baselines for clipping.
    """
    error = jnp.square(values - targets)
    if clip_range is not None:
        limit = jnp.asarray(clip_range)
        clipped = old_values + jnp.clip(values - old_values, -limit, limit)
        error = jnp.maximum(error, jnp.square(clipped - targets))
    return 0.5 * error


AdvantageNormalization = Literal["minibatch", "batch", "none"]
"""Over which samples advantages are normalized."""
