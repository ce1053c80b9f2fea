"""One iteration and the state that it takes and returns."""

import dataclasses
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

from eqx_ppo.algorithms import LoggingLevel, make_optimizer, new_training_state, ppo_step
from eqx_ppo.algorithms._update import update
from eqx_ppo.envs import CachedReset, FreshReset, PooledReset, State
from eqx_ppo.networks import LSTM, Dense, Frozen, Normalizer, Sequential, trainable
from eqx_ppo.ops import new_counter
from tests.algorithms.common import (
    ScheduledEnv,
    assert_close,
    assert_same,
    compiled,
    differ,
    numbers,
    rollout_of,
    running,
    schedule,
    small_config,
    train,
)
from tests.helpers.networks import CASES, DICT, SCRIPTED, PoisonedGradient, heads

EVERYTHING = CASES["everything"]
TOP = CASES["normalizer_on_top"]


def statistics(network):
    nodes = jax.tree.leaves(network, is_leaf=lambda node: isinstance(node, Frozen))
    return [node for node in nodes if isinstance(node, Frozen)]


# --- Statistics ---------------------------------------------------------------------------


def test_statistics_stand_still_in_the_gradient_phase():
    """Bit for bit, under AdamW with weight decay; the optimizer keeps no moments for them."""
    config = small_config(learning_rate=0.1, weight_decay=0.5, gradient_clipping=1.0)
    network = EVERYTHING.build(jax.random.key(0))
    state, _ = train(EVERYTHING.env, network, config, jax.random.key(1), 1)
    before = state.network
    rollout = rollout_of(EVERYTHING.env, config)(state)
    optimizer = make_optimizer(config)

    @jax.jit
    def gradient_phase(state, rollout):
        result = update(
            state.network, state.optimizer_state, rollout, config, optimizer, jax.random.key(2)
        )
        return eqx.filter(result.network, eqx.is_array)

    after = gradient_phase(state, rollout)
    assert len(statistics(after)) == 2
    assert_same(statistics(after), statistics(eqx.filter(before, eqx.is_array)))
    moved = [differ(a, b) for a, b in zip(_weights(after), _weights(before), strict=True)]
    assert all(moved)
    shapes = sorted(leaf.shape for leaf in jax.tree.leaves(state.optimizer_state) if leaf.ndim)
    assert shapes == sorted([leaf.shape for leaf in _weights(before)] * 2)  # mu and nu


def _weights(network):
    return jax.tree.leaves(eqx.filter(network, trainable(network)))


def test_statistics_move_once_per_iteration():
    """They equal NumPy's moments of all observations so far, and count each once."""
    config = small_config(learning_rate=1e-2, n_epochs=3)
    start, step = compiled(TOP.env, TOP.build(jax.random.key(0)), config)
    rollout = rollout_of(TOP.env, config)
    state, seen = start(jax.random.key(1)), []
    assert int(state.network[0].count) == 0
    for iteration in range(1, 4):
        seen.append(np.asarray(rollout(state).transitions.obs, np.float64).reshape(-1, 2))
        state, _ = step(state)
        everything = np.concatenate(seen)
        normalizer = state.network[0]
        assert int(normalizer.count) == 16 * iteration == len(everything)
        np.testing.assert_allclose(normalizer.mean, everything.mean(axis=0), rtol=1e-5)
        np.testing.assert_allclose(normalizer.std, everything.std(axis=0), rtol=1e-5)


def test_weight_metrics_leave_statistics_out():
    config = small_config(logging_level=LoggingLevel.WEIGHTS, learning_rate=0.0)
    network = TOP.build(jax.random.key(0))
    network = eqx.tree_at(lambda n: n[0].statistics.moments.mean, network, jnp.full(2, 1e6))
    state, history = train(TOP.env, network, config, jax.random.key(1), 1)
    weights = np.concatenate([np.asarray(leaf).ravel() for leaf in _weights(state.network)])
    np.testing.assert_allclose(history[0]["weights/mean"], weights.mean(), rtol=1e-4)
    np.testing.assert_allclose(history[0]["weights/std"], weights.std(), rtol=1e-4)


