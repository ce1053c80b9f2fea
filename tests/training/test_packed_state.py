"""The states of the environments, packed between the calls of a run, come out as they went in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo import PPOConfig, new_training_state, ppo_step
from eqx_ppo.envs import State
from eqx_ppo.networks import Sequential
from eqx_ppo.training._packed_state import open_state, pack_state, unpack_state
from tests.algorithms.common import assert_same, numbers
from tests.helpers.networks import heads

CONFIG = PPOConfig(n_envs=3, rollout_length=4, n_epochs=1, n_minibatches=1)


class Varied:
    """An environment with leaves of all kinds: keys, flags, counts, matrices, scalars, nothing."""

    observation_size = 2
    action_size = 1

    def __init__(self, impl=None):
        self.impl = impl

    def reset(self, key):
        place = jax.random.uniform(key, (2,))
        own = jax.random.key(3, impl=self.impl) if self.impl else key
        info = {
            "truncation": jnp.zeros((), jnp.bool_),
            "key": own,
            "keys": jax.random.split(own, 2),
            "raw": jnp.arange(2, dtype=jnp.uint32),
            "matrix": jnp.outer(place, place),
            "nothing": jnp.zeros((0, 2)),
            "half": place.astype(jnp.bfloat16),
        }
        return State(place, jnp.zeros(()), jnp.zeros((), jnp.bool_), info, {"m": place[0]}, data=())

    def step(self, state, action):
        key, _ = jax.random.split(state.info["key"])
        info = {**state.info, "key": key, "matrix": state.info["matrix"] + action[0]}
        return state.replace(obs=state.obs + action[0], reward=-jnp.sum(state.obs**2), info=info)


def trained(env):
    network = Sequential([heads(2, 1, jax.random.key(0))])
    state = jax.jit(lambda key: new_training_state(env, network, CONFIG, key))(jax.random.key(1))
    return jax.jit(lambda state: ppo_step(env, state, CONFIG)[0])(state)


@pytest.mark.filterwarnings("ignore::eqx_ppo.envs.TimeLimitWarning")
@pytest.mark.parametrize("impl", [None, "rbg"])
def test_packing_is_undone_on_the_device_and_on_the_host(impl):
    env = Varied(impl)
    state = trained(env)
    packed = jax.jit(lambda state: pack_state(env, state))(state)
    assert len(jax.tree.leaves(packed)) < len(jax.tree.leaves(state))
    assert_same(open_state(env, packed), state)
    assert_same(jax.jit(lambda packed: unpack_state(env, packed))(packed), state)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(open_state(env, packed)))


@pytest.mark.filterwarnings("ignore::eqx_ppo.envs.TimeLimitWarning")
def test_an_opened_state_owns_its_buffers():
    """All can be donated, and what it was made of stays as it is."""
    env = Varied()
    packed = pack_state(env, trained(env))
    tables = packed.rollout_state.env_state.tables
    before = [np.array(numbers(table)) for table in tables]
    step = jax.jit(lambda state: ppo_step(env, state, CONFIG)[0], donate_argnums=0)
    jax.block_until_ready(step(open_state(env, packed)))
    for table, kept in zip(tables, before, strict=True):
        np.testing.assert_array_equal(numbers(table), kept)
