"""Weights & Biases."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import final

from eqx_ppo._typing import Tree
from eqx_ppo.training._sinks._sink import RunInfo, Sink

_ID_FILE = "wandb_run_id"


@final
class WandbSink(Sink):
    """Logs to Weights & Biases; needs the extra `wandb`.

    The settings of the run become its `config`. With the environment variable
    `WANDB_MODE=offline` (or `mode="offline"` among the options) nothing is sent; `wandb sync`
    sends it later. A process of its own writes and sends, so that the rows are complete only
    when it has ended, shortly after the run. A resumed run continues under the same id; what it
    logs again up to the point of the interruption is left out by Weights & Biases, which does
    not go back.
    """

    def __init__(
        self,
        project: str,
        *,
        directory: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        **options: Tree,
    ):
        """**Arguments:**

        - `project`: on Weights & Biases.
        - `directory`: for its local files, and for a file with the id of the run, by which a
            resumed run is found again.
        - `run_id`: an id of your own.
        - `options`: other arguments of `wandb.init`: `name`, `group`, `entity`, `mode`, `tags`.
        """
        self._project = project
        self._directory = None if directory is None else Path(directory)
        self._run_id = run_id
        self._options = options
        self._run: Tree = None

    def start(self, run: RunInfo) -> None:
        """Begins a run, or continues the one that is resumed.

        **Raises:** `ImportError` without wandb, and what `wandb.init` raises.
        """
        try:
            import wandb
        except ImportError as error:
            raise ImportError(
                '`WandbSink` needs the package `wandb`: `pip install "eqx-ppo[wandb]"`.'
            ) from error
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
        resumes = run.resumed_at is not None
        options = {
            "project": self._project,
            "dir": None if self._directory is None else str(self._directory),
            "id": self._run_id or (self._known_id() if resumes else None),
            "resume": "allow" if resumes else None,
            "config": dict(run.config),
        }
        self._run = wandb.init(**options | self._options)
        if self._directory is not None:
            (self._directory / _ID_FILE).write_text(self._run.id)

    def write(self, metrics: Mapping[str, float], steps: int) -> None:
        """Logs the metrics under the count of environment steps."""
        if self._run is None:
            raise RuntimeError(f"{self!r} was not started.")
        self._run.log(dict(metrics), step=steps)

    def close(self) -> None:
        """Finishes the run, which sends what remains."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()

    def __repr__(self) -> str:
        return f"WandbSink({self._project!r})"

    def _known_id(self) -> str | None:
        if self._directory is None or not (self._directory / _ID_FILE).exists():
            return None
        return (self._directory / _ID_FILE).read_text().strip()