# --- Bad gradients (case E3) ----------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_training_goes_on_after_a_bad_gradient(bad):
    """Environment 2 spoils the gradient of its minibatch, once per epoch, in one iteration."""
    layer = Dense(2, 2, kernel_init=lambda _, shape, dtype: jnp.eye(2), key=jax.random.key(0))
    network = Sequential([layer, PoisonedGradient(55.0, bad), heads(2, 1, jax.random.key(1))])
    config = small_config(learning_rate=1e-3, gradient_clipping=0.5)
    start, step = compiled(ScheduledEnv(), network, config)
    state = start(jax.random.key(2))
    planted = schedule([0.0, 0.0, 60.0, 0.0], terminate=[(0, 2)])
    state = eqx.tree_at(lambda s: s.rollout_state, state, running(state.rollout_state, planted))
    state, metrics = step(state)
    assert float(metrics["skipped_updates"]) == 2
    for _ in range(10):
        before, (state, metrics) = state, step(state)
        assert float(metrics["skipped_updates"]) == 0
        assert all(np.isfinite(float(value)) for value in metrics.values())
        assert differ(_weights(state.network), _weights(before.network))
    assert int(state.counts.skipped_updates) == 2
    for leaf in jax.tree.leaves((_weights(state.network), state.optimizer_state)):
        assert np.isfinite(leaf).all()


# --- Seeds --------------------------------------------------------------------------------


def test_seeds():
    config = small_config(learning_rate=1e-2)
    network = EVERYTHING.build(jax.random.key(0))
    start, step = compiled(EVERYTHING.env, network, config)

    def run(seed):
        state = start(jax.random.key(seed))
        for _ in range(2):
            state, metrics = step(state)
        return state, metrics

    first, again, other = run(0), run(0), run(1)
    assert_same(first, again)
    assert differ(first[0].arrays, other[0].arrays)
    for left, right in zip(_weights(first[0].network), _weights(other[0].network), strict=True):
        assert not np.array_equal(left, right)


def test_raw_keys():
    config = small_config()
    network = TOP.build(jax.random.key(0))
    start, _ = compiled(TOP.env, network, config)
    assert_same(start(jax.random.PRNGKey(3)), start(jax.random.key(3)))
    with pytest.raises(TypeError, match=r"jax\.random\.key\(seed\)"):
        new_training_state(TOP.env, network, config, 3)
    with pytest.raises(TypeError, match="a batch of keys"):
        new_training_state(TOP.env, network, config, jax.random.split(jax.random.key(0), 2))


def test_keys_of_another_implementation():
    config = small_config(learning_rate=1e-2)
    state, history = train(
        TOP.env, TOP.build(jax.random.key(0)), config, jax.random.key(0, impl="rbg"), 2
    )
    assert jax.random.key_impl(state.key) == jax.random.key_impl(jax.random.key(0, impl="rbg"))
    assert np.isfinite(history[-1]["losses/total"])


# --- Transforms ---------------------------------------------------------------------------


class Aliased:
    """One array under many names: what donation trips over when it is done eagerly."""

    observation_size: ClassVar[int] = 2

    def reset(self, key):
        zero = jnp.zeros((), jnp.float32)
        obs = jax.random.normal(key, (2,), jnp.float32)
        return State(
            obs, zero, zero, {"last_obs": obs, "truncation": zero}, {"reward": zero}, (obs, obs)
        )

    def step(self, state, action):
        obs = 0.9 * state.obs + action[0]
        reward = obs[0]
        done = (jnp.abs(reward) > 0.8).astype(jnp.float32)
        info = {"last_obs": state.obs, "truncation": jnp.zeros((), jnp.float32)}
        return State(obs, reward, done, info, {"reward": reward}, (obs, state.obs))


@pytest.mark.parametrize("strategy", [PooledReset(), CachedReset(), FreshReset()], ids=str)
def test_the_state_can_be_donated(strategy):
    """No two leaves share a buffer, and the donated run is the same run."""
    env = Aliased()
    network = Sequential(
        [Normalizer(2), LSTM(2, 4, key=jax.random.key(1)), heads(4, 1, jax.random.key(0))]
    )
    config = small_config(learning_rate=1e-2, reset_strategy=strategy)
    start, step = compiled(env, network, config)
    donating = jax.jit(lambda state: ppo_step(env, state, config), donate_argnums=0)
    state, kept = start(jax.random.key(2)), start(jax.random.key(2))
    for _ in range(3):
        pointers = [
            leaf.unsafe_buffer_pointer()
            for leaf in jax.tree.leaves(state)
            if leaf.size and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        ]
        assert len(set(pointers)) == len(pointers)
        before, (state, _) = state, donating(state)
        assert before.arrays[0].is_deleted()
        kept, _ = step(kept)
    assert_same(state, kept)
    assert np.isfinite(network[1].cell.weight_ih).all()  # not part of what was donated


