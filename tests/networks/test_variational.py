"""The stochastic bottlenecks."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo import networks as nets

T, B, L = 6, 5, 3


def parameters(seed=0, lead=(B,)):
    return jax.random.normal(jax.random.key(seed), (*lead, 2 * L), jnp.float32)


def split(x, min_std=1e-6):
    mean, pre_std = np.split(np.asarray(x, np.float64), 2, axis=-1)
    return mean, np.log1p(np.exp(pre_std)) + min_std


def divergence(mean, std, n=400_001):
    """KL(N(mean, std) || N(0, 1)) by quadrature, summed over the last axis."""
    z = np.linspace(-12, 12, n)
    weights = np.exp(-0.5 * z**2) / np.exp(-0.5 * z**2).sum()
    total = np.zeros(mean.shape)
    for index in np.ndindex(mean.shape):
        u = mean[index] + std[index] * z
        log_ratio = -0.5 * z**2 - np.log(std[index]) + 0.5 * u**2
        total[index] = (weights * log_ratio).sum()
    return total.sum(axis=-1)


def test_divergence_equals_quadrature():
    x = parameters()
    module = nets.VariationalBottleneck(L, kl_weight=0.25)
    out = module(module.initialize_state(B, key=jax.random.key(1)), x)
    expected = divergence(*split(x))
    np.testing.assert_allclose(out.metrics["kl_divergence"], expected, rtol=1e-5)
    np.testing.assert_allclose(out.regularization_loss, 0.25 * expected, rtol=1e-5)


def test_sample_has_the_mean_and_deviation_and_is_differentiated():
    module = nets.VariationalBottleneck(L)
    x = jnp.broadcast_to(parameters()[:1], (20_000, 2 * L))
    state = module.initialize_state(20_000, key=jax.random.key(1))
    z = np.asarray(module(state, x).output)
    mean, std = split(x[0])
    np.testing.assert_allclose(z.mean(axis=0), mean, atol=5 * std.max() / np.sqrt(20_000))
    np.testing.assert_allclose(z.std(axis=0), std, rtol=0.03)
    # z = mean + std * noise: the gradient by the mean is 1, by std it is the noise.
    grads = jax.grad(lambda v: module(state, v).output.sum())(x)
    np.testing.assert_allclose(grads[:, :L], 1.0)
    noise = (z - mean) / std
    slope = 1.0 / (1.0 + np.exp(-np.asarray(x[:, L:], np.float64)))
    np.testing.assert_allclose(grads[:, L:], noise * slope, atol=1e-4)


def test_noise_differs_between_environments_and_steps_and_repeats_in_replay():
    module = nets.VariationalBottleneck(L)
    state = module.initialize_state(B, key=jax.random.key(1))
    xs = jnp.zeros((T, B, 2 * L))
    done = jnp.zeros((T, B), bool).at[2].set(True)
    first = module.unroll(state, xs, done)
    assert first.rollout_extras is None
    assert np.unique(np.asarray(first.output)).size == T * B * L
    np.testing.assert_array_equal(module.unroll(state, xs, done).output, first.output)
    assert first.next_state.draws.tolist() == [T] * B


@pytest.mark.parametrize("kind", [nets.VariationalBottleneck, nets.AR1VariationalBottleneck])
def test_inference_returns_the_mean(kind):
    module = kind(L)
    x = parameters()
    state = module.initialize_state(B, key=jax.random.key(1))
    quiet = eqx.nn.inference_mode(module)
    np.testing.assert_array_equal(quiet(state, x).output, x[:, :L])
    assert not np.any(np.asarray(module(state, x).output) == np.asarray(x[:, :L]))


def test_ar1_penalty_is_the_squared_change_within_an_episode():
    module = nets.AR1VariationalBottleneck(L, kl_weight=0.0, ar1_weight=2.0)
    state = module.initialize_state(B, key=jax.random.key(1))
    done = np.zeros((T, B), bool)
    done[0, 0] = done[3, 1] = done[T - 1, 2] = True
    out = module.unroll(state, parameters(lead=(T, B)), jnp.asarray(done))
    z = np.asarray(out.output, np.float64)
    expected = np.zeros((T, B))
    for t in range(1, T):
        for b in range(B):
            if not done[t - 1, b]:
                expected[t, b] = 2.0 * np.mean((z[t, b] - z[t - 1, b]) ** 2)
    np.testing.assert_allclose(out.regularization_loss, expected, rtol=1e-5, atol=1e-7)
    assert out.next_state.has_previous.tolist() == [True, True, False, True, True]
    # The next rollout goes on from there: no penalty for environment 2 alone.
    more = module(out.next_state, parameters(1))
    assert np.asarray(more.regularization_loss)[2] == 0.0
    assert np.count_nonzero(more.regularization_loss) == B - 1


@pytest.mark.parametrize("through_time", [True, False])
def test_ar1_gradient_reaches_the_earlier_latent_only_if_asked(through_time):
    module = nets.AR1VariationalBottleneck(
        L, kl_weight=0.0, backprop_through_time=through_time, inference=True
    )
    state = module.initialize_state(1, key=jax.random.key(1))
    xs = parameters(lead=(2, 1))
    done = jnp.zeros((2, 1), bool)
    grads = jax.grad(lambda v: module.unroll(state, v, done).regularization_loss.sum())(xs)
    change = 2.0 * (np.asarray(xs)[1, 0, :L] - np.asarray(xs)[0, 0, :L]) / L
    np.testing.assert_allclose(grads[1, 0, :L], change, rtol=1e-5)
    np.testing.assert_allclose(
        grads[0, 0, :L], -change if through_time else 0.0 * change, rtol=1e-5
    )
    assert np.all(np.isfinite(grads))


@pytest.mark.parametrize("kind", [nets.VariationalBottleneck, nets.AR1VariationalBottleneck])
@pytest.mark.parametrize("pre_std", [-200.0, -20.0, 0.0, 20.0, 1e4])
def test_extreme_deviations_stay_finite(kind, pre_std):
    module = kind(L)
    state = module.initialize_state(2, key=jax.random.key(1))
    x = jnp.concatenate([jnp.zeros((2, L)), jnp.full((2, L), pre_std)], axis=1)

    def penalty(x):
        return module(state, x).regularization_loss.sum()

    value, grads = jax.value_and_grad(penalty)(x)
    assert np.isfinite(value)
    assert np.all(np.isfinite(grads))


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="latent_size >= 1"):
        nets.VariationalBottleneck(0)
    with pytest.raises(ValueError, match="kl_weight >= 0"):
        nets.VariationalBottleneck(2, kl_weight=-1.0)
    with pytest.raises(ValueError, match="ar1_weight >= 0"):
        nets.AR1VariationalBottleneck(2, ar1_weight=float("nan"))
    module = nets.VariationalBottleneck(2)
    state = module.initialize_state(3, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"\[B, 4\], but got \[3, 5\]"):
        module(state, jnp.zeros((3, 5)))
