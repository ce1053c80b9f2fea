"""Where the robot models of Playground's environments are on this machine.

Playground reads them from a checkout of MuJoCo Menagerie, which it would download. They may
as well be in a folder of the user's, or have been fetched by the package `mujoco-menagerie`.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple, final

from eqx_ppo._typing import Tree

# The folders of MuJoCo Menagerie that an environment needs, by how its name begins.
_ROBOTS = {
    "AeroCube": ("tetheria_aero_hand_open",),
    "Aloha": ("aloha",),
    "Apollo": ("apptronik_apollo",),
    "Barkour": ("google_barkour_vb",),
    "BerkeleyHumanoid": ("berkeley_humanoid",),
    "G1": ("unitree_g1",),
    "Go1": ("unitree_go1",),
    "H1": ("unitree_h1",),
    "Leap": ("leap_hand",),
    "Op3": ("robotis_op3",),
    "Panda": ("franka_emika_panda",),
    "PandaRobotiq": ("franka_emika_panda", "robotiq_2f85_v4"),
    "Spot": ("boston_dynamics_spot",),
    "T1": ("booster_t1",),
}


class Search(NamedTuple):
    """What was found for an environment.

    - `path`: stands for the checkout, if every robot was found.
    - `missing`: the robots that were not found anywhere.
    """

    path: Tree
    missing: tuple[str, ...]


def robots_of(name: str) -> tuple[str, ...]:
    """The folders of MuJoCo Menagerie that a locomotion or manipulation environment needs.

    `"."`, the checkout itself, for an environment that was added to those of Playground.
    """
    prefixes = [prefix for prefix in _ROBOTS if name.startswith(prefix)]
    return _ROBOTS[max(prefixes, key=len)] if prefixes else (".",)


def find_models(robots: tuple[str, ...], directories: tuple[Tree, ...]) -> Search:
    """Looks for the robots of one environment.

    **Arguments:**

    - `robots`: the folders that it needs.
    - `directories`: paths that may hold a checkout, the first one first. What the package
        `mujoco-menagerie` has in its cache comes last.
    """
    for directory in directories:
        missing = tuple(robot for robot in robots if not (directory / robot).exists())
        if not missing:
            return Search(directory, ())
    folders = {robot: path for robot in robots if (path := _fetched(robot)) is not None}
    missing = tuple(robot for robot in robots if robot not in folders)
    return Search(None if missing else _Folders(folders), missing)


@final
@dataclasses.dataclass(frozen=True)
class _Folders:
    """Stands for the path of a checkout whose robots lie in different places."""

    folders: Mapping[str, Tree]

    def exists(self) -> bool:
        """All of them do."""
        return True

    def __truediv__(self, robot: str) -> Tree:
        return self.folders[robot]


def _fetched(robot: str) -> Tree:
    """The folder of a robot in the cache of the package `mujoco-menagerie`, or `None`."""
    try:
        import mujoco_menagerie
    except ImportError:
        return None
    from etils import epath

    cache = mujoco_menagerie.Cache()
    try:
        known = mujoco_menagerie.get(robot)
    except mujoco_menagerie.UnknownRobotError:
        return None
    if cache.root is not None:
        folder = cache.root / robot
        return epath.Path(folder) if folder.is_dir() else None
    return epath.Path(cache.model_path(known)) if cache.is_cached(known) else None
