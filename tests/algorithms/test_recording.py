"""Recordings: what one environment goes through, over several episodes."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo.algorithms import record_rollout
from eqx_ppo.envs import EpisodeWrapper, Pendulum
from eqx_ppo.networks import (
    PPONetworkOutput,
    StatefulModule,
    StatefulModuleOutput,
    StatelessModule,
)
from tests.algorithms.common import assert_close, assert_same, differ
from tests.helpers.envs import DictEnv, ScriptedEnv
from tests.helpers.networks import CASES

PENDULUM = EpisodeWrapper(Pendulum(), 3)
record = eqx.filter_jit(record_rollout)


class CountedActions(StatefulModule):
    """Acts by a tenth of the steps since the reset."""

    def initialize_state(self, batch_size, *, key):
        return jnp.full(batch_size, 7.0, jnp.float32)  # never seen: it starts by `reset_state`

    def reset_state(self, prev_state):
        return jnp.zeros_like(prev_state)

    def __call__(self, state, x, rollout_extras=None):
        zeros = jnp.zeros_like(state)
        output = PPONetworkOutput(0.1 * state[:, None], zeros, zeros)
        return StatefulModuleOutput(output, state + 1.0)


@pytest.fixture(scope="module")
def pendulum():
    return record(PENDULUM, CountedActions(), 10, jax.random.key(0), n_episodes=3)


def rows(tree, times):
    return jax.tree.map(lambda leaf: leaf[np.asarray(times)], tree)


def test_the_carry_begins_anew_with_each_episode(pendulum):
    assert int(pendulum.length) == 9
    np.testing.assert_array_equal(pendulum.done[:9], [0, 0, 1] * 3)
    np.testing.assert_allclose(pendulum.actions[:9, 0], [0.0, 0.1, 0.2] * 3, rtol=1e-6)


def test_each_state_follows_from_the_last_one(pendulum):
    before = rows(pendulum.env_states, [0, 1, 3, 4, 6, 7])
    actions = rows(pendulum.actions, [0, 1, 3, 4, 6, 7])
    after = jax.jit(jax.vmap(PENDULUM.step))(before, actions)
    following = rows(pendulum.env_states, [1, 2, 4, 5, 7, 8])
    np.testing.assert_allclose(after.obs, following.obs, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(after.info["episode_steps"], [1, 2] * 3)
    np.testing.assert_allclose(after.reward, rows(pendulum.rewards, [0, 1, 3, 4, 6, 7]), rtol=1e-5)


def test_episodes_have_starts_of_their_own(pendulum):
    starts = rows(pendulum.env_states, [0, 3, 6])
    np.testing.assert_array_equal(starts.info["episode_steps"], [0, 0, 0])
    assert len(np.unique(starts.data.theta)) == 3


def test_it_ends_with_the_room_that_there_is(pendulum):
    short = record(PENDULUM, CountedActions(), 4, jax.random.key(0), n_episodes=3)
    assert int(short.length) == 4
    assert_same(short._replace(length=None), rows(pendulum._replace(length=None), range(4)))


def test_the_key_decides_and_the_mode_is_not_sampled():
    network = CASES["mlp"].build(jax.random.key(0))
    env = ScriptedEnv((0, 1))
    sampled = [
        record(env, network, 3, jax.random.key(seed), deterministic=False) for seed in (1, 1, 2)
    ]
    assert_same(sampled[0], sampled[1])
    assert differ(sampled[0].actions, sampled[2].actions)

    modes = record(env, network, 3, jax.random.key(1))
    first = rows(modes.env_states.obs, [0])
    state = network.initialize_state(1, key=jax.random.key(3))
    expected = eqx.nn.inference_mode(network)(state, first, None).output.actions
    assert_close(rows(modes.actions, [0]), expected, rtol=1e-5, atol=1e-6)
    assert differ(modes.actions, sampled[0].actions)


class StillLimbs(StatelessModule):
    """Leaves arm and leg where they are."""

    def __call__(self, state, x, rollout_extras=None):
        zeros = jnp.zeros((x["goal"].shape[0], 2), jnp.float32)
        each = {"arm": zeros[:, 0], "leg": zeros[:, 0]}
        output = PPONetworkOutput({"arm": zeros, "leg": zeros[:, :1]}, each, each)
        return StatefulModuleOutput(output, state)


def test_dicts():
    recording = record(DictEnv((2,)), StillLimbs(), 5, jax.random.key(0), n_episodes=2)
    assert int(recording.length) == 4
    assert jax.tree.map(jnp.shape, recording.actions) == {"arm": (5, 2), "leg": (5, 1)}
    after = recording.env_states.reward  # of the step before, 0 at the start of an episode
    for limb in ("arm", "leg"):
        expected = jnp.where(recording.done[:3], 0.0, recording.rewards[limb][:3])
        np.testing.assert_allclose(after[limb][1:4], expected, rtol=1e-6)


@pytest.mark.parametrize("numbers", [{"max_steps": 0}, {"n_episodes": 0}])
def test_nothing_to_record(numbers):
    with pytest.raises(ValueError, match="at least one step and one episode"):
        record_rollout(
            PENDULUM, CountedActions(), key=jax.random.key(0), **{"max_steps": 3} | numbers
        )
