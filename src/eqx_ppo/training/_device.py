"""What a run does on the device: functions that are compiled once, in the background."""

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PRNGKeyArray

from eqx_ppo._typing import EnvState, Metrics, Tree, TreeDef
from eqx_ppo.algorithms import (
    TrainingState,
    evaluate,
    join_network,
    new_training_state,
    ppo_step,
    split_network,
)
from eqx_ppo.envs import Env, SupportsOwnResets, Wrapper
from eqx_ppo.networks import StatefulModule
from eqx_ppo.training._checkpoint import NetworkTemplate, StateTemplate, state_paths
from eqx_ppo.training._compiler_options import compiler_options
from eqx_ppo.training._config import TrainConfig
from eqx_ppo.training._packed_state import open_state, pack_state, unpack_state


class Task(NamedTuple):
    """What a run is made of, besides the network."""

    env: Env
    eval_env: Env
    config: TrainConfig
    optimizer: optax.GradientTransformation | None

    def traced_once(self) -> "Task":
        """The same task, whose environments are traced once for all that is compiled of them."""
        env = _traced_once(self.env)
        is_same = self.eval_env is self.env
        return self._replace(env=env, eval_env=env if is_same else _traced_once(self.eval_env))


def _traced_once(env: Env) -> Env:
    return env if isinstance(env, SupportsOwnResets) else _TracedOnce(env)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class _TracedOnce(Wrapper):
    """Remembers how `reset` and `step` were traced; physics takes seconds to trace.

    For the length of one run: whoever changes an environment later finds it changed.
    """

    # Functions of their own: JAX would keep what it traced of equal ones beyond this run. Not
    # inlined: the numbers of the model stay inside, also of a `cond`, where XLA can compute what
    # depends on them alone when it compiles.

    @functools.cached_property
    def _reset(self) -> Callable[[PRNGKeyArray], EnvState]:
        return jax.jit(lambda key: self.env.reset(key))  # noqa: PLW0108

    @functools.cached_property
    def _step(self) -> Callable[[EnvState, Tree], EnvState]:
        return jax.jit(lambda *args: self.env.step(*args))  # noqa: PLW0108

    def reset(self, key: PRNGKeyArray) -> EnvState:
        try:
            return self._reset(key)
        except TypeError:  # something that JAX cannot return, which the layout names
            return self.env.reset(key)

    def step(self, state: EnvState, action: Tree) -> EnvState:
        try:
            return self._step(state, action)
        except TypeError:
            return self.env.step(state, action)


Leaves: TypeAlias = list[Array]
"""A state of training as it goes from call to call: the leaves of what `pack_state` gives."""


class Chunk(NamedTuple):
    """What some iterations in a row have reported, one row for each.

    - `metrics`: by name.
    - `invalid`: how many steps were invalid, whether or not that is among the metrics.
    """

    metrics: Metrics
    invalid: Array


class Device(NamedTuple):
    """The functions that run on the device; each is compiled once in a run.

    `first` gives the state to begin with. `iterate` takes a count of iterations up to
    `iterations_per_call`, and consumes the state that it is given; `wait` returns when it is
    compiled. `open` waits for a state, and gives it as users know it.
    """

    first: Callable[[], Leaves]
    copy: Callable[[Leaves], Leaves]
    open: Callable[[Leaves], TrainingState]
    wait: Callable[[], None]
    iterate: Callable[[Leaves, np.int32], tuple[Leaves, Chunk]]
    evaluate: Callable[[Leaves, Array], Metrics]


@final
class _Compiling:
    """A compiled function, whose compilation goes on in the background until it is called.

    Bound to the shapes that it was lowered for: it never compiles again.
    """

    def __init__(self, lowered: jax.stages.Lowered):
        thread = ThreadPoolExecutor(1, thread_name_prefix="compile")
        self._compiled = thread.submit(lowered.compile, compiler_options())
        thread.shutdown(wait=False)

    def wait(self) -> None:
        self._compiled.result()

    def __call__(self, *args: object) -> Tree:
        return self._compiled.result()(*args)


def _jit_is_disabled() -> bool:
    return jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]


class _Function(NamedTuple):
    """A function on the device, and how to wait until it can be called at once."""

    call: Callable[..., Tree]
    wait: Callable[[], None]


def _compiling(function: jax.stages.Wrapped, *args: object) -> _Function:
    """Begins to compile for such arguments; under `jax.disable_jit` the function stays as it is."""
    if _jit_is_disabled():
        return _Function(function, lambda: None)
    compiling = _Compiling(_lower(function, *args))
    return _Function(compiling, compiling.wait)


def _lower(function: jax.stages.Wrapped, *args: object) -> jax.stages.Lowered:
    with _collector_at_rest():
        return function.lower(*args)


