import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo import envs
from eqx_ppo.envs import ActionRepeatWrapper, EpisodeWrapper, State
from tests.helpers.broken_envs import WritesInfo
from tests.helpers.envs import DictEnv, ScriptedEnv


def outcome(state):
    terminated, truncated = envs.episode_end(state)
    return int(state.reward), int(state.data.elapsed), bool(terminated), bool(truncated)


def repeat_oracle(done, truncated, position, elapsed, repeats):
    """The wrapper as a plain loop over the script of `ScriptedEnv`."""
    total = 0
    for _ in range(repeats):
        end, flag = bool(done[position]), bool(truncated[position])
        total, elapsed, position = total + position, elapsed + 1, (position + 1) % len(done)
        if end or flag:
            break
    return total, elapsed, end and not flag, flag


@pytest.mark.parametrize("repeats", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("done", "truncated"),
    [
        ((0, 0, 0, 0), (0, 0, 0, 0)),
        ((0, 1, 0, 0), (0, 0, 0, 0)),
        ((0, 0, 0, 1), (0, 0, 0, 1)),
        ((0, 0, 0, 0), (0, 0, 1, 0)),
    ],
)
def test_against_a_loop(repeats, done, truncated):
    env = ActionRepeatWrapper(ScriptedEnv(done, truncated), repeats)
    step = jax.jit(env.step)
    seen = set()
    for seed in range(6):
        state = env.reset(jax.random.key(seed))
        position = int(state.data.position)
        assert outcome(step(state, jnp.zeros(1))) == repeat_oracle(
            done, truncated, position, 0, repeats
        )
        seen.add(position)
    assert len(seen) > 1


def test_repeated_steps_are_those_of_the_wrapped_environment():
    plain, action = envs.Pendulum(), jnp.array([0.7])
    env = ActionRepeatWrapper(plain, 3)
    state = expected = plain.reset(jax.random.key(0))
    rewards = []
    for _ in range(3):
        expected = plain.step(expected, action)
        rewards.append(expected.reward)
    state = env.step(state, action)
    np.testing.assert_allclose(state.obs, expected.obs, rtol=1e-5)
    np.testing.assert_allclose(state.reward, sum(rewards), rtol=1e-5)


def test_every_reward_is_summed():
    plain, action = DictEnv(lengths=(9,)), {"arm": jnp.ones(2), "leg": -jnp.ones(1)}
    start = plain.reset(jax.random.key(0))
    first = plain.step(start, action)
    second = plain.step(first, action)
    state = ActionRepeatWrapper(plain, 2).step(start, action)
    assert state.reward.keys() == {"arm", "leg"}
    for name, reward in state.reward.items():
        np.testing.assert_allclose(reward, first.reward[name] + second.reward[name], rtol=1e-5)


class Events:
    """Reports an event in step 1, a count and a distance; the episode ends after `length`."""

    def __init__(self, length):
        self.length = length

    def reset(self, key):
        return self._state(jnp.zeros((), jnp.int32))

    def step(self, state, action):
        return self._state(state.data + jnp.int32(1))

    def _state(self, time):
        metrics = {
            "event": time == 1,
            "count": time,
            "pair": jnp.stack([time, -time]).astype(jnp.bfloat16),
        }
        return State(jnp.zeros(1), jnp.zeros(()), time >= self.length, {}, metrics, time)


@pytest.mark.parametrize(
    ("length", "sum_metrics", "expected"),
    [
        (9, True, {"event": 1, "count": 1 + 2 + 3, "pair": [6, -6]}),
        (2, True, {"event": 1, "count": 1 + 2, "pair": [3, -3]}),  # nothing past the end
        (9, False, {"event": 0, "count": 3, "pair": [3, -3]}),
        (2, False, {"event": 0, "count": 2, "pair": [2, -2]}),
    ],
)
def test_metrics_are_those_of_the_last_step_or_summed(length, sum_metrics, expected):
    env = ActionRepeatWrapper(Events(length), 3, sum_metrics=sum_metrics)
    start = env.reset(jax.random.key(0))
    state = jax.jit(env.step)(start, jnp.zeros(1))
    assert int(state.data) == min(length, 3)
    for name, value in expected.items():
        np.testing.assert_array_equal(np.asarray(state.metrics[name], np.float32), value)
        assert state.metrics[name].dtype == start.metrics[name].dtype
    assert state.metrics["pair"].dtype == jnp.bfloat16
    assert (state.metrics["event"].dtype == jnp.float32) == sum_metrics


