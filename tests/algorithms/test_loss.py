"""The loss and the gradient steps, against the NumPy implementation in `reference.py`."""

import dataclasses
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eqx_ppo.algorithms import LoggingLevel, Minibatch, PPOConfig, make_optimizer, ppo_loss, replay
from eqx_ppo.algorithms._loss import advantages_and_targets
from eqx_ppo.algorithms._transition import Rollout, Transition
from eqx_ppo.algorithms._update import _samples, _take, minibatch_indices, update
from eqx_ppo.networks import Dense, Sequential, trainable
from tests.algorithms import reference
from tests.algorithms.common import assert_close, assert_same, differ, small_config
from tests.helpers.networks import PoisonedGradient, dict_heads, heads

STEPS, ENVS = 4, 6
SIZES = {"arm": 2, "leg": 1}
ENTROPY_WEIGHT = 1e-2  # of the policies in tests.helpers.networks


class Recorded(NamedTuple):
    """A network and a made-up rollout with flags, invalid steps and older weights."""

    network: Sequential
    rollout: Rollout


def record(key, *, parts, layers=()):
    """The recorded likelihoods and values are off by some noise, so that ratios are not 1."""
    keys = iter(jax.random.split(key, 20))
    shape = (STEPS, ENVS)
    trunk = Dense(3, 5, activation=jnp.tanh, key=next(keys))
    head = dict_heads(5, SIZES, next(keys)) if parts else heads(5, 2, next(keys))
    network = Sequential([*layers, trunk, head])
    carry = network.initialize_state(ENVS, key=next(keys))
    obs = jax.random.normal(next(keys), (*shape, 3), jnp.float32)
    done = jax.random.bernoulli(next(keys), 0.3, shape)
    out = network.unroll(carry, obs, done)

    def noisy(tree, size):
        leaves, treedef = jax.tree.flatten(tree)
        noise = [size * jax.random.normal(next(keys), shape, jnp.float32) for _ in leaves]
        return jax.tree.unflatten(treedef, [x + n for x, n in zip(leaves, noise, strict=True)])

    zeros = jax.tree.map(jnp.zeros_like, out.output.value_estimates)
    truncated = done & jax.random.bernoulli(next(keys), 0.5, shape)
    values = noisy(out.output.value_estimates, 0.3)
    last = noisy(zeros, 1.0)
    shifted = jax.tree.map(lambda v, e: jnp.concatenate([v[1:], e[-1:]]), values, last)
    transitions = Transition(
        obs=obs,
        network_output=out.output._replace(
            log_likelihoods=noisy(out.output.log_likelihoods, 0.2), value_estimates=values
        ),
        rewards=noisy(zeros, 1.0),
        terminated=done & ~truncated,
        truncated=truncated,
        done=done,
        valid=jnp.ones(shape, jnp.bool_).at[1, 2].set(False).at[3, 0].set(False),
        next_values=jax.tree.map(lambda s, e: jnp.where(truncated, e, s), shifted, last),
        rollout_extras=out.rollout_extras,
        metrics={},
    )
    starts = jax.tree.map(lambda leaf: leaf[None], carry)
    return Recorded(network, Rollout(transitions, starts, jnp.zeros((1, ENVS), jnp.bool_)))


@pytest.fixture(scope="module", params=[False, True], ids=["one reward", "rewards by key"])
def recorded(request):
    return record(jax.random.key(3), parts=request.param)


def config(**changes):
    options = {"n_envs": ENVS, "rollout_length": STEPS, "learning_rate": 0.0}
    return small_config(**options | changes)


def weights(network):
    def layer(dense):
        return np.asarray(dense.kernel, np.float64), np.asarray(dense.bias, np.float64)

    trunk, head = network.layers[-2:]
    action, value = head.action, head.value
    single = isinstance(value, Dense)
    policies = {"": action} if single else {name: action[name] for name in action.names}
    values = {"": value} if single else {name: value[name] for name in value.names}
    return {
        "trunk": layer(trunk),
        "action": {name: layer(policy[0]) for name, policy in policies.items()},
        "value": {name: layer(critic) for name, critic in values.items()},
    }


def pre_tanh(transitions):
    action = transitions.rollout_extras[-1]["action"]
    return {name: x[1] for name, x in action.items()} if isinstance(action, dict) else action[1]


