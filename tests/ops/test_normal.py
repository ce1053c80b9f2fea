import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo.ops import normal_entropy, normal_log_likelihood


def test_by_hand():
    got = normal_log_likelihood(jnp.float32(3.0), jnp.float32(1.0), jnp.float32(2.0))
    assert float(got) == pytest.approx(-0.5 - np.log(2.0) - 0.5 * np.log(2 * np.pi))
    assert float(normal_entropy(jnp.float32(1.0))) == pytest.approx(1.4189385)
    assert float(normal_entropy(jnp.float32(0.1))) == pytest.approx(-0.8836465)


@pytest.mark.parametrize("std", [0.1, 1.0, 30.0])
def test_density_integrates_to_one_and_entropy_is_the_mean_of_its_logarithm(std):
    x = jnp.asarray(np.linspace(-10 * std, 10 * std, 4001), jnp.float32)
    log_p = np.float64(normal_log_likelihood(x, jnp.zeros_like(x), jnp.full_like(x, std)))
    p = np.exp(log_p)
    assert np.trapezoid(p, x) == pytest.approx(1.0, abs=1e-5)
    entropy = -np.trapezoid(p * log_p, x)
    assert float(normal_entropy(jnp.float32(std))) == pytest.approx(entropy, abs=1e-4)
