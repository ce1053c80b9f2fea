"""What `check_env` runs an environment through, and how it compares what comes out.

A `Trial` holds one environment, random actions, and the results of running it alone and in a
batch, each computed when a rule first asks for it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jaxtyping import Array

from eqx_ppo._compare import Difference, as_numpy
from eqx_ppo._tree import tree_where
from eqx_ppo._typing import EnvState, Tree
from eqx_ppo.envs._batched import BatchedEnv, EnvSpec, env_spec
from eqx_ppo.envs._conformance._actions import Sampler
from eqx_ppo.envs._conformance._history import Episodes, run_episodes
from eqx_ppo.envs._conformance._program import Programs, n_operations, program_of
from eqx_ppo.envs._conformance._rounding import (
    not_identical,
    nudged,
    slack_of_nudge,
    slack_of_spread,
    unlike,
)
from eqx_ppo.envs._conformance._sketch import Sketch, sketch, with_paths
from eqx_ppo.envs._protocol import Env, SupportsCarryOver, SupportsStagger
from eqx_ppo.envs._wrappers import carry_over, stagger

_LARGE = 1500  # operations; running more of them one by one takes minutes
_STEPS_BEFORE = 2  # to the middle of an episode


class Size(NamedTuple):
    """How large the trial is."""

    n_envs: int
    n_steps: int


class Stepped(NamedTuple):
    """What tracing `step` shows.

    - `sketch`: of the state that it returns.
    - `written`: leaves of the state that it was given into which it wrote.
    """

    sketch: Sketch
    written: tuple[str, ...]


@final
class Trial:
    """One environment under test, and (lazily) what it does."""

    def __init__(self, env: Env, sampler: Sampler, key: Array, size: Size):
        self.env = env
        self.size = size
        self._sampler = sampler
        self._reset_key, self._action_key = jax.random.split(key)
        self._first_end: tuple[EnvState, np.ndarray] | None = None

    # --- Traced only ----------------------------------------------------------------------

    @functools.cached_property
    def abstract_key(self) -> jax.ShapeDtypeStruct:
        """One key, as `reset` gets it."""
        return jax.eval_shape(lambda: self._reset_key)

    @functools.cached_property
    def abstract_action(self) -> Tree:
        """One action, as `step` gets it."""
        batch = jax.eval_shape(self._sampler, self.keys)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), batch)

    @functools.cached_property
    def reset_sketch(self) -> Sketch:
        """The state that `reset` returns."""
        return sketch(self.env.reset, self.abstract_key)

    @functools.cached_property
    def stepped(self) -> Stepped:
        """What `step` does to such a state."""
        before = self.reset_sketch
        written = []

        def step(leaves, action):
            state = jax.tree.unflatten(before.treedef, leaves)
            given = dict(with_paths(state))
            after = self.env.step(state, action)
            left = dict(with_paths(state))
            names = sorted(given.keys() | left.keys())
            written.extend(name for name in names if given.get(name) is not left.get(name))
            return after

        found = sketch(step, self.abstract_leaves, self.abstract_action)
        return Stepped(found, tuple(dict.fromkeys(written)))

    @property
    def abstract_leaves(self) -> list[jax.ShapeDtypeStruct]:
        """The leaves of the state that `reset` returns."""
        return [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self.reset_sketch.leaves]

    @functools.cached_property
    def spec(self) -> EnvSpec:
        """The layout in which the library runs the environment."""

        def act(obs):
            del obs
            return self.abstract_action

        return env_spec(self.env, act)

    @functools.cached_property
    def functions(self) -> tuple[str, ...]:
        """What the environment has of `reset`, `step`, `stagger` and `carry_over`."""
        hooks = (("stagger", SupportsStagger), ("carry_over", SupportsCarryOver))
        return ("reset", "step", *(name for name, kind in hooks if isinstance(self.env, kind)))

    def trace(self, function: str) -> ClosedJaxpr:
        """One of the functions as JAX sees it, traced anew."""
        leaves, key = self.spec.leaves, self.abstract_key
        arguments = {
            "reset": (key,),
            "step": (leaves, self.abstract_action),
            "stagger": (leaves, key),
            "carry_over": (leaves, leaves),
        }
        return program_of(_on_leaves(self.env, self.spec, function), *arguments[function])

    @functools.cached_property
    def programs(self) -> Programs:
        """All of them, traced once."""
        return {function: self.trace(function) for function in self.functions}

    @property
    def is_large(self) -> bool:
        """Whether it has too many operations to run them one by one."""
        return sum(n_operations(self.programs[name]) for name in ("reset", "step")) > _LARGE

    # --- Compiled -------------------------------------------------------------------------

    @functools.cached_property
    def reset_one(self) -> Callable[[Array], EnvState]:
        """`reset`, compiled as it is."""
        return jax.jit(lambda key: self.spec.unflatten(self.spec.flatten(self.env.reset(key))))

    @functools.cached_property
    def step_one(self) -> Callable[[EnvState, Tree], EnvState]:
        """`step`, compiled as it is."""
        return jax.jit(
            lambda state, action: self.spec.unflatten(
                self.spec.flatten(self.env.step(state, action))
            )
        )

    @functools.cached_property
    def reset_all(self) -> Callable[[Array], EnvState]:
        """The resets of a batch."""
        return jax.jit(BatchedEnv(self.env, self.spec).reset)

    @functools.cached_property
    def step_all(self) -> Callable[[EnvState, Tree], EnvState]:
        """One step of a batch."""
        return jax.jit(BatchedEnv(self.env, self.spec).step)

    @functools.cached_property
    def renew(self) -> Callable[[Array, EnvState, EnvState], EnvState]:
        """Puts fresh states in the place of those that ended."""
        return jax.jit(lambda *args: tree_where(*args, single=self.spec.leaves))

    @functools.cached_property
    def row(self) -> Callable[[Tree, Array], Tree]:
        """One environment of a batch."""
        return jax.jit(lambda tree, index: jax.tree.map(lambda leaf: leaf[index], tree))

    # --- Data -----------------------------------------------------------------------------

    @functools.cached_property
    def keys(self) -> Array:
        """A key for every environment."""
        return _split(self._reset_key, 0, self.size.n_envs)

    def actions(self, step: int) -> Tree:
        """The actions of a step, one for every environment."""
        return self._sampler(_split(self._action_key, step, self.size.n_envs))

    @functools.cached_property
    def starts(self) -> EnvState:
        """The first states of a batch."""
        return self.reset_all(self.keys)

    @functools.cached_property
    def middle(self) -> EnvState:
        """States of a batch in the middle of an episode, or at the start of a new one."""
        state = self.starts
        for step in range(_STEPS_BEFORE):
            state = self.step_all(state, self.actions(step))
            state = self.renew(jnp.asarray(state.done).astype(jnp.bool_), self.starts, state)
        return state

    @functools.cached_property
    def middle_actions(self) -> Tree:
        """The actions of a batch in the middle."""
        return self.actions(_STEPS_BEFORE)

    def step_from_middle(self, state: EnvState) -> EnvState:
        """One step of a batch, always with the same actions."""
        return self.step_all(state, self.middle_actions)

    @functools.cached_property
    def after(self) -> EnvState:
        """The batch one step after the middle."""
        return self.step_from_middle(self.middle)

    @functools.cached_property
    def single(self) -> tuple[EnvState, Tree, EnvState]:
        """The first environment of `middle` alone: its state, its action, the next state."""
        state = self.row(self.middle, jnp.int32(0))
        action = self.row(self.middle_actions, jnp.int32(0))
        return state, action, self.step_one(state, action)

    def example(self, function: str) -> Tree:
        """Arguments of one of the functions."""
        state, action, _ = self.single
        if function == "reset":
            return (self.keys[0],)
        if function == "step":
            return (state, action)
        first = self.row(self.starts, jnp.int32(0))
        return (first, self.keys[0]) if function == "stagger" else (state, first)

    @functools.cached_property
    def episodes(self) -> Episodes:
        """Some episodes under random actions."""

        def advance(state, ended, step):
            if np.any(ended):
                self._first_end = self._first_end or (state, ended)
                state = self.renew(jnp.asarray(ended), self.starts, state)
            return self.step_all(state, self.actions(step))

        return run_episodes(self.spec.paths, self.starts, advance, self.size.n_steps)

    @functools.cached_property
    def kept(self) -> tuple[EnvState, np.ndarray] | None:
        """First states after the first ends, with what is carried over, and where it is.

        `None` if nothing is carried over, or if no episode ended.
        """
        self.episodes  # noqa: B018 (it finds the first end)
        batched = BatchedEnv(self.env, self.spec)
        if self._first_end is None or not batched.carried_leaves:
            return None
        state, ended = self._first_end
        return jax.jit(batched.carry_over)(state, self.starts), ended

    # --- Comparisons ----------------------------------------------------------------------

    @functools.cached_property
    def reset_slack(self) -> list[float]:
        """How far rounding may move each leaf of a reset: some of what resets differ by."""
        return [slack_of_spread(as_numpy(leaf)) for leaf in jax.tree.leaves(self.starts)]

    @functools.cached_property
    def step_slack(self) -> list[float]:
        """How far rounding may move each leaf of a step from the middle.

        Found by moving what the step starts from: contacts, for one, amplify.
        """
        moved = [self.step_from_middle(nudged(self.middle, sign)) for sign in (1.0, -1.0)]
        return [
            max(slack_of_nudge(as_numpy(new), as_numpy(old)) for new in news)
            for old, *news in zip(*map(jax.tree.leaves, (self.after, *moved)), strict=True)
        ]

    def difference(
        self, got: EnvState, expected: EnvState, slack: Sequence[float], within: str
    ) -> Difference | None:
        """The first leaf in which two states differ by more than rounding."""
        pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
        for path, (new, old), more in zip(self.spec.paths, pairs, slack, strict=True):
            text = unlike(as_numpy(new), as_numpy(old), more)
            if text:
                return Difference(within + path, text)
        return None

    def identical(self, got: EnvState, expected: EnvState, within: str) -> Difference | None:
        """The first leaf in which two states are not the same, bit by bit."""
        pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
        for path, (new, old) in zip(self.spec.paths, pairs, strict=True):
            text = not_identical(as_numpy(new), as_numpy(old))
            if text:
                return Difference(within + path, text)
        return None


def _on_leaves(env: Env, spec: EnvSpec, function: str) -> Callable[..., list[Array]]:
    """A function of an environment, from the leaves of states to those of another one."""
    state_of = spec.unflatten
    functions = {
        "reset": env.reset,
        "step": lambda leaves, action: env.step(state_of(leaves), action),
        "stagger": lambda leaves, key: stagger(env, state_of(leaves), key),
        "carry_over": lambda ended, fresh: carry_over(env, state_of(ended), state_of(fresh)),
    }
    return lambda *args: spec.flatten(functions[function](*args), function)


@functools.partial(jax.jit, static_argnums=2)
def _split(key: Array, step: int, n_envs: int) -> Array:
    return jax.random.split(jax.random.fold_in(key, step), n_envs)
