"""Environments of brax: what has to be adapted, and what is refused."""

import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eqx_ppo import (
    ContractError,
    EvalConfig,
    PPOConfig,
    TrainConfig,
    make_mlp_actor_critic,
    train_ppo,
)
from eqx_ppo.algorithms import make_sampler, unroll_env
from eqx_ppo.envs import (
    BraxEnv,
    ContinuousActions,
    DomainRandomizationWrapper,
    Env,
    EnvState,
    EpisodeWrapper,
    RewardScalingWrapper,
    check_env,
    episode_end,
    load_brax,
)
from eqx_ppo.networks import NormalTanhSampler
from tests.helpers.networks import ObservedValue

pytestmark = pytest.mark.adapters


def test_brax_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "brax", None)
    with pytest.raises(ImportError, match=r'pip install "eqx-ppo\[brax\]"'):
        load_brax("fast")


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what brax imports
    pytest.importorskip("brax")
    from brax import envs as brax_envs
    from brax.envs.wrappers import training


class Writer(brax_envs.Env):
    """Writes into the dictionaries of the state that it is given, as several of brax do."""

    observation_size, action_size, backend = 1, 1, "none"

    def reset(self, rng):
        zero = jnp.zeros(())
        return brax_envs.State(None, zero[None], zero, zero, {"n": zero}, {"last": {"n": zero}})

    def step(self, state, action):
        state.metrics.update(n=state.metrics["n"] + 1.0)
        state.info["last"]["n"] = state.metrics["n"]
        return state.replace(obs=state.metrics["n"][None], reward=1.0)


def test_nothing_is_written_into_a_state():
    env = BraxEnv(Writer())
    state = env.reset(jax.random.key(0))
    stepped = env.step(state, jnp.zeros(1))
    assert float(state.metrics["n"]) == float(state.info["last"]["n"]) == 0.0
    assert float(stepped.metrics["n"]) == float(stepped.info["last"]["n"]) == 1.0
    raw = Writer()
    state = raw.reset(jax.random.key(0))
    raw.step(state, jnp.zeros(1))
    assert float(state.metrics["n"]) == 1.0  # brax itself


def test_parameters_can_be_drawn_for_each_episode():
    """They are looked for inside of the adapter, and of wrappers around it."""

    class Gravity(Writer):
        sys = None

        def __init__(self):
            self.sys = jnp.ones(())

        def step(self, state, action):
            return super().step(state, action).replace(obs=self.sys[None])

    def randomize(key, gravity):
        return gravity * jax.random.uniform(key)

    inner = Gravity()
    env = DomainRandomizationWrapper(EpisodeWrapper(BraxEnv(inner), 3), randomize, "sys")
    state = env.step(env.reset(jax.random.key(0)), jnp.zeros(1))
    assert float(state.obs[0]) == float(state.info["randomized"][""]) != 1.0
    assert float(inner.sys) == 1.0


def test_it_keeps_the_convention():
    report = check_env(BraxEnv(Writer()), n_steps=20, allow=["keys"])
    assert "dtypes" not in str(report)  # the reward of `step` is a number of Python's
    with pytest.raises(ContractError):
        check_env(Writer(), n_steps=20, allow=["keys"])


def test_an_environment_of_brax():
    env = load_brax("fast")
    state = env.reset(jax.random.PRNGKey(0))
    assert isinstance(env, Env)
    assert isinstance(state, EnvState)
    assert (env.observation_size, env.action_size) == (2, 1)
    assert env.actions == ContinuousActions((-1.0,), (1.0,))
    assert isinstance(make_sampler(env.actions), NormalTanhSampler)
    assert env.reset_count > 0  # an attribute of the environment
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = env.nothing_of_the_kind
    assert load_brax("fast", obs_mode="dict_state").observation_size == {"state": 2}


