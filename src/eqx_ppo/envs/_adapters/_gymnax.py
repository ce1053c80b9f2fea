"""Environments of gymnax."""

import dataclasses
import difflib
from collections.abc import Mapping
from types import ModuleType
from typing import NamedTuple, final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from eqx_ppo._checks import typed
from eqx_ppo._keys import as_key
from eqx_ppo._tree import replace, strong_arrays
from eqx_ppo._typing import KeyLike, Tree
from eqx_ppo.envs._actions import (
    Actions,
    DiscreteActions,
    action_size,
    continuous_actions,
)
from eqx_ppo.envs._state import State


class _GymnaxData(NamedTuple):
    state: Tree  # gymnax's own
    key: PRNGKeyArray  # of the steps to come
    ahead: Int[Array, ""]  # steps by which the time limit comes earlier


@final
@dataclasses.dataclass(frozen=True, eq=False)
class GymnaxEnv:
    """An environment of gymnax, which keeps its last observation.

    gymnax's own `step` puts a new episode in the place of one that ends; here its `step_env`
    and `reset_env` are called, which do not. Its time limit, `params.max_steps_in_episode`,
    is `info["truncation"]`, so it needs no `EpisodeWrapper`. Where a step reaches the limit and
    ends the episode by itself, the flag stays clear. gymnax's own `info` is left out.

    The randomness of the steps comes from a key in the state, `reset`'s.

    **Arguments:**

    - `env`: an environment of gymnax 1.0 or later, without a wrapper of gymnax: those change
        `step` and `reset`, which are not called.
    - `params`: its parameters; the environment's defaults if `None`.

    **Raises:** `ImportError` without gymnax, `TypeError` for anything but its environments.
    """

    env: Tree
    params: Tree = None

    def __post_init__(self) -> None:
        base = _gymnax().environments.environment.Environment
        if not isinstance(self.env, base):
            raise TypeError(
                "`GymnaxEnv` takes an environment of gymnax (a "
                "`gymnax.environments.environment.Environment`), but got a "
                f"`{type(self.env).__name__}`. Give the first result of `gymnax.make(name)`, "
                "without the wrappers of gymnax."
            )
        if self.params is None:
            object.__setattr__(self, "params", self.env.default_params)

    @property
    def observation_size(self) -> Tree:
        """The length of the observation, or its shape if it is no vector; a dict for a dict."""
        return _observation_size(self.env.observation_space(self.params))

    @property
    def actions(self) -> Actions:
        """Which actions it takes; `make_sampler` has a sampler for them."""
        return _actions(self.env.action_space(self.params))

    @property
    def action_size(self) -> Tree:
        """How many numbers an action has; 1 for a choice."""
        return action_size(self.actions)

    @typed
    def reset(self, key: KeyLike) -> State:
        reset_key, key = jax.random.split(as_key(key))
        obs, state = self.env.reset_env(reset_key, self.params)
        ahead = jnp.zeros((), jnp.int32)
        return _state(obs, 0.0, False, False, _GymnaxData(state, key, ahead))

    @typed
    def step(self, state: State, action: Tree) -> State:
        step_key, key = jax.random.split(state.data.key)
        action = _shaped(self.env.action_space(self.params), action)
        obs, inner, reward, terminated, _ = self.env.step_env(
            step_key, state.data.state, action, self.params
        )
        data = _GymnaxData(inner, key, state.data.ahead)
        return _state(obs, reward, terminated, self._at_limit(data), data)

    @typed
    def stagger(self, state: State, key: KeyLike) -> State:
        """Brings the time limit forward by a number of steps, uniform in `[0, limit)`.

        The environment's own clock, `state.data.state.time`, stays as it is, because some observe
        it. Without one, or without `params.max_steps_in_episode`, nothing is changed.
        """
        if not self._has_limit(state.data.state):
            return state
        limit = jnp.asarray(self.params.max_steps_in_episode, jnp.int32)
        ahead = jax.random.randint(as_key(key), (), 0, jnp.maximum(limit, 1), jnp.int32)
        return replace(state, data=state.data._replace(ahead=ahead))

    def _has_limit(self, inner: Tree) -> bool:
        return "time" in _names(inner) and "max_steps_in_episode" in _names(self.params)

    def _at_limit(self, data: _GymnaxData) -> Tree:
        inner = data.state
        if self._has_limit(inner):
            time = jnp.asarray(inner.time)
            inner = replace(inner, time=time + data.ahead.astype(time.dtype))
        return self.env.is_truncated(inner, self.params)


