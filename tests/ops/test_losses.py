import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from eqx_ppo.ops import (
    clipped_surrogate,
    likelihood_ratio,
    masked_mean,
    normalize_advantages,
    squared_value_error,
)


def array(*numbers):
    return jnp.array(numbers, jnp.float32)


# --- Clipped surrogate --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.1, 3.0, 3.3),  # the ratio is clipped, not the product
        (1.5, 3.0, 3.6),
        (0.5, 3.0, 1.5),  # no bonus for coming back
        (0.5, -3.0, -2.4),
        (1.5, -3.0, -4.5),
        (1.1, -3.0, -3.3),
        (1.0, 0.0, 0.0),
    ],
)
def test_clipped_surrogate_by_hand(ratio, advantage, expected):
    got = clipped_surrogate(array(ratio), array(advantage), 0.2)
    np.testing.assert_allclose(got, [expected], rtol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope"),
    [(1.0, 3.0, 3.0), (1.5, 3.0, 0.0), (0.5, 3.0, 3.0), (0.5, -3.0, 0.0), (1.5, -3.0, -3.0)],
)
def test_clipped_surrogate_has_a_slope_only_inside_the_range_or_toward_it(ratio, advantage, slope):
    got = jax.grad(lambda ratio: clipped_surrogate(ratio[None], array(advantage), 0.2)[0])
    np.testing.assert_allclose(got(array(ratio)[0]), slope, rtol=1e-6)


def test_clip_range_can_be_traced():
    f = jax.jit(lambda clip: clipped_surrogate(array(1.5), array(3.0), clip))
    np.testing.assert_allclose(f(jnp.float32(0.1)), [3.3], rtol=1e-6)
    np.testing.assert_allclose(f(jnp.float32(0.3)), [3.9], rtol=1e-6)


# --- Likelihood ratio ---------------------------------------------------------------------


def test_likelihood_ratio_is_the_exponential_of_the_difference():
    new, old = array(-1.0, -2.5, 3.0, -19.0), array(-1.0, -2.0, 1.0, 0.5)
    expected = np.exp(np.float64(new) - np.float64(old))
    np.testing.assert_allclose(likelihood_ratio(new, old), expected, rtol=1e-6)


def test_likelihood_ratio_stays_finite_far_away():
    far = array(100.0, -100.0, 3e38, -3e38)
    ratios, slopes = jax.vmap(jax.value_and_grad(lambda x: likelihood_ratio(x, jnp.zeros_like(x))))(
        far
    )
    limits = np.exp(np.array([20.0, -20.0, 20.0, -20.0]))
    np.testing.assert_allclose(ratios, limits, rtol=1e-5)
    np.testing.assert_array_equal(slopes, 0.0)


def test_the_slope_of_the_ratio_at_the_same_policy_is_one():
    """So the gradient of ratio times advantage is the plain policy gradient."""
    slope = jax.grad(lambda x: likelihood_ratio(x, jnp.float32(-3.0)))(jnp.float32(-3.0))
    assert float(slope) == 1.0


# --- Advantage normalization --------------------------------------------------------------


def test_normalization_equals_numpy():
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(20, 30)) * 7 - 40).astype(np.float32)
    expected = (x - x.mean(dtype=np.float64)) / x.std(dtype=np.float64)
    np.testing.assert_allclose(normalize_advantages(jnp.asarray(x)), expected, rtol=1e-4, atol=1e-5)


def test_normalization_of_valid_elements_equals_numpy_on_them():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(20, 30)).astype(np.float32)
    valid = rng.random((20, 30)) < 0.6
    expected = (x - x[valid].mean(dtype=np.float64)) / x[valid].std(dtype=np.float64)
    spoiled = np.where(valid, x, np.nan)
    got = normalize_advantages(jnp.asarray(spoiled), jnp.asarray(valid))
    np.testing.assert_allclose(got[valid], expected[valid], rtol=1e-4, atol=1e-5)
    got = normalize_advantages(jnp.asarray(x), jnp.asarray(valid))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 256, 1000, 5120])
@pytest.mark.parametrize("value", [0.1, -7.7, 123.456, 0.0, 1e-6, 1e-12, 3.3e5, -1e8, 1e20])
def test_constant_advantages_normalize_to_zero(value, n):
    got = normalize_advantages(jnp.full((n,), value, jnp.float32))
    assert np.abs(got).max() < 1e-3


