"""Collecting experience, and what a minibatch takes out of it."""

import dataclasses
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr

from eqx_ppo.algorithms import (
    LoggingLevel,
    new_training_state,
    ppo_step,
    replay,
    replay_error,
    unroll_env,
)
from eqx_ppo.algorithms._loss import advantages_and_targets
from eqx_ppo.algorithms._rollout import batched_env, collect
from eqx_ppo.algorithms._step import Stepper, renew
from eqx_ppo.algorithms._transition import Rollout, RolloutState
from eqx_ppo.algorithms._update import _samples, _take
from eqx_ppo.envs import (
    BatchedEnv,
    CachedReset,
    EpisodeWrapper,
    FreshReset,
    PooledReset,
    ResetStrategy,
    State,
    TruncationProbe,
)
from eqx_ppo.networks import LSTM, Delay, Dense, Normalizer, Sequential
from tests.algorithms.common import (
    INF_REWARD,
    NAN_DATA,
    NAN_METRIC,
    NAN_OBS,
    NAN_REWARD,
    ScheduledEnv,
    assert_close,
    assert_same,
    compiled,
    numbers,
    running,
    schedule,
    small_config,
)
from tests.helpers.networks import CASES, Counter, CountingPolicy, ObservedValue, heads

ENV = ScheduledEnv()


@eqx.filter_jit
def unroll(env, env_state, network, carry, length, key, **options):
    return unroll_env(env, env_state, network, carry, length, key, **options)


# --- Order of things ----------------------------------------------------------------------


def test_carry_is_reset_after_the_step_that_ends():
    """A carry that starts at 7 emits 7, 8, 0, 1, in rollout and replay (case C1)."""
    network = CountingPolicy()
    env_state = schedule([0.0], terminate=[(1, 0)])
    start = jnp.array([7.0])
    end, _, transitions = unroll(ENV, env_state, network, start, 4, jax.random.key(0))
    np.testing.assert_array_equal(transitions.done[:, 0], [False, True, False, False])
    np.testing.assert_array_equal(
        transitions.network_output.value_estimates[:, 0], [7.0, 8.0, 0.0, 1.0]
    )
    np.testing.assert_array_equal(end, [2.0])
    again = replay(network, start, jnp.array([False]), transitions)
    np.testing.assert_array_equal(again.output.value_estimates[:, 0], [7.0, 8.0, 0.0, 1.0])
    np.testing.assert_array_equal(again.next_state, [2.0])


def test_fresh_carries_are_made_anew():
    env_state = schedule([0.0, 0.0])
    end, _, transitions = unroll(
        ENV,
        env_state,
        CountingPolicy(),
        jnp.array([7.0, 7.0]),
        2,
        jax.random.key(0),
        fresh=jnp.array([False, True]),
    )
    np.testing.assert_array_equal(
        transitions.network_output.value_estimates, [[7.0, 0.0], [8.0, 1.0]]
    )
    np.testing.assert_array_equal(end, [9.0, 2.0])


def test_rollouts_continue_the_episode():
    """Episodes of 5 steps in rollouts of 3: the second starts in their middle (case C11)."""
    env = EpisodeWrapper(TruncationProbe(), 5)
    network, carry = CountingPolicy(), jnp.zeros(2, jnp.float32)
    env_state = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), 2))
    seen, ends = [], []
    for index in range(3):
        carry, env_state, transitions = unroll(
            env, env_state, network, carry, 3, jax.random.key(index)
        )
        seen.append(np.asarray(transitions.network_output.value_estimates[:, 0]))
        ends.append(np.asarray(transitions.truncated[:, 0]))
    np.testing.assert_array_equal(seen, [[0, 1, 2], [3, 4, 0], [1, 2, 3]])
    np.testing.assert_array_equal(ends, [[False] * 3, [False, True, False], [False] * 3])


def test_iterations_continue_the_episode():
    """The same through `ppo_step`: the training state keeps the carry and the environments."""
    env = EpisodeWrapper(TruncationProbe(), 5)
    network = Sequential([Counter(), heads(1, 1, jax.random.key(0))])
    start, step = compiled(env, network, small_config(rollout_length=3))
    state = start(jax.random.key(1))
    state, _ = step(state)
    elapsed = np.asarray(state.rollout_state.env_state.info["episode_steps"])
    count = np.asarray(state.rollout_state.network_state[0])
    assert len(set(elapsed.tolist())) > 1  # staggered: they do not end together
    assert ((count == 3) | (count == elapsed)).all()
    for _ in range(4):
        state, _ = step(state)
        for _ in range(3):
            count = np.where(elapsed == 5, 1, count + 1)
            elapsed = elapsed % 5 + 1
        carry = state.rollout_state.network_state[0]
        np.testing.assert_array_equal(carry, count)
        np.testing.assert_array_equal(state.rollout_state.env_state.info["episode_steps"], elapsed)
        np.testing.assert_array_equal(state.rollout_state.fresh, elapsed == 5)


