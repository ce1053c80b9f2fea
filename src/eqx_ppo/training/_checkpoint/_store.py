"""Checkpoints on disk: written in the background, and by Orbax, which makes them atomic and
deletes old ones.

A checkpoint is a folder named by its step, in which a folder `checkpoint` holds three files:
`metadata.json`, and the arrays in `network.bin` and `rest.bin`. Nothing here knows what is
in them.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, final

import numpy as np

from eqx_ppo._typing import Tree
from eqx_ppo.training._checkpoint._errors import CheckpointError, DamagedCheckpointError

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

BufferName: TypeAlias = Literal["network", "rest"]

_ITEM = "checkpoint"
_METADATA = "metadata.json"


class StoredCheckpoint(NamedTuple):
    """What one checkpoint consists of: a text of JSON, and two buffers `uint8[N]`."""

    metadata: str
    network: np.ndarray
    rest: np.ndarray


# --- Reading ------------------------------------------------------------------------------


def complete_steps(directory: Path) -> list[int]:
    """The steps whose saves were finished, in ascending order.

    Before that, the name of a folder has an ending.
    """
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if _is_step(path))


def _is_step(path: Path) -> bool:
    return path.name.isdecimal() and path.name.isascii() and path.is_dir()


def unfinished_saves(directory: Path) -> list[str]:
    """The names of folders that a save has left behind unfinished."""
    if not directory.is_dir():
        return []
    return sorted(path.name for path in directory.iterdir() if "orbax-checkpoint-tmp" in path.name)


def read_metadata(directory: Path, step: int) -> Tree:
    """The JSON of a checkpoint.

    **Raises:** `DamagedCheckpointError` if there is none.
    """
    content = _read(directory, step, _METADATA)
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"its `{_METADATA}` is not JSON ({error})") from error


def read_buffer(directory: Path, step: int, name: BufferName) -> np.ndarray:
    """A buffer of a checkpoint.

    **Raises:** `DamagedCheckpointError` if it cannot be read.
    """
    return np.frombuffer(_read(directory, step, f"{name}.bin"), np.uint8)


def _read(directory: Path, step: int, name: str) -> bytes:
    try:
        return (directory / str(step) / _ITEM / name).read_bytes()
    except OSError as error:
        raise DamagedCheckpointError(
            f"its `{name}` cannot be read ({type(error).__name__}: {error.strerror})"
        ) from error


# --- Writing ------------------------------------------------------------------------------


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints stay.

    **Arguments:**

    - `keep`: this many of the newest; `None` for all.
    - `keep_best`: and this many with the highest score.
    """

    keep: int | None
    keep_best: int

    def kept(self, steps: Sequence[int], scores: Mapping[int, float | None]) -> set[int]:
        """The steps to keep, out of `steps` in the order of their saves."""
        newest = steps if self.keep is None else steps[max(len(steps) - self.keep, 0) :]
        scored = [step for step in steps if scores.get(step) is not None]
        scored.sort(key=lambda step: (scores[step], step))
        return {*newest, *scored[max(len(scored) - self.keep_best, 0) :]}


@final
class Writer:
    """Writes checkpoints into a directory that it creates."""

    def __init__(
        self,
        directory: Path,
        retention: Retention,
        scores: Mapping[int, float | None],
        *,
        asynchronous: bool,
    ):
        """**Arguments:**

        - `directory`: created if it is not there.
        - `retention`: which checkpoints stay when another was saved.
        - `scores`: of the checkpoints by step; looked up after every save.
        - `asynchronous`: whether `save` returns before everything is on disk.
        """
        import orbax.checkpoint as ocp

        # One thread of our own costs less than those that Orbax would start for every save.
        self._thread = ThreadPoolExecutor(1, "checkpoints") if asynchronous else None
        self._saving: Future[None] | None = None
        with _explained(f"Checkpoints cannot be written to `{directory}`"):
            self._manager = ocp.CheckpointManager(
                directory.absolute(),
                options=ocp.CheckpointManagerOptions(
                    enable_async_checkpointing=False,
                    cleanup_tmp_directories=True,
                    preservation_policy=_Policy(retention, scores),
                ),
            )

    def save(self, step: int, checkpoint: StoredCheckpoint) -> None:
        """Begins a save, after the one before it is finished."""
        self.wait()
        if self._thread is None:
            self._save(step, checkpoint)
        else:
            self._saving = self._thread.submit(self._save, step, checkpoint)

    def wait(self) -> None:
        """Returns when everything is on disk."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def close(self) -> None:
        """Waits, and ends the thread."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            self._manager.close()

    def _save(self, step: int, checkpoint: StoredCheckpoint) -> None:
        import orbax.checkpoint as ocp

        from eqx_ppo.training._checkpoint._handler import FilesSave

        files = {
            _METADATA: checkpoint.metadata.encode(),
            "network.bin": checkpoint.network.data,
            "rest.bin": checkpoint.rest.data,
        }
        with _explained(f"The checkpoint of step {step:,} could not be written"):
            items = ocp.args.Composite(**{_ITEM: FilesSave(files)})
            self._manager.save(step, args=items, force=True)


@final
class _Policy:
    """Says to Orbax what `Retention` says."""

    def __init__(self, retention: Retention, scores: Mapping[int, float | None]):
        self._retention = retention
        self._scores = scores

    def should_preserve(
        self,
        checkpoints: "Sequence[ocp.checkpoint_managers.PolicyCheckpointInfo]",
        *,
        context: Tree,
    ) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = self._retention.kept(steps, self._scores)
        return [step in kept for step in steps]


@contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        first_line = str(error).strip().split("\n")[0][:300]
        raise CheckpointError(
            f"{what} ({type(error).__name__}: {first_line}). Is the disk full, or the folder not "
            "writable? Checkpoints that were complete before are still there."
        ) from error
