r"""The categorical distribution over $n$ choices, on the last axis."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eqx_ppo._checks import typed

IMPOSSIBLE = -1e30
"""Stands for the logarithm of probability 0: its exponential is 0, and 0 times it is 0.

(Minus infinity would make NaN of that product, and of its gradient.)
"""


@typed
def masked_log_probabilities(
    logits: Float[Array, "*axes n"], mask: Bool[Array, "*axes n"] | None = None
) -> Float[Array, "*axes n"]:
    r"""The log-probabilities of $n$ choices, of which only some may be allowed.

    A choice that is not allowed has a probability of exactly 0, a log-probability of about
    -1e30, and no gradient. Where nothing is allowed, all choices are equally likely, whatever
    the logits, and there is no gradient either.

    **Arguments:**

    - `logits`: any numbers; below -1e30, minus infinity included, they count as not allowed.
    - `mask`: true where a choice is allowed; everything is by default.
    """
    logits = jnp.maximum(logits, IMPOSSIBLE)
    allowed = logits if mask is None else jnp.where(mask, logits, IMPOSSIBLE)
    return jax.nn.log_softmax(allowed, axis=-1)


@typed
def categorical_log_likelihood(
    choices: Int[Array, "*axes"], log_probabilities: Float[Array, "*axes n"]
) -> Float[Array, "*axes"]:
    """The log-probability of each choice, an index from 0 to n - 1."""
    indices = jax.lax.broadcasted_iota(
        choices.dtype, log_probabilities.shape, log_probabilities.ndim - 1
    )
    chosen = indices == choices[..., None]
    return jnp.sum(jnp.where(chosen, log_probabilities, 0.0), axis=-1)


@typed
def categorical_entropy(log_probabilities: Float[Array, "*axes n"]) -> Float[Array, "*axes"]:
    r"""The entropy $-\sum_i p_i \log p_i$ in nats, between 0 and $\log n$."""
    return -jnp.sum(jnp.exp(log_probabilities) * log_probabilities, axis=-1)
