import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo.networks import Lift, Sequential, trainable
from tests.helpers.modules import Observation


def normal(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def test_layer_norm_equals_numpy():
    x = np.float64(normal(5, 4))
    got = Lift(eqx.nn.LayerNorm(4, eps=1e-5))((), normal(5, 4)).output
    centered = x - x.mean(1, keepdims=True)
    expected = centered / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sequence", [False, True])
def test_equals_the_layer_on_each_sample(sequence, getkey):
    convolution = eqx.nn.Conv2d(1, 2, 2, key=getkey())
    mlp = eqx.nn.MLP(3, 2, 4, 1, key=getkey())
    for layer, shape in ((convolution, (1, 4, 4)), (mlp, (3,))):
        module = Lift(layer)
        if sequence:
            xs = normal(2, 3, *shape)
            got = module.unroll((), xs, jnp.zeros((2, 3), jnp.bool_)).output
            expected = np.stack([[layer(x) for x in row] for row in xs])
        else:
            x = normal(3, *shape)
            got, expected = module((), x).output, np.stack([layer(row) for row in x])
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


def test_plain_functions_of_trees():
    def swap(obs):
        return {"goal": obs.goal * 2.0, "norm": jnp.linalg.norm(obs.proprio)}

    x = Observation(normal(4, 3), normal(4, 2))
    out = Lift(swap)((), x).output
    np.testing.assert_allclose(out["goal"], 2 * x.goal)
    np.testing.assert_allclose(out["norm"], np.linalg.norm(x.proprio, axis=1), rtol=1e-5)


def test_its_arrays_are_trained(getkey):
    module = Sequential([Lift(eqx.nn.MLP(3, 2, 4, 1, key=getkey()))])
    arrays = jax.tree.leaves(eqx.filter(module, trainable(module)))
    assert sorted(leaf.shape for leaf in arrays) == [(2,), (2, 4), (4,), (4, 3)]


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda key: eqx.nn.BatchNorm(3, axis_name="batch", mode="batch"), "BatchNorm"),
        (lambda key: eqx.nn.SpectralNorm(eqx.nn.Linear(3, 3, key=key), "weight", key=key), "Spec"),
    ],
)
def test_layers_that_need_state_are_refused(build, named, getkey):
    layer = build(getkey())
    with pytest.raises(TypeError, match=rf"contains a `{named}.*needs `eqx.nn.State`"):
        Lift(layer)


def test_layers_that_draw_keys_are_refused(getkey):
    with pytest.raises(TypeError, match="contains a `Dropout`, which draws a key"):
        Lift(eqx.nn.Dropout(0.5))


def test_they_are_refused_inside_other_layers(getkey):
    linear = eqx.nn.Linear(3, 3, key=getkey())
    with pytest.raises(TypeError, match="`Sequential` contains a `Dropout`"):
        Lift(eqx.nn.Sequential([linear, eqx.nn.Dropout(0.5)]))
    batch_norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="batch")
    with pytest.raises(TypeError, match=r"which needs `eqx\.nn\.State`"):
        Lift(eqx.nn.Sequential([linear, batch_norm]))


def test_layers_that_could_but_do_not_need_state_or_keys_are_taken(getkey):
    linear = eqx.nn.Linear(3, 3, key=getkey())
    stack = eqx.nn.Sequential([linear, eqx.nn.Lambda(jnp.tanh), eqx.nn.Dropout(0)])
    x = normal(4, 3)
    expected = np.tanh(x @ linear.weight.T + linear.bias[None])
    np.testing.assert_allclose(Lift(stack)((), x).output, expected, rtol=1e-5, atol=1e-6)
    attention = eqx.nn.MultiheadAttention(1, 3, key=getkey())
    x = normal(2, 5, 3)
    with jax.numpy_rank_promotion("allow"):  # Equinox's own
        got = Lift(lambda x: attention(x, x, x))((), x).output
        expected = np.stack([attention(row, row, row) for row in x])
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)
