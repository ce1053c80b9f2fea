"""How metrics of any shape and structure become named numbers (cases K3 and K7)."""

import dataclasses
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo.algorithms import EvalConfig, LoggingLevel, evaluate
from eqx_ppo.algorithms._metrics import summarize
from eqx_ppo.algorithms._ppo import _update_metrics
from eqx_ppo.algorithms._update import Updated
from eqx_ppo.envs import State
from eqx_ppo.networks import NormalTanhSampler, PPOAdapter, Sequential
from tests.algorithms.common import small_config, train
from tests.helpers.networks import CountingPolicy, heads


@dataclasses.dataclass(frozen=True, eq=False)
class Metered:
    """Episodes of 4 steps, with metrics of the clock that reads 1, 2, 3, 4 in them."""

    observation_size: ClassVar[int] = 1
    action_size: ClassVar[int] = 1

    def reset(self, key):
        return self._state(jnp.zeros((), jnp.int32))

    def step(self, state, action):
        return self._state(state.data + jnp.int32(1))

    def _state(self, time):
        clock = time.astype(jnp.float32)
        metrics = {
            "early": time < 2,
            "count": time,
            "vector": clock * jnp.array([1.0, 10.0, 100.0]),
            "nested": {"double": 2.0 * clock, "deeper": (clock, -clock)},
            "holes": jnp.where(time <= 1, jnp.nan, clock),
            "never": jnp.full((), jnp.nan, jnp.float32),
            "empty": {},
        }
        return State(jnp.zeros(1), clock, time == 4, {}, metrics, time)


EXPECTED = {  # over the clock readings 1, 2, 3, 4
    "count": [1, 2, 3, 4],
    "vector": [1, 2, 3, 4, 10, 20, 30, 40, 100, 200, 300, 400],
    "nested/double": [2, 4, 6, 8],
    "nested/deeper/0": [1, 2, 3, 4],
    "nested/deeper/1": [-1, -2, -3, -4],
    "holes": [2, 3, 4],
    "never": [np.nan],
}


@pytest.fixture(scope="module")
def iteration():
    """Metrics of a rollout of 4 steps from the reset, by two actions of mean 0, deviation 0.1."""
    sampler = NormalTanhSampler(entropy_weight=0.05, min_std=0.1)
    action, value = heads(1, 2, jax.random.key(0)).modules
    network = Sequential([PPOAdapter(action=Sequential([action[0], sampler]), value=value)])
    narrow = jnp.array([0.0, 0.0, -30.0, -30.0])  # the means, and what softplus makes 0
    network = eqx.tree_at(
        lambda n: (n[0].action[0].kernel, n[0].action[0].bias),
        network,
        (jnp.zeros((1, 4)), narrow),
    )
    level = LoggingLevel.ENV_METRICS | LoggingLevel.NETWORK_METRICS | LoggingLevel.LOSSES
    config = small_config(logging_level=level, learning_rate=0.0)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        _, (metrics,) = train(Metered(), network, config, jax.random.key(0), 1)
    return metrics


def test_metrics_of_an_environment(iteration):
    """All environments and steps of the rollout together, and all elements of an array."""
    metrics = {name: value for name, value in iteration.items() if name.startswith("env/")}
    expected = {"env/early": 0.25}
    for name, values in EXPECTED.items():
        expected[f"env/{name}/mean"] = np.mean(values)
        expected[f"env/{name}/std"] = np.std(values)
    assert metrics.keys() == expected.keys()
    assert all(value.shape == () for value in metrics.values())
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-6, err_msg=name)


def test_metrics_of_an_environment_in_evaluations():
    """First the mean over each episode, so that long ones weigh no more; then over episodes."""
    config = EvalConfig(n_envs=3, logging_level=LoggingLevel.ENV_METRICS, logging_percentiles=None)
    metrics = jax.jit(lambda key: evaluate(Metered(), CountingPolicy(), config, key))(
        jax.random.key(0)
    )
    means = {"early": 0.25, "count": 2.5, "nested/double": 5.0, "nested/deeper/1": -2.5}
    for name, mean in means.items():
        np.testing.assert_allclose(metrics[f"eval/env/{name}/mean"], mean, rtol=1e-6)
        np.testing.assert_allclose(metrics[f"eval/env/{name}/std"], 0.0, atol=1e-6)
    np.testing.assert_allclose(metrics["eval/env/vector/mean"], 2.5 * 37, rtol=1e-6)
    assert np.isnan(metrics["eval/env/holes/mean"])
    assert not any("empty" in name for name in metrics)


def test_two_metrics_of_one_name_are_refused():
    """None is lost silently."""
    one = jnp.ones(3)
    for values in ({"a/b": one, "a": {"b": one}}, {"a/b": one > 0, "a": {"b": one}}):
        with pytest.raises(ValueError, match="Two metrics are named `env/a/b`"):
            summarize("env", values)
    assert summarize("env", {"a": {"b": one}, "b": one}).keys() == {
        f"env/{name}/{part}" for name in ("a/b", "b") for part in ("mean", "std")
    }


def test_percentiles_of_gradient_steps_add_nothing_else():
    """Also where a sampler's name begins like a percentile."""
    config = small_config(logging_percentiles=(0, 100))
    values = {"push": jnp.array([1.0, 4.0]), "pull": jnp.array([2.0, 2.0])}
    updated = Updated(None, None, jnp.uint32(0), {"losses/actor": values})
    metrics = _update_metrics(updated, config)
    expected = {"push": 2.5, "push/p0": 1.0, "push/p100": 4.0}
    expected |= {"pull": 2.0, "pull/p0": 2.0, "pull/p100": 2.0}
    assert {name: float(value) for name, value in metrics.items()} == {
        f"losses/actor/{name}": value for name, value in expected.items()
    }


def test_numbers_that_do_not_count():
    values = jnp.array([[1.0, 2.0], [jnp.inf, 5.0], [7.0, 90.0]])
    valid = jnp.array([[True, True], [True, True], [True, False]])
    metrics = summarize("x", values, (0, 100), valid)
    kept = [1.0, 2.0, 5.0, 7.0]
    expected = {"mean": np.mean(kept), "std": np.std(kept), "p0": 1.0, "p100": 7.0}
    assert metrics.keys() == {f"x/{part}" for part in expected}
    for part, value in expected.items():
        np.testing.assert_allclose(metrics[f"x/{part}"], value, rtol=1e-6)


def test_entropy_and_its_bonus_have_opposite_signs(iteration):
    """A narrow policy: differential entropy -0.894 per action, penalty 0.05 * 2 * 0.894.

    Deviation 0.1 around 0: log(0.1) + log(2 pi e) / 2 = -0.8836 for the normal distribution,
    and E log(1 - tanh(u)^2) = -E u^2 = -0.01 for the tanh.
    """
    entropy = iteration["net/0/action/1/entropy/mean"]
    np.testing.assert_allclose(entropy, 2 * -0.8936, atol=1e-3)
    np.testing.assert_allclose(iteration["losses/regularization"], -0.05 * entropy, rtol=1e-5)