def test_transitions_show_the_episode_before_its_reset():
    """Against a loop over single steps in plain Python, environment 1 ending at step 1."""
    network = CASES["shared_trunk"].build(jax.random.key(0))
    carry = network.initialize_state(2, key=jax.random.key(1))
    env_state = schedule([0.5, -0.5], terminate=[(1, 1)])
    _, last, transitions = unroll(
        ENV,
        env_state,
        network,
        carry,
        4,
        jax.random.key(2),
        logging_level=LoggingLevel.ENV_METRICS,
    )
    positions, clocks = np.array([0.5, -0.5]), np.array([0, 0])
    for step in range(4):
        np.testing.assert_array_equal(transitions.obs[step, :, 0], clocks)
        np.testing.assert_allclose(transitions.obs[step, :, 1], positions, rtol=1e-5)
        actions = np.asarray(transitions.network_output.actions[step, :, 0])
        positions, clocks = 0.9 * positions + 0.5 * actions, clocks + 1
        np.testing.assert_allclose(transitions.rewards[step], positions + 0.5 * clocks, rtol=1e-5)
        np.testing.assert_array_equal(transitions.metrics["env"]["clock"][step], clocks)
        done = np.array([False, step == 1])
        np.testing.assert_array_equal(transitions.done[step], done)
        np.testing.assert_array_equal(transitions.terminated[step], done)
        positions, clocks = np.where(done, -1.0, positions), np.where(done, 0, clocks)
    np.testing.assert_allclose(last.data.position, positions, rtol=1e-5)
    assert not transitions.truncated.any()
    assert transitions.valid.all()
    assert not last.done.any()


def test_same_key_same_rollout():
    network = CASES["lstm"].build(jax.random.key(0))
    env = CASES["lstm"].env
    carry = network.initialize_state(3, key=jax.random.key(1))
    env_state = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(2), 3))
    first, again, other = (
        unroll(env, env_state, network, carry, 6, jax.random.key(seed)) for seed in (3, 3, 4)
    )
    assert_same(first, again)
    assert first[2].done.any()
    # Another key gives other resets; the actions' randomness is in the carry.
    assert not np.array_equal(first[2].obs, other[2].obs)
    np.testing.assert_array_equal(first[2].obs[0], other[2].obs[0])


def test_raw_keys():
    network, carry = CountingPolicy(), jnp.zeros(1, jnp.float32)
    env = CASES["lstm"].env
    env_state = jax.vmap(env.reset)(jax.random.split(jax.random.key(2), 1))
    results = [
        unroll(env, env_state, network, carry, 5, key)
        for key in (jax.random.PRNGKey(5), jax.random.key(5))
    ]
    assert_same(*results)
    with pytest.raises(TypeError, match=r"jax\.random\.key\(seed\)"):
        unroll_env(env, env_state, network, carry, 5, 5)


def test_refusals():
    state = schedule([0.0, 0.0])
    carry = jnp.zeros(2, jnp.float32)
    with pytest.raises(ValueError, match="`unroll_length` must be at least 1, but got 0"):
        unroll_env(ENV, state, CountingPolicy(), carry, 0, jax.random.key(0))
    with pytest.raises(TypeError, match=r"`PPONetworkOutput`, but gave a.*PPOAdapter"):
        unroll_env(ENV, state, Dense(2, 1, key=jax.random.key(0)), (), 1, jax.random.key(0))


class ColumnReward:
    """A reward of shape `[1]`, which would be `[B, 1]` in a batch."""

    observation_size: ClassVar[int] = 2

    def reset(self, key):
        return State(jnp.zeros(2), jnp.zeros(1), jnp.array(False), {}, {})

    def step(self, state, action):
        return state.replace(reward=jnp.ones(1))


def test_reward_must_be_one_number_per_environment():
    env = ColumnReward()
    state = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 3))
    with pytest.raises(ValueError, match=r"shape \(3,\) in a batch, but has shape \(3, 1\)"):
        unroll_env(env, state, CountingPolicy(), jnp.zeros(3), 2, jax.random.key(0))


# --- Bootstrap values ---------------------------------------------------------------------


def network_with_memory(key):
    keys = jax.random.split(key, 3)
    return Sequential(
        [
            Delay(jnp.zeros(2, jnp.float32), 1),
            Dense(2, 5, activation=jnp.tanh, key=keys[0]),
            LSTM(5, 4, key=keys[1]),
            heads(4, 1, keys[2]),
        ]
    )


