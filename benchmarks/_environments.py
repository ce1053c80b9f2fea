"""Environments by name, the same ones for every peer."""

from typing import NamedTuple

from benchmarks._settings import Setting
from eqx_ppo._typing import Tree
from eqx_ppo.envs import Env, EpisodeWrapper, Pendulum, Recall, load_playground


class Sizes(NamedTuple):
    """Widths of the flat observation and action."""

    obs: int
    action: int


_OURS = {"Pendulum": Pendulum, "Recall": Recall}


def is_playground(setting: Setting) -> bool:
    """Whether the environment is one of MuJoCo Playground."""
    return setting.env not in _OURS


def bare_env(setting: Setting) -> Env:
    """The environment without a time limit."""
    if not is_playground(setting):
        return _OURS[setting.env]()
    return load_playground(setting.env, config_overrides={"impl": "jax"})


def limited_env(setting: Setting) -> EpisodeWrapper:
    """The environment with its time limit, as this library wraps it."""
    return EpisodeWrapper(bare_env(setting), max_len=setting.episode_length)


def sizes_of(env: Tree) -> Sizes:
    """Asks the environment, by the attributes that every peer reads."""
    return Sizes(obs=int(env.observation_size), action=int(env.action_size))
