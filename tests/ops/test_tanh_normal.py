import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo.ops import (
    tanh_log_det,
    tanh_normal_entropy,
    tanh_normal_log_likelihood,
    tanh_normal_mode,
)
from eqx_ppo.ops._tanh_normal import LOGISTIC_VARIANCES, LOGISTIC_WEIGHTS

# Every combination of means and deviations for which the entropy is specified.
MEANS, STDS = np.meshgrid(
    np.linspace(-5.0, 5.0, 41),
    np.concatenate([np.geomspace(0.01, 10.0, 40), [0.85, 0.8999, 0.9, 0.9001, 0.95, 1.0]]),
)

_Z = np.linspace(-12.0, 12.0, 4001)
_WEIGHTS = np.exp(-0.5 * _Z**2) / np.sum(np.exp(-0.5 * _Z**2))


def log_det_oracle(u):
    """log(1 - tanh(u)^2) = -2 log cosh(u), in double precision."""
    return -2.0 * np.logaddexp(u, -u) + 2.0 * np.log(2.0)


def expected(f, mean, std):
    """E f(u) by the trapezoidal rule on a fine grid, which is exact to rounding here."""
    u = np.asarray(mean)[..., None] + np.asarray(std)[..., None] * _Z
    return np.sum(_WEIGHTS * f(u), axis=-1)


def entropy_oracle(mean, std):
    return 0.5 * np.log(2 * np.pi * np.e * std**2) + expected(log_det_oracle, mean, std)


def float32(*arrays):
    return tuple(jnp.asarray(array, jnp.float32) for array in arrays)


# --- The log-determinant ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "log_det"),
    [(0.0, 0.0), (1.0, -0.867562), (5.0, -8.6138), (9.0, -16.6137), (20.0, -38.6137)],
)
def test_log_det_by_hand(raw, log_det):
    for u in (raw, -raw):
        got = float(tanh_log_det(jnp.float32(u)))
        assert got == pytest.approx(log_det, rel=1e-4, abs=1e-7)


def test_log_det_equals_the_formula_in_double_precision():
    u = np.linspace(-30.0, 30.0, 601)
    got = tanh_log_det(jnp.asarray(u, jnp.float32))
    np.testing.assert_allclose(got, log_det_oracle(u), rtol=1e-5, atol=1e-6)


def test_log_det_has_the_slope_minus_two_tanh_everywhere():
    u = np.array([-1e30, -1e4, -100.0, -20.0, -1.0, 0.0, 1.0, 20.0, 100.0, 1e4, 1e30])
    slopes = jax.vmap(jax.grad(tanh_log_det))(jnp.asarray(u, jnp.float32))
    np.testing.assert_allclose(slopes, -2.0 * np.tanh(u), rtol=1e-5)


# --- The density --------------------------------------------------------------------------


def test_the_action_is_squashed_once():
    assert float(tanh_normal_mode(jnp.float32(1.0))) == pytest.approx(0.761594, abs=1e-6)
    log_likelihood = tanh_normal_log_likelihood(*float32(1.0, 1.0, 1.0))
    expected = -0.5 * np.log(2 * np.pi) - np.log(1 - 0.7615941559557649**2)
    assert float(log_likelihood) == pytest.approx(expected, rel=1e-6)


