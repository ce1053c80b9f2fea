import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo import envs

GAMMA = 0.9


def episode(env, policy, seed=0, bootstrap=None):
    """Observations and discounted returns of one episode, in float64.

    `bootstrap(obs)` stands for what follows a truncation.
    """
    state = env.reset(jax.random.key(seed))
    observations, rewards = [], []
    step = jax.jit(env.step)
    while True:
        obs = float(state.obs[0])
        observations.append(obs)
        state = step(state, jnp.array([policy(obs)], jnp.float32))
        rewards.append(float(state.reward))
        terminated, truncated = envs.episode_end(state)
        if bool(terminated | truncated):
            break
    following = bootstrap(float(state.obs[0])) if bool(truncated) else 0.0
    returns = []
    for reward in reversed(rewards):
        following = reward + GAMMA * following
        returns.insert(0, following)
    return observations, returns, state


@pytest.mark.parametrize("action", [-1.0, 0.0, 0.4])
def test_constant_reward(action):
    observations, returns, last = episode(envs.ConstantRewardProbe(), lambda _: action)
    assert (observations, returns) == ([1.0], [1.0])
    assert float(last.obs[0]) == 1.0


def test_observation_reward():
    seen = {}
    for seed in range(12):
        observations, returns, last = episode(envs.ObservationRewardProbe(), lambda _: 0.4, seed)
        seen[observations[0]] = returns
        assert float(last.obs[0]) == observations[0]
    assert seen == {-1.0: [-1.0], 1.0: [1.0]}


def test_discount():
    observations, returns, last = episode(envs.DiscountProbe(), lambda _: 0.4)
    assert (observations, returns) == ([-1.0, 1.0], [GAMMA, 1.0])
    assert float(last.obs[0]) == 1.0


def test_action_reward():
    env = envs.ActionRewardProbe()
    rewards = {a: episode(env, lambda _, a=a: a)[1][0] for a in (-1.0, 0.0, 0.5, 0.75, 1.0)}
    np.testing.assert_allclose(
        list(rewards.values()), [1 - 2.25, 0.75, 1.0, 1 - 0.0625, 0.75], rtol=1e-6
    )


def test_observation_action():
    env = envs.ObservationActionProbe()
    for seed in range(4):
        (obs,), best, _ = episode(env, lambda obs: 0.5 * obs, seed)
        assert best == [0.0]
        assert episode(env, lambda obs: 0.0, seed)[1] == [-0.25]
        np.testing.assert_allclose(
            episode(env, lambda obs: 0.3, seed)[1], [-((0.3 - 0.5 * obs) ** 2)], rtol=1e-5
        )


@pytest.mark.parametrize("probe", [envs.ObservationRewardProbe, envs.ObservationActionProbe])
def test_signs_are_balanced(probe):
    keys = jax.random.split(jax.random.key(0), 4000)
    obs = np.asarray(jax.jit(jax.vmap(probe().reset))(keys).obs)
    assert obs.shape == (4000, 1)
    assert set(obs[:, 0].tolist()) == {-1.0, 1.0}
    assert abs(obs.mean()) < 5 / np.sqrt(4000)


@pytest.mark.parametrize("max_len", [1, 3, 10])
def test_truncation(max_len):
    env = envs.EpisodeWrapper(envs.TruncationProbe(), max_len)
    observations, returns, last = episode(env, lambda _: 0.4, bootstrap=lambda obs: 1 / (1 - GAMMA))
    assert observations == [1.0] * max_len
    assert float(last.obs[0]) == 1.0
    assert bool(last.info["truncation"])
    np.testing.assert_allclose(returns, [1 / (1 - GAMMA)] * max_len, rtol=1e-12)
    # The range that the docstring gives for the mistake.
    _, wrong, _ = episode(env, lambda _: 0.4, bootstrap=lambda obs: 0.0)
    np.testing.assert_allclose(wrong[0], (1 - GAMMA**max_len) / (1 - GAMMA), rtol=1e-12)
    assert wrong[-1] == 1.0


def test_truncation_probe_alone_never_ends():
    env = envs.TruncationProbe()
    state = env.reset(jax.random.key(0))
    for _ in range(20):
        state = env.step(state, jnp.zeros(1))
        assert not bool(state.done)
        assert float(state.reward) == 1.0
