r"""The normal distribution, elementwise."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from eqx_ppo._checks import typed

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


@typed
def normal_log_likelihood(
    value: Float[Array, "*axes"], mean: Float[Array, "*axes"], std: Float[Array, "*axes"]
) -> Float[Array, "*axes"]:
    r"""The log-density of $N(\mu, \sigma)$ at `value`, elementwise, with $\sigma > 0$."""
    standardized = (value - mean) / std
    return -0.5 * jnp.square(standardized) - jnp.log(std) - _HALF_LOG_2PI


@typed
def normal_entropy(std: Float[Array, "*axes"]) -> Float[Array, "*axes"]:
    r"""The differential entropy $\tfrac{1}{2} \log(2 \pi e \sigma^2)$; may be negative."""
    return 0.5 + _HALF_LOG_2PI + jnp.log(std)