def expected_losses(recorded, config, envs):
    transitions = recorded.rollout.transitions
    return reference.ppo_losses(
        weights(recorded.network), transitions, pre_tanh(transitions), envs, config, ENTROPY_WEIGHT
    )


def updated(recorded, config, key=None, optimizer=None):
    key = jax.random.key(0) if key is None else key
    optimizer = make_optimizer(config, optimizer)
    params = eqx.filter(recorded.network, trainable(recorded.network))

    @jax.jit
    def run(rollout):
        result = update(recorded.network, optimizer.init(params), rollout, config, optimizer, key)
        arrays = eqx.filter(result.network, eqx.is_array)
        return result._replace(network=arrays)

    return run(recorded.rollout)


def whole_batch(recorded, config):
    everything = jnp.arange(ENVS * config.n_segments)
    return _take(_samples(recorded.rollout, config), everything, config)


# --- Values -------------------------------------------------------------------------------

VARIANTS = {
    "default": {},
    "normalized over the batch": {"normalize_advantages": "batch"},
    "not normalized": {"normalize_advantages": "none"},
    "combined": {"combine_advantages": True},
    "combined, over the batch": {"combine_advantages": True, "normalize_advantages": "batch"},
    "combined, not normalized": {"combine_advantages": True, "normalize_advantages": False},
    "value clipping": {"value_clip_range": 0.1, "critic_loss_weight": 0.5},
    "in each minibatch": {"advantages": "minibatch"},
    "in each minibatch, combined": {"advantages": "minibatch", "combine_advantages": True},
    "masked truncation": {"truncation": "mask"},
    "masked truncation, in each minibatch": {"truncation": "mask", "advantages": "minibatch"},
    "numbers": {"gae_lambda": 0.3, "discounting_factor": 0.8, "clip_range": 0.05},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_losses_equal_numpy(recorded, changes):
    """Every term in every minibatch of two epochs, the weights standing still."""
    options = config(**changes)
    key = jax.random.key(1)
    metrics = updated(recorded, options, key).metrics
    for step, envs in enumerate(np.asarray(minibatch_indices(options, key))):
        expected = expected_losses(recorded, options, envs)
        for term, value in expected.items():
            got = jax.tree.map(lambda leaf, at=step: leaf[at], metrics[f"losses/{term}"])
            if isinstance(value, dict):
                got = reference.by_name(got)
                assert got.keys() == value.keys()
                for name, number in value.items():
                    np.testing.assert_allclose(got[name], number, rtol=2e-4, atol=2e-5)
            else:
                np.testing.assert_allclose(got, value, rtol=2e-4, atol=2e-5)


def test_the_variants_differ(recorded):
    """None of the numbers above is blind to the option that it tests."""
    envs = np.arange(3, 6)  # one of them with time limits
    totals = {
        name: expected_losses(recorded, config(**changes), envs)["total"]
        for name, changes in VARIANTS.items()
    }
    one_reward = len(reference.by_name(recorded.rollout.transitions.rewards)) == 1
    expected = len(totals) - (4 if one_reward else 0)  # with one reward nothing is combined
    assert len({round(total, 4) for total in totals.values()}) == expected


def test_directional_derivative_equals_numpy(recorded):
    """The gradient along a random direction, by central differences of the NumPy loss."""
    options = config(value_clip_range=0.2, critic_loss_weight=0.7)
    network = recorded.network
    params, rest = eqx.partition(network, trainable(network))
    leaves, treedef = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    direction = [jnp.asarray(rng.normal(size=leaf.shape), jnp.float32) for leaf in leaves]
    batch = whole_batch(recorded, options)
    grads = jax.jit(
        jax.grad(lambda params: ppo_loss(eqx.combine(params, rest), batch, options)[0])
    )(params)
    slope = sum(
        float((g * d).sum()) for g, d in zip(jax.tree.leaves(grads), direction, strict=True)
    )

    base = weights(network)
    along = weights(eqx.combine(jax.tree.unflatten(treedef, direction), rest))

    def loss_at(distance):
        moved = jax.tree.map(lambda weight, d: weight + distance * d, base, along)
        transitions = recorded.rollout.transitions
        return reference.ppo_losses(
            moved, transitions, pre_tanh(transitions), np.arange(ENVS), options, ENTROPY_WEIGHT
        )["total"]

    numeric = (loss_at(1e-6) - loss_at(-1e-6)) / 2e-6
    np.testing.assert_allclose(slope, numeric, rtol=1e-4)


def test_advantages_and_targets_equal_numpy(recorded):
    transitions = recorded.rollout.transitions
    values = transitions.network_output.value_estimates
    advantages, targets = advantages_and_targets(transitions, values, config())
    for name, value in reference.by_name(values).items():
        expected = reference.gae(
            *(
                np.asarray(reference.by_name(tree)[name], np.float64)
                for tree in (transitions.rewards, values, transitions.next_values)
            ),
            *map(np.asarray, (transitions.terminated, transitions.truncated, transitions.valid)),
            0.99,
            0.95,
        )
        got, target = (reference.by_name(tree)[name] for tree in (advantages, targets))
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(target, value + expected, rtol=1e-5, atol=1e-5)
        assert np.abs(expected).max() > 0.1  # targets are not the values (case B9)


@pytest.mark.parametrize(
    ("terminated", "expected"),
    [(False, [0.8, 0.0, 2.6]), (True, [-0.1, -1.0, 2.6])],
    ids=["time limit", "terminated too"],
)
def test_masked_time_limit(terminated, expected):
    """Cases B3 and B5 with the mask: step 1 teaches nothing, unless it also terminated."""

    def column(*numbers):
        return jnp.array(numbers)[:, None]

    values, ended = column(2.0, 2.0, 2.0), column(False, True, False)
    transitions = Transition(
        obs=None,
        network_output=None,
        rewards=column(1.0, 1.0, 1.0),
        terminated=ended & terminated,
        truncated=ended,
        done=ended,
        valid=column(True, True, True),
        next_values=column(2.0, 0.0, 4.0),  # what a rollout that masks leaves there
        rollout_extras=None,
        metrics={},
    )
    options = config(truncation="mask", discounting_factor=0.9, gae_lambda=1.0)
    advantages, targets = advantages_and_targets(transitions, values, options)
    np.testing.assert_allclose(advantages[:, 0], expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(targets, values + advantages, rtol=1e-6)


def test_metrics_of_actor_and_critic(recorded):
    level = LoggingLevel.ACTOR_EXTRA | LoggingLevel.CRITIC_EXTRA
    options = config(logging_level=level, normalize_advantages="none")
    batch = whole_batch(recorded, options)
    _, metrics = ppo_loss(recorded.network, batch, options)
    assert not any(name in metrics for name in ("losses/actor", "losses/total"))
    transitions, valid = batch.transitions, np.asarray(batch.transitions.valid)
    out = replay(recorded.network, batch.network_state, batch.fresh, transitions).output

    def entry(name, key):
        return float(reference.by_name(metrics[name])[key])

    for key, likelihood in reference.by_name(out.log_likelihoods).items():
        old = reference.by_name(transitions.network_output.log_likelihoods)[key]
        difference = np.asarray(likelihood - old, np.float64)[valid]
        ratio = np.exp(difference)
        clipped = np.mean(np.abs(ratio - 1) > 0.2)
        assert 0 < clipped < 1
        np.testing.assert_allclose(entry("losses/clipping_fraction", key), clipped, rtol=1e-6)
        divergence = np.mean(ratio - 1 - difference)
        np.testing.assert_allclose(entry("losses/approximate_kl", key), divergence, rtol=1e-3)
    for key, value in reference.by_name(out.value_estimates).items():
        target = np.asarray(reference.by_name(batch.targets)[key])[valid]
        error = np.mean((np.asarray(value)[valid] - target) ** 2)
        explained = 1 - error / np.var(target)
        np.testing.assert_allclose(entry("losses/critic_R^2", key), explained, rtol=1e-4)
    for key, advantage in reference.by_name(batch.advantages).items():
        prefix = f"losses/advantages/{key}" if key else "losses/advantages"
        counted = np.asarray(advantage)[valid]
        np.testing.assert_allclose(metrics[f"{prefix}/mean"], counted.mean(), rtol=1e-4)
        np.testing.assert_allclose(metrics[f"{prefix}/std"], counted.std(), rtol=1e-4)


@pytest.mark.parametrize("combined", [False, True])
def test_advantages_are_logged_as_they_were_before_normalization(recorded, combined):
    """So that they keep the unit of the rewards; and over what they were computed from, too."""

    def logged(**changes):
        options = config(
            logging_level=LoggingLevel.CRITIC_EXTRA, combine_advantages=combined, **changes
        )
        metrics = ppo_loss(recorded.network, whole_batch(recorded, options), options)[1]
        return {name: x for name, x in metrics.items() if name.startswith("losses/advantages")}

    plain = logged(normalize_advantages="none")
    assert min(abs(float(value)) for value in plain.values()) > 1e-3
    for choice in ("minibatch", "batch"):
        assert_close(logged(normalize_advantages=choice), plain, rtol=1e-4, atol=1e-6)
    again = {"advantages": "minibatch", "normalize_advantages": "none"}
    current = logged(**again)
    assert_close(logged(**again | {"normalize_advantages": "minibatch"}), current, rtol=1e-4)
    assert differ(current, plain)


def test_nothing_is_logged_without_a_level(recorded):
    options = config(logging_level=LoggingLevel.NONE)
    loss, metrics = ppo_loss(recorded.network, whole_batch(recorded, options), options)
    assert metrics == {}
    assert np.isfinite(loss)


# --- Which weights the advantages see -------------------------------------------------------


def unchanged(recorded):
    """The same rollout as these very weights would have recorded it."""
    network, rollout = recorded
    transitions = rollout.transitions
    start = jax.tree.map(lambda leaf: leaf[0], rollout.network_states)
    out = network.unroll(start, transitions.obs, transitions.done, transitions.rollout_extras)
    values = out.output.value_estimates

    def following(value, recorded_next):
        shifted = jnp.concatenate([value[1:], recorded_next[-1:]])
        return jnp.where(transitions.truncated, recorded_next, shifted)

    next_values = jax.tree.map(following, values, transitions.next_values)
    transitions = transitions._replace(network_output=out.output, next_values=next_values)
    return Recorded(network, rollout._replace(transitions=transitions))


def loss_and_gradient(recorded, options, batch):
    params, rest = eqx.partition(recorded.network, trainable(recorded.network))

    def loss(params):
        return ppo_loss(eqx.combine(params, rest), batch, options)[0]

    return jax.jit(jax.value_and_grad(loss))(params)


def test_both_advantage_modes_agree_with_unchanged_weights(recorded):
    """The loss and also its gradient: nothing flows through advantages or targets."""
    same = unchanged(recorded)
    once, again = config(), config(advantages="minibatch")
    left = loss_and_gradient(same, once, whole_batch(same, once))
    right = loss_and_gradient(same, again, whole_batch(same, again))
    assert_close(left, right, rtol=1e-4, atol=1e-6)
    # and with changed weights they do not
    left = loss_and_gradient(recorded, once, whole_batch(recorded, once))
    right = loss_and_gradient(recorded, again, whole_batch(recorded, again))
    assert abs(float(left[0] - right[0])) > 1e-3


@pytest.mark.parametrize("mode", ["rollout", "minibatch"])
def test_advantages_are_the_same_in_every_epoch_with_a_rate_of_zero(recorded, mode):
    """Case B11; with a positive rate only those of the rollout stay."""
    options = {"n_minibatches": 1, "n_epochs": 3, "advantages": mode}
    options |= {"normalize_advantages": "none", "logging_level": LoggingLevel.ALL}
    still = updated(recorded, config(**options)).metrics
    moving = updated(recorded, config(**options | {"learning_rate": 0.1})).metrics

    def change(metrics):
        names = [name for name in metrics if name.startswith("losses/advantages/")]
        rows = np.stack([metrics[name] for name in names])
        return np.abs(rows - rows[:, :1]).max()

    assert change(still) < 1e-6
    assert (change(moving) > 1e-3) == (mode == "minibatch")


def test_surrogate_gradient_at_ratio_one_is_the_policy_gradient(recorded):
    """Case E9: minus the gradient of the mean of advantage times log-likelihood."""
    same = unchanged(recorded)
    options = config(critic_loss_weight=0.0, normalize_advantages="none")
    network, batch = same.network, whole_batch(same, options)
    params, rest = eqx.partition(network, trainable(network))
    valid = batch.transitions.valid

    def surrogate(params):
        _, metrics = ppo_loss(eqx.combine(params, rest), batch, options)
        return sum(jax.tree.leaves(metrics["losses/actor"]), start=jnp.zeros(()))

    def plain(params):
        xs, extras = batch.transitions.obs, batch.transitions.rollout_extras
        out = eqx.combine(params, rest).unroll(
            batch.network_state, xs, batch.transitions.done, extras
        )
        terms = jax.tree.map(
            lambda a, likelihood: -jnp.sum(jnp.where(valid, a * likelihood, 0.0)) / valid.sum(),
            batch.advantages,
            out.output.log_likelihoods,
        )
        return sum(jax.tree.leaves(terms), start=jnp.zeros(()))

    with jax.numpy_dtype_promotion("standard"):
        expected = jax.jit(jax.grad(plain))(params)
    got = jax.jit(jax.grad(surrogate))(params)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected)) > 1e-2
    assert_close(got, expected, rtol=1e-4, atol=1e-6)


