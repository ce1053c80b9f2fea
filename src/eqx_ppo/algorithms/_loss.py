"""The PPO loss of one minibatch."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from eqx_ppo._checks import typed
from eqx_ppo._typing import Metrics, State, Tree
from eqx_ppo.algorithms._config import LoggingLevel, PPOConfig
from eqx_ppo.algorithms._metrics import summarize
from eqx_ppo.algorithms._replay import replay
from eqx_ppo.algorithms._rollout import shift_values
from eqx_ppo.algorithms._transition import Transition
from eqx_ppo.networks import PPONetworkOutput, StatefulModule
from eqx_ppo.ops import (
    clipped_surrogate,
    gae,
    likelihood_ratio,
    masked_mean,
    normalize_advantages,
    squared_value_error,
)


class Minibatch(NamedTuple):
    """Some environments (or segments of them) of a rollout.

    - `transitions`: leaves `[T, B, ...]`.
    - `network_state`, `fresh`: the carry at the first step; see `replay`.
    - `advantages`, `targets`: in the tree of the rewards, `[T, B]`; `None` to compute them
        with the current critic. With `normalize_advantages="batch"` the advantages are
        normalized already, and in the tree of the samplers.
    """

    transitions: Transition
    network_state: State
    fresh: Bool[Array, " B"]
    advantages: Tree = None
    targets: Tree = None


@typed
def ppo_loss(
    network: StatefulModule, batch: Minibatch, config: PPOConfig
) -> tuple[Float[Array, ""], Metrics]:
    r"""The loss that PPO minimizes, and its metrics.

    $$
    L = \sum_k -E[\min(\rho_k A_k, \mathrm{clip}(\rho_k, 1 \pm \epsilon) A_k)]
      + c \sum_r \tfrac{1}{2} E[(V_r - \hat V_r)^2] + E[\mathrm{penalty}],
    $$

    over samplers $k$ and rewards $r$, where the penalty is what the modules return as
    `regularization_loss` (the entropy bonus, with its negative sign, is one of them). Means
    are over valid steps.

    **Arguments:**

    - `network`: with the current weights.
    - `batch`: what to learn from; nothing in it is differentiated.
    - `config`: weights, ranges and which metrics to compute.

    **Returns:** the scalar loss, and metrics under `losses/`.
    """
    batch = jax.lax.stop_gradient(batch)
    transitions, valid = batch.transitions, batch.transitions.valid
    out = replay(
        network, batch.network_state, batch.fresh, transitions, n_chunks=config.replay_chunks
    )
    values = out.output.value_estimates
    advantages, targets = _learning_signal(batch, out.output, config)

    ratios = jax.tree.map(
        likelihood_ratio, out.output.log_likelihoods, transitions.network_output.log_likelihoods
    )
    actor = jax.tree.map(
        lambda ratio, advantage: (
            -masked_mean(clipped_surrogate(ratio, advantage, config.clip_range), valid)
        ),
        ratios,
        advantages,
    )
    critic = jax.tree.map(
        lambda value, target, old: masked_mean(
            squared_value_error(value, target, old, config.value_clip_range), valid
        ),
        values,
        targets,
        transitions.network_output.value_estimates,
    )
    penalty = jnp.zeros((), jnp.float32)
    if out.regularization_loss is not None:
        penalty = masked_mean(out.regularization_loss.astype(jnp.float32), valid)
    loss = _total(actor) + config.critic_loss_weight * _total(critic) + penalty
    metrics = {}
    if LoggingLevel.LOSSES in config.logging_level:
        metrics = {
            "losses/actor": actor,
            "losses/critic": critic,
            "losses/regularization": penalty,
            "losses/total": loss,
            "losses/ratio_error": _ratio_error(ratios, valid),
        }
    if LoggingLevel.ACTOR_EXTRA in config.logging_level:
        metrics |= _actor_metrics(ratios, valid, config)
    if LoggingLevel.CRITIC_EXTRA in config.logging_level:
        metrics |= _critic_metrics(values, targets, valid)
        raw = _unnormalized(batch, out.output, targets, config)
        metrics |= summarize("losses/advantages", raw, valid=valid)
    return loss, metrics


def advantages_and_targets(
    transitions: Transition, values: Tree, config: PPOConfig
) -> tuple[Tree, Tree]:
    """Advantages and value targets per reward, `[T, B]`, from value estimates of each step.

    The values at truncated steps and after the last one are those of the rollout. With
    `truncation="mask"` the former are not used.
    """
    values = jax.lax.stop_gradient(values)
    counted = transitions.valid
    if config.truncation == "mask":
        counted = counted & (transitions.terminated | ~transitions.truncated)
    last = jax.tree.map(lambda value: value[-1], transitions.next_values)
    next_values = shift_values(values, last, transitions.truncated, transitions.next_values)

    def estimate(reward, value, next_value):
        return gae(
            reward,
            value,
            next_value,
            transitions.terminated,
            transitions.truncated,
            gamma=config.discounting_factor,
            lambda_=config.gae_lambda,
            valid=counted,
        )

    advantages = jax.tree.map(estimate, transitions.rewards, values, next_values)
    return advantages, jax.tree.map(jnp.add, values, advantages)


def _learning_signal(
    batch: Minibatch, output: PPONetworkOutput, config: PPOConfig
) -> tuple[Tree, Tree]:
    """The advantage of every sampler, normalized as configured, and the target of every value."""
    advantages, targets = batch.advantages, batch.targets
    if advantages is None:
        advantages, targets = advantages_and_targets(
            batch.transitions, output.value_estimates, config
        )
    if config.normalize_advantages == "minibatch":
        valid = batch.transitions.valid
        return normalized(advantages, valid, output.log_likelihoods, config), targets
    if config.normalize_advantages == "none":
        return per_sampler(advantages, output.log_likelihoods, config), targets
    return advantages, targets  # normalized over the whole batch, per sampler, already


def per_sampler(advantages: Tree, log_likelihoods: Tree, config: PPOConfig) -> Tree:
    """One advantage for every sampler: that of the reward of its name, or the sum of all."""
    if not config.combine_advantages:
        return advantages
    leaves = jax.tree.leaves(advantages)
    combined = sum(leaves[1:], start=leaves[0])
    return jax.tree.map(lambda _: combined, log_likelihoods)


def normalized(
    advantages: Tree, valid: Bool[Array, "T B"], log_likelihoods: Tree, config: PPOConfig
) -> Tree:
    """The advantages per sampler, each normalized over its valid steps."""
    return jax.tree.map(
        lambda advantage: normalize_advantages(advantage, valid),
        per_sampler(advantages, log_likelihoods, config),
    )


def _actor_metrics(ratios: Tree, valid: Bool[Array, "T B"], config: PPOConfig) -> Metrics:
    def clipped(ratio):
        return masked_mean((jnp.abs(ratio - 1.0) > config.clip_range).astype(jnp.float32), valid)

    def divergence(ratio):
        return masked_mean(ratio - 1.0 - jnp.log(ratio), valid)

    return {
        "losses/clipping_fraction": jax.tree.map(clipped, ratios),
        "losses/approximate_kl": jax.tree.map(divergence, ratios),
    }


def _unnormalized(
    batch: Minibatch, output: PPONetworkOutput, targets: Tree, config: PPOConfig
) -> Tree:
    """The advantages per sampler in the unit of the rewards, whatever was normalized since."""
    recorded = batch.transitions.network_output
    values = (output if batch.advantages is None else recorded).value_estimates
    advantages = jax.tree.map(jnp.subtract, targets, jax.lax.stop_gradient(values))
    return per_sampler(advantages, output.log_likelihoods, config)


def _critic_metrics(values: Tree, targets: Tree, valid: Bool[Array, "T B"]) -> Metrics:
    def explained(value, target):
        error = masked_mean(jnp.square(value - target), valid)
        spread = masked_mean(jnp.square(target - masked_mean(target, valid)), valid)
        return 1.0 - error / (spread + 1e-8)

    return {"losses/critic_R^2": jax.tree.map(explained, values, targets)}


def _total(terms: Tree) -> Float[Array, ""]:
    return sum(jax.tree.leaves(terms), start=jnp.zeros((), jnp.float32))


def _ratio_error(ratios: Tree, valid: Bool[Array, "T B"]) -> Float[Array, ""]:
    errors = [jnp.where(valid, jnp.abs(ratio - 1.0), 0.0) for ratio in jax.tree.leaves(ratios)]
    return jnp.max(jnp.stack(errors))
