"""Evaluation: whole episodes, counted exactly."""

import dataclasses
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo.algorithms import EvalConfig, LoggingLevel, eval_rollout, evaluate
from eqx_ppo.envs import EpisodeWrapper, ObservationActionProbe, Pendulum, State
from eqx_ppo.networks import LSTM, Normalizer, Sequential, StatefulModule, StatefulModuleOutput
from tests.algorithms.common import assert_same, compiled, differ, small_config
from tests.helpers.envs import ScriptedEnv
from tests.helpers.networks import CASES, Counter, CountingPolicy, heads


@dataclasses.dataclass(frozen=True, eq=False)
class Countdown:
    """Reward -1 per step; ends at step `ends_at` (0 for never), and is NaN afterwards."""

    ends_at: int
    bad_at: int = 0

    observation_size: ClassVar[int] = 1

    def reset(self, key):
        return self._state(jnp.zeros((), jnp.int32))

    def step(self, state, action):
        return self._state(state.data + jnp.int32(1))

    def _state(self, time):
        over = (time > self.ends_at) & (self.ends_at > 0)
        over |= (time == self.bad_at) & (self.bad_at > 0)
        reward = jnp.where(over, jnp.nan, -1.0)
        done = (time == self.ends_at) & (self.ends_at > 0)
        metrics = {"time": time.astype(jnp.float32), "pair": jnp.array([1, 2], jnp.int32) * time}
        return State(jnp.zeros(1), reward, done, {}, metrics, time)


@eqx.filter_jit
def rollout(env, network, n_envs, length, key, **options):
    return eval_rollout(env, network, n_envs, length, key, **options)


# --- What counts (case F14) -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends_at", "expected_return", "expected_length", "finished"),
    [(3, -3.0, 3, True), (0, -6.0, 6, False), (1, -1.0, 1, True), (6, -6.0, 6, True)],
)
def test_returns_and_lengths(ends_at, expected_return, expected_length, finished):
    result = rollout(Countdown(ends_at), CountingPolicy(), 2, 6, jax.random.key(0))
    np.testing.assert_array_equal(result.returns, [expected_return] * 2)
    np.testing.assert_array_equal(result.lengths, [expected_length] * 2)
    np.testing.assert_array_equal(result.finished, [finished] * 2)
    assert result.metrics == {}


def test_time_limits_end_an_episode():
    env = EpisodeWrapper(Countdown(0), 4)
    result = rollout(env, CountingPolicy(), 1, 9, jax.random.key(0))
    assert float(result.returns[0]) == -4.0
    assert int(result.lengths[0]) == 4
    assert bool(result.finished[0])


def test_episodes_of_different_length():
    """Ended environments wait for the others without counting further."""
    env = ScriptedEnv((0, 0, 1, 0, 1))
    result = rollout(env, CountingPolicy(), 32, 10, jax.random.key(0))
    pairs = set(zip(result.lengths.tolist(), result.returns.tolist(), strict=True))
    # From position 0, 1, 2, 3, 4 to the next end; the reward is the position.
    assert pairs == {(3, 3.0), (2, 3.0), (1, 2.0), (2, 7.0), (1, 4.0)}
    assert result.finished.all()
    cut = rollout(env, CountingPolicy(), 32, 2, jax.random.key(0))
    np.testing.assert_array_equal(cut.lengths, np.minimum(result.lengths, 2))
    np.testing.assert_array_equal(cut.finished, np.asarray(result.lengths) <= 2)
    np.testing.assert_array_equal(cut.returns, np.where(result.lengths == 3, 0 + 1, result.returns))


def test_a_step_that_blows_up_ends_the_episode():
    """Two good steps, then a bad one, whose reward and metrics are left out."""
    result = rollout(
        Countdown(0, bad_at=3),
        CountingPolicy(),
        1,
        6,
        jax.random.key(0),
        logging_level=LoggingLevel.ENV_METRICS,
    )
    assert float(result.returns[0]) == -2.0
    assert int(result.lengths[0]) == 3
    assert bool(result.finished[0])
    assert bool(result.invalid[0])
    assert float(result.metrics["env"]["time"][0]) == 1.5  # the mean of 1 and 2


@dataclasses.dataclass(frozen=True, eq=False)
class Fragile(ScriptedEnv):
    """A `ScriptedEnv` whose reward is NaN for a step taken at position 3."""

    def step(self, state, action):
        state = super().step(state, action)
        return state.replace(reward=jnp.where(state.reward == 3.0, jnp.nan, state.reward))


def test_blow_ups_are_reported():
    """Episodes that start at position 3 blow up at once; all others end well."""
    env = Fragile((0, 0, 1, 0, 1))
    result = rollout(env, CountingPolicy(), 32, 10, jax.random.key(0))
    whole = rollout(ScriptedEnv((0, 0, 1, 0, 1)), CountingPolicy(), 32, 10, jax.random.key(0))
    bad = np.asarray(whole.returns) == 7.0  # positions 3 and 4
    assert 0 < bad.sum() < 32
    np.testing.assert_array_equal(result.invalid, bad)
    assert result.finished.all()
    np.testing.assert_array_equal(result.lengths, np.where(bad, 1, whole.lengths))
    np.testing.assert_array_equal(result.returns, np.where(bad, 0.0, whole.returns))
    assert not whole.invalid.any()
    metrics = evaluate(env, CountingPolicy(), EvalConfig(n_envs=32), jax.random.key(0))
    np.testing.assert_allclose(metrics["eval/invalid"], bad.mean(), rtol=1e-6)
    assert float(metrics["eval/finished"]) == 1.0


