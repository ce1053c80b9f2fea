"""A wrapper that holds each action for several steps."""

import dataclasses
from typing import final

import jax
import jax.numpy as jnp
from jaxtyping import Array

from eqx_ppo import _typing
from eqx_ppo._tree import is_floating, replace, strong_type
from eqx_ppo._typing import Tree
from eqx_ppo.envs._protocol import episode_end
from eqx_ppo.envs._wrappers import (
    RewritingWrapper,
    with_entries,
    without_entries,
)

_LAST = "action_repeat_metrics"
_INNER = "action_repeat_inner_info"
ACTION_REPEAT_ENTRIES = (_LAST, _INNER)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class ActionRepeatWrapper(RewritingWrapper):
    """Takes `repeats` steps of the wrapped environment with each action.

    The reward is the sum over those steps; everything else is what the last one returned. So
    are the metrics, which fits those that describe a state (a speed); with `sum_metrics` they
    are summed too, which fits those that are parts of the reward, or count events. If the
    episode ends on the way, the remaining steps are not taken: the state stays the one that
    ended it. Floating-point rewards and summed metrics keep their dtype, others become float32.
    Where metrics are summed, those of the last step are kept in `info["action_repeat_metrics"]`,
    so that the wrapped environment gets its own back.

    An `EpisodeWrapper` around this one counts actions; inside it, it counts steps.

    **Arguments:**

    - `env`: the environment to wrap.
    - `repeats`: steps per action, at least 1.
    - `sum_metrics`: whether metrics are summed over the steps, as rewards are.

    **Raises:** `TypeError` or `ValueError` if `repeats` is not an integer of at least 1.

    ```python
    >>> import jax
    >>> from eqx_ppo.envs import ActionRepeatWrapper, EpisodeWrapper, Pendulum
    >>> env = ActionRepeatWrapper(EpisodeWrapper(Pendulum(), max_len=200), repeats=4)
    >>> state = env.step(env.reset(jax.random.key(0)), jax.numpy.zeros(1))
    >>> int(state.info["episode_steps"])
    4

    ```
    """

    repeats: int
    sum_metrics: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.repeats, bool) or not isinstance(self.repeats, int):
            raise TypeError(
                f"`repeats` must be a Python integer, but got `{self.repeats!r}` of type "
                f"`{type(self.repeats).__name__}`."
            )
        if self.repeats < 1:
            raise ValueError(
                f"`repeats` must be at least 1, but got {self.repeats}. Each action needs a step."
            )

    def step(self, state: _typing.EnvState, action: Tree) -> _typing.EnvState:
        def once(inner):
            given = jax.tree.map(lambda leaf: leaf, inner)  # a step may write into its dictionaries
            inner = jax.tree.map(_strong, self.env.step(given, action))
            return inner, self._totals(inner)

        def again(carry, _):
            inner, totals = carry
            terminated, truncated = episode_end(inner)
            stepped, more = once(inner)
            later = stepped, jax.tree.map(jnp.add, totals, more)
            ended = terminated | truncated
            return jax.tree.map(lambda old, new: _unless(ended, old, new), carry, later), None

        # The first step settles the dtypes, which may be others than those of `reset`.
        first = once(self._inner_state(state))
        return self._outer_state(*jax.lax.scan(again, first, length=self.repeats - 1)[0])

    def _start(self, inner: _typing.EnvState) -> _typing.EnvState:
        return self._outer_state(inner, self._totals(inner))

    def _totals(self, inner: _typing.EnvState) -> dict[str, Tree]:
        """The fields that are summed over the steps, as numbers that can be."""
        totals = {"reward": inner.reward}
        totals |= {"metrics": dict(inner.metrics)} if self.sum_metrics else {}
        return jax.tree.map(_as_float, totals)

    def _outer_state(self, inner: _typing.EnvState, totals: dict[str, Tree]) -> _typing.EnvState:
        if self.sum_metrics:
            info = with_entries(inner.info, {_LAST: inner.metrics}, _INNER, (_LAST,))
            inner = replace(inner, info=info)
        return replace(inner, **totals)

    def _inner_state(self, state: _typing.EnvState) -> _typing.EnvState:
        """The state with the metrics that the wrapped environment returned last."""
        if not self.sum_metrics:
            return state
        info = without_entries(state.info, _INNER, (_LAST,))
        return replace(state, metrics=state.info[_LAST], info=info)


def _as_float(leaf: Tree) -> Array:
    leaf = jnp.asarray(leaf)
    return leaf if is_floating(leaf) else leaf.astype(jnp.float32)


def _strong(leaf: Tree) -> Array:
    return strong_type(jnp.asarray(leaf))


def _unless(ended: Array, old: Array, new: Array) -> Array:
    # A leaf that a step leaves alone may be one that all environments share.
    return old if new is old else jnp.where(ended, old, new)
