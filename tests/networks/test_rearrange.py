"""`Splitter`, `Flattener`, `Filter` and `Scale`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo import networks as nets


def run(module, x):
    return module((), x).output


TREE = {
    "b": [jnp.arange(12.0).reshape(2, 2, 3), jnp.arange(2.0)],
    "a": {"p": jnp.arange(4.0).reshape(2, 2), "n": jnp.array([[1], [2]], jnp.int32)},
}


def test_splitter_cuts_in_the_given_order():
    x = jnp.arange(10.0).reshape(2, 5)
    output = run(nets.Splitter(z=2, a=3), x)
    np.testing.assert_array_equal(output["z"], np.asarray(x)[:, :2])
    np.testing.assert_array_equal(output["a"], np.asarray(x)[:, 2:])
    # The order survives tree operations, which sort dicts.
    rebuilt = jax.tree.map(lambda leaf: leaf, nets.Splitter(z=2, a=3))
    np.testing.assert_array_equal(jax.jit(lambda v: run(rebuilt, v))(x)["z"], output["z"])


def test_splitter_refuses_wrong_sizes():
    with pytest.raises(ValueError, match=r"\[B, 5\], but got \[2, 4\]"):
        run(nets.Splitter(z=2, a=3), jnp.zeros((2, 4)))
    with pytest.raises(ValueError, match="a=-1"):
        nets.Splitter(a=-1)
    with pytest.raises(ValueError, match="at least one slice"):
        nets.Splitter()


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_flattener_takes_leaves_in_tree_order_eager_and_jitted(wrap):
    output = wrap(lambda x: run(nets.Flattener(), x))(TREE)
    expected = np.concatenate(
        [
            np.array([[1.0], [2.0]]),
            np.arange(4.0).reshape(2, 2),
            np.arange(12.0).reshape(2, 6),
            np.arange(2.0).reshape(2, 1),
        ],
        axis=1,
    )
    np.testing.assert_array_equal(output, expected)
    assert output.dtype == jnp.float32


def test_flattener_keeps_upper_levels():
    output = run(nets.Flattener(preserve_levels=1), TREE)
    assert {key: value.shape for key, value in output.items()} == {"a": (2, 3), "b": (2, 7)}
    deeper = run(nets.Flattener(preserve_levels=2), TREE)
    assert [leaf.shape for leaf in deeper["b"]] == [(2, 6), (2, 1)]
    np.testing.assert_array_equal(run(nets.Flattener(preserve_levels=1), output)["b"], output["b"])
    with pytest.raises(TypeError, match="Lower `preserve_levels`"):
        run(nets.Flattener(preserve_levels=3), TREE)
    with pytest.raises(ValueError, match="at least 0"):
        nets.Flattener(-1)


def test_filter_selects_by_key_path_and_function():
    module = nets.Filter({"key": "a", "path": ("b", 1), "made": lambda x: x["a"]["p"] + 1.0})
    output = run(module, TREE)
    assert set(output) == {"key", "path", "made"}
    np.testing.assert_array_equal(output["key"]["p"], TREE["a"]["p"])
    np.testing.assert_array_equal(output["path"], np.arange(2.0))
    np.testing.assert_array_equal(output["made"], np.arange(4.0).reshape(2, 2) + 1.0)


def test_filter_names_what_it_cannot_find():
    with pytest.raises(ValueError, match=r"cannot find 'c' .* there is \['b', 'a'\]"):
        run(nets.Filter({"x": "c"}), TREE)
    with pytest.raises(ValueError, match=r"cannot find 5 \(part 1 of \('b', 5\)\)"):
        run(nets.Filter({"x": ("b", 5)}), TREE)
    with pytest.raises(TypeError, match="`x` is a `int`"):
        nets.Filter({"x": 3})


def test_scale_multiplies_and_is_not_trained():
    module = nets.Scale(0.5)
    output = run(module, {"f": jnp.full((2, 1), 3.0), "n": jnp.full((2,), 4, jnp.int32)})
    np.testing.assert_array_equal(output["f"], 1.5)
    np.testing.assert_array_equal(output["n"], 2.0)
    assert output["n"].dtype == jnp.float32
    assert run(module, jnp.ones((2, 1), jnp.bfloat16)).dtype == jnp.bfloat16
    assert not any(jax.tree.leaves(nets.trainable(module)))
