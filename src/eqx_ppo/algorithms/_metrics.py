"""From arrays to named scalars."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from eqx_ppo._tree import is_floating
from eqx_ppo._typing import Metrics, Tree
from eqx_ppo.algorithms._config import LoggingLevel, PPOConfig
from eqx_ppo.algorithms._transition import Transition
from eqx_ppo.networks import StatefulModule, trainable


def summarize(
    name: str,
    values: Tree,
    percentiles: tuple[int, ...] | None = None,
    valid: Bool[Array, "..."] | None = None,
) -> Metrics:
    """Flat scalars for a tree of arrays: `name/key/.../mean`, `.../std` and percentiles.

    Each array is reduced over all of its axes. Booleans give their mean alone, under the plain
    name. Non-finite elements, and those that are not `valid`, are left out; NaN where nothing
    remains.

    **Arguments:**

    - `name`: the prefix.
    - `values`: an array, or nested mappings and sequences of arrays.
    - `percentiles`: between 0 and 100; given besides the mean and the deviation.
    - `valid`: for arrays that lead with its axes.

    **Raises:** `ValueError` if two arrays would get the same name.
    """
    metrics = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(values)[0]:
        full = "/".join([name, *(_part(entry) for entry in path)])
        if full in metrics or f"{full}/mean" in metrics:
            raise ValueError(
                f"Two metrics are named `{full}`: one key holds a `/`, or a number and a string "
                "read the same. Rename one of them."
            )
        kept = jnp.isfinite(leaf.astype(jnp.float32))
        if valid is not None:
            kept &= valid.reshape(valid.shape + (1,) * (leaf.ndim - valid.ndim))
        numbers = jnp.where(kept, leaf.astype(jnp.float32), jnp.nan)
        if leaf.dtype == jnp.bool_:
            metrics[full] = jnp.nanmean(numbers)
            continue
        metrics[f"{full}/mean"] = jnp.nanmean(numbers)
        metrics[f"{full}/std"] = jnp.nanstd(numbers)
        if percentiles:
            levels = jnp.nanpercentile(numbers, jnp.array(percentiles, jnp.float32))
            for index, level in enumerate(percentiles):
                metrics[f"{full}/p{level}"] = levels[index]
    return metrics


def rollout_metrics(transitions: Transition, config: PPOConfig) -> Metrics:
    """What a rollout tells, by the families of `config.logging_level`."""
    level, percentiles, valid = config.logging_level, config.logging_percentiles, transitions.valid
    metrics = {}

    def add(family: LoggingLevel, name: str, values: Tree) -> None:
        if family in level:
            metrics.update(summarize(name, values, percentiles, valid))

    output = transitions.network_output
    add(LoggingLevel.ROLLOUT_STATS, "rollout_batch/reward", transitions.rewards)
    add(LoggingLevel.ROLLOUT_STATS, "rollout_batch/action", output.actions)
    add(LoggingLevel.ROLLOUT_STATS, "rollout_batch/done_rate", transitions.done)
    add(LoggingLevel.ROLLOUT_STATS, "rollout_batch/truncation_rate", transitions.truncated)
    add(LoggingLevel.ROLLOUT_OBS, "rollout_batch/obs", transitions.obs)
    add(LoggingLevel.ACTOR_EXTRA, "log_likelihood", output.log_likelihoods)
    add(LoggingLevel.CRITIC_EXTRA, "losses/predicted_value", output.value_estimates)
    for name, values in transitions.metrics.items():
        metrics.update(summarize(name, values, percentiles, valid))
    return metrics


def weight_metrics(network: StatefulModule, config: PPOConfig) -> Metrics:
    """The distribution of all trained weights together."""
    mask = jax.tree.leaves(trainable(network))
    leaves = jax.tree.leaves(network)
    weights = [leaf.ravel() for leaf, is_trained in zip(leaves, mask, strict=True) if is_trained]
    if not weights:
        return {}
    return summarize("weights", jnp.concatenate(weights), config.logging_percentiles)


def global_norm(tree: Tree) -> Array:
    """The Euclidean norm of all floating-point leaves together."""
    squares = [jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree) if is_floating(leaf)]
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def flatten_metrics(metrics: Mapping[str, Tree]) -> Metrics:
    """Nested metrics as flat ones, with `/` between the parts of a name."""
    flat = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(dict(metrics))[0]:
        flat["/".join(_part(entry) for entry in path)] = leaf
    return flat


def _part(entry: object) -> str:
    return jax.tree_util.keystr((entry,), simple=True)
