"""Where the next episode starts."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo.algorithms import PPOConfig, new_training_state, unroll_env
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


def batched(env=None):
    env = IdEnv() if env is None else env
    return BatchedEnv(env, env_spec(env, lambda obs: jax.ShapeDtypeStruct((1,), jnp.float32)))


def play(strategy, done, seed=0):
    """Deals along a script `done [T, B]`; the first states, the dealt ones and the last pool."""
    envs = batched()

    @jax.jit
    def run(key, done):
        start_key, key = jax.random.split(key)
        first, state = strategy.start(envs, done.shape[1], start_key)

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
    assert len(set(kept.tolist())) == len(kept)


def test_one_environment():
    first, dealt, _ = play(PooledReset(), np.ones((20, 1), bool))
    assert len({*first.data.id.tolist(), *dealt.data.id[:, 0].tolist()}) == 21


def test_the_pool_is_refilled_only_when_it_cannot_serve():
    """10 states for 4 environments, refilled by 2: after 4 + 4 of them, 2 are left for 4."""
    envs = batched()
    strategy = PooledReset(10, 2)
    _, pool = strategy.start(envs, 4, jax.random.key(0))
    assert int(pool.available) == 12  # a place for every state of the pool and of a refill
    before = pool
    _, pool = strategy.deal(envs, pool, jnp.zeros(4, jnp.bool_), jax.random.key(1))
    assert_same(pool, before)
    available = []
    for seed in range(5):
        _, pool = strategy.deal(envs, pool, jnp.ones(4, jnp.bool_), jax.random.key(seed))
        available.append(int(pool.available))
    assert available == [8, 4, 0, 0, 0]
    assert int(pool.head) == 20 % 12


def test_dealt_in_the_order_of_the_environments():
    envs = batched()
    strategy = PooledReset(8, 2)
    _, pool = strategy.start(envs, 5, jax.random.key(0))
    done = jnp.array([False, True, False, True, True])
    dealt, after = strategy.deal(envs, pool, done, jax.random.key(1))
    np.testing.assert_array_equal(dealt.data.id[done], envs.unpack(pool.states).data.id[:3])
    assert int(after.head) == 3
    assert int(after.available) == int(pool.available) - 3


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
    first, state = jax.jit(lambda key: strategy.start(envs, 4, key))(key)
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
        first, pool = strategy.start(envs, 4, key)

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


@pytest.mark.parametrize("options", [{"size": 0}, {"refill": 0}, {"size": -1}])
def test_sizes_are_positive(options):
    with pytest.raises(ValueError, match=f"PooledReset.{next(iter(options))}` must be at least 1"):
        PooledReset(**options)


# --- The others -----------------------------------------------------------------------------


def test_cached_returns_to_the_own_start():
    done = scripts(7)["some"]
    first, dealt, _ = play(CachedReset(), done)
    np.testing.assert_array_equal(dealt.data.id, [first.data.id] * len(done))
    assert len(set(first.data.id.tolist())) == 7


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
