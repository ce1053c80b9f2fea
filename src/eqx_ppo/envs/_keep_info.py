"""A wrapper that keeps entries of `info` across resets."""

import dataclasses
from collections.abc import Mapping
from typing import final

from jaxtyping import PRNGKeyArray

from eqx_ppo import _typing
from eqx_ppo._tree import replace
from eqx_ppo._typing import Tree
from eqx_ppo.envs._action_repeat import ACTION_REPEAT_ENTRIES
from eqx_ppo.envs._history import DELAY_ENTRIES, FRAME_STACK_ENTRIES
from eqx_ppo.envs._protocol import TRUNCATION_KEYS
from eqx_ppo.envs._randomization import RANDOMIZATION_ENTRIES
from eqx_ppo.envs._wrappers import EPISODE_ENTRIES, Wrapper, carry_over

_RESERVED = (
    *TRUNCATION_KEYS,
    *EPISODE_ENTRIES,
    *ACTION_REPEAT_ENTRIES,
    *FRAME_STACK_ENTRIES,
    *DELAY_ENTRIES,
    *RANDOMIZATION_ENTRIES,
)
"""The keys of `info` that tell of one episode and have to begin anew."""


@final
@dataclasses.dataclass(frozen=True, eq=False)
class KeepInfoWrapper(Wrapper):
    """Keeps named entries of `info` from one episode to the next.

    A new episode begins with everything new, `info` included. The entries named here go on
    from the values that the last episode ended with: counters, the level of a curriculum,
    running averages. `reset` gives the values to begin with, for each environment at the start
    of training and for every evaluation.

    Works with every reset strategy. Where the next episode starts does not depend on the
    entries; an environment that wants this defines `carry_over` itself (see
    `SupportsCarryOver`).

    **Arguments:**

    - `env`: the environment to wrap.
    - `names`: keys of `info`, at least one.

    **Raises:** `TypeError` or `ValueError` for names that are no strings, are none at all, or
    are those of the truncation flags or of what this library's wrappers count with;
    `ValueError` in `reset` if `info` lacks one.

    ```python
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from eqx_ppo.envs import KeepInfoWrapper, State
    >>> class Level:
    ...     def reset(self, key):
    ...         info = {"level": jnp.zeros((), jnp.int32)}
    ...         return State(jnp.zeros(1), jnp.zeros(()), jnp.array(False), info, {})
    ...
    ...     def step(self, state, action):
    ...         level = state.info["level"] + jnp.int32(1)
    ...         return state.replace(done=jnp.array(True), info={"level": level})
    >>> env = KeepInfoWrapper(Level(), names=("level",))
    >>> fresh = env.reset(jax.random.key(0))
    >>> ended = env.step(fresh, jnp.zeros(1))
    >>> int(env.carry_over(ended, fresh).info["level"])
    1

    ```
    """

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if isinstance(self.names, str) or not all(isinstance(name, str) for name in self.names):
            raise TypeError(
                f'`names` must be a tuple of keys of `info`, as `("level",)`, but got '
                f"`{self.names!r}`."
            )
        object.__setattr__(self, "names", tuple(self.names))
        if not self.names or set(self.names) & set(_RESERVED):
            raise ValueError(
                f"`names` must be at least one key of `info` and none of {_RESERVED}, by which "
                f"wrappers count and tell how an episode ended, but got {self.names}."
            )

    def reset(self, key: PRNGKeyArray) -> _typing.EnvState:
        state = self.env.reset(key)
        missing = sorted(set(self.names) - set(state.info))
        if missing:
            raise ValueError(
                f"`KeepInfoWrapper` is to keep {missing}, but the `info` that `reset` returns has "
                f"only {sorted(state.info)}. Give each entry its first value in `reset`."
            )
        return state

    def step(self, state: _typing.EnvState, action: Tree) -> _typing.EnvState:
        return self.env.step(state, action)

    def carry_over(self, ended: _typing.EnvState, fresh: _typing.EnvState) -> _typing.EnvState:
        """Returns `fresh` with the named entries of `ended`."""
        fresh = carry_over(self.env, ended, fresh)
        return replace(fresh, info={**fresh.info, **self._kept(ended.info)})

    def _kept(self, info: Mapping[str, Tree]) -> dict[str, Tree]:
        return {name: info[name] for name in self.names}