def test_one_valid_sample_normalizes_to_zero():
    valid = jnp.array([False, True, False])
    got = normalize_advantages(array(5.0, 123.0, -3.0), valid)
    assert abs(float(got[1])) < 1e-3
    assert np.isfinite(got).all()


def test_no_valid_sample_gives_no_nan():
    got = normalize_advantages(array(5.0, 123.0), jnp.array([False, False]))
    assert np.isfinite(got).all()


def test_tiny_advantages_stay_tiny():
    """Rounding noise is not blown up to the size of a signal."""
    rng = np.random.default_rng(2)
    got = normalize_advantages(jnp.asarray(rng.normal(size=512) * 1e-12, jnp.float32))
    assert np.abs(got).max() < 1e-3


def test_an_outlier_is_normalized_like_the_rest():
    rng = np.random.default_rng(3)
    x = rng.normal(size=512).astype(np.float32)
    x[100] = 1e6
    expected = (x - x.mean(dtype=np.float64)) / x.std(dtype=np.float64)
    np.testing.assert_allclose(normalize_advantages(jnp.asarray(x)), expected, rtol=1e-4)


def test_a_small_spread_on_a_large_offset_is_still_seen():
    rng = np.random.default_rng(4)
    x = (1e4 + rng.normal(size=2048)).astype(np.float32)
    expected = (x - x.mean(dtype=np.float64)) / x.std(dtype=np.float64)
    np.testing.assert_allclose(normalize_advantages(jnp.asarray(x)), expected, rtol=1e-3, atol=1e-3)


# --- Means and value errors ---------------------------------------------------------------


def test_masked_mean():
    x = array(1.0, jnp.nan, 4.0, jnp.inf)
    valid = jnp.array([True, False, True, False])
    assert float(masked_mean(x, valid)) == 2.5
    assert float(masked_mean(x, jnp.zeros(4, jnp.bool_))) == 0.0
    assert float(masked_mean(array(1.0, 2.0, 6.0))) == 3.0
    slopes = jax.grad(masked_mean)(x, valid)
    np.testing.assert_array_equal(slopes, [0.5, 0.0, 0.5, 0.0])


@pytest.mark.parametrize(
    ("value", "target", "old", "plain", "clipped"),
    [
        (1.0, 0.0, 0.5, 0.5, 0.5),  # clipped to 0.7: the smaller error does not count
        (1.0, 2.0, 0.5, 0.5, 0.845),  # clipped to 0.7: error 1.3
        (0.6, 1.0, 0.5, 0.08, 0.08),  # inside the range
        (0.0, -1.0, 1.0, 0.5, 1.62),  # clipped to 0.8: error 1.8
        (3.0, 3.0, 3.0, 0.0, 0.0),
    ],
)
def test_squared_value_error_by_hand(value, target, old, plain, clipped):
    args = array(value), array(target), array(old)
    np.testing.assert_allclose(squared_value_error(*args), [plain], rtol=1e-6)
    np.testing.assert_allclose(squared_value_error(*args, 0.2), [clipped], rtol=1e-5)
    traced = jax.jit(squared_value_error)(*args, jnp.float32(0.2))
    np.testing.assert_allclose(traced, [clipped], rtol=1e-5)


def test_value_clipping_stops_the_gradient_beyond_the_range():
    def error(value, target):
        return squared_value_error(value[None], array(target), array(0.0), 0.2)[0]

    assert float(jax.grad(error)(jnp.float32(1.0), 2.0)) == 0.0  # the clipped error is larger
    assert float(jax.grad(error)(jnp.float32(1.0), -1.0)) == 2.0  # the plain error is larger
    assert float(jax.grad(error)(jnp.float32(0.125), 2.0)) == -1.875


@pytest.mark.parametrize("function", [squared_value_error, clipped_surrogate, likelihood_ratio])
def test_a_column_does_not_broadcast(function):
    """Values [4] against targets [4, 1] would be an error of 2.5 instead of 0."""
    row, column = array(1.0, 2.0, 3.0, 4.0), array(1.0, 2.0, 3.0, 4.0)[:, None]
    args = {
        squared_value_error: (row, column, row),
        clipped_surrogate: (row, column, 0.2),
        likelihood_ratio: (row, column),
    }
    with pytest.raises(TypeCheckError):
        function(*args[function])
    with pytest.raises(TypeCheckError):
        normalize_advantages(row, column > 0)
