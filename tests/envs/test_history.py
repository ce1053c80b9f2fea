"""Frame stacks and delayed observations."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo.algorithms import unroll_env
from eqx_ppo.envs import (
    EpisodeWrapper,
    FrameStackWrapper,
    ObservationDelayWrapper,
    Pendulum,
    PooledReset,
    State,
)
from tests.helpers.envs import DictEnv
from tests.helpers.networks import CountingPolicy

ACTION = jnp.zeros(1)


@dataclasses.dataclass(frozen=True, eq=False)
class Clock:
    """The observation is the step, from `first` on, in leaves of every shape and dtype."""

    first: int = 1
    length: int = 1000

    def reset(self, key):
        return self._state(jnp.full((), self.first, jnp.int32))

    def step(self, state, action):
        # From the observation, so that it has to be the environment's own.
        return self._state(state.obs["int"] + jnp.int32(1))

    def stagger(self, state, key):
        return self._state(state.obs["int"] + jnp.int32(100))

    def _state(self, time):
        obs = {
            "scalar": time.astype(jnp.float32),
            "int": time,
            "half": jnp.stack([time, -time]).astype(jnp.bfloat16),
            "image": jnp.arange(6, dtype=jnp.uint8).reshape(1, 2, 3) + time.astype(jnp.uint8),
            "odd": (time % 2 == 1)[None],
        }
        done = time >= self.first + self.length
        return State(obs, time.astype(jnp.float32), done, {}, {})


def clock_obs(time):
    return {
        "scalar": np.float32(time),
        "int": np.int32(time),
        "half": np.array([time, -time]),
        "image": np.arange(6).reshape(1, 2, 3) + time,
        "odd": np.array([time % 2 == 1]),
    }


def assert_observation(actual, expected, like):
    assert actual.keys() == expected.keys()
    for name, leaf in actual.items():
        assert leaf.dtype == like[name].dtype
        np.testing.assert_array_equal(np.asarray(leaf, np.float32), expected[name], err_msg=name)


def observations(env, n_steps, start=None):
    state = env.reset(jax.random.key(0)) if start is None else start
    step, seen = jax.jit(env.step), [state]
    for _ in range(n_steps):
        seen.append(step(seen[-1], ACTION))
    return seen


# --- Frames ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n_frames", [1, 2, 4])
def test_frames_against_a_list(n_frames):
    env = FrameStackWrapper(Clock(), n_frames)
    plain = Clock().reset(jax.random.key(0)).obs
    for time, state in enumerate(observations(env, 5), start=1):
        times = [max(1, time - n_frames + 1 + index) for index in range(n_frames)]
        frames = [clock_obs(earlier) for earlier in times]
        expected = {
            name: np.concatenate([np.atleast_1d(frame[name]) for frame in frames], axis=-1)
            for name in plain
        }
        assert_observation(state.obs, expected, plain)
        assert float(state.reward) == time


def test_frames_of_a_sized_environment():
    class Sized(DictEnv):
        observation_size = {"proprio": (3,), "goal": 2}  # noqa: RUF012

    assert FrameStackWrapper(Pendulum(), 3).observation_size == 9
    assert FrameStackWrapper(Sized(), 2).observation_size == {"proprio": (6,), "goal": 4}
    env = FrameStackWrapper(DictEnv(), 2)
    obs = jax.eval_shape(env.reset, jax.random.key(0)).obs
    assert env.observation_size == {name: leaf.shape[-1] for name, leaf in obs.items()}
    with pytest.raises(AttributeError, match="observation_size"):
        _ = FrameStackWrapper(Clock(), 2).observation_size


@dataclasses.dataclass(frozen=True, eq=False)
class Sized:
    """An observation of these shapes, and the size that the environment says it has."""

    shapes: object
    observation_size: object

    def reset(self, key):
        def is_shape(part):
            return isinstance(part, tuple) and all(isinstance(n, int) for n in part)

        obs = jax.tree.map(jnp.zeros, self.shapes, is_leaf=is_shape)
        return State(obs, jnp.zeros(()), jnp.array(False), {}, {})

    def step(self, state, action):
        return state


@pytest.mark.parametrize(
    ("shapes", "size", "expected"),
    [
        ((3,), (3,), (6,)),
        ((4, 2), (4, 2), (4, 4)),  # a shape
        (((4,), (2,)), (4, 2), (8, 4)),  # one number for each leaf
        ([(4,), (2,)], [4, 2], (8, 4)),
        (((4, 3), {"a": (2,)}), ((4, 3), {"a": (2,)}), ((4, 6), {"a": (4,)})),
        ({"b": (4, 2), "c": ()}, {"b": (4, 2), "c": ()}, {"b": (4, 4), "c": (2,)}),
    ],
)
def test_sizes_of_frames(shapes, size, expected):
    env = FrameStackWrapper(Sized(shapes, size), 2)
    assert env.observation_size == expected
    frames = jax.tree.leaves(jax.eval_shape(env.reset, jax.random.key(0)).obs)
    last = [leaf.shape[-1] for leaf in frames]
    plain = jax.tree.leaves(jax.eval_shape(env.env.reset, jax.random.key(0)).obs)
    assert last == [2 * leaf.shape[-1] if leaf.shape else 2 for leaf in plain]


@pytest.mark.parametrize(
    ("shapes", "size"), [((3,), {"a": 3}), ({"a": (3,)}, {"b": 3}), (((4,), (2,)), (4,))]
)
def test_sizes_of_something_else(shapes, size):
    with pytest.raises(ValueError, match="does not describe its observations"):
        _ = FrameStackWrapper(Sized(shapes, size), 2).observation_size


# --- Delay ----------------------------------------------------------------------------------


@pytest.mark.parametrize("initial_value", [None, 0, 1])
@pytest.mark.parametrize("delay", [1, 2, 3])
def test_delay_against_a_list(delay, initial_value):
    env = ObservationDelayWrapper(Clock(), delay, initial_value)
    plain = Clock().reset(jax.random.key(0)).obs
    for time, state in enumerate(observations(env, 5), start=1):
        if time <= delay and initial_value is not None:
            expected = {
                name: np.full(leaf.shape, initial_value) for name, leaf in clock_obs(1).items()
            }
        else:
            expected = clock_obs(max(1, time - delay))
        assert_observation(state.obs, expected, plain)
        assert float(state.reward) == time


def test_delay_across_a_reset():
    """The input 1, 2, 3 in an episode and the input from 4 on in the next (case C7)."""
    first, second = (
        ObservationDelayWrapper(Clock(start, 3), 2, initial_value=0.0) for start in (1, 4)
    )
    seen = [*observations(first, 2), *observations(second, 2)]
    assert [int(state.obs["scalar"]) for state in seen] == [0, 0, 1, 0, 0, 4]
    # Stepping twice from one state pushes once in each.
    state = seen[0]
    again = [first.step(state, ACTION) for _ in range(2)]
    assert [int(stepped.obs["scalar"]) for stepped in again] == [0, 0]
    assert int(first.step(again[1], ACTION).obs["scalar"]) == 1


@pytest.mark.parametrize("name", ["int", "odd", "image"])
@pytest.mark.parametrize("value", [0.5, 300.0])
def test_an_initial_value_that_a_dtype_cannot_hold(name, value):
    class OneLeaf(Clock):
        def _state(self, time):
            state = super()._state(time)
            return state.replace(obs={name: state.obs[name]})

    env = ObservationDelayWrapper(OneLeaf(), 2, value)
    if name == "int" and value == 300.0:
        assert int(env.reset(jax.random.key(0)).obs["int"]) == 300
        return
    with pytest.raises(ValueError, match=f"cannot show {value}.*dtype"):
        env.reset(jax.random.key(0))


# --- Both -----------------------------------------------------------------------------------

BOTH = {
    "frames": lambda env: FrameStackWrapper(env, 3),
    "delay": lambda env: ObservationDelayWrapper(env, 2),
}
both = pytest.mark.parametrize("wrap", BOTH.values(), ids=BOTH)


@both
def test_in_a_rollout_nothing_of_the_last_episode_is_seen(wrap):
    """Episodes of four steps: each one shows the same as the first."""
    env = wrap(Clock(1, 4))
    state = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 2))
    _, last, transitions = jax.jit(
        lambda state: unroll_env(
            env,
            state,
            CountingPolicy(),
            jnp.zeros(2),
            8,
            jax.random.key(1),
            reset_strategy=PooledReset(),
        )
    )(state)
    assert transitions.done[:, 0].tolist() == ([False] * 3 + [True]) * 2
    expected = [seen.obs for seen in observations(env, 3)] * 2
    for name, leaf in transitions.obs.items():
        frames = np.stack([np.asarray(obs[name], np.float32) for obs in expected])
        np.testing.assert_array_equal(np.asarray(leaf[:, 1], np.float32), frames)
    assert jax.tree.structure(last) == jax.tree.structure(state)


@both
def test_the_wrapped_environment_gets_its_own_state_back(wrap):
    """Also through another wrapper of the same kind, whose entries have the same names."""
    plain = observations(Clock(), 5)
    nested = observations(wrap(EpisodeWrapper(wrap(Clock()), 4)), 5)
    assert [float(state.reward) for state in nested] == [float(state.reward) for state in plain]
    assert [int(state.info["episode_steps"]) for state in nested] == list(range(6))
    assert [bool(state.info["truncation"]) for state in nested] == [False] * 4 + [True] * 2


def test_delays_add_up():
    env = ObservationDelayWrapper(ObservationDelayWrapper(Clock(), 1), 2)
    shown = [int(state.obs["int"]) for state in observations(env, 6)]
    assert shown == [1, 1, 1, 1, 2, 3, 4]


@both
def test_staggered_states_start_anew(wrap):
    env = wrap(Clock())
    key = jax.random.key(0)
    staggered = env.stagger(env.reset(key), key)
    expected = wrap(Clock(101)).reset(key)
    jax.tree.map(np.testing.assert_array_equal, staggered, expected)


@both
@pytest.mark.parametrize(
    ("count", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), (2.0, TypeError)]
)
def test_bad_counts(wrap, count, error):
    kind = type(wrap(Clock()))
    with pytest.raises(error, match=r"`(n_frames|delay)` must be"):
        kind(Clock(), count)


@pytest.mark.parametrize(
    ("value", "error"), [("0", TypeError), (True, TypeError), (float("nan"), ValueError)]
)
def test_bad_initial_values(value, error):
    with pytest.raises(error, match="`initial_value` must be"):
        ObservationDelayWrapper(Clock(), 2, value)
