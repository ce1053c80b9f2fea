"""Parameters that are drawn for each episode."""

import copy
import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo.algorithms import unroll_env
from eqx_ppo.envs import (
    CachedReset,
    DomainRandomizationWrapper,
    EpisodeWrapper,
    FreshReset,
    Pendulum,
    PooledReset,
    RewardScalingWrapper,
    State,
    Wrapper,
    load_playground,
)
from tests.algorithms.common import small_config, train
from tests.helpers.envs import Spring, SpringParameters
from tests.helpers.networks import CountingPolicy, heads

N_ENVS = 4


def other_mass(key, parameters):
    mass = parameters.mass * jax.random.uniform(key, (), jnp.float32, 0.5, 2.0)
    return parameters._replace(mass=mass)


def spring(randomize=other_mass, **parameters):
    env = Spring(SpringParameters(table=jnp.zeros(3, jnp.float32), **parameters))
    return DomainRandomizationWrapper(env, randomize, "parameters")


def run(env, key, actions):
    state = env.reset(key)
    states, step = [state], jax.jit(env.step)
    for action in actions:
        states.append(step(states[-1], action))
    return states


def observations(states):
    return np.stack([np.asarray(state.obs) for state in states])


ACTIONS = list(jnp.linspace(-1.0, 1.0, 4)[:, None])


def test_an_episode_is_that_of_an_environment_built_with_the_parameters():
    env = spring()
    key = jax.random.key(0)
    draw_key, reset_key = jax.random.split(key)
    parameters = other_mass(draw_key, env.env.parameters)
    assert float(parameters.mass) != 1.0
    expected = run(Spring(parameters), reset_key, ACTIONS)
    actual = run(env, key, ACTIONS)
    np.testing.assert_allclose(observations(actual), observations(expected), rtol=1e-6)
    other = run(env, jax.random.key(1), ACTIONS)
    assert float(other[0].obs[2]) != float(actual[0].obs[2])


def test_only_what_varies_is_stored():
    env = spring()
    state = env.reset(jax.random.key(0))
    drawn = state.info["randomized"]
    assert drawn.keys() == {".mass"}
    assert drawn[".mass"].shape == ()
    assert drawn[".mass"].dtype == jnp.float32
    assert env.step(state, jnp.zeros(1)).info["randomized"] == drawn
    parameters = env.parameters(state)
    assert parameters.mass == drawn[".mass"]
    assert parameters.stiffness == 4.0
    assert parameters.table is env.env.parameters.table


def test_the_wrapped_environment_stays_as_it_is():
    env = spring()
    before = dict(vars(env.env))
    jax.jit(env.reset)(jax.random.key(0))
    assert dict(vars(env.env)) == before
    assert float(env.env.reset(jax.random.key(0)).obs[2]) == 1.0


@pytest.mark.parametrize(
    ("strategy", "outside"),
    [(FreshReset(), False), (CachedReset(), False), (PooledReset(), False), (PooledReset(), True)],
    ids=str,
)
def test_in_a_rollout(strategy, outside):
    """Each step is taken with the mass of its episode, which is drawn anew as resets are."""
    if outside:
        inner = RewardScalingWrapper(EpisodeWrapper(Spring(), 4), 1.0)
        env = DomainRandomizationWrapper(inner, other_mass, "parameters")
    else:
        env = EpisodeWrapper(DomainRandomizationWrapper(Spring(), other_mass, "parameters"), 4)
    start = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), N_ENVS))
    _, _, transitions = jax.jit(
        lambda state: unroll_env(
            env,
            state,
            CountingPolicy(),
            jnp.zeros(N_ENVS),
            24,
            jax.random.key(1),
            reset_strategy=strategy,
        )
    )(start)
    position, velocity, mass = np.moveaxis(np.asarray(transitions.obs), -1, 0)
    goes_on = ~np.asarray(transitions.done)[:-1]
    np.testing.assert_array_equal(mass[1:][goes_on], mass[:-1][goes_on])
    faster = velocity + 0.1 * (0.0 - 4.0 * position) / mass
    np.testing.assert_allclose(velocity[1:][goes_on], faster[:-1][goes_on], rtol=1e-5, atol=1e-6)
    n_episodes = N_ENVS + (~goes_on).sum()
    expected = N_ENVS if isinstance(strategy, CachedReset) else n_episodes
    assert len(np.unique(mass)) == expected
    assert ((mass > 0.5) & (mass < 2.0)).all()


