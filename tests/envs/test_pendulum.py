import jax
import jax.numpy as jnp
import numpy as np

from eqx_ppo.envs import EpisodeWrapper, Pendulum


def oracle(theta, velocity, action):
    """One step of Gymnasium's Pendulum-v1, written from its equations, in float64."""
    gravity, mass, length, time_step = 10.0, 1.0, 1.0, 0.05
    torque = 2.0 * min(max(action, -1.0), 1.0)
    angle = (theta + np.pi) % (2 * np.pi) - np.pi
    reward = -(angle**2 + 0.1 * velocity**2 + 0.001 * torque**2)
    acceleration = 3 * gravity / (2 * length) * np.sin(theta) + 3 / (mass * length**2) * torque
    velocity = min(max(velocity + acceleration * time_step, -8.0), 8.0)
    return theta + velocity * time_step, velocity, reward


def at(theta, velocity):
    state = Pendulum().reset(jax.random.key(0))
    return state.replace(
        data=type(state.data)(jnp.array(theta, jnp.float32), jnp.array(velocity, jnp.float32))
    )


def test_hand_computed_step():
    state = Pendulum().step(at(0.5, 1.0), jnp.array([0.25]))
    # sin(0.5) = 0.4794255; velocity 1 + (15 * 0.4794255 + 3 * 0.5) * 0.05 = 1.4345691.
    np.testing.assert_allclose(state.data.velocity, 1.4345691, rtol=1e-6)
    np.testing.assert_allclose(state.data.theta, 0.5 + 0.05 * 1.4345691, rtol=1e-6)
    np.testing.assert_allclose(state.reward, -(0.25 + 0.1 + 0.00025), rtol=1e-6)
    expected = [np.cos(0.57172846), np.sin(0.57172846), 1.4345691]
    np.testing.assert_allclose(state.obs, expected, rtol=1e-6)


def test_against_the_oracle_step_by_step():
    env = Pendulum()
    step = jax.jit(env.step)
    rng = np.random.default_rng(0)
    state = env.reset(jax.random.key(1))
    for _ in range(200):
        action = rng.uniform(-1.5, 1.5)
        theta, velocity, reward = oracle(
            float(state.data.theta), float(state.data.velocity), action
        )
        state = step(state, jnp.array([action], jnp.float32))
        expected = [np.cos(theta), np.sin(theta), velocity]
        np.testing.assert_allclose(state.obs, expected, atol=3e-6)
        np.testing.assert_allclose(state.reward, reward, rtol=1e-5)
        assert not bool(state.done)
        assert -np.pi - 1e-6 <= float(state.data.theta) <= np.pi


def test_limits():
    spinning = Pendulum().step(at(0.7, 7.9), jnp.array([5.0]))
    assert float(spinning.data.velocity) == 8.0
    assert float(Pendulum().step(at(-0.7, -7.9), jnp.array([-5.0])).data.velocity) == -8.0
    same = Pendulum().step(at(0.7, 7.9), jnp.array([1.0]))
    np.testing.assert_array_equal(spinning.reward, same.reward)


def test_the_angle_wraps_at_the_bottom():
    state = Pendulum().step(at(3.1, 8.0), jnp.zeros(1))
    theta, velocity, _ = oracle(3.1, 8.0, 0.0)
    assert theta > np.pi
    np.testing.assert_allclose(state.data.theta, theta - 2 * np.pi, rtol=1e-5)
    _, _, reward = oracle(theta, velocity, 0.0)
    np.testing.assert_allclose(Pendulum().step(state, jnp.zeros(1)).reward, reward, rtol=1e-5)


def test_extreme_rewards():
    assert float(Pendulum().step(at(0.0, 0.0), jnp.zeros(1)).reward) == 0.0
    worst = float(Pendulum().step(at(-np.pi, 8.0), jnp.ones(1)).reward)
    np.testing.assert_allclose(worst, -(np.pi**2 + 6.4 + 0.004), rtol=1e-6)


def test_starts_are_spread_and_batched_episodes_end_together():
    env = EpisodeWrapper(Pendulum(), 2)
    keys = jax.random.split(jax.random.key(0), 2000)
    state = jax.jit(jax.vmap(env.reset))(keys)
    theta, velocity = np.asarray(state.data.theta), np.asarray(state.data.velocity)
    # Uniform on [-a, a]: mean 0, variance a^2 / 3; five standard errors.
    for values, bound in ((theta, np.pi), (velocity, 1.0)):
        assert np.all(np.abs(values) <= bound)
        assert abs(values.mean()) < 5 * bound / np.sqrt(3 * 2000)
        np.testing.assert_allclose(values.var(), bound**2 / 3, rtol=0.1)
    assert abs(np.corrcoef(theta, velocity)[0, 1]) < 5 / np.sqrt(2000)
    step = jax.jit(jax.vmap(env.step))
    state = step(state, jnp.zeros((2000, 1)))
    assert not np.any(state.done)
    assert np.all(step(state, jnp.zeros((2000, 1))).done)


def test_torque_is_too_weak_to_lift_it_at_once():
    """Constant full torque from rest at the bottom never reaches the top."""
    env = Pendulum()
    step = jax.jit(env.step)
    state = at(-np.pi, 0.0)
    heights = []
    for _ in range(100):
        state = step(state, jnp.ones(1))
        heights.append(float(state.obs[0]))
    assert max(heights) < 0.0
