"""A memory task: no policy without memory can do better than chance."""

import dataclasses
from typing import ClassVar, NamedTuple, final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from eqx_ppo._checks import typed
from eqx_ppo._keys import as_key
from eqx_ppo._typing import KeyLike
from eqx_ppo.envs._state import State


class _RecallData(NamedTuple):
    """`cue` is -1 or 1; `time` counts the steps since the reset."""

    cue: Float[Array, ""]
    time: Int[Array, ""]


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Recall:
    """Remember a cue for some time, then report it.

    At the reset the observation shows a cue, -1 or 1 with equal probability. `delay` blank
    observations follow, then a "go" flag. The action taken on "go" is rewarded with
    `cue * action`, and the episode terminates; an episode has `delay + 2` steps.

    - `obs`: float32 `[2]`, `(cue, go)`: `(+-1, 0)` at the reset, `(0, 0)` while waiting,
        `(0, 1)` on "go".
    - action: `[1]`, in [-1, 1] (clipped); only the one on "go" matters.
    - `reward`: `cue * action` on "go", otherwise 0.

    The greatest return is `Recall.MAX_RETURN = 1`. A policy without memory has an expected
    return of exactly 0: its action on `(0, 1)` is independent of the cue, so
    `E[cue * action] = E[cue] E[action] = 0`.

    **Arguments:**

    - `delay`: the number of blank observations, at least 0.

    **Raises:** `TypeError` or `ValueError` if `delay` is not an integer of at least 0.

    ```python
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from eqx_ppo.envs import Recall
    >>> env = Recall(delay=0)
    >>> state = env.reset(jax.random.key(0))
    >>> cue = state.obs[:1]
    >>> state = env.step(state, jnp.zeros(1))  # the action on the cue does not matter
    >>> state = env.step(state, cue)  # "go"
    >>> float(state.reward), bool(state.done)
    (1.0, True)

    ```
    """

    delay: int = 5

    MAX_RETURN: ClassVar[float] = 1.0
    observation_size: ClassVar[int] = 2
    action_size: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if isinstance(self.delay, bool) or not isinstance(self.delay, int):
            raise TypeError(
                f"`delay` must be a Python integer, but got `{self.delay!r}` of type "
                f"`{type(self.delay).__name__}`."
            )
        if not 0 <= self.delay < 2**31 - 2:
            raise ValueError(
                f"`delay` must be at least 0 and fit 32 bits, but got {self.delay}. It counts "
                'the blank observations between the cue and "go".'
            )

    @typed
    def reset(self, key: KeyLike) -> State:
        cue = jax.random.rademacher(as_key(key), (), jnp.float32)
        data = _RecallData(cue, time=jnp.zeros((), jnp.int32))
        return self._state(data, reward=jnp.zeros((), jnp.float32))

    @typed
    def step(self, state: State, action: Float[Array, "1"]) -> State:
        cue, time = state.data
        answer = jnp.clip(action[0].astype(jnp.float32), -1.0, 1.0)
        reward = jnp.where(self._is_go(time), cue * answer, 0.0)
        return self._state(_RecallData(cue, time + jnp.int32(1)), reward)

    def _is_go(self, time: Int[Array, ""]) -> Array:
        return time == self.delay + 1

    def _state(self, data: _RecallData, reward: Float[Array, ""]) -> State:
        shown = jnp.where(data.time == 0, data.cue, 0.0)
        obs = jnp.stack([shown, self._is_go(data.time).astype(jnp.float32)])
        done = data.time >= self.delay + 2
        info = {"truncation": jnp.zeros((), jnp.bool_)}  # it ends by itself
        return State(obs, reward, done, info, metrics={}, data=data)
