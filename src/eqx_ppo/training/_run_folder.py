"""A run folder: one run's settings, versions, metrics, checkpoints, plots and videos."""

import contextlib
import dataclasses
import datetime as dt
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import tempfile
import uuid
import warnings
from pathlib import Path
from typing import NamedTuple, Self, final

import jax

from eqx_ppo._typing import Tree
from eqx_ppo.envs import Env
from eqx_ppo.networks import StatefulModule
from eqx_ppo.training._checkpoint import Checkpointer, describe_environment
from eqx_ppo.training._checkpoint._metadata import installed_versions
from eqx_ppo.training._run_config import RunConfig

_PACKAGES = ("numpy", "playground", "mujoco", "mujoco-mjx", "brax", "gymnax")


class LoadedPolicy(NamedTuple):
    """A policy out of a run folder.

    - `config`: of its run.
    - `env`: the environment to evaluate in, with its own rewards.
    - `network`: with the weights of the checkpoint.
    - `steps`: the environment steps that it was trained for.
    """

    config: RunConfig
    env: Env
    network: StatefulModule
    steps: int


@final
@dataclasses.dataclass(frozen=True)
class RunFolder:
    """A folder that holds everything about one run.

    | file | content |
    |---|---|
    | `config.json` | the `RunConfig` |
    | `versions.json` | for each time that the run was started: versions, device, command |
    | `metrics.jsonl` | a row per iteration, see `JSONLinesSink` |
    | `checkpoints/` | see `Checkpointer` |
    | `plots/`, `videos/` | pictures |

    **Arguments:**

    - `path`: of the folder; use `create` or `open`.
    """

    path: Path

    @classmethod
    def create(cls, path: str | Path, config: RunConfig, *, overwrite: bool = False) -> Self:
        """Makes a folder for a new run, and the folders above it.

        **Arguments:**

        - `path`: of the folder. It must not exist, or be empty.
        - `config`: of the run.
        - `overwrite`: delete the run that is there. A folder with other content is never
            touched.

        **Raises:** `FileExistsError` if there is something already.
        """
        if overwrite:
            folder, replaced = cls.replace(path, config)
            if replaced is not None:
                replaced.delete()
            return folder
        folder = cls(Path(path))
        if folder._holds_run():
            raise FileExistsError(
                f"`{folder.path}` holds a run already. Continue it (`--resume`), replace it "
                "(`--overwrite`), or choose another folder (`--out`)."
            )
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.write_config(config)
        return folder

    @classmethod
    def replace(cls, path: str | Path, config: RunConfig) -> tuple[Self, Self | None]:
        """Makes a folder for a new run, and keeps the run that is there.

        **Arguments:**

        - `path`, `config`: see `create`.

        **Returns:** the folder; and the old run, which is in a folder inside it now, to be
        deleted (`delete`) or put back (`put_back`). `None` if there was none.

        **Raises:** `FileExistsError` for a folder with other content, which is never touched.
        """
        folder = cls(Path(path))
        if not folder._holds_run():
            return cls.create(path, config), None
        old = cls(Path(tempfile.mkdtemp(prefix="replaced-", dir=folder.path)))
        try:
            folder._move_to(old.path)
            folder.write_config(config)
        except OSError:
            old._move_to(folder.path)
            old.path.rmdir()
            raise
        return folder, old

    def put_back(self) -> None:
        """Undoes `replace`, of which this is the old run: deletes the new one."""
        new = type(self)(self.path.parent)
        new.delete()
        self._move_to(new.path)
        self.path.rmdir()

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """The folder of a run that has been started.

        **Raises:** `FileNotFoundError` if there is none.
        """
        folder = cls(Path(path))
        if not folder.path.is_dir():
            raise FileNotFoundError(f"There is no folder `{path}`.{_others(folder.path.parent)}")
        if not folder.config_file.is_file():
            raise FileNotFoundError(
                f"`{path}` is not the folder of a run: it has no `{folder.config_file.name}`."
                f"{_others(folder.path)}"
            )
        return folder

    @property
    def config_file(self) -> Path:
        """`config.json`."""
        return self.path / "config.json"

    @property
    def versions_file(self) -> Path:
        """`versions.json`."""
        return self.path / "versions.json"

    @property
    def metrics_file(self) -> Path:
        """`metrics.jsonl`."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """`checkpoints/`."""
        return self.path / "checkpoints"

    @property
    def plots(self) -> Path:
        """`plots/`."""
        return self.path / "plots"

    @property
    def videos(self) -> Path:
        """`videos/`."""
        return self.path / "videos"

    def read_config(self) -> RunConfig:
        """The settings of the run.

        **Raises:** `ValueError` if the file cannot be understood.
        """
        try:
            return RunConfig.from_json(json.loads(self.config_file.read_text()))
        except (RecursionError, ValueError) as error:
            raise ValueError(f"`{self.config_file}` cannot be read: {error}") from error

    def write_config(self, config: RunConfig) -> None:
        """Writes `config.json`."""
        _write_json(self.config_file, config.to_json())

    def note_start(self, env: Env, steps: int) -> None:
        """Adds an entry to `versions.json`: what the run is started with.

        A file that cannot be understood is renamed, with a warning, and a new one begun.

        **Arguments:**

        - `env`: of the run.
        - `steps`: the environment steps that it has taken before.
        """
        entries = self._earlier_starts()
        device = jax.devices()[0]
        entry = {
            "at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            "steps": steps,
            "command": sys.argv,
            "versions": installed_versions() | _other_versions(),
            "platform": platform.platform(),
            "device": {
                "kind": device.device_kind,
                "platform": device.platform,
                "count": jax.device_count(),
            },
            "environment": describe_environment(env),
        }
        _write_json(self.versions_file, [*entries, entry])

    def load_policy(self, step: int | None = None) -> LoadedPolicy:
        """Builds environment and network from `config.json`, with the weights of a checkpoint.

        **Arguments:**

        - `step`: of the checkpoint; the last complete one by default.

        **Raises:** `CheckpointError` if there is no such checkpoint, or none that fits, and
        whatever building the environment raises.
        """
        config = self.read_config()
        with Checkpointer(self.checkpoints) as checkpointer:
            network = config.make_network(config.env.make_env())
            network, about = checkpointer.network_and_metadata(network, step=step)
        return LoadedPolicy(config, config.env.make_eval_env(), network, about.steps)

    def delete(self) -> None:
        """Deletes what belongs to the run, and the folder if it is empty then."""
        for part in self._parts():
            if part.is_dir():
                shutil.rmtree(part, ignore_errors=True)
            else:
                part.unlink(missing_ok=True)
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def _parts(self) -> tuple[Path, ...]:
        """Everything that belongs to the run."""
        folders = (self.checkpoints, self.plots, self.videos)
        return (*folders, self.metrics_file, self.versions_file, self.config_file)

    def _move_to(self, place: Path) -> None:
        for part in self._parts():
            if part.exists():
                part.rename(place / part.name)

    def _holds_run(self) -> bool:
        """Whether there is a run; `False` where there is nothing.

        **Raises:** `FileExistsError` for anything else.
        """
        if self.config_file.is_file():
            return True
        if self.path.exists() and not (self.path.is_dir() and not any(self.path.iterdir())):
            raise FileExistsError(
                f"`{self.path}` exists and is not the folder of a run. Choose another one."
            )
        return False

    def _earlier_starts(self) -> list[Tree]:
        """The entries of `versions.json`."""
        if not self.versions_file.exists():
            return []
        with contextlib.suppress(RecursionError, ValueError):
            entries = json.loads(self.versions_file.read_text())
            if isinstance(entries, list):
                return entries
        kept = self.versions_file.with_suffix(f".damaged-{uuid.uuid4().hex[:8]}.json")
        self.versions_file.rename(kept)
        warnings.warn(
            f"`{self.versions_file}` could not be understood. It was renamed to `{kept.name}`, and "
            "a new one is begun.",
            stacklevel=3,
        )
        return []


def _write_json(path: Path, data: Tree) -> None:
    """Writes a file that is complete whenever it is there."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(data, indent=2, allow_nan=False) + "\n")
    os.replace(partial, path)


def _other_versions() -> dict[str, str]:
    """Of what environments are made of, as far as it is installed."""
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _others(parent: Path) -> str:
    """What runs there are, for an error message."""
    patterns = ("*/config.json", "runs/*/config.json")
    found = sorted(str(file.parent) for pattern in patterns for file in parent.glob(pattern))
    if not found:
        return ""
    more = " and others" if len(found) > 5 else ""
    return f" There are runs in {', '.join(f'`{path}`' for path in found[:5])}{more}."
