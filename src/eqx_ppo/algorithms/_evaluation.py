"""Evaluation: whole episodes, counted exactly."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from eqx_ppo._checks import typed
from eqx_ppo._keys import as_key
from eqx_ppo._tree import expand_to
from eqx_ppo._typing import KeyLike, Metrics, Tree
from eqx_ppo.algorithms._config import EvalConfig, LoggingLevel
from eqx_ppo.algorithms._metrics import summarize
from eqx_ppo.algorithms._rollout import batched_env
from eqx_ppo.algorithms._step import Stepper, StepState, advance, renew
from eqx_ppo.envs import CachedReset, Env, own_resets
from eqx_ppo.networks import StatefulModule


class EvalResult(NamedTuple):
    """One episode in each environment.

    - `returns`: undiscounted sums of rewards, one float32 `[B]` array per reward.
    - `lengths`: steps until the episode ended, int32.
    - `finished`: whether it ended within the allowed length, in whatever way.
    - `invalid`: whether it ended because something became non-finite. Its last step counts
        for its length, not for its return.
    - `metrics`: means over each episode's valid steps, in the structure of the transition's
        metrics.
    """

    returns: Tree
    lengths: Int32[Array, " B"]
    finished: Bool[Array, " B"]
    invalid: Bool[Array, " B"]
    metrics: Metrics


@typed
def eval_rollout(
    env: Env,
    network: StatefulModule,
    n_envs: int,
    max_episode_length: int,
    key: KeyLike,
    *,
    deterministic: bool = True,
    logging_level: LoggingLevel = LoggingLevel.NONE,
) -> EvalResult:
    """Runs one episode in each of `n_envs` fresh environments, to its end.

    Steps after an episode's end count for nothing, whatever the environment returns then.
    An episode that has not ended after `max_episode_length` steps is counted as it stands.

    **Arguments:**

    - `env`: written for one environment.
    - `network`: outputs a `PPONetworkOutput`; it is not changed.
    - `n_envs`, `max_episode_length`: at least 1.
    - `key`: a PRNG key; the same key gives the same episodes.
    - `deterministic`: act by the mode of the policy instead of sampling.
    - `logging_level`: `ENV_METRICS` and `NETWORK_METRICS` are averaged over each episode.
    """
    if n_envs < 1 or max_episode_length < 1:
        raise ValueError(
            "`eval_rollout` needs at least one environment and one step, but got "
            f"n_envs={n_envs} and max_episode_length={max_episode_length}."
        )
    reset_key, network_key, step_key = jax.random.split(as_key(key), 3)
    if deterministic:
        network = eqx.nn.inference_mode(network)
    stepper, state = _start(env, network, n_envs, logging_level, (reset_key, network_key))
    alive, n_counted = jnp.ones(n_envs, jnp.bool_), jnp.zeros(n_envs, jnp.int32)
    start = (jnp.zeros((), jnp.int32), state, alive, n_counted, _empty(stepper, state))

    def running(carry):
        time, _, alive, _, _ = carry
        return (time < max_episode_length) & jnp.any(alive)

    def step(carry):
        time, state, alive, n_counted, result = carry
        state = renew(stepper, state, jax.random.fold_in(step_key, time))
        state, transition, _ = advance(stepper, state)
        counts = alive & transition.valid
        result = EvalResult(
            returns=_accumulate(result.returns, transition.rewards, counts),
            lengths=result.lengths + alive.astype(jnp.int32),
            finished=result.finished | (alive & transition.done),
            invalid=result.invalid | (alive & ~transition.valid),
            metrics=_accumulate(result.metrics, transition.metrics, counts),
        )
        n_counted = n_counted + counts.astype(jnp.int32)
        return time + 1, state, alive & ~transition.done, n_counted, result

    *_, n_counted, result = jax.lax.while_loop(running, step, start)
    steps = jnp.maximum(n_counted, 1).astype(jnp.float32)
    means = jax.tree.map(lambda total: total / expand_to(steps, total), result.metrics)
    return result._replace(metrics=means)


def evaluate(env: Env, network: StatefulModule, config: EvalConfig, key: KeyLike) -> Metrics:
    """`eval_rollout` as configured, summarized into flat metrics under `eval/`.

    `eval/episode_reward` is the return summed over all rewards, `eval/lifespan` the length,
    `eval/finished` and `eval/invalid` the shares of episodes that ended, and that ended by
    becoming non-finite.
    """
    result = eval_rollout(
        env,
        network,
        config.n_envs,
        config.max_episode_length,
        key,
        deterministic=config.deterministic,
        logging_level=config.logging_level,
    )
    percentiles = config.logging_percentiles
    total = sum(jax.tree.leaves(result.returns), start=jnp.zeros(config.n_envs, jnp.float32))
    metrics = summarize("eval/episode_reward", total, percentiles)
    if not isinstance(result.returns, jax.Array):
        metrics |= summarize("eval/episode_reward", result.returns, percentiles)
    metrics |= summarize("eval/lifespan", result.lengths.astype(jnp.float32), percentiles)
    metrics["eval/finished"] = jnp.mean(result.finished, dtype=jnp.float32)
    metrics["eval/invalid"] = jnp.mean(result.invalid, dtype=jnp.float32)
    for name, values in result.metrics.items():
        metrics |= summarize(f"eval/{name}", values, percentiles)
    return metrics


def _start(
    env: Env,
    network: StatefulModule,
    n_envs: int,
    levels: LoggingLevel,
    keys: tuple[Array, Array],
) -> tuple[Stepper, StepState]:
    """The state before all episodes, and what steps it.

    Environments return to their first states, which costs nothing and counts for nothing.
    """
    reset_key, network_key = keys
    network_state = network.initialize_state(n_envs, key=network_key)
    batched = batched_env(env, network, network_state, n_envs)
    strategy = own_resets(env, CachedReset())
    stepper = Stepper(batched, network, strategy, levels)
    return stepper, stepper.pack(stepper.start(network_state, n_envs, reset_key))


def _empty(stepper: Stepper, state: StepState) -> EvalResult:
    """The result before the first step, in the structure that its steps will have."""

    def recorded(state):
        transition = advance(stepper, state)[1]
        return transition.rewards, transition.metrics

    rewards, metrics = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, jnp.float32), jax.eval_shape(recorded, state)
    )
    n_envs = state.fresh.shape[0]
    no = jnp.zeros(n_envs, jnp.bool_)
    return EvalResult(rewards, jnp.zeros(n_envs, jnp.int32), no, no, metrics)


def _accumulate(totals: Tree, values: Tree, counts: Bool[Array, " B"]) -> Tree:
    return jax.tree.map(
        lambda total, value: (
            total + jnp.where(expand_to(counts, value), value.astype(jnp.float32), 0.0)
        ),
        totals,
        values,
    )
