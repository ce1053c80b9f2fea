"""Where the next episode starts."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo.algorithms import LoggingLevel, PPOConfig, new_training_state, unroll_env
from eqx_ppo.algorithms._rollout import collect
from eqx_ppo.algorithms._step import Stepper
from eqx_ppo.envs import (
    BatchedEnv,
    CachedReset,
    ConstantRewardProbe,
    FreshReset,
    PooledReset,
    State,
    env_spec,
)
from tests.algorithms.common import assert_same
from tests.helpers.networks import CountingPolicy, heads


class IdData(NamedTuple):
    id: jax.Array  # drawn from the key
    copy: jax.Array  # the same number once more, as an array [2]
    rng: jax.Array


class IdEnv:
    """A state is known by the number that its reset drew. Ends after every step."""

    def reset(self, key):
        number = jax.random.bits(key)
        data = IdData(number, jnp.stack([number, number]), jax.random.fold_in(key, 1))
        obs = jax.random.normal(key, (1,), jnp.float32)
        return State(obs, jnp.zeros(()), jnp.array(False), {}, {}, data)

    def step(self, state, action):
        return state.replace(done=jnp.array(True))


@dataclasses.dataclass(frozen=True, eq=False)
class Draws:
    """The observation is two normal numbers, plus 10 per step; an episode has 1 to 3 steps."""

    observation_size = 2

    def reset(self, key):
        start_key, length_key = jax.random.split(key)
        length = jax.random.randint(length_key, (), 1, 4, jnp.int32)
        obs = jax.random.normal(start_key, (2,), jnp.float32)
        return State(obs, jnp.zeros(()), jnp.array(False), {}, {}, length)

    def step(self, state, action):
        left = state.data - jnp.int32(1)
        return state.replace(obs=state.obs + 10.0, done=left <= 0, data=left)


def batched(env=None):
    env = IdEnv() if env is None else env
    return BatchedEnv(env, env_spec(env, lambda obs: jax.ShapeDtypeStruct((1,), jnp.float32)))


def begin(strategy, envs, n_envs, key):
    """The first states of all environments, and what the strategy keeps then."""
    start_key, deal_key = jax.random.split(key)
    state = strategy.start(envs, n_envs, start_key)
    return strategy.deal(envs, state, jnp.ones(n_envs, jnp.bool_), deal_key)


def play(strategy, done, seed=0):
    """Deals along a script `done [T, B]`; the first states, the dealt ones and the last pool."""
    envs = batched()

    @jax.jit
    def run(key, done):
        start_key, key = jax.random.split(key)
        first, state = begin(strategy, envs, done.shape[1], start_key)

        def step(state, inputs):
            done, key = inputs
            dealt, state = strategy.deal(envs, state, done, key)
            return state, dealt

        state, dealt = jax.lax.scan(step, state, (done, jax.random.split(key, done.shape[0])))
        return first, dealt, state

    return run(jax.random.key(seed), jnp.asarray(done))


def scripts(n_envs):
    rng = np.random.default_rng(0)
    return {
        "all at once": np.ones((30, n_envs), bool),
        "none": np.zeros((10, n_envs), bool),
        "some": rng.random((60, n_envs)) < 0.3,
        "all, then none, then one": np.concatenate(
            [np.ones((3, n_envs)), np.zeros((4, n_envs)), np.eye(n_envs)] * 3
        ).astype(bool),
    }


SIZES = [(None, None), (None, 1), (7, 1), (7, 7), (8, 3), (20, 2), (None, 50), (40, 13)]


# --- The pool -------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "refill"), SIZES)
@pytest.mark.parametrize("script", list(scripts(7)))
def test_each_state_is_dealt_once(size, refill, script):
    """No two environments ever share a start, over refills and around the ring."""
    done = scripts(7)[script]
    first, dealt, pool = play(PooledReset(size, refill), done)
    ids = np.concatenate([np.asarray(first.data.id), np.asarray(dealt.data.id)[done]])
    assert len(set(ids.tolist())) == 7 + done.sum()
    # The states are whole: no leaf comes from another reset than the others.
    np.testing.assert_array_equal(dealt.data.copy, np.stack([dealt.data.id] * 2, axis=-1))
    kept = np.asarray(batched().unpack(pool.states).data.id)
    places = (int(pool.head) + np.arange(int(pool.available))) % len(kept)
    assert not set(kept[places].tolist()) & set(ids.tolist())
    assert len(set(kept[places].tolist())) == len(places)


@pytest.mark.parametrize(("n_envs", "refill"), [(1, 1), (7, 7), (64, 32), (512, 64)])
def test_refills_by_default(n_envs, refill):
    """An eighth of the pool, at least 32 or all. It begins empty."""
    pool = PooledReset().start(batched(), n_envs, jax.random.key(0))
    assert {len(table) for table in pool.states.tables} == {n_envs + refill}
    assert int(pool.available) == 0
    one = jnp.arange(n_envs) == 0
    _, pool = PooledReset().deal(batched(), pool, one, jax.random.key(1))
    assert int(pool.available) == refill - 1


def test_one_environment():
    first, dealt, _ = play(PooledReset(), np.ones((20, 1), bool))
    assert len({*first.data.id.tolist(), *dealt.data.id[:, 0].tolist()}) == 21


def test_the_pool_is_refilled_only_when_it_cannot_serve():
    """4 environments, refilled by 3: 6 made for 4, then 3 more for the 2 that are left."""
    envs = batched()
    strategy = PooledReset(10, 3)
    pool = strategy.start(envs, 4, jax.random.key(0))
    before = pool
    _, pool = strategy.deal(envs, pool, jnp.zeros(4, jnp.bool_), jax.random.key(1))
    assert_same(pool, before)
    available = []
    for seed in range(5):
        _, pool = strategy.deal(envs, pool, jnp.ones(4, jnp.bool_), jax.random.key(seed))
        available.append(int(pool.available))
    assert available == [2, 1, 0, 2, 1]
    assert int(pool.head) == 20 % 13
    _, pool = strategy.deal(envs, pool, jnp.arange(4) == 2, jax.random.key(5))
    assert int(pool.available) == 0


def test_dealt_in_the_order_of_the_environments():
    envs = batched()
    strategy = PooledReset(8, 8)
    _, pool = begin(strategy, envs, 5, jax.random.key(0))
    assert int(pool.available) == 3
    done = jnp.array([False, True, False, True, True])
    dealt, after = strategy.deal(envs, pool, done, jax.random.key(1))
    np.testing.assert_array_equal(dealt.data.id[done], envs.unpack(pool.states).data.id[5:8])
    assert int(after.head) == 8
    assert int(after.available) == 0


@pytest.mark.parametrize("strategy", [PooledReset(), FreshReset(), CachedReset()], ids=str)
def test_keys_choose_the_states(strategy):
    done = scripts(7)["some"]
    first, again, other = (play(strategy, done, seed) for seed in (0, 0, 1))
    assert_same(first, again)
    assert not set(np.asarray(first[0].data.id).tolist()) & set(other[0].data.id.tolist())
    mine, theirs = (np.asarray(run[1].data.id)[done] for run in (first, other))
    assert not set(mine.tolist()) & set(theirs.tolist())


@pytest.mark.parametrize("strategy", [PooledReset(), FreshReset(), CachedReset()], ids=str)
def test_keys_of_another_implementation(strategy):
    """Environments may keep keys in their state, of the kind that training is run with."""
    envs = batched()
    key = jax.random.key(0, impl="rbg")
    first, state = jax.jit(lambda key: begin(strategy, envs, 4, key))(key)
    assert jax.random.key_impl(first.data.rng) == jax.random.key_impl(key)
    dealt, _ = jax.jit(lambda s, key: strategy.deal(envs, s, jnp.ones(4, jnp.bool_), key))(
        state, jax.random.fold_in(key, 1)
    )
    assert len(set(dealt.data.id.tolist())) == 4
    assert jax.random.key_impl(dealt.data.rng) == jax.random.key_impl(key)


def test_under_vmap():
    """Every seed has a pool of its own, refilled when it needs to be."""
    envs, strategy = batched(), PooledReset(4, 1)
    rng = np.random.default_rng(0)
    done = jnp.asarray(rng.random((3, 20, 4)) < np.array([0.0, 0.2, 0.9])[:, None, None])

    def run(key, done):
        first, pool = begin(strategy, envs, 4, key)

        def step(pool, inputs):
            dealt, pool = strategy.deal(envs, pool, *inputs)
            return pool, dealt.data.id

        _, ids = jax.lax.scan(step, pool, (done, jax.random.split(jax.random.fold_in(key, 9), 20)))
        return first.data.id, ids

    keys = jax.random.split(jax.random.key(0), 3)
    first, ids = jax.jit(jax.vmap(run))(keys, done)
    everything = [*np.asarray(first).ravel(), *np.asarray(ids)[np.asarray(done)]]
    assert len(set(everything)) == 12 + int(done.sum())
    for seed in range(3):
        single = jax.jit(run)(keys[seed], done[seed])
        np.testing.assert_array_equal(single[0], first[seed])
        np.testing.assert_array_equal(single[1][done[seed]], ids[seed][done[seed]])


def test_in_a_rollout_no_start_repeats():
    """All environments end at every step, so each observation is a new start."""
    state = jax.jit(jax.vmap(IdEnv().reset))(jax.random.split(jax.random.key(0), 5))
    _, _, transitions = unroll_env(
        IdEnv(),
        state,
        CountingPolicy(),
        jnp.zeros(5),
        12,
        jax.random.key(1),
        reset_strategy=PooledReset(6, 1),
    )
    assert len(np.unique(transitions.obs)) == 60


@pytest.mark.parametrize(("size", "n_envs"), [(3, 4), (1, 2), (255, 256)])
def test_a_pool_smaller_than_the_batch(size, n_envs):
    message = f"at least the number of environments.* but got {size} for {n_envs} environments"
    with pytest.raises(ValueError, match=message):
        PooledReset(size).start(batched(), n_envs, jax.random.key(0))
    config = PPOConfig(n_envs=n_envs, n_minibatches=1, reset_strategy=PooledReset(size))
    with pytest.raises(ValueError, match=message):
        new_training_state(
            ConstantRewardProbe(), heads(1, 1, jax.random.key(0)), config, jax.random.key(0)
        )


@pytest.mark.parametrize(
    "options", [{"size": 0}, {"refill": 0}, {"size": -1}, {"size": 4.5}, {"size": True}]
)
def test_sizes_are_whole_and_positive(options):
    with pytest.raises(ValueError, match=f"PooledReset.{next(iter(options))}` must be at least 1"):
        PooledReset(**options)


# --- The others -----------------------------------------------------------------------------


def test_cached_returns_to_the_own_start():
    done = scripts(7)["some"]
    first, dealt, _ = play(CachedReset(), done)
    np.testing.assert_array_equal(dealt.data.id, [first.data.id] * len(done))
    assert len(set(first.data.id.tolist())) == 7


def test_cached_starts_are_the_states_that_a_rollout_is_given():
    """Also if that is the middle of an episode: nothing else is known."""
    state = jax.jit(jax.vmap(Draws().reset))(jax.random.split(jax.random.key(0), 5))
    given = state
    for _ in range(2):
        _, last, transitions = unroll_env(
            Draws(),
            given,
            CountingPolicy(),
            jnp.zeros(5),
            5,
            jax.random.key(1),
            reset_strategy=CachedReset(),
        )
        starts = np.asarray(transitions.obs[1:])[np.asarray(transitions.done[:-1])]
        assert len(starts)
        assert np.isin(starts, np.asarray(given.obs)).all()
        given = last


def test_cached_in_a_rollout():
    state = jax.jit(jax.vmap(IdEnv().reset))(jax.random.split(jax.random.key(0), 5))
    _, last, transitions = unroll_env(
        IdEnv(),
        state,
        CountingPolicy(),
        jnp.zeros(5),
        4,
        jax.random.key(1),
        reset_strategy=CachedReset(),
    )
    np.testing.assert_array_equal(transitions.obs[2:], [transitions.obs[1]] * 2)
    np.testing.assert_array_equal(last.obs, transitions.obs[1])


def test_fresh_is_a_reset_of_its_own_each_time():
    done = np.ones((10, 7), bool)
    first, dealt, state = play(FreshReset(), done)
    ids = [*first.data.id.tolist(), *np.asarray(dealt.data.id).ravel().tolist()]
    assert len(set(ids)) == 77
    assert state == ()


@pytest.mark.parametrize("strategy", [FreshReset(), CachedReset(), PooledReset(9, 2)], ids=str)
def test_strategies_are_values(strategy):
    twin = type(strategy)(**vars(strategy))
    assert strategy == twin
    assert hash(strategy) == hash(twin)


# --- Distribution ---------------------------------------------------------------------------


def kolmogorov_smirnov(left, right):
    """The largest distance between two empirical distribution functions."""
    values = np.sort(np.concatenate([left, right]))
    ranks = [np.searchsorted(np.sort(sample), values, side="right") for sample in (left, right)]
    return np.abs(ranks[0] / len(left) - ranks[1] / len(right)).max()


@pytest.mark.parametrize("strategy", [PooledReset(7, 2), PooledReset(), FreshReset()], ids=str)
def test_dealt_states_are_distributed_as_resets(strategy):
    """A two-sample Kolmogorov-Smirnov test at the 0.1 % level, for a fixed seed."""
    done = np.random.default_rng(1).random((600, 7)) < 0.5
    _, dealt, _ = play(strategy, done, seed=5)
    starts = np.asarray(dealt.obs[..., 0])[done]
    resets = jax.jit(jax.vmap(IdEnv().reset))(jax.random.split(jax.random.key(99), 2000))
    resets = np.asarray(resets.obs[:, 0])
    critical = 1.95 * np.sqrt(1 / len(starts) + 1 / len(resets))
    assert kolmogorov_smirnov(starts, resets) < critical
    assert kolmogorov_smirnov(starts + 0.2, resets) > critical  # what it would notice


def test_which_environment_gets_which_state_is_unrelated():
    """An environment that ends often gets starts like one that seldom does."""
    done = np.random.default_rng(1).random((1500, 2)) < np.array([0.9, 0.1])
    _, dealt, _ = play(PooledReset(4, 1), done, seed=5)
    starts = np.asarray(dealt.obs[..., 0])
    often, seldom = (starts[done[:, env], env] for env in range(2))
    critical = 1.95 * np.sqrt(1 / len(often) + 1 / len(seldom))
    assert kolmogorov_smirnov(often, seldom) < critical


def starts_in_training(strategy, n_iterations, n_envs=16, length=32):
    """The starts of all episodes that training sees, by environment."""
    config = PPOConfig(
        n_envs=n_envs, rollout_length=length, n_minibatches=1, reset_strategy=strategy
    )
    network = heads(2, 1, jax.random.key(0))
    state = jax.jit(lambda key: new_training_state(Draws(), network, config, key))(
        jax.random.key(1)
    )
    stepper = Stepper(BatchedEnv(Draws(), state.env_spec), network, strategy, LoggingLevel.NONE)
    run = jax.jit(lambda state, key: collect(stepper, state, length, 1, key))
    rollout_state, seen = state.rollout_state, []
    for index in range(n_iterations):
        rollout_state, rollout = run(rollout_state, jax.random.key(100 + index))
        seen.append(rollout.transitions)
    obs, done = (
        np.concatenate([np.asarray(part) for part in parts])
        for parts in zip(*((part.obs, part.done) for part in seen), strict=True)
    )
    begins = np.concatenate([np.ones((1, n_envs), bool), done[:-1]])
    return [obs[begins[:, env], env] for env in range(n_envs)]


@pytest.mark.parametrize("strategy", [PooledReset(), PooledReset(40, 3), FreshReset()], ids=str)
def test_starts_over_a_training_run(strategy):
    """All different, over many rollouts with one pool, and distributed as those of `reset`."""
    starts = starts_in_training(strategy, 10)
    everything = np.concatenate(starts)
    assert len(everything) > 2000
    assert len(np.unique(everything, axis=0)) == len(everything)
    everything = everything[:, 0]
    resets = jax.jit(jax.vmap(Draws().reset))(jax.random.split(jax.random.key(99), 4000))
    resets = np.asarray(resets.obs[:, 0])
    critical = 1.95 * np.sqrt(1 / len(everything) + 1 / len(resets))
    assert kolmogorov_smirnov(everything, resets) < critical
    # Those of the last quarter too, by when the pool has long been refilled.
    late = np.concatenate([own[-len(own) // 4 :, 0] for own in starts])
    critical = 1.95 * np.sqrt(1 / len(late) + 1 / len(resets))
    assert kolmogorov_smirnov(late, resets) < critical


def test_cached_starts_over_a_training_run():
    starts = starts_in_training(CachedReset(), 3)
    assert len(np.unique([own[0] for own in starts], axis=0)) == 16
    for own in starts:
        assert len(own) > 20
        np.testing.assert_array_equal(own, [own[0]] * len(own))
