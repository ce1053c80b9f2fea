"""The one environment step: rollout, evaluation and recording all use it.

It has two parts: `renew` begins an episode where the last one is over, `advance` acts.
"""

import functools
from typing import NamedTuple, final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Key

from eqx_ppo._tree import expand_to, is_floating, take_rows
from eqx_ppo._typing import EnvState, Metrics, State, Tree
from eqx_ppo.algorithms._config import LoggingLevel, Truncation
from eqx_ppo.algorithms._replay import refresh
from eqx_ppo.algorithms._transition import RolloutState, Transition
from eqx_ppo.envs import BatchedEnv, PackedStates, ResetStrategy, episode_end
from eqx_ppo.networks import PPONetworkOutput, StatefulModule, at_path

_NO_RESET = 2**32 - 1  # folded into a key, gives one that no reset uses


@final
class Stepper(NamedTuple):
    """What stays the same over the steps of a rollout.

    `levels` says which metrics a transition records, `truncation` whether a rollout evaluates
    the observations at time limits, `staggers` whether environments that can be are spread over
    their first episode.
    """

    env: BatchedEnv
    network: StatefulModule
    strategy: ResetStrategy
    levels: LoggingLevel
    truncation: Truncation = "bootstrap"
    staggers: bool = False

    def start(self, network_state: State, n_envs: int, key: Key[Array, ""]) -> RolloutState:
        """The state before all episodes, for an initial carry of the network."""
        return RolloutState(
            env_state=self.env.blank(n_envs, key),
            network_state=network_state,
            reset_state=self.strategy.start(self.env, n_envs, key),
            fresh=jnp.ones(n_envs, jnp.bool_),
            begun=jnp.zeros((), jnp.bool_),
        )

    def pack(self, state: RolloutState) -> "StepState":
        """The state in the form in which a loop over steps carries it."""
        rows = self.env.pack(state.env_state, state.fresh.shape[0])
        return StepState(rows, *state[1:])

    def unpack(self, state: "StepState") -> RolloutState:
        """Undoes `pack`."""
        return RolloutState(self.env.unpack(state.env_rows), *state[1:])


class StepState(NamedTuple):
    """A `RolloutState` between two steps, with the environments' states as rows of tables.

    One selects between a few tables then, not between some hundred leaves, each with a kernel
    of its own to compile and to run.
    """

    env_rows: PackedStates
    network_state: State
    reset_state: Tree
    fresh: Bool[Array, " B"]
    begun: Bool[Array, ""]


class StepEnd(NamedTuple):
    """Where a step led: the true next observation and carry."""

    obs: Tree
    network_state: State


def renew(stepper: Stepper, state: StepState, key: Key[Array, ""]) -> StepState:
    """Resets environment and carry where the next step begins an episode.

    On most steps none does, and nothing is computed.
    """

    def begin(state: StepState) -> StepState:
        env, fresh = stepper.env, state.fresh
        dealt, dealt_from = stepper.strategy.deal(env, state.reset_state, fresh, key)
        rows = env.pack(dealt, fresh.shape[0], like=state.env_rows)
        begins = jnp.any(fresh)  # under `jax.vmap` perhaps not in this one
        keep = functools.partial(jnp.where, begins)
        return StepState(
            env_rows=_begin(stepper, state, rows.where(fresh, state.env_rows), key),
            network_state=refresh(stepper.network, state.network_state, fresh),
            reset_state=jax.tree.map(keep, dealt_from, state.reset_state),
            fresh=jnp.zeros_like(fresh),
            begun=state.begun | begins,
        )

    return jax.lax.cond(_any_at_all(state.fresh), begin, lambda state: state, state)


@jax.custom_batching.custom_vmap
def _any_at_all(mask: Bool[Array, " B"]) -> Bool[Array, ""]:
    """Whether any element is true: under `jax.vmap`, of any of the masks.

    So a `cond` stays one under `jax.vmap`, and does not compute both of its branches.
    """
    return jnp.any(mask)


@_any_at_all.def_vmap
def _any_of_batch(axis_size, in_batched, mask):
    del axis_size, in_batched
    return _any_at_all(mask), False


def advance(stepper: Stepper, state: StepState) -> tuple[StepState, Transition, StepEnd]:
    """Acts once in every environment, in states of which none is `fresh`.

    A step that leaves an environment non-finite ends its episode and is marked as not
    `valid`; no later step sees the value. So is a step from a state that was not finite to
    begin with (a faulty reset), whose observation the network gets as zeros.

    **Returns:** the state for the next step; the transition, with zeros for `next_values`;
    and the end of the step, from which those can be computed.
    """
    env, network, levels = stepper.env, stepper.network, stepper.levels
    n_envs, rows = state.fresh.shape[0], state.env_rows
    env_state = env.unpack(rows)
    obs, seen = finite_rows(env_state.obs, n_envs)
    with at_path("", network, obs):
        out = network(state.network_state, obs, None)
    stepped = env.step(env_state, out.output.actions)

    terminated, truncated = _episode_end(stepped, state.fresh.shape)
    stepped_rows = env.pack(stepped, n_envs, like=rows)
    valid = seen & _still_finite(rows, stepped_rows, (stepped.obs, stepped.reward))
    terminated, truncated = terminated | ~valid, truncated & valid
    done = terminated | truncated
    next_state = state._replace(
        env_rows=rows.where(~valid, stepped_rows), network_state=out.next_state, fresh=done
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


def _begin(
    stepper: Stepper, state: StepState, rows: PackedStates, key: Key[Array, ""]
) -> PackedStates:
    """Staggers first episodes, and gives later ones what outlives the last one.

    `rows` are dealt states where `state.fresh`, and the running ones elsewhere. Only the leaves
    that may change are computed and written.
    """
    env, n_envs = stepper.env, state.fresh.shape[0]
    staggered = env.staggered_leaves if stepper.staggers else ()
    carried = env.carried_leaves
    changed = [index for index in {*staggered, *carried} if rows.shared[index] is None]
    if not changed:
        return rows
    start = env.unpack(rows)

    def first():
        keys = jax.random.split(jax.random.fold_in(key, _NO_RESET), n_envs)
        return take(env.stagger(start, keys) if staggered else start)

    def later():
        if not carried:
            return take(start)
        ended = state.env_rows.where(jnp.broadcast_to(state.begun, n_envs), rows)
        return take(env.carry_over(env.unpack(ended), start))

    def take(states):
        leaves = jax.tree.leaves(states)
        return {index: leaves[index] for index in changed}

    return env.put(rows, jax.lax.cond(state.begun, later, first), state.fresh)


def finite_rows(obs: Tree, n_envs: int) -> tuple[Tree, Bool[Array, " B"]]:
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


def _still_finite(before: PackedStates, after: PackedStates, seen: Tree) -> Bool[Array, " B"]:
    """Which environments have nothing newly non-finite, and nothing non-finite in `seen`.

    A number that was non-finite before the step (a sentinel that the environment keeps) is
    not held against it, unless it is of observation or reward.
    """
    tests = [
        jnp.isfinite(new) | ~jnp.isfinite(old)
        for old, new in zip(before.tables, after.tables, strict=True)
        if is_floating(new)
    ]
    leaves = list(filter(is_floating, jax.tree.leaves(seen)))
    tests += [jnp.isfinite(leaf).reshape(leaf.shape[0], -1) for leaf in leaves]
    rows = [jnp.all(test, axis=1) for test in tests]
    n_envs = after.tables[0].shape[0]
    return functools.reduce(jnp.logical_and, rows, jnp.ones(n_envs, jnp.bool_))


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