def test_rewards_by_key():
    case = CASES["dict"]
    network = case.build(jax.random.key(0))
    result = rollout(case.env, network, 6, 9, jax.random.key(1))
    assert result.returns.keys() == {"arm", "leg"}
    assert set(result.lengths.tolist()) <= {2, 3, 5}
    metrics = evaluate(
        case.env, network, EvalConfig(n_envs=6, max_episode_length=9), jax.random.key(1)
    )
    total = np.asarray(result.returns["arm"] + result.returns["leg"])
    np.testing.assert_allclose(metrics["eval/episode_reward/mean"], total.mean(), rtol=1e-5)
    np.testing.assert_allclose(
        metrics["eval/episode_reward/leg/mean"], result.returns["leg"].mean(), rtol=1e-5
    )


def test_refusals():
    for sizes in ((0, 5), (5, 0)):
        with pytest.raises(
            ValueError, match=f"n_envs={sizes[0]} and max_episode_length={sizes[1]}"
        ):
            eval_rollout(Countdown(3), CountingPolicy(), *sizes, jax.random.key(0))
    with pytest.raises(TypeError, match=r"jax\.random\.key\(seed\)"):
        eval_rollout(Countdown(3), CountingPolicy(), 1, 1, 0)


# --- The carry (case C5) --------------------------------------------------------------------


class CountedAction(StatefulModule):
    """The action is the count of steps, the value too."""

    inner: CountingPolicy

    def initialize_state(self, batch_size, *, key):
        return self.inner.initialize_state(batch_size, key=key)

    def reset_state(self, prev_state):
        return self.inner.reset_state(prev_state)

    def __call__(self, state, x, rollout_extras=None):
        out = self.inner(state, x)
        return out._replace(output=out.output._replace(actions=state[:, None]))


@dataclasses.dataclass(frozen=True, eq=False)
class ActionSum:
    """Three steps; the reward is `2 ** action`, so that a return tells the actions apart."""

    observation_size: ClassVar[int] = 1

    def reset(self, key):
        return State(jnp.zeros(1), jnp.zeros(()), jnp.array(False), {}, {}, jnp.int32(0))

    def step(self, state, action):
        time = state.data + jnp.int32(1)
        return state.replace(reward=2.0 ** action[0], done=time == 3, data=time)


def test_each_episode_starts_with_a_new_carry():
    """The network sees the counts 0, 1, 2; twice, and in the same way for the same key."""
    for _ in range(2):
        result = rollout(ActionSum(), CountedAction(CountingPolicy()), 2, 9, jax.random.key(0))
        np.testing.assert_array_equal(result.returns, [1.0 + 2.0 + 4.0] * 2)
        np.testing.assert_array_equal(result.lengths, [3, 3])


def test_evaluation_starts_from_the_trained_initial_state():
    """Not from where the rollouts of training stand."""
    network = Sequential(
        [
            LSTM(1, 4, trainable_initial_state=True, key=jax.random.key(0)),
            heads(4, 1, jax.random.key(1)),
        ]
    )
    moved = eqx.tree_at(lambda n: n[0].initial_state.cell, network, jnp.full(4, 2.0))
    env = ObservationActionProbe()
    plain, other = (rollout(env, n, 4, 1, jax.random.key(2)).returns for n in (network, moved))
    obs = jax.vmap(env.reset)(
        jax.random.split(jax.random.split(jax.random.key(2), 3)[0], 4)
    ).obs  # as `eval_rollout` draws them
    for net, returns in ((network, plain), (moved, other)):
        acting = eqx.nn.inference_mode(net)
        carry = acting.initialize_state(4, key=jax.random.key(0))
        action = acting(carry, obs).output.actions
        np.testing.assert_allclose(returns, -((action - 0.5 * obs) ** 2)[:, 0], rtol=1e-4)
    assert not np.allclose(plain, other, rtol=1e-2)


def test_training_state_is_untouched():
    case = CASES["everything"]
    start, step = compiled(case.env, case.build(jax.random.key(0)), small_config())
    state, _ = step(start(jax.random.key(1)))
    before = jax.tree.map(lambda leaf: leaf.copy(), state)
    network = state.network
    first = rollout(case.env, network, 3, 8, jax.random.key(2))
    again = rollout(case.env, state.network, 3, 8, jax.random.key(2))
    assert_same(first, again)
    assert_same(state, before)
    assert_same(
        eqx.filter(network[0].statistics, eqx.is_array),
        eqx.filter(before.network[0].statistics, eqx.is_array),
    )
    np.testing.assert_array_equal(
        state.rollout_state.network_state[2].buffer, before.rollout_state.network_state[2].buffer
    )


