"""The host loop around `ppo_step`: compile once, run in chunks, evaluate, log."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from eqx_ppo._checks import typed
from eqx_ppo._typing import Metrics, Tree, TreeDef
from eqx_ppo.algorithms import (
    LoggingLevel,
    TrainingState,
    evaluate,
    join_network,
    new_training_state,
    ppo_step,
    split_network,
)
from eqx_ppo.envs import Env
from eqx_ppo.networks import StatefulModule
from eqx_ppo.training._config import TrainConfig
from eqx_ppo.training._console import Console

LogFn: TypeAlias = Callable[[dict[str, float], int], None]
"""Called with flat metrics (plain floats, JSON-able) and the count of environment steps."""

CheckpointFn: TypeAlias = Callable[[TrainingState, int], None]
"""Called with the training state and the count of environment steps."""


class TrainResult(NamedTuple):
    """What `train_ppo` returns.

    - `training_state`: the state at the end; its `network` is the trained one.
    - `final_metrics`: of the last iteration and the last evaluation.
    - `eval_history`: one dict per evaluation, with its `step`.
    - `total_steps`, `total_iterations`: environment steps and iterations, exact.
    """

    training_state: TrainingState
    final_metrics: dict[str, float]
    eval_history: list[dict[str, float]]
    total_steps: int
    total_iterations: int


@typed
def train_ppo(
    env: Env,
    network: StatefulModule,
    config: TrainConfig | None = None,
    *,
    eval_env: Env | None = None,
    optimizer: optax.GradientTransformation | None = None,
    log_fn: LogFn | None = None,
    checkpoint_fn: CheckpointFn | None = None,
    initial_state: TrainingState | None = None,
) -> TrainResult:
    """Trains a network by PPO.

    The network and the state that are handed in stay usable: training works on copies.

    **Arguments:**

    - `env`: the environment to train in, written for one instance.
    - `network`: outputs a `PPONetworkOutput`, as `make_mlp_actor_critic` builds it.
    - `config`: of the run; `TrainConfig()` by default.
    - `eval_env`: the environment to evaluate in; `env` by default.
    - `optimizer`: any `optax` optimizer, instead of the one that `config.ppo` describes.
    - `log_fn`: called once per iteration, with a rising count of environment steps; where
        an evaluation took place its metrics are part of the call. Also called once before
        training with the first evaluation.
    - `checkpoint_fn`: see `TrainConfig.checkpoint_every_steps`.
    - `initial_state`: continue from this state (its weights and statistics) instead of a new
        one; `network` then only has to be of the same structure.

    **Returns:** the final state, metrics and all evaluations.
    """
    config = TrainConfig() if config is None else config
    run_key, eval_key = jax.random.split(jax.random.key(config.seed))
    task = _Task(env, env if eval_env is None else eval_env, config, optimizer)
    if initial_state is None:
        device = _compile(task, _start(task, network, run_key))
    elif split_network(network)[1] == initial_state.remainder:
        device = _compile(task, _continue(initial_state))
    else:
        raise ValueError(
            "`initial_state` was made for another network than the one given. Continue with "
            "`initial_state.network`, or leave `initial_state` out to start anew."
        )
    state = device.first()
    run = _Run(config, device, eval_key, log_fn, checkpoint_fn, int(state.counts.steps))
    state = run.loop(state)
    return TrainResult(
        training_state=state,
        final_metrics=run.latest,
        eval_history=run.eval_history,
        total_steps=int(state.counts.steps),
        total_iterations=int(state.counts.iterations),
    )


class _Task(NamedTuple):
    """What a run is made of, besides the network."""

    env: Env
    eval_env: Env
    config: TrainConfig
    optimizer: optax.GradientTransformation | None


class _Device(NamedTuple):
    """The functions that run on the device; each is compiled once in a run.

    `first` gives the state to begin with. `iterate` takes a count of iterations up to
    `iterations_per_call`, and consumes the state that it is given.
    """

    first: Callable[[], TrainingState]
    copy: Callable[[TrainingState], TrainingState]
    iterate: Callable[[TrainingState, np.int32], tuple[TrainingState, Metrics]]
    evaluate: Callable[[TrainingState, Array], Metrics]


@final
class _Compiling:
    """A compiled function, whose compilation goes on in the background until it is called.

    Bound to the shapes that it was lowered for: it never compiles again.
    """

    def __init__(self, lowered: jax.stages.Lowered):
        thread = ThreadPoolExecutor(1, thread_name_prefix="compile")
        self._compiled = thread.submit(lowered.compile)
        thread.shutdown(wait=False)

    def __call__(self, *args: object) -> Tree:
        return self._compiled.result()(*args)


def _jit_is_disabled() -> bool:
    return jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]


def _compiling(function: jax.stages.Wrapped, *args: object) -> Callable[..., Tree]:
    """Begins to compile for such arguments; under `jax.disable_jit` the function stays as it is."""
    return function if _jit_is_disabled() else _Compiling(function.lower(*args))


class _Start(NamedTuple):
    """A state to begin with: how it is made, and what it will look like.

    As flat leaves, so that no constructor of an environment's state sees a placeholder.
    """

    make: Callable[[], list[Array]]
    leaves: list[Array] | list[jax.ShapeDtypeStruct]
    treedef: TreeDef


def _start(task: _Task, network: StatefulModule, key: Array) -> _Start:
    """A new state, from a copy of the network."""
    arrays, remainder = split_network(network)
    treedefs = []

    def start(arrays, key):
        network = join_network(arrays, remainder)
        state = new_training_state(
            task.env, network, task.config.ppo, key, optimizer=task.optimizer
        )
        leaves, treedef = jax.tree.flatten(state)
        treedefs.append(treedef)
        return leaves

    if _jit_is_disabled():
        made = start(arrays, key)
        return _Start(lambda: made, made, treedefs[0])
    lowered = jax.jit(start).lower(arrays, key)
    leaves = [jax.ShapeDtypeStruct(info.shape, info.dtype) for info in lowered.out_info]
    compiled = _Compiling(lowered)
    return _Start(lambda: compiled(arrays, key), leaves, treedefs[0])


def _continue(state: TrainingState) -> _Start:
    """A copy of the state of an earlier run."""
    leaves, treedef = jax.tree.flatten(state)
    return _Start(lambda: _copied(leaves), leaves, treedef)


@jax.jit
def _copied(leaves: list[Array]) -> list[Array]:
    return [jnp.copy(leaf) for leaf in leaves]


def _compile(task: _Task, start: _Start) -> _Device:
    """Begins to compile everything that the run needs."""
    ppo, evaluation = task.config.ppo, task.config.eval
    unflatten = start.treedef.unflatten
    step = jax.jit(lambda state: ppo_step(task.env, state, ppo, task.optimizer))  # traced once

    def iterate(leaves, count):
        state = unflatten(leaves)
        metrics = jax.eval_shape(lambda state: step(state)[1], state)
        history = jax.tree.map(
            lambda leaf: jnp.zeros((ppo.iterations_per_call, *leaf.shape), leaf.dtype), metrics
        )

        def body(index, carry):
            state, history = carry
            state, metrics = step(state)
            return state, jax.tree.map(lambda all_, one: all_.at[index].set(one), history, metrics)

        state, history = jax.lax.fori_loop(0, count, body, (state, history))
        return jax.tree.leaves(state), history

    def evaluate_leaves(leaves, key):
        return evaluate(task.eval_env, unflatten(leaves).network, evaluation, key)

    iterating = _compiling(jax.jit(iterate, donate_argnums=0), start.leaves, np.int32(0))
    evaluating = jax.jit(evaluate_leaves)
    if evaluation.enabled:
        evaluating = _compiling(evaluating, start.leaves, jax.random.key(0))

    def iterate_state(state, count):
        leaves, metrics = iterating(jax.tree.leaves(state), count)
        return unflatten(leaves), metrics

    return _Device(
        first=lambda: unflatten(start.make()),
        copy=lambda state: unflatten(_copied(jax.tree.leaves(state))),
        iterate=iterate_state,
        evaluate=lambda state, key: evaluating(jax.tree.leaves(state), key),
    )


class _Pending(NamedTuple):
    """A chunk of iterations whose metrics have not been fetched yet."""

    metrics: Metrics
    first_step: int
    n_iterations: int


@final
class _Run:
    """The host side of one run: what is due when, and where the numbers go."""

    def __init__(
        self,
        config: TrainConfig,
        device: _Device,
        eval_key: Array,
        log_fn: LogFn | None,
        checkpoint_fn: CheckpointFn | None,
        steps: int,
    ):
        self.config = config
        self.device = device
        self.eval_key = eval_key
        self.log_fn = log_fn
        self.checkpoint_fn = checkpoint_fn
        self.steps = steps
        self.latest: dict[str, float] = {}
        self.eval_history: list[dict[str, float]] = []
        self._pending: _Pending | None = None
        self._console = Console(config.ppo.total_steps) if config.console else None
        self._clock = time.perf_counter()

    def loop(self, state: TrainingState) -> TrainingState:
        """Iterates until `total_steps` are reached."""
        ppo = self.config.ppo
        if self.config.eval.enabled:
            metrics = self._evaluate(state)
            self._log(metrics, self.steps)
        while self.steps < ppo.total_steps:
            before = self.steps
            count = self._iterations_to_next_stop()
            state, metrics = self.device.iterate(state, np.int32(count))
            self._flush()  # the previous chunk, while this one runs
            self._pending = _Pending(metrics, before, count)
            self.steps += count * ppo.steps_per_iteration
            self._stop_over(state, before)
        self._flush()
        return state

    def _stop_over(self, state: TrainingState, before: int) -> None:
        """Evaluates and saves where that is due."""
        last = self.steps >= self.config.ppo.total_steps
        evaluates = self.config.eval.enabled and (
            last or _passed(before, self.steps, self.config.eval.every_steps)
        )
        if evaluates:
            self._flush(lambda: self._evaluate(state))
        if self.checkpoint_fn is not None and (
            last or _passed(before, self.steps, self.config.checkpoint_every_steps)
        ):
            self._flush()
            self.checkpoint_fn(self.device.copy(state), self.steps)

    def _iterations_to_next_stop(self) -> int:
        ppo, per_iteration = self.config.ppo, self.config.ppo.steps_per_iteration
        stops = [ppo.total_steps]
        if self.config.eval.enabled:
            stops.append(_next_multiple(self.steps, self.config.eval.every_steps))
        if self.checkpoint_fn is not None:
            stops.append(_next_multiple(self.steps, self.config.checkpoint_every_steps))
        to_stop = -(-(min(stops) - self.steps) // per_iteration)
        return min(ppo.iterations_per_call, to_stop)

    def _evaluate(self, state: TrainingState) -> dict[str, float]:
        iteration = self.steps // self.config.ppo.steps_per_iteration
        key = jax.random.fold_in(self.eval_key, iteration)
        started = time.perf_counter()
        metrics = _to_floats(self.device.evaluate(state, key))
        elapsed = time.perf_counter() - started
        if LoggingLevel.THROUGHPUT in self.config.eval.logging_level:
            lifespan = metrics["eval/lifespan/mean"] * self.config.eval.n_envs
            metrics["throughput/eval_sps"] = lifespan / elapsed
        self.eval_history.append({"step": self.steps, **metrics})
        if self._console is not None:
            self._console.evaluation(self.steps, metrics)
        self._clock += elapsed
        return metrics

    def _flush(self, evaluation: Callable[[], dict[str, float]] | None = None) -> None:
        """Fetches and logs a finished chunk; an evaluation joins its last iteration."""
        if self._pending is None:
            return
        metrics, first_step, count = self._pending
        self._pending = None
        rows = {name: np.asarray(values) for name, values in metrics.items()}
        now = time.perf_counter()
        per_iteration = self.config.ppo.steps_per_iteration
        rate = count * per_iteration / (now - self._clock)
        self._clock = now
        if self._console is not None:
            self._console.rate = rate
        for index in range(count):
            row = {name: float(values[index]) for name, values in rows.items()}
            if LoggingLevel.THROUGHPUT in self.config.ppo.logging_level:
                row["throughput/train_sps"] = rate
            if index == count - 1 and evaluation is not None:
                row |= evaluation()
            self._log(row, first_step + (index + 1) * per_iteration)

    def _log(self, metrics: dict[str, float], steps: int) -> None:
        metrics = {**metrics, "total_steps": steps}
        self.latest = {**self.latest, **metrics}
        if self.log_fn is not None:
            self.log_fn(metrics, steps)


def _passed(before: int, after: int, every: int) -> bool:
    return after // every > before // every


def _next_multiple(steps: int, every: int) -> int:
    return (steps // every + 1) * every


def _to_floats(metrics: Mapping[str, Array]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}
