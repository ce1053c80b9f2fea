"""What outlives an episode."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo.algorithms import unroll_env
from eqx_ppo.envs import (
    ActionRepeatWrapper,
    BatchedEnv,
    CachedReset,
    DomainRandomizationWrapper,
    EpisodeWrapper,
    FrameStackWrapper,
    FreshReset,
    KeepInfoWrapper,
    ObservationDelayWrapper,
    PooledReset,
    RewardScalingWrapper,
    State,
    SupportsCarryOver,
    env_spec,
)
from tests.algorithms.common import small_config, train
from tests.envs.registry import CASES
from tests.helpers.networks import CountingPolicy, heads

ACTION = jax.ShapeDtypeStruct((1,), jnp.float32)

every_strategy = pytest.mark.parametrize(
    "strategy", [FreshReset(), CachedReset(), PooledReset()], ids=lambda s: type(s).__name__
)


class LevelData(NamedTuple):
    length: jax.Array
    time: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Levels:
    """Counts its episodes in `info`. An episode has a length of 1 to 3, drawn at the reset.

    The observation is `(episodes before this one, time)`. A step goes non-finite at the end of
    every episode that begins at level `bad_level`, and that spoils the count too.
    """

    bad_level: int = -1
    parameters: tuple[float, ...] = (1.0,)

    observation_size = 2
    action_size = 1

    def reset(self, key):
        length = jax.random.randint(key, (), 1, 4, jnp.int32)
        info = {"level": jnp.zeros((), jnp.float32), "command": jax.random.uniform(key)}
        return self._state(LevelData(length, jnp.zeros((), jnp.int32)), info)

    def step(self, state, action):
        data = state.data._replace(time=state.data.time + jnp.int32(1))
        done = data.time >= data.length
        level = state.info["level"] + done.astype(jnp.float32)
        level = jnp.where(done & (state.info["level"] == self.bad_level), jnp.nan, level)
        return self._state(data, {**state.info, "level": level})

    def _state(self, data, info):
        done = data.time >= data.length
        obs = jnp.stack([info["level"], data.time.astype(jnp.float32)])
        return State(obs, jnp.ones(()), done, info, {}, data)


@dataclasses.dataclass(frozen=True, eq=False)
class LevelsThatMatter(Levels):
    """The level makes the next episodes longer, and shows from the first observation on."""

    def carry_over(self, ended, fresh):
        level = ended.info["level"]
        longer = fresh.data._replace(length=fresh.data.length + level.astype(jnp.int32))
        return self._state(longer, {**fresh.info, "level": level})


def randomize(key, parameters):
    return (parameters[0] * jax.random.uniform(key, (), jnp.float32),)


WRAPPED = {
    "plain": lambda env: env,
    "episode": lambda env: EpisodeWrapper(env, 100),
    "nested": lambda env: RewardScalingWrapper(EpisodeWrapper(EpisodeWrapper(env, 90), 100), 0.5),
    "frames": lambda env: FrameStackWrapper(env, 2),
    "delay": lambda env: ObservationDelayWrapper(env, 1),
    "randomized": lambda env: DomainRandomizationWrapper(env, randomize, "parameters"),
}


def play(env, strategy, n_steps, n_envs=3, n_parts=1):
    """The steps of some environments, and the state after each part of them."""
    state = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), n_envs))

    @jax.jit
    def part(state, key):
        carry = jnp.zeros(n_envs)
        return unroll_env(
            env, state, CountingPolicy(), carry, n_steps, key, reset_strategy=strategy
        )[1:]

    parts = []
    for index in range(n_parts):
        state, transitions = part(state, jax.random.key(index))
        parts.append((state, transitions))
    return parts


@every_strategy
def test_a_counter_goes_on(strategy):
    """It equals the number of ends in a plain loop; everything else is new."""
    env = KeepInfoWrapper(Levels(), ("level",))
    total = np.zeros(3)
    commands = []
    # In parts, save where a part would start with states in the middle of an episode.
    n_parts = 1 if isinstance(strategy, CachedReset) else 3
    for state, transitions in play(env, strategy, 15 // n_parts, n_parts=n_parts):
        done = np.asarray(transitions.done)
        total += done.sum(axis=0)
        np.testing.assert_array_equal(state.info["level"], total)
        commands.append(np.asarray(state.info["command"]))
        started = np.asarray(state.data.time) == 0
        np.testing.assert_array_equal(started, done[-1])
    assert (total >= 5).all()
    if not isinstance(strategy, CachedReset):
        assert len(np.unique(commands)) > 3


def test_without_it_everything_is_new():
    state, transitions = play(Levels(), PooledReset(), 8)[0]
    assert (np.asarray(transitions.done).sum(axis=0) > 1).all()
    assert set(np.asarray(state.info["level"]).tolist()) == {0.0}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_through_wrappers(wrap):
    """The hook of an environment is called with its own states, however it is wrapped."""
    plain_state, plain = play(LevelsThatMatter(), PooledReset(), 12)[0]
    env = wrap(LevelsThatMatter())
    state, transitions = play(env, PooledReset(), 12)[0]
    done = np.asarray(transitions.done)
    np.testing.assert_array_equal(state.info["level"], done.sum(axis=0))
    # An episode is as long as its draw, 1 to 3, and its level say.
    for env_index in range(3):
        ends = np.flatnonzero(done[:, env_index])
        lengths = np.diff(np.concatenate([[-1], ends]))
        draws = lengths - np.arange(len(lengths))
        assert ((draws >= 1) & (draws <= 3)).all()
    if not isinstance(env, DomainRandomizationWrapper):  # which splits the keys of resets
        np.testing.assert_array_equal(transitions.done, plain.done)
        np.testing.assert_array_equal(state.info["level"], plain_state.info["level"])


@pytest.mark.parametrize("wrap", [WRAPPED["frames"], WRAPPED["delay"]], ids=["frames", "delay"])
def test_no_earlier_observation_shows_through(wrap):
    env = wrap(LevelsThatMatter())
    state = env.reset(jax.random.key(0))
    ended = env.step(env.step(env.step(state, None), None), None)
    fresh = env.carry_over(ended, env.reset(jax.random.key(1)))
    assert float(fresh.info["level"]) >= 1.0
    frames = np.asarray(fresh.obs).reshape(-1, 2)
    np.testing.assert_array_equal(frames, [[float(fresh.info["level"]), 0.0]] * len(frames))


def test_a_step_that_is_not_valid_spoils_nothing():
    """What is kept is then that of the state before."""
    env = KeepInfoWrapper(Levels(bad_level=2), ("level",))
    state, transitions = play(env, PooledReset(), 20)[0]
    assert np.isfinite(state.info["level"]).all()
    assert not np.asarray(transitions.valid).all()
    np.testing.assert_array_equal(state.info["level"], [2.0] * 3)  # that level is never passed
    ends = np.asarray(transitions.done & transitions.valid).sum(axis=0)
    np.testing.assert_array_equal(ends, [2] * 3)


def test_leaves_that_all_environments_share():
    class Sharing(Levels):
        def reset(self, key):
            state = super().reset(key)
            return state.replace(info={**state.info, "model": jnp.zeros(3)})

    env = KeepInfoWrapper(Sharing(), ("level",))
    state = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 3))
    state = state.replace(info={**state.info, "model": jnp.arange(3.0)})
    for strategy in (CachedReset(), FreshReset()):
        _, last, transitions = unroll_env(
            env,
            state,
            CountingPolicy(),
            jnp.zeros(3),
            6,
            jax.random.key(1),
            reset_strategy=strategy,
        )
        np.testing.assert_array_equal(last.info["model"], np.arange(3.0))
        np.testing.assert_array_equal(last.info["level"], np.sum(transitions.done, axis=0))


def test_over_iterations_of_training():
    env = KeepInfoWrapper(EpisodeWrapper(Levels(), 100), ("level",))
    network = heads(2, 1, jax.random.key(0))
    state, _ = train(env, network, small_config(rollout_length=6), jax.random.key(1), 4)
    levels = np.asarray(state.rollout_state.env_state.info["level"])
    assert (levels >= 8).all()  # an episode has at most three of the 24 steps


@pytest.mark.parametrize(("env", "action"), list(CASES.values()), ids=list(CASES))
def test_who_keeps_something(env, action):
    """Wrappers around an environment that keeps nothing cost nothing."""
    batched = BatchedEnv(env, env_spec(env, lambda obs: action))
    assert bool(batched.carried_leaves) == isinstance(env, KeepInfoWrapper)


def test_the_protocol():
    assert isinstance(LevelsThatMatter(), SupportsCarryOver)
    assert not isinstance(Levels(), SupportsCarryOver)
    env = EpisodeWrapper(Levels(), 3)
    state = env.reset(jax.random.key(0))
    assert env.carry_over(state, state) is state


def test_what_is_kept_must_fit():
    class Wrong(Levels):
        def carry_over(self, ended, fresh):
            return fresh.replace(data=fresh.data._replace(length=ended.info["level"]))

    with pytest.raises(
        ValueError, match=r"`\.data\.length` .* float32 after `carry_over`, but int"
    ):
        play(Wrong(), FreshReset(), 2)

    class More(Levels):
        def carry_over(self, ended, fresh):
            return fresh.replace(info={**fresh.info, "best": jnp.ones(())})

    with pytest.raises(ValueError, match=r"`carry_over` lacks nothing and adds .*best"):
        play(More(), FreshReset(), 2)


def test_names_that_info_lacks():
    env = KeepInfoWrapper(Levels(), ("level", "wins"))
    with pytest.raises(ValueError, match=r"to keep \['wins'\].*has only \['command', 'level'\]"):
        env.reset(jax.random.key(0))


# Every entry that a wrapper of this library writes, with one of the same kind inside of it.
WRITTEN_BY_WRAPPERS = [
    "episode_steps",
    "episode_inner_info",
    "action_repeat_metrics",
    "action_repeat_inner_info",
    "frame_stack_newest",
    "frame_stack_inner_info",
    "observation_delay_queue",
    "observation_delay_inner_info",
    "randomized",
    "randomized_inner_info",
]


def test_what_wrappers_write():
    def wrap(env):
        env = ActionRepeatWrapper(EpisodeWrapper(env, 9), 2, sum_metrics=True)
        env = ObservationDelayWrapper(FrameStackWrapper(env, 2), 1)
        return DomainRandomizationWrapper(env, randomize, "parameters")

    info = jax.eval_shape(wrap(wrap(Levels())).reset, jax.random.key(0)).info
    written = set(WRITTEN_BY_WRAPPERS)
    assert info.keys() - {"level", "command", "truncation"} == written


@pytest.mark.parametrize(
    ("names", "error"),
    [
        ("level", TypeError),
        ((1,), TypeError),
        ((), ValueError),
        (("truncation",), ValueError),
        *((("level", name), ValueError) for name in WRITTEN_BY_WRAPPERS),
    ],
)
def test_bad_names(names, error):
    with pytest.raises(error, match="`names` must be"):
        KeepInfoWrapper(Levels(), names)


def test_a_list_of_names():
    assert KeepInfoWrapper(Levels(), ["level"]).names == ("level",)
