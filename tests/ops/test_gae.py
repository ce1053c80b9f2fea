import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from eqx_ppo.ops import gae


def gae_oracle(rewards, values, next_values, terminated, truncated, gamma, lambda_):
    """The definition as a sum over the future of each step, in double precision.

    A_t = sum_k (gamma lambda)^k delta_{t+k}, up to the end of the episode.
    """
    n_steps, n_envs = rewards.shape
    advantages = np.zeros((n_steps, n_envs))
    for env, start in itertools.product(range(n_envs), range(n_steps)):
        weight = 1.0
        for t in range(start, n_steps):
            bootstrap = 0.0 if terminated[t, env] else next_values[t, env]
            delta = rewards[t, env] + gamma * bootstrap - values[t, env]
            advantages[start, env] += weight * delta
            weight *= gamma * lambda_
            if terminated[t, env] or truncated[t, env]:
                break
    return advantages


def random_rollout(seed, n_steps, n_envs):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(3, n_steps, n_envs)).astype(np.float32)


def column(*numbers):
    return jnp.array(numbers, jnp.float32)[:, None]


def flags(*numbers):
    return jnp.array(numbers, jnp.bool_)[:, None]


NEVER = flags(0, 0, 0)


@pytest.mark.parametrize("n_steps", [1, 2, 5])
@pytest.mark.parametrize("lambda_", [0.0, 0.8, 1.0])
def test_equals_a_numpy_loop_for_every_way_to_end(n_steps, lambda_):
    """One environment for each pair of steps and each pair of kinds of end at them."""
    kinds = [(0, 0), (1, 0), (0, 1), (1, 1)]  # terminated, truncated
    ends = list(itertools.product(range(n_steps), kinds, range(n_steps), kinds))
    terminated = np.zeros((n_steps, len(ends)), bool)
    truncated = np.zeros((n_steps, len(ends)), bool)
    for env, (first, first_kind, second, second_kind) in enumerate(ends):
        for t, (is_terminated, is_truncated) in ((first, first_kind), (second, second_kind)):
            terminated[t, env] |= bool(is_terminated)
            truncated[t, env] |= bool(is_truncated)
    rewards, values, next_values = random_rollout(0, n_steps, len(ends))
    arrays = (rewards, values, next_values, terminated, truncated)
    got = gae(*map(jnp.asarray, arrays), gamma=0.9, lambda_=lambda_)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, gae_oracle(*arrays, 0.9, lambda_), rtol=1e-5, atol=1e-5)


def test_termination_hides_whatever_the_next_value_is():
    rewards, values, next_values = random_rollout(1, 4, 3)
    terminated = np.zeros((4, 3), bool)
    terminated[[0, 2, 3], [0, 1, 2]] = True
    spoiled = np.where(terminated, np.nan, next_values)
    arrays = (rewards, values, spoiled, terminated, np.zeros_like(terminated))
    got = gae(*map(jnp.asarray, arrays), gamma=0.99, lambda_=0.95)
    np.testing.assert_allclose(got, gae_oracle(*arrays, 0.99, 0.95), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        ((0, 1, 0), (-2.812, -4.0, 0.0)),
        ((1, 0, 0), (-4.0, 95.0, 0.0)),
        ((0, 0, 1), (2.72801525, 1.8905, -99.0)),
        ((0, 0, 0), (90.2975, 95.0, 0.0)),
    ],
)
def test_the_end_masks_its_own_step(ended, expected):
    rewards, values, next_values = column(1, 1, 1), column(5, 5, 100), column(5, 100, 100)
    got = gae(rewards, values, next_values, flags(*ended), NEVER, gamma=0.99, lambda_=0.95)
    np.testing.assert_allclose(got[:, 0], expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("terminated", "truncated", "expected"),
    [
        ((0, 0, 0), (0, 1, 0), (8.0, 8.0, 2.6)),  # the value before the reset
        ((0, 1, 0), (0, 0, 0), (-0.1, -1.0, 2.6)),
        ((0, 1, 0), (0, 1, 0), (-0.1, -1.0, 2.6)),  # termination wins
    ],
)
def test_a_time_limit_bootstraps_and_a_termination_does_not(terminated, truncated, expected):
    got = gae(
        column(1, 1, 1),
        column(2, 2, 2),
        column(2, 10, 4),
        flags(*terminated),
        flags(*truncated),
        gamma=0.9,
        lambda_=1.0,
    )
    np.testing.assert_allclose(got[:, 0], expected, rtol=1e-6, atol=1e-6)


def test_a_masked_time_limit_counts_for_nothing():
    """Case B3 in the masked convention: the value 10 is not used, nor is the step."""
    got = gae(
        column(1, 1, 1),
        column(2, 2, 2),
        column(2, 10, 4),
        NEVER,
        flags(0, 1, 0),
        gamma=0.9,
        lambda_=1.0,
        valid=flags(1, 0, 1),
    )
    np.testing.assert_allclose(got[:, 0], [0.8, 0.0, 2.6], rtol=1e-6, atol=1e-6)


def test_the_last_step_can_terminate():
    ones, twos = column(1, 1, 1), column(2, 2, 2)
    got = gae(ones, twos, twos, flags(0, 0, 1), NEVER, gamma=0.99, lambda_=0.95)
    np.testing.assert_allclose(got[:, 0], [1.0171, 0.0395, -1.0], atol=5e-5)


