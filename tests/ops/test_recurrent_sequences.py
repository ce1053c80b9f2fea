"""Sequences of LSTM and GRU steps: NumPy loops, and what JAX makes of a scan of single steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo.ops import gru_sequence, gru_step, lstm_sequence, lstm_step

T, B, H = 6, 4, 3


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def draw(n_gates, length=T, seed=0):
    """Kernel, projections and resets, with a step at which all and one at which none is done."""
    keys = jax.random.split(jax.random.key(seed), 8)
    kernel = jax.random.normal(keys[0], (H, n_gates * H))
    projections = jax.random.normal(keys[1], (length, B, n_gates * H))
    done = jax.random.bernoulli(keys[2], 0.3, (length, B))
    if length > 2:
        done = done.at[1].set(True).at[2].set(False)
    states = [jax.random.normal(key, (B, H)) for key in keys[3:7]]
    return kernel, projections, done, states, jax.random.normal(keys[7], (H,))


def lstm_arguments(**options):
    kernel, projections, done, states, _ = draw(4, **options)
    return (kernel, (states[0], states[1]), (states[2], states[3]), projections), done


def gru_arguments(**options):
    kernel, projections, done, states, bias = draw(3, **options)
    return (kernel, bias, states[0], states[1], projections), done


def scanned_lstm(kernel, state, reset, projections, done):
    def step(state, inputs):
        projection, done_now = inputs
        hidden, cell = lstm_step(kernel, state, projection)
        mask = done_now[:, None]
        after = jnp.where(mask, reset[0], hidden), jnp.where(mask, reset[1], cell)
        return after, hidden

    return jax.lax.scan(step, state, (projections, done))


def scanned_gru(kernel, bias, hidden, reset, projections, done):
    def step(hidden, inputs):
        projection, done_now = inputs
        hidden = gru_step(kernel, bias, hidden, projection)
        return jnp.where(done_now[:, None], reset, hidden), hidden

    return jax.lax.scan(step, hidden, (projections, done))


CASES = {
    "lstm": (lstm_sequence, scanned_lstm, lstm_arguments),
    "gru": (gru_sequence, scanned_gru, gru_arguments),
}
each = pytest.mark.parametrize("case", CASES)


def weighted(function, done):
    """A scalar of everything that a sequence gives."""

    def scalar(*args):
        last, outputs = function(*args, done)
        leaves = [*jax.tree.leaves(last), outputs]
        weights = [np.random.default_rng(i).normal(size=x.shape) for i, x in enumerate(leaves)]
        return sum(
            jnp.sum(jnp.asarray(w, jnp.float32) * jnp.sin(x.astype(jnp.float32)))
            for w, x in zip(weights, leaves, strict=True)
        )

    return scalar


def assert_close(got, expected, tolerance=2e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), got, expected
    )


def test_lstm_equals_a_numpy_loop():
    (kernel, state, reset, projections), done = lstm_arguments()
    (hidden, cell), outputs = lstm_sequence(kernel, state, reset, projections, done)
    h, c = (np.array(leaf) for leaf in state)
    for t in range(T):
        i, f, g, o = np.split(np.asarray(projections[t]) + h @ np.asarray(kernel), 4, axis=1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        np.testing.assert_allclose(outputs[t], h, atol=1e-5)
        for b in np.flatnonzero(done[t]):
            h[b], c[b] = reset[0][b], reset[1][b]
    np.testing.assert_allclose(hidden, h, atol=1e-5)
    np.testing.assert_allclose(cell, c, atol=1e-5)


def test_gru_equals_a_numpy_loop():
    (kernel, bias, hidden, reset, projections), done = gru_arguments()
    last, outputs = gru_sequence(kernel, bias, hidden, reset, projections, done)
    h = np.array(hidden)
    for t in range(T):
        from_input = np.split(np.asarray(projections[t]), 3, axis=1)
        from_state = np.split(h @ np.asarray(kernel), 3, axis=1)
        r = sigmoid(from_input[0] + from_state[0])
        z = sigmoid(from_input[1] + from_state[1])
        n = np.tanh(from_input[2] + r * (from_state[2] + np.asarray(bias)))
        h = (1 - z) * n + z * h
        np.testing.assert_allclose(outputs[t], h, atol=1e-5)
        for b in np.flatnonzero(done[t]):
            h[b] = reset[b]
    np.testing.assert_allclose(last, h, atol=1e-5)


@each
@pytest.mark.parametrize("length", [1, 2, T])
def test_gradients_equal_those_of_a_scan(case, length):
    function, scanned, arguments = CASES[case]
    args, done = arguments(length=length)
    numbers = tuple(range(len(args)))
    got = jax.grad(weighted(function, done), numbers)(*args)
    expected = jax.grad(weighted(scanned, done), numbers)(*args)
    assert_close(got, expected)
    assert all(bool(jnp.any(leaf != 0)) for leaf in jax.tree.leaves(expected))


@each
def test_tangents_equal_those_of_a_scan(case):
    function, scanned, arguments = CASES[case]
    args, done = arguments()
    tangents, _ = arguments(seed=1)
    got = jax.jvp(lambda *args: function(*args, done), args, tangents)
    assert_close(got, jax.jvp(lambda *args: scanned(*args, done), args, tangents))


@each
def test_second_derivatives_equal_those_of_a_scan(case):
    function, scanned, arguments = CASES[case]
    args, done = arguments()
    tangents, _ = arguments(seed=1)
    numbers = tuple(range(len(args)))

    def product(scalar):
        return jax.jvp(jax.grad(scalar, numbers), args, tangents)[1]

    assert_close(product(weighted(function, done)), product(weighted(scanned, done)), 2e-4)


@each
def test_many_sequences_at_once_equal_each_alone(case):
    function, _, arguments = CASES[case]
    (one, done), (other, _) = arguments(), arguments(seed=1)
    args = jax.tree.map(lambda a, b: jnp.stack([a, b]), one, other)
    grads = jax.vmap(jax.grad(weighted(function, done)))(*args)
    for index, single in enumerate((one, other)):
        assert_close(grads[index], jax.grad(weighted(function, done))(*single))


@each
def test_what_is_reset_away_has_no_gradient(case):
    """Infinite derivatives of an episode that is over do not reach the next one."""
    function, _, arguments = CASES[case]
    args, done = arguments()
    *others, projections = args
    done = jnp.zeros_like(done).at[2].set(True)

    def late(projections):
        return jnp.sum(jnp.square(function(*others, projections, done)[1][3:]))

    grad = jax.grad(late)(projections)
    assert not bool(jnp.any(grad[:3]))
    assert bool(jnp.all(jnp.any(grad[3:] != 0, axis=(1, 2))))
    broken = projections.at[0].set(jnp.nan)
    assert bool(jnp.all(jnp.isfinite(jax.grad(late)(broken)[3:])))


@each
def test_the_kernel_decides_the_precision_of_the_product(case):
    function, scanned, arguments = CASES[case]
    args, done = arguments()
    low = [leaf.astype(jnp.bfloat16) for leaf in jax.tree.leaves(args)]
    args = jax.tree.unflatten(jax.tree.structure(args), low)
    got = function(*args, done)
    assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {jnp.dtype(jnp.bfloat16)}
    assert_close(*(jax.tree.map(np.float32, x) for x in (got, scanned(*args, done))), 0.02)
    numbers = tuple(range(len(args)))
    grads = jax.grad(weighted(function, done), numbers)(*args)
    expected = jax.grad(weighted(scanned, done), numbers)(*args)
    assert_close(*(jax.tree.map(np.float32, x) for x in (grads, expected)), 0.1)
