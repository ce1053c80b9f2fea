"""Warnings about time limits: where there is none, and where two flags disagree."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ppo.algorithms import new_training_state, ppo_step
from eqx_ppo.envs import (
    DiscountProbe,
    EpisodeWrapper,
    Pendulum,
    Recall,
    State,
    TimeLimitWarning,
    TruncationProbe,
    TwoArms,
    Wrapper,
    read_truncation,
    warn_without_time_limit,
)
from tests.algorithms.common import small_config
from tests.envs.registry import CASES
from tests.helpers.envs import ScriptedEnv
from tests.helpers.networks import heads

OWN = [env for env, _ in CASES.values() if type(env).__module__.startswith("eqx_ppo")]
OWN = [env for env in OWN if not isinstance(env, Wrapper)]
NEVER_END = (Pendulum, TruncationProbe, TwoArms)


def begin(env, config=None):
    """What a training run begins with, traced and not run."""
    network = heads(env.observation_size, 1, jax.random.key(0))
    config = small_config() if config is None else config
    return jax.eval_shape(
        lambda key: new_training_state(env, network, config, key), jax.random.key(0)
    )


def test_a_run_without_a_time_limit_warns():
    message = r"`Pendulum` reports no time limit.*EpisodeWrapper\(env, max_len\).*TimeLimitWarning"
    with pytest.warns(TimeLimitWarning, match=message):
        begin(Pendulum())


@pytest.mark.parametrize("action", ["default", "once"])
def test_it_warns_once(action):
    """Not once per trace, and not in the steps that follow."""
    env, config = ScriptedEnv((0, 1)), small_config()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)
        for _ in range(2):
            state = begin(env)
            jax.eval_shape(lambda state: ppo_step(env, state, config), state)
    assert [warning.category for warning in caught] == [TimeLimitWarning]


def test_it_can_be_silenced():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=TimeLimitWarning)
        begin(Pendulum())


@pytest.mark.parametrize("env", OWN, ids=lambda env: type(env).__name__)
def test_environments_of_the_library(env):
    """Those that end by themselves say so; those that never end are warned about."""
    state = jax.eval_shape(env.reset, jax.random.key(0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_without_time_limit(env, state)
    assert bool(caught) == isinstance(env, NEVER_END)


@pytest.mark.parametrize(
    "env",
    [
        Recall(0),
        DiscountProbe(),
        EpisodeWrapper(Pendulum(), 3),
        ScriptedEnv((0, 1), (0, 1), truncation_key="truncated"),
    ],
    ids=lambda env: type(env).__name__,
)
def test_either_flag_is_enough(env):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        begin(env)


# --- Two flags ------------------------------------------------------------------------------


def both_flags(first, second):
    info = {"truncation": jnp.asarray(first, jnp.float32), "truncated": jnp.asarray(second)}
    return State(jnp.zeros(2), jnp.zeros(2), jnp.ones(2), info, {})


def test_flags_that_disagree():
    state = both_flags([0, 1], [False, False])
    with pytest.warns(TimeLimitWarning, match="disagree.*cut off where either is set"):
        truncated = read_truncation(state)
    np.testing.assert_array_equal(truncated, [False, True])
    # Values that are not known yet cannot be compared.
    np.testing.assert_array_equal(jax.jit(read_truncation)(state), truncated)
    swapped = both_flags([0, 0], [False, True])
    np.testing.assert_array_equal(jax.jit(read_truncation)(swapped), truncated)


def test_flags_that_agree_are_no_reason_to_warn():
    np.testing.assert_array_equal(read_truncation(both_flags([0, 1], [False, True])), [False, True])
