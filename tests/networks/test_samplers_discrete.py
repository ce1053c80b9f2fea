"""Discrete actions, masks, and distributions of one's own."""

from typing import final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo.networks import (
    ActionDistribution,
    ActionSampler,
    CategoricalSampler,
    MaskedLogits,
    MultiCategoricalSampler,
)


@eqx.filter_jit
def call(module, state, x, extras=None):
    return module(state, x, extras)


def run(sampler, x, raw=None):
    batch = len(jax.tree.leaves(x)[0])
    return call(sampler, sampler.initialize_state(batch, key=jax.random.key(0)), x, raw)


ONE = CategoricalSampler(3, entropy_weight=0.5)
SEVERAL = MultiCategoricalSampler((2, 3), entropy_weight=0.5)


# --- Masks --------------------------------------------------------------------------------


def test_a_masked_action_is_never_drawn_however_large_its_logit():
    n = 5000
    logits = jnp.tile(jnp.array([[1e4, 0.0, 0.0]], jnp.float32), (n, 1))
    mask = jnp.tile(jnp.array([[False, True, True]]), (n, 1))
    x = MaskedLogits(logits, mask)
    drawn = run(ONE, x).output
    assert set(np.unique(drawn.action)) == {1, 2}
    np.testing.assert_allclose(drawn.log_likelihood, np.full(n, np.log(0.5)), rtol=1e-5)
    assert (run(eqx.nn.inference_mode(ONE), x).output.action == 1).all()
    wrong = run(ONE, x, jnp.zeros(n, jnp.int32)).output.log_likelihood
    assert (jnp.exp(wrong) == 0).all()
    assert np.isfinite(wrong).all()


def test_gradients_of_masked_logits_are_zero_and_of_the_others_the_softmax_alone():
    state = ONE.initialize_state(2, key=jax.random.key(0))
    mask = jnp.array([[True, False, True], [False, False, False]])
    raw = jnp.array([0, 1], jnp.int32)

    def loss(logits):
        out = ONE(state, MaskedLogits(logits, mask), raw)
        return jnp.sum(out.output.log_likelihood)

    slopes = jax.grad(loss)(jnp.array([[1.0, 5.0, 2.0], [1.0, 2.0, 3.0]], jnp.float32))
    p = 1 / (1 + np.exp(1.0))
    np.testing.assert_allclose(slopes, [[1 - p, 0.0, p - 1], [0.0] * 3], atol=1e-6)
    assert (slopes[0, 1] == 0.0).all()


def test_where_everything_is_masked_all_actions_are_equally_likely():
    """One component of it only: the other keeps its own mask."""
    n = 3000
    logits = jnp.tile(jnp.array([[9.0, -9.0, 4.0, 1.0, 1.0]], jnp.float32), (n, 1))
    mask = jnp.tile(jnp.array([[False, False, False, True, True]]), (n, 1))
    out = run(SEVERAL, MaskedLogits(logits, mask))
    np.testing.assert_allclose(out.metrics["entropy"], np.full(n, 2 * np.log(2)), rtol=1e-5)
    drawn = np.asarray(out.output.action)
    assert abs(drawn[:, 0].mean() - 0.5) < 5 * 0.5 / np.sqrt(n)
    assert set(np.unique(drawn[:, 1])) == {1, 2}
    np.testing.assert_allclose(out.metrics["largest_probability"], np.full((n, 2), 0.5), rtol=1e-5)


def test_an_open_mask_changes_nothing():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 5)), jnp.float32)
    plain, masked = run(SEVERAL, logits), run(SEVERAL, MaskedLogits(logits, logits < 99))
    np.testing.assert_array_equal(plain.output.action, masked.output.action)
    np.testing.assert_allclose(plain.output.log_likelihood, masked.output.log_likelihood)


# --- Several components -------------------------------------------------------------------


