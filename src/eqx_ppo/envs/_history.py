"""Wrappers that show observations of earlier steps."""

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import final

import jax
import jax.numpy as jnp
from jaxtyping import Array

from eqx_ppo import _typing
from eqx_ppo._tree import can_hold, replace, strong_type
from eqx_ppo._typing import Tree
from eqx_ppo.envs._wrappers import (
    RewritingWrapper,
    with_entries,
    without_entries,
)

_NEWEST = "frame_stack_newest"
_NEWEST_INNER = "frame_stack_inner_info"
FRAME_STACK_ENTRIES = (_NEWEST, _NEWEST_INNER)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class FrameStackWrapper(RewritingWrapper):
    """Shows the last `n_frames` observations at once.

    Every leaf of the observation is joined along its last axis, the oldest frame first: leaves
    `[..., D]` become `[..., n_frames * D]`, scalars become `[n_frames]`. Dtypes stay. At the
    start of an episode all frames are the first observation.

    The newest frame is kept in `info["frame_stack_newest"]`, so that the wrapped environment
    gets its own observation back at every step.

    **Arguments:**

    - `env`: the environment to wrap.
    - `n_frames`: the number of frames, at least 1.

    **Raises:** `TypeError` or `ValueError` if `n_frames` is not an integer of at least 1.

    ```python
    >>> import jax
    >>> from eqx_ppo.envs import FrameStackWrapper, Pendulum
    >>> env = FrameStackWrapper(Pendulum(), n_frames=4)
    >>> env.observation_size, env.reset(jax.random.key(0)).obs.shape
    (12, (12,))

    ```
    """

    n_frames: int

    def __post_init__(self) -> None:
        _check_count("n_frames", self.n_frames)

    @property
    def observation_size(self) -> Tree:
        """That of the wrapped environment, with the last axis `n_frames` times as long.

        **Raises:** `ValueError` if the wrapped environment's is not that of its observations.
        """
        size = self.env.observation_size  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(size, int):
            return size * self.n_frames
        obs = jax.eval_shape(self.env.reset, jax.random.key(0)).obs
        try:
            return _times(size, obs, self.n_frames)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"`observation_size` of the environment in `FrameStackWrapper` is {size}, which "
                f"does not describe its observations, {jax.tree.map(jnp.shape, obs)}. Give the "
                "number of features, or the shape, of each leaf."
            ) from error

    def step(self, state: _typing.EnvState, action: Tree) -> _typing.EnvState:
        inner = self.env.step(self._inner_state(state), action)

        def push(stack, frame):
            frame = _as_frame(frame)
            return jnp.concatenate([stack[..., frame.shape[-1] :], frame], axis=-1)

        return self._outer_state(inner, jax.tree.map(push, state.obs, inner.obs))

    def _start(self, inner: _typing.EnvState) -> _typing.EnvState:
        def repeat(frame):
            return jnp.concatenate([_as_frame(frame)] * self.n_frames, axis=-1)

        return self._outer_state(inner, jax.tree.map(repeat, inner.obs))

    def _outer_state(self, inner: _typing.EnvState, stack: Tree) -> _typing.EnvState:
        entries = {_NEWEST: inner.obs}
        info = with_entries(inner.info, entries, _NEWEST_INNER, (_NEWEST,))
        return replace(inner, obs=stack, info=info)

    def _inner_state(self, state: _typing.EnvState) -> _typing.EnvState:
        info = without_entries(state.info, _NEWEST_INNER, (_NEWEST,))
        return replace(state, obs=state.info[_NEWEST], info=info)


