import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from eqx_ppo.ops import beta_entropy, beta_log_likelihood, beta_mode

ALPHAS, BETAS = (
    grid.ravel() for grid in np.meshgrid([1.0, 1.001, 1.5, 3.0, 30.0, 1e3], [1.0, 2.0, 5.0, 200.0])
)


def float32(*arrays):
    return tuple(jnp.asarray(array, jnp.float32) for array in arrays)


def log_density(u, alpha, beta):
    """Of x = 1 / (1 + exp(-u)), by the textbook formula in double precision."""
    log_x, log_y = -np.logaddexp(0.0, -u), -np.logaddexp(0.0, u)
    return (alpha - 1) * log_x + (beta - 1) * log_y - special.betaln(alpha, beta)


def entropy(alpha, beta):
    inner = (alpha - 1) * special.psi(alpha) + (beta - 1) * special.psi(beta)
    total = alpha + beta
    return special.betaln(alpha, beta) - inner + (total - 2) * special.psi(total)


@jax.jit
def likelihoods_and_slopes(u, alpha, beta):
    def total(u, alpha, beta):
        values = beta_log_likelihood(u, alpha, beta)
        return jnp.sum(values), values

    slopes, values = jax.grad(total, (0, 1, 2), has_aux=True)(u, alpha, beta)
    return values, slopes


@jax.jit
def entropies_and_slopes(alpha, beta):
    def total(alpha, beta):
        values = beta_entropy(alpha, beta)
        return jnp.sum(values), values

    slopes, values = jax.grad(total, (0, 1), has_aux=True)(alpha, beta)
    return values, slopes


def test_the_oracles_by_hand():
    """The density 6 x (1 - x) is 1.5 in the middle; that of 2 x has the entropy 1/2 - log 2."""
    assert log_density(0.0, 2.0, 2.0) == pytest.approx(np.log(1.5))
    assert entropy(2.0, 1.0) == pytest.approx(0.5 - np.log(2))


@pytest.mark.parametrize("deviations", [0.0, -0.5, 2.0, -6.0])
def test_log_likelihood_and_its_slopes_equal_the_textbook_in_double_precision(deviations):
    spread = np.sqrt(1 / ALPHAS + 1 / BETAS)  # about the deviation of the logit
    (u32, alpha32, beta32) = float32(np.log(ALPHAS / BETAS) + deviations * spread, ALPHAS, BETAS)
    values, slopes = likelihoods_and_slopes(u32, alpha32, beta32)
    u, alpha, beta = np.float64(u32), np.float64(alpha32), np.float64(beta32)
    np.testing.assert_allclose(values, log_density(u, alpha, beta), rtol=3e-6, atol=3e-5)
    total = special.psi(alpha + beta)
    by_alpha = -np.logaddexp(0, -u) - special.psi(alpha) + total
    by_beta = -np.logaddexp(0, u) - special.psi(beta) + total
    by_u = (alpha - 1) * special.expit(-u) - (beta - 1) * special.expit(u)
    np.testing.assert_allclose(slopes[1], by_alpha, rtol=1e-4, atol=3e-6)
    np.testing.assert_allclose(slopes[2], by_beta, rtol=1e-4, atol=3e-6)
    np.testing.assert_allclose(slopes[0], by_u, rtol=1e-4, atol=1e-4)


def test_large_concentrations_keep_their_precision():
    """Where subtracting log-gammas in float32 is wrong by more than 0.001."""
    rng = np.random.default_rng(0)
    alpha, beta = np.float64(np.float32(rng.uniform(1e3, 1e4, (2, 500))))
    x = rng.beta(alpha, beta)
    u = np.float64(np.float32(np.log(x) - np.log1p(-x)))
    values, _ = likelihoods_and_slopes(*float32(u, alpha, beta))
    np.testing.assert_allclose(values, log_density(u, alpha, beta), rtol=0, atol=3e-4)
    entropies, _ = entropies_and_slopes(*float32(alpha, beta))
    np.testing.assert_allclose(entropies, entropy(alpha, beta), rtol=0, atol=1e-5)


@pytest.mark.parametrize("u", [-1e4, -100.0, 100.0, 1e4])
def test_far_out_the_log_likelihood_is_right_and_its_slopes_are_finite(u):
    us = np.full_like(ALPHAS, u)
    values, slopes = likelihoods_and_slopes(*float32(us, ALPHAS, BETAS))
    alpha, beta = np.float64(np.float32(ALPHAS)), np.float64(np.float32(BETAS))
    exact = log_density(us, alpha, beta)
    np.testing.assert_allclose(values, exact, rtol=1e-6, atol=2e-7 * abs(u) + 1e-5)
    assert np.isfinite(slopes).all()


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (1.3, 4.0), (40.0, 3.0), (300.0, 300.0)])
def test_the_density_integrates_to_one(alpha, beta):
    u = np.linspace(-40.0, 40.0, 40_001)
    values, _ = likelihoods_and_slopes(*float32(u, np.full_like(u, alpha), np.full_like(u, beta)))
    density = np.exp(np.float64(values)) * special.expit(u) * special.expit(-u)  # dx / du
    assert np.trapezoid(density, u) == pytest.approx(1.0, abs=1e-4)


def test_entropy_and_its_slopes_equal_the_textbook_in_double_precision():
    values, slopes = entropies_and_slopes(*float32(ALPHAS, BETAS))
    alpha, beta = np.float64(np.float32(ALPHAS)), np.float64(np.float32(BETAS))
    np.testing.assert_allclose(values, entropy(alpha, beta), rtol=1e-6, atol=2e-6)
    trigamma = special.polygamma(1, alpha + beta)
    by_alpha = (alpha + beta - 2) * trigamma - (alpha - 1) * special.polygamma(1, alpha)
    by_beta = (alpha + beta - 2) * trigamma - (beta - 1) * special.polygamma(1, beta)
    np.testing.assert_allclose(slopes[0], by_alpha, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(slopes[1], by_beta, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("large", [1e6, 1e30])
def test_huge_concentrations_stay_finite(large):
    args = float32([0.5, -3.0, 0.0], [large, 1.0, large], [large, large, 1.0])
    values, slopes = likelihoods_and_slopes(*args)
    assert np.isfinite([values, *slopes]).all()
    entropies, slopes = entropies_and_slopes(*args[1:])
    assert np.isfinite([entropies, *slopes]).all()


def test_mode_is_the_maximum_of_the_density():
    alpha, beta = np.array([1.5, 2.0, 5.0, 1.0, 3.0, 1.0]), np.array([1.5, 3.0, 2.0, 2.0, 1.0, 1.0])
    places = special.expit(np.float64(beta_mode(*float32(alpha, beta))))
    np.testing.assert_allclose(places, [0.5, 1 / 3, 0.8, 0.0, 1.0, 0.5], atol=2e-6)
    slopes = jax.jacobian(beta_mode, (0, 1))(*float32(alpha, beta))
    assert np.isfinite(slopes).all()
