"""What holds for every sampler: each test runs over all kinds, with NumPy oracles."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from eqx_ppo import networks as nets
from eqx_ppo.networks import (
    ActionSampler,
    AffineSampler,
    BetaSampler,
    CategoricalSampler,
    MaskedLogits,
    MultiCategoricalSampler,
    NormalSampler,
    NormalTanhSampler,
    Parallel,
)
from tests.ops.test_beta import entropy as beta_entropy, log_density as beta_log_density
from tests.ops.test_tanh_normal import entropy_oracle

WEIGHT = 0.25
LOW, HIGH = np.array([-0.4, 1.0]), np.array([0.4, 7.0])
LOG_SCALE = np.sum(np.log((HIGH - LOW) / 2))
SIZES = (2, 1, 3)


# --- Oracles, in double precision ---------------------------------------------------------


def softplus(x):
    return np.logaddexp(np.float64(x), 0.0)


def bounded(x, low, high):
    return low + 1 / (1 / softplus(x) + 1 / (high - low))


def halves(x):
    return np.split(np.float64(x), 2, axis=-1)


def log_normal(value, mean, std):
    return -0.5 * ((value - mean) / std) ** 2 - np.log(std) - 0.5 * np.log(2 * np.pi)


def tanh_log_likelihood(raw, x):
    mean, pre_std = halves(x)
    log_det = 2 * np.log(2) - 2 * np.logaddexp(raw, -raw)
    return np.sum(log_normal(raw, mean, softplus(pre_std) + 0.1) - log_det, axis=-1)


def tanh_entropy(x):
    mean, pre_std = halves(x)
    return np.sum(entropy_oracle(mean, softplus(pre_std) + 0.1), axis=-1)


def normal_log_likelihood(raw, x):
    return np.sum(log_normal(raw, np.float64(x), 0.7), axis=-1)


def normal_entropy(x):
    return np.full(len(x), 2 * (0.5 * np.log(2 * np.pi * np.e) + np.log(0.7)))


def concentrations(x):
    return (bounded(half, 1.0, 1e3) for half in halves(x))


def beta_log_likelihood(raw, x):
    return np.sum(beta_log_density(raw, *concentrations(x)) - np.log(2), axis=-1)


def beta_entropies(x):
    return np.sum(beta_entropy(*concentrations(x)) + np.log(2), axis=-1)


def tables(x, sizes):
    """The log-probabilities of each component."""
    logits, mask = x if isinstance(x, MaskedLogits) else (x, np.ones(x.shape, bool))
    masked = np.where(mask, np.float64(logits), -np.inf)
    parts = np.split(masked, np.cumsum(sizes)[:-1], axis=-1)
    return [part - special.logsumexp(part, axis=-1, keepdims=True) for part in parts]


def categorical_log_likelihood(raw, x, sizes=(4,)):
    raw = raw.astype(int).reshape(len(raw), -1)
    rows = np.arange(len(raw))
    return sum(table[rows, raw[:, i]] for i, table in enumerate(tables(x, sizes)))


def categorical_entropy(x, sizes=(4,)):
    return sum(special.entr(np.exp(table)).sum(axis=-1) for table in tables(x, sizes))


class Kind(NamedTuple):
    """A sampler, parameters `[3, n]` and others `[3, n]`, and the oracles."""

    sampler: ActionSampler
    x: object
    other: object
    log_likelihood: Callable
    entropy: Callable


def draw(n, seed, scale=1.0):
    return jnp.asarray(scale * np.random.default_rng(seed).normal(size=(3, n)), jnp.float32)


MASK4 = jnp.array([[True, False, True, True], [False, False, True, False], [True] * 4])
MASK6 = jnp.array([[True, False, True, True, False, True], [True] * 6, [False, True, True] * 2])


def by_component(function):
    return lambda *args: function(*args, SIZES)


KINDS = {
    "tanh_normal": Kind(
        NormalTanhSampler(entropy_weight=WEIGHT),
        draw(4, 0),
        draw(4, 1),
        tanh_log_likelihood,
        tanh_entropy,
    ),
    "normal": Kind(
        NormalSampler(2, entropy_weight=WEIGHT, initial_std=0.7),
        draw(2, 2),
        draw(2, 3),
        normal_log_likelihood,
        normal_entropy,
    ),
    "beta": Kind(
        BetaSampler(entropy_weight=WEIGHT),
        draw(4, 4, 3.0),
        draw(4, 5, 3.0),
        beta_log_likelihood,
        beta_entropies,
    ),
    "affine": Kind(
        AffineSampler(NormalTanhSampler(entropy_weight=WEIGHT), LOW, HIGH),
        draw(4, 0),
        draw(4, 1),
        lambda raw, x: tanh_log_likelihood(raw, x) - LOG_SCALE,
        lambda x: tanh_entropy(x) + LOG_SCALE,
    ),
    "categorical": Kind(
        CategoricalSampler(4, entropy_weight=WEIGHT),
        draw(4, 6),
        draw(4, 7),
        categorical_log_likelihood,
        categorical_entropy,
    ),
    "masked": Kind(
        CategoricalSampler(4, entropy_weight=WEIGHT),
        MaskedLogits(draw(4, 6), MASK4),
        MaskedLogits(draw(4, 7), MASK4),
        categorical_log_likelihood,
        categorical_entropy,
    ),
    "multi_categorical": Kind(
        MultiCategoricalSampler(SIZES, entropy_weight=WEIGHT),
        draw(6, 8),
        draw(6, 9),
        by_component(categorical_log_likelihood),
        by_component(categorical_entropy),
    ),
    "masked_multi": Kind(
        MultiCategoricalSampler(SIZES, entropy_weight=WEIGHT),
        MaskedLogits(draw(6, 8), MASK6),
        MaskedLogits(draw(6, 9), MASK6),
        by_component(categorical_log_likelihood),
        by_component(categorical_entropy),
    ),
}
DISCRETE = ("categorical", "masked", "multi_categorical", "masked_multi")
CONTINUOUS = tuple(name for name in KINDS if name not in DISCRETE)
EVERY = pytest.mark.parametrize("name", KINDS)
EXTREME = np.array(list(itertools.product([-1e4, -200.0, -20.0, 0.0, 20.0, 1e4], repeat=2)))
N_PAIRS = len(EXTREME)


@eqx.filter_jit
def call(module, state, x, extras=None):
    return module(state, x, extras)


@eqx.filter_jit
def unroll(module, *args):
    return module.unroll(*args)


@eqx.filter_jit
def likelihood_and_slopes(module, state, x, extras):
    """Of the log-likelihood and the penalty, with respect to input and parameters."""
    logits = x.logits if isinstance(x, MaskedLogits) else x
    params, static = eqx.partition(module, nets.trainable(module))

    def total(params, logits):
        inputs = x._replace(logits=logits) if isinstance(x, MaskedLogits) else logits
        out = eqx.combine(params, static)(state, inputs, extras)
        loss = jnp.sum(out.output.log_likelihood) + jnp.sum(out.regularization_loss)
        return loss, out

    slopes, out = jax.grad(total, (0, 1), has_aux=True)(params, logits)
    return out, slopes


def start(kind, batch=3, seed=11):
    return kind.sampler.initialize_state(batch, key=jax.random.key(seed))


def repeated(x, n):
    return jax.tree.map(lambda leaf: jnp.tile(leaf[:1], (n, *(1,) * (leaf.ndim - 1))), x)


def many(name, n=20_000):
    """The same parameters in every one of `n` environments."""
    kind = KINDS[name]
    x = repeated(kind.x, n)
    return x, call(kind.sampler, start(kind, n), x)


# --- Density and entropy ------------------------------------------------------------------


@EVERY
def test_log_likelihood_and_entropy_equal_the_oracles(name):
    kind = KINDS[name]
    out = call(kind.sampler, start(kind), kind.x)
    raw = np.float64(out.rollout_extras)
    expected = kind.log_likelihood(raw, kind.x)
    np.testing.assert_allclose(out.output.log_likelihood, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(out.metrics["entropy"], kind.entropy(kind.x), atol=2e-4)
    bonus = -WEIGHT * kind.entropy(kind.x)
    np.testing.assert_allclose(out.regularization_loss, bonus, atol=1e-4)


@EVERY
def test_entropy_is_the_mean_of_the_negative_log_likelihood_of_samples(name):
    """Within five standard errors over 20000 environments."""
    _, out = many(name)
    samples = -np.float64(out.output.log_likelihood)
    error = 5 * samples.std() / np.sqrt(len(samples)) + 1e-6
    assert abs(samples.mean() - float(out.metrics["entropy"][0])) < error


@pytest.mark.parametrize("name", DISCRETE)
def test_probabilities_of_all_actions_add_up_to_one_and_are_those_of_the_samples(name):
    kind = KINDS[name]
    sizes = SIZES if "multi" in name else (4,)
    actions = np.array(list(itertools.product(*map(range, sizes))), np.int32)
    actions = actions if "multi" in name else actions[:, 0]
    n = len(actions)
    out = call(kind.sampler, start(kind, n), repeated(kind.x, n), jnp.asarray(actions))
    probabilities = np.exp(np.float64(out.output.log_likelihood))
    assert probabilities.sum() == pytest.approx(1.0, abs=1e-6)
    _, samples = many(name)
    drawn = np.asarray(samples.output.action)
    assert drawn.dtype == np.int32
    for action, p in zip(actions, probabilities, strict=True):
        share = np.mean(np.all((drawn == action).reshape(len(drawn), -1), axis=-1))
        assert abs(share - p) <= 5 * np.sqrt(p * (1 - p) / len(drawn))  # exactly 0 where p is


@pytest.mark.parametrize(
    ("sampler", "x"),
    [
        (NormalTanhSampler(entropy_weight=0.0), [0.3, -0.5]),
        (NormalSampler(1, entropy_weight=0.0), [0.3]),
        (BetaSampler(entropy_weight=0.0), [-1.0, 3.0]),
        (AffineSampler(BetaSampler(entropy_weight=0.0), 1.0, 7.0), [5.0, 2.0]),
        (AffineSampler(NormalTanhSampler(entropy_weight=0.0), [-0.4], [0.4]), [0.3, -0.5]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_density_integrates_to_one_over_the_actions(sampler, x):
    n = 8001
    raw = jnp.asarray(np.sinh(np.linspace(-4.0, 4.0, n)), jnp.float32)[:, None]
    state = sampler.initialize_state(n, key=jax.random.key(0))
    action, log_p = call(sampler, state, jnp.tile(jnp.array([x], jnp.float32), (n, 1)), raw).output
    area = np.trapezoid(np.exp(np.float64(log_p)), np.float64(action[:, 0]))
    assert area == pytest.approx(1.0, abs=1e-3)


# --- Replay -------------------------------------------------------------------------------


@EVERY
def test_the_stored_sample_replays_to_a_ratio_of_exactly_one(name):
    """As one sequence and step by step, with the parameters as they were."""
    kind = KINDS[name]
    xs = jax.tree.map(lambda *leaves: jnp.stack(leaves), kind.x, kind.other, kind.x)
    done = jnp.array([[True, False, False]] * 3)
    state, outs = start(kind), []
    for t in range(3):
        outs.append(call(kind.sampler, state, jax.tree.map(lambda leaf, t=t: leaf[t], xs)))
        state = outs[-1].next_state
    extras = jnp.stack([out.rollout_extras for out in outs])
    replayed = unroll(kind.sampler, start(kind), xs, done, extras)
    rolled = np.stack([out.output.log_likelihood for out in outs])
    np.testing.assert_allclose(np.exp(replayed.output.log_likelihood - rolled), 1.0, atol=1e-6)
    np.testing.assert_array_equal(
        replayed.output.action, np.stack([out.output.action for out in outs])
    )
    np.testing.assert_array_equal(replayed.next_state.draws, [3, 3, 3])


@EVERY
def test_replay_evaluates_the_stored_sample_under_other_parameters(name):
    kind = KINDS[name]
    rollout = call(kind.sampler, start(kind), kind.x)
    raw = rollout.rollout_extras
    replayed = call(kind.sampler, start(kind), kind.other, raw)
    np.testing.assert_array_equal(replayed.output.action, rollout.output.action)
    np.testing.assert_array_equal(replayed.rollout_extras, raw)
    expected = kind.log_likelihood(np.float64(raw), kind.other)
    np.testing.assert_allclose(replayed.output.log_likelihood, expected, rtol=1e-4, atol=1e-4)


@EVERY
def test_no_gradient_goes_through_the_sample(name):
    """The slopes of a fresh sample are those of the same value, stored."""
    kind = KINDS[name]
    x = jax.tree.map(lambda leaf: jnp.tile(leaf, (N_PAIRS // 3, 1)), kind.x)
    out, fresh = likelihood_and_slopes(kind.sampler, start(kind, N_PAIRS), x, None)
    _, stored = likelihood_and_slopes(kind.sampler, start(kind, N_PAIRS), x, out.rollout_extras)
    for a, b in zip(jax.tree.leaves(fresh), jax.tree.leaves(stored), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert np.abs(fresh[1]).max() > 1e-3


# --- Noise --------------------------------------------------------------------------------

FINE = {  # with enough actions that two draws are hardly ever equal
    "categorical": (CategoricalSampler(2**14, entropy_weight=0.0), 2**14),
    "multi_categorical": (MultiCategoricalSampler((2**14, 2**14), entropy_weight=0.0), 2**15),
}


@pytest.mark.parametrize("name", ["tanh_normal", "normal", "beta", *FINE])
def test_noise_differs_between_samplers_environments_and_steps(name):
    """Two equal heads on equal inputs, four environments, three steps."""
    sampler, n = FINE[name] if name in FINE else (KINDS[name].sampler, KINDS[name].x.shape[1])
    network = Parallel(first=sampler, second=sampler)
    state = network.initialize_state(4, key=jax.random.key(5))
    xs = jnp.zeros((3, 4, n), jnp.float32)
    done = jnp.array([[True, False, False, False]] * 3)  # a reset does not rewind the noise
    raw = unroll(network, state, xs, done).rollout_extras
    numbers = np.concatenate([raw["first"].ravel(), raw["second"].ravel()])
    assert len(np.unique(numbers)) == len(numbers) >= 24
    again = unroll(network, state, xs, done, raw).rollout_extras
    np.testing.assert_array_equal(again["first"], raw["first"])


@EVERY
def test_an_environment_draws_the_same_alone_as_in_a_batch(name):
    kind = KINDS[name]
    state = start(kind)
    together = call(kind.sampler, state, kind.x)
    alone = call(kind.sampler, *jax.tree.map(lambda leaf: leaf[1:2], (state, kind.x)))
    np.testing.assert_allclose(alone.rollout_extras, together.rollout_extras[1:2], rtol=1e-6)
    other = call(kind.sampler, start(kind, seed=12), kind.x).rollout_extras
    assert (np.asarray(other) != np.asarray(together.rollout_extras)).any()


# --- Inference ----------------------------------------------------------------------------


def beta_modes(x):
    alpha, beta = concentrations(x)
    return (alpha - beta) / (alpha + beta - 2)


MODES = {
    "tanh_normal": lambda x: np.tanh(halves(x)[0]),  # the median, as the field has it
    "normal": np.float64,
    "beta": beta_modes,
    "categorical": lambda x: tables(x, (4,))[0].argmax(-1),
    "masked": lambda x: tables(x, (4,))[0].argmax(-1),
    "multi_categorical": lambda x: np.stack([t.argmax(-1) for t in tables(x, SIZES)], -1),
    "masked_multi": lambda x: np.stack([t.argmax(-1) for t in tables(x, SIZES)], -1),
}
MODES["affine"] = lambda x: LOW + (MODES["tanh_normal"](x) + 1) / 2 * (HIGH - LOW)


@EVERY
def test_inference_mode_gives_the_mode_and_back(name):
    kind = KINDS[name]
    traces = []

    @eqx.filter_jit
    def run(sampler, state, x):
        traces.append(sampler.inference)
        return sampler(state, x)

    drawn = run(kind.sampler, start(kind), kind.x).output.action
    quiet = eqx.nn.inference_mode(kind.sampler)
    for _ in range(2):
        action = run(quiet, start(kind), kind.x).output.action
        np.testing.assert_allclose(action, MODES[name](kind.x), rtol=1e-4, atol=1e-5)
        again = run(eqx.nn.inference_mode(quiet, value=False), start(kind), kind.x)
        np.testing.assert_array_equal(again.output.action, drawn)
    assert kind.sampler.inference is False
    assert traces == [False, True]


@pytest.mark.parametrize("name", ["normal", "beta", *DISCRETE])
def test_no_sample_is_likelier_than_the_mode(name):
    x, out = many(name)
    kind = KINDS[name]
    mode = call(eqx.nn.inference_mode(kind.sampler), start(kind, len(out.output.action)), x)
    assert out.output.log_likelihood.max() <= mode.output.log_likelihood[0] + 1e-5


# --- Extremes -----------------------------------------------------------------------------


@EVERY
def test_extreme_inputs_give_finite_values_and_gradients(name):
    """Every pair of extreme parameters, for drawn values, the mode and stored edges."""
    kind = KINDS[name]
    logits = jax.tree.leaves(kind.x)[0]
    half = logits.shape[1] // 2
    x = jnp.asarray(np.repeat(EXTREME, [half, logits.shape[1] - half], axis=1), jnp.float32)
    if isinstance(kind.x, MaskedLogits):
        x = MaskedLogits(x, jnp.tile(kind.x.mask, (N_PAIRS // 3, 1)).at[::5].set(False))
    state = start(kind, N_PAIRS)
    mode = call(eqx.nn.inference_mode(kind.sampler), state, x).rollout_extras
    stored = [None, mode]
    if name in CONTINUOUS:
        stored += [jnp.full((N_PAIRS, 2), raw, jnp.float32) for raw in (-100.0, 0.0, 100.0)]
        stored += [mode + 5.0]
    for extras in stored:
        out, slopes = likelihood_and_slopes(kind.sampler, state, x, extras)
        for leaf in jax.tree.leaves((out.output, out.rollout_extras, out.metrics, slopes)):
            assert np.isfinite(leaf).all()


@EVERY
def test_low_precision_inputs_are_evaluated_in_float32(name):
    kind = KINDS[name]
    is_float = eqx.is_inexact_array
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if is_float(x) else x, kind.x)
    high = jax.tree.map(lambda x: x.astype(jnp.float32) if is_float(x) else x, low)
    out, exact = (call(kind.sampler, start(kind), x).output for x in (low, high))
    assert out.log_likelihood.dtype == jnp.float32
    assert out.action.dtype == (jnp.int32 if name in DISCRETE else jnp.float32)
    np.testing.assert_array_equal(out.log_likelihood, exact.log_likelihood)
    np.testing.assert_array_equal(out.action, exact.action)


@pytest.mark.parametrize(
    "build",
    [
        NormalTanhSampler,
        lambda **options: NormalSampler(2, **options),
        BetaSampler,
        lambda **options: CategoricalSampler(4, **options),
        lambda **options: MultiCategoricalSampler(SIZES, **options),
    ],
)
def test_negative_entropy_weights_are_refused(build):
    for weight in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="entropy_weight >= 0"):
            build(entropy_weight=weight)
