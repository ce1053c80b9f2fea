"""Bounded actions from a beta distribution."""

import math
from typing import final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, Shaped

from eqx_ppo._typing import Metrics
from eqx_ppo.networks._samplers._sampler import (
    ActionDistribution,
    ActionSampler,
    check_entropy_weight,
    split_parameters,
)
from eqx_ppo.ops import beta_entropy, beta_log_likelihood, beta_mode, bounded_softplus

_LOG_2 = math.log(2.0)  # the density on (-1, 1) is half of that on (0, 1)


@final
class Beta(ActionDistribution):
    r"""Independent beta distributions on (-1, 1); the raw value is the logit $u$.

    The action $2 / (1 + e^{-u}) - 1 = \tanh(u / 2)$ may round to a bound; $u$ does not.
    """

    alpha: Float[Array, "B A"]
    beta: Float[Array, "B A"]

    def draw(self, keys: Key[Array, " B"]) -> Float[Array, "B A"]:
        """The difference of the logarithms of two gamma variables."""
        concentrations = jnp.concatenate([self.alpha, self.beta], axis=-1)
        draw = jax.vmap(lambda key, a: jax.random.loggamma(key, a, dtype=jnp.float32))
        log_gammas = draw(keys, jax.lax.stop_gradient(concentrations))
        log_x, log_y = jnp.split(log_gammas, 2, axis=-1)
        return log_x - log_y

    def mode(self) -> Float[Array, "B A"]:
        return beta_mode(self.alpha, self.beta)

    def action(self, raw: Float[Array, "B A"]) -> Float[Array, "B A"]:
        return jnp.tanh(0.5 * raw)

    def log_likelihood(self, raw: Float[Array, "B A"]) -> Float[Array, " B"]:
        return (beta_log_likelihood(raw, self.alpha, self.beta) - _LOG_2).sum(axis=-1)

    def entropy(self) -> Float[Array, " B"]:
        return (beta_entropy(self.alpha, self.beta) + _LOG_2).sum(axis=-1)

    def metrics(self) -> Metrics:
        """Mean and deviation of the action."""
        total = self.alpha + self.beta
        variance = 4.0 * (self.alpha / total) * (self.beta / total) / (total + 1.0)
        return {"mean": (self.alpha - self.beta) / total, "std": jnp.sqrt(variance)}


@final
class BetaSampler(ActionSampler):
    r"""Actions in (-1, 1): a beta distribution stretched over the interval.

    Input `[B, 2 * A]`: what the concentrations $\alpha$, then what $\beta$ come from, each by
    `bounded_softplus(x, min_concentration, max_concentration)`. Output `Sample(action [B, A],
    log_likelihood [B])`, the log-density of the action summed over its features. Always
    float32.

    Unlike a squashed or clipped normal distribution it has no mass piled up at the bounds,
    and a closed-form entropy: log 2 for a uniform action, less otherwise. Concentrations are
    at least 1, because below that the density has a pole at a bound: it has two modes, and
    its log-likelihood, and so the likelihood ratio, has no limit. With `max_concentration` the
    deviation of an action in the middle is at least 0.022 by default, $1 / \sqrt{2 c + 1}$ in
    general (for both concentrations equal to c).

    The logit of the action's place in the interval is the rollout extra: an action that
    rounds to a bound still has its exact log-likelihood. With `inference=True` the action is
    the mode, $(\alpha - \beta) / (\alpha + \beta - 2)$.

    **Source:** Chou, Maturana and Scherer, "Improving stochastic policy gradients in
    continuous control with deep reinforcement learning using the beta distribution" (2017).
    """

    entropy_weight: float
    min_concentration: float
    max_concentration: float
    inference: bool

    def __init__(
        self,
        *,
        entropy_weight: float,
        min_concentration: float = 1.0,
        max_concentration: float = 1e3,
        inference: bool = False,
    ):
        """**Arguments:**

        - `entropy_weight`: weight of the entropy bonus, at least 0.
        - `min_concentration`: at least 1, where the density becomes uniform.
        - `max_concentration`: above the minimum; may be infinite.
        - `inference`: whether to return the mode instead of a sample.
        """
        self.entropy_weight = entropy_weight
        check_entropy_weight(self)
        if not 1 <= min_concentration < max_concentration:
            raise ValueError(
                "`BetaSampler` needs 1 <= min_concentration < max_concentration, but got "
                f"{min_concentration} and {max_concentration}. Below 1 the density has poles at "
                "the bounds."
            )
        self.min_concentration = min_concentration
        self.max_concentration = max_concentration
        self.inference = inference

    @property
    def bounds(self) -> tuple[float, float]:
        """(-1, 1)."""
        return -1.0, 1.0

    def input_size(self, action_size: int) -> int:
        """Two per action."""
        return 2 * action_size

    def distribution(self, x: Shaped[Array, "B ..."]) -> Beta:
        """The concentrations, from the sampler's input."""
        halves = split_parameters(self, x, "two numbers that the concentrations come from")
        low, high = self.min_concentration, self.max_concentration
        return Beta(*(bounded_softplus(half, low, high) for half in halves))
