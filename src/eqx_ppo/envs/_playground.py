"""The loader for MuJoCo Playground, and the only place that imports it."""

import contextlib
import difflib
from collections.abc import Iterator, Mapping
from types import ModuleType

import jax

from eqx_ppo._checks import typed
from eqx_ppo._typing import Tree
from eqx_ppo.envs._protocol import Env
from eqx_ppo.envs._robot_models import Search, find_models, robots_of


@typed
def load_playground(
    name: str, *, config_overrides: Mapping[str, Tree] | None = None, models: Tree = None
) -> Env:
    """Loads an environment of MuJoCo Playground by name, without touching the network.

    Playground's default physics implementation needs a GPU. On a CPU the environment is
    loaded with `impl="jax"`, unless `config_overrides` says otherwise.

    The locomotion and manipulation environments need robot models (MuJoCo Menagerie), which
    Playground itself would download. Here they are looked for in `models`, then where
    Playground keeps them, then in the cache of the package `mujoco-menagerie` (part of the
    extra `playground`), which the command `mujoco-menagerie prefetch ROBOT` fills.

    The environments report no time limit: wrap them in `EpisodeWrapper`.

    **Arguments:**

    - `name`: for example `"CartpoleBalance"`; `playground_names()` lists what can be
        loaded.
    - `config_overrides`: changes to the environment's configuration, with flattened keys,
        as `{"ctrl_dt": 0.02, "reward_config.scales.action_rate": 0.0}`.
    - `models`: the path of a folder with robot models, one folder for each robot, such as a
        checkout of MuJoCo Menagerie.

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
    found = _find(name, models)
    if found.missing:
        robots = " ".join(found.missing)
        raise RuntimeError(
            f"`{name}` needs robot models of MuJoCo Menagerie, of which `{robots}` was not found "
            f"(looked in {', '.join(map(str, _directories(models)))} and in the cache of "
            f"`mujoco-menagerie`). Fetch it once with `mujoco-menagerie prefetch {robots}` (from "
            "the package of that name), or give the folder of a checkout as `models`. "
            f"Environments that need none: {', '.join(playground_names(models=models))}."
        )
    overrides = dict(config_overrides or {})
    if jax.default_backend() == "cpu" and "impl" in registry.get_default_config(name):
        overrides.setdefault("impl", "jax")
    with _models_at(found.path):
        return registry.load(name, config_overrides=overrides)


def playground_names(*, models: Tree = None) -> tuple[str, ...]:
    """The environments of MuJoCo Playground that can be loaded without a download.

    **Arguments:**

    - `models`: as for `load_playground`.

    **Returns:** the names of the DM Control environments, and of those locomotion and
    manipulation environments whose robot models are on this machine.

    **Raises:** `ImportError` if Playground is not installed.
    """
    names = _playground().registry.ALL_ENVS
    return tuple(name for name in names if not _find(name, models).missing)


def _playground() -> ModuleType:
    try:
        import mujoco_playground
    except ImportError as error:
        raise ImportError(
            "MuJoCo Playground could not be imported. Install it with "
            '`pip install "eqx-ppo[playground]"`.'
        ) from error
    return mujoco_playground


def _find(name: str, models: Tree) -> Search:
    has_none = name in _playground().dm_control_suite.ALL_ENVS
    return find_models(() if has_none else robots_of(name), _directories(models))


def _directories(models: Tree) -> tuple[Tree, ...]:
    """Where a checkout may be: in the user's folder, and where Playground keeps its own."""
    from etils import epath
    from mujoco_playground._src import mjx_env

    own = (mjx_env.MENAGERIE_PATH,)
    return own if models is None else (epath.Path(models), *own)


@contextlib.contextmanager
def _models_at(path: Tree) -> Iterator[None]:
    """Playground reads the models at `path` meanwhile.

    It clones them when an environment is loaded and its path does not exist.
    """
    from mujoco_playground._src import mjx_env

    before = mjx_env.MENAGERIE_PATH
    mjx_env.MENAGERIE_PATH = path
    try:
        yield
    finally:
        mjx_env.MENAGERIE_PATH = before
