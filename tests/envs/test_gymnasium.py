"""Vector environments of Gymnasium: one call of the host per step, and nothing lost on the way."""

import dataclasses
import sys
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eqx_ppo import EvalConfig, PPOConfig, TrainConfig, make_mlp_actor_critic, train_ppo
from eqx_ppo.algorithms import (
    eval_rollout,
    make_sampler,
    new_training_state,
    ppo_step,
    restart_episodes,
    unroll_env,
)
from eqx_ppo.envs import (
    ContinuousActions,
    DiscreteActions,
    EpisodeWrapper,
    FreshReset,
    GymnasiumEnv,
    HostReset,
    MultiDiscreteActions,
    Pendulum,
    PooledReset,
    load_gymnasium,
)
from eqx_ppo.networks import PPONetworkOutput, StatefulModuleOutput, StatelessModule
from tests.algorithms.common import assert_same, differ

gymnasium = pytest.importorskip("gymnasium")
from gymnasium import spaces  # noqa: E402
from gymnasium.vector import AutoresetMode, SyncVectorEnv  # noqa: E402

LIMIT = 5  # steps, at which the environments below are cut off
N_ENVS = 3


class Line(gymnasium.Env):
    """Moves along a line by the action, from a random place; terminates beyond 1.

    Observes (place, steps), as float64. Cut off after `LIMIT` steps. `fault` is what the
    fourth step from now on will do wrong.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Box(-0.5, 0.5, (1,), np.float32)

    def __init__(self):
        self.break_down(None)

    def break_down(self, fault):
        self.fault, self.seeds, self.n_steps, self.n_ends = fault, [], 0, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.place, self.clock = self.np_random.uniform(-1.0, 1.0), 0
        return self._obs(), {}

    def step(self, action):
        self.place, self.clock = self.place + float(action[0]), self.clock + 1
        self.n_steps += 1
        if self.fault == "raise" and self.n_steps == 4:
            raise RuntimeError("the motor of the line is too hot")
        reward = float("nan") if self.fault == "nan" and self.n_steps == 4 else self.place
        terminated, truncated = self.place > 1.0, self.clock >= LIMIT
        self.n_ends += terminated or truncated
        return self._obs(), reward, terminated, truncated, {}

    def _obs(self):
        return np.array([self.place, self.clock], np.float64)


class Pusher(StatelessModule):
    """A whole network: pushes by a function of the place, and estimates the place."""

    def __call__(self, state, x, rollout_extras=None):
        output = PPONetworkOutput(
            actions=0.5 * jnp.sin(20.0 * x[:, :1]),
            log_likelihoods=jnp.zeros(x.shape[0], jnp.float32),
            value_estimates=x[:, 0],
        )
        return StatefulModuleOutput(output, state)


def vector(*envs):
    return SyncVectorEnv([lambda e=env: e for env in envs], autoreset_mode=AutoresetMode.DISABLED)


def lines(n=N_ENVS):
    """An environment, and the `Line`s that it is made of."""
    envs = [Line() for _ in range(n)]
    return GymnasiumEnv(vector(*envs)), envs


def network(env, key=0):
    return make_mlp_actor_critic(
        2, 1, [4], [4], sampler=make_sampler(env.actions), key=jax.random.key(key)
    )


CONFIG = PPOConfig(
    n_envs=N_ENVS,
    rollout_length=8,
    total_steps=48,
    n_epochs=2,
    n_minibatches=1,
    reset_strategy=HostReset(),
)


def start_of(env, config=CONFIG):
    return jax.jit(lambda key: new_training_state(env, network(env), config, key))


# --- The rollout ----------------------------------------------------------------------------

T = 20


@pytest.fixture(scope="module")
def rollout():
    """T steps from a fresh start, and the environments afterwards."""
    env, envs = lines()

    @jax.jit
    def run(key):
        reset_key, key = jax.random.split(key)
        state = jax.vmap(env.reset)(jax.random.split(reset_key, N_ENVS))
        _, last, transitions = unroll_env(env, state, Pusher(), (), T, key)
        return state, last, transitions

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        return jax.tree.map(np.asarray, run(jax.random.key(3))), envs


def test_the_rollout_is_that_of_a_loop(rollout):
    """So is the value of the observation that follows, at time limits too."""
    (start, last, transitions), envs = rollout
    for index, env in enumerate(envs):
        copy, seeds = Line(), iter(env.seeds)
        obs, _ = copy.reset(seed=next(seeds))
        np.testing.assert_array_equal(start.obs[index], obs.astype(np.float32))
        for step in range(T):
            row = jax.tree.map(lambda leaf, i=index, t=step: leaf[t, i], transitions)
            np.testing.assert_array_equal(row.obs, obs.astype(np.float32))
            obs, reward, terminated, truncated, _ = copy.step(row.network_output.actions)
            assert row.rewards == np.float32(reward)
            assert row.terminated == terminated
            assert row.truncated == (truncated and not terminated)
            assert row.valid
            if not terminated:
                assert row.next_values == np.float32(obs[0])  # the true last one
            if terminated or truncated:
                obs, _ = copy.reset(seed=next(seeds))
        np.testing.assert_array_equal(last.obs[index], obs.astype(np.float32))
        assert next(seeds, None) is None  # one reset for each end, and the first one


def test_every_step_is_taken_once(rollout):
    (_, _, transitions), envs = rollout
    assert [env.n_steps for env in envs] == [T] * N_ENVS
    assert transitions.truncated.any()
    assert transitions.terminated.any()
    seeds = [seed for env in envs for seed in env.seeds]
    assert len(set(seeds)) == len(seeds) == N_ENVS + transitions.done.sum()


# --- Training -------------------------------------------------------------------------------


class Training(NamedTuple):
    env: GymnasiumEnv
    lines: list[Line]
    start: Callable
    step: Callable
    restart: Callable


@pytest.fixture(scope="module")
def compiled():
    """Compiled once; every test begins by `start`."""
    env, envs = lines()
    step = jax.jit(lambda state: ppo_step(env, state, CONFIG))
    restart = jax.jit(lambda state, key: restart_episodes(env, state, CONFIG, key))
    return Training(env, envs, start_of(env), step, restart)


@pytest.fixture
def training(compiled):
    for line in compiled.lines:
        line.break_down(None)
    return compiled


def refused(training, state, match):
    """A step fails. Its arguments are waited for, so that it does so at once.

    JAX would keep the error of one that fails later, and raise it in the next test.
    """
    jax.block_until_ready(state)
    jax.effects_barrier()
    with pytest.raises(jax.errors.JaxRuntimeError, match=match):
        jax.block_until_ready(training.step(state))


def test_training_repeats_and_its_replay_is_exact(training):
    def train(seed):
        state = training.start(jax.random.key(seed))
        for _ in range(2):
            state, metrics = training.step(state)
            assert metrics["losses/ratio_error"] < 1e-5
        return jax.tree.map(np.asarray, state.arrays)

    first, again, other = train(0), train(0), train(1)
    assert [line.n_steps for line in training.lines] == [3 * 2 * 8] * N_ENVS
    assert_same(again, first)
    assert differ(other, first)


def test_a_state_is_used_once(training):
    state, _ = training.step(training.start(jax.random.key(0)))
    following, _ = training.step(state)
    n_seeds = [len(line.seeds) for line in training.lines]
    refused(training, state, r"cannot go back.*restart_episodes")
    assert [line.n_steps for line in training.lines] == [16] * N_ENVS  # nothing was done
    assert [len(line.seeds) for line in training.lines] == n_seeds
    state, _ = training.step(following)
    assert int(state.counts.steps) == 72
    assert [line.n_steps for line in training.lines] == [24] * N_ENVS


def test_an_old_state_is_refused_also_where_all_episodes_ended(training):
    """That resets every environment, but not as the start of a run does."""
    state, _ = training.step(training.start(jax.random.key(0)))
    ended = dataclasses.replace(
        state,
        rollout_state=state.rollout_state._replace(fresh=jnp.ones(N_ENVS, jnp.bool_)),
    )
    training.step(ended)
    refused(training, ended, "cannot go back")


def test_training_and_evaluating_in_the_same_one():
    env, _ = lines()
    config = TrainConfig(ppo=CONFIG, console=False)
    with pytest.raises(ValueError, match=r"`GymnasiumEnv` cannot be evaluated in.*`eval_env`"):
        train_ppo(env, make_mlp_actor_critic(2, 1, [4], [4], key=jax.random.key(0)), config)


def test_a_start_begins_new_episodes_each_time(training):
    start = training.start(jax.random.key(0))
    first, _ = training.step(start)
    again, _ = training.step(start)
    assert_same(again.arrays, first.arrays)
    refused(training, first, "cannot go back")


def test_training_goes_on_with_new_episodes(training):
    """As after a checkpoint, whose states are not those of the host."""
    saved, _ = training.step(training.start(jax.random.key(0)))
    training.step(training.start(jax.random.key(1)))
    refused(training, saved, "cannot go back")
    state = training.restart(saved, jax.random.key(2))
    assert_same(state.arrays, saved.arrays)
    assert_same(state.optimizer_state, saved.optimizer_state)
    assert state.rollout_state.fresh.all()
    state, _ = training.step(state)
    assert int(state.counts.steps) == 48


def test_an_environment_that_becomes_bad_is_reset_alone(training):
    training.lines[0].break_down("nan")
    state, metrics = training.step(training.start(jax.random.key(1)))
    assert int(metrics["invalid_steps"]) == 1
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state.arrays))
    assert [line.n_steps for line in training.lines] == [8] * N_ENVS
    extra = [len(line.seeds) - 1 - line.n_ends for line in training.lines]
    assert extra == [1, 0, 0]
    _, metrics = training.step(state)
    assert int(metrics["invalid_steps"]) == 0


def test_the_message_of_the_environment_is_seen(training):
    training.lines[1].break_down("raise")
    state = training.start(jax.random.key(0))
    refused(training, state, "the motor of the line is too hot")
    training.lines[1].break_down(None)
    training.step(training.start(jax.random.key(0)))


@pytest.mark.slow
def test_cart_pole_is_balanced():
    """The greatest return there is, is 500."""
    env, eval_env = load_gymnasium("CartPole-v1", 16), load_gymnasium("CartPole-v1", 10)
    net = make_mlp_actor_critic(
        4, 1, [64, 64], [64, 64], sampler=make_sampler(env.actions), key=jax.random.key(0)
    )
    ppo = PPOConfig(
        n_envs=16,
        rollout_length=32,
        total_steps=81_920,
        learning_rate=optax.linear_schedule(2.5e-3, 0.0, 160 * 16),
        gradient_clipping=0.5,
        reset_strategy=HostReset(),
    )
    evaluation = EvalConfig(every_steps=81_920, n_envs=10, max_episode_length=500)
    config = TrainConfig(ppo=ppo, eval=evaluation, console=False)
    result = train_ppo(env, net, config, eval_env=eval_env)
    assert result.eval_history[0]["eval/episode_reward/mean"] < 100.0
    assert result.final_metrics["eval/episode_reward/mean"] >= 475.0
    assert result.final_metrics["eval/finished"] == 1.0


# --- Evaluation -----------------------------------------------------------------------------


def test_evaluation_counts_whole_episodes():
    env, envs = lines()
    run = jax.jit(lambda key: eval_rollout(env, Pusher(), N_ENVS, 50, key))
    result = run(jax.random.key(3))
    n_steps = envs[0].n_steps
    assert n_steps == result.lengths.max()  # it stops when the last one has ended
    for index, env in enumerate(envs):
        copy, total, ended, length = Line(), 0.0, False, 0
        obs, _ = copy.reset(seed=env.seeds[0])
        while not ended:
            push = 0.5 * np.sin(20.0 * np.float32(obs[:1]))
            obs, reward, terminated, truncated, _ = copy.step(push)
            total, ended, length = total + reward, terminated or truncated, length + 1
        np.testing.assert_allclose(result.returns[index], total, rtol=1e-3, atol=1e-3)
        assert result.lengths[index] == length
    assert result.finished.all()
    assert_same(run(jax.random.key(3)), result)


# --- Spaces ---------------------------------------------------------------------------------


class Echo(gymnasium.Env):
    """Observes a sample of a space, and keeps the actions that it was given."""

    def __init__(self, action_space, observation_space, ends=(False, False)):
        self.action_space, self.observation_space = action_space, observation_space
        self.ends, self.actions = ends, []

    def reset(self, *, seed=None, options=None):
        self.observation_space.seed(0)
        return self.observation_space.sample(), {}

    def step(self, action):
        self.actions.append(action)
        return self.observation_space.sample(), 1, *self.ends, {}


def step_once(action, *, action_space, observation_space=None, ends=(False, False)):
    echo = Echo(action_space, observation_space or spaces.Box(0.0, 1.0, (1,)), ends)
    env = GymnasiumEnv(vector(echo))
    state = jax.jit(env.reset)(jax.random.key(0))
    return env, state, jax.jit(env.step)(state, action), echo.actions


FLAT = spaces.Box(-1.0, 1.0, (2,))
ACTIONS = {
    "box": (
        spaces.Box(np.float32([-1, -2]), np.float32([1, 4])),
        ContinuousActions((-1.0, -2.0), (1.0, 4.0)),
        jnp.array([0.5, 3.0], jnp.float32),
        np.float32([0.5, 3.0]),
    ),
    "matrix": (
        spaces.Box(-1.0, 1.0, (2, 2), np.float64),
        ContinuousActions((-1.0,) * 4, (1.0,) * 4),
        jnp.array([0.0, 0.25, 0.5, 0.75], jnp.float32),
        np.float64([[0.0, 0.25], [0.5, 0.75]]),
    ),
    "discrete": (spaces.Discrete(3), DiscreteActions(3), jnp.int32(2), np.int64(2)),
    "discrete_from_5": (
        spaces.Discrete(3, start=5),
        DiscreteActions(3),
        jnp.int32(2),
        np.int64(7),
    ),
    "multi_discrete": (
        spaces.MultiDiscrete([2, 3], start=[0, 10]),
        MultiDiscreteActions((2, 3)),
        jnp.array([1, 2], jnp.int32),
        np.int64([1, 12]),
    ),
    "multi_binary": (
        spaces.MultiBinary(3),
        MultiDiscreteActions((2, 2, 2)),
        jnp.array([1, 0, 1], jnp.int32),
        np.int8([1, 0, 1]),
    ),
    "dict": (
        spaces.Dict(arm=FLAT, hand=spaces.Discrete(2)),
        {"arm": ContinuousActions((-1.0, -1.0), (1.0, 1.0)), "hand": DiscreteActions(2)},
        {"arm": jnp.array([0.5, 0.25], jnp.float32), "hand": jnp.int32(1)},
        {"arm": np.float32([0.5, 0.25]), "hand": np.int64(1)},
    ),
}


@pytest.mark.parametrize("name", list(ACTIONS))
def test_actions_are_those_of_the_space(name):
    space, description, action, expected = ACTIONS[name]
    env, _, stepped, (got,) = step_once(action, action_space=space)
    assert env.actions == description
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
    assert space.contains(got)
    assert float(stepped.reward) == 1.0
    assert stepped.reward.dtype == jnp.float32


def test_sizes_of_actions():
    expected = {"matrix": 4, "discrete": 1, "multi_discrete": 2, "dict": {"arm": 2, "hand": 1}}
    for name, size in expected.items():
        assert GymnasiumEnv(vector(Echo(ACTIONS[name][0], FLAT))).action_size == size


def test_observations_keep_structure_and_dtype():
    space = spaces.Dict(
        image=spaces.Box(0, 255, (2, 3, 1), np.uint8),
        place=spaces.Box(-1.0, 1.0, (3,), np.float64),
        pair=spaces.Tuple([spaces.Discrete(4), spaces.MultiBinary(2)]),
    )
    env, state, stepped, _ = step_once(jnp.zeros(2), action_space=FLAT, observation_space=space)
    dtypes = {"image": "uint8", "place": "float32", "pair": ("int32", "int8")}
    assert env.observation_size == {"image": (2, 3, 1), "place": 3, "pair": ((), 2)}
    space.seed(0)
    for got in (state.obs, stepped.obs):
        assert jax.tree.map(lambda leaf: str(leaf.dtype), got) == dtypes
        expected = space.sample()
        expected = jax.tree.map(lambda x, y: np.asarray(x, y.dtype), dict(expected), got)
        jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ((False, False), (False, False)),
        ((True, False), (True, False)),
        ((False, True), (True, True)),
        ((True, True), (True, False)),  # a termination wins
    ],
)
def test_how_an_episode_ends(ends, expected):
    _, _, stepped, _ = step_once(jnp.zeros(2), action_space=FLAT, ends=ends)
    assert (bool(stepped.done), bool(stepped.info["truncation"])) == expected


# --- What is refused ------------------------------------------------------------------------


def test_gymnasium_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ImportError, match=r'pip install "eqx-ppo\[gymnasium\]"'):
        load_gymnasium("CartPole-v1", 2)


def test_environments_that_do_not_fit():
    with pytest.raises(TypeError, match=r"vector environment.*got a `Line`.*load_gymnasium"):
        GymnasiumEnv(Line())
    resetting = SyncVectorEnv([Line, Line])
    with pytest.raises(ValueError, match=r"DISABLED.*NEXT_STEP.*load_gymnasium"):
        GymnasiumEnv(resetting)
    for space in (spaces.Text(3), spaces.Sequence(spaces.Discrete(2))):
        with pytest.raises(TypeError, match=r"not arrays of one shape.*wrapper"):
            GymnasiumEnv(vector(Echo(FLAT, space)))
    with pytest.raises(TypeError, match=r"No sampler.*Expected a `Box`"):
        GymnasiumEnv(vector(Echo(spaces.Box(0, 3, (2,), np.int32), FLAT)))


def test_another_vector_environment_does_not_change_the_mode():
    """Gymnasium's vector environments of one class share their metadata."""
    mine = vector(Line(), Line())
    SyncVectorEnv([Line], autoreset_mode=AutoresetMode.NEXT_STEP)
    assert GymnasiumEnv(mine).n_envs == 2