def test_next_values_by_hand():
    """12 environments, up to 10 of them truncated at once (more than one chunk of 8)."""
    network = network_with_memory(jax.random.key(0))
    carry = network.initialize_state(12, key=jax.random.key(1))
    truncate = [(1, env) for env in range(1, 11)] + [(3, 0), (3, 11), (4, 5)]
    terminate = [(2, 0), (1, 11)]
    env_state = schedule(np.linspace(-1, 1, 12), truncate=truncate, terminate=terminate)
    # A reset empties the schedule: (3, 0), (3, 11) and (4, 5) never come.
    _, last, transitions = unroll(ENV, env_state, network, carry, 5, jax.random.key(2))
    truncated, terminated = np.zeros((2, 5, 12), bool)
    truncated[1, 1:11] = True
    terminated[2, 0] = terminated[1, 11] = True
    np.testing.assert_array_equal(transitions.truncated, truncated)
    np.testing.assert_array_equal(transitions.terminated, terminated)

    value_of = jax.jit(lambda carry, obs: network(carry, obs).output.value_estimates)
    step_network = jax.jit(lambda carry, obs: network(carry, obs).next_state)
    step_env = jax.jit(jax.vmap(ENV.step))
    for step in range(5):
        carry_before_reset = step_network(carry, transitions.obs[step])
        stepped = step_env(env_state, transitions.network_output.actions[step])
        np.testing.assert_allclose(
            transitions.next_values[step][~terminated[step]],
            value_of(carry_before_reset, stepped.obs)[~terminated[step]],
            rtol=1e-5,
            atol=1e-6,
        )
        done = transitions.done[step]
        fresh = jax.vmap(ENV.reset)(jax.random.split(jax.random.key(0), 12))
        env_state = _select(done, fresh, stepped)
        carry = _select(done, network.reset_state(carry_before_reset), carry_before_reset)
    np.testing.assert_allclose(last.obs, env_state.obs, rtol=1e-5, atol=1e-6)


def _select(done, on_true, on_false):
    def choose(a, b):
        return jnp.where(done.reshape(-1, *(1,) * (b.ndim - 1)), a, b)

    return jax.tree.map(choose, on_true, on_false)


@pytest.mark.parametrize("last_step_too", [False, True])
def test_bootstraps_advance_nothing(last_step_too):
    """Ends as time limits or as terminations: everything but the next values is the same."""
    network = network_with_memory(jax.random.key(0))
    carry = network.initialize_state(10, key=jax.random.key(1))
    ends = [(0, 3), (2, 0), (2, 1)] + [(1, env) for env in range(4, 10)]
    ends += [(3, 2)] if last_step_too else []

    def run(**kind):
        env_state = schedule(np.linspace(-1, 1, 10), **kind)
        result = unroll(ENV, env_state, network, carry, 4, jax.random.key(2))
        return (result, unroll(ENV, result[1], network, result[0], 3, jax.random.key(3)))

    def anonymous(result):
        """Without what says which kind of end it was."""
        carry, env_state, transitions = result
        nothing = jnp.zeros((), jnp.bool_)
        same = {"truncated": nothing, "terminated": nothing, "next_values": nothing}
        data = env_state.data._replace(terminates=nothing, truncates=nothing)
        return carry, env_state.replace(data=data), transitions._replace(**same)

    cut_off, terminated = run(truncate=ends), run(terminate=ends)
    assert cut_off[0][2].truncated.sum() == terminated[0][2].terminated.sum() == len(ends)
    for first, second in zip(cut_off, terminated, strict=True):
        assert_same(anonymous(first), anonymous(second))


