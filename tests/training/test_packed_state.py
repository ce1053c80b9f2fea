"""The states of the environments, packed between the calls of a run, come out as they went in."""

import os
import subprocess
import sys

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


@pytest.mark.filterwarnings("ignore::eqx_ppo.envs.TimeLimitWarning")
def test_opening_does_not_wait_for_what_comes_after():
    """A state is saved while the next iterations run."""
    env = Varied()
    packed = jax.block_until_ready(pack_state(env, trained(env)))

    @jax.jit
    def slow(x):
        return jax.lax.fori_loop(0, 300, lambda _, x: jnp.tanh(x @ x), x)

    jax.block_until_ready(slow(jnp.ones((600, 600))))
    open_state(env, packed)
    running = slow(jnp.zeros((600, 600)))
    leaves = [numbers(leaf) for leaf in jax.tree.leaves(open_state(env, packed))]
    assert not running.is_ready()
    assert len(leaves) > 10


def test_a_state_on_another_device_goes_on_there():
    script = """
import dataclasses, jax, warnings
warnings.simplefilter("ignore")
from eqx_ppo import EvalConfig, PPOConfig, TrainConfig, make_mlp_actor_critic, train_ppo
from eqx_ppo.envs import EpisodeWrapper, Pendulum
ppo = PPOConfig(n_envs=2, rollout_length=3, n_epochs=1, n_minibatches=1, total_steps=6)
config = TrainConfig(ppo=ppo, eval=EvalConfig(enabled=False), console=False)
env = EpisodeWrapper(Pendulum(), 5)
network = make_mlp_actor_critic(3, 1, [4], [4], key=jax.random.key(0))
first = train_ppo(env, network, config).training_state
other = jax.devices()[1]
moved = jax.device_put(first, other)
longer = dataclasses.replace(ppo, total_steps=12)
config = dataclasses.replace(config, ppo=longer)
last = train_ppo(env, moved.network, config, initial_state=moved).training_state
assert int(last.counts.steps) == 12
assert all(leaf.devices() == {other} for leaf in jax.tree.leaves(last)), "elsewhere"
"""
    flags = "--xla_force_host_platform_device_count=2"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
