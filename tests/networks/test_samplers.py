import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo.networks import (
    NormalTanhSampler,
    Parallel,
    PPOAdapter,
    RandomState,
    Sequential,
    StatefulModule,
    make_mlp,
)
from tests.ops.test_tanh_normal import entropy_oracle


def softplus(x):
    return np.logaddexp(np.float64(x), 0.0)


def parameters(mean, std, min_std=0.1, scale=1.0):
    """The sampler's input for these means and deviations."""
    pre_std = np.log(np.expm1(np.asarray(std) / scale - min_std))
    return jnp.asarray(np.concatenate([mean, pre_std], axis=-1), jnp.float32)


def log_density(u, mean, std):
    """Of the action tanh(u), summed over the features, in double precision."""
    u, mean, std = np.float64(u), np.float64(mean), np.float64(std)
    log_normal = -0.5 * ((u - mean) / std) ** 2 - np.log(std) - 0.5 * np.log(2 * np.pi)
    return np.sum(log_normal + 2 * np.logaddexp(u, -u) - 2 * np.log(2.0), axis=-1)


@eqx.filter_jit
def call(module, state, x, extras=None):
    return module(state, x, extras)


@eqx.filter_jit
def unroll(module, *args):
    return module.unroll(*args)


@eqx.filter_jit
def scan(module, *args):
    return StatefulModule.unroll(module, *args)


MEAN = np.array([[0.0, 0.5], [-1.0, 0.2], [2.0, 0.0]])
STD = np.array([[0.2, 0.5], [1.0, 0.3], [0.4, 2.0]])


def test_deviation_has_its_documented_form():
    x = jnp.array([[1.0, -2.0, -200.0, 3.0]], jnp.float32)
    mean, std = NormalTanhSampler(entropy_weight=0, min_std=0.3, std_scale=2).distribution(x)
    np.testing.assert_array_equal(mean, [[1.0, -2.0]])
    np.testing.assert_allclose(std, 2 * (softplus([[-200.0, 3.0]]) + 0.3), rtol=1e-6)


def test_action_and_log_likelihood_belong_to_the_emitted_value(getkey):
    module = NormalTanhSampler(entropy_weight=0.0)
    state = module.initialize_state(3, key=getkey())
    out = call(module, state, parameters(MEAN, STD))
    u = np.float64(out.rollout_extras)
    np.testing.assert_allclose(out.output.action, np.tanh(u), rtol=1e-5)
    expected = log_density(u, MEAN, STD)
    np.testing.assert_allclose(out.output.log_likelihood, expected, rtol=1e-4, atol=1e-4)
    assert out.output.action.shape == (3, 2)
    assert out.output.log_likelihood.shape == (3,)


def test_samples_have_the_mean_and_deviation(getkey):
    n = 4000
    module = NormalTanhSampler(entropy_weight=0.0)
    x = jnp.tile(parameters(MEAN[:1], STD[:1]), (n, 1))
    u = np.float64(call(module, module.initialize_state(n, key=getkey()), x).rollout_extras)
    np.testing.assert_allclose((u.mean(0) - MEAN[0]) / STD[0], 0.0, atol=5 / np.sqrt(n))
    np.testing.assert_allclose(u.std(0) / STD[0], 1.0, atol=5 / np.sqrt(2 * n))
    assert abs(np.corrcoef(u.T)[0, 1]) < 5 / np.sqrt(n)


def test_replay_evaluates_the_stored_sample_under_new_parameters(getkey):
    module = NormalTanhSampler(entropy_weight=0.0)
    state = module.initialize_state(3, key=getkey())
    rollout = call(module, state, parameters(MEAN, STD))
    u = rollout.rollout_extras
    replayed = call(module, state, parameters(MEAN + 0.3, 2 * STD), u)
    np.testing.assert_array_equal(replayed.output.action, rollout.output.action)
    np.testing.assert_array_equal(replayed.rollout_extras, u)
    expected = log_density(u, MEAN + 0.3, 2 * STD)
    np.testing.assert_allclose(replayed.output.log_likelihood, expected, rtol=1e-4, atol=1e-4)


def test_the_gradient_is_the_score_of_the_sample_in_rollout_and_replay(getkey):
    """d log N / d mean = (u - mean) / std^2: the sample itself carries no gradient."""
    module = NormalTanhSampler(entropy_weight=0.0)
    state = module.initialize_state(3, key=getkey())
    x = parameters(MEAN, STD)
    u = call(module, state, x).rollout_extras
    for extras in (None, u):

        def total(x, extras=extras):
            return jnp.sum(call(module, state, x, extras).output.log_likelihood)

        slope = jax.grad(total)(x)
        score = (np.float64(u) - MEAN) / STD**2
        np.testing.assert_allclose(slope[:, :2], score, rtol=1e-3, atol=1e-3)