def test_components_are_independent_choices_in_the_order_given():
    logits = jnp.array([[0.0, 1.0, 2.0, 0.0, 1.0]], jnp.float32)
    first, second = CategoricalSampler(2, entropy_weight=0.5), ONE
    for choice in ([0, 0], [1, 2], [0, 1]):
        raw = jnp.array([choice], jnp.int32)
        together = run(SEVERAL, logits, raw)
        parts = [run(first, logits[:, :2], raw[:, 0]), run(second, logits[:, 2:], raw[:, 1])]
        for field in (lambda o: o.output.log_likelihood, lambda o: o.regularization_loss):
            np.testing.assert_allclose(field(together), sum(map(field, parts)), rtol=1e-5)
    mode = run(eqx.nn.inference_mode(SEVERAL), logits).output.action
    np.testing.assert_array_equal(mode, [[1, 0]])


def test_components_of_one_environment_do_not_share_noise():
    n = 4000
    twice = MultiCategoricalSampler((2, 2), entropy_weight=0.0)
    drawn = np.asarray(run(twice, jnp.zeros((n, 4), jnp.float32)).output.action)
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 5 / np.sqrt(n)


# --- Arguments ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build",
    [
        lambda: CategoricalSampler(0, entropy_weight=0.0),
        lambda: MultiCategoricalSampler((), entropy_weight=0.0),
        lambda: MultiCategoricalSampler((3, 0), entropy_weight=0.0),
    ],
)
def test_at_least_one_action_is_needed(build):
    with pytest.raises(ValueError, match="at least one action"):
        build()


@pytest.mark.parametrize("x", [jnp.zeros((2, 4)), jnp.zeros((3,)), jnp.zeros((2, 1, 3))])
def test_wrong_logits_are_refused_with_their_shape(x):
    state = ONE.initialize_state(len(x), key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"shape \[B, 3\]") as info:
        ONE(state, x)
    assert str(list(x.shape)) in str(info.value)


def test_wrong_masks_are_refused():
    state = ONE.initialize_state(2, key=jax.random.key(0))
    logits = jnp.zeros((2, 3), jnp.float32)
    with pytest.raises(TypeError, match=r"mask of bool.*float32.*`mask > 0`"):
        ONE(state, MaskedLogits(logits, jnp.ones((2, 3), jnp.float32)))
    with pytest.raises(ValueError, match=r"`mask`.*shape \[B, 3\].*\[2, 1\]"):
        ONE(state, MaskedLogits(logits, jnp.ones((2, 1), bool)))
    with pytest.raises(TypeError, match=r"`MaskedLogits.*got a `dict`"):
        ONE(state, {"logits": logits, "mask": logits > 0})


# --- A distribution of one's own ----------------------------------------------------------


class Fixed(ActionDistribution):
    """Always the same action; `wrong` spoils what must be one number per environment."""

    value: jax.Array
    wrong: str = ""

    def draw(self, keys):
        return self.value

    def mode(self):
        return self.value

    def action(self, raw):
        return raw

    def log_likelihood(self, raw):
        return raw if self.wrong == "log_likelihood" else jnp.zeros(len(raw), jnp.float32)

    def entropy(self):
        size = (1,) if self.wrong == "entropy" else (len(self.value),)
        return jnp.zeros(size, jnp.float32)

    def metrics(self):
        return {}


@final
class FixedSampler(ActionSampler):
    wrong: str = eqx.field(static=True, default="")
    entropy_weight: float = 1.0
    inference: bool = False

    @property
    def bounds(self):
        return None

    def input_size(self, action_size):
        return action_size

    def distribution(self, x):
        return Fixed(x, self.wrong)


def test_a_sampler_of_ones_own_needs_only_its_distribution():
    x = jnp.array([[1.0, 2.0], [3.0, 4.0]], jnp.float32)
    out = run(FixedSampler(), x)
    np.testing.assert_array_equal(out.output.action, x)
    assert list(out.metrics) == ["entropy"]
    np.testing.assert_array_equal(out.next_state.draws, [1, 1])


@pytest.mark.parametrize("wrong", ["log_likelihood", "entropy"])
def test_one_number_per_environment_is_demanded(wrong):
    sampler = FixedSampler(wrong)
    state = sampler.initialize_state(2, key=jax.random.key(0))
    with pytest.raises(ValueError, match=rf"`Fixed\.{wrong}` must give one value per environment"):
        sampler(state, jnp.zeros((2, 2), jnp.float32))