# --- Acting ---------------------------------------------------------------------------------


def lopsided():
    """A network on one feature whose policy is not symmetric about 0."""
    network = Sequential([Normalizer(1), heads(1, 1, jax.random.key(3))])
    bias = jnp.array([0.3, -0.5])
    return eqx.tree_at(lambda n: n[1].action[0].bias, network, bias)


def test_deterministic_acts_by_the_mode():
    """Against NumPy: one step from observation -1 or 1, action tanh(mean)."""
    network = lopsided()
    result = rollout(ObservationActionProbe(), network, 64, 5, jax.random.key(0))
    dense = network[1].action[0]
    kernel, bias = float(dense.kernel[0, 0]), float(dense.bias[0])
    possible = [-((np.tanh(0.1 * x * kernel + bias) - 0.5 * x) ** 2) for x in (-1.0, 1.0)]
    distance = np.abs(np.asarray(result.returns)[:, None] - possible)
    assert distance.min(axis=1).max() < 1e-6
    assert (distance.argmin(axis=1) == 0).any()
    assert (distance.argmin(axis=1) == 1).any()


def test_sampled_acts_by_samples():
    network = lopsided()
    env = ObservationActionProbe()
    sampled, again, other = (
        rollout(env, network, 64, 5, jax.random.key(seed), deterministic=False).returns
        for seed in (0, 0, 1)
    )
    assert len(set(sampled.tolist())) == 64
    np.testing.assert_array_equal(sampled, again)
    assert not np.array_equal(sampled, other)
    mode = rollout(env, network, 64, 5, jax.random.key(0)).returns
    assert len(set(mode.tolist())) == 2
    assert network[1].action[-1].inference is False


def test_keys_choose_the_episodes():
    env = EpisodeWrapper(Pendulum(), 5)
    network = Sequential([heads(3, 1, jax.random.key(3))])
    first, again, other = (
        rollout(env, network, 4, 10, jax.random.key(seed)).returns for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.isclose(first, other).any()
    raw = rollout(env, network, 4, 10, jax.random.PRNGKey(0)).returns
    np.testing.assert_array_equal(raw, first)


# --- Metrics --------------------------------------------------------------------------------


class Reporting(StatefulModule):
    """Reports the count of its carry."""

    inner: CountedAction

    def initialize_state(self, batch_size, *, key):
        return self.inner.initialize_state(batch_size, key=key)

    def reset_state(self, prev_state):
        return self.inner.reset_state(prev_state)

    def __call__(self, state, x, rollout_extras=None):
        out = self.inner(state, x)
        return StatefulModuleOutput(out.output, out.next_state, metrics={"count": state})


def test_metrics_are_means_over_the_episode():
    """Episodes of 3 steps: the environment's clock reads 1, 2, 3 and the carry 0, 1, 2."""
    result = rollout(
        Countdown(3),
        Reporting(CountedAction(CountingPolicy())),
        2,
        6,
        jax.random.key(0),
        logging_level=LoggingLevel.ENV_METRICS | LoggingLevel.NETWORK_METRICS,
    )
    np.testing.assert_allclose(result.metrics["env"]["time"], [2.0, 2.0])
    np.testing.assert_allclose(result.metrics["env"]["pair"], [[2.0, 4.0]] * 2)
    np.testing.assert_allclose(result.metrics["net"]["count"], [1.0, 1.0])


def test_summary():
    env = ScriptedEnv((0, 0, 1, 0, 1))
    config = EvalConfig(
        n_envs=32,
        max_episode_length=2,
        logging_percentiles=(0, 50, 100),
        logging_level=LoggingLevel.NETWORK_METRICS,
    )
    network = Sequential([Counter(), heads(1, 1, jax.random.key(0))])
    metrics = evaluate(env, network, config, jax.random.key(0))
    result = rollout(env, network, 32, 2, jax.random.key(0))
    assert all(jnp.shape(value) == () for value in metrics.values())
    for name, values in (("episode_reward", result.returns), ("lifespan", result.lengths)):
        expected = np.asarray(values, np.float64)
        np.testing.assert_allclose(metrics[f"eval/{name}/mean"], expected.mean(), rtol=1e-6)
        np.testing.assert_allclose(metrics[f"eval/{name}/std"], expected.std(), rtol=1e-6)
        for level in (0, 50, 100):
            np.testing.assert_allclose(
                metrics[f"eval/{name}/p{level}"], np.percentile(expected, level), rtol=1e-6
            )
    np.testing.assert_allclose(metrics["eval/finished"], np.mean(result.finished))
    assert 0 < float(metrics["eval/finished"]) < 1
    assert "eval/net/1/action/1/entropy/mean" in metrics


def test_deterministic_and_sampled_summaries_differ():
    network = Sequential([heads(1, 1, jax.random.key(3))])
    means = [
        evaluate(
            ObservationActionProbe(),
            network,
            EvalConfig(n_envs=8, max_episode_length=2, deterministic=deterministic),
            jax.random.key(0),
        )
        for deterministic in (True, False)
    ]
    assert differ(*means)
