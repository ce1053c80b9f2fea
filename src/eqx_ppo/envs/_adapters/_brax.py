"""Environments of brax."""

import dataclasses
import difflib
import functools
from types import ModuleType
from typing import final

import jax
from jaxtyping import Array, Shaped

from eqx_ppo import _typing
from eqx_ppo._checks import typed
from eqx_ppo._keys import as_key
from eqx_ppo._tree import strong_arrays
from eqx_ppo._typing import KeyLike, Tree
from eqx_ppo.envs._actions import ContinuousActions


@final
@dataclasses.dataclass(frozen=True, eq=False)
class BraxEnv:
    """An environment of brax, for one environment that does not reset itself.

    Those of brax have nearly the convention of this library. This adapter makes sure of the
    rest: `reset` and `step` do not write into the dictionaries of the state that they are
    given, as several of brax do; wrappers that vectorize or reset are refused; and
    `observation_size` runs no physics. Other attributes, such
    as `dt`, `sys` or `render`, are those of the environment.

    Without `brax.envs.training.EpisodeWrapper` there is no time limit: wrap it in
    `eqx_ppo.envs.EpisodeWrapper`.

    **Arguments:**

    - `env`: from `brax.envs.get_environment`.

    **Raises:** `ImportError` without brax, `TypeError` for anything but its environments,
    `ValueError` for one inside a wrapper that vectorizes or resets.
    """

    env: Tree

    def __post_init__(self) -> None:
        envs = _brax_envs()
        if not isinstance(self.env, envs.Env):
            raise TypeError(
                "`BraxEnv` takes an environment of brax (a `brax.envs.Env`), but got a "
                f"`{type(self.env).__name__}`. Give the result of "
                "`brax.envs.get_environment(name)`."
            )
        refused = _refused_wrappers(envs.training)
        layer = self.env
        while isinstance(layer, envs.Wrapper):
            if isinstance(layer, refused):
                raise ValueError(
                    f"The environment is inside brax's `{type(layer).__name__}`, but must be one "
                    "single environment that does not reset itself: this library vectorizes it "
                    "and replaces its episodes. Give `brax.envs.get_environment(name)`, or "
                    "`brax.envs.create(name, auto_reset=False)`."
                )
            layer = layer.env

    @functools.cached_property
    def observation_size(self) -> Tree:
        """The length of the observation, or its shape if it is no vector; a dict for a dict."""
        obs = jax.eval_shape(lambda: self.env.reset(jax.random.key(0)).obs)
        return jax.tree.map(lambda x: x.shape[0] if len(x.shape) == 1 else x.shape, obs)

    @property
    def action_size(self) -> int:
        """The number of actuators."""
        return self.env.action_size

    @property
    def actions(self) -> ContinuousActions:
        """Numbers in [-1, 1], as everywhere in brax."""
        return ContinuousActions((-1.0,) * self.action_size, (1.0,) * self.action_size)

    @typed
    def reset(self, key: KeyLike) -> _typing.EnvState:
        return strong_arrays(self.env.reset(as_key(key)))

    @typed
    def step(self, state: _typing.EnvState, action: Shaped[Array, " A"]) -> _typing.EnvState:
        return strong_arrays(self.env.step(_with_own_dicts(state), action))

    def __getattr__(self, name: str) -> Tree:
        # Not for names that `copy` and `pickle` look up before `env` is there.
        if name == "env" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"`{type(self).__name__}` has no attribute `{name}`.")
        return getattr(self.env, name)


@typed
def load_brax(name: str, **options: Tree) -> BraxEnv:
    """Loads an environment of brax by name.

    They have no time limit: wrap them in `EpisodeWrapper`. brax's convention is 1000 steps.

    **Arguments:**

    - `name`: for example `"inverted_pendulum"`.
    - keywords: go to the environment's constructor, such as `backend="spring"` (or
        `"generalized"`, `"positional"`, `"mjx"`).

    **Raises:** `ImportError` without brax, `ValueError` for an unknown name or backend.
    """
    envs = _brax_envs()
    known = sorted(envs._envs)
    if name not in known:
        close = difflib.get_close_matches(name, known, n=5)
        hint = f"Close matches: {', '.join(close)}. " if close else ""
        raise ValueError(
            f"`{name}` is not an environment of brax. {hint}Those are: {', '.join(known)}."
        )
    return BraxEnv(envs.get_environment(name, **options))


def _brax_envs() -> ModuleType:
    try:
        from brax import envs
    except ImportError as error:
        raise ImportError(
            'brax could not be imported. Install it with `pip install "eqx-ppo[brax]"`.'
        ) from error
    return envs


def _refused_wrappers(training: ModuleType) -> tuple[type, ...]:
    return (
        training.AutoResetWrapper,
        training.VmapWrapper,
        training.DomainRandomizationVmapWrapper,
        training.EvalWrapper,
    )


def _with_own_dicts(state: _typing.EnvState) -> _typing.EnvState:
    """The same leaves in new dictionaries, which may be written into."""
    leaves, treedef = jax.tree.flatten(state)
    return jax.tree.unflatten(treedef, leaves)