# --- Minibatches and segments --------------------------------------------------------------


@pytest.mark.parametrize("segment_length", [None, 2, 1])
def test_every_epoch_is_a_permutation(segment_length):
    options = config(n_epochs=3, n_minibatches=3, segment_length=segment_length)
    index = np.asarray(minibatch_indices(options, jax.random.key(0)))
    n_samples = ENVS * STEPS // (segment_length or STEPS)
    assert index.shape == (9, n_samples // 3)
    epochs = index.reshape(3, n_samples)
    np.testing.assert_array_equal(np.sort(epochs, axis=1), [np.arange(n_samples)] * 3)
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 3
    other = np.asarray(minibatch_indices(options, jax.random.key(1)))
    assert not np.array_equal(index, other)


def test_one_segment_is_no_segment(recorded):
    options = {"learning_rate": 1e-2}
    whole = updated(recorded, config(**options))
    segment = updated(recorded, config(**options, segment_length=STEPS))
    assert_same(whole, segment)


def test_segments_of_a_stateless_network_are_a_split_over_time(recorded):
    """The gradient of a minibatch of segments equals that of a batch cut out by hand."""
    segment_length = 2
    options = config(segment_length=segment_length)
    start = jax.tree.map(lambda leaf: leaf[0], recorded.rollout.network_states)
    repeated = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), start)
    rollout = recorded.rollout._replace(
        network_states=repeated, fresh=jnp.zeros((2, ENVS), jnp.bool_)
    )
    batch = _take(_samples(rollout, options), jnp.array([7, 2, 9]), options)
    transitions = rollout.transitions
    advantages, targets = advantages_and_targets(
        transitions, transitions.network_output.value_estimates, options
    )
    pieces = [(1, 1), (0, 2), (1, 3)]  # (segment, environment) of the samples 7, 2 and 9

    def cut(leaf):
        rows = [leaf[s * segment_length : (s + 1) * segment_length, e] for s, e in pieces]
        return jnp.stack(rows, axis=1)

    by_hand = Minibatch(
        jax.tree.map(cut, transitions),
        jax.tree.map(lambda leaf: leaf[jnp.array([1, 2, 3])], start),
        jnp.zeros(3, jnp.bool_),
        jax.tree.map(cut, advantages),
        jax.tree.map(cut, targets),
    )
    assert_close(
        loss_and_gradient(recorded, options, batch),
        loss_and_gradient(recorded, config(), by_hand),
        rtol=1e-5,
        atol=1e-7,
    )
    everything = whole_batch(Recorded(recorded.network, rollout), options)
    assert_close(
        loss_and_gradient(recorded, options, everything),
        loss_and_gradient(recorded, config(), whole_batch(recorded, config())),
        rtol=1e-4,
        atol=1e-6,
    )


