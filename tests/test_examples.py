"""The networks of the examples: their replay is exact, and they are wired as their texts say."""

import dataclasses
import runpy
from pathlib import Path
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo.algorithms import replay_error, unroll_env
from eqx_ppo.envs import EpisodeWrapper, Pendulum, State, TwoArms

ROOT = Path(__file__).parents[1]
N_ENVS = 4


@dataclasses.dataclass(frozen=True, eq=False)
class Walk:
    """A random walk that the action pulls at, of the sizes of an environment elsewhere."""

    observation_size: ClassVar[int] = 6
    action_size: ClassVar[int] = 2

    def reset(self, key):
        obs_key, walk_key = jax.random.split(key)
        return self._state(jax.random.normal(obs_key, (6,), jnp.float32), walk_key)

    def step(self, state, action):
        walk_key, noise_key = jax.random.split(state.data)
        noise = jax.random.normal(noise_key, (6,), jnp.float32)
        return self._state(0.9 * state.obs + noise + jnp.repeat(action, 3), walk_key)

    def _state(self, obs, key):
        return State(obs, jnp.sum(obs), jnp.zeros((), jnp.bool_), info={}, metrics={}, data=key)


ENVS = {
    "own_layer": Pendulum(),
    "encoder_decoder": Walk(),
    "two_arms": TwoArms(),
    "neural_graph": Pendulum(),
}


def build(name):
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["build_network"](jax.random.key(0))


@pytest.mark.parametrize("name", list(ENVS))
def test_the_replay_is_exact(name):
    network = build(name)
    env = EpisodeWrapper(ENVS[name], 4)  # carries are reset on the way

    @eqx.filter_jit
    def rollout(network):
        reset_key, state_key, key = jax.random.split(jax.random.key(1), 3)
        env_state = jax.vmap(env.reset)(jax.random.split(reset_key, N_ENVS))
        state = network.initialize_state(N_ENVS, key=state_key)
        _, _, transitions = unroll_env(env, env_state, network, state, 10, key)
        return state, transitions, network.update_statistics(transitions.rollout_extras)

    error = eqx.filter_jit(replay_error)
    state, transitions, updated = rollout(network)
    assert transitions.done.sum() == 2 * N_ENVS
    assert error(network, state, transitions) < 1e-5
    state, transitions, _ = rollout(updated)
    assert error(updated, state, transitions) < 1e-5
    assert error(network, state, transitions) > 1e-3  # another network: an error would be seen


def both_ports(network, state, obs):
    """The action, or the tree of them, and the value, or the tree of them."""
    out = network(state, obs).output
    return jax.tree.map(np.asarray, (out.actions, out.value_estimates))


def test_the_decoder_knows_the_target_by_the_intention_alone():
    network = build("encoder_decoder")
    state = network.initialize_state(N_ENVS, key=jax.random.key(1))
    obs = jax.random.normal(jax.random.key(2), (N_ENVS, 6))
    elsewhere = obs.at[:, 2:4].add(1.0)
    same, moved = both_ports(network, state, obs), both_ports(network, state, elsewhere)
    assert np.all(np.abs(same[0] - moved[0]) > 1e-6)

    def encoder(network):
        return network[3].action[0]["features"][0].kernel

    aimless = eqx.tree_at(encoder, network, jnp.zeros_like(encoder(network)))
    same, moved = both_ports(aimless, state, obs), both_ports(aimless, state, elsewhere)
    np.testing.assert_array_equal(same[0], moved[0])
    assert np.all(np.abs(same[1] - moved[1]) > 1e-6)  # the critic still sees it


def test_the_intention_has_its_price():
    network = build("encoder_decoder")
    state = network.initialize_state(N_ENVS, key=jax.random.key(1))
    out = network(state, jax.random.normal(jax.random.key(2), (N_ENVS, 6)))
    actor = out.metrics["3"]["action"]
    nats, entropy = actor["0"]["features"]["1"]["kl_divergence"], actor["2"]["entropy"]
    assert np.all(np.asarray(nats) > 0.1)
    np.testing.assert_allclose(out.regularization_loss, 1e-3 * nats - 1e-3 * entropy, rtol=1e-5)


@pytest.mark.parametrize(("arm", "other"), [("left", "right"), ("right", "left")])
def test_an_arm_does_not_see_the_other(arm, other):
    network = build("two_arms")
    state = network.initialize_state(N_ENVS, key=jax.random.key(1))
    keys = jax.random.split(jax.random.key(2), 4)
    obs = {
        name: jax.random.normal(key, (N_ENVS, size))
        for (name, size), key in zip(TwoArms.observation_size.items(), keys, strict=True)
    }
    before = both_ports(network, state, obs)
    after = both_ports(network, state, obs | {arm: obs[arm] + 1.0})
    np.testing.assert_array_equal(before[0][other], after[0][other])
    assert np.all(np.abs(before[0][arm] - after[0][arm]) > 1e-6)
    for reward in (arm, other):  # the critic does
        assert np.all(np.abs(before[1][reward] - after[1][reward]) > 1e-6)


def test_the_graph_senses_two_steps_late_and_the_critic_at_once():
    network = build("neural_graph")
    state = network.initialize_state(N_ENVS, key=jax.random.key(1))
    obs = jax.random.normal(jax.random.key(2), (6, N_ENVS, 3))
    done = jnp.zeros((6, N_ENVS), bool)

    @jax.jit
    def ports(obs):
        out = network.unroll(state, obs, done).output
        return out.actions[..., 0], out.value_estimates

    before, after = ports(obs), ports(obs.at[1].add(1.0))
    moved = np.abs(np.asarray(before[0] - after[0])) > 1e-7
    assert not moved[:3].any()
    assert moved[3:].all()  # by its recurrence it also remembers
    moved = np.abs(np.asarray(before[1] - after[1])) > 1e-7
    assert moved[1].all()
    assert not moved[[0, 2, 3, 4, 5]].any()
