"""Finding and reading checkpoints in a directory, without writing anything."""

import warnings
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar, final

import jax.numpy as jnp
from jaxtyping import Array

from eqx_ppo.algorithms import TrainingState
from eqx_ppo.training._checkpoint._errors import (
    CheckpointError,
    DamagedCheckpointError,
    StructureMismatchError,
)
from eqx_ppo.training._checkpoint._fingerprint import first_differences
from eqx_ppo.training._checkpoint._metadata import Manifest
from eqx_ppo.training._checkpoint._pack import Packed, PackedLeaf, unpack, verify
from eqx_ppo.training._checkpoint._store import (
    BufferName,
    complete_steps,
    read_buffer,
    read_metadata,
    unfinished_saves,
)
from eqx_ppo.training._checkpoint._template import (
    Leaf,
    NetworkTemplate,
    Part,
    StateTemplate,
    is_in,
)

_T = TypeVar("_T")


@final
class Reader:
    """Reads the checkpoints of a directory.

    Whatever it reads it compares with the digests that were written with it.
    """

    def __init__(self, directory: Path):
        self.directory = directory

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, in ascending order."""
        return complete_steps(self.directory)

    def scores(self) -> dict[int, float | None]:
        """The score of every checkpoint."""
        found: dict[int, float | None] = {}
        for step in self.steps():
            try:
                found[step] = self.manifest(step).metadata.score
            except CheckpointError:
                found[step] = None  # it is said when the checkpoint is restored
        return found

    def newest_sound(self, step: int | None, read: Callable[[int], _T]) -> _T:
        """What `read` gives for a step; without one, for the newest step that is not damaged."""
        if step is not None:
            return self._read_at(step, read)
        failures: list[str] = []
        for candidate in reversed(self.steps()):
            try:
                found = self._read_at(candidate, read)
            except DamagedCheckpointError as error:
                failures.append(str(error))
                continue
            if failures:
                told = " ".join(failures)
                warnings.warn(
                    f"{told} Taken instead is the newest sound one, of {candidate:,} steps.",
                    stacklevel=4,
                )
            return found
        if failures:
            told = " ".join(failures)
            raise DamagedCheckpointError(f"`{self.directory}` holds no sound checkpoint. {told}")
        raise CheckpointError(self._nothing_there())

    def manifest(self, step: int) -> Manifest:
        """What a checkpoint holds."""
        return Manifest.from_json(read_metadata(self.directory, step))

    def verify_arrays(self, step: int) -> None:
        """Compares all bytes with their digests.

        **Raises:** `DamagedCheckpointError` if some are missing or have changed.
        """
        manifest = self.manifest(step)
        buffers: tuple[tuple[BufferName, list[PackedLeaf]], ...] = (
            ("network", manifest.network),
            ("rest", manifest.rest),
        )
        for name, leaves in buffers:
            verify(Packed(read_buffer(self.directory, step, name), leaves))

    def network(self, step: int, wanted: NetworkTemplate) -> list[Array]:
        """The arrays of the network.

        **Raises:** `StructureMismatchError` where it is another network.
        """
        manifest = self.manifest(step)
        found = first_differences(manifest.metadata.fingerprint, wanted.fingerprint)
        if found:
            raise StructureMismatchError(
                f"The checkpoint `{self.directory / str(step)}` was saved from another network. "
                f"Build the network as it was then. The first differences:{found}"
            )
        return self._arrays(step, "network", manifest.network, wanted.leaves)

    def state(self, step: int, wanted: StateTemplate, parts: Collection[Part]) -> TrainingState:
        """A training state, of which `parts` are read and the others copied from `wanted`.

        **Raises:** `StructureMismatchError` where a part that is read is another one.
        """
        network = wanted.network.leaves
        network = self.network(step, wanted.network) if "network" in parts else _copied(network)
        rest = self._rest(step, wanted, parts)
        others = {
            path: leaf
            for path, leaf in zip(wanted.paths, wanted.leaves, strict=True)
            if path not in rest
        }
        rest |= dict(zip(others, _copied(list(others.values())), strict=True))
        return wanted.join(network, [rest[path] for path in wanted.paths])

    def _rest(self, step: int, wanted: StateTemplate, parts: Collection[Part]) -> dict[str, Array]:
        """What is read besides the network, by path."""
        saved_leaves = self.manifest(step).rest
        saved = {leaf.path: leaf.text for leaf in saved_leaves if is_in(leaf.path, parts)}
        taken = {path: text for path, text in wanted.rest.items() if is_in(path, parts)}
        if saved != taken:
            raise StructureMismatchError(
                f"The checkpoint `{self.directory / str(step)}` was saved with another optimizer, "
                "environment, number of environments or reset strategy. Build them as they were "
                f"then. The first differences:{first_differences(saved, taken)}"
            )
        if not taken:
            return {}
        templates = dict(zip(wanted.paths, wanted.leaves, strict=True))
        known = [templates[leaf.path] if leaf.path in taken else None for leaf in saved_leaves]
        arrays = self._arrays(step, "rest", saved_leaves, known)
        paths = [leaf.path for leaf in saved_leaves if leaf.path in taken]
        return dict(zip(paths, arrays, strict=True))

    def _arrays(
        self,
        step: int,
        name: BufferName,
        leaves: Sequence[PackedLeaf],
        templates: Sequence[Leaf | None],
    ) -> list[Array]:
        buffer = read_buffer(self.directory, step, name)
        return unpack(Packed(buffer, list(leaves)), templates)

    def _read_at(self, step: int, read: Callable[[int], _T]) -> _T:
        if step not in self.steps():
            there = ", ".join(f"{step:,}" for step in self.steps()) or "none"
            raise CheckpointError(
                f"`{self.directory}` holds no checkpoint of {step:,} steps, but of {there}."
            )
        try:
            return read(step)
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(
                f"The checkpoint `{self.directory / str(step)}` is damaged, or is none: {error}."
            ) from error

    def _nothing_there(self) -> str:
        if not self.directory.is_dir():
            return f"There is no folder `{self.directory}`."
        unfinished = unfinished_saves(self.directory)
        rest = f", only saves that were not finished: {unfinished}" if unfinished else ""
        return (
            f"There is no complete checkpoint in `{self.directory}`{rest}. Give the folder that "
            "a `Checkpointer` has saved to."
        )


def _copied(leaves: Sequence[Leaf]) -> list[Array]:
    return [jnp.copy(leaf) for leaf in leaves]
