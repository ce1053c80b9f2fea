import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo.networks import (
    GRU,
    LSTM,
    LSTMState,
    RecurrentLayer,
    Sequential,
    check_module,
    trainable,
)
from tests.helpers.modules import with_initial_state

BOTH = pytest.mark.parametrize("layer", [LSTM, GRU])


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def with_biases(module, seed=0):
    """A module whose biases are not zero, so that forgetting them shows."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: (
            jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype)
            if eqx.is_array(leaf) and leaf.ndim == 1
            else leaf
        ),
        module,
    )


def test_lstm_equals_the_cell_of_equinox(getkey):
    module = with_biases(LSTM(3, 4, key=getkey()))
    hidden, cell, x = normal(1, 5, 4), normal(2, 5, 4), normal(3, 5, 3)
    out = module(LSTMState(hidden, cell), x)
    expected = jax.vmap(module.cell)(x, (hidden, cell))
    np.testing.assert_allclose(out.output, expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out.next_state.hidden, expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out.next_state.cell, expected[1], rtol=1e-5, atol=1e-6)


def test_gru_equals_the_cell_of_equinox(getkey):
    module = with_biases(GRU(3, 4, key=getkey()))
    assert np.abs(module.cell.bias_n).min() > 0
    hidden, x = normal(1, 5, 4), normal(3, 5, 3)
    out = module(hidden, x)
    expected = jax.vmap(module.cell)(x, hidden)
    np.testing.assert_allclose(out.output, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(out.next_state, out.output)


def test_lstm_equals_numpy(getkey):
    module = with_biases(LSTM(3, 4, key=getkey()))
    hidden, cell, x = normal(1, 5, 4), normal(2, 5, 4), normal(3, 5, 3)
    weights = module.cell
    gates = x @ weights.weight_ih.T + hidden @ weights.weight_hh.T + weights.bias[None]
    i, f, g, o = np.split(np.float64(gates), 4, axis=1)
    new_cell = sigmoid(f) * np.float64(cell) + sigmoid(i) * np.tanh(g)
    out = module(LSTMState(hidden, cell), x)
    np.testing.assert_allclose(out.next_state.cell, new_cell, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out.output, sigmoid(o) * np.tanh(new_cell), rtol=1e-5, atol=1e-6)


@BOTH
@pytest.mark.parametrize("sizes", [(3, 8), (8, 8)])
@pytest.mark.parametrize("batch", [1, 4])
def test_state_is_hidden_then_cell_of_the_hidden_size(layer, sizes, batch, getkey):
    module = layer(*sizes, key=getkey())
    state = module.initialize_state(batch, key=getkey())
    out = module(state, normal(0, batch, sizes[0]))
    hidden = (batch, sizes[1])
    assert out.output.shape == hidden
    assert [leaf.shape for leaf in jax.tree.leaves(state)] == [hidden] * (2 if layer is LSTM else 1)
    if layer is LSTM:
        assert LSTMState._fields == ("hidden", "cell")
        np.testing.assert_array_equal(out.next_state.hidden, out.output)
        assert np.abs(out.next_state.cell - out.output).max() > 1e-3


@BOTH
def test_starts_from_zeros(layer, getkey):
    module = layer(3, 4, key=getkey())
    for leaf in jax.tree.leaves(module.initialize_state(2, key=getkey())):
        np.testing.assert_array_equal(leaf, np.zeros((2, 4)))
    assert module.initial_state is None
    fresh = layer(3, 4, trainable_initial_state=True, key=getkey())
    for leaf in jax.tree.leaves(fresh.initialize_state(2, key=getkey())):
        np.testing.assert_array_equal(leaf, np.zeros((2, 4)))


@BOTH
def test_a_trained_initial_state_is_where_episodes_start(layer, getkey):
    module = with_initial_state(layer(3, 4, trainable_initial_state=True, key=getkey()))
    start = module.initialize_state(2, key=getkey())
    for leaf, row in zip(
        jax.tree.leaves(start), jax.tree.leaves(module.initial_state), strict=True
    ):
        np.testing.assert_array_equal(leaf, np.stack([row, row]))
        assert np.abs(row).min() > 0
    used = module(start, normal(0, 2, 3)).next_state
    wiped = module.reset_state(used)
    for leaf, expected in zip(jax.tree.leaves(wiped), jax.tree.leaves(start), strict=True):
        np.testing.assert_array_equal(leaf, expected)


@BOTH
def test_a_trained_initial_state_is_trained(layer, getkey):
    """Its gradient through a reset in the middle is a finite difference of the loss."""
    module = with_initial_state(layer(3, 4, trainable_initial_state=True, key=getkey()))
    assert all(jax.tree.leaves(trainable(module).initial_state))
    start = module.initialize_state(2, key=getkey())
    xs = normal(0, 3, 2, 3)
    done = jnp.array([[False, False], [True, False], [False, False]])

    @jax.jit
    def loss(initial_state):
        changed = eqx.tree_at(lambda m: m.initial_state, module, initial_state)
        return jnp.sum(jnp.square(changed.unroll(start, xs, done).output))

    gradient = jax.grad(loss)(module.initial_state)
    along = jnp.cos(jnp.arange(4, dtype=jnp.float32))

    def moved(step):
        return loss(jax.tree.map(lambda leaf: leaf + step * along, module.initial_state))

    numerical = (moved(jnp.float32(1e-2)) - moved(jnp.float32(-1e-2))) / 2e-2
    analytic = sum(jnp.vdot(leaf, along) for leaf in jax.tree.leaves(gradient))
    assert abs(float(analytic)) > 1e-2
    np.testing.assert_allclose(analytic, numerical, rtol=1e-2)


@BOTH
def test_starts_orthogonal_per_gate_with_zero_biases(layer, getkey):
    module = layer(3, 8, key=getkey())
    recurrent = np.asarray(module.cell.weight_hh)
    gates = np.split(recurrent, len(recurrent) // 8)
    assert len(gates) == (4 if layer is LSTM else 3)
    for gate in gates:
        np.testing.assert_allclose(gate @ gate.T, np.eye(8), atol=1e-5)
    assert all(np.abs(a - b).max() > 1e-3 for a, b in itertools.pairwise(gates))
    biases = [leaf for leaf in jax.tree.leaves(module) if leaf.ndim == 1]
    assert biases
    assert not any(np.any(bias) for bias in biases)
    inputs = np.asarray(layer(48, 8, key=getkey()).cell.weight_ih)
    assert np.abs(inputs).max() <= np.sqrt(3 / 48)
    assert inputs.var() == pytest.approx(1 / 48, rel=0.1)


@BOTH
@pytest.mark.parametrize("shape", [(2, 4), (2,), (2, 1, 3)])
def test_wrong_input_names_the_layer_and_both_sizes(layer, shape, getkey):
    module = layer(3, 8, key=getkey())
    state = module.initialize_state(2, key=getkey())
    with pytest.raises(ValueError, match=f"`{layer.__name__}` expected") as info:
        module(state, jnp.zeros(shape, jnp.float32))
    assert "[B, 3]" in str(info.value)
    assert str(list(shape)) in str(info.value)


@BOTH
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("built_for", [(1, 8), (2, 7)])
def test_wrong_state_names_the_layer_and_both_sizes(layer, sequence, built_for, getkey):
    """A batch of one would broadcast; a wrong width would fail inside a gate."""
    module = layer(3, 8, key=getkey())
    state = module.initialize_state(2, key=getkey())
    state = jax.tree.map(lambda leaf: jnp.zeros(built_for), state)
    args = (state, jnp.zeros((2, 3)))
    if sequence:
        args = (state, jnp.zeros((4, 2, 3)), jnp.zeros((4, 2), jnp.bool_))
    with pytest.raises(ValueError, match=f"`{layer.__name__}` expected its state") as info:
        (module.unroll if sequence else module)(*args)
    assert "[2, 8]" in str(info.value)
    assert str(list(built_for)) in str(info.value)


@BOTH
def test_errors_name_the_place_in_the_network(layer, getkey):
    network = Sequential([layer(3, 4, key=getkey()), layer(3, 4, key=getkey())])
    state = network.initialize_state(2, key=getkey())
    with pytest.raises(ValueError, match=f"`{layer.__name__}` expected") as info:
        network(state, jnp.zeros((2, 3)))
    assert any("network.layers[1]" in note for note in info.value.__notes__)


@BOTH
@pytest.mark.parametrize("sizes", [(0, 8), (3, 0)])
def test_sizes_are_validated(layer, sizes, getkey):
    with pytest.raises(ValueError, match=f"hidden_features={sizes[1]}"):
        layer(*sizes, key=getkey())


class Leaky(RecurrentLayer):
    """A recurrent layer of one's own that gives only the two parts of a step."""

    weight: jax.Array
    recurrent: jax.Array
    initial_state: jax.Array | None = None

    @property
    def in_features(self) -> int:
        return self.weight.shape[0]

    @property
    def hidden_features(self) -> int:
        return self.weight.shape[1]

    def zero_state(self):
        return jnp.zeros(self.hidden_features, jnp.float32)

    def project(self, x):
        return x @ self.weight

    def recur(self, state, projection):
        hidden = 0.5 * state + jnp.tanh(projection + state @ self.recurrent)
        return hidden, hidden


