r"""The distribution of $a = \tanh(u)$ with $u \sim N(\mu, \sigma^2)$, elementwise.

Everything is written in the pre-tanh value $u$: the density of a rounded, squashed action is
meaningless near the bounds, whereas $u$ stays exact there.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from eqx_ppo._checks import typed
from eqx_ppo.ops._normal import normal_entropy, normal_log_likelihood
from eqx_ppo.ops._quadrature import (
    HERMITE_NODES,
    HERMITE_WEIGHTS,
    SOFTPLUS_NODES,
    SOFTPLUS_WEIGHTS,
)

_LOG_2 = math.log(2.0)
_NARROW_STD = 0.9  # up to here Gauss-Hermite; above, closed form plus fixed Gauss nodes


@typed
def tanh_log_det(pre_tanh: Float[Array, "*axes"]) -> Float[Array, "*axes"]:
    r"""$\log(1 - \tanh^2 u)$, as $2 (\log 2 - u - \mathrm{softplus}(-2u))$.

    Finite, with finite gradients, for any float32 $u$ (-38.6 at 20).
    """
    return 2.0 * (_LOG_2 - pre_tanh - jax.nn.softplus(-2.0 * pre_tanh))


@typed
def tanh_normal_log_likelihood(
    pre_tanh: Float[Array, "*axes"], mean: Float[Array, "*axes"], std: Float[Array, "*axes"]
) -> Float[Array, "*axes"]:
    r"""The log-density of the action $\tanh(u)$, elementwise.

    $$\log p(a) = \log N(u; \mu, \sigma) - \log(1 - \tanh^2 u)$$

    **Arguments:**

    - `pre_tanh`: $u$, the value before the squashing.
    - `mean`, `std`: $\mu$ and $\sigma > 0$ of the normal distribution.

    **Source:** Haarnoja et al., "Soft Actor-Critic" (2018), appendix C.
    """
    return normal_log_likelihood(pre_tanh, mean, std) - tanh_log_det(pre_tanh)


@typed
def tanh_normal_mode(mean: Float[Array, "*axes"]) -> Float[Array, "*axes"]:
    r"""The deterministic action, $\tanh(\mu)$: the median of the distribution.

    (The density's own maximum runs to the bounds for wide distributions; the field calls
    $\tanh(\mu)$ the mode.)
    """
    return jnp.tanh(mean)


@typed
def tanh_normal_entropy(
    mean: Float[Array, "*axes"], std: Float[Array, "*axes"]
) -> Float[Array, "*axes"]:
    r"""The differential entropy of $\tanh(u)$, elementwise; may be negative.

    $$H = \tfrac{1}{2} \log(2 \pi e \sigma^2) + E \log(1 - \tanh^2 u)$$

    Deterministic: for $\sigma \le 0.9$ by 12 Gauss-Hermite nodes; above, from
    $\log(1 - \tanh^2 u) = 2 \log 2 - 2 |u| - 2 \log(1 + e^{-2|u|})$, with $E|u|$ in closed form
    and 8 Gauss nodes for the rest. The error is below 1e-4 for $\sigma$ in [0.01, 10] and $\mu$
    in [-5, 5]. The derivatives come from the same nodes:
    $\partial H / \partial \mu = -2 E \tanh u$ and
    $\partial H / \partial \sigma = 1 / \sigma - 2 E z \tanh u$, with $z = (u - \mu) / \sigma$.
    """
    return _entropy(mean, std)


@jax.custom_jvp
def _entropy(mean, std):
    log_det = jnp.where(
        std <= _NARROW_STD,
        _narrow_log_det(mean, jnp.minimum(std, _NARROW_STD)),
        _wide_log_det(mean, jnp.maximum(std, _NARROW_STD)),
    )
    return normal_entropy(std) + log_det


@_entropy.defjvp
def _entropy_jvp(primals, tangents):
    mean, std = primals
    mean_dot, std_dot = tangents
    narrow = _narrow_tanh_moments(mean, jnp.minimum(std, _NARROW_STD))
    wide = _wide_tanh_moments(mean, jnp.maximum(std, _NARROW_STD))
    tanh, z_tanh = (jnp.where(std <= _NARROW_STD, n, w) for n, w in zip(narrow, wide, strict=True))
    tangent = -2.0 * tanh * mean_dot + (1.0 / std - 2.0 * z_tanh) * std_dot
    return _entropy(mean, std), tangent


def _narrow_log_det(mean, std):
    values = tanh_log_det(mean[..., None] + std[..., None] * _nodes(HERMITE_NODES, mean))
    return jnp.sum(_nodes(HERMITE_WEIGHTS, mean) * values, axis=-1)


def _narrow_tanh_moments(mean, std):
    r"""$E \tanh u$ and $E z \tanh u$ by Gauss-Hermite quadrature."""
    nodes = _nodes(HERMITE_NODES, mean)
    weighted = _nodes(HERMITE_WEIGHTS, mean) * jnp.tanh(mean[..., None] + std[..., None] * nodes)
    return jnp.sum(weighted, axis=-1), jnp.sum(weighted * nodes, axis=-1)


def _wide_log_det(mean, std):
    z = mean / std
    mean_abs = std * _folded_density(z) + mean * jax.lax.erf(z / math.sqrt(2.0))
    below, above, _, _ = _softplus_densities(mean, std)
    remainder = jnp.sum(_nodes(SOFTPLUS_WEIGHTS, mean) * (below + above), axis=-1)
    return 2.0 * (_LOG_2 - mean_abs - remainder)


def _wide_tanh_moments(mean, std):
    """The derivatives of $E|u|$ plus the remainder, by the mean and by the deviation."""
    z = mean / std
    below, above, z_below, z_above = _softplus_densities(mean, std)
    weights = _nodes(SOFTPLUS_WEIGHTS, mean) / std[..., None]
    by_mean = jnp.sum(weights * (below * z_below + above * z_above), axis=-1)
    by_std = jnp.sum(weights * (below * (z_below**2 - 1.0) + above * (z_above**2 - 1.0)), axis=-1)
    return jax.lax.erf(z / math.sqrt(2.0)) + by_mean, _folded_density(z) + by_std


def _folded_density(z):
    return math.sqrt(2.0 / math.pi) * jnp.exp(-0.5 * jnp.square(z))


def _softplus_densities(mean, std):
    """The normal density at minus and plus each node, and the standardized nodes."""
    nodes = _nodes(SOFTPLUS_NODES, mean)
    z_below = (-nodes - mean[..., None]) / std[..., None]
    z_above = (nodes - mean[..., None]) / std[..., None]
    scale = 1.0 / (std[..., None] * math.sqrt(2.0 * math.pi))
    below = scale * jnp.exp(-0.5 * jnp.square(z_below))
    above = scale * jnp.exp(-0.5 * jnp.square(z_above))
    return below, above, z_below, z_above


def _nodes(constants, like):
    """`constants` as the last axis, in the dtype of `like` and with one more axis than it."""
    return jnp.asarray(constants, like.dtype).reshape((1,) * like.ndim + (-1,))
