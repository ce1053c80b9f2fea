"""Training on environments that break at random learns what it learns on sound ones."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks._faults import CutWrapper, FaultCount, FaultyWrapper
from benchmarks.faults import longest_run
from eqx_ppo import EvalConfig, PPOConfig, TrainConfig, make_mlp_actor_critic, train_ppo
from eqx_ppo.envs import (
    EpisodeWrapper,
    FreshReset,
    ObservationActionProbe,
    Pendulum,
    TruncationProbe,
)
from eqx_ppo.networks import NormalTanhSampler

pytestmark = pytest.mark.slow
KEY = jax.random.key(0)


def learn(env, n_iterations, **changes):
    """The network after some iterations, none of them with a number that is not finite."""
    ppo = PPOConfig(
        n_envs=64,
        rollout_length=8,
        learning_rate=1e-2,
        total_steps=n_iterations * 64 * 8,
        **changes,
    )
    config = TrainConfig(
        ppo=ppo, eval=EvalConfig(enabled=False), checkpoint_every_steps=1, console=False
    )
    sampler = NormalTanhSampler(entropy_weight=0.0)
    network = make_mlp_actor_critic(1, 1, [16], [16], sampler=sampler, key=KEY)
    finite = []

    def look(state, steps):
        numbers = eqx.filter((state.arrays, state.optimizer_state), eqx.is_inexact_array)
        finite.append(all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(numbers)))

    state = train_ppo(env, network, config, checkpoint_fn=look).training_state
    assert len(finite) >= n_iterations // ppo.iterations_per_call
    assert all(finite)
    assert int(state.counts.skipped_updates) == 0
    return state


def outputs(state, observations):
    network = eqx.nn.inference_mode(state.network)
    obs = jnp.array(observations, jnp.float32)[:, None]
    return network(network.initialize_state(len(obs), key=KEY), obs).output


def test_a_value_is_not_biased_by_episodes_that_broke():
    """1 / (1 - gamma) = 10; a fault taken for a termination would give 1 / (1 - .95 gamma) = 7."""
    count = FaultCount()
    env = FaultyWrapper(EpisodeWrapper(TruncationProbe(), 5), 0.05, count)
    state = learn(env, 100, discounting_factor=0.9)
    assert count.total > 0.04 * 100 * 64 * 8
    assert all(kind > 0 for kind in count.by_kind[1:])  # the probe has no physics state
    assert int(state.counts.invalid_steps) == count.total
    np.testing.assert_allclose(outputs(state, [1.0]).value_estimates, [10.0], atol=0.2)


def test_a_policy_is_learned_all_the_same_and_every_fault_is_counted():
    count = FaultCount()
    env = FaultyWrapper(ObservationActionProbe(), 0.05, count)
    state = learn(env, 60, reset_strategy=FreshReset())
    assert int(state.counts.invalid_steps) == count.total > 0
    modes = outputs(state, [-1.0, 1.0]).actions[:, 0]
    np.testing.assert_allclose(modes, [-0.5, 0.5], atol=0.1)


# --- The control: episodes that are cut off, without faults -----------------------------------


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_episodes_are_cut_off_at_a_time_limit(rate):
    env = CutWrapper(EpisodeWrapper(Pendulum(), 100), rate)
    state = env.step(env.reset(jax.random.key(0)), jnp.zeros(1))
    assert bool(state.done) == bool(state.info["truncation"]) == bool(rate)
    assert jnp.all(jnp.isfinite(state.obs))


def test_longest_run():
    assert longest_run([True, True, False, True]) == 2
    assert longest_run([False]) == longest_run([]) == 0
