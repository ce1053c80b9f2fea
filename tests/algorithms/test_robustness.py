"""Overflowing gradients, faulty resets, weak types, and records that do not fit each other."""

from typing import final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eqx_ppo import networks as nets
from eqx_ppo.algorithms import (
    LoggingLevel,
    PPOConfig,
    eval_rollout,
    new_training_state,
    ppo_step,
    unroll_env,
)
from eqx_ppo.envs import CachedReset, FreshReset, Pendulum, PooledReset, State
from eqx_ppo.networks import StatefulModuleOutput

KEY = jax.random.key(0)


@final
class Faulty:
    """One step per episode; every other reset gives an observation that is not finite."""

    def __init__(self, reward=1.0, *, faulty=False):
        self.reward = reward
        self.faulty = faulty

    def reset(self, key):
        bad = jax.random.bernoulli(key) & self.faulty
        obs = jnp.where(bad, jnp.nan, jax.random.normal(key, (3,), jnp.float32))
        zero = jnp.zeros((), jnp.float32)
        return State(obs, zero, jnp.zeros((), bool), {}, {})

    def step(self, state, action):
        reward = jnp.full((), self.reward, jnp.float32)
        return State(state.obs + 0.0 * action[0], reward, jnp.ones((), bool), {}, {})


def network():
    return nets.make_mlp_actor_critic(3, 1, [8], [8], key=KEY)


def config(**changes):
    fields = {"n_envs": 8, "rollout_length": 4, "n_epochs": 1, "n_minibatches": 2} | changes
    return PPOConfig(**fields)


def run(env, settings, iterations=1, optimizer=None):
    state = new_training_state(env, network(), settings, KEY, optimizer=optimizer)
    step = jax.jit(lambda s: ppo_step(env, s, settings, optimizer))
    for _ in range(iterations):
        state, metrics = step(state)
    return state, metrics


def test_a_gradient_that_would_overflow_the_optimizer_is_skipped_and_counted():
    # The gradient of the value loss is about 1e22: finite, but its square is not.
    settings = config()
    start = new_training_state(Faulty(1e22), network(), settings, KEY)
    state, metrics = run(Faulty(1e22), settings)
    assert int(metrics["skipped_updates"]) == 2
    assert int(state.counts.skipped_updates) == 2
    for new, old in zip(
        jax.tree.leaves(state.optimizer_state), jax.tree.leaves(start.optimizer_state), strict=True
    ):
        np.testing.assert_array_equal(new, old)
    # Ordinary rewards then move the critic as ever.
    step = jax.jit(lambda s: ppo_step(Faulty(1.0), s, settings))
    after, metrics = step(state)
    assert int(metrics["skipped_updates"]) == 0
    critic, before = after.network[1].value[0].kernel, state.network[1].value[0].kernel
    assert np.any(np.asarray(critic) != np.asarray(before))


def test_an_optimizer_state_that_starts_at_infinity_does_not_block_updates():
    def init(params):
        return jnp.full((), jnp.inf, jnp.float32)

    def update(grads, state, params=None):
        return jax.tree.map(lambda g: -0.1 * g, grads), state

    optimizer = optax.GradientTransformation(init, update)
    state, metrics = run(Faulty(), config(), optimizer=optimizer)
    assert int(metrics["skipped_updates"]) == 0
    assert np.any(np.asarray(state.network[1].value[0].kernel) != network()[1].value[0].kernel)


@pytest.mark.parametrize("strategy", [FreshReset(), CachedReset()])
def test_a_reset_that_is_not_finite_is_counted_and_spoils_nothing(strategy):
    env = Faulty(faulty=True)
    settings = config(reset_strategy=strategy, logging_level=LoggingLevel.ALL)
    state, metrics = run(env, settings, iterations=3)
    assert int(metrics["skipped_updates"]) == 0
    assert 0 < int(metrics["invalid_steps"]) < 32
    assert np.isfinite(metrics["losses/total"])
    assert all(
        np.all(np.isfinite(leaf))
        for leaf in jax.tree.leaves(eqx.filter(state.network, eqx.is_inexact_array))
    )
    # The network sees zeros in place of what is not finite, exactly where a step is invalid.
    n = network()
    env_state = jax.vmap(env.reset)(jax.random.split(KEY, 8))
    bad = ~np.isfinite(np.asarray(env_state.obs)).all(axis=1)
    assert bad.any()
    _, _, seen = unroll_env(env, env_state, n, n.initialize_state(8, key=KEY), 1, KEY)
    np.testing.assert_array_equal(seen.valid[0], ~bad)
    np.testing.assert_array_equal(seen.obs[0][bad], 0.0)
    np.testing.assert_array_equal(seen.obs[0][~bad], np.asarray(env_state.obs)[~bad])


