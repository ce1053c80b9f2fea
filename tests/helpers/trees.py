"""Comparisons of pytrees that say which leaf differs."""

import jax
import jax.numpy as jnp
import numpy as np


def is_key(leaf):
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def as_numpy(leaf):
    """The values of an array; those of a PRNG key are its words."""
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)


def assert_same(got, expected):
    """Same structure, shapes, dtypes and values, bit for bit (a NaN equals itself)."""
    assert_close(got, expected, rtol=0.0, atol=0.0)


def assert_close(got, expected, rtol=1e-5, atol=1e-6):
    """Same structure, shapes and dtypes; floats within the tolerance, all else equal."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(expected)[0]]
    for path, a, b in zip(paths, jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        where = jax.tree_util.keystr(path)
        x, y = as_numpy(a), as_numpy(b)
        assert x.dtype == y.dtype, where
        assert x.shape == y.shape, where
        if np.issubdtype(y.dtype, np.floating):
            np.testing.assert_allclose(x, y, rtol=rtol, atol=atol, err_msg=where)
        else:
            np.testing.assert_array_equal(x, y, err_msg=where)


def signature(tree):
    """Structure, and shape, dtype and weak type of every leaf."""
    leaves = [
        (leaf.shape, leaf.dtype, jax.typeof(leaf).weak_type) for leaf in jax.tree.leaves(tree)
    ]
    return jax.tree.structure(tree), leaves
