"""An environment that does at each step what a test wrote down, and shorthands to run PPO."""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eqx_ppo.algorithms import LoggingLevel, PPOConfig, new_training_state, ppo_step
from eqx_ppo.algorithms._rollout import collect
from eqx_ppo.algorithms._step import Stepper
from eqx_ppo.envs import BatchedEnv, State

HORIZON = 8

CLEAN, NAN_REWARD, NAN_OBS, NAN_DATA, NAN_METRIC, INF_REWARD = range(6)


class ScheduleData(NamedTuple):
    """One row per step from the start on; a reset puts an empty schedule in its place."""

    clock: jax.Array
    position: jax.Array
    terminates: jax.Array  # [HORIZON] bool
    truncates: jax.Array  # [HORIZON] bool
    damage: jax.Array  # [HORIZON] int32, what becomes non-finite
    sentinel: jax.Array  # never finite, from the reset on


@dataclasses.dataclass(frozen=True, eq=False)
class ScheduledEnv:
    """The action moves a position; `obs` is `(steps since the reset, position)`.

    A reset draws nothing: the position is -1 and no end is scheduled. `schedule` makes the
    states to begin with. The metric is `obs[0]`, the reward `position + clock / 2`.
    """

    observation_size: ClassVar[int] = 2
    action_size: ClassVar[int] = 1

    def reset(self, key):
        nothing = jnp.zeros(HORIZON, jnp.bool_)
        data = ScheduleData(
            jnp.zeros((), jnp.int32),
            jnp.full((), -1.0, jnp.float32),
            nothing,
            nothing,
            jnp.zeros(HORIZON, jnp.int32),
            jnp.full((), jnp.nan, jnp.float32),
        )
        return self._state(data, data.clock)

    def step(self, state, action):
        data = state.data
        position = 0.9 * data.position + 0.5 * action[0]
        data = data._replace(clock=data.clock + jnp.int32(1), position=position)
        return self._state(data, data.clock)

    def _state(self, data, clock):
        row = jnp.maximum(clock - 1, 0)
        started = clock > 0
        damage = jnp.where(started, data.damage[row], 0)
        elapsed = clock.astype(jnp.float32)

        def spoil(kind, value, bad=jnp.nan):
            return jnp.where(damage == kind, jnp.float32(bad), value)

        truncated = started & data.truncates[row]
        obs = jnp.stack([elapsed, spoil(NAN_OBS, data.position)])
        reward = spoil(NAN_REWARD, data.position + 0.5 * elapsed)
        return State(
            obs,
            spoil(INF_REWARD, reward, jnp.inf),
            done=(started & data.terminates[row]) | truncated,
            info={"truncation": truncated},
            metrics={"clock": spoil(NAN_METRIC, elapsed)},
            data=data._replace(position=spoil(NAN_DATA, data.position)),
        )


def schedule(positions, *, terminate=(), truncate=(), damage=()):
    """States `[B, ...]` of `ScheduledEnv`, with ends at `(step, env)` and `(step, env, kind)`."""
    n_envs = len(positions)
    terminates = np.zeros((n_envs, HORIZON), bool)
    truncates = np.zeros((n_envs, HORIZON), bool)
    damages = np.zeros((n_envs, HORIZON), np.int32)
    for step, env in terminate:
        terminates[env, step] = True
    for step, env in truncate:
        truncates[env, step] = True
    for step, env, kind in damage:
        damages[env, step] = kind

    def build(position, terminates, truncates, damage):
        state = ScheduledEnv().reset(None)
        data = state.data._replace(
            position=position, terminates=terminates, truncates=truncates, damage=damage
        )
        return state.replace(data=data, obs=jnp.stack([state.obs[0], position]))

    arrays = (np.asarray(positions, np.float32), terminates, truncates, damages)
    return jax.jit(jax.vmap(build))(*(jnp.asarray(array) for array in arrays))


def running(rollout_state, env_state):
    """A `RolloutState` in the middle of episodes, in the given states, with the carry it has."""
    no = jnp.zeros_like(rollout_state.fresh)
    return rollout_state._replace(env_state=env_state, fresh=no, begun=jnp.array(True))


def compiled(env, network, config, optimizer=None):
    """`start(key)` and `step(state)`, compiled."""
    start = jax.jit(lambda key: new_training_state(env, network, config, key, optimizer=optimizer))
    step = jax.jit(lambda state: ppo_step(env, state, config, optimizer))
    return start, step


def train(env, network, config, key, n_iterations, optimizer=None):
    """The training state after some iterations, and the metrics of each."""
    start, step = compiled(env, network, config, optimizer)
    state, history = start(key), []
    for _ in range(n_iterations):
        state, metrics = step(state)
        history.append(metrics)
    return state, history


def small_config(**changes):
    """A `PPOConfig` for seconds: 4 environments, 4 steps, 2 epochs of 2 minibatches."""
    options = {"n_envs": 4, "rollout_length": 4, "n_epochs": 2, "n_minibatches": 2}
    return PPOConfig(**options | {"total_steps": 32} | changes)


def rollout_of(env, config):
    """A compiled function from a training state to the rollout that `ppo_step` collects in it."""

    def rollout(state):
        stepper = Stepper(
            BatchedEnv(env, state.env_spec),
            state.network,
            config.reset_strategy,
            LoggingLevel.NONE,
        )
        key = jax.random.split(state.key, 3)[0]
        return collect(stepper, state.rollout_state, config.rollout_length, config.n_segments, key)[
            1
        ]

    return jax.jit(rollout)


def numbers(leaf):
    """Any array, typed keys included, as a NumPy array."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def assert_same(actual, expected):
    """Two trees are equal, bit for bit (NaN equals NaN)."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for left, right in pairs:
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(numbers(left), numbers(right))


def assert_close(actual, expected, **tolerance):
    """Two trees of numbers are equal up to rounding."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for left, right in pairs:
        np.testing.assert_allclose(numbers(left), numbers(right), **tolerance)


def differ(left, right):
    """Whether any leaf of two trees of one structure differs."""
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return any(not np.array_equal(numbers(a), numbers(b)) for a, b in pairs)
