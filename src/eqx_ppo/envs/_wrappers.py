"""Wrappers: an environment around an environment.

A wrapper is an immutable object that is told apart by identity, like any environment. It
leaves the wrapped environment untouched and never writes into the states it is given.
"""

import abc
import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from eqx_ppo import _typing
from eqx_ppo._keys import as_key
from eqx_ppo._tree import is_floating, replace
from eqx_ppo._typing import Tree
from eqx_ppo.envs._protocol import (
    TRUNCATION_KEYS,
    Env,
    SupportsCarryOver,
    SupportsStagger,
    check_info,
    episode_end,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Wrapper(abc.ABC):
    """The base of wrappers; subclasses define `reset` and `step`.

    Attributes that the wrapper does not have (`observation_size`, `action_size`,
    `render`, ...) are looked up on the wrapped environment.

    **Arguments:**

    - `env`: the environment to wrap.
    """

    env: Env

    @abc.abstractmethod
    def reset(self, key: PRNGKeyArray) -> _typing.EnvState:
        """Returns the first state of a new episode."""

    @abc.abstractmethod
    def step(self, state: _typing.EnvState, action: Tree) -> _typing.EnvState:
        """Returns the state after one action."""

    def stagger(self, state: _typing.EnvState, key: PRNGKeyArray) -> _typing.EnvState:
        """Staggers the wrapped environment; returns `state` as it is if that cannot be.

        This is a hook with a default, rather than an attribute that is looked up, because
        `isinstance(env, SupportsStagger)` does not see attributes that are looked up. A
        wrapper overrides it if it changes what the state looks like.
        """
        return stagger(self.env, state, key)

    def carry_over(self, ended: _typing.EnvState, fresh: _typing.EnvState) -> _typing.EnvState:
        """Lets the wrapped environment keep something; returns `fresh` if it keeps nothing.

        A hook with a default, like `stagger`, and overridden by the same wrappers.
        """
        return carry_over(self.env, ended, fresh)

    @property
    def unwrapped(self) -> Env:
        """The innermost environment, below all wrappers."""
        env = self.env
        while isinstance(env, Wrapper):
            env = env.env
        return env

    def __getattr__(self, name: str) -> Tree:
        # Not for names that `copy` and `pickle` look up before `env` is there.
        if name == "env" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"`{type(self).__name__}` has no attribute `{name}`.")
        return getattr(self.env, name)


@dataclasses.dataclass(frozen=True, eq=False)
class RewritingWrapper(Wrapper):
    """The base of wrappers whose states look like none of the wrapped environment.

    A subclass says how a state of the wrapped environment begins here, and gives back what the
    wrapped environment returned. An episode that is staggered, or that keeps something of the
    last one, begins anew in this wrapper.
    """

    @abc.abstractmethod
    def _start(self, inner: _typing.EnvState) -> _typing.EnvState:
        """A state of the wrapped environment, as the first one of an episode."""

    @abc.abstractmethod
    def _inner_state(self, state: _typing.EnvState) -> _typing.EnvState:
        """The state that the wrapped environment returned last."""

    def reset(self, key: PRNGKeyArray) -> _typing.EnvState:
        return self._start(self.env.reset(key))

    def stagger(self, state: _typing.EnvState, key: PRNGKeyArray) -> _typing.EnvState:
        return self._start(stagger(self.env, self._inner_state(state), key))

    def carry_over(self, ended: _typing.EnvState, fresh: _typing.EnvState) -> _typing.EnvState:
        start = self._inner_state(fresh)
        kept = carry_over(self.env, self._inner_state(ended), start)
        return fresh if kept is start else self._start(kept)


def stagger(env: Env, state: _typing.EnvState, key: PRNGKeyArray) -> _typing.EnvState:
    """`env.stagger(state, key)`, or `state` if `env` cannot be staggered."""
    return env.stagger(state, key) if isinstance(env, SupportsStagger) else state