def test_training():
    """Under minibatches and statistics; the drawn mass is that of the environment at the end."""
    env = EpisodeWrapper(spring(), 4)
    state, _ = train(env, heads(3, 1, jax.random.key(0)), small_config(), jax.random.key(1), 2)
    env_state = state.rollout_state.env_state
    np.testing.assert_array_equal(env_state.info["randomized"][".mass"], env_state.obs[:, 2])
    assert len(np.unique(env_state.obs[:, 2])) == 4


def test_one_inside_another():
    def other_stiffness(key, parameters):
        return parameters._replace(stiffness=2.0 + jax.random.uniform(key))

    env = DomainRandomizationWrapper(spring(), other_stiffness, "parameters")
    state = env.reset(jax.random.key(0))
    assert state.info["randomized"].keys() == {".stiffness"}
    inner_key = jax.random.split(jax.random.key(0))[1]
    expected = Spring(
        env.env.parameters(env.env.reset(inner_key))._replace(
            stiffness=state.info["randomized"][".stiffness"]
        )
    )
    states = run(env, jax.random.key(0), ACTIONS)
    reference = run(expected, jax.random.split(inner_key)[1], ACTIONS)
    np.testing.assert_allclose(observations(states), observations(reference), rtol=1e-6)
    assert states[-1].info["randomized"] == state.info["randomized"]


class SpringModule(eqx.Module):
    """The same with parameters in fields of an Equinox module."""

    gravity: jax.Array
    unused: jax.Array

    def reset(self, key):
        return State(jnp.zeros(1), jnp.zeros(()), jnp.array(False), {}, {})

    def step(self, state, action):
        return state.replace(obs=state.obs + self.gravity)


def test_an_attribute_that_is_one_array():
    env = SpringModule(jnp.ones(()), jnp.zeros(5))
    wrapped = DomainRandomizationWrapper(env, lambda key, g: g * jax.random.uniform(key), "gravity")
    state = wrapped.step(wrapped.reset(jax.random.key(0)), jnp.zeros(1))
    assert state.info["randomized"].keys() == {""}
    assert float(state.obs[0]) == float(state.info["randomized"][""])
    assert float(env.gravity) == 1.0


class Gravity:
    """Its step goes through a function that is stored when it is built."""

    def __init__(self, make=lambda env: env.fall):
        self.gravity = jnp.ones(())
        self.function = make(self)
        self.unused = jax.jit(self.fall)

    def reset(self, key):
        return State(jnp.zeros(1), jnp.zeros(()), jnp.array(False), {}, {})

    def step(self, state, action):
        return self.function(state)

    def fall(self, state):
        return state.replace(obs=state.obs + self.gravity)


class StoresTheStep(Wrapper):
    """Stores a method of what is inside of it."""

    def __init__(self, env, make):
        super().__init__(env)
        object.__setattr__(self, "inner_step", make(env.step))

    def reset(self, key):
        return self.env.reset(key)

    def step(self, state, action):
        return self.inner_step(state, action)


def drawn_and_obs(env):
    wrapped = DomainRandomizationWrapper(env, lambda key, g: g * jax.random.uniform(key), "gravity")
    state = wrapped.step(wrapped.reset(jax.random.key(0)), jnp.zeros(1))
    return float(state.info["randomized"][""]), float(state.obs[0])


@pytest.mark.parametrize(
    "env",
    [
        Gravity(),
        Gravity(lambda env: functools.partial(env.fall)),
        Gravity(lambda env: functools.partial(functools.partial(Gravity.fall, env))),
        Gravity(lambda env: functools.partial(lambda state, env: env.fall(state), env=env)),
        StoresTheStep(Gravity(), lambda step: step),
        StoresTheStep(Gravity(), functools.partial),
    ],
)
def test_stored_methods_see_the_parameters(env):
    drawn, obs = drawn_and_obs(env)
    assert drawn == obs != 1.0


@pytest.mark.parametrize(
    "env",
    [
        Gravity(lambda env: jax.jit(env.fall)),
        Gravity(lambda env: eqx.filter_jit(env.fall)),
        Gravity(lambda env: jax.jit(functools.partial(env.fall))),
        Gravity(lambda env: functools.partial(jax.jit(env.fall))),
        Gravity(lambda env: lambda state: env.fall(env.fall(state))),
        Gravity(lambda env: jax.jit(lambda state: env.fall(env.fall(state)))),
        StoresTheStep(Gravity(), jax.jit),
    ],
)
def test_stored_functions_that_cannot_see_the_parameters(env):
    with pytest.raises(TypeError, match=r"`(function|inner_step)` of `\w+`.*ordinary method"):
        drawn_and_obs(env)


