import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo.networks import Dense


def test_equals_numpy(getkey):
    layer = Dense(3, 4, activation=jnp.tanh, key=getkey())
    layer = eqx.tree_at(lambda layer: layer.bias, layer, jnp.arange(4, dtype=jnp.float32))
    x = np.random.default_rng(0).normal(size=(5, 3))
    out = layer((), jnp.asarray(x, jnp.float32))
    expected = np.tanh(x @ np.float64(layer.kernel) + np.arange(4))
    np.testing.assert_allclose(out.output, expected, rtol=1e-5)
    assert out.next_state == ()
    assert out.rollout_extras is out.regularization_loss is out.metrics is None


def test_is_linear_without_activation_and_bias(getkey):
    layer = Dense(3, 2, use_bias=False, key=getkey())
    x = np.random.default_rng(0).normal(size=(5, 3))
    got = layer((), jnp.asarray(x, jnp.float32)).output
    np.testing.assert_allclose(got, x @ np.float64(layer.kernel), rtol=1e-4, atol=1e-6)
    assert layer.bias is None
    assert (layer.in_features, layer.out_features) == (3, 2)


def test_starts_lecun_uniform_with_zero_bias(getkey):
    """Uniform in plus and minus sqrt(3 / in), whose variance is 1 / in."""
    kernel = np.asarray(Dense(48, 200, key=getkey()).kernel)
    bound = np.sqrt(3 / 48)
    assert np.abs(kernel).max() <= bound
    assert np.abs(kernel).max() > 0.99 * bound
    assert kernel.var() == pytest.approx(1 / 48, rel=0.05)
    np.testing.assert_array_equal(Dense(3, 2, key=getkey()).bias, [0.0, 0.0])


def test_initializer_and_key_are_used(getkey):
    ones = Dense(2, 2, kernel_init=jax.nn.initializers.ones, key=getkey())
    np.testing.assert_array_equal(ones.kernel, np.ones((2, 2)))
    key = getkey()
    first, again, other = (Dense(3, 2, key=k).kernel for k in (key, key, getkey()))
    np.testing.assert_array_equal(first, again)
    assert (first != other).all()


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.bool_, jnp.float16])
def test_takes_any_number(dtype, getkey):
    layer = Dense(3, 2, key=getkey())
    x = jnp.array([[1, 0, 1]], dtype)
    got = layer((), x).output
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, layer((), x.astype(jnp.float32)).output)


@pytest.mark.parametrize("shape", [(2, 4), (3,), (2, 5, 3), (2, 3, 1)])
def test_wrong_input_names_the_layer_and_both_sizes(shape, getkey):
    with pytest.raises(ValueError, match="`Dense` expected") as info:
        Dense(3, 2, key=getkey())((), jnp.zeros(shape, jnp.float32))
    assert "[B, 3]" in str(info.value)
    assert str(list(shape)) in str(info.value)


@pytest.mark.parametrize("sizes", [(0, 2), (3, 0), (-1, 2)])
def test_sizes_are_validated(sizes, getkey):
    with pytest.raises(ValueError, match=f"in_features={sizes[0]} and out_features={sizes[1]}"):
        Dense(*sizes, key=getkey())