def test_entropy_bonus_is_minus_the_weighted_entropy(getkey):
    module = NormalTanhSampler(entropy_weight=0.25)
    out = call(module, module.initialize_state(3, key=getkey()), parameters(MEAN, STD))
    entropy = entropy_oracle(MEAN, STD).sum(-1)
    np.testing.assert_allclose(out.metrics["entropy"], entropy, atol=2e-4)
    np.testing.assert_allclose(out.regularization_loss, -0.25 * entropy, atol=1e-4)
    np.testing.assert_allclose(out.metrics["mean"], MEAN, rtol=1e-6)
    np.testing.assert_allclose(out.metrics["std"], STD, rtol=1e-5)


def test_entropy_bonus_does_not_depend_on_the_draw(getkey):
    module = NormalTanhSampler(entropy_weight=0.25)
    x = parameters(MEAN, STD)
    first, second = (call(module, module.initialize_state(3, key=getkey()), x) for _ in range(2))
    assert (first.rollout_extras != second.rollout_extras).all()
    np.testing.assert_array_equal(first.regularization_loss, second.regularization_loss)


@pytest.mark.parametrize("pre_std", [-200.0, -20.0, 0.0, 20.0, 1e4])
@pytest.mark.parametrize("away", [0.0, 5.0])
def test_extreme_deviations_stay_finite(pre_std, away, getkey):
    module = NormalTanhSampler(entropy_weight=0.01, min_std=0.05)
    state = module.initialize_state(1, key=getkey())
    x = jnp.array([[0.5, pre_std]], jnp.float32)
    u = jnp.array([[0.5 + away]], jnp.float32)

    def loss(x):
        out = call(module, state, x, u)
        return jnp.sum(out.output.log_likelihood + out.regularization_loss), out

    slope, out = jax.grad(loss, has_aux=True)(x)
    std = softplus(pre_std) + 0.05
    assert float(out.metrics["std"][0, 0]) >= 0.05
    np.testing.assert_allclose(out.metrics["std"], [[std]], rtol=1e-5)
    expected = log_density(u, 0.5, std)
    np.testing.assert_allclose(out.output.log_likelihood, expected, rtol=1e-4, atol=1e-4)
    assert np.isfinite(slope).all()


@pytest.mark.parametrize("u", [-100.0, -20.0, 20.0, 100.0])
def test_saturated_actions_have_finite_gradients(u, getkey):
    module = NormalTanhSampler(entropy_weight=0.01)
    state = module.initialize_state(1, key=getkey())
    stored = jnp.array([[u]], jnp.float32)
    x = jnp.array([[0.1, 0.2]], jnp.float32)

    def log_likelihood(x):
        return call(module, state, x, stored).output.log_likelihood[0]

    value, slope = jax.value_and_grad(log_likelihood)(x)
    std = softplus(0.2) + 0.1
    np.testing.assert_allclose(value, log_density(stored, 0.1, std)[0], rtol=1e-5)
    np.testing.assert_allclose(slope[0, 0], (u - 0.1) / std**2, rtol=1e-5)
    assert np.isfinite(slope).all()


# --- Inference ----------------------------------------------------------------------------


def test_inference_mode_returns_the_mode_and_leaves_the_original_alone(getkey):
    module = NormalTanhSampler(entropy_weight=0.0)
    state = module.initialize_state(3, key=getkey())
    x = parameters(MEAN, STD)
    drawn = call(module, state, x).output.action
    quiet = eqx.nn.inference_mode(module)
    np.testing.assert_allclose(call(quiet, state, x).output.action, np.tanh(MEAN), rtol=1e-5)
    assert quiet.inference is True
    assert module.inference is False
    np.testing.assert_array_equal(call(module, state, x).output.action, drawn)
    again = eqx.nn.inference_mode(quiet, value=False)
    np.testing.assert_array_equal(call(again, state, x).output.action, drawn)
    assert np.abs(drawn - np.tanh(MEAN)).max() > 1e-3


def test_inference_mode_reaches_samplers_inside_containers(getkey):
    policy = Sequential([make_mlp((3, 4), key=getkey()), NormalTanhSampler(entropy_weight=0.0)])
    network = PPOAdapter(action=policy, value=make_mlp((3, 1), key=getkey()))
    state = network.initialize_state(5, key=getkey())
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)
    quiet = eqx.nn.inference_mode(network)
    raw = policy[0]([()], x).output
    np.testing.assert_allclose(call(quiet, state, x).output.actions, np.tanh(raw[:, :2]), rtol=1e-5)
    drawn = call(network, state, x).output.actions
    assert np.abs(drawn - np.tanh(raw[:, :2])).min() > 1e-6


