"""One environment, written in every way that users write theirs: bit-identical training."""

import dataclasses
import functools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float

from eqx_ppo.algorithms import LoggingLevel, eval_rollout
from eqx_ppo.envs import State
from eqx_ppo.networks import Lift, Normalizer, Sequential
from tests.algorithms.common import assert_same, differ, small_config, train
from tests.envs.test_wrappers import RecordState, TupleState, flax_class
from tests.helpers.networks import heads

MAX_LEN = 3


def check_fields(state):
    """What a strict record would do in its constructor."""
    for leaf in (state.obs, state.reward, state.done):
        if not isinstance(leaf, jax.Array):
            raise TypeError(f"constructed with {type(leaf).__name__}")


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class StrictState:
    """Like `flax.struct` and `chex`: the constructor runs whenever a tree is put together."""

    obs: Array
    reward: Array
    done: Array
    info: dict
    metrics: dict

    def __post_init__(self):
        check_fields(self)

    def tree_flatten_with_keys(self):
        names = [field.name for field in dataclasses.fields(self)]
        children = [(jax.tree_util.GetAttrKey(name), vars(self)[name]) for name in names]
        return children, None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


class AnnotatedState(eqx.Module):
    obs: Float[Array, " 2"]
    reward: Float[Array, ""]
    done: Float[Array, ""]
    info: dict
    metrics: dict

    def __check_init__(self):
        check_fields(self)


@dataclasses.dataclass(frozen=True, eq=False)
class Walk:
    """Two coordinates; the episode ends where the first leaves [-1, 1], or after three steps.

    - `make_state`: the record `(obs, reward, done, info, metrics)`.
    - `dtype`: of `done` and of the truncation flag.
    - `flag`: the key of the flag.
    - `key`: the observation is a dict with this key, if there is one.
    """

    make_state: Callable
    dtype: type = jnp.float32
    flag: str = "truncation"
    key: str | None = None

    def reset(self, key):
        obs = jax.random.uniform(key, (2,), jnp.float32)
        return self._state(obs, jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32))

    def step(self, state, action):
        obs = state.obs if self.key is None else state.obs[self.key]
        obs = obs + 0.9 * action[0]
        return self._state(obs, obs[1], state.info["steps"] + jnp.int32(1))

    def _state(self, obs, reward, steps):
        failed = jnp.abs(obs[0]) > 1.0
        truncated = (steps >= MAX_LEN) & ~failed
        done = (failed | truncated).astype(self.dtype)
        info = {"steps": steps, self.flag: truncated.astype(self.dtype)}
        shown = obs if self.key is None else {self.key: obs}
        return self.make_state(shown, reward, done, info, {"x": obs[0]})


WAYS = {
    "flax struct": lambda: Walk(flax_class(), jnp.int32, "truncated"),
    "dataclass": lambda: Walk(RecordState, jnp.uint8),
    "NamedTuple": lambda: Walk(TupleState, jnp.bool_, "truncated"),
    "dict observation": lambda: Walk(State, jnp.bool_, key="position"),
    "brax-style truncation": lambda: Walk(State, jnp.float32, "truncation"),
    "strict constructor": lambda: Walk(StrictState),
    "equinox module": lambda: Walk(AnnotatedState),
}


def run(env):
    """What two iterations of training and an evaluation give."""

    def position(obs):
        return obs if env.key is None else obs[env.key]

    network = Sequential([Lift(position), Normalizer(2), heads(2, 1, jax.random.key(0))])
    config = small_config(learning_rate=1e-2, logging_level=LoggingLevel.ROLLOUT_STATS)
    state, history = train(env, network, config, jax.random.key(1), 2)
    result = eval_rollout(env, state.network, 3, 5, jax.random.key(2))
    return state.arrays, history, result


@functools.cache
def reference():
    return run(Walk(State, jnp.bool_))


@pytest.mark.exact
@pytest.mark.parametrize("way", WAYS)
def test_every_way_trains_alike(way):
    """No constructor of a user sees a placeholder, and no bit depends on the record."""
    assert_same(run(WAYS[way]()), reference())


def test_there_was_something_to_get_wrong():
    arrays, history, _ = reference()
    names = ("rollout_batch/truncation_rate", "rollout_batch/done_rate")
    truncations, ends = (sum(float(metrics[name]) for metrics in history) for name in names)
    assert 0.0 < truncations < ends
    untrained = Sequential([Lift(jnp.sin), Normalizer(2), heads(2, 1, jax.random.key(0))])
    before = jax.tree.leaves(eqx.filter(untrained, eqx.is_array))
    assert differ(jax.tree.leaves(arrays), before)
