"""Learning gates: probe environments whose solution is known exactly, seconds each.

If one fails while those before it pass, the fault lies in what it adds; see the docstrings
of the environments.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo import (
    EvalConfig,
    PPOConfig,
    TrainConfig,
    eval_rollout,
    make_mlp_actor_critic,
    make_recurrent_actor_critic,
    train_ppo,
)
from eqx_ppo.envs import (
    ActionRewardProbe,
    ConstantRewardProbe,
    DiscountProbe,
    EpisodeWrapper,
    ObservationActionProbe,
    ObservationRewardProbe,
    Recall,
    TruncationProbe,
)
from eqx_ppo.networks import GRU, LSTM, NormalTanhSampler

pytestmark = pytest.mark.slow


def learn(env, network, n_iterations, **changes):
    """The network after some iterations of 64 environments, none of them skipped or invalid."""
    options = {"n_envs": 64, "rollout_length": 8, "learning_rate": 1e-2} | changes
    ppo = PPOConfig(
        **options, total_steps=n_iterations * options["n_envs"] * options["rollout_length"]
    )
    config = TrainConfig(ppo=ppo, eval=EvalConfig(enabled=False), console=False)
    state = train_ppo(env, network, config).training_state
    assert int(state.counts.skipped_updates) == int(state.counts.invalid_steps) == 0
    return state.network


def mlp(obs_size=1):
    return make_mlp_actor_critic(
        obs_size,
        1,
        [16],
        [16],
        sampler=NormalTanhSampler(entropy_weight=0.0),
        key=jax.random.key(0),
    )


def values_and_modes(network, observations):
    network = eqx.nn.inference_mode(network)
    obs = jnp.array(observations, jnp.float32)[:, None]
    out = network(network.initialize_state(len(obs), key=jax.random.key(0)), obs).output
    return np.asarray(out.value_estimates), np.asarray(out.actions[:, 0])


def test_a_constant_value():
    values, _ = values_and_modes(learn(ConstantRewardProbe(), mlp(), 30), [1.0])
    np.testing.assert_allclose(values, [1.0], atol=0.02)  # bootstrapped it would be 100


def test_a_value_that_depends_on_the_observation():
    values, _ = values_and_modes(learn(ObservationRewardProbe(), mlp(), 30), [-1.0, 1.0])
    np.testing.assert_allclose(values, [-1.0, 1.0], atol=0.02)


@pytest.mark.parametrize("gae_lambda", [0.0, 0.95])
def test_a_discounted_value(gae_lambda):
    network = learn(DiscountProbe(), mlp(), 60, discounting_factor=0.7, gae_lambda=gae_lambda)
    values, _ = values_and_modes(network, [-1.0, 1.0])
    np.testing.assert_allclose(values, [0.7, 1.0], atol=0.02)


def test_a_policy():
    network = learn(ActionRewardProbe(), mlp(), 60)
    values, modes = values_and_modes(network, [1.0])
    np.testing.assert_allclose(modes, [0.5], atol=0.1)
    # The value is that of the policy as it samples, exploration included.
    z = np.random.default_rng(0).normal(size=100_000)
    adapter = network[1]
    features = network[0](((),), jnp.ones((1, 1))).output
    carry = adapter.action.initialize_state(1, key=jax.random.key(0))
    metrics = adapter.action(carry, features).metrics
    mean, std = (float(part[0, 0]) for part in (metrics["2"]["mean"], metrics["2"]["std"]))
    expected = np.mean(1.0 - (np.tanh(mean + std * z) - 0.5) ** 2)
    np.testing.assert_allclose(values, [expected], atol=0.02)


def test_a_policy_that_depends_on_the_observation():
    values, modes = values_and_modes(learn(ObservationActionProbe(), mlp(), 60), [-1.0, 1.0])
    np.testing.assert_allclose(modes, [-0.5, 0.5], atol=0.1)
    assert (values > -0.05).all()  # the best constant action has -0.25
    assert (values < 0.02).all()


def test_a_value_beyond_the_time_limit():
    """1 / (1 - gamma) = 10; taken for a termination it could be 4.1 at the most."""
    network = learn(EpisodeWrapper(TruncationProbe(), 5), mlp(), 100, discounting_factor=0.9)
    values, _ = values_and_modes(network, [1.0])
    np.testing.assert_allclose(values, [10.0], atol=0.2)


def returns_of(env, network):
    result = jax.jit(lambda key: eval_rollout(env, network, 128, 20, key))(jax.random.key(5))
    assert result.finished.all()
    return np.asarray(result.returns)


@pytest.mark.parametrize(
    ("cell", "segment_length"), [(LSTM, None), (GRU, 5)], ids=["LSTM", "GRU in segments"]
)
def test_memory(cell, segment_length):
    """A cue has to be kept for 4 steps; 1 is the greatest return there is."""
    env = Recall(delay=3)
    network = make_recurrent_actor_critic(
        2, 1, 16, cell=cell, trainable_initial_state=True, key=jax.random.key(0)
    )
    network = learn(env, network, 60, rollout_length=10, segment_length=segment_length)
    assert returns_of(env, network).mean() > 0.9 * Recall.MAX_RETURN


def test_no_memory():
    """By symmetry a policy without memory has a return of exactly 0 over both cues.

    On "go" it sees the same observation after either cue, so it takes the same action `a`
    and gets `a` for one cue and `-a` for the other. What remains of the mean over episodes
    is their unequal number: the sampling error.
    """
    env = Recall(delay=3)
    network = learn(env, mlp(2), 60, rollout_length=10)
    returns = returns_of(env, network)
    size = np.abs(returns)
    np.testing.assert_allclose(size, size[0], rtol=1e-5)
    assert set(np.sign(returns)) == {-1.0, 1.0}
    assert abs(returns.mean()) < 3 * size[0] / np.sqrt(len(returns))
    assert returns.mean() < 0.5 * Recall.MAX_RETURN
