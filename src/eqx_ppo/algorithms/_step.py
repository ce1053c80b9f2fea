"""The one environment step: rollout, evaluation and recording all use it."""

from typing import NamedTuple, final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Key

from eqx_ppo._tree import expand_to, is_floating, take_rows, tree_where
from eqx_ppo._typing import EnvState, Metrics, State, Tree
from eqx_ppo.algorithms._config import LoggingLevel, Truncation
from eqx_ppo.algorithms._transition import RolloutState, Transition
from eqx_ppo.envs import BatchedEnv, ResetStrategy, episode_end
from eqx_ppo.networks import PPONetworkOutput, StatefulModule, at_path


@final
class Stepper(NamedTuple):
    """What stays the same over the steps of a rollout.

    `levels` says which metrics a transition records, `truncation` whether a rollout evaluates
    the observations at time limits.
    """

    env: BatchedEnv
    network: StatefulModule
    strategy: ResetStrategy
    levels: LoggingLevel
    truncation: Truncation = "bootstrap"


class StepEnd(NamedTuple):
    """Where a step led, before any reset: the true next observation and carry."""

    obs: Tree
    network_state: State


def advance(
    stepper: Stepper, state: RolloutState, key: Key[Array, ""]
) -> tuple[RolloutState, Transition, StepEnd]:
    """Acts once in every environment.

    After the transition is recorded, environment and carry of each ended episode are
    reset. A step that leaves an environment non-finite ends its episode and is marked as
    not `valid`; no later step sees the value. So is a step from a state that was not finite
    to begin with (a faulty reset), whose observation the network gets as zeros.

    **Returns:** the state for the next step; the transition, with zeros for `next_values`;
    and the end of the step before the resets, from which those can be computed.
    """
    env, network, strategy, levels, _ = stepper
    obs, seen = _finite_rows(state.env_state.obs, state.fresh.shape[0])
    with at_path("", network, obs):
        out = network(state.network_state, obs, None)
    stepped = env.step(state.env_state, out.output.actions)

    terminated, truncated = _episode_end(stepped, state.fresh.shape)
    valid = seen & _still_finite(env, state.env_state, stepped)
    terminated, truncated = terminated | ~valid, truncated & valid
    done = terminated | truncated

    fresh_states, reset_state = strategy.deal(env, state.reset_state, done, key)
    if env.carries_over:
        leaves = env.spec.leaves
        ended = tree_where(valid, stepped, state.env_state, single=leaves)
        fresh_states = env.carry_over(ended, fresh_states)
    next_state = RolloutState(
        env_state=tree_where(done, fresh_states, stepped, single=env.spec.leaves),
        network_state=tree_where(done, network.reset_state(out.next_state), out.next_state),
        reset_state=reset_state,
        fresh=done,
    )
    transition = Transition(
        obs=obs,
        network_output=out.output,
        rewards=jax.tree.map(lambda reward: _masked_reward(reward, valid), stepped.reward),
        terminated=terminated,
        truncated=truncated,
        done=done,
        valid=valid,
        next_values=jax.tree.map(jnp.zeros_like, out.output.value_estimates),
        rollout_extras=out.rollout_extras,
        metrics=_metrics(levels, stepped, out.metrics),
    )
    return next_state, transition, StepEnd(stepped.obs, out.next_state)


def bootstrap_values(
    network: StatefulModule, end: StepEnd, wanted: Bool[Array, " B"], like: Tree, chunk: int
) -> Tree:
    """The values of the next observations of some environments, and 0 for the others.

    Evaluates `chunk` environments at a time, as often as needed, so that steps on which no
    episode is cut off cost nothing.

    **Arguments:**

    - `end`: where the step led, before any reset.
    - `wanted`: the environments whose value is needed.
    - `like`: the value estimates of the step, for their structure.
    """
    n_envs = wanted.shape[0]

    def more(carry):
        remaining, _ = carry
        return jnp.any(remaining)

    def evaluate(carry):
        remaining, values = carry
        (index,) = jnp.nonzero(remaining, size=chunk, fill_value=n_envs)
        rows = take_rows(end, jnp.minimum(index, n_envs - 1))
        output: PPONetworkOutput = network(rows.network_state, rows.obs, None).output
        values = jax.tree.map(
            lambda all_values, some: all_values.at[index].set(some, mode="drop"),
            values,
            output.value_estimates,
        )
        return remaining.at[index].set(False, mode="drop"), values

    zeros = jax.tree.map(jnp.zeros_like, like)
    _, values = jax.lax.while_loop(more, evaluate, (wanted, zeros))
    return values


def _finite_rows(obs: Tree, n_envs: int) -> tuple[Tree, Bool[Array, " B"]]:
    """The observation with zeros for environments where it is not finite; and where it is."""
    parts = [jnp.ones((n_envs, 1), jnp.bool_)]
    leaves = filter(is_floating, jax.tree.leaves(obs))
    parts += [jnp.isfinite(leaf).reshape(n_envs, -1) for leaf in leaves]
    finite = jnp.all(jnp.concatenate(parts, axis=1), axis=1)

    def clear(leaf):
        if not is_floating(leaf):
            return leaf
        return jnp.where(expand_to(finite, leaf), leaf, jnp.zeros_like(leaf))

    return jax.tree.map(clear, obs), finite


def _episode_end(
    stepped: EnvState, shape: tuple[int, ...]
) -> tuple[Bool[Array, " B"], Bool[Array, " B"]]:
    if jnp.shape(stepped.done) != shape:
        raise ValueError(
            "`done` must be one scalar per environment, shape "
            f"{shape} in a batch, but has shape {jnp.shape(stepped.done)}."
        )
    return episode_end(stepped)


def _still_finite(env: BatchedEnv, before: EnvState, after: EnvState) -> Bool[Array, " B"]:
    """Which environments have a finite observation and reward, and nothing newly non-finite.

    A number that was non-finite before the step (a sentinel that the environment keeps) is
    not held against it.
    """
    n_envs = jnp.shape(after.done)[0]
    parts = [jnp.ones((n_envs, 1), jnp.bool_)]
    leaves = zip(
        jax.tree.leaves(before), jax.tree.leaves(after), env.axes(after, n_envs), strict=True
    )
    for old, new, has_axis in leaves:
        if has_axis and is_floating(new) and new.size:
            parts.append((jnp.isfinite(new) | ~jnp.isfinite(old)).reshape(n_envs, -1))
    seen = filter(is_floating, jax.tree.leaves((after.obs, after.reward)))
    parts += [jnp.isfinite(leaf).reshape(n_envs, -1) for leaf in seen]
    return jnp.all(jnp.concatenate(parts, axis=1), axis=1)


def _masked_reward(reward: Array, valid: Bool[Array, " B"]) -> Array:
    if reward.shape != valid.shape:
        raise ValueError(
            f"Each reward must be one scalar per environment, shape {valid.shape} in a batch, "
            f"but has shape {reward.shape}. Sum or index it in `step`, or return a dict of "
            "scalar rewards."
        )
    return jnp.where(valid, reward.astype(jnp.float32), 0.0)


def _metrics(levels: LoggingLevel, env_state: EnvState, net_metrics: Metrics | None) -> Metrics:
    metrics = {}
    if LoggingLevel.ENV_METRICS in levels:
        metrics["env"] = env_state.metrics
    if LoggingLevel.NETWORK_METRICS in levels:
        metrics["net"] = net_metrics
    return metrics
