"""Environments by name: what a run folder needs to build its environment again."""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import NamedTuple, final

from eqx_ppo._typing import Tree
from eqx_ppo.algorithms import PPOConfig
from eqx_ppo.envs import (
    ActionRepeatWrapper,
    Env,
    EpisodeWrapper,
    Pendulum,
    Recall,
    RewardScalingWrapper,
    TwoArms,
    load_brax,
    load_gymnax,
    load_playground,
    playground_names,
)


class Customs(NamedTuple):
    """Settings with which an environment is customarily trained, in minutes on a CPU.

    - `max_len`: the time limit in steps; `None` where the environment has its own.
    - `reward_scale`: brings returns to the order of 1 to 100.
    - `ppo`: of the algorithm.
    """

    max_len: int | None
    reward_scale: float
    ppo: PPOConfig


class Source(NamedTuple):
    """Where environments come from.

    - `title`: for people.
    - `names`: the names that can be loaded here and now; raises `ImportError` where the
        package is not installed.
    - `load`: builds the environment of that name, with some of its settings changed.
    - `customs`: how the environment of that name is trained.
    - `needs_prefix`: whether the names need one.
    """

    title: str
    names: Callable[[], tuple[str, ...]]
    load: Callable[[str, Mapping[str, Tree]], Env]
    customs: Callable[[str], Customs]
    needs_prefix: bool = True


_QUICK_START = PPOConfig(total_steps=1_500_000, learning_rate=3e-4, gradient_clipping=1.0)
_SMALL = dataclasses.replace(
    _QUICK_START, n_envs=128, rollout_length=25, total_steps=500_000, learning_rate=1e-3, n_epochs=8
)


class _Own(NamedTuple):
    """An environment of this library."""

    make: Callable[..., Env]
    customs: Customs


_OWN = {
    "Pendulum": _Own(Pendulum, Customs(200, 0.1, _SMALL)),
    "Recall": _Own(Recall, Customs(None, 1.0, _SMALL)),
    "TwoArms": _Own(
        TwoArms, Customs(100, 1.0, dataclasses.replace(_SMALL, discounting_factor=0.95))
    ),
}


def _load_own(name: str, overrides: Mapping[str, Tree]) -> Env:
    _own_customs(name)
    return _OWN[name].make(**overrides)


def _load_playground(name: str, overrides: Mapping[str, Tree]) -> Env:
    close = difflib.get_close_matches(name, _OWN, n=1)
    try:
        return load_playground(name, config_overrides=overrides)
    except (ImportError, ValueError) as error:
        if not close:
            raise
        raise type(error)(f"{error} Or did you mean `{close[0]}` of this library?") from error


def _load_brax(name: str, overrides: Mapping[str, Tree]) -> Env:
    return load_brax(name, **overrides)


def _brax_names() -> tuple[str, ...]:
    from brax import envs

    return tuple(sorted(envs._envs))


def _load_gymnax(name: str, overrides: Mapping[str, Tree]) -> Env:
    return load_gymnax(name, params=overrides)


def _gymnax_names() -> tuple[str, ...]:
    import gymnax

    return tuple(gymnax.registered_envs)


def _own_customs(name: str) -> Customs:
    if name not in _OWN:
        raise ValueError(f"`{name}` is not one of {', '.join(_OWN)}.")
    return _OWN[name].customs


def _thousand_steps(name: str) -> Customs:
    """The custom of MuJoCo Playground and of brax."""
    del name
    return Customs(1000, 1.0, _QUICK_START)


def _own_limit(name: str) -> Customs:
    del name
    return Customs(None, 1.0, _QUICK_START)


SOURCES = {
    "eqx-ppo": Source("eqx-ppo", lambda: tuple(_OWN), _load_own, _own_customs, needs_prefix=False),
    "playground": Source(
        "MuJoCo Playground",
        playground_names,
        _load_playground,
        _thousand_steps,
        needs_prefix=False,
    ),
    "brax": Source("brax", _brax_names, _load_brax, _thousand_steps),
    "gymnax": Source("gymnax", _gymnax_names, _load_gymnax, _own_limit),
}
"""By the prefix that may stand before a name, as in `playground:CartpoleBalance`."""


_WORDS = {"name": "a string", "reward_scale": "a number", "overrides": "settings by name"}


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """An environment by its name, with wrappers.

    **Arguments:**

    - `name`: such as `"Pendulum"` or `"CartpoleBalance"`; a prefix tells where it comes from,
        as in `"brax:ant"` or `"gymnax:CartPole-v1"`.
    - `max_len`: the time limit in actions; `None` for none.
    - `action_repeat`: steps of the environment per action.
    - `reward_scale`: factor on the rewards in training.
    - `overrides`: changes to the environment's own settings, such as `{"ctrl_dt": 0.02}`: the
        `config_overrides` of `load_playground`, the options of `load_brax`, the `params` of
        `load_gymnax`, the constructor's arguments for an environment of this library.

    **Raises:** `ValueError` for numbers out of range, `TypeError` for values of another kind.
    """

    name: str
    max_len: int | None = None
    action_repeat: int = 1
    reward_scale: float = 1.0
    overrides: Mapping[str, Tree] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        kinds = {"name": str, "reward_scale": int | float, "overrides": Mapping}
        for name, kind in kinds.items():
            value = vars(self)[name]
            if isinstance(value, bool) or not isinstance(value, kind):
                raise TypeError(f"`EnvConfig.{name}` must be {_WORDS[name]}, but got {value!r}.")
        for name in ("max_len", "action_repeat"):
            value = vars(self)[name]
            if value is None and name == "max_len":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"`EnvConfig.{name}` must be an int of at least 1, but got {value!r}."
                )

    def make_env(self) -> Env:
        """Builds the environment to train in.

        **Raises:** `ValueError` for an unknown name, `ImportError` if its package is not
        installed, and whatever building the environment raises.
        """
        env = self.make_eval_env()
        return env if self.reward_scale == 1 else RewardScalingWrapper(env, self.reward_scale)

    def make_eval_env(self) -> Env:
        """Builds the environment to evaluate in: the same, with its own rewards."""
        source, name = find_source(self.name)
        env = source.load(name, self.overrides)
        if self.action_repeat > 1:
            env = ActionRepeatWrapper(env, self.action_repeat)
        return env if self.max_len is None else EpisodeWrapper(env, self.max_len)


def find_source(name: str) -> tuple[Source, str]:
    """Where an environment comes from, and its name there.

    **Raises:** `ValueError` for an unknown prefix.
    """
    prefix, separator, bare_name = name.partition(":")
    if separator:
        if prefix not in SOURCES:
            raise ValueError(
                f"`{prefix}:` is no source of environments; there are "
                f"{', '.join(f'`{known}:`' for known in SOURCES)}."
            )
        return SOURCES[prefix], bare_name
    return SOURCES["eqx-ppo" if name in _OWN else "playground"], name
