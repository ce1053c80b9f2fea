"""Epochs of minibatches: from a rollout to new weights."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int32, Key, UInt32

from eqx_ppo._tree import all_finite, all_true, are_finite, stay_finite
from eqx_ppo._typing import Metrics, Tree
from eqx_ppo.algorithms._config import LoggingLevel, PPOConfig
from eqx_ppo.algorithms._loss import (
    Minibatch,
    advantages_and_targets,
    normalized,
    ppo_loss,
)
from eqx_ppo.algorithms._metrics import global_norm
from eqx_ppo.algorithms._transition import Rollout
from eqx_ppo.networks import StatefulModule, trainable


class Updated(NamedTuple):
    """The outcome of all gradient steps on one rollout.

    `metrics` leaves lead with one entry per gradient step.
    """

    network: StatefulModule
    optimizer_state: Tree
    skipped: UInt32[Array, ""]
    metrics: Metrics


def update(
    network: StatefulModule,
    optimizer_state: Tree,
    rollout: Rollout,
    config: PPOConfig,
    optimizer: optax.GradientTransformation,
    key: Key[Array, ""],
) -> Updated:
    """Takes `n_epochs * n_minibatches` gradient steps.

    Only what `trainable(network)` marks is differentiated and updated. A step whose gradient
    is not finite, or would make a weight or the optimizer's state so, changes neither, and is
    counted.
    """
    params, rest = eqx.partition(network, trainable(network))
    samples = _samples(rollout, config)

    def loss_of(params, batch):
        return ppo_loss(eqx.combine(params, rest), batch, config)

    def step(carry, index):
        params, optimizer_state = carry
        grads, metrics = jax.grad(loss_of, has_aux=True)(params, _take(samples, index, config))
        if LoggingLevel.GRAD_NORM in config.logging_level:
            metrics["grad_norm"] = global_norm(grads)
        with jax.numpy_dtype_promotion("standard"):  # optax fails under "strict"
            updates, new_optimizer_state = optimizer.update(grads, optimizer_state, params)
        old = params, optimizer_state
        new = optax.apply_updates(params, updates), new_optimizer_state
        # Nearly always true, and quick. Only if not, the test that forgives what was not finite
        # before.
        clean = all_finite((grads, new))
        finite = jax.lax.cond(
            clean, lambda: clean, lambda: all_true([*are_finite(grads), *stay_finite(new, old)])
        )
        # Not a `where` on each leaf: XLA would copy the whole test into every one of them.
        return jax.lax.cond(finite, lambda: new, lambda: old), (finite, metrics)

    (params, optimizer_state), (finite, metrics) = jax.lax.scan(
        step, (params, optimizer_state), minibatch_indices(config, key)
    )
    skipped = jnp.sum(~finite, dtype=jnp.uint32)
    return Updated(eqx.combine(params, rest), optimizer_state, skipped, metrics)


def minibatch_indices(config: PPOConfig, key: Key[Array, ""]) -> Int32[Array, "updates samples"]:
    """Which samples (environment x segment) each gradient step sees.

    Every epoch is a permutation of all of them, cut into equal minibatches.
    """
    shape = (config.n_epochs, config.n_envs * config.n_segments)
    order = jnp.argsort(jax.random.bits(key, shape, jnp.uint32), axis=1)
    return order.astype(jnp.int32).reshape(config.n_epochs * config.n_minibatches, -1)


def _samples(rollout: Rollout, config: PPOConfig) -> Minibatch:
    """The rollout cut into segments, leaves `[S, L, B, ...]` and `[S, B, ...]`."""
    transitions = rollout.transitions
    advantages = targets = None
    if config.advantages == "rollout":
        output = transitions.network_output
        advantages, targets = advantages_and_targets(transitions, output.value_estimates, config)
        if config.normalize_advantages == "batch":
            advantages = normalized(advantages, transitions.valid, output.log_likelihoods, config)
    transitions, advantages, targets = jax.tree.map(
        lambda leaf: leaf.reshape(config.n_segments, -1, *leaf.shape[1:]),
        (transitions, advantages, targets),
    )
    return Minibatch(transitions, rollout.network_states, rollout.fresh, advantages, targets)


def _take(samples: Minibatch, index: Int32[Array, " M"], config: PPOConfig) -> Minibatch:
    """The minibatch of some samples, numbered segment by segment."""
    segment, env = index // config.n_envs, index % config.n_envs

    def sequence(leaf):
        if config.n_segments == 1:
            return jnp.take(leaf[0], env, axis=1)
        return jnp.swapaxes(leaf[segment, :, env], 0, 1)

    taken = jax.tree.map(sequence, (samples.transitions, samples.advantages, samples.targets))
    state, fresh = jax.tree.map(
        lambda leaf: leaf[segment, env], (samples.network_state, samples.fresh)
    )
    return Minibatch(taken[0], state, fresh, taken[1], taken[2])
