"""The reason for the library: a replay with unchanged weights reproduces the rollout.

On the first minibatch of every iteration the likelihood ratio is 1 to float precision.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo.algorithms import replay, replay_error, unroll_env
from eqx_ppo.networks import LSTM, Sequential
from tests.algorithms.common import (
    ScheduledEnv,
    assert_close,
    compiled,
    rollout_of,
    schedule,
    small_config,
    train,
)
from tests.helpers.networks import CASES, NotReplayed, heads

LIMIT = 1e-5
CAUGHT = 1e-3  # what a faulty replay exceeds by far

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def config(**changes):
    return small_config(n_envs=8, learning_rate=3e-2, **changes)


# --- Through `ppo_step` -------------------------------------------------------------------


def assert_first_ratios_are_one(case, config, key):
    _, history = train(case.env, case.build(key), config, key, 3)
    assert all(float(metrics["losses/ratio_error"]) <= LIMIT for metrics in history)
    assert all(float(metrics["skipped_updates"]) == 0 for metrics in history)


@every_case
def test_first_ratio_of_every_iteration(case, getkey):
    assert_first_ratios_are_one(case, config(), getkey())


@pytest.mark.parametrize(
    "name", ["shared_trunk", "gru_trained_start", "normalizer_behind_delay", "everything", "dict"]
)
def test_first_ratio_with_segments(name, getkey):
    assert_first_ratios_are_one(CASES[name], config(segment_length=2), getkey())


def test_these_rollouts_end_everywhere(getkey):
    """In each of the three iterations episodes end at the first, a middle and the last step."""
    for name in ("mlp", "dict"):
        case = CASES[name]
        start, step = compiled(case.env, case.build(key := getkey()), config())
        state = start(key)
        rollout = rollout_of(case.env, config())
        ends = np.zeros((3, 4), bool)
        truncations = 0
        for iteration in range(3):
            transitions = rollout(state).transitions
            ends[iteration] = np.asarray(transitions.done).any(axis=1)
            truncations += int(transitions.truncated.sum())
            state, _ = step(state)
        assert ends[:, [0, -1]].all() if name == "mlp" else ends.any(axis=0)[[0, -1]].all()
        assert ends[:, 1:3].any(axis=1).all()
        assert (truncations > 0) == (name == "mlp")


def test_a_layer_that_is_not_replayed_shows_in_the_metric(getkey):
    def build(key):
        return Sequential([NotReplayed(), heads(2, 1, key)])

    case = CASES["mlp"]
    _, history = train(case.env, build(getkey()), config(), getkey(), 2)
    assert min(float(metrics["losses/ratio_error"]) for metrics in history) > CAUGHT


def test_only_the_first_ratio_is_one(getkey):
    """The gradient steps do move the likelihoods: the metric is that of the first minibatch."""
    case = CASES["lstm"]
    start, step = compiled(case.env, case.build(getkey()), config())
    before = start(getkey())
    after, metrics = step(before)

    @jax.jit
    def error(before, after):
        carry = before.rollout_state.network_state
        env_state = jax.vmap(case.env.reset)(jax.random.split(before.key, 8))
        _, _, transitions = unroll_env(case.env, env_state, before.network, carry, 4, before.key)
        return replay_error(after.network, carry, transitions)

    assert float(metrics["losses/ratio_error"]) <= LIMIT
    assert float(error(before, before)) <= LIMIT
    assert float(error(before, after)) > CAUGHT


# --- Through `unroll_env` -----------------------------------------------------------------


@eqx.filter_jit
def measure(env, network, env_state, network_state, key):
    """A rollout, the error of its replay and of faulty ones, and both final carries."""
    start = network_state
    network_state, env_state, transitions = unroll_env(
        env, env_state, network, network_state, 5, key
    )
    not_fresh = jnp.zeros(transitions.done.shape[1], jnp.bool_)
    one_late = transitions._replace(done=jnp.roll(transitions.done, 1, axis=0))
    moved = network.update_statistics(transitions.rollout_extras)
    errors = {
        "right": replay_error(network, start, transitions),
        "resets one step late": replay_error(network, start, one_late),
        "carry of the end": replay_error(network, network_state, transitions),
        "statistics moved before": replay_error(moved, start, transitions),
    }
    replayed = replay(network, start, not_fresh, transitions)
    return moved, env_state, network_state, transitions, errors, replayed


@every_case
def test_replay_reproduces_the_rollout(case, getkey):
    """Outputs, likelihoods and the final carry; before and after the statistics moved."""
    network = case.build(getkey())
    env_state = jax.jit(jax.vmap(case.env.reset))(jax.random.split(getkey(), 6))
    carry = network.initialize_state(6, key=getkey())
    for _ in range(2):
        network, env_state, carry, transitions, errors, replayed = measure(
            case.env, network, env_state, carry, getkey()
        )
        assert transitions.done.any()
        assert float(errors["right"]) <= LIMIT
        assert_close(replayed.output, transitions.network_output, rtol=1e-5, atol=1e-6)
        assert_close(replayed.next_state, carry, rtol=1e-5, atol=1e-6)
        assert (float(errors["resets one step late"]) > CAUGHT) == case.remembers
        assert (float(errors["statistics moved before"]) > CAUGHT) == case.normalizes
    # In the first rollout the start and the end may be alike; in the second they are not.
    assert (float(errors["carry of the end"]) > CAUGHT) == case.remembers


@pytest.mark.parametrize("step", [0, 2, 4], ids=["first", "middle", "last"])
@pytest.mark.parametrize("kind", ["terminate", "truncate"])
def test_an_end_at_any_step(step, kind, getkey):
    env = ScheduledEnv()
    network = CASES["everything"].build(getkey())
    env_state = schedule([0.5, -0.3, 1.0], **{kind: [(step, 1)]})
    carry = network.initialize_state(3, key=getkey())
    _, _, carry, transitions, errors, replayed = measure(env, network, env_state, carry, getkey())
    done = np.zeros((5, 3), bool)
    done[step, 1] = True
    np.testing.assert_array_equal(transitions.done, done)
    np.testing.assert_array_equal(transitions.truncated, done & (kind == "truncate"))
    assert float(errors["right"]) <= LIMIT
    assert_close(replayed.next_state, carry, rtol=1e-5, atol=1e-6)


def test_a_stale_initial_state_is_caught(getkey):
    """Carries of fresh episodes made by older weights replay wrongly, unless made anew."""
    env = ScheduledEnv()
    old = Sequential(
        [LSTM(2, 6, trainable_initial_state=True, key=getkey()), heads(6, 1, getkey())]
    )
    new = eqx.tree_at(
        lambda network: network[0].initial_state.hidden, old, jnp.full(6, 0.7, jnp.float32)
    )
    fresh = jnp.array([True, False, True])
    stale = old.initialize_state(3, key=getkey())
    env_state = schedule([0.5, -0.3, 1.0], terminate=[(1, 1)])

    @jax.jit
    def errors(key):
        _, _, transitions = unroll_env(env, env_state, new, stale, 4, key, fresh=fresh)
        return (
            replay_error(new, stale, transitions, fresh),
            replay_error(new, stale, transitions),
            replay_error(new, new.reset_state(stale), transitions),
        )

    right, kept_stale, all_anew = errors(getkey())
    assert float(right) <= LIMIT
    assert float(kept_stale) > CAUGHT
    assert float(all_anew) > CAUGHT  # environment 1 was in the middle of an episode


@pytest.mark.parametrize("segment_length", [None, 2])
def test_initial_state_gets_a_gradient(segment_length, getkey):
    """It moves only if the replay of a fresh episode starts from the weights themselves."""
    case = CASES["gru_trained_start"]
    network = case.build(getkey())
    state, _ = train(case.env, network, config(segment_length=segment_length), getkey(), 1)
    np.testing.assert_array_equal(network[0].initial_state, np.zeros(6))
    assert np.abs(np.asarray(state.network[0].initial_state)).min() > 1e-4


def test_random_carry_advances_alike(getkey):
    """A sampler's key stays, and its count of draws grows by T in rollout and replay."""
    network = CASES["mlp"].build(getkey())
    env_state = schedule([0.0, 1.0])
    carry = network.initialize_state(2, key=getkey())
    _, _, end, _, _, replayed = measure(ScheduledEnv(), network, env_state, carry, getkey())
    before, after, again = (
        jax.tree.leaves(state, is_leaf=lambda node: type(node).__name__ == "RandomState")
        for state in (carry, end, replayed.next_state)
    )
    assert len(before) == 1
    np.testing.assert_array_equal(after[0].draws, [5, 5])
    np.testing.assert_array_equal(again[0].draws, [5, 5])
    assert (jax.random.key_data(before[0].keys) == jax.random.key_data(after[0].keys)).all()
