import collections
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo import envs


class TupleState(NamedTuple):
    obs: object = 0.0
    reward: object = 0.0
    done: object = False
    info: object = {}
    metrics: object = {}


def make_state(done, **info):
    return envs.State(jnp.zeros(2), jnp.zeros(()), done, info, {})


@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.int32, jnp.uint8, jnp.float32, jnp.bfloat16])
def test_read_done_of_any_dtype(dtype):
    state = make_state(jnp.array([0, 1, 0, 1]).astype(dtype))
    done = envs.read_done(state)
    assert done.dtype == jnp.bool_
    np.testing.assert_array_equal(done, [False, True, False, True])


def test_read_done_means_nonzero():
    np.testing.assert_array_equal(
        envs.read_done(make_state(jnp.array([0.0, 0.5, -1.0, 2.0]))), [False, True, True, True]
    )


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (4, 2, 3)])
def test_leading_axes(shape):
    state = make_state(jnp.ones(shape), truncation=jnp.zeros(shape, jnp.int32))
    terminated, truncated = envs.episode_end(state)
    assert terminated.shape == truncated.shape == shape
    assert bool(jnp.all(terminated))
    assert not bool(jnp.any(truncated))


def test_read_truncation_takes_either_flag_and_both():
    done = jnp.ones(4)
    first = jnp.array([0.0, 0.0, 1.0, 1.0])
    second = jnp.array([False, True, False, True])
    read = envs.read_truncation
    np.testing.assert_array_equal(read(make_state(done)), [False] * 4)
    np.testing.assert_array_equal(read(make_state(done, other=first)), [False] * 4)
    np.testing.assert_array_equal(read(make_state(done, truncation=first)), first > 0)
    np.testing.assert_array_equal(read(make_state(done, truncated=second)), second)
    both = jax.jit(read)(make_state(done, truncation=first, truncated=second))
    np.testing.assert_array_equal(both, [False, True, True, True])
    assert both.dtype == jnp.bool_


@pytest.mark.parametrize(("done", "flag"), [*itertools.product([False, True], repeat=2)])
@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.int32, jnp.float32])
def test_episode_end_truth_table(done, flag, dtype):
    state = make_state(jnp.array(done).astype(dtype), truncated=jnp.array(flag).astype(dtype))
    terminated, truncated = jax.jit(envs.episode_end)(state)
    assert terminated.dtype == truncated.dtype == jnp.bool_
    assert bool(terminated) == (done and not flag)
    assert bool(truncated) == flag
    assert bool(terminated | truncated) == (done or flag)


def test_other_kinds_of_state_and_leaf():
    assert bool(envs.read_done(TupleState(done=1)))
    assert bool(envs.read_truncation(TupleState(done=True, info={"truncated": 1.0})))
    state = TupleState(done=np.array([True, False]), info={"truncation": np.array([1, 0])})
    np.testing.assert_array_equal(envs.episode_end(state), [[False, False], [True, False]])


@pytest.mark.parametrize("name", ["truncation", "truncated"])
def test_flag_of_another_shape_is_refused(name):
    state = make_state(jnp.zeros(3), **{name: jnp.zeros((3, 1))})
    with pytest.raises(ValueError, match=rf'info\["{name}"\].*\(3,\).*\(3, 1\)'):
        envs.read_truncation(state)
    # A scalar flag would broadcast silently.
    with pytest.raises(ValueError, match=name):
        envs.episode_end(make_state(jnp.zeros(3), **{name: jnp.zeros(())}))


def test_an_object_that_is_no_state_is_refused():
    with pytest.raises(Exception, match="EnvState"):
        envs.read_done(3)


def test_supports_stagger():
    pendulum = envs.Pendulum()
    assert not isinstance(pendulum, envs.SupportsStagger)
    assert isinstance(envs.EpisodeWrapper(pendulum, 3), envs.SupportsStagger)


def test_state_replace():
    state = make_state(jnp.array(False))
    changed = state.replace(done=jnp.array(True), reward=jnp.ones(()))
    assert isinstance(changed, envs.State)
    assert (bool(state.done), bool(changed.done)) == (False, True)
    assert (float(state.reward), float(changed.reward)) == (0.0, 1.0)
    with pytest.raises(TypeError, match="finished"):
        state.replace(finished=True)


class OrderedInfo:
    """Its `info` is a mapping of another kind, and stays one."""

    def reset(self, key):
        info = collections.OrderedDict(level=jnp.zeros(()))
        return envs.State(jnp.zeros(1), jnp.zeros(()), jnp.array(False), info, {})

    def step(self, state, action):
        return state.replace(info=collections.OrderedDict(state.info))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda env: env,
        lambda env: envs.EpisodeWrapper(env, 3),
        lambda env: envs.KeepInfoWrapper(env, ("level",)),
        lambda env: envs.FrameStackWrapper(env, 2),
        lambda env: envs.ActionRepeatWrapper(env, 2, sum_metrics=True),
    ],
)
def test_infos_that_are_no_plain_dict(wrap):
    """They are refused with and without wrappers."""
    with pytest.raises(TypeError, match=r"plain `dict`, but is a `OrderedDict`.*`dict\(info\)`"):
        envs.env_spec(wrap(OrderedInfo()), lambda obs: jnp.zeros(1))
