import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo._keys import as_key


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_a_typed_key_is_returned_as_it_is(impl):
    key = jax.random.key(1, impl=impl)
    assert as_key(key) is key


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_a_raw_key_becomes_the_typed_key_of_the_same_words(impl):
    raw = jax.random.PRNGKey(1, impl=impl)
    key = as_key(raw)
    assert key.shape == ()
    assert key.dtype == jax.random.key(0, impl=impl).dtype
    np.testing.assert_array_equal(jax.random.key_data(key), raw)
    expected = jax.random.normal(jax.random.key(1, impl=impl), (3,))
    np.testing.assert_array_equal(jax.random.normal(key, (3,)), expected)


def test_works_on_tracers():
    def draw(key):
        return jax.random.normal(as_key(key), ())

    expected = draw(jax.random.key(1))
    for key in (jax.random.key(1), jax.random.PRNGKey(1)):
        np.testing.assert_array_equal(jax.jit(draw)(key), expected)
        batch = jnp.stack([key, key])
        np.testing.assert_allclose(jax.vmap(draw)(batch), [expected, expected])


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: 0, "`0` of type `int`"),
        (lambda: np.uint32(3), "`uint32`"),
        (lambda: None, "`None` of type `NoneType`"),
        (lambda: [0, 1], "`list`"),
        (lambda: np.array([0, 1], np.uint32), "`ndarray`"),
        (lambda: jnp.array([0, 1], jnp.int32), "of type"),
        (lambda: jnp.array(0, jnp.uint32), r"an array uint32\[\]"),
        (lambda: jnp.zeros(3, jnp.uint32), r"an array uint32\[3\]"),
        (lambda: jax.random.split(jax.random.PRNGKey(0), 5), r"an array uint32\[5, 2\]"),
        (lambda: jax.random.split(jax.random.key(0), 5), r"a batch of keys of shape \(5,\)"),
    ],
)
def test_anything_else_is_refused_with_the_way_out(make, named):
    with pytest.raises(TypeError, match=named) as info:
        as_key(make())
    assert "jax.random.key(seed)" in str(info.value)