def primitives(jaxpr):
    """The names of all primitives, those of inner programs included."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for item in jax.tree.leaves(eqn.params):
            if isinstance(item, ClosedJaxpr):
                yield from primitives(item.jaxpr)


def test_masked_time_limits_are_not_evaluated():
    """The rollout is the same, without the loop over truncated rows and the values it gives."""
    network = network_with_memory(jax.random.key(0))
    carry = network.initialize_state(3, key=jax.random.key(1))
    batched, strategy = batched_env(ENV, network, carry, 3), CachedReset()
    reset_state = strategy.start(batched, 3, jax.random.key(2))
    env_state = schedule([0.5, -0.5, 1.0], truncate=[(1, 1), (3, 2)], terminate=[(2, 0)])
    state = RolloutState(env_state, carry, reset_state, jnp.zeros(3, jnp.bool_), jnp.array(True))

    def run(truncation):
        stepper = Stepper(batched, network, strategy, LoggingLevel.NONE, truncation)
        run = jax.jit(lambda state: collect(stepper, state, 4, 1, jax.random.key(3)))
        return list(primitives(jax.make_jaxpr(run)(state).jaxpr)).count("while"), *run(state)

    loops, end, rollout = run("bootstrap")
    masked_loops, masked_end, masked = run("mask")
    assert loops - masked_loops == 1
    # Two programs, whose kernels may round differently.
    assert_close(masked_end, end, rtol=1e-6, atol=1e-6)
    truncated = np.asarray(rollout.transitions.truncated)
    values = np.asarray(rollout.transitions.next_values)
    assert truncated.sum() == 2
    assert np.abs(values[truncated]).min() > 1e-3
    expected = rollout.transitions._replace(next_values=jnp.where(truncated, 0.0, values))
    assert_close(masked.transitions, expected, rtol=1e-6, atol=1e-6)


class Tape:
    """Observations from a list; the step at `ends_at` terminates, if there is one."""

    observation_size: ClassVar[int] = 1
    values = (2.0, 2.0, 10.0)

    def __init__(self, ends_at=None):
        self.ends_at = -1 if ends_at is None else ends_at

    def reset(self, key):
        return self._state(jnp.zeros((), jnp.int32), jnp.zeros(()))

    def step(self, state, action):
        return self._state(state.data + jnp.int32(1), jnp.ones(()))

    def _state(self, time, reward):
        obs = jnp.array([*self.values, 4.0])[time][None]
        return State(obs, reward, time == self.ends_at, {}, {}, time)


@pytest.mark.parametrize(
    ("ends_at", "expected"),
    [(None, [8.0, 8.0]), (2, [-0.1, -1.0])],
    ids=["time limit", "terminated on its last step"],
)
def test_time_limit_and_termination_on_one_step(ends_at, expected):
    """Cases B3 and B5 with an environment: values 2, 2, then 10 where the episode stops.

    A time limit bootstraps from the 10, not from the 5 of the next episode's start; a
    termination in the same step bootstraps from nothing.
    """
    env = EpisodeWrapper(Tape(ends_at), 2)
    state = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), 1))
    inner = Tape(ends_at)
    inner.values = (5.0, 4.0, 10.0)  # what the next episode looks like
    other = EpisodeWrapper(inner, 2)
    batched = batched_env(other, ObservedValue(), (), 1)
    next_episode = batched.reset(jax.random.split(jax.random.key(0), 1))

    class Next(ResetStrategy):
        def start(self, env, n_envs, key):
            return ()

        def deal(self, env, state, wanted, key):
            return next_episode, ()

    config = small_config(discounting_factor=0.9, gae_lambda=1.0)
    _, _, transitions = unroll(
        env, state, ObservedValue(), (), 3, jax.random.key(0), reset_strategy=Next()
    )
    values = transitions.network_output.value_estimates
    np.testing.assert_array_equal(values[:, 0], [2.0, 2.0, 5.0])
    assert bool(transitions.truncated[1, 0]) == (ends_at is None)
    advantages, targets = advantages_and_targets(transitions, values, config)
    # The new episode: reward 1, value 5, and a next value that is read off the tape: 2.
    np.testing.assert_allclose(advantages[:, 0], [*expected, 1.0 + 0.9 * 2.0 - 5.0], rtol=1e-6)
    np.testing.assert_allclose(targets, values + advantages, rtol=1e-6)


# --- Storage ------------------------------------------------------------------------------


class Wide:
    """An observation of 11 numbers, so that its stacks are known by their shape."""

    observation_size: ClassVar[int] = 11

    def reset(self, key):
        return State(
            jax.random.normal(key, (11,), jnp.float32), jnp.zeros(()), jnp.array(False), {}, {}
        )

    def step(self, state, action):
        return state.replace(obs=0.9 * state.obs + action[0], reward=action[0])


def stacks(jaxpr, shape):
    """How many outputs of innermost scans have a shape."""
    found = 0
    for eqn in jaxpr.eqns:
        inner = [item for item in jax.tree.leaves(eqn.params) if isinstance(item, ClosedJaxpr)]
        below = sum(stacks(closed.jaxpr, shape) for closed in inner)
        if eqn.primitive.name == "scan" and not below:
            below = sum(out.aval.shape == shape for out in eqn.outvars)
        found += below
    return found


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (lambda: [Normalizer(11)], 1),
        (list, 1),
        (lambda: [Delay(jnp.zeros(11, jnp.float32), 1), Normalizer(11)], 2),
    ],
    ids=["normalizer on top", "no normalizer", "normalizer behind a delay"],
)
def test_observations_are_stored_once(layers, expected):
    env = Wide()
    network = Sequential([*layers(), heads(11, 1, jax.random.key(0))])
    carry = network.initialize_state(3, key=jax.random.key(1))
    state = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(2), 3))

    def run(state, carry):
        return unroll_env(env, state, network, carry, 5, jax.random.key(3))

    # Of the extras the rollout stacks only what is not the observation itself.
    assert stacks(jax.make_jaxpr(run)(state, carry).jaxpr, (5, 3, 11)) == expected
    _, _, transitions = run(state, carry)
    extras = transitions.rollout_extras
    if expected == 1 and len(network) == 2:
        assert extras[0] is transitions.obs
    if expected == 2:
        late = np.concatenate([np.zeros((1, 3, 11)), np.asarray(transitions.obs)[:-1]])
        np.testing.assert_array_equal(extras[1], late)
    pre_tanh = extras[-1]["action"][1]
    np.testing.assert_allclose(np.tanh(pre_tanh), transitions.network_output.actions, rtol=1e-5)


# --- Non-finite steps ---------------------------------------------------------------------


def rollout_with(damage=(), terminate=()):
    network = CASES["everything"].build(jax.random.key(0))
    carry = network.initialize_state(3, key=jax.random.key(1))
    env_state = schedule([0.5, -0.5, 1.0], damage=damage, terminate=terminate)
    result = unroll(ENV, env_state, network, carry, 4, jax.random.key(2))
    return network, *result


@pytest.mark.parametrize("kind", [NAN_REWARD, INF_REWARD, NAN_OBS, NAN_DATA, NAN_METRIC])
@pytest.mark.parametrize("done_too", [False, True])
def test_a_step_that_blows_up(kind, done_too):
    """Case G1: T = 4, B = 3, environment 1 goes non-finite at step 2."""
    network, _, _, clean = rollout_with()
    _, carry, env_state, transitions = rollout_with(
        damage=[(2, 1, kind)], terminate=[(2, 1)] if done_too else []
    )
    bad = np.zeros((4, 3), bool)
    bad[2, 1] = True
    np.testing.assert_array_equal(transitions.valid, ~bad)
    np.testing.assert_array_equal(transitions.terminated, bad)
    assert not transitions.truncated.any()
    assert float(transitions.rewards[2, 1]) == 0.0
    np.testing.assert_array_equal(transitions.obs[3, 1], [0.0, -1.0])  # a clean start

    seen = (carry, transitions, env_state.obs, env_state.reward, env_state.data.position)
    for leaf in jax.tree.leaves(seen):
        assert np.isfinite(numbers(leaf)).all()
    others = np.array([0, 2])
    for left, right in zip(jax.tree.leaves(transitions), jax.tree.leaves(clean), strict=True):
        np.testing.assert_array_equal(left[:, others], right[:, others])

    config = small_config()
    values = transitions.network_output.value_estimates
    advantages, _ = advantages_and_targets(transitions, values, config)
    clean_ones, _ = advantages_and_targets(clean, clean.network_output.value_estimates, config)
    np.testing.assert_array_equal(advantages[:, others], clean_ones[:, others])
    assert np.isfinite(advantages).all()
    assert float(advantages[2, 1]) == 0.0

    moved = network.update_statistics(transitions.rollout_extras)
    assert int(moved[0].count) == 12  # the observation before the bad step is a good one
    assert np.isfinite(moved[0].mean).all()


def test_a_sentinel_is_no_blow_up():
    """What was never finite does not end an episode."""
    _, _, env_state, transitions = rollout_with()
    assert np.isnan(env_state.data.sentinel).all()
    assert transitions.valid.all()


def test_bad_steps_are_counted_and_left_out():
    """Through `ppo_step`, with one bad step in each of two environments."""
    network = CASES["everything"].build(jax.random.key(0))
    config = small_config(logging_level=LoggingLevel.ALL & ~LoggingLevel.THROUGHPUT)
    start, step = compiled(ENV, network, config)
    state = start(jax.random.key(1))
    planted = schedule(
        [0.5, -0.5, 1.0, 2.0], damage=[(2, 1, NAN_REWARD), (3, 2, NAN_OBS)], terminate=[(3, 2)]
    )
    state = eqx.tree_at(lambda s: s.rollout_state, state, running(state.rollout_state, planted))
    state, metrics = step(state)
    assert float(metrics["invalid_steps"]) == 2
    assert float(metrics["skipped_updates"]) == 0
    assert all(np.isfinite(float(value)) for value in metrics.values())
    for _ in range(10):
        state, metrics = step(state)
        assert float(metrics["invalid_steps"]) == 0
    assert int(state.counts.invalid_steps) == 2
    for leaf in jax.tree.leaves(state.network):
        assert not isinstance(leaf, jax.Array) or np.isfinite(leaf).all()


# --- What a minibatch starts from (case C3) -----------------------------------------------


def collected(config, env_state, network, carry, **options):
    batched = batched_env(ENV, network, carry, config.n_envs)
    strategy = CachedReset()
    reset_state = strategy.start(batched, config.n_envs, jax.random.key(0))
    running = jnp.zeros(config.n_envs, jnp.bool_)
    state = RolloutState(env_state, carry, reset_state, running, begun=jnp.array(True))
    stepper = Stepper(batched, network, strategy, LoggingLevel.NONE)
    return jax.jit(
        lambda state: collect(
            stepper, state, config.rollout_length, config.n_segments, jax.random.key(1)
        )[1]
    )(state)


def test_minibatch_starts_from_the_carries_of_its_environments():
    config = small_config()
    carry = jnp.array([10.0, 20.0, 30.0, 40.0])
    rollout = collected(config, schedule([0.0] * 4, terminate=[(1, 2)]), CountingPolicy(), carry)
    batch = _take(_samples(rollout, config), jnp.array([2, 0]), config)
    np.testing.assert_array_equal(batch.network_state, [30.0, 10.0])
    out = replay(CountingPolicy(), batch.network_state, batch.fresh, batch.transitions)
    np.testing.assert_array_equal(
        out.output.value_estimates.T, [[30.0, 31.0, 0.0, 1.0], [10.0, 11.0, 12.0, 13.0]]
    )


def test_segment_starts_from_the_carry_at_its_start():
    config = small_config(segment_length=2)
    carry = jnp.array([10.0, 20.0, 30.0, 40.0])
    rollout = collected(config, schedule([0.0] * 4, terminate=[(1, 2)]), CountingPolicy(), carry)
    assert isinstance(rollout, Rollout)
    np.testing.assert_array_equal(rollout.network_states, [[10, 20, 30, 40], [12, 22, 32, 42]])
    np.testing.assert_array_equal(rollout.fresh, [[False] * 4, [False, False, True, False]])
    # Samples are numbered segment by segment: 6 is segment 1 of environment 2.
    batch = _take(_samples(rollout, config), jnp.array([6, 3, 4]), config)
    np.testing.assert_array_equal(batch.network_state, [32.0, 40.0, 12.0])
    np.testing.assert_array_equal(batch.fresh, [True, False, False])
    np.testing.assert_array_equal(batch.transitions.obs[:, :, 0].T, [[0, 1], [0, 1], [2, 3]])
    out = replay(CountingPolicy(), batch.network_state, batch.fresh, batch.transitions)
    np.testing.assert_array_equal(out.output.value_estimates.T, [[0, 1], [40, 41], [12, 13]])


@pytest.mark.parametrize("segment_length", [None, 2])
def test_shuffling_changes_no_likelihood(segment_length):
    config = small_config(segment_length=segment_length)
    network = CASES["everything"].build(jax.random.key(0))
    carry = network.initialize_state(4, key=jax.random.key(1))
    env_state = schedule([0.5, -0.5, 1.0, 2.0], terminate=[(0, 1), (2, 3)], truncate=[(1, 0)])
    rollout = collected(config, env_state, network, carry)
    samples = _samples(rollout, config)
    order = jax.random.permutation(jax.random.key(3), 4 * config.n_segments)

    @jax.jit
    def log_likelihoods(order):
        batch = _take(samples, order, config)
        out = replay(network, batch.network_state, batch.fresh, batch.transitions)
        return out.output.log_likelihoods, batch.advantages

    recorded = np.asarray(rollout.transitions.network_output.log_likelihoods)
    length = 4 // config.n_segments
    segments = recorded.reshape(config.n_segments, length, 4).swapaxes(0, 1).reshape(length, -1)
    shuffled, advantages = log_likelihoods(order)
    np.testing.assert_allclose(shuffled, segments[:, order], rtol=1e-5, atol=1e-6)
    assert not np.allclose(shuffled, segments, atol=1e-3)
    plain, plain_advantages = log_likelihoods(jnp.arange(4 * config.n_segments))
    assert_close((shuffled, advantages), (plain[:, order], plain_advantages[:, order]), atol=1e-6)


# --- Where episodes begin -------------------------------------------------------------------


@jax.jit
def _marked_reset(key):
    return jax.random.uniform(key, (1,), jnp.float32)


class Beginnings:
    """Episodes of one step; an observation tells what was done to its start."""

    observation_size: ClassVar[int] = 1
    action_size: ClassVar[int] = 1

    def reset(self, key):
        info = {"one": jnp.array(1.0)}
        return State(_marked_reset(key), jnp.zeros(()), jnp.array(False), info, {})

    def step(self, state, action):
        return state.replace(obs=state.obs + 1000.0, done=jnp.array(True))

    def stagger(self, state, key):
        return state.replace(obs=state.obs + 10.0)

    def carry_over(self, ended, fresh):
        # Only states of this environment, not the zeros before the first episode.
        fresh = eqx.error_if(fresh, fresh.info["one"] != 1.0, "not a state")
        ended = eqx.error_if(ended, ended.info["one"] != 1.0, "not a state")
        return fresh.replace(obs=fresh.obs + 100.0 * ended.info["one"])


@pytest.mark.parametrize("strategy", [PooledReset(), FreshReset(), CachedReset()], ids=str)
def test_how_episodes_begin(strategy):
    """Only first episodes are staggered, and only later ones keep something of the last one."""
    network = heads(1, 1, jax.random.key(0))
    config = small_config(rollout_length=3, reset_strategy=strategy)
    start, step = compiled(Beginnings(), network, config)
    state = start(jax.random.key(1))
    assert not state.rollout_state.begun
    assert state.rollout_state.fresh.all()
    assert not state.rollout_state.env_state.obs.any()
    batched = BatchedEnv(Beginnings(), state.env_spec)
    stepper = Stepper(batched, network, strategy, LoggingLevel.NONE, staggers=True)
    run = jax.jit(lambda state, key: collect(stepper, state, 3, 1, key))
    after, rollout = run(state.rollout_state, jax.random.key(2))
    starts = np.asarray(rollout.transitions.obs[..., 0])
    np.testing.assert_array_equal(np.floor(starts / 10.0), [[1.0] * 4, [10.0] * 4, [10.0] * 4])
    assert after.begun
    assert after.fresh.all()
    np.testing.assert_array_equal(after.env_state.obs[:, 0], starts[-1] + 1000.0)
    _, rollout = run(after, jax.random.key(3))
    np.testing.assert_array_equal(
        np.floor(rollout.transitions.obs[..., 0] / 10.0), [[10.0] * 4] * 3
    )
    seeds = jnp.stack([jax.random.key(1), jax.random.key(2)])
    moved, _ = jax.jit(jax.vmap(step))(jax.vmap(start)(seeds))
    assert moved.rollout_state.begun.all()


class Notified:
    """Notes on the host each time that resets are computed; episodes of `length` steps."""

    observation_size: ClassVar[int] = 1
    action_size: ClassVar[int] = 1

    def __init__(self, length):
        self.length = length
        self.calls = 0

    def reset(self, key):
        obs = jax.pure_callback(
            self._note,
            jax.ShapeDtypeStruct((1,), jnp.float32),
            jax.random.uniform(key, (1,), jnp.float32),
            vmap_method="expand_dims",
        )
        return State(obs, jnp.zeros(()), jnp.array(False), {}, {}, data=jnp.int32(0))

    def step(self, state, action):
        clock = state.data + 1
        return state.replace(data=clock, done=clock >= self.length)

    def _note(self, obs):
        self.calls += 1
        return obs


@pytest.mark.parametrize("n_seeds", [None, 3])
@pytest.mark.parametrize("strategy", [PooledReset(), FreshReset(), CachedReset()], ids=str)
def test_resets_are_computed_where_an_episode_begins(strategy, n_seeds):
    """On no other step, also where seeds are trained in one `jax.vmap`."""
    network = heads(1, 1, jax.random.key(0))

    def count(length):
        env = Notified(length)
        env_state = jax.vmap(env.reset)(jax.random.split(jax.random.key(1), 4))
        carry = network.initialize_state(4, key=jax.random.key(2))

        def run(key):
            return unroll_env(env, env_state, network, carry, 5, key, reset_strategy=strategy)[2]

        keys = jax.random.key(3)
        if n_seeds is not None:
            run, keys = jax.vmap(run), jax.random.split(keys, n_seeds)
        compiled_run = jax.jit(run).lower(keys).compile()
        env.calls = 0
        jax.block_until_ready(compiled_run(keys))
        return env.calls

    assert count(length=99) == 0
    assert count(length=3) == (0 if isinstance(strategy, CachedReset) else 1)


@dataclasses.dataclass(frozen=True)
class CountedReset(ResetStrategy):
    """Its state says how often it has dealt."""

    def start(self, env, n_envs, key):
        return jnp.zeros((), jnp.int32)

    def deal(self, env, state, wanted, key):
        return env.reset(jax.random.split(key, wanted.shape[0])), state + 1


def test_a_strategy_deals_to_each_seed_by_itself():
    """One whose environments all go on is not dealt to because another one's do not."""
    network = heads(2, 1, jax.random.key(0))
    config = small_config(rollout_length=4, reset_strategy=CountedReset())
    start, step = compiled(ENV, network, config)
    ends = [[(0, 1), (2, 0)], [(2, 3)], []]
    states = []
    for each, key in zip(ends, jax.random.split(jax.random.key(1), 3), strict=True):
        state, begun = start(key), schedule([0.1] * 4, terminate=each)
        states.append(dataclasses.replace(state, rollout_state=running(state.rollout_state, begun)))
    together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    together, _ = jax.jit(jax.vmap(lambda state: ppo_step(ENV, state, config)))(together)
    assert together.rollout_state.reset_state.tolist() == [2, 1, 0]
    for index, state in enumerate(states):
        alone = step(state)[0].rollout_state
        seed = jax.tree.map(lambda leaf: leaf[index], together.rollout_state)  # noqa: B023
        assert_same((seed.reset_state, seed.fresh), (alone.reset_state, alone.fresh))
        assert_close(seed.env_state, alone.env_state, atol=1e-6)


