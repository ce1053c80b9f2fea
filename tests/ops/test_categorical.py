import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo.ops import (
    IMPOSSIBLE,
    categorical_entropy,
    categorical_log_likelihood,
    masked_log_probabilities,
)

LOGITS = jnp.array([[1.0, -2.0, 0.5, 3.0], [0.0, 0.0, 0.0, 0.0]], jnp.float32)
MASK = jnp.array([[True, False, True, False], [False, True, True, True]])


def softmax(logits, mask):
    weights = np.where(mask, np.exp(np.float64(logits)), 0.0)
    return weights / weights.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("mask", [None, MASK])
def test_probabilities_are_the_softmax_of_what_is_allowed(mask):
    got = np.exp(np.float64(masked_log_probabilities(LOGITS, mask)))
    allowed = np.ones((2, 4), bool) if mask is None else np.asarray(mask)
    np.testing.assert_allclose(got, softmax(LOGITS, allowed), rtol=1e-6)
    assert (got[~allowed] == 0.0).all()
    assert (np.exp(masked_log_probabilities(LOGITS, mask))[~allowed] == 0.0).all()


def test_where_nothing_is_allowed_everything_is_equally_likely():
    nothing = jnp.zeros((2, 4), bool)
    got = masked_log_probabilities(1e4 * LOGITS, nothing)
    np.testing.assert_allclose(got, np.full((2, 4), -np.log(4.0)), rtol=1e-6)
    slopes = jax.jacobian(masked_log_probabilities)(LOGITS, nothing)
    np.testing.assert_array_equal(slopes, np.zeros((2, 4, 2, 4)))


def test_minus_infinity_is_a_mask_too():
    logits = jnp.where(MASK, LOGITS, -jnp.inf)
    masked = masked_log_probabilities(LOGITS, MASK)
    np.testing.assert_array_equal(masked_log_probabilities(logits), masked)
    slopes = jax.grad(lambda x: jnp.sum(categorical_entropy(masked_log_probabilities(x))))(logits)
    assert np.isfinite(slopes).all()
    nothing = masked_log_probabilities(jnp.full((1, 4), -jnp.inf))
    np.testing.assert_allclose(nothing, np.full((1, 4), -np.log(4.0)), rtol=1e-6)


def test_log_likelihood_picks_the_chosen_entry():
    table = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 5)), jnp.float32)
    choices = jnp.array([[0, 4], [2, 2], [3, 1]], jnp.int32)
    got = categorical_log_likelihood(choices, table)
    expected = [[table[i, j, choices[i, j]] for j in range(2)] for i in range(3)]
    np.testing.assert_array_equal(got, np.array(expected))


def test_entropy_by_hand():
    probabilities = np.array([[0.5, 0.25, 0.25, 0.0], [0.25] * 4, [1.0, 0.0, 0.0, 0.0]])
    logs = np.where(probabilities > 0, np.log(np.maximum(probabilities, 1e-9)), IMPOSSIBLE)
    got = categorical_entropy(jnp.asarray(logs, jnp.float32))
    np.testing.assert_allclose(got, [1.5 * np.log(2), 2 * np.log(2), 0.0], rtol=1e-6)


def test_slopes_of_the_entropy_by_hand_and_zero_where_masked():
    """dH / dx_i = -p_i (log p_i + H)."""
    slopes = jax.grad(lambda x: jnp.sum(categorical_entropy(masked_log_probabilities(x, MASK))))(
        LOGITS
    )
    p = softmax(LOGITS, MASK)
    log_p = np.log(np.where(MASK, p, 1.0))
    entropy = -np.sum(p * log_p, axis=-1, keepdims=True)
    np.testing.assert_allclose(slopes, -p * (log_p + entropy), atol=1e-6)
    assert (np.asarray(slopes)[~np.asarray(MASK)] == 0.0).all()


@pytest.mark.parametrize("mask", [None, jnp.array([False, True, True])])
def test_extreme_logits_stay_finite(mask):
    logits = jnp.array([1e4, -1e4, 0.0], jnp.float32)

    def total(logits):
        logs = masked_log_probabilities(logits, mask)
        choice = jnp.int32(1)
        return categorical_log_likelihood(choice, logs) + categorical_entropy(logs)

    value, slopes = jax.value_and_grad(total)(logits)
    assert float(value) == pytest.approx(-2e4 if mask is None else -1e4)
    np.testing.assert_allclose(slopes, [-1.0, 1.0, 0.0] if mask is None else [0.0, 1.0, -1.0])
