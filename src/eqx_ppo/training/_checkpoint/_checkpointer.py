"""A directory of checkpoints."""

import math
import os
import uuid
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, final

import jax

from eqx_ppo.algorithms import TrainingState, join_network, split_network
from eqx_ppo.networks import StatefulModule
from eqx_ppo.training._checkpoint._errors import CheckpointError
from eqx_ppo.training._checkpoint._fingerprint import array_text
from eqx_ppo.training._checkpoint._metadata import (
    CheckpointMetadata,
    Manifest,
    RunRecord,
    installed_versions,
    now,
)
from eqx_ppo.training._checkpoint._pack import pack
from eqx_ppo.training._checkpoint._reader import Reader
from eqx_ppo.training._checkpoint._store import Retention, StoredCheckpoint, Writer
from eqx_ppo.training._checkpoint._template import PARTS, NetworkTemplate, Part, StateTemplate

_SET_ASIDE = "set_aside"


@final
class Checkpointer:
    """Saves training states in a directory, and restores them.

    Each checkpoint is a folder named by the count of environment steps. It appears by one
    rename when everything in it is written, so that a run killed at any moment leaves only
    complete ones. What is in it: every array of the training state, with a digest of its
    bytes; and readable JSON with the structure of the network, the settings of the run, and
    versions. No code is ever stored, or run from a file.

    ```python
    with Checkpointer("runs/swing_up/checkpoints", keep=3, keep_best=1) as checkpointer:
        train_ppo(env, network, config, checkpointer=checkpointer)
    ```

    To read, nothing has to be closed, and the directory need not be writable.

    **Arguments:**

    - `directory`: created by the first save.
    - `keep`: how many of the newest checkpoints stay; `None` for all.
    - `keep_best`: how many of the best stay besides, by `best_metric`. Only checkpoints for
        which that metric is known take part: those saved right after an evaluation, so choose
        `checkpoint_every_steps` as a multiple of the evaluations' `every_steps`.
    - `best_metric`, `best_mode`: what is best: the highest (`"max"`) or lowest (`"min"`).
    - `asynchronous`: whether `save` returns as soon as the arrays are copied, and files are
        written in the background.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        keep_best: int = 0,
        best_metric: str = "eval/episode_reward/mean",
        best_mode: Literal["max", "min"] = "max",
        asynchronous: bool = True,
    ):
        if (keep is not None and keep < 1) or keep_best < 0:
            raise ValueError(
                "`Checkpointer` needs `keep` of at least 1 (or `None`) and `keep_best` of at least "
                f"0, but got keep={keep} and keep_best={keep_best}."
            )
        if best_mode not in ("max", "min"):
            raise ValueError(f'`best_mode` must be "max" or "min", but got {best_mode!r}.')
        self.directory = Path(directory)
        self._reader = Reader(self.directory)
        self._retention = Retention(keep=keep, keep_best=keep_best)
        self._best_metric = best_metric
        self._best_sign = 1.0 if best_mode == "max" else -1.0
        self._asynchronous = asynchronous
        self._writer: Writer | None = None
        self._scores: dict[int, float | None] = {}
        self._known: tuple[object, StateTemplate] | None = None

    # --- Looking ------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, in ascending order."""
        return self._reader.steps()

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint; `None` if there is none."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The step of the best checkpoint there is, the newer of equals; `None` for none."""
        known = {step: score for step, score in self._reader.scores().items() if score is not None}
        return max(known, key=lambda step: (known[step], step), default=None)

    def metadata(self, step: int | None = None) -> CheckpointMetadata:
        """What is stored beside the arrays.

        **Arguments:**

        - `step`: of which checkpoint, whatever has become of its arrays; by default the one
            that `restore` takes.

        **Raises:** `CheckpointError`, as `restore` does.
        """

        def read(candidate: int) -> CheckpointMetadata:
            if step is None:
                self._reader.verify_arrays(candidate)
            return self._reader.manifest(candidate).metadata

        return self._reader.newest_sound(step, read)

    # --- Restoring ----------------------------------------------------------------------------

    def restore(
        self,
        template: TrainingState,
        *,
        step: int | None = None,
        parts: Collection[Part] = PARTS,
    ) -> TrainingState:
        """A saved training state.

        **Arguments:**

        - `template`: a state of the same structure, as `new_training_state` makes it. It stays
            as it is.
        - `step`: which checkpoint; by default the newest one that is sound. A damaged one is
            skipped, with a warning that says so.
        - `parts`: what to take from the checkpoint: any of `"network"`, `"optimizer_state"`,
            `"rollout_state"`, `"key"` and `"counts"`. The rest comes from `template`, and only
            the parts that are taken have to agree with it.

        **Raises:** `StructureMismatchError` for another network, optimizer or environment;
        `DamagedCheckpointError` for the chosen checkpoint; `CheckpointError` if there is none.
        """
        unknown = set(parts) - set(PARTS)
        if unknown:
            raise ValueError(f"`parts` must be among {PARTS}, but got {sorted(unknown)}.")
        wanted = StateTemplate.of(template)
        return self._reader.newest_sound(step, lambda step: self._reader.state(step, wanted, parts))

    def restore_network(
        self, template: StatefulModule, *, step: int | None = None
    ) -> StatefulModule:
        """The network of a saved training state, with its statistics; see `restore`.

        **Arguments:**

        - `template`: a network of the same structure, with any weights.
        - `step`: which checkpoint; by default the newest one that is sound.
        """
        return self.network_and_metadata(template, step=step)[0]

    def network_and_metadata(
        self, template: StatefulModule, *, step: int | None = None
    ) -> tuple[StatefulModule, CheckpointMetadata]:
        """The network, and what is stored beside it, of one and the same checkpoint."""
        arrays, remainder = split_network(template)
        leaves, treedef = jax.tree.flatten(arrays)
        wanted = NetworkTemplate.of(join_network(arrays, remainder), leaves)

        def read(step: int) -> tuple[StatefulModule, CheckpointMetadata]:
            restored = jax.tree.unflatten(treedef, self._reader.network(step, wanted))
            return join_network(restored, remainder), self._reader.manifest(step).metadata

        return self._reader.newest_sound(step, read)

    def resume(self, template: StateTemplate) -> tuple[TrainingState, CheckpointMetadata]:
        """The newest sound state, and what is stored beside it."""

        def read(step: int) -> tuple[TrainingState, CheckpointMetadata]:
            return self._reader.state(step, template, PARTS), self._reader.manifest(step).metadata

        return self._reader.newest_sound(None, read)

    # --- Saving -------------------------------------------------------------------------------

    def save(
        self,
        state: TrainingState,
        steps: int,
        *,
        metrics: Mapping[str, float] | None = None,
        run: RunRecord | None = None,
    ) -> None:
        """Saves a state; it may be donated as soon as this returns.

        With `asynchronous`, an error of this save is raised by `wait` or `close`, or is a
        warning of the next save.

        **Arguments:**

        - `state`: the training state, from outside compiled code.
        - `steps`: the name of the checkpoint: environment steps that were done, at least 0. A
            checkpoint of that name is set aside.
        - `metrics`: in which `best_metric` is looked up.
        - `run`: what else to store about the run.

        **Raises:** `CheckpointError` if it cannot be written; the next save tries anew.
        `ValueError` for negative steps.
        """
        if steps < 0:
            raise ValueError(f"`steps` must be at least 0, but got {steps}.")
        template = self._template(state)
        network = pack(template.network.paths, template.network.leaves)
        rest = pack(template.paths, template.leaves)
        score = self._score({} if metrics is None else metrics)
        metadata = CheckpointMetadata(
            steps=int(steps),
            saved_at=now(),
            versions=installed_versions(),
            score=score,
            fingerprint=template.network.fingerprint,
            run=RunRecord() if run is None else run,
        )
        manifest = Manifest(metadata, network.leaves, rest.leaves)
        stored = StoredCheckpoint(manifest.to_json(), network.buffer, rest.buffer)
        self._write(int(steps), stored, metadata.score)

    def wait(self) -> None:
        """Returns when everything that was saved is on disk.

        **Raises:** `CheckpointError` if it could not be written.
        """
        self._guarded(Writer.wait)

    def close(self) -> None:
        """Waits, and releases what writing needs. It can be saved to again afterwards."""
        self._guarded(Writer.close)
        self._writer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def check_writable(self) -> None:
        """Makes the directory if it is not there, and writes to it.

        **Raises:** `CheckpointError` if that cannot be done.
        """
        self.close()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            probe = self.directory / f".writable-{uuid.uuid4().hex}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise CheckpointError(
                f"Checkpoints cannot be written to `{self.directory}`: {error}. Choose a folder "
                "that you may write to."
            ) from error

    def begin(self, continues_at: int | None) -> None:
        """Makes room for the checkpoints of a run, when nothing can refuse it any more.

        Checkpoints of another course of events, which are all for a new run, and those later
        than `continues_at` for a continued one, are set aside.
        """
        others = [step for step in self.steps() if continues_at is None or step > continues_at]
        if others:
            self._set_aside(others)
            warnings.warn(
                f"`{self.directory}` holds checkpoints that this run does not continue from, at "
                f"{_listed(others)} steps. They were moved to `{self.directory / _SET_ASIDE}`.",
                stacklevel=4,
            )

    # --- Inside -------------------------------------------------------------------------------

    def _template(self, state: TrainingState) -> StateTemplate:
        """What the state looks like: as the last one, mostly, for it takes a while to find."""
        leaves, treedef = jax.tree.flatten(state)
        texts = list(map(array_text, leaves))
        if self._known is None or self._known[0] != (treedef, texts):
            without_arrays = StateTemplate.of(state).with_leaves([])
            self._known = (treedef, texts), without_arrays
        return self._known[1].with_leaves(leaves)

    def _write(self, step: int, stored: StoredCheckpoint, score: float | None) -> None:
        if self._writer is None:
            self._scores = self._reader.scores()
        try:
            self.wait()
            if step in self._scores:
                self.close()
                self._set_aside([step])
        except CheckpointError as error:  # of the save before
            warnings.warn(str(error), RuntimeWarning, stacklevel=3)
        if self._writer is None:
            self._writer = Writer(
                self.directory, self._retention, self._scores, asynchronous=self._asynchronous
            )
        self._scores[step] = score
        self._guarded(lambda writer: writer.save(step, stored))

    def _guarded(self, action: Callable[[Writer], None]) -> None:
        """Lets the writer act; after a failure the next save starts with a new one."""
        if self._writer is None:
            return
        try:
            action(self._writer)
        except CheckpointError:
            self._writer = None
            raise

    def _score(self, metrics: Mapping[str, float]) -> float | None:
        """The higher the better; `None` if it is not known, or no number."""
        value = metrics.get(self._best_metric, math.nan)
        return self._best_sign * float(value) if math.isfinite(value) else None

    def _set_aside(self, steps: Sequence[int]) -> None:
        """Moves checkpoints out of the way, the newest first."""
        place = self.directory / _SET_ASIDE
        for step in sorted(steps, reverse=True):
            source, target = self.directory / str(step), place / str(step)
            copy = 0
            while target.exists():
                copy += 1
                target = place / f"{step}.{copy}"
            if source.exists():
                place.mkdir(exist_ok=True)
                source.rename(target)


def restore_network(
    path: str | os.PathLike[str], template: StatefulModule, *, step: int | None = None
) -> StatefulModule:
    """The network of a saved run, for use without its environment.

    ```python
    network = restore_network("runs/swing_up/checkpoints", make_my_network(jax.random.key(0)))
    ```

    **Arguments:**

    - `path`: the directory that a `Checkpointer` has saved to.
    - `template`: a network of the same structure, with any weights; it stays as it is.
    - `step`: which checkpoint; by default the newest one that is sound.

    **Raises:** `StructureMismatchError` for another network, with the first places that differ;
    `DamagedCheckpointError`, `CheckpointError`.
    """
    return Checkpointer(path).restore_network(template, step=step)


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(f"{step:,}" for step in steps)