def test_episodes_begin_in_their_own_seed_alone():
    """`begun` is a seed's own: it stays unset where nothing has begun."""
    network, strategy = heads(2, 1, jax.random.key(0)), CountedReset()
    start, _ = compiled(ENV, network, small_config(reset_strategy=strategy))
    state = start(jax.random.key(1))
    stepper = Stepper(BatchedEnv(ENV, state.env_spec), network, strategy, LoggingLevel.NONE)
    seeds = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state.rollout_state)
    seeds = seeds._replace(fresh=seeds.fresh.at[1].set(False))
    after = jax.jit(
        jax.vmap(lambda each, key: stepper.unpack(renew(stepper, stepper.pack(each), key)))
    )(seeds, jax.random.split(jax.random.key(2), 2))
    assert after.begun.tolist() == [True, False]
    assert after.reset_state.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("strategy", "again"),
    [(FreshReset(), False), (PooledReset(), False), (CachedReset(), True)],
    ids=str,
)
def test_gradients_go_through_an_unroll(strategy, again):
    """Rewards by the first position, up to the end of the episode; both modes."""
    network = heads(2, 1, jax.random.key(0))
    carry = network.initialize_state(2, key=jax.random.key(1))
    begin = schedule([0.3, -0.2], terminate=[(2, 0)])

    def rewards(positions):
        env_state = begin.replace(data=begin.data._replace(position=positions))
        _, _, transitions = unroll_env(
            ENV, env_state, network, carry, 6, jax.random.key(2), reset_strategy=strategy
        )
        return transitions.rewards

    positions = jnp.array([0.3, -0.2])
    decay = 0.9 ** np.arange(1, 7)
    first = decay[:3].sum() * (2 if again else 1)
    total = jax.jit(jax.grad(lambda positions: jnp.sum(rewards(positions))))(positions)
    np.testing.assert_allclose(total, [first, decay.sum()], rtol=1e-5)
    each = jax.jit(jax.jacfwd(rewards))(positions)
    np.testing.assert_allclose(each.sum((0, 1)), total, rtol=1e-5)