def carry_over(env: Env, ended: _typing.EnvState, fresh: _typing.EnvState) -> _typing.EnvState:
    """`env.carry_over(ended, fresh)`, or `fresh` if `env` keeps nothing."""
    return env.carry_over(ended, fresh) if isinstance(env, SupportsCarryOver) else fresh


def with_entries(
    info: Mapping[str, Tree], entries: Mapping[str, Tree], hidden: str, names: tuple[str, ...]
) -> dict[str, Tree]:
    """`info` with a wrapper's own `entries`, where the wrapped environment may have such too.

    What it has under `names` (all that the wrapper ever writes) is put aside under `hidden`.
    """
    check_info(info)
    names = (*names, hidden)
    aside = {name: info[name] for name in names if name in info}
    return {**info, **entries} | ({hidden: aside} if aside else {})


def without_entries(
    info: Mapping[str, Tree], hidden: str, names: tuple[str, ...]
) -> dict[str, Tree]:
    """Undoes `with_entries`: the `info` that the wrapped environment returned."""
    rest = {name: leaf for name, leaf in info.items() if name not in (*names, hidden)}
    return rest | dict(info.get(hidden, {}))


_STEPS = "episode_steps"
_INNER = "episode_inner_info"
_WRITTEN = (_STEPS, *TRUNCATION_KEYS)
EPISODE_ENTRIES = (_STEPS, _INNER)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class EpisodeWrapper(Wrapper):
    """Cuts episodes off after `max_len` steps.

    `reset` starts a count at 0. The step that brings it to `max_len` sets `done` and the
    truncation flag, so an episode has exactly `max_len` transitions. If the wrapped
    environment terminates in that very step, the flag stays clear: termination wins. A
    truncation by the wrapped environment is kept, and also sets `done`.

    The count is `info["episode_steps"]` (int32). The flag is `info["truncation"]`, or
    `info["truncated"]` if that is what the wrapped environment has, in that environment's
    dtype (bool if it has neither; if it has both, both are written). `done` keeps its
    dtype. The wrapped environment gets its own `info` back at every step, with nothing
    added and with the values that it wrote itself.

    **Arguments:**

    - `env`: the environment to wrap. For one environment, as always.
    - `max_len`: the number of steps in an episode, at least 1.

    **Raises:** `TypeError` or `ValueError` if `max_len` is not an integer of at least 1.

    ```python
    >>> import jax
    >>> from eqx_ppo.envs import EpisodeWrapper, Pendulum
    >>> env = EpisodeWrapper(Pendulum(), max_len=200)
    >>> state = jax.jit(env.reset)(jax.random.key(0))
    >>> int(state.info["episode_steps"]), bool(state.info["truncation"])
    (0, False)
    >>> env.observation_size
    3

    ```
    """

    max_len: int

    def __post_init__(self) -> None:
        if isinstance(self.max_len, bool) or not isinstance(self.max_len, int):
            raise TypeError(
                f"`max_len` must be a Python integer, but got `{self.max_len!r}` of type "
                f"`{type(self.max_len).__name__}`."
            )
        if not 1 <= self.max_len < 2**31:
            raise ValueError(
                f"`max_len` must be at least 1 and fit 32 bits, but got {self.max_len}. For "
                "episodes without a time limit use the environment without `EpisodeWrapper`."
            )

    def reset(self, key: PRNGKeyArray) -> _typing.EnvState:
        inner = self.env.reset(key)
        return self._outer_state(inner, jnp.zeros(jnp.shape(inner.done), jnp.int32))

    def step(self, state: _typing.EnvState, action: Tree) -> _typing.EnvState:
        inner = self.env.step(self._inner_state(state), action)
        return self._outer_state(inner, state.info[_STEPS] + jnp.int32(1))

    def stagger(self, state: _typing.EnvState, key: PRNGKeyArray) -> _typing.EnvState:
        """Sets the step count of one environment uniformly in `[0, max_len)`.

        If the wrapped environment supports staggering, it is staggered too.

        **Arguments:**

        - `state`: the state of one environment, fresh from `reset`.
        - `key`: a PRNG key, another one for each environment.
        """
        inner_key, steps_key = jax.random.split(as_key(key))
        inner = stagger(self.env, self._inner_state(state), inner_key)
        shape = jnp.shape(state.info[_STEPS])
        # Not `randint`, whose two draws and keys for them are half a dozen loops to compile.
        bits = jax.random.bits(steps_key, shape, jnp.uint32)
        steps = (bits % jnp.uint32(self.max_len)).astype(jnp.int32)
        return self._outer_state(inner, steps)

    def carry_over(self, ended: _typing.EnvState, fresh: _typing.EnvState) -> _typing.EnvState:
        """Lets the wrapped environment keep something; the count starts anew."""
        start = self._inner_state(fresh)
        kept = carry_over(self.env, self._inner_state(ended), start)
        return fresh if kept is start else self._outer_state(kept, fresh.info[_STEPS])

    def _outer_state(self, inner: _typing.EnvState, steps: Int[Array, "..."]) -> _typing.EnvState:
        """Adds the count and the flag to a state of the wrapped environment."""
        terminated, truncated = episode_end(inner)
        truncated = truncated | ((steps >= self.max_len) & ~terminated)
        flags = {
            name: truncated.astype(jnp.asarray(inner.info[name]).dtype)
            for name in TRUNCATION_KEYS
            if name in inner.info
        }
        entries = {**(flags or {"truncation": truncated}), _STEPS: steps}
        info = with_entries(inner.info, entries, _INNER, _WRITTEN)
        done = (terminated | truncated).astype(jnp.asarray(inner.done).dtype)
        return replace(inner, done=done, info=info)

    def _inner_state(self, state: _typing.EnvState) -> _typing.EnvState:
        """The state with the `info` that the wrapped environment returned last."""
        return replace(state, info=without_entries(state.info, _INNER, _WRITTEN))