@final
class WeakGain(nets.StatelessModule):
    """A parameter with a weak type, as a Python number makes it."""

    gain: jax.Array

    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(x * self.gain, state)


def test_weakly_typed_parameters_do_not_recompile():
    module = nets.Sequential([WeakGain(jnp.asarray(1.0)), network()])
    assert module[0].gain.weak_type
    settings = config()
    traces = []

    @jax.jit
    def step(state):
        traces.append(1)
        return ppo_step(Pendulum(), state, settings)[0]

    state = jax.jit(lambda k: new_training_state(Pendulum(), module, settings, k))(KEY)
    for _ in range(3):
        state = step(state)
    assert len(traces) == 1
    assert not state.network[0].gain.weak_type


def test_a_state_made_eagerly_can_be_donated():
    settings = config(reset_strategy=CachedReset())
    state = new_training_state(Faulty(), network(), settings, KEY)
    step = jax.jit(lambda s: ppo_step(Faulty(), s, settings)[0], donate_argnums=0)
    state = step(state)
    assert int(state.counts.iterations) == 1


@final
class Start(nets.StatefulModule):
    """A carry that a reset sets to 3, and `initialize_state` (against the contract) to 7."""

    inner: nets.StatefulModule

    def __call__(self, state, x, rollout_extras=None):
        out = self.inner(state["inner"], x, rollout_extras)
        next_state = {"inner": out.next_state, "count": state["count"] + jnp.int32(1)}
        return out._replace(next_state=next_state, metrics={"count": state["count"]})

    def initialize_state(self, batch_size, *, key):
        inner = self.inner.initialize_state(batch_size, key=key)
        return {"inner": inner, "count": jnp.full(batch_size, 7, jnp.int32)}

    def reset_state(self, prev_state):
        inner = self.inner.reset_state(prev_state["inner"])
        return {"inner": inner, "count": jnp.full_like(prev_state["count"], 3)}


def test_evaluation_starts_from_the_carry_that_training_starts_from():
    module = Start(nets.make_mlp_actor_critic(3, 1, [4], [4], normalize_obs=False, key=KEY))
    level = LoggingLevel.NETWORK_METRICS
    result = eval_rollout(Faulty(), module, 4, 1, KEY, logging_level=level)
    assert result.metrics["net"]["count"].tolist() == [3.0] * 4


@final
class Column:
    """`done` of shape `(1,)`."""

    def reset(self, key):
        return Faulty().reset(key).replace(done=jnp.zeros(1, bool))

    def step(self, state, action):
        return Faulty().step(state, action).replace(done=jnp.ones(1, bool))


def test_records_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"`done` must be one scalar per environment"):
        run(Column(), config())

    settings = config()
    state = new_training_state(Faulty(), network(), settings, KEY)
    with pytest.raises(ValueError, match="optimizer does not fit the training state"):
        ppo_step(Faulty(), state, settings, optax.sgd(0.1))
    wider = nets.make_mlp_actor_critic(3, 1, [9], [8], key=KEY)
    with pytest.raises(ValueError, match="array shapes"):
        state.with_network(wider)
    moved = jax.tree.map(lambda x: x + 1.0 if eqx.is_inexact_array(x) else x, network())
    np.testing.assert_array_equal(
        state.with_network(moved).network[1].value[0].bias, moved[1].value[0].bias
    )


def test_a_leaf_that_is_no_array_is_named():
    class Named(Pendulum):
        def reset(self, key):
            return super().reset(key).replace(info={"name": "pendulum"})

    with pytest.raises(TypeError, match=r"`\.info\['name'\]` .* is a `str`"):
        run(Named(), config())


def test_cached_resets_of_a_rollout_return_to_the_states_it_was_given():
    env, n = Faulty(), network()  # every episode is one step long
    env_state = jax.vmap(env.reset)(jax.random.split(KEY, 4))
    state = n.initialize_state(4, key=KEY)
    _, last, seen = unroll_env(
        env, env_state, n, state, 3, jax.random.key(1), reset_strategy=CachedReset()
    )
    np.testing.assert_array_equal(seen.obs, np.stack([env_state.obs] * 3))
    np.testing.assert_array_equal(last.obs, env_state.obs)


@pytest.mark.parametrize("field", ["size", "refill"])
@pytest.mark.parametrize("value", [4.5, True, 0])
def test_a_pool_of_no_whole_size_is_refused(field, value):
    with pytest.raises(ValueError, match=f"`PooledReset.{field}` must be at least 1 and whole"):
        PooledReset(**{field: value})