# --- Gradients that are not finite (case E3) ------------------------------------------------


def poisoned(bad, limit):
    """A layer that starts as the identity, and one that spoils its gradient."""
    layer = Dense(3, 3, kernel_init=lambda _, shape, dtype: jnp.eye(3), key=jax.random.key(0))
    return record(jax.random.key(3), parts=False, layers=[layer, PoisonedGradient(limit, bad)])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("clipping", [None, 0.5])
def test_every_gradient_is_bad(bad, clipping):
    """Weights and optimizer stay as they are, and each step is counted."""
    recorded = poisoned(bad, 0.0)
    options = config(learning_rate=0.1, gradient_clipping=clipping, weight_decay=0.1)
    result = updated(recorded, options)
    params = eqx.filter(recorded.network, trainable(recorded.network))
    assert_same(result.optimizer_state, make_optimizer(options).init(params))
    assert_same(result.network, eqx.filter(recorded.network, eqx.is_array))
    assert int(result.skipped) == 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_gradient_is_left_out(bad):
    """As if the minibatch that holds the bad environment had never been there."""
    recorded = poisoned(bad, 50.0)
    transitions = recorded.rollout.transitions
    obs = transitions.obs.at[2, 4, 0].set(60.0)  # environment 4 is beyond the limit
    recorded = Recorded(
        recorded.network, recorded.rollout._replace(transitions=transitions._replace(obs=obs))
    )
    options = config(learning_rate=0.05, n_epochs=1, n_minibatches=3, gradient_clipping=0.5)
    key = jax.random.key(2)
    result = updated(recorded, options, key)
    assert int(result.skipped) == 1

    optimizer = make_optimizer(options)
    params, rest = eqx.partition(recorded.network, trainable(recorded.network))
    state = optimizer.init(params)
    samples = _samples(recorded.rollout, options)
    clean = [row for row in minibatch_indices(options, key) if 4 not in row.tolist()]
    assert len(clean) == 2

    @jax.jit
    def gradient_step(params, state, row):
        batch = _take(samples, row, options)
        grads = jax.grad(lambda p: ppo_loss(eqx.combine(p, rest), batch, options)[0])(params)
        with jax.numpy_dtype_promotion("standard"):
            steps, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, steps), state

    for row in clean:
        params, state = gradient_step(params, state, row)
    assert_close(eqx.filter(result.network, trainable(result.network)), params, rtol=1e-4)
    assert_close(result.optimizer_state, state, rtol=1e-3, atol=1e-7)
    assert differ(params, eqx.filter(recorded.network, trainable(recorded.network)))


