import copy
import dataclasses
import functools
import itertools
import pickle
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo import envs
from tests.helpers.envs import DictEnv, ScriptedEnv

ACTION = jnp.zeros(1)


class TupleState(NamedTuple):
    obs: jax.Array
    reward: jax.Array
    done: jax.Array
    info: dict
    metrics: dict


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class RecordState:
    obs: jax.Array
    reward: jax.Array
    done: jax.Array
    info: dict
    metrics: dict


@functools.cache
def flax_class():
    struct = pytest.importorskip("flax.struct")
    annotations = dict.fromkeys(TupleState._fields, object)
    return struct.dataclass(type("FlaxState", (), {"__annotations__": annotations}))


def flax_state(*fields):
    return flax_class()(*fields)


class CarriesInfo:
    """Keeps what it needs in `info` and records what it gets back; eager use only.

    `info["truncation"]` is set at the reset and afterwards only carried along.
    """

    def __init__(self, make_state=TupleState, flags=("truncation",), carried=0):
        self.make_state = make_state
        self.flags = flags
        self.carried = carried
        self.seen = []

    def reset(self, key):
        info = {"count": jnp.array(10, jnp.int32)}
        info.update({name: jnp.array(self.carried, jnp.float32) for name in self.flags})
        return self.make_state(jnp.zeros(1), jnp.zeros(()), jnp.zeros(()), info, {})

    def step(self, state, action):
        self.seen.append({name: float(leaf) for name, leaf in state.info.items()})
        info = {**state.info, "count": state.info["count"] + jnp.int32(1)}
        return self.make_state(jnp.zeros(1), jnp.ones(()), jnp.zeros(()), info, {})


def episode_oracle(done, truncated, max_len, n_steps):
    """The episode wrapper as a plain loop over the script of `ScriptedEnv`, from 0."""
    results = []
    for step in range(n_steps):
        inner_done, inner_flag = done[step % len(done)], truncated[step % len(done)]
        flag, end = bool(inner_flag), bool(inner_done or inner_flag)
        if step + 1 >= max_len:
            if not (inner_done and not inner_flag):
                flag = True
            end = True
        results.append((end, flag))
    return results


def run(env, start, n_steps):
    state, results = start, []
    step = jax.jit(env.step)
    for _ in range(n_steps):
        state = step(state, ACTION)
        results.append((bool(state.done), bool(envs.read_truncation(state))))
    return results


def start_at_zero(env):
    states = (env.reset(jax.random.key(seed)) for seed in itertools.count())
    return next(state for state in states if int(state.data.position) == 0)


