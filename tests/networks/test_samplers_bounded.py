"""Bounds and deviations: `NormalSampler`, `BetaSampler` and `AffineSampler`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo.networks import (
    AffineSampler,
    BetaSampler,
    CategoricalSampler,
    Frozen,
    NormalSampler,
    NormalTanhSampler,
    trainable,
)


@eqx.filter_jit
def call(module, state, x, extras=None):
    return module(state, x, extras)


def run(sampler, x, raw=None):
    x = jnp.asarray(x, jnp.float32)
    raw = None if raw is None else jnp.asarray(raw, jnp.float32)
    return call(sampler, sampler.initialize_state(len(x), key=jax.random.key(0)), x, raw)


TANH = NormalTanhSampler(entropy_weight=0.1)


# --- Squashing ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "log_det"),
    [(0.0, 0.0), (1.0, -0.8676), (5.0, -8.6138), (9.0, -16.6137), (20, -38.6137)],
)
@pytest.mark.parametrize("scale", [1.0, 0.4])
def test_the_log_determinant_is_the_stable_one_and_the_action_squashed_once(raw, log_det, scale):
    sampler = TANH if scale == 1.0 else AffineSampler(TANH, -scale, scale)
    out = run(sampler, [[raw, 0.0]], [[raw]])
    std = np.log(2) + 0.1
    expected = -np.log(std) - 0.5 * np.log(2 * np.pi) - log_det - np.log(scale)
    np.testing.assert_allclose(out.output.log_likelihood, [expected], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(out.output.action, [[scale * np.tanh(raw)]], rtol=1e-5)


@pytest.mark.parametrize("raw", [-200.0, -40.0, 40.0, 200.0])
def test_a_beta_action_that_rounds_to_a_bound_keeps_its_log_likelihood(raw):
    """log p = log 2 + log(1 - x) - log 2 for concentrations 1 and 2, with x = 1 / (1 + e^-u)."""
    pre = [-200.0, np.log(np.expm1(1 / (1 - 1 / 999)))]
    out = run(BetaSampler(entropy_weight=0.0), [pre], [[raw]])
    np.testing.assert_array_equal(out.output.action, [[np.sign(raw)]])
    np.testing.assert_allclose(
        out.output.log_likelihood, [-np.logaddexp(0, raw)], rtol=1e-5, atol=1e-4
    )


# --- Deviations ---------------------------------------------------------------------------


def test_the_deviation_of_a_normal_sampler_is_a_parameter_within_its_limits():
    sampler = NormalSampler(2, entropy_weight=0.0, initial_std=0.5, min_std=0.2, max_std=3.0)
    assert trainable(sampler).pre_std is True
    out = run(sampler, [[4.0, -7.0], [0.0, 1.0]])
    np.testing.assert_allclose(out.metrics["std"], np.full((2, 2), 0.5), rtol=1e-6)
    np.testing.assert_array_equal(out.metrics["mean"], [[4.0, -7.0], [0.0, 1.0]])
    for pre_std, std in ((-200.0, 0.2), (-20.0, 0.2), (1e4, 3.0), (1e30, 3.0)):
        moved = eqx.tree_at(lambda s: s.pre_std, sampler, jnp.full(2, pre_std, jnp.float32))
        out = run(moved, [[4.0, -7.0]])
        np.testing.assert_allclose(out.metrics["std"], [[std, std]], rtol=1e-3)
        assert 0.2 <= out.metrics["std"].min() <= out.metrics["std"].max() <= 3.0
        for away in (0.0, 5.0):

            def loss(sampler, away=away):
                state = sampler.initialize_state(1, key=jax.random.key(0))
                x = jnp.zeros((1, 2), jnp.float32)
                return jnp.sum(sampler(state, x, x + away).output.log_likelihood)

            assert np.isfinite(eqx.filter_grad(loss)(moved).pre_std).all()


def test_the_slope_of_the_deviation_by_hand():
    """d log N / d std = (z^2 - 1) / std, times the slope of the softplus (no maximum)."""
    sampler = NormalSampler(1, entropy_weight=0.0, min_std=0.2, max_std=float("inf"))
    state = sampler.initialize_state(1, key=jax.random.key(0))

    def log_likelihood(sampler):
        raw = jnp.array([[3.0]], jnp.float32)
        return sampler(state, jnp.zeros((1, 1), jnp.float32), raw).output.log_likelihood[0]

    got = eqx.filter_grad(log_likelihood)(sampler).pre_std
    sigmoid = 1 - np.exp(-0.8)  # of the softplus that is 0.8
    np.testing.assert_allclose(got, [(9.0 - 1.0) * sigmoid], rtol=1e-5)


@pytest.mark.parametrize("pre", [-1e4, -200.0, -20.0, 0.0, 20.0, 1e4])
def test_the_deviation_of_a_beta_action_has_its_documented_limits(pre):
    """Between that of equal concentrations of 1000 and that of a uniform action, 1 / sqrt 3."""
    out = run(BetaSampler(entropy_weight=0.0), [[pre, pre]])
    std = float(out.metrics["std"][0, 0])
    assert 1 / np.sqrt(2001) * (1 - 1e-5) <= std <= 1 / np.sqrt(3) * (1 + 1e-6)
    np.testing.assert_allclose(out.metrics["mean"], [[0.0]], atol=1e-6)


def test_mean_and_deviation_of_a_beta_action_are_those_of_its_samples():
    out = run(BetaSampler(entropy_weight=0.0), np.tile([[1.0, 2.0]], (20_000, 1)))
    actions = np.float64(out.output.action[:, 0])
    std = float(out.metrics["std"][0, 0])
    assert actions.std() == pytest.approx(std, rel=0.02)
    assert actions.mean() == pytest.approx(float(out.metrics["mean"][0, 0]), abs=5 * std / 141)


# --- Bounds -------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [TANH, BetaSampler(entropy_weight=0.1)])
def test_actions_are_stretched_over_the_bounds_and_never_leave_them(inner):
    low, high = np.float32([-0.4, -0.8]), np.float32([0.8, 0.1])  # low + 2 * scale is above high
    sampler = AffineSampler(inner, low, high)
    assert inner.bounds == (-1.0, 1.0)
    np.testing.assert_array_equal(sampler.bounds, (low, high))
    raw = np.repeat(np.array([-1e4, -100.0, -3.0, 0.0, 0.7, 100.0, 1e4])[:, None], 2, axis=1)
    x = np.zeros((7, 4))
    plain, stretched = run(inner, x, raw), run(sampler, x, raw)
    expected = low + (np.float64(plain.output.action) + 1) / 2 * (np.float64(high) - low)
    np.testing.assert_allclose(stretched.output.action, expected, rtol=1e-6, atol=1e-7)
    action = np.asarray(stretched.output.action)
    assert (low <= action).all()
    assert (action <= high).all()
    np.testing.assert_array_equal(action[[0, -1]], [low, high])
    shift = np.log(0.6) + np.log(0.45)
    difference = stretched.output.log_likelihood - plain.output.log_likelihood
    np.testing.assert_allclose(difference[1:-1], np.full(5, -shift), rtol=1e-3)
    np.testing.assert_allclose(
        stretched.metrics["entropy"] - plain.metrics["entropy"], np.full(7, shift), rtol=1e-4
    )


def test_the_likelihood_ratio_does_not_depend_on_the_bounds():
    x, other = np.array([[0.3, -0.2]]), np.array([[0.1, 0.4]])
    ratios = []
    for sampler in (TANH, AffineSampler(TANH, -0.4, 0.4), AffineSampler(TANH, 100.0, 900.0)):
        raw = run(sampler, x).rollout_extras
        before, after = run(sampler, x, raw), run(sampler, other, raw)
        ratios.append(np.exp(after.output.log_likelihood - before.output.log_likelihood))
    np.testing.assert_allclose(ratios[1], ratios[0], rtol=1e-5)
    np.testing.assert_allclose(ratios[2], ratios[0], rtol=1e-5)
    assert abs(ratios[0] - 1) > 1e-3


def test_one_number_bounds_all_features_and_bounds_are_not_trained():
    one, each = AffineSampler(TANH, -2.0, 3.0), AffineSampler(TANH, [-2.0] * 3, [3.0] * 3)
    x = np.random.default_rng(0).normal(size=(2, 6))
    np.testing.assert_allclose(
        run(one, x).output.log_likelihood, run(each, x).output.log_likelihood, rtol=1e-6
    )
    assert isinstance(one.limits, Frozen)
    assert not any(jax.tree.leaves(trainable(each)))


def test_affine_samplers_nest():
    """From (-1, 1) to (0, 10) and (0, 4), and from there to (5, 6): the middle is 5.5."""
    nested = AffineSampler(AffineSampler(TANH, 0.0, [10.0, 4.0]), 5.0, 6.0)
    out = run(nested, np.zeros((1, 4)), np.zeros((1, 2)))
    np.testing.assert_allclose(out.output.action, [[5.5, 5.5]], rtol=1e-6)
    plain = run(TANH, np.zeros((1, 4)), np.zeros((1, 2)))
    difference = out.output.log_likelihood - plain.output.log_likelihood
    np.testing.assert_allclose(difference, [-2 * np.log(0.5)], rtol=1e-5)
    quiet = eqx.nn.inference_mode(nested)
    assert quiet.inference is quiet.sampler.inference is quiet.sampler.sampler.inference is True
    assert nested.entropy_weight == 0.1


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (-np.inf, np.inf),
        (0.0, np.inf),
        (1.0, 1.0),
        (1.0, -1.0),
        ([-1.0, 2.0], [1.0, 2.0]),
        (np.nan, 1.0),
        (1e8, 1e8 + 1),  # equal in float32
        (-3e38, 3e38),  # a width that float32 does not hold
        (np.full((1, 1), -1.0), np.ones((1, 1))),
    ],
)
def test_bounds_that_are_none_are_refused(low, high):
    with pytest.raises(ValueError, match="finite bounds with low < high") as info:
        AffineSampler(TANH, low, high)
    assert "`NormalSampler`" in str(info.value)


def test_bounds_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="numbers, or one for each feature"):
        AffineSampler(TANH, [-1.0, -1.0], [1.0, 1.0, 1.0])
    sampler = AffineSampler(TANH, [-1.0, -1.0, -1.0], 1.0)
    with pytest.raises(ValueError, match=r"bounds for 3 features.*shape \(2,\)"):
        run(sampler, np.zeros((1, 4)))


@pytest.mark.parametrize(
    "inner", [NormalSampler(2, entropy_weight=0.0), CategoricalSampler(3, entropy_weight=0.0)]
)
def test_unbounded_samplers_cannot_be_stretched(inner):
    assert inner.bounds is None
    with pytest.raises(ValueError, match=f"`{type(inner).__name__}` have no bounds"):
        AffineSampler(inner, -1.0, 1.0)


# --- Arguments ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"min_std": 0.0},
        {"initial_std": 0.05},
        {"initial_std": 10.0},
        {"min_std": 3.0, "max_std": 2.0},
        {"max_std": float("nan")},
    ],
)
def test_bad_deviations_are_refused(options):
    with pytest.raises(ValueError, match="0 < min_std < initial_std < max_std"):
        NormalSampler(2, entropy_weight=0.0, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"min_concentration": 0.9},
        {"min_concentration": 2.0, "max_concentration": 2.0},
        {"max_concentration": float("nan")},
    ],
)
def test_bad_concentrations_are_refused(options):
    with pytest.raises(ValueError, match="1 <= min_concentration < max_concentration"):
        BetaSampler(entropy_weight=0.0, **options)


@pytest.mark.parametrize(
    ("sampler", "shape"),
    [
        (BetaSampler(entropy_weight=0.0), (3, 3)),
        (BetaSampler(entropy_weight=0.0), (3,)),
        (NormalSampler(2, entropy_weight=0.0), (3, 4)),
        (NormalSampler(2, entropy_weight=0.0), (3,)),
    ],
)
def test_wrong_inputs_are_refused_with_their_shape(sampler, shape):
    with pytest.raises(ValueError, match=f"`{type(sampler).__name__}` expected") as info:
        sampler(sampler.initialize_state(3, key=jax.random.key(0)), jnp.zeros(shape))
    assert str(list(shape)) in str(info.value)