def test_clean_gradients_are_not_skipped():
    result = updated(poisoned(float("nan"), 1e3), config(learning_rate=0.1))
    assert int(result.skipped) == 0


# --- Numbers of any kind (case I5) ----------------------------------------------------------

FIELDS = (
    "gae_lambda",
    "discounting_factor",
    "clip_range",
    "value_clip_range",
    "critic_loss_weight",
    "learning_rate",
    "gradient_clipping",
    "weight_decay",
)
KINDS = {
    "array": jnp.float32,
    "NumPy float32": np.float32,
    "NumPy float64": np.float64,
    "NumPy 0-d array": lambda x: np.asarray(x, np.float32),
}


@pytest.fixture(scope="module")
def plain():
    recorded = record(jax.random.key(3), parts=False)
    return recorded, updated(recorded, config(**dict.fromkeys(FIELDS, 0.5)))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_hyperparameters_of_any_float_type(kind, plain):
    recorded, expected = plain
    changes = {name: kind(0.5) for name in FIELDS}
    assert_close(updated(recorded, config(**changes)).network, expected.network, rtol=1e-5)


def test_integers_for_hyperparameters(plain):
    recorded, _ = plain
    expected = updated(recorded, config(**dict.fromkeys(FIELDS, 1.0)))
    got = updated(recorded, config(**dict.fromkeys(FIELDS, 1)))
    assert_close(got.network, expected.network, rtol=1e-5)
    with jax.numpy_dtype_promotion("standard"):  # an int32 array is no float32 otherwise
        got = updated(recorded, config(**dict.fromkeys(FIELDS, np.int32(1))))
    assert_close(got.network, expected.network, rtol=1e-5)


