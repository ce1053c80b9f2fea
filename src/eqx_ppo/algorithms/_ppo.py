"""One iteration of PPO."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from eqx_ppo._checks import typed
from eqx_ppo._typing import Metrics
from eqx_ppo.algorithms._config import LoggingLevel, PPOConfig
from eqx_ppo.algorithms._metrics import flatten_metrics, rollout_metrics, summarize, weight_metrics
from eqx_ppo.algorithms._optimizer import make_optimizer
from eqx_ppo.algorithms._rollout import collect
from eqx_ppo.algorithms._step import Stepper
from eqx_ppo.algorithms._training_state import Counts, TrainingState, split_network
from eqx_ppo.algorithms._update import Updated, update
from eqx_ppo.envs import BatchedEnv, Env
from eqx_ppo.networks import trainable
from eqx_ppo.ops import add_count


@typed
def ppo_step(
    env: Env,
    training_state: TrainingState,
    config: PPOConfig,
    optimizer: optax.GradientTransformation | None = None,
) -> tuple[TrainingState, Metrics]:
    """One iteration: a rollout, epochs of minibatches, then the statistics.

    Pure and not compiled: close over `env`, `config` and `optimizer`, and use it under
    `jax.jit`, `lax.scan` (many iterations per call) and `jax.vmap` (over states made from
    several keys, or over array-valued hyperparameters).

    ```python
    step = jax.jit(lambda state: ppo_step(env, state, config), compiler_options=compiler_options())
    state, metrics = step(state)
    ```

    **Arguments:**

    - `env`, `config`, `optimizer`: those that `training_state` was made with.
    - `training_state`: from `new_training_state`.

    **Returns:** the next state and a flat dict of scalar metrics.

    **Raises:** `ValueError` for a configuration with another number of environments, or for
    another optimizer.
    """
    n_envs = training_state.rollout_state.fresh.shape[0]
    if n_envs != config.n_envs:
        raise ValueError(
            f"The configuration says n_envs={config.n_envs}, but the training state was made with "
            f"{n_envs} environments. Give `ppo_step` the configuration of the training state."
        )
    optimizer = make_optimizer(config, optimizer)
    network = training_state.network
    _check_optimizer(optimizer, training_state)
    rollout_key, update_key, next_key = jax.random.split(training_state.key, 3)
    stepper = Stepper(
        env=BatchedEnv(env, training_state.env_spec),
        network=network,
        strategy=config.reset_strategy,
        levels=config.logging_level,
        truncation=config.truncation,
        staggers=True,
    )
    rollout_state, rollout = collect(
        stepper, training_state.rollout_state, config.rollout_length, config.n_segments, rollout_key
    )
    updated = update(
        network, training_state.optimizer_state, rollout, config, optimizer, update_key
    )
    network = updated.network.update_statistics(rollout.transitions.rollout_extras)
    invalid = jnp.sum(~rollout.transitions.valid, dtype=jnp.uint32)
    counts = _count(training_state.counts, config, updated, invalid)
    next_state = TrainingState(
        arrays=split_network(network)[0],
        optimizer_state=updated.optimizer_state,
        rollout_state=rollout_state,
        key=next_key,
        counts=counts,
        remainder=training_state.remainder,
        env_spec=training_state.env_spec,
    )
    metrics = _update_metrics(updated, config) | rollout_metrics(rollout.transitions, config)
    if LoggingLevel.WEIGHTS in config.logging_level:
        metrics |= weight_metrics(network, config)
    if LoggingLevel.LOSSES in config.logging_level:
        metrics["skipped_updates"] = updated.skipped
        metrics["invalid_steps"] = invalid
    return next_state, metrics


def _check_optimizer(
    optimizer: optax.GradientTransformation, training_state: TrainingState
) -> None:
    network = training_state.network
    params = eqx.filter(network, trainable(network))
    expected = jax.tree.structure(jax.eval_shape(optimizer.init, params))
    got = jax.tree.structure(training_state.optimizer_state)
    if got != expected:
        raise ValueError(
            "The optimizer does not fit the training state: its state would have the structure "
            f"{expected}, but the training state holds {got}. Give `ppo_step` the configuration "
            "and the optimizer that the training state was made with."
        )


def _count(counts: Counts, config: PPOConfig, updated: Updated, invalid) -> Counts:
    return Counts(
        steps=add_count(counts.steps, config.steps_per_iteration),
        iterations=add_count(counts.iterations, 1),
        skipped_updates=add_count(counts.skipped_updates, updated.skipped),
        invalid_steps=add_count(counts.invalid_steps, invalid),
    )


def _update_metrics(updated: Updated, config: PPOConfig) -> Metrics:
    """Means over the gradient steps; the ratio error is that of the first one alone."""
    metrics = {}
    for name, values in flatten_metrics(updated.metrics).items():
        if name == "losses/ratio_error":
            metrics[name] = values[0]
            continue
        metrics[name] = jnp.nanmean(values)
        if config.logging_percentiles:
            spread = summarize(name, values, config.logging_percentiles)
            levels = [f"{name}/p{level}" for level in config.logging_percentiles]
            metrics |= {level: spread[level] for level in levels}
    return metrics
