"""What is wrong with a checkpoint."""

from typing import final


class CheckpointError(Exception):
    """A checkpoint cannot be written or read; the base of the two that say more.

    What was saved before is still there.
    """


@final
class DamagedCheckpointError(CheckpointError):
    """A checkpoint is not what was written: incomplete, changed on disk, or no checkpoint."""


@final
class StructureMismatchError(CheckpointError):
    """A checkpoint was saved from another network, optimizer, environment or reset strategy.

    The message lists the first places that differ.
    """