def test_inference_compiles_once_per_mode(getkey):
    module = NormalTanhSampler(entropy_weight=0.0)
    state = module.initialize_state(3, key=getkey())
    traces = []

    @eqx.filter_jit
    def run(module, state, x):
        traces.append(module.inference)
        return module(state, x)

    for _ in range(2):
        for mode in (False, True):
            run(eqx.nn.inference_mode(module, value=mode), state, parameters(MEAN, STD))
    assert traces == [False, True]


# --- Noise --------------------------------------------------------------------------------


def test_noise_differs_between_samplers_environments_and_steps(getkey):
    """Two equal heads on equal inputs, four environments, three steps: 48 numbers."""
    network = Parallel(
        first=NormalTanhSampler(entropy_weight=0.0), second=NormalTanhSampler(entropy_weight=0.0)
    )
    state = network.initialize_state(4, key=getkey())
    xs = jnp.zeros((3, 4, 4), jnp.float32)
    done = jnp.array([[True, False, False, False]] * 3)  # a reset does not rewind the noise
    noise = unroll(network, state, xs, done).rollout_extras
    numbers = np.concatenate([noise["first"].ravel(), noise["second"].ravel()])
    assert len(numbers) == len(np.unique(numbers)) == 48
    for a, b in itertools.combinations([noise["first"], noise["second"]], 2):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.9
    again = unroll(network, state, xs, done).rollout_extras
    np.testing.assert_array_equal(again["first"], noise["first"])


def test_the_same_key_gives_the_same_noise_and_another_key_another(getkey):
    module = NormalTanhSampler(entropy_weight=0.0)
    x = parameters(MEAN, STD)
    key = getkey()
    first, again, other = (
        call(module, module.initialize_state(3, key=k), x).rollout_extras
        for k in (key, key, getkey())
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).all()


def test_replay_consumes_no_noise_but_counts(getkey):
    """The count moves as in the rollout, so that the carry is reproduced; keys never do."""
    module = NormalTanhSampler(entropy_weight=0.0)
    state = module.initialize_state(4, key=getkey())
    xs, done = jnp.zeros((3, 4, 2), jnp.float32), jnp.ones((3, 4), jnp.bool_)
    rollout = unroll(module, state, xs, done)
    replayed = unroll(module, state, xs, done, rollout.rollout_extras)
    for out in (rollout, replayed, scan(module, state, xs, done)):
        np.testing.assert_array_equal(out.next_state.draws, [3, 3, 3, 3])
        assert (out.next_state.keys == state.keys).all()
    np.testing.assert_array_equal(replayed.rollout_extras, rollout.rollout_extras)
    # A later rollout does not repeat the noise of this one.
    later = unroll(module, rollout.next_state, xs, done).rollout_extras
    assert len(np.unique([*later.ravel(), *rollout.rollout_extras.ravel()])) == 24


def test_the_state_is_one_key_and_one_count_per_environment(getkey):
    state = NormalTanhSampler(entropy_weight=0.0).initialize_state(5, key=getkey())
    assert isinstance(state, RandomState)
    assert state.keys.shape == state.draws.shape == (5,)
    assert state.draws.dtype == jnp.uint32
    assert len(np.unique(jax.random.key_data(state.keys), axis=0)) == 5


# --- Arguments ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"entropy_weight": -1.0},
        {"entropy_weight": 0.0, "min_std": 0.0},
        {"entropy_weight": 0.0, "std_scale": -1.0},
        {"entropy_weight": float("nan")},
    ],
)
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match="entropy_weight >= 0, min_std > 0 and std_scale > 0"):
        NormalTanhSampler(**options)


@pytest.mark.parametrize("shape", [(3, 3), (3,), (3, 0), (3, 2, 2)])
def test_wrong_inputs_are_refused_with_their_shape(shape, getkey):
    module = NormalTanhSampler(entropy_weight=0.0)
    state = module.initialize_state(3, key=getkey())
    with pytest.raises(ValueError, match="2 outputs per action") as info:
        call(module, state, jnp.zeros(shape))
    assert str(list(shape)) in str(info.value)


def test_low_precision_inputs_are_evaluated_in_float32(getkey):
    module = NormalTanhSampler(entropy_weight=0.01)
    state = module.initialize_state(3, key=getkey())
    x = parameters(MEAN, STD).astype(jnp.bfloat16)
    out, exact = call(module, state, x), call(module, state, x.astype(jnp.float32))
    for leaf, expected in zip(*map(jax.tree.leaves, (out.output, exact.output)), strict=True):
        assert leaf.dtype == jnp.float32
        np.testing.assert_array_equal(leaf, expected)