def test_a_layer_of_ones_own_needs_only_the_two_parts_of_a_step(getkey):
    layer = Leaky(normal(0, 3, 4), normal(1, 4, 4))
    check_module(layer, normal(2, 3), key=getkey())


@BOTH
@pytest.mark.parametrize("trained", [False, True])
def test_gradients_equal_those_of_a_scan_of_recur(layer, trained, getkey):
    module = with_biases(layer(3, 4, trainable_initial_state=trained, key=getkey()))
    state = module.initialize_state(5, key=getkey())
    xs, done = normal(0, 6, 5, 3), jnp.asarray(np.random.default_rng(1).random((6, 5)) < 0.3)
    weights = normal(2, 6, 5, 4)

    def size(module, sequence):
        projections = jax.vmap(module.project)(xs)
        last, outputs = sequence(module, state, projections, done)
        parts = [jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(last)]
        return jnp.sum(weights * outputs) + sum(parts)

    got = eqx.filter_grad(size)(module, layer.recur_in_turn)
    remade = eqx.filter_grad(size)(module, eqx.filter_checkpoint(layer.recur_in_turn))
    expected = eqx.filter_grad(size)(module, RecurrentLayer.recur_in_turn)
    for other in (got, remade):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), other, expected)
    assert all(bool(jnp.any(leaf != 0)) for leaf in jax.tree.leaves(expected))
