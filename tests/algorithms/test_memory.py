"""What is held while an iteration runs: rollouts keep no environment state (case J5), and the
replay can be run in parts.
"""

import dataclasses
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo.algorithms import Minibatch, ppo_loss, unroll_env
from eqx_ppo.envs import State
from eqx_ppo.networks import make_mlp_actor_critic, trainable
from tests.algorithms.common import assert_close, compiled, small_config
from tests.helpers.networks import CASES

N_ENVS, N_STEPS = 6, 4


def temporaries(function, *arguments):
    """Bytes that the compiled function needs besides its arguments and results."""
    return jax.jit(function).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


@dataclasses.dataclass(frozen=True, eq=False)
class BulkyEnv:
    """Its state holds a large buffer that no one observes."""

    size: int

    observation_size: ClassVar[int] = 2
    action_size: ClassVar[int] = 1

    def reset(self, key):
        obs = jax.random.normal(key, (2,), jnp.float32)
        return self._state(obs, jnp.zeros(self.size, jnp.float32))

    def step(self, state, action):
        return self._state(state.obs + action[0], state.data.at[0].add(action[0]))

    def _state(self, obs, data):
        return State(obs, obs[0], jnp.zeros((), jnp.bool_), {}, {}, data)


def test_a_rollout_keeps_no_environment_state():
    env, n_envs, n_steps = BulkyEnv(100_000), 8, 32
    network = make_mlp_actor_critic(2, 1, [4], [4], key=jax.random.key(0))
    start = jax.eval_shape(jax.vmap(env.reset), jax.random.split(jax.random.key(0), n_envs))
    state = network.initialize_state(n_envs, key=jax.random.key(1))

    def run(env_state, key):
        return unroll_env(env, env_state, network, state, n_steps, key)

    held = temporaries(run, start, jax.random.key(0))
    one_state = 4 * n_envs * env.size
    assert held < 6 * one_state  # before and after a step, a pool of resets; not 32 of them


# --- The replay in parts ------------------------------------------------------------------


def recorded(case, key):
    """A minibatch of a case, replayed below under other weights than those that acted."""
    network = case.build(key)
    state = network.initialize_state(N_ENVS, key=key)
    env_state = jax.jit(jax.vmap(case.env.reset))(jax.random.split(key, N_ENVS))
    fresh = jnp.arange(N_ENVS) % 2 == 0
    _, _, transitions = jax.jit(
        lambda env_state: unroll_env(case.env, env_state, network, state, N_STEPS, key)
    )(env_state)
    return case.build(jax.random.fold_in(key, 1)), Minibatch(transitions, state, fresh)


@pytest.mark.parametrize("name", ["everything", "dict_delay"])
def test_parts_change_neither_loss_nor_gradient(name, getkey):
    network, batch = recorded(CASES[name], getkey())
    params, rest = eqx.partition(network, trainable(network))
    results = []
    for n_chunks in (1, 2, 6):
        config = small_config(
            n_envs=N_ENVS, n_minibatches=1, replay_chunks=n_chunks, advantages="minibatch"
        )

        def loss(params, batch, config=config):
            return ppo_loss(eqx.combine(params, rest), batch, config)

        results.append(jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch))
    assert any(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(results[0][1]))
    for other in results[1:]:
        assert_close(other, results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cell", ["mlp", "lstm"])
def test_parts_need_less_memory(cell):
    """Activations dominate at this size: four parts hold less than half."""
    case = CASES[cell]
    network = case.build(jax.random.key(0))
    held = []
    for n_chunks in (1, 4):
        config = small_config(
            n_envs=512, rollout_length=32, n_minibatches=2, replay_chunks=n_chunks
        )
        start, _ = compiled(case.env, network, config)
        state = jax.eval_shape(start, jax.random.key(0))
        _, step = compiled(case.env, network, config)
        held.append(step.lower(state).compile().memory_analysis().temp_size_in_bytes)
    assert held[1] < 0.7 * held[0]
