"""Action samplers: from distribution parameters to an action and its log-likelihood.

The rollout stores the sample in `rollout_extras`; the replay reads it back and evaluates it
under the current weights.
"""

from typing import NamedTuple, final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from eqx_ppo._typing import Extras
from eqx_ppo.networks._module import (
    RandomModule,
    RandomState,
    StatefulModuleOutput,
    advance,
    draw_keys,
)
from eqx_ppo.ops import tanh_normal_entropy, tanh_normal_log_likelihood, tanh_normal_mode


class Sample(NamedTuple):
    """What a sampler outputs: an action `[B, A]` and its log-likelihood `[B]`."""

    action: Array
    log_likelihood: Array


@final
class NormalTanhSampler(RandomModule):
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

    def __call__(
        self, state: RandomState, x: Shaped[Array, "B ..."], rollout_extras: Extras = None
    ) -> StatefulModuleOutput:
        """Samples in rollout and inference; evaluates the stored sample in replay."""
        mean, std = self.distribution(x)
        pre_tanh = self._sample(state, mean, std) if rollout_extras is None else rollout_extras
        log_likelihood = tanh_normal_log_likelihood(pre_tanh, mean, std).sum(axis=-1)
        entropy = tanh_normal_entropy(mean, std).sum(axis=-1)
        return StatefulModuleOutput(
            output=Sample(tanh_normal_mode(pre_tanh), log_likelihood),
            next_state=advance(state),
            rollout_extras=pre_tanh,
            regularization_loss=-self.entropy_weight * entropy,
            metrics={"mean": mean, "std": std, "entropy": entropy},
        )

    def distribution(
        self, x: Shaped[Array, "B ..."]
    ) -> tuple[Float[Array, "B A"], Float[Array, "B A"]]:
        """The mean and deviation before the squashing, from the sampler's input."""
        if x.ndim != 2 or x.shape[1] % 2 != 0 or x.shape[1] == 0:
            raise ValueError(
                "`NormalTanhSampler` expected an input [B, 2 * A] of means and pre-deviations, "
                f"but got {list(x.shape)}. Give the layer before it 2 outputs per action."
            )
        mean, pre_std = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return mean, (jax.nn.softplus(pre_std) + self.min_std) * self.std_scale

    def _sample(self, state: RandomState, mean: Array, std: Array) -> Array:
        if self.inference:
            return mean
        draw = jax.vmap(lambda key: jax.random.normal(key, mean.shape[1:], jnp.float32))
        return jax.lax.stop_gradient(mean + std * draw(draw_keys(state)))
