"""The environment protocol, and what the algorithms read from an environment's state.

An environment is any object with `reset` and `step` for *one* environment, in the
convention of MuJoCo Playground and brax. The library vectorizes it, so there is no base
class to inherit from and nothing to register.

The convention:

- `reset(key)` and `step(state, action)` are **pure**: they depend on their arguments
  alone, draw randomness only from the key (or from keys kept in the state), and return a
  new state. `step` returns a state of exactly the structure and shapes that `reset`
  returns. Where the dtype of a leaf differs, the one that holds both is used.
- `state.obs`, actions and `state.reward` are arbitrary **pytrees** of arrays. A reward
  dictionary gives advantages per key.
- `state.done` is a scalar of **any dtype** (bool, int or float); nonzero means that the
  episode has ended with this step.
- **Time limits** are told apart from failures by a flag in `state.info`, called
  `"truncation"` (Playground, brax) or `"truncated"` (Gymnasium), of any dtype. At a time
  limit both the flag *and* `done` are set. With both flags, either counts. A state without
  either never reports a time limit, which training warns about; `EpisodeWrapper` adds one,
  and an environment that ends by itself says so with a flag that is always false.
- The environment **must not reset itself**. The state that ends an episode shows the true
  last observation, from which the value of a truncated episode is bootstrapped; the
  rollout puts a fresh state in its place before the next step (see the reset strategies). An
  environment that jumps back to a start by itself would silently join two episodes. (The
  wrappers of brax and Playground that do so are recognized, and refused.)
- **Everything is new** in the next episode, `info` included. What has to outlive an episode,
  such as the level of a curriculum, is kept by `KeepInfoWrapper` or by a method `carry_over`
  (see `SupportsCarryOver`).
- `step` may depend on whatever the environment keeps in its own fields and in `info`. It
  must not depend on the incoming `reward` and `done`, because wrappers change those; neither
  may `carry_over` depend on those of the ended state.
- `state` is a dataclass (`flax.struct`, `equinox.Module`, ...) or a NamedTuple that is a
  pytree, so that single fields can be replaced.
"""

import warnings
from collections.abc import Mapping
from typing import Protocol, final, runtime_checkable

import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, PRNGKeyArray

from eqx_ppo import _typing
from eqx_ppo._checks import typed
from eqx_ppo._typing import Tree

TRUNCATION_KEYS = ("truncation", "truncated")
"""The keys of `info` under which a time limit is reported."""


@final
class TimeLimitWarning(UserWarning):
    """Something about an environment's time limit is probably not what was meant.

    Given once where training begins, for an environment that reports none. To silence it:

    ```python
    warnings.filterwarnings("ignore", category=TimeLimitWarning)
    ```
    """


@runtime_checkable
class EnvState(Protocol):
    """What the library reads from the state of an environment.

    The state may have any further fields (physics data, counters, keys); they belong to
    the environment. Fields are replaced through the dataclass or NamedTuple machinery, so
    a `replace` method is customary, but not needed.
    """

    @property
    def obs(self) -> Tree:
        """The observation: a pytree of arrays."""
        ...

    @property
    def reward(self) -> Tree:
        """The reward of the step that led here: a scalar, or a pytree of scalars."""
        ...

    @property
    def done(self) -> Tree:
        """A scalar of any dtype; nonzero where the episode ended, for whatever reason."""
        ...

    @property
    def info(self) -> Mapping[str, Tree]:
        """A plain `dict` of arrays, with the truncation flag if there is a time limit."""
        ...

    @property
    def metrics(self) -> Mapping[str, Tree]:
        """A dictionary of arrays to be logged."""
        ...


@runtime_checkable
class Env(Protocol):
    """One environment; see the top of this module for the convention.

    Environments are closed over by compiled functions, so they must be immutable and are
    told apart by identity.
    """

    def reset(self, key: PRNGKeyArray, /) -> EnvState:
        """Returns the first state of a new episode."""
        ...

    def step(self, state: _typing.EnvState, action: Tree, /) -> EnvState:
        """Returns the state after one action."""
        ...


@runtime_checkable
class SupportsStagger(Protocol):
    """An environment whose fresh states can be spread over the length of an episode.

    Training begins with all environments at the start of an episode. With a time limit
    they would also all end in the same step, again and again; `stagger` avoids that.
    """

    def stagger(self, state: _typing.EnvState, key: PRNGKeyArray, /) -> _typing.EnvState:
        """Moves the state of one environment to a random moment of its episode."""
        ...


@runtime_checkable
class SupportsCarryOver(Protocol):
    """An environment that takes something along from one episode to the next.

    After a step that ends an episode, whatever the reset strategy, the fresh state is the
    result of `carry_over`. Counters of a curriculum are kept in this way, and a level that
    has been reached can change where the next episode starts.
    """

    def carry_over(self, ended: _typing.EnvState, fresh: _typing.EnvState, /) -> _typing.EnvState:
        """Returns `fresh`, with what is to be kept of `ended`, for one environment.

        **Arguments:**

        - `ended`: the state that ended the episode; if the step that led to it was not valid
            (something became non-finite), the state before it.
        - `fresh`: the state that the reset strategy gave. Returned itself, nothing is kept.
        """
        ...


