"""Actions in (-1, 1) from a normal distribution."""

from collections.abc import Iterator
from typing import final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, Shaped

from eqx_ppo._typing import Metrics
from eqx_ppo.networks._samplers._sampler import (
    ActionDistribution,
    ActionSampler,
    split_parameters,
)
from eqx_ppo.ops import tanh_normal_entropy, tanh_normal_log_likelihood, tanh_normal_mode


@final
class TanhNormal(ActionDistribution):
    r"""A diagonal normal distribution squashed by tanh; the raw value is the pre-tanh one.

    `mean, std = distribution` gives the two arrays `[B, A]`.
    """

    mean: Float[Array, "B A"]
    std: Float[Array, "B A"]

    def __iter__(self) -> Iterator[Array]:
        return iter((self.mean, self.std))

    def draw(self, keys: Key[Array, " B"]) -> Float[Array, "B A"]:
        return self.mean + self.std * normal_noise(keys, self.mean)

    def mode(self) -> Float[Array, "B A"]:
        return self.mean

    def action(self, raw: Float[Array, "B A"]) -> Float[Array, "B A"]:
        return tanh_normal_mode(raw)

    def log_likelihood(self, raw: Float[Array, "B A"]) -> Float[Array, " B"]:
        return tanh_normal_log_likelihood(raw, self.mean, self.std).sum(axis=-1)

    def entropy(self) -> Float[Array, " B"]:
        return tanh_normal_entropy(self.mean, self.std).sum(axis=-1)

    def metrics(self) -> Metrics:
        return {"mean": self.mean, "std": self.std}


@final
class NormalTanhSampler(ActionSampler):
    r"""Actions in (-1, 1): a diagonal normal distribution squashed by tanh.

    Input `[B, 2 * A]`: the means, then the pre-deviations, with
    `std = (softplus(pre_std) + min_std) * std_scale`, so the deviation is at least
    `min_std * std_scale` and has no upper bound. Output `Sample(action [B, A],
    log_likelihood [B])`, the log-density of the action summed over its features. Always
    float32.

    The *pre-tanh* action is the rollout extra. The entropy bonus is the penalty
    `-entropy_weight * H`, with the entropy from a deterministic formula
    (`eqx_ppo.ops.tanh_normal_entropy`); the metric `entropy` is H itself, a differential
    entropy in nats, which may be negative.

    With `inference=True` (see `equinox.nn.inference_mode`) the action is $\tanh(\mu)$.
    """

    entropy_weight: float
    min_std: float
    std_scale: float
    inference: bool

    def __init__(
        self,
        *,
        entropy_weight: float,
        min_std: float = 1e-1,
        std_scale: float = 1.0,
        inference: bool = False,
    ):
        """**Arguments:**

        - `entropy_weight`: weight of the entropy bonus, at least 0.
        - `min_std`: added to the softplus, above 0.
        - `std_scale`: factor on the deviation, above 0.
        - `inference`: whether to return the mode instead of a sample.
        """
        if not (entropy_weight >= 0 and min_std > 0 and std_scale > 0):
            raise ValueError(
                "`NormalTanhSampler` needs entropy_weight >= 0, min_std > 0 and std_scale > 0, "
                f"but got {entropy_weight}, {min_std} and {std_scale}."
            )
        self.entropy_weight = entropy_weight
        self.min_std = min_std
        self.std_scale = std_scale
        self.inference = inference

    @property
    def bounds(self) -> tuple[float, float]:
        """(-1, 1)."""
        return -1.0, 1.0

    def input_size(self, action_size: int) -> int:
        """Two per action."""
        return 2 * action_size

    def distribution(self, x: Shaped[Array, "B ..."]) -> TanhNormal:
        """The mean and deviation before the squashing, from the sampler's input."""
        mean, pre_std = split_parameters(self, x, "means and pre-deviations")
        return TanhNormal(mean, (jax.nn.softplus(pre_std) + self.min_std) * self.std_scale)


def normal_noise(keys: Key[Array, " B"], like: Float[Array, "B A"]) -> Float[Array, "B A"]:
    """Standard normal float32 noise in the shape of `like`, one key per environment."""
    return jax.vmap(lambda key: jax.random.normal(key, like.shape[1:], jnp.float32))(keys)