def test_donation_spares_the_network_of_an_uncompiled_start():
    network = TOP.build(jax.random.key(0))
    config = small_config(learning_rate=1e-2)
    state = new_training_state(TOP.env, network, config, jax.random.key(1))
    step = jax.jit(lambda state: ppo_step(TOP.env, state, config), donate_argnums=0)
    state, _ = step(state)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(eqx.filter(network, eqx.is_array)))
    assert differ(_weights(state.network), _weights(network))


def test_an_optimizer_that_keeps_the_first_weights_can_be_donated():
    """Such as a Polyak average, whose state begins as the weights themselves."""
    network = TOP.build(jax.random.key(0))
    keeps = optax.GradientTransformation(
        init=lambda params: (params, params),
        update=lambda grads, state, params: (jax.tree.map(lambda g: -0.1 * g, grads), state),
    )
    start = jax.jit(
        lambda network_arrays, key: new_training_state(
            TOP.env,
            eqx.combine(network_arrays, eqx.filter(network, eqx.is_array, inverse=True)),
            small_config(),
            key,
            optimizer=keeps,
        )
    )
    arrays = eqx.filter(network, eqx.is_array)
    state = start(arrays, jax.random.key(1))
    donating = jax.jit(
        lambda state: ppo_step(TOP.env, state, small_config(), keeps), donate_argnums=0
    )
    state, _ = donating(state)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(arrays))
    first, second = state.optimizer_state
    assert_same(first, second)
    assert_same(jax.tree.leaves(first), _weights(network))


class Traced:
    """Counts how often JAX traces `step`, and so how often anything around it is compiled."""

    observation_size: ClassVar[int] = 2

    def __init__(self, env):
        self.env = env
        self.traces = 0

    def reset(self, key):
        return self.env.reset(key)

    def step(self, state, action):
        self.traces += 1
        return self.env.step(state, action)


def test_scan_over_iterations():
    """The state is a plain carry, functions in the network and all; and nothing retraces."""
    env = Traced(SCRIPTED)
    trunk = Dense(2, 5, activation=lambda x: jnp.maximum(x, 0.1 * x), key=jax.random.key(0))
    network = Sequential([Normalizer(2), trunk, heads(5, 1, jax.random.key(1))])
    config = small_config(learning_rate=1e-2)
    start, step = compiled(env, network, config)
    scan = jax.jit(
        lambda state: jax.lax.scan(lambda s, _: ppo_step(env, s, config), state, None, length=3)
    )
    state = start(jax.random.key(2))
    last, history = scan(state)
    traced = env.traces
    assert scan._cache_size() == 1
    scan(last)  # a state that came out goes in again
    assert scan._cache_size() == 1
    assert env.traces == traced

    metrics = []
    for _ in range(3):
        state, row = step(state)
        metrics.append(row)
    assert step._cache_size() == 1
    assert_close(state, last, rtol=1e-5, atol=1e-6)
    assert_close(history["losses/total"], np.stack([m["losses/total"] for m in metrics]), rtol=1e-5)
    moved = state.with_network(eqx.tree_at(lambda n: n[1].bias, state.network, jnp.ones(5)))
    step(moved)
    step(start(jax.random.key(9)))
    assert step._cache_size() == 1