@typed
def load_gymnax(
    name: str, *, params: Mapping[str, Tree] | None = None, **options: Tree
) -> GymnaxEnv:
    """Loads an environment of gymnax by name.

    **Arguments:**

    - `name`: for example `"CartPole-v1"`.
    - `params`: changes to its parameters, such as `{"max_steps_in_episode": 200}`.
    - keywords: go to the environment's constructor.

    **Raises:** `ImportError` without gymnax, `ValueError` for an unknown name or parameter.
    """
    gymnax = _gymnax()
    if name not in gymnax.registered_envs:
        close = difflib.get_close_matches(name, gymnax.registered_envs, n=5)
        hint = f"Close matches: {', '.join(close)}. " if close else ""
        raise ValueError(
            f"`{name}` is not an environment of gymnax. {hint}`gymnax.registered_envs` lists them."
        )
    env, defaults = gymnax.make(name, **options)
    known = [field.name for field in dataclasses.fields(defaults)]
    unknown = sorted(set(params or {}) - set(known))
    if unknown:
        raise ValueError(
            f"`{name}` has no parameters {', '.join(f'`{n}`' for n in unknown)}. It has: "
            f"{', '.join(known)}."
        )
    return GymnaxEnv(env, dataclasses.replace(defaults, **(params or {})))


def _gymnax() -> ModuleType:
    try:
        import gymnax
    except ImportError as error:
        raise ImportError(
            'gymnax could not be imported. Install it with `pip install "eqx-ppo[gymnax]"`.'
        ) from error
    return gymnax


def _state(obs: Tree, reward: Tree, terminated: Tree, truncated: Tree, data: _GymnaxData) -> State:
    """All leaves as arrays, rewards as float32; a termination wins over the time limit."""
    terminated = jnp.asarray(terminated).astype(jnp.bool_)
    truncated = jnp.asarray(truncated).astype(jnp.bool_) & ~terminated
    return State(
        strong_arrays(obs),
        jnp.asarray(reward).astype(jnp.float32),
        done=terminated | truncated,
        info={"truncation": truncated},
        metrics={},
        data=strong_arrays(data),
    )


def _names(record: Tree) -> list[str]:
    is_record = dataclasses.is_dataclass(record)
    return [field.name for field in dataclasses.fields(record)] if is_record else []


def _actions(space: Tree) -> Actions:
    from gymnax.environments import spaces

    if isinstance(space, spaces.Discrete):
        return DiscreteActions(int(space.n))
    if isinstance(space, spaces.Box):
        return continuous_actions(space.low, space.high, tuple(space.shape))
    if isinstance(space, spaces.Dict):
        return {name: _actions(part) for name, part in space.spaces.items()}
    raise TypeError(
        f"The actions of a `{type(space).__name__}` space have no description. Expected one of "
        "gymnax's `Discrete`, `Box` and `Dict`."
    )


def _shaped(space: Tree, action: Tree) -> Tree:
    """An action in the shape that the environment expects."""
    from gymnax.environments import spaces

    if isinstance(space, spaces.Dict):
        return {name: _shaped(part, action[name]) for name, part in space.spaces.items()}
    return jnp.reshape(action, space.shape)


def _observation_size(space: Tree) -> Tree:
    from gymnax.environments import spaces

    if isinstance(space, spaces.Dict):
        return {name: _observation_size(part) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(map(_observation_size, space.spaces))
    shape = tuple(space.shape)
    return shape[0] if len(shape) == 1 else shape
