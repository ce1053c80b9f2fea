"""Stochastic bottlenecks with a divergence penalty."""

from typing import NamedTuple, final

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from eqx_ppo._tree import merge_time, split_time, tree_where
from eqx_ppo._typing import Extras, KeyLike
from eqx_ppo.networks._errors import check_features
from eqx_ppo.networks._module import (
    RandomModule,
    RandomState,
    StatefulModule,
    StatefulModuleOutput,
    advance,
    draw_keys,
    initial_random_state,
    spread,
)


@final
class VariationalBottleneck(RandomModule):
    r"""A Gaussian latent, sampled with the reparameterization trick.

    Input `[B, 2 * latent_size]`: the means, then the pre-deviations, with
    `std = softplus(pre_std) + min_std`. Output `z = mean + std * noise`, `[B, latent_size]`. The
    penalty is `kl_weight` times the divergence from $N(0, I)$ in nats,

    $$\tfrac{1}{2} \sum_i (\mu_i^2 + \sigma_i^2 - 2 \log \sigma_i - 1).$$

    The noise is drawn again in the replay from the keys in the carry, so the gradient flows
    through the sample. With `inference=True` the output is the mean.

    **Source:** Kingma and Welling, "Auto-Encoding Variational Bayes" (2014), appendix B; Alemi
    et al., "Deep Variational Information Bottleneck" (2017).
    """

    latent_size: int = eqx.field(static=True)
    kl_weight: float
    min_std: float
    inference: bool

    def __init__(
        self,
        latent_size: int,
        *,
        kl_weight: float = 1.0,
        min_std: float = 1e-6,
        inference: bool = False,
    ):
        """**Arguments:**

        - `latent_size`: the number of latents, at least 1.
        - `kl_weight`: weight of the divergence, at least 0.
        - `min_std`: added to the softplus, above 0.
        - `inference`: whether to return the mean instead of a sample.
        """
        _check_settings("VariationalBottleneck", latent_size, min_std, kl_weight=kl_weight)
        self.latent_size = latent_size
        self.kl_weight = kl_weight
        self.min_std = min_std
        self.inference = inference

    def __call__(
        self, state: RandomState, x: Shaped[Array, "B ..."], rollout_extras: Extras = None
    ) -> StatefulModuleOutput:
        """Samples the latent."""
        check_features(self, x, (2 * self.latent_size,))
        latent = _sample(state, x, self.min_std, inference=self.inference)
        return StatefulModuleOutput(
            output=latent.z,
            next_state=advance(state),
            regularization_loss=self.kl_weight * latent.divergence,
            metrics=_metrics(latent),
        )


class AR1State(NamedTuple):
    """Randomness, and the latent of the step before if there was one in this episode."""

    random: RandomState
    previous: Float[Array, "B latent"]
    has_previous: Bool[Array, " B"]