class GravityTuple(NamedTuple):
    gravity: jax.Array

    reset = Gravity.reset
    step = Gravity.step


def test_an_environment_without_attributes():
    for env in (GravityTuple(jnp.ones(())), EpisodeWrapper(GravityTuple(jnp.ones(())), 3)):
        with pytest.raises(TypeError, match=r"`GravityTuple` is a NamedTuple.*frozen dataclass"):
            drawn_and_obs(env)


# --- What is refused ------------------------------------------------------------------------


def unchanged(key, parameters):
    parameters._replace(mass=2.0)
    return parameters


@pytest.mark.parametrize(
    ("randomize", "error", "message"),
    [
        (unchanged, ValueError, r"unchanged.*not changed in place"),
        (lambda key, p: None, TypeError, r"`SpringParameters`, but returned a `NoneType`, which"),
        (lambda key, p: p._replace(table=None), TypeError, r"lacks \['\.table'\] and adds nothing"),
        (
            lambda key, p: p._replace(mass=jnp.ones(2)),
            ValueError,
            r"`\.mass` was float32\[\] and became float32\[2\]",
        ),
        (
            lambda key, p: p._replace(mass=jnp.array(3)),
            ValueError,
            r"`\.mass` was float32\[\] and became int32\[\]",
        ),
    ],
)
def test_what_randomize_must_return(randomize, error, message):
    with pytest.raises(error, match=message):
        spring(randomize).reset(jax.random.key(0))


def test_parameters_that_are_no_arrays():
    class Named:
        model = "ball"

        def __init__(self):
            self.model = "ball"

        def reset(self, key):
            return None

        def step(self, state, action):
            return None

    env = DomainRandomizationWrapper(Named(), lambda key, model: "cube", "model")
    with pytest.raises(TypeError, match=r"changed ``, which is a `str`"):
        env.reset(jax.random.key(0))


@pytest.mark.parametrize("attribute", ["_mjx_model", "observation_size", "step"])
def test_attributes_that_cannot_be_replaced(attribute):
    message = rf"`Spring` has no attribute `{attribute}` of its own.*\['observe', 'parameters'\]"
    for env in (Spring(), EpisodeWrapper(Spring(), 3)):
        with pytest.raises(AttributeError, match=message):
            DomainRandomizationWrapper(env, other_mass, attribute)


def test_randomize_is_a_function():
    with pytest.raises(TypeError, match="`randomize` must be a function"):
        DomainRandomizationWrapper(Pendulum(), 1.5)


# --- MuJoCo Playground ----------------------------------------------------------------------


def heavier(key, model):
    scale = jax.random.uniform(key, (), minval=0.5, maxval=2.0)
    return model.replace(body_mass=model.body_mass * scale, actuator_gear=model.actuator_gear)


def episode(env, key, actions):
    def step(state, action):
        state = env.step(state, action)
        return state, state.obs

    start = env.reset(key)
    return start.info, jax.lax.scan(step, start, actions)[1]


@pytest.mark.playground
@pytest.mark.slow
def test_the_model_of_a_playground_environment():
    """Two environments differ under equal actions, and are those with models set by hand."""
    pytest.importorskip("mujoco_playground")
    env = load_playground("CartpoleBalance")
    model = env.mjx_model
    wrapped = DomainRandomizationWrapper(env, heavier)
    actions = jnp.array([[1.0], [-0.5], [0.8]])

    def by_hand(key, actions):
        other = copy.copy(env)
        draw_key, reset_key = jax.random.split(key)
        other._mjx_model = heavier(draw_key, model)
        return episode(other, reset_key, actions)[1]

    keys = jax.random.split(jax.random.key(0), 2)
    randomized = jax.jit(jax.vmap(lambda key: episode(wrapped, key, actions)))
    info, obs = randomized(keys)
    assert info["randomized"].keys() == {".body_mass"}
    assert abs(float(obs[0, -1, 0] - obs[1, -1, 0])) > 1e-3
    expected = jax.jit(jax.vmap(lambda key: by_hand(key, actions)))(keys)
    np.testing.assert_allclose(obs, expected, rtol=1e-4, atol=1e-5)
    assert env.mjx_model is model
