"""Unbounded actions from a normal distribution."""

from typing import final

import jax.numpy as jnp
from jaxtyping import Array, Float, Key, Shaped

from eqx_ppo._typing import Metrics
from eqx_ppo.networks._errors import check_features
from eqx_ppo.networks._samplers._sampler import (
    ActionDistribution,
    ActionSampler,
    check_action_size,
    check_entropy_weight,
)
from eqx_ppo.networks._samplers._tanh_normal import normal_noise
from eqx_ppo.ops import (
    bounded_softplus,
    inverse_bounded_softplus,
    normal_entropy,
    normal_log_likelihood,
)


@final
class Normal(ActionDistribution):
    """A diagonal normal distribution; the raw value is the action."""

    mean: Float[Array, "B A"]
    std: Float[Array, "B A"]

    def draw(self, keys: Key[Array, " B"]) -> Float[Array, "B A"]:
        return self.mean + self.std * normal_noise(keys, self.mean)

    def mode(self) -> Float[Array, "B A"]:
        return self.mean

    def action(self, raw: Float[Array, "B A"]) -> Float[Array, "B A"]:
        return raw

    def log_likelihood(self, raw: Float[Array, "B A"]) -> Float[Array, " B"]:
        return normal_log_likelihood(raw, self.mean, self.std).sum(axis=-1)

    def entropy(self) -> Float[Array, " B"]:
        return normal_entropy(self.std).sum(axis=-1)

    def metrics(self) -> Metrics:
        return {"mean": self.mean, "std": self.std}


@final
class NormalSampler(ActionSampler):
    r"""Unbounded actions: a diagonal normal distribution whose deviation is a parameter.

    Input `[B, A]`, the means. The deviations are the same in every state: a trained field of
    this module, `std = bounded_softplus(pre_std, min_std, max_std)`, which lies between the two
    limits whatever the optimizer does. Output `Sample(action [B, A], log_likelihood [B])`.
    Always float32.

    The action is the rollout extra. Its entropy, $\tfrac{1}{2} \log(2 \pi e \sigma^2)$ summed
    over the features, grows with the deviation for ever; `max_std` is what stops an entropy
    bonus from widening the policy without end. With `inference=True` the action is the mean.
    """

    pre_std: Float[Array, " A"]
    entropy_weight: float
    min_std: float
    max_std: float
    inference: bool

    def __init__(
        self,
        action_size: int,
        *,
        entropy_weight: float,
        initial_std: float = 1.0,
        min_std: float = 1e-1,
        max_std: float = 10.0,
        inference: bool = False,
    ):
        """**Arguments:**

        - `action_size`: the number of features A, at least 1.
        - `entropy_weight`: weight of the entropy bonus, at least 0.
        - `initial_std`: the deviation to begin with, between the limits.
        - `min_std`, `max_std`: the limits of the deviation, `0 < min_std < max_std`; the
            upper one may be infinite.
        - `inference`: whether to return the mean instead of a sample.
        """
        self.entropy_weight = entropy_weight
        check_entropy_weight(self)
        if action_size < 1 or not 0 < min_std < initial_std < max_std:
            raise ValueError(
                "`NormalSampler` needs action_size >= 1 and 0 < min_std < initial_std < max_std, "
                f"but got {action_size}, and {min_std}, {initial_std} and {max_std}."
            )
        pre_std = inverse_bounded_softplus(initial_std, min_std, max_std)
        self.pre_std = jnp.full(action_size, pre_std, jnp.float32)
        self.min_std = min_std
        self.max_std = max_std
        self.inference = inference

    @property
    def bounds(self) -> None:
        """`None`: every number is possible."""
        return

    def input_size(self, action_size: int) -> int:
        """One per action."""
        check_action_size(self, action_size, self.pre_std.shape[0], "one deviation for each")
        return action_size

    def distribution(self, x: Shaped[Array, "B ..."]) -> Normal:
        """The distribution around the means `x`."""
        check_features(self, x, self.pre_std.shape)
        mean = x.astype(jnp.float32)
        std = bounded_softplus(self.pre_std, self.min_std, self.max_std)
        return Normal(mean, jnp.broadcast_to(std, mean.shape))