@typed
def read_done(state: EnvState) -> Bool[Array, "..."]:
    """Whether the episode ended, as booleans of the shape of `state.done`.

    **Arguments:**

    - `state`: the state of one environment or of a batch, with any leading axes.

    **Returns:** true where `state.done` is nonzero.
    """
    return jnp.asarray(state.done).astype(jnp.bool_)


@typed
def read_truncation(state: EnvState) -> Bool[Array, "..."]:
    """Whether the episode was cut off by a time limit, in the shape of `state.done`.

    **Arguments:**

    - `state`: the state of one environment or of a batch, with any leading axes.

    **Returns:** true where `info["truncation"]` or `info["truncated"]` is nonzero,
    whichever the environment has, or either of both; false everywhere if it has neither.

    **Raises:** `ValueError` if a flag has another shape than `done`.

    **Warns:** `TimeLimitWarning` if the environment has both flags and they disagree. (Only
    outside of compiled functions, where the values can be seen.)
    """
    shape = jnp.shape(state.done)
    flags = []
    for name in TRUNCATION_KEYS:
        if name in state.info:
            flag = jnp.asarray(state.info[name])
            if flag.shape != shape:
                raise ValueError(
                    f'`info["{name}"]` must have the shape of `done`, {shape}, but has '
                    f"{flag.shape}. Both are scalars for one environment."
                )
            flags.append(flag.astype(jnp.bool_))
    if len(flags) < 2:
        return flags[0] if flags else jnp.zeros(shape, jnp.bool_)
    disagree = flags[0] ^ flags[1]
    if not isinstance(disagree, Tracer) and bool(jnp.any(disagree)):
        warnings.warn(
            'The environment has both `info["truncation"]` and `info["truncated"]`, and they '
            "disagree. An episode counts as cut off where either is set: write both from one "
            "value, or keep one.",
            TimeLimitWarning,
            stacklevel=2,
        )
    return flags[0] | flags[1]


@typed
def episode_end(state: EnvState) -> tuple[Bool[Array, "..."], Bool[Array, "..."]]:
    """How the episode ended, if it did.

    Because `done` is set at a time limit too, a step that sets both is a truncation. At
    most one of the two results is true; the episode ended where either is.

    **Arguments:**

    - `state`: the state of one environment or of a batch, with any leading axes.

    **Returns:** `(terminated, truncated)`, booleans of the shape of `done`: the episode
    came to its own end, and nothing follows; or a time limit cut it off, and the value of
    the last observation stands for what would have followed.

    **Raises:** `ValueError` if a truncation flag has another shape than `done`.
    """
    truncated = read_truncation(state)
    return read_done(state) & ~truncated, truncated


def warn_without_time_limit(env: Env, state: EnvState) -> None:
    """Warns if an environment has no way to report a time limit.

    `new_training_state` calls this, so that a run warns once, before it begins.

    **Arguments:**

    - `env`: an environment.
    - `state`: any of its states, or a batch of them.

    **Warns:** `TimeLimitWarning` if `info` has no truncation flag.
    """
    if any(name in state.info for name in TRUNCATION_KEYS):
        return
    warnings.warn(
        f"The environment `{type(env).__name__}` reports no time limit: its `info` has neither "
        '"truncation" nor "truncated". So every `done` counts as a termination, and an episode '
        "without one goes on for ever. If there is a limit, add it with "
        "`EpisodeWrapper(env, max_len)`. If episodes end by themselves, say so with an "
        '`info["truncation"]` that is always false, or ignore `TimeLimitWarning` with the '
        "`warnings` module.",
        TimeLimitWarning,
        stacklevel=2,
    )


def check_info(info: Mapping[str, Tree]) -> None:
    """Refuses mappings that are no plain `dict`: for JAX they are of another structure."""
    if type(info) is not dict:
        raise TypeError(
            f"`info` of a state must be a plain `dict`, but is a `{type(info).__name__}`. Wrappers "
            "and resets put entries into new ones. Return `dict(info)`."
        )


def check_state(state: EnvState) -> None:
    """Refuses something that is no state, and the state of an environment that resets itself.

    The latter is recognized by what the wrappers of brax and Playground keep in `info`.
    """
    if not isinstance(state, EnvState):
        raise TypeError(
            "`reset` and `step` of an environment must return a state with the fields `obs`, "
            f"`reward`, `done`, `info` and `metrics`, but returned a `{type(state).__name__}`. "
            "`eqx_ppo.envs.State` is a record of these."
        )
    check_info(state.info)
    first = {"first_obs", "first_state", "first_pipeline_state"} & set(state.info)
    marks = first if len(first) > 1 else set()
    marks |= {name for name in state.info if str(name).startswith("AutoResetWrapper_")}
    if marks:
        raise ValueError(
            f"The environment resets itself inside `step`: its `info` holds {sorted(marks)}, as a "
            "wrapper for automatic resets leaves it. Every episode would be reset twice, and the "
            "true last observation would be lost. Give the environment inside of that wrapper: "
            "resets are the rollout's work."
        )