@contextlib.contextmanager
def _collector_at_rest() -> Iterator[None]:
    """Switches Python's cyclic garbage collector off for the whole process while JAX traces.

    Tracing physics makes millions of objects that stay until it is done; looking through them
    over and over takes a fifth of its time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# --- The state to begin with ----------------------------------------------------------------


class Start(NamedTuple):
    """A state to begin with: how it is made, and what it will look like.

    As flat leaves, so that no constructor of an environment's state sees a placeholder.
    """

    make: Callable[[], Leaves]
    leaves: list[Array] | list[jax.ShapeDtypeStruct]
    treedef: TreeDef


def new_start(task: Task, network: StatefulModule, key: Array) -> Start:
    """A new state, from a copy of the network."""
    arrays, remainder = split_network(network)

    def new_state(arrays: Tree, key: Array) -> TrainingState:
        return pack_state(task.env, _new_state(task, join_network(arrays, remainder), key))

    return _start(new_state, arrays, key)


def continue_from(task: Task, state: TrainingState) -> Start:
    """A copy of the state of an earlier run."""
    leaves, treedef = jax.tree.flatten(state)
    start = _start(lambda leaves: pack_state(task.env, treedef.unflatten(_copied(leaves))), leaves)
    return start._replace(leaves=[_shape_of(leaf) for leaf in start.make()])


def _shape_of(leaf: Array) -> jax.ShapeDtypeStruct:
    """With its place, if it was put there on purpose."""
    place = leaf.sharding if leaf.committed else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


def template_of(task: Task, network: StatefulModule, key: Array) -> StateTemplate:
    """What the state of such a run looks like, without computing it."""
    arrays, remainder = split_network(network)
    flatten = _Flattening(
        lambda arrays, key: _new_state(task, join_network(arrays, remainder), key)
    )
    outline = flatten if _jit_is_disabled() else functools.partial(jax.eval_shape, flatten)
    with _collector_at_rest():
        leaves = outline(arrays, key)
    template = NetworkTemplate.of(
        join_network(arrays, remainder), leaves[: len(jax.tree.leaves(arrays))]
    )
    return StateTemplate.split(template, flatten.paths, leaves, flatten.treedef)


def _new_state(task: Task, network: StatefulModule, key: Array) -> TrainingState:
    return new_training_state(task.env, network, task.config.ppo, key, optimizer=task.optimizer)


def _start(make: Callable[..., TrainingState], *args: Tree) -> Start:
    flatten = _Flattening(make)
    if _jit_is_disabled():
        made = flatten(*args)
        return Start(lambda: made, made, flatten.treedef)
    lowered = _lower(jax.jit(flatten), *args)
    compiled = _Compiling(lowered)
    return Start(lambda: compiled(*args), _leaves_of(lowered), flatten.treedef)


@final
class _Flattening:
    """A function that makes the leaves of a state, and notes what the state looks like."""

    def __init__(self, make: Callable[..., TrainingState]):
        self._make = make

    def __call__(self, *args: Tree) -> Leaves:
        state = self._make(*args)
        self.paths = state_paths(state)
        leaves, self.treedef = jax.tree.flatten(state)
        return leaves


def _leaves_of(lowered: jax.stages.Lowered) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(info.shape, info.dtype) for info in lowered.out_info]


@jax.jit
def _copied(leaves: list[Array]) -> list[Array]:
    return [jnp.copy(leaf) for leaf in leaves]


# --- The functions of a run -----------------------------------------------------------------


def compile_device(task: Task, start: Start) -> Device:
    """Begins to compile everything that the run needs."""
    evaluation, unflatten = task.config.eval, start.treedef.unflatten

    def evaluate_leaves(leaves, key):
        return evaluate(task.eval_env, unflatten(leaves).network, evaluation, key)

    iterate = jax.jit(_iterate(task, start.treedef), donate_argnums=0)
    iterating = _compiling(iterate, start.leaves, np.int32(0))
    evaluating = jax.jit(evaluate_leaves, compiler_options=compiler_options())
    if evaluation.enabled:
        evaluating = _compiling(evaluating, start.leaves, jax.random.key(0)).call

    return Device(
        first=start.make,
        copy=_copied,
        open=lambda leaves: open_state(task.env, unflatten(leaves)),
        wait=iterating.wait,
        iterate=iterating.call,
        evaluate=evaluating,
    )


def _iterate(task: Task, treedef: TreeDef) -> Callable[[list[Array], Array], Tree]:
    """Some iterations in a row, on the leaves of a state."""
    env, ppo = task.env, task.config.ppo

    @jax.jit  # traced once
    def step(packed):
        state, metrics = ppo_step(env, unpack_state(env, packed), ppo, task.optimizer)
        return pack_state(env, state), metrics

    def step_with_report(state):
        before = state.counts.invalid_steps.low
        state, metrics = step(state)
        return state, Chunk(metrics, state.counts.invalid_steps.low - before)

    def iterate(leaves, count):
        state = treedef.unflatten(leaves)
        report = jax.eval_shape(lambda state: step_with_report(state)[1], state)
        history = jax.tree.map(
            lambda leaf: jnp.zeros((ppo.iterations_per_call, *leaf.shape), leaf.dtype), report
        )

        def body(index, carry):
            state, history = carry
            state, report = step_with_report(state)
            return state, jax.tree.map(lambda all_, one: all_.at[index].set(one), history, report)

        state, history = jax.lax.fori_loop(0, count, body, (state, history))
        return jax.tree.leaves(state), history

    return iterate
