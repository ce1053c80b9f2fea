"""The loader for MuJoCo Playground, and the only place that imports it."""

import difflib
from collections.abc import Mapping
from types import ModuleType

import jax

from eqx_ppo._checks import typed
from eqx_ppo._typing import Tree
from eqx_ppo.envs._protocol import Env


@typed
def load_playground(name: str, *, config_overrides: Mapping[str, Tree] | None = None) -> Env:
    """Loads an environment of MuJoCo Playground by name, without touching the network.

    Playground's default physics implementation needs a GPU. On a CPU the environment is
    loaded with `impl="jax"`, unless `config_overrides` says otherwise.

    The locomotion and manipulation environments need robot models, which Playground itself
    would download when one is loaded. This function refuses that, and loads them only if
    the models are already there.

    The environments report no time limit: wrap them in `EpisodeWrapper`.

    **Arguments:**

    - `name`: for example `"CartpoleBalance"`; `playground_names()` lists what can be
        loaded.
    - `config_overrides`: changes to the environment's configuration, with flattened keys,
        as `{"ctrl_dt": 0.02, "reward_config.scales.action_rate": 0.0}`.

    **Raises:** `ImportError` if Playground is not installed, `ValueError` for an unknown
    name, `RuntimeError` if the robot models are missing.
    """
    registry = _playground().registry
    if name not in registry.ALL_ENVS:
        close = difflib.get_close_matches(name, registry.ALL_ENVS, n=5)
        hint = f"Close matches: {', '.join(close)}. " if close else ""
        raise ValueError(
            f"`{name}` is not an environment of MuJoCo Playground. {hint}"
            "`playground_names()` lists those that can be loaded."
        )
    loadable = playground_names()
    if name not in loadable:
        raise RuntimeError(
            f"`{name}` needs robot models (MuJoCo Menagerie), and there are none at "
            f"`{_models_path()}`. Expected either the models there (load the environment once "
            f'with `mujoco_playground.registry.load("{name}")`, which downloads them, or clone '
            "the repository of MuJoCo Menagerie to that path), or one of the environments that "
            f"need none: {', '.join(loadable)}."
        )
    overrides = dict(config_overrides or {})
    if jax.default_backend() == "cpu" and "impl" in registry.get_default_config(name):
        overrides.setdefault("impl", "jax")
    return registry.load(name, config_overrides=overrides)


def playground_names() -> tuple[str, ...]:
    """The environments of MuJoCo Playground that can be loaded without a download.

    **Returns:** the names of the DM Control environments, and also those of the locomotion
    and manipulation environments if their robot models are already there.

    **Raises:** `ImportError` if Playground is not installed.
    """
    playground = _playground()
    if _models_path().exists():
        return tuple(playground.registry.ALL_ENVS)
    return tuple(playground.dm_control_suite.ALL_ENVS)


def _playground() -> ModuleType:
    try:
        import mujoco_playground
    except ImportError as error:
        raise ImportError(
            "MuJoCo Playground could not be imported. Install it with "
            '`pip install "eqx-ppo[playground]"`.'
        ) from error
    return mujoco_playground


def _models_path() -> Tree:
    # Playground clones the models when it loads an environment and this path does not exist.
    from mujoco_playground._src import mjx_env

    return mjx_env.MENAGERIE_PATH