@pytest.mark.parametrize("strategy", [PooledReset(), FreshReset()], ids=str)
def test_only_the_host_resets(strategy):
    env, _ = lines()
    config = dataclasses.replace(CONFIG, reset_strategy=strategy)
    with pytest.raises(ValueError, match=r"works with the reset strategy `HostReset\(\)` alone"):
        start_of(env, config)(jax.random.key(0))


def test_the_numbers_of_environments_agree():
    env, _ = lines()
    config = dataclasses.replace(CONFIG, n_envs=4)
    with pytest.raises(ValueError, match=r"has 3 environments, but 4 were asked for"):
        start_of(env, config)(jax.random.key(0))
    with pytest.raises(jax.errors.JaxRuntimeError, match="has 3 environments, but 1"):
        jax.block_until_ready(jax.jit(env.reset)(jax.random.key(0)))


def test_wrappers_of_this_library_are_refused():
    env, _ = lines()
    with pytest.raises(TypeError, match="use those of Gymnasium"):
        start_of(EpisodeWrapper(env, 5))(jax.random.key(0))
    pendulum = EpisodeWrapper(Pendulum(), 5)
    net = make_mlp_actor_critic(3, 1, [4], [4], key=jax.random.key(0))
    with pytest.raises(TypeError, match="`HostReset` resets a `GymnasiumEnv`"):
        new_training_state(pendulum, net, CONFIG, jax.random.key(0))
