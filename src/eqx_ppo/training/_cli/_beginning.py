"""What a run begins with: its folder, and what was in it before."""

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import final

from eqx_ppo.envs import Env
from eqx_ppo.training._checkpoint import Checkpointer
from eqx_ppo.training._cli._arguments import TrainRequest
from eqx_ppo.training._run_config import RunConfig
from eqx_ppo.training._run_folder import RunFolder
from eqx_ppo.training._sinks import RunInfo, Sink, read_metrics


def folder_of(request: TrainRequest) -> tuple[RunFolder, RunFolder | None]:
    """The folder of a run that begins or goes on, and the run that it replaces."""
    if request.resume:
        return RunFolder.open(request.out), None
    if request.overwrite:
        return RunFolder.replace(request.out, request.config)
    return RunFolder.create(request.out, request.config), None


def steps_to_resume(request: TrainRequest, folder: RunFolder) -> int | None:
    """The steps of the checkpoint to go on from; `None` where the run begins anew.

    **Raises:** `ValueError` if that would lose steps that were done.
    """
    if not request.resume:
        return None
    done, before = Checkpointer(folder.checkpoints).latest(), folder.read_config().train
    total = request.config.train.ppo.total_steps
    if done is not None and total < min(done, before.ppo.total_steps):
        raise ValueError(
            f"The run in `{folder.path}` has {done:,} steps already: `--ppo.total-steps` cannot be "
            f"{total:,}."
        )
    if done is not None:
        return done
    rows = read_metrics(folder.path)["total_steps"] if folder.metrics_file.exists() else []
    reached = max(map(int, rows), default=0)
    if reached >= before.checkpoint_every_steps or (folder.checkpoints / "set_aside").exists():
        raise ValueError(
            f"The run in `{folder.path}` has {reached:,} steps, but `{folder.checkpoints}` holds "
            "no checkpoint to go on from. Bring one back, or begin anew with `--overwrite`."
        )
    print("There is no checkpoint yet: the run begins anew.")
    return None


@final
class FolderNotes(Sink):
    """Writes down with what a run begins, when its checkpoint has been found to fit.

    A run that is continued with settings that do not fit it leaves its folder as it was.
    `has_begun` tells whether the run got as far as its first row. With it the run that was
    replaced is deleted.
    """

    def __init__(self, folder: RunFolder, config: RunConfig, env: Env, replaced: RunFolder | None):
        self._folder, self._config, self._env = folder, config, env
        self._replaced = replaced
        self.has_begun = False

    def start(self, run: RunInfo) -> None:
        if run.resumed_at is not None:
            _warn_of_changes(self._folder.read_config(), self._config)
        self._folder.note_start(self._env, run.resumed_at or 0)
        self._folder.write_config(self._config)

    def write(self, metrics: Mapping[str, float], steps: int) -> None:
        self.has_begun = True
        if self._replaced is not None:
            self._replaced.delete()
            self._replaced = None

    def close(self) -> None:
        """Nothing is open."""

    def undo(self) -> None:
        """Deletes the new run, and puts the one that it was to replace back."""
        if self._replaced is None:
            self._folder.delete()
        else:
            self._replaced.put_back()


@contextlib.contextmanager
def undone_if_empty(
    notes: FolderNotes, request: TrainRequest, checkpointer: Checkpointer
) -> Iterator[None]:
    """Leaves things as they were if a new run ends before there is anything of it."""
    try:
        yield
    except BaseException:
        if not (notes.has_begun or request.resume or checkpointer.latest() is not None):
            notes.undo()
        raise


def _warn_of_changes(before: RunConfig, after: RunConfig) -> None:
    """Warns if environment or network are no longer those that the run began with.

    `train_ppo` compares the rest with the checkpoint.
    """
    old, new = before.to_json(), after.to_json()
    changed = [
        f"`{part}.{name}` was {old[part][name]!r} and is {value!r}"
        for part in ("env", "network")
        for name, value in new[part].items()
        if old[part][name] != value
    ]
    if changed:
        warnings.warn(
            f"The run goes on with other settings than it began with: {'; '.join(changed)}.",
            stacklevel=2,
        )
