import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo.ops import Moments, merge_moments, new_counter, new_moments

merge = jax.jit(merge_moments)


def merged(batches, shape=()):
    moments = new_moments(shape)
    for batch in batches:
        moments = merge(moments, jnp.asarray(batch))
    return moments


def scalar_moments(mean, variance, count):
    return Moments(jnp.float32(mean), jnp.float32(variance), new_counter(count))


def test_no_samples():
    moments = new_moments((2, 3))
    np.testing.assert_array_equal(moments.mean, np.zeros((2, 3)))
    np.testing.assert_array_equal(moments.variance, np.zeros((2, 3)))
    assert int(moments.count) == 0


def test_large_count_does_not_overflow():
    got = merge(scalar_moments(0.0, 1.0, 1_000_000), jnp.ones(5120))
    mean = 5120 / 1_005_120
    second = (1_000_000 * 1.0 + 5120 * 1.0) / 1_005_120
    assert float(got.mean) == pytest.approx(0.0050939, abs=1e-7)
    assert float(got.mean) == pytest.approx(mean, rel=1e-5)
    assert float(got.variance) == pytest.approx(0.999974, abs=1e-6)
    assert float(got.variance) == pytest.approx(second - mean**2, rel=1e-6)
    assert int(got.count) == 1_005_120


@pytest.mark.parametrize("offset", [1e6, 1e4, -1e6])
def test_large_mean_does_not_cancel(offset):
    noise = np.random.default_rng(0).normal(size=4096)
    x = (offset + noise).astype(np.float32)
    exact = x.astype(np.float64).var()
    assert exact == pytest.approx(1.0, rel=0.05)
    for batches in ([x], x.reshape(64, 64)):
        got = merged(batches)
        assert float(got.variance) == pytest.approx(exact, rel=0.02)
        assert float(got.mean) == pytest.approx(x.astype(np.float64).mean(), rel=1e-6)


def test_first_batch_far_from_zero():
    got = merged([np.full(4, 1800.0, np.float32)])
    assert (float(got.mean), float(got.variance), int(got.count)) == (1800.0, 0.0, 4)
    got = merged([np.array([1800.0, 1801.0], np.float32)])
    assert (float(got.mean), float(got.variance), int(got.count)) == (1800.5, 0.25, 2)


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (1, 1, 1, 1), (1, 3), (3, 1)])
def test_every_sample_counts_once_however_they_are_split(sizes):
    x = np.array([1.0, 3.0, 5.0, 7.0], np.float32)
    got = merged(np.split(x, np.cumsum(sizes)[:-1]))
    assert float(got.mean) == pytest.approx(4.0, rel=1e-6)
    assert float(got.variance) == pytest.approx(5.0, rel=1e-6)
    assert int(got.count) == 4


@pytest.mark.parametrize("seed", range(4))
def test_random_splits_equal_numpy_in_double_precision(seed):
    rng = np.random.default_rng(seed)
    scale, offset = 10.0 ** rng.uniform(-3, 3, (2, 5))
    x = (rng.normal(size=(600, 5)) * scale + offset).astype(np.float32)
    cuts = np.sort(rng.choice(np.arange(1, 12), 5, replace=False)) * 50
    got = merged(np.split(x, cuts), (5,))
    exact = x.astype(np.float64)
    np.testing.assert_allclose(got.mean, exact.mean(0), rtol=1e-5)
    resolution = np.square(np.abs(offset) * 1e-6)  # of float32 samples around `offset`
    np.testing.assert_allclose(got.variance, exact.var(0), rtol=1e-4, atol=resolution.max())
    assert int(got.count) == 600


def test_constant_samples_have_no_variance():
    got = merged([np.full((5120, 1), 0.1, np.float32)] * 3, (1,))
    np.testing.assert_allclose(got.mean, 0.1, rtol=1e-6)
    assert 0.0 <= float(got.variance[0]) < 1e-14


def test_non_finite_samples_are_left_out_whole():
    rng = np.random.default_rng(5)
    x = rng.normal(size=(8, 2)).astype(np.float32)
    spoiled = x.copy()
    spoiled[1, 0], spoiled[3, 1], spoiled[6] = np.nan, np.inf, -np.inf
    got = merged([spoiled], (2,))
    kept = x[[0, 2, 4, 5, 7]].astype(np.float64)
    np.testing.assert_allclose(got.mean, kept.mean(0), rtol=1e-5)
    np.testing.assert_allclose(got.variance, kept.var(0), rtol=1e-5)
    assert int(got.count) == 5


def test_a_batch_without_a_finite_sample_changes_nothing():
    moments = merged([np.array([1.0, 3.0], np.float32)])
    got = merge(moments, jnp.full((4,), jnp.nan, jnp.float32))
    assert (float(got.mean), float(got.variance), int(got.count)) == (2.0, 1.0, 2)


@pytest.mark.parametrize(
    ("samples", "mean", "variance"),
    [
        (np.array([0, 255], np.uint8), 127.5, 16256.25),
        (np.array([-7, 3], np.int32), -2.0, 25.0),
        (np.array([True, False, False, False]), 0.25, 0.1875),
    ],
)
def test_integers_and_booleans_are_numbers(samples, mean, variance):
    got = merged([samples])
    assert (float(got.mean), float(got.variance)) == (mean, variance)
    assert got.mean.dtype == got.variance.dtype == jnp.float32


def test_features_of_any_rank_and_size():
    rng = np.random.default_rng(6)
    for shape in ((), (1,), (2, 3), (0,)):
        x = rng.normal(size=(7, *shape)).astype(np.float32)
        got = merged([x[:3], x[3:]], shape)
        assert got.mean.shape == got.variance.shape == shape
        np.testing.assert_allclose(got.mean, x.mean(0), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(got.variance, x.var(0), rtol=1e-4, atol=1e-6)
        assert int(got.count) == 7


@pytest.mark.parametrize("shape", [(4, 1), (4, 3), (4,), (4, 2, 2)])
def test_samples_do_not_broadcast_against_the_moments(shape):
    with pytest.raises(
        ValueError, match=r"samples of feature shape .* for moments of shape \(2,\)"
    ):
        merge_moments(new_moments((2,)), jnp.zeros(shape))


@pytest.mark.parametrize("count", [2**24, 2**32 - 100, 2**45])
def test_the_variance_does_not_drift_once_the_count_outgrows_float32(count):
    """A sum of squares would stop growing while the count goes on."""
    x = np.tile(np.array([-1.0, 1.0], np.float32), 32)

    def add(moments, _):
        return merge_moments(moments, jnp.asarray(x)), None

    start = scalar_moments(0.0, 1.0, count)
    got, _ = jax.jit(lambda m: jax.lax.scan(add, m, length=2000))(start)
    assert int(got.count) == count + 2000 * 64
    assert float(got.variance) == pytest.approx(1.0, rel=1e-4)
    assert float(got.mean) == pytest.approx(0.0, abs=1e-4)


def test_a_sample_whose_square_overflows_is_left_out():
    samples = jnp.array([[1.0], [3.0], [1e30], [-3e38]], jnp.float32)
    moments = merge_moments(new_moments((1,)), samples)
    assert int(moments.count) == 2
    np.testing.assert_allclose(moments.mean, [2.0])
    np.testing.assert_allclose(moments.variance, [1.0])
