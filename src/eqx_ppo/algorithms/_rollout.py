"""Collecting experience: a scan over the one environment step."""

from typing import final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Key

from eqx_ppo._checks import typed
from eqx_ppo._keys import as_key
from eqx_ppo._typing import Extras, KeyLike, State, Tree
from eqx_ppo.algorithms._config import LoggingLevel
from eqx_ppo.algorithms._replay import refresh
from eqx_ppo.algorithms._step import Stepper, advance, bootstrap_values, finite_rows, renew
from eqx_ppo.algorithms._transition import Rollout, RolloutState, Transition
from eqx_ppo.envs import (
    BatchedEnv,
    Env,
    EnvState,
    FreshReset,
    ResetStrategy,
    env_spec,
    episode_end,
    own_resets,
)
from eqx_ppo.networks import PPONetworkOutput, StatefulModule, at_path

_BOOTSTRAP_CHUNK = 8  # environments per evaluation of a truncated step's value


@typed
def unroll_env(  # noqa: PLR0913 (six that are always given, three options)
    env: Env,
    env_state: EnvState,
    network: StatefulModule,
    network_state: State,
    unroll_length: int,
    key: KeyLike,
    *,
    reset_strategy: ResetStrategy | None = None,
    fresh: Bool[Array, " B"] | None = None,
    logging_level: LoggingLevel = LoggingLevel.NONE,
) -> tuple[State, EnvState, Transition]:
    """Steps a batch of environments with a network.

    After each step the environments whose episode ended are reset, and so is their carry. Those
    whose given state is the end of an episode are reset before the first one.

    **Arguments:**

    - `env`: written for one environment.
    - `env_state`: a batch of its states, for example `jax.vmap(env.reset)(keys)`.
    - `network`: outputs a `PPONetworkOutput`.
    - `network_state`: the carry, leaves `[B, ...]`.
    - `unroll_length`: the number of steps T.
    - `key`: a PRNG key for the resets. (The network's randomness is in its carry.)
    - `reset_strategy`: `FreshReset()` by default. What it keeps is made anew at each call; with
        `CachedReset()` each environment returns to its row of `env_state`.
    - `fresh`: which carries are at the start of an episode and are made anew with
        `reset_state`; none by default.
    - `logging_level`: `ENV_METRICS` and `NETWORK_METRICS` are recorded.

    **Returns:** the network's carry and the environments' state after the last step (and
    its resets), and a `Transition` with leaves `[T, B, ...]`.
    """
    if unroll_length < 1:
        raise ValueError(f"`unroll_length` must be at least 1, but got {unroll_length}.")
    n_envs = jnp.shape(env_state.done)[0]
    batched = batched_env(env, network, network_state, n_envs)
    strategy = own_resets(env, FreshReset()) if reset_strategy is None else reset_strategy
    step_key, start_key, last_key = jax.random.split(as_key(key), 3)
    env_state = batched.canonicalize(env_state)
    if fresh is not None:
        network_state = refresh(network, network_state, fresh)
    terminated, truncated = episode_end(env_state)
    state = RolloutState(
        env_state=env_state,
        network_state=network_state,
        reset_state=strategy.adopt(batched, env_state, start_key),
        fresh=terminated | truncated,
        begun=jnp.ones((), jnp.bool_),
    )
    stepper = Stepper(batched, network, strategy, logging_level)
    state, rollout = collect(stepper, state, unroll_length, 1, step_key)
    state = stepper.unpack(renew(stepper, stepper.pack(state), last_key))
    return state.network_state, state.env_state, rollout.transitions