@final
@dataclasses.dataclass(frozen=True, eq=False)
class RewardScalingWrapper(Wrapper):
    """Multiplies every leaf of the reward by a constant.

    A scale that brings returns to the order of 1 spares the critic large targets; the
    optimal policy stays the same. Floating-point rewards keep their dtype, others become
    float32.

    **Arguments:**

    - `env`: the environment to wrap.
    - `scale`: a finite number.

    **Raises:** `TypeError` or `ValueError` if `scale` is not a finite number.

    ```python
    >>> import jax
    >>> from eqx_ppo.envs import ConstantRewardProbe, RewardScalingWrapper
    >>> env = RewardScalingWrapper(ConstantRewardProbe(), scale=0.1)
    >>> state = env.reset(jax.random.key(0))
    >>> round(float(env.step(state, jax.numpy.zeros(1)).reward), 3)
    0.1

    ```
    """

    scale: float

    def __post_init__(self) -> None:
        if isinstance(self.scale, bool) or not isinstance(self.scale, numbers.Real):
            raise TypeError(
                f"`scale` must be a Python number, but got `{self.scale!r}` of type "
                f"`{type(self.scale).__name__}`."
            )
        if not math.isfinite(self.scale):
            raise ValueError(f"`scale` must be finite, but got {self.scale}.")

    def reset(self, key: PRNGKeyArray) -> _typing.EnvState:
        return self._scaled(self.env.reset(key))

    def step(self, state: _typing.EnvState, action: Tree) -> _typing.EnvState:
        return self._scaled(self.env.step(state, action))

    def _scaled(self, state: _typing.EnvState) -> _typing.EnvState:
        def scale_leaf(leaf):
            leaf = jnp.asarray(leaf)
            leaf = leaf if is_floating(leaf) else leaf.astype(jnp.float32)
            return leaf * jnp.asarray(self.scale, leaf.dtype)

        return replace(state, reward=jax.tree.map(scale_leaf, state.reward))