_QUEUE = "observation_delay_queue"
_QUEUE_INNER = "observation_delay_inner_info"
DELAY_ENTRIES = (_QUEUE, _QUEUE_INNER)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class ObservationDelayWrapper(RewritingWrapper):
    """Shows the observation of `delay` steps ago.

    Until the episode is that old, the observation is `initial_value` or, without one, the
    first observation: a sensor that had settled. Any pytree of arrays is delayed as a whole;
    dtypes stay. Rewards and ends of episodes are not delayed.

    The observations that are still to be shown are in `info["observation_delay_queue"]`. A
    `Delay` in front of a network does the same to the network; here the delay belongs to the
    task, and everyone who acts in it has it.

    **Arguments:**

    - `env`: the environment to wrap.
    - `delay`: in steps, at least 1.
    - `initial_value`: what every element shows at first; `None` for the first observation.

    **Raises:** `TypeError` or `ValueError` if `delay` is not an integer of at least 1, or
    `initial_value` not a finite number; `ValueError` in `reset` if an observation's dtype cannot
    hold it.

    ```python
    >>> import jax
    >>> from eqx_ppo.envs import ObservationDelayWrapper, Pendulum
    >>> env = ObservationDelayWrapper(Pendulum(), delay=2)
    >>> first = env.reset(jax.random.key(0))
    >>> second = env.step(first, jax.numpy.ones(1))
    >>> bool((second.obs == first.obs).all())
    True

    ```
    """

    delay: int
    initial_value: float | None = None

    def __post_init__(self) -> None:
        _check_count("delay", self.delay)
        value = self.initial_value
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"`initial_value` must be a number or `None`, but got `{value!r}`.")
        if not math.isfinite(value):
            raise ValueError(f"`initial_value` must be finite, but got {value}.")

    def step(self, state: _typing.EnvState, action: Tree) -> _typing.EnvState:
        inner = self.env.step(self._inner_state(state), action)
        queue = state.info[_QUEUE]
        oldest = jax.tree.map(lambda frames: frames[0], queue)

        def push(frames, frame):
            return jnp.concatenate([frames[1:], jnp.asarray(frame)[None]])

        return self._outer_state(inner, oldest, jax.tree.map(push, queue, inner.obs))

    def _start(self, inner: _typing.EnvState) -> _typing.EnvState:
        """The queue ends with the first observation, and shows what comes before it."""

        def before(frame):
            frame = strong_type(jnp.asarray(frame))
            if self.initial_value is None:
                return frame
            if not can_hold(frame.dtype, self.initial_value):
                raise ValueError(
                    f"`ObservationDelayWrapper` cannot show {self.initial_value} in an "
                    f"observation of dtype {frame.dtype}. Give a whole number in its range."
                )
            return jnp.full_like(frame, self.initial_value)

        def fill(frame):
            earlier = jnp.broadcast_to(before(frame), (self.delay - 1, *jnp.shape(frame)))
            return jnp.concatenate([earlier, strong_type(jnp.asarray(frame))[None]])

        shown, queue = jax.tree.map(before, inner.obs), jax.tree.map(fill, inner.obs)
        return self._outer_state(inner, shown, queue)

    def _outer_state(self, inner: _typing.EnvState, shown: Tree, queue: Tree) -> _typing.EnvState:
        info = with_entries(inner.info, {_QUEUE: queue}, _QUEUE_INNER, (_QUEUE,))
        return replace(inner, obs=shown, info=info)

    def _inner_state(self, state: _typing.EnvState) -> _typing.EnvState:
        newest = jax.tree.map(lambda frames: frames[-1], state.info[_QUEUE])
        info = without_entries(state.info, _QUEUE_INNER, (_QUEUE,))
        return replace(state, obs=newest, info=info)


def _as_frame(leaf: Tree) -> Array:
    leaf = strong_type(jnp.asarray(leaf))
    return leaf[None] if leaf.ndim == 0 else leaf


def _times(size: Tree, obs: Tree, count: int) -> Tree:
    """The size of `count` frames: a number of features, a shape, or a container of those.

    Whether a tuple is a shape or has a size for each part of the observation, `obs` tells.
    """
    if isinstance(size, Mapping):
        return {name: _times(part, obs[name], count) for name, part in size.items()}
    if isinstance(obs, (tuple, list)):
        return tuple(_times(*pair, count) for pair in zip(size, obs, strict=True))
    if isinstance(size, (tuple, list)):
        return (*size[:-1], size[-1] * count) if size else (count,)
    return size * count


def _check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"`{name}` must be a Python integer, but got `{value!r}` of type "
            f"`{type(value).__name__}`."
        )
    if value < 1:
        raise ValueError(
            f"`{name}` must be at least 1, but got {value}. Without a history use the environment "
            "as it is."
        )
