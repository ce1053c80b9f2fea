"""The convention of `eqx_ppo.envs._protocol`, for every environment of the library."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo import envs
from tests.envs.registry import CASES

every_env = pytest.mark.parametrize(("env", "action"), list(CASES.values()), ids=list(CASES))
own_env = pytest.mark.parametrize(
    "env", [env for env, _ in CASES.values() if type(env).__module__.startswith("eqx_ppo")][:8]
)


def assert_equal(actual, expected, **tolerance):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_allclose(
            np.asarray(left, np.float64), np.asarray(right, np.float64), **tolerance
        )


@every_env
def test_step_returns_what_reset_returns(env, action):
    reset = jax.eval_shape(env.reset, jax.random.key(0))
    stepped = jax.eval_shape(env.step, reset, action)
    assert jax.tree.structure(reset) == jax.tree.structure(stepped)
    for first, second in zip(jax.tree.leaves(reset), jax.tree.leaves(stepped), strict=True):
        assert (first.shape, first.dtype) == (second.shape, second.dtype)
        assert not first.weak_type
        assert not second.weak_type


@every_env
def test_protocols(env, action):
    assert isinstance(env, envs.Env)
    state = env.reset(jax.random.key(0))
    assert isinstance(state, envs.EnvState)
    assert jnp.shape(state.done) == ()
    assert not bool(envs.read_done(state))
    assert not bool(envs.read_truncation(state))
    sizes = jax.tree.map(lambda leaf: leaf.shape[-1], state.obs)
    assert env.observation_size == sizes
    assert env.action_size == jax.tree.map(lambda leaf: leaf.shape[-1], action)


@every_env
def test_jit_equals_eager(env, action):
    eager = env.reset(jax.random.key(1))
    compiled = jax.jit(env.reset)(jax.random.key(1))
    step = jax.jit(env.step)
    for _ in range(6):
        assert_equal(compiled, eager, rtol=1e-5, atol=1e-6)
        eager, compiled = env.step(eager, action), step(compiled, action)


@every_env
def test_vmap_equals_a_loop(env, action):
    keys = jax.random.split(jax.random.key(2), 5)
    batch = jax.jit(jax.vmap(env.reset))(keys)
    singles = [jax.jit(env.reset)(key) for key in keys]
    factors = jnp.linspace(-1.0, 1.0, 5)
    actions = [jax.tree.map(lambda leaf, f=f: leaf * f, action) for f in factors]
    step = jax.jit(jax.vmap(env.step))
    for _ in range(6):
        assert_equal(batch, jax.tree.map(lambda *x: jnp.stack(x), *singles), atol=1e-5)
        singles = [env.step(*pair) for pair in zip(singles, actions, strict=True)]
        batch = step(batch, jax.tree.map(lambda *x: jnp.stack(x), *actions))


@every_env
def test_pure(env, action):
    state = env.reset(jax.random.key(3))
    assert_equal(env.reset(jax.random.key(3)), state)
    before = jax.tree.map(np.array, state)
    first = env.step(state, action)
    assert_equal(jax.tree.map(np.array, state), before)
    assert_equal(env.step(state, action), first)


@every_env
def test_state_can_be_donated(env, action):
    keys = jax.random.split(jax.random.key(4), 3)
    state = jax.jit(jax.vmap(env.reset))(keys)
    step = jax.jit(jax.vmap(env.step, in_axes=(0, None)), donate_argnums=0)
    expected = jax.jit(jax.vmap(env.step, in_axes=(0, None)))(state, action)
    expected = jax.tree.map(np.array, expected)  # some leaves are passed through
    assert_equal(step(state, action), expected, rtol=1e-5, atol=1e-6)


@own_env
def test_keys_and_actions_are_checked(env):
    assert_equal(env.reset(jax.random.PRNGKey(0)), env.reset(jax.random.key(0)))
    with pytest.raises(TypeError, match=r"jax\.random\.key\(seed\)"):
        env.reset(0)
    state = env.reset(jax.random.key(0))
    for wrong in (jnp.zeros(()), jnp.zeros(2), jnp.zeros((1, 1)), jnp.zeros(1, jnp.int32)):
        with pytest.raises(Exception, match="action"):
            env.step(state, wrong)
    half = env.step(state, jnp.zeros(1, jnp.bfloat16))
    assert half.reward.dtype == jnp.float32
    assert_equal(half, env.step(state, jnp.zeros(1)))


@every_env
def test_told_apart_by_identity(env, action):
    equal = [other for other, _ in CASES.values() if other == env]
    assert equal == [env]
    assert {env: "found"}[env] == "found"
    with pytest.raises(AttributeError):  # FrozenInstanceError is one
        env.lengths = 3