def test_one_step_and_no_step():
    no, yes = flags(0), flags(1)
    options = {"gamma": 0.5, "lambda_": 0.9}
    assert float(gae(column(3), column(1), column(4), no, no, **options)[0, 0]) == 4.0
    assert float(gae(column(3), column(1), column(4), yes, no, **options)[0, 0]) == 2.0
    assert float(gae(column(3), column(1), column(4), no, yes, **options)[0, 0]) == 4.0
    nothing = jnp.zeros((0, 2), jnp.float32)
    never = jnp.zeros((0, 2), jnp.bool_)
    assert gae(nothing, nothing, nothing, never, never, **options).shape == (0, 2)


def test_lambda_one_is_the_discounted_return_minus_the_value():
    """The return runs to the end of the episode, plus the value of what was cut off."""
    rewards, values, _ = random_rollout(2, 6, 3)
    last_values = np.array([0.7, -0.3, 2.0], np.float32)
    next_values = np.concatenate([values[1:], last_values[None]])
    terminated, truncated = np.zeros((2, 6, 3), bool)
    terminated[3, 1] = True
    truncated[2, 2] = True
    next_values[2, 2] = 5.0  # of the observation before the reset
    gamma = 0.9
    returns = np.zeros((6, 3))
    for env, start in itertools.product(range(3), range(6)):
        for t in range(start, 6):
            returns[start, env] += gamma ** (t - start) * rewards[t, env]
            if terminated[t, env]:
                break
            if truncated[t, env] or t == 5:
                returns[start, env] += gamma ** (t - start + 1) * next_values[t, env]
                break
    arrays = map(jnp.asarray, (rewards, values, next_values, terminated, truncated))
    advantages = gae(*arrays, gamma=gamma, lambda_=1.0)
    np.testing.assert_allclose(advantages + values, returns, rtol=1e-5, atol=1e-5)
    assert np.abs(returns - values).max() > 1.0  # targets are not the values


def test_lambda_zero_is_the_temporal_difference():
    rewards, values, next_values = random_rollout(3, 4, 2)
    never = jnp.zeros((4, 2), jnp.bool_)
    got = gae(*map(jnp.asarray, (rewards, values, next_values)), never, never, gamma=0.7, lambda_=0)
    np.testing.assert_allclose(got, rewards + 0.7 * next_values - values, rtol=1e-5, atol=1e-6)


def test_an_invalid_step_has_no_difference_of_its_own():
    """Step 1 counts 0, whatever is in it; step 0 still sees step 2 through it."""
    rewards, values, next_values = column(1, jnp.nan, 1), column(0, jnp.nan, 0), column(0, 0, 0)
    valid = flags(1, 0, 1)
    got = gae(rewards, values, next_values, NEVER, NEVER, gamma=0.5, lambda_=1.0, valid=valid)
    np.testing.assert_allclose(got[:, 0], [1.25, 0.5, 1.0])
    ended = flags(0, 1, 0)
    got = gae(rewards, values, next_values, ended, NEVER, gamma=0.5, lambda_=1.0, valid=valid)
    np.testing.assert_allclose(got[:, 0], [1.0, 0.0, 1.0])


@pytest.mark.parametrize("number", [1, 1.0, np.float32(1.0), jnp.array(1.0, jnp.float32)])
def test_hyperparameters_are_any_scalar(number):
    args = (column(1, 1, 1), column(0, 0, 0), column(0, 0, 0), NEVER, NEVER)
    got = gae(*args, gamma=number, lambda_=number)
    np.testing.assert_array_equal(got[:, 0], [3.0, 2.0, 1.0])
    assert got.dtype == jnp.float32


def test_hyperparameters_can_be_traced_and_mapped_over():
    args = (column(1, 1, 1), column(0, 0, 0), column(0, 0, 0), NEVER, NEVER)
    gammas = jnp.array([0.0, 0.5, 1.0], jnp.float32)
    got = jax.jit(jax.vmap(lambda gamma: gae(*args, gamma=gamma, lambda_=1.0)))(gammas)
    np.testing.assert_array_equal(got[:, 0, 0], [1.0, 1.75, 3.0])


def test_gradient_with_respect_to_the_values_is_that_of_the_definition():
    """A_0 = r_0 + g V'_0 - V_0 + g l (r_1 + g V'_1 - V_1), with the trace cut after step 1."""
    ended = flags(0, 1, 0)

    def first(values, next_values):
        args = (column(0, 0, 0), values, next_values, NEVER, ended)
        return gae(*args, gamma=0.9, lambda_=0.5)[0, 0]

    by_value, by_next = jax.grad(first, (0, 1))(column(1, 2, 3), column(4, 5, 6))
    np.testing.assert_allclose(by_value[:, 0], [-1.0, -0.45, 0.0], rtol=1e-6)
    np.testing.assert_allclose(by_next[:, 0], [0.9, 0.405, 0.0], rtol=1e-6)


@pytest.mark.parametrize("spoiled", range(5))
def test_a_column_does_not_broadcast(spoiled):
    arrays = [jnp.zeros((3, 2), jnp.float32)] * 3 + [jnp.zeros((3, 2), jnp.bool_)] * 2
    for shape in ((3, 1), (3, 2, 1), (2,)):
        args = list(arrays)
        args[spoiled] = jnp.zeros(shape, args[spoiled].dtype)
        with pytest.raises(TypeCheckError):
            gae(*args, gamma=0.9, lambda_=0.9)