@pytest.mark.parametrize("strategy", [PooledReset(), FreshReset()], ids=str)
def test_vmap_over_seeds(strategy):
    """Case J3: three seeds at once equal three runs."""
    config = small_config(learning_rate=1e-2, reset_strategy=strategy)
    network = EVERYTHING.build(jax.random.key(0))
    start, step = compiled(EVERYTHING.env, network, config)
    keys = jax.random.split(jax.random.key(1), 3)
    states = jax.jit(jax.vmap(start))(keys)
    many = jax.jit(jax.vmap(step))
    for _ in range(2):
        states, metrics = many(states)
    assert metrics["losses/total"].shape == (3,)
    for index in range(3):
        single = start(keys[index])
        for _ in range(2):
            single, row = step(single)
        member = jax.tree.map(lambda leaf, at=index: leaf[at], states)
        assert_close(member, single, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(metrics["losses/total"][index], row["losses/total"], rtol=1e-4)
        assert int(member.counts.steps) == 32


def test_under_shard_map():
    """Seeds spread over devices: carries are made from data, not from bare constants (I15)."""
    config = small_config(learning_rate=1e-2)
    network = EVERYTHING.build(jax.random.key(0))
    start, step = compiled(EVERYTHING.env, network, config)
    keys = jax.random.split(jax.random.key(1), 1)
    mesh = Mesh(np.array(jax.devices()[:1]), ("seeds",))

    def on_device(states):
        return jax.vmap(lambda state: ppo_step(EVERYTHING.env, state, config))(states)

    states = jax.jit(jax.vmap(start))(keys)
    spread = jax.jit(
        jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=PartitionSpec("seeds"),
            out_specs=PartitionSpec("seeds"),
        )
    )
    got, _ = spread(states)
    expected, _ = step(start(keys[0]))
    assert_close(jax.tree.map(lambda leaf: leaf[0], got), expected, rtol=1e-5, atol=1e-5)


def test_hyperparameters_are_traced_under_vmap():
    """Case I5 through the whole iteration: a sweep over arrays equals single runs."""
    network = TOP.build(jax.random.key(0))
    names = ("learning_rate", "clip_range", "discounting_factor", "gae_lambda")
    table = np.array([[1e-2, 0.2, 0.9, 0.5], [1e-3, 0.05, 0.99, 1.0]], np.float32)
    key = jax.random.key(1)

    def run(values):
        config = small_config(**dict(zip(names, values, strict=True)))
        state = new_training_state(TOP.env, network, config, key)
        for _ in range(2):
            state, _ = ppo_step(TOP.env, state, config)
        return state.arrays

    swept = jax.jit(jax.vmap(run))(jnp.asarray(table))
    for index in range(2):
        values = [float(value) for value in table[index]]
        single, _ = train(
            TOP.env, network, small_config(**dict(zip(names, values, strict=True))), key, 2
        )
        member = jax.tree.map(lambda leaf, at=index: leaf[at], swept)
        assert_close(member, single.arrays, rtol=1e-4, atol=1e-5)


# --- Counts -------------------------------------------------------------------------------


def test_counts():
    config = small_config(rollout_length=5)
    state, _ = train(TOP.env, TOP.build(jax.random.key(0)), config, jax.random.key(1), 3)
    assert [int(count) for count in state.counts] == [60, 3, 0, 0]


def test_counts_are_exact_beyond_32_bits():
    config = small_config()
    start, step = compiled(TOP.env, TOP.build(jax.random.key(0)), config)
    state = start(jax.random.key(1))
    edge = 2**32
    state = eqx.tree_at(
        lambda s: (s.counts.steps, s.counts.iterations),
        state,
        (new_counter(edge - 10), new_counter(edge - 1)),
    )
    network = eqx.tree_at(
        lambda n: n[0].statistics.moments.count, state.network, new_counter(3 * edge - 7)
    )
    state = state.with_network(network)
    for iteration in range(1, 4):
        state, _ = step(state)
        assert int(state.counts.steps) == edge - 10 + 16 * iteration
        assert int(state.counts.iterations) == edge - 1 + iteration
        assert int(state.network[0].count) == 3 * edge - 7 + 16 * iteration
    assert step._cache_size() == 1


# --- The network inside -------------------------------------------------------------------


def test_network_comes_back_whole():
    network = EVERYTHING.build(jax.random.key(0))
    start, _ = compiled(EVERYTHING.env, network, small_config())
    state = start(jax.random.key(1))
    assert jax.tree.structure(state.network) == jax.tree.structure(network)
    for left, right in zip(jax.tree.leaves(state.network), jax.tree.leaves(network), strict=True):
        assert np.array_equal(left, right) if eqx.is_array(left) else left is right
    assert hash(state.remainder) == hash(start(jax.random.key(2)).remainder)


def test_with_network():
    network = TOP.build(jax.random.key(0))
    start, _ = compiled(TOP.env, network, small_config())
    state = start(jax.random.key(1))
    other = eqx.tree_at(lambda n: n[1].bias, network, jnp.ones(6))
    np.testing.assert_array_equal(state.with_network(other).network[1].bias, np.ones(6))
    np.testing.assert_array_equal(state.network[1].bias, np.zeros(6))
    other = eqx.tree_at(lambda n: n[1].activation, network, jax.nn.relu)
    for wrong in (other, EVERYTHING.build(jax.random.key(0))):
        with pytest.raises(ValueError, match="the same modules with the same functions"):
            state.with_network(wrong)


