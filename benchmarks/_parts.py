"""The parts of this library's iteration, each compiled by itself on the real shapes."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks._environments import limited_env, sizes_of
from benchmarks._settings import Setting
from benchmarks._timing import CallRunner, LoopRunner
from benchmarks.peers.ours import make_network, ppo_config
from eqx_ppo import (
    PPOConfig,
    TrainingState,
    compiler_options,
    new_training_state,
    ppo_step,
)
from eqx_ppo.algorithms import make_optimizer
from eqx_ppo.algorithms._loss import advantages_and_targets
from eqx_ppo.algorithms._rollout import _BOOTSTRAP_CHUNK, collect
from eqx_ppo.algorithms._step import StepEnd, Stepper, bootstrap_values, renew
from eqx_ppo.algorithms._transition import Rollout
from eqx_ppo.algorithms._update import update
from eqx_ppo.envs import BatchedEnv, Env
from eqx_ppo.networks import StatefulModule


@final
class Workload(NamedTuple):
    """A setting made concrete for this library."""

    setting: Setting
    env: Env
    network: StatefulModule
    config: PPOConfig
    optimizer: optax.GradientTransformation

    def new_state(self, key: jax.Array) -> TrainingState:
        """The start of training; to be compiled, or traced alone."""
        return new_training_state(self.env, self.network, self.config, key)

    def running_state(self, key: jax.Array) -> TrainingState:
        """The same with the first episodes begun, which takes a reset for each environment."""
        state = self.new_state(key)
        stepper = self.stepper(state, state.network)
        begun = stepper.unpack(renew(stepper, stepper.pack(state.rollout_state), key))
        return dataclasses.replace(state, rollout_state=begun)

    def step(self, state: TrainingState) -> tuple[TrainingState, dict]:
        """One iteration."""
        return ppo_step(self.env, state, self.config)

    def stepper(self, state: TrainingState, network: StatefulModule) -> Stepper:
        """What a rollout of `ppo_step` would use."""
        return Stepper(
            env=BatchedEnv(self.env, state.env_spec),
            network=network,
            strategy=self.config.reset_strategy,
            levels=self.config.logging_level,
            truncation=self.config.truncation,
            staggers=True,
        )

    def collect(self, state: TrainingState, key: jax.Array) -> Rollout:
        """A rollout."""
        stepper = self.stepper(state, state.network)
        config = self.config
        return collect(stepper, state.rollout_state, config.rollout_length, config.n_segments, key)[
            1
        ]

    def update(self, state: TrainingState, rollout: Rollout, key: jax.Array) -> tuple:
        """All gradient steps on a rollout."""
        done = update(
            state.network, state.optimizer_state, rollout, self.config, self.optimizer, key
        )
        return arrays_of(done.network), done.optimizer_state, done.metrics


def make_workload(setting: Setting, seed: int = 0) -> Workload:
    """The environment, the network and the configuration of a setting."""
    env = limited_env(setting)
    config = ppo_config(setting)
    network = make_network(setting, sizes_of(env), seed)
    return Workload(setting, env, network, config, make_optimizer(config))


def jit(function: Callable, donate: tuple[int, ...] = ()) -> jax.stages.Wrapped:
    """Compiles a function as `train_ppo` would."""
    return jax.jit(function, donate_argnums=donate, compiler_options=compiler_options())


def arrays_of(tree) -> list[jax.Array]:
    """The arrays of a tree, which `jax.jit` may return (functions it may not)."""
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]


def compile_loop(work: Workload) -> jax.stages.Compiled:
    """Any number of iterations in one call: `loop(state, count)` gives state and metrics.

    The metrics are those of the last iteration, so that they have to be computed.
    """

    def loop(state, count):
        metrics = jax.eval_shape(lambda one: work.step(one)[1], state)
        start = (state, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), metrics))
        return jax.lax.fori_loop(0, count, lambda _, carry: work.step(carry[0]), start)

    state = jax.eval_shape(work.new_state, jax.eval_shape(lambda: jax.random.key(0)))
    return jit(loop, donate=(0,)).lower(state, np.int32(1)).compile()


def iteration_runner(work: Workload, loop: jax.stages.Compiled) -> LoopRunner:
    """Iterations in one compiled loop, without any host in between."""
    state = jit(work.new_state)(jax.random.key(0))
    return LoopRunner(lambda state, count: loop(state, np.int32(count))[0], state)


def part_runners(work: Workload) -> dict[str, CallRunner]:
    """Every part on the data of a real rollout."""
    key = jax.random.key(1)
    state = jit(work.running_state)(jax.random.key(0))
    rollout = jit(work.collect)(state, key)
    return {
        "env": env_runner(work, state),
        "rollout": CallRunner(jit(work.collect), state, key),
        "policy forward": CallRunner(*_forward(work, state, rollout)),
        "bootstrap": CallRunner(*_bootstrap(work, state, rollout)),
        "advantages": CallRunner(*_advantages(work, rollout)),
        "update": CallRunner(jit(work.update), state, rollout, key),
        "statistics": CallRunner(*_statistics(state, rollout)),
    }


def env_runner(work: Workload, state: TrainingState) -> CallRunner:
    """The environment alone, with random actions and no resets, from a running state."""
    shape = (work.setting.rollout_length, work.setting.n_envs, sizes_of(work.env).action)
    actions = jax.random.uniform(jax.random.key(2), shape, jnp.float32, -1.0, 1.0)
    env = BatchedEnv(work.env, state.env_spec)

    def run(env_state, actions):
        def step(env_state, action):
            env_state = env.step(env_state, action)
            return env_state, (env_state.reward, env_state.done)

        return jax.lax.scan(step, env_state, actions)

    return CallRunner(jit(run), state.rollout_state.env_state, actions)


def _forward(work: Workload, state: TrainingState, rollout: Rollout) -> tuple:
    """Both networks on one observation after the other, with sampling."""
    del work

    def run(state, obs):
        network = state.network

        def step(carry, x):
            out = network(carry, x, None)
            return out.next_state, out.output

        return jax.lax.scan(step, state.rollout_state.network_state, obs)

    return jit(run), state, rollout.transitions.obs


def _bootstrap(work: Workload, state: TrainingState, rollout: Rollout) -> tuple:
    """The values of next observations: after the last step, and where episodes are cut off.

    As many are cut off as time limits alone would.
    """
    setting, transitions = work.setting, rollout.transitions
    shape = (setting.rollout_length, setting.n_envs)
    cut = jax.random.uniform(jax.random.key(3), shape) < 1.0 / setting.episode_length

    def run(state, obs, cut):
        network, carry = state.network, state.rollout_state.network_state

        def step(_, inputs):
            x, wanted = inputs
            like = network(carry, x, None).output.value_estimates
            chunk = min(_BOOTSTRAP_CHUNK, setting.n_envs)
            return None, bootstrap_values(network, StepEnd(x, carry), wanted, like, chunk)

        last = network(carry, jax.tree.map(lambda leaf: leaf[-1], obs), None)
        return jax.lax.scan(step, None, (obs, cut))[1], last.output.value_estimates

    return jit(run), state, transitions.obs, cut


def _advantages(work: Workload, rollout: Rollout) -> tuple:
    def run(transitions):
        values = transitions.network_output.value_estimates
        return advantages_and_targets(transitions, values, work.config)

    return jit(run), rollout.transitions


def _statistics(state: TrainingState, rollout: Rollout) -> tuple:
    def run(state, extras):
        return arrays_of(state.network.update_statistics(extras))

    return jit(run), state, rollout.transitions.rollout_extras