def collect(
    stepper: Stepper, state: RolloutState, length: int, n_segments: int, key: Key[Array, ""]
) -> tuple[RolloutState, Rollout]:
    """A rollout of `length` steps in `n_segments` equal segments.

    Episodes that end with its last step are renewed by the next rollout.

    The value of the next observation is evaluated where an episode was truncated and after
    the last step; everywhere else it is the estimate of the step that follows. These
    evaluations change no state. A stepper with `truncation="mask"` leaves out the former:
    there the value is 0.
    """
    network, n_envs = stepper.network, state.fresh.shape[0]
    shared = _SharedLeaves()

    def step(state, key):
        next_state, transition, end = advance(stepper, renew(stepper, state, key))
        if stepper.truncation == "bootstrap":
            final_values = bootstrap_values(
                network,
                end,
                transition.truncated,
                transition.next_values,
                min(_BOOTSTRAP_CHUNK, n_envs),
            )
            transition = transition._replace(next_values=final_values)
        extras = shared.drop(transition.obs, transition.rollout_extras)
        return next_state, transition._replace(rollout_extras=extras)

    def segment(state, keys):
        last, transitions = jax.lax.scan(step, state, keys)
        return last, Rollout(transitions, state.network_state, state.fresh)

    keys = jax.random.split(key, length).reshape(n_segments, length // n_segments)
    last, rollout = jax.lax.scan(segment, stepper.pack(state), keys)
    state = stepper.unpack(last)
    transitions = jax.tree.map(
        lambda leaf: leaf.reshape(length, *leaf.shape[2:]), rollout.transitions
    )
    last_obs, _ = finite_rows(state.env_state.obs, n_envs)
    last_values = network(state.network_state, last_obs, None).output.value_estimates
    values = transitions.network_output.value_estimates
    transitions = transitions._replace(
        next_values=shift_values(
            values, last_values, transitions.truncated, transitions.next_values
        ),
        rollout_extras=shared.restore(transitions.obs, transitions.rollout_extras),
    )
    return state, rollout._replace(transitions=transitions)


def shift_values(values: Tree, last: Tree, keep: Bool[Array, "T B"], final_values: Tree) -> Tree:
    """The values of the next observations, `[T, B]` per leaf.

    That is `values` one step later and `last` at the end, but `final_values` where `keep`.
    """

    def shift(value, last_value, final_value):
        following = jnp.concatenate([value[1:], last_value[None]])
        return jnp.where(keep, final_value, following)

    return jax.tree.map(shift, values, last, final_values)


def batched_env(env: Env, network: StatefulModule, network_state: State, n_envs: int) -> BatchedEnv:
    """The environment in the layout that its `reset` and `step` share.

    The action that `step` takes is had by tracing the network on an observation.
    """

    def act(obs):
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((n_envs, *x.shape), x.dtype), obs)
        with at_path("", network, batch):
            output = jax.eval_shape(lambda s, x: network(s, x, None).output, network_state, batch)
        if not isinstance(output, PPONetworkOutput):
            raise TypeError(
                "The network must output a `PPONetworkOutput`, but gave a "
                f"`{type(output).__name__}`. Put a `PPOAdapter` at its end."
            )
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), output.actions)

    return BatchedEnv(env, env_spec(env, act))


@final
class _SharedLeaves:
    """Stores leaves of the extras that are an observation's own array only once.

    A normalizer on top of a network emits the observation itself. Which leaves those are is
    found while the step is traced, and undone on the stacked rollout.
    """

    def __init__(self) -> None:
        self._treedef = jax.tree.structure(None)
        self._positions: list[int | None] = []

    def drop(self, obs: Tree, extras: Extras) -> list[Array | None]:
        """The leaves of `extras`, with `None` for those that are a leaf of `obs`."""
        leaves, self._treedef = jax.tree.flatten(extras)
        positions = {id(leaf): index for index, leaf in enumerate(jax.tree.leaves(obs))}
        self._positions = [positions.get(id(leaf)) for leaf in leaves]
        pairs = zip(leaves, self._positions, strict=True)
        return [leaf if position is None else None for leaf, position in pairs]

    def restore(self, obs: Tree, leaves: list[Array | None]) -> Extras:
        """The extras again, from what `drop` left of them."""
        observations = jax.tree.leaves(obs)
        pairs = zip(leaves, self._positions, strict=True)
        whole = [leaf if position is None else observations[position] for leaf, position in pairs]
        return jax.tree.unflatten(self._treedef, whole)
