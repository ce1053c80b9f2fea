import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo.ops import add_bias, linear

# One for each way in which the gradient is computed.
SIZES = {"narrow input": (3, 20), "narrow output": (24, 2), "wide": (12, 20)}


@pytest.fixture(params=SIZES)
def case(request):
    n_in, n_out = SIZES[request.param]
    rng = np.random.default_rng(n_in)
    return tuple(
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((7, n_in), (n_in, n_out), (7, n_in), (n_in, n_out), (7, n_out))
    )


def close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_the_product_is_the_plain_one_bit_for_bit(case):
    x, kernel, *_ = case
    np.testing.assert_array_equal(linear(x, kernel), x @ kernel)


def test_gradients_by_both_factors_are_numpys(case):
    x, kernel, _, _, g = case
    _, pull = jax.vjp(linear, x, kernel)
    dx, dkernel = jax.jit(pull)(g)
    close(dx, np.asarray(g) @ np.asarray(kernel).T)
    close(dkernel, np.asarray(x).T @ np.asarray(g))


def test_gradients_by_one_factor_alone(case):
    x, kernel, _, _, g = case
    close(jax.grad(lambda w: jnp.sum(linear(x, w) * g))(kernel), x.T @ g)
    close(jax.grad(lambda v: jnp.sum(linear(v, kernel) * g))(x), g @ kernel.T)


def test_forward_mode(case):
    x, kernel, dx, dkernel, _ = case
    y, dy = jax.jvp(linear, (x, kernel), (dx, dkernel))
    close(y, x @ kernel)
    close(dy, dx @ kernel + x @ dkernel)


def test_second_derivatives(case):
    """`sum((x w)^2)` has the Hessian `2 x^T x` by each column of `w`."""
    x, kernel, _, dkernel, _ = case

    def loss(w):
        return jnp.sum(jnp.square(linear(x, w)))

    expected = 2 * np.asarray(x).T @ np.asarray(x) @ np.asarray(dkernel)
    _, forward_over_reverse = jax.jvp(jax.grad(loss), (kernel,), (dkernel,))
    reverse_over_reverse = jax.grad(lambda w: jnp.sum(jax.grad(loss)(w) * dkernel))(kernel)
    for got in (forward_over_reverse, reverse_over_reverse):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-3)


def test_over_a_batch_of_kernels(case):
    x, kernel, _, dkernel, g = case
    kernels = jnp.stack([kernel, dkernel])
    grads = jax.vmap(jax.grad(lambda w: jnp.sum(linear(x, w) * g * linear(x, w))))(kernels)
    for w, grad in zip(kernels, grads, strict=True):
        close(grad, 2 * np.asarray(x).T @ (np.asarray(g) * (np.asarray(x) @ np.asarray(w))))


def test_bfloat16_stays_bfloat16(case):
    x, kernel, *_ = (leaf.astype(jnp.bfloat16) for leaf in case)
    y, pull = jax.vjp(linear, x, kernel)
    dx, dkernel = pull(y)
    assert y.dtype == dx.dtype == dkernel.dtype == jnp.bfloat16


# --- The bias -------------------------------------------------------------------------------


def bias_case(n=6, width=5):
    rng = np.random.default_rng(3)
    return [
        rng.normal(size=shape).astype(np.float32) for shape in ((n, width), (width,), (n, width))
    ]


def test_the_bias_is_added_to_every_row():
    x, bias, _ = bias_case()
    np.testing.assert_array_equal(add_bias(x, bias), x + bias)


def test_gradients_by_rows_and_bias_are_numpys():
    x, bias, weights = bias_case()
    by_x, by_bias = jax.grad(lambda x, b: jnp.sum(weights * add_bias(x, b)), (0, 1))(x, bias)
    np.testing.assert_array_equal(by_x, weights)
    np.testing.assert_allclose(by_bias, weights.sum(0), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(
        jax.grad(lambda b: jnp.sum(weights * add_bias(x, b)))(bias), weights.sum(0), atol=1e-6
    )


def test_the_bias_in_forward_mode_and_to_second_order():
    x, bias, weights = bias_case()
    _, tangent = jax.jvp(add_bias, (x, bias), (weights, bias))
    np.testing.assert_allclose(tangent, weights + bias, rtol=1e-6)
    hessian = jax.hessian(lambda b: jnp.sum(add_bias(x, b) ** 2))(bias)
    np.testing.assert_allclose(hessian, 2 * len(x) * np.eye(len(bias)), atol=1e-5)


def test_the_bias_over_a_batch_of_layers():
    x, bias, weights = bias_case()
    biases = np.stack([bias, 2 * bias])
    grads = jax.vmap(jax.grad(lambda b: jnp.sum(weights * add_bias(x, b) ** 2)))(biases)
    expected = [(2 * weights * (x + b)).sum(0) for b in biases]
    np.testing.assert_allclose(grads, expected, rtol=1e-5, atol=1e-5)


def test_a_bias_of_another_dtype():
    x, bias, _ = bias_case()
    with jax.numpy_dtype_promotion("standard"):
        grad = jax.grad(lambda b: jnp.sum(add_bias(x, b)))(jnp.asarray(bias, jnp.bfloat16))
    assert grad.dtype == jnp.bfloat16
    np.testing.assert_array_equal(grad.astype(jnp.float32), np.full(5, 6.0))


def test_rows_of_a_narrower_dtype_than_the_bias():
    x, bias, _ = bias_case()
    with jax.numpy_dtype_promotion("standard"):
        grad = jax.grad(lambda x: jnp.sum(add_bias(x, bias)))(jnp.asarray(x, jnp.bfloat16))
    assert grad.dtype == jnp.bfloat16
    np.testing.assert_array_equal(grad.astype(jnp.float32), np.ones((6, 5)))
