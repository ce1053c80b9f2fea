import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr

from eqx_ppo import EvalConfig, TrainConfig
from eqx_ppo.envs import Pendulum, Wrapper
from eqx_ppo.training._device import Task, _iterate, _lower, new_start
from tests.algorithms.common import small_config
from tests.helpers.networks import heads


@pytest.fixture
def collector():
    """Leaves the collector as it was."""
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_the_collector_rests_while_jax_traces_and_is_as_before_afterwards(
    enabled, fails, collector
):
    (gc.enable if enabled else gc.disable)()
    seen = []

    def traced(x):
        seen.append(gc.isenabled())
        if fails:
            raise ArithmeticError
        return x + 1

    try:
        lowered = _lower(jax.jit(traced), jnp.zeros(()))
    except ArithmeticError:
        assert fails
    else:
        assert lowered.compile()(jnp.zeros(())) == 1
    assert seen == [False]
    assert gc.isenabled() == enabled


@dataclasses.dataclass(frozen=True, eq=False)
class _WithModel(Wrapper):
    """Episodes start at a place that is computed from a model."""

    model: jax.Array

    def reset(self, key):
        state = self.env.reset(key)
        return state.replace(obs=state.obs + jnp.sum(jnp.sin(self.model)))

    def step(self, state, action):
        return self.env.step(state, action)


def _operands_of_branches(jaxpr):
    """The shapes that every `cond` of a program is given, loops and functions included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "cond":
            yield from (variable.aval.shape for variable in equation.invars)
        for value in equation.params.values():
            for each in value if isinstance(value, tuple) else (value,):
                if isinstance(each, ClosedJaxpr):
                    yield from _operands_of_branches(each.jaxpr)


def test_the_model_of_an_environment_stays_inside_of_its_reset():
    """What is handed to the branch that resets cannot be folded when it is compiled."""
    env = _WithModel(Pendulum(), jnp.arange(17.0))
    config = TrainConfig(ppo=small_config(), eval=EvalConfig(enabled=False), console=False)
    task = Task(env, env, config, None).traced_once()
    network = heads(env.observation_size, env.action_size, jax.random.key(0))
    start = new_start(task, network, jax.random.key(1))
    traced = jax.jit(_iterate(task, start.treedef)).trace(start.leaves, np.int32(0))
    shapes = list(_operands_of_branches(traced.jaxpr.jaxpr))
    assert (config.ppo.n_envs,) in shapes
    assert (17,) not in shapes