def test_unrolling_from_the_end_of_an_episode():
    """As a training state holds it: the environment is reset first, and so is its carry."""
    env = EpisodeWrapper(TruncationProbe(), 3)
    config = small_config(rollout_length=4)
    network = Sequential([Counter(), heads(1, 1, jax.random.key(0))])
    start, step = compiled(env, network, config)
    state = start(jax.random.key(1))
    for _ in range(3):
        at = state.rollout_state
        _, _, transitions = unroll_env(
            env, at.env_state, state.network, at.network_state, 4, jax.random.key(3)
        )
        fresh, elapsed = np.asarray(at.fresh), np.asarray(at.env_state.info["episode_steps"])
        left = np.where(fresh, 3, 3 - elapsed)
        np.testing.assert_array_equal(np.argmax(transitions.truncated, axis=0), left - 1)
        assert replay_error(state.network, at.network_state, transitions, at.fresh) < 1e-5
        state, _ = step(state)


def test_resets_are_compiled_in_one_place():
    """They take most of the time to compile where a reset simulates physics."""
    network, config = heads(1, 1, jax.random.key(0)), small_config(reset_strategy=PooledReset())

    def count(function, *args):
        return str(jax.make_jaxpr(function)(*args)).count("name=_marked_reset")

    def start(key):
        return new_training_state(Beginnings(), network, config, key)

    state = start(jax.random.key(0))
    assert count(start, jax.random.key(0)) == 0
    assert count(lambda state: ppo_step(Beginnings(), state, config), state) == 1