@pytest.mark.parametrize("max_len", [1, 2, 3, 9])
@pytest.mark.parametrize("done", [(0, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 0)])
@pytest.mark.parametrize("truncated", [(0, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_episode_wrapper_against_a_loop(max_len, done, truncated):
    env = envs.EpisodeWrapper(ScriptedEnv(done, truncated), max_len)
    actual = run(env, start_at_zero(env), 3)
    assert actual == episode_oracle(done, truncated, max_len, 3)


@pytest.mark.parametrize("max_len", [1, 2, 3, 5])
def test_exactly_max_len_transitions(max_len):
    env = envs.EpisodeWrapper(envs.Pendulum(), max_len)
    state = env.reset(jax.random.key(0))
    assert int(state.info["episode_steps"]) == 0
    assert state.info["episode_steps"].dtype == jnp.int32
    ends = run(env, state, max_len)
    assert ends == [(False, False)] * (max_len - 1) + [(True, True)]
    again = env.reset(jax.random.key(1))
    assert run(env, again, max_len) == ends


def test_termination_on_the_last_allowed_step_wins():
    # `Recall` with two blank steps terminates in step 4.
    ends = {
        max_len: run(
            (env := envs.EpisodeWrapper(envs.Recall(2), max_len)),
            env.reset(jax.random.key(0)),
            4,
        )
        for max_len in (3, 4, 5)
    }
    go_on, truncated, terminated = (False, False), (True, True), (True, False)
    assert ends[3][:3] == [go_on, go_on, truncated]
    assert ends[4] == [go_on, go_on, go_on, terminated]
    assert ends[5] == [go_on, go_on, go_on, terminated]


@pytest.mark.parametrize("key", ["truncation", "truncated"])
@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.int32, jnp.float32])
def test_dtypes_and_key_of_the_wrapped_env_are_kept(key, dtype):
    env = envs.EpisodeWrapper(ScriptedEnv((0, 0), (0, 0), dtype, key), 1)
    first = env.reset(jax.random.key(0))
    last = env.step(first, ACTION)
    for state in (first, last):
        assert state.done.dtype == dtype
        assert state.info[key].dtype == dtype
        assert set(state.info) & {"truncation", "truncated"} == {key}
    assert float(last.info[key]) == float(last.done) == 1.0


def test_without_a_flag_a_boolean_one_is_added():
    env = envs.EpisodeWrapper(ScriptedEnv((0, 0), None, jnp.float32), 1)
    state = env.reset(jax.random.key(0))
    assert set(state.info) == {"truncation", "episode_steps"}
    assert state.info["truncation"].dtype == jnp.bool_
    assert state.done.dtype == jnp.float32
    assert bool(env.step(state, ACTION).info["truncation"])


def test_both_flags_are_written():
    env = envs.EpisodeWrapper(CarriesInfo(flags=("truncation", "truncated")), 1)
    state = env.step(env.reset(jax.random.key(0)), ACTION)
    assert (float(state.info["truncation"]), float(state.info["truncated"])) == (1.0, 1.0)


def test_a_weak_or_python_done_becomes_an_array():
    class Sloppy(CarriesInfo):
        def reset(self, key):
            return super().reset(key)._replace(done=0.0)

    state = envs.EpisodeWrapper(Sloppy(), 1).reset(jax.random.key(0))
    assert isinstance(state.done, jax.Array)
    assert not state.done.weak_type
    assert state.done.dtype == jnp.float32


@pytest.mark.parametrize(
    "flags", [(), ("truncation",), ("truncated",), ("truncation", "truncated")]
)
def test_the_wrapped_env_gets_its_own_info_back(flags):
    """Also past the time limit, where the wrapper has written another value."""
    inner = CarriesInfo(flags=flags)
    env = envs.EpisodeWrapper(inner, 2)
    state = env.reset(jax.random.key(0))
    for _ in range(4):
        state = env.step(state, ACTION)
    expected = [{"count": 10.0 + t, **dict.fromkeys(flags, 0.0)} for t in range(4)]
    assert inner.seen == expected
    assert bool(envs.read_truncation(state))


def test_nested_time_limits():
    inner = CarriesInfo()
    env = envs.EpisodeWrapper(envs.EpisodeWrapper(inner, 2), 3)
    state = env.reset(jax.random.key(0))
    ends = []
    for _ in range(4):
        state = env.step(state, ACTION)
        ends.append(bool(envs.read_truncation(state)))
        assert float(state.done) == ends[-1]
    assert ends == [False, True, True, True]
    assert int(state.info["episode_steps"]) == 4
    assert inner.seen == [{"count": 10.0 + t, "truncation": 0.0} for t in range(4)]


@pytest.mark.parametrize("make_state", [TupleState, RecordState, envs.State, flax_state])
def test_every_kind_of_state_and_nothing_written_in_place(make_state):
    env = envs.RewardScalingWrapper(envs.EpisodeWrapper(CarriesInfo(make_state), 2), 3.0)
    first = env.reset(jax.random.key(0))
    infos = [(state := first).info]
    snapshots = [dict(state.info)]
    for expected in [(3.0, 0.0), (3.0, 1.0)]:
        state = env.step(state, ACTION)
        assert type(state) is type(first)
        assert (float(state.reward), float(state.done)) == expected
        infos.append(state.info)
        snapshots.append(dict(state.info))
    assert len({id(info) for info in infos}) == 3
    for info, snapshot in zip(infos, snapshots, strict=True):
        assert set(info) == set(snapshot)
        assert all(info[name] is snapshot[name] for name in info)


def test_the_info_of_the_wrapped_env_is_not_written():
    inner = CarriesInfo()
    inner_state = inner.reset(jax.random.key(0))
    inner.reset = lambda key: inner_state
    env = envs.EpisodeWrapper(inner, 1)
    state = env.reset(jax.random.key(0))
    env.step(state, ACTION)
    assert set(inner_state.info) == {"count", "truncation"}
    assert float(inner_state.info["truncation"]) == 0.0
    assert state.info is not inner_state.info


def test_stagger_is_uniform():
    env = envs.EpisodeWrapper(envs.Pendulum(), 4)
    keys = jax.random.split(jax.random.key(0), 4000)
    state = jax.jit(jax.vmap(env.reset))(keys)
    assert not np.any(state.info["episode_steps"])
    staggered = jax.jit(jax.vmap(env.stagger))(state, keys)
    steps = np.asarray(staggered.info["episode_steps"])
    assert steps.dtype == np.int32
    counts = np.bincount(steps, minlength=4)
    assert counts.shape == (4,)
    # Five standard deviations of a binomial count, sqrt(4000 / 4 * 3 / 4) = 27.
    assert np.all(np.abs(counts - 1000) < 137)
    np.testing.assert_array_equal(staggered.obs, state.obs)
    assert not np.any(staggered.done)


def test_a_staggered_episode_ends_earlier():
    env = envs.EpisodeWrapper(envs.Pendulum(), 5)
    for seed in range(8):
        key = jax.random.key(seed)
        state = env.stagger(env.reset(key), key)
        left = 5 - int(state.info["episode_steps"])
        assert 1 <= left <= 5
        assert run(env, state, left) == [(False, False)] * (left - 1) + [(True, True)]


def test_stagger_keeps_the_structure_and_max_len_one():
    env = envs.EpisodeWrapper(ScriptedEnv((0, 1), (0, 1), jnp.int32), 1)
    key = jax.random.key(0)
    state = jax.eval_shape(env.reset, key)
    staggered = jax.eval_shape(env.stagger, state, key)
    assert jax.tree.structure(state) == jax.tree.structure(staggered)
    assert jax.tree.leaves(state) == jax.tree.leaves(staggered)
    assert int(env.stagger(env.reset(key), key).info["episode_steps"]) == 0


def test_stagger_reaches_through_other_wrappers():
    env = envs.RewardScalingWrapper(envs.EpisodeWrapper(envs.Pendulum(), 1000), 0.5)
    assert isinstance(env, envs.SupportsStagger)
    key = jax.random.key(0)
    assert int(env.stagger(env.reset(key), key).info["episode_steps"]) > 0
    plain = envs.RewardScalingWrapper(envs.Pendulum(), 0.5)
    state = plain.reset(key)
    assert plain.stagger(state, key) is state


def test_stagger_reaches_the_wrapped_env():
    class Phase(CarriesInfo):
        def stagger(self, state, key):
            assert set(state.info) == {"count", "truncation"}
            return state._replace(info={**state.info, "count": jnp.array(77, jnp.int32)})

    env = envs.EpisodeWrapper(Phase(), 10)
    state = env.stagger(env.reset(jax.random.key(0)), jax.random.key(1))
    assert int(state.info["count"]) == 77


@pytest.mark.parametrize("max_len", [0, -1, 2**31])
def test_max_len_out_of_range(max_len):
    with pytest.raises(ValueError, match=rf"`max_len`.*{max_len}"):
        envs.EpisodeWrapper(envs.Pendulum(), max_len)


@pytest.mark.parametrize("max_len", [1.0, True, "3", None, np.int64(3), jnp.array(3)])
def test_max_len_of_the_wrong_kind(max_len):
    with pytest.raises(TypeError, match="`max_len` must be a Python integer"):
        envs.EpisodeWrapper(envs.Pendulum(), max_len)


def test_reward_scaling_of_a_tree():
    inner = DictEnv()
    env = envs.RewardScalingWrapper(inner, -0.25)
    action = {"arm": jnp.array([0.1, 0.2]), "leg": jnp.array([0.3])}
    state, expected = env.reset(jax.random.key(0)), inner.reset(jax.random.key(0))
    for _ in range(3):
        state, expected = env.step(state, action), inner.step(expected, action)
        assert set(state.reward) == {"arm", "leg"}
        for name, reward in expected.reward.items():
            np.testing.assert_allclose(state.reward[name], -0.25 * np.asarray(reward), rtol=1e-6)
        np.testing.assert_array_equal(state.obs["proprio"], expected.obs["proprio"])


@pytest.mark.parametrize(
    ("reward", "dtype", "value"),
    [
        (jnp.array(3, jnp.int32), jnp.float32, 1.5),
        (jnp.array(True), jnp.float32, 0.5),
        (jnp.array(3.0, jnp.bfloat16), jnp.bfloat16, 1.5),
        (2.0, jnp.float32, 1.0),
    ],
)
def test_reward_scaling_of_a_dtype(reward, dtype, value):
    class Fixed(CarriesInfo):
        def step(self, state, action):
            return super().step(state, action)._replace(reward=reward)

    env = envs.RewardScalingWrapper(Fixed(), 0.5)
    state = env.step(env.reset(jax.random.key(0)), ACTION)
    assert state.reward.dtype == dtype
    assert not state.reward.weak_type
    assert float(state.reward) == value


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_scale_must_be_finite(scale):
    with pytest.raises(ValueError, match="`scale` must be finite"):
        envs.RewardScalingWrapper(envs.Pendulum(), scale)


@pytest.mark.parametrize("scale", ["2", None, True, jnp.array(2.0)])
def test_scale_must_be_a_number(scale):
    with pytest.raises(TypeError, match="`scale` must be a Python number"):
        envs.RewardScalingWrapper(envs.Pendulum(), scale)


def test_the_order_of_wrappers_does_not_matter():
    one = envs.RewardScalingWrapper(envs.EpisodeWrapper(envs.Pendulum(), 3), 0.1)
    two = envs.EpisodeWrapper(envs.RewardScalingWrapper(envs.Pendulum(), 0.1), 3)
    left, right = one.reset(jax.random.key(0)), two.reset(jax.random.key(0))
    for _ in range(3):
        left, right = one.step(left, ACTION), two.step(right, ACTION)
        assert jax.tree.structure(left) == jax.tree.structure(right)
        jax.tree.map(np.testing.assert_array_equal, left, right)


def test_delegation():
    class Renders(CarriesInfo):
        def render(self):
            return "picture"

    inner = Renders()
    env = envs.RewardScalingWrapper(envs.EpisodeWrapper(inner, 3), 0.1)
    assert env.render() == "picture"
    assert env.max_len == 3
    assert env.unwrapped is inner
    with pytest.raises(AttributeError, match="no attribute 'color'"):
        _ = env.color
    assert envs.EpisodeWrapper(DictEnv(), 3).observation_size == {"proprio": 3, "goal": 2}


def test_wrappers_are_immutable_and_told_apart_by_identity():
    inner = envs.Pendulum()
    env, twin = envs.EpisodeWrapper(inner, 3), envs.EpisodeWrapper(inner, 3)
    assert env != twin
    assert len({env, twin}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        env.max_len = 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        env.env = inner


def test_wrappers_can_be_copied_and_pickled():
    env = envs.EpisodeWrapper(envs.Recall(3), 7)
    for twin in (copy.deepcopy(env), pickle.loads(pickle.dumps(env))):
        assert (twin.max_len, twin.env.delay) == (7, 3)
    # `copy` and `pickle` ask an object without fields for its methods.
    bare = object.__new__(envs.EpisodeWrapper)
    for name in ("env", "__setstate__", "observation_size"):
        with pytest.raises(AttributeError, match="no attribute"):
            getattr(bare, name)


def test_the_base_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        envs.Wrapper(envs.Pendulum())


def test_a_users_wrapper_needs_reset_and_step_only():
    class Negated(envs.Wrapper):
        def reset(self, key):
            return self.env.reset(key)

        def step(self, state, action):
            return self.env.step(state, -action)

    env = Negated(envs.EpisodeWrapper(envs.Pendulum(), 50))
    assert isinstance(env, envs.SupportsStagger)
    key = jax.random.key(3)
    state = env.reset(key)
    expected = env.env.step(state, jnp.array([-0.5]))
    np.testing.assert_array_equal(env.step(state, jnp.array([0.5])).obs, expected.obs)
    assert env.action_size == 1
    staggered = env.stagger(state, key).info["episode_steps"]
    np.testing.assert_array_equal(staggered, env.env.stagger(state, key).info["episode_steps"])