def test_hyperparameters_under_vmap(plain):
    """A sweep over every number at once equals single runs."""
    recorded, _ = plain
    params = eqx.filter(recorded.network, trainable(recorded.network))

    def run(values):
        options = config(**dict(zip(FIELDS, values, strict=True)))
        optimizer = make_optimizer(options)
        result = update(
            recorded.network,
            optimizer.init(params),
            recorded.rollout,
            options,
            optimizer,
            jax.random.key(0),
        )
        return eqx.filter(result.network, trainable(result.network))

    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.uniform(0.05, 0.95, (3, len(FIELDS))), jnp.float32)
    swept = jax.jit(jax.vmap(run))(table)
    for index in (0, 2):
        values = [float(value) for value in table[index]]
        single = updated(recorded, config(**dict(zip(FIELDS, values, strict=True)))).network
        single = eqx.filter(single, trainable(single))
        assert_close(
            jax.tree.map(lambda leaf, at=index: leaf[at], swept), single, rtol=1e-4, atol=1e-5
        )
    assert differ(*(jax.tree.map(lambda leaf, at=at: leaf[at], swept) for at in (0, 1)))


def test_config_is_a_record():
    options = PPOConfig(n_envs=8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.n_envs = 9
    assert dataclasses.replace(options, n_envs=16).n_envs == 16