def test_the_rollout_resets_once_and_sees_the_last_observation():
    """`fast` accelerates from rest, by 0.02 m/s in a step, where the action is positive."""
    env = EpisodeWrapper(load_brax("fast"), 4)

    class Forward(ObservedValue):
        def __call__(self, state, x, rollout_extras=None):
            out = super().__call__(state, x[:, 1:], rollout_extras)  # the value is the speed
            return out._replace(output=out.output._replace(actions=jnp.ones((x.shape[0], 1))))

    @jax.jit
    def run(key):
        state = jax.vmap(env.reset)(jax.random.split(key, 2))
        return unroll_env(env, state, Forward(), (), 9, key)[2]

    transitions = run(jax.random.key(0))
    assert transitions.truncated[:, 0].tolist() == [False, False, False, True] * 2 + [False]
    assert not transitions.terminated.any()
    n_pushes = np.array([0, 1, 2, 3, 0, 1, 2, 3, 0])
    np.testing.assert_allclose(transitions.obs[:, 0, 1], 0.02 * n_pushes, atol=1e-6)
    np.testing.assert_allclose(transitions.next_values[:, 0], 0.02 * (n_pushes + 1), atol=1e-6)


@pytest.mark.parametrize(
    "wrap",
    [
        training.VmapWrapper,
        lambda env: training.AutoResetWrapper(training.EpisodeWrapper(env, 5, 1)),
        lambda env: training.EpisodeWrapper(training.AutoResetWrapper(env), 5, 1),
        training.EvalWrapper,
    ],
)
def test_wrappers_that_vectorize_or_reset_are_refused(wrap):
    with pytest.raises(ValueError, match=r"inside brax's `\w+Wrapper`.*auto_reset=False"):
        BraxEnv(wrap(brax_envs.get_environment("fast")))


def test_the_time_limit_of_brax_is_read():
    env = BraxEnv(brax_envs.create("fast", episode_length=3, auto_reset=False))
    state, ends = env.reset(jax.random.key(0)), []
    for _ in range(3):
        state = env.step(state, jnp.ones(1))
        ends.append([bool(end) for end in episode_end(state)])
    assert ends == [[False, False], [False, False], [False, True]]


def test_what_is_refused():
    with pytest.raises(TypeError, match=r"got a `str`.*get_environment"):
        BraxEnv("fast")
    with pytest.raises(ValueError, match=r"`reachr`.*Close matches: reacher"):
        load_brax("reachr")
    with pytest.raises(ValueError, match="backend should be in"):
        load_brax("inverted_pendulum", backend="sprung")


@pytest.mark.slow
def test_an_inverted_pendulum_is_balanced():
    """A point for each step until the pole leans over; the greatest return there is, is 200."""
    env = EpisodeWrapper(load_brax("inverted_pendulum", backend="spring"), 200)
    sampler = make_sampler(env.actions, entropy_weight=1e-2)
    net = make_mlp_actor_critic(4, 1, [32, 32], [32, 32], sampler=sampler, key=jax.random.key(0))
    ppo = PPOConfig(
        n_envs=16,
        rollout_length=64,
        total_steps=122_880,
        n_epochs=8,
        n_minibatches=8,
        learning_rate=optax.linear_schedule(1.5e-3, 0.0, 120 * 64),
        gradient_clipping=0.5,
    )
    evaluation = EvalConfig(every_steps=122_880, n_envs=32, max_episode_length=200)
    config = TrainConfig(ppo=ppo, eval=evaluation, console=False)
    rows = []
    scaled = RewardScalingWrapper(env, 0.1)
    result = train_ppo(scaled, net, config, eval_env=env, log_fn=lambda row, _: rows.append(row))
    assert (env.observation_size, env.action_size) == (4, 1)
    # Its deviations may fall below 0.1, and the error grows as they do; see `replay_error`.
    assert max(row.get("losses/ratio_error", 0.0) for row in rows) < 1e-4
    assert rows[0]["eval/episode_reward/mean"] < 100.0
    assert result.final_metrics["eval/episode_reward/mean"] >= 190.0