class CountsInMetrics:
    """Counts in its own metrics and reward."""

    def reset(self, key):
        return State(jnp.zeros(1), 0.0, jnp.array(False), {}, {"n": jnp.array(0)})

    def step(self, state, action):
        return state.replace(reward=1.0, metrics={"n": state.metrics["n"] + 1})

    def stagger(self, state, key):
        return state.replace(metrics={"n": jnp.array(10)})

    def carry_over(self, ended, fresh):
        return fresh.replace(metrics={"n": ended.metrics["n"]})


def test_the_wrapped_environment_gets_its_own_metrics_back():
    env = ActionRepeatWrapper(CountsInMetrics(), 3, sum_metrics=True)
    env = ActionRepeatWrapper(env, 1, sum_metrics=True)  # whose entry has the same name
    start = state = env.reset(jax.random.key(0))
    sums = []
    for _ in range(3):
        state = env.step(state, jnp.zeros(1))
        sums.append(int(state.metrics["n"]))
        assert jax.tree.structure(state) == jax.tree.structure(start)
    assert sums == [1 + 2 + 3, 4 + 5 + 6, 7 + 8 + 9]
    kept = env.carry_over(state, start)
    assert int(kept.metrics["n"]) == 9
    assert int(env.step(kept, jnp.zeros(1)).metrics["n"]) == 10 + 11 + 12
    staggered = env.stagger(start, jax.random.key(0))
    assert int(env.step(staggered, jnp.zeros(1)).metrics["n"]) == 11 + 12 + 13


class Loose:
    """Its dtypes and weak types change with the first step, and its reward is an integer."""

    def reset(self, key):
        return State(jnp.zeros(1), 0, False, {"time": 0}, {})

    def step(self, state, action):
        time = jnp.asarray(state.info["time"], jnp.float32) + 0.5
        return State(action * 2.0, jnp.int32(3), time > 1.1, {"time": time}, {})


def test_dtypes_that_change_with_the_first_step():
    env = ActionRepeatWrapper(Loose(), 5)
    state = env.reset(jax.random.key(0))
    assert state.reward.dtype == jnp.float32
    state = jax.jit(env.step)(state, jnp.ones(1))
    assert (float(state.reward), float(state.info["time"])) == (9.0, 1.5)  # three of five
    assert state.reward.dtype == jnp.float32
    assert bool(state.done)


def test_time_limits_count_actions_outside_and_steps_inside():
    action = jnp.zeros(1)
    outside = EpisodeWrapper(ActionRepeatWrapper(envs.Pendulum(), 4), 2)
    state = outside.step(outside.reset(jax.random.key(0)), action)
    assert int(state.info["episode_steps"]) == 1
    inside = ActionRepeatWrapper(EpisodeWrapper(envs.Pendulum(), 6), 4)
    state = inside.step(inside.reset(jax.random.key(0)), action)
    assert (int(state.info["episode_steps"]), bool(envs.read_truncation(state))) == (4, False)
    state = inside.step(state, action)
    assert (int(state.info["episode_steps"]), bool(envs.read_truncation(state))) == (6, True)


def test_stagger_reaches_the_wrapped_environment():
    env = ActionRepeatWrapper(EpisodeWrapper(envs.Pendulum(), 50), 2)
    state = env.reset(jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), 20)
    steps = jax.vmap(lambda key: env.stagger(state, key))(keys).info["episode_steps"]
    assert len(np.unique(steps)) > 5


@pytest.mark.parametrize(
    ("repeats", "error"), [(0, ValueError), (True, TypeError), (2.0, TypeError)]
)
def test_bad_repeats(repeats, error):
    with pytest.raises(error, match="`repeats` must be"):
        ActionRepeatWrapper(envs.Pendulum(), repeats)


def test_steps_that_are_not_taken_leave_no_trace_in_info():
    """The environment writes its energy into the state that it is given: 1 per step, for 2."""
    env = ActionRepeatWrapper(WritesInfo(length=2), 4)
    state = jax.jit(env.step)(jax.jit(env.reset)(jax.random.key(0)), jnp.ones(1, jnp.float32))
    assert bool(state.done)
    assert float(state.info["energy"]) == 2.0