def test_log_likelihood_equals_the_density_of_the_action():
    """Change of variables in double precision: N(arctanh a) / (1 - a^2)."""
    rng = np.random.default_rng(0)
    mean, std = rng.uniform(-2, 2, 200), np.exp(rng.uniform(-2, 1, 200))
    u = np.clip(mean + std * rng.normal(size=200), -6, 6)
    a = np.tanh(u)
    normal = np.exp(-0.5 * ((np.arctanh(a) - mean) / std) ** 2) / (std * np.sqrt(2 * np.pi))
    got = tanh_normal_log_likelihood(*float32(u, mean, std))
    np.testing.assert_allclose(got, np.log(normal / (1 - a**2)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("mean", "std"), [(0.0, 0.1), (0.3, 0.5), (-1.0, 0.3), (1.0, 0.7), (0.0, 1.0), (2.0, 2.0)]
)
def test_the_density_of_the_action_integrates_to_one(mean, std):
    """Over actions in (-1, 1), which crowd toward the bounds as wide densities do."""
    s = np.linspace(-4.0, 4.0, 20_001)
    u = np.sinh(s)  # reaches 27; the action is 1 - 2 exp(-2 u) there
    actions_per_s = np.cosh(s) * (2.0 / (np.exp(u) + np.exp(-u))) ** 2
    log_p = tanh_normal_log_likelihood(*float32(u, np.full_like(u, mean), np.full_like(u, std)))
    density = np.exp(np.float64(log_p)) * actions_per_s
    assert np.trapezoid(density, s) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("u", [-100.0, -20.0, 20.0, 100.0])
@pytest.mark.parametrize("std", [0.1, 1.0, 50.0])
def test_far_out_the_log_likelihood_and_its_slopes_are_finite_and_right(u, std):
    args = float32(u, 0.5, std)
    value, slopes = jax.value_and_grad(tanh_normal_log_likelihood, (0, 1, 2))(*args)
    z = (u - 0.5) / std
    exact = -0.5 * z**2 - np.log(std) - 0.5 * np.log(2 * np.pi) - log_det_oracle(u)
    np.testing.assert_allclose(value, exact, rtol=1e-5)
    by_u, by_mean, by_std = -z / std + 2 * np.tanh(u), z / std, (z**2 - 1) / std
    np.testing.assert_allclose(slopes, (by_u, by_mean, by_std), rtol=1e-4, atol=1e-6)


# --- The entropy --------------------------------------------------------------------------


def test_the_oracle_is_right():
    """Where the squashing hardly acts, and where log cosh is the absolute value."""
    narrow = 0.5 * np.log(2 * np.pi * np.e * 0.01**2) - 0.01**2
    assert entropy_oracle(0.0, 0.01) == pytest.approx(narrow, abs=1e-8)
    far = 0.5 * np.log(2 * np.pi * np.e) + 2 * np.log(2) - 2 * 30.0
    assert entropy_oracle(30.0, 1.0) == pytest.approx(far, abs=1e-10)


def test_entropy_is_that_of_a_fine_quadrature():
    """To 1e-6 and a few roundings of its terms, which are up to 14 here."""
    got = jax.jit(tanh_normal_entropy)(*float32(MEANS, STDS))
    np.testing.assert_allclose(got, entropy_oracle(MEANS, STDS), rtol=0, atol=1e-5)


def test_entropy_of_a_narrow_policy_is_negative():
    """At a deviation of 0.1: -0.884 of the normal, and -E u^2 = -0.01 of the squashing."""
    got = float(tanh_normal_entropy(*float32(0.0, 0.1)))
    assert got == pytest.approx(-0.894, abs=5e-4)


def test_entropy_gradients_equal_numerical_derivatives_of_the_quadrature():
    means, stds = MEANS[::2, ::4], STDS[::2, ::4]

    def total(mean, std):
        return jnp.sum(tanh_normal_entropy(mean, std))

    by_mean, by_std = jax.jit(jax.grad(total, (0, 1)))(*float32(means, stds))
    h = 1e-4
    exact = (entropy_oracle(means + h, stds) - entropy_oracle(means - h, stds)) / (2 * h)
    np.testing.assert_allclose(by_mean, exact, rtol=0, atol=3e-4)
    h = 1e-4 * stds
    exact = (entropy_oracle(means, stds + h) - entropy_oracle(means, stds - h)) / (2 * h)
    np.testing.assert_allclose(by_std, exact, rtol=1e-4, atol=5e-4)


def test_the_mixture_of_normals_is_the_logistic_distribution():
    """In double precision: the smoothed absolute value is log(2 cosh u), at every u."""
    u = np.linspace(0.0, 40.0, 20_001)
    smoothed = np.zeros_like(u)
    for weight, variance in zip(LOGISTIC_WEIGHTS, LOGISTIC_VARIANCES, strict=True):
        spread = math.sqrt(variance)
        z = u / spread
        erf = np.array([math.erf(x) for x in z / math.sqrt(2.0)])
        smoothed += weight * (spread * math.sqrt(2 / math.pi) * np.exp(-(z**2) / 2) + u * erf)
    assert np.abs(smoothed - np.logaddexp(u, -u)).max() < 5e-7
    assert sum(LOGISTIC_WEIGHTS) == pytest.approx(1.0, abs=1e-9)


_entropy_and_gradient = jax.jit(jax.value_and_grad(tanh_normal_entropy, (0, 1)))


@pytest.mark.parametrize("mean", [-100.0, -20.0, 20.0, 100.0])
@pytest.mark.parametrize("std", [1e-6, 0.5, 0.9, 5.0, 1e4])
def test_entropy_and_its_gradient_are_finite_far_outside(mean, std):
    value, slopes = _entropy_and_gradient(*float32(mean, std))
    assert np.isfinite([value, *slopes]).all()
    if std <= 5.0:
        # The tails: log(1 - tanh^2 u) = 2 log 2 - 2 |u|, whose mean is that of |u|.
        exact = 0.5 * np.log(2 * np.pi * np.e * std**2) + 2 * np.log(2) - 2 * abs(mean)
        assert float(value) == pytest.approx(exact, rel=1e-4)


def test_entropy_works_under_both_modes_of_differentiation():
    args = float32(0.3, 1.7)
    forward = jax.jit(jax.jacfwd(tanh_normal_entropy, (0, 1)))(*args)
    backward = jax.jit(jax.jacrev(tanh_normal_entropy, (0, 1)))(*args)
    np.testing.assert_allclose(forward, backward, rtol=1e-6)
    batched = jax.jit(jax.vmap(jax.grad(tanh_normal_entropy)))(*float32([0.3, -0.3], [1.7, 1.7]))
    np.testing.assert_allclose(batched, [forward[0], -forward[0]], rtol=1e-5)


def test_monte_carlo_agrees_with_density_and_entropy():
    """The mean of the negative log-density over 200000 samples is the entropy."""
    rng = np.random.default_rng(1)
    for mean, std in ((0.3, 0.4), (-1.0, 2.0)):
        u = mean + std * rng.normal(size=200_000)
        log_p = tanh_normal_log_likelihood(*float32(u, np.full_like(u, mean), np.full_like(u, std)))
        samples = -np.float64(log_p)
        error = 5 * samples.std() / np.sqrt(len(samples))
        assert abs(samples.mean() - float(tanh_normal_entropy(*float32(mean, std)))) < error