@final
class AR1VariationalBottleneck(StatefulModule):
    r"""A `VariationalBottleneck` that also holds its latent steady over time.

    Adds `ar1_weight` times the mean over latents of $(z_t - z_{t-1})^2$ to the penalty; nothing
    on the first step of an episode.
    """

    latent_size: int = eqx.field(static=True)
    kl_weight: float
    min_std: float
    ar1_weight: float
    backprop_through_time: bool = eqx.field(static=True)
    inference: bool

    def __init__(
        self,
        latent_size: int,
        *,
        kl_weight: float = 1.0,
        min_std: float = 1e-6,
        ar1_weight: float = 1.0,
        backprop_through_time: bool = True,
        inference: bool = False,
    ):
        """**Arguments:** as for `VariationalBottleneck`, and

        - `ar1_weight`: weight of the squared change, at least 0.
        - `backprop_through_time`: whether the change also pulls on the earlier latent; if
            not, its gradient stops there.
        """
        _check_settings(
            "AR1VariationalBottleneck",
            latent_size,
            min_std,
            kl_weight=kl_weight,
            ar1_weight=ar1_weight,
        )
        self.latent_size = latent_size
        self.kl_weight = kl_weight
        self.min_std = min_std
        self.ar1_weight = ar1_weight
        self.backprop_through_time = backprop_through_time
        self.inference = inference

    def initialize_state(self, batch_size: int, *, key: KeyLike) -> AR1State:
        """Fresh keys and no previous latent."""
        return AR1State(
            initial_random_state(batch_size, key),
            jnp.zeros((batch_size, self.latent_size), jnp.float32),
            jnp.zeros(batch_size, jnp.bool_),
        )

    def reset_state(self, prev_state: AR1State) -> AR1State:
        """Forgets the previous latent; the noise stream goes on."""
        return AR1State(
            prev_state.random,
            jnp.zeros_like(prev_state.previous),
            jnp.zeros_like(prev_state.has_previous),
        )

    def __call__(
        self, state: AR1State, x: Shaped[Array, "B ..."], rollout_extras: Extras = None
    ) -> StatefulModuleOutput:
        """Samples the latent and compares it with the one before."""
        check_features(self, x, (2 * self.latent_size,))
        latent = _sample(state.random, x, self.min_std, inference=self.inference)
        change = self._change(latent.z, state.previous, state.has_previous)
        return StatefulModuleOutput(
            output=latent.z,
            next_state=AR1State(advance(state.random), latent.z, jnp.ones_like(state.has_previous)),
            regularization_loss=self._penalty(latent, change),
            metrics={**_metrics(latent), "squared_change": change},
        )

    def unroll(
        self,
        state: AR1State,
        xs: Shaped[Array, "T B ..."],
        done: Bool[Array, "T B"],
        rollout_extras: Extras = None,
    ) -> StatefulModuleOutput:
        """Samples a whole sequence at once: only the comparison looks back, by one step."""
        check_features(self, xs[0], (2 * self.latent_size,))
        length = done.shape[0]
        noise_state = spread(state.random, length)
        latent = _sample(noise_state, merge_time(xs), self.min_std, inference=self.inference)
        latent = split_time(latent, length)
        previous = jnp.concatenate([state.previous[None], latent.z[:-1]])
        has_previous = jnp.concatenate([state.has_previous[None], ~done[:-1]])
        change = self._change(latent.z, previous, has_previous)
        last = AR1State(
            advance(state.random, length), latent.z[-1], jnp.ones_like(state.has_previous)
        )
        return StatefulModuleOutput(
            output=latent.z,
            next_state=tree_where(done[-1], self.reset_state(last), last),
            regularization_loss=self._penalty(latent, change),
            metrics={**_metrics(latent), "squared_change": change},
        )

    def _change(self, z: Array, previous: Array, has_previous: Array) -> Array:
        if not self.backprop_through_time:
            previous = jax.lax.stop_gradient(previous)
        reference = jnp.where(has_previous[..., None], previous, z)
        return jnp.mean(jnp.square(z - reference), axis=-1)

    def _penalty(self, latent: "_Latent", change: Array) -> Array:
        return self.kl_weight * latent.divergence + self.ar1_weight * change


class _Latent(NamedTuple):
    z: Array
    mean: Array
    std: Array
    divergence: Array


def _sample(state: RandomState, x: Array, min_std: float, *, inference: bool) -> _Latent:
    mean, pre_std = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    std = jax.nn.softplus(pre_std) + min_std
    terms = jnp.square(mean) + jnp.square(std) - 2.0 * jnp.log(std) - 1.0
    divergence = 0.5 * jnp.sum(terms, axis=-1)
    if inference:
        return _Latent(mean, mean, std, divergence)
    draw = jax.vmap(lambda key: jax.random.normal(key, mean.shape[1:], jnp.float32))
    return _Latent(mean + std * draw(draw_keys(state)), mean, std, divergence)


def _metrics(latent: _Latent) -> dict[str, Array]:
    return {"mean": latent.mean, "std": latent.std, "kl_divergence": latent.divergence}


def _check_settings(owner: str, latent_size: int, min_std: float, **weights: float) -> None:
    if latent_size < 1 or not min_std > 0:
        raise ValueError(
            f"`{owner}` needs latent_size >= 1 and min_std > 0, but got {latent_size} and "
            f"{min_std}."
        )
    for name, weight in weights.items():
        if not weight >= 0:
            raise ValueError(f"`{owner}` needs {name} >= 0, but got {weight}.")