def test_numpy_arrays_in_a_network():
    network = TOP.build(jax.random.key(0))
    loaded = jax.tree.map(lambda leaf: np.asarray(leaf) if eqx.is_array(leaf) else leaf, network)
    config = small_config(learning_rate=1e-2)
    left, right = (train(TOP.env, n, config, jax.random.key(1), 1)[0] for n in (network, loaded))
    assert_same(left.arrays, right.arrays)


def test_a_configuration_for_another_batch():
    """No environment is left out silently."""
    network = TOP.build(jax.random.key(0))
    start, _ = compiled(TOP.env, network, small_config())
    with pytest.raises(ValueError, match=r"n_envs=2.* 4 environments"):
        ppo_step(TOP.env, start(jax.random.key(1)), small_config(n_envs=2))


# --- What does not fit --------------------------------------------------------------------


def test_one_value_per_reward():
    network = Sequential([Normalizer(3), heads(3, 3, jax.random.key(0))])

    @dataclasses.dataclass(frozen=True, eq=False)
    class Flat:
        def reset(self, key):
            state = DICT.reset(key)
            return state.replace(obs=state.obs["proprio"], data=(state.data, state.obs["goal"]))

        def step(self, state, action):
            data, goal = state.data
            inner = state.replace(obs={"proprio": state.obs, "goal": goal}, data=data)
            inner = DICT.step(inner, {"arm": action[:2], "leg": action[2:]})
            return inner.replace(obs=inner.obs["proprio"], data=(inner.data, goal))

    with pytest.raises(ValueError, match="one head per reward"):
        new_training_state(Flat(), network, small_config(), jax.random.key(0))


def test_one_sampler_per_reward_unless_combined():
    case = CASES["dict"]

    @dataclasses.dataclass(frozen=True, eq=False)
    class Summed:
        def reset(self, key):
            return self._sum(DICT.reset(key))

        def step(self, state, action):
            reward = {"arm": state.reward, "leg": state.reward}
            return self._sum(DICT.step(state.replace(reward=reward), action))

        def _sum(self, state):
            return state.replace(reward=state.reward["arm"] + state.reward["leg"])

    network = case.build(jax.random.key(0))
    value = Dense(6, 1, key=jax.random.key(1))
    network = eqx.tree_at(lambda n: n[-1].modules, network, (network[-1].action, value))
    with pytest.raises(ValueError, match="combine_advantages=True"):
        new_training_state(Summed(), network, small_config(), jax.random.key(0))
    config = small_config(combine_advantages=True, learning_rate=1e-2)
    _, history = train(Summed(), network, config, jax.random.key(0), 2)
    assert all(float(metrics["losses/ratio_error"]) <= 1e-5 for metrics in history)


def test_an_optimizer_and_its_settings():
    config = small_config(learning_rate=1e-2)
    network = TOP.build(jax.random.key(0))
    with pytest.raises(ValueError, match=r"sets \['learning_rate'\], but an optimizer was given"):
        new_training_state(TOP.env, network, config, jax.random.key(0), optimizer=optax.sgd(1e-2))
    start, _ = compiled(TOP.env, network, small_config())
    state = start(jax.random.key(0))
    with pytest.raises(ValueError, match=r"sets \['learning_rate'\], but an optimizer was given"):
        ppo_step(TOP.env, state, config, optax.sgd(1e-2))


def test_custom_optimizer_takes_plain_gradient_steps():
    """SGD at rate 1 moves the weights by minus the gradient: half the rate, half the way."""
    network = TOP.build(jax.random.key(0))
    config = small_config(n_epochs=1, n_minibatches=1)
    start = np.concatenate([np.asarray(leaf).ravel() for leaf in _weights(network)])

    def moved(rate):
        state, _ = train(TOP.env, network, config, jax.random.key(1), 1, optax.sgd(rate))
        return np.concatenate([numbers(leaf).ravel() for leaf in _weights(state.network)]) - start

    whole, half = moved(1.0), moved(0.5)
    assert np.abs(whole).max() > 1e-2
    np.testing.assert_allclose(whole, 2 * half, rtol=1e-3, atol=1e-6)
